# Rows are forked into free ones.

from pagepool.core.base cimport SIPHASH, copy_bytes
from pagepool.core.holding cimport ForkExtent, fork_extent, fork_group
from pagepool.core.pool cimport set_session
from pagepool.core.rows.settle cimport *


cdef inline Py_ssize_t stamp_free_rows(Batch *batch, const int32_t *targets, Py_ssize_t n) noexcept nogil:
    """Stamp the targets, and return the number of targets before the first that is not free, or repeated."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not 0 <= targets[i] < batch.num_rows:
            return i
        if batch.records[targets[i]].state != FREE or batch.stamps[targets[i]] == batch.stamp:
            return i
        batch.stamps[targets[i]] = batch.stamp
    return n


cdef inline ForkExtent extent_of(const Batch *batch, Py_ssize_t source) noexcept nogil:
    """Return the extent of the row's forks. They may get other tokens behind the computed ones, in a lookahead too."""
    return fork_extent(batch.records[source].num_computed, batch.hashing.num_lookahead)


cdef inline void fork_row(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Fork the source into a free row: copy its tokens, digests, context and session, and fork its pages."""
    cdef RowRecord *record = &batch.records[row]
    cdef Holding *forked = holding_of(batch, source)
    cdef Holding *new = holding_of(batch, row)
    cdef ForkExtent extent = extent_of(batch, source)
    cdef Py_ssize_t i
    cdef int32_t g
    assert batch.records[source].state == RUNNING and batch.rows[source].num_ahead == 0
    assert record.state == FREE and batch.rows[row].context == 0 and new.session == NO_SESSION and new.held.num_pages == 0
    copy_bytes(tokens_of(batch, row), tokens_of(batch, source), batch.records[source].num_tokens * sizeof(int32_t))
    copy_bytes(digests_of(batch, row), digests_of(batch, source), batch.rows[source].num_hashed * sizeof(Digest))
    if batch.hashing.kind != SIPHASH:
        copy_bytes(batch.rows[row].uppers, batch.rows[source].uppers, batch.rows[source].num_hashed * sizeof(Digest))
    store_launch(batch, source)
    record[0] = batch.records[source]
    for i in range(batch.ring_size):
        batch.launches[row * batch.ring_size + i] = batch.launches[source * batch.ring_size + i]
    disown_launches(batch, row, record.num_planned)
    batch.num_admitted += 1
    batch.rows[row].shard, batch.rows[row].num_hashed = batch.rows[source].shard, batch.rows[source].num_hashed
    batch.rows[row].num_hits = batch.rows[source].num_hits
    set_context(batch, row, batch.rows[source].context)
    set_session(&batch.pool.sessions, &batch.rows[row].holding.session, batch.rows[source].holding.session)
    begin_stay(batch, row)
    if batch.has_boundaries:
        new.boundaries[0] = forked.boundaries[0]
    for g in range(batch.num_groups):
        fork_group(batch.pool, forked, new, g, &extent, batch.rows[row].shard)
    show_row(batch, row)
    plan_next(batch, row)
