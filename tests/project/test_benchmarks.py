"""The file of results of the benchmarks, and the page and the picture that are made of it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from contrast import contrast
from sources import ROOT

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
report = pytest.importorskip("bench.report", reason="bench/ is not here")
from bench import __main__ as command  # noqa: E402  where it is here
from bench import speed  # noqa: E402
from bench.races import results  # noqa: E402
from bench.races.late_rivals import Late, Settings  # noqa: E402

LINE = results.Line("drop_in", "decode", "row", "ns", "pagepool", {"pagepool": 2.0, "easydel": 8.0}, {}, {"easydel": 4.0})
SETUP = {"cpu": "a processor", "cores": 2, "os": "Linux", "python": "3.11.0", "pagepool": "0.1.0", "easydel": "0.3.0"}


def test_page_and_picture_are_of_the_results() -> None:
    """Of all benchmarks."""
    measured = results.read()
    assert report.PAGE.read_text() == report.make_page(measured), "make bench-plot"
    assert report.PICTURE.read_text() == report.make_picture(measured), "make bench-plot"
    benches = {path.stem.removeprefix("bench_") for path in (ROOT / "bench" / "races").glob("bench_*.py")}
    assert set(command.ENGINES) == benches
    assert {line.bench for line in measured.lines} == {*benches, "vllm"}
    assert set(re.findall(r"\{\{(\w+)\}\}", report.TEMPLATE.read_text())) == {*benches, "vllm", *report.PARTS}


def test_a_later_run_replaces_its_lines_where_they_stand(tmp_path: Path) -> None:
    """A setup without lines is dropped."""
    path, other, newer = tmp_path / "r.json", replace(LINE, work="prompt"), replace(LINE, medians={"pagepool": 1.0})

    def merge(day: int, *lines: results.Line) -> None:
        remarks = [results.Remark("drop_in", "test_x", "a remark")]
        results.merge(path, SETUP | {"date": f"2026-01-0{day}"}, lines, remarks)

    merge(1, LINE, other)
    merge(2, newer)
    merged = results.read(path)
    assert [(line.work, line.setup, line.medians) for line in merged.lines] == [
        ("decode", "easydel, 2026-01-02", newer.medians),
        ("prompt", "easydel, 2026-01-01", LINE.medians),
    ]
    assert [remark.text for remark in merged.remarks] == ["a remark"]
    merge(3, LINE, other)
    assert list(results.read(path).setups) == ["easydel, 2026-01-03"]
    assert not any("/" in str(value) for value in results.describe_machine().values())


def test_a_remark_of_two_environments_is_there_once() -> None:
    """From EasyDeL's environment, whose lines are first."""
    names = [(test, name) for name in ("vllm", "easydel") for test in "ab"]
    remarks = [results.Remark("x", test, f"{test}, {name}", f"{name}, 2026-01-01") for test, name in names]
    assert report.make_tables(results.Results(remarks=remarks), "x") == "a, easydel\n\nb, easydel"


@pytest.mark.parametrize(("page_size", "num_pages"), [(4, 400), (4, 40), (16, 60)])
def test_ports_that_cache_late_decide_alike(page_size: int, num_pages: int) -> None:
    """Over pages in plain Python and over the manager, in chunks of prompts and with preemptions."""
    head = list(range(1000, 1040))
    prompts = [([*head[: 20 * (i % 3)], *range(100 * i, 100 * i + 9 + i)], 20 + i % 7) for i in range(1, 20)]
    computed = []
    for name in ("plain", "cache_pages", "computed"):
        late = Late(name, Settings(page_size, num_pages, max_num_reqs=8, max_num_new_tokens=64), prompts)
        late.prepare()
        late.run()
        assert late.page_ids == [len(tokens) + num_new for tokens, num_new in prompts]
        computed.append(late.num_computed_tokens)
    assert computed[0] == computed[1] == computed[2] < 2 * sum(len(tokens) for tokens, _ in prompts)


def test_a_port_with_the_default_manager_computes_equal_prompts_of_a_step_once() -> None:
    """nano-vllm's layers write the keys of a step before they read any."""
    prompts = [(list(range(40)), 20)] * 8
    ports = {name: Late(name, Settings(4, 60), prompts) for name in ("scheduled", "computed")}
    for port in ports.values():
        port.prepare()
        port.run()
        assert port.page_ids == [60] * 8
    assert ports["scheduled"].num_computed_tokens == 40 + 7 * 4
    assert ports["computed"].num_computed_tokens > 3 * 40
    assert ports["scheduled"].num_preempted == 0 < ports["computed"].num_preempted


def test_contrast() -> None:
    """And names of groups are text, not markup."""
    assert "decode <row>" not in speed.draw((speed.Group("decode <row>", {"easydel": 5.0}, {}),), "a caption")
    for name in {*speed.COLORS} - {"ground", "grid"}:
        for color, ground in zip(speed.COLORS[name], speed.COLORS["ground"], strict=True):
            assert contrast(color, ground) >= 4.5, name
