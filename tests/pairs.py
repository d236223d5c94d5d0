"""Managers and batches of the package beside the oracle, and the figures that both must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_model import HASH_SEED, BatchRows, OracleRows
from eviction_oracle import make_policy
from oracle import OracleManager
from pool_workload import describe_policy, describe_twin
from settings import Setting
from twins import OracleTwin, PackageTwin, Twins, share_hashes

import pagepool


def oracle_and_package(**options: Any) -> Callable[[Setting, int], Twins]:
    """Return a function that makes twins of the oracle and of a manager with these options."""

    def make(setting: Setting, num_pages: int) -> Twins:
        groups = setting.cache_groups(pagepool)
        oracle = OracleTwin(setting.manager(OracleManager, groups, num_pages))
        package = PackageTwin(setting.manager(pagepool.CacheManager, groups, num_pages, **options))
        return Twins(oracle, package)

    return make


def expected_stats(oracle: OracleManager) -> pagepool.PagePoolStats:
    """Return the oracle's counters."""
    counts = oracle.page_pool.counts
    return pagepool.PagePoolStats(
        num_allocated_pages=counts["allocated"],
        num_freed_pages=counts["freed"],
        num_evicted_pages=counts["evicted"],
        num_cached_pages=counts["cached"],
        num_queried_tokens=counts["queried"],
        num_hit_tokens=counts["hit"],
    )


def make_manager(setting: Setting, num_pages: int, **options: Any) -> pagepool.CacheManager:
    groups = setting.cache_groups(pagepool)
    return setting.manager(pagepool.CacheManager, groups, num_pages, hash_seed=HASH_SEED, **options)


def oracle_and_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    oracle = setting.manager(OracleManager, setting.cache_groups(pagepool), num_pages)
    batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=False)
    return Twins(OracleRows(oracle, setting, num_rows), batch)


POLICIES: list[tuple[str, float | None]] = [("lru", None), ("arc", None), ("arc", 4), ("adaptive", None)]


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
    share_hashes(oracle, manager)
    return oracle, manager


def require_same_policies(twins: Twins) -> None:
    assert describe_twin(twins.oracle.manager.page_pool.policy) == describe_policy(twins.system.manager.page_pool.store)
