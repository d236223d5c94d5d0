# Filled pages are hashed and cached before a call ends. They are `Waiting` first, so that memory is
# prefetched, and several pages are hashed at once.

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.core.base cimport MAX_LANES, fetch, hash_each_after
from pagepool.core.holding.demand cimport *
from pagepool.core.pool cimport Entry, NewCheckpoint, bare_entry, cache, cache_alone, home_of, is_journaled


cdef enum:
    NUM_WAITING = 16          # pages

cdef struct Contents:         # hashes and tokens of a request or row, for the entries of its pages
    const Digest *digests
    const Digest *uppers      # upper halves of the digests; NULL: they have 16 bytes
    Py_ssize_t num_digests
    const int32_t *token_ids
    Py_ssize_t num_token_ids
    int32_t hash_lookahead    # tokens behind a page that its digest covers
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
    Py_ssize_t num_lanes      # pages hashed at once
    PageToHash to_hash[NUM_WAITING]
    Py_ssize_t num_to_hash
    PageToCache to_cache[NUM_WAITING]
    Py_ssize_t num_waiting


cdef inline void hash_waiting(Waiting *waiting) noexcept nogil:
    """Hash the waiting pages, several at once, the last one or two in a pair. Lanes without a page hash the last one again."""
    cdef const uint8_t *tokens[MAX_LANES]
    cdef Digest[MAX_LANES] parents
    cdef Digest[MAX_LANES] digests
    cdef PageToHash *page
    cdef Py_ssize_t lane, num_lanes, i = 0
    while i < waiting.num_to_hash:
        num_lanes = waiting.num_lanes if waiting.num_to_hash - i > 2 else 2
        assert num_lanes == 2 or num_lanes == MAX_LANES
        for lane in range(num_lanes):
            page = &waiting.to_hash[min(i + lane, waiting.num_to_hash - 1)]
            parents[lane] = page.parent
            tokens[lane] = page.tokens
        hash_each_after(waiting.key, parents, tokens, waiting.num_page_bytes, digests, <int>num_lanes)
        for lane in range(num_lanes):
            waiting.to_hash[min(i + lane, waiting.num_to_hash - 1)].digest[0] = digests[lane]
        i += num_lanes
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
        assert 0 < page.page_id < pool.num_pages and page.entry.place < page.held.num_pages
        if pool.pages[page.page_id].group == NO_GROUP:
            cache(pool, page.page_id, &page.entry, &page.held.ranking, page.held.ids, page.entry.place)
    waiting.num_waiting = 0


cdef inline bint _awaits_copies(const Pool *pool, const Held *held, const Contents *contents) noexcept nogil:
    """Whether copies into full pages are due. A fork copies these, too, if tokens of their lookahead may be its own."""
    return rare(contents.hash_lookahead and pool.copies.num) and is_destination(pool, held)


cdef inline void _set_tokens(Entry *entry, const Contents *contents, Py_ssize_t start, Py_ssize_t n) noexcept nogil:
    """Give an entry the `n` tokens from `start` on and their lookahead; no tokens unless all are known."""
    n += contents.hash_lookahead
    entry.token_ids = contents.token_ids + start
    entry.num_tokens = <int32_t>n if start + n <= contents.num_token_ids else 0


cdef inline void cache_full_pages(
    Waiting *waiting, const Group *group, Held *held, const Contents *contents, int64_t num_tokens
) noexcept nogil:
    """Add the pages of a group that `num_tokens` tokens fill to the waiting pages, and prefetch their records."""
    cdef PageToCache *page
    cdef Entry *entry
    cdef int32_t place, size = group.rules.page_size
    cdef bint keeps_tokens = waiting.pool.page_tokens != NULL
    if not caches_full_pages(group) or waits_for_loads(waiting.pool, held):
        return
    if _awaits_copies(waiting.pool, held, contents):
        return
    if rare(group.rules.caches_prompts):
        num_tokens = min(num_tokens, <int64_t>held.num_prompt)
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
        entry.session, entry.num_tokens, entry.checkpoint = contents.session, 0, NULL
        if keeps_tokens:
            _set_tokens(entry, contents, <Py_ssize_t>place * size, size)
        entry.upper = contents.uppers + last_hash(group, place) if contents.uppers != NULL else NULL
        fetch(&waiting.pool.pages[page.page_id])
        if is_journaled(waiting.pool):
            entry.context = contents.context
            entry.parent = contents.digests + place * group.stride - 1 if place else NULL
            entry.parent_upper = contents.uppers + place * group.stride - 1 if place and contents.uppers != NULL else NULL
            fetch(&waiting.pool.journal.notes[page.page_id])
            fetch(waiting.pool.page_tokens + page.page_id * waiting.pool.tokens_width)


cdef inline void cache_page(
    Pool *pool, const Group *group, int32_t page_id, int32_t place, const Contents *contents,
    const NewCheckpoint *checkpoint=NULL,
) noexcept nogil:
    """Cache a loaded page, or a checkpoint that a run made, at a place in its group. A checkpoint gets the parent, place and
    tokens of its last hash page.
    """
    cdef Py_ssize_t last = last_hash(group, place), size = group.rules.entry_size // group.stride
    cdef Py_ssize_t first = last if is_state(&group.rules) else place * <Py_ssize_t>group.stride
    cdef Entry entry = bare_entry(&contents.digests[last], group.id)
    entry.place, entry.context = <int32_t>last if is_state(&group.rules) else place, contents.context
    entry.session, entry.checkpoint = contents.session, checkpoint
    entry.parent = contents.digests + first - 1 if first else NULL
    if contents.uppers != NULL:
        entry.upper = contents.uppers + last
        entry.parent_upper = contents.uppers + first - 1 if first else NULL
    _set_tokens(&entry, contents, first * size, (last + 1 - first) * size)
    assert 0 <= place and last < contents.num_digests
    cache_alone(pool, page_id, &entry)
