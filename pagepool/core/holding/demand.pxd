# Tokens get all the pages that they need, or none.
#
# A `Demand` describes these pages. `price` counts them, and refuses hits that are wrong by now; `fit_or_adopt` decides whether
# enough pages are free. Neither changes the pool. Then the caller, which has room for the ids, calls `attach`, `take_missing`
# for each group, and `copy_states`; none of these can fail. Always:
#
# * Only a holding without pages demands hits.
# * `num_new` counts one working page for each state, also if its checkpoint becomes that page.
# * `num_adopted` is 0, or the number of states with hits. In the second case all their checkpoints are free pages.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from pagepool.core.base cimport GUARDS, Digest
from pagepool.core.holding.learning cimport *
from pagepool.core.holding.skipping cimport *
from pagepool.core.pool cimport (
    FLAGS, NOT_FREE, NO_BANK, Page, bank_of_queue, continue_from, count_denied_in, count_request, count_usable_in,
    has_free_pages, hit, ids_in_queue, queue_in, queue_of_bank, take, take_this,
)


cdef enum:
    STALE = -1                # a hit has other content by now
    UNTOUCHABLE = -2          # a hit cannot get another reference

cdef enum Fit:
    FITS
    SHORT                     # too few pages are free besides the reserved ones
    SHORT_IN_SHARD            # only the shard has too few free pages

cdef struct Hits:             # leading pages of a group found by a look-up, null pages first
    const int32_t *ids
    int32_t num

cdef struct Demand:
    const Hits *hits          # [num_groups]; NULL: none
    const PrefixEnd *end      # end of the hits, of a new request; NULL: it was not looked up
    int64_t num_tokens        # tokens that need slots
    Py_ssize_t num_reserved   # pages to leave free, in the first bank
    int32_t shard             # shard of new pages; -1: any
    int64_t num_new           # new pages behind the hits; `price` and `fit_or_adopt` compute this and all fields below
    Py_ssize_t num_free_hits  # hits in the free queue
    int64_t num_taken         # sum of the two above: pages that leave the free queue, if no checkpoint is adopted
    int64_t[MAX_BANKS] num_new_in    # `num_new` of each bank
    int64_t[MAX_BANKS] num_taken_in  # `num_taken` of each bank
    Py_ssize_t num_adopted    # checkpoints that become working pages, because no pages are left for copies
    int32_t short_bank        # bank with too few pages, where the demand does not fit


cdef inline int32_t queue_for(const Pool *pool, const Group *group, int32_t shard) noexcept nogil:
    """Return the queue from which a group takes pages: its bank's, or a shard's."""
    return queue_in(pool, group.bank, shard)


cdef struct Shortage:         # why a row or request got no pages
    int64_t num_needed        # pages that would leave the free queue
    int64_t num_free
    Py_ssize_t num_reserved
    Py_ssize_t num_hit_tokens
    int32_t queue             # queue of the bank or shard that has too few
    bint can_wait             # some pages of the queue are held, so waiting may help


cdef inline Shortage shortage_in(
    const Pool *pool, int64_t num_needed, Py_ssize_t num_reserved, Py_ssize_t num_hit_tokens, int32_t queue
) noexcept nogil:
    """Return the shortage in a bank or shard as it is now."""
    return Shortage(
        num_needed=num_needed, num_free=count_free_in(pool, queue), num_reserved=num_reserved, num_hit_tokens=num_hit_tokens,
        queue=queue, can_wait=count_free_in(pool, queue) < count_usable_in(pool, queue),
    )


cdef inline Shortage shortage_beside(
    const Pool *pool, int64_t num_needed, Py_ssize_t num_reserved, Py_ssize_t num_hit_tokens, int32_t bank, int32_t shard
) noexcept nogil:
    """Return the shortage in a bank's shard if that has too few pages, else in the bank. The first bank has reserved pages."""
    cdef int32_t queue = queue_in(pool, bank, shard)
    if shard >= 0 and num_needed > count_free_in(pool, queue):
        return shortage_in(pool, num_needed, 0, num_hit_tokens, queue)
    return shortage_in(pool, num_needed, num_reserved if bank == 0 else 0, num_hit_tokens, queue_of_bank(bank))


cdef inline int32_t count_attached(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Count the places that hits of a group fill. A state's checkpoint fills none, for it is copied."""
    return 0 if demand.hits == NULL or is_state(&holding.groups[g].rules) else demand.hits[g].num


cdef inline int64_t count_needed(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Count the new pages that a group needs behind the hits."""
    return count_missing(
        &holding.groups[g], holding.held[g].num_pages + count_attached(holding, demand, g), demand.num_tokens
    )


cdef inline Py_ssize_t count_free_hits(
    const Pool *pool, const Group *group, const Digest *digests, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all
) noexcept nogil:
    """Count the free pages among `n` hits. Return STALE if one is no longer cached under its digest (not checked without
    digests), and UNTOUCHABLE if one cannot get `num_all` further references.
    """
    cdef const Digest *digest
    cdef const Page *page
    cdef Py_ssize_t i, num_free = 0
    cdef uint64_t differences = 0
    cdef bint is_lost = False
    for i in range(n):
        if ids[i] == NULL_PAGE:
            continue
        page = &pool.pages[ids[i]]
        num_free += page.prev_free != NOT_FREE
        if GUARDS:  # no branches, since errors are rare
            is_lost |= (page.ref_cnt == 0) & (page.prev_free == NOT_FREE) | (page.ref_cnt >= INT32_MAX - num_all)
        if GUARDS and digests != NULL:
            digest = &digests[last_hash(group, i)]
            differences |= (page.key_lo ^ digest.lo) | (page.key_hi ^ digest.hi)
            differences |= <uint64_t>((page.group & ~FLAGS) ^ group.id)
    if differences:
        return STALE
    return UNTOUCHABLE if is_lost else num_free


cdef inline bint price(
    const Pool *pool, const Holding *holding, Demand *demand, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Count the pages that a demand takes. False for a hit that cannot be held or is no longer cached under its digest (not
    checked without digests). O(hits).
    """
    cdef const Hits *hits
    cdef Py_ssize_t g, num_free, num_hits = 0
    cdef int64_t num_new
    demand.num_new = demand.num_free_hits = demand.num_adopted = demand.short_bank = 0
    memset(demand.num_new_in, 0, sizeof(demand.num_new_in))
    memset(demand.num_taken_in, 0, sizeof(demand.num_taken_in))
    for g in range(holding.num_groups):
        num_new = min(count_needed(holding, demand, g), (INT64_MAX >> 1) - demand.num_new)
        demand.num_new += num_new
        demand.num_new_in[holding.groups[g].bank] += num_new
        demand.num_taken_in[holding.groups[g].bank] += num_new
        num_hits += demand.hits[g].num if demand.hits != NULL else 0
    for g in range(holding.num_groups if demand.hits != NULL else 0):
        hits = &demand.hits[g]
        if hits.num * <Py_ssize_t>holding.groups[g].stride > num_digests:
            return False
        num_free = count_free_hits(pool, &holding.groups[g], digests, hits.ids, hits.num, num_hits)
        if num_free < 0:
            return False
        demand.num_free_hits += num_free
        demand.num_taken_in[holding.groups[g].bank] += num_free
    assert demand.num_new >= 0 and 0 <= demand.num_free_hits <= num_hits
    demand.num_taken = demand.num_new + demand.num_free_hits
    return True


cdef inline Py_ssize_t count_state_hits(const Holding *holding, const Hits *hits) noexcept nogil:
    """Count the checkpoints among hits. Each needs a copy unless it is adopted."""
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups if hits != NULL else 0):
        count += is_state(&holding.groups[g].rules) and hits[g].num > 0
    return count


cdef inline Py_ssize_t _count_adoptable(const Pool *pool, const Holding *holding, const Hits *hits) noexcept nogil:
    """Count the checkpoints among hits if all checkpoints are free pages; else return 0. The null page stands for a
    checkpoint to be loaded.
    """
    cdef Py_ssize_t g
    cdef int32_t page_id
    for g in range(holding.num_groups if hits != NULL else 0):
        if is_state(&holding.groups[g].rules) and hits[g].num:
            page_id = hits[g].ids[hits[g].num - 1]
            if page_id == NULL_PAGE or not is_free(pool, page_id):
                return 0
    return count_state_hits(holding, hits)


cdef inline Py_ssize_t _count_outside(
    const Pool *pool, const Holding *holding, const Demand *demand, int32_t bank
) noexcept nogil:
    """Count the hits that are free pages of a bank outside the demand's shard."""
    cdef Range inside = ids_in_queue(pool, queue_in(pool, bank, demand.shard))
    cdef const Hits *hits
    cdef Py_ssize_t g, i, count = 0
    for g in range(holding.num_groups if demand.shard >= 0 and demand.hits != NULL else 0):
        hits = &demand.hits[g]
        for i in range(hits.num if holding.groups[g].bank == bank else 0):
            if hits.ids[i] != NULL_PAGE and is_free(pool, hits.ids[i]):
                count += not inside.start <= hits.ids[i] < inside.stop
    return count


cdef inline int32_t find_short_bank(
    const Pool *pool, const Py_ssize_t *num_pages_in, Py_ssize_t num_reserved, int32_t shard
) noexcept nogil:
    """Return the first bank with too few free pages, in all or in its shard, for the number that `num_pages_in` lists for it.
    The first bank also keeps `num_reserved` free. NO_BANK: each bank has enough.
    """
    cdef int32_t bank
    for bank in range(pool.num_banks):
        if not has_free_pages(pool, num_pages_in[bank], num_reserved if bank == 0 else 0, queue_in(pool, bank, shard)):
            return bank
    return NO_BANK


cdef inline Fit _compare_banks(
    const Pool *pool, const Holding *holding, const Demand *demand, const Py_ssize_t *num_for_rows, int32_t *short_bank
) noexcept nogil:
    """Decide whether a priced demand fits with `num_adopted` checkpoints, and leaves `num_for_rows` pages of each bank free
    (NULL: none). Set `short_bank` to the first bank with too few pages, in all or in its shard; NO_BANK: each has enough.
    """
    cdef Py_ssize_t[MAX_BANKS] num_pages_in
    cdef int32_t bank
    cdef Py_ssize_t g
    for bank in range(MAX_BANKS):
        num_pages_in[bank] = demand.num_taken_in[bank]
    for g in range(holding.num_groups if demand.num_adopted else 0):
        num_pages_in[holding.groups[g].bank] -= is_state(&holding.groups[g].rules) and demand.hits[g].num > 0
    short_bank[0] = find_short_bank(pool, num_pages_in, demand.num_reserved, -1)
    if short_bank[0] != NO_BANK:
        return SHORT
    for bank in range(pool.num_banks if num_for_rows != NULL else 0):
        if not has_free_pages(pool, num_pages_in[bank], num_for_rows[bank], queue_of_bank(bank)):
            short_bank[0] = bank
            return SHORT
    for bank in range(pool.num_banks if demand.shard >= 0 else 0):
        num_pages_in[bank] -= _count_outside(pool, holding, demand, bank)
        if num_pages_in[bank] > count_free_in(pool, queue_in(pool, bank, demand.shard)):
            short_bank[0] = bank
            return SHORT_IN_SHARD
    return FITS


cdef inline Fit _fit_in_banks(
    const Pool *pool, const Holding *holding, Demand *demand, const Py_ssize_t *num_for_rows
) noexcept nogil:
    """Do the work of `fit_or_adopt` in a pool of several banks."""
    cdef int32_t short_bank
    cdef Fit fit
    demand.num_adopted = 0
    fit = _compare_banks(pool, holding, demand, num_for_rows, &demand.short_bank)
    if fit == FITS:
        return FITS
    demand.num_adopted = _count_adoptable(pool, holding, demand.hits)
    if _compare_banks(pool, holding, demand, NULL, &short_bank) == FITS:
        return FITS
    demand.num_adopted, demand.short_bank = 0, short_bank
    return fit


cdef inline Fit fit_or_adopt(
    const Pool *pool, const Holding *holding, Demand *demand, const Py_ssize_t *num_for_rows
) noexcept nogil:
    """Decide whether a priced demand fits. It adopts its checkpoints if it does not fit otherwise or, in a pool of several
    banks, would leave fewer than `num_for_rows` pages of a bank (NULL: none) to rows without a state.
    """
    cdef int64_t num_inside
    if rare(pool.num_banks > 1):
        return _fit_in_banks(pool, holding, demand, num_for_rows)
    num_inside = demand.num_taken - _count_outside(pool, holding, demand, 0)
    demand.num_adopted = 0
    if demand.num_taken + demand.num_reserved > pool.num_free or num_inside > count_free_in(pool, demand.shard):
        demand.num_adopted = _count_adoptable(pool, holding, demand.hits)
        if num_inside - demand.num_adopted > count_free_in(pool, demand.shard):
            demand.num_adopted = 0
    assert demand.num_taken == demand.num_new + demand.num_free_hits
    assert demand.num_adopted == 0 or demand.num_adopted == count_state_hits(holding, demand.hits)
    if demand.num_taken and demand.num_taken - demand.num_adopted + demand.num_reserved > pool.num_free:
        return SHORT
    return SHORT_IN_SHARD if num_inside - demand.num_adopted > count_free_in(pool, demand.shard) else FITS


cdef inline Shortage shortage_of(
    const Pool *pool, const Holding *holding, const Demand *demand, Py_ssize_t num_hit_tokens
) noexcept nogil:
    """Return the shortage of a priced demand that did not fit. Checkpoints that it would adopt need no working pages."""
    cdef int32_t bank = demand.short_bank
    cdef int64_t num_needed = demand.num_taken if pool.num_banks == 1 else demand.num_taken_in[bank]
    cdef Py_ssize_t g
    for g in range(holding.num_groups if _count_adoptable(pool, holding, demand.hits) else 0):
        if holding.groups[g].bank == bank and is_state(&holding.groups[g].rules):
            num_needed -= demand.hits[g].num > 0
    return shortage_beside(pool, num_needed, demand.num_reserved, num_hit_tokens, bank, demand.shard)


cdef inline int64_t _count_inside(const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, Range inside) noexcept nogil:
    """Count the ids from place `start` to `stop` that are in a range, without the null page."""
    cdef Py_ssize_t i
    cdef int64_t count = 0
    for i in range(start, stop):
        count += ids[i] != NULL_PAGE and inside.start <= ids[i] < inside.stop
    return count


cdef inline int64_t find_excess(
    const Pool *pool, const Holding *holding, const Hits *hits, int64_t num_new, int32_t num_computed, int32_t queue
) noexcept nogil:
    """Count the pages of a bank or shard that a request would hold, hits and `num_new` new pages included, except retired pages
    and pages that no token from `num_computed` on attends to. Return 0 if the bank or shard has as many pages in all, so that
    waiting may help.
    """
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t first, num_cached, bank = bank_of_queue(pool, queue)
    cdef int64_t count = num_new
    cdef Range inside
    for g in range(holding.num_groups):
        if holding.groups[g].bank != bank:
            continue
        count += holding.held[g].num_pages
        if hits != NULL and not is_state(&holding.groups[g].rules):
            count += hits[g].num
    if count <= count_usable_in(pool, queue):  # null pages included
        return 0
    count, inside = num_new, ids_in_queue(pool, queue)
    if queue < 0:
        inside.stop = pool.banks[bank].stop - count_denied_in(pool, queue)
    for g in range(holding.num_groups):
        if holding.groups[g].bank != bank:
            continue
        held = &holding.held[g]
        num_cached = held.num_cached and max(held.num_cached, full_pages(&holding.groups[g].rules, num_computed))
        first = first_held_page(&holding.groups[g], num_computed, num_cached)
        if rare(holding.groups[g].rules.answer_window):
            first = first_answer_page(&holding.groups[g].rules, held, num_computed)
            count += _count_inside(held.ids, 0, min(count_prompt_pages(&holding.groups[g].rules, held), held.num_pages), inside)
        count += _count_inside(held.ids, first, held.num_pages, inside)
        if hits != NULL and not is_state(&holding.groups[g].rules):
            count += _count_inside(hits[g].ids, 0, hits[g].num, inside)
    assert count >= num_new
    return count if count > count_usable_in(pool, queue) else 0


cdef inline int64_t find_any_excess(
    const Pool *pool, const Holding *holding, const Hits *hits, const int64_t *num_new_in, int32_t num_computed, int32_t *queue
) noexcept nogil:
    """Return `find_excess` for the first bank that is too small or, if none is, for the first whose shard `queue` is too small
    (-1: no shard is checked). Set `queue` to the queue of this bank or shard. 0: waiting may help.
    """
    cdef int64_t num_excess = 0
    cdef int32_t i, shard = queue[0]
    for i in range(pool.num_banks if shard < 0 else 2 * pool.num_banks):
        queue[0] = queue_of_bank(i) if i < pool.num_banks else queue_in(pool, i - pool.num_banks, shard)
        num_excess = find_excess(pool, holding, hits, num_new_in[i % pool.num_banks], num_computed, queue[0])
        if num_excess:
            break
    return num_excess


cdef inline void record_taken(const Pool *pool, Held *held) noexcept nogil:
    """Record that pages were taken. The tier may have to save some of them before they are written."""
    if rare(pool.tier != NULL) and pool.tier.num_due:
        held.due_list = pool.list_number


cdef inline void _begin_held(Pool *pool, const Holding *holding, Py_ssize_t g, const Hits *hits) noexcept nogil:
    """Make hits the first pages of a group. If its windows keep pages at boundaries alone, flag the hits as kept."""
    cdef Held *held = &holding.held[g]
    cdef int32_t i
    held.num_cached = held.num_hits = hits.num
    held.num_skipped = held.next_needed = 0
    held.ranking = Ranking(num_ranked=hits.num, num_unseen=0)
    for i in range(hits.num if holding.boundaries != NULL and has_window(&holding.groups[g].rules) else 0):
        keep_page(pool, hits.ids[i])


cdef inline void _continue_runs(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Let the holder's runs continue from the checkpoints among the hits, and the banks of states learn from the request."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int64_t num_tokens
    cdef int32_t page_id, num = 0
    cdef bint is_first = True
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if not keeps_checkpoints(group):
            continue
        num = demand.hits[g].num if demand.hits != NULL else 0
        page_id, num_tokens = demand.hits[g].ids[num - 1] if num else <int32_t>NULL_PAGE, num * <int64_t>group.rules.entry_size
        if demand.end != NULL:
            learn_of_state(pool, group, demand.end, page_id, num_tokens, is_first)
        is_first = False
        if page_id != NULL_PAGE:
            continue_from(pool, &holding.held[g].lineage, page_id, <int32_t>num_tokens)


cdef inline void attach(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Put the hits of a demand that fits first in a holding. An adopted checkpoint, the last hit of its group, becomes the
    working page. Any other checkpoint gets a reference, which `copy_states` hands to its copy.
    """
    cdef const Hits *hits
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t number = 0
    assert demand.hits == NULL or count_places(holding) == 0
    if count_places(holding) == 0:
        count_request(pool)
    for g in range(holding.num_groups if demand.hits != NULL else 0):
        held, hits = &holding.held[g], &demand.hits[g]
        number = max(number, find_load_number(pool, hits.ids, hits.num))
        if not demand.num_adopted or not is_state(&holding.groups[g].rules):
            hit(pool, hits.ids, hits.num, holding.session)
        if hits.num and not is_state(&holding.groups[g].rules):
            held.num_pages = hits.num
            memcpy(held.ids, hits.ids, hits.num * sizeof(int32_t))
        _begin_held(pool, holding, g, hits)
    if rare(pool.children != NULL):  # once the terms of hits have ended, and before an adopted checkpoint loses its entry
        _continue_runs(pool, holding, demand)
    record_loads(pool, holding, number)
    for g in range(holding.num_groups if demand.num_adopted else 0):
        held, hits = &holding.held[g], &demand.hits[g]
        if is_state(&holding.groups[g].rules) and hits.num:
            assert is_free(pool, hits.ids[hits.num - 1]) and held.num_pages == 0
            take_this(pool, hits.ids[hits.num - 1], holding.session)
            held.ids[0] = hits.ids[hits.num - 1]
            held.num_pages = 1
            record_taken(pool, held)


cdef inline void take_into(
    Pool *pool, Held *held, int32_t place, int32_t n, int32_t queue, int32_t session
) noexcept nogil:
    """Take `n` pages from a queue for the places from `place` on."""
    assert 0 <= place and n <= count_free_in(pool, queue)
    take(pool, held.ids + place, n, queue, session)
    record_taken(pool, held)


cdef inline int32_t take_missing(
    Pool *pool, const Group *group, Held *held, int64_t num_tokens, int32_t shard, int32_t session
) noexcept nogil:
    """Take the missing pages of a group for a session; enough pages are free. Return their number."""
    cdef int32_t n = <int32_t>count_missing(group, held.num_pages, num_tokens)
    assert n >= 0 and held.num_skipped <= held.num_pages
    if n:
        take_into(pool, held, held.num_pages, n, queue_for(pool, group, shard), session)
        held.num_pages += n
    return n


cdef inline void copy_states(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Queue copies of the checkpoints among the hits into the working pages that were taken for them."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if demand.hits != NULL and not demand.num_adopted else 0):
        if is_state(&holding.groups[g].rules) and demand.hits[g].num:
            queue_copy(pool, demand.hits[g].ids[demand.hits[g].num - 1], &holding.held[g], 0, <int32_t>g)
