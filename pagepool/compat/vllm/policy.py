"""The choice of an eviction policy for vLLM's pools."""

from collections.abc import Sequence

from pagepool.compat.switch import read_word
from pagepool.compat.vllm.engine import Part, Replacement
from pagepool.errors import CompatError

__all__ = ["ADAPTIVE", "ADAPTIVE_QUEUE", "EVICTION_VARIABLE", "choices_for", "is_adaptive", "replacements"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""Environment variable naming the policy."""

ADAPTIVE = "adaptive"
"""Value for pagepool's adaptive eviction, in any case, with or without whitespace around it."""

ADAPTIVE_QUEUE = "AdaptiveQueue"
"""Class in `policy_queue.pyx` in place of vLLM's free queue, with adaptive eviction."""

ADAPTIVE_NEEDS = ("blocks", "pool", "slots")
"""Parts that inform the queue of an adaptive policy about caching, hits and new requests."""


def is_adaptive() -> bool:
    """Whether `EVICTION_VARIABLE` chooses adaptive eviction, not vLLM's order. Raise CompatError for an unknown value."""
    return read_word(EVICTION_VARIABLE, (ADAPTIVE,), ("lru",)) == ADAPTIVE


def choices_for(item: Replacement) -> list[Replacement]:
    """Return the possible replacements of a definition of vLLM: two for the free queue, the second with adaptive eviction."""
    return [item, item._replace(module="policy_queue", ours=ADAPTIVE_QUEUE)] if item.ours == "Queue" else [item]


def replacements(parts: Sequence[Part]) -> list[Replacement]:
    """Return the replacements of parts, with the queue chosen by `EVICTION_VARIABLE`. Raise CompatError if it needs missing
    parts.
    """
    missing = [name for name in ADAPTIVE_NEEDS if name not in {part.name for part in parts}]
    if is_adaptive() and missing:
        raise CompatError(f"{EVICTION_VARIABLE}: got {ADAPTIVE}, which needs what is left to vLLM: {', '.join(missing)}")
    return [choices_for(item)[-is_adaptive()] for part in parts for item in part.replacements]
