"""The sources of package and examples, and their functions. Cython's are found by their layout, since it has no parser."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = os.environ.get("PAGEPOOL_TEST_INSTALLED") == "1"
on_the_wheel = pytest.mark.skipif(not INSTALLED, reason="only `make test` installs the wheel")
PYTHON_FILES = sorted((ROOT / "pagepool").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STUBS = sorted((ROOT / "pagepool").rglob("*.pyi"))
DOORS = sorted((ROOT / "pagepool").rglob("*.pyx"))  # modules that Python imports
HEADERS = sorted((ROOT / "pagepool").rglob("[!_]*.pxd"))  # inline functions in C, and the declarations of doors

CYTHON_HEADER = re.compile(r"( *)(?:cdef|cpdef|def)\b(?! (?:class|struct|enum|extern)\b)[^=(]*?(\w+)\(")
CYTHON_CLASS = re.compile(r"( *)cdef class (\w+)[^:]*:")
HEADER_END = re.compile(r":\s*(#.*)?$")
DOCSTRING = re.compile(r'\s*r?"""(.*?)"""[^\n]*\n?', re.DOTALL)
NOT_COUNTED = {"self", "cls", "*", "/"}


class Function(NamedTuple):
    """A function and its place: lines count from 1 and are half-open; the body excludes the docstring, parameters `self`."""

    file: str
    qualname: str
    header: str
    start: int
    stop: int
    num_body_lines: int
    num_parameters: int

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]


class Class(NamedTuple):
    """A class and its place: lines count from 1 and are half-open."""

    file: str
    name: str
    start: int
    stop: int


def functions_in(path: Path) -> Iterator[Function]:
    """Yield the functions of a file, those inside others too."""
    return python_functions(path) if path.suffix == ".py" else cython_functions(path)


def classes_in(path: Path) -> Iterator[Class]:
    """Yield the classes of a file; those of a stub are Python's."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                yield Class(path.name, node.name, node.lineno, node.end_lineno + 1)
        return
    lines = text.splitlines()
    for start, line in enumerate(lines):
        match = CYTHON_CLASS.match(line)
        if match is not None:
            yield Class(path.name, match[2], start + 1, _end_of_block(lines, start + 1, len(match[1])) + 1)


def python_functions(path: Path) -> Iterator[Function]:
    """Yield the functions of a Python file."""
    return _functions_below(ast.parse(path.read_text()), path.name, "")


def _functions_below(parent: ast.AST, file: str, prefix: str) -> Iterator[Function]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            assert node.end_lineno is not None
            num_body_lines = node.end_lineno - body[0].lineno + 1 if body else 0
            name, header = f"{prefix}{node.name}", f"def {node.name}({ast.unparse(node.args)})"
            num_parameters = len(
                [part for part in ast.walk(node.args) if isinstance(part, ast.arg) and part.arg not in NOT_COUNTED]
            )
            yield Function(file, name, header, node.lineno, node.end_lineno + 1, num_body_lines, num_parameters)
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions_below(node, file, f"{prefix}{node.name}." if is_scope else prefix)  # type: ignore[attr-defined]


def cython_functions(path: Path) -> Iterator[Function]:
    """Yield the functions of a Cython file that have a body there."""
    lines = path.read_text().splitlines()
    classes = list(classes_in(path))
    for start, line in enumerate(lines):
        match = CYTHON_HEADER.match(line)
        if match is None:
            continue
        body = next(i for i in range(start, len(lines)) if _is_closed(lines[start : i + 1])) + 1
        if not HEADER_END.search(lines[body - 1]):
            continue  # a declaration
        stop = _end_of_block(lines, body, len(match[1]))
        text = DOCSTRING.sub("", "\n".join(lines[body:stop]), count=1) if lines[body].lstrip().startswith('"""') else None
        num_body_lines = stop - body if text is None else len(text.splitlines())
        name = ".".join([*(cls.name for cls in classes if cls.start <= start < cls.stop), match[2]])
        header = " ".join(lines[start:body])
        yield Function(path.name, name, header, start + 1, stop + 1, num_body_lines, _count_parameters(header))


def _is_closed(lines: list[str]) -> bool:
    """Whether as many parentheses close as open; comments have none."""
    text = "\n".join(line.partition("#")[0] for line in lines)
    return text.count("(") == text.count(")")


def _count_parameters(header: str) -> int:
    """Count the parameters of a Cython function: parts between the outermost commas."""
    depth, parts = 0, [""]
    for character in header[header.index("(") :]:
        depth += (character in "([") - (character in ")]")
        if depth == 1 and character == ",":
            parts.append("")
        elif depth == 0:
            break
        else:
            parts[-1] += character
    return len([part for part in parts if part.strip("( ") and part.strip("( ").partition("=")[0] not in NOT_COUNTED])


def _end_of_block(lines: list[str], start: int, indent: int) -> int:
    """Return the line after the block that begins at `start` below a header with `indent`."""
    stop = last = start
    while stop < len(lines) and (not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) > indent):
        stop += 1
        if lines[stop - 1].strip():
            last = stop
    return last
