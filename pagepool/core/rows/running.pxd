# Running rows: a `Batch`, the Python objects that it points into, and its locks.

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport MAX_TOKENS, go_on, let_others_run, require_process
from pagepool.core.holding cimport (
    Boundaries, CacheGroups, RefusedRequest, Shortage, Tokens, count_room_tokens, count_slots, count_step_slots,
    count_tokens, last_hash, reserve_copies,
)
from pagepool.core.pool cimport PageStore, find, find_held_free, set_session, share
from pagepool.core.rows.settle cimport *
from pagepool.core.values cimport PageIds, as_list, as_own_ids, as_page_ids, new_ids, refuse_negative, size_of, term_of_seconds


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class Stays:
    cdef int64_t *by_row            # [num_rows] the stays when rows were exchanged first since; NULL: they were not


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class StepResult:
    cdef readonly Py_ssize_t num_grown
    cdef readonly bint is_settled
    cdef PageStore store
    cdef RunningRows batch
    cdef list calls                 # StepResults of calls that added rows
    cdef Stays stays                # those at the time of the call
    cdef PageIds num_tokens         # a number for each row, or one for all
    cdef PageIds num_drafts
    cdef Growth growth              # `rows` and `token_ids` are invalid after the call; `step` is 0 before there are rows


@cython.auto_pickle(False)
cdef class RunningRows:
    cdef Batch batch
    cdef PageStore store
    cdef CacheGroups groups
    cdef tuple tables               # a TableRows for each group
    cdef tuple lock_order           # the tables in locking order
    cdef tuple buffers              # arrays that `batch` points into
    cdef list extra_key_bytes       # for each row, the bytes that its `extra_keys` point into
    cdef int64_t last_step          # last step with moves taken by this batch
    cdef Shortage shortage          # why the last refused admission got no pages
    cdef bint is_short              # the last admission was refused
    cdef list refusals              # for each row, the RefusedRequest of its last request, or None
    cdef Stays stays_now            # what results of calls refer to until rows are exchanged
    cdef int32_t num_shards         # shards of the pool that rows are bound to; 0: none
    cdef readonly object stays
    cdef readonly object num_ahead_tokens
    cdef readonly object num_tokens
    cdef readonly object num_computed_tokens
    cdef readonly object num_cached_tokens
    cdef readonly object num_external_tokens
    cdef readonly object is_admitted
    cdef cython.pymutex lock
    cdef int process          # number of the process that made it

    @cython.final
    cdef inline cython.pymutex *own_lock(self) except NULL:
        """Return the lock. IntegrityError in another process than that of the batch."""
        require_process(self.process, "RunningBatch")
        return &self.lock

    cdef void set_shortage(self, const Shortage *shortage) noexcept
    cdef void release_locks(self) noexcept
    cdef int check_made(self) except -1
    cdef int acquire_locks(self) except -1
    cdef Py_ssize_t checked_row(self, object row) except -1
    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept


cdef int lock_for(RunningRows running, StepResult step, str name) except -1
cdef StepResult checked_step(RunningRows running, object step, str name)
cdef StepResult add_call(StepResult step, StepResult call)
cdef StepResult new_admission(RunningRows running, Py_ssize_t row)
cdef void launch_admission(Batch *batch, Py_ssize_t row, StepResult step, StepResult call, Launch launch) noexcept
cdef Py_ssize_t count_rows(StepResult step) noexcept
