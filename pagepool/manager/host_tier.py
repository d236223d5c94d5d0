"""A tier of host pages behind the pool of a manager."""

from typing import TYPE_CHECKING, Literal

from pagepool._core import PageTier, add_tier
from pagepool.arguments import MAX_SIZE, require_int
from pagepool.errors import ArgumentError, shown
from pagepool.stats import HostTierStats

if TYPE_CHECKING:
    from pagepool._core import PageStore

__all__ = ["HostTier"]

POLICIES = ("write_back", "write_through")


class HostTier:
    """Pages in host memory behind a pool: ``CacheManager(..., host_tier=HostTier(100_000))``. Each tier is for one manager.

    Pages that are evicted from the pool are saved here, under the same keys, and a prefix hits pages in both. See
    `CacheManager.take_transfers` for what the engine does, and `pagepool.host_pages` for JAX.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        policy: Literal["write_back", "write_through"] = "write_back",
        min_uses: int = 1,
        eviction: str = "lru",
    ) -> None:
        """`num_pages` includes a null page, as in a pool. With ``"write_back"`` a page is saved when it is evicted from the
        pool, with ``"write_through"`` also as soon as it was computed (see `CacheManager.end_step`); in both if it was used
        `min_uses` times, 1 to 255: computing it is its first use, and each hit another. `eviction` is the tier's own policy.
        ArgumentError for other values.
        """
        if not isinstance(policy, str) or policy not in POLICIES:
            raise ArgumentError(f"policy: got {shown(policy)}, allowed: {' or '.join(POLICIES)}")
        self.num_pages = require_int("num_pages", num_pages, 2, MAX_SIZE)
        self.policy = policy
        self.min_uses = require_int("min_uses", min_uses, 1, 255)
        self.eviction = eviction
        self._store: PageStore | None = None
        self._tier: PageTier | None = None

    def _bind(self, store: "PageStore") -> None:
        """Put the tier behind a pool. ArgumentError if it is behind one, or the pool has one."""
        if self._store is not None:
            raise ArgumentError("host_tier: got one that is behind another pool")
        tier = PageTier(store, self.num_pages, self.eviction, self.policy == "write_through", self.min_uses)
        add_tier(store, tier)
        self._store, self._tier = store, tier

    def stats(self) -> HostTierStats:
        """Return its counters. O(1)."""
        if self._store is None or self._tier is None:
            return HostTierStats(num_pages=self.num_pages - 1, num_free_pages=self.num_pages - 1)
        return HostTierStats(self.num_pages - 1, *self._tier.counters(self._store))
