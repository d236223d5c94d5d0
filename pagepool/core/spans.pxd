# Spans of tokens.

from libc.stdint cimport int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Range
from pagepool.core.request_pages cimport CacheGroups
from pagepool.core.running cimport RunningRows
from pagepool.core.rules cimport Group
from pagepool.core.store cimport PageStore


cdef class TokenSpan:
    cdef PageStore store
    cdef readonly int64_t start
    cdef readonly int64_t stop

    cdef Range pages_of(self, const Group *group, Py_ssize_t num_pages, Py_ssize_t num_digests) noexcept
    cdef tuple checked_pages(self, CacheGroups groups, HashChain chain, object ids, PageIds found)
    cdef Py_ssize_t list_pages(self, CacheGroups groups, HashChain chain, tuple checked, PageIds found) noexcept
    cdef bint list_row(self, RunningRows rows, Py_ssize_t row, PageIds found) noexcept
    cdef Py_ssize_t checked_row(self, RunningRows rows, object row) except -1
    cdef int check_admitted(self, Py_ssize_t row, bint is_admitted) except -1
