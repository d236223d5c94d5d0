"""What pages hold, with tokens from elsewhere, leases, forks and a host tier.

PAGEPOOL_TEST_OPERATIONS: ten times as many as there are steps.
"""

from __future__ import annotations

from external_contents import run
from settings import NUM_OPERATIONS

NUM_STEPS = 80


def test_what_is_read_is_what_was_computed_or_came() -> None:
    counts = run(range(max(NUM_OPERATIONS // 10 // NUM_STEPS, 30)), NUM_STEPS)
    print(counts)
    assert min(counts[name] for name in ("cached tokens", "tokens that came", "failures", "leases", "copies")) > 20
