"""Fixtures of the benchmarks (races, the limit, remarks), the tables at the end of a run, and the file of results."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.races.limit import Limit
from bench.races.race import Race, Result, as_tables
from bench.races.results import Remark, as_line, describe_machine, merge

RESULTS = pytest.StashKey[list[Result]]()
LIMIT = pytest.StashKey[Limit]()
REMARKS = pytest.StashKey[list[Remark]]()

sys.path.append(str(Path(__file__).parents[2] / "tests" / "models"))  # the oracle lives there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="Put the results into this file, in place of older ones.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []
    config.stash[REMARKS] = []


@pytest.fixture
def race(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Race]:
    """Return a race. The garbage collector is off before its contenders are made."""
    gc.collect()
    gc.disable()
    yield Race(benchmark, name_bench(request), request.config.stash[RESULTS])
    gc.enable()


@pytest.fixture(scope="session")
def limit(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Limit:
    """Return the compiled limit; the tables show the medians of its runs."""
    return pytestconfig.stash.setdefault(LIMIT, Limit(tmp_path_factory.mktemp("limit")))


@pytest.fixture
def remark(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that adds a remark, which is printed after the tables."""
    bench, test, remarks = name_bench(request), request.node.name, request.config.stash[REMARKS]
    return lambda text: remarks.append(Remark(bench, test, text))


def name_bench(request: pytest.FixtureRequest) -> str:
    return request.path.stem.removeprefix("bench_")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    limit = config.stash.get(LIMIT, None)
    tables = [as_tables(config.stash[RESULTS], limit.medians() if limit else {})] if config.stash[RESULTS] else []
    for text in (*tables, *(remark.text for remark in config.stash[REMARKS])):
        terminalreporter.write(f"\n\n{text}\n\n")
    path = config.getoption("results")
    if path is not None:
        merge(path, describe_machine(), [as_line(result) for result in config.stash[RESULTS]], config.stash[REMARKS])
