"""Races: rivals do the same work in turn, round by round, under one clock; and the table of the results.

A race is one benchmark of pytest-benchmark. Its rounds go to the rivals by turns of a few, so that whatever
else the machine does hits all alike. The first round of a turn is not timed, so that nobody pays for the
memory that the rival before went through; what is prepared before a round is not timed either, and the
garbage collector is off. The medians by rival are in the benchmark's ``extra_info``; pytest-benchmark's own
statistics mix the rivals.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from statistics import median
from typing import Any, Protocol

import pagepool

COLUMNS = ("work", "easydel", "oracle", "pagepool", "ratio to easydel", "ratio to oracle", "target ratio")
OURS = "pagepool"


class Contender(Protocol):
    """One rival's state in a race. `prepare` comes before each `run`, which alone is timed.

    `page_ids` is what the last round gave: the same for all, or they did not do the same work.
    """

    page_ids: Any

    def prepare(self) -> None: ...

    def run(self) -> None: ...


@dataclass(frozen=True)
class Work:
    """What is raced. A round does `num_units` of `unit`; `target` is the ratio to easydel to reach.

    `num_turns` times each rival has a turn of `rounds_per_turn` timed rounds.
    """

    name: str
    unit: str
    num_units: int
    num_turns: int
    target: float | None = None
    rounds_per_turn: int = 4


@dataclass(frozen=True)
class Result:
    """The medians of one race in microseconds a unit, by rival."""

    work: Work
    medians: Mapping[str, float]

    def ratio_to(self, rival: str) -> float | None:
        """Return how many times as long the rival takes."""
        return self.medians[rival] / self.medians[OURS] if rival in self.medians else None

    def cells(self) -> list[str]:
        """Return the line of the table."""
        times = [show_time(self.medians.get(rival)) for rival in ("easydel", "oracle", OURS)]
        ratios = [show_ratio(self.ratio_to("easydel")), show_ratio(self.ratio_to("oracle"))]
        return [f"{self.work.name}, per {self.work.unit}", *times, *ratios, show_ratio(self.work.target)]


class Race:
    """Runs the race of one test."""

    def __init__(self, benchmark: Any, results: list[Result]) -> None:
        self._benchmark = benchmark
        self._results = results

    def __call__(self, contenders: Mapping[str, Contender], work: Work) -> None:
        """Time the contenders, by the rivals' names, and add the result."""
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
        """Deal the rounds that pytest-benchmark timed out to the rivals again."""
        seconds: dict[str, list[float]] = {rival: [] for rival in rivals}
        turns = cycle([rival for rival in rivals for _ in range(work.rounds_per_turn)])
        for rival, duration in zip(turns, self._benchmark.stats.stats.data, strict=False):
            seconds[rival].append(duration)
        medians = {rival: median(seconds[rival]) * 1e6 / work.num_units for rival in rivals}
        self._results.append(Result(work, medians))
        self._benchmark.extra_info.update(asdict(self._results[-1]))


def count_rounds(num_turns: int) -> int:
    """Return how many rounds a contender runs in a race, those that are not timed included."""
    return 1 + num_turns * (1 + Work.rounds_per_turn)


def alternate(contenders: Mapping[str, Contender], rounds_per_turn: int) -> Iterator[Contender]:
    """Yield who runs the next timed round, prepared for it."""
    for contender in cycle(contenders.values()):
        run_untimed(contender)
        for _ in range(rounds_per_turn):
            contender.prepare()
            yield contender


def run_untimed(contender: Contender) -> None:
    contender.prepare()
    contender.run()


def check_same_work(contenders: Mapping[str, Contender]) -> None:
    """Assert that the last rounds gave the same page ids."""
    first, *others = [list(contender.page_ids) for contender in contenders.values()]
    assert all(page_ids == first for page_ids in others), f"{', '.join(contenders)}: not the same pages"


def show_time(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:,.{count_decimals(microseconds)}f} us"


def show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.{min(1, count_decimals(ratio))}f}x"


def count_decimals(value: float) -> int:
    """Return how many decimals make about three digits."""
    return next((digits for digits, least in enumerate((100, 10, 1, 0.1)) if value >= least), 4)


def as_table(results: Sequence[Result]) -> str:
    """Return the results as a GitHub table, and what they were measured with."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *(result.cells() for result in results)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", describe_setup()])


def describe_setup() -> str:
    return (
        "Medians; all rivals in turn in one run, the garbage collector off, page ids read in every loop. "
        f"pagepool {pagepool.__version__}, easydel {find_version('easydel')}, "
        f"CPython {platform.python_version()}, {platform.system()} {platform.machine()}."
    )


def find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
