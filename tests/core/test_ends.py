"""Rows that end with a step: at a stop token or at their limit, told once, without the tokens behind."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    PageTable,
    RunningBatch,
    SlidingWindowSpec,
    StepInputs,
    StepResult,
)
from pagepool.errors import ArgumentError, ArgumentTypeError, RowIndexError

NUM_ROWS, MAX_LEN = 5, 40
COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float16", "use_mla": False}
FULL, WINDOW = FullAttentionSpec(4, **COMMON), SlidingWindowSpec(4, **COMMON, sliding_window=9)


def make_batch(depth: int = 0, spec: Any = FULL, **options: Any) -> RunningBatch:
    manager = CacheManager(200, [CacheGroupSpec(spec)], MAX_LEN, **options)
    return RunningBatch(manager, PageTable(NUM_ROWS, MAX_LEN // 4, 64), max_steps_ahead=depth)


class Engine:
    """An engine of rows whose samples, drafts and acceptances are drawn; the model of each row is a list of tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.depth = rng.choice((0, 1, 2))
        self.batch = make_batch(self.depth, rng.choice((FULL, WINDOW)), caches=rng.choice(("scheduled", "computed")))
        self.is_by_row = rng.random() < 0.5
        self.stops = np.full((NUM_ROWS, 2), -1, np.int32)
        self.limits = np.full(NUM_ROWS, MAX_LEN, np.int32)
        self.tokens: dict[int, list[int]] = {}  # by stay
        self.ended: dict[int, bool] = {}  # by stay: whether it stopped
        self.steps: list[tuple[StepResult, list[int], list[int], list[int]]] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.launch()
            while len(self.steps) > self.depth:
                self.settle()
            self.change()
            self.batch.check()

    def launch(self) -> None:
        batch, rng, step = self.batch, self.rng, self.batch.new_step()
        for row in [row for row in range(NUM_ROWS) if not batch.is_admitted[row] and rng.random() < 0.5]:
            prompt = [rng.randrange(6) for _ in range(rng.randint(1, 12))]
            self.limits[row] = rng.choice((MAX_LEN, len(prompt) + rng.randint(1, 8)))
            self.stops[row] = rng.choice(([-1, -1], [1, -1], [2, 3], [-1, 5]))
            batch.admit(row, prompt, max_num_new_tokens=rng.choice((None, 3)), step=step)
            self.tokens[int(batch.stays[row])] = list(prompt)
        rows = [row for row in range(NUM_ROWS) if batch.is_admitted[row] and row not in step.rows.tolist()]
        rows = [row for row in rows if int(batch.stays[row]) not in self.ended and rng.random() < 0.9]
        planned = batch.num_computed_tokens + batch.num_ahead_tokens
        rows = [row for row in rows if planned[row] < MAX_LEN - 6]
        num_drafts = [rng.choice((0, 0, 1, 3)) for _ in rows]
        left = [int(batch.num_tokens[row] - planned[row]) for row in rows]
        batch.plan(rows, [max(1, num) for num in left], num_drafts, step=step)
        drafts = dict(zip(rows, num_drafts, strict=True))
        stepped = step.rows.tolist()
        samples = [int(batch.num_computed_tokens[row] >= batch.num_tokens[row]) for row in stepped]
        most = [(1 + drafts.get(row, 0)) * is_sampled for row, is_sampled in zip(stepped, samples, strict=True)]
        self.steps.append((step, stepped, most, [int(batch.stays[row]) for row in stepped]))

    def settle(self) -> None:
        (step, _, most, stays), rng, batch = self.steps.pop(0), self.rng, self.batch
        if len(step) and rng.random() < 0.1:
            batch.settle(step, failed=True)
            self.steps.clear()
            return
        counts = [rng.randint(1, num) if num else 0 for num in most]
        token_ids = [[rng.randrange(6) for _ in range(num)] for num in counts]
        rules: dict[str, Any] = {"stop_token_ids": [1], "max_num_tokens": 30}
        if self.is_by_row:
            rules = {"stop_token_ids": self.stops, "max_num_tokens": self.limits}
        now = {int(batch.stays[row]): row for row in range(NUM_ROWS) if batch.is_admitted[row]}
        expected = []
        for stay, ids in zip(stays, token_ids, strict=True):
            if stay in now and stay not in self.ended:
                stops = {1} if not self.is_by_row else {*self.stops[now[stay]].tolist()} - {-1}
                limit = min(30 if not self.is_by_row else int(self.limits[now[stay]]), MAX_LEN)
                for token_id in ids:
                    self.tokens[stay].append(token_id)
                    if token_id in stops or len(self.tokens[stay]) >= limit:
                        self.ended[stay] = token_id in stops
                        expected.append((now[stay], self.ended[stay]))
                        break
        batch.settle(step, [token_id for ids in token_ids for token_id in ids], counts, **rules)
        assert [*zip(step.ended_rows.tolist(), step.has_stopped.tolist(), strict=True)] == expected
        for stay, row in now.items():
            assert batch.num_tokens[row] == len(self.tokens[stay])
            start = rng.randint(0, len(self.tokens[stay]))
            assert batch.get_token_ids(row, start).tolist() == self.tokens[stay][start:]
        if rng.random() < 0.7:
            batch.release(step.ended_rows)

    def change(self) -> None:
        batch, rng = self.batch, self.rng
        for row in [row for row in range(NUM_ROWS) if batch.is_admitted[row]]:
            if rng.random() < 0.1 or (int(batch.stays[row]) in self.ended and rng.random() < 0.5):
                batch.release([row])
        if rng.random() < 0.3:
            src, tgt = rng.sample(range(NUM_ROWS), 2)
            batch.swap_row(src, tgt)
            for values in (self.stops, self.limits):
                values[[src, tgt]] = values[[tgt, src]]


@pytest.mark.parametrize("seed", range(12))
def test_rows_end_once_and_take_their_last_token(seed: int) -> None:
    engine = Engine(seed)
    engine.run(150)
    assert len(engine.ended) > 20


def test_an_engine_releases_the_rows_that_ended() -> None:
    batch = make_batch()
    step = batch.new_step()
    for row in range(3):
        batch.admit(row, [1, 2, 3], step=step)
    assert (step.ended_rows, step.has_stopped) == (None, None)
    batch.settle(step, [9, 5, 7], stop_token_ids=[9, 8], max_num_tokens=[4, 4, 5, 5, 5])
    assert (step.ended_rows.tolist(), step.has_stopped.tolist()) == ([0, 1], [True, False])
    assert batch.num_tokens.tolist() == [4, 4, 4, 0, 0]
    batch.release(step.ended_rows)
    assert batch.is_admitted.tolist() == [False, False, True, False, False]
    step = batch.plan([2])
    batch.settle(step, [6])
    assert step.ended_rows is None


def test_rejected_drafts_end_nothing_and_tokens_behind_the_end_are_dropped() -> None:
    batch = make_batch()
    step = batch.new_step()
    batch.admit(0, [1, 2, 3], step=step)
    batch.settle(step, [4], stop_token_ids=[9])
    step = batch.plan([0], 1, 3)
    batch.settle(step, [5, 6], [2], stop_token_ids=[9])  # the stop token was among the rejected drafts
    assert step.ended_rows.tolist() == []
    step = batch.plan([0], 1, 3)
    batch.settle(step, [7, 9, 8], [3], stop_token_ids=[9])
    assert (step.ended_rows.tolist(), int(batch.num_tokens[0])) == ([0], 8)
    batch.check()


def test_tokens_of_later_steps_are_dropped() -> None:
    batch = make_batch(1)
    first = batch.new_step()
    batch.admit(0, [1, 2, 3], step=first)
    second = batch.plan([0])
    assert batch.settle(first, [9], stop_token_ids=[9]).tolist() == [0]
    assert batch.settle(second, [9], stop_token_ids=[9]).tolist() == [-1]
    assert (first.ended_rows.tolist(), second.ended_rows.tolist()) == ([0], [])
    assert batch.num_tokens[0] == 4
    batch.check()


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_row_that_ended_can_only_be_released(num_ahead: int) -> None:
    """Later steps may have changed its states with tokens that the host never knows."""
    batch = make_batch(num_ahead)
    first = batch.new_step()
    batch.admit(0, [1, 2, 3], step=first)
    later = [batch.plan([0], num_drafts=1) for _ in range(num_ahead)]
    batch.settle(first, [9], stop_token_ids=[9])
    calls: list[Callable[[], Any]] = [
        lambda: batch.append([0], [5]),
        lambda: batch.plan([0]),
        lambda: batch.step([0], [5]),
        lambda: batch.fork(0, [1]),
        lambda: batch.trim([0], [2]),
    ]
    for _ in range(2):
        for call in calls:
            with refused(lambda: batch.num_tokens.tolist(), ArgumentError, "row 0.*: got a row that has ended"):
                call()
        batch.check()
        batch.settle(later.pop(0), [5]) if later else None
    batch.swap_row(0, 2)
    with pytest.raises(ArgumentError, match=r"row 2.*: got a row that has ended"):
        batch.append([2], [5])
    for step in later:
        batch.settle(step, [5])
    batch.release([2])
    batch.admit(2, [1, 2, 3])
    batch.append([2], [5])
    batch.check()


def test_inputs_of_a_later_step_have_rows_that_ended() -> None:
    batch = make_batch(1)
    inputs = StepInputs(batch, num_tokens=8, num_reqs=5, fields=["token_ids", "positions", "sources"], depth=3)
    first = batch.new_step()
    for row in (0, 1):
        batch.admit(row, [1, 2, 3 + row], step=first)
    batch.inputs(first, out=inputs)
    second = batch.plan([0, 1])
    batch.settle(first, [9, 7], stop_token_ids=[9])
    assert batch.inputs(second, out=inputs) == 2
    assert inputs.token_ids[:2].tolist() == [9, 7]
    batch.settle(second, [5, 6])
    assert batch.get_token_ids(1).tolist() == [1, 2, 4, 7, 6]


def test_a_full_row_ends_with_any_rule() -> None:
    batch = make_batch()
    step = batch.new_step()
    batch.admit(0, range(MAX_LEN - 1), step=step)
    batch.settle(step, [99], stop_token_ids=[100])
    assert (step.ended_rows.tolist(), step.has_stopped.tolist()) == ([0], [False])


def test_tokens_of_a_row() -> None:
    batch = make_batch()
    batch.admit(1, [5, 6, 7])
    batch.append([1], [8])
    assert batch.get_token_ids(1).tolist() == [5, 6, 7, 8]
    assert batch.get_token_ids(1, 4).tolist() == []
    for row, start in ((0, 0), (1, 5)):
        with pytest.raises(ArgumentError, match=f"row {row}: got one with {4 * row} tokens"):
            batch.get_token_ids(row, start)
    with pytest.raises(RowIndexError):
        batch.get_token_ids(NUM_ROWS)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"stop_token_ids": 5}, ArgumentTypeError, "stop_token_ids: got int"),
        ({"stop_token_ids": [1.5]}, ArgumentTypeError, "stop_token_ids"),
        ({"stop_token_ids": np.zeros((4, 1), np.int32)}, ArgumentError, "stop_token_ids: got 4 rows, allowed: 5"),
        ({"stop_token_ids": np.zeros((5, 1))}, ArgumentTypeError, "stop_token_ids: got"),
        ({"max_num_tokens": 0}, ArgumentError, r"max_num_tokens: got 0 \(at 0\), allowed: at least 1"),
        ({"max_num_tokens": [9, 9]}, ArgumentError, "max_num_tokens: got 2"),
        ({"max_num_tokens": "x"}, ArgumentTypeError, "max_num_tokens"),
        ({"failed": True, "max_num_tokens": 9}, ArgumentError, "got some of a failed step"),
    ],
)
def test_wrong_rules(rules: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = make_batch()
    step = batch.new_step()
    batch.admit(0, [1, 2, 3], step=step)
    with refused(lambda: batch.num_tokens.tolist(), error, message):
        batch.settle(step, **({} if "failed" in rules else {"token_ids": [4]}), **rules)
    batch.settle(step, [4])
