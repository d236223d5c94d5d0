"""What `pagepool.compat.vllm.check` finds in a pool whose records have the shape of vLLM's, one damage at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pagepool.compat.vllm import check
from pagepool.errors import ArgumentTypeError, IntegrityError

NUM_BLOCKS = 8
HASHES = {1: b"one", 2: b"two", 5: b"five", 6: b"two"}
"""Hashes of blocks: two blocks have the same, two of the four are free."""
FREE = (4, 5, 7, 6)


class Map:
    """Blocks by hash: one, or a dict by id."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Any] = {}

    def contain(self, key: bytes, block_id: int) -> bool:
        value = self._cache.get(key)
        return block_id in value if isinstance(value, dict) else value is not None and value.block_id == block_id


def make_block(block_id: int) -> Any:
    links = {"prev_free_block": None, "next_free_block": None}
    hashes = {"block_hash": HASHES.get(block_id), "block_hash_num_tokens": 16 if block_id in HASHES else None}
    return SimpleNamespace(block_id=block_id, ref_cnt=0, is_null=block_id == 0, **links, **hashes)


def make_queue(blocks: list[Any]) -> Any:
    """Return a queue of the free blocks between its two ends."""
    head, tail = make_block(-1), make_block(-1)
    chain = [head, *(blocks[block_id] for block_id in FREE), tail]
    for before, block in pairwise(chain):
        before.next_free_block, block.prev_free_block = block, before
    return SimpleNamespace(num_free_blocks=len(FREE), fake_free_list_head=head, fake_free_list_tail=tail)


def make_pool() -> Any:
    blocks = [make_block(block_id) for block_id in range(NUM_BLOCKS)]
    pool = SimpleNamespace(blocks=blocks, num_gpu_blocks=NUM_BLOCKS, null_block=blocks[0], free_block_queue=make_queue(blocks))
    pool.cached_block_hash_to_block = Map()
    pool.cached_block_hash_to_block._cache = {
        b"one": blocks[1],
        b"two": {2: blocks[2], 6: blocks[6]},
        b"five": blocks[5],
        b"more": blocks[1],
    }
    pool.cached_block_hashes_by_block = {1: {b"more"}}
    return pool


def make_scheduler() -> Any:
    """Return a scheduler with two requests that share a block, a window that has left one, a copy, and a deferred free."""
    pool = make_pool()
    blocks = pool.blocks
    group = SimpleNamespace(
        block_pool=pool,
        kv_cache_group_id=0,
        req_to_blocks={"a": [blocks[1], blocks[2]], "b": [blocks[0], blocks[1]]},
        num_cached_block={"a": 1, "b": 2},
        _pending_cow_copies=[(blocks[1], blocks[2])],
    )
    blocks[1].ref_cnt, blocks[2].ref_cnt, blocks[3].ref_cnt = 3, 2, 2
    manager = SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(single_type_managers=(group,)))
    return SimpleNamespace(kv_cache_manager=manager, deferred_frees=[(7, [blocks[3]])])


def test_a_sound_pool_passes() -> None:
    scheduler = make_scheduler()
    for subject in (scheduler, scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool):
        check(subject)


@pytest.mark.parametrize("subject", [None, 7, "pool", [], object()])
def test_anything_else_is_refused(subject: object) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"^manager: got \w+, allowed: a scheduler, KV-cache manager or block pool of vLLM$"
    ):
        check(subject)


def set_link(name: str, block_id: int, other: int | None) -> Callable[[Any], None]:
    return lambda s: setattr(block_of(s, block_id), name, None if other is None else block_of(s, other))


def set_field(name: str, block_id: int, value: object) -> Callable[[Any], None]:
    return lambda s: setattr(block_of(s, block_id), name, value)


def pool_of(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def block_of(scheduler: Any, block_id: int) -> Any:
    return pool_of(scheduler).blocks[block_id]


def cache_of(scheduler: Any) -> Any:
    return pool_of(scheduler).cached_block_hash_to_block._cache


def group_of(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0]


def queue_stranger(scheduler: Any) -> None:
    """Put a block of another pool in front of block 4."""
    head, first, stranger = pool_of(scheduler).free_block_queue.fake_free_list_head, block_of(scheduler, 4), make_block(3)
    head.next_free_block, first.prev_free_block = stranger, stranger
    stranger.prev_free_block, stranger.next_free_block = head, first


DAMAGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("block 4: is at position 3 of the pool's blocks", lambda s: pool_of(s).blocks.__delitem__(3)),
    ("block 3: is_null is True, the null block is 0", set_field("is_null", 3, True)),
    ("block 0: is_null is False, the null block is 0", set_field("is_null", 0, False)),
    ("the pool has 7 blocks, counts 8", lambda s: pool_of(s).blocks.pop()),
    ("block 5: the free queue ends behind it, before its tail", set_link("next_free_block", 5, None)),
    ("block 7: follows block 5 and points back to block 4", set_link("prev_free_block", 7, 4)),
    ("block 7: follows block 5 and points back to nothing", set_link("prev_free_block", 7, None)),
    ("block 4: follows block 7 and points back to the free queue's end", set_link("next_free_block", 7, 4)),
    (
        "the free queue's tail: follows block 6 and points back to block 7",
        lambda s: setattr(pool_of(s).free_block_queue.fake_free_list_tail, "prev_free_block", block_of(s, 7)),
    ),
    ("block 3: is in the free queue of a pool that it does not belong to", queue_stranger),
    ("block 5: is in the free queue, ref_cnt is 1", set_field("ref_cnt", 5, 1)),
    ("block 5: is in the free queue, ref_cnt is -1", set_field("ref_cnt", 5, -1)),
    ("the free queue has 4 blocks, counts 5", lambda s: setattr(pool_of(s).free_block_queue, "num_free_blocks", 5)),
    ("block 3: is not in the free queue and has a link into it", set_link("next_free_block", 3, 4)),
    ("block 3: ref_cnt is 0, it is not in the free queue", set_field("ref_cnt", 3, 0)),
    ("block 3: ref_cnt is -2, it is not in the free queue", set_field("ref_cnt", 3, -2)),
    ("block 0: the null block has a hash", set_field("block_hash", 0, b"one")),
    ("block 3: has no hash, but more hashes or a number of hashed tokens", set_field("block_hash_num_tokens", 3, 16)),
    ("block 1: has no hash, but more hashes", set_field("block_hash", 1, None)),
    ("block 5: the map lacks it under its hash 66697665", lambda s: cache_of(s).pop(b"five")),
    ("block 6: the map lacks it under its hash 74776f", lambda s: cache_of(s)[b"two"].pop(6)),
    ("block 1: the map lacks it under its hash 6d6f7265", lambda s: cache_of(s).pop(b"more")),
    ("the map has no block under the hash 6e6f6e65", lambda s: cache_of(s).__setitem__(b"none", {})),
    ("block 4: the map has it under the hash 666f7572, which", lambda s: cache_of(s).__setitem__(b"four", block_of(s, 4))),
    ("block 5: the map has another object", lambda s: cache_of(s).__setitem__(b"five", make_block(5))),
    ("block 9: the map has another object", lambda s: cache_of(s)[b"two"].__setitem__(9, block_of(s, 2))),
    ("the map has 5 entries, the blocks have 6 hashes", lambda s: pool_of(s).cached_block_hashes_by_block[1].add(b"one")),
    ("block 3: request a holds it, another pool's", lambda s: group_of(s).req_to_blocks["a"].append(make_block(3))),
    ("request a, group 0: 3 blocks count as cached, it holds 2", lambda s: group_of(s).num_cached_block.update(a=3)),
    ("request c, group 0: 1 blocks count as cached, it holds 0", lambda s: group_of(s).num_cached_block.update(c=1)),
    ("request a, group 0: -1 blocks count as cached", lambda s: group_of(s).num_cached_block.update(a=-1)),
    ("block 1: ref_cnt is 2, 3 references hold it", set_field("ref_cnt", 1, 2)),
    ("block 2: ref_cnt is 2, 3 references hold it", lambda s: group_of(s).req_to_blocks.update(c=[block_of(s, 2)])),
    ("block 3: ref_cnt is 2, 3 references hold it", lambda s: s.deferred_frees.append((8, [block_of(s, 3)] * 2))),
    ("block 4: ref_cnt is 0, 1 references hold it", lambda s: group_of(s).req_to_blocks.update(c=[block_of(s, 4)])),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGES, ids=[message for message, _ in DAMAGES])
def test_each_damage_is_named(message: str, damage: Callable[[Any], Any]) -> None:
    scheduler = make_scheduler()
    damage(scheduler)
    with pytest.raises(IntegrityError) as caught:
        check(scheduler)
    assert str(caught.value).startswith(message)


def test_a_holder_that_is_not_known_is_allowed() -> None:
    """A connector may hold blocks that no request has."""
    scheduler = make_scheduler()
    block_of(scheduler, 1).ref_cnt += 1
    check(scheduler)
