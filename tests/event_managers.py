"""Managers that record events, and requests that make some."""

from __future__ import annotations

from typing import Any

from workload import Request

import pagepool

FULL = pagepool.FullAttentionSpec(4, 1, 8, "float16", False)


def make_told(*specs: Any, num_pages: int = 32, **options: Any) -> pagepool.CacheManager:
    groups = [pagepool.CacheGroupSpec(spec) for spec in specs or (FULL,)]
    hashes_as_bytes = options.pop("hashes_as_bytes", False)
    manager = pagepool.CacheManager(num_pages, groups, 256, **options)
    manager.enable_events(hashes_as_bytes=hashes_as_bytes)
    return manager


def run_request(manager: pagepool.CacheManager, token_ids: list[int], **attributes: Any) -> Request:
    """Compute a request; it keeps its pages."""
    request = Request(f"r{len(manager.req_to_page_hashes)}", token_ids, **attributes)
    hits, num_hits = manager.get_computed_pages(request)
    assert manager.allocate_slots(request, len(token_ids) - num_hits, num_hits, hits) is not None
    request.num_computed_tokens = len(token_ids)
    return request
