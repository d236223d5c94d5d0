# Rows are planned: each gets slots for the tokens of its next step, and a launch, up to the first row that does not fit. A
# call first checks all rows, and lists those that need work besides counting. If it passes tokens, the unlisted rows append
# theirs at once, and lose them again if a row is wrong. Then it does the work of the listed rows, in order.

from pagepool.core.rows.states cimport *


cdef inline void _list_new_pages(
    Growth *growth, const int32_t *ids, int32_t n, int32_t offset, int32_t row, int32_t group
) noexcept nogil:
    """List new pages of a row in the result of the call."""
    cdef int32_t *new_ids = growth.new_ids + growth.num_new
    cdef int32_t *new_rows = growth.new_rows + growth.num_new
    cdef int32_t *new_groups = growth.new_groups + growth.num_new
    cdef int32_t i
    assert growth.num_new + n <= growth.max_num_new
    for i in range(n):
        new_ids[i], new_rows[i], new_groups[i] = ids[i] - offset, row, group
    growth.num_new += n


cdef inline void show_local_ids(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Write the row's last pages again, which the tables show by the ids of the pool, from the first of them on."""
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t offset, n
    for g in range(batch.num_groups):
        held, offset, n = held_by(batch, row, g), shown_offset_of(batch, row, g), 0
        while n < held.num_pages and ids_at(batch.tables[g], row)[held.num_pages - 1 - n] != (
            max(0, held.ids[held.num_pages - 1 - n] - offset)
        ):
            n += 1
        write_ids(batch.tables[g], row, held.num_pages - n, held.ids + held.num_pages - n, n, offset)


cdef inline void take_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens, Growth *growth) noexcept nogil:
    """Take the row's missing pages, group by group, and write them to the tables. Enough pages are free."""
    cdef const int32_t *ids
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t n, offset
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        n = take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.rows[row].shard, batch.rows[row].holding.session)
        if not n:
            continue
        ids, offset = held.ids + held.num_pages - n, offset_of(batch, g)
        write_ids(batch.tables[g], row, held.num_pages - n, ids, n, offset)
        batch.tables[g].version += 1
        if growth != NULL:
            _list_new_pages(growth, ids, n, offset, <int32_t>row, <int32_t>g)


cdef inline bint _has_pages_for(
    const Batch *batch, Py_ssize_t row, int64_t num_new, int64_t num_tokens, Shortage *shortage
) noexcept nogil:
    """Whether the `num_new` pages that the row lacks for `num_tokens` tokens are free. If not, set the shortage."""
    cdef int32_t shard = batch.rows[row].shard
    cdef int32_t num_free = batch.pool.num_free if shard < 0 else batch.pool.shard_num_free[shard]
    if exceptional((batch.pool.num_banks > 1) | (num_new > num_free)):
        return _has_pages_in_banks(batch, row, num_new, num_tokens, shortage)
    return True


cdef inline bint _has_pages_in_banks(
    const Batch *batch, Py_ssize_t row, int64_t num_new, int64_t num_tokens, Shortage *shortage
) noexcept nogil:
    """Whether each bank, or the row's shard of it, has the free pages that the row lacks. If not, set the shortage."""
    cdef int64_t[MAX_BANKS] num_new_in
    cdef int32_t bank, queue
    if batch.pool.num_banks == 1:
        shortage[0] = shortage_in(batch.pool, num_new, 0, 0, batch.rows[row].shard)
        return False
    if num_new <= count_least_free(batch.pool):
        return True
    count_new_in_banks(holding_of(batch, row), num_tokens, num_new_in)
    for bank in range(batch.pool.num_banks):
        queue = queue_in(batch.pool, bank, batch.rows[row].shard)
        if num_new_in[bank] > count_free_in(batch.pool, queue):
            shortage[0] = shortage_in(batch.pool, num_new_in[bank], 0, 0, queue)
            return False
    return True


cdef inline int64_t _find_row_excess(
    const Batch *batch, Py_ssize_t row, int64_t num_tokens, int32_t num_computed, int32_t *queue
) noexcept nogil:
    """Return `find_any_excess` of the row with slots for `num_tokens` tokens, once it has skipped pages for `num_computed`."""
    cdef int64_t[MAX_BANKS] num_new_in
    queue[0] = batch.rows[row].shard
    count_new_in_banks(holding_of(batch, row), num_tokens, num_new_in)
    return find_any_excess(batch.pool, holding_of(batch, row), NULL, num_new_in, num_computed, queue)


cdef inline LinesBefore _lines_before(const Batch *batch, const Growth *growth, const DueRow *due) noexcept nogil:
    """Return what is final before the step of a due row, with the token that the call tells it. Its counts are not advanced."""
    cdef int32_t row = batch.checked_rows[due.at]
    cdef const RowRecord *record = &batch.records[row]
    cdef bint is_told = growth.token_ids != NULL
    cdef Py_ssize_t num_run = record.num_launches if is_told else count_run(batch, row)
    cdef int32_t num_tokens = record.num_tokens + is_told
    cdef int32_t num_resolved = launch_of(batch, row, num_run).before if num_run < record.num_launches else due.before
    cdef int32_t num_final = final_of(batch, num_tokens, min(due.before, num_tokens), num_resolved)
    return LinesBefore(num_run=<int32_t>num_run, num_final=num_final, num_sure=min(num_final, num_resolved))


cdef inline Py_ssize_t _find_too_large(Batch *batch, Growth *growth) noexcept nogil:
    """Return the index of the first row in a call that its bank or shard can never hold, and set the excess; the number of rows
    if there is none.
    """
    cdef const DueRow *due
    cdef LinesBefore lines
    cdef int32_t row
    cdef Py_ssize_t k
    for k in range(growth.num_due):
        due = &batch.due_rows[k]
        row = batch.checked_rows[due.at]
        if not _has_pages_for(batch, row, due.num_new_pages, due.num_room, &growth.shortage):
            lines = _lines_before(batch, growth, due)
            growth.num_excess = _find_row_excess(batch, row, due.num_room, lines.num_sure, &growth.short_queue)
            if growth.num_excess:
                return due.at
    return growth.num_rows


cdef inline bint _is_ready(const Batch *batch, int32_t row) noexcept nogil:
    """Whether the row runs, no moves of its pages are due, and nobody else gave back a page that is due to be skipped."""
    cdef const RowRecord *record = &batch.records[row]
    if record.state != RUNNING or (rare(record.next_plan == 1) and has_row_due(batch, row)):
        return False
    return not rare(batch.skips_pages) or find_lost_page(batch.pool, holding_of(batch, row), record.num_computed) == NULL_PAGE


cdef inline void _note_due(Batch *batch, Growth *growth, Py_ssize_t i, int32_t before, int32_t num_room) noexcept nogil:
    """Add a row, whose counts are not advanced yet, to the due rows, with the pages that it may need."""
    cdef Holding *holding = holding_of(batch, batch.checked_rows[i])
    cdef DueRow *due = &batch.due_rows[growth.num_due]
    assert growth.num_due < growth.num_rows
    due.at, due.before, due.num_room = <int32_t>i, before, num_room
    due.num_new_pages = <int32_t>min(count_new_pages(holding, num_room), <int64_t>INT32_MAX)
    growth.max_num_new += due.num_new_pages
    growth.num_due += 1


cdef inline bint _copy_ascending(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows if they are in the table and ascend, as they usually do: then none of them repeats."""
    cdef const int32_t *copied = batch.checked_rows
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    if n <= batch.num_ascending and memcmp(copied, rows, n * sizeof(int32_t)) == 0:  # the same rows as in the last step
        return True
    batch.num_ascending = 0
    if n > batch.num_rows:
        return False
    memcpy(batch.checked_rows, rows, n * sizeof(int32_t))
    for i in range(1, n if GUARDS else 1):  # no early exit, so that it vectorises
        signs |= copied[i] | <int32_t>(<uint32_t>copied[i] - <uint32_t>copied[i - 1] - 1)
    if GUARDS and (signs < 0 or copied[0] < 0 or copied[n - 1] >= batch.num_rows):
        return False
    batch.num_ascending = n
    return True


cdef inline Py_ssize_t copy_rows(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows, so that they cannot change during the call. Return the number of rows before the first that is outside the
    table, free, or repeated.
    """
    cdef Py_ssize_t i
    if _copy_ascending(batch, rows, n):
        return n
    start_call(batch)
    for i in range(n):
        if not stamp_row(batch, rows[i], i):
            return i
    return n


# Rows are checked, and the due ones noted; others are plain. Free and pending rows never are: their `next_plan` is at most 1.

cdef inline bint _check_due_step(Batch *batch, Growth *growth, Py_ssize_t i) noexcept nogil:
    """Note a row that gets a token and may have work to do; False if the call is wrong for it."""
    cdef int32_t row = batch.checked_rows[i]
    cdef const RowRecord *record = &batch.records[row]
    cdef int32_t before = record.num_tokens
    if GUARDS and (before >= batch.max_num_tokens or record.num_planned < before or not _is_ready(batch, row)):
        return False
    if GUARDS and rare(batch.max_steps_ahead) and count_awaited(batch, row) > 1:  # a later step computes this token
        return False
    _note_due(batch, growth, i, before, before + 1)
    return True


cdef inline uint32_t _find_told_step(const Batch *batch, const Growth *growth, Py_ssize_t n) noexcept nogil:
    """Return the `told_step` of the first told row among `n` copied ones; 0 if there is none."""
    cdef Py_ssize_t i
    for i in range(n if <uint32_t>growth.step else 0):
        if batch.records[batch.checked_rows[i]].told_step:
            return batch.records[batch.checked_rows[i]].told_step
    return 0


cdef inline Py_ssize_t _tell_plain(Batch *batch, const Growth *growth, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """Tell rows from index `start` on their token, up to the first row that is due or was not told by step `told_before`, and
    return the index of that row. A row told here cannot be wrong, and `untell_rows` can take its token back.
    """
    cdef const int32_t *rows = batch.checked_rows
    cdef const int32_t *new_ids = growth.token_ids
    cdef int32_t *token_ids = batch.token_ids
    cdef RowRecord *records = batch.records
    cdef RowRecord *record
    cdef Py_ssize_t i, stride = batch.tokens_stride
    cdef uint32_t told_before = growth.told_before, told_step = <uint32_t>growth.step
    cdef int32_t before
    if told_before == 0:
        return start
    for i in range(start, n):
        record = &records[rows[i]]
        before = record.num_planned
        if exceptional(record.told_step != told_before) or exceptional(before + 1 >= record.next_plan):
            return i
        assert record.state == RUNNING and record.num_computed == record.num_tokens == before < batch.max_num_tokens
        assert record.num_resolved == before - 1
        token_ids[rows[i] * stride + before] = new_ids[i]
        record.num_tokens += 1  # neighbours that all grow by one: a single vector addition
        record.num_computed += 1
        record.num_planned += 1
        record.num_resolved += 1
        record.told_step = told_step
    return n


cdef inline void untell_rows(Batch *batch, Growth *growth, Py_ssize_t start) noexcept nogil:
    """Take back the tokens that `_tell_plain` told to rows from index `start` on."""
    cdef RowRecord *record
    cdef Py_ssize_t i, k = 0
    for i in range(start, growth.num_checked if growth.token_ids != NULL else start):
        while k < growth.num_due and batch.due_rows[k].at < i:
            k += 1
        if k == growth.num_due or batch.due_rows[k].at > i:
            record = &batch.records[batch.checked_rows[i]]
            record.num_tokens = record.num_computed = record.num_planned = record.num_resolved
            record.num_resolved -= 1
            record.told_step = growth.told_before
    growth.num_checked = min(growth.num_checked, start)


cdef inline Py_ssize_t _check_steps(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Check that each copied row can get a token; return the number of rows before the first wrong one."""
    cdef Py_ssize_t i = 0
    if GUARDS and signs_of(growth.token_ids, n) < 0:
        return 0
    growth.told_before = _find_told_step(batch, growth, n)
    while True:
        i = _tell_plain(batch, growth, i, n)
        if i == n or not _check_due_step(batch, growth, i):
            return i
        i += 1


cdef inline bint _check_plan(Batch *batch, Growth *growth, Py_ssize_t i) noexcept nogil:
    """Check a copied row and note what it plans: its next known tokens or, if none are left, the token in flight, and drafts
    behind these. False if the call is wrong for it.
    """
    cdef int32_t row = batch.checked_rows[i]
    cdef const RowRecord *record = &batch.records[row]
    cdef int32_t before = record.num_planned, num_left = record.num_tokens - before, num_room
    cdef int32_t num_new = amount(&growth.num_tokens, i) if num_left > 0 else 1, num_drafts = amount(&growth.num_drafts, i)
    if num_drafts < 0 or num_new < 1:
        return False
    if num_left > 0 and num_new > num_left:
        return False
    if num_left <= 0 and (before >= batch.max_num_tokens or not 1 <= count_awaited(batch, row) <= batch.max_steps_ahead):
        return False
    num_room = room_for(batch, before + num_new, num_drafts)
    if num_room >= record.next_plan or min(before + num_new, record.num_tokens) >= record.next_settle:
        if not _is_ready(batch, row):
            return False
        _note_due(batch, growth, i, before, num_room)
    if num_new < num_left:  # inside a prompt drafts only get room
        growth.planned[i] = Planned(num_planned=before + num_new, num_sampled=0)
    else:
        growth.planned[i] = Planned(num_planned=num_room, num_sampled=num_room - before - num_new + 1)
    return True


cdef inline Py_ssize_t _check_plans(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Check all copied rows, and return the number of rows before the first wrong one."""
    cdef Py_ssize_t i
    for i in range(n):
        if not _check_plan(batch, growth, i):
            return i
    return n


cdef inline Py_ssize_t check_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Copy the rows of a call and check them; return the number of rows before the first that is wrong, or that its bank or
    shard can never hold. Plain rows get their tokens at once, and `untell_rows` takes these back if the call is refused;
    nothing else changes.
    """
    cdef Py_ssize_t n = copy_rows(batch, growth.rows, growth.num_rows)
    cdef Py_ssize_t num_right = _check_plans(batch, growth, n) if growth.token_ids == NULL else _check_steps(batch, growth, n)
    growth.num_checked = num_right
    if num_right == growth.num_rows and rare(growth.max_num_new > count_least_free(batch.pool)):
        num_right = _find_too_large(batch, growth)
    return num_right


# Counts are advanced. A call that tells a token settles the row's last step, so the new launch is then the only one.

cdef inline int32_t _advance_row(Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Advance the counts of a checked row that do not follow from its launches. Return the position where its step begins.
    """
    cdef int32_t row = batch.checked_rows[i]
    cdef RowRecord *record = &batch.records[row]
    cdef int32_t before = record.num_planned if growth.token_ids == NULL else record.num_tokens
    if growth.token_ids != NULL:
        tokens_of(batch, row)[before] = growth.token_ids[i]
        record.num_tokens = record.num_planned = before + 1
    else:
        record.num_planned = growth.planned[i].num_planned
    record.num_computed = min(record.num_tokens, record.num_planned)
    return before


cdef inline void _launch_row(Batch *batch, const Growth *growth, Py_ssize_t i, int32_t before) noexcept nogil:
    """Launch the step of an advanced row."""
    cdef int32_t row = batch.checked_rows[i]
    cdef RowRecord *record = &batch.records[row]
    if growth.token_ids != NULL:
        record.num_resolved, record.first_launch, record.num_launches = before, 0, 1
        record.told_step = <uint32_t>growth.step if batch.ring_size == 1 else 0
        if not record.told_step:
            batch.launches[row * batch.ring_size] = Launch(before=before, num_sampled=1, step=growth.step)
        batch.rows[row].num_ahead = 0
    else:
        end_launches(batch, row, count_run(batch, row))
        add_launch(batch, row, Launch(before=before, num_sampled=growth.planned[i].num_sampled, step=growth.step))
        note_planned(batch, row)
        count_run_tokens(batch, row)


cdef inline void _settle_before(Batch *batch, Py_ssize_t row, const LinesBefore *lines) noexcept nogil:
    """Cache what is final before the row's next step, and skip what this step does not read."""
    if batch.writes_states:
        settle_writes(batch, row, lines.num_final, lines.num_run, UNKNOWN)
    cache_row(batch, row, lines.num_final)
    if batch.skips_pages:
        cache_waiting(&batch.waiting)  # before pages leave the row
        skip_row(batch, row, lines.num_sure)


cdef inline bint _has_drafts_in_flight(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether the row has drafts whose step is not settled: then the position of the next token is not known."""
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches):
        if launch_of(batch, row, i).num_sampled > 1:
            return True
    return False


cdef inline int32_t _count_written(const Batch *batch, Py_ssize_t row, int32_t before) noexcept nogil:
    """Count the positions up to the last sure one of the row's next step: a known token, or the one in flight, not a draft.
    """
    cdef const RowRecord *record = &batch.records[row]
    return record.num_computed if before < record.num_tokens or _has_drafts_in_flight(batch, row) else before + 1


cdef inline void _revert_row(Batch *batch, const Growth *growth, Py_ssize_t row, int32_t num_planned) noexcept nogil:
    """Revert the counts of an advanced row that got no pages."""
    batch.records[row].num_tokens -= growth.token_ids != NULL
    batch.records[row].num_planned = num_planned
    count_run_tokens(batch, row)
    cut_hashes(batch, row)


cdef inline void _cache_planned(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Cache the pages that the planned steps of a row fill, unless they are cached once the steps are settled."""
    cdef const RowRecord *record = &batch.records[row]
    if not batch.caches_computed:
        cache_row(batch, row, final_of(batch, record.num_tokens, record.num_computed, 0))


cdef inline bint _grow_row(Batch *batch, Growth *growth, const DueRow *due) noexcept nogil:
    """Advance a due row and do its work; False, with no page taken, if too few pages are free."""
    cdef int32_t row = batch.checked_rows[due.at], num_planned = batch.records[row].num_planned
    cdef LinesBefore lines
    assert batch.records[row].state == RUNNING and due.before < due.num_room
    if batch.has_final:
        lines = _lines_before(batch, growth, due)
    _advance_row(batch, growth, due.at)
    if batch.has_final:
        _settle_before(batch, row, &lines)
    if due.num_new_pages:
        if not _has_pages_for(batch, row, due.num_new_pages, due.num_room, &growth.shortage):
            _revert_row(batch, growth, row, num_planned)
            return False
        take_pages(batch, row, due.num_room, growth)
    _cache_planned(batch, row)
    if batch.writes_states:
        cache_waiting(&batch.waiting)
        write_states(batch, row, due.before, _count_written(batch, row, due.before))
    _launch_row(batch, growth, due.at, due.before)
    plan_next(batch, row)
    return True


cdef inline void _launch_plain(Batch *batch, const Growth *growth) noexcept nogil:
    """Advance and launch the planned rows, up to the first that does not fit; `_grow_row` has done so for the due ones."""
    cdef Py_ssize_t i, k = 0
    for i in range(growth.num_grown):
        if k < growth.num_due and batch.due_rows[k].at == i:
            k += 1
        else:
            _launch_row(batch, growth, i, _advance_row(batch, growth, i))


cdef inline void grow_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Plan and launch the checked rows, up to the first that does not fit."""
    cdef Py_ssize_t k
    assert 0 <= growth.num_due <= growth.num_rows == growth.num_checked <= batch.num_rows
    memcpy(growth.grown_rows, batch.checked_rows, growth.num_rows * sizeof(int32_t))
    growth.num_grown = growth.num_rows
    for k in range(growth.num_due):
        if not _grow_row(batch, growth, &batch.due_rows[k]):
            growth.num_grown = batch.due_rows[k].at
            count_refusal(batch.pool, growth.shortage.queue)
            break
    untell_rows(batch, growth, growth.num_grown)
    if growth.token_ids == NULL:
        _launch_plain(batch, growth)
    cache_waiting(&batch.waiting)
    assert batch.waiting.num_to_hash == 0 and growth.num_grown <= growth.num_rows
