# The journal. Only the net change is noted, so that its size is bounded: a new key that goes again leaves nothing behind.

from libc.stdint cimport int32_t

from pagepool.core.platform cimport rare
from pagepool.core.records cimport (
    FLAGS, NOT_NEW, NULL_PAGE, TWIN, Context, Journal, Links, Note, Origin, Page, Pool, Removal, digest_of, resize,
)


cdef inline bint is_journaled(const Pool *pool) noexcept nogil:
    return rare(pool.journal.notes != NULL)


cdef inline void note_entry(Pool *pool, int32_t page_id, Origin origin) noexcept nogil:
    """Record where a newly cached page came from."""
    cdef Journal *journal = &pool.journal
    journal.notes[page_id].origin = origin
    journal.contexts[origin.context].num_users += 1
    if not pool.pages[page_id].group & TWIN:
        note_new(journal, page_id)


cdef inline void note_new(Journal *journal, int32_t page_id) noexcept nogil:
    """Put a page behind the last in the ring."""
    cdef Note *notes = journal.notes
    cdef int32_t last = notes[NULL_PAGE].new.prev
    notes[page_id].new = Links(last, NULL_PAGE)
    notes[last].new.next = page_id
    notes[NULL_PAGE].new.prev = page_id
    journal.num_new += 1


cdef inline void forget_new(Journal *journal, int32_t page_id) noexcept nogil:
    cdef Note *notes = journal.notes
    cdef Links links = notes[page_id].new
    notes[links.prev].new.next = links.next
    notes[links.next].new.prev = links.prev
    notes[page_id].new = Links(NOT_NEW, NOT_NEW)
    journal.num_new -= 1


cdef inline void note_drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Record that a page loses its entry. Its key stays if other pages have it: the next one becomes the first."""
    cdef Journal *journal = &pool.journal
    cdef Note *note = &journal.notes[page_id]
    cdef Page *page = &pool.pages[page_id]
    journal.contexts[note.origin.context].num_users -= 1
    if note.new.next != NOT_NEW:
        forget_new(journal, page_id)
        if page.group & TWIN:
            note_new(journal, pool.twins[page_id].next)
    elif not page.group & TWIN:
        journal.removed[journal.num_removed] = Removal(digest_of(page), page.group & ~FLAGS)
        journal.num_removed += 1


cdef inline void note_clear(Journal *journal) noexcept nogil:
    """Record that all entries were dropped."""
    journal.num_removed = 0
    journal.is_cleared = 1


cdef inline int32_t add_context(Journal *journal) noexcept:
    """Append a context, held once; -1 if memory is short."""
    cdef int32_t context = journal.num_contexts
    if context & (context - 1) == 0:  # as many as there is room for
        if not resize(<void **>&journal.contexts, (2 * <size_t>context if context else 1) * sizeof(Context)):
            return -1
    journal.contexts[context] = Context(0, 1)
    journal.num_contexts += 1
    return context


cdef inline void end_journal(Journal *journal) noexcept nogil:
    """Begin it anew: what is in it was copied."""
    cdef int32_t following, page_id = journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        following = journal.notes[page_id].new.next
        journal.notes[page_id].new = Links(NOT_NEW, NOT_NEW)
        page_id = following
    journal.notes[NULL_PAGE].new = Links(NULL_PAGE, NULL_PAGE)
    journal.num_new = journal.num_removed = 0
    journal.is_cleared = 0
