"""The namespace of a store: pages of one model, in one layout, under keys of one kind."""

import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.page_hashing import PageHasher
from pagepool.specs import dtype_name

logger = logging.getLogger(__name__)

VERSION = 2
"""To be increased when the content of stored pages changes its meaning."""

WARNED: weakref.WeakSet[PageHasher] = weakref.WeakSet()
"""Hashers of managers that were warned about their seed."""

MAX_DEPTH = 32
"""Deepest nesting of objects in a cache group."""


def make_namespace(manager: CacheManager, layout: str, model: bytes, rank: int = 0, num_ranks: int = 1) -> str:
    """Return the namespace of a manager's pages, such as ``"5f1b9c0d8e7a6b5c4d3e2f1a/0-of-1"``: a digest of everything that
    decides what a stored page contains.

    `layout` describes a row of host memory exactly, as the `layout` of `HostPages` does. `model` identifies the weights: the
    digest of a checkpoint, with the adapters that its requests do not name. Of `num_ranks` processes that each hold a part of a
    page, each gives its `rank`. The manager's hash algorithm and seed, the byte order of the machine, and all fields of its
    cache groups and their specs are included, also fields of an engine's own classes.

    Log a warning, once for a manager, if its keys follow PYTHONHASHSEED: processes with another value share no pages.

    Raise ArgumentError for a manager without caching, and for one whose keys differ in each process: with SipHash, without a
    `hash_seed`, and without PYTHONHASHSEED in the environment; ArgumentTypeError for other types, and for fields of a group
    that no other process can compare, such as a function.
    """
    if not isinstance(manager, CacheManager):
        raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
    if not isinstance(layout, str):
        raise ArgumentTypeError(f"layout: got {type(layout).__name__}, allowed: a string")
    if not isinstance(model, bytes) or not model:
        raise ArgumentTypeError(f"model: got {type(model).__name__}, allowed: bytes that identify the weights")
    if not manager.enable_caching:
        raise ArgumentError("manager: got one without prefix caching, allowed: one that caches")
    if not manager.registry.hasher.is_shared:
        allowed = "PageHashing with hash_algo='sha256' or 'sha256_cbor', or a hash_seed"
        raise ArgumentError(f"manager: got one whose hashes are secret to the process, allowed: {allowed}")
    warn_of_seed(manager)
    num_ranks = require_int("num_ranks", num_ranks, 1)
    rank = require_int("rank", rank, 0, num_ranks - 1)
    groups = [
        describe(f"kv_cache_groups[{i}]", group) for i, group in enumerate([*manager.kv_cache_groups, *manager.cross_groups])
    ]
    content = [VERSION, sys.byteorder, manager.registry.configuration, groups, layout, model.hex(), num_ranks]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    return f"{digest[:12].hex()}/{rank}-of-{num_ranks}"


def warn_of_seed(manager: CacheManager) -> None:
    """Log a warning, once for a manager, unless its keys are the same in every process with these arguments."""
    hasher = manager.registry.hasher
    if hasher in WARNED or (hasher.is_shared and not hasher.follows_environment):
        return
    WARNED.add(hasher)
    got = "PYTHONHASHSEED, which other processes may lack" if hasher.is_shared else "none, so keys are secret to the process"
    logger.warning("hash_seed: got %s, allowed for pages that processes share: the same hash_seed in all of them", got)


def describe(name: str, value: Any, depth: int = 0) -> Any:
    """Return a value as JSON that is the same in every process, and differs if any field of the value differs. Equal dtypes
    have equal JSON, and so have their names in fields for dtypes. Raise ArgumentTypeError for objects that differ only by
    their address.

    >>> describe("shapes", ((16, 64), np.int64(3)))
    [['0x10', '0x40'], '0x3']
    >>> describe("dtype", np.float16), describe("dtype", np.dtype(">f2"))
    ('float16', '>f2')
    """
    if depth > MAX_DEPTH:
        raise ArgumentTypeError(f"{name}: got more than {MAX_DEPTH} objects, one inside the other, allowed: fewer")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__qualname__}.{value.name}"}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return hex(value)  # decimals of large ints are refused
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, np.ndarray):
        return {"array": [str(value.dtype), describe(name, value.tolist(), depth + 1)]}
    if isinstance(value, Mapping):
        items = [describe(f"{name}[{key!r}]", [key, item], depth + 1) for key, item in value.items()]
        return {"items": sorted(items, key=json.dumps)}
    if isinstance(value, Set):
        return {"set": sorted((describe(name, item, depth + 1) for item in value), key=json.dumps)}
    if isinstance(value, list | tuple):
        return [describe(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    dtype = dtype_name(value)
    if dtype is not None:
        return dtype
    if isinstance(value, type):
        return {"class": f"{value.__module__}.{value.__qualname__}"}
    found = [] if isinstance(value, FunctionType | ModuleType) else list_fields(value)
    if not found and not is_dataclass(value):
        allowed = "numbers, strings, bytes, dtypes, enums, classes, None, and collections or objects with fields of these"
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: {allowed}")
    described = {each: describe(f"{name}.{each}", read_field(value, each), depth + 1) for each in found}
    return {"object": type(value).__qualname__, "fields": described}


def read_field(value: object, name: str) -> Any:
    """Return a field of an object. A string in a field for a dtype becomes the name of that dtype."""
    found = getattr(value, name)
    return dtype_name(found) if isinstance(found, str) and name.endswith("dtype") else found


def list_fields(value: object) -> list[str]:
    """Return the names of an object's fields: the fields of a dataclass, and other attributes that it stores."""
    classes = type(value).__mro__
    names = {field.name: None for field in fields(value)} if is_dataclass(value) else {}
    for cls in classes:
        slots = vars(cls).get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
    names |= dict.fromkeys(getattr(value, "__dict__", ()))
    computed = {name for cls in classes for name, member in vars(cls).items() if isinstance(member, cached_property)}
    return [name for name in names if name not in computed and not name.startswith("__") and hasattr(value, name)]
