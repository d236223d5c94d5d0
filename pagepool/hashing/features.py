"""The positions of a request's multimodal features, and searches among them."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any

__all__ = ["FeatureRange", "Features", "SortedFeatures", "make_features"]

FeatureRange = tuple[int, int, Any, Any]
"""Start, end, modality and content hash of a feature: a half-open range of tokens."""


MAX_SEARCHED_FEATURES = 8
"""Up to this number, a linear search is faster than a tree."""


class Features:
    """The features of a request, with linear search."""

    __slots__ = ("_hash", "_ranges")

    def __init__(self, ranges: tuple[FeatureRange, ...]) -> None:
        """`ranges` are in the request's order."""
        self._ranges = ranges
        self._hash = hash(ranges)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same features in the same order."""
        return isinstance(other, Features) and self._ranges == other._ranges

    def __hash__(self) -> int:
        """The hash, computed once."""
        return self._hash

    def find_next(self, start: int) -> int | None:
        """Return the first token from `start` on at a feature, an empty one included; None after the last feature."""
        return min([max(start, begin) for begin, end, _, _ in self._ranges if end > start], default=None)

    def find_overlapping(self, start: int, stop: int) -> list[FeatureRange]:
        """Return the features that overlap ``[start, stop)``, empty ones within it included, in the request's order."""
        return [feature for feature in self._ranges if feature[0] < stop and start < feature[1]]


class SortedFeatures(Features):
    """Features sorted by their starts.

    A search finds each of a page's features among n in O(log n). It uses a tree over the sorted features that holds the last
    end below each node; the children of node i are at 2 i and 2 i + 1.
    """

    __slots__ = ("_ends", "_last_ends", "_order", "_starts")

    def __init__(self, ranges: tuple[FeatureRange, ...]) -> None:
        """O(n log n)."""
        super().__init__(ranges)
        self._order = sorted(range(len(ranges)), key=lambda i: ranges[i][0])
        self._starts = [ranges[i][0] for i in self._order]
        ends = [ranges[i][1] for i in self._order]
        self._last_ends = list(accumulate(ends, max))
        num_leaves = 1 << (len(ends) - 1).bit_length()
        self._ends = [0] * num_leaves + ends + [0] * (num_leaves - len(ends))
        for i in range(num_leaves - 1, 0, -1):
            self._ends[i] = max(self._ends[2 * i], self._ends[2 * i + 1])

    def find_next(self, start: int) -> int | None:
        """O(log n)."""
        num = bisect_right(self._starts, start)
        if num and self._last_ends[num - 1] > start:
            return start
        return self._starts[num] if num < len(self._starts) else None

    def find_overlapping(self, start: int, stop: int) -> list[FeatureRange]:
        """O(log n), and O(log n) for each feature found."""
        found: list[int] = []
        num_leaves = len(self._ends) // 2
        nodes = self._list_nodes(bisect_left(self._starts, stop), num_leaves)
        while nodes:
            node = nodes.pop()
            if self._ends[node] <= start:
                continue
            if node < num_leaves:
                nodes += (2 * node, 2 * node + 1)
            else:
                found.append(self._order[node - num_leaves])
        return [self._ranges[i] for i in sorted(found)]

    @staticmethod
    def _list_nodes(num: int, num_leaves: int) -> list[int]:
        """Return the largest nodes that together cover exactly the first `num` leaves."""
        nodes = []
        while num:
            num_below = num & -num
            num -= num_below
            nodes.append((num_leaves + num) // num_below)
        return nodes


NO_FEATURES = Features(())


def make_features(ranges: tuple[FeatureRange, ...]) -> Features:
    """Return the features in the form that is searched fastest."""
    if not ranges:
        return NO_FEATURES
    return SortedFeatures(ranges) if len(ranges) > MAX_SEARCHED_FEATURES else Features(ranges)
