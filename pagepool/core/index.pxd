# The prefix index: which page is cached under a key.

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy

from pagepool.core.notes cimport is_journaled, note_drop, note_entry, origin_of
from pagepool.core.records cimport FLAGS, NO_GROUP, NULL_PAGE, TWIN, WATCHED, Origin, Page, Pool, Range, Slot, digest_of
from pagepool.core.siphash cimport Digest
from pagepool.core.twins cimport find_twin, join_twins, leave_twins


cdef inline uint32_t tag_of(Pool *pool, uint64_t key_lo, int32_t group) noexcept nogil:
    return <uint32_t>(((key_lo ^ <uint64_t>group << 40) * pool.multiplier) >> 32)


cdef inline uint32_t home_at(const Pool *pool, uint32_t tag) noexcept nogil:
    """The upper bits of a tag: the lower ones of a product depend on the lower ones of a key alone, and could be aimed at."""
    return tag >> pool.home_shift


cdef inline Slot *home_of(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The slot where a look-up begins."""
    return &pool.slots[home_at(pool, tag_of(pool, key.lo, group))]


cdef inline bint has_key(Page *page, Digest key, int32_t group) noexcept nogil:
    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~FLAGS) == group


cdef inline int32_t find(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The page cached first under the key, or NULL_PAGE."""
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != NULL_PAGE:
        if pool.slots[i].tag == tag and has_key(&pool.pages[pool.slots[i].page_id], key, group):
            return pool.slots[i].page_id
        i = (i + 1) & pool.mask
    return NULL_PAGE


cdef inline int32_t find_within(Pool *pool, Digest key, int32_t group, Range ids) noexcept nogil:
    """The page cached first under the key among those with an id in `ids`, or NULL_PAGE."""
    cdef int32_t first = find(pool, key, group)
    if first == NULL_PAGE or ids.start <= first < ids.stop:
        return first
    return find_twin(pool, first, ids) if pool.pages[first].group & TWIN else <int32_t>NULL_PAGE


cdef inline void enter(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Give a page without an entry the key. The index cannot be full: it has a slot for every two pages and more."""
    cdef Page *page = &pool.pages[page_id]
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = home_at(pool, tag)
    cdef int32_t first
    assert 0 < page_id < pool.num_pages and page.group == NO_GROUP
    page.key_lo = key.lo
    page.key_hi = key.hi
    page.group = group
    pool.num_cached += 1
    pool.num_entries += 1
    while pool.slots[i].page_id != NULL_PAGE:
        first = pool.slots[i].page_id
        if pool.slots[i].tag == tag and has_key(&pool.pages[first], key, group):
            join_twins(pool, first, page_id)
            return
        i = (i + 1) & pool.mask
    pool.slots[i].tag = tag
    pool.slots[i].page_id = page_id
    pool.num_keys += 1


cdef inline bint is_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is cached, and the one that a look-up finds."""
    cdef Page *page = &pool.pages[page_id]
    if page.group == NO_GROUP:
        return False
    return not page.group & TWIN or find(pool, digest_of(page), page.group & ~FLAGS) == page_id


cdef inline void enter_at(
    Pool *pool, const int32_t *ids, Py_ssize_t i, const Digest *chain, Py_ssize_t stride, int32_t group, int32_t context,
    int32_t first_place,
) noexcept nogil:
    """Enter page ``ids[i]``, which has no entry."""
    cdef Origin origin
    enter(pool, ids[i], chain[(i + 1) * stride - 1], group)
    if is_journaled(pool):
        origin = origin_of(chain, i, stride, context)
        origin.place += first_place
        note_entry(pool, ids[i], origin)


cdef inline Py_ssize_t enter_all(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t stride, int32_t group,
    int32_t context, int32_t first_place,
) noexcept nogil:
    """Enter pages ``ids[start:stop]``, null pages passed over. Returns -1, or, with nothing changed, the index of one that
    has an entry already.
    """
    cdef Py_ssize_t i, j
    for i in range(start, stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].group != NO_GROUP:
            for j in range(start, i):
                if ids[j] != NULL_PAGE:
                    drop(pool, ids[j])
                    pool.num_cached -= 1
            return i
        enter_at(pool, ids, i, chain, stride, group, context, first_place)
    return -1


cdef inline bint is_entered_otherwise(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Whether a page, null pages aside, has an entry under another key."""
    return page_id != NULL_PAGE and pool.pages[page_id].group != NO_GROUP and not has_key(&pool.pages[page_id], key, group)


cdef inline Py_ssize_t enter_missing(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t stride, int32_t group,
    int32_t context, int32_t first_place,
) noexcept nogil:
    """`enter_all`, but pages that have the entry already are passed over too, and keep it. Returns -1, or, with nothing
    changed, the index of one that has another.
    """
    cdef Py_ssize_t i
    for i in range(start, stop):
        if is_entered_otherwise(pool, ids[i], chain[(i + 1) * stride - 1], group):
            return i
    for i in range(start, stop):
        if ids[i] != NULL_PAGE and pool.pages[ids[i]].group == NO_GROUP:
            enter_at(pool, ids, i, chain, stride, group, context, first_place)
    return -1


cdef inline void keep_tokens(Pool *pool, int32_t page_id, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Keep the tokens of a page if the pool keeps tokens, and has room for `n`."""
    cdef int32_t *kept = pool.page_tokens + page_id * pool.tokens_width
    if n >= pool.tokens_width:
        n = 0
    if pool.page_tokens != NULL:
        kept[0] = <int32_t>n
        if n:
            memcpy(kept + 1, tokens, n * sizeof(int32_t))


cdef inline uint32_t slot_holding(Pool *pool, int32_t page_id, uint32_t tag) noexcept nogil:
    """The slot that names `page_id`, or the empty slot that ends the search."""
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != page_id and pool.slots[i].page_id != NULL_PAGE:
        i = (i + 1) & pool.mask
    return i


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
    """Take the prefix entry of a page that has one."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~FLAGS
    cdef uint32_t i = slot_holding(pool, page_id, tag_of(pool, page.key_lo, group))
    assert 0 < page_id < pool.num_pages and page.group != NO_GROUP
    if is_journaled(pool):
        note_drop(pool, page_id)
    pool.num_unwatched += (page.group & WATCHED) != 0
    if page.group & TWIN:
        leave_twins(pool, page_id, i)
    else:
        empty_slot(pool, i)
    page.group = NO_GROUP
    pool.num_entries -= 1
    pool.num_dropped += 1


cdef inline Py_ssize_t count_cached(const Pool *pool) noexcept nogil:
    """Pages with a prefix entry."""
    cdef Py_ssize_t i, count = 0
    for i in range(pool.num_pages):
        count += pool.pages[i].group != NO_GROUP
    return count


cdef inline Py_ssize_t list_cached(const Pool *pool, int32_t *out) noexcept nogil:
    """The pages that the index leads to, those of equal content one after another as they were cached. Returns how many.
    `out` NULL: only counts.
    """
    cdef Py_ssize_t i, count = 0
    cdef int32_t first, page_id
    for i in range(<Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0):
        first = page_id = pool.slots[i].page_id
        while page_id != NULL_PAGE:
            if out != NULL:
                out[count] = page_id
            count += 1
            page_id = pool.twins[page_id].next if pool.pages[page_id].group & TWIN else first
            if page_id == first:
                break
    return count


cdef inline void forget_pages(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t num_digests,
    Py_ssize_t stride, int32_t group,
) noexcept nogil:
    """Drop the entries of pages ``ids[start:stop]`` of a request. A null page stands for one that an attention window left:
    every page of its content loses the entry, for which one it was is not known any more.
    """
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(start, stop if pool.slots != NULL else start):
        page_id = ids[i]
        if page_id == NULL_PAGE and (i + 1) * stride <= num_digests:
            page_id = find(pool, chain[(i + 1) * stride - 1], group)
            while page_id != NULL_PAGE:
                drop(pool, page_id)
                page_id = find(pool, chain[(i + 1) * stride - 1], group)
        elif pool.pages[page_id].group != NO_GROUP:
            drop(pool, page_id)
