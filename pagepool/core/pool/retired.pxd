# Retired pages: those at or above the size to which their bank was shrunk. The caller holds the store's lock.
#
# Always:
#
# * The last `Bank.num_retired` pages of a bank are retired, and none of them is in the free queue.
# * A page that was held when it was retired has one more reference, the pool's own. So it does not enter the queue as its
#   holders give it back; `put_away` takes the reference once it is the last.
# * A page that is put away has no reference, so nothing can hit, give back or queue it, and it is charged to no tenant.

from libc.stdint cimport int32_t

from pagepool.core.pool.leases cimport *


cdef inline int32_t count_held(const Pool *pool) noexcept nogil:
    """Count the pages that others than the pool hold, besides those set aside. O(retired pages)."""
    cdef int32_t bank, page_id, count = pool.num_pages - 1 - pool.num_free - count_set_aside(pool)
    for bank in range(pool.num_banks):
        for page_id in range(pool.banks[bank].stop - pool.banks[bank].num_retired, pool.banks[bank].stop):
            count -= pool.pages[page_id].ref_cnt <= 1
    return count


cdef inline void retire(Pool *pool, int32_t bank, int32_t num_retired) noexcept nogil:
    """Let a bank have more retired pages. Those that are held get the pool's reference; free ones are left to `put_away`."""
    cdef Bank *pages = &pool.banks[bank]
    cdef int32_t page_id
    for page_id in range(pages.stop - num_retired, pages.stop - pages.num_retired):
        if not is_free(pool, page_id):
            share(pool, page_id)
    pages.num_retired = max(pages.num_retired, num_retired)


cdef inline bint put_away(Pool *pool, int32_t page_id) noexcept nogil:
    """Evict a retired page, which is saved if it is to be saved, and take it out of use unless others hold it. Return whether
    nobody does.
    """
    if pool.pages[page_id].group != NO_GROUP:
        evict(pool, page_id, False)
    if pool.pages[page_id].ref_cnt > 1:
        return False
    if is_free(pool, page_id):
        reuse(pool, page_id)
    pool.counters.num_freed_pages += pool.pages[page_id].ref_cnt
    pool.pages[page_id].ref_cnt = 0
    if pool.tenants.of_pages != NULL and pool.tenants.of_pages[page_id] != NO_TENANT:
        end_charge(&pool.tenants, bank_of(pool, page_id), page_id)
    return True


cdef inline void restore(Pool *pool, int32_t bank, int32_t num_retired) noexcept nogil:
    """Let a bank have fewer retired pages: the pool gives back its references, and pages that were put away are queued."""
    cdef Bank *pages = &pool.banks[bank]
    cdef int32_t page_id, first = pages.stop - pages.num_retired
    pages.num_retired = min(pages.num_retired, num_retired)
    for page_id in range(first, pages.stop - pages.num_retired):
        if pool.pages[page_id].ref_cnt:
            give_back(pool, page_id)
            continue
        if pool.tenants.of_pages != NULL:
            begin_charge(&pool.tenants, bank, page_id)
        push(pool, page_id)
