"""How far the groups of a model hit, and what became of the page at which each hit ends.

Full attention hits up to its first missing page. A window, a chunk or a state needs what a request reads that resumes where
full attention ends, at the limit. Without full attention the limit is the last place up to which tokens were computed.
"""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT64_MAX, int32_t, int64_t
from libc.string cimport memset

from pagepool.core.holding.lookups cimport *
from pagepool.core.pool cimport (
    BY_DROP, BY_EVICTION, BY_LEAVING, MAX_BANKS, NO_BANK, WHY_MASK, GhostEntry, Range, Transfer, find, find_departure,
    find_within, is_free, seconds_since, shard_of,
)
from pagepool.core.values cimport group_of

from pagepool.errors import ArgumentError

cdef enum Fate:               # what became of a page, or why the hit of a group ends
    CACHED                    # nothing is missing up to the longest possible hit
    FOLLOWS                   # nothing is missing where the hit of full attention ends
    NEVER_COMPUTED            # or its departure was forgotten
    LEFT                      # a window left it, or a later state of its run took its place
    LEFT_BY_EVICTION
    LEFT_BY_DROP
    LEFT_BY_RESET
    ELSEWHERE                 # another shard has it
    BEING_SAVED               # it is on its way to the tier
    BEING_FILLED              # it is on its way from storage to the tier

FATES = (
    "cached", "follows", "never computed", "left", "evicted", "dropped", "reset", "other shard", "being saved", "being filled",
)

cdef struct Miss:             # the end of a group's hit
    Fate fate
    int64_t num_hit_tokens
    int64_t token             # where the missing page begins, or where the missing state would be
    Py_ssize_t place          # of the missing page or state in its group; -1: nothing is missing
    double seconds            # since it left
    bint was_in_tier          # it left the tier, not the pool
    int32_t bank
    Py_ssize_t stride         # hashes of a page
    bint is_state
    bint is_uncached          # nothing of the group is ever cached, though hits need it

cdef struct Reach:            # how far all groups hit
    Py_ssize_t num_hashes
    Py_ssize_t num_in_pool    # without the tier
    Py_ssize_t num_most       # if all pages were cached
    Py_ssize_t limit          # where full attention ends, or `num_most` without it
    int32_t short_bank        # a bank with too few free pages for the loads from the tier; NO_BANK: none


cdef bint has_page(Pool *pool, const Query *query, const Group *group, Py_ssize_t place) noexcept nogil:
    """Whether a page or checkpoint hits."""
    cdef Digest key = query.digests[last_hash(group, place)]
    if find_within(pool, key, group.id, query.ids.of_banks[group.bank]) != NULL_PAGE:
        return True
    return query.reaches_tier and find(pool.tier.pool, key, group.id) != NULL_PAGE


cdef const Transfer *find_transfer(const Pool *pool, Digest key, int32_t group) noexcept nogil:
    """Return the transfer that brings a page to the tier; NULL if there is none. O(transfers)."""
    cdef const Transfer *item
    cdef Py_ssize_t i
    for i in range(pool.tier.num if pool.tier != NULL else 0):
        item = &pool.tier.items[i]
        if not item.is_load and not item.is_void and item.group == group and item.key.lo == key.lo and item.key.hi == key.hi:
            return item
    return NULL


cdef void find_fate(Pool *pool, const Query *query, const Group *group, Py_ssize_t place, Miss *miss) noexcept nogil:
    """Find what became of a missing page or checkpoint."""
    cdef Digest key = query.digests[last_hash(group, place)]
    cdef const Transfer *transfer = find_transfer(pool, key, group.id)
    miss.place, miss.fate = place, NEVER_COMPUTED
    miss.token = (place + is_state(&group.rules)) * group.stride * query.hash_size
    if find(pool, key, group.id) != NULL_PAGE:
        miss.fate = ELSEWHERE
    elif transfer != NULL:
        miss.fate = BEING_FILLED if transfer.number < 0 else BEING_SAVED
    else:
        read_departure(pool, key, group.id, False, miss)
        if pool.tier != NULL:
            read_departure(pool.tier.pool, key, group.id, True, miss)


cdef void read_departure(const Pool *pool, Digest key, int32_t group, bint is_tier, Miss *miss) noexcept nogil:
    """Read when and why a page left the pool or the tier, unless it left the other one later."""
    cdef const GhostEntry *departure = find_departure(pool, key, group)
    cdef double seconds
    if departure == NULL:
        return
    seconds = seconds_since(pool, departure)
    if miss.fate != NEVER_COMPUTED and seconds >= miss.seconds:
        return
    miss.seconds, miss.was_in_tier = seconds, is_tier
    if departure.mark & WHY_MASK == BY_EVICTION:
        miss.fate = LEFT_BY_EVICTION
    elif departure.mark & WHY_MASK == BY_LEAVING:
        miss.fate = LEFT
    else:
        miss.fate = LEFT_BY_DROP if departure.mark & WHY_MASK == BY_DROP else LEFT_BY_RESET


# How far hits reach.


cdef bint drops_page(const Query *query, const Group *group) noexcept nogil:
    """Whether the look-up drops the last page that hits in a group, for a drafter."""
    return query.kinds.use_eagle and not is_state(&group.rules) and not group.rules.chunk


cdef Py_ssize_t count_most_hashes(const Query *query) noexcept nogil:
    """Return the hashes of the hit that `find_longest` would find if all pages were cached."""
    cdef Py_ssize_t kind, stride, multiple = query.kinds.num_hit_hashes
    cdef Py_ssize_t num = query.num_digests - query.num_digests % max(1, multiple) if multiple else 0
    for kind in range(query.kinds.num):
        stride = query.kinds.items[kind].stride
        if num and drops_page(query, query.kinds.items[kind]):
            num = (num // stride - 1) * stride
        num -= num % max(1, multiple)
    return max(0, num)


cdef Py_ssize_t find_own(Pool *pool, const Query *query, const Group *group, Py_ssize_t num_hashes) noexcept:
    """Return the hashes of the longest hit of one group alone within the first `num_hashes`."""
    cdef Group alone = group[0]
    cdef const Group *item = &alone
    cdef Kinds kinds = query.kinds[0]
    cdef Query own = query[0]
    alone.next_alike = NULL
    kinds.items, kinds.num = &item, 1
    own.kinds, own.num_digests = &kinds, min(num_hashes, query.num_digests)
    return find_longest(pool, &own)


cdef bint has_full_attention(const Query *query) noexcept nogil:
    return query.kinds.num > 0 and hits_leading_pages(query.kinds.items[0])


cdef Reach find_reach(Pool *pool, Query *query, int32_t shard) noexcept:
    """Find how far all groups hit, as a look-up does."""
    cdef Reach reach
    reach.num_in_pool = reach.num_hashes = find_longest(pool, query)
    reach.num_most, reach.short_bank = count_most_hashes(query), NO_BANK
    if pool.tier != NULL and pool.slots != NULL:
        query.reaches_tier = True
        reach.num_hashes = find_longest(pool, query)
        if reach.num_hashes > reach.num_in_pool:
            reach.short_bank = find_bank_without_room(pool, query, reach.num_hashes, shard)
    reach.limit = reach.num_most
    if has_full_attention(query):
        reach.limit = query.num_full_hashes - query.kinds.num_later_drops * query.kinds.num_hit_hashes
        reach.limit = min(max(reach.num_hashes, reach.limit), reach.num_most)
    return reach


cdef int32_t find_bank_without_room(Pool *pool, const Query *query, Py_ssize_t num_hashes, int32_t shard) noexcept:
    """Return a bank with too few free pages for the hits that are free and the loads of the others; NO_BANK: none."""
    cdef Py_ssize_t[MAX_BANKS] counts
    cdef const Group *group
    cdef Py_ssize_t g, place
    cdef int32_t page_id
    memset(counts, 0, sizeof(counts))
    for g in range(query.num_groups):
        group = &query.groups[g]
        for place in range(find_first_hit_page(query, group, num_hashes), count_hit_places(group, num_hashes)):
            page_id = find_within(
                pool, query.digests[last_hash(group, place)], group.id, query.ids.of_banks[group.bank]
            )
            counts[group.bank] += page_id == NULL_PAGE or is_free(pool, page_id)
    return find_short_bank(pool, counts, 0, shard)


# The end of a group's hit.


cdef void explain_group(Pool *pool, const Query *query, const Group *group, const Reach *reach, Miss *miss) noexcept:
    """Find where the hit of a group ends, and why."""
    cdef Py_ssize_t limit = reach.limit, own = reach.num_hashes
    miss.fate, miss.place, miss.token = CACHED, -1, 0
    miss.bank, miss.stride, miss.is_state = group.bank, group.stride, is_state(&group.rules)
    miss.is_uncached = group.id == NO_GROUP and not is_ring(&group.rules)
    if group.id == NO_GROUP:
        miss.fate = NEVER_COMPUTED if miss.is_uncached else CACHED
    elif hits_leading_pages(group):
        own = find_own(pool, query, group, query.num_digests)
        if own < reach.num_most:
            find_missing_page(pool, query, group, own // group.stride, miss)
    else:
        own = find_own_within(pool, query, group, limit)
        if own < limit and not has_full_attention(query):
            limit = find_computed_end(pool, query, group, own, limit)
        if own >= limit:
            miss.fate = CACHED if limit == reach.num_most else FOLLOWS
        elif is_state(&group.rules):
            find_missing_state(pool, query, group, own, limit, miss)
        else:
            find_gap(pool, query, group, own, limit, miss)
        if miss.fate == FOLLOWS and not has_full_attention(query):
            find_missing_page(pool, query, group, own // group.stride, miss)
    miss.num_hit_tokens = own * query.hash_size
    miss.token = miss.num_hit_tokens if miss.place < 0 else miss.token


cdef Py_ssize_t find_own_within(Pool *pool, const Query *query, const Group *group, Py_ssize_t limit) noexcept:
    """Return the hashes of the longest hit of one group alone, at most `limit`."""
    cdef Py_ssize_t behind = query.kinds.num_hit_hashes if drops_page(query, group) else 0
    return min(limit, find_own(pool, query, group, limit + behind))


cdef void find_missing_page(
    Pool *pool, const Query *query, const Group *group, Py_ssize_t place, Miss *miss
) noexcept:
    """Find the first page from a place on that is missing."""
    cdef Py_ssize_t stop = query.num_digests // group.stride
    while place < stop and has_page(pool, query, group, place):
        place += 1
    if place < stop:
        find_fate(pool, query, group, place, miss)


cdef void find_missing_state(
    Pool *pool, const Query *query, const Group *group, Py_ssize_t own, Py_ssize_t limit, Miss *miss
) noexcept:
    """Find the last checkpoint between its group's hit and the limit that was kept once; without one, that at the limit."""
    cdef Py_ssize_t place = limit // group.stride - 1
    while place >= own // group.stride:
        find_fate(pool, query, group, place, miss)
        if miss.fate != NEVER_COMPUTED and miss.fate != LEFT:
            return
        place -= 1
    find_fate(pool, query, group, limit // group.stride - 1, miss)
    miss.fate = LEFT if has_full_attention(query) else miss.fate


cdef void find_gap(
    Pool *pool, const Query *query, const Group *group, Py_ssize_t own, Py_ssize_t limit, Miss *miss
) noexcept:
    """Find a missing page of those that a request needs which resumes at the limit: the last one that a window or chunk left,
    or else the last one.
    """
    cdef Py_ssize_t start = find_first_hit_page(query, group, limit), place = limit // group.stride - 1
    cdef Py_ssize_t stop = query.num_digests // group.stride
    cdef Miss found = miss[0]
    place = min(place + drops_page(query, group), stop - 1)
    while place >= start:
        if not has_page(pool, query, group, place):
            find_fate(pool, query, group, place, &found)
            if found.fate == NEVER_COMPUTED:
                found.fate = LEFT
            if miss.place < 0 or found.fate == LEFT:
                miss[0] = found
            if found.fate == LEFT:
                return
        place -= 1


cdef Py_ssize_t find_computed_end(
    Pool *pool, const Query *query, const Group *group, Py_ssize_t own, Py_ssize_t limit
) noexcept:
    """Return the last place where a hit may end, behind the hit of a group, up to which tokens were computed for certain, in
    hashes; `own`: there is none.
    """
    cdef Miss found
    while limit > own:
        memset(&found, 0, sizeof(Miss))
        if has_page(pool, query, group, limit // group.stride - 1):
            return limit
        find_fate(pool, query, group, limit // group.stride - 1, &found)
        if found.fate != NEVER_COMPUTED:
            return limit
        limit -= query.kinds.num_hit_hashes
    return own


cdef int32_t shard_with(const Pool *pool, Range ids) noexcept:
    """Return the shard with the first bank's `ids`; -1: they are not those of a shard."""
    cdef bint is_shard = pool.num_shards > 0 and ids.stop - ids.start <= pool.banks[0].pages_per_shard
    return shard_of(pool, ids.start) if is_shard else -1


def find_misses(
    PageStore store not None, CacheGroups groups not None, HashChain chain not None, num_tokens, tuple ids not None=(0, None),
) -> dict:
    """Return how far a request with `num_tokens` tokens hits, in the tier too, and why each group hits no more. Numbers of
    tokens: ``num_hit_tokens`` of the hit, ``num_pool_tokens`` without the tier, ``num_most_tokens`` if all pages were cached.
    ``short_bank`` is a bank with too few free pages for loads from the tier, or None. ``groups`` has the `Miss` of each group
    by name, with one of `FATES`. `ids` are as in `find_prefix`. Changes nothing. O(pages x groups).
    """
    cdef Py_ssize_t g, size = chain.page_size, num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
    cdef Ranges inside = ranges_in(store, ids)
    cdef Miss *misses = <Miss *>calloc(max(1, groups.num), sizeof(Miss))
    cdef Query query
    cdef Reach reach
    if misses == NULL:
        raise MemoryError("the hits of groups")
    try:
        store.require_own()
        with chain.own_lock()[0], store.lock:
            query = query_of(groups, chain.digests, chain.num if store.pool.slots != NULL else 0, size, num, inside)
            reach = find_reach(&store.pool, &query, shard_with(&store.pool, inside.of_banks[0]))
            for g in range(groups.num):
                explain_group(&store.pool, &query, &groups.groups[g], &reach, &misses[g])
        listed = [dict(misses[g], fate=FATES[misses[g].fate]) for g in range(groups.num)]
    finally:
        free(misses)
    return dict(
        num_hit_tokens=reach.num_hashes * size, num_pool_tokens=reach.num_in_pool * size,
        num_most_tokens=reach.num_most * size, short_bank=None if reach.short_bank == NO_BANK else reach.short_bank,
        groups=listed,
    )


def has_entry(PageStore store not None, HashChain chain not None, page, group) -> bool:
    """Whether the pool, or the tier behind it, has an entry of a group under the key of a hashed page. O(1)."""
    cdef Py_ssize_t at = size_of(page, "page", 0, INT64_MAX)
    cdef int32_t checked_group = group_of(group)
    cdef bint is_hashed, is_found = False
    store.require_own()
    with chain.own_lock()[0], store.lock:
        is_hashed = at < chain.num
        if is_hashed and store.pool.slots != NULL:
            is_found = find(&store.pool, chain.digests[at], checked_group) != NULL_PAGE
            if not is_found and store.pool.tier != NULL:
                is_found = find(store.pool.tier.pool, chain.digests[at], checked_group) != NULL_PAGE
    if not is_hashed:
        raise ArgumentError(f"page: got {at}, allowed: that of a hashed page")
    return is_found
