"""A common interface to a batch of rows: over the oracle, and as a `RunningBatch`.

The first does row by row, in plain Python and with a plain NumPy table, what the batch does in one native call. It keeps a
list of what steps in flight do for each row, and of the entries that these steps fill, and derives all else from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from admissions import admission
from oracle import PREEMPTED, OracleManager, PagesByGroup
from oracle_expected import SHARED, UNKNOWN, term_of_seconds
from oracle_kinds import Mamba, Ring, cdiv, is_recurrent
from oracle_refusals import find_refusal
from oracle_tier import Taken, note_taken
from oracle_writes import OracleWrites, Write
from pool_ranges import Shard
from ring_model import Rings
from settings import Setting
from twin_engine import WITH_LOGPROBS, Request
from twins import (
    Lineages,
    Side,
    firsts_of,
    free_ids_of,
    free_ids_of_twin,
    lineages_of,
    lineages_of_twin,
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

NUM_SEEN_STEPS = 4


class Grown(NamedTuple):
    """A `StepResult` as lists: rows with room, and the new pages."""

    num_grown: int
    page_ids: list[int]
    rows: list[int]
    groups: list[int]
    refusal: pagepool.Refusal | None = None


class StepState(NamedTuple):
    """The observable state of a step."""

    is_settled: bool
    rows: list[int]


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
    lineage: Lineages


class BatchState(NamedTuple):
    """The observable state of rows, their tables and their pool."""

    is_admitted: list[bool]
    num_tokens: list[int]
    num_computed_tokens: list[int]
    num_cached_tokens: list[int]
    num_ahead_tokens: list[int]
    stays: list[int]  # numbered in the order in which they are seen
    steps: list[StepState]  # the last ones
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
        lineages_of(store),
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
        lineages_of_twin(pool),
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


@dataclass(eq=False)
class Launch:
    """What a step in flight does for a row. It writes positions from `before` on, up to the next launch's."""

    step: int  # number of the step
    before: int
    num_drafts: int
    is_awaited: bool  # whether tokens are to be told that it samples
    is_nobodys: bool = False  # whether its tokens were cut, or are those of a fork's source


@dataclass(eq=False)
class Filled:
    """An entry of a page or state that a step in flight fills."""

    launch: Launch
    page: int
    entry: tuple[int, int]  # content and group
    place: int  # -1 for a state
    is_noted: bool  # apart from its row, which may give the page back: only its own step can tell that it is right


@dataclass(eq=False)
class OracleStep:
    """A step, with the stays of its rows."""

    number: int | None = None  # None while it has no rows
    members: list[tuple[int, int]] = field(default_factory=list)  # stay, and row at the time of the call
    ends: list[int] = field(default_factory=list)  # number of members after each call
    is_settled: bool = False
    has_failed: bool = False  # with an earlier step, or itself


class Plan(NamedTuple):
    """The part of a call that plans a step for one row."""

    row: int
    token_ids: list[int]  # tokens to append first
    before: int  # planned positions
    num_new: int
    num_drafts: int
    num_ended: int  # launches that have run by now


class OracleRows(Rows):
    """Rows over the oracle: each is a request and a line of a table. What a policy sees comes in the order of a batch."""

    manager: OracleManager

    def __init__(self, manager: OracleManager, setting: Setting, num_rows: int, caches: str = "scheduled") -> None:
        super().__init__(manager)
        self.setting = setting
        self.requests: list[Any] = [None] * num_rows  # a Request, or None for a free row
        self.num_hits = [0] * num_rows
        self.nums_external = [0] * num_rows  # tokens that come from elsewhere
        self.rings = [self._make_rings() for _ in range(num_rows)]
        self.shards: list[int | None] = [None] * num_rows
        self.stays = [0] * num_rows  # 0 for a free row
        self.planned = [0] * num_rows  # positions that planned steps write
        self.launches: list[list[Launch]] = [[] for _ in range(num_rows)]  # the oldest first
        self.filled: list[Filled] = []
        self.steps: list[OracleStep] = []
        self.num_steps = 0  # with rows
        self.num_stays = 0
        self.seen: dict[int, int] = {0: 0}  # stays, numbered
        widths = [cdiv(setting.max_model_len, group.page_size) for group in setting.groups]
        self.tables = [np.zeros((num_rows, width), dtype=np.int32) for width in widths]
        self.refusal: pagepool.Refusal | None = None
        self._numbers = itertools.count()
        manager.states.divide(manager.pools.shard_of_hint(0, setting.data_parallel_size))
        self.writes = OracleWrites(manager)
        self.caches_computed = caches == "computed"
        manager.page_pool.prefers_held |= self.caches_computed
        has_windows = any(group.has_window for group in setting.groups)
        is_late = self.caches_computed or (manager.keys.hash_lookahead > 0 and manager.enable_caching)
        self.settles_before = is_late or has_windows or manager.writes_states  # before the next step is planned
        self.enters_before = has_windows

    def _make_rings(self) -> Rings:
        return Rings((kind.page_size, kind.period) for kind in self.manager.kinds if isinstance(kind, Ring))

    def take_moves(self) -> Taken:
        return self.as_package(self.manager.take_pool_moves())._replace(writes=self.writes.take(self.requests))

    # what follows from the launches

    def awaited(self, row: int) -> list[Launch]:
        """Return the launches whose tokens are to be told."""
        return [launch for launch in self.launches[row] if launch.is_awaited]

    def count_left(self, row: int) -> int:
        """Count the known tokens that no step computes; negative for positions behind them."""
        return int(self.requests[row].num_tokens) - self.planned[row]

    def count_ahead(self, row: int) -> int:
        return max(0, -self.count_left(row)) if self.requests[row] is not None else 0

    def count_final(self, row: int) -> int:
        """Count the leading tokens of a row whose pages can be entered."""
        launches = self.launches[row]
        resolved = launches[0].before if launches else self.planned[row]
        return self._final(self.requests[row], self.requests[row].num_computed_tokens, resolved)

    def _final(self, request: Any, num_computed: int, num_resolved: int) -> int:
        num_final = self.manager.count_keyed(request, num_computed)
        return min(num_final, num_resolved) if self.caches_computed else num_final

    def _derive(self, row: int) -> None:
        """Count the known tokens that planned steps write."""
        self.requests[row].num_computed_tokens = min(self.requests[row].num_tokens, self.planned[row])

    def _end_launches(self, row: int, num: int) -> None:
        """Let the first steps of a row have run: the entries of its pages are right."""
        ended, self.launches[row] = self.launches[row][:num], self.launches[row][num:]
        self.filled = [filled for filled in self.filled if filled.launch not in ended or filled.is_noted]

    def _note_filled(self, launches: list[Launch], page: int, entry: tuple[int, int], end: int, place: int) -> None:
        """Note an entry that was made for tokens up to `end`, if a step in flight computes the last of them."""
        launch = next((launch for launch in reversed(launches) if launch.before < end), None)
        if launch is not None:
            self.filled.append(Filled(launch, page, entry, place, is_noted=place < 0))

    @contextmanager
    def _noting_filled(self, row: int, num_run: int = 0) -> Iterator[list[Write]]:
        """Note the entries of pages that are made meanwhile, and of those states that were written that are listed. The
        `num_run` first steps of the row have run, even if the row then gets no pages.
        """
        request, written, launches = self.requests[row], list[Write](), self.launches[row][num_run:]
        held = self.manager.held[request.request_id]
        nums_cached = [group.num_cached_pages for group in held]
        yield written
        self._note_pages(row, nums_cached)
        for write in written:
            entry = self.writes.key_of(request, write.num_tokens, write.group_id), write.group_id
            self._note_filled(launches, write.page, entry, write.num_tokens, -1)  # though the page may have been taken again

    def _note_pages(self, row: int, starts: list[int]) -> None:
        """Note the entries of a row's pages from a place of each group on."""
        request = self.requests[row]
        for i, (kind, held) in enumerate(zip(self.manager.kinds, self.manager.held[request.request_id], strict=True)):
            for place in range(starts[i], 0 if isinstance(kind, Mamba) else held.num_cached_pages):
                entry = self.manager.keys_of(request, kind)[place], i
                self._note_filled(self.launches[row], held.pages[place], entry, (place + 1) * kind.page_size, place)

    def _note_others(self, row: int) -> None:
        """Note the entries of a row's pages that its steps in flight fill, and that a row which shares the pages has made."""
        entries, noted = self.manager.page_pool.entry_of_page, {(filled.page, filled.entry) for filled in self.filled}
        for kind, held in zip(self.manager.kinds, self.manager.held[self.requests[row].request_id], strict=True):
            for place in range(held.num_hit_pages, 0 if isinstance(kind, Mamba) else len(held.pages)):
                page = held.pages[place]
                if page in entries and (page, entries[page]) not in noted:
                    self._note_filled(self.launches[row], page, entries[page], (place + 1) * kind.page_size, place)

    # steps

    def new_step(self) -> int:
        self.steps.append(OracleStep())
        return len(self.steps) - 1

    def _open_step(self, step: int | None) -> OracleStep:
        """Return a step to which rows are added; a new one, which is not listed yet, for None."""
        if step is not None and self.steps[step].is_settled:
            raise ValueError("a step that was settled")
        return OracleStep() if step is None else self.steps[step]

    def _join_step(self, step: int | None) -> OracleStep:
        """Return a step to which rows are added."""
        joined = self._open_step(step)
        if joined.has_failed:
            raise ValueError("a step that has failed")
        return joined

    def _number(self, step: OracleStep) -> int:
        return self.num_steps + 1 if step.number is None else step.number

    def _add_to(self, step: OracleStep, rows: list[int]) -> None:
        """Add launched rows to a step."""
        if rows:
            step.number = self._number(step)
            self.num_steps = max(self.num_steps, step.number)
        step.members += [(self.stays[row], row) for row in rows]
        step.ends.append(len(step.members))

    # admission

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
        num_external_tokens: int = 0,
        resume_at: Sequence[int] = (),
        num_drafts: int = 0,
        reserve: str | None = None,
        step: int | None = None,
        **attributes: Any,
    ) -> int | None:
        self.refusal = None
        self._check_drafts(min(num_drafts, self.setting.max_model_len))
        joined = self._join_step(step)
        request = Request(f"row{next(self._numbers)}", list(token_ids), **attributes)
        request.sampling_params = None if look_up else WITH_LOGPROBS
        request.resume_at = resume_at
        if request.num_prompt_tokens is not None:
            request.num_prompt_tokens = min(request.num_prompt_tokens, request.num_tokens)
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
        num_computed = num_hits + num_external if num_external else num_computed
        num_slots = len(token_ids) if reserve else num_computed
        num_slots = min(num_slots + num_drafts, self.setting.max_model_len)
        num_planned = num_computed if reserve and num_computed < len(token_ids) else num_slots  # drafts follow the prompt
        self.manager.require_fit(request, num_slots, hits, shard)
        num_missing = self.manager._num_missing_pages(request, num_slots, hits)
        number = None if shard is None else dp_shard % self.setting.data_parallel_size
        refusal = find_refusal(self.manager, num_missing, hits, shard, number, num_reserved_pages, num_hits)
        if is_short or self._is_shard_short(hits, num_slots, dp_shard):
            self.refusal = refusal
            return None
        options |= {"num_lookahead_tokens": num_planned - num_computed, "num_reserved_slots": num_slots}
        if num_external:
            options["num_external_computed_tokens"] = num_external
        options["delay_cache_pages"] = num_external > 0 or self.caches_computed
        num_new = num_computed - num_hits - num_external
        options["num_free_rows"] = self._count_others_without_state(row)
        pages = self.manager.allocate_slots(request, num_new, num_hits, hits, **options, may_add_nothing=True)
        if pages is None:
            self.refusal = refusal
            return None
        self.requests[row], self.num_hits[row], self.shards[row] = request, num_hits, dp_shard
        self.nums_external[row] = num_external
        self.rings[row].begin(num_hits)
        self._begin_stay(row)
        self.planned[row] = num_computed - num_external
        if not num_external:
            samples = num_computed == len(token_ids)
            self.planned[row] = num_planned if samples else num_computed
            num_drafts = self.planned[row] - num_computed
            self.launches[row] = [Launch(self._number(joined), num_hits, num_drafts, samples and step is not None)]
        self._derive(row)
        self._note_pages(row, [kind.num_places(num_hits) for kind in self.manager.kinds])
        if step is not None and not num_external:
            self._add_to(joined, [row])
        self.writes.plan(request, num_computed, self._shard_of(row), self._count_others_without_state(row), num_external > 0)
        self._show(row)
        return num_hits

    def _begin_stay(self, row: int) -> None:
        self.num_stays += 1
        self.stays[row] = self.num_stays

    def _count_written(self, row: int) -> int:
        """Count the positions up to the last of the newest launch that stays: no draft, and none behind drafts in flight."""
        *earlier, launch = self.launches[row]
        num_tokens = self.requests[row].num_tokens
        if launch.before < num_tokens or any(other.num_drafts and other.is_awaited for other in earlier):
            return min(self.planned[row], num_tokens)
        return launch.before + 1

    def probe(self, row: int, token_ids: list[int], dp_shard: int | None = None, **attributes: Any) -> int:
        if self.requests[row] is not None:
            raise ValueError("the row is admitted")
        request = Request(f"probe{next(self._numbers)}", list(token_ids), **attributes)
        return self.manager.count_hits(request, dp_shard, self.setting.data_parallel_size)

    # planning

    def _check_drafts(self, num_drafts: Amounts) -> None:
        """Refuse more drafts than rings can take back."""
        num_ahead = self.setting.max_steps_ahead
        for ring in [kind for kind in self.manager.kinds if isinstance(kind, Ring)]:
            most = max(0, ring.page_size - ring.period - num_ahead) // (num_ahead + 1)
            if max(by_row(num_drafts, 1), default=0) > most:
                raise ValueError("more drafts than a ring takes back")

    def plan(self, rows: list[int], num_tokens: Amounts = 1, num_drafts: Amounts = 0, step: int | None = None) -> Grown:
        joined, plans = self._join_step(step), []
        self._check_drafts(num_drafts)
        news, drafts = (by_row(amounts, len(rows)) for amounts in (num_tokens, num_drafts))
        for row, num_new, num_ahead in zip(rows, news, drafts, strict=True):
            self.require_running([row])
            self.require_nothing_due(row)
            num_left, num_awaited = self.count_left(row), len(self.awaited(row))
            if num_left > 0 and not 1 <= num_new <= num_left:
                raise ValueError("more tokens than are left")
            if num_left <= 0 and not 1 <= num_awaited <= self.setting.max_steps_ahead:
                raise ValueError("no token in flight, or too many steps")
            if num_left <= 0 and self.planned[row] >= self.setting.max_model_len:
                raise ValueError("no room")
            num_ended = max(0, len(self.launches[row]) - self.setting.max_steps_ahead)
            plans.append(Plan(row, [], self.planned[row], num_new if num_left > 0 else 1, num_ahead, num_ended))
        return self._plan_all(plans, joined, step)

    def step(self, rows: list[int], token_ids: list[int], step: int | None = None) -> Grown:
        joined, plans = self._join_step(step), []
        for row, token_id in zip(rows, token_ids, strict=True):
            self.require_running([row])
            self.require_nothing_due(row)
            num_known = self.requests[row].num_tokens
            if num_known >= self.setting.max_model_len or self.count_left(row) > 0:
                raise ValueError("no room, or a token behind others that are not computed")
            if len(self.awaited(row)) > 1:
                raise ValueError("a later step computes the token")
            plans.append(Plan(row, [token_id], num_known, 1, 0, len(self.launches[row])))
        return self._plan_all(plans, joined, step)

    def _plan_all(self, plans: list[Plan], joined: OracleStep, step: int | None) -> Grown:
        """Plan rows in turn until one has no room."""
        for plan in plans:
            num_resolved, request = self._resolved_before(plan), self.requests[plan.row]
            num_known = request.num_tokens + len(plan.token_ids)
            num_keyed = self.manager.keys.count_known(num_known) if self.manager.enable_caching else num_known
            num_sure = min(plan.before, request.num_tokens, num_keyed, num_resolved)
            no_pages = self.manager._no_pages()
            self.manager.require_fit(request, self._count_room(plan), no_pages, self._shard_of(plan.row), num_sure)
        number = self._number(joined)
        last = [launch.step for plan in plans for launch in self.launches[plan.row][-1:]]
        if step is not None and number <= self.num_steps and max(last, default=0) >= number:
            raise ValueError("a row is in the step, or in a later one")
        grown = Grown(0, [], [], [])
        with self.manager.entering_later():
            for plan in plans:
                with self._noting_filled(plan.row, plan.num_ended) as written:
                    refusal = self._plan_row(plan, number, grown, written)
                self._show(plan.row)
                if refusal is not None:
                    self._cut_tokens(plan.row, self.requests[plan.row].num_tokens - len(plan.token_ids))
                    self._keep_skipped(plan)
                    grown = grown._replace(refusal=refusal)
                    break
                grown = grown._replace(num_grown=grown.num_grown + 1)
        if step is None and grown.num_grown:
            self.steps.append(joined)
        self._add_to(joined, [plan.row for plan in plans[: grown.num_grown]])
        return grown

    def _keep_skipped(self, plan: Plan) -> None:
        """Let entries of pages that a row has skipped be right: its last steps have run, though it gets no pages."""
        ended, held = self.launches[plan.row][: plan.num_ended], self.manager.held[self.requests[plan.row].request_id]
        pages = {page for group in held for page in group.pages}
        self.filled = [
            filled for filled in self.filled if filled.launch not in ended or filled.page in pages or filled.is_noted
        ]

    def _resolved_before(self, plan: Plan) -> int:
        """Return the positions that no step writes which is in flight as a step is planned."""
        launches = self.launches[plan.row][plan.num_ended :]
        return launches[0].before if launches else plan.before

    def _count_room(self, plan: Plan) -> int:
        """Count the positions that need slots."""
        return min(plan.before + plan.num_new + plan.num_drafts, self.setting.max_model_len)

    def _plan_row(self, plan: Plan, number: int, grown: Grown, written: list[Write]) -> pagepool.Refusal | None:
        """Plan a step for a row, or say what is short."""
        row, request, manager, shard = plan.row, self.requests[plan.row], self.manager, self._shard_of(plan.row)
        num_before, num_resolved = min(plan.before, request.num_tokens), self._resolved_before(plan)
        request.all_token_ids += plan.token_ids
        num_final = self._final(request, num_before, num_resolved)
        if self.settles_before:
            written += self.writes.settle(request, num_final, shard)
            manager._enter_full_pages(request, num_final)
            if self.enters_before:
                manager._enter_waiting()
            manager._skip_pages(request, min(num_final, num_resolved))
        num_room = self._count_room(plan)
        num_missing = manager._num_missing_pages(request, num_room, manager._no_pages())
        refusal = self._explain(row, num_missing)
        if refusal is not None:
            return refusal
        self._take(row, num_missing, grown)
        end = plan.before + plan.num_new
        samples = end >= request.num_tokens
        self._end_launches(row, plan.num_ended)
        self.planned[row] = num_room if samples else end
        self.launches[row].append(Launch(number, plan.before, self.planned[row] - end, samples))
        request.num_computed_tokens = num_before
        num_free_rows = self._count_others_without_state(row)
        self._derive(row)
        if not self.caches_computed:
            manager._enter_full_pages(request, self._final(request, request.num_computed_tokens, 0))
        if manager.writes_states:
            manager._enter_waiting()
        self.writes.plan(request, self._count_written(row), shard, num_free_rows)
        return None

    def _explain(self, row: int, num_missing: list[int]) -> pagepool.Refusal | None:
        """Say what is short for a row that lacks pages of each group."""
        shard, size = self._shard_of(row), self.setting.data_parallel_size
        number = None if shard is None else self.shards[row] % size
        return find_refusal(self.manager, num_missing, self.manager._no_pages(), shard, number, is_growth=True)

    def _take(self, row: int, num_missing: list[int], grown: Grown) -> None:
        """Take the missing pages of a row."""
        request, manager, shard = self.requests[row], self.manager, self._shard_of(row)
        if any(num_missing):
            manager.states.divide(shard)
        taken = manager._take_by_group(num_missing, shard, manager._holder_of(request))
        manager._attach(request, manager._no_pages(), taken)
        if any(taken):
            note_taken(manager.page_pool, manager.held[request.request_id])
        for group_id, pages in enumerate(taken):
            grown.page_ids.extend(manager.pools.id_of(page, group_id) for page in pages)
            grown.rows.extend([row] * len(pages))
            grown.groups.extend([group_id] * len(pages))

    def require_nothing_due(self, row: int) -> None:
        """Refuse a call for a row whose pages are in a copy that is due, or whose states are to be written."""
        self.manager.states.copies.require_none(self.manager.held.get(self.requests[row].request_id, ()))
        if self.writes.are_due(self.requests[row]):
            raise RuntimeError("writes are due")

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        if any(len(self.awaited(row)) > 1 for row in rows):
            raise ValueError("a later step computes the token")
        for row, token_id in zip(rows, token_ids, strict=True):
            for launch in self.awaited(row):
                launch.is_awaited = False
            self.planned[row] = min(self.planned[row], self.requests[row].num_tokens)
            self.requests[row].all_token_ids.append(token_id)
            self._derive(row)

    # settling

    def find_launch(self, step: OracleStep, stay: int) -> Launch | None:
        """Return what a step does for a stay, if that is in flight."""
        launches = self.launches[self.stays.index(stay)] if stay in self.stays else []
        return next((launch for launch in reversed(launches) if launch.step == step.number), None)

    def settle(self, step: int, token_ids: list[int] | None = None, counts: list[int] | None = None) -> list[int]:
        settled = self._open_step(step)
        if counts is None:
            counts = [0 if token_ids is None else 1] * len(settled.members)
        tokens = list(token_ids or [])
        if len(counts) != len(settled.members) or sum(counts) != len(tokens) or any(count < 0 for count in counts):
            raise ValueError("other tokens than counts")
        for (stay, _), count in zip(settled.members, counts, strict=True):
            launch = self.find_launch(settled, stay)
            if launch is not None and not launch.is_nobodys:
                self._check_settled(self.stays.index(stay), launch, count)
        settled.is_settled = True
        places = []
        with self.manager.entering_later():
            for (stay, _), count in zip(settled.members, counts, strict=True):
                sampled, tokens = tokens[:count], tokens[count:]
                launch = self.find_launch(settled, stay)
                places.append(-1 if launch is None or launch.is_nobodys else self.stays.index(stay))
                if launch is not None:
                    self._settle_row(self.stays.index(stay), launch, [] if launch.is_nobodys else sampled)
                if len(places) in settled.ends:
                    self.manager._enter_waiting()
        live = [launch for launches in self.launches for launch in launches]
        self.filled = [
            filled
            for filled in self.filled
            if filled.launch.step != settled.number or (filled.launch in live and not filled.is_noted)
        ]
        return places

    def _check_settled(self, row: int, launch: Launch, count: int) -> None:
        awaited = self.awaited(row)
        if count > (launch.num_drafts + 1 if launch.is_awaited else 0):
            raise ValueError("more tokens than the step samples")
        if launch.is_awaited and awaited[0] is not launch:
            raise ValueError("an earlier step comes first")
        if launch.is_awaited and not count and len(awaited) > 1:
            raise ValueError("a later step computes a token")
        if self.requests[row].num_tokens + count > self.setting.max_model_len:
            raise ValueError("too many tokens")

    def _settle_row(self, row: int, launch: Launch, sampled: list[int]) -> None:
        """Tell a row its tokens. Later positions were planned for the most of them."""
        request = self.requests[row]
        self._end_launches(row, self.launches[row].index(launch) + 1)
        num_rejected = launch.num_drafts + 1 - max(1, len(sampled)) if launch.is_awaited else 0
        for later in self.launches[row]:
            later.before -= num_rejected
        self.planned[row] -= num_rejected
        request.all_token_ids += sampled
        self._derive(row)
        with self._noting_filled(row) as written:
            self.manager._enter_full_pages(request, self.count_final(row))
            written += self.writes.settle(request, self.count_final(row), self._shard_of(row))
            self.writes.pass_over(request, request.num_computed_tokens)

    def fail_step(self, step: int) -> list[int]:
        """Let a step fail, and all later ones. Return the rows that are released, since they cannot go back."""
        failed = self._open_step(step)
        failed.is_settled = True
        if failed.number is None:
            return []
        for later in self.steps:
            later.has_failed |= later.number is not None and later.number >= failed.number
        lost = [filled for filled in self.filled if filled.launch.step >= failed.number]
        self.filled = [filled for filled in self.filled if filled.launch.step < failed.number]
        pool = self.manager.page_pool
        evicted = [filled.entry for filled in lost if pool.entry_of_page.get(filled.page) != filled.entry]
        lost = [filled for filled in lost if pool.entry_of_page.get(filled.page) == filled.entry]
        pool.evict_pages([filled.page for filled in lost])
        for entry in evicted if pool.tier is not None else ():
            pool.tier.drop(entry)
        released = []
        for row, request in enumerate(self.requests):
            start = None if request is None else self._find_start(row, failed.number, lost)
            if start is not None:
                self.launches[row] = [launch for launch in self.launches[row] if launch.step < failed.number]
                if not self._restart_failed(row, start):
                    self._end_rows([row], [UNKNOWN], has_failed=True)
                    released.append(row)
        return released

    def _find_start(self, row: int, number: int, lost: list[Filled]) -> int | None:
        """Return the first position that a row has to compute again: of its first failed step, or of a page that it has hit,
        which lies before those of this step. A state that it has hit is wrong from the start, if nothing else is.
        """
        request, lost_pages = self.requests[row], {filled.page for filled in lost}
        starts = [launch.before for launch in self.launches[row] if launch.step >= number][:1]
        most, has_lost_state = min(starts, default=self.setting.max_model_len), False
        for i, (kind, held) in enumerate(zip(self.manager.kinds, self.manager.held[request.request_id], strict=True)):
            if isinstance(kind, Mamba):
                num_places = kind.num_places(self.num_hits[row])
                entry = (self.manager.keys_of(request, kind)[num_places - 1], i) if num_places else None
                has_lost_state |= any(filled.entry == entry for filled in lost)
            else:
                hits = enumerate(held.pages[: most // kind.page_size])
                starts += [place * kind.page_size for place, page in hits if page in lost_pages]
        return min(starts, default=0 if has_lost_state else None)

    def _restart_failed(self, row: int, start: int) -> bool:
        """Let a row go back to before a position; False if it cannot."""
        request = self.requests[row]
        if self.nums_external[row] or (any(map(is_recurrent, self.manager.kinds)) and start > 0):
            return False
        if self._has_state_behind(row, self._find_restart(row, request.num_tokens, start)[0]):
            return False
        try:
            self._restart(row, request.num_tokens, start, has_failed=True)
        except (RuntimeError, ValueError):
            return False
        return True

    def _has_state_behind(self, row: int, num_tokens: int) -> bool:
        """Whether a state has seen tokens behind the first ones, and a ring has lost some before."""
        kinds, request = self.manager.kinds, self.requests[row]
        if num_tokens == 0:
            return False
        if any(map(is_recurrent, kinds)) and num_tokens < request.num_computed_tokens:
            return True
        return num_tokens < self.planned[row] and not self.rings[row].have(num_tokens)

    def _find_restart(self, row: int, num_tokens: int, most: int) -> tuple[int, int]:
        """Return how many tokens stay computed of a row that is cut to some tokens, at most `most` of them computed, and the
        first position to which it writes: drafters write again the last slots before a cut.
        """
        request = self.requests[row]
        changed = min(most, self._first_changed(row, num_tokens))
        restart = self.manager.find_restart(request, min(request.num_computed_tokens, most), changed)
        return restart, min(restart, changed)

    def _first_changed(self, row: int, num_tokens: int) -> int:
        """Return the first position whose slot changes if a row is cut to some of its tokens."""
        if num_tokens < self.requests[row].num_tokens and self.manager.enable_caching:
            return self.manager.keys.count_known(num_tokens)
        return num_tokens

    def _restart(self, row: int, num_tokens: int, most: int, has_failed: bool = False) -> None:
        """Cut a row to some tokens, at most `most` of them computed. After a failed step it keeps no slots behind these, and
        steps before go on; otherwise steps in flight have no tokens for it.
        """
        request, (restart, changed) = self.requests[row], self._find_restart(row, num_tokens, most)
        self.manager.check_return(request, num_tokens, restart)
        self._order_filled(row)
        num_planned = most if has_failed and restart == request.num_computed_tokens else restart
        self.manager.go_back(request, num_planned if has_failed else num_tokens, restart, changed)
        if num_planned < self.planned[row]:
            self.writes.drop(request, num_planned)
            self.planned[row] = num_planned
            if has_failed:
                self.launches[row] = [launch for launch in self.launches[row] if launch.before < num_planned]
            else:
                self._disown(row)
        self.num_hits[row] = min(self.num_hits[row], restart)
        self._cut_tokens(row, num_tokens)
        self._show(row)

    def _disown(self, row: int) -> None:
        """Let steps in flight have no tokens for a row. They may fail all the same."""
        for launch in self.launches[row]:
            launch.before, launch.num_drafts = min(launch.before, self.planned[row]), 0
            launch.is_awaited, launch.is_nobodys = False, True

    def _cut_tokens(self, row: int, num_tokens: int) -> None:
        request = self.requests[row]
        self.manager.keys.cut(request.request_id, num_tokens)
        del request.all_token_ids[num_tokens:]
        for held in self.manager.held[request.request_id]:
            held.num_prompt_tokens = min(held.num_prompt_tokens, num_tokens)
        self._derive(row)

    def _count_others_without_state(self, row: int) -> int:
        """Count the other rows that are free, or start over."""
        states = [i for i, kind in enumerate(self.manager.kinds) if isinstance(kind, Mamba)][:1]
        others = self.requests[:row] + self.requests[row + 1 :]
        held = [self.manager.get_page_ids(request.request_id) for request in others if request is not None]
        return others.count(None) + sum(not pages[i] for pages in held for i in states)

    def _shard_of(self, row: int) -> range | Shard | None:
        return self.manager.pools.shard_of_hint(self.shards[row], self.setting.data_parallel_size)

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
        are_adopted = are_adopted and any(group.kind == "mamba" for group in self.setting.groups)
        nums_missing = [0] * len(self.manager.pools.ranges)
        for group, ids, pool in groups:
            nums_missing[pool] += (
                group.is_ring or not are_adopted if group.is_state else cdiv(num_tokens, group.page_size) - len(ids)
            )
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
            self.require_nothing_due(row)
        if not num_external or num_tokens > num_external or (needs_all and num_tokens < num_external):
            raise ValueError("the row waits for none, or for others")

    def commit_external(self, row: int, num_tokens: int, is_last: bool = True) -> None:
        self.require_waiting(row, num_tokens, self.manager.has_state and is_last)
        self.manager.commit_external(self.requests[row], num_tokens, is_last)
        if not is_last:
            return
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
        """Let a row run from there. What its rings had before came with the tokens, and is not counted on."""
        self.planned[row] = num_computed_tokens
        self.rings[row].begin(num_computed_tokens)
        self._derive(row)
        self.num_hits[row] = min(self.num_hits[row], num_computed_tokens)
        self._show(row)

    # expectations, and leases of spans

    def expect(self, row: int, *span: int | None, seconds: Any) -> int:
        return self.manager.expect(self.requests[row], *span, seconds=seconds)

    def lease_span(self, row: int, *span: int | None, seconds: Any) -> dict[str, list[int]]:
        return self.leased_by(self.manager.lease_span(self.requests[row], *span, seconds=seconds))

    # release and moves

    def release(self, rows: list[int], seconds: Any = None) -> None:
        terms = list(map(term_of_seconds, seconds)) if isinstance(seconds, list) else [term_of_seconds(seconds)] * len(rows)
        for row in rows if self.manager.keys.hash_lookahead else ():
            with self._noting_filled(row):
                self.manager._enter_full_pages(self.requests[row], self.count_final(row))
        self._end_rows(rows, terms)

    def _end_rows(self, rows: list[int], terms: Sequence[int], has_failed: bool = False) -> None:
        """Free the pages of rows in one call. Then states are kept that were written, unless the row's step has failed, and
        copies into the pages, and other writes, are dropped.
        """
        manager = self.manager
        manager._give_back_all([self.requests[row] for row in rows], [None] * len(rows), terms)
        for row, term in zip(rows, terms, strict=True):
            request, num_final = self.requests[row], self.count_final(row)
            with self._noting_filled(row) as written:
                self._order_filled(row)
                manager.states.copies.drop(manager.pages_of(request))
                if not has_failed:
                    manager.note_run_end(request)
                    written += self.writes.settle(request, num_final, self._shard_of(row), term)
            self._note_others(row)
            self.writes.drop(request, 0)
            del manager.held[request.request_id]
            manager.free_page_hashes(request)
            # A step that was not planned cannot fail, except with an earlier one.
            sure = [launch for launch in self.launches[row] if launch.step > self.num_steps and not self._may_fail(launch)]
            self.filled = [filled for filled in self.filled if filled.launch not in sure]
            self.requests[row], self.num_hits[row], self.shards[row] = None, 0, None
            self.stays[row] = self.planned[row] = self.nums_external[row] = 0
            self.rings[row] = self._make_rings()
            self.launches[row] = []
            self._show(row)

    def _order_filled(self, row: int) -> None:
        """Note the entries of a row's pages, in the order of groups, behind those of rows that ended or went back before."""
        own = [filled for filled in self.filled if filled.launch in self.launches[row] and not filled.is_noted]
        others = [filled for filled in self.filled if filled not in own]
        for filled in own:
            filled.is_noted = self._may_fail(filled.launch)
        self.filled = others + sorted(own, key=lambda filled: (filled.entry[1], filled.place))

    def _may_fail(self, launch: Launch) -> bool:
        """Whether a step that was planned by now may fail, and a launch with it."""
        return any(step.number is not None and step.number <= launch.step and not step.is_settled for step in self.steps)

    def move_row(self, src: int, tgt: int) -> None:
        self.swap_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        by_row: tuple[list[Any], ...] = (
            self.requests, self.num_hits, self.shards, self.nums_external, self.stays, self.planned, self.launches,
            self.rings,
        )  # fmt: skip
        for values in by_row:
            values[src], values[tgt] = values[tgt], values[src]
        self._show(src)
        self._show(tgt)

    # inspection

    def get_page_ids(self, row: int) -> PagesByGroup:
        request = self.requests[row]
        page_ids = self.manager.get_page_ids(request.request_id) if request else ()
        return tuple(list(ids) for ids in page_ids) or tuple([] for _ in self.tables)

    def state(self, request_ids: Iterable[str]) -> BatchState:
        for rings, planned in zip(self.rings, self.planned, strict=True):
            rings.write(planned)
        page_ids = [self._shown_ids(self.get_page_ids(row)) for row in range(len(self.requests))]
        return BatchState(
            [request is not None for request in self.requests],
            [request.num_tokens if request else 0 for request in self.requests],
            [request.num_computed_tokens if request else 0 for request in self.requests],
            list(self.num_hits),
            [self.count_ahead(row) for row in range(len(self.requests))],
            number_as_seen(self.stays, self.seen),
            [StepState(step.is_settled, [row for _, row in step.members]) for step in self.steps[-NUM_SEEN_STEPS:]],
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
        if self.writes.are_due(request):
            raise RuntimeError("writes are due")
        if self.count_ahead(row):
            raise ValueError("steps in flight compute tokens behind the known ones")
        if len(set(targets)) < len(targets) or any(self.requests[i] for i in targets):
            raise ValueError("a fork is to free rows")
        forked = [copy_of(request, f"row{next(self._numbers)}") for _ in targets]
        if not self.manager.states.fork(request, forked, self._shard_of(row)):
            raise ValueError("too few pages")
        for target, new_request in zip(targets, forked, strict=True):
            self.requests[target] = new_request
            self.num_hits[target], self.shards[target] = self.num_hits[row], self.shards[row]
            self.planned[target] = self.planned[row]
            self.rings[target] = deepcopy(self.rings[row])
            self.launches[target] = [replace(launch) for launch in self.launches[row]]
            self._disown(target)
            self._begin_stay(target)
            self._show(target)

    def trim(self, rows: list[int], num_tokens: Amounts) -> None:
        """Cut rows in order. All are checked first, each in its state before the call."""
        lengths = list(zip(rows, by_row(num_tokens, len(rows)), strict=True))
        for row, length in lengths:
            request = self.requests[row]
            self.require_running([row])
            self.require_nothing_due(row)
            if self.count_ahead(row):
                raise ValueError("steps in flight compute tokens behind the known ones")
            if self._has_state_behind(row, length):
                raise ValueError("a state has seen what is cut")
            if self._changes_pages(row, length):
                restart = self._find_restart(row, length, length)[0]
                if self._has_state_behind(row, restart):
                    raise ValueError("a state has seen what is computed again")
                self.manager.check_return(request, length, restart)
        for row, length in lengths:
            if self._changes_pages(row, length):
                self._restart(row, length, length)
            else:
                self._cut_tokens(row, length)

    def _changes_pages(self, row: int, num_tokens: int) -> bool:
        """Whether a row that is cut to some tokens writes to slots of computed ones."""
        return self._first_changed(row, num_tokens) < self.requests[row].num_computed_tokens

    def rewind(self) -> tuple[list[int], list[int]]:
        """Let rows compute what failed loads have left wrong again. Returns those that do, and those that cannot, which end."""
        rewound: list[int] = []
        lost: list[int] = []
        for row, request in enumerate(self.requests):
            num_tokens = None if request is None else self.manager.wrong_token(request, self.failed)
            if num_tokens is None:
                continue
            is_back = self._go_back(row, num_tokens)
            (rewound if is_back else lost).append(row)
            if not is_back:
                self._end_rows([row], [UNKNOWN], has_failed=True)
        return rewound, lost

    def _go_back(self, row: int, num_tokens: int) -> bool:
        """Let a row have no more computed tokens; False, and nothing changed, where it cannot go back, or where a transfer may
        be writing to its pages.
        """
        try:
            self.require_running([row])
            self._restart(row, self.requests[row].num_tokens, num_tokens)
        except (RuntimeError, ValueError):
            return False
        return True


def copy_of(request: Request, request_id: str) -> Request:
    """Return a request with the same tokens."""
    return replace(request, request_id=request_id, all_token_ids=list(request.all_token_ids))


def number_as_seen(stays: list[int], seen: dict[int, int]) -> list[int]:
    """Number stays in the order in which they are seen."""
    return [seen.setdefault(stay, len(seen)) for stay in stays]


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
        options["max_steps_ahead"] = setting.max_steps_ahead
        self.batch = pagepool.RunningBatch(manager, tables, data_parallel_size=setting.data_parallel_size, **options)
        self.tables = getattr(tables, "page_tables", (tables,))
        self.on_device = [table.page_table_cpu.copy() for table in self.tables]
        self.named: set[int] = set()  # rows of the call; only these may get dirty
        self.steps: list[pagepool.StepResult] = []
        self.refused: list[pagepool.StepResult] = []  # results without rows, which live as long
        self.nums_pages: dict[int, int] = {}  # new pages of each step
        self.seen: dict[int, int] = {0: 0}  # stays, numbered
        self._forms = itertools.cycle(ROW_FORMS)
        self._tried: tuple[list[int], Any] = ([], None)

    def _formed(self, values: Amounts) -> Any:
        form = next(self._forms)
        return values if form is list or isinstance(values, int) else np.array(values, dtype=form)

    def admit(self, row: int, token_ids: list[int], step: int | None = None, **options: Any) -> int | None:
        self.named = {row}
        if self.manager.host_tier is not None:
            # The oracle remembers no refusals: with new features a request is looked up again.
            options = {"mm_features": [], **options}
        if self._tried[0] is not token_ids:
            self._tried = token_ids, self._formed(token_ids)
        return self.batch.admit(row, self._tried[1], step=self._step(step), **admission(**options))

    def probe(self, row: int, token_ids: list[int], dp_shard: int | None = None, **attributes: Any) -> int:
        return self.batch.probe(row, self._formed(token_ids), **admission(dp_shard=dp_shard, **attributes))

    def new_step(self) -> int:
        self.steps.append(self.batch.new_step())
        return len(self.steps) - 1

    def _step(self, step: int | None) -> pagepool.StepResult | None:
        return None if step is None else self.steps[step]

    def plan(self, rows: list[int], num_tokens: Amounts = 1, num_drafts: Amounts = 0, step: int | None = None) -> Grown:
        self.named = set(rows)
        return self._noted(step, self.batch.plan(*map(self._formed, (rows, num_tokens, num_drafts)), step=self._step(step)))

    def step(self, rows: list[int], token_ids: list[int], step: int | None = None) -> Grown:
        self.named = set(rows)
        return self._noted(step, self.batch.step(*map(self._formed, (rows, token_ids)), step=self._step(step)))

    def _noted(self, step: int | None, result: pagepool.StepResult) -> Grown:
        """Return what the last call of a step gave, which lists the new pages of all calls."""
        if step is not None:
            assert result is self.steps[step]
        elif result.num_grown:
            self.steps.append(result)
        else:
            self.refused.append(result)
        grown, start = grown_of(result), self.nums_pages.get(id(result), 0)
        self.nums_pages[id(result)] = len(grown.page_ids)
        return grown._replace(page_ids=grown.page_ids[start:], rows=grown.rows[start:], groups=grown.groups[start:])

    def settle(self, step: int, token_ids: list[int] | None = None, counts: list[int] | None = None) -> list[int]:
        are_right = all(value >= 0 for value in [*(token_ids or ()), *(counts or ())])
        forms = [values if values is None or not are_right else self._formed(values) for values in (token_ids, counts)]
        places = self.batch.settle(self.steps[step], *forms)
        assert places.dtype == np.int32
        return places.tolist()

    def fail_step(self, step: int) -> list[int]:
        self.named = set(range(self.batch.num_tokens.size))
        return self.batch.settle(self.steps[step], failed=True).tolist()

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        self.batch.append(self._formed(rows), self._formed(token_ids))

    def trim(self, rows: list[int], num_tokens: Amounts) -> None:
        self.named = set(rows)
        self.batch.trim(self._formed(rows), self._formed(num_tokens))

    def release(self, rows: list[int], seconds: Any = None) -> None:
        self.named = set(rows)
        self.batch.release(self._formed(rows), seconds)

    def list_external(self) -> list[int]:
        return self.batch.num_external_tokens.tolist()

    def commit_external(self, row: int, num_tokens: int, is_last: bool = True) -> None:
        self.named = {row}
        self.batch.commit_external(row, num_tokens, is_last=is_last)

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
        by_row = (
            batch.is_admitted, batch.num_tokens, batch.num_computed_tokens, batch.num_cached_tokens, batch.num_ahead_tokens
        )  # fmt: skip
        assert batch.stays.dtype == np.int64
        assert batch.num_ahead_tokens.dtype == np.int32
        return BatchState(
            *(values.tolist() for values in by_row),
            number_as_seen(batch.stays.tolist(), self.seen),
            [StepState(bool(step.is_settled), step.rows.tolist()) for step in self.steps[-NUM_SEEN_STEPS:]],
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
