"""Rows that share equal pages: a prefix of full pages that a running row holds whole hits, whatever is forked, cut, released or
evicted meanwhile, for the row's shard too. `test_differential.py` has which pages are shared.
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from random import Random
from typing import Any

import pytest
from hybrids import (
    CHUNK,
    FULL,
    MAX_MODEL_LEN,
    NUM_ROWS,
    PROMPT,
    WINDOW,
    batch_state,
    make_batch,
    make_manager,
    make_request,
    run,
)
from refusing import refused
from settings import scale

from pagepool import CacheManager, EngineRequest, FullAttentionSpec, Lease, Retention, RunningBatch
from pagepool.errors import ArgumentError, OutOfPagesError

FULL_8 = FullAttentionSpec(8, 1, 8, "float16", False)
FULL_6 = FullAttentionSpec(6, 1, 8, "float16", False)
NUM_PAGES = 64
PROMPTS = [PROMPT[:20], [*PROMPT[:13], *range(7)], [*PROMPT[:8], *range(10, 14)]]

# --- a row that is forked before it takes the page of another -----------------------------------------------------


def make_forked(specs: tuple[Any, ...], num_rows: int, num_ahead: int, **options: Any) -> tuple[CacheManager, RunningBatch]:
    """Cache a prompt of 24 tokens, and let a row compute them as well, filling the last pages by itself; fork it."""
    manager = make_manager(*specs, num_pages=NUM_PAGES, windows="all")
    batch = make_batch(manager, dedupe=True, **options)
    placement = {"dp_shard_hint": 0, "data_parallel_size": 2} if options else {}
    first = make_request("first", 25)
    run(manager, first, 25, **placement)
    manager.free(first)
    batch.admit(2, PROMPT[:22], dp_shard=0 if options else None)
    batch.append([2, 2], PROMPT[22:24])
    batch.grow([2], 2, num_ahead)
    batch.fork(2, [row for row in (1, 3, 0) if row != 2][:num_rows])
    batch.take_copies()
    return manager, batch


def evict_all(manager: CacheManager) -> None:
    """Let all free pages lose their entries."""
    pool = manager.page_pool
    pool.free_page_ids(pool.get_new_page_ids(pool.get_num_free_pages()))


def count_hits(manager: CacheManager, token_ids: list[int], shard: int | None = None) -> int:
    """Return the tokens that a request with these and one more hits, in one of two shards, unless that is None."""
    request = EngineRequest("asks", [*token_ids, 999])
    placement = {} if shard is None else {"dp_shard_hint": shard, "data_parallel_size": 2}
    num_hits = manager.get_computed_pages(request, **placement)[1]
    manager.free_page_hashes(request)
    return num_hits


@pytest.mark.parametrize("data_parallel_size", [None, 2])
@pytest.mark.parametrize("num_ahead", [0, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("specs", [(FULL,), (FULL, FULL_8), (FULL_6, FULL), (FULL, FULL)])
def test_a_fork_shares_the_page_that_was_cached(
    specs: tuple[Any, ...], num_rows: int, num_ahead: int, data_parallel_size: int | None
) -> None:
    """All of them do, at once, and it hits as long as any of them runs."""
    options = {} if data_parallel_size is None else {"data_parallel_size": data_parallel_size}
    manager, batch = make_forked(specs, num_rows, num_ahead, **options)
    num_pages = manager.stats().num_cached_pages
    rows = batch.is_admitted.nonzero()[0].tolist()
    for group, spec in enumerate(specs):
        held = {tuple(batch.get_page_ids(row)[group][: 24 // spec.page_size]) for row in rows}
        assert len(held) == 1
    assert manager.stats().num_cached_pages == num_pages == sum(24 // spec.page_size for spec in specs)
    batch.step(rows, rows)
    while rows:
        evict_all(manager)
        assert count_hits(manager, PROMPT[:24]) == 24
        assert data_parallel_size is None or count_hits(manager, PROMPT[:24], 0) == 24
        batch.release([rows.pop()])
    evict_all(manager)
    assert manager.stats().num_cached_pages == 0


def test_a_page_that_a_request_has_hit_keeps_its_entry() -> None:
    """It is the first of its shard, though not of the pool, where the row takes its pages."""
    manager = make_manager(FULL, num_pages=10)
    batch = make_batch(manager, dedupe=True, data_parallel_size=2)
    first, other = make_request("first", 5), make_request("other", 5)
    placement = {"dp_shard_hint": 1, "data_parallel_size": 2}
    run(manager, first, 5, dp_shard_hint=0, data_parallel_size=2)
    taken = manager.page_pool.get_new_page_ids(2)  # what is left is in the other shard
    batch.admit(0, PROMPT[:4], look_up=False)
    assert (manager.get_page_ids("first"), taken.tolist(), batch.get_page_ids(0)) == (([1, 2],), [3, 4], ([5],))
    hits, num_hit_tokens = manager.get_computed_pages(other, **placement)
    assert hits.get_page_ids() == ([5],)
    assert manager.allocate_slots(other, 1, num_hit_tokens, hits, **placement) is not None
    batch.step([0], [9])
    assert count_hits(manager, PROMPT[:4], 1) == 4
    manager.free(first)
    batch.release([0])
    evict_all(manager)
    assert count_hits(manager, PROMPT[:4]) == 4
    manager.check()


def test_a_refused_fork_changes_nothing() -> None:
    manager = make_manager(FULL, FULL_8, num_pages=NUM_PAGES)
    batch = make_batch(manager, dedupe=True)
    first = make_request("first", 25)
    run(manager, first, 25)
    batch.admit(0, PROMPT[:18])
    batch.append([0, 0], PROMPT[18:20])
    batch.grow([0], 2)
    taken = manager.page_pool.get_new_page_ids(manager.page_pool.get_num_free_pages())
    with refused(lambda: batch_state(batch), OutOfPagesError, "its forks need 1 pages, 0 are free"):
        batch.fork(0, [1])
    assert batch.get_page_ids(0)[0][:4] == manager.get_page_ids("first")[0][:4]
    assert batch.get_page_ids(0)[0][4] != manager.get_page_ids("first")[0][4]
    manager.page_pool.free_page_ids(taken)
    batch.fork(0, [1])
    assert batch.get_page_ids(0)[0] == batch.get_page_ids(1)[0] == manager.get_page_ids("first")[0][:5]
    batch.check()


# --- whatever happens ---------------------------------------------------------------------------------------------


class Rows:
    """Rows of a batch, requests of its manager and leases, which do something at random."""

    def __init__(self, specs: tuple[Any, ...], size: int | None, windows: str, seed: int) -> None:
        self.rng, self.specs, self.size = Random(seed), specs, size
        self.manager = make_manager(*specs, num_pages=NUM_PAGES, windows=windows, retention=Retention(max_leased_share=1.0))
        self.batch = make_batch(self.manager, dedupe=True, data_parallel_size=size)
        self.hit_step = lcm(*(spec.page_size for spec in specs))
        self.tokens: dict[int, list[int]] = {}
        self.shards: dict[int, int | None] = {}
        self.requests: list[EngineRequest] = []
        self.leases: list[Lease] = []
        self.counts: Counter[str] = Counter()

    def act(self) -> None:
        name = self.rng.choice(
            ["admit", "grow", "grow", "step", "step", "fork", "fork", "release", "trim", "ask", "evict", "lease"]
        )
        getattr(self, name)()
        self.batch.take_copies()

    def admit(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.tokens]
        if free:
            row, prompt = self.rng.choice(free), self.rng.choice(PROMPTS)
            num_tokens = self.rng.randint(1, len(prompt))
            shard = self.rng.choice([None, *range(self.size or 0)])
            look_up = self.rng.random() < 0.5
            if self.batch.admit(row, prompt, num_tokens=num_tokens, dp_shard=shard, look_up=look_up) is not None:
                self.tokens[row], self.shards[row] = list(prompt), shard

    def grow(self) -> None:
        rows = [row for row, tokens in self.tokens.items() if self.batch.num_computed_tokens[row] < len(tokens)]
        news = [self.rng.randint(1, len(self.tokens[row]) - self.batch.num_computed_tokens[row]) for row in rows]
        if rows:
            self.batch.grow(rows, news, self.rng.choice([0, 0, 3]))

    def step(self) -> None:
        rows = [
            row for row, tokens in self.tokens.items() if self.batch.num_computed_tokens[row] == len(tokens) < MAX_MODEL_LEN
        ]
        token_ids = [self.rng.choice([1, 2]) if self.rng.random() < 0.2 else 3 for _ in rows]
        result = self.batch.step(rows, token_ids)
        for row, token_id in list(zip(rows, token_ids, strict=True))[: result.num_grown]:
            self.tokens[row].append(token_id)
        if rows and self.rng.random() < 0.4:
            try:
                self.batch.undo(result)
            except ArgumentError:
                return
            for row in rows[: result.num_grown]:
                self.tokens[row].pop()
            self.counts["undone"] += 1

    def fork(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.tokens]
        if free and self.tokens:
            source = self.rng.choice(list(self.tokens))
            targets = self.rng.sample(free, self.rng.randint(1, len(free)))
            try:
                self.batch.fork(source, targets)
            except OutOfPagesError:
                return
            self.tokens |= {target: list(self.tokens[source]) for target in targets}
            self.shards |= dict.fromkeys(targets, self.shards[source])
            self.counts["forked"] += 1

    def release(self) -> None:
        if self.tokens:
            row = self.rng.choice(list(self.tokens))
            self.batch.release([row])
            del self.tokens[row]

    def trim(self) -> None:
        if self.tokens:
            row = self.rng.choice(list(self.tokens))
            num_tokens = self.rng.randint(max(1, len(self.tokens[row]) - 6), len(self.tokens[row]))
            try:
                self.batch.trim([row], num_tokens)
            except ArgumentError:
                return
            del self.tokens[row][num_tokens:]
            self.counts["trimmed"] += 1

    def ask(self) -> None:
        """Run a request that hits rows' pages, or end one."""
        if len(self.requests) > 2:
            self.manager.free(self.requests.pop(0))
            return
        request = EngineRequest(f"{self.rng.random()}", list(self.rng.choice([*PROMPTS, *self.tokens.values()])))
        hint = {} if self.size is None else {"dp_shard_hint": self.rng.randrange(self.size), "data_parallel_size": self.size}
        if run(self.manager, request, request.num_tokens, **hint) is not None:
            self.requests.append(request)

    def evict(self) -> None:
        evict_all(self.manager)

    def lease(self) -> None:
        if len(self.leases) > 2:
            self.leases.pop(0).release()
            return
        for row in self.tokens:
            page_ids = [page_id for page_id in self.batch.get_page_ids(row)[0] if page_id]
            self.leases.append(self.manager.lease(self.rng.sample(page_ids, min(2, len(page_ids)))))
            return

    def check(self) -> None:
        """Each full page of a row has an entry, and one that holds all of them is hit up to the last, in its shard."""
        self.batch.check()
        for row, tokens in self.tokens.items():
            num_computed = int(self.batch.num_computed_tokens[row])
            num_full = num_computed // self.hit_step * self.hit_step
            for spec, page_ids in zip(self.specs, self.batch.get_page_ids(row), strict=True):
                full = [page_id for page_id in page_ids[: num_computed // spec.page_size] if page_id]
                assert all(self.manager.page_pool.pages[page_id].page_hash for page_id in full), (row, full)
            if any(0 in page_ids for page_ids in self.batch.get_page_ids(row)):
                continue
            assert count_hits(self.manager, tokens[:num_full], self.shards[row]) == num_full, (
                row,
                self.batch.get_page_ids(row),
            )
            self.counts["hits"] += num_full > 0


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(
    ("specs", "windows"),
    [
        ((FULL,), "ends"),
        ((FULL, FULL_8), "ends"),
        ((FULL_6, FULL), "ends"),
        ((FULL, WINDOW), "all"),
        ((FULL, WINDOW, CHUNK), "ends"),
    ],
)
def test_what_a_running_row_holds_whole_hits(specs: tuple[Any, ...], windows: str, size: int | None) -> None:
    counts: Counter[str] = Counter()
    for seed in range(scale(30)):
        print(f"seed {seed}")
        rows = Rows(specs, size, windows, seed)
        for _ in range(60):
            rows.act()
            rows.check()
        counts += rows.counts
    assert min(counts[name] for name in ("hits", "forked", "trimmed")) > 0
