# A fork of a request or row shares its full pages. The open page of each group, and working pages of states, are copied. So are
# full pages whose lookahead may differ: drafters write other keys to their ends.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagepool.core.holding.restart cimport *
from pagepool.core.pool cimport find_held_free, find_untouchable, share, share_run, use_in_session


cdef struct ForkExtent:
    int32_t num_computed      # tokens of the fork
    int32_t num_shared        # leading tokens whose full pages are shared

cdef enum ForkOutcome:
    FORKED
    SHORT_OF_PAGES
    UNSHAREABLE               # a page cannot get another reference or was given back, or a free page has a reference
    SHORT_OF_MEMORY


cdef inline ForkExtent fork_extent(int64_t num_computed, int32_t hash_lookahead) noexcept nogil:
    return ForkExtent(num_computed=<int32_t>num_computed, num_shared=<int32_t>max(0, num_computed - hash_lookahead))


cdef inline int32_t _fork_end(const Group *group, const Held *held, const ForkExtent *extent) noexcept nogil:
    """Return the place behind the last page that has tokens of a fork."""
    return min(<int32_t>pages_for(&group.rules, extent.num_computed), held.num_pages)


cdef inline Py_ssize_t count_open_pages(const Holding *holding, const ForkExtent *extent, int32_t bank) noexcept nogil:
    """Count the pages of a bank, or with -1 of all, that a fork copies."""
    cdef const Group *group
    cdef Py_ssize_t g, i, count = 0
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if bank >= 0 and group.bank != bank:
            continue
        for i in range(full_pages(&group.rules, extent.num_shared), _fork_end(group, &holding.held[g], extent)):
            count += holding.held[g].ids[i] != NULL_PAGE
    return count


cdef inline Shortage find_fork_shortage(
    const Pool *pool, const Holding *source, const ForkExtent *extent, Py_ssize_t num_targets, int32_t shard
) noexcept nogil:
    """Return the shortage of forks in the first bank with too few pages, in all or in its shard; else in the last bank."""
    cdef Shortage shortage
    cdef int32_t bank
    for bank in range(pool.num_banks):
        shortage = shortage_in(
            pool, count_open_pages(source, extent, bank) * num_targets, 0, 0,
            queue_in(pool, bank, shard),
        )
        if shortage.num_needed > shortage.num_free:
            break
    return shortage


cdef inline ForkOutcome prepare_fork(
    Pool *pool, const Holding *source, const ForkExtent *extent, Py_ssize_t num_targets, int32_t shard
) noexcept:
    """Check whether a fork can be made, and make room for its copies."""
    cdef Py_ssize_t g, num_new = count_open_pages(source, extent, -1) * num_targets
    cdef Shortage shortage = find_fork_shortage(pool, source, extent, num_targets, shard)
    if shortage.num_needed > shortage.num_free:
        return SHORT_OF_PAGES
    if find_held_free(pool, num_new) != NULL_PAGE:
        return UNSHAREABLE
    assert num_new >= 0 and num_targets > 0
    for g in range(source.num_groups):
        if find_untouchable(pool, source.held[g].ids, source.held[g].num_pages, num_targets) >= 0:
            return UNSHAREABLE
        if find_unheld(pool, source.held[g].ids, 0, source.held[g].num_pages) >= 0:
            return UNSHAREABLE
    return FORKED if reserve_copies(pool, num_new) else SHORT_OF_MEMORY


cdef inline void _fork_page(
    Pool *pool, const Holding *forked, const Holding *new, int32_t g, int32_t place, int32_t shard
) noexcept nogil:
    """Take a page for a fork into an empty place, and queue the copy."""
    cdef Held *source = &forked.held[g]
    cdef Held *target = &new.held[g]
    cdef int32_t page_id = source.ids[place]
    assert target.ids[place] == NULL_PAGE and pool.pages[page_id].ref_cnt > 0
    share(pool, page_id)
    take_into(pool, target, place, 1, queue_for(pool, &new.groups[g], shard), new.session)
    queue_copy(pool, page_id, target, place, g)
    source.read_list, pool.copies.is_between = pool.list_number, True
    if pool.tier != NULL and pool.tier.loading[page_id]:  # if the load fails, the copy is as wrong as its source
        pool.tier.loading[target.ids[place]] = pool.tier.loading[page_id]
        pool.tier.last_forked = max(pool.tier.last_forked, pool.tier.loading[target.ids[place]])


cdef inline void _limit_counts(
    const Group *group, const Held *source, Held *target, int32_t num_shared, const ForkExtent *extent
) noexcept nogil:
    """Limit the counts of a copied `Held` to the first `num_shared` pages, or to the fork's checkpoints."""
    cdef int32_t num_passed, num_entries = full_entries(&group.rules, extent.num_computed)
    target.num_skipped, target.next_needed = min(source.num_skipped, target.num_pages), 0
    if is_state(&group.rules):
        target.num_cached, target.num_hits = min(source.num_cached, num_entries), num_entries
        target.num_written = 0
        share_run(&target.lineage)
    else:
        num_passed = num_shared if rare(group.rules.answer_window) else max(num_shared, target.num_skipped)
        target.num_cached = target.num_hits = min(source.num_cached, num_passed)
        target.ranking.num_ranked = min(source.ranking.num_ranked, num_shared)
    assert 0 <= target.num_skipped <= target.num_pages


cdef inline void fork_group(
    Pool *pool, const Holding *forked, const Holding *new, int32_t g, const ForkExtent *extent, int32_t shard
) noexcept nogil:
    """Let `new`, which holds nothing in a group and has room for the pages, continue from the computed tokens of `forked`."""
    cdef const Group *group = &forked.groups[g]
    cdef Held *source = &forked.held[g]
    cdef Held *target = &new.held[g]
    cdef int32_t *ids = target.ids
    cdef int32_t i, n = full_pages(&group.rules, extent.num_shared), stop = _fork_end(group, source, extent)
    assert target.num_pages == 0 and n <= source.num_pages
    for i in range(n):
        if source.ids[i] != NULL_PAGE:
            share(pool, source.ids[i])
    if n:
        memcpy(ids, source.ids, n * sizeof(int32_t))
        use_in_session(pool, ids, n, new.session)
    target[0] = source[0]
    target.ids, target.num_pages, target.read_list = ids, stop, 0
    _limit_counts(group, source, target, n, extent)
    assert n <= stop <= source.num_pages
    for i in range(n, stop):
        ids[i] = NULL_PAGE
        if source.ids[i] != NULL_PAGE:
            _fork_page(pool, forked, new, g, i, shard)
