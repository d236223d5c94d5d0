"""The file of hits: what `windows` and `windows_cases` measured, line by line. Needs no package, not even pagepool.

A run replaces the cells that it measured, and leaves the others, so that lines can be measured one at a time and in several
environments. Hits do not depend on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bench.tables import as_table

HITS = Path(__file__).parents[1] / "hits.json"
COLUMNS = (
    *("LRU, all", "LRU, ends", "adaptive, all", "adaptive, ends", "vLLM"),
    *("alone", "alone in its share", "LRU", "adaptive", "close", "expected", "wrong by 4.5", "half vanish", "no truth"),
    *("half tell", "one-shots never", "shares", "two pools", "scheduler", "an array for each layer", "never", "always", "rule"),
)
"""The columns of all tables, in order."""

TO_FIRST_TOKEN = "mean ms until the first token"
"""What `loading` measures, of requests."""

Table = Mapping[str, Mapping[str, float]]
"""The figure of a line and column."""


def read(path: Path = HITS) -> dict[str, Table]:
    """Read the tables by name; none without a file."""
    tables: dict[str, Table] = json.loads(path.read_text()) if path.exists() else {}
    return tables


def merge(path: Path, name: str, table: Table) -> Table:
    """Put the lines of a run into a table of the file, which need not exist. Returns the whole table."""
    tables = read(path)
    merged = dict(tables.get(name, {}))
    for line, cells in table.items():
        merged[line] = {**merged.get(line, {}), **cells}
    tables[name] = merged
    path.write_text(json.dumps(tables, indent=1) + "\n")
    return merged


def show(title: str, table: Table) -> str:
    """Return a table in GitHub's form, with the columns that were measured."""
    columns = [column for column in COLUMNS if any(column in cells for cells in table.values())]
    lines = [
        [line, *(f"{cells[column]:,.1f}" if column in cells else "-" for column in columns)] for line, cells in table.items()
    ]
    return as_table((title, *columns), lines)
