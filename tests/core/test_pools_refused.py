"""What a manager with several pools refuses, by name, and the pages that each pool shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    RunningBatch,
)
from pagepool.errors import ArgumentError, PageIdError

ATTENTION = FullAttentionSpec(4, 1, 8, "float16", False)
STATES = MambaSpec(4, ((2, 2),), "float16", checkpoint_interval=8)
SIZES = {"kv": 32, "states": 12}
TOKENS = list(range(20))


def make_groups(*pools: str) -> list[CacheGroupSpec]:
    return [CacheGroupSpec(ATTENTION if pool != "states" else STATES, pool=pool) for pool in pools]


def make_manager(num_pages: Any = SIZES, *pools: str, **options: Any) -> CacheManager:
    return CacheManager(num_pages, make_groups(*(pools or SIZES)), 64, **options)


def make_batch(manager: CacheManager, **options: Any) -> RunningBatch:
    return RunningBatch(manager, MultiGroupPageTable(4, 64, 64, [4, 4]), **options)


def ask(manager: CacheManager) -> EngineRequest:
    """Return a request with slots."""
    manager.allocate_slots(request := EngineRequest("first", TOKENS), 16)
    return request


OTHER_SIZES = [
    (
        32,
        r"num_pages: got 32, allowed for groups of several pools: a size for each pool, such as \{'kv': 1024, 'states': 1024\}",
    ),
    ({"kv": 32}, r"num_pages: got pools \['kv'\], allowed: those of the groups, \['kv', 'states'\]"),
    ({"kv": 32, "state": 12}, r"num_pages: got pools \['kv', 'state'\], allowed: those of the groups, \['kv', 'states'\]"),
    ({"kv": 32, "states": 1}, r"num_pages\['states'\] must be at least 2, got 1"),
]


@pytest.mark.parametrize(("num_pages", "message"), OTHER_SIZES)
def test_sizes_that_are_not_those_of_the_groups(num_pages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_manager(num_pages)


def test_there_are_at_most_four_pools() -> None:
    with pytest.raises(ArgumentError, match=r"^num_pages: got 5 pools, allowed: 4$"):
        make_manager(dict.fromkeys("abcde", 8), *"abcde")
    assert list(make_manager(dict.fromkeys("abcd", 8), *"abcd").pools) == list("abcd")


def test_one_pool_may_have_a_name() -> None:
    manager = make_manager({"cache": 8}, "cache")
    assert manager.pools["cache"] is manager.page_pool
    assert make_manager(8, "cache").pools.keys() == {"cache"}


UNSUPPORTED: dict[str, Callable[[CacheManager], Any]] = {
    "data_parallel_size": lambda manager: make_batch(manager, data_parallel_size=3),
    "expect": lambda manager: manager.expect(ask(manager), seconds=5),
    "expect_session": lambda manager: manager.expect_session("session", seconds=5),
    "free_page_queue": lambda manager: manager.pools["kv"].free_page_queue,
    "lease": lambda manager: manager.lease(ask(manager), seconds=5),
    "seconds": lambda manager: manager.free(ask(manager), seconds=5),
    "set_shares": lambda manager: manager.set_shares({"tenant": 0.5}),
    "snapshot": lambda manager: manager.pools["kv"].snapshot(),
}
SHARDED: list[Callable[[CacheManager], Any]] = [
    lambda manager: manager.allocate_slots(EngineRequest("first", TOKENS), 16, data_parallel_size=3),
    lambda manager: manager.get_computed_pages(EngineRequest("first", TOKENS), data_parallel_size=3),
    lambda manager: manager.require_capacity(16, data_parallel_size=3),
    lambda manager: manager.pools["states"].get_new_page_ids(1, data_parallel_size=3),
]


@pytest.mark.parametrize(
    ("name", "call"),
    [*UNSUPPORTED.items(), *(("data_parallel_size", call) for call in SHARDED)],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_supported_is_named(name: str, call: Callable[[CacheManager], Any]) -> None:
    manager = make_manager()
    with pytest.raises(ArgumentError, match=rf"^{name}: not supported with several pools \(kv, states\)$"):
        call(manager)
    manager.check()


def test_options_of_one_pool() -> None:
    for options in ({"host_tier": HostTier(64)}, {"page_pool": PagePool(32, True)}):
        name, value = next(iter(options.items()))
        with pytest.raises(ArgumentError, match=f"^{name}: got {type(value).__name__}, allowed with several pools: None$"):
            make_manager(**options)
    with pytest.raises(ArgumentError, match=r"^eviction: got 'adaptive', allowed with several pools: None$"):
        make_manager(eviction="adaptive")
    with pytest.raises(ArgumentError, match=r"^page_pool: got 2 pools, allowed: one; name it, as in pools\['kv'\]$"):
        assert make_manager().page_pool
    for call in (lambda pool: pool.stats, lambda pool: pool.reset_prefix_cache()):
        with pytest.raises(ArgumentError, match="of one pool, where CacheManager"):
            call(make_manager().pools["kv"])


def test_each_pool_shows_its_pages() -> None:
    manager = make_manager()
    batch = make_batch(manager)
    batch.admit(0, TOKENS)
    kv, states = manager.pools["kv"], manager.pools["states"]
    assert batch.get_page_ids(0) == ([1, 2, 3, 4, 5], [1])
    assert (len(kv.pages), len(states.pages)) == (32, 12)
    assert [page.page_id for page in states.pages] == list(range(12))
    assert [page.ref_cnt for page in states.pages[1:3]] == [1, 0]
    assert states.pages[-1].page_id == 11
    with pytest.raises(PageIdError, match=r"^page id: got 12, allowed in the pool 'states': 0 to 11$"):
        assert states.pages[12]
    page_ids = states.get_new_page_ids(2)
    assert page_ids.tolist() == [2, 3]
    assert states.ref_counts().tolist() == [0, 1, 1, 1, *[0] * 8]
    states.free_page_ids(page_ids)
    assert states.get_num_free_pages() == 10
    assert repr(kv).startswith("PagePool(num_pages=32, num_free_pages=26, num_cached_pages=5, ")
    assert repr(states).startswith("PagePool(num_pages=12, num_free_pages=10, num_cached_pages=0, ")
    assert kv.get_num_free_pages() == 26
