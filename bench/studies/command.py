"""The command line of studies: which lines and columns they measure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.studies.hits import COLUMNS


class Chosen:
    """What the words of a command line choose: all where there are none."""

    def __init__(self, words: Sequence[str]) -> None:
        self._columns = [word for word in words if word in COLUMNS]
        self._parts = [word for word in words if word not in COLUMNS]

    def has_column(self, column: str) -> bool:
        return not self._columns or column in self._columns

    def has_line(self, name: str) -> bool:
        return not self._parts or any(part in name for part in self._parts)


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command line of a benchmark of hits."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.studies.{name}")
    parser.add_argument("words", nargs="*", help="names of columns, and parts of the names of lines")
    parser.add_argument("--results", type=Path, help="the file that the figures are put into, such as bench/hits.json")
    return parser
