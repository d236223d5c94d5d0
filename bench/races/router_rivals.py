"""Indexes of routers, to compare: ours, one in plain Python, and Dynamo's, if it is installed.

Dynamo's (`ai-dynamo-runtime`, measured 1.6.1) takes events of its own as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagepool.events import BlockRemoved, BlockStored, EventBatch, encode_batch
from pagepool.router import PrefixIndex

try:
    from dynamo.llm import RadixTree
except ImportError:
    RadixTree = None

Hashes = npt.NDArray[np.uint64]
MAX_HASH = (1 << 63) - 1


class Stored(msgspec.Struct, tag="BlockStored"):
    """The part of the event that the index in Python reads."""

    block_hashes: list[int]
    medium: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """The part of the event that the index in Python reads."""

    block_hashes: list[int]
    medium: str | None = None


class Batch(msgspec.Struct, array_like=True):
    """A batch of events on the wire."""

    ts: float
    events: list[Stored | Removed]


def encode_stored(hashes: Hashes, start: int, token_ids: Any, page_size: int) -> bytes:
    """Encode a batch with the pages of a prompt from `start` on."""
    parent = int(hashes[start - 1]) if start else None
    spec = None, "GPU", None, None, 0, "full_attention", None
    stored = BlockStored(hashes[start:], parent, token_ids[start * page_size : len(hashes) * page_size], page_size, *spec)
    return encode_batch(EventBatch(1.5, [stored], 0))


def encode_removed(hashes: Hashes) -> bytes:
    """Encode a batch that removes pages, the last first."""
    return encode_batch(EventBatch(1.5, [BlockRemoved(hashes[::-1], "GPU", 0)], 0))


class OurIndex:
    """`PrefixIndex`."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.index = PrefixIndex(16)
        self.apply = self.index.apply

    encode_stored = staticmethod(encode_stored)
    encode_removed = staticmethod(encode_removed)

    def as_query(self, hashes: Hashes) -> Any:
        return hashes

    def find(self, query: Any) -> Any:
        return self.index.find(query)

    def as_pages(self, found: Any) -> list[int]:
        pages = [num_tokens // 16 for num_tokens in found.tolist()]
        return pages + [0] * (self.num_workers - len(pages))


class PythonIndex:
    """A dict with a bit for each worker."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.holders: dict[int, int] = {}
        self.decoder = msgspec.msgpack.Decoder(Batch)

    encode_stored = staticmethod(encode_stored)
    encode_removed = staticmethod(encode_removed)

    def apply(self, worker: int, payload: bytes) -> None:
        bit, holders = 1 << worker, self.holders
        for event in self.decoder.decode(payload).events:
            if isinstance(event, Stored):
                for block_hash in event.block_hashes:
                    holders[block_hash] = holders.get(block_hash, 0) | bit
            else:
                for block_hash in event.block_hashes:
                    holders[block_hash] &= ~bit
                    if not holders[block_hash]:
                        del holders[block_hash]

    def as_query(self, hashes: Hashes) -> Any:
        return hashes.tolist()

    def find(self, query: Sequence[int]) -> list[int]:
        counts = [0] * self.num_workers
        holders = (1 << self.num_workers) - 1
        for i, block_hash in enumerate(query):
            still = holders & self.holders.get(block_hash, 0)
            if still != holders:
                for worker in list_bits(holders & ~still):
                    counts[worker] = i
                holders = still
                if not holders:
                    return counts
        for worker in list_bits(holders):
            counts[worker] = len(query)
        return counts

    def as_pages(self, found: list[int]) -> list[int]:
        return found


class DynamoIndex:
    """Dynamo's `RadixTree`. Its hashes have 63 bits here, the same ones of a block and of its tokens."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.tree = RadixTree()

    def encode_stored(self, hashes: Hashes, start: int, token_ids: Any, page_size: int) -> bytes:
        known = [int(block_hash) & MAX_HASH for block_hash in hashes]
        blocks = [{"block_hash": block_hash, "tokens_hash": block_hash} for block_hash in known[start:]]
        parent = known[start - 1] if start else None
        return json.dumps({"event_id": 1, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}}).encode()

    def encode_removed(self, hashes: Hashes) -> bytes:
        removed = {"block_hashes": [int(block_hash) & MAX_HASH for block_hash in hashes[::-1]]}
        return json.dumps({"event_id": 1, "data": {"removed": removed}}).encode()

    def apply(self, worker: int, payload: bytes) -> None:
        self.tree.apply_event(worker, payload)

    def as_query(self, hashes: Hashes) -> Any:
        return [int(block_hash) & MAX_HASH for block_hash in hashes]

    def find(self, query: Any) -> Any:
        return self.tree.find_matches(query).scores

    def as_pages(self, found: Any) -> list[int]:
        by_worker = {worker[0] if isinstance(worker, tuple) else worker: pages for worker, pages in found.items()}
        return [by_worker.get(worker, 0) for worker in range(self.num_workers)]


def list_bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


INDEXES: dict[str, type[OurIndex] | type[PythonIndex] | type[DynamoIndex]] = {"python": PythonIndex}
if RadixTree is not None:
    INDEXES["dynamo"] = DynamoIndex
INDEXES["pagepool"] = OurIndex
