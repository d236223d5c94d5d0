# Writes of states. A step with tokens up to a boundary writes the state there to a page of its own, a checkpoint. So
# a working page never gets a prefix entry, and any number of steps may be in flight.
#
# A row takes the pages as a step is planned, and notes a `StateWrite` for each. A write is due until the engine takes the list;
# until then the row cannot be planned. The page gets its prefix entry when the row's next step is planned, if its tokens are
# computed. So whoever hits the entry runs behind the step that writes the page. If the row ends, pages written by
# its counted steps are cached, and the others given back, as they are if it goes back. A step in flight may still write to such
# a page, before the step of its next holder.
#
# Always: the page of a write has one reference, no entry, and no other write. Its row is admitted.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memmove

from pagepool.core.base cimport reserve_items


cdef struct StateWrite:
    int32_t row
    int32_t group
    int32_t page_id
    int32_t num_tokens        # leading tokens of the row that the state has seen

cdef struct WriteList:
    StateWrite *items         # [num], and room for `capacity`; those that were taken come first
    Py_ssize_t num
    Py_ssize_t num_taken
    Py_ssize_t capacity
    int64_t number            # number of the list that is due; it moves as the list is taken


cdef inline bint reserve_writes(WriteList *writes, Py_ssize_t n) noexcept nogil:
    """Make room for `n` more writes; False if memory is short."""
    return reserve_items(<void **>&writes.items, &writes.capacity, writes.num + n, sizeof(StateWrite))


cdef inline void note_write(WriteList *writes, StateWrite write) noexcept nogil:
    """Append a write to the list that is due, which has room."""
    assert writes.num_taken <= writes.num < writes.capacity
    writes.items[writes.num] = write
    writes.num += 1


cdef inline void remove_write(WriteList *writes, Py_ssize_t i) noexcept nogil:
    """Remove the write at index `i`. The others keep their order."""
    assert 0 <= i < writes.num
    memmove(writes.items + i, writes.items + i + 1, (writes.num - i - 1) * sizeof(StateWrite))
    writes.num -= 1
    writes.num_taken -= i < writes.num_taken


cdef inline void exchange_writes(WriteList *writes, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Give the writes of two rows to each other."""
    cdef StateWrite *write
    cdef Py_ssize_t i
    for i in range(writes.num):
        write = &writes.items[i]
        if write.row == first or write.row == second:
            write.row = <int32_t>(second if write.row == first else first)
