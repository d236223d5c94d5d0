"""The adapter with vLLM itself, if it is installed: what was recorded of it, and pools of both kinds."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagepool.compat import vllm
from pagepool.compat.vllm.checks import import_homes, record, version_of
from pagepool.compat.vllm.engine import CHANGES, MANAGER, OURS, POOL, UTILS
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
    gc.collect()  # classes too


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


@pytest.mark.skipif(version_of() not in CHANGES, reason="the tables were recorded from other versions of vLLM")
def test_the_tables_are_those_of_the_recorded_version() -> None:
    assert record(import_homes()) == CHANGES[version_of()]


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


# Another package's pool, and its wrapper around a manager's method: as kvcached has them.


def replace_pools(manager: Any, pool: Any) -> None:
    """Give a manager another pool, as kvcached does at the end of the coordinator's constructor."""
    manager.block_pool = manager.coordinator.block_pool = pool
    for group in manager.coordinator.single_type_managers:
        group.block_pool, group._null_block = pool, pool.null_block


def allocate_with_elastic_pool() -> list[Any]:
    """Wrap vLLM's method, and return the ids of the blocks that a request gets from a subclass of vLLM's pool."""
    manager_class = sys.modules[MANAGER].KVCacheManager
    allocate, calls = manager_class.allocate_slots, []

    def allocate_slots(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        return allocate(self, *args, **options)

    manager_class.allocate_slots = allocate_slots
    try:
        return [*allocate_from(type("Elastic", (sys.modules[POOL].BlockPool,), {"__module__": "kvcached"})), len(calls)]
    finally:
        manager_class.allocate_slots = allocate


def allocate_from(pool_class: Any) -> list[Any]:
    engine = importlib.import_module("vllm_engine")
    manager = engine.make_manager(40, 512, (None, 32))
    replace_pools(manager, pool_class(num_gpu_blocks=40, enable_caching=True, hash_block_size=16))
    tokens, found = list(range(100)), []
    for name in "ab":
        request = engine.make_request(name, tokens, engine.make_hasher(), engine.make_sampling(8))
        hits, num_hits, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(tokens) - num_hits, num_hits, hits)
        found += [num_hits, manager.get_block_ids(name)]
        manager.free(request)
    vllm.check(manager)
    return found


def test_a_pool_of_another_package_that_comes_later() -> None:
    """It is served as without pagepool; the report names what was replaced."""
    expected = allocate_with_elastic_pool()
    assert (expected[2], expected[-1]) == (96, 2)
    gc.collect()
    with vllm.installed():
        assert allocate_with_elastic_pool() == expected


def test_a_pool_of_another_package_that_comes_first() -> None:
    """What knows nothing of its pool is left to vLLM."""
    pool_class = type("Elastic", (sys.modules[POOL].BlockPool,), {"__module__": "kvcached"})
    expected = allocate_from(pool_class)
    gc.collect()
    with vllm.installed():
        states = dict(vllm.report().parts)
        assert [name for name in states if states[name] == "used"] == ["blocks", "hasher"]
        assert "kvcached.Elastic" in states["pool"]
        assert allocate_from(pool_class) == expected


# Patched methods: as vllm-ascend 0.23 has them, which call what was there.


def wrap(method: Any) -> Any:
    return lambda self, blocks: method(self, list(blocks))


def patch_queue() -> None:
    """Wrap two methods of vLLM's pool and queue."""
    for owner, name in ((sys.modules[POOL].BlockPool, "free_blocks"), (sys.modules[UTILS].FreeKVCacheBlockQueue, "append_n")):
        setattr(owner, name, wrap(getattr(owner, name)))


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Take the patches back at the end."""
    pool_class, queue_class = sys.modules[POOL].BlockPool, sys.modules[UTILS].FreeKVCacheBlockQueue
    methods = pool_class.free_blocks, queue_class.append_n
    yield
    pool_class.free_blocks, queue_class.append_n = methods


@pytest.mark.usefixtures("unpatched")
def test_patches_that_come_first() -> None:
    """The parts that call what is patched are left to vLLM."""
    patch_queue()
    with vllm.installed():
        states = dict(vllm.report().parts)
        assert [name for name in states if states[name] == "used"] == ["hasher"]
        use(make_pool())


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_patches_that_come_later(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the compiled queue is refused, and that of the pool's method shows in the report."""
    monkeypatch.setenv(vllm.EVICTION_VARIABLE, eviction)
    with vllm.installed():
        with pytest.raises(CompatError, match=r"append_n of pagepool\.compat\.vllm\..*Queue: got <function "):
            patch_queue()
        states = dict(vllm.report().parts)
        assert [name for name in states if states[name] == "used"] == ["blocks", "hasher", "hits", "slots"]
        assert not vllm.is_installed()
        use(make_pool())
