"""The events, and their encoding in msgpack."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pagepool.arguments import require_int, require_list
from pagepool.errors import ArgumentError, ArgumentTypeError

Hash = int | bytes


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events sent together. ``ts`` is in seconds since 1970, ``data_parallel_rank`` identifies the engine."""

    ts: float
    events: "Sequence[Event]"
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, omit_defaults=True, eq=False, gc=False):
    """Base of the three events."""


class BlockStored(Event):
    """Consecutive pages of one request that can be hit from now on. With the `medium` ``"CPU"`` they are pages of the host
    tier, in any order, without parent, tokens and extra keys; their hashes identify their content.

    ``block_hashes``: one hash for each page, in a uint64 array or, as bytes, in a list. ``parent_block_hash``: the hash of the
    preceding page; None at the beginning of a prompt. ``token_ids``: int32 array ``[pages x block_size]``; empty for pages
    cached without the manager. ``block_size``: tokens of a page. ``lora_id``, ``lora_name``: the request's ``lora_id``, as an
    int or a string; for a pair its name. ``extra_keys``: for each page the keys hashed with its tokens (LoRA's name, features
    as ``(hash, offset)``, salt) or None; None if no page has any. LoRA is a key of every page with ``sha256_cbor``, as in vLLM,
    and of the first page with other algorithms. ``group_idx``: the cache group, rings not counted; ``kv_cache_spec_kind``,
    ``kv_cache_spec_sliding_window`` (tokens): its kind of attention. ``session_id``: the session of the request or row that
    cached the pages, None in the host tier; other sessions may hit them too. ``num_groups``: the manager's number of cache
    groups without rings, which are never cached; None for one. ``lookahead_token_ids``: for each page the tokens after it that
    its hash covers; None without a `hash_lookahead`, and where ``token_ids`` is empty. ``hit_tokens``: hits are multiples of
    this many tokens; None for one group.
    """

    block_hashes: Any
    parent_block_hash: Hash | None
    token_ids: Any
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None
    num_groups: int | None = None
    lookahead_token_ids: list[list[int]] | None = None
    hit_tokens: int | None = None


class BlockRemoved(Event):
    """Pages of one group that can no longer be hit in a medium: the last copy was evicted, or its entry was dropped. Copies in
    the other medium remain.

    ``block_hashes`` and ``medium`` are as in `BlockStored`.
    """

    block_hashes: Any
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """No page stored before can be hit any more, in any medium."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise ArgumentTypeError(f"events: got {type(value).__name__} in a field, allowed: arrays, lists, and what msgpack encodes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode_batch(batch: EventBatch) -> bytes:
    """Return the batch in msgpack, as vLLM sends it. O(pages + tokens); other threads may run between events.

    Raise ArgumentTypeError for other objects than events, ArgumentError for values that msgpack cannot encode (ints beyond 64
    bits).
    """
    rank = batch.data_parallel_rank if batch.data_parallel_rank is None else require_int("rank", batch.data_parallel_rank)
    try:
        events = [msgspec.Raw(_encoder.encode(event)) for event in require_list("events", batch.events, Event)]
        return _encoder.encode((require_seconds("ts", batch.ts), events, rank))
    except (OverflowError, UnicodeEncodeError) as error:
        allowed = "ints of 64 bits, and valid Unicode"
        raise ArgumentError(f"events: got values that msgpack cannot encode ({error}), allowed: {allowed}") from None


def require_seconds(name: str, value: Any) -> float:
    """Return `value`. Raise ArgumentTypeError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: a number of seconds")
    return value
