# The records of a pool, and its prefix index.

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t

from pagepool.core.chain cimport HashChain
from pagepool.core.ids cimport PageIds
from pagepool.core.locks cimport LockNode
from pagepool.core.records cimport Links, Page, Pool, Range


cdef tuple counters_of(Pool pool)
cdef Links *new_shard_links(const Pool *pool, Py_ssize_t num_shards) noexcept
cdef void use_shard_links(Pool *pool, Links *links, int32_t num_shards) noexcept


cdef class PageRecords:
    cdef Pool pool
    cdef readonly bint is_pool          # record 0 is a page of its own; other stores can grow, and have no prefix index
    cdef readonly bint enable_caching
    cdef readonly object eviction       # name of the policy, a str
    cdef readonly object ghost_size     # pools, a float; None: the policy's own
    cdef readonly object names          # HashNames
    cdef PyObject *tier                 # the `PageTier` behind it, or NULL; a reference that no garbage collection clears
    cdef PageIds protected_ids          # pages that were given the PROTECTED flag last; None: none were
    cdef Py_ssize_t capacity            # records there is room for
    cdef cython.pymutex lock
    cdef LockNode lock_node

    cdef bint add_records(self, Py_ssize_t num_pages) noexcept
    cdef int divide(self) except -1
    cdef bint make_index(self) noexcept
    cdef int sample_residency(self) except -1
    cdef bint make_pins(self) noexcept
    cdef int32_t read(self, const int32_t *value) noexcept
    cdef Page record(self, int32_t page_id) noexcept
    cdef void overwrite_count(self, int32_t page_id, int32_t count) noexcept
    cdef bint add_reference(self, int32_t page_id, int32_t change) noexcept
    cdef int32_t checked_id(self, object page_id) except -1
    cdef PageIds checked(self, object page_ids)
    cdef int check_range(self, int32_t page_id) except -1
    cdef Range range_of(self, first_id, stop_id) except *
    cdef int check_fixed(self) except -1
    cdef int lock_divided(self, int32_t num_shards) except -1


@cython.auto_pickle(False)
cdef class CachedPages(PageRecords):
    cdef tuple token_ids_of(self, int32_t page_id)
    cdef void copy_tokens(self, int32_t page_id, HashChain chain, Py_ssize_t start) noexcept
    cdef int32_t checked_context(self, object context) except -1
