# The free queues of banks and of shards: which part of the ring a page enters, and what is counted. The parts:
#
# * Plain parts are for pages without a term. With a policy they are the policy's, which serves the first bank. Banks without a
#   policy have a blank part and a part of cached pages; a bank of states has a part for each class of its checkpoints. Pools of
#   models that keep states have these parts from the start.
# * Once a page was expected back, each term has a part, the longest term first.
# * Once shares were set, each tenant has all of these parts, but blank pages stay in the blank part of the common tenant.
#
# Always:
#
# * A free page with a term is in the part of that term.
# * A free page without a term is in the part that its mark's lowest bits name; without a policy, or in a later bank, in the
#   blank part if it has no entry, else in the part of its checkpoint's class, or of cached pages.
# * `Policy.num_in_part` counts the first bank's free pages without a term, `Expectations.num_free` the free pages by term.
# * The pages of a term are in the order of their stamps, so none is late before the oldest.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t

from pagepool.core.base cimport exceptional
from pagepool.core.pool.ring cimport *


cdef inline int32_t part_of_term(const Pool *pool, int32_t first, int32_t term) noexcept nogil:
    """Return the part for pages with a term, which is not UNKNOWN, of the tenant whose parts begin at `first`."""
    assert UNKNOWN < term <= NEVER and pool.expected.terms != NULL
    return first + count_plain_parts(pool) + NEVER - term


cdef inline int32_t _first_part_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the first part of a cached page's tenant."""
    return pool.tenants.of_pages[page_id] * pool.num_parts_each if rare(pool.tenants.of_pages != NULL) else 0


cdef inline int32_t class_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the class of a cached page's checkpoint; the first one for pages that are no checkpoints."""
    cdef const Checkpoints *checkpoints = pool.banks[bank_of(pool, page_id)].checkpoints
    return note_of(checkpoints, page_id).number if checkpoints != NULL else <int32_t>RECENT


cdef inline int32_t part_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the part of the queue in which a page belongs; NO_PART if there are no parts."""
    cdef int32_t part = NEW
    if pool.num_parts == 0:
        return NO_PART
    if rare(term_of(&pool.expected, page_id) != UNKNOWN):
        return part_of_term(pool, _first_part_of(pool, page_id), term_of(&pool.expected, page_id))
    if is_served(pool, page_id):
        part = <int32_t>(pool.policy.marks[page_id] & PART)
    elif pool.pages[page_id].group == NO_GROUP:
        part = BLANK
    elif pool.num_banks > 1:
        part = NEW + class_of(pool, page_id)
    if rare(pool.expected.terms != NULL) and part != BLANK:
        return _first_part_of(pool, page_id) + part
    return part


cdef inline void push(Pool *pool, int32_t page_id) noexcept nogil:
    """Append a page to the queue; if that has parts, to the part in which the page belongs."""
    if exceptional(pool.is_divided):
        _push_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, NULL_PAGE)


cdef inline void _push_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Append a page to its part in the queue of its bank, and in the queue of its shard."""
    cdef int32_t queue
    if pool.policy != NULL or pool.expected.terms != NULL or pool.num_shards:
        push_at(pool, page_id, now_of(&pool.expected) if pool.expected.terms != NULL else 0)
    else:
        queue = queue_of(pool, page_id)
        link_page(pool, page_id, end_of_part(pool, part_of(pool, page_id), queue))
        count_in_bank(pool, queue, 1)


cdef inline bint _is_in_order(const Expectations *expected, int32_t page_id, int32_t before) noexcept nogil:
    """Whether a page has no term, or is no older than the page before it."""
    return term_of(expected, page_id) == UNKNOWN or not is_older(expected, page_id, before)


cdef inline void push_at(Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    """Do `_push_to_divisions` at a given time, which matters only with terms."""
    cdef int32_t part, shard, queue = queue_of(pool, page_id)
    _stamp_queued(pool, page_id, now)
    part = part_of(pool, page_id)
    link_counted(pool, page_id, queue, end_of_part(pool, part, queue))
    if pool.num_shards:
        shard = shard_queue_of(pool, page_id)
        push_to_shard(pool, page_id, shard, end_of_part(pool, part, shard))
    assert newest_in(pool, part, queue) == page_id
    assert oldest_in(pool, part, queue) == page_id or _is_in_order(&pool.expected, page_id, pool.pages[page_id].prev_free)


cdef inline void link_counted(Pool *pool, int32_t page_id, int32_t queue, int32_t end) noexcept nogil:
    """Insert a page into the queue of its bank, before the record `end`, and count it there and in its part."""
    assert queue == queue_of(pool, page_id)
    _count_in_part(pool, page_id, 1)
    link_page(pool, page_id, end)
    count_in_bank(pool, queue, 1)


cdef inline void push_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry at the front of the queue or, with parts, of the blank part."""
    assert pool.pages[page_id].group == NO_GROUP and term_of(&pool.expected, page_id) == UNKNOWN
    if exceptional(pool.is_divided):
        _push_first_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, record_behind(pool, NULL_PAGE, -1))


cdef inline void _push_first_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry at the front of its bank's and its shard's queue or, with parts, of their blank parts."""
    cdef int32_t shard, queue = queue_of(pool, page_id)
    _stamp_queued(pool, page_id, now_of(&pool.expected) if pool.expected.terms != NULL else 0)
    link_counted(pool, page_id, queue, record_behind(pool, front_of_blank(pool, queue), queue))
    if pool.num_shards:
        shard = shard_queue_of(pool, page_id)
        push_to_shard(pool, page_id, shard, record_behind(pool, front_of_blank(pool, shard), shard))


cdef inline void _stamp_queued(Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    """Set the mark and the stamp of a page that is put into the queue. A page without an entry gets the mark of the blank part,
    and its charge ends.
    """
    cdef uint32_t part
    assert pool.pages[page_id].group != NO_GROUP or term_of(&pool.expected, page_id) == UNKNOWN
    if is_served(pool, page_id):
        part = BLANK if pool.pages[page_id].group == NO_GROUP else pool.policy.marks[page_id] & PART
        if part == BLANK:
            pool.policy.marks[page_id] = BLANK
        else:
            stamp_page(pool.policy, page_id, part)
    if rare(pool.expected.terms != NULL):
        pool.expected.stamps[page_id] = <uint32_t>now
        if pool.tenants.of_pages != NULL and part_of(pool, page_id) == BLANK:
            end_charge(&pool.tenants, bank_of(pool, page_id), page_id)


cdef inline void _count_in_part(Pool *pool, int32_t page_id, int32_t change) noexcept nogil:
    """Count a page for the policy, its term and its tenant as it enters its part or, with a change of -1, leaves it."""
    cdef int32_t term = term_of(&pool.expected, page_id)
    if rare(pool.expected.terms != NULL):
        count_term(&pool.expected, term, change)
        if pool.tenants.of_pages != NULL:
            count_charged_free(&pool.tenants, bank_of(pool, page_id), page_id, change)
    if is_served(pool, page_id) and term == UNKNOWN:
        pool.policy.num_in_part[pool.policy.marks[page_id] & PART] += change
        assert pool.policy.num_in_part[pool.policy.marks[page_id] & PART] >= 0


cdef inline void pull(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue, wherever it is."""
    cdef Page *page = &pool.pages[page_id]
    assert 0 < page_id < pool.num_pages and is_free(pool, page_id) and pool.num_free > 0
    assert pool.pages[page.prev_free].next_free == page_id and pool.pages[page.next_free].prev_free == page_id
    pool.pages[page.prev_free].next_free = page.next_free
    pool.pages[page.next_free].prev_free = page.prev_free
    page.prev_free = NOT_FREE
    page.next_free = NOT_FREE
    pool.num_free -= 1
    if exceptional(pool.is_divided):
        _leave_divisions(pool, page_id)


cdef inline void _leave_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of its shard's queue and the counts of its part and bank, and begin its charge."""
    count_in_bank(pool, queue_of(pool, page_id), -1)
    if pool.num_shards:
        unlink(pool.shard_links, page_id)
        pool.shard_num_free[shard_queue_of(pool, page_id)] -= 1
        assert pool.shard_num_free[shard_queue_of(pool, page_id)] >= 0
    _count_in_part(pool, page_id, -1)
    if rare(pool.tenants.of_pages != NULL):
        begin_charge(&pool.tenants, bank_of(pool, page_id), page_id)


cdef inline void pull_unused(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue without counting a use: it is about to lose its entry, or to be queued again."""
    if is_served(pool, page_id):
        discount(pool.policy, page_id)
    pull(pool, page_id)


cdef inline bint has_policy(const Pool *pool, int32_t queue) noexcept nogil:
    """Whether a policy chooses the victims of a queue."""
    return pool.policy != NULL and bank_of_queue(pool, queue) == 0


cdef inline bint has_checkpoints(const Pool *pool, int32_t queue) noexcept nogil:
    """Whether the pages of a queue are states, evicted by the classes of their checkpoints."""
    return pool.num_banks > 1 and pool.banks[bank_of_queue(pool, queue)].checkpoints != NULL


cdef inline int32_t find_held_free(const Pool *pool, Py_ssize_t n) noexcept nogil:
    """Return a page with references in the first `n` of each bank's and each shard's queue, or NULL_PAGE. With parts any page
    can be the next victim, so the whole queues are searched.
    """
    cdef int32_t page_id, shard
    cdef Py_ssize_t _
    for shard in range(-pool.num_banks, pool.num_banks * pool.num_shards if pool.num_held_free else -pool.num_banks):
        page_id = end_of_queue(pool, shard)
        for _ in range(count_free_in(pool, shard) if pool.num_parts else min(n, count_free_in(pool, shard))):
            page_id = page_behind(pool, page_id, shard)
            if pool.pages[page_id].ref_cnt:
                return page_id
    return NULL_PAGE


cdef inline Py_ssize_t push_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Append pages to the queue. Return -1 or, with nothing changed, the index of a page that must not enter it."""
    cdef Py_ssize_t i, bad = -1
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) or pool.pages[ids[i]].ref_cnt or is_retired(pool, ids[i]):
            bad = i
            break
        pool.pages[ids[i]].prev_free = ids[i]  # until all are checked: a repeated page looks free
    for i in range(n if bad < 0 else bad):
        pool.pages[ids[i]].prev_free = NOT_FREE
    for i in range(n if bad < 0 else 0):
        push(pool, ids[i])
    return bad


cdef inline Py_ssize_t count_free(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Count the pages that are in the free queue."""
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        count += ids[i] != NULL_PAGE and is_free(pool, ids[i])
    return count


cdef inline bint has_free_pages(const Pool *pool, Py_ssize_t num_pages, Py_ssize_t num_reserved, int32_t shard) noexcept nogil:
    """Whether `num_pages` pages can be taken from a bank or shard, with `num_reserved` left in the bank."""
    if num_pages and num_pages + num_reserved > count_free_in(pool, queue_of_bank(bank_of_queue(pool, shard))):
        return False
    return num_pages <= count_free_in(pool, shard)


cdef inline bint is_counted(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a policy counts the release of a page. It skips blank pages, which would only advance its clock."""
    if not is_served(pool, page_id) or pool.pages[page_id].group == NO_GROUP:
        return False
    return pool.policy.marks[page_id] & PART != BLANK


cdef inline void enqueue(Pool *pool, int32_t page_id) noexcept nogil:
    """`push` a page that lost its last reference, or was pulled and is put back. A policy counts it."""
    if is_counted(pool, page_id):
        count_release(pool.policy, 1, count_free_in(pool, -1))
    push(pool, page_id)


cdef inline bint may_have_term(const Pool *pool, int32_t page_id, int32_t term) noexcept nogil:
    """Whether a page is cached and can get a term, or lose it. A shared page's term can only be shortened: no session delays
    the eviction of pages that others use.
    """
    if pool.pages[page_id].group == NO_GROUP or (term == UNKNOWN and term_of(&pool.expected, page_id) == UNKNOWN):
        return False
    return not rare(is_shared(&pool.sessions, page_id)) or UNKNOWN < term < _own_term(pool, page_id)


cdef inline void expect_page(Pool *pool, int32_t page_id, int32_t term, int64_t now) noexcept nogil:
    """Set the term of a page, perhaps to UNKNOWN, if `may_have_term`. A free page is queued as if it had just been released."""
    cdef bint is_moved = is_free(pool, page_id)
    if not may_have_term(pool, page_id, term):
        return
    if is_moved:
        pull_unused(pool, page_id)
    set_term(&pool.expected, page_id, term, now)
    if is_moved:
        push_at(pool, page_id, now)


cdef inline int32_t _own_term(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the term of a page. A page without a term counts with the term of its idle time if it is free, else with 1."""
    if not is_free(pool, page_id):
        return term_of(&pool.expected, page_id) or 1
    if term_of(&pool.expected, page_id) == UNKNOWN:
        return term_from_idle(idle_time(&pool.expected, page_id, now_of(&pool.expected)))
    return current_term(&pool.expected, page_id, now_of(&pool.expected))
