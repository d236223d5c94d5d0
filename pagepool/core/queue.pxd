# The free queue, of the pool and of each shard.

from libc.stdint cimport int32_t

from pagepool.core.records cimport NOT_FREE, NULL_PAGE, Links, Page, Pool, is_free, link_after, shard_of, unlink


cdef inline void push(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page outside the queue to its back, which is evicted last."""
    cdef Page *pages = pool.pages
    cdef int32_t last = pages[NULL_PAGE].prev_free
    assert 0 < page_id < pool.num_pages and not is_free(pool, page_id)
    pages[page_id].prev_free = last
    pages[page_id].next_free = NULL_PAGE
    pages[last].next_free = page_id
    pages[NULL_PAGE].prev_free = page_id
    pool.num_free += 1
    if pool.num_shards:
        push_to_shard(pool, page_id)


cdef inline void push_to_shard(Pool *pool, int32_t page_id) noexcept nogil:
    cdef int32_t shard = shard_of(pool, page_id)
    link_after(pool.shard_links, pool.shard_links[pool.num_pages + shard].prev, page_id)
    pool.shard_num_free[shard] += 1


cdef inline void pull(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue, wherever it stands in it."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t shard
    assert 0 < page_id < pool.num_pages and is_free(pool, page_id)
    pool.pages[page.prev_free].next_free = page.next_free
    pool.pages[page.next_free].prev_free = page.prev_free
    page.prev_free = NOT_FREE
    page.next_free = NOT_FREE
    pool.num_free -= 1
    if pool.num_shards:
        shard = shard_of(pool, page_id)
        unlink(pool.shard_links, page_id)
        pool.shard_num_free[shard] -= 1


cdef inline void link_shards(Pool *pool) noexcept nogil:
    """Build the queue of each shard from the whole one. O(free pages)."""
    cdef int32_t page_id = pool.pages[NULL_PAGE].next_free
    cdef int32_t end
    for end in range(pool.num_pages, pool.num_pages + pool.num_shards):
        pool.shard_links[end] = Links(end, end)
    while page_id != NULL_PAGE:
        push_to_shard(pool, page_id)
        page_id = pool.pages[page_id].next_free


cdef inline int32_t count_free_in(const Pool *pool, int32_t shard) noexcept nogil:
    return pool.num_free if shard < 0 else pool.shard_num_free[shard]


cdef inline int32_t end_of_queue(const Pool *pool, int32_t shard) noexcept nogil:
    """The record that closes the queue of a shard, or for -1 of the pool."""
    return NULL_PAGE if shard < 0 else pool.num_pages + shard


cdef inline int32_t next_free_in(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """The page behind `page_id` in that queue."""
    return pool.pages[page_id].next_free if shard < 0 else pool.shard_links[page_id].next


cdef inline int32_t find_held_free(const Pool *pool, Py_ssize_t n) noexcept nogil:
    """A page with references among the first `n` of the free queue and of each shard's; or NULL_PAGE."""
    cdef int32_t page_id, shard
    cdef Py_ssize_t _
    for shard in range(-1, pool.num_shards if pool.num_held_free else -1):
        page_id = end_of_queue(pool, shard)
        for _ in range(min(n, count_free_in(pool, shard))):
            page_id = next_free_in(pool, page_id, shard)
            if pool.pages[page_id].ref_cnt:
                return page_id
    return NULL_PAGE


cdef inline Py_ssize_t push_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Put pages to the back of the queue. Returns -1, or, with nothing changed, the index of one that must not be there."""
    cdef Py_ssize_t i, bad = -1
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) or pool.pages[ids[i]].ref_cnt:
            bad = i
            break
        push(pool, ids[i])
    for i in range(bad):
        pull(pool, ids[i])
    return bad


cdef inline Py_ssize_t count_free(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """How many of the pages are in the free queue."""
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        count += ids[i] != NULL_PAGE and is_free(pool, ids[i])
    return count


cdef inline bint has_free_pages(Pool *pool, Py_ssize_t num_pages, Py_ssize_t num_reserved, int32_t shard) noexcept nogil:
    """Whether `num_pages` can be taken from a shard, or for -1 from the pool, with `num_reserved` left in the pool."""
    if num_pages and num_pages + num_reserved > pool.num_free:
        return False
    return num_pages <= count_free_in(pool, shard)
