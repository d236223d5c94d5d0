"""Pages of equal content, computed side by side: with ``caches="computed"`` a hit takes a held one, if there is any."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hybrids import FULL, make_manager
from settings import scale

from pagepool import CacheManager, EngineRequest, PageHash, PagePool

PROMPT = list(range(16))


def test_a_refused_request_looks_again_once_the_holder_of_its_hits_is_gone() -> None:
    manager = make_manager(FULL, num_pages=18, caches="computed")
    requests = [EngineRequest(f"{i}", [*PROMPT, 90 + i]) for i in range(3)]
    for request in requests:
        manager.allocate_slots(request, 17)
        request.num_computed_tokens = 17
    for request in requests:
        manager.cache_pages(request, 17)
    new = EngineRequest("new", [*PROMPT, *range(50, 70)])
    hits, num_hit_tokens = manager.get_computed_pages(new)
    assert manager.allocate_slots(new, 20, num_hit_tokens, hits) is None
    [first] = [request for request in requests if manager.get_page_ids(request.request_id)[0][:4] == hits.get_page_ids()[0]]
    manager.free(first)
    hits, _ = manager.get_computed_pages(new)
    assert manager.page_pool.ref_counts()[hits.get_page_ids()[0]].all()
    assert manager.allocate_slots(new, 20, num_hit_tokens, hits) is not None
    manager.check()


def test_a_refused_request_hits_a_held_page_that_is_cached_later() -> None:
    """It fits then, since the free page that it hit before may be taken."""
    manager = make_manager(FULL, num_pages=9, caches="computed")
    first, second = EngineRequest("first", PROMPT[:5]), EngineRequest("second", PROMPT[:5])
    for request in (first, second):
        manager.allocate_slots(request, 5)
        request.num_computed_tokens = 5
    manager.free(first)
    new = EngineRequest("new", [*PROMPT[:4], *range(50, 74)])
    hits, num_hit_tokens = manager.get_computed_pages(new)
    assert manager.allocate_slots(new, 24, num_hit_tokens, hits) is None
    manager.cache_pages(second, 5)
    hits, num_hit_tokens = manager.get_computed_pages(new)
    assert hits.get_page_ids()[0] == manager.get_page_ids("second")[0][:1]
    assert manager.allocate_slots(new, 24, num_hit_tokens, hits) is not None
    manager.check()


def make_pool(num_pages: int, options: dict[str, Any]) -> tuple[CacheManager, PagePool]:
    manager = make_manager(FULL, num_pages=num_pages, **options)
    return manager, manager.page_pool


@pytest.mark.parametrize("num_shards", [None, 2])
def test_one_of_many_equal_pages_is_held(num_shards: int | None) -> None:
    """However they come and go, a look-up finds a held one."""
    for seed in range(scale(20)):
        rng = Random(seed)
        _, pool = make_pool(64, {"caches": "computed"})
        hint = {} if num_shards is None else {"data_parallel_size": num_shards}
        key, held, free = PageHash(7, ()), [], []
        for _ in range(200):
            choice = rng.random()
            if choice < 0.4 and pool.get_num_free_pages() > 8:
                place = hint and {**hint, "dp_shard_hint": rng.randrange(num_shards or 1)}
                [page_id] = pool.get_new_page_ids(1, **place).tolist()
                free = [each for each in free if each != page_id]  # it may have been one of these
                pool.cache_full_page_ids(None, [page_id], [key], 0, 1, 4, 0)
                held.append(page_id)
            elif choice < 0.7 and held:
                page_id = held.pop(rng.randrange(len(held)))
                pool.free_page_ids([page_id])
                free.append(page_id)
            elif choice < 0.8 and free:
                page_id = free.pop(rng.randrange(len(free)))
                pool.touch_page_ids([page_id])
                held.append(page_id)
            elif held or free:
                for shard in [None] if num_shards is None else [None, 0, 1]:
                    place = {} if shard is None else {**hint, "dp_shard_hint": shard}
                    found = pool.get_cached_page_ids(key, [0], **place)
                    here = [each for each in held if shard is None or each // 32 == shard]
                    others = [each for each in free if shard is None or each // 32 == shard]
                    assert (found is None) == (not here and not others), f"seed {seed}"
                    assert found is None or found.tolist()[0] in (here or others), f"seed {seed}"
            pool.check()


def test_where_pages_are_cached_at_once_a_look_up_finds_the_first() -> None:
    """As before, and as EasyDeL's manager does."""
    _, pool = make_pool(64, {})
    page_ids = pool.get_new_page_ids(3).tolist()
    for page_id in page_ids:
        pool.cache_full_page_ids(None, [page_id], [PageHash(7, ())], 0, 1, 4, 0)
    pool.free_page_ids(page_ids[:1])
    assert pool.get_cached_page_ids(PageHash(7, ()), [0]).tolist() == page_ids[:1]


def test_a_manager_of_computed_pages_finds_held_ones_that_were_there_before() -> None:
    _, pool = make_pool(64, {})
    page_ids = pool.get_new_page_ids(3).tolist()
    for page_id in page_ids:
        pool.cache_full_page_ids(None, [page_id], [PageHash(7, ())], 0, 1, 4, 0)
    pool.free_page_ids(page_ids[:2])
    make_manager(FULL, num_pages=64, page_pool=pool, caches="computed")
    assert pool.get_cached_page_ids(PageHash(7, ()), [0]).tolist() == page_ids[2:]
    pool.check()
