"""vLLM's free queue with an eviction policy, without vLLM: the same blocks as a pool of pagepool's, and guards."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest
from settings import NUM_OPERATIONS

from pagepool import PagePool
from pagepool.compat.vllm.blocks import Block
from pagepool.compat.vllm.policy import EVICTION_VARIABLE, is_adaptive
from pagepool.compat.vllm.policy_queue import PolicyQueue
from pagepool.errors import ArgumentError, DoubleFreeError, IntegrityError, OutOfPagesError
from pagepool.hashing import PageHash

GROUP = (0).to_bytes(4, "big")


def make_queue(num_blocks: int = 6) -> tuple[PolicyQueue, list[Block]]:
    """Return a queue without the null block, and all blocks."""
    pool = SimpleNamespace()
    blocks = [Block(i, pool=pool) for i in range(num_blocks)]
    pool.free_block_queue = queue = PolicyQueue(blocks)
    assert queue.num_free_blocks == num_blocks
    null_block = queue.popleft()
    assert null_block is blocks[0]
    null_block.is_null = True
    return queue, blocks


def ids_of(queue: PolicyQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


class Twin:
    """A queue and a pool of pagepool's with the same pages, in step."""

    def __init__(self, num_blocks: int) -> None:
        self.queue, self.blocks = make_queue(num_blocks)
        self.pool = PagePool(num_blocks, True, eviction="adaptive")
        self.held: list[int] = []

    def take(self, num_blocks: int) -> None:
        self.queue.note_request()
        taken = self.queue.popleft_n(num_blocks)
        for block in taken:
            block.reset_hash()
            block.ref_cnt = 1
        ids = [block.block_id for block in taken]
        assert self.pool.get_new_page_ids(num_blocks).tolist() == ids
        self.held += ids

    def give_back(self, ids: list[int]) -> None:
        """Give cached blocks back: uncached ones would be in the order in which vLLM wants them."""
        for block_id in ids:
            self.blocks[block_id].ref_cnt = 0
            self.held.remove(block_id)
        self.queue.append_n([self.blocks[block_id] for block_id in ids])
        self.pool.free_page_ids(ids)

    def hit(self, block_id: int) -> None:
        self.queue.remove(self.blocks[block_id])
        self.blocks[block_id].ref_cnt = 1
        self.pool.touch_page_ids([block_id])
        self.held.append(block_id)

    def cache(self, block_id: int, key: int) -> None:
        self.blocks[block_id].set_block_hash(key.to_bytes(16, "little") + GROUP)
        self.pool.cache_full_page_ids(None, [block_id], [PageHash(key, ())], 0, 1, 16, 0)

    def evict(self, block_id: int) -> None:
        self.blocks[block_id].reset_hash()
        self.pool.evict_pages([block_id])


@pytest.mark.parametrize("seed", range(max(NUM_OPERATIONS // 8_000, 4)))
def test_same_blocks_as_a_pool(seed: int) -> None:
    rng = Random(seed)
    twin = Twin(rng.choice((4, 9, 33)))
    keys = [rng.getrandbits(128) for _ in range(rng.choice((4, 40)))]
    for _ in range(600):
        uncached = [i for i in twin.held if twin.blocks[i].block_hash is None]
        cached = [i for i in twin.held if i not in uncached]
        free = [block.block_id for block in twin.queue.get_all_free_blocks() if block.block_hash]
        action = rng.choice(("take", "cache", "cache", "give back", "give back", "hit", "evict"))
        if action == "take" and twin.queue.num_free_blocks:
            twin.take(rng.randint(1, min(4, twin.queue.num_free_blocks)))
        elif action == "cache" and uncached:
            twin.cache(rng.choice(uncached), rng.choice(keys))
        elif action == "give back" and cached:
            twin.give_back(rng.sample(cached, rng.randint(1, len(cached))))
        elif action == "hit" and free:
            twin.hit(rng.choice(free))
        elif action == "evict" and rng.random() < 0.1 and (free or cached):
            twin.evict(rng.choice(free + cached))
        assert ids_of(twin.queue) == twin.pool.free_page_ids_in_order().tolist()
        assert twin.queue.num_free_blocks == len(ids_of(twin.queue))
    twin.queue.check()


def test_uncached_blocks_first() -> None:
    queue, blocks = make_queue()
    queue.popleft_n(5)
    blocks[2].set_block_hash(b"cached" + GROUP)
    queue.append_n([blocks[2]])
    queue.prepend_n([blocks[4], blocks[1]])
    queue.prepend_n([blocks[3]])
    assert ids_of(queue) == [3, 4, 1, 2]
    assert [block.block_id for block in queue.iter_blocks_after(blocks[4])] == [1, 2]
    assert list(queue.iter_blocks_after(blocks[5])) == list(queue.iter_blocks_after(blocks[0])) == []
    assert [block.block_id for block in queue.popleft_n(4)] == [3, 4, 1, 2]


def test_uncached_block_kept() -> None:
    """A block that is appended is taken behind those that were prepended, cached or not."""
    queue, blocks = make_queue()
    queue.popleft_n(5)
    queue.append(blocks[1])
    queue.prepend_n([blocks[2]])
    assert ids_of(queue) == [2, 1]
    queue.remove(blocks[1])
    queue.prepend_n([blocks[1]])
    assert ids_of(queue) == [1, 2]


def test_hash_of_a_queued_block() -> None:
    queue, blocks = make_queue()
    blocks[3].set_block_hash(b"cached" + GROUP)
    assert ids_of(queue) == [1, 2, 4, 5, 3]
    blocks[3].reset_hash()
    assert ids_of(queue) == [1, 2, 4, 5, 3]
    assert queue.store.num_cached_pages == 0
    queue.check()


def test_duplicates_and_groups() -> None:
    queue, blocks = make_queue()
    held = queue.popleft_n(5)
    for block in held[:3]:
        block.set_block_hash(b"the same" + GROUP)
    held[3].set_block_hash(b"the same" + (1).to_bytes(4, "big"))
    assert (queue.store.num_keys, queue.store.num_cached_pages) == (2, 4)
    for block in blocks[1:]:
        block.ref_cnt = 1
    queue.check()


def test_short_and_long_hashes() -> None:
    queue, blocks = make_queue()
    queue.popleft_n(5)
    for block, digest in zip(blocks[1:], (b"", b"a", b"a" * 16, b"a" * 32, b"a" * 16 + b"b"), strict=True):
        block.set_block_hash(digest + GROUP)
    assert queue.store.num_keys == 3


def refused(error: type[Exception], text: str, call: Callable[..., object], *args: object) -> None:
    with pytest.raises(error, match=text):
        call(*args)


def test_refusals_change_nothing() -> None:
    queue, blocks = make_queue()
    for block in queue.popleft_n(3):
        block.ref_cnt = 1
    before = ids_of(queue)
    refused(DoubleFreeError, "block 5 ", queue.append, blocks[5])
    refused(DoubleFreeError, "block 1 .*twice", queue.append_n, [blocks[1], blocks[2], blocks[1]])
    refused(DoubleFreeError, "block 5 ", queue.prepend_n, [blocks[1], blocks[5]])
    refused(IntegrityError, "block 0 ", queue.append, blocks[0])
    refused(IntegrityError, "block 1 .*another pool", queue.append, Block(1))
    refused(IntegrityError, "block 99 ", queue.append, Block(99))
    refused(IntegrityError, "block 2 ", queue.remove, blocks[2])
    refused(IntegrityError, "block 0 ", queue.remove, blocks[0])
    refused(OutOfPagesError, "got 3, allowed: at most 2", queue.popleft_n, 3)
    refused(ArgumentError, "n: got -1", queue.popleft_n, -1)
    assert ids_of(queue) == before
    queue.check()
    queue.popleft_n(2)
    refused(OutOfPagesError, "No free blocks available", queue.popleft)


def test_check_names_the_block() -> None:
    queue, blocks = make_queue()
    blocks[2].ref_cnt = 1
    refused(IntegrityError, "block 2: is in the free queue", queue.check)
    blocks[2].ref_cnt = 0
    blocks[3]._block_hash = b"unknown" + GROUP
    refused(IntegrityError, "block 3: its page has another entry", queue.check)


def test_wrong_blocks() -> None:
    refused(ArgumentError, "got block 1 at position 0", PolicyQueue, [Block(1)])
    refused(ArgumentError, "num_pages", PolicyQueue, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("lru", False), (" LRU ", False), ("adaptive", True), (" Adaptive", True)],
)
def test_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv(EVICTION_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(EVICTION_VARIABLE, value)
    assert is_adaptive() == expected
