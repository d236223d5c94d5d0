"""Steps end well, or fail; rows go back behind loads that failed, and tokens from elsewhere arrive."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free

from pagepool.core.holding cimport find_wrong
from pagepool.core.rows.external cimport *
from pagepool.core.values cimport array_of, require_matrix

import numpy as np

from pagepool.errors import ArgumentError


@cython.final
@cython.auto_pickle(False)
cdef class EndRules:
    """Which rows of a step end, the memory of these rules, and what they said."""

    cdef Ends ends
    cdef PageIds stop_ids
    cdef PageIds limits
    cdef const int32_t[:, ::1] by_row
    cdef object found               # uint8 [rows of the step] an `End` each
    cdef uint8_t[::1] marks         # the same memory


cdef EndRules end_rules(Py_ssize_t num_rows, Py_ssize_t n, object stop_token_ids, object max_num_tokens):
    """Read which rows end: stop ids are a list, or a matrix with a line for each row; limits a number, or one for each row."""
    cdef EndRules rules = EndRules.__new__(EndRules)
    cdef object limits = MAX_TOKENS if max_num_tokens is None else max_num_tokens
    cdef Py_ssize_t i
    if isinstance(stop_token_ids, np.ndarray) and stop_token_ids.ndim == 2:
        rules.by_row = np.ascontiguousarray(require_matrix(stop_token_ids, np.int32, "stop_token_ids"))
        if rules.by_row.shape[0] != num_rows:
            raise ArgumentError(f"stop_token_ids: got {rules.by_row.shape[0]} rows, allowed: {num_rows}, all of the batch")
        rules.ends.num_stop_token_ids = rules.ends.stride = rules.by_row.shape[1]
        rules.ends.stop_token_ids = &rules.by_row[0, 0] if rules.ends.stride else NULL
    else:
        rules.stop_ids = as_page_ids(() if stop_token_ids is None else stop_token_ids, "stop_token_ids")
        rules.ends.num_stop_token_ids, rules.ends.stop_token_ids = rules.stop_ids.num, rules.stop_ids.ids
    rules.limits = as_amounts(limits, "max_num_tokens", num_rows)
    for i in range(rules.limits.num):
        if rules.limits.ids[i] < 1:
            raise ArgumentError(f"max_num_tokens: got {rules.limits.ids[i]} (at {i}), allowed: at least 1")
    rules.ends.max_num_tokens = amounts_in(rules.limits)
    rules.found = rules.marks = np.zeros(max(1, n), np.uint8)
    return rules


cdef Settlement settlement_of(
    StepResult call, PageIds counts, int32_t *places, Py_ssize_t first, EndRules rules
) noexcept:
    """Return the settlement of a call whose rows begin at index `first` of the step."""
    cdef Settlement settlement = Settlement(
        growth=&call.growth, stays=call.stays.by_row, counts=amounts_in(counts), places=places + first, rules=NULL, ends=NULL,
    )
    settlement.counts.values += first * settlement.counts.stride
    if rules is not None:
        settlement.rules, settlement.ends = &rules.ends, &rules.marks[0] + first
    return settlement


cdef object settle_step(
    RowStore rows, StepResult ended, PageIds tokens, object counts, object stop_token_ids, object max_num_tokens
):
    """Settle a step that ended well. See `RunningRows.settle`."""
    cdef StepResult call
    cdef Py_ssize_t n = ended.num_rows, at = 0, first = 0
    cdef PageIds numbers = as_counts(counts, tokens, n), places = PageIds.__new__(PageIds)
    cdef list calls = calls_of(ended)
    cdef const int32_t *token_ids_left = tokens.ids
    cdef Settlement settlement
    cdef SettleFault fault = SETTLES
    cdef EndRules rules = None
    if stop_token_ids is not None or max_num_tokens is not None:
        rules = end_rules(rows.batch.num_rows, n, stop_token_ids, max_num_tokens)
    refuse_negative(tokens.ids, tokens.num, 0)  # reading arguments may have run Python code
    places.reserve(n)
    lock_for(rows, ended, False)
    if ended.num_rows != n or count_grown(calls) != n:  # another thread has added rows, or Python code of `counts`
        fault = ROWS_ADDED
    for call in calls if fault == SETTLES else ():
        settlement = settlement_of(call, numbers, places.ids, first, rules)
        fault = check_settlement(&rows.batch, &settlement, &at)
        if fault != SETTLES:
            break
        first += call.growth.num_grown
    first = 0
    for call in calls if fault == SETTLES else ():
        settlement = settlement_of(call, numbers, places.ids, first, rules)
        token_ids_left = settle_rows(&rows.batch, &settlement, token_ids_left)
        first += call.growth.num_grown
    if fault == SETTLES:
        close_step(&rows.batch, &ended.node, True)
        ended.is_settled = rows.batch.settles = True
    rows.release_locks()
    if fault == ROWS_ADDED:
        refuse_added(n)
    if fault != SETTLES:
        refuse_settlement(&rows.batch, &settlement, fault, at)
    result = array_of(places.ids, n)
    if rules is not None:
        ends = rules.found[:n]
        ended.ended_rows, ended.has_stopped = result[ends != GOES_ON], ends[ends != GOES_ON] == STOPPED
    return result


cdef object fail_step(RowStore rows, StepResult ended):
    """Settle a step that failed, and with it all later ones. See `RunningRows.settle`."""
    cdef Batch *batch = &rows.batch
    cdef PageIds one = PageIds([0]), lost = PageIds.__new__(PageIds), ids = PageIds.__new__(PageIds)
    cdef Release release = Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)
    cdef Failure failure
    cdef int32_t row
    cdef bint has_room
    lost.reserve(batch.num_rows)
    lock_for(rows, ended, False)
    failure.step = ended.growth.step
    failure.is_lost = <uint8_t *>calloc(rows.store.pool.num_pages + batch.num_rows, 1)
    has_room = failure.is_lost != NULL and reserve_places(&rows.batch, ids)
    if has_room and failure.step:
        failure.has_lost = failure.is_lost + rows.store.pool.num_pages
        fail_steps(batch, failure.step)
        lose_entries(batch, &failure)
        take_back_fills(&batch.fills, failure.step)
    for row in range(<int32_t>batch.num_rows if has_room and failure.step else 0):
        if not set_back(batch, &failure, row) and release.outcome == RELEASED:
            release = release_lost(rows, one, row, ids)
            lost.put(&row, 1)
    if has_room:
        close_step(batch, &ended.node, False)
        ended.is_settled = batch.settles = True
    rows.release_locks()
    free(failure.is_lost)
    if not has_room:
        raise MemoryError("the pages of a failed step")
    refuse_release(rows.store, &rows.batch, lost, &release)
    return array_of(lost.ids, lost.num)


cdef tuple rewind_rows(RowStore rows, FailedLoads loads):
    """Rewind the rows whose pages failed to load; return these and those that cannot go back. See `RunningRows.rewind`."""
    cdef PageIds rewound = PageIds.__new__(PageIds), lost = PageIds.__new__(PageIds), ids = PageIds.__new__(PageIds)
    cdef PageIds one = PageIds([0])
    cdef Release release = Release(outcome=RELEASED, at=0, page_id=NULL_PAGE)
    cdef Holding *holding
    cdef int32_t row, first, num_tokens
    rewound.reserve(rows.batch.num_rows)
    lost.reserve(rows.batch.num_rows)
    rows.acquire_locks()
    for row in range(<int32_t>rows.batch.num_rows if loads.ids.num and reserve_places(&rows.batch, ids) else 0):
        holding = holding_of(&rows.batch, row)
        first = find_wrong(holding, loads.is_wrong, loads.number) if rows.batch.records[row].is_admitted else -1
        if first < 0:
            continue
        num_tokens = rows.batch.records[row].num_tokens
        if not has_copies(&rows.store.pool, holding) and can_restart_row(&rows.batch, row, num_tokens, first):
            restart_row(&rows.batch, row, num_tokens, first, False)
            rewound.put(&row, 1)
        elif release.outcome == RELEASED:
            release = release_lost(rows, one, row, ids)
            lost.put(&row, 1)
    rows.release_locks()
    refuse_release(rows.store, &rows.batch, lost, &release)
    return rewound.to_list(), lost.to_list()


cdef int32_t end_external(
    RowStore rows, object row, object num_tokens, str name, bint is_failed, bint is_last=True
) except -1:
    """Let a pending row run once the last of its awaited tokens have arrived, and return its number of computed tokens."""
    cdef Batch *batch = &rows.batch
    cdef Py_ssize_t checked = rows.checked_row(row)
    cdef int32_t num = <int32_t>size_of(num_tokens, name, 0, MAX_TOKENS)
    cdef int32_t num_external, num_computed
    cdef bint is_due, is_right
    rows.acquire_locks()
    num_external = batch.rows[checked].num_external
    is_due = num_external and has_due(&rows.batch, <int32_t>checked)
    is_right = 0 < num_external and num <= num_external and not is_due
    is_right = is_right and (is_failed or num == num_external or not batch.has_state or not is_last)
    if is_right and is_failed:
        fail_row(batch, checked, num)
    elif is_right and not is_last:
        cache_arrived(batch, checked, num)
    elif is_right:
        commit_row(batch, checked, num)
    num_computed = batch.records[checked].num_computed
    rows.release_locks()
    if not is_right:
        refuse_end(rows.store, &rows.batch, checked, num, num_external, is_due)
    return num_computed
