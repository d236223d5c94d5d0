# The free queue of each bank, and that of each shard: a ring of records. The null page closes the first bank's; a record of its
# own closes any other. With parts there is one more record before each part, its divider:
#
# * With a policy the plain parts, those for pages without a term, are the policy's, which serves the first bank: the others
#   use two of them. Without a policy they are a blank part and one of cached pages; pools of models that keep states have these
#   two from the start.
# * Once a page was expected back, each term has a part, the longest first.
# * Once shares were set, each tenant has all of these parts, but blank pages stay in the blank part of the common tenant.
#
# Numbered steps in core/README.md, "The victim", say which page is evicted next.
#
# Always:
#
# * A free page with a term is in the part of that term.
# * A free page without one is in the part that its mark's lowest bits name; without a policy, or in a later bank, in the blank
#   part if it has no entry, else in the part of cached pages.
# * `Policy.num_in_part` counts the free pages without a term by part of the policy, `Expectations.num_free` the others by term.
#   Bit n of `free_terms` is set exactly when `num_free[n]` is not 0.
# * The pages of a term are in the order of their stamps, so none is late before the oldest.
# * A shard's queue has the shard's pages in the order of the pool's queue.

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t

from pagepool.core.base cimport LAST_TERM, coarse_time, exceptional, highest_bit
from pagepool.core.pool.owners cimport *


cdef enum:
    MAX_DUE = 31              # pages taken from a tenant before a tenant is chosen again

cdef struct Supply:           # state of a call that takes pages
    int32_t taker             # tenant for which they are taken
    int32_t num_left          # pages still to be taken
    int32_t tenant            # tenant that gives pages which are not blank
    int32_t num_due           # further pages from that tenant
    int64_t now               # time at which the call began; 0 without terms
    int32_t part              # part of the last page with a term that was picked; NO_PART: there is none
    uint32_t stamp            # stamp of that page


cdef inline int32_t end_of_queue(const Pool *pool, int32_t shard) noexcept nogil:
    """Return the record that closes a queue."""
    if shard < -1:
        return start_of_part(pool, -1, shard)
    return NULL_PAGE if shard < 0 else pool.num_pages + shard * (1 + pool.num_parts)


cdef inline int32_t start_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the record before the pages of a part."""
    if shard < 0:
        return pool.num_pages + (-1 - shard) * (1 + pool.num_parts) + part
    return pool.num_pages + shard * (1 + pool.num_parts) + 1 + part


cdef inline int32_t _end_of_part(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the record behind the pages of a part; without parts the one that closes the queue."""
    if part + 1 < pool.num_parts:
        return start_of_part(pool, part + 1, shard)
    return end_of_queue(pool, shard)


cdef inline int32_t _part_of_term(const Pool *pool, int32_t first, int32_t term) noexcept nogil:
    """Return the part for pages with a term, which is not UNKNOWN, of the tenant whose parts begin at `first`."""
    assert UNKNOWN < term <= NEVER and pool.expected.terms != NULL
    return first + count_plain_parts(pool) + NEVER - term


cdef inline int32_t _first_part_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the first part of a cached page's tenant."""
    return pool.tenants.of_pages[page_id] * pool.num_parts_each if rare(pool.tenants.of_pages != NULL) else 0


cdef inline int32_t _part_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the part of the queue in which a page belongs; NO_PART if there are no parts."""
    cdef int32_t part = NEW
    if pool.num_parts == 0:
        return NO_PART
    if rare(term_of(pool, page_id) != UNKNOWN):
        return _part_of_term(pool, _first_part_of(pool, page_id), term_of(pool, page_id))
    if is_served(pool, page_id):
        part = <int32_t>(pool.policy.marks[page_id] & PART)
    elif pool.pages[page_id].group == NO_GROUP:
        part = BLANK
    if rare(pool.expected.terms != NULL) and part != BLANK:
        return _first_part_of(pool, page_id) + part
    return part


cdef inline int32_t record_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """Return the record behind `page_id` in a shard's queue: a page, a part's divider, or the end of the queue."""
    return pool.pages[page_id].next_free if shard < 0 else pool.shard_links[page_id].next


cdef inline int32_t _record_before(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    return pool.pages[page_id].prev_free if shard < 0 else pool.shard_links[page_id].prev


cdef inline bint is_page(const Pool *pool, int32_t record) noexcept nogil:
    """Whether a record of a queue is a page, not a divider or an end."""
    return NULL_PAGE < record < pool.num_pages


cdef inline int32_t _oldest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    """Return the page that has been in a part for longest, or NULL_PAGE."""
    cdef int32_t page_id = record_behind(pool, start_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t _newest_in(const Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    cdef int32_t page_id = _record_before(pool, _end_of_part(pool, part, shard), shard)
    return page_id if is_page(pool, page_id) else <int32_t>NULL_PAGE


cdef inline int32_t _oldest_in_parts(const Pool *pool, int32_t first, int32_t stop, int32_t shard) noexcept nogil:
    """Return the oldest page of the first of the parts ``[first, stop)`` that has any, or NULL_PAGE. O(parts)."""
    cdef int32_t part, page_id = NULL_PAGE
    for part in range(first, stop):
        page_id = _oldest_in(pool, part, shard)
        if page_id != NULL_PAGE:
            break
    return page_id


cdef inline void link_page(Pool *pool, int32_t page_id, int32_t end) noexcept nogil:
    """Insert a page into the pool's queue, before the record `end`."""
    cdef Page *pages = pool.pages
    cdef int32_t last = pages[end].prev_free
    assert 0 < page_id < pool.num_pages and not is_free(pool, page_id) and pages[last].next_free == end
    pages[page_id].prev_free = last
    pages[page_id].next_free = end
    pages[last].next_free = page_id
    pages[end].prev_free = page_id
    pool.num_free += 1
    assert pool.num_free < pool.num_pages


cdef inline void push(Pool *pool, int32_t page_id) noexcept nogil:
    """Append a page to the queue; if that has parts, to the part in which the page belongs."""
    if exceptional(pool.is_divided):
        _push_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, NULL_PAGE)


cdef inline void _push_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Append a page to its part of its bank's queue, and of its shard's."""
    cdef int32_t queue
    if pool.num_parts > NEW + 1 or pool.num_shards:
        push_at(pool, page_id, now_of(pool) if pool.expected.terms != NULL else 0)
    else:
        queue = queue_of(pool, page_id)
        link_page(pool, page_id, _end_of_part(pool, BLANK if pool.pages[page_id].group == NO_GROUP else NEW, queue))
        count_in_bank(pool, queue, 1)


cdef inline int32_t queue_of(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the queue of a page's bank."""
    return queue_of_bank(bank_of(pool, page_id))


cdef inline void count_in_bank(Pool *pool, int32_t queue, int32_t change) noexcept nogil:
    """Count pages that enter a bank's queue, or with a negative change leave it."""
    if pool.num_banks > 1:
        pool.banks[-1 - queue].num_free += change
        assert 0 <= pool.banks[-1 - queue].num_free <= count_pages_in(pool, queue)


cdef inline void push_at(Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    """Do `_push_to_divisions` at a given time, which matters only with terms."""
    _stamp_queued(pool, page_id, now)
    _append(pool, page_id)


cdef inline bint _is_in_order(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page that is not the oldest of its part is without a term, or no older than the page before it."""
    return term_of(pool, page_id) == UNKNOWN or not _is_older(pool, page_id, pool.pages[page_id].prev_free)


cdef inline void _append(Pool *pool, int32_t page_id) noexcept nogil:
    """Link a page in at the back of its part of its bank's queue, and of its shard's."""
    cdef int32_t shard, part = _part_of(pool, page_id), queue = queue_of(pool, page_id)
    count_in_part(pool, page_id, 1)
    link_page(pool, page_id, _end_of_part(pool, part, queue))
    count_in_bank(pool, queue, 1)
    if pool.num_shards:
        shard = shard_queue_of(pool, page_id)
        _push_to_shard(pool, page_id, shard, _end_of_part(pool, part, shard))
    assert _oldest_in(pool, part, queue) == page_id or _is_in_order(pool, page_id)


cdef inline void push_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry at the front of the queue; if that has parts, of its blank part."""
    assert pool.pages[page_id].group == NO_GROUP and term_of(pool, page_id) == UNKNOWN
    if exceptional(pool.is_divided):
        _push_first_to_divisions(pool, page_id)
    else:
        link_page(pool, page_id, record_behind(pool, NULL_PAGE, -1))


cdef inline void _push_first_to_divisions(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page without an entry at the front of the blank part of its bank, if there are parts, and of its shard's."""
    cdef int32_t shard, queue = queue_of(pool, page_id)
    _stamp_queued(pool, page_id, now_of(pool) if pool.expected.terms != NULL else 0)
    count_in_part(pool, page_id, 1)
    link_page(pool, page_id, record_behind(pool, _front_of_blank(pool, queue), queue))
    count_in_bank(pool, queue, 1)
    if pool.num_shards:
        shard = shard_queue_of(pool, page_id)
        _push_to_shard(pool, page_id, shard, record_behind(pool, _front_of_blank(pool, shard), shard))


cdef inline int32_t _front_of_blank(const Pool *pool, int32_t shard) noexcept nogil:
    """Return the record before the pages without an entry; without parts the one before all pages."""
    return start_of_part(pool, BLANK, shard) if pool.num_parts else end_of_queue(pool, shard)


cdef inline void _stamp_queued(Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    """Set the mark and the stamp of a page that is put into the queue. A page without an entry gets the mark of the blank part,
    and its charge ends.
    """
    cdef uint32_t part
    assert pool.pages[page_id].group != NO_GROUP or term_of(pool, page_id) == UNKNOWN
    if is_served(pool, page_id):
        part = BLANK if pool.pages[page_id].group == NO_GROUP else pool.policy.marks[page_id] & PART
        if part == BLANK:
            pool.policy.marks[page_id] = BLANK
        else:
            stamp_page(pool.policy, page_id, part)
    if rare(pool.expected.terms != NULL):
        pool.expected.stamps[page_id] = <uint32_t>now
        if pool.tenants.of_pages != NULL and _part_of(pool, page_id) == BLANK:
            end_charge(pool, page_id)


cdef inline int64_t now_of(const Pool *pool) noexcept nogil:
    """Return the time on the clock of stamps."""
    return pool.expected.fixed_time or coarse_time(SECOND)


cdef inline uint32_t _idle_time(const Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    return <uint32_t>now - pool.expected.stamps[page_id]


cdef inline bint _is_older(const Pool *pool, int32_t page_id, int32_t other) noexcept nogil:
    """Whether a free page was released before another one. Stamps wrap around; no page is idle for half of their range."""
    return <int32_t>(pool.expected.stamps[other] - pool.expected.stamps[page_id]) > 0


cdef inline uint32_t _limit_of(int32_t term) noexcept nogil:
    """Return the idle time at which a term is over."""
    return <uint32_t>SECOND << term


cdef inline int32_t _term_from_idle(uint32_t idle) noexcept nogil:
    """Return the term of a page that has none: it counts as expected in twice its idle time."""
    return min(highest_bit(2 * (idle // SECOND) | 1) + 1, <int32_t>LAST_TERM)


cdef inline int32_t _current_term(const Pool *pool, int32_t page_id, int64_t now) noexcept nogil:
    """Return the term of a free page that has one. A late page counts as one of the first term longer than its idle time."""
    cdef int32_t term = term_of(pool, page_id)
    cdef uint32_t idle = _idle_time(pool, page_id, now)
    if term == NEVER or idle < _limit_of(term):
        return term
    return min(highest_bit(idle // SECOND) + 1, <int32_t>LAST_TERM)


cdef inline void count_in_part(Pool *pool, int32_t page_id, int32_t change) noexcept nogil:
    """Count a page that enters its part, or with a change of -1 leaves it."""
    if rare(pool.expected.terms != NULL):
        _count_with_term(pool, page_id, change)
    if is_served(pool, page_id) and term_of(pool, page_id) == UNKNOWN:
        pool.policy.num_in_part[pool.policy.marks[page_id] & PART] += change
        assert pool.policy.num_in_part[pool.policy.marks[page_id] & PART] >= 0


cdef inline void _count_with_term(Pool *pool, int32_t page_id, int32_t change) noexcept nogil:
    """Count a page for its term, if it has one, and for its tenant."""
    cdef int32_t bank, term = term_of(pool, page_id)
    cdef uint8_t tenant = pool.tenants.of_pages[page_id] if pool.tenants.of_pages != NULL else <uint8_t>NO_TENANT
    if term != UNKNOWN:
        pool.expected.num_free[term] += change
        assert 0 <= pool.expected.num_free[term] < pool.num_pages
        if pool.expected.num_free[term]:
            pool.expected.free_terms |= <uint32_t>1 << term
        else:
            pool.expected.free_terms &= ~(<uint32_t>1 << term)
    if tenant != NO_TENANT:
        bank = bank_of(pool, page_id)
        pool.tenants.num_free[bank][tenant] += change
        assert 0 <= pool.tenants.num_free[bank][tenant] <= pool.tenants.num_charged[bank][tenant]


cdef inline void push_marked(Pool *pool, int32_t page_id) noexcept nogil:
    """Append a page of the first bank to the part that its mark names, as it was before it was saved. The pool has no shards.
    """
    cdef int32_t part = <int32_t>(pool.policy.marks[page_id] & PART)
    link_page(pool, page_id, _end_of_part(pool, part, -1))
    count_in_bank(pool, -1, 1)
    pool.policy.num_in_part[part] += 1


cdef inline void _push_to_shard(Pool *pool, int32_t page_id, int32_t shard, int32_t end) noexcept nogil:
    assert is_free(pool, page_id) and shard == shard_queue_of(pool, page_id) < pool.num_banks * pool.num_shards
    link_after(pool.shard_links, pool.shard_links[end].prev, page_id)
    pool.shard_num_free[shard] += 1


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
    count_in_part(pool, page_id, -1)
    if rare(pool.tenants.of_pages != NULL):
        begin_charge(pool, page_id)


cdef inline void pull_unused(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue without counting a use: it is about to lose its entry, or to be queued again."""
    if is_served(pool, page_id):
        discount(pool.policy, page_id)
    pull(pool, page_id)


cdef inline void begin_queues(Pool *pool) noexcept nogil:
    """Make an empty queue for each bank, with the dividers of all parts."""
    cdef int32_t bank, part, end
    pool.num_free = 0
    for bank in range(pool.num_banks):
        pool.banks[bank].num_free = 0
        end = end_of_queue(pool, queue_of_bank(bank))
        pool.pages[end] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=end, next_free=end, group=NO_GROUP)
        for part in range(pool.num_parts):
            _link_divider(pool.pages, start_of_part(pool, part, queue_of_bank(bank)), end)


cdef inline void _link_divider(Page *pages, int32_t divider, int32_t end) noexcept nogil:
    """Insert a part's divider into a queue, before the record `end`."""
    cdef int32_t last = pages[end].prev_free
    pages[divider] = Page(key_lo=0, key_hi=0, ref_cnt=0, prev_free=last, next_free=end, group=NO_GROUP)
    pages[last].next_free = divider
    pages[end].prev_free = divider


cdef inline void begin_plain_parts(Pool *pool) noexcept nogil:
    """Divide the queue of each bank, which has no parts, into a blank part and one of cached pages. O(num_pages)."""
    cdef Page *pages = pool.pages
    cdef int32_t[MAX_BANKS] first
    cdef int32_t bank, page_id, following
    for bank in range(pool.num_banks):
        first[bank] = pages[end_of_queue(pool, queue_of_bank(bank))].next_free
    pool.num_parts, pool.num_parts_each, pool.is_divided = NEW + 1, NEW + 1, True
    begin_queues(pool)
    for bank in range(pool.num_banks):
        page_id = first[bank]
        while is_page(pool, page_id):
            following = pages[page_id].next_free
            pages[page_id].prev_free = NOT_FREE
            link_page(
                pool, page_id,
                _end_of_part(pool, BLANK if pages[page_id].group == NO_GROUP else NEW, queue_of_bank(bank)),
            )
            count_in_bank(pool, queue_of_bank(bank), 1)
            page_id = following


cdef inline void _add_parts(Pool *pool, int32_t num_parts) noexcept nogil:
    """Add empty parts, up to this number, at the back of the queue of each bank, which has parts. The records of the banks that
    follow move up. O(parts).
    """
    cdef Page *pages = pool.pages
    cdef int32_t bank, part, record, target, num_before = pool.num_parts
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
            _link_divider(
                pages, start_of_part(pool, part, queue_of_bank(bank)), end_of_queue(pool, queue_of_bank(bank)),
            )


cdef inline void begin_terms(Pool *pool, uint32_t *stamps) noexcept nogil:
    """Divide the queue of each bank, which has parts, by terms. The memory of `stamps` also has room for terms and tenants, all
    0. Free pages count as released now. O(num_pages).
    """
    cdef int32_t page_id
    cdef uint32_t now = <uint32_t>now_of(pool)
    pool.expected.stamps, pool.expected.terms = stamps, <uint8_t *>(stamps + pool.num_pages)
    for page_id in range(pool.num_pages):
        stamps[page_id] = now
    _add_parts(pool, pool.num_parts + NEVER)
    pool.num_parts_each = pool.num_parts


cdef inline void begin_tenants(Pool *pool) noexcept nogil:
    """Divide the queue of each bank, which has terms, by tenants too. All pages become common. O(num_pages)."""
    cdef int32_t bank, page_id
    _add_parts(pool, MAX_TENANTS * pool.num_parts_each)
    pool.tenants.of_pages = pool.expected.terms + pool.num_pages
    pool.tenants.shares[COMMON] = 1
    for bank in range(pool.num_banks):
        pool.tenants.num_charged[bank][COMMON] = count_pages_in(pool, queue_of_bank(bank))
    for page_id in range(1, pool.num_pages):
        if is_free(pool, page_id) and _part_of(pool, page_id) == BLANK:
            end_charge(pool, page_id)
        elif is_free(pool, page_id):
            pool.tenants.num_free[bank_of(pool, page_id)][COMMON] += 1


cdef inline void join_common(Pool *pool, uint8_t tenant) noexcept nogil:
    """Charge the pages of a tenant to the common one, and merge its free pages in the order of their release. The caller links
    the queues of shards anew. O(num_pages).
    """
    cdef int32_t bank, page_id
    for bank in range(pool.num_banks):
        _merge_with_common(pool, tenant, queue_of_bank(bank))
    for page_id in range(1, pool.num_pages):
        if pool.tenants.of_pages[page_id] == tenant:
            charge(pool, page_id, COMMON)


cdef inline void _merge_with_common(Pool *pool, uint8_t tenant, int32_t queue) noexcept nogil:
    """Move a tenant's pages of a queue to the common parts, each before those that were released later."""
    cdef int32_t part, page_id, target
    for part in range(NEW, pool.num_parts_each):
        target = _oldest_in(pool, part, queue)
        page_id = _oldest_in(pool, tenant * pool.num_parts_each + part, queue)
        while page_id != NULL_PAGE:
            pull(pool, page_id)
            charge(pool, page_id, COMMON)
            while target != NULL_PAGE and not _is_older(pool, page_id, target):
                target = record_behind(pool, target, queue)
                target = target if is_page(pool, target) else <int32_t>NULL_PAGE
            count_in_part(pool, page_id, 1)
            link_page(pool, page_id, target if target != NULL_PAGE else _end_of_part(pool, part, queue))
            count_in_bank(pool, queue, 1)
            page_id = _oldest_in(pool, tenant * pool.num_parts_each + part, queue)
    assert pool.tenants.num_free[bank_of_queue(pool, queue)][tenant] == 0


cdef inline void link_shards(Pool *pool) noexcept nogil:
    """Build the queue of each shard from that of its bank. O(free pages)."""
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
                _push_to_shard(pool, page_id, shard, _end_of_part(pool, part, shard))
            page_id = pool.pages[page_id].next_free


cdef inline int32_t count_free_in(const Pool *pool, int32_t queue) noexcept nogil:
    """Count the free pages of a bank or shard."""
    if queue < 0:
        return pool.num_free if pool.num_banks == 1 else pool.banks[-1 - queue].num_free
    return pool.shard_num_free[queue]


cdef inline int32_t count_least_free(const Pool *pool) noexcept nogil:
    """Count the free pages of the bank or shard that has the fewest."""
    cdef int32_t queue, count = pool.num_free
    for queue in range(-pool.num_banks if pool.num_banks > 1 else 0, pool.num_banks * pool.num_shards):
        count = min(count, count_free_in(pool, queue))
    return count


cdef inline int32_t page_behind(const Pool *pool, int32_t page_id, int32_t shard) noexcept nogil:
    """Return the page behind `page_id` in a shard's queue, whatever its part. If there is none: NULL_PAGE, or the shard's end.
    """
    page_id = record_behind(pool, page_id, shard)
    while page_id >= pool.num_pages and page_id != end_of_queue(pool, shard):
        page_id = record_behind(pool, page_id, shard)
    return page_id


cdef inline int32_t page_before(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the page before `page_id` in its bank's queue, whatever its part. If there is none: the end of the queue."""
    cdef int32_t end = end_of_queue(pool, queue_of(pool, page_id))
    page_id = pool.pages[page_id].prev_free
    while page_id >= pool.num_pages and page_id != end:
        page_id = pool.pages[page_id].prev_free
    return page_id


# The victim. `first` is the first part of the tenant whose page it is.


cdef inline int32_t *_known_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    return &pool.policy.newest[part] if shard < 0 else &pool.shard_newest[shard * NUM_PARTS + part]


cdef inline int32_t _first_of_newest(Pool *pool, int32_t part, int32_t shard, int32_t first) noexcept nogil:
    """Return the first page that the latest release put into a part of the policy, or NULL_PAGE. Amortised O(1)."""
    cdef Policy *policy = pool.policy
    cdef const uint32_t *marks = policy.marks
    cdef int32_t *known = _known_newest(pool, part, shard)
    cdef int32_t before, page_id = _newest_in(pool, first + part, shard)
    if page_id == NULL_PAGE:
        return NULL_PAGE
    assert _part_of(pool, page_id) == first + part
    if known[0] != NULL_PAGE and is_free(pool, known[0]) and _part_of(pool, known[0]) == first + part:
        if marks[known[0]] == marks[page_id]:
            page_id = known[0]
    before = _record_before(pool, page_id, shard)
    while is_page(pool, before) and marks[before] == marks[page_id]:
        page_id = before
        before = _record_before(pool, page_id, shard)
    known[0] = page_id
    return page_id


cdef inline int32_t _candidate_of(Pool *pool, const Decision *decision, int32_t first) noexcept nogil:
    if decision.is_newest:
        return _first_of_newest(pool, decision.part, decision.shard, first)
    return _oldest_in(pool, first + decision.part, decision.shard)


cdef inline Decision _decide_as_lru(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Choose the oldest page of all parts of the policy."""
    cdef Policy *policy = pool.policy
    cdef Decision oldest = Decision(part=BLANK, shard=shard, is_newest=False, mark=0)
    cdef uint32_t mark
    cdef int32_t part, page_id
    for part in range(NEW, NUM_PARTS):
        page_id = _oldest_in(pool, first + part, shard)
        if page_id != NULL_PAGE:
            mark = policy.marks[page_id]
            if oldest.part == BLANK or age_of(policy, mark) > age_of(policy, oldest.mark):
                oldest = Decision(part=part, shard=shard, is_newest=False, mark=mark)
    return oldest


cdef inline Decision _decide(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Choose the page of least value among the oldest and the newest of each part, if its value is less than MARGIN % of that
    of LRU's choice.
    """
    cdef Policy *policy = pool.policy
    cdef Decision best = _decide_as_lru(pool, shard, first)
    cdef double value, least = value_of(policy, best.mark) * MARGIN / 100
    cdef int32_t part, page_id, is_newest
    if policy.learned.num_released < policy.learned.paused_until:
        return best
    for part in range(NEW, NUM_PARTS):
        for is_newest in range(2):
            page_id = _newest_in(pool, first + part, shard) if is_newest else _oldest_in(pool, first + part, shard)
            if page_id != NULL_PAGE:
                value = value_of(policy, policy.marks[page_id])
                if value < least:
                    least = value
                    best = Decision(part=part, shard=shard, is_newest=is_newest, mark=policy.marks[page_id])
    return best


cdef inline int32_t _pick_least_value(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Return the page that the policy evicts next. It has to leave the queue before the next call."""
    cdef Policy *policy = pool.policy
    cdef Decision *decision = &policy.learned.decision
    cdef int32_t behind, page_id = NULL_PAGE
    if decision.part != BLANK and decision.shard == shard and policy.first_part == first:
        page_id = _candidate_of(pool, decision, first)
    if page_id == NULL_PAGE or policy.marks[page_id] != decision.mark:
        decision[0], policy.first_part = _decide(pool, shard, first), first
        page_id = _candidate_of(pool, decision, first)
    if decision.is_newest:
        behind = record_behind(pool, page_id, shard)
        _known_newest(pool, decision.part, shard)[0] = behind if is_page(pool, behind) else <int32_t>NULL_PAGE
    return page_id


cdef inline bint has_policy(const Pool *pool, int32_t queue) noexcept nogil:
    """Whether a policy chooses the victims of a queue."""
    return pool.policy != NULL and bank_of_queue(pool, queue) == 0


cdef inline int32_t _pick_plain(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Return the victim among the pages without a term: the policy's pick, or the page released first. NULL_PAGE: all are
    blank.
    """
    if not has_policy(pool, shard):
        return _oldest_in(pool, first + NEW, shard)
    if pool.expected.free_terms and _oldest_in_parts(pool, first + NEW, first + NUM_PARTS, shard) == NULL_PAGE:
        return NULL_PAGE
    return _pick_least_value(pool, shard, first)


cdef inline Supply begin_supply(const Pool *pool, int32_t taker) noexcept nogil:
    """Begin a call that takes pages for a tenant."""
    return Supply(
        taker=taker, num_left=0, tenant=COMMON, num_due=0, now=now_of(pool) if pool.expected.terms != NULL else 0, part=NO_PART,
        stamp=0,
    )


cdef inline int32_t _find_furthest(const Pool *pool, int32_t shard, int32_t first, int64_t now) noexcept nogil:
    """Return the victim among the pages with a term: one that is not expected back or, among the oldest page of each term, the
    one whose return is furthest off. The oldest of a term is late first. NULL_PAGE: there is none. O(terms).
    """
    cdef uint32_t terms = pool.expected.free_terms
    cdef int32_t term, page_id, longest = UNKNOWN, furthest = NULL_PAGE
    while terms:
        term = highest_bit(terms)
        terms ^= <uint32_t>1 << term
        page_id = _oldest_in(pool, _part_of_term(pool, first, term), shard)
        if page_id == NULL_PAGE:
            continue
        if term == NEVER:
            return page_id
        term = _current_term(pool, page_id, now)
        if term > longest or (term == longest and _is_older(pool, page_id, furthest)):
            longest, furthest = term, page_id
    return furthest


cdef inline int32_t _pick_expected(const Pool *pool, int32_t shard, int32_t first, Supply *supply) noexcept nogil:
    """Return `_find_furthest`. Pages with the stamp of the last one follow it without a comparison."""
    cdef int32_t page_id = NULL_PAGE
    if first <= supply.part < first + pool.num_parts_each:
        page_id = _oldest_in(pool, supply.part, shard)
    if page_id == NULL_PAGE or pool.expected.stamps[page_id] != supply.stamp:
        page_id = _find_furthest(pool, shard, first, supply.now)
        supply.part = _part_of(pool, page_id) if page_id != NULL_PAGE else <int32_t>NO_PART
        supply.stamp = pool.expected.stamps[page_id]
    assert page_id == NULL_PAGE or (is_free(pool, page_id) and term_of(pool, page_id) != UNKNOWN)
    return page_id


cdef inline bint _is_further(const Pool *pool, int32_t page_id, int32_t other, int64_t now) noexcept nogil:
    """Whether the return of a page without a term is further off than that of a page with one."""
    cdef int32_t term = _term_from_idle(_idle_time(pool, page_id, now)), other_term = _current_term(pool, other, now)
    return term > other_term or (term == other_term and not _is_older(pool, other, page_id))


cdef inline bint _has_cached_in(const Pool *pool, int32_t tenant, int32_t shard) noexcept nogil:
    """Whether a tenant has pages in a shard's queue that are not blank."""
    cdef int32_t first = tenant * pool.num_parts_each
    cdef int32_t num_free = pool.tenants.num_free[bank_of_queue(pool, shard)][tenant]
    if num_free == 0 or shard < 0:
        return num_free > 0
    return _oldest_in_parts(pool, first + NEW, first + pool.num_parts_each, shard) != NULL_PAGE


cdef inline int32_t _pick_cached(Pool *pool, int32_t shard, int32_t first, Supply *supply) noexcept nogil:
    """Return the victim among the pages of a tenant that are not blank."""
    cdef int32_t plain
    cdef int32_t page_id = _pick_expected(pool, shard, first, supply)
    if page_id != NULL_PAGE and term_of(pool, page_id) == NEVER:
        return page_id
    plain = _pick_plain(pool, shard, first)
    if page_id == NULL_PAGE or (plain != NULL_PAGE and _is_further(pool, plain, page_id, supply.now)):
        return plain
    return page_id


cdef inline double _excess_of(const Pool *pool, int32_t tenant, int32_t bank, const Supply *supply) noexcept nogil:
    """Return the number of a bank's pages above a tenant's share of them. Pages that it is about to take count."""
    cdef int32_t num_taken = supply.num_left if tenant == supply.taker else 0
    cdef double share = pool.tenants.shares[tenant] * count_pages_in(pool, queue_of_bank(bank))
    return pool.tenants.num_charged[bank][tenant] + num_taken - share


cdef inline bint _goes_before(const Pool *pool, int32_t page_id, int32_t other) noexcept nogil:
    """Whether a page goes before one of another tenant: it alone is not expected back, or else it was released earlier."""
    cdef bint is_wanted = term_of(pool, page_id) != NEVER
    if is_wanted != (term_of(pool, other) != NEVER):
        return not is_wanted
    return _is_older(pool, page_id, other)


cdef inline bint _choose_among(Pool *pool, int32_t shard, Supply *supply, double least) noexcept nogil:
    """Choose the tenant whose page goes first among those with more than `least` pages above their share; False if there is
    none.
    """
    cdef double excess
    cdef int32_t tenant, page_id, first = NULL_PAGE
    for tenant in range(MAX_TENANTS):
        excess = _excess_of(pool, tenant, bank_of_queue(pool, shard), supply)
        if _has_cached_in(pool, tenant, shard) and excess > least:
            page_id = _pick_cached(pool, shard, tenant * pool.num_parts_each, supply)
            if first == NULL_PAGE or _goes_before(pool, page_id, first):
                first, supply.tenant = page_id, tenant
                supply.num_due = <int32_t>min(<double>MAX_DUE, max(0.0, excess - 1))
    return first != NULL_PAGE


cdef inline void _choose_tenant(Pool *pool, int32_t shard, Supply *supply) noexcept nogil:
    """Choose the tenant above its share whose page goes first, for up to MAX_DUE more pages; any tenant if none is above.
    O(tenants) for each choice.
    """
    supply.num_due -= 1
    if supply.num_due >= 0 and _has_cached_in(pool, supply.tenant, shard):
        return
    if not _choose_among(pool, shard, supply, 0):
        _choose_among(pool, shard, supply, -INFINITY)
    assert _has_cached_in(pool, supply.tenant, shard)


cdef inline int32_t pick(Pool *pool, int32_t shard, Supply *supply) noexcept nogil:
    """Return the victim of a shard; -1 means the whole pool. Without parts it is the page in front."""
    cdef int32_t page_id
    if pool.num_parts == 0:
        return record_behind(pool, end_of_queue(pool, shard), shard)
    page_id = _oldest_in(pool, BLANK, shard)
    if page_id != NULL_PAGE:
        return page_id
    if pool.expected.terms == NULL:
        return _pick_plain(pool, shard, 0)
    if rare(pool.tenants.of_pages != NULL):
        _choose_tenant(pool, shard, supply)
    return _pick_cached(pool, shard, supply.tenant * pool.num_parts_each, supply)


cdef inline int32_t find_held_free(const Pool *pool, Py_ssize_t n) noexcept nogil:
    """Return a page with references among the first `n` of the free queue and of each shard's, or NULL_PAGE. With parts any
    page can be the next, so all are searched.
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
    """Append pages to the queue. Return -1 or, with nothing changed, the index of a page that must not be there."""
    cdef Py_ssize_t i, bad = -1
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) or pool.pages[ids[i]].ref_cnt:
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
    """Whether `num_pages` can be taken from a bank or shard, with `num_reserved` left in the bank, or in the pool."""
    if num_pages and num_pages + num_reserved > count_free_in(pool, queue_of_bank(bank_of_queue(pool, shard))):
        return False
    return num_pages <= count_free_in(pool, shard)


cdef inline bint is_counted(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a policy counts the release of a page. It skips blank pages, which would only use its clock up."""
    if not is_served(pool, page_id) or pool.pages[page_id].group == NO_GROUP:
        return False
    return pool.policy.marks[page_id] & PART != BLANK


cdef inline void enqueue(Pool *pool, int32_t page_id) noexcept nogil:
    """`push` a page that lost its last reference, or goes back to where it was. A policy counts it."""
    if is_counted(pool, page_id):
        count_release(pool.policy, 1, count_free_in(pool, -1))
    push(pool, page_id)


# Terms of cached pages. A held or free page gets one; its time runs from then on, and starts again when the page is released.
# The next use ends the term, and so does the loss of the entry.


cdef inline bint may_have_term(const Pool *pool, int32_t page_id, int32_t term) noexcept nogil:
    """Whether a page is cached and can get a term, or lose it. A shared page's term can only be shortened: no session delays
    the eviction of pages that others use.
    """
    if pool.pages[page_id].group == NO_GROUP or (term == UNKNOWN and term_of(pool, page_id) == UNKNOWN):
        return False
    return not rare(is_shared(pool, page_id)) or UNKNOWN < term < _own_term(pool, page_id)


cdef inline void expect_page(Pool *pool, int32_t page_id, int32_t term, int64_t now) noexcept nogil:
    """Give a page another term, or UNKNOWN, if it may have it. A free page is queued as if it had just been released."""
    cdef bint is_moved = is_free(pool, page_id)
    if not may_have_term(pool, page_id, term):
        return
    if is_moved:
        pull_unused(pool, page_id)
    pool.expected.terms[page_id] = <uint8_t>term
    pool.expected.stamps[page_id] = <uint32_t>now
    if is_moved:
        push_at(pool, page_id, now)


cdef inline int32_t _own_term(const Pool *pool, int32_t page_id) noexcept nogil:
    """Return the term of a page. A free page without one gets that of its idle time, a held one gets 1."""
    if not is_free(pool, page_id):
        return term_of(pool, page_id) or 1
    if term_of(pool, page_id) == UNKNOWN:
        return _term_from_idle(_idle_time(pool, page_id, now_of(pool)))
    return _current_term(pool, page_id, now_of(pool))


cdef inline void use_page(Pool *pool, int32_t page_id) noexcept nogil:
    """End the term of a page that is used, if it has one, and count whether the use is in time. The page is outside the queue.
    """
    cdef int32_t term = term_of(pool, page_id)
    cdef bint is_late
    assert not is_free(pool, page_id)
    if term == UNKNOWN:
        return
    if term != NEVER:
        is_late = _idle_time(pool, page_id, now_of(pool)) >= _limit_of(term)
        pool.expected.outcomes.num_late_pages += is_late
        pool.expected.outcomes.num_pages_in_time += not is_late
    pool.expected.terms[page_id] = UNKNOWN


cdef inline void lose_term(Pool *pool, int32_t page_id) noexcept nogil:
    """End the term of a page that has lost its entry, if it has one. The page is outside the queue."""
    assert pool.pages[page_id].group == NO_GROUP and (term_of(pool, page_id) == UNKNOWN or not is_free(pool, page_id))
    if term_of(pool, page_id) != UNKNOWN:
        pool.expected.outcomes.num_unused_pages += term_of(pool, page_id) != NEVER
        pool.expected.terms[page_id] = UNKNOWN
