"""The plot of a fleet's figures by router."""

from functools import partial
from typing import Any, BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pagepool.replay.fleets.fleet import FleetFigures
from pagepool.replay.fleets.report import HIT_RATE, describe_fleet, headline_fleet
from pagepool.replay.shared.drawing import BLUE, GREEN, GREY, ORANGE, PAPER, format_count, save_figure, shorten_name

HATCHES = ("", "//", "..")
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": ORANGE, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": ":", "marker": "^"},
)
PERCENTS = (50, 75, 90, 95, 99, 100)


def save_fleet_plot(figures: dict[str, FleetFigures], name: str, summary: str, file: BinaryIO, file_format: str) -> None:
    """Plot hit rate, load by replica and waiting time for each router. `name` is the name of the trace, `summary` describes the
    fleet, and `file_format` is ``"png"`` or ``"svg"``.
    """
    draw = partial(draw_fleet, figures, headline_fleet(figures, shorten_name(name)), summary)
    save_figure(
        draw, file, file_format, title=headline_fleet(figures, name), description=f"{summary}. {describe_fleet(figures)}"
    )


def draw_fleet(figures: dict[str, FleetFigures], heading: str, summary: str) -> Figure:
    """Draw the figure; hit rates are shares of the prompt tokens that were run."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    hits, loads, waits = figure.subplots(1, 3)
    _draw_hits(hits, figures)
    _draw_loads(loads, figures)
    _draw_waits(waits, figures)
    figure.suptitle(heading, fontsize="medium", fontweight="bold", wrap=True)
    loads.set_title(summary, fontsize="small", color=GREY)
    figure.legend(*loads.get_legend_handles_labels(), loc="outside lower center", ncols=len(figures), fontsize="small")
    return figure


def _draw_hits(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    rates = [each.hit_rate for each in figures.values()]
    names = [name.replace("-", "-\n") for name in figures]
    bars = axes.bar(names, rates, color=[look["color"] for look in LOOKS[: len(figures)]], edgecolor=PAPER)
    for bar, hatch in zip(bars, HATCHES, strict=False):
        bar.set_hatch(hatch)
    axes.bar_label(bars, [f"{rate:.1%}" for rate in rates], fontsize="small")
    axes.set_xlim(-0.75, len(figures) - 0.25)
    axes.set_ylim(0, 1.15 * max(*rates, 0.01))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set_ylabel(HIT_RATE)
    axes.tick_params("x", labelsize="small")
    axes.grid(visible=False, axis="x")


def _draw_loads(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    """Draw the sorted loads; a flat line is a balanced fleet."""
    for (name, each), look in zip(figures.items(), LOOKS, strict=False):
        loads = sorted(each.computed_tokens)
        axes.plot(range(1, len(loads) + 1), loads, markersize=4, markevery=len(loads) // 20 + 1, label=name, **look)
    _scale_from_zero(axes)
    axes.set_xlim(0.5, max(len(each.computed_tokens) for each in figures.values()) + 0.5)
    axes.set_xlabel("replicas, lowest load first")
    axes.set_ylabel("tokens computed")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def _draw_waits(axes: Axes, figures: dict[str, FleetFigures]) -> None:
    for (_, each), look in zip(figures.items(), LOOKS, strict=False):
        waits = [each.wait_percentile(percent) for percent in PERCENTS]
        axes.plot(range(len(PERCENTS)), waits, markersize=4, **look)
    axes.set_xticks(range(len(PERCENTS)), [f"{percent}%" for percent in PERCENTS])
    _scale_from_zero(axes)
    axes.set_xlabel("share of the requests")
    axes.set_ylabel("waited at most (s)")


def _scale_from_zero(axes: Axes) -> None:
    """Start the axis at 0, and shorten its numbers."""
    axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: format_count(count)))
