"""Transfers between the arrays of an engine and host memory, beside `jax.device_put` of the same bytes in one array.

`HostPages` also gathers the pages of all layers before a save, and scatters them after a load; both are timed to completion, to
and from pinned memory of the device, or where there is none, the CPU's. The remark tells how much later a step ends that starts
behind a save.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from bench.races.race import HOST, WALL_TIME, Race, Work
from bench.workload import PAGE_SIZE, SEED
from pagepool.host_pages import HostPages

NUM_LAYERS = 8
NUM_PAGES = 256
PAGE_SHAPE = (PAGE_SIZE, 8, 64)
"""Tokens, heads, and head size: a page has 32 KiB in each layer, 256 KiB in all, and the arrays 64 MiB."""
NUM_TURNS = 10
ROUNDS_PER_TURN = 10
NUM_STEPS = 20

pytestmark = WALL_TIME


class Transfers:
    """Saves of different pages to the first pages of the host, or loads of them."""

    def __init__(self, number: int, page_ids: Any, way: str) -> None:
        places, nothing = np.arange(1, len(page_ids) + 1, dtype=np.int32), np.zeros(0, dtype=np.int32)
        self.number = number
        self.save_src, self.save_dst = (page_ids, places) if way == "save" else (nothing, nothing)
        self.load_src, self.load_dst = (places, page_ids) if way == "load" else (nothing, nothing)
        self.save_group, self.load_group = np.zeros_like(self.save_src), np.zeros_like(self.load_src)


class Transferring:
    """`HostPages`, with pages that move one way again and again."""

    def __init__(self, num_pages: int, way: str) -> None:
        self.jax, self.way, self.number = importlib.import_module("jax"), way, 1
        page = np.arange(NUM_PAGES, dtype=np.float32).reshape(-1, 1, 1, 1)
        self.arrays = [self.jax.numpy.broadcast_to(page + i, (NUM_PAGES, *PAGE_SHAPE)) for i in range(NUM_LAYERS)]
        self.host_pages = HostPages(self.arrays, NUM_PAGES)
        self.arrays = self.host_pages.warmup(self.arrays, num_pages)
        self.moved = 1 + np.random.default_rng(SEED).permutation(NUM_PAGES - 1)[:num_pages].astype(np.int32)
        self.start(Transfers(1, self.moved, "save"))
        self.host_pages.wait()

    def start(self, transfers: Transfers) -> None:
        self.arrays = self.host_pages.run(self.arrays, transfers)

    def prepare(self) -> None:
        self.number += 1
        self.transfers = Transfers(self.number, self.moved, self.way)

    def run(self) -> None:
        self.start(self.transfers)
        self.host_pages.wait()
        self.jax.block_until_ready(self.arrays)

    @property
    def page_ids(self) -> list[float]:
        """The first number of each page that moves."""
        return np.asarray(self.arrays[0][self.moved, 0, 0, 0]).tolist()


class Putting(Transferring):
    """`jax.device_put` of one array with as many bytes."""

    def __init__(self, num_pages: int, way: str) -> None:
        super().__init__(num_pages, way)
        (pack,) = self.host_pages._groups[0].packs
        pages = self.jax.numpy.stack([array[self.moved] for array in self.arrays])
        self.array = self.jax.device_put(pages, pack.device if way == "save" else pack.host)
        self.sharding = pack.host if way == "save" else pack.device

    def run(self) -> None:
        self.put = self.jax.block_until_ready(self.jax.device_put(self.array, self.sharding))

    @property
    def page_ids(self) -> list[float]:
        return np.asarray(self.put)[0, :, 0, 0, 0].tolist()


@pytest.mark.parametrize("way", ["save", "load"])
@pytest.mark.parametrize("num_pages", [1, 8, 64])
def test_transfers(race: Race, num_pages: int, way: str) -> None:
    pytest.importorskip("jax")
    contenders = {"device_put": Putting(num_pages, way), "pagepool": Transferring(num_pages, way)}
    num_mib = num_pages * NUM_LAYERS * 4 * np.prod(PAGE_SHAPE) / 2**20
    name = f"{way}s of {num_pages} pages of {NUM_LAYERS} layers"
    race(contenders, Work(name, "MiB", num_mib, NUM_TURNS, suite=HOST, rounds_per_turn=ROUNDS_PER_TURN))


def test_the_delay_of_a_step(remark: Callable[[str], None]) -> None:
    """A product of matrices stands for the step."""
    jax = pytest.importorskip("jax")
    transferring = Transferring(64, "save")
    matrix = jax.numpy.ones((1024, 1024))
    step = jax.jit(lambda matrix, page: matrix @ matrix + page[0, 0, 0])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * NUM_STEPS + 2):
        transferring.prepare()
        start = perf_counter()
        if i % 2:
            transferring.start(transferring.transfers)
        step(matrix, transferring.arrays[0][1]).block_until_ready()
        seconds[bool(i % 2)].append(perf_counter() - start)
        transferring.host_pages.wait()
    alone, behind = (median(seconds[is_behind][1:]) * 1e3 for is_behind in (False, True))
    remark(f"A step of {alone:.2f} ms that starts behind a save of 64 pages, 16 MiB, ends after {behind:.2f} ms.")
