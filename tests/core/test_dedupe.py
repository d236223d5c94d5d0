"""Rows that share equal pages, by hand: forks share a page that was cached, a request's hit keeps its entry, and a refused fork
changes nothing. `test_differential.py` and `test_contents.py` have which pages are shared.
"""

from __future__ import annotations

from typing import Any

import pytest
from hybrids import FULL, PROMPT, batch_state, make_batch, make_manager, make_request, run
from refusing import refused

from pagepool import CacheManager, EngineRequest, FullAttentionSpec, RunningBatch
from pagepool.errors import OutOfPagesError

FULL_8 = FullAttentionSpec(8, 1, 8, "float16", False)
FULL_6 = FullAttentionSpec(6, 1, 8, "float16", False)
NUM_PAGES = 64


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
    with refused(
        lambda: batch_state(batch), OutOfPagesError, "got forks that need 1 pages, allowed: at most the 0 that are free"
    ):
        batch.fork(0, [1])
    assert batch.get_page_ids(0)[0][:4] == manager.get_page_ids("first")[0][:4]
    assert batch.get_page_ids(0)[0][4] != manager.get_page_ids("first")[0][4]
    manager.page_pool.free_page_ids(taken)
    batch.fork(0, [1])
    assert batch.get_page_ids(0)[0] == batch.get_page_ids(1)[0] == manager.get_page_ids("first")[0][:5]
    batch.check()
