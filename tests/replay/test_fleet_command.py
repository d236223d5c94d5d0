"""`pagepool fleet`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("msgspec")
from command_line import figures_of, invoke, line_of, write_trace
from fleets import HAS_RAY, make_records
from sources import run_python


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl", make_records(1, seconds=120))


def test_figures_and_plot(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures_path = tmp_path / "figures.json"
    for name in ("fleet.png", "fleet.svg"):
        options = ["--router", "prefix", "--router", "round-robin", "--kill", "1@2", "--plot", tmp_path / name]
        result = invoke("fleet", trace, "--replicas", 3, "--num-pages", 600, *options, "--json", figures_path)
        assert result.exit_code == 0, result.output
        assert "3 replicas of 600 pages of 16 tokens" in result.stdout
        assert ["prefix", "round-robin"] in [line.split() for line in result.stdout.splitlines()]
    figures = json.loads(figures_path.read_text())
    assert [*figures] == ["prefix", "round-robin"]
    assert all((each["requests"], each["deaths"]) == (60, 1) for each in figures.values())
    assert len(figures["prefix"]["computed_tokens"]) == 3
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    assert "waited at most (s)" in (tmp_path / "fleet.svg").read_text()


def test_a_trace_that_idles_for_months(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [json.loads(line) for line in trace.read_text().splitlines()[:3]]
    trace.write_text("".join(line_of(**line | {"timestamp": i * 30 * 86_400_000}) for i, line in enumerate(lines)))
    figures = figures_of("fleet", trace, "--num-pages", 600, "--plot", tmp_path / "fleet.svg")
    assert all((each["requests"], each["end_seconds"] > 60 * 86_400) == (3, True) for each in figures.values())
    assert (tmp_path / "fleet.svg").stat().st_size < 1e6


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "no.such.host.invalid:1", "127.0.0.1:x", "127.0.0.1:99999999", "127.0.0.1:-1"]
)
def test_no_ray_at_the_address(trace: Path, address: str) -> None:
    code = "from pagepool.replay.command import pagepool; pagepool()"
    process = run_python("-c", code, "fleet", trace, "--ray", address, "--limit", 3, timeout=300)
    assert process.returncode == 1
    assert f"Error: Ray at {address}:" in process.stderr
    assert "Traceback" not in process.stderr.split("Error: Ray at")[1]
