# Departures: the keys that left the prefix index last, why they left, and when. A pool keeps them once explanations are
# enabled, about twice as many as it has pages.
#
# Always: `Pool.hear_removal` is set in a pool that keeps departures, has several banks, or waiting queues in front of it.

from libc.stdint cimport int32_t, uint32_t, uint64_t

from pagepool.core.pool.index cimport *

cdef enum:                    # why a key left: the lowest bits of its mark in the ghost; above them is the time
    BY_EVICTION = 0
    BY_DROP = 1               # its content was, or may be, wrong
    BY_LEAVING = 2            # a window left its page, or a later checkpoint of its run took its place
    BY_RESET = 3              # all entries were dropped
    WHY_MASK = 3
    WHY_SHIFT = 2
    LAST_TIME = (1 << 30) - 1


cdef inline uint32_t _mark_now(const Pool *pool, uint32_t why) noexcept nogil:
    return <uint32_t>now_of(&pool.expected) << WHY_SHIFT | why


cdef inline void note_departure(Pool *pool, int32_t page_id, uint32_t why) noexcept nogil:
    """Note that a page is about to lose its entry, unless another page has its key. Pages that windows leave are noted only
    where no full attention shows later that they were computed: they would push out other departures. Elsewhere they lose an
    earlier departure.
    """
    cdef const Page *page = &pool.pages[page_id]
    cdef uint64_t word = hash_key(digest_of(page), page.group & ~FLAGS)
    cdef GhostEntry *earlier
    assert page.group != NO_GROUP and pool.departed.entries != NULL
    if page.group & TWIN:
        return
    if why != BY_LEAVING or pool.notes_leaving:
        remember(&pool.departed, word, _mark_now(pool, why))
        return
    earlier = find_ghost(&pool.departed, word)
    if earlier != NULL:
        earlier.tag = 0


cdef inline void depart_all(Pool *pool) noexcept nogil:
    """Note that the keys which left before would have left now, with all entries. O(num_pages)."""
    cdef Py_ssize_t i
    for i in range(<Py_ssize_t>pool.departed.num_sets * SET_SIZE if pool.departed.entries != NULL else 0):
        if pool.departed.entries[i].tag:
            pool.departed.entries[i].mark = _mark_now(pool, BY_RESET)


cdef inline const GhostEntry *find_departure(const Pool *pool, Digest key, int32_t group) noexcept nogil:
    """Return the departure of a key; NULL if it is not known."""
    return find_ghost(&pool.departed, hash_key(key, group)) if pool.departed.entries != NULL else NULL


cdef inline double seconds_since(const Pool *pool, const GhostEntry *departure) noexcept nogil:
    """Return the time since a departure, in steps of 1 / SECOND."""
    return <double>((<uint32_t>now_of(&pool.expected) - (departure.mark >> WHY_SHIFT)) & LAST_TIME) / SECOND


cdef inline void hear_removal(Pool *pool, int32_t page_id, uint32_t why) noexcept nogil:
    """Note the departure of a page that is about to lose its entry, tell waiting queues, and count it in its bank."""
    cdef Bank *bank = &pool.banks[bank_of(pool, page_id)]
    if pool.awaited != NULL:
        pool.awaited.note(pool.awaited, digest_of(&pool.pages[page_id]), pool.pages[page_id].group & ~FLAGS)
    if pool.departed.entries != NULL:
        note_departure(pool, page_id, why)
    if pool.num_banks > 1:
        bank.num_entries -= 1
        if bank.checkpoints != NULL:
            end_note(bank.checkpoints, page_id)
