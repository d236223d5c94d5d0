# Least-recently-used eviction as a policy, for a pool with levels: one part, the blank one, has all pages, cached or not, in
# the order in which they were released.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagepool.core.queue cimport oldest_in
from pagepool.core.records cimport BLANK, Pool

cdef enum:
    NUM_PARTS = 1


cdef inline void note_release(Pool *pool, int64_t num_pages) noexcept nogil:
    pass


cdef inline void note_queued(Pool *pool, int32_t page_id, uint32_t part) noexcept nogil:
    pass


cdef inline void note_hit(Pool *pool, int32_t page_id, bint was_free) noexcept nogil:
    pass


cdef inline uint32_t note_miss(Pool *pool, uint64_t word) noexcept nogil:
    return BLANK


cdef inline int32_t pick(Pool *pool, int32_t shard) noexcept nogil:
    return oldest_in(pool, BLANK, shard)


cdef inline void note_page(Pool *pool, int32_t page_id) noexcept nogil:
    """Of an eviction, or a drop."""


cdef inline bint is_right(Pool *pool) noexcept nogil:
    return True
