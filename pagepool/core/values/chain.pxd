# Hash chains of requests: the digests of a request's full pages, and the tokens of these pages if they are kept.
#
# Always: at most `capacity` digests, and kept tokens for at most `num` pages. Each call appends whole pages.

cimport cython

from pagepool.core.base cimport Digest, LockNode
from pagepool.core.values.ids cimport *


cdef Digest extra_key_of(bytes key) except *


@cython.final
cdef class HashChain:
    cdef Digest key
    cdef Digest extra_key
    cdef Digest *digests
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t page_size
    cdef PageIds token_ids    # None: tokens are not kept
    cdef cython.pymutex lock
    cdef LockNode lock_node

    cdef PageIds read_next(self, list token_ids, Py_ssize_t num_pages)
    cdef void cut(self, Py_ssize_t num_pages) noexcept
    cdef bint extend_locked(self, PageIds tokens, bytes extra_keys) noexcept
