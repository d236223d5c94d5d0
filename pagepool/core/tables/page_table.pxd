# Rows of a page table. The caller holds the table's lock, and checks row numbers.
#
# A `Table` is an int32 array of page ids, with a flag for each segment of 64 columns: whether it changed since it was last
# sent to the device. Its first columns have the same pages in each row, sinks; a place is a column behind these.
#
# Always, unless the user wrote the arrays without `mark_dirty`:
# - ``num_sinks <= num_sinks + num_pages <= extent <= num_columns``, and a row holds zeros from `extent` on.
# - A row with a dirty segment is dirty in `is_row_dirty`; a segment begins at a multiple of 64, or ends with the row.

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

from pagepool.core.base cimport copy_bytes

cdef enum:
    SEGMENT = 64              # columns sent to the device together

cdef struct Table:
    int32_t *page_ids         # [num_rows, num_columns] page ids
    int32_t *num_pages        # [num_rows] without sinks
    int32_t *extent           # [num_rows] leading columns that may be nonzero, here or on the device
    uint8_t *is_dirty         # [num_rows, num_segments] segments not sent yet
    uint8_t *is_row_dirty     # [num_rows] whether any segment of the row is dirty
    Py_ssize_t num_rows
    Py_ssize_t num_columns
    Py_ssize_t num_sinks
    Py_ssize_t num_segments   # segments in a row
    Py_ssize_t width          # columns of a segment: SEGMENT, or fewer in a narrower table
    int64_t version           # grows with each change
    int64_t num_rewrites      # grows when ids of a row are cleared, as a batch does before it replaces them


cdef inline void set_dirty(Table *table, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Set the dirty flags of columns ``[start, stop)`` of a row."""
    cdef uint8_t *flags = table.is_dirty + row * table.num_segments
    cdef size_t first = <size_t>start // SEGMENT, last = <size_t>(stop - 1) // SEGMENT
    assert 0 <= row < table.num_rows and 0 <= start <= stop <= table.num_columns
    if start < stop:
        assert last < <size_t>table.num_segments
        flags[first] = table.is_row_dirty[row] = 1
        if last > first:
            memset(flags + first + 1, 1, last - first)
        table.extent[row] = max(table.extent[row], <int32_t>stop)


cdef inline Py_ssize_t count_table_places(const Table *table) noexcept nogil:
    """Count the columns behind the sinks."""
    return table.num_columns - table.num_sinks


cdef inline int32_t *ids_at(const Table *table, Py_ssize_t row) noexcept nogil:
    """Return the ids of a row behind the sinks."""
    return table.page_ids + row * table.num_columns + table.num_sinks


cdef inline void write_ids(
    Table *table, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n, int32_t offset
) noexcept nogil:
    """Write ids minus `offset`, but null pages as 0, to a row from place `start` on; the row ends behind the last one."""
    cdef int32_t *places = ids_at(table, row) + start
    cdef Py_ssize_t i
    assert 0 <= row < table.num_rows and 0 <= start and 0 <= n <= count_table_places(table) - start
    if offset:
        for i in range(n):
            places[i] = max(0, ids[i] - offset)
    elif n == 1:
        places[0] = ids[0]
    else:
        copy_bytes(places, ids, n * sizeof(int32_t))
    table.num_pages[row] = <int32_t>(start + n)
    set_dirty(table, row, table.num_sinks + start, table.num_sinks + start + n)


cdef inline void blank(Table *table, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Put the null page into places ``[start, stop)`` of a row."""
    assert 0 <= start <= stop <= count_table_places(table)
    memset(ids_at(table, row) + start, 0, (stop - start) * sizeof(int32_t))
    set_dirty(table, row, table.num_sinks + start, table.num_sinks + stop)
    table.version += 1
    table.num_rewrites += 1


cdef inline void clear_from(Table *table, Py_ssize_t row, Py_ssize_t start) noexcept nogil:
    """Write zeros from place `start` to the row's extent, which then ends there."""
    cdef Py_ssize_t first = table.num_sinks + start, stop = table.extent[row]
    assert 0 <= start <= count_table_places(table) and table.num_sinks <= stop <= table.num_columns
    if first < stop:
        memset(table.page_ids + row * table.num_columns + first, 0, (stop - first) * sizeof(int32_t))
        set_dirty(table, row, first, stop)
        table.num_rewrites += 1
    table.extent[row] = <int32_t>first
