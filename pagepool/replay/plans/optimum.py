"""What the best eviction policy would hit, which knows all requests to come.

To evict the page whose next use is farthest away is best (Belady, A study of replacement algorithms for a virtual-storage
computer, IBM Systems Journal 5(2), 1966; proved by Mattson and others in 1970, see `lru.py`). Three things differ here, and it
stays the best all the same. A request holds all of its pages at once, so what is kept for later has the rest of the pool; what
it held can be dropped the moment it ends; and a page hits only behind pages that hit.

The first two make of it a packing of intervals, each from one use of a page to the next, into a pool whose room changes with
time. Dropping the interval that ends last, wherever room is short, packs the most (Faigle and Nawijn, Note on scheduling
intervals on-line, Discrete Applied Mathematics 58(1), 1995; Carlisle and Lloyd, On the k-coloring of intervals, ibid. 59(3),
1995). As to the third, whoever uses a page uses all before it. So of two pages with the same next use the one nearer to the
beginning of the prompt was used at the same time or later: its interval lies within the other's, the other can be dropped first
without loss, and what is left of a prefix has no gap.

So the counts are exact and no mere bound: no policy hits more, of requests that run one after another in this order.
"""

import heapq

from pagepool.replay.plans.reuse import Reuse

__all__ = ["BestCurve"]


class BestCurve:
    """Hits by size of the pool."""

    def __init__(self, reuse: Reuse) -> None:
        """Group the reuses by the request that leaves the pages."""
        self._request_pages: list[int] = reuse.request_pages.tolist()
        self._reuses_of: list[list[tuple[int, int]]] = [[] for _ in self._request_pages]
        for user, source, num_pages in zip(reuse.user.tolist(), reuse.source.tolist(), reuse.num_pages.tolist(), strict=True):
            self._reuses_of[source].append((user, num_pages))

    def count_hits(self, num_usable_pages: int) -> int:
        """Pages that hit in a pool of so many pages without the null page, which must hold the largest request. O((requests +
        reuses) x log).
        """
        kept = Kept(len(self._request_pages))
        num_hits = 0
        for request, num_request_pages in enumerate(self._request_pages):
            num_hits += kept.use(request)
            kept.shrink(num_usable_pages - num_request_pages)
            for user, num_pages in self._reuses_of[request]:
                kept.add(user, num_pages)
        return num_hits


class Kept:
    """How many pages are kept for which request."""

    def __init__(self, num_requests: int) -> None:
        """None yet."""
        self._num_pages = [0] * num_requests
        self._num_all_pages = 0
        self._farthest: list[int] = []  # a heap of the requests, negative, that pages were kept for

    def add(self, user: int, num_pages: int) -> None:
        """Keep pages for a request."""
        if self._num_pages[user] == 0:
            heapq.heappush(self._farthest, -user)
        self._num_pages[user] += num_pages
        self._num_all_pages += num_pages

    def use(self, user: int) -> int:
        """Hand a request the pages that were kept for it, and return how many."""
        num_pages, self._num_pages[user] = self._num_pages[user], 0
        self._num_all_pages -= num_pages
        return num_pages

    def shrink(self, max_num_pages: int) -> None:
        """Drop pages, those of the farthest requests first, until so many are left."""
        while self._num_all_pages > max_num_pages:
            user = -self._farthest[0]
            num_dropped = min(self._num_pages[user], self._num_all_pages - max_num_pages)
            self._num_pages[user] -= num_dropped
            self._num_all_pages -= num_dropped
            if self._num_pages[user] == 0:
                heapq.heappop(self._farthest)
