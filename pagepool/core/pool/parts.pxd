# Division of the free queue into parts while it is in use: by entries, then by terms, then by tenants.
#
# Always:
#
# * All banks have the same parts. A division is never undone, and needs the division before it.
# * A division keeps the order of the pages within each part.

from libc.stdint cimport int32_t, uint32_t, uint8_t

from pagepool.core.pool.queue cimport *


cdef inline void begin_plain_parts(Pool *pool) noexcept nogil:
    """Divide the queue of each bank, which has no parts, into a blank part and a part of cached pages. O(num_pages)."""
    cdef Page *pages = pool.pages
    cdef int32_t[MAX_BANKS] first
    cdef int32_t bank, page_id, following
    assert pool.num_parts == 0 and pool.policy == NULL
    for bank in range(pool.num_banks):
        first[bank] = pages[end_of_queue(pool, queue_of_bank(bank))].next_free
    pool.num_parts = pool.num_parts_each = count_plain_parts(pool)
    pool.is_divided = True
    begin_queues(pool)
    for bank in range(pool.num_banks):
        page_id = first[bank]
        while is_page(pool, page_id):
            following = pages[page_id].next_free
            pages[page_id].prev_free = NOT_FREE
            link_page(pool, page_id, end_of_part(pool, part_of(pool, page_id), queue_of_bank(bank)))
            count_in_bank(pool, queue_of_bank(bank), 1)
            page_id = following


cdef inline void _add_parts(Pool *pool, int32_t num_parts) noexcept nogil:
    """Add empty parts at the back of each bank's queue, which has parts, until there are `num_parts`. The dividers and ends of
    later banks move up. O(parts).
    """
    cdef Page *pages = pool.pages
    cdef int32_t bank, part, record, target, num_before = pool.num_parts
    assert 0 < num_before < num_parts
    for bank in range(pool.num_banks - 1, 0, -1):
        for part in range(num_before - 1, -2, -1):
            record = start_of_part(pool, part, queue_of_bank(bank))
            target = record + bank * (num_parts - num_before)
            pages[target] = pages[record]
            pages[pages[target].prev_free].next_free = target
            pages[pages[target].next_free].prev_free = target
    pool.num_parts = num_parts
    for bank in range(pool.num_banks):
        for part in range(num_before, num_parts):
            link_divider(
                pages, start_of_part(pool, part, queue_of_bank(bank)), end_of_queue(pool, queue_of_bank(bank)),
            )


cdef inline void begin_terms(Pool *pool, uint32_t *stamps) noexcept nogil:
    """Divide the queue of each bank, which has parts, by terms. The memory at `stamps` is zeroed, and has room for terms and
    tenants as well. Free pages count as released now. O(num_pages).
    """
    cdef int32_t page_id
    cdef uint32_t now = <uint32_t>now_of(&pool.expected)
    assert stamps != NULL and pool.expected.stamps == NULL and pool.num_parts > NEW
    pool.expected.stamps, pool.expected.terms = stamps, <uint8_t *>(stamps + pool.num_pages)
    for page_id in range(pool.num_pages):
        stamps[page_id] = now
    _add_parts(pool, pool.num_parts + NEVER)
    pool.num_parts_each = pool.num_parts


cdef inline void begin_tenants(Pool *pool) noexcept nogil:
    """Divide the queue of each bank, which has terms, by tenants too. Charge all but blank pages to COMMON. O(num_pages)."""
    cdef int32_t bank, page_id
    assert pool.expected.terms != NULL and pool.tenants.of_pages == NULL
    _add_parts(pool, MAX_TENANTS * pool.num_parts_each)
    pool.tenants.of_pages = pool.expected.terms + pool.num_pages
    pool.tenants.shares[COMMON] = 1
    for bank in range(pool.num_banks):
        pool.tenants.num_charged[bank][COMMON] = count_pages_in(pool, queue_of_bank(bank))
    for page_id in range(1, pool.num_pages):
        if is_put_away(pool, page_id) or (is_free(pool, page_id) and part_of(pool, page_id) == BLANK):
            end_charge(&pool.tenants, bank_of(pool, page_id), page_id)
        elif is_free(pool, page_id):
            pool.tenants.num_free[bank_of(pool, page_id)][COMMON] += 1


cdef inline void join_common(Pool *pool, uint8_t tenant) noexcept nogil:
    """Charge the pages of a tenant to the common tenant, and merge its free pages with the common ones in order of release. The
    caller rebuilds the queues of shards. O(num_pages).
    """
    cdef int32_t bank, page_id
    for bank in range(pool.num_banks):
        _merge_with_common(pool, tenant, queue_of_bank(bank))
    for page_id in range(1, pool.num_pages):
        if pool.tenants.of_pages[page_id] == tenant:
            charge(&pool.tenants, bank_of(pool, page_id), page_id, COMMON)


cdef inline void _merge_with_common(Pool *pool, uint8_t tenant, int32_t queue) noexcept nogil:
    """Move a tenant's pages in a queue to the common parts, each before the pages that were released later."""
    cdef int32_t part, page_id, target, bank = bank_of_queue(pool, queue)
    assert tenant != COMMON and pool.tenants.of_pages != NULL
    for part in range(NEW, pool.num_parts_each):
        target = oldest_in(pool, part, queue)
        page_id = oldest_in(pool, tenant * pool.num_parts_each + part, queue)
        while page_id != NULL_PAGE:
            pull(pool, page_id)
            charge(&pool.tenants, bank, page_id, COMMON)
            while target != NULL_PAGE and not is_older(&pool.expected, page_id, target):
                target = record_behind(pool, target, queue)
                target = target if is_page(pool, target) else <int32_t>NULL_PAGE
            link_counted(pool, page_id, queue, target if target != NULL_PAGE else end_of_part(pool, part, queue))
            page_id = oldest_in(pool, tenant * pool.num_parts_each + part, queue)
    assert pool.tenants.num_free[bank][tenant] == 0


cdef inline void link_shards(Pool *pool) noexcept nogil:
    """Build the queue of each shard from the queue of its bank. O(free pages)."""
    cdef int32_t bank, page_id, shard, end, part
    for shard in range(pool.num_banks * pool.num_shards):
        pool.shard_num_free[shard] = 0
        end = end_of_queue(pool, shard)
        pool.shard_links[end] = Links(prev=end, next=end)
        for part in range(pool.num_parts):
            link_after(pool.shard_links, end + part, end + part + 1)
    for bank in range(pool.num_banks):
        part = NO_PART
        end = end_of_queue(pool, queue_of_bank(bank))
        page_id = pool.pages[end].next_free
        while page_id != end:
            if page_id >= pool.num_pages:
                part = page_id - start_of_part(pool, 0, queue_of_bank(bank))
            else:
                shard = shard_queue_of(pool, page_id)
                push_to_shard(pool, page_id, shard, end_of_part(pool, part, shard))
            page_id = pool.pages[page_id].next_free
