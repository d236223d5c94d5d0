"""LRU hits for all pool sizes, from one pass over the requests.

Released pages form one stack with the most recently used on top, and a pool of `n` pages holds the top `n` (Mattson, Gecsei,
Slutz and Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970). A page therefore hits if its
depth is at most `n`. A request releases its pages tail first, so they lie on the stack in order, and a later request takes them
from the front. The depth of a run of pages thus follows from the number of pages that each later request has left on the
stack, a sum kept in a Fenwick tree (Fenwick, A new data structure for cumulative frequency tables, Software: Practice and
Experience 24(3), 1994); single pages are never visited.

The counts equal those of `CacheManager`, to the token, for one full-attention group and requests that run one after another. A
cached page that is computed again (the last page of a fully cached prompt, a repeated answer) is in the pool twice, both here
and in the manager. On a later hit the manager takes the older copy while it exists; this model takes the newer one. The counts
then deviate as if the pool had some pages more or fewer, at most the number of duplicates.
"""

import numpy as np

from pagepool.replay.plans.reuse import Int64Array, Reuse


class SuffixSums:
    """A Fenwick tree: mutable numbers with their suffix sums, O(log n) each."""

    def __init__(self, size: int) -> None:
        """Start with zeros."""
        self._nodes = [0] * (size + 1)

    def add(self, i: int, value: int) -> None:
        """Add a value to the number at `i`."""
        while i > 0:
            self._nodes[i] += value
            i &= i - 1

    def sum_behind(self, i: int) -> int:
        """Return the sum of the numbers after `i`."""
        total = 0
        i += 1
        while i < len(self._nodes):
            total += self._nodes[i]
            i += i & -i
        return total


def measure_depths(reuse: Reuse) -> Int64Array:
    """Compute the stack depth, from 1, of the first page of each reuse; its later pages follow below. O(log) each."""
    request_pages = reuse.request_pages.tolist()
    left = SuffixSums(len(request_pages))
    num_left_pages: list[int] = []
    depths: list[int] = []
    rows = list(zip(reuse.source.tolist(), reuse.first_page.tolist(), reuse.num_pages.tolist(), strict=True))
    starts = np.searchsorted(reuse.user, np.arange(len(request_pages) + 1)).tolist()
    for user, num_request_pages in enumerate(request_pages):
        used = rows[starts[user] : starts[user + 1]]
        for source, first_page, _ in used:
            num_before = num_left_pages[source] - (request_pages[source] - first_page)
            depths.append(left.sum_behind(source) + num_before + 1)
        for source, _, num_pages in used:
            num_left_pages[source] -= num_pages
            left.add(source, -num_pages)
        num_left_pages.append(num_request_pages)
        left.add(user, num_request_pages)
    return np.array(depths, dtype=np.int64)


class LruCurve:
    """LRU hits by pool size."""

    def __init__(self, reuse: Reuse) -> None:
        """Measure all depths."""
        self._num_pages = reuse.num_pages
        self._depths = measure_depths(reuse)

    def count_hits(self, num_usable_pages: int) -> int:
        """Count the pages that hit. The pool, without the null page, must hold the largest request. O(reuses)."""
        return int(np.clip(num_usable_pages + 1 - self._depths, 0, self._num_pages).sum())
