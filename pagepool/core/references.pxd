# References given back page by page, and pins: one reference of the pool's own to a page, however often it is pinned.

from libc.stdint cimport int32_t

from pagepool.core.queue cimport push
from pagepool.core.records cimport NULL_PAGE, TWIN, Page, Pool, is_free, is_pinned, learns


cdef inline void put_back(Pool *pool, int32_t page_id) noexcept nogil:
    """One reference less for a page that has one; without any it goes to the back of the queue."""
    cdef Page *page = &pool.pages[page_id]
    page.ref_cnt -= 1
    if page.ref_cnt == 0:
        let_go(pool, page_id)
        pool.num_freed += 1


cdef inline void put_back_all(Pool *pool, const int32_t *ids, int32_t n) noexcept nogil:
    """One reference less for each page, null pages passed over, the last first."""
    cdef int32_t i
    for i in range(n - 1, -1, -1):
        if ids[i] != NULL_PAGE:
            put_back(pool, ids[i])


cdef inline void let_go(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without references, that is not in the queue, to its back."""
    if pool.num_parts and learns(pool):
        pool.policy.note_release(pool, 1)
    push(pool, page_id)


cdef inline void put_back_held(Pool *pool, int32_t page_id) noexcept nogil:
    """`put_back`, except for the null page and for a page without references other than that of its pins."""
    if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt > is_pinned(pool, page_id) and not is_free(pool, page_id):
        put_back(pool, page_id)


cdef inline void lose_pins(Pool *pool, int32_t page_id) noexcept nogil:
    """Unpin a pinned page, however often it is pinned."""
    pool.pins[page_id] = 0
    pool.num_pinned -= 1
    put_back_held(pool, page_id)


cdef inline void take_pin_back(Pool *pool, int32_t page_id) noexcept nogil:
    """One pin less for a pinned page; without any it is not pinned any more."""
    if pool.pins[page_id] == 1:
        lose_pins(pool, page_id)
    else:
        pool.pins[page_id] -= 1


cdef inline int32_t find_pinned(const Pool *pool, int32_t first) noexcept nogil:
    """The pinned page cached first with the content of `first`, or NULL_PAGE. O(pages of equal content)."""
    cdef int32_t page_id = first
    while page_id != NULL_PAGE and not is_pinned(pool, page_id):
        page_id = pool.twins[page_id].next if pool.pages[page_id].group & TWIN else first
        if page_id == first:
            return NULL_PAGE
    return page_id
