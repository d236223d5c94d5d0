# Entries of pages that steps in flight fill, and that their holders gave back. A failed step drops them.
#
# A step is open while its `StepResult` lives and is not settled: it may fail, and all later steps with it. So an entry is noted
# while its step, or an earlier one, is open.
#
# Always: an open step has a number above 0, and each noted entry has an open step with its number or a lower one.

from libc.stdint cimport INT64_MAX

from pagepool.core.rows.caching cimport *


cdef inline int64_t first_open_step(const Batch *batch) noexcept nogil:
    """Return the number of the first open step; INT64_MAX: none is open. O(open steps)."""
    cdef const OpenStep *node = batch.open_steps
    cdef int64_t first = INT64_MAX
    while node != NULL:
        first = min(first, node.step)
        node = node.next
    assert first > 0
    return first


cdef inline void open_step(Batch *batch, OpenStep *node, int64_t step) noexcept nogil:
    """Open a step, unless it is open already. O(1)."""
    if node.step:
        return
    assert step > 0
    node.step, node.prev, node.next = step, NULL, batch.open_steps
    if node.next != NULL:
        node.next.prev = node
    batch.open_steps = node


cdef inline void _forget_entries(Batch *batch, int64_t ended) noexcept nogil:
    """Forget the entries of a step that ended well (0: none), and those that no open step can take back. O(entries)."""
    cdef int64_t first = first_open_step(batch)
    cdef Py_ssize_t i, num_kept = 0
    for i in range(batch.num_made):
        if batch.made[i].step >= first and batch.made[i].step != ended:
            batch.made[num_kept] = batch.made[i]
            num_kept += 1
    batch.num_made = num_kept


cdef inline void close_step(Batch *batch, OpenStep *node, bint has_ended) noexcept nogil:
    """Close a step that is open. If it `has_ended` well, its entries stay. O(1); O(entries + open steps) if any are noted."""
    cdef int64_t step = node.step
    if step == 0:
        return
    if node.prev != NULL:
        node.prev.next = node.next
    else:
        batch.open_steps = node.next
    if node.next != NULL:
        node.next.prev = node.prev
    node.step = 0
    if batch.num_made:
        _forget_entries(batch, step if has_ended else 0)


cdef inline void fail_steps(Batch *batch, int64_t first) noexcept nogil:
    """Let the open steps from a number on fail: no more rows are added to them. O(open steps)."""
    cdef OpenStep *node = batch.open_steps
    while node != NULL:
        node.has_failed |= node.step >= first
        node = node.next


cdef inline bint note_made(Batch *batch, int64_t step, int32_t page_id) noexcept nogil:
    """Note the entry of a page that its holder gives back, if a failed step may drop it; False if memory is short."""
    cdef const Page *page = &batch.pool.pages[page_id]
    if step < first_open_step(batch):
        return True
    assert page.group != NO_GROUP
    if not reserve_items(<void **>&batch.made, &batch.made_capacity, batch.num_made + 1, sizeof(MadeEntry)):
        return False
    batch.made[batch.num_made] = MadeEntry(step=step, key=digest_of(page), page_id=page_id, group=page.group & ~FLAGS)
    batch.num_made += 1
    return True
