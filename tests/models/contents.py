"""Simulation of contents: an engine without a model, on a device that remembers what was computed into each slot.

The oracle mirrors the allocator's design and has no device; this knows only what an engine relies on. A step writes the history
of each token into its slot, through the page ids and slot mappings that pagepool returned, then compares all that the tokens
attend to. Which prefix must hit is worked out from the tokens. Steps and transfers fail, jobs are preempted in the middle of a
schedule.

``python tests/models/contents.py --seconds 60 --seed 1``; a round that fails prints the line that repeats it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from contents_device import ContentsError, Device, Histories, find_first_read, find_unread, find_unread_pages, require
from contents_fronts import NUM_ROWS, BatchFront, Entry, Front, ManagerFront, Work, World
from contents_holds import Holds
from contents_index import NULL_PAGE
from contents_inputs import ListReader
from contents_readers import Readers
from contents_request import Job
from contents_sizes import Sizes
from contents_states import StateBooks
from contents_store import STORE_MODULES, StoreBooks
from contents_tier import InFlight, TierBooks, draw_tier
from settings import (
    ENDS_SETTINGS,
    HASHING,
    POOL_SETTINGS,
    REFERENCE_SETTINGS,
    RING_SETTINGS,
    SETTINGS,
    STATE_SETTINGS,
    Group,
    Setting,
    kept,
)
from twin_engine import NUM_FAMILIES, VOCABULARY, WITH_LOGPROBS, Feature
from twins import free_ids_of, ref_counts_of

import pagepool
from pagepool.errors import ArgumentError, RequestTooLargeError
from pagepool.hashing import extra_keys

MAX_WAITING = 5
MAX_REFUSALS = 8  # of a request that does not fit though nothing prevents it
NUM_STEPS = 120
AUDITED_EVERY = 8  # steps

MORE_SETTINGS = [
    *(Setting(f"full {size}, odd", (Group("full", size),), (16, 40)) for size in (3, 5, 7, 9, 10, 11, 12, 13, 14, 15)),
    Setting("full 1 eagle", (Group("full", 1),), (24, 64), use_eagle=True),
    Setting("window 7 in pages of 1", (Group("sliding", 1, 7),), (24, 64)),
    Setting("window 20 in pages of 16 eagle", (Group("sliding", 16, 20),), use_eagle=True),
    Setting("chunk 5 in pages of 3", (Group("chunked", 3, 5),)),
    Setting("full 1 and window of 3", (Group("full", 1), Group("sliding", 3, 5)), (48, 96)),
    Setting("full 16, chunk of 8, state", (Group("full", 16), Group("chunked", 8, 24), Group("mamba", 16)), (24, 64)),
    Setting("full 6 and 4, window of 2, 2 shards", (Group("full", 6), Group("full", 4), Group("sliding", 2, 7)), (64, 96),
            data_parallel_size=2),
    Setting("full 16 and 8, chunk of 8, states",
            (Group("full", 16), Group("full", 8), Group("chunked", 8, 24), kept(16), kept(8)), (24, 64)),
]  # fmt: skip
ALL_SETTINGS = [*SETTINGS, *STATE_SETTINGS, *MORE_SETTINGS, *ENDS_SETTINGS, *POOL_SETTINGS]
ALL_SETTINGS += [*RING_SETTINGS, *REFERENCE_SETTINGS]
CONTENTS_SETTINGS = [setting for start in range(7) for setting in ALL_SETTINGS[start::7]]
"""In an order in which the kinds alternate, so that a short run has all of them."""

HAS_XXHASH = find_spec("xxhash") is not None  # the checksum of stored pages

FRONTS: list[tuple[type[Front], ...]] = [
    (ManagerFront,),
    (BatchFront,),
    (ManagerFront, BatchFront),
    (BatchFront, BatchFront),
    (ManagerFront, BatchFront, BatchFront),
]


EVICTION = ("lru", "adaptive")
CACHES = ("scheduled", "computed")
FEATURES = "tier", "external", "forks", "leases", "expectations", "store", "lookahead", "lists", "sizes"
"""What a round may have besides requests that run and fail; its seed chooses."""


class Simulation:
    """One setting under one seed, which also chooses the features, unless they are given, and the eviction policy."""

    def __init__(self, setting: Setting, seed: int, is_checked: bool = True, features: Collection[str] | None = None) -> None:
        self.is_checked = is_checked  # also by the package's own checks
        self.rng = Random(seed)
        self.counts: Counter[str] = Counter()
        self.histories = Histories()
        self.sizes = self.rng.choice(setting.num_pages)
        self.num_pages = setting.pools(self.sizes).num_records
        self.fronts_classes = self.rng.choice(FRONTS)
        eviction = EVICTION[seed % len(EVICTION)]
        self.options: dict[str, Any] = {"hash_seed": seed, "eviction": eviction}
        if self.fronts_classes == (ManagerFront,):
            self.options |= self.rng.choice(list(HASHING.values()))
        elif seed % 3 == 0:
            self.options["hash_algo"] = "sha256"
        share = self.rng.choice((0.5, 0.5, 1.0))
        chosen = [feature for feature in FEATURES if self.rng.random() < share]
        self.features = chosen if features is None else list(features)
        if setting.data_parallel_size is not None and "sizes" in self.features:
            self.features.remove("sizes")  # a divided pool keeps its size
        looks_ahead = "lookahead" in self.features and setting.enable_caching
        self.options["caches"] = CACHES[seed // len(EVICTION) % len(CACHES)]
        self.setting = setting = setting.with_lookahead(self.rng.randint(1, 3) if looks_ahead else 0)
        self.device = Device(setting.pools(self.sizes), setting.groups, self.histories, setting.hash_lookahead)
        self.waiting: list[Job] = []
        self.refusals: Counter[Job] = Counter()
        self.plan: list[Entry] = []
        self.has_next = False  # a step after the next was scheduled, or did not fit and gave pages back that left a window
        self.has_failed = False  # tokens were lost and are computed again, a good time for the next failure
        self.families = [self._tokens(setting.max_model_len) for _ in range(NUM_FAMILIES)]
        self.past: deque[list[int]] = deque(maxlen=4)
        self._names = (f"job {number}" for number in itertools.count())
        self.store: StoreBooks | None = None
        self._open()

    def _open(self) -> None:
        """Build manager and batches."""
        setting = self.setting
        groups = setting.cache_groups(pagepool)
        tier = draw_tier(self.rng, self.sizes) if "tier" in self.features and setting.enable_caching else None
        manager = setting.manager(pagepool.CacheManager, groups, self.sizes, host_tier=tier, **self.options)
        tier_books = tier and TierBooks(tier, self.device, self.rng, self.counts)
        books = StateBooks(setting, self.sizes, manager._store, tier_books)
        books.prefers_held = manager._caches_computed
        if tier_books is not None and "store" in self.features and HAS_XXHASH:
            self.store = StoreBooks(manager, tier_books, {}, self.rng)
        self.world = World(
            setting,
            manager,
            books,
            self.device,
            self.rng,
            self.counts,
            self._names,
            self.waiting,
            self.features,
            preempt=self.preempt,
            store=self.store,
        )
        self.holds = Holds(self.world)
        self.tier_readers = tier_books and Readers(manager._store, tier_books, self.options["hash_seed"], self.counts)
        self.sizes_of_pools = Sizes(self.world, self.preempt_all, self.let_all_go)
        self.fronts: list[Front] = [front(self.world, self._make_tables()) for front in self.fronts_classes]
        self.world.fronts = self.fronts
        books.prefers_held |= any(front.caches_computed for front in self.batches)
        for front in self.fronts:
            front.plan = self.plan
        rng = Random(self.options["hash_seed"])
        self.readers = [ListReader(front, rng) for front in self.batches] if "lists" in self.features else []

    def read_clock(self) -> float:
        """Return the seconds on the clock of the store."""
        return self.store.now if self.store is not None else 0.0

    def _make_tables(self) -> Any:
        page_sizes = [group.page_size for group in self.setting.groups]
        return pagepool.MultiGroupPageTable(NUM_ROWS, self.setting.max_model_len, 64, page_sizes)

    @property
    def manager(self) -> Any:
        return self.world.manager

    @property
    def books(self) -> StateBooks:
        return self.world.books

    @property
    def jobs(self) -> list[Job]:
        return self.world.jobs

    @property
    def batches(self) -> list[BatchFront]:
        return [front for front in self.fronts if isinstance(front, BatchFront)]

    def run(self, num_steps: int = NUM_STEPS, num_calls: int | None = None) -> Counter[str]:
        """Run `num_steps` steps, or `num_calls` calls if that is less, then end all jobs; return the counts."""
        for number in range(num_steps):
            if num_calls is not None and self.counts["calls"] >= num_calls:
                break
            self.submit()
            self.step()
            self.intervene()
            if self.tier_readers:
                self.tier_readers.act()
            if number % AUDITED_EVERY == 0:
                self.audit()
        self.drain()
        self.counts["slots written"] = self.device.num_written
        self.counts["slots compared"] = self.device.num_compared
        self.counts["rounds"] = 1
        return self.counts

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Queue requests."""
        while len(self.waiting) < MAX_WAITING and self.rng.random() < 0.5:
            job = self._make_job()
            try:
                self.manager.require_capacity(job.num_final_tokens, self.setting.page_size)
            except RequestTooLargeError:
                continue
            self.waiting.append(job)

    def _make_job(self) -> Job:
        """Return a request, most often with the same beginning as another one."""
        rng, most = self.rng, self.setting.max_model_len
        bases = [*self.families, *self.past, *(job.all_token_ids for job in self.jobs)]
        base, page_size = rng.choice(bases), self.setting.page_size
        num_shared = len(base) if rng.random() < 0.3 else rng.randint(0, len(base) // page_size) * page_size + rng.randint(0, 2)
        tokens = base[:num_shared] + self._tokens(rng.randint(1, page_size + 1))
        tokens = tokens[: rng.choice((most - 1, most - 1, most // 2, max(1, page_size - 1)))]
        num_final_tokens = rng.randint(len(tokens), most)
        name = next(self._names) if rng.random() < 0.8 else self._reuse_name()
        job = Job(name, tokens, num_final_tokens, self.histories)
        if "expectations" in self.features:
            job.session_id, job.tenant = self.rng.choice(("a", "b", None)), self.rng.choice(("x", "y", None))
        if self.setting.has_reference_window:
            job.num_prompt_tokens = rng.choice((None, None, len(tokens), rng.randint(0, len(tokens))))
        if rng.random() < 0.35:
            self._make_special(job)
        has_places = self.setting.writes_states or (self.setting.windows is not None and not self.setting.has_state)
        if has_places and rng.random() < 0.3:
            job.resume_at = rng.choices(range(most), k=rng.randint(1, 4))
        return job

    def _reuse_name(self) -> str:
        """Return the id of a finished request."""
        taken = {job.request_id for job in (*self.waiting, *self.jobs)}
        return "again" if "again" not in taken else next(self._names)

    def _make_special(self, job: Job) -> None:
        """Give a request a salt, an adapter, images, or a wish for the log probabilities of its prompt."""
        rng, page_size = self.rng, self.setting.page_size
        kind = rng.randrange(7)
        if kind == 0:
            job.sampling_params = WITH_LOGPROBS
        elif kind in (1, 2):
            job.cache_salt = rng.choice((None, "salt", "pepper"))
            job.lora_id = rng.choice((None, 1, "1", "tuned"))
        elif kind == 3:
            job.has_vision = True
        elif kind == 6:
            num_rows = min(job.num_tokens, rng.choice((1, page_size, 2 * page_size + 1)))
            job.prompt_embeds = np.array(rng.choices((0.0, 1.0), (3, 1), k=num_rows)).reshape(-1, 1)
        elif kind == 4:
            job.mm_features = (Feature("cat", "image", SimpleNamespace(offset=rng.choice((0, 1)), length=1)),)
        else:
            places = sorted({(rng.choice((0, 1, page_size, 2 * page_size - 1)), rng.choice((1, page_size))) for _ in range(2)})
            images = [Feature(rng.choice(("cat", "dog")), "image", SimpleNamespace(offset=o, length=n)) for o, n in places]
            job.mm_features = (Feature("cat", "image", None), *images) if rng.random() < 0.2 else tuple(images)

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    # --- a step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule and run, or fail."""
        self.plan.clear()
        self.has_next = False
        if self.rng.random() < 0.7:
            self.world.take_moves()
        turns: list[Callable[[], None]] = [self.admit, *(front.schedule for front in self.fronts)]
        for front in self.batches:
            front.begin_step()
        for turn in self.rng.sample(turns, len(turns)):
            turn()
        self.world.take_moves()
        self.fill_inputs()
        self.world.is_second = True
        for front in self.batches:
            if front.depth and self.rng.random() < 0.1:
                self.end_in_flight(front)
        for front in self.batches:
            if front.depth and self.rng.random() < 0.3:
                front.schedule_next()
                self.counts["steps in flight"] += 1
                self.has_next = True
        self.world.take_moves()
        self.fill_inputs()
        self.world.is_second = False
        self.counts["steps"] += 1
        if self.plan and self.rng.random() < (0.5 if self.has_failed else 0.12):
            self.has_failed = False
            self.abort()
        else:
            self.compute()
        self.finish_loading()
        self.end_transfers()

    def end_in_flight(self, front: BatchFront) -> None:
        """End a job of a batch whose step is in flight: what it computes has been asked for, and others may hit that."""
        jobs = [work.job for work in front.list_works(front.steps[-1]) if not self._is_doubtful(work.job)]
        if jobs:
            job = self.rng.choice(jobs)
            pages = front.list_unfilled(job)
            self._end(job)
            front.left |= {page_id: content for page_id in pages if (content := self.books.index.content_of(page_id))}
            self.counts["rows ended in flight"] += 1
            self.has_next = True

    def fill_inputs(self) -> None:
        """Fill inputs for the steps of batches that are scheduled."""
        for reader in self.readers:
            reader.fill()

    @property
    def works(self) -> list[Work]:
        return [work for entry in self.plan for work in entry.works]

    def admit(self) -> None:
        """Start waiting jobs while there is a free row."""
        for job in self.waiting if self.store is not None else ():
            if self.rng.random() < 0.5:
                self.store.fetch(job)
        for job in self.rng.sample(self.waiting, min(3, len(self.waiting))):
            if self.store is not None and not self.store.is_ready(job):
                continue
            fronts = [front for front in self.fronts if front.free_rows() and self._may_enter(job, front)]
            if not fronts or job not in self.waiting:
                continue
            front = self.rng.choice(fronts)
            rows = front.free_rows()
            row = job.row if job.row in rows and self.rng.random() < 0.7 else self.rng.choice(rows)
            size = self.setting.data_parallel_size
            dp_shard = self.rng.choice((None, *range(2 * size))) if size else None
            if front.admit(job, row, dp_shard):
                self.waiting.remove(job)
                self.refusals.pop(job, None)
                continue
            job.row = row
            self.refusals[job] += not self.jobs
            if self.refusals[job] > MAX_REFUSALS:
                self.waiting.remove(job)
                self._forget(job)
            elif self.rng.random() < 0.2:
                self.preempt()

    def _may_enter(self, job: Job, front: Front) -> bool:
        """Whether a front accepts a job; a batch accepts neither unnamed images nor embeddings. If all fronts are batches, the
        job loses them.
        """
        if not (job.has_contents and isinstance(front, BatchFront)):
            return True
        if not any(isinstance(other, ManagerFront) for other in self.fronts):
            job.has_vision, job.prompt_embeds = False, None
            job.renew()
        return not job.has_contents

    def preempt(self) -> Job | None:
        """Preempt a job, and the jobs that hit pages which this step was to compute for it. Rows of a step stay: it runs."""
        planned = {work.job for work in self.works if isinstance(work.job.front, BatchFront)}
        victims = [job for job in self.jobs if planned.isdisjoint({job, *(work.job for work in self._list_dependents(job))})]
        if not victims:
            return None
        victim = self.rng.choice(victims)
        self._preempt(victim)
        return victim

    def preempt_all(self) -> None:
        """Preempt all jobs, between two steps."""
        for job in self.jobs:
            self.waiting.append(job.front.end(job, None))

    def let_all_go(self) -> None:
        """End all that holds pages besides jobs."""
        self.holds.clear()
        self.world.settle()
        self.end_transfers(are_all=True)

    def _preempt(self, victim: Job) -> None:
        """Preempt a job and its dependents, the last scheduled first."""
        scheduled = self._list_dependents(victim)
        for work in scheduled[::-1]:
            self._unschedule(work)
            if work.job.front is not None:
                self.waiting.append(work.job.front.end(work.job, work.num_before))
        if not scheduled:
            is_row = isinstance(victim.front, BatchFront)
            num_computed = None if self.rng.random() < 0.7 or victim.loading or is_row else victim.num_computed_tokens
            self.waiting.append(victim.front.end(victim, num_computed))
        self.counts["preemptions"] += 1

    def _list_dependents(self, victim: Job) -> list[Work]:
        """Return the works of a job in this step, and of the jobs that hit pages made for them, directly or not."""
        gone, num_before = {victim}, 0
        while len(gone) > num_before:
            num_before = len(gone)
            made = {page_id for work in self.works if work.job in gone for page_id in work.made}
            gone |= {work.job for work in self.works if made & work.hits}
        return [work for work in self.works if work.job in gone]

    def _unschedule(self, work: Work) -> None:
        for entry in self.plan:
            if work in entry.works:
                entry.works.remove(work)

    def abort(self) -> None:
        """Undo the step, last call first. The model may have started, so the slots of the step may hold garbage."""
        has_run = self.rng.random() < 0.7
        self.world.settle()
        made = {page_id for work in self.works for page_id in work.made}
        shared = {page_id for page_id, num in self.books.holders.items() if num > 1}
        computed = (self.books.index.entries.keys() | shared) - made  # recomputed values stay the same
        for work in self.works:
            if work.job.loading and not made & work.hits:
                self._unschedule(work)  # its transfer continues
        for work in self._list_computed() if has_run else ():
            others = {page_id for job in self.jobs if job is not work.job for page_id in self.books.list_computed(job)}
            self._spoil(work, work.start, work.num_room_tokens, computed | others)
        works = [(work, work.job.front) for work in self.works]
        for front in self.batches:
            self.waiting += front.fail_steps()
        for entry in self.plan[::-1]:
            if isinstance(entry.front, ManagerFront):
                self.waiting += entry.end_all()
        for work, front in works:  # a batch knows no pages of others that were not filled
            others = {page_id for other, its_front in works if its_front is not front for page_id in other.made}
            if isinstance(front, BatchFront) and work.job.front is front and work.hits & others:
                self.waiting.append(front.end(work.job, 0))
        self.counts["aborted steps"] += 1
        self.plan.clear()
        if self.rng.random() < 0.3:
            self.audit()

    # --- the model --------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Run the step, and another one that is in flight after it, and count the computed tokens."""
        works = self._list_computed()
        second = [work for work in works if work.is_second]
        hits = {page_id for work in works for page_id in work.hits}
        is_hit = any(hits.intersection(work.made) for work in works)
        is_ahead = any(front.batch.num_ahead_tokens.any() for front in self.batches)
        may_fail = not self.has_next and not is_ahead and self.rng.random() < (0.3 if is_hit else 0.06)
        self.world.make_moves()
        cuts = self._run([work for work in works if not work.is_second], may_fail)
        self.world.make_moves()
        self._run(second, False)
        self._go_back(cuts)
        for front in self.batches:
            for job in front.settle(cuts, self._sample_token):
                self._end(job)
        for work in works:
            if work.job not in cuts and isinstance(work.job.front, ManagerFront):
                self._count(work)

    def _list_computed(self) -> list[Work]:
        """Return what the model computes; jobs that wait for a transfer are scheduled too, and calls that gave only room."""
        return [work for work in self.works if not work.job.loading and work.start < work.stop]

    def _run(self, works: list[Work], may_fail: bool) -> dict[Job, int]:
        """Write the computed histories, then compare the attended ones; return jobs that lost tokens, with the first of
        these.
        """
        wrong = [work for work in works if not self._has_right_states(work)]
        for work in works:
            self._write_range(work, work.start, work.start + work.num_transferred)
        for work in works:
            work.job.num_drafted_tokens = min(work.job.num_drafted_tokens, work.start)
            self._write(work)
            self.world.draft(work, has_run=False)
        cuts = self._fail(self._choose_failure(works)) if works and may_fail else {}
        for reader in self.readers:
            reader.compare([work for work in works if work.job not in cuts and not self._is_doubtful(work.job)])
        for work in works:
            if work.job not in cuts and (not self._reads_right(work) or work in wrong):
                self._spoil(work, work.start, work.stop)
        return cuts

    def _is_doubtful(self, job: Job) -> bool:
        """Whether a job may have read pages that failed to load, which it is told later."""
        return self.books.tier is not None and self.books.tier.is_doubtful(job)

    def _choose_failure(self, works: list[Work]) -> Work:
        """Return a work, preferably one whose pages were hit in the same step."""
        hits = {page_id for work in works for page_id in work.hits}
        return self.rng.choice([work for work in works if hits.intersection(work.made)] or works)

    def _write(self, work: Work) -> None:
        """Write a step's tokens, and garbage into the slots for drafts after them."""
        start = work.start + work.num_transferred
        self._write_range(work, start, work.stop)
        if work.stop >= work.job.num_tokens:
            self._spoil(work, work.stop, work.num_room_tokens, is_state_kept=True)

    def _write_range(self, work: Work, start: int, stop: int) -> None:
        for group_id, group in enumerate(self.setting.groups):
            written = work.list_values(start, stop)
            if group.kind == "mamba":
                written = written[-1:]
            if written:
                self.device.write(group_id, work.find_slots(group_id, start, stop), written)
        for write in work.writes:
            if start < write.num_tokens <= stop:
                self.device.write(
                    write.group, self.world.slot_of(write), work.list_values(write.num_tokens - 1, write.num_tokens)
                )

    def _spoil(self, work: Work, start: int, stop: int, spared: Collection[int] = (), is_state_kept: bool = False) -> None:
        """Write garbage into slots, some pages spared."""
        if start >= stop:
            return
        for group_id, group in enumerate(self.setting.groups):
            if group.kind == "mamba" and is_state_kept:
                continue
            slots = work.find_slots(group_id, start, min(stop, work.num_planned) if group.is_ring else stop)
            if group.kind != "mamba":
                page_ids = [int(slot) // group.page_size for slot in slots]
                slots = slots[[self.books.pools.record_of(page_id, group_id) not in spared for page_id in page_ids]]
            self.device.write(group_id, slots, [self.histories.make_garbage()] * len(slots))
        for write in () if is_state_kept else work.writes:
            if start < write.num_tokens <= stop and self.books.holds(work, write):
                self.device.write(write.group, self.world.slot_of(write), [self.histories.make_garbage()])

    def _has_right_states(self, work: Work) -> bool:
        """Compare the states with which a step begins."""
        if not 0 < work.start < work.stop:
            return True
        states = [(group_id, group) for group_id, group in enumerate(self.setting.groups) if group.is_state]
        firsts = {i: find_first_read(group, work.start) if group.is_ring else work.start - 1 for i, group in states}
        slots = {i: work.find_slots(i, first, work.start) for i, first in firsts.items()}
        are_right = all(self._compare(work, i, slots[i], first, work.start) for i, first in firsts.items())
        for group_id, first in firsts.items() if are_right else ():
            self._compare_drafts(work.job, group_id, slots[group_id], first, work.start)
        return are_right

    def _reads_right(self, work: Work) -> bool:
        """Compare all that the tokens of a step attend to."""
        start, found = work.start + work.num_transferred, []
        for group_id, group in enumerate(self.setting.groups if start < work.stop else ()):
            first = work.stop - 1 if group.kind == "mamba" else find_first_read(group, start)
            if group.is_ring:
                first = max(first, work.num_planned - group.page_size)
            if first >= work.stop:  # a ring has nothing but drafts
                continue
            slots = work.find_slots(group_id, first, work.stop)
            for tokens in self._list_read(work.job, group_id, first, start, work.stop):
                read = slots[tokens.start - first : tokens.stop - first]
                found.append(self._compare(work, group_id, read, tokens.start, tokens.stop))
                if found[-1]:
                    self._compare_drafts(work.job, group_id, read, tokens.start, tokens.stop)
        return all(found)

    def _list_read(self, job: Job, group_id: int, first: int, start: int, stop: int) -> list[range]:
        """Part the tokens from `first` on to which some of those from `start` up to `stop` attend: with a reference window, not
        all between.
        """
        group = self.setting.groups[group_id]
        unread = find_unread(group, start, job.prompt_end) if group.kind == "reference" else range(first, first)
        return [tokens for tokens in (range(first, min(unread.start, stop)), range(unread.stop, stop)) if tokens]

    def _compare_drafts(self, job: Job, group_id: int, slots: Any, first: int, stop: int) -> None:
        """Compare what the drafter of a job has for tokens up to `stop`, whose slots begin at `first`."""
        num_drafted = min(stop, job.num_drafted_tokens)
        is_state = self.setting.groups[group_id].kind == "mamba"
        if (
            self.setting.hash_lookahead
            and not self.setting.groups[group_id].is_ring
            and first < num_drafted
            and not self._is_doubtful(job)
            and not (is_state and num_drafted < stop)
        ):
            drafts = self.books.list_known(job, num_drafted)[first + self.setting.hash_lookahead :]
            self.device.compare_drafts(group_id, slots[: len(drafts)], drafts, f"read of {job}")

    def _compare(self, work: Work, group_id: int, slots: Any, start: int, stop: int) -> bool:
        """Compare what a step reads. It may be wrong only where a load has failed; what is computed with it is garbage."""
        if self._is_doubtful(work.job):
            return self.device.holds(group_id, slots, work.list_values(start, stop))
        self.device.compare(group_id, slots, work.list_values(start, stop), f"read of {work.job}")
        return True

    def _compare_held(self, job: Job) -> None:
        """Compare what the next token of a running job will see."""
        num_tokens = 0 if self._is_doubtful(job) else job.num_computed_tokens
        histories = job.list_histories(num_tokens)
        for group_id, group in enumerate(self.setting.groups if num_tokens else ()):
            first = num_tokens - 1 if group.kind == "mamba" else find_first_read(group, num_tokens)
            if first < num_tokens:
                slots = job.front.map_slots(job, group_id, range(first, num_tokens))
                for tokens in self._list_read(job, group_id, first, num_tokens, num_tokens):
                    values = job.list_values(histories, tokens.start, tokens.stop)
                    read = slots[tokens.start - first : tokens.stop - first]
                    self.device.compare(group_id, read, values, f"audit of {job}")
                    self._compare_drafts(job, group_id, read, tokens.start, tokens.stop)

    def _count(self, work: Work) -> None:
        """Count computed tokens, keep some drafts, cache delayed pages; continue or end."""
        job, front = work.job, work.job.front
        num_accepted = self.rng.randint(0, len(work.drafts))
        num_computed = work.stop - len(work.drafts) + num_accepted
        job.all_token_ids.extend(work.drafts[:num_accepted])
        self.world.draft(replace(work, histories=work.histories[:num_computed]))
        if work.is_delayed and self.rng.random() < 0.7:
            front.cache(job, num_computed)
        else:
            job.num_computed_tokens = num_computed
        if job.num_computed_tokens == job.num_tokens:
            self._sample(job)
            if job.front is front:
                self.world.draft(replace(work, histories=work.histories[:num_computed]))

    def _sample(self, job: Job) -> None:
        """Append a token, or end a job that is long enough."""
        token = self._sample_token(job)
        if token is None:
            self._end(job)
        else:
            job.all_token_ids.append(token)

    def _sample_token(self, job: Job) -> int | None:
        """Return a job's next token; None if it is long enough."""
        if job.num_tokens >= job.num_final_tokens or self.rng.random() < 0.02:
            return None
        base = self.rng.choice(self.families)
        return base[job.num_tokens] if job.num_tokens < len(base) else self.rng.choice(VOCABULARY)

    def _end(self, job: Job) -> None:
        self.past.append(list(job.all_token_ids))
        job.front.end(job)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Drop a job's hashes, except for some jobs whose id returns with other tokens."""
        if job.request_id != "again" or self.rng.random() < 0.5:
            self.manager.free_page_hashes(job)
        self.counts["requests"] += 1

    # --- transfers --------------------------------------------------------------------------------------------

    def finish_loading(self) -> None:
        """Complete some transfers from elsewhere, fully or up to a token."""
        loading = [job for job in self.jobs if job.loading and self.rng.random() < 0.5]
        if loading:
            self.world.settle()
        for job in loading:
            work, front = job.loading, job.front
            num_loaded = work.stop if self.rng.random() < 0.7 else self.rng.randint(work.start, work.stop - 1)
            self._write_range(work, work.start, num_loaded)
            self.world.draft(replace(work, histories=work.histories[:num_loaded]))
            self._spoil(work, num_loaded, work.stop)
            self.counts["transfers"] += 1
            needs_all = isinstance(front, ManagerFront) and self.rng.random() < 0.5
            if not needs_all:
                self._spoil_unread(work, num_loaded)
            front.receive(job, num_loaded, needs_all)

    def _spoil_unread(self, work: Work, num_tokens: int) -> None:
        """Write garbage into pages of a transfer to which no token from `num_tokens` on attends: they need not come."""
        for group_id, group in enumerate(self.setting.groups):
            unread = range(0) if group.is_state else find_unread_pages(group, num_tokens, work.job.prompt_end)
            start, stop = max(work.start, unread.start * group.page_size), unread.stop * group.page_size
            if start < stop:
                slots = work.find_slots(group_id, start, stop)
                self.device.write(group_id, slots, [self.histories.make_garbage()] * len(slots))

    def end_transfers(self, are_all: bool = False) -> None:
        """End transfers of the tier, in any order, and let jobs go back that have read pages which failed to load."""
        tier = self.books.tier
        while tier is not None and (are_all or len(tier.in_flight) > 4 or self.rng.random() < 0.5):
            one = tier.draw_ended()
            if one is None:
                return
            failed = self._end_transfers(one)
            wrong = self.books.end_transfers(one)
            for front in self.fronts if failed is not None else ():
                for job in front.rewind(failed, wrong):
                    self.waiting.append(front.end(job, 0))

    def _end_transfers(self, one: InFlight) -> Any:
        """Tell the manager; return the loads that failed, or None."""
        self.counts["calls"] += 1
        if not one.bad_saves and not one.bad_loads and self.rng.random() < 0.8:
            return self.manager.complete(one.number)
        failed = self.manager.fail(one.number, saves=one.bad_saves, loads=one.bad_loads)
        bad = [one.loads[place] for place in one.bad_loads]
        expected = [(self.device.pools.id_of(load.page, load.group), load.group) for load in bad]
        found = list(zip(failed.page_ids, failed.groups, strict=True))
        require(found == expected, "other pages have failed", failed, expected)
        return failed

    def _fail(self, work: Work) -> dict[Job, int]:
        """Lose tokens from a random one on, and return the jobs that must recompute, with the first token."""
        first = self.rng.randint(work.start, max(work.start, work.stop - 1))
        self._spoil(work, first, work.stop)
        cuts, pages = {work.job: first}, set()
        self.counts["failed loads"] += 1
        self.has_failed = True
        while True:
            for job, cut in cuts.items():
                pages.update(page_id for page, page_id in self._list_places(job) if page.stop > cut)
            before = dict(cuts)
            for job in self.jobs:
                starts = [page.start for page, page_id in self._list_places(job) if page_id in pages]
                if starts and job not in cuts:
                    cuts[job] = min(starts)
                elif starts and job is not work.job:
                    cuts[job] = min(cuts[job], *starts)
            if cuts == before:
                return cuts

    def _list_places(self, job: Job) -> list[tuple[range, int]]:
        """Return the tokens of each page that a job holds, with the page, other than rings, which are written again."""
        places = []
        for group, pages in zip(self.setting.groups, job.pages, strict=True):
            for page, page_id in enumerate(pages if not group.is_ring else ()):
                if page_id != NULL_PAGE:
                    stop = self.setting.max_model_len if group.kind == "mamba" else (page + 1) * group.page_size
                    places.append((range(page * group.page_size, stop), page_id))
        return places

    def _go_back(self, cuts: dict[Job, int]) -> None:
        """Drop the entries of lost tokens, and let jobs go back before them or start over."""
        if not cuts:
            return
        bad = sorted({page_id for job, cut in cuts.items() for page, page_id in self._list_places(job) if page.stop > cut})
        self._evict(bad)
        stops = {work.job: work.stop for work in self.works}
        for job, cut in cuts.items():
            front = job.front
            if isinstance(front, BatchFront):
                job.num_computed_tokens = stops.get(job, job.num_computed_tokens)
                job.num_known_tokens = int(front.batch.num_tokens[job.row])
            cut = min(cut, job.num_tokens - 1)
            if job.loading or self.rng.random() < 0.2 or not front.go_back(job, cut):
                self.waiting.append(front.end(job, min(cut, job.num_computed_tokens)))

    def _evict(self, page_ids: list[int]) -> None:
        num_cached = sum(page_id in self.books.index.entries for page_id in page_ids)
        self.counts["calls"] += 1
        parts = self.books.pools.part(page_ids).items()
        num_evicted = sum(self.manager.pools[name].evict_pages(ids) for name, ids in parts)
        require(num_evicted == num_cached, "evicted entries", num_evicted, num_cached)
        for page_id in page_ids:
            self.books.drop_everywhere(page_id)

    # --- interventions ----------------------------------------------------------------------------------------

    def intervene(self) -> None:
        """Sometimes do something between two steps."""
        holds, sizes = self.holds, self.sizes_of_pools
        of_features: dict[str, list[tuple[Callable[[], Any], float]]] = {
            "forks": [(self.fork, 1.0)],
            "leases": [(holds.lease, 0.15), (holds.end_lease, 0.1)],
            "expectations": [
                (lambda: holds.with_any(holds.lease_span), 0.1),
                (lambda: holds.with_any(holds.expect), 0.2),
                (holds.expect_session, 0.05),
                (holds.set_shares, 0.02),
                (holds.wait, 0.3),
            ],
            "sizes": [(sizes.resize, 0.1), (sizes.vacate, 0.04), (sizes.resume, 0.05)],
        }
        chances: list[tuple[Callable[[], Any], float]] = [
            (self.evict, 1.0),
            (self.move, 0.1),
            (self.rewind, 0.15),
            (self.cancel, 0.03),
            (self.preempt, 0.05),
            (self.misuse, 0.1),
            (self.impersonate, 0.1),
            (self.reset, 0.01),
        ]
        chances += [chance for feature in of_features if feature in self.features for chance in of_features[feature]]
        self.plan.clear()
        for action, chance in chances:
            if self.rng.random() < chance:
                action()

    def evict(self) -> None:
        """Drop the prefix entries of some pages, or of those that are equal to one that is being loaded, which are rare."""
        twins = self.books.list_loaded_twins()
        if self.rng.random() < (0.3 if twins else 0.05):
            self._evict(twins or self.rng.sample(range(1, self.num_pages), self.rng.randint(1, 3)))

    def move(self) -> None:
        for front in self.batches:
            front.move()

    def fork(self) -> None:
        """Let jobs go on where another one is, sometimes several times before their copies are taken. A page that is copied
        while it is loaded is rare, so such a job is mostly forked.
        """
        jobs = [job for job in self.jobs if not job.loading and job.num_computed_tokens and job.front.free_rows()]
        coming = [job for job in jobs if self.books.is_loading(job)]
        if not jobs or self.rng.random() >= (0.8 if coming else 0.25):
            return
        job = self.rng.choice(coming or jobs)
        rows = job.front.free_rows()
        rows = self.rng.sample(rows, self.rng.randint(1, len(rows)))
        forked = job.front.fork(job, rows)
        self.counts["forks"] += len(forked)
        if forked and self.rng.random() < 0.2:
            self._end(forked[0])

    def rewind(self) -> None:
        """Let a row forget tokens and compute them again; refused if the pages or the state for it are gone."""
        jobs = [job for job in self.jobs if isinstance(job.front, BatchFront) and not job.loading]
        if jobs:
            job = self.rng.choice(jobs)
            num_tokens = self.rng.randint(0, job.num_tokens - 1)
            self.counts["rows cut"] += job.front.go_back(job, num_tokens)

    def cancel(self) -> None:
        """End a job early."""
        if self.jobs:
            self._end(self.rng.choice(self.jobs))

    def reset(self) -> None:
        """Reset the prefix cache, or be refused while it is in use."""
        self.counts["calls"] += 1
        is_reset = self.manager.reset_prefix_cache()
        require(is_reset is not self.books.is_held, "reset", is_reset)
        if is_reset:
            self.books.reset()
            if self.store is not None:
                self.store.reopen()

    def misuse(self) -> None:
        """Claim tokens that were not computed, or too many: refused, and the state is unchanged."""
        if not self.waiting:
            return
        job, rng = self.rng.choice(self.waiting), self.rng
        before = self._read_state()
        job.num_computed_tokens = rng.choice((0, self.setting.page_size, 2 * self.setting.page_size))
        num_claimed = 0 if job.num_computed_tokens else rng.randint(0, self.setting.page_size)
        is_claim = job.num_computed_tokens + num_claimed > 0
        self.counts["calls"] += 1
        try:
            self.manager.allocate_slots(job, 1 if is_claim else self.setting.max_model_len + 1, num_claimed)
        except ArgumentError:
            require(self._read_state() == before, "a call that was refused changed something", job)
        else:
            raise ContentsError(f"{job} holds nothing, and may claim {num_claimed} tokens more, or too many")
        finally:
            job.num_computed_tokens = 0
        self.counts["refused claims"] += 1

    def impersonate(self) -> None:
        """Call for another request with the id of one that holds pages: refused, and the state is unchanged."""
        running = [job for front in self.fronts if isinstance(front, ManagerFront) for job in front.jobs.values()]
        running = [job for job in running if any(any(pages) for pages in job.pages)]
        if not running:
            return
        other, before = copy.copy(self.rng.choice(running)), self._read_state()
        other.all_token_ids = [*other.all_token_ids[: self.rng.randint(0, other.num_tokens)], 1]
        calls: list[Callable[[], Any]] = [
            lambda: self.manager.get_computed_pages(other),
            lambda: self.manager.allocate_slots(other, 1),
            lambda: self.manager.cache_pages(other, other.num_computed_tokens),
            lambda: self.manager.free(other),
        ]
        self.counts["calls"] += 1
        try:
            self.rng.choice(calls)()
        except ArgumentError:
            require(self._read_state() == before, "a call that was refused changed something", other)
        else:
            raise ContentsError(f"a second {other} is served")
        self.counts["refused seconds"] += 1

    def _read_state(self) -> Any:
        return free_ids_of(self.manager.pools), ref_counts_of(self.manager.pools), self.manager.stats().num_cached_pages

    # --- audits -----------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Compare the observable state: cached pages and their contents, holders, and what running jobs will read."""
        self.world.settle()
        store, books = self.manager._store, self.books
        keys = {page_id: store.key_of(page_id) for page_id in range(self.num_pages)}
        cached = {page_id: key[1] for page_id, key in keys.items() if key is not None}
        expected = {page_id: entry.content[0] for page_id, entry in books.index.entries.items()}
        require(cached == expected, "cached pages and their groups", cached, expected)
        for page_id, entry in books.index.entries.items():
            if books.tier is None or not books.tier.is_failing(page_id):
                self.device.compare_page(page_id, entry.content)
        expected, ref_counts = (
            [books.count_references(page_id) for page_id in range(1, self.num_pages)],
            ref_counts_of(self.manager.pools),
        )
        require(ref_counts == expected, "ref counts", ref_counts, expected)
        self._audit_holders([count - (page_id in books.own) for page_id, count in enumerate(ref_counts, 1)])
        for job in self.jobs:
            if not job.loading:
                self._compare_held(job)
            if isinstance(job.front, BatchFront):
                num_computed_tokens = int(job.front.batch.num_computed_tokens[job.row])
                require(num_computed_tokens == job.num_computed_tokens, "computed tokens", job, num_computed_tokens)
        if books.tier is not None:
            books.tier.audit(self.manager)
        if self.is_checked:
            self.manager.check()
            for front in self.batches:
                front.batch.check()
        self.counts["audits"] += 1

    def _audit_holders(self, ref_counts: list[int]) -> None:
        """Every held page has a holder that is no caller, with as many references as the pages count; jobs have names."""
        held = {page_id for page_id, count in enumerate(ref_counts, 1) if count}
        claims = self.manager.registry.list_claims(self.manager._sinks)
        listed = {record for _, _, claim in claims for record in self.books.pools.join(claim.page_ids_by_pool)}
        require(listed == held, "pages that holders list", listed, held)
        num_references = sum(claim.num_references for _, _, claim in claims)
        require(num_references == sum(ref_counts), "references of holders", num_references, sum(ref_counts))
        report = self.manager.held()
        unexplained = [holder for holder in report.holders if holder.kind == "caller"]
        require(not unexplained, "pages without a holder", unexplained)
        num_pages = sum(sum(counts.values()) for counts in report.num_pages_by_kind.values())
        require(num_pages == len(held), "pages by kind", report.num_pages_by_kind, len(held))

    def drain(self) -> None:
        """End all jobs; only cached pages may remain."""
        for job in self.jobs:
            self._end(job)
        self.let_all_go()
        self.sizes_of_pools.grow()
        self.audit()
        require(not self.books.is_held, "held at the end")
        self.reset()


def run_round(
    setting: Setting,
    seed: int,
    num_steps: int = NUM_STEPS,
    num_calls: int | None = None,
    is_checked: bool = True,
    features: Collection[str] | None = None,
) -> Counter[str]:
    """Run a seed's simulation to its end and return its counts; on a failure, print the command that repeats it."""
    simulation = Simulation(setting, seed, is_checked, features)
    nonces = SimpleNamespace(urandom=Random(seed).randbytes)  # policies go by keys, and a round is to be repeated
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(extra_keys, "os", nonces))
            for module in STORE_MODULES:
                stack.enter_context(patch.object(module, "time", SimpleNamespace(monotonic=simulation.read_clock)))
            return simulation.run(num_steps, num_calls)
    except Exception as error:
        fronts = ", ".join(type(front).__name__ for front in simulation.fronts)
        where = f"step {simulation.counts['steps']}, {simulation.num_pages} pages, {fronts}, {' '.join(simulation.features)}"
        repeat = f"to repeat: python tests/models/contents.py --setting {setting.name!r} --seed {seed} --rounds 1"
        repeat += "" if features is None else f" --features {','.join(features)!r}"
        raise ContentsError(f"{where}\n{repeat}\n{type(error).__name__}: {error}") from error


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Simulate the contents of a device.")
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next")
    parser.add_argument("--setting", help="rounds of this setting alone")
    parser.add_argument("--rounds", type=int, help="so many rounds at most")
    parser.add_argument("--features", help=f"exactly these in each round, divided by commas: {', '.join(FEATURES)}")
    parser.add_argument("--unchecked", action="store_true", help="without the package's own checks")
    return parser.parse_args()


def main() -> None:
    """Simulate for the given time and print the counts."""
    options = parse_arguments()
    settings = [setting for setting in CONTENTS_SETTINGS if options.setting in (None, setting.name)]
    if not settings:
        sys.exit(f"--setting: got {options.setting!r}, allowed: {', '.join(setting.name for setting in CONTENTS_SETTINGS)}")
    features = None if options.features is None else [name for name in options.features.split(",") if name]
    if not set(FEATURES) >= set(features or ()):
        sys.exit(f"--features: got {options.features!r}, allowed: {', '.join(FEATURES)}")
    counts: Counter[str] = Counter()
    start = time.monotonic()
    while time.monotonic() - start < options.seconds and counts["rounds"] != options.rounds:
        setting = settings[counts["rounds"] % len(settings)]
        seed = options.seed + counts["rounds"]
        counts += run_round(setting, seed, is_checked=not options.unchecked, features=features)
    for name, count in counts.items():
        print(f"{name:30} {count:>15,}")


if __name__ == "__main__":
    logging.getLogger("pagepool").setLevel(logging.ERROR)
    main()
