"""The choice of an eviction policy for vLLM's pools, and what is replaced for it."""

import os

from pagepool.errors import CompatError

__all__ = ["EVICTION_VARIABLE", "POLICIES", "list_replacements", "read_eviction"]

EVICTION_VARIABLE = "PAGEPOOL_VLLM_EVICTION"
"""The environment variable that names the policy."""

POLICIES = ("adaptive", "arc")
"""The values that choose one of pagepool's policies, in any case, with or without whitespace around them."""

LRU = ("lru", "")
"""The values with which vLLM's own order stays."""

METHODS = ("get_new_blocks", "touch", "free_blocks", "cache_full_blocks")


def read_eviction() -> str | None:
    """Return the policy that `EVICTION_VARIABLE` names; None: vLLM's own order. CompatError for any other value."""
    value = os.environ.get(EVICTION_VARIABLE, "")
    word = value.strip().lower()
    if word not in POLICIES + LRU:
        raise CompatError(f"{EVICTION_VARIABLE}: got {value!r}, allowed: {', '.join(POLICIES)}; lru or nothing")
    return word if word in POLICIES else None


def list_replacements(policy: str) -> list[tuple[str, str, str]]:
    """List what has other replacements with a policy: vLLM's module, the name in it, and the name in `eviction.pyx`."""
    return [
        ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", f"make_{policy}_queue"),
        *(("vllm.v1.core.block_pool", f"BlockPool.{name}", name) for name in METHODS),
        ("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", "allocate_slots"),
    ]
