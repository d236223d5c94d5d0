"""Retained and protected pages: against the oracle on random work, with all policies, and what ends them."""

from __future__ import annotations

import zlib
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from batch_model import BatchRows, OracleRows
from batch_workload import run_batch_workload
from eviction_oracle import make_policy
from oracle import OracleManager
from retention_workload import RetainingBatchWorkload, RetainingWorkload
from settings import SETTINGS, Setting
from test_differential import NUM_OPERATIONS
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool
from pagepool.hashing import extra_keys

POLICIES = ("lru", "arc", "adaptive")
NUM_CALLS = max(NUM_OPERATIONS // (10 * len(SETTINGS)), 60)
MAX_CALLS_PER_SEED = 400


@pytest.fixture(autouse=True)
def _nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies go by keys: those of unnamed images must be the same when a seed is repeated."""
    monkeypatch.setattr(extra_keys, "os", SimpleNamespace(urandom=Random(0).randbytes))


def make_managers(setting: Setting, num_pages: int, eviction: str) -> tuple[OracleManager, pagepool.CacheManager]:
    """Make the oracle, and a manager whose hashes it knows."""
    groups = setting.cache_groups(pagepool)
    oracle = setting.manager(OracleManager, groups, num_pages, policy=make_policy(eviction, num_pages))
    manager = setting.manager(pagepool.CacheManager, groups, num_pages, hash_seed="retention", eviction=eviction)

    def hash_page(request: Any, page: int) -> int:
        hashes = manager.hasher.start(request, manager._lookups.extend(request, 0))
        manager.hasher.extend(hashes, request, page + 1)
        return hashes.chain[page]

    oracle.keys.hash_page = hash_page
    return oracle, manager


def seeds_of(name: str) -> range:
    first_seed = zlib.crc32(name.encode())
    return range(first_seed, first_seed + -(-NUM_CALLS // MAX_CALLS_PER_SEED))


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_requests_same_as_oracle(setting: Setting, eviction: str) -> None:
    def make_twins(setting: Setting, num_pages: int) -> Twins:
        oracle, package = make_managers(setting, num_pages, eviction)
        return Twins(OracleTwin(oracle), PackageTwin(package))

    seeds = seeds_of(f"{setting.name} {eviction}")
    for seed in seeds:
        run_workload(setting, make_twins, seed, -(-NUM_CALLS // len(seeds)), RetainingWorkload)


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_rows_same_as_oracle(setting: Setting, eviction: str) -> None:
    def make_twins(setting: Setting, num_pages: int, num_rows: int) -> Twins:
        oracle, package = make_managers(setting, num_pages, eviction)
        return Twins(OracleRows(oracle, setting, num_rows), BatchRows(package, setting, num_rows, with_hashes=False))

    seeds = seeds_of(f"{setting.name} {eviction} rows")
    for seed in seeds:
        run_batch_workload(setting, make_twins, seed, -(-NUM_CALLS // len(seeds)), True, RetainingBatchWorkload)
