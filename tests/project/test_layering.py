"""Imports go one way: each file imports only files above it, and large or optional modules only where they are used."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from sources import DOORS, FACES, HEADERS, PYTHON_FILES, ROOT, name_of, run_python

import pagepool
from pagepool.router import PrefixIndex

# Where the order is written: a row of files or a folder, and what they do; and a room or a file of the core.
DESIGN_ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)
CORE_ROW = re.compile(r"^\| `(\w+/\w*)(?:\.p(?:xd|yx))?` \|", re.MULTILINE)
CORE_ROWS = CORE_ROW.findall((ROOT / "pagepool/core/README.md").read_text())
ROOMS = [row.rstrip("/") for row in CORE_ROWS if row.endswith("/")]
FILE = re.compile(r"`(?:([\w/]+)/)?(\w+)\.pyx?`")
FOLDERS = {"compat"}  # its files may import one another
ENGINES = {"easydel", "jax", "vllm"}
OPTIONAL = ENGINES | {
    "cbor2",
    "click",
    "hypothesis",
    "matplotlib",
    "msgspec",
    "obstore",
    "prometheus_client",
    "ray",
    "rich",
    "torch",
    "xxhash",
    "zmq",
}
# These are imported on first use themselves.
EXTRAS = (
    "events",
    "peers",
    "stats.prometheus",
    "replay",
    "router.subscriber",
    "router.ray_serve",
    "compat.vllm.",
    "torch",
    "trace",
)
NATIVE_ROW = re.compile(r"^- ``([\w/]+)\.pyx``: ((?:.+\n?)+?)(?=- |\n|\Z)", re.MULTILINE)
FILES = [*PYTHON_FILES, *DOORS, *FACES, *HEADERS]
CYTHON_IMPORT = re.compile(r"^ *(?:from +([\w.]+) +c?import +\(?\s*(\w+|\*)|c?import +([\w.]+))", re.MULTILINE)


def listed_files() -> Iterator[str]:
    """Yield the dotted names of the files in the table of docs/design.md, in its order."""
    for listed, text in DESIGN_ROW.findall((ROOT / "docs/design.md").read_text()):
        folder = listed.strip("`").rstrip("/").replace("/", ".")
        if listed == "`core/`":
            yield from (f"core.{row}".replace("/", ".") for row in CORE_ROWS if not row.endswith("/"))
        elif folder in FOLDERS:
            yield folder
        elif folder.split(".")[0] not in FOLDERS:
            folder, files = (folder, text) if listed.endswith("/`") else ("", listed)
            for named, name in FILE.findall(files):
                folder = named.replace("/", ".") or folder
                yield f"{folder}.{name}".strip(".")


def with_packages(names: list[str]) -> Iterator[str]:
    """Yield names, and each folder for its `__init__`: behind its first files, unless it is listed."""
    folders = {"", *(name.rpartition(".")[0] for name in names if name.endswith(".__init__"))}
    for folder, group in groupby(names, lambda name: name.rpartition(".")[0]):
        yield from (name.removesuffix(".__init__") for name in group)
        if folder not in folders and (ROOT / "pagepool" / folder.replace(".", "/") / "__init__.py").exists():
            folders.add(folder)
            yield folder


def module_of(path: Path) -> str:
    """Return the dotted name without `pagepool.`; that of a folder for its `__init__`."""
    parts = path.relative_to(ROOT / "pagepool").with_suffix("").parts
    return ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)


ORDER = list(with_packages(list(listed_files())))


def place_of(name: str) -> int:
    """Return the place of the file with a dotted name, a module's for its header; the files of `FOLDERS` share one."""
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
    assert len(ORDER) == len(set(ORDER))
    assert not modules - folders - in_folders - set(ORDER)
    places = [name if name in folders else name.rpartition(".")[0] for name in ORDER]
    runs = [folder for folder, _ in groupby(places) if folder]
    assert len(runs) == len(set(runs))


def test_imports_are_absolute_and_only_of_files_above() -> None:
    offenders = {}
    for path in FILES:
        place = place_of(module_of(path))
        relative = {name for name in imports_of(path) if name.startswith(".")}
        not_above = {ORDER[other] for other in places_imported_by(path) if other >= place}
        offenders[name_of(path)] = relative | not_above - ({ORDER[place]} & FOLDERS)
    assert {path: names for path, names in offenders.items() if names} == {}


@pytest.mark.parametrize("cls", [pagepool.CacheManager, pagepool.RunningBatch, PrefixIndex])
def test_a_module_says_where_the_native_methods_of_its_class_are(cls: type) -> None:
    native = next(base for base in cls.__mro__ if base.__module__.startswith("pagepool.core."))
    listed = dict(NATIVE_ROW.findall(sys.modules[cls.__module__].__doc__ or ""))
    methods = {name for name, value in vars(native).items() if callable(value) and not name.startswith("_")}
    assert methods
    assert methods == set(re.findall(r"`(\w+)`", listed[native.__module__.removeprefix("pagepool.").replace(".", "/")]))
    for path, names in listed.items():
        assert (ROOT / f"pagepool/{path}.pyx").exists()
        assert all(hasattr(cls, name) for name in re.findall(r"`(\w+)`", names))


def room_of(name: str) -> int:
    """Return the place of the room of a file of the core."""
    return ROOMS.index(name.split(".")[1])


def test_rooms_import_rooms_above() -> None:
    assert sorted(ROOMS) == sorted(path.parent.name for path in (ROOT / "pagepool/core").glob("*/__init__.py"))
    files = [path for path in FILES if module_of(path).startswith("core.") and path.stem != "__init__"]
    below = {path: {name for name in core_imports(path) if room_of(name) > room_of(module_of(path))} for path in files}
    assert {name_of(path): names for path, names in below.items() if names} == {}


def core_imports(path: Path) -> set[str]:
    """Return the modules and headers of the core that a file of it imports."""
    names = (name.removeprefix("pagepool.") for name in imports_of(path))
    return {ORDER[place_of(name)] for name in names if name.startswith("core.")}


def test_headers_import_headers_only() -> None:
    doors = {module_of(door) for door in DOORS if re.search(r"^(cdef class|def|cpdef) ", door.read_text(), re.MULTILINE)}
    headers = [path for path in HEADERS if path.with_suffix(".pyx") not in DOORS]
    assert [name_of(path) for path in headers if core_imports(path) & doors] == []


def test_python_imports_the_core_through_its_door() -> None:
    outside = [path for path in PYTHON_FILES if not module_of(path).startswith("core")]
    assert [name_of(path) for path in outside if core_imports(path)] == []


def private_reads(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes that a module reads and does not define, but those of tuples."""
    nodes = [*ast.walk(tree)]
    read = [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)]
    own = {node.attr for node in read if ast.unparse(node.value) in ("self", "cls")}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    yield from (ast.unparse(node) for node in read if node.attr not in own | {"_replace", "_asdict"})


def test_private_attributes_are_read_in_their_module_alone() -> None:
    """vLLM's and Python's own are left out. Native halves call nothing of a façade, so they read none either."""
    files = [path for path in PYTHON_FILES if not module_of(path).startswith(("compat.vllm", "compat.program"))]
    offenders = {name_of(path): [*private_reads(ast.parse(path.read_text()))] for path in files}
    read = re.compile(r"\b(?:manager|batch|pool|registry)\._[a-z]\w*")
    offenders |= {name_of(path): read.findall(path.read_text()) for path in DOORS if module_of(path).startswith("core.")}
    assert {path: reads for path, reads in offenders.items() if reads} == {}


def test_optional_packages_are_imported_on_first_use() -> None:
    files = [path for path in FILES if not module_of(path).startswith(EXTRAS)]
    roots = {name_of(path): {name.split(".")[0] for name in imports_of(path, at_import_time=True)} for path in files}
    assert {path: names & OPTIONAL for path, names in roots.items() if names & OPTIONAL} == {}


def test_importing_the_package_is_light() -> None:
    code = "import json, sys, pagepool; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    assert not OPTIONAL & set(json.loads(run_python("-c", code).stdout))


def cimports_of(path: Path) -> dict[str, set[str]]:
    """Return the names that a file of Cython cimports of the package, by header."""
    lists = re.findall(r"^from +pagepool\.([\w.]+) +cimport +(?:\(([^)]*)\)|([^\n(]*))", path.read_text(), re.MULTILINE)
    return {header: set(re.findall(r"\w+|\*", listed or rest)) for header, listed, rest in lists}


def test_rooms_take_their_own_headers_whole_and_names_of_others_from_their_faces() -> None:
    """The face of a room is its `__init__.pxd`, which has all names of the headers that it takes."""
    offenders = {}
    for path in (path for path in FILES if path.suffix != ".py"):
        cimported, module = cimports_of(path), module_of(path)
        room = module if path.stem == "__init__" else module.rpartition(".")[0]
        own = {header for header in cimported if header.startswith(f"{room}.")}
        whole = {header for header, names in cimported.items() if names == {"*"}}
        faces = {header for header in cimported if header.startswith("core.") and header.count(".") == 1}
        core = {header for header in cimported if header.startswith("core.")}
        offenders[name_of(path)] = (own ^ whole if module.startswith("core.") else core & whole) | (core - own - faces)
    assert {path: headers for path, headers in offenders.items() if headers} == {}


def test_private_functions_of_headers_stay_there() -> None:
    defined = re.compile(r"^cdef inline [^\n=]*?\b(_\w+)\(", re.MULTILINE)
    private = {path: set(defined.findall(path.read_text())) for path in HEADERS}
    offenders = {}
    for path in (path for path in FILES if path.suffix != ".py"):
        used = set(re.findall(r"(?<![\w.\"`])(_[a-z]\w*)(?=\()", path.read_text())) - private.get(path, set())
        offenders[name_of(path)] = used & set().union(*private.values())
    assert {path: names for path, names in offenders.items() if names} == {}
