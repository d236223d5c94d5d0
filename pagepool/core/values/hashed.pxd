# Tokens of a request that does not run yet, with the digests of their pages.

from pagepool.core.values.chain cimport *


cdef list checked_extra_keys(object extra_keys)


cdef class HashedTokens:
    cdef readonly PageIds token_ids
    cdef HashChain chain                  # never changed, so that it is read without its lock
    cdef list extra_keys                  # pairs of page and bytes, as for rows
    cdef Py_ssize_t num_expected          # hit tokens without which the request is not admitted
    cdef Py_ssize_t num_found             # tokens that hit when it was last looked up to be admitted

    cdef bint falls_short(self) noexcept
    cdef int hash_pages(self) except -1
    cdef bint fits(self, const Hashing *hashing, Py_ssize_t page_size, list extra_keys) except -1
