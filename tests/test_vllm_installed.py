"""The adapter with vLLM itself, if it is installed: what was recorded of it, and pools of both kinds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagepool.compat import vllm
from pagepool.compat.vllm.checks import import_homes, record, version_of
from pagepool.compat.vllm.engine import DIGESTS, OURS, POOL, SIGNATURES
from pagepool.errors import CompatError

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # of torch, while vLLM's modules are imported


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    """Let each test find vLLM's own definitions, and no pool of the tests before."""
    vllm.uninstall()
    import_homes()
    gc.collect()
    yield
    vllm.uninstall()


def make_pool(num_blocks: int = 9) -> Any:
    return sys.modules[POOL].BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=4)


def use(pool: Any) -> None:
    """Take, cache, touch and give back blocks, with a check after each call."""
    blocks = pool.get_new_blocks(4)
    pool._insert_block_hash(b"hash\0\0\0\0", blocks[0], 4)
    vllm.check(pool)
    pool.touch(blocks[:2])
    vllm.check(pool)
    pool.free_blocks(blocks)
    vllm.check(pool)
    pool.free_blocks(blocks[:2])
    vllm.check(pool)
    assert [block.block_hash for block in pool.get_cached_block(b"hash", [0])] == [b"hash\0\0\0\0"]
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1


@pytest.mark.skipif(version_of() != "0.33.0", reason="the tables were recorded from vLLM 0.33.0")
def test_the_tables_are_those_of_the_recorded_version() -> None:
    assert record(import_homes()) == (SIGNATURES, DIGESTS)


def test_pools_of_both_kinds_pass_the_check() -> None:
    use(make_pool())
    gc.collect()
    with vllm.installed():
        pool = make_pool()
        use(pool)
        assert {type(value).__module__ for value in (pool.blocks[0], pool.free_block_queue)} == {f"{OURS}.blocks"}


def test_a_pool_that_was_made_meanwhile_lives_on() -> None:
    with vllm.installed():
        pool = make_pool()
        use(pool)
    use(pool)
    assert pool.reset_prefix_cache()
    use(pool)
    with vllm.installed():
        use(pool)


def test_a_pool_that_was_made_before_is_refused() -> None:
    pool = make_pool()
    with pytest.raises(CompatError, match="got 1 BlockHashToBlockMap, 1 FreeKVCacheBlockQueue, 11 KVCacheBlock; install first"):
        vllm.install()
    use(pool)
