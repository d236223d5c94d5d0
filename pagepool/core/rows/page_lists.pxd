# The pages that the rows of a step read, one row after another, as kernels take them. The first page of a row is the first that
# its tokens attend to, and the last one has its last token; sinks come first.
#
# Always, for a list that was written: ``rows[i]`` says which pages it has for row i of the set. While the `num_rewrites` of
# list and table are equal, the table has only got pages since, so a row with the same stay, first page and number of pages is
# in the list already.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.holding cimport first_useful_page
from pagepool.core.rows.input_step cimport *


cdef struct ListedRow:
    int64_t stay              # 0: of a table without a batch
    int32_t first             # place of its first page; sinks are at places below 0
    int32_t num_pages

cdef struct PageList:         # the list in one set
    ListedRow *rows           # [max_num_reqs]
    Py_ssize_t num_rows
    Py_ssize_t num_pages
    int64_t num_rewrites      # those of the table when it was written


cdef inline ListedRow listed_row(const Source *source, Py_ssize_t group, const Spans *spans, Py_ssize_t i) noexcept nogil:
    """Return the pages that a row of a step reads."""
    cdef const Table *table = source.tables[group]
    cdef const Batch *batch = source.batch
    cdef ListedRow row = ListedRow(stay=0, first=-<int32_t>table.num_sinks, num_pages=0)
    cdef uint32_t last = page_at(spans.stops[i] - 1, source.page_sizes[group], source.shifts[group])
    if batch != NULL:
        row.stay = batch.stays[spans.rows[i]]
        row.first += first_useful_page(&batch.groups[group].rules, spans.starts[i], 0)
    row.num_pages = <int32_t>last + 1 - row.first
    assert 0 < row.num_pages <= table.num_columns
    return row


cdef inline int32_t last_page_len(const Source *source, Py_ssize_t group, const Spans *spans, Py_ssize_t i) noexcept nogil:
    """Return the tokens in the last page of a row of a step."""
    return (spans.stops[i] - 1) % source.page_sizes[group] + 1


cdef inline int64_t count_listed(const Source *source, Py_ssize_t group, const Spans *spans, Py_ssize_t n) noexcept nogil:
    """Count the pages that the rows of a step read."""
    cdef int64_t count = 0
    cdef Py_ssize_t i
    for i in range(n):
        count += listed_row(source, group, spans, i).num_pages
    return count


cdef inline bint is_listed(const PageList *listed, Py_ssize_t i, const ListedRow *row) noexcept nogil:
    """Whether the list has these pages as those of row i already."""
    return (
        listed.rows[i].stay == row.stay and listed.rows[i].first == row.first and listed.rows[i].num_pages == row.num_pages
    )
