"""A running row goes on in several."""

from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from pagepool.core.batch cimport (
    Batch, ExtraKey, RowState, digests_of, holding_of, plan_next_event, show_row, start_call, tokens_of,
)
from pagepool.core.copies cimport awaits_copies
from pagepool.core.forks cimport (
    FORKED, SHORT_OF_MEMORY, SHORT_OF_PAGES, UNSHAREABLE, ForkOutcome, check_fork, count_open_pages, fork_group,
)
from pagepool.core.holdings cimport Holding
from pagepool.core.ids cimport PageIds, as_own_ids
from pagepool.core.queue cimport count_free_in
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.row_moves cimport begin_admission, set_context
from pagepool.core.siphash cimport Digest

from pagepool.errors import ArgumentError, CopiesDueError, OutOfPagesError, PageIdError, RowIndexError


def fork_row(RowMemory rows not None, row, targets) -> None:
    """Let free rows go on from the computed tokens of an admitted row: see `RunningBatch.fork`."""
    cdef Py_ssize_t source = rows.checked_row(row)
    cdef PageIds target_rows = as_own_ids(targets, "targets")
    cdef list forgotten = [None] * (2 * target_rows.num)  # what goes with them may wait for a fork of the process
    cdef Batch *batch = &rows.batch
    cdef Holding holding = holding_of(batch, source)
    cdef Py_ssize_t num_right, i
    cdef bint is_ready
    cdef ForkOutcome outcome = SHORT_OF_MEMORY
    if target_rows.num == 0:
        raise ArgumentError("targets: got none, allowed: at least 1")
    rows.enter_call()
    is_ready = batch.states[source].is_admitted and not batch.num_external[source] and not awaits_copies(batch.pool, &holding)
    num_right = count_free_rows(batch, source, target_rows) if is_ready else 0
    if num_right == target_rows.num:
        outcome = check_fork(
            batch.pool, &holding, batch.states[source].num_computed, num_right, batch.states[source].shard
        )
    if outcome == FORKED and not copy_extra_keys(rows, source, target_rows, forgotten):
        outcome = SHORT_OF_MEMORY
    if outcome == FORKED:
        for i in range(num_right):
            fill_target(batch, source, target_rows.ids[i])
        begin_admission(batch, source)  # what it shares now cannot be taken back
        plan_next_event(batch, source)
    rows.let_go()
    if outcome != FORKED:
        refuse_fork(rows, source, target_rows, is_ready, num_right, outcome)


cdef Py_ssize_t count_free_rows(Batch *batch, Py_ssize_t source, PageIds targets) noexcept:
    """How many targets there are before the first that is not a free row, or stands there twice."""
    cdef Py_ssize_t i
    cdef RowState *state
    start_call(batch)
    for i in range(targets.num):
        if not 0 <= targets.ids[i] < batch.num_rows:
            return i
        state = &batch.states[targets.ids[i]]
        if state.is_claimed or state.stamp == batch.stamp:
            return i
        state.stamp = batch.stamp
    return targets.num


cdef bint copy_extra_keys(RowMemory rows, Py_ssize_t source, PageIds targets, list forgotten) noexcept:
    """Give free rows the extra keys of another, and what they had to `forgotten`. False where memory is short: those that have
    them by then have no digests.
    """
    cdef Batch *batch = &rows.batch
    cdef ExtraKey *keys = batch.extra_keys[source]
    cdef Py_ssize_t i, row, num_keys = 1
    while keys != NULL and keys[num_keys - 1].data != NULL:
        num_keys += 1
    for i in range(targets.num):
        row = targets.ids[i]
        forgotten[2 * i], forgotten[2 * i + 1] = rows.refusals[row], rows.extra_key_bytes[row]
        rows.refusals[row] = None
        rows.forget_extra_keys(row)
        if keys != NULL:
            batch.extra_keys[row] = <ExtraKey *>malloc(num_keys * sizeof(ExtraKey))
            if batch.extra_keys[row] == NULL:
                return False
            memcpy(batch.extra_keys[row], keys, num_keys * sizeof(ExtraKey))
            rows.extra_key_bytes[row] = rows.extra_key_bytes[source]
    return True


cdef void fill_target(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Let a free row be what another is."""
    cdef RowState *state = &batch.states[row]
    cdef Holding forked = holding_of(batch, source), new = holding_of(batch, row)
    cdef Py_ssize_t g
    memcpy(tokens_of(batch, row), tokens_of(batch, source), batch.states[source].num_tokens * sizeof(int32_t))
    memcpy(digests_of(batch, row), digests_of(batch, source), batch.states[source].num_hashed * sizeof(Digest))
    state[0] = batch.states[source]
    state.stamp = batch.stamp
    set_context(batch, row, batch.contexts[source])
    begin_admission(batch, row)
    for g in range(batch.num_groups):
        fork_group(batch.pool, &forked, &new, <int32_t>g, state.num_computed, state.shard)
        show_row(batch, row, g)
    plan_next_event(batch, row)


cdef int refuse_fork(
    RowMemory rows, Py_ssize_t source, PageIds targets, bint is_ready, Py_ssize_t at, ForkOutcome outcome
) except -1:
    cdef Batch *batch = &rows.batch
    cdef Holding holding = holding_of(batch, source)
    if batch.num_external[source]:
        raise ArgumentError(f"row {source} waits for tokens from elsewhere: call commit_external or fail_external before")
    if not is_ready and batch.states[source].is_admitted:
        raise CopiesDueError(
            f"row {source}: copies to its pages are due, or transfers: call take_copies, and with a host tier take_transfers, "
            "and do them, before"
        )
    if not is_ready:
        raise ArgumentError(f"row {source} is not admitted")
    if at < targets.num:
        if not 0 <= targets.ids[at] < batch.num_rows:
            raise RowIndexError(f"targets: got {targets.ids[at]} (at {at}), allowed: 0 to {batch.num_rows - 1}")
        raise ArgumentError(f"targets: got {targets.ids[at]} (at {at}), allowed: free rows, each once")
    if outcome == SHORT_OF_PAGES:
        num_new = count_open_pages(&holding, batch.states[source].num_computed) * targets.num
        num_free = count_free_in(batch.pool, batch.states[source].shard)
        raise OutOfPagesError(f"row {source}: its forks need {num_new} pages, {num_free} are free")
    if outcome == UNSHAREABLE:
        raise PageIdError(
            f"row {source}: a page that it holds cannot have a further reference, or was given back, or a free page has one"
        )
    raise MemoryError(f"forks of row {source}")
