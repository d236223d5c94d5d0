# The prefix index: the page that is cached under a key.
#
# It is an open-addressing table with linear probing. Deletion shifts entries back (Knuth, The Art of Computer Programming, vol.
# 3, 6.4, algorithm R), so there are no tombstones and a miss stays short forever. Pools that report changes have a `Journal`.
#
# Always:
#
# * The index has one slot for each pair of key and group; the slot names the page cached first under them. At most half of the
#   slots are used.
# * Later pages with the same content follow the first one in a ring of `Links`, in the order in which they were cached. `TWIN`
#   is set in exactly the pages of rings of two or more.
# * If the pool prefers held pages (`prefer_held`), the held pages of a ring come before the free ones. A page that loses its
#   last reference goes to the end of its ring. A page that gets its first one, or is held and joins free pages, goes after the
#   first page of the ring or, if that page is free, before it.
# * With shards, the twins in each shard also form a ring in that order. The first twins of all shards form one more ring, in
#   any order, so that the first twin in a shard is found in O(shards).
# * The journal's ring of new keys has the first page of each key that is in the index and was not when changes were last taken.
#   `removed` has, once each, the keys that were in the index then and have left it.

from libc.stdint cimport int32_t, uint32_t, uint64_t

from pagepool.core.pool.banks cimport *

cdef enum:
    NOT_FIRST = -1            # links of a page with an earlier twin in its shard


# The journal records net changes, so its size is bounded: a new key that leaves again is not recorded.


cdef inline bint is_journaled(const Pool *pool) noexcept nogil:
    return rare(pool.journal.notes != NULL)


cdef inline void record_entry(Pool *pool, int32_t page_id, Origin origin) noexcept nogil:
    """Record where a newly cached page came from."""
    cdef Journal *journal = &pool.journal
    assert pool.pages[page_id].group != NO_GROUP
    journal.notes[page_id].origin = origin
    use_context(journal, origin.context, 1)
    if not pool.pages[page_id].group & TWIN:
        link_new(journal, page_id)


cdef inline void record_drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Record that a page loses its entry. If it has twins, the key stays, and the next twin becomes the first."""
    cdef Journal *journal = &pool.journal
    cdef Note *note = &journal.notes[page_id]
    cdef Page *page = &pool.pages[page_id]
    use_context(journal, note.origin.context, -1)
    if note.new.next != NOT_NEW:
        unlink_new(journal, page_id)
        if page.group & TWIN:
            link_new(journal, pool.twins[page_id].next)
    elif not page.group & TWIN:
        if rare(pool.uppers != NULL):
            uppers_of_removed(pool)[journal.num_removed] = pool.uppers[page_id]
        note_removal(journal, digest_of(page), page.group & ~FLAGS)
        assert journal.num_removed <= pool.num_pages


# Twins: pages of equal content are in one ring for each key and, with shards, in one more ring for each shard.


cdef inline int32_t _find_twin(Pool *pool, int32_t first, Range ids) noexcept nogil:
    """Return the first page with an id in `ids`, in the ring that begins with `first`, or NULL_PAGE. O(shards) if `ids` are in
    one shard, else O(pages of equal content).
    """
    cdef Links *ring = pool.twins
    cdef int32_t page_id
    if pool.num_shards and shard_queue_of(pool, ids.start) == shard_queue_of(pool, ids.stop - 1):
        ring = pool.shard_twins
        first = _find_shard_first(pool, first, shard_queue_of(pool, ids.start))
    page_id = first
    while page_id != NULL_PAGE and not ids.start <= page_id < ids.stop:
        page_id = ring[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline int32_t _find_shard_first(Pool *pool, int32_t first, int32_t queue) noexcept nogil:
    """Return the first twin in the shard of a queue, or NULL_PAGE; `first` is the first twin in the pool. O(shards)."""
    cdef int32_t page_id = first
    while shard_queue_of(pool, page_id) != queue:
        page_id = pool.shard_firsts[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline void _join_twins(Pool *pool, Slot *slot, int32_t page_id) noexcept nogil:
    """Add a page to the ring of the page in a slot: at the ring's end, or before free pages. O(1), with shards O(shards)."""
    cdef int32_t first = slot.page_id
    assert page_id != first and has_key(&pool.pages[page_id], digest_of(&pool.pages[first]), pool.pages[first].group & ~FLAGS)
    if not pool.pages[first].group & TWIN:
        pool.twins[first] = Links(prev=first, next=first)
        pool.pages[first].group |= TWIN
        if pool.num_shards:
            _begin_shard_twins(pool, first)
    pool.pages[page_id].group |= TWIN
    if pool.join_held_twin != NULL and is_free(pool, pool.twins[first].prev) and not is_free(pool, page_id):
        pool.join_held_twin(pool, slot, page_id)
        return
    link_after(pool.twins, pool.twins[first].prev, page_id)
    if pool.num_shards:
        _join_shard_twins(pool, first, page_id)


cdef inline void unwatch(Pool *pool, int32_t page_id) noexcept nogil:
    """Clear the WATCHED flag of a cached page that refused requests would no longer hit, or would hit at another price."""
    pool.num_unwatched += (pool.pages[page_id].group & WATCHED) != 0
    pool.pages[page_id].group &= ~WATCHED


cdef inline void link_before_free(Pool *pool, Slot *slot, int32_t page_id) noexcept nogil:
    """Put a held page into the ring of the page in a slot: after that page or, if that page is free, before it."""
    cdef int32_t first = slot.page_id
    cdef bint becomes_first = is_free(pool, first)
    link_after(pool.twins, pool.twins[first].prev if becomes_first else first, page_id)
    if pool.num_shards:
        _link_before_free_in_shard(pool, first, page_id, becomes_first)
    if becomes_first:
        unwatch(pool, first)
        _let_lead(pool, slot, page_id)


cdef inline void _let_lead(Pool *pool, Slot *slot, int32_t page_id) noexcept nogil:
    """Let a ring, whose first page is in a slot, begin with another of its pages."""
    if is_journaled(pool) and pool.journal.notes[slot.page_id].new.next != NOT_NEW:
        replace_new(&pool.journal, slot.page_id, page_id)
    slot.page_id = page_id


cdef inline void _link_before_free_in_shard(Pool *pool, int32_t first, int32_t page_id, bint becomes_first) noexcept nogil:
    """Put a page into its shard's ring: after `first`, if `first` is in the shard and stays first of all, else in front."""
    cdef int32_t shard_first = _find_shard_first(pool, first, shard_queue_of(pool, page_id))
    if shard_first == NULL_PAGE:
        _begin_shard_twins(pool, page_id)
        link_after(pool.shard_firsts, first, page_id)
    elif shard_first == first and not becomes_first:
        pool.shard_firsts[page_id] = Links(prev=NOT_FIRST, next=NOT_FIRST)
        link_after(pool.shard_twins, first, page_id)
    else:
        unwatch(pool, shard_first)
        link_after(pool.shard_twins, pool.shard_twins[shard_first].prev, page_id)
        _begin_shard_at(pool, shard_first, page_id)


cdef inline void _begin_shard_at(Pool *pool, int32_t shard_first, int32_t page_id) noexcept nogil:
    """Let a shard's ring, which begins with `shard_first`, begin with another of its pages."""
    link_after(pool.shard_firsts, shard_first, page_id)
    unlink(pool.shard_firsts, shard_first)
    pool.shard_firsts[shard_first] = Links(prev=NOT_FIRST, next=NOT_FIRST)


cdef inline void come_forward(Pool *pool, int32_t page_id) noexcept nogil:
    """Move a page with twins, which has left the free queue for a holder, before its free twins. O(1), with shards O(shards).
    """
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~FLAGS
    cdef Slot *slot = _slot_for(pool, digest_of(page), group, _tag_of(pool, page.key_lo, group))
    assert page.group & TWIN
    if slot.page_id == page_id:
        return
    unlink(pool.twins, page_id)
    if pool.num_shards:
        _leave_shard_twins(pool, page_id)
    link_before_free(pool, slot, page_id)


cdef inline void go_back(Pool *pool, int32_t page_id) noexcept nogil:
    """Move a page with twins, which lost its last holder, to the end of its ring. O(1), with shards O(shards)."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~FLAGS
    cdef Slot *slot = _slot_for(pool, digest_of(page), group, _tag_of(pool, page.key_lo, group))
    assert page.group & TWIN
    if pool.num_shards:
        _go_back_in_shard(pool, slot.page_id, page_id)
    if slot.page_id == page_id:
        _let_lead(pool, slot, pool.twins[page_id].next)
        return
    unlink(pool.twins, page_id)
    link_after(pool.twins, pool.twins[slot.page_id].prev, page_id)


cdef inline void _go_back_in_shard(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Move a page to the end of its shard's ring."""
    cdef int32_t shard_first = _find_shard_first(pool, first, shard_queue_of(pool, page_id))
    if pool.shard_twins[page_id].next == page_id:
        return
    if shard_first == page_id:
        _begin_shard_at(pool, page_id, pool.shard_twins[page_id].next)
        return
    unlink(pool.shard_twins, page_id)
    link_after(pool.shard_twins, pool.shard_twins[shard_first].prev, page_id)


cdef inline void _begin_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page alone into two new rings: of the twins in its shard, and of the first twins of all shards."""
    pool.shard_twins[page_id] = Links(prev=page_id, next=page_id)
    pool.shard_firsts[page_id] = Links(prev=page_id, next=page_id)


cdef inline void _join_shard_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Append the newest twin of `first` to the ring of its shard."""
    cdef int32_t shard_first = _find_shard_first(pool, first, shard_queue_of(pool, page_id))
    assert shard_first == NULL_PAGE or pool.shard_firsts[shard_first].next != NOT_FIRST
    if shard_first == NULL_PAGE:
        _begin_shard_twins(pool, page_id)
        link_after(pool.shard_firsts, first, page_id)
    else:
        pool.shard_firsts[page_id] = Links(prev=NOT_FIRST, next=NOT_FIRST)
        link_after(pool.shard_twins, pool.shard_twins[shard_first].prev, page_id)


cdef inline void _leave_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of its shard's ring. If it was the first twin there, the next twin takes its place."""
    cdef int32_t following = pool.shard_twins[page_id].next
    unlink(pool.shard_twins, page_id)
    if pool.shard_firsts[page_id].next != NOT_FIRST:
        if following != page_id:
            link_after(pool.shard_firsts, page_id, following)
        unlink(pool.shard_firsts, page_id)


cdef inline void link_shard_twins(Pool *pool) noexcept nogil:
    """Build the rings of all shards from the rings of twins. O(num_pages + twins x shards)."""
    cdef Py_ssize_t i
    cdef int32_t first, page_id
    for i in range(num_slots_of(pool)):
        first = pool.slots[i].page_id
        if first != NULL_PAGE and pool.pages[first].group & TWIN:
            _begin_shard_twins(pool, first)
            page_id = pool.twins[first].next
            while page_id != first:
                _join_shard_twins(pool, first, page_id)
                page_id = pool.twins[page_id].next


cdef inline void _leave_twins(Pool *pool, int32_t page_id, Slot *slot) noexcept nogil:
    """Take a page out of its ring of twins. If `slot` names it, it was the first, and the next twin takes its place."""
    cdef int32_t following = pool.twins[page_id].next
    assert following != page_id and pool.pages[following].group & TWIN
    unlink(pool.twins, page_id)
    if pool.num_shards:
        _leave_shard_twins(pool, page_id)
    if pool.twins[following].next == following:
        pool.pages[following].group &= ~TWIN
    if slot.page_id == page_id:
        slot.page_id = following


cdef inline uint32_t _tag_of(Pool *pool, uint64_t key_lo, int32_t group) noexcept nogil:
    return <uint32_t>(((key_lo ^ <uint64_t>group << 40) * pool.multiplier) >> 32)


cdef inline uint32_t _home_at(const Pool *pool, uint32_t tag) noexcept nogil:
    """Return the slot where a look-up begins: the upper bits of the tag. The tag's lower bits depend only on the lower bits of
    the key, so keys could be chosen to collide in them.
    """
    return tag >> pool.home_shift


cdef inline Slot *home_of(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """Return the slot where a look-up begins."""
    return &pool.slots[_home_at(pool, _tag_of(pool, key.lo, group))]


cdef inline bint has_key(const Page *page, Digest key, int32_t group) noexcept nogil:
    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~FLAGS) == group


cdef inline Slot *_slot_for(Pool *pool, Digest key, int32_t group, uint32_t tag) noexcept nogil:
    """Return the slot of the key, or the empty slot that ends the search."""
    cdef uint32_t i = _home_at(pool, tag)
    while pool.slots[i].page_id != NULL_PAGE:
        if pool.slots[i].tag == tag and has_key(&pool.pages[pool.slots[i].page_id], key, group):
            break
        i = (i + 1) & pool.mask
    return &pool.slots[i]


cdef inline int32_t find(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """Return the first page with a key and group, or NULL_PAGE."""
    return _slot_for(pool, key, group, _tag_of(pool, key.lo, group)).page_id


cdef inline int32_t find_within(Pool *pool, Digest key, int32_t group, Range ids) noexcept nogil:
    """Return the first page with a key and group and with an id in `ids`, or NULL_PAGE."""
    cdef int32_t first = find(pool, key, group)
    if first == NULL_PAGE or ids.start <= first < ids.stop:
        return first
    return _find_twin(pool, first, ids) if pool.pages[first].group & TWIN else <int32_t>NULL_PAGE


cdef inline bint add_entry(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Give an entry to a page without one, and return whether no other page has the key. The index is never full: it has at
    least two slots for each page.
    """
    cdef Page *page = &pool.pages[page_id]
    cdef uint32_t tag = _tag_of(pool, key.lo, group)
    cdef Slot *slot = _slot_for(pool, key, group, tag)
    assert 0 < page_id < pool.num_pages and page.group == NO_GROUP
    page.key_lo = key.lo
    page.key_hi = key.hi
    page.group = group
    pool.num_entries += 1
    if rare(slot.page_id != NULL_PAGE):
        _join_twins(pool, slot, page_id)
        return False
    slot[0] = Slot(tag=tag, page_id=page_id)
    pool.num_keys += 1
    assert pool.num_keys <= pool.num_entries < pool.num_pages and pool.num_keys <= num_slots_of(pool) // 2
    return True


cdef inline bint is_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is cached, and a look-up of its key finds this page, not a twin."""
    cdef Page *page = &pool.pages[page_id]
    if page.group == NO_GROUP:
        return False
    return not page.group & TWIN or find(pool, digest_of(page), page.group & ~FLAGS) == page_id


cdef inline bint is_cached_otherwise(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Whether a page has an entry under another key; False for the null page."""
    return page_id != NULL_PAGE and pool.pages[page_id].group != NO_GROUP and not has_key(&pool.pages[page_id], key, group)


cdef inline Slot *_slot_of(Pool *pool, int32_t page_id, uint32_t tag) noexcept nogil:
    """Return the slot that names a page. No slot names a later twin: for a later twin, return the empty slot that ends the
    search.
    """
    cdef uint32_t i = _home_at(pool, tag)
    while pool.slots[i].page_id != page_id and pool.slots[i].page_id != NULL_PAGE:
        i = (i + 1) & pool.mask
    return &pool.slots[i]


cdef inline void _empty_slot(Pool *pool, uint32_t hole) noexcept nogil:
    """Empty a slot and shift back the entries behind it that would no longer be found."""
    cdef uint32_t i = (hole + 1) & pool.mask
    while pool.slots[i].page_id != NULL_PAGE:
        if ((i - _home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):
            pool.slots[hole] = pool.slots[i]
            hole = i
        i = (i + 1) & pool.mask
    pool.slots[hole].page_id = NULL_PAGE
    pool.num_keys -= 1
    assert 0 <= pool.num_keys < pool.num_entries


cdef inline void remove_entry(Pool *pool, int32_t page_id) noexcept nogil:
    """Remove the entry of a page. The next twin takes its place."""
    cdef Page *page = &pool.pages[page_id]
    cdef Slot *slot = _slot_of(pool, page_id, _tag_of(pool, page.key_lo, page.group & ~FLAGS))
    assert 0 < page_id < pool.num_pages and page.group != NO_GROUP
    assert slot.page_id == page_id or (page.group & TWIN and slot.page_id == NULL_PAGE)
    if rare(page.group & TWIN):
        _leave_twins(pool, page_id, slot)
    else:
        _empty_slot(pool, <uint32_t>(slot - pool.slots))
    page.group = NO_GROUP
    pool.num_entries -= 1
    assert 0 <= pool.num_keys <= pool.num_entries
