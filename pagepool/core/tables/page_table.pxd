# Rows of a page table. The caller holds the table's lock, and checks row numbers.
#
# A `Table` is an int32 array of page ids, with a flag for each window of 64 columns that changed since it was last sent to the
# device.
#
# Always, unless the user wrote the arrays without `mark_dirty`:
# - ``0 <= num_pages <= extent <= num_columns``, and a row holds zeros from `extent` on.
# - A row with a dirty window is marked in `is_row_dirty`; a window begins at a multiple of 64, or ends with the row.

from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcpy, memset

from pagepool.core.base.platform cimport GUARDS
from pagepool.core.base.vectors cimport find_negative

cdef enum:
    WINDOW = 64               # columns sent to the device together

cdef struct Table:
    int32_t *page_ids         # [num_rows, num_columns] page ids
    int32_t *num_pages        # [num_rows]
    int32_t *extent           # [num_rows] leading columns that may be other than 0, here or on the device
    uint8_t *is_dirty         # [num_rows, num_windows] windows not sent yet
    uint8_t *is_row_dirty     # [num_rows] whether any window of the row is dirty
    Py_ssize_t num_rows
    Py_ssize_t num_columns
    Py_ssize_t num_windows    # windows in a row
    Py_ssize_t width          # columns of a window: WINDOW, or fewer in a narrower table
    int64_t version           # grows with each change

cdef struct Put:              # ids to put into a row
    Table *table
    Py_ssize_t row
    Py_ssize_t start          # column of the first id
    const int32_t *ids
    Py_ssize_t n


cdef inline void mark(Table *table, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Mark the windows of columns ``[start, stop)`` of a row as dirty."""
    cdef Py_ssize_t first = start // WINDOW, last = (stop - 1) // WINDOW
    assert 0 <= row < table.num_rows and 0 <= start <= stop <= table.num_columns and last < table.num_windows
    if start < stop:
        table.is_dirty[row * table.num_windows + first] = 1
        if last > first:
            memset(table.is_dirty + row * table.num_windows + first + 1, 1, last - first)
        table.is_row_dirty[row] = 1
        table.extent[row] = max(table.extent[row], <int32_t>stop)


cdef inline void write_ids(Table *table, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Write ids into a row from column `start` on, and let the row end behind them."""
    assert 0 <= row < table.num_rows and 0 <= start and 0 <= n <= table.num_columns - start
    if n == 1:
        table.page_ids[row * table.num_columns + start] = ids[0]
    elif n:  # without ids the pointer is NULL, which memcpy must not get
        memcpy(table.page_ids + row * table.num_columns + start, ids, n * sizeof(int32_t))
    table.num_pages[row] = <int32_t>(start + n)
    mark(table, row, start, start + n)


cdef inline bint _fits(const Put *put) noexcept nogil:
    """Whether there is room, no id is negative, and the user did not overwrite the row's count with a wrong one."""
    cdef const Table *table = put.table
    cdef bint has_room = 0 <= table.num_pages[put.row] <= table.num_columns and put.n <= table.num_columns - put.start
    return not GUARDS or (has_room and find_negative(put.ids, put.n) < 0)


cdef inline void blank(Table *table, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Put the null page into columns ``[start, stop)`` of a row."""
    assert 0 <= start <= stop <= table.extent[row]
    memset(table.page_ids + row * table.num_columns + start, 0, (stop - start) * sizeof(int32_t))
    mark(table, row, start, stop)
    table.version += 1


cdef inline void clear_from(Table *table, Py_ssize_t row, Py_ssize_t start) noexcept nogil:
    """Write zeros from column `start` to the row's extent, which becomes `start`."""
    cdef Py_ssize_t stop = table.extent[row]
    assert 0 <= start <= table.num_columns and 0 <= stop <= table.num_columns
    if start < stop:
        memset(table.page_ids + row * table.num_columns + start, 0, (stop - start) * sizeof(int32_t))
        mark(table, row, start, stop)
    table.extent[row] = <int32_t>start


cdef inline Py_ssize_t put_all(Put *puts, Py_ssize_t num, bint replaces) noexcept nogil:
    """Append to rows or replace them, in order, or none if one does not fit; return the number that fit. Counts rise during the
    check, since rows may repeat.
    """
    cdef Py_ssize_t i, num_fitting = 0
    cdef Put *put
    while num_fitting < num:
        put = &puts[num_fitting]
        assert put.n >= 0 and 0 <= put.row < put.table.num_rows
        put.start = 0 if replaces else put.table.num_pages[put.row]
        if not _fits(put):
            break
        put.table.num_pages[put.row] += 0 if replaces else <int32_t>put.n
        num_fitting += 1
    for i in range(num_fitting):
        put = &puts[i]
        if num_fitting < num:
            put.table.num_pages[put.row] -= 0 if replaces else <int32_t>put.n
            continue
        if replaces:
            clear_from(put.table, put.row, 0)
        write_ids(put.table, put.row, put.start, put.ids, put.n)
        put.table.version += replaces or put.n > 0
    return num_fitting


ctypedef void (*RowChange)(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil


cdef inline void clear_row(Table *table, Py_ssize_t row, Py_ssize_t _) noexcept nogil:
    assert 0 <= row < table.num_rows
    table.num_pages[row] = 0
    clear_from(table, row, 0)
    table.version += 1


cdef inline void copy_row(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(table.num_pages[src], table.num_columns))  # the user may overwrite the count during the call
    assert 0 <= src < table.num_rows and 0 <= tgt < table.num_rows
    table.version += 1
    if src != tgt:
        memcpy(table.page_ids + tgt * table.num_columns, table.page_ids + src * table.num_columns, n * sizeof(int32_t))
        table.num_pages[tgt] = <int32_t>n
        mark(table, tgt, 0, n)
        clear_from(table, tgt, n)


cdef inline void swap_rows(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t i, n = max(table.extent[src], table.extent[tgt])
    cdef int32_t *first = table.page_ids + src * table.num_columns
    cdef int32_t *second = table.page_ids + tgt * table.num_columns
    assert 0 <= src < table.num_rows and 0 <= tgt < table.num_rows and 0 <= n <= table.num_columns
    for i in range(n):
        first[i], second[i] = second[i], first[i]
    table.num_pages[src], table.num_pages[tgt] = table.num_pages[tgt], table.num_pages[src]
    mark(table, src, 0, n)
    mark(table, tgt, 0, n)
    table.version += 1


cdef inline void mark_rows(Table *table, const int32_t *row_ids, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        mark(table, row_ids[i], 0, table.num_columns)
    table.version += 1


cdef inline Py_ssize_t map_slots(
    const Table *table, const int32_t *row_ids, const int32_t *positions, int32_t *slots, Py_ssize_t n, int64_t page_size
) noexcept nogil:
    """Write the slots of `n` tokens. Return the index of the first token outside the table or slot beyond int32, or `n`."""
    cdef Py_ssize_t i
    cdef uint32_t page, size = <uint32_t>page_size
    cdef int64_t slot, stop = page_size * table.num_columns
    for i in range(n):
        if GUARDS and not (0 <= row_ids[i] < table.num_rows and 0 <= positions[i] < stop):
            return i
        page = <uint32_t>positions[i] // size
        slot = table.page_ids[row_ids[i] * table.num_columns + page] * page_size + <uint32_t>positions[i] - page * size
        if GUARDS and not INT32_MIN <= slot <= INT32_MAX:
            return i
        slots[i] = <int32_t>slot
    return n


cdef inline Py_ssize_t count_dirty(const Table *table, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Count the dirty windows in rows ``[start, stop)``."""
    cdef Py_ssize_t row, i, count = 0
    assert 0 <= start and stop <= table.num_rows
    for row in range(start, stop):
        if table.is_row_dirty[row]:
            for i in range(row * table.num_windows, (row + 1) * table.num_windows):
                count += table.is_dirty[i]
    return count


cdef inline Py_ssize_t find_difference(const Table *table, const int32_t *sent) noexcept nogil:
    """Return the index of the first id outside dirty windows that differs from `sent`, or -1. A row's last two windows may
    overlap.
    """
    cdef Py_ssize_t i, column
    cdef const uint8_t *flags
    for i in range(table.num_rows * table.num_columns):
        if table.page_ids[i] == sent[i]:
            continue
        column = i % table.num_columns
        flags = table.is_dirty + i // table.num_columns * table.num_windows
        if not flags[column // WINDOW] and (column < table.num_columns - table.width or not flags[table.num_windows - 1]):
            return i
    return -1


cdef inline void clean(Table *table, Py_ssize_t stop) noexcept nogil:
    """Mark the windows of rows before `stop` as sent."""
    assert 0 <= stop <= table.num_rows
    memset(table.is_dirty, 0, stop * table.num_windows)
    memset(table.is_row_dirty, 0, stop)


cdef inline Py_ssize_t pack_windows(
    Table *table, Py_ssize_t stop, int32_t *windows, Py_ssize_t stride, int32_t *starts, Py_ssize_t room
) noexcept nogil:
    """Copy up to `room` dirty windows of rows before `stop` into lines of `stride` values, their rows and columns into
    `starts`, and mark them as sent. Return their number. The last window of a row ends with the row, and may overlap the one
    before.
    """
    cdef Py_ssize_t row, window, column, count = 0
    assert 0 <= stop <= table.num_rows and room >= 0
    for row in range(stop):
        if not table.is_row_dirty[row]:
            continue
        for window in range(table.num_windows):
            if not table.is_dirty[row * table.num_windows + window]:
                continue
            if count == room:
                return count
            assert table.width == min(WINDOW, table.num_columns) <= stride
            column = min(window * WINDOW, table.num_columns - table.width)
            memcpy(windows + count * stride, table.page_ids + row * table.num_columns + column, table.width * sizeof(int32_t))
            starts[2 * count], starts[2 * count + 1] = <int32_t>row, <int32_t>column
            table.is_dirty[row * table.num_windows + window] = 0
            count += 1
        table.is_row_dirty[row] = 0
    return count
