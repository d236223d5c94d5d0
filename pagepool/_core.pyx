"""The compiled core: page records, free queue, ref counts, prefix index, hash chains, page tables and running rows.

A pool of `num_pages` pages is one array of 32-byte `Page` records, indexed by page id. Invariants, all walked by
`PageStore.check`:

* Record 0 is the null page. It is never handed out, and its links close the free queue into a ring: ``next_free`` is the
  page that is evicted first, ``prev_free`` the one that was freed last.
* A page is in the free queue exactly when its ref count is 0; outside it both links are `NOT_FREE`.
* A page has a prefix entry exactly when ``group`` is not `NO_GROUP`. The index maps (128-bit key, group) to the page that was
  cached first under it; later pages with the same content hang behind it in a ring of `Links`, in the order they were cached,
  and have `TWIN` set in ``group``, as has the first. In a pool of shards those of each shard are a ring of their own in the
  same order, and the first of each shard are one, in any order: so a shard's first is found in O(shards).
* The index is an open-addressing table with linear probing, filled to a half at most. Deletion shifts entries back
  (Knuth, The Art of Computer Programming, vol. 3, 6.4, algorithm R), so there are no tombstones and a miss stays short forever.

A pool whose changes are told has a `Journal`. Invariants: the ring of new keys has the first page of each key that is in the
index and was not when the changes were taken last; `removed` has each key once that was, and is not since then.

Pages that a refused request hits are `WATCHED`. `num_unwatched` counts those that lost the flag, with their entry or because
they were touched: while it stays, the hits stay, and a refusal is repeated in O(1).

A page table is one int32 array of rows; `TableRows` keeps beside it which windows of 64 columns changed since they were last
sent to the device. Invariants: a row holds zeros from ``extent`` on, and ``num_pages <= extent`` unless the user wrote the
arrays himself.

A running batch keeps the rows' tokens, digests and page ids (`RunningRows`). Invariants: a row's places hold null pages first,
then pages that it has a reference to; the table shows the same; `next_event` is at most the least number of tokens for which a
page is to be taken, entered or skipped or the row is too short, and 0 in a free row.

A call checks everything first, then commits and cannot fail; a list that turns out wrong half-way is rolled back exactly.
Each store, table and batch has a lock, taken in the order batch, store, tables: calls from several threads are serialised, and
long ones let the other threads run. A thread that forks takes all locks first, so that nothing is half done in the child.
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from cpython.mem cimport PyMem_RawRealloc as realloc
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

import os
from itertools import islice
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
    SnapshotError,
    shown,
)
from pagepool.forking import hold_locks, release_locks, replace_lost_locks
from pagepool.hashing import HashNames, PageHash, PageHashWithGroupId

cdef extern from *:
    """
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif
    /* Memory that is touched here and there: huge pages would make all of it resident. */
    static void pagepool_keep_sparse(char *memory, size_t size) {
    #if defined(MADV_NOHUGEPAGE)
        size_t start = ((size_t)memory + 4095) & ~(size_t)4095;
        if (size >= 2 << 20) madvise((void *)start, ((size_t)memory + size - start) & ~(size_t)4095, MADV_NOHUGEPAGE);
    #endif
    }
    """
    void keep_sparse "pagepool_keep_sparse" (char *memory, size_t size) noexcept nogil
    void fetch "__builtin_prefetch" (const void *address) noexcept nogil

cdef extern from *:
    """
    #include <time.h>
    static int64_t pagepool_monotonic_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    int64_t monotonic_ns "pagepool_monotonic_ns" () noexcept nogil

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define PAGEPOOL_GIL_DISABLED 1
    #else
    #define PAGEPOOL_GIL_DISABLED 0
    #endif
    """
    bint GIL_DISABLED "PAGEPOOL_GIL_DISABLED"

cdef extern from *:
    """
    /* Before CPython 3.13 a Cython mutex is a lock that was allocated, and NULL where that failed. */
    #if PY_VERSION_HEX > 0x030d0000
    #define pagepool_has_lock(mutex) 1
    #else
    #define pagepool_has_lock(mutex) (*(void **)(mutex) != NULL)
    #endif
    """
    bint has_lock "pagepool_has_lock" (const void *mutex)

cdef extern from *:
    """
    /* The same locks where nothing is known but their address. Who waits lets other Python threads run. */
    #if PY_VERSION_HEX > 0x030d0000
    #define pagepool_lock(mutex) PyMutex_Lock((PyMutex *)(mutex))
    #define pagepool_unlock(mutex) PyMutex_Unlock((PyMutex *)(mutex))
    #else
    #include "pythread.h"
    static void pagepool_lock(void *mutex) {
        PyThread_type_lock lock = *(PyThread_type_lock *)mutex;
        if (PyThread_acquire_lock(lock, NOWAIT_LOCK)) return;
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    #define pagepool_unlock(mutex) PyThread_release_lock(*(PyThread_type_lock *)(mutex))
    #endif
    static __thread int pagepool_is_forking;
    """
    void lock_at "pagepool_lock" (void *mutex)
    void unlock_at "pagepool_unlock" (void *mutex)
    bint is_forking "pagepool_is_forking"       # this thread, which holds all locks

cdef extern from *:
    """
    /* 0 only in the build that `python -m bench.guards` compares with: what the guards of the hot loops cost. */
    #ifndef PAGEPOOL_GUARDS
    #define PAGEPOOL_GUARDS 1
    #endif
    """
    bint GUARDS "PAGEPOOL_GUARDS"

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    unsigned long long PyLong_AsUnsignedLongLongMask(object value) except? -1

cdef enum:
    NULL_PAGE = 0
    NOT_FREE = -1             # links of a page outside the free queue
    NO_GROUP = -1             # group of a page without a prefix entry
    NOT_NEW = -1              # links of a page whose key is not new to those who are told
    NOT_FIRST = -1            # links of a page that has a twin in its shard that was cached before
    TWIN = 1 << 30            # flag in Page.group: other pages have the same content
    WATCHED = 1 << 29         # flag in Page.group: a refused request hits the page
    FLAGS = TWIN | WATCHED
    MAX_GROUP = WATCHED - 1
    MAX_PAGES = 1 << 30
    RELEASE_GIL_AT = 1024     # pages of work from which other Python threads are let run meanwhile
    WINDOW = 64               # columns of a page table that are sent to the device together
    CACHE_LINE = 64           # bytes
    MAX_TOKENS = 1 << 30      # of a request
    NUM_ENTRIES = 16          # that wait for their slots of the index to come into the cache
    NUM_BUCKETS = 24          # of times: below 1 ms, below 2, 4, ..., 2**22 ms, and longer
    SAMPLE_SHIFT = 7          # in large pools every 128th page is sampled
    LOOK_AHEAD = 8            # hashes by which a look-up has memory fetched before it reads it
    NUM_LOCK_KINDS = 4        # in LockKind
    NUM_SAMPLED = 16          # tokens, and up to twice as many, by which a refused request is known again

cdef enum LockKind:           # in the order in which they are taken
    BATCH_LOCK
    CHAIN_LOCK
    STORE_LOCK
    TABLE_LOCK

cdef struct LockNode:         # of an object with a lock
    LockNode *prev            # others of the kind, in a ring; NULL outside
    LockNode *next
    void *mutex
    bint is_held              # by the thread that forks

cdef struct Page:             # 32 bytes, two to a cache line
    uint64_t key_lo           # digest of the content; meaningful while group is not NO_GROUP
    uint64_t key_hi
    int32_t ref_cnt           # holders; 0: free
    int32_t prev_free         # page ids; NOT_FREE outside the queue
    int32_t next_free
    int32_t group             # cache group of the prefix entry, with its flags; NO_GROUP: not cached

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

cdef struct Stay:             # of a sampled page, in ns of a clock of its own
    int64_t start             # when it was handed out
    int64_t last_use          # then, or when it was last hit

cdef struct Histogram:        # of times
    int64_t counts[NUM_BUCKETS]
    int64_t sum               # ns

cdef struct Residency:        # how long pages stay; sampled
    Stay *stays               # [num_pages / interval + 1]
    int32_t shift             # every 2**shift-th page is sampled
    Histogram lifetimes       # from when a page was handed out to when it was evicted
    Histogram idle_times      # from its last use to then
    Histogram reuse_gaps      # from use to use

cdef struct Origin:           # how a cached page came to be
    Digest parent             # key of the page before it in its request
    int32_t place             # in its request, in pages; 0: it has no parent
    int32_t context           # what else its hash is of, see `PageStore.add_context`; 0: nothing

cdef struct Note:             # 32 bytes, two to a cache line
    Origin origin             # of a cached page
    Links new                 # ring of the first pages of new keys, closed by the null page; NOT_NEW outside

cdef struct Removal:          # an entry that went
    Digest key
    int32_t group

cdef struct Context:
    int32_t num_users         # cached pages and rows that have it
    int32_t num_holders       # who wants it kept all the same

cdef struct Journal:          # which keys came into the prefix index and went since somebody took the changes
    Note *notes               # [num_pages]; NULL: there is no journal
    Removal *removed          # [num_pages] keys that are gone, and were there when the changes were taken last
    Context *contexts         # [num_contexts], and room up to the next power of 2
    int32_t num_contexts      # the first stands for none
    int32_t num_new
    int32_t num_removed
    uint8_t is_cleared        # all entries went at once; nothing is in `removed` then
    uint8_t is_told           # somebody is about to say what he took, so that names and contexts are needed still

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
    int32_t *shard_num_free   # [2 * num_shards]; `PageStore.check` works in the second half
    Links *shard_twins        # rings of those of `twins` that are in one shard; NULL without shards, and without caching
    Links *shard_firsts       # behind them: rings of the first of each shard; NOT_FIRST for the others
    int32_t *page_tokens      # [num_pages, tokens_width] tokens of cached pages, their number first; NULL: not kept
    Py_ssize_t tokens_width
    uint64_t multiplier       # odd and secret: which slots collide cannot be foreseen
    uint32_t mask             # slots - 1
    uint32_t home_shift       # of a tag, to where a look-up begins
    int32_t num_pages
    int32_t num_free
    int32_t num_shards        # 0: no shards yet
    int32_t pages_per_shard
    int32_t num_keys          # distinct (key, group) in the index
    int32_t num_entries       # pages with an entry
    int32_t sample_mask       # of page ids: 0 for those that are sampled
    int32_t num_held_free     # pages in the queue that somebody gave a reference to
    int64_t num_allocated     # pages, since construction
    int64_t num_freed
    int64_t num_evicted
    int64_t num_cached
    int64_t num_dropped       # prefix entries
    int64_t num_reused        # free pages that were taken out of the queue as they are
    int64_t num_unwatched     # pages that lost their WATCHED flag
    int64_t num_queried       # tokens
    int64_t num_hit
    Journal journal
    Residency *residency
    uint8_t is_restored       # it was loaded from a snapshot, and nobody took a reference since

cdef struct Prefix:           # what the leading pages of a request are looked up by in one group
    const Digest *digests
    Py_ssize_t stride         # digests of a page
    Py_ssize_t max_num_pages  # that may hit
    int32_t group
    Range ids

cdef struct Watch:            # what a refusal rests on, with the pool's counters of then
    int64_t num_changes       # of the index: entries and drops
    int64_t num_reused
    int64_t num_unwatched
    Py_ssize_t num_pages      # leading ones that hit
    Py_ssize_t num_held       # hits that would take nothing from the free queue, null pages among them: at most
    bint is_leading           # the hits are the leading pages of the only group, WATCHED, and the next page misses

cdef struct Rules:            # which pages a cache group needs
    int32_t page_size         # tokens; MAX_TOKENS for a state, which has one page
    int32_t window            # tokens that one attends to; 0: no sliding window
    int32_t chunk             # tokens that attend to each other; 0: not chunked

cdef struct Held:             # what a running row has in one group; as HeldPages
    int32_t num_pages
    int32_t num_cached
    int32_t num_skipped

cdef struct Group:
    Rules rules
    int32_t id                # in the prefix index; NO_GROUP: its pages are never cached
    int32_t stride            # hashes of a page
    Held *held                # [num_rows]
    int32_t *page_ids         # [num_rows, ids_stride] what the rows hold; the table is the user's to write
    Py_ssize_t ids_stride
    Rows *rows                # the table
    Py_ssize_t num_columns    # of it

cdef struct ExtraKey:         # what enters the hash of a page besides its tokens
    const uint8_t *data       # NULL ends a row's keys
    Py_ssize_t size
    Py_ssize_t page

cdef struct RowState:         # 32 bytes, two to a cache line
    int32_t num_tokens        # known ones
    int32_t num_computed      # tokens
    int32_t next_event        # of fewer computed tokens to come nothing but counting is due; 0: a free row
    uint32_t stamp            # the call that last named the row
    int32_t num_hits          # tokens hit at admission
    int32_t num_hashed        # pages; in a free row those of its last tokens
    int32_t shard             # where pages come from; -1: anywhere
    uint8_t is_admitted
    uint8_t is_claimed        # admitted, or about to be

cdef struct Link:             # a page to hash
    Digest parent
    Digest *digest            # where the result goes
    const uint8_t *tokens

cdef struct Entry:            # a page to enter in the prefix index
    const Digest *key
    const int32_t *tokens
    int32_t num_tokens
    int32_t page_id
    int32_t group

cdef struct Provenance:       # what its origin will be, once the parent is hashed
    const Digest *parent      # NULL: it has none
    int32_t place
    int32_t context

cdef struct Batch:            # rows that run together; values by row are [num_rows]
    Pool *pool
    Group *groups
    Py_ssize_t num_groups
    Py_ssize_t num_rows
    int32_t max_num_tokens    # of a row
    int32_t hash_page_size    # tokens; 0: no prefix caching
    Digest key
    Digest extra_key
    RowState *states
    uint32_t stamp            # this call
    int32_t *checked_rows     # the rows of this call
    Py_ssize_t num_ascending  # so many of them `copy_ascending` found right, and nobody wrote since
    int32_t *due_rows         # where in this call stand those for which more than counting is due
    Link links[NUM_ENTRIES]
    Py_ssize_t num_links      # that wait to be hashed
    Entry entries[NUM_ENTRIES]
    Provenance provenances[NUM_ENTRIES]  # of the same, where there is a journal
    Py_ssize_t num_entries    # that wait to be entered, once those are
    int32_t *token_ids        # [num_rows, tokens_stride] known tokens
    Py_ssize_t tokens_stride
    Digest *digests           # [num_rows, digests_stride]
    Py_ssize_t digests_stride
    ExtraKey **extra_keys     # NULL for most
    int32_t *contexts         # 0 for most
    bint skips_pages          # whether pages of any group fall out of a window
    bint has_state            # whether any group is a state
    int64_t *admissions       # which admission, or change of places, a row had last
    int64_t num_admissions    # and changes of places, of all rows

cdef struct Amounts:          # a number for each row; stride 0: the same for all
    const int32_t *values
    Py_ssize_t stride

cdef struct Grown:            # a row after a call that grew it
    int32_t row
    int32_t num_tokens
    int32_t num_computed

cdef struct Growth:           # one call that grows rows
    const int32_t *rows
    Py_ssize_t num_rows
    Amounts num_new_tokens
    Amounts num_ahead         # tokens that are to have room only
    const int32_t *token_ids  # one to append to each row first; NULL: none
    Grown *grown              # [num_rows]
    int64_t num_admissions    # of the batch by then
    Py_ssize_t num_due        # rows
    Py_ssize_t max_num_new    # pages
    Py_ssize_t num_new
    int32_t *new_ids          # [max_num_new], as those that follow, in the same memory
    int32_t *new_rows
    int32_t *new_groups


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


# A round waits for its own results most of the time, so two messages of one length take hardly longer than one: `lanes` is 1
# or 2.

cdef inline void sip_rounds(SipState *s, int n, int lanes) noexcept nogil:
    cdef int _
    for _ in range(n):
        sip_round(&s[0])
        if lanes == 2:
            sip_round(&s[1])


cdef inline void sip_absorb(SipState *s, const uint64_t *words, int lanes) noexcept nogil:
    """One word for each message."""
    cdef int lane
    for lane in range(lanes):
        s[lane].v3 ^= words[lane]
    sip_rounds(s, 2, lanes)
    for lane in range(lanes):
        s[lane].v0 ^= words[lane]


cdef inline void sip_start(SipState *s, Digest key, int lanes) noexcept nogil:
    cdef int lane
    for lane in range(lanes):
        s[lane].v0 = key.lo ^ <uint64_t>0x736f6d6570736575
        s[lane].v1 = key.hi ^ <uint64_t>0x646f72616e646f6d ^ 0xee
        s[lane].v2 = key.lo ^ <uint64_t>0x6c7967656e657261
        s[lane].v3 = key.hi ^ <uint64_t>0x7465646279746573


cdef inline void sip_finish(SipState *s, Digest *digests, int lanes) noexcept nogil:
    cdef int lane
    for lane in range(lanes):
        s[lane].v2 ^= 0xee
    sip_rounds(s, 4, lanes)
    for lane in range(lanes):
        digests[lane].lo = s[lane].v0 ^ s[lane].v1 ^ s[lane].v2 ^ s[lane].v3
        s[lane].v1 ^= 0xdd
    sip_rounds(s, 4, lanes)
    for lane in range(lanes):
        digests[lane].hi = s[lane].v0 ^ s[lane].v1 ^ s[lane].v2 ^ s[lane].v3


cdef inline void sip_bytes(SipState *s, const uint8_t **data, Py_ssize_t size, uint64_t num_before, int lanes) noexcept nogil:
    """Absorb the last `size` bytes of each message, little-endian; `num_before`, a multiple of 8, were absorbed already."""
    cdef uint64_t[2] words
    cdef int lane
    cdef Py_ssize_t i
    for i in range(size // 8):
        for lane in range(lanes):
            memcpy(&words[lane], data[lane] + 8 * i, 8)
        sip_absorb(s, words, lanes)
    for lane in range(lanes):
        words[lane] = 0
        memcpy(&words[lane], data[lane] + size // 8 * 8, size % 8)
        words[lane] |= (num_before + size) << 56
    sip_absorb(s, words, lanes)


cdef inline void hash_lanes(
    Digest key, const Digest *parents, const uint8_t **data, Py_ssize_t size, Digest *digests, int lanes
) noexcept nogil:
    """Digests of messages, each its parent's 16 bytes followed by `size` bytes of data."""
    cdef SipState[2] s
    cdef uint64_t[2] words
    cdef int lane
    sip_start(s, key, lanes)
    for lane in range(lanes):
        words[lane] = parents[lane].lo
    sip_absorb(s, words, lanes)
    for lane in range(lanes):
        words[lane] = parents[lane].hi
    sip_absorb(s, words, lanes)
    sip_bytes(s, data, size, 16, lanes)
    sip_finish(s, digests, lanes)


cdef inline Digest hash_after(Digest key, Digest parent, const uint8_t *data, Py_ssize_t size) noexcept nogil:
    """Digest of the parent's 16 bytes followed by `data`: one link of a chain."""
    cdef Digest digest
    hash_lanes(key, &parent, &data, size, &digest, 1)
    return digest


cdef void hash_two_after(
    Digest key, const Digest *parents, const uint8_t **data, Py_ssize_t size, Digest *digests
) noexcept nogil:
    """A link of each of two chains at once."""
    hash_lanes(key, parents, data, size, digests, 2)


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
    """`value` as a key."""
    cdef uint64_t high
    if type(value) is not int:
        value = int(index_of(value, "key"))
    try:
        high = value >> 64
    except OverflowError:
        raise ArgumentError(f"key: got {shown(value)}, allowed: 0 to 2**128 - 1") from None
    return Digest(PyLong_AsUnsignedLongLongMask(value), high)


cdef inline object int_of_digest(Digest digest):
    return <object>digest.hi << 64 | <object>digest.lo


def siphash128(bytes key not None, bytes data not None) -> bytes:
    """SipHash-2-4 of `data` with 128-bit output under the 16-byte `key`: 16 bytes. O(len(data)).

    >>> siphash128(bytes(range(16)), b"").hex()
    'a3817f04ba25a8e66df67214c7550293'
    """
    cdef SipState s
    cdef Digest digest
    cdef const uint8_t *message = data
    sip_start(&s, digest_of_bytes(key), 1)
    sip_bytes(&s, &message, len(data), 0, 1)
    sip_finish(&s, &digest, 1)
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


cdef inline bint is_free(const Pool *pool, int32_t page_id) noexcept nogil:
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


cdef inline uint32_t home_at(const Pool *pool, uint32_t tag) noexcept nogil:
    """The upper bits of a tag: the lower ones of a product depend on the lower ones of a key alone, and could be aimed at."""
    return tag >> pool.home_shift


cdef inline Slot *home_of(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The slot where a look-up begins."""
    return &pool.slots[home_at(pool, tag_of(pool, key.lo, group))]


cdef inline Digest digest_of(const Page *page) noexcept nogil:
    return Digest(page.key_lo, page.key_hi)


cdef inline bint has_key(Page *page, Digest key, int32_t group) noexcept nogil:
    return page.key_lo == key.lo and page.key_hi == key.hi and (page.group & ~FLAGS) == group


cdef inline int32_t find(Pool *pool, Digest key, int32_t group) noexcept nogil:
    """The page cached first under the key, or NULL_PAGE."""
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != NULL_PAGE:
        if pool.slots[i].tag == tag and has_key(&pool.pages[pool.slots[i].page_id], key, group):
            return pool.slots[i].page_id
        i = (i + 1) & pool.mask
    return NULL_PAGE


cdef inline int32_t find_within(Pool *pool, Digest key, int32_t group, Range ids) noexcept nogil:
    """The page cached first under the key among those with an id in `ids`, or NULL_PAGE."""
    cdef int32_t first = find(pool, key, group)
    if first == NULL_PAGE or ids.start <= first < ids.stop:
        return first
    return find_twin(pool, first, ids) if pool.pages[first].group & TWIN else <int32_t>NULL_PAGE


cdef int32_t find_twin(Pool *pool, int32_t first, Range ids) noexcept nogil:
    """The page cached first in `ids` among the twins of `first`, or NULL_PAGE. O(shards) where the ids are those of a shard;
    else O(pages of equal content).
    """
    cdef Links *ring = pool.twins
    cdef int32_t page_id
    if pool.num_shards and shard_of(pool, ids.start) == shard_of(pool, ids.stop - 1):
        ring = pool.shard_twins
        first = find_shard_first(pool, first, shard_of(pool, ids.start))
    page_id = first
    while page_id != NULL_PAGE and not ids.start <= page_id < ids.stop:
        page_id = ring[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef int32_t find_shard_first(Pool *pool, int32_t first, int32_t shard) noexcept nogil:
    """The page cached first in a shard among the twins of `first`, which was cached first of all; or NULL_PAGE. O(shards)."""
    cdef int32_t page_id = first
    while shard_of(pool, page_id) != shard:
        page_id = pool.shard_firsts[page_id].next
        if page_id == first:
            return NULL_PAGE
    return page_id


cdef inline void enter(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Give a page without an entry the key. The index cannot be full: it has a slot for every two pages and more."""
    cdef Page *page = &pool.pages[page_id]
    cdef uint32_t tag = tag_of(pool, key.lo, group)
    cdef uint32_t i = home_at(pool, tag)
    cdef int32_t first
    assert 0 < page_id < pool.num_pages and page.group == NO_GROUP
    page.key_lo = key.lo
    page.key_hi = key.hi
    page.group = group
    pool.num_cached += 1
    pool.num_entries += 1
    while pool.slots[i].page_id != NULL_PAGE:
        first = pool.slots[i].page_id
        if pool.slots[i].tag == tag and has_key(&pool.pages[first], key, group):
            join_twins(pool, first, page_id)
            return
        i = (i + 1) & pool.mask
    pool.slots[i].tag = tag
    pool.slots[i].page_id = page_id
    pool.num_keys += 1


# The journal. Only the net change is noted, so that it has a bounded size: a new key that goes again leaves nothing behind.

cdef inline bint is_journaled(const Pool *pool) noexcept nogil:
    return pool.journal.notes != NULL


cdef inline void note_entry(Pool *pool, int32_t page_id, Origin origin) noexcept nogil:
    """Of a page that was entered just now."""
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


cdef void note_drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Of a page whose entry is about to go. Its key stays where other pages have it too: the next one is the first then."""
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


cdef void note_clear(Journal *journal) noexcept nogil:
    """Of all entries, which were dropped."""
    journal.num_removed = 0
    journal.is_cleared = 1


cdef void join_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Put `page_id` at the end of the ring that begins with `first`. O(1), in a pool of shards O(shards)."""
    if not pool.pages[first].group & TWIN:
        pool.twins[first] = Links(first, first)
        pool.pages[first].group |= TWIN
        if pool.num_shards:
            begin_shard_twins(pool, first)
    link_after(pool.twins, pool.twins[first].prev, page_id)
    pool.pages[page_id].group |= TWIN
    if pool.num_shards:
        join_shard_twins(pool, first, page_id)


cdef inline void begin_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """Let a page be the only one of its shard, and of those that are the first of theirs."""
    pool.shard_twins[page_id] = Links(page_id, page_id)
    pool.shard_firsts[page_id] = Links(page_id, page_id)


cdef void join_shard_twins(Pool *pool, int32_t first, int32_t page_id) noexcept nogil:
    """Put a page that was cached after the twins of `first` behind those of its shard."""
    cdef int32_t shard_first = find_shard_first(pool, first, shard_of(pool, page_id))
    if shard_first == NULL_PAGE:
        begin_shard_twins(pool, page_id)
        link_after(pool.shard_firsts, first, page_id)
    else:
        pool.shard_firsts[page_id] = Links(NOT_FIRST, NOT_FIRST)
        link_after(pool.shard_twins, pool.shard_twins[shard_first].prev, page_id)


cdef void leave_shard_twins(Pool *pool, int32_t page_id) noexcept nogil:
    """If the page was the first of its shard, the next one there takes its place."""
    cdef int32_t following = pool.shard_twins[page_id].next
    unlink(pool.shard_twins, page_id)
    if pool.shard_firsts[page_id].next != NOT_FIRST:
        if following != page_id:
            link_after(pool.shard_firsts, page_id, following)
        unlink(pool.shard_firsts, page_id)


cdef void link_shard_twins(Pool *pool) noexcept nogil:
    """Build the rings of the shards from those of all twins. O(pool + twins x shards)."""
    cdef Py_ssize_t i
    cdef int32_t first, page_id
    for i in range(<Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0):
        first = pool.slots[i].page_id
        if first != NULL_PAGE and pool.pages[first].group & TWIN:
            begin_shard_twins(pool, first)
            page_id = pool.twins[first].next
            while page_id != first:
                join_shard_twins(pool, first, page_id)
                page_id = pool.twins[page_id].next


cdef int32_t add_context(Journal *journal) noexcept:
    """A context that somebody holds, behind the last; -1 where memory is short."""
    cdef int32_t context = journal.num_contexts
    cdef Context *contexts = journal.contexts
    if context & (context - 1) == 0:  # as many as there is room for
        contexts = <Context *>realloc(contexts, (2 * <size_t>context if context else 1) * sizeof(Context))
        if contexts == NULL:
            return -1
        journal.contexts = contexts
    contexts[context] = Context(0, 1)
    journal.num_contexts += 1
    return context


cdef inline bint continues(const Run *run, const Run *first, const Digest *last_key) noexcept nogil:
    """Whether a run that begins with `first` goes on where `run` ends, with a page of the key `last_key`."""
    return (
        first.origin.place == run.origin.place + run.num_pages
        and memcmp(&first.origin.parent, last_key, sizeof(Digest)) == 0
        and first.group == run.group
        and first.origin.context == run.origin.context
        and first.num_tokens == run.num_tokens
    )


cdef void copy_page(const Pool *pool, int32_t page_id, Copies *copies) noexcept nogil:
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


cdef void copy_new(const Pool *pool, Copies *copies) noexcept nogil:
    """The first page of each new key, in the order in which these came."""
    cdef int32_t page_id = pool.journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        copy_page(pool, page_id, copies)
        page_id = pool.journal.notes[page_id].new.next


cdef inline bint is_first(Pool *pool, int32_t page_id) noexcept nogil:
    """Whether a page is cached, and the one that a look-up finds."""
    cdef Page *page = &pool.pages[page_id]
    if page.group == NO_GROUP:
        return False
    return not page.group & TWIN or find(pool, digest_of(page), page.group & ~FLAGS) == page_id


cdef void copy_keys(Pool *pool, Copies *copies) noexcept nogil:
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


cdef void copy_all(Pool *pool, Links *links, Copies *copies) noexcept nogil:
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


cdef void end_journal(Journal *journal) noexcept nogil:
    """Begin it anew: what is in it was copied."""
    cdef int32_t following, page_id = journal.notes[NULL_PAGE].new.next
    while page_id != NULL_PAGE:
        following = journal.notes[page_id].new.next
        journal.notes[page_id].new = Links(NOT_NEW, NOT_NEW)
        page_id = following
    journal.notes[NULL_PAGE].new = Links(NULL_PAGE, NULL_PAGE)
    journal.num_new = journal.num_removed = 0
    journal.is_cleared = 0


cdef inline Origin origin_of(const Digest *chain, Py_ssize_t place, Py_ssize_t stride, int32_t context) noexcept nogil:
    """Of a page of a request, whose pages have `stride` digests each."""
    return Origin(chain[place * stride - 1] if place else Digest(0, 0), <int32_t>place, context)


cdef inline void enter_at(
    Pool *pool, const int32_t *ids, Py_ssize_t i, const Digest *chain, Py_ssize_t stride, int32_t group, int32_t context,
    int32_t first_place,
) noexcept nogil:
    """Enter page ``ids[i]``, which has no entry."""
    cdef Origin origin
    enter(pool, ids[i], chain[(i + 1) * stride - 1], group)
    if is_journaled(pool):
        origin = origin_of(chain, i, stride, context)
        origin.place += first_place
        note_entry(pool, ids[i], origin)


cdef Py_ssize_t enter_all(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t stride, int32_t group,
    int32_t context, int32_t first_place,
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
        enter_at(pool, ids, i, chain, stride, group, context, first_place)
    return -1


cdef inline bint is_entered_otherwise(Pool *pool, int32_t page_id, Digest key, int32_t group) noexcept nogil:
    """Whether a page, null pages aside, has an entry under another key."""
    return page_id != NULL_PAGE and pool.pages[page_id].group != NO_GROUP and not has_key(&pool.pages[page_id], key, group)


cdef Py_ssize_t enter_missing(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t stride, int32_t group,
    int32_t context, int32_t first_place,
) noexcept nogil:
    """`enter_all`, but pages that have the entry already are passed over too, and keep it. Returns -1, or, with nothing
    changed, the index of one that has another.
    """
    cdef Py_ssize_t i
    for i in range(start, stop):
        if is_entered_otherwise(pool, ids[i], chain[(i + 1) * stride - 1], group):
            return i
    for i in range(start, stop):
        if ids[i] != NULL_PAGE and pool.pages[ids[i]].group == NO_GROUP:
            enter_at(pool, ids, i, chain, stride, group, context, first_place)
    return -1


cdef inline void keep_tokens(Pool *pool, int32_t page_id, const int32_t *tokens, Py_ssize_t n) noexcept nogil:
    """Keep the tokens of a page if the pool keeps any, and so many."""
    cdef int32_t *kept = pool.page_tokens + page_id * pool.tokens_width
    if n >= pool.tokens_width:
        n = 0
    if pool.page_tokens != NULL:
        kept[0] = <int32_t>n
        if n:
            memcpy(kept + 1, tokens, n * sizeof(int32_t))


cdef inline uint32_t slot_holding(Pool *pool, int32_t page_id, uint32_t tag) noexcept nogil:
    """The slot that names `page_id`, or the empty slot that ends the search."""
    cdef uint32_t i = home_at(pool, tag)
    while pool.slots[i].page_id != page_id and pool.slots[i].page_id != NULL_PAGE:
        i = (i + 1) & pool.mask
    return i


cdef inline void empty_slot(Pool *pool, uint32_t hole) noexcept nogil:
    """Empty a slot and shift back the entries behind it that would no longer be found."""
    cdef uint32_t i = (hole + 1) & pool.mask
    while pool.slots[i].page_id != NULL_PAGE:
        if ((i - home_at(pool, pool.slots[i].tag)) & pool.mask) >= ((i - hole) & pool.mask):
            pool.slots[hole] = pool.slots[i]
            hole = i
        i = (i + 1) & pool.mask
    pool.slots[hole].page_id = NULL_PAGE
    pool.num_keys -= 1


cdef inline void drop(Pool *pool, int32_t page_id) noexcept nogil:
    """Take the prefix entry of a page that has one."""
    cdef Page *page = &pool.pages[page_id]
    cdef int32_t group = page.group & ~FLAGS
    cdef uint32_t i = slot_holding(pool, page_id, tag_of(pool, page.key_lo, group))
    assert 0 < page_id < pool.num_pages and page.group != NO_GROUP
    if is_journaled(pool):
        note_drop(pool, page_id)
    pool.num_unwatched += (page.group & WATCHED) != 0
    if page.group & TWIN:
        leave_twins(pool, page_id, i)
    else:
        empty_slot(pool, i)
    page.group = NO_GROUP
    pool.num_entries -= 1
    pool.num_dropped += 1


cdef void leave_twins(Pool *pool, int32_t page_id, uint32_t slot) noexcept nogil:
    """`slot` names `page_id` if it was the first of its ring; then the next one takes its place."""
    cdef int32_t following = pool.twins[page_id].next
    unlink(pool.twins, page_id)
    if pool.num_shards:
        leave_shard_twins(pool, page_id)
    if pool.twins[following].next == following:
        pool.pages[following].group &= ~TWIN
    if pool.slots[slot].page_id == page_id:
        pool.slots[slot].page_id = following


cdef Py_ssize_t count_cached(const Pool *pool) noexcept nogil:
    """Pages with a prefix entry."""
    cdef Py_ssize_t i, count = 0
    for i in range(pool.num_pages):
        count += pool.pages[i].group != NO_GROUP
    return count


cdef Py_ssize_t list_cached(const Pool *pool, int32_t *out) noexcept nogil:
    """The pages that the index leads to, those of equal content one after another as they were cached. Returns how many.
    `out` NULL: only counts.
    """
    cdef Py_ssize_t i, count = 0
    cdef int32_t first, page_id
    for i in range(<Py_ssize_t>pool.mask + 1 if pool.slots != NULL else 0):
        first = page_id = pool.slots[i].page_id
        while page_id != NULL_PAGE:
            if out != NULL:
                out[count] = page_id
            count += 1
            page_id = pool.twins[page_id].next if pool.pages[page_id].group & TWIN else first
            if page_id == first:
                break
    return count


cdef int32_t find_held_free(const Pool *pool, Py_ssize_t n) noexcept nogil:
    """A page among the first `n` of the free queue, and of each shard's, that somebody gave a reference to; or NULL_PAGE."""
    cdef int32_t page_id = pool.pages[NULL_PAGE].next_free
    cdef int32_t shard
    cdef Py_ssize_t _
    if pool.num_held_free == 0:
        return NULL_PAGE
    for _ in range(min(n, pool.num_free)):
        if pool.pages[page_id].ref_cnt:
            return page_id
        page_id = pool.pages[page_id].next_free
    for shard in range(pool.num_shards):
        page_id = pool.shard_links[pool.num_pages + shard].next
        for _ in range(min(n, pool.shard_num_free[shard])):
            if pool.pages[page_id].ref_cnt:
                return page_id
            page_id = pool.shard_links[page_id].next
    return NULL_PAGE


# Pages in lists. Each function checks its whole list first, or undoes what it did.

cdef inline Stay *stay_of(Pool *pool, int32_t page_id) noexcept nogil:
    """Of a sampled page."""
    return &pool.residency.stays[page_id >> pool.residency.shift]


cdef void count_time(Histogram *histogram, int64_t duration) noexcept nogil:
    cdef int64_t milliseconds = duration // 1_000_000
    cdef Py_ssize_t bucket = 0
    while milliseconds >> bucket and bucket < NUM_BUCKETS - 1:
        bucket += 1
    histogram.counts[bucket] += 1
    histogram.sum += duration


cdef void note_claim(Pool *pool, int32_t page_id) noexcept nogil:
    """Of a sampled page that is handed out, and evicted for it if it has an entry."""
    cdef Stay *stay = stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    if pool.pages[page_id].group != NO_GROUP:
        count_time(&pool.residency.lifetimes, now - stay.start)
        count_time(&pool.residency.idle_times, now - stay.last_use)
    stay[0] = Stay(now, now)


cdef void note_use(Pool *pool, int32_t page_id) noexcept nogil:
    """Of a sampled page that is hit."""
    cdef Stay *stay = stay_of(pool, page_id)
    cdef int64_t now = monotonic_ns()
    count_time(&pool.residency.reuse_gaps, now - stay.last_use)
    stay.last_use = now


cdef inline void claim(Pool *pool, int32_t page_id) noexcept nogil:
    """Make a page that was just taken out of the queue its holder's own: no entry, one reference."""
    if not page_id & pool.sample_mask:
        note_claim(pool, page_id)
    if pool.pages[page_id].group != NO_GROUP:
        drop(pool, page_id)
        pool.num_evicted += 1
    pool.pages[page_id].ref_cnt = 1
    pool.num_allocated += 1


cdef inline void fetch_entry(Pool *pool, int32_t page_id) noexcept nogil:
    """Have the slot fetched that a page with an entry will leave."""
    cdef Page *page = &pool.pages[page_id]
    if page.group != NO_GROUP:
        fetch(home_of(pool, digest_of(page), page.group & ~FLAGS))


cdef void take(Pool *pool, int32_t *out, Py_ssize_t n) noexcept nogil:
    """Take the `n` pages at the front of the queue, of which there are enough, none of them held (`find_held_free`)."""
    cdef int32_t page_id = pool.pages[NULL_PAGE].next_free
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = page_id
        fetch_entry(pool, page_id)
        page_id = pool.pages[page_id].next_free
    for i in range(n):
        pull(pool, out[i])
        claim(pool, out[i])


cdef void take_from_shard(Pool *pool, int32_t *out, Py_ssize_t n, int32_t shard) noexcept nogil:
    """The same for the pages of one shard, in the order of the queue. O(n), whatever the size of the pool."""
    cdef int32_t page_id = pool.shard_links[pool.num_pages + shard].next
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = page_id
        fetch_entry(pool, page_id)
        page_id = pool.shard_links[page_id].next
    for i in range(n):
        pull(pool, out[i])
        claim(pool, out[i])


cdef inline void take_from(Pool *pool, int32_t *out, Py_ssize_t n, int32_t shard) noexcept nogil:
    """`take` from a shard, or for -1 from the whole pool."""
    pool.is_restored &= n == 0
    if shard < 0:
        take(pool, out, n)
    else:
        take_from_shard(pool, out, n, shard)


cdef inline int32_t count_free_in(Pool *pool, int32_t shard) noexcept nogil:
    return pool.num_free if shard < 0 else pool.shard_num_free[shard]


cdef inline void put_back(Pool *pool, int32_t page_id) noexcept nogil:
    """One reference less for a page that has one; without any it goes to the back of the queue."""
    cdef Page *page = &pool.pages[page_id]
    page.ref_cnt -= 1
    if page.ref_cnt == 0:
        push(pool, page_id)
        pool.num_freed += 1


cdef Py_ssize_t find_outside(const Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Index of an id outside the pool, or -1."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0, last = pool.num_pages - 1
    for i in range(n if GUARDS else 0):  # several at once, for there is no way out
        signs |= ids[i] | <int32_t>(<uint32_t>last - <uint32_t>ids[i])
    if signs < 0:
        for i in range(n):
            if not 0 <= ids[i] <= last:
                return i
    return -1


cdef inline Py_ssize_t find_negative(const int32_t *values, Py_ssize_t n) noexcept nogil:
    """Index of a value below 0, or -1."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    for i in range(n):  # several at once, for there is no way out
        signs |= values[i]
    if signs < 0:
        for i in range(n):
            if values[i] < 0:
                return i
    return -1


cdef Py_ssize_t find_unheld(const Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Index of a page in ``ids[start:stop]``, null pages aside, without any reference; -1: there is none."""
    cdef Py_ssize_t i
    for i in range(start, stop):
        if ids[i] != NULL_PAGE and (pool.pages[ids[i]].ref_cnt == 0 or (pool.num_held_free and is_free(pool, ids[i]))):
            return i
    return -1


cdef Py_ssize_t give_back(Pool *pool, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept nogil:
    """One reference less for each page, null pages passed over; those that reach 0 go to the back of the queue.
    Returns -1, or, with nothing changed, the index of a page that has no reference to give.
    """
    cdef Py_ssize_t i, at
    cdef Page *page
    cdef int32_t left
    if GUARDS and pool.num_held_free:
        at = find_unheld(pool, ids, 0, n)
        if at >= 0:
            return at
    for i in range(n):
        at = n - 1 - i if tail_first else i
        if ids[at] == NULL_PAGE:
            continue
        page = &pool.pages[ids[at]]
        left = page.ref_cnt - 1
        if left == 0:  # the common case first: it needs no check
            page.ref_cnt = 0
            push(pool, ids[at])
            pool.num_freed += 1
        elif left > 0 or not GUARDS:
            page.ref_cnt = left
        else:
            undo_give_back(pool, ids, n, i, tail_first)
            return at
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
        if pool.pages[page_id].ref_cnt == 0:
            pull(pool, page_id)
            pool.num_freed -= 1
        pool.pages[page_id].ref_cnt += 1


cdef Py_ssize_t find_untouchable(Pool *pool, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all) noexcept nogil:
    """Index of a page that `touch_all` could not touch, or -1. The call touches `num_all` in all."""
    cdef Py_ssize_t i
    for i in range(n if GUARDS else 0):
        if ids[i] != NULL_PAGE:
            if pool.pages[ids[i]].ref_cnt == 0 and not is_free(pool, ids[i]):
                return i
            if pool.pages[ids[i]].ref_cnt >= INT32_MAX - num_all:  # each id may be the same page
                return i
    return -1


cdef void unwatch(Pool *pool, int32_t page_id) noexcept nogil:
    """Clear the WATCHED flag of a cached page."""
    pool.num_unwatched += (pool.pages[page_id].group & WATCHED) != 0
    pool.pages[page_id].group &= ~WATCHED


cdef void touch_all(Pool *pool, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """One reference more for each page, null pages passed over; a free page leaves the queue."""
    cdef Py_ssize_t i
    pool.is_restored &= n == 0
    for i in range(n):
        if ids[i] != NULL_PAGE:
            if pool.pages[ids[i]].ref_cnt == 0:
                pull(pool, ids[i])
                pool.num_reused += 1
            if pool.pages[ids[i]].group >= WATCHED:
                unwatch(pool, ids[i])
            pool.pages[ids[i]].ref_cnt += 1
            if not ids[i] & pool.sample_mask:
                note_use(pool, ids[i])


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


cdef inline void fetch_hit(Pool *pool, const Digest *chain, Py_ssize_t at, Py_ssize_t stop, int32_t group) noexcept nogil:
    """Have the memory fetched that look-ups soon after `at` will read: slots first, then the records that those name."""
    if at + 2 * LOOK_AHEAD < stop:
        fetch(home_of(pool, chain[at + 2 * LOOK_AHEAD], group))
        fetch(&pool.pages[home_of(pool, chain[at + LOOK_AHEAD], group).page_id])


cdef Py_ssize_t find_leading_hits(
    Pool *pool, const Digest *chain, Py_ssize_t stride, Py_ssize_t start, Py_ssize_t stop,
    const int32_t *groups, Py_ssize_t num_groups, Range ids,
) noexcept nogil:
    """End of the pages from `start` on, at most up to `stop`, that hit in all groups."""
    cdef Py_ssize_t j = start
    while j < stop:
        fetch_hit(pool, chain, (j + 1) * stride - 1, stop * stride, groups[0])
        if not hits_all(pool, chain, (j + 1) * stride - 1, groups, num_groups, ids):
            return j
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


# Refusals. A refused request needs at least as many free pages the next time, unless one of its hits got another holder or a
# further page of it was cached. Hits that are evicted from the end on are followed; after any other change the prefix is looked
# up again.

cdef inline int64_t count_changes(const Pool *pool) noexcept nogil:
    """Entries that came into the prefix index, and that went. It never gets less."""
    return pool.num_cached + pool.num_dropped


cdef inline bint is_hit(Pool *pool, const Prefix *prefix, const int32_t *ids, Py_ssize_t i) noexcept nogil:
    """Whether the page that was found for place `i` is cached under its digest."""
    return has_key(&pool.pages[ids[i]], prefix.digests[(i + 1) * prefix.stride - 1], prefix.group)


cdef inline bint ends_at(Pool *pool, const Prefix *prefix, Py_ssize_t num_pages) noexcept nogil:
    """Whether the page behind the first `num_pages` misses, or may not hit."""
    if num_pages >= prefix.max_num_pages:
        return True
    return find_within(pool, prefix.digests[(num_pages + 1) * prefix.stride - 1], prefix.group, prefix.ids) == NULL_PAGE


cdef void watch_leading(Pool *pool, Watch *watch, const Prefix *prefix, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Watch the hits of the only group, its first `n` pages, unless the next page hits too."""
    cdef Py_ssize_t i
    watch.is_leading = ends_at(pool, prefix, n)
    watch.num_pages = n
    for i in range(n if watch.is_leading else 0):
        pool.pages[ids[i]].group |= WATCHED


cdef bint has_same_hits(Pool *pool, Watch *watch, const Prefix *prefix, const int32_t *ids) noexcept nogil:
    """Whether a look-up would find the first `watch.num_pages` of `ids`, less those evicted from the end on since, and at most
    `watch.num_held` of them held. O(pages evicted).
    """
    if watch.num_reused != pool.num_reused:
        return False
    if not watch.is_leading:
        return watch.num_changes == count_changes(pool)
    while watch.num_unwatched != pool.num_unwatched and watch.num_pages:
        if is_hit(pool, prefix, ids, watch.num_pages - 1):
            break
        watch.num_pages -= 1
        watch.num_unwatched += 1
    return watch.num_unwatched == pool.num_unwatched and ends_at(pool, prefix, watch.num_pages)


cdef inline bint has_free_pages(Pool *pool, Py_ssize_t num_pages, Py_ssize_t num_reserved, int32_t shard) noexcept nogil:
    """Whether `num_pages` can be taken from a shard, or for -1 from the pool, with `num_reserved` left in the pool."""
    if num_pages and num_pages + num_reserved > pool.num_free:
        return False
    return num_pages <= count_free_in(pool, shard)


# Rows of a page table. The caller checked row numbers and room.

cdef inline void mark(Rows *rows, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Columns ``[start, stop)`` of a row are to be sent."""
    cdef Py_ssize_t first = start // WINDOW, last = (stop - 1) // WINDOW
    if start < stop:
        rows.is_dirty[row * rows.num_windows + first] = 1
        if last > first:
            memset(rows.is_dirty + row * rows.num_windows + first + 1, 1, last - first)
        rows.is_row_dirty[row] = 1
        rows.extent[row] = max(rows.extent[row], <int32_t>stop)


cdef inline void write_ids(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Let a row go on with these ids, and end, after its first `start`."""
    if n == 1:
        rows.table[row * rows.num_columns + start] = ids[0]
    elif n:  # without ids there is no pointer either, which memcpy must not get
        memcpy(rows.table + row * rows.num_columns + start, ids, n * sizeof(int32_t))
    rows.num_pages[row] = <int32_t>(start + n)
    mark(rows, row, start, start + n)


cdef inline void append_ids(Rows *rows, Py_ssize_t row, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    write_ids(rows, row, rows.num_pages[row], ids, n)


cdef inline bint fits(Rows *rows, Py_ssize_t row, Py_ssize_t start, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Whether ids may stand in a row from column `start` on, and the row's count was not overwritten with nonsense."""
    if not GUARDS:
        return True
    return 0 <= rows.num_pages[row] <= rows.num_columns and n <= rows.num_columns - start and find_negative(ids, n) < 0


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
    rows.version += 1


cdef void copy_row(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t n = max(0, min(rows.num_pages[src], rows.num_columns))  # the user may write it meanwhile
    if src == tgt:
        rows.version += 1
        return
    memcpy(rows.table + tgt * rows.num_columns, rows.table + src * rows.num_columns, n * sizeof(int32_t))
    rows.num_pages[tgt] = <int32_t>n
    mark(rows, tgt, 0, n)
    clear_from(rows, tgt, n)
    rows.version += 1


cdef inline void replace_row(Rows *rows, Py_ssize_t row, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    clear_one(rows, row)
    append_ids(rows, row, ids, n)


cdef void swap_rows(Rows *rows, Py_ssize_t src, Py_ssize_t tgt) noexcept nogil:
    cdef Py_ssize_t i, n = max(rows.extent[src], rows.extent[tgt])
    cdef int32_t *first = rows.table + src * rows.num_columns
    cdef int32_t *second = rows.table + tgt * rows.num_columns
    for i in range(n):
        first[i], second[i] = second[i], first[i]
    rows.num_pages[src], rows.num_pages[tgt] = rows.num_pages[tgt], rows.num_pages[src]
    mark(rows, src, 0, n)
    mark(rows, tgt, 0, n)
    rows.version += 1


cdef void mark_rows(Rows *rows, const int32_t *row_ids, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        mark(rows, row_ids[i], 0, rows.num_columns)
    rows.version += 1


cdef Py_ssize_t map_slots(
    const Rows *rows, const int32_t *row_ids, const int32_t *positions, int32_t *slots, Py_ssize_t n, int64_t page_size
) noexcept nogil:
    """Slots of `n` tokens; returns how many there are before the first that is outside the table or does not fit int32."""
    cdef Py_ssize_t i
    cdef uint32_t page, size = <uint32_t>page_size
    cdef int64_t slot, stop = page_size * rows.num_columns
    for i in range(n):
        if GUARDS and not (0 <= row_ids[i] < rows.num_rows and 0 <= positions[i] < stop):
            return i
        page = <uint32_t>positions[i] // size
        slot = rows.table[row_ids[i] * rows.num_columns + page] * page_size + <uint32_t>positions[i] - page * size
        if GUARDS and not INT32_MIN <= slot <= INT32_MAX:
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


cdef bint is_unsent(const Rows *rows, Py_ssize_t row, Py_ssize_t column) noexcept nogil:
    """Whether a window with that column is to be sent. The last window of a row ends with the row, and may begin before its
    place.
    """
    cdef const uint8_t *flags = rows.is_dirty + row * rows.num_windows
    return flags[column // WINDOW] or (column >= rows.num_columns - rows.width and flags[rows.num_windows - 1])


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


# Which pages a request needs in a cache group, by the kind of attention.

cdef inline int32_t pages_for(const Rules *rules, int32_t num_tokens) noexcept nogil:
    """Places that tokens take, those of skipped pages included."""
    return <int32_t>((<uint32_t>num_tokens + <uint32_t>rules.page_size - 1) // <uint32_t>rules.page_size)


cdef inline bint is_state(const Rules *rules) noexcept nogil:
    return rules.page_size == MAX_TOKENS


cdef inline int32_t full_pages(const Rules *rules, int32_t num_tokens) noexcept nogil:
    return <int32_t>(<uint32_t>num_tokens // <uint32_t>rules.page_size)


cdef inline int32_t first_useful_page(const Rules *rules, int32_t num_computed, int32_t num_cached) noexcept nogil:
    """Pages before it are of no use to tokens from `num_computed` on. A chunk's is never past the last cached page."""
    cdef int32_t page
    if rules.window:
        return full_pages(rules, max(0, num_computed - rules.window + 1))
    if rules.chunk:
        page = full_pages(rules, num_computed - num_computed % rules.chunk)
        return min(page, num_cached - 1) if num_cached else page
    return 0


cdef inline int32_t next_skip(const Rules *rules, int32_t num_skipped) noexcept nogil:
    """The least number of computed tokens at which a page more may be skipped; MAX_TOKENS: never."""
    cdef int64_t stop = (<int64_t>num_skipped + 1) * rules.page_size
    if rules.window:
        return <int32_t>min(stop + rules.window - 1, <int64_t>MAX_TOKENS)
    if rules.chunk:
        return <int32_t>min((stop + rules.chunk - 1) // rules.chunk * rules.chunk, <int64_t>MAX_TOKENS)
    return MAX_TOKENS


# Rows that run together. The caller holds the locks of the batch, the store and the tables, and checked what he passes.

cdef inline int32_t *ids_of(const Group *group, Py_ssize_t row) noexcept nogil:
    return group.page_ids + row * group.ids_stride


cdef inline int32_t *tokens_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.token_ids + row * batch.tokens_stride


cdef inline Digest *digests_of(const Batch *batch, Py_ssize_t row) noexcept nogil:
    return batch.digests + row * batch.digests_stride


cdef inline int32_t count_missing(const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Pages that a row lacks in a group so that `num_tokens` tokens have a slot."""
    cdef int32_t num_pages = group.held[row].num_pages
    if num_tokens <= <int64_t>num_pages * group.rules.page_size:
        return 0
    return pages_for(&group.rules, num_tokens) - num_pages


cdef inline Py_ssize_t count_new_pages(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Pages that a row lacks in all groups."""
    cdef Py_ssize_t g, count = 0
    for g in range(batch.num_groups):
        count += count_missing(&batch.groups[g], row, num_tokens)
    return count


cdef inline void blank(Group *group, Py_ssize_t row, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Put the null page into places of a row, here and in the table."""
    memset(ids_of(group, row) + start, 0, (stop - start) * sizeof(int32_t))
    memset(group.rows.table + row * group.num_columns + start, 0, (stop - start) * sizeof(int32_t))
    mark(group.rows, row, start, stop)
    group.rows.version += 1


cdef inline int32_t find_skip_stop(const Group *group, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """End of a row's pages that no token from `num_computed` on attends to."""
    return min(first_useful_page(&group.rules, num_computed, group.held[row].num_cached), group.held[row].num_pages)


cdef void skip_pages(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Give back the pages that no token from `num_computed` on attends to, the last first."""
    cdef Group *group
    cdef Held *held
    cdef Py_ssize_t g, j
    cdef int32_t stop
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = &group.held[row]
        stop = find_skip_stop(group, row, num_computed)
        if stop > held.num_skipped:
            for j in range(stop - 1, held.num_skipped - 1, -1):
                put_back_held(batch.pool, ids_of(group, row)[j])
            blank(group, row, held.num_skipped, stop)
            held.num_skipped = stop


cdef inline void put_back_held(Pool *pool, int32_t page_id) noexcept nogil:
    """`put_back`, but for the null page and for a page that somebody else gave back already."""
    if page_id != NULL_PAGE and pool.pages[page_id].ref_cnt and not is_free(pool, page_id):
        put_back(pool, page_id)


cdef void take_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens, Growth *growth) noexcept nogil:
    """Give a row the pages that it lacks, of which there are enough: group by group, into the table too."""
    cdef Group *group
    cdef int32_t *ids
    cdef Py_ssize_t g, j, start, n
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        start = group.held[row].num_pages
        n = count_missing(group, row, num_tokens)
        if n == 0:
            continue
        ids = ids_of(group, row) + start
        take_from(batch.pool, ids, n, batch.states[row].shard)
        group.held[row].num_pages += <int32_t>n
        write_ids(group.rows, row, start, ids, n)
        group.rows.version += 1
        if growth != NULL:
            for j in range(n):
                growth.new_ids[growth.num_new + j] = ids[j]
                growth.new_rows[growth.num_new + j] = <int32_t>row
                growth.new_groups[growth.num_new + j] = <int32_t>g
            growth.num_new += n


cdef inline Digest hash_page_of(
    const Batch *batch, Py_ssize_t row, Py_ssize_t page, Digest parent, const ExtraKey **next_key
) noexcept nogil:
    """The digest of a row's page behind `parent`; `next_key` goes on to the first extra key that is not before the page."""
    cdef const ExtraKey *key = next_key[0]
    while key != NULL and key.data != NULL and key.page < page:
        key += 1
    next_key[0] = key
    if key != NULL and key.data != NULL and key.page == page:
        parent = hash_after(batch.extra_key, parent, key.data, key.size)
    return hash_after(
        batch.key,
        parent,
        <const uint8_t *>(tokens_of(batch, row) + page * batch.hash_page_size),
        batch.hash_page_size * sizeof(int32_t),
    )


cdef void hash_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, as far as they are not yet."""
    cdef Digest *digests = digests_of(batch, row)
    cdef const ExtraKey *key = batch.extra_keys[row]
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest parent = digests[i - 1] if i else Digest(0, 0)
    while (i + 1) * batch.hash_page_size <= num_tokens:
        parent = hash_page_of(batch, row, i, parent, &key)
        digests[i] = parent
        i += 1
    batch.states[row].num_hashed = <int32_t>i


cdef Py_ssize_t count_hashed_before(const Batch *batch, Py_ssize_t row, const int32_t *token_ids, Py_ssize_t n) noexcept nogil:
    """How many pages of `token_ids` a free row has hashed already, because whoever was there last began with them."""
    cdef const int32_t *tokens = tokens_of(batch, row)
    cdef Py_ssize_t i, size = batch.hash_page_size
    cdef Py_ssize_t num_pages = min(<Py_ssize_t>batch.states[row].num_hashed, n // size)
    for i in range(num_pages):
        if memcmp(tokens + i * size, token_ids + i * size, size * sizeof(int32_t)) != 0:
            return i
    return num_pages


cdef void hash_later(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """`hash_row`, but a single page, which is what decoding fills, waits for another row's: two are hashed at once."""
    cdef Py_ssize_t i = batch.states[row].num_hashed
    cdef Digest *digests = digests_of(batch, row)
    cdef Link *link = &batch.links[batch.num_links]
    if batch.extra_keys[row] != NULL or batch.num_links == NUM_ENTRIES or num_tokens // batch.hash_page_size != i + 1:
        hash_row(batch, row, num_tokens)
    else:
        link.parent = digests[i - 1] if i else Digest(0, 0)
        link.digest = &digests[i]
        link.tokens = <const uint8_t *>(tokens_of(batch, row) + i * batch.hash_page_size)
        batch.num_links += 1
        batch.states[row].num_hashed += 1


cdef void hash_waiting(Batch *batch) noexcept nogil:
    """Hash the pages that wait for it, two at a time; the last of an odd number twice."""
    cdef const uint8_t *tokens[2]
    cdef Digest[2] parents
    cdef Digest[2] digests
    cdef Py_ssize_t i, lane
    for i in range(0, batch.num_links, 2):
        for lane in range(2):
            parents[lane] = batch.links[min(i + lane, batch.num_links - 1)].parent
            tokens[lane] = batch.links[min(i + lane, batch.num_links - 1)].tokens
        hash_two_after(batch.key, parents, tokens, batch.hash_page_size * sizeof(int32_t), digests)
        for lane in range(2):
            batch.links[min(i + lane, batch.num_links - 1)].digest[0] = digests[lane]
    batch.num_links = 0


cdef void enter_waiting(Batch *batch) noexcept nogil:
    """Hash and enter the pages that wait for it, in order. A page that somebody gave an entry keeps that. The slots of the
    index, likely far away, are all fetched before the first is read.
    """
    cdef const Entry *entry
    cdef Py_ssize_t i
    hash_waiting(batch)
    for i in range(batch.num_entries):
        fetch(home_of(batch.pool, batch.entries[i].key[0], batch.entries[i].group))
    for i in range(batch.num_entries):
        entry = &batch.entries[i]
        if batch.pool.pages[entry.page_id].group == NO_GROUP:
            enter(batch.pool, entry.page_id, entry.key[0], entry.group)
            if is_journaled(batch.pool):
                note_entry(batch.pool, entry.page_id, origin_from(&batch.provenances[i]))
            keep_tokens(batch.pool, entry.page_id, entry.tokens, entry.num_tokens)
    batch.num_entries = 0


cdef inline Origin origin_from(const Provenance *provenance) noexcept nogil:
    cdef Digest parent = Digest(0, 0) if provenance.parent == NULL else provenance.parent[0]
    return Origin(parent, provenance.place, provenance.context)


cdef inline void enter_later(Batch *batch, Entry entry) noexcept nogil:
    """Enter a page before the call ends. Its record, likely far away, is fetched meanwhile."""
    fetch(&batch.pool.pages[entry.page_id])
    batch.entries[batch.num_entries] = entry
    batch.num_entries += 1


cdef void note_later(Batch *batch, const Group *group, Py_ssize_t row, int32_t place) noexcept nogil:
    """Remember where the page of a row that is to be entered next comes from."""
    cdef int32_t page_id = ids_of(group, row)[place]
    cdef const Digest *parent = digests_of(batch, row) + place * group.stride - 1 if place else NULL
    batch.provenances[batch.num_entries] = Provenance(parent, place, batch.contexts[row])
    fetch(&batch.pool.journal.notes[page_id])
    fetch(batch.pool.page_tokens + page_id * batch.pool.tokens_width)


cdef void enter_full_pages(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Hash the pages that `num_tokens` tokens fill, and have them entered."""
    cdef const Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int32_t size, page_id
    if not batch.hash_page_size:
        return
    if (batch.states[row].num_hashed + <int64_t>1) * batch.hash_page_size <= num_tokens:
        hash_later(batch, row, num_tokens)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = &group.held[row]
        size = group.rules.page_size
        while group.id != NO_GROUP and (held.num_cached + <int64_t>1) * size <= num_tokens:
            page_id = ids_of(group, row)[held.num_cached]
            if page_id != NULL_PAGE:
                if batch.num_entries == NUM_ENTRIES:
                    enter_waiting(batch)
                if is_journaled(batch.pool):
                    note_later(batch, group, row, held.num_cached)
                enter_later(
                    batch,
                    Entry(
                        digests_of(batch, row) + (held.num_cached + 1) * group.stride - 1,
                        tokens_of(batch, row) + held.num_cached * size,
                        size,
                        page_id,
                        group.id,
                    ),
                )
            held.num_cached += 1


cdef inline int64_t last_token_event(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """How many tokens are computed when a row that computes each token as it comes to know it is as long as it can be."""
    return <int64_t>batch.states[row].num_computed + batch.max_num_tokens - batch.states[row].num_tokens


cdef void plan_next_event(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Work out the least number of tokens to come for which something is due: a page to take, to enter, or, since rows skip by
    the tokens that they had before, to skip one token earlier; or a token for which the row is too short.
    """
    cdef Group *group
    cdef Held *held
    cdef Py_ssize_t g
    cdef int64_t event = min(<int64_t>INT32_MAX, last_token_event(batch, row) + 1)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        held = &group.held[row]
        event = min(event, <int64_t>held.num_pages * group.rules.page_size + 1)
        event = min(event, <int64_t>next_skip(&group.rules, held.num_skipped) + 1)
        if batch.hash_page_size and group.id != NO_GROUP:
            event = min(event, <int64_t>(held.num_cached + 1) * group.rules.page_size)
    batch.states[row].next_event = <int32_t>event


cdef bint grow_row(
    Batch *batch, Py_ssize_t row, int32_t num_before, int32_t num_tokens, int32_t num_room_tokens, Growth *growth
) noexcept nogil:
    """Do what is due for a row that had `num_before` tokens computed to have `num_tokens`, and room for more; False, without
    any room taken, if too few pages are free.
    """
    cdef Py_ssize_t num_new_pages
    cdef bint has_room
    if batch.skips_pages:
        skip_pages(batch, row, num_before)
    num_new_pages = count_new_pages(batch, row, num_room_tokens)
    has_room = num_new_pages == 0 or num_new_pages <= count_free_in(batch.pool, batch.states[row].shard)
    if has_room:
        if num_new_pages:
            take_pages(batch, row, num_room_tokens, growth)
        enter_full_pages(batch, row, num_tokens)
        plan_next_event(batch, row)
    return has_room


cdef inline int32_t amount(const Amounts *amounts, Py_ssize_t i) noexcept nogil:
    return amounts.values[i * amounts.stride]


cdef inline int32_t room_for(const Batch *batch, int32_t num_tokens, int32_t num_ahead) noexcept nogil:
    """Tokens that are to have a slot, drafts included."""
    return <int32_t>min(<int64_t>num_tokens + num_ahead, <int64_t>batch.max_num_tokens)


cdef bint has_lost_page(const Batch *batch, Py_ssize_t row) noexcept nogil:
    """Whether a page that a row would skip now was given back by somebody else."""
    cdef const Group *group
    cdef Py_ssize_t g, stop
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        stop = find_skip_stop(group, row, batch.states[row].num_computed)
        if find_unheld(batch.pool, ids_of(group, row), group.held[row].num_skipped, stop) >= 0:
            return True
    return False


cdef inline bint is_row(const Batch *batch, int32_t row) noexcept nogil:
    """Whether a row is in the table and admitted."""
    return 0 <= row < batch.num_rows and batch.states[row].is_admitted


cdef inline bint claim_row(Batch *batch, int32_t row, Py_ssize_t i) noexcept nogil:
    """Whether a row `is_row` and here for the first time in this call. Copies it, as the one at `i`."""
    if GUARDS and (not is_row(batch, row) or batch.states[row].stamp == batch.stamp):
        return False
    batch.states[row].stamp = batch.stamp
    batch.checked_rows[i] = row
    return True


cdef inline uint32_t start_call(Batch *batch) noexcept nogil:
    """Forget which rows were seen; returns the stamp of those that will be."""
    cdef Py_ssize_t row
    batch.num_ascending = 0
    batch.stamp += 1
    if batch.stamp == 0:
        for row in range(batch.num_rows):
            batch.states[row].stamp = 0
        batch.stamp = 1
    return batch.stamp


cdef inline bint check_due(Batch *batch, Growth *growth, Py_ssize_t i, int32_t num_room_tokens) noexcept nogil:
    """Note a row for which more than counting is due, and how many pages it may need; False if it is not fit for it."""
    cdef int32_t row = batch.checked_rows[i]
    cdef bint is_step = growth.token_ids != NULL
    if GUARDS and not (batch.states[row].is_admitted and batch.states[row].num_tokens + is_step <= batch.max_num_tokens):
        return False
    if GUARDS and batch.skips_pages and has_lost_page(batch, row):
        return False
    growth.max_num_new += count_new_pages(batch, row, num_room_tokens)
    batch.due_rows[growth.num_due] = <int32_t>i
    growth.num_due += 1
    return True


cdef bint copy_ascending(Batch *batch, const int32_t *rows, Py_ssize_t n) noexcept nogil:
    """Copy rows that are in the table and each behind the one before, as they mostly are: then none stands there twice."""
    cdef const int32_t *copied = batch.checked_rows
    cdef int32_t signs = 0
    cdef Py_ssize_t i
    if n <= batch.num_ascending and memcmp(copied, rows, n * sizeof(int32_t)) == 0:  # as in the step before
        return True
    batch.num_ascending = 0
    if n > batch.num_rows:
        return False
    memcpy(batch.checked_rows, rows, n * sizeof(int32_t))
    for i in range(1, n if GUARDS else 1):  # several at once, for there is no way out
        signs |= copied[i] | <int32_t>(<uint32_t>copied[i] - <uint32_t>copied[i - 1] - 1)
    if GUARDS and (signs < 0 or copied[0] < 0 or copied[n - 1] >= batch.num_rows):
        return False
    batch.num_ascending = n
    return True


cdef inline Py_ssize_t check_growth(Batch *batch, Growth *growth, bint is_step, bint is_ascending) noexcept nogil:
    """How many rows there are before the first that is wrong. Copies the rows, so that nobody changes them any more, counts as
    if all grew, and notes those for which more is due; for a row that is not admitted that is always so. Of `is_ascending`,
    `copy_ascending` made sure.
    """
    cdef RowState *state
    cdef Py_ssize_t i
    cdef int32_t row, known, computed, num_room_tokens
    cdef int32_t num_new = 1, num_ahead = 0
    cdef uint32_t stamp = 0 if is_ascending else start_call(batch)
    cdef uint32_t num_rows = <uint32_t>batch.num_rows
    for i in range(growth.num_rows):
        row = batch.checked_rows[i] if is_ascending else growth.rows[i]
        if not is_ascending:
            if <uint32_t>row >= num_rows or batch.states[row].stamp == stamp:
                return i
            batch.states[row].stamp = stamp
            batch.checked_rows[i] = row
        state = &batch.states[row]
        if not is_step:
            num_new = amount(&growth.num_new_tokens, i)
            num_ahead = amount(&growth.num_ahead, i)
        known = state.num_tokens + is_step
        computed = state.num_computed
        if not is_step and (num_new < 0 or num_ahead < 0 or num_new > known - computed):
            return i
        num_room_tokens = computed + 1 if is_step else room_for(batch, computed + num_new, num_ahead)
        if max(num_room_tokens, computed + 1) >= state.next_event and not check_due(batch, growth, i, num_room_tokens):
            return i
        if is_step:
            tokens_of(batch, row)[known - 1] = growth.token_ids[i]
            state.num_tokens = known
        state.num_computed = computed + num_new
        growth.grown[i] = Grown(row, known, computed + num_new)
    return growth.num_rows


cdef void uncount(Batch *batch, const Growth *growth, Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Undo what `check_growth` counted for checked rows."""
    cdef Py_ssize_t i, row
    for i in range(start, stop):
        row = batch.checked_rows[i]
        batch.states[row].num_tokens -= growth.token_ids != NULL
        batch.states[row].num_computed -= amount(&growth.num_new_tokens, i)


cdef Py_ssize_t grow_rows(Batch *batch, Growth *growth) noexcept nogil:
    """Do what is due for counted rows, in order, up to the first that does not fit, and return where it stands, or how many
    rows there are. Those from there on are as they were.
    """
    cdef Py_ssize_t k, i, row, num_grown = growth.num_rows
    cdef int32_t num_new, num_tokens, num_room_tokens
    for k in range(growth.num_due):
        i = batch.due_rows[k]
        row = batch.checked_rows[i]
        num_new = amount(&growth.num_new_tokens, i)
        num_tokens = batch.states[row].num_computed
        num_room_tokens = room_for(batch, num_tokens, amount(&growth.num_ahead, i))
        if not grow_row(batch, row, num_tokens - num_new, num_tokens, num_room_tokens, growth):
            num_grown = i
            break
    enter_waiting(batch)
    uncount(batch, growth, num_grown, growth.num_rows)
    return num_grown


cdef Py_ssize_t append_tokens(Batch *batch, const int32_t *rows, const int32_t *token_ids, Py_ssize_t n) noexcept nogil:
    """Append a token to each row, in order; returns how many fit, and if not all do, nothing is appended."""
    cdef Py_ssize_t i, num_done = 0
    cdef int32_t row
    while num_done < n:
        row = rows[num_done]
        if not is_row(batch, row) or batch.states[row].num_tokens >= batch.max_num_tokens:
            break
        tokens_of(batch, row)[batch.states[row].num_tokens] = token_ids[num_done]
        batch.states[row].num_tokens += 1
        batch.states[row].next_event = <int32_t>min(<int64_t>batch.states[row].next_event, last_token_event(batch, row) + 1)
        num_done += 1
    if num_done < n:
        for i in range(num_done):
            batch.states[rows[i]].num_tokens -= 1
    return num_done


# Trimming. A page that the cut goes through is written again by the tokens to come, so nobody else may read it.

cdef inline bint cuts_shared_page(const Batch *batch, const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether a row of `num_tokens` tokens would write into a page that somebody else holds too."""
    cdef int32_t page = full_pages(&group.rules, num_tokens)
    if page == pages_for(&group.rules, num_tokens) or page >= group.held[row].num_pages:
        return False
    return batch.pool.pages[ids_of(group, row)[page]].ref_cnt > 1


cdef int32_t find_restart(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """How many tokens of a row that is cut to `num_tokens` stay computed."""
    cdef const Group *group
    cdef Py_ssize_t g
    cdef int32_t restart = min(batch.states[row].num_computed, num_tokens)
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        if cuts_shared_page(batch, group, row, num_tokens):
            restart = min(restart, full_pages(&group.rules, num_tokens) * group.rules.page_size)
    return restart


cdef inline int32_t count_kept(const Batch *batch, const Group *group, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Leading pages of a group that a row of `num_tokens` tokens goes on with."""
    if cuts_shared_page(batch, group, row, num_tokens):
        return full_pages(&group.rules, num_tokens)
    return pages_for(&group.rules, num_tokens)


cdef inline bint has_state_behind(const Batch *batch, Py_ssize_t row, int32_t restart) noexcept nogil:
    """Whether a row has a state that has seen tokens from `restart` on, and is not to be computed from the first token anew."""
    return batch.has_state and 0 < restart < batch.states[row].num_computed


cdef bint can_trim(const Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    """Whether the pages that the next token attends to, and its own, are still there, and nobody gave back one that is to go.
    """
    cdef const Group *group
    cdef const int32_t *ids
    cdef Py_ssize_t g
    cdef int32_t first, restart = find_restart(batch, row, num_tokens)
    if has_state_behind(batch, row, restart):
        return False
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        ids = ids_of(group, row)
        first = first_useful_page(&group.rules, restart, 0)
        if first < min(count_kept(batch, group, row, num_tokens), group.held[row].num_pages) and ids[first] == NULL_PAGE:
            return False
        if find_unheld(batch.pool, ids, full_pages(&group.rules, num_tokens), group.held[row].num_pages) >= 0:
            return False
    return True


cdef Py_ssize_t check_trim(Batch *batch, const int32_t *rows, const Amounts *num_tokens, Py_ssize_t n) noexcept nogil:
    """How many rows there are before the first that is wrong. Copies the rows."""
    cdef Py_ssize_t i
    start_call(batch)
    for i in range(n):
        if not claim_row(batch, rows[i], i):
            return i
        if not 0 <= amount(num_tokens, i) <= batch.states[batch.checked_rows[i]].num_tokens:
            return i
        if not can_trim(batch, batch.checked_rows[i], amount(num_tokens, i)):
            return i
    return n


cdef void trim_group(Batch *batch, Group *group, Py_ssize_t row, int32_t num_tokens, int32_t restart) noexcept nogil:
    """Give back a group's pages behind `num_tokens` tokens, the last first, and drop entries whose tokens are gone. Pages that
    are computed again from `restart` on are entered again if they have lost their entry meanwhile.
    """
    cdef Held *held = &group.held[row]
    cdef int32_t *ids = ids_of(group, row)
    cdef int32_t cut = full_pages(&group.rules, num_tokens)
    cdef int32_t keep = count_kept(batch, group, row, num_tokens)
    cdef Py_ssize_t j
    for j in range(held.num_pages - 1, cut - 1, -1):
        if ids[j] != NULL_PAGE and batch.pool.pages[ids[j]].ref_cnt == 1 and batch.pool.pages[ids[j]].group != NO_GROUP:
            drop(batch.pool, ids[j])
        if j >= keep:
            put_back_held(batch.pool, ids[j])
    held.num_pages = min(held.num_pages, keep)
    held.num_cached = min(held.num_cached, full_pages(&group.rules, restart))
    held.num_skipped = min(held.num_skipped, held.num_pages)
    end_row(group, row)


cdef void trim_row(Batch *batch, Py_ssize_t row, int32_t num_tokens) noexcept nogil:
    cdef int32_t restart = find_restart(batch, row, num_tokens)
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        trim_group(batch, &batch.groups[g], row, num_tokens, restart)
    batch.states[row].num_tokens = num_tokens
    batch.states[row].num_computed = restart
    batch.states[row].num_hits = min(batch.states[row].num_hits, restart)
    if batch.hash_page_size:
        batch.states[row].num_hashed = min(batch.states[row].num_hashed, num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)


cdef void end_row(Group *group, Py_ssize_t row) noexcept nogil:
    """Let the table's row end where the batch's does."""
    group.rows.num_pages[row] = group.held[row].num_pages
    clear_from(group.rows, row, group.held[row].num_pages)
    group.rows.version += 1


cdef void show_row(Group *group, Py_ssize_t row) noexcept nogil:
    """Make the table's row what the batch holds."""
    write_ids(group.rows, row, 0, ids_of(group, row), group.held[row].num_pages)
    end_row(group, row)


# Taking back. What was scheduled and never computed must not hit: its pages lose their prefix entries.

cdef void forget_pages(
    Pool *pool, const int32_t *ids, Py_ssize_t start, Py_ssize_t stop, const Digest *chain, Py_ssize_t num_digests,
    Py_ssize_t stride, int32_t group,
) noexcept nogil:
    """Drop the entries of pages ``ids[start:stop]`` of a request. A null page stands for one that an attention window left:
    every page of its content loses the entry, for which one it was is not known any more.
    """
    cdef Py_ssize_t i
    cdef int32_t page_id
    for i in range(start, stop if pool.slots != NULL else start):
        page_id = ids[i]
        if page_id == NULL_PAGE and (i + 1) * stride <= num_digests:
            page_id = find(pool, chain[(i + 1) * stride - 1], group)
            while page_id != NULL_PAGE:
                drop(pool, page_id)
                page_id = find(pool, chain[(i + 1) * stride - 1], group)
        elif pool.pages[page_id].group != NO_GROUP:
            drop(pool, page_id)


cdef void forget_from(Batch *batch, const Group *group, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """Forget the pages of a group with tokens from `num_computed` on that a row entered, those behind its hits."""
    cdef int32_t start = full_pages(&group.rules, max(num_computed, batch.states[row].num_hits))
    forget_pages(
        batch.pool, ids_of(group, row), start, group.held[row].num_cached, digests_of(batch, row),
        batch.states[row].num_hashed, group.stride, group.id,
    )


cdef void forget_uncomputed(Batch *batch, Py_ssize_t row, int32_t num_computed) noexcept nogil:
    """The same in all groups."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        forget_from(batch, &batch.groups[g], row, num_computed)


cdef bint is_as_grown(const Batch *batch, const Growth *growth, Py_ssize_t i) noexcept nogil:
    """Whether a row has computed what it had after the call that grew it, and for a step knows no other token since."""
    cdef const Grown *grown = &growth.grown[i]
    cdef const RowState *state = &batch.states[grown.row]
    if not state.is_admitted or batch.admissions[grown.row] > growth.num_admissions:
        return False
    return state.num_computed == grown.num_computed and (growth.token_ids == NULL or state.num_tokens == grown.num_tokens)


cdef inline int32_t computed_before(const Growth *growth, Py_ssize_t i) noexcept nogil:
    """The tokens that a row had computed before the call."""
    return growth.grown[i].num_computed - amount(&growth.num_new_tokens, i)


cdef Py_ssize_t find_taken(const Growth *growth, Py_ssize_t stop, int32_t row, Py_ssize_t g) noexcept nogil:
    """Where the new pages of a row in a group begin, which end at `stop`."""
    while stop and growth.new_rows[stop - 1] == row and growth.new_groups[stop - 1] == g:
        stop -= 1
    return stop


cdef bint can_undo(const Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Whether a row is as the call left it, its new pages, the last before `stop`, are its last, and those are there that it
    needs again. `stop` goes on to the first of them.
    """
    cdef const Group *group
    cdef const int32_t *ids
    cdef Py_ssize_t g, start, num_kept
    cdef int32_t first, row = growth.grown[i].row
    if not is_as_grown(batch, growth, i):
        return False
    for g in range(batch.num_groups - 1, -1, -1):
        group = &batch.groups[g]
        ids = ids_of(group, row)
        start = find_taken(growth, stop[0], row, g)
        num_kept = group.held[row].num_pages - (stop[0] - start)
        first = first_useful_page(&group.rules, computed_before(growth, i), 0)
        if num_kept < 0 or (start < stop[0] and memcmp(ids + num_kept, growth.new_ids + start, (stop[0] - start) * 4)):
            return False
        if first < num_kept and ids[first] == NULL_PAGE:
            return False
        if find_unheld(batch.pool, ids, num_kept, group.held[row].num_pages) >= 0:
            return False
        stop[0] = start
    return True


cdef void undo_row(Batch *batch, const Growth *growth, Py_ssize_t i, Py_ssize_t *stop) noexcept nogil:
    """Let a row that `can_undo` go back."""
    cdef Group *group
    cdef Held *held
    cdef Py_ssize_t g, start
    cdef int32_t row = growth.grown[i].row
    cdef int32_t num_computed = computed_before(growth, i)
    cdef RowState *state = &batch.states[row]
    for g in range(batch.num_groups - 1, -1, -1):
        group = &batch.groups[g]
        held = &group.held[row]
        start = find_taken(growth, stop[0], row, g)
        forget_from(batch, group, row, num_computed)
        while stop[0] > start:
            stop[0] -= 1
            put_back(batch.pool, growth.new_ids[stop[0]])
            held.num_pages -= 1
        held.num_cached = min(held.num_cached, full_pages(&group.rules, num_computed))
        held.num_skipped = min(held.num_skipped, held.num_pages)
        end_row(group, row)
    state.num_computed = num_computed
    state.num_tokens -= growth.token_ids != NULL
    if batch.hash_page_size:
        state.num_hashed = min(state.num_hashed, state.num_tokens // batch.hash_page_size)
    plan_next_event(batch, row)


# Rows that come, go and change places.

cdef Py_ssize_t count_free_hits(
    const Batch *batch, Py_ssize_t row, Py_ssize_t g, const int32_t *ids, Py_ssize_t n, Py_ssize_t num_all, bint is_known
) noexcept nogil:
    """How many pages, null pages aside, are in the free queue; -1 if one cannot be touched, as one of `num_all` hits, or is not
    cached any more with what the row's leading pages hold, unless that `is_known`.
    """
    cdef const Group *group = &batch.groups[g]
    cdef const Digest *digests = digests_of(batch, row)
    cdef const Digest *digest
    cdef const Page *page
    cdef Py_ssize_t i, num_free = 0
    cdef uint64_t differences = 0
    cdef bint is_lost = False
    for i in range(n):
        if ids[i] == NULL_PAGE:
            continue
        page = &batch.pool.pages[ids[i]]
        num_free += page.prev_free != NOT_FREE
        if GUARDS:  # without branches, for there is nearly always nothing wrong
            is_lost |= (page.ref_cnt == 0) & (page.prev_free == NOT_FREE) | (page.ref_cnt >= INT32_MAX - num_all)
        if GUARDS and not is_known:
            digest = &digests[(i + 1) * group.stride - 1]
            differences |= (page.key_lo ^ digest.lo) | (page.key_hi ^ digest.hi)
            differences |= <uint64_t>((page.group & ~FLAGS) ^ group.id)
    return -1 if differences or is_lost else num_free


cdef void attach_hits(Batch *batch, Py_ssize_t row, Py_ssize_t g, const int32_t *ids, Py_ssize_t n) noexcept nogil:
    """Make hits, which `count_free_hits` saw, the first pages of an empty row."""
    cdef Group *group = &batch.groups[g]
    touch_all(batch.pool, ids, n)
    if n:
        memcpy(ids_of(group, row), ids, n * sizeof(int32_t))
    group.held[row] = Held(<int32_t>n, <int32_t>n, 0)


cdef void empty_row(Batch *batch, Py_ssize_t row) noexcept nogil:
    """Make a row free. Its pages were given back, or moved."""
    cdef Py_ssize_t g
    for g in range(batch.num_groups):
        batch.groups[g].held[row] = Held(0, 0, 0)
        end_row(&batch.groups[g], row)
    batch.states[row] = RowState(0, 0, 0, 0, 0, batch.states[row].num_hashed, -1, 0, 0)


cdef inline bint hits_leading_pages(const Group *group) noexcept nogil:
    """Whether what hits in a group are leading pages, any number: that of full attention."""
    return group.id != NO_GROUP and not group.rules.window and not group.rules.chunk


cdef inline Range ids_in_shard(const Pool *pool, int32_t shard) noexcept nogil:
    """The ids of a shard, or for -1 of the pool."""
    if shard < 0:
        return Range(0, pool.num_pages)
    return Range(shard * pool.pages_per_shard, (shard + 1) * pool.pages_per_shard)


cdef inline void begin_admission(Batch *batch, Py_ssize_t row) noexcept nogil:
    """From here on the row is not the one that any call before has grown."""
    batch.num_admissions += 1
    batch.admissions[row] = batch.num_admissions


cdef void set_context(Batch *batch, Py_ssize_t row, int32_t context) noexcept nogil:
    """The context of a row's pages from now on. None, which is what there is without a journal, has no users."""
    if batch.contexts[row]:
        batch.pool.journal.contexts[batch.contexts[row]].num_users -= 1
    if context:
        batch.pool.journal.contexts[context].num_users += 1
    batch.contexts[row] = context


cdef inline void swap_values(int32_t *first, int32_t *second, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        first[i], second[i] = second[i], first[i]


cdef void exchange_rows(Batch *batch, Py_ssize_t first, Py_ssize_t second) noexcept nogil:
    """Exchange all that two rows have."""
    cdef Group *group
    cdef Py_ssize_t g, n = max(batch.states[first].num_tokens, batch.states[second].num_tokens)
    batch.states[first].num_hashed *= batch.states[first].is_admitted  # a free row's last tokens stay behind
    batch.states[second].num_hashed *= batch.states[second].is_admitted
    swap_values(tokens_of(batch, first), tokens_of(batch, second), n)
    n = max(batch.states[first].num_hashed, batch.states[second].num_hashed)
    if n:
        swap_values(
            <int32_t *>digests_of(batch, first), <int32_t *>digests_of(batch, second), n * (sizeof(Digest) // sizeof(int32_t))
        )
    batch.states[first], batch.states[second] = batch.states[second], batch.states[first]
    begin_admission(batch, first)
    begin_admission(batch, second)
    batch.extra_keys[first], batch.extra_keys[second] = batch.extra_keys[second], batch.extra_keys[first]
    batch.contexts[first], batch.contexts[second] = batch.contexts[second], batch.contexts[first]
    for g in range(batch.num_groups):
        group = &batch.groups[g]
        n = max(group.held[first].num_pages, group.held[second].num_pages)
        swap_values(ids_of(group, first), ids_of(group, second), n)
        group.held[first], group.held[second] = group.held[second], group.held[first]
        show_row(group, first)
        show_row(group, second)


# From Python objects, at the boundary.

cdef object ndarray = np.ndarray
cdef object INT32 = np.dtype(np.int32)


# Locks across a fork. A child has only the thread that forked: what another one held would be locked for ever there, over
# records that it was changing. So a thread that forks takes all locks first, in their order, and releases them in parent and
# child. A thread that holds one of them runs no Python code and needs nothing but other such locks, so it always gets done.

cdef LockNode[NUM_LOCK_KINDS] lock_rings
cdef cython.pymutex ring_lock     # taken before all others
cdef int num_forks = 0            # that hold it, or wait for it


cdef int start_lock_rings() except -1:
    cdef int kind
    if not has_lock(&ring_lock):
        raise MemoryError("a lock")
    for kind in range(NUM_LOCK_KINDS):
        lock_rings[kind] = LockNode(&lock_rings[kind], &lock_rings[kind], NULL, False)
    return 0


start_lock_rings()


cdef inline bint lock_the_rings() noexcept:
    """Before a change, which nothing else interrupts while there is a GIL. Returns whether the lock was needed: not by a thread
    that holds all locks to fork, whose hooks may make objects, and collect garbage.
    """
    if is_forking or not (GIL_DISABLED or num_forks):
        return False
    ring_lock.acquire()
    return True


cdef int enlist_lock(LockNode *node, void *mutex, LockKind kind) except -1:
    """Let forks take the lock of a fresh object. MemoryError where it could not be made: it would be no lock, but a crash."""
    cdef LockNode *ring = &lock_rings[<int>kind]
    cdef LockNode *last
    cdef bint is_locked
    if not has_lock(mutex):
        raise MemoryError("a lock")
    is_locked = lock_the_rings()
    last = ring.prev
    while kind == TABLE_LOCK and last != ring and last > node:  # as in `in_lock_order`
        last = last.prev
    node[0] = LockNode(last, last.next, mutex, False)
    last.next.prev = node
    last.next = node
    if is_locked:
        ring_lock.release()
    return 0


cdef void delist_lock(LockNode *node) noexcept:
    """Of an object that goes."""
    cdef bint is_locked
    if node.next == NULL:
        return
    is_locked = lock_the_rings()
    node.prev.next = node.next
    node.next.prev = node.prev
    if is_locked:
        ring_lock.release()


cdef void hold_core_locks() noexcept:
    """Wait until no other thread is inside any object, and keep them out."""
    global is_forking, num_forks
    cdef LockNode *node
    cdef int kind
    if is_forking:  # a hook forks
        return
    num_forks += 1
    ring_lock.acquire()
    for kind in range(NUM_LOCK_KINDS):
        node = lock_rings[kind].next
        while node != &lock_rings[kind]:
            lock_at(node.mutex)
            node.is_held = True
            node = node.next
    is_forking = True


cdef void release_core_locks() noexcept:
    global is_forking, num_forks
    cdef LockNode *node
    cdef int kind
    if not is_forking:
        return
    for kind in range(NUM_LOCK_KINDS):
        node = lock_rings[kind].next
        while node != &lock_rings[kind]:
            if node.is_held:
                node.is_held = False
                unlock_at(node.mutex)
            node = node.next
    is_forking = False
    num_forks -= 1
    ring_lock.release()


def _before_fork() -> None:
    """Take the locks of Python objects, under which calls into the core are made, and then those of the core."""
    try:
        hold_locks()
    finally:
        hold_core_locks()


def _after_fork_in_parent() -> None:
    release_core_locks()
    release_locks()


def _after_fork_in_child() -> None:
    global num_forks
    release_core_locks()
    num_forks = 0  # other threads that were about to fork are gone
    release_locks()
    replace_lost_locks()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


cdef object index_of(object value, str name):
    """`value` as an int."""
    try:
        return as_index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: an int") from None


cdef Py_ssize_t size_of(object value, str name, Py_ssize_t lowest=0, Py_ssize_t highest=MAX_PAGES) except -1:
    """`value` as a size; the error says what was got and what is allowed."""
    cdef int overflow = 0
    cdef long long size
    if type(value) is not int:
        value = index_of(value, name)
    size = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or not lowest <= size <= highest:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: {lowest} to {highest}")
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


cdef int32_t page_id_of(object value) except? -1:
    try:
        return int32_of(value)
    except (OverflowError, TypeError) as error:
        raise explained("page id", error) from None


cdef int32_t group_of(object group) except -1:
    return <int32_t>size_of(group, "group", 0, MAX_GROUP)


cdef object as_int32_array(object values, str name):
    """`values`, a NumPy array, as a contiguous int32 vector; no copy where it is one already."""
    if type(values) is not ndarray:
        values = np.asarray(values)  # a subclass may say anything of itself
    if values.ndim != 1 or (values.dtype is not INT32 and values.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"{name}: got an array of {values.dtype} with {values.ndim} dimensions, allowed: one of ints with 1 dimension"
        )
    if values.dtype is INT32 or values.dtype == INT32:
        return np.require(values, np.int32, ["C", "A"])
    if values.size and not (INT32_MIN <= values.min() and values.max() <= INT32_MAX):
        raise ArgumentError(f"{name}: got {values.min()} to {values.max()}, allowed: ints that fit int32")
    return np.ascontiguousarray(values, dtype=np.int32)


cdef object array_of(const int32_t *values, Py_ssize_t n):
    """A new int32 array."""
    cdef Py_buffer view
    array = np.empty(n, dtype=INT32)
    if n:
        PyObject_GetBuffer(array, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        memcpy(view.buf, values, n * sizeof(int32_t))
        PyBuffer_Release(&view)
    return array


cdef list as_list(object values, str name):
    """`values`, if it is a list, or its items as one."""
    if type(values) is list:
        return values
    try:
        values = iter(values)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, allowed: a list or an array") from None
    return list(values)


cdef object require_matrix(object values, object dtype, str name):
    """`values` if it is a matrix of that type; of a subclass, which may say anything of itself, the array that it is."""
    if isinstance(values, ndarray) and type(values) is not ndarray:
        values = np.asarray(values)
    if not isinstance(values, ndarray) or values.ndim != 2 or values.dtype != dtype:
        allowed = f"allowed: an array of {np.dtype(dtype)} with 2 dimensions"
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, {allowed}")
    return values


cdef class PageIds:
    """A run of int32 page ids in native memory: what the manager passes around instead of page objects. It does not change.

    Made of a list, a tuple, another iterable of ints, an array of ints, or another PageIds; copied. ``len()`` is the number of
    ids; `to_list` and `to_array` copy them out, 10 ns and 0.3 ns an id.
    """

    cdef int32_t *ids
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity

    def __cinit__(self, values=None):
        if values is not None:
            self.fill(values)

    def __dealloc__(self):
        free(self.ids)

    def __reduce__(self):
        return PageIds, (self.to_list(),)

    def __len__(self):
        return self.num

    @cython.critical_section
    def __getitem__(self, Py_ssize_t i) -> int:
        if not 0 <= i < self.num:
            raise IndexError(f"index: got {i}, allowed: 0 to {self.num - 1}")
        return self.ids[i]

    def __contains__(self, value) -> bool:
        return self.has(page_id_of(value))

    @cython.critical_section
    cdef bint has(self, int32_t wanted) noexcept:
        cdef Py_ssize_t i
        cdef int32_t num_found = 0
        for i in range(self.num):  # several at once, for there is no way out
            num_found |= self.ids[i] == wanted
        return num_found

    def __repr__(self):
        return f"{type(self).__name__}({self.to_list()})"

    cdef int reserve(self, Py_ssize_t num_more) except -1:
        """Make room for `num_more` ids, so that adding them cannot fail. Amortised O(1) an id."""
        if not self.has_room_for(num_more):
            raise MemoryError(f"{self.num + num_more} int32 values")
        return 0

    cdef bint has_room_for(self, Py_ssize_t num_more) noexcept:
        """`reserve`; False where memory is short."""
        cdef Py_ssize_t capacity = max(self.num + num_more, 2 * self.capacity, 4)
        cdef int32_t *ids
        if self.num + num_more <= self.capacity:
            return True
        ids = <int32_t *>realloc(self.ids, capacity * sizeof(int32_t))
        if ids == NULL:
            return False
        self.ids = ids
        self.capacity = capacity
        return True

    @cython.critical_section
    cdef void put(self, const int32_t *ids, Py_ssize_t n) noexcept:
        """Append ids, for which there is room."""
        if n:
            memcpy(self.ids + self.num, ids, n * sizeof(int32_t))
        self.num += n

    cdef int add(self, const int32_t *ids, Py_ssize_t n) except -1:
        self.reserve(n)
        self.put(ids, n)
        return 0

    cdef int add_items(self, list items, Py_ssize_t start, Py_ssize_t stop, str name="ids") except -1:
        """Append ``items[start:stop]``, fewer where the list ends before. A slice would touch each reference count twice."""
        cdef Py_ssize_t i, num = 0
        cdef int32_t number
        stop = min(stop, len(items))
        self.reserve(max(0, stop - start))
        try:
            for i in range(start, stop):
                if i >= len(items):
                    raise ArgumentError(f"{name}: the list shrank while it was read")
                number = int32_of(items[i])  # may run Python code that changes the list, or even self
                if self.num + num >= self.capacity:
                    raise ArgumentError(f"{name}: changed while the list was read")
                self.ids[self.num + num] = number
                num += 1
        except (OverflowError, TypeError) as error:
            raise explained(name, error) from None
        self.num += num
        return 0

    @staticmethod
    def of_slice(list items not None, start, stop) -> PageIds:
        """The ints ``items[start:stop]``, fewer where the list ends before."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        ids.add_items(items, size_of(start, "start"), size_of(stop, "stop"))
        return ids

    @staticmethod
    def joined(groups) -> PageIds:
        """The ids of several PageIds, one after another."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        for group in groups:
            ids.fill(<PageIds?>group)
        return ids

    cdef int fill(self, object values) except -1:
        """Append ids; nothing is appended if one of them is not an int that fits int32."""
        cdef const int32_t[::1] array
        if isinstance(values, PageIds):
            (<PageIds>values).copy_into(self)
        elif isinstance(values, ndarray):
            array = as_int32_array(values, "ids")
            if array.shape[0]:
                self.add(&array[0], array.shape[0])
        else:
            self.add_items(as_list(values, "ids"), 0, MAX_PAGES)
        return 0

    @cython.critical_section
    cdef int copy_into(self, PageIds other) except -1:
        return other.add(self.ids, self.num)

    @cython.critical_section
    def to_list(self) -> list:
        """The ids as a new list."""
        cdef Py_ssize_t i
        return [self.ids[i] for i in range(self.num)]

    @cython.critical_section
    def to_array(self):
        """The ids as a new int32 array."""
        return array_of(self.ids, self.num)

    @cython.critical_section
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


cdef inline bint is_signed(const char *buffer_format) noexcept nogil:
    """Whether a buffer holds C ints, or longs, in the byte order of the machine."""
    return (buffer_format[0] == c"i" or buffer_format[0] == c"l") and buffer_format[1] == 0


@cython.final
@cython.auto_pickle(False)
cdef class _BorrowedIds(PageIds):
    """The ids in an int32 array, not copied. It is not to outlive a call, nor to be extended."""

    cdef Py_buffer view

    cdef int borrow(self, object values, str name) except -1:
        if not self.try_borrow(values) and not self.try_borrow(as_int32_array(values, name)):
            raise ArgumentTypeError(f"{name}: got an array whose buffer cannot be read, allowed: one of int32")
        return 0

    cdef bint try_borrow(self, object values) except -1:
        """False for an array of another type or layout. The buffer itself, for a memoryview of Cython's costs 0.2 us more."""
        try:
            PyObject_GetBuffer(values, &self.view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        except (BufferError, ValueError):
            return False
        if self.view.ndim != 1 or self.view.itemsize != sizeof(int32_t) or not is_signed(self.view.format):
            PyBuffer_Release(&self.view)
            return False
        self.ids = <int32_t *>self.view.buf
        self.num = self.view.shape[0]
        return True

    def __dealloc__(self):
        self.ids = NULL
        PyBuffer_Release(&self.view)


cdef PageIds as_page_ids(object values, str name="ids"):
    """`values` as int32 to read during a call; no copy is made of an int32 array."""
    cdef PageIds ids
    cdef _BorrowedIds borrowed
    if isinstance(values, PageIds):
        return settled(values)
    if isinstance(values, ndarray):
        borrowed = _BorrowedIds.__new__(_BorrowedIds)
        borrowed.borrow(values, name)
        return borrowed
    ids = PageIds.__new__(PageIds)
    ids.add_items(as_list(values, name), 0, MAX_PAGES, name)
    return ids


cdef PageIds as_own_ids(object values, str name):
    """The same as ids that nobody else can change; an array is copied too."""
    cdef PageIds ids = as_page_ids(values, name)
    return PageIds(ids) if isinstance(ids, _BorrowedIds) else ids


cdef int refuse_negative(const int32_t *token_ids, Py_ssize_t n, Py_ssize_t first) except -1:
    """ArgumentError for a token id below 0, with its place, where the first one stands at `first`."""
    cdef Py_ssize_t bad = find_negative(token_ids, n)
    if bad >= 0:
        raise ArgumentError(f"token_ids: got {token_ids[bad]} (at {first + bad}), allowed: at least 0")
    return 0


def require_token_ids(token_ids, first=0) -> None:
    """ArgumentError for a token id below 0, with its place, where the first one stands at `first`. O(n), 0.1 ns each."""
    cdef PageIds ids = as_page_ids(token_ids, "token_ids")
    refuse_negative(ids.ids, ids.num, size_of(first, "first"))


def lists_of(tuple groups not None) -> tuple:
    """The ids of each PageIds as a list. One group, which is what most models have, costs no loop."""
    if len(groups) == 1:
        return ((<PageIds?>groups[0]).to_list(),)
    return tuple([(<PageIds?>ids).to_list() for ids in groups])


@cython.final
cdef class HeldPages(PageIds):
    """The pages that one request holds in one cache group, in token order. Only a `PageStore` changes them, under its lock.

    ``num_cached_pages`` of them, from the first on, need no prefix entry any more; the first ``num_skipped_pages`` fell out
    of the attention window, and their places hold the null page; the first ``num_hit_pages`` were hits.
    """

    cdef readonly Py_ssize_t num_cached_pages
    cdef readonly Py_ssize_t num_skipped_pages
    cdef readonly Py_ssize_t num_hit_pages

    @cython.critical_section
    cdef bint has_place_for(self, Py_ssize_t num_more) noexcept:
        """`has_room_for`, while others may read."""
        return self.has_room_for(num_more)

    @cython.critical_section
    cdef void blank(self, Py_ssize_t stop) noexcept:
        """Put the null page in the places of those before `stop`."""
        memset(self.ids, 0, stop * sizeof(int32_t))
        self.num_skipped_pages = stop

    @cython.critical_section
    cdef void clear(self) noexcept:
        self.num = 0
        self.num_cached_pages = 0
        self.num_hit_pages = 0
        self.num_skipped_pages = 0


cdef PageIds settled(PageIds ids):
    """`ids`, or a copy of those that may change."""
    return PageIds(ids) if isinstance(ids, HeldPages) else ids


cdef PageIds as_settled(PageIds ids):
    """The same; none for None."""
    return PageIds() if ids is None else settled(ids)


cdef int require_as_many(set lengths, PageIds strides) except -1:
    """ArgumentError for unequal lengths, and for a page without hashes."""
    if len(lengths) > 1:
        raise ArgumentError(f"groups: got {sorted(lengths)} groups, numbers, hits and keys, allowed: as many of each")
    if any([stride < 1 for stride in strides.to_list()]):
        raise ArgumentError(f"strides: got {strides.to_list()}, allowed: at least 1")
    return 0


@cython.final
@cython.auto_pickle(False)
cdef class PageRules:
    """Which pages a request needs in one cache group.

    `page_size` tokens share a page; None is a state, one page for any number of tokens. With a `window` a token attends to so
    many tokens, itself included; with a `chunk` to those of its chunk. Pages that no token to come attends to are skipped.
    """

    cdef Rules rules

    def __cinit__(self, page_size, window=0, chunk=0):
        self.rules.page_size = MAX_TOKENS if page_size is None else <int32_t>size_of(page_size, "page_size", 1, MAX_TOKENS)
        self.rules.window = <int32_t>min(size_of(window, "sliding_window", 0, INT64_MAX), MAX_TOKENS)
        self.rules.chunk = <int32_t>min(size_of(chunk, "attention_chunk_size", 0, INT64_MAX), MAX_TOKENS)

    def count_pages(self, num_tokens) -> int:
        """Places that tokens take, those of skipped pages included."""
        cdef int64_t n = size_of(num_tokens, "num_tokens", 0, INT64_MAX - MAX_TOKENS)
        if self.rules.page_size == MAX_TOKENS:
            return n > 0
        return (n + self.rules.page_size - 1) // self.rules.page_size

    def count_room_tokens(self, num_pages) -> int:
        """Tokens that have a slot in so many places."""
        return <int64_t>self.rules.page_size * size_of(num_pages, "num_pages")

    def find_first_useful_page(self, num_computed_tokens, num_cached_pages) -> int:
        """Pages before it are of no use to tokens from `num_computed_tokens` on."""
        cdef int64_t num_computed = min(size_of(num_computed_tokens, "num_computed_tokens", 0, INT64_MAX), MAX_TOKENS)
        return first_useful_page(&self.rules, <int32_t>num_computed, <int32_t>size_of(num_cached_pages, "num_cached_pages"))

    def find_next_skip(self, num_skipped_pages) -> int:
        """The least number of computed tokens at which a page more may be skipped."""
        return next_skip(&self.rules, <int32_t>size_of(num_skipped_pages, "num_skipped_pages"))


cdef Digest extra_key_of(bytes key) except *:
    """The key for extra keys: no tokens can imitate them."""
    return digest_of_bytes(siphash128(key, b"extra keys"))


@cython.final
cdef class HashChain:
    """The digests of a request's full pages, each made from the one before: SipHash-2-4-128 under a secret key.

    `page_size` is in tokens. With `keep_token_ids` the tokens stay beside the digests. 16 bytes a page; 30 ns a page of 16.
    """

    cdef Digest key
    cdef Digest extra_key
    cdef Digest *digests
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t page_size
    cdef PageIds token_ids    # None: not kept
    cdef cython.pymutex lock
    cdef LockNode lock_node

    def __cinit__(self, page_size, bytes key not None, bint keep_token_ids=False):
        enlist_lock(&self.lock_node, &self.lock, CHAIN_LOCK)
        self.page_size = size_of(page_size, "page_size", 1)
        self.key = digest_of_bytes(key)
        self.extra_key = extra_key_of(key)
        self.token_ids = PageIds() if keep_token_ids else None

    def __dealloc__(self):
        delist_lock(&self.lock_node)
        free(self.digests)

    def __reduce__(self):
        raise ArgumentTypeError("a HashChain holds a secret key and cannot be pickled")

    def __len__(self):
        """Number of pages hashed."""
        cdef Py_ssize_t num
        with self.lock:
            num = self.num
        return num

    def __getitem__(self, Py_ssize_t i) -> int:
        """The digest of page `i` as an int of 128 bits."""
        cdef Digest digest
        cdef Py_ssize_t num
        with self.lock:
            num = self.num
            if 0 <= i < num:
                digest = self.digests[i]
        if not 0 <= i < num:
            raise IndexError(f"page: got {i}, allowed: 0 to {num - 1}")
        return int_of_digest(digest)

    cdef bint has_room_for(self, Py_ssize_t num_more) noexcept:
        """Make room for `num_more` digests; False where memory is short, or the chain is lent for a look-up."""
        cdef Py_ssize_t capacity = max(self.num + num_more, 2 * self.capacity, 4)
        cdef Digest *digests
        if self.num + num_more <= self.capacity:
            return True
        if self.digests != NULL and self.capacity == 0:
            return False
        digests = <Digest *>realloc(self.digests, capacity * sizeof(Digest))
        if digests == NULL:
            return False
        self.digests = digests
        self.capacity = capacity
        return True

    cdef int refuse_growth(self, Py_ssize_t num_more) except -1:
        if self.digests != NULL and self.capacity == 0:
            raise ArgumentError("the chain is lent for a look-up and cannot grow")
        raise MemoryError(f"{num_more} digests more")

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
            copied = settled(tokens) if isinstance(tokens, PageIds) else PageIds(tokens)
            self.extend_native(copied.ids, copied.num, extra_keys)

    cdef int extend_native(self, const int32_t *tokens, Py_ssize_t num_tokens, bytes extra_keys) except -1:
        cdef Py_ssize_t num_pages = num_tokens // self.page_size
        cdef bint has_room
        if num_tokens % self.page_size:
            raise ArgumentError(f"token ids: got {num_tokens}, allowed: a multiple of the page size {self.page_size}")
        if num_tokens == 0:
            return 0
        with self.lock:
            has_room = self.has_room_for(num_pages) and (self.token_ids is None or self.token_ids.has_room_for(num_tokens))
            if has_room:
                self.hash_after_last(tokens, num_pages, extra_keys)
        if not has_room:
            self.refuse_growth(num_pages)
        return 0

    cdef void hash_after_last(self, const int32_t *tokens, Py_ssize_t num_pages, bytes extra_keys) noexcept:
        """Hash pages, for which there is room."""
        cdef Digest parent = self.digests[self.num - 1] if self.num else Digest(0, 0)
        cdef Digest key = self.key
        cdef Digest *out = self.digests + self.num
        cdef Py_ssize_t page_size = self.page_size
        if self.token_ids is not None:
            memcpy(self.token_ids.ids + self.token_ids.num, tokens, num_pages * page_size * sizeof(int32_t))
            self.token_ids.num += num_pages * page_size
        if extra_keys:
            parent = hash_after(self.extra_key, parent, extra_keys, len(extra_keys))
        if num_pages < RELEASE_GIL_AT:
            hash_pages(key, parent, tokens, page_size, out, num_pages)
        else:
            with nogil:
                hash_pages(key, parent, tokens, page_size, out, num_pages)
        self.num += num_pages

    def append_key(self, object key, tokens=()) -> None:
        """Append one page by a 128-bit key that was made elsewhere, with its tokens where they are to be kept: none, or
        `page_size` of them.
        """
        cdef Digest digest = digest_of_int(key)
        cdef PageIds copied = as_own_ids(tokens, "token ids")
        cdef bint has_room
        if copied.num not in (0, self.page_size):
            raise ArgumentError(f"token ids: got {copied.num}, allowed: none, or a page of {self.page_size}")
        with self.lock:
            has_room = self.has_room_for(1) and (self.token_ids is None or self.token_ids.has_room_for(copied.num))
            if has_room:
                self.digests[self.num] = digest
                self.num += 1
                if self.token_ids is not None:
                    self.token_ids.put(copied.ids, copied.num)
        if not has_room:
            self.refuse_growth(1)

    def page_token_ids(self, Py_ssize_t i) -> tuple:
        """The tokens of page `i`, or an empty tuple where they are not kept."""
        cdef PageIds tokens = PageIds.__new__(PageIds)
        cdef bint has_room = True
        with self.lock:
            if self.token_ids is not None and 0 <= i < self.token_ids.num // self.page_size:
                has_room = tokens.has_room_for(self.page_size)
                if has_room:
                    memcpy(tokens.ids, self.token_ids.ids + i * self.page_size, self.page_size * sizeof(int32_t))
                    tokens.num = self.page_size
        if not has_room:
            raise MemoryError(f"{self.page_size} token ids")
        return tuple(tokens.to_list())


cdef list held_pages_in(object values):
    """`values` as a list of `HeldPages`."""
    cdef list held = list(as_list(values, "held"))
    for item in held:
        if not isinstance(item, HeldPages):
            raise ArgumentTypeError(f"held: got {type(item).__name__}, allowed: HeldPages")
    return held


cdef int check_distinct(tuple groups) except -1:
    """ArgumentError where a `HeldPages` stands twice, ArgumentTypeError for something else."""
    cdef Py_ssize_t i, j
    held_pages_in(groups)
    for i in range(len(groups)):
        for j in range(i):
            if groups[j] is groups[i]:
                raise ArgumentError(f"groups: got one twice (at {j} and {i}), allowed: each once")
    return 0


cdef tuple histogram_of(const Histogram *histogram):
    cdef Py_ssize_t i
    return [histogram.counts[i] for i in range(NUM_BUCKETS)], histogram.sum


cdef tuple counters_of(Pool pool):
    return pool.num_allocated, pool.num_freed, pool.num_evicted, pool.num_cached, pool.num_queried, pool.num_hit


cdef int32_t as_shard(object shard, int32_t num_shards) except? -1:
    """`shard` as an index; -1, the whole pool, for None."""
    return -1 if shard is None else <int32_t>size_of(shard, "shard", 0, num_shards - 1)


@cython.final
@cython.auto_pickle(False)
cdef class _FoundIds(PageIds):
    """Pages as a look-up found them. What they hold is known, and need not be compared, while no prefix entry was dropped."""

    cdef HashChain chain
    cdef const Pool *pool
    cdef Py_ssize_t stride
    cdef int32_t group
    cdef int64_t num_dropped

    cdef bint is_known(self, HashChain chain, const Group *group, const Pool *pool) noexcept:
        """Whether these are still the pages of a group with what the chain says. The pool is locked."""
        return (
            self.chain is chain
            and self.pool == pool
            and self.stride == group.stride
            and self.group == group.id
            and self.num_dropped == pool.num_dropped
        )


cdef object frombuffer = np.frombuffer
cdef object NO_KEYS = np.frombuffer(b"", np.uint64)
cdef object NO_NUMBERS = np.frombuffer(b"", np.int32)


@cython.final
@cython.auto_pickle(False)
cdef class _Copies:
    """Copies of cached pages, and of keys that went, in memory that the arrays made of it share. Read-only for Python."""

    cdef char *memory
    cdef Py_ssize_t size            # bytes
    cdef Copies pages
    cdef Digest *removed_keys
    cdef int32_t *removed_groups
    cdef Py_ssize_t num_removed

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.size, 1, flags)

    cdef bint has_room_for(self, Py_ssize_t num_pages, Py_ssize_t tokens_width, Py_ssize_t num_removed) noexcept:
        """Take memory for so many pages and keys; False where it is short."""
        cdef Py_ssize_t key_size = num_pages * sizeof(Digest), removed_size = num_removed * sizeof(Digest)
        cdef Py_ssize_t runs_size = num_pages * sizeof(Run), tokens_size = num_pages * tokens_width * sizeof(int32_t)
        self.size = key_size + removed_size + runs_size + tokens_size + num_removed * sizeof(int32_t)
        self.memory = <char *>malloc(self.size)
        self.pages.keys = <Digest *>self.memory
        self.removed_keys = <Digest *>(self.memory + key_size)
        self.pages.runs = <Run *>(self.memory + key_size + removed_size)
        self.pages.token_ids = <int32_t *>(self.memory + key_size + removed_size + runs_size)
        self.removed_groups = <int32_t *>(self.memory + key_size + removed_size + runs_size + tokens_size)
        return self.memory != NULL

    cdef void copy_removed(self, const Journal *journal) noexcept:
        cdef Py_ssize_t i
        for i in range(journal.num_removed):
            self.removed_keys[i] = journal.removed[i].key
            self.removed_groups[i] = journal.removed[i].group
        self.num_removed = journal.num_removed

    cdef object array(self, object empty, const void *start, Py_ssize_t n):
        """An array like `empty`, which it is if `n` is 0."""
        return frombuffer(self, empty.dtype, n, <const char *>start - self.memory) if n else empty

    cdef tuple list_pages(self):
        """What `PageStore.list_entries` returns."""
        cdef Py_ssize_t i
        runs = [
            (
                int_of_digest(self.pages.runs[i].origin.parent),
                self.pages.runs[i].origin.place,
                self.pages.runs[i].origin.context,
                self.pages.runs[i].group,
                self.pages.runs[i].num_pages,
                self.pages.runs[i].num_tokens,
            )
            for i in range(self.pages.num_runs)
        ]
        keys = self.array(NO_KEYS, self.pages.keys, 2 * self.pages.num_pages)
        return keys, runs, self.array(NO_NUMBERS, self.pages.token_ids, self.pages.num_tokens)


cdef class PageStore:
    """The records of one pool, its free queue and its prefix index. `pagepool.PagePool` is the door for users.

    Takes and returns page ids. O(num_pages) to make; memory a page: 32 bytes of record, 8 of twin links and 16 to 32 of index
    slots (none of the last two without caching); 24 more once a data-parallel hint was given, 8 without caching.
    """

    cdef Pool pool
    cdef dict views                     # page id -> CachePage, for those that were asked for
    cdef readonly bint is_pool          # record 0 is a page of its own; other stores can grow
    cdef readonly bint enable_caching
    cdef readonly object names          # HashNames
    cdef Py_ssize_t capacity            # records there is room for
    cdef cython.pymutex lock
    cdef LockNode lock_node

    def __cinit__(self, num_pages, bint enable_caching=True, bint is_pool=True):
        cdef int32_t page_id, num_records
        enlist_lock(&self.lock_node, &self.lock, STORE_LOCK)
        self.is_pool = is_pool
        self.enable_caching = enable_caching
        self.views = {}
        self.names = HashNames()
        self.pool.multiplier = int.from_bytes(os.urandom(8), "little") | 1
        num_records = size_of(num_pages, "num_pages", 1)
        if not self.has_room_for(num_records):
            raise MemoryError(f"{num_records} page records")
        self.add_records(num_records)
        self.pool.sample_mask = -1
        if is_pool:
            self.sample_residency()
        for page_id in range(1, self.pool.num_pages):
            push(&self.pool, page_id)

    def __dealloc__(self):
        delist_lock(&self.lock_node)
        free(self.pool.pages)
        free(self.pool.slots)
        free(self.pool.twins)
        free(self.pool.shard_links)
        free(self.pool.shard_num_free)
        free(self.pool.shard_twins)
        free(self.pool.page_tokens)
        free(self.pool.journal.notes)
        free(self.pool.journal.removed)
        free(self.pool.journal.contexts)
        if self.pool.residency != NULL:
            free(self.pool.residency.stays)
        free(self.pool.residency)

    def __reduce__(self):
        raise ArgumentTypeError("a page store cannot be pickled")

    cdef bint has_room_for(self, Py_ssize_t num_pages) noexcept:
        """Make room for `num_pages` records; False where memory is short. Amortised O(1) a record."""
        cdef Py_ssize_t capacity = max(num_pages, 2 * self.capacity if self.capacity else 0)
        cdef Py_ssize_t num_slots
        cdef uint32_t num_slot_bits = 2
        cdef Slot *slots
        if num_pages <= self.capacity:
            return True
        while <Py_ssize_t>1 << num_slot_bits < 2 * capacity:
            num_slot_bits += 1
        num_slots = <Py_ssize_t>1 << num_slot_bits
        if not self.has_records_for(capacity):
            return False
        if self.enable_caching:
            slots = <Slot *>calloc(num_slots, sizeof(Slot))
            if slots == NULL:
                return False
            free(self.pool.slots)
            self.pool.slots = slots
            self.pool.mask = <uint32_t>(num_slots - 1)
            self.pool.home_shift = 32 - num_slot_bits
            self.enter_again()
        self.capacity = capacity
        return True

    cdef bint has_records_for(self, Py_ssize_t capacity) noexcept:
        cdef Page *pages = <Page *>realloc(self.pool.pages, capacity * sizeof(Page))
        cdef Links *twins
        if pages == NULL:
            return False
        self.pool.pages = pages
        if self.enable_caching:
            twins = <Links *>realloc(self.pool.twins, capacity * sizeof(Links))
            if twins == NULL:
                return False
            self.pool.twins = twins
        return True

    cdef void enter_again(self) noexcept:
        """Enter the cached pages in a new index."""
        cdef Page *pages = self.pool.pages
        cdef int64_t num_cached = self.pool.num_cached
        cdef int32_t i, group
        self.pool.num_keys = self.pool.num_entries = 0
        for i in range(1, self.pool.num_pages):
            if pages[i].group != NO_GROUP:
                group = pages[i].group & ~FLAGS
                pages[i].group = NO_GROUP
                enter(&self.pool, i, digest_of(&pages[i]), group)
        self.pool.num_cached = num_cached

    cdef int sample_residency(self) except -1:
        """Sample every 128th page; in a small pool more, so that there are some. Pages that a restored pool has in use already
        begin their time now.
        """
        cdef int32_t i, shift = SAMPLE_SHIFT
        cdef int64_t now = monotonic_ns()
        while shift and self.pool.num_pages >> (shift + SAMPLE_SHIFT) == 0:
            shift -= 1
        self.pool.residency = <Residency *>calloc(1, sizeof(Residency))
        if self.pool.residency == NULL:
            raise MemoryError("the residency of pages")
        self.pool.residency.shift = shift
        self.pool.residency.stays = <Stay *>calloc((self.pool.num_pages >> shift) + 1, sizeof(Stay))
        if self.pool.residency.stays == NULL:
            raise MemoryError("the residency of pages")
        for i in range((self.pool.num_pages >> shift) + 1):
            self.pool.residency.stays[i] = Stay(now, now)
        self.pool.sample_mask = (1 << shift) - 1
        return 0

    cdef void add_records(self, int32_t num_pages) noexcept:
        """Initialise records, for which there is room, up to `num_pages`: neither free nor cached."""
        cdef int32_t i
        if self.pool.num_pages == 0:
            self.pool.pages[NULL_PAGE] = Page(0, 0, 0, NULL_PAGE, NULL_PAGE, NO_GROUP)
            self.pool.num_pages = 1
        for i in range(self.pool.num_pages, num_pages):
            self.pool.pages[i] = Page(0, 0, 0, NOT_FREE, NOT_FREE, NO_GROUP)
        self.pool.num_pages = num_pages

    # What it holds.

    cdef inline int32_t read(self, const int32_t *value) noexcept:
        """One value. It is never torn, so that no lock is needed but where there is no GIL at all."""
        cdef int32_t copied
        if GIL_DISABLED:
            self.lock.acquire()
        copied = value[0]
        if GIL_DISABLED:
            self.lock.release()
        return copied

    cdef inline Page record(self, int32_t page_id) noexcept:
        """A copy of a page's record, as it is between calls."""
        cdef Page page
        with self.lock:
            page = self.pool.pages[page_id]
        return page

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self.read(&self.pool.num_free)

    @property
    def num_keys(self) -> int:
        """Distinct (hash, group) pairs in the prefix index."""
        return self.read(&self.pool.num_keys)

    @property
    def num_cached_pages(self) -> int:
        """Pages with a prefix entry."""
        return self.read(&self.pool.num_entries)

    @property
    def num_kept_token_ids(self) -> int:
        """Tokens that are kept of a page, at most; 0: none are."""
        return max(0, self.pool.tokens_width - 1)

    @property
    def residency(self) -> tuple:
        """Lifetimes, idle times before eviction and gaps between uses of sampled pages: for each the counts of times below 1
        ms, below 2, 4, ..., 2**22 ms, and longer, and their sum in ns. O(1).
        """
        cdef Residency copied
        if self.pool.residency == NULL:
            return ()
        with self.lock:
            copied = self.pool.residency[0]
        return histogram_of(&copied.lifetimes), histogram_of(&copied.idle_times), histogram_of(&copied.reuse_gaps)

    @property
    def counters(self) -> tuple:
        """Pages allocated, freed, evicted and cached, and tokens queried and hit, since the store was made."""
        cdef Pool pool
        with self.lock:
            pool = self.pool
        return counters_of(pool)

    def set_ref_count(self, page_id, ref_cnt) -> None:
        """Overwrite a count; that of the null page is not kept. `check` and the next `take` notice a free page that is held."""
        cdef Py_ssize_t count = size_of(ref_cnt, "ref_cnt", 0, INT32_MAX - 1)
        cdef int32_t checked = self.checked_id(page_id)
        if checked != NULL_PAGE:
            with self.lock:
                self.overwrite_count(checked, <int32_t>count)

    cdef int64_t count_changes(self) noexcept:
        """Entries that came into the prefix index, and that went."""
        cdef int64_t num_changes
        with self.lock:
            num_changes = count_changes(&self.pool)
        return num_changes

    cdef void overwrite_count(self, int32_t page_id, int32_t count) noexcept:
        cdef Page *page = &self.pool.pages[page_id]
        self.pool.is_restored &= count <= page.ref_cnt
        if is_free(&self.pool, page_id):
            self.pool.num_held_free += (count != 0) - (page.ref_cnt != 0)
        page.ref_cnt = count

    cdef bint add_reference(self, int32_t page_id, int32_t change) noexcept:
        """One reference more or less; False, and nothing changed, where the count would leave its range."""
        cdef bint is_right
        with self.lock:
            is_right = 0 <= self.pool.pages[page_id].ref_cnt + <int64_t>change < INT32_MAX
            if is_right and page_id != NULL_PAGE:
                self.overwrite_count(page_id, self.pool.pages[page_id].ref_cnt + change)
        return is_right

    def is_free(self, page_id) -> bool:
        """Whether the page is in the free queue."""
        cdef int32_t checked = self.checked_id(page_id)
        return checked != NULL_PAGE and self.read(&self.pool.pages[checked].prev_free) != NOT_FREE

    def neighbours(self, page_id) -> tuple:
        """The pages before and after a page in the free queue; None at the ends and outside the queue."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef Page page = self.record(checked)
        if checked == NULL_PAGE or page.prev_free == NOT_FREE:
            return None, None
        return (
            None if page.prev_free == NULL_PAGE else self.view(page.prev_free),
            None if page.next_free == NULL_PAGE else self.view(page.next_free),
        )

    def ref_counts(self):
        """The ref counts of all pages: int32 array ``[num_pages]``. O(num_pages)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef PageIds counts = PageIds.__new__(PageIds)
        cdef bint has_room
        with self.lock:
            has_room = self.copy_queue(counts, ids)
        if not has_room:
            raise MemoryError(f"ref counts of {self.pool.num_pages} pages")
        return counts.to_array()

    def free_ids(self) -> PageIds:
        """The free queue, front first. O(num_pages)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef PageIds counts = PageIds.__new__(PageIds)
        cdef bint has_room
        with self.lock:
            has_room = self.copy_queue(counts, ids)
        if not has_room:
            raise MemoryError(f"ids of {self.pool.num_pages} pages")
        return ids

    def first_cached_ids(self) -> PageIds:
        """For each key of the prefix index the page cached first under it. O(size of the index)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t i
        cdef bint has_room
        with self.lock:
            has_room = ids.has_room_for(self.pool.num_keys)
            for i in range(<Py_ssize_t>self.pool.mask + 1 if self.pool.num_keys and has_room else 0):
                if self.pool.slots[i].page_id != NULL_PAGE:
                    ids.ids[ids.num] = self.pool.slots[i].page_id
                    ids.num += 1
        if not has_room:
            raise MemoryError(f"ids of {self.pool.num_keys} pages")
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
            view = self.views.setdefault(page_id, view)  # another thread may have made one
        return view

    def pages(self, PageIds ids not None) -> list:
        """The views of the pages."""
        cdef PageIds checked = self.checked(ids)
        cdef Py_ssize_t i
        return [self.view(checked.ids[i]) for i in range(checked.num)]

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
        cdef int32_t checked = page_id_of(page_id)
        self.check_range(checked)
        return checked

    cdef PageIds checked(self, object page_ids):
        """`page_ids` as ids that lie within the pool and do not change."""
        cdef PageIds ids = settled(page_ids) if isinstance(page_ids, PageIds) else PageIds(page_ids)
        cdef Py_ssize_t bad = find_outside(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.check_range(ids.ids[bad])
        return ids

    cdef inline int check_range(self, int32_t page_id) except -1:
        if not 0 <= page_id < self.pool.num_pages:
            raise PageIdError(f"page id: got {page_id}, allowed: 0 to {self.pool.num_pages - 1}")
        return 0

    # The free queue.

    def take(self, n, shard=None, num_shards=0) -> PageIds:
        """Take `n` pages from the front of the queue (of the shard, of so many): ref count 1, prefix entries dropped. O(n)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "num_pages")
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_shard = as_shard(shard, divided)
        cdef int32_t num_free, bad = NULL_PAGE
        cdef bint has_room = True
        self.lock_divided(divided)
        num_free = count_free_in(&self.pool, checked_shard)
        if num <= num_free:
            has_room = ids.has_room_for(num)
            bad = find_held_free(&self.pool, num)
            if has_room and bad == NULL_PAGE:
                self.take_into(ids, num, checked_shard)
        self.lock.release()
        if num > num_free:
            where = "" if checked_shard < 0 else f" in shard {checked_shard}"
            raise OutOfPagesError(f"pages: {num} asked for, {num_free} free{where}")
        if not has_room:
            raise MemoryError(f"ids of {num} pages")
        self.check_untaken(bad)
        return ids

    cdef int lock_divided(self, int32_t num_shards) except -1:
        """Take the lock, with the pool divided into so many shards; 0: however it is. Another user may want it otherwise."""
        self.lock.acquire()
        while num_shards and self.pool.num_shards != num_shards:
            self.lock.release()
            self.set_shards(num_shards)
            self.lock.acquire()
        return 0

    cdef void take_into(self, PageIds ids, Py_ssize_t n, int32_t shard) noexcept:
        """Append `n` new pages, of which there are enough, none of them held, and for which there is room."""
        cdef int32_t *out = ids.ids + ids.num
        if n < RELEASE_GIL_AT:
            take_from(&self.pool, out, n, shard)
        else:
            with nogil:
                take_from(&self.pool, out, n, shard)
        ids.num += n

    cdef int check_untaken(self, int32_t bad) except -1:
        """Raise unless `bad` is the null page: it is in the free queue, and somebody gave it a reference."""
        if bad != NULL_PAGE:
            raise IntegrityError(f"page {bad} is in the free queue with ref count {self.pool.pages[bad].ref_cnt}, allowed: 0")
        return 0

    cdef int check_fixed(self) except -1:
        """The store of a queue grows, and arrays beside its records do not."""
        if not self.is_pool:
            raise ArgumentError("the store of a queue has no shards, keeps no token ids and no journal")
        return 0

    def set_shards(self, num_shards) -> None:
        """Keep a free queue, and know what was cached first, for each of `num_shards` equal id ranges from now on.
        O(num_pages + pages of equal content x shards) when the number changes.
        """
        cdef int32_t n = <int32_t>size_of(num_shards, "data_parallel_size", 1, self.pool.num_pages)
        cdef bint is_divided
        cdef Links *links
        cdef Links *twins = NULL
        cdef int32_t *counts
        with self.lock:
            is_divided = n == self.pool.num_shards
        if is_divided:
            return
        self.check_fixed()
        if self.pool.num_pages % n:
            raise ArgumentError(f"data_parallel_size: got {n}, allowed: a divisor of the {self.pool.num_pages} pages")
        links = <Links *>malloc((self.pool.num_pages + n) * sizeof(Links))
        counts = <int32_t *>calloc(2 * n, sizeof(int32_t))
        if self.enable_caching:
            twins = <Links *>malloc(2 * <size_t>self.pool.num_pages * sizeof(Links))
        if links == NULL or counts == NULL or (self.enable_caching and twins == NULL):
            free(links)
            free(counts)
            free(twins)
            raise MemoryError(f"links of {self.pool.num_pages} pages in {n} shards")
        with self.lock:
            free(self.pool.shard_links)
            free(self.pool.shard_num_free)
            free(self.pool.shard_twins)
            self.pool.shard_links = links
            self.pool.shard_num_free = counts
            self.pool.shard_twins = twins
            self.pool.shard_firsts = twins + self.pool.num_pages if twins != NULL else <Links *>NULL
            self.pool.num_shards = n
            self.pool.pages_per_shard = self.pool.num_pages // n
            link_shards(&self.pool)
            link_shard_twins(&self.pool)

    def give_back(self, page_ids, bint tail_first=False) -> None:
        """One reference less for each page; those at 0 go to the back of the queue, in order. Null pages are passed over."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            bad = self.give_back_ids(ids.ids, ids.num, tail_first)
        if bad >= 0:
            self.refuse_give_back(ids, bad)

    cdef Py_ssize_t give_back_ids(self, const int32_t *ids, Py_ssize_t n, bint tail_first) noexcept:
        """`give_back` of ids that lie within the pool."""
        cdef Py_ssize_t bad
        if n < RELEASE_GIL_AT:
            return give_back(&self.pool, ids, n, tail_first)
        with nogil:
            bad = give_back(&self.pool, ids, n, tail_first)
        return bad

    cdef int refuse_give_back(self, PageIds ids, Py_ssize_t bad) except -1:
        raise DoubleFreeError(f"page {ids[bad]} (at {bad} of {len(ids)}) is freed more often than it is held")

    def give_back_restored(self) -> int | None:
        """Give back all references of a store that was loaded, the pages in order of their ids. Returns how many pages; None,
        and nothing changed, for another store, and once a reference was taken. O(num_pages).
        """
        cdef int32_t page_id, num_given = 0
        cdef bint is_restored
        with self.lock:
            is_restored = self.pool.is_restored
            for page_id in range(1, self.pool.num_pages if is_restored else 1):
                if self.pool.pages[page_id].ref_cnt:
                    self.pool.pages[page_id].ref_cnt = 1
                    put_back(&self.pool, page_id)
                    num_given += 1
        return num_given if is_restored else None

    def touch(self, page_ids) -> None:
        """One reference more for each page; a free page leaves the queue. Null pages are passed over. O(n)."""
        cdef PageIds ids = self.checked(page_ids)
        cdef Py_ssize_t bad
        with self.lock:
            bad = find_untouchable(&self.pool, ids.ids, ids.num, ids.num)
            if bad < 0:
                touch_all(&self.pool, ids.ids, ids.num)
        if bad >= 0:
            self.refuse_touch(ids.ids[bad])

    cdef int refuse_touch(self, int32_t page_id) except -1:
        cdef int32_t ref_cnt = self.record(page_id).ref_cnt
        where = f"allowed: fewer than {INT32_MAX}" if ref_cnt else "and it is not in the free queue"
        raise PageIdError(f"page {page_id} cannot be touched: its ref count is {ref_cnt}, {where}")

    def pop(self, n) -> PageIds:
        """Take the first `n` pages out of the queue and leave ref counts and prefix entries as they are."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num = size_of(n, "n")
        cdef int32_t num_free
        cdef bint has_room = True
        with self.lock:
            num_free = self.pool.num_free
            if num <= num_free:
                has_room = ids.has_room_for(num)
                while has_room and ids.num < num:
                    ids.ids[ids.num] = self.pool.pages[NULL_PAGE].next_free
                    self.pull_any(ids.ids[ids.num])
                    ids.num += 1
        if num > num_free:
            raise OutOfPagesError(f"pages: {num} asked for, {num_free} free")
        if not has_room:
            raise MemoryError(f"ids of {num} pages")
        return ids

    def remove(self, page_id) -> None:
        """Take a page out of the queue, wherever it stands. O(1)."""
        self.pull_checked(self.checked_id(page_id))

    def remove_page(self, page) -> None:
        """`remove` by its view; PageIdError for another pool's."""
        self.pull_checked(self.index_of(page))

    cdef void pull_any(self, int32_t page_id) noexcept:
        """`pull`, also for a page that somebody gave a reference to."""
        self.pool.num_held_free -= self.pool.pages[page_id].ref_cnt != 0
        pull(&self.pool, page_id)
        self.pool.num_reused += 1

    cdef int pull_checked(self, int32_t page_id) except -1:
        cdef bint was_free
        with self.lock:
            was_free = page_id != NULL_PAGE and is_free(&self.pool, page_id)
            if was_free:
                self.pull_any(page_id)
        if not was_free:
            raise PageIdError(f"page {self.page(page_id).page_id} is not in the free queue")
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
        """Take over the record of a page that stands alone: `page` becomes a view of this store. Amortised O(1)."""
        cdef PageStore home = page.store
        cdef int32_t index = page.index
        cdef Page record
        cdef bint has_room
        if home is self:
            return
        if page.is_null:
            raise PageIdError(f"page {page.page_id} cannot be appended: it is a null page")
        if home.is_pool or self.is_pool or home.is_free(index):
            raise PageIdError(f"page {page.page_id} belongs to another pool or queue")
        page_hash = page.page_hash
        record = home.record(index)
        with self.lock:
            has_room = self.has_room_for(self.pool.num_pages + <Py_ssize_t>1)
            if has_room:
                self.add_records(self.pool.num_pages + 1)
                index = self.pool.num_pages - 1
                self.pool.pages[index].ref_cnt = record.ref_cnt
        if not has_room:
            raise MemoryError(f"{self.pool.num_pages + 1} page records")
        del home.views[page.index]
        page.settle(self, index)
        self.views[index] = page
        if page_hash is not None:
            page.page_hash = page_hash

    # The prefix index.

    def find(self, key, group, start=0, stop=None):
        """The page cached first under a 128-bit int key in a group, among ids in ``[start, stop)``; None if there is none."""
        cdef Digest digest = digest_of_int(key)
        cdef Range ids = self.range_of(start, stop)
        cdef int32_t page_id = NULL_PAGE
        cdef int32_t checked_group = group_of(group)
        if self.enable_caching:
            with self.lock:
                page_id = find_within(&self.pool, digest, checked_group, ids)
        return None if page_id == NULL_PAGE else page_id

    def find_pages(self, key, groups, start=0, stop=None):
        """For each group the view of the page that `find` finds; None if it finds none in one of them."""
        pages = []
        for group in as_list(groups, "groups"):
            page_id = self.find(key, group, start, stop)
            if page_id is None:
                return None
            pages.append(self.view(page_id))
        return pages

    def twins(self, page_id) -> PageIds:
        """All pages with the content of a cached page, in the order they were cached, from this one on."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef int32_t first = self.checked_id(page_id)
        cdef int32_t twin = first
        cdef bint has_room
        with self.lock:
            has_room = ids.has_room_for(1)
            while has_room:
                ids.ids[ids.num] = twin
                ids.num += 1
                if self.pool.pages[first].group == NO_GROUP or not self.pool.pages[first].group & TWIN:
                    break
                twin = self.pool.twins[twin].next
                if twin == first:
                    break
                has_room = ids.has_room_for(1)
        if not has_room:
            raise MemoryError(f"{ids.num + 1} page ids")
        return ids

    def enter(self, page_id, key, group) -> None:
        """Give a page without a prefix entry one."""
        cdef int32_t checked = self.checked_id(page_id)
        cdef Digest digest = digest_of_int(key)
        cdef int32_t checked_group = group_of(group)
        cdef bint is_cached
        if not self.enable_caching:
            raise PageHashError("prefix caching is off")
        if checked == NULL_PAGE:
            raise PageIdError("the null page cannot be cached")
        with self.lock:
            is_cached = self.pool.pages[checked].group != NO_GROUP
            if not is_cached:
                enter(&self.pool, checked, digest, checked_group)
                if is_journaled(&self.pool):
                    note_entry(&self.pool, checked, Origin(Digest(0, 0), 0, 0))
                keep_tokens(&self.pool, checked, NULL, 0)
        if is_cached:
            raise PageHashError(f"page {checked} has a hash already")

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

    def drop_all(self) -> int:
        """Drop every prefix entry, unless pages are held. Returns how many are. O(num_pages)."""
        cdef int32_t i, num_held
        with self.lock:
            num_held = self.pool.num_pages - 1 - self.pool.num_free
            for i in range(1, self.pool.num_pages if num_held == 0 else 1):
                if self.pool.pages[i].group != NO_GROUP:
                    drop(&self.pool, i)
            if num_held == 0 and is_journaled(&self.pool):
                note_clear(&self.pool.journal)
        return num_held

    def key_of(self, page_id):
        """``(128-bit int key, group)`` of a cached page, or None."""
        cdef Page page = self.record(self.checked_id(page_id))
        if page.group == NO_GROUP:
            return None
        return int_of_digest(digest_of(&page)), page.group & ~FLAGS

    def page_hash_of(self, page_id):
        """The PageHashWithGroupId of a cached page, or None."""
        cdef int32_t checked = self.checked_id(page_id)
        found = self.key_of(checked)
        if found is None:
            return None
        page_hash = self.names.hash_of(found[0]) or PageHash(found[0], self.token_ids_of(checked))
        return PageHashWithGroupId(page_hash, found[1])

    def keep_token_ids(self, width) -> None:
        """Keep the tokens of pages that `enter_held` enters from now on, `width` at most a page. 4 bytes a token. Tokens kept
        so far stay; a width that is no greater changes nothing.
        """
        cdef Py_ssize_t i, num_values = size_of(width, "page_size", 1) + 1
        cdef int32_t *page_tokens
        if num_values <= self.pool.tokens_width:
            return
        self.check_fixed()
        page_tokens = <int32_t *>calloc(num_values * self.pool.num_pages, sizeof(int32_t))
        if page_tokens == NULL:
            raise MemoryError(f"{width} token ids for each of {self.pool.num_pages} pages")
        with self.lock:
            for i in range(self.pool.num_pages if self.pool.tokens_width else 0):
                memcpy(
                    page_tokens + i * num_values,
                    self.pool.page_tokens + i * self.pool.tokens_width,
                    self.pool.tokens_width * sizeof(int32_t),
                )
            free(self.pool.page_tokens)
            self.pool.page_tokens = page_tokens
            self.pool.tokens_width = num_values

    # The journal: what came into the prefix index and went, for those who are told of it.

    def start_journal(self) -> None:
        """Note from now on which keys come and go, and where cached pages stand in their requests. 56 bytes a page, which are
        touched now, as are those of kept tokens: the first prompts would pay for it.

        ArgumentError where there is a journal already, and where pages are held or cached, of which that is not known.
        """
        cdef Journal journal
        cdef Py_ssize_t n = self.pool.num_pages
        cdef int32_t num_held = 0, num_keys = 0
        cdef bint has_room, has_journal = False
        memset(&journal, 0, sizeof(journal))
        self.check_fixed()
        journal.notes = <Note *>malloc(n * sizeof(Note))
        journal.removed = <Removal *>malloc(n * sizeof(Removal))
        has_room = journal.notes != NULL and journal.removed != NULL
        has_room = has_room and add_context(&journal) == 0
        if has_room:
            memset(journal.notes, NOT_NEW, n * sizeof(Note))
            memset(journal.removed, 0, n * sizeof(Removal))
            journal.notes[NULL_PAGE] = Note(Origin(Digest(0, 0), 0, 0), Links(NULL_PAGE, NULL_PAGE))
            with self.lock:
                has_journal = is_journaled(&self.pool)
                num_held = self.pool.num_pages - 1 - self.pool.num_free
                num_keys = self.pool.num_keys
                if not has_journal and num_held == 0 and num_keys == 0:
                    if self.pool.tokens_width:
                        memset(self.pool.page_tokens, 0, n * self.pool.tokens_width * sizeof(int32_t))
                    self.pool.journal, journal = journal, self.pool.journal
        free(journal.notes)
        free(journal.removed)
        free(journal.contexts)
        if not has_room:
            raise MemoryError(f"the journal of {n} pages")
        if has_journal:
            raise ArgumentError("the pool has a journal already")
        if num_held or num_keys:
            raise ArgumentError(f"{num_held} pages are held and {num_keys} prefixes cached already, allowed: none")

    def add_context(self) -> int:
        """A small int that is to stand for what pages are hashed with besides their tokens; 0 is none. It is kept while cached
        pages or rows have it, or somebody holds it, as the caller does.
        """
        cdef int32_t context
        self.check_journaled()
        with self.lock:
            context = add_context(&self.pool.journal)
        if context < 0:
            raise MemoryError("contexts of pages")
        return context

    def hold_context(self, context) -> None:
        """Hold a context once more."""
        self.change_holders(context, 1)

    def release_context(self, context) -> None:
        """Hold a context once less. ArgumentError where nobody holds it."""
        self.change_holders(context, -1)

    cdef int change_holders(self, object context, int32_t change) except -1:
        cdef int32_t checked = self.checked_context(context)
        cdef Context *changed
        cdef bint is_right
        self.check_journaled()
        with self.lock:
            changed = &self.pool.journal.contexts[checked]
            is_right = 0 <= changed.num_holders + <int64_t>change < INT32_MAX
            if is_right:
                changed.num_holders += change
        if not is_right:
            raise ArgumentError(f"context: got {context}, allowed: one that is held, and not by {INT32_MAX} others")
        return 0

    def kept_contexts(self):
        """The contexts that are to be kept, as a set; None while somebody tells what he took. O(contexts)."""
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Journal *journal = &self.pool.journal
        cdef Py_ssize_t i
        cdef bint has_room, is_told
        with self.lock:
            is_told = journal.is_told
            has_room = ids.has_room_for(journal.num_contexts)
            for i in range(journal.num_contexts if has_room else 0):
                if journal.contexts[i].num_users or journal.contexts[i].num_holders:
                    ids.ids[ids.num] = <int32_t>i
                    ids.num += 1
        if not has_room:
            raise MemoryError("the contexts of a journal")
        return None if is_told else set(ids.to_list())

    @property
    def max_num_kept_keys(self) -> int:
        """How many `kept_keys` there can be."""
        cdef Py_ssize_t num_removed = self.read(&self.pool.journal.num_removed)
        return 2 * <Py_ssize_t>self.pool.num_pages + num_removed if is_journaled(&self.pool) else self.pool.num_pages

    def kept_keys(self):
        """The keys whose names are to be kept, as a list of 128-bit ints: those of the index; with a journal those of parents
        too, and those that went since the changes were taken. None while somebody tells what he took. O(num_pages).
        """
        cdef _Copies copies = _Copies.__new__(_Copies)
        cdef Py_ssize_t i
        cdef bint has_room, is_told
        with self.lock:
            is_told = self.pool.journal.is_told
            has_room = copies.has_room_for(2 * <Py_ssize_t>self.pool.num_keys, 0, self.pool.journal.num_removed)
            if has_room:
                copy_keys(&self.pool, &copies.pages)
                copies.copy_removed(&self.pool.journal)
        if not has_room:
            raise MemoryError("the keys of the prefix index")
        if is_told:
            return None
        keys = [int_of_digest(copies.pages.keys[i]) for i in range(copies.pages.num_pages)]
        return keys + [int_of_digest(copies.removed_keys[i]) for i in range(copies.num_removed)]

    def take_changes(self, bint with_entries=False) -> tuple:
        """What changed in the index since this was called last: ``(is_cleared, removed_keys, removed_groups, new, entries)``.

        All entries went at once before the rest, if `is_cleared`; uint64 ``[2 n]`` and int32 ``[n]`` of keys that went;
        then `new` ones came, as `list_entries` has them. Of a key that came and went again nothing is told. `entries` are
        those of the index after it, or None. Names and contexts are kept until `end_report`. O(changes), or O(num_pages).
        """
        cdef _Copies changes = _Copies.__new__(_Copies)
        cdef _Copies entries = _Copies.__new__(_Copies)
        cdef Journal *journal = &self.pool.journal
        cdef bint has_room, is_cleared = False
        self.check_journaled()
        with self.lock:
            has_room = changes.has_room_for(journal.num_new, self.pool.tokens_width, journal.num_removed)
            has_room = has_room and (not with_entries or self.copy_entries_to(entries))
            if has_room:
                changes.copy_removed(journal)
                self.copy_new_to(changes)
                is_cleared = journal.is_cleared
                end_journal(journal)
                journal.is_told = True
        if not has_room:
            raise MemoryError("copies of what changed in the prefix index")
        return (
            is_cleared,
            changes.array(NO_KEYS, changes.removed_keys, 2 * changes.num_removed),
            changes.array(NO_NUMBERS, changes.removed_groups, changes.num_removed),
            changes.list_pages(),
            entries.list_pages() if with_entries else None,
        )

    def list_entries(self) -> tuple:
        """The keys of the index, uint64 ``[2 n]``, of each the lower half and the upper; the runs of pages that follow one
        another in a request, ``(key of the parent, place of the first page, context, group, pages, tokens kept of each)``; and
        these tokens, int32. Changes nothing. Names and contexts are kept until `end_report`. O(num_pages).
        """
        cdef _Copies entries = _Copies.__new__(_Copies)
        cdef bint has_room
        self.check_journaled()
        with self.lock:
            has_room = self.copy_entries_to(entries)
            self.pool.journal.is_told = has_room
        if not has_room:
            raise MemoryError("copies of the prefix index")
        return entries.list_pages()

    def end_report(self) -> None:
        """Names and contexts of what was taken are not needed any more."""
        with self.lock:
            self.pool.journal.is_told = False

    cdef int check_journaled(self) except -1:
        cdef bint has_journal
        with self.lock:
            has_journal = is_journaled(&self.pool)
        if not has_journal:
            raise ArgumentError("the pool has no journal")
        return 0

    cdef void copy_new_to(self, _Copies copies) noexcept:
        if self.pool.journal.num_new < RELEASE_GIL_AT:
            copy_new(&self.pool, &copies.pages)
        else:
            with nogil:
                copy_new(&self.pool, &copies.pages)

    cdef bint copy_entries_to(self, _Copies copies) noexcept:
        """Copy all entries; False where memory is short."""
        cdef Links *links = <Links *>calloc(self.pool.num_pages, sizeof(Links))
        cdef bint has_room = links != NULL and copies.has_room_for(self.pool.num_keys, self.pool.tokens_width, 0)
        if has_room:
            with nogil:
                copy_all(&self.pool, links, &copies.pages)
        free(links)
        return has_room

    cdef tuple token_ids_of(self, int32_t page_id):
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef const int32_t *tokens
        cdef bint has_room = True
        if self.pool.page_tokens == NULL:
            return ()
        with self.lock:
            tokens = self.pool.page_tokens + page_id * self.pool.tokens_width
            has_room = ids.has_room_for(tokens[0])
            if has_room and tokens[0]:
                memcpy(ids.ids, tokens + 1, tokens[0] * sizeof(int32_t))
                ids.num = tokens[0]
        if not has_room:
            raise MemoryError("the token ids of a page")
        return tuple(ids.to_list())

    cdef void copy_tokens(self, int32_t page_id, HashChain chain, Py_ssize_t start, Py_ssize_t num_tokens) noexcept:
        """Keep the tokens of a page that begins at token `start` of a chain, or none where the chain does not have them."""
        if chain.token_ids is not None and start + num_tokens <= chain.token_ids.num:
            keep_tokens(&self.pool, page_id, chain.token_ids.ids + start, num_tokens)
        else:
            keep_tokens(&self.pool, page_id, NULL, 0)

    # Whole requests.

    def enter_pages(
        self, PageIds held not None, HashChain chain not None, start, stop, stride, group, context=0, first_place=0,
        bint is_again=False,
    ) -> None:
        """Enter pages ``held[start:stop]`` under their digests of the chain, of which `stride` make a page. All or nothing.

        Null pages are passed over. The pages have a `context` of `add_context`; ``held[0]`` stands at `first_place` in
        its request. PageHashError if one is cached already; with `is_again` only if it is cached as something else.
        O(stop - start).
        """
        cdef Py_ssize_t i, bad, num_hashes = size_of(stride, "stride", 1)
        cdef PageIds ids = self.checked(held)
        cdef Py_ssize_t last = size_of(stop, "num_full_pages", 0, min(ids.num, len(chain) // num_hashes))
        cdef Py_ssize_t first = size_of(start, "num_cached_pages", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef Py_ssize_t num_tokens = num_hashes * chain.page_size
        cdef int32_t checked_context = self.checked_context(context)
        cdef int32_t place = <int32_t>size_of(first_place, "first_place", 0, MAX_PAGES - ids.num)
        if last > first and not self.enable_caching:
            raise PageHashError("prefix caching is off")
        if self.pool.page_tokens != NULL and num_tokens >= self.pool.tokens_width:
            kept = self.pool.tokens_width - 1
            raise ArgumentError(f"page size: got {num_tokens} tokens, allowed: {kept}, as many as are kept")
        with chain.lock, self.lock:
            last = min(last, chain.num // num_hashes)  # a chain that was lent is empty afterwards
            bad = enter_all(
                &self.pool, ids.ids, first, last, chain.digests, num_hashes, checked_group, checked_context, place
            )
            if bad >= 0 and is_again:
                bad = enter_missing(
                    &self.pool, ids.ids, first, last, chain.digests, num_hashes, checked_group, checked_context, place
                )
            for i in range(first, last if bad < 0 else first):
                self.copy_tokens(ids.ids[i], chain, i * num_tokens, num_tokens)
        if bad >= 0:
            self.refuse_entry(ids.ids[bad], bad, ids.num)

    cdef int32_t checked_context(self, object context) except -1:
        """A context as a number, which stays one, whatever it stands for."""
        cdef Py_ssize_t checked = size_of(context, "context")
        cdef int32_t num_contexts = max(1, self.read(&self.pool.journal.num_contexts)) if checked else 1
        if checked >= num_contexts:
            raise ArgumentError(f"context: got {context}, allowed: 0 to {num_contexts - 1}")
        return <int32_t>checked

    def enter_held(self, HeldPages held not None, HashChain chain not None, num_full_pages, stride, group, context=0) -> None:
        """Enter the pages of a request that got full: those from ``held.num_cached_pages`` to `num_full_pages`. What is entered
        already, since `rewind` let it be looked at once more, stays.
        """
        self.enter_pages(held, chain, held.num_cached_pages, num_full_pages, stride, group, context, 0, True)
        held.num_cached_pages = num_full_pages

    def check_enterable(self, HeldPages held not None, HashChain chain not None, num_full_pages, stride, group) -> None:
        """PageHashError if `enter_held` would find a page that was entered as something else. O(pages due)."""
        cdef Py_ssize_t i, stop, bad = -1, num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t num_full = size_of(num_full_pages, "num_full_pages")
        cdef int32_t page_id = NULL_PAGE, checked_group = group_of(group)
        with chain.lock, self.lock:
            stop = min(num_full, held.num, chain.num // num_hashes)
            for i in range(held.num_cached_pages, stop):
                page_id = held.ids[i]
                if not 0 <= page_id < self.pool.num_pages:
                    bad = i
                elif is_entered_otherwise(&self.pool, page_id, chain.digests[(i + 1) * num_hashes - 1], checked_group):
                    bad = i
                if bad >= 0:
                    break
        if bad >= 0:
            self.refuse_entry(page_id, bad, held.num)

    cdef int refuse_entry(self, int32_t page_id, Py_ssize_t at, Py_ssize_t num_pages) except -1:
        self.check_range(page_id)
        raise PageHashError(f"page {page_id} (at {at} of {num_pages}) has a hash already")

    def rewind(self, HeldPages held not None, num_pages) -> None:
        """Let `enter_held` look at the pages of a request from `num_pages` on again: their tokens are computed once more."""
        cdef Py_ssize_t num = size_of(num_pages, "num_pages")
        with self.lock:
            held.num_cached_pages = min(held.num_cached_pages, num)
            held.num_hit_pages = min(held.num_hit_pages, num)

    def take_for(
        self, tuple groups not None, num_new_pages, hits=(), HashChain chain=None, PageIds strides=None, PageIds group_ids=None,
        shard=None, num_shards=0, num_reserved=0,
    ):
        """Take what a request needs, in one go: a reference to its hits, which become its first pages, and new pages behind
        what it holds. `groups` are `HeldPages`; `hits` are none, or `PageIds` for each, cached under `chain` with `strides`
        hashes a page for `group_ids`.

        Returns the new pages of each group; None, with nothing changed, if the pool has too few free beside `num_reserved`;
        None too if only the shard has, and the hits count as used just now. PageHashError for a hit that has another content
        by now. O(pages).
        """
        cdef _Needs needs = _Needs(self, groups, num_new_pages, hits, chain, strides, group_ids)
        cdef int32_t divided = <int32_t>size_of(num_shards, "data_parallel_size", 0)
        cdef int32_t checked_shard = as_shard(shard, divided)
        cdef Py_ssize_t reserved = size_of(num_reserved, "num_reserved_pages")
        if divided:
            self.set_shards(divided)
        needs.chain.lock.acquire()
        try:
            self.lock_divided(divided)
            needs.take(checked_shard, reserved)
            self.lock.release()
        finally:
            needs.chain.lock.release()
        return needs.result()

    def give_back_held(
        self, tuple groups not None, HashChain chain=None, PageIds num_computed=None, PageIds strides=None,
        PageIds group_ids=None,
    ) -> None:
        """Give back all that `HeldPages` hold, the last group first and its last page first; they hold nothing then. O(pages).

        With a `chain`, `num_computed` pages of each group were computed besides hits. Those behind lose their entries, which
        they have under the chain with `strides` hashes a page for `group_ids`. DoubleFreeError, and nothing changed, if
        somebody else gave one of the pages back.
        """
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef PageIds computed = None
        check_distinct(groups)
        if chain is None:
            self.give_back_all(groups, ids, None, None, None, None)
            return
        computed, strides, group_ids = as_settled(num_computed), as_settled(strides), as_settled(group_ids)
        require_as_many({len(groups), computed.num, strides.num, group_ids.num}, strides)
        with chain.lock:
            self.give_back_all(groups, ids, chain, computed, strides, group_ids)

    cdef int give_back_all(
        self, tuple groups, PageIds ids, HashChain chain, PageIds num_computed, PageIds strides, PageIds group_ids
    ) except -1:
        """`give_back_held`, of which `ids` will be the pages. The lock of a chain is held."""
        cdef Py_ssize_t g, bad = -1
        cdef bint has_room = True, is_foreign = False
        cdef HeldPages held
        with self.lock:
            for held in reversed(groups):
                has_room = has_room and ids.has_room_for(held.num)
                if has_room:
                    ids.put(held.ids, held.num)
            if has_room:
                bad = find_outside(&self.pool, ids.ids, ids.num)
                is_foreign = bad >= 0
                if not is_foreign:
                    bad = self.give_back_ids(ids.ids, ids.num, True)
            for g in range(len(groups) if has_room and bad < 0 else 0):
                held = groups[g]
                if chain is not None:
                    forget_pages(
                        &self.pool, held.ids, max(<Py_ssize_t>num_computed.ids[g], held.num_hit_pages),
                        min(held.num_cached_pages, held.num), chain.digests, chain.num, strides.ids[g], group_ids.ids[g],
                    )
                held.clear()
        if not has_room:
            raise MemoryError("the ids of the pages of a request")
        if is_foreign:
            self.check_range(ids.ids[bad])
        if bad >= 0:
            self.refuse_give_back(ids, bad)
        return 0

    def skip(self, HeldPages held not None, first_useful_page) -> None:
        """Free the pages before `first_useful_page`, the last first, and put the null page in their places."""
        cdef Py_ssize_t stop = size_of(first_useful_page, "first_useful_page")
        cdef Py_ssize_t start, bad = -1
        cdef bint is_foreign = False
        with self.lock:
            start, stop = held.num_skipped_pages, min(stop, held.num)
            if stop > start:
                bad = find_outside(&self.pool, held.ids + start, stop - start)
                is_foreign = bad >= 0
                if not is_foreign:
                    bad = self.give_back_ids(held.ids + start, stop - start, True)
                if bad < 0:
                    held.blank(stop)
        if is_foreign:
            self.check_range(held[start + bad])
        if bad >= 0:
            self.refuse_give_back(held, start + bad)

    def find_leading_hits(
        self, HashChain chain not None, stride, start, stop, PageIds groups not None, first_id=0, stop_id=None
    ) -> int:
        """End of the group pages from `start` on, at most up to `stop`, that hit in all `groups`. O(pages x groups)."""
        cdef Range ids = self.range_of(first_id, stop_id)
        cdef PageIds group_ids = settled(groups)
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t wanted = size_of(stop, "stop")
        cdef Py_ssize_t last, first = size_of(start, "start")
        with chain.lock, self.lock:
            last = min(wanted, chain.num // num_hashes)
            if not self.enable_caching or group_ids.num == 0:
                last = first if group_ids.num else last
            elif last - first < RELEASE_GIL_AT:
                last = find_leading_hits(
                    &self.pool, chain.digests, num_hashes, first, last, group_ids.ids, group_ids.num, ids
                )
            else:
                with nogil:
                    last = find_leading_hits(
                        &self.pool, chain.digests, num_hashes, first, last, group_ids.ids, group_ids.num, ids
                    )
        return last

    cdef Range range_of(self, first_id, stop_id) except *:
        """Half-open range of page ids; None: to the end of the pool."""
        cdef Py_ssize_t stop = self.pool.num_pages if stop_id is None else size_of(stop_id, "stop")
        return Range(<int32_t>size_of(first_id, "start"), <int32_t>stop)

    def find_last_run(
        self, HashChain chain not None, stride, stop, need, PageIds groups not None, first_id=0, stop_id=None
    ) -> int:
        """End of the last `need` consecutive group pages before `stop` that hit in all `groups`; else of the leading ones."""
        cdef Range ids = self.range_of(first_id, stop_id)
        cdef PageIds group_ids = settled(groups)
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t wanted = size_of(stop, "stop")
        cdef Py_ssize_t last, run = size_of(need, "need", 1)
        if not self.enable_caching:
            return 0
        with chain.lock, self.lock:
            last = min(wanted, chain.num // num_hashes)
            last = find_last_run(&self.pool, chain.digests, num_hashes, last, run, group_ids.ids, group_ids.num, ids)
        return last

    def fetch_hits(
        self, HashChain chain not None, stride, start, stop, group, first_id=0, stop_id=None
    ):
        """The pages of one group for ``[0, stop)``: the null page before `start`, from there those cached first. None if one
        is not cached: another thread dropped it since it was found.
        """
        cdef Range ids = self.range_of(first_id, stop_id)
        cdef Py_ssize_t i, num_hashes = size_of(stride, "stride", 1)
        cdef Py_ssize_t last = size_of(stop, "stop", 0, len(chain) // num_hashes)
        cdef Py_ssize_t first = size_of(start, "start", 0, last)
        cdef int32_t checked_group = group_of(group)
        cdef bint is_whole = True
        cdef _FoundIds hits = _FoundIds.__new__(_FoundIds)
        hits.chain, hits.pool, hits.stride, hits.group = chain, &self.pool, num_hashes, checked_group
        hits.reserve(last)
        with chain.lock, self.lock:
            last = min(last, chain.num // num_hashes)
            for i in range(last):
                hits.ids[i] = NULL_PAGE
            for i in range(first, last if self.enable_caching else first):
                hits.ids[i] = find_within(&self.pool, chain.digests[(i + 1) * num_hashes - 1], checked_group, ids)
                is_whole = is_whole and hits.ids[i] != NULL_PAGE
            hits.num = last
            hits.num_dropped = self.pool.num_dropped
        return hits if is_whole else None

    def count_shared(self, PageIds held not None, num_holders) -> int:
        """How many of the pages, from the first on, have at least `num_holders` references."""
        cdef PageIds ids = self.checked(held)
        cdef Py_ssize_t i = 0, need = size_of(num_holders, "num_scheduled_requests")
        with self.lock:
            while i < ids.num and self.pool.pages[ids.ids[i]].ref_cnt >= need:
                i += 1
        return i

    # Saving and loading.

    def save(self) -> dict:
        """All that `load` needs to make an equal store, as arrays by the names of its arguments. O(num_pages).

        IntegrityError if the records contradict one another: what is wrong is not saved.
        """
        cdef PageIds ref_counts = PageIds(), free_ids = PageIds(), cached_ids = PageIds()
        cdef PageIds groups = PageIds(), keys = PageIds(), tokens = PageIds()
        cdef bint has_room = False
        cdef Pool pool
        cdef str flaw
        with self.lock:
            flaw = self.find_flaw()
            pool = self.pool
            if flaw is None:
                has_room = self.copy_queue(ref_counts, free_ids) and self.copy_entries(cached_ids, groups, keys, tokens)
        if flaw is not None:
            raise IntegrityError(flaw)
        if not has_room:
            raise MemoryError(f"copies of {pool.num_pages} page records")
        return {
            "ref_counts": ref_counts.to_array(),
            "free_page_ids": free_ids.to_array(),
            "cached_page_ids": cached_ids.to_array(),
            "cached_group_ids": groups.to_array(),
            "cached_keys": keys.to_array().view(np.uint64).reshape(-1, 2),
            "cached_token_ids": tokens.to_array().reshape(cached_ids.num, pool.tokens_width),
            "counters": np.array(counters_of(pool), dtype=np.int64),
            "num_shards": np.array([pool.num_shards], dtype=np.int64),
        }

    cdef bint copy_queue(self, PageIds ref_counts, PageIds free_ids) noexcept:
        """Copy the ref counts and the free queue, front first; False where memory is short."""
        cdef int32_t i = self.pool.pages[NULL_PAGE].next_free
        if not (ref_counts.has_room_for(self.pool.num_pages) and free_ids.has_room_for(self.pool.num_free)):
            return False
        while i != NULL_PAGE:
            free_ids.ids[free_ids.num] = i
            free_ids.num += 1
            i = self.pool.pages[i].next_free
        for i in range(self.pool.num_pages):
            ref_counts.ids[i] = self.pool.pages[i].ref_cnt
        ref_counts.num = self.pool.num_pages
        return True

    cdef bint copy_entries(self, PageIds ids, PageIds groups, PageIds keys, PageIds tokens) noexcept:
        """Copy the prefix entries, pages of equal content in the order they were cached; False where memory is short."""
        cdef Page *page
        cdef Py_ssize_t i, n, width = self.pool.tokens_width
        n = count_cached(&self.pool)
        if not (ids.has_room_for(n) and groups.has_room_for(n) and keys.has_room_for(4 * n) and tokens.has_room_for(n * width)):
            return False
        list_cached(&self.pool, ids.ids)
        for i in range(n):
            page = &self.pool.pages[ids.ids[i]]
            groups.ids[i] = page.group & ~FLAGS
            memcpy(keys.ids + 4 * i, &page.key_lo, sizeof(Digest))
            if width:
                memcpy(tokens.ids + i * width, self.pool.page_tokens + ids.ids[i] * width, width * sizeof(int32_t))
        ids.num, groups.num, keys.num, tokens.num = n, n, 4 * n, n * width
        return True

    @staticmethod
    def load(
        bint enable_caching, ref_counts, free_page_ids, cached_page_ids, cached_group_ids, cached_keys, cached_token_ids,
        counters, num_shards,
    ) -> PageStore:
        """A store as `save` found it, from arrays with the shapes that it gave them. SnapshotError where they contradict one
        another. O(num_pages).
        """
        cdef PageIds counts = as_own_ids(ref_counts, "ref_counts")
        cdef PageStore store = PageStore(counts.num, enable_caching)
        tokens = require_matrix(cached_token_ids, np.int32, "cached_token_ids")
        keys = np.ascontiguousarray(require_matrix(cached_keys, np.uint64, "cached_keys"))
        cdef Py_ssize_t width = tokens.shape[1]
        if width:
            store.keep_token_ids(size_of(width - 1, "page_size", 1))
        store.load_queue(counts, as_own_ids(free_page_ids, "free_page_ids"))
        store.load_entries(
            as_own_ids(cached_page_ids, "cached_page_ids"),
            as_own_ids(cached_group_ids, "cached_group_ids"),
            as_own_ids(keys.view(np.int32).reshape(-1), "cached_keys"),
            as_own_ids(tokens.reshape(-1), "cached_token_ids"),
        )
        if size_of(num_shards, "data_parallel_size"):
            store.set_shards(num_shards)
        store.load_counters([size_of(count, "counters", 0, INT64_MAX) for count in as_list(counters, "counters")])
        store.pool.is_restored = 1
        return store

    cdef int load_counters(self, list counters) except -1:
        if len(counters) != 6:
            raise SnapshotError(f"counters: got {len(counters)}, allowed: 6")
        self.pool.num_allocated, self.pool.num_freed, self.pool.num_evicted = counters[:3]
        self.pool.num_cached, self.pool.num_queried, self.pool.num_hit = counters[3:]
        return 0

    cdef int load_queue(self, PageIds ref_counts, PageIds free_ids) except -1:
        """Let a fresh store's pages have these references, and the free queue this order."""
        cdef Py_ssize_t i
        cdef int32_t page_id
        for page_id in range(1, self.pool.num_pages):
            pull(&self.pool, page_id)
            self.pool.pages[page_id].ref_cnt = ref_counts.ids[page_id]
        for i in range(free_ids.num):
            page_id = free_ids.ids[i]
            if not 0 < page_id < self.pool.num_pages or is_free(&self.pool, page_id):
                allowed = f"allowed: 1 to {self.pool.num_pages - 1}, each once"
                raise SnapshotError(f"free_page_ids: got {page_id} (at {i}), {allowed}")
            push(&self.pool, page_id)
        for page_id in range(self.pool.num_pages):
            count = ref_counts.ids[page_id]
            if count == INT32_MAX:
                raise SnapshotError(f"ref_counts: page {page_id} has {count} references, allowed: fewer than {INT32_MAX}")
            if count < 0 or (page_id and (count == 0) != is_free(&self.pool, page_id)) or (page_id == NULL_PAGE and count):
                where = "in the free queue" if page_id and is_free(&self.pool, page_id) else "not in the free queue"
                raise SnapshotError(f"ref_counts: page {page_id} has {count} references and is {where}")
        return 0

    cdef int load_entries(self, PageIds ids, PageIds groups, PageIds keys, PageIds tokens) except -1:
        """Enter pages of a store without entries in the prefix index, in order."""
        cdef Py_ssize_t i, width = self.pool.tokens_width
        cdef int32_t page_id, group
        if not (groups.num == ids.num and keys.num == 4 * ids.num and tokens.num == ids.num * width):
            raise SnapshotError(f"cached pages: got {ids.num} ids, {groups.num} groups, {keys.num // 4} keys, allowed: as many")
        if ids.num and not self.enable_caching:
            raise SnapshotError(f"cached_page_ids: got {ids.num}, allowed without prefix caching: none")
        for i in range(ids.num):
            page_id, group = ids.ids[i], groups.ids[i]
            if not 0 < page_id < self.pool.num_pages or self.pool.pages[page_id].group != NO_GROUP:
                allowed = f"allowed: 1 to {self.pool.num_pages - 1}, each once"
                raise SnapshotError(f"cached_page_ids: got {page_id} (at {i}), {allowed}")
            if not 0 <= group <= MAX_GROUP:
                raise SnapshotError(f"cached_group_ids: got {group} (at {i}), allowed: 0 to {MAX_GROUP}")
            if width and not 0 <= tokens.ids[i * width] < width:
                num_tokens = tokens.ids[i * width]
                raise SnapshotError(f"cached_token_ids: page {page_id} has {num_tokens}, allowed: 0 to {width - 1}")
            enter(&self.pool, page_id, (<Digest *>(keys.ids + 4 * i))[0], group)
            if width:
                keep_tokens(&self.pool, page_id, tokens.ids + i * width + 1, tokens.ids[i * width])
        return 0

    # Integrity.

    def check(self) -> None:
        """Walk every invariant of the module's docstring; IntegrityError names the first page that is wrong. O(num_pages)."""
        cdef str flaw
        with self.lock:
            flaw = self.find_flaw()
        if flaw is not None:
            raise IntegrityError(flaw)

    def check_holders(self, held) -> None:
        """IntegrityError unless all that `HeldPages` hold has as many references at least. O(num_pages + pages held)."""
        cdef list groups = held_pages_in(held)
        cdef int32_t[::1] counts = np.zeros(self.pool.num_pages, dtype=np.int32)
        cdef str flaw
        with self.lock:
            flaw = self.find_flaw_in_holders(&counts[0], groups)
        if flaw is not None:
            raise IntegrityError(flaw)

    # What is wrong, or None. An exception made here, with the lock held, could set off a garbage collection that calls us.

    cdef str find_flaw(self):
        return (
            self.find_flaw_in_records()
            or self.find_flaw_in_queue()
            or self.find_flaw_in_shards()
            or self.find_flaw_in_slots()
            or self.find_flaw_in_entries()
            or self.find_flaw_in_shard_twins()
            or self.find_flaw_in_journal()
        )

    cdef str find_flaw_in_holders(self, int32_t *counts, list groups):
        """Requests' pages lie in the pool, and no page stands in more places, those in `counts` too, than it has references."""
        cdef HeldPages held
        cdef Py_ssize_t i
        for held in groups:
            if not (0 <= held.num_skipped_pages <= held.num and 0 <= held.num_cached_pages <= held.num):
                return f"a request has {held.num} pages, {held.num_skipped_pages} skipped, {held.num_cached_pages} cached"
            for i in range(held.num):
                if not 0 <= held.ids[i] < self.pool.num_pages or (i < held.num_skipped_pages and held.ids[i] != NULL_PAGE):
                    return f"a request has page {held.ids[i]} (at {i}, {held.num_skipped_pages} skipped)"
                counts[held.ids[i]] += 1
        for i in range(1, self.pool.num_pages):
            if counts[i] > self.pool.pages[i].ref_cnt:
                return f"page {i} stands in {counts[i]} rows and requests, its ref count is {self.pool.pages[i].ref_cnt}"
        return None

    cdef str describe(self, int32_t page_id):
        """A page with all its numbers, all of them C's: to format a Python int may set off a garbage collection."""
        cdef Page *page = &self.pool.pages[page_id]
        entry = "not cached"
        if page.group != NO_GROUP:
            entry = f"cached for group {page.group & ~FLAGS} under 0x{page.key_hi:016x}{page.key_lo:016x}"
        return f"page {page_id} (ref count {page.ref_cnt}, free-queue links {page.prev_free} and {page.next_free}, {entry})"

    cdef str find_flaw_in_records(self):
        """Each page by itself: links within the pool, in the free queue exactly when nobody holds it."""
        cdef Page *page = &self.pool.pages[NULL_PAGE]
        cdef int32_t i, last = self.pool.num_pages - 1
        cdef int32_t num_free = 0
        if page.ref_cnt or page.group != NO_GROUP or not 0 <= page.prev_free <= last or not 0 <= page.next_free <= last:
            return f"{self.describe(NULL_PAGE)}, the null page: allowed: not held, not cached, links from 0 to {last}"
        for i in range(1, self.pool.num_pages):
            page = &self.pool.pages[i]
            if (page.prev_free == NOT_FREE) != (page.next_free == NOT_FREE):
                return f"{self.describe(i)}: allowed: both links of the free queue, or none ({NOT_FREE})"
            if is_free(&self.pool, i):
                num_free += 1
                if not (0 <= page.prev_free <= last and 0 <= page.next_free <= last):
                    return f"{self.describe(i)}: allowed links: 0 to {last}"
                if page.ref_cnt:
                    return f"{self.describe(i)} is in the free queue with ref count {page.ref_cnt}, allowed: 0"
            elif not 0 <= page.ref_cnt < INT32_MAX or (self.is_pool and page.ref_cnt == 0):
                return f"{self.describe(i)} is not in the free queue, allowed ref counts: 1 to {INT32_MAX - 1}"
            if page.group < NO_GROUP or (page.group != NO_GROUP and page.group & ~FLAGS > MAX_GROUP):
                return f"{self.describe(i)}: allowed groups: 0 to {MAX_GROUP}"
        if self.pool.num_held_free:
            return f"no free page has references, the pool counts {self.pool.num_held_free} that have"
        if num_free != self.pool.num_free:
            return f"{num_free} pages have links of the free queue, the pool counts {self.pool.num_free}"
        return None

    cdef str find_flaw_in_queue(self):
        """The queue is one ring through the null page, and has all the free pages."""
        cdef Page *pages = self.pool.pages
        cdef int32_t previous = NULL_PAGE
        cdef int32_t page_id = pages[NULL_PAGE].next_free
        cdef int32_t count = 0
        while page_id != NULL_PAGE and count <= self.pool.num_free:
            if pages[page_id].prev_free != previous:
                return f"{self.describe(page_id)}: the page before it in the free queue is {previous}"
            count += 1
            previous = page_id
            page_id = pages[page_id].next_free
        if pages[NULL_PAGE].prev_free != previous:
            return f"{self.describe(previous)} ends the free queue, whose last page is said to be {pages[NULL_PAGE].prev_free}"
        if count != self.pool.num_free:
            return f"the free queue ends after {count} pages with page {previous}, the pool counts {self.pool.num_free}"
        return None

    cdef str find_flaw_in_shards(self):
        """The queue of each shard is the part of the whole queue that lies in the shard, in the same order."""
        cdef Links *links = self.pool.shard_links
        cdef int32_t *last_seen = self.pool.shard_num_free + self.pool.num_shards
        cdef int32_t page_id = self.pool.pages[NULL_PAGE].next_free
        cdef int32_t shard, end, count
        for shard in range(self.pool.num_shards):
            last_seen[shard] = self.pool.num_pages + shard
        while self.pool.num_shards and page_id != NULL_PAGE:
            shard = shard_of(&self.pool, page_id)
            if links[last_seen[shard]].next != page_id or links[page_id].prev != last_seen[shard]:
                return (
                    f"page {page_id}: links {links[page_id].prev} and {links[page_id].next} in the queue of shard {shard}, "
                    f"where page {last_seen[shard]} says {links[last_seen[shard]].next}"
                )
            last_seen[shard] = page_id
            page_id = self.pool.pages[page_id].next_free
        for shard in range(self.pool.num_shards):
            end = self.pool.num_pages + shard
            if links[last_seen[shard]].next != end or links[end].prev != last_seen[shard]:
                return f"page {last_seen[shard]} is the last free one of shard {shard}, its queue says {links[end].prev}"
            count = self.count_free_pages_of(shard)
            if count != self.pool.shard_num_free[shard]:
                return f"shard {shard} has {count} free pages, the pool counts {self.pool.shard_num_free[shard]}"
        return None

    cdef int32_t count_free_pages_of(self, int32_t shard) noexcept:
        cdef int32_t i, count = 0
        for i in range(max(1, shard * self.pool.pages_per_shard), (shard + 1) * self.pool.pages_per_shard):
            count += is_free(&self.pool, i)
        return count

    cdef str find_flaw_in_slots(self):
        """Each slot names a cached page whose key leads back to the slot."""
        cdef Py_ssize_t i, num_slots = <Py_ssize_t>self.pool.mask + 1 if self.pool.slots != NULL else 0
        cdef Page *page
        cdef int32_t page_id, num_keys = 0
        for i in range(num_slots):
            page_id = self.pool.slots[i].page_id
            num_keys += page_id != NULL_PAGE
            if not 0 <= page_id < self.pool.num_pages:
                return f"slot {i} of the prefix index names page {page_id}, allowed: 1 to {self.pool.num_pages - 1}, or 0"
        if num_keys != self.pool.num_keys:
            return f"the prefix index has {num_keys} keys, the pool counts {self.pool.num_keys}"
        for i in range(num_slots):
            page_id = self.pool.slots[i].page_id
            if page_id != NULL_PAGE:
                page = &self.pool.pages[page_id]
                tag = tag_of(&self.pool, page.key_lo, page.group & ~FLAGS)
                if page.group == NO_GROUP or self.pool.slots[i].tag != tag:
                    return f"{self.describe(page_id)} is named by slot {i} of the prefix index, which is not its own"
                if slot_holding(&self.pool, page_id, tag) != i:
                    return f"{self.describe(page_id)} is named by slot {i} of the prefix index, where no look-up comes to"
        return None

    cdef str find_flaw_in_entries(self):
        """Each cached page is found under its key, first or in the ring of the first."""
        cdef Py_ssize_t num_cached = count_cached(&self.pool)
        cdef int32_t i
        cdef str flaw
        if num_cached and not self.enable_caching:
            return f"{num_cached} pages are cached, allowed without prefix caching: none"
        if num_cached != self.pool.num_entries:
            return f"{num_cached} pages are cached, the pool counts {self.pool.num_entries}"
        for i in range(1, self.pool.num_pages):
            if self.pool.pages[i].group != NO_GROUP:
                flaw = self.find_flaw_in_entry(i)
                if flaw is not None:
                    return flaw
        if num_cached != list_cached(&self.pool, NULL):
            return self.find_lost_twin()
        return None

    cdef str find_flaw_in_shard_twins(self):
        """The rings of all twins are right. Those of each shard have them in the same order."""
        cdef int32_t *last_seen = self.pool.shard_num_free + self.pool.num_shards
        cdef Py_ssize_t i
        cdef int32_t first, flawed = NULL_PAGE
        cdef Links links, firsts
        for i in range(self.pool.num_shards):
            last_seen[i] = NULL_PAGE
        for i in range(<Py_ssize_t>self.pool.mask + 1 if self.pool.num_shards and self.pool.slots != NULL else 0):
            first = self.pool.slots[i].page_id
            if flawed == NULL_PAGE and first != NULL_PAGE and self.pool.pages[first].group & TWIN:
                flawed = self.find_strange_twin(first, last_seen)
                flawed = self.find_strange_first(first, last_seen) if flawed == NULL_PAGE else flawed
        if flawed == NULL_PAGE:
            return None
        links, firsts = self.pool.shard_twins[flawed], self.pool.shard_firsts[flawed]
        return (
            f"{self.describe(flawed)}: pages of equal content in its shard are said to be {links.prev} and {links.next}, "
            f"and the first ones in others {firsts.prev} and {firsts.next}"
        )

    cdef int32_t find_strange_twin(self, int32_t first, int32_t *last_seen) noexcept:
        """The first twin that does not follow the one before it in its shard, or NULL_PAGE. Leaves the last of each shard."""
        cdef Links *twins = self.pool.shard_twins
        cdef Links *firsts = self.pool.shard_firsts
        cdef int32_t previous, page_id = first
        while True:
            previous = last_seen[shard_of(&self.pool, page_id)]
            if (firsts[page_id].next == NOT_FIRST) != (previous != NULL_PAGE):
                return page_id
            if previous != NULL_PAGE and (
                firsts[page_id].prev != NOT_FIRST or twins[previous].next != page_id or twins[page_id].prev != previous
            ):
                return page_id
            last_seen[shard_of(&self.pool, page_id)] = page_id
            page_id = self.pool.twins[page_id].next
            if page_id == first:
                return NULL_PAGE

    cdef int32_t find_strange_first(self, int32_t first, int32_t *last_seen) noexcept:
        """The first page of a shard that is not linked with the last one there, nor with the next shard's; or NULL_PAGE.
        Forgets the last of each shard, as far as the ring leads to it.
        """
        cdef Links *twins = self.pool.shard_twins
        cdef Links *firsts = self.pool.shard_firsts
        cdef int32_t last, following, page_id = first
        while True:
            last = last_seen[shard_of(&self.pool, page_id)]
            following = firsts[page_id].next
            if last == NULL_PAGE or twins[last].next != page_id or twins[page_id].prev != last:
                return page_id
            if not 0 < following < self.pool.num_pages or firsts[following].prev != page_id:
                return page_id
            last_seen[shard_of(&self.pool, page_id)] = NULL_PAGE
            page_id = following
            if page_id == first:
                return self.find_unled_twin(first, last_seen)

    cdef int32_t find_unled_twin(self, int32_t first, int32_t *last_seen) noexcept:
        """A twin in a shard to whose first one no ring leads, or NULL_PAGE."""
        cdef int32_t page_id = self.pool.twins[first].next
        while page_id != first:
            if last_seen[shard_of(&self.pool, page_id)] != NULL_PAGE:
                return page_id
            page_id = self.pool.twins[page_id].next
        return NULL_PAGE

    cdef str find_flaw_in_journal(self):
        """The keys that are new, those that went, and how many pages have each context at least."""
        cdef Journal *journal = &self.pool.journal
        cdef int32_t i
        cdef int64_t num_users = 0
        if not is_journaled(&self.pool):
            return None
        for i in range(journal.num_contexts):
            if journal.contexts[i].num_users < 0 or journal.contexts[i].num_holders < 0:
                return (
                    f"context {i} has {journal.contexts[i].num_users} users and {journal.contexts[i].num_holders} holders, "
                    "allowed: at least 0"
                )
            num_users += journal.contexts[i].num_users
        if num_users < count_cached(&self.pool):
            return f"the contexts have {num_users} users, {count_cached(&self.pool)} pages are cached"
        return self.find_flaw_in_origins() or self.find_flaw_in_new() or self.find_flaw_in_removed()

    cdef str find_flaw_in_origins(self):
        """Each cached page has a place and a context."""
        cdef Journal *journal = &self.pool.journal
        cdef Origin *origin
        cdef int32_t i
        for i in range(1, self.pool.num_pages):
            origin = &journal.notes[i].origin
            if self.pool.pages[i].group != NO_GROUP and (origin.place < 0 or not 0 <= origin.context < journal.num_contexts):
                return (
                    f"{self.describe(i)} has place {origin.place} and context {origin.context}, "
                    f"allowed: at least 0, and 0 to {journal.num_contexts - 1}"
                )
        return None

    cdef str find_flaw_in_new(self):
        """The ring of new keys has the first page of each, and nothing else."""
        cdef Note *notes = self.pool.journal.notes
        cdef int32_t page_id = notes[NULL_PAGE].new.next, previous = NULL_PAGE, count = 0, num_linked = 0, i
        while page_id != NULL_PAGE and count <= self.pool.journal.num_new:
            if not 0 < page_id < self.pool.num_pages or notes[page_id].new.prev != previous:
                return f"page {page_id} follows page {previous} in the journal, and does not link back"
            if not is_first(&self.pool, page_id):
                return f"{self.describe(page_id)} is in the journal, and no look-up finds it"
            count += 1
            previous, page_id = page_id, notes[page_id].new.next
        for i in range(1, self.pool.num_pages):
            num_linked += notes[i].new.next != NOT_NEW or notes[i].new.prev != NOT_NEW
        if notes[NULL_PAGE].new.prev != previous or count != self.pool.journal.num_new or num_linked != count:
            return (
                f"the journal ends after {count} new keys with page {previous}, {num_linked} pages have links; "
                f"it counts {self.pool.journal.num_new}, and page {notes[NULL_PAGE].new.prev} is the last"
            )
        return None

    cdef str find_flaw_in_removed(self):
        """A key that went is not in the index, unless it is new."""
        cdef Journal *journal = &self.pool.journal
        cdef int32_t i, first, num_new = journal.num_new if journal.is_cleared else self.pool.num_keys
        if not 0 <= journal.num_removed < self.pool.num_pages or (journal.is_cleared and journal.num_removed):
            return f"the journal counts {journal.num_removed} keys that went, allowed: 0 to {self.pool.num_pages - 1}, or none"
        if num_new != self.pool.num_keys:
            return f"the prefix index has {self.pool.num_keys} keys, {num_new} of them new since all went"
        for i in range(journal.num_removed):
            first = find(&self.pool, journal.removed[i].key, journal.removed[i].group)
            if first != NULL_PAGE and journal.notes[first].new.next == NOT_NEW:
                return f"{self.describe(first)} is in the journal as gone"
        return None

    cdef str find_flaw_in_entry(self, int32_t page_id):
        cdef Page *page = &self.pool.pages[page_id]
        cdef int32_t first = find(&self.pool, digest_of(page), page.group & ~FLAGS)
        cdef Links links
        cdef int32_t num_tokens = self.pool.page_tokens[page_id * self.pool.tokens_width] if self.pool.tokens_width else 0
        if first == NULL_PAGE:
            return f"{self.describe(page_id)}: a look-up of its hash finds nothing"
        if num_tokens and not 0 < num_tokens < self.pool.tokens_width:
            return f"{self.describe(page_id)} has {num_tokens} token ids, allowed: 0 to {self.pool.tokens_width - 1}"
        if not page.group & TWIN:
            return None if first == page_id else f"{self.describe(page_id)}: a look-up of its hash finds page {first}"
        links = self.pool.twins[page_id]
        if not (0 < links.prev < self.pool.num_pages and 0 < links.next < self.pool.num_pages) or links.next == page_id:
            return f"{self.describe(page_id)}: pages of equal content are said to be {links.prev} and {links.next}"
        if self.pool.twins[links.next].prev != page_id or self.pool.twins[links.prev].next != page_id:
            return f"{self.describe(page_id)}: pages of equal content, {links.prev} and {links.next}, do not link back"
        if not self.pool.pages[links.next].group & TWIN or not has_key(
            &self.pool.pages[links.next], digest_of(page), page.group & ~FLAGS
        ):
            return f"{self.describe(page_id)}: the next page of equal content is said to be {self.describe(links.next)}"
        return None

    cdef str find_lost_twin(self):
        """The first page in a ring that the index does not lead to. The rings themselves are closed."""
        cdef int32_t i, first, twin
        for i in range(1, self.pool.num_pages):
            if self.pool.pages[i].group != NO_GROUP and self.pool.pages[i].group & TWIN:
                first = find(&self.pool, digest_of(&self.pool.pages[i]), self.pool.pages[i].group & ~FLAGS)
                twin = self.pool.twins[i].next
                while twin != first and twin != i:
                    twin = self.pool.twins[twin].next
                if twin != first:
                    return f"{self.describe(i)} is not among the pages of equal content of page {first}"
        return None


cdef class QueryCounter:
    """Counts requests that were admitted after a look-up, their tokens and the hits among these: in the store's counters too,
    unless they had been preempted.
    """

    cdef PageStore store
    cdef readonly bint is_preempted
    cdef int64_t num_requests
    cdef int64_t num_tokens
    cdef int64_t num_hit_tokens

    def __cinit__(self, PageStore store not None, bint is_preempted=False):
        self.store = store
        self.is_preempted = is_preempted

    def __reduce__(self):
        raise ArgumentTypeError("a query counter cannot be pickled")

    @property
    def counts(self) -> tuple:
        """Requests, tokens, hit tokens."""
        cdef int64_t num_requests, num_tokens, num_hit_tokens
        with self.store.lock:
            num_requests, num_tokens, num_hit_tokens = self.num_requests, self.num_tokens, self.num_hit_tokens
        return num_requests, num_tokens, num_hit_tokens

    def add(self, num_tokens, num_hit_tokens) -> None:
        """Count a request."""
        cdef Py_ssize_t num = size_of(num_tokens, "num_tokens", 0, INT64_MAX >> 20)
        cdef Py_ssize_t num_hits = size_of(num_hit_tokens, "num_hit_tokens", 0, num)
        self.count(num, num_hits)

    cdef void count(self, Py_ssize_t num_tokens, Py_ssize_t num_hit_tokens) noexcept:
        with self.store.lock:
            self.num_requests += 1
            self.num_tokens += num_tokens
            self.num_hit_tokens += num_hit_tokens
            if not self.is_preempted:
                self.store.pool.num_queried += num_tokens
                self.store.pool.num_hit += num_hit_tokens


cdef enum Outcome:
    DONE
    SHORT                     # too few pages are free
    STALE                     # a hit has another content
    UNTOUCHABLE               # a hit cannot be held
    HELD_FREE                 # somebody gave a reference to a page in the free queue
    NO_MEMORY


@cython.final
@cython.auto_pickle(False)
cdef class _Needs:
    """What a request needs of a pool: gathered and made room for before the locks are taken, then taken in one go."""

    cdef PageStore store
    cdef tuple groups         # HeldPages
    cdef list hits            # PageIds of each group; empty: no hits
    cdef list new             # PageIds of each group, to be filled
    cdef PageIds num_new
    cdef HashChain chain
    cdef PageIds strides
    cdef PageIds group_ids
    cdef Outcome outcome
    cdef Py_ssize_t bad_group
    cdef Py_ssize_t bad
    cdef int32_t bad_page

    def __init__(self, PageStore store, tuple groups, num_new_pages, hits, HashChain chain, strides, group_ids):
        check_distinct(groups)
        self.store = store
        self.groups = groups
        self.num_new = PageIds([size_of(n, "num_new_pages") for n in islice(num_new_pages, len(groups) + 1)])
        self.hits = [store.checked(<PageIds?>ids) for ids in hits]
        self.chain = HashChain(1, bytes(16)) if chain is None else chain
        self.strides, self.group_ids = as_settled(strides), as_settled(group_ids)
        self.new = [PageIds.__new__(PageIds) for _ in groups]
        lengths = {len(groups), self.num_new.num}
        if self.hits:
            lengths |= {len(self.hits), self.strides.num, self.group_ids.num}
        require_as_many(lengths, self.strides)

    cdef void take(self, int32_t shard, Py_ssize_t num_reserved) noexcept:
        """Take all or nothing, and note which. The locks of chain and store are held."""
        cdef Pool *pool = &self.store.pool
        cdef Py_ssize_t g, num_new = 0, num_free_hits = 0
        cdef PageIds ids
        for g in range(self.num_new.num):
            num_new += self.num_new.ids[g]
        for ids in self.hits:
            num_free_hits += count_free(pool, ids.ids, ids.num)
        self.outcome = self.find_obstacle(num_new + num_free_hits, num_reserved)
        if self.outcome != DONE:
            return
        for ids in self.hits:
            touch_all(pool, ids.ids, ids.num)
        if num_new > count_free_in(pool, shard):
            for ids in self.hits:
                give_back(pool, ids.ids, ids.num, False)
            self.outcome = SHORT
            return
        for g in range(self.num_new.num):
            self.fill(g, shard)

    cdef Outcome find_obstacle(self, Py_ssize_t num_pages, Py_ssize_t num_reserved) noexcept:
        """What is in the way of taking `num_pages` from the free queue, hits among them; DONE: nothing."""
        cdef Py_ssize_t g, num_more, num_hits = 0
        for g in range(len(self.hits)):
            num_hits += (<PageIds>self.hits[g]).num
        for g in range(len(self.hits)):
            if self.is_stale(g):
                return STALE
            if self.is_untouchable(g, num_hits):
                return UNTOUCHABLE
        if num_pages and num_pages + num_reserved > self.store.pool.num_free:
            return SHORT
        self.bad_page = find_held_free(&self.store.pool, num_pages)
        if self.bad_page != NULL_PAGE:
            return HELD_FREE
        for g in range(self.num_new.num):
            num_more = self.num_new.ids[g] + ((<PageIds>self.hits[g]).num if self.hits else 0)
            if not (<PageIds>self.new[g]).has_room_for(self.num_new.ids[g]):
                return NO_MEMORY
            if not (<HeldPages>self.groups[g]).has_place_for(num_more):
                return NO_MEMORY
        return DONE

    cdef bint is_stale(self, Py_ssize_t g) noexcept:
        """Whether a hit of a group, null pages aside, has another content by now."""
        cdef PageIds ids = self.hits[g]
        cdef Py_ssize_t i, stride = self.strides.ids[g]
        self.bad_group = g
        for i in range(ids.num):
            self.bad = i
            if i >= self.chain.num // stride:
                return True
            if ids.ids[i] != NULL_PAGE:
                if not has_key(
                    &self.store.pool.pages[ids.ids[i]], self.chain.digests[(i + 1) * stride - 1], self.group_ids.ids[g]
                ):
                    return True
        return False

    cdef bint is_untouchable(self, Py_ssize_t g, Py_ssize_t num_hits) noexcept:
        cdef PageIds ids = self.hits[g]
        cdef Py_ssize_t bad = find_untouchable(&self.store.pool, ids.ids, ids.num, num_hits)
        if bad >= 0:
            self.bad_page = ids.ids[bad]
        return bad >= 0

    cdef void fill(self, Py_ssize_t g, int32_t shard) noexcept:
        """Give a group its hits and its new pages."""
        cdef HeldPages held = self.groups[g]
        cdef PageIds new = self.new[g]
        cdef PageIds ids
        if self.hits:
            ids = self.hits[g]
            if ids.num:
                held.put(ids.ids, ids.num)
                held.num_cached_pages = held.num_hit_pages = held.num
        self.store.take_into(new, self.num_new.ids[g], shard)
        held.put(new.ids, new.num)

    cdef object result(self):
        """The new pages, None if there were too few, or the error."""
        if self.outcome == STALE:
            page_id = (<PageIds>self.hits[self.bad_group]).ids[self.bad]
            raise PageHashError(
                f"page {page_id} (at {self.bad} of group {self.group_ids.ids[self.bad_group]}) does not hold this prefix: "
                "look it up again, right before allocate_slots"
            )
        if self.outcome == UNTOUCHABLE:
            self.store.refuse_touch(self.bad_page)
        if self.outcome == NO_MEMORY:
            raise MemoryError("the ids of the pages of a request")
        self.store.check_untaken(self.bad_page)
        return tuple(self.new) if self.outcome == DONE else None


cdef class Refusal:
    """A refused request of `num_tokens` tokens. `hits`, the `PageIds` of each group, hold `num_hit_tokens` tokens; both shrink
    as the last hits are evicted. While the hits are watched, `is_short` knows that the refusal stands.
    """

    cdef readonly tuple hits
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t num_hit_tokens
    cdef PageStore store
    cdef HashChain chain            # None: the digests are elsewhere
    cdef Prefix prefix              # of the only group; without a stride the hits are not its leading pages, or there are more
    cdef Py_ssize_t page_size       # of it, in tokens
    cdef Watch watch

    def __cinit__(self, tuple hits not None, num_tokens, num_hit_tokens):
        if not all([isinstance(ids, PageIds) for ids in hits]):
            raise ArgumentTypeError(f"hits: got {[type(ids).__name__ for ids in hits]}, allowed: PageIds")
        self.hits = tuple([settled(ids) for ids in hits])
        self.num_tokens = size_of(num_tokens, "num_tokens", 0, MAX_TOKENS)
        self.num_hit_tokens = size_of(num_hit_tokens, "num_hit_tokens", 0, self.num_tokens)

    def __reduce__(self):
        raise ArgumentTypeError("a refusal cannot be pickled")

    def watch_hits(self, PageStore store not None, HashChain chain not None, stride, group) -> bool:
        """Watch the hits, the leading pages of the only group under `chain`. False, and nothing is watched, unless a look-up
        would find exactly them now. Once for each object. O(pages).
        """
        cdef Py_ssize_t num_hashes = size_of(stride, "stride", 1, MAX_TOKENS)
        cdef int32_t checked_group = group_of(group)
        cdef PageIds ids = store.checked(self.hits[0]) if len(self.hits) == 1 else None
        if ids is None or self.store is not None or not store.enable_caching:
            return False
        with chain.lock, store.lock:
            self.page_size = num_hashes * chain.page_size
            self.prefix = Prefix(chain.digests, num_hashes, 0, checked_group, Range(0, store.pool.num_pages))
            self.prefix.max_num_pages = min(max(0, self.num_tokens - 1) // self.page_size, chain.num // num_hashes)
            if self.has_cached_hits(store, ids):
                self.begin(&store.pool, ids.num - count_free(&store.pool, ids.ids, ids.num))
        if self.watch.is_leading:
            self.store, self.chain = store, chain
        return self.watch.is_leading

    cdef bint has_cached_hits(self, PageStore store, PageIds ids) noexcept:
        """Whether `ids` are as many pages as the hits have tokens for, and cached."""
        cdef Py_ssize_t i
        if ids.num > self.prefix.max_num_pages or ids.num * self.page_size != self.num_hit_tokens:
            return False
        for i in range(ids.num):
            if not is_hit(&store.pool, &self.prefix, ids.ids, i):
                return False
        return True

    cdef void begin(self, Pool *pool, Py_ssize_t num_held) noexcept:
        """Watch hits that are cached, `num_held` of them held. The pool is locked."""
        self.watch = Watch(count_changes(pool), pool.num_reused, pool.num_unwatched, 0, num_held, False)
        if self.prefix.stride:
            watch_leading(pool, &self.watch, &self.prefix, self.first_ids(), self.num_hit_tokens // self.page_size)

    cdef const int32_t *first_ids(self) noexcept:
        return (<PageIds>self.hits[0]).ids if self.hits else NULL

    cdef bint finds_hits(self, Pool *pool) noexcept:
        """Whether a look-up would find the hits, as far as they are not evicted from the end on. The pool is locked."""
        if not has_same_hits(pool, &self.watch, &self.prefix, self.first_ids()):
            return False
        if self.watch.is_leading:
            self.num_hit_tokens = self.watch.num_pages * self.page_size
        return True

    cdef bint finds_watched_hits(self) noexcept:
        """The same for those of a chain. It and the pool are locked."""
        self.prefix.digests = self.chain.digests
        return self.chain.num // self.prefix.stride >= self.prefix.max_num_pages and self.finds_hits(&self.store.pool)

    def has_same_hits(self) -> bool:
        """Whether a look-up would find the watched hits; those evicted from the end on go out of them. O(pages evicted)."""
        cdef bint is_same
        cdef PageIds ids
        if self.store is None:
            return False
        with self.chain.lock, self.store.lock:
            is_same = self.finds_watched_hits()
        if is_same and self.watch.num_pages < len(self.hits[0]):
            ids = PageIds.__new__(PageIds)
            ids.add(self.first_ids(), self.watch.num_pages)
            self.hits = (ids,)
        return is_same

    def is_short(self, num_new_pages, num_reserved=0) -> bool:
        """Whether it is certain that too few pages are free for the watched hits and `num_new_pages` behind them. O(1)."""
        cdef Py_ssize_t num_pages, num_new = size_of(num_new_pages, "num_new_pages")
        cdef Py_ssize_t reserved = size_of(num_reserved, "num_reserved_pages")
        cdef bint is_short
        if self.store is None:
            return False
        with self.chain.lock, self.store.lock:
            num_pages = num_new + len(self.hits[0]) - self.watch.num_held
            is_short = self.finds_watched_hits() and self.watch.num_pages == len(self.hits[0])
            is_short = is_short and not has_free_pages(&self.store.pool, num_pages, reserved, -1)
        return is_short


@cython.final
cdef class CachePage:
    """A view of one page's record. ``pool.pages[i]`` gives it; there is one view of each page.

    ``CachePage(page_id)`` makes a page that stands alone, to be handed to a `FreeCachePageQueue`. Pages of other pools, or that
    stand alone, are equal if all that can be seen of them is: `page_id`, `ref_cnt`, `page_hash`, `is_null`, and the ids of the
    pages before and behind in the free queue. The hash is that of `page_id`, which does not change.

    >>> page = CachePage(7)
    >>> page.incr_ref()
    >>> page
    CachePage(page_id=7, ref_cnt=1, page_hash=None, prev_free_page=None, next_free_page=None)
    >>> page == CachePage(7), page == CachePage(page_id=7, ref_cnt=1)
    (False, True)
    """

    cdef PageStore store
    cdef int32_t index                  # record in the store
    cdef bint is_made_null              # a null page that stands alone
    cdef readonly object page_id        # the index in a pool, any int for a page made alone

    def __init__(self, page_id, ref_cnt=0, _page_hash=None, prev_free_page=None, next_free_page=None, is_null=False):
        """`ref_cnt` must not be negative; `_page_hash` is a PageHashWithGroupId that the page is cached under, or None. A null
        page stands for no page, and no queue takes it. ArgumentError for neighbours: a queue links its pages itself.
        """
        cdef PageStore store
        cdef bint is_made_null = is_null
        if prev_free_page is not None or next_free_page is not None:
            raise ArgumentError("prev_free_page, next_free_page: got a page, allowed: None; a FreeCachePageQueue links its own")
        if _page_hash is not None:
            require_page_hash(_page_hash)
        store = PageStore(2, True, False)
        checked_id = index_of(page_id, "page_id")
        if not -INT64_MAX <= checked_id <= INT64_MAX:
            raise ArgumentError(f"page_id: got {shown(checked_id)}, allowed: ints of 64 bits")
        store.pop(1)
        store.set_ref_count(1, ref_cnt)
        if _page_hash is not None:
            store.enter(1, store.names.key_of(_page_hash.page_hash), _page_hash.group_id)
        if self.store is not None:  # after the arguments were read, which may run Python code
            raise ArgumentError("a page is made once")
        self.page_id, self.store, self.index, self.is_made_null = checked_id, store, 1, is_made_null
        store.views[1] = self

    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is not CachePage:
            return NotImplemented
        return self.page_id == other.page_id and self.fields() == (<CachePage>other).fields()

    def __hash__(self):
        return hash(self.page_id)

    cdef tuple fields(self):
        """What equal pages have in common besides their id. The neighbours' ids alone: theirs would lead through the queue."""
        before, behind = self.store.neighbours(self.index)
        return self.ref_cnt, self.page_hash, self.is_null, before and before.page_id, behind and behind.page_id

    def __reduce__(self):
        raise ArgumentTypeError("a CachePage is a view of its pool and cannot be pickled")

    @cython.critical_section
    cdef int32_t get_ref_count(self) except? -1:
        cdef PageStore store = self.store
        if store.is_pool:
            return store.read(&store.pool.pages[self.index].ref_cnt)
        return store.record(self.index).ref_cnt  # the records of a queue move when it grows

    @cython.critical_section
    cdef void settle(self, PageStore store, int32_t index) noexcept:
        """Become a view of another record."""
        self.store = store
        self.index = index

    @property
    def ref_cnt(self) -> int:
        """References held to the page; 0: free. Settable, never negative."""
        return self.get_ref_count()

    @ref_cnt.setter
    def ref_cnt(self, value):
        self.store.set_ref_count(self.index, value)

    def incr_ref(self) -> None:
        """One reference more."""
        if not self.store.add_reference(self.index, 1):
            raise ArgumentError(f"page {self.page_id} has {self.ref_cnt} references, allowed: fewer than {INT32_MAX}")

    def decr_ref(self) -> None:
        """One reference less; DoubleFreeError at 0. The page does not enter the free queue: `PagePool.free_pages` does that."""
        if not self.store.add_reference(self.index, -1):
            raise DoubleFreeError(f"page {self.page_id} has no reference to give back")

    @property
    def page_hash(self):
        """The PageHashWithGroupId that the page is cached under, or None. Setting it enters the page in the prefix index;
        PageHashError if it has one already.
        """
        return self.store.page_hash_of(self.index)

    @page_hash.setter
    def page_hash(self, page_hash):
        require_page_hash(page_hash)
        self.store.enter(self.index, self.store.names.key_of(page_hash.page_hash), page_hash.group_id)

    def reset_hash(self) -> None:
        """Drop the page's prefix entry, if it has one."""
        self.store.drop([self.index])

    @property
    def is_null(self) -> bool:
        """Whether this is a pool's null page, or one that was made as such."""
        return self.is_made_null or (self.store.is_pool and self.index == NULL_PAGE)

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


cdef int require_page_hash(object page_hash) except -1:
    if not isinstance(page_hash, PageHashWithGroupId):
        raise ArgumentTypeError(f"page_hash: got {type(page_hash).__name__}, allowed: PageHashWithGroupId")
    return 0


def make_aligned_zeros(tuple shape not None) -> np.ndarray:
    """An int32 array of zeros that begins at a cache line: whole-table copies are twice as fast from and to it."""
    cdef Py_ssize_t start, num_values = 1
    cdef int32_t[::1] memory
    sizes = [size_of(size, "shape") for size in shape]
    for size in sizes:
        num_values = size_of(num_values * size, "shape")
    array = np.zeros(num_values + CACHE_LINE // 4, dtype=np.int32)
    memory = array
    start = (CACHE_LINE - <size_t>&memory[0] % CACHE_LINE) % CACHE_LINE // 4
    return array[start:start + num_values].reshape(sizes)


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
    cdef LockNode lock_node

    def __cinit__(self, *args, **kwargs):
        enlist_lock(&self.lock_node, &self.lock, TABLE_LOCK)

    def __dealloc__(self):
        delist_lock(&self.lock_node)

    def __init__(self, num_rows, num_columns):
        """Both at least 1."""
        cdef Py_ssize_t n = size_of(num_rows, "max_num_reqs", 1)
        cdef Py_ssize_t num_columns_of_row = size_of(num_columns, "max_num_pages_per_req", 1)
        cdef Py_ssize_t num_windows = (num_columns_of_row + WINDOW - 1) // WINDOW
        if n * num_columns_of_row > MAX_PAGES:
            raise ArgumentError(f"page table: got {n} x {num_columns_of_row}, allowed: {MAX_PAGES} ids in all")
        page_table, num_pages = make_aligned_zeros((n, num_columns_of_row)), np.zeros(n, dtype=np.int32)
        extent, flags = np.zeros(n, dtype=np.int32), np.zeros(n * (num_windows + 1), dtype=np.uint8)
        if self.rows.num_rows:  # after all that may run Python code
            raise ArgumentError("the rows of a table are made once")
        self.page_table_cpu, self.num_pages_per_row = page_table, num_pages
        self.table_view, self.num_pages_view, self.extent_view, self.flags_view = page_table, num_pages, extent, flags
        self.rows.table = &self.table_view[0, 0]
        self.rows.num_pages = &self.num_pages_view[0]
        self.rows.extent = &self.extent_view[0]
        self.rows.is_row_dirty = &self.flags_view[0]
        self.rows.is_dirty = self.rows.is_row_dirty + n
        self.rows.num_columns, self.rows.num_windows = num_columns_of_row, num_windows
        self.rows.width = min(num_columns_of_row, WINDOW)
        self.rows.num_rows = n

    def __reduce__(self):
        raise ArgumentTypeError("a page table cannot be pickled")

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

    cdef int check_made(self) except -1:
        if not self.rows.num_rows:
            raise ArgumentError("the page table was not made: its constructor did not run, or failed")
        return 0

    cdef Py_ssize_t checked_row(self, object row) except -1:
        cdef int32_t checked
        try:
            checked = int32_of(row)
        except OverflowError:
            checked = -1
        except TypeError as error:
            raise explained("row", error) from None
        if not 0 <= checked < self.rows.num_rows:
            raise RowIndexError(f"row: got {shown(row)}, allowed: 0 to {self.rows.num_rows - 1}")
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
        cdef Py_ssize_t bad = find_negative(ids, n)
        self.check_count(row)
        if bad >= 0:
            raise PageIdError(f"page id: got {ids[bad]} (at {bad}), allowed: at least 0")
        raise RowOverflowError(f"row {row} has {start} pages, {n} more were given, allowed: {self.rows.num_columns} in all")

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
        with self.lock:
            replace_row(&self.rows, row, ids.ids, ids.num)

    def clear_row(self, row_idx) -> None:
        """Empty a row. O(pages that it had)."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        with self.lock:
            clear_one(&self.rows, row)

    def move_row(self, src, tgt) -> None:
        """Copy a row over another, whose rest becomes zero; the source stays. O(pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.check_count(source)
        with self.lock:
            copy_row(&self.rows, source, target)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows. O(pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        with self.lock:
            swap_rows(&self.rows, source, target)

    def append_rows_batch(self, page_ids_per_req, req_indices) -> None:
        """`append_row` for a list of ids each and a row each, in order; rows may repeat. All or nothing. O(ids)."""
        cdef _Appends appends = _Appends((self,), as_list(page_ids_per_req, "page_ids"), req_indices)
        for page_ids, row in zip(appends.requests, appends.row_ids, strict=True):
            appends.add(self, row, page_ids)
        appends.commit()

    def mark_dirty(self, rows=None) -> None:
        """Say that the user wrote into `page_table_cpu` himself: in these rows (a list or an array), or in all."""
        cdef PageIds row_ids = self.checked_rows(rows)
        with self.lock:
            mark_rows(&self.rows, row_ids.ids, row_ids.num)

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
            with self.lock:
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

    def check(self) -> None:
        """IntegrityError names the first row that is wrong: its count outside the table or its reach, a negative id among its
        pages, anything behind its reach, or windows to be sent in a row that says there are none. O(table).
        """
        cdef str flaw
        with self.lock:
            flaw = self.find_flaw()
        if flaw is not None:
            raise IntegrityError(flaw)

    cdef str find_flaw(self):
        cdef Rows *rows = &self.rows
        cdef Py_ssize_t row, i, num_dirty
        cdef int32_t *ids
        for row in range(rows.num_rows):
            ids = rows.table + row * rows.num_columns
            if not 0 <= rows.num_pages[row] <= rows.extent[row] <= rows.num_columns:
                return f"row {row} has {rows.num_pages[row]} pages, reaches to {rows.extent[row]} of {rows.num_columns} columns"
            for i in range(rows.num_pages[row]):
                if ids[i] < 0:
                    return f"row {row}: page {ids[i]} (at {i}), allowed: at least 0"
            for i in range(rows.extent[row], rows.num_columns):
                if ids[i] != 0:
                    return f"row {row}: page {ids[i]} (at {i}) behind the row's reach, {rows.extent[row]}; no mark_dirty?"
            num_dirty = 0
            for i in range(row * rows.num_windows, (row + 1) * rows.num_windows):
                num_dirty += rows.is_dirty[i]
            if num_dirty and not rows.is_row_dirty[row]:
                return f"row {row} has {num_dirty} windows to be sent, and is not marked"
        return None

    # For the device side.

    def find_unsent(self, device_table) -> tuple | None:
        """Row and column of the first id that differs from `device_table`, int32 of the table's shape, in a window that counts
        as sent; None if there is none. O(table).
        """
        cdef Rows *rows = &self.rows
        cdef const int32_t[:, ::1] view = np.ascontiguousarray(require_matrix(device_table, np.int32, "device_table"))
        cdef Py_ssize_t row, column, bad_row = -1, bad_column = 0
        if view.shape[0] != rows.num_rows or view.shape[1] != rows.num_columns:
            raise ArgumentError(
                f"device_table: got {view.shape[0]} x {view.shape[1]}, allowed: {rows.num_rows} x {rows.num_columns}"
            )
        with self.lock:
            for row in range(rows.num_rows):
                for column in range(rows.num_columns):
                    if rows.table[row * rows.num_columns + column] != view[row, column]:
                        if not is_unsent(rows, row, column) and bad_row < 0:
                            bad_row, bad_column = row, column
        return None if bad_row < 0 else (bad_row, bad_column)

    def count_dirty_windows(self, start, stop) -> int:
        """Windows in rows ``[start, stop)`` that were not sent yet."""
        cdef Py_ssize_t last = size_of(stop, "num_reqs", 0, self.rows.num_rows)
        cdef Py_ssize_t count, first = size_of(start, "start", 0, self.rows.num_rows)
        with self.lock:
            count = count_dirty(&self.rows, first, last)
        return count

    def copy_aligned(self) -> np.ndarray:
        """A fresh copy of the whole table, which counts as sent."""
        self.check_made()
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
        self.check_made()
        with self.lock:
            for row in range(self.rows.num_rows):
                clear_one(&self.rows, row)
            clean(&self.rows, self.rows.num_rows)


cdef tuple in_lock_order(tuple tables):
    """The order in which everybody takes the locks of several tables, so that nobody waits for ever."""
    return tables if len(tables) == 1 else tuple(sorted(tables, key=id))


@cython.final
@cython.auto_pickle(False)
cdef class _Appends:
    """Ids to put behind those of rows, for several rows and tables, gathered before anything changes."""

    cdef Append *items
    cdef Py_ssize_t num
    cdef tuple lock_order
    cdef list requests
    cdef list row_ids
    cdef list held       # keeps the ids alive
    cdef list targets    # the table of each item, for errors

    def __init__(self, tuple tables, list requests, rows):
        """Room for one append for each request and table. Without requests there is nothing to do in any row."""
        self.lock_order = in_lock_order(tables)
        self.requests = list(requests)  # copies: reading an id may run Python code that changes the lists
        self.row_ids = list(as_list(rows.tolist() if isinstance(rows, ndarray) else rows, "req_indices"))
        if not self.requests:
            self.row_ids = []
        self.held = []
        self.targets = []
        if len(self.requests) != len(self.row_ids):
            raise ArgumentError(f"req_indices: got {len(self.row_ids)}, allowed: as many as requests, {len(self.requests)}")
        self.items = <Append *>calloc(max(len(self.requests) * len(tables), 1), sizeof(Append))
        if self.items == NULL:
            raise MemoryError(f"{len(self.requests)} requests")

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
        for table in self.lock_order:
            table.lock.acquire()
        num_done = append_all(self.items, self.num)
        for table in self.lock_order:
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


cdef tuple checked_tables(object page_tables):
    """`page_tables` as a tuple of tables with one number of rows, none of them twice."""
    cdef tuple tables = tuple(as_list(page_tables, "page_tables"))
    for table in tables:
        if not isinstance(table, TableRows) or not 0 < table.max_num_reqs == tables[0].max_num_reqs:
            raise ArgumentError("page_tables: allowed: page tables with one number of rows")
    if len({id(table) for table in tables}) != len(tables):
        raise ArgumentError("page_tables: got one twice, allowed: each once")
    return tables


cdef list by_group_of(object values, Py_ssize_t num_groups):
    """One list of ids for each group."""
    groups = as_list(values, "page_ids")
    if len(groups) != num_groups:
        raise ArgumentError(f"page_ids: got {len(groups)} groups, allowed: {num_groups}")
    return groups


cdef class GroupedRows:
    """The host tables of several cache groups with the same rows. Each call changes all of them, or none."""

    cdef readonly tuple page_tables
    cdef tuple lock_order

    def __cinit__(self, *args, **kwargs):
        self.page_tables = ()
        self.lock_order = ()

    def __init__(self, page_tables):
        """`page_tables` are `TableRows` with the same number of rows, none of them twice."""
        cdef tuple tables = checked_tables(page_tables)
        if self.page_tables:
            raise ArgumentError("the tables of groups are given once")
        self.lock_order = in_lock_order(tables)
        self.page_tables = tables

    def __reduce__(self):
        raise ArgumentTypeError("a page table cannot be pickled")

    def __len__(self) -> int:
        return len(self.page_tables)

    def __getitem__(self, i):
        return self.page_tables[i]

    cdef void acquire(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.acquire()

    cdef void let_go(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.release()

    cdef Py_ssize_t checked_row(self, object row) except -1:
        """All groups have the same rows; without groups any number will do."""
        return (<TableRows>self.page_tables[0]).checked_row(row) if self.page_tables else 0

    def append_row(self, page_ids, row_idx) -> None:
        """Put a list of page ids for each group behind those of a row."""
        self.append_rows_batch([page_ids], [row_idx])

    def append_rows_batch(self, page_ids_per_req, req_indices) -> None:
        """`append_row` for several rows, in order; rows may repeat. ``page_ids_per_req[i][g]``: ids of group ``g``. O(ids)."""
        cdef tuple tables = self.page_tables
        cdef _Appends appends = _Appends(tables, as_list(page_ids_per_req, "page_ids"), req_indices)
        for by_group, row in zip(appends.requests, appends.row_ids, strict=True):
            for table, page_ids in zip(tables, by_group_of(by_group, len(tables)), strict=True):
                appends.add(table, row, page_ids)
        appends.commit()

    def add_row(self, page_ids, row_idx) -> None:
        """Replace a row by a list of page ids for each group."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        cdef Py_ssize_t g
        cdef list groups = [as_page_ids(ids) for ids in by_group_of(page_ids, len(self.page_tables))]
        for table, ids in zip(self.page_tables, groups, strict=True):
            (<TableRows>table).check_fits(row, ids)
        self.acquire()
        for g in range(len(groups)):
            replace_row(&(<TableRows>self.page_tables[g]).rows, row, (<PageIds>groups[g]).ids, (<PageIds>groups[g]).num)
        self.let_go()

    def clear_row(self, row_idx) -> None:
        """Empty a row in all groups."""
        cdef Py_ssize_t row = self.checked_row(row_idx)
        self.acquire()
        for table in self.page_tables:
            clear_one(&(<TableRows>table).rows, row)
        self.let_go()

    def move_row(self, src, tgt) -> None:
        """Copy a row over another in all groups; the source stays."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        for table in self.page_tables:
            (<TableRows>table).check_count(source)
        self.acquire()
        for table in self.page_tables:
            copy_row(&(<TableRows>table).rows, source, target)
        self.let_go()

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows in all groups."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.acquire()
        for table in self.page_tables:
            swap_rows(&(<TableRows>table).rows, source, target)
        self.let_go()

    def mark_dirty(self, rows=None) -> None:
        """Say that the user wrote into the host tables himself: in these rows, or in all."""
        cdef PageIds checked
        if self.page_tables:
            checked = (<TableRows>self.page_tables[0]).checked_rows(rows)
            self.acquire()
            for table in self.page_tables:
                mark_rows(&(<TableRows>table).rows, checked.ids, checked.num)
            self.let_go()


@cython.final
@cython.no_gc  # it is in no cycle: a batch does not know its results
@cython.auto_pickle(False)
cdef class StepResult:
    """What a call of `RunningBatch` that grows rows did.

    The first `num_grown` of its rows have their room; the row at that place, if there is one, is the first that did not fit.
    `RunningBatch.undo` takes the call back.
    """

    cdef readonly Py_ssize_t num_grown
    cdef RunningRows batch          # that was grown; None once the call is taken back
    cdef PageIds num_new_tokens     # a number for each row, or one for all
    cdef Growth growth              # its `rows` and `token_ids` are the caller's, and not read after the call

    def __init__(self):
        raise TypeError("a StepResult is what RunningBatch returns")

    def __dealloc__(self):
        free(self.growth.new_ids)
        free(self.growth.grown)

    cdef int begin(self, RunningRows batch, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens) except -1:
        """What is to be done, and room for what becomes of the rows."""
        self.batch, self.num_new_tokens = batch, num_new_tokens
        self.growth.rows, self.growth.num_rows = rows.ids, rows.num
        self.growth.num_new_tokens, self.growth.num_ahead = amounts_in(num_new_tokens), num_ahead
        if tokens is not None:
            self.growth.token_ids = tokens.ids
        if rows.num:
            self.growth.grown = <Grown *>malloc(rows.num * sizeof(Grown))
            if self.growth.grown == NULL:
                raise MemoryError(f"{rows.num} rows")
        return 0

    cdef bint has_room_for(self, Py_ssize_t n) noexcept:
        """Make room for `n` new pages; False where memory is short."""
        cdef int32_t *values
        if n == 0:
            return True
        values = <int32_t *>malloc(3 * n * sizeof(int32_t))
        self.growth.new_ids = values
        self.growth.new_rows = values + n
        self.growth.new_groups = values + 2 * n
        return values != NULL

    @property
    def new_page_ids(self) -> np.ndarray:
        """Ids of the pages that were taken: int32 ``[num_new_pages]``, a copy. In a row group by group."""
        return array_of(self.growth.new_ids, self.growth.num_new)

    @property
    def new_page_rows(self) -> np.ndarray:
        """The row of each new page, int32 ``[num_new_pages]``, a copy: the rows in the order of the call."""
        return array_of(self.growth.new_rows, self.growth.num_new)

    @property
    def new_page_groups(self) -> np.ndarray:
        """The cache group of each new page, int32 ``[num_new_pages]``, a copy."""
        return array_of(self.growth.new_groups, self.growth.num_new)

    def __repr__(self):
        return f"StepResult(num_grown={self.num_grown}, new_page_ids={self.new_page_ids.tolist()})"


cdef inline Py_ssize_t odd_lines(Py_ssize_t num_values, Py_ssize_t size) noexcept nogil:
    """Values of `size` bytes that rows lie apart, at least `num_values`: an odd number of cache lines, so that the ends of
    rows, which a step writes, fall into different sets of a cache.
    """
    cdef Py_ssize_t num_in_line = CACHE_LINE // size
    return ((num_values + num_in_line - 1) // num_in_line | 1) * num_in_line


cdef int32_t ZERO = 0
cdef PageIds ONE = PageIds([1])


cdef PageIds as_amounts(object values, str name, Py_ssize_t num_rows):
    """`values` as a number for each row, or one for all, copied, so that nobody changes them during the call."""
    cdef PageIds amounts
    if hasattr(values, "__index__") and not isinstance(values, ndarray):
        return PageIds([size_of(values, name, 0, MAX_TOKENS)])
    amounts = as_own_ids(values, name)
    if amounts.num != num_rows:
        raise ArgumentError(f"{name}: got {amounts.num}, allowed: one, or as many as rows, {num_rows}")
    return amounts


cdef Amounts amounts_in(PageIds amounts) noexcept:
    """A view of them. A single number serves all rows."""
    return Amounts(amounts.ids, amounts.num > 1)


@cython.final
@cython.auto_pickle(False)
cdef class _Buffer:
    """A matrix of int32, read-only for Python."""

    cdef char *memory
    cdef int32_t *values
    cdef Py_ssize_t size            # bytes

    cdef int allocate(self, Py_ssize_t num_rows, Py_ssize_t num_columns) except -1:
        """MemoryError where the matrix does not fit the address space."""
        if num_columns > INT64_MAX // <Py_ssize_t>sizeof(int32_t) // num_rows - CACHE_LINE:
            raise MemoryError(f"{num_rows} x {num_columns} int32 values")
        self.size = num_rows * num_columns * sizeof(int32_t)
        self.memory = <char *>calloc(self.size + CACHE_LINE, 1)
        if self.memory == NULL:
            raise MemoryError(f"{num_rows} x {num_columns} int32 values")
        keep_sparse(self.memory, self.size + CACHE_LINE)
        self.values = <int32_t *>(self.memory + CACHE_LINE - <size_t>self.memory % CACHE_LINE)
        return 0

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.values, self.size, 1, flags)


cdef object ROW_STATE = np.dtype([
    ("num_tokens", "i4"),
    ("num_computed", "i4"),
    ("next_event", "i4"),
    ("stamp", "u4"),
    ("num_hits", "i4"),
    ("num_hashed", "i4"),
    ("shard", "i4"),
    ("is_admitted", "?"),
    ("is_claimed", "?"),
], align=True)


cdef list checked_groups(object groups, Py_ssize_t num_tables):
    """``(PageRules, id, hashes of a page)`` for each table, in plain numbers; the id is `NO_GROUP` for None."""
    cdef list checked = []
    cdef PageRules rules
    for rules, group_id, stride in as_list(groups, "groups"):
        if rules is None:
            raise ArgumentTypeError("groups: got None, allowed: PageRules")
        checked.append((rules, NO_GROUP if group_id is None else group_of(group_id), size_of(stride, "stride", 1)))
    if not checked or len(checked) != num_tables:
        raise ArgumentError(f"groups: got {len(checked)} for {num_tables} tables, allowed: one each, at least 1")
    return checked


cdef list checked_extra_keys(object extra_keys):
    """``(page, bytes)`` pairs as ints and bytes."""
    cdef bytes data
    cdef list checked = []
    for page, data in as_list(extra_keys, "extra_keys"):
        if data is None:
            raise ArgumentTypeError("extra_keys: got None, allowed: bytes")
        checked.append((size_of(page, "page"), data))
    return checked


@cython.final
cdef class _RowRefusal(Refusal):
    """A row's refused request, and by what it is known when it comes back."""

    cdef int32_t shard              # where its pages come from; -1: anywhere
    cdef tuple options
    cdef object token_ids           # held, so that nothing else is in its place
    cdef PageIds sample             # some of its tokens
    cdef const int32_t *memory      # of an array

    cdef int remember(self, object token_ids, object options, const int32_t *tokens) except -1:
        """Know the request again by its options, if they are a tuple, and its `tokens`, which it came with as `token_ids`."""
        cdef Py_ssize_t at = self.num_tokens - 1
        if type(options) is not tuple:
            return 0
        self.sample = PageIds.__new__(PageIds)
        while at >= 0:
            self.sample.add(tokens + at, 1)
            at -= self.sample_step()
        self.keep_object(token_ids)
        self.options = options
        return 0

    cdef int keep_object(self, object token_ids) except -1:
        """Hold a list, or an array that is read without a copy, so that nothing else can be where it is."""
        cdef _BorrowedIds ids = _BorrowedIds.__new__(_BorrowedIds)
        self.token_ids, self.memory = None, NULL
        if type(token_ids) is list:
            self.token_ids = token_ids
        elif isinstance(token_ids, ndarray) and ids.try_borrow(token_ids):
            self.token_ids, self.memory = token_ids, ids.ids
        return 0

    cdef Py_ssize_t sample_step(self) noexcept:
        return max(1, self.num_tokens // NUM_SAMPLED)

    cdef bint is_of(self, object token_ids, object options, const int32_t *tokens) except -1:
        """Whether a request is this one, which has `tokens`: O(1) for the object that they came in, else O(tokens)."""
        cdef PageIds ids
        if self.options is None or type(options) is not tuple or not are_same(options, self.options):
            return False
        if type(token_ids) is list:
            if not self.has_sample_in_list(token_ids):
                return False
            if token_ids is self.token_ids:
                return True
        elif not isinstance(token_ids, (ndarray, tuple)):  # others may change as they are read
            return False
        ids = as_page_ids(token_ids, "token_ids")
        if ids.num != self.num_tokens or not self.has_sample_in(ids.ids):
            return False
        if ids.ids != self.memory:
            if memcmp(ids.ids, tokens, ids.num * sizeof(int32_t)) != 0:
                return False
            self.keep_object(token_ids)
        return True

    cdef bint has_sample_in_list(self, list token_ids) except -1:
        cdef Py_ssize_t i, at = self.num_tokens - 1
        if len(token_ids) != self.num_tokens:
            return False
        for i in range(self.sample.num):
            token_id = token_ids[at]
            if type(token_id) is not int or token_id != self.sample.ids[i]:
                return False
            at -= self.sample_step()
        return True

    cdef bint has_sample_in(self, const int32_t *tokens) noexcept:
        cdef Py_ssize_t i, at = self.num_tokens - 1
        for i in range(self.sample.num):
            if tokens[at] != self.sample.ids[i]:
                return False
            at -= self.sample_step()
        return True


cdef bint are_same(tuple mine, tuple others) except -1:
    """Whether the items are the same objects, or equal strings or ints."""
    cdef Py_ssize_t i
    if len(mine) != len(others):
        return False
    for i in range(len(mine)):
        if mine[i] is not others[i]:
            if type(mine[i]) is not type(others[i]) or type(mine[i]) not in (str, int) or mine[i] != others[i]:
                return False
    return True


cdef Py_ssize_t as_num_wanted(object num_tokens, Py_ssize_t num_known) except -1:
    """The tokens that are to have room at first: `num_tokens`, or for None all."""
    return num_known if num_tokens is None else size_of(num_tokens, "num_tokens", 1, num_known)


cdef Py_ssize_t as_max_num_new(object max_num_new_tokens, Py_ssize_t num_wanted) except -1:
    return num_wanted if max_num_new_tokens is None else size_of(max_num_new_tokens, "max_num_new_tokens", 1)


cdef class RunningRows:
    """What the rows of a running batch know and hold. `pagepool.RunningBatch` is the door for users.

    Each row has its known tokens, the digests of its pages and, for each group, its page ids. Memory is touched only as far as
    rows grow: 4 bytes a token, 16 a hashed page, 4 a page and group; `release` keeps it for the next row.
    """

    cdef Batch batch
    cdef PageStore store
    cdef tuple tables               # one TableRows a group
    cdef tuple lock_order           # the same in the order in which everybody locks them
    cdef list buffers               # the arrays that `batch` points into
    cdef list extra_key_bytes       # by row: the bytes that `batch.extra_keys` points into
    cdef list refusals              # by row: the _RowRefusal of the request that was tried last, or None
    cdef bytes key
    cdef int32_t num_shards         # of the pool that rows are bound to; 0: none
    cdef readonly object num_tokens
    cdef readonly object num_computed_tokens
    cdef readonly object num_cached_tokens
    cdef readonly object is_admitted
    cdef cython.pymutex lock
    cdef LockNode lock_node

    def __cinit__(self, *args, **kwargs):
        enlist_lock(&self.lock_node, &self.lock, BATCH_LOCK)

    def __init__(
        self, PageStore store not None, tables, groups, max_num_tokens, hash_page_size, bytes key not None, num_shards
    ):
        """`tables` are `TableRows`, one for each of `groups`: ``(PageRules, group id, hashes of a page)``, with the id None
        where pages are not cached.
        """
        cdef tuple by_group = checked_tables(tables)
        cdef list rules_by_group = checked_groups(groups, len(by_group))
        cdef Py_ssize_t n, num_pool_shards = size_of(num_shards, "data_parallel_size", 0)
        cdef Py_ssize_t num_tokens = min(size_of(max_num_tokens, "max_model_len", 1, INT64_MAX), MAX_TOKENS)
        cdef Py_ssize_t num_hash_tokens = size_of(hash_page_size, "hash_page_size", 0, MAX_TOKENS)
        if self.batch.groups != NULL:  # after the arguments were read, which may run Python code
            raise ArgumentError("the rows of a batch are made once")
        if num_hash_tokens and not store.enable_caching:
            raise ArgumentError(f"hash_page_size: got {num_hash_tokens}, allowed without prefix caching: 0")
        self.batch.groups = <Group *>calloc(len(by_group), sizeof(Group))
        if self.batch.groups == NULL:
            raise MemoryError("cache groups")
        self.store, self.key, self.buffers = store, key, []
        self.tables, self.lock_order = by_group, in_lock_order(by_group)
        self.num_shards = <int32_t>num_pool_shards
        self.batch.max_num_tokens = <int32_t>num_tokens
        self.batch.hash_page_size = <int32_t>num_hash_tokens
        n = (<TableRows>by_group[0]).rows.num_rows
        for table, (rules, group_id, stride) in zip(by_group, rules_by_group, strict=True):
            self.add_group(n, table, rules, group_id, stride)
        self.make_state(n)
        self.make_contents(n)
        self.batch.pool = &store.pool
        self.batch.num_rows = n

    def __dealloc__(self):
        cdef Py_ssize_t row
        delist_lock(&self.lock_node)
        for row in range(self.batch.num_rows):
            free(self.batch.extra_keys[row])
        free(self.batch.extra_keys)
        free(self.batch.contexts)
        free(self.batch.groups)

    def __reduce__(self):
        raise ArgumentTypeError("a running batch cannot be pickled")

    cdef int32_t *new_buffer(self, Py_ssize_t num_rows, Py_ssize_t num_columns) except NULL:
        """Zeros from a cache line on that live as long as the batch. What nobody touches takes no memory."""
        cdef _Buffer buffer = _Buffer.__new__(_Buffer)
        buffer.allocate(num_rows, num_columns)
        self.buffers.append(buffer)
        return buffer.values

    cdef int add_group(self, Py_ssize_t n, TableRows table, PageRules rules, int32_t group_id, Py_ssize_t stride) except -1:
        cdef Group *group = &self.batch.groups[self.batch.num_groups]
        if self.batch.hash_page_size and group_id != NO_GROUP and stride * self.batch.hash_page_size != rules.rules.page_size:
            raise ArgumentError(
                f"groups: got {stride} hashes of {self.batch.hash_page_size} tokens for pages of {rules.rules.page_size}, "
                "allowed: as many as make a page"
            )
        group.rules = rules.rules
        group.id = group_id
        group.stride = <int32_t>stride
        group.rows = &table.rows
        group.num_columns = table.rows.num_columns
        group.ids_stride = odd_lines(group.num_columns, sizeof(int32_t))
        group.page_ids = self.new_buffer(n, group.ids_stride)
        group.held = <Held *>self.new_buffer(n, sizeof(Held) // sizeof(int32_t))
        self.batch.max_num_tokens = <int32_t>min(
            <int64_t>self.batch.max_num_tokens, <int64_t>rules.rules.page_size * group.num_columns
        )
        self.batch.skips_pages |= group.rules.window or group.rules.chunk
        self.batch.has_state |= is_state(&group.rules)
        self.batch.num_groups += 1
        return 0

    cdef int make_state(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t row
        self.batch.states = <RowState *>self.new_buffer(n, sizeof(RowState) // sizeof(int32_t))
        states = np.frombuffer(self.buffers[len(self.buffers) - 1], dtype=ROW_STATE)
        self.num_tokens = states["num_tokens"]
        self.num_computed_tokens = states["num_computed"]
        self.num_cached_tokens = states["num_hits"]
        self.is_admitted = states["is_admitted"]
        self.batch.admissions = <int64_t *>self.new_buffer(n, sizeof(int64_t) // sizeof(int32_t))
        self.batch.checked_rows = self.new_buffer(n, 1)
        self.batch.due_rows = self.new_buffer(n, 1)
        for row in range(n):
            self.batch.states[row].shard = -1
        return 0

    cdef int make_contents(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t num_hashes = 0
        self.batch.tokens_stride = odd_lines(self.batch.max_num_tokens, sizeof(int32_t))
        self.batch.token_ids = self.new_buffer(n, self.batch.tokens_stride)
        self.batch.key = digest_of_bytes(self.key)
        self.batch.extra_key = extra_key_of(self.key)
        if self.batch.hash_page_size:
            num_hashes = self.batch.max_num_tokens // self.batch.hash_page_size
        self.batch.digests_stride = odd_lines(num_hashes, sizeof(Digest))
        self.batch.digests = <Digest *>self.new_buffer(n, self.batch.digests_stride * (sizeof(Digest) // sizeof(int32_t)))
        self.extra_key_bytes = [None] * n
        self.refusals = [None] * n
        self.batch.extra_keys = <ExtraKey **>calloc(n, sizeof(ExtraKey *))
        self.batch.contexts = <int32_t *>calloc(n, sizeof(int32_t))
        if self.batch.extra_keys == NULL or self.batch.contexts == NULL:
            raise MemoryError(f"{n} rows")
        return 0

    @property
    def max_num_tokens(self) -> int:
        """Tokens that a row can know: those of the model, or fewer where the table has less room."""
        return self.batch.max_num_tokens

    # Locks: rows first, then the store, then the tables. While they are held no Python object is made.

    cdef void let_go(self) noexcept:
        for table in self.lock_order:
            (<TableRows>table).lock.release()
        self.store.lock.release()
        self.lock.release()

    cdef int check_made(self) except -1:
        if not self.batch.num_rows:
            raise ArgumentError("the batch was not made: its constructor did not run, or failed")
        return 0

    cdef int enter_call(self) except -1:
        """Take all locks, with the pool divided as the rows need it."""
        self.check_made()
        self.lock.acquire()
        try:
            self.store.lock_divided(self.num_shards)
        except BaseException:
            self.lock.release()
            raise
        for table in self.lock_order:
            (<TableRows>table).lock.acquire()
        return 0

    # Growing.

    def grow(self, rows, num_new_tokens=1, num_lookahead_tokens=0) -> StepResult:
        """Give the next known tokens of each row their slots, and room for drafts behind them, row by row in the given order.

        `rows` is a list or an int array without repeats. `num_new_tokens` and `num_lookahead_tokens` are a number for all rows
        or one for each. First the pages that fell out of the attention window go back, then the missing pages are taken, then
        pages that got full are entered in the prefix index. The first row that does not fit stops the call and gets nothing of
        it: preempt, and call again from ``num_grown``.

        ArgumentError for more tokens than a row knows, for rows not admitted or repeated, RowIndexError outside the table:
        nothing has changed then. O(rows + new pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds new = as_amounts(num_new_tokens, "num_new_tokens", row_ids.num)
        cdef PageIds ahead = as_amounts(num_lookahead_tokens, "num_lookahead_tokens", row_ids.num)
        return self.run(row_ids, new, amounts_in(ahead), None)

    def step(self, rows, token_ids) -> StepResult:
        """Append one token to each row and give the next token of each its slot: the decode step of the whole batch.

        `rows` and `token_ids` are lists or int arrays of one length; rows do not repeat. A row that does not fit stops the call
        and has not got its token either. RowOverflowError, and nothing changed, where a row is as long as it can be; other
        errors as in `grow`. O(rows + new pages), native; about 10 ns a row.
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        check_tokens(tokens, row_ids)
        return self.run(row_ids, ONE, Amounts(&ZERO, 0), tokens)

    cdef StepResult run(self, PageIds rows, PageIds num_new_tokens, Amounts num_ahead, PageIds tokens):
        """Check all rows, make room for the result, then grow: nothing can fail any more."""
        cdef StepResult result = StepResult.__new__(StepResult)
        cdef Growth *growth = &result.growth
        cdef Py_ssize_t num_right
        cdef bint has_room = True
        cdef int32_t held_free = NULL_PAGE
        result.begin(self, rows, num_new_tokens, num_ahead, tokens)
        if growth.num_rows == 0:
            return result
        self.enter_call()
        num_right = self.check_rows_of(growth)
        if num_right == growth.num_rows:
            growth.max_num_new = min(growth.max_num_new, self.store.pool.num_pages)  # each page is taken once at most
            has_room = result.has_room_for(growth.max_num_new)
            held_free = find_held_free(&self.store.pool, growth.max_num_new)
        if num_right == growth.num_rows and has_room and held_free == NULL_PAGE:
            result.num_grown = self.grow_checked(growth)
        else:
            uncount(&self.batch, growth, 0, num_right)
        self.let_go()
        if num_right < growth.num_rows:
            self.refuse_growth(growth, num_right)
        if not has_room:
            raise MemoryError(f"{growth.max_num_new} new pages")
        self.store.check_untaken(held_free)
        return result

    cdef Py_ssize_t check_rows_of(self, Growth *growth) noexcept:
        """`check_growth`, compiled apart for steps, which are hot."""
        if growth.token_ids == NULL:
            return check_growth(&self.batch, growth, False, False)
        if copy_ascending(&self.batch, growth.rows, growth.num_rows):
            return check_growth(&self.batch, growth, True, True)
        return check_growth(&self.batch, growth, True, False)

    cdef Py_ssize_t grow_checked(self, Growth *growth) noexcept:
        cdef Py_ssize_t num_grown
        growth.num_admissions = self.batch.num_admissions
        if growth.num_rows + growth.max_num_new < RELEASE_GIL_AT:
            num_grown = grow_rows(&self.batch, growth)
        else:
            with nogil:
                num_grown = grow_rows(&self.batch, growth)
        return num_grown

    def undo(self, StepResult result not None) -> None:
        """Take back a call of `step` or `grow` whose model run failed: the rows are as before, without the token that `step`
        appended, the pages that the call took go back, and the entries that it made in the prefix index are dropped.

        Several calls are taken back last first, rows that were admitted meanwhile are released first, with the
        `num_computed_tokens` that they hit. Pages that an attention window left stay given back. The state of a state group is
        not pagepool's: restore it, or release the row, if the model may have begun to write it.

        ArgumentError, and nothing changed, for another batch's result, for one that was taken back already, where a row was
        grown, cut, moved or released since, or where it needs pages again that a later call gave back; release such rows with
        `num_computed_tokens`. O(rows + pages taken and entered).
        """
        cdef Growth *growth = &result.growth
        cdef Py_ssize_t i, num_pages, num_left = result.num_grown
        if result.batch is not self:
            raise ArgumentError(f"result: got one {'of another batch' if result.batch else 'that was taken back already'}")
        self.enter_call()
        num_pages = growth.num_new
        while num_left and can_undo(&self.batch, growth, num_left - 1, &num_pages):
            num_left -= 1
        if num_left == 0:
            num_pages = growth.num_new
            for i in range(result.num_grown - 1, -1, -1):
                undo_row(&self.batch, growth, i, &num_pages)
            result.batch = None
        self.let_go()
        if num_left:
            self.refuse_undo(growth, num_left - 1)

    cdef int refuse_undo(self, const Growth *growth, Py_ssize_t at) except -1:
        cdef int32_t row = growth.grown[at].row
        if not is_as_grown(&self.batch, growth, at):
            raise ArgumentError(f"row {row} (at {at}): was grown, cut, moved or released since; allowed: the last call first")
        raise ArgumentError(
            f"row {row} (at {at}): cannot go back: pages that it had or needs again were given back, "
            "when they fell out of the attention window or by somebody else; release it with its num_computed_tokens"
        )

    cdef int32_t refuse_unknown(self, int32_t row, Py_ssize_t at) except -1:
        """Raise if a row of a call is not in the table or not admitted, or return it."""
        if not 0 <= row < self.batch.num_rows:
            raise RowIndexError(f"row: got {row} (at {at}), allowed: 0 to {self.batch.num_rows - 1}")
        if not self.batch.states[row].is_admitted:
            raise ArgumentError(f"row {row} (at {at}) is not admitted")
        return row

    cdef int32_t refuse_row(self, const int32_t *rows, Py_ssize_t at) except -1:
        """Raise what is wrong with a row of a call in which none may stand twice, or return it."""
        cdef Py_ssize_t i
        cdef int32_t row = self.refuse_unknown(rows[at], at)
        for i in range(at):
            if rows[i] == row:
                raise ArgumentError(f"rows: got {row} twice (at {i} and {at}), allowed: each once")
        return row

    cdef int refuse_growth(self, const Growth *growth, Py_ssize_t at) except -1:
        cdef int32_t row = self.refuse_row(growth.rows, at)
        if growth.token_ids != NULL and self.batch.states[row].num_tokens >= self.batch.max_num_tokens:
            self.refuse_length(row, <int64_t>self.batch.states[row].num_tokens + 1)
        if has_lost_page(&self.batch, row):
            raise DoubleFreeError(f"row {row} (at {at}): a page that it holds was given back by somebody else")
        raise ArgumentError(
            f"row {row} (at {at}): got {amount(&growth.num_new_tokens, at)} new tokens and {amount(&growth.num_ahead, at)} "
            f"lookahead tokens, allowed: at least 0, and new ones up to the "
            f"{self.batch.states[row].num_tokens - self.batch.states[row].num_computed} that are known and not computed"
        )

    cdef int refuse_length(self, Py_ssize_t row, int64_t num_tokens) except -1:
        raise RowOverflowError(
            f"row {row}: got {num_tokens} tokens, "
            f"allowed: {self.batch.max_num_tokens}, which is max_model_len or what the table has room for"
        )

    # Known tokens.

    def append(self, rows, token_ids) -> None:
        """Let rows know one token more each, without room for it yet; rows may repeat, for several tokens in order.

        RowOverflowError, and nothing changed, where a row would be longer than it can be. O(rows).
        """
        cdef PageIds row_ids = as_own_ids(rows, "rows")
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        cdef Py_ssize_t num_done
        check_tokens(tokens, row_ids)
        with self.lock:
            num_done = append_tokens(&self.batch, row_ids.ids, tokens.ids, row_ids.num)
        if num_done < row_ids.num:
            self.refuse_append(row_ids, num_done)

    cdef int refuse_append(self, PageIds rows, Py_ssize_t at) except -1:
        cdef Py_ssize_t i
        cdef int64_t num_tokens = 1
        cdef int32_t row = self.refuse_unknown(rows.ids[at], at)
        for i in range(at):
            num_tokens += rows.ids[i] == row
        self.refuse_length(row, self.batch.states[row].num_tokens + num_tokens)

    def trim(self, rows, num_tokens) -> None:
        """Forget the known tokens of rows from `num_tokens` on, a number for all rows or one for each: rejected drafts.

        Pages wholly behind go back, the last first, and lose their prefix entry unless somebody else holds them. Where the cut
        goes through a page that somebody else holds too, that page goes back as well, and its first tokens are to be
        computed again: ``num_computed_tokens`` says so. ArgumentError, and nothing changed, for more tokens than a row knows,
        where pages that the attention window needs again were given back already, and where a state group's state has seen
        tokens that are cut, unless all are. O(rows + pages behind).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds lengths = as_amounts(num_tokens, "num_tokens", row_ids.num)
        cdef Amounts amounts = amounts_in(lengths)
        cdef Py_ssize_t i, num_right
        self.enter_call()
        num_right = check_trim(&self.batch, row_ids.ids, &amounts, row_ids.num)
        if num_right == row_ids.num:
            for i in range(row_ids.num):
                trim_row(&self.batch, self.batch.checked_rows[i], amount(&amounts, i))
        self.let_go()
        if num_right < row_ids.num:
            self.refuse_trim(row_ids, num_right, amount(&amounts, num_right))

    cdef int refuse_trim(self, PageIds rows, Py_ssize_t at, int32_t num_tokens) except -1:
        cdef int32_t row = self.refuse_row(rows.ids, at)
        if not 0 <= num_tokens <= self.batch.states[row].num_tokens:
            raise ArgumentError(f"num_tokens: got {num_tokens} (at {at}), allowed: 0 to {self.batch.states[row].num_tokens}")
        if has_state_behind(&self.batch, row, find_restart(&self.batch, row, num_tokens)):
            raise ArgumentError(
                f"num_tokens: got {num_tokens} (at {at}), allowed for row {row}, which has a state that saw later tokens: "
                f"0, or from {self.batch.states[row].num_computed} on"
            )
        raise ArgumentError(
            f"row {row} (at {at}): cannot be cut to {num_tokens} tokens: pages that they need were given back, "
            "when they fell out of the attention window or by somebody else"
        )

    # Coming, going, changing places.

    def release(self, rows, num_computed_tokens=None) -> None:
        """Give back all pages of rows, in the given order, the last page of each first, and make the rows free.

        After a failed step `num_computed_tokens`, a number for each row or one for all, says how many tokens were computed
        indeed: pages that a row entered in the prefix index with tokens from there on lose their entries, held by others or
        not. Release others that hit them since as well.

        ArgumentError, and nothing changed, for more tokens than a row has slots for, DoubleFreeError if somebody else gave
        one of the pages back. O(pages).
        """
        cdef PageIds row_ids = as_page_ids(rows, "rows")
        cdef PageIds computed = None
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num_right, bad = -1
        cdef bint has_room = True
        if num_computed_tokens is not None:
            computed = as_amounts(num_computed_tokens, "num_computed_tokens", row_ids.num)
        self.enter_call()
        num_right = self.check_release(row_ids, computed, ids, &has_room)
        if num_right == row_ids.num and has_room:
            bad = self.release_checked(ids, num_right, computed)
        self.let_go()
        if num_right < row_ids.num:
            self.refuse_release(row_ids, computed, num_right)
        if not has_room:
            raise MemoryError("the pages of the rows")
        if bad >= 0:
            raise DoubleFreeError(f"page {ids.ids[bad]} is given back by a row more often than it is held")

    cdef int refuse_release(self, PageIds rows, PageIds computed, Py_ssize_t at) except -1:
        cdef int32_t row = self.refuse_row(rows.ids, at)
        if computed is None:
            raise ArgumentError("rows: changed during the call")
        raise ArgumentError(
            f"num_computed_tokens: got {computed[at % computed.num]} (at {at}), "
            f"allowed: 0 to {self.batch.states[row].num_computed}, for which row {row} has slots"
        )

    cdef Py_ssize_t check_release(self, PageIds rows, PageIds computed, PageIds ids, bint *has_room) noexcept:
        """How many rows there are before the first that is wrong. Copies the rows, and puts their pages into `ids`, in the
        order in which they go back.
        """
        cdef const Group *group
        cdef Py_ssize_t i, g, j
        cdef int32_t row
        start_call(&self.batch)
        for i in range(rows.num):
            if not claim_row(&self.batch, rows.ids[i], i):
                return i
            row = self.batch.checked_rows[i]
            if computed is not None and not 0 <= computed.ids[i % computed.num] <= self.batch.states[row].num_computed:
                return i
            for g in range(self.batch.num_groups):
                group = &self.batch.groups[g]
                has_room[0] = has_room[0] and ids.has_room_for(group.held[row].num_pages)
                if has_room[0]:
                    for j in range(group.held[row].num_pages - 1, -1, -1):
                        ids.ids[ids.num] = ids_of(group, row)[j]
                        ids.num += 1
        return rows.num

    cdef Py_ssize_t release_checked(self, PageIds ids, Py_ssize_t num_rows, PageIds computed) noexcept:
        """Give back the pages and empty the rows; or the index of a page that nobody holds, and nothing changed."""
        cdef Py_ssize_t i, row, bad
        if ids.num < RELEASE_GIL_AT:
            bad = give_back(&self.store.pool, ids.ids, ids.num, False)
        else:
            with nogil:
                bad = give_back(&self.store.pool, ids.ids, ids.num, False)
        for i in range(num_rows if bad < 0 else 0):
            row = self.batch.checked_rows[i]
            if computed is not None:
                forget_uncomputed(&self.batch, row, computed.ids[i % computed.num])
            set_context(&self.batch, row, 0)
            empty_row(&self.batch, row)
        return bad

    cdef void forget_extra_keys(self, Py_ssize_t row) noexcept:
        """Drop the extra keys of a row, and its digests, which were made with them."""
        self.batch.states[row].num_hashed = 0
        free(self.batch.extra_keys[row])
        self.batch.extra_keys[row] = NULL
        self.extra_key_bytes[row] = None

    cdef Py_ssize_t checked_row(self, object row) except -1:
        self.check_made()
        return (<TableRows>self.tables[0]).checked_row(row)

    def move_row(self, src, tgt) -> None:
        """Let an admitted row go on as another, free one; the source is free after. O(tokens and pages of the row)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.exchange(source, target, True)

    def swap_row(self, src, tgt) -> None:
        """Exchange two rows, free or not. O(tokens and pages of both)."""
        cdef Py_ssize_t source = self.checked_row(src)
        cdef Py_ssize_t target = self.checked_row(tgt)
        self.exchange(source, target, False)

    cdef int exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
        cdef Batch *batch = &self.batch
        cdef bint is_right
        cdef object _forgotten, _forgotten_too  # until the locks are free: what goes with them may wait for a fork
        self.enter_call()
        is_right = not is_move or (batch.states[source].is_admitted and not batch.states[target].is_claimed)
        is_right = is_right and batch.states[source].is_admitted == batch.states[source].is_claimed
        is_right = is_right and batch.states[target].is_admitted == batch.states[target].is_claimed
        if is_right and source != target:
            exchange_rows(batch, source, target)
            _forgotten, _forgotten_too = self.refusals[source], self.refusals[target]
            self.refusals[source] = self.refusals[target] = None
            data = self.extra_key_bytes[source]
            self.extra_key_bytes[source] = self.extra_key_bytes[target]
            self.extra_key_bytes[target] = data
        self.let_go()
        if not is_right:
            self.refuse_exchange(source, target, is_move)
        return 0

    cdef int refuse_exchange(self, Py_ssize_t source, Py_ssize_t target, bint is_move) except -1:
        raise ArgumentError(
            f"rows {source} and {target}: {'admitted' if self.batch.states[source].is_admitted else 'free'} and "
            f"{'admitted' if self.batch.states[target].is_admitted else 'free'}, allowed: "
            f"{'an admitted row and a free one' if is_move else 'rows that are not being admitted'}"
        )

    # Admission.

    def admit_row(
        self, row, token_ids, num_tokens, max_num_new_tokens, extra_keys, find_hits, shard, num_reserved_pages, context=0,
        options=None, QueryCounter counter=None,
    ):
        """Start a free row: see `RunningBatch.admit`. `extra_keys` are ``(page, bytes)`` of the hash pages that have any, in
        order; `find_hits` maps a `HashChain` and the number of known tokens to page ids for each group and the tokens that they
        hold; None: take no hits. The row has a `context` of `PageStore.add_context`. `options`, a tuple of what hits depend on
        besides the tokens, identifies a refused request for `is_refused_still`. `counter` counts an admitted one.
        """
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef PageIds tokens = as_page_ids(token_ids, "token_ids")
        cdef Py_ssize_t num_known = tokens.num
        cdef Py_ssize_t num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        cdef Py_ssize_t num_wanted, max_num_new
        cdef list keys = checked_extra_keys(extra_keys)
        cdef int32_t checked_context = self.store.checked_context(context)
        if num_known == 0:
            raise ArgumentError("token_ids: got none, allowed: at least 1")
        if num_known > self.batch.max_num_tokens:
            self.refuse_length(checked, num_known)
        num_wanted = as_num_wanted(num_tokens, num_known)
        max_num_new = as_max_num_new(max_num_new_tokens, num_wanted)
        if counter is not None and counter.store is not self.store:
            raise ArgumentError("counter: got one of another pool, allowed: one of the batch's")
        self.claim(checked)
        is_admitted = False
        refusal = None
        try:
            self.set_contents(checked, tokens, num_known, keys)
            num_hits = self.attach(checked, num_known, num_wanted, max_num_new, find_hits, shard, num_reserved, checked_context)
            is_admitted = type(num_hits) is not _RowRefusal
            if not is_admitted:
                (<_RowRefusal>num_hits).remember(token_ids, options, tokens_of(&self.batch, checked))
                refusal = num_hits
        finally:
            self.refusals[checked] = refusal
            if not is_admitted:
                self.batch.states[checked].is_claimed = 0
        if is_admitted and counter is not None:
            counter.count(num_known, self.batch.states[checked].num_hits)
        return num_hits if is_admitted else None

    def is_refused_still(self, row, token_ids, num_tokens, max_num_new_tokens, num_reserved_pages, options) -> bool:
        """Whether the request that a row refused last is certainly refused again. It is the same request if its tokens and
        `options` are the same. O(1) for tokens in the same list, or in an array over the same memory, of which a sample is
        compared; O(tokens) for others.
        """
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef _RowRefusal refusal = self.refusals[checked]
        cdef Py_ssize_t num_wanted, max_num_new, num_reserved
        cdef bint is_refused
        if refusal is None or not refusal.is_of(token_ids, options, tokens_of(&self.batch, checked)):
            return False
        num_wanted = as_num_wanted(num_tokens, refusal.num_tokens)
        max_num_new = as_max_num_new(max_num_new_tokens, num_wanted)
        num_reserved = size_of(num_reserved_pages, "num_reserved_pages")
        self.enter_call()
        is_refused = self.refusals[checked] is refusal and not self.batch.states[checked].is_claimed
        is_refused = is_refused and self.is_short_still(checked, refusal, num_wanted, max_num_new, num_reserved)
        self.let_go()
        return is_refused

    cdef bint is_short_still(
        self, Py_ssize_t row, _RowRefusal refusal, Py_ssize_t num_wanted, Py_ssize_t max_num_new, Py_ssize_t num_reserved
    ) noexcept:
        """Whether the row would hit what it hit, and too few pages are free for it. The locks are held."""
        cdef Py_ssize_t num_needed
        if not refusal.finds_hits(&self.store.pool):
            return False
        num_wanted = max(min(num_wanted, refusal.num_hit_tokens + max_num_new), refusal.num_hit_tokens)
        num_needed = count_new_pages(&self.batch, row, <int32_t>num_wanted) - refusal.watch.num_held
        return not has_free_pages(&self.store.pool, num_needed, num_reserved, refusal.shard)

    cdef int claim(self, Py_ssize_t row) except -1:
        """From here on nobody else admits the row, nor moves another one there."""
        cdef bint is_claimed
        with self.lock:
            is_claimed = self.batch.states[row].is_claimed
            self.batch.states[row].is_claimed = 1
        if is_claimed:
            raise ArgumentError(f"row {row} is admitted already, or being admitted")
        return 0

    cdef int set_contents(self, Py_ssize_t row, PageIds tokens, Py_ssize_t num_tokens, list extra_keys) except -1:
        """Copy the tokens and hash their full pages, but for those that the row has hashed for a request before."""
        cdef Py_ssize_t start, num_kept = 0
        cdef bint has_same_keys = extra_keys == (self.extra_key_bytes[row] or [])
        refuse_negative(tokens.ids, num_tokens, 0)
        if not has_same_keys:
            self.forget_extra_keys(row)
        if self.batch.hash_page_size:
            num_kept = count_hashed_before(&self.batch, row, tokens.ids, num_tokens)
        self.batch.states[row].num_hashed = <int32_t>num_kept
        start = num_kept * self.batch.hash_page_size
        memcpy(tokens_of(&self.batch, row) + start, tokens.ids + start, (num_tokens - start) * sizeof(int32_t))
        if not self.batch.hash_page_size:
            return 0
        if not has_same_keys:
            self.set_extra_keys(row, extra_keys)
        if num_tokens - start < RELEASE_GIL_AT * self.batch.hash_page_size:
            hash_row(&self.batch, row, <int32_t>num_tokens)
        else:
            with nogil:
                hash_row(&self.batch, row, <int32_t>num_tokens)
        return 0

    cdef int set_extra_keys(self, Py_ssize_t row, list extra_keys) except -1:
        cdef ExtraKey *keys
        cdef bytes data
        cdef Py_ssize_t i, page
        if not extra_keys:
            return 0
        keys = <ExtraKey *>calloc(len(extra_keys) + 1, sizeof(ExtraKey))
        if keys == NULL:
            raise MemoryError(f"{len(extra_keys)} extra keys")
        self.batch.extra_keys[row] = keys
        self.extra_key_bytes[row] = extra_keys
        for i, (page, data) in enumerate(extra_keys):
            keys[i] = ExtraKey(<const uint8_t *><const char *>data, len(data), page)
        return 0

    cdef object attach(
        self,
        Py_ssize_t row,
        Py_ssize_t num_known,
        Py_ssize_t num_wanted,
        Py_ssize_t max_num_new,
        object find_hits,
        object shard,
        Py_ssize_t num_reserved,
        int32_t context,
    ):
        """Look the row's prefix up, and take its pages: the tokens that were hit; a `_RowRefusal`, and nothing taken, if too
        few are free.
        """
        cdef tuple hits = ()
        cdef object num_hit_tokens = 0  # made before anything is taken
        cdef int32_t num_hits = 0
        cdef int32_t held_free = NULL_PAGE
        cdef HashChain chain = None
        cdef Py_ssize_t num_free_hits
        cdef bint has_room
        cdef int32_t checked_shard = as_shard(shard, self.num_shards)
        cdef _RowRefusal refusal
        cdef int64_t num_changes = self.store.count_changes()
        if find_hits is not None and self.batch.hash_page_size:
            chain = HashChain.__new__(HashChain, self.batch.hash_page_size, self.key)
            hits, num_hit_tokens = self.look_up(row, num_known, find_hits, chain)
            num_hits = <int32_t>size_of(num_hit_tokens, "num_hit_tokens", 0, num_known - 1)
            self.check_hits(hits, num_hits)
        refusal = _RowRefusal(hits, num_known, num_hit_tokens)
        self.enter_call()
        self.batch.states[row].shard = checked_shard
        num_free_hits = self.count_free_hits(row, hits, chain)
        num_wanted = max(min(num_wanted, num_hits + max_num_new), num_hits)
        has_room = num_free_hits >= 0 and self.has_room_for(
            row, hits, num_free_hits, <int32_t>num_wanted, num_reserved, &held_free
        )
        if has_room and held_free == NULL_PAGE:
            set_context(&self.batch, row, context)
            self.fill_row(row, hits, <int32_t>num_known, <int32_t>num_wanted)
            self.batch.states[row].num_hits = num_hits
        elif not has_room and num_free_hits >= 0:
            self.begin_refusal(row, refusal, num_free_hits, num_changes)
        self.let_go()
        if num_free_hits < 0:
            raise PageHashError(f"row {row}: a page that was hit has another content meanwhile, or cannot be held")
        self.store.check_untaken(held_free)
        return num_hit_tokens if has_room else refusal

    cdef void begin_refusal(
        self, Py_ssize_t row, _RowRefusal refusal, Py_ssize_t num_free_hits, int64_t num_changes
    ) noexcept:
        """Watch the hits of a refused row, looked up after `num_changes` changes of the index. The locks are held."""
        cdef Pool *pool = &self.store.pool
        cdef Group *group = &self.batch.groups[0]
        cdef Py_ssize_t num_held = -num_free_hits
        cdef PageIds ids
        cdef bint is_leading
        for ids in refusal.hits:
            num_held += ids.num
        refusal.shard = self.batch.states[row].shard
        is_leading = self.batch.num_groups == 1 and hits_leading_pages(group) and num_changes == count_changes(pool)
        if refusal.hits and is_leading:
            refusal.page_size = group.rules.page_size
            refusal.prefix = Prefix(
                digests_of(&self.batch, row), group.stride, (refusal.num_tokens - 1) // refusal.page_size, group.id,
                ids_in_shard(pool, refusal.shard),
            )
        refusal.begin(pool, num_held)
        refusal.watch.num_changes = num_changes

    cdef object look_up(self, Py_ssize_t row, Py_ssize_t num_known, object find_hits, HashChain chain):
        """Call `find_hits` with the row's digests, which are lent to a chain and taken back."""
        chain.digests = digests_of(&self.batch, row)
        chain.num = self.batch.states[row].num_hashed
        try:
            return find_hits(chain, num_known)
        finally:
            with chain.lock:
                chain.digests = NULL
                chain.num = 0

    cdef int check_hits(self, tuple hits, int32_t num_hits) except -1:
        """Hits of every group, as long as they say, within the pool."""
        cdef PageIds ids
        cdef Py_ssize_t g
        if len(hits) != self.batch.num_groups:
            raise ArgumentError(f"hits: got {len(hits)} groups, allowed: {self.batch.num_groups}")
        for g in range(self.batch.num_groups):
            ids = hits[g]
            if ids is None:
                raise ArgumentTypeError("hits: got None, allowed: PageIds")
            if ids.num > full_pages(&self.batch.groups[g].rules, num_hits):
                raise ArgumentError(f"hits: got {ids.num} pages for {num_hits} tokens")
            self.store.checked(ids)
        return 0

    cdef Py_ssize_t count_free_hits(self, Py_ssize_t row, tuple hits, HashChain chain) noexcept:
        """How many hits, looked up with `chain`, are in the free queue; -1 if one of them cannot be taken."""
        cdef Py_ssize_t g, num_free, num_hits = 0, num_all = 0
        cdef PageIds ids
        cdef bint is_known
        for g in range(len(hits)):
            num_hits += (<PageIds>hits[g]).num
        for g in range(len(hits)):
            ids = hits[g]
            is_known = isinstance(ids, _FoundIds) and (<_FoundIds>ids).is_known(chain, &self.batch.groups[g], self.batch.pool)
            num_free = count_free_hits(&self.batch, row, g, ids.ids, ids.num, num_hits, is_known)
            if num_free < 0:
                return -1
            num_all += num_free
        return num_all

    cdef bint has_room_for(
        self, Py_ssize_t row, tuple hits, Py_ssize_t num_free_hits, int32_t num_tokens, Py_ssize_t num_reserved,
        int32_t *held_free,
    ) noexcept:
        """Whether the pool has the pages that an empty row needs beside its hits, and those of the hits that are free."""
        cdef Pool *pool = &self.store.pool
        cdef Py_ssize_t g, num_needed = count_new_pages(&self.batch, row, num_tokens) + num_free_hits
        for g in range(len(hits)):
            num_needed -= (<PageIds>hits[g]).num
        if not has_free_pages(pool, num_needed, num_reserved, self.batch.states[row].shard):
            return False
        held_free[0] = find_held_free(pool, num_needed)
        return True

    cdef void fill_row(self, Py_ssize_t row, tuple hits, int32_t num_known, int32_t num_wanted) noexcept:
        """Give an empty row its hits and its pages, and enter those that are full."""
        cdef Py_ssize_t g
        for g in range(len(hits)):
            attach_hits(&self.batch, row, g, (<PageIds>hits[g]).ids, (<PageIds>hits[g]).num)
        for g in range(self.batch.num_groups):
            show_row(&self.batch.groups[g], row)
        take_pages(&self.batch, row, num_wanted, NULL)
        enter_full_pages(&self.batch, row, num_wanted)
        enter_waiting(&self.batch)
        self.batch.states[row].num_tokens = num_known
        self.batch.states[row].num_computed = num_wanted
        plan_next_event(&self.batch, row)
        begin_admission(&self.batch, row)
        self.batch.states[row].is_admitted = 1

    # Looking.

    def get_page_ids(self, row) -> tuple:
        """The ids of a row's pages, one list for each group; the null page, 0, where one was skipped. O(pages)."""
        cdef Py_ssize_t checked = self.checked_row(row)
        cdef Py_ssize_t g
        return tuple([self.copy_ids(&self.batch.groups[g], checked).to_list() for g in range(self.batch.num_groups)])

    cdef PageIds copy_ids(self, const Group *group, Py_ssize_t row):
        cdef PageIds ids = PageIds.__new__(PageIds)
        with self.lock:
            ids.add(ids_of(group, row), group.held[row].num_pages)
        return ids

    def check_rows(self, held_elsewhere) -> None:
        """IntegrityError unless rows, tables and ref counts agree. `held_elsewhere` are `HeldPages` of others. O(table)."""
        self.check_made()
        cdef list others = held_pages_in(held_elsewhere)
        cdef int32_t[::1] counts = np.zeros(self.store.pool.num_pages, dtype=np.int32)
        cdef str flaw
        self.enter_call()
        flaw = self.find_flaw(&counts[0]) or self.store.find_flaw_in_holders(&counts[0], others)
        self.let_go()
        if flaw is not None:
            raise IntegrityError(flaw)

    cdef str find_flaw(self, int32_t *counts):
        """What is wrong with a row, or None; counts the pages of those that are right."""
        cdef Py_ssize_t row, g, i
        cdef str flaw
        for row in range(self.batch.num_rows):
            flaw = self.find_flaw_in_counts(row)
            for g in range(self.batch.num_groups):
                if flaw is None:
                    flaw = self.find_flaw_in_pages(row, g)
                if flaw is None:
                    for i in range(self.batch.groups[g].held[row].num_pages):
                        counts[ids_of(&self.batch.groups[g], row)[i]] += 1
            if flaw is not None:
                return flaw
        return None

    cdef str find_flaw_in_counts(self, Py_ssize_t row):
        cdef Batch *batch = &self.batch
        cdef RowState *state = &batch.states[row]
        cdef int32_t planned, event = state.next_event
        if not 0 <= state.num_computed <= state.num_tokens <= batch.max_num_tokens:
            return (
                f"row {row} has {state.num_tokens} tokens, {state.num_computed} of them computed, "
                f"allowed: at most {batch.max_num_tokens}"
            )
        if state.is_admitted:
            plan_next_event(batch, row)
        planned, state.next_event = state.next_event, event
        if not state.is_admitted <= event <= planned:  # an early one is left by tokens that went, and by a row without room
            return f"row {row}: the next event is at {event} tokens, allowed: {int(state.is_admitted)} to {planned}"
        if state.is_admitted and batch.hash_page_size and not self.has_right_digests(row):
            return f"row {row}: {state.num_hashed} pages are hashed, otherwise than its {state.num_tokens} tokens would be"
        return None

    cdef bint has_right_digests(self, Py_ssize_t row) noexcept:
        """Whether the row's digests are those that its tokens and extra keys give. O(tokens)."""
        cdef Batch *batch = &self.batch
        cdef const ExtraKey *key = batch.extra_keys[row]
        cdef Digest parent = Digest(0, 0)
        cdef int32_t i, num_hashed = batch.states[row].num_hashed
        if not 0 <= num_hashed <= batch.states[row].num_tokens // batch.hash_page_size:
            return False
        for i in range(num_hashed):
            parent = hash_page_of(batch, row, i, parent, &key)
            if memcmp(&parent, &digests_of(batch, row)[i], sizeof(Digest)) != 0:
                return False
        return True

    cdef str find_flaw_in_pages(self, Py_ssize_t row, Py_ssize_t g):
        """A row's pages are those of its tokens, lie in the pool, and stand in the table."""
        cdef Group *group = &self.batch.groups[g]
        cdef Held *held = &group.held[row]
        cdef const int32_t *ids = ids_of(group, row)
        cdef const int32_t *in_table = group.rows.table + row * group.num_columns
        cdef Py_ssize_t i
        cdef int32_t last = self.store.pool.num_pages - 1
        if not pages_for(&group.rules, self.batch.states[row].num_computed) <= held.num_pages <= group.num_columns:
            return f"row {row}, group {g}: {held.num_pages} pages for {self.batch.states[row].num_computed} tokens"
        if not 0 <= held.num_skipped <= held.num_pages or not 0 <= held.num_cached <= held.num_pages:
            return f"row {row}, group {g}: {held.num_pages} pages, {held.num_skipped} skipped, {held.num_cached} cached"
        for i in range(held.num_pages):
            if not 0 <= ids[i] <= last:
                return f"row {row}, group {g}: page {ids[i]} (at {i}), allowed: 0 to {last}"
            if ids[i] == NULL_PAGE and i and ids[i - 1] != NULL_PAGE:
                return f"row {row}, group {g}: the null page stands behind page {ids[i - 1]} (at {i})"
        if group.rows.num_pages[row] != held.num_pages:
            return f"row {row}, group {g}: {held.num_pages} pages, the table says {group.rows.num_pages[row]}"
        for i in range(group.num_columns):
            if in_table[i] != (ids[i] if i < held.num_pages else 0):
                return (
                    f"row {row}, group {g}: page {ids[i] if i < held.num_pages else 0} (at {i}), the table says {in_table[i]}"
                )
        return None


cdef int check_tokens(PageIds tokens, PageIds rows) except -1:
    """One token id for each row, none below 0."""
    if tokens.num != rows.num:
        raise ArgumentError(f"token_ids: got {tokens.num}, allowed: as many as rows, {rows.num}")
    return refuse_negative(tokens.ids, tokens.num, 0)


cdef Py_ssize_t get_payload_width(tuple tables) except -1:
    """The widest window of any table."""
    cdef Py_ssize_t width = 0
    for table in tables:
        if not isinstance(table, TableRows):
            raise ArgumentTypeError(f"tables: got {type(table).__name__}, allowed: TableRows")
        (<TableRows>table).check_made()
        width = max(width, (<TableRows>table).rows.width)
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
