"""Which parts fit the vLLM of this process: it is as one that was tested, and nobody else has changed what they rely on."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from pagepool.compat.vllm.engine import BOUND, CHANGES, DIGESTS, INHERITED, PARTS, VERSIONS, Part
from pagepool.compat.vllm.sources import digests_of
from pagepool.errors import CompatError

__all__ = ["find_obstacles", "function_of", "import_homes", "record", "version_of"]

Homes = Mapping[str, ModuleType]
Digests = dict[str, str]  # by ``module:name``


def version_of() -> str:
    """Import vLLM and return its version. CompatError if it is not installed."""
    try:
        engine = import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise CompatError(f"vLLM is not installed; expected: {', '.join(VERSIONS)}") from None
    return str(getattr(engine, "__version__", None))


def import_homes() -> dict[str, ModuleType]:
    """Import those modules of `DIGESTS` that this vLLM has, and return them by name. CompatError if it is not installed."""
    version_of()
    homes = {}
    for home in dict.fromkeys(place.partition(":")[0] for recorded in DIGESTS.values() for place in recorded):
        try:
            homes[home] = import_module(home)
        except ModuleNotFoundError as error:
            if not f"{home}.".startswith(f"{error.name}."):
                raise
    return homes


def find_obstacles(homes: Homes) -> dict[str, str]:
    """Return for each part, by its name, why it has to be left to vLLM; "" for one that can be used."""
    digests = _digests_in(homes)
    obstacles: dict[str, str] = {}
    for part in PARTS:
        is_lost = part.needs and obstacles[part.needs]
        obstacles[part.name] = f"needs {part.needs}" if is_lost else "; ".join(_find_obstacles(part, homes, digests))
    return obstacles


def record(homes: Homes) -> Digests:
    """Return what `CHANGES` has to say of this vLLM: the digests that differ from those in `DIGESTS`."""
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
    """Return the digest of a definition: `INHERITED` for a method that its class has not, "gone" if there is no such class."""
    return digests.get(place, INHERITED if place.rpartition(".")[0] in digests else "gone")


def _find_obstacles(part: Part, homes: Homes, digests: Digests) -> list[str]:
    """Return what differs from the tested version that differs least, or else what somebody else has changed."""
    differences = [
        [place for place, digest in DIGESTS[part.name].items() if _digest_of(digests, place) != changes.get(place, digest)]
        for changes in CHANGES.values()
    ]
    found = [f"{place.replace(':', '.')}: another source" for place in min(differences, key=len)]
    return found or [*_find_patches(part, homes, digests)] or [*_find_subclasses(part, homes)]


# Changes by somebody else.


def _find_patches(part: Part, homes: Homes, digests: Digests) -> Iterator[str]:
    """Yield what is wrong with definitions that are not those of their source, or that a module of `BOUND` has replaced."""
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
    """Return a definition, of a class its own one and not an inherited one. None if there is none."""
    value: Any = homes[home]
    for part in name.split("."):
        value = vars(value).get(part)
        if value is None:
            break
    return function_of(value)


def _is_own(value: object, home: ModuleType, name: str) -> bool:
    """Whether a class or function is the one of that name that its module defines. A wrapper has other globals."""
    if isinstance(value, type):
        return (value.__module__, value.__qualname__) == (home.__name__, name)
    return isinstance(value, FunctionType) and value.__globals__ is vars(home) and value.__qualname__ == name


def _find_patched_members(cls: type, home: ModuleType, digests: Digests) -> Iterator[str]:
    """Yield what is wrong unless a class has the methods of its source, and no others but those that Python generates."""
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
    return f"{place}: got {'.'.join(names) if callable(value) else value}, expected vLLM's own: somebody else replaced it"


def _find_subclasses(part: Part, homes: Homes) -> Iterator[str]:
    for home, name in part.subclassed:
        classes: list[type] = [_at(homes, home, name)]
        for cls in classes:  # which grows
            classes += cls.__subclasses__()
            if not f"{cls.__module__}.".startswith("vllm."):
                yield f"{home}.{name}: got a subclass, {cls.__module__}.{cls.__qualname__}, expected none outside vLLM"
