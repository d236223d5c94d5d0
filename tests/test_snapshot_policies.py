"""Pools with an eviction policy saved and restored: what the policy keeps is there again, or an error names the fault.

That a restored pool goes on as the saved one is part of the random work of `pool_workload`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from settings import NUM_OPERATIONS
from snapshots import make_manager, run_requests, state_of

from pagepool import CacheManager, PagePool
from pagepool.errors import OutOfPagesError, SnapshotError
from pagepool.page_pool.snapshot import FIRST_VERSIONS, seal

SEALED = "format", "version", "checksum"
POLICIES = "lru", "arc", "adaptive"
POLICY_ARRAYS = "policy_marks", "policy_ghosts", "policy_counts", "policy_learned"
UNORDERED = {"cached_page_ids", "cached_group_ids", "cached_keys", "cached_token_ids", "checksum"}

NUM_DAMAGES = min(60, NUM_OPERATIONS // 1000)

Arrays = dict[str, npt.NDArray[Any]]

policies = pytest.mark.parametrize("eviction", POLICIES)
learning = pytest.mark.parametrize("eviction", POLICIES[1:])


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


def arrays_of(pool: PagePool) -> Arrays:
    return {name: array for name, array in pool.snapshot().items() if name not in SEALED}


@cache
def save_used(eviction: str) -> Arrays:
    return arrays_of(make_used(eviction).page_pool)


def used_arrays(eviction: str) -> Arrays:
    """Return a copy of the arrays of a pool that was used."""
    return {name: array.copy() for name, array in save_used(eviction).items()}


def restore(arrays: Arrays) -> PagePool:
    """Restore arrays that have the right checksum, whatever is in them."""
    return PagePool.restore(seal(arrays))


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
    arrays = arrays_of(pool)
    assert not any(arrays[name].size for name in POLICY_ARRAYS)
    restored = restore(arrays)
    assert (restored.eviction, restored.free_page_ids_in_order().tolist()) == (eviction, [4, 5, 6, 7])


@pytest.mark.parametrize("version", [1, 2])
def test_snapshots_of_former_versions_are_of_pools_with_lru(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_used("lru").page_pool
    arrays = {name: array for name, array in arrays_of(pool).items() if FIRST_VERSIONS.get(name, 1) <= version}
    with monkeypatch.context() as former:
        former.setattr("pagepool.page_pool.snapshot.VERSION", version)
        snapshot = seal(arrays)
    assert snapshot["version"].tolist() == [version]
    restored = PagePool.restore(snapshot)
    assert (restored.eviction, restored.store.ghost_size) == ("lru", None)
    assert state_of(restored) == state_of(pool)
    assert go_on(restored, 1, None) == go_on(pool, 1, None)


# --- what is refused ----------------------------------------------------------------------------------------------


@learning
@pytest.mark.parametrize("name", POLICY_ARRAYS)
@pytest.mark.parametrize(
    "change", [lambda array: array[:0], lambda array: array[:-1], lambda array: np.concatenate((array, array))]
)
def test_arrays_of_other_sizes_are_refused(eviction: str, name: str, change: Callable[[Any], Any]) -> None:
    arrays = used_arrays(eviction)
    arrays[name] = change(arrays[name])
    with pytest.raises(SnapshotError, match=r"^(snapshot: )?the eviction policy: got \d+ bytes, allowed: \d+$"):
        restore(arrays)


@pytest.mark.parametrize(("eviction", "other"), [*permutations(POLICIES, 2)])
def test_arrays_of_another_policy_are_refused(eviction: str, other: str) -> None:
    arrays = used_arrays(eviction)
    restore(arrays).check()
    arrays["eviction"] = arrays_of(PagePool(64, True, eviction=other))["eviction"]
    with pytest.raises(SnapshotError, match="the eviction policy: got "):
        restore(arrays)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "1", "[]", "{}", "[", "[" * 50_000, '"arc"', '["arc"]', '["arc", null, 1]', "\xff"),
        *('["fifo", null]', '["ARC", null]', "[1, null]", "[null, null]", '[["arc"], null]', '[{"arc": 1}, null]'),
        *('["arc", 0]', '["arc", -1]', '["arc", 65]', '["arc", NaN]', '["arc", Infinity]', '["arc", 1e999]', '["lru", 1]'),
        *('["arc", "1"]', '["arc", true]', '["arc", [1]]', f'["arc", 1{"0" * 400}]', f'["arc", 1{"0" * 9000}]', '["arc", 2]'),
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_what_names_no_policy_is_refused(text: str) -> None:
    arrays = used_arrays("arc")
    arrays["eviction"] = np.frombuffer(text.encode("latin-1"), np.uint8)
    with pytest.raises(SnapshotError):
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


@learning
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_is_refused(eviction: str, damage: str) -> None:
    arrays = used_arrays(eviction)
    change, message = DAMAGES[damage]
    change(arrays)
    with pytest.raises(SnapshotError, match=message):
        restore(arrays)


@pytest.mark.parametrize(("name", "columns"), [("policy_marks", ()), ("policy_ghosts", (1,))])
def test_other_marks_of_arc_are_refused(name: str, columns: tuple[int, ...]) -> None:
    """Those of pages are parts, by which ghosts are counted; those of ghosts number the evictions in the logs."""
    arrays = used_arrays("arc")
    for place in arrays[name][:, 0].nonzero()[0] if columns else range(len(arrays[name])):  # keys, or pages
        damaged = {**arrays, name: arrays[name].copy()}
        damaged[name][(place, *columns)] |= 0x7FFFFFF0
        with pytest.raises(SnapshotError):
            restore(damaged)


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


@learning
@pytest.mark.parametrize("name", POLICY_ARRAYS)
def test_nonsense_is_refused_or_does_no_harm(eviction: str, name: str) -> None:
    arrays, rng, num_refused = used_arrays(eviction), Random(3), 0
    for seed in range(NUM_DAMAGES):
        try:
            pool = restore({**arrays, name: spoil(arrays[name], rng)})
        except SnapshotError:
            num_refused += 1
            continue
        go_on(pool, seed, rng.choice((None, 4)))
        pool.check()
    assert num_refused > NUM_DAMAGES // 12


def test_logs_of_arc_that_would_end_are_refused() -> None:
    """The numbers of evictions begin at any count, and stay countable."""
    arrays = arrays_of(PagePool(64, True, eviction="arc"))
    starts, stops = slice(6, 8), slice(10, 12)
    for stop, is_right in ((0, True), (1 << 40, True), ((1 << 63) - 1, False)):
        learned = arrays["policy_learned"].copy()
        learned.view(np.int64)[starts] = learned.view(np.int64)[stops] = stop
        with contextlib.nullcontext() if is_right else pytest.raises(SnapshotError, match="'arc' has counted cannot be"):
            go_on(restore({**arrays, "policy_learned": learned}), 1, None)
