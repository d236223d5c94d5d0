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
    RECORDED,
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
    INHERITED,
    MANAGER,
    OURS,
    PARTS,
    POOL,
    REPLACEMENTS,
    UTILS,
    Replacement,
)
from pagepool.compat.vllm.sources import digests_of
from pagepool.errors import CompatError

REQUEST = "vllm.v1.request"
BLOCK, _, MAP, HASHER, *METHODS = REPLACEMENTS
FIND_METHODS = [item for item in METHODS if item.name.endswith("find_longest_cache_hit")]
DEPENDENT = {"blocks": {"pool", "hits", "slots"}, "pool": {"hits", "slots"}, "hits": set(), "slots": set(), "hasher": set()}
"""The parts that need another one."""
LISTED = ", ".join(vllm.VERSIONS)
KNOWN_VERSIONS = re.escape(LISTED)
REFUSED = "pagepool.errors.CompatError: vLLM changed differs from the tested versions, or is patched: "


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
    obstacles = find_obstacles(import_homes())
    assert re.fullmatch(reason, obstacles[part]), obstacles
    left = {part, *DEPENDENT[part]}
    assert {name for name, obstacle in obstacles.items() if obstacle} >= left
    check_refused(rf"^vLLM 0\.33\.0 differs from the tested versions, or is patched: (.*; )?{part}: ", strict=True)
    vllm.install()
    used = {name for name, obstacle in obstacles.items() if not obstacle}
    assert {name for name, shown in vllm.report().parts if shown == "used"} == used
    for one in PARTS:
        for item in one.replacements:
            assert (function_of(found(item)) is ours(item)) == (one.name in used)
    vllm.uninstall()


# Replacing.


def test_all_places_get_ours_and_get_back_vllms(folder: Path) -> None:
    before = state()
    vllm.install()
    assert vllm.is_installed()
    assert all(function_of(found(item)) is ours(item) for item in REPLACEMENTS)
    assert engine_module(ENGINE_CORE).get_request_block_hasher is ours(HASHER)
    assert engine_module(POOL).KVCacheBlock is engine_module(MANAGER).KVCacheBlock is ours(BLOCK)
    vllm.uninstall()
    assert not vllm.is_installed()
    assert all(a is b for a, b in zip(before, state(), strict=True))


def test_ours_are_called_as_the_methods_that_they_replace(folder: Path) -> None:
    vllm.install()
    assert engine_module(POOL).BlockPool().touch([]) == "ours"
    classes = vars(engine_module(GROUPS))
    kinds = {item.name: type(vars(classes[item.name.split(".")[0]])["find_longest_cache_hit"]) for item in FIND_METHODS}
    assert set(kinds.values()) == {classmethod}
    assert classes["SlidingWindowManager"].find_longest_cache_hit() == "ours"


def test_twice_is_as_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pagepool")  # other tests run programs that set a higher one
    before = state()
    vllm.uninstall()
    vllm.install()
    assert not caplog.messages
    vllm.install()
    assert caplog.messages == ["vLLM already allocates with pagepool"]
    vllm.uninstall()
    vllm.uninstall()
    vllm.install()
    vllm.uninstall()
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
    with pytest.raises(CompatError, match="EVICTION: got 'fifo', allowed: adaptive; lru or nothing"):
        vllm.install()
    assert not vllm.report().replaced


def test_a_module_that_keeps_vllms_functions_is_told_before_they_are_replaced(folder: Path) -> None:
    kept: list[object] = []
    hasher: Any = sys.modules[f"{OURS}.hasher"]
    hasher.bind = lambda: kept.append(found(HASHER))
    theirs = found(HASHER)
    vllm.install()
    assert kept == [theirs]


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
    vllm.uninstall()
    assert vars(cls)["touch"] is patch
    assert function_of(vars(cls)["free_blocks"]) is not ours(METHODS[3])


# Refusing.


def test_without_vllm(folder: Path) -> None:
    sys.modules["vllm"] = None  # type: ignore[assignment]
    with pytest.raises(CompatError, match=rf"^vLLM is not installed; expected: {KNOWN_VERSIONS}$"):
        vllm.install()


@pytest.mark.parametrize("version", ["0.30.9", "0.3.3", "0.330.1", "1.33.0", "dev", ""])
def test_an_unknown_version(folder: Path, version: str) -> None:
    """It is served as long as nothing differs, unless a known one is wanted."""
    write_engine(folder, version)
    check_refused(rf"^vLLM's version: got {version}, expected {KNOWN_VERSIONS}$", known=True)
    vllm.install(strict=True)
    assert vllm.report().version == version


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.0", "0.33.1.dev3+g12", "0.33.0+cpu"])
def test_a_known_version(folder: Path, version: str) -> None:
    write_engine(folder, version)
    vllm.install(known=True)
    assert vllm.report().version == version


def test_a_module_that_is_gone(folder: Path) -> None:
    path_of(folder, REQUEST).unlink()
    check_left("slots", rf"{REQUEST}\.Request\.num_tokens: another source")


def test_a_module_without_its_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_module(ENGINE_CORE)
    monkeypatch.setattr(engine_module(REQUEST), "__file__", "/nowhere.so")
    check_left("hasher", rf"{REQUEST}\.Request\.num_tokens: another source")


@pytest.mark.parametrize(
    ("part", "home", "name"),
    [
        pytest.param(part, *place.split(":"), marks=pytest.mark.slow if i % 8 else ())
        for part, recorded in DIGESTS.items()
        for i, place in enumerate(recorded)
    ],
)
def test_another_source(folder: Path, part: str, home: str, name: str) -> None:
    """A definition of each kind, or one where it was inherited."""
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


def test_a_class_that_is_gone(folder: Path) -> None:
    """Not even one of which only what it inherits is recorded."""
    edit(folder, COORDINATOR, "class UnitaryKVCacheCoordinator:", "class SingleKVCacheCoordinator:")
    check_left("slots", rf"({COORDINATOR}\.UnitaryKVCacheCoordinator\.\w+: another source(; )?)+")


def test_comments_and_layout_do_not_count(folder: Path) -> None:
    edit(folder, POOL, "class BlockPool:\n", 'class BlockPool:\n    """Blocks."""\n    # their methods\n\n')
    edit(
        folder,
        POOL,
        "def touch(self, *arguments, **options): ...",
        'def touch(self, *arguments,  **options):\n        """T."""\n        ...',
    )
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


def test_no_part_is_left(folder: Path) -> None:
    edit(folder, UTILS, "def get_request_block_hasher(", "def get_request_block_hasher(other, ")
    edit(folder, UTILS, "class KVCacheBlock:\n", "class KVCacheBlock:\n    x = 1\n")
    check_refused(
        r"tested versions, or is patched: blocks: .*; hasher: .*; pool: needs blocks; hits: needs pool; slots: needs pool$"
    )


def test_adaptive_eviction_needs_its_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.EVICTION_VARIABLE, "adaptive")
    edit(folder, MANAGER, "def allocate_slots(self", "def allocate_slots(self, other")
    check_refused(r"^PAGEPOOL_VLLM_EVICTION: got adaptive, which needs what is left to vLLM: slots$")


def test_each_replacement_is_recorded_in_its_part() -> None:
    for part in PARTS:
        assert all(f"{item.home}:{item.name}" in DIGESTS[part.name] for item in part.replacements)


@pytest.mark.parametrize("home", RECORDED)
def test_a_definition_that_is_gone(folder: Path, home: str) -> None:
    engine_module(ENGINE_CORE)
    name = next(name for name in RECORDED[home] if "." not in name or home in (MANAGER, COORDINATOR, GROUPS, REQUEST))
    owner, _, method = name.rpartition(".")
    module = engine_module(home)
    delattr(getattr(module, owner) if owner else module, method)
    obstacles = "; ".join(find_obstacles(import_homes()).values())
    assert f"{home}.{name}: got None, expected vLLM's own: somebody else replaced it" in obstacles


def wrapped(function: Any) -> Any:
    """Return a function with the name, module and source of another one."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


PATCHES: dict[str, Callable[[Any], Any]] = {
    "wrapper": wrapped,
    "lambda": lambda _: lambda *arguments: None,
    "builtin": lambda _: len,
}


@pytest.mark.parametrize("item", REPLACEMENTS, ids=lambda item: item.name)
@pytest.mark.parametrize("kind", ["wrapper", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lambda", "builtin"))])
def test_a_patch_of_somebody_else(folder: Path, item: Replacement, kind: str) -> None:
    owner, _, name = item.name.rpartition(".")
    module = engine_module(item.home)
    setattr(getattr(module, owner) if owner else module, name, PATCHES[kind](function_of(found(item))))
    [part] = [part.name for part in PARTS if item in part.replacements]
    check_left(part, rf"(.*; )?{item.home}\.{item.name}: got .*, expected vLLM's own: somebody else replaced it(; .*)?")


@pytest.mark.parametrize(
    ("part", "module", "name"),
    [
        ("pool", POOL, "make_block_hash_with_group_id"),
        ("blocks", MANAGER, "KVCacheBlock"),
        ("hasher", ENGINE_CORE, "get_request_block_hasher"),
    ],
)
def test_a_patch_where_a_name_is_used(folder: Path, part: str, module: str, name: str) -> None:
    setattr(engine_module(module), name, lambda *arguments: None)
    check_left(part, rf"{module}\.{name}: got test_vllm_install\..*")


def test_a_patch_of_a_method_that_is_called_by_ours(folder: Path) -> None:
    """One that the class inherits, set on the class itself."""
    cls = engine_module(GROUPS).FullAttentionManager
    cls.get_num_skipped_tokens = lambda self, num_tokens: 0
    check_left("slots", rf"{GROUPS}\.FullAttentionManager\.get_num_skipped_tokens: got test_vllm_install\..*")


def test_a_method_that_somebody_else_added_to_a_class_that_is_replaced(folder: Path) -> None:
    engine_module(UTILS).KVCacheBlock.pin = lambda self: None
    check_left("blocks", rf"{UTILS}\.KVCacheBlock\.pin: got test_vllm_install\..*")


@pytest.mark.parametrize(
    ("part", "home", "name"),
    [("pool", POOL, "BlockPool"), ("slots", MANAGER, "KVCacheManager"), ("blocks", UTILS, "KVCacheBlock")],
)
def test_a_subclass_of_somebody_else(folder: Path, part: str, home: str, name: str) -> None:
    base = getattr(engine_module(home), name)
    inside = type("Inside", (base,), {"__module__": "vllm.v1.inside"})
    outside = type("Outside", (inside,), {"__module__": "vllm_ascend.core"})
    check_left(part, rf"{home}\.{name}: got a subclass, vllm_ascend\.core\.Outside, expected none outside vLLM")
    del outside
    gc.collect()
    vllm.install(strict=True)


ALLOCATE_SLOTS = f"{MANAGER}:KVCacheManager.allocate_slots"
ASCEND = (
    ALLOCATE_SLOTS,
    f"{GROUPS}:SingleTypeKVCacheManager.remove_skipped_blocks",
    f"{POOL}:BlockPool.free_blocks",
    f"{UTILS}:FreeKVCacheBlockQueue.append_n",
    f"{UTILS}:FreeKVCacheBlockQueue.prepend_n",
)
KVCACHED = (ALLOCATE_SLOTS, f"{COORDINATOR}:KVCacheCoordinator.__init__")


@pytest.mark.parametrize(
    ("patched", "left"),
    [(ASCEND, {"blocks", "pool", "hits", "slots"}), (KVCACHED, {"slots"})],
    ids=["vllm-ascend 0.23.0.post1", "kvcached 0.1.6, but for its subclass"],
)
def test_what_other_packages_patch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patched: tuple[str, ...], left: set[str]
) -> None:
    """Before pagepool is installed, parts are left to vLLM; afterwards, the report shows it."""

    def patch(one: pytest.MonkeyPatch) -> None:
        for home, _, name in (place.partition(":") for place in patched):
            owner, _, method = name.partition(".")
            one.setattr(getattr(engine_module(home), owner), method, lambda *arguments: None, raising=False)

    with monkeypatch.context() as one:
        patch(one)
        with vllm.installed():
            assert {name for name, shown in vllm.report().parts if shown != "used"} == left
    vllm.install(strict=True)
    with monkeypatch.context() as one:
        patch(one)
        assert not vllm.is_installed()
        assert dict(vllm.report().parts)["slots"] == "not installed"
    assert vllm.is_installed()


def test_a_subclass_under_the_name_of_a_manager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tpu-inference's for attention with Mamba: not vLLM's own any more; that one is restored all the same."""
    manager = engine_module(MANAGER).KVCacheManager
    theirs = manager.allocate_slots
    vllm.install(strict=True)
    with monkeypatch.context() as one:
        one.setattr(engine_module(MANAGER), "KVCacheManager", type("Outside", (manager,), {"__module__": "tpu_inference"}))
        assert not vllm.is_installed()
        assert manager.allocate_slots is not theirs
        vllm.uninstall()
        assert manager.allocate_slots is theirs
    del one
    gc.collect()
    vllm.install(strict=True)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_scheduler_that_is_built_already(folder: Path, is_frozen: bool) -> None:
    """Objects that the garbage collector does not look at (`gc.freeze`), as vLLM's engine leaves them, are found too."""
    pool = engine_module(POOL).BlockPool(3)
    if is_frozen:
        gc.freeze()
    try:
        check_refused("vLLM's own allocator, got 1 BlockHashToBlockMap, 1 FreeKVCacheBlockQueue, 3 KVCacheBlock; install first")
        assert (gc.get_freeze_count() > 0) == is_frozen
        pool.blocks[0].pool = pool  # a cycle, which only garbage collection frees
        del pool
        vllm.install()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("module", sorted({item.module for item in REPLACEMENTS}))
def test_a_compiled_module_that_cannot_be_imported(folder: Path, module: str) -> None:
    sys.modules[f"{OURS}.{module}"] = None  # type: ignore[assignment]
    check_refused(rf"^{OURS}\.{module}\.\w+: got import of .* halted.*, expected a compiled module of pagepool$")


def test_a_compiled_module_that_lacks_a_name(folder: Path) -> None:
    del vars(sys.modules[f"{OURS}.pool"])["touch"]
    check_refused(rf"^{OURS}\.pool\.touch: got .*no attribute 'touch'")


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


def test_a_vllm_that_is_imported_anew(folder: Path) -> None:
    """The compiled modules call what they have imported."""
    vllm.install()
    pop_modules("vllm")
    assert not vllm.is_installed()
    check_refused("got a module that was imported anew, expected the one that pagepool was imported for")


# The plug-in.


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("off", False), ("1", True), ("known", True), ("Strict ", True)])
def test_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool) -> None:
    """vLLM calls the plug-in several times in a process."""
    monkeypatch.setenv(vllm.VARIABLE, value)
    for _ in range(2):
        plugin.activate()
        assert vllm.is_installed() == is_on == ("vllm" in sys.modules)


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.VARIABLE, "stirct")
    allowed = "allowed: 1, true, yes, on, known, strict; 0, false, no, off or nothing"
    with pytest.raises(CompatError, match=f"^PAGEPOOL_VLLM: got 'stirct', {allowed}$"):
        plugin.activate()


@pytest.mark.parametrize(
    ("version", "value", "code", "last_line"),
    [
        ("0.33.0", "1", 0, None),
        ("0.34.0", "strict", 0, None),
        ("0.34.0", "known", 0, f"vLLM allocates without pagepool: vLLM's version: got 0.34.0, expected {LISTED}"),
        ("changed", "1", 0, "vLLM changed allocates with pagepool, but for slots: `python -m pagepool.compat.vllm` says why"),
        ("changed", "strict", 1, f"{REFUSED}slots: {MANAGER}.KVCacheManager.allocate_slots: another source"),
    ],
    ids=["served", "an unknown version", "only known ones", "a part", "strict"],
)
def test_a_process_with_the_plug_in(folder: Path, version: str, value: str, code: int, last_line: str | None) -> None:
    """A refusal is one warning, or ends a strict start."""
    write_engine(folder, version)
    if version == "changed":
        edit(folder, MANAGER, "def allocate_slots(self", "def allocate_slots(self, other")
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
    for method in sys.argv[1:]:
        if method == "uninstall":
            vllm.uninstall()
            continue
        process = multiprocessing.get_context(method).Process(target=show)
        process.start()
        process.join()
        print(process.exitcode, flush=True)
"""


def run_children(folder: Path, *methods: str) -> subprocess.CompletedProcess[str]:
    write_customization(folder)
    (folder / "parent.py").write_text(CHILD)
    return run_python(folder, "parent.py", *methods)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.slow if method != "spawn" else ())
        for method in multiprocessing.get_all_start_methods()
    ],
)
def test_children_have_what_was_installed_by_hand(folder: Path, method: str) -> None:
    """As vLLM's engine core, which runs in a child, but no longer than in the parent."""
    process = run_children(folder, method, "uninstall", method)
    assert (process.stdout.split(), process.stderr) == ([f"{OURS}.hasher", "0", UTILS, "0"], "")


def test_a_child_that_is_refused_ends(folder: Path) -> None:
    """No part fits the child's vLLM, which is another one than the parent's."""
    write_customization(folder)
    edits = f"edit({str(path_of(folder, UTILS))!r})"
    (folder / "parent.py").write_text(CHILD.replace("    for method", f"    {edits}\n    for method"))
    helper = "def edit(path):\n    text = open(path).read()\n    open(path, 'w').write(text.replace('*arguments', '*others'))\n"
    (folder / "parent.py").write_text(helper + (folder / "parent.py").read_text())
    process = run_python(folder, "parent.py", "spawn")
    assert process.stdout == "1\n"
    assert f"CompatError: vLLM 0.33.0 differs from the tested versions, or is patched: blocks: {UTILS}." in process.stderr


# The command.


def test_the_command_reports(folder: Path) -> None:
    write_customization(folder)
    process = run_python(folder, "-m", "pagepool.compat.vllm")
    assert process.stderr == ""
    assert process.stdout.splitlines()[0] == "vLLM 0.33.0, pagepool installed, eviction: vLLM's"
    assert len(process.stdout.splitlines()) == 1 + len(PARTS) + len(REPLACEMENTS)


def test_the_command_says_why_not(folder: Path) -> None:
    write_engine(folder, "0.34.0")
    process = run_python(folder, "-m", "pagepool.compat.vllm")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("pagepool: vLLM 0.34.0 differs from the tested versions, or is patched: blocks: ")


def test_the_command_records(folder: Path) -> None:
    write_customization(folder)
    edit(folder, POOL, "def touch(self", "def touch(self, other")
    process = run_python(folder, "-m", "pagepool.compat.vllm", "--record")
    digest = digests_of(path_of(folder, POOL).read_text())["BlockPool.touch"]
    assert ast.literal_eval(process.stdout) == {"0.33.0": {f"{POOL}:BlockPool.touch": digest}}


def test_the_canary_shows_what_changed(folder: Path) -> None:
    """A part that fell away, and a diff of the definition in it."""
    write_customization(folder)
    shutil.copytree(folder / "vllm", folder / "recorded" / "vllm")
    canary = str(MODELS / "vllm_canary.py")
    process = run_python(folder, canary, "recorded")
    assert (process.returncode, process.stdout.split()[:4]) == (0, ["vLLM", "0.33.0", "blocks", "used"])
    edit(folder, MANAGER, "def allocate_slots(self", "def allocate_slots(self, other")
    process = run_python(folder, canary, "recorded")
    assert process.returncode == 1
    place = f"{MANAGER}.KVCacheManager.allocate_slots"
    assert f"slots   {place}: another source\n" in process.stdout
    assert f"--- recorded {place}\n+++ installed {place}\n" in process.stdout
    assert "+def allocate_slots(self, other, *arguments, **options):\n" in process.stdout
