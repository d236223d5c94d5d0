# Steps are settled: each row gets the tokens that its step sampled. Rows are cut, and set back after a failed step. The caller
# holds the locks.
#
# A `Settlement` ends the launches of one call. A row whose stay has ended since, or whose tokens were cut, gets no tokens: its
# place is `GONE`.

from pagepool.core.base cimport copy_bytes
from pagepool.core.rows.ends cimport *


cdef enum:
    GONE = -1

cdef enum SettleFault:
    SETTLES
    NOT_SAMPLED               # a token for a row that is inside its prompt, or has got its token
    TOO_MANY                  # more tokens than its drafts plus one
    TOO_EARLY                 # an earlier step of the row is not settled
    NONE_TOLD                 # no token for a row with a later step in flight
    FULL_ROW
    ROWS_ADDED                # rows were added to the step after the call counted them

cdef struct Settlement:
    const Growth *growth
    const int64_t *stays      # [num_rows] stays of the rows just before the first exchange of rows after the call; NULL: none
    Amounts counts            # tokens of each row
    int32_t *places           # [num_grown] the row where each row of the call is now, or GONE
    const Ends *rules         # of rows that end; NULL: none do
    uint8_t *ends             # [num_grown] whether each row ended, with these


cdef inline int32_t _find_stay(const Batch *batch, int32_t row, int64_t stay) noexcept nogil:
    """Return the row that has a stay now: `row`, unless it moved (then O(rows)); GONE if it has ended."""
    cdef Py_ssize_t i
    if batch.stays[row] == stay:
        return row
    for i in range(batch.num_rows):
        if batch.stays[i] == stay:
            return <int32_t>i
    return GONE


cdef inline int32_t find_place(const Batch *batch, const Settlement *settlement, Py_ssize_t i) noexcept nogil:
    """Return the row where row `i` of the call is now; GONE unless it still has its launch of the step."""
    cdef const Growth *growth = settlement.growth
    cdef int32_t row = growth.grown_rows[i]
    cdef int64_t stay = batch.stays[row] if settlement.stays == NULL else settlement.stays[row]
    if not 0 < stay <= growth.num_stays:  # the row was released since, and perhaps admitted again
        return GONE
    if settlement.stays != NULL:
        row = _find_stay(batch, row, stay)
    return row if row != GONE and find_launch(batch, row, growth.step) >= 0 else GONE


cdef inline SettleFault _check_row(
    const Batch *batch, int32_t row, int64_t step, int32_t num, const Ends *rules
) noexcept nogil:
    """Check the number of tokens that a row gets, and the order of its steps. A row that may end takes no more than fit."""
    cdef Py_ssize_t at = find_launch(batch, row, step)
    cdef int32_t most = launch_of(batch, row, at).num_sampled
    if most == NOBODYS:
        return SETTLES
    if num > most:
        return TOO_MANY if most else NOT_SAMPLED
    if most and count_awaited(batch, row) > batch.records[row].num_launches - at:
        return TOO_EARLY
    if most and num == 0 and at + 1 < batch.records[row].num_launches:
        return NONE_TOLD
    num = num if rules == NULL else min(num, 1)
    return FULL_ROW if num > batch.max_num_tokens - batch.records[row].num_tokens else SETTLES


cdef inline bint _are_plain(const Batch *batch, const Settlement *settlement) noexcept nogil:
    """Find the places in the usual case: no row has moved, each gets one token, and the step is its oldest in flight. False in
    other cases; the caller then checks each row.
    """
    cdef const Growth *growth = settlement.growth
    cdef const RowRecord *records = batch.records
    cdef const Launch *launch
    cdef const int64_t *stays = batch.stays
    cdef int64_t num_stays = growth.num_stays
    cdef int32_t row, max_num_tokens = batch.max_num_tokens
    cdef int32_t *places = settlement.places
    cdef bint is_any_wrong = False
    cdef Py_ssize_t i, n = growth.num_grown, ring_size = batch.ring_size
    if settlement.stays != NULL or (n and (settlement.counts.stride or settlement.counts.values[0] != 1)):
        return False
    copy_bytes(places, growth.grown_rows, n * sizeof(int32_t))
    for i in range(n):  # no early exit, so that it is fast
        row = places[i]
        launch = &batch.launches[row * ring_size + records[row].first_launch]
        is_any_wrong |= (stays[row] == 0) | (stays[row] > num_stays) | (records[row].num_tokens >= max_num_tokens)
        is_any_wrong |= (records[row].num_launches == 0) | (records[row].told_step != 0)
        is_any_wrong |= (launch.step != growth.step) | (launch.num_sampled <= 0)
    return not is_any_wrong


cdef inline SettleFault check_settlement(const Batch *batch, const Settlement *settlement, Py_ssize_t *at) noexcept nogil:
    """Find the places of the tokens, and check each row; return the first fault."""
    cdef const Growth *growth = settlement.growth
    cdef SettleFault fault
    cdef Py_ssize_t i
    for i in range(0 if _are_plain(batch, settlement) else growth.num_grown):
        at[0] = i
        settlement.places[i] = find_place(batch, settlement, i)
        if settlement.places[i] == GONE:
            continue
        fault = _check_row(
            batch, settlement.places[i], growth.step, amount(&settlement.counts, i), settlement.rules
        )
        if fault != SETTLES:
            return fault
    return SETTLES


cdef inline void _settle_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cache what is final, and count as done the checkpoints within the computed tokens: no later step writes them."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t num_final = count_final(batch, row)
    if batch.writes_states and batch.hash_page_size:  # checkpoints are cached before pages that wait to be hashed
        hash_row(batch, row, num_final)
    cache_row(batch, row, num_final)
    if batch.writes_states:
        settle_writes(batch, row, num_final, 0, UNKNOWN)
    for g in range(batch.num_groups if batch.writes_states else 0):
        held = held_by(batch, row, g)
        if keeps_checkpoints(&batch.groups[g]):
            held.num_cached = max(held.num_cached, full_entries(&batch.groups[g].rules, batch.records[row].num_computed))
    plan_next(batch, row)


cdef inline void _end_launch(Batch *batch, Py_ssize_t row, Py_ssize_t at, int32_t num) noexcept nogil:
    """End the launch at index `at`, whose `num` sampled tokens the row has got, and all launches before it. Later launches move
    back by the rejected drafts.
    """
    cdef Py_ssize_t i
    cdef int32_t num_sampled = launch_of(batch, row, at).num_sampled
    cdef int32_t num_rejected = max(0, num_sampled - max(num, 1))
    assert num_sampled != NOBODYS or num == 0
    end_launches(batch, row, at + 1)
    for i in range(batch.records[row].num_launches if num_rejected else 0):
        launch_at(batch, row, i).before -= num_rejected
    batch.records[row].num_planned -= num_rejected
    count_run_tokens(batch, row)


cdef inline const int32_t *settle_rows(
    Batch *batch, const Settlement *settlement, const int32_t *token_ids
) noexcept nogil:
    """Give each row the tokens that its step has sampled, after `check_settlement`. Return a pointer behind these tokens."""
    cdef int32_t *places = settlement.places
    cdef Amounts counts = settlement.counts
    cdef RowRecord *record
    cdef int64_t step = settlement.growth.step
    cdef int32_t row, num, num_taken
    cdef Py_ssize_t i, at
    for i in range(settlement.growth.num_grown):
        row, num = places[i], amount(&counts, i)
        if row != GONE:
            record, at = &batch.records[row], find_launch(batch, row, step)
            if at < 0:  # an earlier call of the step has settled the row, which is in it twice
                places[i], token_ids = GONE, token_ids + num
                continue
            if launch_of(batch, row, at).num_sampled == NOBODYS:
                places[i], token_ids, num = GONE, token_ids + num, 0
            num_taken = num
            if settlement.rules != NULL:
                num_taken = count_to_end(batch, settlement.rules, row, token_ids, num, &settlement.ends[i])
            if num_taken == 1:  # a copy of known size
                tokens_of(batch, row)[record.num_tokens] = token_ids[0]
            else:
                copy_bytes(tokens_of(batch, row) + record.num_tokens, token_ids, num_taken * sizeof(int32_t))
            record.num_tokens += num_taken
            _end_launch(batch, row, at, num_taken)
            if settlement.rules != NULL and settlement.ends[i] != GOES_ON:
                stop_row(batch, row)
            if count_final(batch, row) >= record.next_settle:
                _settle_row(batch, row)
        token_ids += num
    cache_waiting(&batch.waiting)
    return token_ids


# Tokens that the host chose.

cdef inline bint _can_append(const Batch *batch, int32_t row) noexcept nogil:
    """Whether the row is admitted and has not ended, and no later step in flight computes the token."""
    if not is_row(batch, row) or batch.records[row].state == ENDED:
        return False
    return not batch.max_steps_ahead or count_awaited(batch, row) <= 1


cdef inline void _append_token(Batch *batch, int32_t row, int32_t token_id) noexcept nogil:
    """Append a token. If a step in flight samples the row's next token, this is that token, and the drafts of the step are
    rejected: only `settle` can accept drafts.
    """
    cdef RowRecord *record = &batch.records[row]
    if count_awaited(batch, row):
        launch_at(batch, row, record.num_launches - 1).num_sampled = 0
    record.num_planned = min(record.num_planned, record.num_tokens)
    tokens_of(batch, row)[record.num_tokens] = token_id
    record.num_tokens += 1
    count_run_tokens(batch, row)


cdef inline Py_ssize_t append_tokens(Batch *batch, const int32_t *rows, const int32_t *token_ids, Py_ssize_t n) noexcept nogil:
    """Append a token to each row, in order, or none if one does not fit; return the number of tokens that fit."""
    cdef Py_ssize_t i, num_right = 0
    while num_right < n and _can_append(batch, rows[num_right]):
        if batch.records[rows[num_right]].num_tokens >= batch.max_num_tokens:
            break
        batch.records[rows[num_right]].num_tokens += 1
        num_right += 1
    for i in range(num_right):
        batch.records[rows[i]].num_tokens -= 1
    for i in range(n if num_right == n else 0):
        _append_token(batch, rows[i], token_ids[i])
    return num_right


# Rows get shorter: tokens are cut, or computed again after a failed step or load. The next tokens overwrite the page at the
# cut, so it must have no other holder. With a hash lookahead the pages of the last tokens before a cut change too: their keys
# cover cut tokens, and drafters write the last slots before the cut again.

cdef inline int32_t _ring_stop_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Return the position before which all may be written in the rings of a row."""
    return max(batch.rows[row].ring_stop, batch.records[row].num_planned)


cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the row has a state that saw tokens from `num_tokens` on, or will, and cannot go back to there. A restart from
    token 0 replaces the state.
    """
    cdef const RowRecord *record = &batch.records[row]
    cdef const Rules *rules
    cdef Py_ssize_t g
    for g in range(batch.num_groups if batch.has_state and 0 < num_tokens < record.num_planned else 0):
        rules = &batch.groups[g].rules
        if is_ring(rules):
            if not ring_has(rules, num_tokens, batch.rows[row].ring_start, _ring_stop_of(batch, row)):
                return True
        elif is_recurrent(rules) and num_tokens < record.num_computed:
            return True
    return False


cdef inline bint has_recurrent(const Batch *batch) noexcept nogil:
    """Whether a group is a state that cannot go back at all."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        if is_recurrent(&batch.groups[g].rules):
            return True
    return False


cdef inline void _set_rings_back(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Note that a row goes back to `num_tokens` tokens. If one of its rings has lost all of them, it begins again there."""
    cdef const Rules *rules
    cdef int32_t stop = _ring_stop_of(batch, row)
    cdef bint is_lost = num_tokens < batch.rows[row].ring_start
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        rules = &batch.groups[g].rules
        is_lost |= is_ring(rules) and stop - num_tokens > rules.capacity
    batch.rows[row].ring_stop = num_tokens if is_lost else stop
    if is_lost:
        batch.rows[row].ring_start = num_tokens


cdef inline int32_t _first_changed(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Return the first position whose slot changes if the row is cut to its first `num_tokens` tokens."""
    if batch.hash_page_size and num_tokens < batch.records[row].num_tokens:
        return count_keyed(batch, num_tokens)
    return num_tokens


cdef inline int32_t restart_of(const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Return the `find_restart` of the row with `num_tokens` known tokens, if at most `num_computed` of them are computed."""
    cdef int32_t changed = min(num_computed, _first_changed(batch, row, num_tokens))
    return find_restart(batch.pool, holding_of(batch, row), min(batch.records[row].num_computed, num_computed), changed)


cdef inline bint can_restart_row(const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Whether the row `can_restart` with `num_tokens` known tokens, at most `num_computed` of them computed, and no state has
    seen tokens that it computes again.
    """
    cdef Holding *holding = holding_of(batch, row)
    cdef int32_t restart = restart_of(batch, row, num_tokens, num_computed)
    if batch.records[row].state != RUNNING or has_state_behind(batch, row, restart):
        return False
    return can_restart(batch.pool, holding, restart, num_tokens)


cdef inline bint _can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the row can be cut to its first `num_tokens` tokens. Its pages matter only if slots of computed tokens change."""
    if batch.rows[row].num_ahead or has_state_behind(batch, row, num_tokens):
        return False
    if _first_changed(batch, row, num_tokens) >= batch.records[row].num_computed:
        return batch.records[row].state == RUNNING
    return can_restart_row(batch, row, num_tokens, num_tokens)


cdef inline Py_ssize_t _copy_rows_to_trim(
    Batch *batch, const int32_t *rows, const Amounts *lengths, Py_ssize_t n
) noexcept nogil:
    """Copy rows, and return the number of rows before the first wrong one."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not stamp_row(batch, rows[i], i):
            return i
        if has_row_due(batch, batch.checked_rows[i]):
            return i
        if not 0 <= amount(lengths, i) <= batch.records[batch.checked_rows[i]].num_tokens:
            return i
        if not _can_trim(batch, batch.checked_rows[i], amount(lengths, i)):
            return i
    return n


cdef inline void _cut_tokens(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Cut known tokens, and derive the row's other counts."""
    assert 0 <= num_tokens <= batch.records[row].num_tokens
    batch.records[row].num_tokens = num_tokens
    cut_prompt(holding_of(batch, row), num_tokens)
    count_run_tokens(batch, row)
    cut_hashes(batch, row)
    plan_next(batch, row)


cdef inline void note_row_entries(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Note the entries of a row's pages that steps in flight fill; drop an entry if memory is short."""
    cdef const Held *held
    cdef Py_ssize_t g, i
    cdef int32_t start, size
    cdef int64_t step
    cdef bint may_fail = batch.records[row].num_launches and batch.open_steps != NULL
    for g in range(batch.num_groups if may_fail else 0):
        held, size = held_by(batch, row, g), batch.groups[g].rules.page_size
        start = max(held.num_hits, full_pages(&batch.groups[g].rules, batch.records[row].num_resolved))
        for i in range(start, held.num_pages if not is_state(&batch.groups[g].rules) else 0):
            step = step_that_fills(batch, row, <int32_t>(i + 1) * size, 0)
            if step and batch.pool.pages[held.ids[i]].group != NO_GROUP and not note_made(batch, step, held.ids[i]):
                uncache(batch.pool, held.ids[i])


cdef inline void restart_row(
    Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed, bint is_failed
) noexcept nogil:
    """Restart a row that `can_restart_row` with `num_tokens` known tokens, at most `num_computed` of them computed. After a
    failed step it keeps no slots behind its planned positions, and its earlier steps go on.
    """
    cdef Holding *holding = holding_of(batch, row)
    cdef RowRecord *record = &batch.records[row]
    cdef int32_t changed = min(num_computed, _first_changed(batch, row, num_tokens))
    cdef int32_t restart = restart_of(batch, row, num_tokens, num_computed)
    cdef int32_t num_planned = restart
    assert 0 <= restart <= record.num_computed and record.state == RUNNING
    if is_failed and restart == record.num_computed:  # an earlier step writes behind the known tokens
        num_planned = num_computed
    if rare(batch.has_state):
        _set_rings_back(batch, row, restart)
    note_row_entries(batch, row)  # others may hold pages that the row gives back
    restart_from(batch.pool, holding, restart, min(restart, changed), num_planned if is_failed else num_tokens)
    if num_planned < record.num_planned:
        if batch.writes_states:
            drop_writes(batch, row, num_planned)
        record.num_planned = num_planned
        while is_failed and record.num_launches and launch_of(batch, row, record.num_launches - 1).before >= num_planned:
            record.num_launches -= 1
        if not is_failed:
            disown_launches(batch, row, num_planned)
            batch.num_cuts += 1
            batch.rows[row].last_cut = batch.num_cuts
    show_end(batch, row)
    batch.rows[row].num_hits = min(batch.rows[row].num_hits, restart)
    _cut_tokens(batch, row, num_tokens)


cdef inline Py_ssize_t trim_rows(
    Batch *batch, const int32_t *rows, const Amounts *lengths, Py_ssize_t n
) noexcept nogil:
    """Cut rows, or none if one is wrong; return the number of rows before the first wrong one."""
    cdef Py_ssize_t i, num_right = _copy_rows_to_trim(batch, rows, lengths, n)
    cdef int32_t row, num_tokens
    for i in range(n if num_right == n else 0):
        row, num_tokens = batch.checked_rows[i], amount(lengths, i)
        if _first_changed(batch, row, num_tokens) < batch.records[row].num_computed:
            restart_row(batch, row, num_tokens, num_tokens, False)
        else:
            _cut_tokens(batch, row, num_tokens)
    return num_right


# A step fails, and with it all later ones. First the entries of all pages that these steps should have filled are dropped. Then
# each row with a failed launch goes back to the position before it, and each row that has hit such a page to the start of the
# page, or is released. Rows go back one by one: when one gives a page back, the next may become the page's only holder.

cdef struct Failure:
    int64_t step              # number of the first failed step
    uint8_t *is_lost          # [num_pages] whether a page was not filled
    uint8_t *has_lost         # [num_rows] whether the row's state was copied from such a page


cdef inline Py_ssize_t _find_failed(const Batch *batch, Py_ssize_t row, int64_t step) noexcept nogil:
    """Return the index of the row's first failed launch; the number of launches if none failed."""
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches):
        if launch_of(batch, row, i).step >= step:
            return i
    return batch.records[row].num_launches


cdef inline void _lose_page(Batch *batch, const Failure *failure, int32_t page_id) noexcept nogil:
    """Drop the entry of a page that was not filled."""
    if page_id != NULL_PAGE and batch.pool.pages[page_id].group != NO_GROUP:
        failure.is_lost[page_id] = 1
        uncache_everywhere(batch.pool, page_id)


cdef inline void _lose_checkpoint(Batch *batch, const Failure *failure, const MadeEntry *entry) noexcept nogil:
    """Mark the rows whose state was copied from a page that was not filled. O(rows x groups)."""
    cdef const Group *group
    cdef Digest key
    cdef Py_ssize_t g, row
    cdef int32_t place
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        for row in range(batch.num_rows if is_state(&group.rules) and group.id == entry.group else 0):
            place = full_entries(&group.rules, batch.rows[row].num_hits) - 1
            if batch.records[row].is_admitted and place >= 0:
                key = digests_of(batch, row)[last_hash(group, place)]
                failure.has_lost[row] |= key.lo == entry.key.lo and key.hi == entry.key.hi


cdef inline void lose_entries(Batch *batch, const Failure *failure) noexcept nogil:
    """Drop the entries of pages that failed launches should have filled: pages held by rows, and pages given back by them."""
    cdef const MadeEntry *entry
    cdef const Page *page
    cdef const Held *held
    cdef Py_ssize_t row, g, i, at, start, num_kept = 0
    for row in range(batch.num_rows):
        at = _find_failed(batch, row, failure.step)
        if at == batch.records[row].num_launches:
            continue
        for g in range(batch.num_groups):
            held = held_by(batch, row, g)
            start = max(held.num_hits, full_pages(&batch.groups[g].rules, launch_of(batch, row, at).before))
            for i in range(start, held.num_pages if not is_state(&batch.groups[g].rules) else 0):
                _lose_page(batch, failure, held.ids[i])
    for i in range(batch.num_made):
        entry = &batch.made[i]
        page = &batch.pool.pages[entry.page_id]
        if entry.step < failure.step:
            batch.made[num_kept] = entry[0]
            num_kept += 1
            continue
        if page.key_lo == entry.key.lo and page.key_hi == entry.key.hi and page.group & ~FLAGS == entry.group:
            _lose_page(batch, failure, entry.page_id)
        uncache_in_tier(batch.pool.tier, entry.key, entry.group)  # the page may have been evicted and saved
        _lose_checkpoint(batch, failure, entry)
    assert num_kept <= batch.num_made
    batch.num_made = num_kept


cdef inline int32_t _find_lost(const Batch *batch, const Failure *failure, Py_ssize_t row) noexcept nogil:
    """Return the first position that the row has to compute again; INT32_MAX: there is none."""
    cdef const Held *held
    cdef Py_ssize_t g, at = _find_failed(batch, row, failure.step)
    cdef int32_t i, stop, own = INT32_MAX, first = INT32_MAX
    if at < batch.records[row].num_launches:
        own = launch_of(batch, row, at).before
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        stop = min(held.num_pages, full_pages(&batch.groups[g].rules, own))  # its failed launch fills the pages behind
        for i in range(stop if not is_state(&batch.groups[g].rules) else 0):
            if failure.is_lost[held.ids[i]]:
                first = min(first, i * batch.groups[g].rules.page_size)
                break
    first = min(first, own)
    return 0 if failure.has_lost[row] and first == INT32_MAX else first


cdef inline bint set_back(Batch *batch, const Failure *failure, int32_t row) noexcept nogil:
    """Set a row back if a failed step concerns it, after `lose_entries`; False if it cannot go back. A row that has ended goes
    on to its release. O(pages).
    """
    cdef int32_t first = _find_lost(batch, failure, row) if batch.records[row].is_admitted else INT32_MAX
    cdef int32_t num_tokens = batch.records[row].num_tokens
    if first == INT32_MAX:
        return True
    batch.records[row].num_launches = <uint8_t>_find_failed(batch, row, failure.step)  # earlier launches still run
    if batch.records[row].state == ENDED:
        count_run_tokens(batch, row)
        return True
    if has_copies(batch.pool, holding_of(batch, row)) or (first > 0 and has_recurrent(batch)):
        return False
    if not can_restart_row(batch, row, num_tokens, first):
        return False
    restart_row(batch, row, num_tokens, first, True)
    return True
