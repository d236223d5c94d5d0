"""The former place of `pagepool.stats.prometheus`."""

from pagepool.stats.prometheus import CacheCollector

__all__ = ["CacheCollector"]
