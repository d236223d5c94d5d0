# Calls that grew rows are taken back. What was scheduled and never computed must not hit: its pages lose their prefix entries.

from libc.stdint cimport int32_t
from libc.string cimport memcmp

from pagepool.core.batch cimport (
    Batch, Grown, Growth, RowState, amount, digests_of, end_row, held_by, holding_of, plan_next_event,
)
from pagepool.core.holdings cimport Held, Holding, forget_uncomputed, recompute_from
from pagepool.core.pages cimport find_unheld, put_back
from pagepool.core.records cimport NULL_PAGE
from pagepool.core.rules cimport first_useful_page


cdef inline void forget_row(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Drop the entries that a row made for pages with tokens from `num_computed` on."""
    cdef Holding holding = holding_of(batch, row)
    forget_uncomputed(batch.pool, &holding, num_computed, digests_of(batch, row), batch.states[row].num_hashed)


cdef inline bint is_as_grown(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether a row has computed what it had after the call that grew it, and for a step knows no other token since."""
    cdef const Grown *grown = &growth.grown[i]
    cdef const RowState *state = &batch.states[grown.row]
    if not state.is_admitted or batch.admissions[grown.row] > growth.num_admissions:
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


cdef inline bint can_undo(const Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Whether a row is as the call left it, its new pages, the last before `stop`, are its last, and those are there that it
    needs again. `stop` goes on to the first of them.
    """
    cdef const Held *held
    cdef Py_ssize_t g, start, num_new, num_kept
    cdef int32_t first, row = growth.grown[i].row
    if not is_as_grown(batch, growth, i):
        return False
    for g in range(batch.num_groups - 1, -1, -1):
        held = held_by(batch, row, g)
        start = find_taken(growth, stop[0], row, g)
        num_new = stop[0] - start
        num_kept = held.num_pages - num_new
        first = first_useful_page(&batch.groups[g].rules, computed_before(growth, i), 0)
        if num_kept < 0 or (num_new and memcmp(held.ids + num_kept, growth.new_ids + start, num_new * sizeof(int32_t))):
            return False
        if first < num_kept and held.ids[first] == NULL_PAGE:
            return False
        if find_unheld(batch.pool, held.ids, num_kept, held.num_pages) >= 0:
            return False
        stop[0] = start
    return True


cdef inline void undo_row(Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Let a row that `can_undo` go back."""
    cdef Held *held
    cdef Py_ssize_t g, start
    cdef int32_t row = growth.grown[i].row
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
