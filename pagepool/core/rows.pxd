# Rows of a page table. The caller checks row numbers.

from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcpy, memset

from pagepool.core.pages cimport find_negative
from pagepool.core.platform cimport GUARDS

cdef enum:
    WINDOW = 64               # columns of a page table that are sent to the device together

cdef struct Rows:
    int32_t *table            # [num_rows, num_columns] page ids
    int32_t *num_pages        # [num_rows]
    int32_t *extent           # [num_rows] leading columns that may hold something other than 0, here or on the device
    uint8_t *is_dirty         # [num_rows, num_windows] windows not sent yet
    uint8_t *is_row_dirty     # [num_rows] whether any window of the row is
    Py_ssize_t num_rows
    Py_ssize_t num_columns
    Py_ssize_t num_windows    # of a row
    Py_ssize_t width          # columns of a window: WINDOW, or all of a narrower table
    int64_t version           # moves with each change

cdef struct Put:              # ids to put into a row
    Rows *rows
    Py_ssize_t row
    Py_ssize_t start          # the column of the first
    const int32_t *ids
    Py_ssize_t n


cdef inline void mark(Rows *rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Mark columns ``[start, stop)`` of a row to be sent."""
    cdef Py_ssize_t first = start // WINDOW, last = (stop - 1) // WINDOW
    if start < stop:
        rows.is_dirty[row * rows.num_windows + first] = 1
        if last > first:
            memset(rows.is_dirty + row * rows.num_windows + first + 1, 1, last - first)
        rows.is_row_dirty[row] = 1
        rows.extent[row] = max(rows.extent[row], <int32_t>stop)


cdef inline void write_ids(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Write ids into a row from column `start` on; the last of them is the row's last."""
    if n == 1:
        rows.table[row * rows.num_columns + start] = ids[0]
    elif n:  # without ids there is no pointer either, which memcpy must not get
        memcpy(rows.table + row * rows.num_columns + start, ids, n * sizeof(int32_t))
    rows.num_pages[row] = <int32_t>(start + n)
    mark(rows, row, start, start + n)


cdef inline bint fits(const Put *put) noexcept nogil:
    """Return whether there is room, no id is negative, and the row's count was not overwritten with nonsense."""
    cdef const Rows *rows = put.rows
    cdef bint has_room = 0 <= rows.num_pages[put.row] <= rows.num_columns and put.n <= rows.num_columns - put.start
    return not GUARDS or (has_room and find_negative(put.ids, put.n) < 0)


cdef inline void blank(Rows *rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Put the null page into columns ``[start, stop)`` of a row."""
    memset(rows.table + row * rows.num_columns + start, 0, (stop - start) * sizeof(int32_t))
    mark(rows, row, start, stop)
    rows.version += 1


cdef inline void clear_from(Rows *rows, Py_ssize_t row, Py_ssize_t start) noexcept nogil:
    """Write zeros from column `start` to the row's extent, which becomes `start`."""
    cdef Py_ssize_t stop = rows.extent[row]
    if start < stop:
        memset(rows.table + row * rows.num_columns + start, 0, (stop - start) * sizeof(int32_t))
        mark(rows, row, start, stop)
    rows.extent[row] = <int32_t>start


cdef inline Py_ssize_t put_all(Put *puts, Py_ssize_t num, bint replaces) noexcept nogil:
    """Append to rows or replace them, all in order or none; return how many fit. Rows may repeat, so counts rise at once."""
    cdef Py_ssize_t i, num_fitting = 0
    cdef Put *put
    while num_fitting < num:
        put = &puts[num_fitting]
        put.start = 0 if replaces else put.rows.num_pages[put.row]
        if not fits(put):
            break
        put.rows.num_pages[put.row] += 0 if replaces else <int32_t>put.n
        num_fitting += 1
    for i in range(num_fitting):
        put = &puts[i]
        if num_fitting < num:
            put.rows.num_pages[put.row] -= 0 if replaces else <int32_t>put.n
            continue
        if replaces:
            clear_from(put.rows, put.row, 0)
        write_ids(put.rows, put.row, put.start, put.ids, put.n)
        put.rows.version += replaces or put.n > 0
    return num_fitting


ctypedef void (*RowChange)(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil


cdef inline void clear_row(Rows *rows, Py_ssize_t row, Py_ssize_t _) noexcept nogil:
    rows.num_pages[row] = 0
    clear_from(rows, row, 0)
    rows.version += 1


cdef inline void copy_row(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(rows.num_pages[src], rows.num_columns))  # the user may overwrite it meanwhile
    rows.version += 1
    if src != tgt:
        memcpy(rows.table + tgt * rows.num_columns, rows.table + src * rows.num_columns, n * sizeof(int32_t))
        rows.num_pages[tgt] = <int32_t>n
        mark(rows, tgt, 0, n)
        clear_from(rows, tgt, n)


cdef inline void swap_rows(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t i, n = max(rows.extent[src], rows.extent[tgt])
    cdef int32_t *first = rows.table + src * rows.num_columns
    cdef int32_t *second = rows.table + tgt * rows.num_columns
    for i in range(n):
        first[i], second[i] = second[i], first[i]
    rows.num_pages[src], rows.num_pages[tgt] = rows.num_pages[tgt], rows.num_pages[src]
    mark(rows, src, 0, n)
    mark(rows, tgt, 0, n)
    rows.version += 1


cdef inline void mark_rows(Rows *rows, const int32_t *row_ids, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        mark(rows, row_ids[i], 0, rows.num_columns)
    rows.version += 1


cdef inline Py_ssize_t map_slots(
    const Rows *rows, const int32_t *row_ids, const int32_t *positions, int32_t *slots, Py_ssize_t n, int64_t page_size
) noexcept nogil:
    """Write the slots of `n` tokens; return the index of the first that is outside the table or does not fit int32, or `n`."""
    cdef Py_ssize_t i
    cdef uint32_t page, size = <uint32_t>page_size
    cdef int64_t slot, stop = page_size * rows.num_columns
    for i in range(n):
        if GUARDS and not (0 <= row_ids[i] < rows.num_rows and 0 <= positions[i] < stop):
            return i
        page = <uint32_t>positions[i] // size
        slot = rows.table[row_ids[i] * rows.num_columns + page] * page_size + <uint32_t>positions[i] - page * size
        if GUARDS and not INT32_MIN <= slot <= INT32_MAX:
            return i
        slots[i] = <int32_t>slot
    return n


cdef inline Py_ssize_t count_dirty(const Rows *rows, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Return the number of dirty windows in rows ``[start, stop)``."""
    cdef Py_ssize_t row, i, count = 0
    for row in range(start, stop):
        if rows.is_row_dirty[row]:
            for i in range(row * rows.num_windows, (row + 1) * rows.num_windows):
                count += rows.is_dirty[i]
    return count


cdef inline Py_ssize_t find_difference(const Rows *rows, const int32_t *sent) noexcept nogil:
    """Return the place of the first id outside dirty windows that differs from `sent`, or -1. A row's last two may overlap."""
    cdef Py_ssize_t i, column
    cdef const uint8_t *flags
    for i in range(rows.num_rows * rows.num_columns):
        if rows.table[i] == sent[i]:
            continue
        column = i % rows.num_columns
        flags = rows.is_dirty + i // rows.num_columns * rows.num_windows
        if not flags[column // WINDOW] and (column < rows.num_columns - rows.width or not flags[rows.num_windows - 1]):
            return i
    return -1


cdef inline void clean(Rows *rows, Py_ssize_t stop) noexcept nogil:
    """Mark rows before `stop` as sent."""
    memset(rows.is_dirty, 0, stop * rows.num_windows)
    memset(rows.is_row_dirty, 0, stop)


cdef inline Py_ssize_t pack_windows(
    Rows *rows, Py_ssize_t stop, int32_t *windows, Py_ssize_t stride, int32_t *starts, Py_ssize_t room
) noexcept nogil:
    """Copy up to `room` dirty windows of rows before `stop` into lines of `stride` values, and where they begin into `starts`;
    mark them sent. Return their number. The last window of a row ends with the row, whatever the row's width.
    """
    cdef Py_ssize_t row, window, column, count = 0
    for row in range(stop):
        if not rows.is_row_dirty[row]:
            continue
        for window in range(rows.num_windows):
            if not rows.is_dirty[row * rows.num_windows + window]:
                continue
            if count == room:
                return count
            column = min(window * WINDOW, rows.num_columns - rows.width)
            memcpy(windows + count * stride, rows.table + row * rows.num_columns + column, rows.width * sizeof(int32_t))
            starts[2 * count], starts[2 * count + 1] = <int32_t>row, <int32_t>column
            rows.is_dirty[row * rows.num_windows + window] = 0
            count += 1
        rows.is_row_dirty[row] = 0
    return count
