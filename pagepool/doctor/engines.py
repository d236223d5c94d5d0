"""jax and its devices, the engines, and whether pagepool would allocate for them. Each starts in a process of its own."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from pagepool.compat import easydel, vllm
from pagepool.compat.switch import ON, read_switch
from pagepool.doctor.environment import Problem, find_version
from pagepool.errors import CompatError

__all__ = ["inspect_engines", "inspect_jax"]

SECONDS = 300
"""How long jax or an engine may take to start."""

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


class Engine(NamedTuple):
    """An engine for which `pagepool.compat` has an adapter."""

    name: str
    """Of the distribution, of its package and of the adapter."""
    label: str
    versions: str
    variable: str
    values: tuple[str, ...]
    """What turns the adapter on, besides `ON`."""


ENGINES = (
    Engine("vllm", "vLLM", vllm.VERSIONS, vllm.VARIABLE, (vllm.STRICT,)),
    Engine("easydel", "EasyDeL", easydel.VERSION, easydel.VARIABLE, ()),
)


def inspect_jax(problems: list[Problem]) -> dict[str, Any] | None:
    """Return jax's version, its backend, and its devices with their kinds of memory; None if it is not installed. A jax that
    does not start is a problem, and has the version alone. Takes a second, and more on some devices.
    """
    found = find_version("jax")
    if found is None:
        return None
    figures: dict[str, Any] = {"version": found}
    output, fault = _run_python(LIST_DEVICES)
    if fault is None:
        figures.update(json.loads(output.splitlines()[-1]))
        return figures
    remedy = "install the jaxlib of this jax for this device, end what holds the device, or set JAX_PLATFORMS=cpu"
    problems.append(Problem(f"jax {found} does not start: {fault}", remedy))
    return figures


def inspect_engines(problems: list[Problem], tries_all: bool = False) -> dict[str, dict[str, Any]]:
    """Return for each engine its version, whether it is supported, whether its variable is on, and whether pagepool takes its
    place: None if that was not tried. It is tried where the variable is on, or, with `tries_all`, where the engine is
    installed; that imports the engine, which takes many seconds.
    """
    return {engine.name: _inspect_engine(engine, problems, tries_all) for engine in ENGINES}


def _inspect_engine(engine: Engine, problems: list[Problem], tries_all: bool) -> dict[str, Any]:
    found = find_version(engine.name)
    is_supported = found is not None and fnmatchcase(found, engine.versions)
    try:
        is_on = read_switch(engine.variable, engine.values) in ON + engine.values
    except CompatError as error:
        problems.append(Problem(str(error), f"set {engine.variable} to one of these"))
        is_on = False
    faults = _find_faults(engine, found, is_supported) if is_on else []
    is_tried = is_supported and (is_on or tries_all)
    refusal = _try(engine) if is_tried else None
    problems += faults + ([] if refusal is None else [refusal])
    return {
        "name": engine.label,
        "version": found,
        "supported_versions": engine.versions,
        "is_supported": is_supported,
        "variable": engine.variable,
        "is_on": is_on,
        "is_replaced": refusal is None if is_tried else None,
    }


def _find_faults(engine: Engine, found: str | None, is_supported: bool) -> list[Problem]:
    """Return why an engine would run without pagepool though its variable is on."""
    faults = []
    if not is_supported:
        got = "not installed" if found is None else f"version {found}, which is not supported"
        remedy = f"pip install '{engine.name}=={engine.versions}', or unset {engine.variable}"
        faults.append(Problem(f"{engine.variable} is on, but {engine.label} is {got}", remedy))
    if engine.name == "vllm":
        if "pagepool" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
            faults.append(Problem("vLLM does not see pagepool's plug-in", "install pagepool into the environment of vLLM"))
        plugins = os.environ.get("VLLM_PLUGINS")
        if plugins is not None and "pagepool" not in plugins.split(","):
            faults.append(Problem(f"VLLM_PLUGINS={plugins} leaves pagepool out", "add pagepool to VLLM_PLUGINS"))
    return faults


def _try(engine: Engine) -> Problem | None:
    """Install the adapter in another process. Return what was wrong."""
    _, fault = _run_python(f"from pagepool.compat.{engine.name} import install; install()")
    if fault is None:
        return None
    remedy = f"pip install --force-reinstall '{engine.name}=={engine.versions}', or unset {engine.variable}"
    return Problem(f"{engine.label} refuses pagepool: {fault}", remedy)


def _run_python(code: str) -> tuple[str, str | None]:
    """Run code in another process, which imports what this one would. Return its output, and what was wrong, if anything.

    jax takes no memory of a device there before it needs it.
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
