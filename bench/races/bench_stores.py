"""Batches of 64 pages in and out of a `FileStore`, beside a plain loop in Python: open, write and rename, or open and read.

Times are to completion, of new files in the page cache of the system. The remarks tell how long the calling thread is occupied
by a batch, and what is left of the speed while it computes in Python all the time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import pytest

from bench.races.race import STORES, WALL_TIME, Race, Work
from bench.workload import SEED
from pagepool.stores import FileStore

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
