"""Page tables."""

cimport cython
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.sequence cimport PySequence_Fast_ITEMS
from libc.stdint cimport INT32_MAX, INT32_MIN, int64_t, uint32_t
from libc.string cimport memcpy, memset

from pagepool.core.base cimport CACHE_LINE, GUARDS, MAX_PAGES, find_negative, process_number, require_allocated
from pagepool.core.values cimport as_list, as_page_ids, explained, int32_of, require_matrix, size_of

import numpy as np

from pagepool.errors import (
    ArgumentError, ArgumentTypeError, IntegrityError, PageIdError, RowIndexError, RowOverflowError, made_twice, not_made,
    shown,
)

cdef object INT32 = np.dtype(np.int32)
cdef int64_t MAX_LINE = 1 << 61


# Rows of one table. The caller holds its lock, and has checked row numbers.

cdef struct Put:              # ids to put into a row
    Table *table
    Py_ssize_t row
    Py_ssize_t start          # place of the first id
    const int32_t *ids
    Py_ssize_t n


cdef inline bint fits(const Put *put) noexcept nogil:
    """Whether there is room, no id is negative, and the user did not overwrite the row's count with a wrong one."""
    cdef const Table *table = put.table
    cdef Py_ssize_t num_places = count_table_places(table)
    cdef bint has_room = 0 <= table.num_pages[put.row] <= num_places and put.n <= num_places - put.start
    return not GUARDS or (has_room and find_negative(put.ids, put.n) < 0)


cdef inline Py_ssize_t put_all(Put *puts, Py_ssize_t num, bint replaces) noexcept nogil:
    """Append to rows or replace them, in order. If a put does not fit, change nothing. Return the number of puts before it, or
    `num`. Counts rise during the check, since rows may repeat.
    """
    cdef Py_ssize_t i, num_fitting = 0
    cdef Put *put
    while num_fitting < num:
        put = &puts[num_fitting]
        assert put.n >= 0 and 0 <= put.row < put.table.num_rows
        put.start = 0 if replaces else put.table.num_pages[put.row]
        if not fits(put):
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
        write_ids(put.table, put.row, put.start, put.ids, put.n, 0)
        put.table.version += replaces or put.n > 0
    return num_fitting


ctypedef void (*RowChange)(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil


cdef inline void clear_row(Table *table, Py_ssize_t row, Py_ssize_t _) noexcept nogil:
    assert 0 <= row < table.num_rows
    table.num_pages[row] = 0
    clear_from(table, row, 0)
    table.version += 1


cdef inline void copy_row(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(table.num_pages[src], count_table_places(table)))  # the user may overwrite it meanwhile
    assert 0 <= src < table.num_rows and 0 <= tgt < table.num_rows
    table.version += 1
    if src != tgt:
        memcpy(ids_at(table, tgt), ids_at(table, src), n * sizeof(int32_t))
        table.num_pages[tgt] = <int32_t>n
        set_dirty(table, tgt, table.num_sinks, table.num_sinks + n)
        clear_from(table, tgt, n)


cdef inline void swap_rows(Table *table, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t i, n = max(table.extent[src], table.extent[tgt])
    cdef int32_t *first = table.page_ids + src * table.num_columns
    cdef int32_t *second = table.page_ids + tgt * table.num_columns
    assert 0 <= src < table.num_rows and 0 <= tgt < table.num_rows and 0 <= n <= table.num_columns
    for i in range(n):
        first[i], second[i] = second[i], first[i]
    table.num_pages[src], table.num_pages[tgt] = table.num_pages[tgt], table.num_pages[src]
    set_dirty(table, src, 0, n)
    set_dirty(table, tgt, 0, n)
    table.version += 1


cdef inline void set_rows_dirty(Table *table, const int32_t *row_ids, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        set_dirty(table, row_ids[i], 0, table.num_columns)
    table.version += 1


cdef inline Py_ssize_t map_slots(
    const Table *table, const int32_t *row_ids, const int32_t *positions, int32_t *slots, Py_ssize_t n, int64_t page_size
) noexcept nogil:
    """Write the slots of tokens. Return the index of the first one outside the table, or with a slot beyond int32, or `n`."""
    cdef Py_ssize_t i
    cdef uint32_t page, size = <uint32_t>page_size
    cdef int64_t slot, stop = page_size * count_table_places(table)
    for i in range(n):
        if GUARDS and not (0 <= row_ids[i] < table.num_rows and 0 <= positions[i] < stop):
            return i
        page = <uint32_t>positions[i] // size
        slot = ids_at(table, row_ids[i])[page] * page_size + <uint32_t>positions[i] - page * size
        if GUARDS and not INT32_MIN <= slot <= INT32_MAX:
            return i
        slots[i] = <int32_t>slot
    return n


cdef inline Py_ssize_t count_dirty(const Table *table, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Count the dirty segments in rows ``[start, stop)``."""
    cdef Py_ssize_t row, i, count = 0
    assert 0 <= start and stop <= table.num_rows
    for row in range(start, stop):
        if table.is_row_dirty[row]:
            for i in range(row * table.num_segments, (row + 1) * table.num_segments):
                count += table.is_dirty[i]
    return count


cdef inline Py_ssize_t find_difference(const Table *table, const int32_t *sent) noexcept nogil:
    """Return the index of the first id outside dirty segments that differs from `sent`, or -1. A row's last two segments may
    overlap.
    """
    cdef Py_ssize_t i, column
    cdef const uint8_t *flags
    for i in range(table.num_rows * table.num_columns):
        if table.page_ids[i] == sent[i]:
            continue
        column = i % table.num_columns
        flags = table.is_dirty + i // table.num_columns * table.num_segments
        if not flags[column // SEGMENT] and (column < table.num_columns - table.width or not flags[table.num_segments - 1]):
            return i
    return -1


cdef inline void clean(Table *table, Py_ssize_t stop) noexcept nogil:
    """Clear the dirty flags of rows before `stop`."""
    assert 0 <= stop <= table.num_rows
    memset(table.is_dirty, 0, stop * table.num_segments)
    memset(table.is_row_dirty, 0, stop)


cdef inline void show_sinks(Table *table) noexcept nogil:
    """Set the dirty flags of the sinks in all rows."""
    cdef Py_ssize_t row
    for row in range(table.num_rows):
        set_dirty(table, row, 0, table.num_sinks)


cdef inline bint find_dirty(Table *table, Py_ssize_t stop, Py_ssize_t *row, Py_ssize_t *segment) noexcept nogil:
    """Find the next dirty segment in rows before `stop`, from `row` and `segment` on, which are set to its place. Clear the
    flags of rows passed by. Return whether there is one.
    """
    assert 0 <= row[0] and stop <= table.num_rows
    while row[0] < stop:
        if table.is_row_dirty[row[0]]:
            while segment[0] < table.num_segments:
                if table.is_dirty[row[0] * table.num_segments + segment[0]]:
                    return True
                segment[0] += 1
            table.is_row_dirty[row[0]] = 0
        row[0] += 1
        segment[0] = 0
    return False


cdef inline Py_ssize_t pack_segments(
    Table *table, Py_ssize_t stop, int32_t *segments, Py_ssize_t stride, int32_t *starts, Py_ssize_t room
) noexcept nogil:
    """Copy up to `room` dirty segments of rows before `stop` into lines of `stride` values, write their rows and columns to
    `starts`, and clear their flags. Return their number. The last segment of a row ends with the row, and may overlap the one
    before.
    """
    cdef Py_ssize_t column, row = 0, segment = 0, count = 0
    assert room >= 0
    while find_dirty(table, stop, &row, &segment) and count < room:
        assert table.width == min(SEGMENT, table.num_columns) <= stride
        column = min(segment * SEGMENT, table.num_columns - table.width)
        memcpy(segments + count * stride, table.page_ids + row * table.num_columns + column, table.width * sizeof(int32_t))
        starts[2 * count], starts[2 * count + 1] = <int32_t>row, <int32_t>column
        table.is_dirty[row * table.num_segments + segment] = 0
        count += 1
    return count


cdef struct DeviceTable:      # place of a table on a device that is divided into lines
    int64_t first             # number of its first line
    Py_ssize_t num_columns    # values in a row
    Py_ssize_t width          # values in a line


cdef inline Py_ssize_t pack_lines(
    Table *table, Py_ssize_t stop, const DeviceTable *device, int64_t *numbers, int32_t *lines, Py_ssize_t room
) noexcept nogil:
    """Copy dirty segments of rows before `stop` into up to `room` lines, with zeros behind the table's columns, write the
    lines' numbers on the device to `numbers`, and clear the segments' flags. Return the number of lines.
    """
    cdef Py_ssize_t num_columns = device.num_columns, width = device.width
    cdef Py_ssize_t i, start, num, num_ids, row = 0, segment = 0, count = 0
    assert room >= 0 and SEGMENT % width == 0 and num_columns % width == 0 and table.num_columns <= num_columns
    while find_dirty(table, stop, &row, &segment):
        start = segment * SEGMENT
        num, num_ids = min(SEGMENT, num_columns - start) // width, min(SEGMENT, table.num_columns - start)
        if count + num > room:
            break
        memcpy(lines + count * width, table.page_ids + row * table.num_columns + start, num_ids * sizeof(int32_t))
        memset(lines + count * width + num_ids, 0, (num * width - num_ids) * sizeof(int32_t))
        for i in range(num):
            numbers[count + i] = device.first + (row * num_columns + start) // width + i
        table.is_dirty[row * table.num_segments + segment] = 0
        count += num
    return count


cdef object make_aligned_zeros(Py_ssize_t num_rows, Py_ssize_t num_columns):
    """Return int32 zeros that begin at a cache line, which makes copies of whole tables faster."""
    cdef Py_ssize_t start, num_values = num_rows * num_columns
    cdef int32_t[::1] memory
    memory = array = np.zeros(num_values + CACHE_LINE // 4, dtype=INT32)
    start = -<size_t>&memory[0] % CACHE_LINE // 4
    return array[start:start + num_values].reshape(num_rows, num_columns)


cdef int require_made(const Table *table) except -1:
    if not table.num_rows:
        raise not_made("page table")
    return 0


cdef int check_count(const Table *table, Py_ssize_t row) except -1:
    """Raise IntegrityError if the row's count is outside the table: the user may have overwritten `num_pages_per_row`."""
    if not 0 <= table.num_pages[row] <= count_table_places(table):
        raise IntegrityError(
            f"row {row} has {table.num_pages[row]} pages, allowed: 0 to {count_table_places(table)}; "
            "num_pages_per_row was overwritten"
        )
    return 0


cdef int refuse_put(const Put *put) except -1:
    """Raise the error for ids that do not fit."""
    cdef Py_ssize_t bad = find_negative(put.ids, put.n)
    check_count(put.table, put.row)
    if bad >= 0:
        raise PageIdError(f"page id: got {put.ids[bad]} (at {bad}), allowed: at least 0")
    raise RowOverflowError(
        f"row {put.row}: got {put.n} pages behind {put.start} that it has, allowed: {count_table_places(put.table)} in all"
    )


cdef inline Table *table_at(TableGroup group, Py_ssize_t i) noexcept:
    return &(<TableRows>group.tables[i]).table


cdef inline int lock_tables(TableGroup group) except -1:
    cdef Py_ssize_t i
    for i in range(group.num_tables):
        (<TableRows>group.lock_order[i]).require_own()
    for i in range(group.num_tables):
        (<TableRows>group.lock_order[i]).lock.acquire()
    return 0


cdef inline void unlock_tables(TableGroup group) noexcept:
    cdef Py_ssize_t i
    for i in range(group.num_tables):
        (<TableRows>group.lock_order[i]).lock.release()


cdef inline int change_tables(TableGroup group, RowChange change_row, Py_ssize_t src, Py_ssize_t tgt) except -1:
    cdef Py_ssize_t i
    lock_tables(group)
    for i in range(group.num_tables):
        change_row(table_at(group, i), src, tgt)
    unlock_tables(group)
    return 0


cdef list flatten(list requests, Py_ssize_t num_tables):
    """Return one list of the ids for each table of each request."""
    cdef list flat = []
    for request in requests:
        groups = as_list(request, "page_ids")
        if len(groups) != num_tables:
            raise ArgumentError(f"page_ids: got {len(groups)} groups, allowed: {num_tables}")
        flat += groups
    return flat


cdef class TableGroup:
    """Tables with the same rows. A call changes all of them, or none."""

    def __reduce__(self):
        raise ArgumentTypeError("a page table cannot be pickled")

    cdef Py_ssize_t checked_row(self, object row) except -1:
        """Return `row` as a number, or raise the error for it. Without tables any value is allowed."""
        cdef int32_t checked
        if not self.num_tables:
            return 0
        try:
            checked = int32_of(row)
        except OverflowError:
            checked = -1
        except TypeError as error:
            raise explained("row", error) from None
        if not 0 <= checked < table_at(self, 0).num_rows:
            raise RowIndexError(f"row: got {shown(row)}, allowed: 0 to {table_at(self, 0).num_rows - 1}")
        return checked

    cdef int put_one(self, object page_ids, object row, bint replaces) except -1:
        return self.put_several([page_ids], [row], replaces)

    cdef int put_several(self, object page_ids_per_req, object req_indices, bint replaces) except -1:
        """Put ids into rows; if some do not fit, put none, and raise the error for the first of these."""
        rows = req_indices.tolist() if isinstance(req_indices, np.ndarray) else req_indices
        cdef list requests = list(as_list(page_ids_per_req, "page_ids"))  # a copy: reading an id may run Python code
        cdef list row_ids = list(as_list(rows, "req_indices"))
        cdef Py_ssize_t i, num_fitting, num_tables = self.num_tables
        cdef bytearray memory
        cdef Put *puts
        cdef PageIds ids
        if requests and len(requests) != len(row_ids):
            raise ArgumentError(f"req_indices: got {len(row_ids)}, allowed: as many as requests, {len(requests)}")
        if not isinstance(self, TableRows):
            requests = flatten(requests, num_tables)
        memory = bytearray(len(requests) * sizeof(Put))
        puts = <Put *><char *>memory
        for i in range(len(requests)):
            requests[i] = ids = as_page_ids(requests[i])
            puts[i] = Put(
                table=table_at(self, i % num_tables), row=self.checked_row(row_ids[i // num_tables]), start=0,
                ids=ids.ids, n=ids.num,
            )
        lock_tables(self)
        num_fitting = put_all(puts, len(requests), replaces)
        unlock_tables(self)
        return 0 if num_fitting == len(requests) else refuse_put(&puts[num_fitting])

    def append_row(self, page_ids, row_idx) -> None:
        """Append page ids to a row: a list or an int32 array, or one for each table of a group. Without ids, do nothing.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
        self.put_one(page_ids, row_idx, False)

    def append_rows_batch(self, page_ids_per_req, req_indices) -> None:
        """Append each request's ids to its row as `append_row` does, in order; rows may repeat. All or nothing. O(ids)."""
        self.put_several(page_ids_per_req, req_indices, False)

    def add_row(self, page_ids, row_idx) -> None:
        """Replace a row's pages by page ids. O(ids + pages that the row had)."""
        self.put_one(page_ids, row_idx, True)

    def clear_row(self, row_idx) -> None:
        """Empty a row. O(pages that it had)."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        change_tables(self, clear_row, row, row)

    def move_row(self, src, tgt) -> None:
        """Copy row `src` over row `tgt`, with zeros behind the copied pages; `src` stays. O(pages of both)."""
        cdef Py_ssize_t i, source = self.checked_row(src), target = self.checked_row(tgt)
        for i in range(self.num_tables):
            check_count(table_at(self, i), source)
        change_tables(self, copy_row, source, target)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows. O(pages of both)."""
        change_tables(self, swap_rows, self.checked_row(src), self.checked_row(tgt))

    def mark_dirty(self, rows=None) -> None:
        """Mark rows (a list or an array; None: all) as changed, after writing to `page_table_cpu` directly."""
        cdef Py_ssize_t i
        cdef PageIds row_ids
        if self.num_tables:
            numbers = range(table_at(self, 0).num_rows) if rows is None else rows
            row_ids = PageIds([self.checked_row(row) for row in as_list(numbers, "rows", False)])
            lock_tables(self)
            for i in range(self.num_tables):
                set_rows_dirty(table_at(self, i), row_ids.ids, row_ids.num)
            unlock_tables(self)


cdef class TableRows(TableGroup):
    """The host side of a page table: int32 ``[num_rows, num_columns]`` page ids, with zeros behind each row's last page.

    `pagepool.PageTable` adds the device side. Each change is one native call, flags the segments of 64 columns that it touched,
    and increases ``cpu_version``. A wrong call changes nothing.
    """

    def __cinit__(self, *args, **kwargs):
        self.itself = <PyObject *>self
        self.tables = self.lock_order = &self.itself
        self.num_tables = 1
        self.process = process_number
        require_allocated(&self.lock)

    def __init__(self, num_rows, num_columns, sink_page_ids=()):
        """Make a table of empty rows, each with room for `num_columns` pages behind the pages `sink_page_ids`; both sizes are
        at least 1.
        """
        cdef PageIds sinks = as_page_ids(sink_page_ids, "sink_page_ids")
        cdef Py_ssize_t n = size_of(num_rows, "max_num_reqs", 1)
        cdef Py_ssize_t columns = size_of(num_columns, "max_num_pages_per_req", 1) + sinks.num
        cdef Py_ssize_t num_segments = (columns + SEGMENT - 1) // SEGMENT
        if n * columns > MAX_PAGES:
            raise ArgumentError(f"page table: got {n} x {columns}, allowed: {MAX_PAGES} ids in all")
        cdef tuple sink_ids = tuple(sinks.to_list())
        for i, page_id in enumerate(sink_ids):
            if page_id < 1 or page_id in sink_ids[:i]:
                raise PageIdError(f"sink_page_ids: got {page_id} (at {i}), allowed: at least 1, and each once")
        page_table, num_pages = make_aligned_zeros(n, columns), np.zeros(n, dtype=INT32)
        page_table[:, :sinks.num] = sink_ids
        extent, flags = np.full(n, sinks.num, dtype=INT32), np.zeros(n * (num_segments + 1), dtype=np.uint8)
        if self.table.num_rows:  # checked after everything that may run Python code
            raise made_twice("rows of a table")
        self.page_table_cpu, self.num_pages_per_row, self.sink_page_ids = page_table, num_pages, sink_ids
        self.table_view, self.num_pages_view, self.extent_view, self.flags_view = page_table, num_pages, extent, flags
        self.table = Table(
            page_ids=&self.table_view[0, 0], num_pages=&self.num_pages_view[0], extent=&self.extent_view[0],
            is_row_dirty=&self.flags_view[0], is_dirty=&self.flags_view[n],
            num_rows=n, num_columns=columns, num_segments=num_segments, width=min(columns, SEGMENT), version=0, num_rewrites=0,
            num_sinks=sinks.num,
        )
        show_sinks(&self.table)

    @property
    def max_num_reqs(self) -> int:
        """Number of rows."""
        return self.table.num_rows

    @property
    def max_num_pages_per_req(self) -> int:
        """Number of columns, with those of sinks."""
        return self.table.num_columns

    @property
    def cpu_version(self) -> int:
        """A number that grows with each change of the host table."""
        return self.table.version

    cdef int put_one(self, object page_ids, object row, bint replaces) except -1:
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef PageIds ids = as_page_ids(page_ids)
        cdef Put item = Put(table=&self.table, row=checked, start=0, ids=ids.ids, n=ids.num)
        cdef bint is_done
        with self.own_lock()[0]:
            is_done = put_all(&item, 1, replaces)
        return 0 if is_done else refuse_put(&item)

    def slot_mapping(self, rows, positions, page_size) -> np.ndarray:
        """Return the slots of tokens, ``table[row, position // page_size] * page_size + position % page_size``, as int32
        ``[num_tokens]``. Positions count from the first token behind the sinks.

        `rows` and `positions` are int arrays or lists of one length. RowIndexError for a token outside the table, ArgumentError
        for a slot that does not fit int32. O(tokens), native.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows"), at = as_page_ids(positions, "positions")
        cdef int64_t size = size_of(page_size, "page_size", 1)
        cdef Py_ssize_t bad, num_rows = self.table.num_rows, stop = size * count_table_places(&self.table)
        cdef int32_t[::1] slots
        if row_ids.num != at.num:
            raise ArgumentError(f"positions: got {at.num}, allowed: as many as rows, {row_ids.num}")
        result = np.empty(at.num, dtype=INT32)
        if at.num:
            slots = result
            with self.own_lock()[0]:
                bad = map_slots(&self.table, row_ids.ids, at.ids, &slots[0], at.num, size)
            if bad < at.num:
                got = f"slot: got row {row_ids.ids[bad]}, position {at.ids[bad]} (at {bad})"
                if 0 <= row_ids.ids[bad] < num_rows and 0 <= at.ids[bad] < stop:
                    raise ArgumentError(f"{got}, allowed: slots that fit int32")
                raise RowIndexError(f"{got}, allowed: rows below {num_rows}, positions below {stop}")
        return result

    def check(self) -> None:
        """Raise IntegrityError for the first wrong row: its count exceeds the table or its extent, a page id is negative, an id
        behind its extent is not zero, or it has dirty segments and is not dirty itself. O(table).
        """
        cdef Py_ssize_t row
        cdef str flaw = None
        with self.own_lock()[0]:
            for row in range(self.table.num_rows):
                flaw = flaw or find_row_flaw(&self.table, row)
        if flaw is not None:
            raise IntegrityError(flaw)

    # The device side calls these.

    def find_unsent(self, device_table) -> tuple | None:
        """Return the row and column of the first id that differs from `device_table`, an int32 array of the table's shape,
        though its segment counts as sent; None if there is none. O(table).
        """
        cdef const int32_t[:, ::1] view = np.ascontiguousarray(require_matrix(device_table, np.int32, "device_table"))
        cdef Py_ssize_t index, num_rows = self.table.num_rows, num_columns = self.table.num_columns
        if view.shape[0] != num_rows or view.shape[1] != num_columns:
            raise ArgumentError(f"device_table: got {view.shape[0]} x {view.shape[1]}, allowed: {num_rows} x {num_columns}")
        require_made(&self.table)
        with self.own_lock()[0]:
            index = find_difference(&self.table, &view[0, 0])
        return None if index < 0 else (index // num_columns, index % num_columns)

    def count_dirty_segments(self, start, stop) -> int:
        """Count the segments in rows ``[start, stop)`` that were not sent yet."""
        cdef Py_ssize_t last = size_of(stop, "num_reqs", 0, self.table.num_rows)
        cdef Py_ssize_t count, first = size_of(start, "start", 0, self.table.num_rows)
        with self.own_lock()[0]:
            count = count_dirty(&self.table, first, last)
        return count

    def copy_aligned(self, num_rows=None) -> np.ndarray:
        """Return a copy of the first rows, by default of all, and clear their dirty flags."""
        require_made(&self.table)
        cdef Py_ssize_t n = self.table.num_rows if num_rows is None else size_of(num_rows, "num_rows", 0, self.table.num_rows)
        copied = make_aligned_zeros(n, self.table.num_columns)
        cdef int32_t[:, ::1] view = copied
        cdef int32_t *ids = NULL
        if n:
            ids = &view[0, 0]
            with self.own_lock()[0], nogil:
                memcpy(ids, self.table.page_ids, n * self.table.num_columns * sizeof(int32_t))
                clean(&self.table, n)
        return copied

    def clear_rows(self) -> None:
        """Empty all rows, and clear all dirty flags but those of sinks, before the device copy is made anew. O(pages in the
        table).
        """
        cdef Py_ssize_t row
        require_made(&self.table)
        with self.own_lock()[0]:
            for row in range(self.table.num_rows):
                clear_row(&self.table, row, row)
            clean(&self.table, self.table.num_rows)
            show_sinks(&self.table)


cdef str find_row_flaw(const Table *table, Py_ssize_t row):
    """Describe what is wrong with a row; None if nothing is."""
    cdef const int32_t *ids = table.page_ids + row * table.num_columns
    cdef Py_ssize_t i, num_dirty = 0
    cdef int32_t num_pages = table.num_pages[row], extent = table.extent[row]
    if not table.num_sinks <= table.num_sinks + num_pages <= extent <= table.num_columns:
        return f"row {row} has {num_pages} pages, reaches to {extent} of {table.num_columns} columns"
    for i in range(table.num_columns):
        if ids[i] < 0 and i < table.num_sinks + num_pages:
            return f"row {row}: page {ids[i]} (at {i}), allowed: at least 0"
        if ids[i] != 0 and i >= extent:
            return f"row {row}: page {ids[i]} (at {i}) behind the row's reach, {extent}; no mark_dirty?"
    for i in range(row * table.num_segments, (row + 1) * table.num_segments):
        num_dirty += table.is_dirty[i]
    if num_dirty and not table.is_row_dirty[row]:
        return f"row {row} has {num_dirty} segments to be sent, and is not dirty"
    return None


cdef tuple in_lock_order(tuple tables):
    """Return tables in locking order, the same in every call, so that calls cannot deadlock."""
    return tuple(sorted(tables, key=id))


cdef tuple checked_tables(object page_tables):
    """Return `page_tables` as a tuple; raise unless they are distinct tables with the same number of rows."""
    cdef tuple tables = tuple(as_list(page_tables, "page_tables"))
    for table in tables:
        if not isinstance(table, TableRows) or not 0 < table.max_num_reqs == tables[0].max_num_reqs:
            got = f"one of {table.max_num_reqs} rows" if isinstance(table, TableRows) else type(table).__name__
            raise ArgumentError(f"page_tables: got {got}, allowed: page tables with one number of rows")
        (<TableRows>table).require_own()
    if len({id(table) for table in tables}) != len(tables):
        raise ArgumentError("page_tables: got one twice, allowed: each once")
    return tables


@cython.no_gc_clear  # the base's pointers point into the tuples
cdef class GroupedRows(TableGroup):
    """The host tables of several cache groups with the same rows."""

    cdef readonly tuple page_tables
    cdef tuple in_lock_order

    def __cinit__(self, *args, **kwargs):
        self.page_tables = ()

    def __init__(self, page_tables):
        """Group `page_tables`, distinct `TableRows` with the same number of rows."""
        cdef tuple tables = checked_tables(page_tables)
        if self.num_tables:
            raise made_twice("tables of groups")
        self.page_tables, self.in_lock_order = tables, in_lock_order(tables)
        self.tables, self.lock_order = PySequence_Fast_ITEMS(tables), PySequence_Fast_ITEMS(self.in_lock_order)
        self.num_tables = len(tables)

    def __len__(self) -> int:
        return self.num_tables

    def __getitem__(self, i):
        return self.page_tables[i]


def pack_dirty_segments(tuple tables not None, num_reqs, num_lines) -> tuple:
    """Return a payload for the device, with a line for each dirty segment in rows before `num_reqs`: the values, int32
    ``[num_lines, width]``, and the row and column where each line begins in each table, int32 ``[num_tables, num_lines, 2]``.
    Packed segments count as sent; segments without room do not. In the other tables a line begins in a row outside the table,
    and no row repeats.
    """
    cdef TableRows table
    cdef Py_ssize_t n, lines = size_of(num_lines, "num_lines", 1), width = 0, count = 0
    cdef int32_t group
    cdef int32_t[:, ::1] segments
    cdef int32_t[:, :, ::1] starts
    for item in tables:
        if not isinstance(item, TableRows):
            raise ArgumentTypeError(f"tables: got {type(item).__name__}, allowed: TableRows")
        require_made(&(<TableRows>item).table)
        width = max(width, (<TableRows>item).table.width)
    payload = np.zeros((lines, width), dtype=INT32), np.zeros((len(tables), lines, 2), dtype=INT32)
    segments, starts = payload
    for group, item in enumerate(tables):
        table = item
        stop = size_of(num_reqs, "num_reqs", 0, table.table.num_rows)
        for n in range(lines):
            starts[group, n, 0] = <int32_t>(table.table.num_rows + n)
        if count < lines:
            with table.own_lock()[0]:
                count += pack_segments(
                    &table.table, stop, &segments[count, 0], segments.shape[1], &starts[group, count, 0], lines - count
                )
    return payload


cdef object require_room(object values, object dtype, Py_ssize_t num_dimensions, str name):
    """Return `values`, which must be a plain contiguous array of this type that can be written to."""
    if type(values) is not np.ndarray or values.dtype != dtype or values.ndim != num_dimensions:
        allowed = f"an array of {np.dtype(dtype)} with {num_dimensions} dimensions"
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: {allowed}")
    if not values.flags.carray:
        raise ArgumentError(f"{name}: got an array that is read-only or not contiguous, allowed: one to write to")
    return values


def pack_dirty_lines(tuple tables not None, num_reqs, places, numbers, lines) -> int:
    """Copy the dirty segments in rows before `num_reqs` into `lines`, int32 ``[room, width]``, for a device that divides its
    tables into lines; the width divides 64. Write the numbers of these lines to `numbers`, int64 ``[room]``; return how many
    there are. `places`, int64 ``[num_tables, 2]``, has each table's first line and its number of columns on the device.

    Packed segments count as sent; segments without room do not.
    """
    cdef TableRows table
    cdef DeviceTable device
    cdef const int64_t[:, ::1] place = np.ascontiguousarray(require_matrix(places, np.int64, "places"))
    cdef int64_t[::1] into = require_room(numbers, np.int64, 1, "numbers")
    cdef int32_t[:, ::1] values = require_room(lines, np.int32, 2, "lines")
    cdef Py_ssize_t i, stop, num_rows = PY_SSIZE_T_MAX, width = values.shape[1], room = values.shape[0], count = 0
    if into.shape[0] != room or place.shape[0] != len(tables) or place.shape[1] != 2:
        raise ArgumentError(f"places, numbers: got {place.shape[0]} x {place.shape[1]} and {into.shape[0]}, "
                            f"allowed: {len(tables)} x 2 and {room}")
    if not 0 < width <= SEGMENT or SEGMENT % width:
        raise ArgumentError(f"lines: got a width of {width}, allowed: a divisor of {SEGMENT}")
    for i, item in enumerate(tables):
        if not isinstance(item, TableRows):
            raise ArgumentTypeError(f"tables: got {type(item).__name__}, allowed: TableRows")
        require_made(&(<TableRows>item).table)
        num_rows = min(num_rows, (<TableRows>item).table.num_rows)
        columns = (<TableRows>item).table.num_columns
        if not 0 <= place[i, 0] <= MAX_LINE or not columns <= place[i, 1] <= INT32_MAX or place[i, 1] % width:
            raise ArgumentError(f"places: got line {place[i, 0]} and {place[i, 1]} columns, allowed: lines up to {MAX_LINE}, "
                                f"multiples of {width} from {columns} columns on")
    stop = size_of(num_reqs, "num_reqs", 0, num_rows)
    for i, item in enumerate(tables):
        table = item
        if count < room:
            device = DeviceTable(first=place[i, 0], num_columns=place[i, 1], width=width)
            with table.own_lock()[0]:
                count += pack_lines(&table.table, stop, &device, &into[count], &values[count, 0], room - count)
    return count
