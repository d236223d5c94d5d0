"""Arguments that fit, by the names of parameters, so that calls succeed and lead to deep states."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from fuzz_entries import Entry
from fuzz_source import (
    HostileList,
    Lazy,
    array,
    hostile,
    int32_array,
    interesting,
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
from pagepool.hashing import PageHash, PageHashWithGroupId

if TYPE_CHECKING:
    from fuzz_world import World


def fitting(entry: Entry, parameter: str) -> Callable[[World], Any]:
    """Return the maker of a parameter's values. The rows of functions and spans are a batch."""
    name = "batch" if parameter == "rows" and entry.owner in (None, _core.TokenSpan) else parameter
    return MAKERS.get(f"{entry.name}.{name}") or MAKERS.get(name, small)


def live(cls: type) -> Callable[[World], Any]:
    return lambda world: world.one(cls)


def one_of(*makers: Callable[[World], Any]) -> Callable[[World], Any]:
    return lambda world: world.source.pick(makers)(world)


def constant(*values: Any) -> Callable[[World], Any]:
    return lambda world: world.source.pick(values)


def some(maker: Callable[[World], Any]) -> Callable[[World], Any]:
    return lambda world: [maker(world) for _ in range(1 + world.source.below(3))]


def rows_that_are(is_admitted: bool) -> Callable[[World], list[int]]:
    """Return the admitted or free rows of the called batch; any rows for another object."""

    def list_rows(world: World) -> list[int]:
        flags = getattr(world.focus, "is_admitted", None)
        chosen = [] if flags is None else np.flatnonzero(flags == is_admitted).tolist()
        return chosen or [row(world)]

    return list_rows


def row_that_is(is_admitted: bool) -> Callable[[World], int]:
    return lambda world: world.source.pick(rows_that_are(is_admitted)(world))


def row_that_waits(world: World) -> int:
    """Return a row of the called batch that waits for tokens from elsewhere; any admitted row if none does."""
    nums = getattr(world.focus, "num_external_tokens", None)
    waiting = [] if nums is None else np.flatnonzero(nums).tolist()
    return world.source.pick(waiting or rows_that_are(True)(world))


def admitted_rows(world: World) -> Any:
    """Return some of the running rows."""
    chosen = rows_that_are(True)(world)[world.source.pick((0, 0, 1)) :]
    world.num_chosen = len(chosen)
    return world.source.pick((list, list, np.array))(chosen)


def as_many(maker: Callable[[World], Any]) -> Callable[[World], Any]:
    """Return a list as long as the last chosen one."""
    return lambda world: [maker(world) for _ in range(world.num_chosen)]


def step_to_settle(world: World) -> Any:
    """Return a step, whose rows count for the next lists."""
    step = world.one(_core.StepResult)
    world.num_chosen = len(step)
    return step


def stored_keys(world: World) -> Any:
    """Return the key of a page in storage."""
    return np.array([[world.source.below(3), 0]], np.uint64)


def free_row(world: World) -> int:
    """Return a free row of the first batch."""
    batches = [batch for batch in world.live[_core.RunningRows] if batch.is_admitted is not None]
    free = np.flatnonzero(~batches[0].is_admitted).tolist() if batches else []
    return world.source.pick(free or [row(world)])


def hits_of_request(world: World) -> tuple[Any, ...]:
    """Return the actual hits of a live chain for the called request, or arbitrary ones."""
    store, groups = world.recipes.get(id(world.focus), (None, ()))
    if store is None or world.source.below(4) == 0:
        return tuple([world.one(_core.PageIds) for _ in range(world.source.below(3))])
    return found_hits(store, groups, world.one(_core.HashChain))


def found_hits(store: Any, groups: Any, chain: Any) -> tuple[Any, ...]:
    """Return what a look-up finds in three hash pages."""
    hits: tuple[Any, ...] = _core.find_prefix(store, groups, chain, 3 * chain.page_size + 1)[0]
    return hits


def held_or_hit(world: World) -> Any:
    """Return the pages of a request, or what a look-up of a live chain finds in a live store."""
    if world.source.below(2):
        return world.one(_core.RequestPages).get_page_ids()
    return found_hits(world.one(_core.PageStore), world.one(_core.CacheGroups), world.one(_core.HashChain))


def held_or_hit_ids(world: World) -> Any:
    """Return the pages of the first group of a request, or those that a look-up finds."""
    groups = held_or_hit(world)
    return groups[0] if groups else world.one(_core.PageIds)


def counter_of_row(world: World) -> Any:
    """Return a counter of the called request's pool, if it is known."""
    store, _ = world.recipes.get(id(world.focus), (None, None))
    return None if store is None else _core.QueryCounter(store)


def some_requests(world: World) -> list[Any]:
    return world.live[_core.RequestPages][: world.source.below(4)]


def groups_of_model(world: World) -> list[tuple[Any, int | None, int]]:
    strides = world.source.pick(((1,), (1, 2), (2, 1), ()))
    return [(world.one(_core.PageRules), world.source.pick((i, i, i, None)), stride) for i, stride in enumerate(strides)]


def tables_of_rows(world: World) -> Any:
    tables = table_lists(world)
    world.num_chosen = len(tables)
    return tables


def tokens(world: World) -> Any:
    """Return a prompt that begins like others."""
    first, num = world.source.below(3), 1 + world.source.below(33)
    return world.source.pick((list, np.array))([first] * (num - 1) + [world.source.below(3)])


def page_hash(world: World) -> PageHashWithGroupId:
    if world.source.below(8) == 0:
        return PageHashWithGroupId(PageHash(wild(world), wild(world)), wild(world))
    return PageHashWithGroupId(PageHash(key(world), world.source.pick(((), (1, 2)))), small(world))


def ids_by_group(world: World) -> list[Any]:
    """A list of ids for each table of the first group of tables."""
    grouped = world.live[_core.GroupedRows]
    return [ints(world) for _ in (grouped[0].page_tables if grouped else ())]


class Follower:
    """Media that follow rows, and do nothing."""

    def __getitem__(self, row: int) -> None:
        """Return no medium."""

    def collect(self, *_: Any) -> None:
        """Follow a call."""

    __enter__ = __exit__ = watch = exchange = fork = lose = collect


def num_rows_of_focus(world: World) -> int:
    """Return the rows of the called batch; some number for another object."""
    stays = getattr(world.focus, "stays", None)
    return 4 if stays is None else int(stays.size)


ids = one_of(ints, ints, int32_array, live(_core.PageIds), array)
row = constant(0, 1, 2, 3, 0, 1, 2, 4)
rows = one_of(some(row), some(row), int32_array, constant([0], [1], [2, 0], [0, 1, 2, 3]))
table_lists = one_of(lambda world: list(world.live[_core.TableRows][:2]), some(live(_core.TableRows)))
rules_by_group = as_many(
    lambda world: (world.one(_core.PageRules), world.source.pick((0, 0, None)), world.source.pick((1, 1, 2)))
)

PAYLOADS = [
    b"\x92\xcb" + bytes(8) + b"\x91" + event
    for event in (
        b"\x95\xabBlockStored\x93\x01\x02\x03\xc0\x90\x04",
        b"\x96\xabBlockStored\x91\x03\x02\x91\xcd\x01\x02\x04\xc0\xa3CPU",
        b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x02\xa6medium\xa3GPU",
        b"\x91\xb0AllBlocksCleared",
    )
]


def garbled(world: World) -> bytes:
    """Return a batch of events with one byte changed, cut anywhere."""
    payload = bytearray(world.source.pick(PAYLOADS))
    payload[world.source.below(len(payload))] = world.source.below(256)
    return bytes(payload[: world.source.below(2 * len(payload))])


def found_prefix(world: World) -> Any:
    """Return what a look-up finds in an empty pool."""
    store, chain = _core.PageStore(8, True), _core.HashChain(4, bytes(16))
    return _core.load_prefix(store, _core.CacheGroups([(_core.PageRules(4), 0, 1)]), chain, 8)


FITTING: dict[str, Callable[[World], Any]] = {
    "_page_hash": one_of(constant(None), page_hash),
    "cache_hash.page_hash": page_hash,
    "admit.shard probe.shard": constant(*[None] * 7, 0),
    "anything": one_of(wild, small, page_hash),
    "batch": live(_core.RunningRows),
    "cache_groups of_request.groups": live(_core.CacheGroups),
    "find_prefix.groups find_misses.groups load_prefix.groups list_absent.groups": live(_core.CacheGroups),
    "begin_fills.banks": constant([0], [0, 0], [0, 1]),
    "begin_fills.keys hold_stored.keys": stored_keys,
    "are_loading.hits": lambda world: (live(_core.PageIds)(world),),
    "list_absent.keys": one_of(constant(None), stored_keys),
    "begin_fills.group_ids list_absent.group_ids hold_stored.group_ids": constant([0], [0], [0, 1]),
    "end_fills.number": constant(1, 2),
    "resize_banks.sizes": constant([0], [0], [0], [0], [1], [1, 1], [5], [8], [9], [4, 3]),
    "are_final only_unheld": constant(False, True),
    "end_fills.failed": constant((), [0]),
    "chain": live(_core.HashChain),
    "begin.found": found_prefix,
    "algorithm": constant("siphash128", "siphash128", "sha256", "sha256_cbor", "md5"),
    "chunk": constant(0, 0, 5),
    "context fork.row": constant(0, 0, 1, 2),
    "data": constant(b"", b"data", bytes(100)),
    "depth": constant(1, 1, 1, 2),
    "draft_token_ids no_tables": constant(None),
    "input_fields": lambda _: [(name, 0, [np.zeros(8, np.int32)]) for name in ("slots", "token_ids", "starts")],
    "input_size": constant(8, 8, 8, 7),
    "padding": constant(-1, 0),
    "fill.step": one_of(constant(None), constant(None), live(_core.StepResult)),
    "plan.step step.step admit.step": one_of(constant(None), constant(None), live(_core.StepResult)),
    "settle.step": step_to_settle,
    "settle.token_ids": one_of(as_many(small), as_many(small), constant(None, None, [1], [1, 2])),
    "settle.failed": constant(False, False, True),
    "commit_external.is_last": constant(True, True, False),
    "commit_external.row fail_external.row": row_that_waits,
    "settle.stop_token_ids": one_of(constant(None, None, [1]), int32_array, array),
    "settle.max_num_tokens": one_of(constant(None, None, 9), as_many(small)),
    "counts": one_of(constant(None, None, 0, [1], [1, 1]), as_many(constant(1))),
    "num_drafts": one_of(constant(0, 0, 1), as_many(small)),
    "fill.rows": constant([], [], [0], None),
    "fill.starts": constant([], [], [0], None),
    "fill.stops": constant([], [], [1], None),
    "fill.num_tokens fill.num_reqs": constant(None, None, 8),
    "eviction": constant("lru", "adaptive", "adaptive", "fifo"),
    "extend.extra_keys": constant(b"", b"", b"salt"),
    "admit.context": constant(0, 0, 0, 0, 1),
    "admit.counter": one_of(constant(None), counter_of_row, counter_of_row, live(_core.QueryCounter)),
    "admit.extra_keys probe.extra_keys": one_of(
        *[constant(())] * 5, some(pair), hostile(HostileList, [(1, b"x"), (None, b"y")])
    ),
    "first first_place": constant(0, 0, 3),
    "first_ids next_ids prev_ids values": ids,
    "first_token fork.num_computed_tokens": constant(0, 0, 4),
    "flag": constant(True, True, False),
    "group start": constant(0, 0, 0, 1),
    "num_external_tokens": constant(0, 0, 1, 2),
    "device_table": one_of(live(np.ndarray), array),
    "lists_of.groups": lambda world: tuple(some(live(_core.PageIds))(world)),
    "find_pages.groups": constant([0], [0, 1], (1,)),
    "free_row": free_row,
    "groups_of_model": groups_of_model,
    "of_request.held": one_of(constant(None), live(_core.RequestPages)),
    "held target": live(_core.RequestPages),
    "interval": constant(0, 0, 0, 4),
    "lease_pages.page_ids": one_of(held_or_hit_ids, ids),
    "find_prefix.ids find_misses.ids load_prefix.ids": constant((0, None), (0, None), (3, 9)),
    "num_tier_pages": constant(4, 12),
    "tier": live(_core.PageTier),
    "end_external.num_tokens commit_external.num_tokens num_valid_tokens ref_cnt": constant(0, 1, 2),
    "end_transfers.number": constant(1, 1, 2, 3),
    "failed": live(_core.FailedLoads),
    "failed_loads failed_saves": constant((), (), [0]),
    "targets": constant([1], [2], [3], [1, 2], [0]),
    "extend.seconds lease.seconds": constant(100.0, 100.0, 100.0, 1e300, 0.0, "1"),
    "seconds": constant(None, 1.0, 100.0, 1e300, 0.0, math.inf, "1"),
    "max_num_leased": constant([20], [20], [2], [0], [2, 2]),
    "term": constant(0, 0, 1, 18, 19, 20),
    "session_id": constant(None, "a", "a", "b", 7),
    "tenant": constant(None, "x", "x", "y", 7),
    "shares": constant({}, {"x": 0.3}, {"x": 0.1, "y": 0.5}, {"y": 2.0}, 7),
    "session hold.number release.number": constant(0, 0, 1, 2),
    "stop_token": constant(None, None, 8),
    "groups_of_rows": rules_by_group,
    "hash_page_size": constant(4, 4, 2, 0),
    "hits": one_of(constant((), ()), hits_of_request, hits_of_request),
    "num_reserved": constant(0, 0, 2),
    "holder": one_of(live(_core.RequestPages), live(_core.RunningRows), live(_core.TableRows)),
    "ids": live(_core.PageIds),
    "is_null": constant(False, False, True),
    "items": ints,
    "key": key,
    "key_bytes": key_bytes,
    "names": constant(None, "pages", "slots notes"),
    "name_banks.names": constant(["kv"], ["kv", "states"]),
    "max_num_new_tokens": one_of(constant(None, None, None), middle),
    "max_num_tokens": constant(32, 32, 7, 2**40),
    "next_free_page prev_free_page": one_of(constant(None, None, None, None), live(_core.CachePage)),
    "num_computed_tokens": one_of(middle, middle, interesting),
    "give_back.num_computed_tokens": one_of(constant(None, None, 0, 3), middle),
    "source copy_rows.target": constant(*[np.zeros((8, 6), np.uint8) for _ in range(4)], np.zeros((8, 4), np.uint8)),
    "source_ids target_ids": one_of(constant(np.array([0, 7, 3]), np.array([1, 2, 2])), ids),
    "num_threads": constant(1, 2, 2),
    "num_lookahead_tokens": one_of(constant(0, 0, 0), small, as_many(small)),
    "num_pages needs_nothing.num_slots page_id": middle,
    "num_reserved_pages start_id": constant(0, 0, 0, 3),
    "num_slots": constant(None, None, 1, 4, 7),
    "num_tokens": one_of(middle, middle, middle, interesting),
    "plan.num_tokens": one_of(constant(0, 1, 1), constant(0, 1, 1), as_many(small)),
    "trim.num_tokens": one_of(middle, middle, as_many(middle)),
    "resume_at": constant(None, None, (), [4], [4, 40]),
    "options": constant(None, (), ("option",)),
    "find.hashes": one_of(live(_core.HashChain), ids, constant([1, 2], [b"12345678"], np.arange(1, 4))),
    "list_blocks.group": constant(0, 0, 1),
    "medium": constant("GPU", "GPU", "CPU"),
    "payload": one_of(constant(*PAYLOADS), constant(*PAYLOADS), garbled),
    "worker": constant(0, 0, 1, 70),
    "lost": constant((0, 0, 0), (1, 1, 16), (0, 0)),
    "pack_dirty_lines.places": lambda world: np.array([[0, 1 << 20]] * world.num_chosen, np.int64).reshape(-1, 2),
    "pack_dirty_lines.numbers": lambda _: np.zeros(16, np.int64),
    "pack_dirty_lines.lines": lambda world: np.zeros((16, world.source.pick((64, 64, 32, 48))), np.int32),
    "page": live(_core.CachePage),
    "page_ids": one_of(ids, ids, ids, ids_by_group),
    "page_ids_per_req": one_of(as_many(ints), as_many(ids_by_group), nested),
    "page_size": constant(4, 4, 8, 1, None),
    "page_tables": table_lists,
    "show_media.tables": lambda world: [_core.TableRows(num_rows_of_focus(world), 4)],
    "encoder_lens": lambda world: np.zeros(num_rows_of_focus(world), np.int32),
    "media": lambda world: Follower(),
    "pages": some(live(_core.CachePage)),
    "prompt": one_of(tokens, tokens, tokens, ids),
    "token_ids __construct__.token_ids": one_of(tokens, tokens, live(_core.WaitingRequest)),
    "admit.request correct.request count_hits.request count_loads.request enter.request": live(_core.WaitingRequest),
    "leave.request prefetch.request set_away.request set_misfit.request": live(_core.WaitingRequest),
    "enter.num_prompt": constant(None, None, 3),
    "enter.priority": constant(0, 0, 1, -1),
    "enter.shard": constant(None, None, 0),
    "admit.num_hits": constant(0, 0, 4),
    "choose.step list_next.step": constant(None, None, 1),
    "list_next.n": constant(0, 1, 9),
    "req_indices": as_many(row),
    "requests": one_of(constant([]), some_requests, some_requests, Lazy),
    "row row_idx": row,
    "result": live(_core.StepResult),
    "rows": one_of(admitted_rows, admitted_rows, admitted_rows, rows),
    "slot_mapping.rows": lambda world: as_many(row)(world),
    "slot_mapping.positions": lambda world: as_many(middle)(world),
    "shard": constant(None, None, None, 0, 1),
    "src": row_that_is(True),
    "stop": constant(0, 1, 2, 3),
    "stop_id": constant(None, None, 9),
    "store": live(_core.PageStore),
    "stride": constant(1, 1, 1, 2),
    "tables": lambda world: tuple(tables_of_rows(world)),
    "tgt": row_that_is(False),
    "token_ids": one_of(as_many(small), as_many(small), as_many(small), ids),
    "tokens": one_of(constant([1, 2, 3, 4], [0] * 8, [1, 1]), tokens, ids),
    "tuple_of_hits": lambda world: tuple(world.live[_core.PageIds][: world.source.below(3)]),
    "window": constant(0, 0, 6),
    "with_entries": constant(True, False),
}
"""The makers of values, by the names of parameters, or of a function and its parameter."""

MAKERS = {name: maker for names, maker in FITTING.items() for name in names.split()}
