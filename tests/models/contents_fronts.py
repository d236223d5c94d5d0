"""The two fronts of a pool, the manager and a running batch. Each call is recorded in the books.

What a step will compute is a `Work`. A step that is not run fails: rows of a batch go back, and requests of the manager end.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
from admissions import admission
from contents_device import Content, Device, find_first_read, find_unread_pages, require
from contents_index import NULL_PAGE
from contents_request import Job, Write
from contents_states import StateBooks
from oracle import PREEMPTED, RUNNING
from pool_ranges import Shard
from settings import Group, Setting
from twin_engine import VOCABULARY
from twins import copies_of

import pagepool
from pagepool.errors import ArgumentError, MovesDueError, OutOfPagesError, RequestTooLargeError

NUM_ROWS = 4
Amounts = dict[Job, tuple[int, list[int], int]]  # new tokens, drafts and room behind them


@dataclass
class World:
    """One pool, and everything that belongs to it."""

    setting: Setting
    manager: Any
    books: StateBooks
    device: Device
    rng: Random
    counts: Counter[str]
    names: Iterator[str]  # of forks
    waiting: list[Job] = field(default_factory=list)
    features: Collection[str] = ()
    is_second: bool = False  # a step is in flight and has not run while another one is scheduled
    is_too_large: bool = False  # the last call was refused since the request can never fit
    moves: list[Callable[[], None]] = field(default_factory=list)  # taken, to be made before the next step
    late_moves: list[Callable[[], None]] = field(default_factory=list)  # before the one after it
    forks: list[tuple[Work, int]] = field(default_factory=list)  # whose drafters go on once copies are made, with their stays
    copied: set[int] = field(default_factory=set)  # pages that are copies, perhaps to be made yet
    preempt: Callable[[], Job | None] = lambda: None  # preempts some job, if there is any
    fronts: list[Any] = field(default_factory=list)
    store: Any = None  # behind the tier
    num_steps: int = 0  # for which moves were taken
    last_steps: Counter[int] = field(default_factory=Counter)  # the last one with moves of each caller

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs that hold pages."""
        return [job for front in self.fronts for job in front.jobs.values()]

    def draw_seconds(self) -> float | None:
        """Return when pages are wanted. Those that are never are not saved in a tier."""
        never = None if "tier" in self.features else math.inf
        return self.rng.choice((None, never, 0, 2, 60, 2.0 ** self.rng.uniform(0, 17)))

    def take_moves(self, takers: Sequence[Any] = ()) -> None:
        """Take the moves that are due, from the manager and from batches whose rows write states, or from other `takers`; they
        are made before the step that is being scheduled.
        """
        if not takers:
            takers = [self.manager, *(front.batch for front in self.fronts if self.books.state_ids and front.has_rows)]
        for taker in self.rng.sample(takers, len(takers)):
            self._take_moves(taker)
        moves = self.late_moves if self.is_second else self.moves
        for work, stay in self.forks:
            if work.job.front is not None and work.job.stay == stay:
                self.draft(work, lambda *draft: moves.append(partial(self.device.draft, *draft)))
        self.forks = []
        self.books.copies.clear()
        self.books.are_copies_due = self.books.is_between = False
        self.books.num_taken += 1
        self.counts["calls"] += 1

    def _take_moves(self, taker: Any) -> None:
        moves, due = self.late_moves if self.is_second else self.moves, taker.take_moves()
        if self.books.tier is not None:
            taken = self.books.tier.take(due, self.books.index, self.begins_step(taker))
            moves += [partial(self.books.tier.make, taken)] if taken else []
            if self.store is not None:
                self.store.absorb()
        self._take_writes(taker, due.writes)
        copies = copies_of(due.copies)
        destinations = [self.books.pools.record_of(destination, group_id) for _, destination, group_id in copies]
        moves.append(partial(self.device.copy, copies))
        self.copied.update(destinations)
        require(all(self.books.holders[page_id] for page_id in destinations), "a copy into a page that nobody holds", copies)
        require(len(set(destinations)) == len(destinations), "two copies into one page", copies)
        require(self.books.are_copies_due or not copies, "copies that nobody asked for", copies)
        self.counts["copies"] += len(copies)

    def begins_step(self, taker: Any) -> bool:
        """Whether a caller that takes moves begins a step of the tier: the first one to take those of the step does."""
        last, self.books.is_between, is_between = self.last_steps[id(taker)], False, self.books.is_between
        if is_between:
            return False
        is_next = last == self.num_steps
        self.num_steps += is_next
        self.last_steps[id(taker)] = self.num_steps
        return is_next

    def _take_writes(self, taker: Any, writes: Any) -> None:
        """Let the last works of jobs write their states."""
        [front] = [front for front in self.fronts if front.has_rows and front.batch is taker] or [None]
        names: Sequence[Any] = writes.request_ids if front is None else writes.rows.tolist()
        columns = writes.num_tokens.tolist(), writes.page_ids.tolist(), writes.group.tolist()
        for name, num_tokens, page_id, group_id in zip(names if len(writes) else (), *columns, strict=True):
            job = front.jobs[name] if front is not None else self._find_request(name)
            shard = self.books.find_shard(job.dp_shard) if front is not None else None
            write = self.books.take_write(job, self.books.pools.record_of(page_id, group_id), num_tokens, group_id, shard)
            work = [work for entry in job.front.plan for work in entry.works if work.job is job][-1]
            first = max(work.start + 1, work.start + work.num_transferred)
            require(first <= num_tokens <= work.stop, "a write of a state that the step does not have", job, num_tokens, first)
            work.writes.append(write)
        require(front is not None or writes.rows is None or not len(writes), "rows of requests", writes)
        self.counts["states written"] += len(writes)

    def _find_request(self, request_id: str) -> Job:
        fronts = [front for front in self.fronts if not front.has_rows]
        [job] = [job for front in fronts for job in front.jobs.values() if job.request_id == request_id]
        return job

    def draft(self, work: Work, write: Callable[..., None] | None = None, *, has_run: bool = True) -> None:
        """Let the drafter of a job `write` its values for tokens whose lookahead is known by now. Once steps have run, pages of
        states that were cached may be those of others.
        """
        job, hash_lookahead, write = work.job, self.setting.hash_lookahead, write or self.device.draft
        start, stop = job.num_drafted_tokens, min(work.stop, job.num_tokens - hash_lookahead)
        if not hash_lookahead or start >= stop:
            return
        histories = self.books.list_known(job, stop)
        for group_id, group in enumerate(self.setting.groups):
            if group.is_ring:
                continue
            if group.kind != "mamba":
                slots = work.find_slots(group_id, start, stop)
                write(group_id, slots, histories[start + hash_lookahead :])
            elif stop == work.stop:
                write(group_id, work.slots[group_id], histories[-1:])
        for each in dict.fromkeys([*job.writes, *work.writes]):
            if start < each.num_tokens <= stop and (not has_run or self.books.holds(work, each)):
                at = each.num_tokens + hash_lookahead
                write(each.group, self.slot_of(each), histories[at - 1 : at])
        job.num_drafted_tokens = stop

    def slot_of(self, write: Write) -> Any:
        """Return the page of a write as a slot."""
        return np.array([self.books.pools.id_of(write.page, write.group)], dtype=np.int32)

    def make_moves(self) -> None:
        """Make what was taken for the step that runs next, in order."""
        for make in self.moves:
            make()
        self.moves, self.late_moves = self.late_moves, []
        if not self.moves:
            self.copied.clear()

    def settle(self) -> None:
        """Take and make all copies and transfers, between two steps."""
        self.take_moves()
        self.make_moves()
        self.make_moves()

    def call(self, name: str, target: Any, *arguments: Any, **options: Any) -> Any:
        """Make a call, and count it."""
        self.counts["calls"] += 1
        self.counts[f"  {name}"] += 1
        self.is_too_large = False
        try:
            return getattr(target, name)(*arguments, **options)
        except RequestTooLargeError:  # of a step that is longer than a page, or in a shard
            self.is_too_large = True
            return target.plan([]) if name in ("plan", "step") else None

    def call_in_time(self, name: str, target: Any, *arguments: Any, **options: Any) -> Any:
        """Make a call, once the moves that are due are taken."""
        try:
            return self.call(name, target, *arguments, **options)
        except MovesDueError:
            is_due = self.books.are_copies_due or (self.books.tier is not None and self.books.tier.is_any_due)
            require(is_due or bool(self.books.due_writes), "no copies are due", name, arguments)
            self.books.is_between = True
            self.take_moves([target])
            self.counts["copies taken late"] += 1
            return self.call(name, target, *arguments, **options)


@dataclass
class Expected:
    """What a look-up is to find."""

    shard: range | Shard | None
    num_cached_tokens: int  # in the pool
    num_tokens: int  # with the tier
    may_load: bool = False  # whether there is room to load the rest

    @property
    def is_short(self) -> bool:
        """Whether the request is refused since there is no room to load what it hits."""
        return self.num_tokens > self.num_cached_tokens and not self.may_load


@dataclass(eq=False)
class Work:
    """Tokens of a job that a step computes, from `start` on; those of a transfer come first, drafts last."""

    job: Job
    start: int
    histories: list[int]  # of all tokens up to the last computed one
    num_room_tokens: int
    num_planned: int  # tokens that the step writes, drafts included
    num_before: int  # tokens computed before this step, and before the job's other steps in flight
    num_transferred: int = 0
    drafts: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)  # pages that were cached for it
    hits: frozenset[int] = frozenset()
    is_delayed: bool = False
    is_second: bool = False  # another step is in flight before it
    step: Any = None  # of a batch
    slots: list[Any] = field(default_factory=list)  # by group: those of tokens from `first_tokens` on; a state's page
    first_tokens: list[int] = field(default_factory=list)
    num_pages_before: list[int] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)  # of states

    @property
    def stop(self) -> int:
        return len(self.histories)

    def list_values(self, start: int, stop: int) -> list[int]:
        """Return what the device has of tokens once they are computed."""
        return self.job.list_values(self.histories, start, stop)

    def find_slots(self, group_id: int, start: int, stop: int) -> Any:
        """Return the slots of tokens, or the page of a state, as they were when the call returned."""
        first = self.first_tokens[group_id]
        return self.slots[group_id] if first < 0 else self.slots[group_id][start - first : stop - first]


@dataclass(eq=False)
class Entry:
    """A call of the schedule, with the works that it admitted or planned."""

    front: Any
    works: list[Work]

    def end_all(self) -> list[Job]:
        """End the jobs that still run, last first."""
        works = [work for work in self.works[::-1] if work.job.front is self.front]
        return [self.front.end(work.job, work.num_before) for work in works]


class Front(ABC):
    """Rows of a table, and the jobs in them."""

    caches_computed = False
    has_rows = False

    def __init__(self, world: World, tables: Any) -> None:
        self.world = world
        self.rng = world.rng
        self.setting = world.setting
        self.books = world.books
        self.tables = tables
        self.jobs: dict[int, Job] = {}  # by row
        self.plan: list[Entry] = []  # of the step; the simulation sets it
        self.max_num_drafts = self.count_drafts(0)

    def count_drafts(self, max_steps_ahead: int) -> int:
        """Return how many drafts rings take back from each of so many steps, and another one."""
        left = [group.page_size - group.span - max_steps_ahead for group in self.setting.groups if group.is_ring]
        return min([self.setting.max_model_len, *(max(0, num) // (max_steps_ahead + 1) for num in left)])

    def copy_of(self, job: Job) -> Job:
        """Return a job with the same computed tokens, and others behind those that are known."""
        target = replace(job, request_id=next(self.world.names), all_token_ids=list(job.all_token_ids))
        num_kept = max(job.num_computed_tokens, job.num_known_tokens)
        target.all_token_ids[num_kept:] = self.rng.choices(VOCABULARY, k=job.num_tokens - num_kept)
        target.share_serial(job)
        return target

    def records(self, page_ids: Iterable[Iterable[int]]) -> tuple[list[int], ...]:
        """Return the records of pages by group. The books know pages by these."""
        return self.books.pools.records_by_group(page_ids)

    def draw_seconds(self) -> float | None:
        """Return when what a job leaves is wanted, if that is said."""
        if "expectations" not in self.world.features:
            return None
        return self.world.draw_seconds()

    def free_rows(self) -> list[int]:
        return [row for row in range(NUM_ROWS) if row not in self.jobs]

    @abstractmethod
    def admit(self, job: Job, row: int, dp_shard: int | None) -> bool:
        """Start a waiting job; False if too few pages are free."""

    @abstractmethod
    def schedule(self) -> None:
        """Grow running jobs, except for those preempted meanwhile."""

    @abstractmethod
    def settle_writes(self, job: Job, num_final_tokens: int) -> None:
        """Record that states of a job that were written among final tokens were cached."""

    @abstractmethod
    def end(self, job: Job, num_computed_tokens: int | None = None) -> Job:
        """Release all pages of a job; with `num_computed_tokens`, later tokens that it cached are forgotten."""

    def map_slots(self, job: Job, group_id: int, positions: Sequence[int]) -> Any:
        """Return the slots of tokens; for a state, its page."""
        table = self.tables[group_id]
        if self.setting.groups[group_id].kind == "mamba":
            return table.page_table_cpu[job.row, :1].copy()
        group, places = self.setting.groups[group_id], np.asarray(positions, dtype=np.int32)
        places = places % group.page_size if group.is_ring else places
        return table.slot_mapping(np.full(len(places), job.row, dtype=np.int32), places, group.page_size)

    def start(self, job: Job, row: int) -> None:
        job.front, job.row, job.status = self, row, RUNNING
        self.jobs[row] = job

    def leave(self, job: Job, num_computed_tokens: int | None, num_last_tokens: int) -> Job:
        """Record that a job released its pages. States among the `num_last_tokens` tokens become checkpoints."""
        self.settle_writes(job, num_last_tokens)
        self.books.drop_writes(job, 0)
        if num_computed_tokens is not None:
            self.books.forget(job, num_computed_tokens)
        self.books.release(job)
        del self.jobs[job.row]
        job.front, job.num_computed_tokens, job.num_known_tokens, job.status, job.loading = None, 0, 0, PREEMPTED, None
        job.forked_lists, job.awaited_copies, job.load_number, job.num_settled_tokens = {}, 0, 0, 0
        if self.setting.has_reference_window and job.num_prompt_tokens is None and self.rng.random() < 0.7:
            job.num_prompt_tokens = job.prompt_end
        return job

    def fix_prompt(self, job: Job) -> None:
        """Fix where the prompt of a job ends that has no pages yet: it says so, or knows nothing else."""
        if self.setting.has_reference_window:
            job.prompt_end = job.num_tokens if job.num_prompt_tokens is None else min(job.num_tokens, job.num_prompt_tokens)

    @staticmethod
    def has_pages(job: Job, group: Group, pages: Sequence[int], num_computed_tokens: int) -> bool:
        """Whether all these pages of a job are held that tokens from `num_computed_tokens` on attend to, or are written to."""
        unread = range(0) if group.is_state else find_unread_pages(group, num_computed_tokens, job.prompt_end)
        return NULL_PAGE not in [*pages[: unread.start], *pages[unread.stop :]]

    def list_due(self) -> list[Job]:
        """Return most of the jobs not yet scheduled in this step, in random order."""
        planned = {work.job for entry in self.plan for work in entry.works}
        due = [job for job in self.list_running() if job not in planned and self.rng.random() < 0.9]
        return self.rng.sample(due, len(due))

    def list_running(self) -> list[Job]:
        """Return the jobs that wait for no tokens from elsewhere."""
        return [job for job in self.jobs.values() if not job.loading]

    def draw_count(self, num_left: int) -> int:
        return num_left if self.rng.random() < 0.6 else self.rng.randint(1, num_left)

    def draw_drafts(self, job: Job) -> list[int]:
        """Return draft tokens; none if there is a recurrent state, which would include the rejected ones."""
        most = min(3, self.setting.max_model_len - job.num_tokens, self.max_num_drafts)
        if self.setting.has_state or most <= 0 or self.rng.random() < 0.6:
            return []
        return self.rng.choices(VOCABULARY, k=self.rng.randint(1, most))

    def note(self, job: Job, start: int, stop: int, drafts: Sequence[int] = (), num_ahead: int = 0) -> Work:
        """Return the work of a call that is about to be made, with the state of the books before it."""
        histories = job.list_histories(min(stop, job.num_tokens)) + job.list_draft_histories(drafts)
        num_room_tokens = min(len(histories) + num_ahead, self.setting.max_model_len)
        in_flight = [work.num_before for entry in self.plan for work in entry.works if work.job is job]
        num_planned = num_room_tokens if len(histories) >= job.num_tokens else len(histories)
        work = Work(job, start, histories, num_room_tokens, num_planned, [*in_flight, start][0], drafts=list(drafts))
        work.num_pages_before = [len(pages) for pages in job.pages]
        work.is_second = self.world.is_second
        return work

    def finish(self, work: Work, histories: Sequence[int]) -> None:
        """Record the slots of a call's tokens, and what it cached: full pages of these histories."""
        self.books.require_room(work.job, work.num_room_tokens)
        work.job.rings.write(work.start)
        work.job.rings.write(work.num_planned)
        self.find_slots(work)
        if not work.is_delayed and not self.caches_computed:
            work.made = self.books.enter(work.job, histories[: work.job.num_tokens])

    def find_key(self, job: Job, num_tokens: int) -> int:
        """Return the key of a page that ends after so many tokens."""
        registry = self.world.manager.registry
        chain = registry.hash_apart(job, num_tokens)
        return chain[num_tokens // registry.rules.hash_page_size - 1]

    def find_slots(self, work: Work) -> None:
        """Record the slots of the tokens of a step, of those to which these attend, and of those that drafters may lack."""
        for group_id, group in enumerate(self.setting.groups):
            first = find_first_read(group, work.start)
            if not group.is_state:
                first = min(first, max(0, work.start - self.setting.hash_lookahead))
            first = first if group.kind != "mamba" else -1
            work.slots.append(self.map_slots(work.job, group_id, range(max(0, first), work.num_room_tokens)))
            work.first_tokens.append(first)

    def draft_forked(self, job: Job) -> None:
        """Let the drafter of a fork write its values for the last tokens, into copies."""
        work = self.note(job, job.num_computed_tokens, job.num_computed_tokens)
        self.find_slots(work)
        self.world.forks.append((work, job.stay))

    def expect(self, job: Job, shard: range | Shard | None, may_hit: bool, num_reserved: int = 0) -> Expected:
        """Return what a look-up is to find."""
        if not may_hit:
            return Expected(shard, 0, 0)
        length = self.books.find_hit_length(job, shard)
        tier = self.books.tier
        if tier is None or not tier.entries:
            return Expected(shard, length, length)
        entries = tier.read_entries(self.world.manager._store)
        require(entries.items() <= tier.entries.items(), "entries of the tier", entries, tier.entries)
        num_tokens = self.books.find_hit_length(job, shard, set(entries.values()))
        may_load = num_tokens > length and self.books.may_load(job, num_tokens, shard, num_reserved)
        return Expected(shard, length, num_tokens, may_load)

    def look_up(self, job: Job, num_hit_tokens: int, expected: Expected, own_ids: Collection[int] = ()) -> None:
        """Compare a look-up with the books."""
        length = expected.num_cached_tokens if expected.is_short else expected.num_tokens
        require(num_hit_tokens == length, "hit tokens", job, f"got {num_hit_tokens}, cached are {length}", expected)
        if num_hit_tokens > expected.num_cached_tokens:
            self.books.find_loads(job, num_hit_tokens, expected.shard, own_ids)
        self.world.counts["look-ups"] += 1
        self.world.counts["hits"] += num_hit_tokens > 0
        self.world.counts["hit tokens"] += num_hit_tokens
        self.world.counts["hits of the tier"] += num_hit_tokens > expected.num_cached_tokens

    def require_refusal(self, job: Job, expected: Expected, num_tokens: int, num_reserved: int, hint: int | None) -> None:
        """Raise if a request was refused although there is room."""
        if not expected.is_short:
            self.books.require_shortage(job, num_tokens, num_reserved, hint)

    def receive(self, job: Job, num_tokens: int, needs_all: bool) -> None:
        """Let a job go on whose transfer has brought its tokens up to `num_tokens`: unless it `needs_all`, only those to which
        later tokens attend.
        """
        work, job.loading = job.loading, None
        if num_tokens == work.stop or (not self.books.has_state and (needs_all or self.rng.random() < 0.5)):
            self.commit(job, num_tokens - work.start, needs_all)
            return
        self.world.counts["failed transfers from elsewhere"] += 1
        expected = 0 if self.books.has_state else num_tokens
        num_computed_tokens = self.fail(job, num_tokens - work.start)
        require(num_computed_tokens == expected, "tokens that came", job, num_computed_tokens, expected)

    @abstractmethod
    def commit(self, job: Job, num_came: int, needs_all: bool) -> None:
        """Count tokens that came from elsewhere as computed."""

    @abstractmethod
    def fail(self, job: Job, num_came: int) -> int:
        """Count no more than these tokens as computed; return the number of computed ones."""

    @abstractmethod
    def rewind(self, failed: Any, wrong: set[int]) -> list[Job]:
        """Let jobs compute again what they computed with pages that failed to load; return those that cannot, and run still."""

    def call(self, name: str, target: Any, *arguments: Any, **options: Any) -> Any:
        return self.world.call(name, target, *arguments, **options)


class ManagerFront(Front):
    """Requests of the manager, with a table that the engine fills from the pages that it gets."""

    @property
    def manager(self) -> Any:
        return self.world.manager

    @property
    def caches_computed(self) -> bool:  # type: ignore[override]  # of this kind alone
        return self.manager._caches_computed

    def enter_computed(self, job: Job, num_tokens: int) -> None:
        """Record that a job cached what was computed of its first tokens, and compare that with the device."""
        if not self.caches_computed and not self.books.hash_lookahead:
            return
        entered = self.books.enter_first(job, job.list_histories(num_tokens), self.find_key)
        for page_id in set(entered) - self.world.copied:
            self.world.device.compare_page(page_id, self.books.index.entries[page_id].content)
        self.world.counts["pages cached once computed"] += len(entered)

    def admit(self, job: Job, row: int, dp_shard: int | None) -> bool:
        self.fix_prompt(job)
        placement = self._placement(dp_shard)
        expected = self.expect(job, self.books.find_shard(dp_shard), not job.sampling_params)
        hits, num_hit_tokens = self.call("get_computed_pages", self.manager, job, **placement)
        self.look_up(job, num_hit_tokens, expected)
        num_transferred, num_new = self._divide(job, num_hit_tokens)
        options = self._options(placement)
        if num_transferred and num_new == 0:
            options["delay_cache_pages"] = True
        num_ahead = options.get("num_lookahead_tokens", 0)
        added = self.call(
            "allocate_slots",
            self.manager,
            job,
            num_new,
            num_hit_tokens,
            hits if num_hit_tokens or self.rng.random() < 0.5 else None,
            num_external_computed_tokens=num_transferred,
            **options,
        )
        if added is None:
            num_tokens = min(num_hit_tokens + num_transferred + num_new + num_ahead, self.setting.max_model_len)
            self.require_refusal(job, expected, num_tokens, options.get("num_reserved_pages", 0), dp_shard)
            return False
        found, new_ids = self.records(hits.get_page_ids()), self.records(added.get_page_ids())
        hit_ids = self.books.check_state_hits(job, found, num_hit_tokens, self.books.find_shard(dp_shard))
        shard = self.books.find_shard_of([page_id for ids in found for page_id in ids], dp_shard)
        self.books.attach(job, hit_ids, num_hit_tokens, self.books.find_shard(dp_shard))
        self.start(job, row)
        work = self.note(job, num_hit_tokens, num_hit_tokens + num_transferred + num_new, num_ahead=num_ahead)
        work.hits = frozenset(page_id for pages in job.pages for page_id in pages if page_id != NULL_PAGE)
        work.num_transferred, work.is_delayed = num_transferred, "delay_cache_pages" in options
        self.books.note_state_hits(job, new_ids, num_hit_tokens, self.books.find_shard(dp_shard))
        self.books.take(job, new_ids, shard)
        self.books.find_writes(job, work.stop)
        self._show(job)
        job.num_computed_tokens = num_hit_tokens
        self.finish(work, work.histories[: work.job.num_tokens])
        if num_transferred and num_new == 0:
            job.loading = work
        self.plan.append(Entry(self, [work]))
        return True

    def _divide(self, job: Job, num_hit_tokens: int) -> tuple[int, int]:
        """Return the number of tokens that a transfer brings, and the number computed."""
        num_left = job.num_tokens - num_hit_tokens
        if num_left > 1 and self.rng.random() < 0.2:
            num_transferred = self.rng.randint(1, num_left - 1)
            return num_transferred, 0 if self.rng.random() < 0.5 else self.rng.randint(1, num_left - num_transferred)
        return 0, self.draw_count(num_left)

    def _placement(self, dp_shard: int | None) -> dict[str, Any]:
        size = self.setting.data_parallel_size
        return {} if size is None else {"dp_shard_hint": dp_shard, "data_parallel_size": size}

    def _options(self, placement: dict[str, Any], num_drafts: int = 0) -> dict[str, Any]:
        rng, options = self.rng, dict(placement)
        if rng.random() < 0.2:
            options["num_lookahead_tokens"] = min(rng.randint(1, self.setting.page_size + 1), self.max_num_drafts - num_drafts)
        if rng.random() < 0.2:
            options["delay_cache_pages"] = True
        if rng.random() < 0.05:
            options["num_reserved_pages"] = rng.randint(1, 4)
        return options

    def schedule(self) -> None:
        for job in self.list_due():
            while job.front is self and not self.grow(job):
                if self.rng.random() < 0.3 or self.world.preempt() is None:
                    break

    def grow(self, job: Job) -> bool:
        """Schedule tokens of a running job; those after the last known one are drafts."""
        num_left = job.num_tokens - job.num_computed_tokens
        num_new = self.draw_count(num_left)
        drafts = self.draw_drafts(job) if num_new == num_left else []
        dp_shard = self.rng.choice((None, 0, 1, 2))
        options = self._options(self._placement(dp_shard), len(drafts))
        num_ahead = options.get("num_lookahead_tokens", 0)
        start = job.num_computed_tokens
        work = self.note(job, start, start + num_new, drafts, num_ahead)
        work.is_delayed = "delay_cache_pages" in options
        added = self.world.call_in_time("allocate_slots", self.manager, job, num_new + len(drafts), **options)
        self.books.rewind(job, start)
        if not self.world.is_too_large:
            self.settle_writes(job, start if self.caches_computed or not work.is_delayed else 0)
            self.books.drop_writes(job, start)
        if not self.world.is_too_large and (self.caches_computed or not work.is_delayed):
            self.enter_computed(job, start)
        self._skip(job, start)
        if added is None:
            return False
        shard = self.books.find_shard_of([page_id for pages in job.pages for page_id in pages], dp_shard)
        new_ids = self.records(added.get_page_ids())
        if not any(job.pages):  # it went back to its start, and is admitted again
            self.fix_prompt(job)
            job.boundaries = self.books.list_boundaries(job)
        self.books.take(job, new_ids, shard)
        self.books.find_writes(job, start + num_new)
        self._show(job)
        self.finish(work, work.histories[: work.job.num_tokens])
        self.plan.append(Entry(self, [work]))
        return True

    def _show(self, job: Job) -> None:
        """Fill a job's row of the tables with the ids of its pages."""
        self.tables.add_row(list(self.books.pools.ids_by_group(job.pages)), job.row)

    def _skip(self, job: Job, num_computed_tokens: int) -> None:
        self.books.skipped.clear()
        held = self.records(self.manager.get_page_ids(job.request_id))
        self.books.skip(job, [ids[: len(pages)] for ids, pages in zip(held, job.pages, strict=True)], num_computed_tokens)

    def fork(self, job: Job, rows: list[int]) -> list[Job]:
        """Let new jobs go on where a job is; as many as there are pages for."""
        forked: list[Job] = []
        for row in rows:
            target = self.copy_of(job)
            pages = self.world.call_in_time("fork", self.manager, job, target)
            if pages is None:
                break
            self.books.fork(job, target, self.records(pages.get_page_ids()), None)
            self.start(target, row)
            self._show(target)
            self.draft_forked(target)
            forked.append(target)
        return forked

    def commit(self, job: Job, num_came: int, needs_all: bool) -> None:
        num_computed_tokens = job.num_computed_tokens + num_came
        if needs_all:
            self.cache(job, num_computed_tokens)
        else:
            self.call("commit_external", self.manager, job, num_came)
            self.books.commit(job, num_computed_tokens)
            self.settle_writes(job, num_computed_tokens)
            self._show(job)
        job.num_computed_tokens = num_computed_tokens

    def fail(self, job: Job, num_came: int) -> int:
        num_computed_tokens: int = self.call("fail_external", self.manager, job, num_came)
        if self.books.has_state:
            self.tables.clear_row(job.row)
            self.world.waiting.append(self.leave(job, None, 0))
        else:
            self.books.fail(job, num_computed_tokens)
            self._show(job)
            job.num_computed_tokens = num_computed_tokens
        return num_computed_tokens

    def rewind(self, failed: Any, wrong: set[int]) -> list[Job]:
        return [job for job in self.jobs.values() if not self._rewind(job, failed, wrong)]

    def _rewind(self, job: Job, failed: Any, wrong: set[int]) -> bool:
        """Let a job go back before its first wrong token, into pages of its own; False if it cannot."""
        has_copies = self.books.awaits_copies(job) and self.rng.random() < 0.5
        if self.books.are_copies_due and not has_copies:
            self.world.take_moves()
        restart = self.call("find_wrong_token", self.manager, job, failed)
        first = self.books.find_wrong_token(job, failed.number, wrong)
        expected = None if first is None else self.books.find_restart(job, first)
        require(restart == expected, "wrong tokens", job, restart, expected)
        if restart is None:
            return True
        groups = zip(self.setting.groups, job.pages, strict=True)
        if not has_copies and all(self.has_pages(job, group, pages, restart) for group, pages in groups):
            self.books.cut(job, self.setting.max_model_len, restart)
            if not any(job.pages):
                job.load_number = 0  # of a request that holds nothing the manager knows nothing
            self._show(job)
            self.world.counts["requests that went back"] += 1
        held = self.records(self.manager.get_page_ids(job.request_id))
        require(list(held) == job.pages, "a request that goes back holds other pages", job, held, job.pages)
        return not job.loading and (restart >= job.num_computed_tokens or self.go_back(job, restart))

    def cache(self, job: Job, num_computed_tokens: int) -> None:
        """Cache pages that were computed and delayed, before or after they are counted."""
        if self.rng.random() < 0.5:
            job.num_computed_tokens = num_computed_tokens
        self.call("cache_pages", self.manager, job, num_computed_tokens)
        if self.setting.enable_caching:
            self.books.rewind(job, job.num_computed_tokens)
            self.books.enter(job, job.list_histories(num_computed_tokens))
            self.settle_writes(job, num_computed_tokens)
        job.num_computed_tokens = num_computed_tokens

    def settle_writes(self, job: Job, num_final_tokens: int) -> None:
        num_final = min(num_final_tokens, job.num_tokens - self.books.hash_lookahead)
        self.books.settle_writes(job, num_final, self.find_key, None, is_row=False)

    def end(self, job: Job, num_computed_tokens: int | None = None) -> Job:
        if num_computed_tokens is None:
            self.call("free", self.manager, job, seconds=self.draw_seconds())
        else:
            self.call("free", self.manager, job, num_computed_tokens=num_computed_tokens)
        num_final = min(num for num in (job.num_computed_tokens, num_computed_tokens) if num is not None)
        self.enter_computed(job, num_final)
        self.tables.clear_row(job.row)
        return self.leave(job, num_computed_tokens, num_final)

    def go_back(self, job: Job, num_computed_tokens: int) -> bool:
        """Let tokens be computed again; False if pages that they need are gone."""
        num_computed_tokens = min(job.num_computed_tokens, num_computed_tokens)
        for group, pages in zip(self.setting.groups, job.pages, strict=True):
            if group.kind == "mamba" or not self.has_pages(job, group, pages, num_computed_tokens):
                return False
        if not job.rings.have(num_computed_tokens):
            return False
        job.num_computed_tokens = num_computed_tokens
        return True


class BatchFront(Front):
    """Rows of a running batch, which fills the table itself."""

    has_rows = True

    def __init__(self, world: World, tables: Any) -> None:
        super().__init__(world, tables)
        size, caches = self.setting.data_parallel_size, world.manager.caches
        self.depth = self.rng.choice((0, 1))
        self.caches_computed = caches == "computed"
        options = {"data_parallel_size": size, "max_steps_ahead": self.depth}
        self.max_num_drafts = self.count_drafts(self.depth)
        self.batch = pagepool.RunningBatch(world.manager, tables, **options)
        self.steps: list[Any] = []  # those being scheduled, or in flight
        self.left: dict[int, Content] = {}  # by page: cached, which these steps fill for rows that have ended
        has_windows = any(group.has_window for group in self.setting.groups)  # a row is settled before it takes pages
        self.is_settled_first = (
            has_windows or self.caches_computed or self.setting.hash_lookahead > 0 or bool(self.books.state_ids)
        )

    def begin_step(self) -> None:
        """Begin a step: the next calls add to it."""
        if not self.steps:
            self.left.clear()
        self.steps.append(self.batch.new_step())

    def admit(self, job: Job, row: int, dp_shard: int | None) -> bool:
        self.fix_prompt(job)
        options = self._options(job, dp_shard)
        shard, num_reserved = self.books.find_shard(dp_shard), options.get("num_reserved_pages", 0)
        num_ahead = options.get("num_drafts", 0)
        expected = self.expect(job, shard, options["look_up"], num_reserved)
        num_hit_tokens = self.call("admit", self.batch, row, job.all_token_ids, step=self.steps[-1], **admission(**options))
        if num_hit_tokens is None:
            if expected.may_load:
                self.books.find_loads(job, expected.num_tokens, shard, ())
            num_tokens = min(job.num_tokens + num_ahead, self.setting.max_model_len)
            self.require_refusal(job, expected, num_tokens, num_reserved, dp_shard)
            return False
        num_external = int(self.batch.num_external_tokens[row])
        most = min(options.get("num_external_tokens", 0), job.num_tokens - 1 - num_hit_tokens)
        require(num_external == most, "tokens from elsewhere", job, num_external, most)
        stop = num_hit_tokens + num_external if num_external else int(self.batch.num_computed_tokens[row])
        held = self.records(self.batch.get_page_ids(row))
        nums_hits = [0 if group.is_state else num_hit_tokens // group.page_size for group in self.setting.groups]
        hits = [ids[:num] for ids, num in zip(held, nums_hits, strict=True)]
        new_ids = [ids[num:] for ids, num in zip(held, nums_hits, strict=True)]
        self.look_up(job, num_hit_tokens, expected, {page_id for ids in new_ids for page_id in ids})
        self.books.attach(job, hits, num_hit_tokens, shard)
        self.start(job, row)
        job.num_known_tokens, job.num_computed_tokens, job.dp_shard = job.num_tokens, num_hit_tokens, dp_shard
        job.num_settled_tokens = num_hit_tokens
        num_reserved_slots = job.num_tokens - stop if options.get("reserve") else 0
        work = self.note(job, num_hit_tokens, stop, num_ahead=num_reserved_slots + num_ahead)
        work.hits = frozenset(page_id for pages in job.pages for page_id in pages if page_id != NULL_PAGE)
        self.books.note_state_hits(job, new_ids, num_hit_tokens, shard)
        self.books.take(job, new_ids, shard)
        self.books.find_writes(job, stop)
        work.is_delayed, work.num_transferred, work.step = num_external > 0, num_external, self.steps[-1]
        self.finish(work, work.histories)
        if num_external:
            job.loading = work
        self.plan.append(Entry(self, [work]))
        return True

    def _options(self, job: Job, dp_shard: int | None) -> dict[str, Any]:
        rng, options = self.rng, {"look_up": not job.sampling_params, "is_preempted": job.status == PREEMPTED}
        if job.cache_salt is not None or job.lora_id is not None or job.mm_features:
            options |= {"cache_salt": job.cache_salt, "lora_id": job.lora_id, "mm_features": job.mm_features}
        if job.resume_at:
            options["resume_at"] = job.resume_at
        named = ("session_id", "tenant", "num_prompt_tokens")
        options |= {name: value for name in named if (value := getattr(job, name)) is not None}
        if rng.random() < 0.4:
            options["num_tokens"] = rng.randint(1, job.num_tokens)
        if rng.random() < 0.3:
            options["max_num_new_tokens"] = rng.randint(1, job.num_tokens)
        if rng.random() < 0.2:
            options["num_drafts"] = min(rng.randint(1, self.setting.page_size + 1), self.max_num_drafts)
        if rng.random() < 0.15:
            options["reserve"] = "prompt"
        if rng.random() < 0.05:
            options["num_reserved_pages"] = rng.randint(1, 4)
        if self.setting.data_parallel_size is not None:
            options["dp_shard"] = dp_shard
        if "external" in self.world.features and rng.random() < 0.3:
            options["num_external_tokens"] = rng.choice((rng.randint(1, job.num_tokens), job.num_tokens, 2**40))
        return options

    def schedule(self) -> None:
        steps, grows = [], []
        for job in self.list_due():
            is_step = job.num_tokens == job.num_known_tokens + 1 == job.num_computed_tokens + 1
            (steps if is_step and self.rng.random() < 0.7 else grows).append(job)
        calls = [lambda: self._step(steps), lambda: self._grow(grows)]
        for call in self.rng.sample(calls, 2):
            call()

    def schedule_next(self) -> None:
        """Plan rows that know more tokens once more, before the step in flight has run."""
        self.begin_step()
        self._grow([job for job in self.list_running() if self.rng.random() < 0.5], may_draft=False)

    def _step(self, jobs: list[Job]) -> None:
        """Decode a token of each row."""

        def call(jobs: list[Job]) -> tuple[Any, list[Work]]:
            works = [self.note(job, job.num_computed_tokens, job.num_tokens) for job in jobs]
            tokens = [job.all_token_ids[-1] for job in jobs]
            return self._call("step", [job.row for job in jobs], tokens, self.steps[-1]), works

        for work in self._persist(jobs, call):
            work.job.num_known_tokens += 1

    def _grow(self, jobs: list[Job], may_draft: bool = True) -> None:
        """Append tokens to rows, and plan some, with drafts and room behind them."""
        amounts: Amounts = {}
        for job in [job for job in jobs if job.front is self]:
            left = job.num_tokens - int(self.batch.num_computed_tokens[job.row])
            if left <= 0:
                continue
            num_new = self.draw_count(left)
            drafts = self.draw_drafts(job) if num_new == left and may_draft else []
            num_ahead = min(self.rng.choice((0, 0, 0, 1, 5)), self.max_num_drafts - len(drafts))
            amounts[job] = num_new, drafts, num_ahead * may_draft
            told = job.all_token_ids[job.num_known_tokens :]
            if told:
                self.call("append", self.batch, [job.row] * len(told), told)
            job.num_known_tokens = job.num_tokens

        def call(jobs: list[Job]) -> tuple[Any, list[Work]]:
            works, nums_new, nums_drafts = [], [], []
            for job in jobs:
                num_new, drafts, num_ahead = amounts[job]
                start = int(self.batch.num_computed_tokens[job.row])
                works.append(self.note(job, start, start + num_new, drafts, num_ahead))
                nums_new.append(num_new)
                nums_drafts.append(len(drafts) + num_ahead)
            return self._call("plan", [job.row for job in jobs], nums_new, nums_drafts, self.steps[-1]), works

        self._persist(list(amounts), call)

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.world.call_in_time(name, self.batch, *arguments)

    def _persist(self, jobs: list[Job], call: Callable[[list[Job]], tuple[Any, list[Work]]]) -> list[Work]:
        """Call for the jobs; if one does not fit, preempt any job and call again for the rest, or give up."""
        done: list[Work] = []
        while jobs := [job for job in jobs if job.front is self]:
            num_listed = len(self.steps[-1].new_page_ids)
            result, works = call(jobs)
            self._book(result, works, num_listed if result is self.steps[-1] else 0)
            grown = works[: result.num_grown]
            done += grown
            if grown:
                self.plan.append(Entry(self, grown))
            jobs = jobs[result.num_grown :]
            if not jobs or self.rng.random() < 0.3 or self.world.preempt() is None:
                break
        return done

    def _book(self, result: Any, works: list[Work], num_listed: int) -> None:
        """Record what a call did to the rows, in order, and to the first that did not fit. Pages of earlier calls of the step
        are listed before its own.
        """
        added: dict[int, list[list[int]]] = {work.job.row: [[] for _ in self.setting.groups] for work in works}
        columns = result.new_page_rows, result.new_page_groups, result.new_page_ids
        for row, group_id, page_id in zip(*(ids[num_listed:].tolist() for ids in columns), strict=True):
            added[row][group_id].append(self.books.pools.record_of(page_id, group_id))
        self.books.skipped.clear()
        for work in works[: result.num_grown + 1]:
            job = work.job
            held = self.records(self.batch.get_page_ids(job.row))
            if self.is_settled_first and not self.world.is_too_large:
                num_final = work.num_before if self.caches_computed else work.start
                self.settle_writes(job, num_final, job.num_tokens)
                self.books.enter_first(job, job.list_histories(num_final), self.find_key)
            self.books.skip(job, [ids[: len(pages)] for ids, pages in zip(held, job.pages, strict=True)], work.start)
            self.books.take(job, added[job.row], self.books.find_shard(job.dp_shard))
            if work in works[: result.num_grown]:
                self.books.pass_over(job, work.stop)
                job.num_settled_tokens, work.step = work.num_before, self.steps[-1]
            require([list(ids) for ids in held] == job.pages, "a row holds other pages than was told", job, held, job.pages)
        self.books.find_writes(None)
        for work in works[: result.num_grown]:
            self.finish(work, work.histories)

    def settle_writes(self, job: Job, num_final_tokens: int, num_known_tokens: int | None = None) -> None:
        num_known = job.num_known_tokens if num_known_tokens is None else num_known_tokens
        num_final = min(num_final_tokens, num_known - self.books.hash_lookahead)
        self.books.settle_writes(job, num_final, self.find_key, self.books.find_shard(job.dp_shard), is_row=True)

    # Steps that end, or fail.

    def list_works(self, step: Any) -> list[Work]:
        """Return the works of a step by its rows."""
        works = [work for entry in self.plan if entry.front is self for work in entry.works if work.step is step]
        by_row = {work.job.row: work for work in works if not work.is_delayed}
        return [by_row[row] for row in step.rows.tolist()]

    def settle(self, cuts: Collection[Job], sample: Callable[[Job], int | None]) -> list[Job]:
        """Settle the steps that have run, and return the jobs that end. Tokens are told now, or later by `step` and `append`.
        Jobs that have lost tokens are cut already.
        """
        ended: list[Job] = []
        is_each_settled = self.depth > 0 or "lists" in self.world.features  # a ring of inputs waits for all steps
        for step in self.steps:
            works = self.list_works(step)
            gone = [work.job for work in works if work.job.front is not self and work.job not in cuts]
            told = {work: self._draw_told(work, sample, ended) for work in works if work.job not in [*cuts, *gone]}
            tokens = [token for tokens in told.values() for token in tokens]
            is_ahead = any(int(self.batch.num_ahead_tokens[work.job.row]) for work in told)
            if len(step) and (tokens or is_ahead or is_each_settled or self.rng.random() < 0.6):
                counts = [len(told.get(work, ())) for work in works]
                places = self.call("settle", self.batch, step, tokens, counts).tolist()
                expected = [-1 if work.job in gone else work.job.row for work in works]
                is_right = [
                    place in (row, -1) if work.job in cuts else place == row
                    for place, row, work in zip(places, expected, works, strict=True)
                ]
                require(all(is_right), "places", places, expected)
            for work, tokens in told.items():
                self._end_work(work, tokens, step.is_settled)
            for job in [work.job for work in works if work.job in cuts and work.job.front is self and step.is_settled]:
                self._enter_settled(job)
        self.steps.clear()
        return ended

    def _draw_told(self, work: Work, sample: Callable[[Job], int | None], ended: list[Job]) -> list[int]:
        """Let a job go on with accepted drafts and a sampled token, unless it ends; return the tokens that `settle` tells."""
        job, num_accepted = work.job, self.rng.randint(0, len(work.drafts))
        if work.stop - len(work.drafts) < job.num_known_tokens:
            return []
        told = work.drafts[:num_accepted]
        job.all_token_ids.extend(told)
        self.world.draft(replace(work, histories=work.histories[: job.num_tokens]))
        token = sample(job)
        if token is None:
            ended.append(job)
        else:
            job.all_token_ids.append(token)
            self.world.draft(replace(work, histories=work.histories[: job.num_tokens - 1]))
            told = [*told, token] if told or self.rng.random() < 0.5 else []
        return told

    def _end_work(self, work: Work, told: Sequence[int], is_settled: bool) -> None:
        """Count what a work has computed, and what its row was told, and cache it if its step is settled."""
        job = work.job
        job.num_computed_tokens = work.stop - len(work.drafts) + max(0, len(told) - 1)
        job.num_known_tokens += len(told)
        if is_settled:
            self._enter_settled(job)

    def _enter_settled(self, job: Job) -> None:
        """Cache what a job has computed, once the steps that did are settled."""
        job.num_settled_tokens = job.num_computed_tokens
        self.books.enter_first(job, job.list_histories(job.num_computed_tokens), self.find_key, job.num_known_tokens)
        self.settle_writes(job, job.num_computed_tokens)

    def list_unfilled(self, job: Job) -> list[int]:
        """Return the pages of a job that the steps in flight fill, states included."""
        start = min(work.start for step in self.steps for work in self.list_works(step) if work.job is job)
        states = [page_id for i in self.books.state_ids for page_id in job.pages[i]]
        return [*self.books.list_behind(job, start), *states]

    def fail_steps(self) -> list[Job]:
        """Let the steps of the schedule fail; return the jobs whose rows cannot go back."""
        steps = [step for step in self.steps if len(step)]
        self.steps.clear()
        if not steps:
            return []
        works = [work for step in steps for work in self.list_works(step)]
        starts: dict[Job, int] = {}
        for work in [work for work in works if work.job.front is self]:
            starts.setdefault(work.job, work.start)
        lost = {page_id for job, start in starts.items() for page_id in self.books.list_behind(job, start)}
        lost_states = self.books.list_lost(works)
        lost |= {page_id for page_id, content in lost_states if self.books.index.content_of(page_id) == content}
        lost |= {page_id for page_id, content in self.left.items() if self.books.index.content_of(page_id) == content}
        released = self.call("settle", self.batch, steps[0], failed=True).tolist()
        for step in steps[1:]:
            self.call("settle", self.batch, step)
        is_hit = {
            job: min(starts.get(job, sys.maxsize), self.books.find_first(job, lost, starts.get(job)))
            for job in self.jobs.values()
        }
        contents = {content for _, content in lost_states}
        for job in [job for job, first in is_hit.items() if first == sys.maxsize and self.books.has_hit_state(job, contents)]:
            is_hit[job] = 0
        self.books.lose(lost, contents)
        ended = []
        for row, job in sorted(self.jobs.items()):
            first = is_hit[job]
            if row in released:
                require(first < sys.maxsize, "a row is released that no failed step concerns", job)
                is_back = (first == 0 or not self.setting.has_state) and not self._sets_back_state(
                    job, first, first, job.rings.num_written
                )
                is_back = (
                    is_back
                    and not job.loading
                    and self.books.tier is None
                    and not any(group.has_window for group in self.setting.groups)
                )
                require(not is_back, "a row that can go back is released", job, first)
                ended.append(self.leave(job, None, 0))
            elif first < sys.maxsize:
                require(not self.setting.has_state or first == 0, "a state went back", job, first)
                job.num_known_tokens = int(self.batch.num_tokens[row])
                job.num_computed_tokens = job.num_settled_tokens = int(self.batch.num_computed_tokens[row])
                require(job.num_computed_tokens <= first, "a row that does not go back", job, first)
                self.books.set_back(job, self.records(self.batch.get_page_ids(row)), job.num_computed_tokens)
        return ended

    def cut(self, job: Job, num_tokens: int) -> None:
        """Let a row forget tokens; some earlier tokens may need recomputation."""
        self._call("trim", [job.row], num_tokens)
        changed = max(0, num_tokens - self.books.hash_lookahead) if num_tokens < job.num_known_tokens else num_tokens
        if changed < job.num_computed_tokens:
            is_back = self._sets_back_state(job, num_tokens, changed, job.num_computed_tokens)
            require(not is_back, "a state went back", job, num_tokens)
            job.num_computed_tokens = self.books.cut(job, num_tokens, min(job.num_computed_tokens, num_tokens), changed)
            job.num_settled_tokens = min(job.num_settled_tokens, job.num_computed_tokens)
        job.num_known_tokens = num_tokens
        if self.setting.has_reference_window:
            job.prompt_end = min(job.prompt_end, num_tokens)
        counts = int(self.batch.num_tokens[job.row]), int(self.batch.num_computed_tokens[job.row])
        require(counts == (num_tokens, job.num_computed_tokens), "a row after trim", job, counts, job.num_computed_tokens)

    def end(self, job: Job, num_computed_tokens: int | None = None) -> Job:
        if num_computed_tokens is not None and not job.loading:
            self.cut(job, 0)  # what it has computed may be wrong
        num_last_tokens = int(self.batch.num_computed_tokens[job.row])
        num_final = min(num_last_tokens, job.num_settled_tokens) if self.caches_computed else num_last_tokens
        self.call("release", self.batch, [job.row], self.draw_seconds())
        if self.books.hash_lookahead:
            self.books.enter_first(job, job.list_histories(num_final), self.find_key, job.num_known_tokens)
        return self.leave(job, None, num_final)

    def go_back(self, job: Job, num_computed_tokens: int) -> bool:
        """Let lost tokens be computed again; False if pages that they need are gone."""
        num_computed_tokens = min(num_computed_tokens, job.num_known_tokens)
        try:
            self.cut(job, num_computed_tokens)
        except ArgumentError:
            restart = self.books.find_restart(job, num_computed_tokens, max(0, num_computed_tokens - self.books.hash_lookahead))
            groups = zip(self.setting.groups, job.pages, strict=True)
            nums_kept = [self.books.count_pages(group, num_computed_tokens) for group in self.setting.groups]
            is_lost = not all(
                self.has_pages(job, group, pages[:num_kept], restart)
                for (group, pages), num_kept in zip(groups, nums_kept, strict=True)
            )
            is_back = num_computed_tokens - self.books.hash_lookahead < int(self.batch.num_computed_tokens[job.row])
            changed = max(0, num_computed_tokens - self.books.hash_lookahead)
            is_right = is_back and (
                is_lost or self._sets_back_state(job, num_computed_tokens, changed, job.num_computed_tokens)
            )
            require(is_right, "a row may be cut and is not", job, num_computed_tokens)
            return False
        return True

    def _sets_back_state(self, job: Job, num_tokens: int, changed: int, num_planned: int) -> bool:
        """Whether a state has seen tokens from `num_tokens` on, or such that are computed again if slots change from `changed`
        on, some of them after others that stay; or a ring lacks what was before such of the `num_planned` tokens.
        """
        restart = self.books.find_restart(job, min(num_tokens, job.num_computed_tokens), changed)
        places = {num_tokens, restart} - {0}
        if self.setting.has_state and min(places, default=job.num_computed_tokens) < job.num_computed_tokens:
            return True
        return any(num < num_planned and not job.rings.have(num) for num in places)

    def fork(self, job: Job, rows: list[int]) -> list[Job]:
        """Let free rows go on where a job is; none if there are too few pages for all."""
        try:
            self._call("fork", job.row, rows)
        except OutOfPagesError:
            return []
        forked = [self.copy_of(job) for _ in rows]
        for target, row in zip(forked, rows, strict=True):
            self.books.fork(job, target, self.records(self.batch.get_page_ids(row)), self.books.find_shard(job.dp_shard))
            self.start(target, row)
            self.draft_forked(target)
        return forked

    def commit(self, job: Job, num_came: int, needs_all: bool) -> None:
        self.call("commit_external", self.batch, job.row, num_came)
        job.num_computed_tokens += num_came
        job.num_settled_tokens = job.num_computed_tokens
        job.rings.begin(job.num_computed_tokens)
        self.books.commit(job, job.num_computed_tokens)

    def fail(self, job: Job, num_came: int) -> int:
        job.num_computed_tokens = job.num_settled_tokens = self.call("fail_external", self.batch, job.row, num_came)
        job.rings.begin(job.num_computed_tokens)
        self.books.fail(job, job.num_computed_tokens)
        return job.num_computed_tokens

    def rewind(self, failed: Any, wrong: set[int]) -> list[Job]:
        firsts = {row: self.books.find_wrong_token(job, failed.number, wrong) for row, job in self.jobs.items()}
        rewound, lost = self.call("rewind", self.batch, failed)
        expected = {row for row, first in firsts.items() if first is not None}
        require({*rewound, *lost} == expected, "rows that go back", rewound, lost, expected)
        for row in sorted(expected):
            job, first = self.jobs[row], firsts[row]
            if row in lost:  # it is released
                self.world.waiting.append(self.leave(job, None, 0))
                continue
            assert first is not None
            job.num_computed_tokens = self.books.cut(job, job.num_known_tokens, min(first, job.num_computed_tokens))
            job.num_settled_tokens = min(job.num_settled_tokens, job.num_computed_tokens)
            num_computed_tokens = int(self.batch.num_computed_tokens[row])
            require(num_computed_tokens == job.num_computed_tokens, "a row that goes back", job, num_computed_tokens)
        return []

    def move(self) -> None:
        """Move a row, or exchange two."""
        if not self.jobs:
            return
        src, tgt = self.rng.choice(list(self.jobs)), self.rng.randrange(NUM_ROWS)
        if tgt in self.jobs:
            self.call("swap_row", self.batch, src, tgt)
        else:
            self.call("move_row", self.batch, src, tgt)
        moved = {(tgt if row == src else src if row == tgt else row): job for row, job in self.jobs.items()}
        self.jobs = moved
        for row, job in moved.items():
            job.row = row
