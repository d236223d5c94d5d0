"""Whether the vLLM of this process is the one that the replacements were made for, and nobody else has changed it."""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from pagepool.compat.patching import check_unused, signature_of
from pagepool.compat.vllm.engine import BOUND, DIGESTS, REPLACEMENTS, SIGNATURES, SUBCLASSED, VERSIONS
from pagepool.errors import CompatError

__all__ = ["check_engine", "function_of", "import_homes", "record", "version_of"]

Homes = Mapping[str, ModuleType]


def version_of() -> str:
    """Import vLLM and return its version. CompatError if it is not installed."""
    try:
        engine = import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise CompatError(f"vLLM is not installed; expected: vllm=={VERSIONS}") from None
    return str(getattr(engine, "__version__", None))


def import_homes() -> dict[str, ModuleType]:
    """Import the modules of `DIGESTS` and return them by name. CompatError for a missing one, or an unknown version."""
    version = version_of()
    if not version.startswith(VERSIONS.rstrip("*")):
        raise CompatError(f"vLLM's version: got {version}, expected {VERSIONS}")
    try:
        return {home: import_module(home) for home in DIGESTS}
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith("vllm."):
            raise
        raise CompatError(f"{error.name}: got no such module in vLLM {version}, expected it") from None


def check_engine(homes: Homes) -> None:
    """Raise CompatError if something differs from what was recorded, somebody else has replaced or subclassed it, or a
    scheduler was built.
    """
    sources = {home: _definitions_in(module) for home, module in homes.items()}
    _check_recorded(homes, sources)
    _check_unpatched(homes, sources)
    _check_subclasses(homes)
    check_unused(tuple(_at(homes, item.home, item.name) for item in REPLACEMENTS if item.module == "blocks"), "vLLM")


def record(homes: Homes) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return what `SIGNATURES` and `DIGESTS` have to be for this vLLM. CompatError for a missing definition."""
    digests = {home: _digests(_definitions_in(module)) for home, module in homes.items()}
    missing = [f"{home}.{name}" for home, names in DIGESTS.items() for name in names if name not in digests[home]]
    if missing:
        raise CompatError(f"vLLM {version_of()} has no {', '.join(missing)}")
    signatures = {item.name: signature_of(function_of(_at(homes, item.home, item.name))) for item in REPLACEMENTS}
    return signatures, {home: {name: digests[home][name] for name in names} for home, names in DIGESTS.items()}


def function_of(member: Any) -> Any:
    """Return the function in a class method, static method or property; anything else as it is."""
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _at(homes: Homes, home: str, name: str) -> Any:
    """Return a definition, of a class its own one and not an inherited one. None if there is none."""
    value: Any = homes[home]
    for part in name.split("."):
        value = vars(value).get(part)
        if value is None:
            break
    return value


# Differences from what was recorded.


class _Definition:
    """The source of a class or function at the top of a module, and the names of a class's methods."""

    def __init__(self, node: ast.ClassDef | ast.FunctionDef, lines: list[str]) -> None:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        self.text = "".join(lines[first - 1 : node.end_lineno])
        self.methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def _definitions_in(module: ModuleType) -> dict[str, _Definition]:
    """Return the definitions in a module's source. CompatError if there is no source."""
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        raise CompatError(f"{module.__name__}: got no source, which is compared with what was recorded") from None
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: _Definition(node, lines) for node in nodes}


def _digests(definitions: Mapping[str, _Definition]) -> dict[str, str]:
    return {name: hashlib.sha256(definition.text.encode()).hexdigest() for name, definition in definitions.items()}


def _check_recorded(homes: Homes, sources: Mapping[str, Mapping[str, _Definition]]) -> None:
    differences = [*_other_signatures(homes)]
    for home, recorded in DIGESTS.items():
        found = _digests(sources[home])
        differences += [f"{home}.{name}: another source" for name in recorded if found.get(name, "") != recorded[name]]
    if differences:
        raise CompatError(f"vLLM {version_of()} differs from the recorded version: {'; '.join(differences)}")


def _other_signatures(homes: Homes) -> Iterator[str]:
    """Yield what is wrong with vLLM's own definitions. Those of somebody else get a message of their own."""
    for item in REPLACEMENTS:
        value = function_of(_at(homes, item.home, item.name))
        if not _is_own(value, homes[item.home], item.name):
            continue
        signature = signature_of(value)
        if signature != SIGNATURES[item.name]:
            yield f"{item.place}: got {signature}, expected {SIGNATURES[item.name]}"


# Changes by somebody else.


def _check_unpatched(homes: Homes, sources: Mapping[str, Mapping[str, _Definition]]) -> None:
    for home, names in DIGESTS.items():
        for name in names:
            value = _at(homes, home, name)
            if not _is_own(value, homes[home], name):
                raise _not_own(f"{home}.{name}", value)
            if isinstance(value, type):
                _check_members(value, homes[home], sources[home][name].methods)
            _check_bound(name, value)


def _is_own(value: object, home: ModuleType, name: str) -> bool:
    """Whether a class or function is the one of that name that its module defines. A wrapper has other globals."""
    if isinstance(value, type):
        return (value.__module__, value.__qualname__) == (home.__name__, name)
    return isinstance(value, FunctionType) and value.__globals__ is vars(home) and value.__qualname__ == name


def _check_members(cls: type, home: ModuleType, methods: set[str]) -> None:
    """Raise CompatError unless a class has the methods of its source, and no others but those that Python generates."""
    for name in [*methods, *vars(cls)]:
        member = function_of(vars(cls).get(name))
        is_own = _is_own(member, home, f"{cls.__qualname__}.{name}")
        if not is_own and (name in methods or _is_foreign(member, home)):
            raise _not_own(f"{home.__name__}.{cls.__qualname__}.{name}", member)


def _is_foreign(member: object, home: ModuleType) -> bool:
    if not isinstance(member, FunctionType) or member.__globals__ is vars(home):
        return False
    return str(member.__globals__.get("__name__")).partition(".")[0] not in sys.stdlib_module_names


def _check_bound(name: str, value: object) -> None:
    """Raise CompatError if a module of `BOUND` has something else under the name of a definition."""
    for module in filter(None, map(sys.modules.get, BOUND)):
        if vars(module).get(name, value) is not value:
            raise _not_own(f"{module.__name__}.{name}", vars(module)[name])


def _not_own(place: str, value: object) -> CompatError:
    names = [str(getattr(value, name, None)) for name in ("__module__", "__qualname__")]
    return CompatError(
        f"{place}: got {'.'.join(names) if callable(value) else value}, expected vLLM's own: somebody else replaced it"
    )


def _check_subclasses(homes: Homes) -> None:
    for home, name in SUBCLASSED:
        for cls in _subclasses_of(_at(homes, home, name)):
            if not f"{cls.__module__}.".startswith("vllm."):
                raise CompatError(
                    f"{home}.{name}: got a subclass, {cls.__module__}.{cls.__qualname__}, expected none outside vLLM"
                )


def _subclasses_of(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses_of(subclass)
