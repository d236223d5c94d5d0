"""Pools by kind: ids that count in each pool, all or none over pools, and what several pools refuse."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import hybrids
import pytest
from batch_model import package_pool_state
from managing import grouped

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    HostTier,
    MultiGroupPageTable,
    PagePool,
    Retention,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    LeaseBudgetError,
    PageIdError,
)

FULL, STATE = CacheGroupSpec(hybrids.FULL), CacheGroupSpec(hybrids.STATE, pool="states")
TOKENS = list(range(20))
WINDOW = CacheGroupSpec(SlidingWindowSpec(4, 1, 8, "float16", False, 9), pool="windows")


def make_manager(num_pages: Any, groups: list[CacheGroupSpec] | None = None, **options: Any) -> CacheManager:
    return CacheManager(num_pages, groups or [FULL, STATE], 64, **grouped(**options))


def make_batch(manager: CacheManager, num_rows: int, **options: Any) -> tuple[RunningBatch, MultiGroupPageTable]:
    tables = MultiGroupPageTable(num_rows, 64, 64, [4] * len(manager.kv_cache_groups))
    return RunningBatch(manager, tables, **options), tables


def test_ids_count_from_0_in_each_pool() -> None:
    manager = make_manager({"kv": 20, "states": 8})
    request = EngineRequest("a", list(range(20)))
    assert manager.allocate_slots(request, 8).get_page_ids() == ([1, 2], [1])
    writes = manager.take_moves().writes
    assert (writes.page_ids.tolist(), writes.group.tolist()) == ([2], [1])
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 7).get_page_ids() == ([3, 4], [])
    request.num_computed_tokens = 15
    manager.free(request)
    assert manager.pools["states"].free_page_ids_in_order().tolist() == [3, 4, 5, 6, 7, 1, 2]  # 2 is the checkpoint
    second = EngineRequest("b", list(range(20)))
    hits, num_hit_tokens = manager.get_computed_pages(second)
    assert (hits.get_page_ids(), num_hit_tokens) == (([1, 2], [2]), 8)
    assert [page.page_id for page in hits.pages[1]] == [2]
    manager.allocate_slots(second, 12, num_hit_tokens, hits)
    copies = manager.take_moves().copies
    assert (copies.src.tolist(), copies.dst.tolist(), copies.group.tolist()) == ([2], [3], [1])
    manager.check()


def test_a_checkpoint_leaves_a_state_for_each_free_row() -> None:
    """Until its step has run a checkpoint holds a page, and no row may wait for that."""
    manager = make_manager({"kv": 60, "states": 6})
    batch, _ = make_batch(manager, 4)
    for row in range(3):
        assert batch.admit(row, list(range(100 * row, 100 * row + 8))) == 0
    assert batch.take_moves().writes.rows.tolist() == [0]
    assert batch.admit(3, list(range(300, 308))) == 0
    batch.check()


def test_pages_reserved_for_attention_do_not_keep_a_state_from_its_checkpoint() -> None:
    manager = make_manager({"kv": 40, "states": 4})
    assert manager.allocate_slots(EngineRequest("a", TOKENS), 8, num_reserved_pages=10) is not None
    assert len(manager.take_moves().writes) == 1


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


def make_named(names: str) -> CacheManager:
    """Make a manager with a group of attention in each pool."""
    return make_manager(dict.fromkeys(names, 8), [CacheGroupSpec(FULL.kv_cache_spec, pool=name) for name in names])


def test_there_are_at_most_four_pools() -> None:
    with pytest.raises(ArgumentError, match=r"^num_pages: got 5 pools, allowed: 4$"):
        make_named("abcde")
    assert list(make_named("abcd").pools) == list("abcd")


def test_pools_of_another_manager_have_their_shards() -> None:
    manager = make_manager({"kv": 32, "states": 12})
    manager.allocate_slots(EngineRequest("a", TOKENS), 8, dp_shard_hint=1, data_parallel_size=2)
    again = make_manager({"kv": 32, "states": 12}, page_pool=manager.pools["kv"])
    again.check()
    assert again.pools["states"].get_new_page_ids(2, dp_shard_hint=1, data_parallel_size=2).tolist() == [8, 9]


def test_a_lease_of_a_request_has_pages_of_all_pools() -> None:
    manager = make_manager(
        {"windows": 9, "kv": 12, "states": 12}, [FULL, STATE, WINDOW], retention=Retention(max_leased_share=1)
    )
    request = EngineRequest("a", TOKENS)
    for request.num_computed_tokens, num_tokens in ((0, 8), (8, 8)):
        manager.allocate_slots(request, num_tokens)
        manager.take_moves()
    manager.free(request)
    lease = manager.lease(request, stop=8, seconds=30)
    assert lease.page_ids_by_pool == {"kv": [1, 2], "windows": [1, 2], "states": [2]}
    assert (lease.page_ids, len(lease)) == ([1, 2, 2, 1, 2], 5)
    assert repr(lease) == "Lease(page_ids=[1, 2, 2, 1, 2], is_held=True)"
    assert [pool.num_leased_pages for pool in manager.stats().pools.values()] == [2, 2, 1]
    assert [pool.num_held_pages for pool in manager.stats().pools.values()] == [2, 2, 1]
    for pool in manager.pools.values():
        pool.free_page_ids(pool.get_new_page_ids(pool.get_num_free_pages()))
    assert manager.get_computed_pages(request)[1] == 8
    manager.check()
    lease.release()
    assert manager.stats().num_leased_pages == manager.stats().num_held_pages == 0
    manager.check()


def test_ids_are_leased_in_their_pool() -> None:
    manager = make_manager({"kv": 20, "states": 8})
    states = manager.pools["states"]
    page_ids = states.get_new_page_ids(2)
    lease = states.lease(page_ids)
    states.free_page_ids(page_ids)
    assert (lease.page_ids, lease.page_ids_by_pool) == ([1, 2], {"kv": [], "states": [1, 2]})
    assert [pool.num_held_pages for pool in manager.stats().pools.values()] == [0, 2]
    assert manager.leases == (lease,)
    manager.check()
    with pytest.raises(PageIdError, match="got 8, allowed in the pool 'states': 0 to 7"):
        states.lease([8])
    with pytest.raises(PageIdError, match=r"got 3 \(at 1\), which is free and not cached"):
        states.lease([1, 3])
    with pytest.raises(ArgumentError, match=r"^page_pool: got 2 pools, allowed: one; name it, as in pools\['kv'\]$"):
        manager.lease([1])
    lease.release()
    assert states.get_num_free_pages() == 7


def test_leases_may_hold_a_share_of_each_pool() -> None:
    manager = make_manager({"kv": 41, "states": 6})
    batch, _ = make_batch(manager, 2)
    batch.admit(0, TOKENS[:8])
    batch.take_moves()
    batch.append([0], [1])
    batch.plan([0], 1)
    assert manager.max_num_leased_pages == 8 + 1
    lease = batch.lease(0, stop=8, seconds=30)
    assert lease.page_ids_by_pool == {"kv": [1, 2], "states": [2]}
    with pytest.raises(LeaseBudgetError, match=r"to lease of the pool 'states': got 1 more, 1 are leased, allowed: 1 in all$"):
        batch.lease(0, stop=8, seconds=30)
    assert batch.lease(0, stop=4, seconds=30).page_ids == [1]
    assert [pool.num_leased_pages for pool in manager.stats().pools.values()] == [3, 1]
    batch.check()
    manager._store.set_time(1 + 2**26)
    assert manager.leases == ()
    assert [pool.num_leased_pages for pool in manager.stats().pools.values()] == [0, 0]


def compute_states(manager: CacheManager, names: str, times: Sequence[float | None] = (), tenant: str | None = None) -> None:
    """Compute requests of eight tokens and one more, each of which leaves two full pages and a checkpoint."""
    for name, seconds in zip(names, times or [None] * len(names), strict=True):
        request = EngineRequest(name, [ord(name), *range(8)], session_id=name, tenant=tenant)
        for request.num_computed_tokens, num_tokens in ((0, 8), (8, 1)):
            manager.allocate_slots(request, num_tokens)
            manager.take_moves()
        manager.free(request)
        if seconds is not None:
            assert manager.expect(request, seconds=seconds) == 3


def list_states(manager: CacheManager, names: str, pool: str) -> str:
    """List the requests in the order in which their pages of a pool are evicted."""
    gone, pages = "", manager.pools[pool]
    while len(gone) < len(names):
        pages.get_new_page_ids(1)
        left = [name for name in names if name not in gone]
        asked = {name: EngineRequest("asked", [ord(name), *range(8)]) for name in left}
        gone += "".join(name for name in left if not manager.probe(asked[name]).num_hit_tokens)
    return gone


def share_pools(tenants: dict[str, str | None], shares: dict[str, float]) -> CacheManager:
    """Return pools with the requests of tenants, each a second after the one before it."""
    manager = make_manager({"kv": 101, "states": 12})
    manager._store.set_time(999)
    manager.set_shares(shares)
    for second, (name, tenant) in enumerate(tenants.items()):
        manager._store.set_time(1000 + second)
        compute_states(manager, name, tenant=tenant)
        manager.check()
    return manager


@pytest.mark.parametrize(("pool", "expected"), [("kv", "abcdefgh"), ("states", "cdefabgh")])
def test_a_tenant_has_its_share_of_each_pool(pool: str, expected: str) -> None:
    """So one that is above its share of states gives states, and no pages of attention, of which it has room."""
    manager = share_pools(dict(zip("abcdefgh", "yyxxxxxx", strict=True)), {"x": 0.2, "y": 0.3})
    stats = manager.stats()
    assert {name: dict(each.num_pages_by_tenant) for name, each in stats.pools.items()} == {
        "kv": {"x": 12, "y": 4},
        "states": {"x": 6, "y": 2},
    }
    assert stats.num_pages_by_tenant == {"x": 18, "y": 6}
    assert list_states(manager, "abcdefgh", pool) == expected
    manager.check()


@pytest.mark.parametrize("pool", ["kv", "states"])
def test_a_tenant_without_a_share_joins_the_others_in_each_pool(pool: str) -> None:
    manager = share_pools(dict(zip("abcdefg", ["x", None, "y", "x", None, "x", "y"], strict=True)), {"x": 0.3, "y": 0.3})
    manager.set_shares({"y": 0.3})
    manager.check()
    assert manager.stats().pools[pool].num_pages_by_tenant == {"y": {"kv": 4, "states": 2}[pool]}
    manager.set_shares({})
    manager.check()
    assert list_states(manager, "abcdefg", pool) == "abcdefg"


def count_cached(manager: CacheManager) -> dict[str, int]:
    return {name: pool.num_cached_pages for name, pool in manager.stats().pools.items()}


def test_a_checkpoint_stays_while_another_page_has_its_keys_and_values() -> None:
    manager = make_manager({"kv": 11, "states": 8}, eviction="adaptive")
    requests = [EngineRequest(name, TOKENS[:9]) for name in "ab"]
    for num_computed, num_tokens in ((0, 8), (8, 1)):
        for request in requests:
            request.num_computed_tokens = num_computed
            assert manager.allocate_slots(request, num_tokens) is not None
        manager.take_moves()
    for request in requests:
        manager.free(request)
    assert count_cached(manager) == {"kv": 4, "states": 1}
    free = manager.pools["kv"].get_num_free_pages()
    manager.pools["kv"].get_new_page_ids(free - 3)
    assert count_cached(manager) == {"kv": 3, "states": 1}
    manager.pools["kv"].get_new_page_ids(3)
    assert count_cached(manager) == {"kv": 0, "states": 0}
    manager.check()


def test_a_checkpoint_that_is_held_stays() -> None:
    manager = make_manager({"kv": 11, "states": 8}, eviction="adaptive")
    compute_states(manager, "a")
    lease = manager.pools["states"].lease([2])
    manager.pools["kv"].get_new_page_ids(10)
    assert count_cached(manager) == {"kv": 0, "states": 1}
    lease.release()
    manager.check()


def test_a_checkpoint_stays_where_a_tier_has_its_keys_and_values() -> None:
    manager = make_manager({"kv": 11, "states": 8}, eviction="adaptive", host_tier=HostTier({"kv": 20, "states": 8}))
    compute_states(manager, "a")
    held = manager.pools["kv"].get_new_page_ids(10)
    manager.complete(manager.take_moves().number)
    manager.pools["kv"].free_page_ids(held)
    assert count_cached(manager) == {"kv": 0, "states": 1}
    assert manager.probe(EngineRequest("asked", [ord("a"), *range(8)])).num_hit_tokens == 8


def run_requests(manager: CacheManager, rng: Random, num_requests: int) -> None:
    """Run requests with common beginnings, in chunks of eight tokens; a quarter of them keep their pages."""
    for i in range(num_requests):
        request = EngineRequest(f"{i} {rng.random()}", [rng.randrange(2) for _ in range(rng.randint(1, 24))])
        hits, request.num_computed_tokens = manager.get_computed_pages(request)
        options: Any = (request.num_computed_tokens, hits)
        request.num_computed_tokens = 0
        start = options[0]
        while start < request.num_tokens:
            num_tokens = min(8 - start % 8, request.num_tokens - start)
            if manager.allocate_slots(request, num_tokens, *options) is None:
                manager.free(request)
                break
            manager.take_moves()
            start = request.num_computed_tokens = start + num_tokens
            options = ()
        if rng.random() < 0.75:
            manager.free(request)


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
@pytest.mark.parametrize("seed", range(4))
def test_pools_of_another_manager_are_the_same(seed: int, eviction: str) -> None:
    sizes = {"windows": 20, "kv": 30, "states": 16}
    groups, options = [FULL, STATE, WINDOW], {"hash_seed": 3, "eviction": eviction}
    manager = make_manager(sizes, groups, **options)
    run_requests(manager, Random(seed), 30)
    assert min(pool.num_evicted_pages for pool in manager.stats().pools.values()) > 0
    for request_id in [*manager.registry.held]:
        manager.free(manager.registry.held[request_id].owner)
    before = package_pool_state(manager.pools, with_hashes=False)
    again = make_manager(dict(sorted(sizes.items())), groups, page_pool=manager.pools["states"], **options)
    assert list(again.pools) == list(manager.pools) == ["windows", "kv", "states"]
    again.check()
    assert package_pool_state(again.pools, with_hashes=False) == before
    assert again.stats().pools == manager.stats().pools
    run_requests(again, Random(seed), 30)
    again.check()


def test_pools_go_on_with_their_names_and_sizes_alone() -> None:
    manager = make_manager({"kv": 20, "states": 8}, hash_seed=3)
    manager.allocate_slots(EngineRequest("a", TOKENS), 8)
    page_pool = manager.pools["kv"]
    swapped = [CacheGroupSpec(FULL.kv_cache_spec, pool="states"), CacheGroupSpec(STATE.kv_cache_spec, pool="kv")]
    one = [CacheGroupSpec(group.kv_cache_spec) for group in (FULL, STATE)]
    for num_pages, groups, allowed in (
        ({"kv": 19, "states": 9}, None, r"\{'kv': 19, 'states': 9\}, caching True"),
        ({"states": 20, "kv": 8}, swapped, r"\{'states': 20, 'kv': 8\}, caching True"),
        (
            {"kv": 20, "other": 8},
            [FULL, CacheGroupSpec(STATE.kv_cache_spec, pool="other")],
            r"\{'kv': 20, 'other': 8\}, caching True",
        ),
        (27, one, "one pool of 27 pages"),
        (20, one, "one pool of 20 pages"),
    ):
        with pytest.raises(ArgumentError, match=rf"^page_pool: got pools \{{'kv': 20, 'states': 8\}}.* allowed: {allowed}$"):
            make_manager(num_pages, groups, page_pool=page_pool, hash_seed=3)
    with pytest.raises(
        ArgumentError, match=r"^page_pool: got pools \{'kv': 27\}, .* allowed: \{'kv': 20, 'states': 8\}, caching"
    ):
        make_manager({"kv": 20, "states": 8}, page_pool=PagePool(27, True))
    with pytest.raises(ArgumentTypeError, match=r"^page_pool: got int, allowed: PagePool, or None$"):
        make_manager({"kv": 20, "states": 8}, page_pool=7)
    assert make_manager({"states": 8, "kv": 20}, page_pool=page_pool, hash_seed=3).stats().num_cached_pages == 2


def test_pages_of_another_manager_hit_in_the_pools_of_their_groups_alone() -> None:
    groups = [FULL, CacheGroupSpec(FULL.kv_cache_spec, pool="other")]
    manager = make_manager({"kv": 20, "other": 20}, groups, hash_seed=3)
    manager.allocate_slots(EngineRequest("a", TOKENS), 8)
    page_pool = manager.pools["kv"]
    with pytest.raises(ArgumentError, match=r"^page_pool: kv_cache_groups\[0\].pool: got 'other', allowed: 'kv', with which"):
        make_manager({"kv": 20, "other": 20}, groups[::-1], page_pool=page_pool, hash_seed=3)
    again = make_manager({"kv": 20, "other": 20}, groups, page_pool=page_pool, hash_seed=3)
    assert again.get_computed_pages(EngineRequest("b", TOKENS))[1] == 8


def test_each_pool_shows_its_pages() -> None:
    manager = make_manager({"kv": 32, "states": 12})
    batch, _ = make_batch(manager, 4)
    batch.admit(0, TOKENS)
    kv, states = manager.pools["kv"], manager.pools["states"]
    assert batch.get_page_ids(0) == ([1, 2, 3, 4, 5], [1])
    assert (len(kv.pages), len(states.pages)) == (32, 12)
    assert [page.page_id for page in states.pages] == list(range(12))
    assert [page.ref_cnt for page in states.pages[1:5]] == [1, 1, 1, 0]
    assert states.pages[-1].page_id == 11
    with pytest.raises(PageIdError, match=r"^page id: got 12, allowed in the pool 'states': 0 to 11$"):
        assert states.pages[12]
    page_ids = states.get_new_page_ids(2)
    assert page_ids.tolist() == [4, 5]
    assert states.ref_counts().tolist() == [0, 1, 1, 1, 1, 1, *[0] * 6]
    states.free_page_ids(page_ids)
    assert states.get_num_free_pages() == 8
    assert repr(kv).startswith("PagePool(num_pages=32, num_free_pages=26, num_cached_pages=5, ")
    assert repr(states).startswith("PagePool(num_pages=12, num_free_pages=8, num_cached_pages=0, ")
    assert kv.get_num_free_pages() == 26
