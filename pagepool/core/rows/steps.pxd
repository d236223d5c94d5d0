# Steps are planned ahead, launched and resolved. The caller holds the locks, and has copied the rows of a call.
#
# A `Resolution` ends the steps of one call for its rows: each row gets the tokens that its step sampled. A row whose stay has
# ended since, or whose computed tokens were cut, gets none: its place is `GONE`.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.base cimport copy_bytes, rare
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


cdef inline Py_ssize_t _launch_ahead(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Launch the steps of `n` copied rows, and return the number of rows before the first wrong one."""
    cdef const int32_t *rows = batch.checked_rows
    cdef RowRecord *records = batch.records
    cdef Flight *flights = batch.flights
    cdef Launch *launches = growth.launches
    cdef Amounts drafts = growth.num_drafts
    cdef RowRecord *record
    cdef Flight *flight
    cdef int32_t num_planned, num_room_tokens, max_num_tokens = batch.max_num_tokens
    cdef Py_ssize_t i
    for i in range(n):
        record, flight = &records[rows[i]], &flights[rows[i]]
        num_planned = flight.num_planned
        if not can_plan_ahead(batch, rows[i], amount(&drafts, i)) or num_planned >= max_num_tokens:
            return i
        num_room_tokens = <int32_t>min(num_planned + <int64_t>1 + amount(&drafts, i), <int64_t>max_num_tokens)
        if num_room_tokens >= flight.next_work:
            growth.ahead[i] = num_room_tokens - record.num_tokens
            if not note_due_row(batch, growth, i, num_room_tokens):
                return i
        flight.num_launched += 1
        launches[i] = Launch(
            num_planned=num_planned, num_told=flight.num_told, ordinal=flight.num_launched,
            num_drafts=num_room_tokens - num_planned - 1,
        )
        flight.num_planned, flight.num_ahead = num_room_tokens, num_room_tokens - record.num_tokens
    return n


cdef inline Py_ssize_t launch_ahead(Batch *batch, Growth *growth) noexcept nogil:
    """Copy the rows of a call, and launch a step of each for its next sampled token and its drafts; return the number of rows
    before the first wrong one.
    """
    cdef Py_ssize_t n = copy_rows(batch, growth.rows, growth.num_rows)
    cdef Py_ssize_t num_launched = _launch_ahead(batch, growth, n)
    cdef Py_ssize_t num_right = limit_to_pool(batch, growth, num_launched)
    if num_right < growth.num_rows:
        take_back_launches(batch, growth, 0, num_launched)
    return num_right


cdef inline void take_back_launches(Batch *batch, const Growth *growth, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Take back the launches of copied rows that were planned ahead."""
    cdef Flight *flight
    cdef Py_ssize_t i
    for i in range(start, stop):
        flight = &batch.flights[batch.checked_rows[i]]
        flight.num_launched -= 1
        flight.num_planned = growth.launches[i].num_planned
        count_ahead(flight, batch.records[batch.checked_rows[i]].num_tokens)


cdef inline void launch_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Count the steps of grown rows as in flight. Those planned ahead are counted already."""
    cdef const int32_t *rows = growth.grown_rows
    cdef const Grown *grown = growth.grown
    cdef Launch *launches = growth.launches
    cdef Flight *flights = batch.flights
    cdef Flight *flight
    cdef Amounts new = growth.num_new_tokens, ahead = growth.num_ahead
    cdef bint is_told = growth.token_ids != NULL, samples_now
    cdef int32_t num_planned, num_before, num_computed, max_num_tokens = batch.max_num_tokens
    cdef Py_ssize_t i, n = growth.num_grown
    for i in range(n):
        flight, num_computed = &flights[rows[i]], grown[i].num_computed
        num_before, num_planned = flight.num_planned, num_computed
        if amount(&ahead, i) and num_computed == grown[i].num_tokens:
            num_planned = <int32_t>min(<int64_t>num_planned + amount(&ahead, i), <int64_t>max_num_tokens)
        launches[i].num_planned, launches[i].num_told = num_before, flight.num_told
        launches[i].num_drafts = num_planned - num_computed
        if is_told:
            tell_token(flight, grown[i].num_tokens)
        samples_now = (num_computed == grown[i].num_tokens) & (num_planned > max(num_before, num_computed - amount(&new, i)))
        flight.num_launched += samples_now
        launches[i].ordinal = flight.num_launched if samples_now else 0
        flight.num_planned = max(num_before, num_planned)
        count_ahead(flight, grown[i].num_tokens)


cdef inline void end_launches(Batch *batch, Growth *growth) noexcept nogil:
    """Count the steps of a call's rows as in flight, once the rows have their room."""
    if growth.ahead == NULL:
        launch_rows(batch, growth)
    else:
        take_back_launches(batch, growth, growth.num_grown, growth.num_rows)


# Steps are resolved.

cdef inline int32_t _find_stay(const Batch *batch, int32_t row, int64_t stay) noexcept nogil:
    """Return the row to which a stay has moved from `row`; GONE if it has ended. O(rows) if it moved."""
    cdef Py_ssize_t i
    if batch.stays[row] == stay:
        return row
    for i in range(batch.num_rows):
        if batch.stays[i] == stay:
            return <int32_t>i
    return GONE


cdef inline int32_t find_place(const Batch *batch, const Resolution *resolution, Py_ssize_t i) noexcept nogil:
    """Return the row to which the tokens of a call's row at index `i` go."""
    cdef const Growth *growth = resolution.growth
    cdef int32_t row = growth.grown_rows[i]
    cdef int64_t stay = batch.stays[row] if resolution.stays == NULL else resolution.stays[row]
    if not 0 < stay <= growth.num_stays:  # the row was released since, and perhaps admitted again
        return GONE
    if resolution.stays != NULL:
        row = _find_stay(batch, row, stay)
    if row == GONE or batch.rows[row].last_cut > growth.num_cuts:
        return GONE
    return row


cdef inline int32_t drafts_of(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Return the number of drafts that had slots in the row's step."""
    if growth.launches != NULL:
        return growth.launches[i].num_drafts
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


cdef inline bint _are_plain(const Batch *batch, const Resolution *resolution) noexcept nogil:
    """Whether all rows stayed where they are, each gets one token, and this step is its oldest in flight, as usual. Find the
    places. If one fails, all are looked at again.
    """
    cdef const Growth *growth = resolution.growth
    cdef const RowRecord *records = batch.records
    cdef const Flight *flights = batch.flights
    cdef const int64_t *stays = batch.stays
    cdef int64_t num_stays = growth.num_stays
    cdef int32_t row, num_known, max_num_tokens = batch.max_num_tokens
    cdef int32_t *places = resolution.places
    cdef bint is_any_wrong = False
    cdef Py_ssize_t i, n = growth.num_grown
    if resolution.stays != NULL or growth.num_cuts != batch.num_cuts:
        return False
    if growth.num_grown and (resolution.counts.stride or resolution.counts.values[0] != 1):
        return False
    copy_bytes(places, growth.grown_rows, n * sizeof(int32_t))
    for i in range(n if growth.launches != NULL else 0):  # no early exit, so that it is fast
        row = places[i]
        is_any_wrong |= (stays[row] == 0) | (stays[row] > num_stays) | (records[row].num_tokens >= max_num_tokens)
        is_any_wrong |= flights[row].num_told + 1 != growth.launches[i].ordinal
    for i in range(n if growth.launches == NULL else 0):
        row, num_known = places[i], records[places[i]].num_tokens
        is_any_wrong |= (stays[row] == 0) | (stays[row] > num_stays) | (num_known >= max_num_tokens)
        is_any_wrong |= (num_known != growth.grown[i].num_tokens) | (num_known != records[row].num_computed)
        is_any_wrong |= num_known != growth.grown[i].num_computed
    return not is_any_wrong


cdef inline ResolveFault check_resolution(const Batch *batch, const Resolution *resolution, Py_ssize_t *at) noexcept nogil:
    """Find the places of the tokens, and check each row; return the first fault."""
    cdef const Growth *growth = resolution.growth
    cdef int32_t row, num
    cdef ResolveFault fault
    cdef Py_ssize_t i
    for i in range(0 if _are_plain(batch, resolution) else growth.num_grown):
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


cdef inline void _tell_launch(RowRecord *record, Flight *flight, const Launch *launch, int32_t num) noexcept nogil:
    """Count the tokens sampled by the row's oldest step in flight, and the computed ones among them. The row has the tokens."""
    flight.num_told += 1
    flight.num_planned += num - launch.num_drafts - 1
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
    if growth.ahead != NULL:  # what a later step computes is not resolved
        return batch.records[row].num_computed if batch.flights[row].num_launched == growth.launches[i].ordinal else 0
    return min(batch.records[row].num_computed, growth.grown[i].num_computed)


cdef inline void _settle_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cache what the row's resolved tokens fill, and pass the checkpoints among them that no step has written."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t num_computed = batch.records[row].num_computed
    if batch.writes_states and batch.hash_page_size:  # checkpoints are cached before pages that wait to be hashed
        hash_row(batch, row, count_cacheable(batch, row, num_computed))
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
    cdef const Launch *launches = growth.launches
    cdef const int32_t *places = resolution.places
    cdef Amounts counts = resolution.counts
    cdef RowRecord *records = batch.records  # in variables of their own, since stores of tokens might change the batch's
    cdef Flight *flights = batch.flights
    cdef int32_t *known = batch.token_ids
    cdef Py_ssize_t i, stride = batch.tokens_stride, n = growth.num_grown
    cdef bint is_computed = batch.caches_computed
    cdef RowRecord *record
    cdef Flight *flight
    cdef int32_t row, num
    for i in range(n):
        row, num = places[i], amount(&counts, i)
        if row == GONE:
            token_ids += num
            continue
        record, flight = &records[row], &flights[row]
        if num == 1:  # a copy of known size
            known[row * stride + record.num_tokens] = token_ids[0]
        else:
            copy_bytes(known + row * stride + record.num_tokens, token_ids, num * sizeof(int32_t))
        token_ids += num
        record.num_tokens += num
        if launches == NULL:
            record.num_computed += max(0, num - 1)
        elif launches[i].ordinal > flight.num_told:
            _tell_launch(record, flight, &launches[i], num)
        if record.num_computed != record.num_tokens:
            record.next_event = <int32_t>min(<int64_t>record.next_event, last_token_event(batch, row) + 1)
        if is_computed:
            flight.num_resolved = max(flight.num_resolved, _count_resolved(batch, growth, i, row, num))
        if record.num_computed >= record.next_event or (is_computed and flight.num_resolved >= flight.next_full):
            _settle_row(batch, row)
    cache_waiting(&batch.waiting)
    return token_ids
