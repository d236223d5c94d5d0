"""Calls of a manager with nothing due, as in most steps of decoding: `cache_pages`, for engines that enter pages once they are
computed, beside `allocate_slots`.
"""

from __future__ import annotations

from bench.races.race import LATE, Race, Work
from bench.workload import PAGE_SIZE, BenchRequest, make_group, random_tokens
from pagepool import CacheManager, specs

NUM_CALLS = 1000
NUM_TURNS = 20
NUM_TOKENS = 100 * PAGE_SIZE + 2


class Idle:
    """A request calls again and again."""

    def __init__(self) -> None:
        self.manager = CacheManager(200, [make_group(specs)], 2 * NUM_TOKENS)
        self.request = BenchRequest("idle", random_tokens(NUM_TOKENS + 1, 0))
        self.manager.allocate_slots(self.request, NUM_TOKENS)  # type: ignore[arg-type]  # the attributes that are read
        self.request.num_computed_tokens = NUM_TOKENS

    def prepare(self) -> None:
        pass

    @property
    def page_ids(self) -> tuple[list[int], ...]:
        return self.manager.get_page_ids("idle")


class IdleAllocation(Idle):
    def run(self) -> None:
        allocate_slots, request = self.manager.allocate_slots, self.request
        for _ in range(NUM_CALLS):
            allocate_slots(request, 1)  # type: ignore[arg-type]


class IdleCaching(Idle):
    def run(self) -> None:
        cache_pages, request = self.manager.cache_pages, self.request
        for _ in range(NUM_CALLS):
            cache_pages(request, NUM_TOKENS)  # type: ignore[arg-type]


def test_nothing_due(race: Race) -> None:
    contenders = {"allocate_slots": IdleAllocation(), LATE.ours: IdleCaching()}
    race(contenders, Work("nothing due", "call", NUM_CALLS, NUM_TURNS, suite=LATE))
