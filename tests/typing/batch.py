"""An engine that grows its rows together, with page tables."""

from collections.abc import Sequence
from typing import assert_type

import numpy as np
import numpy.typing as npt

from pagepool import (
    CacheManager,
    FailedLoads,
    MultiGroupPageTable,
    PageTable,
    RequestTraits,
    RunningBatch,
    StepResult,
    device_slot_mapping,
)

Int32 = npt.NDArray[np.int32]


def make_batch(manager: CacheManager) -> RunningBatch:
    table = PageTable(max_num_reqs=8, max_num_pages_per_req=256, max_num_batched_tokens=2048)
    return RunningBatch(manager, table, max_steps_ahead=1)


def make_batch_of_groups(manager: CacheManager) -> RunningBatch:
    tables = MultiGroupPageTable(8, max_model_len=4096, max_num_batched_tokens=2048, page_sizes=[16, 32])
    return RunningBatch(manager, tables, data_parallel_size=2)


def admit(batch: RunningBatch, prompt: list[int], array: Int32) -> int:
    num_hit_tokens = batch.admit(0, prompt, max_num_new_tokens=512, traits=RequestTraits(cache_salt="tenant"))
    assert_type(num_hit_tokens, int | None)
    assert_type(batch.probe(1, array, traits=RequestTraits(lora_id=3)), int)
    again = batch.admit(1, array, num_drafts=3, reserve="prompt")
    return (num_hit_tokens or 0) + (again or 0)


def step(batch: RunningBatch, rows: list[int], token_ids: Int32) -> Int32:
    """Rows and tokens may be lists or arrays, of any width of ints."""
    result = batch.step(rows, token_ids)
    assert_type(result, StepResult)
    assert_type(result.num_grown, int)
    running = np.flatnonzero(batch.is_admitted)
    if result.num_grown < len(rows):
        assert_type(batch.settle(result, failed=True), Int32)
    assert_type(batch.settle(batch.new_step(), token_ids, counts=1), Int32)
    batch.step(running, np.zeros(len(running), dtype=np.int64))
    batch.step(tuple(rows), [1] * len(rows))
    batch.plan(rows, 16)
    batch.plan(rows, [16] * len(rows), num_drafts=4, step=result)
    batch.trim(running, batch.num_computed_tokens[running])
    batch.release(running)
    batch.release([0], seconds=2)
    return result.new_page_ids


def read(batch: RunningBatch) -> tuple[int, list[bool], tuple[list[int], ...]]:
    assert_type(batch.num_tokens, Int32)
    assert_type(batch.num_computed_tokens, Int32)
    return int(batch.num_tokens.sum()), batch.is_admitted.tolist(), batch.get_page_ids(0)


def fork(batch: RunningBatch, targets: Sequence[int], failed: FailedLoads) -> list[int]:
    batch.fork(0, targets)
    batch.fork(0, np.array(targets, dtype=np.int32))
    rewound, lost = batch.rewind(failed)
    assert_type(rewound, list[int])
    return lost


def use_table(table: PageTable, rows: Int32, positions: Int32) -> Int32:
    table.append_row([5, 6], 1)
    table.add_row(rows, 0)
    table.append_rows_batch([[1, 2], rows], [0, 1])
    table.page_table_cpu[0, 0] = 7
    table.mark_dirty([0])
    table.commit(4)
    device_slot_mapping(table.page_table, rows, positions, 16)
    return table.slot_mapping(rows, positions, page_size=16)


def use_tables(tables: MultiGroupPageTable) -> list[int]:
    first = tables[0]
    tables.append_row([[1, 2], [3]], 0)
    assert_type(first, PageTable)
    return [len(tables), *first.num_pages_per_row.tolist()]
