"""The sources of package and examples, and the functions in them. Cython's are found by their look: it has no parser."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTHON_FILES = sorted((ROOT / "pagepool").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CORE = ROOT / "pagepool" / "_core.pyx"
HEADERS = sorted((ROOT / "pagepool" / "core").glob("[!_]*.pxd"))

CYTHON_HEADER = re.compile(r"( *)(?:cdef|cpdef|def)\b(?! (?:class|struct|enum|extern)\b)[^=(]*?(\w+)\(")
HEADER_END = re.compile(r":\s*(#.*)?$")
DOCSTRING = re.compile(r'\s*r?"""(.*?)"""[^\n]*\n?', re.DOTALL)


class Function(NamedTuple):
    """A function and where it stands: lines count from 1 and are half-open; the body has no docstring."""

    file: str
    name: str
    header: str
    start: int
    stop: int
    num_body_lines: int


def python_functions(path: Path) -> Iterator[Function]:
    """Yield the functions of a Python file, those inside others too."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            assert node.end_lineno is not None
            num_body_lines = node.end_lineno - body[0].lineno + 1 if body else 0
            yield Function(path.name, node.name, f"def {node.name}", node.lineno, node.end_lineno + 1, num_body_lines)


def cython_functions(path: Path) -> Iterator[Function]:
    """Yield the functions of a Cython file."""
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        match = CYTHON_HEADER.match(line)
        if match is None:
            continue
        body = next(i for i in range(start, len(lines)) if HEADER_END.search(lines[i])) + 1
        stop = _end_of_block(lines, body, len(match[1]))
        text = DOCSTRING.sub("", "\n".join(lines[body:stop]), count=1) if lines[body].lstrip().startswith('"""') else None
        num_body_lines = stop - body if text is None else len(text.splitlines())
        yield Function(path.name, match[2], " ".join(lines[start:body]), start + 1, stop + 1, num_body_lines)


def _end_of_block(lines: list[str], start: int, indent: int) -> int:
    """Return the line behind the block that begins at `start` below a header with `indent`."""
    stop = last = start
    while stop < len(lines) and (not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) > indent):
        stop += 1
        if lines[stop - 1].strip():
            last = stop
    return last
