"""Commits of one rival in a separate process: ``python -m bench.races.commit_worker RIVAL ROWS COLUMNS CHANGE WAITS``.

In one process the effects of a rival on malloc, caches and XLA's threads would change the times of the others. Each line on
stdin is answered by one on stdout: a number of rounds by the seconds that each took, ``page_ids`` by the sum of each row.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.races.table_rivals import Table, fill, find_page_table

PROMPT = list(range(1, 501))

Change = Callable[[Table, int], None]
"""Changes a table's rows; takes the table and the number of the round."""


class Commit:
    """A commit of all rows after a change."""

    def __init__(self, jax: Any, table: Table, change: Change, waits: bool) -> None:
        self.jax, self.table, self.change, self.waits = jax, table, change, waits
        self.num_rounds = 0
        fill(table)
        if hasattr(table, "warmup"):
            table.warmup()
        table.commit(table.page_table_cpu.shape[0])

    def prepare(self) -> None:
        for array in self.jax.live_arrays():  # started in the previous round
            array.block_until_ready()
        self.change(self.table, self.num_rounds)
        self.num_rounds += 1

    def run(self) -> None:
        self.table.commit(self.table.page_table_cpu.shape[0])
        if self.waits:
            self.table.page_table.block_until_ready()

    @property
    def page_ids(self) -> list[int]:
        """Sums of rows, computed on the device, since a view on the host would prevent in-place updates of the array."""
        return self.jax.numpy.sum(self.table.page_table, axis=1).tolist()


def decode(table: Table, step: int) -> None:
    """Append a page to one row in 16."""
    for row in range(step % 16, table.page_table_cpu.shape[0], 16):
        table.append_row([step + 1], row)


def prefill(table: Table, step: int) -> None:
    """Append 500 pages to each of four rows; full rows are emptied first."""
    for i in range(4):
        row = (4 * step + i) % table.page_table_cpu.shape[0]
        if table.num_pages_per_row[row] + len(PROMPT) > table.page_table_cpu.shape[1]:
            table.clear_row(row)
        table.append_row(PROMPT, row)


def swap(table: Table, step: int) -> None:
    """Swap four pairs of half-filled rows, one of which has one more page."""
    num_rows = table.page_table_cpu.shape[0]
    table.append_row([step + 1], 8 * step % num_rows)
    for i in range(4):
        table.swap_row((8 * step + i) % num_rows, (8 * step + i + 4) % num_rows)


def nothing(table: Table, step: int) -> None:
    """Change no row."""


CHANGES: dict[str, Change] = {change.__name__: change for change in (decode, prefill, swap, nothing)}


def time_round(commit: Commit) -> float:
    commit.prepare()
    start = time.perf_counter()
    commit.run()
    return time.perf_counter() - start


def main(rival: str, num_rows: str, num_columns: str, change: str, waits: str) -> None:
    """Answer until stdin ends. Output of the rivals goes to stderr."""
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
