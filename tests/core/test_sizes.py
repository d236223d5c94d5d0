"""Pools that shrink, grow, are vacated and wake up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import pagepool
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MissCause,
    MultiGroupPageTable,
    PageTable,
    Retention,
    RunningBatch,
)
from pagepool.errors import (
    ArgumentError,
    DoubleFreeError,
    OutOfPagesError,
    PageHashError,
    PageIdError,
    PagesHeldError,
    RequestTooLargeError,
)

SPEC = FullAttentionSpec(4, 2, 8, "bfloat16", False)
SINKS = FullAttentionSpec(4, 2, 8, "bfloat16", False, num_sink_tokens=8)
GROUPS = [CacheGroupSpec(SPEC)]
TWO = [CacheGroupSpec(SPEC), CacheGroupSpec(MambaSpec(4, ((2, 2),), "float32", checkpoint_interval=4), pool="states")]


def make_manager(num_pages: int = 16, **options: Any) -> CacheManager:
    return CacheManager(num_pages, GROUPS, max_model_len=256, **options)


def make_request(name: str, num_tokens: int = 9, first: int = 0) -> EngineRequest:
    return EngineRequest(name, list(range(first, first + num_tokens)))


def move(manager: CacheManager) -> int:
    """Let all moves end; return the number of saves."""
    moves = manager.take_moves()
    if moves.number:
        manager.complete(moves.number)
    return len(moves.saves)


def run(manager: CacheManager, requests: Sequence[EngineRequest]) -> int:
    """Run requests one after another, and return the tokens that they hit."""
    num_hits = 0
    for request in requests:
        pages, num_hit_tokens = manager.get_computed_pages(request)
        request.num_computed_tokens = 0
        assert manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, pages) is not None
        request.num_computed_tokens = request.num_tokens
        manager.cache_pages(request, request.num_tokens)
        move(manager)
        manager.check()
        manager.free(request)
        request.num_computed_tokens = 0
        num_hits += num_hit_tokens
    return num_hits


@pytest.mark.parametrize("caches", ["scheduled", "computed"])
@pytest.mark.parametrize("policy", ["write_back", "write_through"])
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_all_that_was_cached_hits_after_sleep(caches: Any, policy: Any, eviction: Any) -> None:
    manager = make_manager(128, caches=caches, eviction=eviction, host_tier=HostTier(300, policy=policy))
    requests = [make_request(f"{i}", 37, 1000 * i) for i in range(10)]
    run(manager, requests)
    assert manager.vacate() == ({}, [])
    for _ in range(3):
        move(manager)
    manager.check()
    assert manager.stats().num_pages == manager.stats().num_cached_pages == manager.stats().num_free_pages == 0
    assert manager.stats().host_tier.num_cached_pages == 90
    manager.resume()
    manager.check()
    assert run(manager, requests) == 360


def test_without_a_tier_nothing_hits_after_sleep() -> None:
    manager = make_manager(128)
    requests = [make_request(f"{i}", 37, 1000 * i) for i in range(3)]
    run(manager, requests)
    manager.vacate()
    manager.vacate()
    manager.resume()
    manager.resume()
    assert run(manager, requests) == 0
    assert manager.stats().num_pages == 127


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_a_small_tier_keeps_what_would_have_been_evicted_last(policy: Any) -> None:
    """One page of the tier has a page of the last request already, from which it does not part for an older one."""
    manager = make_manager(64, host_tier=HostTier(9, policy=policy))
    old, last = make_request("old", 33, 1000), make_request("last", 25)
    run(manager, [old, last])
    manager.vacate()
    assert move(manager) == 8
    assert manager.stats().host_tier.num_refused_pages == 6
    manager.resume()
    assert manager.probe(last).num_hit_tokens == 24
    assert manager.probe(old).num_hit_tokens == 8


def test_a_shrunk_pool_hands_out_no_id_above_and_names_the_holders() -> None:
    manager = make_manager()
    first, second = make_request("first", 20), make_request("second", 12, 100)
    manager.allocate_slots(first, 20)
    manager.allocate_slots(second, 12)
    lease = manager.lease([8])
    assert manager.resize(4) == {
        "kv": {
            4: ["request first"],
            5: ["request first"],
            6: ["request second"],
            7: ["request second"],
            8: ["request second", "lease 0"],
        }
    }
    assert manager.stats().num_pages == 3
    assert manager.stats().num_free_pages == 0
    assert {holder.kind for holder in manager.held().holders} == {"request", "lease"}
    manager.check()
    manager.free(second)
    manager.free(first)
    assert manager.resize(4) == {"kv": {8: ["lease 0"]}}
    lease.release()
    assert manager.resize(4) == {}
    assert manager.stats().num_free_pages == 3
    manager.check()
    assert sorted(manager.page_pool.get_new_page_ids(3).tolist()) == [1, 2, 3]
    with pytest.raises(OutOfPagesError):
        manager.page_pool.get_new_page_ids(1)
    assert manager.resize(6) == {}
    assert sorted(manager.page_pool.get_new_page_ids(2).tolist()) == [4, 5]
    manager.check()


def test_pages_above_the_size_are_not_hit_by_others_and_end_with_their_holders() -> None:
    manager = make_manager()
    request = make_request("held", 13)
    manager.allocate_slots(request, 13)
    assert manager.probe(make_request("other", 13)).num_hit_tokens == 12
    manager.resize(3)
    assert manager.probe(make_request("other", 13)).num_hit_tokens == 8
    assert manager.probe(request).num_hit_tokens == 8
    manager.check()
    manager.free(request)
    assert manager.resize(3) == {}
    stats = manager.stats()
    assert (stats.num_allocated_pages, stats.num_freed_pages) == (4, 4)


def test_held_pages_are_saved_once_their_content_is_final() -> None:
    for caches, num_saves in ("computed", 3), ("scheduled", 0):
        manager = make_manager(caches=caches, host_tier=HostTier(64))
        request = make_request("held", 13)
        manager.allocate_slots(request, 13)
        request.num_computed_tokens = 13
        manager.cache_pages(request, 13)
        manager.resize(1)
        assert move(manager) == num_saves
        assert manager.probe(make_request("other", 13)).num_hit_tokens == 4 * num_saves
        manager.check()


def test_a_page_out_of_use_is_refused_like_one_that_nobody_holds() -> None:
    manager = make_manager()
    pool = manager.page_pool
    manager.resize(4)
    for call in (pool.touch_page_ids, pool.lease):
        with pytest.raises(PageIdError):
            call([5])
    with pytest.raises(DoubleFreeError):
        pool.free_page_ids([5])
    with pytest.raises(PageIdError):
        pool.free_page_queue.append(pool.pages[5])
    for page_ids in ([5], [1, 5]):
        with pytest.raises(PageHashError, match="out of use"):
            pool.cache_full_page_ids(
                None, page_ids, [pagepool.PageHash(1, ()), pagepool.PageHash(2, ())], 0, len(page_ids), 4, 0
            )
    with pytest.raises(PageHashError, match="out of use"):
        pool.store.enter(5, 1, 0)
    manager.check()
    assert manager.resize(4) == {}


def test_sleeping_pools_refuse_for_now() -> None:
    manager = make_manager()
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    manager.vacate()
    manager.require_capacity(40)
    assert batch.admit(0, list(range(40))) is None
    assert batch.refusal.can_wait
    assert manager.allocate_slots(make_request("a", 40), 40) is None
    assert manager.usage == manager.page_pool.get_usage() == 1
    manager.resume()
    assert batch.admit(0, list(range(40))) == 0


def test_limits_follow_the_size() -> None:
    manager = make_manager(101, retention=Retention(max_leased_share=0.5))
    assert manager.max_num_leased_pages == 50
    manager.require_capacity(200)
    manager.resize(11)
    assert manager.num_pages == 101
    assert manager.max_num_leased_pages == manager.stats().max_num_leased_pages == 5
    assert manager.usage == 1 - 10 / 11
    assert manager.stats().usage == 0
    manager.require_capacity(40)
    with pytest.raises(RequestTooLargeError, match="needs 11 pages, the pool has 10"):
        manager.require_capacity(41)
    with pytest.raises(RequestTooLargeError, match="the pool has 10"):
        manager.allocate_slots(make_request("a", 41), 41)


def test_a_row_with_pages_above_the_size_waits_for_the_rest() -> None:
    manager = make_manager()
    request, other = make_request("a", 28), make_request("b", 4, 100)
    manager.allocate_slots(other, 4)
    manager.allocate_slots(request, 20)
    request.num_computed_tokens = 20
    assert [*manager.resize(4)["kv"]] == [4, 5, 6]
    assert manager.allocate_slots(request, 4) is None
    manager.free(other)
    assert manager.allocate_slots(request, 4).get_page_ids() == ([1],)
    request.num_computed_tokens = 24
    with pytest.raises(RequestTooLargeError, match="needs 4 pages at once, the pool has 3"):
        manager.allocate_slots(request, 4)
    manager.check()


def test_held_pages_keep_a_pool_awake() -> None:
    manager = make_manager(host_tier=HostTier(64))
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    request = make_request("mine", 9)
    manager.allocate_slots(request, 9)
    batch.admit(1, list(range(100, 109)))
    lease = manager.lease([1])
    before = manager.stats()
    with pytest.raises(PagesHeldError, match="held by request mine, row 1 of batch 0, lease 0, allowed: none"):
        manager.vacate()
    assert manager.vacate(preempt=True) == ({batch: [1]}, ["mine"])
    assert manager.stats() == before
    batch.release([1])
    manager.free(request)
    with pytest.raises(PagesHeldError, match="held by lease 0, allowed: none"):
        manager.vacate(preempt=True)
    lease.release()
    assert manager.vacate(preempt=True) == ({}, [])


def test_loads_in_flight_keep_a_pool_awake() -> None:
    manager = make_manager(host_tier=HostTier(64))
    request = make_request("a", 9)
    run(manager, [request])
    manager.vacate()
    move(manager)
    manager.resume()
    assert manager.get_computed_pages(request)[1] == 8
    with pytest.raises(PagesHeldError, match="held by load"):
        manager.vacate()
    move(manager)
    manager.vacate()


def test_sizes_of_several_pools() -> None:
    manager = CacheManager({"kv": 16, "states": 8}, TWO, max_model_len=64, host_tier=HostTier({"kv": 64, "states": 32}))
    batch = RunningBatch(manager, MultiGroupPageTable(2, 64, 64, [4, 4]))
    assert batch.admit(0, list(range(20))) == 0
    batch.take_moves()
    held = manager.resize({"kv": 3, "states": 1})
    assert [*held["kv"]] == [3, 4, 5]
    assert [*held["states"]][:2] == [1, 2]
    manager.check()
    batch.release([0])
    assert manager.resize({"states": 1, "kv": 3}) == {}
    manager.check()
    counts = manager.stats().pools
    assert (counts["kv"].num_pages, counts["states"].num_pages, manager.stats().num_pages) == (2, 0, 2)
    assert batch.admit(0, list(range(4))) is None  # a state needs a page
    manager.resize({"kv": 16, "states": 8})
    assert batch.admit(0, list(range(20))) is not None
    for wrong in (4, {"kv": 4}, {"kv": 4, "states": 0}, {"kv": 17, "states": 8}):
        with pytest.raises(ArgumentError, match="num_pages"):
            manager.resize(wrong)


def test_sinks_stay_where_they_are() -> None:
    manager = CacheManager(16, [CacheGroupSpec(SINKS)], max_model_len=64)
    assert manager.sink_page_ids == ((1, 2),)
    assert manager.vacate() == ({}, [])
    assert manager.resize(1) == {}
    manager.check()
    assert [holder.kind for holder in manager.held().holders] == ["sink"]
    manager.resize(16)
    assert manager.stats().num_free_pages == 13
    assert manager.reset_prefix_cache()
    manager.check()


def test_divided_pools_keep_their_size() -> None:
    manager = make_manager()
    manager.resize(8)
    with pytest.raises(
        ArgumentError, match="data_parallel_size: got 2, allowed with pages set aside, as for sinks, or out of use"
    ):
        manager.get_computed_pages(make_request("a"), dp_shard_hint=0, data_parallel_size=2)
    manager.resize(16)
    manager.allocate_slots(make_request("a"), 9, dp_shard_hint=0, data_parallel_size=2)
    for call in (lambda: manager.resize(8), manager.vacate):
        with pytest.raises(ArgumentError, match="num_pages: got sizes for a pool in 2 shards"):
            call()


def test_events_and_explanations_know_what_has_gone() -> None:
    pytest.importorskip("msgspec")
    manager = make_manager()
    manager.enable_events()
    manager.enable_explanations()
    request = make_request("a", 9)
    run(manager, [request])
    assert [type(event).__name__ for event in manager.take_events()] == ["BlockStored"]
    manager.vacate()
    assert [type(event).__name__ for event in manager.take_events()] == ["BlockRemoved"]
    assert manager.explain(request).cause is MissCause.EVICTED
    assert manager.stats().num_evicted_pages == 2


def test_a_reset_while_pages_are_out_of_use() -> None:
    manager = make_manager()
    request = make_request("a", 20)
    manager.allocate_slots(request, 20)
    manager.resize(4)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    manager.check()
    assert manager.resize(16) == {}
    assert manager.stats().num_free_pages == 15


def test_common_prefixes_count_requests_alone() -> None:
    manager = make_manager()
    request = make_request("a", 9)
    manager.allocate_slots(request, 9)
    request.status = pagepool.EngineRequestStatus.RUNNING
    manager.resize(2)
    assert manager.get_num_common_prefix_pages(request, 2) == [0]
    assert manager.get_num_common_prefix_pages(request, 1) == [3]
