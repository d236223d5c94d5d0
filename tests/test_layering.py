"""Imports go one way: each file imports only files above it, and large or optional modules only where they are used."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import groupby
from pathlib import Path

from sources import DOORS, HEADERS, PYTHON_FILES, ROOT, name_of, run_python

# Folders with their files in order; "" is the folder's `__init__`, which has its public names.
ROWS = [
    ("", ["_version", "errors", "arguments", "forking"]),
    ("specs", ["page_counts", "dtypes", "layers", "groups", "budget", "model_config", ""]),
    ("hashing", ["page_hash", "seeds", "features", "extra_keys", "digests", "names", ""]),
    ("", ["core", "_core", "request"]),
    ("hashing", ["request_hashes", "algorithms"]),
    ("stats", ["counts", ""]),
    ("page_pool", ["pages", "free_queue", "prefix_index", "integrity", "snapshot", "pool", ""]),
    ("events", ["messages", "contexts", "source", ""]),
    ("", ["attention", "coordinator"]),
    ("manager", ["cache_pages", "lookups", "pins", "retention", "copies", "tiers", "slots", "external", "reporting"]),
    ("manager", ["cache_manager", ""]),
    ("events", ["connections", "history", "publisher"]),
    ("", ["event_publisher", "device_table", "page_copies", "host_pages", "page_table", "running_batch"]),
    ("stats", ["prometheus"]),
    ("", ["metrics", "compat"]),
    ("doctor", ["environment", "engines", "self_test", "report", "command", ""]),
    ("replay.shared", ["output", "sizes", "memory", "progress", "results", "options", "tables", "drawing"]),
    ("replay.models", ["config", "layers", "states", "pages", "options"]),
    ("replay.traces", ["simulated_request", "arrivals", "workloads", "generator", "reader", "recorder", "options"]),
    ("replay.simulation", ["figures", "host", "host_options", "allocator", "scheduler", "runs", "report", "command"]),
    ("replay.plans", ["reuse", "lru", "optimum", "plan", "policies", "checkpoints", "state_report", "host_report"]),
    ("replay.plans", ["report", "plot", "web_page", "command"]),
    ("replay.fleets", ["replica", "router", "fleet", "report", "plot", "command"]),
    ("replay", ["", "command", "cli"]),
    ("", ["__init__", "__main__"]),
]
ORDER = [f"{folder}.{name}".strip(".") for folder, names in ROWS for name in names]
FOLDERS = {"compat", "core"}  # their files may import one another; those of the core one way, see below
PARTED = {"events", "hashing", "stats"}  # some of their files are below the core or the manager, some above
ENGINES = {"easydel", "jax", "vllm"}
OPTIONAL = ENGINES | {"cbor2", "click", "hypothesis", "matplotlib", "msgspec", "prometheus_client", "ray", "rich", "zmq"}
# These are imported on first use themselves.
EXTRAS = ("events", "event_publisher", "stats.prometheus", "metrics", "replay", "compat.vllm.")
FILES = [*PYTHON_FILES, *DOORS, *HEADERS]
CORE_FILES = [path for path in (*DOORS, *HEADERS) if path.parent.name == "core"]
CYTHON_IMPORT = re.compile(r"^ *(?:from +([\w.]+) +c?import +\(?\s*(\w+)|c?import +([\w.]+))", re.MULTILINE)


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


def test_imports_are_absolute_and_only_of_files_above() -> None:
    offenders = {}
    for path in FILES:
        place = place_of(module_of(path))
        relative = {name for name in imports_of(path) if name.startswith(".")}
        not_above = {ORDER[other] for other in places_imported_by(path) if other >= place}
        offenders[name_of(path)] = relative | not_above - ({ORDER[place]} & FOLDERS)
    assert {path: names for path, names in offenders.items() if names} == {}


def core_imports(path: Path) -> set[str]:
    """Return the modules and headers of the core that a file of it imports."""
    return {".".join(name.split(".")[1:3]) for name in imports_of(path) if name.startswith("pagepool.core.")}


def test_imports_in_the_core_go_one_way() -> None:
    """CycleError names the files otherwise. What a module declares belongs to it."""
    order: TopologicalSorter[str] = TopologicalSorter()
    for path in CORE_FILES:
        order.add(module_of(path), *core_imports(path))
    assert set(order.static_order()) == {module_of(path) for path in CORE_FILES}


def test_headers_import_headers_only() -> None:
    doors = {module_of(door) for door in DOORS}
    headers = [path for path in HEADERS if path.with_suffix(".pyx") not in DOORS]
    assert [name_of(path) for path in headers if core_imports(path) & doors] == []


def test_python_imports_the_core_through_its_door() -> None:
    outside = [path for path in PYTHON_FILES if path.parent.name != "core"]
    assert [name_of(path) for path in outside if core_imports(path)] == []


def test_optional_packages_are_imported_on_first_use() -> None:
    files = [path for path in FILES if not module_of(path).startswith(EXTRAS)]
    roots = {name_of(path): {name.split(".")[0] for name in imports_of(path, at_import_time=True)} for path in files}
    assert {path: names & OPTIONAL for path, names in roots.items() if names & OPTIONAL} == {}


def test_importing_the_package_is_light() -> None:
    code = "import json, sys, pagepool; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    assert not OPTIONAL & set(json.loads(run_python("-c", code).stdout))
