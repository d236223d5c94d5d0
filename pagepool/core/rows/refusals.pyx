"""Errors for rows of a batch. They are raised after unlocking, for what was found under the locks."""

from pagepool.core.holding cimport SHORT_OF_PAGES, UNSHAREABLE, find_fork_shortage, refuse_due, refuse_unshareable
from pagepool.core.pool cimport overdrawn_page
from pagepool.core.rows.forks cimport *
from pagepool.core.values cimport changed_values

from pagepool.errors import (
    ArgumentError, DoubleFreeError, OutOfPagesError, RowIndexError, RowOverflowError,
)


cdef int check_lengths(PageIds tokens, PageIds rows) except -1:
    """Raise unless there is one token id for each row."""
    if tokens.num != rows.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows, {rows.num}")
    return 0


cdef int refuse_row_length(const Batch *batch, Py_ssize_t row, int64_t num_tokens) except -1:
    raise RowOverflowError(
        f"row {row}: got {num_tokens} tokens, "
        f"allowed: {batch.max_num_tokens}, which is max_model_len or what the table has room for"
    )


cdef object not_admitted(str name):
    """Return the error for a row that is not admitted."""
    return ArgumentError(f"{name}: got a row that is not admitted, allowed: an admitted one")


cdef int refuse_unready(
    PageStore store, const Batch *batch, Py_ssize_t row, bint is_due, bint may_wait=False, Py_ssize_t at=-1
) except -1:
    """Raise if a row is not admitted, had moves due when a call stopped at it (`is_due`), or, unless it `may_wait`, waits for
    tokens from elsewhere. `at` is its index in a list of rows.
    """
    cdef str name = f"row {row} (at {at})" if at >= 0 else f"row {row}"
    if not batch.records[row].is_admitted:
        raise not_admitted(name)
    if batch.rows[row].num_external and not may_wait:
        raise ArgumentError(
            f"{name}: got a row that waits for {batch.rows[row].num_external} tokens from elsewhere, allowed: one that "
            "waits for none; call commit_external or fail_external before"
        )
    if is_due:
        refuse_due(store, name)
    return 0 if may_wait else refuse_ended(batch, row, name)


cdef int refuse_ended(const Batch *batch, Py_ssize_t row, str name) except -1:
    """Raise ArgumentError for a row that has ended."""
    if batch.records[row].state == ENDED:
        raise ArgumentError(f"{name}: got a row that has ended, allowed: one that goes on; release it")
    return 0


cdef int32_t refuse_unknown(PageStore store, const Batch *batch, int32_t row, Py_ssize_t at) except -1:
    """Return a row of a call, or raise if it is not in the table or not admitted."""
    if not 0 <= row < batch.num_rows:
        raise RowIndexError(f"row: got {row} (at {at}), allowed: 0 to {batch.num_rows - 1}")
    refuse_unready(store, batch, row, False, True, at)
    return row


cdef int32_t refuse_row(PageStore store, const Batch *batch, const int32_t *rows, Py_ssize_t at) except -1:
    """Return a row of a call that allows no repeats, or raise the error for the row."""
    cdef Py_ssize_t i
    cdef int32_t row = refuse_unknown(store, batch, rows[at], at)
    for i in range(at):
        if rows[i] == row:
            raise ArgumentError(f"rows: got {row} twice (at {i} and {at}), allowed: each once")
    return row


cdef int refuse_ahead_of(const Batch *batch, Py_ssize_t row) except -1:
    raise ArgumentError(
        f"row {row}: got a planned step that writes positions up to {batch.records[row].num_planned}, allowed: none behind its "
        f"{batch.records[row].num_tokens} known tokens; settle the step before"
    )


cdef int refuse_plan(const Batch *batch, int32_t row, Py_ssize_t at, int32_t num_tokens, int32_t num_drafts) except -1:
    """Raise if the row cannot plan these numbers of tokens and drafts."""
    cdef int32_t num_planned = batch.records[row].num_planned, num_left = batch.records[row].num_tokens - num_planned
    cdef Py_ssize_t num_awaited = count_awaited(batch, row)
    cdef str name = f"row {row} (at {at})"
    if num_drafts < 0:
        raise ArgumentError(f"{name}: got {num_drafts} drafts, allowed: at least 0")
    if num_left > 0 and not 1 <= num_tokens <= num_left:
        raise ArgumentError(f"{name}: got {num_tokens} tokens, allowed: 1 to {num_left}, which are known and not computed")
    if num_left <= 0 and not 1 <= num_awaited <= batch.max_steps_ahead:
        allowed = f"1 to {batch.max_steps_ahead}, which is max_steps_ahead" if batch.max_steps_ahead else "known tokens alone"
        raise ArgumentError(
            f"{name}: got no known token to compute, and {num_awaited} steps in flight that sample the next ones, allowed: "
            f"{allowed}; settle the step that sampled its token, or append it"
        )
    if num_left <= 0 and num_planned >= batch.max_num_tokens:
        refuse_row_length(batch, row, num_planned + <int64_t>1)
    return 0


cdef int refuse_step(const Batch *batch, int32_t row, Py_ssize_t at) except -1:
    """Raise if the row cannot get the token that its last step sampled."""
    cdef int32_t num_left = batch.records[row].num_tokens - batch.records[row].num_planned
    if batch.records[row].num_tokens >= batch.max_num_tokens:
        refuse_row_length(batch, row, batch.records[row].num_tokens + <int64_t>1)
    if num_left > 0:
        raise ArgumentError(
            f"row {row} (at {at}): got a token behind {num_left} known ones that are not computed, allowed: one behind "
            "computed ones; plan computes them"
        )
    if count_awaited(batch, row) > 1:
        refuse_later_step(row)
    return 0


cdef int refuse_later_step(int32_t row) except -1:
    raise ArgumentError(
        f"row {row}: got a token that a later step in flight computes, allowed: one that no step in flight computes; settle "
        "the step that sampled it"
    )


cdef int refuse_growth(PageStore store, const Batch *batch, const Growth *growth, Py_ssize_t at, bint is_due) except -1:
    cdef int32_t row = refuse_row(store, batch, growth.rows, at)
    cdef int32_t num_tokens = amount(&growth.num_tokens, at), num_drafts = amount(&growth.num_drafts, at)
    cdef int32_t num_computed = batch.records[row].num_computed
    refuse_unready(store, batch, row, is_due, False, at)
    if growth.token_ids != NULL:
        refuse_step(batch, row, at)
    else:
        refuse_plan(batch, row, at, num_tokens, num_drafts)
    if growth.num_excess:
        store.refuse_size(f"row {row} (at {at})", growth.num_excess, growth.short_queue)
    if find_lost_page(batch.pool, holding_of(batch, row), num_computed) != NULL_PAGE:
        raise DoubleFreeError(
            f"row {row} (at {at}): got a page given back by somebody else, allowed: pages that the row gives back itself"
        )
    raise changed_values("rows")


cdef int refuse_settlement(const Batch *batch, const Settlement *settlement, SettleFault fault, Py_ssize_t at) except -1:
    cdef int32_t row = settlement.places[at], num = amount(&settlement.counts, at)
    cdef Py_ssize_t launch = find_launch(batch, row, settlement.growth.step)
    cdef str name = f"row {row} (at {at} of its call)"
    if fault == FULL_ROW:
        refuse_row_length(batch, row, <int64_t>batch.records[row].num_tokens + num)
    if fault == TOO_EARLY:
        raise ArgumentError(
            f"{name}: got a step before an earlier one that is not settled, allowed: steps in the order of their launch"
        )
    if fault == NONE_TOLD:
        raise ArgumentError(f"{name}: got no token, allowed: at least 1, which a later step in flight computes")
    if fault == TOO_MANY and launch >= 0:
        num_drafts = launch_of(batch, row, launch).num_sampled - 1
        raise ArgumentError(f"{name}: got {num} tokens, allowed: at most {num_drafts + 1}, with {num_drafts} drafts")
    raise ArgumentError(f"{name}: got {num} tokens, allowed: 0, since its step samples none, or the row has got its token")


cdef int refuse_append(PageStore store, const Batch *batch, PageIds rows, Py_ssize_t at) except -1:
    cdef Py_ssize_t i
    cdef int64_t num_tokens = 1
    cdef int32_t row = refuse_unknown(store, batch, rows.ids[at], at)
    refuse_ended(batch, row, f"row {row} (at {at})")
    for i in range(at):
        num_tokens += rows.ids[i] == row
    if count_awaited(batch, row) > 1:
        refuse_later_step(row)
    refuse_row_length(batch, row, batch.records[row].num_tokens + num_tokens)


cdef int check_drafts(const Batch *batch, int32_t num_drafts) except -1:
    """Raise ArgumentError for more draft tokens a row than the rings of a model can take back."""
    if num_drafts > batch.max_num_drafts:
        raise ArgumentError(
            f"num_drafts: got {num_drafts}, allowed with a ring and max_steps_ahead {batch.max_steps_ahead}: "
            f"up to {batch.max_num_drafts}"
        )
    return 0


cdef int refuse_trim(
    PageStore store, const Batch *batch, PageIds rows, Py_ssize_t at, int32_t num_tokens, bint is_due
) except -1:
    cdef int32_t restart, row = refuse_row(store, batch, rows.ids, at)
    refuse_ended(batch, row, f"row {row} (at {at})")
    if not 0 <= num_tokens <= batch.records[row].num_tokens:
        raise ArgumentError(f"num_tokens: got {num_tokens} (at {at}), allowed: 0 to {batch.records[row].num_tokens}")
    refuse_unready(store, batch, row, is_due, False, at)
    if batch.rows[row].num_ahead:
        refuse_ahead_of(batch, row)
    restart = restart_of(batch, row, num_tokens, num_tokens)
    if not has_recurrent(batch) and (has_state_behind(batch, row, num_tokens) or has_state_behind(batch, row, restart)):
        raise ArgumentError(
            f"num_tokens: got {num_tokens} (at {at}), allowed for row {row}, whose ring has lost the tokens before: a multiple "
            "of the ring's period, or a number of tokens that it still has"
        )
    if has_state_behind(batch, row, num_tokens):
        raise ArgumentError(
            f"num_tokens: got {num_tokens} (at {at}), allowed for row {row}, which has a state that saw later tokens: "
            f"0, or from {batch.records[row].num_computed} on"
        )
    if has_state_behind(batch, row, restart):
        raise ArgumentError(
            f"num_tokens: got {num_tokens} (at {at}), which end in a page of row {row} that others hold, so tokens that its "
            "state saw would be computed again, allowed: 0, or tokens that end in a page of its own"
        )
    raise ArgumentError(
        f"num_tokens: got {num_tokens} (at {at}), which need pages that were given back, when they fell out of the attention "
        f"window or by somebody else, allowed: a number of tokens whose pages row {row} holds"
    )


cdef int refuse_release(PageStore store, const Batch *batch, PageIds rows, const Release *release) except -1:
    """Raise the error for rows that were not released."""
    if release.outcome == SHORT_OF_ROOM:
        raise MemoryError("the pages of the rows, or their terms")
    if release.outcome == OVERDRAWN:
        page = store.shown_page(release.page_id)
        raise overdrawn_page(f"{page} of a row")
    if release.outcome == WRONG_ROW:
        refuse_row(store, batch, rows.ids, release.at)
        raise changed_values("rows")
    return 0


cdef int refuse_fork(
    PageStore store, const Batch *batch, Py_ssize_t source, PageIds targets, Py_ssize_t at, ForkOutcome outcome
) except -1:
    cdef Holding *holding = holding_of(batch, source)
    cdef ForkExtent extent
    cdef Shortage shortage
    if at < targets.num:
        if not 0 <= targets.ids[at] < batch.num_rows:
            raise RowIndexError(f"targets: got {targets.ids[at]} (at {at}), allowed: 0 to {batch.num_rows - 1}")
        raise ArgumentError(f"targets: got {targets.ids[at]} (at {at}), allowed: free rows, each once")
    if outcome == SHORT_OF_PAGES:
        extent = extent_of(batch, source)
        shortage = find_fork_shortage(batch.pool, holding, &extent, targets.num, batch.rows[source].shard)
        where = "" if batch.pool.num_banks == 1 else f" in {store.shown_queue(shortage.queue)}"
        raise OutOfPagesError(
            f"row {source}: got forks that need {shortage.num_needed} pages, allowed: at most the {shortage.num_free} that are "
            f"free{where}"
        )
    if outcome == UNSHAREABLE:
        refuse_unshareable(f"row {source}")
    raise MemoryError(f"forks of row {source}")


cdef int refuse_end(
    PageStore store, const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_external, bint is_due
) except -1:
    if num_external == 0:
        raise ArgumentError(f"row {row}: got a row that waits for no tokens from elsewhere, allowed: one that waits for some")
    refuse_unready(store, batch, row, is_due, True)
    if num_tokens > num_external:
        raise ArgumentError(f"row {row}: got {num_tokens} tokens, allowed: at most the {num_external} for which it waits")
    raise ArgumentError(
        f"row {row}: got {num_tokens} tokens, allowed with a state: all {num_external}; call fail_external for fewer"
    )
