# States of rows are kept as checkpoints.

from pagepool.core.rows.made cimport *


cdef inline Py_ssize_t _count_rows_without(const Batch *batch, Py_ssize_t g) noexcept nogil:
    """Count the rows that hold no page of a group: free rows, and admitted ones that start over. O(rows)."""
    cdef Py_ssize_t row, count = 0
    for row in range(batch.num_rows):
        count += batch.rows[row].holding.held[g].num_pages == 0
    return count


cdef inline void count_reserved_states(
    const Batch *batch, Py_ssize_t num_served, Py_ssize_t[MAX_BANKS] num_reserved_in
) noexcept nogil:
    """Count the pages to leave free in each bank: for each group of states, one for each row without a state, but for
    `num_served` of these rows; 0 in the first bank. O(rows x groups).
    """
    cdef const Group *group
    cdef Py_ssize_t g
    memset(num_reserved_in, 0, MAX_BANKS * sizeof(Py_ssize_t))
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        if group.bank and is_state(&group.rules):
            num_reserved_in[group.bank] += _count_rows_without(batch, g) - num_served


cdef inline void _write_checkpoint(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Take a page for each uncached state after the row's first `num_tokens` tokens, and note that a step writes it."""
    cdef Checkpoint checkpoint
    cdef Contents contents
    cdef Py_ssize_t num
    checkpoint.row, checkpoint.num_tokens, checkpoint.shard = <int32_t>row, num_tokens, batch.rows[row].shard
    checkpoint.contents = NULL
    if is_keyed(batch, row, num_tokens):
        hash_row(batch, row, num_tokens)
        contents = contents_of_row(batch, row, num_tokens)
        checkpoint.contents = &contents
    count_reserved_states(batch, 0, checkpoint.num_reserved_in)
    num = write_checkpoint(batch.pool, holding_of(batch, row), &batch.writes, &checkpoint)
    assert 0 <= num <= batch.num_groups
    if num:
        batch.rows[row].write_list = batch.writes.number
        batch.rows[row].num_writes += <int32_t>num


cdef inline void write_states(Batch *batch, Py_ssize_t row, int32_t before, int32_t num_planned) noexcept nogil:
    """Note the writes of a step that computes the row's tokens from `before` to `num_planned`, one for each boundary among
    them. A transfer of tokens brings only the state at their end. O(boundaries x groups).
    """
    cdef Holding *holding = holding_of(batch, row)
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t size
    cdef int32_t num_tokens = -1
    assert 0 <= before and num_planned <= batch.max_num_tokens
    for g in range(batch.num_groups):
        if not keeps_checkpoints(&batch.groups[g]):
            continue
        held, size = &holding.held[g], batch.groups[g].rules.entry_size
        if num_tokens < 0:  # all states have the same checkpoints
            num_tokens = <int32_t>max(<int64_t>before, held.num_cached * size)
            num_tokens = find_next_boundary(holding.boundaries, num_tokens)
            while num_tokens <= num_planned:
                num_tokens = find_next_write(holding.boundaries, num_tokens - 1, num_planned)
                if num_tokens == num_planned or batch.records[row].state != PENDING:
                    _write_checkpoint(batch, row, num_tokens)
                num_tokens = find_next_boundary(holding.boundaries, num_tokens)
        held.num_cached = max(held.num_cached, full_entries(&batch.groups[g].rules, num_planned))


cdef inline int64_t step_that_fills(const Batch *batch, Py_ssize_t row, int32_t end, Py_ssize_t num_run) noexcept nogil:
    """Return the number of the row's step in flight that writes position ``end - 1``; 0: none does. The `num_run` oldest
    launches have run.
    """
    cdef Py_ssize_t i
    for i in range(batch.records[row].num_launches - 1, num_run - 1, -1):
        if launch_of(batch, row, i).before < end:
            return launch_of(batch, row, i).step
    return 0


cdef inline void _cache_written(Batch *batch, const StateWrite *write, Py_ssize_t num_run) noexcept nogil:
    """Cache the page of a write whose tokens are final, unless an equal checkpoint is cached."""
    cdef Contents contents
    cdef int64_t step = step_that_fills(batch, write.row, write.num_tokens, num_run)
    hash_row(batch, write.row, write.num_tokens)
    contents = contents_of_row(batch, write.row, write.num_tokens)
    cdef Lineage *lineage = &holding_of(batch, write.row).held[write.group].lineage
    if cache_written(batch.pool, &batch.groups[write.group], lineage, write, &contents, batch.rows[write.row].shard):
        if step and not note_made(batch, step, write.page_id):
            uncache(batch.pool, write.page_id)


cdef inline void settle_writes(
    Batch *batch, Py_ssize_t row, int32_t num_final, Py_ssize_t num_run, int32_t term
) noexcept nogil:
    """Cache the pages of a row's writes that were taken and whose tokens are final, and give these pages back with a term. The
    `num_run` oldest launches have run. Call it when a later step of the row is planned, a step is settled, or the row ends.
    O(writes).
    """
    cdef const Holding *holding = holding_of(batch, row)
    cdef StateWrite write
    cdef Py_ssize_t i = 0
    while batch.rows[row].num_writes:
        i = find_final(batch.pool, holding, &batch.writes, i, <int32_t>row, num_final)
        if i < 0:
            break
        write = batch.writes.items[i]
        remove_write(&batch.writes, i)
        batch.rows[row].num_writes -= 1
        _cache_written(batch, &write, num_run)
        give_back_written(batch.pool, write.page_id, term)


cdef inline void drop_writes(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Drop the writes of a row's states behind its first `num_tokens` tokens. O(writes)."""
    cdef WriteList *writes = &batch.writes
    cdef Py_ssize_t i
    if batch.rows[row].num_writes:
        batch.rows[row].num_writes -= <int32_t>drop_behind(batch.pool, writes, <int32_t>row, num_tokens)
    batch.rows[row].write_list = 0
    for i in range(writes.num_taken, writes.num if batch.rows[row].num_writes else writes.num_taken):
        if writes.items[i].row == row:
            batch.rows[row].write_list = writes.number
