"""A common interface to a batch of rows: over the oracle, and as a `RunningBatch`.

The first does row by row, in plain Python and with a plain NumPy table, what the batch does in one native call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from oracle import PREEMPTED, OracleManager, PagesByGroup
from oracle_expected import SHARED, term_of_seconds
from oracle_kinds import Mamba, cdiv
from oracle_refusals import find_refusal
from oracle_tier import Taken
from oracle_writes import OracleWrites
from pool_ranges import Shard
from settings import Setting
from twin_engine import WITH_LOGPROBS, Request
from twins import (
    Side,
    firsts_of,
    free_ids_of,
    free_ids_of_twin,
    owners_of,
    pools_of,
    pools_of_twin,
    ref_counts_of,
    stats_of_twin,
    taken_of,
    tenants_of,
    tenants_of_twin,
    terms_of,
    terms_of_twin,
)

import pagepool
from pagepool._core import pack_dirty_segments

Amounts = int | Sequence[int]


class Grown(NamedTuple):
    """A `StepResult` as lists: rows with room, and the new pages."""

    num_grown: int
    page_ids: list[int]
    rows: list[int]
    groups: list[int]
    refusal: pagepool.Refusal | None = None


class Growth(NamedTuple):
    """The changes of a call to a row, for undoing: `num_tokens` only if the call appended one."""

    row: int
    admission: int
    num_new: int
    num_computed: int
    num_tokens: int | None
    new_pages: PagesByGroup
    num_planned: int  # before the call


class PoolState(NamedTuple):
    """The observable state of a pool."""

    ref_counts: list[int]  # of all pages but the null page, whose count is not maintained, one pool behind another
    free_page_ids: list[list[int]]  # by pool: front of the queue first
    pools: dict[str, tuple[int, ...]]  # see `State`
    prefix_entries: list[tuple[int, tuple[int, ...]]]  # (group, pages of one content in the order they were entered)
    hashes: dict[int, int]  # by cached page; empty if a side has none
    stats: pagepool.PagePoolStats
    terms: dict[int, int]  # of pages with any
    owners: dict[int, int]  # see `State`
    tenants: dict[int, int]  # the same


class BatchState(NamedTuple):
    """The observable state of rows, their tables and their pool."""

    is_admitted: list[bool]
    num_tokens: list[int]
    num_computed_tokens: list[int]
    num_cached_tokens: list[int]
    page_ids: list[PagesByGroup]  # by row, by group
    tables: list[list[list[int]]]  # by group
    num_pages_per_row: list[list[int]]  # by group
    pool: PoolState
    request_page_ids: list[PagesByGroup]  # of requests that share the manager, by queried request
    refusal: pagepool.Refusal | None  # of the last admission


def package_pool_state(pools: pagepool.PagePool | Mapping[str, pagepool.PagePool], with_hashes: bool) -> PoolState:
    """Return the state of the package's pool, or of several over one store."""
    pools = {"kv": pools} if isinstance(pools, pagepool.PagePool) else pools
    first = next(iter(pools.values()))
    pages_by_key, store = dict(first.cached_page_hash_to_page), first.store
    hashes = {page: key.page_hash.hash_value for key, pages in pages_by_key.items() for page in pages}
    return PoolState(
        ref_counts_of(pools),
        free_ids_of(pools),
        pools_of(pools),
        sorted((key.group_id, tuple(pages)) for key, pages in pages_by_key.items()),
        hashes if with_hashes else {},
        pagepool.PagePoolStats(**store.counters),
        terms_of(store),
        owners_of(store),
        tenants_of(store),
    )


def oracle_pool_state(manager: OracleManager) -> PoolState:
    """Return the state of the oracle's pool."""
    pool = manager.page_pool
    stats = stats_of_twin(pool)
    id_of = manager.pools.id_of
    entries = sorted((i, tuple(id_of(page, i) for page in pages)) for (_, i), pages in pool.index.items())
    return PoolState(
        pool.ref_counts[1:],
        free_ids_of_twin(manager),
        pools_of_twin(manager.page_pool, manager.pools, manager.leases),
        entries,
        {},
        stats,
        terms_of_twin(pool),
        firsts_of(pool.expected.owner, SHARED),
        tenants_of_twin(pool),
    )


# --- common parts -------------------------------------------------------------------------------------------


class Rows(Side):
    """Rows beside requests of the same manager. Calls are those of `RunningBatch`; results are plain lists."""

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self.neighbours: dict[str, Request] = {}

    def start_neighbour(self, request_id: str, token_ids: list[int], **attributes: Any) -> int | None:
        """Run a request through the manager; return the tokens that it hit, None if it does not fit."""
        request = Request(request_id, list(token_ids), **attributes)
        hits, num_hit_tokens = self.manager.get_computed_pages(request)
        pages = self.manager.allocate_slots(request, len(token_ids) - num_hit_tokens, num_hit_tokens, hits)
        self.manager.free_page_hashes(request)
        if pages is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self.neighbours[request_id] = request
        return num_hit_tokens

    def finish_neighbour(self, request_id: str) -> None:
        self.manager.free(self.neighbours.pop(request_id))

    def go_back(self, request_id: str) -> int | None:
        """Let a neighbour have no more computed tokens than the loads that failed have left right; None: all of them."""
        request = self.neighbours[request_id]
        num_tokens = self.find_wrong_token(request)
        request.num_computed_tokens = request.num_computed_tokens if num_tokens is None else num_tokens
        return num_tokens

    def expect_neighbour(self, request_id: str, *span: int | None, seconds: Any) -> int:
        return self.manager.expect(self.neighbours[request_id], *span, seconds=seconds)

    def expect_prompt(self, token_ids: list[int], attributes: dict[str, Any], seconds: Any) -> int:
        """Say when what a request would hit is wanted, which holds nothing."""
        request = Request("waits", token_ids, **attributes)
        num_pages = self.manager.expect(request, seconds=seconds)
        self.manager.free_page_hashes(request)
        return num_pages


class OracleRows(Rows):
    """Rows over the oracle: each is a request and a line of a table. What a policy sees comes in the order of a batch."""

    manager: OracleManager

    def __init__(self, manager: OracleManager, setting: Setting, num_rows: int) -> None:
        super().__init__(manager)
        self.setting = setting
        self.requests: list[Any] = [None] * num_rows  # a Request, or None for a free row
        self.num_hits = [0] * num_rows
        self.nums_external = [0] * num_rows  # tokens that come from elsewhere
        self.admissions = [0] * num_rows  # increases with each admission and each move
        self.growths: list[list[Growth]] = []  # of calls that can be undone
        self.shards: list[int | None] = [None] * num_rows
        widths = [cdiv(setting.max_model_len, group.page_size) for group in setting.groups]
        self.tables = [np.zeros((num_rows, width), dtype=np.int32) for width in widths]
        self.refusal: pagepool.Refusal | None = None
        self._numbers = itertools.count()
        manager.states.divide(manager.pools.shard_of_hint(0, setting.data_parallel_size))
        self.writes = OracleWrites(manager, setting.writes == "anywhere", setting.max_steps_ahead)
        manager.writes = self.writes

    def take_moves(self) -> Taken:
        return super().take_moves()._replace(writes=self.writes.take(self.requests))

    # admission and growth

    def admit(
        self,
        row: int,
        token_ids: list[int],
        *,
        num_tokens: int | None = None,
        max_num_new_tokens: int | None = None,
        dp_shard: int | None = None,
        num_reserved_pages: int = 0,
        look_up: bool = True,
        is_preempted: bool = False,
        ends_at_checkpoint: bool = False,
        num_external_tokens: int = 0,
        resume_at: Sequence[int] = (),
        num_lookahead_tokens: int = 0,
        reserve: str | None = None,
        **attributes: Any,
    ) -> int | None:
        self.refusal = None
        request = Request(f"row{next(self._numbers)}", list(token_ids), **attributes)
        request.sampling_params = None if look_up else WITH_LOGPROBS
        request.resume_at = resume_at
        request.status = PREEMPTED if is_preempted else request.status
        options = {"num_reserved_pages": num_reserved_pages, **self._placement(dp_shard)}
        hits, num_hits = self.manager.get_computed_pages(request, **options)
        shard = self.manager.pools.shard_of_hint(dp_shard, self.setting.data_parallel_size)
        is_short = request.request_id in self.manager.short
        if is_short:
            hits, num_hits = self.manager.find_reachable(request, shard)
        num_computed = max(num_hits, len(token_ids) if num_tokens is None else num_tokens)
        if max_num_new_tokens is not None:
            num_computed = min(num_computed, num_hits + max_num_new_tokens)
        num_external = min(num_external_tokens, len(token_ids) - 1 - num_hits)
        if self.manager.windows is not None:
            self.manager.windows.external_ends[request.request_id] = num_hits + num_external if num_external else 0
            self.manager.windows.begin(request)
        if ends_at_checkpoint and self.manager.states.interval:
            ends = (end for end in range(num_computed, num_hits, -1) if self.manager.states.is_checkpoint(request, end))
            num_computed = next(ends, num_computed)
        num_computed = num_hits + num_external if num_external else num_computed
        num_slots = len(token_ids) if reserve else num_computed
        num_slots = min(num_slots + num_lookahead_tokens, self.setting.max_model_len)
        num_planned = num_computed if reserve and num_computed < len(token_ids) else num_slots  # drafts follow the prompt
        self.manager.states.require_behind(request, num_hits, num_computed, num_planned - num_computed)
        self.manager.require_fit(request, num_slots, hits, shard)
        num_missing = self.manager._num_missing_pages(request, num_slots, hits)
        number = None if shard is None else dp_shard % self.setting.data_parallel_size
        refusal = find_refusal(self.manager, num_missing, hits, shard, number, num_reserved_pages, num_hits)
        if is_short or self._is_shard_short(hits, num_slots, dp_shard):
            self.refusal = refusal
            return None
        options |= {"num_lookahead_tokens": num_planned - num_computed, "num_reserved_slots": num_slots}
        if num_external:
            options |= {"num_external_computed_tokens": num_external, "delay_cache_pages": True}
        num_new = num_computed - num_hits - num_external
        options["num_free_rows"] = self._count_others_without_state(row)
        pages = self.manager.allocate_slots(request, num_new, num_hits, hits, **options, may_add_nothing=True)
        if pages is None:
            self.refusal = refusal
            return None
        request.num_computed_tokens = num_computed - num_external
        self.requests[row], self.num_hits[row], self.shards[row] = request, num_hits, dp_shard
        self.nums_external[row] = num_external
        self.admissions[row] = next(self._numbers)
        if self.writes.max_steps_ahead and not num_external:
            num_computed = num_planned if num_computed == len(token_ids) else num_computed
            self.writes.num_planned[request.request_id] = num_computed
        self.writes.plan(request, num_computed, self._shard_of(row), self._count_others_without_state(row), num_external > 0)
        self._show(row)
        return num_hits

    def probe(self, row: int, token_ids: list[int], dp_shard: int | None = None, **attributes: Any) -> int:
        if self.requests[row] is not None:
            raise ValueError("the row is admitted")
        request = Request(f"probe{next(self._numbers)}", list(token_ids), **attributes)
        return self.manager.count_hits(request, dp_shard, self.setting.data_parallel_size)

    def grow(self, rows: list[int], num_new_tokens: Amounts = 1, num_lookahead_tokens: Amounts = 0) -> Grown:
        return self._grow(rows, num_new_tokens, num_lookahead_tokens, [[] for _ in rows])

    def step(self, rows: list[int], token_ids: list[int]) -> Grown:
        return self._grow(rows, 1, 0, [[token_id] for token_id in token_ids])

    def _grow(self, rows: list[int], num_new_tokens: Amounts, num_ahead_tokens: Amounts, appended: list[list[int]]) -> Grown:
        """Grow rows in turn, each with the tokens that are appended to it first, until one has no room."""
        self.require_running(rows)
        news, aheads = (by_row(amounts, len(rows)) for amounts in (num_new_tokens, num_ahead_tokens))
        for row, num_new, num_ahead, token_ids in zip(rows, news, aheads, appended, strict=True):
            request = self.requests[row]
            self.require_no_copies([row])
            self.require_no_writes([row])
            if token_ids and request.num_computed_tokens < request.num_tokens:
                raise ValueError("a token behind others that are not computed")
            if num_ahead:
                self.manager.states.require_behind(request, 0, request.num_computed_tokens + num_new, num_ahead)
        for row, num_new, num_ahead in zip(rows, news, aheads, strict=True):
            self.require_fit(row, num_new + num_ahead)
        grown = Grown(0, [], [], [])
        self.growths.append([])
        with self.manager.entering_later():
            for row, num_new, num_ahead, token_ids in zip(rows, news, aheads, appended, strict=True):
                self.requests[row].all_token_ids += token_ids
                if not self._grow_row(row, num_new, num_ahead, grown, bool(token_ids)):
                    grown = grown._replace(refusal=self._explain(row, num_new + num_ahead))
                    self._forget_last_tokens(row, len(token_ids))
                    break
                num_tokens = self.requests[row].num_tokens if token_ids else None
                self.growths[-1][-1] = self.growths[-1][-1]._replace(num_tokens=num_tokens)
                grown = grown._replace(num_grown=grown.num_grown + 1)
        return grown

    def _explain(self, row: int, num_tokens: int) -> pagepool.Refusal | None:
        """Say what is short for slots for that many tokens more."""
        request, no_pages = self.requests[row], self.manager._no_pages()
        num_slots = min(request.num_computed_tokens + num_tokens, self.setting.max_model_len)
        num_missing = self.manager._num_missing_pages(request, num_slots, no_pages)
        shard, size = self._shard_of(row), self.setting.data_parallel_size
        number = None if shard is None else self.shards[row] % size
        return find_refusal(self.manager, num_missing, no_pages, shard, number, is_growth=True)

    def require_fit(self, row: int, num_tokens: int) -> None:
        """Refuse a call for a row that would hold more pages than there are, with slots for that many tokens more."""
        request = self.requests[row]
        num_slots = min(request.num_computed_tokens + num_tokens, self.setting.max_model_len)
        self.manager.require_fit(request, num_slots, self.manager._no_pages(), self._shard_of(row))

    def require_no_copies(self, rows: list[int]) -> None:
        """Refuse a call for rows whose pages are in a copy that is due."""
        for row in rows:
            self.manager.states.copies.require_none(self.manager.held.get(self.requests[row].request_id, ()))

    def require_no_writes(self, rows: list[int]) -> None:
        """Refuse a call for rows whose states are to be written by a step that was not run."""
        for row in rows:
            self.writes.require_none(self.requests[row])

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        for row, token_id in zip(rows, token_ids, strict=True):
            self.requests[row].all_token_ids.append(token_id)

    def _grow_row(self, row: int, num_new: int, num_ahead: int, grown: Grown, is_step: bool) -> bool:
        request, held = self.requests[row], self.get_page_ids(row)
        if num_new or self.writes.max_steps_ahead:
            self.writes.settle(request, request.num_computed_tokens + num_new, self._shard_of(row))
        num_planned = self.writes.num_planned.get(request.request_id, 0)
        new_pages = self.make_room(row, num_new, num_ahead)
        self._show(row)
        if new_pages is None:
            return False
        if self.writes.max_steps_ahead and not is_step:
            num_slots = request.num_computed_tokens + num_new
            if num_slots == request.num_tokens:  # lookahead inside a prompt is room alone
                num_slots = min(num_slots + num_ahead, self.setting.max_model_len)
            self.writes.num_planned[request.request_id] = max(num_planned, num_slots)
        request.num_computed_tokens += num_new
        num_computed, pages_by_group = request.num_computed_tokens, self._added_pages(held, new_pages)
        self.growths[-1].append(Growth(row, self.admissions[row], num_new, num_computed, None, pages_by_group, num_planned))
        for group_id, page_ids in enumerate(pages_by_group):
            grown.page_ids.extend(self.manager.pools.id_of(page_id, group_id) for page_id in page_ids)
            grown.rows.extend([row] * len(page_ids))
            grown.groups.extend([group_id] * len(page_ids))
        return True

    def _added_pages(self, held: PagesByGroup, new_pages: PagesByGroup) -> PagesByGroup:
        """Return the pages at new places: the working page that a state gets for its checkpoint is not."""
        groups = zip(self.setting.groups, held, new_pages, strict=True)
        return tuple([] if group.kind == "mamba" and pages else new for group, pages, new in groups)

    def make_room(self, row: int, num_new: int, num_ahead: int) -> PagesByGroup | None:
        """Allocate for a row that grows."""
        request = self.requests[row]
        if num_new:
            self.manager.enter_known(request)
        options = self._placement(self.shards[row]) | {"num_lookahead_tokens": num_ahead, "may_add_nothing": True}
        options["num_free_rows"] = self._count_others_without_state(row)
        return self.manager.allocate_slots(request, num_new, **options)

    def _count_others_without_state(self, row: int) -> int:
        """Count the other rows that are free, or start over."""
        states = [i for i, kind in enumerate(self.manager.kinds) if isinstance(kind, Mamba)][:1]
        others = self.requests[:row] + self.requests[row + 1 :]
        held = [self.manager.get_page_ids(request.request_id) for request in others if request is not None]
        return others.count(None) + sum(not pages[i] for pages in held for i in states)

    def _shard_of(self, row: int) -> range | Shard | None:
        return self.manager.pools.shard_of_hint(self.shards[row], self.setting.data_parallel_size)

    def _forget_last_tokens(self, row: int, num_tokens: int) -> None:
        """Remove tokens that the manager may have hashed for a failed allocation."""
        request = self.requests[row]
        if num_tokens:
            self.manager.free_page_hashes(request)
            self.requests[row] = replace(request, all_token_ids=request.all_token_ids[:-num_tokens])

    def _placement(self, shard: int | None) -> dict[str, Any]:
        if shard is None:
            return {}
        return {"dp_shard_hint": shard, "data_parallel_size": self.setting.data_parallel_size}

    def _is_shard_short(self, hits: PagesByGroup, num_tokens: int, dp_shard: int | None) -> bool:
        """Whether the shard lacks pages for an admission. A manager would move the hits to the end of the queue."""
        shard = self.manager.pools.shard_of_hint(dp_shard, self.setting.data_parallel_size)
        if shard is None:
            return False
        held = {page for page_ids in hits for page in page_ids}
        free = set(self.manager.page_pool.free_page_ids())
        groups = list(zip(self.setting.groups, hits, self.manager.pools.of_group, strict=True))
        are_adopted = all(ids and ids[-1] in free for group, ids, _ in groups if group.kind == "mamba")
        nums_missing = [0] * len(self.manager.pools.ranges)
        for group, ids, pool in groups:
            is_state = group.kind == "mamba"
            nums_missing[pool] += not are_adopted if is_state else cdiv(num_tokens, group.page_size) - len(ids)
        parts = [self.manager.pools.part_of(shard, pool) for pool in range(len(nums_missing))]
        nums_free = [sum(page in free and page not in held for page in part) for part in parts]
        return any(num_missing > num_free for num_missing, num_free in zip(nums_missing, nums_free, strict=True))

    # tokens from elsewhere

    def list_external(self) -> list[int]:
        return list(self.nums_external)

    def require_running(self, rows: list[int]) -> None:
        """Refuse a call for rows that are pending."""
        if any(self.nums_external[row] for row in rows):
            raise ValueError("the row waits for tokens from elsewhere")

    def require_waiting(self, row: int, num_tokens: int, needs_all: bool) -> None:
        """Refuse to end what no row waits for."""
        num_external = self.nums_external[row]
        if num_external:
            self.require_no_copies([row])
            self.require_no_writes([row])
        if not num_external or num_tokens > num_external or (needs_all and num_tokens < num_external):
            raise ValueError("the row waits for none, or for others")

    def commit_external(self, row: int, num_tokens: int) -> None:
        self.require_waiting(row, num_tokens, any(group.kind == "mamba" for group in self.setting.groups))
        self.manager.commit_external(self.requests[row], num_tokens)
        self.nums_external[row] = 0
        self._run_on(row, self.requests[row].num_computed_tokens + num_tokens)

    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        self.require_waiting(row, num_valid_tokens, False)
        self.nums_external[row] = 0
        if self.manager.has_state:
            self.writes.drop(self.requests[row], 0)
        self._run_on(row, self.manager.fail_external(self.requests[row], num_valid_tokens, is_row=True))
        return self.requests[row].num_computed_tokens

    def _run_on(self, row: int, num_computed_tokens: int) -> None:
        """Let a row run from there."""
        self.requests[row].num_computed_tokens = num_computed_tokens
        self.num_hits[row] = min(self.num_hits[row], num_computed_tokens)
        self._show(row)

    # expectations, and leases of spans

    def expect(self, row: int, *span: int | None, seconds: Any) -> int:
        return self.manager.expect(self.requests[row], *span, seconds=seconds)

    def lease_span(self, row: int, *span: int | None, seconds: Any) -> dict[str, list[int]]:
        return self.leased_by(self.manager.lease_span(self.requests[row], *span, seconds=seconds))

    def find_next_checkpoint(self, rows: list[int]) -> list[int]:
        return [self._find_next_checkpoint(self.requests[row]) for row in rows]

    def _find_next_checkpoint(self, request: Any) -> int:
        most = self.manager.max_model_len
        ends = range(request.num_computed_tokens + 1, most if self.manager.states.interval else 0)
        return next((end for end in ends if self.manager.states.is_checkpoint(request, end)), most)

    # release and moves

    def release(self, rows: list[int], num_computed_tokens: Amounts | None = None, seconds: Any = None) -> None:
        terms = list(map(term_of_seconds, seconds if isinstance(seconds, list) else [seconds]))
        terms = terms if isinstance(seconds, list) else terms * len(rows)
        counts = by_row(num_computed_tokens, len(rows))
        for row, count in zip(rows, counts, strict=True):
            self.manager.enter_known(self.requests[row], count)
        self.manager.free_all([self.requests[row] for row in rows], counts, terms, self._end_writes)
        for row in rows:
            self.manager.free_page_hashes(self.requests[row])
            self.requests[row], self.num_hits[row], self.shards[row] = None, 0, None
            self.nums_external[row] = 0
            self._show(row)

    def _end_writes(self, request: Any, num_computed_tokens: int | None, term: int) -> None:
        """Enter what was written of the states of a request that ends, and drop the other writes."""
        if num_computed_tokens is not None:
            self.writes.drop(request, num_computed_tokens)
        [row] = [row for row, other in enumerate(self.requests) if other is request]
        shard = self._shard_of(row)
        self.writes.settle(request, request.num_computed_tokens, shard, term)
        self.writes.drop(request, 0)
        self.writes.num_planned.pop(request.request_id, None)

    def move_row(self, src: int, tgt: int) -> None:
        self.swap_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        for values in (self.requests, self.num_hits, self.shards, self.nums_external):
            values[src], values[tgt] = values[tgt], values[src]
        if src != tgt:
            self.admissions[src], self.admissions[tgt] = next(self._numbers), next(self._numbers)
        self._show(src)
        self._show(tgt)

    # inspection

    def get_page_ids(self, row: int) -> PagesByGroup:
        request = self.requests[row]
        page_ids = self.manager.get_page_ids(request.request_id) if request else ()
        return tuple(list(ids) for ids in page_ids) or tuple([] for _ in self.tables)

    def state(self, request_ids: Iterable[str]) -> BatchState:
        page_ids = [self._shown_ids(self.get_page_ids(row)) for row in range(len(self.requests))]
        return BatchState(
            [request is not None for request in self.requests],
            [request.num_tokens if request else 0 for request in self.requests],
            [request.num_computed_tokens if request else 0 for request in self.requests],
            list(self.num_hits),
            page_ids,
            [table.tolist() for table in self.tables],
            [[len(ids[group_id]) for ids in page_ids] for group_id in range(len(self.tables))],
            oracle_pool_state(self.manager),
            [self._shown_ids(self.manager.get_page_ids(request_id)) for request_id in request_ids],
            self.refusal,
        )

    def _shown_ids(self, pages: PagesByGroup) -> PagesByGroup:
        return self.manager.pools.ids_by_group(pages)

    def _show(self, row: int) -> None:
        """Write the row's pages, and zeros behind them."""
        for table, page_ids in zip(self.tables, self._shown_ids(self.get_page_ids(row)), strict=True):
            table[row] = 0
            table[row, : len(page_ids)] = page_ids

    def fork(self, row: int, targets: list[int]) -> None:
        """Let free rows go on where a row is."""
        self.require_running([row])
        request = self.requests[row]
        if request is None or not targets:
            raise ValueError("a fork is of a row, to others")
        self.manager.states.copies.require_none(self.manager.held.get(request.request_id, ()), into_only=True)
        self.require_no_writes([row])
        self.writes.require_seen(request)
        if len(set(targets)) < len(targets) or any(self.requests[i] for i in targets):
            raise ValueError("a fork is to free rows")
        forked = [copy_of(request, f"row{next(self._numbers)}") for _ in targets]
        if not self.manager.states.fork(request, forked, self._shard_of(row)):
            raise ValueError("too few pages")
        self.admissions[row] = next(self._numbers)  # it cannot go back before the fork
        for target, new_request in zip(targets, forked, strict=True):
            self.requests[target] = new_request
            self.num_hits[target], self.shards[target] = self.num_hits[row], self.shards[row]
            self.admissions[target] = next(self._numbers)
            self._show(target)

    def trim(self, rows: list[int], num_tokens: Amounts) -> None:
        """Cut rows in order. All are checked first, each in its state before the call."""
        self.require_running(rows)
        lengths = list(zip(rows, by_row(num_tokens, len(rows)), strict=True))
        for row, length in lengths:
            request = self.requests[row]
            self.require_no_copies([row])
            self.require_no_writes([row])
            if self.writes.num_planned.get(request.request_id, 0) > request.num_tokens:
                raise ValueError("steps in flight compute tokens behind the known ones")
            if self.manager.has_state and 0 < length < min(request.num_tokens, self.writes.count_planned(request)):
                raise ValueError("a state has seen what is cut")
            self.manager.check_trim(self.requests[row], length)
        for row, length in lengths:
            request = self.requests[row]
            is_back = length < request.num_computed_tokens
            self._run_on(row, self.manager.trim(request, length))
            if is_back:
                self.admissions[row] = next(self._numbers)  # earlier calls cannot be taken back
                self._forget_writes(request)
            del request.all_token_ids[length:]

    def rewind(self) -> tuple[list[int], list[int]]:
        """Let rows compute what failed loads have left wrong again. Returns those that do, and those that cannot."""
        rewound: list[int] = []
        lost: list[int] = []
        for row, request in enumerate(self.requests):
            num_tokens = None if request is None else self.manager.wrong_token(request, self.failed)
            if num_tokens is not None:
                (rewound if self._go_back(row, num_tokens) else lost).append(row)
        return rewound, lost

    def _go_back(self, row: int, num_tokens: int) -> bool:
        """Let a row have no more computed tokens; False, and nothing changed, where it cannot go back, or where a transfer may
        be writing to its pages.
        """
        request = self.requests[row]
        num_tokens = min(request.num_computed_tokens, num_tokens)
        try:
            self.require_running([row])
            self.manager.check_return(request, request.num_tokens, num_tokens)
        except (RuntimeError, ValueError):
            return False
        self.admissions[row] = next(self._numbers)
        self._run_on(row, self.manager.go_back(request, request.num_tokens, num_tokens))
        self._forget_writes(request)
        return True

    def _forget_writes(self, request: Any) -> None:
        """Drop the writes of a request that goes back, with its state, if it has one, to the first token."""
        if self.manager.has_state:
            self.writes.drop(request, 0)
        self.writes.num_planned.pop(request.request_id, None)

    def undo(self) -> None:
        """Undo the last call that grew rows. All are checked first, the last one first."""
        growths = self.growths.pop()
        for growth in reversed(growths):
            request = self.requests[growth.row]
            if request is not None:
                self.require_no_copies([growth.row])
            if request is None or self.admissions[growth.row] != growth.admission:
                raise ValueError("another request is in the row")
            if growth.num_tokens not in (None, request.num_tokens) or growth.num_computed != request.num_computed_tokens:
                raise ValueError("the row has changed since")
            self.manager.check_undo(request, growth.num_computed - growth.num_new, growth.new_pages)
        for growth in reversed(growths):
            request = self.requests[growth.row]
            request.num_computed_tokens -= growth.num_new
            num_tokens = request.num_tokens - (growth.num_tokens is not None)
            self.manager.undo(request, request.num_computed_tokens, num_tokens, growth.new_pages)
            if self.writes.max_steps_ahead and growth.num_tokens is None:
                self.writes.num_planned[request.request_id] = growth.num_planned
            self.writes.undo(request)
            del request.all_token_ids[num_tokens:]
            self._show(growth.row)


def copy_of(request: Request, request_id: str) -> Request:
    """Return a request with the same tokens."""
    return replace(request, request_id=request_id, all_token_ids=list(request.all_token_ids))


def by_row(amounts: Amounts | None, num_rows: int) -> Sequence[Any]:
    """One number for each row, or None for each."""
    return [amounts] * num_rows if amounts is None or isinstance(amounts, int) else amounts


# --- the batch ----------------------------------------------------------------------------------------------


ROW_FORMS = (list, np.int32, np.int64, np.uint16, ">i4")


class BatchRows(Rows):
    """A `RunningBatch`, checked at each read of its state. Arguments alternate between lists and arrays of several dtypes."""

    manager: pagepool.CacheManager

    def __init__(self, manager: pagepool.CacheManager, setting: Setting, num_rows: int, **options: Any) -> None:
        super().__init__(manager)
        tables = make_tables(setting, num_rows)
        options |= {"writes": setting.writes, "max_steps_ahead": setting.max_steps_ahead}
        self.batch = pagepool.RunningBatch(manager, tables, data_parallel_size=setting.data_parallel_size, **options)
        self.tables = getattr(tables, "page_tables", (tables,))
        self.on_device = [table.page_table_cpu.copy() for table in self.tables]
        self.named: set[int] = set()  # rows of the call; only these may get dirty
        self.results: list[tuple[list[int], pagepool.StepResult]] = []  # with their rows
        self._forms = itertools.cycle(ROW_FORMS)
        self._tried: tuple[list[int], Any] = ([], None)

    def _formed(self, values: Amounts) -> Any:
        form = next(self._forms)
        return values if form is list or isinstance(values, int) else np.array(values, dtype=form)

    def admit(self, row: int, token_ids: list[int], **options: Any) -> int | None:
        self.named = {row}
        if self.manager._host_tier is not None:
            # The oracle remembers no refusals: with new features a request is looked up again.
            options = {"mm_features": [], **options}
        if self._tried[0] is not token_ids:
            self._tried = token_ids, self._formed(token_ids)
        return self.batch.admit(row, self._tried[1], **options)

    def probe(self, row: int, token_ids: list[int], dp_shard: int | None = None, **attributes: Any) -> int:
        return self.batch.probe(row, self._formed(token_ids), dp_shard=dp_shard, **attributes)

    def grow(self, rows: list[int], num_new_tokens: Amounts = 1, num_lookahead_tokens: Amounts = 0) -> Grown:
        self.named = set(rows)
        result = self.batch.grow(*map(self._formed, (rows, num_new_tokens, num_lookahead_tokens)))
        self.results.append((rows, result))
        return grown_of(result)

    def step(self, rows: list[int], token_ids: list[int]) -> Grown:
        self.named = set(rows)
        result = self.batch.step(self._formed(rows), self._formed(token_ids))
        self.results.append((rows, result))
        return grown_of(result)

    def undo(self) -> None:
        rows, result = self.results.pop()
        self.named = set(rows)
        self.batch.undo(result)

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        self.batch.append(self._formed(rows), self._formed(token_ids))

    def trim(self, rows: list[int], num_tokens: Amounts) -> None:
        self.named = set(rows)
        self.batch.trim(self._formed(rows), self._formed(num_tokens))

    def release(self, rows: list[int], num_computed_tokens: Amounts | None = None, seconds: Any = None) -> None:
        self.named = set(rows)
        self.batch.release(self._formed(rows), num_computed_tokens and self._formed(num_computed_tokens), seconds)

    def list_external(self) -> list[int]:
        return self.batch.num_external_tokens.tolist()

    def commit_external(self, row: int, num_tokens: int) -> None:
        self.named = {row}
        self.batch.commit_external(row, num_tokens)

    def fail_external(self, row: int, num_valid_tokens: int) -> int:
        self.named = {row}
        return self.batch.fail_external(row, num_valid_tokens)

    def expect(self, row: int, *span: int | None, seconds: Any) -> int:
        return self.batch.expect(row, *span, seconds=seconds)

    def lease_span(self, row: int, *span: int | None, seconds: Any) -> dict[str, list[int]]:
        return self.leased_by(self.batch.lease(row, *span, seconds=seconds))

    def take_moves(self) -> Taken:
        return taken_of(self.batch.take_moves())

    def rewind(self) -> tuple[list[int], list[int]]:
        self.named = set(range(self.batch.num_tokens.size))
        return self.batch.rewind(self.failed)

    def find_next_checkpoint(self, rows: list[int]) -> list[int]:
        places = self.batch.find_next_checkpoint(self._formed(rows))
        assert places.dtype == np.int32
        return places.tolist()

    def fork(self, row: int, targets: list[int]) -> None:
        self.named = {row, *targets}
        self.batch.fork(row, self._formed(targets))

    def move_row(self, src: int, tgt: int) -> None:
        self.named = {src, tgt}
        self.batch.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        self.named = {src, tgt}
        self.batch.swap_row(src, tgt)

    def state(self, request_ids: Iterable[str]) -> BatchState:
        self.batch.check()
        if self.manager.leases:
            self.manager.check()
        self._commit()
        batch = self.batch
        by_row = (batch.is_admitted, batch.num_tokens, batch.num_computed_tokens, batch.num_cached_tokens)
        return BatchState(
            *(values.tolist() for values in by_row),
            [batch.get_page_ids(row) for row in range(batch.num_tokens.size)],
            [table.page_table_cpu.tolist() for table in self.tables],
            [table.num_pages_per_row.tolist() for table in self.tables],
            package_pool_state(self.manager.pools, with_hashes=False),
            [self.manager.get_page_ids(request_id) for request_id in request_ids],
            batch.refusal,
        )

    def _commit(self) -> None:
        """Send dirty segments to the NumPy tables that stand for the device; these must then equal the host's."""
        for table, on_device in zip(self.tables, self.on_device, strict=True):
            dirty_rows = {row for row, _ in send(table, on_device)}
            assert dirty_rows <= self.named, f"rows {dirty_rows} are dirty, the call named {self.named}"
            assert np.array_equal(on_device, table.page_table_cpu)
        self.named = set()


def make_tables(setting: Setting, num_rows: int) -> Any:
    """Return the table of a single group, else tables of all groups."""
    page_sizes = [group.page_size for group in setting.groups]
    if len(page_sizes) > 1:
        return pagepool.MultiGroupPageTable(num_rows, setting.max_model_len, 64, page_sizes)
    return pagepool.PageTable(num_rows, cdiv(setting.max_model_len, page_sizes[0]), 64)


def grown_of(result: pagepool.StepResult) -> Grown:
    arrays = (result.new_page_ids, result.new_page_rows, result.new_page_groups)
    assert all(array.dtype == np.int32 and array.ndim == 1 for array in arrays)
    return Grown(result.num_grown, *(array.tolist() for array in arrays), result.refusal)


def send(table: pagepool.PageTable, on_device: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """Write a table's dirty segments over the device copy; return row and first column of each."""
    num_rows = on_device.shape[0]
    num_segments = table.count_dirty_segments(0, num_rows)
    if not num_segments:
        return []
    segments, (places,) = pack_dirty_segments((table,), num_rows, num_segments)
    for segment, (row, column) in zip(segments, places, strict=True):
        on_device[row, column : column + 64] = segment
    return [(int(row), int(column)) for row, column in places]
