"""Patches EasyDeL's eSurge engine to allocate with pagepool: same tokens, no changes to its source.

    from pagepool.compat import easydel
    easydel.install()                       # before the engine is built
    engine = eSurge(model, ...)

or ``with easydel.installed(): ...``. To leave the program unchanged, run ``python -m pagepool.compat.easydel PROGRAM ...`` or,
if it imports pagepool, set ``PAGEPOOL_EASYDEL=1`` in the environment.

`CacheManager`, `CachePages`, `PagePool`, `PageTable` and `MultiGroupPageTable` replace the engine's classes of the same names
in all modules of EasyDeL, including those imported or reloaded later. References held by code outside EasyDeL are not changed.
The engine keeps its own requests and cache specs; pagepool accepts them. For models with recurrent layers, whose hits would be
wrong, `Scheduler.from_runner` turns prefix caching off.

The other names of the engine's allocator can be imported from here: managers by kind of attention, coordinators, the
groups of a model's config, page budgets, and arithmetic of pages and shards. pagepool itself has the rest, such as
`pagepool.FreeCachePageQueue`.
"""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

from pagepool import manager
from pagepool._core import PageIds
from pagepool.compat.children import call_in_children
from pagepool.compat.easydel.coordinators import (
    CacheCoordinator,
    CacheCoordinatorNoPrefixCache,
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    HybridCacheCoordinator,
    MambaManager,
    SingleTypeCacheManager,
    SlidingWindowManager,
    UnitaryCacheCoordinator,
    get_kv_cache_coordinator,
    get_manager_for_kv_cache_spec,
)
from pagepool.compat.easydel.model_config import create_kv_cache_specs_from_config
from pagepool.compat.easydel.names import (
    CacheGroupsConfig,
    RequestPageHashes,
    RuntimePageBudgetEstimate,
    dp_shard_for_page_id,
    estimate_runtime_page_budget,
)
from pagepool.compat.easydel.recurrent import RECURRENT_VARIABLE, guard, is_guarded, remove_guards
from pagepool.compat.import_hook import AfterImport, AfterReload
from pagepool.compat.patching import check_unused, installing, signature_of, swap
from pagepool.compat.switch import OFF, ON, read_switch, read_word
from pagepool.errors import CompatError
from pagepool.manager import CachePages
from pagepool.page_hashing import PageHashing
from pagepool.page_pool import PagePool
from pagepool.page_table import MultiGroupPageTable, PageTable
from pagepool.retention import Retention
from pagepool.specs import cdiv, dp_shard_page_bounds, pages_per_dp_shard, usable_pages_count

__all__ = [
    "ENGINE",
    "OFF",
    "ON",
    "PLACES",
    "RECURRENT_VARIABLE",
    "REPLACEMENTS",
    "SIGNATURES",
    "VARIABLE",
    "VERSION",
    "WINDOWS_VARIABLE",
    "CacheCoordinator",
    "CacheCoordinatorNoPrefixCache",
    "CacheGroupsConfig",
    "ChunkedLocalAttentionManager",
    "FullAttentionManager",
    "HybridCacheCoordinator",
    "MambaManager",
    "RuntimePageBudgetEstimate",
    "SingleTypeCacheManager",
    "SlidingWindowManager",
    "UnitaryCacheCoordinator",
    "cdiv",
    "create_kv_cache_specs_from_config",
    "dp_shard_for_page_id",
    "dp_shard_page_bounds",
    "estimate_runtime_page_budget",
    "get_kv_cache_coordinator",
    "get_manager_for_kv_cache_spec",
    "install",
    "install_if_asked",
    "install_on_import",
    "installed",
    "is_installed",
    "pages_per_dp_shard",
    "uninstall",
    "usable_pages_count",
]

logger = logging.getLogger(__name__)

ENGINE = "easydel.inference.esurge"
"""The package of the engine."""

VERSION = "0.3.0"
"""Version of EasyDeL described by the tables below."""

VARIABLE = "PAGEPOOL_EASYDEL"
"""Environment variable read by ``import pagepool``: a value in `ON` installs pagepool when the engine is imported."""

WINDOWS_VARIABLE = "PAGEPOOL_EASYDEL_WINDOWS"
"""Environment variable that chooses which pages of windows and chunks stay cached: with ``ends`` the pages where a request can
resume; with ``all``, or no value, all pages, as in EasyDeL.
"""


def warn_if_too_large(num_pages: int, held: Sequence[PageIds], num_new_pages: int) -> None:
    """Log a warning if a request needs more pages at once than a pool of `num_pages` has."""
    if sum(map(len, held)) + num_new_pages < num_pages:  # the common case, null pages included
        return
    num_needed_pages = num_new_pages + sum([page_id != 0 for ids in held for page_id in ids.to_list()])
    if num_needed_pages >= num_pages:
        logger.warning(
            "a request needs %d pages at once, the pool has %d: no waiting helps, see CacheManager.require_capacity",
            num_needed_pages,
            num_pages - 1,
        )


class CacheManager(manager.CacheManager):
    """`pagepool.CacheManager` with the engine's argument `use_eagle`. By default the `windows` of its `retention` are read from
    `WINDOWS_VARIABLE`; CompatError for an unknown value. Like the engine's own class, `allocate_slots` returns None for a
    request that can never fit; it also logs a warning. An id alone identifies a request, as in the engine: a second request
    with the id of one that holds pages gets these pages. Hits may be counted twice.
    """

    _on_too_large = staticmethod(warn_if_too_large)
    _trusts_requests = True

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[Any],
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        **options: Any,
    ) -> None:
        windows: Any = read_word(WINDOWS_VARIABLE, ("ends",), ("all",)) or "all"
        defaults: dict[str, Any] = {"retention": Retention(windows=windows), "hashing": PageHashing()}
        options = defaults | options
        if use_eagle is not False:
            options["hashing"] = replace(options["hashing"], use_eagle=use_eagle)
        super().__init__(num_pages, kv_cache_groups, max_model_len, enable_caching, **options)
        self.use_eagle = options["hashing"].use_eagle
        self.num_kv_cache_groups = len(kv_cache_groups)
        self.page_size = kv_cache_groups[0].kv_cache_spec.page_size if self.enable_caching else None

    @property
    def req_to_page_hashes(self) -> RequestPageHashes:
        """A live, read-only view of the page hashes of each request, by request id."""
        return RequestPageHashes(self.registry)

    @cached_property
    def coordinator(self) -> CacheCoordinator:
        """The groups and their pool, as the engine knows them; made when it is first read."""
        return get_kv_cache_coordinator(
            self.num_pages, self.kv_cache_groups, self.max_model_len, self.use_eagle, self.enable_caching, self.page_pool
        )


REPLACEMENTS = {cls.__name__: cls for cls in (CacheManager, CachePages, PagePool, PageTable, MultiGroupPageTable)}
"""Replacements by class name of the engine."""

PLACES = {
    "CacheManager": ("core.manager", "core", "", "scheduler.scheduler", "scheduler.token_budget"),
    "CachePages": ("core.manager", "core", ""),
    "PagePool": ("core.page_pool", "core", "", "core.coordinator", "core.single_type_cache_manager"),
    "PageTable": ("page_table",),
    "MultiGroupPageTable": ("page_table", "runners.sequence_buffer"),
}
"""Modules below `ENGINE` that have each class; the first one defines it."""

SCHEDULER = "scheduler.scheduler"
"""Module below `ENGINE` that defines the engine's ``Scheduler``."""

SIGNATURES = {
    "CacheManager": {
        "__init__": "(self, num_pages, kv_cache_groups, max_model_len, enable_caching=True, use_eagle=False)",
        "allocate_slots": "(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_pages=None, "
        "num_lookahead_tokens=0, delay_cache_pages=False, dp_shard_hint=None, data_parallel_size=None)",
        "cache_pages": "(self, request, num_computed_tokens)",
        "create_empty_page_list": "(self)",
        "free": "(self, request)",
        "free_page_hashes": "(self, request)",
        "get_computed_pages": "(self, request, *, dp_shard_hint=None, data_parallel_size=None)",
        "get_num_common_prefix_pages": "(self, request, num_scheduled_requests)",
        "get_page_ids": "(self, request_id)",
        "reset_prefix_cache": "(self)",
        "usage": "property",
    },
    "CachePages": {
        "__init__": "(self, pages)",
        "__add__": "(self, other)",
        "get_page_ids": "(self)",
        "get_unhashed_page_ids": "(self)",
        "new_empty": "(self)",
    },
    "PagePool": {
        "__init__": "(self, num_pages, enable_caching)",
        "cache_full_pages": "(self, request, pages, page_hashes, num_cached_pages, num_full_pages, page_size, "
        "kv_cache_group_id)",
        "free_pages": "(self, ordered_pages)",
        "get_cached_page": "(self, page_hash, kv_cache_group_ids, *, dp_shard_hint=None, data_parallel_size=None)",
        "get_new_pages": "(self, num_pages, *, dp_shard_hint=None, data_parallel_size=None)",
        "get_num_free_pages": "(self)",
        "get_usage": "(self)",
        "reset_prefix_cache": "(self)",
        "touch": "(self, pages)",
    },
    "PageTable": {
        "__init__": "(self, max_num_reqs, max_num_pages_per_req, max_num_batched_tokens, sharding=None)",
        "add_row": "(self, page_ids, row_idx)",
        "append_row": "(self, page_ids, row_idx)",
        "clear": "(self)",
        "clear_row": "(self, row_idx)",
        "commit": "(self, num_reqs)",
        "get_cpu_tensor": "(self)",
        "get_device_tensor": "(self)",
        "move_row": "(self, src, tgt)",
        "swap_row": "(self, src, tgt)",
    },
    "MultiGroupPageTable": {
        "__init__": "(self, max_num_reqs, max_model_len, max_num_batched_tokens, page_sizes, sharding=None)",
        "__getitem__": "(self, idx)",
        "add_row": "(self, page_ids, row_idx)",
        "append_row": "(self, page_ids, row_idx)",
        "append_rows_batch": "(self, page_ids_per_req, req_indices)",
        "clear": "(self)",
        "clear_row": "(self, row_idx)",
        "commit": "(self, num_reqs)",
        "move_row": "(self, src, tgt)",
        "swap_row": "(self, src, tgt)",
    },
}
"""Public methods of each of the engine's classes: signatures without types."""

_lock = threading.RLock()
_replaced: dict[type, type] = {}
"""Map from the engine's classes to ours while installed."""


def install() -> None:
    """Replace the engine's classes by pagepool's. If pagepool is already installed, only log a warning.

    Import the engine if necessary. Raise CompatError, without a change, if EasyDeL is missing or is not version `VERSION`, if a
    class is missing or differs from its record, or if objects of these classes exist, as they do once an engine is built. The
    import takes most of the time, then the search for such objects.
    """
    if is_installed():
        logger.warning("EasyDeL already allocates with pagepool")
        return
    _import_engine()  # installs pagepool if the variable is on
    with _lock:
        if is_installed():
            return
        classes = _find_classes()
        _check_signatures(classes)
        check_unused(tuple(classes.values()), "EasyDeL")
        _replaced.update((cls, REPLACEMENTS[name]) for name, cls in classes.items())
        try:
            guard(_find_scheduler())
            swap("easydel", _replaced)
            if _reload_hook not in sys.meta_path:
                sys.meta_path.insert(0, _reload_hook)
        except BaseException:
            uninstall()
            raise
    logger.info("EasyDeL %s allocates with pagepool", VERSION)


def uninstall() -> None:
    """Restore the engine's own classes, also in modules imported meanwhile; in a reloaded module, its latest definitions. No
    effect if pagepool is not installed.

    Engines built meanwhile keep their pagepool objects.
    """
    with _lock:
        if _reload_hook in sys.meta_path:
            sys.meta_path.remove(_reload_hook)
        remove_guards()
        swap("easydel", {ours: theirs for theirs, ours in _replaced.items()})
        _replaced.clear()


def is_installed() -> bool:
    """Whether engines built now allocate with pagepool: the engine's modules have pagepool's classes everywhere, and the
    scheduler is guarded.
    """
    are_ours = all(_class_at(place, name) is REPLACEMENTS[name] for name, places in PLACES.items() for place in places)
    return are_ours and is_guarded(_class_at(SCHEDULER, "Scheduler"))


@contextmanager
def installed() -> Iterator[None]:
    """Install pagepool for the block. If it was installed before, or the variable installs it on entry, it stays installed."""
    _import_engine()
    with installing(is_installed, install, uninstall):
        yield


def install_if_asked() -> None:
    """Call `install_on_import` if `VARIABLE` is on, in the children of `multiprocessing` too. ``import pagepool`` calls this.

    Raise CompatError for a value that is neither in `ON` nor in `OFF`.
    """
    if read_switch(VARIABLE) in ON:
        install_on_import()
        call_in_children(install_if_asked)


def install_on_import() -> None:
    """Call `install` when the engine is imported, or now if it already is. That import raises errors of `install`.

    Importing a missing engine raises CompatError instead of ModuleNotFoundError, so that a program does not fall back to
    another engine. An engine imported anew is patched anew. Neither EasyDeL nor jax is imported, so programs can still set
    variables that jax reads at import.
    """
    if ENGINE in sys.modules and not is_installed():
        install()
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)


def _install_again(module: str) -> None:
    """Replace the classes that a reloaded module has defined again. If `install` would refuse the module, uninstall and raise
    CompatError.
    """
    with _lock:
        if not _replaced:
            return
        try:
            _check_version()
            classes = _find_reloaded(module)
            _check_signatures(classes)
            if classes:
                check_unused(tuple(classes.values()), "EasyDeL")
            old = [cls for cls, ours in _replaced.items() if ours.__name__ in classes]
            _replaced.update((cls, REPLACEMENTS[name]) for name, cls in classes.items())
            for cls in old:
                del _replaced[cls]
            if module == _name_of(SCHEDULER):
                guard(_find_scheduler())
            swap("easydel", _replaced)
            _check_places(module)
        except BaseException:
            uninstall()
            raise


def _find_reloaded(module: str) -> dict[str, type]:
    """Return the engine's classes that a reloaded module has defined again, by name. Raise CompatError for any other object."""
    homes = {name: places[0] for name, places in PLACES.items() if _name_of(places[0]) == module}
    found = {name: _class_at(home, name) for name, home in homes.items()}
    return {name: _require_class(homes[name], name, value) for name, value in found.items() if value is not REPLACEMENTS[name]}


def _check_places(module: str) -> None:
    """Raise CompatError unless a module has our classes everywhere."""
    for name, places in PLACES.items():
        for place in places:
            if _name_of(place) == module and _class_at(place, name) is not REPLACEMENTS[name]:
                raise CompatError(f"{module}.{name}: got {_class_at(place, name)!r}, allowed: {REPLACEMENTS[name]!r}")


def _is_anywhere() -> bool:
    """Whether a defining module has our class in place of the engine's. False for an engine imported anew."""
    return any(_class_at(places[0], name) is REPLACEMENTS[name] for name, places in PLACES.items())


_reload_hook = AfterReload("easydel", _install_again, _is_anywhere)


def _refuse_missing(name: str) -> None:
    raise CompatError(f"{name}: got no such module, allowed: that of easydel=={VERSION}; is EasyDeL installed?")


_hook = AfterImport(ENGINE, install, _refuse_missing)


# Finding the engine's classes.


def _import_engine() -> None:
    try:
        import_module("easydel")
    except ModuleNotFoundError as error:
        if error.name != "easydel":
            raise
        raise CompatError(f"EasyDeL: got none installed, allowed: easydel=={VERSION}") from None
    _check_version()
    import_module(ENGINE)


def _check_version() -> None:
    version = getattr(sys.modules["easydel"], "__version__", None)
    if version != VERSION:
        raise CompatError(f"EasyDeL's version: got {version}, allowed: {VERSION}")


def _name_of(place: str) -> str:
    return f"{ENGINE}.{place}" if place else ENGINE


def _class_at(place: str, name: str) -> Any:
    return getattr(sys.modules.get(_name_of(place)), name, None)


def _find_classes() -> dict[str, type]:
    """Return the engine's classes by name. Raise CompatError unless each is in all its modules."""
    classes: dict[str, type] = {}
    for name, places in PLACES.items():
        for place in places:
            value = _require_class(place, name, _class_at(place, name))
            if classes.setdefault(name, value) is not value:
                raise _not_the_class(place, name, value, places[0])
    return classes


def _find_scheduler() -> type:
    """Return the engine's scheduler class. Raise CompatError unless it is in its module."""
    value = _class_at(SCHEDULER, "Scheduler")
    if not isinstance(value, type) or value.__module__ != _name_of(SCHEDULER):
        raise _not_the_class(SCHEDULER, "Scheduler", value, SCHEDULER)
    return value


def _require_class(place: str, name: str, value: Any) -> type:
    """Return `value`. Raise CompatError unless it is the engine's own class."""
    if not isinstance(value, type) or value.__module__ != _name_of(PLACES[name][0]):
        raise _not_the_class(place, name, value, PLACES[name][0])
    return value


def _not_the_class(place: str, name: str, value: object, home: str) -> CompatError:
    return CompatError(f"{_name_of(place)}.{name}: got {value!r}, allowed: the class that {_name_of(home)} defines")


# Checking signatures.


def _check_signatures(classes: Mapping[str, type]) -> None:
    """Raise CompatError, with all differences from `SIGNATURES`, if there are any."""
    differences = []
    for name, cls in classes.items():
        found, recorded = _signatures_of(cls), SIGNATURES[name]
        differences += [
            f"{name}.{member}: got {found.get(member, 'nothing')}, allowed: {recorded.get(member, 'nothing')}"
            for member in sorted(found.keys() | recorded.keys())
            if found.get(member) != recorded.get(member)
        ]
    if differences:
        raise CompatError(f"EasyDeL {VERSION} differs from its recorded version: {'; '.join(differences)}")


def _signatures_of(cls: type) -> dict[str, str]:
    operators = ("__init__", "__add__", "__getitem__")
    return {
        name: signature_of(member)
        for name, member in vars(cls).items()
        if (name in operators or not name.startswith("_")) and (callable(member) or isinstance(member, property))
    }
