"""Behaviour common to all commands: sizes, help, progress, memory, and singular and plural."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("msgspec")
from command_line import COMMANDS, invoke, refuse, write_trace
from sources import UNSANITIZED, run_python

from pagepool.errors import ArgumentError, count_of
from pagepool.replay import TraceRecord
from pagepool.replay.shared import memory
from pagepool.replay.shared.sizes import BYTE_UNITS, COUNT_UNITS, parse_number

COMMON = ["num-pages", "page-size", "block-size", "max-batched-tokens", "max-num-seqs", "limit"]
COUNTS = {"fleet": ["replicas", "prefill-rate", *COMMON], "plan": ["bytes-per-token", *COMMON], "replay": COMMON}
OPTIONS = [(command, f"--{option}") for command, options in COUNTS.items() for option in options]


def write_lengths(path: Path, *lengths: tuple[int, int]) -> Path:
    """Write a trace with a request for each pair of lengths; no two share tokens."""
    ids = ((*range(1000 * i, 1000 * i + -(-prompt // 512)),) for i, (prompt, _) in enumerate(lengths))
    return write_trace(path, [TraceRecord(i, *lengths[i], each) for i, each in enumerate(ids)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_lengths(tmp_path / "trace.jsonl", (600, 3), (600, 3), (9600, 1))


class TestSizes:
    @pytest.mark.parametrize(("command", "option"), OPTIONS)
    def test_units_are_taken_by_all_counts_and_neither_0_nor_bytes(self, command: str, option: str, trace: Path) -> None:
        base = [command, trace, *(["--replicas", 1] if command == "fleet" and option != "--replicas" else [])]
        values = {"--page-size": "0.016k", "--block-size": "0.512k", "--replicas": "0.001K", "--bytes-per-token": "1.5kB"}
        result = invoke(*base, option, values.get(option, "1.5k"))
        assert result.exit_code == 0, result.output
        message = f"Error: Invalid value for '{option}': 0k is not in the range x>=1.\n"
        assert refuse(2, message, command, trace, option, "0k").output.endswith(message)
        if option != "--bytes-per-token":
            refuse(2, f"'{option}': '40GiB' is in bytes, units allowed: none, k, M, G.", command, trace, option, "40GiB")

    def test_bytes(self, trace: Path) -> None:
        for bytes_per_token in ("131072", "128KiB", "128kib"):
            result = invoke("plan", trace, "--memory", "1GiB,2gib", "--bytes-per-token", bytes_per_token, "--json", "-")
            assert [pool["num_pages"] for pool in json.loads(result.stdout)["pools"]] == [512, 1024]
        for text, message in (("40", "'40' has no unit, units allowed: B, kB, "), ("0GiB", "0GiB is not in the range x>=1.")):
            refuse(2, message, "plan", trace, "--memory", text, "--bytes-per-token", 1)
        assert parse_number("2MIB", BYTE_UNITS) == 2 << 20

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "'' is not a number"),
            ("1e3", "'1e3' is not a number"),
            ("1.0005k", "1.0005k is not a whole number"),
            ("-5", "-5 is not in the range x>=1"),
            ("9" * 300, f"{'9' * 300} is not in the range x<={10**18}"),
            ("9" * 10_000, "is not a number"),
            ("1T", "'1T' has the unit 'T', units allowed: none, k, M, G"),
            ("\N{ARABIC-INDIC DIGIT ONE}", "is not a number"),
        ],
    )
    def test_what_is_no_count(self, text: str, reason: str) -> None:
        with pytest.raises(ArgumentError, match=re.escape(reason)):
            parse_number(text, COUNT_UNITS)

    @pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
    def test_seconds_are_numbers(self, value: str, trace: Path) -> None:
        for option in ("--decode-seconds", "--report-seconds"):
            refuse(2, f"'{value}' is not a number of seconds.", "fleet", trace, option, value)
        refuse(2, f"'0@{value}' is not at 0 seconds or later", "fleet", trace, "--kill", f"0@{value}")


class TestNothingCanRun:
    """Exit code 1, a message, and no result."""

    @pytest.mark.parametrize("command", [["fleet"], ["replay"], ["replay", "--compare"], ["plan", "--num-pages", "10,20"]])
    def test_no_request_fits(self, command: list[str], trace: Path, tmp_path: Path) -> None:
        pages = ["--num-pages", "20"] if "--num-pages" not in command else []
        result = invoke(*command, trace, *pages, "--json", tmp_path / "figures.json")
        smallest = "the smallest of 3 requests needs 39 pages, including the null page\n"
        assert result.output.endswith(f"Error: no request can run in 20 pages of 16 tokens: {smallest}")
        assert (result.exit_code, result.stdout) == (1, "")
        assert [*tmp_path.iterdir()] == [trace]
        enough = ["--num-pages", "39"] if pages else ["--num-pages", "10,39"]
        assert invoke(*command, trace, *enough).exit_code == 0


PREPARE_RUNS = """
import os
from pagepool.replay import *
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.simulation.runs import make_manager, make_scheduler
records = [TraceRecord(0, 512 * 100, 1, tuple(range(100 * i, 100 * i + 100))) for i in range(400)]
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""
RUN_POOL = """
requests = make_requests(records)
def run(n):
    s = make_scheduler(make_manager(n, ModelPages(), requests), requests, max_batched_tokens=60_000, max_num_seqs=1)
    return s, s.run()
run(4000); before = rss(); s, figures = run(1_300_000); assert not figures.evicted_pages; print(rss() - before)
"""
RUN_TIER = """
tiers = []; make = HostMemory.make_tier
HostMemory.make_tier = lambda host: tiers.append(make(host)) or tiers[-1]
run = PolicySimulator(make_requests(records[:300]), ModelPages(16)).run_with_host
run(4000, HostMemory(4000)); before = rss(); run(4000, HostMemory(900_000)); print(rss() - before)
"""


class TestMemory:
    """Exit code 1, and a message with sizes."""

    @pytest.fixture
    def _little_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        system = tmp_path / "meminfo"
        system.write_text("MemTotal:  9999999 kB\nMemAvailable:    204800 kB\nSwapFree:       1024 kB\n")
        monkeypatch.setattr(memory, "SYSTEM", system)

    @pytest.mark.usefixtures("_little_memory")
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["replay"], "1 pool of 4,000,000 pages of 16 tokens would take 244.1 MiB"),
            (["replay", "--compare"], "2 pools of 4,000,000 pages of 16 tokens would take 488.3 MiB"),
            (["replay", "--compare-eviction"], "2 pools of 4,000,000 pages of 16 tokens would take 526.4 MiB"),
            (["fleet", "--replicas", "1k"], "1,000 replicas of 4,000,000 pages of 16 tokens would take 715.3 GiB"),
            (["plan", "--replays", "1"], "a replay in 4,000,000 pages of 16 tokens would take 244.1 MiB"),
            (["replay", "--limit", "1M"], "1,000,000 requests of synthetic chats would take 953.7 MiB"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_it_is_made(self, args: list[str], message: str, trace: Path) -> None:
        sizes = ["--num-pages", "4M,5M" if args[0] == "plan" else "4M"]
        result = invoke(*args, *([] if "--limit" in args else [trace, *sizes]))
        assert result.exit_code == 1
        assert result.output == f"Error: out of memory: {message}, 201.0 MiB are available\n"

    @pytest.mark.parametrize(
        ("limit", "use", "available"), [("104857600", 1 << 20, 99 << 20), ("max", 0, 201 << 20), ("1000", 2000, 0)]
    )
    @pytest.mark.usefixtures("_little_memory")
    def test_the_limit_of_a_container(
        self, limit: str, use: int, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "limit").write_text(f"{limit}\n")
        (tmp_path / "use").write_text(f"anon_thp 5\nanon {use}\nfile 7\n")
        container = memory.Container(tmp_path / "limit", tmp_path / "use", "anon")
        monkeypatch.setattr(memory, "CONTAINERS", (container,))
        assert memory.count_available_bytes() == available

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what is resident")
    @UNSANITIZED
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("code", "counted"),
        [(RUN_POOL, memory.count_pool_bytes(1_300_000)), (RUN_TIER, memory.count_tier_bytes(900_000, 4000))],
        ids=["pool", "tier"],
    )
    def test_a_pool_takes_about_what_is_counted(self, code: str, counted: int) -> None:
        """The pool has all of its pages cached, the tier nearly all."""
        taken = int(run_python("-c", PREPARE_RUNS + code).stdout)
        assert 0.4 * counted < taken < 1.2 * counted

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space so")
    @UNSANITIZED
    def test_an_address_space_that_is_short(self, trace: Path) -> None:
        code = (
            "import resource; from pagepool.replay.cli import main; from pagepool.replay.shared import memory\n"
            "memory.count_available_bytes = lambda: 1 << 60\n"
            "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, resource.RLIM_INFINITY))\n"
            "main()"
        )
        message = "a pool of 100,000,000 pages of 16 tokens takes 6.0 GiB: 100000000 page records"
        result = run_python("-c", code, "replay", trace, "--num-pages", "100M")
        assert result.returncode == 1
        assert re.fullmatch(rf"Error: out of memory: .*{re.escape(message)}\n", result.stderr), result.stderr

    @pytest.mark.parametrize("command", COMMANDS)
    def test_long_work_ends_before_the_kernel_ends_it(self, command: str, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pagepool.replay.shared.progress.BAR_SECONDS", 0.0)
        monkeypatch.setattr(memory, "MIN_LEFT_BYTES", 1 << 60)
        result = invoke(command, trace)
        assert result.exit_code == 1
        assert re.fullmatch(
            r"Error: out of memory: .*trace\.jsonl \(.* B\) is too large for the memory: --limit takes the first N requests; "
            r"[\d.,]+ [MG]iB are in use, [\d.,]+ [MGT]iB are left\n",
            result.output,
        )


def run(columns: int, *args: str) -> str:
    """Return what a command prints where lines have so many columns."""
    result = invoke(*args, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return str(result.stdout)


class TestHelp:
    @pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)], ids=str)
    def test_it_fits_and_is_whole(self, command: list[str]) -> None:
        narrow, wide = run(40, *command, "--help"), run(80, *command, "--help")
        for output, columns in ((narrow, 40), (wide, 80)):
            assert max(map(len, output.splitlines())) <= columns
            assert "..." not in output.replace("[ARGS]...", "")
        assert re.sub(r"[\s-]", "", narrow) == re.sub(r"[\s-]", "", wide)
        if not command:
            assert "fleet Simulate TRACE on a fleet of engines under each routing policy. plan " in " ".join(wide.split())


class TestNarrowTerminals:
    @pytest.mark.parametrize(
        "command", [["fleet", "--replicas", "1"], ["plan", "--num-pages", "10:100k"], ["replay", "--compare"]]
    )
    def test_no_figure_is_cut(self, command: list[str], trace: Path) -> None:
        def figures(columns: int) -> list[str]:
            output = run(columns, *command, str(trace))
            assert "…" not in output
            return [word for word in output.split() if re.fullmatch(r"[\d,.]+%?", word)]

        narrow, wide = figures(30), figures(200)
        assert len(narrow) == len(wide)
        assert narrow == wide or command[0] == "replay"  # which is timed


def test_one_and_many(tmp_path: Path) -> None:
    """Titles, messages and errors name one thing in the singular."""
    assert [count_of(number, "page") for number in (0, 1, 2, 1234567)] == ["0 pages", "1 page", "2 pages", "1,234,567 pages"]
    one = write_lengths(tmp_path / "one.jsonl", (1, 1))
    options = ["--page-size", 1, "--num-pages", 2]
    for command in COMMANDS:
        assert not re.search(r"\b1 \w+s\b", invoke(command, one, *options).output)
    assert f"{one}: 1 replica of 2 pages of 1 token\n" in invoke("fleet", one, *options, "--replicas", 1).stdout
    plan = invoke("plan", one, *options, "--bytes-per-token", 1).stdout
    assert plan.startswith(f"{one}: 1 request, 1 prompt token, pages of 1 token and 1 B\n")
    assert "no pool of 1 page of 16 tokens: num_pages: got 1, which" in invoke("replay", one, "--num-pages", 1).stderr


class TestProgress:
    def run_on_a_terminal(self, columns: int, *args: object) -> str:
        """Return the output on a terminal that is only standard error."""
        pty = pytest.importorskip("pty")
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pagepool", *map(str, args)]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "50"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
            os.close(theirs)
            output = b""
            with suppress(OSError):  # the other end is closed
                while chunk := os.read(ours, 4096):
                    output += chunk
            os.close(ours)
            assert process.stdout is not None
            assert b"\x1b" not in process.stdout.read()
        assert process.returncode == 0
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.decode())

    @pytest.mark.parametrize(
        ("args", "parts"),
        [
            (["replay", "--compare"], ["manager: requests", "batched: requests"]),
            (["plan", "--replays", "1"], ["one after another: requests", "pages: requests"]),
            (["fleet", "--replicas", "1"], ["round-robin: requests", "least-loaded: requests", "prefix: requests"]),
        ],
    )
    def test_every_bar_ends_at_100_percent(self, args: list[str], parts: list[str], trace: Path) -> None:
        """One of three requests is skipped."""
        pages = ["--num-pages", "50,60" if args[0] == "plan" else "50"]
        output = self.run_on_a_terminal(40, args[0], trace, *args[1:], *pages)
        for part in ["reading the trace: lines", *parts]:
            [*_, last] = [line for line in re.split(r"[\r\n]+", output) if part in line]
            assert "100%" in last

    @pytest.mark.parametrize("command", [["fleet", "--replicas", 1], ["plan", "--replays", 1], ["replay"]])
    def test_long_work_writes_lines_where_there_is_no_terminal(
        self, command: list[object], trace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pagepool.replay.shared.progress.LINE_SECONDS", 0.0)
        monkeypatch.setattr("pagepool.replay.shared.progress.monotonic", lambda: 0.0)
        result = invoke(command[0], trace, *command[1:], "--num-pages", "50,60" if command[0] == "plan" else 50, "--json", "-")
        assert result.exit_code == 0
        json.loads(result.stdout)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("skipped")]
        assert all(re.fullmatch(r"[\w -]+(, \d+ pages)?: [\d,]+ (of [\d,]+ )?\w+( \(\d+%\))?, \d+ s", line) for line in lines)
        assert lines[0] == "reading the trace: 1 line, 0 s"
        assert lines[-1].endswith("(100%), 0 s")
        assert "\x1b" not in result.stderr


PLOTS_NEED = "Error: plots need matplotlib: pip install 'pagepool[plan]'"
INSTALL_REPLAY = "pip install 'pagepool[replay]'; `pagepool doctor` works without"


class TestWithoutExtras:
    def run(self, args: list[str], *missing: str, **options: Any) -> subprocess.CompletedProcess[str]:
        hidden = f"import runpy, sys; sys.modules.update(dict.fromkeys({[*missing]}))"
        return run_python("-c", f"{hidden}; runpy.run_module('pagepool', run_name='__main__')", *args, **options)

    def test_the_version_needs_none(self) -> None:
        with_extras = self.run(["--version"])
        result = self.run(["--version"], "click", "rich", "matplotlib", "msgspec", "ray")
        assert (result.returncode, result.stdout, result.stderr) == (0, with_extras.stdout, "")
        assert re.fullmatch(r"pagepool, version \d+\.\d+\.\d+\S*\n", result.stdout)

    @pytest.mark.parametrize(
        ("args", "name", "error"),
        [
            (["--help"], "click", f"pagepool: the command needs click: {INSTALL_REPLAY}"),
            (["plan", "x"], "rich", f"pagepool: the command needs rich: {INSTALL_REPLAY}"),
            (["fleet", "trace.jsonl"], "msgspec", "Error: the fleet needs msgspec: pip install 'pagepool[fleet]'"),
            (["plan", "trace.jsonl", "--plot", "a.png"], "matplotlib", PLOTS_NEED),
            (["plan", "trace.jsonl", "--html", "a"], "matplotlib", PLOTS_NEED),
        ],
    )
    def test_all_else_says_in_a_line_which_is_missing(self, args: list[str], name: str, error: str, trace: Path) -> None:
        result = self.run(args, name, cwd=trace.parent)
        assert (result.returncode, result.stdout, result.stderr) == (1, "", f"{error}\n")
        assert [*trace.parent.iterdir()] == [trace]

    def test_what_is_missing_else_is_not_taken_for_an_extra(self) -> None:
        result = self.run(["--help"], "pagepool.replay.simulation.report")
        assert result.returncode == 1
        assert "ModuleNotFoundError" in result.stderr
        assert "pip install" not in result.stderr
