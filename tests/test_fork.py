"""Forks while other threads use a pool, manager, batch or table: calls in the child succeed or raise, and never hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    EngineRequestStatus,
    FullAttentionSpec,
    PageHash,
    PagePool,
    PageTable,
    RunningBatch,
    device_table,
)
from pagepool._core import HashChain
from pagepool.errors import ArgumentError, IntegrityError, OutOfPagesError, PageHashError, PagePoolError

PAGE_SIZE = 4
FULL = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)
NUM_PAGES = 8000
MANY_PAGES = 2000
"""Calls on that many pages release the GIL."""

NUM_FORKS = 50
NUM_THREADS = 3
CHILD_SECONDS = 20
WORKED, REFUSED, FAILED = 0, 3, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")
"""CPython and JAX warn about the threads, which are intended."""

Work = Callable[[Random], None]


def make_manager(**options: Any) -> CacheManager:
    return CacheManager(NUM_PAGES, [CacheGroupSpec(FULL)], 1 << 16, **options)


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


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


def fork(call: Callable[[], object]) -> int:
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
    except PagePoolError:
        code = REFUSED
    finally:
        os._exit(code)


def fork_often(call: Callable[[], object], num_forks: int = NUM_FORKS) -> Counter[int]:
    """Count how children ended, when forked at moments unrelated to the work of the threads."""
    rng = Random(1)
    ends: Counter[int] = Counter()
    for _ in range(num_forks):
        time.sleep(rng.random() * 2e-3)
        ends[fork(call)] += 1
        assert -signal.SIGALRM not in ends, "a child hung"
    return ends


def use_pool(pool: PagePool, rng: Random) -> None:
    with suppress(OutOfPagesError):
        page_ids = pool.get_new_page_ids(rng.choice((1, 5, MANY_PAGES)))
        pool.touch_page_ids(page_ids)
        pool.free_page_ids(page_ids)
        pool.free_page_ids(page_ids)


def test_a_pool_works_in_children() -> None:
    pool = PagePool(NUM_PAGES, True)

    def use() -> None:
        pool.check()
        use_pool(pool, Random(0))
        pool.check()
        pool.snapshot()

    with running(lambda rng: use_pool(pool, rng)):
        assert fork_often(use) == {WORKED: NUM_FORKS}
    pool.check()


def use_manager(manager: CacheManager, rng: Random) -> None:
    num_tokens = rng.choice((3, 50, 4500))
    request = EngineRequest(f"{threading.get_ident()} {rng.random()}", [rng.randrange(2)] * num_tokens)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    with suppress(PagePoolError):  # another thread may have taken a page that was hit
        manager.allocate_slots(request, num_tokens - num_hit_tokens, num_hit_tokens, hits)
    manager.free(request)
    manager.free_page_hashes(request)


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256"])
def test_a_manager_works_in_children(hash_algo: str) -> None:
    manager = make_manager(hash_algo=hash_algo)

    def use() -> None:
        manager.check()
        for _ in range(5):
            use_manager(manager, Random(0))
        manager.stats()
        manager.check()

    with running(lambda rng: use_manager(manager, rng)):
        assert fork_often(use) == {WORKED: NUM_FORKS}
    manager.check()


def test_a_batch_works_in_children() -> None:
    """Except for rows that another thread was admitting, whose purpose is unknown."""
    manager = make_manager()
    table = PageTable(NUM_THREADS + 2, 1 << 12, 64)
    batch = RunningBatch(manager, table)
    names = iter(range(NUM_THREADS))
    rows = threading.local()
    own = NUM_THREADS

    def run_row(row: int, rng: Random) -> None:
        num_tokens = rng.choice((3, 50, 4500))
        with suppress(PageHashError):  # another thread took a page that was hit
            batch.admit(row, [rng.randrange(2)] * num_tokens)
        if batch.is_admitted[row]:
            batch.step([row], [7])
            batch.trim([row], num_tokens // 2)
            batch.release([row])

    def work(rng: Random) -> None:
        if not hasattr(rows, "mine"):
            rows.mine = next(names)
        run_row(rows.mine, rng)

    def use() -> None:
        batch.check()
        for _ in range(3):
            run_row(own, Random(0))
        for row in range(NUM_THREADS):
            with suppress(PagePoolError):
                batch.admit(row, [1, 2, 3])
        batch.release([row for row in range(NUM_THREADS) if batch.is_admitted[row]])
        batch.check()

    with running(work):
        assert fork_often(use) == {WORKED: NUM_FORKS}
    batch.check()


def test_rows_that_forget_refusals_do_not_wait_for_forks() -> None:
    """The chain that found a refused row's hits is dropped as the row moves, under the batch's locks."""
    manager = make_manager()
    batch = RunningBatch(manager, PageTable(NUM_THREADS + 2, 1 << 12, 64))
    batch.admit(0, [1] * 50)
    names = iter(range(1, NUM_THREADS + 1))
    rows = threading.local()

    def work(rng: Random) -> None:
        if not hasattr(rows, "mine"):
            rows.mine = next(names)
        with suppress(PageHashError):
            assert batch.admit(rows.mine, [1] * 50, num_tokens=50, num_reserved_pages=NUM_PAGES) is None
        batch.swap_row(rows.mine, rows.mine)
        with suppress(ArgumentError):  # the other row is being admitted
            batch.swap_row(rows.mine, NUM_THREADS + 1)

    with running(work):
        assert fork_often(batch.check) == {WORKED: NUM_FORKS}


def test_a_table_works_in_children() -> None:
    tables = [PageTable(64, 4096, 64) for _ in range(2)]

    def use_tables(rng: Random) -> None:
        for table in tables:
            row = rng.randrange(64)
            table.add_row(list(range(rng.randrange(4000))), row)
            table.copy_aligned()
            table.swap_row(row, 0)

    def use() -> None:
        use_tables(Random(0))
        for table in tables:
            table.check()

    with running(use_tables):
        assert fork_often(use) == {WORKED: NUM_FORKS}


def test_chains_work_in_children() -> None:
    """Return a chain that many share, and others that are made and dropped."""
    chain = HashChain(1, bytes(16))

    def work(rng: Random) -> None:
        HashChain(1, bytes(16)).extend([1] * rng.randrange(10))
        chain.extend([1] * rng.choice((1, MANY_PAGES)))

    def use() -> None:
        num = len(chain)
        chain.extend([1] * MANY_PAGES)
        assert len(chain) == num + MANY_PAGES

    with running(work):
        assert fork_often(use) == {WORKED: NUM_FORKS}


def test_a_thread_that_goes_on_does_not_notice_forks() -> None:
    """Two threads fork at once, while others work."""
    manager = make_manager()
    ends: list[Counter[int]] = []
    forkers = [threading.Thread(target=lambda: ends.append(fork_often(manager.check, 20))) for _ in range(2)]
    with running(lambda rng: use_manager(manager, rng)):
        for thread in forkers:
            thread.start()
        for thread in forkers:
            thread.join()
    assert ends == [{WORKED: 20}] * 2
    assert manager.page_pool.get_num_free_pages() == NUM_PAGES - 1
    manager.check()


def test_children_of_children_work() -> None:
    manager = make_manager()

    def use() -> None:
        use_manager(manager, Random(0))
        assert fork(manager.check) == WORKED

    with running(lambda rng: use_manager(manager, rng)):
        assert fork_often(use, 20) == {WORKED: 20}


class StubbornRequest:
    """A request whose tokens are read under the manager's lock, until it is released."""

    request_id, num_tokens, num_computed_tokens = "stubborn", 8, 0
    sampling_params, status = None, EngineRequestStatus.WAITING

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    @property
    def all_token_ids(self) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            self.is_asked.set()
            self.may_answer.wait()
        return [1] * 8


def test_a_manager_whose_lock_never_comes_raises_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that holds the lock waits for the forking thread."""
    monkeypatch.setattr("pagepool.forking.MAX_WAIT_SECONDS", 0.1)
    manager, other, request = make_manager(), make_manager(), StubbornRequest()
    thread = threading.Thread(target=manager.get_computed_pages, args=(request,))
    thread.start()
    assert request.is_asked.wait(10)
    calls: list[Callable[[], object]] = [
        lambda: manager.get_computed_pages(EngineRequest("new", [1])),
        lambda: manager.allocate_slots(EngineRequest("new", [1]), 1),
        lambda: manager.free(EngineRequest("new", [1])),
        manager.check,
        manager.reset_prefix_cache,
    ]

    def use() -> None:
        for call in calls:
            with pytest.raises(IntegrityError, match=r"^CacheManager: got a call in a forked process, allowed: none"):
                call()
        use_manager(other, Random(0))
        assert fork(manager.check) == REFUSED

    try:
        assert fork(use) == WORKED
    finally:
        request.may_answer.set()
        thread.join()
    use_manager(manager, Random(0))
    assert fork(manager.check) == WORKED


def list_locks() -> list[tuple[str, Any, Callable[[], object]]]:
    """Owners of other locks, with a call that takes the lock."""
    manager = make_manager()
    manager.enable_events()
    names = manager.page_pool.store.names
    return [
        ("EventSource", manager.require_event_source()._lock, manager.take_events),
        ("HashNames", names._lock, lambda: names.add(1, PageHash(2, ()))),
        ("pagepool.device_table", device_table.COMMIT_LOCK, PageTable(1, 1, 1).clear),
    ]


@pytest.mark.parametrize("place", range(3))
def test_other_locks_that_never_come_raise_in_the_child(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagepool.forking.MAX_WAIT_SECONDS", 0.1)
    name, lock, call = list_locks()[place]
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_go.wait()

    def use() -> None:
        with pytest.raises(IntegrityError, match=rf"^{name}: got a call in a forked process, allowed: none"):
            call()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(10)
    try:
        assert fork(use) == WORKED
    finally:
        may_go.set()
        thread.join()
    call()
    assert fork(call) == WORKED


def test_hooks_may_make_and_drop_objects() -> None:
    """Hooks that were registered before pagepool was imported run while its locks are held."""
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
for pool, chain, table in made:
    pool.get_new_page_ids(3)
    chain.extend([1])
    table.add_row([1], 0)
if process_id:
    assert os.waitpid(process_id, 0)[1] == 0 and len(made) == 2
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
