"""What is replaced in vLLM, in which parts, and what the parts rely on, as recorded from the versions that were tested.

``python -m pagepool.compat.vllm --record`` prints what `CHANGES`, in recorded.json, has to say of the installed version.
"""

import json
from pathlib import Path
from typing import NamedTuple

__all__ = ["BOUND", "CHANGES", "DIGESTS", "INHERITED", "OURS", "PARTS", "REPLACEMENTS", "VERSIONS", "Part", "Replacement"]

VERSIONS = ("0.31.*", "0.32.*", "0.33.*")
"""The versions of vLLM that are known: of each, the first release was tested."""

OURS = "pagepool.compat.vllm"
"""The package of the replacements."""


class Replacement(NamedTuple):
    """A definition of vLLM, and what replaces it."""

    home: str
    """vLLM's module that defines it."""
    name: str
    """A class or function, which is replaced wherever a module of vLLM binds it; or ``Class.method``, set on the class."""
    module: str
    """Our module, below `OURS`."""
    ours: str
    """The name in it."""

    @property
    def is_method(self) -> bool:
        """Whether it is set on a class."""
        return "." in self.name

    @property
    def last_name(self) -> str:
        """The name in its module or class."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The full name of vLLM's definition."""
        return f"{self.home}.{self.name}"

    @property
    def source(self) -> str:
        """The full name of ours."""
        return f"{OURS}.{self.module}.{self.ours}"


class Part(NamedTuple):
    """Replacements that are of use only together. A part that cannot be used is left to vLLM, with those that need it."""

    name: str
    """Its name, also in `DIGESTS`."""
    replacements: tuple[Replacement, ...]
    needs: str | None = None
    """The part on whose replacements these are built."""
    subclassed: tuple[tuple[str, str], ...] = ()
    """Classes, by module and name, whose subclasses in other packages know nothing of this part."""


UTILS = "vllm.v1.core.kv_cache_utils"
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
GROUPS = "vllm.v1.core.single_type_kv_cache_manager"

PARTS = (
    Part(
        "blocks",
        (
            Replacement(UTILS, "KVCacheBlock", "blocks", "Block"),
            Replacement(UTILS, "FreeKVCacheBlockQueue", "blocks", "Queue"),
            Replacement(POOL, "BlockHashToBlockMap", "blocks", "BlockMap"),
        ),
        subclassed=((UTILS, "KVCacheBlock"), (UTILS, "FreeKVCacheBlockQueue")),
    ),
    Part("hasher", (Replacement(UTILS, "get_request_block_hasher", "hasher", "get_request_block_hasher"),)),
    Part(
        "pool",
        (
            Replacement(POOL, "BlockPool.get_cached_block", "pool", "get_cached_block"),
            Replacement(POOL, "BlockPool.get_new_blocks", "pool", "get_new_blocks"),
            Replacement(POOL, "BlockPool.touch", "pool", "touch"),
            Replacement(POOL, "BlockPool.free_blocks", "pool", "free_blocks"),
            Replacement(POOL, "BlockPool.cache_full_blocks", "pool", "cache_full_blocks"),
            Replacement(MANAGER, "KVCacheBlocks.get_block_ids", "pool", "get_block_ids"),
            Replacement(GROUPS, "SingleTypeKVCacheManager._get_num_evictable_blocks", "pool", "count_evictable"),
        ),
        needs="blocks",
        subclassed=((POOL, "BlockPool"),),
    ),
    Part(
        "hits",
        (
            Replacement(GROUPS, "FullAttentionManager.find_longest_cache_hit", "hits", "find_full_hit"),
            Replacement(GROUPS, "SlidingWindowManager.find_longest_cache_hit", "hits", "find_window_hit"),
        ),
        needs="pool",
    ),
    Part(
        "slots",
        (
            Replacement(MANAGER, "KVCacheManager.allocate_slots", "slots", "allocate_slots"),
            Replacement(MANAGER, "KVCacheManager.cache_blocks", "slots", "cache_blocks"),
            Replacement(MANAGER, "KVCacheManager.estimate_cached_tokens", "slots", "estimate_cached_tokens"),
        ),
        needs="pool",
        subclassed=((MANAGER, "KVCacheManager"),),
    ),
)
"""The parts, each behind the one that it needs."""

REPLACEMENTS = tuple(item for part in PARTS for item in part.replacements)

BOUND = (UTILS, POOL, MANAGER, COORDINATOR, GROUPS, "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core")
"""Modules in which a name of `DIGESTS` means what vLLM defines, where they bind it."""

INHERITED = ""
"""The digest of a method that a class has to inherit."""

_recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())

DIGESTS: dict[str, dict[str, str]] = _recorded["digests"]
"""By part and ``module:name``: the digests (`digests_of`) of what the part replaces, calls or repeats, in vLLM 0.33.0."""

CHANGES: dict[str, dict[str, str]] = _recorded["changes"]
"""By tested version: digests that differ from those in `DIGESTS`. The parts do the same for each of them."""
