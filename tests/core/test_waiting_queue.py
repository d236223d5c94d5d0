"""Waiting queues: order, hits and bounds against an oracle that looks all requests up in each pass, and what is refused."""

from __future__ import annotations

from random import Random
from threading import Thread
from typing import Any

import pytest
from queue_oracle import QueueOracle
from settings import NUM_OPERATIONS

from pagepool import (
    Admission,
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    PageHashing,
    PageTable,
    RequestTraits,
    RunningBatch,
    SlidingWindowSpec,
    WaitingQueue,
)
from pagepool._core import HashedTokens, WaitingLine
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError

KV: dict[str, Any] = {"page_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
FULL = [CacheGroupSpec(FullAttentionSpec(**KV))]
NUM_ROWS = 8
PROBE_ROW = NUM_ROWS  # never admitted


def make_batch(num_pages: int = 48, groups: Any = FULL, max_model_len: int = 96, **options: Any) -> RunningBatch:
    manager = CacheManager(num_pages=num_pages, kv_cache_groups=groups, max_model_len=max_model_len, **options)
    table = PageTable(
        max_num_reqs=NUM_ROWS + 1,
        max_num_pages_per_req=max_model_len // 4,
        max_num_batched_tokens=512,
    )
    return RunningBatch(manager, table)


class Work:
    """Random requests that come, are admitted, generate, are preempted, cancelled and end, in both queues."""

    def __init__(self, seed: int, batch: RunningBatch, **options: Any) -> None:
        self.rng, self.batch = Random(seed), batch
        self.bound, self.stretch = self.rng.choice([0, 20, 60, 10_000]), self.rng.choice([0.0, 0.25, 1.0])
        self.promote = self.rng.choice([30, 200, 100_000])
        order = self.rng.choice(["work", "work", "arrival"])
        self.queue = WaitingQueue(
            batch._manager,
            order=order,
            max_overtaken_tokens=self.bound,
            max_stretch=self.stretch,
            promote_after_tokens=self.promote,
            **options,
        )
        self.oracle = QueueOracle(self.hits, order == "work", self.bound, self.stretch, self.promote)
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.num_names = 0
        self.priorities = self.rng.choice([[0], [0, 1], [-5, 0, 7]])
        self.prefixes = [[self.rng.randrange(5) for _ in range(self.rng.randrange(4, 60))] for _ in range(4)]

    def hits(self, tokens: list[int]) -> int:
        return self.batch.probe(PROBE_ROW, tokens)

    def make_tokens(self) -> list[int]:
        prefix = self.rng.choice(self.prefixes)
        cut = self.rng.randrange(len(prefix) + 1)
        return prefix[:cut] + [self.rng.randrange(5) for _ in range(self.rng.randrange(1, 30))]

    def add(self) -> None:
        tokens, priority, self.num_names = self.make_tokens(), self.rng.choice(self.priorities), self.num_names + 1
        self.queue.add(self.num_names, tokens, priority=priority)
        self.oracle.add(self.num_names, tokens, priority)

    def admit(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.rows]
        if not free:
            return
        row, wanted = self.rng.choice(free), self.oracle.find_next()
        hits = self.hits(wanted.tokens) if wanted else 0
        got = self.batch.admit_next(row, self.queue, max_num_new_tokens=self.rng.choice([None, 16]))
        if got is None:
            assert wanted is None or self.batch.refusal is not None
            return
        assert wanted is not None
        assert got == Admission(wanted.name, hits)
        assert self.batch.num_cached_tokens[row] == hits
        self.oracle.hits = lambda tokens: hits if tokens is wanted.tokens else self.hits(tokens)  # before its pages were cached
        self.oracle.take(wanted)
        self.oracle.hits = self.hits
        self.rows[row] = (wanted.name, list(wanted.tokens))

    def step(self) -> None:
        for row in list(self.rows):
            name, tokens = self.rows[row]
            left = int(self.batch.num_tokens[row] - self.batch.num_computed_tokens[row])
            if left > 0:
                done = self.batch.plan([row], num_tokens=min(left, 16)).num_grown
            elif len(tokens) < 90:
                tokens.append(self.rng.randrange(5))
                done = self.batch.step([row], [tokens[-1]]).num_grown
            else:
                done = 0
            if not done:
                self.batch.release([row])
                del self.rows[row]
                if len(tokens) < 90:
                    tokens = self.batch_tokens(tokens)
                    self.queue.put_back(name, tokens)
                    self.oracle.add(name, tokens, 0, is_back=True)

    def batch_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self.rng.randrange(1, len(tokens) + 1)] if self.rng.random() < 0.2 else tokens

    def end(self) -> None:
        if self.rows:
            row = self.rng.choice(list(self.rows))
            self.batch.release([row])
            del self.rows[row]

    def cancel(self) -> None:
        name = self.rng.randrange(self.num_names + 2)
        waiters = [waiter for waiter in self.oracle.waiters if waiter.name == name]
        assert self.queue.remove(name) == (len(waiters) > 0) == (name not in self.queue and len(waiters) > 0)
        if waiters:
            self.oracle.waiters.remove(waiters[0])

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.rng.choice([self.add, self.add, self.admit, self.admit, self.step, self.step, self.end, self.cancel])()
            self.compare()

    def compare(self) -> None:
        order = [(item.name, item.num_cached_tokens) for item in self.queue.peek(10**6)]
        assert order == self.oracle.list_order()
        stats = self.queue.stats()
        assert stats.num_waiting == len(self.queue) == len(self.oracle.waiters)
        assert stats.num_work_tokens == sum(map(self.oracle.work, self.oracle.waiters))
        assert stats[5:8] == (self.oracle.num_computed, self.oracle.num_overtakes, self.oracle.num_charged)
        self.queue.check()


@pytest.mark.parametrize("seed", range(max(4, NUM_OPERATIONS // 2000)))
def test_queue_agrees_with_an_oracle(seed: int) -> None:
    Work(seed, make_batch()).run(150)


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(seed, flush=True)
        Work(seed, make_batch()).run(150)
