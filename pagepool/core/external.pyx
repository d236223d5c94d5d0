"""Rows that wait for tokens from elsewhere: these are counted as computed, or their pages go back."""

from libc.stdint cimport int32_t

from pagepool.core.arguments cimport size_of
from pagepool.core.batch cimport Batch, end_row, enter_row, held_by, holding_of, plan_next_event
from pagepool.core.holdings cimport Holding, enter_waiting, has_copies_due, put_back_behind, skip_unread
from pagepool.core.rows cimport blank
from pagepool.core.rules cimport MAX_TOKENS
from pagepool.core.running cimport RunningRows

from pagepool.errors import ArgumentError, CopiesDueError


cdef void commit_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Count tokens that a pending row waited for as computed, and let it run."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    batch.states[row].num_computed += num_tokens
    batch.num_external[row] = 0
    skip_unread(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        if held_by(batch, row, g).num_skipped:
            blank(batch.tables[g], row, 0, held_by(batch, row, g).num_skipped)
    enter_row(batch, row, batch.states[row].num_computed)
    enter_waiting(&batch.waiting)
    plan_next_event(batch, row)


cdef void fail_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Do it with the first of the tokens, and give back the pages behind. A state is wrong then, so nothing stands with one."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    if batch.has_state:
        batch.states[row].num_computed = batch.states[row].num_hits = num_tokens = 0
    commit_row(batch, row, num_tokens)
    put_back_behind(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    plan_next_event(batch, row)


def end_external(RunningRows rows not None, row, num_tokens, bint is_failed) -> int:
    """Let a pending row run: see `RunningBatch.commit_external`, and if it `is_failed` `RunningBatch.fail_external`. Returns
    how many tokens of the row are computed.
    """
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t checked = rows.checked_row(row)
    cdef int32_t num = <int32_t>size_of(num_tokens, "num_valid_tokens" if is_failed else "num_tokens", 0, MAX_TOKENS)
    cdef Holding holding = holding_of(batch, checked)
    cdef int32_t num_external, num_computed
    cdef bint is_due, is_right
    rows.enter_call()
    num_external = batch.num_external[checked]
    is_due = num_external and has_copies_due(batch.pool, &holding)
    is_right = 0 < num_external and num <= num_external and not is_due
    is_right = is_right and (is_failed or num == num_external or not batch.has_state)
    if is_right and is_failed:
        fail_row(batch, checked, num)
    elif is_right:
        commit_row(batch, checked, num)
    num_computed = batch.states[checked].num_computed
    rows.let_go()
    if not is_right:
        refuse_end(checked, num, num_external, is_due)
    return num_computed


cdef int refuse_end(Py_ssize_t row, int32_t num_tokens, int32_t num_external, bint is_due) except -1:
    if num_external == 0:
        raise ArgumentError(f"row {row} waits for no tokens from elsewhere")
    if is_due:
        raise CopiesDueError(f"row {row}: copies or transfers of its pages are due: take them, and do them, before")
    if num_tokens > num_external:
        raise ArgumentError(f"row {row}: got {num_tokens} tokens, allowed: at most the {num_external} for which it waits")
    raise ArgumentError(
        f"row {row}: got {num_tokens} tokens, allowed with a state: all {num_external}; call fail_external for fewer"
    )
