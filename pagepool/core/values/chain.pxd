# Hash chains of requests: the digests of a request's full pages, and the tokens of these pages if they are kept.
#
# Always: there are at most `capacity` digests, and kept tokens for at most `num` pages, then for the last one's lookahead. Each
# call appends whole pages. With digests of 32 bytes, `digests` has the lower halves and `uppers` the upper ones.

cimport cython

from pagepool.core.base cimport Digest, Hashing, WideDigest, require_process
from pagepool.core.values.ids cimport *


cdef int refuse_hashed() except -1
cdef Hashing hashing_of(str algorithm, bytes key, object hash_lookahead) except *


@cython.final
cdef class HashChain:
    cdef Hashing hashing
    cdef Digest *digests
    cdef Digest *uppers       # NULL: digests have 16 bytes
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef Py_ssize_t upper_capacity
    cdef readonly Py_ssize_t page_size
    cdef PageIds token_ids    # None: tokens are not kept
    cdef cython.pymutex lock
    cdef int process          # number of the process that made it

    @cython.final
    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock; raise IntegrityError in a process that did not make the chain."""
        require_process(self.process, "HashChain")
        return &self.lock

    cdef PageIds read_next(self, list token_ids, Py_ssize_t num_pages)
    cdef int cut(self, Py_ssize_t num_pages) except -1
    cdef Py_ssize_t count_tokens(self, Py_ssize_t num_pages) noexcept
    cdef void keep_tokens(self, PageIds tokens) noexcept
    cdef bint extend_locked(self, PageIds tokens, bytes extra_keys) noexcept
