# Levels of cached pages: the priority with which a page is retained, for how long, and whether it is protected. A page keeps
# its level while it is held, and loses it with its entry.

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.core.platform cimport monotonic_ns
from pagepool.core.queue cimport pull, push
from pagepool.core.records cimport BLANK, PROTECTED, Deadlines, Pool, is_free


cdef inline void set_level(Pool *pool, int32_t page_id, uint8_t level) noexcept nogil:
    """Give a cached page of a pool with levels another one; 0: none. A free page whose part changes is queued as if it had been
    freed now.
    """
    cdef uint8_t old = pool.levels[page_id]
    cdef bint is_moved = level != old and not level & old & PROTECTED and is_free(pool, page_id)
    if is_moved:
        if pool.policy.marks[page_id] != BLANK:
            pool.policy.note_drop(pool, page_id)
        pull(pool, page_id)
    pool.levels[page_id] = level
    if is_moved:
        push(pool, page_id)


cdef inline void lose_level(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the level of a page outside the queue, and its deadline."""
    pool.levels[page_id] = 0
    remove_deadline(&pool.deadlines, page_id)


cdef inline bint is_sooner(const Deadlines *deadlines, int32_t page_id, int32_t other) noexcept nogil:
    cdef int64_t time = deadlines.times[page_id], other_time = deadlines.times[other]
    return time < other_time or (time == other_time and page_id < other)


cdef inline void put_in_heap(Deadlines *deadlines, int32_t page_id, int32_t place) noexcept nogil:
    deadlines.heap[place] = page_id
    deadlines.places[page_id] = place + 1


cdef inline void move_in_heap(Deadlines *deadlines, int32_t page_id, int32_t place) noexcept nogil:
    """Put a page where it belongs in the heap, in which `place` is left to it."""
    cdef int32_t above = (place - 1) // 2, below
    while place and is_sooner(deadlines, page_id, deadlines.heap[above]):
        put_in_heap(deadlines, deadlines.heap[above], place)
        place = above
        above = (place - 1) // 2
    while 2 * place + 1 < deadlines.num:
        below = 2 * place + 1
        below += below + 1 < deadlines.num and is_sooner(deadlines, deadlines.heap[below + 1], deadlines.heap[below])
        if is_sooner(deadlines, page_id, deadlines.heap[below]):
            break
        put_in_heap(deadlines, deadlines.heap[below], place)
        place = below
    put_in_heap(deadlines, page_id, place)


cdef inline void remove_deadline(Deadlines *deadlines, int32_t page_id) noexcept nogil:
    """Take the deadline of a page, if it has one. O(log(pages with one))."""
    cdef int32_t place
    if deadlines.num == 0 or deadlines.places[page_id] == 0:
        return
    place = deadlines.places[page_id] - 1
    deadlines.places[page_id] = 0
    deadlines.num -= 1
    if place < deadlines.num:
        move_in_heap(deadlines, deadlines.heap[deadlines.num], place)


cdef inline void set_deadline(Deadlines *deadlines, int32_t page_id, int64_t time) noexcept nogil:
    """Let the priority of a page end at a time. O(log(pages with a deadline))."""
    remove_deadline(deadlines, page_id)
    deadlines.times[page_id] = time
    deadlines.num += 1
    move_in_heap(deadlines, page_id, deadlines.num - 1)


cdef inline void forget_deadlines(Deadlines *deadlines) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(deadlines.num):
        deadlines.places[deadlines.heap[i]] = 0
    deadlines.num = 0


cdef inline void end_retention(Pool *pool) noexcept nogil:
    """Take the priorities of pages whose time is up. O(log(pages with a deadline)) each."""
    cdef int64_t now = monotonic_ns() if pool.deadlines.num else 0
    cdef int32_t page_id
    while pool.deadlines.num and pool.deadlines.times[pool.deadlines.heap[0]] <= now:
        page_id = pool.deadlines.heap[0]
        remove_deadline(&pool.deadlines, page_id)
        set_level(pool, page_id, pool.levels[page_id] & PROTECTED)
