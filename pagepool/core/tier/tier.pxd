# The tier behind a pool, and failed loads.
#
# Transfers in flight have the number of their list; fills from storage have negative numbers, counted apart.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.core.holding cimport (
    CacheGroups, Contents, Group, Query, RequestPages, find_first_hit_page, find_longest, last_hash, query_of, queue_in,
    ranges_in,
)
from pagepool.core.pool cimport (
    FLAGS, TWIN, Page, PageStore, Ranges, count_free_in, digest_of, find, give_back, has_key, hit, id_in_bank,
)
from pagepool.core.tier.transfers cimport *
from pagepool.core.values cimport HashChain, PageIds, as_list, size_of


@cython.final
cdef class PageTier:
    cdef PageStore pages
    cdef int32_t num_device_pages   # pages of the pool in front of the tier
    cdef Tier tier
    cdef Tier storage               # behind the tier's pool, if it is linked
    cdef bint is_used               # whether it is behind a pool

    cdef int check_behind(self, PageStore store) except -1


@cython.final
cdef class FailedLoads:
    cdef readonly int64_t number
    cdef PageIds ids
    cdef PageIds group_ids    # the groups of these pages
    cdef PageStore store
    cdef uint8_t *is_wrong    # [num_pages]


cdef bint save_page(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil
cdef void keep_longer(Tier *tier, int32_t tier_id) noexcept nogil
cdef Py_ssize_t find_reachable(Pool *pool, Query *query, int32_t shard) noexcept
cdef Py_ssize_t find_and_load(
    Pool *pool, Query *query, tuple hits, const Contents *contents, int32_t shard, Py_ssize_t num_reserved
) noexcept
cdef Py_ssize_t count_in_flight(const Tier *tier, int64_t number, bint is_load) noexcept nogil
cdef void end_save(Pool *pool, const Transfer *transfer, bint is_done) noexcept nogil
cdef void forget_list(Tier *tier, int64_t number) noexcept nogil
cdef void begin_step(Pool *pool, int64_t *last_step) noexcept nogil
