"""Hits of the optimal eviction policy, which knows all future requests.

Evicting the page whose next use is farthest away is optimal (Belady, A study of replacement algorithms for a virtual-storage
computer, IBM Systems Journal 5(2), 1966; proved by Mattson and others in 1970, see `lru.py`). It remains optimal here despite
three differences: a request holds all of its pages at once, which leaves the rest of the pool for cached pages; its pages may
be dropped the moment it ends; and a page hits only if all pages before it hit.

With the first two, the problem is to pack intervals, each from one use of a page to the next, into a pool whose free size
varies over time. Dropping the interval that ends last whenever space is short packs the most (Faigle and Nawijn, Note on
scheduling intervals on-line, Discrete Applied Mathematics 58(1), 1995; Carlisle and Lloyd, On the k-coloring of intervals,
ibid. 59(3), 1995). For the third: a request that uses a page uses all pages before it. Of two pages with the same next use, the
one nearer to the beginning of the prompt was therefore used at the same time or later. Its interval lies within the other's, so
the other can be dropped first without loss, and the rest of a prefix has no gap.

The counts are therefore exact, not a bound, for requests that run one after another in this order.
"""

import heapq

from pagepool.replay.plans.reuse import Reuse


class BestCurve:
    """Optimal hits by pool size."""

    def __init__(self, reuse: Reuse) -> None:
        """Group the reuses by source."""
        self._request_pages: list[int] = reuse.request_pages.tolist()
        self._reuses_of: list[list[tuple[int, int]]] = [[] for _ in self._request_pages]
        for user, source, num_pages in zip(reuse.user.tolist(), reuse.source.tolist(), reuse.num_pages.tolist(), strict=True):
            self._reuses_of[source].append((user, num_pages))

    def count_hits(self, num_usable_pages: int) -> int:
        """Count the pages that hit. The pool, without the null page, must hold the largest request. O((requests + reuses) x
        log).
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
    """The pages kept for future requests: a number for each request."""

    def __init__(self, num_requests: int) -> None:
        """Start empty."""
        self._num_pages = [0] * num_requests
        self._num_all_pages = 0
        self._farthest: list[int] = []  # a heap of negated request numbers

    def add(self, user: int, num_pages: int) -> None:
        """Keep pages for a request."""
        if self._num_pages[user] == 0:
            heapq.heappush(self._farthest, -user)
        self._num_pages[user] += num_pages
        self._num_all_pages += num_pages

    def use(self, user: int) -> int:
        """Remove the pages kept for a request, and return their number."""
        num_pages, self._num_pages[user] = self._num_pages[user], 0
        self._num_all_pages -= num_pages
        return num_pages

    def shrink(self, max_num_pages: int) -> None:
        """Drop pages of the most distant requests until at most `max_num_pages` are left."""
        while self._num_all_pages > max_num_pages:
            user = -self._farthest[0]
            num_dropped = min(self._num_pages[user], self._num_all_pages - max_num_pages)
            self._num_pages[user] -= num_dropped
            self._num_all_pages -= num_dropped
            if self._num_pages[user] == 0:
                heapq.heappop(self._farthest)
