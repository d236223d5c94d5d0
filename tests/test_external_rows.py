"""Rows that wait for tokens from elsewhere, and leases, on random work: against the oracle, and against the manager.

PAGEPOOL_TEST_OPERATIONS: a fifth of so many calls are made in all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
from batch_workload import run_batch_workload
from external_workload import (
    ExternalBatchRows,
    ExternalManagerRows,
    ExternalOracleRows,
    ExternalStatesWorkload,
    ExternalWorkload,
)
from oracle import OracleManager
from pairs import make_manager
from settings import NUM_OPERATIONS, SETTINGS, STATE_SETTINGS, Setting
from twins import Twins

import pagepool

NUM_CALLS = max(NUM_OPERATIONS // (15 * (2 * len(SETTINGS) + 2 * len(STATE_SETTINGS))), 60)
MAX_CALLS_PER_SEED = 300
STATELESS = [setting for setting in SETTINGS if all(group.kind != "mamba" for group in setting.groups)]


def oracle_and_batch(setting: Setting, num_pages: int, num_rows: int, **options: Any) -> Twins:
    oracle = setting.manager(OracleManager, setting.cache_groups(pagepool), num_pages)
    batch = ExternalBatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=False, **options)
    return Twins(ExternalOracleRows(oracle, setting, num_rows, **options), batch)


def oracle_and_deduping_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    return oracle_and_batch(setting, num_pages, num_rows, dedupe=True)


def manager_and_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    batch = ExternalBatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=True)
    return Twins(ExternalManagerRows(make_manager(setting, num_pages), setting, num_rows), batch)


def check(name: str, setting: Setting, make_twins: Callable[..., Twins], trims: bool, workload: Any) -> None:
    num_seeds = -(-NUM_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"external {name} {setting.name}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        run_batch_workload(setting, make_twins, seed, -(-NUM_CALLS // num_seeds), trims, workload)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_rows_do_as_the_oracle(setting: Setting) -> None:
    check("oracle", setting, oracle_and_batch, True, ExternalWorkload)


@pytest.mark.parametrize("setting", STATELESS, ids=lambda setting: setting.name)
def test_rows_do_as_a_manager(setting: Setting) -> None:
    check("manager", setting, manager_and_batch, False, ExternalWorkload)


@pytest.mark.parametrize("make_twins", [oracle_and_batch, oracle_and_deduping_batch], ids=["plain", "dedupe"])
@pytest.mark.parametrize("setting", STATE_SETTINGS, ids=lambda setting: setting.name)
def test_rows_with_states_do_as_the_oracle(setting: Setting, make_twins: Callable[..., Twins]) -> None:
    check("states", setting, make_twins, True, ExternalStatesWorkload)
