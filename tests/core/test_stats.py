"""A manager's statistics: against the pool's own records, and over time."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError
from functools import partial
from random import Random

import pytest
from hybrids import FULL, allocate, start
from hybrids import make_manager as make_hybrid
from settings import NUM_OPERATIONS

import pagepool
from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CacheStats,
    EngineRequest,
    EngineRequestStatus,
    PageTable,
    RequestTraits,
    RunningBatch,
)

make_manager = partial(make_hybrid, FULL, num_pages=12)


def assert_agrees(manager: CacheManager) -> CacheStats:
    """Compare the statistics with the pool's pages, counted one by one."""
    stats, pages = manager.stats(), manager.page_pool.pages[1:]
    assert stats.num_pages == len(pages)
    assert stats.num_free_pages == sum(page.is_free for page in pages)
    assert stats.num_held_pages == sum(page.ref_cnt > 0 for page in pages)
    assert stats.num_cached_pages == sum(page.page_hash is not None for page in pages)
    assert stats.usage == stats.num_held_pages / stats.num_pages
    pool = manager.page_pool.stats
    assert (stats.num_allocated_pages, stats.num_freed_pages) == (pool.num_allocated_pages, pool.num_freed_pages)
    assert stats.num_evicted_pages == stats.lifetime.num_times == stats.idle_before_eviction.num_times  # all are sampled
    return stats


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 10_000, 2)))
def test_agrees_with_the_records(seed: int) -> None:
    rng, manager = Random(seed), make_manager()
    running: list[EngineRequest] = []
    num_queried_tokens = num_requests = 0
    for i in range(120):
        if running and rng.random() < 0.5:
            manager.free(running.pop(rng.randrange(len(running))))
        elif rng.random() < 0.05:
            manager.page_pool.evict_pages([rng.randint(1, 11)])
        elif rng.random() < 0.05:
            manager.reset_prefix_cache()
        else:
            token_ids = [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]
            request = EngineRequest(f"{seed}.{i}", token_ids)
            if allocate(manager, request) is not None:
                num_queried_tokens, num_requests = num_queried_tokens + len(token_ids), num_requests + 1
                running.append(request)
        stats = assert_agrees(manager)
        assert stats.queries.num_queried_tokens == num_queried_tokens, f"seed {seed}"
        assert stats.queries.num_requests == num_requests
    assert stats.queries.num_hit_tokens == manager.page_pool.stats.num_hit_tokens > 0
    assert stats.queries.hit_rate == stats.queries.num_hit_tokens / num_queried_tokens
    manager.check()


def test_look_ups_after_a_preemption_are_counted_apart() -> None:
    manager = make_manager()
    batch = RunningBatch(manager, PageTable(2, 16, 64))
    request = start(manager, "a", [1, 2, 3, 4, 5])
    manager.free(request)
    request.status, request.num_computed_tokens = EngineRequestStatus.PREEMPTED, 0
    assert allocate(manager, request) is not None
    batch.admit(0, [1, 2, 3, 4, 5], traits=RequestTraits(is_preempted=True))
    batch.admit(1, [1, 2, 3, 4, 6])
    stats = manager.stats()
    assert stats.queries == pagepool.QueryCounts(2, 10, 4)
    assert stats.preempted_queries == pagepool.QueryCounts(2, 10, 8)
    assert pagepool.QueryCounts().hit_rate == 0


def test_a_request_that_comes_back_counts_apart_whatever_its_status() -> None:
    manager = make_manager()
    request = EngineRequest("a", [1, 2, 3, 4, 5])
    for _ in range(2):
        assert allocate(manager, request) is not None
        manager.free(request)
    stats = manager.stats()
    assert (stats.queries, stats.preempted_queries) == (pagepool.QueryCounts(1, 5, 0), pagepool.QueryCounts(1, 5, 4))
    manager.free_page_hashes(request)  # it has ended: a request with the same id is a new one
    assert allocate(manager, request) is not None
    assert manager.stats().queries == pagepool.QueryCounts(2, 10, 4)


def test_times_of_pages() -> None:
    manager = make_manager(num_pages=4)
    first = start(manager, "a", [1, 2, 3, 4, 5])
    manager.free(first)
    time.sleep(0.03)
    again = start(manager, "b", [1, 2, 3, 4, 6])
    manager.free(again)
    gap = manager.stats().reuse_gap
    assert gap.num_times == 1
    assert sum(gap.counts[:5]) == 0  # none below 16 ms
    assert gap.sum_seconds >= 0.03
    time.sleep(0.02)
    start(manager, "c", [7] * 12)
    stats = manager.stats()
    assert stats.num_evicted_pages == stats.lifetime.num_times == 1
    assert stats.lifetime.sum_seconds >= stats.idle_before_eviction.sum_seconds + 0.03
    assert stats.idle_before_eviction.sum_seconds >= 0.02
    assert len(stats.lifetime.counts) == len(stats.lifetime.bounds_seconds) + 1


def test_of_large_pools_pages_are_sampled() -> None:
    manager = make_manager(num_pages=100_000, max_model_len=2**20)
    for i in range(2):
        request = start(manager, f"{i}", list(range(i * 400_000, i * 400_000 + 399_996)))
        manager.free(request)
    stats = manager.stats()
    assert stats.num_evicted_pages > 90_000
    assert 0.9 < stats.lifetime.num_times * 128 / stats.num_evicted_pages < 1.1


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_pages_that_lru_would_have_hit(eviction: str) -> None:
    """In a pool that evicts nothing, those that were hit: held ones, and free ones that were found in time."""
    manager = make_manager(eviction=eviction)
    requests = [start(manager, name, [*range(8), len(name)]) for name in ("a", "bb", "ccc")]
    for request in requests:
        manager.free(request)
    start(manager, "dddd", [*range(4), 9])
    stats = manager.stats()
    expected = (2 + 2 + 1,) * 2 if eviction == "adaptive" else (None, None)
    assert (stats.num_hit_pages, stats.num_lru_hit_pages) == expected
    again = make_manager(page_pool=manager.page_pool).stats()
    assert (again.num_hit_pages, again.num_lru_hit_pages) == expected


def test_without_caching_and_without_pages() -> None:
    stats = pagepool.CacheManager(1, [], 64, enable_caching=False, eviction="adaptive").stats()
    assert stats.num_hit_pages is None
    assert (stats.num_pages, stats.usage, stats.num_cached_pages) == (0, 0.0, 0)
    with pytest.raises(FrozenInstanceError):
        stats.usage = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("batched", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_saturated_replay_counts_each_request_once(batched: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The manager, its pool, Prometheus and the report give the same number, however often requests were refused."""
    registry_of = pytest.importorskip("prometheus_client").CollectorRegistry
    pytest.importorskip("rich")
    from pagepool.replay import Scheduler, generate_chats
    from pagepool.replay.simulation.report import print_report
    from pagepool.stats.prometheus import CacheCollector

    chats = generate_chats(num_requests=60, seed=3)
    num_pages = 2 + max(request.num_slots for request in chats) // 8
    manager = CacheManager(num_pages, [CacheGroupSpec(pagepool.FullAttentionSpec(16, 1, 8, "float16", False))], 1 << 20)
    registry = registry_of()
    registry.register(CacheCollector(manager))
    figures = Scheduler(manager, chats, batched=batched, max_num_batched_tokens=512).run()
    stats = manager.stats()
    assert figures.preemptions > 5
    assert 0 < figures.hit_tokens < figures.prompt_tokens
    assert stats.queries == pagepool.QueryCounts(figures.requests, figures.prompt_tokens, figures.hit_tokens)
    assert stats.preempted_queries.num_queried_tokens == figures.returned_tokens
    assert stats.preempted_queries.num_hit_tokens == figures.rehit_tokens > 0
    assert stats.queries.hit_rate == manager.page_pool.stats.hit_rate == figures.hit_rate

    def sample(name: str) -> float:
        value = registry.get_sample_value(f"pagepool_{name}_total")
        assert value is not None
        return value

    assert sample("prefix_cache_hits") / sample("prefix_cache_queries") == figures.hit_rate
    assert sample("preempted_prefix_cache_hits") == figures.rehit_tokens
    print_report({"a path": figures}, "a title")
    assert f"hit rate                                 {figures.hit_rate:.1%}".split() in map(
        str.split, capsys.readouterr().out.splitlines()
    )
