# States of models without attention over all tokens, one working page a request, are kept as checkpoints: at multiples of an
# interval the working page enters the prefix index, and a copy of it is the next working page.

from libc.stdint cimport int32_t

from pagepool.core.copies cimport note_copy
from pagepool.core.entering cimport Contents
from pagepool.core.holdings cimport Held, Holding, note_taken, waits_for_loads
from pagepool.core.index cimport enter, find_within, keep_tokens, rank
from pagepool.core.notes cimport is_journaled, note_entry
from pagepool.core.pages cimport take_from, take_this
from pagepool.core.queue cimport find_held_free, has_free_pages
from pagepool.core.records cimport NULL_PAGE, Origin, Pool, Ranking, ids_in_shard, shard_of
from pagepool.core.rules cimport Group, full_entries, keeps_checkpoints
from pagepool.core.siphash cimport Digest


cdef struct Source:           # where pages come from
    int32_t shard             # -1: anywhere
    Py_ssize_t num_reserved   # pages to leave free


cdef inline bint is_checkpoint_due(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Whether a state has come to, or past, the next multiple of the interval."""
    return keeps_checkpoints(group) and held.num_pages and full_entries(&group.rules, num_computed) > held.num_cached


cdef inline bint are_checkpoints_due(const Holding *holding, int32_t num_computed) noexcept nogil:
    """Whether any state has. O(groups)."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            return True
    return False


cdef inline bint enter_state(
    Pool *pool, const Group *group, const Held *held, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Enter the working page under the digest of the first `num_computed` tokens; whether it was. Not between multiples of the
    interval, and not where there is such a checkpoint, in the same shard.
    """
    cdef int32_t page_id = held.ids[0], num_tokens = group.rules.entry_size // group.stride
    cdef Py_ssize_t last = <Py_ssize_t>full_entries(&group.rules, num_computed) * group.stride - 1
    cdef Py_ssize_t start = last * num_tokens
    cdef Ranking ranking = Ranking(0, 0)
    cdef Digest key
    if num_computed % group.rules.entry_size or last < 0:
        return False
    key = contents.digests[last]
    if find_within(pool, key, group.id, ids_in_shard(pool, shard_of(pool, page_id) if pool.num_shards else -1)) != NULL_PAGE:
        return False
    if enter(pool, page_id, key, group.id) and pool.num_parts:
        rank(pool, &ranking, &page_id, 0, key, group.id)
    if is_journaled(pool):
        note_entry(
            pool, page_id, Origin(contents.digests[last - 1] if last else Digest(0, 0), <int32_t>last, contents.context)
        )
    keep_tokens(
        pool, page_id, contents.token_ids + start, num_tokens if start + num_tokens <= contents.num_token_ids else 0
    )
    return True


cdef inline bint keep_state(
    Pool *pool, const Holding *holding, int32_t g, const Contents *contents, int32_t num_computed, const Source *source
) noexcept nogil:
    """If the state of a group is due, make its working page a checkpoint and take the next one; True if that was done. Without
    contents, or where no page is free, the checkpoint is passed over, since the step that follows writes the working page.
    There is room for a copy.
    """
    cdef const Group *group = &holding.groups[g]
    cdef Held *held = &holding.held[g]
    cdef int32_t page_id
    cdef bint is_kept = contents != NULL
    if not is_checkpoint_due(group, held, num_computed):
        return False
    page_id = held.ids[0]
    is_kept = is_kept and has_free_pages(pool, 1, source.num_reserved, source.shard) and find_held_free(pool, 1) == NULL_PAGE
    is_kept = is_kept and not waits_for_loads(pool, held) and enter_state(pool, group, held, contents, num_computed)
    if is_kept:
        take_from(pool, held.ids, 1, source.shard)
        note_taken(pool, held)
        note_copy(pool, page_id, held, 0, g)
    held.num_cached = full_entries(&group.rules, num_computed)
    return is_kept


cdef inline void enter_states(
    Pool *pool, const Holding *holding, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Enter the states of what ends and was just given back, as far as they are due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if waits_for_loads(pool, &holding.held[g]):
            continue
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            enter_state(pool, &holding.groups[g], &holding.held[g], contents, num_computed)


cdef inline void adopt_state(Pool *pool, Held *held, const int32_t *ids, int32_t n) noexcept nogil:
    """Make the checkpoint that is hit, the last of `n` places and a free page, the working page."""
    take_this(pool, ids[n - 1])
    held.ids[0] = ids[n - 1]
    held.num_pages = 1
    held.num_cached = held.num_hits = n
