"""A common interface to page tables: pagepool's, the obvious one in NumPy and jax, and easydel's if it is installed."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pagepool

OURS = "pagepool"
OBVIOUS = "oracle"
"""The column that the obvious page table shares with the manager's pure-Python twin."""
EASYDEL = "easydel"

Table = Any


class ObviousPageTable:
    """Plain NumPy rows, and ``table.at[:n].set(host[:n])`` for a commit."""

    def __init__(self, max_num_reqs: int, max_num_pages_per_req: int, _: int) -> None:
        self.page_table_cpu = np.zeros((max_num_reqs, max_num_pages_per_req), dtype=np.int32)
        self.num_pages_per_row = np.zeros(max_num_reqs, dtype=np.int32)
        self._page_table: Any = None

    @property
    def page_table(self) -> Any:
        if self._page_table is None:
            self._page_table = importlib.import_module("jax.numpy").zeros(self.page_table_cpu.shape, dtype="int32")
        return self._page_table

    def append_row(self, page_ids: Sequence[int], row: int) -> None:
        start = self.num_pages_per_row[row]
        self.num_pages_per_row[row] += len(page_ids)
        self.page_table_cpu[row, start : start + len(page_ids)] = page_ids

    def append_rows_batch(self, page_ids_per_req: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        for page_ids, row in zip(page_ids_per_req, rows, strict=True):
            self.append_row(page_ids, row)

    def clear_row(self, row: int) -> None:
        self.page_table_cpu[row] = 0
        self.num_pages_per_row[row] = 0

    def add_row(self, page_ids: Sequence[int], row: int) -> None:
        self.clear_row(row)
        self.append_row(page_ids, row)

    def move_row(self, src: int, tgt: int) -> None:
        self.page_table_cpu[tgt] = self.page_table_cpu[src]
        self.num_pages_per_row[tgt] = self.num_pages_per_row[src]

    def swap_row(self, src: int, tgt: int) -> None:
        for array in (self.page_table_cpu, self.num_pages_per_row):
            array[[src, tgt]] = array[[tgt, src]]

    def slot_mapping(self, rows: Any, positions: Any, page_size: int) -> Any:
        return self.page_table_cpu[rows, positions // page_size] * page_size + positions % page_size

    def commit(self, num_reqs: int) -> None:
        self._page_table = self.page_table.at[:num_reqs].set(self.page_table_cpu[:num_reqs])


def import_easydel() -> Callable[[int, int, int], Table]:
    """Return easydel's page table, or raise ImportError. It takes ten seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("easydel.inference.esurge.page_table").PageTable


def find_page_table(rival: str) -> Callable[[int, int, int], Table]:
    """Return the class of a rival's table, without importing other rivals."""
    return {OURS: lambda: pagepool.PageTable, OBVIOUS: lambda: ObviousPageTable, EASYDEL: import_easydel}[rival]()


def find_page_tables() -> dict[str, Callable[[int, int, int], Table]]:
    """Return the table classes of all installed rivals."""
    page_tables = {rival: find_page_table(rival) for rival in (OURS, OBVIOUS)}
    with contextlib.suppress(ImportError):
        page_tables[EASYDEL] = find_page_table(EASYDEL)
    return page_tables


def fill(table: Table) -> None:
    """Give each row the same pages, for half its length."""
    num_rows, num_columns = table.page_table_cpu.shape
    page_ids = list(range(1, num_columns // 2 + 1))
    for row in range(num_rows):
        table.add_row(page_ids, row)
