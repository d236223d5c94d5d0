"""Simulation of contents with a host tier: arrays stand for the pages of the device and of the host.

A step writes the history of each token into its slot, transfers and copies move pages, and all that tokens attend to is
compared. Saves and loads take time and fail; what was computed with a page that failed to load must be computed again. Rows are
swapped out and in, requests fork, steps fail.

``python tests/tier_contents.py --seconds 60 --seed 1``; a round that fails prints its setting and seed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from contents_device import Device, Histories, find_first_read, require
from contents_request import Job
from settings import SETTINGS, STATE_SETTINGS, Setting
from workload import VOCABULARY

import pagepool
from pagepool import HostTier
from pagepool.errors import ArgumentError, OutOfPagesError

TIER_SETTINGS = [setting for setting in (*SETTINGS, *STATE_SETTINGS) if setting.enable_caching]
EVICTION = ("lru", "arc", "adaptive")
NUM_ROWS = 4
NUM_STEPS = 150


@dataclass
class InFlight:
    """Transfers that were taken and have not ended, with the contents of the saves, and the places of those that fail."""

    transfers: Any
    saved: Any
    failed_saves: list[int]
    failed_loads: list[int]


class TierFront(ABC):
    """Jobs that run, as requests of the manager or as rows of a batch."""

    def __init__(self, manager: Any, setting: Setting, rng: Random) -> None:
        self.manager, self.setting, self.rng = manager, setting, rng
        self.jobs: list[Job] = []

    @abstractmethod
    def admit(self, job: Job, dp_shard: int | None) -> bool:
        """Start a job with its hits and some new tokens; False if too few pages are free."""

    @abstractmethod
    def grow(self, job: Job, num_new_tokens: int) -> bool:
        """Allocate slots for tokens of a job."""

    @abstractmethod
    def end(self, job: Job, num_computed_tokens: int | None = None) -> None:
        """Free the pages of a job."""

    @abstractmethod
    def fork(self, job: Job, target: Job) -> bool:
        """Let a new job go on where another one is."""

    @abstractmethod
    def rewind(self, failed: Any) -> list[Job]:
        """Let jobs go back behind tokens that failed to load, and return those that cannot."""

    @abstractmethod
    def list_page_ids(self, job: Job) -> Any:
        """Return the page ids of a job by group."""

    def draw_end(self, job: Job, start: int) -> int:
        """Return the end of a chunk."""
        stop = self.rng.randint(start + 1, job.num_tokens)
        interval = self.manager.checkpoint_interval
        if interval and self.rng.random() < 0.7:
            stop = min(job.num_tokens, start - start % interval + interval)
        return stop


class RequestFront(TierFront):
    """Requests of the manager."""

    def admit(self, job: Job, dp_shard: int | None) -> bool:
        size = self.setting.data_parallel_size
        placement = {} if size is None else {"dp_shard_hint": dp_shard, "data_parallel_size": size}
        hits, num_hits = self.manager.get_computed_pages(job, **placement)
        stop = self.draw_end(job, num_hits)
        if self.manager.allocate_slots(job, stop - num_hits, num_hits, hits, **placement) is None:
            return False
        job.num_computed_tokens, job.num_known_tokens, job.dp_shard = num_hits, stop, dp_shard
        return True

    def grow(self, job: Job, num_new_tokens: int) -> bool:
        size = self.setting.data_parallel_size
        placement = {} if size is None else {"dp_shard_hint": job.dp_shard, "data_parallel_size": size}
        return self.manager.allocate_slots(job, num_new_tokens, **placement) is not None

    def end(self, job: Job, num_computed_tokens: int | None = None) -> None:
        self.manager.free(job, num_computed_tokens=num_computed_tokens)
        self.manager.free_page_hashes(job)

    def fork(self, job: Job, target: Job) -> bool:
        return self.manager.fork(job, target) is not None

    def rewind(self, failed: Any) -> list[Job]:
        lost = []
        for job in self.jobs:
            first = self.manager.find_wrong_token(job, failed)
            if first is not None and first < job.num_computed_tokens:
                job.num_computed_tokens = first
                pages = zip(self.setting.groups, self.list_page_ids(job), strict=True)
                starts = [(group, ids, find_first_read(group, first) // group.page_size) for group, ids in pages]
                if any(group.kind == "mamba" or 0 in ids[start:] for group, ids, start in starts):
                    lost.append(job)
        return lost

    def list_page_ids(self, job: Job) -> Any:
        return self.manager.get_page_ids(job.request_id)


class RowFront(TierFront):
    """Rows of a batch. A row may be swapped out."""

    def __init__(self, manager: Any, setting: Setting, rng: Random) -> None:
        super().__init__(manager, setting, rng)
        page_sizes = [group.page_size for group in setting.groups]
        tables = pagepool.MultiGroupPageTable(NUM_ROWS, setting.max_model_len, 64, page_sizes)
        options = {"data_parallel_size": setting.data_parallel_size, "dedupe": rng.random() < 0.3}
        self.batch = pagepool.RunningBatch(manager, tables, **options)

    def admit(self, job: Job, dp_shard: int | None) -> bool:
        job.row = min(set(range(NUM_ROWS)) - {other.row for other in self.jobs}, default=-1)
        if job.row < 0:
            return False
        num_hits = self.batch.admit(job.row, job.all_token_ids, dp_shard=dp_shard, max_num_new_tokens=self.rng.randint(1, 40))
        if num_hits is None:
            return False
        job.num_computed_tokens, job.num_known_tokens = num_hits, int(self.batch.num_computed_tokens[job.row])
        return True

    def grow(self, job: Job, num_new_tokens: int) -> bool:
        num_unknown = job.num_tokens - int(self.batch.num_tokens[job.row])
        if num_unknown == 1 and num_new_tokens == job.num_tokens - job.num_computed_tokens == 1:
            return bool(self.batch.step([job.row], job.all_token_ids[-1:]).num_grown)
        for token_id in job.all_token_ids[job.num_tokens - num_unknown :]:
            self.batch.append([job.row], [token_id])
        return bool(self.batch.grow([job.row], num_new_tokens).num_grown)

    def end(self, job: Job, num_computed_tokens: int | None = None) -> None:
        self.batch.release([job.row], num_computed_tokens)

    def fork(self, job: Job, target: Job) -> bool:
        target.row = min(set(range(NUM_ROWS)) - {other.row for other in self.jobs}, default=-1)
        if target.row < 0:
            return False
        try:
            self.batch.fork(job.row, [target.row])
        except OutOfPagesError:
            return False
        del target.all_token_ids[int(self.batch.num_tokens[job.row]) :]
        return True

    def rewind(self, failed: Any) -> list[Job]:
        rewound, lost = self.batch.rewind(failed)
        for job in self.jobs:
            if job.row in rewound:
                job.num_computed_tokens = int(self.batch.num_computed_tokens[job.row])
            if job.row in lost:
                job.num_computed_tokens = 0
        return [job for job in self.jobs if job.row in lost]

    def list_page_ids(self, job: Job) -> Any:
        return self.batch.get_page_ids(job.row)

    def swap(self) -> Counter[str]:
        """Swap a row out, and others in. Returns what happened."""
        counts: Counter[str] = Counter()
        for job in self.jobs:
            if job.num_known_tokens < 0 and self.rng.random() < 0.6:
                num_computed_tokens = self.batch.swap_in(job.row)
                if num_computed_tokens is not None:
                    require(num_computed_tokens in (0, -job.num_known_tokens), "a row that came back", job, num_computed_tokens)
                    job.num_computed_tokens, job.num_known_tokens = num_computed_tokens, 0
                    counts["rows swapped in"] += num_computed_tokens > 0
            elif self._may_swap(job) and self.batch.swap_out(job.row):
                job.num_computed_tokens, job.num_known_tokens = 0, -job.num_computed_tokens
                counts["rows swapped out"] += 1
        return counts

    def _may_swap(self, job: Job) -> bool:
        return job.num_known_tokens >= 0 and job.num_computed_tokens > 0 and self.rng.random() < 0.1


class TierSimulation:
    """One setting under one seed, which also chooses sizes and policies."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.setting = setting
        self.counts: Counter[str] = Counter()
        self.histories = Histories()
        num_pages = rng.choice(setting.num_pages)
        tier = HostTier(
            rng.choice((3, num_pages, 4 * num_pages)),
            policy=rng.choice(("write_back", "write_through")),
            min_uses=rng.choice((1, 1, 2)),
            eviction=rng.choice(EVICTION),
        )
        options = {"hash_seed": seed, "eviction": rng.choice(EVICTION), "host_tier": tier}
        groups = setting.cache_groups(pagepool)
        self.manager = setting.manager(pagepool.CacheManager, groups, num_pages, **options)
        kinds = rng.choice(([RequestFront], [RowFront], [RequestFront, RowFront]))
        self.fronts = [kind(self.manager, setting, rng) for kind in kinds]
        self.device, self.host = Device(num_pages, setting.groups), Device(tier.num_pages, setting.groups)
        self.in_flight: list[InFlight] = []
        self.families = [self._tokens(setting.max_model_len) for _ in range(3)]
        self._names = (f"job {number}" for number in itertools.count())

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=num_tokens)

    def run(self, num_steps: int = NUM_STEPS) -> Counter[str]:
        """Run steps, then end all jobs; return the counts."""
        for _ in range(num_steps):
            self.step()
            self.intervene()
            if self.rng.random() < 0.01:
                self.drain()
                require(self.manager.reset_prefix_cache(), "a cache that cannot be reset")
                self.counts["resets"] += 1
        self.drain()
        self.counts["slots compared"] = self.device.num_compared
        return self.counts

    def drain(self) -> None:
        """End all jobs, and all transfers."""
        for front in self.fronts:
            for job in list(front.jobs):
                self.end(front, job)
        self.transfer()
        while self.in_flight:
            self.end_transfers()
        require(self.manager.page_pool.get_num_free_pages() == self.manager.num_pages - 1, "a page that nobody gave back")

    def end(self, front: TierFront, job: Job, num_computed_tokens: int | None = None) -> None:
        front.end(job, num_computed_tokens)
        front.jobs.remove(job)

    # --- a step -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, transfer, copy, and compute, or fail."""
        plan: list[tuple[TierFront, Job, int, int]] = []
        for front in self.fronts:
            for job in list(front.jobs):
                self._grow(front, job, plan)
            if self.rng.random() < 0.6:
                self._admit(front, plan)
        self.manager.check()
        self.transfer()
        if self.rng.random() < 0.06:
            self._abort(plan)
        for front, job, start, stop in plan:
            if job in front.jobs:
                self._compute(front, job, start, stop)

    def _grow(self, front: TierFront, job: Job, plan: list[Any]) -> None:
        if job.num_known_tokens < 0 and self.rng.random() < 0.95:
            return  # swapped out
        if job.num_tokens >= job.num_final_tokens or self.rng.random() < 0.05:
            self.end(front, job)
        elif self.rng.random() < 0.9:
            job.num_known_tokens = 0
            if job.num_computed_tokens == job.num_tokens:
                job.all_token_ids.append(self.rng.choice(VOCABULARY))
            stop = front.draw_end(job, job.num_computed_tokens)
            if front.grow(job, stop - job.num_computed_tokens):
                plan.append((front, job, job.num_computed_tokens, stop))
            else:
                self.counts["preemptions"] += 1
                self.end(front, job)

    def _admit(self, front: TierFront, plan: list[Any]) -> None:
        most, size = self.setting.max_model_len, self.setting.data_parallel_size
        base = self.rng.choice(self.families)
        tokens = (base[: self.rng.randint(0, most - 1)] + self._tokens(self.rng.randint(1, 3)))[: most - 1]
        job = Job(next(self._names), tokens, self.rng.randint(len(tokens), most), self.histories)
        if front.admit(job, self.rng.randrange(size) if size else None):
            front.jobs.append(job)
            plan.append((front, job, job.num_computed_tokens, job.num_known_tokens))
            self.counts["hit tokens"] += job.num_computed_tokens
            job.num_known_tokens = 0

    def _abort(self, plan: list[tuple[TierFront, Job, int, int]]) -> None:
        """Fail after something was written."""
        self.counts["aborted steps"] += 1
        for front, job, start, stop in plan[::-1]:
            self._write(front, job, start, [self.histories.make_garbage()] * (stop - start))
        for front, job, start, _ in plan[::-1]:
            self.end(front, job, start)

    def _compute(self, front: TierFront, job: Job, start: int, stop: int) -> None:
        """Compare what tokens attend to, and write them. What is computed with a page that fails to load is garbage."""
        is_right = self._read(front, job, start)
        require(is_right or any(one.failed_loads for one in self.in_flight), "a wrong page was read", job, start)
        histories = job.list_histories(stop)[start:] if is_right else [self.histories.make_garbage()] * (stop - start)
        self._write(front, job, start, histories)
        job.num_computed_tokens = stop

    def _read(self, front: TierFront, job: Job, stop: int) -> bool:
        """Whether all that the token at `stop` attends to is what was computed."""
        histories, is_right = job.list_histories(stop), True
        for group_id, (group, ids) in enumerate(zip(self.setting.groups, front.list_page_ids(job), strict=True)):
            if group.kind == "mamba":
                slots, expected = np.array(ids[:1], dtype=np.int32), histories[-1:]
            else:
                first = max(0, find_first_read(group, stop))
                slots, expected = self._slots(group.page_size, ids, first, stop), histories[first:]
            if expected:
                is_right &= self.device.holds(group_id, slots, expected)
        return is_right

    def _write(self, front: TierFront, job: Job, start: int, histories: Sequence[int]) -> None:
        for group_id, (group, ids) in enumerate(zip(self.setting.groups, front.list_page_ids(job), strict=True)):
            if group.kind == "mamba":
                self.device.write(group_id, np.array(ids[:1], dtype=np.int32), histories[-1:])
                continue
            self.device.write(group_id, self._slots(group.page_size, ids, start, start + len(histories)), histories)

    @staticmethod
    def _slots(page_size: int, page_ids: Sequence[int], start: int, stop: int) -> Any:
        pages, offsets = np.divmod(np.arange(start, stop), page_size)
        return (np.array(page_ids)[pages] * page_size + offsets).astype(np.int32)

    # --- transfers --------------------------------------------------------------------------------------------

    def transfer(self) -> None:
        """Take transfers and copies, and do them, except that saves reach the host when they end."""
        transfers = self.manager.take_transfers()
        saved = self.device.cells[transfers.save_src].copy()
        loaded = self.host.cells[transfers.load_src].copy()
        failed_loads = self._draw_places(len(loaded))
        loaded[failed_loads] = self.histories.make_garbage()
        self.device.cells[transfers.load_dst] = loaded
        if transfers.number:
            self.in_flight.append(InFlight(transfers, saved, self._draw_places(len(saved)), failed_loads))
        copies = self.manager.take_copies()
        self.device.copy(copies.src, copies.dst)
        self.counts["pages saved"] += len(saved)
        self.counts["pages loaded"] += len(loaded)

    def _draw_places(self, num: int) -> list[int]:
        return [place for place in range(num) if self.rng.random() < 0.3] if self.rng.random() < 0.1 else []

    def end_transfers(self) -> None:
        """End transfers, in any order. The pages of those that fail hold garbage."""
        one = self.in_flight.pop(self.rng.randrange(len(self.in_flight)))
        one.saved[one.failed_saves] = self.histories.make_garbage()
        self.host.cells[one.transfers.save_dst] = one.saved
        if not one.failed_saves and not one.failed_loads:
            self.manager.complete_transfers(one.transfers.number)
            return
        self.counts["failed transfers"] += len(one.failed_saves) + len(one.failed_loads)
        failed = self.manager.fail_transfers(one.transfers.number, saves=one.failed_saves, loads=one.failed_loads)
        require(failed.page_ids == one.transfers.load_dst[one.failed_loads].tolist(), "other pages have failed", failed)
        for front in self.fronts:
            for job in front.rewind(failed):
                self.end(front, job, 0)

    # --- between steps ----------------------------------------------------------------------------------------

    def intervene(self) -> None:
        """End transfers, fork, swap."""
        while self.in_flight and (len(self.in_flight) > 4 or self.rng.random() < 0.5):
            self.end_transfers()
        for front in self.fronts:
            if isinstance(front, RowFront):
                self.counts += front.swap()
        self.transfer()
        for front in self.fronts:
            if front.jobs and self.rng.random() < 0.15:
                self._fork(front, self.rng.choice(front.jobs))
        self.transfer()

    def _fork(self, front: TierFront, job: Job) -> None:
        if job.num_known_tokens < 0 or not job.num_computed_tokens:
            return
        target = replace(job, request_id=next(self._names), all_token_ids=list(job.all_token_ids), row=-1)
        target.share_serial(job)
        try:
            if front.fork(job, target):
                front.jobs.append(target)
                self.counts["forks"] += 1
        except ArgumentError:  # it went back behind a window
            require(any(group.kind != "full" for group in self.setting.groups), "a fork that is refused", job)


def run_tier_round(setting: Setting, seed: int, num_steps: int = NUM_STEPS) -> Counter[str]:
    """Run a simulation; what it raises has a note of setting and seed."""
    try:
        return TierSimulation(setting, seed).run(num_steps)
    except Exception as error:
        error.add_note(f"setting {setting.name!r}, seed {seed}")
        raise


def main() -> None:
    """Run rounds of all settings for some time, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", help="the name of one setting")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    settings = [setting for setting in TIER_SETTINGS if arguments.setting in (None, setting.name)]
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for number in itertools.count():
        if time.monotonic() - start > arguments.seconds:
            break
        counts += run_tier_round(settings[number % len(settings)], arguments.seed + number)
        counts["rounds"] += 1
    for name, count in counts.items():
        print(f"{count:12,} {name}")


if __name__ == "__main__":
    main()
