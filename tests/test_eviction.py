"""Eviction policies against their plain-Python twins on random work: a pool, a manager, a batch. After each call both must show
the same free queue, in order, the same holders, entries and counters.

PAGEPOOL_TEST_OPERATIONS: a twentieth of so many calls are made in all for pools, for managers and for batches.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from batch_model import BatchRows, OracleRows
from batch_workload import run_batch_workload
from eviction_oracle import make_policy
from oracle import OracleManager
from pool_workload import run_pool_workload
from settings import SETTINGS, Setting
from test_differential import NUM_OPERATIONS, expected_stats
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool

POLICIES: list[tuple[str, float | None]] = [("lru", None), ("arc", None), ("arc", 4), ("adaptive", None)]
HASHING: list[dict[str, Any]] = [{}, {"hash_algo": "sha256"}, {"hash_algo": hash}]
NUM_CALLS = NUM_OPERATIONS // 20
NUM_POOL_CALLS = max(NUM_CALLS // len(POLICIES), 1000)
NUM_SETTING_CALLS = max(NUM_CALLS // len(SETTINGS), 50)
MAX_CALLS_PER_SEED = 3000

policies = pytest.mark.parametrize(("eviction", "ghost_size"), POLICIES)
settings = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


# --- random work --------------------------------------------------------------------------------------------------


@policies
def test_a_pool_does_as_its_twin(eviction: str, ghost_size: float | None) -> None:
    num_seeds = -(-NUM_POOL_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"pool {eviction} {ghost_size}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        run_pool_workload((eviction, ghost_size), seed, -(-NUM_POOL_CALLS // num_seeds))


def turns(setting: Setting, name: str) -> range:
    """Return seeds for a setting: one for each policy, and as many again for more calls."""
    first_seed = zlib.crc32(f"{name} {setting.name}".encode()) & ~3
    num_calls = NUM_SETTING_CALLS // len(POLICIES)
    return range(first_seed, first_seed + len(POLICIES) * -(-num_calls // MAX_CALLS_PER_SEED))


def make_managers(
    setting: Setting, num_pages: int, seed: int, hashing: dict[str, Any]
) -> tuple[OracleManager, pagepool.CacheManager]:
    """Make the oracle, and a manager whose hashes it knows, with the policy whose turn it is."""
    eviction, ghost_size = POLICIES[seed % len(POLICIES)]
    groups = setting.cache_groups(pagepool)
    policy = make_policy(eviction, num_pages, ghost_size)
    oracle = setting.manager(OracleManager, groups, num_pages, policy=policy)
    options = {"hash_seed": seed, "eviction": eviction, "ghost_size": ghost_size} | hashing
    manager = setting.manager(pagepool.CacheManager, groups, num_pages, **options)

    def hash_page(request: Any, page: int) -> int:
        hashes = manager.hasher.start(request, manager._lookups.extend(request, 0))
        manager.hasher.extend(hashes, request, page + 1)
        return hashes.chain[page]

    oracle.keys.hash_page = hash_page
    return oracle, manager


@settings
def test_a_manager_does_as_its_twin(setting: Setting) -> None:
    seeds = turns(setting, "manager")
    for seed in seeds:

        def make_twins(setting: Setting, num_pages: int, seed: int = seed) -> Twins:
            oracle, manager = make_managers(setting, num_pages, seed, HASHING[seed // len(POLICIES) % len(HASHING)])
            return Twins(OracleTwin(oracle), PackageTwin(manager))

        twins = run_workload(setting, make_twins, seed, -(-NUM_SETTING_CALLS // len(seeds)))
        assert twins.system.manager.page_pool.stats == expected_stats(twins.oracle.manager)


@settings
def test_a_batch_does_as_its_twin(setting: Setting) -> None:
    seeds = turns(setting, "batch")
    for seed in seeds:

        def make_twins(setting: Setting, num_pages: int, num_rows: int, seed: int = seed) -> Twins:
            oracle, manager = make_managers(setting, num_pages, seed, {})
            batch = BatchRows(manager, setting, num_rows, with_hashes=False)
            return Twins(OracleRows(oracle, setting, num_rows), batch)

        run_batch_workload(setting, make_twins, seed, -(-NUM_SETTING_CALLS // len(seeds)), trims=True)
