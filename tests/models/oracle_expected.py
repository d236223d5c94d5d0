"""When pages of the oracle's pool are wanted, and which of them is evicted next: a list for each term, on a clock that the test
sets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from oracle_tenants import Holder, Supply

if TYPE_CHECKING:
    from oracle_pool import OraclePool, PageIds

UNKNOWN, LAST_TERM, NEVER = 0, 18, 19  # term n is less than 2**n seconds
SHARED = object()  # owner of what two sessions have used
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
        self.stamps: dict[int, int] = {}  # when a page was released, or got its term
        self.sessions: dict[str, dict[int, None]] = {}  # the pages of each that has any
        self.owner: dict[int, Any] = {}  # session of a page, or that which it had until it was closed, in a tuple, or SHARED
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        if not self.are_used:
            self.are_used = True
            self.stamps = dict.fromkeys(range(self.pool.num_pages), self.now)

    def note_queued(self, page: int) -> None:
        """A page is put into the queue."""
        self.stamps[page] = self.now

    def idle(self, page: int) -> int:
        return self.now - self.stamps[page]

    def is_late(self, page: int) -> bool:
        """Whether a page has been idle for all of its term."""
        return self.terms[page] != NEVER and self.idle(page) >= SECOND << self.terms[page]

    def current_term(self, page: int) -> int:
        """Return the term of a free page: that from its idle time, if nothing was said of it; if it is late, the first that is
        not over.
        """
        if page not in self.terms:
            return term_from_idle(self.idle(page))
        return term_of_seconds(self.idle(page) / SECOND) if self.is_late(page) else self.terms[page]

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
        self.stamps[page] = self.now
        if term != UNKNOWN:
            self.terms[page] = term
        if was_free:
            self.pool._push(page)

    def _own_term(self, page: int, is_free: bool) -> int:
        """Return the term of a page."""
        return self.current_term(page) if is_free else self.terms.get(page, 1)

    def own(self, page: int, holder: Holder) -> None:
        """A page without an owner comes to the session of a holder, if there is one."""
        if holder.session_id is not None:
            self.owner[page] = holder.session_id
            self.sessions.setdefault(holder.session_id, {})[page] = None

    def use(self, pages: Iterable[int], holder: Holder) -> None:
        """Let cached pages be used in a session, or in none."""
        self.pool.tenants.use(pages, holder)
        for page in pages:
            owner = self.owner.get(page)
            if page not in self.pool.entry_of_page or owner in (holder.session_id, SHARED):
                continue
            self.leave(page)
            if owner == (holder.session_id,):
                self.own(page, holder)
            else:
                self.owner[page] = SHARED

    def leave(self, page: int) -> None:
        """A page belongs to nobody any more."""
        owner = self.owner.pop(page, SHARED)
        if owner in self.sessions:
            del self.sessions[owner][page]
            if not self.sessions[owner]:
                del self.sessions[owner]

    def expect_session(self, session_id: str, term: int) -> int:
        """Say when the pages of a session are wanted, the last one first."""
        pages = list(reversed(self.sessions.get(session_id, {})))
        for page in pages:
            if term == NEVER:
                self.leave(page)
                self.owner[page] = (session_id,)
            self.expect(page, term)
        return len(pages)

    def end(self, page: int, is_used: bool) -> None:
        """A page is used, or loses its entry."""
        if self.terms.get(page, NEVER) != NEVER:
            self.counts[("late" if self.is_late(page) else "in time") if is_used else "unused"] += 1
        self.terms.pop(page, None)

    def pick(self, shard: range | None, supply: Supply) -> int:
        """Choose a blank page, or one of the tenant that is to give one."""
        blank = [page for page in self.pool.free_in(shard) if self.pool.is_blank(page)]
        if blank:
            return blank[0]
        if self.pool.tenants.are_used:
            self.pool.tenants.choose(supply, shard)
        return self.pick_of(shard, supply.tenant)

    def pick_of(self, shard: range | None, tenant: str | None) -> int:
        """Choose a page of a tenant that nobody wants, or the one whose return is furthest off: of those of which something was
        said, and that which the policy picks of the others.
        """
        by_term = [self.with_term(term, shard, tenant) for term in range(NEVER + 1)]
        if by_term[NEVER]:
            return by_term[NEVER][0]
        pages = [page for term in range(LAST_TERM, UNKNOWN, -1) for page in by_term[term]]
        self.counts["late pages seen"] += sum(map(self.is_late, pages))
        if by_term[UNKNOWN]:
            is_ranked = self.pool.policy is not None and self.pool.is_served(by_term[UNKNOWN][0])
            ranks = self.pool.checkpoints.ranks_of(by_term[UNKNOWN][0])
            plain = self.pool.policy.pick(shard, tenant) if is_ranked else by_term[UNKNOWN][0]
            plain = ranks.pick(by_term[UNKNOWN]) if ranks is not None else plain
            self.counts["compared"] += bool(pages)
            pages.insert(0, plain)
        return max(pages, key=lambda page: (self.current_term(page), self.idle(page)))
