"""A host tier behind a pool: moves of several batches, wrong calls, interrupts, threads. The random tests have the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hybrids import FULL, count_hits, make_batch, make_manager, start
from interrupts import call_in_thread, interrupted_everywhere
from settings import NUM_OPERATIONS
from threads import run_threads

from pagepool import CacheManager, EngineRequest, FailedLoads, HostTier, Moves, PageCopies
from pagepool._core import PageTier, add_tier
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, PageHashError

pytestmark = pytest.mark.usefixtures("drafter")

FIRST, OTHER = list(range(100, 121)), list(range(200, 264))


def make_tiered(*specs: Any, num_pages: int = 8, num_host_pages: int = 20, **options: Any) -> CacheManager:
    """Make a manager with a tier, by default of attention alone in a pool of 7 pages."""
    tier = HostTier(num_host_pages, **{name: options.pop(name) for name in ("policy",) if name in options})
    return make_manager(*specs or (FULL,), num_pages=num_pages, host_tier=tier, **options)


def pass_through(manager: CacheManager, token_ids: list[int]) -> None:
    """Compute a request, and end it. With a state its moves end at once."""
    request = start(manager, "a", token_ids)
    if manager.checkpoint_interval:
        complete(manager)
    manager.free(request)


def complete(manager: CacheManager) -> Moves:
    """Take moves, and complete them."""
    moves = manager.take_moves()
    if moves.number:
        manager.complete(moves.number)
    return moves


def fill_tier(manager: CacheManager, token_ids: list[int] = FIRST) -> None:
    """Cache a prompt, let another one evict it, and save it."""
    pass_through(manager, token_ids)
    pass_through(manager, OTHER[:28])
    complete(manager)


def evict_all(manager: CacheManager) -> None:
    """Let all free pages be evicted, and saved."""
    page_ids = manager.page_pool.get_new_page_ids(manager.page_pool.get_num_free_pages())
    manager.page_pool.free_page_ids(page_ids)
    complete(manager)


# Saves and loads.


def compute(manager: CacheManager, token_ids: list[int]) -> Moves:
    """Compute a request, and end it. Return the moves of the next step; these and those of its own end at once."""
    pass_through(manager, token_ids)
    complete(manager)
    return complete(manager)


def test_batches_that_take_moves_in_turn_run_in_one_step() -> None:
    """None of them saves pages of the step that was planned for all."""
    manager = make_tiered(num_pages=60, num_host_pages=120, policy="write_through")
    batches = [make_batch(manager) for _ in range(3)]
    for batch in batches:
        batch.admit(0, FIRST)
    assert [len(batch.take_moves()) for batch in (*batches, manager)] == [0, 0, 0, 0]
    for batch in batches:
        batch.step([0], [7])
    assert [len(batch.take_moves().saves) for batch in (manager, *batches)] == [5, 0, 0, 0]
    for num_saves in (0, 3):  # the others are idle
        batches[1].admit(1, OTHER[:13])
        assert len(batches[1].take_moves().saves) == num_saves
        batches[1].release([1])
    manager.check()


def test_a_page_is_saved_though_look_ups_prefer_a_held_twin_by_then() -> None:
    manager = make_tiered(num_pages=12, num_host_pages=30, policy="write_through", caches="computed")
    first, second = start(manager, "first", FIRST[:9]), start(manager, "second", FIRST[:9])
    first.num_computed_tokens = second.num_computed_tokens = 9
    manager.free(first)
    assert not complete(manager)
    manager.cache_pages(second, 9)
    assert len(complete(manager).saves) == 2
    manager.free(second)
    assert not complete(manager)
    evict_all(manager)
    assert manager.stats().host_tier.num_saved_pages == 2
    manager.check()


def test_a_small_tier_writes_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagepool"):
        large = make_tiered(num_pages=8, num_host_pages=15, policy="write_through")
        make_tiered(num_pages=8, num_host_pages=14, policy="write_back")
        assert not caplog.messages
        small = make_tiered(num_pages=8, num_host_pages=14, policy="write_through")
    message = "host_tier: 13 pages are fewer than twice the pool's 7, so it writes back, in place of write_through"
    assert caplog.messages == [message]
    assert len(compute(large, FIRST)) == 5
    assert len(compute(small, FIRST)) == 0


def test_a_page_that_fails_to_load_hits_no_more_though_an_equal_one_was_dropped_meanwhile() -> None:
    manager = make_tiered(num_pages=16)
    pass_through(manager, FIRST)
    evict_all(manager)
    loaded = start(manager, "loads", FIRST)
    transfers = manager.take_moves()
    computed = EngineRequest("computes", FIRST)
    pages = manager.allocate_slots(computed, len(FIRST))
    assert pages is not None
    manager.page_pool.evict_pages(pages.get_page_ids()[0])
    assert count_hits(manager, FIRST) == 20
    manager.fail(transfers.number, loads=range(5))
    assert count_hits(manager, FIRST) == 0
    manager.free(loaded, num_computed_tokens=0)
    manager.check()


# Wrong input.


def test_a_tier_is_for_one_pool() -> None:
    tier = HostTier(9)
    assert tier.stats().num_free_pages == 8
    manager = make_manager(FULL, host_tier=tier)
    with pytest.raises(ArgumentError, match="behind another pool"):
        make_manager(FULL, host_tier=tier)
    with pytest.raises(ArgumentError, match="a pool that has one"):
        make_manager(FULL, page_pool=manager.page_pool, host_tier=HostTier(9))
    with pytest.raises(ArgumentError, match="without prefix caching"):
        make_manager(FULL, enable_caching=False, host_tier=HostTier(9))


def test_transfers_end_once() -> None:
    manager = make_tiered()
    for number in (0, 1, -1, 1 << 70):
        with pytest.raises(ArgumentError, match="number"):
            manager.complete(number)
    pass_through(manager, FIRST)
    pass_through(manager, OTHER[:28])
    number = manager.take_moves().number
    for places in ([5], [-1], [0, 9]):
        with pytest.raises(ArgumentError, match="saves"):
            manager.fail(number, saves=places)
    with pytest.raises(ArgumentError, match="loads"):
        manager.fail(number, loads=[0])
    for wrong in ("1", 1.0, None):
        with pytest.raises(ArgumentTypeError):
            manager.complete(wrong)  # type: ignore[arg-type]
    manager.complete(number)
    with pytest.raises(ArgumentError, match="number: got 1, allowed: that of transfers in flight"):
        manager.complete(number)
    with pytest.raises(ArgumentError, match="without a host tier"):
        make_manager(FULL).complete(1)


def test_transfers_in_flight_are_listed() -> None:
    manager = make_tiered(num_pages=11)
    assert make_manager(FULL).list_moves_in_flight() == manager.list_moves_in_flight() == []
    fill_tier(manager)
    pass_through(manager, FIRST)
    first = manager.take_moves()
    pass_through(manager, OTHER[30:50])
    second = manager.take_moves()
    start(manager, "a", FIRST[:5])
    assert [repr(transfers) for transfers in manager.list_moves_in_flight()] == [repr(first), repr(second)]
    assert first.loads.src.size
    manager.complete(first.number)
    assert [transfers.number for transfers in manager.list_moves_in_flight()] == [second.number]


def test_results_are_made_by_calls() -> None:
    for kind in (Moves, PageCopies, FailedLoads):
        with pytest.raises(TypeError):
            kind()
    manager = make_tiered()
    fill_tier(manager)
    pass_through(manager, FIRST)
    transfers = manager.take_moves()
    assert repr(transfers).startswith(f"Moves(number={transfers.number}, loads=PageCopies(src=[")
    with pytest.raises(ValueError, match="read-only"):
        transfers.loads.src[0] = 1
    failed = manager.fail(transfers.number, loads=[0])
    assert repr(failed) == f"FailedLoads(number={transfers.number}, page_ids={failed.page_ids})"
    with pytest.raises(ArgumentError, match="another pool"):
        make_batch(make_tiered()).rewind(failed)
    tier = PageTier(manager.page_pool.store, 9)
    with pytest.raises(ArgumentError):
        add_tier(manager.page_pool.store, tier)


# Interrupts.


class Interrupted:
    """A manager with a tier that has a prompt, a request that is about to hit it, and two rows."""

    def __init__(self) -> None:
        self.manager = make_tiered(num_pages=24, num_host_pages=40)
        self.batch = make_batch(self.manager)
        self.batch.admit(0, OTHER[:10])
        self.batch.admit(1, OTHER[:6])
        pass_through(self.manager, FIRST)
        for first in range(2):
            pass_through(self.manager, [first, *OTHER[1:64]])
            complete(self.manager)
        self.request = EngineRequest("a", FIRST)

    def start(self) -> None:
        """Start the request, whose pages are loaded."""
        hits, num_hits = self.manager.get_computed_pages(self.request)
        assert num_hits == 20
        assert self.manager.allocate_slots(self.request, 1, num_hits, hits) is not None

    def end_all(self) -> None:
        """End everything, whatever was interrupted."""
        call_in_thread(self.manager.check)
        self.manager.take_moves()
        for transfers in self.manager.list_moves_in_flight():
            self.manager.complete(transfers.number)
        self.manager.free(self.request)
        self.batch.release(np.flatnonzero(self.batch.is_admitted))
        self.batch.check()
        assert self.manager.reset_prefix_cache()
        assert self.manager.page_pool.get_num_free_pages() == 23
        stats = self.manager.stats().host_tier  # type: ignore[union-attr]
        assert (stats.num_free_pages, stats.num_in_flight) == (39, 0)


def fail_loads(state: Interrupted) -> None:
    state.start()
    transfers = state.manager.take_moves()
    failed = state.manager.fail(transfers.number, loads=[0])
    state.manager.find_wrong_token(state.request, failed)
    state.batch.rewind(failed)


INTERRUPTED_CALLS: dict[str, Callable[[Interrupted], object]] = {
    "a request": Interrupted.start,
    "a row": lambda state: state.batch.admit(2, FIRST),
    "transfers": lambda state: complete(state.manager),
    "failures": fail_loads,
    "a reset": lambda state: state.manager.reset_prefix_cache(),
}


@pytest.mark.parametrize("call", INTERRUPTED_CALLS.values(), ids=INTERRUPTED_CALLS)
def test_interrupted_calls_lose_nothing(call: Callable[[Interrupted], object]) -> None:
    for state in interrupted_everywhere(Interrupted, call):
        state.end_all()


# All together.


def test_threads_share_a_tier() -> None:
    manager = make_tiered(num_pages=64, num_host_pages=200)

    def work(rng: Random, number: int) -> None:
        batch = make_batch(manager)
        for _ in range(min(NUM_OPERATIONS // 300, 300)):
            token_ids = [number * 1000 * (rng.random() < 0.5), *range(rng.randrange(1, 60))]
            try:
                is_admitted = batch.admit(0, token_ids) is not None
            except PageHashError:  # another thread took a page that was hit
                continue
            if is_admitted:
                complete(manager)
                batch.release([0])

    run_threads(4, 0, work)
    complete(manager)
    manager.check()


def test_a_damaged_tier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` looks at both."""
    from pagepool.page_pool import integrity

    copy_records = integrity.copy_records

    def copy_damaged(store: Any, names: str | None = None, of_tier: bool = False) -> dict[str, Any]:
        records = copy_records(store, names, of_tier)
        if of_tier:
            records["pages"]["ref_cnt"][3] += 1
        return records

    manager = make_tiered()
    fill_tier(manager)
    manager.check()
    monkeypatch.setattr(integrity, "copy_records", copy_damaged)
    with pytest.raises(IntegrityError, match=r"^host tier: page 3"):
        manager.check()


def test_a_refused_load_does_not_refuse_another_request_of_the_same_id() -> None:
    """A look-up whose loads had no room belongs to its request, and not to a later one with this id."""
    manager = make_tiered(FULL)
    for name, num_tokens in (("first", 16), ("held", 24)):
        request = EngineRequest(name, list(range(len(name), len(name) + num_tokens)))
        manager.allocate_slots(request, num_tokens)
        if name == "first":
            manager.free(request)
        if number := manager.take_moves().number:
            manager.complete(number)
    waiting = EngineRequest("again", [*range(5, 21), 0])
    hits, num_hits = manager.get_computed_pages(waiting)
    assert manager.allocate_slots(waiting, 17 - num_hits, num_hits, hits) is None
    assert manager.allocate_slots(EngineRequest("again", [7] * 3), 3) is not None
    manager.check()
