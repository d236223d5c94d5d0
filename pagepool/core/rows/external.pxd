# Tokens of pending rows arrive from elsewhere, or fail.

from pagepool.core.holding cimport (
    count_prompt_pages, forget_uncomputed, give_back_behind, hits_all_leading_pages, skip_unread,
)
from pagepool.core.rows.settle cimport *


cdef inline void cache_arrived(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Cache the full pages of the first `num_tokens` awaited tokens of a pending row, if they can hit before all have arrived.
    """
    cdef int32_t num_arrived = batch.records[row].num_computed + num_tokens
    assert 0 <= num_tokens <= batch.rows[row].num_external and batch.records[row].state == PENDING
    if hits_all_leading_pages(batch.groups, batch.num_groups):
        cache_row(batch, row, final_of(batch, batch.records[row].num_tokens, num_arrived, num_arrived))
        cache_waiting(&batch.waiting)


cdef inline void commit_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Count the first `num_tokens` awaited tokens of a pending row as computed, and let the row run."""
    cdef Holding *holding = holding_of(batch, row)
    cdef Py_ssize_t g
    cdef int32_t start
    assert 0 <= num_tokens <= batch.rows[row].num_external and batch.records[row].state == PENDING
    batch.records[row].num_planned = batch.rows[row].ring_start = batch.records[row].num_computed + num_tokens
    batch.rows[row].num_external = 0
    set_state(batch, row, RUNNING)
    count_run_tokens(batch, row)
    skip_unread(batch.pool, holding, batch.records[row].num_computed)
    for g in range(batch.num_groups):
        start = count_prompt_pages(&batch.groups[g].rules, held_by(batch, row, g))
        if held_by(batch, row, g).num_skipped > start:
            blank(batch.tables[g], row, start, held_by(batch, row, g).num_skipped)
    cache_row(batch, row, count_final(batch, row))
    cache_waiting(&batch.waiting)
    plan_next(batch, row)


cdef inline void fail_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Commit the first `num_tokens` tokens and give back the pages behind them; with a state, discard all tokens."""
    cdef Holding *holding = holding_of(batch, row)
    cdef Contents contents
    if batch.has_state:
        batch.records[row].num_computed = batch.rows[row].num_hits = num_tokens = 0
        drop_writes(batch, row, 0)
    commit_row(batch, row, num_tokens)
    if hits_all_leading_pages(batch.groups, batch.num_groups):
        contents = contents_of_row(batch, row, batch.records[row].num_tokens)
        forget_uncomputed(batch.pool, holding, batch.records[row].num_computed, &contents)
    give_back_behind(batch.pool, holding, batch.records[row].num_computed)
    show_end(batch, row)
    plan_next(batch, row)
