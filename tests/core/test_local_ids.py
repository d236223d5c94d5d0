"""Tables and inputs with the ids of a rank's own array: the same as those of the pool, mapped shard by shard."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    FullAttentionSpec,
    MultiGroupPageTable,
    RequestTraits,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
    local_page_ids,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, OutOfPagesError, PageIdError

COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float16", "use_mla": False}
FULL, WINDOW = FullAttentionSpec(4, **COMMON), SlidingWindowSpec(4, **COMMON, sliding_window=9)
NUM_ROWS, MAX_LEN, NUM_SHARDS = 6, 80, 4
SIZES = {"kv": 160, "windows": 80}


def make_batch(pools: int, local_ids: bool, size: int | None = NUM_SHARDS) -> RunningBatch:
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(WINDOW, pool="windows" if pools == 2 else "kv")]
    manager = CacheManager(SIZES if pools == 2 else SIZES["kv"], groups, MAX_LEN)
    tables = MultiGroupPageTable(NUM_ROWS, MAX_LEN, 128, [4, 4])
    return RunningBatch(manager, tables, data_parallel_size=size, local_ids=local_ids)


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_tables_have_the_ids_of_the_pool_mapped_by_shard(pools: int, seed: int) -> None:
    rng, batches = Random(seed), [make_batch(pools, local_ids) for local_ids in (False, True)]
    fields = ["slots", "page_ids", "page_indices", "page_starts"]
    inputs = [StepInputs(batch, num_tokens=400, num_reqs=NUM_ROWS, fields=fields, pad_slot=0) for batch in batches]
    shards = np.zeros(NUM_ROWS, np.int32)
    for _ in range(200):
        batch = batches[0]
        rows = [row for row in range(NUM_ROWS) if batch.is_admitted[row]]
        free = [row for row in range(NUM_ROWS) if not batch.is_admitted[row]]
        action = rng.random()
        if free and (not rows or action < 0.3):
            row, shard = free[0], rng.randrange(2 * NUM_SHARDS)
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            shards[row] = shard % NUM_SHARDS
            assert len({each.admit(row, prompt, traits=RequestTraits(dp_shard=shard)) for each in batches}) == 1
        elif action < 0.4:
            for each in batches:
                each.release([rows[0]])
        elif free and action < 0.5:
            shards[free[0]] = shards[rows[0]]
            assert len({try_fork(each, rows[0], free[0]) for each in batches}) == 1
        else:
            rows = [row for row in rows if batch.num_tokens[row] < MAX_LEN - 1]
            ids = [rng.randrange(2) for _ in rows]
            steps = [each.step(rows, ids) for each in batches]
            for each, step, out in zip(batches, steps, inputs, strict=True):
                each.inputs(step, out=out)
            assert steps[0].new_page_ids.tolist() == steps[1].new_page_ids.tolist()
            compare_inputs(*inputs, shards[rows], pools)
        for g in range(2):
            for row in range(NUM_ROWS):
                mine, others = (each.group_tables[g].page_table_cpu[row] for each in reversed(batches))
                assert mine.tolist() == to_local(others, shards[row], num_pages_of(g, pools)).tolist()
        for each in batches:
            each.check()


def try_fork(batch: RunningBatch, row: int, target: int) -> bool:
    try:
        batch.fork(row, [target])
    except OutOfPagesError:
        return False
    batch.take_moves()
    return True


def num_pages_of(group: int, pools: int) -> int:
    return SIZES["windows" if group == 1 and pools == 2 else "kv"]


def to_local(ids: Any, shard: Any, num_pages: int, unit: int = 1) -> Any:
    return np.where(ids < unit, ids, ids - np.maximum(0, shard * (num_pages // NUM_SHARDS) - 1) * unit)


def compare_inputs(pool: StepInputs, local: StepInputs, shards: Any, pools: int) -> None:
    n = len(shards)
    for g in range(2):
        num_pages = num_pages_of(g, pools)
        assert local.slots[g][:n].tolist() == to_local(pool.slots[g][:n], shards, num_pages, 4).tolist()
        assert local.page_ids[g][:n].tolist() == to_local(pool.page_ids[g][:n], shards[:, None], num_pages).tolist()
        counts = np.diff(pool.page_starts[g])[:n]
        listed = pool.page_indices[g][: counts.sum()]
        assert local.page_indices[g][: counts.sum()].tolist() == to_local(listed, np.repeat(shards, counts), num_pages).tolist()


def test_ids_of_moves_are_mapped() -> None:
    ids = np.arange(16)
    shards, local = local_page_ids(ids, 16, 4)
    assert shards.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert local.tolist() == [0, 1, 2, 3] + [1, 2, 3, 4] * 3
    assert [each.tolist() for each in local_page_ids([], 16, 4)] == [[], []]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_batch(1, True, None), ArgumentError, "local_ids: got True for a pool that is not divided"),
        (lambda: make_batch(1, True).admit(0, [1]), ArgumentError, "dp_shard: got None, allowed with local_ids"),
        (lambda: make_batch(1, "x"), ArgumentTypeError, "local_ids: got"),  # type: ignore[arg-type]
        (lambda: local_page_ids([1], 15, 4), ArgumentError, "data_parallel_size: got 4"),
        (lambda: local_page_ids([16], 16, 4), PageIdError, "page_ids: got 16"),
        (lambda: local_page_ids([-1], 16, 4), PageIdError, "page_ids: got -1"),
        (lambda: local_page_ids([[1], [2, 3]], 16, 4), ArgumentTypeError, "page_ids: got an array of object"),
        (lambda: local_page_ids([1.5], 16, 4), ArgumentTypeError, "page_ids: got an array of float64"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_media_have_no_local_ids() -> None:
    cross = CrossAttentionSpec(4, **COMMON, max_num_encoder_tokens=8)
    manager = CacheManager(160, [CacheGroupSpec(FULL), CacheGroupSpec(cross)], MAX_LEN)
    tables = MultiGroupPageTable(NUM_ROWS, MAX_LEN, 128, [4])
    with pytest.raises(ArgumentError, match="local_ids: got True for a model with cross-attention"):
        RunningBatch(manager, tables, data_parallel_size=4, local_ids=True)
