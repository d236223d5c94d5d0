"""Steps in flight, as `RunningBatch` returns them."""

cimport cython
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc

from pagepool.core.base cimport process_number
from pagepool.core.pool cimport bank_of_queue
from pagepool.core.values cimport array_of, require_instance

import numpy as np

from pagepool.errors import ArgumentError
from pagepool.refusal import Refusal


@cython.final
@cython.no_gc  # in no cycle: a batch has no reference to its results
@cython.auto_pickle(False)
cdef class StepResult:
    """A step in flight: its rows, with their tokens and new pages.

    `RunningBatch.plan` and `step` return one, and `new_step` an empty one. With ``step=`` these calls and `admit` add rows to a
    step. The first `num_grown` rows of the last call have their room; the next row, if there is one, did not fit. `len` is the
    number of rows of the step. `RunningBatch.settle` ends it, and with `stop_token_ids` or `max_num_tokens` says which rows
    ended: `ended_rows`, int32, and `has_stopped`, bool, whether each of these sampled a stop token. Otherwise these are None.
    """

    def __init__(self):
        raise TypeError("a StepResult is what RunningBatch returns")

    def __dealloc__(self):
        if self.batch is not None and self.node.step and self.batch.process == process_number:
            with self.batch.lock:
                close_step(&self.batch.batch, &self.node, False)
        free(self.growth.new_ids)
        free(self.growth.planned)

    def __len__(self):
        return self.num_rows

    @property
    def number(self) -> int:
        """The number of the step in its batch, which counts from 1; 0 while the step has no rows."""
        return self.growth.step

    @property
    def rows(self) -> np.ndarray:
        """The rows of the step, as they were numbered in the calls: int32 ``[len(step)]``, a copy in the order of the calls."""
        return column_of(self, GROWN_ROWS)

    @property
    def new_page_ids(self) -> np.ndarray:
        """Ids of the new pages: int32 ``[num_new_pages]``, a copy, by row and then by group. Pages of admitted rows are
        not listed.
        """
        return column_of(self, NEW_IDS)

    @property
    def new_page_rows(self) -> np.ndarray:
        """The row of each new page: int32 ``[num_new_pages]``, a copy, in the order of the calls."""
        return column_of(self, NEW_ROWS)

    @property
    def new_page_groups(self) -> np.ndarray:
        """The cache group of each new page: int32 ``[num_new_pages]``, a copy."""
        return column_of(self, NEW_GROUPS)

    @property
    def refusal(self) -> Refusal | None:
        """Why the row behind the first `num_grown` got no pages; None if all have their room. O(1)."""
        return refusal_of(self.store, &self.shortage) if self.is_short else None

    def __repr__(self):
        return f"StepResult(num_grown={self.num_grown}, new_page_ids={self.new_page_ids.tolist()})"


cdef enum Column:             # a vector of each call of a step
    GROWN_ROWS
    NEW_IDS
    NEW_ROWS
    NEW_GROUPS


cdef StepResult new_result(RowStore rows):
    """Return an empty step of a batch."""
    cdef StepResult result = StepResult.__new__(StepResult)
    result.store, result.batch, result.stays = rows.store, rows, rows.stays_now
    return result


cdef list calls_of(StepResult step):
    """Return the results of the calls of a step, in order."""
    return [step] if step.calls is None else [step, *step.calls]


cdef int refuse_added(Py_ssize_t num_rows) except -1:
    """Raise the error for a step of `num_rows` rows to which others are added during a call."""
    raise ArgumentError(f"step: got one to which rows are added meanwhile, allowed: the {num_rows} rows of the call")


cdef Py_ssize_t count_grown(list calls) noexcept:
    """Count the rows of the calls of a step."""
    cdef StepResult call
    cdef Py_ssize_t num = 0
    for call in calls:
        num += call.growth.num_grown
    return num


cdef object column_of(StepResult step, Column column):
    """Return a column of all calls of a step, concatenated in the order of the calls."""
    cdef StepResult call
    cdef list parts = []
    for call in calls_of(step):
        if column == GROWN_ROWS:
            parts.append(array_of(call.growth.grown_rows, call.growth.num_grown))
        else:  # the columns lie one after another in memory
            parts.append(array_of(call.growth.new_ids + (column - NEW_IDS) * call.growth.max_num_new, call.growth.num_new))
    return parts[0] if step.calls is None else np.concatenate(parts)


cdef StepResult checked_step(RowStore rows, object step):
    """Return a step of the batch that was not settled."""
    cdef StepResult checked = require_instance(step, StepResult, "step")
    if checked.batch is not rows:
        raise ArgumentError("step: got one of another batch, allowed: a step of this batch")
    if checked.is_settled:
        raise ArgumentError("step: got one that was settled already, allowed: one that was not")
    return checked


cdef StepResult joined_step(RowStore rows, object step):
    """Return a step of the batch to which rows can be added."""
    cdef StepResult joined = checked_step(rows, step)
    if joined.node.has_failed:
        raise ArgumentError("step: got one that failed with an earlier step, allowed: one that did not")
    return joined


cdef object refusal_of(PageStore store, const Shortage *shortage):
    """Return a shortage as users see it."""
    cdef int32_t num_shards = max(1, store.pool.num_shards)
    shard = shortage.queue % num_shards if shortage.queue >= 0 else None
    pool = store.bank_names[bank_of_queue(&store.pool, shortage.queue)]
    return Refusal(
        shortage.num_needed, shortage.num_free, shortage.num_reserved, shortage.num_hit_tokens, pool, shard,
        shortage.can_wait,
    )


cdef int64_t number_of_step(const Batch *batch, StepResult step) noexcept:
    """Return the number of a step; that of the next step if `step` is None or has no rows. The locks are held."""
    return step.growth.step if step is not None and step.growth.step else batch.num_steps + 1


cdef void end_call(Batch *batch, StepResult head, StepResult call) noexcept:
    """Add the rows that a call launched to its step, and note the batch's counts. The locks are held."""
    cdef Growth *growth = &call.growth
    cdef StepResult step = call if head is None else head
    step.num_grown = call.num_grown = growth.num_grown
    step.num_rows += growth.num_grown
    step.is_short, step.shortage = growth.num_grown < growth.num_rows, growth.shortage
    growth.num_stays = batch.num_stays
    if growth.num_grown == 0:  # a result without rows is no step
        growth.step = 0
        return
    batch.num_steps = max(batch.num_steps, growth.step)
    step.growth.step = growth.step


cdef int add_call(StepResult step, StepResult call) except -1:
    """Add a call to a step, before it launches rows. `end_call` counts these."""
    if step.calls is None:
        step.calls = []
    step.calls.append(call)
    return 0


cdef int remove_call(StepResult step, StepResult call) except -1:
    """Remove a call that launched no rows from a step."""
    assert call.growth.num_grown == 0
    step.calls.remove(call)
    return 0


cdef StepResult new_admission(RowStore rows, Py_ssize_t row):
    """Return a call that admits a row; `add_call` makes it part of a step."""
    cdef StepResult call = new_result(rows)
    call.growth.num_rows = 1
    reserve_rows_of(&call.growth)
    call.growth.grown_rows[0] = <int32_t>row
    return call


cdef void launch_admission(Batch *batch, Py_ssize_t row, StepResult step, StepResult call, Launch launch) noexcept:
    """Launch the first tokens of an admitted row: in `step`, by `call`, or, if `step` is None, in the next step. The locks are
    held.
    """
    launch.step = number_of_step(batch, step)
    add_launch(batch, row, launch)
    count_run_tokens(batch, row)
    if step is not None:
        call.growth.step, call.growth.num_grown = launch.step, 1
        open_step(batch, &step.node, launch.step)
        end_call(batch, step, call)


cdef int reserve_rows_of(Growth *growth) except -1:
    """Allocate the vectors of a call's rows."""
    growth.planned = <Planned *>malloc(growth.num_rows * (sizeof(Planned) + sizeof(int32_t)))
    if growth.planned == NULL:
        raise MemoryError(f"{growth.num_rows} rows")
    growth.grown_rows = <int32_t *>(growth.planned + growth.num_rows)
    return 0


cdef bint reserve_new(Growth *growth) noexcept:
    """Allocate memory for the ids of new pages; False if memory is short."""
    if growth.max_num_new:
        growth.new_ids = <int32_t *>malloc(3 * growth.max_num_new * sizeof(int32_t))
        growth.new_rows = growth.new_ids + growth.max_num_new
        growth.new_groups = growth.new_rows + growth.max_num_new
    return growth.new_ids != NULL or growth.max_num_new == 0


cdef int lock_for(RowStore rows, StepResult step, bint joins) except -1:
    """Take all locks for a call that changes a step, or for one without a step (None). Raise if another thread has settled the
    step meanwhile, or has failed a step to which the call adds rows.
    """
    rows.acquire_locks()
    if step is not None and (step.is_settled or (joins and step.node.has_failed)):
        rows.release_locks()
        joined_step(rows, step)
    return 0
