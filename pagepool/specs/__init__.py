"""Descriptions of layers and cache groups."""

from pagepool.specs.layers import (
    AttentionSpec,
    CacheGroupSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    check_groups,
)
from pagepool.specs.model_config import create_kv_cache_specs_from_config
from pagepool.specs.sizes import (
    cdiv,
    dp_shard_page_bounds,
    dtype_bits,
    find_shard,
    find_shard_bounds,
    pages_per_dp_shard,
    usable_pages_count,
)

__all__ = [
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheSpec",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "cdiv",
    "check_groups",
    "create_kv_cache_specs_from_config",
    "dp_shard_page_bounds",
    "dtype_bits",
    "find_shard",
    "find_shard_bounds",
    "pages_per_dp_shard",
    "usable_pages_count",
]
