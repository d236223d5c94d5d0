"""The file of results of the benchmarks, and the page and the picture that are made of it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from sources import ROOT

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
report = pytest.importorskip("bench.report", reason="bench/ is not here")
from bench import __main__ as command  # noqa: E402  where it is here
from bench import results, speed  # noqa: E402

LINE = results.Line("drop_in", "decode", "row", "ns", "pagepool", {"pagepool": 2.0, "easydel": 8.0}, {}, {"easydel": 4.0})
SETUP = {"cpu": "a processor", "cores": 2, "os": "Linux", "python": "3.11.0", "pagepool": "0.1.0", "date": "2026-01-01"}
EASYDEL = SETUP | {"easydel": "0.3.0"}
VLLM = SETUP | {"vllm": "0.33.0"}


@pytest.fixture(scope="module")
def measured() -> results.Results:
    return results.read()


class TestTheRepository:
    def test_the_page_is_of_the_results(self, measured: results.Results) -> None:
        assert report.PAGE.read_text() == report.make_page(measured), "make bench-plot"

    def test_the_picture_is_of_the_results(self, measured: results.Results) -> None:
        assert report.PICTURE.read_text() == report.make_picture(measured), "make bench-plot"

    def test_no_line_is_of_an_older_version(self, measured: results.Results) -> None:
        assert len({setup["pagepool"] for setup in measured.setups.values()}) == 1

    def test_all_benchmarks_were_run(self, measured: results.Results) -> None:
        """And are on the page."""
        benches = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
        assert set(command.ENGINES) == benches
        assert {line.bench for line in measured.lines} == {*benches, "vllm"}
        parts = set(re.findall(r"\{\{(\w+)\}\}", report.TEMPLATE.read_text()))
        assert parts == {*benches, "vllm", *report.PARTS}

    def test_ratios_are_of_the_medians(self, measured: results.Results) -> None:
        for line in measured.lines:
            if line.bench != "vllm":  # there they are medians of ratios
                ours = line.medians[line.ours]
                assert line.ratios == pytest.approx(
                    {rival: median / ours for rival, median in line.medians.items() if rival != line.ours}, rel=2e-3
                )

    def test_the_picture_has_all_headlines_and_engines(self, measured: results.Results) -> None:
        groups = report.find_headlines(measured)
        assert [group.name for group in groups] == list(report.HEADLINES.values())
        assert all(tuple(group.bars) == report.CONTENDERS for group in groups)


class TestMerging:
    def merge(self, path: Path, setup: results.Setup, *lines: results.Line) -> results.Results:
        results.merge(path, setup, lines, [results.Remark("drop_in", "test_x", "a remark")])
        return results.read(path)

    def test_lines_come_back(self, tmp_path: Path) -> None:
        merged = self.merge(tmp_path / "r.json", EASYDEL, LINE)
        assert merged.lines == [replace(LINE, setup="easydel, 2026-01-01")]
        assert merged.setups == {"easydel, 2026-01-01": EASYDEL}
        assert [remark.text for remark in merged.remarks] == ["a remark"]

    def test_a_later_run_replaces_its_lines_where_they_stand(self, tmp_path: Path) -> None:
        path, other = tmp_path / "r.json", replace(LINE, work="prompt")
        self.merge(path, EASYDEL, LINE, other)
        newer = replace(LINE, medians={"pagepool": 1.0})
        merged = self.merge(path, EASYDEL | {"date": "2026-01-02"}, newer)
        assert [line.work for line in merged.lines] == ["decode", "prompt"]
        assert [line.setup for line in merged.lines] == ["easydel, 2026-01-02", "easydel, 2026-01-01"]
        assert merged.lines[0].medians == newer.medians
        assert len(merged.remarks) == 1

    def test_a_setup_without_lines_is_dropped(self, tmp_path: Path) -> None:
        self.merge(tmp_path / "r.json", EASYDEL, LINE)
        assert list(self.merge(tmp_path / "r.json", EASYDEL | {"date": "2026-01-02"}, LINE).setups) == ["easydel, 2026-01-02"]

    def test_environments_stand_side_by_side(self, tmp_path: Path) -> None:
        """A rival's ratio is of its own run."""
        path = tmp_path / "r.json"
        self.merge(path, VLLM, replace(LINE, medians={"pagepool": 4.0, "vllm": 40.0}, ratios={"vllm": 10.0}))
        merged = self.merge(path, EASYDEL, LINE)
        assert report.make_table(merged.lines).splitlines() == [
            "| work | EasyDeL | vLLM | pagepool beside EasyDeL | pagepool beside vLLM |",
            "| --- | ---: | ---: | ---: | ---: |",
            "| decode, per row | 8.00 ns (4.0x) | 40.0 ns (10.0x) | 2.00 ns | 4.00 ns |",
        ]

    def test_what_was_not_measured_is_said(self) -> None:
        assert report.make_tables(results.Results(), "drop_in") == "Not measured."

    def test_a_machine_has_no_names_or_paths(self) -> None:
        machine = results.describe_machine()
        assert set(machine) <= set(results.MACHINE)
        assert not any("/" in str(value) for value in machine.values())


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


class TestPicture:
    TIMES = MappingProxyType({"easydel": 5039.0, "vllm": 2100.0, "manager": 1297.0, "batched": 21.0})
    GROUPS = (speed.Group("decode <row>", TIMES, {"easydel": 240}),)

    def test_it_is_accessible_text(self) -> None:
        root = ET.fromstring(speed.draw(self.GROUPS, "a caption"))
        name = "{http://www.w3.org/2000/svg}"
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == "title description"
        assert "lower is better" in (root.findtext(f"{name}title") or "")
        assert "EasyDeL 5,039 ns" in (root.findtext(f"{name}desc") or "")
        texts = [element.text for element in root.iter(f"{name}text")]
        assert {"decode <row>", "5,039 ns (240x)", "21.0 ns", "10 ns", "1,000 ns", "a caption"} <= set(texts)

    def test_bars_are_inside_and_longer_where_slower(self) -> None:
        root = ET.fromstring(speed.draw(self.GROUPS, "a caption"))
        bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") != "ground"]
        widths = [float(element.get("width", 0)) for element in bars]
        assert widths == sorted(widths, reverse=True)
        assert 0 < min(widths) < max(widths) <= speed.RIGHT - speed.LEFT < speed.WIDTH <= 900

    @pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
    def test_contrast(self, scheme: int) -> None:
        ground = speed.COLORS["ground"][scheme]
        ratios = {name: contrast(pair[scheme], ground) for name, pair in speed.COLORS.items() if name not in ("ground", "grid")}
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
