# Writes of states. A step with tokens up to a boundary writes the state there to a page of its own, a checkpoint. So
# a working page never gets a prefix entry, and any number of steps may be in flight.
#
# A request or row takes the pages as a step is planned, and notes a `StateWrite` for each. A write is due until the engine
# takes the list; until then its holder gets no slots. The page gets its prefix entry when the next step is planned, if its
# tokens are final. So any hit of the entry runs behind the step that writes the page. If the holder ends, pages written
# by its counted steps are cached, and all others given back; if it goes back, pages behind its tokens are given back. A step
# in flight may still write to such a page, before the step of the page's next holder.
#
# Always: the page of a write has one reference, no entry, and no other write. Its row is admitted, or its request holds pages.

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memmove, memset

from pagepool.core.base cimport NEVER, UNKNOWN
from pagepool.core.holding.forks cimport *
from pagepool.core.pool cimport (
    AT_ANSWER_END, BY_LEAVING, Lineage, NewCheckpoint, add_kind, expect_page, find_outrun, find_within, go_on_with, now_of,
    step_back, uncache_for,
)


cdef struct StateWrite:
    int32_t row               # 0 for a request, which has a list of its own
    int32_t group
    int32_t page_id
    int32_t num_tokens        # leading tokens that the state has seen
    uint8_t kind              # bits: see `Boundaries`

cdef struct WriteList:
    StateWrite *items         # [num], and room for `capacity`; taken writes come first
    Py_ssize_t num
    Py_ssize_t num_taken
    Py_ssize_t capacity
    int64_t number            # number of the list that is due; it grows by 1 when the list is taken

cdef struct Checkpoint:       # the states of a request or row to write after `num_tokens` tokens
    int32_t row
    int32_t num_tokens
    int32_t shard
    const Contents *contents  # with the digests of these tokens; NULL: the digests are not known
    Py_ssize_t[MAX_BANKS] num_reserved_in  # pages to leave free in each bank


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


cdef inline Py_ssize_t find_final(
    const Pool *pool, const Holding *holding, const WriteList *writes, Py_ssize_t start, int32_t row, int64_t num_final
) noexcept nogil:
    """Return the index, from `start` on, of the next write of a row (0: of a request) that was taken and whose tokens are
    final; -1: there is none. O(writes).
    """
    cdef const StateWrite *write
    cdef Py_ssize_t i
    for i in range(start, writes.num_taken):
        write = &writes.items[i]
        if write.row == row and write.num_tokens <= num_final and not waits_for_loads(pool, &holding.held[write.group]):
            return i
    return -1


cdef inline void exchange_writes(WriteList *writes, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Exchange the writes of two rows."""
    cdef StateWrite *write
    cdef Py_ssize_t i
    for i in range(writes.num):
        write = &writes.items[i]
        if write.row == first or write.row == second:
            write.row = <int32_t>(second if write.row == first else first)


cdef inline int32_t find_cached_state(
    const Pool *pool, const Group *group, const Contents *contents, int32_t num_tokens, int32_t shard
) noexcept nogil:
    """Return the page of the state after the first tokens, which are hashed; the null page: the shard has none."""
    cdef Digest key = contents.digests[last_hash(group, full_entries(&group.rules, num_tokens) - 1)]
    assert full_entries(&group.rules, num_tokens) * <Py_ssize_t>group.stride <= contents.num_digests
    return find_within(pool, key, group.id, ids_in_queue(pool, queue_for(pool, group, shard)))


cdef inline bint _has_pages_for(
    const Pool *pool, const Holding *holding, WriteList *writes, const Checkpoint *checkpoint
) noexcept nogil:
    """Whether a page is free for each state, besides the reserved pages, and there is memory for the writes."""
    cdef Py_ssize_t[MAX_BANKS] num_states_in
    cdef const Group *group
    cdef Py_ssize_t g
    memset(num_states_in, 0, sizeof(num_states_in))
    assert checkpoint.shard < max(1, pool.num_shards)
    for g in range(holding.num_groups):
        num_states_in[holding.groups[g].bank] += keeps_checkpoints(&holding.groups[g])
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if keeps_checkpoints(group) and not has_free_pages(
            pool, num_states_in[group.bank], checkpoint.num_reserved_in[group.bank], queue_for(pool, group, checkpoint.shard)
        ):
            return False
    return find_held_free(pool, holding.num_groups) == NULL_PAGE and reserve_writes(writes, holding.num_groups)


cdef inline bint _is_missing(Pool *pool, const Group *group, const Checkpoint *checkpoint, uint8_t kind) noexcept nogil:
    """Whether a group is to get a checkpoint that is not cached. One that is cached is kept for the reasons `kind`, too."""
    cdef int32_t page_id
    if not keeps_checkpoints(group):
        return False
    if checkpoint.contents == NULL:
        return True
    page_id = find_cached_state(pool, group, checkpoint.contents, checkpoint.num_tokens, checkpoint.shard)
    if page_id != NULL_PAGE:
        add_kind(pool, page_id, kind)
    return page_id == NULL_PAGE


cdef inline int32_t _take_for_state(
    Pool *pool, const Holding *holding, Py_ssize_t g, const Checkpoint *checkpoint
) noexcept nogil:
    """Take a page for a group's checkpoint."""
    cdef int32_t page_id
    take(pool, &page_id, 1, queue_for(pool, &holding.groups[g], checkpoint.shard), holding.session)
    assert pool.pages[page_id].group == NO_GROUP and pool.pages[page_id].ref_cnt == 1
    record_taken(pool, &holding.held[g])
    return page_id


cdef inline Py_ssize_t write_checkpoint(
    Pool *pool, const Holding *holding, WriteList *writes, const Checkpoint *checkpoint
) noexcept nogil:
    """Take a page for each state that is not cached, and note its write. If too few pages are free, the checkpoint is left out.
    Return the number of writes. O(groups).
    """
    cdef Py_ssize_t g, num = 0
    cdef uint8_t kind = kind_at(holding.boundaries, checkpoint.num_tokens)
    cdef bint has_pages = _has_pages_for(pool, holding, writes, checkpoint)
    assert writes_states(holding) and checkpoint.num_tokens > 0
    for g in range(holding.num_groups):
        if not _is_missing(pool, &holding.groups[g], checkpoint, kind):
            continue
        if not has_pages:
            pool.banks[holding.groups[g].bank].num_passed_checkpoints += 1
            continue
        note_write(writes, StateWrite(
            row=checkpoint.row, group=<int32_t>g, page_id=_take_for_state(pool, holding, g, checkpoint),
            num_tokens=checkpoint.num_tokens, kind=kind,
        ))
        num += 1
    return num


cdef inline bint cache_written(
    Pool *pool, const Group *group, Lineage *lineage, const StateWrite *write, const Contents *contents, int32_t shard
) noexcept nogil:
    """Cache the page of a run's write and return True, or return False if an equal checkpoint is cached. A checkpoint at the
    end of an answer takes the place of the one before.
    """
    cdef int32_t cached = find_cached_state(pool, group, contents, write.num_tokens, shard)
    cdef int32_t outrun = find_outrun(pool, lineage) if write.kind == AT_ANSWER_END else <int32_t>NULL_PAGE
    cdef NewCheckpoint new = NewCheckpoint(
        lineage=lineage, num_tokens=write.num_tokens, kind=write.kind, is_replacing=outrun != NULL_PAGE
    )
    assert pool.pages[write.page_id].group == NO_GROUP and pool.pages[write.page_id].ref_cnt > 0
    if cached != NULL_PAGE:
        add_kind(pool, cached, write.kind)
        return False
    if outrun != NULL_PAGE:
        step_back(pool, lineage, outrun)
        uncache_for(pool, outrun, BY_LEAVING)
    cache_page(pool, group, write.page_id, full_entries(&group.rules, write.num_tokens) - 1, contents, &new)
    go_on_with(pool, lineage, write.page_id, &new)
    return True


cdef inline void give_back_written(Pool *pool, int32_t page_id, int32_t term) noexcept nogil:
    """Give back the page of a write, with a term if it is cached and the term is known."""
    assert pool.pages[page_id].ref_cnt > 0 and UNKNOWN <= term <= NEVER
    give_back(pool, page_id)
    if term != UNKNOWN and pool.pages[page_id].group != NO_GROUP:
        expect_page(pool, page_id, term, now_of(&pool.expected))


cdef inline Py_ssize_t drop_behind(Pool *pool, WriteList *writes, int32_t row, int64_t num_tokens) noexcept nogil:
    """Drop the writes of a row (0: of a request) behind its first `num_tokens` tokens, the last first. Return their number.
    O(writes).
    """
    cdef Py_ssize_t i, num = 0
    for i in range(writes.num - 1, -1, -1):
        if writes.items[i].row == row and writes.items[i].num_tokens > num_tokens:
            assert pool.pages[writes.items[i].page_id].group == NO_GROUP and pool.pages[writes.items[i].page_id].ref_cnt > 0
            give_back(pool, writes.items[i].page_id)
            remove_write(writes, i)
            num += 1
    return num
