"""The limit: the same work in plain C, without checks and without Python, where its source and a compiler are at hand.

The source lies beside the repository and is not part of it. It is compiled to a temporary folder; each run prints nanoseconds
by the name of the work, medians of seven rounds, and takes some tenths of a second.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[2] / "shared" / "design" / "limit.c"


class Limit:
    """The compiled program and what its runs measured; nothing where it cannot be compiled."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "limit"
        self._runs: list[dict[str, float]] = []
        compiler = shutil.which("cc")
        self._is_there = compiler is not None and SOURCE.exists() and compiles(compiler, self._program)

    def measure(self) -> None:
        """Run it once more."""
        if self._is_there:
            run = subprocess.run([self._program], check=True, capture_output=True, timeout=60)
            self._runs.append(json.loads(run.stdout))

    def medians(self) -> Mapping[str, float]:
        """Return nanoseconds by the name of the work, medians of the runs so far."""
        names = self._runs[0] if self._runs else ()
        return {name: median(run[name] for run in self._runs) for name in names}


def compiles(compiler: str, program: Path) -> bool:
    command = [compiler, "-O3", "-march=native", str(SOURCE), "-o", str(program)]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
