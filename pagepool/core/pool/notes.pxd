# The journal's notes: which keys came to the prefix index, and which left it, since changes were taken last. They are net
# changes, so their size is bounded: a new key that leaves again is not noted.
#
# Always:
#
# * The ring of new keys, closed by the null page, has `num_new` pages besides it; other pages have the links `NOT_NEW`.
# * A context counts its users and holders, and neither is negative.
# * `num_removed` is 0 when all entries were dropped at once.

from libc.stdint cimport int32_t, uint8_t

from pagepool.core.base cimport Digest
from pagepool.core.pool.links cimport *

cdef enum:
    NOT_NEW = -1              # links of a page outside the journal's ring of new keys

cdef struct Origin:           # how a cached page came to be
    Digest parent             # key of the page before it in its request
    int32_t place             # index of the page in its request; 0: it has no parent
    int32_t context           # extra keys and session of the request, see `EntryJournal.add_context`; 0: neither

cdef struct Note:             # 32 bytes
    Origin origin             # how the page came to be, if it is cached
    Links new                 # ring of the first pages of new keys, closed by the null page; NOT_NEW outside

cdef struct Removal:          # an entry that left the index
    Digest key
    int32_t group

cdef struct Context:
    int32_t num_users         # cached pages and rows with this context
    int32_t num_holders       # callers that hold it

cdef struct Journal:          # keys that came and went since changes were last taken
    Note *notes               # [num_pages]; NULL: there is no journal
    Removal *removed          # [num_pages] keys that left since then
    Context *contexts         # [num_contexts], and room up to the next power of 2
    int32_t num_contexts      # context 0 stands for none
    int32_t num_new
    int32_t num_removed
    uint8_t is_cleared        # all entries were dropped at once, and `removed` is empty
    uint8_t is_told           # events are being made of taken changes, so names and contexts are still needed


cdef inline void link_new(Journal *journal, int32_t page_id) noexcept nogil:
    """Append a page to the ring of new keys."""
    cdef Note *notes = journal.notes
    cdef int32_t last = notes[NULL_PAGE].new.prev
    assert page_id != NULL_PAGE and notes[page_id].new.next == NOT_NEW and notes[last].new.next == NULL_PAGE
    notes[page_id].new = Links(prev=last, next=NULL_PAGE)
    notes[last].new.next = page_id
    notes[NULL_PAGE].new.prev = page_id
    journal.num_new += 1


cdef inline void unlink_new(Journal *journal, int32_t page_id) noexcept nogil:
    """Take a page out of the ring of new keys."""
    cdef Note *notes = journal.notes
    cdef Links links = notes[page_id].new
    assert journal.num_new > 0 and notes[links.prev].new.next == page_id and notes[links.next].new.prev == page_id
    notes[links.prev].new.next = links.next
    notes[links.next].new.prev = links.prev
    notes[page_id].new = Links(prev=NOT_NEW, next=NOT_NEW)
    journal.num_new -= 1


cdef inline void replace_new(Journal *journal, int32_t page_id, int32_t other) noexcept nogil:
    """Replace a page in the ring of new keys by another page with the same key."""
    cdef Note *notes = journal.notes
    cdef Links links = notes[page_id].new
    assert notes[other].new.next == NOT_NEW
    notes[other].new = links
    notes[links.prev].new.next = notes[links.next].new.prev = other
    notes[page_id].new = Links(prev=NOT_NEW, next=NOT_NEW)


cdef inline void use_context(Journal *journal, int32_t context, int32_t change) noexcept nogil:
    """Count a cached page or row that gets a context or, with a change of -1, no longer has it."""
    assert 0 <= context < journal.num_contexts
    journal.contexts[context].num_users += change
    assert journal.contexts[context].num_users >= 0


cdef inline void note_removal(Journal *journal, Digest key, int32_t group) noexcept nogil:
    """Note the removal of a key that was in the index when changes were last taken."""
    journal.removed[journal.num_removed] = Removal(key=key, group=group)
    journal.num_removed += 1


cdef inline void record_clear(Journal *journal) noexcept nogil:
    """Record that all entries were dropped."""
    journal.num_removed = 0
    journal.is_cleared = 1
