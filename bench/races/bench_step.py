"""The inputs of a step: token ids, positions, slots, starts, lengths and last tokens, in int32.

"memcpy" copies as many bytes through NumPy. "lists" asks each request, appends to lists and makes arrays of them; "rows" writes
each row's part of NumPy arrays. Many engines do either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.races.race import INPUTS, Race, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, Int32Array, make_group
from pagepool import CacheManager, PageTable, RunningBatch, StepInputs, specs

MAX_LEN = 8192
MAX_NUM_ROWS = 256
FIELDS = ("token_ids", "positions", "slots", "query_start_loc", "seq_lens", "last_tokens")
NUM_TURNS = 10
NUM_CALLS = 20


class Inputs:
    """Rows, of which each computes its last tokens, and the arrays in which their inputs are wanted."""

    def __init__(self, lengths: list[int], num_new: int) -> None:
        self.manager = CacheManager(100_000, [make_group(specs)], MAX_LEN, enable_caching=False)
        self.table = PageTable(MAX_NUM_ROWS, MAX_LEN // PAGE_SIZE, MAX_LEN)
        self.batch = RunningBatch(self.manager, self.table)
        self.num_tokens = num_new * len(lengths)
        self.rows = np.arange(len(lengths), dtype=np.int32)
        self.tokens = np.zeros((MAX_NUM_ROWS, MAX_LEN), np.int32)
        rng = np.random.default_rng(SEED)
        for row, length in enumerate(lengths):
            self.tokens[row, :length] = rng.integers(0, VOCABULARY, length)
            self.batch.admit(row, self.tokens[row, :length], num_tokens=length - num_new)
        self.result = self.batch.plan(self.rows, num_new)
        self.spans = [(length - num_new, length) for length in lengths]
        self.inputs = StepInputs(self.batch, num_tokens=MAX_LEN, num_reqs=len(lengths), fields=FIELDS)
        self.fill()

    def fill(self) -> None:
        self.batch.inputs(self.result, out=self.inputs, num_tokens=self.num_tokens)

    def list_arrays(self) -> list[Int32Array]:
        inputs, n = self.inputs, self.num_tokens
        slots = inputs.slots[0]
        assert slots is not None
        by_token = [inputs.token_ids[:n], inputs.positions[:n], slots[:n]]
        return [*by_token, inputs.query_start_loc, inputs.seq_lens, inputs.last_tokens]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        for _ in range(NUM_CALLS):
            self.fill()

    @property
    def page_ids(self) -> list[int]:
        return np.concatenate(self.list_arrays()).tolist()


class Memcpy(Inputs):
    """As many bytes, copied."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.src = np.concatenate(self.list_arrays())
        self.dst = np.zeros_like(self.src)

    def fill(self) -> None:
        if hasattr(self, "dst"):
            self.dst[:] = self.src
        else:
            super().fill()

    def list_arrays(self) -> list[Int32Array]:
        return [self.dst] if hasattr(self, "dst") else super().list_arrays()


class Request:
    """A request that knows its tokens and pages, with properties as engines have them."""

    def __init__(self, token_ids: list[int], page_ids: list[int], num_computed_tokens: int) -> None:
        self.token_ids = token_ids
        self.page_ids = page_ids
        self.num_computed_tokens = num_computed_tokens

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_pages(self) -> int:
        return (len(self) + PAGE_SIZE - 1) // PAGE_SIZE

    @property
    def last_token(self) -> int:
        return self.token_ids[-1]

    @property
    def num_tokens_in_last_page(self) -> int:
        return len(self) - (self.num_pages - 1) * PAGE_SIZE


class Lists(Inputs):
    """Lists of all tokens, request by request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests = [
            Request(self.tokens[row, :stop].tolist(), self.batch.get_page_ids(row)[0], start)
            for row, (start, stop) in enumerate(self.spans)
        ]
        self.made: list[Int32Array] = []

    def run(self) -> None:
        for _ in range(NUM_CALLS):
            ids: list[int] = []
            positions: list[int] = []
            slots: list[int] = []
            begins, lengths, last = [0], [], []
            for request in self.requests:
                num_new = len(request) - request.num_computed_tokens
                if num_new == 1:
                    ids.append(request.last_token)
                    positions.append(len(request) - 1)
                    slots.append(request.page_ids[-1] * PAGE_SIZE + request.num_tokens_in_last_page - 1)
                else:
                    ids.extend(request.token_ids[request.num_computed_tokens : len(request)])
                    positions.extend(list(range(request.num_computed_tokens, len(request))))
                    for i in range(request.num_computed_tokens // PAGE_SIZE, request.num_pages):
                        start = request.page_ids[i] * PAGE_SIZE
                        stop = start + (PAGE_SIZE if i < request.num_pages - 1 else request.num_tokens_in_last_page)
                        slots.extend(list(range(start, stop)))
                begins.append(begins[-1] + num_new)
                lengths.append(len(request))
                last.append(begins[-1] - 1)
            self.made = [np.array(values, np.int32) for values in (ids, positions, slots, begins, lengths, last)]

    def list_arrays(self) -> list[Int32Array]:
        return self.made if hasattr(self, "made") else super().list_arrays()


class Rows(Inputs):
    """Parts of arrays, row by row."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made = [np.zeros_like(array) for array in self.list_arrays()]

    def run(self) -> None:
        tokens, table = self.tokens, self.table.page_table_cpu
        for _ in range(NUM_CALLS):
            ids, positions, slots, begins, lengths, last = self.made
            at = 0
            for row, (start, stop) in enumerate(self.spans):
                end = at + stop - start
                ids[at:end] = tokens[row, start:stop]
                positions[at:end] = np.arange(start, stop)
                part = positions[at:end]
                slots[at:end] = table[row, part // PAGE_SIZE] * PAGE_SIZE + part % PAGE_SIZE
                begins[row + 1] = at = end
                lengths[row] = stop
                last[row] = end - 1

    def list_arrays(self) -> list[Int32Array]:
        return self.made if hasattr(self, "made") else super().list_arrays()


LENGTHS: list[int] = np.random.default_rng(SEED).integers(500, 4000, MAX_NUM_ROWS).tolist()
WORKS: dict[str, tuple[list[int], int]] = {
    "decode of 256 rows": (LENGTHS, 1),
    "4 chunks of 2,048 tokens": ([PAGE_SIZE + 2048] * 4, 2048),
}


@pytest.mark.parametrize("name", WORKS)
def test_inputs(race: Race, name: str) -> None:
    kinds = {"memcpy": Memcpy, "lists": Lists, "rows": Rows, INPUTS.ours: Inputs}
    race({rival: kind(*WORKS[name]) for rival, kind in kinds.items()}, Work(name, "step", NUM_CALLS, NUM_TURNS, suite=INPUTS))
