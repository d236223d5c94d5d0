# What the journal and the index hold, copied for events.

from libc.stdint cimport int32_t
from libc.string cimport memcmp, memcpy

from pagepool.core.index cimport find, is_first
from pagepool.core.notes cimport is_journaled
from pagepool.core.records cimport FLAGS, NULL_PAGE, Links, Origin, Pool, digest_of
from pagepool.core.siphash cimport Digest

cdef struct Run:              # cached pages that follow one another in a request
    Origin origin             # of the first
    int32_t group
    int32_t num_pages
    int32_t num_tokens        # that were kept of each

cdef struct Copies:           # of cached pages
    Digest *keys              # [num_pages]
    Run *runs                 # [num_runs]
    int32_t *token_ids        # [num_tokens]
    Py_ssize_t num_pages
    Py_ssize_t num_runs
    Py_ssize_t num_tokens


cdef inline bint continues(const Run *run, const Run *first, const Digest *last_key) noexcept nogil:
    """Whether a run that begins with `first` goes on where `run` ends, with a page of the key `last_key`."""
    return (
        first.origin.place == run.origin.place + run.num_pages
        and memcmp(&first.origin.parent, last_key, sizeof(Digest)) == 0
        and first.group == run.group
        and first.origin.context == run.origin.context
        and first.num_tokens == run.num_tokens
    )


cdef inline void copy_page(const Pool *pool, int32_t page_id, Copies *copies) noexcept nogil:
    """Append a cached page, for which there is room, to the last run or as one of its own."""
    cdef const int32_t *kept = pool.page_tokens + page_id * pool.tokens_width
    cdef int32_t num_tokens = kept[0] if pool.tokens_width else 0
    cdef Run run = Run(pool.journal.notes[page_id].origin, pool.pages[page_id].group & ~FLAGS, 0, num_tokens)
    if not copies.num_runs or not continues(&copies.runs[copies.num_runs - 1], &run, &copies.keys[copies.num_pages - 1]):
        copies.runs[copies.num_runs] = run
        copies.num_runs += 1
    copies.runs[copies.num_runs - 1].num_pages += 1
    copies.keys[copies.num_pages] = digest_of(&pool.pages[page_id])
    copies.num_pages += 1
    if num_tokens:
        memcpy(copies.token_ids + copies.num_tokens, kept + 1, num_tokens * sizeof(int32_t))
        copies.num_tokens += num_tokens


cdef inline void copy_new(const Pool *pool, Copies *copies) noexcept nogil:
    """The first page of each new key, in the order in which these came."""
    cdef int32_t page_id = pool.journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        copy_page(pool, page_id, copies)
        page_id = pool.journal.notes[page_id].new.next


cdef inline void copy_keys(Pool *pool, Copies *copies) noexcept nogil:
    """The keys of the index, and those of the pages' parents."""
    cdef int32_t page_id
    for page_id in range(1, pool.num_pages):
        if is_first(pool, page_id):
            copies.keys[copies.num_pages] = digest_of(&pool.pages[page_id])
            copies.num_pages += 1
            if is_journaled(pool) and pool.journal.notes[page_id].origin.place:
                copies.keys[copies.num_pages] = pool.journal.notes[page_id].origin.parent
                copies.num_pages += 1


cdef inline int32_t find_parent(Pool *pool, int32_t page_id) noexcept nogil:
    """The first page with the key of a cached page's parent, or NULL_PAGE."""
    cdef const Origin *origin = &pool.journal.notes[page_id].origin
    cdef int32_t parent = find(pool, origin.parent, pool.pages[page_id].group & ~FLAGS) if origin.place else NULL_PAGE
    return parent if pool.journal.notes[parent].origin.place + 1 == origin.place else NULL_PAGE


cdef inline void copy_all(Pool *pool, Links *links, Copies *copies) noexcept nogil:
    """The first page of each key, as few runs as can be: `links`, zeros for each page, will say what follows a page."""
    cdef int32_t page_id, parent
    for page_id in range(1, pool.num_pages):
        parent = find_parent(pool, page_id) if is_first(pool, page_id) else NULL_PAGE
        if parent != NULL_PAGE and links[parent].next == NULL_PAGE:
            links[parent].next = page_id
            links[page_id].prev = parent
    for page_id in range(1, pool.num_pages):
        if links[page_id].prev == NULL_PAGE and is_first(pool, page_id):
            parent = page_id
            while parent != NULL_PAGE:
                copy_page(pool, parent, copies)
                parent = links[parent].next
