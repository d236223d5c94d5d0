"""Events against the oracle on random work, what each field says, and what is refused.

PAGEPOOL_TEST_OPERATIONS: a tenth of so many calls are made in all for each of the two random tests.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from batch_model import BatchRows, OracleRows
from batch_workload import run_batch_workload
from oracle import OracleManager
from settings import SETTINGS, Setting
from test_differential import HASHING, NUM_OPERATIONS
from test_running_batch import make_manager
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")

from router import Telling

CACHING = [setting for setting in SETTINGS if setting.enable_caching]
ALGORITHMS = {name: options for name, options in HASHING.items() if "keep_token_ids" not in options}
ALGORITHMS["sha256_cbor"] = {"hash_algo": "sha256_cbor", "hash_seed": 7}
NUM_CALLS = max(NUM_OPERATIONS // (10 * len(CACHING)), 50)
PERIODS = (1, 2, 7, 30)


class ToldTwins(Twins):
    """Twins whose second half is told of by events, every so many calls."""

    def __init__(self, oracle: Any, system: Any, period: int, hashes_as_bytes: bool) -> None:
        super().__init__(oracle, system)
        self.telling = Telling(system.manager, oracle.manager, hashes_as_bytes)
        self.period = period

    def compare_states(self) -> None:
        super().compare_states()
        if self.num_calls % self.period == 0:
            self.telling.check()


@pytest.mark.parametrize("setting", CACHING, ids=lambda setting: setting.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_router_knows_what_a_manager_has_cached(setting: Setting, algorithm: str) -> None:
    if algorithm == "sha256_cbor":
        pytest.importorskip("cbor2")
    seed = zlib.crc32(f"{setting.name} {algorithm} events".encode())

    def make_twins(setting: Setting, num_pages: int) -> Twins:
        groups = setting.cache_groups(pagepool)
        oracle = OracleTwin(setting.manager(OracleManager, groups, num_pages))
        package = PackageTwin(setting.manager(pagepool.CacheManager, groups, num_pages, **ALGORITHMS[algorithm]))
        return ToldTwins(oracle, package, PERIODS[seed % 4], seed % 8 >= 4)

    run_workload(setting, make_twins, seed, NUM_CALLS // len(ALGORITHMS) + 50)


@pytest.mark.parametrize("hashes_as_bytes", [False, True])
@pytest.mark.parametrize("setting", CACHING, ids=lambda setting: setting.name)
def test_a_router_knows_what_a_batch_has_cached(setting: Setting, hashes_as_bytes: bool) -> None:
    seed = zlib.crc32(f"{setting.name} batch events".encode()) + hashes_as_bytes

    def make_twins(setting: Setting, num_pages: int, num_rows: int) -> Twins:
        oracle = OracleRows(setting.manager(OracleManager, setting.cache_groups(pagepool), num_pages), setting, num_rows)
        batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=False)
        return ToldTwins(oracle, batch, PERIODS[seed % 4], hashes_as_bytes)

    run_batch_workload(setting, make_twins, seed, NUM_CALLS // 2 + 50, trims=True)
