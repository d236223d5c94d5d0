"""The file of results: what each race measured, on which machine, with which versions.

A run replaces the lines that an earlier run in the same environment has of the same works, and leaves the others. EasyDeL's,
vLLM's and the developers' environment are three: their lines stand side by side, and each has its own ratios.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.races.race import Result

RESULTS = Path(__file__).parents[1] / "results.json"
ENGINES = ("easydel", "vllm")
"""The packages that an environment is named after. One with neither is the developers'."""
PACKAGES = (*ENGINES, "jax", "numpy")
MACHINE = ("cpu", "cores", "os", "python", "pagepool", *PACKAGES, "date")

Setup = Mapping[str, Any]
"""What `MACHINE` names, except for packages that are not installed."""


@dataclass(frozen=True)
class Line:
    """The times of a unit of work by rival, in the unit `time`: medians and quartiles, and ratios to ours.

    `unit` is empty if the name of the work says it.
    """

    bench: str
    work: str
    unit: str
    time: str
    ours: str
    medians: Mapping[str, float]
    quartiles: Mapping[str, Sequence[float]]
    ratios: Mapping[str, float]
    setup: str = ""


@dataclass(frozen=True)
class Remark:
    """A text that a test left: a sentence or a table."""

    bench: str
    test: str
    text: str
    setup: str = ""


@dataclass
class Results:
    """The content of the file. Setups are by names that begin with their environment."""

    setups: dict[str, Setup] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)


def environment_of(setup: str) -> str:
    """Return the environment of a setup: ``"easydel"``, ``"vllm"`` or ``"pagepool"``.

    >>> environment_of("vllm, 2026-11-23")
    'vllm'
    """
    return setup.partition(",")[0]


def as_line(result: Result) -> Line:
    """Return what a race measured, with four digits."""
    work, suite = result.work, result.work.suite
    medians = {rival: shorten(median) for rival, median in result.medians.items()}
    quartiles = {rival: [shorten(time) for time in times] for rival, times in result.quartiles.items()}
    ratios = {rival: shorten(median / result.ours) for rival, median in result.medians.items() if rival != suite.ours}
    return Line(result.bench, work.name, work.unit, suite.unit, suite.ours, medians, quartiles, ratios)


def shorten(value: float) -> float:
    """Keep four digits.

    >>> shorten(12.34567), shorten(0.00123456)
    (12.35, 0.001235)
    """
    return float(f"{value:.4g}")


def describe_machine() -> Setup:
    """Return the machine and the versions of this process."""
    machine: dict[str, Any] = {
        "cpu": find_cpu(),
        "cores": os.cpu_count(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "pagepool": importlib.import_module("pagepool").__version__,  # what was measured, be it installed or a source tree
    }
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    return {**machine, "date": datetime.now(UTC).date().isoformat()}


def find_cpu() -> str:
    """Return the model of the processor; on Linux `platform` does not know it."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def read(path: Path = RESULTS) -> Results:
    """Read the file."""
    content = json.loads(path.read_text())
    lines, remarks = [Line(**line) for line in content["lines"]], [Remark(**remark) for remark in content["remarks"]]
    return Results(content["setups"], lines, remarks)


def merge(path: Path, machine: Setup, lines: Sequence[Line], remarks: Sequence[Remark]) -> None:
    """Put a run into the file, which need not exist: its lines take the places of older ones."""
    results = read(path) if path.exists() else Results()
    environment = next((engine for engine in ENGINES if engine in machine), "pagepool")
    setup = f"{environment}, {machine['date']}"
    results.setups[setup] = machine
    all_lines = {find_place(line): line for line in (*results.lines, *(replace(line, setup=setup) for line in lines))}
    all_remarks = {
        (environment_of(remark.setup), remark.bench, remark.test): remark
        for remark in (*results.remarks, *(replace(remark, setup=setup) for remark in remarks))
    }
    results.lines, results.remarks = list(all_lines.values()), list(all_remarks.values())
    write(path, results)


def find_place(line: Line) -> tuple[str, ...]:
    return environment_of(line.setup), line.bench, line.ours, line.work


def write(path: Path, results: Results) -> None:
    """Write the setups that have lines or remarks, and a line of text for each of these."""
    used = {held.setup for held in (*results.lines, *results.remarks)}
    setups = {name: setup for name, setup in sorted(results.setups.items()) if name in used}
    parts = {
        "setups": [f"{json.dumps(name)}: {json.dumps(setup)}" for name, setup in setups.items()],
        "lines": [json.dumps(asdict(line)) for line in results.lines],
        "remarks": [json.dumps(asdict(remark)) for remark in results.remarks],
    }
    texts = {name: ",\n".join(f"  {text}" for text in held) for name, held in parts.items()}
    path.write_text(
        f'{{"setups": {{\n{texts["setups"]}\n}},\n"lines": [\n{texts["lines"]}\n],\n"remarks": [\n{texts["remarks"]}\n]}}\n'
    )
