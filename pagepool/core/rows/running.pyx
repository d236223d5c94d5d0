"""Running rows."""

cimport cython
from libc.stdint cimport INT32_MAX, INT64_MAX

from pagepool.core.holding cimport (
    FORKED, SHORT_OF_MEMORY, awaits_moves, copy_ids, prepare_fork, require_banks, shortage_beside,
)
from pagepool.core.rows.forks cimport *
from pagepool.core.rows.step_end cimport *
from pagepool.core.tables cimport TableRows, checked_tables, in_lock_order
from pagepool.core.tier cimport NO_WRITES, FailedLoads, Moves, StateWrites, take_with, writes_of
from pagepool.core.values cimport array_of, hashing_of, require_instance

import numpy as np

from pagepool.arguments import require_flag
from pagepool.errors import ArgumentError, ArgumentTypeError, made_twice
from pagepool.refusal import Refusal


MEDIA_CALLS = "__enter__", "__exit__", "watch", "collect", "lose", "exchange", "fork"


@cython.auto_pickle(False)
cdef class RunningRows:
    """The rows of a running batch: their tokens and pages. `pagepool.RunningBatch` adds the manager.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is used only for tokens
    and pages that rows have had: 4 bytes a token, 16 a hashed page, 4 a page and group. `release` keeps it for the next
    request.
    """

    def __cinit__(self, *args, **kwargs):
        self.rows = RowStore.__new__(RowStore)

    def __init__(
        self, PageStore store not None, tables, groups, max_num_tokens, hash_page_size, bytes key not None, num_shards,
        max_steps_ahead=0, bint caches_computed=False, str algorithm not None="siphash128", hash_lookahead=0,
        bint has_local_ids=False,
    ):
        """`tables` are `TableRows`, one for each of the `groups`; these are `CacheGroups`, or an argument for them. With
        `caches_computed` pages are cached once the steps that computed them are settled. `key`, `algorithm` and
        `hash_lookahead` are as in `HashChain`. With `has_local_ids` the tables count the pages of each shard from 1.
        """
        cdef RowStore rows = self.rows
        cdef Hashing hashing = hashing_of(algorithm, key, hash_lookahead)
        cdef tuple by_group = checked_tables(tables)
        cdef CacheGroups checked = groups if type(groups) is CacheGroups else CacheGroups(groups)
        cdef Py_ssize_t num_pool_shards = size_of(num_shards, "data_parallel_size", 0)
        cdef Py_ssize_t num_tokens = min(size_of(max_num_tokens, "max_model_len", 1, INT64_MAX), MAX_TOKENS)
        cdef Py_ssize_t num_hash_tokens = size_of(hash_page_size, "hash_page_size", 0, MAX_TOKENS)
        cdef Py_ssize_t num_steps_ahead = size_of(max_steps_ahead, "max_steps_ahead", 0, MAX_STEPS_AHEAD)
        if rows.batch.groups != NULL:  # checked after the arguments, which may run Python code
            raise made_twice("rows of a batch")
        store.require_own()
        if not checked.num or checked.num != len(by_group):
            raise ArgumentError(f"groups: got {checked.num} for {len(by_group)} tables, allowed: one each, at least 1")
        if num_hash_tokens and not store.enable_caching:
            raise ArgumentError(f"hash_page_size: got {num_hash_tokens}, allowed without prefix caching: 0")
        require_banks(store, checked)
        rows.store, rows.groups, rows.tables, rows.lock_order = store, checked, by_group, in_lock_order(by_group)
        rows.num_shards, rows.cross_tables = <int32_t>num_pool_shards, ()
        rows.batch.num_local_shards = rows.num_shards if has_local_ids else 0
        rows.batch.max_num_tokens, rows.batch.max_steps_ahead = <int32_t>num_tokens, <int32_t>num_steps_ahead
        rows.begin_caching(&hashing, <int32_t>num_hash_tokens, caches_computed)
        rows.begin_groups()
        rows.make_arrays()
        show_arrays(self)

    def show_media(self, tables, encoder_lens, media) -> None:
        """Let `media`, a `RowMedia`, follow the rows, and inputs show its pages: `tables` are `TableRows`, one for each group
        of cross-attention, and `encoder_lens` the rows' numbers of encoder tokens, int32 ``[num_rows]``.
        """
        cdef tuple checked = checked_tables(tables)
        cdef Py_ssize_t n = self.rows.batch.num_rows
        cdef int32_t[::1] lens
        self.rows.check_made()
        try:
            lens = encoder_lens
        except (BufferError, TypeError, ValueError):
            raise ArgumentTypeError(f"encoder_lens: got {type(encoder_lens).__name__}, allowed: an int32 array") from None
        if not all([callable(getattr(media, name, None)) for name in MEDIA_CALLS]):
            raise ArgumentTypeError(f"media: got {type(media).__name__}, allowed: RowMedia")
        if lens is None or lens.shape[0] != n or not checked or (<TableRows>checked[0]).table.num_rows != n:
            raise ArgumentError(f"encoder_lens: got other rows than in the tables, allowed: {n} in all")
        if self.rows.media is not None:
            raise made_twice("media of rows")
        media.watch(self.rows.records["num_resolved"])
        self.rows.cross_tables, self.rows.encoder_lens, self.rows.media = checked, lens, media

    def get_medium(self, row) -> object:
        """Return the `Medium` that an admitted row reads, None for a free row, or one without a medium. Raise ArgumentError for
        a model without cross-attention, RowIndexError outside the table.
        """
        cdef Py_ssize_t checked = self.rows.checked_row(row)
        if self.rows.media is None:
            raise ArgumentError("get_medium: got a model without cross-attention, allowed: one with it")
        return self.rows.media[checked]

    def __reduce__(self):
        raise ArgumentTypeError("a running batch cannot be pickled")

    @property
    def max_num_drafts(self) -> int | None:
        """Most draft tokens of a row in a step, so that its rings can take them back; None: any number, without rings."""
        self.rows.check_made()
        return self.rows.batch.max_num_drafts if self.rows.batch.max_num_drafts < INT32_MAX else None

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that a row can have: the model's limit, or the table's if that is less."""
        return self.rows.batch.max_num_tokens

    @property
    def num_admitted(self) -> int:
        """Number of admitted rows."""
        return self.rows.batch.num_admitted

    @property
    def num_steps(self) -> int:
        """Number of steps that had rows."""
        return self.rows.batch.num_steps

    @property
    def refusal(self) -> Refusal | None:
        """Why the last `admit` returned None; None if it admitted its request, or raised an error. O(1)."""
        cdef Shortage shortage
        cdef bint is_short
        with self.rows.own_lock()[0]:
            is_short, shortage = self.rows.is_short, self.rows.shortage
        return refusal_of(self.rows.store, &shortage) if is_short else None

    def _forget_refusal(self) -> None:
        """Reset `refusal` to None, after an error."""
        with self.rows.own_lock()[0]:
            self.rows.set_shortage(NULL)

    # Steps.

    def new_step(self) -> StepResult:
        """Return an empty step, to which `plan`, `step` and `admit` add rows."""
        self.rows.check_made()
        return new_result(self.rows)

    def plan(self, rows, num_tokens=1, num_drafts=0, step=None) -> StepResult:
        """Plan a step: give each row slots for its next tokens, row by row in the given order.

        `rows` is a list or an int array without repeats; `num_tokens` and `num_drafts` are a number for all rows or one for
        each. A row with known tokens that no step computes gets slots for the next `num_tokens` of them. Any other row gets one
        for the token that a step in flight samples; at most `max_steps_ahead` such steps may be unsettled. Behind these lie
        `num_drafts` slots: the step computes drafts there or, inside a prompt, leaves them as room for later. Positions are
        planned as if all drafts were accepted, and move back by the rejected drafts when a step is settled.

        For each row, what earlier steps have made final is cached, and pages that fell out of the attention window are given
        back; then the missing pages are taken, then full pages are cached. The first row that does not fit stops the call and
        stays as it was: preempt, and call again from ``num_grown``. With `step` the rows are added to a step, which is
        returned. A plan implies that the step `max_steps_ahead` + 1 before it has run.

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
        return run_growth(self.rows, row_ids, tokens, as_amounts(num_drafts, "num_drafts", row_ids.num), None, step)

    def step(self, rows, token_ids, step=None) -> StepResult:
        """Settle the last step of rows that sampled one token each, and plan the next: the decode step of an engine that waits
        for its steps.

        `rows` and `token_ids` are lists or int arrays of one length; rows do not repeat. Each row gets its token, and a slot
        for it. Drafts of its last step are rejected: only `settle` can accept drafts. The first row that does not fit stops the
        call and gets no token. With `step` the rows are added to a step, which is returned. Nothing has changed after an error:
        RowOverflowError for a row that is full, ArgumentError for one with known tokens to compute, such as one in the middle
        of its prompt, and for one with two steps in flight, and the errors of `plan`. O(rows + new pages), native.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        check_lengths(tokens, row_ids)
        return run_growth(self.rows, row_ids, ONE, ZERO, tokens, step)

    def settle(
        self, step, token_ids=None, counts=None, *, failed=False, stop_token_ids=None, max_num_tokens=None
    ) -> np.ndarray:
        """End a step that has run: append the tokens sampled by it, and cache the pages filled by now.

        `token_ids` are the tokens of all rows, one row after another in the order of ``step.rows``. ``counts[i]`` is the number
        of tokens of row i, or one number for all: at most one more than the row's drafts, and 0 inside a prompt, or where the
        engine passes the token to `append`. None means one each or, without `token_ids`, 0 each. Computed tokens then include
        the accepted drafts, and the sampled token if a later step computes it. Slots of rejected drafts stay.

        Return the row to which the tokens of each row went, since rows may have moved: int32 ``[len(step)]``. It is -1 if the
        request was released since, or its tokens were cut; then these tokens are dropped. Steps of a row that sample tokens are
        settled in the order of their launch; each also ends the row's part in earlier steps, for chunks of its prompt.

        A row ends at its first token among `stop_token_ids`, or once it has `max_num_tokens` tokens, its prompt's included:
        tokens behind are dropped, also those of later steps, which return -1 for it. ``step.ended_rows`` lists these rows,
        which can only be released then, and ``step.has_stopped`` says why each ended. Stop ids are a list for all rows, or an
        int32 matrix ``[num_rows, ids]`` with a line for each row of the batch, padded with -1; limits are a number, or one for
        each row. With either of them a row that is full ends too.

        With `failed` the step has failed, and with it all later steps of the batch. Pages that these should have filled lose
        their entries, even if other rows have hit them. Each row goes back to the tokens before its first failed step, and a
        row that has hit such a page to the first token of this page; `plan` computes later tokens again. Return the rows that
        cannot go back, and are released: they have a state, wait for tokens from elsewhere, have moves due, or need pages again
        that a window gave back. int32, in ascending order. Known tokens stay, and later steps have nothing to settle.

        ArgumentError, and nothing changed, for a wrong number of tokens, for none where a later step computes them, for
        negative ones, for rows that got their token otherwise, for tokens of a failed step, and for a step of another batch, or
        one settled before; RowOverflowError for a row that would be too long. O(rows + tokens + pages cached), native; with
        `failed` O(pages of all rows).
        """
        cdef StepResult ended = checked_step(self.rows, step)
        cdef PageIds tokens
        if require_flag("failed", failed):
            if any([each is not None for each in (token_ids, counts, stop_token_ids, max_num_tokens)]):
                raise ArgumentError("token_ids, counts, rules of ends: got some of a failed step, allowed: None")
            if self.rows.media is None:
                return fail_step(self.rows, ended)
            with self.rows.media:
                lost = fail_step(self.rows, ended)
                self.rows.media.lose()
                return lost
        tokens = PageIds.__new__(PageIds) if token_ids is None else as_page_ids(token_ids, "token_ids")
        return settle_step(self.rows, ended, tokens, counts, stop_token_ids, max_num_tokens)

    # Known tokens.

    def append(self, rows, token_ids) -> None:
        """Append one known token to each row, without room for it yet. Rows may repeat, for several tokens in order.

        If a step in flight samples the row's next token, this is that token: the drafts of the step are rejected, and `settle`
        takes no token for it. ArgumentError, and nothing changed, for rows that are not admitted, and where a later step in
        flight computes the token; RowOverflowError where a row would be too long. O(rows).
        """
        cdef PageIds row_ids = as_own_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        cdef Py_ssize_t num_done
        check_lengths(tokens, row_ids)
        refuse_negative(tokens.ids, tokens.num, 0)
        with self.rows.own_lock()[0]:
            num_done = append_tokens(&self.rows.batch, row_ids.ids, tokens.ids, row_ids.num)
        if num_done < row_ids.num:
            refuse_append(self.rows.store, &self.rows.batch, row_ids, num_done)

    def trim(self, rows, num_tokens) -> None:
        """Cut the known tokens of rows to `num_tokens` (a number for all rows, or one for each), as for rejected drafts.

        A row that keeps its ``num_computed_tokens`` keeps all its pages: they are slots for its next tokens. Where computed
        tokens are cut, the pages behind the cut are given back, the last first, and lose their entries unless they have other
        holders. If the page at the cut has other holders, it is given back as well, and its first tokens have to be computed
        again: ``num_computed_tokens`` says so. Pages of other groups, from these tokens on, are then given back too if they
        have other holders. With a hash lookahead of L tokens the last L tokens before the cut count as changed: the
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
        self.rows.acquire_locks()
        num_right = trim_rows(&self.rows.batch, row_ids.ids, &amounts, row_ids.num)
        is_due = num_right < row_ids.num and has_due(&self.rows.batch, row_ids.ids[num_right])
        self.rows.release_locks()
        if num_right < row_ids.num:
            refuse_trim(self.rows.store, &self.rows.batch, row_ids, num_right, amount(&amounts, num_right), is_due)

    # Release and exchange of rows.

    def release(self, rows, seconds=None) -> None:
        """Give back all pages of rows, in the given order, the last page of each first, and make the rows free.

        `seconds`, a number for each row or one for all, says when the row's next request is expected: free pages that are
        wanted later are evicted before those wanted sooner (see `CacheManager.expect`). Infinity means never again; None leaves
        what `expect` said.

        A row may be released while its steps are in flight: they have nothing to settle then. If such a step fails, the pages
        that it should have filled lose their entries.

        ArgumentError, and nothing changed, for rows that are not admitted or repeated, for seconds below 0, and for a wrong
        number of seconds; DoubleFreeError if somebody else gave one of the pages back. O(pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef bint may_fail
        if self.rows.media is None:
            self.give_back(row_ids, seconds)
            return
        with self.rows.media:
            may_fail = self.rows.batch.open_steps != NULL
            may_fail = may_fail and (self.rows.batch.settles or self.rows.batch.max_steps_ahead > 0)
            self.give_back(row_ids, seconds)
            self.rows.media.collect(may_fail)

    cdef int give_back(self, PageIds row_ids, object seconds) except -1:
        """Release rows."""
        cdef PageIds ids = PageIds.__new__(PageIds), page_terms = None, row_terms = NO_TERMS
        cdef Release release
        if seconds is not None:
            row_terms, page_terms = as_terms(seconds, row_ids.num), PageIds.__new__(PageIds)
        self.rows.acquire_locks()
        release = release_rows(self.rows, row_ids, row_terms, ids, page_terms, False)
        self.rows.release_locks()
        refuse_release(self.rows.store, &self.rows.batch, row_ids, &release)
        return 0

    def move_row(self, src, tgt) -> None:
        """Move an admitted row to a free one; the source becomes free. O(tokens and pages of the row)."""
        self.exchange(src, tgt, True)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows, free or not. O(tokens and pages of both)."""
        self.exchange(src, tgt, False)

    cdef int exchange(self, object src, object tgt, bint is_move) except -1:
        """Exchange two rows; the second must be free for a move."""
        cdef Py_ssize_t source = self.rows.checked_row(src), target = self.rows.checked_row(tgt)
        if self.rows.media is None:
            return self.rows.exchange(source, target, is_move)
        with self.rows.media:
            self.rows.exchange(source, target, is_move)
            if source != target:
                self.rows.media.exchange(source, target)
        return 0

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
        cdef Py_ssize_t source = self.rows.checked_row(row)
        cdef PageIds target_rows = as_own_ids(targets, "targets")
        if target_rows.num == 0:
            raise ArgumentError("targets: got none, allowed: at least 1")
        if self.rows.media is None:
            self.fork_into(source, target_rows)
            return
        with self.rows.media:
            self.fork_into(source, target_rows)
            self.rows.media.fork(source, target_rows.to_list())

    cdef int fork_into(self, Py_ssize_t source, PageIds target_rows) except -1:
        """Fork a row into free rows."""
        cdef list forgotten = [None] * (2 * target_rows.num)  # freed after unlocking: no destructor runs under a lock
        cdef Batch *batch = &self.rows.batch
        cdef Holding *holding
        cdef Py_ssize_t num_right, i
        cdef bint is_due, is_moving, is_ready
        cdef ForkExtent extent
        cdef ForkOutcome outcome = SHORT_OF_MEMORY
        self.rows.acquire_locks()
        holding = holding_of(batch, source)
        is_due = awaits_moves(batch.pool, holding) or has_writes_due(batch, source)
        is_moving = batch.rows[source].num_ahead > 0
        is_ready = batch.records[source].state == RUNNING and not is_due and not is_moving
        num_right = stamp_free_rows(batch, target_rows.ids, target_rows.num) if is_ready else 0
        if num_right == target_rows.num:
            extent = extent_of(batch, source)
            outcome = prepare_fork(batch.pool, holding, &extent, num_right, batch.rows[source].shard)
        if outcome == FORKED and not self.rows.copy_extra_keys(source, target_rows, forgotten):
            outcome = SHORT_OF_MEMORY
        if outcome == FORKED:
            for i in range(num_right):
                fork_row(batch, source, target_rows.ids[i])
            plan_next(batch, source)
        self.rows.release_locks()
        if outcome != FORKED:
            refuse_unready(self.rows.store, &self.rows.batch, source, is_due)
            if is_moving:
                refuse_ahead_of(batch, source)
            refuse_fork(self.rows.store, &self.rows.batch, source, target_rows, num_right, outcome)
        return 0

    # Tokens from elsewhere.

    def commit_external(self, row, num_tokens, *, is_last=True) -> None:
        """Let a pending row run once the first `num_tokens` of its awaited tokens have arrived: they count as computed, and
        their full pages are cached. `plan` computes the other tokens, whose slots stay.

        Unless the call `is_last`, the row still waits: with full attention alone the full pages of these tokens are cached, so
        that others hit them; with windows, chunks or states nothing hits before the end, and nothing changes.

        Until then the row's new pages are not cached, and `plan`, `step`, `trim` and `fork` raise ArgumentError for it;
        `append`, `release`, `move_row` and `swap_row` work. The transfer writes to the pages that `get_page_ids` lists, once
        the due moves are made. It may leave out pages to which no later token attends: these are given back. With a state all
        tokens have to arrive.

        ArgumentError for a row that is not pending, for more tokens than it waits for, and with a state for fewer in the last
        call; MovesDueError while moves of its pages are due. Nothing has changed then. O(pages cached).

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> table = PageTable(max_num_reqs=2, max_num_pages_per_req=16, max_num_batched_tokens=64)
        >>> batch = RunningBatch(manager, table)
        >>> batch.admit(0, list(range(11)), num_external_tokens=99), batch.num_external_tokens.tolist()
        (0, [10, 0])
        >>> batch.commit_external(0, 4, is_last=False)
        >>> batch.commit_external(0, 9)
        >>> batch.num_computed_tokens.tolist(), batch.admit(1, list(range(11)))
        ([9, 0], 8)
        """
        end_external(self.rows, row, num_tokens, "num_tokens", False, require_flag("is_last", is_last))

    def fail_external(self, row, num_valid_tokens) -> int:
        """Commit the first `num_valid_tokens` of the tokens for which a pending row waits, as `commit_external` does, and give
        back the pages behind them, which no longer hit if they were cached: nothing may write there any more, and readers need
        a lease. Return the row's number of computed tokens; `plan` computes the others.

        With a state all pages are given back, cached ones too, and 0 is returned, since the state would need all tokens. Errors
        as in `commit_external`. O(pages given back and cached).
        """
        return end_external(self.rows, row, num_valid_tokens, "num_valid_tokens", True)

    def rewind(self, failed) -> tuple[list, list]:
        """Rewind the rows whose pages failed to load (see `CacheManager.fail`) to the first such page:
        ``num_computed_tokens`` is cut, and `plan` computes the tokens again. Call it before rows are planned or settled.

        Return the rewound rows, and the rows that cannot go back, which are released: they need pages again that a window gave
        back, have moves due, or wait for tokens from elsewhere. Admit their requests again. Rows of a model with states go back
        to token 0 if they hit pages loaded by this list or later ones, since their states may have seen wrong tokens.
        ArgumentError for loads of another pool. O(pages of all rows).
        """
        cdef FailedLoads loads = require_instance(failed, FailedLoads, "failed")
        self.rows.check_made()
        if loads.store is not self.rows.store:
            raise ArgumentError("failed: got loads of another pool, allowed: those of the batch's pool")
        if self.rows.media is None:
            return rewind_rows(self.rows, loads)
        with self.rows.media:
            rewound = rewind_rows(self.rows, loads)
            self.rows.media.lose()
        return rewound

    # Reads.

    def _require_drafts(self, num_drafts) -> None:
        """Raise ArgumentError for more draft tokens a row than the rings of a model can take back."""
        check_drafts(&self.rows.batch, <int32_t>size_of(num_drafts, "num_drafts", 0, INT32_MAX))

    def _is_refused_still(
        self, row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options, num_lookahead_tokens=0,
        bint reserves_prompt=False,
    ) -> bool:
        """Whether the row refused this request last, and certainly refuses it again. O(1) for tokens in the same list, or in an
        array over the same memory, where a sample is compared; O(tokens) for others.
        """
        cdef Py_ssize_t checked = self.rows.checked_row(row)
        cdef RefusedRequest refusal = self.rows.refusals[checked]
        cdef Tokens tokens
        if refusal is None or not refusal.is_of(token_ids, options, tokens_of(&self.rows.batch, checked)):
            return False
        tokens = count_tokens(
            num_tokens, max_num_new_tokens, refusal.num_tokens, refusal.num_external, num_lookahead_tokens, reserves_prompt
        )
        return refuse_again(self.rows, checked, refusal, &tokens, size_of(num_reserved_pages, "num_reserved_pages"))

    def take_moves(self) -> Moves:
        """Take the moves that are due, with the writes of the batch's states."""
        cdef StateWrites writes = take_due_writes(self.rows)
        return take_with(self.rows.store, writes, &self.last_step)

    def get_token_ids(self, row, start=0) -> np.ndarray:
        """Return the known tokens of an admitted row from index `start` on: int32, a copy. ArgumentError for a free row, and
        for a start behind them. O(tokens returned).
        """
        cdef Py_ssize_t checked = self.rows.checked_row(row), num_tokens
        cdef Py_ssize_t first = size_of(start, "start", 0, MAX_TOKENS)
        cdef object tokens = None
        with self.rows.own_lock()[0]:
            num_tokens = self.rows.batch.records[checked].num_tokens
            if self.rows.batch.records[checked].is_admitted and first <= num_tokens:
                tokens = array_of(tokens_of(&self.rows.batch, checked) + first, num_tokens - first)
        if tokens is None:
            allowed = f"an admitted one with {first} or more"
            raise ArgumentError(f"row {checked}: got one with {num_tokens} tokens, allowed: {allowed}")
        return tokens

    def get_page_ids(self, row) -> tuple:
        """Return the ids of a row's pages: a list for each group, with 0, the null page, for skipped pages. O(pages)."""
        cdef Py_ssize_t checked = self.rows.checked_row(row)
        cdef Holding *holding
        cdef tuple ids = new_ids(self.rows.batch.num_groups)
        cdef bint has_room
        with self.rows.own_lock()[0]:
            holding = holding_of(&self.rows.batch, checked)
            has_room = copy_ids(holding, ids)
        if not has_room:
            raise MemoryError("the page ids of a row")
        return self.rows.store.lists_in_banks(ids)


cdef bint refuse_again(
    RowStore rows, Py_ssize_t row, RefusedRequest refusal, const Tokens *tokens, Py_ssize_t num_reserved
) except -1:
    """Refuse a request again, and return True, if it would certainly be refused; else return False."""
    cdef Holding *holding
    cdef int32_t num_slots
    cdef Shortage shortage
    cdef bint is_refused
    rows.acquire_locks()
    is_refused = rows.refusals[row] is refusal and rows.batch.records[row].state == FREE
    is_refused = is_refused and refusal.finds_hits(&rows.store.pool)
    if is_refused:
        holding = holding_of(&rows.batch, row)
        num_slots = count_slots(tokens, count_room_tokens(tokens, refusal.num_hit_tokens), rows.batch.max_num_tokens)
        is_refused = num_slots <= refusal.num_slots  # a larger request may be too large for the pool
        is_refused = is_refused and refusal.is_short(&rows.store.pool, count_new_pages(holding, num_slots), num_reserved)
    if is_refused:
        shortage = shortage_beside(
            &rows.store.pool, refusal.count_needed(&rows.store.pool, holding, num_slots), num_reserved,
            refusal.num_hit_tokens, 0, refusal.shard,
        )
        rows.set_shortage(&shortage)
        count_refusal(&rows.store.pool, shortage.queue)
    rows.release_locks()
    return is_refused


cdef int show_arrays(RunningRows running) except -1:
    """Let Python read the counts of rows."""
    cdef RowStore rows = running.rows
    running.num_tokens, running.num_computed_tokens = rows.records["num_tokens"], rows.records["num_computed"]
    running.is_admitted, running.stays = rows.records["is_admitted"], rows.stays
    running.num_cached_tokens, running.num_external_tokens, running.num_ahead_tokens = rows.counts
    return 0


cdef StateWrites take_due_writes(RowStore rows):
    """Take the list of states that the planned step writes to pages of their own. O(writes)."""
    cdef int32_t[:, ::1] taken
    cdef const StateWrite *write
    cdef WriteList *writes = &rows.batch.writes
    cdef Py_ssize_t i, num_due, num = -1
    rows.check_made()
    with rows.own_lock()[0]:
        num_due = writes.num - writes.num_taken
    if num_due == 0:
        return NO_WRITES
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((4, num), np.int32)
        taken = columns
        with rows.own_lock()[0]:
            num_due = writes.num - writes.num_taken
            if num == num_due:
                for i in range(num):
                    write = &writes.items[writes.num_taken + i]
                    taken[0, i], taken[1, i] = write.row, write.num_tokens
                    taken[2, i] = write.page_id - offset_of(&rows.batch, write.group)
                    taken[3, i] = write.group
                writes.num_taken = writes.num
                writes.number += 1
    return writes_of(columns)


# Steps.

cdef StepResult run_growth(
    RowStore rows, PageIds planned, PageIds num_tokens, PageIds num_drafts, PageIds tokens, object step
):
    """Plan rows, as a part of `step` or, for None, as a step of their own. Return the step."""
    cdef StepResult head = None if step is None else joined_step(rows, step)
    cdef StepResult result = new_result(rows)
    cdef Growth *growth = &result.growth
    cdef Py_ssize_t i
    result.num_tokens, result.num_drafts = num_tokens, num_drafts
    if rare(rows.batch.max_num_drafts < INT32_MAX):
        for i in range(num_drafts.num):
            check_drafts(&rows.batch, num_drafts.ids[i])
    growth.rows, growth.num_rows = planned.ids, planned.num
    growth.num_tokens, growth.num_drafts = amounts_in(num_tokens), amounts_in(num_drafts)
    growth.token_ids = NULL if tokens is None else tokens.ids
    if growth.num_rows == 0:
        if head is not None:
            head.num_grown, head.is_short = 0, False
        return result if head is None else head
    reserve_rows_of(growth)
    if head is None:
        grow(rows, None, result, tokens)
        return result
    add_call(head, result)
    try:
        grow(rows, head, result, tokens)
    except BaseException:
        remove_call(head, result)
        raise
    return head


cdef int grow(RowStore rows, StepResult head, StepResult result, PageIds tokens) except -1:
    """Check all rows of a call and reserve memory for its result; then plan the rows, which cannot fail."""
    cdef Growth *growth = &result.growth
    cdef Py_ssize_t num_right, at_joined
    cdef bint is_due, has_room = True
    cdef int32_t held_free = NULL_PAGE
    lock_for(rows, head, True)
    assert rows.batch.waiting.num_to_hash == 0
    growth.step = number_of_step(&rows.batch, head)
    at_joined = find_joined(&rows.batch, growth)
    num_right = check_rows(&rows.batch, growth)
    if num_right < growth.num_rows:
        at_joined = -1
    elif at_joined >= 0:
        num_right = at_joined
    if num_right == growth.num_rows:
        growth.max_num_new = min(growth.max_num_new, rows.store.pool.num_pages)  # no page is taken twice
        has_room = reserve_new(growth)
        held_free = find_held_free(&rows.store.pool, growth.max_num_new)
    if num_right == growth.num_rows and has_room and held_free == NULL_PAGE:
        grow_checked(&rows.batch, head, result)
    else:
        untell_rows(&rows.batch, growth, 0)
        growth.step = 0  # so that deleting the result of a refused call does not end the step
    is_due = num_right < growth.num_rows and at_joined < 0 and has_due(&rows.batch, growth.rows[num_right])
    rows.release_locks()
    if at_joined >= 0:
        raise ArgumentError(
            f"row {rows.batch.checked_rows[at_joined]} (at {at_joined}): got a row that is in this step or a later one, "
            "allowed: others"
        )
    if num_right < growth.num_rows:
        if tokens is not None:
            refuse_negative(tokens.ids, tokens.num, 0)
        refuse_growth(rows.store, &rows.batch, growth, num_right, is_due)
    if not has_room:
        raise MemoryError(f"{growth.max_num_new} new pages")
    return rows.store.check_untaken(held_free)


cdef void grow_checked(Batch *batch, StepResult head, StepResult result) noexcept:
    """Plan checked rows within their step, which is open meanwhile: it may fail what it fills."""
    cdef Growth *growth = &result.growth
    cdef OpenStep *node = &result.node if head is None else &head.node
    cdef bint was_open = node.step > 0
    cdef int64_t num_steps = batch.num_steps
    cdef Py_ssize_t i
    cdef void *thread = let_others_run(growth.num_rows + growth.max_num_new)
    open_step(batch, node, growth.step)
    batch.num_steps = max(num_steps, growth.step)
    grow_rows(batch, growth)
    for i in range(growth.num_grown if batch.num_local_shards else 0):
        show_local_ids(batch, growth.grown_rows[i])
    go_on(thread)
    if growth.num_grown == 0:
        batch.num_steps = num_steps
    end_call(batch, head, result)
    if growth.num_grown == 0 and not was_open:
        close_step(batch, node, False)


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
