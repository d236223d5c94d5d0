"""Requests and records for replays, and replays that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagepool.manager import CacheManager
from pagepool.replay import Figures, Scheduler, SimulatedRequest, TraceRecord
from pagepool.replay.simulation.allocator import Allocator
from pagepool.replay.traces.simulated_request import Int32Array
from pagepool.specs import CacheGroupSpec, FullAttentionSpec

pytest.importorskip("rich")
from pagepool.replay import Plan, PolicyFigures, PoolFigures

pytest.importorskip("click")


SHARED_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def make_manager(
    num_pages: int, page_size: int = 16, enable_caching: bool = True, groups: list[CacheGroupSpec] | None = None
) -> CacheManager:
    groups = groups or [CacheGroupSpec(FullAttentionSpec(page_size, 1, 1, "bfloat16", use_mla=False))]
    return CacheManager(num_pages, groups, 1 << 20, enable_caching=enable_caching)


def generators(num_seeds: int) -> Iterator[np.random.Generator]:
    """Yield a generator for each seed, which is printed."""
    for seed in range(num_seeds):
        print(f"seed {seed}")
        yield np.random.default_rng(seed)


class RecordedAllocator:
    """Records the growth of each request, and failures."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.calls: list[tuple[str, int | None]] = []
        self.names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.allocator, name)

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        num_hits = self.allocator.admit(row, request, max_num_new_tokens)
        num_new_tokens = None
        if num_hits is not None:
            num_new_tokens = min(request.num_tokens - num_hits, max_num_new_tokens)
        self.calls.append((request.request_id, num_new_tokens))
        self.names[row] = request.request_id
        return num_hits

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        num_grown = self.allocator.grow(rows, num_new_tokens)
        names = [self.names[row] for row in rows.tolist()]
        self.calls += zip(names[:num_grown], num_new_tokens.tolist(), strict=False)
        self.calls += [(name, None) for name in names[num_grown:][:1]]
        return num_grown


def request_of(name: str, num_prompt_tokens: int, num_output_tokens: int = 1) -> SimulatedRequest:
    """Make a request that shares no tokens with a request of another name."""
    start = 10_000 * sum(map(ord, name))
    tokens = partial(np.arange, start, start + num_prompt_tokens + num_output_tokens, dtype=np.int32)
    return SimulatedRequest(name, num_prompt_tokens, num_output_tokens, tokens)


def steps_of(scheduler: Scheduler) -> list[list[tuple[str, int | None]]]:
    """Return the calls for slots, by step."""
    recorded = scheduler._allocator = RecordedAllocator(scheduler._allocator)
    steps = []
    while scheduler.waiting or scheduler.running.size:
        recorded.calls = []
        scheduler.step()
        steps.append(recorded.calls)
    return steps


def make_random_requests(rng: np.random.Generator, num_requests: int) -> list[SimulatedRequest]:
    """Return prompts that begin with one of three texts, and answers that others continue."""
    texts = rng.integers(2**31, size=(3, 200), dtype=np.int32)
    requests = []
    for name in range(num_requests):
        num_shared, num_own, num_output_tokens = rng.integers((1, 0, 0), (120, 20, 60)).tolist()
        own = rng.integers(2, size=num_own + int(rng.integers(2)) * num_output_tokens, dtype=np.int32)
        tokens = np.append(texts[rng.integers(3), :num_shared], own)
        tokens = np.append(tokens, texts[0])[: num_shared + num_own + num_output_tokens]
        requests.append(SimulatedRequest(str(name), num_shared + num_own, num_output_tokens, partial(np.copy, tokens)))
    return requests


def compare_paths(requests: list[SimulatedRequest], make: Callable[[], CacheManager], **limits: Any) -> Figures:
    """Run requests through a manager and a running batch. Returns the figures: they are equal, as are the free pages."""
    figures, free_ids = [], []
    for batched in (False, True):
        manager = make()
        scheduler = Scheduler(manager, [replace(request) for request in requests], batched=batched, **limits)
        figures.append(scheduler.run())
        free_ids.append([page.page_id for page in manager.page_pool.free_page_queue.get_all_free_pages()])
        manager.page_pool.check()
    assert figures[0].list_differences(figures[1]) == []
    manager_figures, batch_figures = (replace(each, allocator_seconds=0.0, wall_seconds=0.0) for each in figures)
    assert manager_figures == batch_figures
    assert free_ids[0] == free_ids[1]
    return figures[1]


def record_of(*block_ids: int, input_length: int | None = None, output_length: int = 0, block_size: int = 4) -> TraceRecord:
    length = len(block_ids) * block_size if input_length is None else input_length
    return TraceRecord(0, length, output_length, block_ids, None, block_size)


def make_random_records(rng: np.random.Generator, num_requests: int = 60) -> list[TraceRecord]:
    """Return prompts that continue a prefix of an earlier request or answer, and end anywhere; some answers are known."""
    block_size, num_ids = int(rng.integers(1, 9)), int(rng.integers(2, 5))
    paths: list[tuple[int, ...]] = [()]
    records = []
    for _ in range(num_requests):
        path = paths[rng.integers(len(paths))]
        path = (*path[: rng.integers(len(path) + 1)], *rng.integers(num_ids, size=rng.integers(1, 8)).tolist())
        paths.append(path)
        num_blocks = int(rng.integers(1, len(path) + 1))
        input_length = num_blocks * block_size - int(rng.integers(block_size))
        if rng.integers(2):
            output_length, answer_ids = int(rng.integers(20)), None
        else:
            output_length = len(path) * block_size - input_length + int(rng.integers(block_size))
            answer_ids = path[num_blocks:]
        records.append(TraceRecord(0, input_length, output_length, path[:num_blocks], answer_ids, block_size))
    return records


def run_alone(manager: CacheManager, request: SimulatedRequest) -> list[int]:
    """Run a request alone to its end; return the pages it hit."""
    hits, num_hit_tokens = manager.get_computed_pages(request)
    hit_ids = hits.get_page_ids()[0]
    request.num_tokens = request.num_slots
    assert manager.allocate_slots(request, request.num_slots - num_hit_tokens, num_hit_tokens, hits) is not None
    manager.free(request)
    manager.free_page_hashes(request)
    request.drop_token_ids()
    return hit_ids


def make_loop(num_requests: int = 240) -> list[TraceRecord]:
    """Return prompts of 94 pages, of which every second is one of ten that recur, after 1,880 pages of others."""
    starts = [10 * (i // 2 % 10) if i % 2 else 1000 + 10 * i for i in range(num_requests)]
    return [TraceRecord(i, 1500, 4, tuple(range(start, start + 3))) for i, start in enumerate(starts)]


def plan_of(*runs: tuple[str, int, int, int, int | None], **changes: Any) -> Plan:
    """Return a plan with runs of policy, pages, hits of the policy and of LRU in 1,000 tokens, and LRU's pages for these."""
    pools = {num_pages: PoolFigures(num_pages, 5, 0, 1_000, lru, 900) for _, num_pages, _, lru, _ in runs}
    policies = tuple(PolicyFigures(name, pools[num_pages], hits, as_lru) for name, num_pages, hits, _, as_lru in runs)
    options = {"page_size": 16, "page_bytes": None, "requests": 5, "prompt_tokens": 1_000, "most_hit_tokens": 900}
    return Plan(**{**options, "min_num_pages": 9, "knees": (), "pools": (*pools.values(),), "policies": policies} | changes)
