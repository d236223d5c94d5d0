"""A store behind the host tier: what is saved and loaded, for how long a request waits, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf, nan
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contents_store import STORE_MODULES
from lying_store import LyingStore
from managing import grouped

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    PageHashing,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
    WaitingQueue,
)
from pagepool._core import list_absent
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.stores import FileStore, StoreTier, make_namespace, saves
from pagepool.stores.frames import is_intact, write_header
from pagepool.stores.pages import Pages, Tier
from pagepool.stores.pending import Buffers
from pagepool.stores.saves import share_memory

pytest.importorskip("xxhash")

PAGE_SIZE = 4
ROW_BYTES = 32
NAMESPACE = "test"
FULL = FullAttentionSpec(PAGE_SIZE, num_kv_heads=1, head_size=8, dtype="float32", use_mla=False)
WINDOW = SlidingWindowSpec(PAGE_SIZE, num_kv_heads=1, head_size=8, dtype="float32", use_mla=False, sliding_window=9)
STATE = MambaSpec(PAGE_SIZE, shapes=((4,),), dtype="float32", checkpoint_interval=8)


class Clock:
    """The seconds that the store's tier sees."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in STORE_MODULES:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Host:
    """A manager with a host tier, whose rows hold the key of their page, and a store behind it."""

    def __init__(
        self,
        store: Any,
        specs: Sequence[Any] = (FULL,),
        num_pages: Any = 17,
        num_host_pages: Any = 40,
        policy: Any = "write_through",
        **options: Any,
    ) -> None:
        groups = [CacheGroupSpec(spec) for spec in specs]
        tier = HostTier(num_host_pages, policy=policy)
        self.manager = CacheManager(num_pages, groups, max_model_len=64, host_tier=tier, hashing=PageHashing(hash_seed=1))
        self.rows = [np.zeros((num_host_pages, ROW_BYTES), dtype=np.uint8) for _ in specs]
        self.device = [np.zeros((num_pages, ROW_BYTES), dtype=np.uint8) for _ in specs]
        self.store = store
        self.stored = StoreTier(self.manager, store, self.rows, NAMESPACE, **options)

    def move(self) -> int:
        """Make the transfers that are due. Return the number of loads."""
        transfers = self.manager.take_moves()
        for source, target, group in zip(transfers.saves.src, transfers.saves.dst, transfers.saves.group, strict=True):
            self.rows[group][target] = self.device[group][source]
        for source, target, group in zip(transfers.loads.src, transfers.loads.dst, transfers.loads.group, strict=True):
            self.device[group][target] = self.rows[group][source]
        if transfers.number:
            self.manager.complete(transfers.number)
        return len(transfers.loads.src)

    def fetch(self, token_ids: Sequence[int]) -> EngineRequest:
        request = EngineRequest("request", token_ids)
        self.stored.fetch(request)
        return request

    def run(self, token_ids: Sequence[int], num_polls: int = 8) -> int:
        """Fetch the pages of a request and compute it, alone. Return its hit tokens."""
        request = self.fetch(token_ids)
        for _ in range(num_polls):
            self.stored.poll()
        assert self.stored.is_ready(request)
        return self.compute(request)

    def compute(self, request: EngineRequest) -> int:
        """Compute a request, alone, with steps that end at its pages. Return its hit tokens."""
        manager = self.manager
        pages, num_hit_tokens = manager.get_computed_pages(request)
        self.move()
        num_computed = num_hit_tokens
        while num_computed < request.num_tokens:
            num_new = min(PAGE_SIZE, request.num_tokens - num_computed)
            taken = manager.allocate_slots(request, num_new, num_hit_tokens if pages else 0, pages)
            assert taken is not None
            pages = None
            self.move()
            num_computed += num_new
            request.num_computed_tokens = num_computed
        manager.free(request)
        for _ in range(3):
            self.move()
        manager.check()
        return num_hit_tokens

    def evict_all(self) -> None:
        """Let the pool evict all of its pages."""
        pool = self.manager.page_pool
        pool.free_page_ids(pool.get_new_page_ids(pool.get_num_free_pages()))
        self.move()


def tokens(seed: int, num_pages: int = 4) -> list[int]:
    return [100 * seed + i for i in range(num_pages * PAGE_SIZE + 1)]


def make_store(objects: dict[bytes, bytes] | None = None, **options: Any) -> LyingStore:
    return LyingStore({} if objects is None else objects, Random(0), **options)


def test_pages_survive_a_restart() -> None:
    objects: dict[bytes, bytes] = {}
    first = Host(make_store(objects), write="through")
    assert first.run(tokens(1)) == 0
    assert first.stored.stats().num_saved_pages == 4 == len(objects)
    first.stored.close()
    second = Host(make_store(objects), write="through")
    assert second.run(tokens(1)) == 16
    stats = second.manager.stats().store
    assert stats is not None
    assert (stats.num_looked_up_pages, stats.num_found_pages, stats.num_loaded_pages, stats.num_saved_pages) == (4, 4, 4, 0)


def test_a_queue_fetches_the_pages_of_its_requests() -> None:
    """Two requests of three hit after a restart, and the other one does not wait for them."""
    objects: dict[bytes, bytes] = {}
    first = Host(make_store(objects), write="through")
    for seed in (1, 2):
        first.run(tokens(seed))
    first.stored.close()
    host = Host(make_store(objects), write="through")
    queue = WaitingQueue(host.manager, store=host.stored)
    for seed in (1, 2, 3):
        queue.add(seed, tokens(seed))
    queue.prefetch()
    hits = {}
    for _ in range(40):
        host.stored.poll()

        def admit(waiting: Any) -> int:
            return host.compute(EngineRequest(str(waiting.name), waiting.token_ids.to_list()))

        if (admission := queue.admit_by(admit)) is not None:
            hits[admission.name] = admission.num_cached_tokens
    assert hits == {1: 16, 2: 16, 3: 0}
    assert host.stored.stats().num_waiting_requests == 0


def run_encoder(host: Host, key: str, values: Sequence[int]) -> int:
    """Compute a request with a medium, whose encoder writes a value into each page. Return its hit encoder tokens."""
    manager = host.manager
    request = EngineRequest(key, tokens(1), num_encoder_tokens=PAGE_SIZE * len(values), cross_key=key)
    host.stored.fetch(request)
    for _ in range(8):
        host.stored.poll()
    assert host.stored.is_ready(request)
    while manager.allocate_slots(request, request.num_tokens) is None:  # its medium is being loaded
        assert host.move()
    medium = manager.get_medium(key)
    assert medium is not None
    host.move()
    if medium.num_cached_tokens == 0:
        host.device[1][[*medium.page_ids[0]]] = np.array(values, np.uint8)[:, None]
    assert host.device[1][[*medium.page_ids[0]], 0].tolist() == [*values]
    request.num_computed_tokens = request.num_tokens
    manager.free(request)
    for _ in range(3):
        host.move()
    manager.check()
    return medium.num_cached_tokens


def test_a_medium_survives_a_restart() -> None:
    objects: dict[bytes, bytes] = {}
    cross = CrossAttentionSpec(PAGE_SIZE, 1, 8, "float32", use_mla=False, max_num_encoder_tokens=20)
    first = Host(make_store(objects), [FULL, cross], write="through")
    assert run_encoder(first, "audio", [7, 8, 9]) == 0
    assert run_encoder(first, "other", [1, 2, 3, 4]) == 0
    first.stored.close()
    second = Host(make_store(objects), [FULL, cross], write="through")
    assert run_encoder(second, "audio", [7, 8, 9]) == 12
    objects.pop(next(name for name in objects if name[-1] == 1))  # a page of a medium
    third = Host(make_store(objects), [FULL, cross], write="through")
    numbers = [run_encoder(third, key, values) for key, values in (("audio", [7, 8, 9]), ("other", [1, 2, 3, 4]))]
    assert sorted(numbers) in ([0, 12], [0, 16])


def test_pages_that_the_tier_evicts_are_saved() -> None:
    host = Host(make_store(), num_pages=6, num_host_pages=12)
    for seed in range(1, 4):
        host.run(tokens(seed))
    assert host.stored.stats().num_saved_pages > 0
    host.run(tokens(4))
    assert host.run(tokens(1)) == 16
    assert host.stored.stats().num_loaded_pages == 4


def test_a_page_is_saved_once() -> None:
    host = Host(make_store(), num_pages=6, num_host_pages=12)
    for _ in range(3):
        for seed in range(1, 5):
            host.run(tokens(seed))
    assert host.stored.stats().num_saved_pages == 16


def test_pages_beyond_the_queue_are_dropped() -> None:
    host = Host(make_store(delay=0), write="through", max_queued_bytes=3 * (64 + ROW_BYTES))
    host.store.poll = list
    host.compute(EngineRequest("request", tokens(1, 8)))
    stats = host.stored.stats()
    assert (stats.num_queued_pages, stats.num_dropped_pages, host.store.num_jobs) == (3, 5, 3)


def test_headers_are_made_by_the_threads_of_a_store_that_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the rows held when the pages were due, though they are overwritten before a header is made."""
    made, may_begin = set(), threading.Event()

    def write(*args: Any) -> None:
        assert may_begin.wait(60)
        made.add(threading.current_thread())
        write_header(*args)

    monkeypatch.setattr(saves, "write_header", write)
    store = FileStore(tmp_path, NAMESPACE)
    host = Host(store, [FULL, WINDOW], write="through")
    for pages in host.device:
        pages[:] = np.random.default_rng(1).integers(1, 255, pages.shape)
    host.compute(EngineRequest("request", tokens(1, 8)))
    expected = sorted(bytes(row) for rows in host.rows for row in rows if row.any())
    for rows in host.rows:
        rows[:] = 255
    may_begin.set()
    while host.stored.stats().num_queued_pages:
        host.stored.poll()
    objects = [(bytes.fromhex(path.name), path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()]
    assert all(is_intact(item, NAMESPACE, key) for key, item in objects)
    assert sorted(item[64:] for _, item in objects) == expected
    assert threading.main_thread() not in made
    host.stored.close()


def test_memory_of_objects_is_out_once() -> None:
    rng = Random("buffers")
    buffers, sizes = Buffers(1000, [10, 70, 10]), (10, 70)
    out: list[tuple[int, list[int]]] = []
    for _ in range(500):
        if rng.random() < 0.5 or not out:
            size, num, before = rng.choice(sizes), rng.randrange(1, 40), buffers.num_bytes
            out.append((size, buffers.take(num, size)))
            assert len(out[-1][1]) == min(num, (1000 - before) // size)
        else:
            size, places = out.pop(rng.randrange(len(out)))
            buffers.give_back([buffers.arrays[size][place] for place in places], places)
        taken = [(size, place) for size, places in out for place in places]
        assert len({*taken}) == len(taken)
        assert buffers.num_bytes == sum(size for size, _ in taken)
        assert all(place < len(buffers.arrays[size]) for size, place in taken)


@pytest.mark.parametrize("kinds", ["f", "fw", "w", "fs", "fws", "s"])
def test_hits_are_those_of_an_endless_tier(kinds: str) -> None:
    """One by one, with a tier that holds the pages of few requests."""
    specs = [{"f": FULL, "w": WINDOW, "s": STATE}[kind] for kind in kinds]
    rng = Random(f"endless {kinds}")
    objects: dict[bytes, bytes] = {}
    endless = Host(make_store(), specs, num_pages=33, num_host_pages=4000)
    small = Host(make_store(objects), specs, num_pages=33, num_host_pages=100, write="through")
    stems = [rng.choices(range(9), k=33) for _ in range(6)]
    num_hits = num_loaded = 0
    for number in range(120):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, 33)] + rng.choices(range(9), k=rng.randrange(1, 20))
        if number % 30 == 29:
            small.stored.close()
            num_loaded += small.stored.stats().num_loaded_pages
            small = Host(make_store(objects), specs, num_pages=33, num_host_pages=100, write="through")
        hits = small.run(prompt)
        assert hits == endless.run(prompt), number
        num_hits += hits > 0
    assert num_hits > 50
    assert num_loaded > 20


def test_a_request_waits_for_the_deadline_at_most(clock: Clock) -> None:
    host = Host(make_store({}, share=0.0), deadline_ms=20)
    host.store.poll = list
    request = host.fetch(tokens(1))
    clock.now += 5
    assert not host.stored.is_ready(request)  # the first question, when it is its turn
    clock.now += 0.019
    assert not host.stored.is_ready(request)
    clock.now += 0.002
    assert host.stored.is_ready(request)
    assert host.stored.is_ready(request)
    assert host.stored.stats().num_late_requests == 1
    assert host.stored.stats().num_waiting_requests == 0


def fill_store() -> dict[bytes, bytes]:
    objects: dict[bytes, bytes] = {}
    host = Host(make_store(objects), num_pages=65, num_host_pages=200, write="through")
    for seed in range(1, 9):
        host.run(tokens(seed, 8))
    host.stored.close()
    return objects


class Slow:
    """A store whose loads take some seconds each."""

    def __init__(self, store: LyingStore, clock: Clock, seconds: float) -> None:
        self.store, self.clock, self.seconds = store, clock, seconds
        self.ready_at = 0.0
        self.num_loads = 0
        for name in ("lookup", "save", "touch", "close"):
            setattr(self, name, getattr(store, name))

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> Any:
        self.ready_at = max(self.ready_at, self.clock.now) + self.seconds * len(keys)
        self.num_loads += len(keys)
        return self.store.load(keys, rows)

    def poll(self) -> Any:
        return self.store.poll() if self.clock.now >= self.ready_at else []

    lookup: Callable[..., Any]
    save: Callable[..., Any]
    touch: Callable[..., Any]
    close: Callable[..., Any]


def wait(host: Host, request: EngineRequest, clock: Clock) -> float:
    start = clock.now
    while not host.stored.is_ready(request):
        clock.now += 0.001
    return clock.now - start


def finish_loads(host: Host, clock: Clock) -> None:
    while host.stored.stats().num_loading_pages:
        clock.now += 0.001
        host.stored.poll()


def test_loads_that_pay_are_waited_for(clock: Clock) -> None:
    """Rates: a page is loaded in 10 ms and computed in 40."""
    host = Host(Slow(make_store(fill_store()), clock, 0.01), num_pages=65, num_host_pages=200)
    host.stored.record_step(100, 1.0)
    assert wait(host, host.fetch(tokens(1, 8)), clock) == pytest.approx(0.02, abs=0.002)  # no rate of loads yet
    finish_loads(host, clock)
    assert host.stored.stats().num_loaded_pages == 8
    request = host.fetch(tokens(2, 8))
    assert wait(host, request, clock) == pytest.approx(0.08, abs=0.005)
    assert host.compute(request) == 32


def test_loads_that_do_not_pay_are_left(clock: Clock) -> None:
    """Rates: a page is loaded in 10 ms and computed in 4."""
    host = Host(Slow(make_store(fill_store()), clock, 0.01), num_pages=65, num_host_pages=200)
    host.stored.record_step(1000, 1.0)
    wait(host, host.fetch(tokens(1, 8)), clock)
    finish_loads(host, clock)
    request = host.fetch(tokens(2, 8))
    assert wait(host, request, clock) < 0.003
    assert host.compute(request) == 0
    assert host.stored.stats().num_recomputed_pages == 8
    clock.now += 11  # old rates are forgotten, so that the store gets another chance
    host.fetch(tokens(3, 8))
    host.stored.poll()
    assert host.store.num_loads == 16


def test_a_store_that_stalls_delays_no_longer_than_computing_would_take(clock: Clock) -> None:
    store = Slow(make_store(fill_store()), clock, 0.01)
    host = Host(store, num_pages=65, num_host_pages=200)
    host.stored.record_step(100, 1.0)
    wait(host, host.fetch(tokens(1, 8)), clock)
    finish_loads(host, clock)
    store.seconds = 1000
    assert wait(host, host.fetch(tokens(2, 8)), clock) <= 0.17  # twice the 8 pages of 10 ms
    assert host.stored.stats().num_late_requests == 2


def test_a_store_whose_loads_fail_is_left_alone_for_a_while(clock: Clock) -> None:
    store = Slow(make_store(fill_store()), clock, 0.001)
    host = Host(store, num_pages=65, num_host_pages=200)
    host.fetch(tokens(1, 8))
    host.stored.poll()
    poll = store.poll
    store.poll = lambda: [done._replace(is_done=bytes(8), error=OSError("down")) for done in poll()]  # type: ignore[method-assign]
    finish_loads(host, clock)
    store.poll = poll  # type: ignore[method-assign]
    host.stored.forget(EngineRequest("request", []))
    assert host.stored.stats().num_missing_pages == 8
    assert wait(host, host.fetch(tokens(2, 8)), clock) < 0.003
    assert host.stored.stats().num_recomputed_pages == 8
    clock.now += 11
    assert wait(host, host.fetch(tokens(3, 8)), clock) > 0.003


@pytest.mark.parametrize("damage", ["missing", "short", "long", "changed"])
def test_a_damaged_object_is_a_miss_of_its_key_alone(clock: Clock, damage: str) -> None:
    objects = fill_store()
    intact = dict(objects)
    host = Host(Slow(make_store(objects), clock, 0.001), num_pages=65, num_host_pages=200, write="through")
    request = host.fetch(tokens(1, 8))
    if damage == "missing":
        host.stored.poll()  # found by the look-up
    for key in name_pages(host, tokens(1, 8)):
        item = objects[key]
        damaged = {"short": item[:-1], "long": item + b"x", "changed": item[:-1] + bytes([item[-1] ^ 1])}
        if damage == "missing":
            del objects[key]
        else:
            objects[key] = damaged[damage]
    wait(host, request, clock)
    assert host.compute(request) == 0
    for seed in range(2, 9):
        request = host.fetch(tokens(seed, 8))
        wait(host, request, clock)
        assert host.compute(request) == 32
    stats = host.stored.stats()
    assert (stats.num_missing_pages, stats.num_damaged_pages) == ((0, 8) if damage == "changed" else (8, 0))
    assert (stats.num_recomputed_pages, stats.num_errors) == (0, 0)
    assert objects == intact  # written anew


def name_pages(host: Host, token_ids: Sequence[int]) -> list[bytes]:
    """Return the names of a prompt's full pages, whether they are cached or not."""
    manager = CacheManager(17, host.manager.kv_cache_groups, 64, host_tier=HostTier(40), hashing=PageHashing(hash_seed=1))
    chain = manager.registry.hash_apart(EngineRequest("names", token_ids), len(token_ids))
    keys, groups, _, _ = list_absent(manager._store, manager._rules.groups, chain, len(token_ids))
    return Pages(keys, groups).name()


@pytest.mark.parametrize("flags", [[1, 0], None, "done"])
def test_an_answer_with_unreadable_flags_ends_its_job(flags: Any) -> None:
    host = Host(make_store(), write="through")
    poll = host.store.poll
    host.store.poll = lambda: [done._replace(is_done=flags) for done in poll()]
    host.run(tokens(1))
    host.stored.poll()
    stats = host.stored.stats()
    assert (stats.num_queued_pages, stats.num_saved_pages, stats.num_unsaved_pages) == (0, 0, 4)
    assert stats.num_errors > 0


@pytest.mark.parametrize("answer", [None, (), {}, iter(())])
def test_what_is_no_list_of_answers_is_reported(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(make_store())
    host.store.poll = lambda: answer
    host.stored.poll()
    assert host.stored.stats().num_errors == 1
    assert f"poll returned {type(answer).__name__}, allowed: a list" in caplog.text


def test_a_store_that_never_answers_gets_no_more_questions(clock: Clock) -> None:
    host = Host(make_store(), deadline_ms=0)
    host.store.poll = list
    for number in range(2000):
        host.stored.fetch(EngineRequest(str(number), tokens(number)))
    assert host.stored.stats().num_waiting_requests == 1024


def test_a_store_that_never_answers_is_asked_seldom(clock: Clock) -> None:
    host = Host(make_store(), deadline_ms=0)
    poll, host.store.poll = host.store.poll, list
    for number in range(600):
        host.stored.fetch(EngineRequest(str(number), tokens(number)))
        clock.now += 1
        host.stored.poll()
    assert host.store.num_jobs < 60 + 1 + 540 / 10
    assert host.stored.stats().num_waiting_requests == host.store.num_jobs
    host.store.poll = poll
    for number in range(600, 610):
        host.stored.fetch(EngineRequest(str(number), tokens(number)))
        host.stored.poll()
    assert host.stored.stats().num_looked_up_pages >= 4 * 10


def make_slow_host(clock: Clock, seconds: float, tokens_per_second: int) -> Host:
    """A host that knows its rates: a page of 4 tokens is loaded in some seconds, and computed at the rate of steps."""
    host = Host(Slow(make_store(fill_store()), clock, seconds), num_pages=65, num_host_pages=200)
    host.stored.record_step(tokens_per_second, 1.0)
    wait(host, host.fetch(tokens(1, 8)), clock)
    finish_loads(host, clock)
    return host


def test_prompts_that_are_queued_before_a_request_leave_time_for_its_loads(clock: Clock) -> None:
    """Rates: a page is loaded in 10 ms and computed in 4. Forgotten requests are not computed."""
    host = make_slow_host(clock, 0.01, 1000)
    others = [EngineRequest(f"other {i}", tokens(20 + i, 8)) for i in range(4)]
    for _ in range(2):
        for other in others:
            host.stored.fetch(other)
        host.stored.poll()
        for other in others:
            host.stored.forget(other)
    host.fetch(tokens(2, 8))
    host.stored.poll()
    assert host.stored.stats().num_recomputed_pages == 8
    for other in others:
        host.stored.fetch(other)
    host.stored.forget(EngineRequest("request", []))
    host.fetch(tokens(3, 8))
    host.stored.poll()
    assert host.stored.stats().num_loading_pages == 8


def test_a_look_up_that_cannot_pay_is_not_waited_for(clock: Clock) -> None:
    host = make_slow_host(clock, 0.01, 1000)
    host.store.poll = list  # no answer
    assert wait(host, host.fetch(tokens(2, 8)), clock) == 0.0
    assert host.stored.stats().num_late_requests == 1  # without rates


def test_an_engine_that_asks_seldom_does_not_make_a_store_slow(clock: Clock) -> None:
    """A page is loaded in 10 ms and computed in 40, and the store is asked each 400 ms."""
    host = Host(Slow(make_store(fill_store()), clock, 0.01), num_pages=65, num_host_pages=200)
    host.stored.record_step(100, 1.0)
    for seed in range(1, 5):
        host.fetch(tokens(seed, 8))
        host.stored.forget(EngineRequest("request", tokens(seed, 8)))
        for _ in range(2):
            host.stored.poll()
            clock.now += 0.4
    request = host.fetch(tokens(5, 8))
    wait(host, request, clock)
    finish_loads(host, clock)
    request = host.fetch(tokens(6, 8))
    assert wait(host, request, clock) == pytest.approx(0.08, abs=0.01)
    assert host.compute(request) == 32
    assert host.stored.stats().num_recomputed_pages == 0


@pytest.mark.parametrize("seconds", [0.02, 1.0, 1000.0])
def test_a_store_too_slow_to_pay_delays_no_request_beyond_the_deadline(clock: Clock, seconds: float) -> None:
    """A page is computed in 4 ms. Requests come each two seconds, and for a minute none."""
    host = Host(Slow(make_store(fill_store()), clock, seconds), num_pages=65, num_host_pages=200)
    host.stored.record_step(1000, 1.0)
    for number in range(40):
        request = host.fetch(tokens(1 + number % 8, 8))
        assert wait(host, request, clock) < 0.0215
        for _ in range(60 if number == 20 else 2):
            clock.now += 1.0
            host.stored.poll()
            host.stored.record_step(1000, 1.0)


def test_a_reset_of_the_cache_ends_the_use_of_the_store() -> None:
    host = Host(make_store(fill_store()), num_pages=65, num_host_pages=200)
    assert host.run(tokens(1, 8)) == 32
    assert host.manager.reset_prefix_cache()
    assert host.run(tokens(2, 8)) == 0
    assert host.run(tokens(2, 8)) == 32  # from the pool
    num_saved = len(host.store.objects)
    host.evict_all()
    assert len(host.store.objects) == num_saved
    host.stored.close()
    host.stored = StoreTier(host.manager, make_store(host.store.objects), host.rows, NAMESPACE)
    assert host.run(tokens(3, 8)) == 32


def find_wrong(host: Host, token_ids: Sequence[int], num: int = 1) -> None:
    """Find out that the first pages of a prompt were never computed."""
    [page_ids] = host.manager.get_computed_pages(EngineRequest("other", token_ids))[0].get_page_ids()
    assert host.manager.page_pool.evict_pages(page_ids[:num]) == num
    host.evict_all()


def count_intact(host: Host) -> int:
    return sum(is_intact(item, NAMESPACE, key) for key, item in host.store.objects.items())


def test_the_object_of_a_page_that_was_found_to_be_wrong_never_hits_again() -> None:
    host = Host(make_store(), write="through")
    host.run(tokens(1))
    find_wrong(host, tokens(1), 2)
    host.stored.poll()
    assert count_intact(host) == 2
    host.stored.close()
    second = Host(make_store(host.store.objects), write="through")
    assert second.run(tokens(1)) == 0
    assert count_intact(second) == 4  # written anew
    assert second.stored.stats().num_errors == 0


def test_a_page_that_is_not_settled_is_not_saved() -> None:
    """Its step is taken back while the next one is planned, or the process ends."""
    host = Host(make_store(), write="through")
    request = EngineRequest("request", tokens(1))
    assert host.manager.allocate_slots(request, request.num_tokens) is not None
    host.move()
    host.move()
    host.stored.poll()
    assert host.store.objects == {}
    host.manager.free(request, num_computed_tokens=0)
    host.move()
    host.move()
    assert host.store.num_jobs == 0


@pytest.mark.parametrize("num_ahead", [1, 2, 3])
def test_pages_wait_for_as_many_steps_as_a_batch_plans_ahead(num_ahead: int) -> None:
    host = Host(make_store(), write="through")
    RunningBatch(host.manager, PageTable(1, 16, 64), max_steps_ahead=num_ahead)
    assert host.manager.allocate_slots(EngineRequest("request", tokens(1)), 17) is not None
    for _ in range(2 + num_ahead):
        assert host.store.objects == {}
        host.move()
        host.stored.poll()
    assert len(host.store.objects) == 4


def test_pages_of_the_last_steps_are_saved_by_close_if_it_may_wait() -> None:
    for drain_seconds in (0.0, 1.0):
        host = Host(make_store(), write="through")
        request = EngineRequest("request", tokens(1))
        assert host.manager.allocate_slots(request, request.num_tokens) is not None
        host.move()
        host.move()
        host.stored.close(drain_seconds=drain_seconds)
        assert len(host.store.objects) == (4 if drain_seconds else 0)


def test_a_wrong_page_whose_save_is_under_way_is_replaced_behind_it() -> None:
    store = make_store()
    host = Host(store, write="through")
    poll, store.poll = store.poll, list
    host.compute(EngineRequest("request", tokens(1)))
    assert (num_jobs := store.num_jobs) > 0
    find_wrong(host, tokens(1), 4)
    host.compute(EngineRequest("request", tokens(1)))  # the right pages wait for the answer, too
    assert store.num_jobs == num_jobs
    store.poll = poll
    host.stored.poll()
    assert count_intact(host) == 4
    host.stored.poll()
    assert [len(item) for item in store.objects.values()] == [64] * 4
    host.stored.poll()
    assert count_intact(host) == 4
    stats = host.stored.stats()
    assert (stats.num_saved_pages, stats.num_queued_pages, stats.num_dropped_pages) == (8, 0, 0)


def test_a_tombstone_that_is_not_saved_is_tried_again(clock: Clock) -> None:
    host = Host(make_store(), write="through")
    host.run(tokens(1))
    host.store.share = 1.0  # it does anything but what it is asked for
    find_wrong(host, tokens(1), 4)
    for _ in range(5):
        host.stored.poll()
    assert count_intact(host) == 4
    host.store.share = 0.0
    host.store.answers.clear()
    for _ in range(3):
        clock.now += 61
        host.stored.poll()
    assert count_intact(host) == 0


def test_close_waits_for_tombstones() -> None:
    host = Host(make_store(delay=3), write="through")
    host.run(tokens(1))
    for _ in range(5):
        host.stored.poll()
    assert count_intact(host) == 4
    find_wrong(host, tokens(1), 4)
    host.stored.close()
    assert count_intact(host) == 0


def test_a_reset_forgets_no_wrong_page() -> None:
    host = Host(make_store(), write="through")
    host.run(tokens(1))
    [page_ids] = host.manager.get_computed_pages(EngineRequest("other", tokens(1)))[0].get_page_ids()
    assert host.manager.page_pool.evict_pages(page_ids[:3]) == 3
    assert host.manager.reset_prefix_cache()
    host.stored.poll()
    host.stored.poll()
    assert count_intact(host) == 1


def test_a_page_whose_load_into_the_pool_failed_is_replaced() -> None:
    host = Host(make_store(), write="through")
    host.run(tokens(1))
    host.evict_all()
    assert host.manager.get_computed_pages(EngineRequest("other", tokens(1)))[1] == 16
    transfers = host.manager.take_moves()
    host.manager.fail(transfers.number, loads=[1])
    host.stored.poll()
    host.stored.poll()
    assert count_intact(host) == 3


def test_a_look_up_on_its_way_of_a_page_found_to_be_wrong_leads_to_no_load() -> None:
    host = Host(make_store(), write="through")
    host.run(tokens(1))
    poll, host.store.poll = host.store.poll, list
    host.manager.take_moves()
    [page_ids] = host.manager.get_computed_pages(EngineRequest("other", tokens(1)))[0].get_page_ids()
    host.manager.page_pool.evict_pages(page_ids)
    request = host.fetch(tokens(1))
    assert host.store.num_jobs > 0
    host.store.poll = poll
    num_jobs = host.store.num_jobs
    host.stored.poll()
    assert host.stored.is_ready(request)
    assert host.store.num_jobs == num_jobs + 1  # the tombstones
    assert host.compute(request) == 0
    assert count_intact(host) == 4


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 60, 64, 80])
def test_what_was_loaded_before_is_not_taken_for_a_page_whose_load_ends_early(num_bytes: int) -> None:
    """A page was found to be wrong, and is in the store again. Its load gets the memory of the one before."""
    prompt = tokens(1, 1)
    host = Host(make_store(), num_pages=65, num_host_pages=200, max_queued_bytes=64 + ROW_BYTES)
    [name] = name_pages(host, prompt)
    contents = []
    for byte in (7, 8):
        contents.append(bytearray([byte]) * (64 + ROW_BYTES))
        write_header(contents[-1], NAMESPACE, name, memoryview(contents[-1])[64:])
    host.store.objects[name] = bytes(contents[0])
    assert host.run(prompt) == 4
    find_wrong(host, prompt)
    for _ in range(2):
        host.stored.poll()
    assert count_intact(host) == 0
    host.store.objects[name] = bytes(contents[1])

    def load_part(_key: bytes, row: memoryview) -> bool:
        row[:num_bytes] = contents[1][:num_bytes]
        return True

    host.store._load = load_part
    assert host.run(prompt) == 0
    assert host.stored.stats().num_damaged_pages == 1


def test_a_load_on_its_way_of_a_page_found_to_be_wrong_does_not_hit() -> None:
    """The page is in the store, and is computed by another request, whose step fails, while it is loaded."""
    objects = fill_store()
    host = Host(make_store(objects), num_pages=65, num_host_pages=200, write="through")
    poll = host.store.poll
    request = host.fetch(tokens(1, 8))
    host.stored.poll()
    host.store.poll = list
    assert host.stored.stats().num_loading_pages == 8
    other = EngineRequest("other", tokens(1, 8))
    assert host.manager.allocate_slots(other, other.num_tokens) is not None
    host.manager.free(other, num_computed_tokens=0)
    host.move()
    host.store.poll = poll
    for _ in range(3):
        host.stored.poll()
    assert host.stored.is_ready(request)
    assert host.compute(request) == 0
    assert host.stored.stats().num_damaged_pages == 8


def test_a_page_that_several_requests_need_is_read_once(clock: Clock) -> None:
    store = Slow(make_store(fill_store()), clock, 0.001)
    host = Host(store, num_pages=65, num_host_pages=200)
    prompts = [[*tokens(1, 8)[:stop], 7] for stop in (33, 33, 17, 30, 33)] + [tokens(2, 8)]
    requests = [EngineRequest(f"request {i}", prompt) for i, prompt in enumerate(prompts)]
    for request in requests:
        host.stored.fetch(request)
    host.stored.poll()
    assert store.num_loads == 16
    host.stored.forget(requests[0])
    for request in requests[1:]:
        while not host.stored.is_ready(request):
            clock.now += 0.001
    assert [host.manager.probe(request).num_hit_tokens for request in requests] == [32, 32, 16, 28, 32, 32]
    assert host.stored.stats().num_loaded_pages == 16


def test_a_load_goes_on_for_the_requests_that_still_wait(clock: Clock) -> None:
    """The first request is computed before its pages are loaded; there is room for one page at a time."""
    store = Slow(make_store(fill_store()), clock, 0.01)
    host = Host(store, num_pages=65, num_host_pages=200, deadline_ms=5, max_queued_bytes=64 + ROW_BYTES)
    requests = [EngineRequest(f"request {i}", [*tokens(1, 8)[: 16 * i + 16], 7]) for i in range(2)]
    for request in reversed(requests):
        host.stored.fetch(request)
    host.stored.poll()
    assert not host.stored.is_ready(requests[1])
    clock.now += 0.006
    assert host.stored.is_ready(requests[1])  # too late
    host.stored.stats()
    for _ in range(100):
        clock.now += 0.01
        host.stored.poll()
    assert store.num_loads == 4  # not the four that nobody waits for
    assert host.stored.is_ready(requests[0])
    assert host.compute(requests[0]) == 16


def test_jobs_without_an_answer_are_given_up(clock: Clock) -> None:
    """Memory of their objects is out of use until the store answers."""
    room = 8 * (64 + ROW_BYTES)
    host = Host(make_store(fill_store()), num_pages=65, num_host_pages=200, deadline_ms=1e6, max_queued_bytes=room)
    poll = host.store.poll
    first, second = (EngineRequest(f"request {i}", tokens(i, 8)) for i in (1, 2))
    host.stored.fetch(first)
    host.stored.poll()
    host.store.poll = list
    host.stored.fetch(second)
    clock.now += 30
    assert not host.stored.is_ready(first)
    clock.now += 31
    assert host.stored.is_ready(first)
    assert host.stored.is_ready(second)
    assert (host.stored.stats().num_loading_pages, host.stored.stats().num_errors) == (0, 2)
    host.store.poll = poll
    clock.now += 11
    host.store.answers.rotate(-1)
    answers, host.store.answers = host.store.answers, type(host.store.answers)()
    host.stored.fetch(second)
    host.stored.poll()
    assert host.stored.stats().num_loading_pages == 0  # no room
    host.store.answers.extend(answers)
    for _ in range(3):
        host.stored.poll()
    assert host.stored.is_ready(second)
    assert host.compute(second) == 32


def test_saves_without_an_answer_are_given_up(clock: Clock) -> None:
    host = Host(make_store(), write="through")
    poll, host.store.poll = host.store.poll, list
    host.compute(EngineRequest("request", tokens(1)))
    clock.now += 61
    host.stored.poll()
    stats = host.stored.stats()
    assert (stats.num_queued_pages, stats.num_unsaved_pages) == (0, 4)
    host.store.poll = poll
    find_wrong(host, tokens(1), 4)  # the store may still write the pages
    for _ in range(3):
        host.stored.poll()
    assert len(host.store.objects) == 4
    assert count_intact(host) == 0


def test_pages_that_come_again_while_they_are_saved_are_saved_once() -> None:
    """The store answers look-ups, but no save: it does not have the pages yet."""
    host = Host(make_store(), num_pages=6, num_host_pages=12)
    poll, save, saves = host.store.poll, host.store.save, set()

    def start_save(keys: Sequence[bytes], rows: Sequence[memoryview]) -> Any:
        saves.add(save(keys, rows))
        return host.store.num_jobs

    host.store.save = start_save
    host.store.lookup = lambda keys: host.store._start(lambda: [False] * len(keys))
    host.store.poll = lambda: [done for done in poll() if done.job not in saves]
    for _ in range(3):
        for seed in range(1, 5):
            host.run(tokens(seed))
    stats = host.stored.stats()
    assert stats.num_dropped_pages == 0
    assert stats.num_queued_pages == 16 == len(host.store.objects)


def test_a_queue_is_allocated_at_the_start_as_far_as_the_tier_is_large() -> None:
    rows = [np.zeros((num, width), dtype=np.uint8) for num, width in ((100, 1000), (100, 3000))]
    tier = Tier(None, None, [rows[0], rows[1], rows[0]], True, print, int)  # type: ignore[arg-type]
    assert share_memory(tier, 1 << 30) == {1064: 25_000, 3064: 75_000}
    assert share_memory(tier, 4000) == {1064: 1000, 3064: 3000}
    assert share_memory(tier, 0) == {1064: 0, 3064: 0}


def test_another_namespace_shares_nothing() -> None:
    host = Host(make_store(fill_store()), num_pages=65, num_host_pages=200)
    host.stored.close()
    host.stored = StoreTier(host.manager, make_store(host.store.objects), host.rows, "other")
    assert host.run(tokens(1, 8)) == 0


def test_close_ends_all() -> None:
    host = Host(make_store(), write="through")
    host.store.poll = list
    request = host.fetch(tokens(1))
    host.stored.close(drain_seconds=1.0)
    host.stored.close()
    assert host.store.is_closed
    assert host.stored.is_ready(request)
    host.stored.fetch(request)
    assert host.stored.is_ready(request)
    assert host.manager.stats().store is None
    assert host.compute(request) == 0


def test_a_forgotten_request_is_not_counted() -> None:
    host = Host(make_store(), deadline_ms=0)
    request = host.fetch(tokens(1))
    host.stored.forget(request)
    host.stored.forget(request)
    assert host.stored.stats().num_waiting_requests == 0


def test_pages_of_a_request_longer_than_half_the_tier_are_not_loaded() -> None:
    host = Host(make_store(fill_store()), num_pages=65, num_host_pages=12, policy="write_back")
    assert host.run(tokens(1, 8)) == 0
    assert host.stored.stats().num_recomputed_pages == 8


# --- arguments ----------------------------------------------------------------------------------------------------


def make_manager(**options: Any) -> CacheManager:
    return CacheManager(9, [CacheGroupSpec(FULL)], max_model_len=64, **grouped(**{"hash_seed": 1} | options))


ROWS = [np.zeros((40, ROW_BYTES), dtype=np.uint8)]


@pytest.mark.parametrize(
    ("manager", "store", "rows", "options", "error", "message"),
    [
        (None, make_store(), ROWS, {}, ArgumentTypeError, "^manager: got NoneType"),
        (make_manager(), make_store(), ROWS, {}, ArgumentError, "^manager: got one without a host tier"),
        (0, 7, ROWS, {}, ArgumentTypeError, "^store: got int"),
        (0, make_store(), [], {}, ArgumentError, "^rows: got 0 arrays"),
        (0, make_store(), ROWS * 2, {}, ArgumentError, "^rows: got 2 arrays"),
        (0, make_store(), [ROWS[0][:39]], {}, ArgumentError, r"^rows\[0\]: got shape \(39, 32\), allowed: .* 40 pages"),
        (0, make_store(), [ROWS[0][:, :8]], {}, ArgumentError, r"^rows\[0\]: got shape"),
        (0, make_store(), [ROWS[0].astype(np.int8)], {}, ArgumentTypeError, r"^rows\[0\]: got int8 \(40, 32\), allow"),
        (0, make_store(), [ROWS[0][:, :0]], {}, ArgumentError, r"^rows\[0\]: got shape \(40, 0\), allowed: rows of at least 1"),
        (0, make_store(), [ROWS[0][0]], {}, ArgumentTypeError, r"^rows\[0\]: got uint8 \(32,\), allowed: a uint8 array with 2"),
        (0, make_store(), ROWS, {"namespace": "\udc80"}, ArgumentError, r"^namespace: got '\\udc80', allowed: valid Unicode"),
        (0, make_store(), ROWS, {"namespace": b"n"}, ArgumentTypeError, "^namespace: got bytes, allowed: a string"),
        (0, make_store(), ROWS, {"write": "back"}, ArgumentError, "^write: got 'back'"),
        (0, make_store(), ROWS, {"deadline_ms": -1}, ArgumentError, "^deadline_ms"),
        (0, make_store(), ROWS, {"deadline_ms": float("nan")}, ArgumentError, "^deadline_ms"),
        (0, make_store(), ROWS, {"max_queued_bytes": -1}, ArgumentError, "^max_queued_bytes"),
    ],
)
def test_wrong_arguments(
    manager: Any, store: Any, rows: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    if manager == 0:
        manager = make_manager(host_tier=HostTier(40))
    with pytest.raises(error, match=message):
        StoreTier(manager, store, rows, **{"namespace": NAMESPACE} | options)
    if isinstance(manager, CacheManager):
        assert manager.stats().store is None


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(1, inf), (1, nan), (1, -1.0), (1, 1 << 2000), (1 << 2000, 1.0), (-1, 1.0), (1.5, 1.0), (1, "1")],
    ids=shown,
)
def test_steps_that_cannot_be_are_refused(num_tokens: Any, seconds: Any) -> None:
    stored = StoreTier(make_manager(host_tier=HostTier(40)), make_store(), ROWS, NAMESPACE)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=r"^(num_tokens|seconds): got .*, allowed: "):
        stored.record_step(num_tokens, seconds)
    assert stored._loads._step_rate.per_second(time.monotonic()) is None


def test_a_manager_has_one_store() -> None:
    manager = make_manager(host_tier=HostTier(40))
    StoreTier(manager, make_store(), ROWS, NAMESPACE)
    with pytest.raises(ArgumentError, match="host_tier: got one that has storage behind it"):
        StoreTier(manager, make_store(), ROWS, NAMESPACE)


def test_namespaces_differ_where_pages_do() -> None:
    same = make_namespace(make_manager(), "layout", b"model")
    assert same == make_namespace(make_manager(), "layout", b"model")
    others: Iterator[str] = iter(
        (
            make_namespace(make_manager(hash_seed=2), "layout", b"model"),
            make_namespace(make_manager(hash_algo="sha256"), "layout", b"model"),
            make_namespace(make_manager(), "other", b"model"),
            make_namespace(make_manager(), "layout", b"other"),
            make_namespace(make_manager(), "layout", b"model", 0, 2),
            make_namespace(make_manager(), "layout", b"model", 1, 2),
        )
    )
    assert len({same, *others}) == 7
    with pytest.raises(ArgumentError, match="secret to the process"):
        make_namespace(make_manager(hash_seed=None), "layout", b"model")
    with pytest.raises(ArgumentError, match="without prefix caching"):
        make_namespace(CacheManager(9, [CacheGroupSpec(FULL)], 64, enable_caching=False), "layout", b"model")
    with pytest.raises(ArgumentTypeError, match=r"^model: got str"):
        make_namespace(make_manager(), "layout", "model")  # type: ignore[arg-type]
