"""The command line, called in this process, and its output on a terminal."""

from __future__ import annotations

import os
from typing import Any

import pytest

CliRunner = pytest.importorskip("click.testing").CliRunner
pytest.importorskip("rich")
from pagepool.replay.command import pagepool  # noqa: E402  only with the extra


def invoke(*args: object, **options: Any) -> Any:
    """Run `pagepool` with these arguments, in plain text."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(pagepool, [*map(str, args)], **options)


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
