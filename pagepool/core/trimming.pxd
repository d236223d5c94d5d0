# Running rows are cut. A page that the cut goes through is overwritten by the next tokens, so it must have no other holder.

from libc.stdint cimport int32_t

from pagepool.core.batch cimport Amounts, Batch, amount, claim_row, end_row, held_by, plan_next_event, start_call
from pagepool.core.holdings cimport Held, recompute_from
from pagepool.core.index cimport drop
from pagepool.core.pages cimport find_unheld, put_back_held
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Pool
from pagepool.core.rules cimport Group, first_useful_page, full_pages, pages_for


cdef inline int32_t count_kept(const Pool *pool, const Group *group, const Held *held, int32_t num_tokens) noexcept nogil:
    """Leading pages with which a row of `num_tokens` tokens goes on: not a page for further tokens that has other holders."""
    cdef int32_t page = full_pages(&group.rules, num_tokens)
    cdef int32_t num_pages = <int32_t>pages_for(&group.rules, num_tokens)
    if page < num_pages and page < held.num_pages and pool.pages[held.ids[page]].ref_cnt > 1:
        return page
    return num_pages


cdef inline int32_t find_restart(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """How many tokens of a row that is cut to `num_tokens` stay computed."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t num_kept, restart = min(batch.states[row].num_computed, num_tokens)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        num_kept = count_kept(batch.pool, group, held_by(batch, row, g), num_tokens)
        if num_kept < pages_for(&group.rules, num_tokens):
            restart = min(restart, num_kept * group.rules.page_size)
    return restart


cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t restart) noexcept nogil:
    """Whether a row has a state that has seen tokens from `restart` on, unless it is computed anew from the first token."""
    return batch.has_state and 0 < restart < batch.states[row].num_computed


cdef inline bint can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the pages that the next token attends to, and its own, are still there, and those to be given back are held."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t first, restart = find_restart(batch, row, num_tokens)
    if has_state_behind(batch, row, restart):
        return False
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = held_by(batch, row, g)
        first = first_useful_page(&group.rules, restart, 0)
        if first < min(count_kept(batch.pool, group, held, num_tokens), held.num_pages) and held.ids[first] == NULL_PAGE:
            return False
        if find_unheld(batch.pool, held.ids, full_pages(&group.rules, num_tokens), held.num_pages) >= 0:
            return False
    return True


cdef inline Py_ssize_t check_trim(Batch *batch, const int32_t *rows, const Amounts *num_tokens, Py_ssize_t n) noexcept nogil:
    """How many rows there are before the first that is wrong. Copies the rows."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not claim_row(batch, rows[i], i):
            return i
        if not 0 <= amount(num_tokens, i) <= batch.states[batch.checked_rows[i]].num_tokens:
            return i
        if not can_trim(batch, batch.checked_rows[i], amount(num_tokens, i)):
            return i
    return n


cdef inline void trim_group(Pool *pool, const Group *group, Held *held, int32_t num_tokens, int32_t restart) noexcept nogil:
    """Give back a group's pages behind `num_tokens` tokens, the last first, and drop entries whose tokens are gone. Pages that
    are computed again from `restart` on are entered again if they have lost their entry meanwhile.
    """
    cdef int32_t keep = count_kept(pool, group, held, num_tokens)
    cdef Py_ssize_t j
    cdef int32_t page_id
    for j in range(held.num_pages - 1, full_pages(&group.rules, num_tokens) - 1, -1):
        page_id = held.ids[j]
        if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt == 1 and pool.pages[page_id].group != NO_GROUP:
            drop(pool, page_id)
        if j >= keep:
            put_back_held(pool, page_id)
    held.num_pages = min(held.num_pages, keep)
    held.num_skipped = min(held.num_skipped, held.num_pages)
    recompute_from(group, held, restart)


cdef inline void trim_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    cdef int32_t restart = find_restart(batch, row, num_tokens)
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        trim_group(batch.pool, &batch.groups[g], held_by(batch, row, g), num_tokens, restart)
        end_row(batch, row, g)
    batch.states[row].num_tokens = num_tokens
    batch.states[row].num_computed = restart
    batch.states[row].num_hits = min(batch.states[row].num_hits, restart)
    if batch.hash_page_size:
        batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)
