# The arrays of a pool are allocated, divided and freed here. If memory is short, nothing changes.
#
# Always:
#
# * The records of pages come first, the records of ends and dividers after them.
# * The links, counts, known newest pages and twins of shards are in one allocation; stamps, terms and tenants are in another.
# * At most half of the index's slots are used.

from libc.stdint cimport int32_t, uint32_t, uint8_t

from pagepool.core.base cimport resize
from pagepool.core.pool.parts cimport *
from pagepool.core.pool.pool cimport *


cdef inline bint add_records(Pool *pool, Py_ssize_t *capacity, Py_ssize_t num_pages) noexcept nogil:
    """Add records, neither free nor cached, until there are `num_pages`; False if memory is short. Amortised O(1) a record."""
    cdef Py_ssize_t i, increased = max(num_pages, 2 * capacity[0])
    assert 0 <= pool.num_pages <= num_pages and pool.num_banks > 0
    if num_pages > capacity[0]:
        if not resize(<void **>&pool.pages, increased * sizeof(Page)):
            return False
        capacity[0] = increased
    for i in range(pool.num_pages, num_pages):
        pool.pages[i] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=NOT_FREE, next_free=NOT_FREE, group=NO_GROUP)
    if pool.num_pages == 0:
        pool.pages[NULL_PAGE].prev_free = pool.pages[NULL_PAGE].next_free = NULL_PAGE
    pool.num_pages = pool.banks[pool.num_banks - 1].stop = <int32_t>num_pages
    assert is_free(pool, NULL_PAGE)
    return True


cdef inline bint make_index(Pool *pool) noexcept nogil:
    """Make an empty prefix index; False if memory is short."""
    cdef uint32_t num_slot_bits = 2
    while <Py_ssize_t>1 << num_slot_bits < 2 * <Py_ssize_t>pool.num_pages:
        num_slot_bits += 1
    pool.slots = <Slot *>raw_calloc(<size_t>1 << num_slot_bits, sizeof(Slot))
    pool.mask, pool.home_shift = (<uint32_t>1 << num_slot_bits) - 1, 32 - num_slot_bits
    assert <Py_ssize_t>pool.mask + 1 >= 2 * <Py_ssize_t>pool.num_pages
    return pool.slots != NULL and resize(<void **>&pool.twins, pool.num_pages * sizeof(Links))


cdef inline Py_ssize_t _count_remembered(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Count the `Links` that hold `shard_newest`, two ids each."""
    return num_shards * NUM_PARTS // 2 if pool.policy != NULL else 0


cdef inline Links *new_shard_links(const Pool *pool, Py_ssize_t num_shards) noexcept nogil:
    """Allocate the links of shards; NULL if memory is short."""
    cdef Py_ssize_t num_twins = pool.num_pages if pool.slots != NULL else 0
    cdef Py_ssize_t num_links = count_queue_links(pool, num_shards) + pool.num_banks * num_shards
    num_links += _count_remembered(pool, num_shards)
    return <Links *>raw_calloc(num_links + 2 * num_twins, sizeof(Links))


cdef inline void use_shard_links(Pool *pool, Links *links, int32_t num_shards) noexcept nogil:
    """Divide a locked pool into shards with these links. O(num_pages + pages of equal content x shards)."""
    cdef Links *newest = links + count_queue_links(pool, num_shards) + pool.num_banks * num_shards
    cdef int32_t bank
    assert links != NULL and num_shards > 0
    raw_free(pool.shard_links)
    pool.shard_links = links
    pool.shard_num_free = <int32_t *>(newest - pool.num_banks * num_shards)
    pool.shard_newest = <int32_t *>newest
    pool.shard_twins = newest + _count_remembered(pool, num_shards) if pool.slots != NULL else <Links *>NULL
    pool.shard_firsts = pool.shard_twins + pool.num_pages
    pool.num_shards, pool.is_divided = num_shards, True
    for bank in range(pool.num_banks):
        pool.banks[bank].pages_per_shard = (count_pages_in(pool, queue_of_bank(bank)) + 1) // num_shards
    link_shards(pool)
    link_shard_twins(pool)


cdef inline bint divide(Pool *pool, bint by_terms, bint by_tenants) noexcept nogil:
    """Divide the queues of a pool by entries, and optionally by terms and tenants; tenants need terms. Do nothing if they are
    divided so already, or caching is off. Return False, with nothing changed, if memory is short.
    """
    cdef Pool divided = pool[0]
    cdef Links *links = NULL
    cdef uint32_t *stamps = pool.expected.stamps
    cdef bint by_entry = pool.num_parts == 0
    by_terms = by_terms and stamps == NULL
    by_tenants = by_tenants and pool.tenants.of_pages == NULL
    assert not by_tenants or by_terms or stamps != NULL
    if pool.slots == NULL or not (by_entry or by_terms or by_tenants):
        return True
    divided.num_parts = count_plain_parts(pool) + (NEVER if by_terms or stamps != NULL else 0)
    divided.num_parts *= MAX_TENANTS if by_tenants else 1
    if pool.num_shards:
        links = new_shard_links(&divided, pool.num_shards)
    if by_terms and (links != NULL or not pool.num_shards):
        stamps = <uint32_t *>raw_calloc(pool.num_pages, sizeof(uint32_t) + 2 * sizeof(uint8_t))
    if (stamps == NULL and by_terms) or (links == NULL and pool.num_shards):
        raw_free(links)
        return False
    if by_entry:
        begin_plain_parts(pool)
    if by_terms:
        begin_terms(pool, stamps)
    if by_tenants:
        begin_tenants(pool)
    if pool.num_shards:
        use_shard_links(pool, links, pool.num_shards)
    assert pool.num_parts == divided.num_parts
    return True


cdef inline void _free_entries(Pool *pool) noexcept nogil:
    """Free the prefix index, with the tokens and origins of cached pages."""
    raw_free(pool.slots)
    raw_free(pool.twins)
    raw_free(pool.page_tokens)
    raw_free(pool.uppers)
    raw_free(pool.journal.notes)
    raw_free(pool.journal.contexts)
    raw_free(pool.departed.memory)


cdef inline void _free_owners(Pool *pool) noexcept nogil:
    """Free the arrays of leases, sessions and terms."""
    raw_free(pool.leases.counts)
    raw_free(pool.sessions.links)
    raw_free(pool.sessions.items)
    raw_free(pool.expected.stamps)


cdef inline void free_arrays(Pool *pool) noexcept nogil:
    """Free all arrays except the records of pages."""
    cdef Py_ssize_t bank
    for bank in range(MAX_BANKS):
        raw_free(pool.banks[bank].ghost.memory)
        if pool.banks[bank].checkpoints != NULL:
            raw_free(pool.banks[bank].checkpoints.notes)
        raw_free(pool.banks[bank].checkpoints)
    free_policy(pool.policy)
    _free_entries(pool)
    _free_owners(pool)
    raw_free(pool.shard_links)
    raw_free(pool.residency)
    raw_free(pool.dependents.state_groups)
    raw_free(pool.children)
    raw_free(pool.copies.items)
