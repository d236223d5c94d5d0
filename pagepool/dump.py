"""A dump of a manager: its settings, statistics and holders as plain values, written by `CacheManager.dump` and read back."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import signature
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pagepool.errors import ArgumentError, shown
from pagepool.holders import HeldPages
from pagepool.stats import CacheStats

FORMAT = 1
"""Number of the format. A reader takes dumps of its own number; fields that are added do not change it."""

MAX_BYTES = 1 << 28  # a larger dump is not read
MAX_COUNT = 1 << 63
MAX_SHOWN = 80  # characters of a value in an error


class PoolSettings(NamedTuple):
    """Settings of a pool. ``num_pages`` includes the null page."""

    num_pages: int
    eviction: str


class GroupSettings(NamedTuple):
    """Settings of a cache group; ``page_size`` is in tokens."""

    kind: str
    page_size: int
    pool: str


class TierSettings(NamedTuple):
    """Settings of a host tier; ``num_pages`` by pool includes null pages."""

    num_pages: Mapping[str, int]
    policy: str


class Settings(NamedTuple):
    """Settings of a manager. Of keys and salts there are none."""

    max_model_len: int
    max_num_batched_tokens: int | None
    enable_caching: bool
    caches: str
    pools: Mapping[str, PoolSettings]
    groups: tuple[GroupSettings, ...]
    host_tier: TierSettings | None


class Dump(NamedTuple):
    """A dump: ``pagepool_dump`` is its `FORMAT`, ``version`` that of the package, ``unix_seconds`` when it was made."""

    pagepool_dump: int
    version: str
    unix_seconds: float
    settings: Settings
    stats: CacheStats
    held: HeldPages


def to_plain(value: Any) -> Any:
    """Return dataclasses, named tuples, mappings and tuples as dicts and lists, which `json.dump` takes; others as they are."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_plain(each) for name, each in value.items()}
    return [*map(to_plain, value)] if isinstance(value, list | tuple) else value


def read_dump(content: bytes) -> Dump:
    """Return the dump in a JSON text. Raise ArgumentError, naming the first wrong value, for anything that `CacheManager.dump`
    does not return; unknown fields are ignored.
    """
    if len(content) > MAX_BYTES:
        raise ArgumentError(f"dump: got more than {MAX_BYTES:,} bytes, allowed: fewer")
    try:
        values = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"dump: got what is no JSON ({error}), allowed: what json.dump wrote of CacheManager.dump"
        ) from None
    number = values.get("pagepool_dump") if isinstance(values, dict) else None
    if number is None:
        raise ArgumentError("dump: got JSON of something else, allowed: what json.dump wrote of CacheManager.dump")
    if number != FORMAT or isinstance(number, bool):
        raise ArgumentError(f"pagepool_dump: got {_show(number)}, allowed: {FORMAT}, the format of this version")
    dump: Dump = _read(Dump, values, "dump")
    return dump


def _refuse_constant(name: str) -> None:
    raise ValueError(f"got {name}")


def _show(value: Any) -> str:
    text = f"{type(value).__name__} of {len(value):,}" if isinstance(value, dict | list) else shown(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _refuse(path: str, value: Any, allowed: str) -> ArgumentError:
    return ArgumentError(f"{path}: got {_show(value)}, allowed: {allowed}")


def _read(kind: Any, value: Any, path: str) -> Any:
    """Return a value of JSON as a value of a type: of the types in the fields of `Dump`, and no others. O(size)."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(parts[0], value, path)
    if kind in (int, float):
        return _read_number(kind, value, path)
    if kind in (str, bool):
        if not isinstance(value, kind):
            raise _refuse(path, value, "a string" if kind is str else "true or false")
        return value
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise _refuse(path, value, "a list")
        return origin(_read(parts[0], each, f"{path}[{i}]") for i, each in enumerate(value))
    if not isinstance(value, dict):
        raise _refuse(path, value, "an object")
    if origin is Mapping:
        return {name: _read(parts[1], each, f"{path}[{_show(name)}]") for name, each in value.items()}
    return _read_fields(kind, value, path)


def _read_number(kind: type[int | float], value: Any, path: str) -> int | float:
    """Return a count, or a finite number that is not negative."""
    if kind is float and isinstance(value, float) and math.isfinite(value) and value >= 0:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
        raise _refuse(path, value, "an integer from 0 to 2**63 - 1" if kind is int else "a number of at least 0")
    return kind(value)


def _read_fields(kind: Any, value: dict[str, Any], path: str) -> Any:
    """Return a dataclass or named tuple. Fields with a default may be missing."""
    found: dict[str, Any] = {}
    for name, (hint, is_optional) in _list_fields(kind).items():
        if name in value:
            found[name] = _read(hint, value[name], f"{path}.{name}")
        elif not is_optional:
            raise ArgumentError(f"{path}: got no {name!r}, allowed: an object with it")
    return kind(**found)


@cache
def _list_fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the types of the fields of a dataclass or named tuple, and whether each has a default."""
    optional = {name for name, each in signature(kind).parameters.items() if each.default is not each.empty}
    return {name: (hint, name in optional) for name, hint in get_type_hints(kind).items()}
