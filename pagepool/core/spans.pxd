# Spans of tokens.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.groups cimport CacheGroups
from pagepool.core.holdings cimport Holding
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Range
from pagepool.core.request_pages cimport RequestPages
from pagepool.core.rules cimport Group
from pagepool.core.running cimport RunningRows
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore


cdef class TokenSpan:
    cdef PageStore store
    cdef readonly int64_t start
    cdef readonly int64_t stop

    cdef Range pages_of(self, const Group *group, Py_ssize_t num_pages, Py_ssize_t num_digests) noexcept
    cdef bint list_group(
        self, const Group *group, const int32_t *ids, Py_ssize_t n, const Digest *digests, Py_ssize_t num_digests, PageIds found
    ) noexcept
    cdef bint list_holding(
        self, const Holding *holding, const Digest *digests, Py_ssize_t num_digests, PageIds found
    ) noexcept
    cdef bint list_request(
        self, CacheGroups groups, HashChain chain, RequestPages held, Py_ssize_t num_tokens, PageIds found, tuple hits
    ) noexcept
    cdef bint list_row(self, RunningRows rows, Py_ssize_t row, PageIds found) noexcept
    cdef int check_pool(self, PageStore store) except -1
    cdef Py_ssize_t checked_row(self, RunningRows rows, object row) except -1
    cdef int check_admitted(self, Py_ssize_t row, bint is_admitted) except -1
