# The free queue, of the pool and of each shard: one ring of pages, closed by a record. With parts there is one more record
# before each part. The blank part of the policy is first, unless pages were retained: then the parts of the low priorities come
# before the policy's, and those of the high priorities and of protected pages behind.
#
# Always: a free page is in the part for its level, or, without one, in the part that the lowest bits of its mark name; the
# policy counts the pages of each of its parts.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t

from pagepool.core.adaptive cimport (
    BLANK, MARGIN, NEW, NUM_PARTS, PART, Decision, Policy, age_of, count_release, discount, make_policy, stamp_page, value_of,
)
from pagepool.core.platform cimport monotonic_ns, rare
from pagepool.core.records cimport (
    NORMAL, NOT_FREE, NO_GROUP, NO_PART, NULL_PAGE, NUM_LEVEL_PARTS, NUM_LOW, PROTECTED, TWIN, Deadlines, Links,
    Page, Pool, count_policy_parts, has_level, is_free, is_pinned, learns, link_after, shard_of, unlink,
)


cdef inline int32_t end_of_queue(const Pool *pool, int32_t shard) noexcept nogil:
    """The record that closes the queue of a shard; -1 means the whole pool."""
    return NULL_PAGE if shard < 0 else pool.num_pages + shard * (1 + pool.num_parts)


cdef inline int32_t start_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """The record before the pages of a part."""
    part += pool.first_part
    return pool.num_pages + part if shard < 0 else end_of_queue(pool, shard) + 1 + part


cdef inline int32_t end_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """The record behind the pages of a part; without parts behind all pages."""
    if pool.first_part + part + 1 < pool.num_parts:
        return start_of_part(pool, part + 1, shard)
    return end_of_queue(pool, shard)


cdef inline int32_t part_of_level(const Pool *pool, uint8_t level) noexcept nogil:
    """The part of the queue for pages with a level, which is not 0."""
    if level & PROTECTED:
        return pool.num_parts - pool.first_part - 1
    if level <= NUM_LOW:
        return <int32_t>level - 1 - NUM_LOW
    return count_policy_parts(pool) + level - 2 - NORMAL


cdef inline int32_t record_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """The record behind `page_id` in that queue: a page, or one that closes the queue or begins a part."""
    return pool.pages[page_id].next_free if shard < 0 else pool.shard_links[page_id].next


cdef inline int32_t record_before(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    return pool.pages[page_id].prev_free if shard < 0 else pool.shard_links[page_id].prev


cdef inline bint is_page(const Pool *pool, int32_t record) noexcept nogil:
    """Whether a record of a queue is a page, not one of its marks."""
    return NULL_PAGE < record < pool.num_pages


cdef inline int32_t oldest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """The page that has been in a part for longest, or NULL_PAGE."""
    cdef int32_t page_id = record_behind(pool, start_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t newest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    cdef int32_t page_id = record_before(pool, end_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t oldest_in_parts(const Pool *pool, int32_t first, int32_t stop, int32_t shard) noexcept nogil:
    """The oldest page of the first of the parts ``[first, stop)`` that has any, or NULL_PAGE. O(parts)."""
    cdef int32_t part, page_id = NULL_PAGE
    for part in range(first, stop):
        page_id = oldest_in(pool, part, shard)
        if page_id != NULL_PAGE:
            break
    return page_id


cdef inline void link_page(Pool *pool, int32_t page_id, int32_t end) noexcept nogil:
    """Put a page outside the queue before the record that ends it, or a part."""
    cdef Page *pages = pool.pages
    cdef int32_t last = pages[end].prev_free
    assert 0 < page_id < pool.num_pages and not is_free(pool, page_id)
    pages[page_id].prev_free = last
    pages[page_id].next_free = end
    pages[last].next_free = page_id
    pages[end].prev_free = page_id
    pool.num_free += 1


cdef inline void push(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page outside the queue to its back, which is evicted last; with a policy to that of its part."""
    if rare(pool.is_divided):
        push_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, NULL_PAGE)


cdef inline void push_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page into its part, by its mark, and into the queue of its shard."""
    cdef int32_t shard, part = NO_PART
    if pool.num_parts:
        part = enter_part(pool, page_id)
    link_page(pool, page_id, end_of_part(pool, part, -1))
    if pool.num_shards:
        shard = shard_of(pool, page_id)
        push_to_shard(pool, page_id, shard, end_of_part(pool, part, shard))


cdef inline void push_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry, outside the queue, to its front; with a policy to that of the blank part."""
    if rare(pool.is_divided):
        push_first_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, record_behind(pool, NULL_PAGE, -1))


cdef inline void push_first_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry to the front of the blank part, if there are parts, and of its shard's."""
    cdef int32_t shard
    if pool.num_parts:
        enter_part(pool, page_id)
    link_page(pool, page_id, record_behind(pool, front_of_blank(pool, -1), -1))
    if pool.num_shards:
        shard = shard_of(pool, page_id)
        push_to_shard(pool, page_id, shard, record_behind(pool, front_of_blank(pool, shard), shard))


cdef inline int32_t front_of_blank(const Pool *pool, int32_t shard) noexcept nogil:
    """The record before the pages without an entry; without parts before all pages."""
    return start_of_part(pool, BLANK, shard) if pool.num_parts else end_of_queue(pool, shard)


cdef inline int32_t enter_part(Pool *pool, int32_t page_id) noexcept nogil:
    """Mark a page as one of the part that its mark names, or, without an entry, of the blank one. Returns the part, or that of
    its level.
    """
    cdef uint32_t part = BLANK if pool.pages[page_id].group == NO_GROUP else pool.policy.marks[page_id] & PART
    if part == BLANK:
        pool.policy.marks[page_id] = BLANK
    else:
        stamp_page(pool.policy, page_id, part)
    count_in_part(pool, page_id, 1)
    return part_of_level(pool, pool.levels[page_id]) if has_level(pool, page_id) else <int32_t>part


cdef inline void count_in_part(Pool *pool, int32_t page_id, int32_t change) noexcept nogil:
    """Count a page that comes into its part, or leaves it."""
    if not has_level(pool, page_id):
        pool.policy.num_in_part[pool.policy.marks[page_id] & PART] += change
    elif pool.levels[page_id] <= NUM_LOW:
        pool.num_low_free += change
    else:
        pool.num_high_free += change


cdef inline void push_marked(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page of a pool without shards into the part that its mark names, as it was there before it was saved."""
    cdef int32_t part = <int32_t>(pool.policy.marks[page_id] & PART)
    link_page(pool, page_id, end_of_part(pool, part, -1))
    pool.policy.num_in_part[part] += 1


cdef inline void push_to_shard(Pool *pool, int32_t page_id, int32_t shard, int32_t end) noexcept nogil:
    link_after(pool.shard_links, pool.shard_links[end].prev, page_id)
    pool.shard_num_free[shard] += 1


cdef inline void pull(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue, wherever it stands in it."""
    cdef Page *page = &pool.pages[page_id]
    assert 0 < page_id < pool.num_pages and is_free(pool, page_id)
    pool.pages[page.prev_free].next_free = page.next_free
    pool.pages[page.next_free].prev_free = page.prev_free
    page.prev_free = NOT_FREE
    page.next_free = NOT_FREE
    pool.num_free -= 1
    if rare(pool.is_divided):
        leave_divisions(pool, page_id)


cdef inline void leave_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of its shard's queue, and of the count of its part."""
    if pool.num_shards:
        unlink(pool.shard_links, page_id)
        pool.shard_num_free[shard_of(pool, page_id)] -= 1
    if pool.num_parts:
        count_in_part(pool, page_id, -1)


cdef inline void begin_parts(Pool *pool) noexcept nogil:
    """Link the marks of the parts of an empty queue."""
    cdef int32_t part
    for part in range(pool.num_parts):
        link_mark(pool.pages, start_of_part(pool, part, -1), NULL_PAGE)


cdef inline void link_mark(Page *pages, int32_t mark, int32_t end) noexcept nogil:
    """Put the start of a part before another record of the pool's queue."""
    cdef int32_t last = pages[end].prev_free
    pages[mark] = Page(0, 0, 0, last, end, NO_GROUP)
    pages[last].next_free = mark
    pages[end].prev_free = mark


cdef inline bint begin_blank_part(Pool *pool) noexcept nogil:
    """Make all pages of a pool without parts, whose records have room for one, those of the blank part; False where memory is
    short.
    """
    pool.policy = make_policy(pool.num_pages, False)
    if pool.policy == NULL:
        return False
    pool.policy.num_in_part[BLANK] = pool.num_free
    pool.num_parts, pool.is_divided = 1, True
    link_mark(pool.pages, pool.num_pages, pool.pages[NULL_PAGE].next_free)
    return True


cdef inline void begin_level_parts(Pool *pool) noexcept nogil:
    """Link the marks of the parts of levels, for which there is room, into the pool's queue, which has parts already."""
    cdef Page *pages = pool.pages
    cdef int32_t part, mark, num_policy_parts = pool.num_parts
    for part in range(num_policy_parts - 1, -1, -1):
        mark = start_of_part(pool, part, -1)
        pages[mark + NUM_LOW] = pages[mark]
        pages[pages[mark].prev_free].next_free = pages[pages[mark].next_free].prev_free = mark + NUM_LOW
    pool.first_part = NUM_LOW
    pool.num_parts += NUM_LEVEL_PARTS
    for part in range(-NUM_LOW, BLANK):
        link_mark(pages, start_of_part(pool, part, -1), start_of_part(pool, BLANK, -1))
    for part in range(num_policy_parts, pool.num_parts - NUM_LOW):
        link_mark(pages, start_of_part(pool, part, -1), NULL_PAGE)


cdef inline void blank_all(Pool *pool) noexcept nogil:
    """Make all free pages part of the blank one, in the order of the queue, without levels. O(num_pages)."""
    cdef int32_t page_id, part
    for page_id in range(1, pool.num_pages):
        if is_free(pool, page_id):
            discount(pool.policy, page_id)
            count_in_part(pool, page_id, -1)
            if pool.levels != NULL:
                pool.levels[page_id] = 0
            pool.policy.marks[page_id] = BLANK
            count_in_part(pool, page_id, 1)
    for part in range(BLANK, -pool.first_part - 1, -1):
        move_mark(pool, part, True)
    for part in range(BLANK + 1, pool.num_parts - pool.first_part):
        move_mark(pool, part, False)


cdef inline void move_mark(Pool *pool, int32_t part, bint to_front) noexcept nogil:
    """Move the start of a part to the front, or to the end, of the pool's queue and of each shard's."""
    cdef Page *pages = pool.pages
    cdef int32_t shard, end, mark = start_of_part(pool, part, -1)
    pages[pages[mark].prev_free].next_free = pages[mark].next_free
    pages[pages[mark].next_free].prev_free = pages[mark].prev_free
    link_mark(pages, mark, pages[NULL_PAGE].next_free if to_front else <int32_t>NULL_PAGE)
    for shard in range(pool.num_shards):
        end, mark = end_of_queue(pool, shard), start_of_part(pool, part, shard)
        unlink(pool.shard_links, mark)
        link_after(pool.shard_links, end if to_front else pool.shard_links[end].prev, mark)


cdef inline void link_shards(Pool *pool) noexcept nogil:
    """Build the queue of each shard from the whole one. O(free pages)."""
    cdef int32_t page_id, shard, end, part
    for shard in range(pool.num_shards):
        end = end_of_queue(pool, shard)
        pool.shard_links[end] = Links(end, end)
        for part in range(pool.num_parts):
            link_after(pool.shard_links, end + part, end + part + 1)
    part = NO_PART
    page_id = pool.pages[NULL_PAGE].next_free
    while page_id != NULL_PAGE:
        if page_id >= pool.num_pages:
            part = page_id - pool.num_pages - pool.first_part
        else:
            shard = shard_of(pool, page_id)
            push_to_shard(pool, page_id, shard, end_of_part(pool, part, shard))
        page_id = pool.pages[page_id].next_free


cdef inline int32_t count_free_in(const Pool *pool, int32_t shard) noexcept nogil:
    return pool.num_free if shard < 0 else pool.shard_num_free[shard]


cdef inline int32_t page_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """The page behind `page_id` in that queue, whatever its part; NULL_PAGE, or a shard's end: there is none."""
    page_id = record_behind(pool, page_id, shard)
    while page_id >= pool.num_pages and page_id != end_of_queue(pool, shard):
        page_id = record_behind(pool, page_id, shard)
    return page_id


cdef inline int32_t page_before(const Pool *pool, int32_t page_id) noexcept nogil:
    """The page before `page_id` in the pool's queue, whatever its part, or NULL_PAGE."""
    page_id = pool.pages[page_id].prev_free
    while page_id >= pool.num_pages:
        page_id = pool.pages[page_id].prev_free
    return page_id


# The page that is evicted next.


cdef inline int32_t *known_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    return &pool.policy.newest[part] if shard < 0 else &pool.shard_newest[shard * NUM_PARTS + part]


cdef inline int32_t first_of_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """The page that the newest call which released any into a part released first, or NULL_PAGE. Amortised O(1)."""
    cdef Policy *policy = pool.policy
    cdef const uint32_t *marks = policy.marks
    cdef int32_t *known = known_newest(pool, part, shard)
    cdef int32_t before, page_id = newest_in(pool, part, shard)
    if page_id == NULL_PAGE:
        return NULL_PAGE
    if known[0] != NULL_PAGE and is_free(pool, known[0]) and not has_level(pool, known[0]):
        if marks[known[0]] == marks[page_id]:
            page_id = known[0]
    before = record_before(pool, page_id, shard)
    while is_page(pool, before) and marks[before] == marks[page_id]:
        page_id = before
        before = record_before(pool, page_id, shard)
    known[0] = page_id
    return page_id


cdef inline int32_t candidate_of(Pool *pool, const Decision *decision) noexcept nogil:
    if decision.is_newest:
        return first_of_newest(pool, decision.part, decision.shard)
    return oldest_in(pool, decision.part, decision.shard)


cdef inline Decision decide_as_lru(Pool *pool, int32_t shard) noexcept nogil:
    """Choose the oldest page of all parts."""
    cdef Policy *policy = pool.policy
    cdef Decision oldest = Decision(BLANK, shard, False, 0)
    cdef uint32_t mark
    cdef int32_t part, page_id
    for part in range(NEW, NUM_PARTS):
        page_id = oldest_in(pool, part, shard)
        if page_id != NULL_PAGE:
            mark = policy.marks[page_id]
            if oldest.part == BLANK or age_of(policy, mark) > age_of(policy, oldest.mark):
                oldest = Decision(part, shard, False, mark)
    return oldest


cdef inline Decision decide(Pool *pool, int32_t shard) noexcept nogil:
    """Choose the page of least value among the oldest and the newest of each part, if it is worth less than LRU's choice."""
    cdef Policy *policy = pool.policy
    cdef Decision best = decide_as_lru(pool, shard)
    cdef double value, least = value_of(policy, best.mark) * MARGIN / 100
    cdef int32_t part, page_id, is_newest
    if policy.learned.num_released < policy.learned.paused_until:
        return best
    for part in range(NEW, NUM_PARTS):
        for is_newest in range(2):
            page_id = newest_in(pool, part, shard) if is_newest else oldest_in(pool, part, shard)
            if page_id != NULL_PAGE:
                value = value_of(policy, policy.marks[page_id])
                if value < least:
                    least = value
                    best = Decision(part, shard, is_newest, policy.marks[page_id])
    return best


cdef inline int32_t pick_least_value(Pool *pool, int32_t shard) noexcept nogil:
    """The page to be evicted next by what the policy has learned. It leaves the queue before the next call."""
    cdef Policy *policy = pool.policy
    cdef Decision *decision = &policy.learned.decision
    cdef int32_t behind, page_id = NULL_PAGE
    if decision.part != BLANK and decision.shard == shard:
        page_id = candidate_of(pool, decision)
    if page_id == NULL_PAGE or policy.marks[page_id] != decision.mark:
        decision[0] = decide(pool, shard)
        page_id = candidate_of(pool, decision)
    if decision.is_newest:
        behind = record_behind(pool, page_id, shard)
        known_newest(pool, decision.part, shard)[0] = behind if is_page(pool, behind) else <int32_t>NULL_PAGE
    return page_id


cdef inline int32_t pick(Pool *pool, int32_t shard) noexcept nogil:
    """The page to be evicted next, of a shard unless that is -1. Without parts it is the one in front. Else a blank one, if the
    policy learns; or one of the lowest priority below the normal one; or the one that the policy picks, or the oldest, where it
    does not learn; or one of the lowest level above.
    """
    cdef int32_t num_parts, page_id = NULL_PAGE
    if pool.num_parts == 0:
        return record_behind(pool, end_of_queue(pool, shard), shard)
    if learns(pool):
        page_id = oldest_in(pool, BLANK, shard)
    if page_id == NULL_PAGE and pool.num_low_free:
        page_id = oldest_in_parts(pool, -NUM_LOW, BLANK, shard)
    if page_id == NULL_PAGE and pool.num_high_free:
        num_parts = count_policy_parts(pool)
        if oldest_in_parts(pool, BLANK, num_parts, shard) == NULL_PAGE:
            page_id = oldest_in_parts(pool, num_parts, pool.num_parts - NUM_LOW, shard)
    if page_id != NULL_PAGE:
        return page_id
    return pick_least_value(pool, shard) if learns(pool) else oldest_in(pool, BLANK, shard)


cdef inline int32_t find_held_free(const Pool *pool, Py_ssize_t n) noexcept nogil:
    """A page with references among the first `n` of the free queue and of each shard's; or NULL_PAGE. With a policy, which may
    evict any, among all.
    """
    cdef int32_t page_id, shard
    cdef Py_ssize_t _
    for shard in range(-1, pool.num_shards if pool.num_held_free else -1):
        page_id = end_of_queue(pool, shard)
        for _ in range(count_free_in(pool, shard) if pool.num_parts else min(n, count_free_in(pool, shard))):
            page_id = page_behind(pool, page_id, shard)
            if pool.pages[page_id].ref_cnt:
                return page_id
    return NULL_PAGE


cdef inline Py_ssize_t push_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Put pages to the back of the queue. Returns -1, or, with nothing changed, the index of one that must not be there."""
    cdef Py_ssize_t i, bad = -1
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) or pool.pages[ids[i]].ref_cnt:
            bad = i
            break
        pool.pages[ids[i]].prev_free = ids[i]  # until all are checked: a page that stands there twice looks free
    for i in range(n if bad < 0 else bad):
        pool.pages[ids[i]].prev_free = NOT_FREE
    for i in range(n if bad < 0 else 0):
        push(pool, ids[i])
    return bad


cdef inline Py_ssize_t count_free(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Count the pages that are in the free queue."""
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        count += ids[i] != NULL_PAGE and is_free(pool, ids[i])
    return count


cdef inline bint has_free_pages(Pool *pool, Py_ssize_t num_pages, Py_ssize_t num_reserved, int32_t shard) noexcept nogil:
    """Whether `num_pages` can be taken from a shard (-1: the whole pool), with `num_reserved` left in the pool."""
    if num_pages and num_pages + num_reserved > pool.num_free:
        return False
    return num_pages <= count_free_in(pool, shard)


# References given back page by page, and pins: one reference of the pool's own to a page, however often it is pinned.


cdef inline void put_back(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a reference from a page that has one; without any left it goes to the back of the queue."""
    cdef Page *page = &pool.pages[page_id]
    page.ref_cnt -= 1
    if page.ref_cnt == 0:
        let_go(pool, page_id)
        pool.num_freed += 1


cdef inline void put_back_all(Pool *pool, const int32_t *ids, int32_t n) noexcept nogil:
    """Take a reference from each page, the last first; null pages are passed over."""
    cdef int32_t i
    for i in range(n - 1, -1, -1):
        if ids[i] != NULL_PAGE:
            put_back(pool, ids[i])


cdef inline bint is_counted(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a policy counts a page that is put into the queue: blank pages would only wear its clock out."""
    if pool.num_parts == 0 or pool.pages[page_id].group == NO_GROUP:
        return False
    return pool.policy.marks[page_id] & PART != BLANK


cdef inline void let_go(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without references, that is not in the queue, to its back."""
    if is_counted(pool, page_id):
        count_release(pool.policy, 1, pool.num_free)
    push(pool, page_id)


cdef inline void put_back_held(Pool *pool, int32_t page_id) noexcept nogil:
    """`put_back`, except for the null page and for a page without references other than that of its pins."""
    if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt > is_pinned(pool, page_id) and not is_free(pool, page_id):
        put_back(pool, page_id)


cdef inline void lose_pins(Pool *pool, int32_t page_id) noexcept nogil:
    """Unpin a pinned page, however often it is pinned."""
    pool.pins[page_id] = 0
    pool.num_pinned -= 1
    put_back_held(pool, page_id)


cdef inline void take_pin_back(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a pin from a pinned page; without any left it is not pinned any more."""
    if pool.pins[page_id] == 1:
        lose_pins(pool, page_id)
    else:
        pool.pins[page_id] -= 1


cdef inline int32_t find_pinned(const Pool *pool, int32_t first) noexcept nogil:
    """The pinned page cached first with the content of `first`, or NULL_PAGE. O(pages of equal content)."""
    cdef int32_t page_id = first
    while page_id != NULL_PAGE and not is_pinned(pool, page_id):
        page_id = pool.twins[page_id].next if pool.pages[page_id].group & TWIN else first
        if page_id == first:
            return NULL_PAGE
    return page_id


# Levels of cached pages: the priority with which a page is retained, for how long, and whether it is protected. A page keeps
# its level while it is held, and loses it with its entry.


cdef inline void set_level(Pool *pool, int32_t page_id, uint8_t level) noexcept nogil:
    """Give a cached page of a pool with levels another one; 0: none. A free page whose part changes is queued as if it had been
    freed now.
    """
    cdef uint8_t old = pool.levels[page_id]
    cdef bint is_moved = level != old and not level & old & PROTECTED and is_free(pool, page_id)
    if is_moved:
        discount(pool.policy, page_id)
        pull(pool, page_id)
    pool.levels[page_id] = level
    if is_moved:
        push(pool, page_id)


cdef inline void lose_level(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the level of a page outside the queue, and its deadline."""
    pool.levels[page_id] = 0
    remove_deadline(&pool.deadlines, page_id)


cdef inline bint is_sooner(const Deadlines *deadlines, int32_t page_id, int32_t other) noexcept nogil:
    cdef int64_t time = deadlines.times[page_id], other_time = deadlines.times[other]
    return time < other_time or (time == other_time and page_id < other)


cdef inline void put_in_heap(Deadlines *deadlines, int32_t page_id, int32_t place) noexcept nogil:
    deadlines.heap[place] = page_id
    deadlines.places[page_id] = place + 1


cdef inline void move_in_heap(Deadlines *deadlines, int32_t page_id, int32_t place) noexcept nogil:
    """Put a page where it belongs in the heap, in which `place` is left to it."""
    cdef int32_t above = (place - 1) // 2, below
    while place and is_sooner(deadlines, page_id, deadlines.heap[above]):
        put_in_heap(deadlines, deadlines.heap[above], place)
        place = above
        above = (place - 1) // 2
    while 2 * place + 1 < deadlines.num:
        below = 2 * place + 1
        below += below + 1 < deadlines.num and is_sooner(deadlines, deadlines.heap[below + 1], deadlines.heap[below])
        if is_sooner(deadlines, page_id, deadlines.heap[below]):
            break
        put_in_heap(deadlines, deadlines.heap[below], place)
        place = below
    put_in_heap(deadlines, page_id, place)


cdef inline void remove_deadline(Deadlines *deadlines, int32_t page_id) noexcept nogil:
    """Take the deadline of a page, if it has one. O(log(pages with one))."""
    cdef int32_t place
    if deadlines.num == 0 or deadlines.places[page_id] == 0:
        return
    place = deadlines.places[page_id] - 1
    deadlines.places[page_id] = 0
    deadlines.num -= 1
    if place < deadlines.num:
        move_in_heap(deadlines, deadlines.heap[deadlines.num], place)


cdef inline void set_deadline(Deadlines *deadlines, int32_t page_id, int64_t time) noexcept nogil:
    """Let the priority of a page end at a time. O(log(pages with a deadline))."""
    remove_deadline(deadlines, page_id)
    deadlines.times[page_id] = time
    deadlines.num += 1
    move_in_heap(deadlines, page_id, deadlines.num - 1)


cdef inline void forget_deadlines(Deadlines *deadlines) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(deadlines.num):
        deadlines.places[deadlines.heap[i]] = 0
    deadlines.num = 0


cdef inline void end_retention(Pool *pool) noexcept nogil:
    """Take the priorities of pages whose time is up. O(log(pages with a deadline)) each."""
    cdef int64_t now = monotonic_ns() if pool.deadlines.num else 0
    cdef int32_t page_id
    while pool.deadlines.num and pool.deadlines.times[pool.deadlines.heap[0]] <= now:
        page_id = pool.deadlines.heap[0]
        remove_deadline(&pool.deadlines, page_id)
        set_level(pool, page_id, pool.levels[page_id] & PROTECTED)
