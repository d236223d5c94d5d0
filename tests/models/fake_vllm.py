"""A package named vllm with only what the adapter reads, as recorded, in a separate folder; and what replaces it, in Python."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import fake_easydel
from sources import ROOT

from pagepool.compat.vllm import VARIABLE
from pagepool.compat.vllm.engine import COORDINATOR, DIGESTS, GROUPS, HINTS, INHERITED, MANAGER, OURS, POOL, REPLACEMENTS, UTILS
from pagepool.compat.vllm.policy import choices_for
from pagepool.compat.vllm.sources import digests_of

VERSION = "0.33.0"
FAKE_CHANGES: dict[str, dict[str, str]] = {VERSION: {}}
ENGINE_CORE = "vllm.v1.engine.core"
HEADERS = {
    POOL: f"from {UTILS} import FreeKVCacheBlockQueue, KVCacheBlock, make_block_hash_with_group_id\n",
    COORDINATOR: f"from {POOL} import BlockPool\n",
    GROUPS: f"from {POOL} import BlockPool\n",
    MANAGER: f"import {COORDINATOR}, {GROUPS}\nfrom {UTILS} import KVCacheBlock\n",
}
POOL_METHODS = """
    def __init__(self, num_gpu_blocks=4):
        self.blocks = [KVCacheBlock(i, pool=self) for i in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()

    def reset_prefix_cache(self):
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        return True
"""
SHOW = f"from {ENGINE_CORE} import get_request_block_hasher; print(get_request_block_hasher.__module__)"
"""Prints the module that defines the hasher that an engine calls."""


HOMES = tuple(dict.fromkeys(place.split(":")[0] for recorded in DIGESTS.values() for place in recorded))
RECORDED = {
    home: {
        place.split(":")[1]: digest
        for recorded in DIGESTS.values()
        for place, digest in recorded.items()
        if place.startswith(f"{home}:")
    }
    for home in HOMES
}
"""What the parts rely on, by module: classes, functions and methods, with their digests."""


def module_source(home: str) -> str:
    """Return a source with all that is recorded of a module."""
    owners = dict.fromkeys(name.partition(".")[0] for name in RECORDED[home])
    return HEADERS.get(home, "") + "".join(definition_source(owner, members_of(home, owner)) for owner in owners)


def members_of(home: str, owner: str) -> list[str]:
    names = [name for name, digest in RECORDED[home].items() if digest != INHERITED]
    return [name.partition(".")[2] for name in names if name.startswith(f"{owner}.")]


def definition_source(name: str, members: Iterable[str]) -> str:
    if not name.lstrip("_")[0].isupper():
        return f"def {name}(*arguments, **options): ...\n"
    own = POOL_METHODS if name == "BlockPool" else "    def __init__(self, *arguments, **options): ...\n"
    return f"class {name}:\n{own}" + "".join(map(method_source, members))


def method_source(name: str) -> str:
    kind = "    @classmethod\n" if name == "find_longest_cache_hit" else ""
    return f"{kind}    def {name}(self, *arguments, **options): ...\n"


def path_of(folder: Path, module: str) -> Path:
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def write_engine(folder: Path, version: str = VERSION) -> None:
    """Write the package, with a module that binds the hasher as vLLM's engine core does."""
    shutil.rmtree(folder / "vllm", ignore_errors=True)
    sources = {home: module_source(home) for home in HOMES}
    sources[ENGINE_CORE] = f"import {MANAGER}\nfrom {UTILS} import get_request_block_hasher\n"
    for module, source in sources.items():
        path = path_of(folder, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for package in {path_of(folder, module).parent for module in sources} | {folder / "vllm" / "v1"}:
        (package / "__init__.py").touch()
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")


def fake_digests() -> dict[str, dict[str, str]]:
    """Return `DIGESTS` with those of the package's definitions."""
    found = {f"{home}:{name}": digest for home in HOMES for name, digest in digests_of(module_source(home)).items()}
    return {part: {place: found.get(place, INHERITED) for place in recorded} for part, recorded in DIGESTS.items()}


def replacement_source(name: str) -> str:
    arguments = "(*arguments, **options)"
    return (
        f"class {name}:\n    def __init__{arguments}: ...\n" if name[0].isupper() else f"def {name}{arguments}: return 'ours'\n"
    )


def replacement_sources() -> dict[str, str]:
    """Return the sources of modules with the names of the compiled ones, and with what they define."""
    items = [choice for item in (*REPLACEMENTS, *HINTS.replacements) for choice in choices_for(item)]
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
        "from pagepool.compat.vllm.engine import CHANGES, DIGESTS",
        f"CHANGES.clear(), CHANGES.update({FAKE_CHANGES!r}), DIGESTS.update({fake_digests()!r})",
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
