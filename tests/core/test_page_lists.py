"""Page lists of a step's inputs: equal to what NumPy reads from the tables, through all that rows go through."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np
import pytest

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageTable,
    ReferenceWindowSpec,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
)
from pagepool.errors import ArgumentError, ArgumentTypeError

NUM_ROWS, MAX_LEN, PAGE_SIZE = 6, 120, 4
LISTS = ["page_starts", "page_indices", "last_page_lens", "page_offsets"]
COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float16", "use_mla": False}
FULL = FullAttentionSpec(PAGE_SIZE, **COMMON)
SINKS = FullAttentionSpec(PAGE_SIZE, **COMMON, num_sink_tokens=8)
WINDOW = SlidingWindowSpec(PAGE_SIZE, **COMMON, sliding_window=9)
CHUNK = ChunkedLocalAttentionSpec(PAGE_SIZE, **COMMON, attention_chunk_size=16)
REFERENCE = ReferenceWindowSpec(PAGE_SIZE, **COMMON, sliding_window=9)
MODELS = {"full": [FULL], "sinks": [SINKS], "window": [FULL, WINDOW], "chunk": [CHUNK, FULL], "reference": [REFERENCE]}
NUM_STEPS = int(os.environ.get("PAGEPOOL_TEST_OPERATIONS", "600"))


def make_batch(specs: list[Any], **options: Any) -> RunningBatch:
    manager = CacheManager(400, [CacheGroupSpec(spec) for spec in specs], MAX_LEN, **options)
    tables = MultiGroupPageTable(
        NUM_ROWS, MAX_LEN, 256, [spec.page_size for spec in specs], sink_page_ids=manager.sink_page_ids
    )
    return RunningBatch(manager, tables)


def first_place(spec: Any, starts: Any) -> Any:
    """Return the places of the first pages that rows read."""
    if spec is WINDOW:
        return np.maximum(0, starts - spec.sliding_window + 1) // PAGE_SIZE
    return starts // spec.attention_chunk_size * spec.attention_chunk_size // PAGE_SIZE if spec is CHUNK else starts * 0


class Lists:
    """Random steps of a batch; after each, the lists are compared with the tables."""

    def __init__(self, model: str, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.specs = MODELS[model]
        self.batch = make_batch(self.specs)
        self.orders = "given", "decodes"
        self.inputs = [
            StepInputs(
                self.batch, num_tokens=NUM_ROWS * 24, num_reqs=NUM_ROWS, fields=[*LISTS, "rows", "starts", "seq_lens"],
                depth=rng.choice((1, 2, 3)), order=order, dtypes={"page_indices": rng.choice(("int32", "int64"))},
            )
            for order in self.orders
        ]  # fmt: skip

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.change()
            rows = [row for row in range(NUM_ROWS) if self.batch.is_admitted[row]]
            if self.rng.random() < 0.3:
                self.rng.shuffle(rows)
            rows = rows[: self.rng.randint(1, NUM_ROWS)]
            if rows:
                self.step(rows)

    def step(self, rows: list[int]) -> None:
        left = (self.batch.num_tokens - self.batch.num_computed_tokens)[rows]
        done = [row for row, num in zip(rows, left, strict=True) if num == 0]
        self.batch.append(done, [self.rng.randrange(4)] * len(done))
        left = (self.batch.num_tokens - self.batch.num_computed_tokens)[rows]
        step = self.batch.plan(rows, [self.rng.randint(1, int(num)) for num in left])
        self.batch.take_moves()
        for inputs in self.inputs if self.rng.random() < 0.8 else ():
            self.batch.inputs(step, out=inputs)
            self.compare(inputs, len(step))

    def compare(self, inputs: StepInputs, n: int) -> None:
        starts, stops = inputs.starts[:n], inputs.seq_lens[:n]
        begins = np.array([inputs.rows[i] for i in np.cumsum(np.r_[0, (stops - starts)[:-1]])], np.intp)
        for g, spec in enumerate(self.specs):
            table = self.batch.group_tables[g]
            num_sinks = len(table.sink_page_ids)
            first, last = first_place(spec, starts), (stops - 1) // PAGE_SIZE
            columns = np.arange(table.page_table_cpu.shape[1]) - num_sinks
            is_read = (columns >= np.where(first, first, -num_sinks)[:, None]) & (columns <= last[:, None])
            ids, counts = table.page_table_cpu[begins][is_read], is_read.sum(axis=1)
            assert inputs.page_indices[g][: ids.size].tolist() == ids.tolist()
            assert not inputs.page_indices[g][ids.size :].any()
            sums = np.r_[0, counts.cumsum()]
            assert inputs.page_starts[g].tolist() == [*sums.tolist(), *[int(sums[-1])] * (NUM_ROWS - n)]
            assert inputs.last_page_lens[g].tolist() == [*((stops - 1) % PAGE_SIZE + 1).tolist(), *[0] * (NUM_ROWS - n)]
            offsets = np.where(first, first, -num_sinks) * PAGE_SIZE
            assert inputs.page_offsets[g].tolist() == [*offsets.tolist(), *[0] * (NUM_ROWS - n)]

    def change(self) -> None:
        batch, rng = self.batch, self.rng
        free = [row for row in range(NUM_ROWS) if not batch.is_admitted[row]]
        rows = [row for row in range(NUM_ROWS) if batch.is_admitted[row]]
        action = rng.random()
        if free and (not rows or action < 0.2):
            batch.admit(free[0], [rng.randrange(2) for _ in range(rng.randint(1, 40))], num_tokens=1)
        elif rows and action < 0.28:
            batch.release([rng.choice(rows)])
        elif rows and action < 0.34:
            batch.swap_row(rng.choice(rows), rng.randrange(NUM_ROWS))
        elif rows and free and action < 0.4:
            batch.fork(rng.choice(rows), [free[0]])
            batch.take_moves()
        elif rows and action < 0.46:
            row = rng.choice(rows)
            num_tokens = rng.randint(max(1, int(batch.num_tokens[row]) - 6), int(batch.num_tokens[row]))
            try:
                batch.trim([row], [num_tokens])
            except ArgumentError:  # a window needs pages again
                return
        for row in [row for row in rows if batch.is_admitted[row] and batch.num_tokens[row] > MAX_LEN - 30]:
            batch.release([row])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_lists_are_what_numpy_reads_from_the_tables(model: str, seed: int) -> None:
    Lists(model, seed).run(NUM_STEPS)


def make_inputs(source: Any, **options: Any) -> StepInputs:
    return StepInputs(source, **{"num_tokens": 64, "num_reqs": 3, "fields": LISTS} | options)


def test_more_pages_than_a_list_has_room_for() -> None:
    batch = make_batch([FULL, WINDOW])
    batch.admit(0, range(30))
    batch.admit(1, range(100, 110))
    inputs = make_inputs(batch, num_pages=(10, 20))
    with pytest.raises(ArgumentError, match="page_indices: got 11 pages in group 0, allowed: 10, which is num_pages"):
        batch.inputs(batch.plan([]), out=inputs) or batch.inputs(rows=[0, 1], starts=[29, 9], stops=[30, 10], out=inputs)
    assert not inputs.page_starts[0].any()
    assert not inputs.page_indices[1].any()
    batch.inputs(rows=[0], starts=[29], stops=[30], out=inputs)
    assert inputs.page_starts[0].tolist() == [0, 8, 8, 8]
    assert inputs.page_indices[0].shape == (10,)


def test_tables_of_an_engine_list_all_pages() -> None:
    tables = MultiGroupPageTable(3, 24, 64, [4, 3])
    tables.add_row([[7, 8], [5, 6, 9]], 1)
    inputs = make_inputs(tables)
    inputs.fill(rows=[1], starts=[5], stops=[6])
    assert [ids[:4].tolist() for ids in inputs.page_indices] == [[7, 8, 0, 0], [5, 6, 0, 0]]
    assert [lens.tolist() for lens in inputs.last_page_lens] == [[2, 0, 0], [3, 0, 0]]
    tables.add_row([[8, 7], [9, 6, 5]], 1)
    inputs.fill(rows=[1], starts=[5], stops=[6])
    inputs.fill(rows=[1], starts=[5], stops=[6])
    assert [ids[:2].tolist() for ids in inputs.page_indices] == [[8, 7], [9, 6]]
    with pytest.raises(ArgumentError, match="token 8 in page 0 of group 0"):
        inputs.fill(rows=[1], starts=[8], stops=[9])


def test_slots_with_another_stride() -> None:
    batch = make_batch([FULL])
    batch.admit(0, range(6))
    inputs = make_inputs(batch, fields=["slots"], slot_strides=10)
    batch.inputs(rows=[0], starts=[0], stops=[6], out=inputs)
    first, second = batch.get_page_ids(0)[0]
    assert inputs.slots[0][:6].tolist() == [first * 10 + i for i in range(4)] + [second * 10, second * 10 + 1]


def test_states_have_no_slots() -> None:
    groups = [CacheGroupSpec(FULL), CacheGroupSpec(MambaSpec(1, ((2, 2),), "float32"), pool="states")]
    manager = CacheManager({"kv": 60, "states": 12}, groups, MAX_LEN)
    batch = RunningBatch(manager, MultiGroupPageTable(4, MAX_LEN, 64, [PAGE_SIZE, 1]))
    batch.admit(0, range(3))
    for strides in (8, (8, 1)):
        inputs = make_inputs(batch, fields=["slots"], slot_strides=strides)
        batch.inputs(rows=[0], starts=[0], stops=[3], out=inputs)
        assert inputs.slots[0][:3].tolist() == [8 * batch.get_page_ids(0)[0][0] + i for i in range(3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_token_has_a_slot_on_one_rank(num_ranks: int) -> None:
    batch = make_batch([FULL])
    batch.admit(0, range(30))
    inputs = [make_inputs(batch, fields=["rank_slots", "slots"], ranks=(rank, num_ranks)) for rank in range(num_ranks)]
    for each in inputs:
        batch.inputs(rows=[0], starts=[3], stops=[30], out=each)
    slots = np.stack([each.rank_slots[0][:27] for each in inputs])
    assert ((slots >= 0).sum(axis=0) == 1).all()
    tokens = np.arange(3, 30)
    own = slots[tokens % num_ranks, np.arange(27)]
    size = PAGE_SIZE // num_ranks
    assert (own // size == inputs[0].slots[0][:27] // PAGE_SIZE).all()
    assert (own % size == tokens % PAGE_SIZE // num_ranks).all()
    assert (inputs[0].rank_slots[0][27:] == -1).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 0}, ArgumentError, "num_pages: got 0"),
        ({"num_pages": (3, 3)}, ArgumentError, "num_pages: got 2, allowed: one for each of 1 groups"),
        ({"num_pages": "x"}, ArgumentTypeError, "num_pages: got"),
        ({"num_pages": 3, "fields": ["slots"]}, ArgumentError, "allowed without the field page_indices: None"),
        ({"slot_strides": 3, "fields": ["slots"]}, ArgumentError, "slot_strides: got 3, allowed: 4 to"),
        ({"slot_strides": 1.5, "fields": ["slots"]}, ArgumentTypeError, "slot_strides: got 1.5"),
        ({"fields": ["rank_slots"]}, ArgumentError, "ranks: got None"),
        ({"ranks": (0, 2)}, ArgumentError, r"ranks: got \(0, 2\)"),
        ({"fields": ["rank_slots"], "ranks": (2, 2)}, ArgumentError, "ranks: got 2"),
        ({"fields": ["rank_slots"], "ranks": (0, 3)}, ArgumentError, "ranks: got 3, allowed with pages of 4 tokens"),
        ({"fields": ["rank_slots"], "ranks": 5}, ArgumentTypeError, "ranks: got int"),
        ({"fields": ["rank_slots"], "ranks": (1, 2, 3)}, ArgumentError, r"ranks: got \(1, 2, 3\)"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = RunningBatch(CacheManager(40, [CacheGroupSpec(FULL)], MAX_LEN), PageTable(3, MAX_LEN // 4, 64))
    with pytest.raises(error, match=message):
        make_inputs(batch, **options)
