"""The host tier behind a pool: pages saved, transfers ended, prefixes loaded."""

cimport cython
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from cpython.ref cimport PyObject, Py_INCREF
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memset

from pagepool.core.base cimport MAX_TOKENS, NEVER
from pagepool.core.holding cimport (
    FoundPrefix, cache_page, can_restart, contents_of, count_hit_places, fetch_hits, find_end, find_restart, find_short_bank,
    find_wrong, has_copies, is_state, prefix_of, restart_from,
)
from pagepool.core.pool cimport (
    MAX_BANKS, NO_BANK, SAVED, UNSAVED, Bank, Entry, FreshPage, Range, bank_of, bare_entry, cache_alone, count_free,
    count_usable_in, counted_bank, enqueue, is_free, pull_unused, restore_child, term_of, uncache, uncache_in_tier,
)
from pagepool.core.values cimport new_ids, require_instance

from pagepool.core.pool.keeping import keep_whole_digests
from pagepool.errors import ArgumentError, ArgumentTypeError

cdef bint save_page(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Queue the save of a page, unless the tier has its content. Return False if the tier is full, or memory is short."""
    cdef Tier *tier = pool.tier
    cdef int32_t tier_id = find(tier.pool, key, group)
    if tier_id != NULL_PAGE:
        keep_longer(tier, tier_id)
        return True
    assert 0 < page_id < pool.num_pages and group >= 0
    if count_free_in(tier.pool, queue_of(pool, page_id)) == 0 or not reserve_transfers(tier, 1):
        tier.counters.num_refused_pages += 1
        return False
    queue_save(pool, key, group, page_id)
    return True


cdef void keep_longer(Tier *tier, int32_t tier_id) noexcept nogil:
    """Let a page of the tier stay as long as if it was just used."""
    assert tier.pool.pages[tier_id].group != NO_GROUP
    hit(tier.pool, &tier_id, 1, NO_SESSION)
    give_back(tier.pool, tier_id)


cdef void save_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Save an evicted page, unless another page has its content, it is not expected back, or the tier has evicted it since it
    was saved.
    """
    cdef const Page *page = &pool.pages[page_id]
    cdef bint was_saved = pool.tier.fresh_numbers != NULL and pool.tier.fresh_numbers[page_id] == SAVED
    assert page.group != NO_GROUP and page.ref_cnt == 0
    if page.group & TWIN or term_of(&pool.expected, page_id) == NEVER:
        return
    if not was_saved or find(pool.tier.pool, digest_of(page), page.group & ~FLAGS) != NULL_PAGE:
        save_page(pool, page_id, digest_of(page), page.group & ~FLAGS)


cdef void drop_stale(Tier *tier) noexcept nogil:
    """Drop entries in `fresh` for pages that were cached again since, so that each page has at most one."""
    cdef Py_ssize_t i, num_left = 0, num_ready = 0
    assert tier.num_ready <= tier.num_fresh
    for i in range(tier.num_fresh):
        if tier.fresh_numbers[tier.fresh[i].page_id] == tier.fresh[i].number:
            tier.fresh[num_left] = tier.fresh[i]
            num_left += 1
            num_ready += i < tier.num_ready
    tier.num_fresh, tier.num_ready = num_left, num_ready


cdef void record_cached(Pool *pool, int32_t page_id, bint may_be_replaced) noexcept nogil:
    """Record that a page was cached if the tier writes through, so that it is saved once a step has computed it. If memory is
    short, or the page may be replaced, it is saved at its eviction instead.
    """
    cdef Tier *tier = pool.tier
    assert pool.pages[page_id].group != NO_GROUP
    if tier.fresh_numbers == NULL:
        return
    if tier.loading[page_id]:
        tier.fresh_numbers[page_id] = SAVED
        return
    if may_be_replaced:
        tier.fresh_numbers[page_id] = UNSAVED
        return
    if tier.num_fresh >= 2 * <Py_ssize_t>pool.num_pages:  # many pages in a step
        drop_stale(tier)
    tier.num_cached += 1
    if tier.num_cached <= SAVED:  # at first, and when it wraps around
        tier.num_cached = SAVED + 1
    tier.fresh_numbers[page_id] = tier.num_cached
    if reserve_items(<void **>&tier.fresh, &tier.fresh_capacity, tier.num_fresh + 1, sizeof(FreshPage)):
        tier.fresh[tier.num_fresh] = FreshPage(page_id=page_id, number=tier.num_cached)
        tier.num_fresh += 1


@cython.final
@cython.auto_pickle(False)
cdef class PageTier:
    """A tier of `num_pages` pages, including a null page, behind `store`. It evicts by LRU. The tier has the banks of the
    store: `num_pages` is the size of the first, `further_banks` has the sizes of the others, without null pages.

    Pages evicted from the store are saved. If the tier `writes_through`, pages are saved as soon as they are computed, and not
    again at eviction. Making a tier is O(num_pages of both).
    """

    def __cinit__(self, PageStore store not None, num_pages, bint writes_through=False, further_banks=()):
        cdef Tier *tier = &self.tier
        cdef Py_ssize_t n = store.pool.num_pages
        cdef list sizes = as_list(further_banks, "further_banks")
        if not store.enable_caching:
            raise ArgumentError("host_tier: got one, allowed without prefix caching: None")
        self.num_device_pages = store.pool.num_pages
        if 1 + len(sizes) != store.pool.num_banks:
            raise ArgumentError(f"further_banks: got {len(sizes)}, allowed: {store.pool.num_banks - 1}")
        self.pages = PageStore(num_pages, True, "lru", sizes, store.bank_names)
        if store.has_blank_first:
            self.pages.put_blank_first()
        if store.pool.uppers != NULL:
            keep_whole_digests(self.pages)
        tier.oldest_load = INT64_MAX
        tier.pool, tier.save_evicted, tier.record_cached = &self.pages.pool, save_evicted, record_cached
        tier.loading = <int64_t *>calloc(n, sizeof(int64_t))
        tier.fresh_numbers = <uint32_t *>calloc(n, sizeof(uint32_t)) if writes_through else NULL
        if tier.loading == NULL or (tier.fresh_numbers != NULL) != writes_through:
            raise MemoryError("the tier of a pool")

    def __dealloc__(self):
        free(self.tier.items)
        free(self.tier.loading)
        free(self.tier.fresh_numbers)
        free(self.tier.fresh)
        free(self.storage.items)
        free(self.storage.arrivals)

    def __reduce__(self):
        raise ArgumentTypeError("a tier cannot be pickled")

    def counters(self, PageStore store not None) -> dict:
        """Return the `TierCounters` by name, and the numbers of free, cached and evicted pages and of unfinished transfers."""
        cdef Tier tier
        cdef Pool pool
        self.check_behind(store)
        with store.own_lock()[0]:
            tier, pool = self.tier, self.pages.pool
        return dict(
            tier.counters, num_free_pages=pool.num_free, num_cached_pages=pool.num_entries, num_in_flight=tier.num,
            num_evicted_pages=pool.counters.num_evicted_pages,
        )

    def count_banks(self, PageStore store not None) -> list:
        """Return for each bank the numbers of its pages without the null page, of free pages, of cached pages, of pages ever
        handed out, and of pages ever evicted.
        """
        cdef list counts = []
        cdef Pool pool
        cdef Bank bank
        cdef int32_t i
        self.check_behind(store)
        with store.own_lock()[0]:
            pool = self.pages.pool
        for i in range(pool.num_banks):
            bank = counted_bank(&pool, i)
            counts.append((
                bank.stop - bank.start, bank.num_free, bank.num_entries, bank.num_allocated_pages, bank.num_evicted_pages,
            ))
        return counts

    cdef int check_behind(self, PageStore store) except -1:
        """Raise ArgumentError unless the tier is behind a store, whose lock guards it."""
        if store.tier != <PyObject *>self:
            raise ArgumentError("store: got one with another tier, allowed: the one of this tier")
        return 0


def add_tier(PageStore store not None, PageTier tier not None) -> None:
    """Put a new tier behind its store, which takes ownership of the tier, and must have none yet."""
    cdef bint is_new, is_fitting
    is_fitting = tier.num_device_pages == store.pool.num_pages and tier.pages.pool.num_banks == store.pool.num_banks
    if not store.enable_caching or not is_fitting:
        raise ArgumentError("host_tier: got one for another pool, allowed: one of this pool's size, with prefix caching")
    with store.own_lock()[0]:
        is_new = store.pool.tier == NULL and not tier.is_used
        if is_new:
            store.pool.tier = &tier.tier
            tier.is_used = True
            Py_INCREF(tier)
            store.tier = <PyObject *>tier
    if not is_new:
        raise ArgumentError(
            "host_tier: got one for a pool that has one, or one that a pool has, allowed: a new one, for a pool without"
        )


cdef void begin_step(Pool *pool, int64_t *last_step) noexcept nogil:
    """Begin the step whose moves are taken. No step begins for moves of forks or refused calls, or if the caller took no moves
    of the last step: it joins that step, which becomes its `last_step`. A tier that writes through saves the pages cached
    before the moves of the previous step were taken, since that step has begun; storage counts the new step.
    """
    cdef Tier *tier = pool.tier
    cdef bint is_next = last_step[0] == tier.num_steps
    assert last_step[0] <= tier.num_steps and tier.num_ready <= tier.num_fresh
    if pool.copies.is_between:
        return
    tier.num_steps += is_next
    last_step[0] = tier.num_steps
    if not is_next:
        return
    save_fresh(pool)
    tier.num_ready = tier.num_fresh
    if tier.pool.tier != NULL:
        tier.pool.tier.num_steps += 1


cdef void save_fresh(Pool *pool) noexcept nogil:
    """Queue saves of the ready pages that are still cached. Leave out a page whose older twin is saved instead."""
    cdef Tier *tier = pool.tier
    cdef FreshPage fresh
    cdef const Page *page
    cdef int32_t first
    cdef Py_ssize_t i
    assert tier.num_ready <= tier.num_fresh
    for i in range(tier.num_ready):
        fresh = tier.fresh[i]
        page = &pool.pages[fresh.page_id]
        if tier.fresh_numbers[fresh.page_id] != fresh.number or page.group == NO_GROUP:
            continue
        first = find(pool, digest_of(page), page.group & ~FLAGS) if page.group & TWIN else fresh.page_id
        if tier.fresh_numbers[first] == SAVED or (first != fresh.page_id and pool.release_twins == NULL):
            continue
        if save_page(pool, fresh.page_id, digest_of(page), page.group & ~FLAGS):
            tier.fresh_numbers[fresh.page_id] = tier.fresh_numbers[first] = SAVED  # `first` may be a held twin
    tier.num_fresh -= tier.num_ready
    for i in range(tier.num_fresh if tier.num_ready else 0):
        tier.fresh[i] = tier.fresh[tier.num_ready + i]


@cython.final
@cython.auto_pickle(False)
cdef class FailedLoads:
    """Pages with wrong contents, since loads of list `number` failed. ``len()`` counts them. `groups` has the cache group of
    each page; ids are relative to the group's pool.
    """

    def __cinit__(self):
        self.ids, self.group_ids = PageIds.__new__(PageIds), PageIds.__new__(PageIds)

    def __init__(self):
        raise TypeError("a FailedLoads is what CacheManager.fail returns")

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
        return self.store.ids_in_banks(self.ids).to_list()[::-1]

    @property
    def groups(self) -> list:
        return self.group_ids.to_list()[::-1]


cdef int set_failed(bytearray is_failed, Py_ssize_t start, Py_ssize_t num, list indices, str name) except -1:
    """Set the flags of failed transfers, given their indices among `num`. The first transfer's flag is at `start`."""
    for index in indices:
        is_failed[start + size_of(index, name, 0, num - 1)] = True
    return 0


def end_transfers(PageStore store not None, number, failed_saves=(), failed_loads=()) -> FailedLoads:
    """End the loads and saves taken under a number. Failed ones are named by their indices among the saves or loads.
    O(transfers in flight + num_pages).
    """
    cdef Pool *pool = &store.pool
    cdef Tier *tier = pool.tier
    cdef int64_t checked = size_of(number, "number", 1, INT64_MAX)
    cdef FailedLoads failed = FailedLoads.__new__(FailedLoads)
    cdef list wrong_saves = list(as_list(failed_saves, "saves", False))
    cdef list wrong_loads = list(as_list(failed_loads, "loads", False))
    cdef Py_ssize_t num_saves, num_loads
    cdef bytearray is_failed
    if store.pool.tier == NULL:
        raise ArgumentError(f"number: got {checked}, allowed without a host tier: none")
    with store.own_lock()[0]:
        num_saves, num_loads = count_in_flight(tier, checked, False), count_in_flight(tier, checked, True)
    failed.store, failed.number = store, checked
    failed.is_wrong = <uint8_t *>calloc(pool.num_pages if wrong_loads else 1, 1)
    if failed.is_wrong == NULL:
        raise MemoryError("transfers")
    failed.ids.reserve(num_loads)
    failed.group_ids.reserve(num_loads)
    is_failed = bytearray(num_saves + num_loads)
    set_failed(is_failed, 0, num_saves, wrong_saves, "saves")
    set_failed(is_failed, num_saves, num_loads, wrong_loads, "loads")
    with store.own_lock()[0]:
        if num_saves + num_loads == count_in_flight(tier, checked, False) + count_in_flight(tier, checked, True):
            end_all(pool, is_failed, num_saves, failed)
            end_forked(pool, failed)
        else:
            num_saves = num_loads = 0
    if num_saves + num_loads == 0:
        raise ArgumentError(f"number: got {checked}, allowed: that of transfers in flight")
    return failed


def rewind_request(RequestPages held, failed) -> int | None:
    """Set a request back before failed loads; return its first wrong token, or None. See `CacheManager.find_wrong_token`."""
    cdef FailedLoads loads = require_instance(failed, FailedLoads, "failed")
    cdef Pool *pool
    cdef int32_t restart = -1
    if held is None:
        return None
    pool = &held.store.pool
    with held.store.own_lock()[0]:
        if loads.store is held.store and loads.ids.num:
            restart = find_wrong(&held.holding, loads.is_wrong, loads.number)
        if restart >= 0:
            restart = find_restart(pool, &held.holding, restart, restart)
            if not has_copies(pool, &held.holding) and can_restart(pool, &held.holding, restart, MAX_TOKENS):
                restart_from(pool, &held.holding, restart, restart, MAX_TOKENS)
            held.plan()
    return restart if restart >= 0 else None


cdef void end_forked(Pool *pool, FailedLoads failed) noexcept:
    """End the loading of copies that forks made of pages being loaded. If any load failed, the copies may be wrong."""
    cdef int64_t *loading = pool.tier.loading
    cdef int32_t page_id
    for page_id in range(1, pool.num_pages if failed.number <= pool.tier.last_forked else 1):
        assert 0 <= loading[page_id] <= pool.list_number
        if loading[page_id] == failed.number:
            loading[page_id] = 0
            if failed.ids.num:
                failed.is_wrong[page_id] = True


cdef Py_ssize_t count_in_flight(const Tier *tier, int64_t number, bint is_load) noexcept nogil:
    cdef Py_ssize_t i, count = 0
    for i in range(tier.num):
        count += tier.items[i].number == number and tier.items[i].is_load == is_load
    return count


cdef void end_save(Pool *pool, const Transfer *transfer, bint is_done) noexcept nogil:
    """Cache the filled page of the tier, unless the save failed or is void, or the tier has the content. A page whose save
    failed is saved at its eviction.
    """
    cdef Entry entry
    cdef Tier *tier = pool.tier
    cdef int32_t page_id = transfer.tier_id
    assert tier.pool.pages[page_id].ref_cnt > 0
    assert not transfer.is_load and tier.pool.pages[page_id].group == NO_GROUP
    if not is_done and tier.fresh_numbers != NULL and tier.fresh_numbers[transfer.page_id] == SAVED:
        if has_key(&pool.pages[transfer.page_id], transfer.key, transfer.group):
            tier.fresh_numbers[transfer.page_id] = UNSAVED
    if is_done and not transfer.is_void and find(tier.pool, transfer.key, transfer.group) == NULL_PAGE:
        entry = bare_entry(&transfer.key, transfer.group)
        entry.upper = tier.pool.uppers + page_id if tier.pool.uppers != NULL else NULL
        cache_alone(tier.pool, page_id, &entry)
    give_back(tier.pool, page_id)


cdef void end_load(Pool *pool, const Transfer *transfer, bint is_done) noexcept nogil:
    """Give back both pages. If the load failed, they lose their entries, and the content in storage counts as wrong, too."""
    cdef Tier *tier = pool.tier
    assert pool.pages[transfer.page_id].ref_cnt > 0 and tier.pool.pages[transfer.tier_id].ref_cnt > 0
    assert transfer.is_load and tier.loading[transfer.page_id] == transfer.number
    tier.loading[transfer.page_id] = 0
    if not is_done and has_key(&pool.pages[transfer.page_id], transfer.key, transfer.group):
        uncache(pool, transfer.page_id)
    if not is_done and has_key(&tier.pool.pages[transfer.tier_id], transfer.key, transfer.group):
        uncache(tier.pool, transfer.tier_id)
    if not is_done and not transfer.is_void:
        uncache_in_tier(tier.pool.tier, transfer.key, transfer.group)
    give_back(pool, transfer.page_id)
    give_back(tier.pool, transfer.tier_id)


cdef void end_all(Pool *pool, const char *is_failed, Py_ssize_t num_saves, FailedLoads failed) noexcept:
    """End the transfers of a list. `is_failed` has a flag for each, saves first."""
    cdef Tier *tier = pool.tier
    cdef const Transfer *transfer
    cdef Py_ssize_t i, save = num_saves, load = count_in_flight(tier, failed.number, True)
    cdef bint is_done
    for i in range(tier.num - 1, -1, -1):  # last page first, so that it is evicted first
        transfer = &tier.items[i]
        if transfer.number != failed.number:
            continue
        load -= transfer.is_load
        save -= not transfer.is_load
        is_done = not is_failed[num_saves + load if transfer.is_load else save]
        tier.counters.num_failed_pages += not is_done
        if transfer.is_load:
            tier.counters.num_loaded_pages += is_done
            end_load(pool, transfer, is_done)
        else:
            tier.counters.num_saved_pages += is_done
            end_save(pool, transfer, is_done)
        if transfer.is_load and not is_done:
            assert 0 < transfer.page_id < pool.num_pages
            failed.ids.put(&transfer.page_id, 1)
            failed.group_ids.put(&transfer.group, 1)
            failed.is_wrong[transfer.page_id] = True
    assert save == load == 0
    forget_list(tier, failed.number)
    find_oldest_load(pool)


cdef void forget_list(Tier *tier, int64_t number) noexcept nogil:
    """Remove the transfers of a list, which have ended."""
    cdef Py_ssize_t i, num_kept = 0
    for i in range(tier.num):
        if tier.items[i].number != number:
            tier.items[num_kept] = tier.items[i]
            num_kept += 1
    tier.num = num_kept
    assert tier.num_due <= tier.num


cdef int32_t count_shards(PageStore store, Range ids) except -1:
    """Return the number of shards if `ids` is the part of one in the first bank, 0 if the whole pool; else raise."""
    cdef int32_t num_pages = store.pool.banks[0].stop
    cdef int32_t size = ids.stop - ids.start + (ids.start == 1)  # the range of the first shard lacks the null page
    if ids.stop - ids.start == store.pool.num_pages:
        return 0
    if size <= 0 or num_pages % size or ids.stop % size:
        raise ArgumentError(f"ids: got {ids.start} to {ids.stop}, allowed: those of a shard")
    return num_pages // size


def load_prefix(
    PageStore store not None, CacheGroups groups not None, HashChain chain not None, num_tokens,
    tuple ids not None=(0, None), context=0, num_reserved=0, session=0,
) -> FoundPrefix:
    """Find a prefix as `find_prefix` does, and queue loads of its pages that only the tier has.

    Each load takes a page in `ids`, the pages of a shard, caches it, and holds it until it ends. `context` comes from
    `EntryJournal.add_context`, `session` from `PageSessions.hold`. If a bank has too few free pages, where `num_reserved` of
    the first bank stay free, nothing changes, and the result is the prefix that the pool has. O(pages x groups).
    """
    cdef Py_ssize_t num_hashes, num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
    cdef Py_ssize_t num_kept_free = size_of(num_reserved, "num_reserved_pages")
    cdef Ranges inside = ranges_in(store, ids)
    cdef int32_t num_shards = count_shards(store, inside.of_banks[0]) if store.has_tier else 0
    cdef int32_t shard = inside.of_banks[0].stop // (store.pool.banks[0].stop // num_shards) - 1 if num_shards else -1
    cdef int32_t checked_context = store.checked_context(context), checked_session = store.checked_session(session)
    cdef Contents contents
    cdef tuple hits = new_ids(groups.num)
    cdef FoundPrefix found
    cdef Query query
    store.require_own()
    chain.own_lock()[0].acquire()
    store.lock_divided(num_shards, &chain.lock)
    contents = contents_of(chain, checked_context, checked_session)
    query = query_of(groups, chain.digests, chain.num, chain.page_size, num, inside)
    num_hashes = find_and_load(&store.pool, &query, hits, &contents, shard, num_kept_free)
    store.lock.release()
    chain.lock.release()
    if num_hashes < 0:
        raise MemoryError("the pages of a prefix")
    found = prefix_of(hits, num, num_hashes * chain.page_size)
    found.end, found.is_short = query.end, query.short_bank != NO_BANK
    return found


def count_steps(PageStore store not None) -> int:
    """Return the number of steps whose moves were taken; 0 without a tier. O(1)."""
    cdef int64_t num_steps = 0
    with store.own_lock()[0]:
        if store.pool.tier != NULL:
            num_steps = store.pool.tier.num_steps
    return num_steps


def are_loading(PageStore store not None, tuple hits not None) -> bool:
    """Whether loads have yet to fill some pages of a tuple of `PageIds`. O(pages)."""
    cdef const int64_t *loading
    cdef bint found = False
    cdef PageIds ids
    cdef Py_ssize_t i
    for each in hits:
        ids = store.checked(each)
        with store.own_lock()[0]:
            loading = store.pool.tier.loading if store.pool.tier != NULL else NULL
            for i in range(ids.num if loading != NULL else 0):
                found = found or loading[ids.ids[i]] != 0
    return found


cdef Py_ssize_t find_and_load(
    Pool *pool, Query *query, tuple hits, const Contents *contents, int32_t shard, Py_ssize_t num_reserved
) noexcept:
    """Do `load_prefix` in a locked pool. Return the number of hashes in the prefix; -1, with nothing changed, if memory is
    short.
    """
    cdef Py_ssize_t num_all, num_hashes = find_longest(pool, query)
    query.num_reachable = num_hashes
    if pool.tier != NULL and num_hashes + query.kinds.num_hit_hashes <= query.num_digests:
        query.reaches_tier = True
        num_all = find_longest(pool, query)
        if num_all > num_hashes:
            if fetch_hits(pool, query, num_all, hits) < 0:
                return -1
            query.num_reachable = num_all
            query.short_bank = load_absent(pool, query, hits, contents, shard, num_reserved)
            if query.short_bank == NO_BANK:
                find_end(pool, query, num_all)
                return num_all
            if not has_pages_of_hit(pool, query, num_all, shard):
                query.short_bank = NO_BANK
    find_end(pool, query, num_hashes)
    return fetch_hits(pool, query, num_hashes, hits)


cdef Py_ssize_t find_reachable(Pool *pool, Query *query, int32_t shard) noexcept:
    """Return the number of hashes that `find_and_load` finds if enough pages are free. Nothing changes."""
    cdef Py_ssize_t num_all, num_hashes = find_longest(pool, query)
    if pool.tier == NULL or num_hashes + query.kinds.num_hit_hashes > query.num_digests:
        return num_hashes
    query.reaches_tier = True
    num_all = find_longest(pool, query)
    return num_all if num_all > num_hashes and has_pages_of_hit(pool, query, num_all, shard) else num_hashes


cdef bint has_pages_of_hit(const Pool *pool, const Query *query, Py_ssize_t num_hashes, int32_t shard) noexcept:
    """Whether each bank, or the shard, has as many pages, held or free, as a hit of `num_hashes` hashes takes there."""
    cdef Py_ssize_t[MAX_BANKS] counts
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t bank
    memset(counts, 0, sizeof(counts))
    for g in range(query.num_groups):
        group = &query.groups[g]
        assert find_first_hit_page(query, group, num_hashes) <= count_hit_places(group, num_hashes)
        counts[group.bank] += count_hit_places(group, num_hashes) - find_first_hit_page(query, group, num_hashes)
    for bank in range(pool.num_banks):
        if counts[bank] > count_usable_in(pool, queue_in(pool, bank, shard)):
            return False
    return True


cdef int32_t load_absent(
    Pool *pool, const Query *query, tuple hits, const Contents *contents, int32_t shard, Py_ssize_t num_reserved
) noexcept:
    """Queue loads of the pages missing in `hits`, those of `num_reachable` hashes. Return NO_BANK, or, with nothing changed,
    the first bank with too few free pages, or bank 0 if memory is short.
    """
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t i, first = tier.num
    cdef bint has_room = queue_absent(pool, query, hits)
    cdef Py_ssize_t num_loads = tier.num - first
    cdef int32_t *taken = <int32_t *>malloc(max(1, num_loads) * sizeof(int32_t))
    cdef int32_t short_bank = 0
    assert num_loads >= 0 and query.num_reachable <= query.num_digests
    if taken != NULL and has_room:
        short_bank = find_bank_short_of_loads(pool, query, hits, first, shard, num_reserved)
    if taken == NULL or not has_room or short_bank != NO_BANK:
        free(taken)
        tier.num -= num_loads
        tier.num_due -= num_loads
        return short_bank
    hold_hits(pool, hits, True)
    for i in range(num_loads):
        hit(tier.pool, &tier.items[first + i].tier_id, 1, NO_SESSION)
    take_for_loads(pool, taken, first, num_loads, shard, contents.session)
    for i in range(num_loads):
        assert pool.pages[taken[i]].ref_cnt == 1 and pool.pages[taken[i]].group == NO_GROUP
        tier.items[first + i].page_id = taken[i]
        tier.loading[taken[i]] = pool.list_number
    hold_hits(pool, hits, False)
    cache_loads(pool, query, hits, contents, taken)
    free(taken)
    find_oldest_load(pool)
    return NO_BANK


cdef int32_t find_bank_short_of_loads(
    const Pool *pool, const Query *query, tuple hits, Py_ssize_t first, int32_t shard, Py_ssize_t num_reserved
) noexcept:
    """Return the first bank with too few free pages for the loads from transfer `first` on and the free pages in `hits`
    together; NO_BANK: each bank has enough.
    """
    cdef Py_ssize_t[MAX_BANKS] counts
    cdef const Tier *tier = pool.tier
    cdef Py_ssize_t i, g
    cdef PageIds found
    memset(counts, 0, sizeof(counts))
    for i in range(first, tier.num):
        counts[bank_of(tier.pool, tier.items[i].tier_id)] += 1
    for g in range(query.num_groups):
        found = hits[g]
        counts[query.groups[g].bank] += count_free(pool, found.ids, found.num)
    return find_short_bank(pool, counts, num_reserved, shard)


cdef void take_for_loads(
    Pool *pool, int32_t *taken, Py_ssize_t first, Py_ssize_t num_loads, int32_t shard, int32_t session
) noexcept:
    """Take a page for each load from transfer `first` on, in one call for consecutive loads in a bank. Saves of evicted pages
    are queued behind the loads.
    """
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t stop, start = 0
    cdef int32_t bank
    while start < num_loads:
        bank, stop = bank_of(tier.pool, tier.items[first + start].tier_id), start + 1
        while stop < num_loads and bank_of(tier.pool, tier.items[first + stop].tier_id) == bank:
            stop += 1
        assert start < stop <= num_loads
        take(pool, taken + start, stop - start, queue_in(pool, bank, shard), session)
        start = stop


cdef bint queue_absent(Pool *pool, const Query *query, tuple hits) noexcept:
    """Queue a load of each page missing in `hits`; its page of the pool is taken later. False if memory is short."""
    cdef Tier *tier = pool.tier
    cdef const Group *group
    cdef Py_ssize_t g, place
    cdef PageIds found
    cdef Digest key
    for g in range(query.num_groups):
        group, found = &query.groups[g], hits[g]
        for place in range(find_first_hit_page(query, group, query.num_reachable), found.num):
            if found.ids[place] == NULL_PAGE:
                if not reserve_transfers(tier, 1):
                    return False
                key = query.digests[last_hash(group, place)]
                assert find(tier.pool, key, group.id) != NULL_PAGE
                queue_transfer(tier, Transfer(
                    key=key, number=0, page_id=NULL_PAGE, tier_id=find(tier.pool, key, group.id), group=group.id, is_load=True,
                    is_void=False,
                ))
    return True


cdef void hold_hits(Pool *pool, tuple hits, bint is_held) noexcept:
    """Take the free pages of a prefix out of the queue to protect them from eviction, or put them back at its end, the first
    page last, so that it is evicted last.
    """
    cdef Py_ssize_t g, place
    cdef int32_t page_id
    cdef PageIds found
    for g in range(len(hits) - 1, -1, -1):
        found = hits[g]
        for place in range(found.num - 1, -1, -1):
            page_id = found.ids[place]
            if page_id == NULL_PAGE or pool.pages[page_id].ref_cnt or is_free(pool, page_id) != is_held:
                continue
            assert pool.pages[page_id].group != NO_GROUP
            if is_held:
                pull_unused(pool, page_id)
            else:
                enqueue(pool, page_id)


cdef void cache_loads(
    Pool *pool, const Query *query, tuple hits, const Contents *contents, const int32_t *taken
) noexcept:
    """Cache the pages taken for loads, and add them to the hits. Runs went on from a loaded page with the next one of the hit.
    """
    cdef const Group *group
    cdef Py_ssize_t g, place, num_loads = 0
    cdef PageIds found
    for g in range(query.num_groups):
        group, found = &query.groups[g], hits[g]
        for place in range(find_first_hit_page(query, group, query.num_reachable), found.num):
            if found.ids[place] == NULL_PAGE:
                assert pool.pages[taken[num_loads]].group == NO_GROUP
                found.ids[place] = taken[num_loads]
                num_loads += 1
                cache_page(pool, group, found.ids[place], <int32_t>place, contents)
                if pool.children != NULL and not is_state(&group.rules) and place + 1 < found.num:
                    restore_child(pool, found.ids[place], query.digests[last_hash(group, place + 1)])
