# One pool: its records, its free queue and its prefix index.

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t

from pagepool.core.pool.pages cimport *
from pagepool.core.values cimport HashChain


@cython.auto_pickle(False)
cdef class PageStore(PageRecords):
    cdef readonly tuple bank_names
    cdef readonly bint enable_caching
    cdef readonly object eviction       # name of the policy, a str
    cdef bint has_blank_first           # `put_blank_first` was called
    cdef readonly object names          # HashNames
    cdef PyObject *tier                 # owned `PageTier` behind it, or NULL; invisible to the garbage collector
    cdef int64_t last_step              # last step with moves taken by a manager, see `begin_step`
    cdef dict leases                    # keys: held leases and some ended ones, the oldest first

    cdef bint make_terms(self, PageIds terms) noexcept
    cdef bint pad_terms(self, PageIds terms, int32_t term, Py_ssize_t n) noexcept
    cpdef tuple lists_in_banks(self, tuple groups)
    cdef Range range_of(self, first_id, stop_id) except *
    cdef int32_t checked_context(self, object context) except -1
    cdef int32_t checked_session(self, object session) except -1
    cdef int refuse_touch(self, int32_t page_id) except -1
    cdef int check_untaken(self, int32_t bad) except -1
    cdef str shown_queue(self, int32_t queue)
    cdef str shown_page(self, int32_t page_id)
    cdef int refuse_size(self, str what, int64_t num_pages, int32_t queue) except -1
    cdef Py_ssize_t give_back_row(self, PageIds ids, Py_ssize_t num_staying, const int32_t *terms=*) noexcept
    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1
    cdef int lock_divided(self, int32_t num_shards, cython.pymutex *outer) except -1
