"""Pools reused by a manager: only a pool that was cached in the same way, and that can hold its hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hybrids import CHUNK, FULL, WINDOW, keep_every, start
from hybrids import make_manager as make_hybrid
from pool_arrays import pool_lists
from refusing import refused

from pagepool import CacheManager, EngineRequest, PagePool, PageTable, RunningBatch
from pagepool._core import HashChain, keep_token_ids
from pagepool.errors import ArgumentError, PageHashError, PageIdError

NUM_PAGES = 64
LIMIT = (1 << 31) - 1
PROMPT = list(range(20))
WIDE = replace(FULL, page_size=8)
STATE = keep_every(None)


make_manager = partial(make_hybrid, default=(FULL,), num_pages=NUM_PAGES, max_model_len=256, hash_seed=3)


def cache(manager: CacheManager) -> PagePool:
    """Let a manager cache a prompt, and free its pages."""
    manager.free(start(manager, "prompt", PROMPT))
    return manager.page_pool


def first_token(content: Any) -> int:
    token: int = content[1][0]
    return token


DIFFERENCES: dict[str, tuple[Callable[..., CacheManager], Callable[..., CacheManager], str]] = {
    "seed": (make_manager, partial(make_manager, hash_seed=4), r"hash_seed: got 'digest \w+', allowed: 'digest \w+'"),
    "algorithm": (make_manager, partial(make_manager, hash_algo="sha256"), "hash_algo: got 'sha256', allowed: 'siphash128'"),
    "callable": (
        partial(make_manager, hash_algo=hash),
        partial(make_manager, hash_algo=first_token),
        r"hash_algo: got 'callable \S*test_configuration.first_token', allowed: 'callable builtins.hash'",
    ),
    "page size": (make_manager, partial(make_manager, WIDE), r"kv_cache_groups\[0\].page_size: got 8, allowed: 4"),
    "kind": (
        make_manager,
        partial(make_manager, WINDOW),
        r"kv_cache_groups\[0\].kind: got 'SlidingWindow', allowed: 'FullAttention'",
    ),
    "window": (
        partial(make_manager, FULL, WINDOW),
        partial(make_manager, FULL, replace(WINDOW, sliding_window=8)),
        r"kv_cache_groups\[1\].sliding_window: got 8, allowed: 5",
    ),
    "chunk": (
        partial(make_manager, CHUNK),
        partial(make_manager, replace(CHUNK, attention_chunk_size=16)),
        r"kv_cache_groups\[0\].attention_chunk_size: got 16, allowed: 8",
    ),
    "number": (partial(make_manager, FULL, WINDOW), make_manager, "num_kv_cache_groups: got 1, allowed: 2"),
    "order": (
        partial(make_manager, FULL, STATE),
        partial(make_manager, STATE, FULL),
        r"kv_cache_groups\[0\].kind: got 'Mamba', allowed: 'FullAttention'",
    ),
    "stride": (
        partial(make_manager, WIDE, replace(WINDOW, page_size=8)),
        partial(make_manager, WIDE, WINDOW),
        r"kv_cache_groups\[0\].num_hashes_per_page: got 2, allowed: 1",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_pool_that_was_cached_otherwise_is_refused(difference: str) -> None:
    make, make_other, message = DIFFERENCES[difference]
    pool = cache(make())
    message = f"^page_pool: {message}, with which its .* cached pages were cached"
    with refused(lambda: pool_lists(pool), ArgumentError, message):
        make_other(page_pool=pool)
    hits, _ = make(page_pool=pool).get_computed_pages(EngineRequest("again", PROMPT))
    assert any(hits.get_page_ids()) or difference in ("order", "chunk")
    pool.check()


@pytest.mark.parametrize(
    "options",
    [{"hash_algo": "sha256"}, {"hash_algo": "sha256", "hash_seed": None}, {"hash_algo": hash}, {"keep_token_ids": True}],
    ids=["sha256", "sha256 without a seed", "hash", "token ids"],
)
def test_a_pool_that_was_cached_alike_is_taken(options: dict[str, Any]) -> None:
    pool = cache(make_manager(**options))
    assert make_manager(**options, page_pool=pool).get_computed_pages(EngineRequest("again", PROMPT))[1] == 16


def test_a_pool_without_cached_pages_goes_to_anybody() -> None:
    """Held pages do not concern a manager. The configuration of pages that no manager cached is unknown."""
    pool = cache(make_manager())
    assert pool.reset_prefix_cache()
    pool.get_new_page_ids(3)
    unused = PagePool(NUM_PAGES, enable_caching=True)
    unused.store.enter(5, 1 << 100, 0)
    assert unused.configuration is None
    for one in (pool, unused):
        manager = make_manager(WIDE, hash_seed=9, page_pool=one)
        cache(manager)
        assert manager.get_computed_pages(EngineRequest("again", PROMPT))[1] == 16
        with pytest.raises(ArgumentError, match="page_size: got 4, allowed: 8"):
            make_manager(hash_seed=9, page_pool=one)


def test_a_manager_takes_only_a_pool_that_fits() -> None:
    pool = cache(make_manager())
    for options in ({"num_pages": NUM_PAGES + 1}, {"enable_caching": False}):
        with pytest.raises(ArgumentError, match="page_pool: got 64 pages, caching True"):
            make_manager(**options, page_pool=pool)


# Tokens that are kept.


def make_pool_that_keeps(width: int) -> PagePool:
    """Make a pool without a manager, with a page whose tokens are kept."""
    pool = PagePool(NUM_PAGES, enable_caching=True)
    keep_token_ids(pool.store, width)
    chain = HashChain(width, bytes(16), keep_token_ids=True)
    chain.extend(list(range(width)))
    pool.store.enter_pages(pool.store.take(1), chain, 0, 0)
    return pool


def test_a_pool_that_keeps_too_few_tokens_is_refused_before_anything_is_taken() -> None:
    message = r"^page_pool: got one that keeps 2 token ids of a page, allowed for pages of 4: none, or at least 4$"
    with pytest.raises(ArgumentError, match=message):
        make_manager(page_pool=make_pool_that_keeps(2))
    for width, options in ((4, {}), (8, {}), (8, {"keep_token_ids": True})):
        pool = cache(make_manager(**options, page_pool=make_pool_that_keeps(width)))
        assert pool.store.num_kept_token_ids == max(width, 4)
        pool.check()


# References at the limit.


def make_pool_with(count: int) -> PagePool:
    """Make a pool whose page 1, the first of a prompt, has that many holders."""
    pool = cache(make_manager())
    pool.touch_page_ids([1])
    pool.store.set_ref_count(1, count)
    return pool


@pytest.mark.parametrize("num_left", [1, 2])
def test_a_page_is_not_held_more_often_than_can_be_counted(num_left: int) -> None:
    pool = make_pool_with(LIMIT - num_left)
    manager = make_manager(page_pool=pool)
    batch = RunningBatch(manager, PageTable(1, 64, 64))
    request = EngineRequest("again", PROMPT)
    hits, num_hit_tokens = manager.get_computed_pages(request)
    pool.touch_page_ids([1] * (num_left - 1))
    with pytest.raises(PageIdError, match=f"page 1: got ref count {LIMIT - 1}, allowed for a touch: fewer than"):
        pool.touch_page_ids([1])
    with pytest.raises(PageIdError, match=r"page 1: got ref count .*, allowed for a touch"):
        manager.allocate_slots(request, 4, num_hit_tokens, hits)
    with pytest.raises(PageHashError, match="cannot be held"):
        batch.admit(0, PROMPT)
    with pytest.raises(ArgumentError, match="fewer than"):
        pool.pages[1].incr_ref()
    assert pool.ref_counts()[1] == LIMIT - 1
    pool.check()
    pool.free_page_ids([1])
    assert pool.ref_counts()[1] == LIMIT - 2
