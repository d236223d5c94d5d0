"""Definitions of an engine: reading their signatures, finding their living objects, and replacing them."""

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pagepool.errors import CompatError


def modules_of(package: str) -> list[ModuleType]:
    """Return the imported modules of a top-level package."""
    modules = list(sys.modules.items())
    return [module for name, module in modules if f"{name}.".startswith(f"{package}.") and isinstance(module, ModuleType)]


def swap(package: str, replacements: Mapping[Any, Any]) -> None:
    """Replace objects, found by identity, in all modules of a package, under any name."""
    by_id = {id(theirs): ours for theirs, ours in replacements.items()}
    for module in modules_of(package):
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])


class Unpatched(type):
    """Metaclass of stand-ins for an engine's classes. It refuses patches, which their compiled callers would bypass."""

    def __setattr__(cls, name: str, value: object) -> None:
        """Raise CompatError."""
        raise CompatError(
            f"{name} of {cls.__module__}.{cls.__name__}: got {value!r}, allowed: no other than pagepool's; apply what patches "
            "the engine before pagepool is installed, or do without pagepool"
        )


@contextmanager
def installing(is_installed: Callable[[], bool], install: Callable[[], None], uninstall: Callable[[], None]) -> Iterator[None]:
    """Install an adapter for the duration of the block. If it was installed before, it stays installed."""
    was_installed = is_installed()
    if not was_installed:
        install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def signature_of(member: Callable[..., Any] | property) -> str:
    """Return the parameters of a function, method or class as text, without types; "property" for a property."""
    if isinstance(member, property):
        return "property"
    signature = inspect.signature(member)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def check_unused(classes: tuple[type, ...], engine: str) -> None:
    """Raise CompatError if objects of the engine's own classes exist: they do not work with ours."""
    with _thawed():
        values = _search(classes)
        if values:
            del values
            gc.collect()  # drop the remains of a deleted engine
            values = _search(classes)
    if values:
        counts = Counter(type(value).__name__ for value in values)
        live = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise CompatError(f"an engine was built with {engine}'s own allocator, got {live}; install first, or drop the engine")


def find_objects(classes: tuple[type, ...]) -> list[Any]:
    """Return all living objects of these classes and their subclasses known to the garbage collector."""
    with _thawed():
        return _search(classes)


@contextmanager
def _thawed() -> Iterator[None]:
    """Let the garbage collector see objects that ``gc.freeze`` hid. At the end, freeze these and all newer objects."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _search(classes: tuple[type, ...]) -> list[Any]:
    values = gc.get_objects()
    types = {kind for kind in set(map(type, values)) if issubclass(kind, classes)}  # usually none, of millions of objects
    return [value for value in values if type(value) in types] if types else []
