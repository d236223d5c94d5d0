# The victim: the free page that is evicted next. The numbered steps in core/README.md, "The victim", define the choice. In the
# functions below, `first` is the first part of the tenant whose page is chosen, and `shard` the number of a queue.
#
# Always:
#
# * A pick changes no queue. The picked page has to leave its queue before the next pick.
# * The victim is a blank page if there is one. Else it is the oldest page of its part or, if the policy decides so, the first
#   page that the latest release put into its part.

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t

from pagepool.core.pool.queue cimport *

cdef enum:
    MAX_DUE = 31              # pages taken from a tenant before a tenant is chosen again

cdef struct Supply:           # state of a call that takes pages
    int32_t taker             # tenant for which the pages are taken
    int32_t num_left          # pages still to be taken
    int32_t tenant            # tenant whose cached pages are taken
    int32_t num_due           # further pages from this tenant before one is chosen again
    int64_t now               # time at which the call began; 0 without terms
    int32_t part              # part of the page with a term that was picked last; NO_PART: there is none
    uint32_t stamp            # stamp of that page


cdef inline int32_t *_known_newest(Pool *pool, int32_t part, int32_t shard) noexcept nogil:
    return &pool.policy.newest[part] if shard < 0 else &pool.shard_newest[shard * NUM_PARTS + part]


cdef inline int32_t _first_of_newest(Pool *pool, int32_t part, int32_t shard, int32_t first) noexcept nogil:
    """Return the first page that the latest release put into a part of the policy, or NULL_PAGE. Amortised O(1)."""
    cdef Policy *policy = pool.policy
    cdef const uint32_t *marks = policy.marks
    cdef int32_t *known = _known_newest(pool, part, shard)
    cdef int32_t before, page_id = newest_in(pool, first + part, shard)
    if page_id == NULL_PAGE:
        return NULL_PAGE
    assert part_of(pool, page_id) == first + part
    if known[0] != NULL_PAGE and is_free(pool, known[0]) and part_of(pool, known[0]) == first + part:
        if marks[known[0]] == marks[page_id]:
            page_id = known[0]
    before = record_before(pool, page_id, shard)
    while is_page(pool, before) and marks[before] == marks[page_id]:
        page_id = before
        before = record_before(pool, page_id, shard)
    known[0] = page_id
    return page_id


cdef inline int32_t _candidate_of(Pool *pool, const Decision *decision, int32_t first) noexcept nogil:
    """Return the page that a decision evicts next, or NULL_PAGE."""
    if decision.is_newest:
        return _first_of_newest(pool, decision.part, decision.shard, first)
    return oldest_in(pool, first + decision.part, decision.shard)


cdef inline Decision _decide(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Decide whether to evict oldest or newest pages, and from which part: choose the page of least value if that is less than
    MARGIN % of the value of LRU's choice, else LRU's choice, which is the oldest page of all.
    """
    cdef Policy *policy = pool.policy
    cdef Decision candidate, best, oldest = Decision(part=BLANK, shard=shard, is_newest=False, mark=0)
    cdef bint is_lru = policy.learned.num_released < policy.learned.paused_until
    cdef double value, least = INFINITY
    cdef int32_t order, page_id
    for order in range(2 * NEW, 2 * NUM_PARTS):
        candidate = Decision(part=order >> 1, shard=shard, is_newest=order & 1, mark=0)
        page_id = newest_in(pool, first + (order >> 1), shard) if order & 1 else oldest_in(pool, first + (order >> 1), shard)
        if page_id == NULL_PAGE:
            continue
        candidate.mark = policy.marks[page_id]
        if not candidate.is_newest:
            if oldest.part == BLANK or age_of(policy, candidate.mark) > age_of(policy, oldest.mark):
                oldest = candidate
        value = INFINITY if is_lru else value_of(policy, candidate.mark)
        if value < least:
            least, best = value, candidate
    return best if least < value_of(policy, oldest.mark) * MARGIN / 100 else oldest


cdef inline int32_t _pick_least_value(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Return the page that the policy evicts next. It has to leave the queue before the next call."""
    cdef Policy *policy = pool.policy
    cdef Decision *decision = &policy.learned.decision
    cdef int32_t behind, page_id = NULL_PAGE
    assert bank_of_queue(pool, shard) == 0
    if decision.part != BLANK and decision.shard == shard and policy.first_part == first:
        page_id = _candidate_of(pool, decision, first)
    if page_id == NULL_PAGE or policy.marks[page_id] != decision.mark:
        decision[0], policy.first_part = _decide(pool, shard, first), first
        page_id = _candidate_of(pool, decision, first)
    if decision.is_newest:
        behind = record_behind(pool, page_id, shard)
        _known_newest(pool, decision.part, shard)[0] = behind if is_page(pool, behind) else <int32_t>NULL_PAGE
    return page_id


cdef inline int32_t _pick_checkpoint(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Return the oldest checkpoint of the class whose checkpoint has waited longest, for each hit token that it promises.
    NULL_PAGE: no free page has an entry and no term. O(classes).
    """
    cdef Checkpoints *checkpoints = pool.banks[bank_of_queue(pool, shard)].checkpoints
    cdef double waiting, longest = -1
    cdef int32_t number, page_id, victim = NULL_PAGE
    for number in range(NUM_CHECKPOINT_CLASSES):
        page_id = oldest_in(pool, first + NEW + number, shard)
        if page_id != NULL_PAGE:
            waiting = waiting_of(checkpoints, number, note_of(checkpoints, page_id).stamp)
            if waiting > longest:
                longest, victim = waiting, page_id
    return victim


cdef inline int32_t _pick_plain(Pool *pool, int32_t shard, int32_t first) noexcept nogil:
    """Return the victim among the pages without a term: the policy's pick, a checkpoint by its class or, without
    either, the page released first. NULL_PAGE: all such pages are blank.
    """
    if has_checkpoints(pool, shard):
        return _pick_checkpoint(pool, shard, first)
    if not has_policy(pool, shard):
        return oldest_in(pool, first + NEW, shard)
    if pool.expected.free_terms and oldest_in_parts(pool, first + NEW, first + NUM_PARTS, shard) == NULL_PAGE:
        return NULL_PAGE
    return _pick_least_value(pool, shard, first)


cdef inline Supply begin_supply(const Pool *pool, int32_t taker) noexcept nogil:
    """Begin a call that takes pages for a tenant."""
    cdef int64_t now = now_of(&pool.expected) if pool.expected.terms != NULL else 0
    return Supply(taker=taker, num_left=0, tenant=COMMON, num_due=0, now=now, part=NO_PART, stamp=0)


cdef inline int32_t _pick_expected(const Pool *pool, int32_t shard, int32_t first, Supply *supply) noexcept nogil:
    """Return the victim among the pages with a term: a page that is not expected back or, of the oldest pages of all terms, the
    page whose return is furthest off. In each term the oldest page is late first. Pages with the part and stamp of the last
    pick follow it without a comparison. NULL_PAGE: no page has a term. O(terms).
    """
    cdef const Expectations *expected = &pool.expected
    cdef uint32_t terms = expected.free_terms
    cdef int32_t term, page_id, longest = UNKNOWN, furthest = NULL_PAGE
    if first <= supply.part < first + pool.num_parts_each:
        page_id = oldest_in(pool, supply.part, shard)
        if page_id != NULL_PAGE and expected.stamps[page_id] == supply.stamp:
            return page_id
    while terms:
        term = highest_bit(terms)
        terms ^= <uint32_t>1 << term
        page_id = oldest_in(pool, part_of_term(pool, first, term), shard)
        if page_id == NULL_PAGE:
            continue
        assert is_free(pool, page_id) and term_of(expected, page_id) == term
        if term == NEVER:
            furthest = page_id
            break
        term = current_term(expected, page_id, supply.now)
        if term > longest or (term == longest and is_older(expected, page_id, furthest)):
            longest, furthest = term, page_id
    supply.part = part_of(pool, furthest) if furthest != NULL_PAGE else <int32_t>NO_PART
    supply.stamp = expected.stamps[furthest]
    return furthest


cdef inline bint _has_cached_in(const Pool *pool, int32_t tenant, int32_t shard) noexcept nogil:
    """Whether a tenant has pages in a shard's queue that are not blank."""
    cdef int32_t first = tenant * pool.num_parts_each
    cdef int32_t num_free = pool.tenants.num_free[bank_of_queue(pool, shard)][tenant]
    if num_free == 0 or shard < 0:
        return num_free > 0
    return oldest_in_parts(pool, first + NEW, first + pool.num_parts_each, shard) != NULL_PAGE


cdef inline int32_t _pick_cached(Pool *pool, int32_t shard, int32_t first, Supply *supply) noexcept nogil:
    """Return the victim among a tenant's pages, except blank ones: the pick of the pages with a term, or the pick of the pages
    without one if its return is further off.
    """
    cdef const Expectations *expected = &pool.expected
    cdef int32_t term, plain_term, plain, page_id = _pick_expected(pool, shard, first, supply)
    if page_id != NULL_PAGE and term_of(expected, page_id) == NEVER:
        return page_id
    plain = _pick_plain(pool, shard, first)
    if page_id == NULL_PAGE or plain == NULL_PAGE:
        return plain if page_id == NULL_PAGE else page_id
    term, plain_term = current_term(expected, page_id, supply.now), term_from_idle(idle_time(expected, plain, supply.now))
    if plain_term > term or (plain_term == term and not is_older(expected, page_id, plain)):
        return plain
    return page_id


cdef inline double _excess_of(const Pool *pool, int32_t tenant, int32_t bank, const Supply *supply) noexcept nogil:
    """Return by how many pages a tenant exceeds its share of a bank. Pages that it is about to take count."""
    cdef int32_t num_taken = supply.num_left if tenant == supply.taker else 0
    cdef double share = pool.tenants.shares[tenant] * (count_pages_in(pool, queue_of_bank(bank)) - pool.banks[bank].num_retired)
    assert 0 <= share and num_taken >= 0
    return pool.tenants.num_charged[bank][tenant] + num_taken - share


cdef inline bint _goes_before(const Pool *pool, int32_t page_id, int32_t other) noexcept nogil:
    """Whether a page is evicted before another tenant's: only it is not expected back, or both are alike and it is older."""
    cdef bint is_wanted = term_of(&pool.expected, page_id) != NEVER
    if is_wanted != (term_of(&pool.expected, other) != NEVER):
        return not is_wanted
    return is_older(&pool.expected, page_id, other)


cdef inline bint _choose_among(Pool *pool, int32_t shard, Supply *supply, double least) noexcept nogil:
    """Choose the tenant whose page is evicted first, of the tenants with more than `least` pages above their share; False if
    there is none.
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
    """Choose the tenant above its share whose page is evicted first, for up to MAX_DUE more pages; if no tenant is above its
    share, choose from all. O(tenants) for each choice.
    """
    supply.num_due -= 1
    if supply.num_due >= 0 and _has_cached_in(pool, supply.tenant, shard):
        return
    if not _choose_among(pool, shard, supply, 0):
        _choose_among(pool, shard, supply, -INFINITY)
    assert _has_cached_in(pool, supply.tenant, shard)


cdef inline int32_t pick(Pool *pool, int32_t shard, Supply *supply) noexcept nogil:
    """Return the victim of the queue of a shard or bank. Without parts it is the page in front."""
    cdef int32_t page_id
    assert count_free_in(pool, shard) > 0
    if pool.num_parts == 0:
        return record_behind(pool, end_of_queue(pool, shard), shard)
    page_id = oldest_in(pool, BLANK, shard)
    if page_id != NULL_PAGE:
        return page_id
    if pool.expected.terms == NULL:
        return _pick_plain(pool, shard, 0)
    if rare(pool.tenants.of_pages != NULL):
        _choose_tenant(pool, shard, supply)
    return _pick_cached(pool, shard, supply.tenant * pool.num_parts_each, supply)
