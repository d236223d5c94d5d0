"""The choice of an eviction policy for vLLM's pools."""

from pagepool.compat.switch import read_word
from pagepool.compat.vllm.engine import REPLACEMENTS, Replacement

__all__ = ["ADAPTIVE", "ADAPTIVE_QUEUE", "EVICTION_VARIABLE", "choices_for", "is_adaptive", "replacements"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""The environment variable that names the policy."""

ADAPTIVE = "adaptive"
"""The value that chooses pagepool's adaptive eviction, in any case, with or without whitespace around it."""

QUEUE = "FreeKVCacheBlockQueue"
"""What is replaced according to the policy."""

ADAPTIVE_QUEUE = "make_adaptive_queue"
"""The function of `policy_queue.pyx` that stands for vLLM's class of free queues with adaptive eviction."""


def is_adaptive() -> bool:
    """Return whether `EVICTION_VARIABLE` chooses adaptive eviction; otherwise vLLM's order stays. CompatError for an unknown
    value.
    """
    return read_word(EVICTION_VARIABLE, (ADAPTIVE,), ("lru",)) == ADAPTIVE


def choices_for(item: Replacement) -> list[Replacement]:
    """Return what may replace a definition of vLLM: the free queue has one more for adaptive eviction."""
    return [item, item._replace(module="policy_queue", ours=ADAPTIVE_QUEUE)] if item.name == QUEUE else [item]


def replacements() -> list[Replacement]:
    """Return `REPLACEMENTS`, with the queue that `EVICTION_VARIABLE` chooses."""
    place = -1 if is_adaptive() else 0
    return [choices_for(item)[place] for item in REPLACEMENTS]
