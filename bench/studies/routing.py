"""What the limits of `PrefixRouter` cost in hits and gain in waiting.

``python -m bench.studies.routing --plot docs/routing.svg`` draws the picture of docs/routers.md.

The beginning of the conversation trace. `max_imbalance` is tried on 16 replicas and on 4, which have more to do than they can.
`max_age` is tried on 16, a quarter of which reports nothing after a third of the time, so that what the router knows of them
gets old. ``--limit N`` takes N requests, ``--json FILE`` keeps the figures, and draws them if it exists.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pagepool.replay.fleets.fleet import Fleet, LocalReplicas
from pagepool.replay.fleets.replica import HASH_SEED, ReplicaSettings
from pagepool.replay.fleets.router import CachedPrefixRouter
from pagepool.replay.shared.drawing import BLUE, ORANGE, save_figure
from pagepool.replay.traces.reader import read_trace
from pagepool.replay.traces.records import TraceRecord

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_conversation.jsonl"
IMBALANCES = (1.0, 1.1, 1.25, 2.0, inf)
AGES = (2.0, 120.0, inf)
CASES: dict[str, tuple[str, tuple[float, ...], int, int]] = {  # limit, values, replicas, how many of them fall silent
    "max_imbalance, 16 replicas": ("max_imbalance", IMBALANCES, 16, 0),
    "max_imbalance, 4 overloaded replicas": ("max_imbalance", IMBALANCES, 4, 0),
    "max_age in seconds, 16 replicas, 4 of them silent": ("max_age", AGES, 16, 4),
}

Measured = dict[str, list[tuple[float, dict[str, float]]]]


class SilencedRouter(CachedPrefixRouter):
    """Hears nothing of the first `num_silent` replicas from `silent_from` seconds of the simulated clock on."""

    def __init__(self, num_replicas: int, num_silent: int, silent_from: float, **limits: float) -> None:
        super().__init__(num_replicas, 16, HASH_SEED, clock=lambda: self.now, **limits)
        self.now = 0.0
        self.num_silent, self.silent_from = num_silent, silent_from

    def hear(self, replica: int, events: bytes) -> None:
        if replica >= self.num_silent or self.now < self.silent_from:
            super().hear(replica, events)


class ClockedFleet(Fleet):
    """Tells the router the time."""

    def _route(self, now: float, until: float) -> list[Any]:
        self._router.now = now  # type: ignore[attr-defined]
        return super()._route(now, until)


def measure(records: list[TraceRecord], num_replicas: int, num_silent: int, **limits: float) -> dict[str, float]:
    """Return hit rate and waiting times of a fleet."""
    replicas = LocalReplicas(num_replicas, ReplicaSettings(32768), records)
    span = (records[-1].timestamp - records[0].timestamp) / 1000
    figures = ClockedFleet(replicas, SilencedRouter(num_replicas, num_silent, span / 3, **limits)).run()
    waits = {f"p{percent}": figures.wait_percentile(percent) for percent in (50, 90, 99)}
    return {"hit_rate": figures.hit_rate, "imbalance": figures.imbalance, **waits}


def measure_all(limit: int) -> Measured:
    """Return the figures of each value of each limit."""
    if not TRACE.exists():
        sys.exit(f"bench.studies.routing: {TRACE} is not there")
    records = list(islice(read_trace(str(TRACE)), limit))
    return {
        case: [(value, measure(records, num_replicas, num_silent, **{name: value})) for value in values]
        for case, (name, values, num_replicas, num_silent) in CASES.items()
    }


def draw(measured: Measured) -> Figure:
    """Draw hits and waiting time by each limit, one below the other, so that a telephone shows the text."""
    figure = Figure(figsize=(5.5, 2.4 * len(measured)), layout="constrained")
    for axes, (case, rows) in zip(figure.subplots(len(measured), 1), measured.items(), strict=True):
        labels = ["none" if value == inf else f"{value:g}" for value, _ in rows]
        axes.plot(labels, [100 * each["hit_rate"] for _, each in rows], color=BLUE, marker="o", label="hit rate, %")
        axes.set_ylim(0, 20)
        axes.set_xlabel(case)
        waits = axes.twinx()
        waited = [each["p90"] for _, each in rows]
        waits.plot(labels, waited, color=ORANGE, marker="s", linestyle="--", label="90 % wait less, s")
        waits.set_ylim(0, max(1.0, 1.3 * max(waited)))
        waits.grid(visible=False)
        waits.spines["right"].set_visible(True)
    lines = [*axes.get_lines(), *waits.get_lines()]
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside upper center", ncols=2)
    return figure


def main() -> None:
    parser = ArgumentParser("bench.studies.routing", description=__doc__)
    parser.add_argument("--limit", type=int, default=2500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    has_figures = args.json is not None and args.json.exists()
    measured = json.loads(args.json.read_text()) if has_figures else measure_all(args.limit)
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    for case, rows in measured.items():
        for value, each in rows:
            waits = ", ".join(f"{each[p]:.2f}" for p in ("p50", "p90", "p99"))
            print(f"{case}: {value:<6g}  hits {each['hit_rate']:6.2%}  imbalance {each['imbalance']:.2f}  waiting {waits} s")
    if args.plot is not None:
        with args.plot.open("wb") as file:
            title = "Hits and waiting time by the limits of PrefixRouter"
            description = f"{title}: by max_imbalance on 16 and on 4 replicas, by max_age with 4 silent replicas of 16."
            save_figure(partial(draw, measured), file, "svg", title=title, description=description)


if __name__ == "__main__":
    main()
