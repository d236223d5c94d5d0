"""The plug-in that vLLM loads in each of its processes, before it builds a scheduler."""

from pagepool.compat.switch import read_switch
from pagepool.compat.vllm import KNOWN, STRICT, VARIABLE, install_if_asked, logger


def activate() -> None:
    """Install pagepool if `VARIABLE` asks for it. vLLM calls this once or more in each process.

    If vLLM is refused, log one warning and leave vLLM as it is; with `STRICT` raise CompatError. vLLM only logs errors from
    importing a plug-in, but an error from this call ends its start.
    """
    try:
        install_if_asked()
    except Exception as error:
        if read_switch(VARIABLE, (KNOWN, STRICT)) == STRICT:
            raise
        logger.warning("vLLM allocates without pagepool: %s", error)
