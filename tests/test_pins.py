"""Pins of cached pages: against the oracle on random work, their budget, and what ends them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from batch_model import HASH_SEED, BatchRows, OracleRows
from batch_workload import run_batch_workload
from oracle import OracleManager
from pin_workload import PinningBatchWorkload, PinningWorkload
from settings import SETTINGS, Setting
from test_differential import NUM_OPERATIONS
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool

NUM_CALLS = max(NUM_OPERATIONS // (10 * len(SETTINGS)), 60)
MAX_CALLS_PER_SEED = 400
SHARES = (0.2, 0.6, 1.0)


def managers(setting: Setting, num_pages: int, share: float) -> tuple[OracleManager, pagepool.CacheManager]:
    groups = setting.cache_groups(pagepool)
    oracle = setting.manager(OracleManager, groups, num_pages, max_pinned_share=share)
    package = setting.manager(pagepool.CacheManager, groups, num_pages, max_pinned_share=share, hash_seed=HASH_SEED)
    return oracle, package


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_requests_same_as_oracle(setting: Setting, share: float) -> None:
    def make_twins(setting: Setting, num_pages: int) -> Twins:
        oracle, package = managers(setting, num_pages, share)
        return Twins(OracleTwin(oracle), PackageTwin(package))

    num_seeds = -(-NUM_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"{setting.name} {share}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        twins = run_workload(setting, make_twins, seed, -(-NUM_CALLS // num_seeds), PinningWorkload)
        twins.system.manager.check()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_rows_same_as_oracle(setting: Setting, share: float) -> None:
    def make_twins(setting: Setting, num_pages: int, num_rows: int) -> Twins:
        oracle, package = managers(setting, num_pages, share)
        return Twins(OracleRows(oracle, setting, num_rows), BatchRows(package, setting, num_rows, with_hashes=False))

    num_seeds = -(-NUM_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"{setting.name} {share} rows".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        run_batch_workload(setting, make_twins, seed, -(-NUM_CALLS // num_seeds), True, PinningBatchWorkload)
