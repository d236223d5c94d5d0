"""The sources of package and examples. Cython has no parser, so the functions of its files are found by their layout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "models"
INSTALLED = os.environ.get("PAGEPOOL_TEST_INSTALLED") == "1"
on_the_wheel = pytest.mark.skipif(not INSTALLED, reason="only `make test` installs the wheel")
UNSANITIZED = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer needs memory of its own")
PYTHON_FILES = sorted((ROOT / "pagepool").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOORS = sorted((ROOT / "pagepool").rglob("*.pyx"))  # modules that Python imports
HEADERS = sorted((ROOT / "pagepool").rglob("[!_]*.pxd"))  # inline functions in C, and the declarations of doors
FACES = sorted(path for path in (ROOT / "pagepool").rglob("__init__.pxd") if path.stat().st_size)  # of rooms, for other rooms

CYTHON_HEADER = re.compile(r"( *)(?:cdef|cpdef|def)\b(?! (?:class|struct|enum|extern)\b)[^=(]*?(\w+)\(")
HEADER_END = re.compile(r":\s*(#.*)?$")


def run_python(*arguments: object, timeout: float = 120, cwd: Path | None = None, **variables: str) -> Any:
    """Run a new Python, which imports from where this one does, with environment variables. Returns the process that ended."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Function(NamedTuple):
    """A function and its place: lines count from 1 and are half-open."""

    name: str
    header: str
    start: int
    stop: int


def cython_functions(path: Path) -> Iterator[Function]:
    """Yield the functions of a Cython file that have a body there."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        match = CYTHON_HEADER.match(line)
        if match is None:
            continue
        body = next(i for i in range(start, len(lines)) if _is_closed(lines[start : i + 1])) + 1
        if HEADER_END.search(lines[body - 1]):  # otherwise a declaration
            stop = _end_of_block(lines, body, len(match[1]))
            yield Function(match[2], " ".join(lines[start:body]), start + 1, stop + 1)


def _is_closed(lines: list[str]) -> bool:
    """Whether as many parentheses close as open; comments have none."""
    text = "\n".join(line.partition("#")[0] for line in lines)
    return text.count("(") == text.count(")")


def _end_of_block(lines: list[str], start: int, indent: int) -> int:
    """Return the line after the block that begins at `start` below a header with `indent`."""
    stop = last = start
    while stop < len(lines) and (not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) > indent):
        stop += 1
        if lines[stop - 1].strip():
            last = stop
    return last
