"""Events as a router decodes them, with classes of its own, after those of vLLM 0.33."""

from __future__ import annotations

from typing import Any

import msgspec

from pagepool.events import EventBatch, encode_batch


class WireEvent(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class BlockStored(WireEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(WireEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(WireEvent):
    pass


class WireBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decode_batch(payload: bytes) -> WireBatch:
    return msgspec.msgpack.decode(payload, type=WireBatch)


def decode(events: list[Any]) -> list[Any]:
    """Return what a router receives of these events."""
    return decode_batch(encode_batch(EventBatch(1.5, events, 3))).events
