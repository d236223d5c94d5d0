"""Inspects versions, the build of the core, the packages of the extras and, in other processes, jax and the engines."""

import json
import os
import platform
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagepool._core import build_flags
from pagepool._version import __version__
from pagepool.compat import easydel, vllm
from pagepool.compat.easydel import recurrent
from pagepool.compat.switch import ON, read_switch
from pagepool.device import LEAST_JAX, WHY_LEAST_JAX
from pagepool.errors import CompatError

EXTRAS = ("jax", "torch", "events", "metrics", "replay", "plan", "store", "peers", "fleet")
"""Extras for users, without those for developers."""

REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)(?:>=(?P<least>[\d.]+))?[^;]*;.*\bextra == ['"](?P<extra>[\w-]+)['"]""")
MODULES = {"pyzmq": "zmq"}
"""Import names of packages, where they differ from their names on the index."""

SECONDS = 300
"""Time limit for starting jax or an engine, in seconds."""

LIST_DEVICES = """
import json, jax
devices = [
    {
        "name": str(device),
        "kind": device.device_kind,
        "memory_kinds": [memory.kind for memory in device.addressable_memories()],
        "default_memory_kind": device.default_memory().kind,
    }
    for device in jax.local_devices()
]
print(json.dumps({"backend": jax.default_backend(), "devices": devices}))
"""


class Problem(NamedTuple):
    """A problem and its remedy."""

    what: str
    remedy: str


ENGINES = {
    "vllm": ("vLLM", vllm.VERSIONS, vllm.VARIABLE, (vllm.KNOWN, vllm.STRICT)),
    "easydel": ("EasyDeL", (easydel.VERSION,), easydel.VARIABLE, ()),
}
"""Engines with an adapter, by the common name of distribution, package and adapter: display name, supported versions, the
adapter's variable, and its values besides `ON` that turn it on.
"""

SHOW_LEFT = {
    "vllm": "; from pagepool.compat.vllm import report; "
    "print('; '.join(': '.join(part) for part in report().parts if part[1] != 'used'))"
}
"""Python code that prints the parts left to an engine, and why."""


def find_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def inspect_versions(problems: list[Problem]) -> dict[str, Any]:
    """Return the versions of pagepool and its platform. It is a problem if the imported pagepool is not the installed one."""
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
    """Return how the core was built. A core without guards is a problem: it is for measurements only."""
    flags = build_flags()
    if not flags["guards"]:
        problems.append(Problem("the core was built without guards", "build it again without PAGEPOOL_UNGUARDED"))
    return dict(flags)


def inspect_extras(problems: list[Problem]) -> dict[str, dict[str, str | None]]:
    """Return the version of each package of each extra, None for missing ones. A package that is too old or cannot be imported
    is a problem. All packages but jax are imported.
    """
    try:
        requirements = requires("pagepool") or []
    except PackageNotFoundError:
        requirements = []
    extras: dict[str, dict[str, str | None]] = {}
    for match in filter(None, map(REQUIREMENT.match, requirements)):
        name, least, extra = match.groups()
        if extra in EXTRAS and name != "pagepool":
            found = extras.setdefault(extra, {})[name] = find_version(name)
            if found is None or name == "jax":  # jax itself is checked by `inspect_jax`
                continue
            if least is not None and _numbers(found) < _numbers(least):
                what = f"{name} {found} is older than {least}, which pagepool[{extra}] needs"
                problems.append(Problem(what, f"pip install --upgrade 'pagepool[{extra}]'"))
            try:
                import_module(MODULES.get(name, name.replace("-", "_")))
            except Exception as error:  # an import may raise anything
                what = f"{name} {found} cannot be imported: {error!r}"
                problems.append(Problem(what, f"pip install --force-reinstall {name}"))
    return {extra: extras[extra] for extra in EXTRAS if extra in extras}


def _numbers(text: str) -> list[int]:
    """Return the leading numbers of a version.

    >>> _numbers("2.40.1rc3"), _numbers("1.2.dev0")
    ([2, 40, 1], [1, 2])
    """
    return [int(part) for part in re.split(r"[^\d.]", text)[0].split(".") if part]


def inspect_jax(problems: list[Problem]) -> dict[str, Any] | None:
    """Return jax's version, its backend, and its devices with their kinds of memory; None if it is not installed. A jax that is
    too old or does not start is a problem; the latter has only a version. This takes a second, and more on some devices.
    """
    found = find_version("jax")
    if found is None:
        return None
    if _numbers(found) < _numbers(LEAST_JAX):
        what = f"jax {found} is older than {LEAST_JAX} and refused, since {WHY_LEAST_JAX}"
        problems.append(Problem(what, "pip install --upgrade 'pagepool[jax]'"))
    figures: dict[str, Any] = {"version": found}
    output, fault = _run_python(LIST_DEVICES)
    if fault is None:
        figures |= json.loads(output.splitlines()[-1])
    else:
        remedy = "install the jaxlib of this jax for this device, end what holds the device, or set JAX_PLATFORMS=cpu"
        problems.append(Problem(f"jax {found} does not start: {fault}", remedy))
    return figures


def inspect_engines(problems: list[Problem], tries_all: bool = False) -> dict[str, dict[str, Any]]:
    """Return for each engine its version, whether it is supported, whether its variable is on, and whether pagepool replaces
    its allocator, None if not tried. A try imports the engine, which takes many seconds; engines whose variable is on are
    tried, with `tries_all` all installed ones.
    """
    return {name: _inspect_engine(problems, tries_all, name, *facts) for name, facts in ENGINES.items()}


def _inspect_engine(
    problems: list[Problem],
    tries_all: bool,
    name: str,
    label: str,
    versions: tuple[str, ...],
    variable: str,
    values: tuple[str, ...],
) -> dict[str, Any]:
    found = find_version(name)
    is_supported = found is not None and any(fnmatchcase(found, one) for one in versions)
    value, is_on = "", False
    try:
        value = read_switch(variable, values)
        is_on = value in ON + values
    except CompatError as error:
        problems.append(Problem(str(error), f"set {variable} to one of these"))
    right_one = f"'{name}=={versions[-1]}', or unset {variable}"
    can_fit = is_supported or (found is not None and name == "vllm" and value != vllm.KNOWN)
    if is_on and not can_fit:
        got = "not installed" if found is None else f"version {found}, which is not supported"
        problems.append(Problem(f"{variable} is on, but {label} is {got}", f"pip install {right_one}"))
    if is_on and name == "vllm":
        if "pagepool" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
            remedy = "install pagepool into the environment of vLLM"
            problems.append(Problem("vLLM does not see pagepool's plug-in", remedy))
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "pagepool" not in plugins.split(","):
            problems.append(Problem(f"VLLM_PLUGINS={plugins} leaves pagepool out", "add pagepool to VLLM_PLUGINS"))
    keeps_hits = name == "easydel" and _inspect_recurrent_hits(problems, is_on)
    is_replaced = None
    if can_fit and (is_on or tries_all):
        options = f"strict={value == vllm.STRICT}" if name == "vllm" else ""
        output, fault = _run_python(f"from pagepool.compat.{name} import install; install({options}){SHOW_LEFT.get(name, '')}")
        left = "".join(output.splitlines()[-1:])  # after the engine's log
        is_replaced = fault is None
        if not is_replaced:
            problems.append(Problem(f"{label} refuses pagepool: {fault}", f"pip install --force-reinstall {right_one}"))
        elif left and name in SHOW_LEFT:
            problems.append(Problem(f"{label} {found} keeps parts of its own: {left}", f"pip install {right_one}"))
    return {
        "name": label,
        "version": found,
        "supported_versions": ", ".join(versions),
        "is_supported": is_supported,
        "variable": variable,
        "is_on": is_on,
        "is_replaced": is_replaced,
        "hints": _inspect_hints(problems) if name == "vllm" else None,
        "without_prefix_caching": "models with recurrent layers" if name == "easydel" and not keeps_hits else None,
    }


def _inspect_hints(problems: list[Problem]) -> str | None:
    """Return which hints of vLLM's requests are heard: "sessions", "all" or None."""
    try:
        return vllm.read_hints() or None
    except CompatError as error:
        problems.append(Problem(str(error), f"set {vllm.HINTS_VARIABLE} to one of these"))
        return None


def _inspect_recurrent_hits(problems: list[Problem], is_on: bool) -> bool:
    """Whether EasyDeL's prefix caching stays on for models with recurrent layers; with pagepool on this is a problem."""
    remedy = f"unset {easydel.RECURRENT_VARIABLE}"
    try:
        keeps_hits = recurrent.keeps_hits()
    except CompatError as error:
        problems.append(Problem(str(error), remedy))
        return False
    if keeps_hits and is_on:
        what = f"{easydel.RECURRENT_VARIABLE} is on: prefix hits of models with recurrent layers start from a zero state"
        problems.append(Problem(what, remedy))
    return keeps_hits


def _run_python(code: str) -> tuple[str, str | None]:
    """Run code in another process with this one's import path. Return its output, and the error if it failed. jax does not
    preallocate device memory there.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-P", "-c", code]
    try:
        process = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"nothing happened for {SECONDS} seconds"
    if process.returncode == 0:
        return process.stdout, None
    lines = process.stderr.strip().splitlines()
    return "", lines[-1] if lines and process.returncode > 0 else f"the process ended with exit code {process.returncode}"
