"""The choice of an eviction policy for vLLM's pools."""

import os

from pagepool.errors import CompatError

__all__ = ["EVICTION_VARIABLE", "QUEUES", "read_eviction"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""The environment variable that names the policy."""

QUEUES = {"adaptive": "make_adaptive_queue", "arc": "make_arc_queue"}
"""The values that choose one of pagepool's policies, in any case, with or without whitespace around them, and the functions of
`policy_queue.pyx` that stand for vLLM's class of free queues then.
"""

LRU = ("lru", "")
"""The values with which vLLM's own order stays."""


def read_eviction() -> str | None:
    """Return the policy that `EVICTION_VARIABLE` names; None: vLLM's own order. CompatError for any other value."""
    value = os.environ.get(EVICTION_VARIABLE, "")
    word = value.strip().lower()
    if word not in (*QUEUES, *LRU):
        raise CompatError(f"{EVICTION_VARIABLE}: got {value!r}, allowed: {', '.join(QUEUES)}; lru or nothing")
    return word if word in QUEUES else None
