# The tier behind a pool.

cimport cython

from pagepool.core.records cimport Tier
from pagepool.core.store cimport PageStore


@cython.final
cdef class PageTier:
    cdef PageStore pages
    cdef Tier tier
