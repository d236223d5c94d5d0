"""Fixtures of the benchmarks (races, the limit, remarks), and the tables at the end of a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.limit import Limit
from bench.race import Race, Result, as_tables

RESULTS = pytest.StashKey[list[Result]]()
LIMIT = pytest.StashKey[Limit]()
REMARKS = pytest.StashKey[list[str]]()

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the oracle lives there


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []
    config.stash[REMARKS] = []


@pytest.fixture
def race(benchmark: Any, pytestconfig: pytest.Config) -> Iterator[Race]:
    """Return a race. The garbage collector is off before its contenders are made."""
    gc.collect()
    gc.disable()
    yield Race(benchmark, pytestconfig.stash[RESULTS])
    gc.enable()


@pytest.fixture(scope="session")
def limit(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Limit:
    """Return the compiled limit; the tables show the medians of its runs."""
    return pytestconfig.stash.setdefault(LIMIT, Limit(tmp_path_factory.mktemp("limit")))


@pytest.fixture
def remarks(pytestconfig: pytest.Config) -> list[str]:
    """Return the list of remarks printed after the tables."""
    return pytestconfig.stash[REMARKS]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    limit = config.stash.get(LIMIT, None)
    tables = [as_tables(config.stash[RESULTS], limit.medians() if limit else {})] if config.stash[RESULTS] else []
    for text in (*tables, *config.stash[REMARKS]):
        terminalreporter.write(f"\n\n{text}\n\n")
