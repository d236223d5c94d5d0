"""A running batch against the oracle with many rows, and the segments of tables that a call changes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from batch_model import send
from batch_workload import BatchWorkload
from features import PLAIN
from hybrids import FULL, make_batch, make_manager
from pairs import make_rows
from settings import NUM_OPERATIONS, SETTINGS, Group, Setting

import pagepool

NUM_MANY_ROWS = 40


SMALL_PAGES = [setting for setting in SETTINGS if setting.page_size <= 8]


@pytest.mark.parametrize("setting", SMALL_PAGES[:: 1 if NUM_OPERATIONS >= 100_000 else 20], ids=lambda setting: setting.name)
def test_many_rows_at_once(setting: Setting) -> None:
    """In one call more pages become full than wait to be hashed and entered together, and the pool runs short among them."""
    num_pages = 12 * max(setting.num_pages)
    seed = zlib.crc32(setting.name.encode())
    workload = BatchWorkload(setting, make_rows(setting, num_pages, PLAIN, seed, NUM_MANY_ROWS), num_pages, Random(seed))
    for _ in range(4):
        for action in (workload.admit,) * NUM_MANY_ROWS + (workload.step, workload.plan) * setting.page_size:
            action()
    workload.drain()


# --- what is dirty --------------------------------------------------------------------------------------------


Places = list[tuple[int, int]]
PROMPT = list(range(140))

CALLS: list[tuple[str, Callable[[pagepool.RunningBatch], Any], Places]] = [
    ("an admission", lambda batch: batch.admit(0, PROMPT), [(0, 0), (0, 64)]),
    ("one that finds no room", lambda batch: batch.admit(1, PROMPT, num_reserved_pages=380), []),
    ("a step into a new page", lambda batch: batch.step([0], [1]), [(0, 64)]),
    ("a step into the same page", lambda batch: batch.step([0], [2]), []),
    ("tokens without room", lambda batch: batch.append([0, 0], [3, 4]), []),
    ("room for drafts", lambda batch: batch.plan([0], 2, 118), [(0, 64), (0, 128)]),
    ("tokens that have room", lambda batch: batch.step([0], [5]), []),
    ("a cut of no computed token", lambda batch: batch.trim([0], 145), []),
    ("a cut by a page, and room for drafts", lambda batch: batch.trim([0], 144), [(0, 64), (0, 128)]),
    ("a cut within a page", lambda batch: batch.trim([0], 143), []),
    ("a cut by a page", lambda batch: batch.trim([0], 142), [(0, 64)]),
    ("an admission with hits", lambda batch: batch.admit(1, PROMPT[:9]), [(1, 0)]),
    ("a row that moves", lambda batch: batch.move_row(0, 2), [(0, 0), (0, 64), (2, 0), (2, 64)]),
    ("rows that change places", lambda batch: batch.swap_row(1, 2), [(1, 0), (1, 64), (2, 0), (2, 64)]),
    ("a row that changes places with itself", lambda batch: batch.swap_row(1, 1), []),
    ("nothing", lambda batch: (batch.step([], []), batch.release([])), []),
    ("a release", lambda batch: batch.release([1]), [(1, 0), (1, 64)]),
    ("the last release", lambda batch: batch.release([2]), [(2, 0)]),
    ("the last segment of all", lambda batch: batch.admit(2, [7] * 400), [(2, 0), (2, 64), (2, 128), (2, 136)]),
]


def make_wide(group: Group) -> tuple[pagepool.RunningBatch, pagepool.PageTable]:
    """Return a batch over three rows of 200 pages, which are four segments each."""
    specs = [pagepool.CacheGroupSpec(kv_cache_spec=group.spec(pagepool, "float16"))]
    table = pagepool.PageTable(3, 200, 64)
    return pagepool.RunningBatch(pagepool.CacheManager(400, specs, 200 * group.page_size), table), table


def test_the_windows_that_a_call_changes_are_dirty() -> None:
    batch, table = make_wide(Group("full", 2))
    on_device = np.zeros_like(table.page_table_cpu)
    for name, call, expected in CALLS:
        version = table.cpu_version
        call(batch)
        assert send(table, on_device) == expected, name
        assert table.cpu_version > version or not expected, name
        np.testing.assert_array_equal(on_device, table.page_table_cpu)
        for row in range(3):
            page_ids = batch.get_page_ids(row)[0]
            assert table.page_table_cpu[row].tolist() == page_ids + [0] * (200 - len(page_ids))
        batch.check()


def test_tokens_of_pages_are_kept_where_the_manager_keeps_them() -> None:
    manager = make_manager(FULL, keep_token_ids=True)
    batch = make_batch(manager)
    batch.admit(0, [1, 2, 3, 4, 5, 6])
    batch.step([0], [7])
    batch.step([0], [8])
    pages = [manager.page_pool.pages[page_id] for page_id in batch.get_page_ids(0)[0]]
    kept = [page.page_hash.page_hash.token_ids for page in pages if page.page_hash]
    assert kept == [(1, 2, 3, 4), (5, 6, 7, 8)]
