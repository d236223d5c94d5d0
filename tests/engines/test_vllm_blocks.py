"""The compiled stand-ins for vLLM's blocks, free queue and map, without vLLM: order, guards, and what is freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from settings import NUM_OPERATIONS

from pagepool.compat.vllm.blocks import Block, BlockMap, BlockQueue, Queue
from pagepool.compat.vllm.policy_queue import AdaptiveQueue
from pagepool.errors import ArgumentError, ArgumentTypeError, CompatError, DoubleFreeError, IntegrityError, OutOfPagesError


def make_queue(num_blocks: int = 5) -> tuple[BlockQueue, list[Block]]:
    blocks = [Block(i) for i in range(num_blocks)]
    return BlockQueue(blocks), blocks


def ids_of(queue: BlockQueue) -> list[int]:
    """Return the queue's ids, which its links have in both directions."""
    forward = [block.block_id for block in queue.get_all_free_blocks()]
    backward, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backward.append(block.block_id)
        block = block.prev_free_block
    assert forward == backward[::-1]
    assert len(forward) == queue.num_free_blocks
    return forward


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 10_000, 3)))
def test_queue_same_as_a_list(seed: int) -> None:
    rng = Random(seed)
    queue, blocks = make_queue(rng.randint(1, 12))
    free, held = list(blocks), []
    for _ in range(300):
        action = rng.choice(("take", "take one", "remove", "append", "append one", "prepend"))
        n = rng.randint(0, len(free if action == "take" else held))
        if action == "take":
            taken, free = free[:n], free[n:]
            assert queue.popleft_n(n) == taken
            held += taken
        elif action == "take one" and free:
            held.append(free.pop(0))
            assert queue.popleft() is held[-1]
        elif action == "remove" and free:
            held.append(free.pop(rng.randrange(len(free))))
            queue.remove(held[-1])
        elif action == "append one" and held:
            free.append(held.pop())
            queue.append(free[-1])
        elif action in ("append", "prepend"):
            given, held = held[:n], held[n:]
            getattr(queue, f"{action}_n")(given)
            free = free + given if action == "append" else given + free
        assert ids_of(queue) == [block.block_id for block in free]
        assert [*queue.iter_blocks_after(free[0] if free else None)] == free[1:]
        assert all(block.prev_free_block is block.next_free_block is None for block in held)


WRONG: dict[str, tuple[Callable[[BlockQueue, list[Block]], object], type[Exception], str]] = {
    "a queued block": (lambda queue, blocks: queue.append(blocks[3]), DoubleFreeError, "block 3"),
    "a queued block among others": (lambda queue, blocks: queue.prepend_n([Block(9), blocks[4]]), DoubleFreeError, "block 4"),
    "a block twice": (lambda queue, blocks: queue.append_n([Block(9)] * 2), DoubleFreeError, "named twice"),
    "no block": (lambda queue, blocks: queue.append_n([None]), ArgumentTypeError, "got NoneType"),
    "a block that is not queued": (lambda queue, blocks: queue.remove(Block(9)), IntegrityError, "block 9"),
    "too many": (lambda queue, blocks: queue.popleft_n(6), OutOfPagesError, "got 6, allowed: at most 5"),
    "a negative number": (lambda queue, blocks: queue.popleft_n(-1), ArgumentError, "got -1"),
    "no number": (lambda queue, blocks: queue.popleft_n("1"), TypeError, "str"),
    "None": (lambda queue, blocks: queue.remove(None), TypeError, "None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_change_nothing(name: str) -> None:
    call, error, text = WRONG[name]
    queue, blocks = make_queue()
    with pytest.raises(error, match=text):
        call(queue, blocks)
    assert ids_of(queue) == [0, 1, 2, 3, 4]


def test_an_empty_queue_and_broken_links_are_named() -> None:
    queue, blocks = make_queue(2)
    queue.popleft_n(2)
    with pytest.raises(OutOfPagesError, match="No free blocks available"):
        queue.popleft()
    queue.append_n(blocks)
    blocks[0].next_free_block = None
    with pytest.raises(IntegrityError, match="has 1 blocks and counts 2"):
        queue.popleft_n(2)
    queue.fake_free_list_tail.prev_free_block = None
    with pytest.raises(AssertionError, match="tail"):
        queue.append(Block(7))


def test_blocks_equal_by_value_and_show_their_neighbours() -> None:
    assert Block(3) == Block(3)
    assert Block(3) != Block(3, ref_cnt=1)
    assert Block(3) != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(Block(3))
    queue, blocks = make_queue(3)
    assert repr(blocks[1]) == (
        "KVCacheBlock(block_id=1, ref_cnt=0, _block_hash=None, _block_hash_num_tokens=None, "
        "prev_free_block=0, next_free_block=2)"
    )
    assert queue.popleft() is blocks[0]


def test_hashes_of_blocks() -> None:
    block = Block(1)
    block.set_block_hash(b"key", num_tokens=16)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"key", 16)
    with pytest.raises(AssertionError, match="block 1 already has a hash"):
        block.set_block_hash(b"other")
    block.reset_hash()
    assert (block.block_hash, block.block_hash_num_tokens) == (None, None)


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 20_000, 2)))
def test_map_same_as_lists(seed: int) -> None:
    rng = Random(seed)
    cached, model = BlockMap(), dict[bytes, list[Block]]()
    blocks = [Block(i) for i in range(8)]
    for _ in range(400):
        key, block = rng.choice((b"a", b"b", b"c")), rng.choice(blocks)
        of_key = model.setdefault(key, [])
        if rng.random() < 0.5:
            cached.insert(key, block)
            of_key += [block] if block not in of_key else []
        else:
            assert cached.pop(key, block.block_id) is (block if block in of_key else None)
            model[key] = [other for other in of_key if other is not block]
        assert cached.get_one_block(key) is (model[key][0] if model[key] else None)
        assert [cached.contain(key, other.block_id) for other in blocks] == [other in model[key] for other in blocks]
        assert len(cached) == sum(map(bool, model.values()))


@pytest.mark.parametrize("queue_class", [Queue, AdaptiveQueue])
def test_the_queue_refuses_patches(queue_class: type) -> None:
    """Compiled functions would not call what is set."""
    with pytest.raises(CompatError, match=r"append_n of pagepool\.compat\.vllm\..*Queue: got None, allowed: no other than"):
        queue_class.append_n = None  # type: ignore[attr-defined]


def test_long_chains_are_freed() -> None:
    """Without recursion, which would end the process."""
    blocks = [Block(i) for i in range(150_000)]
    for block, following in pairwise(blocks):
        block.next_free_block = following
    del block, following
    blocks.clear()
    queue, blocks = make_queue(150_000)
    del queue, blocks
    gc.collect()
