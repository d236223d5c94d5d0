"""Live objects of the compiled core, and random calls of everything public in it, made out of bytes.

What there is to call is read from the module, so a new function, method or property is called without anybody telling.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from fuzz_source import (
    DTYPES,
    HostileList,
    Lazy,
    Raised,
    Source,
    array,
    hostile,
    int32_array,
    interesting,
    ints,
    key,
    key_bytes,
    leave_garbage,
    middle,
    nested,
    pair,
    small,
    wild,
)

from pagepool import _core
from pagepool.errors import IntegrityError, PagePoolError
from pagepool.hashing import PageHash, PageHashWithGroupId

MAX_LIVE = 6
MAX_DEPTH = 3

# Builtin exceptions that may come out of a call beside those of `pagepool.errors`; every other one is a finding.
BUILTIN_ERRORS: dict[type[Exception], tuple[str, ...]] = {
    TypeError: (
        r"[Aa]rgument",  # of the wrong number, name, or class for a parameter that has one; None where one is
        r"^Expected .*, got|^Cannot convert|NoneType",  # the same inside arguments
        r"integer|scalar index|__\w+__|iter\(\)",  # an argument whose own `__index__`, `__len__` or `__iter__` is wrong
        r"unpack|iterable|iteration|not callable",  # sequences, pairs, triples and functions that are none
        r"unhashable|not supported between",  # a page hash of anything
        r"cannot be pickled|no default __reduce__",
        r"what RunningBatch returns",
    ),
    AttributeError: (
        r"not writable|cannot delete",  # of a read-only attribute
        r"'NoneType' object has no attribute",  # a page whose constructor did not run
    ),
    NotImplementedError: (r"^__del__$",),  # deleting an attribute
    IndexError: (r"^(index|page): got", r"out of range|index-sized"),  # ends an iteration
    OverflowError: (r"Python int too large to convert to C|index-sized",),
    ValueError: (r"values? to unpack", r"truth value of an", r"__len__\(\) should", r"^zip\(\) argument"),
}


class Finding(Exception):
    """Something that must not happen; the message tells the calls that led to it."""


class Entry(NamedTuple):
    """One thing to call: of a class, or of the module where `owner` is None."""

    owner: type | None
    name: str
    kind: str  # function, construct, new, init, method, get, set, delete
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}" if self.owner else self.name


# --- what there is to call ------------------------------------------------------------------------------------


CONSTRUCTORS = {
    "PageIds": "values",
    "HeldPages": "values",
    "PageRules": "page_size window chunk",
    "HashChain": "page_size key_bytes flag",
    "PageStore": "num_pages flag is_pool",
    "CachePage": "page_id ref_cnt",
    "TableRows": "num_rows num_columns",
    "GroupedRows": "page_tables",
    "RunningRows": "store tables groups_of_rows max_num_tokens hash_page_size key_bytes num_shards",
}
KEYED_BY_BYTES = {"siphash128"}
NOT_CALLED = {"__doc__", "__module__", "__new__", "__init__", "__pyx_vtable__", "__setstate__"}


def public_classes() -> list[type]:
    return [item for name, item in public_items() if isinstance(item, type)]


def public_items() -> Iterator[tuple[str, Any]]:
    for name, item in vars(_core).items():
        if not name.startswith("_") and getattr(item, "__module__", None) == _core.__name__:
            yield name, item


def entries() -> Iterator[Entry]:
    """Everything public in the core."""
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
        if owner is object or name in NOT_CALLED:
            continue
        member = vars(owner)[name]
        if inspect.isdatadescriptor(member):
            yield from (Entry(cls, name, kind, ("anything",)[: kind == "set"]) for kind in ("get", "set", "delete"))
        else:
            yield Entry(cls, name, "method", parameters_of(name, getattr(member, "__func__", member)))


def parameters_of(name: str, function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; Python's own methods have none that tell."""
    try:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
    except ValueError:
        names = ["i"] if name == "__getitem__" else []
    if name in KEYED_BY_BYTES:
        names = ["key_bytes" if name == "key" else name for name in names]
    return tuple(names)


ENTRIES = list(entries())
WEIGHTS = {"RunningRows": 6, "PageStore": 3, "HashChain": 2, "TableRows": 2}
WEIGHT_BY_KIND = {"method": 4, "function": 4, "construct": 2}
MENU = [
    entry
    for entry in ENTRIES
    for _ in range(WEIGHT_BY_KIND.get(entry.kind, 1) * (WEIGHTS.get(entry.owner.__name__, 1) if entry.owner else 1))
]

OVERWRITE = "an array was overwritten"
SHARE = "two batches share a table"

# What a user may do at his own risk: afterwards `check` may find fault.
SPOILS_POOLS = {f"PageStore.{name}" for name in ("set_ref_count", "pop", "remove", "remove_page")} | {
    f"CachePage.{name}" for name in ("ref_cnt", "incr_ref", "decr_ref", "__init__")
}
SPOILS_BATCHES = (
    SPOILS_POOLS
    | {"PageStore.give_back", "PageStore.give_back_held", "PageStore.skip", OVERWRITE}
    | {
        f"{rows}.{name}"
        for rows in ("TableRows", "GroupedRows")
        for name in ("append_row", "add_row", "clear_row", "clear_rows", "move_row", "swap_row", "append_rows_batch")
    }
)
FORBIDDEN: tuple[set[str], ...] = (set(), SPOILS_POOLS, SPOILS_BATCHES, SPOILS_BATCHES)


class World:
    """Live objects and what is done to them. `counts` and `successes` are by entry."""

    def __init__(self, data: bytes, counts: Counter[Entry], successes: Counter[Entry]) -> None:
        self.source = Source(data)
        self.counts = counts
        self.successes = successes
        self.live: dict[type, list[Any]] = {cls: [] for cls in (*public_classes(), np.ndarray)}
        self.lists: list[list[Any]] = []  # that may be read right now
        self.recipes: dict[int, tuple[Any, Any]] = {}  # store and groups of a batch, by its id
        self.tabled: set[int] = set()  # tables that have a batch
        self.focus: Any = None
        self.num_chosen = 1  # rows or tables, of which as many of something else are due
        self.depth = 0
        self.log: list[str] = []
        self.findings: list[str] = []
        self.is_over = False
        self.forbidden = self.source.pick(FORBIDDEN)
        self.spoilt: set[str] = set()  # what was done of it

    # what there is

    def any_live(self) -> Any:
        objects = self.source.pick(list(self.live.values()))
        return self.source.pick(objects) if objects else None

    def one(self, cls: type) -> Any:
        """A live object of a class; if there is none, one whose constructor did not run."""
        if not self.live[cls]:
            self.keep(cls.__new__(cls, *CONSTRUCTED_WITH.get(cls.__name__, ())))
        objects = self.live[cls]
        return objects[max(0, self.source.below(2 * len(objects)) - len(objects))]  # mostly the first, for deep states

    def keep(self, value: Any) -> None:
        """Use results as arguments of later calls. The first of each class, which others were made of, stays."""
        if isinstance(value, list | tuple) and value and type(value) in (list, tuple):
            self.keep(value[0])
        objects = self.live.get(type(value))
        if objects is None:
            return
        if len(objects) < MAX_LIVE:
            objects.append(value)
        else:
            objects[1 + self.source.below(MAX_LIVE - 1)] = value

    def furnish(self) -> None:
        """A pool, tables and a batch with some rows, as the façade makes them."""
        source = self.source
        store = _core.PageStore(source.pick((16, 2, 9, 40)), source.pick((True, True, True, False)))
        tables = [_core.TableRows(4, columns) for columns in source.pick(((8,), (8, 8), (8, 4), (1,), (70,)))]
        for value in (store, *tables, _core.HashChain(4, bytes(16), True), _core.HeldPages(), _core.HeldPages()):
            self.keep(value)
        arrays = tables[0].num_pages_per_row, tables[0].page_table_cpu
        for value in (_core.CachePage(7), store.page(1), _core.GroupedRows(tables), _core.PageIds([1, 2, 0]), *arrays):
            self.keep(value)
        arguments = (
            store,
            tables,
            self.rules(store, len(tables)),
            32,
            4 * store.enable_caching,
            bytes(16),
            source.pick((0, 0, 1)),
        )
        batch = _core.RunningRows(*arguments)
        self.note_batch(batch, arguments)
        self.keep(batch)
        for row in range(source.below(4)):
            num_tokens = min(source.pick((3, 9)), batch.max_num_tokens)
            batch.admit_row(row, [source.below(2)] * num_tokens, None, None, (), None, None, 0)

    def rules(self, store: Any, num_groups: int) -> list[tuple[Any, int | None, int]]:
        """Groups of a batch: full attention, a window, or a chunk beside them; cached where the store caches."""
        window, chunk = self.source.pick(((0, 0), (6, 0), (0, 5)))
        groups = [(_core.PageRules(4, window), 0, 1), (_core.PageRules(8, 0, chunk), 1, 2)]
        return [(rules, group_id if store.enable_caching else None, stride) for rules, group_id, stride in groups[:num_groups]]

    def note_batch(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Remember of what a batch was made. Two that share a table spoil each other."""
        self.recipes[id(batch)] = arguments[0], arguments[2]
        tables = list(arguments[1]) if type(arguments[1]) in (list, tuple, _core.GroupedRows) else []
        if not tables or any(id(table) in self.tabled for table in tables):  # from a hostile iterable: who knows
            self.spoilt.add(SHARE)
        self.tabled.update(map(id, tables))

    # what is done

    def run(self) -> int:
        """Do what the bytes say, then check all that is left; returns the number of calls."""
        before = self.counts.total()
        threshold = gc.get_threshold()
        sys.unraisablehook = self.note_unraisable
        try:
            self.furnish()
            while self.source.has_more():
                if self.source.below(64) == 1:
                    self.overwrite_array()
                self.call()
        finally:
            self.is_over = True
            gc.set_threshold(*threshold)
        self.check()
        self.live.clear()
        sys.unraisablehook = sys.__unraisablehook__
        if self.findings:
            raise Finding("\n".join([*self.findings, "the calls:", *self.log]))
        return self.counts.total() - before

    def call(self) -> None:
        """Call something with arguments that fit, or not."""
        entry = self.source.pick(MENU)
        if str(entry) in self.forbidden:
            return
        focus = self.one(entry.owner) if entry.owner and entry.kind not in ("construct", "new") else None
        self.focus = focus
        self.call_with(entry, focus, self.arguments(entry))

    def arguments(self, entry: Entry) -> tuple[Any, ...]:
        """Arguments of the kinds that the names of the parameters tell, or one of any kind, or all, or too many or few."""
        mode = self.source.below(16)
        bad = self.source.below(len(entry.parameters)) if mode >= 10 and entry.parameters else -1
        makers = [wild if mode == 14 or i == bad else fitting(entry, name) for i, name in enumerate(entry.parameters)]
        if mode == 15:
            makers = [wild] * self.source.below(5)
        return tuple([maker(self) for maker in makers])

    def call_with(self, entry: Entry, focus: Any, arguments: tuple[Any, ...]) -> None:
        self.counts[entry] += 1
        self.log.append(f"{'  ' * self.depth}{entry} {entry.kind} {shown(arguments)}")
        self.depth += 1
        try:
            result = CALLS[entry.kind](entry, focus, arguments)
        except Exception as error:
            if not (entry.name == "admit_row" and any(isinstance(value, type) for value in arguments)):  # as `find_hits`
                self.judge(entry, error)
        else:
            self.successes[entry] += 1
            self.spoilt |= {str(entry)} & SPOILS_BATCHES
            if entry.name in ("__construct__", "__init__") and entry.owner is _core.RunningRows:
                self.note_batch(focus or result, arguments)
            self.keep(result)
        finally:
            self.depth -= 1

    def overwrite_array(self) -> int:
        """Write into an array, which may be a table's."""
        values = self.one(np.ndarray) if self.live[np.ndarray] else None
        if OVERWRITE not in self.forbidden and values is not None and values.flags.writeable and values.dtype == np.int32:
            values.reshape(-1)[: 1 + small(self)] = self.source.pick((0, 1, -1, 7, 2**31 - 1, -(2**31)))
            self.spoilt.add(OVERWRITE)
        return small(self)

    def interfere(self) -> Any:
        """What a hostile argument does when it is asked for something."""
        if self.is_over or self.depth > MAX_DEPTH:
            return 1
        return self.source.pick(INTERFERENCES)(self)

    def change_list(self) -> int:
        """Change a list that may be read right now."""
        if self.lists:
            items = self.source.pick(self.lists)
            del items[self.source.below(4) :]
            items.extend([1] * self.source.pick((0, 1, 40)))
        return small(self)

    def call_again(self) -> int:
        focus = self.focus
        self.call()
        self.focus = focus
        return small(self)

    def raise_error(self) -> Any:
        raise Raised

    # what is wrong

    def judge(self, entry: Entry, error: Exception) -> None:
        """Note an error that is none of the documented ones."""
        if isinstance(error, PagePoolError | MemoryError | Raised):  # memory is short for huge requests
            return
        if any(re.search(message, str(error)) for message in BUILTIN_ERRORS.get(type(error), ())):
            return
        self.findings.append(f"{entry} ({entry.kind}) raised {error!r}")

    def note_unraisable(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Raised):
            self.findings.append(f"lost: {unraisable.exc_value!r} in {unraisable.object!r}")

    def check(self) -> None:
        """Walk the invariants of pools and batches, unless something was done that may break them."""
        for store in self.live[_core.PageStore]:
            self.check_one(store.check, SPOILS_POOLS)
        for table in self.live[_core.TableRows]:
            self.check_one(table.check, {OVERWRITE})
        for batch in self.live[_core.RunningRows]:
            if batch.num_tokens is not None:
                self.check_one(lambda batch=batch: batch.check_rows([]), SPOILS_BATCHES | {SHARE})

    def check_one(self, check: Callable[[], None], spoilers: set[str]) -> None:
        try:
            check()
        except IntegrityError as error:
            if not self.spoilt & spoilers:
                self.findings.append(f"check: {error}")
        except PagePoolError:
            pass  # a batch whose constructor failed


def shown(arguments: tuple[Any, ...]) -> str:
    """Arguments by type, and by value where that says something and runs nothing."""
    plain = (int, float, str, bytes, type(None), bool)
    return ", ".join(repr(value) if type(value) in plain else type(value).__name__ for value in arguments)


CALLS: dict[str, Callable[[Entry, Any, tuple[Any, ...]], Any]] = {
    "function": lambda entry, _, arguments: getattr(_core, entry.name)(*arguments),
    "construct": lambda entry, _, arguments: entry.owner(*arguments),  # type: ignore[misc]
    "new": lambda entry, _, arguments: entry.owner.__new__(entry.owner, *arguments),  # type: ignore[union-attr, call-overload]
    "init": lambda entry, focus, arguments: focus.__init__(*arguments),
    "method": lambda entry, focus, arguments: getattr(focus, entry.name)(*arguments),
    "get": lambda entry, focus, _: getattr(focus, entry.name),
    "set": lambda entry, focus, arguments: setattr(focus, entry.name, *arguments),
    "delete": lambda entry, focus, _: delattr(focus, entry.name),
}
CONSTRUCTED_WITH: dict[str, tuple[Any, ...]] = {"PageStore": (8,), "HashChain": (2, bytes(16)), "PageRules": (4,)}
INTERFERENCES: tuple[Callable[[World], Any], ...] = (
    *(small, small, small, World.call_again, World.call_again, World.call_again),
    *(World.change_list, World.overwrite_array, World.raise_error, leave_garbage, wild, interesting),
)


# --- arguments that fit ---------------------------------------------------------------------------------------


def fitting(entry: Entry, parameter: str) -> Callable[[World], Any]:
    """The maker of what a parameter may be."""
    return FITTING.get(f"{entry.name}.{parameter}") or FITTING.get(parameter, small)


def live(cls: type) -> Callable[[World], Any]:
    return lambda world: world.one(cls)


def one_of(*makers: Callable[[World], Any]) -> Callable[[World], Any]:
    return lambda world: world.source.pick(makers)(world)


def constant(*values: Any) -> Callable[[World], Any]:
    return lambda world: world.source.pick(values)


def some(maker: Callable[[World], Any]) -> Callable[[World], Any]:
    return lambda world: [maker(world) for _ in range(1 + world.source.below(3))]


def rows_that_are(is_admitted: bool) -> Callable[[World], list[int]]:
    """The rows of the batch that is called that are admitted, or free; any rows for something else."""

    def list_rows(world: World) -> list[int]:
        flags = getattr(world.focus, "is_admitted", None)
        chosen = [] if flags is None else np.flatnonzero(flags == is_admitted).tolist()
        return chosen or [row(world)]

    return list_rows


def row_that_is(is_admitted: bool) -> Callable[[World], int]:
    return lambda world: world.source.pick(rows_that_are(is_admitted)(world))


def admitted_rows(world: World) -> Any:
    """Some of the rows that run."""
    chosen = rows_that_are(True)(world)[world.source.pick((0, 0, 1)) :]
    world.num_chosen = len(chosen)
    return world.source.pick((list, list, np.array))(chosen)


def as_many(maker: Callable[[World], Any]) -> Callable[[World], Any]:
    """A list as long as what was chosen last."""
    return lambda world: [maker(world) for _ in range(world.num_chosen)]


def held_tuple(world: World) -> tuple[Any, ...]:
    """What a request of one group holds, or of two."""
    held = tuple(world.live[_core.HeldPages][: 1 + world.source.below(2)])
    world.num_chosen = len(held)
    return held


def tables_of_rows(world: World) -> Any:
    tables = table_lists(world)
    world.num_chosen = len(tables)
    return tables


def tokens(world: World) -> Any:
    """A prompt that begins as others do."""
    first, num = world.source.below(3), 1 + world.source.below(33)
    return world.source.pick((list, np.array))([first] * (num - 1) + [world.source.below(3)])


def hits_finder(world: World) -> Callable[[Any, int], Any]:
    """Finds the hits that there are, for a batch of one group; or what it likes."""
    store, groups = world.recipes.get(id(world.focus), (None, None))

    def find_hits(chain: Any, num_tokens: int) -> Any:
        world.interfere() if world.source.below(4) == 0 else None
        world.keep(chain)
        if store is None or world.source.below(8) == 0:
            return wild(world)
        num_pages = store.find_leading_hits(chain, 1, 0, (num_tokens - 1) // 4, _core.PageIds([0]))
        hits = [store.fetch_hits(chain, 1, 0, num_pages, 0)] + [_core.PageIds() for _ in groups[1:]]
        return tuple(hits), 4 * num_pages

    return find_hits


def saved(name: str) -> Callable[[World], Any]:
    """An array of a store that was saved, mostly whole."""

    def make(world: World) -> Any:
        try:
            values = world.live[_core.PageStore][0].save()[name]
        except (PagePoolError, IndexError):
            return wild(world)
        return world.source.pick(DAMAGES)(world, values)

    return make


def flip(world: World, values: Any) -> Any:
    """The same with one bit changed."""
    damaged = values.copy()
    memory = damaged.reshape(-1).view(np.uint8)
    if memory.size:
        memory[world.source.below(memory.size)] ^= 1 << world.source.below(8)
    return damaged


DAMAGES: tuple[Callable[[World, Any], Any], ...] = (
    *(lambda _, values: values,) * 8,
    *(flip, flip),
    lambda _, values: values[:-1],
    lambda world, values: values.astype(world.source.pick(DTYPES[:10])),
    lambda world, _: wild(world),
)


def page_hash(world: World) -> PageHashWithGroupId:
    if world.source.below(8) == 0:
        return PageHashWithGroupId(PageHash(wild(world), wild(world)), wild(world))
    return PageHashWithGroupId(PageHash(key(world), world.source.pick(((), (1, 2)))), small(world))


def ids_by_group(world: World) -> list[Any]:
    """A list of ids for each table of the first group of tables."""
    grouped = world.live[_core.GroupedRows]
    return [ints(world) for _ in (grouped[0].page_tables if grouped else ())]


ids = one_of(ints, ints, int32_array, live(_core.PageIds), live(_core.HeldPages), array)
row = constant(0, 1, 2, 3, 0, 1, 2, 4)
rows = one_of(some(row), some(row), int32_array, constant([0], [1], [2, 0], [0, 1, 2, 3]))
table_lists = one_of(lambda world: list(world.live[_core.TableRows][:2]), some(live(_core.TableRows)))
rules_by_group = as_many(
    lambda world: (world.one(_core.PageRules), world.source.pick((0, 0, None)), world.source.pick((1, 1, 2)))
)

FITTING: dict[str, Callable[[World], Any]] = {
    "anything": one_of(wild, small, page_hash),
    "cached_group_ids": saved("cached_group_ids"),
    "cached_keys": saved("cached_keys"),
    "cached_page_ids": saved("cached_page_ids"),
    "cached_token_ids": saved("cached_token_ids"),
    "chain": live(_core.HashChain),
    "chunk": constant(0, 0, 5),
    "counters": saved("counters"),
    "data": constant(b"", b"data", bytes(100)),
    "extend.extra_keys": constant(b"", b"", b"salt"),
    "admit_row.extra_keys": one_of(*[constant(())] * 5, some(pair), hostile(HostileList, [(1, b"x")])),
    "find_hits": one_of(hits_finder, hits_finder, constant(None), wild),
    "enable_caching": constant(True, True, False),
    "first_id": constant(0, 0, 0, 3),
    "flag": constant(True, True, False),
    "free_page_ids": saved("free_page_ids"),
    "group": constant(0, 0, 0, 1),
    "device_table": one_of(live(np.ndarray), array),
    "find_leading_hits.groups": lambda world: _core.PageIds(world.source.pick(([0], [1], [0, 1], []))),
    "find_last_run.groups": lambda world: _core.PageIds(world.source.pick(([0], [1], [0, 1], []))),
    "find_pages.groups": constant([0], [0, 1], (1,)),
    "group_ids": lambda world: _core.PageIds(range(world.num_chosen)),
    "groups": held_tuple,
    "groups_of_rows": rules_by_group,
    "hash_page_size": constant(4, 4, 2, 0),
    "held": one_of(live(_core.HeldPages), live(_core.HeldPages), live(_core.PageIds)),
    "check_holders.held": one_of(held_tuple, Lazy),
    "held_elsewhere": one_of(constant([]), held_tuple, Lazy),
    "num_new_pages": as_many(constant(0, 1, 2)),
    "hits": one_of(constant((), ()), as_many(live(_core.PageIds)), as_many(lambda _: _core.PageIds())),
    "strides": lambda world: _core.PageIds([1] * world.num_chosen),
    "num_reserved": constant(0, 0, 2),
    "ids": live(_core.PageIds),
    "is_pool": constant(True, True, True, False),
    "items": ints,
    "key": key,
    "key_bytes": key_bytes,
    "admit_row.num_tokens": constant(None, None, 1, 4, 7),
    "admit_row.row": row_that_is(False),
    "admit_row.token_ids": one_of(tokens, tokens, tokens, ids),
    "enter_held.num_full_pages": constant(0, 1, 2),
    "max_num_new_tokens": one_of(constant(None, None, None), middle),
    "max_num_tokens": constant(32, 32, 7, 2**40),
    "num_lookahead_tokens": one_of(constant(0, 0, 0), small, as_many(small)),
    "num_new_tokens": one_of(constant(0, 1, 1), constant(0, 1, 1), as_many(small)),
    "num_pages": middle,
    "num_reserved_pages": constant(0, 0, 0, 3),
    "num_shards": constant(0, 1, 2, 4),
    "num_tokens": one_of(middle, middle, as_many(middle)),
    "page": live(_core.CachePage),
    "page_id": middle,
    "page_ids": one_of(ids, ids, ids, ids_by_group),
    "page_ids_per_req": one_of(as_many(ints), as_many(ids_by_group), nested),
    "page_size": constant(4, 4, 8, 1, None),
    "page_tables": table_lists,
    "pages": some(live(_core.CachePage)),
    "positions": ids,
    "ref_cnt": constant(0, 1, 2),
    "ref_counts": saved("ref_counts"),
    "req_indices": as_many(row),
    "row": row,
    "row_idx": row,
    "rows": one_of(admitted_rows, admitted_rows, admitted_rows, rows),
    "slot_mapping.rows": lambda world: as_many(row)(world),
    "slot_mapping.positions": lambda world: as_many(middle)(world),
    "shape": one_of(constant((2, 3), (0,), ()), some(small), nested),
    "shard": constant(None, None, None, 0, 1),
    "src": row_that_is(True),
    "start": constant(0, 0, 0, 1),
    "stop": constant(0, 1, 2, 3),
    "stop_id": constant(None, None, 9),
    "store": live(_core.PageStore),
    "stride": constant(1, 1, 1, 2),
    "tables": lambda world: tuple(tables_of_rows(world)),
    "tgt": row_that_is(False),
    "token_ids": one_of(as_many(small), as_many(small), as_many(small), ids),
    "tokens": one_of(constant([1, 2, 3, 4], [0] * 8, [1, 1]), tokens, ids),
    "values": ids,
    "window": constant(0, 0, 6),
}
