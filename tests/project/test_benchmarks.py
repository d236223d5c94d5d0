"""The file of results of the benchmarks, and the page and the picture that are made of it."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from contrast import contrast
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
    def test_page_and_picture_are_of_the_results(self, measured: results.Results) -> None:
        assert report.PAGE.read_text() == report.make_page(measured), "make bench-plot"
        assert report.PICTURE.read_text() == report.make_picture(measured), "make bench-plot"
        assert len({setup["pagepool"] for setup in measured.setups.values()}) == 1

    def test_all_benchmarks_were_run(self, measured: results.Results) -> None:
        """And are on the page."""
        benches = {path.stem.removeprefix("bench_") for path in (ROOT / "bench").glob("bench_*.py")}
        assert set(command.ENGINES) == benches
        assert {line.bench for line in measured.lines} == {*benches, "vllm"}
        parts = set(re.findall(r"\{\{(\w+)\}\}", report.TEMPLATE.read_text()))
        assert parts == {*benches, "vllm", *report.PARTS}


class TestMerging:
    def merge(self, path: Path, setup: results.Setup, *lines: results.Line) -> results.Results:
        results.merge(path, setup, lines, [results.Remark("drop_in", "test_x", "a remark")])
        return results.read(path)

    def test_a_later_run_replaces_its_lines_where_they_stand(self, tmp_path: Path) -> None:
        """A setup without lines is dropped."""
        path, other = tmp_path / "r.json", replace(LINE, work="prompt")
        merged = self.merge(path, EASYDEL, LINE, other)
        assert merged.lines == [replace(line, setup="easydel, 2026-01-01") for line in (LINE, other)]
        assert merged.setups == {"easydel, 2026-01-01": EASYDEL}
        newer = replace(LINE, medians={"pagepool": 1.0})
        merged = self.merge(path, EASYDEL | {"date": "2026-01-02"}, newer)
        assert [line.work for line in merged.lines] == ["decode", "prompt"]
        assert [line.setup for line in merged.lines] == ["easydel, 2026-01-02", "easydel, 2026-01-01"]
        assert merged.lines[0].medians == newer.medians
        assert [remark.text for remark in merged.remarks] == ["a remark"]
        assert list(self.merge(path, EASYDEL | {"date": "2026-01-03"}, LINE, other).setups) == ["easydel, 2026-01-03"]

    def test_a_machine_has_no_names_or_paths(self) -> None:
        machine = results.describe_machine()
        assert set(machine) <= set(results.MACHINE)
        assert not any("/" in str(value) for value in machine.values())


class TestPage:
    def test_a_remark_of_two_environments_is_there_once(self) -> None:
        """From EasyDeL's environment, whose lines are first."""
        remarks = [
            results.Remark("x", test, f"{test}, {name}", f"{name}, 2026-01-01") for name in ("vllm", "easydel") for test in "ab"
        ]
        assert report.make_tables(results.Results(remarks=remarks), "x") == "a, easydel\n\nb, easydel"


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

    def test_contrast(self) -> None:
        for name in {*speed.COLORS} - {"ground", "grid"}:
            for color, ground in zip(speed.COLORS[name], speed.COLORS["ground"], strict=True):
                assert contrast(color, ground) >= 4.5, name
