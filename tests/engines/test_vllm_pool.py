"""The guards of vLLM's pool while pagepool is installed: what would corrupt its queue is refused, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from refusing import refused

from pagepool.errors import ArgumentError, ArgumentTypeError, DoubleFreeError, IntegrityError, OutOfPagesError, PageIdError

pytest.importorskip("vllm")

from pagepool.compat import vllm as compat


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    with compat.installed():
        yield


def make_pool(num_blocks: int = 10, enable_caching: bool = True) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_blocks, enable_caching, hash_block_size=16)


def make_block(**fields: Any) -> Any:
    from pagepool.compat.vllm.blocks import Block

    return Block(**fields)


def state_of(pool: Any) -> Any:
    compat.check(pool)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return free, [(block.ref_cnt, block.block_hash) for block in pool.blocks], dict(pool.cached_block_hash_to_block._cache)


Call = Callable[[Any, list[Any]], object]
WRONG: dict[str, tuple[Call, type[Exception], str]] = {
    "freed twice": (lambda p, held: p.free_blocks([held[0], held[1], held[0]]), DoubleFreeError, "block 1 is freed more"),
    "free already": (lambda p, held: p.free_blocks([held[2], p.blocks[7]]), DoubleFreeError, "block 7 is freed more"),
    "by hand": (lambda p, held: p.free_blocks([*held, make_block(block_id=2, ref_cnt=1)]), PageIdError, "block 2 is no block"),
    "no block": (lambda p, held: p.free_blocks([*held, 5]), ArgumentTypeError, "block: got int"),
    "touched elsewhere": (lambda p, held: p.touch([p.blocks[5], make_pool().blocks[3]]), PageIdError, "of another pool"),
    "touched: no block": (lambda p, held: p.touch([p.blocks[5], None]), ArgumentTypeError, "block: got NoneType"),
    "too many": (lambda p, held: p.get_new_blocks(7), OutOfPagesError, "got 7, allowed: at most 6"),
    "fewer than none": (lambda p, held: p.get_new_blocks(-1), ArgumentError, "got -1"),
    "no number": (lambda p, held: p.get_new_blocks("3"), TypeError, "str"),
}


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_change_nothing(name: str, enable_caching: bool) -> None:
    call, error, text = WRONG[name]
    pool = make_pool(enable_caching=enable_caching)
    held = pool.get_new_blocks(3)
    with refused(lambda: state_of(pool), error, text):
        call(pool, held)


def test_a_queued_block_with_references_is_not_handed_out() -> None:
    pool = make_pool()
    pool.blocks[2].ref_cnt = 1
    with pytest.raises(IntegrityError, match="block 2 is in the free queue with 1 references"):
        pool.get_new_blocks(5)
    assert pool.get_num_free_blocks() == 9
    with pytest.raises(IntegrityError, match="block 2"):
        compat.check(pool)


def test_a_block_without_references_that_is_not_queued_is_not_touched() -> None:
    pool = make_pool()
    block, other = pool.get_new_blocks(2)
    block.ref_cnt = 0
    with pytest.raises(IntegrityError, match="block 1 is not in the free queue"):
        pool.touch([other, block])
    assert other.ref_cnt == 1


def test_blocks_of_other_pools_go_back_to_these() -> None:
    pool, other = make_pool(), make_pool()
    ours, theirs = pool.get_new_blocks(2), other.get_new_blocks(3)
    pool.free_blocks([theirs[0], ours[0], theirs[1], pool.null_block])
    assert (pool.get_num_free_blocks(), other.get_num_free_blocks()) == (8, 8)
    assert [block.block_id for block in other.free_block_queue.get_all_free_blocks()][:2] == [1, 2]


def test_a_block_freed_as_often_as_it_was_taken_goes_back_once() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    pool.free_blocks([blocks[0], blocks[1], blocks[0]])
    assert next(pool.free_block_queue.iter_blocks_after(None)) is blocks[0]
    assert blocks[1].ref_cnt == 1
    compat.check(pool)
