"""The plug-in that vLLM loads in each of its processes, before it builds a scheduler."""

from pagepool.compat.switch import read_switch
from pagepool.compat.vllm import KNOWN, STRICT, VARIABLE, install_if_asked, logger

__all__ = ["activate"]


def activate() -> None:
    """Install pagepool if `VARIABLE` asks for it. vLLM calls this once or more in each process.

    If vLLM is refused, logs one warning and leaves vLLM as it is; with `STRICT` raises CompatError. vLLM logs and drops what
    the import of a plug-in raises; what this call raises ends vLLM's start.
    """
    try:
        install_if_asked()
    except Exception as error:
        if read_switch(VARIABLE, (KNOWN, STRICT)) == STRICT:
            raise
        logger.warning("vLLM allocates without pagepool: %s", error)
