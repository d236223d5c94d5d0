"""What came into the prefix cache and went, as vLLM tells it: routers that read vLLM's events read these.

`CacheManager.enable_events` turns them on, `take_events` returns them. On the wire (`encode_batch`) a batch is a msgpack array
``[ts, events, data_parallel_rank]`` and an event a map with ``type`` first, as in vLLM 0.33. Needs the extra
``pagepool[events]``.

>>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
>>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
>>> manager.enable_events()
>>> request = EngineRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
>>> _ = manager.allocate_slots(request, 9)
>>> [stored] = manager.take_events()
>>> len(stored.block_hashes), stored.parent_block_hash, stored.token_ids.tolist(), stored.block_size
(2, None, [1, 2, 3, 4, 5, 6, 7, 8], 4)
>>> manager.free(request); manager.reset_prefix_cache(), manager.take_events()
(True, [AllBlocksCleared()])
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagepool._core import PageStore
from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.forking import EVENTS, make_lock
from pagepool.hashing import LORA, RequestExtraKeys
from pagepool.request_hashes import PageHasher
from pagepool.specs import CacheGroupSpec, CacheSpec, ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Contexts", "Event", "EventBatch", "EventSource", "encode_batch"]

MEDIUM = "GPU"
NUM_KEY_BYTES = 16
MASK = (1 << 64) - 1
MIN_CONTEXTS = 64

Array = npt.NDArray[Any]
Hash = int | bytes
Run = tuple[int, int, int, int, int, int]
Entries = tuple[Array, list[Run], Array]


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What is sent at once. ``ts`` is in seconds since 1970, ``data_parallel_rank`` tells the engines of one router apart."""

    ts: float
    events: "Sequence[Event | msgspec.Raw]"
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, omit_defaults=True, eq=False, gc=False):
    """Base of the three events."""


class BlockStored(Event):
    """Pages that follow one another in one request, and can be hit from now on.

    ``block_hashes``: one for each page, in a uint64 array or, as bytes, in a list. ``parent_block_hash``: of the page before
    the first; None at the beginning of a prompt. ``token_ids``: int32 array ``[pages x block_size]``; empty for pages that were
    cached without the manager. ``block_size``: tokens of a page. ``lora_id``, ``lora_name``: the request's ``lora_id``, by
    whether it is an int or a string; of a pair the name. ``extra_keys``: for each page what it is hashed with besides tokens
    (LoRA's name, features as ``(hash, offset)``, salt), None for a page without; None where no page has any. LoRA enters every
    page with ``sha256_cbor``, as in vLLM, and else the first. ``group_idx``: the cache group;
    ``kv_cache_spec_kind``, ``kv_cache_spec_sliding_window`` (tokens): its kind of attention.
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


class BlockRemoved(Event):
    """Pages of one group that can be hit no more: the last one of that content was handed out anew, or its entry dropped.

    ``block_hashes`` as in `BlockStored`.
    """

    block_hashes: Any
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """Nothing that was stored before can be hit any more."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise ArgumentTypeError(f"events: got {type(value).__name__} among them, allowed: those of pagepool.events")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode_batch(batch: EventBatch) -> bytes:
    """The batch in msgpack, as vLLM sends it. 0.3 us a page of 16 tokens; between events other threads may run.

    ArgumentTypeError for what is no event, ArgumentError for values that msgpack cannot hold, such as ints beyond 64 bits.
    """
    rank = batch.data_parallel_rank if batch.data_parallel_rank is None else require_int("rank", batch.data_parallel_rank)
    try:
        listed = list(batch.events)
    except TypeError:
        raise ArgumentTypeError(f"events: got {type(batch.events).__name__}, allowed: a list") from None
    try:
        events = [msgspec.Raw(_encoder.encode(_require_event(event))) for event in listed]
        return _encoder.encode(EventBatch(_require_time(batch.ts), events, rank))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ArgumentError(f"events: {error}") from None


def _require_event(event: object) -> object:
    if not isinstance(event, Event | msgspec.Raw):
        raise ArgumentTypeError(f"events: got {type(event).__name__} among them, allowed: those of pagepool.events")
    return event


def _require_time(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ArgumentTypeError(f"ts: got {type(seconds).__name__}, allowed: a number of seconds")
    return seconds


class Contexts:
    """Small ints that stand for the extra keys of requests. Those that no page and no row has any more are used again."""

    def __init__(self, store: PageStore) -> None:
        """`store` counts who has which."""
        self._store = store
        self._values: dict[int, RequestExtraKeys] = {}
        self._contexts: dict[RequestExtraKeys, int] = {}
        self._unused: list[int] = []
        self._num_at_sweep = MIN_CONTEXTS

    def hold(self, value: RequestExtraKeys) -> int:
        """The int for `value`, kept until `PageStore.release_context`. Not for two threads at once. Amortised O(1)."""
        context = self._contexts.get(value)
        if context is None:
            return self._add(value)
        self._store.hold_context(context)
        return context

    def _add(self, value: RequestExtraKeys) -> int:
        """An interrupt may lose an int, but cannot give one to two values."""
        self._sweep()
        if self._unused:
            context = self._unused.pop()
            self._store.hold_context(context)
        else:
            context = self._store.add_context()
        self._values[context] = value
        self._contexts[value] = context
        return context

    def _sweep(self) -> None:
        """Forget what nobody has, once there is twice as much as was left the last time."""
        kept = self._store.kept_contexts() if len(self._values) >= self._num_at_sweep else None
        if kept is not None:
            unused = [context for context in self._values if context not in kept]
            for context in unused:
                self._contexts.pop(self._values.pop(context), None)
            self._unused += unused
            self._num_at_sweep = max(MIN_CONTEXTS, 2 * len(self._values))

    def __getitem__(self, context: int) -> RequestExtraKeys:
        """What an int stands for."""
        return self._values[context]


class EventSource:
    """Makes events of what the journal of a pool says. ``contexts`` are what its pages are entered with."""

    def __init__(self, store: PageStore, groups: Sequence[CacheGroupSpec], hasher: PageHasher, hashes_as_bytes: bool) -> None:
        """Starts the journal of `store`; ArgumentError if something is held or cached already."""
        self.hashes_as_bytes = hashes_as_bytes
        self.contexts = Contexts(store)
        self._store = store
        self._num_digest_bytes = hasher.num_digest_bytes
        self._described = [_describe(group.kv_cache_spec, i) for i, group in enumerate(groups)]
        self._lock = make_lock(self, "_lock", EVENTS)
        self._must_start_over = False
        store.start_journal()

    def take(self) -> list[Event]:
        """What changed since the last call. O(changes)."""
        events, _ = self._take(False)
        self._must_start_over = False  # last, so that an interrupt comes before
        return events

    def take_with_snapshot(self) -> tuple[list[Event], list[Event]]:
        """`take`, and what leads to the same state from any: `AllBlocksCleared` and all that is cached. O(num_pages)."""
        taken = self._take(True)
        self._must_start_over = False
        return taken

    def start_over(self) -> None:
        """Let the next events lead from any state to the right one: somebody was not told."""
        self._must_start_over = True

    def list_all(self) -> list[Event]:
        """All that can be hit now, parents first. O(num_pages)."""
        with self._lock:
            try:
                return self._list_stored(self._store.list_entries())
            finally:
                self._store.end_report()

    def _take(self, with_snapshot: bool) -> tuple[list[Event], list[Event]]:
        with self._lock:
            must_start_over, self._must_start_over = self._must_start_over, True
            try:
                changes = self._store.take_changes(with_snapshot or must_start_over)
                snapshot = [] if changes[-1] is None else [AllBlocksCleared(), *self._list_stored(changes[-1])]
                events = snapshot if must_start_over else self._list_changes(*changes[:-1])
            finally:
                self._store.end_report()
        return events, snapshot

    def _list_changes(self, is_cleared: bool, removed_keys: Array, removed_groups: Array, new: Entries) -> list[Event]:
        events: list[Event] = [AllBlocksCleared()] if is_cleared else []
        for group in range(len(self._described) if len(removed_groups) else 0):
            is_one = removed_groups == group
            keys = removed_keys if is_one.all() else removed_keys[np.repeat(is_one, 2)]
            if len(keys):
                events.append(BlockRemoved(self._hashes_of(keys), MEDIUM, group))
        return [*events, *self._list_stored(new)]

    def _list_stored(self, entries: Entries) -> list[Event]:
        """An event for each run. A run's parent is in one that begins earlier in its request, if it is in any."""
        keys, runs, token_ids = entries
        hashes = self._hashes_of(keys)
        events: list[tuple[int, Event]] = []
        page, token = 0, 0
        for parent, start_page, context, group, num_pages, num_tokens in runs:
            stop_page, stop_token = page + num_pages, token + num_pages * num_tokens
            if group < len(self._described):  # the pool has others only where somebody entered pages himself
                parent_hash = self._hash_of(parent) if start_page else None
                event = BlockStored(hashes[page:stop_page], parent_hash, token_ids[token:stop_token], *self._described[group])
                if context:
                    _add_extra_keys(event, self.contexts[context], start_page, num_pages)
                events.append((start_page, event))
            page, token = stop_page, stop_token
        events.sort(key=itemgetter(0))
        return [event for _, event in events]

    def _hashes_of(self, keys: Array) -> Array | list[Hash]:
        """What keys of the index, ``[2 n]``, are told as."""
        if not self.hashes_as_bytes:
            return keys[::2]
        return [self._hash_of(high << 64 | low) for low, high in keys.reshape(-1, 2).tolist()]

    def _hash_of(self, key: int) -> Hash:
        """The hash that a key, the lower half of a digest or all of it, is told as."""
        if not self.hashes_as_bytes:
            return key & MASK
        name = self._store.names.hash_of(key) if self._num_digest_bytes > NUM_KEY_BYTES else None
        digest = key if name is None else name.hash_value & ((1 << 8 * self._num_digest_bytes) - 1)
        return digest.to_bytes(self._num_digest_bytes, "big")


def _describe(spec: CacheSpec, group: int) -> tuple[Any, ...]:
    """The fields of `BlockStored` from ``block_size`` on for a page without extra keys."""
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return spec.page_size, None, MEDIUM, None, None, group, _kind_of(spec), window


def _kind_of(spec: CacheSpec) -> str:
    """vLLM's name for a kind of attention."""
    if isinstance(spec, SlidingWindowSpec):
        return "sliding_window"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked_local_attention"
    if isinstance(spec, MambaSpec):
        return "mamba"
    return "mla_attention" if getattr(spec, "use_mla", False) else "full_attention"


def _add_extra_keys(event: BlockStored, value: RequestExtraKeys, start_page: int, num_pages: int) -> None:
    """What pages of a request are hashed with besides tokens."""
    for lora_id in [key[1] for key in value.request_keys if key[0] == LORA]:
        if isinstance(_portable(lora_id), int):
            event.lora_id = lora_id
        else:
            event.lora_name = lora_id.hex() if isinstance(lora_id, bytes) else str(_portable(lora_id))
    extra_keys: list[tuple[Any, ...] | None] = [None] * num_pages
    page, keys = value.find_keyed_page(start_page, event.block_size)
    while page is not None and page < start_page + num_pages:
        extra_keys[page - start_page] = keys and _portable(tuple(value.without_tags(keys)))
        page, keys = value.find_keyed_page(page + 1, event.block_size)
    event.extra_keys = extra_keys if any(extra_keys) else None


def _portable(key: Any) -> Any:
    """`key`, or text where msgpack has no such value: an int of more than 64 bits, text that is no Unicode. Tuples by item."""
    if isinstance(key, tuple):
        return tuple(map(_portable, key))
    if isinstance(key, int) and not -(1 << 63) <= key <= MASK:
        return str(key)
    return key.encode("utf-8", "backslashreplace").decode() if isinstance(key, str) else key
