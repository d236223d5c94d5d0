"""Replaces the hot parts of vLLM's KV-cache managers by compiled ones: same block ids, no changes to its source.

Set ``PAGEPOOL_VLLM=1`` in the environment: vLLM loads pagepool as a plug-in, in each of its processes. Or by hand:

    from pagepool.compat import vllm
    vllm.install()                          # before the engine is built
    engine = LLM(model, ...)

or ``with vllm.installed(): ...``.

vLLM's managers stay, over compiled blocks, queue and map, with compiled methods for the common cases; the others call the
methods that vLLM had. `engine.py` lists what is replaced. References held by code outside vLLM are not changed.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from pagepool.compat.children import call_in_children, stop_calling_in_children
from pagepool.compat.import_hook import AfterImport
from pagepool.compat.patching import find_objects, installing, swap
from pagepool.compat.switch import OFF, ON, read_switch
from pagepool.compat.vllm.checks import check_engine, function_of, import_homes
from pagepool.compat.vllm.engine import MANAGER, POOL, REPLACEMENTS, VERSIONS, Replacement
from pagepool.compat.vllm.policy import ADAPTIVE, ADAPTIVE_QUEUE, EVICTION_VARIABLE, choices_for, replacements
from pagepool.errors import CompatError

__all__ = [
    "EVICTION_VARIABLE",
    "OFF",
    "ON",
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
    "report",
    "uninstall",
]

logger = logging.getLogger(__name__)

VARIABLE = "PAGEPOOL_VLLM"
"""The environment variable that the plug-in reads: a value in `ON` installs pagepool, or logs why not; `STRICT` raises it."""

STRICT = "strict"

_lock = threading.RLock()
_replaced: list[tuple[Replacement, Any]] = []
"""The replacements while they are installed, and what vLLM has in their places."""
_homes: dict[str, ModuleType] = {}
"""vLLM's modules that the compiled modules have been imported for."""


def install() -> None:
    """Replace vLLM's definitions by pagepool's, here and in processes that `multiprocessing` starts. Only logs a warning if
    pagepool is already installed.

    Imports vLLM if necessary. CompatError, without a change, if vLLM is missing or is none of `VERSIONS`, if something differs
    from what was recorded, if another package has replaced or subclassed some of it, if a scheduler was built, or if
    `EVICTION_VARIABLE` names no policy. Once vLLM is imported, most of the time goes into the search for schedulers.
    """
    with _lock:
        if is_installed():
            logger.warning("vLLM already allocates with pagepool")
            return
        items = replacements()
        homes = import_homes()
        _check_same(homes)
        check_engine(homes)
        compiled = {item: _import(item) for item in items}
        _homes.update(homes)
        try:
            _set(compiled)
            call_in_children(install_on_import)
        except BaseException:
            uninstall()
            raise
    logger.info("vLLM %s allocates with pagepool", sys.modules["vllm"].__version__)


def uninstall() -> None:
    """Restore vLLM's own definitions, in modules imported meanwhile too. Has no effect if pagepool is not installed.

    Pools that were built meanwhile keep their compiled blocks, which vLLM's own methods accept.
    """
    with _lock:
        stop_calling_in_children(install_on_import)
        if _hook in sys.meta_path:
            sys.meta_path.remove(_hook)
        if not _replaced:
            return
        _keep_maps()
        swap("vllm", {_ours(item): theirs for item, theirs in _replaced if not _is_method(item)})
        for item, theirs in _replaced:
            if _is_method(item) and function_of(_found(item)) is _ours(item):
                setattr(_owner(item), _last(item), theirs)
        _replaced.clear()


def is_installed() -> bool:
    """Whether engines built now allocate with pagepool: all of vLLM's definitions are replaced in their modules."""
    return all(map(_chosen, REPLACEMENTS))


@contextmanager
def installed() -> Iterator[None]:
    """Install pagepool for the block. If it was installed before, it stays installed."""
    with installing(is_installed, install, uninstall):
        yield


def install_if_asked() -> None:
    """Call `install` if `VARIABLE` is on or `STRICT`, and pagepool is not installed.

    CompatError for a value that is none of `ON`, `OFF` and `STRICT`.
    """
    if read_switch(VARIABLE, (STRICT,)) in (*ON, STRICT) and not is_installed():
        install()


def install_on_import() -> None:
    """Call `install` when vLLM's manager is imported, or now if it already is. Errors of `install` are raised by that import,
    so that no engine runs without. Imports nothing.
    """
    if MANAGER in sys.modules and not is_installed():
        install()
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)


def _install_late() -> None:
    if not is_installed():
        install()


_hook = AfterImport(MANAGER, _install_late)


@dataclass(frozen=True)
class Report:
    """What is replaced in this process. Its text is a table."""

    version: str
    """vLLM's version, or "not imported"."""
    is_installed: bool
    eviction: str
    """The eviction policy of pools made now, or "vLLM's"."""
    replaced: tuple[tuple[str, str], ...]
    """The full names of vLLM's definitions that are replaced now, and of what replaces them."""

    def __str__(self) -> str:
        """Return a line with version and state, and one for each replacement."""
        state = "installed" if self.is_installed else "not installed"
        width = max([0, *(len(place) for place, _ in self.replaced)])
        rows = [f"{place:{width}}  {source}" for place, source in self.replaced]
        return "\n".join([f"vLLM {self.version}, pagepool {state}, eviction: {self.eviction}", *rows])


def report() -> Report:
    """Return what is replaced in this process. Imports nothing."""
    replaced = [*filter(None, map(_chosen, REPLACEMENTS))]
    return Report(
        str(getattr(sys.modules.get("vllm"), "__version__", "not imported")),
        is_installed(),
        ADAPTIVE if ADAPTIVE_QUEUE in {item.ours for item in replaced} else "vLLM's",
        tuple((item.place, item.source) for item in replaced),
    )


def check(manager: Any) -> None:
    """Check every invariant of a block pool, a `KVCacheManager` or a scheduler of vLLM, with or without pagepool.

    IntegrityError names the first block that is wrong. Call it between two steps, in the scheduler's thread. O(blocks).
    """
    import_module("pagepool.compat.vllm.integrity").check_manager(manager)


# Finding.


def _is_method(item: Replacement) -> bool:
    return "." in item.name


def _last(item: Replacement) -> str:
    return item.name.rpartition(".")[2]


def _owner(item: Replacement) -> Any:
    """Return vLLM's module or class that a replacement is set on; None if it is not imported."""
    module = sys.modules.get(item.home)
    return vars(module).get(item.name.partition(".")[0]) if module is not None and _is_method(item) else module


def _found(item: Replacement) -> Any:
    """Return what vLLM has now in the place of a replacement; None if there is nothing."""
    owner = _owner(item)
    return None if owner is None else vars(owner).get(_last(item))


def _ours(item: Replacement) -> Any:
    return getattr(sys.modules.get(item.source.rpartition(".")[0]), item.ours, None)


def _chosen(item: Replacement) -> Replacement | None:
    """Return what vLLM's definition is replaced by now; None if it is not replaced."""
    found = function_of(_found(item))
    return next((choice for choice in choices_for(item) if found is not None and found is _ours(choice)), None)


def _import(item: Replacement) -> Any:
    """Import a replacement, and let its module keep the functions of vLLM that it calls. CompatError if it is missing."""
    try:
        module = import_module(item.source.rpartition(".")[0])
        getattr(module, "bind", int)()
        return getattr(module, item.ours)
    except (ImportError, AttributeError) as error:
        raise CompatError(f"{item.source}: got {error}, expected a compiled module of pagepool") from error


def _check_same(homes: dict[str, ModuleType]) -> None:
    """Raise CompatError if vLLM was imported anew: the compiled modules call the functions of the first."""
    for name, module in homes.items():
        if _homes.get(name, module) is not module:
            raise CompatError(f"{name}: got a module that was imported anew, expected the one that pagepool was imported for")


# Replacing.


def _set(compiled: dict[Replacement, Any]) -> None:
    _replaced.extend((item, _found(item)) for item in compiled)
    swap("vllm", {theirs: compiled[item] for item, theirs in _replaced if not _is_method(item)})
    for item, theirs in _replaced:
        if _is_method(item):
            ours = compiled[item]
            setattr(_owner(item), _last(item), classmethod(ours) if isinstance(theirs, classmethod) else ours)


def _keep_maps() -> None:
    """Let living pools make our map again at their next reset: vLLM's own accepts only its own blocks."""
    pool_class, map_class = vars(_homes[POOL])["BlockPool"], vars(_homes[POOL])["BlockHashToBlockMap"]
    for pool in find_objects((pool_class,)):
        if isinstance(getattr(pool, "cached_block_hash_to_block", None), map_class):
            pool.reset_prefix_cache = partial(_reset_prefix_cache, pool, map_class)


def _reset_prefix_cache(pool: Any, map_class: type) -> bool:
    """Call the reset of the pool's class, which makes an empty map of the class that vLLM has now."""
    is_reset = bool(type(pool).reset_prefix_cache(pool))
    if is_reset:
        pool.cached_block_hash_to_block = map_class()
    return is_reset
