# Steps are planned ahead, launched and resolved. The caller holds the locks, and has copied the rows of a call.
#
# A `Resolution` ends the steps of one call for its rows: each row gets the tokens that its step sampled. A row whose stay has
# ended since, or whose computed tokens were cut, gets none: its place is `GONE`.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagepool.core.base cimport rare
from pagepool.core.holding cimport full_entries, is_state, keeps_checkpoints
from pagepool.core.rows.batch cimport *


cdef enum:
    GONE = -1

cdef enum ResolveFault:
    RESOLVABLE
    NOT_SAMPLED               # a token for a row inside its prompt
    TOO_MANY                  # more tokens than drafts and one
    TOO_LATE                  # the row knows these tokens, or was grown since
    TOO_EARLY                 # an earlier step of the row is not resolved
    NONE_TOLD                 # no token for a row with a later step in flight
    FULL_ROW

cdef struct Resolution:
    const Growth *growth
    const int64_t *stays      # [num_rows] the batch's stays when rows were exchanged first since the call; NULL: never
    Amounts counts            # tokens of each row
    int32_t *places           # [num_grown] where the tokens of each row go


# Rows are planned ahead.

cdef inline bint can_plan_ahead(const Batch *batch, int32_t row, int32_t num_drafts) noexcept nogil:
    """Whether the row's known tokens are computed, by steps in flight that are not too many. Drafts change states."""
    cdef const Flight *flight = &batch.flights[row]
    if batch.records[row].num_computed != batch.records[row].num_tokens or num_drafts < 0:
        return False
    if rare(num_drafts and batch.writes_states) and not batch.restores_states:
        return False
    return 0 < flight.num_launched - flight.num_told <= batch.max_steps_ahead


cdef inline Py_ssize_t advance_ahead(Batch *batch, Growth *growth) noexcept nogil:
    """Plan each copied row's next sampled token and its drafts, and return the number of rows before the first wrong one."""
    cdef RowRecord *record
    cdef int32_t row, num_planned, num_room_tokens
    cdef Py_ssize_t i, n = copy_rows(batch, growth.rows, growth.num_rows)
    for i in range(n):
        row = batch.checked_rows[i]
        record, num_planned = &batch.records[row], batch.flights[row].num_planned
        if not can_plan_ahead(batch, row, amount(&growth.num_drafts, i)) or num_planned >= batch.max_num_tokens:
            return i
        num_room_tokens = room_for(batch, num_planned + 1, amount(&growth.num_drafts, i))
        growth.ahead[i] = num_room_tokens - record.num_tokens
        growth.grown[i] = Grown(num_tokens=record.num_tokens, num_computed=record.num_computed)
        if num_room_tokens >= record.next_event:
            if not note_due_row(batch, growth, i, num_room_tokens):
                return i
    return limit_to_pool(batch, growth, n)


cdef inline void launch_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Count the steps of the rows that a call has grown as in flight."""
    cdef const RowRecord *record
    cdef Flight *flight
    cdef Launch *launch
    cdef int32_t num_planned, num_before
    cdef Py_ssize_t i
    for i in range(growth.num_grown):
        record, flight = &batch.records[growth.grown_rows[i]], &batch.flights[growth.grown_rows[i]]
        launch = &growth.launches[i]
        launch.num_planned, launch.num_told, launch.ordinal = flight.num_planned, flight.num_told, 0
        if growth.token_ids != NULL:
            tell_token(flight, record.num_tokens)
        num_planned = room_for(batch, record.num_computed, amount(&growth.num_ahead, i))
        num_before = max(launch.num_planned, record.num_computed - amount(&growth.num_new_tokens, i))
        if record.num_computed == record.num_tokens and num_planned > num_before:
            flight.num_launched += 1
            launch.ordinal = flight.num_launched
        flight.num_planned = max(launch.num_planned, num_planned)
        count_ahead(flight, record.num_tokens)


# Steps are resolved.

cdef inline int32_t _find_stay(const Batch *batch, int32_t row, int64_t stay) noexcept nogil:
    """Return the row to which a stay has moved from `row`; GONE if it has ended. O(rows) if it moved."""
    cdef Py_ssize_t i
    if batch.flights[row].stay == stay:
        return row
    for i in range(batch.num_rows):
        if batch.flights[i].stay == stay:
            return <int32_t>i
    return GONE


cdef inline int32_t find_place(const Batch *batch, const Resolution *resolution, Py_ssize_t i) noexcept nogil:
    """Return the row to which the tokens of a call's row at index `i` go."""
    cdef const Growth *growth = resolution.growth
    cdef int32_t row = growth.grown_rows[i]
    cdef int64_t stay = batch.flights[row].stay if resolution.stays == NULL else resolution.stays[row]
    if not 0 < stay <= growth.num_stays:  # the row was released since, and perhaps admitted again
        return GONE
    if resolution.stays != NULL:
        row = _find_stay(batch, row, stay)
    if row == GONE or batch.rows[row].last_cut > growth.num_admissions:
        return GONE
    return row


cdef inline int32_t drafts_of(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Return the number of drafts that had slots in the row's step."""
    if growth.ahead != NULL:
        return planned_by(batch, growth, i) - growth.launches[i].num_planned - 1
    return planned_by(batch, growth, i) - growth.grown[i].num_computed


cdef inline bint samples(const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether the row's step computed all its known tokens, and more than earlier steps."""
    if growth.launches != NULL:
        return growth.launches[i].ordinal != 0
    return growth.grown[i].num_computed == growth.grown[i].num_tokens


cdef inline ResolveFault _check_order(
    const Batch *batch, const Growth *growth, Py_ssize_t i, int32_t row, int32_t num
) noexcept nogil:
    """Check that the row's earlier steps are resolved, and that nobody else gave it the tokens of this one."""
    cdef const Grown *grown = &growth.grown[i]
    cdef const RowRecord *record = &batch.records[row]
    cdef const Flight *flight = &batch.flights[row]
    cdef bint is_same
    if growth.launches == NULL:
        is_same = record.num_tokens == grown.num_tokens and record.num_computed == grown.num_computed
        return RESOLVABLE if is_same or num == 0 else TOO_LATE
    if flight.num_told >= growth.launches[i].ordinal:
        return TOO_LATE if num else RESOLVABLE
    if flight.num_told != growth.launches[i].ordinal - 1:
        return TOO_EARLY
    return NONE_TOLD if num == 0 and flight.num_launched != growth.launches[i].ordinal else RESOLVABLE


cdef inline ResolveFault check_resolution(const Batch *batch, const Resolution *resolution, Py_ssize_t *at) noexcept nogil:
    """Find the places of the tokens, and check each row; return the first fault."""
    cdef const Growth *growth = resolution.growth
    cdef int32_t row, num
    cdef ResolveFault fault
    cdef Py_ssize_t i
    for i in range(growth.num_grown):
        at[0] = i
        row, num = find_place(batch, resolution, i), amount(&resolution.counts, i)
        resolution.places[i] = row
        if row == GONE:
            continue
        if not samples(growth, i):
            if num:
                return NOT_SAMPLED
            continue
        if num > drafts_of(batch, growth, i) + 1:
            return TOO_MANY
        fault = _check_order(batch, growth, i, row, num)
        if fault != RESOLVABLE:
            return fault
        if num > batch.max_num_tokens - batch.records[row].num_tokens:
            return FULL_ROW
    return RESOLVABLE


cdef inline void _tell_step(Batch *batch, const Growth *growth, Py_ssize_t i, int32_t row, int32_t num) noexcept nogil:
    """Count the tokens that the row's step has sampled, which the row has, and those of them that are computed."""
    cdef RowRecord *record = &batch.records[row]
    cdef Flight *flight = &batch.flights[row]
    record.num_tokens += num
    if growth.launches == NULL:
        record.num_computed += max(0, num - 1)
        return
    if flight.num_told >= growth.launches[i].ordinal:
        return
    flight.num_told += 1
    flight.num_planned += num - drafts_of(batch, growth, i) - 1
    if num == 0:
        flight.num_planned = record.num_tokens
    record.num_computed = max(record.num_computed, min(record.num_tokens, flight.num_planned))
    flight.num_planned = max(flight.num_planned, record.num_computed)
    count_ahead(flight, record.num_tokens)


cdef inline int32_t _count_resolved(
    const Batch *batch, const Growth *growth, Py_ssize_t i, int32_t row, int32_t num
) noexcept nogil:
    """Count the row's leading tokens that are computed by its resolved steps."""
    if num:
        return batch.records[row].num_tokens - 1
    return min(batch.records[row].num_computed, growth.grown[i].num_computed)


cdef inline void _settle_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cache what the row's resolved tokens fill, and pass the checkpoints among them that no step has written."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t num_computed = batch.records[row].num_computed
    cache_row(batch, row, count_cacheable(batch, row, num_computed))
    if batch.writes_states:
        settle_writes(batch, row, UNKNOWN)
        for g in range(batch.num_groups):
            held = held_by(batch, row, g)
            if keeps_checkpoints(&batch.groups[g]):
                held.num_cached = max(held.num_cached, full_entries(&batch.groups[g].rules, num_computed))
    plan_next_event(batch, row)


cdef inline const int32_t *resolve_rows(
    Batch *batch, const Resolution *resolution, const int32_t *token_ids
) noexcept nogil:
    """Give each row the tokens that its step has sampled, after `check_resolution`. Return the place behind them."""
    cdef const Growth *growth = resolution.growth
    cdef RowRecord *record
    cdef Flight *flight
    cdef int32_t row, num, num_resolved
    cdef Py_ssize_t i
    for i in range(growth.num_grown):
        row, num = resolution.places[i], amount(&resolution.counts, i)
        if row == GONE:
            token_ids += num
            continue
        record, flight = &batch.records[row], &batch.flights[row]
        memcpy(tokens_of(batch, row) + record.num_tokens, token_ids, num * sizeof(int32_t))
        token_ids += num
        if samples(growth, i):
            _tell_step(batch, growth, i, row, num)
        record.next_event = <int32_t>min(<int64_t>record.next_event, last_token_event(batch, row) + 1)
        if batch.caches_computed:
            num_resolved = _count_resolved(batch, growth, i, row, num)
            flight.num_resolved = max(flight.num_resolved, num_resolved)
            if flight.num_resolved >= flight.next_full:
                _settle_row(batch, row)
        elif record.num_computed >= record.next_event:
            _settle_row(batch, row)
    cache_waiting(&batch.waiting)
    return token_ids
