"""Managers whose pools are saved, and what can be seen of a pool."""

from __future__ import annotations

import random
from typing import Any

import pagepool
from pagepool import CacheManager, EngineRequest, PagePool

PAGE_SIZE = 4


def state_of(pool: PagePool) -> dict[str, Any]:
    """Return everything that a user can observe of a pool."""
    return {
        "ref_counts": pool.ref_counts().tolist(),
        "free": pool.free_page_ids_in_order().tolist(),
        "hashes": [page.page_hash for page in pool.pages],
        "twins": {key: list(pool.cached_page_hash_to_page[key]) for key in pool.cached_page_hash_to_page},
        "num_keys": len(pool.cached_page_hash_to_page),
        "stats": pool.stats,
        "caching": pool.enable_caching,
    }


def make_group(page_size: int = PAGE_SIZE) -> pagepool.CacheGroupSpec:
    return pagepool.CacheGroupSpec(pagepool.FullAttentionSpec(page_size, 1, 8, "float32", False))


def make_manager(num_pages: int = 64, **options: Any) -> CacheManager:
    return CacheManager(num_pages, [make_group()], max_model_len=256, hash_seed=3, **options)


def run_requests(manager: CacheManager, rng: random.Random, num_requests: int) -> list[EngineRequest]:
    """Run chats with common beginnings, half of which continue. Returns those."""
    running = []
    for i in range(num_requests):
        request = EngineRequest(f"{i}-{rng.random()}", [rng.randrange(2) for _ in range(rng.randrange(1, 24))])
        hits, num_hit_tokens = manager.get_computed_pages(request)
        if manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits) is None:
            continue
        if rng.random() < 0.5:
            manager.free(request)
        else:
            running.append(request)
    return running
