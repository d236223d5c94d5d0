# The owner of a page is a session, and its cost is charged to a tenant. The caller holds the store's lock.
#
# Each pair of a session and a tenant has a number, and so has each tenant outside sessions. `main` is the session's own number;
# a tenant outside sessions has none, and its pages have no owner.
#
# Always:
#
# * A page with an owner has a prefix entry.
# * `Session.first` leads to a ring of `num_pages` pages, in the order in which the session got them: those that it cached.
# * A page that two sessions have used, or a session and a row or request outside sessions, is `SHARED` until it loses its
#   entry, and is in no ring.
# * A page of a closed session is in no ring either. That session owns it again if it is the first one to use it.
# * A session is live while it has pages or holders: rows, requests, and callers that are about to make one.
# * Once shares are set, each page outside the blank part of the queue is charged to a tenant: to the one that took it, and
#   after another tenant's use to the common one. Charges are counted by bank, since a share is one of each bank.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base cimport rare
from pagepool.core.pool.banks cimport *


cdef inline bint is_shared(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether two sessions have used a page."""
    return pool.sessions.owners != NULL and pool.sessions.owners[page_id] == SHARED


cdef inline uint8_t tenant_of(const Pool *pool, int32_t number) noexcept nogil:
    """Return the tenant that a number stands for; COMMON for NO_SESSION."""
    return pool.sessions.items[number].tenant if number != NO_SESSION else <uint8_t>COMMON


cdef inline void charge(Pool *pool, int32_t page_id, uint8_t tenant) noexcept nogil:
    """Charge a page outside the queue to another tenant."""
    cdef int32_t bank = bank_of(pool, page_id)
    assert not is_free(pool, page_id) and pool.tenants.of_pages[page_id] != NO_TENANT
    pool.tenants.num_charged[bank][pool.tenants.of_pages[page_id]] -= 1
    pool.tenants.num_charged[bank][tenant] += 1
    pool.tenants.of_pages[page_id] = tenant
    assert 0 < pool.tenants.num_charged[bank][tenant] <= count_pages_in(pool, queue_of_bank(bank))


cdef inline void begin_charge(Pool *pool, int32_t page_id) noexcept nogil:
    """Charge a page that leaves the queue to the common tenant, unless it is charged already."""
    assert not is_free(pool, page_id)
    if pool.tenants.of_pages[page_id] == NO_TENANT:
        pool.tenants.num_charged[bank_of(pool, page_id)][COMMON] += 1
        pool.tenants.of_pages[page_id] = COMMON


cdef inline void end_charge(Pool *pool, int32_t page_id) noexcept nogil:
    """End the charge of a page that comes into the blank part of the queue."""
    cdef int32_t bank = bank_of(pool, page_id)
    assert pool.tenants.of_pages[page_id] != NO_TENANT
    assert pool.tenants.num_charged[bank][pool.tenants.of_pages[page_id]] > 0
    pool.tenants.num_charged[bank][pool.tenants.of_pages[page_id]] -= 1
    pool.tenants.of_pages[page_id] = NO_TENANT


cdef inline int32_t _session_of(const Pool *pool, int32_t number) noexcept nogil:
    """Return the session that owns the pages of a number's rows and requests, or NO_SESSION."""
    return pool.sessions.items[number].main if number != NO_SESSION else <int32_t>NO_SESSION


cdef inline bint is_live(const Session *session) noexcept nogil:
    return session.num_pages > 0 or session.num_holders > 0


cdef inline void hold_session(Pool *pool, int32_t number, int32_t change) noexcept nogil:
    """Add a holder to a session, or remove one with a change of -1. NO_SESSION counts none."""
    cdef int32_t main = _session_of(pool, number)
    cdef Session *session = &pool.sessions.items[main]
    if number != main:
        pool.sessions.items[number].num_holders += change
    if main != NO_SESSION:
        pool.sessions.num_live -= is_live(session)
        session.num_holders += change
        pool.sessions.num_live += is_live(session)
        assert session.num_holders >= pool.sessions.items[number].num_holders >= 0 and session.main == main


cdef inline void set_session(Pool *pool, int32_t *session, int32_t number) noexcept nogil:
    """Move a row or request, whose session is `session`, to another one."""
    if rare(session[0] != number):
        hold_session(pool, number, 1)
        hold_session(pool, session[0], -1)
        session[0] = number


cdef inline void _own_page(Pool *pool, int32_t page_id, int32_t number) noexcept nogil:
    """Give a cached page without an owner to a session."""
    cdef Session *session = &pool.sessions.items[number]
    assert pool.pages[page_id].group != NO_GROUP and pool.sessions.owners[page_id] == NO_SESSION and session.main == number
    pool.sessions.owners[page_id] = number
    pool.sessions.num_live += not is_live(session)
    if session.num_pages:
        link_after(pool.sessions.links, pool.sessions.links[session.first].prev, page_id)
    else:
        session.first = page_id
        pool.sessions.links[page_id] = Links(prev=page_id, next=page_id)
    session.num_pages += 1


cdef inline void leave_session(Pool *pool, int32_t page_id) noexcept nogil:
    """Clear the owner of a page, and the claim of a closed session to it."""
    cdef int32_t number = pool.sessions.owners[page_id]
    cdef Session *session = &pool.sessions.items[number]
    pool.sessions.owners[page_id] = NO_SESSION
    if number < SHARED:
        pool.sessions.items[SHARED - number].num_closed -= 1
        assert pool.sessions.items[SHARED - number].num_closed >= 0
    if number <= NO_SESSION:
        return
    session.num_pages -= 1
    if session.first == page_id:
        session.first = pool.sessions.links[page_id].next if session.num_pages else <int32_t>NULL_PAGE
    unlink(pool.sessions.links, page_id)
    pool.sessions.num_live -= not is_live(session)
    assert session.num_pages >= 0 and (session.num_pages == 0) == (session.first == NULL_PAGE)


cdef inline void close_page(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page from its session, which is being closed."""
    cdef int32_t number = pool.sessions.owners[page_id]
    assert number > NO_SESSION and pool.pages[page_id].group != NO_GROUP
    leave_session(pool, page_id)
    pool.sessions.owners[page_id] = SHARED - number
    pool.sessions.items[number].num_closed += 1


cdef inline void join_session(Pool *pool, int32_t page_id, int32_t number) noexcept nogil:
    """Give a newly cached page to the session of its row or request."""
    if rare(number != NO_SESSION) and _session_of(pool, number) != NO_SESSION:
        _own_page(pool, page_id, _session_of(pool, number))


cdef inline void use_in_session(Pool *pool, const int32_t *ids, int32_t n, int32_t number) noexcept nogil:
    """Record that a row or request with this number uses pages outside the queue. Pages of other sessions, and pages without an
    owner, become shared; pages of this session from before it was closed become its own again; pages of other tenants become
    common.
    """
    cdef int32_t i, owner
    cdef uint8_t tenant
    if rare(pool.tenants.of_pages != NULL):
        tenant = tenant_of(pool, number)
        for i in range(n):
            if ids[i] != NULL_PAGE and pool.tenants.of_pages[ids[i]] != tenant:
                charge(pool, ids[i], COMMON)
    number = _session_of(pool, number)
    for i in range(n if rare(pool.sessions.owners != NULL) else 0):
        owner = pool.sessions.owners[ids[i]]
        if owner == SHARED or owner == number or pool.pages[ids[i]].group == NO_GROUP:
            continue
        leave_session(pool, ids[i])
        if owner == SHARED - number:
            _own_page(pool, ids[i], number)
        else:
            pool.sessions.owners[ids[i]] = SHARED
