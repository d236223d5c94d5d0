"""Running rows."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT64_MAX

from pagepool.core.arguments cimport array_of, digest_of_bytes, require_instance, size_of
from pagepool.core.batch cimport (
    DueRow, ExtraKey, Grown, RowState, Swapped, amount, append_tokens, can_undo, check_growth, check_step, check_trim,
    claim_row, copy_rows, empty_row, exchange_rows, forget_row, grow_rows, has_state_behind, held_by, holding_of, is_as_grown,
    is_row, keep_last_states, set_context, start_call, tokens_of, trim_row, uncount, undo_row,
)
from pagepool.core.chain cimport extra_key_of
from pagepool.core.holdings cimport (
    Holding, awaits_copies, count_new_pages, count_places, drop_copies, find_lost_page, has_copies_due, list_last_first,
    reserve_copies,
)
from pagepool.core.ids cimport as_own_ids, as_page_ids, refuse_negative
from pagepool.core.locks cimport BATCH_LOCK, delist_lock, enlist_lock
from pagepool.core.lookups cimport Refusal, Tokens, count_room_tokens, count_tokens
from pagepool.core.platform cimport CACHE_LINE, go_on, keep_sparse, let_others_run
from pagepool.core.queue cimport find_held_free
from pagepool.core.records cimport NO_GROUP, NULL_PAGE
from pagepool.core.rules cimport MAX_TOKENS, is_state, keeps_checkpoints
from pagepool.core.siphash cimport Digest
from pagepool.core.table cimport TableRows, checked_tables, in_lock_order

import numpy as np

from pagepool.errors import (
    ArgumentError, ArgumentTypeError, CopiesDueError, DoubleFreeError, RowIndexError, RowOverflowError,
)

cdef object ndarray = np.ndarray


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


@cython.final
@cython.no_gc  # it is in no cycle: a batch does not know its results
@cython.auto_pickle(False)
cdef class StepResult:
    """What a call of `RunningBatch` that grows rows did.

    The first `num_grown` of its rows have their room; the row at that place, if there is one, is the first that did not fit.
    `RunningBatch.undo` takes the call back.
    """

    def __init__(self):
        raise TypeError("a StepResult is what RunningBatch returns")

    def __dealloc__(self):
        free(self.growth.new_ids)
        free(self.growth.grown)

    cdef int begin(self, RunningRows batch, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens) except -1:
        """What is to be done, and room for what becomes of the rows."""
        self.batch, self.num_new_tokens = batch, num_new_tokens
        self.growth.rows, self.growth.num_rows = rows.ids, rows.num
        self.growth.num_new_tokens, self.growth.num_ahead = amounts_in(num_new_tokens), num_ahead
        if tokens is not None:
            self.growth.token_ids = tokens.ids
        if rows.num:
            self.growth.grown = <Grown *>malloc(rows.num * (sizeof(Grown) + sizeof(int32_t)))
            if self.growth.grown == NULL:
                raise MemoryError(f"{rows.num} rows")
            self.growth.grown_rows = <int32_t *>(self.growth.grown + rows.num)
        return 0

    cdef bint reserve(self, Py_ssize_t n) noexcept:
        """Allocate room for `n` new pages; False where memory is short."""
        cdef int32_t *values
        if n == 0:
            return True
        values = <int32_t *>malloc(3 * n * sizeof(int32_t))
        self.growth.new_ids = values
        self.growth.new_rows = values + n
        self.growth.new_groups = values + 2 * n
        return values != NULL

    @property
    def new_page_ids(self) -> np.ndarray:
        """Ids of the pages that were taken: int32 ``[num_new_pages]``, a copy. In a row group by group."""
        return array_of(self.growth.new_ids, self.growth.num_new)

    @property
    def new_page_rows(self) -> np.ndarray:
        """The row of each new page, int32 ``[num_new_pages]``, a copy: the rows in the order of the call."""
        return array_of(self.growth.new_rows, self.growth.num_new)

    @property
    def new_page_groups(self) -> np.ndarray:
        """The cache group of each new page, int32 ``[num_new_pages]``, a copy."""
        return array_of(self.growth.new_groups, self.growth.num_new)

    def __repr__(self):
        return f"StepResult(num_grown={self.num_grown}, new_page_ids={self.new_page_ids.tolist()})"


cdef int32_t ZERO = 0


cdef PageIds ONE = PageIds([1])


cdef PageIds as_amounts(object values, str name, Py_ssize_t num_rows):
    """`values` as a number for each row, or one for all, copied, so that they cannot change during the call."""
    cdef PageIds amounts
    if hasattr(values, "__index__") and not isinstance(values, ndarray):
        return PageIds([size_of(values, name, 0, MAX_TOKENS)])
    amounts = as_own_ids(values, name)
    if amounts.num != num_rows:
        raise ArgumentError(f"{name}: got {amounts.num}, allowed: one, or as many as rows, {num_rows}")
    return amounts


cdef Amounts amounts_in(PageIds amounts) noexcept:
    """A view of them. A single number serves all rows."""
    return Amounts(amounts.ids, amounts.num > 1)


@cython.auto_pickle(False)
cdef class RunningRows:
    """Rows that run together: what they know, and what they hold. `pagepool.RunningBatch` adds the manager.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is touched only as far as
    rows grow: 4 bytes a token, 16 a hashed page, 4 a page and group; `release` keeps it for the next row.
    """

    def __cinit__(self, *args, **kwargs):
        enlist_lock(&self.lock_node, &self.lock, BATCH_LOCK)

    def __init__(
        self, PageStore store not None, tables, groups, max_num_tokens, hash_page_size, bytes key not None, num_shards,
        bint unifies_pages=False,
    ):
        """`tables` are `TableRows`, one for each of the `groups`, which are `CacheGroups` or as their argument. With
        `unifies_pages` rows share pages that got the same tokens.
        """
        cdef tuple by_group = checked_tables(tables)
        cdef CacheGroups checked = groups if type(groups) is CacheGroups else CacheGroups(groups)
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

    # Memory.

    cdef int32_t *new_buffer(self, Py_ssize_t num_rows, Py_ssize_t num_values) except NULL:
        """Zeros, aligned to a cache line, that live as long as the batch. Pages of it that are not touched take no memory."""
        cdef Buffer buffer = Buffer(num_rows, num_values)
        self.buffers.append(buffer)
        return buffer.values

    cdef int check_group(self, Group *group, const Rows *rows) except -1:
        """ArgumentError unless the hashes of a group make a page. A group that is not cached has no id."""
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
        self.batch.num_external = self.new_buffer(n, 1)
        self.num_external_tokens = np.frombuffer(self.buffers[len(self.buffers) - 1], dtype=np.int32)
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

    # Arguments.

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

    # Growth, and growth taken back.

    def grow(self, rows, num_new_tokens=1, num_lookahead_tokens=0) -> StepResult:
        """Give the next known tokens of each row their slots, and room for drafts behind them, row by row in the given order.

        `rows` is a list or an int array without repeats. `num_new_tokens` and `num_lookahead_tokens` are a number for all rows
        or one for each. First the pages that fell out of the attention window go back, then the missing pages are taken, then
        pages that got full are entered in the prefix index. The first row that does not fit stops the call and gets nothing of
        it: preempt, and call again from ``num_grown``.

        ArgumentError for more tokens than a row knows, for rows not admitted or repeated, RowIndexError outside the table:
        nothing has changed then. O(rows + new pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds new = as_amounts(num_new_tokens, "num_new_tokens", row_ids.num)
        cdef PageIds ahead = as_amounts(num_lookahead_tokens, "num_lookahead_tokens", row_ids.num)
        return self.run(row_ids, new, amounts_in(ahead), None)

    def step(self, rows, token_ids) -> StepResult:
        """Append one token to each row and give the next token of each its slot: the decode step of the whole batch.

        `rows` and `token_ids` are lists or int arrays of one length; rows do not repeat. A row that does not fit stops the call
        and has not got its token either. RowOverflowError, and nothing changed, where a row is as long as it can be; other
        errors as in `grow`. O(rows + new pages), native.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        check_lengths(tokens, row_ids)
        return self.run(row_ids, ONE, Amounts(&ZERO, 0), tokens)

    cdef StepResult run(self, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens):
        """Check all rows, make room for the result, then grow: nothing can fail any more."""
        cdef StepResult result = StepResult.__new__(StepResult)
        cdef Growth *growth = &result.growth
        cdef Py_ssize_t num_right
        cdef bint is_due, has_room = True
        cdef int32_t held_free = NULL_PAGE
        result.begin(self, rows, num_new_tokens, num_ahead, tokens)
        if growth.num_rows == 0:
            return result
        self.enter_call()
        num_right = self.check_rows_of(growth)
        if num_right == growth.num_rows:
            growth.max_num_new = min(growth.max_num_new, self.store.pool.num_pages)  # each page is taken once at most
            has_room = result.reserve(growth.max_num_new) and self.reserve_states(growth.num_due)
            held_free = find_held_free(&self.store.pool, growth.max_num_new)
        if num_right == growth.num_rows and has_room and held_free == NULL_PAGE:
            result.num_grown = self.grow_checked(growth)
        else:
            uncount(&self.batch, growth, 0, num_right)
        is_due = num_right < growth.num_rows and self.has_due(growth.rows[num_right])
        self.let_go()
        if num_right < growth.num_rows:
            if tokens is not None:
                refuse_negative(tokens.ids, tokens.num, 0)
            self.refuse_growth(growth, num_right, is_due)
        if not has_room:
            raise MemoryError(f"{growth.max_num_new} new pages")
        self.store.check_untaken(held_free)
        return result

    cdef bint reserve_states(self, Py_ssize_t num_rows) noexcept:
        """Allocate room for the copies of states that rows may keep; False where memory is short."""
        return not self.batch.keeps_states or reserve_copies(&self.store.pool, num_rows * self.batch.num_groups)

    cdef Py_ssize_t check_rows_of(self, Growth *growth) noexcept:
        """How many rows there are before the first that is wrong. The others are counted as grown."""
        cdef Py_ssize_t num_copied = copy_rows(&self.batch, growth.rows, growth.num_rows)
        if growth.token_ids == NULL:
            return check_growth(&self.batch, growth, num_copied)
        return check_step(&self.batch, growth, num_copied)

    cdef Py_ssize_t grow_checked(self, Growth *growth) noexcept:
        cdef void *thread = let_others_run(growth.num_rows + growth.max_num_new)
        cdef Py_ssize_t num_grown = grow_rows(&self.batch, growth)
        go_on(thread)
        growth.num_admissions = self.batch.num_admissions
        return num_grown

    def undo(self, result) -> None:
        """Take back a call of `step` or `grow` whose model run failed: the rows are as before, without the token that `step`
        appended, the pages that the call took go back, and the entries that it made in the prefix index are dropped.

        Several calls are taken back last first, rows that were admitted meanwhile are released first, with the
        `num_computed_tokens` that they hit. Pages that an attention window left stay given back. The state of a state group is
        not pagepool's: restore it, or release the row, if the model may have begun to write it.

        ArgumentError, and nothing changed, for another batch's result, for one that was taken back already, where a row was
        grown, cut, moved, forked or released since, where it needs pages again that a later call gave back, and where others
        hit or share a page to which it would write again, or a load into it is in flight; release such rows with
        `num_computed_tokens`. O(rows + pages taken and entered).
        """
        cdef StepResult step = require_instance(result, StepResult, "result")
        cdef Growth *growth = &step.growth
        cdef Py_ssize_t i, num_pages, num_left = step.num_grown
        cdef bint is_due
        if step.batch is not self:
            raise ArgumentError(f"result: got one {'of another batch' if step.batch else 'that was taken back already'}")
        self.enter_call()
        num_pages = growth.num_new
        while num_left and can_undo(&self.batch, growth, num_left - 1, &num_pages):
            num_left -= 1
        if num_left == 0:
            num_pages = growth.num_new
            for i in range(step.num_grown - 1, -1, -1):
                undo_row(&self.batch, growth, i, &num_pages)
            step.batch = None
        is_due = num_left > 0 and self.has_due(growth.grown_rows[num_left - 1])
        self.let_go()
        if num_left:
            self.refuse_undo(growth, num_left - 1, is_due)

    cdef int refuse_undo(self, const Growth *growth, Py_ssize_t at, bint is_due) except -1:
        cdef int32_t row = growth.grown_rows[at]
        refuse_copies(row, at, is_due)
        if not is_as_grown(&self.batch, growth, at):
            raise ArgumentError(f"row {row} (at {at}): was grown, cut, moved or released since; allowed: the last call first")
        raise ArgumentError(
            f"row {row} (at {at}): cannot go back: pages that it had or needs again were given back, when they fell out of the "
            "attention window or by somebody else, or have other holders; release it, or these, with num_computed_tokens"
        )

    cdef int32_t refuse_unknown(self, int32_t row, Py_ssize_t at) except -1:
        """Raise if a row of a call is not in the table or not admitted, or return it."""
        if not 0 <= row < self.batch.num_rows:
            raise RowIndexError(f"row: got {row} (at {at}), allowed: 0 to {self.batch.num_rows - 1}")
        if not self.batch.states[row].is_admitted:
            raise ArgumentError(f"row {row} (at {at}) is not admitted")
        return row

    cdef int32_t refuse_row(self, const int32_t *rows, Py_ssize_t at) except -1:
        """Raise what is wrong with a row of a call in which none may stand twice, or return it."""
        cdef Py_ssize_t i
        cdef int32_t row = self.refuse_unknown(rows[at], at)
        for i in range(at):
            if rows[i] == row:
                raise ArgumentError(f"rows: got {row} twice (at {i} and {at}), allowed: each once")
        return row

    cdef int refuse_growth(self, const Growth *growth, Py_ssize_t at, bint is_due) except -1:
        cdef int32_t row = self.refuse_row(growth.rows, at)
        if growth.token_ids != NULL and self.batch.states[row].num_tokens >= self.batch.max_num_tokens:
            self.refuse_length(row, <int64_t>self.batch.states[row].num_tokens + 1)
        cdef Holding holding = holding_of(&self.batch, row)
        refuse_pending(&self.batch, row, at)
        refuse_copies(row, at, is_due)
        if find_lost_page(&self.store.pool, &holding, self.batch.states[row].num_computed) != NULL_PAGE:
            raise DoubleFreeError(f"row {row} (at {at}): a page that it holds was given back by somebody else")
        raise ArgumentError(
            f"row {row} (at {at}): got {amount(&growth.num_new_tokens, at)} new tokens and {amount(&growth.num_ahead, at)} "
            f"lookahead tokens, allowed: at least 0, and new ones up to the "
            f"{self.batch.states[row].num_tokens - self.batch.states[row].num_computed} that are known and not computed"
        )

    cdef bint has_due(self, int32_t row) noexcept:
        """Whether a row at which a call stopped has copies due. The locks are held: another thread may take them soon."""
        cdef Holding holding
        if not is_row(&self.batch, row):
            return False
        holding = holding_of(&self.batch, row)
        return has_copies_due(&self.store.pool, &holding)

    # Known tokens.

    def append(self, rows, token_ids) -> None:
        """Let rows know one token more each, without room for it yet; rows may repeat, for several tokens in order.

        RowOverflowError, and nothing changed, where a row would be longer than it can be. O(rows).
        """
        cdef PageIds row_ids = as_own_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        cdef Py_ssize_t num_done
        check_lengths(tokens, row_ids)
        refuse_negative(tokens.ids, tokens.num, 0)
        with self.lock:
            num_done = append_tokens(&self.batch, row_ids.ids, tokens.ids, row_ids.num)
        if num_done < row_ids.num:
            self.refuse_append(row_ids, num_done)

    cdef int refuse_append(self, PageIds rows, Py_ssize_t at) except -1:
        cdef Py_ssize_t i
        cdef int64_t num_tokens = 1
        cdef int32_t row = self.refuse_unknown(rows.ids[at], at)
        for i in range(at):
            num_tokens += rows.ids[i] == row
        self.refuse_length(row, self.batch.states[row].num_tokens + num_tokens)

    def trim(self, rows, num_tokens) -> None:
        """Forget the known tokens of rows from `num_tokens` on, a number for all rows or one for each: rejected drafts.

        A row that keeps its ``num_computed_tokens`` keeps its pages, also those behind: they are slots for its next tokens.
        Where computed tokens are cut, pages wholly behind go back, the last first, and lose their prefix entry unless they have
        other holders. If the cut goes through a page that has other holders, that page goes back as well, and its first tokens
        are to be computed again: ``num_computed_tokens`` says so. Then pages of other groups to which these tokens were written
        go back too, with those behind, if they have other holders.

        ArgumentError, and nothing changed, for more tokens than a row knows, and if computed tokens are cut, where pages that
        the attention window needs again were given back already, and where a state group's state has seen them, unless all
        are cut. O(rows + pages behind).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds lengths = as_amounts(num_tokens, "num_tokens", row_ids.num)
        cdef Amounts amounts = amounts_in(lengths)
        cdef Py_ssize_t i, num_right
        cdef bint is_due
        self.enter_call()
        num_right = check_trim(&self.batch, row_ids.ids, &amounts, row_ids.num)
        if num_right == row_ids.num:
            for i in range(row_ids.num):
                trim_row(&self.batch, self.batch.checked_rows[i], amount(&amounts, i))
        is_due = num_right < row_ids.num and self.has_due(row_ids.ids[num_right])
        self.let_go()
        if num_right < row_ids.num:
            self.refuse_trim(row_ids, num_right, amount(&amounts, num_right), is_due)

    cdef int refuse_trim(self, PageIds rows, Py_ssize_t at, int32_t num_tokens, bint is_due) except -1:
        cdef int32_t row = self.refuse_row(rows.ids, at)
        if not 0 <= num_tokens <= self.batch.states[row].num_tokens:
            raise ArgumentError(f"num_tokens: got {num_tokens} (at {at}), allowed: 0 to {self.batch.states[row].num_tokens}")
        refuse_pending(&self.batch, row, at)
        refuse_copies(row, at, is_due)
        if has_state_behind(&self.batch, row, num_tokens):
            raise ArgumentError(
                f"num_tokens: got {num_tokens} (at {at}), allowed for row {row}, which has a state that saw later tokens: "
                f"0, or from {self.batch.states[row].num_computed} on"
            )
        raise ArgumentError(
            f"row {row} (at {at}): cannot be cut to {num_tokens} tokens: pages that they need were given back, "
            "when they fell out of the attention window or by somebody else"
        )

    # Coming, going, changing places.

    def release(self, rows, num_computed_tokens=None) -> None:
        """Give back all pages of rows, in the given order, the last page of each first, and make the rows free.

        After a failed step `num_computed_tokens`, a number for each row or one for all, says how many tokens were computed
        indeed: pages that a row entered in the prefix index with tokens from there on lose their entries, held by others or
        not. Release others that hit them since as well.

        ArgumentError, and nothing changed, for more tokens than a row has slots for, DoubleFreeError if somebody else gave
        one of the pages back. O(pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds counts
        cdef Amounts computed = Amounts(NULL, 0)
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num_right, bad = -1
        cdef bint has_room = True
        if num_computed_tokens is not None:
            counts = as_amounts(num_computed_tokens, "num_computed_tokens", row_ids.num)
            computed = amounts_in(counts)
        self.enter_call()
        num_right = self.check_release(row_ids, &computed, ids, &has_room)
        if num_right == row_ids.num and has_room:
            bad = self.release_checked(ids, num_right, &computed)
        self.let_go()
        if num_right < row_ids.num:
            self.refuse_release(row_ids, &computed, num_right)
        if not has_room:
            raise MemoryError("the pages of the rows")
        if bad >= 0:
            raise DoubleFreeError(f"page {ids.ids[bad]} is given back by a row more often than it is held")

    cdef int refuse_release(self, PageIds rows, const Amounts *computed, Py_ssize_t at) except -1:
        cdef int32_t row = self.refuse_row(rows.ids, at)
        if computed.values == NULL:
            raise ArgumentError("rows: changed during the call")
        raise ArgumentError(
            f"num_computed_tokens: got {amount(computed, at)} (at {at}), "
            f"allowed: 0 to {self.batch.states[row].num_computed}, for which row {row} has slots"
        )

    cdef Py_ssize_t check_release(self, PageIds rows, const Amounts *computed, PageIds ids, bint *has_room) noexcept:
        """How many rows there are before the first that is wrong. Copies the rows, and puts their pages into `ids`, in the
        order in which they go back.
        """
        cdef Holding holding
        cdef Py_ssize_t i
        cdef int32_t row
        start_call(&self.batch)
        for i in range(rows.num):
            if not claim_row(&self.batch, rows.ids[i], i):
                return i
            row = self.batch.checked_rows[i]
            if computed.values != NULL and not 0 <= amount(computed, i) <= self.batch.states[row].num_computed:
                return i
            holding = holding_of(&self.batch, row)
            has_room[0] = has_room[0] and ids.try_reserve(count_places(&holding))
            if has_room[0]:
                ids.num += list_last_first(&holding, ids.ids + ids.num)
        return rows.num

    cdef Py_ssize_t release_checked(self, PageIds ids, Py_ssize_t num_rows, const Amounts *computed) noexcept:
        """Give back the pages and empty the rows; or the index of a page without references, and nothing changed."""
        cdef Holding holding
        cdef Py_ssize_t i, row, bad = self.store.give_back_ids(ids.ids, ids.num, False)
        for i in range(num_rows if bad < 0 else 0):
            row = self.batch.checked_rows[i]
            holding = holding_of(&self.batch, row)
            if self.batch.keeps_states and not awaits_copies(&self.store.pool, &holding):
                if computed.values == NULL or amount(computed, i) == self.batch.states[row].num_computed:
                    keep_last_states(&self.batch, row)
            drop_copies(&self.store.pool, &holding)
            if computed.values != NULL:
                forget_row(&self.batch, row, amount(computed, i))
            set_context(&self.batch, row, 0)
            empty_row(&self.batch, row)
        return bad

    def move_row(self, src, tgt) -> None:
        """Let an admitted row go on as another, free one; the source is free after. O(tokens and pages of the row)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.exchange(source, target, True)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows, free or not. O(tokens and pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.exchange(source, target, False)

    cdef int exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
        cdef Batch *batch = &self.batch
        cdef bint is_right
        cdef object _forgotten, _forgotten_too  # until the locks are free: what goes with them may wait for a fork
        self.enter_call()
        is_right = not is_move or (batch.states[source].is_admitted and not batch.states[target].is_claimed)
        is_right = is_right and batch.states[source].is_admitted == batch.states[source].is_claimed
        is_right = is_right and batch.states[target].is_admitted == batch.states[target].is_claimed
        if is_right and source != target:
            exchange_rows(batch, source, target)
            _forgotten, _forgotten_too = self.refusals[source], self.refusals[target]
            self.refusals[source] = self.refusals[target] = None
            data = self.extra_key_bytes[source]
            self.extra_key_bytes[source] = self.extra_key_bytes[target]
            self.extra_key_bytes[target] = data
        self.let_go()
        if not is_right:
            self.refuse_exchange(source, target, is_move)
        return 0

    cdef int refuse_exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
        raise ArgumentError(
            f"rows {source} and {target}: {'admitted' if self.batch.states[source].is_admitted else 'free'} and "
            f"{'admitted' if self.batch.states[target].is_admitted else 'free'}, allowed: "
            f"{'an admitted row and a free one' if is_move else 'rows that are not being admitted'}"
        )

    def _is_refused_still(self, row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options) -> bool:
        """Return whether the row has refused this request last, and certainly refuses it again. O(1) for tokens in the same
        list, or in an array over the same memory, of which a sample is compared; O(tokens) for others.
        """
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef Refusal refusal = self.refusals[checked]
        cdef Holding holding
        cdef Tokens tokens
        cdef Py_ssize_t num_reserved
        cdef int64_t num_pages
        cdef bint is_refused
        if refusal is None or not refusal.is_of(token_ids, options, tokens_of(&self.batch, checked)):
            return False
        tokens = count_tokens(num_tokens, max_num_new_tokens, refusal.num_tokens, refusal.interval, refusal.num_external)
        num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        self.enter_call()
        is_refused = self.refusals[checked] is refusal and not self.batch.states[checked].is_claimed
        is_refused = is_refused and refusal.finds_hits(&self.store.pool)
        if is_refused:
            holding = holding_of(&self.batch, checked)
            num_pages = count_new_pages(&holding, count_room_tokens(&tokens, refusal.num_hit_tokens))
            is_refused = refusal.is_short(&self.store.pool, num_pages, num_reserved)
        self.let_go()
        return is_refused

    def _find_next_multiple(self, rows, interval) -> np.ndarray:
        """For each row the next multiple of `interval` above its computed tokens, at most `max_num_tokens`: int32
        ``[len(rows)]``. RowIndexError outside the table.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds result = PageIds.__new__(PageIds)
        cdef int64_t num, step = size_of(interval, "interval", 1, MAX_TOKENS)
        cdef int32_t limited
        cdef Py_ssize_t i
        result.reserve(row_ids.num)
        for i in range(row_ids.num):
            num = self.batch.states[self.checked_row(row_ids.ids[i])].num_computed
            limited = <int32_t>min(num - num % step + step, <int64_t>self.batch.max_num_tokens)
            result.put(&limited, 1)
        return array_of(result.ids, result.num)

    def get_page_ids(self, row) -> tuple:
        """The ids of a row's pages, one list for each group; the null page, 0, where one was skipped. O(pages)."""
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef Py_ssize_t g
        return tuple([self.copy_ids(held_by(&self.batch, checked, g)).to_list() for g in range(self.batch.num_groups)])

    cdef PageIds copy_ids(self, const Held *held):
        cdef PageIds ids = PageIds.__new__(PageIds)
        with self.lock:
            ids.add(held.ids, held.num_pages)
        return ids


cdef int refuse_pending(const Batch *batch, int32_t row, Py_ssize_t at) except -1:
    """Raise if a row waits for tokens from elsewhere."""
    if batch.num_external[row]:
        raise ArgumentError(
            f"row {row} (at {at}) waits for {batch.num_external[row]} tokens from elsewhere: call commit_external or "
            "fail_external before"
        )
    return 0


cdef int refuse_copies(int32_t row, Py_ssize_t at, bint is_due) except -1:
    """Raise if copies of the pages of a row were due when a call stopped there."""
    if is_due:
        raise CopiesDueError(
            f"row {row} (at {at}): copies of its pages are due, or transfers: call take_copies, and with a host tier "
            "take_transfers, and do them, before"
        )
    return 0


cdef int check_lengths(PageIds tokens, PageIds rows) except -1:
    """One token id for each row."""
    if tokens.num != rows.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows, {rows.num}")
    return 0
