"""Races: rivals do the same work in turn, round by round, under one clock; and the table of the results.

A race is one benchmark of pytest-benchmark. Its rounds go to the rivals by turns, so that whatever else the machine does
hits all alike; what a rival prepares before its round is not timed, and the garbage collector is off. The medians by rival
are in the benchmark's ``extra_info``; pytest-benchmark's own statistics mix the rivals.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from statistics import median
from typing import Any, Protocol

COLUMNS = ("work", "easydel", "oracle", "pagepool", "ratio to easydel", "ratio to oracle", "target ratio")
OURS = "pagepool"


class Contender(Protocol):
    """One rival's state in a race. `prepare` comes before each `run`, which alone is timed."""

    page_ids: Any
    """What the last round gave: the same for all, or they did not do the same work."""

    def prepare(self) -> None: ...

    def run(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """Medians of one race, in microseconds a unit, by rival. `target` is how many times faster than easydel we mean to be."""

    work: str
    unit: str
    target: float | None
    medians: dict[str, float]

    def ratio_to(self, rival: str) -> float | None:
        """Return how many times as long the rival takes."""
        return self.medians[rival] / self.medians[OURS] if rival in self.medians else None

    def cells(self) -> list[str]:
        """Return the line of the table."""
        return [
            f"{self.work}, per {self.unit}",
            *(show_time(self.medians.get(rival)) for rival in ("easydel", "oracle", OURS)),
            *(show_ratio(ratio) for ratio in (self.ratio_to("easydel"), self.ratio_to("oracle"), self.target)),
        ]


class Race:
    """Runs one race a test. Sizes are in `work`; `num_units` of `unit` are done in a round."""

    def __init__(self, benchmark: Any, results: list[Result]) -> None:
        self._benchmark = benchmark
        self._results = results

    def __call__(
        self,
        contenders: Mapping[str, Contender],
        work: str,
        unit: str,
        num_units: int,
        num_rounds: int,
        target: float | None = None,
    ) -> None:
        turns = alternate(list(contenders.values()))
        for _ in contenders:  # warms up, and is all there is where benchmarks are switched off
            next(turns).run()
        self._benchmark.group = work
        self._benchmark.pedantic(
            lambda contender: contender.run(),
            setup=lambda: ((next(turns),), {}),
            rounds=num_rounds * len(contenders),
        )
        if self._benchmark.enabled:
            seconds = self._benchmark.stats.stats.data
            medians = {
                name: median(seconds[turn :: len(contenders)]) * 1e6 / num_units
                for turn, name in enumerate(contenders)
            }
            self._results.append(Result(work, unit, target, medians))
            self._benchmark.extra_info.update(asdict(self._results[-1]))


def alternate(contenders: Sequence[Contender]) -> Iterator[Contender]:
    """Yield the contenders by turns, each of them prepared, and compare what they did after each lap."""
    for contender in cycle(contenders):
        if contender is contenders[0] and hasattr(contender, "page_ids"):
            check_same_work(contenders)
        contender.prepare()
        yield contender


def check_same_work(contenders: Sequence[Contender]) -> None:
    """Assert that the last rounds gave the same page ids."""
    first, *others = [list(contender.page_ids) for contender in contenders]
    assert all(page_ids == first for page_ids in others), "the rivals gave different pages: not the same work"


def show_time(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:,.{decimals(microseconds)}f} us"


def show_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.{min(1, decimals(ratio))}f}x"


def decimals(value: float) -> int:
    """Return how many decimals leave about three digits."""
    return next((digits for digits, least in enumerate((100, 10, 1, 0.1)) if value >= least), 4)


def as_table(results: Sequence[Result]) -> str:
    """Return the results as a GitHub table, with a line on the machine under it."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *(result.cells() for result in results)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", describe_machine()])


def describe_machine() -> str:
    return (
        f"Medians, each rival in turn in one run. CPython {platform.python_version()}, {platform.machine()}, "
        f"pagepool {get_version('pagepool')}, easydel {get_version('easydel')}."
    )


def get_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
