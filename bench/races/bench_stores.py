"""Batches of 64 pages in and out of a `FileStore`, beside a plain loop in Python: open, write and rename, or open and read.

Times are to completion, of new files in the page cache of the system. The remarks tell how long the calling thread is occupied
by a batch, and what is left of the speed while it computes in Python all the time. Others tell the CPU time that a store behind
the host tier takes in the engine's thread.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time

import numpy as np
import pytest

from bench.races.race import STORES, WALL_TIME, Race, Work
from bench.workload import PAGE_SIZE, SEED, make_group, random_tokens
from pagepool import CacheManager, EngineRequest, HostTier, PageHashing, specs
from pagepool.stores import Done, FileStore, Store, StoreTier
from pagepool.stores.jobs import JobStore

NUM_PAGES = 64
NUM_TURNS = 6
NUM_REPEATS = 7

pytestmark = WALL_TIME


class Storing:
    """A batch that is saved under new keys in each round, or loaded again and again."""

    def __init__(self, folder: Path, page_bytes: int, way: str) -> None:
        self.folder, self.way, self.numbers = folder, way, itertools.count()
        pages = np.random.default_rng(SEED).integers(0, 256, (NUM_PAGES, page_bytes), np.uint8)
        self.target = np.zeros_like(pages)
        self.saved = [memoryview(page) for page in pages]
        self.loaded = [memoryview(page) for page in self.target]
        self.keys: list[bytes] = []
        self.open()
        self.renew()
        self.save()

    def renew(self) -> None:
        """Remove the files of the last round."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()
        self.keys = [next(self.numbers).to_bytes(4, "big") + bytes(28) for _ in range(NUM_PAGES)]

    def prepare(self) -> None:
        if self.way == "save":
            self.renew()
        else:
            self.target[:] = 0

    def run(self) -> None:
        if self.way == "save":
            self.save()
        else:
            self.load()

    @property
    def page_ids(self) -> list[int]:
        """The sums of the pages that were saved or loaded."""
        if self.way == "load":
            return self.target.sum(1, dtype=np.int64).tolist()
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [int(np.fromfile(path, np.uint8).sum(dtype=np.int64)) for path in files]

    def open(self) -> None:
        raise NotImplementedError

    def save(self) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError


class Plain(Storing):
    def open(self) -> None:
        (self.folder / "00").mkdir(parents=True)

    def save(self) -> None:
        for key, row in zip(self.keys, self.saved, strict=True):
            path = f"{self.folder}/00/{key.hex()}"
            with open(f"{path}.tmp", "wb", buffering=0) as file:
                file.write(row)
            os.rename(f"{path}.tmp", path)

    def load(self) -> None:
        for key, row in zip(self.keys, self.loaded, strict=True):
            with open(f"{self.folder}/00/{key.hex()}", "rb", buffering=0) as file:
                file.readinto(row)


class Stored(Storing):
    def open(self) -> None:
        self.store = FileStore(self.folder, "bench")

    def wait(self) -> None:
        while not (answers := self.store.poll()):
            sleep(0.00005)
        assert answers[0].is_done == b"\1" * NUM_PAGES

    def start(self) -> None:
        if self.way == "save":
            self.store.save(self.keys, self.saved)
        else:
            self.store.load(self.keys, self.loaded)

    def save(self) -> None:
        self.store.save(self.keys, self.saved)
        self.wait()

    def load(self) -> None:
        self.store.load(self.keys, self.loaded)
        self.wait()


@pytest.mark.parametrize("way", ["save", "load"])
@pytest.mark.parametrize("page_kib", [64, 256, 1024])
def test_files(race: Race, tmp_path: Path, page_kib: int, way: str) -> None:
    stored = Stored(tmp_path / "store", page_kib << 10, way)
    contenders = {"plain loop": Plain(tmp_path / "plain", page_kib << 10, way), "FileStore": stored}
    race(contenders, Work(f"{way}s of {NUM_PAGES} files of {page_kib} KiB", "file", NUM_PAGES, NUM_TURNS, suite=STORES))
    stored.store.close(drain_seconds=1)


def test_the_calling_thread(tmp_path: Path, remark: Callable[[str], None]) -> None:
    """It starts a batch, then waits for the answer without the GIL, or computes with it."""
    for way in ("save", "load"):
        storing = Stored(tmp_path / way, 256 << 10, way)
        calls, alone, beside = [], [], []
        for _ in range(NUM_REPEATS):
            storing.prepare()
            start = perf_counter()
            storing.start()
            calls.append(perf_counter() - start)
            storing.wait()
            alone.append(perf_counter() - start)
            storing.prepare()
            start = perf_counter()
            storing.start()
            while not storing.store.poll():
                sum(range(100_000))  # about 2 ms
            beside.append(perf_counter() - start)
        storing.store.close(drain_seconds=1)
        in_call, waiting, computing = (median(seconds) / NUM_PAGES * 1e6 for seconds in (calls, alone, beside))
        remark(
            f"A {way} of {NUM_PAGES} files of 256 KiB occupies the calling thread for {in_call:.1f} us a file. It ends after "
            f"{waiting:.0f} us a file while that thread sleeps, and {computing:.0f} while it computes in Python."
        )


class Ready:
    """A store in memory that has answered when it is asked."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.answers: list[Done] = []
        self.numbers = itertools.count(1)

    def lookup(self, keys: Sequence[bytes]) -> int:
        return self.answer([key in self.objects for key in keys])

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        for key, row in zip(keys, rows, strict=True):
            row[:] = self.objects[key]
        return self.answer([True] * len(keys))

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        self.objects.update(zip(keys, map(bytes, rows), strict=True))
        return self.answer([True] * len(keys))

    def poll(self) -> list[Done]:
        answers, self.answers = self.answers, []
        return answers

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self, *, drain_seconds: float) -> None:
        pass

    def answer(self, flags: Sequence[bool]) -> int:
        job = next(self.numbers)
        self.answers.append(Done(job, bytes(flags), None))
        return job


class Nothing:
    """Objects that get their headers, and are not saved."""

    def save(self, key: bytes, row: memoryview, finish: Callable[[bytes, memoryview], None]) -> bool:
        finish(key, row)
        return True


class Deaf(JobStore):
    """A store that saves nothing."""

    def __init__(self) -> None:
        super().__init__("bench-deaf", Nothing(), 1)

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self, *, drain_seconds: float) -> None:
        self._jobs.stop()


class Tiered:
    """A manager with a host tier and a store behind it, and the rows of the tier."""

    def __init__(self, store: Store, page_bytes: int, num_pages: int) -> None:
        tier = HostTier(3 * num_pages, policy="write_through")
        self.manager = CacheManager(
            num_pages, [make_group(specs)], num_pages * PAGE_SIZE, host_tier=tier, hashing=PageHashing(hash_seed=1)
        )
        self.rows = np.ones((3 * num_pages, page_bytes), np.uint8)
        self.stored = StoreTier(self.manager, store, [self.rows], "bench", write="through", max_queued_bytes=1 << 30)

    def compute(self, request: EngineRequest) -> None:
        """Compute a request whose pages are not cached, and save its pages in the tier. They are due for the store then."""
        self.manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.manager.take_moves()  # those of the step that computes them
        self.manager.complete(self.manager.take_moves().number)
        self.manager.free(request)
        self.manager.free_page_hashes(request)


def make_request(number: int, num_pages: int) -> EngineRequest:
    return EngineRequest(f"request {number}", random_tokens(num_pages * PAGE_SIZE + 1, number))


def test_pages_due_for_a_store(remark: Callable[[str], None]) -> None:
    """`take_moves` copies them. The store's threads make their headers."""
    pytest.importorskip("xxhash")
    parts = []
    for page_kib in (64, 256, 1024):
        tiered, taken, copied = Tiered(Deaf(), page_kib << 10, NUM_PAGES + 2), [], []
        target = np.ones((NUM_PAGES, page_kib << 10), np.uint8)
        for number in range(2 * NUM_REPEATS):
            tiered.compute(make_request(number, NUM_PAGES))
            start = thread_time()
            tiered.manager.take_moves()
            taken.append(thread_time() - start)
            start = thread_time()
            for i in range(NUM_PAGES):
                target[i] = tiered.rows[i]
            copied.append(thread_time() - start)
            while tiered.stored.stats().num_queued_pages:
                sleep(0.001)
                tiered.stored.poll()
        tiered.stored.close()
        in_call, plain = (median(seconds) / NUM_PAGES / page_kib * 1024 * 1e6 for seconds in (taken, copied))
        parts.append(f"{in_call:.0f} us a MiB for pages of {page_kib} KiB (copies alone: {plain:.0f})")
    remark(f"`take_moves` with {NUM_PAGES} pages due for a store: {', '.join(parts)}.")


def time_fetches(store: Ready, numbers: range, num_pages: int) -> str:
    """Return the times of fetches, each by a new manager."""
    times: list[list[float]] = []
    for number in numbers:
        tiered, request = Tiered(store, 1024, num_pages + 2), make_request(number, num_pages)
        tiered.manager.get_computed_pages(request)  # makes the hashes
        marks = [thread_time()]
        tiered.stored.fetch(request)
        marks.append(thread_time())
        tiered.stored.poll()
        marks.append(thread_time())
        assert tiered.stored.is_ready(request)
        marks.append(thread_time())
        times.append([1e6 * (end - start) for start, end in pairwise(marks)])
        assert tiered.stored.stats().num_loaded_pages == tiered.stored.stats().num_found_pages
    us = [median(each) for each in zip(*times, strict=True)]
    return f"{us[0]:,.0f} us in `fetch`, {us[1]:,.0f} in the `poll` that takes the answer, and {us[2]:,.0f} in `is_ready`"


def test_a_prompt_that_is_fetched(remark: Callable[[str], None]) -> None:
    """A prompt of 1,000 pages of 1 KiB that a store has, and one that it does not have."""
    pytest.importorskip("xxhash")
    store, num_pages = Ready(), 1000
    first = Tiered(store, 1024, num_pages + 2)
    for number in range(NUM_REPEATS):
        first.compute(make_request(number, num_pages))
        first.manager.take_moves()  # the store gets pages a step later
    found = time_fetches(store, range(NUM_REPEATS), num_pages)
    missed = time_fetches(store, range(100, 100 + NUM_REPEATS), num_pages)
    remark(
        f"A prompt of {num_pages:,} pages in a store takes {found}, which copies and checks all loaded pages, of 1 KiB. "
        f"A prompt without pages there takes {missed}."
    )
