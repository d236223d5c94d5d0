# One pool: its free queue.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.ids cimport PageIds
from pagepool.core.page_records cimport CachedPages


cdef class CachePage


@cython.auto_pickle(False)
cdef class PageStore(CachedPages):
    cdef dict views                     # page id -> CachePage, for those that were asked for

    cdef CachePage view(self, int32_t page_id)
    cdef int check_untaken(self, int32_t bad) except -1
    cdef Py_ssize_t give_back_ids(self, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept
    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1
    cdef int refuse_touch(self, int32_t page_id) except -1
    cdef void pull_any(self, int32_t page_id) noexcept
    cdef int push_checked(self, const int32_t *ids, Py_ssize_t n) except -1


cdef class QueryCounter:
    cdef PageStore store
    cdef readonly bint is_preempted
    cdef int64_t num_requests
    cdef int64_t num_tokens
    cdef int64_t num_hit_tokens

    cdef void count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) noexcept


@cython.final
cdef class CachePage:
    cdef PageStore store
    cdef int32_t index                  # record in the store
    cdef bint is_made_null              # a null page that stands alone
    cdef object own_hash                # of a page without a pool: its PageHashWithGroupId, or None
    cdef readonly object page_id        # the index in a pool, any int for a page made alone

    cdef tuple fields(self)
