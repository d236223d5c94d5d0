"""A page loses its entry."""

from pagepool.core.base cimport rare
from pagepool.core.pool.departures cimport *
from pagepool.core.pool.victim cimport *


cdef inline void _leave_part(Pool *pool, int32_t page_id) noexcept nogil:
    """End the term of a page that lost its entry. If it is in the queue, move it to the blank part."""
    cdef bint is_moved = is_free(pool, page_id)
    if is_served(pool, page_id):
        is_moved = is_moved and (pool.policy.marks[page_id] != BLANK or term_of(&pool.expected, page_id) != UNKNOWN)
    if is_moved:
        pull_unused(pool, page_id)
    assert not is_free(pool, page_id) or term_of(&pool.expected, page_id) == UNKNOWN
    lose_term(&pool.expected, page_id)
    if is_moved:
        if is_served(pool, page_id):
            pool.policy.marks[page_id] = BLANK
        push(pool, page_id)


cdef void uncache_for(Pool *pool, int32_t page_id, uint32_t why) noexcept nogil:
    """Remove the entry of a cached page for a reason. If the page is free, it moves to the blank part of the queue."""
    if is_journaled(pool):
        record_drop(pool, page_id)
    unwatch(pool, page_id)
    if rare(pool.hear_removal != NULL):
        pool.hear_removal(pool, page_id, why)
    remove_entry(pool, page_id)
    pool.num_dropped += 1
    if rare(pool.num_parts != 0):
        _leave_part(pool, page_id)
    if rare(pool.sessions.owners != NULL):
        leave_session(&pool.sessions, page_id)
    assert term_of(&pool.expected, page_id) == UNKNOWN and pool.pages[page_id].group == NO_GROUP


cdef void uncache(Pool *pool, int32_t page_id) noexcept nogil:
    """Remove the entry of a page that gets other content, or has a twin with the same content."""
    uncache_for(pool, page_id, BY_DROP)
