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
from pagepool.core.queue cimport has_free_pages
from pagepool.core.records cimport NULL_PAGE, Origin, Pool, Range, Ranking, Tier, Transfer, is_free
from pagepool.core.references cimport put_back
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


cdef Span span_of(object group, HashChain chain) except *:
    group_id, stride, start, stop, is_state = group
    cdef Py_ssize_t num = size_of(stride, "stride", 1)
    cdef Py_ssize_t last = size_of(stop, "stop", 0, len(chain) // num)
    return Span(group_of(group_id), num, size_of(start, "start", 0, last), last, chain.page_size, is_state)


cdef int32_t count_shards(PageStore store, Range ids) except -1:
    """The number of shards of the size of a range; 0 for the whole pool."""
    cdef int32_t num_pages = store.pool.num_pages
    if ids.start == 0 and ids.stop == num_pages:
        return 0
    if ids.stop <= ids.start or num_pages % (ids.stop - ids.start) or ids.start % (ids.stop - ids.start):
        raise ArgumentError(f"ids: got {ids.start} to {ids.stop}, allowed: those of a shard")
    return num_pages // (ids.stop - ids.start)


def load_hits(PageStore store not None, HashChain chain not None, groups, start_id=0, stop_id=None, context=0) -> bool:
    """Have those pages of a prefix loaded that are not among the ids of the pool from `start_id` up to `stop_id`, but in the
    tier: each gets a page there, with its entry, which is held until the load ends. `groups` are ``(group, hashes of a place,
    first place, end, is a state)``. False, and nothing changed, if a page is in neither, or too few are free. O(places).
    """
    cdef Span *spans
    cdef Py_ssize_t num_spans = 0
    cdef Range ids = store.range_of(start_id, stop_id)
    cdef int32_t num_shards = count_shards(store, ids)
    cdef Contents contents = Contents(NULL, NULL, 0, store.checked_context(context))
    cdef list items = as_list(groups, "groups")
    cdef int32_t shard = ids.start // (ids.stop - ids.start) if num_shards else -1
    cdef bint is_done
    spans = <Span *>calloc(len(items) + 1, sizeof(Span))
    if spans == NULL:
        raise MemoryError("spans of a prefix")
    try:
        for item in items:
            spans[num_spans] = span_of(item, chain)
            num_spans += 1
        with chain.lock:
            store.lock_divided(num_shards)
            set_contents(&contents, chain)
            is_done = load_spans(&store.pool, spans, num_spans, &contents, ids, shard)
            store.lock.release()
    finally:
        free(spans)
    return is_done


cdef bint load_spans(
    Pool *pool, const Span *spans, Py_ssize_t num_spans, const Contents *contents, Range ids, int32_t shard
) noexcept nogil:
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t first = tier.num, num_free_hits = note_missing(pool, spans, num_spans, contents.digests, ids)
    cdef Py_ssize_t i, num_loads = tier.num - first
    cdef int32_t page_id = NULL_PAGE
    if num_free_hits < 0 or not has_free_pages(pool, num_loads + num_free_hits, 0, shard):
        forget_last(tier, num_loads)
        return False
    if num_loads:
        hold_hits(pool, spans, num_spans, contents.digests, ids, True)
        for i in range(first, first + num_loads):
            take_from(pool, &page_id, 1, shard)  # what is evicted for it is noted behind the loads
            tier.items[i].page_id = page_id
        hold_hits(pool, spans, num_spans, contents.digests, ids, False)
        enter_missing(pool, spans, num_spans, contents, ids, first)
        find_oldest_load(tier)
    return True


cdef Py_ssize_t note_missing(
    Pool *pool, const Span *spans, Py_ssize_t num_spans, const Digest *digests, Range ids
) noexcept nogil:
    """Note a load of each place that is not in the pool, still without a page there. Returns how many of the others are free
    pages, or -1 if a place is not in the tier either.
    """
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t g, place, num_free_hits = 0
    cdef int32_t page_id
    cdef Transfer load
    cdef Digest key
    for g in range(num_spans):
        for place in range(spans[g].start, spans[g].stop):
            key = digests[(place + 1) * spans[g].stride - 1]
            page_id = find_within(pool, key, spans[g].group, ids)
            if page_id != NULL_PAGE:
                num_free_hits += is_free(pool, page_id)
                continue
            page_id = find(tier.pool, key, spans[g].group)
            if page_id == NULL_PAGE or not reserve_transfers(tier, 1):
                return -1
            touch_all(tier.pool, &page_id, 1)
            load = Transfer(key, 0, NULL_PAGE, page_id, spans[g].group, True, False)
            note_transfer(tier, &load)
    return num_free_hits


cdef void forget_last(Tier *tier, Py_ssize_t n) noexcept nogil:
    """Forget the last loads that were noted."""
    cdef Py_ssize_t _i
    for _i in range(n):
        put_back(tier.pool, tier.items[tier.num - 1].tier_id)
        tier.num -= 1
        tier.num_due -= 1


cdef void hold_hits(
    Pool *pool, const Span *spans, Py_ssize_t num_spans, const Digest *digests, Range ids, bint is_held
) noexcept nogil:
    """Take a reference to the pages of the prefix that are in the pool, so that none of them is evicted, or give it back: the
    first page last, so that it is evicted last.
    """
    cdef Py_ssize_t g, i
    cdef int32_t page_id
    for g in range(num_spans):
        for i in range(spans[g].stop - 1, spans[g].start - 1, -1):
            page_id = find_within(pool, digests[(i + 1) * spans[g].stride - 1], spans[g].group, ids)
            if page_id != NULL_PAGE and is_held:
                touch_all(pool, &page_id, 1)
            elif page_id != NULL_PAGE:
                put_back(pool, page_id)


cdef void enter_missing(
    Pool *pool, const Span *spans, Py_ssize_t num_spans, const Contents *contents, Range ids, Py_ssize_t at
) noexcept nogil:
    """Enter the pages that were taken for loads, from `at` on, in the places of the prefix that are not in the pool."""
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t g, place
    for g in range(num_spans):
        for place in range(spans[g].start, spans[g].stop):
            if find_within(pool, contents.digests[(place + 1) * spans[g].stride - 1], spans[g].group, ids) == NULL_PAGE:
                tier.loading[tier.items[at].page_id] = tier.last_number + 1
                enter_loaded(pool, tier.items[at].page_id, &spans[g], place, contents)
                at += 1


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
