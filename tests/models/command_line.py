"""The command line, called in this process, its traces and its figures, and its output on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CliRunner = pytest.importorskip("click.testing").CliRunner
pytest.importorskip("rich")
from pagepool.replay import TraceRecord  # noqa: E402  only with the extra
from pagepool.replay.command import pagepool  # noqa: E402

COMMANDS = ["fleet", "plan", "replay"]
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def invoke(*args: object, **options: Any) -> Any:
    """Run `pagepool` with these arguments, in plain text."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(pagepool, [*map(str, args)], **options)


def figures_of(*args: object, **options: Any) -> dict[str, Any]:
    """Run a command, and return what it writes as JSON."""
    result = invoke(*args, "--json", "-", **options)
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def refuse(exit_code: int, message: str, *args: object, **options: Any) -> Any:
    """Run a command that ends with this exit code, and with this in its output. Returns the result."""
    result = invoke(*args, **options)
    assert (result.exit_code, message in result.output) == (exit_code, True), result.output
    return result


def write_trace(path: Path, records: Iterable[TraceRecord]) -> Path:
    """Write records, without ids of answers, as a trace, and return its path."""
    lines = ({name: getattr(record, name) for name in FIELDS} for record in records)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def write_config(folder: Path, config: object) -> Path:
    """Write the configuration of a model into a folder, and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def line_of(**changes: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]} | changes) + "\n"


class Page(HTMLParser):
    """Collects open tags, captions, column headings, and everything that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)
        links = {"src", "href", "xlink:href", "data", "action"}
        self.fetched += [str(value) for name, value in attrs if name in links and not str(value).startswith("#")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
