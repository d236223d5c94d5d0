"""Pools by kind: ids that count in each pool, all or none over pools, and what several pools refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    PagePool,
    Refusal,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, OutOfPagesError, PageIdError, RequestTooLargeError

SIZES = {"num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
FULL = CacheGroupSpec(FullAttentionSpec(4, **SIZES))
STATE = CacheGroupSpec(MambaSpec(4, ((1, 1),), "float16", checkpoint_interval=8), pool="states")
WINDOW = CacheGroupSpec(SlidingWindowSpec(4, sliding_window=9, **SIZES), pool="windows")


def make_manager(num_pages: Any, groups: list[CacheGroupSpec] | None = None, **options: Any) -> CacheManager:
    return CacheManager(num_pages, groups or [FULL, STATE], 64, **options)


def make_batch(manager: CacheManager, num_rows: int) -> tuple[RunningBatch, MultiGroupPageTable]:
    tables = MultiGroupPageTable(num_rows, 64, 64, [4] * len(manager.kv_cache_groups))
    return RunningBatch(manager, tables), tables


def test_ids_count_from_0_in_each_pool() -> None:
    manager = make_manager({"kv": 20, "states": 8})
    request = EngineRequest("a", list(range(20)))
    assert manager.allocate_slots(request, 8).get_page_ids() == ([1, 2], [1])
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 12).get_page_ids() == ([3, 4, 5], [2])
    copies = manager.take_copies()
    assert (copies.src.tolist(), copies.dst.tolist(), copies.group.tolist()) == ([1], [2], [1])
    request.num_computed_tokens = 20
    manager.free(request)
    assert manager.pools["states"].free_page_ids_in_order().tolist() == [3, 4, 5, 6, 7, 2, 1]  # 1 is the checkpoint
    second = EngineRequest("b", list(range(20)))
    hits, num_hit_tokens = manager.get_computed_pages(second)
    assert (hits.get_page_ids(), num_hit_tokens) == (([1, 2], [1]), 8)
    assert [page.page_id for page in hits.pages[1]] == [1]
    manager.allocate_slots(second, 12, num_hit_tokens, hits)
    assert manager.take_copies().src.tolist() == [1]
    manager.check()


def test_rows_show_the_ids_of_their_pools() -> None:
    manager = make_manager({"windows": 9, "kv": 12, "states": 6}, [FULL, STATE, WINDOW])
    batch, tables = make_batch(manager, 2)
    assert batch.admit(0, list(range(20))) == 0
    assert batch.get_page_ids(0) == ([1, 2, 3, 4, 5], [1], [1, 2, 3, 4, 5])
    assert [table.page_table_cpu[0, :5].tolist() for table in tables] == [[1, 2, 3, 4, 5], [1, 0, 0, 0, 0], [1, 2, 3, 4, 5]]
    batch.append([0], [7])
    result = batch.grow([0], 1)
    assert (result.new_page_ids.tolist(), result.new_page_groups.tolist()) == ([6, 1], [0, 2])
    assert tables[2].page_table_cpu[0, :6].tolist() == [0, 0, 0, 4, 5, 1]
    assert manager.pools["windows"].free_page_ids_in_order().tolist() == [2, 3, 6, 7, 8]
    batch.check()


def test_a_request_gets_pages_of_all_pools_or_none() -> None:
    manager = make_manager({"kv": 20, "states": 3})
    batch, _ = make_batch(manager, 1)
    held = manager.pools["states"].get_new_page_ids(2)
    before = manager.stats().pools
    assert manager.allocate_slots(EngineRequest("a", list(range(8))), 8) is None
    assert batch.admit(0, list(range(8))) is None
    assert manager.stats().pools == before
    assert batch.refusal == Refusal(1, 0, 0, 0, pool="states", shard=None, can_wait=True)
    manager.pools["states"].free_page_ids(held)
    assert batch.admit(0, list(range(8))) == 0
    assert batch.refusal is None


def test_a_refusal_names_what_is_short() -> None:
    manager = make_manager(12, [FULL])
    batch, _ = make_batch(manager, 2)
    assert batch.admit(0, list(range(24))) == 0
    assert batch.admit(1, [*range(8), *range(100, 116)], num_reserved_pages=2) is None
    expected = Refusal(num_needed=4, num_free=5, num_reserved=2, num_hit_tokens=8, pool="kv", shard=None, can_wait=True)
    assert batch.refusal == expected
    assert batch.admit(1, [*range(8), *range(100, 116)], num_reserved_pages=2) is None
    assert batch.refusal == expected
    manager.page_pool.get_new_page_ids(5)
    batch.append([0], [1])
    result = batch.grow([0], 1)
    assert (result.num_grown, result.refusal) == (0, Refusal(1, 0, 0, 0, "kv", None, True))


def test_reserved_pages_are_those_of_attention() -> None:
    manager = make_manager({"states": 3, "kv": 8})
    request = EngineRequest("a", list(range(8)))
    assert list(manager.pools) == ["kv", "states"]
    assert manager.allocate_slots(request, 8, num_reserved_pages=6) is None
    assert manager.allocate_slots(request, 8, num_reserved_pages=5) is not None


def test_running_rows_never_wait_for_states() -> None:
    """A checkpoint is kept only if a page stays free for each free row."""
    manager = make_manager({"kv": 60, "states": 6})
    batch, _ = make_batch(manager, 4)
    for row in range(4):
        assert batch.admit(row, list(range(100 * row, 100 * row + 8))) == 0
        batch.append([row], [1])
        batch.grow([row], 1)
        batch.take_copies()
    assert manager.stats().pools["states"].num_held_pages == 4
    batch.check()


def test_what_can_never_fit_is_refused_by_the_name_of_its_pool() -> None:
    manager = make_manager({"kv": 8, "states": 4})
    manager.require_capacity(28)
    for call in (
        lambda: manager.require_capacity(29),
        lambda: manager.allocate_slots(EngineRequest("a", list(range(32))), 32),
        lambda: make_batch(manager, 2)[0].admit(0, list(range(32))),
    ):
        with pytest.raises(RequestTooLargeError, match="the pool 'kv' has 7"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: make_manager(12), ArgumentError, "several pools: a size for each pool"),
        (lambda _: make_manager({"kv": 12}), ArgumentError, "got pools \\['kv'\\], allowed: those of the groups"),
        (lambda _: make_manager({"kv": 12, "states": 1}), ArgumentError, "states"),
        (lambda _: make_manager({"kv": 12, "states": True}), ArgumentTypeError, "states"),
        (lambda _: make_manager({"kv": 12, "states": 6}, eviction="adaptive"), ArgumentError, "several pools"),
        (lambda _: make_manager({"kv": 12, "states": 6}, host_tier=HostTier(9)), ArgumentError, "several pools"),
        (lambda _: make_manager({"kv": 12, "states": 6}, page_pool=PagePool(12, True)), ArgumentError, "several pools"),
        (lambda manager: manager.page_pool, ArgumentError, "pools\\['kv'\\]"),
        (lambda manager: manager.expect(EngineRequest("a", [1]), seconds=1), ArgumentError, "expect: not supported"),
        (lambda manager: manager.expect_session("a", seconds=1), ArgumentError, "expect_session: not supported"),
        (lambda manager: manager.free(EngineRequest("a", [1]), seconds=1), ArgumentError, "seconds: not supported"),
        (lambda manager: manager.lease([1]), ArgumentError, "lease: not supported"),
        (lambda manager: manager.lease(EngineRequest("a", [1]), seconds=1), ArgumentError, "lease: not supported"),
        (lambda manager: manager.set_shares({"a": 0.5}), ArgumentError, "set_shares: not supported"),
        (lambda manager: manager.pools["kv"].snapshot(), ArgumentError, "snapshot: not supported"),
        (lambda manager: manager.pools["kv"].reset_prefix_cache(), ArgumentError, "reset_prefix_cache"),
        (lambda manager: manager.pools["kv"].stats, ArgumentError, "CacheManager.stats"),
        (
            lambda manager: manager.get_computed_pages(EngineRequest("a", [1]), data_parallel_size=2),
            ArgumentError,
            "data_parallel_size: not supported",
        ),
        (lambda manager: manager.pools["kv"].get_new_page_ids(2, dp_shard_hint=1, data_parallel_size=2), ArgumentError, "size"),
        (lambda manager: manager.pools["states"].free_page_ids([6]), PageIdError, "pool 'states': 0 to 5"),
        (lambda manager: manager.pools["states"].evict_pages(np.array([-1])), PageIdError, "pool 'states'"),
        (lambda manager: manager.pools["states"].get_new_page_ids(6), OutOfPagesError, "6 asked for, 5 free"),
    ],
)
def test_what_several_pools_refuse_is_named(call: Callable[[CacheManager], Any], error: type[Exception], message: str) -> None:
    manager = make_manager({"kv": 12, "states": 6})
    with pytest.raises(error, match=message):
        call(manager)
    assert manager.stats().num_free_pages == 16
    manager.check()


def test_pools_are_reset_and_evicted_by_name() -> None:
    manager = make_manager({"kv": 20, "states": 8})
    request = EngineRequest("a", list(range(20)))
    for num_computed, num_tokens in ((0, 8), (8, 12)):
        request.num_computed_tokens = num_computed
        manager.allocate_slots(request, num_tokens)
    request.num_computed_tokens = 20
    manager.take_copies()
    manager.free(request)
    assert (manager.stats().pools["kv"].num_cached_pages, manager.stats().pools["states"].num_cached_pages) == (5, 1)
    assert manager.pools["states"].evict_pages([1]) == 1
    assert manager.get_computed_pages(EngineRequest("b", list(range(20))))[1] == 0
    assert manager.reset_prefix_cache()
    assert manager.stats().num_cached_pages == 0
    assert manager.pools["states"].get_usage() == pytest.approx(1 / 8)
    manager.check()


def test_one_pool_by_name_is_one_pool() -> None:
    manager = make_manager({"kv": 20}, [FULL])
    assert manager.page_pool is manager.pools["kv"]
    assert manager.page_pool.num_pages == 20
    groups = [CacheGroupSpec(group.kv_cache_spec, pool="mine") for group in (FULL, STATE)]
    manager = make_manager(4, groups)
    batch, _ = make_batch(manager, 2)
    assert batch.admit(0, list(range(8))) == 0
    assert batch.admit(1, list(range(8, 16))) is None
    assert (list(manager.stats().pools), batch.refusal.pool) == (["mine"], "mine")
