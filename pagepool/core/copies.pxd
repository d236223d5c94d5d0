# Copies of pages that are due before the next step: noted here, done by whoever takes the list.

from libc.stdint cimport int32_t

from pagepool.core.holdings cimport Held, Holding, has_transfers_due
from pagepool.core.platform cimport rare
from pagepool.core.records cimport Copies, PageCopy, Pool, resize
from pagepool.core.references cimport put_back_held


cdef inline bint reserve_copies(Pool *pool, Py_ssize_t n) noexcept:
    """Allocate room for `n` copies more; False where memory is short."""
    cdef Py_ssize_t capacity = max(<Py_ssize_t>8, pool.copies.capacity)
    while capacity < pool.copies.num + n:
        capacity *= 2
    if n and capacity > pool.copies.capacity:
        if not resize(<void **>&pool.copies.items, capacity * sizeof(PageCopy)):
            return False
        pool.copies.capacity = capacity
    return True


cdef inline void note_copy(Pool *pool, int32_t src, Held *target, int32_t place, int32_t group) noexcept nogil:
    """Note a copy into the page at `place` of what a request or row holds in a group. It takes over a reference to `src`. There
    is room for it.
    """
    cdef Copies *copies = &pool.copies
    copies.list_number += copies.num == 0
    copies.items[copies.num] = PageCopy(src, target.ids[place], group)
    copies.num += 1
    target.written_list = copies.list_number


cdef inline bint are_destinations(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the destination of a copy that is due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if pool.copies.num else 0):
        if holding.held[g].written_list == pool.copies.list_number:
            return True
    return False


cdef inline bint awaits_copies(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the destination of a copy that is due, or a transfer of them is."""
    return are_destinations(pool, holding) or has_transfers_due(pool, holding)


cdef inline bint is_held_last(const Held *held, int32_t page_id) noexcept nogil:
    """Whether a page is held; one of the last is found first."""
    cdef int32_t i
    for i in range(held.num_pages - 1, -1, -1):
        if held.ids[i] == page_id:
            return True
    return False


cdef inline bint are_sources(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the source of a copy that is due."""
    cdef const Held *held
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.copies.num else 0):
        held = &holding.held[g]
        for i in range(pool.copies.num if held.read_list == pool.copies.list_number else 0):
            if pool.copies.items[i].group == g and is_held_last(held, pool.copies.items[i].src):
                return True
    return False


cdef inline bint has_copies_due(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a copy from or to pages that are held is due, or a transfer, so that no token may be written to them."""
    return rare(pool.copies.num or pool.tier != NULL) and (are_sources(pool, holding) or awaits_copies(pool, holding))


cdef inline void drop_copies(Pool *pool, const Holding *holding) noexcept nogil:
    """Drop the copies into pages that were just given back."""
    cdef Copies *copies = &pool.copies
    cdef Py_ssize_t i, num_kept = 0
    if not are_destinations(pool, holding):
        return
    for i in range(copies.num):
        if is_held_last(&holding.held[copies.items[i].group], copies.items[i].dst):
            put_back_held(pool, copies.items[i].src)
        else:
            copies.items[num_kept] = copies.items[i]
            num_kept += 1
    copies.num = num_kept


cdef inline void end_copies(Pool *pool) noexcept nogil:
    """Give back the references to the sources of copies that were taken, and begin the next list."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        put_back_held(pool, pool.copies.items[i].src)
    pool.copies.num = 0


cdef inline int32_t count_moves(const Pool *pool, int32_t page_id) noexcept nogil:
    """The references to a page of copies that are due, and of loads that did not end."""
    cdef Py_ssize_t i
    cdef int32_t count = 0
    for i in range(pool.copies.num):
        count += pool.copies.items[i].src == page_id
    for i in range(pool.tier.num if pool.tier != NULL and pool.tier.loading[page_id] else 0):
        count += pool.tier.items[i].is_load and pool.tier.items[i].page_id == page_id
    return count
