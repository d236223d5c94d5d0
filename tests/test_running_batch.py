"""A running batch against the oracle and against the manager on random work. PAGEPOOL_TEST_OPERATIONS: see test_differential."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from batch_model import HASH_SEED, BatchRows, ManagerRows, OracleRows
from batch_workload import run_batch_workload
from oracle import OracleManager
from settings import SETTINGS, Setting
from test_differential import NUM_OPERATIONS
from twins import Twins

import pagepool

NUM_CALLS = max(NUM_OPERATIONS // 10 // (2 * len(SETTINGS)), 50)
MAX_CALLS_PER_SEED = 200


def make_manager(setting: Setting, num_pages: int, **options: Any) -> pagepool.CacheManager:
    groups = setting.cache_groups(pagepool)
    return setting.manager(pagepool.CacheManager, groups, num_pages, hash_seed=HASH_SEED, **options)


def oracle_and_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    oracle = setting.manager(OracleManager, setting.cache_groups(pagepool), num_pages)
    batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=False)
    return Twins(OracleRows(oracle, setting, num_rows), batch)


def manager_and_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=True)
    return Twins(ManagerRows(make_manager(setting, num_pages), setting, num_rows), batch)


TWINS = {"oracle": (oracle_and_batch, True), "manager": (manager_and_batch, False)}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("model", TWINS)
def test_same_as_row_by_row(setting: Setting, model: str) -> None:
    make_twins, trims = TWINS[model]
    num_seeds = -(-NUM_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"{setting.name} {model}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        run_batch_workload(setting, make_twins, seed, -(-NUM_CALLS // num_seeds), trims)
