# The policy ARC: Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003). Pages used once and pages
# used again are in a part each; a miss that the ghost remembers lets the page's part grow. Unlike there, pages in use are in
# neither part. The keys of each part are forgotten in the order of their evictions, which a log has, with gaps where keys were
# asked for again.

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t

from pagepool.core.ghost cimport find_ghost, find_tag, hash_key, remember, tag_in_ghost
from pagepool.core.queue cimport oldest_in
from pagepool.core.records cimport BLANK, FLAGS, NEW, NULL_PAGE, PART, SET_SIZE, TWIN, GhostEntry, Policy, Pool, digest_of

cdef enum:
    AGAIN = 2                 # part for pages that were used again
    NUM_PARTS = 3
    SPARE_ROOM = 2            # entries of the ghost for each key, so that few sets are full
    LOG_ROOM = 2              # entries of each log for each key
    NUMBER_SHIFT = 2          # of the mark of a ghost: part, then the number of the eviction
    LAST_NUMBER = (1 << 30) - 1

cdef struct Learned:          # what a snapshot keeps
    double target             # pages of the new part
    int64_t num_ghosts[PART + 1]  # by part, as the next two
    int64_t log_start[PART + 1]  # evictions of a part before those in its log
    int64_t log_stop[PART + 1]  # evictions of a part

cdef struct Arc:
    Policy base
    int64_t max_num_ghosts
    int64_t log_size
    Learned learned           # behind it the logs: tags, [NUM_PARTS - 1, log_size]


cdef inline void start_arc(Arc *state, int64_t max_num_ghosts) noexcept nogil:
    state.max_num_ghosts = max_num_ghosts
    state.log_size = LOG_ROOM * max_num_ghosts


cdef inline size_t count_log_bytes(int64_t max_num_ghosts) noexcept nogil:
    return (NUM_PARTS - 1) * LOG_ROOM * max_num_ghosts * sizeof(uint32_t)


cdef inline uint32_t *log_at(Arc *state, uint32_t part, int64_t number) noexcept nogil:
    """The place in the log of an eviction from a part."""
    return <uint32_t *>(&state.learned + 1) + (part - 1) * state.log_size + number % state.log_size


cdef inline uint32_t mark_of(uint32_t part, int64_t number) noexcept nogil:
    return <uint32_t>number << NUMBER_SHIFT | part


cdef inline void note_release(Pool *pool, int64_t num_pages) noexcept nogil:
    pass


cdef inline void note_queued(Pool *pool, int32_t page_id, uint32_t part) noexcept nogil:
    pass


cdef inline void note_hit(Pool *pool, int32_t page_id, bint was_free) noexcept nogil:
    pool.policy.marks[page_id] = AGAIN


cdef inline void forget(Arc *state, GhostEntry *entry) noexcept nogil:
    state.learned.num_ghosts[entry.mark & PART] -= entry.tag != 0
    entry.tag = 0


cdef inline uint32_t note_miss(Pool *pool, uint64_t word) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef GhostEntry *entry = find_ghost(&state.base.ghost, word)
    cdef double num_new = <double>state.learned.num_ghosts[NEW], num_again = <double>state.learned.num_ghosts[AGAIN]
    if entry == NULL:
        return BLANK
    if entry.mark & PART == NEW:
        state.learned.target = min(<double>pool.num_pages, state.learned.target + max(1.0, num_again / num_new))
    else:
        state.learned.target = max(0.0, state.learned.target - max(1.0, num_new / num_again))
    forget(state, entry)
    return AGAIN


cdef inline int32_t pick(Pool *pool, int32_t shard) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef int32_t page_id = NULL_PAGE
    if state.base.num_in_part[NEW] > state.learned.target:
        page_id = oldest_in(pool, NEW, shard)
    if page_id == NULL_PAGE:
        page_id = oldest_in(pool, AGAIN, shard)
    return page_id if page_id != NULL_PAGE else oldest_in(pool, NEW, shard)


cdef inline void forget_oldest(Arc *state, uint32_t part) noexcept nogil:
    """Forget the key of a part that was evicted first, or none if its log has none. Amortised O(1)."""
    cdef Learned *learned = &state.learned
    cdef GhostEntry *entry
    cdef int64_t number
    while learned.log_start[part] < learned.log_stop[part]:
        number = learned.log_start[part]
        learned.log_start[part] += 1
        entry = find_tag(&state.base.ghost, log_at(state, part, number)[0])
        if entry != NULL and entry.mark == mark_of(part, number):
            forget(state, entry)
            return


cdef inline void trim_ghost(Arc *state) noexcept nogil:
    """Keep the ghost to its size: by new pages, if more of these are free and remembered than that, else by others."""
    cdef const int64_t *counts = state.learned.num_ghosts
    cdef bint has_many_new
    while counts[NEW] + counts[AGAIN] > state.max_num_ghosts:
        has_many_new = state.base.num_in_part[NEW] + counts[NEW] > state.max_num_ghosts
        forget_oldest(state, NEW if counts[AGAIN] == 0 or (has_many_new and counts[NEW]) else <uint32_t>AGAIN)


cdef inline void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef Learned *learned = &state.learned
    cdef uint32_t part = state.base.marks[page_id]
    cdef uint64_t word
    cdef GhostEntry lost
    if part == BLANK or pool.pages[page_id].group & TWIN:
        return
    if learned.log_stop[part] - learned.log_start[part] == state.log_size:
        forget_oldest(state, part)
    word = hash_key(digest_of(&pool.pages[page_id]), pool.pages[page_id].group & ~FLAGS)
    log_at(state, part, learned.log_stop[part])[0] = tag_in_ghost(word)
    lost = remember(&state.base.ghost, word, mark_of(part, learned.log_stop[part]))
    forget(state, &lost)
    learned.log_stop[part] += 1
    learned.num_ghosts[part] += 1
    trim_ghost(state)


cdef inline void note_drop(Pool *pool, int32_t page_id) noexcept nogil:
    pass


cdef inline bint is_logged(Arc *state, const GhostEntry *entry) noexcept nogil:
    """Whether the log has the eviction that an entry of the ghost is of."""
    cdef uint32_t part = entry.mark & PART
    cdef int64_t start, number
    if not NEW <= <int32_t>part < NUM_PARTS:
        return False
    start = state.learned.log_start[part]
    number = start + ((<int64_t>(entry.mark >> NUMBER_SHIFT) - start) & LAST_NUMBER)
    return number < state.learned.log_stop[part] and log_at(state, part, number)[0] == entry.tag


cdef inline bint are_ghosts_right(Arc *state) noexcept nogil:
    """Whether the logs have all keys of the ghost, and these are counted."""
    cdef const Learned *learned = &state.learned
    cdef const GhostEntry *entry
    cdef int64_t[PART + 1] counts
    cdef Py_ssize_t i
    for i in range(PART + 1):
        counts[i] = 0
        if not 0 <= learned.log_start[i] <= learned.log_stop[i] <= INT64_MAX // 2:  # which is never reached
            return False
        if learned.log_stop[i] - learned.log_start[i] > state.log_size:
            return False
    for i in range(<Py_ssize_t>state.base.ghost.num_sets * SET_SIZE):
        entry = &state.base.ghost.entries[i]
        if entry.tag and not is_logged(state, entry):
            return False
        counts[entry.mark & PART] += entry.tag != 0
    return counts[NEW] == learned.num_ghosts[NEW] and counts[AGAIN] == learned.num_ghosts[AGAIN]


cdef inline bint is_right(Pool *pool) noexcept nogil:
    cdef Arc *state = <Arc *>pool.policy
    cdef bint is_fine = 0 <= state.learned.target <= <double>pool.num_pages and are_ghosts_right(state)
    cdef Py_ssize_t i
    for i in range(pool.num_pages):
        is_fine &= state.base.marks[i] < NUM_PARTS  # without stamps
    return is_fine
