"""Page tables: rows on the host, and commits to the device, beside NumPy and ``table.at[:n].set(host[:n])``.

The column "oracle" is that obvious page table. Commits are timed without the row operations before them, to completion and to
the return of the call. The runs of 200 steps begin with no program compiled, and count the compilations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.race import Race, Work
from bench.table_rivals import OBVIOUS, OURS, PAGE_TABLES
from bench.workload import PAGE_SIZE, SEED

NUM_ROWS = 256
NUM_COLUMNS = 2048
SHAPES = {(256, 2048): 40, (1024, 8192): 300}
"""Rows and columns of the tables that are committed, and how many times faster than a whole copy we mean to be."""

NUM_STEPS = 200
NUM_TURNS = 10
PROMPT = list(range(1, 501))

Table = Any
Change = Callable[[Table, int], None]
"""Something to do with a table's rows, in the round of a number."""


class Rows:
    """Row operations, on a table in which half of each row is filled."""

    def __init__(self, table: Table, change: Change) -> None:
        self.table, self.change = table, change
        self.num_rounds = 0

    def prepare(self) -> None:
        self.num_rounds += 1
        fill(self.table)

    def run(self) -> None:
        self.change(self.table, self.num_rounds)

    @property
    def page_ids(self) -> list[int]:
        return self.table.page_table_cpu.sum(axis=1).tolist()


def fill(table: Table) -> None:
    """Give each row the same pages, for half its length."""
    num_rows, num_columns = table.page_table_cpu.shape
    page_ids = list(range(1, num_columns // 2 + 1))
    for row in range(num_rows):
        table.add_row(page_ids, row)


def append_pages(table: Table, _: int) -> None:
    append_row, page_ids = table.append_row, [7]
    for row in range(NUM_ROWS):
        append_row(page_ids, row)


def append_batch(table: Table, _: int) -> None:
    table.append_rows_batch([[7]] * NUM_ROWS, range(NUM_ROWS))


def add_prompts(table: Table, _: int) -> None:
    for row in range(NUM_ROWS):
        table.add_row(PROMPT, row)


def clear_rows(table: Table, _: int) -> None:
    for row in range(NUM_ROWS):
        table.clear_row(row)


def move_rows(table: Table, _: int) -> None:
    for row in range(1, NUM_ROWS):
        table.move_row(row, row - 1)


def swap_rows(table: Table, _: int) -> None:
    for row in range(NUM_ROWS):
        table.swap_row(row, NUM_ROWS - 1 - row)


def test_append_one(race: Race) -> None:
    run_rows(race, append_pages, "append 1 page to a row (at most 0.25 us)")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_prompts, "replace a row by 500 pages"),
        (clear_rows, "clear a row of 1024 pages"),
        (move_rows, "move a row of 1024 pages"),
        (swap_rows, "swap two rows of 1024 pages"),
    ],
    ids=["add", "clear", "move", "swap"],
)
def test_rows(race: Race, change: Change, name: str) -> None:
    run_rows(race, change, name)


def test_append_batch(race: Race) -> None:
    """Easydel has it for several groups alone."""
    run_rows(race, append_batch, f"append 1 page to each of {NUM_ROWS} rows at once", [OURS, OBVIOUS])


def run_rows(race: Race, change: Change, name: str, rivals: Any = PAGE_TABLES) -> None:
    contenders = {rival: Rows(PAGE_TABLES[rival](NUM_ROWS, NUM_COLUMNS, 1), change) for rival in rivals}
    race(contenders, Work(name, "row", NUM_ROWS, NUM_TURNS))


class Slots:
    """Slots of tokens in random places of a table."""

    def __init__(self, table: Table, num_tokens: int) -> None:
        rng = np.random.default_rng(SEED)
        self.table = table
        fill(table)
        self.rows = rng.integers(0, NUM_ROWS, num_tokens, dtype=np.int32)
        self.positions = rng.integers(0, NUM_COLUMNS * PAGE_SIZE, num_tokens, dtype=np.int32)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.page_ids = self.table.slot_mapping(self.rows, self.positions, PAGE_SIZE)


@pytest.mark.parametrize("num_tokens", [256, 8192])
def test_slot_mapping(race: Race, num_tokens: int) -> None:
    contenders = {rival: Slots(PAGE_TABLES[rival](NUM_ROWS, NUM_COLUMNS, 1), num_tokens) for rival in (OURS, OBVIOUS)}
    race(contenders, Work(f"slots of {num_tokens} tokens", "token", num_tokens, 10 * NUM_TURNS))


class Commit:
    """A commit of all rows after some change."""

    def __init__(self, jax: Any, table: Table, change: Change, waits: bool) -> None:
        self.jax, self.table, self.change, self.waits = jax, table, change, waits
        self.num_rounds = 0
        fill(table)
        if hasattr(table, "warmup"):
            table.warmup()
        table.commit(table.page_table_cpu.shape[0])

    def prepare(self) -> None:
        for array in self.jax.live_arrays():  # whatever the others left running
            array.block_until_ready()
        self.change(self.table, self.num_rounds)
        self.num_rounds += 1

    def run(self) -> None:
        self.table.commit(self.table.page_table_cpu.shape[0])
        if self.waits:
            self.table.page_table.block_until_ready()

    @property
    def page_ids(self) -> list[int]:
        """Sums of rows, taken on the device: a view on the host would keep an array from being updated in place."""
        return self.jax.numpy.sum(self.table.page_table, axis=1).tolist()


def decode(table: Table, step: int) -> None:
    """One row in 16 gains a page."""
    for row in range(step % 16, table.page_table_cpu.shape[0], 16):
        table.append_row([step + 1], row)


def prefill(table: Table, step: int) -> None:
    """Four rows gain 500 pages, after one in some rounds was emptied to have room for them."""
    for i in range(4):
        row = (4 * step + i) % table.page_table_cpu.shape[0]
        if table.num_pages_per_row[row] + len(PROMPT) > table.page_table_cpu.shape[1]:
            table.clear_row(row)
        table.append_row(PROMPT, row)


def swap(table: Table, step: int) -> None:
    """Four pairs of rows change places, half filled, and one page tells them apart."""
    num_rows = table.page_table_cpu.shape[0]
    table.append_row([step + 1], 8 * step % num_rows)
    for i in range(4):
        table.swap_row((8 * step + i) % num_rows, (8 * step + i + 4) % num_rows)


def nothing(table: Table, step: int) -> None:
    """No row changes."""


@pytest.mark.parametrize("waits", [True, False], ids=["completion", "dispatch"])
@pytest.mark.parametrize("change", [decode, prefill, swap, nothing], ids=lambda change: change.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_commit(race: Race, shape: tuple[int, int], change: Change, waits: bool) -> None:
    jax = pytest.importorskip("jax")
    contenders = {rival: Commit(jax, make(*shape, 1), change, waits) for rival, make in PAGE_TABLES.items()}
    name = f"commit {shape[0]} x {shape[1]}, {change.__name__}, {'to completion' if waits else 'dispatch only'}"
    race(contenders, Work(name, "commit", 1, NUM_TURNS, SHAPES[shape] if waits else None))


class Run:
    """Steps of an engine whose number of requests changes, from the first compilation on."""

    def __init__(self, jax: Any, make: Callable[[int, int, int], Table]) -> None:
        self.jax, self.make = jax, make

    def prepare(self) -> None:
        self.jax.clear_caches()
        self.table = self.make(NUM_ROWS, NUM_COLUMNS, 1)
        self.jax.block_until_ready(self.table.page_table)

    def run(self) -> None:
        if hasattr(self.table, "warmup"):
            self.table.warmup()
        rng = np.random.default_rng(SEED)
        num_reqs = NUM_ROWS // 2
        for step in range(NUM_STEPS):
            num_reqs = take_step(self.table, rng, num_reqs, step)
            self.table.commit(num_reqs)
            self.table.page_table.block_until_ready()

    @property
    def page_ids(self) -> list[int]:
        return np.asarray(self.table.page_table).sum(axis=1).tolist()


def take_step(table: Table, rng: np.random.Generator, num_reqs: int, step: int) -> int:
    """Some requests leave, the last rows move into their places, some come, and one in 16 gains a page."""
    for _ in range(rng.integers(0, 3)):
        num_reqs -= 1
        table.move_row(num_reqs, int(rng.integers(num_reqs)))
        table.clear_row(num_reqs)
    for _ in range(min(rng.integers(0, 4), NUM_ROWS - num_reqs)):
        table.add_row(PROMPT, num_reqs)
        num_reqs += 1
    for row in range(step % 16, num_reqs, 16):
        table.append_row([step + 1], row)
    return num_reqs


def test_run(race: Race) -> None:
    jax = pytest.importorskip("jax")
    contenders = {rival: Run(jax, make) for rival, make in PAGE_TABLES.items()}
    name = f"{NUM_STEPS} steps with 128 requests and more or less, 256 x 2048, compilations included"
    race(contenders, Work(name, "step", NUM_STEPS, 1))
