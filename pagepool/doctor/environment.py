"""Versions, the build of the core, and the packages of the extras."""

import platform
import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagepool._core import build_flags
from pagepool._version import __version__

__all__ = ["Problem", "find_version", "inspect_core", "inspect_extras", "inspect_versions"]

EXTRAS = ("jax", "events", "metrics", "replay", "plan", "fleet")
"""The extras for users; those for developers are left out."""

REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)(?:>=(?P<least>[\d.]+))?[^;]*;.*\bextra == ['"](?P<extra>[\w-]+)['"]""")
MODULES = {"pyzmq": "zmq"}
"""The names of packages to import that differ from those to install."""


class Problem(NamedTuple):
    """Something that is wrong, and what to do."""

    what: str
    remedy: str


def find_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def inspect_versions(problems: list[Problem]) -> dict[str, Any]:
    """Return the versions of pagepool and of what it runs on. Another pagepool than the installed one is a problem."""
    folder = Path(import_module("pagepool").__file__ or "").parent
    installed = find_version("pagepool")
    if installed not in (None, __version__):
        what = f"pagepool {installed} is installed, but {__version__} is imported, from {folder}"
        problems.append(Problem(what, "run Python in another folder, or look for it in PYTHONPATH"))
    return {
        "pagepool": __version__,
        "folder": str(folder),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def inspect_core(problems: list[Problem]) -> dict[str, Any]:
    """Return how the core was built. One without guards is a problem: it is for measurements."""
    flags = build_flags()
    if not flags["guards"]:
        problems.append(Problem("the core was built without guards", "build it again without PAGEPOOL_UNGUARDED"))
    return dict(flags)


def inspect_extras(problems: list[Problem]) -> dict[str, dict[str, str | None]]:
    """Return the version of each package of each extra, None for one that is not installed. One that is too old, or cannot be
    imported, is a problem. Packages are imported, jax is not.
    """
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in _requirements():
        match = REQUIREMENT.match(requirement)
        if match is None or match["extra"] not in EXTRAS or match["name"] == "pagepool":
            continue
        name, found = match["name"], find_version(match["name"])
        extras.setdefault(match["extra"], {})[name] = found
        if found is not None:
            _check_package(problems, name, found, match["least"], match["extra"])
    return {extra: extras[extra] for extra in EXTRAS if extra in extras}


def _requirements() -> list[str]:
    try:
        return requires("pagepool") or []
    except PackageNotFoundError:
        return []


def _check_package(problems: list[Problem], name: str, found: str, least: str | None, extra: str) -> None:
    remedy = f"pip install --upgrade 'pagepool[{extra}]'"
    if least is not None and _numbers(found) < _numbers(least):
        problems.append(Problem(f"{name} {found} is older than {least}, which pagepool[{extra}] needs", remedy))
    if name == "jax":
        return  # it starts in a process of its own
    try:
        import_module(MODULES.get(name, name.replace("-", "_")))
    except Exception as error:  # whatever a package raises
        problems.append(Problem(f"{name} {found} cannot be imported: {error!r}", f"pip install --force-reinstall {name}"))


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version.

    >>> _numbers("2.40.1rc3"), _numbers("1.2.dev0")
    ([2, 40, 1], [1, 2])
    """
    numbers = []
    for part in text.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return numbers
