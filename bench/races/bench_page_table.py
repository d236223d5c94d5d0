"""Page tables: rows on the host and commits to the device, compared with NumPy and ``table.at[:n].set(host[:n])``.

The column "oracle" is that obvious page table. Commits are timed without the row operations before them, to completion and to
the return of the call, in a process for each rival. The runs of 200 steps start without compiled programs and include the
compilations.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.races.commit_worker import CHANGES, PROMPT, Change
from bench.races.race import WALL_TIME, Race, Work
from bench.races.table_rivals import OBVIOUS, OURS, Table, fill, find_page_tables
from bench.workload import PAGE_SIZE, SEED

NUM_ROWS = 256
NUM_COLUMNS = 2048
SHAPES = {(256, 2048): (15, 40), (1024, 8192): (3, 300)}
"""Rows and columns of the committed tables, with the number of turns and the target speedup over a whole copy."""
ROUNDS_PER_COMMIT_TURN = 20

NUM_STEPS = 200
NUM_TURNS = 10
ROOT = Path(__file__).parents[2]
PAGE_TABLES = find_page_tables()

pytestmark = WALL_TIME  # but for the commits


class Rows:
    """Row operations on a table whose rows are half full."""

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
    """Easydel has this call only for several groups."""
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


class Clock:
    """A clock for pytest-benchmark that advances only by the times that the workers measured."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


class Worker:
    """Commits in a separate process, which runs all rounds of a turn at once: it would fall asleep between two messages."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turns = chain([1], repeat(1 + ROUNDS_PER_COMMIT_TURN))
        self._seconds: Iterator[float] = iter(())

    def prepare(self) -> None:
        """Do nothing: the worker prepares before it reads its clock."""

    def run(self) -> None:
        seconds = next(self._seconds, None)
        if seconds is None:
            self._seconds = iter(self._ask(next(self._turns)))
            seconds = next(self._seconds)
        CLOCK.seconds += seconds

    @property
    def page_ids(self) -> list[int]:
        return self._ask("page_ids")

    def _ask(self, question: object) -> Any:
        print(question, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def start_worker(*arguments: object) -> Iterator[Worker]:
    """Start a worker, and end it with the block."""
    command = [sys.executable, "-m", "bench.races.commit_worker", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("waits", [True, False], ids=["completion", "dispatch"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_commit(race: Race, shape: tuple[int, int], change: str, waits: bool) -> None:
    pytest.importorskip("jax")
    num_turns, target = SHAPES[shape]
    name = f"commit {shape[0]} x {shape[1]}, {change}, {'to completion' if waits else 'dispatch only'}"
    with ExitStack() as stack:
        workers = {rival: stack.enter_context(start_worker(rival, *shape, change, waits)) for rival in PAGE_TABLES}
        race(workers, Work(name, "commit", 1, num_turns, target if waits else None, rounds_per_turn=ROUNDS_PER_COMMIT_TURN))


class Run:
    """Steps of an engine whose number of requests changes, including the first compilation."""

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
    """Remove some requests, move the last rows into their places, add some requests, and append a page to one row in 16."""
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
    name = f"{NUM_STEPS} steps with about 128 requests, 256 x 2048, including compilations"
    race(contenders, Work(name, "step", NUM_STEPS, 1, rounds_per_turn=2))
