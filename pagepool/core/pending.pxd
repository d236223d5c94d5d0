# Tokens that come from elsewhere, in two phases: pages are taken for them, then they are counted as computed, or go back.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.batch cimport Batch, end_row, held_by, holding_of, plan_next_event
from pagepool.core.entering cimport enter_waiting
from pagepool.core.holdings cimport Held, Holding, recompute_from, skip_to
from pagepool.core.records cimport Pool
from pagepool.core.references cimport put_back_held
from pagepool.core.row_hashes cimport enter_row
from pagepool.core.rows cimport blank
from pagepool.core.rules cimport first_useful_page, pages_for


cdef inline void skip_unread(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that no token from `num_tokens` on attends to. They may not have been filled, so they get no prefix
    entry, and nothing goes back to them.
    """
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t stop
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = min(first_useful_page(&holding.groups[g].rules, num_tokens, 0), held.num_pages)
        skip_to(pool, &holding.groups[g], held, stop)
        held.num_cached = max(held.num_cached, stop)


cdef inline void put_back_behind(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages wholly behind `num_tokens` tokens, group by group, the last first."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t num_kept
    for g in range(holding.num_groups):
        held = &holding.held[g]
        num_kept = pages_for(&holding.groups[g].rules, num_tokens)
        while held.num_pages > num_kept:
            held.num_pages -= 1
            put_back_held(pool, held.ids[held.num_pages])
        held.num_skipped = min(held.num_skipped, held.num_pages)
        recompute_from(&holding.groups[g], held, num_tokens)


cdef inline void commit_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Count tokens that a pending row waited for as computed, and let it run."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    batch.states[row].num_computed += num_tokens
    batch.num_external[row] = 0
    skip_unread(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        if held_by(batch, row, g).num_skipped:
            blank(batch.tables[g], row, 0, held_by(batch, row, g).num_skipped)
    enter_row(batch, row, batch.states[row].num_computed)
    enter_waiting(&batch.waiting)
    plan_next_event(batch, row)


cdef inline void fail_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Do it with the first of the tokens, and give back the pages behind. A state is wrong then, so nothing stands with one."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    if batch.has_state:
        batch.states[row].num_computed = batch.states[row].num_hits = num_tokens = 0
    commit_row(batch, row, num_tokens)
    put_back_behind(batch.pool, &holding, batch.states[row].num_computed)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    plan_next_event(batch, row)
