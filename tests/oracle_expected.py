"""When pages of the oracle's pool are wanted, and which of them is evicted next: a list for each term, on a clock that the test
sets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

from oracle_tenants import Holder, Supply

if TYPE_CHECKING:
    from oracle_pool import OraclePool, PageIds

UNKNOWN, LAST_TERM, NEVER = 0, 18, 19  # term n is less than 2**n seconds
SHARED = Holder("")  # owner of what two sessions have used
SECOND = 16
START = 1000 * SECOND  # time when a test begins


def term_of_seconds(seconds: float | None) -> int:
    """Return the term of a page that is wanted in so many seconds."""
    if seconds is None:
        return UNKNOWN
    if isinstance(seconds, bool) or not seconds >= 0:
        raise ValueError("no time")
    return NEVER if math.isinf(seconds) else next((n for n in range(1, LAST_TERM) if seconds < 2**n), LAST_TERM)


def term_from_idle(idle: int) -> int:
    """Return the term of a page of which nothing is known but how long it has been idle: twice that time."""
    return term_of_seconds(2 * idle / SECOND)


class Expectations:
    """The terms of cached pages. Without any ever, they are no matter to a pool."""

    def __init__(self, pool: OraclePool) -> None:
        self.pool = pool
        self.now = START
        self.are_used = False
        self.terms: dict[int, int] = {}
        self.overdue: set[int] = set()
        self.stamps: dict[int, int] = {}  # when a page was released, or got its term
        self.sessions: dict[Holder, dict[int, None]] = {}  # the pages of each that has any
        self.owner: dict[int, Holder] = {}  # session of a page, or SHARED
        self.next_due = 0.0  # no term of an oldest page is over before
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        if not self.are_used:
            self.are_used = True
            self.stamps = dict.fromkeys(range(self.pool.num_pages), self.now)

    def note_queued(self, page: int) -> None:
        """A page is put into the queue."""
        self.stamps[page] = self.now
        if page in self.terms:
            self.next_due = min(self.next_due, self.now + (SECOND << self.terms[page]))

    def idle(self, page: int) -> int:
        return self.now - self.stamps[page]

    def with_term(self, term: int, shard: range | None, tenant: str | None) -> PageIds:
        """List the free pages of a tenant (and of a shard) with a term, the oldest first."""
        pages = [page for page in self.pool.free_in(shard) if self.terms.get(page, UNKNOWN) == term]
        return [page for page in pages if self.pool.tenants.of_page.get(page) == tenant]

    def expect(self, page: int, term: int) -> None:
        """Give a cached page a term, from now on; a free one is queued again."""
        if page not in self.pool.entry_of_page or (term == UNKNOWN and page not in self.terms):
            return
        was_free = page in self.pool.free_queue
        if self.owner.get(page) == SHARED and not UNKNOWN < term < self._own_term(page, was_free):
            return
        if was_free:
            self.pool.take_out(page)
        self.terms.pop(page, None)
        self.overdue.discard(page)
        self.stamps[page] = self.now
        if term != UNKNOWN:
            self.terms[page] = term
        if was_free:
            self.pool._push(page)

    def _own_term(self, page: int, is_free: bool) -> int:
        """Return the term of a page, or that from its idle time."""
        return self.terms.get(page) or term_from_idle(self.idle(page) if is_free else 0)

    def own(self, page: int, holder: Holder) -> None:
        """A page without an owner comes to the session of a holder, if there is one."""
        if holder.session_id is not None:
            self.owner[page] = holder
            self.sessions.setdefault(holder, {})[page] = None

    def use(self, pages: Iterable[int], holder: Holder) -> None:
        """Let cached pages be used in a session, or in none."""
        self.pool.tenants.use(pages, holder)
        for page in pages:
            owner = self.owner.get(page)
            if page not in self.pool.entry_of_page or owner in (holder, SHARED):
                continue
            if owner is None:
                self.own(page, holder)
            else:
                self.leave(page)
                self.owner[page] = SHARED

    def leave(self, page: int) -> None:
        """A page belongs to nobody any more."""
        owner = self.owner.pop(page, SHARED)
        if owner != SHARED:
            del self.sessions[owner][page]
            if not self.sessions[owner]:
                del self.sessions[owner]

    def expect_session(self, session_id: str, term: int) -> int:
        """Say when the pages of a session are wanted, the last one first; tenant by tenant."""
        holders = [holder for holder in self.sessions if holder.session_id == session_id]
        pages = []
        for holder in sorted(holders, key=lambda holder: holder.tenant or ""):
            pages += reversed(self.sessions[holder])
        for page in pages:
            if term == NEVER:
                self.leave(page)
            self.expect(page, term)
        return len(pages)

    def end(self, page: int, is_used: bool) -> None:
        """A page is used, or loses its entry."""
        term = self.terms.pop(page, UNKNOWN)
        is_late = page in self.overdue or (term != UNKNOWN and self.idle(page) >= SECOND << term)
        if term != UNKNOWN and (term != NEVER or page in self.overdue):
            self.counts[("late" if is_late else "in time") if is_used else "unused"] += 1
        self.overdue.discard(page)

    def age(self) -> None:
        """Let pages that were idle for all of their term have that of twice their idle time, as long as the oldest was."""
        if self.now < self.next_due or not any(page in self.terms for page in self.pool.free_queue):
            return
        dues = []
        for tenant, term in product(self.pool.tenants.numbers, range(1, NEVER)):
            for page in self.with_term(term, None, tenant):
                if self.idle(page) < SECOND << term:
                    dues.append(self.stamps[page] + (SECOND << term))
                    break
                self.terms[page] = min(term + 2, NEVER)
                self.overdue.add(page)
                self.pool.free_queue.move_to_end(page)
                self.counts["aged"] += 1
        self.next_due = min(dues, default=math.inf)

    def pick(self, shard: range | None, supply: Supply) -> int:
        """Choose a blank page, or one of the tenant that is to give one."""
        blank = [page for page in self.pool.free_in(shard) if self.pool.is_blank(page)]
        if blank:
            return blank[0]
        if self.pool.tenants.are_used:
            self.pool.tenants.choose(supply, shard)
        return self.pick_of(shard, supply.tenant)

    def pick_of(self, shard: range | None, tenant: str | None) -> int:
        """Choose a page of a tenant that nobody wants, or that of two whose return is further off."""
        plain = self.with_term(UNKNOWN, shard, tenant)
        expected = next((pages for term in range(NEVER, 0, -1) if (pages := self.with_term(term, shard, tenant))), [])
        if (expected and self.terms[expected[0]] == NEVER) or not plain:
            return expected[0]
        page = plain[0] if self.pool.policy is None else self.pool.policy.pick(shard, tenant)
        if expected:
            mine, theirs = term_from_idle(self.idle(page)), self.terms[expected[0]]
            self.counts["compared"] += 1
            if (mine, self.idle(page)) < (theirs, self.idle(expected[0])):
                return expected[0]
        return page
