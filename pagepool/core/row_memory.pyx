"""The memory of a running batch, and its locks."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT64_MAX

from pagepool.core.arguments cimport digest_of_bytes, size_of
from pagepool.core.batch cimport DueRow, ExtraKey, RowState, Swapped, held_by
from pagepool.core.chain cimport extra_key_of
from pagepool.core.holdings cimport Held
from pagepool.core.locks cimport BATCH_LOCK, delist_lock, enlist_lock
from pagepool.core.platform cimport CACHE_LINE, keep_sparse
from pagepool.core.records cimport NO_GROUP
from pagepool.core.rules cimport MAX_TOKENS, is_state, keeps_checkpoints
from pagepool.core.siphash cimport Digest
from pagepool.core.table cimport TableRows, checked_tables, in_lock_order

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, RowOverflowError

cdef object ROW_STATE = np.dtype(
    [(name, "u4" if name == "stamp" else "i4") for name in (
        "num_tokens", "num_computed", "next_event", "stamp", "num_hits", "num_hashed", "shard",
    )] + [("is_admitted", "?"), ("is_claimed", "?"), ("padding", "i2")]
)


cdef inline Py_ssize_t odd_lines(Py_ssize_t num_values, Py_ssize_t size) noexcept nogil:
    """Values of `size` bytes that rows lie apart, at least `num_values`: an odd number of cache lines, so that the ends of
    rows, which a step writes, fall into different sets of a cache.
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


cdef class RowMemory:
    """What the rows of a running batch know and hold.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is touched only as far as
    rows grow: 4 bytes a token, 16 a hashed page, 4 a page and group; `release` keeps it for the next row.
    """

    def __cinit__(self, *args, **kwargs):
        enlist_lock(&self.lock_node, &self.lock, BATCH_LOCK)

    def __init__(
        self, PageStore store not None, tables, groups, max_num_tokens, hash_page_size, bytes key not None, num_shards,
        bint unifies_pages=False,
    ):
        """`tables` are `TableRows`, one for each of the `groups`, which are as in `CacheGroups`. With `unifies_pages` rows
        share pages that got the same tokens.
        """
        cdef tuple by_group = checked_tables(tables)
        cdef CacheGroups checked = CacheGroups(groups)
        cdef Py_ssize_t n, g, num_pool_shards = size_of(num_shards, "data_parallel_size", 0)
        cdef Py_ssize_t num_tokens = min(size_of(max_num_tokens, "max_model_len", 1, INT64_MAX), MAX_TOKENS)
        cdef Py_ssize_t num_hash_tokens = size_of(hash_page_size, "hash_page_size", 0, MAX_TOKENS)
        if self.batch.groups != NULL:  # after the arguments were read, which may run Python code
            raise ArgumentError("the rows of a batch are made once")
        if not checked.num or checked.num != len(by_group):
            raise ArgumentError(f"groups: got {checked.num} for {len(by_group)} tables, allowed: one each, at least 1")
        if num_hash_tokens and not store.enable_caching:
            raise ArgumentError(f"hash_page_size: got {num_hash_tokens}, allowed without prefix caching: 0")
        self.store, self.key, self.buffers, self.groups = store, key, [], checked
        self.tables, self.lock_order = by_group, in_lock_order(by_group)
        self.num_shards = <int32_t>num_pool_shards
        self.batch.groups, self.batch.num_groups = checked.groups, checked.num
        self.batch.max_num_tokens = <int32_t>num_tokens
        self.batch.hash_page_size = <int32_t>num_hash_tokens
        self.batch.unifies_pages = unifies_pages
        n = (<TableRows>by_group[0]).rows.num_rows
        for g in range(checked.num):
            self.check_group(&checked.groups[g], &(<TableRows>by_group[g]).rows)
        self.make_state(n)
        self.make_contents(n)
        self.make_pages(n)
        self.batch.pool = self.batch.waiting.pool = &store.pool
        self.batch.num_rows = n

    def __dealloc__(self):
        cdef Py_ssize_t row
        delist_lock(&self.lock_node)
        for row in range(self.batch.num_rows):
            free(self.batch.extra_keys[row])
            free(self.batch.swapped[row])
        free(self.batch.extra_keys)
        free(self.batch.swapped)
        free(self.batch.contexts)
        free(self.batch.tables)
        free(self.batch.held)

    def __reduce__(self):
        raise ArgumentTypeError("a running batch cannot be pickled")

    cdef int32_t *new_buffer(self, Py_ssize_t num_rows, Py_ssize_t num_values) except NULL:
        """Zeros, aligned to a cache line, that live as long as the batch. Pages of it that are not touched take no memory."""
        cdef Buffer buffer = Buffer(num_rows, num_values)
        self.buffers.append(buffer)
        return buffer.values

    cdef int check_group(self, Group *group, const Rows *rows) except -1:
        """ArgumentError unless the hashes of a group make a page. A group that is not cached has no id."""
        if not self.batch.hash_page_size:
            group.id = NO_GROUP
        if group.id != NO_GROUP and group.stride * self.batch.hash_page_size != group.rules.entry_size:
            raise ArgumentError(
                f"groups: got {group.stride} hashes of {self.batch.hash_page_size} tokens for pages of "
                f"{group.rules.entry_size}, allowed: as many as make a page"
            )
        self.batch.max_num_tokens = <int32_t>min(
            <int64_t>self.batch.max_num_tokens, <int64_t>group.rules.page_size * rows.num_columns
        )
        self.batch.skips_pages |= group.rules.window or group.rules.chunk
        self.batch.has_state |= is_state(&group.rules)
        self.batch.keeps_states |= keeps_checkpoints(group)
        return 0

    cdef int make_state(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t row
        self.batch.states = <RowState *>self.new_buffer(n, sizeof(RowState) // sizeof(int32_t))
        states = np.frombuffer(self.buffers[len(self.buffers) - 1], dtype=ROW_STATE)
        self.num_tokens = states["num_tokens"]
        self.num_computed_tokens = states["num_computed"]
        self.num_cached_tokens = states["num_hits"]
        self.is_admitted = states["is_admitted"]
        self.batch.admissions = <int64_t *>self.new_buffer(n, sizeof(int64_t) // sizeof(int32_t))
        self.batch.checked_rows = self.new_buffer(n, 1)
        self.batch.due_rows = <DueRow *>self.new_buffer(n, sizeof(DueRow) // sizeof(int32_t))
        for row in range(n):
            self.batch.states[row].shard = -1
        return 0

    cdef int make_contents(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t num_hashes = 0
        self.batch.tokens_stride = odd_lines(self.batch.max_num_tokens, sizeof(int32_t))
        self.batch.token_ids = self.new_buffer(n, self.batch.tokens_stride)
        self.batch.waiting.key = digest_of_bytes(self.key)
        self.batch.waiting.num_page_bytes = self.batch.hash_page_size * sizeof(int32_t)
        self.batch.extra_key = extra_key_of(self.key)
        if self.batch.hash_page_size:
            num_hashes = self.batch.max_num_tokens // self.batch.hash_page_size
        self.batch.digests_stride = odd_lines(num_hashes, sizeof(Digest))
        self.batch.digests = <Digest *>self.new_buffer(n, self.batch.digests_stride * (sizeof(Digest) // sizeof(int32_t)))
        self.extra_key_bytes = [None] * n
        self.refusals = [None] * n
        self.batch.extra_keys = <ExtraKey **>calloc(n, sizeof(ExtraKey *))
        self.batch.contexts = <int32_t *>calloc(n, sizeof(int32_t))
        self.batch.swapped = <Swapped **>calloc(n, sizeof(Swapped *))
        if self.batch.extra_keys == NULL or self.batch.contexts == NULL or self.batch.swapped == NULL:
            raise MemoryError(f"{n} rows")
        return 0

    cdef int make_pages(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t g, row, stride, num_groups = self.groups.num
        cdef int32_t *page_ids
        self.batch.tables = <Rows **>calloc(num_groups, sizeof(Rows *))
        self.batch.held = <Held *>calloc(n * num_groups, sizeof(Held))
        if self.batch.tables == NULL or self.batch.held == NULL:
            raise MemoryError(f"{n} rows")
        for g in range(num_groups):
            self.batch.tables[g] = &(<TableRows>self.tables[g]).rows
            stride = odd_lines(self.batch.tables[g].num_columns, sizeof(int32_t))
            page_ids = self.new_buffer(n, stride)
            for row in range(n):
                held_by(&self.batch, row, g).ids = page_ids + row * stride
        return 0

    @property
    def max_num_tokens(self) -> int:
        """Tokens that a row can know: those of the model, or fewer where the table has less room."""
        return self.batch.max_num_tokens

    # Locks: rows first, then the store, then the tables. While they are held no Python object is made.

    cdef void let_go(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.release()
        self.store.lock.release()
        self.lock.release()

    cdef int check_made(self) except -1:
        if not self.batch.num_rows:
            raise ArgumentError("the batch was not made: its constructor did not run, or failed")
        return 0

    cdef int enter_call(self) except -1:
        """Take all locks, with the pool divided as the rows need it."""
        self.check_made()
        self.lock.acquire()
        try:
            self.store.lock_divided(self.num_shards)
        except BaseException:
            self.lock.release()
            raise
        for table in self.lock_order:
            (<TableRows>table).lock.acquire()
        return 0

    cdef Py_ssize_t checked_row(self, object row) except -1:
        self.check_made()
        return (<TableRows>self.tables[0]).checked_row(row)

    cdef int refuse_length(self, Py_ssize_t row, int64_t num_tokens) except -1:
        raise RowOverflowError(
            f"row {row}: got {num_tokens} tokens, "
            f"allowed: {self.batch.max_num_tokens}, which is max_model_len or what the table has room for"
        )

    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept:
        """Drop the extra keys of a row, and its digests, which were made with them."""
        self.batch.states[row].num_hashed = 0
        free(self.batch.extra_keys[row])
        self.batch.extra_keys[row] = NULL
        self.extra_key_bytes[row] = None
