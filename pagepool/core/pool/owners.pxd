# The owner of a page is a session.
#
# Each pair of a session and a tenant has a number, and so has each tenant outside sessions. `main` is the session's own number;
# a tenant outside sessions has no `main`, and its pages have no owner.
#
# Always:
#
# * A page with an owner has a prefix entry.
# * `Session.first` leads to a ring of the `num_pages` pages that the session cached and owns, in the order it came to own them.
# * A page that two sessions have used, or a session and a row or request outside sessions, is `SHARED` until it loses its
#   entry, and is in no ring.
# * A page of a closed session is in no ring either. The session owns the page again if it is the first to use it.
# * A session is live while it has pages or holders: rows, requests, and callers that are about to make one.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base cimport rare
from pagepool.core.pool.links cimport *
from pagepool.core.pool.tenants cimport *

cdef enum:
    NO_SESSION = 0
    NOBODY = -1               # in place of a session: the user is neither a row nor a request
    SHARED = -1               # owner of a page that two sessions used; SHARED - n: session n owned it until it was closed

cdef struct Session:          # a session, or the rows and requests of one tenant in a session or in none
    int32_t first             # the first of its pages; NULL_PAGE: it has none
    int32_t num_pages         # pages in its ring
    int32_t num_closed        # pages with the owner SHARED - n, where n is its number
    int32_t num_holders       # rows, requests, and callers about to make one, of all its tenants
    int32_t main              # number of the session that owns the pages, perhaps this one; NO_SESSION: none does
    uint8_t tenant            # tenant to which pages of its rows and requests are charged

cdef struct Sessions:
    Links *links              # [num_pages] one ring of pages for each session; NULL: no session was ever named
    int32_t *owners           # [num_pages] in the same memory: number of the session, see `SHARED`
    Session *items            # [num], and room for `capacity`; item 0 stands for none
    int32_t num
    Py_ssize_t capacity
    int32_t num_live


cdef inline bint is_shared(const Sessions *sessions, int32_t page_id) noexcept nogil:
    """Whether two sessions have used a page."""
    return sessions.owners != NULL and sessions.owners[page_id] == SHARED


cdef inline uint8_t tenant_of(const Sessions *sessions, int32_t number) noexcept nogil:
    """Return the tenant that a number stands for; COMMON for NO_SESSION."""
    return sessions.items[number].tenant if number != NO_SESSION else <uint8_t>COMMON


cdef inline int32_t session_of(const Sessions *sessions, int32_t number) noexcept nogil:
    """Return the session that owns the pages of a number's rows and requests, or NO_SESSION."""
    return sessions.items[number].main if number != NO_SESSION else <int32_t>NO_SESSION


cdef inline bint is_live(const Session *session) noexcept nogil:
    return session.num_pages > 0 or session.num_holders > 0


cdef inline void hold_session(Sessions *sessions, int32_t number, int32_t change) noexcept nogil:
    """Add a holder to a session, or remove one with a change of -1. NO_SESSION counts none."""
    cdef int32_t main = session_of(sessions, number)
    cdef Session *session = &sessions.items[main]
    if number != main:
        sessions.items[number].num_holders += change
    if main != NO_SESSION:
        sessions.num_live -= is_live(session)
        session.num_holders += change
        sessions.num_live += is_live(session)
        assert session.num_holders >= sessions.items[number].num_holders >= 0 and session.main == main


cdef inline void set_session(Sessions *sessions, int32_t *session, int32_t number) noexcept nogil:
    """Move a row or request from the session in `session` to session `number`."""
    if rare(session[0] != number):
        hold_session(sessions, number, 1)
        hold_session(sessions, session[0], -1)
        session[0] = number


cdef inline void _own_page(Sessions *sessions, int32_t page_id, int32_t number) noexcept nogil:
    """Give a cached page without an owner to a session."""
    cdef Session *session = &sessions.items[number]
    assert sessions.owners[page_id] == NO_SESSION and session.main == number
    sessions.owners[page_id] = number
    sessions.num_live += not is_live(session)
    if session.num_pages:
        link_after(sessions.links, sessions.links[session.first].prev, page_id)
    else:
        session.first = page_id
        sessions.links[page_id] = Links(prev=page_id, next=page_id)
    session.num_pages += 1


cdef inline void leave_session(Sessions *sessions, int32_t page_id) noexcept nogil:
    """Clear the owner of a page, and the claim of a closed session to it."""
    cdef int32_t number = sessions.owners[page_id]
    cdef Session *session = &sessions.items[number]
    sessions.owners[page_id] = NO_SESSION
    if number < SHARED:
        sessions.items[SHARED - number].num_closed -= 1
        assert sessions.items[SHARED - number].num_closed >= 0
    if number <= NO_SESSION:
        return
    session.num_pages -= 1
    if session.first == page_id:
        session.first = sessions.links[page_id].next if session.num_pages else <int32_t>NULL_PAGE
    unlink(sessions.links, page_id)
    sessions.num_live -= not is_live(session)
    assert session.num_pages >= 0 and (session.num_pages == 0) == (session.first == NULL_PAGE)


cdef inline void close_page(Sessions *sessions, int32_t page_id) noexcept nogil:
    """Take a page from its session, which is being closed."""
    cdef int32_t number = sessions.owners[page_id]
    assert number > NO_SESSION and sessions.items[number].main == number
    leave_session(sessions, page_id)
    sessions.owners[page_id] = SHARED - number
    sessions.items[number].num_closed += 1


cdef inline void join_session(Sessions *sessions, int32_t page_id, int32_t number) noexcept nogil:
    """Give a newly cached page to the session of its row or request."""
    if rare(number != NO_SESSION) and session_of(sessions, number) != NO_SESSION:
        _own_page(sessions, page_id, session_of(sessions, number))


cdef inline void use_owned(Sessions *sessions, int32_t page_id, int32_t number) noexcept nogil:
    """Record that a row or request of this session, or of none, uses a cached page outside the queue. A page of another
    session, or without an owner, becomes shared; a page that this session owned until it was closed becomes its own again.
    """
    cdef int32_t owner = sessions.owners[page_id]
    if owner == SHARED or owner == number:
        return
    leave_session(sessions, page_id)
    if owner == SHARED - number:
        _own_page(sessions, page_id, number)
    else:
        sessions.owners[page_id] = SHARED
