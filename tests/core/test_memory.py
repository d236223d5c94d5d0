"""Memory: no leaks, everything is collected, and a failed allocation leaves the state unchanged."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import combinations, count
from statistics import median
from typing import Any

import numpy as np
import pytest
from hybrids import FULL, PAGE_SIZE, WINDOW, allocate, make_told
from hybrids import make_manager as make_hybrid
from pool_arrays import pool_lists
from router import Router
from settings import NUM_OPERATIONS

from pagepool import (
    CacheManager,
    CachePage,
    EngineRequest,
    FreeCachePageQueue,
    MultiGroupPageTable,
    PagePool,
    RequestTraits,
    RunningBatch,
)
from pagepool._core import HashChain, PageIds, PageStore, keep_token_ids, siphash128

NUM_USES = min(NUM_OPERATIONS // 2000, 25)
NUM_SIZES = min(4 + NUM_OPERATIONS // 20_000, 12)
NUM_PARTS = 3
make_manager = partial(make_hybrid, FULL, WINDOW, num_pages=64, max_model_len=256)


def make_table(num_rows: int = 3) -> MultiGroupPageTable:
    return MultiGroupPageTable(num_rows, 256, 64, [PAGE_SIZE] * 2)


# No leaks.


clear_caches: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Forgets what CPython has looked up: names that are kept in its caches would seem to leak."""


def traced_bytes() -> int:
    """Return the memory that Python and the core hold."""
    gc.collect()
    clear_caches()
    return tracemalloc.get_traced_memory()[0]


@contextmanager
def traced() -> Iterator[None]:
    """Trace memory, and let collections pass over what there is already."""
    gc.freeze()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def use_manager() -> None:
    manager = make_manager(keep_token_ids=True)
    request = EngineRequest("first", list(range(30)))
    pages = allocate(manager, request)
    assert pages is not None
    assert pages.pages[0][0].next_free_page is None
    manager.page_pool.get_new_pages(2, dp_shard_hint=1, data_parallel_size=2)


def use_batch() -> None:
    batch = RunningBatch(make_manager(), make_table())
    batch.admit(0, list(range(30)), traits=RequestTraits(cache_salt="salt"))
    assert batch.step([0], [1]).new_page_ids is not None
    batch.append([0], [2])
    assert repr(batch.plan([0], 1, 9))


def use_pages() -> None:
    queue = FreeCachePageQueue([CachePage(i) for i in range(9)])
    queue.append(CachePage(9))
    assert queue.popleft().page_id == 0


def use_chain() -> None:
    chain = HashChain(PAGE_SIZE, bytes(16), True)
    chain.extend(PageIds(range(100 * PAGE_SIZE)))
    chain.extend(np.arange(PAGE_SIZE, dtype=np.int32), b"extra keys")


class LongUse:
    """A manager and rows that live on, while prompts come and go; pages hit, are evicted, and are all given back."""

    def __init__(self) -> None:
        self.manager, self.numbers = make_manager(), count()
        self.batch = RunningBatch(self.manager, make_table())

    def __call__(self) -> None:
        number = next(self.numbers)
        self.serve(f"first {number}", number)
        self.serve(f"again {number}", number)
        for row in range(2):
            self.batch.admit(row, [next(self.numbers)] * 30, traits=RequestTraits(lora_id=1))
        self.batch.step([0, 1], [1, 2])
        self.batch.release([0, 1])
        page_ids = self.manager.page_pool.get_new_page_ids(9)
        self.manager.page_pool.free_page_ids(page_ids)

    def serve(self, name: str, number: int) -> None:
        """Look a prompt up, compute it behind its hits, and free it."""
        request = EngineRequest(name, [number] * 30)
        assert allocate(self.manager, request) is not None
        self.manager.free(request)
        self.manager.free_page_hashes(request)


def usual_growth(sizes: list[int], num_parts: int) -> float:
    """Return the growth a step in the part that grows least: a dict that is resized once raises the sizes of one part, a leak
    those of each. In a part it is the median over all pairs of sizes, since CPython keeps sometimes more errors for later and
    sometimes fewer.
    """
    print(sizes)
    parts = np.array_split(sizes, num_parts)
    return min(
        median((after - before) / (j - i) for (i, before), (j, after) in combinations(enumerate(part), 2)) for part in parts
    )


USES = [use_manager, use_batch, use_pages, use_chain, LongUse()]


@pytest.mark.parametrize("use", USES, ids=lambda use: getattr(use, "__name__", "long use"))
def test_all_of_it_is_collected(use: Callable[[], None]) -> None:
    """All objects are collected, cycles included: repetition adds none. Without the GIL CPython frees some of them late."""
    for _ in range(50):  # until the caches of NumPy are full
        use()
    sizes = []
    with traced():
        for _ in range(NUM_PARTS * NUM_SIZES):
            for _ in range(NUM_USES):
                use()
            sizes.append(traced_bytes())
    assert usual_growth(sizes, NUM_PARTS) < 160 * NUM_USES


@pytest.mark.usefixtures("quick_collection")
def test_a_batch_in_a_cycle_is_freed_with_what_its_rows_have() -> None:
    """The collector clears the lists of a cycle before the batch reads its rows: the sanitizers see if these are gone."""
    for _ in range(10):
        batch = RunningBatch(make_manager(), make_table())
        batch.admit(0, list(range(40)))
        cycle: list[object] = [batch]
        batch.cycle = cycle  # type: ignore[attr-defined]
        del batch, cycle
        gc.collect()


def test_a_large_pool_needs_no_garbage_collection() -> None:
    """Its memory is free once it is dropped, unless there are objects of its pages."""
    with traced():
        before = traced_bytes()
        gc.disable()
        try:
            PagePool(100_000, enable_caching=True).get_new_page_ids(9)
            assert tracemalloc.get_traced_memory()[0] - before < 10_000
        finally:
            gc.enable()


def test_a_view_keeps_its_pool() -> None:
    """Arrays and pages that outlive their owners are safe to read."""
    page = PagePool(8, enable_caching=True).get_new_pages(3)[2]
    batch = RunningBatch(make_manager(), make_table())
    batch.admit(0, list(range(30)))
    num_tokens, result = batch.num_tokens, batch.step([0], [1])
    host_table = make_table()[0].page_table_cpu
    del batch
    gc.collect()
    assert (page.page_id, page.ref_cnt) == (3, 1)
    assert num_tokens.tolist() == [31, 0, 0]
    assert result.num_grown == 1
    assert not host_table.any()


# Allocations that fail.


IS_CYTHON_3_3 = type(siphash128).__module__.startswith("_cython_3_3")
not_with_cython_3_3 = pytest.mark.skipif(
    IS_CYTHON_3_3, reason="built with Cython 3.3, which releases an item of a list comprehension twice where memory is short"
)


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a forked child, which has one thread. Allocations are counted for the whole process, so another thread,
    such as pytest-xdist's, would count too, and could be the one whose allocation fails.
    """

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        pytest.importorskip("_testcapi")
        process_id = os.fork()
        if process_id:
            status = os.waitpid(process_id, 0)[1]
            assert os.waitstatus_to_exitcode(status) == 0, "the child's traceback is in the captured output"
            return
        code = 1
        try:
            test(*args, **kwargs)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return pytest.mark.filterwarnings("ignore:.*fork")(run)  # CPython and JAX warn about the parent's threads


class Failure:
    """Makes the allocation with that number fail, and only that one."""

    def __init__(self) -> None:
        self.testcapi = pytest.importorskip("_testcapi")

    def fails(self, allocation: int, call: Callable[[], object]) -> bool:
        """Whether the call raised MemoryError, or another error that CPython raises without memory."""
        gc.disable()  # garbage collection may call others, such as jax, that do not expect it
        self.testcapi.set_nomemory(allocation, allocation + 1)
        try:
            call()
        except (MemoryError, SystemError):
            return True
        except RuntimeError as error:
            if str(error) != "can't allocate lock":
                raise
            return True
        finally:
            self.testcapi.remove_mem_hooks()
            gc.enable()
        return False

    def each(self, make: Callable[[], Any], call: Callable[[Any], object]) -> Iterator[Any]:
        """What `make` makes, after each of the allocations of a call on it failed. Some failures do no harm: that the call has
        no more allocations is known from a run of them.
        """
        allocation = num_harmless = 0
        while num_harmless < 20:
            thing = make()
            is_failed = self.fails(allocation, lambda thing=thing: call(thing))
            num_harmless = 0 if is_failed else num_harmless + 1
            allocation += 1
            if is_failed:
                yield thing


CORE_CONSTRUCTORS: dict[str, Callable[[], object]] = {
    "PageStore": lambda: PageStore(64, True),
    "HashChain": lambda: HashChain(PAGE_SIZE, bytes(16), True),
    "PageIds": lambda: PageIds(range(100)),
    "CachePage": lambda: CachePage(3),
    "FreeCachePageQueue": lambda: FreeCachePageQueue([]),
    "RunningBatch": lambda: RunningBatch(*parts_of_batch()),
}
CONSTRUCTORS: dict[str, Callable[[], object]] = {
    "PagePool": lambda: PagePool(64, enable_caching=True),
    "CacheManager": lambda: make_manager(keep_token_ids=True),
    "MultiGroupPageTable": make_table,
}


@cache
def parts_of_batch() -> tuple[CacheManager, MultiGroupPageTable]:
    """Return a manager and a table of this process, which is no other's."""
    return make_manager(), make_table()


@not_with_cython_3_3
@pytest.mark.parametrize("construct", CORE_CONSTRUCTORS.values(), ids=CORE_CONSTRUCTORS)
@alone
def test_a_constructor_that_runs_out_of_memory_leaves_nothing(construct: Callable[[], object]) -> None:
    """For each failed allocation."""
    construct()  # what it needs is made before
    sizes = []
    with traced():
        for _ in range(16):
            assert sum(1 for _ in Failure().each(lambda: None, lambda _: construct()))
            sizes.append(traced_bytes())
    assert usual_growth(sizes[4:], 2) < 128  # CPython keeps the first errors


@not_with_cython_3_3
@pytest.mark.parametrize("construct", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
@alone
def test_a_constructor_in_python_that_runs_out_of_memory(construct: Callable[[], object]) -> None:
    """The call raises. CPython may keep its arguments, and Cython a memoryview, so memory is not compared."""
    assert sum(1 for _ in Failure().each(lambda: None, lambda _: construct()))
    assert construct() is not None


class InUse:
    """A pool in all of its states: a manager with a request, a batch with a row, free pages with and without entries."""

    def __init__(self) -> None:
        self.manager = make_manager()
        self.pool = self.manager.page_pool
        self.request = EngineRequest("first", list(range(20)))
        self.next = EngineRequest("next", [*range(16), 7, 7, 7])
        gone = EngineRequest("gone", [9] * 9)
        self.manager.allocate_slots(self.request, 20)
        self.manager.allocate_slots(gone, 9)
        self.manager.free(gone)
        self.page_ids = self.pool.get_new_page_ids(3)
        self.table = make_table()
        self.batch = RunningBatch(self.manager, self.table, max_steps_ahead=1)
        self.batch.admit(0, list(range(16)), step=self.batch.new_step(), traits=RequestTraits(cache_salt="salt"))
        self.stray_page = CachePage(9)
        self.queue = FreeCachePageQueue([CachePage(3)])
        self.ids = PageIds([1, 2])
        self.chain = HashChain(PAGE_SIZE, bytes(16), True)
        self.chain.extend(list(range(4 * PAGE_SIZE)))
        self.hits = self.manager.get_computed_pages(self.next)

    def state(self) -> Any:
        """Return the observable state."""
        kept = pool_lists(self.pool)
        entries = sorted(zip(kept["cached_page_ids"], kept["cached_keys"], strict=True))
        pool = [entries, kept["ref_counts"], kept["free_page_ids"], kept["names"]]
        rows = [self.batch.get_page_ids(0), self.batch.num_tokens.tolist(), self.batch.num_computed_tokens.tolist()]
        tables = [table.page_table_cpu.tolist() for table in self.table]
        chain = [(self.chain[i], self.chain.page_token_ids(i)) for i in range(len(self.chain))]
        return pool, rows, tables, chain, self.manager.get_page_ids("first"), self.queue.num_free_pages


NATIVE_CALLS: dict[str, Callable[[InUse], object]] = {
    "take": lambda u: u.pool.store.take(9),
    "take from a shard": lambda u: u.pool.store.take(3, 1, 2),
    "give back": lambda u: u.pool.free_page_ids(u.page_ids),
    "touch": lambda u: u.pool.touch_page_ids([1, 2, 3]),
    "keep tokens": lambda u: keep_token_ids(u.pool.store, PAGE_SIZE),
    "step": lambda u: u.batch.step([0], [1]),
    "plan": lambda u: u.batch.plan([0], 1, 8),
    "append": lambda u: u.batch.append([0], [1]),
    "trim": lambda u: u.batch.trim([0], 5),
    "release": lambda u: u.batch.release([0]),
    "hash": lambda u: u.chain.extend(list(range(40 * PAGE_SIZE))),
    "adopt": lambda u: u.queue.append(u.stray_page),
    "admit": lambda u: u.batch.admit(1, list(range(30)), traits=RequestTraits(lora_id=3)),
}


@not_with_cython_3_3
@pytest.mark.parametrize("call", NATIVE_CALLS.values(), ids=NATIVE_CALLS)
@alone
def test_a_call_that_runs_out_of_memory_changes_nothing(call: Callable[[InUse], object]) -> None:
    """For each failed allocation; afterwards the call succeeds."""
    before = InUse().state()
    for in_use in Failure().each(InUse, call):
        in_use.batch.check()
        assert in_use.state() == before
        call(in_use)
        in_use.batch.check()


MANAGER_CALLS: dict[str, Callable[[InUse], object]] = {
    "look up": lambda u: u.manager.get_computed_pages(u.next),
    "allocate": lambda u: u.manager.allocate_slots(u.next, 19),
    "allocate with hits": lambda u: u.manager.allocate_slots(u.next, 19 - u.hits[1], u.hits[1], u.hits[0]),
    "give back": lambda u: u.manager.free(u.request),
    "get new pages": lambda u: u.pool.get_new_page_ids(0),
}


@not_with_cython_3_3
@pytest.mark.parametrize("call", MANAGER_CALLS.values(), ids=MANAGER_CALLS)
@alone
def test_a_call_of_a_manager_that_runs_out_of_memory_loses_nothing(call: Callable[[InUse], object]) -> None:
    """Like an interrupt, it may occur after pages were taken: `free` frees them."""
    for in_use in Failure().each(InUse, call):
        in_use.manager.check()
        for request in (in_use.request, in_use.next):
            in_use.manager.free(request)
        in_use.batch.release([0])
        in_use.pool.free_page_ids(in_use.page_ids)
        in_use.batch.check()
        in_use.manager.check()
        assert in_use.manager.usage == 1 / in_use.pool.num_pages


@not_with_cython_3_3
@pytest.mark.parametrize("name", ["take", "take_with_snapshot", "list_all"])
@alone
def test_taking_events_without_memory_is_made_up_for(name: str) -> None:
    """For each failed allocation, the next events are complete."""
    for manager in Failure().each(make_told, lambda manager: getattr(manager.event_source, name)()):
        router = Router()
        router.apply(manager.take_events())
        assert len(router.pages) == len(manager.page_pool.cached_page_hash_to_page) > 0
        assert manager.take_events() == []
        manager.page_pool.check()
