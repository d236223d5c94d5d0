"""Arguments that fit, by the names of parameters, so that calls succeed and lead to deep states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz_entries import Entry
from fuzz_source import (
    DTYPES,
    HostileList,
    Lazy,
    World,
    array,
    hostile,
    int32_array,
    ints,
    key,
    key_bytes,
    middle,
    nested,
    pair,
    small,
    wild,
)

from pagepool import _core
from pagepool.errors import PagePoolError
from pagepool.hashing import PageHash, PageHashWithGroupId


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
    "_page_hash": one_of(constant(None), page_hash),
    "anything": one_of(wild, small, page_hash),
    "cached_group_ids": saved("cached_group_ids"),
    "cached_keys": saved("cached_keys"),
    "cached_page_ids": saved("cached_page_ids"),
    "cached_token_ids": saved("cached_token_ids"),
    "chain": live(_core.HashChain),
    "chunk": constant(0, 0, 5),
    "context": constant(0, 0, 1, 2),
    "counter": one_of(constant(None), live(_core.QueryCounter)),
    "counters": saved("counters"),
    "data": constant(b"", b"data", bytes(100)),
    "extend.extra_keys": constant(b"", b"", b"salt"),
    "admit_row.extra_keys": one_of(*[constant(())] * 5, some(pair), hostile(HostileList, [(1, b"x")])),
    "find_hits": one_of(hits_finder, hits_finder, constant(None), wild),
    "enable_caching": constant(True, True, False),
    "first": constant(0, 0, 3),
    "first_id": constant(0, 0, 0, 3),
    "first_place": constant(0, 0, 3),
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
    "is_again": constant(False, True),
    "is_null": constant(False, False, True),
    "is_pool": constant(True, True, True, False),
    "items": ints,
    "key": key,
    "key_bytes": key_bytes,
    "admit_row.num_tokens": constant(None, None, 1, 4, 7),
    "admit_row.row": row_that_is(False),
    "admit_row.token_ids": one_of(tokens, tokens, tokens, ids),
    "enter_held.num_full_pages": constant(0, 1, 2),
    "check_enterable.num_full_pages": constant(0, 1, 2),
    "max_num_new_tokens": one_of(constant(None, None, None), middle),
    "max_num_tokens": constant(32, 32, 7, 2**40),
    "next_free_page": one_of(constant(None, None, None, None), live(_core.CachePage)),
    "num_computed": lambda world: _core.PageIds([world.source.below(3) for _ in range(world.num_chosen)]),
    "num_computed_tokens": one_of(constant(None, None, 0, 3), middle, as_many(middle)),
    "num_hit_tokens": constant(0, 0, 4, 8, 1),
    "num_looked_up": constant(9, 12, 30, 4),
    "num_lookahead_tokens": one_of(constant(0, 0, 0), small, as_many(small)),
    "num_new_tokens": one_of(constant(0, 1, 1), constant(0, 1, 1), as_many(small)),
    "num_pages": middle,
    "num_reserved_pages": constant(0, 0, 0, 3),
    "num_shards": constant(0, 1, 2, 4),
    "num_tokens": one_of(middle, middle, as_many(middle)),
    "options": constant(None, (), ("option",)),
    "page": live(_core.CachePage),
    "page_id": middle,
    "page_ids": one_of(ids, ids, ids, ids_by_group),
    "page_ids_per_req": one_of(as_many(ints), as_many(ids_by_group), nested),
    "page_size": constant(4, 4, 8, 1, None),
    "page_tables": table_lists,
    "pages": some(live(_core.CachePage)),
    "positions": ids,
    "prev_free_page": one_of(constant(None, None, None, None), live(_core.CachePage)),
    "ref_cnt": constant(0, 1, 2),
    "ref_counts": saved("ref_counts"),
    "req_indices": as_many(row),
    "row": row,
    "row_idx": row,
    "result": live(_core.StepResult),
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
    "tuple_of_hits": lambda world: tuple(world.live[_core.PageIds][: world.source.below(3)]),
    "values": ids,
    "window": constant(0, 0, 6),
    "with_entries": constant(True, False),
}
