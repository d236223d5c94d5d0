"""Pages of the tier that a prefix hits are loaded when it is looked up, so that what follows finds them in the pool."""

from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport int32_t

from pagepool.core.arguments cimport as_list, group_of, size_of
from pagepool.core.chain cimport HashChain
from pagepool.core.entering cimport Contents
from pagepool.core.index cimport enter, find, find_within, keep_tokens, rank
from pagepool.core.notes cimport is_journaled, note_entry
from pagepool.core.pages cimport take_from, touch_all
from pagepool.core.queue cimport has_free_pages, pull
from pagepool.core.records cimport BLANK, NULL_PAGE, Origin, Pool, Range, Ranking, Tier, Transfer, is_free
from pagepool.core.references cimport let_go
from pagepool.core.request_pages cimport set_contents
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore
from pagepool.core.transfers cimport find_oldest_load, note_transfer, reserve_transfers

from pagepool.errors import ArgumentError

cdef struct Span:             # of a group's places in a prefix that hits in the pool or in the tier
    int32_t group
    Py_ssize_t stride         # digests of a place
    Py_ssize_t start
    Py_ssize_t stop
    Py_ssize_t hash_size      # tokens of a digest
    bint is_state


cdef struct Prefix:
    Span *spans               # [num_spans]
    Py_ssize_t num_spans
    Py_ssize_t num_places     # of all spans
    Range ids                 # of pages of the pool that may hit
    int32_t *found_ids        # [num_places] of the pool; the null page where it has none
    int32_t *new_ids          # [num_places] behind them: of the pages that are taken


cdef Span span_of(object group, HashChain chain) except *:
    group_id, stride, start, stop, is_state = group
    cdef Py_ssize_t num = size_of(stride, "stride", 1)
    cdef Py_ssize_t last = size_of(stop, "stop", 0, len(chain) // num)
    return Span(group_of(group_id), num, size_of(start, "start", 0, last), last, chain.page_size, is_state)


cdef int32_t count_shards(PageStore store, Range ids) except -1:
    """The number of shards of the size of a range; 0 for the whole pool."""
    cdef int32_t num_pages = store.pool.num_pages
    cdef int32_t size = ids.stop - ids.start + (ids.start == 1)  # the null page is not among those of its shard
    if ids.stop - ids.start == num_pages:
        return 0
    if size <= 0 or num_pages % size or ids.stop % size:
        raise ArgumentError(f"ids: got {ids.start} to {ids.stop}, allowed: those of a shard")
    return num_pages // size


def load_hits(PageStore store not None, HashChain chain not None, groups, tuple ids, context=0, num_reserved=0) -> bool:
    """Have those pages of a prefix loaded that are not among the `ids` of the pool, ``(first, end)``, None for the end of the
    pool, but in the tier: each gets a page there, with its entry, which is held until the load ends. `groups` are ``(group,
    hashes of a place, first place, end, is a state)``. False, and nothing changed, if a page is in neither, or too few are free
    beside `num_reserved`. O(places).
    """
    cdef Py_ssize_t num_kept_free = size_of(num_reserved, "num_reserved_pages")
    start_id, stop_id = ids
    cdef Range inside = store.range_of(start_id, stop_id)
    cdef int32_t num_shards = count_shards(store, inside)
    cdef Contents contents = Contents(NULL, NULL, 0, store.checked_context(context))
    cdef list items = as_list(groups, "groups")
    cdef int32_t shard = inside.stop // (store.pool.num_pages // num_shards) - 1 if num_shards else -1
    cdef Prefix prefix = Prefix(NULL, 0, 0, inside, NULL, NULL)
    cdef bint is_done
    if store.pool.tier == NULL:
        raise ArgumentError("store: got one without a host tier")
    try:
        reserve_places(&prefix, items, chain)
        with chain.lock:
            store.lock_divided(num_shards)
            set_contents(&contents, chain)
            is_done = load_prefix(&store.pool, &prefix, &contents, shard, num_kept_free)
            store.lock.release()
    finally:
        free(prefix.spans)
        free(prefix.found_ids)
    return is_done


cdef int reserve_places(Prefix *prefix, list groups, HashChain chain) except -1:
    """Read the spans, and allocate the ids of their places."""
    prefix.spans = <Span *>calloc(len(groups) + 1, sizeof(Span))
    if prefix.spans == NULL:
        raise MemoryError("spans of a prefix")
    for group in groups:
        prefix.spans[prefix.num_spans] = span_of(group, chain)
        prefix.num_places += prefix.spans[prefix.num_spans].stop - prefix.spans[prefix.num_spans].start
        prefix.num_spans += 1
    prefix.found_ids = <int32_t *>calloc(2 * prefix.num_places + 1, sizeof(int32_t))
    if prefix.found_ids == NULL:
        raise MemoryError("pages of a prefix")
    prefix.new_ids = prefix.found_ids + prefix.num_places
    return 0


cdef bint load_prefix(
    Pool *pool, const Prefix *prefix, const Contents *contents, int32_t shard, Py_ssize_t num_reserved
) noexcept nogil:
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t i, first = tier.num, num_free_hits = note_missing(pool, prefix, contents.digests)
    cdef Py_ssize_t num_loads = tier.num - first
    if num_free_hits < 0 or not has_free_pages(pool, num_loads + num_free_hits, num_reserved, shard):
        tier.num -= num_loads
        tier.num_due -= num_loads
        return False
    hold_hits(pool, prefix, True)
    for i in range(num_loads):
        touch_all(tier.pool, &tier.items[first + i].tier_id, 1)
    take_from(pool, prefix.new_ids, num_loads, shard)  # what is evicted for it is noted behind the loads
    for i in range(num_loads):
        tier.items[first + i].page_id = prefix.new_ids[i]
        tier.loading[prefix.new_ids[i]] = tier.last_number + 1
    hold_hits(pool, prefix, False)
    enter_missing(pool, prefix, contents)
    find_oldest_load(tier)
    return True


cdef Py_ssize_t note_missing(Pool *pool, const Prefix *prefix, const Digest *digests) noexcept nogil:
    """Find the places in the pool, and note a load of each other one, still without a page there. Returns how many of those
    found are free pages, or -1 if a place is not in the tier either.
    """
    cdef Tier *tier = pool.tier
    cdef const Span *span
    cdef Py_ssize_t g, place, i = 0, num_free_hits = 0
    cdef int32_t tier_id
    cdef Transfer load
    cdef Digest key
    for g in range(prefix.num_spans):
        span = &prefix.spans[g]
        for place in range(span.start, span.stop):
            key = digests[(place + 1) * span.stride - 1]
            prefix.found_ids[i] = find_within(pool, key, span.group, prefix.ids)
            i += 1
            if prefix.found_ids[i - 1] != NULL_PAGE:
                num_free_hits += is_free(pool, prefix.found_ids[i - 1])
                continue
            tier_id = find(tier.pool, key, span.group)
            if tier_id == NULL_PAGE or not reserve_transfers(tier, 1):
                return -1
            load = Transfer(key, 0, NULL_PAGE, tier_id, span.group, True, False)
            note_transfer(tier, &load)
    return num_free_hits


cdef void hold_hits(Pool *pool, const Prefix *prefix, bint is_held) noexcept nogil:
    """Take the free pages of the prefix out of the queue, so that none of them is evicted, or put them back to its end: the
    first page last, so that it is evicted last.
    """
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(prefix.num_places - 1, -1, -1):
        page_id = prefix.found_ids[i]
        if page_id == NULL_PAGE or pool.pages[page_id].ref_cnt or is_free(pool, page_id) != is_held:
            continue
        if is_held and pool.num_parts and pool.policy.marks[page_id] != BLANK:
            pool.policy.note_drop(pool, page_id)
        if is_held:
            pull(pool, page_id)
        else:
            let_go(pool, page_id)


cdef void enter_missing(Pool *pool, const Prefix *prefix, const Contents *contents) noexcept nogil:
    """Enter the pages that were taken for loads."""
    cdef const Span *span
    cdef Py_ssize_t g, place, i = 0, num_entered = 0
    for g in range(prefix.num_spans):
        span = &prefix.spans[g]
        for place in range(span.start, span.stop):
            if prefix.found_ids[i] == NULL_PAGE:
                enter_loaded(pool, prefix.new_ids[num_entered], span, place, contents)
                num_entered += 1
            i += 1


cdef void enter_loaded(
    Pool *pool, int32_t page_id, const Span *span, Py_ssize_t place, const Contents *contents
) noexcept nogil:
    """Enter a page that is loaded for a place."""
    cdef Py_ssize_t last = (place + 1) * span.stride - 1
    cdef Py_ssize_t first = last if span.is_state else place * span.stride
    cdef Digest key = contents.digests[last]
    cdef Py_ssize_t start, num_tokens
    cdef Ranking ranking = Ranking(0, 0)
    if enter(pool, page_id, key, span.group) and pool.num_parts:
        rank(pool, &ranking, &page_id, 0, key, span.group)
    if is_journaled(pool):
        key = contents.digests[first - 1] if first else Digest(0, 0)
        note_entry(pool, page_id, Origin(key, <int32_t>(last if span.is_state else place), contents.context))
    num_tokens = (last + 1 - first) * span.hash_size
    start = first * span.hash_size
    keep_tokens(pool, page_id, contents.token_ids + start, num_tokens if start + num_tokens <= contents.num_token_ids else 0)
