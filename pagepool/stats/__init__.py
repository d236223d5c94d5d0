"""Numbers for operators: what a cache holds and did. `pagepool.stats.prometheus` exports them."""

from pagepool.stats.counts import CacheStats, PagePoolStats, QueryCounts, TimeHistogram

__all__ = ["CacheStats", "PagePoolStats", "QueryCounts", "TimeHistogram"]
