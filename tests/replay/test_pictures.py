"""Plots of plans and fleets: the tables' hit rates, the knee, titles, text alternatives, and HTML pages."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from contrast import contrast
from replays import record_of

for package in ("click", "rich", "matplotlib", "msgspec"):
    pytest.importorskip(package)
from command_line import Page, invoke, line_of  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402

from pagepool.replay import Plan, Planner, Scheduler, TraceRecord, make_requests  # noqa: E402
from pagepool.replay.fleets.fleet import FleetFigures, make_replicas, run_fleet  # noqa: E402
from pagepool.replay.fleets.plot import draw_fleet  # noqa: E402
from pagepool.replay.fleets.replica import ReplicaSettings  # noqa: E402
from pagepool.replay.fleets.report import HIT_RATE as RUN_HIT_RATE  # noqa: E402
from pagepool.replay.fleets.report import headline_fleet  # noqa: E402
from pagepool.replay.models.pages import ModelPages  # noqa: E402
from pagepool.replay.plans.plot import draw_plan, save_plot  # noqa: E402
from pagepool.replay.plans.policies import PolicySimulator  # noqa: E402
from pagepool.replay.plans.report import list_columns  # noqa: E402
from pagepool.replay.shared.drawing import COLORS, STYLE  # noqa: E402
from pagepool.replay.shared.options import EVICTION_POLICIES  # noqa: E402
from pagepool.replay.simulation.runs import make_manager  # noqa: E402
from pagepool.replay.traces.reader import name_trace  # noqa: E402

ODD_NAME = 'a <b>&"$x$'
SVG = "{http://www.w3.org/2000/svg}"


def make_records() -> list[TraceRecord]:
    """Chats with several turns, and a few requests that are larger than the smallest pools."""
    chats = [record_of(i % 5, 10 + i % 5, 20 + i) for i in range(20)]
    return [*chats, record_of(*range(100, 130)), *chats, record_of(*range(200, 220))]


def make_plan(
    sizes: list[int], page_bytes: int | None = None, replays: tuple[int, ...] = (), policies: tuple[str, ...] = ()
) -> Plan:
    records = make_records()
    planner = Planner(records, page_size=2)
    plan = planner.make_plan(sizes, page_bytes)
    simulator = PolicySimulator(make_requests(records), ModelPages(2))
    runs = [(pool, policy, simulator.count_hits(policy, pool.num_pages)) for policy in policies for pool in plan.pools]
    plan = replace(plan, policies=tuple(planner.compare(*run) for run in runs))
    for size in replays:
        requests = make_requests(records)
        plan.replays[size] = Scheduler(make_manager(size, ModelPages(2), requests), requests, max_num_seqs=4).run()
    return plan


def draw(plan: Plan, heading: str | None = None) -> Figure:
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure = draw_plan(plan, heading)
        figure.draw_without_rendering()
    return figure


class TestShares:
    """A hit rate is a share of all prompt tokens, in tables, plots and JSON."""

    def test_a_plan(self) -> None:
        plan = make_plan([8, 30, 45, 100, 200], None, (45, 100), EVICTION_POLICIES[1:])
        assert plan.pools[0].skipped == 2
        all_tokens = sum(record.input_length for record in make_records())
        lines = {line.get_label(): line for line in draw(plan).axes[0].get_lines()}
        drawn = {f"hit rate, {name}": lines[f"{name}, one after another"] for name in ("LRU", "best", "adaptive")}
        drawn["hit rate, together"] = lines["LRU, together"]
        columns = dict(list_columns(plan))
        for heading, line in drawn.items():
            assert [f"{rate:.1%}" for rate in line.get_ydata()] == [cell for cell in columns[heading] if cell]
        pools = plan.as_dict()["pools"]
        for name in ("LRU", "best"):
            assert [*drawn[f"hit rate, {name}"].get_ydata()] == [pool[f"{name.lower()}_hit_rate"] for pool in pools]
        together = [pool["replay"]["trace_hit_rate"] for pool in pools if pool["replay"]]
        assert [*drawn["hit rate, together"].get_ydata()] == together
        assert [pool["lru_hit_rate"] for pool in pools] == [pool.lru_hit_tokens / all_tokens for pool in plan.pools]
        assert plan.replays[45].skipped == 1
        assert plan.replays[45].trace_hit_rate == plan.replays[45].hit_tokens / all_tokens > 0
        assert plan.replays[45].hit_rate == plan.replays[45].hit_tokens / plan.replays[45].prompt_tokens
        assert [*lines["a pool that never evicts"].get_ydata()] == [plan.most_hit_rate] * 2

    def test_a_fleet(self) -> None:
        records = make_records()
        settings = ReplicaSettings(45, 2)
        figures = {name: run_fleet(name, make_replicas(2, settings, records), settings) for name in ("round-robin", "prefix")}
        each = figures["prefix"]
        assert each.num_skipped == 1
        all_tokens = sum(record.input_length for record in records)
        assert each.prompt_tokens + each.skipped_prompt_tokens == all_tokens > each.prompt_tokens
        assert each.hit_rate == each.as_dict()["hit_rate"] == each.hit_tokens / each.prompt_tokens > 0
        bars = draw_fleet(figures, headline_fleet(figures, "chat"), "").axes[0]
        assert [bar.get_height() for bar in bars.patches] == [each.hit_rate for each in figures.values()]
        assert bars.get_ylabel() == RUN_HIT_RATE
        assert [text.get_text() for text in bars.texts] == [f"{each.hit_rate:.1%}" for each in figures.values()]
        restarted = run_fleet("round-robin", make_replicas(2, settings, records), settings, deaths=[(0.0, 0), (5.0, 0)])
        assert (restarted.num_skipped, restarted.skipped_prompt_tokens) == (1, 120)  # by a dead replica too, and counted once


class TestKnee:
    def knee_of(self, *sizes: int) -> tuple[list[str], list[float]]:
        """Return the texts in the plot, and the places of vertical lines."""
        axes = draw(make_plan([*sizes])).axes[0]
        uprights = [line.get_xdata()[0] for line in axes.get_lines() if len({*line.get_xdata()}) == 1 and len(sizes) > 1]
        return [text.get_text() for text in axes.texts], [float(x) for x in uprights]

    def test_it_is_shown_or_named(self) -> None:
        knee = make_plan([50]).knee
        assert knee is not None
        num_pages = knee.lru_num_pages
        text = f"LRU has 95% of all hits\nfrom {num_pages} pages on"
        assert self.knee_of(num_pages - 20, num_pages + 90) == ([text], [num_pages])
        assert self.knee_of(num_pages, num_pages + 1) == ([text], [num_pages])
        assert self.knee_of(num_pages - 30, num_pages - 1) == ([f"{text} →"], [])
        assert self.knee_of(num_pages + 1, num_pages + 30) == ([text.replace("\n", "\n← ")], [])
        assert self.knee_of(num_pages - 1)[0] == [f"{text} →"]


PLANS = {
    "many": lambda: make_plan([10, 20, 50, 100, 1_000, 5_000], 1 << 21, (50, 5_000)),
    "one": lambda: make_plan([12_800]),
    "two": lambda: make_plan([7_909, 8_000], 1 << 21),
    "huge": lambda: make_plan([2, 10**12], 1 << 40),
    "empty": lambda: Planner([record_of(1), record_of(2)], page_size=4).make_plan([3, 30]),
}


class TestLayout:
    @pytest.mark.parametrize("name", PLANS)
    def test_nothing_is_cut_off_and_marks_have_room(self, name: str) -> None:
        heading = None if name == "many" else "x" * 40 + ": up to 12.3% of prompt tokens hit; beyond 12,345,678 pages"
        figure = draw(PLANS[name](), heading)
        width, height = figure.get_size_inches()
        box = figure.get_tightbbox()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
        assert bool(figure.axes[0].texts) == (name != "empty")
        axis = figure.axes[-1].xaxis
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        assert labels
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
        assert len({label.get_text() for label in labels}) == len(labels)

    def test_colours_have_contrast(self) -> None:
        for name in {*COLORS} - {"paper", "grid"}:
            for color, paper in zip(COLORS[name], COLORS["paper"], strict=True):
                assert contrast(color, paper) >= (4.5 if name in {"blue", "grey", "ink"} else 3), name


class TestTitles:
    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("/a/b.c/chat.jsonl", "chat"),
            ("chat.jsonl.gz", "chat"),
            ("../chat.2025.json", "chat.2025"),
            ("dir/.jsonl", ".jsonl"),
            ("<stdin>", "<stdin>"),
            ("dir/a\n\x01\udcff.jsonl", "a\ufffd\ufffd\ufffd"),
            (f"/x/{ODD_NAME}.jsonl", ODD_NAME),
        ],
    )
    def test_the_name_of_a_trace(self, source: str, name: str) -> None:
        assert name_trace(source) == name

    def test_a_fleet(self) -> None:
        none, some, most = (FleetFigures(prompt_tokens=8, hit_tokens=tokens) for tokens in (0, 1, 2))
        assert headline_fleet({"a": some, "b": most}, "chat") == "chat: router b hits most, 25.0% of prompt tokens (a 12.5%)"
        several = headline_fleet({"a": most, "b": most, "c": none}, "x")
        assert several == "x: routers a and b hit most, 25.0% of prompt tokens (c 0.0%)"
        assert headline_fleet({"a": most}, "chat") == "chat: router a hits 25.0% of prompt tokens"
        assert headline_fleet({"a": none, "b": none}, "chat") == "chat: no prompt token hits"

    @pytest.mark.parametrize("name", [ODD_NAME, "対話\N{REPLACEMENT CHARACTER}" * 40], ids=["markup", "long"])
    def test_any_name_can_be_drawn(self, name: str) -> None:
        save_plot(make_plan([50, 100]), name, file := BytesIO(), "svg")
        root = ET.fromstring(file.getvalue())
        assert (root.findtext(f"{SVG}title") or "").startswith(f"{name}: up to ")


class TestAlternatives:
    """The text alternatives of the plots."""

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        folder = tmp_path / 'some "<folder>'
        folder.mkdir()
        path = folder / f"{ODD_NAME}.jsonl"
        path.write_text(line_of() * 2 + line_of(timestamp=1, hash_ids=[2, 3]))
        return path

    def check_svg(self, root: ET.Element, path: Path, *parts: str) -> None:
        assert root.get("role") == "img"
        assert root.get("lang") == "en"
        named = [root.find(f".//*[@id='{name}']") for name in (root.get("aria-labelledby") or "").split()]
        title, description = (element for element in named if element is not None)
        assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
        assert root[0] is title
        assert (title.text or "").startswith(f"{ODD_NAME}: ")
        assert all(part in (description.text or "") for part in parts)
        assert str(path.parent) not in "".join(root.itertext())

    @pytest.mark.parametrize("command", ["plan", "fleet"])
    def test_svg(self, command: str, trace: Path, tmp_path: Path) -> None:
        assert invoke(command, trace, "--plot", tmp_path / "plot.svg").exit_code == 0
        root = ET.parse(tmp_path / "plot.svg").getroot()
        rates = ["half of the requests waited at most"] if command == "fleet" else ["39 pages: LRU 32.9%, best 32.9%"]
        self.check_svg(root, trace, *rates)
        drawn = [text.text or "" for text in root.iter(f"{SVG}text")]
        assert any(text.startswith(f"{ODD_NAME}: ") for text in drawn), "the title is drawn too"
        background = next(root.iter(f"{SVG}path"))
        assert background.get("style") == "fill: #ffffff", "it has a background of its own where all else is dark"

    def test_png(self, trace: Path, tmp_path: Path) -> None:
        assert invoke("plan", trace, "--plot", tmp_path / "plot.png").exit_code == 0
        with Image.open(tmp_path / "plot.png") as image:
            texts: dict[str, Any] = image.info
            assert texts["Title"].startswith(f"{ODD_NAME}: ")
            assert "prompt tokens" in texts["Description"]
            assert "Software" not in texts

    def test_a_page(self, trace: Path, tmp_path: Path) -> None:
        assert invoke("plan", trace, "--html", tmp_path / "page.html", "--bytes-per-token", 100_000).exit_code == 0
        text = (tmp_path / "page.html").read_text()
        page = Page(text)
        assert page.open == page.fetched == []
        assert not {"script", "link", "img", "iframe", "b"} & {*page.seen}
        assert (page.seen.count("svg"), page.seen.count("table"), len(page.texts["caption"])) == (1, 3, 3)
        assert page.texts["h1"][0].startswith(f"{ODD_NAME}: up to 32.9% of prompt tokens hit; beyond ")
        assert page.texts["title"][0] == page.texts["title"][1] == page.texts["h1"][0]
        assert {"hit rate, adaptive", "GiB", "preempted, together", "LRU pages for the hits of adaptive"} <= {*page.texts["th"]}
        assert "32.9%" in page.texts["td"]
        assert escape(ODD_NAME) in text
        assert not [part for part in (ODD_NAME, "url(http", str(tmp_path)) if part in text]
        svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
        self.check_svg(ET.fromstring(svg), trace, "39 pages: LRU 32.9%, best 32.9%")
        assert '<html lang="en">' in text
        assert len(re.findall(r'<div class="wide" role="region" aria-label="[^"]+" tabindex="0">', text)) == 3
