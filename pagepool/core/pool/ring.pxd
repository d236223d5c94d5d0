# The rings of free pages: one for each bank, and one for each shard. The null page closes the first bank's ring; each other
# ring has a record that closes it. With parts, one more record precedes each part: its divider.
#
# Always:
#
# * Links agree: the `prev` of a record's `next` is that record.
# * `num_free` counts the pages in the rings of all banks, `shard_num_free` the pages in each shard's ring.
# * A shard's ring has the shard's pages in the order of the bank's ring, and as many dividers.

from libc.stdint cimport int32_t

from pagepool.core.pool.banks cimport *

cdef enum:
    NO_PART = -1


cdef inline int32_t end_of_queue(const Pool *pool, int32_t shard) noexcept nogil:
    """Return the record that closes a queue."""
    if shard < -1:
        return start_of_part(pool, -1, shard)
    return NULL_PAGE if shard < 0 else pool.num_pages + shard * (1 + pool.num_parts)


cdef inline int32_t start_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the record before the pages of a part."""
    if shard < 0:
        return pool.num_pages + (-1 - shard) * (1 + pool.num_parts) + part
    return pool.num_pages + shard * (1 + pool.num_parts) + 1 + part


cdef inline int32_t end_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the record after the pages of a part; without parts, the record that closes the queue."""
    if part + 1 < pool.num_parts:
        return start_of_part(pool, part + 1, shard)
    return end_of_queue(pool, shard)


cdef inline int32_t record_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """Return the record behind `page_id` in a shard's queue: a page, a part's divider, or the end of the queue."""
    return pool.pages[page_id].next_free if shard < 0 else pool.shard_links[page_id].next


cdef inline int32_t record_before(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    return pool.pages[page_id].prev_free if shard < 0 else pool.shard_links[page_id].prev


cdef inline bint is_page(const Pool *pool, int32_t record) noexcept nogil:
    """Whether a record of a queue is a page, not a divider or an end."""
    return NULL_PAGE < record < pool.num_pages


cdef inline int32_t oldest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the page that has been in a part for longest, or NULL_PAGE."""
    cdef int32_t page_id = record_behind(pool, start_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t newest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    cdef int32_t page_id = record_before(pool, end_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t oldest_in_parts(const Pool *pool, int32_t first, int32_t stop, int32_t shard) noexcept nogil:
    """Return the oldest page of the first part in ``[first, stop)`` that is not empty, or NULL_PAGE. O(parts)."""
    cdef int32_t part, page_id = NULL_PAGE
    for part in range(first, stop):
        page_id = oldest_in(pool, part, shard)
        if page_id != NULL_PAGE:
            break
    return page_id


cdef inline int32_t front_of_blank(const Pool *pool, int32_t shard) noexcept nogil:
    """Return the record before the blank part's pages; without parts, the record before all pages."""
    return start_of_part(pool, BLANK, shard) if pool.num_parts else end_of_queue(pool, shard)


cdef inline int32_t page_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """Return the page after `page_id` in a bank's or shard's queue, whatever its part. If there is none: the end of the queue.
    """
    page_id = record_behind(pool, page_id, shard)
    while page_id >= pool.num_pages and page_id != end_of_queue(pool, shard):
        page_id = record_behind(pool, page_id, shard)
    return page_id


cdef inline int32_t page_before(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the page before `page_id` in its bank's queue, whatever its part. If there is none: the end of the queue."""
    cdef int32_t end = end_of_queue(pool, queue_of(pool, page_id))
    page_id = pool.pages[page_id].prev_free
    while page_id >= pool.num_pages and page_id != end:
        page_id = pool.pages[page_id].prev_free
    return page_id


cdef inline void link_page(Pool *pool, int32_t page_id, int32_t end) noexcept nogil:
    """Insert a page into the pool's queue, before the record `end`."""
    cdef Page *pages = pool.pages
    cdef int32_t last = pages[end].prev_free
    assert 0 < page_id < pool.num_pages and not is_free(pool, page_id) and pages[last].next_free == end
    pages[page_id].prev_free = last
    pages[page_id].next_free = end
    pages[last].next_free = page_id
    pages[end].prev_free = page_id
    pool.num_free += 1
    assert pool.num_free < pool.num_pages


cdef inline void link_divider(Page *pages, int32_t divider, int32_t end) noexcept nogil:
    """Insert a part's divider into a queue, before the record `end`."""
    cdef int32_t last = pages[end].prev_free
    pages[divider] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=last, next_free=end, group=NO_GROUP)
    pages[last].next_free = divider
    pages[end].prev_free = divider


cdef inline void begin_queues(Pool *pool) noexcept nogil:
    """Make an empty queue for each bank, with the dividers of all parts."""
    cdef int32_t bank, part, end
    pool.num_free = 0
    for bank in range(pool.num_banks):
        pool.banks[bank].num_free = 0
        end = end_of_queue(pool, queue_of_bank(bank))
        pool.pages[end] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=end, next_free=end, group=NO_GROUP)
        for part in range(pool.num_parts):
            link_divider(pool.pages, start_of_part(pool, part, queue_of_bank(bank)), end)


cdef inline void push_to_shard(Pool *pool, int32_t page_id, int32_t shard, int32_t end) noexcept nogil:
    assert is_free(pool, page_id) and shard == shard_queue_of(pool, page_id) < pool.num_banks * pool.num_shards
    link_after(pool.shard_links, pool.shard_links[end].prev, page_id)
    pool.shard_num_free[shard] += 1


cdef inline void count_in_bank(Pool *pool, int32_t queue, int32_t change) noexcept nogil:
    """Count pages that enter a bank's queue or, with a negative change, leave it."""
    if pool.num_banks > 1:
        pool.banks[-1 - queue].num_free += change
        assert 0 <= pool.banks[-1 - queue].num_free <= count_pages_in(pool, queue)


cdef inline int32_t count_free_in(const Pool *pool, int32_t queue) noexcept nogil:
    """Count the free pages of a bank or shard."""
    if queue < 0:
        return pool.num_free if pool.num_banks == 1 else pool.banks[-1 - queue].num_free
    return pool.shard_num_free[queue]


cdef inline int32_t count_least_free(const Pool *pool) noexcept nogil:
    """Count the free pages of the bank or shard that has the fewest."""
    cdef int32_t queue, count = pool.num_free
    for queue in range(-pool.num_banks if pool.num_banks > 1 else 0, pool.num_banks * pool.num_shards):
        count = min(count, count_free_in(pool, queue))
    return count
