# Rows end: their last pages and states are cached, and they are emptied.

from pagepool.core.holding cimport awaits_moves, drop_copies
from pagepool.core.pool cimport set_session
from pagepool.core.rows.settle cimport *


cdef enum ReleaseOutcome:
    RELEASED
    WRONG_ROW                 # a row is not admitted, or repeated
    OVERDRAWN                 # a page would be given back more often than it is held
    SHORT_OF_ROOM             # memory is short

cdef struct Release:          # how a release of rows ended
    ReleaseOutcome outcome
    Py_ssize_t at             # index of the wrong row
    int32_t page_id           # the page without references


cdef inline void cache_last_pages(Batch *batch, Py_ssize_t n) noexcept nogil:
    """Cache the pages of the copied rows whose lookahead became known after they were filled."""
    cdef Py_ssize_t i
    for i in range(n if batch.hashing.num_lookahead else 0):
        cache_row(batch, batch.checked_rows[i], count_final(batch, batch.checked_rows[i]))
    cache_waiting(&batch.waiting)


cdef inline void _note_last_states(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Note the entries of working pages that became checkpoints, though a step in flight changes them."""
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int64_t step = step_that_fills(batch, row, batch.records[row].num_computed, 0)
    for g in range(batch.num_groups if step else 0):
        held = held_by(batch, row, g)
        if not keeps_checkpoints(&batch.groups[g]) or held.num_pages == 0:
            continue
        if batch.pool.pages[held.ids[0]].group != NO_GROUP and not note_made(batch, step, held.ids[0]):
            uncache(batch.pool, held.ids[0])


cdef inline void end_row(Batch *batch, Py_ssize_t row, int32_t term, bint has_failed) noexcept nogil:
    """Make a row free whose pages were given back. Its last states are cached with a term, unless their step has failed."""
    cdef Holding *holding = holding_of(batch, row)
    assert batch.records[row].is_admitted and batch.stamps[row] == batch.stamp
    if batch.keeps_states and not has_failed and not awaits_moves(batch.pool, holding):
        if count_final(batch, row) >= batch.records[row].num_computed:
            keep_last_states(batch, row, term)
            _note_last_states(batch, row)
    note_row_entries(batch, row)
    drop_copies(batch.pool, holding)
    if batch.writes_states:
        if not has_failed:
            settle_writes(batch, row, count_final(batch, row), 0, term)
        drop_writes(batch, row, 0)
    set_context(batch, row, 0)
    set_session(&batch.pool.sessions, &batch.rows[row].holding.session, NO_SESSION)
    empty_row(batch, row)
