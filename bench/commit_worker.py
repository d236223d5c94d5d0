"""Commits of one rival in a process of its own: ``python -m bench.commit_worker RIVAL ROWS COLUMNS CHANGE WAITS``.

What one rival does to malloc, to the caches and to XLA's threads would else decide how long another takes. For each line on
stdin there is one on stdout: for a number of rounds the seconds that each took, for ``page_ids`` the sum of each row.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.table_rivals import Table, fill, find_page_table

PROMPT = list(range(1, 501))

Change = Callable[[Table, int], None]
"""Something to do with a table's rows, in the round of a number."""


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
        for array in self.jax.live_arrays():  # whatever the round before left running
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


CHANGES: dict[str, Change] = {change.__name__: change for change in (decode, prefill, swap, nothing)}


def time_round(commit: Commit) -> float:
    commit.prepare()
    start = time.perf_counter()
    commit.run()
    return time.perf_counter() - start


def main(rival: str, num_rows: str, num_columns: str, change: str, waits: str) -> None:
    """Answer until stdin ends. What the rivals print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    make = find_page_table(rival)
    jax = importlib.import_module("jax")  # after easydel, which sets options for it
    gc.collect()
    gc.disable()
    commit = Commit(jax, make(int(num_rows), int(num_columns), 1), CHANGES[change], waits == "True")
    for line in sys.stdin:
        answer = commit.page_ids if line == "page_ids\n" else [time_round(commit) for _ in range(int(line))]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
