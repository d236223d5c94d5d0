# The pages that a request (`RequestPages`) or running row (`RunningRows`) holds; the same functions serve both. The caller
# holds the store's lock.
#
# A request or row has a `Held` for each cache group, and a `Holding` leads to all of them. A state has one page, the working
# page; its checkpoints are in the prefix index, and no request or row holds them. Always:
#
# * In each group null pages come first, then pages to which the holder has a reference. The first `num_skipped` are null pages.
# * The first `num_cached` pages of a group, or checkpoints of a state, need no prefix entry any more.
# * A working page has no prefix entry, and only its holder writes to it.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

from pagepool.core.base cimport GUARDS, UNKNOWN, Digest, fetch, hash_two_after, rare, reserve_items
from pagepool.core.holding.boundaries cimport *
from pagepool.core.pool cimport (
    BLANK, FLAGS, KEPT, KNOWN_SHARE, MAX_BANKS, NOT_FREE, NO_BANK, NO_SESSION, NULL_PAGE, PART, Copies, Entry, Origin, Page,
    PageCopy, Pool, Ranking, bank_of_queue, cache, cache_alone, count_free_in, count_pages_in, count_release, count_request,
    expect_page, find, find_held_free, find_unheld, find_untouchable, find_within, give_back, has_free_pages, hit, home_of,
    ids_in_queue, is_free, is_journaled, is_kept, now_of, pass_part, queue_in, queue_of_bank, shard_queue_of, share, skip,
    take, take_this, uncache, uncache_everywhere, uncache_in_tier, use_in_session,
)

cdef struct Held:             # pages of one group
    int32_t *ids              # page ids in token order
    int32_t num_pages
    int32_t num_cached        # leading pages, or checkpoints of a state, that need no prefix entry any more
    int32_t num_skipped       # leading pages that were given back: no further token attends to them
    int32_t num_hits          # leading pages that were hits
    Ranking ranking           # how a policy ranked the pages behind the hits
    int32_t next_needed       # no boundary needs a page between `num_skipped` and this place
    int64_t read_list         # last list of moves with a copy that reads a page; see `Pool.list_number`
    int64_t due_list          # last list with other moves of these pages: they are written, or saved for their last holder
    int64_t load_number       # last list that loads hits; 0: none does

cdef struct Holding:
    const Group *groups       # [num_groups]
    Held *held                # [num_groups]
    Py_ssize_t num_groups
    Boundaries *boundaries    # NULL: all pages of windows and chunks stay cached
    int32_t session           # number, or NO_SESSION
    int32_t num_once_cached   # tokens whose pages or checkpoints were cached before the holder was set back; 0: it was not


cdef inline Py_ssize_t count_places(const Holding *holding) noexcept nogil:
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups):
        count += holding.held[g].num_pages
    return count


cdef inline void empty(const Holding *holding) noexcept nogil:
    """Forget all pages, after they were given back."""
    cdef int32_t *ids
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        ids = holding.held[g].ids
        memset(&holding.held[g], 0, sizeof(Held))
        holding.held[g].ids = ids


# Nothing is due below the `Limits`, which are computed after each change.

cdef struct Limits:           # numbers of tokens
    int64_t num_room          # tokens with slots
    int64_t num_full          # tokens that fill the next page, or after which the next checkpoint is written
    int64_t num_skip          # computed tokens at which the next page is skipped, or a state may become a checkpoint


cdef inline bint writes_states(const Holding *holding) noexcept nogil:
    """Whether steps write checkpoints to pages of their own; otherwise working pages become checkpoints."""
    return holding.boundaries != NULL and holding.boundaries.writes_states


cdef inline int64_t find_next_checkpoint(const Holding *holding, const Group *group, int64_t num_tokens) noexcept nogil:
    """Return the number of tokens of a state's first checkpoint behind `num_tokens`; INT64_MAX: there is none. O(1)."""
    cdef int32_t end
    assert keeps_checkpoints(group)
    if writes_states(holding):
        end = find_next_boundary(holding.boundaries, <int32_t>min(num_tokens, <int64_t>MAX_TOKENS))
        return end if end < INT32_MAX else INT64_MAX
    return num_tokens - num_tokens % group.rules.entry_size + group.rules.entry_size


cdef inline int64_t find_last_checkpoint(const Holding *holding, int64_t num_tokens, int64_t most) noexcept nogil:
    """Return the number of tokens of the last checkpoint of a state behind `num_tokens`, at most `most`; 0: there is none.
    O(checkpoints between).
    """
    cdef Py_ssize_t g
    cdef int64_t size, last = 0
    for g in range(holding.num_groups):
        if keeps_checkpoints(&holding.groups[g]):
            size = holding.groups[g].rules.entry_size
            if writes_states(holding):
                return find_last_boundary(holding.boundaries, <int32_t>num_tokens, <int32_t>most)
            last = most - most % size
    return last if last > num_tokens else 0


cdef inline int64_t find_own_checkpoint(const Holding *holding, Py_ssize_t g) noexcept nogil:
    """Return `find_next_checkpoint` behind the entries of a group that are needed no more."""
    cdef const Group *group = &holding.groups[g]
    return find_next_checkpoint(holding, group, holding.held[g].num_cached * <int64_t>group.rules.entry_size)


cdef inline void _limit_skips(const Holding *holding, Py_ssize_t g, Limits *limits) noexcept nogil:
    """Lower the limits to the next page that a window or chunk skips, or to the next checkpoint of a state."""
    cdef const Group *group = &holding.groups[g]
    cdef int64_t num_next
    if is_state(&group.rules):
        num_next = find_own_checkpoint(holding, g)
    else:
        num_next = next_skip(group, holding.held[g].num_skipped)
    if is_state(&group.rules) and writes_states(holding):
        limits.num_full = min(limits.num_full, num_next)
    elif num_next < MAX_TOKENS:
        limits.num_skip = min(limits.num_skip, num_next)


cdef inline Limits limits_of(const Holding *holding) noexcept nogil:
    """Compute the numbers of tokens below which nothing is due. O(groups)."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    cdef Limits limits = Limits(num_room=INT64_MAX, num_full=INT64_MAX, num_skip=INT64_MAX)
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        held = &holding.held[g]
        limits.num_room = min(limits.num_room, <int64_t>held.num_pages * group.rules.page_size)
        if has_window(&group.rules) or keeps_checkpoints(group):
            _limit_skips(holding, g, &limits)
        if group.id != NO_GROUP:
            limits.num_full = min(limits.num_full, (held.num_cached + <int64_t>1) * group.rules.page_size)
    return limits


cdef inline int64_t _count_missing(const Group *group, int64_t num_pages, int64_t num_tokens) noexcept nogil:
    """Count the pages that `num_tokens` tokens need beyond `num_pages`."""
    if num_tokens <= num_pages * group.rules.page_size:
        return 0
    return max(<int64_t>0, pages_for(&group.rules, num_tokens) - num_pages)


cdef inline int64_t count_new_pages(const Holding *holding, int64_t num_tokens) noexcept nogil:
    """Count the pages that `num_tokens` tokens need beyond those held, in all groups."""
    cdef Py_ssize_t g
    cdef int64_t count = 0
    for g in range(holding.num_groups):
        count += _count_missing(&holding.groups[g], holding.held[g].num_pages, num_tokens)
    return count


cdef inline void count_new_in_banks(const Holding *holding, int64_t num_tokens, int64_t *num_new_in) noexcept nogil:
    """Set the pages that `num_tokens` tokens need beyond those held, by bank."""
    cdef Py_ssize_t g
    memset(num_new_in, 0, MAX_BANKS * sizeof(int64_t))
    for g in range(holding.num_groups):
        num_new_in[holding.groups[g].bank] += _count_missing(&holding.groups[g], holding.held[g].num_pages, num_tokens)


# Pages that no further token attends to are skipped: they are given back, and the null page takes their place. If windows stay
# cached at boundaries, a holder delays this for pages with which another request could resume if this one ended now. A skipped
# page with which a request can resume at a boundary is flagged `KEPT`. Any other one is worthless, and discarded unless it has
# other holders; each of these decides again when it skips the page.


cdef inline int32_t _find_skip_stop(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Return the place behind the pages that are not needed after `num_computed` computed tokens. Chunks keep the last cached
    page. Full pages that could not be cached while hits were loaded count as cached, or they would be held forever.
    """
    cdef int32_t num_cached = held.num_cached
    if num_cached and held.load_number:
        num_cached = max(num_cached, full_pages(&group.rules, num_computed))
    return min(first_held_page(group, num_computed, num_cached), held.num_pages)


cdef inline int32_t find_lost_page(const Pool *pool, const Holding *holding, int32_t num_computed) noexcept nogil:
    """Return a page due to be skipped or kept as a checkpoint that another caller gave back; NULL_PAGE: there is none."""
    cdef const Held *held
    cdef Py_ssize_t g, stop, bad
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = _find_skip_stop(&holding.groups[g], held, num_computed)
        if keeps_checkpoints(&holding.groups[g]):
            stop = held.num_pages
        bad = find_unheld(pool, held.ids, held.num_skipped, stop)
        if bad >= 0:
            return held.ids[bad]
    return NULL_PAGE


cdef inline int32_t draw_references(Pool *pool, const Holding *holding, int32_t change) noexcept nogil:
    """Add `change`, -1 or 1, to the reference count of each held page. Return a page with too few references; NULL_PAGE: there
    is none.
    """
    cdef const Held *held
    cdef Py_ssize_t g, i
    cdef int32_t bad = NULL_PAGE
    for g in range(holding.num_groups):
        held = &holding.held[g]
        for i in range(held.num_skipped, held.num_pages):
            pool.pages[held.ids[i]].ref_cnt += change
            if held.ids[i] != NULL_PAGE and (pool.pages[held.ids[i]].ref_cnt < 0 or is_free(pool, held.ids[i])):
                bad = held.ids[i]
    return bad


cdef inline int32_t find_overdrawn(Pool *pool, const Holding *holding) noexcept nogil:
    """Return a page with fewer references than places in the holding; NULL_PAGE: there is none."""
    cdef int32_t bad = draw_references(pool, holding, -1)
    draw_references(pool, holding, 1)
    return bad


cdef inline bint lacks_page(const Group *group, const Held *held, int32_t num_computed, int64_t num_pages) noexcept nogil:
    """Whether a page before place `num_pages` was given back, though tokens from `num_computed` on attend to it or are written
    to it.
    """
    cdef int32_t first = first_useful_page(&group.rules, num_computed, 0)
    return first < min(num_pages, <int64_t>held.num_pages) and held.ids[first] == NULL_PAGE


cdef inline void _keep_page(Pool *pool, int32_t page_id) noexcept nogil:
    """Let a page stay cached when it leaves a window. No effect on a page without an entry."""
    if pool.pages[page_id].group != NO_GROUP:
        pool.pages[page_id].group |= KEPT


cdef inline Py_ssize_t _find_longest_group(const Holding *holding) noexcept nogil:
    """Return the group that shows best how long a request is: one of full attention, if there is any."""
    cdef Py_ssize_t g, longest = 0
    for g in range(holding.num_groups):
        if hits_leading_pages(&holding.groups[g]) or is_state(&holding.groups[longest].rules):
            longest = g
    return longest


cdef inline uint32_t _find_known_part(const Pool *pool, const Holding *holding) noexcept nogil:
    """Return the part of the policy for all pages of a request that continues one seen before; BLANK: it is new. The policy
    knew the keys of most of its pages, so the pages that it computed are as likely to be used again, above all the windows at
    its end.
    """
    cdef const Held *held
    cdef int64_t num_known
    cdef Py_ssize_t g
    if pool.policy == NULL:
        return BLANK
    g = _find_longest_group(holding)
    held = &holding.held[g]
    num_known = held.ranking.num_ranked if holding.groups[g].bank == 0 else 0
    if num_known == 0 or 100 * num_known < KNOWN_SHARE * held.num_pages or is_state(&holding.groups[g].rules):
        return BLANK
    return pool.policy.marks[held.ids[num_known - 1]] & PART


cdef inline int32_t _keep_needed(
    Pool *pool, const Boundaries *boundaries, const Group *group, const Held *held, int32_t stop
) noexcept nogil:
    """Keep the pages before place `stop` that a boundary needs. Return a place before which no boundary needs another page."""
    cdef Range needed = find_needed(boundaries, group, held.num_skipped)
    cdef int32_t place
    while needed.start < stop:
        for place in range(needed.start, min(needed.stop, stop)):
            _keep_page(pool, held.ids[place])
        if needed.stop >= stop:
            return stop
        needed = find_needed(boundaries, group, needed.stop)
    return needed.start


cdef inline void _skip_to(Pool *pool, const Holding *holding, Py_ssize_t g, int32_t stop) noexcept nogil:
    """Give back the pages of a group before place `stop`, the last first. There is at least one. A policy counts them as one
    call.
    """
    cdef Held *held = &holding.held[g]
    cdef bint is_ranked = pool.policy != NULL and holding.groups[g].bank == 0
    cdef uint32_t part = BLANK
    cdef int32_t j, num_counted = 0
    assert 0 <= held.num_skipped < stop <= held.num_pages
    if holding.boundaries != NULL:
        part = _find_known_part(pool, holding)
        if stop > held.next_needed:
            held.next_needed = _keep_needed(pool, holding.boundaries, &holding.groups[g], held, stop)
    for j in range(stop - 1, held.num_skipped - 1, -1):
        if is_ranked and part != BLANK:
            pass_part(pool.policy, held.ids[j], part)
        num_counted += skip(
            pool, held.ids[j], stays=holding.boundaries == NULL or is_kept(&pool.pages[held.ids[j]]),
            may_hit=not is_ranked or holding.boundaries != NULL or is_needed_by_hits(&holding.groups[g].rules, j),
        )
        held.ids[j] = NULL_PAGE
    if num_counted:
        count_release(pool.policy, num_counted, count_free_in(pool, -1) - num_counted)
    held.num_skipped = stop


cdef inline void skip_pages(Pool *pool, const Holding *holding, Py_ssize_t g, int32_t num_computed) noexcept nogil:
    """Give back the pages of a group that are not needed after `num_computed` computed tokens. While hits are loaded, give back
    none: if a load fails, they are needed again.
    """
    cdef int32_t stop = _find_skip_stop(&holding.groups[g], &holding.held[g], num_computed)
    if stop > holding.held[g].num_skipped and not waits_for_loads(pool, &holding.held[g]):
        _skip_to(pool, holding, g, stop)


cdef inline void skip_unread(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that no token from `num_tokens` on attends to. They may not have been filled, so they get no prefix
    entry.
    """
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t stop
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = min(first_useful_page(&holding.groups[g].rules, num_tokens, 0), held.num_pages)
        if stop > held.num_skipped:
            _skip_to(pool, holding, g, stop)
        held.num_cached = max(held.num_cached, stop)


cdef inline int64_t _find_cached_end(const Holding *holding, int64_t num_computed) noexcept nogil:
    """Return the number of computed tokens whose full pages were cached in all groups."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int64_t end, most = 0
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if not is_state(&group.rules):
            most = max(most, <int64_t>holding.held[g].num_cached * group.rules.page_size)
    num_computed = min(num_computed, most)
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        end = <int64_t>holding.held[g].num_cached * group.rules.page_size
        if not is_state(&group.rules) and end + group.rules.page_size <= num_computed:
            num_computed = end
    return num_computed


cdef inline bint _is_end_worth(const Holding *holding, int32_t end) noexcept nogil:
    """Whether the windows before the computed end should stay cached. They must be whole, and one of these must hold: the end
    is in the prompt; the windows have no more pages behind the prompt than the answer has in the longest group; or they have no
    fewer pages than the prompt has there, as in a short chat.
    """
    cdef Boundaries *boundaries = holding.boundaries
    cdef const Group *group
    cdef const Group *longest = &holding.groups[_find_longest_group(holding)]
    cdef Py_ssize_t g
    cdef int32_t place, first, start, num_pages = 0, num_new_pages = 0
    cdef int32_t num_prompt = max(0, boundaries.num_prompt - boundaries.num_dropped)  # dropped as at `end`
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if not has_window(&group.rules):
            continue
        first, start = first_hit_page(&group.rules, end, boundaries.use_eagle), full_pages(&group.rules, num_prompt)
        for place in range(first, full_pages(&group.rules, end)):
            if holding.held[g].ids[place] != NULL_PAGE:
                break
            if find_needed(boundaries, group, place).start > place:
                return False
        num_pages += full_pages(&group.rules, end) - first
        num_new_pages += max(0, full_pages(&group.rules, end) - max(first, start))
    if end < find_resumption(boundaries, boundaries.num_prompt):
        return True
    start = full_pages(&longest.rules, num_prompt)
    if start >= full_pages(&longest.rules, end):
        return False
    return num_new_pages <= full_pages(&longest.rules, end) - start or start <= num_pages


cdef inline void rate_pages(Pool *pool, const Holding *holding, int64_t num_computed) noexcept nogil:
    """Decide which pages stay cached, and in which part of the policy, before all are given back with `num_computed` tokens."""
    cdef Py_ssize_t g
    cdef int32_t place
    cdef uint32_t part
    if holding.boundaries == NULL:
        return
    part = _find_known_part(pool, holding)
    for g in range(holding.num_groups if part != BLANK else 0):
        for place in range(holding.held[g].num_skipped, holding.held[g].num_pages if holding.groups[g].bank == 0 else 0):
            pass_part(pool.policy, holding.held[g].ids[place], part)
    _keep_windows(pool, holding, num_computed)


cdef inline void _keep_windows(Pool *pool, const Holding *holding, int64_t num_computed) noexcept nogil:
    """Keep the pages with which a request can resume."""
    cdef Boundaries boundaries = holding.boundaries[0]
    cdef Py_ssize_t g
    cdef int64_t num_cached = _find_cached_end(holding, num_computed)
    cdef int32_t end = find_resumption(&boundaries, num_cached + boundaries.num_lookahead)
    if boundaries.has_checkpoints and num_cached % boundaries.multiple == 0:
        if are_checkpoints_due(holding, <int32_t>num_cached):
            add_boundary(&boundaries, <int32_t>num_cached)
    if boundaries.has_ends and not boundaries.writes_states and end > 0 and _is_end_worth(holding, end):
        add_boundary(&boundaries, end)
    for g in range(holding.num_groups):
        if has_window(&holding.groups[g].rules):
            _keep_needed(pool, &boundaries, &holding.groups[g], &holding.held[g], holding.held[g].num_pages)


# Tokens get all the pages that they need, or none.
#
# A `Demand` describes these pages. `price` counts them, and refuses hits that are wrong by now; `fit_or_adopt` decides whether
# enough pages are free. Neither changes the pool. Then the caller, which has room for the ids, calls `attach`, `take_missing`
# for each group, and `copy_states`; none of these can fail. Always:
#
# * Only a holding without pages demands hits.
# * `num_new` counts one working page for each state, also if its checkpoint becomes that page.
# * `num_adopted` is 0, or the number of states with hits. In the second case all their checkpoints are free pages.

cdef enum:
    STALE = -1                # a hit has another content by now
    UNTOUCHABLE = -2          # a hit cannot get another reference

cdef enum Fit:
    FITS
    SHORT                     # too few pages are free beside the reserved ones
    SHORT_IN_SHARD            # only the shard has too few

cdef struct Hits:             # leading pages of a group found by a look-up, null pages first
    const int32_t *ids
    int32_t num

cdef struct Demand:
    const Hits *hits          # [num_groups]; NULL: none
    int64_t num_tokens        # tokens that need slots
    Py_ssize_t num_reserved   # pages to leave free, in the first bank
    int32_t shard             # shard of new pages; -1: any
    int64_t num_new           # new pages behind the hits; `price` and `fit_or_adopt` compute this and the rest
    Py_ssize_t num_free_hits  # hits in the free queue
    int64_t num_taken         # sum of the last two: pages that leave the free queue, if no checkpoint is adopted
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
    int32_t queue             # of the bank or shard that has too few
    bint can_wait             # some of its pages are held


cdef inline Shortage shortage_in(
    const Pool *pool, int64_t num_needed, Py_ssize_t num_reserved, Py_ssize_t num_hit_tokens, int32_t queue
) noexcept nogil:
    """Return the shortage of a bank or shard as it is now."""
    return Shortage(
        num_needed=num_needed, num_free=count_free_in(pool, queue), num_reserved=num_reserved, num_hit_tokens=num_hit_tokens,
        queue=queue, can_wait=count_free_in(pool, queue) < count_pages_in(pool, queue),
    )


cdef inline Shortage shortage_beside(
    const Pool *pool, int64_t num_needed, Py_ssize_t num_reserved, Py_ssize_t num_hit_tokens, int32_t bank, int32_t shard
) noexcept nogil:
    """Return the shortage of a bank's shard if it has too few pages, else that of the bank, where pages are reserved."""
    cdef int32_t queue = queue_in(pool, bank, shard)
    if shard >= 0 and num_needed > count_free_in(pool, queue):
        return shortage_in(pool, num_needed, 0, num_hit_tokens, queue)
    return shortage_in(pool, num_needed, num_reserved if bank == 0 else 0, num_hit_tokens, queue_of_bank(bank))


cdef inline int32_t count_attached(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Count the places that hits of a group fill. A state's checkpoint fills none, for it is copied."""
    return 0 if demand.hits == NULL or is_state(&holding.groups[g].rules) else demand.hits[g].num


cdef inline int64_t count_needed(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Count the new pages that a group needs behind the hits."""
    return _count_missing(
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
    """Count the pages that a demand takes. False for a hit that cannot be held, or is not cached under its digest any more, if
    there are digests. O(hits).
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
    demand.num_taken = demand.num_new + demand.num_free_hits
    return True


cdef inline Py_ssize_t count_state_hits(const Holding *holding, const Hits *hits) noexcept nogil:
    """Count the checkpoints among hits. Each needs a copy unless it is adopted."""
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups if hits != NULL else 0):
        count += is_state(&holding.groups[g].rules) and hits[g].num > 0
    return count


cdef inline Py_ssize_t _count_adoptable(const Pool *pool, const Holding *holding, const Hits *hits) noexcept nogil:
    """Count the checkpoints among hits if all of these are free pages; else return 0. The null page stands for one to be
    loaded.
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
    """Return the first bank that has, itself or in its shard, fewer free pages than `num_pages_in` lists for it, beside
    `num_reserved` of the first bank; NO_BANK: each has enough.
    """
    cdef int32_t bank
    for bank in range(pool.num_banks):
        if not has_free_pages(pool, num_pages_in[bank], num_reserved if bank == 0 else 0, queue_in(pool, bank, shard)):
            return bank
    return NO_BANK


cdef inline Fit _compare_banks(
    const Pool *pool, const Holding *holding, const Demand *demand, const Py_ssize_t *num_for_rows, int32_t *short_bank
) noexcept nogil:
    """Decide whether a priced demand fits with `num_adopted`, beside `num_for_rows` pages of each bank (NULL: none). Set the
    first bank that has too few pages, itself or in its shard; NO_BANK: each has enough.
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
    """`fit_or_adopt` in a pool of several banks."""
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
    """Decide whether a priced demand fits. It adopts its checkpoints if it does not fit otherwise, or would not leave
    `num_for_rows` pages of each bank of several to rows without a state (NULL: none).
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
    """Return the shortage of a priced demand that did not fit. It would adopt its checkpoints."""
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
    """Count the pages that a request would hold of a bank or shard with its hits and `num_new` new pages, without those that no
    token from `num_computed` on attends to. Return 0 if the bank or shard has as many pages in all, so that waiting may help.
    """
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t num_cached, bank = bank_of_queue(pool, queue)
    cdef int64_t count = num_new
    cdef Range inside
    for g in range(holding.num_groups):
        if holding.groups[g].bank != bank:
            continue
        count += holding.held[g].num_pages
        if hits != NULL and not is_state(&holding.groups[g].rules):
            count += hits[g].num
    if count <= count_pages_in(pool, queue):  # null pages included
        return 0
    count, inside = num_new, ids_in_queue(pool, queue)
    for g in range(holding.num_groups):
        if holding.groups[g].bank != bank:
            continue
        held = &holding.held[g]
        num_cached = held.num_cached and max(held.num_cached, full_pages(&holding.groups[g].rules, num_computed))
        count += _count_inside(
            held.ids, first_held_page(&holding.groups[g], num_computed, num_cached), held.num_pages, inside
        )
        if hits != NULL and not is_state(&holding.groups[g].rules):
            count += _count_inside(hits[g].ids, 0, hits[g].num, inside)
    return count if count > count_pages_in(pool, queue) else 0


cdef inline int64_t find_any_excess(
    const Pool *pool, const Holding *holding, const Hits *hits, const int64_t *num_new_in, int32_t num_computed, int32_t *queue
) noexcept nogil:
    """Return `find_excess` of the first bank with fewer pages, or else of the first with fewer in the shard that `queue` names,
    unless that is -1. `queue` becomes that of this bank or shard. 0: waiting may help.
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


cdef inline void attach(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Put the hits of a demand, which fits, first in a holding. An adopted checkpoint, the last hit of its group, becomes the
    working page. Any other checkpoint gets a reference, which `copy_states` hands to its copy.
    """
    cdef const Group *group
    cdef const Hits *hits
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t i
    cdef int64_t number = 0
    assert demand.hits == NULL or count_places(holding) == 0
    if count_places(holding) == 0:
        count_request(pool)
    for g in range(holding.num_groups if demand.hits != NULL else 0):
        group, held, hits = &holding.groups[g], &holding.held[g], &demand.hits[g]
        number = max(number, find_load_number(pool, hits.ids, hits.num))
        held.num_cached = held.num_hits = hits.num
        held.num_skipped = held.next_needed = 0
        held.ranking = Ranking(num_ranked=hits.num, num_unseen=0)
        if not demand.num_adopted or not is_state(&group.rules):
            hit(pool, hits.ids, hits.num, holding.session)
        if hits.num and not is_state(&group.rules):
            held.num_pages = hits.num
            memcpy(held.ids, hits.ids, hits.num * sizeof(int32_t))
        for i in range(hits.num if holding.boundaries != NULL and has_window(&group.rules) else 0):
            _keep_page(pool, hits.ids[i])
    record_loads(pool, holding, number)
    for g in range(holding.num_groups if demand.num_adopted else 0):
        held, hits = &holding.held[g], &demand.hits[g]
        if is_state(&holding.groups[g].rules) and hits.num:
            assert is_free(pool, hits.ids[hits.num - 1]) and held.num_pages == 0
            take_this(pool, hits.ids[hits.num - 1], holding.session)
            held.ids[0] = hits.ids[hits.num - 1]
            held.num_pages = 1
            record_taken(pool, held)


cdef inline void _take_into(
    Pool *pool, Held *held, int32_t place, int32_t n, int32_t queue, int32_t session
) noexcept nogil:
    """Take pages of a queue for the places from `place` on."""
    take(pool, held.ids + place, n, queue, session)
    record_taken(pool, held)


cdef inline int32_t take_missing(
    Pool *pool, const Group *group, Held *held, int64_t num_tokens, int32_t shard, int32_t session
) noexcept nogil:
    """Take the pages that a group is short of, which are free, for a session. Return their number."""
    cdef int32_t n = <int32_t>_count_missing(group, held.num_pages, num_tokens)
    assert n >= 0 and held.num_skipped <= held.num_pages
    if n:
        _take_into(pool, held, held.num_pages, n, queue_for(pool, group, shard), session)
        held.num_pages += n
    return n


cdef inline void copy_states(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Queue copies of the checkpoints among the hits into the working pages that were taken for them."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if demand.hits != NULL and not demand.num_adopted else 0):
        if is_state(&holding.groups[g].rules) and demand.hits[g].num:
            _queue_copy(pool, demand.hits[g].ids[demand.hits[g].num - 1], &holding.held[g], 0, <int32_t>g)


# Filled pages are hashed and cached before a call ends. They are `Waiting` first, so that memory is
# fetched ahead, and two pages are hashed side by side.

cdef enum:
    NUM_WAITING = 16          # pages

cdef struct Contents:         # hashes and tokens of a request or row, for the entries of its pages
    const Digest *digests
    const Digest *uppers      # upper halves of the digests; NULL: they have 16 bytes
    Py_ssize_t num_digests
    const int32_t *token_ids
    Py_ssize_t num_token_ids
    int32_t num_lookahead     # tokens behind a page that its digest covers
    int32_t context           # see `Origin`
    int32_t session

cdef struct PageToHash:
    Digest parent
    Digest *digest            # the result is written here
    const uint8_t *tokens

cdef struct PageToCache:
    Entry entry
    int32_t page_id
    Held *held

cdef struct Waiting:
    Pool *pool
    Digest key
    Py_ssize_t num_page_bytes  # bytes of a page's tokens
    PageToHash to_hash[NUM_WAITING]
    Py_ssize_t num_to_hash
    PageToCache to_cache[NUM_WAITING]
    Py_ssize_t num_waiting


cdef inline void hash_waiting(Waiting *waiting) noexcept nogil:
    """Hash the waiting pages in pairs. If their number is odd, the last one is hashed twice."""
    cdef const uint8_t *tokens[2]
    cdef Digest[2] parents
    cdef Digest[2] digests
    cdef PageToHash *page
    cdef Py_ssize_t i, lane
    for i in range(0, waiting.num_to_hash, 2):
        for lane in range(2):
            page = &waiting.to_hash[min(i + lane, waiting.num_to_hash - 1)]
            parents[lane] = page.parent
            tokens[lane] = page.tokens
        hash_two_after(waiting.key, parents, tokens, waiting.num_page_bytes, digests)
        for lane in range(2):
            waiting.to_hash[min(i + lane, waiting.num_to_hash - 1)].digest[0] = digests[lane]
    waiting.num_to_hash = 0


cdef inline void cache_waiting(Waiting *waiting) noexcept nogil:
    """Hash and cache the waiting pages, in order. A page that has an entry keeps it. All index slots are fetched before the
    first is read.
    """
    cdef Pool *pool = waiting.pool
    cdef const PageToCache *page
    cdef Py_ssize_t i
    assert 0 <= waiting.num_waiting <= NUM_WAITING
    hash_waiting(waiting)
    for i in range(waiting.num_waiting):
        fetch(home_of(pool, waiting.to_cache[i].entry.key[0], waiting.to_cache[i].entry.group))
    for i in range(waiting.num_waiting):
        page = &waiting.to_cache[i]
        if pool.pages[page.page_id].group == NO_GROUP:
            cache(pool, page.page_id, &page.entry, &page.held.ranking, page.held.ids, page.entry.place)
    waiting.num_waiting = 0


cdef inline bint has_full_page(const Group *group, const Held *held, int64_t num_tokens) noexcept nogil:
    """Whether `num_tokens` tokens fill a page that was not cached yet."""
    if group.id == NO_GROUP or is_state(&group.rules):
        return False
    return (held.num_cached + <int64_t>1) * group.rules.page_size <= num_tokens


cdef inline bint _is_held_last(const Held *held, int32_t page_id) noexcept nogil:
    """Whether a page is held. The last pages are compared first."""
    cdef int32_t i
    for i in range(held.num_pages - 1, -1, -1):
        if held.ids[i] == page_id:
            return True
    return False


cdef inline bint _is_destination(const Pool *pool, const Held *held) noexcept nogil:
    """Whether a page of a group is the destination of a copy that is due."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num if held.due_list == pool.list_number else 0):
        if _is_held_last(held, pool.copies.items[i].dst):
            return True
    return False


cdef inline void cache_full_pages(
    Waiting *waiting, const Group *group, Held *held, const Contents *contents, int64_t num_tokens
) noexcept nogil:
    """Add the pages of a group that `num_tokens` tokens fill to the waiting ones, and fetch their records."""
    cdef PageToCache *page
    cdef Entry *entry
    cdef int32_t place, size = group.rules.page_size
    cdef bint keeps_tokens = waiting.pool.page_tokens != NULL
    if waits_for_loads(waiting.pool, held) or not has_full_page(group, held, num_tokens):
        return
    if rare(contents.num_lookahead and waiting.pool.copies.num) and _is_destination(waiting.pool, held):
        return  # full pages of a fork are copies that are due
    while (held.num_cached + <int64_t>1) * size <= num_tokens:
        place = held.num_cached
        assert place < held.num_pages
        held.num_cached += 1
        if held.ids[place] == NULL_PAGE:
            continue
        if waiting.num_waiting == NUM_WAITING:
            cache_waiting(waiting)
        page = &waiting.to_cache[waiting.num_waiting]
        waiting.num_waiting += 1
        page.page_id, page.held, entry = held.ids[place], held, &page.entry
        entry.key, entry.group, entry.place = &contents.digests[last_hash(group, place)], group.id, place
        entry.session, entry.num_tokens = contents.session, 0
        if keeps_tokens and (place + <Py_ssize_t>1) * size + contents.num_lookahead <= contents.num_token_ids:
            entry.token_ids = contents.token_ids + <Py_ssize_t>place * size
            entry.num_tokens = size + contents.num_lookahead
        entry.upper = contents.uppers + last_hash(group, place) if contents.uppers != NULL else NULL
        fetch(&waiting.pool.pages[page.page_id])
        if is_journaled(waiting.pool):
            entry.context = contents.context
            entry.parent = contents.digests + place * group.stride - 1 if place else NULL
            entry.parent_upper = contents.uppers + place * group.stride - 1 if place and contents.uppers != NULL else NULL
            fetch(&waiting.pool.journal.notes[page.page_id])
            fetch(waiting.pool.page_tokens + page.page_id * waiting.pool.tokens_width)


cdef inline void cache_page(
    Pool *pool, const Group *group, int32_t page_id, int32_t place, const Contents *contents
) noexcept nogil:
    """Cache a loaded page or a checkpoint at a place in its group. A checkpoint gets the parent, place and tokens of its last
    hash page.
    """
    cdef Py_ssize_t last = last_hash(group, place), size = group.rules.entry_size // group.stride
    cdef Py_ssize_t first = last if is_state(&group.rules) else place * <Py_ssize_t>group.stride
    cdef Py_ssize_t num_tokens = (last + 1 - first) * size + contents.num_lookahead
    cdef const Digest *parent = contents.digests + first - 1 if first else NULL
    cdef Entry entry = Entry(
        key=&contents.digests[last], group=group.id, place=<int32_t>last if is_state(&group.rules) else place,
        context=contents.context, parent=parent, upper=NULL, parent_upper=NULL, token_ids=contents.token_ids + first * size,
        num_tokens=<int32_t>num_tokens, session=contents.session,
    )
    if contents.uppers != NULL:
        entry.upper = contents.uppers + last
        entry.parent_upper = contents.uppers + first - 1 if first else NULL
    if first * size + num_tokens > contents.num_token_ids:
        entry.num_tokens = 0
    cache_alone(pool, page_id, &entry)


# States are kept as checkpoints: at multiples of an interval the working page is cached, and a copy of it is the next working
# page. States that are written at boundaries are not kept in this way: see `pagepool.core.rows.writes`.


cdef inline bint _is_checkpoint_due(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Whether a state has reached the next multiple of the interval."""
    return keeps_checkpoints(group) and held.num_pages and full_entries(&group.rules, num_computed) > held.num_cached


cdef inline bint are_checkpoints_due(const Holding *holding, int32_t num_computed) noexcept nogil:
    """Whether any state has reached the next multiple of its interval. O(groups)."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if _is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            return True
    return False


cdef inline int64_t find_passed_checkpoint(
    const Holding *holding, int64_t num_kept, int64_t num_counted, int64_t num_slots
) noexcept nogil:
    """Return the number of tokens of the first checkpoint that the slots behind `num_counted` tokens pass; INT64_MAX: they pass
    none. A step would change the working page there before a later call keeps it. This call keeps states after `num_kept`
    tokens, fewer than before if the request was set back; -1: it keeps none. O(groups).
    """
    cdef int64_t num_passed, first = INT64_MAX
    cdef const Group *group
    cdef Py_ssize_t g
    for g in range(holding.num_groups if num_counted < num_slots else 0):
        group = &holding.groups[g]
        if keeps_checkpoints(group):
            num_passed = num_kept if num_kept >= 0 else holding.held[g].num_cached * <int64_t>group.rules.entry_size
            first = min(first, find_next_checkpoint(holding, group, max(num_passed, num_counted - 1)))
    return first if first < num_slots else INT64_MAX


cdef inline bint _may_cache_state(
    const Pool *pool, const Group *group, const Held *held, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Return whether the working page may be cached under the digest of the first `num_computed` tokens: not between multiples
    of the interval, while hits are loaded, or if the shard has such a checkpoint already.
    """
    cdef int32_t queue = shard_queue_of(pool, held.ids[0]) if pool.num_shards else -1
    cdef int32_t place = full_entries(&group.rules, num_computed) - 1
    if num_computed % group.rules.entry_size or place < 0 or waits_for_loads(pool, held):
        return False
    return find_within(pool, contents.digests[last_hash(group, place)], group.id, ids_in_queue(pool, queue)) == NULL_PAGE


cdef inline void _cache_state(
    Pool *pool, const Group *group, const Held *held, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Cache the working page under the digest of the first `num_computed` tokens."""
    assert is_state(&group.rules) and held.num_pages == 1
    cache_page(pool, group, held.ids[0], full_entries(&group.rules, num_computed) - 1, contents)


cdef inline void _note_checkpoint(const Holding *holding, int32_t num_computed) noexcept nogil:
    """Make a checkpoint a boundary, so that pages of windows before it stay cached if they are still held."""
    cdef Py_ssize_t g
    add_boundary(holding.boundaries, num_computed)
    for g in range(holding.num_groups):
        holding.held[g].next_needed = 0


cdef inline bint keep_state(
    Pool *pool, const Holding *holding, int32_t g, const Contents *contents, int32_t num_computed, int32_t shard,
    Py_ssize_t num_reserved,
) noexcept nogil:
    """Make the working page of a group's state a checkpoint, if one is due, and take the next working page from a shard, with
    `num_reserved` pages left free. Return whether that was done. Without contents, or if no page is free, the checkpoint is
    left out, since the next step writes to the working page. There is room for a copy.
    """
    cdef const Group *group = &holding.groups[g]
    cdef Held *held = &holding.held[g]
    cdef int32_t page_id, queue
    if not _is_checkpoint_due(group, held, num_computed):
        return False
    if contents != NULL and holding.boundaries != NULL and num_computed % group.rules.entry_size == 0:
        _note_checkpoint(holding, num_computed)
    held.num_cached = full_entries(&group.rules, num_computed)
    if contents == NULL or not _may_cache_state(pool, group, held, contents, num_computed):
        return False
    queue = queue_for(pool, group, shard)
    if not has_free_pages(pool, 1, num_reserved, queue) or find_held_free(pool, 1) != NULL_PAGE:
        pool.banks[group.bank].num_passed_checkpoints += 1
        return False
    page_id = held.ids[0]
    _cache_state(pool, group, held, contents, num_computed)
    _take_into(pool, held, 0, 1, queue, holding.session)
    _queue_copy(pool, page_id, held, 0, g)
    assert pool.pages[held.ids[0]].group == NO_GROUP and pool.pages[held.ids[0]].ref_cnt == 1
    return True


cdef inline void cache_states(
    Pool *pool, const Holding *holding, const Contents *contents, int32_t num_computed, int32_t term
) noexcept nogil:
    """Cache the states that are due when a request or row ends, right after its pages were given back with a term."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        if _is_checkpoint_due(group, held, num_computed) and _may_cache_state(pool, group, held, contents, num_computed):
            _cache_state(pool, group, held, contents, num_computed)
            if term != UNKNOWN:
                expect_page(pool, held.ids[0], term, now_of(&pool.expected))


# Copies of pages are due before the next step. They are queued here, and the engine that takes the list does them. Each copy
# has a reference to its source. Before it is taken no token is written to the pages that it reads or writes.


cdef inline bint reserve_copies(Pool *pool, Py_ssize_t n) noexcept:
    """Make room for `n` more copies; False if memory is short."""
    return reserve_items(<void **>&pool.copies.items, &pool.copies.capacity, pool.copies.num + n, sizeof(PageCopy))


cdef inline void _queue_copy(Pool *pool, int32_t src, Held *target, int32_t place, int32_t group) noexcept nogil:
    """Append a copy into the page at `place` to the list, which has room. The copy takes over a reference to `src`."""
    cdef Copies *copies = &pool.copies
    assert copies.num < copies.capacity and pool.pages[src].ref_cnt > 0 and src != target.ids[place]
    copies.items[copies.num] = PageCopy(src=src, dst=target.ids[place], group=group)
    copies.num += 1
    target.due_list = pool.list_number


cdef inline bint _are_sources(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a held page is the source of a copy that is due."""
    cdef const Held *held
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.copies.num else 0):
        held = &holding.held[g]
        for i in range(pool.copies.num if held.read_list == pool.list_number else 0):
            if pool.copies.items[i].group == g and _is_held_last(held, pool.copies.items[i].src):
                return True
    return False


cdef inline bint has_copies(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a copy from or into a held page is due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if _is_destination(pool, &holding.held[g]):
            return True
    return _are_sources(pool, holding)


cdef inline bint awaits_moves(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a move into a held page is due, or a save of its last content."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if holding.held[g].due_list == pool.list_number:
            return True
    return False


cdef inline bint has_moves_due(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a move of a held page is due, so that no token may be written to it."""
    return rare(pool.copies.num or pool.tier != NULL) and (awaits_moves(pool, holding) or _are_sources(pool, holding))


cdef inline void drop_copies(Pool *pool, const Holding *holding) noexcept nogil:
    """Drop the copies into pages that were just given back."""
    cdef Copies *copies = &pool.copies
    cdef Py_ssize_t i, num_kept = 0
    for i in range(copies.num):
        if _is_held_last(&holding.held[copies.items[i].group], copies.items[i].dst):
            give_back(pool, copies.items[i].src)
        else:
            copies.items[num_kept] = copies.items[i]
            num_kept += 1
    copies.num = num_kept


cdef inline int32_t count_moves(const Pool *pool, int32_t page_id) noexcept nogil:
    """Count the references to a page that due copies and unfinished loads have."""
    cdef Py_ssize_t i
    cdef int32_t count = 0
    for i in range(pool.copies.num):
        count += pool.copies.items[i].src == page_id
    for i in range(pool.tier.num if pool.tier != NULL and pool.tier.loading[page_id] else 0):
        count += pool.tier.items[i].is_load and pool.tier.items[i].page_id == page_id
    return count


# Hits may be loaded from the tier. Pages computed with them are not cached or skipped before the loads have ended.


cdef inline int64_t find_load_number(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Return the last list of moves that loads one of the pages; 0: none does."""
    cdef Py_ssize_t i
    cdef int64_t number = 0
    for i in range(n if pool.tier != NULL and pool.tier.oldest_load < INT64_MAX else 0):
        number = max(number, pool.tier.loading[ids[i]])
    return number


cdef inline void record_loads(const Pool *pool, const Holding *holding, int64_t number) noexcept nogil:
    """Record the last list of moves that loads hits; 0: none does."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if number else 0):
        holding.held[g].load_number = number
        if number == pool.list_number:
            holding.held[g].due_list = number


cdef inline bint waits_for_loads(const Pool *pool, const Held *held) noexcept nogil:
    """Whether hits, and pages computed with them, may still turn out to be wrong. Nothing more is cached then."""
    return rare(pool.tier != NULL) and held.load_number >= pool.tier.oldest_load


cdef inline int32_t find_wrong(const Holding *holding, const uint8_t *is_wrong, int64_t number) noexcept nogil:
    """Return the first token in a page that the loads of a list filled wrongly; -1: there is none. A state may have been copied
    from such a page or computed with it, so it is wrong from the first token on.
    """
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int32_t i, first = INT32_MAX
    for g in range(holding.num_groups):
        held = &holding.held[g]
        if held.load_number < number:
            return -1
        if is_state(&holding.groups[g].rules):
            return 0
        for i in range(held.num_skipped, held.num_pages):
            if is_wrong[held.ids[i]]:
                first = min(first, i * holding.groups[g].rules.page_size)
                break
    return first if first < INT32_MAX else -1


# Tokens were not computed after all, or are computed again. They are written to pages that nobody else holds.


cdef inline void _forget_page(Pool *pool, int32_t page_id, const Digest *digest, int32_t group) noexcept nogil:
    """Drop the entry of a page. The null page stands for a skipped page or a checkpoint: with it all pages with the digest lose
    their entry, in the tier too.
    """
    if page_id == NULL_PAGE and digest != NULL:
        page_id = find(pool, digest[0], group)
        while page_id != NULL_PAGE:
            uncache(pool, page_id)
            page_id = find(pool, digest[0], group)
        uncache_in_tier(pool.tier, digest[0], group)
    elif pool.pages[page_id].group != NO_GROUP:
        uncache_everywhere(pool, page_id)


cdef inline int32_t count_once_cached(const Holding *holding, Py_ssize_t g) noexcept nogil:
    """Count the leading pages or checkpoints of a group that may have prefix entries, those of tokens set back included."""
    cdef const Group *group = &holding.groups[g]
    cdef const Held *held = &holding.held[g]
    cdef int32_t num = full_entries(&group.rules, holding.num_once_cached)
    if group.id == NO_GROUP:
        return 0
    return max(held.num_cached, num if is_state(&group.rules) else min(num, held.num_pages))


cdef inline bint _is_checkpoint(const Holding *holding, const Group *group, int64_t place) noexcept nogil:
    """Whether the holder keeps its state at a place: at each one, unless states are written at boundaries."""
    cdef int64_t num_tokens = (place + 1) * group.rules.entry_size
    return find_next_checkpoint(holding, group, num_tokens - 1) == num_tokens


cdef inline void forget_uncomputed(
    Pool *pool, const Holding *holding, int32_t num_computed, const Contents *contents
) noexcept nogil:
    """Drop the entries of pages with tokens from `num_computed` on, except hits."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g, i, end
    cdef int32_t page_id, stop
    for g in range(holding.num_groups if pool.slots != NULL else 0):
        group = &holding.groups[g]
        held = &holding.held[g]
        stop = count_once_cached(holding, g)
        for i in range(max(full_entries(&group.rules, num_computed), held.num_hits), stop):
            end = (i + 1) * group.stride
            if is_state(&group.rules) and not _is_checkpoint(holding, group, i):
                continue
            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]
            _forget_page(pool, page_id, &contents.digests[end - 1] if end <= contents.num_digests else NULL, group.id)


cdef inline void recompute_from(const Group *group, Held *held, int32_t num_computed) noexcept nogil:
    """Let pages with tokens from `num_computed` on be cached and ranked again, if they have lost their entry."""
    cdef int32_t place = full_entries(&group.rules, num_computed)
    held.num_cached = min(held.num_cached, place)
    held.num_hits = min(held.num_hits, place)
    held.ranking.num_ranked = min(held.ranking.num_ranked, place)
    assert held.num_hits <= held.num_cached or is_state(&group.rules)  # a fork of a state counts all checkpoints as hits


cdef inline void give_back_from(
    Pool *pool, const Group *group, Held *held, int64_t place, int32_t num_computed
) noexcept nogil:
    """Give back the pages from a place on, the last first. Tokens from `num_computed` on are computed again."""
    while held.num_pages > place:
        held.num_pages -= 1
        give_back(pool, held.ids[held.num_pages])
    if held.num_skipped > held.num_pages:
        held.num_skipped, held.next_needed = held.num_pages, 0
    assert held.num_pages == 0 or held.num_skipped == 0 or held.ids[held.num_skipped - 1] == NULL_PAGE
    recompute_from(group, held, num_computed)


cdef inline void give_back_behind(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that come after those of `num_tokens` tokens, group by group."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        give_back_from(
            pool, &holding.groups[g], &holding.held[g], pages_for(&holding.groups[g].rules, num_tokens), num_tokens
        )


cdef inline int32_t _count_kept(
    const Pool *pool, const Group *group, const Held *held, int32_t num_computed, int32_t num_tokens
) noexcept nogil:
    """Count the leading pages that a holder of `num_tokens` tokens can keep, if it writes to those from `num_computed` on. They
    end before the first page with other holders to which it would write.
    """
    cdef int32_t page, num_pages = <int32_t>pages_for(&group.rules, num_tokens)
    for page in range(full_pages(&group.rules, num_computed), min(num_pages, held.num_pages)):
        if pool.pages[held.ids[page]].ref_cnt > 1:
            return page
    return num_pages


cdef inline int32_t find_restart(const Pool *pool, const Holding *holding, int32_t most, int32_t changed) noexcept nogil:
    """Count the leading tokens, at most `most`, that can stay computed, if the holder writes to the slots from `changed` on. In
    each group they end where a page starts, or within one that nobody else holds. O(groups) for each time that a group shortens
    them.
    """
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t kept, before = -1, restart = most
    while before != restart:
        before = restart
        for g in range(holding.num_groups):
            group = &holding.groups[g]
            kept = _count_kept(pool, group, &holding.held[g], min(changed, restart), restart)
            if kept < pages_for(&group.rules, restart):
                restart = kept * group.rules.page_size
    return restart


cdef inline bint can_restart(const Pool *pool, const Holding *holding, int32_t restart, int32_t num_tokens) noexcept nogil:
    """Whether a holder of `num_tokens` tokens can compute those from `restart` on. The pages that these attend to or are
    written to must be there, and pages to be given back must be held.
    """
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        if lacks_page(group, held, restart, pages_for(&group.rules, num_tokens)):
            return False
        if find_unheld(pool, held.ids, full_pages(&group.rules, restart), held.num_pages) >= 0:
            return False
    return True


cdef inline void restart_from(
    Pool *pool, const Holding *holding, int32_t restart, int32_t changed, int32_t num_tokens
) noexcept nogil:
    """Let a holder of `num_tokens` tokens compute those from `restart` on again, after `can_restart`, and write to the slots
    from `changed` on. It gives back the pages behind its tokens, and all pages from the first one with other holders to which
    it would write, the last first. Changed pages lose their entries if nobody else holds them.
    """
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g, j
    cdef int32_t keep, page_id
    for g in range(holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        keep = _count_kept(pool, group, held, changed, num_tokens)
        for j in range(held.num_pages - 1, full_pages(&group.rules, changed) - 1, -1):
            page_id = held.ids[j]
            if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt == 1 and pool.pages[page_id].group != NO_GROUP:
                uncache(pool, page_id)
        give_back_from(pool, group, held, keep, restart if is_state(&group.rules) else changed)


# A fork of a request or row shares its full pages. The open page of each group, and working pages of states, are copied. So are
# full pages whose lookahead may differ: drafters write other keys to their ends.

cdef struct ForkExtent:
    int32_t num_computed      # tokens of the fork
    int32_t num_shared        # leading tokens whose full pages are shared

cdef enum ForkOutcome:
    FORKED
    SHORT_OF_PAGES
    UNSHAREABLE               # a page cannot get another reference or was given back, or a free page has one
    SHORT_OF_MEMORY


cdef inline ForkExtent fork_extent(int64_t num_computed, int32_t num_lookahead) noexcept nogil:
    return ForkExtent(num_computed=<int32_t>num_computed, num_shared=<int32_t>max(0, num_computed - num_lookahead))


cdef inline int32_t _fork_end(const Group *group, const Held *held, const ForkExtent *extent) noexcept nogil:
    """Return the place behind the last page that has tokens of a fork."""
    return min(<int32_t>pages_for(&group.rules, extent.num_computed), held.num_pages)


cdef inline Py_ssize_t count_open_pages(const Holding *holding, const ForkExtent *extent, int32_t bank) noexcept nogil:
    """Count the pages of a bank, or with -1 of all, that a fork copies."""
    cdef const Group *group
    cdef Py_ssize_t g, i, count = 0
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if bank >= 0 and group.bank != bank:
            continue
        for i in range(full_pages(&group.rules, extent.num_shared), _fork_end(group, &holding.held[g], extent)):
            count += holding.held[g].ids[i] != NULL_PAGE
    return count


cdef inline Shortage find_fork_shortage(
    const Pool *pool, const Holding *source, const ForkExtent *extent, Py_ssize_t num_targets, int32_t shard
) noexcept nogil:
    """Return what forks lack in their shard, or in the first bank with too few pages; the last bank if none has too few."""
    cdef Shortage shortage
    cdef int32_t bank
    for bank in range(pool.num_banks):
        shortage = shortage_in(
            pool, count_open_pages(source, extent, bank) * num_targets, 0, 0,
            queue_in(pool, bank, shard),
        )
        if shortage.num_needed > shortage.num_free:
            break
    return shortage


cdef inline ForkOutcome prepare_fork(
    Pool *pool, const Holding *source, const ForkExtent *extent, Py_ssize_t num_targets, int32_t shard
) noexcept:
    """Check whether a fork can be made, and make room for its copies."""
    cdef Py_ssize_t g, num_new = count_open_pages(source, extent, -1) * num_targets
    cdef Shortage shortage = find_fork_shortage(pool, source, extent, num_targets, shard)
    if shortage.num_needed > shortage.num_free:
        return SHORT_OF_PAGES
    if find_held_free(pool, num_new) != NULL_PAGE:
        return UNSHAREABLE
    for g in range(source.num_groups):
        if find_untouchable(pool, source.held[g].ids, source.held[g].num_pages, num_targets) >= 0:
            return UNSHAREABLE
        if find_unheld(pool, source.held[g].ids, 0, source.held[g].num_pages) >= 0:
            return UNSHAREABLE
    return FORKED if reserve_copies(pool, num_new) else SHORT_OF_MEMORY


cdef inline void _fork_page(
    Pool *pool, Held *source, Held *target, int32_t g, int32_t place, int32_t queue, int32_t session
) noexcept nogil:
    """Take a page for a fork into an empty place, and queue the copy."""
    cdef int32_t page_id = source.ids[place]
    share(pool, page_id)
    _take_into(pool, target, place, 1, queue, session)
    _queue_copy(pool, page_id, target, place, g)
    source.read_list, pool.copies.is_between = pool.list_number, True
    if pool.tier != NULL and pool.tier.loading[page_id]:  # if the load fails, the copy is as wrong as its source
        pool.tier.loading[target.ids[place]] = pool.tier.loading[page_id]
        pool.tier.last_forked = max(pool.tier.last_forked, pool.tier.loading[target.ids[place]])


cdef inline void fork_group(
    Pool *pool, const Holding *forked, const Holding *new, int32_t g, const ForkExtent *extent, int32_t shard
) noexcept nogil:
    """Let `new`, which holds nothing in a group and has room for the pages, continue from the computed tokens of `forked`."""
    cdef const Group *group = &forked.groups[g]
    cdef Held *source = &forked.held[g]
    cdef Held *target = &new.held[g]
    cdef int32_t *ids = target.ids
    cdef int32_t i, n = full_pages(&group.rules, extent.num_shared), stop = _fork_end(group, source, extent)
    assert target.num_pages == 0 and n <= source.num_pages
    for i in range(n):
        if source.ids[i] != NULL_PAGE:
            share(pool, source.ids[i])
    if n:
        memcpy(ids, source.ids, n * sizeof(int32_t))
        use_in_session(pool, ids, n, new.session)
    target[0] = source[0]
    target.ids, target.num_pages, target.num_skipped, target.next_needed = ids, stop, min(source.num_skipped, stop), 0
    if is_state(&group.rules):
        target.num_cached = min(source.num_cached, full_entries(&group.rules, extent.num_computed))
    else:
        target.num_cached = min(source.num_cached, max(n, target.num_skipped))
        target.ranking.num_ranked = min(source.ranking.num_ranked, n)
    target.num_hits = full_entries(&group.rules, extent.num_computed) if is_state(&group.rules) else target.num_cached
    target.read_list = 0
    for i in range(n, stop):
        ids[i] = NULL_PAGE
        if source.ids[i] != NULL_PAGE:
            _fork_page(pool, source, target, g, i, queue_for(pool, group, shard), new.session)
