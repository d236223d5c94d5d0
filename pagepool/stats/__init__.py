"""Statistics of a cache. `pagepool.stats.prometheus` exports them to Prometheus."""

from pagepool.stats.counts import CacheStats, PagePoolStats, QueryCounts, TimeHistogram

__all__ = ["CacheStats", "PagePoolStats", "QueryCounts", "TimeHistogram"]
