"""Pools saved and restored: the same pool in every respect, or an error that names the fault."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from settings import NUM_OPERATIONS
from snapshots import PAGE_SIZE, make_group, make_manager, run_requests, state_of

import pagepool
from pagepool import CacheManager, EngineRequest, PagePool, hash_page_tokens
from pagepool._core import HashChain
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, PageHashError, SnapshotError
from pagepool.page_pool.snapshot import FIELDS, seal

NUM_SEEDS = -(-NUM_OPERATIONS // 40_000)
NUM_DAMAGES = NUM_OPERATIONS // 1000


@pytest.fixture
def pool() -> PagePool:
    """Make a pool with held, free, cached and evicted pages, and pages of equal content."""
    manager = make_manager()
    run_requests(manager, random.Random(5), 20)
    return manager.page_pool


def arrays_of(pool: PagePool) -> dict[str, Any]:
    """Return the arrays of a snapshot that `seal` seals."""
    return {name: array for name, array in pool.snapshot().items() if name not in ("format", "version", "checksum")}


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_token_ids": True},
        {"hash_algo": "sha256"},
        {"hash_algo": hash},
        {"hash_algo": lambda content: 7},
        {"enable_caching": False},
    ],
    ids=["siphash128", "token ids", "sha256", "hash", "constant", "no caching"],
)
def test_a_restored_pool_is_the_same(options, seed, tmp_path):
    manager = make_manager(**options)
    running = run_requests(manager, random.Random(seed), 30)
    np.savez(tmp_path / "pool.npz", **manager.page_pool.snapshot())
    with np.load(tmp_path / "pool.npz") as file:
        restored = PagePool.restore(file)
    restored.check()
    assert state_of(restored) == state_of(manager.page_pool)
    assert running or seed


def test_another_process_restores_it(tmp_path):
    manager = make_manager()
    manager.allocate_slots(EngineRequest("prompt", list(range(20))), 20)
    np.savez(tmp_path / "pool.npz", **manager.page_pool.snapshot())
    code = f"""
import numpy, pagepool
pool = pagepool.PagePool.restore(numpy.load({str(tmp_path / "pool.npz")!r}))
spec = pagepool.FullAttentionSpec({PAGE_SIZE}, 1, 8, "float32", False)
manager = pagepool.CacheManager(64, [pagepool.CacheGroupSpec(spec)], 256, hash_seed=3, page_pool=pool)
print(manager.get_computed_pages(pagepool.EngineRequest("again", list(range(20))))[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "16\n"


def test_a_snapshot_is_a_copy(pool):
    saved = pool.snapshot()
    before = {name: array.copy() for name, array in saved.items()}
    pool.free_page_ids(np.flatnonzero(pool.ref_counts()).astype(np.int32))
    pool.get_new_pages(5)
    assert all((saved[name] == before[name]).all() for name in before)
    assert state_of(PagePool.restore(saved)) == state_of(PagePool.restore(before))
    assert not any(array.dtype.hasobject for array in saved.values())


def test_every_changed_byte_is_noticed(pool):
    saved = pool.snapshot()
    rng = random.Random(1)
    for name, array in saved.items():
        for _ in range(NUM_DAMAGES // 4 if array.size else 0):
            damaged = {other: values.copy() for other, values in saved.items()}
            damaged[name].reshape(-1).view(np.uint8)[rng.randrange(array.nbytes)] ^= 1 << rng.randrange(8)
            if name == "enable_caching":
                damaged[name][:] = not array[0]
            with pytest.raises(SnapshotError, match=r"checksum|format|version"):
                PagePool.restore(damaged)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.astype(np.float32),
        lambda array: array.reshape(-1)[:0].reshape((0,) * (array.ndim + 1)),
        lambda array: np.array([{}], dtype=object),
        lambda array: array.tolist(),
        lambda array: None,
    ],
    ids=["dtype", "shape", "objects", "list", "None"],
)
def test_wrong_arrays_are_refused(pool, change):
    saved = pool.snapshot()
    for name in FIELDS:
        with pytest.raises(SnapshotError, match=name):
            PagePool.restore({**saved, name: change(saved[name])})


def test_missing_arrays_are_refused(pool):
    saved = pool.snapshot()
    for name in FIELDS:
        with pytest.raises(SnapshotError, match=f"has no '{name}'"):
            PagePool.restore({other: array for other, array in saved.items() if other != name})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ref_counts", [0, 1, -1, 1, 0, 0], "page 2 has -1 references"),
        ("ref_counts", [1, 1, 1, 1, 0, 0], "page 0 has 1 references"),
        ("ref_counts", [0, 1, 1, 0, 0, 0], "page 3 has 0 references and is not in the free queue"),
        ("ref_counts", [0, 1, 1, 1, 2, 0], "page 4 has 2 references and is in the free queue"),
        ("ref_counts", [0, 1, 1, (1 << 31) - 1, 0, 0], "page 3 has 2147483647 references, allowed: fewer than 2147483647"),
        ("ref_counts", [], "num_pages: got 0"),
        ("free_page_ids", [4, 4], r"free_page_ids: got 4 \(at 1\)"),
        ("free_page_ids", [4, 0], r"free_page_ids: got 0 \(at 1\)"),
        ("free_page_ids", [4, 6], r"free_page_ids: got 6 \(at 1\)"),
        ("free_page_ids", [-7, 5], r"free_page_ids: got -7 \(at 0\)"),
        ("cached_page_ids", [1, 1], r"cached_page_ids: got 1 \(at 1\)"),
        ("cached_page_ids", [1, 0], r"cached_page_ids: got 0 \(at 1\)"),
        ("cached_page_ids", [1, 99], r"cached_page_ids: got 99 \(at 1\)"),
        ("cached_page_ids", [1], "cached pages: got 1 ids, 2 groups, 2 keys"),
        ("cached_group_ids", [0, -2], r"cached_group_ids: got -2 \(at 1\)"),
        ("cached_group_ids", [0, 1 << 30], r"cached_group_ids: got 1073741824 \(at 1\)"),
        ("counters", [0, 0, 0, -1, 0, 0], "counters: got"),
        ("num_shards", [4], "data_parallel_size: got 4"),
        ("num_shards", [-1], "data_parallel_size: got -1"),
        ("enable_caching", [False], "allowed without prefix caching: none"),
    ],
)
def test_contradictions_are_refused_even_with_the_right_checksum(name, values, message):
    pool = PagePool(6, enable_caching=True)
    request = EngineRequest("r", list(range(8)))
    pool.cache_full_pages(request, pool.get_new_pages(3), [], 0, 2, PAGE_SIZE, 0)
    arrays = arrays_of(pool)
    PagePool.restore(seal(arrays)).check()
    arrays[name] = np.array(values, dtype=arrays[name].dtype)
    with pytest.raises(SnapshotError, match=message):
        PagePool.restore(seal(arrays))


NO_HASHES = (
    *("", "1", "[1]", "[[1, 2]]", "[[1, 2, 3, 4]]", "[", "[" * 50000, "\xff"),
    *('[["a", 2, [3], null]]', '[[1, 2, [3], {"a": 1}]]'),
)


def test_names_that_are_no_hashes_are_refused(pool):
    for text in NO_HASHES:
        names = np.frombuffer(text.encode("latin-1"), dtype=np.uint8)
        with pytest.raises(SnapshotError, match="'names' are not page hashes"):
            PagePool.restore(seal({**arrays_of(pool), "names": names}))


def test_token_counts_out_of_range_are_refused():
    manager = make_manager(keep_token_ids=True)
    manager.allocate_slots(EngineRequest("prompt", list(range(20))), 20)
    arrays = arrays_of(manager.page_pool)
    for count in (-1, PAGE_SIZE + 1):
        arrays["cached_token_ids"][2, 0] = count
        with pytest.raises(SnapshotError, match=f"has {count}, allowed: 0 to {PAGE_SIZE}"):
            PagePool.restore(seal(arrays))


def test_what_is_no_snapshot_is_refused(pool, tmp_path):
    for thing in (None, 5, [], "pool.npz", np.zeros(3)):
        with pytest.raises(ArgumentTypeError, match="snapshot: got"):
            PagePool.restore(thing)
    with pytest.raises(SnapshotError, match="has no 'format'"):
        PagePool.restore({})
    saved = pool.snapshot()
    with pytest.raises(SnapshotError, match=r"format is b'other', allowed: b'pagepool.PagePool'"):
        PagePool.restore({**saved, "format": np.frombuffer(b"other", dtype=np.uint8)})
    with pytest.raises(SnapshotError, match="version is 4, allowed: 1 to 3"):
        PagePool.restore({**saved, "version": np.array([4])})
    np.savez(tmp_path / "objects.npz", **{**saved, "names": np.array([{}], dtype=object)})
    with np.load(tmp_path / "objects.npz") as file, pytest.raises(SnapshotError, match="'names' cannot be read"):
        PagePool.restore(file)


def test_a_file_with_a_flipped_byte_is_refused_or_the_same(pool):
    whole = io.BytesIO()
    np.savez(whole, **pool.snapshot())
    rng = random.Random(2)
    for _ in range(NUM_DAMAGES):
        damaged = bytearray(whole.getvalue())
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            file = np.load(io.BytesIO(damaged))
        except Exception:
            continue  # refused by numpy
        with file:
            try:
                restored = PagePool.restore(file)
            except SnapshotError:
                continue
            assert state_of(restored) == state_of(pool)


def test_a_damaged_pool_is_not_saved(pool):
    held = next(page for page in pool.pages[1:] if page.ref_cnt)
    held.ref_cnt = 0
    with pytest.raises(IntegrityError, match=f"page {held.page_id} "):
        pool.snapshot()


def test_hashes_of_opaque_objects_are_not_saved():
    pool = PagePool(4, enable_caching=True)
    page_hash = hash_page_tokens(lambda content: 1, None, [1, 2], (("opaque", object()),))
    pool.get_new_pages(1)[0].page_hash = pagepool.PageHashWithGroupId(page_hash, 0)
    with pytest.raises(ArgumentError, match="page hash: got object in one"):
        pool.snapshot()


def test_hashes_of_numpy_ints_are_saved_as_ints():
    pool = PagePool(4, enable_caching=True)
    page_hash = hash_page_tokens(hash, None, np.array([1, 2], dtype=np.int32), (("salt", "ä", b"\0"), None))
    pool.get_new_pages(1)[0].page_hash = pagepool.PageHashWithGroupId(page_hash, 3)
    restored = PagePool.restore(pool.snapshot())
    assert state_of(restored) == state_of(pool)
    assert type(restored.pages[1].page_hash.page_hash.token_ids[0]) is int


def test_a_manager_takes_only_a_pool_that_fits(pool):
    for options in ({"num_pages": 65}, {"enable_caching": False}):
        with pytest.raises(ArgumentError, match="page_pool: got 64 pages, caching True"):
            make_manager(**options, page_pool=pool)


def test_a_pool_that_kept_tokens_goes_on_keeping_them():
    pool = PagePool(64, enable_caching=True)
    pool.store.keep_token_ids(PAGE_SIZE)
    chain = HashChain(PAGE_SIZE, bytes(16), keep_token_ids=True)
    chain.extend(list(range(8)))
    pool.store.enter_pages(pool.store.take(2), chain, 0, 0)
    restored = PagePool.restore(pool.snapshot())
    wider = CacheManager(64, [make_group(8)], max_model_len=256, hash_seed=3, keep_token_ids=True, page_pool=restored)
    wider.allocate_slots(EngineRequest("other", list(range(8))), 8)
    kept = [page.page_hash.page_hash.token_ids for page in restored.pages[1:4]]
    assert kept == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7)]
    restored.check()
    with pytest.raises(PageHashError, match="has a hash already"):
        restored.pages[1].page_hash = restored.pages[2].page_hash


def test_groups_that_differ_in_high_bits_alone_are_told_apart() -> None:
    """The hash of a key's slot has room for 24 bits of the group."""
    pool = PagePool(8, enable_caching=True)
    pool.store.take(2)
    pool.store.enter(1, 5, 0)
    pool.store.enter(2, 5, 1 << 24)
    pool.check()
    PagePool.restore(pool.snapshot()).check()
