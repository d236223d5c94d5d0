"""What operators read: every command runs, and prints what the document shows unless that needs the real trace."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from sources import ROOT, run_python

for package in ("click", "rich", "msgspec", "matplotlib"):
    pytest.importorskip(package)
from command_line import invoke, line_of, write_trace  # noqa: E402  only with the extras
from fleets import HAS_RAY, make_records  # noqa: E402
from model_configs import GEMMA3, LLAMA, QWEN  # noqa: E402
from model_families import WHISPER  # noqa: E402

DOCS = ROOT / "docs"
TRACES = DOCS / "request_traces.md"
STAND_INS = {"trace.jsonl", "agents.jsonl"}
DOCUMENTS = [
    DOCS / f"{name}.md" for name in ("eviction", "request_traces", "routers", "sizing", "sizing_host", "sizing_models")
]


class Example(NamedTuple):
    """A command in a document, and its output; None if it is not shown."""

    command: str
    output: str | None


def read_examples() -> list[Example]:
    text = "".join(path.read_text() for path in DOCUMENTS if path.exists())
    examples = []
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind == "sh":
            commands = [line.partition("  #")[0].strip() for line in block.splitlines()]
            examples += [Example(command, None) for command in commands if command.startswith("pagepool ")]
        else:
            parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
            examples += [Example(command, output) for command, output in zip(parts[::2], parts[1::2], strict=True)]
    return examples


EXAMPLES = read_examples()


@pytest.fixture(scope="module")
def recording() -> Path:
    """What the page about traces records."""
    test = doctest.DocTestParser().get_doctest(TRACES.read_text(), {}, "recording", None, 0)
    assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
    return Path(test.globs["path"])


@pytest.fixture
def folder(tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name; small traces stand for the real ones."""
    monkeypatch.chdir(tmp_path)
    trace = write_trace(Path("trace.jsonl"), make_records(1, seconds=300))
    Path("agents.jsonl").write_text("".join(line_of(timestamp=time, session_id="agent") for time in range(3)))
    Path("cut.jsonl").write_text("".join(trace.read_text().splitlines(keepends=True)[:4]) + '{"timestamp": 1, ')
    Path("empty.jsonl").touch()
    Path("config.json").write_text(json.dumps(LLAMA))
    Path("hybrid.json").write_text(json.dumps(QWEN))
    Path("whisper.json").write_text(json.dumps(WHISPER))
    Path("gemma3.json").write_text(json.dumps(GEMMA3))
    shutil.copy(recording, "recorded.jsonl.gz")
    return tmp_path


def run_apart(command: list[str]) -> None:
    """Run a command that needs Ray, which forks, in a process without the threads of jax."""
    if not HAS_RAY:
        pytest.skip("ray is not installed")
    code = "from pagepool.replay.cli import main; main()"
    process = run_python("-c", code, *command[1:], timeout=300)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=example.command, marks=[pytest.mark.slow] if "--ray" in example.command else [])
        for example in EXAMPLES
    ],
)
def test_a_command(example: Example, folder: Path) -> None:
    command = shlex.split(example.command)
    if "--ray" in command:
        run_apart(command)
        return
    result = invoke(*command[1:])
    is_error = example.output is not None and re.search(r"^Error: ", example.output, re.MULTILINE) is not None
    assert (result.exit_code != 0) is is_error, result.output
    if example.output is not None and not STAND_INS & {*command}:
        got = result.stderr if is_error else "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # columns are as wide as the omitted times
        assert doctest.OutputChecker().check_output(example.output, got, options), f"{got}\n{example.output}"


def test_there_are_commands() -> None:
    if not TRACES.exists():
        pytest.skip("the documents are not here")
    assert {example.command.split()[1] for example in EXAMPLES} == {"fleet", "plan", "replay"}
