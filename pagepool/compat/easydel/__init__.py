"""EasyDeL's eSurge engine with pagepool as its allocator: the same tokens, the engine's code unchanged.

    from pagepool.compat import easydel
    easydel.install()                       # before the engine is built
    engine = eSurge(model, ...)

or ``with easydel.installed(): ...``. Without a changed line: ``python -m pagepool.compat.easydel PROGRAM ...``. Or, in programs
that import pagepool, ``PAGEPOOL_EASYDEL=1`` in the environment.

`CacheManager`, `CachePages`, `PagePool`, `PageTable` and `MultiGroupPageTable` take the places of the engine's classes of these
names in every module of EasyDeL that has them, now or later, and again in one that is reloaded. Names that code outside EasyDeL
has bound stay as they are. The engine keeps its own requests and cache specs, which pagepool takes as they are.
"""

import gc
import inspect
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from pagepool.compat.children import call_in_children
from pagepool.compat.import_hook import AfterImport, AfterReload
from pagepool.errors import CompatError
from pagepool.manager import CacheManager, CachePages
from pagepool.page_pool import PagePool
from pagepool.page_table import MultiGroupPageTable, PageTable

__all__ = [
    "ENGINE",
    "OFF",
    "ON",
    "PLACES",
    "REPLACEMENTS",
    "SIGNATURES",
    "VARIABLE",
    "VERSION",
    "install",
    "install_if_asked",
    "install_on_import",
    "installed",
    "is_installed",
    "uninstall",
]

logger = logging.getLogger(__name__)

ENGINE = "easydel.inference.esurge"
"""The package of the engine."""

VERSION = "0.3.0"
"""The version of EasyDeL that what follows was recorded of."""

VARIABLE = "PAGEPOOL_EASYDEL"
"""The environment variable that ``import pagepool`` honours: one of `ON` installs when the engine is imported."""

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")
"""The values of `VARIABLE`, in any case, with or without whitespace around them."""

REPLACEMENTS = {cls.__name__: cls for cls in (CacheManager, CachePages, PagePool, PageTable, MultiGroupPageTable)}
"""Our classes by the names of the engine's."""

PLACES = {
    "CacheManager": ("core.manager", "core", "", "scheduler.scheduler", "scheduler.token_budget"),
    "CachePages": ("core.manager", "core", ""),
    "PagePool": ("core.page_pool", "core", "", "core.coordinator", "core.single_type_cache_manager"),
    "PageTable": ("page_table",),
    "MultiGroupPageTable": ("page_table", "runners.sequence_buffer"),
}
"""The modules below `ENGINE` that have each class, the one that defines it first."""

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
"""What can be called of each class, as the engine defines it: signatures without types."""

_lock = threading.RLock()
_replaced: dict[type, type] = {}
"""The engine's class to ours, while installed."""


def install() -> None:
    """Put pagepool's classes where the engine looks them up. Nothing but a warning in the log if that was done.

    Imports the engine if it is not imported yet. CompatError, and nothing changed, if EasyDeL is not there, if it is of another
    version than `VERSION`, if a class is not where or not what was recorded of it, or if objects of these classes live, as they
    do once an engine is built (``gc.freeze`` hides them). Takes 0.3 s once the engine is imported, most of it for that search.
    """
    if is_installed():
        logger.warning("EasyDeL allocates with pagepool already: it was installed before")
        return
    _import_engine()  # which installs, where the variable asks for it
    with _lock:
        if is_installed():
            return
        classes = _find_classes()
        _check_signatures(classes)
        _check_unused(tuple(classes.values()))
        _replaced.update((cls, REPLACEMENTS[name]) for name, cls in classes.items())
        try:
            _swap(_replaced)
            if _reload_hook not in sys.meta_path:
                sys.meta_path.insert(0, _reload_hook)
        except BaseException:
            uninstall()
            raise
    logger.info("EasyDeL %s allocates with pagepool", VERSION)


def uninstall() -> None:
    """Put the engine's own classes back, in modules that were imported meanwhile too: of a module that was reloaded, those that
    it defined last. Nothing if pagepool is not installed.

    Engines that were built meanwhile go on with the pagepool objects they have.
    """
    with _lock:
        if _reload_hook in sys.meta_path:
            sys.meta_path.remove(_reload_hook)
        _swap({ours: theirs for theirs, ours in _replaced.items()})
        _replaced.clear()


def is_installed() -> bool:
    """Whether engines that are built now allocate with pagepool: all places in the engine's modules have our classes."""
    return all(_class_at(place, name) is REPLACEMENTS[name] for name, places in PLACES.items() for place in places)


@contextmanager
def installed() -> Iterator[None]:
    """`install` on entry, `uninstall` on exit; what was installed before, or by the variable on entry, stays."""
    _import_engine()
    was_installed = is_installed()
    if not was_installed:
        install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def install_if_asked() -> None:
    """`install_on_import` if `VARIABLE` is on, in the children of `multiprocessing` too. ``import pagepool`` calls this.

    CompatError for a value that is neither in `ON` nor in `OFF`.
    """
    value = os.environ.get(VARIABLE, "")
    word = value.strip().lower()
    if word not in ON + OFF:
        raise CompatError(f"{VARIABLE}: got {value!r}, allowed: {', '.join(ON)}; {', '.join(OFF[:-1])} or nothing")
    if word in ON:
        install_on_import()
        call_in_children(install_if_asked)


def install_on_import() -> None:
    """`install` as soon as the engine is imported, or now if it is: what `install` raises, that import raises.

    Looking for an engine that is not there raises CompatError, and not ModuleNotFoundError, lest a program take another engine.
    An engine that is imported anew gets ours anew. Programs may set what jax reads before they import it, since this imports
    neither EasyDeL nor jax.
    """
    if ENGINE in sys.modules and not is_installed():
        install()
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)


def _install_again(module: str) -> None:
    """Put ours in the places of what a reloaded module has defined anew. CompatError, and pagepool is uninstalled, where
    `install` would refuse it.
    """
    with _lock:
        if not _replaced:
            return
        try:
            _check_version()
            classes = _find_reloaded(module)
            _check_signatures(classes)
            if classes:
                _check_unused(tuple(classes.values()))
            old = [cls for cls, ours in _replaced.items() if ours.__name__ in classes]
            _replaced.update((cls, REPLACEMENTS[name]) for name, cls in classes.items())
            for cls in old:
                del _replaced[cls]
            _swap(_replaced)
            _check_places(module)
        except BaseException:
            uninstall()
            raise


def _find_reloaded(module: str) -> dict[str, type]:
    """The engine's classes that a module has defined anew, by name. CompatError for what is no such class."""
    homes = {name: places[0] for name, places in PLACES.items() if _name_of(places[0]) == module}
    found = {name: _class_at(home, name) for name, home in homes.items()}
    return {name: _require_class(homes[name], name, value) for name, value in found.items() if value is not REPLACEMENTS[name]}


def _check_places(module: str) -> None:
    """CompatError unless a module has ours where it has one of the classes."""
    for name, places in PLACES.items():
        for place in places:
            if _name_of(place) == module and _class_at(place, name) is not REPLACEMENTS[name]:
                raise CompatError(f"{module}.{name}: got {_class_at(place, name)!r}, expected {REPLACEMENTS[name]!r}")


def _is_anywhere() -> bool:
    """Whether one of our classes is where the engine defines its own: not so in an engine that was imported anew."""
    return any(_class_at(places[0], name) is REPLACEMENTS[name] for name, places in PLACES.items())


_reload_hook = AfterReload("easydel", _install_again, _is_anywhere)


def _refuse_missing(name: str) -> None:
    raise CompatError(f"{name}: got no module of that name, expected that of easydel=={VERSION}: is EasyDeL installed?")


_hook = AfterImport(ENGINE, install, _refuse_missing)


# Finding.


def _import_engine() -> None:
    try:
        import_module("easydel")
    except ModuleNotFoundError as error:
        if error.name != "easydel":
            raise
        raise CompatError(f"EasyDeL is not installed; expected: easydel=={VERSION}") from None
    _check_version()
    import_module(ENGINE)


def _check_version() -> None:
    version = getattr(sys.modules["easydel"], "__version__", None)
    if version != VERSION:
        raise CompatError(f"EasyDeL's version: got {version}, expected {VERSION}")


def _name_of(place: str) -> str:
    return f"{ENGINE}.{place}" if place else ENGINE


def _class_at(place: str, name: str) -> Any:
    return getattr(sys.modules.get(_name_of(place)), name, None)


def _find_classes() -> dict[str, type]:
    """The engine's classes by name. CompatError unless each is in all its places."""
    classes: dict[str, type] = {}
    for name, places in PLACES.items():
        for place in places:
            value = _require_class(place, name, _class_at(place, name))
            if classes.setdefault(name, value) is not value:
                raise _not_the_class(place, name, value)
    return classes


def _require_class(place: str, name: str, value: Any) -> type:
    """`value` if the engine has defined it; CompatError if not."""
    if not isinstance(value, type) or value.__module__ != _name_of(PLACES[name][0]):
        raise _not_the_class(place, name, value)
    return value


def _not_the_class(place: str, name: str, value: object) -> CompatError:
    home = _name_of(PLACES[name][0])
    return CompatError(f"{_name_of(place)}.{name}: got {value!r}, expected the class that {home} defines")


def _engine_modules() -> list[ModuleType]:
    modules = list(sys.modules.items())
    return [module for name, module in modules if f"{name}.".startswith("easydel.") and isinstance(module, ModuleType)]


# Checking.


def _check_signatures(classes: Mapping[str, type]) -> None:
    """CompatError names all that is not as recorded."""
    differences = []
    for name, cls in classes.items():
        found, recorded = _signatures_of(cls), SIGNATURES[name]
        differences += [
            f"{name}.{member}: got {found.get(member, 'nothing')}, expected {recorded.get(member, 'nothing')}"
            for member in sorted(found.keys() | recorded.keys())
            if found.get(member) != recorded.get(member)
        ]
    if differences:
        raise CompatError(f"EasyDeL {VERSION} is not as it was recorded: {'; '.join(differences)}")


def _signatures_of(cls: type) -> dict[str, str]:
    """What can be called of a class, by name, as in `SIGNATURES`."""
    operators = ("__init__", "__add__", "__getitem__")
    return {
        name: _signature_of(member)
        for name, member in vars(cls).items()
        if (name in operators or not name.startswith("_")) and (callable(member) or isinstance(member, property))
    }


def _signature_of(member: Callable[..., Any] | property) -> str:
    if isinstance(member, property):
        return "property"
    signature = inspect.signature(member)
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _check_unused(classes: tuple[type, ...]) -> None:
    """CompatError counts the objects of the engine's own classes that live: they would meet ours."""
    if _count_objects(classes):
        gc.collect()  # what is left of an engine that was dropped does not count
    counts = _count_objects(classes)
    if counts:
        live = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        raise CompatError(f"an engine was built with EasyDeL's own allocator, got {live}; install before that, or drop it")


def _count_objects(classes: tuple[type, ...]) -> Counter[str]:
    return Counter(type(value).__name__ for value in gc.get_objects() if issubclass(type(value), classes))


# Replacing.


def _swap(replacements: Mapping[type, type]) -> None:
    """Wherever a module of EasyDeL has one of the classes, under any name, put its replacement."""
    for module in _engine_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in replacements:
                setattr(module, name, replacements[value])
