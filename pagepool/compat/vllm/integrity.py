"""Checks of the records of a live block pool of vLLM, with vLLM's own classes or with ours."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pagepool.compat.vllm.policy_queue import PolicyQueue
from pagepool.errors import ArgumentTypeError, IntegrityError


def check_manager(manager: Any) -> None:
    """Check a ``BlockPool`` of vLLM, or all pools and requests of a ``KVCacheManager`` or ``Scheduler``.

    Raise IntegrityError naming the first wrong block or request, ArgumentTypeError for other objects. O(blocks).
    """
    scheduler = manager if hasattr(manager, "kv_cache_manager") else None
    manager = getattr(manager, "kv_cache_manager", manager)
    groups = list(getattr(getattr(manager, "coordinator", None), "single_type_managers", ()))
    pools = {id(pool): pool for pool in [getattr(manager, "block_pool", manager), *(group.block_pool for group in groups)]}
    for pool in pools.values():
        _check_pool(pool)
    for group in groups:
        _check_requests(group)
    _check_holders(pools, [*_held_by_requests(groups), *_held_by(scheduler)])


def _check_pool(pool: Any) -> None:
    if not hasattr(pool, "free_block_queue"):
        raise ArgumentTypeError(
            f"manager: got {type(pool).__name__}, allowed: a scheduler, KV-cache manager or block pool of vLLM"
        )
    for i, block in enumerate(pool.blocks):
        if block.block_id != i:
            raise IntegrityError(f"block {block.block_id}: is at position {i} of the pool's blocks")
        if block.is_null is not (block is pool.null_block):
            raise IntegrityError(f"block {i}: is_null is {block.is_null}, the null block is {pool.null_block.block_id}")
    if len(pool.blocks) != pool.num_gpu_blocks:
        raise IntegrityError(f"the pool has {len(pool.blocks)} blocks, counts {pool.num_gpu_blocks}")
    _check_queue(pool)
    _check_hashes(pool)


# The queue.


def _check_queue(pool: Any) -> None:
    """Check links and counts: exactly the blocks without a holder are queued."""
    queued = set()
    for block in _follow(pool):
        queued.add(block.block_id)
        if block.ref_cnt != 0 or block.is_null:
            state = "the null block" if block.is_null else f"ref_cnt is {block.ref_cnt}"
            raise IntegrityError(f"block {block.block_id}: is in the free queue, {state}")
    if len(queued) != pool.free_block_queue.num_free_blocks:
        raise IntegrityError(f"the free queue has {len(queued)} blocks, counts {pool.free_block_queue.num_free_blocks}")
    for block in pool.blocks:
        if block.block_id not in queued:
            _check_taken(block)


def _follow(pool: Any) -> Iterator[Any]:
    """Yield the queued blocks. Raise IntegrityError for a wrong link, which a loop has too. A policy's queue has no links."""
    if isinstance(pool.free_block_queue, PolicyQueue):
        pool.free_block_queue.check()
        yield from pool.free_block_queue.get_all_free_blocks()
        return
    before, block = pool.free_block_queue.fake_free_list_head, pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not pool.free_block_queue.fake_free_list_tail:
        if block is None:
            raise IntegrityError(f"{_name(before)}: the free queue ends behind it, before its tail")
        if block.prev_free_block is not before:
            raise IntegrityError(f"{_name(block)}: follows {_name(before)} and points back to {_name(block.prev_free_block)}")
        if not 0 <= block.block_id < len(pool.blocks) or pool.blocks[block.block_id] is not block:
            raise IntegrityError(f"{_name(block)}: is in the free queue of a pool that it does not belong to")
        yield block
        before, block = block, block.next_free_block
    if block.prev_free_block is not before:
        raise IntegrityError(
            f"the free queue's tail: follows {_name(before)} and points back to {_name(block.prev_free_block)}"
        )


def _name(block: Any) -> str:
    if block is None:
        return "nothing"
    return f"block {block.block_id}" if block.block_id >= 0 else "the free queue's end"


def _check_taken(block: Any) -> None:
    if block.prev_free_block is not None or block.next_free_block is not None:
        raise IntegrityError(f"block {block.block_id}: is not in the free queue and has a link into it")
    if block.ref_cnt <= 0 and not block.is_null:
        raise IntegrityError(f"block {block.block_id}: ref_cnt is {block.ref_cnt}, it is not in the free queue")


# Hashes.


def _check_hashes(pool: Any) -> None:
    """Check that the map has exactly the hashes of the blocks."""
    num_keys = 0
    for block in pool.blocks:
        keys = _keys_of(pool, block)
        num_keys += len(keys)
        if keys and block.is_null:
            raise IntegrityError(f"block {block.block_id}: the null block has a hash")
        if block.block_hash is None and (keys or block.block_hash_num_tokens is not None):
            raise IntegrityError(f"block {block.block_id}: has no hash, but more hashes or a number of hashed tokens")
        for key in keys:
            if not pool.cached_block_hash_to_block.contain(key, block.block_id):
                raise IntegrityError(f"block {block.block_id}: the map lacks it under its hash {key.hex()}")
    num_entries = 0
    for key, block_id, block in _entries(pool.cached_block_hash_to_block):
        num_entries += 1
        _check_entry(pool, key, block_id, block)
    if num_entries != num_keys:
        raise IntegrityError(f"the map has {num_entries} entries, the blocks have {num_keys} hashes")


def _keys_of(pool: Any, block: Any) -> list[bytes]:
    more = pool.cached_block_hashes_by_block.get(block.block_id, ())
    return [*more] if block.block_hash is None else [block.block_hash, *more]


def _entries(block_map: Any) -> Iterator[tuple[bytes, int, Any]]:
    for key, value in block_map._cache.items():
        if not isinstance(value, dict):
            yield key, value.block_id, value
            continue
        if not value:
            raise IntegrityError(f"the map has no block under the hash {key.hex()}")
        for block_id, block in value.items():
            yield key, block_id, block


def _check_entry(pool: Any, key: bytes, block_id: int, block: Any) -> None:
    if not 0 <= block_id < len(pool.blocks) or pool.blocks[block_id] is not block:
        raise IntegrityError(f"block {block_id}: the map has another object under the hash {key.hex()}")
    if key not in _keys_of(pool, block):
        raise IntegrityError(f"block {block_id}: the map has it under the hash {key.hex()}, which it does not have")


# Requests.


def _check_requests(group: Any) -> None:
    """Check that each request's blocks belong to the group's pool, and that its cached blocks are at most all its blocks."""
    blocks = group.block_pool.blocks
    for request_id, held in group.req_to_blocks.items():
        for block in held:
            if not 0 <= block.block_id < len(blocks) or blocks[block.block_id] is not block:
                raise IntegrityError(f"block {block.block_id}: request {request_id} holds it, another pool's")
    for request_id, num_cached in group.num_cached_block.items():
        num_held = len(group.req_to_blocks.get(request_id, ()))
        if not 0 <= num_cached <= num_held:
            place = f"request {request_id}, group {group.kv_cache_group_id}"
            raise IntegrityError(f"{place}: {num_cached} blocks count as cached, it holds {num_held}")


def _held_by_requests(groups: list[Any]) -> Iterator[Any]:
    """Yield a block for each reference that a request or a pending copy holds."""
    for group in groups:
        for held in group.req_to_blocks.values():
            yield from held
        for pair in group._pending_cow_copies:
            yield from pair


def _held_by(scheduler: Any) -> Iterator[Any]:
    """Yield the blocks of ended requests that a running step may still be writing."""
    for _, blocks in getattr(scheduler, "deferred_frees", ()):
        yield from blocks


def _check_holders(pools: dict[int, Any], held: list[Any]) -> None:
    """Check that no block has more holders than references. It may have fewer, since connectors hold blocks too."""
    counts = Counter(id(block) for block in held)
    for pool in pools.values():
        for block in pool.blocks:
            if block.ref_cnt < counts[id(block)] and not block.is_null:
                raise IntegrityError(
                    f"block {block.block_id}: ref_cnt is {block.ref_cnt}, {counts[id(block)]} references hold it"
                )
