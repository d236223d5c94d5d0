"""Races: rivals do the same work in turn, round by round, under one clock. This module also prints the results.

A race is one benchmark of pytest-benchmark. The rivals take turns of a few rounds, so that other load on the machine affects
all of them equally. `bench.__main__` sets the clock to CPU time; `WALL_TIME` marks races that need another one. The first round
of a turn is not timed, so that no rival pays for the cache misses left by the previous one. Preparation before a round is not
timed either, and the garbage collector is off. The medians by rival are in the benchmark's ``extra_info``; pytest-benchmark's
own statistics mix the rivals.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import cycle
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Protocol

import pytest

import pagepool
from bench.tables import as_table, show_ratio, show_time


@dataclass(frozen=True)
class Suite:
    """A table: the columns of its contenders, with ours last, and the unit of its times."""

    rivals: tuple[str, ...]
    ours: str
    unit: str
    units_per_second: float
    target: str


DROP_IN = Suite(("easydel", "vllm", "oracle"), "pagepool", "us", 1e6, "target ratio")
BATCHED = Suite(("easydel", "vllm", "oracle", "manager"), "batched", "ns", 1e9, "target")
EVICTION = Suite(("lru",), "adaptive", "ns", 1e9, "target")
COPIES = Suite(("by page", "plain"), "pagepool", "us", 1e6, "target")
HOST = Suite(("by page", "device_put"), "pagepool", "us", 1e6, "target")
STORES = Suite(("plain loop",), "FileStore", "us", 1e6, "target")
FORKS = Suite(("easydel", "oracle", "manager", "admit"), "fork", "us", 1e6, "target")
STATES = Suite(("no interval",), "checkpoints", "ns", 1e9, "target")
TIER = Suite(("no tier",), "tier", "ns", 1e9, "target")
EVENTS = Suite(("noted", "taken", "encoded"), "off", "ns", 1e9, "target")
TRACE = Suite(("recorded",), "off", "us", 1e6, "target")
ROUTERS = Suite(("python", "dynamo"), "pagepool", "ns", 1e9, "target")
READERS = Suite(("one thread",), "two threads", "ns", 1e9, "target")
WINDOWS = Suite(("all",), "ends", "ns", 1e9, "target")
KEEPING = Suite(("plain", "expected"), "shares", "ns", 1e9, "target")
TORCH = Suite(("all rows",), "pagepool", "us", 1e6, "target")
LATE = Suite(("allocate_slots",), "cache_pages", "ns", 1e9, "target")
PORTS = tuple(Suite(("nano-vllm", "plain"), ours, "ns", 1e9, "target") for ours in ("port, cache_pages", "port, computed"))
INPUTS = Suite(("memcpy", "lists", "rows"), "inputs", "us", 1e6, "target")
AHEAD = Suite(("append, plan", "plan, settle", "computed"), "ahead", "us", 1e6, "target")
QUEUES = Suite(("admit",), "admit_next", "us", 1e6, "target")
STEPS = Suite(("no queue",), "queue", "us", 1e6, "target")
POOLS = Suite(("one pool",), "two pools", "us", 1e6, "target")
LOOKAHEAD = Suite(("last page dropped",), "lookahead", "ns", 1e9, "target")
HASHES = Suite(
    ("vllm sha256", "vllm sha256_cbor", "vllm xxhash", "vllm xxhash_cbor"),
    "siphash128",
    "ns",
    1e9,
    "target",
)
DIGESTS = Suite(("hashlib", "hashlib, cbor2", "sha256", "sha256_cbor"), "siphash128", "ns", 1e9, "target")
EXPLAIN = Suite(("off",), "explanations", "ns", 1e9, "target")
SUITES = (
    DROP_IN,
    BATCHED,
    EVICTION,
    COPIES,
    HOST,
    STORES,
    FORKS,
    STATES,
    TIER,
    EVENTS,
    TRACE,
    ROUTERS,
    READERS,
    WINDOWS,
    KEEPING,
    LATE,
    *PORTS,
    TORCH,
    INPUTS,
    AHEAD,
    QUEUES,
    STEPS,
    POOLS,
    LOOKAHEAD,
    HASHES,
    DIGESTS,
    EXPLAIN,
)
WALL_TIME = pytest.mark.benchmark(timer=perf_counter)
"""Marks benchmarks whose work is not done by one thread alone."""
LIMIT_COLUMNS = ("limit in C", "batched alone", "ratio to the limit")

Limits = Mapping[str, tuple[float, float]]
"""Times of the limit in C and of the same work by a running batch, each alone, by the name of the work."""


class Contender(Protocol):
    """One rival's state in a race. `prepare` precedes each `run`; only `run` is timed.

    `page_ids` is the result of the last round. It must be the same for all, since they do the same work.
    """

    page_ids: Any

    def prepare(self) -> None: ...

    def run(self) -> None: ...


class Counted:
    """A contender whose result is the number of its pages, for rivals that take different ones."""

    def __init__(self, contender: Contender) -> None:
        self.prepare, self.run, self._contender = contender.prepare, contender.run, contender

    @property
    def page_ids(self) -> list[int]:
        return [len(self._contender.page_ids)]


@dataclass(frozen=True)
class Work:
    """The work of a race. A round does `num_units` of `unit`. `target` is the ratio to reach, to easydel or for commits to the
    oracle; in the suite of batches it is the time not to exceed. `limit` names the same work in plain C.

    Each rival has `num_turns` turns of `rounds_per_turn` timed rounds.
    """

    name: str
    unit: str
    num_units: int
    num_turns: int
    target: float | None = None
    _: KW_ONLY
    suite: Suite = DROP_IN
    limit: str | None = None
    rounds_per_turn: int = 4


@dataclass(frozen=True)
class Result:
    """The median and the quartiles of the times of a unit of work by rival, in the suite's unit of time.

    `bench` names the file of the race: ``"drop_in"``.
    """

    bench: str
    work: Work
    medians: Mapping[str, float]
    quartiles: Mapping[str, tuple[float, float]]

    @property
    def ours(self) -> float:
        return self.medians[self.work.suite.ours]

    def ratio_to(self, rival: str) -> float | None:
        """Return the rival's time divided by ours."""
        return self.medians[rival] / self.ours if rival in self.medians else None

    def cells(self, rivals: Sequence[str]) -> list[str]:
        """Return the line of the table, except for the limit."""
        suite = self.work.suite
        times = [show_time(self.medians.get(rival), suite.unit) for rival in (*rivals, suite.ours)]
        ratios = [show_ratio(self.ratio_to(rival)) for rival in rivals]
        return [f"{self.work.name}, per {self.work.unit}", *times, *ratios, self._show_target()]

    def limit_cells(self, limits: Limits) -> list[str]:
        """Return the cells of the limit, in the suite's unit of time."""
        limit, ours = limits.get(self.work.limit or "", (None, None))
        times = [show_time(time, self.work.suite.unit) for time in (limit, ours)]
        return [*times, show_ratio(ours / limit if ours and limit else None)]

    def _show_target(self) -> str:
        if self.work.suite is DROP_IN:
            return show_ratio(self.work.target)
        return "-" if self.work.target is None else f"{self.work.target:g} {self.work.suite.unit}"


class Race:
    """Runs the race of one test."""

    def __init__(self, benchmark: Any, bench: str, results: list[Result]) -> None:
        self._benchmark, self._bench = benchmark, bench
        self.results = results

    def __call__(self, contenders: Mapping[str, Contender], work: Work) -> None:
        """Time the contenders, given by the names of the rivals, and add the result."""
        for contender in contenders.values():
            run_untimed(contender)
        check_same_work(contenders)
        turns = alternate(contenders, work.rounds_per_turn)
        self._benchmark.pedantic(
            lambda contender: contender.run(),
            setup=lambda: ((next(turns),), {}),
            rounds=work.num_turns * work.rounds_per_turn * len(contenders),
        )
        if self._benchmark.enabled:
            check_same_work(contenders)
            self._add_result(list(contenders), work)

    def _add_result(self, rivals: Sequence[str], work: Work) -> None:
        """Assign the rounds that pytest-benchmark timed to the rivals."""
        times: dict[str, list[float]] = {rival: [] for rival in rivals}
        turns = cycle([rival for rival in rivals for _ in range(work.rounds_per_turn)])
        for rival, seconds in zip(turns, self._benchmark.stats.stats.data, strict=False):
            times[rival].append(seconds * work.suite.units_per_second / work.num_units)
        medians = {rival: median(held) for rival, held in times.items()}
        quartiles = {rival: tuple(quantiles(held, n=4, method="inclusive")[::2]) for rival, held in times.items()}
        self.results.append(Result(self._bench, work, medians, quartiles))
        self._benchmark.extra_info.update(asdict(self.results[-1]))


def count_rounds(num_turns: int) -> int:
    """Return the number of rounds that a contender runs in a race, including untimed ones."""
    return 1 + num_turns * (1 + Work.rounds_per_turn)


def alternate(contenders: Mapping[str, Contender], rounds_per_turn: int) -> Iterator[Contender]:
    """Yield the contender of each timed round, prepared for it."""
    for contender in cycle(contenders.values()):
        run_untimed(contender)
        for _ in range(rounds_per_turn):
            contender.prepare()
            yield contender


def run_untimed(contender: Contender) -> None:
    contender.prepare()
    contender.run()


def check_same_work(contenders: Mapping[str, Contender]) -> None:
    """Assert that the last rounds had the same page ids."""
    first, *others = [list(contender.page_ids) for contender in contenders.values()]
    assert all(page_ids == first for page_ids in others), f"{', '.join(contenders)}: not the same pages"


def as_tables(results: Sequence[Result], limits: Limits) -> str:
    """Return the results as GitHub tables, one for each suite, and a description of the setup."""
    suites = {suite: [result for result in results if result.work.suite == suite] for suite in SUITES}
    return "\n\n".join([*(suite_table(suite, held, limits) for suite, held in suites.items() if held), describe_setup()])


def suite_table(suite: Suite, results: Sequence[Result], limits: Limits) -> str:
    """Return the results of a suite as a GitHub table: the rivals that ran, and the limit if it was measured."""
    rivals = [rival for rival in suite.rivals if any(rival in result.medians for result in results)]
    has_limit = suite is BATCHED and bool(limits)
    columns = ["work", *rivals, suite.ours, *(f"ratio to {rival}" for rival in rivals), suite.target]
    lines = [result.cells(rivals) + (result.limit_cells(limits) if has_limit else []) for result in results]
    return as_table([*columns, *(LIMIT_COLUMNS if has_limit else ())], lines)


def describe_setup() -> str:
    versions = ", ".join(f"{name} {version}" for name in ("easydel", "vllm") if (version := find_version(name)))
    return (
        "Medians; all rivals in turn in one run, CPU time but where jax works, the garbage collector off, page ids read in "
        f"every loop. pagepool {pagepool.__version__}, {versions or 'no engine installed'}, "
        f"CPython {platform.python_version()}, {platform.system()} {platform.machine()}."
    )


def find_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
