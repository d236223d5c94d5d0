"""A release or free that is refused changes nothing: no page, no mark, no order of eviction."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hybrids
import pytest
from hybrids import FULL, make_manager
from pool_arrays import pool_lists
from refusing import refused

from pagepool import CacheManager, EngineRequest, HostTier, MultiGroupPageTable, RequestTraits, Retention, RunningBatch
from pagepool.errors import DoubleFreeError

WINDOW = replace(hybrids.WINDOW, sliding_window=9)


def state_of(manager: CacheManager, batch: RunningBatch) -> Any:
    """Return all that can be seen of a pool, also in what order it evicts, and of rows."""
    rows = [(int(batch.num_computed_tokens[row]), batch.get_page_ids(row)) for row in range(3)]
    stats = manager.stats()
    counts = stats.expectations, stats.num_sessions, dict(stats.num_pages_by_tenant), stats.host_tier
    return pool_lists(manager.page_pool), manager.page_pool.free_page_ids_in_order().tolist(), counts, rows


@pytest.fixture(params=[[FULL], [WINDOW], [FULL, WINDOW]], ids=["full", "window", "both"])
def manager(request: pytest.FixtureRequest) -> CacheManager:
    return make_manager(*request.param, num_pages=64, retention=Retention(window_slack=0), host_tier=HostTier(64))


@pytest.fixture
def batch(manager: CacheManager) -> RunningBatch:
    """Two rows that share two pages, and cached pages of others."""
    batch = RunningBatch(manager, MultiGroupPageTable(3, 64, 64, [4] * len(manager.kv_cache_groups)))
    for tokens in ([7] * 9, [8] * 5):
        batch.admit(2, tokens)
        batch.release([2])
    batch.admit(0, list(range(13)), num_tokens=12, traits=RequestTraits(session_id="s"))
    batch.admit(1, list(range(10)), traits=RequestTraits(session_id="t"))
    return batch


@pytest.mark.parametrize("seconds", [None, 30, math.inf])
@pytest.mark.parametrize("rows", [[0], [0, 1], [1, 0]])
def test_a_page_that_somebody_else_gave_back(
    rows: list[int], seconds: float | None, manager: CacheManager, batch: RunningBatch
) -> None:
    """Once: it lacks a reference for the second row, or, twice, for any."""
    pages = batch.get_page_ids(0)[0]
    for _ in range(1 if len(rows) == 2 else 2):
        manager.page_pool.free_page_ids(pages[:1])
    with refused(lambda: state_of(manager, batch), DoubleFreeError, f"page {pages[0]} "):
        batch.release(rows, seconds=seconds)


@pytest.mark.parametrize("seconds", [None, 30])
def test_a_page_of_a_request(seconds: float | None, manager: CacheManager, batch: RunningBatch) -> None:
    request = EngineRequest("a", [9] * 9)
    pages = manager.allocate_slots(request, 9)
    assert pages is not None
    manager.page_pool.free_page_ids(pages.get_page_ids()[0][:1])
    with refused(lambda: state_of(manager, batch), DoubleFreeError, "got more frees than references, allowed: one for each"):
        manager.free(request, seconds=seconds)
