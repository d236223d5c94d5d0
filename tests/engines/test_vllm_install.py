"""The adapter of vLLM on a fake package: replaced definitions, every reason to refuse, and the plug-in."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import logging
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_easydel import pop_modules
from fake_vllm import (
    ENGINE_CORE,
    SHOW,
    declared_entry_point,
    fake_digests,
    make_replacements,
    path_of,
    run_python,
    write_customization,
    write_engine,
)
from sources import MODELS, on_the_wheel

from pagepool.compat import children, vllm
from pagepool.compat.vllm import checks, plugin
from pagepool.compat.vllm.checks import find_obstacles, function_of, import_homes, record
from pagepool.compat.vllm.engine import (
    COORDINATOR,
    DIGESTS,
    GROUPS,
    HINTS,
    INHERITED,
    MANAGER,
    OURS,
    PARTS,
    POOL,
    REPLACEMENTS,
    UTILS,
    Replacement,
)
from pagepool.compat.vllm.policy import wanted_parts
from pagepool.compat.vllm.sources import digests_of
from pagepool.errors import CompatError

REQUEST = "vllm.v1.request"
BLOCK, _, MAP, HASHER, *METHODS = REPLACEMENTS
DEPENDENT = {"blocks": {"pool", "hits", "slots"}, "pool": {"hits", "slots"}} | {
    name: set[str]() for name in ("hits", "slots", "hasher", "hints")
}
"""The parts that need another one."""
LISTED = ", ".join(vllm.VERSIONS)
ALLOCATE_SLOTS = f"{MANAGER}.KVCacheManager.allocate_slots"
DIFFERS = "differs from the tested versions, or is patched: "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with the package, first in the path, and replacements in Python. Real modules are restored afterwards."""
    modules = pop_modules("vllm")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(vllm, "_homes", {})
    monkeypatch.setattr(vllm, "_obstacles", {})
    monkeypatch.setattr(children, "_actions", [])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    monkeypatch.delenv(vllm.EVICTION_VARIABLE, raising=False)
    monkeypatch.delenv(vllm.HINTS_VARIABLE, raising=False)
    monkeypatch.setattr(checks, "DIGESTS", fake_digests())
    monkeypatch.setattr(checks, "CHANGES", {"0.33.0": {}})
    for name, module in make_replacements().items():
        monkeypatch.setitem(sys.modules, name, module)
    write_engine(tmp_path)
    yield tmp_path
    vllm.uninstall()
    pop_modules("vllm")
    sys.modules.update(modules)


def engine_module(name: str) -> Any:
    return importlib.import_module(name)


def found(item: Replacement) -> Any:
    """Return what vLLM has in a place, of a class its own."""
    owner, _, name = item.name.rpartition(".")
    module = engine_module(item.home)
    return vars(getattr(module, owner) if owner else module)[name]


def ours(item: Replacement) -> Any:
    return getattr(sys.modules[f"{OURS}.{item.module}"], item.ours)


def state() -> list[Any]:
    """Return all that is replaced, and what else may change."""
    return [*map(found, REPLACEMENTS), engine_module(ENGINE_CORE).get_request_block_hasher, *children._actions, *sys.meta_path]


def edit(folder: Path, module: str, old: str, new: str) -> None:
    path = path_of(folder, module)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def replace(home: str, name: str, value: Any = lambda *arguments: None) -> None:
    """Put something in the place of a definition, of a class in the class itself."""
    owner, _, member = name.rpartition(".")
    setattr(getattr(engine_module(home), owner) if owner else engine_module(home), member, value)


def check_refused(message: str, **options: bool) -> None:
    """Check that `install` raises and changes nothing, twice."""
    before = state() if "vllm" in sys.modules else None
    for _ in range(2):
        with pytest.raises(CompatError, match=message) as caught:
            vllm.install(**options)
        assert "\n" not in str(caught.value)
        assert not vllm.is_installed()
        assert not vllm.report().replaced
    assert before is None or all(a is b for a, b in zip(before, state(), strict=True))


def check_left(part: str, reason: str) -> None:
    """Check that a part is left to vLLM for a reason, with those that need it, and is refused where all parts are wanted."""
    obstacles = find_obstacles(import_homes(), wanted_parts())
    assert re.fullmatch(reason, obstacles[part]), obstacles
    left = {part, *DEPENDENT[part]}
    assert {name for name, obstacle in obstacles.items() if obstacle} >= left
    check_refused(rf"^vLLM 0\.33\.0 {DIFFERS}(.*; )?{part}: ", strict=True)
    vllm.install()
    assert dict(vllm.report().parts) == {name: obstacle or "used" for name, obstacle in obstacles.items()}
    for one in PARTS:
        for item in one.replacements:
            assert (function_of(found(item)) is ours(item)) == (not obstacles[one.name])
    vllm.uninstall()


# Replacing.


def test_all_places_get_ours_and_get_back_vllms(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Twice is as once. What keeps vLLM's functions is told before they are replaced."""
    caplog.set_level(logging.WARNING, "pagepool")  # other tests run programs that set a higher one
    before, kept, hasher = state(), [], sys.modules[f"{OURS}.hasher"]
    hasher.bind = lambda: kept.append(found(HASHER))  # type: ignore[attr-defined]
    vllm.uninstall()
    vllm.install()
    assert kept == [before[REPLACEMENTS.index(HASHER)]]
    assert not caplog.messages
    vllm.install()
    assert caplog.messages == ["vLLM already allocates with pagepool"]
    assert vllm.is_installed()
    assert all(function_of(found(item)) is ours(item) for item in REPLACEMENTS)
    assert engine_module(ENGINE_CORE).get_request_block_hasher is ours(HASHER)
    assert engine_module(POOL).KVCacheBlock is engine_module(MANAGER).KVCacheBlock is ours(BLOCK)
    assert engine_module(POOL).BlockPool().touch([]) == "ours"
    kinds = [type(found(item)) for item in METHODS if item.name.endswith("find_longest_cache_hit")]
    assert {*kinds} == {classmethod}
    assert engine_module(GROUPS).SlidingWindowManager.find_longest_cache_hit() == "ours"
    for _ in range(2):
        vllm.uninstall()
        assert not vllm.is_installed()
        assert all(a is b for a, b in zip(before, state(), strict=True))


def test_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = str(vllm.report()).splitlines()
    assert lines[0] == "vLLM not imported, pagepool not installed, eviction: vLLM's"
    assert [line.split(None, 1) for line in lines[1:]] == [[part.name, "not installed"] for part in PARTS]
    vllm.install()
    report = vllm.report()
    assert (report.version, report.is_installed, report.eviction) == ("0.33.0", True, "vLLM's")
    assert report.replaced == tuple((item.place, f"{OURS}.{item.module}.{item.ours}") for item in REPLACEMENTS)
    lines = str(report).splitlines()
    assert lines[0] == "vLLM 0.33.0, pagepool installed, eviction: vLLM's"
    rows = [[part.name, "used"] for part in PARTS] + [[item.place, item.source] for item in REPLACEMENTS]
    assert [line.split() for line in lines[1:]] == rows


def test_an_eviction_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the time at which pagepool was installed."""
    monkeypatch.setenv(vllm.EVICTION_VARIABLE, " Adaptive ")
    with vllm.installed():
        monkeypatch.delenv(vllm.EVICTION_VARIABLE)
        assert vllm.is_installed()
        assert vllm.report().eviction == "adaptive"
        assert dict(vllm.report().replaced)[f"{UTILS}.FreeKVCacheBlockQueue"] == f"{OURS}.policy_queue.AdaptiveQueue"
        assert engine_module(UTILS).FreeKVCacheBlockQueue is sys.modules[f"{OURS}.policy_queue"].AdaptiveQueue
    assert not vllm.is_installed()
    assert engine_module(UTILS).FreeKVCacheBlockQueue.__module__ == UTILS
    monkeypatch.setenv(vllm.EVICTION_VARIABLE, "fifo")
    check_refused("EVICTION: got 'fifo', allowed: adaptive; lru or nothing")


def test_hints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the time at which pagepool was installed. Without the part that hears them nothing listens."""
    free, methods = f"{MANAGER}.KVCacheManager.free", engine_module(MANAGER).KVCacheManager
    original = vars(methods)["free"]
    monkeypatch.setenv(vllm.HINTS_VARIABLE, " Sessions")
    with vllm.installed():
        monkeypatch.delenv(vllm.HINTS_VARIABLE)
        assert vllm.is_installed()
        assert (vllm.report().hints, dict(vllm.report().parts)["hints"]) == ("sessions", "used")
        assert dict(vllm.report().replaced)[free] == f"{OURS}.turns.free"
        assert dict(vllm.report().replaced)[f"{UTILS}.FreeKVCacheBlockQueue"] == f"{OURS}.session_queue.ListeningQueue"
    assert vars(methods)["free"] is original
    with vllm.installed():
        assert (vllm.report().hints, vars(methods)["free"]) == ("none", original)
    monkeypatch.setenv(vllm.HINTS_VARIABLE, "all")
    methods.free = patch = lambda self, request: None
    with vllm.installed():
        assert (vllm.report().hints, vars(methods)["free"]) == ("none", patch)
        assert "somebody else replaced it" in dict(vllm.report().parts)["hints"]
        assert dict(vllm.report().parts)["slots"] == "used"
    monkeypatch.setenv(vllm.HINTS_VARIABLE, "1")
    check_refused("HINTS: got '1', allowed: sessions, all; 0, false, no, off or nothing")


def test_a_pool_that_was_made_meanwhile_lives_on(folder: Path) -> None:
    """After a reset its map is ours again. Pagepool may be installed again."""
    with vllm.installed():
        pool = engine_module(POOL).BlockPool()
    assert pool.reset_prefix_cache()
    assert type(pool.cached_block_hash_to_block) is ours(MAP)
    assert type(engine_module(POOL).BlockPool().cached_block_hash_to_block) is found(MAP)
    gc.collect()
    vllm.install()


def test_a_patch_over_ours_stays(folder: Path) -> None:
    vllm.install()
    cls = engine_module(POOL).BlockPool
    cls.touch = patch = lambda self, blocks: None
    assert not vllm.is_installed()
    assert len(vllm.report().replaced) == len(REPLACEMENTS) - 1
    assert dict(vllm.report().parts) == {part.name: "not installed" if part.name == "pool" else "used" for part in PARTS}
    vllm.uninstall()
    assert vars(cls)["touch"] is patch
    assert function_of(vars(cls)["free_blocks"]) is not ours(METHODS[3])


# Refusing.


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        *((version, False) for version in ("0.30.9", "0.3.3", "0.330.1", "1.33.0", "dev", "")),
        *((version, True) for version in ("0.31.0", "0.32.1", "0.33.0", "0.33.1.dev3+g12", "0.33.0+cpu")),
    ],
)
def test_a_version(folder: Path, version: str, is_known: bool) -> None:
    """An unknown one is served as long as nothing differs, unless a known one is wanted."""
    write_engine(folder, version)
    if not is_known:
        check_refused(rf"^vLLM's version: got {version}, allowed: {re.escape(LISTED)}$", known=True)
    vllm.install(strict=True, known=is_known)
    assert vllm.report().version == version


@pytest.mark.parametrize(
    ("part", "home", "name"),
    [
        pytest.param(part, *place.split(":"), marks=pytest.mark.slow if i % 8 else ())
        for part, recorded in DIGESTS.items()
        for i, place in enumerate(recorded)
    ],
)
def test_another_source(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, home: str, name: str) -> None:
    """A definition of each kind, or one where it was inherited."""
    if part == HINTS.name:
        monkeypatch.setenv(vllm.HINTS_VARIABLE, "all")
    owner, _, method = name.rpartition(".")
    if owner and DIGESTS[part][f"{home}:{name}"] == INHERITED:
        edit(folder, home, f"class {owner}:\n", f"class {owner}:\n    def {method}(self): return 1\n")
    elif owner:
        head, start, rest = path_of(folder, home).read_text().partition(f"class {owner}:\n")
        path_of(folder, home).write_text(head + start + rest.replace(f"def {method}(self", f"def {method}(self, other", 1))
    elif f"class {name}:" in path_of(folder, home).read_text():
        edit(folder, home, f"class {name}:\n", f"class {name}:\n    x = 1\n")
    else:
        edit(folder, home, f"def {name}(", f"def {name}(other, ")
    check_left(part, rf"{home}\.{name}: another source")


def test_comments_and_layout_do_not_count(folder: Path) -> None:
    edit(folder, POOL, "class BlockPool:\n", 'class BlockPool:\n    """Blocks."""\n    # their methods\n\n')
    old = "def touch(self, *arguments, **options): ..."
    edit(folder, POOL, old, 'def touch(self, *arguments,  **options):\n        """T."""\n        ...')
    vllm.install(strict=True)


def test_a_version_is_fitted_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tested versions with other sources; a mixture of both is none of them."""
    digests = import_homes() and record(import_homes())
    assert digests == {}
    older = {f"{POOL}:BlockPool.touch": "t" * 16, f"{POOL}:BlockPool.free_blocks": "f" * 16}
    monkeypatch.setattr(checks, "CHANGES", {"0.32.0": older, "0.33.0": {}})
    vllm.install(strict=True)
    vllm.uninstall()
    monkeypatch.setattr(checks, "CHANGES", {"0.31.0": older, "0.32.0": {f"{POOL}:BlockPool.touch": "t" * 16}})
    check_left("pool", rf"{POOL}\.BlockPool\.touch: another source")


def test_each_replacement_is_recorded_in_its_part() -> None:
    for part in (*PARTS, HINTS):
        assert all(f"{item.home}:{item.name}" in DIGESTS[part.name] for item in part.replacements)


def wrapped(function: Any) -> Any:
    """Return a function with the name, module and source of another one."""
    return functools.wraps(function)(lambda *arguments: function(*arguments))


@pytest.mark.parametrize("item", REPLACEMENTS, ids=lambda item: item.name)
@pytest.mark.parametrize("patch", [wrapped, pytest.param(lambda _: len, marks=pytest.mark.slow)], ids=["wrapper", "builtin"])
def test_a_patch_of_somebody_else(folder: Path, item: Replacement, patch: Callable[[Any], Any]) -> None:
    replace(item.home, item.name, patch(function_of(found(item))))
    [part] = [part.name for part in PARTS if item in part.replacements]
    check_left(part, rf"(.*; )?{item.home}\.{item.name}: got .*, allowed: vLLM's own; somebody else replaced it(; .*)?")


PATCHES = {
    "where a name is used": ("pool", POOL, "make_block_hash_with_group_id"),
    "where a class is used": ("blocks", MANAGER, "KVCacheBlock"),
    "where a function is used": ("hasher", ENGINE_CORE, "get_request_block_hasher"),
    "a method that ours call": ("slots", GROUPS, "FullAttentionManager.get_num_skipped_tokens"),
    "a method that was added": ("blocks", UTILS, "KVCacheBlock.pin"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_in_another_place(folder: Path, name: str) -> None:
    part, home, place = PATCHES[name]
    replace(home, place)
    check_left(part, rf"{home}\.{place}: got test_vllm_install\..*")


@pytest.mark.parametrize(
    ("part", "home", "name"),
    [("pool", POOL, "BlockPool"), ("slots", MANAGER, "KVCacheManager"), ("blocks", UTILS, "KVCacheBlock")],
)
def test_a_subclass_of_somebody_else(folder: Path, part: str, home: str, name: str) -> None:
    """Also under the name of the class, as tpu-inference's manager for attention with Mamba."""
    base = getattr(engine_module(home), name)
    inside = type("Inside", (base,), {"__module__": "vllm.v1.inside"})
    outside = type("Outside", (inside,), {"__module__": "vllm_ascend.core"})
    check_left(part, rf"{home}\.{name}: got a subclass, vllm_ascend\.core\.Outside, allowed: none outside vLLM")
    del outside
    gc.collect()
    before = state()
    vllm.install(strict=True)
    module = engine_module(MANAGER)
    module.KVCacheManager = type("Outside", (module.KVCacheManager,), {})
    assert not vllm.is_installed()
    vllm.uninstall()
    module.KVCacheManager = module.KVCacheManager.__base__
    assert all(a is b for a, b in zip(before, state(), strict=True))


def test_a_scheduler_that_is_built_already(folder: Path) -> None:
    """Objects that the garbage collector does not look at (`gc.freeze`), as vLLM's engine leaves them, are found too."""
    pool = engine_module(POOL).BlockPool(3)
    gc.freeze()
    try:
        check_refused("vLLM's own allocator, got 1 BlockHashToBlockMap, 1 FreeKVCacheBlockQueue, 3 KVCacheBlock; install first")
        assert gc.get_freeze_count() > 0
        pool.blocks[0].pool = pool  # a cycle, which only garbage collection frees
        del pool
        vllm.install()
    finally:
        gc.unfreeze()


def change_all(folder: Path) -> None:
    edit(folder, UTILS, "def get_request_block_hasher(", "def get_request_block_hasher(other, ")
    edit(folder, UTILS, "class KVCacheBlock:\n", "class KVCacheBlock:\n    x = 1\n")


def change_slots(folder: Path) -> None:
    edit(folder, MANAGER, "def allocate_slots(self", "def allocate_slots(self, other")


def import_anew(_: Path) -> None:
    """The compiled modules call what they have imported."""
    vllm.install()
    pop_modules("vllm")
    assert not vllm.is_installed()


LOST: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a module": ("slots", lambda folder: path_of(folder, REQUEST).unlink(), rf"{REQUEST}\.Request\.num_tokens: another source"),
    "a source": (
        "hasher",
        lambda _: (engine_module(ENGINE_CORE), setattr(engine_module(REQUEST), "__file__", "/nowhere.so")),
        rf"{REQUEST}\.Request\.num_tokens: another source",
    ),
    "a class of which only what it inherits is recorded": (
        "slots",
        lambda folder: edit(folder, COORDINATOR, "class UnitaryKVCacheCoordinator:", "class SingleKVCacheCoordinator:"),
        rf"({COORDINATOR}\.UnitaryKVCacheCoordinator\.\w+: another source(; )?)+",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_there(folder: Path, name: str) -> None:
    part, lose, reason = LOST[name]
    lose(folder)
    check_left(part, reason)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "all parts": (change_all, f"{DIFFERS}blocks: .*; hasher: .*; pool: needs blocks; hits: needs pool; slots: needs pool$"),
    "imported anew": (import_anew, "got a module that was imported anew, allowed: the one that pagepool was imported for"),
    "a name of a compiled module": (
        lambda _: delattr(sys.modules[f"{OURS}.pool"], "touch"),
        rf"^{OURS}\.pool\.touch: got .*no attribute 'touch'",
    ),
} | {
    module: (
        lambda _, module=module: sys.modules.update({f"{OURS}.{module}": None}),
        rf"^{OURS}\.{module}\.\w+: got import of .* halted.*, allowed: a compiled module of pagepool$",
    )
    for module in sorted({item.module for item in REPLACEMENTS})
}


def test_without_vllm(folder: Path) -> None:
    sys.modules["vllm"] = None  # type: ignore[assignment]
    with pytest.raises(CompatError, match=rf"^vLLM: got none installed, allowed: {re.escape(LISTED)}$"):
        vllm.install()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(folder: Path, name: str) -> None:
    damage, message = REFUSED[name]
    damage(folder)
    check_refused(message)


def test_adaptive_eviction_needs_its_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.EVICTION_VARIABLE, "adaptive")
    change_slots(folder)
    check_refused(r"^PAGEPOOL_VLLM_EVICTION: got adaptive, which needs what is left to vLLM: slots$")


def test_a_failure_leaves_nothing_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While names are replaced; and at the end."""

    class Frozen(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise KeyboardInterrupt

    before = state()
    frozen = Frozen("vllm.frozen")
    vars(frozen)["KVCacheBlock"] = engine_module(UTILS).KVCacheBlock
    monkeypatch.setitem(sys.modules, "vllm.frozen", frozen)
    with pytest.raises(KeyboardInterrupt):
        vllm.install()
    assert all(a is b for a, b in zip(before, state(), strict=True))
    monkeypatch.delitem(sys.modules, "vllm.frozen")
    monkeypatch.setattr(vllm, "call_in_children", lambda action: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vllm.install()
    assert all(a is b for a, b in zip(before, state(), strict=True))


# The plug-in.


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("off", False), ("1", True), ("known", True), ("Strict ", True)])
def test_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool) -> None:
    """vLLM calls the plug-in several times in a process."""
    monkeypatch.setenv(vllm.VARIABLE, value)
    for _ in range(2):
        plugin.activate()
        assert vllm.is_installed() == is_on == ("vllm" in sys.modules)
    monkeypatch.setenv(vllm.VARIABLE, "stirct")
    allowed = "allowed: 1, true, yes, on, known, strict; 0, false, no, off or nothing"
    with pytest.raises(CompatError, match=f"^PAGEPOOL_VLLM: got 'stirct', {allowed}$"):
        plugin.activate()


@pytest.mark.parametrize(
    ("version", "value", "code", "last_line"),
    [
        ("0.33.0", "1", 0, None),
        ("0.34.0", "strict", 0, None),
        ("0.34.0", "known", 0, f"vLLM allocates without pagepool: vLLM's version: got 0.34.0, allowed: {LISTED}"),
        ("changed", "1", 0, "vLLM changed allocates with pagepool, but for slots: `python -m pagepool.compat.vllm` says why"),
        ("changed", "strict", 1, f"pagepool.errors.CompatError: vLLM changed {DIFFERS}slots: {ALLOCATE_SLOTS}: another source"),
    ],
    ids=["served", "an unknown version", "only known ones", "a part", "strict"],
)
def test_a_process_with_the_plug_in(folder: Path, version: str, value: str, code: int, last_line: str | None) -> None:
    """A refusal is one warning, or ends a strict start."""
    write_engine(folder, version)
    if version == "changed":
        change_slots(folder)
    write_customization(folder)
    process = run_python(folder, "-c", f"from pagepool.compat.vllm import plugin; plugin.activate(); {SHOW}", value=value)
    lines = process.stderr.splitlines()
    assert (process.returncode, lines[-1:]) == (code, [last_line] if last_line else [])
    assert code or len(lines) <= 1
    assert process.stdout == ("" if code else f"{UTILS}\n" if value == "known" else f"{OURS}.hasher\n")


@pytest.mark.parametrize("value", ["1", "strict"])
def test_any_other_failure(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str) -> None:
    """vLLM starts with its own allocator, unless that is not wanted."""
    (folder / "vllm" / "__init__.py").write_text("import no_such_module\n")
    monkeypatch.setenv(vllm.VARIABLE, value)
    logging.getLogger("vllm").propagate = True
    if value == "strict":
        with pytest.raises(ModuleNotFoundError):
            plugin.activate()
    else:
        plugin.activate()
        assert caplog.messages == ["vLLM allocates without pagepool: No module named 'no_such_module'"]


def test_nothing_is_imported_where_the_variable_is_off(folder: Path) -> None:
    """Importing pagepool alone does not even import the adapter."""
    code = (
        "import sys, pagepool; print([name for name in sys.modules if 'pagepool.compat' in name]); "
        "from pagepool.compat.vllm.plugin import activate; activate(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'torch')], "
        f"[name for name in {[*make_replacements()]} if name in sys.modules])"
    )
    assert run_python(folder, "-c", code).stdout == "[]\n[] []\n"


@on_the_wheel
def test_the_entry_point_is_installed() -> None:
    [found] = entry_points(group="vllm.general_plugins", name="pagepool")
    assert found == declared_entry_point()
    assert found.load() is plugin.activate


# Child processes.

CHILD = f"""
import multiprocessing, sys

def show():
    from {ENGINE_CORE} import get_request_block_hasher
    print(get_request_block_hasher.__module__, flush=True)

if __name__ == "__main__":
    from pagepool.compat import vllm
    vllm.install()
    for path in sys.argv[2:]:
        text = open(path).read()
        open(path, "w").write(text.replace("*arguments", "*others"))
    for uninstalls in (False, True)[: 2 // len(sys.argv[1:])]:
        if uninstalls:
            vllm.uninstall()
        process = multiprocessing.get_context(sys.argv[1]).Process(target=show)
        process.start()
        process.join()
        print(process.exitcode, flush=True)
"""


def run_children(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    write_customization(folder)
    (folder / "parent.py").write_text(CHILD)
    return run_python(folder, "parent.py", *arguments)


METHODS_OF_CHILDREN = multiprocessing.get_all_start_methods()


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name != "spawn" else ()) for name in METHODS_OF_CHILDREN]
)
def test_children_have_what_was_installed_by_hand(folder: Path, method: str) -> None:
    """As vLLM's engine core, which runs in a child, but no longer than in the parent."""
    process = run_children(folder, method)
    assert (process.stdout.split(), process.stderr) == ([f"{OURS}.hasher", "0", UTILS, "0"], "")


def test_a_child_that_is_refused_ends(folder: Path) -> None:
    """No part fits the child's vLLM, which is another one than the parent's."""
    process = run_children(folder, "spawn", str(path_of(folder, UTILS)))
    assert process.stdout == "1\n"
    assert f"CompatError: vLLM 0.33.0 {DIFFERS}blocks: {UTILS}." in process.stderr


# The command.


def test_the_command(folder: Path) -> None:
    """It reports, says why not, and records what differs."""
    command = ("-m", "pagepool.compat.vllm")
    write_customization(folder)
    process = run_python(folder, *command)
    assert process.stderr == ""
    assert process.stdout.splitlines()[0] == "vLLM 0.33.0, pagepool installed, eviction: vLLM's"
    assert len(process.stdout.splitlines()) == 1 + len(PARTS) + len(REPLACEMENTS)
    edit(folder, POOL, "def touch(self", "def touch(self, other")
    digest = digests_of(path_of(folder, POOL).read_text())["BlockPool.touch"]
    assert ast.literal_eval(run_python(folder, *command, "--record").stdout) == {"0.33.0": {f"{POOL}:BlockPool.touch": digest}}
    shutil.rmtree(folder / "vllm")
    write_engine(folder, "0.34.0")
    (folder / "sitecustomize.py").unlink()
    process = run_python(folder, *command)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith(f"pagepool: vLLM 0.34.0 {DIFFERS}blocks: ")


@pytest.mark.parametrize(
    ("fault", "module", "options"),
    [
        ("import nothing_there", "vllm", ()),
        ("raise RuntimeError('too old:\\nmore')", POOL, ()),
        ("1 / 0", POOL, ("--record",)),
    ],
)
def test_an_import_of_vllm_that_fails_is_told_in_a_line(
    folder: Path, fault: str, module: str, options: tuple[str, ...]
) -> None:
    write_engine(folder, "0.33.0")
    path = folder / "vllm" / "__init__.py" if module == "vllm" else path_of(folder, module)
    path.write_text(fault)
    process = run_python(folder, "-m", "pagepool.compat.vllm", *options)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("pagepool: vLLM cannot be imported: ")
    assert process.stderr.count("\n") == 1
    assert any(reason in process.stderr for reason in ("'nothing_there'", "too old:\n", "division by zero"))


def test_the_canary_shows_what_changed(folder: Path) -> None:
    """A part that fell away, and a diff of the definition in it."""
    write_customization(folder)
    shutil.copytree(folder / "vllm", folder / "recorded" / "vllm")
    canary = str(MODELS / "vllm_canary.py")
    process = run_python(folder, canary, "recorded")
    assert (process.returncode, process.stdout.split()[:4]) == (0, ["vLLM", "0.33.0", "blocks", "used"])
    change_slots(folder)
    process = run_python(folder, canary, "recorded")
    assert process.returncode == 1
    assert f"slots   {ALLOCATE_SLOTS}: another source\n" in process.stdout
    assert f"--- recorded {ALLOCATE_SLOTS}\n+++ installed {ALLOCATE_SLOTS}\n" in process.stdout
    assert "+def allocate_slots(self, other, *arguments, **options):\n" in process.stdout
