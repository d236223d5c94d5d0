"""What every store must do, by pagepool/stores/protocol.py. It runs over each store of pagepool, and over yours:

    PAGEPOOL_TEST_STORE=my_package.my_module:make_store pytest tests/stores/test_conformance.py

``make_store(folder)`` returns a new store; for the same folder, an empty one at first, the objects are the same.
"""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from settings import NUM_OPERATIONS
from store_jobs import SECONDS, load, save, wait_for

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.stores import Done, FileStore, Store

try:
    from object_stores import MAKERS
except ImportError:
    MAKERS = {}
try:
    import peer_stores

    MAKERS = MAKERS | peer_stores.MAKERS
except ImportError:
    pass


def make_files(folder: Path) -> Store:
    return FileStore(folder, "model/v1")


def list_makers() -> Iterator[Any]:
    if named := os.environ.get("PAGEPOOL_TEST_STORE"):
        module, _, name = named.partition(":")
        yield pytest.param(getattr(importlib.import_module(module), name), id=named)
    else:
        yield pytest.param(make_files, id="files")
        for name, make in MAKERS.items():
            yield pytest.param(make, id=name)


@pytest.fixture(params=list(list_makers()))
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """A function that returns a new store of the same objects. All of them are closed at the end."""
    stores: list[Store] = []

    def make() -> Store:
        stores.append(request.param(tmp_path))
        return stores[-1]

    yield make
    for store in stores:
        store.close(drain_seconds=0)


@pytest.fixture
def store(make_store: Callable[[], Store]) -> Store:
    return make_store()


def test_it_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


def test_saved_objects_are_there_and_come_back(store: Store) -> None:
    objects = {b"a": b"one", b"b": b"two and more", bytes(range(64)): bytes(100_000)}
    (done,) = wait_for(store, store.lookup([*objects, b"missing"]))
    assert done.is_done == bytes(4)
    save(store, objects)
    (done,) = wait_for(store, store.lookup([b"missing", *objects]))
    assert done.is_done == b"\0\1\1\1"
    done, rows = load(store, [*objects], [len(row) for row in objects.values()])
    assert done.is_done == b"\1\1\1"
    assert rows == list(objects.values())
    assert done.error is None


def test_a_part_of_a_load_is_an_answer(store: Store) -> None:
    save(store, {b"a": b"1234", b"c": b"5678"})
    done, rows = load(store, [b"a", b"b", b"c"], [4, 4, 4])
    assert done == Done(done.job, b"\1\0\1", None)
    assert rows[0] + rows[2] == b"12345678"


def test_an_object_is_replaced_as_a_whole(store: Store) -> None:
    save(store, {b"key": b"long, long, long"})
    save(store, {b"key": b"short"})
    done, rows = load(store, [b"key"], [5])
    assert (done.is_done, rows) == (b"\1", [b"short"])


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_another_length_is_not_done(store: Store, size: int) -> None:
    save(store, {b"key": b"1234", b"next": b"5678"})
    done, rows = load(store, [b"key", b"next"], [size, 4])
    assert done.is_done == b"\0\1"
    assert rows[1] == b"5678"


def test_nothing_is_answered_for_no_keys(store: Store) -> None:
    jobs = [store.lookup([]), store.load([], []), store.save([], [])]
    assert wait_for(store, *jobs) == [Done(job, b"", None) for job in jobs]


def test_touching_is_no_job(store: Store) -> None:
    save(store, {b"key": b"1234"})
    store.touch([b"key", b"missing"])
    store.touch([])
    done, _ = load(store, [b"key"], [4])
    assert done.is_done == b"\1"
    assert store.poll() == []


def test_a_later_store_finds_what_an_earlier_one_saved(make_store: Callable[[], Store]) -> None:
    first, second = make_store(), make_store()
    save(first, {b"key": b"1234"})
    first.close(drain_seconds=SECONDS)
    for store in (second, make_store()):
        done, rows = load(store, [b"key"], [4])
        assert (done.is_done, rows) == (b"\1", [b"1234"])


def test_close_waits_for_saves(make_store: Callable[[], Store]) -> None:
    store = make_store()
    rows = [memoryview(bytes([i]) * 50_000) for i in range(100)]
    store.save([bytes([i]) for i in range(100)], rows)
    store.close(drain_seconds=SECONDS)
    (done,) = wait_for(later := make_store(), later.lookup([bytes([i]) for i in range(100)]))
    assert done.is_done == b"\1" * 100


def test_after_close_every_call_but_close_raises(store: Store) -> None:
    store.lookup([b"key"])
    store.close(drain_seconds=0)
    calls: list[Callable[[], object]] = [
        lambda: store.lookup([b"key"]),
        lambda: store.load([b"key"], [memoryview(bytearray(1))]),
        lambda: store.save([b"key"], [memoryview(b"1")]),
        lambda: store.touch([b"key"]),
        lambda: store.poll(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    store.close(drain_seconds=0)
    store.close(drain_seconds=10**400)


@pytest.mark.parametrize("drain_seconds", [0, 0.02])
@pytest.mark.parametrize("seed", range(2))
def test_no_row_is_touched_after_close(make_store: Callable[[], Store], seed: int, drain_seconds: float) -> None:
    """Loads and saves are cut at any point. What was loaded then stays, and objects are whole or not there."""
    store, rng = make_store(), random.Random(seed)
    old, new = bytes([1]) * 200_000, bytes([2]) * 200_000
    keys = [bytes([i]) for i in range(60)]
    save(store, dict.fromkeys(keys, old))
    loaded, saved = [bytearray(len(old)) for _ in keys], [bytearray(new) for _ in keys]
    store.load(keys, [memoryview(row) for row in loaded])
    store.save(keys, [memoryview(row) for row in saved])
    time.sleep(rng.random() * 0.01)
    store.close(drain_seconds=drain_seconds)
    for row in loaded:
        row[:] = b"\3" * len(row)
    for row in saved:
        row[:] = b"\4" * len(row)
    time.sleep(0.05)
    assert all(row.count(3) == len(row) for row in loaded), seed
    done, rows = load(make_store(), keys, [len(old)] * len(keys))
    assert done.is_done == b"\1" * len(keys)
    assert all(row in (old, new) for row in rows), seed


@pytest.mark.parametrize("keys", ["text", [1], [None], ["a"], [bytearray(b"a")], 5, None])
def test_keys_of_other_types_are_refused(store: Store, keys: Any) -> None:
    for call in (store.lookup, store.touch):
        with pytest.raises(ArgumentTypeError, match=r"^keys: got"):
            call(keys)
    for row_call in (store.load, store.save):
        with pytest.raises(ArgumentTypeError, match=r"^keys: got"):
            row_call(keys, [memoryview(bytearray(4))])
    assert store.poll() == []


def test_keys_of_other_lengths_are_refused(store: Store) -> None:
    for key in (b"", bytes(65)):
        with pytest.raises(ArgumentError, match=f"^keys: got a key of {len(key)} bytes, allowed: 1 to 64"):
            store.lookup([b"good", key])
    assert store.poll() == []


def test_other_rows_are_refused(store: Store) -> None:
    good = memoryview(bytearray(8))
    for rows, error in [
        ([bytes(4)], ArgumentTypeError),
        (5, ArgumentTypeError),
        ([memoryview(bytearray(8)).cast("I")], ArgumentTypeError),
        ([memoryview(bytearray(8)).cast("B", (2, 4))], ArgumentTypeError),
        ([good[::2]], ArgumentTypeError),
        ([good[:0]], ArgumentError),
        ([], ArgumentError),
        ([good, good], ArgumentError),
    ]:
        for call in (store.load, store.save):
            with pytest.raises(error, match=r"^rows: got"):
                call([b"key"], rows)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="read-only"):
        store.load([b"key"], [memoryview(b"1234")])
    assert store.poll() == []


@pytest.mark.parametrize("drain_seconds", ["1", None, True])
def test_other_times_to_drain_are_refused(store: Store, drain_seconds: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="drain_seconds"):
        store.close(drain_seconds=drain_seconds)
    with pytest.raises(ArgumentError, match="drain_seconds"):
        store.close(drain_seconds=-1)
    save(store, {b"key": b"still open"})


def make_row(version: int, size: int) -> bytearray:
    return bytearray(version.to_bytes(4, "big") * size)[:size]


@pytest.mark.parametrize("seed", range(2))
def test_random_jobs_are_answered_once_with_the_bytes_of_a_save(make_store: Callable[[], Store], seed: int) -> None:
    """Two stores share the objects. Jobs overlap, but not those of a key, so each load has one right answer."""
    rng = random.Random(seed)
    stores = [make_store(), make_store()]
    keys = [rng.randbytes(rng.randint(1, 64)) for _ in range(12)]
    sizes = [rng.choice([1, 100, 5_000, 70_000]) for _ in keys]
    stored = [0] * len(keys)  # the version that a load brings; 0 is a miss
    in_flight: list[dict[int, tuple[str, list[int], list[int], list[bytearray]]]] = [{}, {}]
    versions = iter(range(1, 1 << 30))
    busy: set[int] = set()  # keys with a job
    for _ in range(max(60, NUM_OPERATIONS // 100)):
        side = rng.randrange(2)
        kind = rng.choice(["lookup", "load", "save", "touch"])
        chosen = rng.sample([i for i in range(len(keys)) if i not in busy], rng.randint(0, min(6, len(keys) - len(busy))))
        names = [keys[i] for i in chosen]
        if kind == "touch":
            stores[side].touch(names)
        else:
            made = [next(versions) for _ in chosen]
            rows = [make_row(version, sizes[i]) for i, version in zip(chosen, made, strict=True)]
            views = [memoryview(row) for row in rows]
            start = {"lookup": stores[side].lookup, "load": stores[side].load, "save": stores[side].save}[kind]
            job = start(names) if kind == "lookup" else start(names, views)
            assert job not in in_flight[side]
            in_flight[side][job] = (kind, chosen, made, rows)
            busy.update(chosen)
        if rng.random() < 0.7 or len(busy) == len(keys):
            deadline = time.monotonic() + SECONDS
            while any(in_flight) and (len(busy) == len(keys) or rng.random() < 0.5):
                assert time.monotonic() < deadline, seed
                for store, flying in zip(stores, in_flight, strict=True):
                    for done in store.poll():
                        kind, chosen, made, rows = flying.pop(done.job)
                        assert len(done.is_done) == len(chosen)
                        assert done.error is None, (seed, done.error)
                        busy.difference_update(chosen)
                        for i, version, row, is_done in zip(chosen, made, rows, done.is_done, strict=True):
                            if kind == "save":
                                assert is_done == 1
                                stored[i] = version
                            else:
                                assert is_done == bool(stored[i]), seed
                                if kind == "load" and is_done:
                                    assert row == make_row(stored[i], sizes[i]), seed


def test_threads_that_poll_share_the_answers(store: Store, switch_often: None) -> None:
    """The protocol has one caller. Answers are given once even if there are several."""
    save(store, {b"key": b"1234"})
    answers: list[Done] = []
    num_jobs, is_over = 300, threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            answers.extend(store.poll())
            time.sleep(0)

    threads = [threading.Thread(target=poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        jobs = [store.lookup([b"key"] * (i % 5)) for i in range(num_jobs)]
        deadline = time.monotonic() + SECONDS
        while len(answers) < num_jobs and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert sorted(done.job for done in answers) == sorted(jobs)
    assert all(done.is_done == b"\1" * len(done.is_done) for done in answers)
