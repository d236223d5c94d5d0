# The rows of a batch, their memory and locks.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport go_on, let_others_run, require_process
from pagepool.core.holding cimport Boundaries, CacheGroups
from pagepool.core.pool cimport PageStore
from pagepool.core.rows.amounts cimport *


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Stays:
    cdef int64_t *by_row            # [num_rows] stays just before the next exchange of rows; NULL: it is still to come


@cython.final
@cython.auto_pickle(False)
cdef class RowStore:
    cdef Batch batch
    cdef PageStore store
    cdef CacheGroups groups
    cdef tuple tables               # a TableRows for each group
    cdef tuple lock_order           # the tables in locking order
    cdef tuple cross_tables         # a TableRows for each group of cross-attention, whose rows the façade fills
    cdef object media               # a RowMedia that follows the rows; None without cross-attention
    cdef int32_t[::1] encoder_lens  # [num_rows] tokens of the encoders' outputs in these tables; None without any
    cdef tuple buffers              # arrays that `batch` points into
    cdef object records             # the same memory for Python: `RowRecord`s
    cdef object stays               # int64 [num_rows]
    cdef object counts              # int32 [3, num_rows]: hit and awaited tokens, positions ahead
    cdef list extra_key_bytes       # for each row, the bytes that its `extra_keys` point into
    cdef Shortage shortage          # why the last refused admission got no pages
    cdef bint is_short              # whether the last admission was refused
    cdef list refusals              # for each row, the RefusedRequest of its last request, or None
    cdef Stays stays_now            # referred to by results of calls until rows are exchanged
    cdef int32_t num_shards         # shards of the pool that rows are bound to; 0: none
    cdef cython.pymutex lock
    cdef int process                # number of the process that made it

    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock. IntegrityError in another process than the batch's."""
        require_process(self.process, "RunningBatch")
        return &self.lock

    cdef void set_shortage(self, const Shortage *shortage) noexcept
    cdef void release_locks(self) noexcept
    cdef int check_made(self) except -1
    cdef int acquire_locks(self) except -1
    cdef Py_ssize_t checked_row(self, object row) except -1
    cdef int begin_caching(self, const Hashing *hashing, int32_t hash_page_size, bint caches_computed) except -1
    cdef int begin_groups(self) except -1
    cdef int make_arrays(self) except -1
    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept
    cdef bint copy_extra_keys(self, Py_ssize_t source, PageIds targets, list forgotten) noexcept
    cdef int exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1
