"""Page tables with torch on the CPU, by one thread: commits of pagepool's tables, beside a copy of all rows.

Each step gives a page to one row in 16. "all rows" is ``table.copy_(host)`` for each group, from host tables of pagepool. A
gather puts all rows into the order of a batch, with the columns in use.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pagepool
from bench.races.race import TORCH, Race, Work
from bench.workload import SEED

NUM_TURNS = 10
ROUNDS_PER_TURN = 10
SHAPES = [(256, 2048, 1), (1024, 8192, 1), (256, 2048, 4)]


@pytest.fixture
def torch() -> Iterator[Any]:
    """Return torch with one thread."""
    module = pytest.importorskip("torch")
    num_threads = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(num_threads)


class Committing:
    """Half-filled tables of which one row in 16 gets a page in each step."""

    def __init__(self, tables: Any) -> None:
        self.tables = tables
        self.num_groups, (self.num_rows, self.num_columns) = len(tables), tables[0].page_table_cpu.shape
        self.step = 0
        self.fill()
        self.run()

    def fill(self) -> None:
        ids = np.arange(1, self.num_columns // 2 + 1, dtype=np.int32)
        for row in range(self.num_rows):
            self.tables.add_row([ids] * self.num_groups, row)

    def prepare(self) -> None:
        rows = range(self.step % 16, self.num_rows, 16)
        self.step += 1
        self.tables.append_rows_batch([[[self.step]] * self.num_groups for _ in rows], rows)

    def run(self) -> None:
        self.tables.commit(self.num_rows)

    @property
    def page_ids(self) -> list[int]:
        return [int(table.page_table.sum()) for table in self.tables.page_tables]


class Copying(Committing):
    """The same with a copy of all rows."""

    def __init__(self, torch: Any, tables: Any) -> None:
        self.on_host = [torch.from_numpy(table.page_table_cpu) for table in tables.page_tables]
        self.on_device = [torch.zeros_like(table) for table in self.on_host]
        super().__init__(tables)

    def run(self) -> None:
        for device, host in zip(self.on_device, self.on_host, strict=True):
            device.copy_(host)

    @property
    def page_ids(self) -> list[int]:
        return [int(table.sum()) for table in self.on_device]


@pytest.mark.parametrize(("num_rows", "num_columns", "num_groups"), SHAPES)
def test_commit(race: Race, torch: Any, num_rows: int, num_columns: int, num_groups: int) -> None:
    tables = importlib.import_module("pagepool.torch")
    sizes = [1] * num_groups
    contenders = {
        "all rows": Copying(torch, pagepool.MultiGroupPageTable(num_rows, num_columns, 1, sizes)),
        TORCH.ours: Committing(tables.MultiGroupPageTable(num_rows, num_columns, sizes, device="cpu")),
    }
    groups = "" if num_groups == 1 else f"{num_groups} groups of "
    name = f"commit of {groups}{num_rows} x {num_columns}, a page for one row in 16"
    race(contenders, Work(name, "commit", 1, NUM_TURNS, suite=TORCH, rounds_per_turn=ROUNDS_PER_TURN))


class Gathering:
    """Puts all rows of a half-filled table into the order of a batch, again and again."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        tables = importlib.import_module("pagepool.torch")
        self.torch = importlib.import_module("torch")
        self.table = tables.PageTable(num_rows, num_columns, device="cpu")
        for row in range(num_rows):
            self.table.append_row(np.arange(1, num_columns // 2 + 1, dtype=np.int32), row)
        self.table.commit(num_rows)
        self.rows = np.random.default_rng(SEED).permutation(num_rows)
        self.out = self.torch.zeros((num_rows, num_columns // 2), dtype=self.torch.int32)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.table.gather(self.rows, out=self.out)

    @property
    def page_ids(self) -> list[int]:
        return self.out[:, :8].tolist()


class Taking(Gathering):
    """The same on the host: `numpy.take`, and a copy of the result."""

    def run(self) -> None:
        taken = np.take(self.table.page_table_cpu[:, : self.out.shape[1]], self.rows, axis=0)
        self.out.copy_(self.torch.from_numpy(taken))


def test_gather(race: Race, torch: Any) -> None:
    contenders = {"all rows": Taking(256, 2048), TORCH.ours: Gathering(256, 2048)}
    name = "rows in batch order, the 1,024 columns in use of 256 x 2048"
    race(contenders, Work(name, "gather", 1, NUM_TURNS, suite=TORCH, rounds_per_turn=ROUNDS_PER_TURN))
