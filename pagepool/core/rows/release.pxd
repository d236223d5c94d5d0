# Rows end.

from pagepool.core.rows.row_store cimport *


cdef enum ReleaseOutcome:
    RELEASED
    WRONG_ROW                 # a row is not admitted, or repeated
    OVERDRAWN                 # a page would be given back more often than it is held
    SHORT_OF_ROOM             # memory is short

cdef struct Release:          # how a release of rows ended
    ReleaseOutcome outcome
    Py_ssize_t at             # index of the wrong row
    int32_t page_id           # the overdrawn page


cdef Release release_rows(
    RowStore rows, PageIds released, PageIds row_terms, PageIds ids, PageIds page_terms, bint has_failed
) noexcept
cdef bint reserve_places(const Batch *batch, PageIds ids) noexcept
cdef Release release_lost(RowStore rows, PageIds one, int32_t row, PageIds ids) noexcept
