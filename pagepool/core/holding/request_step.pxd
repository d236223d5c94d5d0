# The next step of a request, which is checked before anything changes. An `Outcome` is DONE, or the reason for a refusal.

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from pagepool.core.base cimport resize
from pagepool.core.holding.writes cimport *
from pagepool.core.pool cimport is_cached_otherwise, shard_of
from pagepool.core.values cimport HashChain, PageIds


cdef enum Outcome:
    DONE
    TOO_FEW                   # too few pages are free
    TOO_LARGE                 # the pool or shard would be too small even if all its pages were free
    WRONG_HIT                 # a hit has another content by now, or cannot be held
    NOT_EMPTY                 # hits for a request that holds pages
    HELD_FREE                 # a caller set the ref count of a page in the free queue
    MOVES_DUE                # moves of pages of the request are due
    CACHED_OTHERWISE          # a page that was filled has an entry under another hash
    LOST_PAGE                 # another caller gave back a page that is to be skipped or kept
    ALREADY_HASHED            # another call hashed the tokens while they were read
    NO_MEMORY

cdef struct Step:             # the next tokens of a request, counted from its first one on
    int64_t num_computed      # tokens computed before the step
    int64_t num_held          # these and hits
    int64_t num_before        # these and tokens from elsewhere, which come with no state but the one at their end
    int64_t num_tokens        # these and new tokens
    int64_t num_known         # known tokens
    int64_t num_keyed         # known tokens whose keys are known, too: a key may depend on tokens behind it
    int64_t num_to_cache      # tokens whose full pages are cached; 0: none
    int64_t num_final         # computed tokens whose pages windows may leave; if pages are cached, their keys are known
    int64_t num_cached_first  # tokens whose full pages are cached before windows leave them
    int64_t num_hashed        # tokens whose hashes the step needs
    bint is_new               # the request had no pages before, not even skipped ones
    bint may_overwrite        # tokens may be written to pages that are cached for others
    bint may_be_too_large     # the outcome for a request that can never fit is TOO_FEW, not TOO_LARGE
    int32_t context           # see `Origin`
    int32_t session           # session of a request without pages, see `PageSessions.hold`
    int32_t num_shards        # shards of the pool, if new pages are to come from the shard with all other pages; 0: from any
    Demand demand
    PrefixEnd end             # end of the hits, to which the demand points
    int64_t num_changes       # `count_changes` when too few pages were free
    int32_t wrong_page        # page for which the step was refused
    Py_ssize_t wrong_at       # place of that page in its group
    Py_ssize_t wrong_num      # pages of that group; for TOO_LARGE the pages needed
    int32_t wrong_shard       # queue of the shard or bank that is too small


cdef inline Outcome hash_missing(HashChain chain, PageIds tokens, int64_t num_hashed) noexcept:
    """Let a locked chain hash the `tokens` (None: none) that it lacks of the first `num_hashed`."""
    if tokens is None:
        return DONE
    if tokens.num != chain.count_tokens(num_hashed // chain.page_size - chain.num):
        return ALREADY_HASHED
    return DONE if chain.extend_locked(tokens, b"") else NO_MEMORY


cdef inline void begin_step(Step *step, int64_t hash_lookahead, bint caches_computed) noexcept nogil:
    """Derive from a step's counts which tokens are cached, and up to which token windows leave pages. With `caches_computed`
    tokens are cached once they are computed, not when they get slots.
    """
    assert 0 <= step.num_computed <= step.num_held <= step.num_before <= step.num_tokens and step.num_known >= 0
    step.num_keyed = max(<int64_t>0, step.num_known - hash_lookahead)
    step.num_to_cache, step.num_cached_first, step.num_final = 0, 0, step.num_computed
    if step.may_overwrite:
        return
    step.num_to_cache = min(step.num_computed if caches_computed else step.num_tokens, step.num_known)
    if hash_lookahead:
        step.num_final = min(step.num_final, step.num_keyed)
    if hash_lookahead or caches_computed:
        step.num_cached_first = min(step.num_computed, step.num_to_cache)
    assert step.num_cached_first <= step.num_to_cache and step.num_final <= step.num_computed


cdef inline bint lacks_pages(const Holding *holding, int32_t num_computed) noexcept nogil:
    """Whether a window has passed pages that tokens from `num_computed` on need."""
    cdef const Group *group
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if lacks_page(group, &holding.held[g], num_computed, pages_for(&group.rules, num_computed)):
            return True
    return False


cdef inline bint is_too_large(const Pool *pool, const Holding *holding, Step *step) noexcept nogil:
    """Whether a request would have more pages after a priced step than the pool, or the shard to which it is bound, has at all.
    """
    cdef const Demand *demand = &step.demand
    cdef int32_t num_computed = <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS)
    step.wrong_num, step.wrong_shard = 0, -1
    if demand.num_taken > pool.num_free or pool.num_banks > 1:  # else it may fit, or wait
        step.wrong_num = find_any_excess(
            pool, holding, demand.hits, demand.num_new_in, num_computed, &step.wrong_shard
        )
    if step.wrong_num == 0 and pool.num_shards:
        step.wrong_shard = demand.shard
        if step.num_shards:
            step.wrong_shard = find_common_shard(pool, holding, demand, demand.shard)
        if step.wrong_shard >= 0 and (pool.num_banks > 1 or demand.num_taken > count_free_in(pool, step.wrong_shard)):
            step.wrong_num = find_any_excess(
                pool, holding, demand.hits, demand.num_new_in, num_computed, &step.wrong_shard
            )
    assert step.wrong_num == 0 or step.wrong_num > count_usable_in(pool, step.wrong_shard)
    return step.wrong_num > 0


cdef inline bint has_foreign_entry(
    const Pool *pool, const Holding *holding, Step *step, const Contents *contents
) noexcept nogil:
    """Whether a page that is due to be cached has an entry under another hash. O(pages due)."""
    cdef const Group *group
    cdef const Held *held
    cdef int32_t num_computed = <int32_t>min(step.num_computed, <int64_t>MAX_TOKENS)
    cdef int64_t stop
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if contents.num_digests else 0):
        group, held = &holding.groups[g], &holding.held[g]
        if not caches_full_pages(group):
            continue
        stop = min(step.num_to_cache // group.rules.page_size, <int64_t>(contents.num_digests // group.stride))
        for i in range(min(held.num_cached, full_entries(&group.rules, num_computed)), min(stop, <int64_t>held.num_pages)):
            assert i < held.num_pages and last_hash(group, i) < contents.num_digests
            if is_cached_otherwise(pool, held.ids[i], contents.digests[last_hash(group, i)], group.id):
                step.wrong_page, step.wrong_at, step.wrong_num = held.ids[i], i, held.num_pages
                return True
    return False


cdef inline bint overwrites_entry(
    const Pool *pool, const Holding *holding, Step *step, const Contents *contents
) noexcept nogil:
    """Whether a step that computes tokens again has slots in a part of a page that was cached for other tokens, or for more
    tokens than are known by now. O(pages of the slots).
    """
    cdef const Group *group
    cdef const Held *held
    cdef int64_t start, stop
    cdef Py_ssize_t g, i
    for g in range(0 if step.may_overwrite else holding.num_groups):
        group, held = &holding.groups[g], &holding.held[g]
        if not caches_full_pages(group):
            continue
        stop = min(pages_for(&group.rules, step.demand.num_tokens), <int64_t>count_once_cached(holding, g))
        start = step.num_to_cache // group.rules.page_size
        if contents.hash_lookahead:
            start = min(start, <int64_t>(contents.num_digests // group.stride))
        for i in range(start, stop):
            assert 0 <= i < held.num_pages
            if held.ids[i] == NULL_PAGE or pool.pages[held.ids[i]].group == NO_GROUP:
                continue
            if last_hash(group, i) >= contents.num_digests or is_cached_otherwise(
                pool, held.ids[i], contents.digests[last_hash(group, i)], group.id
            ):
                step.wrong_page, step.wrong_at, step.wrong_num = held.ids[i], i, held.num_pages
                return True
    return False


cdef inline Outcome check(
    Pool *pool, const Holding *holding, Step *step, const Contents *contents, bint is_past_skip
) noexcept nogil:
    """Return the reason why a step cannot be done; DONE if it can be tried."""
    if has_moves_due(pool, holding):
        return MOVES_DUE
    assert step.num_computed >= 0 and step.num_to_cache >= 0 and step.demand.num_tokens >= 0
    if step.demand.hits != NULL and count_places(holding):
        return NOT_EMPTY
    if not price(pool, holding, &step.demand, contents.digests, contents.num_digests):
        return WRONG_HIT
    assert step.demand.num_taken == step.demand.num_new + step.demand.num_free_hits and step.demand.num_new >= 0
    if not step.may_be_too_large and is_too_large(pool, holding, step):
        return TOO_LARGE
    if is_past_skip:
        step.wrong_page = find_lost_page(pool, holding, <int32_t>min(step.num_final, <int64_t>MAX_TOKENS))
        if step.wrong_page != NULL_PAGE:
            return LOST_PAGE
    if has_foreign_entry(pool, holding, step, contents):
        return CACHED_OTHERWISE
    step.wrong_page = find_held_free(pool, step.demand.num_taken)
    return DONE if step.wrong_page == NULL_PAGE else HELD_FREE


cdef inline int32_t find_common_shard(
    const Pool *pool, const Holding *holding, const Demand *demand, int32_t hinted
) noexcept nogil:
    """Return the shard that has all hits of a demand or, without hits, all pages of a holding; -1 if several shards have some,
    `hinted` if there are none. O(pages).
    """
    cdef const int32_t *ids
    cdef int32_t shard = -1
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.num_shards else 0):
        ids = holding.held[g].ids if demand.hits == NULL else demand.hits[g].ids
        for i in range(holding.held[g].num_pages if demand.hits == NULL else demand.hits[g].num):
            if ids[i] != NULL_PAGE and shard >= 0 and shard_of(pool, ids[i]) != shard:
                return -1
            if ids[i] != NULL_PAGE:
                shard = shard_of(pool, ids[i])
    assert shard < max(1, pool.num_shards)
    return shard if shard >= 0 else hinted


cdef inline void stay_in_shard(const Pool *pool, const Holding *holding, Step *step) noexcept nogil:
    """Demand new pages from the shard that has all pages or hits, if there is one. O(pages)."""
    cdef int32_t shard = find_common_shard(pool, holding, &step.demand, step.demand.shard) if step.num_shards else -1
    assert step.demand.shard < max(1, pool.num_shards) and shard < max(1, pool.num_shards)
    if shard >= 0:
        step.demand.shard = shard


cdef inline int64_t count_hashed(const Holding *holding, const Contents *contents) noexcept nogil:
    """Count the tokens whose checkpoints have known digests; 0 if no states are kept."""
    cdef const Group *group
    cdef Py_ssize_t g
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if keeps_checkpoints(group):
            return <int64_t>(contents.num_digests // group.stride) * group.rules.entry_size
    return 0


cdef inline void cache_full(Pool *pool, const Holding *holding, const Contents *contents, int64_t num_tokens) noexcept nogil:
    """Cache the hashed pages that `num_tokens` tokens fill. A page that has an entry keeps it."""
    cdef Waiting waiting
    cdef const Group *group
    cdef int64_t num_hashed
    cdef Py_ssize_t g
    waiting.pool, waiting.num_to_hash, waiting.num_waiting = pool, 0, 0
    assert num_tokens >= 0
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        num_hashed = <int64_t>(contents.num_digests // group.stride) * group.rules.page_size
        cache_full_pages(&waiting, group, &holding.held[g], contents, min(num_tokens, num_hashed))
    cache_waiting(&waiting)
    assert waiting.num_waiting == 0 and waiting.num_to_hash == 0


cdef inline int32_t find_first_shard(const Pool *pool, const Holding *holding) noexcept nogil:
    """Return the shard of the first page; -1 if the pool has no shards, or there is no page."""
    cdef Py_ssize_t g, i
    for g in range(holding.num_groups if pool.num_shards else 0):
        for i in range(holding.held[g].num_pages):
            if holding.held[g].ids[i] != NULL_PAGE:
                return shard_of(pool, holding.held[g].ids[i])
    return -1


cdef inline int64_t capacity_for(int64_t num_pages) noexcept nogil:
    """Compute the number of ids for which `held` has room while it holds `num_pages`: a power of 2, or none."""
    cdef int64_t capacity = 4 if num_pages else 0
    while capacity < num_pages:
        capacity *= 2
    assert num_pages <= capacity
    return capacity


cdef inline bint reserve_ids(Held *held, int64_t num_pages) noexcept nogil:
    """Make room for `num_pages` ids; False if memory is short."""
    if capacity_for(num_pages) <= capacity_for(held.num_pages):
        return True
    return resize(<void **>&held.ids, capacity_for(num_pages) * sizeof(int32_t))


cdef inline bint make_room(const Holding *target, const Holding *source) noexcept nogil:
    """Make room in a request for the pages that another one holds; False if memory is short."""
    cdef Py_ssize_t g
    for g in range(source.num_groups):
        assert target.held[g].num_pages == 0 and source.held[g].num_pages >= 0
        if not reserve_ids(&target.held[g], source.held[g].num_pages):
            return False
    return True


cdef inline Checkpoint _checkpoint_of(const Step *step) noexcept nogil:
    """Return the template for a step's checkpoints, which leave the reserved pages free."""
    cdef Checkpoint checkpoint
    memset(&checkpoint, 0, sizeof(Checkpoint))
    checkpoint.shard = step.demand.shard
    checkpoint.num_reserved_in[0] = step.demand.num_reserved
    return checkpoint


cdef inline void plan_writes(
    Pool *pool, const Holding *holding, WriteList *writes, const Step *step, const Contents *contents
) noexcept nogil:
    """Note the writes of a step if states are kept, for each boundary in the known tokens that it computes.
    O(boundaries x groups).
    """
    cdef const Group *group
    cdef Checkpoint checkpoint
    cdef int64_t num_hashed
    cdef int64_t num_planned = min(max(step.num_before, min(step.num_tokens, step.num_known)), <int64_t>MAX_TOKENS)
    cdef int32_t end
    cdef Py_ssize_t g
    if not writes_states(holding):
        return
    checkpoint, num_hashed = _checkpoint_of(step), count_hashed(holding, contents)
    end = find_next_boundary(holding.boundaries, <int32_t>min(step.num_held, <int64_t>MAX_TOKENS))
    assert end > step.num_held and writes.num == writes.num_taken
    while end <= num_planned:
        end = find_next_write(holding.boundaries, end - 1, num_planned)
        checkpoint.num_tokens = end
        checkpoint.contents = contents if end <= num_hashed else NULL
        assert end % holding.boundaries.multiple == 0
        if end >= step.num_before:
            write_checkpoint(pool, holding, writes, &checkpoint)
        end = find_next_boundary(holding.boundaries, end)
    for g in range(holding.num_groups):
        group = &holding.groups[g]
        if keeps_checkpoints(group):
            holding.held[g].num_cached = full_entries(&group.rules, <int32_t>num_planned)


cdef inline void cache_writes(
    Pool *pool, const Holding *holding, WriteList *writes, const Contents *contents, int64_t num_final, int32_t term
) noexcept nogil:
    """Cache the pages of the writes that were taken and whose tokens are final, and give these pages back with a term.
    O(writes).
    """
    cdef StateWrite write
    cdef Held *held
    cdef int32_t shard
    cdef Py_ssize_t i
    assert 0 <= writes.num_taken <= writes.num <= writes.capacity
    num_final = min(num_final, count_hashed(holding, contents))
    i = find_final(pool, holding, writes, 0, 0, num_final)
    while i >= 0:
        write = writes.items[i]
        remove_write(writes, i)
        shard = shard_of(pool, write.page_id) if pool.num_shards else -1
        held = &holding.held[write.group]
        cache_written(pool, &holding.groups[write.group], &held.lineage, &write, contents, shard)
        held.num_written = max(held.num_written, full_entries(&holding.groups[write.group].rules, write.num_tokens))
        give_back_written(pool, write.page_id, term)
        i = find_final(pool, holding, writes, i, 0, num_final)
