"""Retained and protected pages, with all policies, and what ends them."""

from __future__ import annotations

import time
from functools import partial
from random import Random
from typing import Any

import pytest
from hybrids import FULL, make_batch, manager_state, start
from hybrids import make_manager as make_hybrid
from refusing import refused
from settings import NUM_OPERATIONS
from twins import levels_of

import pagepool
from pagepool import CacheManager, EngineRequest
from pagepool._core import copy_records
from pagepool.errors import ArgumentError, ArgumentTypeError

POLICIES = ("lru", "adaptive")
# --- the order of eviction --------------------------------------------------------------------------------------------

PROMPT = list(range(8))
make_manager = partial(make_hybrid, FULL, num_pages=21)


def start_many(manager: CacheManager, names: str) -> dict[str, EngineRequest]:
    """Start requests of two pages each, and end them in this order. Return requests that hit both."""
    for request in [start(manager, name, [ord(name)] * 8) for name in names]:
        manager.free(request)
    return {name: EngineRequest(name, [ord(name)] * 9) for name in names}


def order_of(manager: CacheManager, requests: dict[str, EngineRequest]) -> str:
    """Return the requests in the order in which the free queue has their pages: one letter a page."""
    manager.check()
    keys = {hash_value: name for name, request in requests.items() for hash_value in hashes_of(manager, request)}
    pages = [manager.page_pool.pages[page_id] for page_id in manager.page_pool.free_page_ids_in_order()]
    return "".join(keys[page.page_hash.page_hash.hash_value] for page in pages if page.page_hash is not None)


def hashes_of(manager: CacheManager, request: EngineRequest) -> list[int]:
    chain = manager._hash_apart(request, request.num_tokens)
    return [chain[i] for i in range(len(chain))]


def evict(manager: CacheManager, num_pages: int) -> None:
    """Take pages, and put them behind all others."""
    manager.page_pool.free_page_ids(manager.page_pool.get_new_page_ids(num_pages))


def state_of(manager: CacheManager) -> Any:
    records = copy_records(manager.page_pool.store, "levels heap")
    return manager_state(manager), records["levels"].tolist(), records["heap"].tolist()


@pytest.mark.parametrize("eviction", POLICIES)
def test_pages_are_evicted_by_level(eviction: str) -> None:
    manager = make_manager(num_pages=15, eviction=eviction)
    requests = start_many(manager, "abcdefg")
    for name, priority in zip("abcde", (51, 49, 100, 0, 50), strict=True):
        assert manager.retain(requests[name], priority=priority) == 2
    assert manager.protect([EngineRequest("waits", [*requests["f"].all_token_ids, 1])]) == 2
    assert order_of(manager, requests) == "ddbbeeggaaccff"
    for left in ("bbeeggaaccff", "eeggaaccff", "ggaaccff", "aaccff", "ccff", "ff", ""):
        taken = manager.page_pool.get_new_page_ids(2)
        assert order_of(manager, requests) == left
        manager.page_pool.evict_pages(taken)


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_prefix_goes_behind_what_follows_it(eviction: str) -> None:
    manager = make_manager(eviction=eviction)
    request = start(manager, "a", list(range(16)))
    manager.free(request)
    for call in (lambda: manager.retain(request, priority=70), lambda: manager.protect([request]), lambda: manager.protect([])):
        call()
        order = manager.page_pool.free_page_ids_in_order().tolist()
        assert [page_id for page_id in order if page_id in (1, 2, 3)] == [3, 2, 1]  # no look-up hits the last of 4


def test_protection_moves_only_what_changes() -> None:
    manager = make_manager(num_pages=15)
    requests = start_many(manager, "abcd")
    waiting = {name: EngineRequest(f"{name} waits", [*request.all_token_ids, 1]) for name, request in requests.items()}
    assert manager.protect([waiting["a"], waiting["b"]]) == 4
    assert order_of(manager, requests) == "ccddbbaa"
    assert manager.protect([waiting["c"], waiting["b"], waiting["c"]]) == 4
    assert order_of(manager, requests) == "ddaabbcc"
    assert manager.retain(requests["b"], priority=10) == 2  # counts when the protection ends
    assert order_of(manager, requests) == "ddaabbcc"
    assert manager.protect([]) == 0
    assert order_of(manager, requests) == "bbddaacc"
    assert manager.protect(iter([EngineRequest("nothing", [7] * 20)])) == 0


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_normal_priority_alone_divides_nothing(eviction: str) -> None:
    manager = make_manager(eviction=eviction)
    requests = start_many(manager, "abc")
    before = state_of(manager)
    assert manager.retain(requests["a"]) == manager.retain(requests["a"], seconds=5.0) == 2
    assert manager.protect([]) == 0
    assert state_of(manager) == before
    assert copy_records(manager.page_pool.store, "")["first_part"] == 0


# --- the end of a priority --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_priority_ends_in_time(eviction: str) -> None:
    manager = make_manager(num_pages=9, eviction=eviction)
    requests = start_many(manager, "abcd")
    manager.retain(requests["b"], priority=10, seconds=1000)
    manager.retain(requests["c"], priority=80, seconds=1000)
    manager.retain(requests["a"], priority=90, seconds=0.01)
    assert order_of(manager, requests) == "bbddccaa"
    time.sleep(0.02)
    assert order_of(manager, requests) == "bbddccaa"
    manager.retain(requests["c"], priority=81)
    assert order_of(manager, requests) == "bbddaacc"
    assert copy_records(manager.page_pool.store, "")["num_deadlines"] == 2


@pytest.mark.parametrize("seed", range(3))
def test_deadlines_stay_in_order(seed: int) -> None:
    """Many pages get deadlines, other ones, and none; pages are evicted and dropped with theirs."""
    rng = Random(seed)
    manager = make_manager(num_pages=101)
    for step in range(max(NUM_OPERATIONS // 500, 150)):
        tokens = [rng.randrange(40)] * 4 * rng.randint(1, 12)
        request = start(manager, f"r{step}", tokens)
        manager.retain(request, priority=rng.choice((0, 40, 60, 100)), seconds=rng.choice((None, 1e-6, rng.uniform(1, 1e6))))
        manager.free(request)
        if rng.random() < 0.2:
            manager.page_pool.evict_pages(rng.sample(range(1, 101), 7))
        manager.check()
    assert manager.reset_prefix_cache()
    manager.check()
    assert copy_records(manager.page_pool.store, "")["num_deadlines"] == 0
    assert levels_of(manager.page_pool) == {}


@pytest.mark.parametrize("eviction", POLICIES)
def test_snapshots_have_no_levels(eviction: str) -> None:
    manager = make_manager(num_pages=15, eviction=eviction)
    requests = start_many(manager, "abcd")
    manager.retain(requests["a"], priority=90, seconds=1000)
    manager.retain(requests["d"], priority=10)
    restored = pagepool.PagePool.restore(manager.page_pool.snapshot())
    restored.check()
    assert levels_of(restored) == {}
    assert restored.ref_counts().tolist() == manager.page_pool.ref_counts().tolist()
    if eviction == "lru":
        assert restored.free_page_ids_in_order().tolist() == manager.page_pool.free_page_ids_in_order().tolist()
    restored.get_new_page_ids(14)
    restored.check()


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"priority": -1}, ArgumentError, "priority: got -1, allowed: 0 to 100"),
    ({"priority": 101}, ArgumentError, "priority: got 101, allowed: 0 to 100"),
    ({"priority": 50.0}, ArgumentTypeError, "priority: got float"),
    ({"seconds": -1.5}, ArgumentError, "seconds: got -1.5, allowed"),
    ({"seconds": float("nan")}, ArgumentError, "seconds: got nan"),
    ({"seconds": float("inf")}, ArgumentError, "seconds: got inf"),
    ({"seconds": "1"}, ArgumentTypeError, "seconds: got str"),
    ({"start": 5, "stop": 4}, ArgumentError, "stop: got 4"),
    ({"start": 9}, ArgumentError, "tokens 9 to 10: got no cached page"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
@pytest.mark.parametrize("of_row", [False, True])
def test_what_is_wrong_changes_nothing(of_row: bool, options: dict[str, Any], error: type[Exception], message: str) -> None:
    manager = make_manager()
    batch = make_batch(manager)
    request = EngineRequest("a", [*PROMPT, 8, 9])
    if of_row:
        batch.admit(0, request.all_token_ids)
    else:
        start(manager, "a", request.all_token_ids)
    manager.retain(start(manager, "b", [99] * 8), priority=7, seconds=1000)
    with refused(lambda: state_of(manager), error, message):
        _ = batch.retain(0, **options) if of_row else manager.retain(request, **options)


def test_what_is_not_cached_is_refused() -> None:
    manager = make_manager()
    batch = make_batch(manager)
    with pytest.raises(ArgumentError, match="tokens 0 to 8: got no cached page"):
        manager.retain(EngineRequest("a", PROMPT), priority=60)
    with pytest.raises(ArgumentError, match="row 0 is not admitted"):
        batch.retain(0, priority=60)
    with pytest.raises(ArgumentTypeError, match="requests: got int"):
        manager.protect(7)  # type: ignore[arg-type]
    uncached = make_manager(enable_caching=False)
    with pytest.raises(ArgumentError, match="got no cached page"):
        uncached.retain(start(uncached, "a", PROMPT), priority=60)
    assert uncached.protect([EngineRequest("b", PROMPT)]) == 0
    assert manager.retain(EngineRequest("a", PROMPT), 8) == manager.retain(EngineRequest("a", PROMPT), 3, 3) == 0
    assert copy_records(manager.page_pool.store, "")["first_part"] == 0


def test_a_wrong_request_protects_nothing() -> None:
    manager = make_manager()
    start_many(manager, "ab")
    assert manager.protect([EngineRequest("waits", [ord("a")] * 9)]) == 2
    with refused(lambda: state_of(manager), ArgumentTypeError):
        manager.protect([EngineRequest("waits", [ord("b")] * 9), object()])  # type: ignore[list-item]
