"""Resident memory of a pool and of the rows of a running batch: ``python -m bench.races.memory`` prints a table.

Linux only. Pages of 16 tokens, one full-attention group, prefix caching on. Each line but the second is measured in a new
process, since a batch would reuse memory freed by the previous one.

The rows' table is a NumPy array, for which Linux may use huge pages. Short rows then cost as much as the reserved length.
"""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import pagepool
from bench.tables import as_table
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group

NUM_PAGES = 1_000_000
NUM_ROWS = 256
MAX_MODEL_LEN = 32_768
PROMPT_LEN = 8192
ROW_LENGTHS = (1024, 4096, 16_384)
COLUMNS = ("resident memory", "pages", "bytes a page", "bytes a token")


def read_resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_manager() -> pagepool.CacheManager:
    return pagepool.CacheManager(NUM_PAGES, [make_group(pagepool)], MAX_MODEL_LEN)


def make_batch(manager: pagepool.CacheManager, num_rows: int) -> pagepool.RunningBatch:
    table = pagepool.PageTable(num_rows, MAX_MODEL_LEN // PAGE_SIZE, MAX_MODEL_LEN)
    return pagepool.RunningBatch(manager, table)


def measure_pool() -> list[list[str]]:
    """Return the lines of a new pool and of a used one."""
    start = read_resident_bytes()
    manager = make_manager()
    new = show(f"pool of {NUM_PAGES:,} pages, new", start, NUM_PAGES)
    fill_cache(manager)
    return [new, show("the same pool, all pages cached", start, NUM_PAGES)]


def measure_rows(length: int) -> list[list[str]]:
    """Return the line of a batch whose rows have `length` tokens, without its pool."""
    manager = make_manager()
    fill_cache(manager)
    start = read_resident_bytes()
    batch = make_batch(manager, NUM_ROWS)
    admit_rows(batch, length)
    return [show(f"{NUM_ROWS} rows of {length:,} tokens, including their table", start, NUM_ROWS * length // PAGE_SIZE)]


def fill_cache(manager: pagepool.CacheManager) -> None:
    """Run prompts until every page is cached."""
    batch = make_batch(manager, 1)
    rng = np.random.default_rng(SEED)
    for _ in range(NUM_PAGES // (PROMPT_LEN // PAGE_SIZE) + 1):
        batch.admit(0, rng.integers(0, VOCABULARY, PROMPT_LEN, dtype=np.int32))
        batch.release([0])


def admit_rows(batch: pagepool.RunningBatch, length: int) -> None:
    rng = np.random.default_rng([SEED, length])
    for row in range(NUM_ROWS):
        batch.admit(row, rng.integers(0, VOCABULARY, length, dtype=np.int32))


def show(name: str, start: int, num_pages: int) -> list[str]:
    """Return a line of the table: the growth of resident memory since the start."""
    per_page = (read_resident_bytes() - start) / num_pages
    return [name, f"{num_pages:,}", f"{per_page:.1f}", f"{per_page / PAGE_SIZE:.2f}"]


def main() -> None:
    with get_context("spawn").Pool(1, maxtasksperchild=1) as workers:
        lines = [*workers.apply(measure_pool)]
        lines += [line for length in ROW_LENGTHS for line in workers.apply(measure_rows, (length,))]
    print(as_table(COLUMNS, lines))


if __name__ == "__main__":
    main()
