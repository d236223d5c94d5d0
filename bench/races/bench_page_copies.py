"""Page copies on the device: `copy_pages` beside what engines write first, on jax on CPU, each to completion.

"Plain" is ``array.at[dst].set(array[src])`` for each array, neither compiled nor donated, so each array is copied whole; "by
page" does the same for one page after the other. The arrays are float32: XLA on CPU converts arrays of smaller floats as a
whole for any write.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.races.race import COPIES, WALL_TIME, Race, Work
from bench.workload import PAGE_SIZE, SEED
from pagepool.page_copies import copy_pages, warmup

NUM_LAYERS = 4
NUM_PAGES = 2048
PAGE_SHAPE = (PAGE_SIZE, 2, 32)
"""Tokens, heads, and head size: a page has 4 KiB in each layer, and a layer 8 MiB."""
NUM_TURNS = 10
ROUNDS_PER_TURN = 10

Arrays = list[Any]

pytestmark = WALL_TIME


class Copies:
    """Copies between different pages."""

    def __init__(self, num_copies: int) -> None:
        page_ids = 1 + np.random.default_rng(SEED).permutation(NUM_PAGES - 1)[: 2 * num_copies].astype(np.int32)
        self.src, self.dst = page_ids.reshape(2, -1)
        self.group = np.zeros(num_copies, dtype=np.int32)


def copy_plainly(arrays: Arrays, copies: Copies) -> Arrays:
    return [array.at[copies.dst].set(array[copies.src]) for array in arrays]


def copy_by_page(arrays: Arrays, copies: Copies) -> Arrays:
    for src, dst in zip(copies.src, copies.dst, strict=True):
        arrays = [array.at[dst].set(array[src]) for array in arrays]
    return arrays


class Copying:
    """A pool in which the same copies are made again and again."""

    def __init__(self, copy: Callable[[Arrays, Any], Arrays], copies: Copies) -> None:
        self.jax = importlib.import_module("jax")
        self.copy, self.copies = copy, copies
        layer = np.arange(NUM_PAGES, dtype=np.float32).reshape(-1, 1, 1, 1)
        layers = [self.jax.numpy.broadcast_to(layer + i, (NUM_PAGES, *PAGE_SHAPE)) for i in range(NUM_LAYERS)]
        self.arrays = warmup(layers, len(copies.src))

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.arrays = self.jax.block_until_ready(self.copy(self.arrays, self.copies))

    @property
    def page_ids(self) -> list[float]:
        """The first number of each page, of all layers together, computed on the device."""
        return sum(array[:, 0, 0, 0] for array in self.arrays).tolist()


CONTENDERS: dict[str, Callable[[Arrays, Any], Arrays]] = {
    "by page": copy_by_page,
    "plain": copy_plainly,
    "pagepool": copy_pages,
}


@pytest.mark.parametrize("num_copies", [1, 8, 64])
def test_copies(race: Race, num_copies: int) -> None:
    pytest.importorskip("jax")
    copies = Copies(num_copies)
    contenders = {name: Copying(copy, copies) for name, copy in CONTENDERS.items() if name != "by page" or num_copies <= 8}
    name = f"copies of {num_copies} of {NUM_PAGES} pages, in {NUM_LAYERS} layers"
    race(contenders, Work(name, "call", 1, NUM_TURNS, suite=COPIES, rounds_per_turn=ROUNDS_PER_TURN))
