"""The choice of an eviction policy for vLLM's pools, and whether they listen to requests."""

import os
from collections.abc import Sequence

from pagepool.compat.switch import OFF, read_word
from pagepool.compat.vllm.engine import HINTS, PARTS, Part, Replacement
from pagepool.errors import CompatError

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""Environment variable naming the policy."""

ADAPTIVE = "adaptive"
"""Value for pagepool's adaptive eviction, in any case, with or without whitespace around it."""

HINTS_VARIABLE = "PAGEPOOL_VLLM_HINTS"
"""Environment variable that lets pools listen to requests: `SESSIONS` or `ALL`."""

SESSIONS = "sessions"
"""Value for ids of sessions alone."""

ALL = "all"
"""Value for all hints, also times, ends and envelopes."""

SHARES_VARIABLE = "PAGEPOOL_VLLM_SHARES"
"""Environment variable with the shares of salts in pools that listen: ``salt:share``, separated by commas. The salt ``*``
stands for each salt not named."""

PINS_VARIABLE = "PAGEPOOL_VLLM_PINS"
"""Environment variable with the share of a pool's blocks that requests may pin, up to `MAX_PINS`, if all hints are heard."""

MAX_PINS = 0.5
MAX_SHARES = 0.95
MAX_NUM_SHARES = 63

QUEUES = {
    (False, False): ("blocks", "Queue"),
    (True, False): ("policy_queue", "AdaptiveQueue"),
    (False, True): ("session_queue", "ListeningQueue"),
    (True, True): ("session_queue", "AdaptiveListeningQueue"),
}
"""Module and name of the class in place of vLLM's free queue, by whether eviction is adaptive, and whether it listens."""

ADAPTIVE_QUEUES = tuple(name for (is_adaptive, _), (_, name) in QUEUES.items() if is_adaptive)
LISTENING_QUEUES = tuple(name for (_, listens), (_, name) in QUEUES.items() if listens)

ADAPTIVE_NEEDS = ("blocks", "pool", "slots")
"""Parts that inform the queue of an adaptive policy about caching, hits and new requests."""


def is_adaptive() -> bool:
    """Whether `EVICTION_VARIABLE` chooses adaptive eviction, not vLLM's order. Raise CompatError for an unknown value."""
    return read_word(EVICTION_VARIABLE, (ADAPTIVE,), ("lru",)) == ADAPTIVE


def read_hints() -> str:
    """Return the value of `HINTS_VARIABLE`, "" if it is off. Raise CompatError for an unknown value."""
    word = read_word(HINTS_VARIABLE, (SESSIONS, ALL), OFF[:-1])
    return "" if word in OFF else word


def read_pins() -> float:
    """Return the share of `PINS_VARIABLE`, 0.0 if it is off. Raise CompatError for a wrong one, or unless hints are `ALL`."""
    value = os.environ.get(PINS_VARIABLE, "").strip()
    try:
        share = float(value or 0)
    except ValueError:
        share = -1.0
    if not 0 <= share <= MAX_PINS:
        raise CompatError(f"{PINS_VARIABLE}: got {value!r}, allowed: 0 to {MAX_PINS}")
    if share and read_hints() != ALL:
        raise CompatError(f"{PINS_VARIABLE}: got {value!r}, allowed: only with {HINTS_VARIABLE}={ALL}")
    return share


def read_shares() -> dict[str, float]:
    """Return the shares of `SHARES_VARIABLE` by salt. Raise CompatError for wrong shares, or if no pool listens."""
    value = os.environ.get(SHARES_VARIABLE, "").strip()
    if not value:
        return {}
    try:
        shares = {salt.strip(): float(share) for salt, _, share in (part.rpartition(":") for part in value.split(","))}
    except ValueError:
        shares = {}
    total = sum(shares.values())
    if not shares or not all(shares) or not (min(shares.values()) > 0 and total <= MAX_SHARES):  # salts are not shown
        allowed = f"salt:share, ..., each share above 0, all together at most {MAX_SHARES}"
        raise CompatError(f"{SHARES_VARIABLE}: got {len(value)} characters, allowed: {allowed}")
    if len(shares) > MAX_NUM_SHARES or not read_hints():
        needed = f"at most {MAX_NUM_SHARES} of them" if read_hints() else f"only with {HINTS_VARIABLE}"
        raise CompatError(f"{SHARES_VARIABLE}: got {len(shares)} shares, allowed: {needed}")
    return shares


def wanted_parts() -> tuple[Part, ...]:
    """Return the parts to be used, with `HINTS` if `HINTS_VARIABLE` is on."""
    return (*PARTS, HINTS) if read_hints() else PARTS


def choices_for(item: Replacement) -> list[Replacement]:
    """Return the possible replacements of a definition of vLLM: for the free queue, the classes of `QUEUES`."""
    if item.ours != "Queue":
        return [item]
    return [item._replace(module=module, ours=name) for module, name in QUEUES.values()]


def choice_for(item: Replacement, listens: bool) -> Replacement:
    """Return the replacement of a definition of vLLM, with the policy of `EVICTION_VARIABLE`."""
    if item.ours != "Queue":
        return item
    module, name = QUEUES[is_adaptive(), listens]
    return item._replace(module=module, ours=name)


def replacements(parts: Sequence[Part]) -> list[Replacement]:
    """Return the replacements of parts. `EVICTION_VARIABLE` chooses the queue, which listens if `parts` has `HINTS`.
    Raise CompatError if the policy needs missing parts.
    """
    missing = [name for name in ADAPTIVE_NEEDS if name not in {part.name for part in parts}]
    if is_adaptive() and missing:
        raise CompatError(f"{EVICTION_VARIABLE}: got {ADAPTIVE}, which needs what is left to vLLM: {', '.join(missing)}")
    return [choice_for(item, HINTS in parts) for part in parts for item in part.replacements]
