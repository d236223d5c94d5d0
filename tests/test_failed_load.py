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
    MultiGroupPageTable,
    PageHash,
    PageHashWithGroupId,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import ArgumentError, PageHashError

PAGE_SIZE = 4
NUM_FULL_PAGES = 6
TOKENS = list(range(100, 100 + NUM_FULL_PAGES * PAGE_SIZE + 1))
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
WINDOW = SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 9)


def make_manager(*specs: Any, **options: Any) -> CacheManager:
    groups = [CacheGroupSpec(spec) for spec in specs or (FULL,)]
    return CacheManager(64, groups, 128, hash_seed="loads", **options)


def start(manager: CacheManager, request_id: str = "loaded", **options: Any) -> EngineRequest:
    """A request with all tokens computed, whose pages were transferred."""
    request = EngineRequest(request_id, TOKENS)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=len(TOKENS) - 1, **options) is not None
    request.num_computed_tokens = len(TOKENS)
    return request


def compute(manager: CacheManager, request: EngineRequest, num_new_tokens: int, **options: Any) -> None:
    assert manager.allocate_slots(request, num_new_tokens, **options) is not None
    request.num_computed_tokens += num_new_tokens
    manager.check()


def count_hits(manager: CacheManager) -> int:
    """Return the pages that another request with these tokens would hit."""
    return manager.probe(EngineRequest("other", TOKENS)).num_hit_tokens // PAGE_SIZE


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash], ids=str)
@pytest.mark.parametrize("evicted", [slice(2, 6), slice(2, 3), slice(2, 5, 2)], ids=["all behind", "one", "every second"])
def test_pages_that_are_computed_again_hit_again(evicted: slice, hash_algo: Any) -> None:
    manager = make_manager(hash_algo=hash_algo)
    request = start(manager)
    [page_ids] = manager.get_page_ids(request.request_id)
    assert count_hits(manager) == manager.stats().num_cached_pages == NUM_FULL_PAGES
    num_evicted = manager.page_pool.evict_pages(page_ids[evicted])
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


def test_pages_are_entered_one_by_one_as_they_are_computed() -> None:
    manager = make_manager()
    request = start(manager)
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][1:6])
    request.num_computed_tokens = PAGE_SIZE
    held = manager.coordinator.requests["loaded"]
    assert held.num_cached_hashes == NUM_FULL_PAGES
    for num_pages in range(1, NUM_FULL_PAGES):
        compute(manager, request, PAGE_SIZE - 1)
        assert count_hits(manager) == held.num_cached_hashes == manager.stats().num_cached_pages == num_pages
        compute(manager, request, 1)
        assert count_hits(manager) == held.num_cached_hashes == manager.stats().num_cached_pages == num_pages + 1


def test_pages_that_are_not_computed_again_are_not_entered() -> None:
    manager = make_manager()
    request = start(manager)
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][1:3])
    manager.cache_pages(request, len(TOKENS))
    for token_id in range(10):
        request.append_output_token_ids(token_id)
        compute(manager, request, 1)
    assert count_hits(manager) == 1
    request.num_computed_tokens = 2 * PAGE_SIZE  # after the first of them
    compute(manager, request, 3 * PAGE_SIZE)
    assert count_hits(manager) == 1
    assert manager.page_pool.pages[manager.get_page_ids("loaded")[0][1]].page_hash is None
    assert manager.page_pool.pages[manager.get_page_ids("loaded")[0][2]].page_hash is not None


def test_an_allocation_that_does_not_fit_enters_nothing() -> None:
    manager = make_manager()
    request = start(manager)
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][1:])
    request.num_computed_tokens = PAGE_SIZE
    assert manager.allocate_slots(request, len(TOKENS) - PAGE_SIZE, num_lookahead_tokens=100, num_reserved_pages=60) is None
    assert count_hits(manager) == 1
    compute(manager, request, len(TOKENS) - PAGE_SIZE)
    assert count_hits(manager) == NUM_FULL_PAGES


@pytest.mark.parametrize("is_said_before", [False, True])
def test_caching_may_be_delayed_again(is_said_before: bool) -> None:
    """`cache_pages` may be called before or after the engine updates the count of computed tokens."""
    manager = make_manager()
    request = start(manager, delay_cache_pages=True)
    manager.cache_pages(request, len(TOKENS))
    assert count_hits(manager) == NUM_FULL_PAGES
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][3:])
    request.num_computed_tokens = 3 * PAGE_SIZE
    assert manager.allocate_slots(request, len(TOKENS) - 3 * PAGE_SIZE, delay_cache_pages=True) is not None
    assert count_hits(manager) == 3
    if not is_said_before:
        request.num_computed_tokens = len(TOKENS)
    manager.cache_pages(request, 5 * PAGE_SIZE)
    assert count_hits(manager) == 5
    manager.cache_pages(request, len(TOKENS))
    assert count_hits(manager) == NUM_FULL_PAGES
    manager.check()


def test_a_load_that_fails_before_anything_was_cached() -> None:
    """Loaded pages are cached; the rest once it is computed."""
    manager = make_manager()
    request = start(manager, delay_cache_pages=True)
    request.num_computed_tokens = 2 * PAGE_SIZE
    manager.cache_pages(request, 2 * PAGE_SIZE)
    assert count_hits(manager) == 2
    compute(manager, request, len(TOKENS) - 2 * PAGE_SIZE)
    assert count_hits(manager) == NUM_FULL_PAGES


def test_every_holder_of_a_bad_page_may_compute_it_again() -> None:
    manager = make_manager()
    requests = [start(manager)]
    second = EngineRequest("second", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(second)
    assert manager.allocate_slots(second, 1, num_hit_tokens, hits) is not None
    requests.append(second)
    manager.page_pool.evict_pages(manager.get_page_ids("loaded")[0][1:4])
    for request in requests:
        request.num_computed_tokens = PAGE_SIZE
        compute(manager, request, len(TOKENS) - PAGE_SIZE)
        assert count_hits(manager) == manager.stats().num_cached_pages == NUM_FULL_PAGES


def test_another_request_computed_the_same_meanwhile() -> None:
    """Its pages came first and are hit; pages that are entered again come after them."""
    manager = make_manager()
    request = start(manager)
    [page_ids] = manager.get_page_ids("loaded")
    manager.page_pool.evict_pages(page_ids[2:])
    other = EngineRequest("other", TOKENS)
    hits, num_hit_tokens = manager.get_computed_pages(other)
    assert num_hit_tokens == 2 * PAGE_SIZE
    assert manager.allocate_slots(other, len(TOKENS) - num_hit_tokens, num_hit_tokens, hits) is not None
    [other_ids] = manager.get_page_ids("other")
    request.num_computed_tokens = 2 * PAGE_SIZE
    compute(manager, request, len(TOKENS) - 2 * PAGE_SIZE)
    twins = manager.page_pool.cached_page_hash_to_page
    for place in range(2, NUM_FULL_PAGES):
        page_hash = manager.page_pool.pages[page_ids[place]].page_hash
        assert page_hash is not None
        assert list(twins[page_hash]) == [other_ids[place], page_ids[place]]
    manager.free(other)
    manager.page_pool.evict_pages(other_ids[2:])
    assert manager.get_computed_pages(EngineRequest("third", TOKENS))[0].get_page_ids() == (page_ids[:NUM_FULL_PAGES],)


def test_groups_with_and_without_a_window() -> None:
    """Pages that leave the window keep their entries, and the null pages in their places are skipped."""
    manager = make_manager(FULL, WINDOW)
    request = start(manager)
    full_ids, window_ids = manager.get_page_ids("loaded")
    manager.page_pool.evict_pages([full_ids[4], window_ids[5]])
    assert count_hits(manager) == 4
    request.num_computed_tokens = 4 * PAGE_SIZE
    compute(manager, request, request.num_tokens - 4 * PAGE_SIZE)
    assert manager.get_page_ids("loaded")[1][:3] == [0, 0, window_ids[2]]
    assert count_hits(manager) == NUM_FULL_PAGES
    assert manager.stats().num_cached_pages == NUM_FULL_PAGES + NUM_FULL_PAGES
    request.num_computed_tokens = 0
    manager.page_pool.evict_pages([full_ids[0], window_ids[0]])
    compute(manager, request, request.num_tokens)
    assert manager.stats().num_cached_pages == NUM_FULL_PAGES + NUM_FULL_PAGES - 1
    manager.free(request)
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


# --- rows ---------------------------------------------------------------------------------------------------


def make_batch(manager: CacheManager) -> RunningBatch:
    return RunningBatch(manager, PageTable(2, 32, 64))


def recompute(batch: RunningBatch, row: int, num_tokens: int) -> None:
    batch.trim([row], num_tokens)
    batch.append([row] * (len(TOKENS) - num_tokens), TOKENS[num_tokens:])
    batch.grow([row], len(TOKENS) - int(batch.num_computed_tokens[row]))
    batch.check()


@pytest.mark.parametrize("num_tokens", [2 * PAGE_SIZE, 2 * PAGE_SIZE + 1], ids=["whole pages", "through a page"])
def test_a_row_that_is_computed_again_is_hit_again(num_tokens: int) -> None:
    manager = make_manager()
    batch = make_batch(manager)
    assert batch.admit(0, TOKENS) == 0
    manager.page_pool.evict_pages(batch.get_page_ids(0)[0][2:4])
    batch.step([0], [7])
    assert count_hits(manager) == 2
    recompute(batch, 0, num_tokens)
    assert count_hits(manager) == manager.stats().num_cached_pages == NUM_FULL_PAGES
    assert batch.admit(1, TOKENS) == NUM_FULL_PAGES * PAGE_SIZE
    assert batch.get_page_ids(1)[0][:NUM_FULL_PAGES] == batch.get_page_ids(0)[0][:NUM_FULL_PAGES]
    batch.check()


@pytest.mark.parametrize("first", [0, 1])
def test_rows_that_share_a_bad_page_are_computed_again_one_after_the_other(first: int) -> None:
    manager = make_manager()
    batch = make_batch(manager)
    batch.admit(0, TOKENS)
    batch.admit(1, TOKENS)
    manager.page_pool.evict_pages(batch.get_page_ids(0)[0][1:6])
    for row in (first, 1 - first):
        recompute(batch, row, PAGE_SIZE)
        assert count_hits(manager) == NUM_FULL_PAGES
    batch.release([0, 1])
    batch.check()


def test_a_row_that_is_cut_in_a_shared_page_of_another_group() -> None:
    """The cut goes through the shared second page of the wide group, so tokens before the cut are computed again."""
    wide = FullAttentionSpec(2 * PAGE_SIZE, 1, 8, "float16", False)
    manager = make_manager(FULL, wide)
    batch = RunningBatch(manager, MultiGroupPageTable(2, 128, 64, [PAGE_SIZE, 2 * PAGE_SIZE]))
    assert batch.admit(0, TOKENS[:17]) == 0
    assert batch.admit(1, TOKENS[:17]) == 16
    bad = batch.get_page_ids(0)[0][2]
    manager.page_pool.evict_pages([bad])
    batch.trim([0], 12)
    assert batch.num_computed_tokens[0] == 8
    assert batch.get_page_ids(0)[0] == batch.get_page_ids(1)[0][:2]  # the third page is the other row's alone
    batch.grow([0], 4)
    page_ids = batch.get_page_ids(0)[0]
    assert page_ids[2] != bad
    assert manager.page_pool.pages[page_ids[2]].page_hash is not None
    batch.check()


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
    "a row": lambda manager: make_batch(manager).admit(0, TOKENS),
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
    make_batch(manager)
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
