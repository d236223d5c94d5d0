"""The per-block work of vLLM's block pool, compiled: take, touch, free, cache, look up.

The functions replace methods of vLLM's `BlockPool`, with the same results in the same order, and are all or nothing. They leave
other cases to vLLM's own methods: entries in pools with events, and pools with sampled residency or other queues. O(1) a block.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy

from pagepool.compat.vllm.blocks cimport (
    NO_TOKENS, Block, BlockMap, add_block, as_block, find_first_block, has_block, remove_block,
)

from vllm.v1.core.block_pool import BlockPool

from pagepool.errors import DoubleFreeError, PageIdError

cdef object vllm_get_cached_block = BlockPool.get_cached_block
cdef object vllm_get_new_blocks = BlockPool.get_new_blocks
cdef object vllm_touch = BlockPool.touch
cdef object vllm_free_blocks = BlockPool.free_blocks
cdef object vllm_cache_full_blocks = BlockPool.cache_full_blocks


cdef bytes suffix_of(object group_id):
    """Return the suffix that vLLM appends to a hash for a group."""
    return group_id.to_bytes(4, "big")


cdef bytes block_key_of(object block_hash, object suffix):
    """Make a block's key in the map: its hash, then its group."""
    cdef bytes digest = block_hash, group = suffix
    cdef Py_ssize_t size = PyBytes_GET_SIZE(digest)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, size + PyBytes_GET_SIZE(group))
    memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(digest), size)
    memcpy(PyBytes_AS_STRING(key) + size, PyBytes_AS_STRING(group), PyBytes_GET_SIZE(group))
    return key


cdef FreeQueue queue_of(object pool):
    """Return the queue of a pool, or None to leave the pool to vLLM's own methods."""
    queue = pool.free_block_queue
    return <FreeQueue>queue if isinstance(queue, FreeQueue) and pool.metrics_collector is None else None


def get_cached_block(self, block_hash, kv_cache_group_ids):
    """Return the block cached first for a hash in each group, or None if a group has none."""
    cdef list found = []
    cdef Block block
    cached = self.cached_block_hash_to_block
    if type(cached) is not BlockMap:
        return vllm_get_cached_block(self, block_hash, kv_cache_group_ids)
    for group_id in kv_cache_group_ids:
        block = find_first_block((<BlockMap>cached)._cache, block_key_of(block_hash, suffix_of(group_id)))
        if block is None:
            return None
        found.append(block)
    return found


def get_new_blocks(self, num_blocks):
    """Take free blocks from the front of the queue; cached ones lose their entries.

    Raise OutOfPagesError, a ValueError, with nothing taken, if fewer are free; IntegrityError if a queued block has references.
    """
    cdef FreeQueue queue = queue_of(self)
    if queue is None:
        return vllm_get_new_blocks(self, num_blocks)
    return take_blocks(self, queue, num_blocks)


cdef list take_blocks(object pool, FreeQueue queue, Py_ssize_t n):
    cdef list blocks
    queue.check_number(n, "num_blocks")
    blocks = queue.take_blocks(n)
    if pool._reuse_watchers:
        pool._notify_reuse(blocks)
    if pool.enable_caching:
        drop_entries(pool, blocks)
    for value in blocks:
        (<Block>value).ref_cnt = 1
    return blocks


cdef int drop_entries(object pool, list blocks) except -1:
    """Drop the entries of taken blocks."""
    cdef Block block
    cached = pool.cached_block_hash_to_block
    is_simple = type(cached) is BlockMap and not pool.enable_kv_cache_events and not pool.cached_block_hashes_by_block
    for value in blocks:
        block = <Block>value
        if block._block_hash is None:
            continue
        if is_simple:
            remove_block((<BlockMap>cached)._cache, block._block_hash, block.block_id)
            block._block_hash = None
            block.num_hash_tokens = NO_TOKENS
        else:
            pool._maybe_evict_cached_block(block)
    return 0


def touch(self, blocks):
    """Add a reference to each block; blocks without references leave the queue.

    Raise IntegrityError if one of these is not in the queue, PageIdError for another pool's block; nothing is changed then.
    """
    cdef FreeQueue queue = queue_of(self)
    cdef list touched = []
    cdef Block block
    if queue is None:
        return vllm_touch(self, blocks)
    for value in blocks:
        block = as_block(value)
        if block.pool is not self and block.pool is not None:
            raise PageIdError(f"block {block.block_id} is a block of another pool: {block!r}")
        if block.is_null:
            continue
        if block.ref_cnt == 0:
            queue.require_in(block)
        touched.append(block)
    queue.touch(touched)


def free_blocks(self, ordered_blocks):
    """Remove a reference from each block. A block that has none left enters the queue: uncached blocks at the front, cached
    blocks at the back, both in order. Blocks of other pools go back to those pools.

    Raise DoubleFreeError for a block without a reference, PageIdError for a block that its pool does not have; nothing is
    changed then.
    """
    cdef FreeQueue queue = queue_of(self)
    if queue is None:
        return vllm_free_blocks(self, ordered_blocks)
    give_blocks_back(self, queue, ordered_blocks)


cdef int give_blocks_back(object pool, FreeQueue queue, object blocks) except -1:
    cdef list done = [], first = [], last = []
    cdef dict others = {}
    cdef Block block
    cdef bint is_caching = pool.enable_caching
    try:
        for value in blocks:
            block = as_block(value)
            if block.is_null:
                continue
            if block.pool is not pool and block.pool is not None:
                others.setdefault(block.pool, []).append(block)
                continue
            take_reference(pool, queue, block)
            done.append(block)
            if block.ref_cnt == 0:
                (last if is_caching and block._block_hash is not None else first).append(block)
    except BaseException:
        for value in done:
            (<Block>value).ref_cnt += 1
        raise
    queue.requeue(first, last)
    for other, theirs in others.items():
        other.free_blocks(theirs)
    return 0


cdef int take_reference(object pool, FreeQueue queue, Block block) except -1:
    """Remove a reference from a block. A block made by hand, without a pool, must not get into the queue."""
    cdef bint is_own = block.pool is pool or is_listed(pool.blocks, block)
    if is_own and block.ref_cnt <= 0:
        raise DoubleFreeError(f"block {block.block_id} is freed more often than it was taken: {block!r}")
    if not is_own and block.ref_cnt == 1:
        raise PageIdError(f"block {block.block_id} is no block of this pool: {block!r}")
    queue.require_out(block)
    block.ref_cnt -= 1
    return 0


cdef bint is_listed(list blocks, Block block):
    return 0 <= block.block_id < len(blocks) and blocks[block.block_id] is block


def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, **options):
    """Cache a request's blocks from `num_cached_blocks` to `num_full_blocks`, except null blocks and blocks left out by a mask.
    The options are ``kv_cache_group_id`` and ``block_mask``.
    """
    cdef Filled filled
    hashes = request.block_hashes
    if type(hashes) is list and type(blocks) is list and "kv_cache_group_id" in options and num_cached_blocks >= 0:
        filled = Filled(
            start=num_cached_blocks, stop=num_full_blocks, block_size=block_size, stride=block_size // self.hash_block_size
        )
        suffix = suffix_of(options["kv_cache_group_id"])
        if enter_blocks(self, blocks, hashes, filled, options.get("block_mask"), suffix):
            return
    filled = Filled(start=num_cached_blocks, stop=num_full_blocks, block_size=block_size, stride=0)
    cache_as_vllm(self, request, blocks, filled, options)


cdef int cache_as_vllm(object pool, object request, object blocks, Filled filled, dict options) except -1:
    """Cache blocks by vLLM's own method."""
    queue = pool.free_block_queue
    if not isinstance(queue, FreeQueue):
        vllm_cache_full_blocks(pool, request, blocks, filled.start, filled.stop, filled.block_size, **options)
        return 0
    (<FreeQueue>queue).begin_span()
    try:
        vllm_cache_full_blocks(pool, request, blocks, filled.start, filled.stop, filled.block_size, **options)
    finally:
        (<FreeQueue>queue).end_span(list(blocks), filled.start, min(filled.stop, <Py_ssize_t>len(blocks)))
    return 0


cdef bint enter_blocks(object pool, list blocks, list hashes, Filled filled, object mask, object suffix) except -1:
    """Cache blocks. Return False, with nothing done, in cases for vLLM's method: events, cached blocks, wrong sizes."""
    cdef Block block
    cdef dict cache
    cdef bytes key
    cdef Py_ssize_t i
    cached = pool.cached_block_hash_to_block
    if type(cached) is not BlockMap or pool.enable_kv_cache_events or not has_room(pool, blocks, hashes, filled, mask):
        return False
    for i in range(filled.start, filled.stop):
        block = as_block(blocks[i])
        if not block.is_null and block._block_hash is not None and (mask is None or mask[i - filled.start]):
            return False
    cache = (<BlockMap>cached)._cache
    for i in range(filled.start, filled.stop):
        block = <Block>blocks[i]
        if block.is_null or (mask is not None and not mask[i - filled.start]):
            continue
        key = block_key_of(hashes[(i + 1) * filled.stride - 1], suffix)
        if not has_block(cache, key, block.block_id):
            block._block_hash = key
            block.num_hash_tokens = (i + 1) * filled.block_size
            add_block(cache, key, block)
    queue = pool.free_block_queue
    if isinstance(queue, FreeQueue):
        (<FreeQueue>queue).end_span(blocks, filled.start, filled.stop)
    return True


cdef bint has_room(object pool, list blocks, list hashes, Filled filled, object mask) except -1:
    """Whether there are blocks, hashes and mask entries for all full blocks."""
    if filled.stride * <Py_ssize_t>pool.hash_block_size != filled.block_size:
        return False
    if filled.stop > len(blocks) or filled.stop * filled.stride > len(hashes):
        return False
    return mask is None or (type(mask) is list and len(mask) == filled.stop - filled.start)


def count_evictable(cls, blocks):
    """Return the number of blocks without references, which leave the queue when they are touched."""
    cdef Block block
    cdef Py_ssize_t n = 0
    for value in blocks:
        block = as_block(value)
        n += block.ref_cnt == 0 and not block.is_null
    return n


def get_block_ids(self, allow_none=False, *, group_ids=None):
    """Return the block ids of each group, or of the groups `group_ids`; None without blocks if `allow_none`."""
    groups = self.blocks if group_ids is None else [self.blocks[group_id] for group_id in group_ids]
    if allow_none:
        for blocks in groups:
            if blocks:
                break
        else:
            return None
    return tuple([ids_of(blocks) for blocks in groups])


cdef list ids_of(object blocks):
    return [(<Block>block).block_id if type(block) is Block else block.block_id for block in blocks]
