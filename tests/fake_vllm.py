"""A package named vllm with only what the adapter reads, as recorded, in a separate folder; and what replaces it, in Python."""

from __future__ import annotations

import ast
import hashlib
import inspect
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import fake_easydel
from sources import ROOT

from pagepool.compat.vllm import VARIABLE
from pagepool.compat.vllm.engine import COORDINATOR, DIGESTS, GROUPS, MANAGER, OURS, POOL, REPLACEMENTS, SIGNATURES, UTILS
from pagepool.compat.vllm.policy import choices_for

VERSION = "0.33.0"
ENGINE_CORE = "vllm.v1.engine.core"
HEADERS = {
    POOL: f"from {UTILS} import FreeKVCacheBlockQueue, KVCacheBlock, make_block_hash_with_group_id\n",
    COORDINATOR: f"from {POOL} import BlockPool\n",
    GROUPS: f"from {POOL} import BlockPool\n",
    MANAGER: f"import {COORDINATOR}, {GROUPS}\nfrom {UTILS} import KVCacheBlock\n",
}
CONSTRUCTORS = {
    "BlockPool": "    def __init__(self, num_gpu_blocks=4):\n"
    "        self.blocks = [KVCacheBlock(i, pool=self) for i in range(num_gpu_blocks)]\n"
    "        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)\n"
    "        self.cached_block_hash_to_block = BlockHashToBlockMap()\n"
    "    def reset_prefix_cache(self):\n"
    "        self.cached_block_hash_to_block = BlockHashToBlockMap()\n"
    "        return True\n",
}
SHOW = f"from {ENGINE_CORE} import get_request_block_hasher; print(get_request_block_hasher.__module__)"
"""Prints the module that defines the hasher that an engine calls."""


def definition_source(home: str, name: str) -> str:
    members = [item.name.partition(".")[2] for item in REPLACEMENTS if item.home == home and item.name.startswith(f"{name}.")]
    if name not in SIGNATURES and not name[0].isupper():
        return f"def {name}(*arguments): ...\n"
    if not name[0].isupper():
        return f"def {name}{SIGNATURES[name]}: ...\n"
    constructor = CONSTRUCTORS.get(name, "")
    if name in SIGNATURES:
        signature = "(self)" if SIGNATURES[name] == "()" else SIGNATURES[name].replace("(", "(self, ", 1)
        constructor = f"    def __init__{signature}: ...\n"
    return (
        f"class {name}:\n{constructor}"
        + "".join(map(method_source, (f"{name}.{member}" for member in members)))
        + "    x = 1\n"
    )


def method_source(name: str) -> str:
    kind = "    @classmethod\n" if SIGNATURES[name].startswith("(cls") else ""
    return f"{kind}    def {name.partition('.')[2]}{SIGNATURES[name]}: ...\n"


def module_source(home: str) -> str:
    return HEADERS.get(home, "") + "".join(definition_source(home, name) for name in DIGESTS[home])


def path_of(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def write_engine(folder: Path, version: str = VERSION) -> None:
    """Write the package, with a module that binds the hasher as vLLM's engine core does."""
    shutil.rmtree(folder / "vllm", ignore_errors=True)
    sources = {home: module_source(home) for home in DIGESTS}
    sources[ENGINE_CORE] = f"import {MANAGER}\nfrom {UTILS} import get_request_block_hasher\n"
    for module, source in sources.items():
        path = path_of(folder, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for package in {path_of(folder, module).parent for module in sources} | {folder / "vllm" / "v1"}:
        (package / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")


def fake_digests() -> dict[str, dict[str, str]]:
    """Return the digests of the package's definitions."""
    return {home: dict(digests_of(module_source(home))) for home in DIGESTS}


def digests_of(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            yield node.name, hashlib.sha256(text.encode()).hexdigest()


def replacement_source(name: str) -> str:
    arguments = "(*arguments, **options)"
    return (
        f"class {name}:\n    def __init__{arguments}: ...\n" if name[0].isupper() else f"def {name}{arguments}: return 'ours'\n"
    )


def replacement_sources() -> dict[str, str]:
    """Return the sources of modules with the names of the compiled ones, and with what they define."""
    items = [choice for item in REPLACEMENTS for choice in choices_for(item)]
    return {
        f"{OURS}.{module}": "".join(replacement_source(item.ours) for item in items if item.module == module)
        for module in sorted({item.module for item in items})
    }


def make_module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    return module


def make_replacements() -> dict[str, ModuleType]:
    return {name: make_module(name, source) for name, source in replacement_sources().items()}


def write_customization(folder: Path) -> None:
    """Let each Python that starts in the folder have these digests and replacements."""
    lines = [
        "import sys",
        "from types import ModuleType",
        "from pagepool.compat.vllm.engine import DIGESTS",
        f"DIGESTS.update({fake_digests()!r})",
        inspect.getsource(make_module),
        f"sys.modules.update({{name: make_module(name, source) for name, source in {replacement_sources()!r}.items()}})",
    ]
    (folder / "sitecustomize.py").write_text("\n".join(lines))


def declared_entry_point() -> EntryPoint:
    """Return the plug-in that the package declares."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    [(name, value)] = groups["vllm.general_plugins"].items()
    return EntryPoint(name, value, "vllm.general_plugins")


def write_distribution(folder: Path) -> None:
    """Let each Python with the folder in its path find the plug-in, as if the package was installed."""
    info, entry_point = folder / "pagepool-0.dist-info", declared_entry_point()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagepool\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{entry_point.group}]\n{entry_point.name} = {entry_point.value}\n")


def run_python(folder: Path, *arguments: str, value: str = "") -> subprocess.CompletedProcess[str]:
    """Run a new Python in the folder, which sees its packages and the current pagepool, with `VARIABLE` set to `value`."""
    return fake_easydel.run_python(folder, *arguments, **{VARIABLE: value})
