"""The former name of `pagepool.stats.prometheus`."""

from pagepool.stats.prometheus import CacheCollector

__all__ = ["CacheCollector"]
