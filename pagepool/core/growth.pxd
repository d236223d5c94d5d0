# Running rows grow: pages are skipped, taken and entered, row by row up to the first that does not fit.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t
from libc.string cimport memcmp, memcpy

from pagepool.core.batch cimport (
    Batch, DueRow, Grown, Growth, RowState, amount, claim_row, contents_of, drop_swapped, held_by, holding_of, is_row,
    last_token_event, plan_next_event, room_for, start_call, tokens_of,
)
from pagepool.core.checkpoints cimport Source, are_checkpoints_due, enter_states, keep_state
from pagepool.core.copies cimport has_copies_due
from pagepool.core.entering cimport Contents, enter_waiting
from pagepool.core.holdings cimport (
    Held, Holding, count_new_pages, find_load_number, find_lost_page, skip_pages, take_missing,
)
from pagepool.core.index cimport drop, find_within
from pagepool.core.pages cimport touch_all
from pagepool.core.platform cimport GUARDS, rare
from pagepool.core.queue cimport count_free_in
from pagepool.core.records cimport FLAGS, NO_GROUP, NULL_PAGE, Page, digest_of, ids_in_shard, is_pinned
from pagepool.core.references cimport put_back_held
from pagepool.core.row_hashes cimport enter_row, hash_row
from pagepool.core.rows cimport blank, mark, write_ids
from pagepool.core.rules cimport Group, full_pages, is_state


# Rows that compute the same tokens share pages: one that fills a page as another has before takes the other's, and gives its
# own back. Only when the step that filled it is over, so that nothing is written to a shared page.

cdef inline int32_t find_first_twin(const Batch *batch, Py_ssize_t row, int32_t page_id) noexcept nogil:
    """The page cached first with the content of a page, among those that the row may hold; NULL_PAGE if it is not cached."""
    cdef const Page *page = &batch.pool.pages[page_id]
    if page_id == NULL_PAGE or page.group == NO_GROUP:
        return NULL_PAGE
    return find_within(batch.pool, digest_of(page), page.group & ~FLAGS, ids_in_shard(batch.pool, batch.states[row].shard))


cdef inline void unify_pages(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Let a row share the pages that its first `num_computed` tokens fill, as far as they were not compared before."""
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t place, page_id, first
    for g in range(batch.num_groups):
        group, held = &batch.groups[g], held_by(batch, row, g)
        for place in range(held.num_unique, 0 if is_state(&group.rules) else full_pages(&group.rules, num_computed)):
            page_id = held.ids[place]
            first = find_first_twin(batch, row, page_id)
            if find_load_number(batch.pool, &first, 1):
                continue
            if first != NULL_PAGE and first != page_id and not is_pinned(batch.pool, page_id):
                touch_all(batch.pool, &first, 1)
                drop(batch.pool, page_id)  # which nobody would do if the step that filled it turned out not to have run
                put_back_held(batch.pool, page_id)
                held.ids[place] = first
                batch.tables[g].table[row * batch.tables[g].num_columns + place] = first
                mark(batch.tables[g], row, place, place + 1)
                batch.tables[g].version += 1
        if not is_state(&group.rules):
            held.num_unique = max(held.num_unique, full_pages(&group.rules, num_computed))


# What is due for a row that grows.

cdef inline void skip_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Give back the pages that no token from `num_computed` on attends to, in the table too."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t start
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        start = held.num_skipped
        skip_pages(batch.pool, &batch.groups[g], held, num_computed)
        if held.num_skipped > start:
            blank(batch.tables[g], row, start, held.num_skipped)


cdef inline void keep_row_states(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Keep the states after `num_computed` tokens, as far as they are due, and show the next working pages in the table."""
    cdef Contents contents = contents_of(batch, row, num_computed)
    cdef Source source = Source(batch.states[row].shard, 0)
    cdef Holding holding = holding_of(batch, row)
    cdef Held *held
    cdef Py_ssize_t g
    hash_row(batch, row, num_computed)
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        if keep_state(batch.pool, &holding, <int32_t>g, &contents, num_computed, &source):
            write_ids(batch.tables[g], row, 0, held.ids, 1)
            batch.tables[g].version += 1


cdef inline void keep_last_states(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Enter the states of a row whose pages were just given back, as far as they are due."""
    cdef int32_t num_computed = batch.states[row].num_computed
    cdef Contents contents = contents_of(batch, row, num_computed)
    cdef Holding holding = holding_of(batch, row)
    hash_row(batch, row, num_computed)
    enter_states(batch.pool, &holding, &contents, num_computed)


cdef inline void take_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens, Growth *growth) noexcept nogil:
    """Give a row the pages that it is short of, and that are free: group by group, in the table too."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t j, n
    for g in range(batch.num_groups):
        held = held_by(batch, row, g)
        n = take_missing(batch.pool, &batch.groups[g], held, num_tokens, batch.states[row].shard)
        if n:
            write_ids(batch.tables[g], row, held.num_pages - n, held.ids + held.num_pages - n, n)
            batch.tables[g].version += 1
        for j in range(held.num_pages - n, held.num_pages if growth != NULL else 0):
            growth.new_ids[growth.num_new] = held.ids[j]
            growth.new_rows[growth.num_new] = <int32_t>row
            growth.new_groups[growth.num_new] = <int32_t>g
            growth.num_new += 1


cdef inline bint grow_row(Batch *batch, Growth *growth, const DueRow *due) noexcept nogil:
    """Do what is due for a counted row; False, without any room taken, if too few pages are free."""
    cdef int32_t row = batch.checked_rows[due.at]
    cdef int32_t num_tokens = batch.states[row].num_computed
    cdef int32_t num_before = num_tokens - amount(&growth.num_new_tokens, due.at)
    cdef Holding holding = holding_of(batch, row)
    if rare(batch.unifies_pages):
        unify_pages(batch, row, num_before)
    if rare(batch.skips_pages):
        skip_row(batch, row, num_before)
    if due.num_new_pages:
        if due.num_new_pages > count_free_in(batch.pool, batch.states[row].shard):
            return False
        if rare(batch.pool.tier != NULL):
            drop_swapped(batch, row)
        take_pages(batch, row, room_for(batch, num_tokens, amount(&growth.num_ahead, due.at)), growth)
    if rare(batch.keeps_states) and are_checkpoints_due(&holding, num_before):
        keep_row_states(batch, row, num_before)
    enter_row(batch, row, num_tokens)
    plan_next_event(batch, row)
    return True


cdef inline bint check_due(Batch *batch, Growth *growth, Py_ssize_t i, int32_t num_room_tokens) noexcept nogil:
    """Note a row for which more than counting is due, and how many pages it may need; False if it is not fit for it."""
    cdef int32_t row = batch.checked_rows[i]
    cdef const RowState *state = &batch.states[row]
    cdef Holding holding = holding_of(batch, row)
    cdef bint is_step = growth.token_ids != NULL
    if GUARDS and not (state.is_admitted and state.num_tokens + is_step <= batch.max_num_tokens):
        return False
    if rare(state.next_event == 1) and (batch.num_external[row] or has_copies_due(batch.pool, &holding)):
        return False
    if GUARDS and rare(batch.skips_pages or (batch.keeps_states and are_checkpoints_due(&holding, state.num_computed))):
        if find_lost_page(batch.pool, &holding, state.num_computed) != NULL_PAGE:
            return False
    batch.due_rows[growth.num_due] = DueRow(
        <int32_t>i, <int32_t>min(count_new_pages(&holding, num_room_tokens), <int64_t>INT32_MAX)
    )
    growth.max_num_new += batch.due_rows[growth.num_due].num_new_pages
    growth.num_due += 1
    return True


cdef inline bint copy_ascending(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows that are in the table and each behind the one before, as they mostly are: then none stands there twice."""
    cdef const int32_t *copied = batch.checked_rows
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    if n <= batch.num_ascending and memcmp(copied, rows, n * sizeof(int32_t)) == 0:  # as in the step before
        return True
    batch.num_ascending = 0
    if n > batch.num_rows:
        return False
    memcpy(batch.checked_rows, rows, n * sizeof(int32_t))
    for i in range(1, n if GUARDS else 1):  # several at once, for there is no way out
        signs |= copied[i] | <int32_t>(<uint32_t>copied[i] - <uint32_t>copied[i - 1] - 1)
    if GUARDS and (signs < 0 or copied[0] < 0 or copied[n - 1] >= batch.num_rows):
        return False
    batch.num_ascending = n
    return True


cdef inline Py_ssize_t copy_rows(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows, so that they cannot change during the call. Returns how many there are before the first that is outside the
    table, free, or there already.
    """
    cdef Py_ssize_t i
    if copy_ascending(batch, rows, n):
        return n
    start_call(batch)
    for i in range(n):
        if not claim_row(batch, rows[i], i):
            return i
    return n


cdef inline void uncount(Batch *batch, const Growth *growth, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Undo what `check_step` or `check_growth` counted for copied rows."""
    cdef Py_ssize_t i, row
    for i in range(start, stop):
        row = batch.checked_rows[i]
        batch.states[row].num_tokens -= growth.token_ids != NULL
        batch.states[row].num_computed -= amount(&growth.num_new_tokens, i)


# A row that is found right is counted as grown. For one that is not admitted more than counting is always due.

cdef inline void count_token(RowState *state, Grown *grown) noexcept nogil:
    """Count one token more as known and computed."""
    grown[0] = Grown(state.num_tokens + 1, state.num_computed + 1)
    state.num_tokens, state.num_computed = grown.num_tokens, grown.num_computed


cdef inline Py_ssize_t step_plain_rows(Batch *batch, Growth *growth, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """Append a token to each copied row from `start` on, up to the first for which more is due; return where that stands."""
    cdef const int32_t *rows = batch.checked_rows
    cdef const int32_t *new_ids = growth.token_ids
    cdef int32_t *token_ids = batch.token_ids
    cdef RowState *states = batch.states
    cdef RowState *state
    cdef Grown *grown = growth.grown
    cdef Py_ssize_t i = start, stride = batch.tokens_stride
    cdef int32_t signs = 0
    while i < n:
        state = &states[rows[i]]
        if state.num_computed + 1 >= state.next_event:
            break
        signs |= new_ids[i]
        token_ids[rows[i] * stride + state.num_tokens] = new_ids[i]
        count_token(state, &grown[i])
        i += 1
    growth.signs |= signs
    return i


cdef inline Py_ssize_t check_step(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Append a token to each copied row, and return how many there are before the first that is wrong; 0, and nothing counted,
    if a token is negative.
    """
    cdef RowState *state
    cdef Py_ssize_t i = step_plain_rows(batch, growth, 0, n)
    while i < n:
        state = &batch.states[batch.checked_rows[i]]
        if not check_due(batch, growth, i, state.num_computed + 1):
            break
        growth.signs |= growth.token_ids[i]
        tokens_of(batch, batch.checked_rows[i])[state.num_tokens] = growth.token_ids[i]
        count_token(state, &growth.grown[i])
        i = step_plain_rows(batch, growth, i + 1, n)
    if growth.signs < 0:
        uncount(batch, growth, 0, i)
        return 0
    return i


cdef inline Py_ssize_t check_growth(Batch *batch, Growth *growth, Py_ssize_t n) noexcept nogil:
    """Count known tokens of each row as computed."""
    cdef RowState *state
    cdef int32_t num_new, num_ahead, num_computed, num_room_tokens
    cdef Py_ssize_t i
    for i in range(n):
        state = &batch.states[batch.checked_rows[i]]
        num_new, num_ahead = amount(&growth.num_new_tokens, i), amount(&growth.num_ahead, i)
        if num_new < 0 or num_ahead < 0 or num_new > state.num_tokens - state.num_computed:
            return i
        num_computed = state.num_computed + num_new
        num_room_tokens = room_for(batch, num_computed, num_ahead)
        if max(num_room_tokens, state.num_computed + 1) >= state.next_event:
            if not check_due(batch, growth, i, num_room_tokens):
                return i
        state.num_computed = num_computed
        growth.grown[i] = Grown(state.num_tokens, num_computed)
    return n


cdef inline Py_ssize_t grow_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Do what is due for counted rows, in order, up to the first that does not fit, and return where it stands, or how many
    rows there are. Those from there on are as they were.
    """
    cdef Py_ssize_t k, num_grown = growth.num_rows
    memcpy(growth.grown_rows, batch.checked_rows, growth.num_rows * sizeof(int32_t))
    for k in range(growth.num_due):
        if not grow_row(batch, growth, &batch.due_rows[k]):
            num_grown = batch.due_rows[k].at
            break
    enter_waiting(&batch.waiting)
    uncount(batch, growth, num_grown, growth.num_rows)
    return num_grown


cdef inline Py_ssize_t append_tokens(Batch *batch, const int32_t *rows, const int32_t *token_ids, Py_ssize_t n) noexcept nogil:
    """Append a token to each row, in order; returns how many fit, and if not all do, nothing is appended."""
    cdef Py_ssize_t i, num_done = 0
    cdef int32_t row
    while num_done < n:
        row = rows[num_done]
        if not is_row(batch, row) or batch.states[row].num_tokens >= batch.max_num_tokens:
            break
        tokens_of(batch, row)[batch.states[row].num_tokens] = token_ids[num_done]
        batch.states[row].num_tokens += 1
        batch.states[row].next_event = <int32_t>min(<int64_t>batch.states[row].next_event, last_token_event(batch, row) + 1)
        num_done += 1
    if num_done < n:
        for i in range(num_done):
            batch.states[rows[i]].num_tokens -= 1
    return num_done
