"""The compiled core: page records, free queue, ref counts, prefix index and hash chains. No policy.

A pool of `num_pages` pages is one array of 32-byte `Page` records, indexed by page id. Invariants, all walked by
`PageStore.check`:

* Record 0 is the null page. It is never handed out, and its links close the free queue into a ring: ``next_free`` is the
  page that is evicted first, ``prev_free`` the one that was freed last.
* A page is in the free queue exactly when its ref count is 0; outside it both links are `NOT_FREE`.
* A page has a prefix entry exactly when ``group`` is not `NO_GROUP`. The index maps (128-bit key, group) to the page that was
  cached first under it; later pages with the same content hang behind it in a ring of `Links`, in the order they were cached,
  and have `TWIN` set in ``group``, as has the first.
* The index is an open-addressing table with linear probing, filled to a half at most. Deletion shifts entries back
  (Knuth, The Art of Computer Programming, vol. 3, 6.4, algorithm R), so there are no tombstones and a miss stays short forever.

A page table is one int32 array of rows; `TableRows` keeps beside it which windows of 64 columns changed since they were last
sent to the device. Invariants: a row holds zeros from ``extent`` on, and ``num_pages <= extent`` unless the user wrote the
arrays himself.

A call checks everything first, then commits and cannot fail; a list that turns out wrong half-way is rolled back exactly.
Each store has a lock: calls from several threads are serialised, and long ones let the other threads run.
"""

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

import os
from operator import index as as_index

import numpy as np

from pagepool.errors import (
    ArgumentError,
    ArgumentTypeError,
    DoubleFreeError,
    IntegrityError,
    OutOfPagesError,
    PageHashError,
    PageIdError,
    RowIndexError,
    RowOverflowError,
)
from pagepool.hashing import HashNames, PageHash, PageHashWithGroupId

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    unsigned long long PyLong_AsUnsignedLongLongMask(object value) except? -1

cdef enum:
    NULL_PAGE = 0
    NOT_FREE = -1             # links of a page outside the free queue
    NO_GROUP = -1             # group of a page without a prefix entry
    TWIN = 1 << 30            # flag in Page.group: other pages have the same content
    MAX_GROUP = (1 << 30) - 1
    MAX_PAGES = 1 << 30
    RELEASE_GIL_AT = 1024     # pages of work from which other Python threads are let run meanwhile
    WINDOW = 64               # columns of a page table that are sent to the device together
    CACHE_LINE = 64           # bytes

cdef struct Page:             # 32 bytes, two to a cache line
    uint64_t key_lo           # digest of the content; meaningful while group is not NO_GROUP
    uint64_t key_hi
    int32_t ref_cnt           # holders; 0: free
    int32_t prev_free         # page ids; NOT_FREE outside the queue
    int32_t next_free
    int32_t group             # cache group of the prefix entry, with the TWIN flag; NO_GROUP: not cached

cdef struct Slot:             # one slot of the prefix index
    uint32_t tag              # hash of key and group; its low bits are the home slot
    int32_t page_id           # page cached first under the key; NULL_PAGE: empty

cdef struct Links:
    int32_t prev
    int32_t next

cdef struct Digest:
    uint64_t lo
    uint64_t hi

cdef struct Range:            # half-open range of page ids that may hit
    int32_t start
    int32_t stop

cdef struct Rows:
    int32_t *table            # [num_rows, num_columns] page ids
    int32_t *num_pages        # [num_rows]
    int32_t *extent           # [num_rows] leading columns that may hold something other than 0, here or on the device
    uint8_t *is_dirty         # [num_rows, num_windows] windows not sent yet
    uint8_t *is_row_dirty     # [num_rows] whether any window of the row is
    Py_ssize_t num_rows
    Py_ssize_t num_columns
    Py_ssize_t num_windows    # of a row
    Py_ssize_t width          # columns of a window: WINDOW, or all of a narrower table
    int64_t version           # moves with each change

cdef struct Append:           # ids to put behind those of a row
    Rows *rows
    Py_ssize_t row
    const int32_t *ids
    Py_ssize_t n

cdef struct Pool:
    Page *pages
    Slot *slots               # NULL: no prefix caching
    Links *twins              # rings of pages with the same content, valid while TWIN is set
    Links *shard_links        # free queue of each shard, closed by the record num_pages + shard; NULL: no shards yet
    int32_t *shard_num_free
    uint64_t multiplier       # odd and secret: which slots collide cannot be foreseen
    uint32_t mask             # slots - 1
    int32_t num_pages
    int32_t num_free
    int32_t num_shards        # 0: no shards yet
    int32_t pages_per_shard
    int32_t num_keys          # distinct (key, group) in the index
    int64_t num_allocated     # pages, since construction
    int64_t num_freed
    int64_t num_evicted
    int64_t num_cached


# SipHash-2-4 with 128-bit output: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and its reference code.

cdef struct SipState:
    uint64_t v0
    uint64_t v1
    uint64_t v2
    uint64_t v3


cdef inline uint64_t rotate(uint64_t x, int bits) noexcept nogil:
    return (x << bits) | (x >> (64 - bits))


cdef inline void sip_round(SipState *s) noexcept nogil:
    s.v0 += s.v1
    s.v1 = rotate(s.v1, 13) ^ s.v0
    s.v0 = rotate(s.v0, 32)
    s.v2 += s.v3
    s.v3 = rotate(s.v3, 16) ^ s.v2
    s.v0 += s.v3
    s.v3 = rotate(s.v3, 21) ^ s.v0
    s.v2 += s.v1
    s.v1 = rotate(s.v1, 17) ^ s.v2
    s.v2 = rotate(s.v2, 32)


cdef inline void sip_absorb(SipState *s, uint64_t word) noexcept nogil:
    s.v3 ^= word
    sip_round(s)
    sip_round(s)
    s.v0 ^= word


cdef inline SipState sip_start(Digest key) noexcept nogil:
    cdef SipState s
    s.v0 = key.lo ^ <uint64_t>0x736f6d6570736575
    s.v1 = key.hi ^ <uint64_t>0x646f72616e646f6d ^ 0xee
    s.v2 = key.lo ^ <uint64_t>0x6c7967656e657261
    s.v3 = key.hi ^ <uint64_t>0x7465646279746573
    return s


cdef inline Digest sip_finish(SipState *s, uint64_t num_bytes, uint64_t tail) noexcept nogil:
    """`tail`: the last ``num_bytes % 8`` bytes of the message, little-endian."""
    cdef Digest digest
    cdef int _
    sip_absorb(s, (num_bytes << 56) | tail)
    s.v2 ^= 0xee
    for _ in range(4):
        sip_round(s)
    digest.lo = s.v0 ^ s.v1 ^ s.v2 ^ s.v3
    s.v1 ^= 0xdd
    for _ in range(4):
        sip_round(s)
    digest.hi = s.v0 ^ s.v1 ^ s.v2 ^ s.v3
    return digest


cdef inline Digest sip_finish_bytes(
    SipState *s, uint64_t num_before, const uint8_t *data, Py_ssize_t size
) noexcept nogil:
    """Absorb `data` and finish. `num_before` bytes, a multiple of 8, were absorbed already."""
    cdef uint64_t word
    cdef Py_ssize_t i
    for i in range(size // 8):
        memcpy(&word, data + 8 * i, 8)
        sip_absorb(s, word)
    word = 0
    memcpy(&word, data + size // 8 * 8, size % 8)
    return sip_finish(s, num_before + size, word)


cdef inline Digest hash_after(Digest key, Digest parent, const uint8_t *data, Py_ssize_t size) noexcept nogil:
    """Digest of the parent's 16 bytes followed by `data`: one link of a chain."""
    cdef SipState s = sip_start(key)
    sip_absorb(&s, parent.lo)
    sip_absorb(&s, parent.hi)
    return sip_finish_bytes(&s, 16, data, size)


cdef void hash_pages(
    Digest key, Digest parent, const int32_t *tokens, Py_ssize_t page_size, Digest *out, Py_ssize_t num_pages
) noexcept nogil:
    """The digests of consecutive pages, each from the one before."""
    cdef Py_ssize_t i
    for i in range(num_pages):
        parent = hash_after(key, parent, <const uint8_t *>(tokens + i * page_size), page_size * sizeof(int32_t))
        out[i] = parent


cdef Digest digest_of_bytes(bytes data) except *:
    cdef Digest digest
    if len(data) != 16:
        raise ArgumentError(f"key: got {len(data)} bytes, allowed: 16")
    memcpy(&digest, <const char *>data, 16)
    return digest


cdef Digest digest_of_int(object value) except *:
    """OverflowError unless `value` is an int of 128 bits."""
    cdef uint64_t high = value >> 64
    return Digest(PyLong_AsUnsignedLongLongMask(value), high)


cdef inline object int_of_digest(Digest digest):
    return <object>digest.hi << 64 | <object>digest.lo


def siphash128(bytes key not None, bytes data not None) -> bytes:
    """SipHash-2-4 of `data` with 128-bit output under the 16-byte `key`: 16 bytes. O(len(data)).

    >>> siphash128(bytes(range(16)), b"").hex()
    'a3817f04ba25a8e66df67214c7550293'
    """
    cdef SipState s = sip_start(digest_of_bytes(key))
    cdef Digest digest = sip_finish_bytes(&s, 0, data, len(data))
    return (<char *>&digest)[:16]


# Free queue. The caller holds the store's lock and passes page ids within the pool.

cdef inline void link_after(Links *links, int32_t last, int32_t page_id) noexcept nogil:
    """Put `page_id` behind `last` into its ring."""
    cdef int32_t following = links[last].next
    links[page_id].prev = last
    links[page_id].next = following
    links[last].next = page_id
    links[following].prev = page_id


cdef inline void unlink(Links *links, int32_t page_id) noexcept nogil:
    links[links[page_id].prev].next = links[page_id].next
    links[links[page_id].next].prev = links[page_id].prev


cdef inline int32_t shard_of(Pool *pool, int32_t page_id) noexcept nogil:
    return page_id // pool.pages_per_shard


cdef inline bint is_free(Pool *pool, int32_t page_id) noexcept nogil:
    return pool.pages[page_id].prev_free != NOT_FREE


cdef inline void push(Pool *pool, int32_t page_id) noexcept nogil:
    """Put a page outside the queue to its back, which is evicted last."""
    cdef Page *pages = pool.pages
    cdef int32_t last = pages[NULL_PAGE].prev_free
    cdef int32_t shard
    assert 0 < page_id < pool.num_pages and not is_free(pool, page_id)
    pages[page_id].prev_free = last
    pages[page_id].next_free = NULL_PAGE
    pages[last].next_free = page_id
    pages[NULL_PAGE].prev_free = page_id
    pool.num_free += 1
    if pool.num_shards:
        shard = shard_of(pool, page_id)
        link_after(pool.shard_links, pool.shard_links[pool.num_pages + shard].prev, page_id)
        pool.shard_num_free[shard] += 1


cdef inline void pull(Pool *pool, int32_t page_id) noexcept nogil:
    """Take a page out of the queue, wherever it stands in it."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t shard
    assert 0 < page_id < pool.num_pages and is_free(pool, page_id)
    pool.pages[page.prev_free].next_free = page.next_free
    pool.pages[page.next_free].prev_free = page.prev_free
    page.prev_free = NOT_FREE
    page.next_free = NOT_FREE
    pool.num_free -= 1
    if pool.num_shards:
        shard = shard_of(pool, page_id)
        unlink(pool.shard_links, page_id)
        pool.shard_num_free[shard] -= 1


cdef void link_shards(Pool *pool) noexcept nogil:
    """Build the queue of each shard from the whole one. O(free pages)."""
    cdef int32_t page_id = pool.pages[NULL_PAGE].next_free
    cdef int32_t shard
    for shard in range(pool.num_shards):
        pool.shard_links[pool.num_pages + shard].prev = pool.num_pages + shard
        pool.shard_links[pool.num_pages + shard].next = pool.num_pages + shard
    while page_id != NULL_PAGE:
        shard = shard_of(pool, page_id)
        link_after(pool.shard_links, pool.shard_links[pool.num_pages + shard].prev, page_id)
        pool.shard_num_free[shard] += 1
        page_id = pool.pages[page_id].next_free


# Prefix index.

cdef inline uint32_t tag_of(Pool *pool, uint64_t key_lo, int32_t group) noexcept nogil:
    return <uint32_t>(((key_lo ^ <uint64_t>group << 40) * pool.multiplier) >> 32)


cdef inline bint has_key(Page *page, Digest key, int32_t group) noexcept nogil:
    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~TWIN) == group


cdef inline int32_t find(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The page cached first under the key, or NULL_PAGE."""
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = tag & pool.mask
    while pool.slots[i].page_id != NULL_PAGE:
        if pool.slots[i].tag == tag and has_key(&pool.pages[pool.slots[i].page_id], key, group):
            return pool.slots[i].page_id
        i = (i + 1) & pool.mask
    return NULL_PAGE


cdef inline int32_t find_within(Pool *pool, Digest key, int32_t group, Range ids) noexcept nogil:
    """The page cached first under the key among those with an id in `ids`, or NULL_PAGE. O(pages of equal content)."""
    cdef int32_t first = find(pool, key, group)
    cdef int32_t page_id = first
    if first == NULL_PAGE:
        return NULL_PAGE
    while not ids.start <= page_id < ids.stop:
        if not pool.pages[page_id].group & TWIN:
            return NULL_PAGE
        page_id = pool.twins[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline void enter(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Give a page without an entry the key. The index cannot be full: it has a slot for every two pages and more."""
    cdef Page *page = &pool.pages[page_id]
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = tag & pool.mask
    cdef int32_t first
    assert 0 < page_id < pool.num_pages and page.group == NO_GROUP
    page.key_lo = key.lo
    page.key_hi = key.hi
    page.group = group
    pool.num_cached += 1
    while pool.slots[i].page_id != NULL_PAGE:
        first = pool.slots[i].page_id
        if pool.slots[i].tag == tag and has_key(&pool.pages[first], key, group):
            join_twins(pool, first, page_id)
            return
        i = (i + 1) & pool.mask
    pool.slots[i].tag = tag
    pool.slots[i].page_id = page_id
    pool.num_keys += 1


cdef void join_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Put `page_id` at the end of the ring that begins with `first`."""
    if not pool.pages[first].group & TWIN:
        pool.twins[first].prev = first
        pool.twins[first].next = first
        pool.pages[first].group |= TWIN
    link_after(pool.twins, pool.twins[first].prev, page_id)
    pool.pages[page_id].group |= TWIN


cdef Py_ssize_t enter_all(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t stride, int32_t group
) noexcept nogil:
    """Enter pages ``ids[start:stop]``, null pages passed over. Returns -1, or, with nothing changed, the index of one that
    has an entry already.
    """
    cdef Py_ssize_t i, j
    for i in range(start, stop):
        if ids[i] == NULL_PAGE:
            continue
        if pool.pages[ids[i]].group != NO_GROUP:
            for j in range(start, i):
                if ids[j] != NULL_PAGE:
                    drop(pool, ids[j])
                    pool.num_cached -= 1
            return i
        enter(pool, ids[i], chain[(i + 1) * stride - 1], group)
    return -1


cdef inline uint32_t slot_holding(Pool *pool, int32_t page_id, uint32_t tag) noexcept nogil:
    """The slot that names `page_id`, or the empty slot that ends the search."""
    cdef uint32_t i = tag & pool.mask
    while pool.slots[i].page_id != page_id and pool.slots[i].page_id != NULL_PAGE:
        i = (i + 1) & pool.mask
    return i


cdef inline void empty_slot(Pool *pool, uint32_t hole) noexcept nogil:
    """Empty a slot and shift back the entries behind it that would no longer be found."""
    cdef uint32_t i = (hole + 1) & pool.mask
    while pool.slots[i].page_id != NULL_PAGE:
        if ((i - (pool.slots[i].tag & pool.mask)) & pool.mask) >= ((i - hole) & pool.mask):
            pool.slots[hole] = pool.slots[i]
            hole = i
        i = (i + 1) & pool.mask
    pool.slots[hole].page_id = NULL_PAGE
    pool.num_keys -= 1


cdef inline void drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the prefix entry of a page that has one."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~TWIN
    cdef uint32_t i = slot_holding(pool, page_id, tag_of(pool, page.key_lo, group))
    assert 0 < page_id < pool.num_pages and page.group != NO_GROUP
    if page.group & TWIN:
        leave_twins(pool, page_id, i)
    else:
        empty_slot(pool, i)
    page.group = NO_GROUP


cdef void leave_twins(Pool *pool, int32_t page_id, uint32_t slot) noexcept nogil:
    """`slot` names `page_id` if it was the first of its ring; then the next one takes its place."""
    cdef int32_t following = pool.twins[page_id].next
    unlink(pool.twins, page_id)
    if pool.twins[following].next == following:
        pool.pages[following].group &= ~TWIN
    if pool.slots[slot].page_id == page_id:
        pool.slots[slot].page_id = following


# Pages in lists. Each function checks its whole list first, or undoes what it did.

cdef inline void claim(Pool *pool, int32_t page_id) noexcept nogil:
    """Make a page that was just taken out of the queue its holder's own: no entry, one reference."""
    if pool.pages[page_id].group != NO_GROUP:
        drop(pool, page_id)
        pool.num_evicted += 1
    pool.pages[page_id].ref_cnt = 1
    pool.num_allocated += 1


cdef int32_t take(Pool *pool, int32_t *out, Py_ssize_t n) noexcept nogil:
    """Take the `n` pages at the front of the queue, of which there are enough. Returns NULL_PAGE, or, with nothing
    changed, a page in the queue that somebody gave a reference to.
    """
    cdef int32_t page_id = pool.pages[NULL_PAGE].next_free
    cdef Py_ssize_t i
    for i in range(n):
        if pool.pages[page_id].ref_cnt:
            return page_id
        out[i] = page_id
        page_id = pool.pages[page_id].next_free
    for i in range(n):
        pull(pool, out[i])
        claim(pool, out[i])
    return NULL_PAGE


cdef int32_t take_from_shard(Pool *pool, int32_t *out, Py_ssize_t n, int32_t shard) noexcept nogil:
    """The same for the pages of one shard, in the order of the queue. O(n), whatever the size of the pool."""
    cdef int32_t page_id = pool.shard_links[pool.num_pages + shard].next
    cdef Py_ssize_t i
    for i in range(n):
        if pool.pages[page_id].ref_cnt:
            return page_id
        out[i] = page_id
        page_id = pool.shard_links[page_id].next
    for i in range(n):
        pull(pool, out[i])
        claim(pool, out[i])
    return NULL_PAGE


cdef Py_ssize_t give_back(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil:
    """One reference less for each page, null pages passed over; those that reach 0 go to the back of the queue.
    Returns -1, or, with nothing changed, the index of a page that has no reference to give.
    """
    cdef Py_ssize_t i, at
    cdef int32_t page_id
    for i in range(n):
        at = n - 1 - i if tail_first else i
        page_id = ids[at]
        if page_id == NULL_PAGE:
            continue
        if pool.pages[page_id].ref_cnt == 0:
            undo_give_back(pool, ids, n, i, tail_first)
            return at
        pool.pages[page_id].ref_cnt -= 1
        if pool.pages[page_id].ref_cnt == 0 and not is_free(pool, page_id):
            push(pool, page_id)
            pool.num_freed += 1
    return -1


cdef void undo_give_back(
    Pool *pool, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_done, bint tail_first
) noexcept nogil:
    """Undo the first `num_done` steps of `give_back`, last first, so that the queue is as it was."""
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(num_done - 1, -1, -1):
        page_id = ids[n - 1 - i if tail_first else i]
        if page_id == NULL_PAGE:
            continue
        if pool.pages[page_id].ref_cnt == 0 and pool.pages[NULL_PAGE].prev_free == page_id:
            pull(pool, page_id)
            pool.num_freed -= 1
        pool.pages[page_id].ref_cnt += 1


cdef Py_ssize_t find_untouchable(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Index of a page that `touch_all` could not touch, or -1."""
    cdef Py_ssize_t i
    for i in range(n):
        if ids[i] != NULL_PAGE:
            if pool.pages[ids[i]].ref_cnt == 0 and not is_free(pool, ids[i]):
                return i
            if pool.pages[ids[i]].ref_cnt == INT32_MAX:
                return i
    return -1


cdef void touch_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """One reference more for each page, null pages passed over; a free page leaves the queue."""
    cdef Py_ssize_t i
    for i in range(n):
        if ids[i] != NULL_PAGE:
            if pool.pages[ids[i]].ref_cnt == 0:
                pull(pool, ids[i])
            pool.pages[ids[i]].ref_cnt += 1


cdef Py_ssize_t push_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Put pages to the back of the queue. Returns -1, or, with nothing changed, the index of one that must not be there."""
    cdef Py_ssize_t i, bad = -1
    for i in range(n):
        if ids[i] == NULL_PAGE or is_free(pool, ids[i]) or pool.pages[ids[i]].ref_cnt:
            bad = i
            break
        push(pool, ids[i])
    for i in range(bad):
        pull(pool, ids[i])
    return bad


cdef Py_ssize_t count_free(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """How many of the pages are in the free queue."""
    cdef Py_ssize_t i, count = 0
    for i in range(n):
        count += ids[i] != NULL_PAGE and is_free(pool, ids[i])
    return count


# Hits. Group page j is known by the digest of the last hash page in it: chain index (j + 1) * stride - 1.

cdef inline bint hits_all(
    Pool *pool, const Digest *chain, Py_ssize_t at, const int32_t *groups, Py_ssize_t num_groups, Range ids
) noexcept nogil:
    cdef Py_ssize_t g
    for g in range(num_groups):
        if find_within(pool, chain[at], groups[g], ids) == NULL_PAGE:
            return False
    return True


cdef Py_ssize_t find_leading_hits(
    Pool *pool, const Digest *chain, Py_ssize_t stride, Py_ssize_t start, Py_ssize_t stop,
    const int32_t *groups, Py_ssize_t num_groups, Range ids,
) noexcept nogil:
    """End of the pages from `start` on, at most up to `stop`, that hit in all groups."""
    cdef Py_ssize_t j = start
    while j < stop and hits_all(pool, chain, (j + 1) * stride - 1, groups, num_groups, ids):
        j += 1
    return j


cdef Py_ssize_t find_last_run(
    Pool *pool, const Digest *chain, Py_ssize_t stride, Py_ssize_t stop, Py_ssize_t need,
    const int32_t *groups, Py_ssize_t num_groups, Range ids,
) noexcept nogil:
    """End of the last `need` consecutive pages before `stop` that hit in all groups; else of the leading ones that do."""
    cdef Py_ssize_t j, run = 0
    for j in range(stop - 1, -1, -1):
        if hits_all(pool, chain, (j + 1) * stride - 1, groups, num_groups, ids):
            run += 1
            if run >= need:
                return j + run
        else:
            run = 0
    return run


# Rows of a page table. The caller checked row numbers and room.

cdef inline void mark(Rows *rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Columns ``[start, stop)`` of a row are to be sent."""
    if start < stop:
        memset(rows.is_dirty + row * rows.num_windows + start // WINDOW, 1, (stop - 1) // WINDOW - start // WINDOW + 1)
        rows.is_row_dirty[row] = 1
        rows.extent[row] = max(rows.extent[row], <int32_t>stop)


cdef inline void append_ids(Rows *rows, Py_ssize_t row, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t start = rows.num_pages[row]
    if n:  # without ids there is no pointer either, which memcpy must not get
        memcpy(rows.table + row * rows.num_columns + start, ids, n * sizeof(int32_t))
    rows.num_pages[row] += <int32_t>n
    mark(rows, row, start, start + n)


cdef inline bint fits(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Whether ids may stand in a row from column `start` on, and the row's count was not overwritten with nonsense."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    if not (0 <= rows.num_pages[row] <= rows.num_columns and n <= rows.num_columns - start):
        return False
    for i in range(n):
        signs |= ids[i]
    return signs >= 0


cdef Py_ssize_t append_all(const Append *appends, Py_ssize_t num) noexcept nogil:
    """All of them in order, or none; returns how many fit. Counts go up one by one as if it were done, and come back."""
    cdef Py_ssize_t i, num_fitting = 0
    cdef const Append *it = appends
    while num_fitting < num and fits(it.rows, it.row, it.rows.num_pages[it.row], it.ids, it.n):
        it.rows.num_pages[it.row] += <int32_t>it.n
        num_fitting += 1
        it += 1
    for i in range(num_fitting):
        appends[i].rows.num_pages[appends[i].row] -= <int32_t>appends[i].n
    if num_fitting == num:
        for i in range(num):
            append_ids(appends[i].rows, appends[i].row, appends[i].ids, appends[i].n)
            appends[i].rows.version += appends[i].n > 0
    return num_fitting


cdef inline void clear_from(Rows *rows, Py_ssize_t row, Py_ssize_t start) noexcept nogil:
    """Zeros from column `start` to the row's extent, which `start` becomes."""
    cdef Py_ssize_t stop = rows.extent[row]
    if start < stop:
        memset(rows.table + row * rows.num_columns + start, 0, (stop - start) * sizeof(int32_t))
        mark(rows, row, start, stop)
    rows.extent[row] = <int32_t>start


cdef inline void clear_one(Rows *rows, Py_ssize_t row) noexcept nogil:
    rows.num_pages[row] = 0
    clear_from(rows, row, 0)


cdef void copy_row(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(rows.num_pages[src], rows.num_columns))  # the user may write it meanwhile
    if src == tgt:
        return
    memcpy(rows.table + tgt * rows.num_columns, rows.table + src * rows.num_columns, n * sizeof(int32_t))
    rows.num_pages[tgt] = <int32_t>n
    mark(rows, tgt, 0, n)
    clear_from(rows, tgt, n)


cdef void swap_rows(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t i, n = max(rows.extent[src], rows.extent[tgt])
    cdef int32_t *first = rows.table + src * rows.num_columns
    cdef int32_t *second = rows.table + tgt * rows.num_columns
    for i in range(n):
        first[i], second[i] = second[i], first[i]
    rows.num_pages[src], rows.num_pages[tgt] = rows.num_pages[tgt], rows.num_pages[src]
    mark(rows, src, 0, n)
    mark(rows, tgt, 0, n)


cdef Py_ssize_t map_slots(
    const Rows *rows, const int32_t *row_ids, const int32_t *positions, int32_t *slots, Py_ssize_t n, int64_t page_size
) noexcept nogil:
    """Slots of `n` tokens; returns how many there are before the first that is outside the table or does not fit int32."""
    cdef Py_ssize_t i
    cdef uint32_t page, size = <uint32_t>page_size
    cdef int64_t slot, stop = page_size * rows.num_columns
    for i in range(n):
        if not (0 <= row_ids[i] < rows.num_rows and 0 <= positions[i] < stop):
            return i
        page = <uint32_t>positions[i] // size
        slot = rows.table[row_ids[i] * rows.num_columns + page] * page_size + <uint32_t>positions[i] - page * size
        if not INT32_MIN <= slot <= INT32_MAX:
            return i
        slots[i] = <int32_t>slot
    return n


cdef Py_ssize_t count_dirty(Rows *rows, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Dirty windows in rows ``[start, stop)``."""
    cdef Py_ssize_t row, i, count = 0
    for row in range(start, stop):
        if rows.is_row_dirty[row]:
            for i in range(row * rows.num_windows, (row + 1) * rows.num_windows):
                count += rows.is_dirty[i]
    return count


cdef void clean(Rows *rows, Py_ssize_t stop) noexcept nogil:
    """Nothing in rows before `stop` is to be sent any more."""
    memset(rows.is_dirty, 0, stop * rows.num_windows)
    memset(rows.is_row_dirty, 0, stop)


cdef Py_ssize_t pack_windows(
    Rows *rows, Py_ssize_t stop, int32_t *windows, Py_ssize_t stride, int32_t *starts, Py_ssize_t room
) noexcept nogil:
    """Copy up to `room` dirty windows of rows before `stop`, a line of `stride` values each, and where they begin, and mark
    them sent. Returns how many. The last window of a row ends with the row, whatever the row's width.
    """
    cdef Py_ssize_t row, window, column, count = 0
    for row in range(stop):
        if not rows.is_row_dirty[row]:
            continue
        for window in range(rows.num_windows):
            if not rows.is_dirty[row * rows.num_windows + window]:
                continue
            if count == room:
                return count
            column = min(window * WINDOW, rows.num_columns - rows.width)
            memcpy(windows + count * stride, rows.table + row * rows.num_columns + column, rows.width * sizeof(int32_t))
            starts[2 * count] = <int32_t>row
            starts[2 * count + 1] = <int32_t>column
            rows.is_dirty[row * rows.num_windows + window] = 0
            count += 1
        rows.is_row_dirty[row] = 0
    return count


# From Python objects, at the boundary.

cdef object ndarray = np.ndarray
cdef object INT32 = np.dtype(np.int32)


cdef Py_ssize_t size_of(object value, str name, Py_ssize_t lowest=0, Py_ssize_t highest=MAX_PAGES) except -1:
    """`value` as a size; the error says what was got and what is allowed."""
    cdef int overflow = 0
    cdef long long size
    if type(value) is not int:
        try:
            value = as_index(value)
        except TypeError:
            raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: an int") from None
    size = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or not lowest <= size <= highest:
        raise ArgumentError(f"{name}: got {value}, allowed: {lowest} to {highest}")
    return size


cdef inline int32_t int32_of(object value) except? -1:
    """`value` as int32. OverflowError, TypeError: see `explained`. A plain int, the only kind on hot paths, takes 1 ns."""
    cdef long long number
    if PyLong_CheckExact(value):
        number = value
        if INT32_MIN <= number <= INT32_MAX:
            return <int32_t>number
    return int32_of_index(value)


cdef int32_t int32_of_index(object value) except? -1:
    """The rare part of `int32_of`, apart so that the other is inlined."""
    cdef long long number = as_index(value)
    if not INT32_MIN <= number <= INT32_MAX:
        raise OverflowError(f"got {number}")
    return <int32_t>number


cdef object explained(str name, object error):
    """The typed error for what `int32_of` raised."""
    cls = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
    return cls(f"{name}: {error}; allowed: ints that fit int32")


cdef int32_t group_of(object group) except -1:
    return <int32_t>size_of(group, "group", 0, MAX_GROUP)


cdef object as_int32_array(object values, str name):
    """`values`, a NumPy array, as a contiguous int32 vector; no copy where it is one already."""
    if values.ndim != 1 or (values.dtype is not INT32 and values.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"{name}: got an array of {values.dtype} with {values.ndim} dimensions, allowed: one of ints with 1 dimension"
        )
    if values.dtype is INT32 or values.dtype == INT32:
        return np.ascontiguousarray(values, dtype=np.int32)
    if values.size and not (INT32_MIN <= values.min() and values.max() <= INT32_MAX):
        raise ArgumentError(f"{name}: got {values.min()} to {values.max()}, allowed: ints that fit int32")
    return np.ascontiguousarray(values, dtype=np.int32)


cdef list as_list(object values, str name):
    """`values`, if it is a list, or its items as one."""
    if type(values) is list:
        return values
    try:
        values = iter(values)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: a list or an array") from None
    return list(values)


cdef class PageIds:
    """A run of int32 page ids in native memory: what the manager passes around instead of page objects.

    ``len()`` is the number of ids; `to_list` and `to_array` copy them out, 10 ns and 0.3 ns an id.
    """

    cdef int32_t *ids
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity

    def __init__(self, object values=()):
        """Copy ids from a list, a tuple, another iterable of ints, an array of ints, or another PageIds."""
        self.extend(values)

    def __dealloc__(self):
        free(self.ids)

    def __reduce__(self):
        return PageIds, (self.to_list(),)

    def __len__(self):
        return self.num

    def __getitem__(self, Py_ssize_t i) -> int:
        if not 0 <= i < self.num:
            raise IndexError(f"index: got {i}, allowed: 0 to {self.num - 1}")
        return self.ids[i]

    def __contains__(self, value) -> bool:
        cdef Py_ssize_t i
        cdef int32_t wanted = int32_of(value)
        for i in range(self.num):
            if self.ids[i] == wanted:
                return True
        return False

    def __repr__(self):
        return f"{type(self).__name__}({self.to_list()})"

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        """Make room for `num_more` ids, so that adding them cannot fail. Amortised O(1) an id."""
        cdef Py_ssize_t capacity = max(self.num + num_more, 2 * self.capacity, 4)
        cdef int32_t *ids
        if self.num + num_more <= self.capacity:
            return 0
        ids = <int32_t *>realloc(self.ids, capacity * sizeof(int32_t))
        if ids == NULL:
            raise MemoryError(f"{capacity} int32 values")
        self.ids = ids
        self.capacity = capacity
        return 0

    cdef int add(self, const int32_t *ids, Py_ssize_t n) except -1:
        self.reserve(n)
        if n:
            memcpy(self.ids + self.num, ids, n * sizeof(int32_t))
        self.num += n
        return 0

    cdef int add_items(self, list items, Py_ssize_t start, Py_ssize_t stop) except -1:
        """Append ``items[start:stop]``, fewer where the list ends before. A slice would touch each reference count twice."""
        cdef Py_ssize_t i, num = 0
        cdef int32_t number
        stop = min(stop, len(items))
        self.reserve(max(0, stop - start))
        try:
            for i in range(start, stop):
                if i >= len(items):
                    raise ArgumentError("ids: the list shrank while it was read")
                number = int32_of(items[i])  # may run Python code that changes the list, or even self
                if self.num + num >= self.capacity:
                    raise ArgumentError("ids: changed while the list was read")
                self.ids[self.num + num] = number
                num += 1
        except (OverflowError, TypeError) as error:
            raise explained("ids", error) from None
        self.num += num
        return 0

    @staticmethod
    def of_slice(list items not None, start, stop) -> PageIds:
        """The ints ``items[start:stop]``, fewer where the list ends before."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        ids.add_items(items, size_of(start, "start"), size_of(stop, "stop"))
        return ids

    def extend(self, object values) -> None:
        """Append ids; nothing is appended if one of them is not an int that fits int32."""
        cdef const int32_t[::1] array
        cdef PageIds other
        if isinstance(values, PageIds):
            other = values
            self.reserve(other.num)  # first, for `other` may be self
            self.add(other.ids, other.num)
        elif isinstance(values, ndarray):
            array = as_int32_array(values, "ids")
            if array.shape[0]:
                self.add(&array[0], array.shape[0])
        else:
            self.add_items(as_list(values, "ids"), 0, MAX_PAGES)

    def to_list(self) -> list:
        """The ids as a new list."""
        cdef Py_ssize_t i
        return [self.ids[i] for i in range(self.num)]

    def to_array(self):
        """The ids as a new int32 array."""
        cdef int32_t[::1] array
        result = np.empty(self.num, dtype=np.int32)
        if self.num:
            array = result
            memcpy(&array[0], self.ids, self.num * sizeof(int32_t))
        return result

    def shard(self, pages_per_shard) -> int:
        """The data-parallel shard of all the pages, null pages passed over; -1 where they disagree or there are none. O(n)."""
        cdef Py_ssize_t i, size = size_of(pages_per_shard, "pages_per_shard", 1)
        cdef int32_t shard = -1
        for i in range(self.num):
            if self.ids[i] != NULL_PAGE:
                if shard >= 0 and self.ids[i] // size != shard:
                    return -1
                shard = <int32_t>(self.ids[i] // size)
        return shard


@cython.final
@cython.auto_pickle(False)
cdef class _BorrowedIds(PageIds):
    """The ids in an int32 array, not copied. It is not to outlive a call, nor to be extended."""

    cdef const int32_t[::1] array

    cdef int borrow(self, object values) except -1:
        self.array = as_int32_array(values, "ids")
        self.num = self.array.shape[0]
        if self.num:
            self.ids = <int32_t *>&self.array[0]
        return 0

    def __dealloc__(self):
        self.ids = NULL


cdef PageIds as_page_ids(object values):
    """`values` as ids to read during a call; no copy is made of an int32 array or of PageIds."""
    cdef PageIds ids
    cdef _BorrowedIds borrowed
    if isinstance(values, PageIds):
        return values
    if isinstance(values, ndarray):
        borrowed = _BorrowedIds.__new__(_BorrowedIds)
        borrowed.borrow(values)
        return borrowed
    ids = PageIds.__new__(PageIds)
    ids.add_items(as_list(values, "ids"), 0, MAX_PAGES)
    return ids


def lists_of(tuple groups not None) -> tuple:
    """The ids of each PageIds as a list. One group, which is what most models have, costs no loop."""
    if len(groups) == 1:
        return ((<PageIds?>groups[0]).to_list(),)
    return tuple([(<PageIds?>ids).to_list() for ids in groups])


@cython.final
cdef class HeldPages(PageIds):
    """The pages that one request holds in one cache group, in token order.

    ``num_cached_pages`` of them, from the first on, need no prefix entry any more; the first ``num_skipped_pages`` fell out
    of the attention window, and their places hold the null page.
    """

    cdef readonly Py_ssize_t num_cached_pages
    cdef readonly Py_ssize_t num_skipped_pages


@cython.final
cdef class HashChain:
    """The digests of a request's full pages, each made from the one before: SipHash-2-4-128 under a secret key.

    `page_size` is in tokens. With `keep_token_ids` the tokens stay beside the digests. 16 bytes a page; 30 ns a page of 16.
    """

    cdef Digest key
    cdef Digest extra_key     # for extra keys: no tokens can imitate them
    cdef Digest *digests
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t page_size
    cdef PageIds token_ids    # None: not kept
    cdef cython.pymutex lock

    def __cinit__(self, page_size, bytes key not None, bint keep_token_ids=False):
        self.page_size = size_of(page_size, "page_size", 1)
        self.key = digest_of_bytes(key)
        self.extra_key = digest_of_bytes(siphash128(key, b"extra keys"))
        self.token_ids = PageIds() if keep_token_ids else None

    def __dealloc__(self):
        free(self.digests)

    def __reduce__(self):
        raise TypeError("a HashChain holds a secret key and cannot be pickled")

    def __len__(self):
        """Number of pages hashed."""
        return self.num

    def __getitem__(self, Py_ssize_t i) -> int:
        """The digest of page `i` as an int of 128 bits."""
        if not 0 <= i < self.num:
            raise IndexError(f"page: got {i}, allowed: 0 to {self.num - 1}")
        return int_of_digest(self.digests[i])

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        cdef Py_ssize_t capacity = max(self.num + num_more, 2 * self.capacity, 4)
        cdef Digest *digests
        if self.num + num_more <= self.capacity:
            return 0
        digests = <Digest *>realloc(self.digests, capacity * sizeof(Digest))
        if digests == NULL:
            raise MemoryError(f"{capacity} digests")
        self.digests = digests
        self.capacity = capacity
        return 0

    def extend(self, object tokens, bytes extra_keys=b"") -> None:
        """Hash the next pages: a list or an int array with a multiple of `page_size` token ids.

        `extra_keys`, if not empty, enter the first of these pages. O(tokens).
        """
        cdef PageIds copied
        cdef const int32_t[::1] array
        if isinstance(tokens, np.ndarray):
            array = as_int32_array(tokens, "token ids")
            if array.shape[0]:
                self.extend_native(&array[0], array.shape[0], extra_keys)
        else:
            copied = tokens if isinstance(tokens, PageIds) else PageIds(tokens)
            self.extend_native(copied.ids, copied.num, extra_keys)

    cdef int extend_native(self, const int32_t *tokens, Py_ssize_t num_tokens, bytes extra_keys) except -1:
        cdef Py_ssize_t num_pages = num_tokens // self.page_size
        cdef Py_ssize_t page_size
        cdef Digest key, parent
        cdef Digest *out
        if num_tokens % self.page_size:
            raise ArgumentError(f"token ids: got {num_tokens}, allowed: a multiple of the page size {self.page_size}")
        with self.lock:
            self.reserve(num_pages)
            if self.token_ids is not None:
                self.token_ids.add(tokens, num_tokens)
            parent = self.digests[self.num - 1] if self.num else Digest(0, 0)
            if extra_keys:
                parent = hash_after(self.extra_key, parent, extra_keys, len(extra_keys))
            key, out, page_size = self.key, self.digests + self.num, self.page_size
            if num_pages < RELEASE_GIL_AT:
                hash_pages(key, parent, tokens, page_size, out, num_pages)
            else:
                with nogil:
                    hash_pages(key, parent, tokens, page_size, out, num_pages)
            self.num += num_pages
        return 0

    def append_key(self, object key) -> None:
        """Append one page by a 128-bit key that was made elsewhere."""
        cdef Digest digest = digest_of_int(key)
        with self.lock:
            self.reserve(1)
            self.digests[self.num] = digest
            self.num += 1

    def page_token_ids(self, Py_ssize_t i) -> tuple:
        """The tokens of page `i`, or an empty tuple where they are not kept."""
        cdef Py_ssize_t j
        if self.token_ids is None or not 0 <= i < self.token_ids.num // self.page_size:
            return ()
        return tuple([self.token_ids.ids[j] for j in range(i * self.page_size, (i + 1) * self.page_size)])


cdef class PageStore:
    """The records of one pool, its free queue and its prefix index. `pagepool.PagePool` is the door for users.

    Takes and returns page ids. O(num_pages) to make; memory a page: 32 bytes of record, 8 of twin links and 16 to 32 of index
    slots (none of the last two without caching); 8 more once a data-parallel hint was given.
    """

    cdef Pool pool
    cdef int32_t *page_tokens           # [num_pages, tokens_width] tokens of cached pages, their number first; NULL: not kept
    cdef Py_ssize_t tokens_width
    cdef dict views                     # page id -> CachePage, for those that were asked for
    cdef readonly bint is_pool          # record 0 is a page of its own; other stores can grow
    cdef readonly bint enable_caching
    cdef public object names            # HashNames
    cdef cython.pymutex lock

    def __cinit__(self, num_pages, bint enable_caching=True, bint is_pool=True):
        cdef int32_t page_id
        self.is_pool = is_pool
        self.enable_caching = enable_caching
        self.views = {}
        self.names = HashNames()
        self.pool.multiplier = int.from_bytes(os.urandom(8), "little") | 1
        self.resize(size_of(num_pages, "num_pages", 1))
        for page_id in range(1, self.pool.num_pages):
            push(&self.pool, page_id)

    def __dealloc__(self):
        free(self.pool.pages)
        free(self.pool.slots)
        free(self.pool.twins)
        free(self.pool.shard_links)
        free(self.pool.shard_num_free)
        free(self.page_tokens)

    def __reduce__(self):
        raise TypeError("a page store cannot be pickled")

    cdef int resize(self, Py_ssize_t num_pages) except -1:
        """Grow to `num_pages` records; new ones are neither free nor cached. A prefix index is built anew."""
        cdef Py_ssize_t num_slots = 4
        cdef Page *pages
        cdef Links *twins
        cdef Slot *slots
        while num_slots < 2 * num_pages:
            num_slots *= 2
        pages = <Page *>realloc(self.pool.pages, num_pages * sizeof(Page))
        if pages == NULL:
            raise MemoryError(f"{num_pages} page records")
        self.pool.pages = pages
        if self.enable_caching:
            twins = <Links *>realloc(self.pool.twins, num_pages * sizeof(Links))
            if twins == NULL:
                raise MemoryError(f"{num_pages} twin links")
            self.pool.twins = twins
            slots = <Slot *>calloc(num_slots, sizeof(Slot))
            if slots == NULL:
                raise MemoryError(f"{num_slots} index slots")
            free(self.pool.slots)
            self.pool.slots = slots
            self.pool.mask = <uint32_t>(num_slots - 1)
        self.add_records(<int32_t>num_pages)
        return 0

    cdef void add_records(self, int32_t num_pages) noexcept:
        """Initialise the records that `resize` made room for, and enter the cached ones in the new index."""
        cdef Page *pages = self.pool.pages
        cdef Digest key
        cdef int32_t i, group
        if self.pool.num_pages == 0:
            pages[NULL_PAGE] = Page(0, 0, 0, NULL_PAGE, NULL_PAGE, NO_GROUP)
            self.pool.num_pages = 1
        self.pool.num_keys = 0
        for i in range(1, self.pool.num_pages):
            if pages[i].group != NO_GROUP:
                key = Digest(pages[i].key_lo, pages[i].key_hi)
                group = pages[i].group & ~TWIN
                pages[i].group = NO_GROUP
                enter(&self.pool, i, key, group)
        for i in range(self.pool.num_pages, num_pages):
            pages[i] = Page(0, 0, 0, NOT_FREE, NOT_FREE, NO_GROUP)
        self.pool.num_pages = num_pages

    # What it holds.

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free

    @property
    def num_keys(self) -> int:
        """Distinct (hash, group) pairs in the prefix index."""
        return self.pool.num_keys

    @property
    def counters(self) -> tuple:
        """Pages allocated, freed, evicted and cached since the store was made."""
        return self.pool.num_allocated, self.pool.num_freed, self.pool.num_evicted, self.pool.num_cached

    def set_ref_count(self, page_id, ref_cnt) -> None:
        """Overwrite a count; that of the null page is not kept. `check` and the next `take` notice a free page that is held."""
        cdef Py_ssize_t count = size_of(ref_cnt, "ref_cnt", 0, INT32_MAX - 1)
        cdef int32_t checked = self.checked_id(page_id)
        if checked != NULL_PAGE:
            self.pool.pages[checked].ref_cnt = <int32_t>count

    def is_free(self, page_id) -> bool:
        """Whether the page is in the free queue."""
        cdef int32_t checked = self.checked_id(page_id)
        return checked != NULL_PAGE and is_free(&self.pool, checked)

    def neighbours(self, page_id) -> tuple:
        """The pages before and after a page in the free queue; None at the ends and outside the queue."""
        cdef Page *page = &self.pool.pages[self.checked_id(page_id)]
        if not self.is_free(page_id):
            return None, None
        return (
            None if page.prev_free == NULL_PAGE else self.page(page.prev_free),
            None if page.next_free == NULL_PAGE else self.page(page.next_free),
        )

    def ref_counts(self):
        """The ref counts of all pages: int32 array ``[num_pages]``. O(num_pages)."""
        cdef PageIds counts = PageIds()
        cdef int32_t i
        counts.reserve(self.pool.num_pages)
        for i in range(self.pool.num_pages):
            counts.ids[i] = self.pool.pages[i].ref_cnt
        counts.num = self.pool.num_pages
        return counts.to_array()

    def free_ids(self) -> PageIds:
        """The free queue, front first. O(pages in it)."""
        cdef PageIds ids = PageIds()
        cdef int32_t page_id
        with self.lock:
            ids.reserve(self.pool.num_free)
            page_id = self.pool.pages[NULL_PAGE].next_free
            while page_id != NULL_PAGE:
                ids.add(&page_id, 1)
                page_id = self.pool.pages[page_id].next_free
        return ids

    def first_cached_ids(self) -> PageIds:
        """For each key of the prefix index the page cached first under it. O(size of the index)."""
        cdef PageIds ids = PageIds()
        cdef Py_ssize_t i
        if self.pool.slots != NULL:
            with self.lock:
                for i in range(<Py_ssize_t>self.pool.mask + 1):
                    if self.pool.slots[i].page_id != NULL_PAGE:
                        ids.add(&self.pool.slots[i].page_id, 1)
        return ids

    # Page objects.

    def page(self, page_id) -> CachePage:
        """The one view of a page, made when first asked for."""
        return self.view(self.checked_id(page_id))

    cdef CachePage view(self, int32_t page_id):
        """The view of a page within the pool."""
        cdef CachePage view = self.views.get(page_id)
        if view is None:
            view = CachePage.__new__(CachePage)
            view.store = self
            view.index = page_id
            view.page_id = page_id
            self.views[page_id] = view
        return view

    def pages(self, PageIds ids not None) -> list:
        """The views of the pages."""
        cdef Py_ssize_t i
        return [self.view(ids.ids[i]) for i in range(ids.num)]

    def ids_of_pages(self, pages) -> PageIds:
        """The ids of views of this store's pages; PageIdError for another pool's."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t index
        for item in as_list(pages, "pages"):
            index = self.index_of(item)
            if ids.num == ids.capacity:
                ids.reserve(1)
            ids.ids[ids.num] = index
            ids.num += 1
        return ids

    cdef inline int32_t index_of(self, object page) except -1:
        """The record of a view; PageIdError for another pool's."""
        if type(page) is not CachePage:
            raise ArgumentTypeError(f"pages: got {type(page).__name__}, allowed: CachePage")
        if (<CachePage>page).store is not self:
            raise PageIdError(f"page {(<CachePage>page).page_id} belongs to another pool")
        return (<CachePage>page).index

    cdef int32_t checked_id(self, object page_id) except -1:
        cdef int32_t checked
        try:
            checked = int32_of(page_id)
        except (OverflowError, TypeError) as error:
            raise explained("page id", error) from None
        self.check_range(checked)
        return checked

    cdef PageIds checked(self, object page_ids):
        """`page_ids` as ids that lie within the pool; the same object where it is a PageIds."""
        cdef PageIds ids = page_ids if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef Py_ssize_t i
        for i in range(ids.num):
            self.check_range(ids.ids[i])
        return ids

    cdef inline int check_range(self, int32_t page_id) except -1:
        if not 0 <= page_id < self.pool.num_pages:
            raise PageIdError(f"page id: got {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
        return 0

    cdef int32_t checked_shard(self, object shard) except? -1:
        """`shard` as an index; -1, the whole pool, for None."""
        return -1 if shard is None else <int32_t>size_of(shard, "shard", 0, self.pool.num_shards - 1)

    # The free queue.

    def take(self, n, shard=None) -> PageIds:
        """Take `n` pages from the front of the queue (of the shard): ref count 1, prefix entries dropped. O(n)."""
        cdef PageIds ids = PageIds()
        self.take_into(ids, size_of(n, "num_pages"), self.checked_shard(shard))
        return ids

    cdef int take_into(self, PageIds ids, Py_ssize_t n, int32_t shard) except -1:
        """Append `n` new pages to `ids`. `shard` -1: from anywhere."""
        cdef int32_t *out
        cdef int32_t bad
        with self.lock:
            if n > self.count_free_in(shard):
                where = "" if shard < 0 else f" in shard {shard}"
                raise OutOfPagesError(f"pages: {n} asked for, {self.count_free_in(shard)} free{where}")
            ids.reserve(n)
            out = ids.ids + ids.num
            if shard >= 0:
                bad = take_from_shard(&self.pool, out, n, shard)
            elif n < RELEASE_GIL_AT:
                bad = take(&self.pool, out, n)
            else:
                with nogil:
                    bad = take(&self.pool, out, n)
            if bad != NULL_PAGE:
                raise IntegrityError(
                    f"page {bad} is in the free queue with ref count {self.pool.pages[bad].ref_cnt}, allowed: 0"
                )
            ids.num += n
        return 0

    cdef int32_t count_free_in(self, int32_t shard) noexcept:
        return self.pool.num_free if shard < 0 else self.pool.shard_num_free[shard]

    def num_free_in_shard(self, shard) -> int:
        """Free pages of one shard; of the whole pool for None."""
        return self.count_free_in(self.checked_shard(shard))

    def set_shards(self, num_shards) -> None:
        """Keep a free queue for each of `num_shards` equal id ranges from now on. O(free pages) when the number changes."""
        cdef int32_t n = <int32_t>size_of(num_shards, "data_parallel_size", 1, self.pool.num_pages)
        cdef Links *links
        cdef int32_t *counts
        if n == self.pool.num_shards:
            return
        if self.pool.num_pages % n:
            raise ArgumentError(f"data_parallel_size: got {n}, allowed: a divisor of the {self.pool.num_pages} pages")
        links = <Links *>malloc((self.pool.num_pages + n) * sizeof(Links))
        counts = <int32_t *>calloc(n, sizeof(int32_t))
        if links == NULL or counts == NULL:
            free(links)
            free(counts)
            raise MemoryError(f"links of {self.pool.num_pages} pages in {n} shards")
        with self.lock:
            free(self.pool.shard_links)
            free(self.pool.shard_num_free)
            self.pool.shard_links = links
            self.pool.shard_num_free = counts
            self.pool.num_shards = n
            self.pool.pages_per_shard = self.pool.num_pages // n
            link_shards(&self.pool)

    def give_back(self, page_ids, bint tail_first=False) -> None:
        """One reference less for each page; those at 0 go to the back of the queue, in order. Null pages are passed over."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            if ids.num < RELEASE_GIL_AT:
                bad = give_back(&self.pool, ids.ids, ids.num, tail_first)
            else:
                with nogil:
                    bad = give_back(&self.pool, ids.ids, ids.num, tail_first)
        if bad >= 0:
            raise DoubleFreeError(f"page {ids.ids[bad]} (at {bad} of {ids.num}) is freed more often than it is held")

    def touch(self, page_ids) -> None:
        """One reference more for each page; a free page leaves the queue. Null pages are passed over. O(n)."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            bad = find_untouchable(&self.pool, ids.ids, ids.num)
            if bad < 0:
                touch_all(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            raise PageIdError(
                f"page {ids.ids[bad]} cannot be touched: its ref count is {self.pool.pages[ids.ids[bad]].ref_cnt} "
                "and it is not in the free queue"
            )

    def count_free(self, page_ids) -> int:
        """How many of the pages are in the free queue. O(n)."""
        cdef PageIds ids = self.checked(page_ids)
        return count_free(&self.pool, ids.ids, ids.num)

    def pop(self, n) -> PageIds:
        """Take the first `n` pages out of the queue and leave ref counts and prefix entries as they are."""
        cdef PageIds ids = PageIds()
        cdef Py_ssize_t num = size_of(n, "n")
        with self.lock:
            if num > self.pool.num_free:
                raise OutOfPagesError(f"pages: {num} asked for, {self.pool.num_free} free")
            ids.reserve(num)
            while ids.num < num:
                ids.ids[ids.num] = self.pool.pages[NULL_PAGE].next_free
                pull(&self.pool, ids.ids[ids.num])
                ids.num += 1
        return ids

    def remove(self, page_id) -> None:
        """Take a page out of the queue, wherever it stands. O(1)."""
        self.pull_checked(self.checked_id(page_id))

    def remove_page(self, page) -> None:
        """`remove` by its view; PageIdError for another pool's."""
        self.pull_checked(self.index_of(page))

    cdef int pull_checked(self, int32_t page_id) except -1:
        with self.lock:
            if page_id == NULL_PAGE or not is_free(&self.pool, page_id):
                raise PageIdError(f"page {self.page(page_id).page_id} is not in the free queue")
            pull(&self.pool, page_id)
        return 0

    def append_page(self, page) -> None:
        """`append` for one page by its view; PageIdError for another pool's."""
        cdef int32_t page_id = self.index_of(page)
        self.push_checked(&page_id, 1)

    def append(self, page_ids) -> None:
        """Put pages that are not in the queue and not held at its back, in order."""
        cdef PageIds ids = self.checked(page_ids)
        self.push_checked(ids.ids, ids.num)

    cdef int push_checked(self, const int32_t *ids, Py_ssize_t n) except -1:
        cdef Py_ssize_t bad
        with self.lock:
            bad = push_all(&self.pool, ids, n)
        if bad >= 0:
            raise PageIdError(
                f"page {self.page(ids[bad]).page_id} cannot be appended: it is in the free queue, held, or the null page"
            )
        return 0

    def adopt(self, CachePage page not None) -> None:
        """Take over the record of a page that stands alone: `page` becomes a view of this store."""
        cdef PageStore home = page.store
        cdef Page *record = &home.pool.pages[page.index]
        if home is self:
            return
        if home.is_pool or self.is_pool or is_free(&home.pool, page.index):
            raise PageIdError(f"page {page.page_id} belongs to another pool or queue")
        page_hash = page.page_hash
        self.resize(self.pool.num_pages + 1)
        self.pool.pages[self.pool.num_pages - 1].ref_cnt = record.ref_cnt
        del home.views[page.index]
        page.store = self
        page.index = self.pool.num_pages - 1
        self.views[page.index] = page
        if page_hash is not None:
            page.page_hash = page_hash

    # The prefix index.

    def find(self, key, group, start=0, stop=None):
        """The page cached first under a 128-bit int key in a group, among ids in ``[start, stop)``; None if there is none."""
        cdef Digest digest = digest_of_int(key)
        cdef Range ids = Range(start, self.pool.num_pages if stop is None else stop)
        cdef int32_t page_id = NULL_PAGE
        cdef int32_t checked_group = group_of(group)
        if self.enable_caching:
            with self.lock:
                page_id = find_within(&self.pool, digest, checked_group, ids)
        return None if page_id == NULL_PAGE else page_id

    def find_pages(self, key, groups, start=0, stop=None):
        """For each group the view of the page that `find` finds; None if it finds none in one of them."""
        pages = []
        for group in groups:
            page_id = self.find(key, group, start, stop)
            if page_id is None:
                return None
            pages.append(self.view(page_id))
        return pages

    def twins(self, page_id) -> PageIds:
        """All pages with the content of a cached page, in the order they were cached, from this one on."""
        cdef PageIds ids = PageIds()
        cdef int32_t first = self.checked_id(page_id)
        cdef int32_t twin = first
        with self.lock:
            ids.add(&first, 1)
            while self.pool.pages[first].group != NO_GROUP and self.pool.pages[first].group & TWIN:
                twin = self.pool.twins[twin].next
                if twin == first:
                    break
                ids.add(&twin, 1)
        return ids

    def enter(self, page_id, key, group) -> None:
        """Give a page without a prefix entry one."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef Digest digest = digest_of_int(key)
        cdef int32_t checked_group = group_of(group)
        if not self.enable_caching:
            raise PageHashError("prefix caching is off")
        with self.lock:
            self.check_enterable(checked)
            enter(&self.pool, checked, digest, checked_group)
            self.copy_tokens(checked, None, 0, 0)

    cdef int check_enterable(self, int32_t page_id) except -1:
        if page_id == NULL_PAGE:
            raise PageIdError("the null page cannot be cached")
        if self.pool.pages[page_id].group != NO_GROUP:
            raise PageHashError(f"page {page_id} has a hash already")
        return 0

    def drop(self, page_ids) -> int:
        """Drop the prefix entries of pages; the pages stay where they are. Returns how many had one."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t i
        cdef Py_ssize_t num_dropped = 0
        with self.lock:
            for i in range(ids.num):
                if self.pool.pages[ids.ids[i]].group != NO_GROUP:
                    drop(&self.pool, ids.ids[i])
                    num_dropped += 1
        return num_dropped

    def drop_all(self) -> None:
        """Drop every prefix entry. O(num_pages)."""
        cdef int32_t i
        with self.lock:
            for i in range(1, self.pool.num_pages):
                if self.pool.pages[i].group != NO_GROUP:
                    drop(&self.pool, i)

    def key_of(self, page_id):
        """``(128-bit int key, group)`` of a cached page, or None."""
        cdef Page *page = &self.pool.pages[self.checked_id(page_id)]
        if page.group == NO_GROUP:
            return None
        return int_of_digest(Digest(page.key_lo, page.key_hi)), page.group & ~TWIN

    def page_hash_of(self, page_id):
        """The PageHashWithGroupId of a cached page, or None."""
        found = self.key_of(page_id)
        if found is None:
            return None
        page_hash = self.names.hash_of(found[0]) or PageHash(found[0], self.token_ids_of(page_id))
        return PageHashWithGroupId(page_hash, found[1])

    def keep_token_ids(self, width) -> None:
        """Keep the tokens of pages that `enter_held` enters from now on, `width` at most a page. 4 bytes a token."""
        cdef size_t num_values = size_of(width, "page_size", 1) + 1
        cdef int32_t *page_tokens = <int32_t *>calloc(num_values * self.pool.num_pages, sizeof(int32_t))
        if page_tokens == NULL:
            raise MemoryError(f"{width} token ids for each of {self.pool.num_pages} pages")
        free(self.page_tokens)
        self.page_tokens = page_tokens
        self.tokens_width = num_values

    cdef tuple token_ids_of(self, int32_t page_id):
        cdef int32_t *tokens = self.page_tokens + page_id * self.tokens_width
        cdef int32_t i
        if self.page_tokens == NULL:
            return ()
        return tuple([tokens[1 + i] for i in range(tokens[0])])

    cdef void copy_tokens(self, int32_t page_id, HashChain chain, Py_ssize_t start, Py_ssize_t num_tokens) noexcept:
        """Keep the tokens of a page that begins at token `start` of a chain, or none where the chain does not have them."""
        cdef int32_t *kept = self.page_tokens + page_id * self.tokens_width
        if self.page_tokens == NULL:
            return
        kept[0] = 0
        if chain is not None and chain.token_ids is not None and start + num_tokens <= chain.token_ids.num:
            kept[0] = <int32_t>num_tokens
            memcpy(kept + 1, chain.token_ids.ids + start, num_tokens * sizeof(int32_t))

    # Whole requests.

    def enter_pages(self, PageIds held not None, HashChain chain not None, start, stop, stride, group) -> None:
        """Enter pages ``held[start:stop]`` under their digests of the chain, of which `stride` make a page. All or nothing.

        Null pages are passed over. PageHashError if one is cached already. O(stop - start).
        """
        cdef Py_ssize_t i, bad, num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = size_of(stop, "num_full_pages", 0, min(held.num, chain.num // num_hashes))
        cdef Py_ssize_t first = size_of(start, "num_cached_pages", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef Py_ssize_t num_tokens = num_hashes * chain.page_size
        if last > first and not self.enable_caching:
            raise PageHashError("prefix caching is off")
        if self.page_tokens != NULL and num_tokens >= self.tokens_width:
            raise ArgumentError(f"page size: got {num_tokens} tokens, allowed: {self.tokens_width - 1}, as many as are kept")
        with self.lock:
            for i in range(first, last):
                self.check_range(held.ids[i])
            bad = enter_all(&self.pool, held.ids, first, last, chain.digests, num_hashes, checked_group)
            if bad >= 0:
                raise PageHashError(f"page {held.ids[bad]} (at {bad} of {held.num}) has a hash already")
            for i in range(first, last):
                self.copy_tokens(held.ids[i], chain, i * num_tokens, num_tokens)

    def hold_hits(self, HeldPages held not None, PageIds hits not None) -> None:
        """Append hit pages, which were touched, to what a request holds."""
        held.add(hits.ids, hits.num)
        held.num_cached_pages = held.num

    def hold_new(self, HeldPages held not None, n, shard=None) -> PageIds:
        """Take `n` pages, append them to what a request holds, and return them."""
        cdef PageIds new = PageIds()
        cdef Py_ssize_t num = size_of(n, "num_pages")
        new.reserve(num)
        self.take_into(held, num, self.checked_shard(shard))
        new.add(held.ids + held.num - num, num)
        return new

    def enter_held(self, HeldPages held not None, HashChain chain not None, num_full_pages, stride, group) -> None:
        """Enter the pages of a request that got full: those from ``held.num_cached_pages`` to `num_full_pages`."""
        self.enter_pages(held, chain, held.num_cached_pages, num_full_pages, stride, group)
        held.num_cached_pages = num_full_pages

    def skip(self, HeldPages held not None, first_useful_page) -> None:
        """Free the pages before `first_useful_page`, the last first, and put the null page in their places."""
        cdef Py_ssize_t i, stop = min(size_of(first_useful_page, "first_useful_page"), held.num)
        cdef PageIds skipped
        if stop <= held.num_skipped_pages:
            return
        skipped = PageIds()
        skipped.add(held.ids + held.num_skipped_pages, stop - held.num_skipped_pages)
        self.give_back(skipped, tail_first=True)
        for i in range(held.num_skipped_pages, stop):
            held.ids[i] = NULL_PAGE
        held.num_skipped_pages = stop

    def find_leading_hits(
        self, HashChain chain not None, stride, start, stop, PageIds groups not None, first_id=0, stop_id=None
    ) -> int:
        """End of the group pages from `start` on, at most up to `stop`, that hit in all `groups`. O(pages x groups)."""
        cdef Range ids = Range(first_id, self.pool.num_pages if stop_id is None else stop_id)
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = min(size_of(stop, "stop"), chain.num // num_hashes)
        cdef Py_ssize_t first = size_of(start, "start")
        if not self.enable_caching:
            return first
        with self.lock:
            if last - first < RELEASE_GIL_AT:
                return find_leading_hits(&self.pool, chain.digests, num_hashes, first, last, groups.ids, groups.num, ids)
            with nogil:
                last = find_leading_hits(&self.pool, chain.digests, num_hashes, first, last, groups.ids, groups.num, ids)
        return last

    def find_last_run(
        self, HashChain chain not None, stride, stop, need, PageIds groups not None, first_id=0, stop_id=None
    ) -> int:
        """End of the last `need` consecutive group pages before `stop` that hit in all `groups`; else of the leading ones."""
        cdef Range ids = Range(first_id, self.pool.num_pages if stop_id is None else stop_id)
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = min(size_of(stop, "stop"), chain.num // num_hashes)
        cdef Py_ssize_t run = size_of(need, "need", 1)
        if not self.enable_caching:
            return 0
        with self.lock:
            return find_last_run(&self.pool, chain.digests, num_hashes, last, run, groups.ids, groups.num, ids)

    def fetch_hits(
        self, HashChain chain not None, stride, start, stop, group, first_id=0, stop_id=None
    ) -> PageIds:
        """The pages of one group for ``[0, stop)``: the null page before `start`, from there those cached first."""
        cdef Range ids = Range(first_id, self.pool.num_pages if stop_id is None else stop_id)
        cdef Py_ssize_t i, num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = size_of(stop, "stop", 0, chain.num // num_hashes)
        cdef Py_ssize_t first = size_of(start, "start", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef PageIds hits = PageIds()
        hits.reserve(last)
        with self.lock:
            for i in range(first):
                hits.ids[i] = NULL_PAGE
            for i in range(first, last):
                hits.ids[i] = find_within(&self.pool, chain.digests[(i + 1) * num_hashes - 1], checked_group, ids)
        hits.num = last
        return hits

    def find_stale_hit(self, PageIds hits not None, HashChain chain not None, stride, group) -> int:
        """Index of the first page, null pages aside, that is not cached under its digest any more; -1: none. O(pages)."""
        cdef Py_ssize_t i, num_hashes = size_of(stride, "stride", 1)
        cdef int32_t checked_group = group_of(group)
        cdef PageIds ids = self.checked(hits)
        for i in range(ids.num):
            if i >= chain.num // num_hashes:
                return i
            if ids.ids[i] != NULL_PAGE:
                if not has_key(&self.pool.pages[ids.ids[i]], chain.digests[(i + 1) * num_hashes - 1], checked_group):
                    return i
        return -1

    def count_shared(self, PageIds held not None, num_holders) -> int:
        """How many of the pages, from the first on, have at least `num_holders` references."""
        cdef Py_ssize_t i, need = size_of(num_holders, "num_scheduled_requests")
        for i in range(held.num):
            self.check_range(held.ids[i])
            if self.pool.pages[held.ids[i]].ref_cnt < need:
                return i
        return held.num

    # Integrity.

    def check(self) -> None:
        """Walk every invariant of the module's docstring; IntegrityError names the first page that is wrong. O(num_pages)."""
        with self.lock:
            self.check_queue()
            self.check_shards()
            self.check_records()
            self.check_index()

    cdef int check_queue(self) except -1:
        cdef Page *pages = self.pool.pages
        cdef int32_t previous = NULL_PAGE
        cdef int32_t page_id = pages[NULL_PAGE].next_free
        cdef int32_t count = 0
        while page_id != NULL_PAGE:
            if not 0 < page_id < self.pool.num_pages:
                raise IntegrityError(f"page {previous}: next_free is {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
            if pages[page_id].prev_free != previous:
                raise IntegrityError(f"page {page_id}: prev_free is {pages[page_id].prev_free}, the page before is {previous}")
            if pages[page_id].ref_cnt != 0:
                raise IntegrityError(f"page {page_id} is in the free queue with ref count {pages[page_id].ref_cnt}, allowed: 0")
            count += 1
            previous = page_id
            page_id = pages[page_id].next_free
        if pages[NULL_PAGE].prev_free != previous:
            raise IntegrityError(f"page {previous} ends the free queue, the queue says {pages[NULL_PAGE].prev_free}")
        if count != self.pool.num_free:
            raise IntegrityError(f"the free queue has {count} pages, the pool counts {self.pool.num_free}")
        return 0

    cdef int check_shards(self) except -1:
        """The queue of each shard is the part of the whole queue that lies in the shard, in the same order."""
        cdef PageIds cursors
        cdef int32_t page_id, shard
        if self.pool.num_shards == 0:
            return 0
        cursors = PageIds([self.pool.num_pages + i for i in range(self.pool.num_shards)])
        page_id = self.pool.pages[NULL_PAGE].next_free
        while page_id != NULL_PAGE:
            shard = shard_of(&self.pool, page_id)
            if self.pool.shard_links[cursors.ids[shard]].next != page_id:
                raise IntegrityError(f"page {page_id} is not next in the free queue of shard {shard}")
            cursors.ids[shard] = page_id
            page_id = self.pool.pages[page_id].next_free
        for shard in range(self.pool.num_shards):
            if self.pool.shard_links[cursors.ids[shard]].next != self.pool.num_pages + shard:
                raise IntegrityError(f"page {cursors.ids[shard]} does not end the free queue of shard {shard}")
        return 0

    cdef int check_records(self) except -1:
        cdef Page *page
        cdef int32_t i
        cdef int32_t num_free = 0
        if self.pool.pages[NULL_PAGE].ref_cnt or self.pool.pages[NULL_PAGE].group != NO_GROUP:
            raise IntegrityError("page 0, the null page, is held or cached")
        for i in range(1, self.pool.num_pages):
            page = &self.pool.pages[i]
            num_free += is_free(&self.pool, i)
            if page.ref_cnt < 0 or (self.is_pool and page.ref_cnt == 0 and not is_free(&self.pool, i)):
                raise IntegrityError(f"page {i} has ref count {page.ref_cnt} and is not in the free queue")
            if page.group != NO_GROUP:
                self.check_entry(i)
        if num_free != self.pool.num_free:
            raise IntegrityError(f"{num_free} pages have links of the free queue, it has {self.pool.num_free}")
        return 0

    cdef int check_entry(self, int32_t page_id) except -1:
        """A cached page is found under its key, first or in the ring of the first."""
        cdef Page *page = &self.pool.pages[page_id]
        cdef Digest key = Digest(page.key_lo, page.key_hi)
        cdef int32_t first = NULL_PAGE
        if self.enable_caching:
            first = find(&self.pool, key, page.group & ~TWIN)
        if first == NULL_PAGE:
            raise IntegrityError(f"page {page_id} is cached, but a look-up of its hash finds nothing")
        if not page.group & TWIN:
            if first != page_id:
                raise IntegrityError(f"page {page_id} is cached alone, but a look-up of its hash finds page {first}")
            return 0
        if self.pool.twins[self.pool.twins[page_id].next].prev != page_id:
            raise IntegrityError(f"page {page_id}: the next page of equal content does not link back")
        if not has_key(&self.pool.pages[self.pool.twins[page_id].next], key, page.group & ~TWIN):
            raise IntegrityError(f"page {page_id}: the next page of equal content, {self.pool.twins[page_id].next}, differs")
        return 0

    cdef int check_index(self) except -1:
        """Each slot names a cached page whose key leads back to the slot."""
        cdef Py_ssize_t i
        cdef int32_t page_id, group
        cdef int32_t num_keys = 0
        cdef uint32_t tag
        if self.pool.slots == NULL:
            return 0
        for i in range(<Py_ssize_t>self.pool.mask + 1):
            page_id = self.pool.slots[i].page_id
            if page_id == NULL_PAGE:
                continue
            num_keys += 1
            group = self.pool.pages[page_id].group
            tag = tag_of(&self.pool, self.pool.pages[page_id].key_lo, group & ~TWIN)
            if group == NO_GROUP or self.pool.slots[i].tag != tag:
                raise IntegrityError(f"page {page_id} is named by slot {i} of the prefix index, which is not its own")
            if slot_holding(&self.pool, page_id, self.pool.slots[i].tag) != i:
                raise IntegrityError(f"page {page_id} is named by slot {i} of the prefix index, where a look-up does not end")
        if num_keys != self.pool.num_keys:
            raise IntegrityError(f"the prefix index has {num_keys} keys, the pool counts {self.pool.num_keys}")
        return 0


@cython.final
cdef class CachePage:
    """A view of one page's record. ``pool.pages[i]`` gives it; equal pages are the same object.

    ``CachePage(page_id)`` makes a page that stands alone, to be handed to a `FreeCachePageQueue`.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    """

    cdef PageStore store
    cdef int32_t index                  # record in the store
    cdef readonly object page_id        # the index in a pool, any int for a page made alone

    def __init__(self, page_id, ref_cnt=0):
        """`ref_cnt` must not be negative."""
        cdef PageStore store = PageStore(2, True, False)
        self.page_id = as_index(page_id)
        self.store = store
        self.index = 1
        store.pop(1)
        store.set_ref_count(1, ref_cnt)
        store.views[1] = self

    def __reduce__(self):
        raise TypeError("a CachePage is a view of its pool and cannot be pickled")

    @property
    def ref_cnt(self) -> int:
        """References held to the page; 0: free. Settable, never negative."""
        return self.store.pool.pages[self.index].ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, value):
        self.store.set_ref_count(self.index, value)

    def incr_ref(self) -> None:
        """One reference more."""
        self.store.set_ref_count(self.index, self.ref_cnt + 1)

    def decr_ref(self) -> None:
        """One reference less; DoubleFreeError at 0. The page does not enter the free queue: `PagePool.free_pages` does that."""
        if self.ref_cnt == 0:
            raise DoubleFreeError(f"page {self.page_id} has no reference to give back")
        self.store.set_ref_count(self.index, self.ref_cnt - 1)

    @property
    def page_hash(self):
        """The PageHashWithGroupId that the page is cached under, or None. Setting it enters the page in the prefix index;
        PageHashError if it has one already.
        """
        return self.store.page_hash_of(self.index)

    @page_hash.setter
    def page_hash(self, page_hash):
        if not isinstance(page_hash, PageHashWithGroupId):
            raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHashWithGroupId")
        self.store.enter(self.index, self.store.names.key_of(page_hash.page_hash), page_hash.group_id)

    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
        self.store.drop([self.index])

    @property
    def is_null(self) -> bool:
        """Whether this is the pool's null page."""
        return self.store.is_pool and self.index == NULL_PAGE

    @property
    def is_free(self) -> bool:
        """Whether the page is in the free queue."""
        return self.store.is_free(self.index)

    @property
    def prev_free_page(self):
        """The page before this one in the free queue, or None."""
        return self.store.neighbours(self.index)[0]

    @property
    def next_free_page(self):
        """The page behind this one in the free queue, or None."""
        return self.store.neighbours(self.index)[1]

    def __repr__(self):
        before, behind = self.store.neighbours(self.index)
        return (
            f"CachePage(page_id={self.page_id}, ref_cnt={self.ref_cnt}, page_hash={self.page_hash}, "
            f"prev_free_page={before and before.page_id}, next_free_page={behind and behind.page_id})"
        )


def make_aligned_zeros(shape) -> np.ndarray:
    """An int32 array of zeros that begins at a cache line: whole-table copies are twice as fast from and to it."""
    cdef Py_ssize_t num_values = 1
    for size in shape:
        num_values *= size
    memory = np.zeros(num_values + CACHE_LINE // 4, dtype=np.int32)
    start = -memory.ctypes.data % CACHE_LINE // 4
    return memory[start:start + num_values].reshape(shape)


cdef class TableRows:
    """The host side of a page table: int32 ``[num_rows, num_columns]`` page ids, zeros behind each row's last.

    `pagepool.PageTable` adds the device side. Each change is one native call, notes which windows of 64 columns it touched,
    and moves ``cpu_version``. A wrong call changes nothing.
    """

    cdef Rows rows
    cdef readonly object page_table_cpu         # the buffers, pinned by the memoryviews below
    cdef readonly object num_pages_per_row
    cdef int32_t[:, ::1] table_view
    cdef int32_t[::1] num_pages_view
    cdef int32_t[::1] extent_view
    cdef uint8_t[::1] flags_view
    cdef cython.pymutex lock

    def __init__(self, num_rows, num_columns):
        """Both at least 1."""
        if self.rows.num_rows:
            raise ArgumentError("the rows of a table are made once")
        cdef Py_ssize_t n = size_of(num_rows, "max_num_reqs", 1)
        cdef Py_ssize_t num_windows
        self.rows.num_columns = size_of(num_columns, "max_num_pages_per_req", 1)
        num_windows = (self.rows.num_columns + WINDOW - 1) // WINDOW
        if n * self.rows.num_columns > MAX_PAGES:
            raise ArgumentError(f"page table: got {n} x {self.rows.num_columns}, allowed: {MAX_PAGES} ids in all")
        self.rows.width = min(self.rows.num_columns, WINDOW)
        self.page_table_cpu = make_aligned_zeros((n, self.rows.num_columns))
        self.num_pages_per_row = np.zeros(n, dtype=np.int32)
        self.table_view = self.page_table_cpu
        self.num_pages_view = self.num_pages_per_row
        self.extent_view = np.zeros(n, dtype=np.int32)
        self.flags_view = np.zeros(n * (num_windows + 1), dtype=np.uint8)
        self.rows.table = &self.table_view[0, 0]
        self.rows.num_pages = &self.num_pages_view[0]
        self.rows.extent = &self.extent_view[0]
        self.rows.is_row_dirty = &self.flags_view[0]
        self.rows.is_dirty = self.rows.is_row_dirty + n
        self.rows.num_windows = num_windows
        self.rows.num_rows = n

    def __reduce__(self):
        raise TypeError("a page table cannot be pickled")

    @property
    def max_num_reqs(self) -> int:
        """Number of rows."""
        return self.rows.num_rows

    @property
    def max_num_pages_per_req(self) -> int:
        """Number of columns."""
        return self.rows.num_columns

    @property
    def cpu_version(self) -> int:
        """Moves with each change of the host table."""
        return self.rows.version

    cdef Py_ssize_t checked_row(self, object row) except -1:
        cdef int32_t checked
        try:
            checked = int32_of(row)
        except OverflowError:
            checked = -1
        except TypeError as error:
            raise explained("row", error) from None
        if not 0 <= checked < self.rows.num_rows:
            raise RowIndexError(f"row: got {row}, allowed: 0 to {self.rows.num_rows - 1}")
        return checked

    cdef int check_count(self, Py_ssize_t row) except -1:
        """The user may write `num_pages_per_row`, and must not be able to lead us outside the table."""
        cdef int32_t count = self.rows.num_pages[row]
        if not 0 <= count <= self.rows.num_columns:
            raise IntegrityError(
                f"row {row} has {count} pages, allowed: 0 to {self.rows.num_columns}; num_pages_per_row was overwritten"
            )
        return 0

    cdef int refuse(self, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) except -1:
        """Raise what is wrong with putting `ids` into a row from column `start` on."""
        cdef Py_ssize_t i
        self.check_count(row)
        for i in range(n):
            if ids[i] < 0:
                raise PageIdError(f"page id: got {ids[i]} (at {i}), allowed: at least 0")
        raise RowOverflowError(f"row {row} has {start} pages, {n} more were given, allowed: {self.rows.num_columns} in all")

    # With numbers that were checked: what both one group and several do.

    cdef int replace_at(self, Py_ssize_t row, PageIds ids) except -1:
        with self.lock:
            clear_one(&self.rows, row)
            append_ids(&self.rows, row, ids.ids, ids.num)
            self.rows.version += 1
        return 0

    cdef int clear_at(self, Py_ssize_t row) except -1:
        with self.lock:
            clear_one(&self.rows, row)
            self.rows.version += 1
        return 0

    cdef int move_at(self, Py_ssize_t source, Py_ssize_t target) except -1:
        with self.lock:
            copy_row(&self.rows, source, target)
            self.rows.version += 1
        return 0

    cdef int swap_at(self, Py_ssize_t source, Py_ssize_t target) except -1:
        with self.lock:
            swap_rows(&self.rows, source, target)
            self.rows.version += 1
        return 0

    cdef int mark_at(self, PageIds rows) except -1:
        cdef Py_ssize_t i
        with self.lock:
            for i in range(rows.num):
                mark(&self.rows, rows.ids[i], 0, self.rows.num_columns)
            self.rows.version += 1
        return 0

    cdef PageIds checked_rows(self, object rows):
        """The numbers of `rows`, all for None."""
        numbers = range(self.rows.num_rows) if rows is None else rows
        return PageIds([self.checked_row(row) for row in as_list(numbers, "rows")])

    cdef int check_fits(self, Py_ssize_t row, PageIds ids) except -1:
        """Whether `ids` may fill a row."""
        if not fits(&self.rows, row, 0, ids.ids, ids.num):
            self.refuse(row, 0, ids.ids, ids.num)
        return 0

    def append_row(self, page_ids, row_idx) -> None:
        """Put page ids (a list, or an int32 array) behind those of a row; nothing happens if there are none.

        RowIndexError, RowOverflowError, and PageIdError for a negative id. O(ids).
        """
        cdef Py_ssize_t row = self.checked_row(row_idx)
        cdef PageIds ids = as_page_ids(page_ids)
        cdef Append append = Append(&self.rows, row, ids.ids, ids.num)
        cdef Py_ssize_t start
        cdef bint is_done
        with self.lock:
            start = self.rows.num_pages[row]
            is_done = append_all(&append, 1)
        if not is_done:
            self.refuse(row, start, ids.ids, ids.num)

    def add_row(self, page_ids, row_idx) -> None:
        """Replace a row by page ids. O(ids + pages that the row had)."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        cdef PageIds ids = as_page_ids(page_ids)
        self.check_fits(row, ids)
        self.replace_at(row, ids)

    def clear_row(self, row_idx) -> None:
        """Empty a row. O(pages that it had)."""
        self.clear_at(self.checked_row(row_idx))

    def move_row(self, src, tgt) -> None:
        """Copy a row over another, whose rest becomes zero; the source stays. O(pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.check_count(source)
        self.move_at(source, target)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows. O(pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        self.swap_at(source, self.checked_row(tgt))

    def append_rows_batch(self, page_ids_per_req, req_indices) -> None:
        """`append_row` for a list of ids each and a row each, in order; rows may repeat. All or nothing. O(ids)."""
        cdef _Appends appends = _Appends((self,), as_list(page_ids_per_req, "page_ids"), req_indices)
        for page_ids, row in zip(appends.requests, appends.row_ids, strict=True):
            appends.add(self, row, page_ids)
        appends.commit()

    def mark_dirty(self, rows=None) -> None:
        """Say that the user wrote into `page_table_cpu` himself: in these rows (a list or an array), or in all."""
        self.mark_at(self.checked_rows(rows))

    def slot_mapping(self, rows, positions, page_size) -> np.ndarray:
        """Slots of tokens: ``table[row, position // page_size] * page_size + position % page_size``, int32 ``[num_tokens]``.

        `rows` and `positions` are int arrays or lists of one length. RowIndexError outside the table, ArgumentError for a slot
        that does not fit int32. O(tokens), native.
        """
        cdef PageIds row_ids = as_page_ids(rows)
        cdef PageIds at = as_page_ids(positions)
        cdef int64_t size = size_of(page_size, "page_size", 1)
        cdef Py_ssize_t bad
        cdef int32_t[::1] slots
        if row_ids.num != at.num:
            raise ArgumentError(f"positions: got {at.num}, allowed: as many as rows, {row_ids.num}")
        result = np.empty(at.num, dtype=INT32)
        if at.num:
            slots = result
            bad = map_slots(&self.rows, row_ids.ids, at.ids, &slots[0], at.num, size)
            if bad < at.num:
                self.refuse_slot(bad, row_ids.ids[bad], at.ids[bad], size)
        return result

    cdef int refuse_slot(self, Py_ssize_t i, int32_t row, int32_t position, int64_t page_size) except -1:
        """Raise what is wrong with a token's slot."""
        cdef int64_t num_positions = page_size * self.rows.num_columns
        if 0 <= row < self.rows.num_rows and 0 <= position < num_positions:
            raise ArgumentError(f"slot: row {row}, position {position} (at {i}), allowed: slots that fit int32")
        raise RowIndexError(
            f"row {row}, position {position} (at {i}), "
            f"allowed: rows below {self.rows.num_rows}, positions below {num_positions}"
        )

    # For the device side.

    def count_dirty_windows(self, start, stop) -> int:
        """Windows in rows ``[start, stop)`` that were not sent yet."""
        cdef Py_ssize_t last = size_of(stop, "num_reqs", 0, self.rows.num_rows)
        cdef Py_ssize_t first = size_of(start, "start", 0, self.rows.num_rows)
        return count_dirty(&self.rows, first, last)

    def copy_aligned(self) -> np.ndarray:
        """A fresh copy of the whole table, which counts as sent."""
        copied = make_aligned_zeros((self.rows.num_rows, self.rows.num_columns))
        cdef int32_t[:, ::1] view = copied
        cdef int32_t *target = &view[0, 0]
        with self.lock, nogil:
            memcpy(target, self.rows.table, self.rows.num_rows * self.rows.num_columns * sizeof(int32_t))
            clean(&self.rows, self.rows.num_rows)
        return copied

    def clear_rows(self) -> None:
        """Empty all rows, and count them as sent: the device copy is to be made anew. O(pages in the table)."""
        cdef Py_ssize_t row
        with self.lock:
            for row in range(self.rows.num_rows):
                clear_one(&self.rows, row)
            clean(&self.rows, self.rows.num_rows)
            self.rows.version += 1


@cython.final
@cython.auto_pickle(False)
cdef class _Appends:
    """Ids to put behind those of rows, for several rows and tables, gathered before anything changes."""

    cdef Append *items
    cdef Py_ssize_t num
    cdef tuple tables
    cdef list requests
    cdef list row_ids
    cdef list held       # keeps the ids alive
    cdef list targets    # the table of each item, for errors

    def __init__(self, tuple tables, list requests, rows):
        """Room for one append for each request and table."""
        self.tables = tables
        self.requests = requests
        self.row_ids = as_list(rows.tolist() if isinstance(rows, ndarray) else rows, "req_indices")
        self.held = []
        self.targets = []
        if len(requests) != len(self.row_ids):
            raise ArgumentError(f"req_indices: got {len(self.row_ids)}, allowed: as many as requests, {len(requests)}")
        self.items = <Append *>calloc(max(len(requests) * len(tables), 1), sizeof(Append))
        if self.items == NULL:
            raise MemoryError(f"{len(requests)} requests")

    def __dealloc__(self):
        free(self.items)

    cdef int add(self, TableRows table, object row, object page_ids) except -1:
        cdef PageIds ids = as_page_ids(page_ids)
        self.items[self.num] = Append(&table.rows, table.checked_row(row), ids.ids, ids.num)
        self.held.append(ids)
        self.targets.append(table)
        self.num += 1
        return 0

    cdef int commit(self) except -1:
        """Do all, or raise what is wrong with the first that does not fit."""
        cdef TableRows table
        cdef Py_ssize_t num_done
        for table in self.tables:
            table.lock.acquire()
        num_done = append_all(self.items, self.num)
        for table in self.tables:
            table.lock.release()
        if num_done < self.num:
            self.refuse(num_done)
        return 0

    cdef int refuse(self, Py_ssize_t bad) except -1:
        cdef Append *item = self.items + bad
        cdef Py_ssize_t i, start = item.rows.num_pages[item.row]
        for i in range(bad):
            if self.items[i].rows == item.rows and self.items[i].row == item.row:
                start += self.items[i].n
        (<TableRows>self.targets[bad]).refuse(item.row, start, item.ids, item.n)


cdef list by_group_of(object values, Py_ssize_t num_groups):
    """One list of ids for each group."""
    groups = as_list(values, "page_ids")
    if len(groups) != num_groups:
        raise ArgumentError(f"page_ids: got {len(groups)} groups, allowed: {num_groups}")
    return groups


cdef class GroupedRows:
    """The host tables of several cache groups with the same rows. Each call changes all of them, or none."""

    cdef readonly tuple page_tables

    def __init__(self, page_tables):
        """`page_tables` are `TableRows` with the same number of rows, none of them twice."""
        self.page_tables = tuple(as_list(page_tables, "page_tables"))
        for table in self.page_tables:
            if not isinstance(table, TableRows) or table.max_num_reqs != self.page_tables[0].max_num_reqs:
                raise ArgumentError("page_tables: allowed: page tables with one number of rows")
        if len({id(table) for table in self.page_tables}) != len(self.page_tables):
            raise ArgumentError("page_tables: got one twice, allowed: each once")

    def __reduce__(self):
        raise TypeError("a page table cannot be pickled")

    def __len__(self) -> int:
        return len(self.page_tables)

    def __getitem__(self, i):
        return self.page_tables[i]

    cdef Py_ssize_t checked_row(self, object row) except -1:
        """All groups have the same rows; without groups any number will do."""
        return (<TableRows>self.page_tables[0]).checked_row(row) if self.page_tables else 0

    def append_row(self, page_ids, row_idx) -> None:
        """Put a list of page ids for each group behind those of a row."""
        self.append_rows_batch([page_ids], [row_idx])

    def append_rows_batch(self, page_ids_per_req, req_indices) -> None:
        """`append_row` for several rows, in order; rows may repeat. ``page_ids_per_req[i][g]``: ids of group ``g``. O(ids)."""
        cdef Py_ssize_t num_groups = len(self.page_tables)
        cdef _Appends appends = _Appends(self.page_tables, as_list(page_ids_per_req, "page_ids"), req_indices)
        for by_group, row in zip(appends.requests, appends.row_ids, strict=True):
            for table, page_ids in zip(self.page_tables, by_group_of(by_group, num_groups), strict=True):
                appends.add(table, row, page_ids)
        appends.commit()

    def add_row(self, page_ids, row_idx) -> None:
        """Replace a row by a list of page ids for each group."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        cdef list groups = [as_page_ids(ids) for ids in by_group_of(page_ids, len(self.page_tables))]
        for table, ids in zip(self.page_tables, groups, strict=True):
            (<TableRows>table).check_fits(row, ids)
        for table, ids in zip(self.page_tables, groups, strict=True):
            (<TableRows>table).replace_at(row, ids)

    def clear_row(self, row_idx) -> None:
        """Empty a row in all groups."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        for table in self.page_tables:
            (<TableRows>table).clear_at(row)

    def move_row(self, src, tgt) -> None:
        """Copy a row over another in all groups; the source stays."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        for table in self.page_tables:
            (<TableRows>table).check_count(source)
        for table in self.page_tables:
            (<TableRows>table).move_at(source, target)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows in all groups."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        for table in self.page_tables:
            (<TableRows>table).swap_at(source, target)

    def mark_dirty(self, rows=None) -> None:
        """Say that the user wrote into the host tables himself: in these rows, or in all."""
        cdef PageIds checked
        if self.page_tables:
            checked = (<TableRows>self.page_tables[0]).checked_rows(rows)
            for table in self.page_tables:
                (<TableRows>table).mark_at(checked)


cdef Py_ssize_t get_payload_width(tuple tables) except -1:
    """The widest window of any table."""
    cdef Py_ssize_t width = 0
    for item in tables:
        width = max(width, (<TableRows?>item).rows.width)
    return width


def pack_dirty_windows(tuple tables not None, num_reqs, num_lines) -> tuple:
    """A fresh payload for the device, with a line for each dirty window in rows before `num_reqs`: the values, int32
    ``[num_lines, width]``, and the row and the column where they begin in each table, int32 ``[num_tables, num_lines, 2]``.
    These windows count as sent; those that found no room do not.

    Where a line is not for a table, its row is outside it, another one for each line.
    """
    cdef TableRows table
    cdef Py_ssize_t n, lines = size_of(num_lines, "num_lines", 1)
    cdef Py_ssize_t count = 0
    cdef int32_t group
    cdef int32_t[:, ::1] windows
    cdef int32_t[:, :, ::1] starts
    payload = np.zeros((lines, get_payload_width(tables)), dtype=INT32), np.zeros((len(tables), lines, 2), dtype=INT32)
    windows, starts = payload
    for group, item in enumerate(tables):
        table = item
        stop = size_of(num_reqs, "num_reqs", 0, table.rows.num_rows)
        for n in range(lines):
            starts[group, n, 0] = <int32_t>(table.rows.num_rows + n)
        if count < lines:
            with table.lock:
                count += pack_windows(
                    &table.rows, stop, &windows[count, 0], windows.shape[1], &starts[group, count, 0], lines - count
                )
    return payload
