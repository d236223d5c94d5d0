"""Requests admitted from a waiting queue beside `admit`, and steps in front of which requests wait beside steps without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.races.race import QUEUES, STEPS, Race, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group
from pagepool import CacheManager, PageTable, RunningBatch, WaitingQueue, specs

MAX_LEN = 16384
NUM_WAITING = 256
NUM_ROWS = 32
NUM_STEPS = 5 * PAGE_SIZE
NUM_TURNS = 10


class Admitting:
    """Cached prompts, half of each shared by all, which hit when they are admitted to free rows. Hashes are made before."""

    def __init__(self, num_tokens: int, *, is_queued: bool) -> None:
        num_pages = NUM_WAITING * num_tokens // PAGE_SIZE + 1000
        manager = CacheManager(num_pages, [make_group(specs)], MAX_LEN)
        self.batch = RunningBatch(manager, PageTable(NUM_ROWS, MAX_LEN // PAGE_SIZE, MAX_LEN))
        self.queue, self.is_queued = WaitingQueue(manager), is_queued
        rng = np.random.default_rng(SEED)
        prompts = rng.integers(0, VOCABULARY, (NUM_WAITING, num_tokens)).astype(np.int32)
        prompts[:, : num_tokens // 2] = prompts[0, : num_tokens // 2]
        self.prompts = list(prompts)
        for start in range(0, NUM_WAITING, NUM_ROWS):
            for row, prompt in enumerate(self.prompts[start : start + NUM_ROWS]):
                self.batch.admit(row, prompt)
            self.batch.release(range(NUM_ROWS))
        self.page_ids: list[int] = []

    def prepare(self) -> None:
        """Queue all prompts anew."""
        self.batch.release(np.flatnonzero(self.batch.is_admitted))
        for name in [*self.queue]:
            self.queue.remove(name)
        for number, prompt in enumerate(self.prompts):
            self.queue.add(number, prompt)
        self.requests = [self.queue._requests[number] for number in range(NUM_ROWS)]

    def run(self) -> None:
        if self.is_queued:
            for row in range(NUM_ROWS):
                self.batch.admit_next(row, self.queue)
        else:
            for row, request in enumerate(self.requests):
                self.batch.admit(row, request, traits=request.traits)
        self.page_ids = self.batch.num_cached_tokens.tolist()


class Stepping:
    """Rows that decode one token a step, while prompts wait that hit nothing of theirs."""

    def __init__(self, num_waiting: int) -> None:
        num_rows = 256
        manager = CacheManager(num_rows * 64 + 1, [make_group(specs)], MAX_LEN)
        self.batch = RunningBatch(manager, PageTable(num_rows, MAX_LEN // PAGE_SIZE, MAX_LEN))
        rng = np.random.default_rng(SEED)
        self.rows = np.arange(num_rows, dtype=np.int32)
        self.prompts = [rng.integers(0, VOCABULARY, 500 + row % PAGE_SIZE).astype(np.int32) for row in range(num_rows)]
        self.token_ids = rng.integers(0, VOCABULARY, num_rows).astype(np.int32)
        self.queue = WaitingQueue(manager) if num_waiting else None
        for number in range(num_waiting):
            assert self.queue is not None
            self.queue.add(number, rng.integers(0, VOCABULARY, 2000).astype(np.int32))
        self.page_ids: list[int] = []

    def prepare(self) -> None:
        """Begin anew."""
        if self.batch.is_admitted[0]:
            self.batch.release(self.rows)
        for row, prompt in enumerate(self.prompts):
            self.batch.admit(row, prompt)

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.batch.step(self.rows, self.token_ids)
        self.page_ids = self.batch.num_tokens.tolist()


@pytest.mark.parametrize("num_tokens", [2000, 12_000])
def test_admission_from_a_queue(race: Race, num_tokens: int) -> None:
    name = f"a cached prompt of {num_tokens:,} tokens, {NUM_WAITING} waiting"
    contenders: dict[str, Any] = {
        "admit": Admitting(num_tokens, is_queued=False),
        QUEUES.ours: Admitting(num_tokens, is_queued=True),
    }
    race(contenders, Work(name, "request", NUM_ROWS, NUM_TURNS, suite=QUEUES))


def test_steps_with_requests_waiting(race: Race) -> None:
    work = Work(f"decode of 256 rows, {NUM_WAITING} waiting", "step", NUM_STEPS, NUM_TURNS, suite=STEPS)
    race({"no queue": Stepping(0), STEPS.ours: Stepping(NUM_WAITING)}, work)
