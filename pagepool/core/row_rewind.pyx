"""Rows go back to the tokens before pages that failed to load."""

from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t

from pagepool.core.batch cimport Batch, holding_of
from pagepool.core.copies cimport are_destinations, are_sources
from pagepool.core.holdings cimport Holding, find_wrong
from pagepool.core.row_memory cimport RowMemory
from pagepool.core.shrinking cimport can_go_back, go_back
from pagepool.core.transferring cimport FailedLoads

from pagepool.errors import ArgumentError

cdef enum Outcome:
    UNTOUCHED
    REWOUND
    LOST


def rewind_rows(RowMemory rows not None, FailedLoads failed not None) -> tuple:
    """Let rows go back to tokens that were computed without failed loads: see `RunningBatch.rewind`."""
    cdef Outcome *outcomes
    cdef Py_ssize_t row
    if failed.store is not rows.store:
        raise ArgumentError("failed: got loads of another pool")
    rows.check_made()
    outcomes = <Outcome *>malloc(rows.batch.num_rows * sizeof(Outcome))
    if outcomes == NULL:
        raise MemoryError("rows")
    try:
        rows.enter_call()
        for row in range(rows.batch.num_rows):
            outcomes[row] = rewind_row(&rows.batch, row, failed) if failed.ids.num else UNTOUCHED
        rows.let_go()
        rewound = [row for row in range(rows.batch.num_rows) if outcomes[row] == REWOUND]
        return rewound, [row for row in range(rows.batch.num_rows) if outcomes[row] == LOST]
    finally:
        free(outcomes)


cdef Outcome rewind_row(Batch *batch, Py_ssize_t row, FailedLoads failed) noexcept:
    cdef Holding holding = holding_of(batch, row)
    cdef int32_t num_tokens = batch.states[row].num_tokens
    cdef int32_t first = find_wrong(&holding, failed.is_wrong, failed.number) if batch.states[row].is_admitted else -1
    if first < 0:
        return UNTOUCHED
    if are_sources(batch.pool, &holding) or are_destinations(batch.pool, &holding):
        return LOST
    if not can_go_back(batch, row, num_tokens, first):
        return LOST
    go_back(batch, row, num_tokens, first)
    return REWOUND
