"""Replaces the hot parts of vLLM's KV-cache managers by compiled ones: same block ids, no changes to its source.

Set ``PAGEPOOL_VLLM=1`` in the environment: vLLM loads pagepool as a plug-in, in each of its processes. Or call `install` before
the engine is built.

vLLM's managers stay. Their blocks, queue and map are compiled, and so are their methods for common cases; other cases call
vLLM's own methods. `engine.py` lists the replacements in parts; each part is used as a whole or left to vLLM. References held
by code outside vLLM are not changed.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from pagepool.arguments import require_flag
from pagepool.compat.children import call_in_children, stop_calling_in_children
from pagepool.compat.import_hook import AfterImport
from pagepool.compat.patching import check_unused, find_objects, installing, swap
from pagepool.compat.switch import OFF, ON, read_switch
from pagepool.compat.vllm.checks import find_obstacles, function_of, import_homes, version_of
from pagepool.compat.vllm.engine import HINTS, MANAGER, PARTS, POOL, REPLACEMENTS, VERSIONS, Part, Replacement
from pagepool.compat.vllm.listener import Listener, get_listener, set_listener
from pagepool.compat.vllm.policy import (
    ADAPTIVE,
    ADAPTIVE_QUEUES,
    ALL,
    EVICTION_VARIABLE,
    HINTS_VARIABLE,
    LISTENING_QUEUES,
    PINS_VARIABLE,
    SESSIONS,
    SHARES_VARIABLE,
    choices_for,
    read_hints,
    read_pins,
    read_shares,
    replacements,
    wanted_parts,
)
from pagepool.errors import CompatError

__all__ = [
    "EVICTION_VARIABLE",
    "HINTS_VARIABLE",
    "KNOWN",
    "OFF",
    "ON",
    "PINS_VARIABLE",
    "SHARES_VARIABLE",
    "STRICT",
    "VARIABLE",
    "VERSIONS",
    "Report",
    "check",
    "install",
    "install_if_asked",
    "install_on_import",
    "installed",
    "is_installed",
    "read_hints",
    "report",
    "uninstall",
]

logger = logging.getLogger("vllm.pagepool")  # vLLM formats and shows only messages of its own loggers

VARIABLE = "PAGEPOOL_VLLM"
"""Environment variable of the plug-in: `ON` and `KNOWN` install pagepool or log why not; `STRICT` raises the reason."""

NO_HINTS = "none"
"""Value of `Report.hints` for pools that do not listen to requests."""

KNOWN = "known"
STRICT = "strict"

_lock = threading.RLock()
_replaced: list[tuple[Replacement, Any, Any]] = []
"""Installed replacements, each with its module or class and vLLM's original."""
_obstacles: dict[str, str] = {}
"""Reason for each part left to vLLM by the last installation; "" for used parts."""
_homes: dict[str, ModuleType] = {}
"""vLLM modules, by name, whose functions the compiled modules call."""


def install(*, known: bool = False, strict: bool = False) -> None:
    """Replace vLLM's definitions by pagepool's, here and in processes that `multiprocessing` starts. If pagepool is already
    installed, only log a warning.

    A part is left to vLLM if something in it differs from the tested versions, or another package has replaced or subclassed
    some of it. Raise CompatError, without a change, if all parts are left to vLLM; with `strict`, if one is; with `known`, for
    a version not in `VERSIONS`; if vLLM is missing; if a scheduler was built; if `EVICTION_VARIABLE` names an unknown policy,
    or one that needs a missing part; for wrong values of `HINTS_VARIABLE`, `SHARES_VARIABLE` and `PINS_VARIABLE`. Import vLLM
    if necessary; after that, the search for schedulers takes most of the time.
    """
    with _lock:
        if is_installed():
            logger.warning("vLLM already allocates with pagepool")
            return
        homes = import_homes()
        _check_same(homes)
        parts, shares, max_pinned = wanted_parts(), read_shares(), read_pins()
        obstacles = find_obstacles(homes, parts)
        _check_wanted(obstacles, require_flag("known", known), require_flag("strict", strict))
        items = replacements([part for part in parts if not obstacles[part.name]])
        check_unused(tuple(found for found in map(_found, items) if isinstance(found, type)), "vLLM")
        compiled = {item: _import(item) for item in items}
        _homes.update(homes)
        _obstacles.clear()
        _obstacles.update(obstacles)
        set_listener(Listener(reads_times=read_hints() == ALL, shares=shares, max_pinned=max_pinned))
        try:
            _set(compiled)
            call_in_children(install_on_import)
        except BaseException:
            uninstall()
            raise
    left = ", ".join(name for name, obstacle in obstacles.items() if obstacle)
    told = f", but for {left}: `python -m pagepool.compat.vllm` says why" if left else ""
    logger.log(logging.WARNING if left else logging.INFO, "vLLM %s allocates with pagepool%s", version_of(), told)


def uninstall() -> None:
    """Restore vLLM's own definitions, also in modules imported meanwhile, if pagepool is installed. Pools built meanwhile keep
    their compiled blocks, which vLLM's own methods accept.
    """
    with _lock:
        stop_calling_in_children(install_on_import)
        if _hook in sys.meta_path:
            sys.meta_path.remove(_hook)
        if not _replaced:
            return
        _keep_maps()
        swap("vllm", {_ours(item): theirs for item, _, theirs in _replaced if not item.is_method})
        for item, owner, theirs in _replaced:
            if item.is_method and function_of(vars(owner).get(item.last_name)) is _ours(item):
                setattr(owner, item.last_name, theirs)
        _replaced.clear()


def is_installed() -> bool:
    """Whether engines built now allocate with pagepool: every replacement in vLLM's modules is still in place."""
    return bool(_replaced) and all(_chosen(item) for item, *_ in _replaced)


@contextmanager
def installed() -> Iterator[None]:
    """Install pagepool for the block. If it was installed before, it stays installed."""
    with installing(is_installed, install, uninstall):
        yield


def install_if_asked() -> None:
    """Call `install` according to `VARIABLE`, unless pagepool is installed. Raise CompatError for an unknown value."""
    value = read_switch(VARIABLE, (KNOWN, STRICT))
    if value not in OFF and not is_installed():
        install(known=value == KNOWN, strict=value == STRICT)


def install_on_import() -> None:
    """Call `install` when vLLM's manager is imported, or now if it already is. That import raises errors of `install`, so no
    engine runs without pagepool. This call imports nothing.
    """
    if MANAGER in sys.modules and not is_installed():
        install()
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)


_hook = AfterImport(MANAGER, install_on_import)


@dataclass(frozen=True)
class Report:
    """Report on the replacements in this process; its text is a table."""

    version: str
    """vLLM's version, or "not imported"."""
    is_installed: bool
    eviction: str
    """Eviction policy of new pools, or "vLLM's"."""
    hints: str
    """Hints of requests that new pools read: "sessions", "all" or "none"."""
    parts: tuple[tuple[str, str], ...]
    """For each part "used", or the reason it is not."""
    replaced: tuple[tuple[str, str], ...]
    """Full names of replaced vLLM definitions, and of their replacements."""
    heard: tuple[tuple[str, int], ...]
    """Counts of hints by kind: sessions, seconds, closes, retains, demotes, pins, refused pins, errors."""
    ignored: tuple[tuple[str, int], ...]
    """Counts of hints that were not understood, by name: at most 64 names, and "others"."""

    def __str__(self) -> str:
        """Return a line with version and state, and one for each part, each replacement and each count."""
        counts = [*((f"heard: {name}", str(count)) for name, count in self.heard)]
        counts += [(f"ignored: {name}", str(count)) for name, count in self.ignored]
        rows = [*self.parts, *self.replaced, *counts]
        width = max(len(first) for first, _ in rows)
        head = f"vLLM {self.version}, pagepool {'' if self.is_installed else 'not '}installed, eviction: {self.eviction}"
        head += f", hints: {self.hints}" if self.hints != NO_HINTS else ""
        return "\n".join([head, *(f"{first:{width}}  {second}" for first, second in rows)])


def report() -> Report:
    """Report on the replacements in this process, without importing anything."""
    replaced = [*filter(None, map(_chosen, (*REPLACEMENTS, *HINTS.replacements)))]
    names, listener = {item.ours for item in replaced}, get_listener()
    return Report(
        str(getattr(sys.modules.get("vllm"), "__version__", "not imported")),
        is_installed(),
        ADAPTIVE if names.intersection(ADAPTIVE_QUEUES) else "vLLM's",
        (ALL if listener.reads_times else SESSIONS) if names.intersection(LISTENING_QUEUES) else NO_HINTS,
        tuple((part.name, _state_of(part)) for part in (*PARTS, HINTS) if part is not HINTS or HINTS.name in _obstacles),
        tuple((item.place, item.source) for item in replaced),
        tuple(listener.counts.items()),
        tuple(listener.ignored.items()),
    )


def _state_of(part: Part) -> str:
    """Return "used", or the reason why a part is not."""
    return "used" if all(map(_chosen, part.replacements)) else _obstacles.get(part.name) or "not installed"


def check(manager: Any) -> None:
    """Check all invariants of a block pool, a `KVCacheManager` or a scheduler of vLLM, with or without pagepool. Raise
    IntegrityError naming the first wrong block. Call this between two steps, in the scheduler's thread. O(blocks).
    """
    import_module("pagepool.compat.vllm.integrity").check_manager(manager)


# Finding vLLM's definitions.


def _owner(item: Replacement) -> Any:
    """Return vLLM's module or class in which a replacement belongs, or None if it is not imported."""
    module = sys.modules.get(item.home)
    return vars(module).get(item.name.partition(".")[0]) if module is not None and item.is_method else module


def _found(item: Replacement) -> Any:
    """Return vLLM's present definition in the place of a replacement, or None if there is none."""
    owner = _owner(item)
    return None if owner is None else vars(owner).get(item.last_name)


def _ours(item: Replacement) -> Any:
    return getattr(sys.modules.get(item.source.rpartition(".")[0]), item.ours, None)


def _chosen(item: Replacement) -> Replacement | None:
    """Return the present replacement of vLLM's definition, or None if it is not replaced."""
    found = function_of(_found(item))
    return next((choice for choice in choices_for(item) if found is not None and found is _ours(choice)), None)


def _import(item: Replacement) -> Any:
    """Import a replacement, and let its module keep the vLLM functions it calls. Raise CompatError if one is missing."""
    try:
        module = import_module(item.source.rpartition(".")[0])
        getattr(module, "bind", int)()
        return getattr(module, item.ours)
    except (ImportError, AttributeError) as error:
        raise CompatError(f"{item.source}: got {error}, allowed: a compiled module of pagepool") from error


def _check_same(homes: dict[str, ModuleType]) -> None:
    """Raise CompatError if vLLM was imported anew: the compiled modules still call functions of the first import."""
    for name, module in homes.items():
        if _homes.get(name, module) is not module:
            raise CompatError(f"{name}: got a module that was imported anew, allowed: the one that pagepool was imported for")


def _check_wanted(obstacles: dict[str, str], known: bool, strict: bool) -> None:
    """Raise CompatError if too few parts can be used, or if only tested versions are allowed and this one is not tested."""
    if known and not any(fnmatchcase(version_of(), one) for one in VERSIONS):
        raise CompatError(f"vLLM's version: got {version_of()}, allowed: {', '.join(VERSIONS)}")
    left = [f"{name}: {obstacle}" for name, obstacle in obstacles.items() if obstacle]
    if left and (strict or len(left) == len(obstacles)):
        raise CompatError(f"vLLM {version_of()} differs from the tested versions, or is patched: {'; '.join(left)}")


# Replacing definitions.


def _set(compiled: dict[Replacement, Any]) -> None:
    _replaced.extend((item, _owner(item), _found(item)) for item in compiled)
    swap("vllm", {theirs: compiled[item] for item, _, theirs in _replaced if not item.is_method})
    for item, owner, theirs in _replaced:
        if item.is_method:
            ours = compiled[item]
            setattr(owner, item.last_name, classmethod(ours) if isinstance(theirs, classmethod) else ours)


def _keep_maps() -> None:
    """Let living pools keep using our map after a reset, since vLLM's own map accepts only vLLM's own blocks."""
    pool_class, map_class = vars(_homes[POOL])["BlockPool"], vars(_homes[POOL])["BlockHashToBlockMap"]
    for pool in find_objects((pool_class,)):
        if isinstance(getattr(pool, "cached_block_hash_to_block", None), map_class):
            pool.reset_prefix_cache = partial(_reset_prefix_cache, pool, map_class)


def _reset_prefix_cache(pool: Any, map_class: type) -> bool:
    """Call the reset of the pool's class. It makes an empty map of vLLM's class; put one of `map_class` in its place."""
    is_reset = bool(type(pool).reset_prefix_cache(pool))
    if is_reset:
        pool.cached_block_hash_to_block = map_class()
    return is_reset
