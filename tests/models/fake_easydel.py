"""A package named easydel with only what the adapter reads, as recorded, in a separate folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sources import INSTALLED

import pagepool
from pagepool.compat.easydel import ENGINE, PLACES, SCHEDULER, SIGNATURES, VARIABLE, VERSION
from pagepool.compat.easydel.recurrent import FROM_RUNNER

HOME = f"{ENGINE}.core.manager"
"""The module that defines the engine's own manager."""

SHOW = f"import sys; from {ENGINE}.scheduler import scheduler; print(scheduler.CacheManager.__module__)"
"""Prints the module that defines the engine's manager: `HOME`, or pagepool's."""


SCHEDULER_SOURCE = f"""
class Scheduler:
    @classmethod
    def from_runner{FROM_RUNNER.replace("(", "(cls, ")}:
        return cls, runner, max_num_batched_tokens, enable_prefix_caching, async_scheduling, long_prefill_token_threshold
"""
"""The engine's scheduler: what it would be made with."""


def run_python(folder: Path, *arguments: str, value: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a new Python in the folder, which sees its packages and the current pagepool, with `VARIABLE` set to `value`."""
    path = str(folder) if INSTALLED else os.pathsep.join([str(folder), str(Path(pagepool.__file__).parents[1])])
    env = {name: text for name, text in os.environ.items() if name not in (VARIABLE, "PYTHONSAFEPATH")}
    env |= {"PYTHONPATH": path} | ({} if value is None else {VARIABLE: value}) | variables
    options: dict[str, Any] = {"env": env, "cwd": folder, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *arguments], **options)


def pop_modules(package: str = "easydel") -> dict[str, ModuleType]:
    """Remove the package's modules from sys.modules."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")}


def write_engine(folder: Path, version: str = VERSION) -> None:
    """Write the package: each class in its defining module, imported in its other places. What was written before is gone: its
    bytecode, of the same second and length, would count as that of the new files.
    """
    shutil.rmtree(folder / "easydel", ignore_errors=True)
    engine = folder.joinpath(*ENGINE.split("."))
    for place in sorted({place for places in PLACES.values() for place in places}):
        path = engine.joinpath(*place.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(module_source(place)) if place not in ("", "core") else None
    for package, source in {"": module_source(""), "core": module_source("core"), "runners": "", "scheduler": ""}.items():
        (engine / package / "__init__.py").write_text(source)
    (folder / "easydel" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "easydel" / "inference" / "__init__.py").write_text("")


def module_source(place: str) -> str:
    defined = [class_source(name) for name, places in PLACES.items() if places[0] == place]
    imported = [f"from {ENGINE}.{places[0]} import {name}\n" for name, places in PLACES.items() if place in places[1:]]
    modules = sorted({other for places in PLACES.values() for other in places if other})
    submodules = [f"import {ENGINE}.{module}\n" for module in modules] if place == "" else []
    scheduler = [SCHEDULER_SOURCE] if place == SCHEDULER else []
    return "".join([*defined, *imported, *submodules, *scheduler])


def class_source(name: str) -> str:
    methods = "".join(method_source(*method) for method in SIGNATURES[name].items())
    return f"class {name}:\n{methods}\n"


def method_source(name: str, signature: str) -> str:
    if signature == "property":
        return f"    @property\n    def {name}(self): ...\n"
    return f"    def {name}{signature}: ...\n"


without_easydel = pytest.mark.skipif(importlib.util.find_spec("easydel") is not None, reason="EasyDeL is installed")
