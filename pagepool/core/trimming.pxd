# Running rows are cut. A page that the cut goes through is overwritten by the next tokens, so it must have no other holder.

from libc.stdint cimport int32_t

from pagepool.core.batch cimport Amounts, Batch, Group, Held, amount, claim_row, end_row, ids_of, plan_next_event, start_call
from pagepool.core.index cimport drop
from pagepool.core.pages cimport find_unheld, put_back_held
from pagepool.core.records cimport NO_GROUP, NULL_PAGE
from pagepool.core.rules cimport first_useful_page, full_pages, pages_for


cdef inline bint cuts_shared_page(const Batch *batch, const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether a row of `num_tokens` tokens would write into a page that has other holders."""
    cdef int32_t page = full_pages(&group.rules, num_tokens)
    if page == pages_for(&group.rules, num_tokens) or page >= group.held[row].num_pages:
        return False
    return batch.pool.pages[ids_of(group, row)[page]].ref_cnt > 1


cdef inline int32_t find_restart(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """How many tokens of a row that is cut to `num_tokens` stay computed."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t restart = min(batch.states[row].num_computed, num_tokens)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        if cuts_shared_page(batch, group, row, num_tokens):
            restart = min(restart, full_pages(&group.rules, num_tokens) * group.rules.page_size)
    return restart


cdef inline int32_t count_kept(const Batch *batch, const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Leading pages of a group that a row of `num_tokens` tokens goes on with."""
    if cuts_shared_page(batch, group, row, num_tokens):
        return full_pages(&group.rules, num_tokens)
    return pages_for(&group.rules, num_tokens)


cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t restart) noexcept nogil:
    """Whether a row has a state that has seen tokens from `restart` on, and is not to be computed from the first token anew."""
    return batch.has_state and 0 < restart < batch.states[row].num_computed


cdef inline bint can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the pages that the next token attends to, and its own, are still there, and those to be given back are held."""
    cdef const Group *group
    cdef const int32_t *ids
    cdef Py_ssize_t g
    cdef int32_t first, restart = find_restart(batch, row, num_tokens)
    if has_state_behind(batch, row, restart):
        return False
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        ids = ids_of(group, row)
        first = first_useful_page(&group.rules, restart, 0)
        if first < min(count_kept(batch, group, row, num_tokens), group.held[row].num_pages) and ids[first] == NULL_PAGE:
            return False
        if find_unheld(batch.pool, ids, full_pages(&group.rules, num_tokens), group.held[row].num_pages) >= 0:
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


cdef inline void trim_group(Batch *batch, Group *group, Py_ssize_t row, int32_t num_tokens, int32_t restart) noexcept nogil:
    """Give back a group's pages behind `num_tokens` tokens, the last first, and drop entries whose tokens are gone. Pages that
    are computed again from `restart` on are entered again if they have lost their entry meanwhile.
    """
    cdef Held *held = &group.held[row]
    cdef int32_t *ids = ids_of(group, row)
    cdef int32_t cut = full_pages(&group.rules, num_tokens)
    cdef int32_t keep = count_kept(batch, group, row, num_tokens)
    cdef Py_ssize_t j
    for j in range(held.num_pages - 1, cut - 1, -1):
        if ids[j] != NULL_PAGE and batch.pool.pages[ids[j]].ref_cnt == 1 and batch.pool.pages[ids[j]].group != NO_GROUP:
            drop(batch.pool, ids[j])
        if j >= keep:
            put_back_held(batch.pool, ids[j])
    held.num_pages = min(held.num_pages, keep)
    held.num_cached = min(held.num_cached, full_pages(&group.rules, restart))
    held.num_skipped = min(held.num_skipped, held.num_pages)
    end_row(group, row)


cdef inline void trim_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    cdef int32_t restart = find_restart(batch, row, num_tokens)
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        trim_group(batch, &batch.groups[g], row, num_tokens, restart)
    batch.states[row].num_tokens = num_tokens
    batch.states[row].num_computed = restart
    batch.states[row].num_hits = min(batch.states[row].num_hits, restart)
    if batch.hash_page_size:
        batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)
