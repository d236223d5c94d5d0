"""What a trace costs: decode steps of 256 rows, with a `pagepool.trace.Recorder` and without one, in CPU time.

"plan, inputs, settle" is all that a step calls; "step" is the shortest call alone. The time of "recorded" includes the work of
the thread that writes the trace, which runs in no engine's way while the device computes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from bench.races.bench_step import FIELDS
from bench.races.race import TRACE, Race, Work
from bench.workload import PAGE_SIZE, make_group
from pagepool import CacheManager, PageTable, RunningBatch, StepInputs, specs

trace = pytest.importorskip("pagepool.trace")

NUM_ROWS, MAX_LEN, CONTEXT = 256, 4096, 512
NUM_CALLS, NUM_TURNS = 500, 10


class Steps:
    """Rows that decode, from the same length in each round."""

    def __init__(self, name: str, path: Path | None = None) -> None:
        self.name, self.rows = name, np.arange(NUM_ROWS, dtype=np.int32)
        self.manager = CacheManager(100_000, [make_group(specs)], MAX_LEN)
        self.batch = RunningBatch(self.manager, PageTable(NUM_ROWS, MAX_LEN // PAGE_SIZE, MAX_LEN))
        self.inputs = StepInputs(self.batch, num_tokens=NUM_ROWS, num_reqs=NUM_ROWS, fields=FIELDS)
        self.recorder = None if path is None else trace.Recorder(self.manager, path)
        self.prompts = [list(range(row, row + CONTEXT - row % PAGE_SIZE)) for row in range(NUM_ROWS)]

    def prepare(self) -> None:
        admitted = self.batch.is_admitted.nonzero()[0].astype(np.int32)
        self.batch.release(admitted)
        for row, prompt in enumerate(self.prompts):
            self.batch.admit(row, prompt)
        if self.name != "step":
            self.batch.append(self.rows, self.rows)
        self.wait()

    def run(self) -> None:
        batch, rows = self.batch, self.rows
        for _ in range(NUM_CALLS if self.name == "step" else 0):
            batch.step(rows, rows)
        for _ in range(0 if self.name == "step" else NUM_CALLS):
            step = batch.plan(rows)
            batch.inputs(step, out=self.inputs, num_tokens=NUM_ROWS, num_reqs=NUM_ROWS)
            batch.settle(step, rows)
        self.wait()

    def wait(self) -> None:
        """Wait until all is written."""
        while self.recorder is not None and self.recorder._writer.records:
            time.sleep(0.001)

    @property
    def page_ids(self) -> list[int]:
        return [len(self.batch.get_page_ids(row)[0]) for row in range(NUM_ROWS)]


@pytest.mark.parametrize("name", ["plan, inputs, settle", "step"])
def test_steps(race: Race, name: str, tmp_path: Path) -> None:
    contenders = {"recorded": Steps(name, tmp_path / "trace.json"), TRACE.ours: Steps(name)}
    race(contenders, Work(f"{name}, 256 rows", "step", NUM_CALLS, NUM_TURNS, suite=TRACE))
    recorder = contenders["recorded"].recorder
    assert recorder is not None
    recorder.close()
    assert recorder.num_dropped == 0
