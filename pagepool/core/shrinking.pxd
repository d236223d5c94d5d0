# Rows get shorter. A cut row forgets tokens. If computed ones are among them, the page that the cut goes through is overwritten
# by the next ones, so it must have no other holder. Or a call that grew rows is taken back. What was scheduled and never
# computed must not hit: its pages lose their prefix entries.

from libc.stdint cimport int32_t
from libc.string cimport memcmp

from pagepool.core.batch cimport (
    Amounts, Batch, Grown, Growth, RowState, amount, claim_row, digests_of, drop_swapped, end_row, held_by, holding_of,
    plan_next_event, start_call,
)
from pagepool.core.copies cimport has_copies_due
from pagepool.core.holdings cimport (
    Held, Holding, can_restart, find_restart, forget_uncomputed, lacks_page, recompute_from, restart_from,
)
from pagepool.core.pages cimport find_unheld
from pagepool.core.records cimport NULL_PAGE, Pool, is_pinned
from pagepool.core.references cimport put_back
from pagepool.core.rules cimport full_pages


cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether a row has a state that has seen tokens from `num_tokens` on, unless it is computed anew from the first token."""
    return batch.has_state and 0 < num_tokens < batch.states[row].num_computed


cdef inline bint can_go_back(const Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Whether a row `can_restart` with `num_tokens` known tokens, at most `num_computed` of them computed."""
    cdef Holding holding = holding_of(batch, row)
    cdef int32_t restart = find_restart(batch.pool, &holding, min(batch.states[row].num_computed, num_computed))
    return not batch.num_external[row] and can_restart(batch.pool, &holding, restart, num_tokens)


cdef inline bint can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether a row can be cut to that many tokens, which it knows. Its pages matter only if a computed token is cut."""
    if num_tokens >= batch.states[row].num_computed:
        return not batch.num_external[row]
    return not has_state_behind(batch, row, num_tokens) and can_go_back(batch, row, num_tokens, num_tokens)


cdef inline Py_ssize_t check_trim(Batch *batch, const int32_t *rows, const Amounts *num_tokens, Py_ssize_t n) noexcept nogil:
    """How many rows there are before the first that is wrong. Copies the rows."""
    cdef Holding holding
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not claim_row(batch, rows[i], i):
            return i
        holding = holding_of(batch, batch.checked_rows[i])
        if has_copies_due(batch.pool, &holding):
            return i
        if not 0 <= amount(num_tokens, i) <= batch.states[batch.checked_rows[i]].num_tokens:
            return i
        if not can_trim(batch, batch.checked_rows[i], amount(num_tokens, i)):
            return i
    return n


cdef inline void cut_tokens(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Let a row know fewer tokens, all computed ones among them. Pages that it has in the tier may hold others: they go."""
    drop_swapped(batch, row)
    batch.states[row].num_tokens = num_tokens
    if batch.hash_page_size:
        batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)


cdef inline void go_back(Batch *batch, Py_ssize_t row, int32_t num_tokens, int32_t num_computed) noexcept nogil:
    """Let a row that can go on with `num_tokens` known tokens, at most `num_computed` of them computed."""
    cdef Holding holding = holding_of(batch, row)
    cdef int32_t restart = find_restart(batch.pool, &holding, min(batch.states[row].num_computed, num_computed))
    cdef Py_ssize_t g
    restart_from(batch.pool, &holding, restart, num_tokens)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    batch.states[row].num_computed = restart
    batch.states[row].num_hits = min(batch.states[row].num_hits, restart)
    cut_tokens(batch, row, num_tokens)


cdef inline void trim_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Cut a row that `can_trim`."""
    if num_tokens < batch.states[row].num_computed:
        go_back(batch, row, num_tokens, num_tokens)
    else:
        cut_tokens(batch, row, num_tokens)


cdef inline void forget_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Drop the entries that a row made for pages with tokens from `num_computed` on."""
    cdef Holding holding = holding_of(batch, row)
    forget_uncomputed(batch.pool, &holding, num_computed, digests_of(batch, row), batch.states[row].num_hashed)


cdef inline bint is_as_grown(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether a row has computed what it had after the call that grew it, and for a step knows no other token since."""
    cdef const Grown *grown = &growth.grown[i]
    cdef int32_t row = growth.grown_rows[i]
    cdef const RowState *state = &batch.states[row]
    if not state.is_admitted or batch.admissions[row] > growth.num_admissions:
        return False
    return state.num_computed == grown.num_computed and (growth.token_ids == NULL or state.num_tokens == grown.num_tokens)


cdef inline int32_t computed_before(const Growth *growth, Py_ssize_t i) noexcept nogil:
    """The tokens that a row had computed before the call."""
    return growth.grown[i].num_computed - amount(&growth.num_new_tokens, i)


cdef inline Py_ssize_t find_taken(const Growth *growth, Py_ssize_t stop, int32_t row, Py_ssize_t g) noexcept nogil:
    """Where the new pages of a row in a group begin, which end at `stop`."""
    while stop and growth.new_rows[stop - 1] == row and growth.new_groups[stop - 1] == g:
        stop -= 1
    return stop


cdef inline bint is_shared_from(const Pool *pool, const Held *held, int32_t start) noexcept nogil:
    """Whether a page at place `start` or behind has other holders, pins aside."""
    cdef int32_t i
    for i in range(start, held.num_pages):
        if held.ids[i] != NULL_PAGE and pool.pages[held.ids[i]].ref_cnt - is_pinned(pool, held.ids[i]) > 1:
            return True
    return False


cdef inline bint can_undo(const Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Whether a row is as the call left it, its new pages, the last before `stop`, are its last, and those are there that it
    needs again, without other holders where it writes. `stop` goes on to the first of them.
    """
    cdef const Held *held
    cdef Py_ssize_t g, start, num_new, num_kept
    cdef int32_t row = growth.grown_rows[i]
    cdef Holding holding = holding_of(batch, row)
    if not is_as_grown(batch, growth, i) or has_copies_due(batch.pool, &holding):
        return False
    for g in range(batch.num_groups - 1, -1, -1):
        held = held_by(batch, row, g)
        start = find_taken(growth, stop[0], row, g)
        num_new = stop[0] - start
        num_kept = held.num_pages - num_new
        if num_kept < 0 or (num_new and memcmp(held.ids + num_kept, growth.new_ids + start, num_new * sizeof(int32_t))):
            return False
        if lacks_page(&batch.groups[g], held, computed_before(growth, i), num_kept):
            return False
        if find_unheld(batch.pool, held.ids, num_kept, held.num_pages) >= 0:
            return False
        if is_shared_from(batch.pool, held, full_pages(&batch.groups[g].rules, computed_before(growth, i))):
            return False
        stop[0] = start
    return True


cdef inline void undo_row(Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Let a row that `can_undo` go back."""
    cdef Held *held
    cdef Py_ssize_t g, start
    cdef int32_t row = growth.grown_rows[i]
    cdef int32_t num_computed = computed_before(growth, i)
    cdef RowState *state = &batch.states[row]
    forget_row(batch, row, num_computed)
    for g in range(batch.num_groups - 1, -1, -1):
        held = held_by(batch, row, g)
        start = find_taken(growth, stop[0], row, g)
        while stop[0] > start:
            stop[0] -= 1
            put_back(batch.pool, growth.new_ids[stop[0]])
            held.num_pages -= 1
        held.num_skipped = min(held.num_skipped, held.num_pages)
        recompute_from(&batch.groups[g], held, num_computed)
        end_row(batch, row, g)
    state.num_computed = num_computed
    state.num_tokens -= growth.token_ids != NULL
    if batch.hash_page_size:
        state.num_hashed = min(state.num_hashed, state.num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)
