"""The plot of a plan."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from pagepool.replay.plans.host_report import name_host
from pagepool.replay.plans.plan import POLICY_NAMES, Plan
from pagepool.replay.plans.report import HIT_RATE, describe_picture, headline, summarize
from pagepool.replay.plans.state_report import name_runs
from pagepool.replay.plans.window_report import name_window_runs
from pagepool.replay.shared.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAPER,
    PURPLE,
    format_count,
    save_figure,
    shorten_name,
)

WIDTH, PAGE_WIDTH = 6.4, 4.7  # inches; narrow enough for phones
POLICY_STYLES: dict[str, dict[str, Any]] = {
    "lru": {"color": BLUE, "marker": "o"},
    "adaptive": {"color": PURPLE, "linestyle": "-.", "marker": "D"},
}
HOLLOW_STYLE = {"linestyle": (0, (5, 1)), "marker": "P", "markerfacecolor": PAPER}
INCHES_A_FINE_DECADE = 1.25  # room for ticks at 2 and 5


def save_plot(plan: Plan, name: str, file: BinaryIO, file_format: str, *, is_within_page: bool = False) -> None:
    """Plot hit rates, and preemptions if there were replays, against pool size.

    `name` is the name of the trace, `file_format` ``"png"`` or ``"svg"``. Within a page the plot has no heading and is
    narrower. The bytes are reproducible.
    """
    draw = partial(draw_plan, plan, None if is_within_page else headline(plan, shorten_name(name)))
    save_figure(draw, file, file_format, title=headline(plan, name), description=describe_picture(plan))


def draw_plan(plan: Plan, heading: str | None = None) -> Figure:
    """Draw the figure; hit rates are shares of all prompt tokens."""
    num_panels = 2 if plan.replays else 1
    width = PAGE_WIDTH if heading is None else WIDTH
    figure = Figure(figsize=(width, 3.2 + 1.6 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, height_ratios=(3, 1)[:num_panels], sharex=True, squeeze=False)[:, 0]
    _draw_hits(panels[0], plan)
    if plan.replays:
        _draw_preemptions(panels[1], plan)
    _scale_pages(panels[-1], plan)
    if plan.page_bytes is not None:
        _add_memory_axis(panels[0], plan, plan.page_bytes / 2**30)
    if heading is not None:
        figure.suptitle(heading, fontsize="medium", fontweight="bold", wrap=True)
        panels[0].set_title(summarize(plan), fontsize="small", color=GREY)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _draw_hits(axes: Axes, plan: Plan) -> None:
    together = [figures.trace_hit_rate for figures in plan.replays.values()]
    most = plan.most_hit_rate
    limit = "a pool that never evicts" if plan.model.has_attention else "a state after each token, none evicted"
    axes.axhline(most, color=GREY, linestyle=":", label=limit)
    if plan.checkpoints:
        _draw_checkpoints(axes, plan)
    elif plan.windows:
        _draw_windows(axes, plan)
    else:
        _draw_policies(axes, plan)
    if together:
        axes.plot([*plan.replays], together, color=GREEN, linestyle="", marker="^", markersize=8, label="LRU, together")
    axes.set_ylim(0, 1.2 * max(most, *together, 0.01))
    if not plan.checkpoints and not plan.windows:
        _mark_knee(axes, plan)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set_ylabel(HIT_RATE)
    tokens = axes.secondary_yaxis("right", functions=_scale(max(1, plan.prompt_tokens)))
    tokens.yaxis.set_major_formatter(FuncFormatter(lambda count, _: format_count(count)))
    tokens.set_ylabel("prompt tokens saved")


def _draw_policies(axes: Axes, plan: Plan) -> None:
    sizes = [pool.num_pages for pool in plan.pools]
    best = [pool.best_hit_rate for pool in plan.pools]
    lru = [pool.lru_hit_rate for pool in plan.pools]
    axes.plot(sizes, best, color=ORANGE, linestyle="--", marker="s", markersize=4, label="best, one after another")
    axes.plot(sizes, lru, markersize=4, label="LRU, one after another", **POLICY_STYLES["lru"])
    if plan.host_runs:
        label, line = f"{name_host(plan)}, one after another", POLICY_STYLES["lru"] | HOLLOW_STYLE
        axes.plot(sizes, [run.hits.hit_rate for run in plan.host_runs], markersize=6, label=label, **line)
    for eviction, by_size in plan.runs_by_policy.items():
        rates = [run.hit_rate for run in by_size.values()]
        label = f"{POLICY_NAMES[eviction]}, one after another"
        axes.plot([*by_size], rates, markersize=4, label=label, **POLICY_STYLES[eviction])


def _draw_checkpoints(axes: Axes, plan: Plan) -> None:
    """Draw a line for each policy and interval, in shades of the policy's color; shorter intervals are lighter."""
    if plan.model.num_attention_groups:
        sizes = [pool.num_pages for pool in plan.pools]
        alone = [pool.lru_hit_rate for pool in plan.pools]
        axes.plot(sizes, alone, color=ORANGE, linestyle="--", marker="s", markersize=4, label="attention alone")
    intervals = [*dict.fromkeys(each.interval for each in plan.checkpoints)]
    names = name_runs(plan)
    for (eviction, interval), by_size in plan.checkpoint_runs.items():
        rates = [plan.find_simulated_rate(run) for run in by_size.values()]
        label = f"checkpoints {names[eviction, interval]}"
        shade = 0.3 + 0.7 * (intervals.index(interval) + 1) / len(intervals)
        axes.plot([*by_size], rates, alpha=shade, markersize=4, label=label, **POLICY_STYLES[eviction])


def _draw_windows(axes: Axes, plan: Plan) -> None:
    if plan.model.num_attention_groups:
        sizes, bound = [pool.num_pages for pool in plan.pools], [pool.best_hit_rate for pool in plan.pools]
        axes.plot(sizes, bound, color=ORANGE, linestyle="--", marker="s", markersize=4, label="bound")
    names = name_window_runs(plan)
    for (eviction, windows), by_size in plan.window_runs.items():
        rates = [plan.find_simulated_rate(run) for run in by_size.values()]
        style = POLICY_STYLES[eviction] | ({} if windows == "ends" else HOLLOW_STYLE)
        axes.plot([*by_size], rates, markersize=4, label=f"{names[eviction, windows]}, one after another", **style)


def _mark_knee(axes: Axes, plan: Plan) -> None:
    """Mark the size at which LRU reaches nearly all hits: a line, or a label at the edge if it is off the axis."""
    if plan.knee is None:
        return
    num_pages, start, stop = plan.knee.lru_num_pages, plan.pools[0].num_pages, plan.pools[-1].num_pages
    is_inside = start <= num_pages <= stop
    is_right = num_pages**2 > start * stop  # right of the middle of a logarithmic axis
    text = f"LRU has {plan.knee.share:.0%} of all hits\nfrom {num_pages:,} pages on"
    if is_inside:
        axes.axvline(num_pages, color=BLUE, linewidth=1, linestyle=(0, (1, 2)))
    else:
        text = f"{text} →" if is_right else text.replace("\n", "\n← ")
    axes.annotate(
        text,
        (num_pages if is_inside else int(is_right), 0.98),
        xytext=(-4 if is_right else 4, 0),
        xycoords=("data" if is_inside else "axes fraction", "axes fraction"),
        textcoords="offset points",
        horizontalalignment="right" if is_right else "left",
        verticalalignment="top",
        color=BLUE,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        fontsize="small",
    )


def _draw_preemptions(axes: Axes, plan: Plan) -> None:
    preemptions = [figures.preemptions for figures in plan.replays.values()]
    axes.vlines([*plan.replays], 0, preemptions, color=GREEN)
    axes.plot([*plan.replays], preemptions, color=GREEN, linestyle="", marker="^", markersize=8, clip_on=False)
    axes.set_ylim(0, 1.1 * max(*preemptions, 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda count, _: format_count(count)))
    axes.set_ylabel("preemptions")


def _scale_pages(axes: Axes, plan: Plan) -> None:
    start, stop = plan.pools[0].num_pages, plan.pools[-1].num_pages
    margin = (stop / start) ** 0.02 if start < stop else 1.1
    axes.set_xscale("log")
    axes.set_xlim(start / margin, stop * margin)
    axes.set_xlabel(f"pages of {plan.model.contents} in the pool")
    _label_log_axis(axes, axes.xaxis, start, stop)


def _add_memory_axis(axes: Axes, plan: Plan, page_gib: float) -> None:
    memory = axes.secondary_xaxis("top", functions=_scale(page_gib))
    memory.set_xlabel("memory of the pool (GiB)")
    _label_log_axis(axes, memory.xaxis, plan.pools[0].num_pages * page_gib, plan.pools[-1].num_pages * page_gib)


def _scale(factor: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the conversions to another unit and back."""
    return lambda value: value * factor, lambda value: value / factor


def _label_log_axis(axes: Axes, axis: Axis, start: float, stop: float) -> None:
    """Set ticks at round numbers, or at both ends if fewer than two lie between them."""
    marks = _list_marks(start, stop, axes.bbox.width / axes.figure.dpi)
    format_mark = format_count if len(marks) > 1 else _format_in_full
    axis.set_major_locator(FixedLocator(marks if len(marks) > 1 else sorted({start, stop})))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_mark(value)))
    axis.set_minor_formatter(NullFormatter())


def _list_marks(start: float, stop: float, inches: float) -> list[float]:
    """List the ticks of an axis of this length: 1, 2 and 5 in each decade if there is room, otherwise powers of ten."""
    decades = range(math.floor(math.log10(start)), math.ceil(math.log10(stop)) + 1)
    room = inches / INCHES_A_FINE_DECADE / max(1, math.log10(stop / start))
    numbers = (1, 2, 5) if room >= 1 else (1,)
    marks = [number * 10.0**decade for decade in decades[:: math.ceil(0.4 / room)] for number in numbers]
    return [mark for mark in marks if start <= mark <= stop]


def _format_in_full(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
