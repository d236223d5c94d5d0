"""The tier behind a pool: host memory behind device memory."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint32_t

from pagepool.core.arguments cimport as_list, group_of, size_of
from pagepool.core.chain cimport HashChain
from pagepool.core.entering cimport Contents
from pagepool.core.holdings cimport find_wrong
from pagepool.core.index cimport enter, find, find_within, keep_tokens, rank
from pagepool.core.notes cimport is_journaled, note_entry
from pagepool.core.pages cimport take_from, touch_all
from pagepool.core.queue cimport has_free_pages
from pagepool.core.records cimport NULL_PAGE, Origin, Pool, Range, Ranking, Tier, Transfer, is_free
from pagepool.core.references cimport put_back
from pagepool.core.ids cimport PageIds
from pagepool.core.request_pages cimport RequestPages, set_contents
from pagepool.core.siphash cimport Digest
from pagepool.core.store cimport PageStore
from pagepool.core.transfers cimport (
    end_load, end_save, find_oldest_load, note_cached, note_transfer, reserve_transfers, save_evicted, save_fresh,
)

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef enum:
    MAX_USES = 255


cdef void note_eviction(Pool *pool, int32_t page_id) noexcept nogil:
    save_evicted(pool, page_id)


cdef void note_cached_page(Pool *pool, int32_t page_id) noexcept nogil:
    note_cached(pool, page_id)


@cython.final
@cython.auto_pickle(False)
cdef class PageTier:
    """`num_pages` pages, including a null page, behind those of `store`. `eviction` is the name of its policy.

    A page that is evicted from the store is saved, if it was used `min_uses` times, and if it `writes_through` as soon as it is
    computed and was used that often. O(num_pages of both) to make.
    """

    def __cinit__(self, PageStore store not None, num_pages, eviction="lru", bint writes_through=False, min_uses=1):
        cdef Tier *tier = &self.tier
        cdef Py_ssize_t n = store.pool.num_pages
        store.check_fixed()
        if not store.enable_caching:
            raise ArgumentError("host_tier: got one, allowed without prefix caching: None")
        self.pages = PageStore(num_pages, True, True, eviction)
        tier.min_uses = <uint8_t>size_of(min_uses, "min_uses", 1, MAX_USES)
        tier.oldest_load = INT64_MAX
        tier.note_eviction, tier.note_entry, tier.pool = note_eviction, note_cached_page, &self.pages.pool
        tier.loading = <int64_t *>calloc(n, sizeof(int64_t))
        tier.uses = <uint8_t *>calloc(n, 1) if tier.min_uses > 1 else NULL
        tier.fresh_numbers = <uint32_t *>calloc(n, sizeof(uint32_t)) if writes_through else NULL
        if tier.loading == NULL or (tier.uses == NULL) != (tier.min_uses == 1) or (tier.fresh_numbers == NULL) == writes_through:
            raise MemoryError("the tier of a pool")

    def __dealloc__(self):
        free(self.tier.items)
        free(self.tier.loading)
        free(self.tier.uses)
        free(self.tier.fresh_numbers)
        free(self.tier.fresh)

    def __reduce__(self):
        raise ArgumentTypeError("a tier cannot be pickled")

    def counters(self, PageStore store not None) -> tuple:
        """Free and cached pages, pages in flight, and pages saved, loaded, failed, evicted and refused since it was made."""
        cdef Tier tier
        cdef Pool pool
        if store.tier is not self:
            raise ArgumentError("store: got one with another tier")
        with store.lock:
            tier, pool = self.tier, self.pages.pool
        return (
            pool.num_free, pool.num_entries, tier.num, tier.num_saved, tier.num_loaded, tier.num_failed, pool.num_evicted,
            tier.num_refused,
        )


def add_tier(PageStore store not None, PageTier tier not None) -> None:
    """Put a new tier behind a store that has none. It is the store's from now on."""
    cdef bint is_new
    with store.lock:
        is_new = store.pool.tier == NULL and tier.tier.last_number == 0 and tier.tier.num == 0
        if is_new:
            store.pool.tier = &tier.tier
    if not is_new:
        raise ArgumentError("host_tier: got one for a pool that has one")
    store.tier = tier


@cython.final
@cython.auto_pickle(False)
cdef class Transfers:
    """Pages to be transferred before the next step, under a `number`; 0 for none.

    Pages ``save_src[i]`` of the device are saved in pages ``save_dst[i]`` of the tier, in the arrays of group ``save_group[i]``;
    pages ``load_src[i]`` of the tier are loaded into pages ``load_dst[i]`` of the device, ``load_group[i]``. They are read-only
    int32 arrays. All saves are read before any load is written; no destination stands there twice. ``len()`` counts both.
    """

    cdef readonly int64_t number
    cdef readonly object save_src, save_dst, save_group
    cdef readonly object load_src, load_dst, load_group

    def __init__(self):
        raise TypeError("a Transfers is what take_transfers returns")

    def __len__(self):
        return len(self.save_src) + len(self.load_src)

    def __repr__(self):
        saves = f"save_src={self.save_src.tolist()}, save_dst={self.save_dst.tolist()}, save_group={self.save_group.tolist()}"
        loads = f"load_src={self.load_src.tolist()}, load_dst={self.load_dst.tolist()}, load_group={self.load_group.tolist()}"
        return f"Transfers(number={self.number}, {saves}, {loads})"

    def __reduce__(self):
        raise ArgumentTypeError("transfers cannot be pickled")


cdef Transfers transfers_of(int64_t number, object columns, Py_ssize_t num_saves):
    cdef Transfers transfers = Transfers.__new__(Transfers)
    columns.flags.writeable = False
    transfers.number = number
    transfers.save_src, transfers.save_dst, transfers.save_group = columns[:, :num_saves]
    transfers.load_dst, transfers.load_src, transfers.load_group = columns[:, num_saves:]
    return transfers


cdef Transfers NO_TRANSFERS = transfers_of(0, np.zeros((3, 0), np.int32), 0)


def take_transfers(PageStore store not None) -> Transfers:
    """Return the transfers that are due; from now on the caller does them. O(transfers); nothing is allocated without any."""
    cdef Pool *pool = &store.pool
    cdef Tier *tier
    cdef int32_t[:, ::1] taken
    cdef Py_ssize_t num_due, num = -1, num_saves = 0
    cdef int64_t number = 0
    if store.tier is None:
        return NO_TRANSFERS
    with store.lock:
        tier = pool.tier
        save_fresh(pool)
        num_due = tier.num_due
    if num_due == 0:
        return NO_TRANSFERS
    while num != num_due:  # arrays are made without the lock
        num = num_due
        columns = np.empty((3, num), np.int32)
        taken = columns
        with store.lock:
            num_due = tier.num_due
            if num == num_due and num:
                num_saves = take_due(tier, taken)
                number = tier.last_number
    return transfers_of(number, columns, num_saves) if num else NO_TRANSFERS


cdef Py_ssize_t take_due(Tier *tier, int32_t[:, ::1] taken) noexcept nogil:
    """Give the due transfers a number, and copy them, saves first. Returns how many saves there are."""
    cdef Transfer *transfer
    cdef Py_ssize_t i, at, num_saves = 0, num_loads = 0
    tier.last_number += 1
    for i in range(tier.num - tier.num_due, tier.num):
        num_saves += not tier.items[i].is_load
    for i in range(tier.num - tier.num_due, tier.num):
        transfer = &tier.items[i]
        transfer.number = tier.last_number
        at = num_saves + num_loads if transfer.is_load else i - (tier.num - tier.num_due) - num_loads
        num_loads += transfer.is_load
        taken[0, at], taken[1, at], taken[2, at] = transfer.page_id, transfer.tier_id, transfer.group
    tier.num_due = 0
    return num_saves


@cython.final
@cython.auto_pickle(False)
cdef class FailedLoads:
    """Pages of a pool that loads, taken under a `number`, have left with a wrong content. ``len()`` counts them."""

    def __cinit__(self):
        self.ids = PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a FailedLoads is what fail_transfers returns")

    def __dealloc__(self):
        free(self.is_wrong)

    def __len__(self):
        return self.ids.num

    def __repr__(self):
        return f"FailedLoads(number={self.number}, page_ids={self.page_ids})"

    def __reduce__(self):
        raise ArgumentTypeError("failed loads cannot be pickled")

    @property
    def page_ids(self) -> list:
        return self.ids.to_list()


cdef int mark_failed(char *is_failed, Py_ssize_t num, object places, str name) except -1:
    """Mark the transfers that failed, which are given by their places."""
    for place in as_list(places, name):
        is_failed[size_of(place, name, 0, num - 1)] = True
    return 0


def end_transfers(PageStore store not None, number, failed_saves=(), failed_loads=()) -> FailedLoads:
    """End the transfers that were taken under a number. Those that failed are given by their places among the saves, or among
    the loads. O(transfers in flight, and num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef Tier *tier = pool.tier
    cdef int64_t checked = size_of(number, "number", 1, INT64_MAX)
    cdef FailedLoads failed = FailedLoads.__new__(FailedLoads)
    cdef Py_ssize_t i, num_saves, num_loads
    cdef char *is_failed
    if store.tier is None:
        raise ArgumentError(f"number: got {checked}, allowed without a host tier: none")
    with store.lock:
        num_saves, num_loads = count_in_flight(tier, checked, False), count_in_flight(tier, checked, True)
    failed.store, failed.number, failed.is_wrong = store, checked, <uint8_t *>calloc(pool.num_pages, 1)
    failed.ids.reserve(num_loads)
    is_failed = <char *>calloc(num_saves + num_loads + 1, 1)
    if is_failed == NULL or failed.is_wrong == NULL:
        free(is_failed)
        raise MemoryError("transfers")
    try:
        mark_failed(is_failed, num_saves, failed_saves, "failed_saves")
        mark_failed(is_failed + num_saves, num_loads, failed_loads, "failed_loads")
        with store.lock:
            if num_saves + num_loads == count_in_flight(tier, checked, False) + count_in_flight(tier, checked, True):
                end_all(pool, checked, is_failed, num_saves, failed.ids)
            else:
                num_saves = num_loads = 0
    finally:
        free(is_failed)
    if num_saves + num_loads == 0:
        raise ArgumentError(f"number: got {checked}, allowed: that of transfers in flight")
    for i in range(failed.ids.num):
        failed.is_wrong[failed.ids.ids[i]] = True
    return failed


def find_wrong_token(RequestPages held not None, FailedLoads failed not None) -> int | None:
    """Return the first token of a request in a page that failed to load; None if there is none. O(pages)."""
    cdef int32_t first = -1
    with held.store.lock:
        if failed.store is held.store:
            first = find_wrong(&held.holding, failed.is_wrong, failed.number)
    return first if first >= 0 else None


cdef Py_ssize_t count_in_flight(const Tier *tier, int64_t number, bint is_load) noexcept nogil:
    cdef Py_ssize_t i, count = 0
    for i in range(tier.num):
        count += tier.items[i].number == number and tier.items[i].is_load == is_load
    return count


cdef void end_all(Pool *pool, int64_t number, const char *is_failed, Py_ssize_t num_saves, PageIds lost) noexcept:
    """End the transfers of a list, of which those that failed are marked, saves first."""
    cdef Tier *tier = pool.tier
    cdef Transfer transfer
    cdef Py_ssize_t i, num_kept = 0, num_ended_saves = 0, num_ended_loads = 0
    cdef bint is_done
    for i in range(tier.num):
        transfer = tier.items[i]
        if transfer.number != number:
            tier.items[num_kept] = transfer
            num_kept += 1
        elif transfer.is_load:
            is_done = not is_failed[num_saves + num_ended_loads]
            num_ended_loads += 1
            tier.num_loaded += is_done
            end_load(pool, &transfer, is_done)
            if not is_done:
                tier.num_failed += 1
                lost.put(&transfer.page_id, 1)
        else:
            is_done = not is_failed[num_ended_saves]
            num_ended_saves += 1
            tier.num_saved += is_done
            tier.num_failed += not is_done
            end_save(tier, &transfer, is_done)
    tier.num = num_kept
    find_oldest_load(tier)


# Pages of the tier that a prefix hits are loaded when it is looked up, so that what follows finds them in the pool.

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
            note_transfer(tier, key, spans[g].group, NULL_PAGE, page_id, True)
    return num_free_hits


cdef void forget_last(Tier *tier, Py_ssize_t n) noexcept nogil:
    """Forget the last loads that were noted."""
    cdef Py_ssize_t i
    for i in range(n):
        put_back(tier.pool, tier.items[tier.num - 1].tier_id)
        tier.num -= 1
        tier.num_due -= 1


cdef void hold_hits(Pool *pool, const Span *spans, Py_ssize_t num_spans, const Digest *digests, Range ids, bint is_held) noexcept nogil:
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
