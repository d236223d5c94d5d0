"""KV-cache page allocator for LLM inference engines.

`CacheManager` is the interface for engines; `PagePool` is the layer below it. The README has a short example.
"""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

if not any(os.path.exists(os.path.join(os.path.dirname(__file__), f"_core{suffix}")) for suffix in EXTENSION_SUFFIXES):
    # `python -m pagepool` prints the message alone if the error has the package's name.
    raise ImportError(
        f"{os.path.dirname(__file__)} has no compiled core for {sys.implementation.cache_tag}. In a clone, "
        "`pip install --editable .` builds it in place; an installed pagepool is imported by a Python that starts in "
        "another folder, or with -P (PYTHONSAFEPATH=1)",
        name="pagepool",
    )

from pagepool import errors, hashing
from pagepool._version import __version__
from pagepool.hashing import PageHash, PageHashWithGroupId, hash_page_tokens, hash_request_tokens, init_none_hash
from pagepool.hit_report import GroupHit, HitReport, MissCause
from pagepool.holders import HeldPages, PageHolder, Preempted
from pagepool.manager import CacheManager, CachePages, HostTier, Lease, PageHashing, PrefixProbe, Retention
from pagepool.page_pool import CachePage, FreeCachePageQueue, PagePool, PageProbe
from pagepool.page_table import (
    PAGE_TABLE_PADDING_VAL,
    SLOT_MAPPING_PADDING_VAL,
    MultiGroupPageTable,
    PageTable,
    device_slot_mapping,
)
from pagepool.refusal import Refusal
from pagepool.request import EngineRequest, EngineRequestStatus, Request, RequestTraits
from pagepool.running_batch import FailedLoads, Moves, PageCopies, RunningBatch, StateWrites, StepResult
from pagepool.specs import (
    AttentionSpec,
    CacheGroupSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    ReferenceWindowSpec,
    RingSpec,
    SlidingWindowSpec,
    local_page_ids,
)
from pagepool.stats import (
    CacheStats,
    HostTierStats,
    PagePoolStats,
    PoolStats,
    QueryCounts,
    StoreStats,
    TimeHistogram,
    WaitingStats,
)
from pagepool.step_inputs import SharedPrefixes, StepInputs
from pagepool.waiting_queue import Admission, WaitingQueue

__all__ = [
    "NONE_HASH",
    "PAGE_TABLE_PADDING_VAL",
    "SLOT_MAPPING_PADDING_VAL",
    "Admission",
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheManager",
    "CachePage",
    "CachePages",
    "CacheSpec",
    "CacheStats",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EngineRequest",
    "EngineRequestStatus",
    "FailedLoads",
    "FreeCachePageQueue",
    "FullAttentionSpec",
    "GroupHit",
    "HeldPages",
    "HitReport",
    "HostTier",
    "HostTierStats",
    "Lease",
    "MambaSpec",
    "MissCause",
    "Moves",
    "MultiGroupPageTable",
    "PageCopies",
    "PageHash",
    "PageHashWithGroupId",
    "PageHashing",
    "PageHolder",
    "PagePool",
    "PagePoolStats",
    "PageProbe",
    "PageTable",
    "PoolStats",
    "Preempted",
    "PrefixProbe",
    "QueryCounts",
    "ReferenceWindowSpec",
    "Refusal",
    "Request",
    "RequestTraits",
    "Retention",
    "RingSpec",
    "RunningBatch",
    "SharedPrefixes",
    "SlidingWindowSpec",
    "StateWrites",
    "StepInputs",
    "StepResult",
    "StoreStats",
    "TimeHistogram",
    "WaitingQueue",
    "WaitingStats",
    "__version__",
    "device_slot_mapping",
    "errors",
    "hash_page_tokens",
    "hash_request_tokens",
    "init_none_hash",
    "local_page_ids",
]


def __getattr__(name: str) -> Any:
    """Return the current ``NONE_HASH``; `init_none_hash` may change it."""
    if name == "NONE_HASH":
        return hashing.NONE_HASH
    raise AttributeError(f"module 'pagepool' has no attribute {name!r}")


if "PAGEPOOL_EASYDEL" in os.environ:
    from pagepool.compat.easydel import install_if_asked

    install_if_asked()
