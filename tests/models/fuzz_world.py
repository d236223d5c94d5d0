"""Live objects of the compiled core, and random calls of everything public in it, decoded from bytes."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from fuzz_arguments import Follower, fitting
from fuzz_entries import CALLS, FORBIDDEN, MENU, OVERWRITE, SHARE, SPOILS_BATCHES, SPOILS_POOLS, Entry, public_classes
from fuzz_source import Raised, Source, interesting, leave_garbage, small, wild

from pagepool import _core
from pagepool.errors import IntegrityError, PagePoolError, RequestTooLargeError
from pagepool.page_pool.integrity import check_store

MAX_LIVE = 6
MAX_DEPTH = 3

# Builtin exceptions that a call may raise besides those of `pagepool.errors`; every other one is a finding.
BUILTIN_ERRORS: dict[type[Exception], tuple[str, ...]] = {
    TypeError: (
        r"[Aa]rgument",  # wrong number or name of arguments, wrong class, or None for a required one
        r"^Expected .*, got|^Cannot convert|NoneType",  # the same inside arguments
        r"integer|scalar index|__\w+__|iter\(\)",  # an argument whose own `__index__`, `__len__` or `__iter__` is wrong
        r"unpack|iterable|iteration|not callable",  # no sequences, pairs, triples or functions
        r"unhashable|not supported between",  # a page hash of anything
        r"no default __reduce__",
        r"as a data type",  # an array whose own `dtype` is wrong
        r"what (RunningBatch|(RunningBatch\.)?take_moves|CacheManager\.(fail|lease)|list_claims|hold_stored) returns",
        r"what a refused request leaves|what a look-up finds",
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
    """A behaviour that must not happen; the message has the calls that led to it."""


class World:
    """Live objects and what is done to them. `counts` and `successes` are by entry."""

    def __init__(self, data: bytes, counts: Counter[Entry], successes: Counter[Entry]) -> None:
        self.source = Source(data)
        self.counts = counts
        self.successes = successes
        self.live: dict[type, list[Any]] = {cls: [] for cls in (*public_classes(), np.ndarray)}
        self.lists: list[list[Any]] = []  # may be in use right now
        self.recipes: dict[int, tuple[Any, Any]] = {}  # store and groups of a batch, by its id
        self.tabled: set[int] = set()  # tables that have a batch
        self.focus: Any = None
        self.num_chosen = 1  # rows or tables, of which as many of something else are due
        self.depth = 0
        self.log: list[str] = []
        self.findings: list[str] = []
        self.is_over = False
        self.forbidden = self.source.pick(FORBIDDEN)
        self.spoilt: set[str] = set()  # forbidden actions that were done

    # selection

    def any_live(self) -> Any:
        objects = self.source.pick(list(self.live.values()))
        return self.source.pick(objects) if objects else None

    def one(self, cls: type) -> Any:
        """Return a live object of a class; if there is none, one whose constructor did not run."""
        if not self.live[cls]:
            self.keep(cls.__new__(cls, *CONSTRUCTED_WITH.get(cls.__name__, ())))
        objects = self.live[cls]
        return objects[max(0, self.source.below(2 * len(objects)) - len(objects))]  # mostly the first, for deep states

    def keep(self, value: Any) -> None:
        """Use results as arguments of later calls. The first object of each class stays, since others were made from it.

        A result may be an argument that was given, which interferes when it is asked for its `__class__`.
        """
        if type(value) in (list, tuple) and value:
            self.keep(value[0])
        objects = self.live.get(_core.PageIds if issubclass(type(value), _core.PageIds) else type(value))
        if objects is None:
            return
        if len(objects) < MAX_LIVE:
            objects.append(value)
        else:
            objects[1 + self.source.below(MAX_LIVE - 1)] = value

    def furnish(self) -> None:
        """Make a pool, tables and a batch with some rows, as the façade does."""
        source = self.source
        hashing = source.pick(("siphash128", "siphash128", "sha256", "sha256_cbor"))
        key = bytes(16 if hashing == "siphash128" else 32)
        enable_caching, eviction = source.pick((True, True, True, False)), source.pick(("lru", "adaptive"))
        store = _core.PageStore(source.pick((16, 2, 9, 40)), enable_caching, eviction=eviction)
        if enable_caching:
            self.furnish_tier(store)
        tables = [_core.TableRows(4, columns) for columns in source.pick(((8,), (8, 8), (8, 4), (1,), (70,)))]
        for value in (store, *tables, _core.HashChain(4, key, True, hashing)):
            self.keep(value)
        arrays = tables[0].num_pages_per_row, tables[0].page_table_cpu
        loose, page = _core.LoosePages(), _core.CachePage(3)
        loose.adopt(page)
        if source.below(8) == 0:
            loose.append(loose.ids_of_pages([page]))
            self.keep(page)
        self.keep(loose)
        for value in (_core.CachePage(7), store.page(1), _core.GroupedRows(tables), _core.PageIds([1, 2, 0]), *arrays):
            self.keep(value)
        rules = self.rules(store, len(tables))
        groups = _core.CacheGroups(rules)
        if store.enable_caching and len(tables) == 2 and source.below(4) == 0:
            groups = _core.CacheGroups([rules[0], (_core.PageRules(None, interval=8), 1, 2)], boundaries=(8, 4, 16))
        options = {"max_steps_ahead": source.pick((0, 1, 1, 2)), "caches_computed": source.below(3) == 0, "algorithm": hashing}
        arguments = (store, tables, groups, 32, 4 * store.enable_caching, key, source.pick((0, 0, 1)))
        batch = _core.RunningRows(*arguments, **options)
        if source.below(2):
            batch.show_media([_core.TableRows(batch.stays.size, 4)], np.zeros(batch.stays.size, np.int32), Follower())
        self.note_batch(batch, arguments)
        self.keep(batch)
        context = source.below(2)
        if context:
            _core.EntryJournal(store).start()
            _core.EntryJournal(store).add_context()
        for row in range(source.below(4)):
            num_tokens = min(source.pick((3, 9)), batch.max_num_tokens)
            options = {"num_external_tokens": source.pick((0, 0, 1))}
            request = _core.RowRequest(batch, row, [source.below(2)] * num_tokens, **options)
            with suppress(RequestTooLargeError):  # the pool may be that small
                request.admit(context=context)
        if source.below(4) == 0:
            self.keep(batch.take_moves())
            self.keep(self.live[_core.Moves][0].writes)
        if store.has_tier and source.below(2):
            self.furnish_transfers(store, batch)
        self.furnish_requests(store, groups)

    def furnish_tier(self, store: Any) -> None:
        """Put a tier behind a pool, or have one that may be put there."""
        tier = _core.PageTier(store, self.source.pick((4, 20)), writes_through=self.source.below(2) == 0)
        if self.source.below(4):
            _core.add_tier(store, tier)
            if self.source.below(2):
                _core.link_storage(store, self.source.below(2) == 0)
        self.keep(tier)

    def furnish_transfers(self, store: Any, batch: Any) -> None:
        """Have pages of the first row saved: by the step that computed them, or as they are evicted."""
        _core.take_moves(store)
        if batch.num_computed_tokens[0] and not batch.num_external_tokens[0]:
            batch.release([0])
            store.give_back(store.take(store.num_free_pages))
        moves = _core.take_moves(store)
        if moves.number and self.source.below(2):
            self.keep(_core.end_transfers(store, moves.number))

    def furnish_requests(self, store: Any, groups: Any) -> None:
        """Make two requests beside the rows; one of them holds pages, some of them entered."""
        chain = self.live[_core.HashChain][0]
        chain.extend([self.source.below(2)] * 12)
        requests = [_core.RequestPages(store, groups, 64) for _ in range(2)]
        for request in requests:
            self.recipes[id(request)] = store, groups
        requests[0].allocate(self.source.pick((0, 4, 9)), chain=chain, num_tokens_to_cache=4 * store.enable_caching)
        spans = [_core.TokenSpan(), _core.TokenSpan().of_request(store, groups, chain, 12)]
        for value in (groups, *requests, *spans, _core.PageSessions(store)):
            self.keep(value)
        if self.source.below(4) == 0:
            with suppress(PagePoolError):  # no page may be cached
                self.keep(spans[1].lease(100.0))

    def rules(self, store: Any, num_groups: int) -> list[tuple[Any, int | None, int]]:
        """Return the groups of a batch: full attention alone, or with a window or a chunk; cached if the store caches."""
        window, chunk = self.source.pick(((0, 0), (6, 0), (0, 5)))
        groups = [(_core.PageRules(4, window), 0, 1), (_core.PageRules(8, 0, chunk), 1, 2)]
        return [(rules, group_id if store.enable_caching else None, stride) for rules, group_id, stride in groups[:num_groups]]

    def note_batch(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Record the store and tables of a batch. Two batches that share a table spoil each other."""
        self.recipes[id(batch)] = arguments[0], arguments[2]
        tables = list(arguments[1]) if type(arguments[1]) in (list, tuple, _core.GroupedRows) else []
        if not tables or any(id(table) in self.tabled for table in tables):  # unknown for a hostile iterable
            self.spoilt.add(SHARE)
        self.tabled.update(map(id, tables))

    # actions

    def run(self) -> None:
        """Act as the bytes say, then check what is left."""
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

    def call(self) -> None:
        """Call something with fitting or arbitrary arguments."""
        entry = self.source.pick(MENU)
        if str(entry) in self.forbidden:
            return
        focus = self.one(entry.owner) if entry.owner and entry.kind not in ("construct", "new") else None
        self.focus = focus
        self.call_with(entry, focus, self.arguments(entry))

    def arguments(self, entry: Entry) -> tuple[Any, ...]:
        """Return arguments of the kinds that the parameter names suggest, with one or all arbitrary, or too many or too few."""
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
            self.judge(entry, error)
        else:
            self.successes[entry] += 1
            self.spoilt |= {str(entry)} & SPOILS_BATCHES
            if entry.name in ("__construct__", "__init__") and entry.owner is _core.RunningRows:
                self.note_batch(focus or result, arguments)
            if entry.name in ("__construct__", "__new__") and entry.owner is _core.RequestPages:
                self.recipes[id(result)] = arguments[0], arguments[1]
            if entry.name in ("__construct__", "__new__") and entry.owner is _core.RowRequest:
                self.recipes[id(result)] = self.recipes.get(id(arguments[0]), (None, None))
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
        """Act when a hostile argument is read."""
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

    # findings

    def judge(self, entry: Entry, error: Exception) -> None:
        """Record an error that is not documented."""
        if isinstance(error, PagePoolError | MemoryError | Raised):  # memory is insufficient for huge requests
            return
        if any(re.search(message, str(error)) for message in BUILTIN_ERRORS.get(type(error), ())):
            return
        self.findings.append(f"{entry} ({entry.kind}) raised {error!r}")

    def note_unraisable(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Raised):
            self.findings.append(f"lost: {unraisable.exc_value!r} in {unraisable.object!r}")

    def check(self) -> None:
        """Check the invariants of pools and batches, unless an action may have broken them."""
        for store in self.live[_core.PageStore]:
            self.check_one(lambda store=store: check_store(store), SPOILS_POOLS)
            self.check_one(lambda store=store: _core.check_holders(store, self.requests_of(store)), SPOILS_BATCHES)
        for table in self.live[_core.TableRows]:
            self.check_one(table.check, {OVERWRITE})
        for batch in self.live[_core.RunningRows]:
            if batch.num_tokens is not None and id(batch) in self.recipes:  # forgotten ones may come back as attributes
                store, _ = self.recipes[id(batch)]
                requests = self.requests_of(store)
                spoils = SPOILS_BATCHES | {SHARE}
                self.check_one(lambda args=(store, requests, batch): _core.check_holders(*args), spoils)

    def requests_of(self, store: Any) -> list[Any]:
        """Return the live requests that hold pages of a store."""
        requests = self.live[_core.RequestPages]
        return [request for request in requests if self.recipes.get(id(request), (None,))[0] is store]

    def check_one(self, check: Callable[[], None], spoilers: set[str]) -> None:
        try:
            check()
        except IntegrityError as error:
            if not self.spoilt & spoilers:
                self.findings.append(f"check: {error}")
        except (PagePoolError, MemoryError):
            pass  # a batch whose constructor failed, or a pool too large to be copied


def shown(arguments: tuple[Any, ...]) -> str:
    """Describe arguments by type, and by value if that is informative and runs no code."""
    plain = (int, float, str, bytes, type(None), bool)
    return ", ".join(repr(value) if type(value) in plain else type(value).__name__ for value in arguments)


CONSTRUCTED_WITH: dict[str, tuple[Any, ...]] = {
    "PageStore": (8,),
    "HashChain": (2, bytes(16)),
    "PageRules": (4,),
    "CacheGroups": ([(_core.PageRules(4), 0, 1)],),
    "RequestPages": (_core.PageStore(8), _core.CacheGroups([(_core.PageRules(4), 0, 1)]), 32),
    "PageTier": (_core.PageStore(8), 4),
    "TokenSpan": (),
    "HashedTokens": ([1, 1, 1, 1, 1], 4, bytes(16)),
    "WaitingRequest": ([1, 1, 1, 1, 1, 0], 4, bytes(16)),
    "WaitingLine": (_core.PageStore(8), _core.CacheGroups([(_core.PageRules(4), 0, 1)])),
    "PageSessions": (_core.PageStore(8),),
    "RowRequest": (
        _core.RunningRows(_core.PageStore(8), [_core.TableRows(2, 8)], [(_core.PageRules(4), 0, 1)], 32, 4, bytes(16), 0),
        0,
        [1],
    ),
    "EntryJournal": (_core.PageStore(8),),
    "QueryCounter": (_core.PageStore(8),),
    "PrefixTable": (4,),
    "RequestHashes": (None, _core.HashChain(2, bytes(16))),
    "CachePages": ((),),
}
INTERFERENCES: tuple[Callable[[World], Any], ...] = (
    *(small, small, small, World.call_again, World.call_again, World.call_again),
    *(World.change_list, World.overwrite_array, World.raise_error, leave_garbage, wild, interesting),
)
