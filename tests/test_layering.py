"""Imports go one way: each file imports only files above it, and large or optional modules only where they are used."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import groupby
from pathlib import Path

import pytest
from sources import DOORS, HEADERS, PYTHON_FILES, ROOT

import pagepool

ORDER = [
    "_version",
    "errors",
    "arguments",
    "forking",
    "specs.page_counts",
    "specs.dtypes",
    "specs.layers",
    "specs.groups",
    "specs.budget",
    "specs.model_config",
    "specs",
    "request",
    "hashing.page_hash",
    "hashing.seeds",
    "hashing.features",
    "hashing.extra_keys",
    "hashing.digests",
    "hashing.names",
    "hashing",
    "core",
    "_core",  # the names that Python uses
    "hashing.request_hashes",
    "hashing.algorithms",
    "stats.counts",
    "stats",
    "page_pool.pages",
    "page_pool.free_queue",
    "page_pool.prefix_index",
    "page_pool.integrity",
    "page_pool.snapshot",
    "page_pool.pool",
    "page_pool",
    "events.messages",
    "events.contexts",
    "events.source",
    "events",
    "attention",
    "coordinator",
    "manager.cache_pages",
    "manager.lookups",
    "manager.pins",
    "manager.retention",
    "manager.copies",
    "manager.tiers",
    "manager.slots",
    "manager.external",
    "manager.reporting",
    "manager.cache_manager",
    "manager",
    "events.connections",
    "events.history",
    "events.publisher",
    "event_publisher",
    "device_table",
    "page_copies",
    "host_pages",
    "page_table",
    "running_batch",
    "stats.prometheus",
    "metrics",
    "compat",
    "doctor.environment",
    "doctor.engines",
    "doctor.self_test",
    "doctor.report",
    "doctor.command",
    "doctor",
    "replay.shared.output",
    "replay.shared.sizes",
    "replay.shared.memory",
    "replay.shared.progress",
    "replay.shared.results",
    "replay.shared.options",
    "replay.shared.tables",
    "replay.shared.drawing",
    "replay.models.config",
    "replay.models.layers",
    "replay.models.states",
    "replay.models.pages",
    "replay.models.options",
    "replay.traces.simulated_request",
    "replay.traces.arrivals",
    "replay.traces.workloads",
    "replay.traces.generator",
    "replay.traces.reader",
    "replay.traces.recorder",
    "replay.traces.options",
    "replay.simulation.figures",
    "replay.simulation.host",
    "replay.simulation.host_options",
    "replay.simulation.allocator",
    "replay.simulation.scheduler",
    "replay.simulation.runs",
    "replay.simulation.report",
    "replay.simulation.command",
    "replay.plans.reuse",
    "replay.plans.lru",
    "replay.plans.optimum",
    "replay.plans.plan",
    "replay.plans.policies",
    "replay.plans.checkpoints",
    "replay.plans.state_report",
    "replay.plans.host_report",
    "replay.plans.report",
    "replay.plans.plot",
    "replay.plans.web_page",
    "replay.plans.command",
    "replay.fleets.replica",
    "replay.fleets.router",
    "replay.fleets.fleet",
    "replay.fleets.report",
    "replay.fleets.plot",
    "replay.fleets.command",
    "replay",  # its public names, and the packages
    "replay.command",
    "replay.cli",
    "__init__",
    "__main__",
]
FOLDERS = {"compat", "core"}  # their files may import one another; those of the core one way, see below
PARTED = {"events", "hashing", "stats"}  # some of their files are below the core or the manager, some above
OPTIONAL = {
    "cbor2",
    "click",
    "easydel",
    "hypothesis",
    "jax",
    "matplotlib",
    "msgspec",
    "prometheus_client",
    "ray",
    "rich",
    "vllm",
    "zmq",
}
# These are imported on first use themselves.
EXTRAS = ("events", "event_publisher", "stats.prometheus", "metrics", "replay", "compat.vllm.")
FILES = [*PYTHON_FILES, *DOORS, *HEADERS]
CORE_FILES = [path for path in (*DOORS, *HEADERS) if path.parent.name == "core"]
CYTHON_IMPORT = re.compile(r"^ *(?:from +([\w.]+) +c?import +\(?\s*(\w+)|c?import +([\w.]+))", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """Return the dotted name without `pagepool.`; that of a folder for its `__init__`."""
    parts = path.relative_to(ROOT / "pagepool").with_suffix("").parts
    return ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)


def place_of(name: str) -> int:
    """Return the place of the file with a dotted name; the files of `FOLDERS` share one."""
    parts = name.split(".")
    prefixes = (".".join(parts[:stop]) for stop in range(len(parts), 0, -1))
    return ORDER.index(next((prefix for prefix in prefixes if prefix in ORDER), "__init__"))


def imports(tree: ast.AST, at_import_time: bool = False) -> Iterator[str]:
    """Yield what is imported as dotted names, with the first name of `from ... import`.

    With `at_import_time`, leave out what functions import, and what only type checkers see.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
        elif not at_import_time or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ):
            yield from imports(node, at_import_time)


def imports_of(path: Path, at_import_time: bool = False) -> list[str]:
    text = path.read_text()
    if path.suffix != ".py":
        return [f"{package}.{name}" if package else module for package, name, module in CYTHON_IMPORT.findall(text)]
    return list(imports(ast.parse(text), at_import_time))


def places_imported_by(path: Path) -> set[int]:
    """Return the places of the imported files of the package; `__init__` for names that are not files."""
    names = [name.partition(".") for name in imports_of(path)]
    return {place_of(name) for package, _, name in names if package == "pagepool"}


def test_every_file_has_a_place() -> None:
    """Files of one folder are consecutive, so that imports go one way between folders too."""
    modules = {module_of(path) for path in FILES}
    folders = {module_of(path) for path in FILES if path.stem == "__init__"} - {"__init__"}
    in_folders = {module for module in modules if module.split(".")[0] in FOLDERS}
    assert set(ORDER) <= modules
    assert not modules - folders - in_folders - set(ORDER)
    runs = [folder for folder, _ in groupby(name.rpartition(".")[0] for name in ORDER) if folder and folder not in PARTED]
    assert len(runs) == len(set(runs))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_only_files_above(path: Path) -> None:
    place = place_of(module_of(path))
    not_above = {ORDER[other] for other in places_imported_by(path) if other >= place}
    assert not_above <= {ORDER[place]} & FOLDERS


def core_imports(path: Path) -> set[str]:
    """Return the modules and headers of the core that a file of it imports."""
    return {".".join(name.split(".")[1:3]) for name in imports_of(path) if name.startswith("pagepool.core.")}


def test_imports_in_the_core_go_one_way() -> None:
    """CycleError names the files otherwise. What a module declares belongs to it."""
    order: TopologicalSorter[str] = TopologicalSorter()
    for path in CORE_FILES:
        order.add(module_of(path), *core_imports(path))
    assert set(order.static_order()) == {module_of(path) for path in CORE_FILES}


@pytest.mark.parametrize("path", [path for path in HEADERS if path.with_suffix(".pyx") not in DOORS], ids=name_of)
def test_headers_import_headers_only(path: Path) -> None:
    assert not core_imports(path) & {module_of(door) for door in DOORS}


@pytest.mark.parametrize("path", [path for path in PYTHON_FILES if path.parent.name != "core"], ids=name_of)
def test_python_imports_the_core_through_its_door(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.startswith("pagepool.core.")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_are_absolute(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.startswith(".")]


@pytest.mark.parametrize("path", [path for path in FILES if not module_of(path).startswith(EXTRAS)], ids=name_of)
def test_optional_packages_are_imported_on_first_use(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path, at_import_time=True)}
    assert not roots & OPTIONAL


def test_importing_the_package_is_light() -> None:
    code = (
        "import json, sys, time; start = time.perf_counter(); import numpy; numpy_end = time.perf_counter(); "
        "import pagepool; end = time.perf_counter(); "
        "print(json.dumps([numpy_end - start, end - numpy_end, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    folder = Path(pagepool.__file__).parents[1]
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True, timeout=120)
    numpy_seconds, seconds, roots = json.loads(process.stdout)
    print(f"import numpy: {numpy_seconds * 1e3:.0f} ms; import pagepool after it: {seconds * 1e3:.0f} ms")
    assert not OPTIONAL & set(roots)
