# Prefix hits. Group page j is known by the digest of the last hash page in it: chain index (j + 1) * stride - 1.

from libc.stdint cimport int32_t

from pagepool.core.index cimport find_within, home_of
from pagepool.core.platform cimport fetch
from pagepool.core.records cimport NULL_PAGE, Pool, Range
from pagepool.core.siphash cimport Digest

cdef enum:
    LOOK_AHEAD = 8            # hashes by which a look-up has memory fetched before it reads it


cdef inline bint hits_all(
    Pool *pool, const Digest *chain, Py_ssize_t at, const int32_t *groups, Py_ssize_t num_groups, Range ids
) noexcept nogil:
    cdef Py_ssize_t g
    for g in range(num_groups):
        if find_within(pool, chain[at], groups[g], ids) == NULL_PAGE:
            return False
    return True


cdef inline void fetch_hit(Pool *pool, const Digest *chain, Py_ssize_t at, Py_ssize_t stop, int32_t group) noexcept nogil:
    """Have the memory fetched that look-ups soon after `at` will read: slots first, then the records that those name."""
    if at + 2 * LOOK_AHEAD < stop:
        fetch(home_of(pool, chain[at + 2 * LOOK_AHEAD], group))
        fetch(&pool.pages[home_of(pool, chain[at + LOOK_AHEAD], group).page_id])


cdef inline Py_ssize_t find_leading_hits(
    Pool *pool, const Digest *chain, Py_ssize_t stride, Py_ssize_t start, Py_ssize_t stop,
    const int32_t *groups, Py_ssize_t num_groups, Range ids,
) noexcept nogil:
    """End of the pages from `start` on, at most up to `stop`, that hit in all groups."""
    cdef Py_ssize_t j = start
    while j < stop:
        fetch_hit(pool, chain, (j + 1) * stride - 1, stop * stride, groups[0])
        if not hits_all(pool, chain, (j + 1) * stride - 1, groups, num_groups, ids):
            return j
        j += 1
    return j


cdef inline Py_ssize_t find_last_run(
    Pool *pool, const Digest *chain, Py_ssize_t stride, Py_ssize_t stop, Py_ssize_t need,
    const int32_t *groups, Py_ssize_t num_groups, Range ids,
) noexcept nogil:
    """End of the last `need` consecutive pages before `stop` that hit in all groups; else of the leading ones that do."""
    cdef Py_ssize_t j, run = 0
    for j in range(stop - 1, -1, -1):
        if hits_all(pool, chain, (j + 1) * stride - 1, groups, num_groups, ids):
            run += 1
            if run >= need:
                return j + run
        else:
            run = 0
    return run
