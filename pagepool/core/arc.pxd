# The policy ARC: Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003). Pages used once and pages
# used again are in a part each; a miss that the ghost remembers lets the page's part grow. Unlike there, pages in use are in
# neither part, and the ghosts of both parts share sets, each first in, first out.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagepool.core.ghost cimport find_ghost, hash_key, remember
from pagepool.core.queue cimport oldest_in
from pagepool.core.records cimport BLANK, FLAGS, NEW, NULL_PAGE, PART, SET_SIZE, TWIN, GhostEntry, Policy, Pool, digest_of
from pagepool.core.siphash cimport Digest

cdef enum:
    AGAIN = 2                 # part for pages that were used again
    NUM_PARTS = 3

cdef struct Learned:          # what a snapshot keeps
    double target             # pages of the new part
    int64_t num_ghosts[PART + 1]  # by part

cdef struct Arc:
    Policy base
    Learned learned


cdef inline void note_release(Pool *pool, int64_t num_pages) noexcept nogil:
    pass


cdef inline void note_queued(Pool *pool, int32_t page_id, uint32_t part) noexcept nogil:
    pass


cdef inline void note_hit(Pool *pool, int32_t page_id, bint was_free) noexcept nogil:
    pool.policy.marks[page_id] = AGAIN
    pool.policy.num_free_hits += was_free
    pool.policy.num_shared_hits += not was_free


cdef inline uint32_t note_miss(Pool *pool, Digest key, int32_t group) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef GhostEntry *entry = find_ghost(&state.base.ghost, hash_key(key, group))
    cdef double num_new = <double>state.learned.num_ghosts[NEW], num_again = <double>state.learned.num_ghosts[AGAIN]
    if entry == NULL:
        return BLANK
    if entry.mark == NEW:
        state.learned.target = min(<double>pool.num_pages, state.learned.target + max(1.0, num_again / num_new))
    else:
        state.learned.target = max(0.0, state.learned.target - max(1.0, num_new / num_again))
    state.learned.num_ghosts[entry.mark] -= 1
    entry.tag = 0
    return AGAIN


cdef inline int32_t pick(Pool *pool, int32_t shard) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef int32_t page_id = NULL_PAGE
    if state.base.num_in_part[NEW] > state.learned.target:
        page_id = oldest_in(pool, NEW, shard)
    if page_id == NULL_PAGE:
        page_id = oldest_in(pool, AGAIN, shard)
    return page_id if page_id != NULL_PAGE else oldest_in(pool, NEW, shard)


cdef inline void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef uint32_t part = state.base.marks[page_id]
    cdef GhostEntry lost
    if part != BLANK and not pool.pages[page_id].group & TWIN:
        lost = remember(&state.base.ghost, hash_key(digest_of(&pool.pages[page_id]), pool.pages[page_id].group & ~FLAGS), part)
        state.learned.num_ghosts[part] += 1
        state.learned.num_ghosts[lost.mark] -= lost.tag != 0


cdef inline void note_drop(Pool *pool, int32_t page_id) noexcept nogil:
    pass


cdef inline int64_t count_ghosts(const Policy *policy, uint32_t part) noexcept nogil:
    cdef int64_t count = 0
    cdef Py_ssize_t i
    for i in range(<Py_ssize_t>policy.ghost.num_sets * SET_SIZE):
        count += policy.ghost.entries[i].tag != 0 and policy.ghost.entries[i].mark == part
    return count


cdef inline bint are_parts(const Pool *pool, const Policy *policy) noexcept nogil:
    """Whether all marks are parts, without stamps: ghosts are counted by them."""
    cdef bint is_fine = True
    cdef Py_ssize_t i
    for i in range(pool.num_pages):
        is_fine &= policy.marks[i] < NUM_PARTS
    for i in range(<Py_ssize_t>policy.ghost.num_sets * SET_SIZE):
        is_fine &= policy.ghost.entries[i].mark < NUM_PARTS
    return is_fine


cdef inline bint is_right(Pool *pool) noexcept nogil:
    cdef const Arc *state = <Arc *>pool.policy
    if not 0 <= state.learned.target <= <double>pool.num_pages or not are_parts(pool, &state.base):
        return False
    return (
        count_ghosts(&state.base, NEW) == state.learned.num_ghosts[NEW]
        and count_ghosts(&state.base, AGAIN) == state.learned.num_ghosts[AGAIN]
    )
