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

import threading
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagepool._core import PageStore
from pagepool.hashing import ExtraKeys, RequestExtraKeys
from pagepool.page_pool import PagePool
from pagepool.specs import CacheGroupSpec, CacheSpec, ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "EventBatch", "EventSource", "encode_batch"]

MEDIUM = "GPU"
NUM_INT_BYTES = 8
MIN_CONTEXTS = 64

Array = npt.NDArray[Any]
Hash = int | bytes


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one step did. ``ts`` is in seconds since 1970, ``data_parallel_rank`` tells engines of one router apart."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base of the three events."""


class BlockStored(Event):
    """Pages that follow one another in one request and can be hit from now on.

    ``block_hashes`` uint64 array, or list of bytes: one for each page; ``parent_block_hash``: of the page before the first of
    them, None at the beginning of a prompt; ``token_ids`` int32 array ``[pages x block_size]``, empty for pages that were not
    cached by a manager; ``block_size`` in tokens; ``lora_id``, ``lora_name``: the request's ``lora_id``, an int or a string;
    ``extra_keys``: for each page LoRA, features as ``(hash, offset)`` and salt, None where a page has none; ``group_idx``:
    cache group; ``kv_cache_spec_kind``, ``kv_cache_spec_sliding_window`` (tokens): its kind of attention.
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
    """Pages of one group that cannot be hit any more: the last page with that content was handed out anew, or dropped."""

    block_hashes: Any
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """Nothing can be hit any more."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode_batch(batch: EventBatch) -> bytes:
    """The batch in msgpack, as vLLM sends it. About 0.3 us a page."""
    return _encoder.encode(batch)


def _kind_of(spec: CacheSpec) -> str:
    """vLLM's name for a kind of attention."""
    if isinstance(spec, SlidingWindowSpec):
        return "sliding_window"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunked_local_attention"
    if isinstance(spec, MambaSpec):
        return "mamba"
    return "mla_attention" if getattr(spec, "use_mla", False) else "full_attention"


class Contexts:
    """Small ints for what pages are hashed with besides tokens. Those that no page and no row has any more are used again."""

    def __init__(self, store: PageStore) -> None:
        """`store` counts who has which."""
        self._store = store
        self.lock = threading.RLock()
        self._values: dict[int, RequestExtraKeys] = {}
        self._contexts: dict[RequestExtraKeys, int] = {}
        self._unused: list[int] = []
        self._num_at_sweep = MIN_CONTEXTS

    def hold(self, value: RequestExtraKeys | None) -> int:
        """The int for `value`, held until `PageStore.release_context`; 0 for None. Amortised O(1)."""
        if value is None:
            return 0
        with self.lock:
            if value not in self._contexts:
                context = self._next()
                self._contexts[value] = context
                self._values[context] = value
            self._store.hold_context(self._contexts[value])
            return self._contexts[value]

    def _next(self) -> int:
        if len(self._values) >= self._num_at_sweep:
            held = self._store.held_contexts()
            for context in self._values.keys() - held:
                del self._contexts[self._values.pop(context)]
                self._unused.append(context)
            self._num_at_sweep = max(MIN_CONTEXTS, 2 * len(self._values))
        return self._unused.pop() if self._unused else len(self._values) + 1

    def __getitem__(self, context: int) -> RequestExtraKeys:
        """What an int that is held stands for."""
        return self._values[context]


class EventSource:
    """Makes events of what the journal of a pool's store says."""

    def __init__(self, pool: PagePool, groups: Sequence[CacheGroupSpec], num_hash_bytes: int, hashes_as_bytes: bool) -> None:
        """`num_hash_bytes` of a hash value. ArgumentError if something is cached already."""
        self.hashes_as_bytes = hashes_as_bytes
        self._num_hash_bytes = num_hash_bytes if hashes_as_bytes else NUM_INT_BYTES
        self._store = pool.store
        self._specs = [group.kv_cache_spec for group in groups]
        self._kinds = [_kind_of(spec) for spec in self._specs]
        self._store.start_journal()
        self._store.keep_token_ids(max(spec.page_size for spec in self._specs))
        self.contexts = Contexts(self._store)

    def take(self) -> list[Event]:
        """What changed since the last call. O(changes)."""
        with self.contexts.lock:
            is_cleared, removed, new, is_disordered = self._store.take_changes()
            stored = self._list_stored(*new, is_disordered)
        events: list[Event] = [AllBlocksCleared()] if is_cleared else []
        for group in range(len(self._specs)):
            keys = removed["key"] if len(self._specs) == 1 else removed["key"][removed["group"] == group]
            if len(keys):
                events.append(BlockRemoved(self._hashes_of(keys), MEDIUM, group))
        return [*events, *stored]

    def list_all(self) -> list[Event]:
        """All that can be hit now, parents first. O(pool)."""
        with self.contexts.lock:
            return self._list_stored(*self._store.list_entries(), True)

    def _list_stored(self, keys: Array, runs: Array, token_ids: Array, is_disordered: bool) -> list[Event]:
        """One event for each run. What begins later in its request than another run cannot be that one's parent."""
        events, page, token = [], 0, 0
        for parent, start_page, context, group, num_pages, num_tokens, _ in runs.tolist():
            event = self._make_stored(
                keys[page : page + num_pages], parent, token_ids[token : token + num_tokens], start_page, context, group
            )
            events.append((start_page, event))
            page, token = page + num_pages, token + num_tokens
        if is_disordered:
            events.sort(key=itemgetter(0))
        return [event for _, event in events]

    def _make_stored(
        self, keys: Array, parent: list[int], token_ids: Array, start_page: int, context: int, group: int
    ) -> BlockStored:
        spec = self._specs[group]
        event = BlockStored(
            block_hashes=self._hashes_of(keys),
            parent_block_hash=self._hash_of(parent) if start_page else None,
            token_ids=token_ids,
            block_size=spec.page_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=group,
            kv_cache_spec_kind=self._kinds[group],
            kv_cache_spec_sliding_window=getattr(spec, "sliding_window", None),
        )
        if context:
            _add_extra_keys(event, self.contexts[context], start_page, len(keys))
        return event

    def _hashes_of(self, keys: Array) -> Array | list[bytes]:
        """The hashes that keys of the index, ``[n, 2]``, stand for: unsigned ints, or bytes."""
        if not self.hashes_as_bytes and not self._store.names:
            return keys[:, 0]
        hashes = [self._hash_of(key) for key in keys.tolist()]
        return hashes if self.hashes_as_bytes else np.array(hashes, np.uint64)

    def _hash_of(self, key: list[int]) -> Any:
        low, high = map(int, key)
        value = high << 64 | low
        name = self._store.names.hash_of(value)
        value = (value if name is None else name.hash_value) & ((1 << 8 * self._num_hash_bytes) - 1)
        return value.to_bytes(self._num_hash_bytes, "big") if self.hashes_as_bytes else value


def _add_extra_keys(event: BlockStored, value: RequestExtraKeys, start_page: int, num_pages: int) -> None:
    """What pages of a request are hashed with besides tokens, in the order in which vLLM names it: LoRA, features, salt."""
    size = event.block_size
    pages = [value.of_page(page * size, (page + 1) * size) for page in range(start_page, start_page + num_pages)]
    event.extra_keys = [None if keys is None else _flatten(keys) for keys in pages] if any(pages) else None
    lora_id = dict(value.first_page_keys).get("lora")
    if isinstance(lora_id, int):
        event.lora_id = lora_id
    else:
        event.lora_name = lora_id


def _flatten(keys: ExtraKeys) -> tuple[Any, ...]:
    named = {key[0]: key[1] for key in keys if key[0] != "mm"}
    features = [(content_hash, offset) for _, _, content_hash, offset, _ in (key for key in keys if key[0] == "mm")]
    lora = [named.pop("lora")] if "lora" in named else []
    return (*lora, *features, *named.values())
