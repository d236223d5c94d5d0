# Transfers between a pool and its tier, taken and ended.

cimport cython
from libc.stdint cimport int64_t, uint8_t

from pagepool.core.ids cimport PageIds
from pagepool.core.store cimport PageStore


@cython.final
cdef class FailedLoads:
    cdef readonly int64_t number
    cdef PageIds ids
    cdef PageStore store
    cdef uint8_t *is_wrong    # [num_pages]
