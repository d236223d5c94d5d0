"""Checks which parts fit the vLLM of this process: its sources match a tested version, and no other package patched them."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from pagepool.compat.vllm.engine import BOUND, CHANGES, DIGESTS, INHERITED, PARTS, VERSIONS, Part
from pagepool.compat.vllm.sources import digests_of
from pagepool.errors import CompatError

Homes = Mapping[str, ModuleType]
Digests = dict[str, str]  # keys: ``module:name``


def version_of() -> str:
    """Import vLLM and return its version. Raise CompatError if it is not installed."""
    try:
        engine = import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise CompatError(f"vLLM: got none installed, allowed: {', '.join(VERSIONS)}") from None
    return str(getattr(engine, "__version__", None))


def import_homes() -> dict[str, ModuleType]:
    """Import the modules of `DIGESTS` present in this vLLM, and return them by name. Raise CompatError if vLLM is not
    installed.
    """
    version_of()
    homes = {}
    for home in dict.fromkeys(place.partition(":")[0] for recorded in DIGESTS.values() for place in recorded):
        try:
            homes[home] = import_module(home)
        except ModuleNotFoundError as error:
            if not f"{home}.".startswith(f"{error.name}."):
                raise
    return homes


def find_obstacles(homes: Homes, parts: Iterable[Part] = PARTS) -> dict[str, str]:
    """Return the reason why each part, by name, must be left to vLLM; "" for a usable part."""
    digests = _digests_in(homes)
    obstacles: dict[str, str] = {}
    for part in parts:
        is_lost = part.needs and obstacles[part.needs]
        obstacles[part.name] = f"needs {part.needs}" if is_lost else "; ".join(_find_obstacles(part, homes, digests))
    return obstacles


def record(homes: Homes) -> Digests:
    """Return this vLLM's entry for `CHANGES`: its digests that differ from `DIGESTS`."""
    digests = _digests_in(homes)
    recorded = [item for recorded in DIGESTS.values() for item in recorded.items()]
    return {place: _digest_of(digests, place) for place, digest in recorded if _digest_of(digests, place) != digest}


def function_of(member: Any) -> Any:
    """Return the function in a class method, static method or property; anything else as it is."""
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _digests_in(homes: Homes) -> Digests:
    return {f"{home}:{name}": one for home, module in homes.items() for name, one in digests_of(_source_of(module)).items()}


def _source_of(module: ModuleType) -> str:
    """Return a module's source; "" if there is none, as in an installation of compiled files alone."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _digest_of(digests: Digests, place: str) -> str:
    """Return the digest of a definition: `INHERITED` for a method missing in its class, "gone" if the class is missing."""
    return digests.get(place, INHERITED if place.rpartition(".")[0] in digests else "gone")


def _find_obstacles(part: Part, homes: Homes, digests: Digests) -> list[str]:
    """Return the differences from the closest tested version, or if there are none, changes by other packages."""
    differences = [
        [place for place, digest in DIGESTS[part.name].items() if _digest_of(digests, place) != changes.get(place, digest)]
        for changes in CHANGES.values()
    ]
    found = [f"{place.replace(':', '.')}: another source" for place in min(differences, key=len)]
    return found or [*_find_patches(part, homes, digests)] or [*_find_subclasses(part, homes)]


# Changes by other packages.


def _find_patches(part: Part, homes: Homes, digests: Digests) -> Iterator[str]:
    """Yield a description of each definition that differs from its source, or is replaced in a module of `BOUND`."""
    for place in DIGESTS[part.name]:
        home, name = place.split(":")
        value = _at(homes, home, name)
        if not (_is_own(value, homes[home], name) if place in digests else value is None):
            yield _not_own(f"{home}.{name}", value)
        elif isinstance(value, type):
            yield from _find_patched_members(value, homes[home], digests)
        for module in filter(None, map(sys.modules.get, BOUND)):
            if vars(module).get(name, value) is not value:
                yield _not_own(f"{module.__name__}.{name}", vars(module)[name])


def _at(homes: Homes, home: str, name: str) -> Any:
    """Look up a definition by name, ignoring inheritance; None if it is missing."""
    value: Any = homes[home]
    for part in name.split("."):
        value = vars(value).get(part)
        if value is None:
            break
    return function_of(value)


def _is_own(value: object, home: ModuleType, name: str) -> bool:
    """Whether a class or function is its module's own definition of that name. A wrapper has other globals."""
    if isinstance(value, type):
        return (value.__module__, value.__qualname__) == (home.__name__, name)
    return isinstance(value, FunctionType) and value.__globals__ is vars(home) and value.__qualname__ == name


def _find_patched_members(cls: type, home: ModuleType, digests: Digests) -> Iterator[str]:
    """Yield a description of each method that differs from the class's source; methods generated by Python are allowed."""
    start = f"{home.__name__}:{cls.__qualname__}."
    for name in {*vars(cls), *(place.removeprefix(start) for place in digests if place.startswith(start))}:
        member = function_of(vars(cls).get(name))
        is_own = _is_own(member, home, f"{cls.__qualname__}.{name}")
        if not is_own and (start + name in digests or _is_foreign(member, home)):
            yield _not_own(f"{start}{name}".replace(":", "."), member)


def _is_foreign(member: object, home: ModuleType) -> bool:
    if not isinstance(member, FunctionType) or member.__globals__ is vars(home):
        return False
    return str(member.__globals__.get("__name__")).partition(".")[0] not in sys.stdlib_module_names


def _not_own(place: str, value: object) -> str:
    names = [str(getattr(value, name, None)) for name in ("__module__", "__qualname__")]
    return f"{place}: got {'.'.join(names) if callable(value) else value}, allowed: vLLM's own; somebody else replaced it"


def _find_subclasses(part: Part, homes: Homes) -> Iterator[str]:
    for home, name in part.subclassed:
        classes: list[type] = [_at(homes, home, name)]
        for cls in classes:  # the list grows during the loop
            classes += cls.__subclasses__()
            if not f"{cls.__module__}.".startswith("vllm."):
                yield f"{home}.{name}: got a subclass, {cls.__module__}.{cls.__qualname__}, allowed: none outside vLLM"
