"""Why prompts do not hit: each cause by example, and many random ones beside an oracle that knows why.

PAGEPOOL_TEST_OPERATIONS: half as many requests are explained in all.
"""

from __future__ import annotations

from collections import Counter

import pytest
from explaining import WORLDS, Explaining, World
from settings import NUM_OPERATIONS

from pagepool import MissCause

MIN_RATE = 0.99
PLAIN = {MissCause.COMPLETE, MissCause.NO_FULL_PAGE, MissCause.UNCACHED}
"""Causes of requests that miss nothing that was computed; they do not count as misses."""


def show(confusion: Counter[tuple[MissCause, MissCause]]) -> str:
    """Return a table of the right causes, and of those given in their place."""
    return "\n".join(f"{right.value:>16} -> {given.value:16} {count}" for (right, given), count in sorted(confusion.items()))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_causes_are_those_of_an_oracle(world: World) -> None:
    num_requests = max(40, NUM_OPERATIONS // 2 // len(WORLDS))
    confusion: Counter[tuple[MissCause, MissCause]] = Counter()
    faults: list[str] = []
    for seed in range(-(-num_requests // 400)):
        explaining = Explaining(world, seed)
        for _ in range(min(400, num_requests)):
            explaining.step()
        confusion += explaining.confusion
        faults += [f"seed {seed}: {fault}" for fault in explaining.faults]
    misses = {pair: count for pair, count in confusion.items() if pair[0] not in PLAIN}
    num_misses = sum(misses.values())
    num_right = sum(count for (right, given), count in misses.items() if right == given)
    shown = "\n".join([f"{num_right} of {num_misses} misses named right", show(confusion), *faults[:5]])
    print(shown)
    assert num_right >= MIN_RATE * num_misses, shown
    assert all(right == given for right, given in confusion if right in PLAIN), shown
