# The tier behind a pool.

cimport cython
from libc.stdint cimport int64_t, uint8_t

from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Tier
from pagepool.core.store cimport PageStore


@cython.final
cdef class PageTier:
    cdef PageStore pages
    cdef Tier tier


@cython.final
cdef class FailedLoads:
    cdef readonly int64_t number
    cdef PageIds ids
    cdef PageStore store
    cdef uint8_t *is_wrong    # [num_pages]
