"""Options of `CacheManager` in one mapping, as settings and workloads draw them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pagepool import CacheManager, PageHashing, Retention, _core

HASHING = {field.name for field in fields(PageHashing)}


def grouped(**options: Any) -> dict[str, Any]:
    """Return the arguments of `CacheManager`: those of `PageHashing` become its `hashing`, and `windows` one of `retention`."""
    hashing = {name: options.pop(name) for name in HASHING & options.keys()}
    if hashing:
        options["hashing"] = PageHashing(**hashing)
    if "windows" in options:
        options["retention"] = replace(options.get("retention") or Retention(), windows=options.pop("windows"))
    return options


def keep_token_ids(manager: CacheManager) -> CacheManager:
    """Let a new manager keep the tokens of cached pages, as it does with events."""
    registry = manager.registry
    registry.hasher.keep_token_ids = True
    _core.keep_token_ids(registry.store, registry.rules.max_cached_page_size + registry.hasher.hash_lookahead)
    return manager
