"""Many threads at once on one pool, manager, table, batch or chain.

One owner at a time is the contract. What happens otherwise is defined: calls are made one after another, each as a whole, so no
page is ever held by two, nothing is lost, and a call that comes too late gets a typed error.
"""

from __future__ import annotations

import itertools
import math
import sysconfig
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hybrids import FULL, PAGE_SIZE, WINDOW, allocate
from hybrids import make_manager as make_hybrid
from settings import NUM_OPERATIONS
from sources import run_python
from threads import num_threads, run_threads

from pagepool import (
    CacheManager,
    EngineRequest,
    Lease,
    MambaSpec,
    MultiGroupPageTable,
    PageHash,
    PagePool,
    PageTable,
    Retention,
    RunningBatch,
)
from pagepool._core import CacheGroups, EntryJournal, HashChain, PageRules, PageStore, PrefixTable, RowRequest, find_prefix
from pagepool.errors import (
    ArgumentError,
    OutOfPagesError,
    PageHashError,
    PagePoolError,
    RowOverflowError,
)

NUM_ROUNDS = min(NUM_OPERATIONS // 2500, 30)
MANY_PAGES = 1100
"""Calls on that many pages release the GIL, and on twice as many hashes."""
PAGE_SIZE_OF_EVENTS = 16

pytestmark = pytest.mark.usefixtures("switch_often")
seeds = pytest.mark.parametrize("seed", range(min(-(-NUM_OPERATIONS // 50_000), 3)))


class Owners:
    """The exclusive holders of each page, as recorded by the threads."""

    def __init__(self, num_pages: int) -> None:
        self.names: list[int | None] = [None] * num_pages

    def take(self, name: int, page_ids: list[int]) -> None:
        """Record pages that a thread got as new."""
        for page_id in page_ids:
            assert self.names[page_id] is None, f"page {page_id} was handed to thread {name} and to {self.names[page_id]}"
            self.names[page_id] = name

    def leave(self, name: int, page_ids: list[int]) -> None:
        """Record pages that a thread is about to free."""
        for page_id in page_ids:
            assert self.names[page_id] == name, f"page {page_id} of thread {name} was handed to thread {self.names[page_id]}"
            self.names[page_id] = None


def make_manager(num_pages: int, *specs: Any, **options: Any) -> CacheManager:
    return make_hybrid(*specs or (FULL,), num_pages=num_pages, max_model_len=8192, **options)


def assert_held(pool: PagePool, page_ids: Iterable[int]) -> None:
    """Assert that pages have as many references as they occur in the list, without null pages, and that all others are free."""
    counts = np.bincount([page_id for page_id in page_ids if page_id], minlength=pool.num_pages)
    assert pool.ref_counts().tolist() == counts.tolist()
    pool.check()


def assert_all_free(pool: PagePool) -> None:
    """Assert that no page is lost."""
    assert pool.get_num_free_pages() == pool.num_pages - 1
    assert not pool.ref_counts().any()
    assert sorted(pool.free_page_ids_in_order().tolist()) == list(range(1, pool.num_pages))
    pool.check()


# The pool.


class PoolUser:
    """Takes pages of a pool, uses them in various ways, and frees them."""

    def __init__(self, pool: PagePool, owners: Owners, rng: Random, number: int) -> None:
        self.pool = pool
        self.owners = owners
        self.rng = rng
        self.number = number
        self.page_ids: list[int] = []
        self.actions = [self.take, self.take, self.give_back, self.touch, self.cache, self.evict, self.look, self.inspect]

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            self.rng.choice(self.actions)()
        self.give_back_first(len(self.page_ids))

    def take(self) -> None:
        n = self.rng.choice((1, 1, 2, 5, 17, MANY_PAGES))
        shards = self.rng.choice((None, 2, 4))
        hint = {} if shards is None else {"dp_shard_hint": self.rng.randrange(shards), "data_parallel_size": shards}
        with suppress(OutOfPagesError):
            if self.rng.random() < 0.5:
                page_ids = self.pool.get_new_page_ids(n, **hint).tolist()
            else:
                page_ids = [page.page_id for page in self.pool.get_new_pages(n, **hint)]
            self.owners.take(self.number, page_ids)
            if shards is not None:
                assert {page_id // (self.pool.num_pages // shards) for page_id in page_ids} == {hint["dp_shard_hint"]}
            self.page_ids += page_ids

    def give_back(self) -> None:
        self.rng.shuffle(self.page_ids)
        self.give_back_first(self.rng.choice((1, 3, 40, len(self.page_ids))))

    def give_back_first(self, n: int) -> None:
        page_ids, self.page_ids = self.page_ids[:n], self.page_ids[n:]
        self.owners.leave(self.number, page_ids)
        if self.rng.random() < 0.5:
            self.pool.free_page_ids(page_ids)
        else:
            self.pool.free_pages(self.pool.pages[page_id] for page_id in page_ids)

    def touch(self) -> None:
        """Take a second reference to held pages, and release it."""
        page_ids = self.rng.sample(self.page_ids, min(5, len(self.page_ids)))
        self.pool.touch_page_ids(page_ids)
        self.pool.free_pages([self.pool.pages[page_id] for page_id in page_ids])

    def cache(self) -> None:
        """Enter pages under hashes that others enter too. Pages that already have a hash are refused."""
        page_ids = self.page_ids[:3]
        hashes = [PageHash(self.rng.randrange(50), self.rng.choice(((), (1, 2, 3, 4)))) for _ in page_ids]
        with suppress(PageHashError):
            self.pool.cache_full_page_ids(None, page_ids, hashes, 0, len(page_ids), PAGE_SIZE, 0)

    def evict(self) -> None:
        self.pool.evict_pages(self.rng.sample(range(1, self.pool.num_pages), 3))

    def look(self) -> None:
        page_hash = PageHash(self.rng.randrange(50), self.rng.choice(((), (1, 2, 3, 4))))
        self.pool.get_cached_page(page_hash, [0])
        self.pool.get_cached_page_ids(page_hash, [0], dp_shard_hint=1, data_parallel_size=2)
        assert len(list(self.pool.cached_page_hash_to_page)) < self.pool.num_pages
        self.pool.probe([page_hash])

    def inspect(self) -> None:
        """Whatever the others do, the pool is consistent in between."""
        self.rng.choice((self.pool.check, self.pool.reset_prefix_cache, self.compare_sums))()

    def compare_sums(self) -> None:
        page_ids = self.pool.free_page_ids_in_order().tolist()
        assert len(set(page_ids)) == len(page_ids)
        assert self.pool.ref_counts().min() >= 0
        assert repr(self.pool.pages[self.rng.randrange(self.pool.num_pages)])
        assert 0 <= self.pool.get_usage() <= 1


@seeds
@num_threads
@pytest.mark.parametrize("enable_caching", [True, False], ids=["cached", "uncached"])
def test_a_pool(num_threads: int, enable_caching: bool, seed: int) -> None:
    """Often a thread finds the pool empty."""
    pool = PagePool(2400, enable_caching)
    owners = Owners(pool.num_pages)
    run_threads(num_threads, seed, lambda rng, number: PoolUser(pool, owners, rng, number).run(800 // num_threads))
    assert owners.names == [None] * pool.num_pages
    assert_all_free(pool)


@seeds
def test_a_page_is_freed_once_whoever_tries(seed: int) -> None:
    """All threads free all pages in long calls, each in a different order: one succeeds, and the others change nothing."""
    pool = PagePool(MANY_PAGES + 1, enable_caching=True)
    for _ in range(NUM_ROUNDS):
        page_ids = pool.get_new_page_ids(MANY_PAGES).tolist()
        freed: list[int] = []

        def work(rng: Random, number: int, page_ids: list[int] = page_ids, freed: list[int] = freed) -> None:
            with suppress(PagePoolError):
                pool.free_page_ids(rng.sample(page_ids, len(page_ids)))
                freed.append(number)

        run_threads(3, seed, work)
        assert len(freed) == 1
        assert_all_free(pool)


# A manager.


class Client:
    """Runs requests through a manager from their first look-up to their end, or nearly. Prompts have few families."""

    def __init__(self, manager: CacheManager, rng: Random, name: str) -> None:
        self.manager = manager
        self.rng = rng
        self.name = name

    def run(self, num_requests: int) -> list[EngineRequest]:
        """Serve that many requests. Returns the last ones, which are left running."""
        served = [self.serve(f"{self.name}-{i}", i >= num_requests - 3) for i in range(num_requests)]
        return [request for request in served if request is not None]

    def serve(self, request_id: str, is_left: bool) -> EngineRequest | None:
        num_shared = self.rng.choice((0, 5, 8, 30, 30, 2 * MANY_PAGES))
        prompt = [self.rng.randrange(2)] * num_shared + self.rng.choices(range(3), k=self.rng.randint(1, 12))
        session_id = self.rng.choice("abc")
        request = EngineRequest(request_id, prompt, session_id=session_id, tenant=self.rng.choice("xyz"))
        is_running = self.start(request)
        for _ in range(self.rng.randrange(12) * is_running):
            self.decode(request)
        if is_running:
            assert len(self.manager.get_page_ids(request_id)[0]) * PAGE_SIZE >= request.num_tokens
        if not is_left:
            self.manager.expect(request, stop=20, seconds=self.rng.choice((None, 0, 3, math.inf)))
            self.manager.free(request, seconds=self.rng.choice((None, 0, 100.0, 2**20)))
            self.manager.free_page_hashes(request)
            self.use_session(session_id)
        return request if is_left and is_running else None

    def use_session(self, session_id: str) -> None:
        """Say when a session comes back that others run too, or close it, or set shares of tenants."""
        choice = self.rng.random()
        if choice < 0.5:
            assert self.manager.expect_session(session_id, seconds=self.rng.choice((None, 3, math.inf))) >= 0
        elif choice < 0.8:
            assert self.manager.close_session(session_id) >= 0
        elif choice < 0.85:
            self.manager.set_shares(dict.fromkeys(self.rng.sample("xyz", self.rng.randint(0, 3)), 0.2))

    def start(self, request: EngineRequest) -> bool:
        delay = self.rng.random() < 0.3
        try:
            if allocate(self.manager, request, delay_cache_pages=delay) is None:
                return False
        except PageHashError:  # another thread took a page that was hit
            return False
        request.num_computed_tokens = request.num_tokens
        if delay:
            self.manager.cache_pages(request, request.num_tokens)
        return True

    def decode(self, request: EngineRequest) -> None:
        new = self.manager.allocate_slots(request, 1, num_lookahead_tokens=self.rng.choice((0, 0, 2)))
        if new is not None:
            request.append_output_token_ids(self.rng.randrange(3))
            request.num_computed_tokens += 1


def page_ids_of(manager: CacheManager, requests: Iterable[EngineRequest]) -> list[int]:
    """Return the pages that requests hold, in all groups."""
    return [page_id for request in requests for ids in manager.get_page_ids(request.request_id) for page_id in ids]


@seeds
@pytest.mark.parametrize("options", [{}, {"keep_token_ids": True}, {"hash_algo": hash}, {"hash_algo": "sha256"}], ids=str)
def test_a_manager_of_several_groups(options: dict[str, Any], seed: int) -> None:
    """Pages that leave a window are freed while others hit them. Requests left running hold theirs; all others are free."""
    manager = make_manager(6000, FULL, WINDOW, **options)
    left: list[EngineRequest] = []
    run_threads(4, seed, lambda rng, number: left.extend(Client(manager, rng, str(number)).run(15)))
    assert left
    assert_held(manager.page_pool, page_ids_of(manager, left))
    for request in left:
        manager.free(request)
    assert_all_free(manager.page_pool)


@seeds
@num_threads
def test_the_same_requests_from_several_threads(num_threads: int, seed: int) -> None:
    """The later call gets a typed error, and nothing is lost."""
    manager = make_manager(64, FULL, WINDOW)
    requests = [EngineRequest(f"r{i}", [i % 2] * 30) for i in range(4)]

    def work(rng: Random, number: int) -> None:
        for _ in range(400 // num_threads):
            request = rng.choice(requests)
            with suppress(PagePoolError):
                use_request(manager, request, rng)

    run_threads(num_threads, seed, work)
    manager.page_pool.check()
    for request in requests:
        manager.free(request)
        manager.free_page_hashes(request)
        assert manager.get_page_ids(request.request_id) == ([], [])
    assert_all_free(manager.page_pool)


def use_request(manager: CacheManager, request: EngineRequest, rng: Random) -> None:
    """Make one call or two for a request that others use too."""
    action = rng.randrange(8)
    if action < 3:
        hits, num_hit_tokens = manager.get_computed_pages(request)
        manager.allocate_slots(request, rng.randint(1, 30 - num_hit_tokens), num_hit_tokens, hits)
    elif action == 3:
        manager.allocate_slots(request, rng.randint(1, 30), delay_cache_pages=True)
    elif action == 4:
        manager.cache_pages(request, rng.randrange(30))
    elif action == 5:
        manager.free(request)
    elif action == 6:
        manager.free_page_hashes(request)
    else:
        manager.probe(request)
        manager.get_page_ids(request.request_id)
        manager.reset_prefix_cache()
        assert list(manager.registry.hashes) is not None
        manager.page_pool.check()


# Page tables.


@seeds
def test_rows_of_all_groups_from_several_threads(seed: int) -> None:
    """Both groups get the same ids in each call, so they are equal at the end, and rows consist of whole runs: a run is
    appended, moved, swapped or cleared as a whole.
    """
    tables = MultiGroupPageTable(3, 1200, 64, [4, 4])

    def work(rng: Random, number: int) -> None:
        for i in range(300):
            row, ids = rng.randrange(3), [1 + 1000 * number + i] * rng.randint(1, 4)
            actions: list[Callable[[], object]] = [
                lambda row=row, ids=ids: tables.append_row([ids, ids], row),
                lambda row=row, ids=ids: tables.add_row([ids, ids], row),
                lambda row=row: tables.move_row(row, (row + 1) % 3),
                lambda row=row: tables.swap_row(row, (row + 1) % 3),
                lambda row=row: tables.clear_row(row),
                lambda: tables[0].slot_mapping([0, 1, 2], [5, 6, 7], 4),
            ]
            with suppress(RowOverflowError):
                rng.choice(actions)()

    run_threads(3, seed, work)
    assert (tables[0].page_table_cpu == tables[1].page_table_cpu).all()
    assert (tables[0].num_pages_per_row == tables[1].num_pages_per_row).all()
    for row, n in zip(tables[0].page_table_cpu, tables[0].num_pages_per_row, strict=True):
        assert not row[n:].any()
        assert all(len(list(run)) <= 4 for _, run in itertools.groupby(row[:n].tolist()))
        assert row[:n].all()


@seeds
@num_threads
def test_rows_of_a_table(num_threads: int, seed: int) -> None:
    """Each thread has three rows; a model records their pages. Others change their rows, and the table is copied."""
    table = PageTable(3 * num_threads, 200, 64)
    models = [[[] for _ in range(3)] for _ in range(num_threads)]

    def work(rng: Random, number: int) -> None:
        model = models[number]
        for i in range(300):
            src, tgt = rng.randrange(3), rng.randrange(3)
            change_row(table, model, 3 * number, src, tgt, rng, i)
            if i % 50 == number:
                table.count_dirty_segments(0, 3 * num_threads)
                assert table.copy_aligned()[3 * number + src, : len(model[src])].tolist() == model[src]

    run_threads(num_threads, seed, work)
    rows = list(itertools.chain.from_iterable(models))
    assert [row[:n].tolist() for row, n in zip(table.page_table_cpu, table.num_pages_per_row, strict=True)] == rows
    assert not any(row[n:].any() for row, n in zip(table.page_table_cpu, table.num_pages_per_row, strict=True))


def change_row(table: PageTable, model: list[list[int]], first: int, src: int, tgt: int, rng: Random, page_id: int) -> None:
    """Change rows `src` and `tgt` after `first` of a table, and of its model."""
    ids = [page_id] * rng.randint(1, 9)
    action = rng.randrange(6)
    if action < 2:
        with suppress(RowOverflowError):
            table.append_row(ids, first + src)
            model[src] = model[src] + ids
    elif action == 2:
        table.add_row(np.array(ids, dtype=np.int32), first + src)
        model[src] = ids
    elif action == 3:
        table.swap_row(first + src, first + tgt)
        model[src], model[tgt] = model[tgt], model[src]
    elif action == 4:
        table.move_row(first + src, first + tgt)
        model[tgt] = model[src]
    else:
        table.clear_row(first + src)
        model[src] = []


@seeds
def test_a_table_is_committed_while_its_rows_change(seed: int) -> None:
    """One thread commits, as the contract requires; the last commit sends what it missed."""
    pytest.importorskip("jax")
    table = PageTable(9, 200, 64)
    table.warmup()
    models = [[[] for _ in range(3)] for _ in range(3)]

    def work(rng: Random, number: int) -> None:
        for i in range(60):
            if number == 3:
                table.commit(9)
            else:
                change_row(table, models[number], 3 * number, rng.randrange(3), rng.randrange(3), rng, i)

    run_threads(4, seed, work)
    assert np.asarray(table.commit(9)).tolist() == table.page_table_cpu.tolist()


# A running batch.


STATE = MambaSpec(PAGE_SIZE, ((1, 1),), "float16", checkpoint_interval=8)


@seeds
@num_threads
@pytest.mark.parametrize("spec", [WINDOW, STATE], ids=["window", "state"])
def test_the_same_rows_of_a_batch_from_several_threads(spec: Any, num_threads: int, seed: int) -> None:
    """Each call succeeds or is refused as a whole, whatever the others did to the rows just before. Each write of a state is at
    a boundary.
    """
    manager = make_manager(200, FULL, spec)
    tables = MultiGroupPageTable(4, 256, 64, [PAGE_SIZE, PAGE_SIZE])
    batch = RunningBatch(manager, tables, max_steps_ahead=seed % 2)
    num_taken = [0] * num_threads

    def work(rng: Random, number: int) -> None:
        for _ in range(400 // num_threads):
            with suppress(PagePoolError):
                use_rows(batch, rng)
            if rng.random() < 0.5:
                writes = batch.take_moves().writes
                num_taken[number] += len(writes)
                assert all(num_tokens % 8 == 0 for num_tokens in writes.num_tokens.tolist())

    run_threads(num_threads, seed, work)
    batch.check()
    batch.take_moves()  # pages of writes are held too
    assert any(num_taken) == (spec is STATE)
    if spec is WINDOW:
        assert_held(manager.page_pool, page_ids_in(batch))
    release_all(manager, batch)


@seeds
@num_threads
def test_steps_in_flight_from_several_threads(num_threads: int, seed: int) -> None:
    """Each step is settled once, whoever does it, and no page is lost."""
    manager = make_manager(200, FULL, WINDOW, caches=("scheduled", "computed")[seed % 2])
    tables = MultiGroupPageTable(4, 256, 64, [PAGE_SIZE, PAGE_SIZE])
    batch = RunningBatch(manager, tables, max_steps_ahead=2)
    steps: list[Any] = [batch.new_step()]
    num_ended: list[list[int]] = [[] for _ in range(num_threads)]

    def end_step(rng: Random, number: int) -> None:
        """Settle a step, or let it and all later ones fail."""
        step = rng.choice(steps[-8:])
        if rng.random() < 0.8:
            batch.settle(step, [1] * len(step))
        else:
            batch.settle(step, failed=True)
        num_ended[number].append(id(step))

    def work(rng: Random, number: int) -> None:
        for _ in range(600 // num_threads):
            rows = rng.sample(range(4), rng.randint(1, 4))
            step = steps[-1]
            actions: list[Callable[[], object]] = [
                lambda: steps.append(batch.new_step()),
                lambda: batch.admit(rows[0], [rng.randrange(2)] * rng.randint(1, 200), step=step),  # noqa: B023
                lambda: batch.plan(rows[:2], 1, rng.choice((0, 2)), step=step),  # noqa: B023
                lambda: batch.plan(rows[:1], 1, step=step),  # noqa: B023
                lambda: end_step(rng, number),
                lambda: end_step(rng, number),
                lambda: batch.release(rows[:1]),  # noqa: B023
                lambda: batch.swap_row(rows[0], rows[-1]),  # noqa: B023
                lambda: (len(step), step.rows, step.is_settled, step.refusal, repr(step)),  # noqa: B023
                batch.check,
            ]
            with suppress(PagePoolError):
                rng.choice(actions)()

    run_threads(num_threads, seed, work)
    ended = [number for each in num_ended for number in each]
    assert ended
    assert len(set(ended)) == len(ended)
    batch.check()
    release_all(manager, batch)


def page_ids_in(batch: RunningBatch) -> list[int]:
    """Return the pages that rows hold, in all groups."""
    return [page_id for row in range(len(batch.num_tokens)) for ids in batch.get_page_ids(row) for page_id in ids]


def release_all(manager: CacheManager, batch: RunningBatch) -> None:
    """Assert that no page is lost."""
    batch.release(np.flatnonzero(batch.is_admitted).astype(np.int32))
    assert_all_free(manager.page_pool)


def use_rows(batch: RunningBatch, rng: Random) -> None:
    """Make one call for rows that others use too."""
    rows = rng.sample(range(4), rng.randint(1, 4))
    actions: list[Callable[[], object]] = [
        lambda: batch.admit(rows[0], [rng.randrange(2)] * rng.randint(1, 200)),
        lambda: batch.step(rows[:2], [1] * len(rows[:2])),
        lambda: batch.plan(rows, 1, 5),
        lambda: batch.append(rows, [2] * len(rows)),
        lambda: batch.trim(rows[:1], rng.randint(1, 100)),
        lambda: batch.release(rows[:1]),
        lambda: batch.swap_row(rows[0], rows[-1]),
        lambda: batch.move_row(rows[0], rows[-1]),
        lambda: batch.get_page_ids(rows[0]),
        batch.check,
    ]
    rng.choice(actions)()


# Sessions and leases.


class Clock:
    """A clock of a pool that goes on with each call, from several threads."""

    def __init__(self, manager: CacheManager) -> None:
        self.store = manager.page_pool.store
        self.seconds = itertools.count(1)
        self.lock = threading.Lock()
        self.tick(0)

    def tick(self, _: object = None) -> None:
        with self.lock:  # the clock does not go back
            self.store.set_time(next(self.seconds))


@seeds
def test_a_lease_ends_once_whoever_ends_it(seed: int) -> None:
    """Its time is over as one thread takes all pages, others release it, extend it, and list the leases."""
    manager = make_manager(9, retention=Retention(max_leased_share=1.0))
    pool, clock = manager.page_pool, Clock(manager)
    request = EngineRequest("r", list(range(16)))
    for _ in range(20 * NUM_ROUNDS):
        allocate(manager, request)
        manager.free(request)
        lease = manager.lease(request, seconds=1)
        clock.tick()

        def work(rng: Random, number: int, lease: Lease = lease) -> None:
            if number == 0:
                pool.free_page_ids(pool.get_new_page_ids(8))
            elif number == 1:
                lease.release()
            elif number == 2:
                with pytest.raises(ArgumentError):
                    lease.extend(1)
            else:
                assert manager.leases == ()

        run_threads(4, seed, work)
        assert not lease.is_held
        assert_all_free(pool)


# A journal.


class Reader:
    """Takes the changes of a pool, and derives from them what is cached."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.keys: set[tuple[int, int, int]] = set()

    def read(self) -> None:
        is_cleared, changes, _ = EntryJournal(self.store).take_changes(True)
        (removed_keys, groups), (new_keys, runs, _), entries = changes
        assert EntryJournal(self.store).kept_contexts() is None
        assert EntryJournal(self.store).list_kept_keys() is None
        if is_cleared:
            self.keys.clear()
        pairs = removed_keys.reshape(-1, 2).tolist()
        removed = {(*key, group) for key, group in zip(pairs, groups.tolist(), strict=True)}
        assert removed <= self.keys
        self.keys -= removed
        new = self.keys_in(new_keys, runs)
        assert not new & self.keys
        self.keys |= new
        assert entries is not None
        assert self.keys_in(*entries[:2]) == self.keys
        EntryJournal(self.store).end_report()

    def keys_in(self, keys: Any, runs: list[tuple[int, ...]]) -> set[tuple[int, int, int]]:
        groups = [run[3] for run in runs for _ in range(run[4])]
        listed = [(*key, group) for key, group in zip(keys.reshape(-1, 2).tolist(), groups, strict=True)]
        assert len(set(listed)) == len(listed)
        return set(listed)


@seeds
def test_one_thread_is_told_what_the_others_cache(seed: int) -> None:
    """Requests, rows and direct users of one pool; after each read, the reader knows the cached pages exactly."""
    manager = make_manager(4000)
    store = manager.page_pool.store
    EntryJournal(store).start()
    batch = RunningBatch(manager, PageTable(4, 1200, 64))
    owners = Owners(4000)
    reader = Reader(store)
    left: list[EngineRequest] = []

    def work(rng: Random, number: int) -> None:
        if number == 0:
            for _ in range(60):
                reader.read()
        elif number == 1:
            PoolUser(manager.page_pool, owners, rng, number).run(60)
        elif number == 2:
            left.extend(Client(manager, rng, "client").run(20))
        else:
            use_contexts(store, batch, rng)

    run_threads(4, seed, work)
    reader.read()
    batch.check()
    assert EntryJournal(store).kept_contexts() is not None
    assert len(reader.keys) == store.num_keys


def use_contexts(store: PageStore, batch: RunningBatch, rng: Random) -> None:
    """Use rows, some of which have a context of their own."""
    for _ in range(60):
        row, context = rng.randrange(4), EntryJournal(store).add_context()
        if batch.is_admitted[row]:
            batch.release([row])
        prompt = [rng.randrange(3) for _ in range(rng.choice((3, 30, 300)))]
        RowRequest(batch, row, prompt, None, None, 50).admit([(0, b"%d" % context)], context=context)
        EntryJournal(store).release_context(context)
        kept = EntryJournal(store).kept_contexts()
        assert kept is None or context in kept or not batch.is_admitted[row]


@seeds
def test_hits_are_whole_while_pages_are_dropped(seed: int) -> None:
    """A look-up finds the length of a hit and its pages at once, so that no page of it is dropped in between."""
    manager = make_manager(3 * MANY_PAGES)
    batch = RunningBatch(manager, PageTable(1, MANY_PAGES + 1, 64))
    prompt = list(range(MANY_PAGES * PAGE_SIZE))
    first = EngineRequest("first", prompt)
    manager.allocate_slots(first, len(prompt))
    cached = manager.get_page_ids("first")[0]

    def work(rng: Random, number: int) -> None:
        for _ in range(5 * NUM_ROUNDS):
            if number == 0:
                manager.page_pool.evict_pages([rng.choice(cached)])
                manager.cache_pages(first, len(prompt))
            elif number == 1:
                num_hit_tokens = batch.admit(0, [*prompt, 1], max_num_new_tokens=1)  # which enters no page of its own
                assert num_hit_tokens is not None
                num_hits = num_hit_tokens // PAGE_SIZE
                assert batch.get_page_ids(0)[0][:num_hits] == cached[:num_hits]
                batch.release([0])
            else:
                hits, num_hit_tokens = manager.get_computed_pages(EngineRequest(str(number), [*prompt, 1]))
                assert hits.get_page_ids()[0] == cached[: num_hit_tokens // PAGE_SIZE]

    run_threads(4, seed, work)
    batch.check()


# A chain.


@seeds
@num_threads
def test_a_hash_chain(num_threads: int, seed: int) -> None:
    """Each call hashes its pages in one run after the previous ones: hashing the same tokens alone gives the same digests.
    Look-ups see the digests that existed when they began, in memory that moves.
    """
    store = make_manager(3000).page_pool.store
    chain = HashChain(PAGE_SIZE, bytes(16), True)

    def work(rng: Random, number: int) -> None:
        for _ in range(12):
            num_pages = rng.choice((1, 2, 7, MANY_PAGES))
            chain.extend(np.full(num_pages * PAGE_SIZE, number, dtype=np.int32))
            for i in rng.choices(range(len(chain)), k=20):
                assert chain[i]
                assert len(set(chain.page_token_ids(i))) == 1
            for rules in (PageRules(PAGE_SIZE), PageRules(PAGE_SIZE, window=2 * PAGE_SIZE)):
                assert find_prefix(store, CacheGroups([(rules, 0, 1)]), chain, len(chain) * PAGE_SIZE)[1] == 0

    run_threads(num_threads, seed, work)
    again = HashChain(PAGE_SIZE, bytes(16))
    again.extend([token for i in range(len(chain)) for token in chain.page_token_ids(i)])
    assert [again[i] for i in range(len(again))] == [chain[i] for i in range(len(chain))]


# An index of prefixes.


def encode_event(name: str, hashes: list[int]) -> bytes:
    """Encode a batch with one event of hashes, as the wire has it, without msgspec."""
    fields = [b"\xc0", b"\x90", b"\x10"] if name == "BlockStored" else []  # no parent, no tokens, blocks of 16
    event = [bytes([0xA0 + len(name)]) + name.encode(), b"\xdd" + len(hashes).to_bytes(4, "big")]
    event += [b"\xcf" + block_hash.to_bytes(8, "big") for block_hash in hashes]
    return b"\x92\xcb" + bytes(8) + b"\x91" + bytes([0x92 + len(fields)]) + b"".join(event + fields)


@seeds
@num_threads
def test_prefixes_are_looked_up_while_workers_change(num_threads: int, seed: int) -> None:
    """A worker has all of a prompt or nothing, so no answer is in between. The second one needs larger entries."""
    index, rng = PrefixTable(PAGE_SIZE_OF_EVENTS), Random(seed)
    chains = [[rng.getrandbits(64) for _ in range(2 * MANY_PAGES)] for _ in range(4)]

    def work(rng: Random, number: int) -> None:
        worker = 70 * number
        for i in range(NUM_ROUNDS):
            chain = rng.choice(chains)
            if number < 2:
                num_copies = rng.choice((1, 1, 3))
                for _ in range(num_copies):
                    index.apply(worker, encode_event("BlockStored", chain))
                for _ in range(num_copies - 1):
                    index.apply(worker, encode_event("BlockRemoved", chain))
                assert index.find(chain)[worker] == PAGE_SIZE_OF_EVENTS * len(chain)
                assert sorted(index.list_blocks(worker).tolist()) == sorted(set(chain))
                if i % 3 == 0:
                    index.remove_worker(worker)
                else:
                    index.apply(worker, encode_event("BlockRemoved", chain))
            else:
                for part in (chain, chain[:100]):
                    assert set(index.find(part).tolist()) <= {0, PAGE_SIZE_OF_EVENTS * len(part)}
                assert all(num in (0, len(chain)) for num in index.stats()["held"])
                assert index.media == ("GPU",)
                index.check()

    run_threads(num_threads, seed, work)
    index.check()
    assert index.stats()["blocks"] == 0


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the GIL")
def test_importing_does_not_turn_the_gil_on() -> None:
    process = run_python("-c", "import pagepool, sys; print(sys._is_gil_enabled())")
    assert (process.stdout, process.stderr) == ("False\n", "")
