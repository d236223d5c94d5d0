# One pool: its records, its free queue and its prefix index.

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport require_process
from pagepool.core.pool.banks cimport *
from pagepool.core.values cimport HashChain, PageIds


cdef Links *new_shard_links(const Pool *pool, Py_ssize_t num_shards) noexcept
cdef void use_shard_links(Pool *pool, Links *links, int32_t num_shards) noexcept
cdef object overdrawn_page(str page)


cdef class CachePage


@cython.auto_pickle(False)
cdef class PageStore:
    cdef Pool pool
    cdef readonly tuple bank_names
    cdef readonly bint is_pool          # False for a queue, which can grow and has no prefix index
    cdef readonly bint enable_caching
    cdef readonly object eviction       # name of the policy, a str
    cdef bint has_blank_first           # `put_blank_first` was called
    cdef readonly object names          # HashNames
    cdef PyObject *tier                 # owned `PageTier` behind it, or NULL; invisible to the garbage collector
    cdef Py_ssize_t capacity            # allocated records
    cdef int64_t last_step              # last step with moves taken by a manager, see `begin_step`
    cdef dict leases                    # keys: held leases and some ended ones, the oldest first
    cdef dict views                     # page id -> CachePage, made on demand
    cdef cython.pymutex lock
    cdef int process          # number of the process that made it

    @cython.final
    cdef inline int require_own(self) except -1:
        """Raise IntegrityError in another process than that of the pool."""
        return require_process(self.process, "PagePool")

    @cython.final
    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock. IntegrityError in another process than that of the pool."""
        require_process(self.process, "PagePool")
        return &self.lock

    cdef bint make_terms(self, PageIds terms) noexcept
    cdef bint divide(self, bint by_terms, bint by_tenants) noexcept
    cdef bint make_leases(self) noexcept
    cdef bint pad_terms(self, PageIds terms, int32_t term, Py_ssize_t n) noexcept
    cdef int32_t read(self, const int32_t *value) except? -1
    cdef Page record(self, int32_t page_id) except *
    cdef int32_t checked_id(self, object page_id) except -1
    cdef PageIds checked(self, object page_ids)
    cdef int32_t checked_bank(self, object bank) except -1
    cpdef tuple lists_in_banks(self, tuple groups)
    cdef int check_range(self, int32_t page_id) except -1
    cdef Range range_of(self, first_id, stop_id) except *
    cdef int check_fixed(self) except -1
    cdef int32_t checked_context(self, object context) except -1
    cdef int32_t checked_session(self, object session) except -1
    cdef int32_t add_session(self, bint has_pages) except -1
    cdef int32_t count_holders(self, int32_t page_id) noexcept
    cdef int refuse_touch(self, int32_t page_id) except -1
    cdef int check_untaken(self, int32_t bad) except -1
    cdef str shown_queue(self, int32_t queue)
    cdef str shown_page(self, int32_t page_id)
    cdef int check_caching(self) except -1
    cdef int refuse_size(self, str what, int64_t num_pages, int32_t queue) except -1
    cdef Py_ssize_t give_back_ids(self, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept
    cdef Py_ssize_t give_back_row(self, PageIds ids, Py_ssize_t num_staying, const int32_t *terms=*) noexcept
    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1
    cdef int lock_divided(self, int32_t num_shards) except -1
    cdef CachePage view(self, int32_t page_id)


cdef struct QueryCounts:      # see `Counters`
    int64_t num_requests
    int64_t num_queried_tokens
    int64_t num_hit_tokens


cdef class QueryCounter:
    cdef PageStore store
    cdef readonly bint is_preempted
    cdef QueryCounts counted

    cdef int count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) except -1
    cdef void count_lost(self, const LostHits *lost) noexcept


@cython.final
cdef class CachePage:
    cdef PageStore store
    cdef int32_t index                  # record in the store
    cdef bint is_made_null              # a null page without a pool
    cdef object own_hash                # PageHashWithGroupId of a page without a pool, or None
    cdef readonly object page_id        # index in a pool; any int without a pool

    cdef tuple fields(self)
