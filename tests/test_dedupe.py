"""Rows with the same tokens that come to share pages (`dedupe=True`), by hand; for random rows see `test_states`."""

from __future__ import annotations

from typing import Any

from hybrids import FULL, PROMPT, STATE, count_hits, make_batch, make_manager, take

from pagepool import FullAttentionSpec, MultiGroupPageTable, RunningBatch, SlidingWindowSpec

WINDOW = SlidingWindowSpec(4, 1, 8, "float16", False, 5)
LARGE = FullAttentionSpec(8, 1, 8, "float16", False)


def make_rows(*specs: Any, dedupe: bool = True, **options: Any) -> RunningBatch:
    """Return a batch with two rows of two tokens each."""
    batch = make_batch(make_manager(*specs or (FULL,), **options), dedupe=dedupe)
    for row in range(2):
        batch.admit(row, PROMPT[:2])
    return batch


def step(batch: RunningBatch, num_tokens: int, rows: list[int] | None = None) -> None:
    """Append the prompt's next tokens to rows, until they know `num_tokens`."""
    rows = [0, 1] if rows is None else rows
    while batch.num_tokens[rows[0]] < num_tokens:
        batch.step(rows, [PROMPT[batch.num_tokens[rows[0]]]] * len(rows))
        batch.check()


def test_a_page_is_shared_from_the_next_growth_on() -> None:
    batch = make_rows()
    step(batch, 4)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1],), ([2],)]
    step(batch, 5)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1, 3],), ([1, 4],)]
    ref_counts = batch._manager.page_pool.ref_counts()
    assert ref_counts[:5].tolist() == [0, 2, 0, 1, 1]
    assert batch._manager.page_pool.free_page_ids_in_order()[-1] == 2
    assert count_hits(batch._manager) == 4


def test_the_table_shows_it() -> None:
    manager = make_manager(FULL)
    table = MultiGroupPageTable(2, 64, 64, [4])
    batch = RunningBatch(manager, table, dedupe=True)
    for row in range(2):
        batch.admit(row, PROMPT[:4])
    [shown] = table.page_tables
    version = shown.cpu_version
    batch.step([0, 1], [1, 1])
    assert shown.page_table_cpu[:, :2].tolist() == [[1, 3], [1, 4]]
    assert shown.cpu_version > version


def test_windows_and_states() -> None:
    batch = make_rows(LARGE, WINDOW, STATE)
    step(batch, 9)
    take(batch)
    step(batch, 10)
    assert [batch.get_page_ids(row)[0][0] for row in range(2)] == [1, 1]
    assert batch.get_page_ids(0)[1][:2] == batch.get_page_ids(1)[1][:2]
    states = [batch.get_page_ids(row)[2] for row in range(2)]
    assert states[0] != states[1]  # a state is written
    batch.check()


def test_growth_that_shared_pages_is_taken_back() -> None:
    """What was shared stays so: it is the same content."""
    batch = make_rows()
    step(batch, 4)
    result = batch.step([0, 1], [7, 8])
    batch.undo(result)
    assert [batch.get_page_ids(row) for row in range(2)] == [([1],), ([1],)]
    batch.check()
