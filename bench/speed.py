"""The picture docs/speed.svg: bars on a logarithmic axis, written as text, so that the same figures make the same bytes.

It has its own ground, light or dark as the reader's system asks, and stays readable on pages whose own choice differs.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bench.tables import show_ratio, show_time

WIDTH, MARGIN = 600, 14
LEFT, RIGHT = 190, 464
"""Where the axis begins and ends; names stand before it, times behind the bars."""
TITLE_HEIGHT, GROUP_HEIGHT, BAR_HEIGHT, LINE_HEIGHT = 44, 34, 24, 17
CAPTION_COLUMNS = 90
NAMES = {"easydel": "EasyDeL", "vllm": "vLLM", "manager": "pagepool CacheManager", "batched": "pagepool RunningBatch"}
COLORS = {
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#57606a", "#9da7b1"),
    "grid": ("#d8dee4", "#30363d"),
    "easydel": ("#b34f00", "#f5995c"),
    "vllm": ("#9a4a79", "#e09cc4"),
    "manager": ("#0072b2", "#56b4e9"),
    "batched": ("#0072b2", "#56b4e9"),
}
"""``(light, dark)``: contrast with the ground is 4.5 or more. The hues are Okabe and Ito's, for colour-blind readers."""
TITLE = "Time of the scheduler's thread in ns: lower is better"


class Group(NamedTuple):
    """A work: nanoseconds by contender, and ratios of the engines' times to the running batch's."""

    name: str
    bars: Mapping[str, float]
    ratios: Mapping[str, float]


class Axis:
    """A logarithmic axis from a power of ten to the longest time."""

    def __init__(self, times: Sequence[float]) -> None:
        self.first = math.floor(math.log10(min(times)))
        self.last = max(math.log10(max(times)), self.first + 1)

    def place(self, time: float) -> float:
        share = (math.log10(time) - self.first) / (self.last - self.first)
        return LEFT + share * (RIGHT - LEFT)

    def ticks(self) -> list[int]:
        return [10**power for power in range(self.first, math.floor(self.last) + 1)]


def draw(groups: Sequence[Group], caption: str) -> str:
    """Return the picture."""
    axis = Axis([time for group in groups for time in group.bars.values()])
    parts, y = [text(MARGIN, 28, TITLE, "title")], TITLE_HEIGHT
    for group in groups:
        parts.append(text(MARGIN, y + 22, group.name, "group"))
        y += GROUP_HEIGHT
        for name, time in group.bars.items():
            parts += draw_bar(y, name, time, group.ratios.get(name), axis)
            y += BAR_HEIGHT
    parts += [text(axis.place(tick), y + 22, f"{tick:,} ns", "tick") for tick in axis.ticks()]
    grid = [f'<path class="grid" d="M{axis.place(tick):.1f} {TITLE_HEIGHT}V{y + 6}"/>' for tick in axis.ticks()]
    lines = textwrap.wrap(caption, CAPTION_COLUMNS)
    parts += [text(MARGIN, y + 50 + i * LINE_HEIGHT, line, "caption") for i, line in enumerate(lines)]
    return frame([*grid, *parts], y + 50 + len(lines) * LINE_HEIGHT, describe(groups))


def draw_bar(y: float, name: str, time: float, ratio: float | None, axis: Axis) -> list[str]:
    end = axis.place(time)
    label = show_time(time, "ns") + ("" if ratio is None else f" ({show_ratio(ratio)})")
    return [
        text(LEFT - 8, y + 16, NAMES[name], "name"),
        f'<rect class="{name}" x="{LEFT}" y="{y + 3}" width="{max(end - LEFT, 1):.1f}" height="{BAR_HEIGHT - 6}" rx="2"/>',
        text(max(end, LEFT) + 6, y + 16, label, "time"),
    ]


def text(x: float, y: float, content: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(content)}</text>'


def describe(groups: Sequence[Group]) -> str:
    """Return the picture's content in words."""
    sentences = []
    for group in groups:
        times = [f"{NAMES[name]} {show_time(time, 'ns')}" for name, time in group.bars.items()]
        sentences.append(f"{group.name}: {', '.join(times)}.")
    return " ".join(sentences)


def frame(parts: Sequence[str], height: float, description: str) -> str:
    """Return an SVG file around the parts."""
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" \
role="img" lang="en" aria-labelledby="title description">
<title id="title">{escape(TITLE)}</title>
<desc id="description">{escape(description)}</desc>
<style>
text {{ font: 14px sans-serif }}
.title {{ font-size: 17px; font-weight: bold }}
.group {{ font-weight: bold }}
.name {{ text-anchor: end }}
.tick {{ text-anchor: middle }}
.tick, .caption {{ font-size: 12.5px }}
.group, .time {{ paint-order: stroke; stroke-width: 4px }}
{style(0)}
@media (prefers-color-scheme: dark) {{
{style(1)}
}}
</style>
<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>
{body}
</svg>
"""


def style(scheme: int) -> str:
    """Return the rules of the colours, light (0) or dark (1)."""
    colors = {name: pair[scheme] for name, pair in COLORS.items()}
    bars = [f".{name} {{ fill: {colors[name]} }}" for name in ("ground", *NAMES)]
    others = [f"text {{ fill: {colors['ink']} }}", f".tick, .caption {{ fill: {colors['soft']} }}"]
    others.append(f".group, .time {{ stroke: {colors['ground']} }}")  # so that the grid does not cross them
    return "\n".join([*others, f".grid {{ stroke: {colors['grid']} }}", *bars])
