"""A plan as a picture, by matplotlib."""

from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pagepool.replay.drawing import BLUE, GREEN, GREY, ORANGE, save_figure
from pagepool.replay.plan import Plan
from pagepool.replay.wording import format_count, summarize

__all__ = ["save_plot"]

MAX_FINE_RATIO = 3000  # of the ends of an axis up to which there is room for marks at 2 and 5 in each decade


def save_plot(plan: Plan, file: BinaryIO, file_format: str) -> None:
    """Draw prompt tokens saved, and below them preemptions where there were replays, against the size of the pool.

    `file_format` is ``"png"`` or ``"svg"``. The same plan gives the same bytes.
    """
    save_figure(partial(_draw, plan), file, file_format)


def _draw(plan: Plan) -> Figure:
    num_panels = 2 if plan.replays else 1
    figure = Figure(figsize=(6, 3.2 + 1.6 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, height_ratios=(3, 1)[:num_panels], sharex=True, squeeze=False)[:, 0]
    _draw_hits(panels[0], plan)
    if plan.replays:
        _draw_preemptions(panels[1], plan)
    _scale_pages(panels[-1], plan)
    if plan.page_bytes is not None:
        _add_memory_axis(panels[0], plan.page_bytes)
    figure.suptitle(summarize(plan), fontsize="small")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _draw_hits(axes: Axes, plan: Plan) -> None:
    """Shares of all prompt tokens, so that pools which skip requests compare with those that do not."""
    num_tokens = max(1, plan.prompt_tokens)
    sizes = [pool.num_pages for pool in plan.pools]
    best = [pool.best_hit_tokens / num_tokens for pool in plan.pools]
    lru = [pool.lru_hit_tokens / num_tokens for pool in plan.pools]
    together = [figures.hit_tokens / num_tokens for figures in plan.replays.values()]
    most = plan.most_hit_tokens / num_tokens
    axes.axhline(most, color=GREY, linestyle=":", label="a pool that never evicts")
    axes.plot(sizes, best, color=ORANGE, linestyle="--", marker="s", markersize=4, label="best, one after another")
    axes.plot(sizes, lru, color=BLUE, marker="o", markersize=4, label="LRU, one after another")
    if together:
        axes.plot([*plan.replays], together, color=GREEN, linestyle="", marker="^", markersize=8, label="LRU, together")
    _mark_knee(axes, plan)
    axes.set_ylim(0, 1.05 * max(most, *together, 0.01))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.set_ylabel("share of prompt tokens saved")
    tokens = axes.secondary_yaxis("right", functions=_scale(num_tokens))
    tokens.yaxis.set_major_formatter(FuncFormatter(lambda count, _: format_count(count)))
    tokens.set_ylabel("prompt tokens saved")


def _mark_knee(axes: Axes, plan: Plan) -> None:
    """A line where LRU has nearly all hits, if that is among the pools."""
    knee, start, stop = plan.knee, plan.pools[0].num_pages, plan.pools[-1].num_pages
    if knee is None or not start <= knee.lru_num_pages <= stop:
        return
    is_left = knee.lru_num_pages**2 < start * stop  # of the middle of a logarithmic axis
    axes.axvline(knee.lru_num_pages, color=BLUE, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f"{knee.share:.0%} of all hits, LRU:\n{knee.lru_num_pages:,} pages",
        (knee.lru_num_pages, 0.03),
        xytext=(4 if is_left else -4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        horizontalalignment="left" if is_left else "right",
        color=BLUE,
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
    axes.set_xscale("log")
    axes.set_xlim(start / 1.1, stop * 1.1)
    axes.set_xlabel(f"pages of {plan.page_size:,} tokens in the pool")
    _label_log_axis(axes.xaxis, stop / start)


def _add_memory_axis(axes: Axes, page_bytes: int) -> None:
    memory = axes.secondary_xaxis("top", functions=_scale(page_bytes / 2**30))
    memory.set_xlabel("memory of the pool (GiB)")
    start, stop = axes.get_xlim()
    _label_log_axis(memory.xaxis, stop / start)


def _scale(factor: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """To another unit and back."""
    return lambda value: value * factor, lambda value: value / factor


def _label_log_axis(axis: Axis, ratio: float) -> None:
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if ratio < MAX_FINE_RATIO else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axis.set_minor_formatter(NullFormatter())
