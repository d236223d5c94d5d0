"""Steps end well, or fail, and rows go back behind loads that failed."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free

from pagepool.core.holding cimport find_wrong
from pagepool.core.values cimport array_of


cdef Settlement settlement_of(StepResult call, PageIds counts, int32_t *places, Py_ssize_t first) noexcept:
    """Return the settlement of a call whose rows begin at index `first` of the step."""
    cdef Amounts each = amounts_in(counts)
    each.values += first * each.stride
    return Settlement(growth=&call.growth, stays=call.stays.by_row, counts=each, places=places)


cdef object settle_step(RowStore rows, StepResult ended, PageIds tokens, object counts):
    """Settle a step that ended well. See `RunningRows.settle`."""
    cdef StepResult call
    cdef Py_ssize_t n = ended.num_rows, at = 0, first = 0
    cdef PageIds numbers = as_counts(counts, tokens, n), places = PageIds.__new__(PageIds)
    cdef list calls = calls_of(ended)
    cdef const int32_t *token_ids_left = tokens.ids
    cdef Settlement settlement
    cdef SettleFault fault = SETTLES
    refuse_negative(tokens.ids, tokens.num, 0)  # `counts` may have run Python code
    places.reserve(n)
    lock_for(rows, ended, False)
    if ended.num_rows != n or count_grown(calls) != n:  # another thread has added rows, or Python code of `counts`
        fault = ROWS_ADDED
    for call in calls if fault == SETTLES else ():
        settlement = settlement_of(call, numbers, places.ids + first, first)
        fault = check_settlement(&rows.batch, &settlement, &at)
        if fault != SETTLES:
            break
        first += call.growth.num_grown
    first = 0
    for call in calls if fault == SETTLES else ():
        settlement = settlement_of(call, numbers, places.ids + first, first)
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
    return array_of(places.ids, n)


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
