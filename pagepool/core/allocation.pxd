# Pages that tokens need are taken all or nothing, by the same functions for a request and for a row.
#
# A `Demand` says what is asked of a pool. `price` counts what it takes, and refuses hits that are wrong by now; `fit` decides
# whether that many pages are free. Neither changes anything. Then the caller, which has room for the ids, calls `attach`, takes
# the missing pages of each group by `take_missing`, and ends with `copy_states`: none of these can fail.
#
# Always: hits are asked for only where nothing is held; `num_new` counts a working page for each state, whether its checkpoint
# is copied into it or adopted as it; `num_adopted` is 0, or the number of states with hits, all of whose checkpoints are free.

from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.checkpoints cimport adopt_state
from pagepool.core.copies cimport note_copy
from pagepool.core.holdings cimport (
    STALE, Holding, attach_hits, count_free_hits, count_missing, count_places, find_load_number, note_loads, note_taken,
)
from pagepool.core.pages cimport note_request
from pagepool.core.queue cimport count_free_in
from pagepool.core.records cimport NULL_PAGE, Pool, Range, ids_in_shard, is_free
from pagepool.core.rules cimport is_state
from pagepool.core.siphash cimport Digest

cdef enum Fit:
    FITS
    SHORT                     # too few pages are free beside the reserved ones
    SHORT_IN_SHARD            # only the shard has too few

cdef struct Hits:             # leading pages of a group, null pages first, that a look-up found
    const int32_t *ids
    int32_t num

cdef struct Demand:
    const Hits *hits          # [num_groups]; NULL: none
    int64_t num_tokens        # tokens that are to have slots
    Py_ssize_t num_reserved   # pages to leave free
    int32_t shard             # shard of new pages; -1: any
    int64_t num_new           # pages behind the hits; this and the rest by `price` and `fit`
    Py_ssize_t num_free_hits  # hits in the free queue
    Py_ssize_t num_adopted    # checkpoints that become working pages, for want of pages to copy them into


cdef inline int32_t count_attached(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Pages that the hits of a group put into its places: none for a state, whose checkpoint is copied."""
    return 0 if demand.hits == NULL or is_state(&holding.groups[g].rules) else demand.hits[g].num


cdef inline int64_t count_needed(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """New pages that a group needs behind the hits."""
    return count_missing(
        &holding.groups[g], holding.held[g].num_pages + count_attached(holding, demand, g), demand.num_tokens
    )


cdef inline Py_ssize_t price_hits(
    const Pool *pool, const Holding *holding, const Hits *hits, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Hits in the free queue; negative if one has another content than the digests say, if there are any, or cannot be held."""
    cdef Py_ssize_t g, num_free, num_hits = 0, num_all = 0
    for g in range(holding.num_groups):
        num_hits += hits[g].num
    for g in range(holding.num_groups):
        if hits[g].num * <Py_ssize_t>holding.groups[g].stride > num_digests:
            return STALE
        num_free = count_free_hits(pool, &holding.groups[g], digests, hits[g].ids, hits[g].num, num_hits)
        if num_free < 0:
            return num_free
        num_all += num_free
    return num_all


cdef inline bint price(
    const Pool *pool, const Holding *holding, Demand *demand, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Count what a demand takes; False for a hit that is wrong by now. O(hits)."""
    cdef Py_ssize_t g
    demand.num_new = demand.num_free_hits = demand.num_adopted = 0
    for g in range(holding.num_groups):
        demand.num_new += min(count_needed(holding, demand, g), (INT64_MAX >> 1) - demand.num_new)
    if demand.hits != NULL:
        demand.num_free_hits = price_hits(pool, holding, demand.hits, digests, num_digests)
    return demand.num_free_hits >= 0


cdef inline int64_t count_demanded(const Demand *demand) noexcept nogil:
    """Pages of the free queue that a priced demand takes, unless it adopts checkpoints."""
    return demand.num_new + demand.num_free_hits


cdef inline Py_ssize_t count_state_hits(const Holding *holding, const Hits *hits) noexcept nogil:
    """Checkpoints that are hit, each of which needs a copy unless it is adopted."""
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups if hits != NULL else 0):
        count += is_state(&holding.groups[g].rules) and hits[g].num > 0
    return count


cdef inline Py_ssize_t count_adoptable(const Pool *pool, const Holding *holding, const Hits *hits) noexcept nogil:
    """Checkpoints that are hit, if all of them are free pages; else 0."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if hits != NULL else 0):
        if is_state(&holding.groups[g].rules) and hits[g].num and not is_free(pool, hits[g].ids[hits[g].num - 1]):
            return 0
    return count_state_hits(holding, hits)


cdef inline Py_ssize_t count_outside(const Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Hits that are free pages of other shards than the demand's."""
    cdef Range inside = ids_in_shard(pool, demand.shard)
    cdef const Hits *hits
    cdef Py_ssize_t g, i, count = 0
    for g in range(holding.num_groups if demand.shard >= 0 and demand.hits != NULL else 0):
        hits = &demand.hits[g]
        for i in range(hits.num):
            if hits.ids[i] != NULL_PAGE and is_free(pool, hits.ids[i]):
                count += not inside.start <= hits.ids[i] < inside.stop
    return count


cdef inline Fit fit(const Pool *pool, const Holding *holding, Demand *demand) noexcept nogil:
    """Decide whether a priced demand fits; if not otherwise, by adopting its checkpoints."""
    cdef int64_t num_needed = count_demanded(demand)
    cdef int64_t num_inside = num_needed - count_outside(pool, holding, demand)
    demand.num_adopted = 0
    if num_needed + demand.num_reserved > pool.num_free or num_inside > count_free_in(pool, demand.shard):
        demand.num_adopted = count_adoptable(pool, holding, demand.hits)
        if num_inside - demand.num_adopted > count_free_in(pool, demand.shard):
            demand.num_adopted = 0
    if num_needed and num_needed - demand.num_adopted + demand.num_reserved > pool.num_free:
        return SHORT
    return SHORT_IN_SHARD if num_inside - demand.num_adopted > count_free_in(pool, demand.shard) else FITS


cdef inline void attach(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Make the hits of a demand that fits the first pages. Checkpoints become working pages, or get a reference until
    `copy_states` hands it to their copies.
    """
    cdef const Hits *hits
    cdef Py_ssize_t g
    cdef int64_t number = 0
    if count_places(holding) == 0:
        note_request(pool)
    for g in range(holding.num_groups if demand.hits != NULL else 0):
        hits = &demand.hits[g]
        number = max(number, find_load_number(pool, hits.ids, hits.num))
        if not demand.num_adopted or not is_state(&holding.groups[g].rules):
            attach_hits(pool, &holding.groups[g], &holding.held[g], hits.ids, hits.num)
    note_loads(pool, holding, number)
    for g in range(holding.num_groups if demand.num_adopted else 0):
        hits = &demand.hits[g]
        if is_state(&holding.groups[g].rules) and hits.num:
            adopt_state(pool, &holding.held[g], hits.ids, hits.num)
            note_taken(pool, &holding.held[g])


cdef inline void copy_states(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Note copies of the checkpoints that are hit into the working pages, which were taken for them."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if demand.hits != NULL and not demand.num_adopted else 0):
        if is_state(&holding.groups[g].rules) and demand.hits[g].num:
            note_copy(pool, demand.hits[g].ids[demand.hits[g].num - 1], &holding.held[g], 0, <int32_t>g)
