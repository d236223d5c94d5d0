"""Descriptions of layers and cache groups, and estimates of how many requests a pool can hold."""

from pagepool.specs.budget import RuntimePageBudgetEstimate, estimate_runtime_page_budget
from pagepool.specs.dtypes import dtype_bits
from pagepool.specs.groups import CacheGroupsConfig, CacheGroupSpec, check_groups
from pagepool.specs.layers import (
    AttentionSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from pagepool.specs.model_config import create_kv_cache_specs_from_config
from pagepool.specs.page_counts import (
    cdiv,
    dp_shard_for_page_id,
    dp_shard_page_bounds,
    find_shard,
    find_shard_bounds,
    pages_per_dp_shard,
    usable_pages_count,
)

__all__ = [
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheGroupsConfig",
    "CacheSpec",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MambaSpec",
    "RuntimePageBudgetEstimate",
    "SlidingWindowSpec",
    "cdiv",
    "check_groups",
    "create_kv_cache_specs_from_config",
    "dp_shard_for_page_id",
    "dp_shard_page_bounds",
    "dtype_bits",
    "estimate_runtime_page_budget",
    "find_shard",
    "find_shard_bounds",
    "pages_per_dp_shard",
    "usable_pages_count",
]
