"""Held pages whose entries were dropped because a transfer did not fill them, and that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    PageHash,
    PageHashWithGroupId,
    PageTable,
    RunningBatch,
)
from pagepool.errors import ArgumentError, PageHashError

PAGE_SIZE = 4
NUM_FULL_PAGES = 6
TOKENS = list(range(100, 100 + NUM_FULL_PAGES * PAGE_SIZE + 1))
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)


def make_manager(**options: Any) -> CacheManager:
    return CacheManager(64, [CacheGroupSpec(FULL)], 128, hash_seed="loads", **options)


def start(manager: CacheManager) -> EngineRequest:
    """Return a request with all tokens computed, whose pages were transferred."""
    request = EngineRequest("loaded", TOKENS)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=len(TOKENS) - 1) is not None
    request.num_computed_tokens = len(TOKENS)
    return request


def compute(manager: CacheManager, request: EngineRequest, num_new_tokens: int) -> None:
    assert manager.allocate_slots(request, num_new_tokens) is not None
    request.num_computed_tokens += num_new_tokens
    manager.check()


def count_hits(manager: CacheManager) -> int:
    """Return the pages that another request with these tokens would hit."""
    return manager.probe(EngineRequest("other", TOKENS)).num_hit_tokens // PAGE_SIZE


@pytest.mark.parametrize("hash_algo", ["siphash128", hash], ids=["siphash128", "hash"])
def test_pages_that_are_computed_again_hit_again(hash_algo: Any) -> None:
    manager = make_manager(hash_algo=hash_algo)
    request = start(manager)
    [page_ids] = manager.get_page_ids(request.request_id)
    assert count_hits(manager) == manager.stats().num_cached_pages == NUM_FULL_PAGES
    num_evicted = manager.page_pool.evict_pages(page_ids[2:5:2])
    assert manager.stats().num_cached_pages == NUM_FULL_PAGES - num_evicted
    request.num_computed_tokens = 2 * PAGE_SIZE
    assert count_hits(manager) == 2
    compute(manager, request, len(TOKENS) - 2 * PAGE_SIZE)
    assert count_hits(manager) == manager.stats().num_cached_pages == NUM_FULL_PAGES
    other = EngineRequest("other", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(other)
    assert hits.get_page_ids() == (page_ids[:NUM_FULL_PAGES],)
    assert manager.allocate_slots(other, 1, num_hit_tokens, hits) is not None
    manager.free(request)
    manager.free(other)
    manager.check()


def test_a_page_that_got_another_entry_is_refused() -> None:
    manager = make_manager()
    request = start(manager)
    bad = manager.get_page_ids("loaded")[0][3]
    manager.page_pool.evict_pages([bad - 1, bad])
    manager.page_pool.pages[bad].page_hash = PageHashWithGroupId(PageHash(5, ()), 0)
    request.num_computed_tokens = 0
    with pytest.raises(PageHashError, match=rf"page {bad} \(at 3 of 7\) has a hash already"):
        manager.allocate_slots(request, len(TOKENS))
    assert count_hits(manager) == 2
    manager.page_pool.check()


def test_events_tell_of_both() -> None:
    pytest.importorskip("msgspec")
    manager = make_manager()
    manager.enable_events()
    request = start(manager)
    manager.take_events()
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][2:4])
    request.num_computed_tokens = 2 * PAGE_SIZE
    compute(manager, request, len(TOKENS) - 2 * PAGE_SIZE)
    removed, stored = manager.take_events()
    assert list(removed.block_hashes) == list(stored.block_hashes)
    assert stored.token_ids.tolist() == TOKENS[2 * PAGE_SIZE : 4 * PAGE_SIZE]


# --- restored pools -----------------------------------------------------------------------------------------


def make_restored() -> CacheManager:
    manager = make_manager()
    start(manager)
    second = EngineRequest("second", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(second)
    manager.allocate_slots(second, 1, num_hit_tokens, hits)
    pool = type(manager.page_pool).restore(manager.page_pool.snapshot())
    return make_manager(page_pool=pool)


def test_a_restored_pool_is_emptied() -> None:
    manager = make_restored()
    pool = manager.page_pool
    assert not manager.reset_prefix_cache()
    assert pool.ref_counts().tolist()[:8] == [0, *[2] * NUM_FULL_PAGES, 1]
    held = [page_id for page_id, count in enumerate(pool.ref_counts().tolist()) if count]
    before = pool.free_page_ids_in_order().tolist()
    assert pool.release_all_held() == len(held) == NUM_FULL_PAGES + 2
    assert pool.free_page_ids_in_order().tolist() == [*before, *held]
    assert not pool.ref_counts().any()
    manager.check()
    assert count_hits(manager) == NUM_FULL_PAGES
    assert pool.release_all_held() == 0
    assert manager.reset_prefix_cache()
    assert count_hits(manager) == 0


def hit(manager: CacheManager) -> None:
    request = EngineRequest("third", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    manager.allocate_slots(request, 1, num_hit_tokens, hits)


USES: dict[str, Callable[[CacheManager], Any]] = {
    "a request": hit,
    "a row": lambda manager: RunningBatch(manager, PageTable(2, 32, 64)).admit(0, TOKENS),
    "pages taken": lambda manager: manager.page_pool.get_new_page_ids(1),
    "pages touched": lambda manager: manager.page_pool.touch_page_ids([1]),
    "a reference more": lambda manager: manager.page_pool.pages[1].incr_ref(),
    "a count overwritten": lambda manager: setattr(manager.page_pool.pages[9], "ref_cnt", 1),
}


@pytest.mark.parametrize("use", USES)
def test_a_restored_pool_that_is_used_is_not_emptied(use: str) -> None:
    manager = make_restored()
    USES[use](manager)
    before = manager.page_pool.ref_counts().tolist()
    with pytest.raises(
        ArgumentError, match=r"^release_all_held: got a pool that was not restored, or was used since, allowed: "
    ):
        manager.page_pool.release_all_held()
    assert manager.page_pool.ref_counts().tolist() == before


def test_what_takes_no_reference_does_not_stand_in_the_way() -> None:
    manager = make_restored()
    pool = manager.page_pool
    RunningBatch(manager, PageTable(2, 32, 64))
    manager.get_computed_pages(EngineRequest("third", TOKENS))
    pool.free_page_ids([8])
    pool.pages[1].decr_ref()
    pool.get_new_page_ids(0)
    pool.check()
    assert pool.release_all_held() == NUM_FULL_PAGES + 1
    pool.check()


def test_a_pool_that_was_not_restored_is_not_emptied() -> None:
    manager = make_manager()
    start(manager)
    with pytest.raises(ArgumentError, match="allowed: a freshly restored pool"):
        manager.page_pool.release_all_held()
    manager.check()


def test_hits_that_are_computed_again_and_whose_step_fails_are_forgotten() -> None:
    """The pages belong to the request by then, although it hit them at first."""
    manager = make_manager()
    loaded, other = start(manager), EngineRequest("other", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(other)
    assert manager.allocate_slots(other, 1, num_hit_tokens, hits) is not None
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0])
    manager.free(loaded, num_computed_tokens=0)
    assert manager.allocate_slots(other, len(TOKENS)) is not None  # again from its first token on
    manager.free(other, num_computed_tokens=0)
    assert count_hits(manager) == manager.stats().num_cached_pages == 0
