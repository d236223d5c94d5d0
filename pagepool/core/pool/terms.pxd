# Terms: when pages are expected back. A cached page, held or free, gets a term; its time runs from then on, and starts again
# when the page is released. The next use ends the term, and so does the loss of the entry.
#
# Always:
#
# * `num_free[n]` counts the free pages with term n. Bit n of `free_terms` is set exactly when that is not 0.
# * No stamp is later than now, and no page is idle for half of the range of stamps, which wrap around.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t

from pagepool.core.base cimport LAST_TERM, NEVER, UNKNOWN, coarse_time, highest_bit

cdef enum:
    SECOND = 16               # ticks of the clock of stamps

cdef struct Outcomes:         # pages whose term, other than `NEVER`, ended, by outcome
    int64_t num_pages_in_time  # used within the term
    int64_t num_late_pages    # used after it
    int64_t num_unused_pages  # uncached before any use

cdef struct Expectations:     # when pages are expected back
    uint32_t *stamps          # [num_pages] when a free page was released or got its term; NULL: no page was ever expected
    uint8_t *terms            # [num_pages] in the same memory; UNKNOWN for most
    int32_t num_free[NEVER + 1]  # free pages by term
    uint32_t free_terms       # bit n: free pages have term n
    int64_t fixed_time        # time fixed by a test; 0: use the clock
    Outcomes outcomes


cdef inline int64_t now_of(const Expectations *expected) noexcept nogil:
    """Return the time on the clock of stamps."""
    return expected.fixed_time or coarse_time(SECOND)


cdef inline int32_t term_of(const Expectations *expected, int32_t page_id) noexcept nogil:
    """Return the term of a page; UNKNOWN if no page was ever expected."""
    return expected.terms[page_id] if expected.terms != NULL else UNKNOWN


cdef inline uint32_t idle_time(const Expectations *expected, int32_t page_id, int64_t now) noexcept nogil:
    """Return the time since a page was released or got its term."""
    return <uint32_t>now - expected.stamps[page_id]


cdef inline bint is_older(const Expectations *expected, int32_t page_id, int32_t other) noexcept nogil:
    """Whether a free page was released before another one."""
    return <int32_t>(expected.stamps[other] - expected.stamps[page_id]) > 0


cdef inline uint32_t _limit_of(int32_t term) noexcept nogil:
    """Return the idle time at which a term is over."""
    return <uint32_t>SECOND << term


cdef inline int32_t term_from_idle(uint32_t idle) noexcept nogil:
    """Return the term with which a page without one counts: as if it were expected back in twice its idle time."""
    return min(highest_bit(2 * (idle // SECOND) | 1) + 1, <int32_t>LAST_TERM)


cdef inline int32_t current_term(const Expectations *expected, int32_t page_id, int64_t now) noexcept nogil:
    """Return the term of a free page that has one. A late page counts with the first term that is longer than its idle time."""
    cdef int32_t term = term_of(expected, page_id)
    cdef uint32_t idle = idle_time(expected, page_id, now)
    assert UNKNOWN < term <= NEVER
    if term == NEVER or idle < _limit_of(term):
        return term
    return min(highest_bit(idle // SECOND) + 1, <int32_t>LAST_TERM)


cdef inline void set_term(Expectations *expected, int32_t page_id, int32_t term, int64_t now) noexcept nogil:
    """Give a page outside the queue a term, which runs from now on."""
    assert UNKNOWN <= term <= NEVER
    expected.terms[page_id], expected.stamps[page_id] = <uint8_t>term, <uint32_t>now


cdef inline void count_term(Expectations *expected, int32_t term, int32_t change) noexcept nogil:
    """Count a page by its term, if it has one, as the page enters the queue or, with a change of -1, leaves it."""
    if term != UNKNOWN:
        expected.num_free[term] += change
        assert expected.num_free[term] >= 0
        if expected.num_free[term]:
            expected.free_terms |= <uint32_t>1 << term
        else:
            expected.free_terms &= ~(<uint32_t>1 << term)


cdef inline void use_term(Expectations *expected, int32_t page_id) noexcept nogil:
    """End the term of a page outside the queue that is used, if it has one, and count whether the use is in time."""
    cdef int32_t term = term_of(expected, page_id)
    cdef bint is_late
    if term == UNKNOWN:
        return
    if term != NEVER:
        is_late = idle_time(expected, page_id, now_of(expected)) >= _limit_of(term)
        expected.outcomes.num_late_pages += is_late
        expected.outcomes.num_pages_in_time += not is_late
    expected.terms[page_id] = UNKNOWN


cdef inline void lose_term(Expectations *expected, int32_t page_id) noexcept nogil:
    """End the term of a page outside the queue that has lost its entry, if it has one."""
    if term_of(expected, page_id) != UNKNOWN:
        expected.outcomes.num_unused_pages += term_of(expected, page_id) != NEVER
        expected.terms[page_id] = UNKNOWN
