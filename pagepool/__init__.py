"""KV-cache page allocator for LLM inference engines.

`CacheManager` is the interface for engines; `PagePool` is the layer below it. The README has a short example.
"""

import os
from typing import Any

from pagepool import errors, hashing
from pagepool._version import __version__
from pagepool.attention import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeCacheManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from pagepool.coordinator import (
    CacheCoordinator,
    CacheCoordinatorNoPrefixCache,
    HybridCacheCoordinator,
    UnitaryCacheCoordinator,
    get_kv_cache_coordinator,
)
from pagepool.hashing import (
    PageHash,
    PageHashWithGroupId,
    hash_page_tokens,
    hash_request_tokens,
    init_none_hash,
)
from pagepool.manager import CacheManager, CachePages, HostTier, PrefixProbe
from pagepool.page_pool import CachePage, FreeCachePageQueue, PagePool, PageProbe
from pagepool.page_table import (
    PAGE_TABLE_PADDING_VAL,
    SLOT_MAPPING_PADDING_VAL,
    MultiGroupPageTable,
    PageTable,
    device_slot_mapping,
)
from pagepool.request import EngineRequest, EngineRequestStatus, Request
from pagepool.running_batch import FailedLoads, PageCopies, RunningBatch, StepResult, Transfers
from pagepool.specs import (
    AttentionSpec,
    CacheGroupsConfig,
    CacheGroupSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    RuntimePageBudgetEstimate,
    SlidingWindowSpec,
    cdiv,
    create_kv_cache_specs_from_config,
    dp_shard_for_page_id,
    dp_shard_page_bounds,
    estimate_runtime_page_budget,
    pages_per_dp_shard,
    usable_pages_count,
)
from pagepool.stats import CacheStats, HostTierStats, PagePoolStats, QueryCounts, TimeHistogram

__all__ = [
    "NONE_HASH",
    "PAGE_TABLE_PADDING_VAL",
    "SLOT_MAPPING_PADDING_VAL",
    "AttentionSpec",
    "CacheCoordinator",
    "CacheCoordinatorNoPrefixCache",
    "CacheGroupSpec",
    "CacheGroupsConfig",
    "CacheManager",
    "CachePage",
    "CachePages",
    "CacheSpec",
    "CacheStats",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "EngineRequest",
    "EngineRequestStatus",
    "FailedLoads",
    "FreeCachePageQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "HostTier",
    "HostTierStats",
    "HybridCacheCoordinator",
    "MambaManager",
    "MambaSpec",
    "MultiGroupPageTable",
    "PageCopies",
    "PageHash",
    "PageHashWithGroupId",
    "PagePool",
    "PagePoolStats",
    "PageProbe",
    "PageTable",
    "PrefixProbe",
    "QueryCounts",
    "Request",
    "RunningBatch",
    "RuntimePageBudgetEstimate",
    "SingleTypeCacheManager",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StepResult",
    "TimeHistogram",
    "Transfers",
    "UnitaryCacheCoordinator",
    "__version__",
    "cdiv",
    "create_kv_cache_specs_from_config",
    "device_slot_mapping",
    "dp_shard_for_page_id",
    "dp_shard_page_bounds",
    "errors",
    "estimate_runtime_page_budget",
    "get_kv_cache_coordinator",
    "get_manager_for_kv_cache_spec",
    "hash_page_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "pages_per_dp_shard",
    "usable_pages_count",
]


def __getattr__(name: str) -> Any:
    """Return the current ``NONE_HASH``, which `init_none_hash` may change."""
    if name == "NONE_HASH":
        return hashing.NONE_HASH
    raise AttributeError(f"module 'pagepool' has no attribute {name!r}")


if "PAGEPOOL_EASYDEL" in os.environ:
    from pagepool.compat.easydel import install_if_asked

    install_if_asked()
