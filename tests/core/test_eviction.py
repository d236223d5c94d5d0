"""A pool with each policy against its plain-Python twin on random work. After each call both must show the same free queue, in
order, the same holders, entries and counters.

PAGEPOOL_TEST_OPERATIONS: a twentieth of so many calls are made in all.
"""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
from eviction_oracle import Adaptive, hash_key
from pairs import POLICIES
from pool_workload import OracleSide, PackageSide, describe_policy, run_pool_workload
from settings import NUM_OPERATIONS, SETTINGS
from twins import Twins

import pagepool
from pagepool.errors import IntegrityError, RequestTooLargeError

NUM_POOL_CALLS = max(NUM_OPERATIONS // (20 * len(POLICIES)), 500)
MAX_CALLS_PER_SEED = 3000
HASHES = [
    0x8F61977145DABC65,
    0xB4D26CB15EC3F500,
    0xBEAEEFCA4372049D,
    0x7A766744D36CBB2E,
]


# --- random work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_pool_does_as_its_twin(eviction: str) -> None:
    num_seeds = -(-NUM_POOL_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"pool {eviction}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        run_pool_workload(eviction, seed, -(-NUM_POOL_CALLS // num_seeds))


# --- what the random work reaches -----------------------------------------------------------------------------------


REACHED = {
    "remembered", "twins evicted", "pauses", "decisions in a pause", "evicted from a newest end",
    "evicted before older pages", "hits in time", "hits late", "misses in time", "misses late",
    "rests of requests that are new",
}  # fmt: skip


def test_everything_happens() -> None:
    counts: Counter[str] = Counter()
    for seed in (0, 6):
        policy = run_pool_workload("adaptive", seed, 500)
        assert policy is not None
        counts += policy.counts
    assert REACHED - counts.keys() == set()


# --- single calls ---------------------------------------------------------------------------------------------------


def test_a_free_page_with_references_is_whole_once_it_is_touched() -> None:
    pool = pagepool.PagePool(16, True, eviction="adaptive")
    pool.pages[3].incr_ref()
    with pytest.raises(IntegrityError):
        pool.get_new_page_ids(1)
    pool.touch_page_ids([3])
    assert pool.pages[3].ref_cnt == 2
    assert pool.free_page_ids_in_order().tolist() == [1, 2, *range(4, 16)]
    pool.free_page_ids([3, 3])
    pool.check()
    assert sorted(pool.free_page_ids_in_order().tolist()) == list(range(1, 16))


def test_a_key_is_remembered_once() -> None:
    """It is evicted twice, and meanwhile it was cached by somebody who does not ask the policy."""
    pool = pagepool.PagePool(8, True, eviction="adaptive")
    sampled = next(key for key in range(1, 200) if hash_key(key, 0) % 8 == 0)
    for _ in range(2):
        pool.pages[3].page_hash = pagepool.PageHashWithGroupId(pagepool.PageHash(sampled, ()), 0)
        pool.free_page_ids(pool.get_new_page_ids(7))
        pool.check()
        assert sum(tag != 0 for tag, _ in describe_policy(pool.store)["ghosts"]) == 1


def test_a_request_that_a_shard_is_too_short_for_is_not_counted() -> None:
    setting = next(setting for setting in SETTINGS if setting.name == "full 2 shards")
    manager = setting.manager(pagepool.CacheManager, setting.cache_groups(pagepool), 8, eviction="adaptive")
    request = pagepool.EngineRequest("long", list(range(20)))
    with pytest.raises(RequestTooLargeError, match="its shard has 4"):
        manager.allocate_slots(request, 20, dp_shard_hint=1, data_parallel_size=2)
    assert describe_policy(manager.page_pool.store)["counts"] == [0, 0, 0, 0]
    manager.page_pool.get_new_page_ids(7)
    counts = describe_policy(manager.page_pool.store)["counts"]
    assert manager.allocate_slots(request, 16, dp_shard_hint=1, data_parallel_size=2) is None
    assert describe_policy(manager.page_pool.store)["counts"] == counts


# --- the twins --------------------------------------------------------------------------------------------------------


def test_hashes_of_keys() -> None:
    """They are the same in each process."""
    assert [hash_key(key, group_id) for key, group_id in ((0, 0), (1, 0), (0, 1), (1 << 127, 5))] == HASHES


def test_a_decision_for_a_shard_ends_with_its_division() -> None:
    """Shard 0 of 2 is another one than shard 0 of 4."""
    twins = Twins(OracleSide(32, Adaptive(32)), PackageSide(32, "adaptive"))
    page_ids = twins.call("take", 31, {})
    twins.call("cache", page_ids, range(100, 131), 0, 0)
    for name, chosen in (("free", [8, 9]), ("free", [3, 4, 5]), ("touch", [3, 4, 5]), ("free", [3, 4, 5])):
        twins.call(name, chosen)
    assert twins.call("take", 1, {"dp_shard_hint": 0, "data_parallel_size": 4}) == [3]
    assert twins.call("take", 1, {"dp_shard_hint": 0, "data_parallel_size": 2}) == [8]
