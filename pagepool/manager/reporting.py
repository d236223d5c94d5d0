"""Events of a manager: changes of its prefix cache, for routers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagepool.arguments import require_flag
from pagepool.errors import ArgumentError
from pagepool.hashing import RequestExtraKeys
from pagepool.hashing.request_hashes import PageHasher
from pagepool.manager.external import ExternalTokens

if TYPE_CHECKING:
    from pagepool.events import Event, EventSource
    from pagepool.specs import CacheGroupSpec

__all__ = ["ReportedPages"]


class ReportedPages(ExternalTokens):
    """The events of `CacheManager`, which inherits and sets up everything here."""

    enable_caching: bool
    kv_cache_groups: "Sequence[CacheGroupSpec]"
    hasher: PageHasher
    event_source: "EventSource | None"

    def enable_events(self, *, hashes_as_bytes: bool = False) -> None:
        """Record changes of the prefix cache for `take_events`. Call this before the first request.

        Events have hashes as unsigned ints, the lowest 64 bits of the digest, or as the bytes of the whole digest. Other
        processes make the same hashes only with the same `hash_seed`, or ``"sha256"`` or ``"sha256_cbor"`` as `hash_algo`.
        Costs 56 bytes a page, of the host tier too, 4 a token, and time for each page that is cached. ImportError without the
        extra ``pagepool[events]``; ArgumentError without prefix caching, if pages are held or cached already, and if events
        were enabled with the other `hashes_as_bytes`.
        """
        hashes_as_bytes = require_flag("hashes_as_bytes", hashes_as_bytes)
        try:
            from pagepool.events import EventSource
        except ImportError:
            raise ImportError("events need msgspec: pip install 'pagepool[events]'") from None
        if not self.enable_caching:
            raise ArgumentError("events: got a manager without prefix caching, which has none")
        with self._lock:
            if self.event_source is None:
                self._store.keep_token_ids(self.coordinator.max_cached_page_size)
                source = EventSource(self._store, self.kv_cache_groups, self.hasher, hashes_as_bytes)
                self._lookups.contexts = source.contexts
                self.event_source = source
                self.hasher.keep_token_ids = True
                self._lookups.hashes.clear()  # existing hashes have no tokens
            elif self.event_source.hashes_as_bytes != hashes_as_bytes:
                raise ArgumentError(f"hashes_as_bytes: got {hashes_as_bytes}, allowed: {self.event_source.hashes_as_bytes}")

    def take_events(self) -> "list[Event]":
        """Return the changes of the prefix cache since the last call, including those by running batches.

        The events of `pagepool.events` come in this order: `AllBlocksCleared`, `BlockRemoved`, `BlockStored`, parents before
        children. They report net changes. Those of the host tier have the medium ``"CPU"``. After an interrupted call the next
        one starts over, with `AllBlocksCleared` and the whole cache. ArgumentError unless events are enabled. O(changes).
        """
        return self.require_event_source().take()

    def snapshot_events(self) -> "list[Event]":
        """Return all cached pages as `BlockStored`, parents first, then those of the host tier, for a router that starts late.

        Changes since the last `take_events` are included, and the next `take_events` repeats them, so call that first.
        O(num_pages).
        """
        return self.require_event_source().list_all()

    def require_event_source(self) -> "EventSource":
        """Return the source of events; ArgumentError unless they are enabled."""
        if self.event_source is None:
            raise ArgumentError("events: call enable_events before the first request")
        return self.event_source

    def hold_context(self, extra_keys: RequestExtraKeys | None) -> int:
        """`PrefixLookups.hold_context`, for a running batch."""
        if extra_keys is None or self.event_source is None:  # without the lock
            return 0
        with self._lock:
            return self._lookups.hold_context(extra_keys)

    def release_context(self, context: int) -> None:
        """`PrefixLookups.release_context`."""
        self._lookups.release_context(context)
