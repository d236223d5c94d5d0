"""A fleet's figures by router as a picture, by matplotlib."""

from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pagepool.replay.drawing import BLUE, GREEN, ORANGE, save_figure
from pagepool.replay.fleet import FleetFigures

__all__ = ["save_fleet_plot"]

HATCHES = ("", "//", "..")
COLORS = (BLUE, ORANGE, GREEN)


def save_fleet_plot(figures: dict[str, FleetFigures], title: str, file: BinaryIO, file_format: str) -> None:
    """Draw hit rate, load by replica and waiting for each router. `file_format` is ``"png"`` or ``"svg"``."""
    save_figure(lambda: _draw(figures, title), file, file_format)


def _draw(figures: dict[str, FleetFigures], title: str) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    hits, loads, waits = figure.subplots(1, 3)
    _draw_hits(hits, figures)
    _draw_loads(loads, figures)
    _draw_waits(waits, figures)
    figure.suptitle(title, fontsize="small")
    return figure


def _draw_hits(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    rates = [each.hit_rate for each in figures.values()]
    bars = axes.bar([*figures], rates, color=COLORS[: len(figures)], edgecolor="white")
    for bar, hatch in zip(bars, HATCHES, strict=False):
        bar.set_hatch(hatch)
    axes.bar_label(bars, [f"{rate:.1%}" for rate in rates], fontsize="small")
    axes.set_ylim(0, 1.15 * max(*rates, 0.01))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set_ylabel("share of prompt tokens hit")
    axes.tick_params("x", labelsize="small")
    axes.grid(visible=False, axis="x")


def _draw_loads(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    """Replicas in order of what they computed: a flat line is a balanced fleet."""
    for (name, each), color, style in zip(figures.items(), COLORS, ("-", "--", ":"), strict=False):
        loads = sorted(each.computed_tokens)
        axes.plot(
            range(1, len(loads) + 1), [load / 1e6 for load in loads], color=color, linestyle=style, marker=".", label=name
        )
    axes.set_ylim(0)
    axes.set_xlabel("replicas, the idlest first")
    axes.set_ylabel("million tokens computed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _draw_waits(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    percents = [50, 75, 90, 95, 99, 100]
    for (name, each), color, style in zip(figures.items(), COLORS, ("-", "--", ":"), strict=False):
        waits = [each.wait_percentile(percent) for percent in percents]
        axes.plot(range(len(percents)), waits, color=color, linestyle=style, marker="o", markersize=4, label=name)
    axes.set_xticks(range(len(percents)), [f"{percent}%" for percent in percents])
    axes.set_ylim(0)
    axes.set_xlabel("of the requests")
    axes.set_ylabel("waited at most (s)")
