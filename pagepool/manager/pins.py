"""Pins the cached prefixes of requests."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagepool._core import HashChain, PageIds, PinSpan
from pagepool.arguments import id_of, read_count
from pagepool.hashing import KeyHolder

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pagepool._core import PageStore
    from pagepool.coordinator import CacheCoordinator
    from pagepool.manager.lookups import PrefixLookups
    from pagepool.request import Request

__all__ = ["PrefixPins"]

Apply = Callable[[HashChain, Sequence[PageIds], bool], int | None]
"""What is done with the hashes and pages of a request, which may be hits. Returns for how many pages."""


class PrefixPins(KeyHolder):
    """The pins of `CacheManager`, which inherits and sets up everything here."""

    enable_caching: bool
    coordinator: "CacheCoordinator"
    max_num_pinned_pages: int
    _lookups: "PrefixLookups"
    _lock: "AbstractContextManager[object]"
    _store: "PageStore"

    def pin(self, request: "Request", start: int = 0, stop: int | None = None) -> int:
        """Pin the cached pages that lie wholly within tokens ``[start, stop)`` of a request. Returns the number of these pages.

        A pinned page stays cached and is not evicted, whoever frees it, until it is unpinned as often as it was pinned; what
        drops its prefix entry (`PagePool.evict_pages`, `free` with `num_computed_tokens`) unpins it at once. It is held, so it
        is not free, and `reset_prefix_cache` returns False. Of a request that holds pages its own are pinned, in each group
        that is prefix-cached; of another one those that `get_computed_pages` would find. No look-up is counted.

        PinBudgetError, and nothing is pinned, if more than ``max_num_pinned_pages`` pages would be pinned, which is
        ``int(max_pinned_share * (num_pages - 1))``; a page counts once however often it is pinned. ArgumentError unless
        ``0 <= start <= stop``. O(tokens): they are hashed.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> _ = manager.allocate_slots(request, 9)
        >>> manager.pin(request), manager.pin(request, stop=4)
        (2, 1)
        >>> manager.free(request)
        >>> manager.stats().num_pinned_pages, manager.unpin(request), manager.stats().num_pinned_pages
        (2, 2, 1)
        """
        span = PinSpan(self._store, start, stop)

        def pin(chain: HashChain, page_ids: Sequence[PageIds], are_hits: bool) -> int | None:
            return span.pin(self.coordinator.groups, chain, page_ids, self.max_num_pinned_pages, are_hits)

        return self._apply_to_cached(request, read_count(request, "num_tokens"), span.stop, pin)

    def _apply_to_cached(self, request: "Request", num_tokens: int, stop: int, apply: Apply) -> int:
        """Call `apply` with the hashes of a request up to `stop` and its pages or else its hits, and return the number of pages
        that it returns; 0 if nothing can hit. It is called again where it returns None for hits: one has left the cache.
        """
        if not self.enable_caching:
            return 0
        with self._lock:
            held = self.coordinator.requests.get(id_of(request))
            if held:
                chain = self._lookups.hash_apart(request, min(num_tokens, stop)).chain
                return apply(chain, held.get_page_ids(), False) or 0
            if self._lookups.read_query(request) is None:
                return 0
            chain = self._lookups.hash_apart(request, num_tokens).chain
            num_pages = None
            while num_pages is None:
                hits, _ = self.coordinator.find_longest_cache_hit(chain, num_tokens - 1)
                num_pages = apply(chain, hits, True)
            return num_pages

    def unpin(self, request: "Request", start: int = 0, stop: int | None = None) -> int:
        """Take back one pin of each page that is pinned with the content of tokens ``[start, stop)`` of a request. Returns the
        number of these pages; 0 if none is pinned.

        The pages are found by their content, in each group: the request may be freed, or another one with equal tokens and
        extra keys. Pages that nothing else holds go to the back of the free queue, group by group, the last page first. Pass
        the `start` and `stop` that were passed to `pin`. ArgumentError unless ``0 <= start <= stop``. O(tokens): they are
        hashed.
        """
        span = PinSpan(self._store, start, stop)
        num_tokens = min(read_count(request, "num_tokens"), span.stop)
        if not self.enable_caching:
            return 0
        with self._lock:
            return span.unpin(self.coordinator.groups, self._lookups.hash_apart(request, num_tokens).chain)
