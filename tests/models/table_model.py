"""A page table in plain NumPy, and random work on it and on the real one side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import pagepool

SHAPES = [(5, 7), (8, 100), (64, 257), (3, 64), (4, 128), (1, 1), (2, 65)]
"""Rows and columns; most widths are not multiples of 64."""

MAX_PAGE_ID = 2**31 - 1
NUM_ROWS = {"clear_row": 1, "move_row": 2, "swap_row": 2, "clear": 0}
"""Of operations that take rows and nothing else."""


class TableModel:
    """The behaviour of a `PageTable`, row by row, and the expected device array."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.table = np.zeros((num_rows, num_columns), dtype=np.int32)
        self.counts = np.zeros(num_rows, dtype=np.int32)
        self.on_device = self.table.copy()

    def append_row(self, page_ids: Any, row: int) -> None:
        start = self.counts[row]
        self.table[row, start : start + len(page_ids)] = page_ids
        self.counts[row] += len(page_ids)

    def add_row(self, page_ids: Any, row: int) -> None:
        self.clear_row(row)
        self.append_row(page_ids, row)

    def append_rows_batch(self, page_ids_per_req: Any, rows: Any) -> None:
        for page_ids, row in zip(page_ids_per_req, rows, strict=True):
            self.append_row(page_ids, row)

    def clear_row(self, row: int) -> None:
        self.table[row] = 0
        self.counts[row] = 0

    def move_row(self, src: int, tgt: int) -> None:
        self.table[tgt], self.counts[tgt] = self.table[src], self.counts[src]

    def swap_row(self, src: int, tgt: int) -> None:
        for array in (self.table, self.counts):
            array[[src, tgt]] = array[[tgt, src]]

    def clear(self) -> None:
        for array in (self.table, self.counts, self.on_device):
            array[:] = 0

    def commit(self, num_reqs: int) -> None:
        self.on_device[:num_reqs] = self.table[:num_reqs]


class GroupedModel:
    """The behaviour of a `MultiGroupPageTable`."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self.models = [TableModel(*shape) for shape in shapes]

    def append_rows_batch(self, page_ids_per_req: Any, rows: Any) -> None:
        for by_group, row in zip(page_ids_per_req, rows, strict=True):
            self.append_row(by_group, row)

    def __getattr__(self, name: str) -> Any:
        """Do the same in every group. A list, of the ids that are appended, has an item for each."""

        def call_all(*args: Any) -> None:
            for group, model in enumerate(self.models):
                getattr(model, name)(*[arg[group] if isinstance(arg, list) else arg for arg in args])

        return call_all


class Work:
    """Random row operations, each on a real table, of one group or of several, and on its model."""

    OPERATIONS = ("append", "append", "append", "batch", "add", "clear_row", "move_row", "swap_row", "write", "clear")

    def __init__(self, tables: Any, model: TableModel | GroupedModel, seed: int) -> None:
        self.tables, self.model = tables, model
        self.rng = np.random.default_rng(seed)
        self.pairs = list(zip(getattr(tables, "page_tables", (tables,)), getattr(model, "models", (model,)), strict=True))
        self.num_rows = self.pairs[0][1].counts.size

    def do(self) -> None:
        """Do one operation on both. Clearing the whole table is rare, or it would never fill."""
        name = self.rng.choice(self.OPERATIONS, p=[0.11] * 9 + [0.01])
        if name in NUM_ROWS:
            self.both(name, *(self.row() for _ in range(NUM_ROWS[name])))
        else:
            getattr(self, name)()

    def append(self) -> None:
        row = self.row()
        self.both("append_row", self.ids_for(row), row)

    def add(self) -> None:
        row = self.row()
        self.both("add_row", self.ids_for(row, is_new=True), row)

    def batch(self) -> None:
        rows = self.rng.permutation(self.num_rows)[: self.rng.integers(0, self.num_rows + 1)].astype(np.int32)
        self.both("append_rows_batch", [self.ids_for(row) for row in rows], rows if self.coin() else rows.tolist())

    def write(self) -> None:
        """Write a row directly, and mark it dirty."""
        row = self.row()
        for table, model in self.pairs:
            model.add_row(self.some_ids(self.rng.integers(0, model.table.shape[1] + 1)), row)
            table.page_table_cpu[row] = model.table[row]
            table.num_pages_per_row[row] = model.counts[row]
        self.tables.mark_dirty([row] if self.coin() else None)

    def both(self, name: str, *args: Any) -> None:
        getattr(self.tables, name)(*args)
        getattr(self.model, name)(*args)

    def commit(self, num_reqs: int) -> list[Any]:
        """Commit the real tables, and return the array of each."""
        arrays = self.tables.commit(num_reqs)
        return list(arrays) if isinstance(arrays, tuple) else [arrays]

    def row(self) -> int:
        return int(self.rng.integers(self.num_rows))

    def coin(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def ids_for(self, row: int, is_new: bool = False) -> Any:
        """Return ids that fit after a row's, or into the row: few or as many as fit, one list or array for each group."""
        groups = []
        for _, model in self.pairs:
            room = model.table.shape[1] - (0 if is_new else int(model.counts[row]))
            most = min(room, 3) if self.rng.random() < 0.7 else room
            groups.append(self.some_ids(self.rng.integers(0, most + 1)))
        return groups if isinstance(self.model, GroupedModel) else groups[0]

    def some_ids(self, num: int) -> list[int] | npt.NDArray[np.int32]:
        ids = self.rng.integers(0, MAX_PAGE_ID, num, dtype=np.int32, endpoint=True)
        return ids.tolist() if self.coin() else ids

    def check(self) -> None:
        """Assert that the host arrays are the model's, and zeros follow each row's last page."""
        for table, model in self.pairs:
            np.testing.assert_array_equal(table.page_table_cpu, model.table)
            np.testing.assert_array_equal(table.num_pages_per_row, model.counts)
            behind = np.arange(model.table.shape[1]) >= model.counts[:, None]
            assert not table.page_table_cpu[behind].any()

    def overwrite_host(self) -> None:
        """Overwrite the host tables, as an engine may that fills them for the next step; see `restore_host`."""
        for table, _ in self.pairs:
            table.page_table_cpu[:] = -7

    def restore_host(self) -> None:
        for table, model in self.pairs:
            table.page_table_cpu[:] = model.table


def make_work(shape: tuple[int, int], seed: int, **options: Any) -> Work:
    table = pagepool.PageTable(*shape, 64, **options)
    return Work(table, TableModel(*shape), seed)


def make_grouped_work(num_rows: int, max_model_len: int, page_sizes: list[int], seed: int, **options: Any) -> Work:
    tables = pagepool.MultiGroupPageTable(num_rows, max_model_len, 64, page_sizes, **options)
    shapes = [(num_rows, -(-max_model_len // page_size)) for page_size in page_sizes]
    return Work(tables, GroupedModel(shapes), seed)


def commit_groups_alone(work: Work, commit_at_random: Callable[[Work], object]) -> None:
    """Commit one of two groups by itself, and then both, again and again."""
    for step in range(40):
        for _ in range(3):
            work.do()
        table, model = work.pairs[step % 2]
        table.commit(4)
        model.commit(4)
        commit_at_random(work)


def slots_in_numpy(table: Any, rows: Any, positions: Any, page_size: int) -> Any:
    """Compute slots by the obvious expression."""
    return table[rows, positions // page_size] * page_size + positions % page_size
