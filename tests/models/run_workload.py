"""Random calls of a `RunningBatch` beside `run_model.py`: after each call both have refused it, or have the same counts, pages,
writes of states and hits, and have released the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any, NamedTuple

from run_model import FREE, PENDING, Run, fail
from run_prefix import Group, Index, Refused, Rules

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    FullAttentionSpec,
    MambaSpec,
    MultiGroupPageTable,
    PageHashing,
    RequestTraits,
    Retention,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool._core import copy_records
from pagepool.errors import ArgumentError, MovesDueError, RowOverflowError

NUM_ROWS = 5
PROBED = NUM_ROWS - 1  # this row stays free
MAX_LEN, LONGEST_PROMPT, LONGEST_ANSWER = 128, 100, 120
REFUSALS = (ArgumentError, MovesDueError, RowOverflowError)
CALLS = ["plan", "plan", "plan", "settle", "settle", "settle", "step", "append", "trim", "fork", "fail", "release", "preempt"]


class Setting(NamedTuple):
    """What a batch is made for."""

    layout: str  # "full", "window" or "state"
    hash_lookahead: int
    caches: str
    max_steps_ahead: int


SETTINGS = [
    Setting(*setting) for setting in product(("full", "window", "state"), (0, 1, 2), ("scheduled", "computed"), (0, 1, 2, 3))
]


class Planned(NamedTuple):
    """A step of one row, in both."""

    step: Any
    number: int
    run: Run
    stay: object


def make_both(setting: Setting) -> tuple[CacheManager, RunningBatch, Rules]:
    """Return a manager and its batch, and the rules of the model."""
    attention = FullAttentionSpec(4, 2, 8, "bfloat16", use_mla=False)
    others = {
        "window": (SlidingWindowSpec(4, 2, 8, "bfloat16", use_mla=False, sliding_window=7), Group("window", 4, 7)),
        "state": (MambaSpec(4, ((4, 4),), "float32", checkpoint_interval=8), Group("state")),
    }
    groups, rules = [CacheGroupSpec(attention)], [Group()]
    if setting.layout in others:
        spec, rule = others[setting.layout]
        groups.append(CacheGroupSpec(spec, pool="states") if setting.layout == "state" else CacheGroupSpec(spec))
        rules.append(rule)
    hashing = PageHashing(hash_seed="run", use_eagle=setting.hash_lookahead > 0, hash_lookahead=setting.hash_lookahead)
    num_pages = {"kv": 4000, "states": 2000} if setting.layout == "state" else 4000
    manager = CacheManager(
        num_pages,
        groups,
        MAX_LEN,
        caches=setting.caches,
        hashing=hashing,
        retention=Retention(windows="all") if setting.layout == "window" else None,
    )
    tables = MultiGroupPageTable(NUM_ROWS, MAX_LEN, MAX_LEN, page_sizes=[4] * len(groups))
    batch = RunningBatch(manager, tables, max_steps_ahead=setting.max_steps_ahead)
    return manager, batch, Rules(tuple(rules), *setting[1:], 8, MAX_LEN)


class Runs:
    """Rows of a batch, and their runs."""

    def __init__(self, setting: Setting, seed: int, calls: list[str] = CALLS) -> None:
        self.setting, self.rng, self.calls = setting, Random(f"{setting} {seed}"), calls
        self.manager, self.batch, self.rules = make_both(setting)
        self.index = Index(self.rules)
        self.runs = [Run(self.index) for _ in range(NUM_ROWS)]
        self.steps: list[Planned] = []  # in flight
        self.num_steps = 0
        self.prompts = [self.tokens(LONGEST_PROMPT) for _ in range(2)]
        self.log: list[str] = []

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(1, 4) for _ in range(n)]

    def prompt(self) -> list[int]:
        tokens = self.rng.choice(self.prompts)[: self.rng.choice((self.rng.randrange(1, 30), self.rng.randrange(1, 90)))]
        return tokens + self.tokens(self.rng.randrange(1, 6)) if self.rng.random() < 0.5 else tokens

    def drafts(self) -> int:
        return self.rng.choice((0, 0, 1, 2, 3))

    def both(self, name: str, call: Callable[[], Any], modelled: Callable[[], Any]) -> bool:
        """Call both, which return the same, or refuse both. Return whether they did the work."""
        self.log.append(name)
        answer, refusal, expected, expected_refusal = None, None, None, None
        try:
            answer = call()
        except REFUSALS as error:
            refusal = error
        try:
            expected = modelled()
        except Refused as error:
            expected_refusal = error
        assert (refusal is None) == (expected_refusal is None), f"{name}: got {refusal!r}, expected {expected_refusal!r}"
        assert answer == expected, f"{name}: got {answer}, expected {expected}"
        return refusal is None

    def launch(self, name: str, row: int, call: Callable[[Any], Any], modelled: Callable[[int], Any]) -> None:
        """Call both with a new step."""
        run, step = self.runs[row], self.batch.new_step()
        self.num_steps += 1
        number = self.num_steps
        if self.both(f"{name} as step {number}", lambda: call(step), lambda: modelled(number)) and run.state != PENDING:
            self.steps.append(Planned(step, number, run, run.stay))

    # calls

    def act(self) -> None:
        """Do a random call for a random row, and compare."""
        row = self.rng.randrange(PROBED)
        run, name = self.runs[row], self.rng.choice(self.calls)
        if run.state == FREE:
            self.admit(row)
        elif run.state == PENDING:
            self.end_external(row)
        else:
            getattr(self, name)(row, run)
        self.compare()

    def admit(self, row: int) -> None:
        tokens, run, rng = self.prompt(), self.runs[row], self.rng
        options: dict[str, Any] = {}
        modelled: dict[str, Any] = {}
        if rng.random() < 0.3:
            options["num_external_tokens"] = modelled["external"] = rng.randrange(1, 40)
        else:
            options["max_num_new_tokens"] = modelled["most"] = rng.choice((LONGEST_PROMPT, rng.randrange(1, 24)))
            options["num_drafts"] = modelled["drafts"] = self.drafts()
        if self.setting.layout == "state" and rng.random() < 0.3:
            modelled["resume_at"] = [rng.randrange(1, 60)]
            options["traits"] = RequestTraits(resume_at=modelled["resume_at"])
        self.launch(
            f"admit to row {row}: {tokens}, {options}",
            row,
            lambda step: self.batch.admit(row, tokens, step=step, **options),
            lambda number: run.admit(tokens, step=number, **modelled),
        )

    def end_external(self, row: int) -> None:
        run = self.runs[row]
        n = run.planned - run.ring[0].before
        n = n if self.rng.random() < 0.6 else self.rng.randrange(n + 1)
        if self.rng.random() < 0.1:
            self.release(row, run)
        elif self.rng.random() < 0.6:
            self.both(f"commit {n} of row {row}", lambda: self.batch.commit_external(row, n), lambda: run.commit(n))
        else:
            self.both(
                f"fail after {n} of row {row}",
                lambda: self.batch.fail_external(row, n),
                lambda: run.commit(n, is_failed=True) or run.planned,
            )

    def plan(self, row: int, run: Run) -> None:
        n, drafts = self.rng.randrange(1, 12), self.drafts()
        if run.known > run.planned:
            n = min(n, run.known - run.planned)
        self.launch(
            f"plan row {row}: {n} tokens, {drafts} drafts",
            row,
            lambda step: self.batch.plan([row], n, drafts, step=step) and None,
            lambda number: run.plan(n, drafts, number),
        )

    def step(self, row: int, run: Run) -> None:
        [token] = self.tokens(1)
        if run.known < LONGEST_ANSWER:
            self.launch(
                f"step row {row}: {token}",
                row,
                lambda step: self.batch.step([row], [token], step=step) and None,
                lambda number: run.step(token, number),
            )

    def settle(self, row: int, run: Run) -> None:
        if not self.steps:
            return
        step = self.steps[0] if self.rng.random() < 0.8 else self.rng.choice(self.steps)
        launch = next((launch for launch in step.run.ring if launch.step == step.number), None)
        if step.run.stay is not step.stay:
            launch = None
        most = launch.drafts + 1 if launch is not None and launch.samples and not launch.told else 0
        count = self.rng.randrange(most + 1) if self.rng.random() < 0.3 else min(most, self.rng.choice((1, most)))
        tokens = self.tokens(count if step.run.known + count <= LONGEST_ANSWER else 0)
        if self.both(
            f"settle step {step.number}: {tokens}",
            lambda: self.batch.settle(step.step, tokens, [len(tokens)]).tolist()[0] >= 0,
            lambda: launch is not None and step.run.settle(step.number, tokens),
        ):
            self.steps.remove(step)
            self.index.made.pop(step.number, None)

    def append(self, row: int, run: Run) -> None:
        [token] = self.tokens(1)
        if run.known < LONGEST_ANSWER:
            self.both(f"append {token} to row {row}", lambda: self.batch.append([row], [token]), lambda: run.append(token))

    def trim(self, row: int, run: Run) -> None:
        n = self.rng.randrange(max(0, run.known - 6), run.known + 1)
        self.both(f"trim row {row} to {n}", lambda: self.batch.trim([row], [n]), lambda: run.trim(n))

    def fork(self, row: int, run: Run) -> None:
        free = [other for other in range(PROBED) if self.runs[other].state == FREE]
        if free:
            self.both(f"fork {row} to {free[0]}", lambda: self.batch.fork(row, free[:1]), lambda: run.fork(self.runs[free[0]]))

    def fail(self, row: int, run: Run) -> None:
        may_fail = [step for step in self.steps if step.number > self.index.last_ended]  # steps run in order
        if not may_fail:
            return
        first = self.rng.choice(may_fail[-3:])
        self.both(
            f"fail step {first.number}",
            lambda: self.batch.settle(first.step, failed=True).tolist(),
            lambda: sorted(self.runs.index(lost) for lost in fail(self.runs, first.number)),
        )
        self.steps = [step for step in self.steps if step.number < first.number]

    def release(self, row: int, run: Run) -> None:
        self.both(f"release row {row}", lambda: self.batch.release([row]), run.release)

    def preempt(self, row: int, run: Run) -> None:
        tokens, most = list(run.tokens), self.rng.randrange(1, 30)
        if not tokens:
            return
        self.release(row, run)
        self.launch(
            f"admit again to row {row}, at most {most}",
            row,
            lambda step: self.batch.admit(row, tokens, step=step, max_num_new_tokens=most),
            lambda number: run.admit(tokens, step=number, most=most),
        )

    # comparison

    def writes_answers(self) -> bool:
        """Whether the pool has learned to write states at the ends of answers, which the model lacks."""
        [answers] = copy_records(self.manager.pools["kv"].store, "answers_1")["answers_1"] if self.rules.has_state else [None]
        return answers is not None and answers["num_gained"] > answers["num_spared"] + 1

    def compare(self) -> None:
        """Compare everything that can be seen."""
        batch = self.batch
        writes = batch.take_moves().writes
        expected = [(row, write.end, write.group) for row, run in enumerate(self.runs) for write in run.take_writes()]
        columns = [column.tolist() for column in (writes.rows, writes.num_tokens, writes.group)]
        assert sorted(zip(*columns, strict=True)) == sorted(expected), f"writes {columns}, expected {expected}"
        for row, run in enumerate(self.runs):
            assert bool(batch.is_admitted[row]) == (run.state != FREE), f"row {row}"
            if run.state == FREE:
                continue
            run.check()
            arrays = batch.num_tokens, batch.num_computed_tokens, batch.num_ahead_tokens, batch.num_cached_tokens
            ahead = run.ahead if run.state != PENDING else 0
            assert tuple(int(array[row]) for array in arrays) == (run.known, run.counted, ahead, run.hits), f"row {row}"
            held = [[page_id != 0 for page_id in ids] for ids in batch.get_page_ids(row)]
            assert held == [[page is not None for page in pages] for pages in run.held], f"pages of row {row}"
        pools = [pool.num_held_pages for pool in self.manager.stats().pools.values()] or [self.manager.stats().num_held_pages]
        num_held = sum(page.refs > 0 for page in self.index.all)
        if self.setting.caches == "scheduled":  # which of several equal pages is hit is not modelled
            assert sum(pools) == num_held, f"{pools} pages are held, expected {num_held}"
        prompts = [*self.prompts, *([*run.tokens, 9] for run in self.runs if run.state != FREE)]
        for prompt in [*prompts, *(prompt[: self.rng.randrange(1, len(prompt) + 1)] for prompt in prompts)]:
            if len(prompt) <= MAX_LEN:
                assert batch.probe(PROBED, prompt) == self.index.hit(prompt)[0], f"a prompt of {len(prompt)} tokens"
        batch.check()


def compare_runs(setting: Setting, seed: int, num_calls: int, calls: list[str] = CALLS) -> None:
    """Do random calls of a setting. An error tells the seed and the last calls."""
    both = Runs(setting, seed, calls)
    for _ in range(num_calls):
        if both.writes_answers():
            return
        try:
            both.act()
        except Exception as error:
            lines = "\n".join(both.log[-12:])
            raise AssertionError(f"{setting}, seed {seed}, call {len(both.log)}: {error}\n{lines}") from error
