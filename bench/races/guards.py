"""The cost of the guards in hot loops: ``python -m bench.races.guards`` builds the core with and without them and runs both.

The builds run `bench.races.limit_work` in turn, each time in a new process. The table has both medians, and the median of the
quotients of neighbouring runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from bench.races.limit import run_json

ROOT = Path(__file__).parents[2]
BUILDS = {"with": {}, "without": {"PAGEPOOL_UNGUARDED": "1"}}


def build(folder: Path, switches: dict[str, str]) -> Path:
    """Copy the sources to `folder`, build the core there, and return the folder."""
    for name in ("pagepool", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env={**os.environ, **switches}, check=True, capture_output=True)
    return folder


def measure(folders: list[Path], num_rounds: int) -> list[list[dict[str, float]]]:
    """Return nanoseconds by the name of the work, for each round and build. The first build alternates between rounds."""
    command = [sys.executable, "-m", "bench.races.limit_work"]
    rounds = []
    for i in range(num_rounds):
        order = folders if i % 2 else folders[::-1]
        runs = {folder: run_json(command, folder) for folder in order}
        rounds.append([runs[folder] for folder in folders])
    return rounds


def report(rounds: list[list[dict[str, float]]]) -> Table:
    table = Table("work", "with guards, ns", "without, ns", "quotient")
    for name in rounds[0][0]:
        pairs = [(guarded[name], unguarded[name]) for guarded, unguarded in rounds]
        guarded, unguarded = (median(values) for values in zip(*pairs, strict=True))
        table.add_row(name, f"{guarded:.1f}", f"{unguarded:.1f}", f"{median(a / b for a, b in pairs):.3f}")
    return table


@click.command()
@click.option("--rounds", "num_rounds", default=15, show_default=True, help="Number of runs of each build.")
def main(num_rounds: int) -> None:
    """Build both, run them in turn, print a table."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [build(Path(temporary) / name, switches) for name, switches in BUILDS.items()]
        Console().print(report(measure(folders, num_rounds)))


if __name__ == "__main__":
    main()
