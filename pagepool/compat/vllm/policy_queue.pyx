"""A stand-in for vLLM's free queue, where one of pagepool's eviction policies chooses the blocks that are taken.

The queue keeps a store with one page for each block: free while the block is queued, held once otherwise, and cached under the
block's hash. So the policy sees hits, misses and evictions as in a `PagePool`. This module does not need vLLM.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree as free
from cpython.mem cimport PyMem_RawMalloc as malloc
from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t
from libc.string cimport memcpy

from pagepool.compat.vllm.blocks cimport as_block, check_unheld
from pagepool.core.base cimport MAX_GROUP, Digest
from pagepool.core.pool cimport (
    FLAGS, NO_GROUP, NO_SESSION, NOBODY, NULL_PAGE, Entry, Pool, bare_entry, cache, count_demand, count_release, count_request,
    digest_of, find, has_key, hit, is_free, now_of, page_behind, push, push_at, push_first, record_hit, take, uncache,
    use_in_session, use_term,
)

from pagepool.compat.patching import Unpatched
from pagepool.compat.vllm.blocks import Queue
from pagepool.errors import ArgumentError, DoubleFreeError, IntegrityError
from pagepool.page_pool.integrity import check_store

cdef enum:
    UNKNOWN = -1              # no ranking is known
    GROUP_BYTES = 4           # size of the group's id behind a block's hash
    OWN_GROUP = MAX_GROUP - 1  # group of the entries that queued blocks without a hash get


cdef Digest digest_of_key(bytes key) noexcept:
    """Return the first 128 bits of a block's hash. The policy treats blocks with equal digests as the same content."""
    cdef Digest digest = Digest(lo=0, hi=0)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(key) - GROUP_BYTES
    memcpy(&digest, PyBytes_AS_STRING(key), max(<Py_ssize_t>0, min(size, <Py_ssize_t>sizeof(Digest))))
    return digest


cdef int32_t group_of_key(bytes key) noexcept:
    """Return the group's id that vLLM appends to a hash."""
    cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(key)
    cdef Py_ssize_t i, size = PyBytes_GET_SIZE(key)
    cdef uint32_t group = 0
    for i in range(max(<Py_ssize_t>0, size - GROUP_BYTES), size):
        group = group << 8 | data[i]
    return <int32_t>(group % <uint32_t>OWN_GROUP)


cdef inline void report_use(Pool *pool, int32_t page_id) noexcept:
    """Count a use of the queued page with the same content, if any: the content was computed again for want of a window."""
    cdef int32_t first
    if pool.policy == NULL:
        return
    first = find(pool, digest_of(&pool.pages[page_id]), pool.pages[page_id].group & ~FLAGS)
    if is_free(pool, first):
        count_demand(pool.policy, pool.policy.marks[first])


cdef class PolicyQueue(FreeQueue):
    """Free blocks in the policy's order. Uncached blocks come first, the last one queued before the others. With "lru" the
    order is that of vLLM's own queue, until a block is expected back.

    It has the methods of vLLM's queue, but no links: its blocks have no neighbors. A list of its blocks has uncached ones
    first, then the policy's parts, each in the order of queueing. O(1) a block. Errors name the block and change nothing:
    `DoubleFreeError` for a block queued already, `IntegrityError` for one that is not queued, `OutOfPagesError` if the queue is
    empty. A block takes the memory of a page in a pool with the policy, plus 16 bytes.
    """

    def __cinit__(self, blocks, eviction="adaptive", listener=None):
        cdef Py_ssize_t i
        self.blocks = list(blocks)
        for i, value in enumerate(self.blocks):
            if as_block(value).block_id != i:
                raise ArgumentError(f"blocks: got block {value.block_id} at position {i}, allowed: ids from 0 on")
        self.store = PageStore(len(self.blocks), True, eviction=eviction)
        self.session = NOBODY
        self.ids = PageIds()
        self.rankings = <Ranking *>malloc(len(self.blocks) * sizeof(Ranking))
        if self.rankings == NULL:
            raise MemoryError(f"the free queue of {len(self.blocks)} blocks")
        for i in range(len(self.blocks)):
            self.forget_ranking(<int32_t>i)
        self.null_block = self.blocks[NULL_PAGE]
        self.num_free_blocks = len(self.blocks)

    def __dealloc__(self):
        free(self.rankings)

    @property
    def num_requests(self) -> int:
        """Number of requests that began to take blocks, as reported to the policy."""
        return 0 if self.store.pool.policy == NULL else self.store.pool.policy.num_requests

    cdef int32_t id_of(self, Block block) noexcept:
        """Return the page of a block; the null page for the null block and for blocks of other pools."""
        if 0 <= block.block_id < len(self.blocks) and self.blocks[block.block_id] is block:
            return block.block_id
        return NULL_PAGE

    cdef bint has(self, Block block) noexcept:
        """Whether a block is queued and is not the null block."""
        return self.id_of(block) != NULL_PAGE and is_free(&self.store.pool, block.block_id)

    cdef int require_in(self, Block block) except -1:
        if not self.has(block):
            raise IntegrityError(f"block {block.block_id} is not in the free queue: {block!r}")
        return 0

    cdef int require_out(self, Block block) except -1:
        if self.has(block):
            raise DoubleFreeError(f"block {block.block_id} is in the free queue already: {block!r}")
        return 0

    cdef void forget_ranking(self, int32_t page_id) noexcept:
        self.rankings[page_id] = Ranking(num_ranked=UNKNOWN, num_unseen=0)

    cdef int32_t number_of_taker(self) noexcept:
        """Return the number of the session that takes or caches blocks, NO_SESSION outside of requests."""
        return max(self.session, <int32_t>NO_SESSION)

    # Taking.

    cpdef int note_request(self) except -1:
        """Tell the policy that a request begins to take blocks."""
        count_request(&self.store.pool)
        return 0

    def popleft_n(self, Py_ssize_t n) -> list[Block]:
        """Take `n` blocks chosen by the policy, one after another."""
        self.check_number(n, "n")
        return self.take_blocks(n)

    cdef list take_blocks(self, Py_ssize_t n):
        cdef list taken = []
        cdef Py_ssize_t i, num = n
        self.ids.reserve(n)
        if n and self.null_block is not None:
            taken.append(self.null_block)
            self.null_block = None
            num -= 1
        with self.store.lock:
            take(&self.store.pool, self.ids.ids, num, -1, self.number_of_taker())
        for i in range(num):
            self.forget_ranking(self.ids.ids[i])
            taken.append(self.blocks[self.ids.ids[i]])
        self.num_free_blocks -= n
        try:
            check_unheld(taken)
        except IntegrityError:
            self.requeue(taken, [])
            for value in taken:
                self.note_hash(<Block>value)
            raise
        return taken

    def remove(self, Block block not None) -> None:
        """Take a hit block out of the queue."""
        if block is self.null_block:
            self.null_block = None
            self.num_free_blocks -= 1
            return
        self.require_in(block)
        with self.store.lock:
            self.report_hit(block.block_id)

    cdef int touch(self, list blocks) except -1:
        cdef Block block
        cdef int32_t page_id
        with self.store.lock:
            for value in blocks:
                block = <Block>value
                page_id = self.id_of(block)
                if page_id != NULL_PAGE:
                    self.report_hit(page_id)
                block.ref_cnt += 1
        return 0

    cdef void report_hit(self, int32_t page_id) noexcept:
        """Report a hit to the policy, and to the sessions. A queued page leaves the queue."""
        cdef Pool *pool = &self.store.pool
        if is_free(pool, page_id):
            hit(pool, &page_id, 1, self.session)
            self.num_free_blocks -= 1
        elif pool.pages[page_id].group != NO_GROUP:
            if pool.policy != NULL:
                pool.policy.num_shared_hits += 1
                record_hit(pool.policy, page_id, False)
            use_term(&pool.expected, page_id)
            if self.session != NOBODY:
                use_in_session(pool, &page_id, 1, self.session)
        self.forget_ranking(page_id)

    # Putting back.

    def append_n(self, blocks) -> None:
        """Put blocks back, in order. Blocks without a hash are queued like cached ones."""
        self.requeue([], list(blocks))

    def prepend_n(self, blocks) -> None:
        """Put blocks before all others, in order."""
        self.requeue(list(blocks), [])

    cdef int requeue(self, list first, list last) except -1:
        cdef list blocks = first + last
        cdef Py_ssize_t num = 0
        cdef int32_t page_id
        cdef Pool *pool = &self.store.pool
        self.ids.reserve(len(blocks))
        for value in blocks:
            page_id = self.id_of(as_block(value))
            if page_id == NULL_PAGE or pool.pages[page_id].ref_cnt == 0:
                break
            pool.pages[page_id].ref_cnt = 0
            self.ids.ids[num] = page_id
            num += 1
        if num < len(blocks):
            self.refuse_block(blocks, num)
        with self.store.lock:
            self.put_ids(len(first), num)
        self.num_free_blocks += num
        assert self.num_free_blocks == pool.num_free + (self.null_block is not None)
        return 0

    cdef int refuse_block(self, list blocks, Py_ssize_t bad) except -1:
        """Undo the changes to the blocks before index `bad`, and raise the error for that block, which cannot be put back."""
        cdef Py_ssize_t i
        cdef Block block = blocks[bad]
        for i in range(bad):
            self.store.pool.pages[self.ids.ids[i]].ref_cnt = 1
        if self.id_of(block) == NULL_PAGE:
            raise IntegrityError(f"block {block.block_id} is the null block or another pool's: {block!r}")
        raise DoubleFreeError(f"block {block.block_id} is in the free queue already, or is put there twice: {block!r}")

    cdef void put_ids(self, Py_ssize_t num_first, Py_ssize_t num) noexcept:
        """Put the pages in `ids` into the queue, the first `num_first` before all others. Each later page without a hash gets
        an entry under a key that no lookup has.
        """
        cdef Pool *pool = &self.store.pool
        cdef Entry entry
        cdef Digest key
        cdef Py_ssize_t i
        cdef int32_t page_id
        cdef int64_t now = now_of(&pool.expected) if pool.expected.terms != NULL else 0
        assert 0 <= num_first <= num <= self.ids.capacity
        if num > num_first and pool.policy != NULL:
            count_release(pool.policy, num - num_first, pool.num_free)
        for i in range(num_first - 1, -1, -1):
            page_id = self.ids.ids[i]
            if pool.pages[page_id].group != NO_GROUP:
                uncache(pool, page_id)
            push_first(pool, page_id)
        for i in range(num_first, num):
            page_id = self.ids.ids[i]
            if pool.pages[page_id].group == NO_GROUP:
                key = Digest(lo=page_id, hi=0)
                entry = bare_entry(&key, OWN_GROUP)
                cache(pool, page_id, &entry, NULL, NULL, 0)
            if pool.expected.terms != NULL:
                push_at(pool, page_id, now)
            else:
                push(pool, page_id)

    # Caching.

    cdef int note_hash(self, Block block) except -1:
        cdef Ranking ranking = Ranking(num_ranked=0, num_unseen=0)
        cdef int32_t page_id = self.id_of(block)
        if page_id != NULL_PAGE and not (self.caches_late and block._block_hash is not None):
            with self.store.lock:
                self.set_entry(page_id, block._block_hash, &ranking, &page_id, 0)
        return 0

    cdef bint set_entry(self, int32_t page_id, bytes key, Ranking *ranking, const int32_t *ids, int32_t place) except -1:
        """Give a page the entry of its block's `key`; for None, remove its entry. A new key counts as a miss. Return whether
        another page has the key.
        """
        cdef Pool *pool = &self.store.pool
        cdef Entry entry
        cdef Digest digest
        cdef int32_t group
        if key is not None:
            digest, group = digest_of_key(key), group_of_key(key)
            if has_key(&pool.pages[page_id], digest, group):
                return False
        if pool.pages[page_id].group != NO_GROUP:
            uncache(pool, page_id)
        if key is None:
            return False
        entry = bare_entry(&digest, group)
        entry.session = self.number_of_taker()
        return not cache(pool, page_id, &entry, ranking, ids, place)

    cdef int begin_span(self) except -1:
        self.caches_late = True
        return 0

    cdef int end_span(self, list blocks, Py_ssize_t start, Py_ssize_t stop) except -1:
        """Cache the blocks in order. The policy's ranking of the request is kept with the last block."""
        cdef Ranking ranking = Ranking(num_ranked=<int32_t>start, num_unseen=0)
        cdef Py_ssize_t i
        cdef int32_t before = NULL_PAGE
        self.caches_late = False
        if not 0 <= start < stop:
            return 0
        if start:
            before = self.id_of(as_block(blocks[start - 1]))
        if before != NULL_PAGE and self.rankings[before].num_ranked != UNKNOWN:
            ranking = self.rankings[before]
        self.ids.reserve(stop)
        for i in range(min(start, <Py_ssize_t>ranking.num_ranked), stop):
            self.ids.ids[i] = self.id_of(as_block(blocks[i]))
        with self.store.lock:
            for i in range(start, stop):
                if self.ids.ids[i] != NULL_PAGE:
                    key = (<Block>blocks[i])._block_hash
                    if self.set_entry(self.ids.ids[i], key, &ranking, self.ids.ids, <int32_t>i):
                        report_use(&self.store.pool, self.ids.ids[i])
        self.rankings[self.ids.ids[stop - 1]] = ranking
        return 0

    # Inspection.

    cdef int32_t id_behind(self, int32_t page_id) noexcept:
        """Return the page behind another in the queue; the first page for the null page. Return the null page at the end."""
        cdef int32_t behind = NULL_PAGE
        with self.store.lock:
            if page_id == NULL_PAGE or is_free(&self.store.pool, page_id):
                behind = page_behind(&self.store.pool, page_id, -1)
        return behind

    def iter_blocks_after(self, Block cursor):
        """Yield the blocks behind `cursor`; all blocks for None. End early if the block just yielded has left the queue."""
        cdef int32_t page_id = NULL_PAGE
        if cursor is not None:
            page_id = self.id_of(cursor)
            if page_id == NULL_PAGE:
                return
        elif self.null_block is not None:
            yield self.null_block
        page_id = self.id_behind(page_id)
        while page_id != NULL_PAGE:
            yield self.blocks[page_id]
            page_id = self.id_behind(page_id)

    def check(self) -> None:
        """Check that the pages agree with their blocks, and with each other. Raise IntegrityError naming the first block that
        does not. O(blocks).
        """
        cdef Pool *pool = &self.store.pool
        cdef Block block
        check_store(self.store)
        if self.num_free_blocks != pool.num_free + (self.null_block is not None):
            raise IntegrityError(f"the free queue has {pool.num_free} blocks and counts {self.num_free_blocks}")
        for block in self.blocks[1:]:
            is_queued = is_free(pool, block.block_id)
            if is_queued != (block.ref_cnt == 0) or is_queued == (pool.pages[block.block_id].ref_cnt == 1):
                raise IntegrityError(f"block {block.block_id}: is {'' if is_queued else 'not '}in the free queue: {block!r}")
            group = pool.pages[block.block_id].group
            is_cached = group != NO_GROUP and group & ~FLAGS != OWN_GROUP
            is_same = block._block_hash is not None and has_key(
                &pool.pages[block.block_id], digest_of_key(block._block_hash), group_of_key(block._block_hash)
            )
            if is_cached != (block._block_hash is not None) or is_cached != is_same:
                raise IntegrityError(f"block {block.block_id}: its page has another entry: {block!r}")


class AdaptiveQueue(PolicyQueue, metaclass=Unpatched):
    """The stand-in for vLLM's class, with adaptive eviction if the pool caches."""
    __slots__ = ()

    def __new__(cls, blocks):
        listed = list(blocks)
        pool = as_block(listed[0]).pool if listed else None
        return super().__new__(cls, listed) if pool is not None and pool.enable_caching else Queue(listed)
