"""The plug-in that vLLM loads in each of its processes, before it builds a scheduler."""

import logging

from pagepool.compat.switch import read_switch
from pagepool.compat.vllm import STRICT, VARIABLE, install_if_asked

__all__ = ["activate"]

logger = logging.getLogger("vllm.pagepool")  # vLLM formats and shows the messages of its own loggers only


def activate() -> None:
    """Install pagepool if `VARIABLE` asks for it. vLLM calls this once or more in each process.

    If vLLM is refused, logs one warning and leaves vLLM as it is; with `STRICT` raises CompatError. vLLM logs and drops what
    the import of a plug-in raises; what this call raises ends vLLM's start.
    """
    is_strict = read_switch(VARIABLE, (STRICT,)) == STRICT
    try:
        install_if_asked()
    except Exception as error:
        if is_strict:
            raise
        logger.warning("vLLM allocates without pagepool: %s", error)
