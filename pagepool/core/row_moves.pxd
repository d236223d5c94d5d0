# Rows become free, get a context, and change places.

from libc.stdint cimport int32_t

from pagepool.core.batch cimport Batch, RowState, digests_of, end_row, held_by, holding_of, show_row, tokens_of
from pagepool.core.holdings cimport Holding, empty
from pagepool.core.siphash cimport Digest
from pagepool.core.swapped cimport drop_swapped


cdef inline void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Make a row free. Its pages were given back, or moved."""
    cdef Holding holding = holding_of(batch, row)
    cdef Py_ssize_t g
    drop_swapped(batch, row)
    empty(&holding)
    for g in range(batch.num_groups):
        end_row(batch, row, g)
    batch.states[row] = RowState(0, 0, 0, 0, 0, batch.states[row].num_hashed, -1, 0, 0)


cdef inline void begin_admission(Batch *batch, Py_ssize_t row) noexcept nogil:
    """From here on the row is not the one that any call before has grown."""
    batch.num_admissions += 1
    batch.admissions[row] = batch.num_admissions


cdef inline void set_context(Batch *batch, Py_ssize_t row, int32_t context) noexcept nogil:
    """The context of a row's pages from now on. None, which is what there is without a journal, has no users."""
    if batch.contexts[row]:
        batch.pool.journal.contexts[batch.contexts[row]].num_users -= 1
    if context:
        batch.pool.journal.contexts[context].num_users += 1
    batch.contexts[row] = context


cdef inline void swap_values(int32_t *first, int32_t *second, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        first[i], second[i] = second[i], first[i]


cdef inline void exchange_rows(Batch *batch, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Exchange all that two rows have."""
    cdef Py_ssize_t g, n = max(batch.states[first].num_tokens, batch.states[second].num_tokens)
    batch.states[first].num_hashed *= batch.states[first].is_admitted  # a free row's last tokens stay behind
    batch.states[second].num_hashed *= batch.states[second].is_admitted
    swap_values(tokens_of(batch, first), tokens_of(batch, second), n)
    n = max(batch.states[first].num_hashed, batch.states[second].num_hashed)
    if n:
        swap_values(
            <int32_t *>digests_of(batch, first), <int32_t *>digests_of(batch, second), n * (sizeof(Digest) // sizeof(int32_t))
        )
    batch.states[first], batch.states[second] = batch.states[second], batch.states[first]
    begin_admission(batch, first)
    begin_admission(batch, second)
    batch.extra_keys[first], batch.extra_keys[second] = batch.extra_keys[second], batch.extra_keys[first]
    batch.contexts[first], batch.contexts[second] = batch.contexts[second], batch.contexts[first]
    batch.swapped[first], batch.swapped[second] = batch.swapped[second], batch.swapped[first]
    for g in range(batch.num_groups):
        held_by(batch, first, g)[0], held_by(batch, second, g)[0] = held_by(batch, second, g)[0], held_by(batch, first, g)[0]
        show_row(batch, first, g)
        show_row(batch, second, g)
