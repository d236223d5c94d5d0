# Rows of a page table. The caller checked row numbers and room.

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

cdef struct Append:           # ids to put behind those of a row
    Rows *rows
    Py_ssize_t row
    const int32_t *ids
    Py_ssize_t n


cdef inline void mark(Rows *rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Columns ``[start, stop)`` of a row are to be sent."""
    cdef Py_ssize_t first = start // WINDOW, last = (stop - 1) // WINDOW
    if start < stop:
        rows.is_dirty[row * rows.num_windows + first] = 1
        if last > first:
            memset(rows.is_dirty + row * rows.num_windows + first + 1, 1, last - first)
        rows.is_row_dirty[row] = 1
        rows.extent[row] = max(rows.extent[row], <int32_t>stop)


cdef inline void write_ids(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Let a row go on with these ids, and end, after its first `start`."""
    if n == 1:
        rows.table[row * rows.num_columns + start] = ids[0]
    elif n:  # without ids there is no pointer either, which memcpy must not get
        memcpy(rows.table + row * rows.num_columns + start, ids, n * sizeof(int32_t))
    rows.num_pages[row] = <int32_t>(start + n)
    mark(rows, row, start, start + n)


cdef inline void append_ids(Rows *rows, Py_ssize_t row, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    write_ids(rows, row, rows.num_pages[row], ids, n)


cdef inline bint fits(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Whether ids may stand in a row from column `start` on, and the row's count was not overwritten with nonsense."""
    if not GUARDS:
        return True
    return 0 <= rows.num_pages[row] <= rows.num_columns and n <= rows.num_columns - start and find_negative(ids, n) < 0


cdef inline Py_ssize_t append_all(const Append *appends, Py_ssize_t num) noexcept nogil:
    """All of them in order, or none; returns how many fit. Counts go up one by one as if it were done, and come back."""
    cdef Py_ssize_t i, num_fitting = 0
    cdef const Append *it = appends
    while num_fitting < num and fits(it.rows, it.row, it.rows.num_pages[it.row], it.ids, it.n):
        it.rows.num_pages[it.row] += <int32_t>it.n
        num_fitting += 1
        it += 1
    for i in range(num_fitting):
        appends[i].rows.num_pages[appends[i].row] -= <int32_t>appends[i].n
    if num_fitting == num:
        for i in range(num):
            append_ids(appends[i].rows, appends[i].row, appends[i].ids, appends[i].n)
            appends[i].rows.version += appends[i].n > 0
    return num_fitting


cdef inline void clear_from(Rows *rows, Py_ssize_t row, Py_ssize_t start) noexcept nogil:
    """Zeros from column `start` to the row's extent, which `start` becomes."""
    cdef Py_ssize_t stop = rows.extent[row]
    if start < stop:
        memset(rows.table + row * rows.num_columns + start, 0, (stop - start) * sizeof(int32_t))
        mark(rows, row, start, stop)
    rows.extent[row] = <int32_t>start


cdef inline void clear_one(Rows *rows, Py_ssize_t row) noexcept nogil:
    rows.num_pages[row] = 0
    clear_from(rows, row, 0)
    rows.version += 1


cdef inline void copy_row(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(rows.num_pages[src], rows.num_columns))  # the user may write it meanwhile
    if src == tgt:
        rows.version += 1
        return
    memcpy(rows.table + tgt * rows.num_columns, rows.table + src * rows.num_columns, n * sizeof(int32_t))
    rows.num_pages[tgt] = <int32_t>n
    mark(rows, tgt, 0, n)
    clear_from(rows, tgt, n)
    rows.version += 1


cdef inline void replace_row(Rows *rows, Py_ssize_t row, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    clear_one(rows, row)
    append_ids(rows, row, ids, n)


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
    """Slots of `n` tokens; returns how many there are before the first that is outside the table or does not fit int32."""
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


cdef inline Py_ssize_t count_dirty(Rows *rows, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Dirty windows in rows ``[start, stop)``."""
    cdef Py_ssize_t row, i, count = 0
    for row in range(start, stop):
        if rows.is_row_dirty[row]:
            for i in range(row * rows.num_windows, (row + 1) * rows.num_windows):
                count += rows.is_dirty[i]
    return count


cdef inline bint is_unsent(const Rows *rows, Py_ssize_t row, Py_ssize_t column) noexcept nogil:
    """Whether a window with that column is to be sent. The last window of a row ends with the row, and may begin before its
    place.
    """
    cdef const uint8_t *flags = rows.is_dirty + row * rows.num_windows
    return flags[column // WINDOW] or (column >= rows.num_columns - rows.width and flags[rows.num_windows - 1])


cdef inline void clean(Rows *rows, Py_ssize_t stop) noexcept nogil:
    """Nothing in rows before `stop` is to be sent any more."""
    memset(rows.is_dirty, 0, stop * rows.num_windows)
    memset(rows.is_row_dirty, 0, stop)


cdef inline Py_ssize_t pack_windows(
    Rows *rows, Py_ssize_t stop, int32_t *windows, Py_ssize_t stride, int32_t *starts, Py_ssize_t room
) noexcept nogil:
    """Copy up to `room` dirty windows of rows before `stop`, a line of `stride` values each, and where they begin, and mark
    them sent. Returns how many. The last window of a row ends with the row, whatever the row's width.
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
            starts[2 * count] = <int32_t>row
            starts[2 * count + 1] = <int32_t>column
            rows.is_dirty[row * rows.num_windows + window] = 0
            count += 1
        rows.is_row_dirty[row] = 0
    return count
