"""The door for engines: prefix look-up, slots for tokens, and giving pages back, request by request."""

from pagepool.manager.cache_manager import CacheManager
from pagepool.manager.cache_pages import CachePages
from pagepool.manager.lookups import PrefixProbe
from pagepool.manager.tiers import HostTier

__all__ = ["CacheManager", "CachePages", "HostTier", "PrefixProbe"]
