# What a request or a running row holds in each cache group. The caller holds the store's lock.

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

from pagepool.core.index cimport drop, enter, find, find_within, home_of, is_journaled, keep_tokens, note_entry, rank
from pagepool.core.pages cimport find_unheld, find_untouchable, note_request, share, take_from, take_this, touch_all
from pagepool.core.platform cimport GUARDS, fetch, rare
from pagepool.core.queue cimport count_free_in, find_held_free, has_free_pages, put_back_held
from pagepool.core.records cimport (
    BLANK, FLAGS, NOT_FREE, NO_GROUP, NULL_PAGE, Copies, Origin, Page, PageCopy, Pool, Range, Ranking, ids_in_shard, is_free,
    resize, shard_of,
)
from pagepool.core.rules cimport (
    MAX_TOKENS, Group, first_useful_page, full_entries, full_pages, is_needed_by_hits, is_state, keeps_checkpoints, next_skip,
    pages_for,
)
from pagepool.core.siphash cimport Digest, hash_two_after
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


# Copies of pages that are due before the next step: noted here, done by whoever takes the list.


cdef inline bint reserve_copies(Pool *pool, Py_ssize_t n) noexcept:
    """Allocate room for `n` copies more; False where memory is short."""
    cdef Py_ssize_t capacity = max(<Py_ssize_t>8, pool.copies.capacity)
    while capacity < pool.copies.num + n:
        capacity *= 2
    if n and capacity > pool.copies.capacity:
        if not resize(<void **>&pool.copies.items, capacity * sizeof(PageCopy)):
            return False
        pool.copies.capacity = capacity
    return True


cdef inline void note_copy(Pool *pool, int32_t src, Held *target, int32_t place, int32_t group) noexcept nogil:
    """Note a copy into the page at `place` of what a request or row holds in a group. It takes over a reference to `src`. There
    is room for it.
    """
    cdef Copies *copies = &pool.copies
    copies.list_number += copies.num == 0
    copies.items[copies.num] = PageCopy(src, target.ids[place], group)
    copies.num += 1
    target.written_list = copies.list_number


cdef inline bint are_destinations(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the destination of a copy that is due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if pool.copies.num else 0):
        if holding.held[g].written_list == pool.copies.list_number:
            return True
    return False


cdef inline bint awaits_copies(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the destination of a copy that is due, or a transfer of them is."""
    return are_destinations(pool, holding) or has_transfers_due(pool, holding)


cdef inline bint is_held_last(const Held *held, int32_t page_id) noexcept nogil:
    """Whether a page is held; one of the last is found first."""
    cdef int32_t i
    for i in range(held.num_pages - 1, -1, -1):
        if held.ids[i] == page_id:
            return True
    return False


cdef inline bint are_sources(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether pages that are held are the source of a copy that is due."""
    cdef const Held *held
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.copies.num else 0):
        held = &holding.held[g]
        for i in range(pool.copies.num if held.read_list == pool.copies.list_number else 0):
            if pool.copies.items[i].group == g and is_held_last(held, pool.copies.items[i].src):
                return True
    return False


cdef inline bint has_copies_due(const Pool *pool, const Holding *holding) noexcept nogil:
    """Whether a copy from or to pages that are held is due, or a transfer, so that no token may be written to them."""
    return rare(pool.copies.num or pool.tier != NULL) and (are_sources(pool, holding) or awaits_copies(pool, holding))


cdef inline void drop_copies(Pool *pool, const Holding *holding) noexcept nogil:
    """Drop the copies into pages that were just given back."""
    cdef Copies *copies = &pool.copies
    cdef Py_ssize_t i, num_kept = 0
    if not are_destinations(pool, holding):
        return
    for i in range(copies.num):
        if is_held_last(&holding.held[copies.items[i].group], copies.items[i].dst):
            put_back_held(pool, copies.items[i].src)
        else:
            copies.items[num_kept] = copies.items[i]
            num_kept += 1
    copies.num = num_kept


cdef inline void end_copies(Pool *pool) noexcept nogil:
    """Give back the references to the sources of copies that were taken, and begin the next list."""
    cdef Py_ssize_t i
    for i in range(pool.copies.num):
        put_back_held(pool, pool.copies.items[i].src)
    pool.copies.num = 0


cdef inline int32_t count_moves(const Pool *pool, int32_t page_id) noexcept nogil:
    """The references to a page of copies that are due, and of loads that did not end."""
    cdef Py_ssize_t i
    cdef int32_t count = 0
    for i in range(pool.copies.num):
        count += pool.copies.items[i].src == page_id
    for i in range(pool.tier.num if pool.tier != NULL and pool.tier.loading[page_id] else 0):
        count += pool.tier.items[i].is_load and pool.tier.items[i].page_id == page_id
    return count


# Pages that got full are hashed, and entered in the prefix index, before a call ends: several at once, so that memory is
# fetched and two pages are hashed side by side.


cdef enum:
    NUM_WAITING = 16          # pages

cdef struct Contents:         # what a request's pages hold
    const Digest *digests
    const int32_t *token_ids
    Py_ssize_t num_token_ids
    int32_t context           # see `Origin`

cdef struct PageToHash:
    Digest parent
    Digest *digest            # where the result goes
    const uint8_t *tokens

cdef struct PageToEnter:
    const Digest *digest
    const int32_t *token_ids
    int32_t num_tokens        # 0: they are not known
    int32_t page_id
    int32_t group
    int32_t place             # in its request
    Held *held
    const Digest *parent      # NULL for the first page; this and the rest only for a journal
    int32_t context

cdef struct Waiting:
    Pool *pool
    Digest key
    Py_ssize_t num_page_bytes  # of the tokens of a hashed page
    PageToHash to_hash[NUM_WAITING]
    Py_ssize_t num_to_hash
    PageToEnter to_enter[NUM_WAITING]
    Py_ssize_t num_to_enter


cdef inline void hash_waiting(Waiting *waiting) noexcept nogil:
    """Hash the pages that wait for it, two at a time; the last of an odd number twice."""
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


cdef inline void enter_waiting(Waiting *waiting) noexcept nogil:
    """Hash and enter the pages that wait for it, in order. A page that has an entry keeps it. The slots of the index, likely
    far away, are all fetched before the first is read.
    """
    cdef Pool *pool = waiting.pool
    cdef const PageToEnter *page
    cdef Py_ssize_t i
    hash_waiting(waiting)
    for i in range(waiting.num_to_enter):
        fetch(home_of(pool, waiting.to_enter[i].digest[0], waiting.to_enter[i].group))
    for i in range(waiting.num_to_enter):
        page = &waiting.to_enter[i]
        if pool.pages[page.page_id].group == NO_GROUP:
            if enter(pool, page.page_id, page.digest[0], page.group) and rare(pool.num_parts != 0):
                rank(pool, &page.held.ranking, page.held.ids, page.place, page.digest[0], page.group)
            if is_journaled(pool):
                note_entry(
                    pool, page.page_id, Origin(page.parent[0] if page.parent else Digest(0, 0), page.place, page.context)
                )
            keep_tokens(pool, page.page_id, page.token_ids, page.num_tokens)
    waiting.num_to_enter = 0


cdef inline bint has_full_page(const Group *group, const Held *held, int64_t num_tokens) noexcept nogil:
    """Whether `num_tokens` tokens fill a page that was not entered yet."""
    if group.id == NO_GROUP or is_state(&group.rules):
        return False
    return (held.num_cached + <int64_t>1) * group.rules.page_size <= num_tokens


cdef inline void enter_full_pages(
    Waiting *waiting, const Group *group, Held *held, const Contents *contents, int64_t num_tokens
) noexcept nogil:
    """Have the pages of a group entered that `num_tokens` tokens fill. Their records, likely far away, are fetched."""
    cdef PageToEnter *page
    cdef int32_t place, size = group.rules.page_size
    if waits_for_loads(waiting.pool, held) or not has_full_page(group, held, num_tokens):
        return
    while (held.num_cached + <int64_t>1) * size <= num_tokens:
        place = held.num_cached
        held.num_cached += 1
        if held.ids[place] == NULL_PAGE:
            continue
        if waiting.num_to_enter == NUM_WAITING:
            enter_waiting(waiting)
        page = &waiting.to_enter[waiting.num_to_enter]
        waiting.num_to_enter += 1
        page.page_id, page.group, page.place, page.held = held.ids[place], group.id, place, held
        page.digest = contents.digests + (place + 1) * group.stride - 1
        page.token_ids = contents.token_ids + <Py_ssize_t>place * size
        page.num_tokens = size if (place + <int64_t>1) * size <= contents.num_token_ids else 0
        fetch(&waiting.pool.pages[page.page_id])
        if is_journaled(waiting.pool):
            page.context = contents.context
            page.parent = contents.digests + place * group.stride - 1 if place else NULL
            fetch(&waiting.pool.journal.notes[page.page_id])
            fetch(waiting.pool.page_tokens + page.page_id * waiting.pool.tokens_width)


# States of models without attention over all tokens, one working page a request, are kept as checkpoints: at multiples of an
# interval the working page enters the prefix index, and a copy of it is the next working page.


cdef struct Source:           # where pages come from
    int32_t shard             # -1: anywhere
    Py_ssize_t num_reserved   # pages to leave free


cdef inline bint is_checkpoint_due(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Whether a state has come to, or past, the next multiple of the interval."""
    return keeps_checkpoints(group) and held.num_pages and full_entries(&group.rules, num_computed) > held.num_cached


cdef inline bint are_checkpoints_due(const Holding *holding, int32_t num_computed) noexcept nogil:
    """Whether any state has. O(groups)."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            return True
    return False


cdef inline bint enter_state(
    Pool *pool, const Group *group, const Held *held, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Enter the working page under the digest of the first `num_computed` tokens; whether it was. Not between multiples of the
    interval, and not where there is such a checkpoint, in the same shard.
    """
    cdef int32_t page_id = held.ids[0], num_tokens = group.rules.entry_size // group.stride
    cdef Py_ssize_t last = <Py_ssize_t>full_entries(&group.rules, num_computed) * group.stride - 1
    cdef Py_ssize_t start = last * num_tokens
    cdef Ranking ranking = Ranking(0, 0)
    cdef Digest key
    if num_computed % group.rules.entry_size or last < 0:
        return False
    key = contents.digests[last]
    if find_within(pool, key, group.id, ids_in_shard(pool, shard_of(pool, page_id) if pool.num_shards else -1)) != NULL_PAGE:
        return False
    if enter(pool, page_id, key, group.id) and pool.num_parts:
        rank(pool, &ranking, &page_id, 0, key, group.id)
    if is_journaled(pool):
        note_entry(
            pool, page_id, Origin(contents.digests[last - 1] if last else Digest(0, 0), <int32_t>last, contents.context)
        )
    keep_tokens(
        pool, page_id, contents.token_ids + start, num_tokens if start + num_tokens <= contents.num_token_ids else 0
    )
    return True


cdef inline bint keep_state(
    Pool *pool, const Holding *holding, int32_t g, const Contents *contents, int32_t num_computed, const Source *source
) noexcept nogil:
    """If the state of a group is due, make its working page a checkpoint and take the next one; True if that was done. Without
    contents, or where no page is free, the checkpoint is passed over, since the step that follows writes the working page.
    There is room for a copy.
    """
    cdef const Group *group = &holding.groups[g]
    cdef Held *held = &holding.held[g]
    cdef int32_t page_id
    cdef bint is_kept = contents != NULL
    if not is_checkpoint_due(group, held, num_computed):
        return False
    page_id = held.ids[0]
    is_kept = is_kept and has_free_pages(pool, 1, source.num_reserved, source.shard) and find_held_free(pool, 1) == NULL_PAGE
    is_kept = is_kept and not waits_for_loads(pool, held) and enter_state(pool, group, held, contents, num_computed)
    if is_kept:
        take_from(pool, held.ids, 1, source.shard)
        note_taken(pool, held)
        note_copy(pool, page_id, held, 0, g)
    held.num_cached = full_entries(&group.rules, num_computed)
    return is_kept


cdef inline void enter_states(
    Pool *pool, const Holding *holding, const Contents *contents, int32_t num_computed
) noexcept nogil:
    """Enter the states of what ends and was just given back, as far as they are due."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        if waits_for_loads(pool, &holding.held[g]):
            continue
        if is_checkpoint_due(&holding.groups[g], &holding.held[g], num_computed):
            enter_state(pool, &holding.groups[g], &holding.held[g], contents, num_computed)


cdef inline void adopt_state(Pool *pool, Held *held, const int32_t *ids, int32_t n) noexcept nogil:
    """Make the checkpoint that is hit, the last of `n` places and a free page, the working page."""
    take_this(pool, ids[n - 1])
    held.ids[0] = ids[n - 1]
    held.num_pages = 1
    held.num_cached = held.num_hits = n


# Pages that tokens need are taken all or nothing, by the same functions for a request and for a row.
#
# A `Demand` says what is asked of a pool. `price` counts what it takes, and refuses hits that are wrong by now; `fit` decides
# whether that many pages are free. Neither changes anything. Then the caller, which has room for the ids, calls `attach`, takes
# the missing pages of each group by `take_missing`, and ends with `copy_states`: none of these can fail.
#
# Always: hits are asked for only where nothing is held; `num_new` counts a working page for each state, whether its checkpoint
# is copied into it or adopted as it; `num_adopted` is 0, or the number of states with hits, all of whose checkpoints are free.


cdef enum Fit:
    FITS
    SHORT                     # too few pages are free beside the reserved ones
    SHORT_IN_SHARD            # only the shard has too few

cdef struct Hits:             # leading pages of a group, null pages first, that a look-up found
    const int32_t *ids
    int32_t num

cdef struct Demand:
    const Hits *hits          # [num_groups]; NULL: none
    int64_t num_tokens        # tokens that are to have slots
    Py_ssize_t num_reserved   # pages to leave free
    int32_t shard             # shard of new pages; -1: any
    int64_t num_new           # pages behind the hits; this and the rest by `price` and `fit`
    Py_ssize_t num_free_hits  # hits in the free queue
    Py_ssize_t num_adopted    # checkpoints that become working pages, for want of pages to copy them into


cdef inline int32_t count_attached(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """Pages that the hits of a group put into its places: none for a state, whose checkpoint is copied."""
    return 0 if demand.hits == NULL or is_state(&holding.groups[g].rules) else demand.hits[g].num


cdef inline int64_t count_needed(const Holding *holding, const Demand *demand, Py_ssize_t g) noexcept nogil:
    """New pages that a group needs behind the hits."""
    return count_missing(
        &holding.groups[g], holding.held[g].num_pages + count_attached(holding, demand, g), demand.num_tokens
    )


cdef inline Py_ssize_t price_hits(
    const Pool *pool, const Holding *holding, const Hits *hits, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Hits in the free queue; negative if one has another content than the digests say, if there are any, or cannot be held."""
    cdef Py_ssize_t g, num_free, num_hits = 0, num_all = 0
    for g in range(holding.num_groups):
        num_hits += hits[g].num
    for g in range(holding.num_groups):
        if hits[g].num * <Py_ssize_t>holding.groups[g].stride > num_digests:
            return STALE
        num_free = count_free_hits(pool, &holding.groups[g], digests, hits[g].ids, hits[g].num, num_hits)
        if num_free < 0:
            return num_free
        num_all += num_free
    return num_all


cdef inline bint price(
    const Pool *pool, const Holding *holding, Demand *demand, const Digest *digests, Py_ssize_t num_digests
) noexcept nogil:
    """Count what a demand takes; False for a hit that is wrong by now. O(hits)."""
    cdef Py_ssize_t g
    demand.num_new = demand.num_free_hits = demand.num_adopted = 0
    for g in range(holding.num_groups):
        demand.num_new += min(count_needed(holding, demand, g), (INT64_MAX >> 1) - demand.num_new)
    if demand.hits != NULL:
        demand.num_free_hits = price_hits(pool, holding, demand.hits, digests, num_digests)
    return demand.num_free_hits >= 0


cdef inline int64_t count_demanded(const Demand *demand) noexcept nogil:
    """Pages of the free queue that a priced demand takes, unless it adopts checkpoints."""
    return demand.num_new + demand.num_free_hits


cdef inline Py_ssize_t count_state_hits(const Holding *holding, const Hits *hits) noexcept nogil:
    """Checkpoints that are hit, each of which needs a copy unless it is adopted."""
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups if hits != NULL else 0):
        count += is_state(&holding.groups[g].rules) and hits[g].num > 0
    return count


cdef inline Py_ssize_t count_adoptable(const Pool *pool, const Holding *holding, const Hits *hits) noexcept nogil:
    """Checkpoints that are hit, if all of them are free pages; else 0."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if hits != NULL else 0):
        if is_state(&holding.groups[g].rules) and hits[g].num and not is_free(pool, hits[g].ids[hits[g].num - 1]):
            return 0
    return count_state_hits(holding, hits)


cdef inline Py_ssize_t count_outside(const Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Hits that are free pages of other shards than the demand's."""
    cdef Range inside = ids_in_shard(pool, demand.shard)
    cdef const Hits *hits
    cdef Py_ssize_t g, i, count = 0
    for g in range(holding.num_groups if demand.shard >= 0 and demand.hits != NULL else 0):
        hits = &demand.hits[g]
        for i in range(hits.num):
            if hits.ids[i] != NULL_PAGE and is_free(pool, hits.ids[i]):
                count += not inside.start <= hits.ids[i] < inside.stop
    return count


cdef inline Fit fit(const Pool *pool, const Holding *holding, Demand *demand) noexcept nogil:
    """Decide whether a priced demand fits; if not otherwise, by adopting its checkpoints."""
    cdef int64_t num_needed = count_demanded(demand)
    cdef int64_t num_inside = num_needed - count_outside(pool, holding, demand)
    demand.num_adopted = 0
    if num_needed + demand.num_reserved > pool.num_free or num_inside > count_free_in(pool, demand.shard):
        demand.num_adopted = count_adoptable(pool, holding, demand.hits)
        if num_inside - demand.num_adopted > count_free_in(pool, demand.shard):
            demand.num_adopted = 0
    if num_needed and num_needed - demand.num_adopted + demand.num_reserved > pool.num_free:
        return SHORT
    return SHORT_IN_SHARD if num_inside - demand.num_adopted > count_free_in(pool, demand.shard) else FITS


cdef inline void attach(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Make the hits of a demand that fits the first pages. Checkpoints become working pages, or get a reference until
    `copy_states` hands it to their copies.
    """
    cdef const Hits *hits
    cdef Py_ssize_t g
    cdef int64_t number = 0
    if count_places(holding) == 0:
        note_request(pool)
    for g in range(holding.num_groups if demand.hits != NULL else 0):
        hits = &demand.hits[g]
        number = max(number, find_load_number(pool, hits.ids, hits.num))
        if not demand.num_adopted or not is_state(&holding.groups[g].rules):
            attach_hits(pool, &holding.groups[g], &holding.held[g], hits.ids, hits.num)
    note_loads(pool, holding, number)
    for g in range(holding.num_groups if demand.num_adopted else 0):
        hits = &demand.hits[g]
        if is_state(&holding.groups[g].rules) and hits.num:
            adopt_state(pool, &holding.held[g], hits.ids, hits.num)
            note_taken(pool, &holding.held[g])


cdef inline void copy_states(Pool *pool, const Holding *holding, const Demand *demand) noexcept nogil:
    """Note copies of the checkpoints that are hit into the working pages, which were taken for them."""
    cdef Py_ssize_t g
    for g in range(holding.num_groups if demand.hits != NULL and not demand.num_adopted else 0):
        if is_state(&holding.groups[g].rules) and demand.hits[g].num:
            note_copy(pool, demand.hits[g].ids[demand.hits[g].num - 1], &holding.held[g], 0, <int32_t>g)


# A request or row goes on twice: full pages are shared, the open page of each group and working pages of states are copied.


cdef enum ForkOutcome:
    FORKED
    SHORT_OF_PAGES
    UNSHAREABLE               # a page cannot have a further reference, or was given back, or a free page has one
    SHORT_OF_MEMORY


cdef inline bint has_open_page(const Group *group, const Held *held, int32_t num_computed) noexcept nogil:
    """Whether further tokens are written to a page that has some."""
    cdef int32_t place = full_pages(&group.rules, num_computed)
    return place < min(<int32_t>pages_for(&group.rules, num_computed), held.num_pages)


cdef inline Py_ssize_t count_open_pages(const Holding *holding, int32_t num_computed) noexcept nogil:
    cdef Py_ssize_t g, count = 0
    for g in range(holding.num_groups):
        count += has_open_page(&holding.groups[g], &holding.held[g], num_computed)
    return count


cdef inline ForkOutcome check_fork(
    Pool *pool, const Holding *source, int32_t num_computed, Py_ssize_t num_targets, int32_t shard
) noexcept:
    """Whether a fork can be made, for which there is room in the list of copies then."""
    cdef Py_ssize_t g, num_new = count_open_pages(source, num_computed) * num_targets
    if num_new > count_free_in(pool, shard):
        return SHORT_OF_PAGES
    if find_held_free(pool, num_new) != NULL_PAGE:
        return UNSHAREABLE
    for g in range(source.num_groups):
        if find_untouchable(pool, source.held[g].ids, source.held[g].num_pages, num_targets) >= 0:
            return UNSHAREABLE
        if find_unheld(pool, source.held[g].ids, 0, source.held[g].num_pages) >= 0:
            return UNSHAREABLE
    return FORKED if reserve_copies(pool, num_new) else SHORT_OF_MEMORY


cdef inline void note_forked(Pool *pool, int32_t page_id, int32_t copy_id) noexcept nogil:
    """Note that a page, which may be being loaded, is copied: the copy is as wrong as it if that fails."""
    if pool.tier != NULL and pool.tier.loading[page_id]:
        pool.tier.loading[copy_id] = pool.tier.loading[page_id]
        pool.tier.last_forked = max(pool.tier.last_forked, pool.tier.loading[page_id])


cdef inline void fork_group(
    Pool *pool, const Holding *forked, const Holding *new, int32_t g, int32_t num_computed, int32_t shard
) noexcept nogil:
    """Let what holds nothing in a group, and has room for the pages, go on from the computed tokens of what is forked."""
    cdef const Group *group = &forked.groups[g]
    cdef Held *source = &forked.held[g]
    cdef Held *target = &new.held[g]
    cdef int32_t *ids = target.ids
    cdef int32_t i, n = full_pages(&group.rules, num_computed)
    for i in range(n):
        if source.ids[i] != NULL_PAGE:
            share(pool, source.ids[i])
    if n:
        memcpy(ids, source.ids, n * sizeof(int32_t))
    target[0] = source[0]
    target.ids, target.num_pages, target.num_skipped = ids, n, min(source.num_skipped, n)
    if not is_state(&group.rules):
        target.num_cached = min(source.num_cached, n)
        target.ranking.num_ranked = min(source.ranking.num_ranked, n)
    target.num_hits = target.num_cached
    target.num_unique = min(source.num_unique, n)
    target.read_list = 0
    if has_open_page(group, source, num_computed):
        share(pool, source.ids[n])
        take_from(pool, ids + n, 1, shard)
        note_taken(pool, target)
        target.num_pages += 1
        note_copy(pool, source.ids[n], target, n, g)
        source.read_list = target.written_list
        note_forked(pool, source.ids[n], ids[n])
