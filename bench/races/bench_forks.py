"""Rows that go on in others (parallel samples, beams), and decode of a model whose layers keep states.

Pages of 16 tokens, prefix caching on. A row of 512 full pages and an open one goes on in 1, 4 or 16 others, and the copies that
are due are taken. "Admit" is what an engine without forks does, in a running batch: it admits the same tokens in each row, and
hits the full pages. Managers without `fork`, such as easydel's, admit too. Two sources take turns, since a row keeps the hashes
of its last request; targets are released untimed. The times of forks compare with a step of 1,024 rows in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pagepool
from bench.races.batch_rivals import MAX_MODEL_LEN, Batched, RequestByRequest, make_engines
from bench.races.bench_running_batch import CONTEXT_LEN, NUM_DECODE_TURNS, NUM_STEPS, Decode, num_decode_pages
from bench.races.race import BATCHED, FORKS, STATES, Race, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group

NUM_SHARED_PAGES = 512
NUM_TARGETS_A_ROUND = 16
NUM_TURNS = 20
SOURCES = (0, 1)
TARGETS = range(len(SOURCES), len(SOURCES) + NUM_TARGETS_A_ROUND)
NUM_PAGES = 4 * NUM_SHARED_PAGES

NUM_DECODE_ROWS = 1024
CHECKPOINT_INTERVAL = 1 << 14
"""Tokens: more than any row has by the end of a race."""


class GoingOn:
    """Rows 0 and 1 go on in rows 2 to 17 by turns, with so many targets a call. Subclasses say how."""

    def __init__(self, engine: Any, num_targets: int) -> None:
        self.engine = engine
        self.calls = [list(TARGETS[i : i + num_targets]) for i in range(0, NUM_TARGETS_A_ROUND, num_targets)]
        shape = len(SOURCES), NUM_SHARED_PAGES * PAGE_SIZE + PAGE_SIZE // 2
        self.prompts = np.random.default_rng(SEED).integers(0, VOCABULARY, shape, dtype=np.int32)
        for source in SOURCES:
            engine.admit(source, self.get_tokens(source))
        self.num_rounds = 0
        self.held: Sequence[int] = []

    def get_tokens(self, source: int) -> Any:
        """Return the tokens of a source in the form that the engine takes."""
        tokens = self.prompts[source]
        return tokens if self.engine.takes_arrays else tokens.tolist()

    def prepare(self) -> None:
        self.engine.release(self.held)
        self.source = SOURCES[self.num_rounds % len(SOURCES)]
        self.num_rounds += 1
        self.held = TARGETS

    @property
    def page_ids(self) -> list[int]:
        """The pages of all targets, in the order in which they were taken."""
        return [page_id for row in TARGETS for page_id in self.read_row(row)]

    def read_row(self, row: int) -> list[int]:
        return self.engine.batch.get_page_ids(row)[0]


class Forking(GoingOn):
    """By `RunningBatch.fork`."""

    def run(self) -> None:
        for targets in self.calls:
            self.engine.batch.fork(self.source, targets)
            self.copies = self.engine.batch.take_moves().copies


class Admitting(GoingOn):
    """By `RunningBatch.admit`."""

    def run(self) -> None:
        admit, tokens = self.engine.batch.admit, self.prompts[self.source]
        for targets in self.calls:
            for target in targets:
                admit(target, tokens)


class RequestGoingOn(GoingOn):
    """By a manager with requests: `fork` if it has that, else by its prefix cache. The rows of its table are filled."""

    def prepare(self) -> None:
        super().prepare()
        self.tokens = {row: self.get_tokens(self.source) for row in TARGETS}

    def run(self) -> None:
        go_on = self._fork if hasattr(self.engine.manager, "fork") else self.engine.admit
        for row, tokens in self.tokens.items():
            go_on(row, tokens)

    def _fork(self, row: int, tokens: Any) -> None:
        manager, source, request = self.engine.manager, self.engine.requests[self.source], self.engine.make_request(tokens)
        request.num_computed_tokens = source.num_computed_tokens
        manager.fork(source, request)
        self.copies = manager.take_moves().copies
        self.engine.table.add_row(manager.get_page_ids(request.request_id)[0], row)
        self.engine.requests[row] = request

    def read_row(self, row: int) -> list[int]:
        return list(self.engine.manager.get_page_ids(self.engine.requests[row].request_id)[0])


def make_contenders(num_targets: int) -> dict[str, GoingOn]:
    """Make contenders in the order of the table, ours last."""
    engines = make_engines(NUM_PAGES, len(SOURCES) + NUM_TARGETS_A_ROUND, ["easydel", "oracle"])
    by_request = {name: engine for name, engine in engines.items() if isinstance(engine, RequestByRequest)}
    return {
        **{name: RequestGoingOn(by_request[name], num_targets) for name in FORKS.rivals if name in by_request},
        "admit": Admitting(Batched(NUM_PAGES, len(SOURCES) + NUM_TARGETS_A_ROUND), num_targets),
        "fork": Forking(engines["batched"], num_targets),
    }


@pytest.mark.parametrize("num_targets", [1, 4, 16])
def test_forks(race: Race, num_targets: int) -> None:
    name = f"{NUM_SHARED_PAGES} pages go on in {num_targets} rows"
    race(make_contenders(num_targets), Work(name, "target", NUM_TARGETS_A_ROUND, NUM_TURNS, 4, suite=FORKS))


class Hybrid(Batched):
    """A running batch of a model with attention, and with states, which are kept where requests resume, or never."""

    def __init__(self, num_pages: int, num_rows: int, checkpoint_interval: int | None) -> None:
        state = pagepool.MambaSpec(PAGE_SIZE, ((1, 1),), "float32", checkpoint_interval=checkpoint_interval)
        groups = [make_group(pagepool), pagepool.CacheGroupSpec(state)]
        self.num_pages = num_pages
        self.manager = pagepool.CacheManager(num_pages, groups, MAX_MODEL_LEN)
        self.table = pagepool.MultiGroupPageTable(num_rows, MAX_MODEL_LEN, MAX_MODEL_LEN, [PAGE_SIZE] * len(groups))
        self.batch = pagepool.RunningBatch(self.manager, self.table)
        self.release = self.batch.release

    def admit(self, row: int, tokens: Any) -> None:
        self.batch.admit(row, tokens)


def test_decode_with_states(race: Race) -> None:
    """No copies are due."""
    num_pages = num_decode_pages(NUM_DECODE_ROWS, CONTEXT_LEN, NUM_DECODE_TURNS) + NUM_DECODE_ROWS
    intervals = {"no interval": None, "checkpoints": CHECKPOINT_INTERVAL}
    contenders = {
        name: Decode(Hybrid(num_pages, NUM_DECODE_ROWS, interval), NUM_DECODE_ROWS, CONTEXT_LEN)
        for name, interval in intervals.items()
    }
    name = f"decode with states: {NUM_DECODE_ROWS} rows, context {CONTEXT_LEN}"
    race(contenders, Work(name, "row", NUM_DECODE_ROWS * NUM_STEPS, NUM_DECODE_TURNS, suite=STATES))


def test_forks_beside_a_step(race: Race, remark: Callable[[str], None]) -> None:
    """The remark compares the forks that were timed in this run with a step of a model without states."""
    engine = Batched(num_decode_pages(NUM_DECODE_ROWS, CONTEXT_LEN, NUM_DECODE_TURNS), NUM_DECODE_ROWS)
    work = Work("decode beside forks", "row", NUM_DECODE_ROWS * NUM_STEPS, NUM_DECODE_TURNS, suite=BATCHED)
    race({BATCHED.ours: Decode(engine, NUM_DECODE_ROWS, CONTEXT_LEN)}, work)
    if race.results:
        step = race.results.pop().ours * NUM_DECODE_ROWS / 1000
        forks = [result for result in race.results if result.work.suite == FORKS]
        shown = [f"{result.work.name}: {result.ours:.2f} us a target ({result.ours / step:.2f} of it)" for result in forks]
        remark("; ".join([f"A step of {NUM_DECODE_ROWS:,} rows: {step:.1f} us", *shown]))
