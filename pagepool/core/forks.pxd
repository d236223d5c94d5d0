# A request or row goes on twice: full pages are shared, the open page of each group and working pages of states are copied.

from libc.stdint cimport int32_t
from libc.string cimport memcpy

from pagepool.core.copies cimport note_copy, reserve_copies
from pagepool.core.holdings cimport Held, Holding, note_taken
from pagepool.core.pages cimport find_unheld, find_untouchable, share, take_from
from pagepool.core.queue cimport count_free_in, find_held_free
from pagepool.core.records cimport NULL_PAGE, Pool
from pagepool.core.rules cimport Group, full_pages, is_state, pages_for

cdef enum ForkOutcome:
    FORKED
    SHORT_OF_PAGES
    UNSHAREABLE               # a page cannot have a further reference, or was given back, or a free page has one
    SHORT_OF_MEMORY


cdef inline bint has_open_page(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Whether further tokens are written to a page that has some."""
    cdef int32_t place = full_pages(&group.rules, num_computed)
    return place < min(<int32_t>pages_for(&group.rules, num_computed), held.num_pages)


cdef inline Py_ssize_t count_open_pages(const Holding *holding, int32_t num_computed) noexcept nogil:
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups):
        count += has_open_page(&holding.groups[g], &holding.held[g], num_computed)
    return count


cdef inline ForkOutcome check_fork(
    Pool *pool, const Holding *source, int32_t num_computed, Py_ssize_t num_targets, int32_t shard
) noexcept:
    """Whether a fork can be made, for which there is room in the list of copies then."""
    cdef Py_ssize_t g, num_new = count_open_pages(source, num_computed) * num_targets
    if num_new > count_free_in(pool, shard):
        return SHORT_OF_PAGES
    if find_held_free(pool, num_new) != NULL_PAGE:
        return UNSHAREABLE
    for g in range(source.num_groups):
        if find_untouchable(pool, source.held[g].ids, source.held[g].num_pages, num_targets) >= 0:
            return UNSHAREABLE
        if find_unheld(pool, source.held[g].ids, 0, source.held[g].num_pages) >= 0:
            return UNSHAREABLE
    return FORKED if reserve_copies(pool, num_new) else SHORT_OF_MEMORY


cdef inline void note_forked(Pool *pool, int32_t page_id, int32_t copy_id) noexcept nogil:
    """Note that a page, which may be being loaded, is copied: the copy is as wrong as it if that fails."""
    if pool.tier != NULL and pool.tier.loading[page_id]:
        pool.tier.loading[copy_id] = pool.tier.loading[page_id]
        pool.tier.last_forked = max(pool.tier.last_forked, pool.tier.loading[page_id])


cdef inline void fork_group(
    Pool *pool, const Holding *forked, const Holding *new, int32_t g, int32_t num_computed, int32_t shard
) noexcept nogil:
    """Let what holds nothing in a group, and has room for the pages, go on from the computed tokens of what is forked."""
    cdef const Group *group = &forked.groups[g]
    cdef Held *source = &forked.held[g]
    cdef Held *target = &new.held[g]
    cdef int32_t *ids = target.ids
    cdef int32_t i, n = full_pages(&group.rules, num_computed)
    for i in range(n):
        if source.ids[i] != NULL_PAGE:
            share(pool, source.ids[i])
    if n:
        memcpy(ids, source.ids, n * sizeof(int32_t))
    target[0] = source[0]
    target.ids, target.num_pages, target.num_skipped = ids, n, min(source.num_skipped, n)
    if not is_state(&group.rules):
        target.num_cached = min(source.num_cached, n)
        target.ranking.num_ranked = min(source.ranking.num_ranked, n)
    target.num_hits = target.num_cached
    target.num_unique = min(source.num_unique, n)
    target.read_list = 0
    if has_open_page(group, source, num_computed):
        share(pool, source.ids[n])
        take_from(pool, ids + n, 1, shard)
        note_taken(pool, target)
        target.num_pages += 1
        note_copy(pool, source.ids[n], target, n, g)
        source.read_list = target.written_list
        note_forked(pool, source.ids[n], ids[n])
