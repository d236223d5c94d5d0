"""Cached pages are computed pages: contradictory counts are refused, whatever an engine forgot."""

from __future__ import annotations

from typing import Any

import pytest
from batch_model import package_pool_state

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from pagepool.errors import ArgumentError

FULL = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=8, dtype="float16", use_mla=False)
WINDOW = SlidingWindowSpec(page_size=4, num_kv_heads=1, head_size=8, dtype="float16", use_mla=False, sliding_window=9)
STATE = MambaSpec(page_size=4, shapes=((1, 1),), dtype="float16")
"""Make groups with pages of four tokens."""

PROMPT = list(range(10, 27))  # four full pages and a token
LENGTH = 32


def make_manager(*specs: Any, **options: Any) -> CacheManager:
    return CacheManager(24, [CacheGroupSpec(spec) for spec in specs or (FULL,)], LENGTH, **options)


def hit(manager: CacheManager, request: EngineRequest) -> tuple[Any, int]:
    """Look up a request whose prompt was computed and cached before."""
    before = EngineRequest("before", PROMPT)
    manager.allocate_slots(before, len(PROMPT))
    manager.free(before)
    return manager.get_computed_pages(request)


def refuse(manager: CacheManager, request: EngineRequest, *args: Any, **options: Any) -> ArgumentError:
    """Assert that the call is refused and changes nothing."""
    before = package_pool_state(manager.page_pool, with_hashes=True), manager.get_page_ids(request.request_id), manager.stats()
    with pytest.raises(ArgumentError) as caught:
        manager.allocate_slots(request, *args, **options)
    after = package_pool_state(manager.page_pool, with_hashes=True), manager.get_page_ids(request.request_id), manager.stats()
    assert before[:2] == after[:2]
    assert before[2].queries == after[2].queries
    manager.check()
    return caught.value


# --- a request that holds nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW), (STATE,), (FULL, STATE)])
def test_new_computed_tokens_without_hits(specs: tuple[Any, ...], enable_caching: bool) -> None:
    manager = make_manager(*specs, enable_caching=enable_caching)
    error = refuse(manager, EngineRequest("a", PROMPT), 1, 16)
    assert "num_new_computed_tokens 16" in str(error)
    assert "allowed: 0 together" in str(error)
    refuse(manager, EngineRequest("a", PROMPT), 1, 1, manager.create_empty_page_list())


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_more_than_the_hits_hold(specs: tuple[Any, ...]) -> None:
    manager, request = make_manager(*specs), EngineRequest("a", [*PROMPT, 1, 2, 3, 4])
    hits, num_hit_tokens = hit(manager, request)
    assert num_hit_tokens == 16
    assert "allowed: 16" in str(refuse(manager, request, 1, 17, hits))
    refuse(manager, request, 1, 20, hits)
    assert manager.allocate_slots(request, 5, 16, hits) is not None


def test_hits_counted_twice() -> None:
    manager, request = make_manager(), EngineRequest("a", [*PROMPT, 1, 2, 3, 4])
    hits, num_hit_tokens = hit(manager, request)
    request.num_computed_tokens = num_hit_tokens  # the engine has already counted them
    refuse(manager, request, 1, num_hit_tokens, hits)
    assert manager.allocate_slots(request, 5, 0, hits) is not None  # once is right
    assert manager.get_page_ids("a")[0] == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(("num_new_tokens", "num_computed_tokens"), [(2, 15), (1, 15), (1, 3), (4, 0), (17, 0)])
def test_fewer_than_the_hits_hold(num_new_tokens: int, num_computed_tokens: int) -> None:
    manager, request = make_manager(FULL, WINDOW), EngineRequest("a", PROMPT)
    hits, _ = hit(manager, request)
    assert manager.allocate_slots(request, num_new_tokens, num_computed_tokens, hits) is not None
    assert len(manager.get_page_ids("a")[0]) >= 4
    manager.check()


@pytest.mark.parametrize("with_hits", [True, False])
def test_not_reset_after_a_preemption(with_hits: bool) -> None:
    """Freed pages may belong to others: the request starts over."""
    manager, request = make_manager(), EngineRequest("a", PROMPT)
    manager.allocate_slots(request, 17)
    request.num_computed_tokens = 17
    manager.free(request)
    request.append_output_token_ids([1, 2, 3, 4])
    hits, num_hit_tokens = manager.get_computed_pages(request)
    if with_hits:
        refuse(manager, request, 4, num_hit_tokens, hits)
        refuse(manager, request, 4, 0, hits)
    else:
        refuse(manager, request, 4)
    request.num_computed_tokens = 0
    assert manager.allocate_slots(request, 5, num_hit_tokens, hits) is not None
    manager.check()


def test_external_tokens_need_no_hits() -> None:
    manager, request = make_manager(), EngineRequest("a", PROMPT)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=16) is not None


def test_without_groups_nothing_is_held() -> None:
    manager = CacheManager(8, [], LENGTH)
    request = EngineRequest("a", PROMPT, num_computed_tokens=16)
    assert manager.allocate_slots(request, 1) is not None


def test_refused_without_a_look_at_the_tokens() -> None:
    """O(1): the prompt of a contradictory call is not hashed."""
    manager = make_manager()
    refuse(manager, EngineRequest("a", PROMPT), 17, 16)
    assert "a" not in manager.req_to_page_hashes


# --- a request that holds pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new_tokens", [1, 8])
def test_new_computed_tokens_for_a_running_request(num_new_tokens: int) -> None:
    manager, request = make_manager(), EngineRequest("a", PROMPT)
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    assert "allowed: 0 new ones" in str(refuse(manager, request, num_new_tokens, 1))


def test_more_computed_than_slots() -> None:
    manager, request = make_manager(), EngineRequest("a", PROMPT)
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 9
    assert "allowed: 8" in str(refuse(manager, request, 1))
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 1) is not None


# --- longer than the model allows -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_model_len", [16, 18])
def test_beyond_the_longest(max_model_len: int) -> None:
    """If the length is not a multiple of the page size, the last page has slots that no token may take."""
    manager = CacheManager(24, [CacheGroupSpec(FULL)], max_model_len)
    request = EngineRequest("a", list(range(40)))
    assert f"allowed: {max_model_len}" in str(refuse(manager, request, max_model_len + 1))
    refuse(manager, request, 40)
    assert manager.allocate_slots(request, max_model_len) is not None
    request.num_computed_tokens = max_model_len
    refuse(manager, request, 1)
    request.num_computed_tokens = max_model_len - 1
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=9) is not None  # drafts get the slots that are left
    assert len(manager.get_page_ids("a")[0]) == -(-max_model_len // 4)


def test_beyond_the_longest_by_external_tokens() -> None:
    manager = make_manager()
    refuse(manager, EngineRequest("a", PROMPT), 1, num_external_computed_tokens=LENGTH)
