"""The index of a router: the prefixes cached by each worker."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pagepool.core.base cimport MAX_TOKENS, go_on, let_others_run, process_number, require_allocated, require_process
from pagepool.core.router.changes cimport *
from pagepool.core.router.search cimport *
from pagepool.core.values cimport HashChain, array_of, as_list, index_of, size_of

import os

import numpy as np

from pagepool.errors import ArgumentError, ArgumentTypeError, EventBatchError, IntegrityError, shown

cdef enum:
    NUM_LOCKS = 8             # concurrent readers
    MAX_WORKERS = 1 << 16
    BYTES_OF_A_PAGE = 64      # bytes of a payload that take as long as work on a page
    HASHES_OF_A_PAGE = 2      # hashes for 64 workers that take as long as work on a page: two threads gain from 2,048 hashes on

cdef extern from *:
    """
    static int pagepool_num_readers;
    /* Returns the number of a thread's lock, the same at each call. */
    static inline int pagepool_lock_of_thread(int num_locks) {
        static __thread int number;
        if (!number) number = __atomic_add_fetch(&pagepool_num_readers, 1, __ATOMIC_RELAXED);
        return (unsigned)number % (unsigned)num_locks;
    }
    """
    int lock_of_thread "pagepool_lock_of_thread" (int num_locks) noexcept


@cython.final
cdef class ReaderLock:
    """One of the locks of an index. A reader takes one lock; a writer takes all of them in order."""

    cdef cython.pymutex lock

    def __cinit__(self):
        require_allocated(&self.lock)


cdef int view_payload(object payload, Py_buffer *view) except -1:
    try:
        PyObject_GetBuffer(payload, view, PyBUF_SIMPLE)
    except (TypeError, ValueError, BufferError):
        raise ArgumentTypeError(f"payload: got {type(payload).__name__}, allowed: bytes") from None
    return 0


cdef inline void start_reading(Reader *reader, const Py_buffer *view) noexcept:
    """Set a reader to the start of a payload. It is filled, not returned: a build that traces lines converts results to Python,
    and the NULL `error` would crash it.
    """
    reader[0] = Reader(at=<const uint8_t *>view.buf, end=<const uint8_t *>view.buf + view.len, error=NULL)


def time_of_batch(payload) -> float:
    """Return the time of an encoded batch in seconds since 1970; 0 if it has none. O(1)."""
    cdef Py_buffer view
    cdef Reader reader
    view_payload(payload, &view)
    start_reading(&reader, &view)
    seconds = read_seconds(&reader)
    PyBuffer_Release(&view)
    return seconds


cdef class PrefixTable:
    """The compiled part of `pagepool.router.PrefixIndex`, which describes it."""

    cdef BlockTable table
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t max_worker_blocks
    cdef int32_t max_groups   # argument `num_groups`, or the limit
    cdef bint use_eagle
    cdef tuple locks
    cdef int process          # number of the process that made it

    def __cinit__(self, page_size, *, max_worker_blocks=1 << 24, num_groups=None, use_eagle=False, hash_lookahead=0, **_):
        self.process = process_number
        self.page_size = size_of(page_size, "page_size", 1, MAX_TOKENS)
        self.max_worker_blocks = size_of(max_worker_blocks, "max_worker_blocks", 1, MAX_BLOCKS)
        num_groups = MAX_EVENT_GROUPS if num_groups is None else num_groups
        self.max_groups = <int32_t>size_of(num_groups, "num_groups", 1, MAX_EVENT_GROUPS)
        if not isinstance(use_eagle, (bool, np.bool_)):
            raise ArgumentTypeError(f"use_eagle: got {type(use_eagle).__name__}, allowed: True or False")
        self.use_eagle = use_eagle and not hash_lookahead
        self.locks = tuple([ReaderLock() for _ in range(NUM_LOCKS)])
        if not start_table(&self.table, <int32_t>self.page_size, <uint64_t>int.from_bytes(os.urandom(8), "little") | 1):
            raise MemoryError("a prefix index")

    def __dealloc__(self):
        if self.process == process_number:  # else another thread may have been changing it
            free_table(&self.table)

    def __reduce__(self):
        raise ArgumentTypeError("a prefix index cannot be pickled")

    cdef int require_own(self) except -1:
        """Raise IntegrityError in any process but the one that made the index."""
        return require_process(self.process, "PrefixIndex")

    cdef int begin_write(self) except -1:
        self.require_own()
        self.lock_all()
        return 0

    cdef void lock_all(self) noexcept:
        cdef Py_ssize_t i
        for i in range(NUM_LOCKS):
            (<ReaderLock>self.locks[i]).lock.acquire()

    cdef void end_write(self) noexcept:
        cdef Py_ssize_t i
        for i in range(NUM_LOCKS - 1, -1, -1):
            (<ReaderLock>self.locks[i]).lock.release()

    def apply(self, worker, payload) -> bool:
        """Apply an encoded batch of events of a worker. Return whether it has `AllBlocksCleared`, and so is complete in itself.

        `worker` is an int from 0 on, `payload` is bytes or another buffer. Events that the index cannot place are left out and
        counted. Raise EventBatchError, with nothing changed, if the bytes are not msgpack or not a batch, or if the worker
        would have more than `max_worker_blocks`. O(bytes); `AllBlocksCleared` costs at most a constant for each block stored
        before it.
        """
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        cdef Py_buffer view
        cdef EventBatch batch
        cdef Reader reader
        cdef const char *error
        cdef void *thread
        self.require_own()
        view_payload(payload, &view)
        start_reading(&reader, &view)
        thread = let_others_run(view.len // BYTES_OF_A_PAGE)
        read_batch(&reader, &batch)
        go_on(thread)
        error = reader.error if reader.error != NULL else self.apply_batch(number, &batch)
        position = reader.at - <const uint8_t *>view.buf
        is_cleared = batch.is_cleared
        free_batch(&batch)
        PyBuffer_Release(&view)
        if error == NO_MEMORY:
            raise MemoryError("a batch of events")
        if error != NULL:
            raise EventBatchError(f"payload: byte {position}: {error.decode()}")
        return is_cleared

    cdef const char *apply_batch(self, int32_t worker, EventBatch *batch) noexcept:
        """Check a batch against the index and apply it; return the reason for refusing it, or NULL."""
        cdef const char *error
        cdef void *thread
        self.lock_all()
        settle_groups(&self.table, batch, self.max_groups)
        thread = let_others_run(batch.num_hashes)
        error = apply_events(&self.table, batch, worker, self.max_worker_blocks)
        go_on(thread)
        assert error != NULL or self.table.workers[worker].num_bits <= self.max_worker_blocks
        self.end_write()
        return error

    def find(self, hashes, medium=None):
        """Return how many tokens of a prompt each worker has, int32 ``[workers]``.

        `hashes` are the hashes of the prompt's pages: a uint64 or int64 array ``[pages]``, a list of ints or bytes, which count
        by their last 64 bits, or a `HashChain`. A page counts if the worker has it in any medium, or in `medium` if given.
        O(pages x groups); with windows or states O(pages x groups x workers).
        """
        cdef Py_buffer view
        cdef Search search
        cdef int32_t worker, num_workers
        cdef bint has_room
        cdef void *thread
        cdef cython.pymutex *lock = &(<ReaderLock>self.locks[lock_of_thread(NUM_LOCKS)]).lock
        text = None if medium is None else medium_of(medium)
        self.require_own()
        PyObject_GetBuffer(as_hashes(hashes), &view, PyBUF_SIMPLE)
        search.hashes = <const uint64_t *>view.buf
        search.use_eagle = self.use_eagle
        search.num_hashes = min(view.len // <Py_ssize_t>sizeof(uint64_t), MAX_TOKENS // self.page_size)
        lock[0].acquire()
        search.planes = <uint32_t>-1 if text is None else self.plane_of(text)
        num_workers = self.table.num_workers
        thread = let_others_run(search.num_hashes * self.table.num_words // HASHES_OF_A_PAGE)
        has_room = search_prefix(&self.table, &search)
        go_on(thread)
        lock[0].release()
        PyBuffer_Release(&view)
        for worker in range(num_workers if has_room else 0):
            search.counts[worker] *= <int32_t>self.page_size
        try:
            if not has_room:
                raise MemoryError("a look-up of prefixes")
            return array_of(search.counts, num_workers)
        finally:
            raw_free(search.words)

    cdef uint32_t plane_of(self, bytes name) noexcept:
        """Return the bit of a medium; an unused bit for an unknown medium."""
        return <uint32_t>1 << find_medium(&self.table.media, text_of(name))

    def note_loss(self, worker) -> None:
        """Note that batches of a worker were lost. From now on the first removal of a block removes all its copies, since other
        removals may be lost; this ends when the worker clears everything or is removed. O(1).
        """
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        self.begin_write()
        if number < self.table.num_workers:
            self.table.workers[number].is_lossy = True
            forget_left_out(&self.table.workers[number])
        self.end_write()

    def remove_worker(self, worker) -> None:
        """Forget all blocks of a worker. O(blocks that the worker gained since it last had none)."""
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        self.begin_write()
        if number < self.table.num_workers:
            remove_worker_blocks(&self.table, number)
        self.end_write()

    def clear(self) -> None:
        """Forget all blocks and groups, and free their memory. Workers keep their numbers."""
        cdef BlockTable forgotten
        self.begin_write()
        take_blocks_out(&self.table, &forgotten)
        self.table.told = Told(num_groups=0, hit_tokens=0)
        self.end_write()
        free_table(&forgotten)

    def list_blocks(self, worker, medium="GPU", group=0):
        """Return the hashes of a worker's blocks in a medium and a cache group: uint64, in any order. O(all blocks)."""
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        cdef Py_ssize_t checked_group = size_of(group, "group", 0, MAX_EVENT_GROUPS - 1)
        cdef bytes name = medium_of(medium)
        cdef uint64_t[::1] found
        cdef int32_t plane
        cdef Py_ssize_t num = 0, num_held = -1
        cdef bint is_there
        while num_held != num:  # the array is allocated without the locks
            num = num_held
            hashes = np.empty(max(num, <Py_ssize_t>0), np.uint64)
            found = hashes
            self.begin_write()
            num_held = self.table.workers[number].num_bits if number < self.table.num_workers else 0
            plane = find_medium(&self.table.media, text_of(name))
            if num_held == num:
                is_there = num_held and plane < self.table.media.num
                num = num_held = copy_hashes(&self.table, checked_group, plane, number, &found[0]) if is_there else 0
            self.end_write()
        return hashes[:num]

    @property
    def num_workers(self) -> int:
        """Highest number of a worker with a batch, plus 1."""
        return self.table.num_workers

    @property
    def num_skipped(self) -> int:
        """Events that were left out, wholly or in part, since the index was made."""
        cdef int32_t i
        return sum([self.count_skipped(i) for i in range(self.table.num_workers)])

    def count_skipped(self, worker) -> int:
        """Return how many events of a worker were left out, wholly or in part, since the index was made. O(1)."""
        cdef int32_t number = <int32_t>size_of(worker, "worker", 0, MAX_WORKERS - 1)
        cdef int64_t num
        self.begin_write()
        num = self.table.workers[number].num_skipped if number < self.table.num_workers else 0
        self.end_write()
        return num

    @property
    def media(self) -> tuple:
        """Names of the media in events, ``"GPU"`` first."""
        cdef Media media
        cdef int32_t i
        self.begin_write()
        media = self.table.media
        self.end_write()
        return tuple([media.items[i].name[:media.items[i].size].decode(errors="surrogateescape") for i in range(media.num)])

    def stats(self) -> dict:
        """Return ``blocks`` (entries of all groups), ``held`` (a list of the blocks of each worker), ``bytes`` of memory, and
        ``num_skipped``.
        """
        cdef Py_ssize_t i, num_bytes, num_blocks = 0
        self.begin_write()
        num_bytes = table_bytes(&self.table)
        for i in range(self.table.num_spaces):
            num_blocks += self.table.spaces[i].num_blocks
        self.end_write()
        held = [self.num_held(i) for i in range(self.table.num_workers)]
        return {"blocks": num_blocks, "held": held, "bytes": num_bytes, "num_skipped": self.num_skipped}

    cdef int64_t num_held(self, int32_t worker) except -1:
        """Return the number of blocks of a worker, whose index is below `num_workers`."""
        cdef int64_t num
        self.begin_write()
        num = self.table.workers[worker].num_bits
        self.end_write()
        return num

    def check(self) -> None:
        """Check that the records agree; raise IntegrityError if they do not. O(blocks x workers)."""
        cdef const char *fault
        self.begin_write()
        fault = find_fault(&self.table)
        self.end_write()
        if fault != NULL:
            raise IntegrityError(f"prefix index: {fault.decode()}")


cdef bytes medium_of(object medium):
    if not isinstance(medium, str):
        raise ArgumentTypeError(f"medium: got {type(medium).__name__}, allowed: a string or None")
    try:
        return str.encode(medium, errors="surrogateescape")
    except UnicodeEncodeError:
        raise ArgumentError(f"medium: got {shown(medium)}, allowed: text that UTF-8 can encode") from None


cdef Text text_of(bytes name) noexcept:
    return Text(at=<const uint8_t *><const char *>name, size=len(name))


cdef object UINT64 = np.dtype(np.uint64)
cdef object ndarray = np.ndarray


cdef object as_hashes(object hashes):
    """Return hashes as a contiguous array of uint64."""
    if type(hashes) is ndarray and hashes.dtype is UINT64 and hashes.ndim == 1 and hashes.flags.c_contiguous:
        return hashes
    if isinstance(hashes, HashChain):
        return hashes_of_chain(hashes)
    if isinstance(hashes, ndarray):
        hashes = np.asarray(hashes)  # a subclass may lie about itself
        if hashes.ndim != 1 or hashes.dtype.kind not in "iu":
            raise ArgumentTypeError(
                f"hashes: got an array of {hashes.dtype} with {hashes.ndim} dimensions, allowed: one of ints with 1 dimension"
            )
        wide = np.int64 if hashes.dtype.kind == "i" else np.uint64
        return np.ascontiguousarray(hashes, wide).view(np.uint64)
    if isinstance(hashes, (str, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"hashes: got {type(hashes).__name__}, allowed: an array, a list of ints or bytes, a HashChain")
    return np.array([as_hash(block_hash) for block_hash in as_list(hashes, "hashes")], np.uint64)


cdef object as_hash(object block_hash):
    """Return the last 64 bits of a hash."""
    if isinstance(block_hash, bytes):
        if len(block_hash) < 8:
            raise ArgumentError(f"hashes: got {shown(block_hash)}, allowed: bytes with at least 8")
        return int.from_bytes(block_hash[len(block_hash) - 8:], "big")
    return index_of(block_hash, "hashes") & 0xffffffffffffffff


cdef object hashes_of_chain(HashChain chain):
    """Return the lower half of each digest in a chain."""
    cdef Py_ssize_t i, num
    cdef uint64_t[::1] copied
    with chain.own_lock()[0]:
        num = chain.num
    hashes = np.empty(num, np.uint64)
    copied = hashes
    with chain.own_lock()[0]:
        num = min(num, chain.num)
        for i in range(num):
            copied[i] = chain.digests[i].lo
    return hashes[:num]
