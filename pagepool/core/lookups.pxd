# Look-ups of prefixes.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Pool, Range
from pagepool.core.rules cimport Group
from pagepool.core.store cimport PageStore


@cython.final
cdef class FoundIds(PageIds):
    cdef PageStore store
    cdef HashChain chain
    cdef Py_ssize_t stride
    cdef int32_t group
    cdef int64_t num_dropped

    cdef bint is_known(self, HashChain chain, const Group *group, const Pool *pool) noexcept


@cython.final
cdef class PrefixQuery:
    cdef PageStore store
    cdef HashChain chain
    cdef Range ids
    cdef bint reaches_tier
