# Pages of equal content: a ring for each key, and with shards one for each shard of it.

from libc.stdint cimport int32_t

from pagepool.core.records cimport (
    NOT_FIRST, NULL_PAGE, TWIN, Links, Pool, Range, Slot, link_after, num_slots_of, shard_of, unlink,
)


cdef inline int32_t find_twin(Pool *pool, int32_t first, Range ids) noexcept nogil:
    """The page cached first in `ids` among the twins of `first`, or NULL_PAGE. O(shards) where the ids are those of a shard;
    else O(pages of equal content).
    """
    cdef Links *ring = pool.twins
    cdef int32_t page_id
    if pool.num_shards and shard_of(pool, ids.start) == shard_of(pool, ids.stop - 1):
        ring = pool.shard_twins
        first = find_shard_first(pool, first, shard_of(pool, ids.start))
    page_id = first
    while page_id != NULL_PAGE and not ids.start <= page_id < ids.stop:
        page_id = ring[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline int32_t find_shard_first(Pool *pool, int32_t first, int32_t shard) noexcept nogil:
    """The page cached first in a shard among the twins of `first`, which was cached first of all; or NULL_PAGE. O(shards)."""
    cdef int32_t page_id = first
    while shard_of(pool, page_id) != shard:
        page_id = pool.shard_firsts[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline void join_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Put `page_id` at the end of the ring that begins with `first`. O(1), in a pool of shards O(shards)."""
    if not pool.pages[first].group & TWIN:
        pool.twins[first] = Links(first, first)
        pool.pages[first].group |= TWIN
        if pool.num_shards:
            begin_shard_twins(pool, first)
    link_after(pool.twins, pool.twins[first].prev, page_id)
    pool.pages[page_id].group |= TWIN
    if pool.num_shards:
        join_shard_twins(pool, first, page_id)


cdef inline void begin_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """Let a page be the only one of its shard, and of those that are the first of theirs."""
    pool.shard_twins[page_id] = Links(page_id, page_id)
    pool.shard_firsts[page_id] = Links(page_id, page_id)


cdef inline void join_shard_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Put a page that was cached after the twins of `first` behind those of its shard."""
    cdef int32_t shard_first = find_shard_first(pool, first, shard_of(pool, page_id))
    if shard_first == NULL_PAGE:
        begin_shard_twins(pool, page_id)
        link_after(pool.shard_firsts, first, page_id)
    else:
        pool.shard_firsts[page_id] = Links(NOT_FIRST, NOT_FIRST)
        link_after(pool.shard_twins, pool.shard_twins[shard_first].prev, page_id)


cdef inline void leave_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """If the page was the first of its shard, the next one there takes its place."""
    cdef int32_t following = pool.shard_twins[page_id].next
    unlink(pool.shard_twins, page_id)
    if pool.shard_firsts[page_id].next != NOT_FIRST:
        if following != page_id:
            link_after(pool.shard_firsts, page_id, following)
        unlink(pool.shard_firsts, page_id)


cdef inline void link_shard_twins(Pool *pool) noexcept nogil:
    """Build the rings of the shards from those of all twins. O(pool + twins x shards)."""
    cdef Py_ssize_t i
    cdef int32_t first, page_id
    for i in range(num_slots_of(pool)):
        first = pool.slots[i].page_id
        if first != NULL_PAGE and pool.pages[first].group & TWIN:
            begin_shard_twins(pool, first)
            page_id = pool.twins[first].next
            while page_id != first:
                join_shard_twins(pool, first, page_id)
                page_id = pool.twins[page_id].next


cdef inline void leave_twins(Pool *pool, int32_t page_id, Slot *slot) noexcept nogil:
    """The key's `slot` names `page_id` if it was the first of its ring; then the next one takes its place."""
    cdef int32_t following = pool.twins[page_id].next
    unlink(pool.twins, page_id)
    if pool.num_shards:
        leave_shard_twins(pool, page_id)
    if pool.twins[following].next == following:
        pool.pages[following].group &= ~TWIN
    if slot.page_id == page_id:
        slot.page_id = following
