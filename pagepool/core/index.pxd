# The prefix index: which page is cached under a key.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy

from pagepool.core.ghost cimport hash_key, is_sampled
from pagepool.core.notes cimport is_journaled, note_drop, note_entry
from pagepool.core.levels cimport lose_level
from pagepool.core.platform cimport rare
from pagepool.core.queue cimport pull, push, requeue
from pagepool.core.records cimport (
    BLANK, FLAGS, MAX_GROUP, NO_GROUP, NULL_PAGE, TWIN, WATCHED, Origin, Page, Pool, Range, Ranking, Slot, digest_of,
    has_level, is_free, is_pinned, learns,
)
from pagepool.core.references cimport lose_pins
from pagepool.core.siphash cimport Digest
from pagepool.core.twins cimport find_twin, join_twins, leave_twins

cdef enum:
    MAX_UNSEEN = 4            # sampled keys


cdef inline uint32_t tag_of(Pool *pool, uint64_t key_lo, int32_t group) noexcept nogil:
    return <uint32_t>(((key_lo ^ <uint64_t>group << 40) * pool.multiplier) >> 32)


cdef inline uint32_t home_at(const Pool *pool, uint32_t tag) noexcept nogil:
    """The upper bits of a tag: the lower ones of a product depend on the lower ones of a key alone, and could be aimed at."""
    return tag >> pool.home_shift


cdef inline Slot *home_of(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The slot where a look-up begins."""
    return &pool.slots[home_at(pool, tag_of(pool, key.lo, group))]


cdef inline bint has_key(const Page *page, Digest key, int32_t group) noexcept nogil:
    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~FLAGS) == group


cdef inline Slot *slot_for(Pool *pool, Digest key, int32_t group, uint32_t tag) noexcept nogil:
    """The slot of the key, or the empty slot that ends the search."""
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != NULL_PAGE:
        if pool.slots[i].tag == tag and has_key(&pool.pages[pool.slots[i].page_id], key, group):
            break
        i = (i + 1) & pool.mask
    return &pool.slots[i]


cdef inline int32_t find(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The page cached first under the key, or NULL_PAGE."""
    return slot_for(pool, key, group, tag_of(pool, key.lo, group)).page_id


cdef inline int32_t find_within(Pool *pool, Digest key, int32_t group, Range ids) noexcept nogil:
    """The page cached first under the key among those with an id in `ids`, or NULL_PAGE."""
    cdef int32_t first = find(pool, key, group)
    if first == NULL_PAGE or ids.start <= first < ids.stop:
        return first
    return find_twin(pool, first, ids) if pool.pages[first].group & TWIN else <int32_t>NULL_PAGE


cdef inline bint enter(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Give a page without an entry the key; whether no other page has it. The index cannot be full: it has a slot for every two
    pages and more.
    """
    cdef Page *page = &pool.pages[page_id]
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef Slot *slot = slot_for(pool, key, group, tag)
    assert 0 < page_id < pool.num_pages and page.group == NO_GROUP
    page.key_lo = key.lo
    page.key_hi = key.hi
    page.group = group
    pool.num_cached += 1
    pool.num_entries += 1
    if rare(pool.tier != NULL):
        pool.tier.note_entry(pool, page_id)
    if rare(pool.num_parts != 0) and pool.policy.marks[page_id] != pool.policy.new_part:
        note_entered(pool, page_id)
    if rare(slot.page_id != NULL_PAGE):
        join_twins(pool, slot.page_id, page_id)
        return False
    slot[0] = Slot(tag, page_id)
    pool.num_keys += 1
    return True


cdef inline void note_entered(Pool *pool, int32_t page_id) noexcept nogil:
    """Make a page that was blank, in the queue or taken out of it as it is, a new one."""
    if is_free(pool, page_id):
        requeue(pool, page_id, pool.policy.new_part)
    elif pool.policy.marks[page_id] == BLANK:
        pool.policy.marks[page_id] = pool.policy.new_part


cdef inline void rank(
    Pool *pool, Ranking *ranking, const int32_t *ids, int32_t place, Digest key, int32_t group
) noexcept nogil:
    """Let the policy rank a page of a request that misses: by what it knows of its key, and so the pages since the last that it
    knew, for it samples keys. After `MAX_UNSEEN` keys in a row that it does not know the rest of the request is new. Do nothing
    in a pool that has levels and no policy.
    """
    cdef uint64_t word
    cdef uint32_t part
    cdef int32_t i
    if ranking.num_unseen == MAX_UNSEEN or not learns(pool):
        return
    word = hash_key(key, group)
    if not is_sampled(word):
        return
    part = pool.policy.note_miss(pool, word)
    if part == BLANK:
        ranking.num_unseen += 1
        return
    for i in range(ranking.num_ranked, place + 1):
        if ids[i] != NULL_PAGE and not is_free(pool, ids[i]):
            pool.policy.marks[ids[i]] = part
    ranking[0] = Ranking(place + 1, 0)


cdef inline bint is_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is cached, and the one that a look-up finds."""
    cdef Page *page = &pool.pages[page_id]
    if page.group == NO_GROUP:
        return False
    return not page.group & TWIN or find(pool, digest_of(page), page.group & ~FLAGS) == page_id


cdef inline Py_ssize_t find_entered(Pool *pool, const int32_t *ids, Range span) noexcept nogil:
    """Index of a page in ``ids[span]``, null pages aside, that has an entry or stands there before; -1: there is none."""
    cdef Py_ssize_t i, bad = -1
    for i in range(span.start, span.stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].group != NO_GROUP:
            bad = i
            break
        pool.pages[ids[i]].group = MAX_GROUP  # until all are checked
    for i in range(span.start, span.stop if bad < 0 else bad):
        if ids[i] != NULL_PAGE:
            pool.pages[ids[i]].group = NO_GROUP
    return bad


cdef inline Py_ssize_t enter_all(
    Pool *pool, const int32_t *ids, const Digest *digests, Range span, int32_t group, Origin first
) noexcept nogil:
    """Enter pages ``ids[span]`` under their digests, except null pages. ``ids[0]`` is at ``first.place`` of its request. Return
    -1, or, with nothing changed, the index of a page that has an entry already.
    """
    cdef Ranking ranking = Ranking(span.start, 0)
    cdef Py_ssize_t bad = find_entered(pool, ids, span)
    cdef int32_t i
    for i in range(span.start, span.stop if bad < 0 else span.start):
        if ids[i] == NULL_PAGE:
            continue
        if enter(pool, ids[i], digests[i], group) and pool.num_parts:
            rank(pool, &ranking, ids, i, digests[i], group)
        if is_journaled(pool):
            note_entry(pool, ids[i], Origin(digests[i - 1] if i else Digest(0, 0), first.place + i, first.context))
    return bad


cdef inline bint is_entered_otherwise(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Whether a page, null pages aside, has an entry under another key."""
    return page_id != NULL_PAGE and pool.pages[page_id].group != NO_GROUP and not has_key(&pool.pages[page_id], key, group)


cdef inline void keep_tokens(Pool *pool, int32_t page_id, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Keep the tokens of a page if the pool keeps tokens, and has room for `n`."""
    cdef int32_t *kept
    if pool.page_tokens == NULL:
        return
    if n >= pool.tokens_width:
        n = 0
    kept = pool.page_tokens + page_id * pool.tokens_width
    kept[0] = <int32_t>n
    if n:
        memcpy(kept + 1, tokens, n * sizeof(int32_t))


cdef inline Slot *slot_of(Pool *pool, int32_t page_id, uint32_t tag) noexcept nogil:
    """The slot that names a page, or, for a twin that no slot names, the empty slot that ends the search."""
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != page_id and pool.slots[i].page_id != NULL_PAGE:
        i = (i + 1) & pool.mask
    return &pool.slots[i]


cdef inline void empty_slot(Pool *pool, uint32_t hole) noexcept nogil:
    """Empty a slot and shift back the entries behind it that would no longer be found."""
    cdef uint32_t i = (hole + 1) & pool.mask
    while pool.slots[i].page_id != NULL_PAGE:
        if ((i - home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):
            pool.slots[hole] = pool.slots[i]
            hole = i
        i = (i + 1) & pool.mask
    pool.slots[hole].page_id = NULL_PAGE
    pool.num_keys -= 1


cdef inline void drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the prefix entry of a page that has one, and its pins: if nothing else holds it, it goes to the back of the queue.
    """
    cdef Page *page = &pool.pages[page_id]
    cdef Slot *slot = slot_of(pool, page_id, tag_of(pool, page.key_lo, page.group & ~FLAGS))
    assert 0 < page_id < pool.num_pages and page.group != NO_GROUP
    if is_journaled(pool):
        note_drop(pool, page_id)
    pool.num_unwatched += (page.group & WATCHED) != 0
    if rare(page.group & TWIN):
        leave_twins(pool, page_id, slot)
    else:
        empty_slot(pool, <uint32_t>(slot - pool.slots))
    page.group = NO_GROUP
    pool.num_entries -= 1
    pool.num_dropped += 1
    if rare(pool.num_parts != 0):
        leave_part(pool, page_id)
    if rare(is_pinned(pool, page_id)):
        lose_pins(pool, page_id)


cdef inline void leave_part(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the level of a page that lost its entry. One in the queue goes to the blank part, unless it is there."""
    cdef bint is_moved = is_free(pool, page_id) and (pool.policy.marks[page_id] != BLANK or has_level(pool, page_id))
    if is_moved:
        if pool.policy.marks[page_id] != BLANK:
            pool.policy.note_drop(pool, page_id)
        pull(pool, page_id)
        pool.policy.marks[page_id] = BLANK
    if has_level(pool, page_id):
        lose_level(pool, page_id)
    if is_moved:
        push(pool, page_id)
