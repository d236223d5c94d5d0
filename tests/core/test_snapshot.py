"""Pools saved and restored: the same pool in every respect, with what its policy keeps, or an error that names the fault."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batch_model import package_pool_state
from hybrids import FULL, PAGE_SIZE, allocate, start, unseal
from hybrids import make_manager as make_hybrid
from refusing import refused
from settings import NUM_OPERATIONS
from sources import run_python

import pagepool
from pagepool import CacheManager, EngineRequest, PagePool, PageTable, RunningBatch, hash_page_tokens
from pagepool._core import HashChain
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError, OutOfPagesError, PageHashError, SnapshotError
from pagepool.page_pool.snapshot import FIELDS, seal

NUM_SEEDS = -(-NUM_OPERATIONS // 40_000)
NUM_DAMAGES = NUM_OPERATIONS // 1000
NUM_SPOILT = min(60, NUM_OPERATIONS // 1000)
POLICIES = "lru", "adaptive"
POLICY_ARRAYS = "policy_marks", "policy_ghosts", "policy_counts", "policy_learned"
UNORDERED = {"cached_page_ids", "cached_group_ids", "cached_keys", "cached_kept", "cached_token_ids", "checksum"}

Arrays = dict[str, npt.NDArray[Any]]

policies = pytest.mark.parametrize("eviction", POLICIES)


def state_of(pool: PagePool) -> tuple[Any, ...]:
    """Return everything that a user can observe of a pool."""
    return package_pool_state(pool, with_hashes=False), [page.page_hash for page in pool.pages], pool.enable_caching


make_manager = partial(make_hybrid, FULL, num_pages=64, max_model_len=256, hash_seed=3)


def run_requests(manager: CacheManager, rng: Random, num_requests: int) -> list[EngineRequest]:
    """Run chats with common beginnings, half of which continue. Returns those."""
    running = []
    for i in range(num_requests):
        request = EngineRequest(f"{i}-{rng.random()}", [rng.randrange(2) for _ in range(rng.randrange(1, 24))])
        if allocate(manager, request) is None:
            continue
        if rng.random() < 0.5:
            manager.free(request)
        else:
            running.append(request)
    return running


def restore(arrays: Arrays) -> PagePool:
    """Restore arrays that have the right checksum, whatever is in them."""
    return PagePool.restore(seal(arrays))


@pytest.fixture
def pool() -> PagePool:
    """Make a pool with held, free, cached and evicted pages, and pages of equal content."""
    manager = make_manager()
    run_requests(manager, Random(5), 20)
    return manager.page_pool


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
    running = run_requests(manager, Random(seed), 30)
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
spec = pagepool.FullAttentionSpec({PAGE_SIZE}, 1, 8, "float16", False)
manager = pagepool.CacheManager(64, [pagepool.CacheGroupSpec(spec)], 256, hash_seed=3, page_pool=pool)
print(manager.get_computed_pages(pagepool.EngineRequest("again", list(range(20))))[1])
"""
    assert run_python("-c", code).stdout == "16\n"


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
    rng = Random(1)
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
def test_wrong_and_missing_arrays_are_refused(pool, change):
    saved = pool.snapshot()
    for name in FIELDS:
        with pytest.raises(SnapshotError, match=name):
            PagePool.restore({**saved, name: change(saved[name])})
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
        ("ref_counts", [], r"pool_sizes: got \[6\], 1 rows of counters and 0 ref counts, allowed: the same"),
        ("pool_sizes", [], r"pool_sizes: got \[\], 1 rows of counters and 6 ref counts"),
        ("pool_sizes", [7], r"pool_sizes: got \[7\], 1 rows of counters and 6 ref counts"),
        ("pool_sizes", [-1], "pool_sizes: got -1"),
        ("pool_sizes", [4, 3], r"pool_sizes: got \[4, 3\], 1 rows of counters and 6 ref counts"),
        ("pool_counters", [[0, -1, 0, 0, 0]], "pool_counters: got -1"),
        ("pool_names", [*b'["a", "b"]'], "names: got 2, allowed: 1"),
        ("pool_names", [*b'["a", "a"]'], "'pool_names' are invalid: allowed: a list of different strings"),
        ("pool_names", [*b"{"], "'pool_names' are invalid"),
        ("pool_names", [*b"[7]"], "'pool_names' are invalid"),
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
    arrays = unseal(pool)
    restore(arrays).check()
    arrays[name] = np.array(values, dtype=arrays[name].dtype)
    with pytest.raises(SnapshotError, match=message):
        restore(arrays)


def test_token_counts_out_of_range_are_refused():
    manager = make_manager(keep_token_ids=True)
    manager.allocate_slots(EngineRequest("prompt", list(range(20))), 20)
    arrays = unseal(manager.page_pool)
    for count in (-1, PAGE_SIZE + 1):
        arrays["cached_token_ids"][2, 0] = count
        with pytest.raises(SnapshotError, match=f"has {count}, allowed: 0 to {PAGE_SIZE}"):
            restore(arrays)


def test_what_is_no_snapshot_is_refused(pool, tmp_path):
    for thing in (None, 5, [], "pool.npz", np.zeros(3)):
        with pytest.raises(ArgumentTypeError, match="snapshot: got"):
            PagePool.restore(thing)
    with pytest.raises(SnapshotError, match="has no 'format'"):
        PagePool.restore({})
    saved = pool.snapshot()
    with pytest.raises(SnapshotError, match=r"got the format b'other', allowed: b'pagepool.PagePool'"):
        PagePool.restore({**saved, "format": np.frombuffer(b"other", dtype=np.uint8)})
    for version in (0, 7, 9):
        with pytest.raises(SnapshotError, match=f"^snapshot: got version {version}, allowed: 8$"):
            PagePool.restore({**saved, "version": np.array([version])})
    np.savez(tmp_path / "objects.npz", **{**saved, "names": np.array([{}], dtype=object)})
    with np.load(tmp_path / "objects.npz") as file, pytest.raises(SnapshotError, match="'names' cannot be read"):
        PagePool.restore(file)


def test_a_file_with_a_flipped_byte_is_refused_or_the_same(pool):
    whole = io.BytesIO()
    np.savez(whole, **pool.snapshot())
    rng = Random(2)
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
    wider = make_hybrid(replace(FULL, page_size=8), num_pages=64, keep_token_ids=True, page_pool=restored)
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


# Pages that are held.


def make_restored() -> CacheManager:
    """Return a manager of a restored pool, whose pages 1 to 6 have two holders, and 7 and 8 one each."""
    manager = make_manager()
    for name in "first", "second":
        start(manager, name, range(25))
    return make_manager(page_pool=PagePool.restore(manager.page_pool.snapshot()))


def test_a_restored_pool_is_emptied() -> None:
    """What takes no reference does not stand in the way."""
    manager = make_restored()
    pool = manager.page_pool
    assert not manager.reset_prefix_cache()
    assert pool.ref_counts().tolist()[:10] == [0, *[2] * 6, 1, 1, 0]
    RunningBatch(manager, PageTable(2, 32, 64))
    assert manager.get_computed_pages(EngineRequest("third", list(range(25))))[1] == 24
    pool.free_page_ids([8])
    pool.pages[1].decr_ref()
    pool.get_new_page_ids(0)
    before = pool.free_page_ids_in_order().tolist()
    assert pool.release_all_held() == 7
    assert pool.free_page_ids_in_order().tolist() == [*before, *range(1, 8)]
    assert not pool.ref_counts().any()
    manager.check()
    assert manager.get_computed_pages(EngineRequest("fourth", list(range(25))))[1] == 24
    assert pool.release_all_held() == 0
    assert manager.reset_prefix_cache()


USES: dict[str, Callable[[CacheManager], Any]] = {
    "a request": lambda manager: manager.allocate_slots(EngineRequest("third", [1]), 1),
    "a row": lambda manager: RunningBatch(manager, PageTable(2, 32, 64)).admit(0, list(range(25))),
    "pages taken": lambda manager: manager.page_pool.get_new_page_ids(1),
    "pages touched": lambda manager: manager.page_pool.touch_page_ids([1]),
    "a reference more": lambda manager: manager.page_pool.pages[1].incr_ref(),
    "a count overwritten": lambda manager: setattr(manager.page_pool.pages[9], "ref_cnt", 1),
}


@pytest.mark.parametrize("use", [*USES, "a pool that was not restored"])
def test_a_pool_that_is_used_is_not_emptied(use: str) -> None:
    manager = make_restored() if use in USES else make_manager()
    USES.get(use, USES["a request"])(manager)
    message = r"^release_all_held: got a pool that was not restored, or was used since, allowed: a freshly restored pool"
    with refused(lambda: manager.page_pool.ref_counts().tolist(), ArgumentError, message):
        manager.page_pool.release_all_held()


# Policies.


def make_used(eviction: str, seed: int = 0, num_shards: int | None = None) -> CacheManager:
    """Return a manager whose pool evicted all pages several times; some are held, some have lost their entries."""
    manager, rng = make_manager(eviction=eviction), Random(seed)
    if num_shards:
        manager.page_pool.get_new_pages(0, dp_shard_hint=0, data_parallel_size=num_shards)
    for _ in range(30):
        for request in run_requests(manager, rng, 12)[::-1]:
            manager.free(request)
    run_requests(manager, rng, 8)
    manager.page_pool.evict_pages(manager.page_pool.free_page_ids_in_order()[3:6])
    assert manager.page_pool.stats.num_evicted_pages > 128
    return manager


@cache
def save_used(eviction: str) -> Arrays:
    return unseal(make_used(eviction).page_pool)


def used_arrays(eviction: str) -> Arrays:
    """Return a copy of the arrays of a pool that was used."""
    return {name: array.copy() for name, array in save_used(eviction).items()}


def go_on(pool: PagePool, seed: int, num_shards: int | None) -> list[Any]:
    """Take, free and hit pages, and return what is seen of it."""
    rng, placement, seen = Random(seed), {}, []
    manager = make_manager(page_pool=pool)
    for _ in range(40):
        if num_shards:
            placement = {"dp_shard_hint": rng.randrange(num_shards), "data_parallel_size": num_shards}
        with contextlib.suppress(OutOfPagesError):
            ids = pool.get_new_page_ids(rng.randrange(5), **placement)
            seen.append(ids.tolist())
            pool.free_page_ids(ids[::-1])
        for request in run_requests(manager, rng, 4):
            seen.append(manager.get_page_ids(request.request_id))
            manager.free(request)
        stats = manager.stats()
        seen.append((pool.free_page_ids_in_order().tolist(), stats.num_hit_pages, stats.num_lru_hit_pages, pool.stats))
    return seen


@policies
@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("seed", range(max(1, NUM_OPERATIONS // 50_000)))
def test_a_restored_pool_goes_on_as_the_saved_one(eviction: str, num_shards: int | None, seed: int) -> None:
    pool = make_used(eviction, seed, num_shards).page_pool
    restored = PagePool.restore(pool.snapshot())
    restored.check()
    assert restored.eviction == eviction
    assert state_of(restored) == state_of(pool)
    assert go_on(restored, seed, num_shards) == go_on(pool, seed, num_shards)
    saved, again = pool.snapshot(), restored.snapshot()
    assert saved.keys() == again.keys()
    for name in saved.keys() - UNORDERED:
        np.testing.assert_array_equal(saved[name], again[name], err_msg=name)
    assert sorted(saved["cached_page_ids"]) == sorted(again["cached_page_ids"])


@policies
def test_without_caching_a_policy_has_nothing_to_save(eviction: str) -> None:
    pool = PagePool(8, enable_caching=False, eviction=eviction)
    pool.get_new_page_ids(3)
    arrays = unseal(pool)
    assert not any(arrays[name].size for name in POLICY_ARRAYS)
    restored = restore(arrays)
    assert (restored.eviction, restored.free_page_ids_in_order().tolist()) == (eviction, [4, 5, 6, 7])


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_ARRAYS)
@pytest.mark.parametrize(
    "change", [lambda array: array[:0], lambda array: array[:-1], lambda array: np.concatenate((array, array))]
)
def test_arrays_of_other_sizes_are_refused(name: str, change: Callable[[Any], Any]) -> None:
    arrays = used_arrays("adaptive")
    arrays[name] = change(arrays[name])
    with pytest.raises(SnapshotError, match=r"^(snapshot: )?the eviction policy: got \d+ bytes, allowed: \d+$"):
        restore(arrays)


@pytest.mark.parametrize(("eviction", "other"), [*permutations(POLICIES, 2)])
def test_arrays_of_another_policy_are_refused(eviction: str, other: str) -> None:
    arrays = used_arrays(eviction)
    restore(arrays).check()
    arrays["eviction"] = unseal(PagePool(64, True, eviction=other))["eviction"]
    with pytest.raises(SnapshotError, match="the eviction policy: got "):
        restore(arrays)


TEXTS: dict[str, tuple[str, ...]] = {
    "names": (
        *("", "1", "[1]", "[[1, 2]]", "[[1, 2, 3, 4]]", "[", "[" * 50_000, "\xff"),
        *('[["a", 2, [3], null]]', '[[1, 2, [3], {"a": 1}]]'),
    ),
    "configuration": ("", "1", "[]", '{"a": [1]}', '{"a": true}', '{"a": 1.5}', "{", "[" * 50_000, "\xff", "nul"),
    "eviction": ("", "null", "fifo", "ADAPTIVE", "adaptive ", "adaptive\0", '"adaptive"', "adaptive" * 10_000, "\xff"),
}
MESSAGES = {
    "names": "'names' are not page hashes",
    "configuration": "'configuration' is invalid",
    "eviction": "^snapshot: eviction: got .*, allowed: 'lru', 'adaptive'$",
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in TEXTS for text in TEXTS[name]], ids=lambda text: ascii(text[:20])
)
def test_texts_that_say_nothing_are_refused(name: str, text: str) -> None:
    arrays = used_arrays("adaptive") | {name: np.frombuffer(text.encode("latin-1"), np.uint8)}
    with pytest.raises(SnapshotError, match=MESSAGES[name]):
        restore(arrays)


def first_free(arrays: Arrays, part: int) -> int:
    """Return the first free page of a part."""
    free_ids = arrays["free_page_ids"]
    page_id: int = free_ids[(arrays["policy_marks"][free_ids] & 3) == part][0]
    return page_id


def first_ghost(arrays: Arrays) -> int:
    place: int = arrays["policy_ghosts"][:, 0].nonzero()[0][0]
    return place


def move_ghosts(arrays: Arrays) -> None:
    arrays["policy_ghosts"] = np.roll(arrays["policy_ghosts"], 8, axis=0)


def repeat_ghost(arrays: Arrays) -> None:
    place = first_ghost(arrays)
    arrays["policy_ghosts"][place // 8 * 8 : place // 8 * 8 + 8] = arrays["policy_ghosts"][place]


DAMAGES: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "another part": (lambda a: a["policy_marks"].put(first_free(a, 1), 2), "policy_counts: got "),
    "no part": (lambda a: a["policy_marks"].put(first_free(a, 1), 0), "policy_counts: got "),
    "a blank page with a time": (lambda a: a["policy_marks"].put(first_free(a, 0), 64), "has the mark 64"),
    "a held page with a time and no part": (lambda a: a["policy_marks"].put(a["ref_counts"].argmax(), 64), "has the mark 64"),
    "the null page with a mark": (lambda a: a["policy_marks"].put(0, 64), "has the mark 64"),
    "other sets": (move_ghosts, "the ghost has tags of other sets"),
    "a key twice": (repeat_ghost, "the ghost has tags of other sets"),
    "a ghost of no part": (lambda a: a["policy_ghosts"][first_ghost(a)].put(1, 64), "the ghost has tags of other sets, or of"),
    "negative hits": (lambda a: a["policy_counts"].put(5, -1), "count 5 of the eviction policy is out of range"),
    "requests without end": (lambda a: a["policy_counts"].put(4, 2**63 - 1), "count 4 of the eviction policy is out of range"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_is_refused(damage: str) -> None:
    arrays = used_arrays("adaptive")
    change, message = DAMAGES[damage]
    change(arrays)
    with pytest.raises(SnapshotError, match=message):
        restore(arrays)


def spoil(array: npt.NDArray[Any], rng: Random) -> npt.NDArray[Any]:
    """Return an array with some bytes, a word of 8 bytes, or all bytes overwritten."""
    values = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    kind = rng.randrange(3)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            values[rng.randrange(len(values))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        start = rng.randrange(len(values) // 8) * 8
        values[start : start + 8] = np.frombuffer(rng.randbytes(8), np.uint8)
    else:
        values[:] = np.frombuffer(rng.randbytes(len(values)), np.uint8)
    return values.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("name", POLICY_ARRAYS)
def test_nonsense_is_refused_or_does_no_harm(name: str) -> None:
    arrays, rng, num_refused = used_arrays("adaptive"), Random(3), 0
    for seed in range(NUM_SPOILT):
        try:
            pool = restore({**arrays, name: spoil(arrays[name], rng)})
        except SnapshotError:
            num_refused += 1
            continue
        go_on(pool, seed, rng.choice((None, 4)))
        pool.check()
    assert num_refused > NUM_SPOILT // 12
