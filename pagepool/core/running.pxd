# Running rows.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.batch cimport Amounts, Batch, Growth
from pagepool.core.groups cimport CacheGroups
from pagepool.core.holdings cimport Held
from pagepool.core.ids cimport PageIds
from pagepool.core.locks cimport LockNode
from pagepool.core.rows cimport Rows
from pagepool.core.rules cimport Group
from pagepool.core.store cimport PageStore


cdef class RunningRows


@cython.final
@cython.no_gc  # it is in no cycle: a batch does not know its results
@cython.auto_pickle(False)
cdef class StepResult:
    cdef readonly Py_ssize_t num_grown
    cdef RunningRows batch          # that was grown; None once the call is taken back
    cdef PageIds num_new_tokens     # a number for each row, or one for all
    cdef Growth growth              # its `rows` and `token_ids` are the caller's, and not read after the call

    cdef int begin(self, RunningRows batch, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens) except -1
    cdef bint reserve(self, Py_ssize_t n) noexcept


@cython.auto_pickle(False)
cdef class RunningRows:
    cdef Batch batch
    cdef PageStore store
    cdef CacheGroups groups
    cdef tuple tables               # one TableRows a group
    cdef tuple lock_order           # the same in the order in which everybody locks them
    cdef list buffers               # the arrays that `batch` points into
    cdef list extra_key_bytes       # by row: the bytes that `batch.extra_keys` points into
    cdef list refusals              # by row: the Refusal of the request that was tried last, or None
    cdef bytes key
    cdef int32_t num_shards         # of the pool that rows are bound to; 0: none
    cdef readonly object num_tokens
    cdef readonly object num_computed_tokens
    cdef readonly object num_cached_tokens
    cdef readonly object num_external_tokens
    cdef readonly object is_admitted
    cdef cython.pymutex lock
    cdef LockNode lock_node

    cdef int32_t *new_buffer(self, Py_ssize_t num_rows, Py_ssize_t num_values) except NULL
    cdef int check_group(self, Group *group, const Rows *rows) except -1
    cdef int make_state(self, Py_ssize_t n) except -1
    cdef int make_contents(self, Py_ssize_t n) except -1
    cdef int make_pages(self, Py_ssize_t n) except -1
    cdef void let_go(self) noexcept
    cdef int check_made(self) except -1
    cdef int enter_call(self) except -1
    cdef Py_ssize_t checked_row(self, object row) except -1
    cdef int refuse_length(self, Py_ssize_t row, int64_t num_tokens) except -1
    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept
    cdef StepResult run(self, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens)
    cdef bint reserve_states(self, Py_ssize_t num_rows) noexcept
    cdef Py_ssize_t check_rows_of(self, Growth *growth) noexcept
    cdef Py_ssize_t grow_checked(self, Growth *growth) noexcept
    cdef int refuse_undo(self, const Growth *growth, Py_ssize_t at, bint is_due) except -1
    cdef int32_t refuse_unknown(self, int32_t row, Py_ssize_t at) except -1
    cdef int32_t refuse_row(self, const int32_t *rows, Py_ssize_t at) except -1
    cdef int refuse_growth(self, const Growth *growth, Py_ssize_t at, bint is_due) except -1
    cdef bint has_due(self, int32_t row) noexcept
    cdef int refuse_append(self, PageIds rows, Py_ssize_t at) except -1
    cdef int refuse_trim(self, PageIds rows, Py_ssize_t at, int32_t num_tokens, bint is_due) except -1
    cdef int refuse_release(self, PageIds rows, const Amounts *computed, Py_ssize_t at) except -1
    cdef Py_ssize_t check_release(self, PageIds rows, const Amounts *computed, PageIds ids, bint *has_room) noexcept
    cdef Py_ssize_t release_checked(self, PageIds ids, Py_ssize_t num_rows, const Amounts *computed) noexcept
    cdef int exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1
    cdef int refuse_exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1
    cdef PageIds copy_ids(self, const Held *held)
