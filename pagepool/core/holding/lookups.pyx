"""Look-ups of prefixes, and refused requests."""

cimport cython
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport INT64_MAX, uint32_t
from libc.string cimport memcmp, memset

from pagepool.core.base cimport fetch, go_on, let_others_run
from pagepool.core.pool cimport (
    DROPPED, EVICTED, WATCHED, count_changes, count_free, count_given_back, end_leases, find, find_within, has_key, has_left,
    ends_run, home_of, ids_in_shard, parts_at,
)
from pagepool.core.values cimport HashedTokens, require_instance

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError

cdef enum:
    LOOK_AHEAD = 8            # hashes between a prefetch and its use


cdef inline bint hits_in(Pool *pool, const Query *query, const Group *group, Digest key) noexcept nogil:
    """Whether a group has a page under a key."""
    if find_within(pool, key, group.id, query.ids.of_banks[group.bank]) != NULL_PAGE:
        return True
    assert 0 <= group.bank < pool.num_banks and (pool.tier != NULL or not query.reaches_tier)
    if query.reaches_tier and find(pool.tier.pool, key, group.id) != NULL_PAGE:
        return True
    return query.num_stored and is_stored(query, key, group.id)


cdef bint is_stored(const Query *query, Digest key, int32_t group) noexcept nogil:
    """Whether a key of a group is among the stored keys. O(log keys)."""
    cdef const StoredKey *stored = query.stored
    cdef Py_ssize_t middle, start = 0, stop = query.num_stored
    while start < stop:
        middle = (start + stop) // 2
        if stored[middle].key.lo < key.lo:
            start = middle + 1
        else:
            stop = middle
    assert 0 <= start == stop <= query.num_stored
    while start < query.num_stored and stored[start].key.lo == key.lo:
        if stored[start].key.hi == key.hi and stored[start].group == group:
            return True
        start += 1
    return False


cdef bint hits_all(Pool *pool, const Query *query, const Group *kind, Py_ssize_t page) noexcept nogil:
    """Whether a page hits in all groups of a kind."""
    cdef Digest key = query.digests[last_hash(kind, page)]
    assert last_hash(kind, page) < query.num_digests
    while kind != NULL:
        if not hits_in(pool, query, kind, key):
            return False
        kind = kind.next_alike
    return True


cdef Py_ssize_t find_first_miss(
    Pool *pool, const Query *query, const Group *kind, Py_ssize_t start, Py_ssize_t stop
) noexcept nogil:
    """Return the first page from `start` on that misses in a group of a kind; `stop`: none before it does. Prefetch the slots
    of later look-ups, then the records that the slots name.
    """
    cdef Py_ssize_t at, page = start
    assert 0 <= start and stop * kind.stride <= query.num_digests
    while page < stop:
        at = last_hash(kind, page)
        if at + 2 * LOOK_AHEAD < stop * kind.stride:
            fetch(home_of(pool, query.digests[at + 2 * LOOK_AHEAD], kind.id))
            fetch(&pool.pages[home_of(pool, query.digests[at + LOOK_AHEAD], kind.id).page_id])
        if not hits_all(pool, query, kind, page):
            break
        page += 1
    return page


cdef Py_ssize_t find_run_end(
    Pool *pool, const Query *query, const Group *kind, Py_ssize_t stop, Py_ssize_t need
) noexcept nogil:
    """Return the end of the last `need` consecutive pages before `stop` that hit in all groups of a kind; without such a run,
    the end of the leading pages that hit. The first page of a run is looked up first, so misses cost O(stop / need).
    """
    cdef Py_ssize_t page
    assert 0 < need and stop <= query.num_digests // kind.stride
    while stop >= need:
        page = stop - need
        if not hits_all(pool, query, kind, page):
            stop = page
            continue
        page = stop - 1
        while page > stop - need and hits_all(pool, query, kind, page):
            page -= 1
        if page <= stop - need:
            return stop
        stop = page
    return find_first_miss(pool, query, kind, 0, stop)


cdef Py_ssize_t count_hit_places(const Group *group, Py_ssize_t num_hashes) noexcept nogil:
    """Count the pages or checkpoints of a group up to the end of a hit; a ring has none."""
    return 0 if is_ring(&group.rules) else num_hashes // group.stride


cdef Py_ssize_t find_first_hit_page(const Query *query, const Group *group, Py_ssize_t num_hashes) noexcept nogil:
    """Return the first page that a request needs from a hit of `num_hashes` hashes."""
    cdef Py_ssize_t stop = count_hit_places(group, num_hashes)
    if is_state(&group.rules):
        return max(0, stop - 1)
    return min(stop, first_hit_page(&group.rules, <int32_t>(num_hashes * query.hash_size), query.kinds.use_eagle))


cdef Py_ssize_t shorten(
    Pool *pool, const Query *query, const Group *kind, Py_ssize_t num_hashes, bint is_recheck
) noexcept nogil:
    """Return the length in hashes, at most `num_hashes`, of the longest prefix that hits in all groups of a kind. With
    `is_recheck`, from the second round on, no further page is dropped for eagle.
    """
    cdef bint drops = query.kinds.use_eagle and not is_recheck
    cdef Py_ssize_t need, num_pages = num_hashes // kind.stride
    assert 0 <= num_hashes <= query.num_digests
    if is_state(&kind.rules):  # for eagle, only pages of attention are dropped
        return find_run_end(pool, query, kind, num_pages, 1) * kind.stride
    if kind.rules.chunk:
        return find_first_miss(pool, query, kind, find_first_hit_page(query, kind, num_hashes), num_pages) * kind.stride
    if kind.rules.window:
        need = count_run_pages(&kind.rules, query.kinds.use_eagle) + drops
        if need == 0:
            return num_hashes
        num_pages = find_run_end(pool, query, kind, num_pages, need)
    elif is_recheck:
        return num_hashes
    else:
        num_pages = find_first_miss(pool, query, kind, 0, num_pages)
    return (num_pages - (drops and num_pages > 0)) * kind.stride


cdef Py_ssize_t find_longest(Pool *pool, Query *query) noexcept:
    """Return the length in hashes of the longest prefix that hits in all groups: each kind shortens it in turn, until none
    does. The chain and the pool are locked. O(pages x groups) a round, rarely more than two rounds.
    """
    cdef Py_ssize_t kind, multiple = query.kinds.num_hit_hashes, previous = -1
    cdef Py_ssize_t num_hashes = query.num_digests if multiple and pool.slots != NULL else 0
    cdef bint is_recheck = False
    cdef void *thread = let_others_run(num_hashes)
    num_hashes -= num_hashes % max(1, multiple)
    while num_hashes != previous:
        assert 0 <= num_hashes and (previous < 0 or num_hashes < previous)
        previous = num_hashes
        for kind in range(query.kinds.num):
            num_hashes = shorten(pool, query, query.kinds.items[kind], num_hashes, is_recheck)
            num_hashes -= num_hashes % max(1, multiple)
            if not is_recheck and hits_leading_pages(query.kinds.items[kind]):
                query.num_full_hashes = num_hashes
        is_recheck = True
    assert num_hashes % max(1, multiple) == 0 and num_hashes <= query.num_digests
    go_on(thread)
    return num_hashes


cdef Py_ssize_t count_junction_tokens(const Query *query, Py_ssize_t num_hashes) noexcept:
    """Count the tokens that all groups of full attention hit, if windows and chunks end the hit earlier, at `num_hashes`;
    return 0 if they do not.
    """
    cdef Py_ssize_t num_most = query.num_full_hashes - query.kinds.num_later_drops * query.kinds.num_hit_hashes
    assert 0 <= num_hashes <= query.num_digests
    return num_most * query.hash_size if num_most > num_hashes else 0


cdef int32_t find_bank_without(Pool *pool, const Query *query, Py_ssize_t num_hashes) noexcept:
    """Return the bank that evicted a checkpoint after `num_hashes` hashes; NO_BANK: none did, or another group of states lacks
    its checkpoint for another reason.
    """
    cdef Digest key = query.digests[num_hashes - 1]
    cdef const Group *group
    cdef int32_t bank = NO_BANK
    cdef Py_ssize_t g
    assert 0 < num_hashes <= query.num_digests
    for g in range(query.num_groups):
        group = &query.groups[g]
        if keeps_checkpoints(group) and has_left(&pool.banks[group.bank].ghost, key, group.id, EVICTED):
            bank = group.bank if not hits_in(pool, query, group, key) else bank
    for g in range(query.num_groups if bank != NO_BANK else 0):
        group = &query.groups[g]
        if keeps_checkpoints(group) and not has_left(&pool.banks[group.bank].ghost, key, group.id, EVICTED):
            bank = bank if hits_in(pool, query, group, key) else <int32_t>NO_BANK
    return bank


cdef bint has_checkpoint(Pool *pool, const Query *query, Py_ssize_t num_hashes) noexcept:
    """Whether there are groups of states, and each has a checkpoint after `num_hashes` hashes, or lost it when the keys and
    values with its key were evicted.
    """
    cdef Digest key = query.digests[num_hashes - 1]
    cdef const Group *group
    cdef bint has_state = False
    cdef Py_ssize_t g
    assert 0 < num_hashes <= query.num_digests
    for g in range(query.num_groups):
        group = &query.groups[g]
        if keeps_checkpoints(group):
            has_state = True
            if not hits_in(pool, query, group, key) and not has_left(&pool.banks[group.bank].ghost, key, group.id, DROPPED):
                return False
    return has_state


cdef void find_lost(Pool *pool, Query *query, Py_ssize_t num_hashes) noexcept:
    """Find the hits behind `num_hashes` hashes that were lost to evictions, in a locked pool of several banks. Hits lost with
    states end at the last evicted checkpoint up to which all groups of full attention hit. Hits lost with pages end at the last
    checkpoint behind that range; one look-up in `lost_interval` searches for it. O(hashes behind the hit).
    """
    cdef Py_ssize_t step = query.kinds.num_hit_hashes
    cdef Py_ssize_t num_full = max(num_hashes, query.num_full_hashes), stop = num_full
    cdef LostHits *lost = &query.end.lost
    if not step or not hits_leading_pages(query.kinds.items[0]):
        return
    assert num_hashes % step == 0 and num_full <= query.num_digests
    while stop > num_hashes:
        lost.states_bank = find_bank_without(pool, query, stop)
        if lost.states_bank != NO_BANK:
            lost.num_for_states = (stop - num_hashes) * query.hash_size
            query.end.lost_key = query.digests[stop - 1]
            break
        stop -= step
    pool.num_lookups += 1
    # Sample by a hash, not each 16th look-up: requests of several kinds may come in turns.
    if pool.num_lookups * <uint32_t>0x9E3779B1 > <uint32_t>0xFFFFFFFF // pool.lost_interval:
        return
    stop = query.num_digests - query.num_digests % step
    while stop > num_full and not has_checkpoint(pool, query, stop):
        stop -= step
    if stop > num_full:
        lost.num_for_pages = pool.lost_interval * (stop - num_hashes) * query.hash_size


cdef void find_end(Pool *pool, Query *query, Py_ssize_t num_hashes) noexcept:
    """Describe what is cached behind a hit of `num_hashes` hashes, and what was lost, in a locked pool."""
    query.end.junction = count_junction_tokens(query, num_hashes)
    if query.end.junction and pool.children != NULL and hits_leading_pages(query.kinds.items[0]):
        find_parting(pool, query)
    if pool.num_banks > 1:
        find_lost(pool, query, num_hashes)


cdef void find_parting(Pool *pool, Query *query) noexcept:
    """Find how other runs went on from the last page of full attention that hits. It may be behind the junction, which is
    rounded down. Nothing is known of a page that only the tier has.
    """
    cdef const Group *full = query.kinds.items[0]
    cdef Py_ssize_t page = query.end.junction // query.hash_size // full.stride
    cdef const Digest *child = NULL
    cdef int32_t last
    while (page + 1) * full.stride <= query.num_digests and hits_all(pool, query, full, page):
        page += 1
    last = find_within(pool, query.digests[last_hash(full, page - 1)], full.id, query.ids.of_banks[full.bank])
    if last == NULL_PAGE:
        return
    if (page + 1) * full.stride <= query.num_known:
        child = &query.digests[last_hash(full, page)]
    query.end.has_parted, query.end.is_run_end = parts_at(pool, last, child), ends_run(pool, last)


cdef PrefixEnd new_end() noexcept:
    """Return the end of a prefix with nothing behind it."""
    cdef PrefixEnd end
    memset(&end, 0, sizeof(PrefixEnd))
    end.lost.states_bank = NO_BANK
    return end


cdef Query query_of(
    CacheGroups groups, const Digest *digests, Py_ssize_t num_digests, Py_ssize_t hash_size, Py_ssize_t num_tokens, Ranges ids
) noexcept:
    """Return the look-up of a request's digests, of `hash_size` tokens each (0: no digests). One token is left to compute."""
    cdef Py_ssize_t num_known = num_digests
    num_digests = min(num_digests, min(max(0, num_tokens - 1), <Py_ssize_t>MAX_TOKENS) // max(<Py_ssize_t>1, hash_size))
    return Query(
        groups=groups.groups, num_groups=groups.num, kinds=&groups.kinds, digests=digests, num_digests=num_digests,
        hash_size=hash_size, ids=ids, reaches_tier=False, stored=NULL, num_stored=0, num_full_hashes=0, num_reachable=0,
        short_bank=NO_BANK, num_known=num_known, end=new_end(),
    )


cdef Py_ssize_t fetch_hits(Pool *pool, const Query *query, Py_ssize_t num_hashes, tuple hits) noexcept:
    """Fill the `PageIds` of each group with the pages of a hit. A null page stands where the request needs no page, and where
    the pool has none. Return `num_hashes`, or -1 if memory is short.
    """
    cdef const Group *group
    cdef PageIds found
    cdef Py_ssize_t g, page, start
    for g in range(query.num_groups):
        group, found = &query.groups[g], hits[g]
        found.num = 0
        if not found.try_reserve(count_hit_places(group, num_hashes)):
            return -1
        found.num = count_hit_places(group, num_hashes)
        start = find_first_hit_page(query, group, num_hashes)
        assert 0 <= start <= found.num <= found.capacity
        for page in range(start):
            found.ids[page] = NULL_PAGE
        for page in range(start, found.num):
            found.ids[page] = find_within(
                pool, query.digests[last_hash(group, page)], group.id, query.ids.of_banks[group.bank]
            )
    return num_hashes


cdef Ranges ranges_in(PageStore store, tuple ids) except *:
    """Return page ids ``(first, end)`` as ranges; an end of None stands for the end of the pool. In a store of several banks,
    the ids of a shard of the first bank stand for this shard of all banks, and the banks are divided into such shards.
    """
    cdef Ranges ranges
    cdef Range inside
    cdef int32_t bank, size
    first, stop = ids
    inside = store.range_of(first, stop)
    if store.pool.num_banks == 1 or stop is None or inside.start == 0:
        for bank in range(MAX_BANKS):
            ranges.of_banks[bank] = inside
        return ranges
    size = inside.stop - inside.start + (inside.start == 1)  # the first shard lacks the null page
    if size <= 0 or store.pool.banks[0].stop % size or inside.stop % size:
        raise ArgumentError(f"ids: got {inside.start} to {inside.stop}, allowed with several banks: those of a shard")
    store.set_shards(store.pool.banks[0].stop // size)
    return ids_in_shard(&store.pool, inside.stop // size - 1)


cdef tuple checked_hits(PageStore store, object hits, const Holding *holding):
    """Return `hits`, `PageIds` of the pool for each group or for none, as a tuple. ArgumentError unless null pages come first.
    O(hits).
    """
    cdef tuple checked = tuple(as_list(hits, "hits"))
    cdef PageIds ids
    cdef Py_ssize_t i
    if checked and len(checked) != holding.num_groups:
        raise ArgumentError(f"hits: got {len(checked)} groups, allowed: {holding.num_groups}")
    for item in checked:
        if not isinstance(item, PageIds):
            raise ArgumentTypeError(f"hits: got {type(item).__name__}, allowed: PageIds")
        ids = store.checked(item)
        for i in range(1, ids.num):
            if ids.ids[i] == NULL_PAGE and ids.ids[i - 1] != NULL_PAGE:
                raise ArgumentError(f"hits: got the null page (at {i} of {ids.num}) behind others, allowed: before them")
    return checked


cdef Hits *list_hits(tuple hits) noexcept:
    """Return the hits of each group in new memory; NULL if there are none, or memory is short."""
    cdef Py_ssize_t g
    cdef Hits *array = <Hits *>malloc(len(hits) * sizeof(Hits)) if hits else NULL
    for g in range(len(hits) if array != NULL else 0):
        array[g] = Hits(ids=(<PageIds>hits[g]).ids, num=<int32_t>(<PageIds>hits[g]).num)
    return array


def find_prefix(
    PageStore store not None, CacheGroups groups not None, chain, num_tokens, tuple ids not None=(0, None),
    bint reaches_tier=False,
) -> tuple:
    """Return the longest cached prefix of a request with `num_tokens` tokens: its page ids for each group, with the null page
    where the group's attention does not reach, and its length in tokens. One token is left to compute. Only pages with
    `ids` ``(first, end)`` hit; an end of None stands for the end of the pool. With `reaches_tier` pages of the tier hit, too,
    as null pages. Changes nothing. O(pages x groups).
    """
    cdef Py_ssize_t num_hashes, num = size_of(num_tokens, "num_tokens", 0, INT64_MAX)
    cdef HashChain hashes = require_instance(chain, HashChain, "chain")
    cdef Ranges inside = ranges_in(store, ids)
    cdef tuple hits = new_ids(groups.num)
    cdef Query query
    store.require_own()
    with hashes.own_lock()[0], store.lock:
        query = query_of(groups, hashes.digests, hashes.num, hashes.page_size, num, inside)
        query.reaches_tier = reaches_tier and store.pool.tier != NULL
        num_hashes = fetch_hits(&store.pool, &query, find_longest(&store.pool, &query), hits)
    if num_hashes < 0:
        raise MemoryError("the pages of a prefix")
    return hits, num_hashes * hashes.page_size


cdef enum:
    NUM_SAMPLED = 16          # sampled tokens by which a refused request is recognized; up to twice as many are compared

cdef object ndarray = np.ndarray


cdef bint ends_at(Pool *pool, const Watch *watch, Py_ssize_t num_pages) noexcept nogil:
    """Whether the page behind the first `num_pages` misses, or must not hit."""
    if num_pages >= watch.max_num_pages:
        return True
    return find_within(pool, watch.digests[(num_pages + 1) * watch.stride - 1], watch.group, watch.ids) == NULL_PAGE


cdef bint are_same(tuple mine, tuple others) except -1:
    """Whether the items of two tuples are the same objects, or equal strings or ints."""
    cdef Py_ssize_t i
    if len(mine) != len(others):
        return False
    for i in range(len(mine)):
        if mine[i] is not others[i]:
            if type(mine[i]) is not type(others[i]) or type(mine[i]) not in (str, int) or mine[i] != others[i]:
                return False
    return True


cdef const void *address_of(object source) noexcept:
    """Return an address that is the same for the same list or `PageIds` of tokens."""
    return <const void *>source if type(source) is list else (<PageIds>source).ids


cdef bint has_sample(object source, const int32_t *tokens, Py_ssize_t n) except -1:
    """Whether a list or `PageIds` has `n` items, and a sample of them equals the tokens."""
    cdef const int32_t *ids = NULL if type(source) is list else (<PageIds>source).ids
    cdef Py_ssize_t i = n - 1, step = max(1, n // NUM_SAMPLED)
    cdef int overflow  # if it is set, the value is -1, which no token is
    if step > 16:
        step |= 17  # samples a power of two apart would share a set of the cache
    if n != (len(<list>source) if type(source) is list else (<PageIds>source).num):
        return False
    while i >= 0:
        if ids != NULL:
            if ids[i] != tokens[i]:
                return False
        elif type((<list>source)[i]) is not int or as_long_long((<list>source)[i], &overflow) != tokens[i]:
            return False
        i -= step
    return True


@cython.final
@cython.auto_pickle(False)
cdef class RefusedRequest:
    """A refused request of `num_tokens` tokens. `hits`, the `PageIds` of each group, have `num_hit_tokens` tokens; both shrink
    as the last hits are evicted.

    The request needs at least as many free pages the next time, unless one of its hits got another holder, or another of its
    pages was cached: see `Watch`. The refusal of a row also keeps its tokens and options, to recognise the request.
    """

    def __init__(self):
        raise TypeError("a RefusedRequest is what a refused request leaves")

    def __reduce__(self):
        raise ArgumentTypeError("a refusal cannot be pickled")

    cdef void begin(self, Pool *pool, const Query *query, Py_ssize_t num_held, int64_t num_changes) noexcept:
        """Watch the hits that a look-up found, `num_held` of them held, after `num_changes` changes of the index. The pool is
        locked. O(hits).
        """
        cdef const Group *group = query.groups
        cdef Watch *watch = &self.watch
        cdef Py_ssize_t i
        watch.num_changes, watch.num_reused, watch.num_unwatched = num_changes, pool.num_reused, pool.num_unwatched
        watch.num_held = num_held
        self.count_free_hits(pool)
        assert 0 <= num_held and num_changes <= count_changes(pool)
        if not self.hits or self.num_loads or query.num_groups > 1 or not hits_leading_pages(group):
            return
        if group.rules.answer_window:  # the prompt's end is not known here
            return
        if num_changes != count_changes(pool):
            return
        watch.stride, watch.group, watch.page_size = group.stride, group.id, group.rules.page_size
        watch.ids, watch.digests = query.ids.of_banks[group.bank], query.digests
        watch.num_pages, watch.max_num_pages = self.num_hit_tokens // watch.page_size, self.count_most_pages(query.num_digests)
        if not ends_at(pool, watch, watch.num_pages):
            watch.stride = 0
        for i in range(watch.num_pages if watch.stride else 0):
            pool.pages[(<PageIds>self.hits[0]).ids[i]].group |= WATCHED

    cdef Py_ssize_t count_most_pages(self, Py_ssize_t num_digests) noexcept:
        """Count the pages that may hit with `num_digests` known digests. The hits are watched page by page."""
        return min(max(0, self.num_tokens - 1) // self.watch.page_size, num_digests // self.watch.stride)

    cdef bint begin_request(self, PageStore store, CacheGroups groups, HashChain chain, int64_t num_changes) except -1:
        """Watch the hits of a request under `chain` in the whole pool. False if they are not watched page by page: with
        eagle, or with a tier, which may have more of the prefix, for example.
        """
        cdef PageIds ids = self.hits[0]
        cdef Pool *pool = &store.pool
        cdef Query query
        self.store, self.chain, self.shard = store, chain, -1
        store.require_own()
        with chain.own_lock()[0], store.lock:
            if pool.tier == NULL and not groups.kinds.use_eagle:
                query = query_of(groups, chain.digests, chain.num, chain.page_size, self.num_tokens, ids_in_shard(pool, -1))
                self.begin(pool, &query, ids.num - count_free(pool, ids.ids, ids.num), num_changes)
        return self.watch.stride > 0

    cdef bint finds_hits(self, Pool *pool) noexcept:
        """Whether a look-up would find these hits, without the last ones if they were evicted, and at most `watch.num_held` of
        them held. The locks are held. O(pages evicted).
        """
        cdef Watch *watch = &self.watch
        cdef Py_ssize_t last
        if watch.num_reused != pool.num_reused:
            return False
        assert watch.num_changes <= count_changes(pool) and watch.num_unwatched <= pool.num_unwatched
        if not watch.stride:
            return watch.num_changes == count_changes(pool)
        if self.chain is not None:  # a refused call may have hashed fewer tokens than the look-up does
            watch.digests, watch.max_num_pages = self.chain.digests, self.count_most_pages(self.chain.num)
        while watch.num_unwatched != pool.num_unwatched and watch.num_pages:
            last = watch.num_pages - 1
            if has_key(
                &pool.pages[(<PageIds>self.hits[0]).ids[last]], watch.digests[(last + 1) * watch.stride - 1], watch.group
            ):
                break
            watch.num_pages = last
            watch.num_free_hits -= 1
            watch.num_unwatched += 1
        if watch.num_unwatched != pool.num_unwatched or not ends_at(pool, watch, watch.num_pages):
            return False
        assert watch.num_unwatched == pool.num_unwatched and 0 <= watch.num_pages
        self.num_hit_tokens = watch.num_pages * watch.page_size
        return True

    cdef bint is_short(self, Pool *pool, int64_t num_pages, Py_ssize_t num_reserved) noexcept:
        """Whether too few pages are free for `num_pages` pages, hits included, after `finds_hits` was True. False in a pool of
        several banks, since a refusal has no numbers by bank. O(1).
        """
        if pool.num_banks > 1:
            return False
        assert num_pages >= 0 and self.watch.num_held >= 0
        return not has_free_pages(pool, num_pages - self.watch.num_held, num_reserved, self.shard)

    cdef void count_free_hits(self, Pool *pool) noexcept:
        """Count the hits in the free queue. O(hits)."""
        cdef Py_ssize_t g
        cdef PageIds ids
        self.watch.num_given_back, self.watch.num_free_hits = count_given_back(pool), 0
        for g in range(len(self.hits)):
            ids = self.hits[g]
            self.watch.num_free_hits += count_free(pool, ids.ids, self.watch.num_pages if self.watch.stride else ids.num)

    cdef int64_t count_needed(self, Pool *pool, const Holding *holding, int64_t num_slots) noexcept:
        """Count the pages that an empty holding needs for `num_slots` slots, free hits included, after `finds_hits` returned
        True. O(groups); O(hits) if a page was given back since the last call.
        """
        cdef Py_ssize_t g, num = 0, num_states = 0, num_free_states = 0
        cdef int64_t count = self.num_loads
        cdef PageIds found
        if self.watch.num_given_back != count_given_back(pool):
            self.count_free_hits(pool)
        count += self.watch.num_free_hits
        for g in range(holding.num_groups):
            if self.hits:
                found = self.hits[g]
                num = self.watch.num_pages if self.watch.stride else found.num
            if not is_state(&holding.groups[g].rules):
                count += max(<int64_t>0, pages_for(&holding.groups[g].rules, num_slots) - num)
                continue
            count += 1
            num_states += num > 0
            num_free_states += num > 0 and count_free(pool, &found.ids[num - 1], 1)
        assert num_free_states <= num_states <= holding.num_groups
        return count - num_states if num_states == num_free_states else count  # checkpoints would be adopted

    cdef bint is_request_short(self, int64_t num_pages, Py_ssize_t num_reserved) noexcept:
        """Whether a request still has all its hits, and is short of pages."""
        cdef bint is_short
        with self.chain.lock, self.store.lock:
            end_leases(&self.store.pool)
            is_short = self.finds_hits(&self.store.pool) and self.watch.num_pages == (<PageIds>self.hits[0]).num
            is_short = is_short and self.is_short(&self.store.pool, num_pages, num_reserved)
        return is_short

    def find_again(self) -> FoundPrefix | None:
        """Return what a look-up of the request would find, without the last hits if they were evicted; None if it may find
        other hits. O(pages evicted).
        """
        cdef bint is_same
        cdef PageIds ids
        if self.store is None:
            return None
        self.store.require_own()
        with self.chain.own_lock()[0], self.store.lock:
            is_same = self.finds_hits(&self.store.pool)
        if is_same and self.watch.num_pages < len(self.hits[0]):
            ids = PageIds.__new__(PageIds)
            ids.add((<PageIds>self.hits[0]).ids, self.watch.num_pages)
            self.hits = (ids,)
        return prefix_of(self.hits, self.num_tokens, self.num_hit_tokens) if is_same else None

    @cython.critical_section  # for `source`, which it replaces
    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1:
        """Whether a request for a row is this one, which has `tokens`. O(1) for the same list or memory, else O(tokens)."""
        cdef object source = token_ids
        cdef PageIds ids
        if self.options is None or type(options) is not tuple or not are_same(options, self.options):
            return False
        if isinstance(token_ids, HashedTokens):
            source = (<HashedTokens>token_ids).token_ids
        elif type(token_ids) is not list:
            if not isinstance(token_ids, (ndarray, tuple)):  # other objects may run Python code that changes them
                return False
            source = as_page_ids(token_ids, "token_ids")
        if not has_sample(source, tokens, self.num_tokens):
            return False
        if address_of(source) != address_of(self.source):
            ids = as_page_ids(source, "token_ids")
            if ids.num != self.num_tokens or memcmp(ids.ids, tokens, ids.num * sizeof(int32_t)) != 0:
                return False
            self.source = source
        return True


@cython.final
@cython.freelist(64)
@cython.no_gc
@cython.auto_pickle(False)
cdef class FoundPrefix:
    """The longest cached prefix of a request with `num_queried_tokens` tokens: the `PageIds` of each group, and its length.

    The prefix ``is_short`` if too few pages were free for the loads of a longer one from the host tier. ``is_preempted`` says
    that the request returns after a preemption.
    """

    def __init__(self):
        raise TypeError("a FoundPrefix is what a look-up finds")

    def __reduce__(self):
        raise ArgumentTypeError("a found prefix cannot be pickled")


cdef FoundPrefix prefix_of(tuple hits, int64_t num_queried_tokens, int64_t num_hit_tokens):
    """Return a prefix whose end was not looked at."""
    cdef FoundPrefix found = FoundPrefix.__new__(FoundPrefix)
    found.hits, found.num_queried_tokens, found.num_hit_tokens = hits, num_queried_tokens, num_hit_tokens
    found.end = new_end()
    return found


@cython.final
@cython.auto_pickle(False)
cdef class RequestHashes:
    """The digests of a request's full pages, computed on demand.

    ``chain`` has the keys of the prefix index. ``page_hashes`` has the hashes that users see, where they differ from the keys.
    ``query`` is the prefix that the last look-up found. It is counted once the request is admitted; ``is_counted`` then says
    that the next look-up is by a preempted request. ``refusal`` is the last refusal. The hashes ``are_unsure`` after a
    refused call, and once the request was freed: tokens without slots may change.
    """

    def __cinit__(self, request, HashChain chain not None, extra_keys=None):
        self.request, self.chain, self.extra_keys, self.page_hashes = request, chain, extra_keys, []

    def cut(self, num_pages) -> None:
        """Forget the hashes from page `num_pages` on, and the refusal that rests on them. The hashes that remain are sure."""
        cdef Py_ssize_t num = size_of(num_pages, "num_pages")
        self.chain.cut(num)
        del self.page_hashes[num:]
        self.refusal, self.are_unsure = None, False

    def __reduce__(self):
        raise ArgumentTypeError("RequestHashes references the secret key of the hashes and cannot be pickled or copied")


cdef Tokens count_tokens(
    object num_tokens, object max_num_new_tokens, Py_ssize_t num_known, Py_ssize_t num_external, object num_lookahead_tokens,
    bint reserves_prompt,
) except *:
    """Count the tokens of a request with `num_known` tokens. A `num_tokens` of None means all of them, a `max_num_new_tokens`
    of None no limit.
    """
    cdef Tokens tokens = Tokens(
        num_known=num_known, num_prompt=num_known, num_wanted=num_known, max_num_new=num_known, num_external=num_external,
        num_ahead=size_of(num_lookahead_tokens, "num_lookahead_tokens"), reserves_prompt=reserves_prompt,
    )
    if num_tokens is not None:
        tokens.num_wanted = tokens.max_num_new = size_of(num_tokens, "num_tokens", 1, num_known)
    if max_num_new_tokens is not None:
        tokens.max_num_new = size_of(max_num_new_tokens, "max_num_new_tokens", 1)
    return tokens
