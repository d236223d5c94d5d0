"""The choice of an eviction policy for vLLM's pools."""

from collections.abc import Sequence

from pagepool.compat.switch import read_word
from pagepool.compat.vllm.engine import Part, Replacement
from pagepool.errors import CompatError

__all__ = ["ADAPTIVE", "ADAPTIVE_QUEUE", "EVICTION_VARIABLE", "choices_for", "is_adaptive", "replacements"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""The environment variable that names the policy."""

ADAPTIVE = "adaptive"
"""The value that chooses pagepool's adaptive eviction, in any case, with or without whitespace around it."""

ADAPTIVE_QUEUE = "AdaptiveQueue"
"""The class of `policy_queue.pyx` that stands for vLLM's free queue with adaptive eviction."""

ADAPTIVE_NEEDS = ("blocks", "pool", "slots")
"""The parts that tell the queue of an adaptive policy what is cached, hit and begun."""


def is_adaptive() -> bool:
    """Return whether `EVICTION_VARIABLE` chooses adaptive eviction, not vLLM's order. CompatError for an unknown value."""
    return read_word(EVICTION_VARIABLE, (ADAPTIVE,), ("lru",)) == ADAPTIVE


def choices_for(item: Replacement) -> list[Replacement]:
    """Return what may replace a definition of vLLM: the free queue has one more for adaptive eviction."""
    return [item, item._replace(module="policy_queue", ours=ADAPTIVE_QUEUE)] if item.ours == "Queue" else [item]


def replacements(parts: Sequence[Part]) -> list[Replacement]:
    """Return the replacements of parts, with the queue that `EVICTION_VARIABLE` chooses. CompatError if that needs others."""
    missing = [name for name in ADAPTIVE_NEEDS if name not in {part.name for part in parts}]
    if is_adaptive() and missing:
        raise CompatError(f"{EVICTION_VARIABLE}: got {ADAPTIVE}, which needs what is left to vLLM: {', '.join(missing)}")
    return [choices_for(item)[-is_adaptive()] for part in parts for item in part.replacements]
