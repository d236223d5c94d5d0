# What a request or a running row holds in each cache group. The caller holds the store's lock.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from pagepool.core.index cimport drop, find
from pagepool.core.pages cimport find_unheld, take_from, touch_all
from pagepool.core.platform cimport GUARDS, rare
from pagepool.core.records cimport BLANK, FLAGS, NOT_FREE, NO_GROUP, NULL_PAGE, Page, Pool, Ranking
from pagepool.core.references cimport put_back_held
from pagepool.core.rules cimport (
    MAX_TOKENS, Group, first_useful_page, full_entries, full_pages, is_needed_by_hits, is_state, keeps_checkpoints, next_skip,
    pages_for,
)
from pagepool.core.siphash cimport Digest
from pagepool.core.transfers cimport drop_everywhere, drop_from_tier

cdef enum:
    STALE = -1                # a hit has another content by now
    UNTOUCHABLE = -2          # a hit cannot be given another reference

cdef struct Held:             # in one group
    int32_t *ids              # of its pages, in token order; the null page where one fell out of an attention window
    int32_t num_pages
    int32_t num_cached        # leading pages, or checkpoints of a state, that need no prefix entry any more
    int32_t num_skipped       # leading pages that fell out of the window
    int32_t num_hits          # leading pages that were hits
    Ranking ranking           # of the others; for a pool with a policy
    int32_t num_unique        # leading pages that were compared with equal ones, where rows share these
    uint32_t read_list        # the last list of copies with a page as source; see `Copies`
    uint32_t written_list     # and as destination
    int64_t load_number       # of the last list by which hits are loaded; 0: they were there
    int64_t transfer_number   # of the last list with a transfer of these pages

cdef struct Holding:
    const Group *groups       # [num_groups]
    Held *held                # [num_groups]
    Py_ssize_t num_groups

cdef struct Limits:           # tokens up to which nothing is due
    int64_t num_room          # with a slot
    int64_t num_full          # at which the next page is full
    int64_t num_skip          # computed ones, at which the next page is skipped, or the state may become a checkpoint


cdef inline int64_t count_missing(const Group *group, int64_t num_pages, int64_t num_tokens) noexcept nogil:
    """Pages that `num_pages` are short of slots for `num_tokens` tokens."""
    if num_tokens <= num_pages * group.rules.page_size:
        return 0
    return max(<int64_t>0, pages_for(&group.rules, num_tokens) - num_pages)


cdef inline int64_t count_new_pages(const Holding *holding, int64_t num_tokens) noexcept nogil:
    """Pages that all groups are short of."""
    cdef Py_ssize_t g
    cdef int64_t count = 0
    for g in range(holding.num_groups):
        count += count_missing(&holding.groups[g], holding.held[g].num_pages, num_tokens)
    return count


cdef inline int64_t next_due(const Group *group, const Held *held) noexcept nogil:
    """The number of computed tokens at which the next page may be skipped, or a state become a checkpoint."""
    if keeps_checkpoints(group):
        return (held.num_cached + <int64_t>1) * group.rules.entry_size
    return next_skip(&group.rules, held.num_skipped)


cdef inline Limits limits_of(const Holding *holding) noexcept nogil:
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g
    cdef int64_t num_skip
    cdef Limits limits = Limits(INT64_MAX, INT64_MAX, INT64_MAX)
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        held = &holding.held[g]
        limits.num_room = min(limits.num_room, <int64_t>held.num_pages * group.rules.page_size)
        if group.rules.window or group.rules.chunk or keeps_checkpoints(group):
            num_skip = next_due(group, held)
            limits.num_skip = min(limits.num_skip, num_skip if num_skip < MAX_TOKENS else INT64_MAX)
        if group.id != NO_GROUP:
            limits.num_full = min(limits.num_full, (held.num_cached + <int64_t>1) * group.rules.page_size)
    return limits


cdef inline int32_t find_skip_stop(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """End of the pages that no token from `num_computed` on attends to."""
    return min(first_useful_page(&group.rules, num_computed, held.num_cached), held.num_pages)


cdef inline int32_t find_lost_page(const Pool *pool, const Holding *holding, int32_t num_computed) noexcept nogil:
    """A page to be skipped, or a state to be kept, that somebody else gave back, or NULL_PAGE."""
    cdef const Held *held
    cdef Py_ssize_t g, stop, bad
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = find_skip_stop(&holding.groups[g], held, num_computed)
        if keeps_checkpoints(&holding.groups[g]):
            stop = held.num_pages
        bad = find_unheld(pool, held.ids, held.num_skipped, stop)
        if bad >= 0:
            return held.ids[bad]
    return NULL_PAGE


cdef inline bint lacks_page(const Group *group, const Held *held, int32_t num_computed, int64_t num_pages) noexcept nogil:
    """Whether one of the first `num_pages` pages was given back that tokens from `num_computed` on attend or are written to."""
    cdef int32_t first = first_useful_page(&group.rules, num_computed, 0)
    return first < min(num_pages, <int64_t>held.num_pages) and held.ids[first] == NULL_PAGE


cdef inline void skip_to(Pool *pool, const Group *group, Held *held, int32_t stop) noexcept nogil:
    """Give back the pages before place `stop`, the last first, and put the null page there."""
    cdef int32_t j
    if stop > held.num_skipped:
        for j in range(stop - 1, held.num_skipped - 1, -1):
            if pool.num_parts and pool.pages[held.ids[j]].ref_cnt == 1 and not is_needed_by_hits(&group.rules, j):
                pool.policy.marks[held.ids[j]] = BLANK
            put_back_held(pool, held.ids[j])
        memset(held.ids + held.num_skipped, 0, (stop - held.num_skipped) * sizeof(int32_t))
        held.num_skipped = stop


cdef inline void skip_pages(Pool *pool, const Group *group, Held *held, int32_t num_computed) noexcept nogil:
    """Give back the pages that no token from `num_computed` on attends to. While hits are loaded none goes: if that fails they
    are needed again.
    """
    if not waits_for_loads(pool, held):
        skip_to(pool, group, held, find_skip_stop(group, held, num_computed))


cdef inline void attach_hits(Pool *pool, const Group *group, Held *held, const int32_t *ids, int32_t n) noexcept nogil:
    """Make hits that `count_free_hits` saw the first pages of a group without pages; of a state that is due to be copied only
    take a reference.
    """
    touch_all(pool, ids, n)
    held.num_pages = held.num_cached = held.num_hits = held.num_unique = n
    held.num_skipped = 0
    held.ranking = Ranking(n, 0)
    if is_state(&group.rules):
        held.num_pages = 0
    elif n:
        memcpy(held.ids, ids, n * sizeof(int32_t))


cdef inline void note_taken(const Pool *pool, Held *held) noexcept nogil:
    """Note that pages were taken, of which some may have to be saved in the tier before they are written."""
    if rare(pool.tier != NULL) and pool.tier.num_due:
        held.transfer_number = pool.tier.last_number + 1


cdef inline int64_t find_load_number(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """The last list by which one of the pages is loaded, 0 for none."""
    cdef Py_ssize_t i
    cdef int64_t number = 0
    for i in range(n if pool.tier != NULL and pool.tier.oldest_load < INT64_MAX else 0):
        number = max(number, pool.tier.loading[ids[i]])
    return number


cdef inline void note_loads(const Pool *pool, const Holding *holding, int64_t number) noexcept nogil:
    """Note that hits are loaded by lists up to that number."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if number else 0):
        holding.held[g].load_number = number
        if number > pool.tier.last_number:
            holding.held[g].transfer_number = number


cdef inline bint has_transfers_due(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a transfer of pages that are held, or that had their places, was not taken."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if pool.tier != NULL else 0):
        if holding.held[g].transfer_number > pool.tier.last_number:
            return True
    return False


cdef inline int32_t find_wrong(const Holding *holding, const uint8_t *is_wrong, int64_t number) noexcept nogil:
    """The first token in a page with a wrong content, which the loads of a list have left; -1 for none. A state may have been
    copied from one, or computed with one, so it is wrong from the start.
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


cdef inline bint waits_for_loads(const Pool *pool, const Held *held) noexcept nogil:
    """Whether hits, or what was computed with them, may still turn out to be wrong: then nothing more is entered."""
    return rare(pool.tier != NULL) and held.load_number >= pool.tier.oldest_load


cdef inline int32_t take_missing(Pool *pool, const Group *group, Held *held, int64_t num_tokens, int32_t shard) noexcept nogil:
    """Take the pages that a group is short of, and that are free, and return how many."""
    cdef int32_t n = <int32_t>count_missing(group, held.num_pages, num_tokens)
    if n:
        take_from(pool, held.ids + held.num_pages, n, shard)
        note_taken(pool, held)
        held.num_pages += n
    return n


cdef inline Py_ssize_t count_free_hits(
    const Pool *pool, const Group *group, const Digest *digests, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all
) noexcept nogil:
    """How many pages of `n` are in the free queue; UNTOUCHABLE if one cannot be touched, as one of `num_all`; STALE if one is
    not cached under its digest any more. Without digests the pages are known, and not compared.
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
        if GUARDS:  # without branches, for there is nearly always nothing wrong
            is_lost |= (page.ref_cnt == 0) & (page.prev_free == NOT_FREE) | (page.ref_cnt >= INT32_MAX - num_all)
        if GUARDS and digests != NULL:
            digest = &digests[(i + 1) * group.stride - 1]
            differences |= (page.key_lo ^ digest.lo) | (page.key_hi ^ digest.hi)
            differences |= <uint64_t>((page.group & ~FLAGS) ^ group.id)
    if differences:
        return STALE
    return UNTOUCHABLE if is_lost else num_free


cdef inline Py_ssize_t count_places(const Holding *holding) noexcept nogil:
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups):
        count += holding.held[g].num_pages
    return count


cdef inline Py_ssize_t list_last_first(const Holding *holding, int32_t *out) noexcept nogil:
    """Copy all pages in the order in which they go back: group by group, the last page first. Returns how many."""
    cdef const Held *held
    cdef Py_ssize_t g, j, count = 0
    for g in range(holding.num_groups):
        held = &holding.held[g]
        for j in range(held.num_pages - 1, -1, -1):
            out[count] = held.ids[j]
            count += 1
    return count


cdef inline void forget_page(Pool *pool, int32_t page_id, const Digest *digest, int32_t group) noexcept nogil:
    """Drop the entry of a page. A null page stands for one that an attention window left, or for a checkpoint. It is not known
    any more which one that was, so all pages of its content lose the entry, and the tier, where it may be alone by now.
    """
    if page_id == NULL_PAGE and digest != NULL:
        page_id = find(pool, digest[0], group)
        while page_id != NULL_PAGE:
            drop(pool, page_id)
            page_id = find(pool, digest[0], group)
        drop_from_tier(pool.tier, digest[0], group)
    elif pool.pages[page_id].group != NO_GROUP:
        drop_everywhere(pool, page_id)


cdef inline void forget_uncomputed(
    Pool *pool, const Holding *holding, int32_t num_computed, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Drop the entries of pages with tokens from `num_computed` on, except hits."""
    cdef const Group *group
    cdef const Held *held
    cdef Py_ssize_t g, i, end
    cdef int32_t page_id
    for g in range(holding.num_groups if pool.slots != NULL else 0):
        group = &holding.groups[g]
        held = &holding.held[g]
        for i in range(max(full_entries(&group.rules, num_computed), held.num_hits), held.num_cached):
            end = (i + 1) * group.stride
            page_id = NULL_PAGE if is_state(&group.rules) else held.ids[i]
            forget_page(pool, page_id, &digests[end - 1] if end <= num_digests else NULL, group.id)


cdef inline void recompute_from(const Group *group, Held *held, int32_t num_computed) noexcept nogil:
    """Let pages with tokens from `num_computed` on be entered, and ranked, again, if they have lost their entry."""
    cdef int32_t place = full_entries(&group.rules, num_computed)
    held.num_cached = min(held.num_cached, place)
    held.num_hits = min(held.num_hits, place)
    held.num_unique = min(held.num_unique, place)
    held.ranking.num_ranked = min(held.ranking.num_ranked, place)


cdef inline void skip_unread(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages that no token from `num_tokens` on attends to. They may not have been filled, so they get no prefix
    entry, and nothing goes back to them.
    """
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t stop
    for g in range(holding.num_groups):
        held = &holding.held[g]
        stop = min(first_useful_page(&holding.groups[g].rules, num_tokens, 0), held.num_pages)
        skip_to(pool, &holding.groups[g], held, stop)
        held.num_cached = max(held.num_cached, stop)


cdef inline void put_back_behind(Pool *pool, const Holding *holding, int32_t num_tokens) noexcept nogil:
    """Give back the pages wholly behind `num_tokens` tokens, group by group, the last first."""
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t num_kept
    for g in range(holding.num_groups):
        held = &holding.held[g]
        num_kept = pages_for(&holding.groups[g].rules, num_tokens)
        while held.num_pages > num_kept:
            held.num_pages -= 1
            put_back_held(pool, held.ids[held.num_pages])
        held.num_skipped = min(held.num_skipped, held.num_pages)
        recompute_from(&holding.groups[g], held, num_tokens)


cdef inline void empty(const Holding *holding) noexcept nogil:
    """Forget all pages, which were given back."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        holding.held[g] = Held(holding.held[g].ids, 0, 0, 0, 0, Ranking(0, 0), 0, 0, 0, 0, 0)


# Tokens are computed again, into pages that nobody else holds.

cdef inline int32_t count_kept(
    const Pool *pool, const Group *group, const Held *held, int32_t num_computed, int32_t num_tokens
) noexcept nogil:
    """Leading pages with which a holder of `num_tokens` tokens, `num_computed` of them computed, goes on: none to which it
    writes and that has other holders, and none behind such a page.
    """
    cdef int32_t page, num_pages = <int32_t>pages_for(&group.rules, num_tokens)
    for page in range(full_pages(&group.rules, num_computed), min(num_pages, held.num_pages)):
        if pool.pages[held.ids[page]].ref_cnt > 1:
            return page
    return num_pages


cdef inline int32_t find_restart(const Pool *pool, const Holding *holding, int32_t most) noexcept nogil:
    """How many computed tokens, `most` or fewer, can stay so: in each group up to the start of a page, or within one that
    nobody else holds. O(groups) for each time that a group shortens it for the others.
    """
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t before = -1, restart = most
    while before != restart:
        before = restart
        for g in range(holding.num_groups):
            group = &holding.groups[g]
            if count_kept(pool, group, &holding.held[g], restart, restart) < pages_for(&group.rules, restart):
                restart = full_pages(&group.rules, restart) * group.rules.page_size
    return restart


cdef inline bint can_restart(const Pool *pool, const Holding *holding, int32_t restart, int32_t num_tokens) noexcept nogil:
    """Whether a holder of `num_tokens` tokens can go on from `restart`: the pages that the next token attends to, and its own,
    are still there, and those to be given back are held.
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


cdef inline void trim_group(Pool *pool, const Group *group, Held *held, int32_t num_tokens, int32_t restart) noexcept nogil:
    """Give back a group's pages behind `num_tokens` tokens, and from the first on that others hold and tokens from `restart` on
    would be written to, the last first. Pages with these that nobody else holds lose their entries until they are computed.
    """
    cdef int32_t keep = count_kept(pool, group, held, restart, num_tokens)
    cdef Py_ssize_t j
    cdef int32_t page_id
    for j in range(held.num_pages - 1, full_pages(&group.rules, restart) - 1, -1):
        page_id = held.ids[j]
        if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt == 1 and pool.pages[page_id].group != NO_GROUP:
            drop(pool, page_id)
        if j >= keep:
            put_back_held(pool, page_id)
    held.num_pages = min(held.num_pages, keep)
    held.num_skipped = min(held.num_skipped, held.num_pages)
    recompute_from(group, held, restart)


cdef inline void restart_from(Pool *pool, const Holding *holding, int32_t restart, int32_t num_tokens) noexcept nogil:
    """Let a holder that `can_restart` compute its tokens from there on again, and keep no pages behind `num_tokens`."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        trim_group(pool, &holding.groups[g], &holding.held[g], num_tokens, restart)
