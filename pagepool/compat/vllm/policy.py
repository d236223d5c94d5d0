"""The choice of an eviction policy for vLLM's pools."""

import os

from pagepool.compat.vllm.engine import REPLACEMENTS, Replacement
from pagepool.errors import CompatError

__all__ = ["EVICTION_VARIABLE", "QUEUE", "QUEUES", "choices_for", "read_eviction", "replacements"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""The environment variable that names the policy."""

QUEUE = "FreeKVCacheBlockQueue"
"""What is replaced according to the policy."""

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


def choices_for(item: Replacement) -> list[Replacement]:
    """Return what may replace a definition of vLLM: the free queue has one more for each policy."""
    return [item, *(_with_queue(item, queue) for queue in QUEUES.values())] if item.name == QUEUE else [item]


def replacements() -> list[Replacement]:
    """Return `REPLACEMENTS` with the queue of the policy that `read_eviction` returns."""
    policy = read_eviction()
    return [_with_queue(item, QUEUES[policy]) if policy and item.name == QUEUE else item for item in REPLACEMENTS]


def _with_queue(item: Replacement, name: str) -> Replacement:
    return item._replace(module="policy_queue", ours=name)
