"""What vLLM's pool of blocks does where one of pagepool's eviction policies chooses the blocks to be taken.

The functions replace those of `pool.pyx` and `slots.pyx` for this, and call them for pools with another queue: those without
caching. What the policy must know is told to the `PolicyQueue`; the rest is as in `pool.pyx`.
"""

from pagepool.compat.vllm.blocks cimport Block, as_block
from pagepool.compat.vllm.policy_queue cimport PolicyQueue
from pagepool.compat.vllm.pool cimport give_others_back, hand_out, own_block, release
from pagepool.core.records cimport NULL_PAGE, is_free

from pagepool.compat.vllm import pool, slots
from pagepool.compat.vllm.blocks import BlockQueue
from pagepool.errors import DoubleFreeError, IntegrityError


cdef object make_queue(object blocks, object eviction):
    cdef list listed = list(blocks)
    home = (<Block?>listed[0]).pool if listed else None
    return PolicyQueue(listed, eviction) if home is not None and home.enable_caching else BlockQueue(listed)


def make_arc_queue(blocks):
    """Return the free queue of a pool, with the policy ``"arc"`` if the pool caches."""
    return make_queue(blocks, "arc")


def make_adaptive_queue(blocks):
    """Return the free queue of a pool, with the policy ``"adaptive"`` if the pool caches."""
    return make_queue(blocks, "adaptive")


cdef PolicyQueue queue_of(object block_pool):
    """The queue of a pool, or None if the functions of `pool.pyx` have to serve it."""
    queue = block_pool.free_block_queue
    return <PolicyQueue>queue if type(queue) is PolicyQueue and block_pool.metrics_collector is None else None


cdef bint is_queued(PolicyQueue queue, Block block) noexcept:
    return queue.id_of(block) != NULL_PAGE and is_free(&queue.store.pool, block.block_id)


def get_new_blocks(self, num_blocks):
    """Take the blocks that the policy chooses; those that are cached lose their entries. Errors as in `pool.pyx`."""
    cdef PolicyQueue queue = queue_of(self)
    cdef list blocks
    if queue is None:
        return pool.get_new_blocks(self, num_blocks)
    blocks = queue.popleft_n(num_blocks)
    for value in blocks:
        if (<Block>value).ref_cnt:
            queue.put_back([], blocks)
            raise IntegrityError(f"block {value.block_id} is in the free queue with {value.ref_cnt} references")
    hand_out(self, blocks)
    return blocks


def touch(self, blocks):
    """Add a reference to each block; those without any leave the queue. Each is a hit. Errors as in `pool.pyx`."""
    cdef PolicyQueue queue = queue_of(self)
    cdef list checked = []
    cdef Block block
    if queue is None:
        return pool.touch(self, blocks)
    for value in blocks:
        block = own_block(self, value)
        if block.is_null:
            continue
        if block.ref_cnt == 0 and not is_queued(queue, block):
            raise IntegrityError(f"block {block.block_id} is not in the free queue: {block!r}")
        checked.append(block)
    queue.touch(checked)
    for value in checked:
        (<Block>value).ref_cnt += 1


def free_blocks(self, ordered_blocks):
    """Take a reference from each block. Of those without any left, the uncached ones are taken next, and the policy chooses
    between the others. Blocks of other pools go back to these. Errors as in `pool.pyx`.
    """
    cdef PolicyQueue queue = queue_of(self)
    cdef list first = [], last = []
    cdef dict others
    if queue is None:
        return pool.free_blocks(self, ordered_blocks)
    blocks = list(ordered_blocks)
    for value in blocks:
        if is_queued(queue, as_block(value)):
            raise DoubleFreeError(f"block {value.block_id} is in the free queue already: {value!r}")
    others = release(self, blocks, first, last)
    queue.put_back(first, last)
    give_others_back(others)


def cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, **options):
    """Cache a request's blocks, as in `pool.pyx`, and tell the policy of the misses in their order."""
    queue = self.free_block_queue
    if type(queue) is not PolicyQueue or num_cached_blocks >= num_full_blocks:
        return pool.cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, **options)
    (<PolicyQueue>queue).is_entering = True
    try:
        pool.cache_full_blocks(self, request, blocks, num_cached_blocks, num_full_blocks, block_size, **options)
    finally:
        (<PolicyQueue>queue).is_entering = False
        (<PolicyQueue>queue).enter_span(list(blocks), num_cached_blocks, min(num_full_blocks, len(blocks)))


def allocate_slots(self, request, *args, **options):
    """Give a request blocks for its next tokens, as in `slots.pyx`, and tell the policy of a request that begins."""
    managers = self.coordinator.single_type_managers
    queue = self.block_pool.free_block_queue
    is_new = type(queue) is PolicyQueue and not (managers and managers[0].req_to_blocks.get(request.request_id))
    blocks = slots.allocate_slots(self, request, *args, **options)
    if is_new and blocks is not None:
        (<PolicyQueue>queue).note_request()
    return blocks
