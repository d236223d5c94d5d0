# Copies of pages are due before the next step. They are queued here, and the engine that takes the list does them. Each copy
# has a reference to its source. Until a copy is taken, no token is written to its source or destination.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t

from pagepool.core.base cimport reserve_items
from pagepool.core.holding.holding cimport *
from pagepool.core.pool cimport Copies, PageCopy, give_back


cdef inline bint _is_held_last(const Held *held, int32_t page_id) noexcept nogil:
    """Whether a page is held. The last pages are compared first."""
    cdef int32_t i
    for i in range(held.num_pages - 1, -1, -1):
        if held.ids[i] == page_id:
            return True
    return False


cdef inline bint is_destination(const Pool *pool, const Held *held) noexcept nogil:
    """Whether a page of a group is the destination of a copy that is due."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num if held.due_list == pool.list_number else 0):
        if _is_held_last(held, pool.copies.items[i].dst):
            return True
    return False


cdef inline bint reserve_copies(Pool *pool, Py_ssize_t n) noexcept:
    """Make room for `n` more copies; False if memory is short."""
    return reserve_items(<void **>&pool.copies.items, &pool.copies.capacity, pool.copies.num + n, sizeof(PageCopy))


cdef inline void queue_copy(Pool *pool, int32_t src, Held *target, int32_t place, int32_t group) noexcept nogil:
    """Queue a copy of page `src` into the page at `place`; the list has room. The copy takes over a reference to `src`."""
    cdef Copies *copies = &pool.copies
    assert copies.num < copies.capacity and pool.pages[src].ref_cnt > 0 and src != target.ids[place]
    copies.items[copies.num] = PageCopy(src=src, dst=target.ids[place], group=group)
    copies.num += 1
    target.due_list = pool.list_number


cdef inline bint _are_sources(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a held page is the source of a copy that is due."""
    cdef const Held *held
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.copies.num else 0):
        held = &holding.held[g]
        for i in range(pool.copies.num if held.read_list == pool.list_number else 0):
            if pool.copies.items[i].group == g and _is_held_last(held, pool.copies.items[i].src):
                return True
    return False


cdef inline bint has_copies(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a copy from or into a held page is due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if is_destination(pool, &holding.held[g]):
            return True
    return _are_sources(pool, holding)


cdef inline bint awaits_moves(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a move into a held page is due, or a save of its last content."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if holding.held[g].due_list == pool.list_number:
            return True
    return False


cdef inline bint has_moves_due(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a move of a held page is due, so that no token may be written to it."""
    return rare(pool.copies.num or pool.tier != NULL) and (awaits_moves(pool, holding) or _are_sources(pool, holding))


cdef inline void drop_copies(Pool *pool, const Holding *holding) noexcept nogil:
    """Drop the copies into pages that were just given back."""
    cdef Copies *copies = &pool.copies
    cdef Py_ssize_t i, num_kept = 0
    cdef int32_t group
    for i in range(copies.num):
        group = copies.items[i].group
        if group < holding.num_groups and _is_held_last(&holding.held[group], copies.items[i].dst):  # media have other groups
            give_back(pool, copies.items[i].src)
        else:
            assert num_kept <= i
            copies.items[num_kept] = copies.items[i]
            num_kept += 1
    copies.num = num_kept


cdef inline int32_t count_moves(const Pool *pool, int32_t page_id) noexcept nogil:
    """Count the references that due copies and unfinished loads have to a page."""
    cdef Py_ssize_t i
    cdef int32_t count = 0
    for i in range(pool.copies.num):
        count += pool.copies.items[i].src == page_id
    for i in range(pool.tier.num if pool.tier != NULL and pool.tier.loading[page_id] else 0):
        count += pool.tier.items[i].is_load and pool.tier.items[i].page_id == page_id
    return count


# Hits may be loaded from the tier. Pages computed with them are not cached or skipped before the loads have ended.


cdef inline int64_t find_load_number(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Return the last list of moves that loads one of the pages; 0: none does."""
    cdef Py_ssize_t i
    cdef int64_t number = 0
    for i in range(n if pool.tier != NULL and pool.tier.oldest_load < INT64_MAX else 0):
        number = max(number, pool.tier.loading[ids[i]])
    return number


cdef inline void record_loads(const Pool *pool, const Holding *holding, int64_t number) noexcept nogil:
    """Record the last list of moves that loads hits; 0: none does."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if number else 0):
        holding.held[g].load_number = number
        assert 0 < number <= pool.list_number
        if number == pool.list_number:
            holding.held[g].due_list = number


cdef inline bint waits_for_loads(const Pool *pool, const Held *held) noexcept nogil:
    """Whether hits, and pages computed with them, may still turn out to be wrong. Nothing more is cached then."""
    return rare(pool.tier != NULL) and held.load_number >= pool.tier.oldest_load


cdef inline int32_t find_wrong(const Holding *holding, const uint8_t *is_wrong, int64_t number) noexcept nogil:
    """Return the first token in a page that the loads of a list filled wrongly; -1: there is none. A state may have been copied
    from such a page or computed with it, so it is wrong from the first token on.
    """
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t i, first = INT32_MAX
    for g in range(holding.num_groups):
        held = &holding.held[g]
        if held.load_number < number:
            return -1
        if is_state(&holding.groups[g].rules):
            return 0
        for i in range(held.num_pages):
            if is_wrong[held.ids[i]]:
                first = min(first, i * holding.groups[g].rules.page_size)
                break
    return first if first < INT32_MAX else -1
