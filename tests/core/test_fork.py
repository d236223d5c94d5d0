"""Forks: what the parent made raises in a child, whatever other threads were doing; nothing waits, and the parent goes on."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from hybrids import FULL, PAGE_SIZE
from hybrids import make_manager as make_hybrid
from settings import NUM_OPERATIONS

from pagepool import (
    CacheManager,
    CachePage,
    EngineRequest,
    FreeCachePageQueue,
    HostTier,
    PageHash,
    PageHashWithGroupId,
    PagePool,
    PageTable,
    RunningBatch,
    StepInputs,
    page_table,
)
from pagepool._core import HashChain
from pagepool.errors import IntegrityError, OutOfPagesError, PageHashError, PagePoolError
from pagepool.router import PrefixIndex

NUM_PAGES = 8000
MANY_PAGES = 2000
"""Calls on that many pages release the GIL."""

NUM_FORKS = max(2, min(NUM_OPERATIONS // 4000, 30))
NUM_THREADS = 3
CHILD_SECONDS = 20
WORKED, FAILED = 0, 4
MESSAGE = "^{}: got a call in a forked process, allowed: calls in the process that made it$"

pytestmark = [
    pytest.mark.usefixtures("switch_often"),
    pytest.mark.filterwarnings("ignore:.*fork"),  # CPython and JAX warn about the threads, which are intended
]

Work = Callable[[Random], None]
Call = Callable[[], object]

make_manager = partial(make_hybrid, FULL, num_pages=NUM_PAGES, max_model_len=1 << 16)


@contextmanager
def running(work: Work) -> Iterator[None]:
    """Threads that repeat `work`."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def run(number: int) -> None:
        rng = Random(number)
        try:
            while not is_over.is_set():
                work(rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def fork(call: Call) -> int:
    """Run `call` in a forked child, which SIGALRM ends if it hangs. Returns how it ended."""
    process_id = os.fork()
    if process_id:
        status = os.waitpid(process_id, 0)[1]
        return os.waitstatus_to_exitcode(status)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CHILD_SECONDS)
    code = FAILED
    try:
        call()
        code = WORKED
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def fork_often(call: Call) -> None:
    """Fork at moments unrelated to the work of the threads."""
    rng = Random(1)
    for _ in range(NUM_FORKS):
        time.sleep(rng.random() * 2e-3)
        assert fork(call) == WORKED


def refuse(name: str, *calls: Call) -> None:
    """Assert that calls raise the error for an object of another process."""
    for call in calls:
        with pytest.raises(IntegrityError, match=MESSAGE.format(name)):
            call()


def use_pool(pool: PagePool, rng: Random) -> None:
    with suppress(OutOfPagesError):
        page_ids = pool.get_new_page_ids(rng.choice((1, 5, MANY_PAGES)))
        pool.touch_page_ids(page_ids)
        pool.free_page_ids(page_ids)
        pool.free_page_ids(page_ids)


def use_manager(manager: CacheManager, rng: Random) -> None:
    num_tokens = rng.choice((3, 50, 4500))
    request = EngineRequest(f"{threading.get_ident()} {rng.random()}", [rng.randrange(2)] * num_tokens)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    with suppress(PagePoolError):  # another thread may have taken a page that was hit
        manager.allocate_slots(request, num_tokens - num_hit_tokens, num_hit_tokens, hits)
    manager.free(request)
    manager.free_page_hashes(request)


class OwnRow(threading.local):
    """A row for each thread, and one for children."""

    def __init__(self, rows: Iterator[int]) -> None:
        self.row = next(rows)


def share_pool() -> tuple[Work, Call]:
    pool = PagePool(NUM_PAGES, True)

    def use() -> None:
        pool.check()
        use_pool(pool, Random(0))
        pool.check()

    return lambda rng: use_pool(pool, rng), use


def share_manager() -> tuple[Work, Call]:
    manager = make_manager()

    def use() -> None:
        manager.check()
        for _ in range(5):
            use_manager(manager, Random(0))
        manager.stats()
        manager.check()

    return lambda rng: use_manager(manager, rng), use


def share_batch() -> tuple[Work, Call]:
    batch = RunningBatch(make_manager(), PageTable(NUM_THREADS + 2, 1 << 12, 64))
    own = OwnRow(itertools.count(-1))  # the first is for this thread

    def run_row(row: int, rng: Random) -> None:
        num_tokens = rng.choice((3, 50, 4500))
        with suppress(PageHashError):  # another thread took a page that was hit
            batch.admit(row, [rng.randrange(2)] * num_tokens)
        if batch.is_admitted[row]:
            batch.step([row], [7])
            batch.trim([row], num_tokens // 2)
            batch.release([row])

    def use() -> None:
        batch.check()
        for _ in range(3):
            run_row(NUM_THREADS, Random(0))
        for row in range(NUM_THREADS):
            with suppress(PagePoolError):
                batch.admit(row, [1, 2, 3])
        batch.release([row for row in range(NUM_THREADS) if batch.is_admitted[row]])
        batch.check()

    return lambda rng: run_row(own.row, rng), use


def share_tables() -> tuple[Work, Call]:
    tables = [PageTable(64, 4096, 64) for _ in range(2)]

    def work(rng: Random) -> None:
        for table in tables:
            row = rng.randrange(64)
            table.add_row(list(range(rng.randrange(4000))), row)
            table.copy_aligned()
            table.swap_row(row, 0)

    def use() -> None:
        work(Random(0))
        for table in tables:
            table.check()

    return work, use


def share_chain() -> tuple[Work, Call]:
    """Return the use of a chain that many share, and of others that are made and dropped."""
    chain = HashChain(1, bytes(16))

    def work(rng: Random) -> None:
        HashChain(1, bytes(16)).extend([1] * rng.randrange(10))
        chain.extend([1] * rng.choice((1, MANY_PAGES)))

    def use() -> None:
        num = len(chain)
        chain.extend([1] * MANY_PAGES)
        assert len(chain) == num + MANY_PAGES

    return work, use


SHARED: dict[str, Callable[[], tuple[Work, Call]]] = {
    "pool": share_pool,
    "manager": share_manager,
    "batch": share_batch,
    "tables": share_tables,
    "chain": share_chain,
}


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_what_threads_share_is_refused_in_children(share: Callable[[], tuple[Work, Call]]) -> None:
    """Two threads fork at once, while others work; these do not notice. A child makes the same for itself, and so does its own
    child. What it inherited goes without harm.
    """
    shared = [share()]

    def use_own() -> None:
        refuse(r"\w+", shared[0][1])
        shared.clear()
        gc.collect()
        shared.append(share())
        shared[0][1]()

    def use_twice() -> None:
        use_own()
        assert fork(use_own) == WORKED
        shared[0][1]()

    errors: list[BaseException] = []

    def run(call: Call) -> None:
        try:
            fork_often(call)
        except BaseException as error:
            errors.append(error)

    forkers = [threading.Thread(target=run, args=(call,)) for call in (use_own, use_twice)]
    with running(shared[0][0]):
        for thread in forkers:
            thread.start()
        for thread in forkers:
            thread.join()
    assert not errors
    shared[0][1]()


class All:
    """One of each object, and calls of it by the name in the error."""

    def __init__(self) -> None:
        self.manager = manager = make_manager(num_pages=64, host_tier=HostTier(16))
        self.pool, self.index = manager.page_pool, PrefixIndex(PAGE_SIZE)
        self.table, self.spare = PageTable(4, 16, 64), PageTable(4, 16, 64)
        self.batch = batch = RunningBatch(manager, self.table)
        self.inputs = StepInputs(batch, num_tokens=16, num_reqs=4, fields=["positions"])
        batch.admit(0, [1, 2, 3], num_tokens=3)
        self.held = EngineRequest("held", list(range(9)))
        manager.allocate_slots(self.held, 9)
        self.held.num_computed_tokens = 9
        self.lease = manager.lease(self.held, seconds=60)
        self.step = batch.step([0], [4])
        self.chain = HashChain(1, bytes(16))
        self.queue = FreeCachePageQueue([CachePage(3), CachePage(5)])

    def calls(self) -> dict[str, list[Call]]:
        manager, pool, batch, table, index, held = self.manager, self.pool, self.batch, self.table, self.index, self.held
        new = EngineRequest("new", [1])
        return {
            "CacheManager": [
                lambda: manager.get_computed_pages(new),
                lambda: manager.allocate_slots(new, 1),
                lambda: manager.free(held),
                lambda: manager.expect(held, seconds=1),
                lambda: manager.close_session("session"),
                lambda: manager.lease(held, seconds=1),
                manager.check,
                manager.reset_prefix_cache,
            ],
            r"(CacheManager|PagePool)": [
                lambda: manager.allocate_slots(held, 1),  # nothing is due, and no lock is taken
                lambda: manager.cache_pages(held, 9),
                lambda: manager.get_page_ids("held"),
                manager.stats,
                manager.take_moves,
                lambda: manager.probe(new),
            ],
            "PagePool": [
                lambda: pool.get_new_page_ids(1),
                lambda: pool.free_page_ids([1]),
                lambda: pool.touch_page_ids([1]),
                lambda: pool.lease([1]),
                lambda: pool.evict_pages([1]),
                pool.get_num_free_pages,
                pool.ref_counts,
                pool.free_page_ids_in_order,
                pool.check,
                lambda: pool.pages[1].ref_cnt,
                lambda: pool.pages[1].incr_ref(),
                lambda: setattr(pool.pages[40], "page_hash", PageHashWithGroupId(PageHash(1, (2,)), 0)),
                lambda: pool.store.names.add(1, PageHash(2, ())),
                lambda: self.lease.is_held,
                self.lease.release,
                lambda: self.queue.popleft(),
                lambda: CacheManager(64, manager.kv_cache_groups, 64, page_pool=pool),
            ],
            "RunningBatch": [
                lambda: batch.admit(1, [1, 2, 3]),
                lambda: batch.step([0], [4]),
                lambda: batch.plan([0], 1),
                lambda: batch.append([0], [4]),
                lambda: batch.trim([0], 2),
                lambda: batch.fork(0, [1]),
                lambda: batch.move_row(0, 1),
                lambda: batch.swap_row(0, 1),
                lambda: batch.commit_external(0, 0),
                lambda: batch.fail_external(0, 0),
                lambda: batch.settle(self.step),
                lambda: batch.settle(self.step, failed=True),
                lambda: batch.release([0]),
                lambda: batch.get_page_ids(0),
                lambda: batch.refusal,
                batch.check,
                lambda: self.inputs.fill(self.step),
            ],
            r"(RunningBatch|PagePool)": [
                lambda: batch.expect(0, seconds=1),
                lambda: batch.lease(0, seconds=1),
                lambda: batch.probe(1, [1, 2, 3]),
            ],
            "PageTable": [
                lambda: table.append_row([1], 2),
                lambda: table.clear_row(0),
                table.clear,
                table.check,
                lambda: RunningBatch(make_manager(), self.spare),
            ],
            "HashChain": [lambda: self.chain.extend([1]), lambda: len(self.chain)],
            "PrefixIndex": [lambda: index.find([1]), lambda: index.apply(0, b""), index.stats, index.check],
        }

    def use(self) -> None:
        """Use each object."""
        self.batch.step([0], [7])
        assert self.manager.get_page_ids("held") == ([2, 3, 4],)
        self.pool.free_page_ids(self.pool.get_new_page_ids(2))
        self.spare.append_row([5], 1)
        self.chain.extend([1])
        assert self.queue.num_free_pages == 2
        self.index.check()
        self.batch.check()


def test_every_call_is_refused() -> None:
    """In a child and in its child. The parent, and what the child makes, work."""
    everything = All()

    def use(depth: int) -> None:
        for name, calls in everything.calls().items():
            refuse(name, *calls)
        own = All()
        own.use()
        if depth:
            assert fork(lambda: use(depth - 1)) == WORKED
            assert fork(lambda: refuse("RunningBatch", lambda: own.batch.step([0], [8]))) == WORKED
        own.use()

    assert fork(lambda: use(1)) == WORKED
    everything.use()


def test_events_are_refused() -> None:
    pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
    manager = make_manager()
    manager.enable_events()
    manager.allocate_slots(EngineRequest("a", list(range(9))), 9)

    def use() -> None:
        refuse("EventSource", manager.take_events, manager.snapshot_events)

    assert fork(use) == WORKED
    assert manager.take_events()


def list_locks() -> list[tuple[str, Any, Call]]:
    """Return owners of locks, with a call that takes the lock."""
    manager = make_manager()
    names, new = manager.page_pool.store.names, EngineRequest("new", [1])
    return [
        ("CacheManager", manager.registry.lock, lambda: manager.allocate_slots(new, 1)),
        ("PagePool", names._lock, lambda: names.add(1, PageHash(2, ()))),
        ("PageTable", page_table.COMMIT_LOCK, PageTable(1, 1, 1).clear),
    ]


@pytest.mark.parametrize("place", range(3))
def test_no_fork_waits_for_a_lock_that_is_held(place: int) -> None:
    """The thread that holds the lock waits for the forking thread."""
    name, lock, call = list_locks()[place]
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_go.wait()

    def use() -> None:
        refuse(name, call)
        for _, own_lock, own_call in list_locks():
            with own_lock:
                own_call()
        use_manager(make_manager(), Random(0))

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(10)
    try:
        assert fork(use) == WORKED
    finally:
        may_go.set()
        thread.join()
    call()


def test_a_fork_within_a_call() -> None:
    """The tokens of a request are read by Python code that forks: the call raises in the child, and goes on in the parent."""
    manager, ends = make_manager(), []

    class Forking(EngineRequest):
        def __getattribute__(self, name: str) -> Any:
            if name == "all_token_ids" and not ends:
                ends.append(None)
                ends[0] = os.fork()
            return super().__getattribute__(name)

    request = Forking("forking", list(range(9)))
    code = FAILED
    try:
        assert manager.allocate_slots(request, 9) is not None
    except IntegrityError:
        code = WORKED
    finally:
        if ends == [0]:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(ends[0], 0)[1]) == WORKED
    manager.check()
    manager.free(request)


def test_hooks_may_make_and_drop_objects() -> None:
    """An object belongs to the process in which the hook runs."""
    code = """
import os
kept, made = [], []
def make():
    kept.clear()
    made.append([pagepool.PagePool(8, True), HashChain(1, bytes(16)), pagepool.PageTable(1, 1, 1)])
os.register_at_fork(before=make, after_in_child=make, after_in_parent=make)
import pagepool
from pagepool._core import HashChain
kept += [pagepool.PagePool(8, True), HashChain(1, bytes(16)), pagepool.PageTable(1, 1, 1)]
process_id = os.fork()
before, after = made
for pool, chain, table in made if process_id else [after]:
    pool.get_new_page_ids(3)
    chain.extend([1])
    table.add_row([1], 0)
if process_id:
    assert os.waitpid(process_id, 0)[1] == 0
else:
    for call in (lambda: before[0].get_new_page_ids(3), lambda: before[1].extend([1]), lambda: before[2].add_row([1], 0)):
        try:
            call()
        except pagepool.errors.IntegrityError:
            continue
        os._exit(1)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
