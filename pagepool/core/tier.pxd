# The tier behind a pool.

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.records cimport Tier
from pagepool.core.store cimport PageStore


@cython.final
cdef class PageTier:
    cdef PageStore pages
    cdef int32_t num_device_pages   # of the pool that it is for
    cdef Tier tier
    cdef bint is_used               # by a pool
