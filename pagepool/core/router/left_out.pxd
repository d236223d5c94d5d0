# Blocks that have no place in the index: placeholders, chunks of another size, groups of an unknown kind.
#
# They are left out, but counted, so that their removals can be left out too. Always:
#
# * A worker has at most `MAX_LEFT_OUT` of them; further ones are not remembered.
# * After lost batches a worker has none, because the lost batches may have had their removals.

from libc.stdint cimport int32_t, uint64_t

from pagepool.core.router.block_table cimport *

cdef enum:
    MAX_LEFT_OUT = 1 << 16


cdef inline uint64_t _left_out_key(const Event *event, uint64_t block_hash) noexcept nogil:
    """Return a key of a block, from its hash, group and medium."""
    cdef uint64_t key = block_hash ^ <uint64_t>(event.group + 1) * <uint64_t>0x9E3779B97F4A7C15
    cdef Py_ssize_t i
    for i in range(0 if is_on_device(event) else event.medium.size):
        key = (key ^ event.medium.at[i]) * <uint64_t>0x100000001B3
    return key or 1


cdef inline Py_ssize_t _count_left_out(const EventBatch *batch) noexcept nogil:
    """Count the hashes that a batch leaves out."""
    cdef Py_ssize_t i, num = 0
    for i in range(batch.num_void, batch.num_events):
        num += batch.events[i].num if batch.events[i].kind == LEFT_OUT else 0
    return num


cdef inline DuplicateTable *_copy_left_out(
    const BlockTable *table, const DuplicateTable *known, Py_ssize_t num_more
) noexcept nogil:
    """Return a copy of the blocks left out, with room for more; NULL if memory is short."""
    cdef DuplicateTable *copied = <DuplicateTable *>raw_calloc(1, sizeof(DuplicateTable))
    cdef Py_ssize_t i
    if copied == NULL:
        return NULL
    copied.multiplier = table.multiplier
    if not reserve_duplicates(copied, min((0 if known == NULL else known.num) + num_more, <Py_ssize_t>MAX_LEFT_OUT)):
        free_left_out(copied)
        return NULL
    for i in range(0 if known == NULL else known.num_slots):
        if known.slots[i].key:
            put_duplicate(copied, known.slots[i].key, known.slots[i].num)
    return copied


cdef inline void _leave_out_removals(DuplicateTable *left_out, EventBatch *batch, Event *event) noexcept nogil:
    """Drop from an event the removals of blocks that were left out."""
    cdef uint64_t *hashes = batch.hashes + event.first
    cdef uint64_t key, num
    cdef Py_ssize_t i, num_kept = 0
    for i in range(event.num):
        key = _left_out_key(event, hashes[i])
        num = left_out.slots[find_duplicate(left_out, key)].num
        if num:
            put_duplicate(left_out, key, num - 1)
        else:
            hashes[num_kept] = hashes[i]
            num_kept += 1
    batch.num_skipped += num_kept < event.num
    event.num = num_kept


cdef inline void _add_left_out(DuplicateTable *left_out, const EventBatch *batch, const Event *event) noexcept nogil:
    """Count the blocks of an event that is left out."""
    cdef uint64_t key, num
    cdef Py_ssize_t i
    for i in range(event.first, event.first + event.num):
        key = _left_out_key(event, batch.hashes[i])
        num = left_out.slots[find_duplicate(left_out, key)].num
        if num or left_out.num < MAX_LEFT_OUT:
            put_duplicate(left_out, key, num + 1)


cdef inline bint settle_left_out(
    const BlockTable *table, EventBatch *batch, int32_t worker, DuplicateTable **left_out
) noexcept nogil:
    """Find the blocks of a worker that are left out after a batch, and drop their removals from it. Return False if memory is
    short. O(batch + blocks left out).
    """
    cdef const Worker *known = &table.workers[worker] if worker < table.num_workers else NULL
    cdef const DuplicateTable *before = NULL if known == NULL or batch.is_cleared else known.left_out
    cdef Py_ssize_t i, num = _count_left_out(batch)
    left_out[0] = NULL
    if (before == NULL and num == 0) or (known != NULL and known.is_lossy and not batch.is_cleared):
        return True
    left_out[0] = _copy_left_out(table, before, num)
    if left_out[0] == NULL:
        return False
    for i in range(batch.num_void, batch.num_events):
        if batch.events[i].kind == LEFT_OUT:
            _add_left_out(left_out[0], batch, &batch.events[i])
        elif batch.events[i].kind == REMOVED:
            _leave_out_removals(left_out[0], batch, &batch.events[i])
    if left_out[0].num:
        trim_duplicates(left_out[0], 0)
    else:
        free_left_out(left_out[0])
        left_out[0] = NULL
    return True
