"""The callables of the compiled core, read from the module, so that new ones are called without being listed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pagepool import _core


class Entry(NamedTuple):
    """A callable of a class, or of the module if `owner` is None."""

    owner: type | None
    name: str
    kind: str  # function, construct, new, init, method, get, set, delete
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}" if self.owner else self.name


CONSTRUCTORS = {
    "PageIds": "values",
    "PageRules": "page_size window chunk",
    "CacheGroups": "groups_of_model",
    "RequestPages": "store cache_groups max_num_tokens",
    "TokenSpan": "first_token stop_token",
    "PageSessions": "store",
    "HashChain": "page_size key_bytes flag algorithm",
    "PageStore": "num_pages flag eviction",
    "PageTier": "store num_tier_pages flag",
    "EntryJournal": "store",
    "QueryCounter": "store flag",
    "PrefixTable": "page_size",
    "RequestHashes": "anything chain",
    "CachePages": "tuple_of_hits store",
    "CachePage": "page_id ref_cnt _page_hash prev_free_page next_free_page is_null",
    "HashedTokens": "prompt hash_page_size key_bytes",
    "WaitingRequest": "prompt hash_page_size key_bytes",
    "WaitingLine": "store cache_groups flag",
    "TableRows": "num_rows num_columns",
    "GroupedRows": "page_tables",
    "RunningRows": "store tables groups_of_rows max_num_tokens hash_page_size key_bytes num_shards",
    "InputArrays": "batch no_tables no_tables no_tables input_size input_size depth input_fields padding padding flag",
    "RowRequest": "batch free_row prompt num_slots max_num_new_tokens num_reserved_pages options num_external_tokens "
    "resume_at num_lookahead_tokens flag",
}
KEYED_BY_BYTES = {"siphash128"}
NOT_FUZZED = {"RequestMaps", "SlotAllocator"}
"""They work with objects of the façade; `argument_cases` calls `CacheManager.allocate_slots` with values of any kind."""
NOT_CALLED = {"__doc__", "__module__", "__new__", "__init__", "__pyx_vtable__", "__setstate__"}


def public_classes() -> list[type]:
    return [item for name, item in public_items() if isinstance(item, type)]


def public_items() -> Iterator[tuple[str, Any]]:
    for name, item in vars(_core).items():
        is_public = not name.startswith("_") and name not in NOT_FUZZED
        if is_public and str(getattr(item, "__module__", None)).startswith("pagepool.core."):
            yield name, item


def entries() -> Iterator[Entry]:
    """Return everything public in the core."""
    for name, item in public_items():
        if isinstance(item, type):
            parameters = tuple(CONSTRUCTORS.get(name, "").split())
            yield from (Entry(item, f"__{kind}__", kind, parameters) for kind in ("construct", "new", "init"))
            yield from entries_of(item)
        else:
            yield Entry(None, name, "function", parameters_of(name, item))


def entries_of(cls: type) -> Iterator[Entry]:
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        member = vars(owner)[name]
        if owner is object or name in NOT_CALLED or member is None:  # as `__hash__` of what cannot be hashed
            continue
        if inspect.isdatadescriptor(member):
            yield from (Entry(cls, name, kind, ("anything",)[: kind == "set"]) for kind in ("get", "set", "delete"))
        else:
            yield Entry(cls, name, "method", parameters_of(name, getattr(member, "__func__", member)))


def parameters_of(name: str, function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters; Python's own methods do not reveal theirs."""
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except ValueError:
        names = ["i"] if name == "__getitem__" else []
    if name in KEYED_BY_BYTES:
        names = ["key_bytes" if name == "key" else name for name in names]
    return tuple(names)


ENTRIES = list(entries())
WEIGHTS = {
    "RunningRows": 6,
    "RequestPages": 4,
    "RowRequest": 4,
    "InputArrays": 3,
    "PageStore": 3,
    "EntryJournal": 3,
    "HashChain": 2,
    "TokenSpan": 4,
    "WaitingLine": 2,
    "WaitingRequest": 2,
    "TableRows": 2,
    "begin_fills": 3,
    "end_fills": 3,
}
WEIGHT_BY_KIND = {"method": 4, "function": 4, "construct": 2}
MENU = [
    entry
    for entry in ENTRIES
    for _ in range(WEIGHT_BY_KIND.get(entry.kind, 1) * WEIGHTS.get(entry.owner.__name__ if entry.owner else entry.name, 1))
]

OVERWRITE = "an array was overwritten"
SHARE = "two batches share a table"

# Calls at the user's own risk: `check` may fail afterwards. Who enters a page that is not computed lets others hit it.
SPOILS_POOLS = {f"PageStore.{name}" for name in ("set_ref_count", "pop", "remove", "remove_page")} | {
    f"CachePage.{name}" for name in ("ref_cnt", "incr_ref", "decr_ref", "__init__")
}
SPOILS_BATCHES = (
    SPOILS_POOLS
    | {f"PageStore.{name}" for name in ("give_back", "enter", "enter_pages", "cache_hash")}
    | {"CachePage.page_hash", OVERWRITE}
    | {
        f"{rows}.{name}"
        for rows in ("TableRows", "GroupedRows")
        for name in ("append_row", "add_row", "clear_row", "clear_rows", "move_row", "swap_row", "append_rows_batch")
    }
)
FORBIDDEN: tuple[set[str], ...] = (set(), SPOILS_POOLS, SPOILS_BATCHES, SPOILS_BATCHES)


def call_method(entry: Entry, focus: Any, arguments: tuple[Any, ...]) -> Any:
    """Call a method. A step fails without tokens, mostly."""
    if entry.name == "settle" and len(arguments) == 6:
        is_failed = arguments[3]
        rules = {} if is_failed is True else dict(zip(("stop_token_ids", "max_num_tokens"), arguments[4:], strict=True))
        return focus.settle(*arguments[: 1 if is_failed is True else 3], failed=is_failed, **rules)
    if entry.name == "commit_external" and len(arguments) == 3:
        return focus.commit_external(*arguments[:2], is_last=arguments[2])
    return getattr(focus, entry.name)(*arguments)


CALLS: dict[str, Callable[[Entry, Any, tuple[Any, ...]], Any]] = {
    "function": lambda entry, _, arguments: getattr(_core, entry.name)(*arguments),
    "construct": lambda entry, _, arguments: entry.owner(*arguments),  # type: ignore[misc]
    "new": lambda entry, _, arguments: entry.owner.__new__(entry.owner, *arguments),  # type: ignore[union-attr, call-overload]
    "init": lambda entry, focus, arguments: focus.__init__(*arguments),
    "method": call_method,
    "get": lambda entry, focus, _: getattr(focus, entry.name),
    "set": lambda entry, focus, arguments: setattr(focus, entry.name, *arguments),
    "delete": lambda entry, focus, _: delattr(focus, entry.name),
}
