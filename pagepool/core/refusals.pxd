# Refusals. A refused request needs at least as many free pages the next time, unless one of its hits got another holder or a
# further page of it was cached. Hits evicted from the end on are followed; after other changes the prefix is looked up again.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.index cimport find_within, has_key
from pagepool.core.records cimport NULL_PAGE, WATCHED, Pool, Range
from pagepool.core.siphash cimport Digest

cdef struct Prefix:           # what the leading pages of a request are looked up by in one group
    const Digest *digests
    Py_ssize_t stride         # digests of a page
    Py_ssize_t max_num_pages  # that may hit
    int32_t group
    Range ids

cdef struct Watch:            # what a refusal rests on, with the pool's counters of then
    int64_t num_changes       # of the index: entries and drops
    int64_t num_reused
    int64_t num_unwatched
    Py_ssize_t num_pages      # leading ones that hit
    Py_ssize_t num_held       # hits that would take nothing from the free queue, null pages among them: at most
    bint is_leading           # the hits are the leading pages of the only group, WATCHED, and the next page misses


cdef inline int64_t count_changes(const Pool *pool) noexcept nogil:
    """Entries that came into the prefix index, and that went. It never gets less."""
    return pool.num_cached + pool.num_dropped


cdef inline bint is_hit(Pool *pool, const Prefix *prefix, const int32_t *ids, Py_ssize_t i) noexcept nogil:
    """Whether the page that was found for place `i` is cached under its digest."""
    return has_key(&pool.pages[ids[i]], prefix.digests[(i + 1) * prefix.stride - 1], prefix.group)


cdef inline bint ends_at(Pool *pool, const Prefix *prefix, Py_ssize_t num_pages) noexcept nogil:
    """Whether the page behind the first `num_pages` misses, or may not hit."""
    if num_pages >= prefix.max_num_pages:
        return True
    return find_within(pool, prefix.digests[(num_pages + 1) * prefix.stride - 1], prefix.group, prefix.ids) == NULL_PAGE


cdef inline void watch_leading(Pool *pool, Watch *watch, const Prefix *prefix, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Watch the hits of the only group, its first `n` pages, unless the next page hits too."""
    cdef Py_ssize_t i
    watch.is_leading = ends_at(pool, prefix, n)
    watch.num_pages = n
    for i in range(n if watch.is_leading else 0):
        pool.pages[ids[i]].group |= WATCHED


cdef inline bint has_same_hits(Pool *pool, Watch *watch, const Prefix *prefix, const int32_t *ids) noexcept nogil:
    """Whether a look-up would find the first `watch.num_pages` of `ids`, less those evicted from the end on since, and at most
    `watch.num_held` of them held. O(pages evicted).
    """
    if watch.num_reused != pool.num_reused:
        return False
    if not watch.is_leading:
        return watch.num_changes == count_changes(pool)
    while watch.num_unwatched != pool.num_unwatched and watch.num_pages:
        if is_hit(pool, prefix, ids, watch.num_pages - 1):
            break
        watch.num_pages -= 1
        watch.num_unwatched += 1
    return watch.num_unwatched == pool.num_unwatched and ends_at(pool, prefix, watch.num_pages)
