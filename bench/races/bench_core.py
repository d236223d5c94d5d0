"""The pool below the manager, with a thousand to a million pages: allocation, shard hints, the free queue, hits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from bench.races.race import Contender, Counted, Race, Work
from bench.races.rivals import OTHERS, PAGEPOOL, PAGEPOOL_ARRAYS, RIVALS, Rival
from bench.workload import PAGE_SIZE, random_page_ids, random_tokens

POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
NUM_TAKEN = 500
NUM_CALLS = 10
NUM_SHARDS = 8
NUM_REMOVED = 500
NUM_CACHED = 512
NUM_TURNS = 3  # few, because the oracle, and easydel with a shard hint, walk the whole pool
MAX_NUM_ORACLE_PAGES = 10_000


class TakeAndGiveBack:
    """Allocate pages and free them, tail first, several times."""

    def __init__(self, rival: Rival, num_pages: int, num_taken: int = NUM_TAKEN) -> None:
        self.rival = rival
        self.pool = rival.make_pool(num_pages)
        self.num_taken = num_taken
        self.num_units = NUM_CALLS * num_taken

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        for _ in range(NUM_CALLS):
            self.page_ids = self.rival.take_and_give_back(self.pool, self.num_taken)


class TakeFromShard(TakeAndGiveBack):
    """Allocate one page from each data-parallel shard in turn, and free it."""

    def run(self) -> None:
        self.page_ids = [
            self.rival.take_and_give_back(self.pool, 1, dp_shard_hint=shard, data_parallel_size=NUM_SHARDS)
            for shard in range(NUM_SHARDS)
        ]


class Remove:
    """Remove pages from random places of the free queue, and append each to it."""

    def __init__(self, rival: Rival, num_pages: int) -> None:
        self.rival = rival
        self.pool = rival.make_pool(num_pages)
        self.page_ids = random_page_ids(NUM_REMOVED, num_pages)
        self.pages = rival.get_pages(self.pool, self.page_ids)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.rival.remove_and_append(self.pool, self.pages)


class LookUp:
    """Find the pages of a cached prompt whose hashes are known, in one call per page."""

    def __init__(self, rival: Rival) -> None:
        self.rival = rival
        self.manager = rival.make_manager(2 * NUM_CACHED)
        self.request = rival.make_request("cached", random_tokens(NUM_CACHED * PAGE_SIZE, 0))
        rival.find_prefix(self.manager, self.request)
        self.manager.allocate_slots(self.request, self.request.num_tokens)
        self.pool, self.hashes = rival.get_pool(self.manager), rival.get_hashes(self.manager, self.request)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.page_ids = self.rival.look_up(self.pool, self.hashes)


class FindHits(LookUp):
    """Find all of them in one call."""

    def run(self) -> None:
        hits, _ = self.rival.find_prefix(self.manager, self.request)
        self.page_ids = self.rival.read_ids(hits)


def find_others(num_pages: int) -> list[Rival]:
    """Return the rivals whose pools of that size are fast enough to wait for."""
    return [rival for rival in OTHERS if rival.name != "oracle" or num_pages <= MAX_NUM_ORACLE_PAGES]


def count_with_vllm(contenders: dict[str, TakeAndGiveBack]) -> Mapping[str, Contender]:
    """Compare only the numbers of pages if vllm is among the contenders, whose pool gives uncached pages again first."""
    return {name: Counted(contender) for name, contender in contenders.items()} if "vllm" in contenders else contenders


@pytest.mark.parametrize("num_pages", POOL_SIZES)
@pytest.mark.parametrize(
    ("ours", "form"), [(PAGEPOOL_ARRAYS, "array of ids"), (PAGEPOOL, "page objects")], ids=["ids", "pages"]
)
def test_take_and_give_back(race: Race, ours: Rival, form: str, num_pages: int) -> None:
    rivals = [ours, *find_others(num_pages)]
    contenders = count_with_vllm({rival.name: TakeAndGiveBack(rival, num_pages) for rival in rivals})
    name = f"take and give back {NUM_TAKEN} ({form}), pool of {num_pages:,}"
    target = 17 if (ours, num_pages) == (PAGEPOOL_ARRAYS, 1_000_000) else None
    race(contenders, Work(name, "page", NUM_TAKEN * NUM_CALLS, NUM_TURNS, target))


@pytest.mark.parametrize("num_pages", POOL_SIZES[1:])
def test_take_from_shard(race: Race, num_pages: int) -> None:
    rivals = [PAGEPOOL, *(rival for rival in find_others(num_pages) if rival.name != "vllm")]  # which has no shards
    contenders = {rival.name: TakeFromShard(rival, num_pages) for rival in rivals}
    target = 10_500 if num_pages == 100_000 else None
    name = f"one page with a shard hint, pool of {num_pages:,}"
    race(contenders, Work(name, "page", NUM_SHARDS, NUM_TURNS, target))


@pytest.mark.parametrize("num_pages", POOL_SIZES)
def test_remove(race: Race, num_pages: int) -> None:
    contenders = {rival.name: Remove(rival, num_pages) for rival in RIVALS}
    name = f"remove from the free queue, append, pool of {num_pages:,}"
    race(contenders, Work(name, "page", NUM_REMOVED, 5 * NUM_TURNS))


@pytest.mark.parametrize(
    ("make_contender", "name"),
    [(LookUp, "look up a cached page"), (FindHits, f"find {NUM_CACHED} hits, hashed before")],
    ids=["page", "prompt"],
)
def test_look_up(race: Race, make_contender: Callable[[Rival], LookUp], name: str) -> None:
    contenders = {rival.name: make_contender(rival) for rival in RIVALS}
    race(contenders, Work(name, "page", NUM_CACHED, 5 * NUM_TURNS))
