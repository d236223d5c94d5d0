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

The classes are here. What they do without Python is in headers, ``core/*.pxd``; each includes only those above it:

================  ==============================================================================================
`platform`        memory hints, the clock, whether guards are compiled in
`siphash`         digests of pages
`records`         the records of a pool: pages, index slots, journal, residency
`queue`           the free queue: which page is evicted next
`notes`           the journal's notes of entries that come and go
`twins`           pages of equal content
`index`           the prefix index: find, enter, drop (eviction drops a page's entry in `pages.claim`)
`changes`         journal and index copied for events
`residency`       how long sampled pages stay
`pages`           pages in lists: touch, give back
`hits`            how many pages of a prefix hit
`refusals`        whether a refused request is refused again
`rows`            rows of page tables
`rules`           which pages tokens need, by kind of attention
`batch`           records of running rows
`entering`        pages of rows that got full
`growth`          rows grow
`trimming`        rows are cut
`undoing`         growth is taken back
`admission`       rows are admitted (`count_free_hits` checks hits), freed and exchanged
================  ==============================================================================================
"""

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_RawCalloc as calloc
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from cpython.mem cimport PyMem_RawRealloc as realloc
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcmp, memcpy, memset

from pagepool.core.admission cimport (
    attach_hits, begin_admission, count_free_hits, empty_row, exchange_rows, ids_in_shard, set_context,
)
from pagepool.core.batch cimport (
    Amounts, Batch, ExtraKey, Group, Grown, Growth, Held, RowState, amount, claim_row, count_new_pages, digests_of,
    hits_leading_pages, ids_of, plan_next_event, show_row, start_call, tokens_of,
)
from pagepool.core.changes cimport Copies, Run, copy_all, copy_keys, copy_new
from pagepool.core.entering cimport count_hashed_before, enter_full_pages, enter_waiting, hash_page_of, hash_row
from pagepool.core.growth cimport append_tokens, check_growth, copy_ascending, grow_rows, has_lost_page, take_pages, uncount
from pagepool.core.hits cimport find_last_run, find_leading_hits
from pagepool.core.index cimport (
    count_cached, drop, enter, enter_all, enter_missing, find, find_within, forget_pages, has_key, is_entered_otherwise,
    is_first, keep_tokens, list_cached, slot_holding, tag_of,
)
from pagepool.core.notes cimport add_context, end_journal, is_journaled, note_clear, note_entry
from pagepool.core.pages cimport (
    find_negative, find_outside, find_untouchable, give_back, put_back, take_from, touch_all,
)
from pagepool.core.platform cimport keep_sparse, monotonic_ns
from pagepool.core.queue cimport count_free, count_free_in, find_held_free, has_free_pages, link_shards, pull, push, push_all
from pagepool.core.records cimport (
    FLAGS, MAX_GROUP, MAX_PAGES, NOT_FIRST, NOT_FREE, NOT_NEW, NO_GROUP, NULL_PAGE, NUM_BUCKETS, TWIN, Context, Histogram,
    Journal, Links, Note, Origin, Page, Pool, Range, Removal, Residency, Slot, Stay, digest_of, is_free, shard_of,
)
from pagepool.core.refusals cimport Prefix, Watch, count_changes, has_same_hits, is_hit, watch_leading
from pagepool.core.rows cimport (
    WINDOW, Append, Rows, append_all, clean, clear_one, copy_row, count_dirty, fits, is_unsent, map_slots, mark_rows,
    pack_windows, replace_row, swap_rows,
)
from pagepool.core.rules cimport MAX_TOKENS, Rules, first_useful_page, full_pages, is_state, next_skip, pages_for
from pagepool.core.siphash cimport Digest, SipState, hash_after, hash_pages, sip_bytes, sip_finish, sip_start
from pagepool.core.trimming cimport check_trim, find_restart, has_state_behind, trim_row
from pagepool.core.twins cimport link_shard_twins
from pagepool.core.undoing cimport can_undo, forget_uncomputed, is_as_grown, undo_row

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

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    unsigned long long PyLong_AsUnsignedLongLongMask(object value) except? -1

cdef enum:
    RELEASE_GIL_AT = 1024     # pages of work from which other Python threads are let run meanwhile
    CACHE_LINE = 64           # bytes
    SAMPLE_SHIFT = 7          # in large pools every 128th page is sampled
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
    """Remove the lock of an object that is deallocated."""
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
    """`as_page_ids`, always copied, so that the caller cannot change them during the call."""
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
    """`settled`; empty for None."""
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
        """Tokens that have a slot in `num_pages` places."""
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
        """Allocate room for these numbers of pages and keys; False if memory is short."""
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

    cdef int64_t count_index_changes(self) noexcept:
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
        """Take `n` pages from the front of the queue, or of a shard: ref count 1, prefix entries dropped. O(n)."""
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
        """Take the lock, with the pool divided into `num_shards` (0: as it is), whatever other callers divide it into."""
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
        """IntegrityError unless `bad` is the null page: a page in the free queue that was given a reference."""
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
        """`pull`, also for a free page that was given a reference."""
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

    # The journal: what entered and left the prefix index, for events.

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
        pages or rows have it, or a caller holds it, as this one does.
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
        """Release a context once. ArgumentError if it is not held."""
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
        """The contexts to keep, as a set; None while taken changes are being made into events. O(contexts)."""
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
        too, and those removed since the changes were taken. None while taken changes are being made into events. O(num_pages).
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
        """The events have been built: names and contexts of the taken changes may be forgotten."""
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
                if not 0 <= page_id < self.pool.num_pages or is_entered_otherwise(
                    &self.pool, page_id, chain.digests[(i + 1) * num_hashes - 1], checked_group
                ):
                    bad = i
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
        check_distinct(groups)
        if chain is None:
            self.give_back_all(groups, ids, None, None, None, None)
            return
        num_computed, strides, group_ids = as_settled(num_computed), as_settled(strides), as_settled(group_ids)
        require_as_many({len(groups), num_computed.num, strides.num, group_ids.num}, strides)
        with chain.lock:
            self.give_back_all(groups, ids, chain, num_computed, strides, group_ids)

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

    def skip(self, HeldPages held not None, num_pages) -> None:
        """Free the first `num_pages` pages, the last first, and put the null page in their places."""
        cdef Py_ssize_t stop = size_of(num_pages, "num_pages")
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
        """Each page by itself: links within the pool, in the free queue exactly when its ref count is 0."""
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
    HELD_FREE                 # a page in the free queue was given a reference
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
    """The order in which the locks of several tables are taken, the same in every call, so that calls cannot deadlock."""
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
    """`values` as a number for each row, or one for all, copied, so that they cannot change during the call."""
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
        """Zeros, aligned to a cache line, that live as long as the batch. Untouched pages of it take no memory."""
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

        Pages wholly behind go back, the last first, and lose their prefix entry unless they have other holders. Where the cut
        goes through a page that has other holders, that page goes back as well, and its first tokens are to be
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
        cdef PageIds counts
        cdef Amounts computed = Amounts(NULL, 0)
        cdef PageIds ids = PageIds.__new__(PageIds)
        cdef Py_ssize_t num_right, bad = -1
        cdef bint has_room = True
        if num_computed_tokens is not None:
            counts = as_amounts(num_computed_tokens, "num_computed_tokens", row_ids.num)
            computed = amounts_in(counts)
        self.enter_call()
        num_right = self.check_release(row_ids, &computed, ids, &has_room)
        if num_right == row_ids.num and has_room:
            bad = self.release_checked(ids, num_right, &computed)
        self.let_go()
        if num_right < row_ids.num:
            self.refuse_release(row_ids, &computed, num_right)
        if not has_room:
            raise MemoryError("the pages of the rows")
        if bad >= 0:
            raise DoubleFreeError(f"page {ids.ids[bad]} is given back by a row more often than it is held")

    cdef int refuse_release(self, PageIds rows, const Amounts *computed, Py_ssize_t at) except -1:
        cdef int32_t row = self.refuse_row(rows.ids, at)
        if computed.values == NULL:
            raise ArgumentError("rows: changed during the call")
        raise ArgumentError(
            f"num_computed_tokens: got {amount(computed, at)} (at {at}), "
            f"allowed: 0 to {self.batch.states[row].num_computed}, for which row {row} has slots"
        )

    cdef Py_ssize_t check_release(self, PageIds rows, const Amounts *computed, PageIds ids, bint *has_room) noexcept:
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
            if computed.values != NULL and not 0 <= amount(computed, i) <= self.batch.states[row].num_computed:
                return i
            for g in range(self.batch.num_groups):
                group = &self.batch.groups[g]
                has_room[0] = has_room[0] and ids.has_room_for(group.held[row].num_pages)
                if has_room[0]:
                    for j in range(group.held[row].num_pages - 1, -1, -1):
                        ids.ids[ids.num] = ids_of(group, row)[j]
                        ids.num += 1
        return rows.num

    cdef Py_ssize_t release_checked(self, PageIds ids, Py_ssize_t num_rows, const Amounts *computed) noexcept:
        """Give back the pages and empty the rows; or the index of a page without references, and nothing changed."""
        cdef Py_ssize_t i, row, bad
        if ids.num < RELEASE_GIL_AT:
            bad = give_back(&self.store.pool, ids.ids, ids.num, False)
        else:
            with nogil:
                bad = give_back(&self.store.pool, ids.ids, ids.num, False)
        for i in range(num_rows if bad < 0 else 0):
            row = self.batch.checked_rows[i]
            if computed.values != NULL:
                forget_uncomputed(&self.batch, row, amount(computed, i))
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
        """Reserve the row: no other call admits it or moves another row there."""
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
        cdef int64_t num_changes = self.store.count_index_changes()
        if find_hits is not None and self.batch.hash_page_size:
            chain = HashChain.__new__(HashChain, self.batch.hash_page_size, self.key)
            hits, num_hit_tokens = self.look_up(row, num_known, find_hits, chain)
            num_hits = <int32_t>size_of(num_hit_tokens, "num_hit_tokens", 0, num_known - 1)
            self.check_hits(hits, num_hits)
        refusal = _RowRefusal(hits, num_known, num_hit_tokens)
        self.enter_call()
        self.batch.states[row].shard = checked_shard
        num_free_hits = self.count_all_free_hits(row, hits, chain)
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

    cdef Py_ssize_t count_all_free_hits(self, Py_ssize_t row, tuple hits, HashChain chain) noexcept:
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
