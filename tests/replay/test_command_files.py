"""Input and output files of commands: different files, whole results, and a message if that is impossible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("msgspec")
from command_line import COMMANDS, invoke, line_of, refuse
from model_configs import LLAMA
from sources import run_python

LINE = line_of()


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace in the current folder, by its own name, by links, and through a link to a folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("trace.jsonl")
    path.write_text(LINE * 3)
    Path("symbolic.jsonl").symlink_to("trace.jsonl")
    Path("hard.jsonl").hardlink_to(path)
    Path("folder").symlink_to(".")
    return path


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("pagepool.replay.traces.options.load_records", fail)


@pytest.mark.usefixtures("_no_work")
class TestFilesApart:
    """The command exits before any work, with both names; no file is changed."""

    def check(self, args: list[str], one: str, other: str) -> None:
        before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
        result = invoke(*args)
        assert result.exit_code == 2, result.output
        assert result.output.endswith(f"Error: {one} is the same file as {other}\n")
        assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before

    @pytest.mark.parametrize("name", ["./trace.jsonl", "symbolic.jsonl", "hard.jsonl", "folder/trace.jsonl"])
    def test_an_output_that_is_the_trace(self, name: str) -> None:
        self.check(["replay", "trace.jsonl", "--json", name], f"--json {name}", "TRACE trace.jsonl")
        self.check(["replay", name, "--json", "trace.jsonl"], "--json trace.jsonl", f"TRACE {name}")
        path = Path(name).absolute()
        self.check(["plan", "trace.jsonl", "--html", str(path)], f"--html {path}", "TRACE trace.jsonl")

    @pytest.mark.parametrize("command", ["fleet", "plan"])
    def test_a_plot_that_is_the_trace(self, command: str) -> None:
        Path("trace.svg").write_text(LINE)
        self.check([command, "trace.svg", "--plot", "./trace.svg"], "--plot ./trace.svg", "TRACE trace.svg")

    def test_the_configuration_of_a_model(self) -> None:
        Path("config.json").write_text(json.dumps(LLAMA))
        args = ["plan", "trace.jsonl", "--model-config", "config.json", "--json", "folder/config.json"]
        self.check(args, "--json folder/config.json", "--model-config config.json")

    def test_two_outputs(self) -> None:
        self.check(["plan", "trace.jsonl", "--plot", "a.svg", "--html", "a.svg"], "--html a.svg", "--plot a.svg")
        self.check(["plan", "trace.jsonl", "--plot", "a.svg", "--json", "folder/a.svg"], "--json folder/a.svg", "--plot a.svg")
        self.check(["plan", "trace.jsonl", "--html", "-", "--json", "-"], "--json -", "--html -")
        Path("b.svg").symlink_to("a.svg")  # which does not exist
        for _ in range(2):
            self.check(["fleet", "trace.jsonl", "--plot", "b.svg", "--json", "a.svg"], "--json a.svg", "--plot b.svg")
            Path("a.svg").touch()


class TestStandardStreams:
    """Files opened by the shell count too."""

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            ("- --json hard.jsonl < trace.jsonl", 2, "--json hard.jsonl is the same file as TRACE -"),
            ("trace.jsonl --json - >> trace.jsonl", 2, "--json - is the same file as TRACE trace.jsonl"),
            ("trace.jsonl >> trace.jsonl", 2, "standard output is the same file as TRACE trace.jsonl"),
            ("trace.jsonl > /dev/full", 1, "standard output cannot be written: No space left on device"),
            ("trace.jsonl --json - > /dev/full", 1, "standard output cannot be written: No space left on device"),
            ("trace.jsonl >&-", 1, "standard output cannot be written: it is closed"),
            ("trace.jsonl --json - >&-", 1, "standard output cannot be written: it is closed"),
            ("- <&-", 2, "<stdin>: standard input is closed"),
        ],
    )
    def test_redirections(self, arguments: str, code: int, message: str) -> None:
        if "/dev/full" in arguments and not Path("/dev/full").exists():
            pytest.skip("there is no device that is always full")
        shell = ["sh", "-c", f"{sys.executable} -m pagepool replay {arguments}"]
        result = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (code, f"Error: {message}")
        assert Path("trace.jsonl").read_text() == LINE * 3

    def test_devices_are_shared_and_a_page_stands_alone(self) -> None:
        assert invoke("replay", "trace.jsonl", "--json", os.devnull).exit_code == 0
        pytest.importorskip("matplotlib")
        result = invoke("plan", "trace.jsonl", "--html", "-", "--json", os.devnull)
        assert result.exit_code == 0
        assert result.stdout.startswith("<!DOCTYPE html>")
        assert result.stdout.endswith("</html>\n")


@pytest.mark.usefixtures("_no_work")
class TestPlacesForResults:
    """The command exits before any work if possible."""

    @pytest.mark.parametrize(
        ("path", "exit_code", "message"),
        [
            (".", 2, "File '.' is a directory."),
            ("new/", 2, "'new/' is not the name of a file."),
            ("", 2, "'' is not the name of a file."),
            ("no/figures.json", 1, "no/figures.json cannot be written: No such file or directory"),
            ("trace.jsonl/figures.json", 1, "trace.jsonl/figures.json cannot be written: Not a directory"),
            (f"{'x' * 300}.json", 1, "cannot be written: File name too long"),
        ],
    )
    def test_nowhere(self, path: str, exit_code: int, message: str) -> None:
        for command in COMMANDS:
            result = invoke(command, "trace.jsonl", "--json", path)
            assert (result.exit_code, result.output.endswith(f"{message}\n")) == (exit_code, True), result.output


class TestStrangeTraces:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_sentence(self, command: str) -> None:
        Path("binary.jsonl").write_bytes(bytes(range(256)) * 100)
        for name, message in {
            ".": "File '.' is a directory.",
            "none.jsonl": "File 'none.jsonl' does not exist.",
            "binary.jsonl": "Error: binary.jsonl:1: not valid JSON: ",
            "/dev/null": "Error: /dev/null:1: the trace is empty",
            "-": "Error: <stdin>:1: the trace is empty",
            "/proc/self/mem": "Error: /proc/self/mem: Input/output error",
        }.items():
            if name == "/proc/self/mem" and not Path(name).exists():
                continue
            refuse(2, message, command, name, input=b"")

    def test_names_that_are_no_text(self, trace: Path) -> None:
        name = os.fsdecode(b"a\xff.jsonl")
        try:
            Path(name).write_bytes(trace.read_bytes())
        except OSError:
            pytest.skip("the file system takes no such names")
        result = run_python("-m", "pagepool", "replay", name)
        assert (result.returncode, result.stdout.splitlines()[0][:8]) == (0, "a\N{REPLACEMENT CHARACTER}.jsonl")
        pytest.importorskip("matplotlib")
        assert invoke("plan", name, "--html", "a.html").exit_code == 0

    def test_names_that_the_terminal_cannot_show(self, trace: Path) -> None:
        Path("ü:smile:[bold].jsonl").write_bytes(trace.read_bytes())
        result = run_python("-m", "pagepool", "replay", "ü:smile:[bold].jsonl", PYTHONIOENCODING="ascii")
        assert result.returncode == 0
        assert result.stdout.startswith("\\xfc:smile:[bold].jsonl, 32,768 pages of 16 tokens\n")
