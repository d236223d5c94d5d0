# Hash chains of requests.

cimport cython
from libc.stdint cimport int32_t

from pagepool.core.ids cimport PageIds
from pagepool.core.locks cimport LockNode
from pagepool.core.siphash cimport Digest


cdef Digest extra_key_of(bytes key) except *


@cython.final
cdef class HashChain:
    cdef Digest key
    cdef Digest extra_key
    cdef Digest *digests
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t page_size
    cdef PageIds token_ids    # None: not kept
    cdef cython.pymutex lock
    cdef LockNode lock_node

    cdef bint reserve(self, Py_ssize_t num_pages, Py_ssize_t num_tokens) noexcept
    cdef bint is_lent(self) noexcept
    cdef int refuse_growth(self, Py_ssize_t num_more) except -1
    cdef PageIds read_next(self, list token_ids, Py_ssize_t num_pages)
    cdef bint extend_locked(self, PageIds tokens) noexcept
    cdef void hash_after_last(self, const int32_t *tokens, Py_ssize_t num_pages, bytes extra_keys) noexcept
