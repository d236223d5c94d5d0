# Transfers of pages between a pool and the tier behind it: queued here, done by whoever takes the list. The lock of the pool
# guards both.

from libc.stdint cimport INT64_MAX, int32_t

from pagepool.core.base.limits cimport NEVER
from pagepool.core.base.memory cimport reserve_items
from pagepool.core.base.siphash cimport Digest
from pagepool.core.pool.index cimport find
from pagepool.core.pool.pool cimport fetch_entry, give_back, hit, take
from pagepool.core.pool.queue cimport end_of_queue, record_behind
from pagepool.core.pool.records cimport (
    FILLING, FLAGS, NO_SESSION, NULL_PAGE, SAVED, TWIN, Page, Pool, Tier, Transfer, digest_of, term_of,
)


cdef inline bint reserve_transfers(Tier *tier, Py_ssize_t n) noexcept nogil:
    """Allocate room for `n` transfers more; False where memory is short."""
    return reserve_items(<void **>&tier.items, &tier.capacity, tier.num + n, sizeof(Transfer))


cdef inline void queue_transfer(Tier *tier, Transfer transfer) noexcept nogil:
    """Queue a transfer, for which there is room. It has a reference to the page of the tier, and a load one to its page too."""
    tier.items[tier.num] = transfer
    tier.num += 1
    tier.num_due += 1


cdef inline int32_t queue_save(Tier *tier, Digest key, int32_t group, int32_t page_id, bint is_void) noexcept nogil:
    """Take a free page of the tier for a page, and queue the transfer, for which there is room."""
    cdef int32_t tier_id = NULL_PAGE
    take(tier.pool, &tier_id, 1, -1, NO_SESSION)
    fetch_entry(tier.pool, record_behind(tier.pool, end_of_queue(tier.pool, -1), -1))  # of the page that is taken next
    tier.fills[tier_id] = FILLING
    queue_transfer(tier, Transfer(
        key=key, number=0, page_id=page_id, tier_id=tier_id, group=group, is_load=False, is_void=is_void,
    ))
    return tier_id


cdef inline bint save_page(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Have a page saved, if it is not in the tier, was used often enough, and a page of the tier is not in flight. Returns
    whether the tier has it, or gets it.
    """
    cdef Tier *tier = pool.tier
    cdef int32_t tier_id = find(tier.pool, key, group)
    if tier_id != NULL_PAGE:
        hit(tier.pool, &tier_id, 1, NO_SESSION)  # it is as one that was just used
        give_back(tier.pool, tier_id)
        return True
    if tier.uses != NULL and tier.uses[page_id] < tier.min_uses:
        return False
    if tier.pool.num_free == 0 or not reserve_transfers(tier, 1):
        tier.counters.num_refused_pages += 1
        return False
    queue_save(tier, key, group, page_id, False)
    return True


cdef inline void save_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Have a page that is evicted saved, unless another one has its content, nobody expects it back, or it was saved before:
    then the tier has evicted it since.
    """
    cdef const Page *page = &pool.pages[page_id]
    cdef bint was_saved = pool.tier.fresh_numbers != NULL and pool.tier.fresh_numbers[page_id] == SAVED
    if page.group & TWIN or term_of(pool, page_id) == NEVER:
        return
    if not was_saved or find(pool.tier.pool, digest_of(page), page.group & ~FLAGS) != NULL_PAGE:
        save_page(pool, page_id, digest_of(page), page.group & ~FLAGS)


cdef inline void find_oldest_load(Tier *tier) noexcept nogil:
    """Find the first list with loads that did not end, those that are due being in the next one."""
    cdef Py_ssize_t i
    tier.oldest_load = INT64_MAX
    for i in range(tier.num):
        if tier.items[i].is_load:
            tier.oldest_load = min(tier.oldest_load, tier.items[i].number or tier.last_number + 1)
