# Transfers of pages between a pool and the tier behind it: noted here, done by whoever takes the list. The lock of the pool
# guards both.

from libc.stdint cimport INT64_MAX, int32_t, int64_t

from pagepool.core.index cimport drop, enter, find, has_key, is_journaled, note_clear, note_entry, rank
from pagepool.core.pages cimport fetch_entry, take_from, touch_all
from pagepool.core.queue cimport end_of_queue, put_back, record_behind
from pagepool.core.records cimport (
    FILLED, FILLING, FLAGS, NO_GROUP, NULL_PAGE, TWIN, UNFILLED, FreshPage, Origin, Page, Pool, Ranking, Tier, Transfer,
    digest_of, resize,
)
from pagepool.core.siphash cimport Digest


cdef inline bint reserve_transfers(Tier *tier, Py_ssize_t n) noexcept nogil:
    """Allocate room for `n` transfers more; False where memory is short."""
    cdef Py_ssize_t capacity = max(<Py_ssize_t>64, tier.capacity)
    while capacity < tier.num + n:
        capacity *= 2
    if capacity > tier.capacity:
        if not resize(<void **>&tier.items, capacity * sizeof(Transfer)):
            return False
        tier.capacity = capacity
    return True


cdef inline void note_transfer(Tier *tier, const Transfer *transfer) noexcept nogil:
    """Note a transfer, for which there is room. It takes over a reference to the tier's page, and one to the page of a load."""
    tier.items[tier.num] = transfer[0]
    tier.num += 1
    tier.num_due += 1


cdef inline int32_t note_save(Tier *tier, Digest key, int32_t group, int32_t page_id, bint is_void) noexcept nogil:
    """Take a free page of the tier for a page, and note the transfer, for which there is room."""
    cdef int32_t tier_id = NULL_PAGE
    cdef Transfer transfer
    take_from(tier.pool, &tier_id, 1, -1)
    fetch_entry(tier.pool, record_behind(tier.pool, end_of_queue(tier.pool, -1), -1))  # of the page that is taken next
    tier.fills[tier_id] = FILLING
    transfer = Transfer(key, 0, page_id, tier_id, group, False, is_void)
    note_transfer(tier, &transfer)
    return tier_id


cdef inline void renew(Pool *pool, int32_t page_id) noexcept nogil:
    """Let a cached page be as one that was just used."""
    touch_all(pool, &page_id, 1)
    put_back(pool, page_id)


cdef inline void save_page(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Have a page saved, if it is not in the tier, was used often enough, and a page of the tier is not in flight."""
    cdef Tier *tier = pool.tier
    cdef int32_t tier_id = find(tier.pool, key, group)
    if tier_id != NULL_PAGE:
        renew(tier.pool, tier_id)
    elif tier.uses != NULL and tier.uses[page_id] < tier.min_uses:
        return
    elif tier.pool.num_free == 0 or not reserve_transfers(tier, 1):
        tier.num_refused += 1
    else:
        note_save(tier, key, group, page_id, False)


cdef inline void save_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Have a page that is evicted saved, unless another one has its content."""
    cdef const Page *page = &pool.pages[page_id]
    if not page.group & TWIN:
        save_page(pool, page_id, digest_of(page), page.group & ~FLAGS)


cdef inline void drop_stale(Tier *tier) noexcept nogil:
    """Drop fresh pages that were cached again since: one is left of each page at most."""
    cdef Py_ssize_t i, num_left = 0, num_ready = 0
    for i in range(tier.num_fresh):
        if tier.fresh_numbers[tier.fresh[i].page_id] == tier.fresh[i].number:
            tier.fresh[num_left] = tier.fresh[i]
            num_left += 1
            num_ready += i < tier.num_ready
    tier.num_fresh, tier.num_ready = num_left, num_ready


cdef inline void note_cached(Pool *pool, int32_t page_id) noexcept nogil:
    """Note that a page was cached: to count its uses, and to save it once a step has computed it, if the tier writes through.
    Where memory is short it is saved when it is evicted.
    """
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t capacity = max(<Py_ssize_t>64, 2 * tier.fresh_capacity)
    if tier.uses != NULL:
        tier.uses[page_id] = 1
    if tier.fresh_numbers == NULL or tier.loading[page_id]:
        return
    if tier.num_fresh >= 2 * <Py_ssize_t>pool.num_pages:  # no step ended for long
        drop_stale(tier)
    tier.num_cached += 1
    tier.fresh_numbers[page_id] = tier.num_cached
    if tier.num_fresh == tier.fresh_capacity and resize(<void **>&tier.fresh, capacity * sizeof(FreshPage)):
        tier.fresh_capacity = capacity
    if tier.num_fresh < tier.fresh_capacity:
        tier.fresh[tier.num_fresh] = FreshPage(page_id, tier.num_cached)
        tier.num_fresh += 1


cdef inline bint is_other_twin(Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a cached page has the content of another that was cached before."""
    cdef const Page *page = &pool.pages[page_id]
    return page.group & TWIN and find(pool, digest_of(page), page.group & ~FLAGS) != page_id


cdef inline void save_fresh(Pool *pool) noexcept nogil:
    """Have the pages saved that were cached before the last step ended, and still are."""
    cdef Tier *tier = pool.tier
    cdef FreshPage fresh
    cdef const Page *page
    cdef Py_ssize_t i
    for i in range(tier.num_ready):
        fresh = tier.fresh[i]
        page = &pool.pages[fresh.page_id]
        if page.group != NO_GROUP and tier.fresh_numbers[fresh.page_id] == fresh.number:
            if not is_other_twin(pool, fresh.page_id):
                save_page(pool, fresh.page_id, digest_of(page), page.group & ~FLAGS)
    tier.num_fresh -= tier.num_ready
    for i in range(tier.num_fresh if tier.num_ready else 0):
        tier.fresh[i] = tier.fresh[tier.num_ready + i]
    tier.num_ready = 0


cdef inline void end_save(Tier *tier, const Transfer *transfer, bint is_done) noexcept nogil:
    """Cache the page of the tier that was filled, unless there is one with its content, or it is void."""
    cdef Ranking ranking = Ranking(0, 0)
    cdef int32_t page_id = transfer.tier_id
    tier.fills[page_id] = FILLED if is_done else UNFILLED
    if is_done and not transfer.is_void and find(tier.pool, transfer.key, transfer.group) == NULL_PAGE:
        if enter(tier.pool, page_id, transfer.key, transfer.group) and tier.pool.num_parts:
            rank(tier.pool, &ranking, &page_id, 0, transfer.key, transfer.group)
        if is_journaled(tier.pool):
            note_entry(tier.pool, page_id, Origin(Digest(0, 0), 0, 0))
    put_back(tier.pool, page_id)


cdef inline void end_load(Pool *pool, const Transfer *transfer, bint is_done) noexcept nogil:
    """Let go of both pages. They lose their entries if the load failed."""
    cdef Tier *tier = pool.tier
    tier.loading[transfer.page_id] = 0
    if not is_done and has_key(&pool.pages[transfer.page_id], transfer.key, transfer.group):
        drop(pool, transfer.page_id)
    if not is_done and has_key(&tier.pool.pages[transfer.tier_id], transfer.key, transfer.group):
        drop(tier.pool, transfer.tier_id)
    put_back(pool, transfer.page_id)
    put_back(tier.pool, transfer.tier_id)


cdef inline void drop_from_tier(Tier *tier, Digest key, int32_t group) noexcept nogil:
    """Drop the entry of a wrong content, if there is a tier. What is being saved of it gets none."""
    cdef int32_t tier_id
    cdef Py_ssize_t i
    if tier == NULL:
        return
    tier_id = find(tier.pool, key, group)
    if tier_id != NULL_PAGE:
        drop(tier.pool, tier_id)
    for i in range(tier.num):
        if tier.items[i].group == group and tier.items[i].key.lo == key.lo and tier.items[i].key.hi == key.hi:
            tier.items[i].is_void = True


cdef inline void drop_everywhere(Pool *pool, int32_t page_id) noexcept nogil:
    """Drop the entry of a page with a wrong content, in the tier too."""
    cdef Digest key = digest_of(&pool.pages[page_id])
    cdef int32_t group = pool.pages[page_id].group & ~FLAGS
    drop(pool, page_id)
    drop_from_tier(pool.tier, key, group)


cdef inline void empty_tier(Tier *tier) noexcept nogil:
    """Drop all entries of the tier; what is in flight gets none."""
    cdef int32_t page_id
    cdef Py_ssize_t i
    for i in range(tier.num):
        tier.items[i].is_void = True
    for page_id in range(1, tier.pool.num_pages):
        if tier.pool.pages[page_id].group != NO_GROUP:
            drop(tier.pool, page_id)
    if is_journaled(tier.pool):
        note_clear(&tier.pool.journal)


cdef inline void find_oldest_load(Tier *tier) noexcept nogil:
    cdef Py_ssize_t i
    tier.oldest_load = INT64_MAX
    for i in range(tier.num):
        if tier.items[i].is_load:
            tier.oldest_load = min(tier.oldest_load, tier.items[i].number or tier.last_number + 1)
