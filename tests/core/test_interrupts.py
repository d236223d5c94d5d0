"""`KeyboardInterrupt` in the middle of a call: nothing is lost, and the call can be made again.

A signal is handled between two opcodes of a Python frame, never inside a native call: when a function begins, after a call, and
before the next round of a loop. So one test interrupts calls at each of these places in the package's own frames in turn, and
another by real signals, wherever they come.
"""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hybrids import CHUNK, FULL, PAGE_SIZE, WINDOW, allocate, make_told
from interrupts import call_in_thread, interrupted_everywhere
from managing import grouped
from router import Router
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    EngineRequest,
    MultiGroupPageTable,
    PagePool,
    PageTable,
    RequestTraits,
    Retention,
    RunningBatch,
)
from pagepool._core import EntryJournal

GROUPS = [CacheGroupSpec(spec) for spec in (FULL, WINDOW, CHUNK)]
NUM_PAGES = 64


# Requests of a manager.


class Requests:
    """A manager with a running request, and a second request whose prompt has the same beginning."""

    def __init__(self, **options: Any) -> None:
        self.manager = CacheManager(NUM_PAGES, GROUPS, 256, **grouped(**options))
        self.first = EngineRequest("first", list(range(16)), session_id="session")
        self.second = EngineRequest("second", [*range(13), *range(90, 97)], session_id="other")
        self.manager.allocate_slots(self.first, 16)
        self.manager.page_pool.evict_pages(self.manager.get_page_ids("first")[0][3:])
        self.first.num_computed_tokens = 16

    def start_second(self) -> tuple[int, tuple[list[int], ...]]:
        """Return the number of hit tokens, and the pages of each group, with null pages as 0."""
        hits, num_hit_tokens = self.manager.get_computed_pages(self.second)
        assert self.manager.allocate_slots(self.second, 20 - num_hit_tokens, num_hit_tokens, hits) is not None
        page_ids = self.manager.get_page_ids("second")
        return num_hit_tokens, tuple([min(page_id, 1) for page_id in ids] for ids in page_ids)

    def restart_second(self) -> tuple[int, tuple[list[int], ...]]:
        """Free the second request, and start it."""
        call_in_thread(self.manager.check)
        self.manager.free(self.second)
        self.manager.check()
        self.second.num_computed_tokens = 0
        return self.start_second()

    def decode_first(self) -> None:
        """Grow by a page in each group, with pages skipped and pages entered."""
        self.first.append_output_token_ids([7] * 9)
        self.manager.allocate_slots(self.first, 9)

    def delay_second(self) -> None:
        """Leave pages to be entered."""
        self.manager.allocate_slots(self.second, self.second.num_tokens, delay_cache_pages=True)
        self.second.num_computed_tokens = self.second.num_tokens

    def transfer_second(self) -> None:
        """Let the second request wait for tokens behind its hits."""
        hits, num_hit_tokens = self.manager.get_computed_pages(self.second)
        options = {"num_external_computed_tokens": 7, "delay_cache_pages": True}
        assert self.manager.allocate_slots(self.second, 0, num_hit_tokens, hits, **options) is not None
        self.second.num_computed_tokens = num_hit_tokens

    def free_all(self) -> None:
        """Free everything, whatever was interrupted."""
        for lease in self.manager.leases:
            lease.release()
        self.manager.check()
        for request in (self.second, self.first):
            self.manager.free(request)
        self.manager.check()
        assert self.manager.usage == 1 / NUM_PAGES
        assert not self.manager.page_pool.ref_counts().any()


MANAGER_CALLS: dict[str, tuple[Callable[[Requests], object], Callable[[Requests], object]]] = {
    "a look-up": (lambda r: None, lambda r: r.manager.get_computed_pages(r.second)),
    "an allocation with hits": (lambda r: None, Requests.start_second),
    "an allocation that skips and enters pages": (lambda r: None, Requests.decode_first),
    "caching": (Requests.delay_second, lambda r: r.manager.cache_pages(r.second, r.second.num_tokens)),
    "giving back": (Requests.start_second, lambda r: r.manager.free(r.second)),
    "waiting": (lambda r: None, Requests.transfer_second),
    "a commit": (Requests.transfer_second, lambda r: r.manager.commit_external(r.second, 7)),
    "a failure": (Requests.transfer_second, lambda r: r.manager.fail_external(r.second, 5)),
    "a lease": (lambda r: None, lambda r: r.manager.lease(r.manager.get_page_ids("first")[0][:3])),
    "a lease for a time": (lambda r: None, lambda r: r.manager.lease(r.first, seconds=10)),
    "an expectation": (lambda r: None, lambda r: r.manager.expect(r.first, seconds=10)),
    "an expectation of a session": (lambda r: None, lambda r: r.manager.expect_session("session", seconds=10)),
    "the end of a session": (lambda r: None, lambda r: r.manager.close_session("session")),
    "shares": (lambda r: None, lambda r: r.manager.set_shares({"x": 0.3})),
    "giving back for some time": (Requests.start_second, lambda r: r.manager.free(r.second, seconds=10)),
    "a reset that is refused": (lambda r: None, lambda r: r.manager.reset_prefix_cache()),
    "forgetting hashes": (Requests.start_second, lambda r: r.manager.free_page_hashes(r.second)),
}


HASHING_CALLS = [("callable", name) for name in ("a look-up", "an allocation that skips and enters pages", "caching")]


@pytest.mark.parametrize(("hashing", "name"), [*(("siphash128", name) for name in MANAGER_CALLS), *HASHING_CALLS])
def test_a_call_of_a_manager(hashing: str, name: str) -> None:
    """Afterwards the second request starts as if the call had not been made, or had completed."""
    options = {} if hashing == "siphash128" else {"hash_algo": hash}
    prepare, call = MANAGER_CALLS[name]

    def make() -> Requests:
        requests = Requests(**options)
        prepare(requests)
        return requests

    before, after = make(), make()
    call(after)
    expected = before.restart_second(), after.restart_second()
    for requests in interrupted_everywhere(make, call):
        assert requests.restart_second() in expected
        requests.free_all()
        assert requests.manager.reset_prefix_cache()
        assert requests.manager.stats().num_sessions == 0


class Leased(Requests):
    """A lease of the first request's pages, which ends when the clock is moved."""

    def __init__(self) -> None:
        super().__init__(retention=Retention(max_leased_share=1.0))
        self.set_time(100)
        self.lease = self.manager.lease(self.first, seconds=10)

    def set_time(self, seconds: float) -> None:
        self.manager.page_pool.store.set_time(seconds)


LEASE_CALLS: dict[str, tuple[Callable[[Leased], object], Callable[[Leased], object]]] = {
    "another lease": (lambda r: None, lambda r: r.manager.lease(r.first, seconds=10)),
    "an extension": (lambda r: None, lambda r: r.lease.extend(20)),
    "a release": (lambda r: None, lambda r: r.lease.release()),
    "a block": (lambda r: None, lambda r: r.lease.__exit__()),
    "a list": (lambda r: r.set_time(110), lambda r: r.manager.leases),
    "an allocation": (lambda r: r.set_time(110), Requests.start_second),
    "another lease at its end": (lambda r: r.set_time(110), lambda r: r.manager.lease(r.first, seconds=10)),
}


@pytest.mark.parametrize(("prepare", "call"), LEASE_CALLS.values(), ids=LEASE_CALLS)
def test_leases(prepare: Callable[[Leased], object], call: Callable[[Leased], object]) -> None:
    """A lease is listed, and holds its pages, or was given back."""

    def make() -> Leased:
        leased = Leased()
        prepare(leased)
        return leased

    for leased in interrupted_everywhere(make, call, min_places=0):
        manager = leased.manager
        call_in_thread(manager.check)
        leases = manager.leases
        assert leased.lease.is_held == (leased.lease in leases)
        assert manager.stats().num_leased_pages == sum(map(len, leases))
        manager.free(leased.first)
        manager.free(leased.second)
        page_ids = {page_id for lease in leases for page_id in lease.page_ids}
        assert set(np.flatnonzero(manager.page_pool.ref_counts()).tolist()) == page_ids
        leased.free_all()
        assert manager.stats().num_leased_pages == 0


def test_a_reset() -> None:
    """The call is complete or has no effect."""

    def make() -> Requests:
        requests = Requests()
        requests.free_all()
        return requests

    for requests in interrupted_everywhere(make, lambda requests: requests.manager.reset_prefix_cache()):
        requests.manager.check()
        assert requests.manager.reset_prefix_cache()
        assert not requests.manager.page_pool.cached_page_hash_to_page


def test_taking_events() -> None:
    """After an interrupt at any place, the next events are a snapshot."""
    for manager in interrupted_everywhere(make_told, lambda manager: manager.event_source.take(), 11):
        router = Router()
        router.apply(manager.take_events())
        assert len(router.pages) == len(manager.page_pool.cached_page_hash_to_page)
        assert manager.take_events() == []
        assert EntryJournal(manager.page_pool.store).kept_contexts() is not None


# Rows of a batch.


class Rows:
    """A batch with two of three rows in use, the first of which outlives the other."""

    def __init__(self) -> None:
        self.manager = CacheManager(NUM_PAGES, GROUPS, 256)
        table = MultiGroupPageTable(3, 256, 64, [PAGE_SIZE] * len(GROUPS))
        self.batch = RunningBatch(self.manager, table, max_steps_ahead=1)
        self.batch.admit(0, list(range(30)), step=self.batch.new_step())
        self.batch.admit(1, [*range(20), 5, 6, 7], step=self.batch.new_step())

    def admit(self) -> int | None:
        return self.batch.admit(2, [*range(25), 99, 98, 97], traits=RequestTraits(cache_salt=None, mm_features=[]))

    def release_all(self) -> None:
        """Free everything, whatever was interrupted."""
        for lease in self.manager.leases:
            lease.release()
        self.batch.check()
        self.batch.release(np.flatnonzero(self.batch.is_admitted).astype(np.int32))
        self.batch.check()
        assert not any(pool.num_held_pages for pool in self.manager.stats().pools.values())


BATCH_CALLS: dict[str, Callable[[Rows], object]] = {
    "admit": Rows.admit,
    "admit to a session": lambda r: r.batch.admit(2, [*range(25), 99, 98, 97], traits=RequestTraits(session_id="session")),
    "wait": lambda r: r.batch.admit(2, [*range(25), 99, 98, 97], num_external_tokens=7),
    "step": lambda r: r.batch.step([0, 1], [1, 2]),
    "plan": lambda r: r.batch.plan([0, 1], 1, 5),
    "append": lambda r: r.batch.append([0, 1], [1, 2]),
    "trim": lambda r: r.batch.trim([0, 1], 21),
    "release": lambda r: r.batch.release([1]),
    "release for some time": lambda r: r.batch.release([0, 1], seconds=[3, None]),
    "expect": lambda r: r.batch.expect(0, seconds=3),
    "lease": lambda r: r.batch.lease(0, stop=8, seconds=3),
    "move_row": lambda r: r.batch.move_row(1, 2),
    "check": lambda r: r.batch.check(),
}


@pytest.mark.parametrize("call", BATCH_CALLS.values(), ids=BATCH_CALLS)
def test_a_call_of_a_batch(call: Callable[[Rows], object]) -> None:
    """Row 2 is admitted or free; after its release it can be admitted. Most calls are a single native one, and not
    interrupted.
    """
    expected = Rows().admit()
    for rows in interrupted_everywhere(Rows, call, min_places=0):
        rows.batch.check()
        if rows.batch.is_admitted[2]:
            rows.batch.release([2])
        assert rows.admit() == expected
        rows.release_all()


# Media.


class Encoded:
    """A manager and its batch, with a medium that can be hit, and a request and a row that name it or another one."""

    def __init__(self, key: str) -> None:
        cross = CrossAttentionSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False, max_num_encoder_tokens=9)
        self.manager = CacheManager(20, [GROUPS[0], CacheGroupSpec(cross)], 64)
        self.batch = RunningBatch(self.manager, PageTable(2, 64 // PAGE_SIZE, 64))
        self.traits = RequestTraits(num_encoder_tokens=9, cross_key=key)
        self.request = EngineRequest("request", [1, 2, 3], num_encoder_tokens=9, cross_key=key)
        self.batch.admit(0, [1, 2, 3], traits=RequestTraits(num_encoder_tokens=9, cross_key="cached"))
        self.batch.release([0])

    def admit(self) -> None:
        assert self.batch.admit(1, [1, 2, 3], traits=self.traits) is not None

    def allocate(self) -> None:
        assert self.manager.allocate_slots(self.request, 3) is not None


@pytest.mark.parametrize("key", ["cached", "new"])
@pytest.mark.parametrize("call", [Encoded.admit, Encoded.allocate], ids=["row", "request"])
def test_a_call_with_a_medium(call: Callable[[Encoded], None], key: str) -> None:
    for encoded in interrupted_everywhere(lambda: Encoded(key), call):
        encoded.manager.check()
        encoded.manager.free(encoded.request)
        if encoded.batch.is_admitted[1]:
            encoded.batch.release([1])
        encoded.admit()
        encoded.batch.release([1])
        encoded.batch.check()
        encoded.manager.check()
        assert encoded.manager.stats().num_held_pages == 0


# The pool.


class Held:
    """A pool with held pages that the caller knows."""

    def __init__(self) -> None:
        self.pool = PagePool(16, enable_caching=True)
        self.pages = self.pool.get_new_pages(5)


POOL_CALLS: dict[str, tuple[Callable[[Held], object], int, int]] = {
    "free_pages": (lambda held: held.pool.free_pages(held.pages), 0, 15),
    "free_page_ids": (lambda held: held.pool.free_page_ids([page.page_id for page in held.pages]), 0, 15),
    "touch": (lambda held: held.pool.touch([held.pages]), 2, 10),
    "touch_page_ids": (lambda held: held.pool.touch_page_ids([page.page_id for page in held.pages]), 2, 10),
    "get_new_pages": (lambda held: held.pool.get_new_pages(3), 1, 7),
}


@pytest.mark.parametrize(("call", "num_references", "num_free"), POOL_CALLS.values(), ids=POOL_CALLS)
def test_a_call_of_a_pool(call: Callable[[Held], object], num_references: int, num_free: int) -> None:
    """All the pages or none. A caller cannot know which new pages an interrupted call took; a request or a row can."""
    for held in interrupted_everywhere(Held, call, min_places=0):
        held.pool.check()
        after = {page.ref_cnt for page in held.pages}, held.pool.get_num_free_pages()
        assert after in (({1}, 10), ({num_references}, num_free))


# The table.


def test_a_commit() -> None:
    """The next commit sends what this one may not have sent."""
    pytest.importorskip("jax")
    table = PageTable(4, 8, 64)
    table.warmup()
    page_ids = itertools.count(1)

    def make() -> PageTable:
        for row in range(4):
            table.add_row([next(page_ids) for _ in range(3)], row)
        return table

    for interrupted in interrupted_everywhere(make, lambda table: table.commit(4)):
        call_in_thread(lambda interrupted=interrupted: interrupted.commit(0))
        assert np.asarray(interrupted.commit(4)).tolist() == interrupted.page_table_cpu.tolist()


# Real signals.


def interrupt_after(seconds: float, call: Callable[[], object]) -> None:
    """Make a call that a timer's KeyboardInterrupt ends, unless it completes before."""
    with suppress(KeyboardInterrupt):  # only one: the timer does not repeat
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def _keyboard_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # jax has a callback in the collector, and an exception that is raised there goes no further
    yield
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("_keyboard_interrupts")
def test_signals_in_long_calls() -> None:
    """Look up, take, enter, touch and free the pages of long prompts until a signal arrives."""
    rng = Random(1)
    manager = CacheManager(20_000, GROUPS, 10_000)
    pool = manager.page_pool
    batch = RunningBatch(manager, MultiGroupPageTable(2, 10_000, 64, [PAGE_SIZE] * len(GROUPS)))
    prompts = [np.full(8500, i, dtype=np.int32) for i in range(2)]
    requests = [EngineRequest(f"{i}", prompt.tolist()) for i, prompt in enumerate(prompts)]
    held = pool.get_new_page_ids(4000)

    def use() -> None:
        for request in requests:
            allocate(manager, request)
            manager.free(request)
        batch.admit(0, prompts[0])
        batch.admit(1, prompts[1])
        batch.step([0, 1], [1, 2])
        batch.release([0, 1])

    def touch() -> None:
        while True:
            pool.touch_page_ids(held)
            pool.free_page_ids(held)

    for i in range(min(NUM_OPERATIONS // 1000, 200)):
        interrupt_after(rng.uniform(1e-5, 5e-3), touch if i % 2 else use)
        batch.check()
        for request in requests:
            manager.free(request)
        batch.release(np.flatnonzero(batch.is_admitted).astype(np.int32))
        counts = set(pool.ref_counts()[held].tolist())
        assert counts in ({1}, {2})
        if counts == {2}:
            pool.free_page_ids(held)
        pool.check()
        assert pool.get_num_free_pages() == 19_999 - len(held)
    pool.free_page_ids(held)
    assert manager.reset_prefix_cache()
