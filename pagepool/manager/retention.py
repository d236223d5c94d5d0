"""Retains cached prefixes with a priority, and protects those of waiting requests."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagepool._core import HashChain, PageIds, Retention, RetentionSpan, protect_pages
from pagepool.arguments import as_list, read_count
from pagepool.manager.pins import PrefixPins

if TYPE_CHECKING:
    from pagepool.request import Request

__all__ = ["PrefixRetention"]


class PrefixRetention(PrefixPins):
    """The retention of `CacheManager`, which inherits and sets up everything here."""

    def retain(
        self, request: "Request", start: int = 0, stop: int | None = None, *, priority: int = 50, seconds: float | None = None
    ) -> int:
        """Set the eviction priority of the cached pages that lie wholly within tokens ``[start, stop)`` of a request. Returns
        the number of these pages, which are found as by `pin`.

        Free pages of a priority below 50 are evicted before others, except pages without a prefix entry under a policy other
        than LRU, and those above 50 after them; of one priority the page that was freed first. 50 is normal: the eviction
        policy decides. Retained pages are not held and can all be evicted. A page keeps its priority while it is held, is hit
        and is freed again, until a later call sets another one, `seconds` have passed (None: never), or it loses its prefix
        entry. A free page whose priority changes or ends is queued as if it had been freed then. Times are compared when pages
        are taken, and in this call.

        ArgumentError, and nothing changes, if none of these pages is cached, unless the span has no tokens, for priorities
        outside 0 to 100, for seconds that are not finite and above 0, and unless ``0 <= start <= stop``; ArgumentTypeError for
        other types. O(tokens): they are hashed; with `seconds` O(log(pages that have them)) more a page. Snapshots do not have
        priorities.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=5, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> kept, other = EngineRequest("kept", [1, 2, 3, 4, 5]), EngineRequest("other", [6, 7, 8, 9, 10])
        >>> for request in (kept, other):
        ...     _ = manager.allocate_slots(request, 5)
        >>> manager.retain(kept, stop=4, priority=80, seconds=600)
        1
        >>> manager.free(kept)
        >>> manager.free(other)
        >>> new = manager.allocate_slots(EngineRequest("new", [11] * 12), 12)
        >>> manager.probe(kept).num_hit_tokens, manager.probe(other).num_hit_tokens
        (4, 0)
        """
        span, retention = RetentionSpan(self._store, start, stop), Retention(priority, seconds)
        num_tokens = read_count(request, "num_tokens")

        def retain(chain: HashChain, page_ids: Sequence[PageIds], are_hits: bool) -> int | None:
            return span.retain(self.coordinator.groups, chain, page_ids, retention, are_hits)

        return span.require_cached(self._apply_to_cached(request, num_tokens, span.stop, retain), num_tokens)

    def protect(self, requests: "Iterable[Request]") -> int:
        """Let the pages that waiting requests would hit be evicted last, and end the protection of all others. Returns the
        number of protected pages.

        Call it with the requests that wait, those first that start first, whenever they have changed; `[]` ends all protection.
        The pages of the last requests, and of each the last ones, are evicted first. Protection comes before a priority of
        `retain`, which counts again when it ends. A page loses it with its prefix entry. Prefixes that become cached later are
        protected by the next call. No look-up is counted. Snapshots do not have it. O(tokens): they are hashed.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=5, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> first = EngineRequest("first", [1, 2, 3, 4, 5])
        >>> _ = manager.allocate_slots(first, 5)
        >>> manager.free(first)
        >>> waiting = EngineRequest("waiting", [1, 2, 3, 4, 9])
        >>> manager.protect([waiting])
        1
        >>> _ = manager.allocate_slots(EngineRequest("other", [6] * 12), 12)
        >>> manager.probe(waiting).num_hit_tokens, manager.protect([])
        (4, 0)
        """
        listed = as_list("requests", requests, "a list of requests")
        with self._lock:
            return protect_pages(self._store, [ids for request in listed for ids in self._find_hits(request)])

    def _find_hits(self, request: "Request") -> Sequence[PageIds]:
        """Return the pages by group that a look-up would find, without counting it."""
        query = self._lookups.read_query(request)
        if query is None:
            return ()
        hits, _ = self.coordinator.find_longest_cache_hit(self._lookups.hash_apart(request, query[0]).chain, query[0] - 1)
        return hits
