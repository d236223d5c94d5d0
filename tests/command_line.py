"""The command line, called in this process."""

from __future__ import annotations

from typing import Any

import pytest

CliRunner = pytest.importorskip("click.testing").CliRunner
pytest.importorskip("rich")
from pagepool.replay.command import pagepool  # noqa: E402  only with the extra


def invoke(*args: object, **options: Any) -> Any:
    """Run `pagepool` with these arguments, in plain text."""
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(pagepool, [*map(str, args)], **options)
