"""Pages of equal content in data-parallel shards: the first of a shard is found at once, for any number of others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    PageTable,
    RunningBatch,
)

PAGE_SIZE = 4
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
NUM_PAGES_OF_PROMPT = 8
PROMPT = list(range(NUM_PAGES_OF_PROMPT * PAGE_SIZE))
NUM_SHARDS = 4
FEW, MANY = 20, 10_000


def median_seconds(call: Callable[[], object], num_calls: int = 51) -> float:
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def make_manager(num_twins: int) -> CacheManager:
    """Make a manager in whose shard 0 a prompt was repeated without a look-up, and then once in shard 1."""
    pages_per_shard = num_twins * NUM_PAGES_OF_PROMPT + 10
    manager = CacheManager(NUM_SHARDS * pages_per_shard, [CacheGroupSpec(FULL)], 64)
    for i in range(num_twins + 1):
        request = EngineRequest(f"{i}", PROMPT)
        options = {"dp_shard_hint": int(i == num_twins), "data_parallel_size": NUM_SHARDS}
        assert manager.allocate_slots(request, len(PROMPT), **options) is not None
    return manager


def hit(manager: CacheManager, shard: int) -> tuple[list[int], int]:
    request = EngineRequest("asks", [*PROMPT, 99])
    hits, num_hit_tokens = manager.get_computed_pages(request, dp_shard_hint=shard, data_parallel_size=NUM_SHARDS)
    manager.free_page_hashes(request)
    return hits.get_page_ids()[0], num_hit_tokens


def test_a_look_up_takes_no_longer_for_many_twins_in_another_shard() -> None:
    few, many = make_manager(FEW), make_manager(MANY)
    first = many.num_pages // NUM_SHARDS
    assert hit(many, 1) == (list(range(first, first + NUM_PAGES_OF_PROMPT)), len(PROMPT))
    assert hit(many, 2) == ([], 0)
    seconds = [median_seconds(lambda manager=manager: hit(manager, 1)) for manager in (few, many)]
    print(f"a look-up: {seconds[0] * 1e6:.0f} us beside {FEW} twins, {seconds[1] * 1e6:.0f} us beside {MANY}")
    assert seconds[1] < 4 * seconds[0]
    many.check()


def test_an_admission_takes_no_longer_for_many_twins_in_another_shard() -> None:
    seconds = []
    for num_twins in (FEW, MANY):
        manager = make_manager(num_twins)
        batch = RunningBatch(manager, PageTable(1, 16, 64), data_parallel_size=NUM_SHARDS)

        def admit(batch: RunningBatch = batch) -> None:
            assert batch.admit(0, [*PROMPT, 99], dp_shard=1) == len(PROMPT)
            batch.release([0])

        assert batch.admit(0, [*PROMPT, 99], dp_shard=2) == 0
        batch.release([0])
        seconds.append(median_seconds(admit))
        batch.check()
    print(f"an admission: {seconds[0] * 1e6:.0f} us beside {FEW} twins, {seconds[1] * 1e6:.0f} us beside {MANY}")
    assert seconds[1] < 4 * seconds[0]


class PlainPool:
    """The pages under each key in the order of caching."""

    def __init__(self) -> None:
        self.pages_by_key: dict[int, list[int]] = {}

    def enter(self, page_id: int, key: int) -> None:
        self.pages_by_key.setdefault(key, []).append(page_id)

    def drop(self, page_id: int) -> None:
        for pages in self.pages_by_key.values():
            if page_id in pages:
                pages.remove(page_id)

    def find(self, key: int, start: int, stop: int) -> int | None:
        return next((page_id for page_id in self.pages_by_key.get(key, []) if start <= page_id < stop), None)


def assert_same(pool: PagePool, plain: PlainPool, ranges: list[tuple[int, int]]) -> None:
    for key, pages in plain.pages_by_key.items():
        for start, stop in ranges:
            assert pool.store.find(key, 0, start, stop) == plain.find(key, start, stop)
        if pages:
            assert pool.store.twins(pages[0]).to_list() == pages
    pool.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_range_finds_the_page_that_was_cached_first_in_it(seed: int) -> None:
    """Pages come and go under a few keys, before and after the pool is divided, and divided otherwise; ranges are shards,
    parts of them and more than one.
    """
    rng = Random(seed)
    num_pages = 48
    pool, plain = PagePool(num_pages, True), PlainPool()
    cached: list[int] = []
    for i in range(400):
        if i in (40, 150, 300) or rng.random() < 0.01:
            pool.get_new_page_ids(0, dp_shard_hint=0, data_parallel_size=rng.choice((1, 2, 3, 4, 16, 48)))
        if cached and (len(cached) == num_pages - 1 or rng.random() < 0.45):
            page_id = cached.pop(rng.randrange(len(cached)))
            pool.evict_pages([page_id])
            plain.drop(page_id)
        else:
            page_id, key = rng.choice([n for n in range(1, num_pages) if n not in cached]), rng.randrange(3)
            pool.store.enter(page_id, key, 0)
            plain.enter(page_id, key)
            cached.append(page_id)
        size = num_pages // rng.choice((1, 2, 3, 4, 16))
        start = rng.randrange(num_pages)
        ranges = [(start // size * size, start // size * size + size), (start, rng.randrange(num_pages + 1))]
        assert_same(pool, plain, [*ranges, (start, 1 << 30), (0, 0), (start, start)])
        if rng.random() < 0.05:
            pool = PagePool.restore(pool.snapshot())
    pool.check()


@pytest.mark.parametrize("options", [{}, {"dp_shard_hint": 1, "data_parallel_size": 2}])
def test_a_pool_that_is_divided_late_knows_its_twins(options: dict[str, Any]) -> None:
    pool = PagePool(16, True)
    for page_id in (9, 3, 12, 5):
        pool.pages[page_id].page_hash = PageHashWithGroupId(PageHash(7, ()), 0)
    pool.get_new_page_ids(0, **options)
    found = [
        pool.get_cached_page_ids(PageHash(7, ()), [0], dp_shard_hint=shard, data_parallel_size=2).tolist() for shard in range(2)
    ]
    assert found == [[3], [9]]
    assert pool.reset_prefix_cache()
    pool.check()
