# Tokens of pending rows arrive from elsewhere, or fail.

from pagepool.core.holding cimport count_prompt_pages, give_back_behind, skip_unread
from pagepool.core.rows.settle cimport *


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
    if batch.has_state:
        batch.records[row].num_computed = batch.rows[row].num_hits = num_tokens = 0
        drop_writes(batch, row, 0)
    commit_row(batch, row, num_tokens)
    give_back_behind(batch.pool, holding, batch.records[row].num_computed)
    show_end(batch, row)
    plan_next(batch, row)
