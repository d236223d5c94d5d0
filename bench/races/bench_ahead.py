"""Steps planned ahead, and pages cached once they are computed, beside `append` and `plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.races.race import AHEAD, Race, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group
from pagepool import CacheManager, PageTable, RunningBatch, StepResult, specs

MAX_LEN = 4096
NUM_STEPS = 5 * PAGE_SIZE
NUM_TURNS = 10


class Decoding:
    """Rows that decode one token a step, from prompts of different lengths."""

    def __init__(self, num_rows: int, max_steps_ahead: int = 0, **options: Any) -> None:
        manager = CacheManager(num_rows * MAX_LEN // PAGE_SIZE + 1, [make_group(specs)], MAX_LEN, **options)
        table = PageTable(num_rows, MAX_LEN // PAGE_SIZE, MAX_LEN)
        self.batch = RunningBatch(manager, table, max_steps_ahead=max_steps_ahead)
        rng = np.random.default_rng(SEED)
        self.rows = np.arange(num_rows, dtype=np.int32)
        self.prompts = [rng.integers(0, VOCABULARY, 500 + row % PAGE_SIZE).astype(np.int32) for row in range(num_rows)]
        self.token_ids = rng.integers(0, VOCABULARY, num_rows).astype(np.int32)
        self.page_ids: list[int] = []
        self.step: StepResult

    def prepare(self) -> None:
        """Begin anew, with one known token to compute in each row."""
        if self.batch.is_admitted[0]:
            self.batch.release(self.rows)
        for row, prompt in enumerate(self.prompts):
            self.batch.admit(row, prompt)
        self.batch.append(self.rows, self.token_ids)
        self.step = self.batch.plan(self.rows)

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.decode()
        self.page_ids = self.batch.num_tokens.tolist()

    def decode(self) -> None:
        self.batch.append(self.rows, self.token_ids)
        self.batch.plan(self.rows)


class Settling(Decoding):
    """Each step is settled before the next one is planned."""

    def decode(self) -> None:
        self.batch.settle(self.step, self.token_ids)
        self.step = self.batch.plan(self.rows)


class Ahead(Decoding):
    """Each step is planned before the one in flight is settled."""

    def decode(self) -> None:
        step = self.batch.plan(self.rows)
        self.batch.settle(self.step, self.token_ids)
        self.step = step


KINDS: dict[str, Callable[[int], Decoding]] = {
    "append, plan": Decoding,
    "plan, settle": Settling,
    "computed": lambda num_rows: Settling(num_rows, caches="computed"),
    AHEAD.ours: lambda num_rows: Ahead(num_rows, max_steps_ahead=1),
}


@pytest.mark.parametrize("num_rows", [256, 1024])
def test_steps_in_flight(race: Race, num_rows: int) -> None:
    work = Work(f"decode of {num_rows:,} rows", "step", NUM_STEPS, NUM_TURNS, suite=AHEAD)
    race({rival: kind(num_rows) for rival, kind in KINDS.items()}, work)
