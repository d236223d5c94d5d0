# The five verbs that change a page. Each verb is here as a whole, with a list of what follows for each feature.
#
# * take: pages leave the queue for their holder. Those with an entry are evicted: saved in the tier, if there is one, and
#   uncached.
# * hit: pages get a reference, and a free one leaves the queue. A hit ends the term, and counts for the policy, the residency,
#   the session and the tenant. `share` adds a reference without a hit: for a fork, a copy, a transfer.
# * give back: a reference goes; with the last one the page enters the queue. `skip` gives back a page that a window has left.
# * cache: a page gets an entry. The tier, the parts of the queue, the policy, the journal, the tokens and the session follow.
# * uncache: a page loses its entry.
#
# The caller holds the store's lock. A function that can fail checks its whole list first, or undoes what it did.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t

from pagepool.core.base cimport GUARDS, copy_bytes, fetch, reserve_items
from pagepool.core.pool.lineage cimport *
from pagepool.core.pool.ranking cimport *
from pagepool.core.pool.removal cimport *


cdef inline void _claim(Pool *pool, int32_t page_id) noexcept nogil:
    """Give its first reference to a page just taken out of the queue; evict it if it is cached."""
    if pool.pages[page_id].group != NO_GROUP:
        evict(pool, page_id, True)
    elif rare(not page_id & pool.sample_mask):
        begin_stay(pool.residency, page_id)
    pool.pages[page_id].ref_cnt = 1
    pool.counters.num_allocated_pages += 1


cdef inline void evict(Pool *pool, int32_t page_id, bint saves) noexcept nogil:
    """Uncache a page. With `saves` its content is saved in the tier before, if there is one."""
    if rare(not page_id & pool.sample_mask):
        renew_stay(pool.residency, page_id)
    if saves and rare(pool.tier != NULL) and not (pool.num_banks > 1 and class_of(pool, page_id) == LEFT):
        pool.tier.save_evicted(pool, page_id)
    if rare(pool.num_banks > 1):
        _note_evicted(pool, page_id)
    uncache_for(pool, page_id, BY_EVICTION)
    pool.counters.num_evicted_pages += 1


cdef inline void _note_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Count an evicted page in its bank. If the bank keeps a ghost, and no other page has the page's key, remember the key."""
    cdef Bank *bank = &pool.banks[bank_of(pool, page_id)]
    cdef const Page *page = &pool.pages[page_id]
    cdef uint32_t mark = EVICTED
    bank.num_evicted_pages += 1
    if bank.checkpoints != NULL:
        bank.checkpoints.num_evicted += 1
        mark |= ghost_mark(bank.checkpoints, note_of(bank.checkpoints, page_id))
    if bank.ghost.entries != NULL and not page.group & TWIN:
        remember(&bank.ghost, hash_key(digest_of(page), page.group & ~FLAGS), mark)


cdef inline void fetch_entry(Pool *pool, int32_t page_id) noexcept nogil:
    """Prefetch the index slots that an eviction of the page will touch, in the tier too."""
    cdef Page *page = &pool.pages[page_id]
    if page.group != NO_GROUP:
        fetch(home_of(pool, digest_of(page), page.group & ~FLAGS))
        if rare(pool.tier != NULL and pool.tier.pool != NULL):
            fetch(home_of(pool.tier.pool, digest_of(page), page.group & ~FLAGS))


cdef inline Py_ssize_t _pull_behind(Pool *pool, int32_t record, int32_t *out, Py_ssize_t n) noexcept nogil:
    """Pull up to `n` pages that follow a record in a queue, all at once, in a pool without shards. Return their number."""
    cdef Page *pages = pool.pages
    cdef int32_t following, page_id = pages[record].next_free
    cdef Py_ssize_t count = 0
    while count < n and is_page(pool, page_id):
        fetch_entry(pool, page_id)
        out[count] = page_id
        count += 1
        following = pages[page_id].next_free
        pages[page_id].prev_free = pages[page_id].next_free = NOT_FREE
        page_id = following
    pages[record].next_free = page_id
    pages[page_id].prev_free = record
    pool.num_free -= <int32_t>count
    fetch(&pages[pages[page_id].next_free])  # prefetch: the next pull writes this record
    return count


cdef inline void take(Pool *pool, int32_t *out, Py_ssize_t n, int32_t shard, int32_t session) noexcept nogil:
    """Take the next `n` victims of a queue, with its number in `shard`: without parts, the pages at its front. The caller makes
    sure that there are enough and that none is held (`find_held_free`). They are charged to the tenant of `session`. O(n),
    independent of the pool's size.
    """
    cdef Py_ssize_t i
    if exceptional(pool.is_divided):
        _take_picked(pool, out, n, shard, session)
        return
    _pull_behind(pool, NULL_PAGE, out, n)
    for i in range(n):
        _claim(pool, out[i])


cdef inline Py_ssize_t _pull_unpicked(Pool *pool, int32_t *out, Py_ssize_t n, int32_t queue) noexcept nogil:
    """Pull up to `n` pages that need no choice: blank pages and then, with neither policy nor terms, cached ones. In a pool
    with shards, pull none. Return their number.
    """
    cdef Py_ssize_t count
    if pool.num_shards:
        return 0
    count = _pull_behind(pool, start_of_part(pool, BLANK, queue) if pool.num_parts else end_of_queue(pool, queue), out, n)
    if has_policy(pool, queue):
        pool.policy.num_in_part[BLANK] -= count
    elif pool.expected.terms == NULL and pool.num_parts and not has_checkpoints(pool, queue):
        count += _pull_behind(pool, start_of_part(pool, NEW, queue), out + count, n - count)
    count_in_bank(pool, queue, <int32_t>-count)
    return count


cdef inline void count_request(Pool *pool) noexcept nogil:
    """Tell the policy, if there is one, that a request begins to take pages."""
    if rare(pool.policy != NULL):
        pool.policy.num_requests += 1


cdef inline void _remember_evicted(Pool *pool, int32_t page_id) noexcept nogil:
    """Let the ghost remember the key of an evicted page, if it is sampled, no other page has it, and the mark is not blank."""
    cdef const Page *page = &pool.pages[page_id]
    cdef uint64_t word = hash_key(digest_of(page), page.group & ~FLAGS)
    if is_sampled(word) and pool.policy.marks[page_id] != BLANK and not page.group & TWIN:
        remember(&pool.policy.ghost, word, pool.policy.marks[page_id])


cdef inline void _claim_picked(Pool *pool, int32_t page_id) noexcept nogil:
    """`_claim` a page, and tell the policy, if it serves the page."""
    cdef bint is_ranked = is_served(pool, page_id)
    if is_ranked and pool.pages[page_id].group != NO_GROUP:
        _remember_evicted(pool, page_id)
        if rare(pool.dependents.num):
            _uncache_dependents(pool, page_id)
    _claim(pool, page_id)
    if is_ranked:
        pool.policy.marks[page_id] = NEW


cdef inline void _uncache_dependents(Pool *pool, int32_t page_id) noexcept nogil:
    """Uncache the free checkpoints with the key of an evicted page of keys and values, if no other such page has the key. They
    cannot hit without the page, unless a tier has it; so with a tier they stay.
    """
    cdef const Page *page = &pool.pages[page_id]
    cdef Digest key = digest_of(page)
    cdef Ghost *ghost
    cdef int32_t i, state
    if page.group & ~FLAGS != pool.dependents.group or page.group & TWIN or pool.tier != NULL:
        return
    for i in range(pool.dependents.num):
        state = find(pool, key, pool.dependents.state_groups[i])
        while state != NULL_PAGE and is_free(pool, state):
            ghost = &pool.banks[bank_of(pool, state)].ghost
            if ghost.entries != NULL:
                remember(ghost, hash_key(key, pool.dependents.state_groups[i]), DROPPED)
            uncache_for(pool, state, BY_EVICTION)
            state = find(pool, key, pool.dependents.state_groups[i])


cdef inline void _take_picked(Pool *pool, int32_t *out, Py_ssize_t n, int32_t shard, int32_t session) noexcept nogil:
    """Take `n` pages in the order in which they are picked."""
    cdef Supply supply = begin_supply(pool, tenant_of(&pool.sessions, session))
    cdef int32_t bank = bank_of_queue(pool, shard)
    cdef Py_ssize_t i, num_unpicked = _pull_unpicked(pool, out, n, shard)
    for i in range(num_unpicked if pool.tenants.of_pages != NULL else 0):
        begin_charge(&pool.tenants, bank, out[i])
        charge(&pool.tenants, bank, out[i], supply.taker)
    for i in range(num_unpicked, n):
        supply.num_left = <int32_t>(n - i)
        out[i] = pick(pool, shard, &supply)
        pull(pool, out[i])
        if rare(pool.tenants.of_pages != NULL):
            charge(&pool.tenants, bank, out[i], supply.taker)
        fetch_entry(pool, out[i])
    for i in range(n):
        _claim_picked(pool, out[i])
    if rare(pool.num_banks > 1):
        pool.banks[bank].num_allocated_pages += n


cdef inline void take_this(Pool *pool, int32_t page_id, int32_t session) noexcept nogil:
    """Take a free page, wherever it is in the queue, as if it were at the front."""
    pull(pool, page_id)
    if rare(pool.tenants.of_pages != NULL):
        charge(&pool.tenants, bank_of(pool, page_id), page_id, tenant_of(&pool.sessions, session))
    _claim_picked(pool, page_id)
    if rare(pool.num_banks > 1):
        pool.banks[bank_of(pool, page_id)].num_allocated_pages += 1


cdef inline Py_ssize_t find_unheld(const Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Return the index of a page in ``ids[start:stop]`` that has no reference or is free; -1: none. Null pages are ignored."""
    cdef Py_ssize_t i
    for i in range(start, stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].ref_cnt <= 0 or (pool.num_held_free and is_free(pool, ids[i])):
            return i
    return -1


cdef inline void share(Pool *pool, int32_t page_id) noexcept nogil:
    """Add a reference to a page outside the queue, without a hit."""
    if pool.pages[page_id].group >= WATCHED:
        unwatch(pool, page_id)
        if exceptional(pool.claim_twin != NULL):
            pool.claim_twin(pool, page_id)
    pool.pages[page_id].ref_cnt += 1


cdef inline void claim_twin(Pool *pool, int32_t page_id) noexcept nogil:
    """Let look-ups prefer a cached page that is about to get its first reference to free pages with the same content."""
    if pool.pages[page_id].group >= TWIN and pool.pages[page_id].ref_cnt == 0:
        come_forward(pool, page_id)


cdef inline void release_twins(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil:
    """Let look-ups prefer held pages to pages in `ids`, just given back, that lost their last reference."""
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(n):
        page_id = ids[n - 1 - i if tail_first else i]
        if page_id != NULL_PAGE and pool.pages[page_id].group >= TWIN and pool.pages[page_id].ref_cnt == 0:
            unwatch(pool, page_id)
            go_back(pool, page_id)


cdef inline void prefer_held(Pool *pool) noexcept nogil:
    """Let look-ups prefer held pages from now on. O(num_pages) if any page is held."""
    cdef int32_t page_id
    if pool.release_twins != NULL:
        return
    pool.join_held_twin, pool.claim_twin, pool.release_twins = link_before_free, claim_twin, release_twins
    for page_id in range(1, pool.num_pages if pool.num_free < pool.num_pages - 1 else 1):
        if pool.pages[page_id].group >= TWIN and is_free(pool, page_id):
            go_back(pool, page_id)


cdef inline bint _end_reference(Pool *pool, int32_t page_id) noexcept nogil:
    """Drop a reference to a page that has one. Return whether it was the last: then the caller queues the page."""
    pool.pages[page_id].ref_cnt -= 1
    if pool.pages[page_id].ref_cnt:
        return False
    pool.counters.num_freed_pages += 1
    return True


cdef inline void _restore_reference(Pool *pool, int32_t page_id) noexcept nogil:
    """Undo `_end_reference`. The page is outside the queue."""
    pool.counters.num_freed_pages -= pool.pages[page_id].ref_cnt == 0
    pool.pages[page_id].ref_cnt += 1


cdef inline bint _has_reference(const Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page has a reference to give back: another caller may have given back too many."""
    return page_id != NULL_PAGE and pool.pages[page_id].ref_cnt > 0 and not is_free(pool, page_id)


cdef inline void give_back(Pool *pool, int32_t page_id) noexcept nogil:
    """Drop a reference to a page, if it has one. Without any left the page goes to the back of the queue; a policy counts it as
    a call of its own, while all pages of a `give_back_all`, or that a window leaves (`skip`), are one call.
    """
    if _has_reference(pool, page_id) and _end_reference(pool, page_id):
        enqueue(pool, page_id)
        if exceptional(pool.release_twins != NULL):
            pool.release_twins(pool, &page_id, 1, False)


cdef inline Py_ssize_t give_back_all(
    Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first, const int32_t *terms=NULL
) noexcept nogil:
    """Drop a reference to each page; null pages are ignored. Pages without any left go to the back of the queue, with the
    `terms` at the same indices, unless these are UNKNOWN. Return -1 or, with nothing changed, the index of a page that has no
    reference to give back.
    """
    cdef Py_ssize_t at = -1
    if GUARDS and pool.num_held_free:
        at = find_unheld(pool, ids, 0, n)
        if at >= 0:
            return at
    if rare(pool.policy != NULL or pool.expected.terms != NULL):
        at = _give_back_to_parts(pool, ids, n, tail_first, terms)
    else:
        at = _give_back_each(pool, ids, n, tail_first)
    if exceptional(pool.release_twins != NULL) and at < 0:
        pool.release_twins(pool, ids, n, tail_first)
    return at


cdef inline Py_ssize_t _give_back_each(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil:
    """Do `give_back_all` with neither policy nor terms."""
    cdef Py_ssize_t i, at
    for i in range(n):
        at = n - 1 - i if tail_first else i
        if ids[at] == NULL_PAGE:
            continue
        if GUARDS and rare(pool.pages[ids[at]].ref_cnt <= 0):
            _undo_give_back(pool, ids, n, i, tail_first)
            return at
        if _end_reference(pool, ids[at]):
            push(pool, ids[at])
    return -1


cdef inline Py_ssize_t _give_back_to_parts(
    Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first, const int32_t *terms
) noexcept nogil:
    """Do `give_back_all` with a policy or terms. The policy counts the released pages before the first one is queued."""
    cdef Py_ssize_t i, at, num_released = 0, num_counted = 0
    cdef int64_t now = 0
    cdef Page *page
    for i in range(n):
        at = n - 1 - i if tail_first else i
        if ids[at] == NULL_PAGE:
            continue
        page = &pool.pages[ids[at]]
        if GUARDS and page.ref_cnt <= 0:
            _undo_give_back(pool, ids, n, i, tail_first)
            return at
        if _end_reference(pool, ids[at]):
            page.next_free = <int32_t>i  # the index where it loses its last reference, until it is pushed
            num_released += 1
            num_counted += is_counted(pool, ids[at])
    if num_counted:
        count_release(pool.policy, num_counted, count_free_in(pool, -1))
    if pool.expected.terms != NULL and num_released:
        now = now_of(&pool.expected)
    for i in range(n if num_released else 0):
        at = n - 1 - i if tail_first else i
        page = &pool.pages[ids[at]]
        if ids[at] != NULL_PAGE and page.ref_cnt == 0 and page.next_free == i and not is_free(pool, ids[at]):
            if terms != NULL and terms[at] != UNKNOWN and may_have_term(pool, ids[at], terms[at]):
                pool.expected.terms[ids[at]] = <uint8_t>terms[at]
            push_at(pool, ids[at], now)
    return -1


cdef inline Py_ssize_t give_back_and_uncache(
    Pool *pool, const int32_t *ids, Py_ssize_t num_staying, Py_ssize_t n, const int32_t *terms
) noexcept nogil:
    """Do `give_back_all`, but pages from index `num_staying` on lose their entry, too, with their last reference."""
    cdef Py_ssize_t i, num_left = num_staying, bad = -1
    while num_left < n and pool.pages[ids[num_left]].ref_cnt and not is_free(pool, ids[num_left]):
        _end_reference(pool, ids[num_left])
        num_left += 1
    bad = give_back_all(pool, ids, num_staying, False, terms) if num_left == n else num_left
    for i in range(num_staying, num_left):
        if bad >= 0:
            _restore_reference(pool, ids[i])
        elif pool.pages[ids[i]].ref_cnt == 0 and not is_free(pool, ids[i]):
            _enqueue_blank(pool, ids[i])
    return bad


cdef inline void _enqueue_blank(Pool *pool, int32_t page_id) noexcept nogil:
    """Uncache a page that lost its last reference, if it is cached, and put it at the front of the queue."""
    if pool.pages[page_id].group != NO_GROUP:
        uncache_for(pool, page_id, BY_LEAVING)
    push_first(pool, page_id)


cdef inline void _undo_give_back(
    Pool *pool, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_done, bint tail_first
) noexcept nogil:
    """Undo the first `num_done` steps of `give_back_all`, last first, so that the queue is as it was."""
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(num_done - 1, -1, -1):
        page_id = ids[n - 1 - i if tail_first else i]
        if page_id == NULL_PAGE:
            continue
        if is_free(pool, page_id):
            pull(pool, page_id)
        pool.pages[page_id].next_free = NOT_FREE  # `_give_back_to_parts` may have put an index there
        _restore_reference(pool, page_id)


cdef inline bint skip(Pool *pool, int32_t page_id, bint stays, bint may_hit) noexcept nogil:
    """Give back a page that a window has left. Unless it `stays`, it is uncached with its last reference; unless it `may_hit`,
    a policy evicts it as a blank page. Return whether the policy has to count the page: the caller counts the pages that a
    window leaves in one call together, once they are in the queue.
    """
    if not _has_reference(pool, page_id) or not _end_reference(pool, page_id):
        return False
    if not stays:
        _enqueue_blank(pool, page_id)
        return False
    if not may_hit:
        pool.policy.marks[page_id] = BLANK
    push(pool, page_id)
    if exceptional(pool.release_twins != NULL):
        pool.release_twins(pool, &page_id, 1, False)
    return is_counted(pool, page_id)


cdef inline Py_ssize_t find_untouchable(Pool *pool, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all) noexcept nogil:
    """Return the index of a page to which `hit` cannot give a reference, or -1. The call gives `num_all` references in all."""
    cdef Py_ssize_t i
    for i in range(n if GUARDS else 0):
        if ids[i] != NULL_PAGE:
            if pool.pages[ids[i]].ref_cnt == 0 and not is_free(pool, ids[i]):
                return i
            if pool.pages[ids[i]].ref_cnt >= INT32_MAX - num_all:  # each id may be the same page
                return i
    return -1


cdef inline void reuse(Pool *pool, int32_t page_id) noexcept nogil:
    """Pull a free page as it is, even if a caller gave it a reference, and count that it left without eviction."""
    pool.num_held_free -= pool.pages[page_id].ref_cnt != 0
    pull(pool, page_id)
    pool.num_reused += 1


cdef inline void hit(
    Pool *pool, const int32_t *ids, Py_ssize_t n, int32_t session, bint ends_terms=True
) noexcept nogil:
    """Give a reference to each page that a row or request of a session hits. Null pages are ignored, and free pages leave the
    queue. Terms of the pages end if `ends_terms`: a lease uses no content, so it lets them run on. With NOBODY in place of a
    session the pages keep their owners.
    """
    cdef Py_ssize_t i
    if rare(pool.num_parts != 0):
        _hit_in_parts(pool, ids, n, ends_terms)
    else:
        for i in range(n):
            if ids[i] != NULL_PAGE:
                if pool.pages[ids[i]].ref_cnt == 0:
                    reuse(pool, ids[i])
                _on_hit(pool, ids[i])
    if session != NOBODY:
        use_in_session(pool, ids, <int32_t>n, session)


cdef inline void use_in_session(Pool *pool, const int32_t *ids, int32_t n, int32_t session) noexcept nogil:
    """Record that a row or request with this session number uses pages outside the queue. Pages of other sessions, and cached
    pages without an owner, become shared; pages of other tenants become common.
    """
    cdef int32_t i
    cdef uint8_t tenant = tenant_of(&pool.sessions, session)
    for i in range(n if rare(pool.tenants.of_pages != NULL) else 0):
        if ids[i] != NULL_PAGE and pool.tenants.of_pages[ids[i]] != tenant:
            charge(&pool.tenants, bank_of(pool, ids[i]), ids[i], COMMON)
    session = session_of(&pool.sessions, session)
    for i in range(n if rare(pool.sessions.owners != NULL) else 0):
        if pool.pages[ids[i]].group != NO_GROUP:
            use_owned(&pool.sessions, ids[i], session)


cdef inline void _hit_in_parts(Pool *pool, const int32_t *ids, Py_ssize_t n, bint ends_terms) noexcept nogil:
    """Do `hit` in a pool with parts, except for `use_in_session`."""
    cdef Py_ssize_t i
    cdef bint was_free
    for i in range(n):
        if ids[i] != NULL_PAGE:
            was_free = is_free(pool, ids[i])
            if was_free:
                reuse(pool, ids[i])
            if is_served(pool, ids[i]):
                pool.policy.num_free_hits += was_free
                pool.policy.num_shared_hits += not was_free
                record_hit(pool.policy, ids[i], was_free)
            if ends_terms:
                assert not is_free(pool, ids[i])
                use_term(&pool.expected, ids[i])
            _on_hit(pool, ids[i])


cdef inline void _on_hit(Pool *pool, int32_t page_id) noexcept nogil:
    """Add a hit's reference to a page outside the queue. The residency counts the hit."""
    share(pool, page_id)
    if rare(not page_id & pool.sample_mask):
        record_use(pool.residency, page_id)


# Cache. A page gets an entry, and `cache` lists what follows. A policy ranks only pages that a request missed: pages that were
# cached by hand have no ranking, and no session.

cdef struct Entry:            # key and origin of a page that is being cached
    const Digest *key
    int32_t group
    int32_t place             # index of the page in its request or row; only a journal needs this and the next two
    int32_t context           # see `Origin`
    const Digest *parent      # key of the page before it; NULL: there is none
    const Digest *upper       # upper half of the digest; NULL: 0, or the key is the whole digest
    const Digest *parent_upper
    const int32_t *token_ids  # [num_tokens]
    int32_t num_tokens        # 0: the tokens are not known
    int32_t session           # session number of the row or request that cached the page, or NO_SESSION
    const NewCheckpoint *checkpoint  # NULL: the page has tokens, or nothing is known of its checkpoint


cdef inline bint cache(
    Pool *pool, int32_t page_id, const Entry *entry, Ranking *ranking, const int32_t *ids, int32_t place
) noexcept nogil:
    """Cache a page that has no entry yet. If there is a ranking, let the policy rank the page: it is at index `place` of the
    request's pages `ids`. Return whether no other page has the key.
    """
    cdef bint is_new = add_entry(pool, page_id, entry.key[0], entry.group)
    pool.counters.num_cached_pages += 1
    if exceptional(_has_listeners(pool) | (entry.session != NO_SESSION)):
        _on_cache(pool, page_id, entry, ranking if is_new else NULL, ids, place)
    return is_new


cdef inline bint _has_listeners(const Pool *pool) noexcept nogil:
    """Whether banks, a tier, the queue's parts, arrays for each page or waiting queues have to hear of each cached page."""
    cdef bint has_arrays = (pool.journal.notes != NULL) | (pool.page_tokens != NULL) | (pool.uppers != NULL)
    return (pool.num_banks > 1) | (pool.tier != NULL) | (pool.num_parts != 0) | has_arrays | (pool.awaited != NULL)


cdef inline void _on_cache(
    Pool *pool, int32_t page_id, const Entry *entry, Ranking *ranking, const int32_t *ids, int32_t place
) noexcept nogil:
    """Tell the features of the pool that a page was just cached."""
    cdef Checkpoints *checkpoints = checkpoints_of(pool, page_id)
    if pool.awaited != NULL:
        pool.awaited.note(pool.awaited, entry.key[0], entry.group)
    if pool.num_banks > 1:
        pool.banks[bank_of(pool, page_id)].num_entries += 1
    if checkpoints != NULL:
        begin_note(checkpoints, page_id, entry.checkpoint)
    elif pool.children != NULL:
        note_child(pool, page_id, ids[place - 1] if place else <int32_t>NULL_PAGE, entry.key[0])
    if pool.tier != NULL:
        pool.tier.record_cached(pool, page_id, entry.checkpoint != NULL and entry.checkpoint.kind == AT_ANSWER_END)
    if pool.num_parts:
        _make_new(pool, page_id)
    if ranking != NULL and is_served(pool, page_id):
        rank(pool, ranking, ids, place, entry.key[0], entry.group)
    _keep_origin(pool, page_id, entry)


cdef inline Digest _digest_or_none(const Digest *digest) noexcept nogil:
    return digest[0] if digest != NULL else Digest(lo=0, hi=0)


cdef inline void _keep_origin(Pool *pool, int32_t page_id, const Entry *entry) noexcept nogil:
    """Record the whole digest, parent, tokens and session of a page just cached, each if the pool keeps it."""
    if pool.uppers != NULL:
        pool.uppers[page_id] = _digest_or_none(entry.upper)
    if is_journaled(pool):
        if pool.uppers != NULL:
            uppers_of_parents(pool)[page_id] = _digest_or_none(entry.parent_upper)
        record_entry(pool, page_id, Origin(parent=_digest_or_none(entry.parent), place=entry.place, context=entry.context))
    if pool.page_tokens != NULL:
        _keep_tokens(pool, page_id, entry.token_ids, entry.num_tokens)
    join_session(&pool.sessions, page_id, entry.session)


cdef inline Entry bare_entry(const Digest *key, int32_t group) noexcept nogil:
    """Return an entry that has only a key."""
    return Entry(
        key=key, group=group, place=0, context=0, parent=NULL, upper=NULL, parent_upper=NULL, token_ids=NULL, num_tokens=0,
        session=NO_SESSION, checkpoint=NULL,
    )


cdef inline void cache_alone(Pool *pool, int32_t page_id, const Entry *entry) noexcept nogil:
    """`cache` a page that the policy ranks by its key alone."""
    cdef Ranking ranking = Ranking(num_ranked=0, num_unseen=0)
    cache(pool, page_id, entry, &ranking, &page_id, 0)


cdef inline void _make_new(Pool *pool, int32_t page_id) noexcept nogil:
    """Move a newly cached page from the blank part to the new part; a page outside the queue only changes its mark."""
    cdef bint was_free = is_free(pool, page_id)
    if was_free:
        pull(pool, page_id)
    if is_served(pool, page_id) and pool.policy.marks[page_id] == BLANK:
        pool.policy.marks[page_id] = NEW
    if was_free:
        push(pool, page_id)


cdef inline void _keep_tokens(Pool *pool, int32_t page_id, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Keep the tokens of a page in a pool that keeps tokens; keep none if there is no room for `n`."""
    cdef int32_t *kept
    if n >= pool.tokens_width:
        n = 0
    kept = pool.page_tokens + page_id * pool.tokens_width
    kept[0] = <int32_t>n
    copy_bytes(kept + 1, tokens, n * sizeof(int32_t))


# Uncache: see `removal.pxd`. Call `uncache_everywhere` if the content was wrong, so that the tier must not have it either.


cdef inline void uncache_all(Pool *pool) noexcept nogil:
    """Remove all entries. O(num_pages)."""
    cdef int32_t page_id
    cdef Py_ssize_t bank
    for page_id in range(1, pool.num_pages):
        if pool.pages[page_id].group != NO_GROUP:
            uncache_for(pool, page_id, BY_RESET)
    depart_all(pool)
    assert pool.num_entries == 0 and pool.num_keys == 0
    for bank in range(pool.num_banks):
        clear_ghost(&pool.banks[bank].ghost)
    if is_journaled(pool):
        record_clear(&pool.journal)


cdef inline void uncache_in_tier(Tier *tier, Digest key, int32_t group) noexcept nogil:
    """Drop the entry for wrong content from the tier, if there is one. Pages in transfer with this key get no entry."""
    cdef int32_t tier_id
    cdef Py_ssize_t i
    if tier == NULL:
        return
    for i in range(tier.num):
        if tier.items[i].group == group and tier.items[i].key.lo == key.lo and tier.items[i].key.hi == key.hi:
            tier.items[i].is_void = True
    if tier.pool == NULL:
        _drop_in_storage(tier, key, group)
        return
    tier_id = find(tier.pool, key, group)
    if tier_id != NULL_PAGE:
        uncache(tier.pool, tier_id)
    uncache_in_tier(tier.pool.tier, key, group)


cdef inline void _drop_in_storage(Tier *storage, Digest key, int32_t group) noexcept nogil:
    """Note that storage has wrong content under a key; if memory is short, that all its content is wrong."""
    if not reserve_items(<void **>&storage.items, &storage.capacity, storage.num + 1, sizeof(Transfer)):
        storage.num_clears += 1
        return
    storage.items[storage.num] = Transfer(
        key=key, number=0, page_id=NULL_PAGE, tier_id=NULL_PAGE, group=group, is_load=False, is_void=True,
    )
    storage.num += 1
    storage.num_due += 1


cdef inline void uncache_everywhere(Pool *pool, int32_t page_id) noexcept nogil:
    """Drop the entry of a page with wrong content, and the entry for its key in the tier."""
    cdef Digest key = digest_of(&pool.pages[page_id])
    cdef int32_t group = pool.pages[page_id].group & ~FLAGS
    uncache(pool, page_id)
    uncache_in_tier(pool.tier, key, group)


cdef inline void uncache_tier(Tier *tier) noexcept nogil:
    """Drop all entries of the tier; pages in transfer get none. In storage, only notes of wrong content stay due."""
    cdef Py_ssize_t i, num_kept = 0
    cdef Tier *storage = tier.pool.tier
    for i in range(tier.num):
        tier.items[i].is_void = True
    uncache_all(tier.pool)
    tier.num_clears += 1
    if storage != NULL:
        for i in range(storage.num):
            if storage.items[i].is_void:
                storage.items[num_kept] = storage.items[i]
                num_kept += 1
        storage.num = storage.num_due = num_kept
        storage.num_clears += 1
