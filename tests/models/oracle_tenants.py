"""To whom the pages of the oracle's pool are charged, and who gives the next page that is evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from oracle_pool import OraclePool

COMMON = None  # tenant of all pages that belong to none
MAX_TENANTS = 64
NEVER = 19


class Holder(NamedTuple):
    """Who takes and uses pages."""

    session_id: str | None = None
    tenant: str | None = None


NOBODY = Holder()


class Supply:
    """A call that takes pages: for whom, how many more, and how many of them from the tenant that was chosen last."""

    def __init__(self, taker: str | None, num_left: int) -> None:
        self.taker = taker
        self.num_left = num_left
        self.tenant: str | None = COMMON
        self.num_due = 0


class Tenants:
    """The tenant of each page that is charged to one, and the shares."""

    def __init__(self, pool: OraclePool) -> None:
        self.pool = pool
        self.are_used = False
        self.shares: dict[str | None, float] = {COMMON: 1}
        self.numbers: dict[str | None, int] = {COMMON: 0}  # of equal ones the first is chosen
        self.names: list[str] = []  # of those with shares, in the order in which they got them
        self.of_page: dict[int, str | None] = {}
        self.counts: Counter[str] = Counter()

    def holder_of(self, request: Any) -> Holder:
        """Return who a request is when it takes its first pages."""
        return Holder(getattr(request, "session_id", None), getattr(request, "tenant", None))

    def tenant_of(self, holder: Holder) -> str | None:
        return holder.tenant if holder.tenant in self.shares else COMMON

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the shares. What was charged to others is common, and free pages stay in the order of their release."""
        if len(shares) >= MAX_TENANTS or not all(share > 0 for share in shares.values()) or sum(shares.values()) > 0.951:
            raise ValueError("no shares")
        if not self.pool.enable_caching:
            return
        self.pool.expected.begin()
        self.are_used = True
        left = [name for name in self.names if name not in shares]
        self.names = [name for name in self.names if name in shares] + [name for name in shares if name not in self.names]
        for name in left:
            self._join_common(name)
            del self.numbers[name]
        for name in shares:
            unused = (number for number in range(1, MAX_TENANTS) if number not in self.numbers.values())
            if name not in self.numbers:
                self.numbers[name] = next(unused)
        self.numbers = dict(sorted(self.numbers.items(), key=lambda item: item[1]))
        self.shares = {COMMON: 1 - sum(shares.values()), **shares}

    def _join_common(self, tenant: str) -> None:
        """Let the free pages of a tenant stand among the common ones, each before those that were released later."""
        queue, idle = self.pool.free_queue, self.pool.expected.idle
        joining = [page for page in queue if self.of_page.get(page) == tenant]
        self.of_page = {page: name for page, name in self.of_page.items() if name != tenant}
        self.counts["joining pages"] += len(joining)
        for part in {self.pool.part_of(page) for page in joining}:
            common = [page for page in queue if page not in joining and self.pool.part_of(page) == part]
            merged = []
            for page in joining:
                if self.pool.part_of(page) == part:
                    while common and idle(common[0]) >= idle(page):
                        merged.append(common.pop(0))
                    merged.append(page)
            for page in merged + common:
                queue.move_to_end(page)

    def charge(self, page: int, tenant: str | None) -> None:
        """Charge a page to a tenant."""
        self.of_page.pop(page, None)
        if tenant is not COMMON:
            self.of_page[page] = tenant

    def use(self, pages: Iterable[int], holder: Holder) -> None:
        """Let pages be used: those of other tenants are common from now on."""
        for page in pages:
            if self.of_page.get(page) not in (COMMON, self.tenant_of(holder)):
                self.charge(page, COMMON)
                self.counts["common pages"] += 1

    def note_queued(self, page: int) -> None:
        """A page has come to the queue: a blank one is charged to nobody."""
        if self.pool.is_blank(page):
            self.of_page.pop(page, None)

    def num_charged(self, tenant: str | None, pages: range) -> int:
        """Count those of some pages that are charged to a tenant: all but those in the blank part are to one."""
        charged = (page for page in pages if self.of_page.get(page) == tenant)
        in_use = [page for page in charged if not self._is_put_away(page)]
        return sum(page not in self.pool.free_queue or not self.pool.is_blank(page) for page in in_use)

    def _is_put_away(self, page: int) -> bool:
        return page in self.pool.sizes.retired and self.pool.ref_counts[page] == 0

    def _excess(self, tenant: str | None, supply: Supply, shard: range | None) -> float:
        """Return how many pages of its pool a tenant has above its share, with those that it is about to take."""
        num_taken, pages = supply.num_left if tenant == supply.taker else 0, self.pool.range_around(shard)
        return self.num_charged(tenant, pages) + num_taken - self.shares[tenant] * self.pool.sizes.count_in_use(pages)

    def choose(self, supply: Supply, shard: range | None) -> None:
        """Choose of the tenants above their share, or of all, the one whose page (in a shard) is not wanted, or was released
        earliest, for some pages, as long as it is above.
        """
        supply.num_due -= 1
        names = {self.of_page.get(page) for page in self.pool.free_in(shard)}
        if supply.num_due >= 0 and supply.tenant in names:
            return
        excesses = {name: self._excess(name, supply, shard) for name in self.numbers if name in names}
        over = [name for name, excess in excesses.items() if excess > 0]
        victims = {name: self.pool.expected.pick_of(shard, name) for name in over or excesses}
        is_wanted = {name: self.pool.expected.terms.get(page) != NEVER for name, page in victims.items()}
        supply.tenant = min(victims, key=lambda name: (is_wanted[name], -self.pool.expected.idle(victims[name])))
        supply.num_due = min(31, int(max(0, excesses[supply.tenant] - 1)))
        self.counts["chosen"] += supply.tenant is not COMMON
