"""What pools of all sizes hit when the least recently used page is evicted, from one pass over the requests.

Pages that requests gave back form one stack, the last used on top, whatever the size of the pool: a pool of `n` pages holds the
top `n` (Mattson, Gecsei, Slutz and Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970).
So a page hits if its depth in the stack is at most `n`. A request gives its pages back tail first and leaves them on top in
order, and whoever takes some of them up takes the first that are left. So the depth of a run of pages follows from how many
pages each request since has left there, a sum that a Fenwick tree (Fenwick, A new data structure for cumulative frequency
tables, Software: Practice and Experience 24(3), 1994) keeps at hand; no page is looked at by itself.

The counts are those of `CacheManager`, to the token, with one group of full attention and requests that run one after another.
A page that is computed although it is cached (the last page of a prompt that is cached whole, an answer that was given before)
is in the pool twice, here as there. If it is hit later, the manager takes the older copy as long as that is there, and here
the newer one is taken up; then counts are off as if the pool had some pages more or fewer, at most as many as are there twice.
"""

import numpy as np

from pagepool.replay.plans.reuse import Int64Array, Reuse

__all__ = ["LruCurve"]


class SuffixSums:
    """A list of numbers that change, and the sums behind each: a Fenwick tree, O(log n) each."""

    def __init__(self, size: int) -> None:
        """All 0."""
        self._nodes = [0] * (size + 1)

    def add(self, i: int, value: int) -> None:
        """Change the number at `i`."""
        while i > 0:
            self._nodes[i] += value
            i &= i - 1

    def sum_behind(self, i: int) -> int:
        """The sum of the numbers behind `i`."""
        total = 0
        i += 1
        while i < len(self._nodes):
            total += self._nodes[i]
            i += i & -i
        return total


def measure_depths(reuse: Reuse) -> Int64Array:
    """For each reuse the depth of its first page in the stack, from 1 on; each page behind it is one deeper. O(log) each."""
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
    """Hits by size of the pool."""

    def __init__(self, reuse: Reuse) -> None:
        """Measures all depths."""
        self._num_pages = reuse.num_pages
        self._depths = measure_depths(reuse)

    def count_hits(self, num_usable_pages: int) -> int:
        """Pages that hit in a pool of so many pages without the null page, which must hold the largest request. O(reuses)."""
        return int(np.clip(num_usable_pages + 1 - self._depths, 0, self._num_pages).sum())
