"""The package against the oracle on random work. PAGEPOOL_TEST_OPERATIONS is the total number of calls."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from oracle import OracleManager
from settings import SETTINGS, Setting
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool

NUM_OPERATIONS = int(os.environ.get("PAGEPOOL_TEST_OPERATIONS", "200000"))
MAX_CALLS_PER_SEED = 3000


def weak_hash(content: Any) -> int:
    """Return a hash that collides often, like one known to an attacker."""
    return hash(content) % 5


HASHING: dict[str, dict[str, Any]] = {
    "siphash128": {},
    "siphash128 with token ids": {"keep_token_ids": True},
    "sha256": {"hash_algo": "sha256"},
    "builtin": {"hash_algo": hash},
    "weak": {"hash_algo": weak_hash},
}
CASES = list(itertools.product(SETTINGS, HASHING))


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


@pytest.mark.parametrize(("setting", "hashing"), CASES, ids=[f"{setting.name}-{hashing}" for setting, hashing in CASES])
def test_same_as_oracle(setting: Setting, hashing: str) -> None:
    make_twins = oracle_and_package(**HASHING[hashing])
    num_calls_per_case = -(-NUM_OPERATIONS // len(CASES))
    num_seeds = -(-num_calls_per_case // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"{setting.name} {hashing}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        twins = run_workload(setting, make_twins, seed, -(-num_calls_per_case // num_seeds))
        assert twins.system.manager.page_pool.stats == expected_stats(twins.oracle.manager)
