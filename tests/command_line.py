"""The command line, called in this process, its traces and its figures, and its output on a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

CliRunner = pytest.importorskip("click.testing").CliRunner
pytest.importorskip("rich")
from pagepool.replay import TraceRecord  # noqa: E402  only with the extra
from pagepool.replay.command import pagepool  # noqa: E402

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def invoke(*args: object, **options: Any) -> Any:
    """Run `pagepool` with these arguments, in plain text."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(pagepool, [*map(str, args)], **options)


def figures_of(*args: object) -> dict[str, Any]:
    """Run a command, and return what it writes as JSON."""
    result = invoke(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def write_trace(path: Path, records: Iterable[TraceRecord]) -> Path:
    """Write records, without ids of answers, as a trace, and return its path."""
    lines = ({name: getattr(record, name) for name in FIELDS} for record in records)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def read_terminal(descriptor: int) -> bytes:
    """Read our end of a terminal until the other one is closed, and close it."""
    output = b""
    try:
        while chunk := os.read(descriptor, 4096):
            output += chunk
    except OSError:  # the other end is closed
        pass
    os.close(descriptor)
    return output
