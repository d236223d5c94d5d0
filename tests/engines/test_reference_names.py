"""The public names of the engine's four replaced modules against pagepool's, if easydel is installed.

The modules are those that define the classes which `pagepool.compat.easydel` replaces, and what these are made of: pages and
queue (`core.utils`), pool (`core.page_pool`), manager (`core.manager`) and tables (`page_table`). Compared are their names, the
attributes of their classes and of objects of these, whether these can be set, and the parameters of what can be called. What
differs is meant to, and listed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pagepool
from pagepool.compat import easydel
from pagepool.compat.easydel import ENGINE

pytest.importorskip("easydel.inference.esurge.core.interface")
pytestmark = pytest.mark.filterwarnings("default")

MODULES = ("core.utils", "core.page_pool", "core.manager", "page_table")
OTHERS = ("core.coordinator", "core.single_type_cache_manager", "core.dp_sharding", "core.interface")

READ_ONLY = "read-only: the core has it"
ONE_POOL = "read-only: a property, since it raises where a manager has several pools"
DIFFERENCES = {
    "logger": "each module of pagepool has one of its own name",
    "none_hash": "NONE_HASH",
    "CachePage.is_null": READ_ONLY,
    "CachePage.next_free_page": READ_ONLY,
    "CachePage.page_id": READ_ONLY,
    "CachePage.prev_free_page": READ_ONLY,
    "CachePages.pages": "read-only: made from ids when it is first read",
    "FreeCachePageQueue.fake_free_list_head": "the null page's record closes the ring, so there are no sentinels",
    "FreeCachePageQueue.fake_free_list_tail": "the null page's record closes the ring, so there are no sentinels",
    "FreeCachePageQueue.num_free_pages": READ_ONLY,
    "PagePool.cached_page_hash_to_page": "read-only: a view of the core's index",
    "PagePool.free_page_queue": ONE_POOL,
    "PagePool.null_page": READ_ONLY,
    "CacheManager.page_pool": ONE_POOL,
    "CacheManager.req_to_page_hashes": "read-only: a view of the digests",
    "PageTable.cpu_version": READ_ONLY,
    "PageTable.max_num_pages_per_req": READ_ONLY,
    "PageTable.max_num_reqs": READ_ONLY,
    "PageTable.num_pages_per_row": "read-only: the array itself is written, not replaced",
    "PageTable.page_table": "read-only: a commit makes it",
    "PageTable.page_table_cpu": "read-only: the array itself is written, not replaced",
    "MultiGroupPageTable.page_tables": READ_ONLY,
}
"""Names of the engine that pagepool lacks or changes, with the reason."""
OURS = SimpleNamespace(
    **{name: getattr(module, name) for module in (easydel, pagepool) for name in module.__all__} | easydel.REPLACEMENTS
)
"""What programs of the engine import instead."""


COMPILED: dict[Any, Any] = {pagepool.CachePage: 7, pagepool.CachePages: ([],)}
"""Compiled classes, with a value for the required parameters of their constructors."""


def modules() -> list[ModuleType]:
    found = [import_module(f"{ENGINE}.{name}") for name in MODULES]
    found[0].init_none_hash()  # which creates a name
    return found


def public_names(module: ModuleType) -> Iterator[str]:
    """Yield the names that a module defines, without imported ones."""
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, ModuleType):
            is_own = getattr(value, "__module__", module.__name__) == module.__name__
            if is_own or name == "logger":
                yield name


def samples(names: dict[str, Any]) -> dict[str, Any]:
    """Return an object of each class, made alike by engine and package; their type parameters are excluded."""
    page_hash = names["PageHash"](5, (1, 2))
    page = names["CachePage"](7)
    return {
        "PageHash": page_hash,
        "PageHashWithGroupId": names["PageHashWithGroupId"](page_hash, 0),
        "CachePage": page,
        "FreeCachePageQueue": names["FreeCachePageQueue"]([page]),
        "PagePool": names["PagePool"](8, True),
        "CachePages": names["CachePages"](([page],)),
        "CacheManager": names["CacheManager"](8, [], 64),
        "PageTable": names["PageTable"](2, 4, 64),
        "MultiGroupPageTable": names["MultiGroupPageTable"](2, 64, 64, [16]),
    }


def differing_parameters(theirs: Any, ours: Any) -> list[str]:
    """Return the parameters with which ours cannot be called like theirs; a compiled class has no signature, so it is
    called.
    """
    wanted = inspect.signature(theirs).parameters
    if ours in COMPILED:
        ours(**{name: COMPILED[ours] if value.default is value.empty else value.default for name, value in wanted.items()})
        return []
    mine = inspect.signature(ours).parameters
    differing = [
        name
        for name, parameter in wanted.items()
        if name not in mine or (mine[name].kind, mine[name].default) != (parameter.kind, parameter.default)
    ]
    positional = [name for name, parameter in wanted.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    moved = [name for name, other in zip(positional, mine, strict=False) if name != other]
    added = [mine[name] for name in mine.keys() - wanted.keys() if mine[name].kind is not inspect.Parameter.VAR_KEYWORD]
    required = [parameter.name for parameter in added if parameter.default is inspect.Parameter.empty]
    return sorted({*differing, *moved, *required})


def can_be_set(item: Any, name: str) -> bool:
    try:
        setattr(item, name, getattr(item, name))
    except AttributeError:
        return False
    except TypeError:  # not to that value
        return True
    return True


def differences_of_class(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Return the names of the attributes that differ between two objects of one class."""
    operators = {"__add__", "__eq__", "__getitem__", "__repr__"}
    defined = {key for key in vars(type(theirs)) if not key.startswith("_") or key in operators}
    for key in sorted(defined | {key for key in getattr(theirs, "__dict__", {}) if not key.startswith("_")}):
        method = getattr(type(theirs), key, None)
        if not hasattr(ours, key):
            yield f"{name}.{key}"
        elif not inspect.isfunction(method):
            if can_be_set(theirs, key) and not can_be_set(ours, key):
                yield f"{name}.{key}"
        elif key not in operators:
            yield from (f"{name}.{key}({each})" for each in differing_parameters(method, getattr(type(ours), key)))


def list_differences() -> list[str]:
    names: dict[str, Any] = {}
    for module in modules():
        names |= {name: getattr(module, name) for name in public_names(module)}
    found = [name for name in names if not hasattr(OURS, name)]
    theirs, ours = samples(names), samples(vars(OURS))
    assert {name for name, value in names.items() if isinstance(value, type)} == set(theirs)
    for name, value in names.items():
        if name in theirs:
            found += differences_of_class(name, theirs[name], ours[name])
            found += [f"{name}({each})" for each in differing_parameters(value, getattr(OURS, name))]
        elif callable(value) and hasattr(OURS, name):
            found += [f"{name}({parameter})" for parameter in differing_parameters(value, getattr(OURS, name))]
    return found


def test_every_public_name_is_there() -> None:
    found = list_differences()
    for name in found:
        print(f"{name}: {DIFFERENCES.get(name, 'not known')}")
    assert sorted(found) == sorted(DIFFERENCES)


def test_the_other_modules_of_the_allocator_have_no_more_names() -> None:
    """But for a table of managers by kind of attention, for which there is a function."""
    names = {name for other in OTHERS for name in public_names(import_module(f"{ENGINE}.{other}"))}
    assert names - vars(OURS).keys() - {"logger", "TYPE_CHECKING"} == {"spec_manager_map"}


def test_constants_are_equal() -> None:
    page_table = modules()[-1]
    for name in ("PAGE_TABLE_PADDING_VAL", "SLOT_MAPPING_PADDING_VAL"):
        assert getattr(OURS, name) == getattr(page_table, name)
    for dividend, divisor in ((0, 16), (1, 16), (16, 16), (17, 16)):
        assert OURS.cdiv(a=dividend, b=divisor) == page_table.cdiv(a=dividend, b=divisor)
