"""Managers that record events, and requests that make some."""

from __future__ import annotations

from typing import Any

from hybrids import FULL, allocate, make_manager
from twin_engine import Request

import pagepool


def make_told(*specs: Any, num_pages: int = 32, **options: Any) -> pagepool.CacheManager:
    hashes_as_bytes = options.pop("hashes_as_bytes", False)
    manager = make_manager(*specs or (FULL,), num_pages=num_pages, max_model_len=256, **{"hash_seed": None} | options)
    manager.enable_events(hashes_as_bytes=hashes_as_bytes)
    return manager


def run_request(manager: pagepool.CacheManager, token_ids: list[int], **attributes: Any) -> Request:
    """Compute a request; it keeps its pages."""
    request = Request(f"r{len(manager.registry.hashes)}", token_ids, **attributes)
    assert allocate(manager, request) is not None
    request.num_computed_tokens = len(token_ids)
    return request
