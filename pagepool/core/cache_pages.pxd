# The pages that look-ups and allocations return.

from pagepool.core.store cimport PageStore


cdef class CachePages:
    cdef tuple groups         # of each group `PageIds`, or, without a store, a list of `CachePage`
    cdef PageStore store


cdef CachePages pages_of(tuple groups, PageStore store)
