"""Running rows."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT64_MAX
from libc.string cimport memcpy

from pagepool.core.base cimport CACHE_LINE, MAX_LANES, UNKNOWN, has_avx2, keep_sparse, process_number, require_allocated
from pagepool.core.holding cimport (
    FORKED, SHORT_OF_MEMORY, ForkExtent, ForkOutcome, awaits_moves, copy_ids, count_places, draw_references, find_wrong,
    has_window, list_last_first, prepare_fork, rate_pages, require_banks, shortage_beside,
)
from pagepool.core.pool cimport bank_of_queue, count_refusal
from pagepool.core.rows.external cimport *
from pagepool.core.rows.forks cimport *
from pagepool.core.rows.refusals cimport *
from pagepool.core.rows.release cimport *
from pagepool.core.tables cimport TableRows, checked_tables, in_lock_order
from pagepool.core.tier cimport NO_WRITES, FailedLoads, Moves, StateWrites, take_with, writes_of
from pagepool.core.values cimport array_of, hashing_of, ids_in, require_instance

from numbers import Real

import numpy as np

from pagepool.arguments import require_flag
from pagepool.errors import ArgumentError, ArgumentTypeError, made_twice, not_made
from pagepool.refusal import Refusal

cdef object ndarray = np.ndarray


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
    """The stays of a batch's rows at the time of its next exchange of rows.

    Results of calls refer to it instead of listing the stays of their rows, which costs time in each call.
    """

    def __dealloc__(self):
        free(self.by_row)


@cython.final
@cython.no_gc  # in no cycle: a batch has no reference to its results
@cython.auto_pickle(False)
cdef class StepResult:
    """A step in flight: its rows, with their tokens and new pages.

    `RunningBatch.plan` and `step` return one, and `new_step` an empty one. With ``step=`` these calls and `admit` add rows to a
    step. The first `num_grown` rows of the last call have their room; the next row, if there is one, did not fit. `len` is the
    number of rows of the step. `RunningBatch.settle` ends it.
    """

    def __init__(self):
        raise TypeError("a StepResult is what RunningBatch returns")

    def __dealloc__(self):
        if self.batch is not None and self.growth.step and self.batch.batch.num_made and self.batch.process == process_number:
            with self.batch.lock:
                forget_made(&self.batch.batch, self.growth.step)
        free(self.growth.new_ids)
        free(self.growth.planned)

    def __len__(self):
        return count_rows(self)

    @property
    def rows(self) -> np.ndarray:
        """The rows of the step, as they were numbered in the calls: int32 ``[len(step)]``, a copy in the order of the calls."""
        return column_of(self, GROWN_ROWS)

    @property
    def new_page_ids(self) -> np.ndarray:
        """Ids of the new pages: int32 ``[num_new_pages]``, a copy. Those of a row stand group by group. Pages of admitted rows
        are not listed.
        """
        return column_of(self, NEW_IDS)

    @property
    def new_page_rows(self) -> np.ndarray:
        """The row of each new page: int32 ``[num_new_pages]``, a copy. Rows stand in the order of the calls."""
        return column_of(self, NEW_ROWS)

    @property
    def new_page_groups(self) -> np.ndarray:
        """The cache group of each new page: int32 ``[num_new_pages]``, a copy."""
        return column_of(self, NEW_GROUPS)

    @property
    def refusal(self) -> Refusal | None:
        """Why the row behind the first `num_grown` got no pages; None if all have their room. O(1)."""
        cdef StepResult call = self if self.calls is None else self.calls[len(self.calls) - 1]
        return refusal_of(self.store, &call.growth.shortage) if call.growth.num_grown < call.growth.num_rows else None

    def __repr__(self):
        return f"StepResult(num_grown={self.num_grown}, new_page_ids={self.new_page_ids.tolist()})"


cdef enum Column:             # a vector of each call of a step
    GROWN_ROWS
    NEW_IDS
    NEW_ROWS
    NEW_GROUPS


cdef StepResult new_result(RunningRows running):
    """Return an empty step of a batch."""
    cdef StepResult result = StepResult.__new__(StepResult)
    result.store, result.batch, result.stays = running.store, running, running.stays_now
    return result


cdef list calls_of(StepResult step):
    """Return the results of the calls of a step, in order."""
    return [step] if step.calls is None else [step, *step.calls]


cdef Py_ssize_t count_rows(StepResult step) noexcept:
    """Count the rows of a step."""
    cdef StepResult call
    cdef Py_ssize_t n = step.growth.num_grown
    for item in step.calls or ():
        call = item
        n += call.growth.num_grown
    return n


cdef object column_of(StepResult step, Column column):
    """Return a column of the calls of a step, one after another."""
    cdef object first = part_of(&step.growth, column)
    cdef StepResult call
    if step.calls is None:
        return first
    return np.concatenate([first, *[part_of(&call.growth, column) for call in step.calls]])


cdef object part_of(const Growth *growth, Column column):
    """Return a column of a call."""
    if column == GROWN_ROWS:
        return array_of(growth.grown_rows, growth.num_grown)
    if column == NEW_IDS:
        return array_of(growth.new_ids, growth.num_new)
    return array_of(growth.new_rows if column == NEW_ROWS else growth.new_groups, growth.num_new)


cdef StepResult checked_step(RunningRows running, object step, str name):
    """Return a step of the batch that was not settled."""
    cdef StepResult checked = require_instance(step, StepResult, name)
    if checked.batch is not running:
        raise ArgumentError(f"{name}: got one of another batch, allowed: a step of this batch")
    if checked.is_settled:
        raise ArgumentError(f"{name}: got one that was settled already, allowed: one that was not")
    return checked


cdef object refusal_of(PageStore store, const Shortage *shortage):
    """Return a shortage as users see it."""
    cdef int32_t num_shards = max(1, store.pool.num_shards)
    shard = shortage.queue % num_shards if shortage.queue >= 0 else None
    pool = store.bank_names[bank_of_queue(&store.pool, shortage.queue)]
    return Refusal(
        shortage.num_needed, shortage.num_free, shortage.num_reserved, shortage.num_hit_tokens, pool, shard,
        shortage.can_wait,
    )


cdef PageIds ZERO = PageIds([0])
cdef PageIds ONE = PageIds([1])
cdef PageIds NO_TERMS = PageIds([UNKNOWN])


cdef PageIds as_amounts(object values, str name, Py_ssize_t num_rows):
    """Return a copy of `values`, a number for each row or one for all, so that they cannot change during the call."""
    cdef PageIds amounts
    if hasattr(values, "__index__") and not isinstance(values, ndarray):
        return PageIds([size_of(values, name, 0, MAX_TOKENS)])
    amounts = as_own_ids(values, name)
    if amounts.num != num_rows:
        raise ArgumentError(f"{name}: got {amounts.num}, allowed: one, or as many as rows, {num_rows}")
    return amounts


cdef PageIds as_counts(object counts, PageIds tokens, Py_ssize_t num_rows):
    """Return how many of the tokens each row gets."""
    cdef PageIds numbers
    cdef Amounts amounts
    cdef int64_t total = 0
    cdef Py_ssize_t i
    if counts is None:
        numbers, total = ONE if tokens.num else ZERO, num_rows if tokens.num else 0
    else:
        numbers = as_amounts(counts, "counts", num_rows)
    amounts = amounts_in(numbers)
    for i in range(num_rows if counts is not None else 0):
        if amount(&amounts, i) < 0:
            raise ArgumentError(f"counts: got {amount(&amounts, i)} (at {i}), allowed: at least 0")
        total += amount(&amounts, i)
    if total != tokens.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows need by `counts`, {total}")
    return numbers


cdef PageIds as_terms(object seconds, Py_ssize_t num_rows):
    """Return the terms of `seconds`: a number or None for each row, or one number for all."""
    cdef list each = [seconds] if isinstance(seconds, Real) else as_list(seconds, "seconds")
    if len(each) not in (num_rows, 1) or (len(each) != num_rows and each[0] is not seconds):
        raise ArgumentError(f"seconds: got {len(each)}, allowed: one, or as many as rows, {num_rows}")
    return PageIds([term_of_seconds(item) for item in each])


cdef Amounts amounts_in(PageIds amounts) noexcept:
    """Return a view of amounts. A single number serves all rows."""
    return Amounts(values=amounts.ids, stride=amounts.num > 1)


@cython.auto_pickle(False)
@cython.no_gc_clear  # __dealloc__ reads its buffers, which are in a tuple: the garbage collector would empty a list
cdef class RunningRows:
    """The rows of a running batch: their tokens and pages. `pagepool.RunningBatch` adds the manager.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is used only for tokens
    and pages that rows have had: 4 bytes a token, 16 a hashed page, 4 a page and group. `release` keeps it for the next
    request.
    """

    def __cinit__(self, *args, **kwargs):
        self.process = process_number
        require_allocated(&self.lock)

    def __init__(
        self, PageStore store not None, tables, groups, max_num_tokens, hash_page_size, bytes key not None, num_shards,
        max_steps_ahead=0, bint caches_computed=False, str algorithm not None="siphash128", lookahead=0,
    ):
        """`tables` are `TableRows`, one for each of the `groups`; these are `CacheGroups`, or an argument for them. With
        `caches_computed` pages are cached once the steps that computed them are settled. `key`, `algorithm` and `lookahead` are
        those of a `HashChain`.
        """
        cdef Hashing hashing = hashing_of(algorithm, key, lookahead)
        cdef tuple by_group = checked_tables(tables)
        cdef CacheGroups checked = groups if type(groups) is CacheGroups else CacheGroups(groups)
        cdef Py_ssize_t n, g, num_pool_shards = size_of(num_shards, "data_parallel_size", 0)
        cdef Py_ssize_t num_tokens = min(size_of(max_num_tokens, "max_model_len", 1, INT64_MAX), MAX_TOKENS)
        cdef Py_ssize_t num_hash_tokens = size_of(hash_page_size, "hash_page_size", 0, MAX_TOKENS)
        cdef Py_ssize_t num_steps_ahead = size_of(max_steps_ahead, "max_steps_ahead", 0, MAX_STEPS_AHEAD)
        if self.batch.groups != NULL:  # checked after the arguments, which may run Python code
            raise made_twice("rows of a batch")
        store.require_own()
        if not checked.num or checked.num != len(by_group):
            raise ArgumentError(f"groups: got {checked.num} for {len(by_group)} tables, allowed: one each, at least 1")
        if num_hash_tokens and not store.enable_caching:
            raise ArgumentError(f"hash_page_size: got {num_hash_tokens}, allowed without prefix caching: 0")
        require_banks(store, checked)
        if hashing.kind != SIPHASH and num_hash_tokens:
            store.keep_whole_digests()
        self.store, self.buffers, self.groups = store, (), checked
        self.batch.hashing = hashing
        self.tables, self.lock_order = by_group, in_lock_order(by_group)
        self.num_shards = <int32_t>num_pool_shards
        self.batch.groups, self.batch.num_groups = checked.groups, checked.num
        self.batch.max_num_tokens = <int32_t>num_tokens
        self.batch.hash_page_size = <int32_t>num_hash_tokens
        self.batch.has_boundaries = checked.boundaries.multiple != 0
        self.batch.writes_states = checked.boundaries.writes_states
        self.batch.max_steps_ahead, self.batch.writes.number = <int32_t>num_steps_ahead, 1
        self.batch.caches_computed, self.batch.ring_size = caches_computed, num_steps_ahead + 1
        self.batch.caches_late = caches_computed or (num_hash_tokens > 0 and hashing.num_lookahead > 0)
        self.stays_now = Stays.__new__(Stays)
        n = (<TableRows>by_group[0]).table.num_rows
        for g in range(checked.num):
            check_group(self, &checked.groups[g], &(<TableRows>by_group[g]).table)
        self.batch.has_final = self.batch.caches_late or self.batch.skips_pages or self.batch.writes_states
        make_records(self, n)
        make_contents(self, n)
        make_pages(self, n)
        self.batch.pool = self.batch.waiting.pool = &store.pool
        self.batch.num_rows = n
        if caches_computed:
            store.prefer_held()

    def __dealloc__(self):
        cdef Py_ssize_t row
        if self.process != process_number:  # another thread may have been changing it
            return
        for row in range(self.batch.num_rows):
            free(self.batch.rows[row].extra_keys)
        free(self.batch.writes.items)
        free(self.batch.fills.items)
        free(self.batch.made)

    def __reduce__(self):
        raise ArgumentTypeError("a running batch cannot be pickled")

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that a row can have: the model's limit, or the table's if that is less."""
        return self.batch.max_num_tokens

    @property
    def refusal(self) -> Refusal | None:
        """Why the last `admit` returned None; None if it admitted its request, or raised an error. O(1)."""
        cdef Shortage shortage
        cdef bint is_short
        with self.own_lock()[0]:
            is_short, shortage = self.is_short, self.shortage
        return refusal_of(self.store, &shortage) if is_short else None

    def _forget_refusal(self) -> None:
        """Let `refusal` be None, after an error."""
        with self.own_lock()[0]:
            self.set_shortage(NULL)

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
        self.own_lock()[0].acquire()
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

    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept:
        """Drop the row's extra keys, and its digests, which depend on them."""
        self.batch.rows[row].num_hashed = 0
        free(self.batch.rows[row].extra_keys)
        self.batch.rows[row].extra_keys = NULL
        self.extra_key_bytes[row] = None

    # Steps.

    def new_step(self) -> StepResult:
        """Return an empty step, to which `plan`, `step` and `admit` add rows."""
        self.check_made()
        return new_result(self)

    def plan(self, rows, num_tokens=1, num_drafts=0, step=None) -> StepResult:
        """Plan a step: give each row slots for its next tokens, row by row in the given order.

        `rows` is a list or an int array without repeats; `num_tokens` and `num_drafts` are a number for all rows or one for
        each. A row with known tokens that no step computes gets slots for the next `num_tokens` of them. A row without gets one
        for the token that a step in flight samples; at most `max_steps_ahead` such steps may be unsettled. `num_drafts` slots
        lie behind these: the step computes them too, but not inside a prompt, where they are room for later. Slots are for the
        longest outcome, and fall by the rejected drafts as a step is settled.

        For each row, what earlier steps have made final is cached, and pages that fell out of the attention window are given
        back; then the missing pages are taken, then full pages are cached. The first row that does not fit stops the call and
        stays as it was: preempt, and call again from ``num_grown``. With `step` the rows are added to a step, which is
        returned. A plan says that the step `max_steps_ahead` + 1 before it has run.

        ArgumentError for more tokens than a row has left, for rows not admitted, pending, repeated, or in the step already, for
        a row with nothing to compute, and for a step of another batch, or a settled one; RowOverflowError for a row that may be
        full; MovesDueError while moves of its pages are due; RequestTooLargeError for a row that would hold more pages than
        the pool, or its shard, has; RowIndexError outside the table. Nothing has changed then. O(rows + new pages), native.

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table, max_steps_ahead=1)
        >>> first = batch.new_step()
        >>> batch.admit(0, [1, 2, 3, 4, 5], step=first)
        0
        >>> second = batch.plan([0])                           # the first runs, and its token is not known
        >>> batch.num_tokens.tolist(), batch.num_ahead_tokens.tolist()
        ([5, 0], [1, 0])
        >>> batch.settle(first, [6]).tolist()                  # it is 6, and the second step computes it
        [0]
        >>> batch.num_tokens.tolist(), batch.num_computed_tokens.tolist(), batch.num_ahead_tokens.tolist()
        ([6, 0], [6, 0], [0, 0])
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds tokens = as_amounts(num_tokens, "num_tokens", row_ids.num)
        return run_growth(self, row_ids, tokens, as_amounts(num_drafts, "num_drafts", row_ids.num), None, step)

    def step(self, rows, token_ids, step=None) -> StepResult:
        """Settle the last step of rows that sampled one token each, and plan the next: the decode step of an engine that waits
        for its steps.

        `rows` and `token_ids` are lists or int arrays of one length; rows do not repeat. Each row gets its token, and a slot
        for it. Drafts of its last step are rejected: `settle` tells accepted ones. The first row that does not fit stops the
        call and gets no token. With `step` the rows are added to a step, which is returned. Nothing has changed after an error:
        RowOverflowError for a row that is full, ArgumentError for one with known tokens to compute, such as one in the middle
        of its prompt, and for one with two steps in flight, and the errors of `plan`. O(rows + new pages), native.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        check_lengths(tokens, row_ids)
        return run_growth(self, row_ids, ONE, ZERO, tokens, step)

    def settle(self, step, token_ids=None, counts=None, *, failed=False) -> np.ndarray:
        """End a step that has run: append the tokens sampled by it, and cache the pages filled by now.

        `token_ids` are the tokens of all rows, one row after another in the order of ``step.rows``. ``counts[i]`` is the number
        of tokens of row i, or one number for all: at most one more than the row's drafts, and 0 inside a prompt, or where the
        engine tells the token by `append`. None means one each; without `token_ids`, none. Computed tokens then include the
        accepted drafts, and the sampled token that a later step has in flight. Slots of rejected drafts stay.

        Return where the tokens of each row went: its row, which may have moved, or -1 for a request that was released since,
        or whose tokens were cut; its tokens are dropped. int32 ``[len(step)]``. Steps of a row that sample tokens are settled
        in the order of their launch; they end the chunks of its prompt before them, too.

        With `failed` the step has failed, and with it all later ones of the batch. Pages that they should have filled lose
        their entries, whoever has hit them. Each row goes back to the tokens before its first failed step, and a row that has
        hit such a page to the first token of this page; `plan` computes the others again. Return the rows that cannot go back,
        and are released: they have a state, wait for tokens from elsewhere, have moves due, or need pages again that a window
        gave back. int32, in ascending order. Known tokens stay, and later steps have nothing to settle.

        ArgumentError, and nothing changed, for a wrong number of tokens, for none where a later step computes them, for
        negative ones, for rows that got their token otherwise, for tokens of a failed step, and for a step of another batch, or
        one settled before; RowOverflowError for a row that would be too long. O(rows + tokens + pages cached), native; with
        `failed` O(pages of all rows).
        """
        cdef StepResult ended = checked_step(self, step, "step")
        cdef PageIds tokens, numbers
        if require_flag("failed", failed):
            if token_ids is not None or counts is not None:
                raise ArgumentError("token_ids, counts: got some of a failed step, allowed: None")
            return fail_step(self, ended)
        tokens = PageIds.__new__(PageIds) if token_ids is None else as_page_ids(token_ids, "token_ids")
        numbers = as_counts(counts, tokens, count_rows(ended))
        refuse_negative(tokens.ids, tokens.num, 0)
        return settle_step(self, ended, tokens, numbers)

    # Known tokens.

    def append(self, rows, token_ids) -> None:
        """Append one known token to each row, without room for it yet. Rows may repeat, for several tokens in order.

        If a step in flight samples the row's next token, this is its token: its drafts are rejected, and `settle` tells no
        other. ArgumentError, and nothing changed, for rows that are not admitted, and where a later step in flight computes
        the token; RowOverflowError where a row would be too long. O(rows).
        """
        cdef PageIds row_ids = as_own_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        cdef Py_ssize_t num_done
        check_lengths(tokens, row_ids)
        refuse_negative(tokens.ids, tokens.num, 0)
        with self.own_lock()[0]:
            num_done = append_tokens(&self.batch, row_ids.ids, tokens.ids, row_ids.num)
        if num_done < row_ids.num:
            refuse_append(self.store, &self.batch, row_ids, num_done)

    def trim(self, rows, num_tokens) -> None:
        """Cut the known tokens of rows, as for rejected drafts, to `num_tokens`, a number for all rows or one for each.

        A row that keeps its ``num_computed_tokens`` keeps all its pages: they are slots for its next tokens. Where computed
        tokens are cut, the pages behind the cut are given back, the last first, and lose their entries unless they have other
        holders. If the page at the cut has other holders, it is given back as well, and its first tokens have to be computed
        again: ``num_computed_tokens`` says so. Pages of other groups with these tokens, and those behind, are then given back
        too if they have other holders. With a hash lookahead of L tokens the last L tokens before the cut count as changed: the
        drafter writes their slots again, so their pages lose their entries as well, and shared ones are computed again.

        ArgumentError, and nothing changed, for more tokens than a row knows, and while steps in flight compute tokens behind
        the known ones; where computed tokens are cut, also if the attention window needs pages again that were given back, and
        if a state has seen cut tokens, unless all tokens are cut. O(rows + pages behind).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds lengths = as_amounts(num_tokens, "num_tokens", row_ids.num)
        cdef Amounts amounts = amounts_in(lengths)
        cdef Py_ssize_t num_right
        cdef bint is_due
        self.acquire_locks()
        num_right = trim_rows(&self.batch, row_ids.ids, &amounts, row_ids.num)
        is_due = num_right < row_ids.num and has_due(self, row_ids.ids[num_right])
        self.release_locks()
        if num_right < row_ids.num:
            refuse_trim(self.store, &self.batch, row_ids, num_right, amount(&amounts, num_right), is_due)

    # Release and exchange of rows.

    def release(self, rows, seconds=None) -> None:
        """Give back all pages of rows, in the given order, the last page of each first, and make the rows free.

        `seconds`, a number for each row or one for all, says when the row's next request is expected: free pages that are
        wanted later are evicted before those wanted sooner (see `CacheManager.expect`). Infinity means never again; None leaves
        what `expect` said.

        A row may be released while its steps are in flight: they have nothing to tell then. If one fails, its pages lose their
        entries.

        ArgumentError, and nothing changed, for rows that are not admitted or repeated, for seconds below 0, and for a wrong
        number of seconds; DoubleFreeError if somebody else gave one of the pages back. O(pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds ids = PageIds.__new__(PageIds), page_terms = None, row_terms = NO_TERMS
        cdef Release release
        if seconds is not None:
            row_terms, page_terms = as_terms(seconds, row_ids.num), PageIds.__new__(PageIds)
        self.acquire_locks()
        release = release_rows(self, row_ids, row_terms, ids, page_terms, False)
        self.release_locks()
        refuse_release(self.store, &self.batch, row_ids, &release)

    def move_row(self, src, tgt) -> None:
        """Move an admitted row to a free one; the source becomes free. O(tokens and pages of the row)."""
        exchange(self, self.checked_row(src), self.checked_row(tgt), True)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows, free or not. O(tokens and pages of both)."""
        exchange(self, self.checked_row(src), self.checked_row(tgt), False)

    # Forks.

    def fork(self, row, targets) -> None:
        """Fork an admitted row into free rows, for parallel samples and beams, after the step that computed its tokens. Targets
        share the full pages, and get copies of the open page of each group, and of states: see `take_moves`.

        Targets get the row's tokens and its ``num_cached_tokens``. ArgumentError for a row that is not admitted, or has
        steps in flight with tokens behind the known ones, for admitted or repeated targets, and for no targets;
        RowIndexError outside the table, MovesDueError while moves into the row's pages are due, OutOfPagesError if too few
        pages are free. Nothing has changed then. O(pages and tokens of a row) for each target, native.

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=3, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> _ = batch.admit(0, [1, 2, 3, 4, 5, 6])
        >>> batch.fork(0, [1, 2])
        >>> table.page_table_cpu[:, :2].tolist(), batch.take_moves().copies
        ([[1, 2], [1, 3], [1, 4]], PageCopies(src=[2, 2], dst=[3, 4], group=[0, 0]))
        >>> batch.release([0, 1, 2])
        """
        cdef Py_ssize_t source = self.checked_row(row)
        cdef PageIds target_rows = as_own_ids(targets, "targets")
        cdef list forgotten = [None] * (2 * target_rows.num)  # freed after unlocking: no destructor runs under a lock
        cdef Batch *batch = &self.batch
        cdef Holding *holding
        cdef Py_ssize_t num_right, i
        cdef bint is_due, is_moving, is_ready
        cdef ForkExtent extent
        cdef ForkOutcome outcome = SHORT_OF_MEMORY
        if target_rows.num == 0:
            raise ArgumentError("targets: got none, allowed: at least 1")
        self.acquire_locks()
        holding = holding_of(batch, source)
        is_due = awaits_moves(batch.pool, holding) or has_writes_due(batch, source)
        is_moving = batch.rows[source].num_ahead > 0
        is_ready = batch.records[source].state == RUNNING and not is_due and not is_moving
        num_right = stamp_free_rows(batch, target_rows.ids, target_rows.num) if is_ready else 0
        if num_right == target_rows.num:
            extent = extent_of(batch, source)
            outcome = prepare_fork(batch.pool, holding, &extent, num_right, batch.rows[source].shard)
        if outcome == FORKED and not copy_extra_keys(self, source, target_rows, forgotten):
            outcome = SHORT_OF_MEMORY
        if outcome == FORKED:
            for i in range(num_right):
                fork_row(batch, source, target_rows.ids[i])
            plan_next(batch, source)
        self.release_locks()
        if outcome != FORKED:
            refuse_unready(self.store, &self.batch, source, is_due)
            if is_moving:
                refuse_ahead_of(batch, source)
            refuse_fork(self.store, &self.batch, source, target_rows, num_right, outcome)

    # Tokens from elsewhere.

    def commit_external(self, row, num_tokens) -> None:
        """Let a pending row run once the first `num_tokens` of its awaited tokens have arrived: they count as computed, and
        their full pages are cached. `plan` computes the other tokens, whose slots stay.

        Until then the row's new pages are not cached, and `plan`, `step`, `trim` and `fork` raise ArgumentError for it;
        `append`, `release`, `move_row` and `swap_row` work. The transfer writes to the pages that `get_page_ids` lists, once
        the due moves are made. It may leave out pages that lie behind the window of all later tokens: those are
        given back. With a state all tokens have to arrive.

        ArgumentError for a row that is not pending, for more tokens than it waits for, and with a state for fewer;
        MovesDueError while moves of its pages are due. Nothing has changed then. O(pages cached).

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> batch.admit(0, list(range(11)), num_external_tokens=99), batch.num_external_tokens.tolist()
        (0, [10, 0])
        >>> batch.commit_external(0, 9)
        >>> batch.num_computed_tokens.tolist(), batch.admit(1, list(range(11)))
        ([9, 0], 8)
        """
        end_external(self, row, num_tokens, "num_tokens", False)

    def fail_external(self, row, num_valid_tokens) -> int:
        """Commit the first `num_valid_tokens` of the tokens for which a pending row waits, as `commit_external` does, and give
        back the pages behind them: nothing may write there any more, and readers need a lease. Return the row's number of
        computed tokens; `plan` computes the others.

        With a state all pages are given back, cached ones too, and 0 is returned, since the state would need all tokens. Errors
        as in `commit_external`. O(pages given back and cached).
        """
        return end_external(self, row, num_valid_tokens, "num_valid_tokens", True)

    def rewind(self, failed) -> tuple[list, list]:
        """Rewind the rows whose pages failed to load (see `CacheManager.fail`) to the first such page:
        ``num_computed_tokens`` is cut, and `plan` computes the tokens again. Call it before rows are planned or settled.

        Return the rewound rows, and the rows that cannot go back, which are released: they need pages again that a window gave
        back, have moves due, or wait for tokens from elsewhere. Admit their requests again. Rows of a model with states go back
        to token 0 if they hit pages loaded by this list or later ones, since their states may have seen wrong tokens.
        ArgumentError for loads of another pool. O(pages of all rows).
        """
        cdef FailedLoads loads = require_instance(failed, FailedLoads, "failed")
        cdef PageIds rewound = PageIds.__new__(PageIds), lost = PageIds.__new__(PageIds), ids = PageIds.__new__(PageIds)
        cdef PageIds one = PageIds([0])
        cdef Release release = Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)
        cdef Holding *holding
        cdef int32_t row, first, num_tokens
        self.check_made()
        if loads.store is not self.store:
            raise ArgumentError("failed: got loads of another pool, allowed: those of the batch's pool")
        rewound.reserve(self.batch.num_rows)
        lost.reserve(self.batch.num_rows)
        self.acquire_locks()
        for row in range(<int32_t>self.batch.num_rows if loads.ids.num and reserve_places(self, ids) else 0):
            holding = holding_of(&self.batch, row)
            first = find_wrong(holding, loads.is_wrong, loads.number) if self.batch.records[row].is_admitted else -1
            if first < 0:
                continue
            num_tokens = self.batch.records[row].num_tokens
            if not has_copies(&self.store.pool, holding) and can_restart_row(&self.batch, row, num_tokens, first):
                restart_row(&self.batch, row, num_tokens, first, False)
                rewound.put(&row, 1)
            elif release.outcome == RELEASED:
                release = release_lost(self, one, row, ids)
                lost.put(&row, 1)
        self.release_locks()
        refuse_release(self.store, &self.batch, lost, &release)
        return rewound.to_list(), lost.to_list()

    # Reads.

    def _is_refused_still(
        self, row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options, num_lookahead_tokens=0,
        bint reserves_prompt=False,
    ) -> bool:
        """Whether the row refused this request last, and certainly refuses it again. O(1) for tokens in the same list, or in an
        array over the same memory, where a sample is compared; O(tokens) for others.
        """
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef RefusedRequest refusal = self.refusals[checked]
        cdef Holding *holding
        cdef Tokens tokens
        cdef Py_ssize_t num_reserved
        cdef int32_t num_room, num_slots
        cdef Shortage shortage
        cdef bint is_refused
        if refusal is None or not refusal.is_of(token_ids, options, tokens_of(&self.batch, checked)):
            return False
        tokens = count_tokens(
            num_tokens, max_num_new_tokens, refusal.num_tokens, refusal.num_external, num_lookahead_tokens, reserves_prompt
        )
        num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        self.acquire_locks()
        is_refused = self.refusals[checked] is refusal and self.batch.records[checked].state == FREE
        is_refused = is_refused and refusal.finds_hits(&self.store.pool)
        if is_refused:
            holding = holding_of(&self.batch, checked)
            num_room = count_room_tokens(&tokens, refusal.num_hit_tokens)
            num_slots = count_slots(&tokens, num_room, self.batch.max_num_tokens)
            is_refused = num_slots <= refusal.num_slots  # a larger request may be too large for the pool
            is_refused = is_refused and refusal.is_short(
                &self.store.pool, count_new_pages(holding, num_slots), num_reserved
            )
        if is_refused:
            shortage = shortage_beside(
                &self.store.pool, refusal.count_needed(&self.store.pool, holding, num_slots), num_reserved,
                refusal.num_hit_tokens, 0, refusal.shard,
            )
            self.set_shortage(&shortage)
            count_refusal(&self.store.pool, shortage.queue)
        self.release_locks()
        return is_refused

    def take_moves(self) -> Moves:
        """Take the moves that are due, with the writes of the batch's states."""
        cdef StateWrites writes = take_due_writes(self)
        return take_with(self.store, writes, &self.last_step)

    def get_page_ids(self, row) -> tuple:
        """Return the ids of a row's pages, a list for each group, with the null page, 0, for skipped pages. O(pages)."""
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef Holding *holding
        cdef tuple ids = new_ids(self.batch.num_groups)
        cdef bint has_room
        with self.own_lock()[0]:
            holding = holding_of(&self.batch, checked)
            has_room = copy_ids(holding, ids)
        if not has_room:
            raise MemoryError("the page ids of a row")
        return self.store.lists_in_banks(ids)


cdef StateWrites take_due_writes(RunningRows running):
    """Take the list of states that the planned step writes to pages of their own. O(writes)."""
    cdef int32_t[:, ::1] taken
    cdef const StateWrite *write
    cdef WriteList *writes = &running.batch.writes
    cdef Py_ssize_t i, num_due, num = -1
    running.check_made()
    with running.own_lock()[0]:
        num_due = writes.num - writes.num_taken
    if num_due == 0:
        return NO_WRITES
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((4, num), np.int32)
        taken = columns
        with running.own_lock()[0]:
            num_due = writes.num - writes.num_taken
            if num == num_due:
                for i in range(num):
                    write = &writes.items[writes.num_taken + i]
                    taken[0, i], taken[1, i] = write.row, write.num_tokens
                    taken[2, i] = write.page_id - offset_of(&running.batch, write.group)
                    taken[3, i] = write.group
                writes.num_taken = writes.num
                writes.number += 1
    return writes_of(columns)


# Memory.

cdef int32_t *new_buffer(RunningRows running, Py_ssize_t num_rows, Py_ssize_t num_values) except NULL:
    """Allocate zeros, aligned to a cache line, for the life of the batch. Memory that is never touched stays unused."""
    cdef Buffer buffer = Buffer(num_rows, num_values)
    running.buffers += (buffer,)
    return buffer.values


cdef int check_group(RunningRows running, Group *group, const Table *table) except -1:
    """Add a group's needs to the batch. ArgumentError unless a cached group, one with an id, has whole hashes to a page."""
    if group.id != NO_GROUP and group.stride * running.batch.hash_page_size != group.rules.entry_size:
        raise ArgumentError(
            f"groups: got {group.stride} hashes of {running.batch.hash_page_size} tokens for pages of "
            f"{group.rules.entry_size}, allowed: as many as make a page"
        )
    running.batch.max_num_tokens = <int32_t>min(
        <int64_t>running.batch.max_num_tokens, <int64_t>group.rules.page_size * table.num_columns
    )
    running.batch.skips_pages |= has_window(&group.rules)
    running.batch.has_state |= is_state(&group.rules)
    return 0


cdef int make_records(RunningRows running, Py_ssize_t n) except -1:
    cdef Py_ssize_t row
    running.batch.records = <RowRecord *>new_buffer(running, n, sizeof(RowRecord) // sizeof(int32_t))
    records = np.frombuffer(running.buffers[len(running.buffers) - 1], dtype=ROW_RECORD)
    running.num_tokens = records["num_tokens"]
    running.num_computed_tokens = records["num_computed"]
    running.is_admitted = records["is_admitted"]
    running.batch.launches = <Launch *>new_buffer(running, n * running.batch.ring_size, sizeof(Launch) // sizeof(int32_t))
    running.batch.stays = <int64_t *>new_buffer(running, n, sizeof(int64_t) // sizeof(int32_t))
    running.stays = np.frombuffer(running.buffers[len(running.buffers) - 1], np.int64)
    running.batch.rows = <Row *>new_buffer(running, n, sizeof(Row) // sizeof(int32_t))
    numbers = np.frombuffer(running.buffers[len(running.buffers) - 1], np.int32).reshape(n, sizeof(Row) // sizeof(int32_t))
    first = (<char *>&running.batch.rows.num_hits - <char *>running.batch.rows) // sizeof(int32_t)
    running.num_cached_tokens, running.num_external_tokens, running.num_ahead_tokens = numbers[:, first:first + 3].T
    running.batch.checked_rows = new_buffer(running, n, 1)
    running.batch.stamps = <uint32_t *>new_buffer(running, n, 1)
    running.batch.due_rows = <DueRow *>new_buffer(running, n, sizeof(DueRow) // sizeof(int32_t))
    for row in range(n):
        running.batch.rows[row].shard = -1
    return 0


cdef int make_contents(RunningRows running, Py_ssize_t n) except -1:
    cdef Py_ssize_t row, stride, num_hashes = 0
    cdef Digest *digests
    cdef Digest *uppers = NULL
    running.batch.tokens_stride = odd_lines(running.batch.max_num_tokens, sizeof(int32_t))
    running.batch.token_ids = new_buffer(running, n, running.batch.tokens_stride)
    running.batch.waiting.key, running.batch.waiting.num_lanes = running.batch.hashing.key, MAX_LANES if has_avx2() else 2
    running.batch.waiting.num_page_bytes = (
        (running.batch.hash_page_size + running.batch.hashing.num_lookahead) * sizeof(int32_t)
    )
    if running.batch.hash_page_size:
        num_hashes = running.batch.max_num_tokens // running.batch.hash_page_size
    stride = odd_lines(num_hashes, sizeof(Digest))
    digests = <Digest *>new_buffer(running, n, stride * (sizeof(Digest) // sizeof(int32_t)))
    if running.batch.hashing.kind != SIPHASH:
        uppers = <Digest *>new_buffer(running, n, stride * (sizeof(Digest) // sizeof(int32_t)))
    for row in range(n):
        running.batch.rows[row].digests = digests + row * stride
        running.batch.rows[row].uppers = uppers + row * stride if uppers != NULL else NULL
    running.extra_key_bytes = [None] * n
    running.refusals = [None] * n
    return 0


cdef int make_pages(RunningRows running, Py_ssize_t n) except -1:
    cdef Py_ssize_t g, row, stride, num_groups = running.groups.num
    cdef int32_t *page_ids
    cdef Held *held
    cdef Boundaries *boundaries = NULL
    running.batch.tables = <Table **>new_buffer(running, num_groups, sizeof(Table *) // sizeof(int32_t))
    held = <Held *>new_buffer(running, n, num_groups * (sizeof(Held) // sizeof(int32_t)))
    if running.batch.has_boundaries:
        boundaries = <Boundaries *>new_buffer(running, n, sizeof(Boundaries) // sizeof(int32_t))
    for row in range(n):
        running.batch.rows[row].holding = Holding(
            groups=running.batch.groups, held=held + row * num_groups, num_groups=num_groups, boundaries=NULL,
            session=NO_SESSION, num_once_cached=0,
        )
        if boundaries != NULL:
            running.batch.rows[row].holding.boundaries = boundaries + row
    for g in range(num_groups):
        running.batch.tables[g] = &(<TableRows>running.tables[g]).table
        stride = odd_lines(running.batch.tables[g].num_columns, sizeof(int32_t))
        page_ids = new_buffer(running, n, stride)
        for row in range(n):
            held[row * num_groups + g].ids = page_ids + row * stride
    return 0


# Steps.

cdef StepResult run_growth(
    RunningRows running, PageIds rows, PageIds num_tokens, PageIds num_drafts, PageIds tokens, object step
):
    """Check all rows and reserve memory for the result; then plan the rows, which cannot fail."""
    cdef StepResult head = None if step is None else checked_step(running, step, "step")
    cdef StepResult result = new_result(running)
    cdef Growth *growth = &result.growth
    cdef Py_ssize_t num_right, at_joined
    cdef int64_t num_steps
    cdef bint is_due, has_room = True
    cdef int32_t held_free = NULL_PAGE
    cdef void *thread
    result.num_tokens, result.num_drafts = num_tokens, num_drafts
    growth.rows, growth.num_rows = rows.ids, rows.num
    growth.num_tokens, growth.num_drafts = amounts_in(num_tokens), amounts_in(num_drafts)
    growth.token_ids = NULL if tokens is None else tokens.ids
    if growth.num_rows == 0:
        return result if head is None else add_call(head, result)
    reserve_rows_of(growth)
    lock_for(running, head, "step")
    assert running.batch.waiting.num_to_hash == 0
    growth.step = number_of_step(&running.batch, head)
    at_joined = find_joined(&running.batch, growth)
    num_right = check_rows(&running.batch, growth)
    if num_right < growth.num_rows:
        at_joined = -1
    elif at_joined >= 0:
        num_right = at_joined
    if num_right == growth.num_rows:
        growth.max_num_new = min(growth.max_num_new, running.store.pool.num_pages)  # no page is taken twice
        has_room = reserve_new(growth)
        held_free = find_held_free(&running.store.pool, growth.max_num_new)
    if num_right == growth.num_rows and has_room and held_free == NULL_PAGE:
        thread = let_others_run(growth.num_rows + growth.max_num_new)
        num_steps, running.batch.num_steps = running.batch.num_steps, max(running.batch.num_steps, growth.step)
        grow_rows(&running.batch, growth)
        go_on(thread)
        if growth.num_grown == 0:
            running.batch.num_steps = num_steps
        end_call(&running.batch, head, result)
    else:
        untell_rows(&running.batch, growth, 0)
        growth.step = 0  # the step does not end with the result of a refused call
    is_due = num_right < growth.num_rows and at_joined < 0 and has_due(running, growth.rows[num_right])
    running.release_locks()
    if at_joined >= 0:
        raise ArgumentError(
            f"row {running.batch.checked_rows[at_joined]} (at {at_joined}): got a row that is in this step or a later one, "
            "allowed: others"
        )
    if num_right < growth.num_rows:
        if tokens is not None:
            refuse_negative(tokens.ids, tokens.num, 0)
        refuse_growth(running.store, &running.batch, growth, num_right, is_due)
    if not has_room:
        raise MemoryError(f"{growth.max_num_new} new pages")
    running.store.check_untaken(held_free)
    return result if head is None else add_call(head, result)


cdef int64_t number_of_step(const Batch *batch, StepResult step) noexcept:
    """Return the number of a step, which is the next one if it has no rows, or is None. The locks are held."""
    return step.growth.step if step is not None and step.growth.step else batch.num_steps + 1


cdef Py_ssize_t find_joined(const Batch *batch, const Growth *growth) noexcept:
    """Return the index of the first row that is in the call's step, or a later one; -1 if there is none. The locks are held."""
    cdef Py_ssize_t i, num_launches
    cdef int32_t row
    for i in range(growth.num_rows if growth.step <= batch.num_steps else 0):
        row = growth.rows[i]
        num_launches = batch.records[row].num_launches if is_row(batch, row) else 0
        if num_launches and launch_of(batch, row, num_launches - 1).step >= growth.step:
            return i
    return -1


cdef void end_call(Batch *batch, StepResult head, StepResult call) noexcept:
    """Note the step of a call that launched rows, and the batch's counts as it ends. The locks are held."""
    cdef Growth *growth = &call.growth
    call.num_grown = growth.num_grown
    growth.num_stays = batch.num_stays
    if growth.num_grown == 0:  # a result without rows is no step
        growth.step = 0
        return
    batch.num_steps = max(batch.num_steps, growth.step)
    if head is not None:
        head.growth.step = growth.step


cdef StepResult add_call(StepResult step, StepResult call):
    """Add the result of a call to a step, and return the step."""
    if step.calls is None:
        step.calls = []
    step.calls.append(call)
    step.num_grown = call.num_grown
    return step


cdef StepResult new_admission(RunningRows running, Py_ssize_t row):
    """Return the call that admits a row, before it is part of a step."""
    cdef StepResult call = new_result(running)
    call.growth.num_rows = 1
    reserve_rows_of(&call.growth)
    call.growth.grown_rows[0] = <int32_t>row
    return call


cdef void launch_admission(Batch *batch, Py_ssize_t row, StepResult step, StepResult call, Launch launch) noexcept:
    """Launch the first tokens of an admitted row, as part of a step by `call` or, without one, of the next step. The locks are
    held.
    """
    launch.step = number_of_step(batch, step)
    add_launch(batch, row, launch)
    count_run_tokens(batch, row)
    if step is not None:
        call.growth.step, call.growth.num_grown = launch.step, 1
        end_call(batch, step, call)


cdef int reserve_rows_of(Growth *growth) except -1:
    """Allocate the vectors of a call's rows."""
    growth.planned = <Planned *>malloc(growth.num_rows * (sizeof(Planned) + sizeof(int32_t)))
    if growth.planned == NULL:
        raise MemoryError(f"{growth.num_rows} rows")
    growth.grown_rows = <int32_t *>(growth.planned + growth.num_rows)
    return 0


cdef bint reserve_new(Growth *growth) noexcept:
    """Allocate memory for the ids of new pages; False if memory is short."""
    if growth.max_num_new:
        growth.new_ids = <int32_t *>malloc(3 * growth.max_num_new * sizeof(int32_t))
        growth.new_rows = growth.new_ids + growth.max_num_new
        growth.new_groups = growth.new_rows + growth.max_num_new
    return growth.new_ids != NULL or growth.max_num_new == 0


cdef bint has_due(RunningRows running, int32_t row) noexcept:
    """Whether moves of a row at which a call stopped are due. Asked under the locks: another thread may take them soon."""
    return is_row(&running.batch, row) and has_row_due(&running.batch, row)


cdef int lock_for(RunningRows running, StepResult step, str name) except -1:
    """Take all locks for a call that changes a step, or for one without a step (None). Raise if another thread has settled the
    step meanwhile.
    """
    running.acquire_locks()
    if step is not None and step.is_settled:
        running.release_locks()
        checked_step(running, step, name)
    return 0


cdef Settlement settlement_of(StepResult call, PageIds counts, int32_t *places, Py_ssize_t first) noexcept:
    """Return the settlement of a call whose rows begin at index `first` of the step."""
    cdef Amounts each = amounts_in(counts)
    each.values += first * each.stride
    return Settlement(growth=&call.growth, stays=call.stays.by_row, counts=each, places=places)


cdef object settle_step(RunningRows running, StepResult ended, PageIds tokens, PageIds numbers):
    """Settle a step that ended well. See `RunningRows.settle`."""
    cdef StepResult call
    cdef list calls = calls_of(ended)
    cdef Py_ssize_t n = count_rows(ended), at = 0, first = 0
    cdef PageIds places = PageIds.__new__(PageIds)
    cdef const int32_t *token_ids_left = tokens.ids
    cdef Settlement settlement
    cdef SettleFault fault = SETTLES
    places.reserve(n)
    lock_for(running, ended, "step")
    for call in calls:
        settlement = settlement_of(call, numbers, places.ids + first, first)
        fault = check_settlement(&running.batch, &settlement, &at)
        if fault != SETTLES:
            break
        first += call.growth.num_grown
    first = 0
    for call in calls if fault == SETTLES else ():
        settlement = settlement_of(call, numbers, places.ids + first, first)
        token_ids_left = settle_rows(&running.batch, &settlement, token_ids_left)
        first += call.growth.num_grown
    if fault == SETTLES:
        forget_made(&running.batch, ended.growth.step)
        ended.is_settled = running.batch.settles = True
    running.release_locks()
    if fault != SETTLES:
        refuse_settlement(&running.batch, &settlement, fault, at)
    return array_of(places.ids, n)


cdef object fail_step(RunningRows running, StepResult ended):
    """Settle a step that failed, and with it all later ones. See `RunningRows.settle`."""
    cdef Batch *batch = &running.batch
    cdef PageIds one = PageIds([0]), lost = PageIds.__new__(PageIds), ids = PageIds.__new__(PageIds)
    cdef Release release = Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)
    cdef Failure failure
    cdef int32_t row
    cdef bint has_room
    lost.reserve(batch.num_rows)
    lock_for(running, ended, "step")
    failure.step = ended.growth.step
    failure.is_lost = <uint8_t *>calloc(running.store.pool.num_pages + batch.num_rows, 1)
    has_room = failure.is_lost != NULL and reserve_places(running, ids)
    if has_room and failure.step:
        failure.has_lost = failure.is_lost + running.store.pool.num_pages
        lose_entries(batch, &failure)
        take_back_fills(&batch.fills, failure.step)
    for row in range(<int32_t>batch.num_rows if has_room and failure.step else 0):
        if not set_back(batch, &failure, row) and release.outcome == RELEASED:
            release = release_lost(running, one, row, ids)
            lost.put(&row, 1)
    if has_room:
        ended.is_settled = batch.settles = True
    running.release_locks()
    free(failure.is_lost)
    if not has_room:
        raise MemoryError("the pages of a failed step")
    refuse_release(running.store, &running.batch, lost, &release)
    return array_of(lost.ids, lost.num)


# Release and exchange of rows.

cdef Release release_rows(
    RunningRows running, PageIds rows, PageIds row_terms, PageIds ids, PageIds page_terms, bint has_failed
) noexcept:
    """Give back the pages of rows, and make the rows free, or change nothing. `ids` takes the pages, and `page_terms` their
    terms, if there are any. Where the rows' steps have failed, nothing more is cached. The locks are held.
    """
    cdef Amounts terms = amounts_in(row_terms)
    cdef Py_ssize_t num_right, num_staying = 0, bad, i
    cdef int32_t overdrawn = NULL_PAGE
    num_right = copy_rows_to_release(running, rows)
    if num_right < rows.num:
        return Release(outcome=WRONG_ROW, at=num_right, page_id=NULL_PAGE)
    if running.batch.has_boundaries or page_terms is not None or running.batch.hashing.num_lookahead:
        overdrawn = find_overdrawn_page(running, num_right)  # before pages are cached or rated, or the queue is divided
    if overdrawn != NULL_PAGE:
        return Release(outcome=OVERDRAWN, at=0, page_id=overdrawn)
    if not reserve_rows(running, num_right, ids, page_terms) or (num_right and not running.store.make_terms(row_terms)):
        return Release(outcome=SHORT_OF_ROOM, at=0, page_id=NULL_PAGE)
    if not has_failed:
        cache_last_pages(&running.batch, num_right)
    if not order_pages(running, num_right, ids, &num_staying, &terms, page_terms):
        return Release(outcome=SHORT_OF_ROOM, at=0, page_id=NULL_PAGE)
    bad = running.store.give_back_row(ids, num_staying, ids_in(page_terms))
    if bad >= 0:
        return Release(outcome=OVERDRAWN, at=0, page_id=ids.ids[bad])
    for i in range(num_right):
        end_row(&running.batch, running.batch.checked_rows[i], amount(&terms, i), has_failed)
    return Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)


cdef bint reserve_places(RunningRows running, PageIds ids) noexcept:
    """Reserve memory for the pages of any one row; False if memory is short."""
    cdef Py_ssize_t row, num_places = 0
    for row in range(running.batch.num_rows):
        num_places = max(num_places, count_places(holding_of(&running.batch, row)))
    return ids.try_reserve(num_places)


cdef Release release_lost(RunningRows running, PageIds one, int32_t row, PageIds ids) noexcept:
    """Release a row whose tokens were not computed, with room for it in `one`, and for its pages in `ids`. The locks are held.
    """
    one.ids[0], ids.num = row, 0
    return release_rows(running, one, NO_TERMS, ids, None, True)


cdef Py_ssize_t copy_rows_to_release(RunningRows running, PageIds rows) noexcept:
    """Copy the rows, and return the number of rows before the first wrong one."""
    cdef Py_ssize_t i
    start_call(&running.batch)
    for i in range(rows.num):
        if not stamp_row(&running.batch, rows.ids[i], i):
            return i
    return rows.num


cdef int32_t find_overdrawn_page(RunningRows running, Py_ssize_t n) noexcept:
    """Find a page with fewer references than places in the copied rows; NULL_PAGE if there is none."""
    cdef Holding *holding
    cdef Py_ssize_t i
    cdef int32_t found, bad = NULL_PAGE
    for i in range(n):
        holding = holding_of(&running.batch, running.batch.checked_rows[i])
        found = draw_references(&running.store.pool, holding, -1)
        bad = found if found != NULL_PAGE else bad
    for i in range(n):
        holding = holding_of(&running.batch, running.batch.checked_rows[i])
        draw_references(&running.store.pool, holding, 1)
    return bad


cdef bint reserve_rows(RunningRows running, Py_ssize_t n, PageIds ids, PageIds page_terms) noexcept:
    """Reserve memory for the pages of the copied rows, and for their terms if any are given; False if memory is short."""
    cdef Holding *holding
    cdef Py_ssize_t i, num_places = 0
    for i in range(n):
        holding = holding_of(&running.batch, running.batch.checked_rows[i])
        num_places += count_places(holding)
    return ids.try_reserve(num_places) and (page_terms is None or page_terms.try_reserve(num_places))


cdef bint order_pages(
    RunningRows running, Py_ssize_t n, PageIds ids, Py_ssize_t *num_staying, const Amounts *terms, PageIds page_terms
) noexcept:
    """Rate the pages of the copied rows and list them in the order of giving back, pages that stay cached first, with their
    terms. False if memory is short.
    """
    cdef Batch *batch = &running.batch
    cdef Holding *holding
    cdef Py_ssize_t i
    cdef int are_worthless
    for i in range(n if batch.has_boundaries else 0):
        rate_pages(batch.pool, holding_of(batch, batch.checked_rows[i]), MAX_TOKENS)
    for are_worthless in range(2 if batch.has_boundaries else 1):
        for i in range(n):
            holding = holding_of(batch, batch.checked_rows[i])
            if not list_last_first(batch.pool, holding, MAX_TOKENS, ids, are_worthless):
                return False
            if page_terms is not None and not are_worthless:
                if not running.store.pad_terms(page_terms, amount(terms, i), ids.num):
                    return False
        if not are_worthless:
            num_staying[0] = ids.num
    return True


cdef int exchange(RunningRows running, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
    cdef Batch *batch = &running.batch
    cdef bint is_right, has_source, has_target
    cdef object _forgotten, _forgotten_too  # freed after unlocking: no destructor runs under a lock
    cdef Stays before, now = Stays.__new__(Stays)
    cdef int64_t *by_row = <int64_t *>malloc(batch.num_rows * sizeof(int64_t))
    if by_row == NULL:
        raise MemoryError(f"{batch.num_rows} rows")
    running.acquire_locks()
    before = running.stays_now
    has_source, has_target = batch.records[source].is_admitted, batch.records[target].is_admitted
    is_right = not is_move or (has_source and batch.records[target].state == FREE)
    is_right = is_right and batch.records[source].state != CLAIMED and batch.records[target].state != CLAIMED
    if is_right and source != target:
        memcpy(by_row, batch.stays, batch.num_rows * sizeof(int64_t))
        before.by_row, by_row, running.stays_now = by_row, NULL, now
        exchange_rows(batch, source, target)
        _forgotten, _forgotten_too = running.refusals[source], running.refusals[target]
        running.refusals[source] = running.refusals[target] = None
        keys = running.extra_key_bytes
        keys[source], keys[target] = keys[target], keys[source]
    running.release_locks()
    free(by_row)
    if not is_right:
        raise ArgumentError(
            f"rows {source} and {target}: got {'an admitted' if has_source else 'a free'} and "
            f"{'an admitted' if has_target else 'a free'} one, allowed: "
            f"{'an admitted row and a free one' if is_move else 'rows that are not being admitted'}"
        )
    return 0


# Forks.


cdef bint copy_extra_keys(RunningRows running, Py_ssize_t source, PageIds targets, list forgotten) noexcept:
    """Give free rows the extra keys of the source, and move their old ones to `forgotten`. False if memory is short: the
    rows that have the new keys have no digests.
    """
    cdef Batch *batch = &running.batch
    cdef ExtraKey *keys = batch.rows[source].extra_keys
    cdef Py_ssize_t i, row, num_keys = 1
    while keys != NULL and keys[num_keys - 1].page != LAST_PAGE:
        num_keys += 1
    for i in range(targets.num):
        row = targets.ids[i]
        forgotten[2 * i], forgotten[2 * i + 1] = running.refusals[row], running.extra_key_bytes[row]
        running.refusals[row] = None
        running.forget_extra_keys(row)
        if keys != NULL:
            batch.rows[row].extra_keys = <ExtraKey *>malloc(num_keys * sizeof(ExtraKey))
            if batch.rows[row].extra_keys == NULL:
                return False
            memcpy(batch.rows[row].extra_keys, keys, num_keys * sizeof(ExtraKey))
            running.extra_key_bytes[row] = running.extra_key_bytes[source]
    return True


# Tokens from elsewhere.

cdef int32_t end_external(RunningRows running, object row, object num_tokens, str name, bint is_failed) except -1:
    """Let a pending row run, and return its number of computed tokens."""
    cdef Batch *batch = &running.batch
    cdef Py_ssize_t checked = running.checked_row(row)
    cdef int32_t num = <int32_t>size_of(num_tokens, name, 0, MAX_TOKENS)
    cdef int32_t num_external, num_computed
    cdef bint is_due, is_right
    running.acquire_locks()
    num_external = batch.rows[checked].num_external
    is_due = num_external and has_due(running, <int32_t>checked)
    is_right = 0 < num_external and num <= num_external and not is_due
    is_right = is_right and (is_failed or num == num_external or not batch.has_state)
    if is_right and is_failed:
        fail_row(batch, checked, num)
    elif is_right:
        commit_row(batch, checked, num)
    num_computed = batch.records[checked].num_computed
    running.release_locks()
    if not is_right:
        refuse_end(running.store, &running.batch, checked, num, num_external, is_due)
    return num_computed
