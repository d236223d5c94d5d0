"""Pages of equal content in data-parallel shards: the first of a shard is found at once, for any number of others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from cpu_time import median_seconds

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    PagePool,
    PageTable,
    RequestTraits,
    RunningBatch,
)

PAGE_SIZE = 4
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
NUM_PAGES_OF_PROMPT = 8
PROMPT = list(range(NUM_PAGES_OF_PROMPT * PAGE_SIZE))
NUM_SHARDS = 4
FEW, MANY = 20, 10_000


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


def look_up(manager: CacheManager) -> Callable[[], None]:
    first = manager.num_pages // NUM_SHARDS
    expected = list(range(first, first + NUM_PAGES_OF_PROMPT)), len(PROMPT)
    assert hit(manager, 2) == ([], 0)

    def look_up_again() -> None:
        assert hit(manager, 1) == expected

    return look_up_again


def admit(manager: CacheManager) -> Callable[[], None]:
    batch = RunningBatch(manager, PageTable(1, 16, 64), data_parallel_size=NUM_SHARDS)
    assert batch.admit(0, [*PROMPT, 99], traits=RequestTraits(dp_shard=2)) == 0

    def admit_again() -> None:
        batch.release([0])
        assert batch.admit(0, [*PROMPT, 99], traits=RequestTraits(dp_shard=1)) == len(PROMPT)

    return admit_again


@pytest.mark.parametrize("make_call", [look_up, admit], ids=lambda make_call: make_call.__name__)
def test_many_twins_in_another_shard_cost_nothing(make_call: Callable[[CacheManager], Callable[[], None]]) -> None:
    managers = [make_manager(num_twins) for num_twins in (FEW, MANY)]
    seconds = [median_seconds(make_call(manager)) for manager in managers]
    print(f"{seconds[0] * 1e6:.0f} us beside {FEW} twins, {seconds[1] * 1e6:.0f} us beside {MANY}")
    assert seconds[1] < 4 * seconds[0]
    for manager in managers:
        manager.check()


def assert_same(pool: PagePool, pages_by_key: dict[int, list[int]], ranges: list[tuple[int, int]]) -> None:
    for key, pages in pages_by_key.items():
        for start, stop in ranges:
            expected = next((page_id for page_id in pages if start <= page_id < stop), None)
            assert pool.store.find(key, 0, start, stop) == expected
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
    pool = PagePool(num_pages, True)
    pages_by_key: dict[int, list[int]] = {key: [] for key in range(3)}  # in the order of caching
    key_of: dict[int, int] = {}
    for i in range(400):
        if i in (40, 150, 300) or rng.random() < 0.01:
            pool.get_new_page_ids(0, dp_shard_hint=0, data_parallel_size=rng.choice((1, 2, 3, 4, 16, 48)))
        if key_of and (len(key_of) == num_pages - 1 or rng.random() < 0.45):
            page_id = rng.choice([*key_of])
            pool.evict_pages([page_id])
            pages_by_key[key_of.pop(page_id)].remove(page_id)
        else:
            page_id, key = rng.choice([n for n in range(1, num_pages) if n not in key_of]), rng.randrange(3)
            pool.store.enter(page_id, key, 0)
            pages_by_key[key].append(page_id)
            key_of[page_id] = key
        size = num_pages // rng.choice((1, 2, 3, 4, 16))
        start = rng.randrange(num_pages)
        ranges = [(start // size * size, start // size * size + size), (start, rng.randrange(num_pages + 1))]
        assert_same(pool, pages_by_key, [*ranges, (start, 1 << 30), (0, 0), (start, start)])
    pool.check()
