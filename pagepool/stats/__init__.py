"""Statistics of a cache. `pagepool.stats.prometheus` exports them to Prometheus."""

from pagepool.stats.counts import CacheStats, HostTierStats, PagePoolStats, QueryCounts, TimeHistogram

__all__ = ["CacheStats", "HostTierStats", "PagePoolStats", "QueryCounts", "TimeHistogram"]
