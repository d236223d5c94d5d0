"""The limit: the same work in plain C, without checks or Python, if its source and a compiler are available.

The source lies beside the repository and is not part of it. It is compiled in a temporary folder. It and `limit_work`, which
does the same with a running batch, run in turn. Each prints nanoseconds by the name of the work, medians of seven rounds, and
takes about a second.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[3] / "shared" / "design" / "limit.c"


class Limit:
    """Times of the compiled program and of the same work by a running batch. Empty if the program cannot be compiled."""

    def __init__(self, folder: Path) -> None:
        program = folder / "limit"
        compiler = shutil.which("cc")
        is_there = compiler is not None and SOURCE.exists() and compiles(compiler, program)
        self._commands = ([str(program)], [sys.executable, "-m", "bench.races.limit_work"]) if is_there else ()
        self._runs: list[list[dict[str, float]]] = []

    def measure(self) -> None:
        """Run both programs once more."""
        if self._commands:
            self._runs.append([run_json(command) for command in self._commands])

    def medians(self) -> Mapping[str, tuple[float, float]]:
        """Return the limit's nanoseconds and ours by the name of the work: medians of the runs so far."""
        names = self._runs[0][0] if self._runs else ()
        return {name: (self._median(0, name), self._median(1, name)) for name in names}

    def _median(self, which: int, name: str) -> float:
        return median(run[which][name] for run in self._runs)


def run_json(command: Sequence[str], folder: Path = Path(__file__).parents[2]) -> dict[str, float]:
    """Run a program in `folder`, which `bench.races.limit_work` needs for its imports, and return the JSON that it prints."""
    run = subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=folder)
    printed: dict[str, float] = json.loads(run.stdout)
    return printed


def compiles(compiler: str, program: Path) -> bool:
    command = [compiler, "-O3", "-march=native", str(SOURCE), "-o", str(program)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
