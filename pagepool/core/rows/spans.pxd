# Leases, as other rooms have them.

cimport cython
from libc.stdint cimport int64_t

from pagepool.core.pool cimport LeasedPages
from pagepool.core.rows.running cimport *


cdef dict ids_by_pool(PageStore store, PageIds ids)


@cython.final
@cython.auto_pickle(False)
cdef class Lease:
    cdef PageStore store
    cdef PageIds ids
    cdef LeasedPages span

    cdef bint hold(self, int64_t duration) noexcept
    cdef int refuse_budget(self, int32_t bank, int64_t num_pages) except -1
    cdef int refuse_page(self, Py_ssize_t bad) except -1
