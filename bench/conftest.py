"""The `race` fixture of the benches, and the table of all races at the end of a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.race import Race, Result, as_table

RESULTS = pytest.StashKey[list[Result]]()

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the oracle lives there


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


@pytest.fixture
def race(benchmark: Any, pytestconfig: pytest.Config) -> Iterator[Race]:
    """Run a race, with the garbage collector off from before its contenders are made."""
    gc.collect()
    gc.disable()
    yield Race(benchmark, pytestconfig.stash[RESULTS])
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[RESULTS]:
        terminalreporter.write(f"\n\n{as_table(config.stash[RESULTS])}\n\n")
