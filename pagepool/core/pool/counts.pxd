# Counts of a pool, for statistics.

from libc.stdint cimport int64_t

from pagepool.core.pool.store cimport *


cdef struct QueryCounts:      # see `Counters`
    int64_t num_requests
    int64_t num_queried_tokens
    int64_t num_hit_tokens


cdef class QueryCounter:
    cdef PageStore store
    cdef readonly bint is_preempted
    cdef QueryCounts counted

    cdef int count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) except -1
    cdef void count_lost(self, const LostHits *lost) noexcept
