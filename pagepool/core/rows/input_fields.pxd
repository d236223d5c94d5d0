# The arrays of a step's inputs: each is a field, and is written from the rows of a checked step, padding included.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.rows.prefix_fields cimport *


cdef enum Kind:               # in the order of `INPUT_FIELDS`
    TOKEN_IDS
    POSITIONS
    ROWS
    SLOTS
    QUERY_START_LOC
    KV_START_LOC
    SEQ_LENS
    LAST_TOKENS
    STARTS
    PAGE_IDS
    STATE_PAGES
    ORDER
    DISTRIBUTION
    SOURCES
    CROSS_PAGE_IDS
    ENCODER_LENS
    PAGE_STARTS
    PAGE_INDICES
    LAST_PAGE_LENS
    PAGE_OFFSETS
    RANK_SLOTS
    WRITE_PAGES
    WRITE_STARTS
    WRITE_INDICES
    WRITE_TOKENS
    LEVEL_QUERY_STARTS
    LEVEL_PAGE_STARTS
    LEVEL_PAGE_INDICES
    LEVEL_LAST_PAGE_LENS
    PREFIX_PAGE_IDS
    PREFIX_ROWS
    OWN_STARTS

cdef struct Field:            # one array in each set
    Kind kind
    Py_ssize_t group          # 0 for fields that are not by group
    bint is_wide              # int64, not int32
    Py_buffer *views          # [depth]
    int32_t *extents          # [depth, num_extents] values that may not be those of padding; NULL: another kind
    Py_ssize_t num_extents    # rows, levels or groups
    const PrefixGroups *groups  # NULL: another kind
    PageList *lists           # [depth]; NULL: another kind
    Py_ssize_t capacity       # values in an array


cdef inline void write_token_ids(Value *out, const Source *source, const InputStep *step) noexcept nogil:
    """Write the ids of known tokens, -1 for the tokens in flight, and the drafts behind; without draft ids -1 for these too."""
    cdef const int32_t *tokens
    cdef const int32_t *drafts
    cdef int32_t start, known, stop, begin
    cdef Py_ssize_t i, j
    cdef Spans spans = step.spans
    if step.num_single == step.num_rows and step.num_unknown == 0:
        for i in range(step.num_rows):
            out[i] = source.token_ids[spans.rows[i] * source.stride + spans.starts[i]]
        return
    for i in range(step.num_rows):
        start, stop, known = spans.starts[i], spans.stops[i], spans.known[i]
        tokens = source.token_ids + spans.rows[i] * source.stride
        if known - start == 1:
            out[0] = tokens[start]
        elif known > start:
            copy_values(out, tokens + start, known - start)
        begin = max(spans.drafts[i], start) if step.drafts != NULL else stop
        drafts = step.drafts + step.order[i] * step.num_drafts
        for j in range(max(start, known), begin):
            out[j - start] = -1
        for j in range(stop - begin):
            out[begin - start + j] = drafts[j]
        out += stop - start


cdef inline void write_positions(Value *out, const InputStep *step) noexcept nogil:
    cdef Py_ssize_t i
    if step.num_single == step.num_rows:
        copy_values(out, step.spans.starts, step.num_rows)
        return
    for i in range(step.num_rows):
        count_up(out + step.begins[i], step.spans.starts[i], step.spans.stops[i] - step.spans.starts[i])


cdef inline void write_rows(Value *out, const InputStep *step) noexcept nogil:
    cdef Py_ssize_t i
    if step.num_single == step.num_rows:
        copy_values(out, step.spans.rows, step.num_rows)
        return
    for i in range(step.num_rows):
        repeat_value(out + step.begins[i], step.spans.rows[i], step.spans.stops[i] - step.spans.starts[i])


cdef inline void write_slots(
    Value *out, const Table *table, int32_t page_size, int32_t shift, int64_t stride, const InputStep *step
) noexcept nogil:
    """Write the slots of tokens, page by page."""
    cdef uint32_t size = <uint32_t>page_size, page
    cdef int32_t start, stop, num
    cdef const int32_t *ids
    cdef Py_ssize_t i
    cdef Spans spans = step.spans
    if step.num_single == step.num_rows:
        for i in range(step.num_rows):
            start = spans.starts[i]
            page = page_at(start, page_size, shift)
            ids = ids_at(table, spans.rows[i])
            out[i] = <Value>(ids[page] * stride + (<uint32_t>start - page * size))
        return
    for i in range(step.num_rows):
        ids = ids_at(table, spans.rows[i])
        start, stop = spans.starts[i], spans.stops[i]
        if size == stride == 1:
            copy_values(out, ids + start, stop - start)
            out += stop - start
            start = stop
        while start < stop:
            page = page_at(start, page_size, shift)
            num = <int32_t>min(<int64_t>stop, (page + <int64_t>1) * size) - start
            count_up(out, ids[page] * stride + (<uint32_t>start - page * size), num)
            out += num
            start += num


cdef inline void write_rank_slots(Value *out, const Source *source, Py_ssize_t group, const InputStep *step) noexcept nogil:
    """Write the slots of the tokens of a rank, and the slot of padding for all others."""
    cdef int32_t page_size = source.page_sizes[group], num_ranks = source.num_ranks, position
    cdef const int32_t *ids
    cdef Py_ssize_t i
    for i in range(step.num_rows):
        ids = ids_at(source.tables[group], step.spans.rows[i])
        for position in range(step.spans.starts[i], step.spans.stops[i]):
            out[0] = <Value>step.pad_slot
            if position % num_ranks == source.rank:
                out[0] = <Value>(
                    ids[page_at(position, page_size, source.shifts[group])] * <int64_t>(page_size // num_ranks)
                    + position % page_size // num_ranks
                )
            out += 1


cdef inline void write_ring_slots(
    Value *out, const Table *table, int32_t capacity, int64_t stride, const InputStep *step
) noexcept nogil:
    """Write the slots of tokens in rings: of those that a later token of the step overwrites, the slot of padding."""
    cdef Spans spans = step.spans
    cdef int64_t page
    cdef int32_t position
    cdef bint is_last
    cdef Py_ssize_t i
    for i in range(step.num_rows):
        page = table.page_ids[spans.rows[i] * table.num_columns]
        for position in range(spans.starts[i], spans.stops[i]):
            is_last = spans.stops[i] - position <= capacity
            out[0] = <Value>(page * stride + position % capacity) if is_last else <Value>step.pad_slot
            out += 1


cdef inline Py_ssize_t find_written(const StateWrite *write, Py_ssize_t group, const InputStep *step) noexcept nogil:
    """Return the index of the row whose tokens in the step a write of a group's state follows; -1: no row's. O(rows)."""
    cdef Spans spans = step.spans
    cdef Py_ssize_t i
    for i in range(step.num_rows if write.group == group else 0):
        if spans.rows[i] == write.row and spans.starts[i] < write.num_tokens <= spans.stops[i]:
            return i
    return -1


cdef inline void write_write_pages(Value *out, const Source *source, Py_ssize_t group, const InputStep *step) noexcept nogil:
    """Write the page to which the state after each token is written, of those that the batch lists. O(tokens + writes x rows).
    """
    cdef const WriteList *writes = &source.batch.writes
    cdef const StateWrite *write
    cdef Py_ssize_t i, k
    repeat_value(out, 0, step.num_padded_tokens)
    for k in range(writes.num):
        write = &writes.items[k]
        i = find_written(write, group, step)
        if i >= 0:
            out[step.begins[i] + write.num_tokens - 1 - step.spans.starts[i]] = <Value>(
                write.page_id - shown_offset_of(source.batch, write.row, group)
            )


cdef inline void write_write_starts(Value *out, const Source *source, Py_ssize_t group, const InputStep *step) noexcept nogil:
    """Write where the writes of each row begin in the list. O(rows + writes x rows)."""
    cdef const WriteList *writes = &source.batch.writes
    cdef Py_ssize_t i, k
    repeat_value(out, 0, step.num_padded_rows + 1)
    for k in range(writes.num):
        i = find_written(&writes.items[k], group, step)
        if i >= 0:
            out[i + 1] += 1
    for i in range(step.num_padded_rows):
        out[i + 1] += out[i]


cdef inline void write_write_list(
    Value *out, bint are_tokens, const Source *source, Py_ssize_t group, const InputStep *step
) noexcept nogil:
    """Write the pages of `write_write_pages` without the zeros between, or the indices of their tokens."""
    cdef Py_ssize_t i, num = 0
    write_write_pages(out, source, group, step)
    for i in range(step.num_tokens):
        if out[i]:
            out[num] = <Value>i if are_tokens else out[i]
            num += 1
    repeat_value(out + num, 0, step.num_tokens - num)


cdef inline void write_page_ids(Value *out, const Table *table, int32_t *extents, const InputStep *step) noexcept nogil:
    """Write the page ids of each row, and zeros over the ids that an earlier step wrote behind them."""
    cdef int32_t num
    cdef Py_ssize_t i
    for i in range(step.num_padded_rows):
        num = 0
        if i < step.num_rows:
            num = <int32_t>max(0, min(table.num_sinks + table.num_pages[step.spans.rows[i]], table.num_columns))
            copy_values(out, table.page_ids + step.spans.rows[i] * table.num_columns, num)
        repeat_value(out + num, 0, extents[i] - num)
        extents[i] = num
        out += table.num_columns


cdef inline void write_page_indices(
    Value *out, const Field *field, PageList *listed, const Source *source, const InputStep *step
) noexcept nogil:
    """Write the pages that the rows read, from the first row on whose pages are not there already, and zeros over the ids that
    an earlier step wrote behind them.
    """
    cdef const Table *table = source.tables[field.group]
    cdef bint is_kept = source.batch != NULL and listed.num_rewrites == table.num_rewrites
    cdef Py_ssize_t i, num_pages = 0
    cdef ListedRow row
    for i in range(step.num_rows):
        row = listed_row(source, field.group, &step.spans, i)
        is_kept = is_kept and i < listed.num_rows and is_listed(listed, i, &row)
        if not is_kept:
            copy_values(out + num_pages, ids_at(table, step.spans.rows[i]) + row.first, row.num_pages)
            listed.rows[i] = row
        num_pages += row.num_pages
    repeat_value(out + num_pages, 0, listed.num_pages - num_pages)
    listed.num_rows, listed.num_pages, listed.num_rewrites = step.num_rows, num_pages, table.num_rewrites


cdef inline void write_page_starts(
    Value *out, Py_ssize_t group, const Source *source, const InputStep *step
) noexcept nogil:
    """Write where the pages of each row begin in the list."""
    cdef int64_t num_pages = 0
    cdef Py_ssize_t i
    out[0] = 0
    for i in range(step.num_rows):
        num_pages += listed_row(source, group, &step.spans, i).num_pages
        out[i + 1] = <Value>num_pages
    repeat_value(out + step.num_rows + 1, num_pages, step.num_padded_rows - step.num_rows)


cdef inline void write_field(
    Value *out, const Field *field, Py_ssize_t current, Py_ssize_t max_num_rows, const Source *source, const InputStep *step
) noexcept nogil:
    """Write an array of the current set, padding included."""
    cdef Py_ssize_t i, n = step.num_rows
    cdef int32_t *extents = field.extents + current * field.num_extents
    cdef Py_ssize_t num_left = step.num_padded_tokens - step.num_tokens, num_rows_left = step.num_padded_rows - n
    cdef int64_t num_keys = 0
    assert num_left >= 0 and num_rows_left >= 0 and step.num_padded_rows <= max_num_rows
    if field.kind == TOKEN_IDS:
        write_token_ids(out, source, step)
        repeat_value(out + step.num_tokens, 0, num_left)
    elif field.kind == POSITIONS:
        write_positions(out, step)
        repeat_value(out + step.num_tokens, 0, num_left)
    elif field.kind == ROWS:
        write_rows(out, step)
        repeat_value(out + step.num_tokens, 0, num_left)
    elif field.kind == SLOTS:
        if source.capacities[field.group]:
            write_ring_slots(
                out, source.tables[field.group], source.capacities[field.group], source.strides[field.group], step
            )
        else:
            write_slots(
                out, source.tables[field.group], source.page_sizes[field.group], source.shifts[field.group],
                source.strides[field.group], step,
            )
        repeat_value(out + step.num_tokens, step.pad_slot, num_left)
    elif field.kind == QUERY_START_LOC:
        copy_values(out, step.begins, n + 1)
        repeat_value(out + n + 1, step.num_tokens, num_rows_left)
    elif field.kind == KV_START_LOC:
        out[0] = 0
        for i in range(n):
            num_keys += step.spans.stops[i]
            out[i + 1] = <Value>num_keys
        repeat_value(out + n + 1, num_keys, num_rows_left)
    elif field.kind == SEQ_LENS:
        copy_values(out, step.spans.stops, n)
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == LAST_TOKENS:
        for i in range(n):
            out[i] = step.begins[i + 1] - 1
        repeat_value(out + n, step.pad_last, num_rows_left)
    elif field.kind == STARTS:
        copy_values(out, step.spans.starts, n)
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == PAGE_IDS:
        write_page_ids(out, source.tables[field.group], extents, step)
    elif field.kind == CROSS_PAGE_IDS:
        write_page_ids(out, source.cross_tables[field.group], extents, step)
    elif field.kind == ENCODER_LENS:
        for i in range(n):
            out[i] = source.encoder_lens[step.spans.rows[i]]
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == STATE_PAGES:
        for i in range(n):
            out[i] = source.tables[field.group].page_ids[step.spans.rows[i] * source.tables[field.group].num_columns]
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == PAGE_INDICES:
        write_page_indices(out, field, &field.lists[current], source, step)
    elif field.kind == PAGE_STARTS:
        write_page_starts(out, field.group, source, step)
    elif field.kind == LAST_PAGE_LENS:
        for i in range(n):
            out[i] = <Value>last_page_len(source, field.group, &step.spans, i)
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == PAGE_OFFSETS:
        for i in range(n):
            num_keys = listed_row(source, field.group, &step.spans, i).first
            out[i] = <Value>(num_keys * source.page_sizes[field.group])
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == RANK_SLOTS:
        write_rank_slots(out, source, field.group, step)
        repeat_value(out + step.num_tokens, step.pad_slot, num_left)
    elif field.kind == WRITE_PAGES:
        write_write_pages(out, source, field.group, step)
    elif field.kind == WRITE_STARTS:
        write_write_starts(out, source, field.group, step)
    elif field.kind == WRITE_INDICES or field.kind == WRITE_TOKENS:
        write_write_list(out, field.kind == WRITE_TOKENS, source, field.group, step)
    elif field.kind == LEVEL_QUERY_STARTS:
        write_level_query_starts(out, field.groups, step)
    elif field.kind == LEVEL_PAGE_STARTS:
        write_level_page_starts(out, field.groups, source, field.group, step)
    elif field.kind == LEVEL_PAGE_INDICES:
        write_level_page_indices(out, extents, field.capacity // field.num_extents, field.groups, source, field.group, step)
    elif field.kind == LEVEL_LAST_PAGE_LENS:
        write_level_last_page_lens(out, field.groups, source, field.group, step)
    elif field.kind == PREFIX_PAGE_IDS:
        write_prefix_page_ids(out, extents, field.groups, source, field.group, step)
    elif field.kind == PREFIX_ROWS:
        write_prefix_rows(out, extents, field.groups, step)
    elif field.kind == OWN_STARTS:
        for i in range(n):
            out[i] = <Value>(field.groups.own[i] * source.page_sizes[field.groups.group])
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == ORDER:
        copy_values(out, step.order, n)
        repeat_value(out + n, 0, num_rows_left)
    elif field.kind == SOURCES:
        for i in range(n):
            out[i] = step.sources[step.order[i]]
        repeat_value(out + n, -1, num_rows_left)
    else:
        out[0] = out[1] = <Value>step.num_single
        out[2] = <Value>n


cdef inline void write_fields(
    const Field *fields, Py_ssize_t n, Py_ssize_t current, Py_ssize_t max_num_rows, const Source *source, const InputStep *step
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if fields[i].is_wide:
            write_field(<int64_t *>fields[i].views[current].buf, &fields[i], current, max_num_rows, source, step)
        else:
            write_field(<int32_t *>fields[i].views[current].buf, &fields[i], current, max_num_rows, source, step)
