"""Running rows."""

cimport cython
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t, int64_t

from pagepool.core.arguments cimport array_of, require_instance, size_of
from pagepool.core.batch cimport (
    Amounts, Batch, Grown, Growth, amount, claim_row, held_by, holding_of, is_row, start_call, tokens_of,
)
from pagepool.core.copies cimport awaits_copies, drop_copies, has_copies_due, reserve_copies
from pagepool.core.growth cimport append_tokens, check_growth, check_step, copy_rows, grow_rows, keep_last_states, uncount
from pagepool.core.holdings cimport Held, Holding, count_new_pages, count_places, find_lost_page, list_last_first
from pagepool.core.ids cimport PageIds, as_own_ids, as_page_ids, refuse_negative
from pagepool.core.platform cimport go_on, let_others_run
from pagepool.core.queue cimport find_held_free, has_free_pages
from pagepool.core.records cimport NULL_PAGE
from pagepool.core.lookups cimport RowRefusal, Tokens, count_room_tokens, count_tokens
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.row_moves cimport empty_row, exchange_rows, set_context
from pagepool.core.rules cimport MAX_TOKENS
from pagepool.core.shrinking cimport (
    can_undo, check_trim, forget_row, has_state_behind, is_as_grown, trim_row, undo_row,
)

import numpy as np

from pagepool.errors import ArgumentError, CopiesDueError, DoubleFreeError, RowIndexError

cdef object ndarray = np.ndarray


cdef class RunningRows(RowMemory)


@cython.final
@cython.no_gc  # it is in no cycle: a batch does not know its results
@cython.auto_pickle(False)
cdef class StepResult:
    """What a call of `RunningBatch` that grows rows did.

    The first `num_grown` of its rows have their room; the row at that place, if there is one, is the first that did not fit.
    `RunningBatch.undo` takes the call back.
    """

    cdef readonly Py_ssize_t num_grown
    cdef RunningRows batch          # that was grown; None once the call is taken back
    cdef PageIds num_new_tokens     # a number for each row, or one for all
    cdef Growth growth              # its `rows` and `token_ids` are the caller's, and not read after the call

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
            self.growth.grown = <Grown *>malloc(rows.num * sizeof(Grown))
            if self.growth.grown == NULL:
                raise MemoryError(f"{rows.num} rows")
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
cdef class RunningRows(RowMemory):
    """Rows that run together. `pagepool.RunningBatch` adds the manager."""

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
        check_tokens(tokens, row_ids)
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
        is_due = num_left > 0 and self.has_due(growth.grown[num_left - 1].row)
        self.let_go()
        if num_left:
            self.refuse_undo(growth, num_left - 1, is_due)

    cdef int refuse_undo(self, const Growth *growth, Py_ssize_t at, bint is_due) except -1:
        cdef int32_t row = growth.grown[at].row
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
        check_tokens(tokens, row_ids)
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

    def is_refused_still(self, row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options) -> bool:
        """Return whether the row has refused this request last, and certainly refuses it again. O(1) for tokens in the same
        list, or in an array over the same memory, of which a sample is compared; O(tokens) for others.
        """
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef RowRefusal refusal = self.refusals[checked]
        cdef Holding holding
        cdef Tokens tokens
        cdef Py_ssize_t num_reserved
        cdef int64_t num_needed
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
            num_needed = count_new_pages(&holding, count_room_tokens(&tokens, refusal.num_hit_tokens)) - refusal.watch.num_held
            is_refused = not has_free_pages(&self.store.pool, num_needed, num_reserved, refusal.shard)
        self.let_go()
        return is_refused

    def find_next_multiple(self, rows, interval) -> np.ndarray:
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


cdef int check_tokens(PageIds tokens, PageIds rows) except -1:
    """One token id for each row, none below 0."""
    if tokens.num != rows.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows, {rows.num}")
    return refuse_negative(tokens.ids, tokens.num, 0)
