# Which session a page belongs to, and to which tenant it is charged. The caller holds the store's lock.
#
# Always: a page with an owner has a prefix entry. `Session.first` leads to the ring of a session's pages, in the order in which
# they came to it: those that it cached. A page that two sessions have used, or one and a request or row in none, is `SHARED`
# until it loses its entry, and in no ring; nor is a page whose session was closed, which is that session's again when it uses
# it before others do. A session is live as long as it has pages or holders: rows, requests, and callers that are about to make
# some. Its rows and requests of each tenant have a number of their own, which leads to the `main` one, as have those of a
# tenant in no session, whose pages have no owner.
#
# Once shares were set, each page but those in the blank part of the queue is charged to the tenant whose row or request took
# it, and to the common one from when another tenant uses it until it loses its entry.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base.platform cimport rare
from pagepool.core.pool.records cimport (
    COMMON, NO_GROUP, NO_SESSION, NO_TENANT, NULL_PAGE, SHARED, Links, Pool, Session, link_after, unlink,
)


cdef inline bint is_shared(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether two sessions have used a page."""
    return pool.sessions.owners != NULL and pool.sessions.owners[page_id] == SHARED


cdef inline uint8_t tenant_of(const Pool *pool, int32_t number) noexcept nogil:
    """The tenant of a session, or COMMON."""
    return pool.sessions.items[number].tenant if number != NO_SESSION else <uint8_t>COMMON


cdef inline void charge(Pool *pool, int32_t page_id, uint8_t tenant) noexcept nogil:
    """Charge a page outside the queue to a tenant, and no longer to the one before."""
    pool.tenants.num_charged[pool.tenants.of_pages[page_id]] -= 1
    pool.tenants.num_charged[tenant] += 1
    pool.tenants.of_pages[page_id] = tenant


cdef inline void begin_charge(Pool *pool, int32_t page_id) noexcept nogil:
    """Charge a page that leaves the queue to the common tenant, if it is not charged."""
    if pool.tenants.of_pages[page_id] == NO_TENANT:
        pool.tenants.num_charged[COMMON] += 1
        pool.tenants.of_pages[page_id] = COMMON


cdef inline void end_charge(Pool *pool, int32_t page_id) noexcept nogil:
    """End the charge of a page that comes into the blank part of the queue."""
    pool.tenants.num_charged[pool.tenants.of_pages[page_id]] -= 1
    pool.tenants.of_pages[page_id] = NO_TENANT


cdef inline int32_t _session_of(const Pool *pool, int32_t number) noexcept nogil:
    """The session that has the pages of rows and requests with a number, or NO_SESSION."""
    return pool.sessions.items[number].main if number != NO_SESSION else <int32_t>NO_SESSION


cdef inline bint is_live(const Session *session) noexcept nogil:
    return session.num_pages > 0 or session.num_holders > 0


cdef inline void hold_session(Pool *pool, int32_t number, int32_t change) noexcept nogil:
    """Count a holder of a session more, or, with -1, less. NO_SESSION is not counted."""
    cdef int32_t main = _session_of(pool, number)
    cdef Session *session = &pool.sessions.items[main]
    if number != main:
        pool.sessions.items[number].num_holders += change
    if main != NO_SESSION:
        pool.sessions.num_live -= is_live(session)
        session.num_holders += change
        pool.sessions.num_live += is_live(session)


cdef inline void set_session(Pool *pool, int32_t *place, int32_t number) noexcept nogil:
    """Let a row or request be of another session."""
    if rare(place[0] != number):
        hold_session(pool, number, 1)
        hold_session(pool, place[0], -1)
        place[0] = number


cdef inline void _own_page(Pool *pool, int32_t page_id, int32_t number) noexcept nogil:
    """Give a cached page without an owner to a session."""
    cdef Session *session = &pool.sessions.items[number]
    pool.sessions.owners[page_id] = number
    pool.sessions.num_live += not is_live(session)
    if session.num_pages:
        link_after(pool.sessions.links, pool.sessions.links[session.first].prev, page_id)
    else:
        session.first = page_id
        pool.sessions.links[page_id] = Links(page_id, page_id)
    session.num_pages += 1


cdef inline void leave_session(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page from its owner, if it has one, or the one that it had."""
    cdef int32_t number = pool.sessions.owners[page_id]
    cdef Session *session = &pool.sessions.items[number]
    pool.sessions.owners[page_id] = NO_SESSION
    if number < SHARED:
        pool.sessions.items[SHARED - number].num_closed -= 1
    if number <= NO_SESSION:
        return
    session.num_pages -= 1
    if session.first == page_id:
        session.first = pool.sessions.links[page_id].next if session.num_pages else <int32_t>NULL_PAGE
    unlink(pool.sessions.links, page_id)
    pool.sessions.num_live -= not is_live(session)


cdef inline void close_page(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page from its session, which is closed."""
    cdef int32_t number = pool.sessions.owners[page_id]
    leave_session(pool, page_id)
    pool.sessions.owners[page_id] = SHARED - number
    pool.sessions.items[number].num_closed += 1


cdef inline void enter_session(Pool *pool, int32_t page_id, int32_t number) noexcept nogil:
    """Give a page that has just been cached to the session of its row or request."""
    if rare(number != NO_SESSION) and _session_of(pool, number) != NO_SESSION:
        _own_page(pool, page_id, _session_of(pool, number))


cdef inline void use_in_session(Pool *pool, const int32_t *ids, int32_t n, int32_t number) noexcept nogil:
    """Let pages outside the queue be used by a row or request of a session, or NO_SESSION: those of others, and those without
    an owner, are shared from now on, its own that it closed are its own again, and those of other tenants common.
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
