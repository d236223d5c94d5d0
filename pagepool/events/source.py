"""Events from the journal of a pool and its host tier; and small ints for the extra keys and sessions of requests."""

import threading
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool._core import EntryJournal, PageStore
from pagepool.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from pagepool.hashing import LORA, RequestExtraKeys
from pagepool.page_hashing import PageHasher
from pagepool.process_forks import ProcessLock
from pagepool.specs import CacheGroupSpec, CacheSpec, ChunkedLocalAttentionSpec, MambaSpec, RingSpec, SlidingWindowSpec

GPU, CPU = "GPU", "CPU"  # the media: the pool, and the host tier
NO_TOKENS = np.empty(0, np.int32)
MASK = (1 << 64) - 1
MIN_CONTEXTS = 64

Context = tuple[RequestExtraKeys | None, str | None]
"""Extra keys and session of a request."""

Array = npt.NDArray[Any]
Run = tuple[int, int, int, int, int, int]
Entries = tuple[Array, list[Run], Array]
Keys = tuple[Array, Array]
"""Keys, and the group of each."""


class Contexts:
    """Small ints for the extra keys and sessions of requests. Ints without pages and rows are reused."""

    def __init__(self, journal: EntryJournal) -> None:
        """Use `journal` to count the pages and rows of each int."""
        self._journal = journal
        self._values: dict[int, Context] = {}
        self._contexts: dict[Context, int] = {}
        self._unused: list[int] = []
        self._num_at_sweep = MIN_CONTEXTS

    def hold(self, value: Context) -> int:
        """Return the int for `value`, valid until `release`. Not thread-safe. Amortised O(1). An interrupt may lose an int."""
        context = self._contexts.get(value)
        if context is not None:
            self._journal.hold_context(context)
            return context
        kept = self._journal.kept_contexts() if len(self._values) >= self._num_at_sweep else None
        if kept is not None:  # the number of values has doubled since the last cleaning
            unused = [context for context in self._values if context not in kept]
            for context in unused:
                self._contexts.pop(self._values.pop(context), None)
            self._unused += unused
            self._num_at_sweep = max(MIN_CONTEXTS, 2 * len(self._values))
        if self._unused:
            context = self._unused.pop()
            self._journal.hold_context(context)
        else:
            context = self._journal.add_context()
        self._values[context] = value
        self._contexts[value] = context
        return context

    def release(self, context: int) -> None:
        """Release an int. It is reused once no page or row has it."""
        self._journal.release_context(context)

    def __getitem__(self, context: int) -> Context:
        """Return the value of an int."""
        return self._values[context]


class EventSource:
    """Source of events, from the journal of a pool and its tier. ``contexts`` has the extra keys and sessions of the pages."""

    _lock = ProcessLock("EventSource")

    def __init__(
        self,
        store: PageStore,
        groups: Sequence[CacheGroupSpec],
        hit_tokens: int,
        hasher: PageHasher,
        hashes_as_bytes: bool,
    ) -> None:
        """Start the journal of `store`. Hits are multiples of `hit_tokens` tokens. Raise ArgumentError if pages are held or
        cached already.
        """
        self.hashes_as_bytes = hashes_as_bytes
        self._journal = EntryJournal(store)
        self.contexts = Contexts(self._journal)
        self._store = store
        self._num_digest_bytes, self._lookahead = hasher.num_digest_bytes, hasher.hash_lookahead
        self._num_words = hasher.num_digest_bytes // 8
        specs = {i: group.kv_cache_spec for i, group in enumerate(groups) if not isinstance(group.kv_cache_spec, RingSpec)}
        self._numbers = {i: number for number, i in enumerate(specs)}
        no_session, no_lookahead, has_groups = None, None, len(specs) > 1
        of_all = no_session, len(specs) if has_groups else None, no_lookahead, hit_tokens if has_groups else None
        self._described = {
            medium: {i: (*_describe(spec, self._numbers[i], hasher.page_size, medium), *of_all) for i, spec in specs.items()}
            for medium in (GPU, CPU)
        }
        self._lock = threading.RLock()
        self._must_start_over = False
        self._journal.start()

    def take(self) -> list[Event]:
        """Return the changes since the last call. O(changes)."""
        events, _ = self._take(False)
        self._must_start_over = False  # last, so that an interrupt leaves it set
        return events

    def take_with_snapshot(self) -> tuple[list[Event], list[Event]]:
        """Return the changes, and a snapshot: `AllBlocksCleared` and all cached pages. O(num_pages)."""
        taken = self._take(True)
        self._must_start_over = False
        return taken

    def start_over(self) -> None:
        """Make the next events a snapshot, after a loss of events."""
        self._must_start_over = True

    def list_all(self) -> list[Event]:
        """Return all cached pages, parents first. O(num_pages)."""
        with self._lock:
            try:
                return self._list_entries(*self._journal.list_entries())
            finally:
                self._journal.end_report()

    def _take(self, with_snapshot: bool) -> tuple[list[Event], list[Event]]:
        with self._lock:
            must_start_over, self._must_start_over = self._must_start_over, True
            try:
                is_cleared, (removed, new, entries), (tier_removed, tier_new, tier_entries) = self._journal.take_changes(
                    with_snapshot or must_start_over
                )
                snapshot: list[Event] = []
                if entries is not None and tier_entries is not None:
                    snapshot = [AllBlocksCleared(), *self._list_entries(entries, tier_entries)]
                if must_start_over:
                    return snapshot, snapshot
                events: list[Event] = [AllBlocksCleared()] if is_cleared else []
                for keys, medium in ((removed, GPU), (tier_removed, CPU)):
                    events += [BlockRemoved(hashes, medium, self._numbers[group]) for group, hashes in self._split(keys)]
                return [*events, *self._list_entries(new, tier_new)], snapshot
            finally:
                self._journal.end_report()

    def _list_entries(self, entries: Entries, tier_entries: Keys) -> list[Event]:
        """Return an event for each run of pages of the pool, parents before children, and one for each group of the tier."""
        keys, runs, token_ids = entries
        described = self._described[GPU]
        hashes = self._hashes_of(keys)
        events: list[tuple[int, Event]] = []
        page, token = 0, 0
        for parent, start_page, context, group, num_pages, num_tokens in runs:
            stop_page, stop_token = page + num_pages, token + num_pages * num_tokens
            if group in described:  # callers may cache pages under other group ids, which no event has
                parent_hash = self._hash_of(parent) if start_page else None
                event = BlockStored(hashes[page:stop_page], parent_hash, token_ids[token:stop_token], *described[group])
                if self._lookahead and num_tokens:
                    _divide_tokens(event, num_pages, self._lookahead)
                if context:
                    extra_keys, session_id = self.contexts[context]
                    event.session_id = _portable(session_id)
                    if extra_keys is not None:
                        _add_extra_keys(event, extra_keys, start_page, num_pages, self._lookahead)
                events.append((start_page, event))
            page, token = stop_page, stop_token
        events.sort(key=itemgetter(0))  # parents first: their runs begin earlier in a request
        saved = self._split(tier_entries)
        tier_events = [BlockStored(hashes, None, NO_TOKENS, *self._described[CPU][group]) for group, hashes in saved]
        return [*(event for _, event in events), *tier_events]

    def _split(self, keys: Keys) -> Iterator[tuple[int, Array | list[Hash]]]:
        """Yield each group with keys, and the keys' hashes as in events. Ignore other group ids, under which callers may cache
        pages.
        """
        all_keys, groups = keys
        for group in self._numbers if len(groups) else ():
            is_one = groups == group
            if is_one.any():
                yield group, self._hashes_of(all_keys if is_one.all() else all_keys[np.repeat(is_one, self._num_words)])

    def _hashes_of(self, keys: Array) -> Array | list[Hash]:
        """Return the hashes, as in events, of digests in 64-bit words, the lowest first: ``[num_words n]``."""
        if not self.hashes_as_bytes:
            return keys[:: self._num_words]
        digests, size = keys.reshape(-1, self._num_words)[:, ::-1].astype(">u8").tobytes(), self._num_digest_bytes
        return [digests[i : i + size] for i in range(0, len(digests), size)]

    def _hash_of(self, digest: int) -> Hash:
        return digest.to_bytes(self._num_digest_bytes, "big") if self.hashes_as_bytes else digest & MASK


def _describe(spec: CacheSpec, group: int, hash_page_size: int, medium: str) -> tuple[Any, ...]:
    """Return the fields of `BlockStored` from ``block_size`` on for a page without extra keys and session."""
    page_size, window = spec.page_size, None
    match spec:
        case SlidingWindowSpec():
            kind, window = "sliding_window", spec.sliding_window
        case ChunkedLocalAttentionSpec():
            kind = "chunked_local_attention"
        case MambaSpec():
            kind, page_size = "mamba", hash_page_size  # a state's hash is that of the last hash page before it
        case _:
            kind = "mla_attention" if getattr(spec, "use_mla", False) else "full_attention"
    return page_size, None, medium, None, None, group, kind, window


def _divide_tokens(event: BlockStored, num_pages: int, hash_lookahead: int) -> None:
    """Separate the tokens of each page from its lookahead tokens, which follow them."""
    tokens = event.token_ids.reshape(num_pages, -1)
    event.token_ids = tokens[:, :-hash_lookahead].reshape(-1)
    event.lookahead_token_ids = tokens[:, -hash_lookahead:].tolist()


def _add_extra_keys(event: BlockStored, value: RequestExtraKeys, start_page: int, num_pages: int, hash_lookahead: int) -> None:
    """Add to an event the keys hashed with the tokens of its pages."""
    for lora_id in [key[1] for key in value.request_keys if key[0] == LORA]:
        if isinstance(_portable(lora_id), int):
            event.lora_id = lora_id
        else:
            event.lora_name = lora_id.hex() if isinstance(lora_id, bytes) else str(_portable(lora_id))
    extra_keys: list[tuple[Any, ...] | None] = [None] * num_pages
    page, keys = value.find_keyed_page(start_page, event.block_size, hash_lookahead)
    while page is not None and page < start_page + num_pages:
        extra_keys[page - start_page] = keys and _portable(tuple(value.without_tags(keys)))
        page, keys = value.find_keyed_page(page + 1, event.block_size, hash_lookahead)
    event.extra_keys = extra_keys if any(extra_keys) else None


def _portable(key: Any) -> Any:
    """Return `key`, with valid text in place of ints beyond 64 bits and invalid Unicode: msgpack cannot encode these."""
    if isinstance(key, tuple):
        return tuple(map(_portable, key))
    if isinstance(key, int) and not -(1 << 63) <= key <= MASK:
        return str(key)
    return key.encode("utf-8", "backslashreplace").decode() if isinstance(key, str) else key
