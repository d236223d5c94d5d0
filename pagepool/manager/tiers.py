"""A tier of host pages behind the pool of a manager."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pagepool._core import (
    FailedLoads,
    PageTier,
    Transfers,
    add_tier,
    end_step,
    end_transfers,
    list_in_flight,
    rewind_request,
    take_transfers,
)
from pagepool.arguments import MAX_SIZE, id_of, require_int
from pagepool.errors import ArgumentError, shown
from pagepool.manager.copies import CopiedPages
from pagepool.stats import HostTierStats

if TYPE_CHECKING:
    from pagepool._core import PageStore
    from pagepool.request import Request

__all__ = ["HostTier", "TieredPages"]

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

    def bind(self, store: "PageStore") -> None:
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


class TieredPages(CopiedPages):
    """The host tier of `CacheManager`, which inherits and sets up everything here."""

    def take_transfers(self) -> Transfers:
        """Return the transfers that are due, also those of running batches; empty, with the number 0, if none is.

        The engine runs them before the next step: first it reads the sources of all saves, then it writes the loads, then the
        copies of `take_copies`. When they are done, `complete_transfers` or `fail_transfers` ends them under their number; in
        the meantime saved pages do not hit, and what was computed with loaded pages does not. O(transfers).
        """
        return take_transfers(self._store)

    def end_step(self) -> None:
        """Tell a tier that writes through that all tokens scheduled so far are computed, or will be by the time at which the
        next saves are read: pages that were cached by now are saved with the next `take_transfers`. Call it when a step was
        given to the device, before the next one is scheduled; without it pages are saved only when they are evicted. O(1).
        """
        end_step(self._store)

    def list_transfers_in_flight(self) -> list[Transfers]:
        """Return the transfers that were taken and have not ended, in order: for an engine that has lost some, since the call
        that took them was interrupted. O(transfers x lists).
        """
        return list_in_flight(self._store)

    def complete_transfers(self, number: int) -> None:
        """End the transfers that were taken under a number: saved pages hit from now on. ArgumentError for an unknown number.
        O(transfers in flight).
        """
        end_transfers(self._store, number)

    def fail_transfers(self, number: int, *, saves: Sequence[int] = (), loads: Sequence[int] = ()) -> FailedLoads:
        """End the transfers of a number, of which some failed: those at these places of the saves and of the loads. The pages
        of failed transfers lose their entries, in the tier too. What failed loads mean for requests and rows is said by
        `find_wrong_token` and `RunningBatch.rewind`. ArgumentError for an unknown number or place. O(transfers in flight +
        num_pages).
        """
        return end_transfers(self._store, number, saves, loads)

    def find_wrong_token(self, request: "Request", failed: FailedLoads) -> int | None:
        """Return the token from which a request has to be computed again, since pages of it failed to load; None if none did.
        Lower ``num_computed_tokens`` to that token before the request is scheduled again.

        Behind that token the request keeps its pages up to the first that others hold, and gives back the rest:
        `allocate_slots` takes new ones for these, to which nobody else writes. Read all of its pages by `get_page_ids` then,
        and end transfers from elsewhere into its pages before.

        Free the request instead, with ``num_computed_tokens=0``, if a window has left pages that it needs from that token on,
        if the model has states, or while copies of its pages are due. With states the token is 0 for each request that hit
        loaded pages of this list, or of later ones: its state may have seen wrong tokens. O(pages).
        """
        with self._lock:
            held = self.coordinator.requests.get(id_of(request))
            try:
                return rewind_request(held, failed)
            finally:
                if held is not None and not held:
                    del self.coordinator.requests[request.request_id]
