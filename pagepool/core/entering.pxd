# Pages that got full are hashed, and entered in the prefix index, before a call ends: several at once, so that memory is
# fetched and two pages are hashed side by side.

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.core.holdings cimport Held, waits_for_loads
from pagepool.core.index cimport enter, home_of, keep_tokens, rank
from pagepool.core.notes cimport is_journaled, note_entry
from pagepool.core.platform cimport fetch, rare
from pagepool.core.records cimport NO_GROUP, NULL_PAGE, Origin, Pool
from pagepool.core.rules cimport Group, is_state
from pagepool.core.siphash cimport Digest, hash_two_after

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
