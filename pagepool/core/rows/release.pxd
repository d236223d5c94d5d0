# Rows end: their last pages and states are cached, and they are emptied.

from pagepool.core.holding cimport drop_copies
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


cdef inline void end_row(Batch *batch, Py_ssize_t row, int32_t term, bint has_failed) noexcept nogil:
    """Make a row free whose pages were given back. Its last states are cached with a term, unless their step has failed."""
    cdef Holding *holding = holding_of(batch, row)
    assert batch.records[row].is_admitted and batch.stamps[row] == batch.stamp
    note_row_entries(batch, row)
    drop_copies(batch.pool, holding)
    if batch.writes_states:
        if not has_failed:
            settle_writes(batch, row, count_final(batch, row), 0, term)
        drop_writes(batch, row, 0)
    set_context(batch, row, 0)
    set_session(&batch.pool.sessions, &batch.rows[row].holding.session, NO_SESSION)
    empty_row(batch, row)
