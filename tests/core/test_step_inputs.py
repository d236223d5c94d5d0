"""The inputs of a step: compared array by array with plain Python, wrong arguments, and the memory of calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
from inputs_oracle import Group, Padding, RowTokens, list_inputs

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
    StepResult,
)
from pagepool._core import INPUT_FIELDS
from pagepool.errors import ArgumentError, ArgumentTypeError, RowIndexError

NUM_ROWS = 6
MAX_LEN = 96
NUM_TOKENS = 160
CANARY = -77
OF_OTHERS = (
    "write_pages",
    "write_starts",
    "write_indices",
    "write_tokens",
    "cross_page_ids",
    "encoder_lens",
    "prefix_page_ids",
    "prefix_rows",
    "own_starts",
)
PLAIN_FIELDS = [name for name in INPUT_FIELDS if name not in OF_OTHERS and not name.startswith("level_")]
BY_GROUP = (
    "slots",
    "page_ids",
    "state_pages",
    "rank_slots",
    "page_starts",
    "page_indices",
    "last_page_lens",
    "page_offsets",
)
FULL = FullAttentionSpec(page_size=4, num_kv_heads=1, head_size=1, dtype="float16", use_mla=False)
WINDOW = SlidingWindowSpec(page_size=6, num_kv_heads=1, head_size=1, dtype="float16", sliding_window=7, use_mla=False)
SINGLE = FullAttentionSpec(page_size=1, num_kv_heads=1, head_size=1, dtype="float16", use_mla=False)
STATE = MambaSpec(4, ((1, 1),), "float16")
MODELS = {"full": [FULL], "page size 1": [SINGLE], "window": [FULL, WINDOW], "state": [STATE, FULL]}


def make_batch(specs: list[Any], num_rows: int = NUM_ROWS, **options: Any) -> RunningBatch:
    groups = [CacheGroupSpec(spec) for spec in specs]
    manager = CacheManager(600, groups, MAX_LEN, enable_caching=False)
    tables = MultiGroupPageTable(num_rows, MAX_LEN, NUM_TOKENS, [spec.page_size for spec in specs])
    return RunningBatch(manager, tables if len(specs) > 1 else tables[0], **options)


class Checked:
    """Inputs whose arrays lie between canaries; each call is compared with the oracle, also what a call leaves."""

    def __init__(self, batch: RunningBatch, specs: list[Any], rng: Random) -> None:
        self.batch, self.rng = batch, rng
        self.page_sizes = [None if isinstance(spec, MambaSpec) else spec.page_size for spec in specs]
        self.widths = [table.max_num_pages_per_req for table in batch.group_tables]
        has_state = None in self.page_sizes
        num_ranks = rng.choice([2, 1]) if all(size is None or size % 2 == 0 for size in self.page_sizes) else 1
        self.ranks = rng.randrange(num_ranks), num_ranks
        strides = [rng.choice((size or 1 << 30, 16)) if size else 1 << 30 for size in self.page_sizes]
        windows = [getattr(spec, "sliding_window", 0) for spec in specs]
        capacities = [NUM_ROWS * width for width in self.widths]
        self.groups = [*map(Group, self.page_sizes, windows, capacities, strides)]
        self.fields = [name for name in PLAIN_FIELDS if has_state or name != "state_pages"]
        rng.shuffle(self.fields)
        self.dtypes = {name: rng.choice(["int32", "int64"]) for name in self.fields}
        self.depth = rng.choice([1, 2, 3])
        self.pads = rng.choice([(-1, -1), (0, 0), (5, -9)])
        self.buffers: list[np.ndarray] = []
        arrays = {name: self.make_arrays(name) for name in self.fields}
        self.inputs = StepInputs(
            batch,
            num_tokens=NUM_TOKENS,
            num_reqs=NUM_ROWS,
            fields=self.fields,
            dtypes=self.dtypes,
            pad_slot=self.pads[0],
            pad_last=self.pads[1],
            depth=self.depth,
            order="decodes",
            arrays=arrays,
            ranks=self.ranks,
            slot_strides=strides,
        )
        self.contents = [self.copy_set(arrays, i) for i in range(self.depth)]
        self.arrays = arrays
        self.num_calls = 0

    def make_array(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        buffer = np.full(int(np.prod(shape)) + 8, CANARY, dtype)
        self.buffers.append(buffer)
        return buffer[4:-4].reshape(shape)

    def make_arrays(self, name: str) -> Any:
        shape: tuple[int, ...] = (NUM_ROWS,)
        if name in ("token_ids", "positions", "rows", "slots", "rank_slots"):
            shape = (NUM_TOKENS,)
        elif name.endswith(("_loc", "page_starts")):
            shape = (NUM_ROWS + 1,)
        elif name == "distribution":
            shape = (3,)
        if name not in BY_GROUP:
            return [self.make_array(shape, self.dtypes[name]) for _ in range(self.depth)]
        wide = {"page_ids": lambda width: (NUM_ROWS, width), "page_indices": lambda width: (NUM_ROWS * width,)}
        return [
            [self.make_array(wide[name](width) if name in wide else shape, self.dtypes[name]) for _ in range(self.depth)]
            if (size is None) == (name == "state_pages")
            else None
            for size, width in zip(self.page_sizes, self.widths, strict=True)
        ]

    def copy_set(self, arrays: dict[str, Any], i: int) -> dict[str, Any]:
        return {
            name: [sets and sets[i].copy() for sets in arrays[name]] if name in BY_GROUP else arrays[name][i].copy()
            for name in arrays
        }

    def fill(
        self,
        spans: list[tuple[int, int, int]],
        known: list[list[int]],
        drafts: np.ndarray | None,
        **step: Any,
    ) -> None:
        """Call `inputs`, and compare all arrays of all sets."""
        num_needed = sum(stop - start for _, start, stop in spans)
        num_tokens = self.rng.choice([None, num_needed, self.rng.randint(num_needed, NUM_TOKENS)])
        num_reqs = self.rng.choice([None, len(spans), self.rng.randint(len(spans), NUM_ROWS)])
        got = self.batch.inputs(out=self.inputs, num_tokens=num_tokens, num_reqs=num_reqs, draft_token_ids=drafts, **step)
        assert got == num_needed
        rows = [
            RowTokens(row, start, stop, known[i], self.batch.get_page_ids(row), [] if drafts is None else drafts[i].tolist())
            for i, (row, start, stop) in enumerate(spans)
        ]
        padding = Padding(
            NUM_TOKENS if num_tokens is None else num_tokens, NUM_ROWS if num_reqs is None else num_reqs, *self.pads
        )
        expected = list_inputs(rows, self.groups, padding, True, self.ranks)
        content = self.contents[self.num_calls % self.depth]
        for name, values in expected.items():
            if name not in content:
                continue
            for mine, each in zip(content[name], values, strict=True) if name in BY_GROUP else [(content[name], values)]:
                if mine is not None:
                    mine[: len(each)] = each
        for g, mine in enumerate(content["page_ids"]):
            if mine is not None:
                mine[: padding.num_reqs] = 0
                for i, index in enumerate(expected["order"][: len(rows)]):
                    mine[i, : len(rows[index].pages[g])] = rows[index].pages[g]
        self.num_calls += 1
        self.compare()

    def compare(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:4] == CANARY).all()
            assert (buffer[-4:] == CANARY).all()
        for i in range(self.depth):
            for name, mine in self.copy_set(self.arrays, i).items():
                for a, b in (
                    zip(mine, self.contents[i][name], strict=True) if name in BY_GROUP else [(mine, self.contents[i][name])]
                ):
                    assert np.array_equal(a, b), (name, i, a, b)
        for name in self.fields:
            shown, kept = getattr(self.inputs, name), self.contents[self.inputs.current][name]
            for a, b in zip(shown, kept, strict=True) if name in BY_GROUP else [(shown, kept)]:
                assert np.array_equal(a, b)


class Requests:
    """Random requests in a batch, whose tokens the test knows."""

    def __init__(self, specs: list[Any], seed: int) -> None:
        self.rng = Random(seed)
        self.batch = make_batch(specs)
        self.known: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.checked = Checked(self.batch, specs, self.rng)

    def new_ids(self, n: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(n)]

    def admit(self) -> None:
        """Admit requests, some with a first chunk; their step is listed."""
        rows = [row for row in range(NUM_ROWS) if row not in self.known and self.rng.random() < 0.6]
        stops = []
        for row in rows:
            self.known[row] = self.new_ids(self.rng.randint(1, 20))
            stops.append(self.rng.choice([len(self.known[row]), self.rng.randint(1, len(self.known[row]))]))
            assert self.batch.admit(row, self.known[row], num_tokens=stops[-1]) == 0
            self.computed[row] = stops[-1]
        starts = [self.rng.randrange(stop) for stop in stops]  # as if the tokens before came from elsewhere
        spans = list(zip(rows, starts, stops, strict=True))
        dtype = self.rng.choice([np.int32, np.int64])
        self.checked.fill(
            spans,
            [self.known[row] for row in rows],
            None,
            rows=self.rng.choice([rows, np.array(rows, dtype)]),
            starts=np.array(starts, np.int32),
            stops=stops,
        )

    def pick(self) -> list[int]:
        rows = [row for row in self.known if len(self.known[row]) < MAX_LEN - 12]
        self.rng.shuffle(rows)
        return rows[: self.rng.randint(0, len(rows))]

    def fill(self, result: StepResult, rows: list[int], counts: list[int], ahead: list[int]) -> None:
        spans = []
        for row, count, more in zip(rows, counts, ahead, strict=True):
            stop = self.computed[row] + count
            if stop == len(self.known[row]):  # drafts follow all known tokens
                stop = min(MAX_LEN, stop + more)
            spans.append((row, self.computed[row], stop))
            self.computed[row] += count
        num_drafts = self.rng.choice([None, max(ahead, default=0), 4])
        drafts = None if num_drafts is None else np.array(self.new_ids(len(rows) * num_drafts), np.int32)
        assert result.num_grown == len(rows)
        self.checked.fill(
            spans,
            [self.known[row] for row in rows],
            None if drafts is None else drafts.reshape(len(rows), num_drafts),
            step=result,
        )

    def step(self) -> None:
        rows = [row for row in self.pick() if self.computed[row] == len(self.known[row])]
        ids = self.new_ids(len(rows))
        for row, token_id in zip(rows, ids, strict=True):
            self.known[row].append(token_id)
        self.fill(self.batch.step(rows, ids), rows, [1] * len(rows), [0] * len(rows))

    def plan(self) -> None:
        rows = self.pick()
        for row in rows:
            if self.computed[row] == len(self.known[row]):
                ids = self.new_ids(self.rng.randint(1, 3))
                self.batch.append([row] * len(ids), ids)
                self.known[row] += ids
        counts = [self.rng.randint(1, len(self.known[row]) - self.computed[row]) for row in rows]
        ahead = [self.rng.choice([0, 0, 1, 3]) for _ in rows]
        self.fill(self.batch.plan(rows, counts, ahead), rows, counts, ahead)

    def end(self) -> None:
        for row in [row for row in self.known if self.rng.random() < 0.3 or len(self.known[row]) > MAX_LEN - 24]:
            self.batch.release([row])
            del self.known[row], self.computed[row]

    def move(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.known]
        if free and self.known:
            source, target = self.rng.choice(list(self.known)), free[0]
            self.batch.move_row(source, target)
            self.known[target], self.computed[target] = self.known.pop(source), self.computed.pop(source)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("model", MODELS)
def test_arrays_are_those_of_the_oracle(model: str, seed: int) -> None:
    requests = Requests(MODELS[model], seed)
    calls = [requests.admit, requests.step, requests.step, requests.plan, requests.end, requests.move]
    try:
        for _ in range(40):
            requests.rng.choice(calls)()
    except AssertionError as error:
        raise AssertionError(f"call {requests.checked.num_calls}") from error
    requests.checked.compare()
    requests.batch.check()


def make_inputs(source: Any, fields: Iterable[str] = ("token_ids", "slots", "seq_lens"), **options: Any) -> StepInputs:
    return StepInputs(source, **{"num_tokens": 16, "num_reqs": 3, "fields": fields} | options)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_states_are_written_where_the_moves_say(is_ahead: bool) -> None:
    rng = Random(3)
    state = CacheGroupSpec(MambaSpec(1, ((4, 4),), "float32", checkpoint_interval=8), pool="states")
    manager = CacheManager({"kv": 300, "states": 80}, [CacheGroupSpec(FULL), state], MAX_LEN)
    tables = MultiGroupPageTable(NUM_ROWS, MAX_LEN, NUM_TOKENS, [4, 1])
    batch = RunningBatch(manager, tables, max_steps_ahead=int(is_ahead))
    fields = ["write_pages", "write_starts", "write_indices", "write_tokens", "rows", "positions", "query_start_loc"]
    inputs = make_inputs(batch, fields, num_tokens=NUM_TOKENS, num_reqs=NUM_ROWS)
    num_writes = 0
    for _ in range(60):
        step = batch.new_step()
        for row in range(NUM_ROWS):
            if not batch.is_admitted[row]:
                batch.admit(row, [rng.randrange(2) for _ in range(rng.randint(1, 30))], max_num_new_tokens=12, step=step)
        rows = [row for row in range(NUM_ROWS) if batch.is_admitted[row] and row not in step.rows]
        left = (batch.num_tokens - batch.num_computed_tokens)[rows]
        batch.plan(rows, [max(1, min(int(num), 9)) for num in left], step=step)
        moves = batch.take_moves()
        num_tokens = batch.inputs(step, out=inputs)
        expected = np.zeros(num_tokens, np.int32)
        for row, num, page in zip(moves.writes.rows, moves.writes.num_tokens, moves.writes.page_ids, strict=True):
            expected[(inputs.rows[:num_tokens] == row) & (inputs.positions[:num_tokens] == num - 1)] = page
        assert inputs.write_pages[1][:num_tokens].tolist() == expected.tolist()
        assert inputs.write_pages[0] is None
        [written] = expected.nonzero()
        starts = np.searchsorted(written, inputs.query_start_loc)
        padding = [0] * (len(inputs.write_indices[1]) - len(written))
        assert inputs.write_starts[1].tolist() == starts.tolist()
        assert inputs.write_indices[1].tolist() == [*expected[written], *padding]
        assert inputs.write_tokens[1].tolist() == [*written, *padding]
        num_writes += np.count_nonzero(expected)
        counts = [int(batch.num_computed_tokens[row] == batch.num_tokens[row]) for row in step.rows]
        batch.settle(step, [rng.randrange(2) for _ in range(sum(counts))], counts)
        batch.release([row for row in range(NUM_ROWS) if batch.num_tokens[row] > 40])
    assert num_writes > 20


def test_the_order_of_the_call_is_kept_unless_decodes_come_first() -> None:
    batch = make_batch([FULL])
    batch.admit(0, [1, 2, 3])
    batch.admit(2, [4])
    inputs = make_inputs(batch, ["token_ids", "order"])
    first = make_inputs(batch, ["token_ids", "order"], order="decodes")
    for out in (inputs, first):
        assert batch.inputs(rows=[0, 2], starts=[0, 0], stops=[3, 1], out=out) == 4
    assert (inputs.token_ids[:4].tolist(), inputs.order.tolist()) == ([1, 2, 3, 4], [0, 1, 0])
    assert (first.token_ids[:4].tolist(), first.order.tolist()) == ([4, 1, 2, 3], [1, 0, 0])


def test_a_step_ahead_has_the_tokens_behind_those_in_flight() -> None:
    batch = make_batch([FULL], max_steps_ahead=1)
    inputs = make_inputs(batch, ["token_ids", "positions", "seq_lens"])
    first = batch.new_step()
    batch.admit(0, [1, 2, 3], step=first)
    assert batch.inputs(batch.plan([0]), out=inputs) == 1  # the token that the prompt's step samples
    assert (inputs.token_ids[:2].tolist(), inputs.positions[0], inputs.seq_lens[0]) == ([-1, 0], 3, 4)
    batch.settle(first, [4])
    assert batch.inputs(batch.plan([0], 1, 1), out=inputs) == 2  # with a draft
    assert (inputs.token_ids[:3].tolist(), inputs.positions[:2].tolist(), inputs.seq_lens[0]) == ([-1, -1, 0], [4, 5], 6)


def test_an_engine_of_the_manager_has_its_own_tables_and_tokens() -> None:
    tables = MultiGroupPageTable(3, 24, 64, [4, 3])
    tables.add_row([[7, 8], [5, 6, 9]], 1)
    tokens = np.arange(3 * 24, dtype=np.int32).reshape(3, 24)
    inputs = make_inputs(tables, ["token_ids", "slots", "page_ids", "kv_start_loc"], token_ids=tokens)
    assert inputs.fill(rows=[1], starts=[2], stops=[6], num_tokens=5) == 4
    assert inputs.token_ids[:5].tolist() == [26, 27, 28, 29, 0]
    assert [slots[:5].tolist() for slots in inputs.slots] == [[30, 31, 32, 33, -1], [17, 18, 19, 20, -1]]
    assert inputs.page_ids[1][0].tolist() == [5, 6, 9, 0, 0, 0, 0, 0]
    assert inputs.kv_start_loc.tolist() == [0, 6, 6, 6]
    with pytest.raises(ArgumentError, match="token 8 in page 0 of group 0"):
        inputs.fill(rows=[1], starts=[2], stops=[9])
    with pytest.raises(ArgumentError, match="allowed without a batch"):
        make_inputs(tables)
    with pytest.raises(ArgumentError, match="token_ids: got 2 rows"):
        make_inputs(tables, token_ids=tokens[:2])
    with pytest.raises(ArgumentError, match="step: got one of another batch"):
        inputs.fill(make_batch([FULL]).plan([]))
    tables[0].page_table_cpu[1, 1] = 1 << 30
    with pytest.raises(ArgumentError, match="whose slots fit"):
        inputs.fill(rows=[1], starts=[2], stops=[6])


def test_int32_fields_are_packed_into_one_array() -> None:
    batch = make_batch([FULL, WINDOW])
    batch.admit(0, [1, 2, 3, 4, 5])
    fields = ["token_ids", "positions", "slots", "seq_lens"]
    inputs = make_inputs(batch, fields, packed=True, dtypes={"positions": np.int64}, depth=3)
    assert inputs.offsets == {"token_ids": 0, "slots": (16, 32), "seq_lens": 48}
    for _ in range(4):
        batch.inputs(rows=[0], starts=[0], stops=[5], out=inputs)
        assert (inputs.packed.shape, inputs.positions.dtype) == ((51,), np.int64)
        assert inputs.packed[:16].tolist() == inputs.token_ids.tolist() == [1, 2, 3, 4, 5, *[0] * 11]
        assert inputs.packed[32:48].tolist() == inputs.slots[1].tolist()
        assert inputs.packed[48:].tolist() == [5, 0, 0]
    pinned = np.empty((2, 51), np.int32)
    other = make_inputs(batch, fields, packed=True, dtypes={"positions": "int64"}, arrays={"packed": pinned})
    batch.inputs(rows=[0], starts=[0], stops=[5], out=other)
    assert pinned[0].tolist() == inputs.packed.tolist()
    assert not pinned[1].any()


def test_memory_of_others_is_written_in_place() -> None:
    """If NumPy gives it writable, which older versions do not."""
    batch = make_batch([FULL])
    batch.admit(0, [1, 2, 3])
    memory = np.full((2, 16), 9, np.int32)
    shared = np.from_dlpack(memory)
    if not shared.flags.writeable:
        with pytest.raises(ArgumentTypeError, match="not writable"):
            make_inputs(batch, arrays={"token_ids": shared})
        return
    inputs = make_inputs(batch, arrays={"token_ids": shared})
    batch.inputs(rows=[0], starts=[0], stops=[3], out=inputs)
    assert memory[0, :4].tolist() == [1, 2, 3, 0]
    assert not memory[1].any()


def test_wrong_calls_write_nothing() -> None:
    batch, other = make_batch([FULL, WINDOW]), make_batch([FULL, WINDOW])
    inputs, theirs = make_inputs(batch, num_tokens=24), make_inputs(other)
    for owner in (batch, other):
        first = owner.new_step()
        for row in range(3):
            owner.admit(row, list(range(10 + row)), step=first)
    few = {"rows": [0, 1], "starts": [9, 10], "stops": [10, 11]}
    batch.inputs(out=inputs, **few)
    kept = [
        inputs.current,
        inputs.token_ids.tolist(),
        inputs.slots[0].tolist(),
        inputs.slots[1].tolist(),
        inputs.seq_lens.tolist(),
    ]

    def refuse(error: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            batch.inputs(*args, **{"out": inputs} | options)
        now = [inputs.current, inputs.token_ids, *inputs.slots, inputs.seq_lens]
        assert [now[0], *(array.tolist() for array in now[1:])] == kept

    refuse(ArgumentTypeError, "out: got int, allowed: StepInputs", out=3)
    refuse(ArgumentError, "out: got inputs of other rows", out=theirs, **few)
    refuse(ArgumentTypeError, "rows: got NoneType")
    refuse(ArgumentTypeError, "step: got int, allowed: StepResult", 3)
    refuse(ArgumentError, "got both a step and these", batch.plan([]), **few)
    refuse(ArgumentError, "allowed: as many as rows, 1", rows=[0], starts=[0, 1], stops=[2])
    refuse(RowIndexError, r"row: got 6 \(at 1\), allowed: 0 to 5", rows=[0, 6], starts=[9, 9], stops=[10, 10])
    refuse(RowIndexError, r"row: got -1 \(at 0\)", rows=[-1], starts=[9], stops=[10])
    refuse(ArgumentError, r"row 4 \(at 1\): got a row that is not admitted", rows=[0, 4], starts=[9, 9], stops=[10, 10])
    refuse(ArgumentError, r"rows: got 1 twice \(the second at 2\)", rows=[1, 0, 1], starts=[9, 9, 9], stops=[10, 10, 10])
    refuse(ArgumentError, "got tokens 5 to 5, allowed: at least one", rows=[0], starts=[5], stops=[5])
    refuse(ArgumentError, "got tokens -1 to 5", rows=[0], starts=[-1], stops=[5])
    refuse(ArgumentError, "got tokens 9 to 97", rows=[0], starts=[9], stops=[97])
    refuse(ArgumentError, "token 12 in page 0 of group 0", rows=[0], starts=[9], stops=[13])
    refuse(ArgumentError, "tokens: got 33, allowed: 24", rows=[0, 1, 2], starts=[0, 0, 0], stops=[10, 11, 12])
    refuse(ArgumentError, "tokens: got 2, allowed: 1, which is num_tokens", num_tokens=1, **few)
    refuse(ArgumentError, "rows: got 2, allowed: 1, which is num_reqs", num_reqs=1, **few)
    refuse(ArgumentError, "num_tokens: got 25, allowed: 0 to 24", num_tokens=25, **few)
    refuse(ArgumentError, "num_reqs: got 4, allowed: 0 to 3", num_reqs=4, **few)
    refuse(ArgumentTypeError, "draft_token_ids: got list", draft_token_ids=[[1]], **few)
    refuse(ArgumentError, "draft_token_ids: got 1 rows, allowed: 2", draft_token_ids=np.zeros((1, 1), np.int32), **few)
    refuse(ArgumentError, "step: got one of another batch", other.step([0], [1]))

    batch.append([0, 1], [1, 2])
    ahead = batch.plan([0, 1], 1, [1, 2])
    refuse(
        ArgumentError,
        r"got 1 a row, allowed: at least the unknown tokens of row 1",
        ahead,
        draft_token_ids=np.zeros((2, 1), np.int32),
    )
    assert batch.settle(ahead, failed=True).tolist() == []
    refuse(ArgumentError, "step: got one that was settled already", ahead)
    batch.trim([0, 1], [10, 11])
    stale = batch.step([0, 1, 2], [1, 2, 3])
    batch.step([2], [4])
    refuse(ArgumentError, r"row 2 \(at 2\): got a row that was cut, moved or released since", stale)
    batch.swap_row(0, 1)
    refuse(ArgumentError, r"row 0 \(at 0\): got a row that was cut", stale)
    last = batch.step([1], [5])
    batch.release([1])
    refuse(ArgumentError, r"row 1 \(at 0\): got a row that was cut", last)
    batch.admit(1, list(range(12)))
    refuse(ArgumentError, r"row 1 \(at 0\): got a row that was cut", last)
    batch.step([1], [3])
    refuse(ArgumentError, r"row 1 \(at 0\): got a row that was cut", last)
    batch.release([2])
    batch.admit(2, list(range(5)), num_external_tokens=4)
    refuse(ArgumentError, r"row 2 \(at 0\): got a row .* waits for tokens", rows=[2], starts=[0], stops=[4])


def test_tokens_behind_a_window_have_no_slots() -> None:
    batch = make_batch([FULL, WINDOW])
    inputs = make_inputs(batch)
    batch.admit(0, list(range(40)), num_tokens=30)
    batch.plan([0], 10)
    with pytest.raises(ArgumentError, match="token 20 in page 0 of group 1"):
        batch.inputs(rows=[0], starts=[20], stops=[31], out=inputs)
    assert batch.inputs(rows=[0], starts=[30], stops=[40], out=inputs) == 10


WRONG = [
    ({"fields": ["token_ids", "slot"]}, ArgumentError, "fields: got 'slot', allowed: token_ids"),
    ({"fields": ["rows", "rows"]}, ArgumentError, "fields: got 'rows' twice"),
    ({"fields": 3}, ArgumentTypeError, "fields: got int"),
    ({"fields": ["state_pages"]}, ArgumentError, "no group of the model has"),
    ({"fields": ["distribution"]}, ArgumentError, "allowed with order='decodes' only"),
    ({"dtypes": {"rows": "int32"}}, ArgumentError, "dtypes: got 'rows', allowed: the chosen fields"),
    ({"dtypes": {"slots": "int8"}}, ArgumentTypeError, "dtypes: got 'int8' for slots"),
    ({"dtypes": {"slots": "no type"}}, ArgumentTypeError, "dtypes: got 'no type' for slots"),
    ({"num_tokens": 0}, ArgumentError, "num_tokens: got .*, allowed: (at least )?1"),
    ({"num_tokens": 1 << 31}, ArgumentError, "num_tokens"),
    ({"num_reqs": 0}, ArgumentError, "num_reqs: got .*, allowed: (at least )?1"),
    ({"depth": 0}, ArgumentError, "depth: got .*, allowed: (at least )?1"),
    ({"pad_slot": 1 << 31}, ArgumentError, "pad_slot"),
    ({"pad_last": "a"}, ArgumentTypeError, "pad_last"),
    ({"order": "prompts"}, ArgumentError, "order: got 'prompts', allowed: given, decodes or prefixes"),
    ({"token_ids": np.zeros((6, 96), np.int32)}, ArgumentError, "allowed with a batch, which has its own: None"),
    ({"arrays": {"rows": []}}, ArgumentError, "arrays: got 'rows', allowed: token_ids"),
    (
        {"arrays": {"token_ids": np.zeros((3, 16), np.int32)}},
        ArgumentError,
        "token_ids: got 3 arrays, allowed: one for each of 2",
    ),
    ({"arrays": {"token_ids": np.zeros((2, 15), np.int32)}}, ArgumentError, r"got an array of \(15,\), allowed: \(16,\)"),
    ({"arrays": {"token_ids": np.zeros((2, 16), np.int64)}}, ArgumentTypeError, "got an array of int64"),
    ({"arrays": {"token_ids": np.zeros((2, 32), np.int32)[:, ::2]}}, ArgumentTypeError, "not contiguous"),
    ({"arrays": {"token_ids": [np.zeros(16, np.int32)] * 2}}, ArgumentError, "arrays: got two that overlap"),
    ({"arrays": {"token_ids": [[0] * 16] * 2}}, ArgumentTypeError, "token_ids: got list, allowed: a NumPy array"),
    ({"arrays": {"slots": np.zeros((2, 2, 16), np.int32)}}, ArgumentError, "slots: got arrays of 2 groups, allowed: 1"),
    ({"packed": True, "dtypes": dict.fromkeys(["token_ids", "slots", "seq_lens"], "int64")}, ArgumentError, "packed: got True"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=[str(list(options)) for options, _, _ in WRONG])
def test_wrong_inputs_are_not_made(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_inputs(make_batch([FULL]), **options)


def test_inputs_need_rows_and_writable_arrays() -> None:
    array = np.zeros((2, 16), np.int32)
    array.flags.writeable = False
    batch = make_batch([FULL])
    with pytest.raises(ArgumentTypeError, match="not writable"):
        make_inputs(batch, arrays={"token_ids": array})
    with pytest.raises(ArgumentTypeError, match="source: got PageTable, allowed"):
        make_inputs(PageTable(2, 4, 8))
    with pytest.raises(ArgumentError, match="rows: got a field that was not chosen"):
        _ = make_inputs(batch).rows
    with pytest.raises(ArgumentError, match="inputs: got one whose constructor did not run"):
        StepInputs.__new__(StepInputs).fill(rows=[], starts=[], stops=[])


def test_more_keys_than_int32_are_refused() -> None:
    """Keys of rows whose length no memory has: those of tables."""
    tables = MultiGroupPageTable(3, 1 << 30, 8, [1 << 20])
    for row in range(3):
        tables.add_row([[1] * 1024], row)
    wide = make_inputs(tables, ["kv_start_loc"], dtypes={"kv_start_loc": "int64"})
    spans = {"rows": [0, 1, 2], "starts": [(1 << 30) - 1] * 3, "stops": [1 << 30] * 3}
    assert wide.fill(**spans) == 3
    assert wide.kv_start_loc.tolist() == [0, 1 << 30, 1 << 31, 3 << 30]
    with pytest.raises(ArgumentError, match="more keys than int32 can count"):
        make_inputs(tables, ["kv_start_loc"]).fill(**spans)


def test_calls_allocate_nothing() -> None:
    batch = make_batch([FULL])
    rows = np.arange(3, dtype=np.int32)
    for row in range(3):
        batch.admit(row, list(range(10)))
    inputs = make_inputs(batch, [name for name in PLAIN_FIELDS if name != "state_pages"], order="decodes", ranks=(0, 1))
    result = batch.step(rows, rows)
    drafts, starts, stops = np.zeros((3, 2), np.int32), rows + 4, rows + 6

    def call() -> None:
        batch.inputs(result, out=inputs, num_tokens=8, num_reqs=3, draft_token_ids=drafts)
        batch.inputs(rows=rows, starts=starts, stops=stops, out=inputs)

    for _ in range(10):
        call()
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            call()
        assert abs(sys.getallocatedblocks() - before) < 10
    finally:
        gc.enable()
