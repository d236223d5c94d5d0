# Transfers of pages between a pool and the tier behind it: queued here, made by the caller who takes them. The lock of the pool
# guards pool and tier.

from libc.stdint cimport INT64_MAX, int32_t

from pagepool.core.base cimport Digest, rare, reserve_items
from pagepool.core.pool cimport (
    NO_GROUP, NO_SESSION, NULL_PAGE, Pool, Tier, Transfer, end_of_queue, fetch_entry, queue_of, record_behind, take, upper_of,
)


cdef inline bint reserve_transfers(Tier *tier, Py_ssize_t n) noexcept nogil:
    """Allocate room for `n` more transfers; False if memory is short."""
    return reserve_items(<void **>&tier.items, &tier.capacity, tier.num + n, sizeof(Transfer))


cdef inline void queue_transfer(Tier *tier, Transfer transfer) noexcept nogil:
    """Queue a transfer. There must be room. The transfer holds its page of the tier, a load its page of the pool, too."""
    assert tier.num_due <= tier.num < tier.capacity
    tier.items[tier.num] = transfer
    tier.num += 1
    tier.num_due += 1


cdef inline void queue_save(Pool *pool, Digest key, int32_t group, int32_t page_id) noexcept nogil:
    """Take a free page in the tier's bank of the same number as the page's, and queue the save. There must be room."""
    cdef Tier *tier = pool.tier
    cdef int32_t tier_id = NULL_PAGE, queue = queue_of(pool, page_id)
    take(tier.pool, &tier_id, 1, queue, NO_SESSION)
    fetch_entry(tier.pool, record_behind(tier.pool, end_of_queue(tier.pool, queue), queue))  # the next page to be taken
    if rare(tier.pool.uppers != NULL):
        tier.pool.uppers[tier_id] = upper_of(pool, page_id)
    assert tier.pool.pages[tier_id].ref_cnt == 1 and pool.pages[page_id].group != NO_GROUP
    queue_transfer(tier, Transfer(
        key=key, number=0, page_id=page_id, tier_id=tier_id, group=group, is_load=False, is_void=False,
    ))


cdef inline void find_oldest_load(Pool *pool) noexcept nogil:
    """Set `oldest_load` to the first list with unfinished loads; INT64_MAX: there is none."""
    cdef Tier *tier = pool.tier
    cdef Py_ssize_t i
    tier.oldest_load = INT64_MAX
    for i in range(tier.num):
        if tier.items[i].is_load:
            tier.oldest_load = min(tier.oldest_load, tier.items[i].number or pool.list_number)
