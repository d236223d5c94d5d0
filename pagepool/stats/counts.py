"""What a cache holds and did."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CacheStats", "PagePoolStats", "QueryCounts", "TimeHistogram"]


class TimeHistogram(NamedTuple):
    """Times of sampled pages: ``counts[i]`` of them were below ``bounds_seconds[i]`` and not below the bound before; the last
    count is of longer ones. Bounds are 1 ms, 2 ms, 4 ms and so on.

    >>> histogram = TimeHistogram.of([2, 0, 1] + [0] * 21, 5_000_000)
    >>> histogram.bounds_seconds[:3], histogram.num_times, histogram.sum_seconds
    ((0.001, 0.002, 0.004), 3, 0.005)
    """

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float

    @classmethod
    def of(cls, counts: list[int], sum_ns: int) -> "TimeHistogram":
        """Of the core's counts."""
        return cls(tuple(0.001 * 2**i for i in range(len(counts) - 1)), tuple(counts), sum_ns / 1e9)

    @property
    def num_times(self) -> int:
        """How many there are."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PagePoolStats:
    """What a pool did since it was made. Pages: how often one was handed out, got free, lost its prefix entry to a new
    holder, and was entered in the prefix index. Tokens: looked up, and found, by `CacheManager.get_computed_pages`.
    """

    num_allocated_pages: int
    num_freed_pages: int
    num_evicted_pages: int
    num_cached_pages: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """Look-ups of prefixes: requests, their tokens, and the tokens that were hit."""

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A manager's cache at one moment, and what it did since it was made. Pages are pages of the pool, of all groups.

    Now: ``num_pages`` without the null page, of these ``num_free_pages``, ``num_held_pages`` by requests and rows, and
    ``num_cached_pages`` that can be hit, free or held. ``usage``: held pages per page, 0.0 to 1.0.

    Since the manager was made: ``queries`` of requests that came for the first time, ``preempted_queries`` of those that came
    back. Since the pool was made: pages handed out, given back by their last holder, and evicted, that is handed out anew
    while they could be hit.

    Of sampled pages (every 128th, in small pools more) since the pool was made: ``lifetime`` from when an evicted page was
    handed out to its eviction, ``idle_before_eviction`` from its last use to then, ``reuse_gap`` from a use to the next
    hit.
    """

    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_cached_pages: int
    usage: float
    queries: QueryCounts
    preempted_queries: QueryCounts
    num_allocated_pages: int
    num_freed_pages: int
    num_evicted_pages: int
    lifetime: TimeHistogram
    idle_before_eviction: TimeHistogram
    reuse_gap: TimeHistogram
