# Steps in flight, as `RunningBatch` returns them.

cimport cython

from pagepool.core.rows.row_store cimport *


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class StepResult:
    cdef readonly Py_ssize_t num_grown
    cdef readonly bint is_settled
    cdef readonly object ended_rows     # int32 [rows that ended with the step]; None before it is settled, or without rules
    cdef readonly object has_stopped    # bool: whether each of these sampled a stop token
    cdef PageStore store
    cdef RowStore batch
    cdef Py_ssize_t num_rows        # those of all calls
    cdef bint is_short              # the last call refused a row, for this shortage
    cdef Shortage shortage
    cdef list calls                 # StepResults of calls that add rows
    cdef Stays stays                # those at the time of the call
    cdef PageIds num_tokens         # a number for each row, or one for all
    cdef PageIds num_drafts
    cdef OpenStep node              # of a step, as long as it is open; not of the calls that it is made of
    cdef Growth growth              # `rows` and `token_ids` are invalid after the call; `step` is 0 before there are rows


cdef StepResult new_result(RowStore rows)
cdef list calls_of(StepResult step)
cdef Py_ssize_t count_grown(list calls) noexcept
cdef int refuse_added(Py_ssize_t num_rows) except -1
cdef StepResult checked_step(RowStore rows, object step)
cdef StepResult joined_step(RowStore rows, object step)
cdef object refusal_of(PageStore store, const Shortage *shortage)
cdef int64_t number_of_step(const Batch *batch, StepResult step) noexcept
cdef void end_call(Batch *batch, StepResult head, StepResult call) noexcept
cdef int add_call(StepResult step, StepResult call) except -1
cdef int remove_call(StepResult step, StepResult call) except -1
cdef StepResult new_admission(RowStore rows, Py_ssize_t row)
cdef void launch_admission(Batch *batch, Py_ssize_t row, StepResult step, StepResult call, Launch launch) noexcept
cdef int reserve_rows_of(Growth *growth) except -1
cdef bint reserve_new(Growth *growth) noexcept
cdef int lock_for(RowStore rows, StepResult step, bint joins) except -1
