# Banks and their shards, by the numbers of their queues: which pages they have, and how many.
#
# Always: the first bank starts at record 1, the last stops at `num_pages`, and each starts where the one before it stops.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.pool.records cimport *

cdef enum:
    NO_BANK = -1

cdef struct Range:            # half-open range of page ids or places
    int32_t start
    int32_t stop

cdef struct LostHits:         # tokens after a hit, which would have hit, too, if nothing had been evicted
    int32_t states_bank       # bank of states that lacks a checkpoint; NO_BANK: none does
    int64_t num_for_states    # tokens to the last checkpoint evicted from that bank, within the hits of full attention
    int64_t num_for_pages     # to the last checkpoint after these hits, `lost_interval` times: 1 look-up in that many searches

cdef struct Ranges:           # pages that may hit, in each bank
    Range[MAX_BANKS] of_banks


cdef inline int32_t bank_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the bank of a page. O(banks)."""
    cdef int32_t bank = pool.num_banks - 1
    while bank and page_id < pool.banks[bank].start:
        bank -= 1
    return bank


cdef inline int32_t shard_queue_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the queue of a page's shard."""
    cdef int32_t bank = bank_of(pool, page_id)
    assert pool.num_shards > 0
    return bank * pool.num_shards + (page_id - pool.banks[bank].start + 1) // pool.banks[bank].pages_per_shard


cdef inline int32_t shard_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the shard of a page; 0 for the null page."""
    return shard_queue_of(pool, page_id) % pool.num_shards if pool.num_banks > 1 else shard_queue_of(pool, page_id)


cdef inline Bank counted_bank(const Pool *pool, int32_t bank) noexcept nogil:
    """Return a bank with its counts; a pool of one bank keeps some of them itself."""
    cdef Bank counted = pool.banks[bank]
    if pool.num_banks == 1:
        counted.num_free, counted.num_entries = pool.num_free, pool.num_entries
        counted.num_allocated_pages = pool.counters.num_allocated_pages
        counted.num_evicted_pages = pool.counters.num_evicted_pages
    return counted


cdef inline int32_t queue_of_bank(int32_t bank) noexcept nogil:
    """Return the number of a bank's queue."""
    return -1 - bank


cdef inline int32_t bank_of_queue(const Pool *pool, int32_t queue) noexcept nogil:
    """Return the bank whose pages are in a queue."""
    if queue < 0:
        return -1 - queue
    return queue // pool.num_shards if pool.num_banks > 1 else 0


cdef inline int32_t queue_in(const Pool *pool, int32_t bank, int32_t shard) noexcept nogil:
    """Return the queue of a shard in a bank; for shard -1, the queue of the bank."""
    return bank * pool.num_shards + shard if shard >= 0 else queue_of_bank(bank)


cdef inline void count_refusal(Pool *pool, int32_t queue) noexcept nogil:
    """Count a refused call in the bank whose queue has too few pages for it."""
    pool.banks[bank_of_queue(pool, queue)].num_refusals += 1


cdef inline int32_t id_in_bank(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the page id that users see; 0 for the null page."""
    return page_id - pool.banks[bank_of(pool, page_id)].start + 1 if page_id != NULL_PAGE else <int32_t>NULL_PAGE


cdef inline Range ids_in_queue(const Pool *pool, int32_t queue) noexcept nogil:
    """Return the ids of the shard with this queue; for the queue of a bank, the ids of the whole pool."""
    cdef int32_t bank, size, start
    if queue < 0:
        return Range(start=0, stop=pool.num_pages)
    bank = bank_of_queue(pool, queue)
    size = pool.banks[bank].pages_per_shard
    start = pool.banks[bank].start - 1 + (queue - bank * pool.num_shards) * size
    if bank and start < pool.banks[bank].start:  # the record before a later bank is a page of another bank
        return Range(start=start + 1, stop=start + size)
    return Range(start=start, stop=start + size)


cdef inline Ranges ids_in_shard(const Pool *pool, int32_t shard) noexcept nogil:
    """Return the ids of a shard in each bank; -1 means the whole pool."""
    cdef Ranges ids
    cdef int32_t bank
    for bank in range(pool.num_banks):
        ids.of_banks[bank] = ids_in_queue(pool, queue_in(pool, bank, shard))
    return ids


cdef inline int32_t count_pages_in(const Pool *pool, int32_t queue) noexcept nogil:
    """Count the pages of a bank or shard, held or free, without the null page."""
    if queue < 0:
        return pool.banks[-1 - queue].stop - pool.banks[-1 - queue].start
    return pool.banks[bank_of_queue(pool, queue)].pages_per_shard - (queue % pool.num_shards == 0)


cdef inline int32_t count_retired(const Pool *pool) noexcept nogil:
    """Count the pages that are out of use, in all banks."""
    cdef int32_t bank, count = 0
    for bank in range(pool.num_banks):
        count += pool.banks[bank].num_retired
    return count


cdef inline int32_t count_set_aside(const Pool *pool) noexcept nogil:
    """Count the pages that no request can have, in all banks."""
    cdef int32_t bank, count = 0
    for bank in range(pool.num_banks):
        count += pool.banks[bank].num_set_aside
    return count


cdef inline bint is_retired(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is at or above the size to which its bank was shrunk."""
    cdef const Bank *bank = &pool.banks[bank_of(pool, page_id)]
    return page_id >= bank.stop - bank.num_retired


cdef inline bint has_own_reference(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether one reference to a page is the pool's own: see retired.pxd."""
    return pool.pages[page_id].ref_cnt > 0 and is_retired(pool, page_id)


cdef inline bint is_put_away(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is retired and nobody has a reference to it, the pool included."""
    return pool.pages[page_id].ref_cnt == 0 and is_retired(pool, page_id)


cdef inline int32_t count_denied_in(const Pool *pool, int32_t queue) noexcept nogil:
    """Count the retired pages of a queue's bank; 0 if all are, since requests wait for that bank to grow."""
    cdef const Bank *bank = &pool.banks[bank_of_queue(pool, queue)]
    return bank.num_retired if bank.num_retired < bank.stop - bank.start else 0


cdef inline int32_t count_usable_in(const Pool *pool, int32_t queue) noexcept nogil:
    """Count the pages of a bank or shard that requests can have. Banks with retired pages or pages set aside are not divided.
    """
    cdef int32_t num_others = count_denied_in(pool, queue) + pool.banks[bank_of_queue(pool, queue)].num_set_aside
    return max(0, count_pages_in(pool, queue) - num_others)


cdef inline Py_ssize_t count_queue_links(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Count the links of the queues of shards: one for each page, for the end of each queue, and for each of its parts."""
    return pool.num_pages + pool.num_banks * num_shards * (1 + pool.num_parts)


cdef inline int32_t queue_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the queue of a page's bank."""
    return queue_of_bank(bank_of(pool, page_id))
