# Rows whose pages are in the tier.

from libc.stdint cimport int32_t

from pagepool.core.batch cimport Batch, Swapped
from pagepool.core.platform cimport raw_free
from pagepool.core.records cimport NULL_PAGE, Pool
from pagepool.core.references cimport put_back


cdef inline void put_back_all(Pool *pool, const int32_t *ids, int32_t n) noexcept nogil:
    """One reference less for each page, null pages passed over, the last first."""
    cdef int32_t i
    for i in range(n - 1, -1, -1):
        if ids[i] != NULL_PAGE:
            put_back(pool, ids[i])


cdef inline void drop_swapped(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Let go of the pages that a row has in the tier: it is computed again, or ends."""
    cdef Swapped *swapped = batch.swapped[row]
    cdef Py_ssize_t g
    if swapped == NULL:
        return
    for g in range(batch.num_groups):
        put_back_all(batch.pool.tier.pool, swapped.groups[g].tier_ids, swapped.groups[g].num_pages)
    batch.pool.tier.num_swapped -= 1
    batch.swapped[row] = NULL
    raw_free(swapped)
