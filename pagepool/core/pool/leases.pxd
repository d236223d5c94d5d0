# Leases: references that a caller keeps without a request. The caller holds the store's lock.
#
# Always:
#
# * A held lease has a reference to each of its pages, and `Leases.counts` has the number of leases by page.
# * The list from `Leases.first` has the held leases with an end; `num_pages_in` counts their pages by bank.
# * No lease of that list ends before `next_end`, unless another caller gave back one of its pages.

from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memcpy

from pagepool.core.pool.pool cimport *


cdef inline bint make_leases(Pool *pool) noexcept nogil:
    """Allocate the counts of leases once; False if memory is short."""
    if pool.leases.counts == NULL:
        pool.leases.counts = <int32_t *>raw_calloc(pool.num_pages, sizeof(int32_t))
    return pool.leases.counts != NULL


cdef inline int32_t count_holders(const Pool *pool, int32_t page_id) noexcept nogil:
    """Count the references to a page except those of leases and the pool's own."""
    cdef int32_t num_leases = pool.leases.counts[page_id] if pool.leases.counts != NULL else 0
    assert 0 <= num_leases
    return pool.pages[page_id].ref_cnt - num_leases - has_own_reference(pool, page_id)


cdef inline void count_by_bank(
    const Pool *pool, const int32_t *ids, Py_ssize_t n, int64_t change, int64_t *num_pages_in
) noexcept nogil:
    """Add `change`, for each page, to the count of its bank."""
    cdef Py_ssize_t i
    for i in range(n):
        num_pages_in[bank_of(pool, ids[i])] += change


cdef inline int64_t count_leasable(const Pool *pool, int32_t bank) noexcept nogil:
    """Count the pages of a bank that leases with an end may have."""
    cdef int32_t num_pages = pool.banks[bank].stop - pool.banks[bank].start - pool.banks[bank].num_retired
    return <int64_t>(pool.leases.max_share * num_pages) if pool.leases.is_limited else num_pages


cdef inline int32_t find_over_budget(const Pool *pool, const int32_t *ids, Py_ssize_t n, int64_t *num_pages_in) noexcept nogil:
    """Find a bank with more pages of leases with an end than allowed, if the pages are leased too. Return it, or -1. Set
    `num_pages_in` to the numbers of pages by bank.
    """
    cdef int32_t bank
    memcpy(num_pages_in, pool.leases.num_pages_in, sizeof(pool.leases.num_pages_in))
    count_by_bank(pool, ids, n, 1, num_pages_in)
    for bank in range(pool.num_banks):
        if num_pages_in[bank] > count_leasable(pool, bank):
            return bank
    return -1


cdef inline void begin_lease(
    Pool *pool, LeasedPages *lease, const int32_t *ids, Py_ssize_t n, int64_t duration
) noexcept nogil:
    """Begin a lease of pages that the caller gave references. With a duration it ends by itself."""
    assert not lease.is_held and n >= 0 and duration >= 0
    lease[0] = LeasedPages(
        ids=ids, num=n, begun=now_of(&pool.expected), end=0, next=NULL, has_begun=True, is_held=True,
    )
    if duration:
        lease.next = pool.leases.first
        pool.leases.first = lease
        count_by_bank(pool, ids, n, 1, &pool.leases.num_pages_in[0])
        set_end(pool, lease, duration)


cdef inline void set_end(Pool *pool, LeasedPages *lease, int64_t duration) noexcept nogil:
    lease.end = now_of(&pool.expected) + duration
    pool.leases.next_end = min(pool.leases.next_end, lease.end)
    assert lease.is_held and duration > 0 and pool.leases.next_end <= lease.end


cdef inline void end_leases(Pool *pool) noexcept nogil:
    """Give back the pages of leases that are over. Each call that takes pages calls this first."""
    if rare(pool.leases.first != NULL) and now_of(&pool.expected) >= pool.leases.next_end:
        _end_due_leases(pool)


cdef inline void _end_due_leases(Pool *pool) noexcept nogil:
    """Give back the pages of leases that are over. If another caller gave back one of a lease's pages, that lease stays, and
    its `release` raises the error. O(leases with an end, and pages of those that end).
    """
    cdef LeasedPages *lease = pool.leases.first
    cdef LeasedPages *following
    cdef int64_t now = now_of(&pool.expected)
    pool.leases.next_end = INT64_MAX
    while lease != NULL:
        following = lease.next
        if lease.end > now:
            pool.leases.next_end = min(pool.leases.next_end, lease.end)
        elif end_lease(pool, lease) < 0:
            pool.leases.num_ended += 1
        lease = following


cdef inline Py_ssize_t end_lease(Pool *pool, LeasedPages *lease) noexcept nogil:
    """Give back the pages of a held lease, the last page first. Return -1 or, with nothing changed, the index of a page that
    another caller gave back. O(pages), and for a lease with an end O(these leases).
    """
    cdef LeasedPages **link = &pool.leases.first
    cdef Py_ssize_t i, bad = give_back_all(pool, lease.ids, lease.num, True)
    if bad >= 0:
        return bad
    assert lease.is_held
    for i in range(lease.num):
        pool.leases.counts[lease.ids[i]] -= 1
        assert pool.leases.counts[lease.ids[i]] >= 0
    if lease.end:
        while link[0] != lease:
            link = &link[0].next
        link[0] = lease.next
        count_by_bank(pool, lease.ids, lease.num, -1, &pool.leases.num_pages_in[0])
    lease.end = lease.is_held = 0
    return -1
