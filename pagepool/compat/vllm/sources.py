"""Digests of Python code: equal for definitions that differ in nothing but layout, comments and docstrings."""

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator


def definitions_in(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield a module's functions and classes, and the methods of these as ``Class.method``. Overloads share a name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{member.name}", member) for member in node.body if isinstance(member, ast.FunctionDef))


def digests_of(source: str) -> dict[str, str]:
    """Return digests of a module's definitions by name. Definitions of the same name share one digest."""
    codes = defaultdict(list)
    for name, node in definitions_in(source):
        codes[name].append(_code_of(node))
    return {name: hashlib.sha256("".join(parts).encode()).hexdigest()[:16] for name, parts in codes.items()}


def _code_of(value: object) -> str:
    """Return a syntax tree as text, without docstrings, and without empty fields, which differ between versions of Python."""
    match value:
        case ast.Expr(ast.Constant(str())):
            return ""
        case ast.AST():
            fields = [f"{name}={_code_of(field)}" for name, field in ast.iter_fields(value) if field not in (None, [])]
            return f"{type(value).__name__}({', '.join(fields)})"
        case list():
            return f"[{', '.join(filter(None, map(_code_of, value)))}]"
    return repr(value)
