# Rows that come, go and change places.

from libc.stdint cimport INT32_MAX, int32_t, uint64_t
from libc.string cimport memcpy

from pagepool.core.batch cimport Batch, Group, Held, RowState, digests_of, end_row, ids_of, show_row, tokens_of
from pagepool.core.pages cimport touch_all
from pagepool.core.platform cimport GUARDS
from pagepool.core.records cimport FLAGS, NOT_FREE, NULL_PAGE, Page, Pool, Range
from pagepool.core.siphash cimport Digest


cdef inline Py_ssize_t count_free_hits(
    const Batch *batch, Py_ssize_t row, Py_ssize_t g, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all, bint is_known
) noexcept nogil:
    """How many pages, null pages aside, are in the free queue; -1 if one cannot be touched, as one of `num_all` hits, or is not
    cached any more with what the row's leading pages hold, unless that `is_known`.
    """
    cdef const Group *group = &batch.groups[g]
    cdef const Digest *digests = digests_of(batch, row)
    cdef const Digest *digest
    cdef const Page *page
    cdef Py_ssize_t i, num_free = 0
    cdef uint64_t differences = 0
    cdef bint is_lost = False
    for i in range(n):
        if ids[i] == NULL_PAGE:
            continue
        page = &batch.pool.pages[ids[i]]
        num_free += page.prev_free != NOT_FREE
        if GUARDS:  # without branches, for there is nearly always nothing wrong
            is_lost |= (page.ref_cnt == 0) & (page.prev_free == NOT_FREE) | (page.ref_cnt >= INT32_MAX - num_all)
        if GUARDS and not is_known:
            digest = &digests[(i + 1) * group.stride - 1]
            differences |= (page.key_lo ^ digest.lo) | (page.key_hi ^ digest.hi)
            differences |= <uint64_t>((page.group & ~FLAGS) ^ group.id)
    return -1 if differences or is_lost else num_free


cdef inline void attach_hits(Batch *batch, Py_ssize_t row, Py_ssize_t g, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Make hits, which `count_free_hits` saw, the first pages of an empty row."""
    cdef Group *group = &batch.groups[g]
    touch_all(batch.pool, ids, n)
    if n:
        memcpy(ids_of(group, row), ids, n * sizeof(int32_t))
    group.held[row] = Held(<int32_t>n, <int32_t>n, 0)


cdef inline void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Make a row free. Its pages were given back, or moved."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        batch.groups[g].held[row] = Held(0, 0, 0)
        end_row(&batch.groups[g], row)
    batch.states[row] = RowState(0, 0, 0, 0, 0, batch.states[row].num_hashed, -1, 0, 0)


cdef inline Range ids_in_shard(const Pool *pool, int32_t shard) noexcept nogil:
    """The ids of a shard, or for -1 of the pool."""
    if shard < 0:
        return Range(0, pool.num_pages)
    return Range(shard * pool.pages_per_shard, (shard + 1) * pool.pages_per_shard)


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
    cdef Group *group
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
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        n = max(group.held[first].num_pages, group.held[second].num_pages)
        swap_values(ids_of(group, first), ids_of(group, second), n)
        group.held[first], group.held[second] = group.held[second], group.held[first]
        show_row(group, first)
        show_row(group, second)
