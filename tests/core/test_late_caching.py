"""``CacheManager(caches="computed")``: pages are cached once they are computed, and not before."""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import FULL, count_hits, make_manager, make_request, manager_state, run
from refusing import refused

from pagepool import CacheManager, EngineRequest, PageHash, PageHashWithGroupId
from pagepool.errors import PageHashError

pytestmark = pytest.mark.usefixtures("drafter")


def make_late(*specs: Any, **options: Any) -> CacheManager:
    return make_manager(*specs or (FULL,), caches="computed", **options)


def test_without_caching_nothing_changes() -> None:
    manager, request = make_late(enable_caching=False), make_request("a", 9)
    for _ in range(9):
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_pages(request, request.num_computed_tokens)
    manager.free(request)
    assert manager.stats().num_cached_pages == 0


# What was not computed.


@pytest.mark.parts_at_a_page
@pytest.mark.parametrize("num_computed", [0, 4])
@pytest.mark.parametrize("num_known", [8, 6])
def test_cached_pages_are_not_overwritten(num_computed: int, num_known: int) -> None:
    """A request that is set back computes the same tokens, or is refused, at its start too."""
    manager, request = make_late(), make_request("a", 8)
    run(manager, request, 8)
    manager.cache_pages(request, 8)
    request.num_computed_tokens = num_computed
    request.all_token_ids[5] = 1
    del request.all_token_ids[num_known:]
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already"):
        manager.allocate_slots(request, 6 - num_computed)
    manager.free(request, num_computed_tokens=num_computed)
    assert count_hits(manager) == num_computed


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash])
@pytest.mark.parametrize("end", ["allocate", "free", "cache", "delayed"])
def test_tokens_replaced_before_their_page_is_cached_are_hashed_again(end: str, hash_algo: Any) -> None:
    """The look-up had hashed the ones before."""
    is_delayed = end == "delayed"
    manager = make_manager(FULL, caches="scheduled" if is_delayed else "computed", hash_algo=hash_algo)
    request = make_request("a", 9)
    first = list(request.all_token_ids)
    hits, _ = manager.get_computed_pages(request)
    manager.allocate_slots(request, 9, 0, hits, delay_cache_pages=is_delayed)
    request.num_computed_tokens = 9
    request.num_computed_tokens = 5
    request.all_token_ids[6] += 1
    second = list(request.all_token_ids)
    manager.allocate_slots(request, 4, delay_cache_pages=is_delayed)
    request.num_computed_tokens = 9
    if end == "allocate":
        request.append_output_token_ids(1)
        manager.allocate_slots(request, 1)
    elif end == "free":
        manager.free(request)
    else:
        manager.cache_pages(request, 9)
    assert [manager.probe(EngineRequest("b", tokens)).num_hit_tokens for tokens in (first, second)] == [4, 8]
    manager.check()


def test_an_entry_made_by_hand_is_refused_by_a_call_and_kept_by_free() -> None:
    manager, request = make_late(), make_request("a", 9)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    by_hand = PageHashWithGroupId(PageHash(7, ()), 0)
    manager.page_pool.pages[1].page_hash = by_hand
    with refused(lambda: manager_state(manager), PageHashError, "has a hash already"):
        manager.allocate_slots(request, 1)
    manager.free(request)
    assert (manager.page_pool.pages[1].page_hash, manager.stats().num_cached_pages) == (by_hand, 1)
    assert manager.get_page_ids("a") == ([],)
    manager.check()


def test_a_page_given_back_by_others_leaves_all_as_it_was() -> None:
    """`free` caches nothing before it fails."""
    manager, request = make_late(), make_request("a", 9)
    manager.allocate_slots(request, 9)
    request.num_computed_tokens = 9
    manager.page_pool.free_page_ids([1])
    before = manager.stats()
    with pytest.raises(Exception, match="got more frees than references, allowed: one for each"):
        manager.free(request)
    assert manager.stats() == before
