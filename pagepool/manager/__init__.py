"""The door for engines: prefix look-up, slots for tokens, and giving pages back, request by request."""

from pagepool._core import CachePages, Lease
from pagepool.manager.cache_manager import CacheManager, HostTier
from pagepool.manager.lookups import PrefixProbe

__all__ = ["CacheManager", "CachePages", "HostTier", "Lease", "PrefixProbe"]
