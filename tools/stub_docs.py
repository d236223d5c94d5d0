"""Writes default values and public docstrings of the compiled core into pagepool/_core.pyi, where editors find them.

With ``--check`` it writes nothing, and exits with 1 if the stub differs from the core.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pagepool
from pagepool import _core, router

ROOT = Path(__file__).parents[1]
STUB = ROOT / "pagepool" / "_core.pyi"
PUBLIC = {getattr(module, name) for module in (pagepool, router) for name in module.__all__}
BASES = {base for value in PUBLIC if isinstance(value, type) for base in value.__mro__}
"""Public classes, and those whose members they inherit."""


class Edit(NamedTuple):
    """A range of lines, from 1, and columns, from 0, and the text to put there."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


def main(arguments: list[str]) -> None:
    """Rewrite the stub, or check it."""
    old = STUB.read_text()
    new = rewrite(old)
    if "--check" not in arguments:
        STUB.write_text(new)
        subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(STUB)], check=True)
        return
    found, wanted = (ast.unparse(ast.parse(text)).splitlines() for text in (old, new))  # line breaks of code may differ
    difference = [*difflib.unified_diff(found, wanted, "pagepool/_core.pyi", "the compiled core", n=1, lineterm="")]
    if difference:
        sys.exit("\n".join([*difference, "stub-docs: python tools/stub_docs.py writes these lines"]))


def rewrite(stub: str, core: object = _core) -> str:
    """Return a stub with the defaults of a compiled module, and its public docstrings."""
    lines = stub.splitlines(keepends=True)
    edits = [edit for node in ast.parse(stub).body for edit in edit_node(node, core)]
    for edit in sorted(edits, reverse=True):
        before, after = lines[edit.line - 1][: edit.column], lines[edit.end_line - 1][edit.end_column :]
        lines[edit.line - 1 : edit.end_line] = [before + edit.text + after]
    return "".join(lines)


def edit_node(node: ast.stmt, owner: object) -> Iterator[Edit]:
    """Yield the edits of a function, or of a class and its members. Types of the stub alone have none."""
    if isinstance(node, ast.FunctionDef):
        yield from edit_defaults(node, owner)
        yield edit_docstring(node, find_docstring(owner, node.name) if owner in BASES else "")
    elif isinstance(node, ast.ClassDef) and (cls := getattr(owner, node.name, None)) is not None:
        yield edit_docstring(node, inspect.getdoc(cls) or "" if cls in PUBLIC else "")
        for item in node.body:
            yield from edit_node(item, cls)


def edit_defaults(node: ast.FunctionDef, owner: object) -> Iterator[Edit]:
    """Yield the edits of the defaults in a signature. Those that are no literals stay as they are."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(positional[-len(arguments.defaults) :], arguments.defaults, strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = find_defaults(owner, node.name) if arguments.defaults or any(arguments.kw_defaults) else {}
    for argument, value in pairs:
        if value is not None and argument.arg in found:
            yield replace(value, found[argument.arg])


def edit_docstring(node: ast.FunctionDef | ast.ClassDef, docstring: str) -> Edit:
    """Return the edit that replaces a docstring, or the dots beside a signature, or adds a docstring to a class, or removes its
    own.
    """
    first, indent = node.body[0], " " * (node.col_offset + 4)
    line = min(each.lineno for each in (first, *getattr(first, "decorator_list", ())))
    has_constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if not docstring and isinstance(node, ast.ClassDef) and (len(node.body) > 1 or not has_constant):
        return Edit(line, 0, (first.end_lineno or line) + 1 if has_constant else line, 0, "")
    text = quote(docstring, indent) if docstring else "..."
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return replace(first, f"\n{indent}{text}" if first.value.value is ... and docstring else text)
    return Edit(line, 0, line, 0, f"{indent}{text}\n\n")


def replace(node: ast.stmt | ast.expr, text: str) -> Edit:
    """Return the edit that replaces a node."""
    return Edit(node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, text)


def quote(docstring: str, indent: str) -> str:
    r"""Return a docstring as code. Its further lines are indented.

    >>> quote("Grow rows.\n\nAll or none.", "    ").split("\n")[1:-1]
    ['', '    All or none.']
    """
    text = textwrap.indent(docstring, indent).lstrip() + f"\n{indent}" * ("\n" in docstring)
    return f'r"""{text}"""' if "\\" in text else f'"""{text}"""'


def find_docstring(owner: object, name: str) -> str:
    """Return the docstring of a function; "" if it has none, or the one that Python gives to every method of this name."""
    text = getattr(owner, name).__doc__ or ""
    general = {getattr(cls, name).__doc__ for cls in (object, int, list, MappingProxyType) if hasattr(cls, name)}
    return "" if text in general else inspect.cleandoc(text).rstrip()


def find_defaults(owner: object, name: str) -> dict[str, str]:
    """Return the defaults of a compiled function, as code, by the names of its parameters. A class does not know those of its
    constructor: they are read from its source.
    """
    if isinstance(owner, type) and name in ("__init__", "__new__"):
        source = (ROOT / owner.__module__.replace(".", "/")).with_suffix(".pyx").read_text()
        values = dict(read_defaults(source, owner.__name__))
    else:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        values = {each.name: repr(each.default) for each in parameters if each.default is not each.empty}
    return {name: value for name, value in values.items() if is_constant(value)}


def read_defaults(source: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters with defaults of a Cython class's constructor.

    >>> source = "cdef class Rows:\\n    def __cinit__(self, n, int m=1, str by not None='', *, tuple of: object = (2, 3)):\\n"
    >>> list(read_defaults(source, "Rows"))
    [('m', '1'), ('by', "''"), ('of', '(2, 3)')]
    """
    body = re.search(rf"^cdef class {name}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    headers = re.findall(r"^    def __c?init__\((.*?)\):$", body[0] if body else "", re.MULTILINE | re.DOTALL)
    for part in re.findall(r"(?:\([^()]*\)|[^,()])+", ",".join(headers)):
        declared, equals, value = part.partition("=")
        if equals:
            yield re.findall(r"\w+", re.sub(r":.*| not None", "", declared))[-1], value.strip()


def is_constant(code: str) -> bool:
    """Whether an expression needs no names.

    >>> is_constant("(0, None)"), is_constant("1 << 24"), is_constant("MAX_TOKENS"), is_constant("<object>")
    (True, True, False, False)
    """
    try:
        return not any(isinstance(node, ast.Name) for node in ast.walk(ast.parse(code, mode="eval")))
    except SyntaxError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
