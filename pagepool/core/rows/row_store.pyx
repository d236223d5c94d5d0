"""The rows of a batch, their memory and locks."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.string cimport memcpy

from pagepool.core.base cimport CACHE_LINE, MAX_LANES, has_avx2, keep_sparse, process_number, require_allocated
from pagepool.core.holding cimport limit_drafts
from pagepool.core.tables cimport TableRows

import numpy as np

from pagepool.core.pool.keeping import keep_whole_digests
from pagepool.errors import ArgumentError, not_made

cdef object ROW_RECORD = np.dtype(
    [(name, "u4" if name == "told_step" else "i4") for name in (
        "num_tokens", "num_computed", "num_planned", "num_resolved", "next_plan", "next_settle", "told_step",
    )] + [("state", "u1"), ("is_admitted", "?"), ("launches", "i2")]
)


cdef inline Py_ssize_t odd_lines(Py_ssize_t num_values, Py_ssize_t size) noexcept nogil:
    """Return the stride of rows with at least `num_values` values of `size` bytes: an odd number of cache lines, so that the
    ends of rows, which a step writes, fall into different sets of the cache.
    """
    cdef Py_ssize_t num_in_line = CACHE_LINE // size
    return ((num_values + num_in_line - 1) // num_in_line | 1) * num_in_line


@cython.final
@cython.auto_pickle(False)
cdef class Buffer:
    """A matrix of int32 zeros, read-only for Python. MemoryError if it does not fit the address space."""

    cdef char *memory
    cdef int32_t *values
    cdef Py_ssize_t num_bytes

    def __cinit__(self, Py_ssize_t num_rows, Py_ssize_t num_columns):
        if num_columns <= INT64_MAX // <Py_ssize_t>sizeof(int32_t) // num_rows - CACHE_LINE:
            self.num_bytes = num_rows * num_columns * sizeof(int32_t)
            self.memory = <char *>calloc(self.num_bytes + CACHE_LINE, 1)
        if self.memory == NULL:
            raise MemoryError(f"{num_rows} x {num_columns} int32 values")
        keep_sparse(self.memory, self.num_bytes + CACHE_LINE)
        self.values = <int32_t *>(self.memory + CACHE_LINE - <size_t>self.memory % CACHE_LINE)

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.values, self.num_bytes, 1, flags)


@cython.final
@cython.no_gc  # in no cycle: it has numbers alone
@cython.auto_pickle(False)
cdef class Stays:
    """The stays of a batch's rows just before its next exchange of rows.

    Results of calls refer to this object: listing the stays of their rows would cost time in each call.
    """

    def __dealloc__(self):
        free(self.by_row)


@cython.final
@cython.auto_pickle(False)
@cython.no_gc_clear  # __dealloc__ reads its buffers, which are in a tuple: the garbage collector would empty a list
cdef class RowStore:
    """The rows of a batch: a `Batch`, the objects that it points into, and its locks.

    Memory is used only for tokens and pages that rows have had: 4 bytes a token, 16 a hashed page, 4 a page and group.
    """

    def __cinit__(self):
        self.process = process_number
        self.stays_now = Stays.__new__(Stays)
        require_allocated(&self.lock)

    def __dealloc__(self):
        cdef Py_ssize_t row
        if self.process != process_number:  # another thread may have been changing it
            return
        for row in range(self.batch.num_rows):
            free(self.batch.rows[row].extra_keys)
        free(self.batch.writes.items)
        free(self.batch.fills.items)
        free(self.batch.made)

    cdef void set_shortage(self, const Shortage *shortage) noexcept:
        """Set why an admission is refused; NULL: it was not. The batch's lock is held."""
        self.is_short = shortage != NULL
        if shortage != NULL:
            self.shortage = shortage[0]

    # Locks: the batch's first, then the store's, then the tables'. No Python object is made while they are held.

    cdef void release_locks(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.release()
        self.store.lock.release()
        self.lock.release()

    cdef int check_made(self) except -1:
        if not self.batch.num_rows:
            raise not_made("batch")
        return 0

    cdef int acquire_locks(self) except -1:
        """Take all locks, and divide the pool into the shards that the rows need."""
        self.check_made()
        cdef cython.pymutex *lock = self.own_lock()
        self.store.require_own()
        lock[0].acquire()
        self.store.lock_divided(self.num_shards, lock)
        for table in self.lock_order:
            (<TableRows>table).lock.acquire()
        return 0

    cdef Py_ssize_t checked_row(self, object row) except -1:
        self.check_made()
        return (<TableRows>self.tables[0]).checked_row(row)

    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept:
        """Drop the row's extra keys, and its digests, which depend on them."""
        self.batch.rows[row].num_hashed = 0
        free(self.batch.rows[row].extra_keys)
        self.batch.rows[row].extra_keys = NULL
        self.extra_key_bytes[row] = None

    cdef bint copy_extra_keys(self, Py_ssize_t source, PageIds targets, list forgotten) noexcept:
        """Give free rows the extra keys of the source, and move their old ones to `forgotten`. False if memory is short: then
        rows that already have the new keys have no digests.
        """
        cdef Batch *batch = &self.batch
        cdef ExtraKey *keys = batch.rows[source].extra_keys
        cdef Py_ssize_t i, row, num_keys = 1
        while keys != NULL and keys[num_keys - 1].page != LAST_PAGE:
            num_keys += 1
        for i in range(targets.num):
            row = targets.ids[i]
            forgotten[2 * i], forgotten[2 * i + 1] = self.refusals[row], self.extra_key_bytes[row]
            self.refusals[row] = None
            self.forget_extra_keys(row)
            if keys != NULL:
                batch.rows[row].extra_keys = <ExtraKey *>malloc(num_keys * sizeof(ExtraKey))
                if batch.rows[row].extra_keys == NULL:
                    return False
                memcpy(batch.rows[row].extra_keys, keys, num_keys * sizeof(ExtraKey))
                self.extra_key_bytes[row] = self.extra_key_bytes[source]
        return True

    cdef int exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
        """Move an admitted row to a free one, or exchange two rows."""
        cdef Batch *batch = &self.batch
        cdef bint is_right, has_source, has_target
        cdef object _forgotten, _forgotten_too  # freed after unlocking: no destructor runs under a lock
        cdef Stays before, now = Stays.__new__(Stays)
        cdef int64_t *by_row = <int64_t *>malloc(batch.num_rows * sizeof(int64_t))
        if by_row == NULL:
            raise MemoryError(f"{batch.num_rows} rows")
        self.acquire_locks()
        before = self.stays_now
        has_source, has_target = batch.records[source].is_admitted, batch.records[target].is_admitted
        is_right = not is_move or (has_source and batch.records[target].state == FREE)
        is_right = is_right and batch.records[source].state != CLAIMED and batch.records[target].state != CLAIMED
        if is_right and source != target:
            memcpy(by_row, batch.stays, batch.num_rows * sizeof(int64_t))
            before.by_row, by_row, self.stays_now = by_row, NULL, now
            exchange_rows(batch, source, target)
            _forgotten, _forgotten_too = self.refusals[source], self.refusals[target]
            self.refusals[source] = self.refusals[target] = None
            keys = self.extra_key_bytes
            keys[source], keys[target] = keys[target], keys[source]
        self.release_locks()
        free(by_row)
        if not is_right:
            raise ArgumentError(
                f"rows {source} and {target}: got {'an admitted' if has_source else 'a free'} and "
                f"{'an admitted' if has_target else 'a free'} one, allowed: "
                f"{'an admitted row and a free one' if is_move else 'rows that are not being admitted'}"
            )
        return 0

    cdef int begin_caching(self, const Hashing *hashing, int32_t hash_page_size, bint caches_computed) except -1:
        """Set what is hashed, and when pages are cached."""
        if hashing.kind != SIPHASH and hash_page_size:
            keep_whole_digests(self.store)
        self.batch.hashing, self.batch.hash_page_size, self.batch.caches_computed = hashing[0], hash_page_size, caches_computed
        self.batch.caches_late = caches_computed or (hash_page_size > 0 and hashing.hash_lookahead > 0)
        return 0

    cdef int begin_groups(self) except -1:
        """Set what the batch derives from its groups. ArgumentError unless the pages of each cached group, one with an id, have
        a whole number of hashes.
        """
        cdef Batch *batch = &self.batch
        cdef const Group *group
        cdef const Table *table
        cdef Py_ssize_t g
        batch.groups, batch.num_groups = self.groups.groups, self.groups.num
        batch.has_boundaries = self.groups.boundaries.multiple != 0
        batch.writes_states = self.groups.boundaries.writes_states
        for g in range(batch.num_groups):
            group, table = &batch.groups[g], &(<TableRows>self.tables[g]).table
            if group.id != NO_GROUP and group.stride * batch.hash_page_size != group.rules.entry_size:
                raise ArgumentError(
                    f"groups: got {group.stride} hashes of {batch.hash_page_size} tokens for pages of "
                    f"{group.rules.entry_size}, allowed: as many as make a page"
                )
            batch.max_num_tokens = <int32_t>min(
                <int64_t>batch.max_num_tokens, <int64_t>group.rules.page_size * count_table_places(table)
            )
            batch.skips_pages |= group.rules.leaves_pages > 0
            batch.has_state |= is_state(&group.rules)
        batch.has_final = batch.caches_late or batch.skips_pages or batch.writes_states
        return 0

    cdef int make_arrays(self) except -1:
        """Allocate the arrays of a batch whose limits, hashing and groups are set; then the batch is complete."""
        cdef Batch *batch = &self.batch
        cdef Py_ssize_t n = (<TableRows>self.tables[0]).table.num_rows
        self.buffers, self.extra_key_bytes, self.refusals = (), [None] * n, [None] * n
        batch.ring_size, batch.writes.number = batch.max_steps_ahead + 1, 1
        batch.max_num_drafts = <int32_t>limit_drafts(batch.groups, batch.num_groups, batch.max_steps_ahead, INT32_MAX)
        make_records(self, n)
        make_contents(self, n)
        make_pages(self, n)
        batch.pool = batch.waiting.pool = &self.store.pool
        batch.num_rows = n
        if batch.caches_computed:
            self.store.prefer_held()
        return 0


cdef void *new_array(RowStore rows, Py_ssize_t num_rows, Py_ssize_t num_bytes) except NULL:
    """Allocate zeros for rows, aligned to a cache line, for the life of the batch. Memory that is never touched stays unused.
    """
    cdef Buffer buffer = Buffer(num_rows, num_bytes // sizeof(int32_t))
    rows.buffers += (buffer,)
    return buffer.values


cdef object last_array(RowStore rows, object dtype):
    """Return the array that was allocated last."""
    return np.frombuffer(rows.buffers[len(rows.buffers) - 1], dtype)


cdef int make_records(RowStore rows, Py_ssize_t n) except -1:
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t row, first = (<char *>&batch.rows.num_hits - <char *>batch.rows) // sizeof(int32_t)
    batch.records = <RowRecord *>new_array(rows, n, sizeof(RowRecord))
    rows.records = last_array(rows, ROW_RECORD)
    batch.launches = <Launch *>new_array(rows, n * batch.ring_size, sizeof(Launch))
    batch.stays = <int64_t *>new_array(rows, n, sizeof(int64_t))
    rows.stays = last_array(rows, np.int64)
    batch.rows = <Row *>new_array(rows, n, sizeof(Row))
    rows.counts = last_array(rows, np.int32).reshape(n, sizeof(Row) // sizeof(int32_t))[:, first:first + 3].T
    batch.checked_rows = <int32_t *>new_array(rows, n, sizeof(int32_t))
    batch.stamps = <uint32_t *>new_array(rows, n, sizeof(uint32_t))
    batch.due_rows = <DueRow *>new_array(rows, n, sizeof(DueRow))
    for row in range(n):
        batch.rows[row].shard = -1
    return 0


cdef int make_contents(RowStore rows, Py_ssize_t n) except -1:
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t row, stride, num_hashes = batch.max_num_tokens // batch.hash_page_size if batch.hash_page_size else 0
    cdef Digest *digests
    cdef Digest *uppers = NULL
    batch.tokens_stride = odd_lines(batch.max_num_tokens, sizeof(int32_t))
    batch.token_ids = <int32_t *>new_array(rows, n, batch.tokens_stride * sizeof(int32_t))
    batch.waiting.key, batch.waiting.num_lanes = batch.hashing.key, MAX_LANES if has_avx2() else 2
    batch.waiting.num_page_bytes = (batch.hash_page_size + batch.hashing.hash_lookahead) * sizeof(int32_t)
    stride = odd_lines(num_hashes, sizeof(Digest))
    digests = <Digest *>new_array(rows, n, stride * sizeof(Digest))
    if batch.hashing.kind != SIPHASH:
        uppers = <Digest *>new_array(rows, n, stride * sizeof(Digest))
    for row in range(n):
        batch.rows[row].digests = digests + row * stride
        batch.rows[row].uppers = uppers + row * stride if uppers != NULL else NULL
    return 0


cdef int make_pages(RowStore rows, Py_ssize_t n) except -1:
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t g, row, stride, num_groups = batch.num_groups
    cdef int32_t *page_ids
    cdef Held *held
    cdef Boundaries *boundaries = NULL
    batch.tables = <Table **>new_array(rows, num_groups, sizeof(Table *))
    held = <Held *>new_array(rows, n, num_groups * sizeof(Held))
    if batch.has_boundaries:
        boundaries = <Boundaries *>new_array(rows, n, sizeof(Boundaries))
    for row in range(n):
        batch.rows[row].holding = Holding(
            groups=batch.groups, held=held + row * num_groups, num_groups=num_groups,
            boundaries=NULL, session=NO_SESSION, num_once_cached=0,
        )
        if boundaries != NULL:
            batch.rows[row].holding.boundaries = boundaries + row
    for g in range(num_groups):
        batch.tables[g] = &(<TableRows>rows.tables[g]).table
        stride = odd_lines(count_table_places(batch.tables[g]), sizeof(int32_t))
        page_ids = <int32_t *>new_array(rows, n, stride * sizeof(int32_t))
        for row in range(n):
            held[row * num_groups + g].ids = page_ids + row * stride
    return 0
