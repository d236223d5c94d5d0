"""The namespace of a store: pages of one model, in one layout, under keys of one kind."""

import hashlib
import json

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager

__all__ = ["make_namespace"]

VERSION = 1
"""Raised when the content of stored pages changes its meaning."""


def make_namespace(manager: CacheManager, layout: str, model: bytes, rank: int = 0, num_ranks: int = 1) -> str:
    """Return the namespace of a manager's pages, such as ``"5f1b9c0d8e7a6b5c4d3e2f1a/0-of-1"``: a digest of everything that
    decides what a stored page contains.

    `layout` describes a row of host memory exactly, as `pagepool.host_pages.HostPages.layout` does. `model` identifies the
    weights: the digest of a checkpoint, with the adapters that its requests do not name. Of `num_ranks` processes that each
    hold a part of a page, each gives its `rank`. The manager's hash algorithm and seed, its groups and page sizes are
    included. Raise ArgumentError for a manager without caching, and for one whose keys differ in each process: with SipHash,
    without a `hash_seed`, and without PYTHONHASHSEED in the environment; ArgumentTypeError for other types.
    """
    if not isinstance(manager, CacheManager):
        raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
    if not isinstance(layout, str):
        raise ArgumentTypeError(f"layout: got {type(layout).__name__}, allowed: a string")
    if not isinstance(model, bytes) or not model:
        raise ArgumentTypeError(f"model: got {type(model).__name__}, allowed: bytes that identify the weights")
    if not manager.enable_caching:
        raise ArgumentError("manager: got one without prefix caching, allowed: one that caches")
    if not manager._registry.hasher.is_shared:
        allowed = "hash_algo='sha256' or 'sha256_cbor', or a hash_seed"
        raise ArgumentError(f"manager: got one whose hashes are secret to the process, allowed: {allowed}")
    num_ranks = require_int("num_ranks", num_ranks, 1)
    rank = require_int("rank", rank, 0, num_ranks - 1)
    content = [VERSION, manager._configuration, layout, model.hex(), num_ranks]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    return f"{digest[:12].hex()}/{rank}-of-{num_ranks}"
