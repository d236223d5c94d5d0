# Rows are forked into free ones.

from pagepool.core.holding cimport ForkExtent, fork_extent, fork_group
from pagepool.core.rows.settle cimport *


cdef inline Py_ssize_t stamp_free_rows(Batch *batch, const int32_t *targets, Py_ssize_t n) noexcept nogil:
    """Stamp the targets, and return the number of targets before the first that is not free or is repeated."""
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
    """Return the extent of the row's forks. Forks may get other tokens behind the computed ones, and so other lookaheads."""
    return fork_extent(batch.records[source].num_computed, batch.hashing.hash_lookahead)


cdef inline void _copy_contents(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Copy the tokens and digests of a row."""
    cdef Py_ssize_t num_hashed = batch.rows[source].num_hashed
    copy_bytes(tokens_of(batch, row), tokens_of(batch, source), batch.records[source].num_tokens * sizeof(int32_t))
    copy_bytes(digests_of(batch, row), digests_of(batch, source), num_hashed * sizeof(Digest))
    if batch.hashing.kind != SIPHASH:
        copy_bytes(batch.rows[row].uppers, batch.rows[source].uppers, num_hashed * sizeof(Digest))
    batch.rows[row].num_hashed, batch.rows[row].num_hits = <int32_t>num_hashed, batch.rows[source].num_hits


cdef inline void _copy_run(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Copy the counts of a row, and its launches, which sample nothing for the fork."""
    cdef Py_ssize_t i
    store_launch(batch, source)
    batch.records[row] = batch.records[source]
    for i in range(batch.ring_size):
        batch.launches[row * batch.ring_size + i] = batch.launches[source * batch.ring_size + i]
    disown_launches(batch, row, batch.records[row].num_planned)
    batch.num_admitted += 1


cdef inline void _fork_pages(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    cdef Holding *forked = holding_of(batch, source)
    cdef Holding *new = holding_of(batch, row)
    cdef ForkExtent extent = extent_of(batch, source)
    cdef int32_t g
    batch.rows[row].shard = batch.rows[source].shard
    batch.rows[row].ring_start, batch.rows[row].ring_stop = batch.rows[source].ring_start, batch.rows[source].ring_stop
    if batch.has_boundaries:
        new.boundaries[0] = forked.boundaries[0]
    for g in range(batch.num_groups):
        fork_group(batch.pool, forked, new, g, &extent, batch.rows[row].shard)


cdef inline void fork_row(Batch *batch, Py_ssize_t source, Py_ssize_t row) noexcept nogil:
    """Fork the source into a free row."""
    assert batch.records[source].state == RUNNING and batch.records[source].num_planned <= batch.records[source].num_tokens
    assert batch.records[row].state == FREE and held_by(batch, row, 0).num_pages == 0 and not has_identity(batch, row)
    _copy_contents(batch, source, row)
    _copy_run(batch, source, row)
    set_identity(batch, row, identity_of(batch, source))
    begin_stay(batch, row)
    _fork_pages(batch, source, row)
    show_row(batch, row)
    plan_next(batch, row)
