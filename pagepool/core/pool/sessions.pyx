"""Numbers of sessions by id and tenant, expectations of their pages, and shares of tenants."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.pool.arrays cimport *
from pagepool.core.pool.store cimport *
from pagepool.core.values cimport term_of_seconds

from collections.abc import Mapping

from pagepool.arguments import require_name
from pagepool.errors import ArgumentError, ArgumentTypeError, shown

cdef enum:
    MIN_SESSIONS = 64         # remembered before any is forgotten

cdef double MAX_SHARES = 0.95
cdef double ROUNDING = 1e-9


cdef dict checked_shares(object shares):
    """Return the shares by name as floats."""
    cdef dict checked = {}
    if not isinstance(shares, Mapping):
        raise ArgumentTypeError(f"shares: got {type(shares).__name__}, allowed: a mapping of tenants to shares")
    for name, share in dict(shares).items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"shares: got {type(name).__name__} as a tenant, allowed: strings")
        checked[str.__str__(name)] = float_of(share, f"shares[{shown(name)}]")
    if len(checked) >= MAX_TENANTS:
        raise ArgumentError(f"shares: got {len(checked)} tenants, allowed: {MAX_TENANTS - 1}")
    for name, share in checked.items():
        if not share > 0:
            raise ArgumentError(f"shares[{shown(name)}]: got {shown(share)}, allowed: above 0")
    if not sum(checked.values()) <= MAX_SHARES + ROUNDING:
        raise ArgumentError(f"shares: got {sum(checked.values())} in all, allowed: {MAX_SHARES}")
    return checked


cdef int32_t add_session(PageStore store, bint has_pages) except -1:
    """Return the number of a new session without pages and holders. The caller sets its main session. Pages can have it as
    owner only if `has_pages`.
    """
    cdef Sessions *sessions = &store.pool.sessions
    cdef Py_ssize_t n = store.pool.num_pages
    cdef int32_t number = NO_SESSION
    cdef bint has_room
    with store.own_lock()[0]:
        if sessions.links == NULL and has_pages:
            sessions.links = <Links *>raw_calloc(n, sizeof(Links) + sizeof(int32_t))
            sessions.owners = <int32_t *>(sessions.links + n) if sessions.links != NULL else <int32_t *>NULL
        has_room = (sessions.links != NULL or not has_pages) and reserve_items(
            <void **>&sessions.items, &sessions.capacity, max(<Py_ssize_t>2, sessions.num + 1), sizeof(Session)
        )
        if has_room:
            number = max(1, sessions.num)
            sessions.items[NO_SESSION] = sessions.items[number] = Session(
                first=NULL_PAGE, num_pages=0, num_closed=0, num_holders=0, main=NO_SESSION, tenant=COMMON,
            )
            sessions.num = number + 1
    if not has_room:
        raise MemoryError(f"sessions of {n} pages")
    return number


@cython.final
@cython.auto_pickle(False)
cdef class PageSessions:
    """The numbers of the sessions of a pool, by id and tenant. Callers serialise their calls."""

    cdef PageStore store
    cdef dict numbers               # session id -> tenant -> number
    cdef dict tenants               # numbers of tenants with shares
    cdef list unused                # free numbers of sessions
    cdef Py_ssize_t num_known
    cdef Py_ssize_t num_at_sweep

    def __cinit__(self, PageStore store not None):
        self.store, self.numbers, self.tenants, self.unused = store, {}, {}, []
        self.num_known, self.num_at_sweep = 0, MIN_SESSIONS

    def __reduce__(self):
        raise ArgumentTypeError("the sessions of a pool cannot be pickled")

    def hold(self, session_id, tenant=None) -> int:
        """Return the number of a session for a tenant, valid until `release`; 0 without both, or without caching. Amortised
        O(1); the first call is O(num_pages).
        """
        cdef object checked = require_name("session_id", session_id), name = require_name("tenant", tenant)
        cdef int32_t main = NO_SESSION, number
        if (checked is None and name is None) or not self.store.enable_caching:
            return NO_SESSION
        if self.num_known >= self.num_at_sweep:
            self.forget()
        if checked is not None:
            main = self.find_or_add(checked, None, NO_SESSION)
        number = main if name is None else self.find_or_add(checked, name, main)
        with self.store.own_lock()[0]:
            hold_session(&self.store.pool.sessions, number, 1)
        return number

    cdef int32_t find_or_add(self, object session_id, object tenant, int32_t main) except -1:
        """Return the number of a session for a tenant. Its `Session.main` is `main` or, without a tenant, the number itself."""
        cdef dict numbers = self.numbers.setdefault(session_id, {})
        cdef object known = numbers.get(tenant)
        cdef int32_t number
        if known is not None:
            return known
        is_reused = self.unused and (session_id is None or self.store.pool.sessions.links != NULL)
        number = self.unused.pop() if is_reused else add_session(self.store, session_id is not None)
        numbers[tenant] = number
        self.num_known += 1
        with self.store.own_lock()[0]:
            assert self.store.pool.sessions.items[number].num_pages == 0
            assert self.store.pool.sessions.items[number].num_holders == 0
            assert main == NO_SESSION or self.store.pool.sessions.items[main].main == main
            self.store.pool.sessions.items[number].main = number if tenant is None else main
            self.store.pool.sessions.items[number].tenant = self.tenants.get(tenant, COMMON)
        return number

    def release(self, number) -> None:
        """Release a number that `hold` returned. It is reused once no page, row or request has it."""
        cdef int32_t checked = self.store.checked_session(number)
        with self.store.own_lock()[0]:
            if checked != NO_SESSION and self.store.pool.sessions.items[checked].num_holders > 0:
                hold_session(&self.store.pool.sessions, checked, -1)

    cdef int forget(self) except -1:
        """Forget the sessions that are not live."""
        cdef const Session *session
        cdef int32_t number
        cdef bint is_gone
        for session_id, numbers in list(self.numbers.items()):
            for tenant in list(numbers):
                number = numbers[tenant]
                with self.store.own_lock()[0]:
                    session = &self.store.pool.sessions.items[number]
                    is_gone = not is_live(session) and session.num_closed == 0
                assert session.num_pages >= 0 and session.num_closed >= 0 and session.num_holders >= 0
                if is_gone:
                    self.unused.append(numbers.pop(tenant))
                    self.num_known -= 1
            if not numbers:
                del self.numbers[session_id]
        self.num_at_sweep = max(<Py_ssize_t>MIN_SESSIONS, 2 * self.num_known)
        return 0

    def expect(self, session_id, seconds) -> int:
        """Expect the pages of a session back in some seconds (None: unknown); the last page is queued first. Infinity means
        never, and ends the session's claim on the pages. Return the number of pages. O(pages).
        """
        cdef object number = self.numbers.get(require_name("session_id", session_id), {}).get(None)
        cdef int32_t term = term_of_seconds(seconds)
        return 0 if number is None else self.expect_number(number, term)

    cdef int32_t expect_number(self, int32_t number, int32_t term) except -1:
        cdef Pool *pool = &self.store.pool
        cdef const Session *session
        cdef PageIds terms = PageIds([term])
        cdef int32_t _, page_id, following, num_pages
        cdef int64_t now
        cdef bint has_room
        with self.store.own_lock()[0]:
            session = &pool.sessions.items[number]
            num_pages, now = session.num_pages, now_of(&pool.expected)
            has_room = num_pages == 0 or self.store.make_terms(terms)
            page_id = pool.sessions.links[session.first].prev
            for _ in range(num_pages if has_room else 0):
                following = pool.sessions.links[page_id].prev
                assert pool.sessions.owners[page_id] == number and pool.pages[page_id].group != NO_GROUP
                if term == NEVER:
                    close_page(&pool.sessions, page_id)
                expect_page(pool, page_id, term, now)
                page_id = following
        if not has_room:
            raise MemoryError(f"expectations of {pool.num_pages} pages")
        return num_pages

    # Shares.

    def set_shares(self, shares) -> None:
        """Set the shares of tenants in each bank, by name; other tenants share the rest. O(num_pages + sessions)."""
        cdef Pool *pool = &self.store.pool
        cdef dict checked = checked_shares(shares)
        cdef dict tenants = {name: number for name, number in self.tenants.items() if name in checked}
        cdef list removed = [number for name, number in self.tenants.items() if name not in checked]
        cdef double[MAX_TENANTS] values
        cdef int32_t i
        cdef PageIds numbers, charged, left = PageIds(removed)
        cdef bint has_room
        for i in range(MAX_TENANTS):
            values[i] = 0
        values[COMMON] = 1 - sum(checked.values())
        assert values[COMMON] > 0
        for name, share in checked.items():
            if name not in tenants:
                taken = {*tenants.values()}
                tenants[name] = next(number for number in range(COMMON + 1, MAX_TENANTS) if number not in taken)
            values[<int32_t>tenants[name]] = share
        by_number = {number: tenants.get(name, COMMON) for known in self.numbers.values() for name, number in known.items()}
        numbers, charged = PageIds(list(by_number)), PageIds(list(by_number.values()))
        with self.store.own_lock()[0]:
            has_room = divide(pool, True, True)
            if has_room and pool.tenants.of_pages != NULL:
                for i in range(left.num):
                    join_common(pool, left.ids[i])
                if left.num and pool.num_shards:
                    link_shards(pool)
                for i in range(numbers.num):
                    pool.sessions.items[numbers.ids[i]].tenant = charged.ids[i]
                pool.tenants.shares = values
        if not has_room:
            raise MemoryError(f"the tenants of {pool.num_pages} pages")
        self.tenants = tenants

    def count_charged(self, bank) -> dict:
        """Count the pages of a bank charged to each tenant with a share. O(tenants)."""
        cdef const int32_t *counts = &self.store.pool.tenants.num_charged[self.store.checked_bank(bank)][0]
        return {name: self.store.read(&counts[<int32_t>number]) for name, number in self.tenants.items()}
