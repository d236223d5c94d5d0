# Links of rings: each id names the id before it and the id after it.
#
# Always: a ring leads back to where it began, in both directions. An id outside all rings has links that the owner of the array
# chooses.

from libc.stdint cimport int32_t

cdef enum:
    NULL_PAGE = 0             # stands for no page, and closes rings

cdef struct Links:
    int32_t prev
    int32_t next


cdef inline void link_after(Links *links, int32_t last, int32_t page_id) noexcept nogil:
    """Insert `page_id` into a ring, after `last`."""
    cdef int32_t following = links[last].next
    assert page_id != last and links[following].prev == last
    links[page_id].prev = last
    links[page_id].next = following
    links[last].next = page_id
    links[following].prev = page_id


cdef inline void unlink(Links *links, int32_t page_id) noexcept nogil:
    """Take an id out of its ring; its own links stay as they are."""
    assert links[links[page_id].prev].next == page_id and links[links[page_id].next].prev == page_id
    links[links[page_id].prev].next = links[page_id].next
    links[links[page_id].next].prev = links[page_id].prev
