"""The replacements in vLLM, in parts, and digests of the vLLM code they rely on, recorded from tested versions.

``python -m pagepool.compat.vllm --record`` prints the installed version's entry for `CHANGES` in recorded.json.
"""

import json
from pathlib import Path
from typing import NamedTuple

VERSIONS = ("0.31.*", "0.32.*", "0.33.*")
"""Known versions of vLLM, each tested in its first release."""

OURS = "pagepool.compat.vllm"
"""The package of the replacements."""


class Replacement(NamedTuple):
    """A definition of vLLM and its replacement."""

    home: str
    """The defining module of vLLM."""
    name: str
    """A class or function, replaced in every vLLM module that binds it; or ``Class.method``, set on the class."""
    module: str
    """Our module, below `OURS`."""
    ours: str
    """Its name there."""

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
        """The full name of our replacement."""
        return f"{OURS}.{self.module}.{self.ours}"


class Part(NamedTuple):
    """Replacements that only work together. An unusable part is left to vLLM, with the parts built on it."""

    name: str
    """Its name, also in `DIGESTS`."""
    replacements: tuple[Replacement, ...]
    needs: str | None = None
    """Name of the part on which this one is built."""
    subclassed: tuple[tuple[str, str], ...] = ()
    """Classes, by module and name, that other packages must not subclass."""


UTILS = "vllm.v1.core.kv_cache_utils"
POOL = "vllm.v1.core.block_pool"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
GROUPS = "vllm.v1.core.single_type_kv_cache_manager"
SCHEDULER = "vllm.v1.core.sched.scheduler"

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
"""The parts, each after the one it needs."""

HINTS = Part(
    "hints",
    (
        Replacement(MANAGER, "KVCacheManager.free", "turns", "free"),
        Replacement(MANAGER, "KVCacheManager.pop_blocks_for_free", "turns", "pop_blocks_for_free"),
        Replacement(SCHEDULER, "Scheduler.add_request", "turns", "add_request"),
    ),
    needs="slots",
)
"""A further part, used if pools are to listen to the hints of requests."""

REPLACEMENTS = tuple(item for part in PARTS for item in part.replacements)

BOUND = (UTILS, POOL, MANAGER, COORDINATOR, GROUPS, SCHEDULER, "vllm.v1.engine.core")
"""Modules where a name of `DIGESTS`, if it is bound at all, must be bound to vLLM's own definition."""

INHERITED = ""
"""Digest of a method that a class must inherit."""

_recorded = json.loads(Path(__file__).with_name("recorded.json").read_text())

DIGESTS: dict[str, dict[str, str]] = _recorded["digests"]
"""Digests (`digests_of`) of the vLLM 0.33.0 code that a part replaces, calls or repeats, by part and ``module:name``."""

CHANGES: dict[str, dict[str, str]] = _recorded["changes"]
"""Digests that differ from `DIGESTS`, by tested version. The parts behave the same with each version."""
