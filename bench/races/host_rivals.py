"""Contenders of transfers between an engine's arrays and host memory: `HostPages`, a transfer for each page, and a single one.

A contender moves the same pages one way again and again: `start` begins that, and `finish` waits until it has ended.
"""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.workload import SEED
from pagepool.host_pages import HostPages

NUM_LAYERS = 8
NUM_PAGES = 256
HEAD_SIZE = 64
PAGES_PER_CALL = 16
"""Of the rival that moves page by page."""


def moves_of(number: int, page_ids: Any, way: str) -> Any:
    """Return saves of different pages to the first pages of the host, or loads of them, as `take_moves` does."""
    places, nothing = np.arange(1, len(page_ids) + 1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    src, dst = (page_ids, places) if way == "save" else (places, page_ids)
    moved = SimpleNamespace(src=src, dst=dst, group=np.zeros_like(src))
    unmoved = SimpleNamespace(src=nothing, dst=nothing, group=nothing)
    saves, loads = (moved, unmoved) if way == "save" else (unmoved, moved)
    return SimpleNamespace(number=number, saves=saves, loads=loads)


class Moving:
    """The arrays, on the first device, and the pages that move. A page has `page_kib` KiB in all layers."""

    def __init__(self, num_pages: int, way: str, page_kib: int) -> None:
        self.jax, self.way = importlib.import_module("jax"), way
        kinds, device = self.jax.sharding.SingleDeviceSharding, self.jax.devices()[0]
        self.device, self.host = kinds(device), kinds(device, memory_kind="pinned_host")
        page = np.arange(NUM_PAGES, dtype=np.float32).reshape(-1, 1, 1)
        shape = (NUM_PAGES, page_kib * 1024 // 4 // NUM_LAYERS // HEAD_SIZE, HEAD_SIZE)
        self.arrays = [self.jax.numpy.broadcast_to(page + i, shape) for i in range(NUM_LAYERS)]
        self.arrays = self.jax.device_put(self.arrays, self.device)
        self.moved = 1 + np.random.default_rng(SEED).permutation(NUM_PAGES - 1)[:num_pages].astype(np.int32)

    def prepare(self) -> None:
        """Do nothing."""

    def run(self) -> None:
        self.start()
        self.finish()

    def start(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.jax.block_until_ready(self.arrays)

    @property
    def page_ids(self) -> list[float]:
        """The first number of each page that moves."""
        return np.asarray(self.arrays[0][self.moved, 0, 0]).tolist()


class Transferring(Moving):
    """`HostPages`."""

    def __init__(self, num_pages: int, way: str, page_kib: int, num_threads: int = 2) -> None:
        super().__init__(num_pages, way, page_kib)
        self.number = 0
        self.host_pages = HostPages(self.arrays, NUM_PAGES, num_copy_threads=num_threads)
        self.arrays = self.host_pages.warmup(self.arrays, num_pages)
        self.way = "save"
        self.run()
        self.way = way

    def start(self) -> None:
        self.number += 1
        self.arrays = self.host_pages.run(self.arrays, moves_of(self.number, self.moved, self.way))

    def finish(self) -> None:
        self.host_pages.wait()
        super().finish()


class MovingByPage(Moving):
    """A page on the host is an array: each is a transfer. `HostPages` did this before its pages were rows."""

    def __init__(self, num_pages: int, way: str, page_kib: int) -> None:
        super().__init__(num_pages, way, page_kib)
        jit = self.jax.jit
        self.read, self.write = jit(read_pages), partial(jit, donate_argnums=0)(write_pages)
        self.pieces = [self.moved[i : i + PAGES_PER_CALL] for i in range(0, num_pages, PAGES_PER_CALL)]
        self.save()
        self.load()

    def save(self) -> None:
        self.pages = [self.jax.device_put(self.read(self.arrays, piece), self.host) for piece in self.pieces]

    def load(self) -> None:
        for pages, piece in zip(self.pages, self.pieces, strict=True):
            self.arrays = self.write(self.arrays, self.jax.device_put(pages, self.device), piece)

    def start(self) -> None:
        self.save() if self.way == "save" else self.load()

    def finish(self) -> None:
        self.jax.block_until_ready((self.pages, self.arrays))


def read_pages(arrays: Any, page_ids: Any) -> list[Any]:
    jnp = importlib.import_module("jax").numpy
    return list(jnp.concatenate([array[page_ids].reshape(len(page_ids), -1) for array in arrays], axis=1))


def write_pages(arrays: Any, pages: Any, page_ids: Any) -> list[Any]:
    jnp = importlib.import_module("jax").numpy
    parts = jnp.split(jnp.stack(pages), len(arrays), axis=1)
    return [array.at[page_ids].set(part.reshape(-1, *array.shape[1:])) for array, part in zip(arrays, parts, strict=True)]


class Putting(Moving):
    """`jax.device_put` of one array with as many bytes."""

    def __init__(self, num_pages: int, way: str, page_kib: int) -> None:
        super().__init__(num_pages, way, page_kib)
        pages = self.jax.numpy.stack([array[self.moved] for array in self.arrays])
        self.source = self.jax.block_until_ready(self.jax.device_put(pages, self.device if way == "save" else self.host))
        self.target = self.host if way == "save" else self.device
        self.run()

    def start(self) -> None:
        self.put = self.jax.device_put(self.source, self.target)

    def finish(self) -> None:
        self.jax.block_until_ready(self.put)

    @property
    def page_ids(self) -> list[float]:
        return np.asarray(self.put)[0, :, 0, 0].tolist()
