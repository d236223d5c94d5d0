"""The package against the oracle on random work. PAGEPOOL_TEST_OPERATIONS is the total number of calls."""

from __future__ import annotations

import itertools
import zlib

import pytest
from pairs import expected_stats, oracle_and_package
from settings import HASHING, NUM_OPERATIONS, SETTINGS, Setting
from workload import run_workload

MAX_CALLS_PER_SEED = 3000


CASES = list(itertools.product(SETTINGS, HASHING))


@pytest.mark.parametrize(("setting", "hashing"), CASES, ids=[f"{setting.name}-{hashing}" for setting, hashing in CASES])
def test_same_as_oracle(setting: Setting, hashing: str) -> None:
    make_twins = oracle_and_package(**HASHING[hashing])
    num_calls_per_case = -(-NUM_OPERATIONS // len(CASES))
    num_seeds = -(-num_calls_per_case // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"{setting.name} {hashing}".encode())
    for seed in range(first_seed, first_seed + num_seeds):
        twins = run_workload(setting, make_twins, seed, -(-num_calls_per_case // num_seeds))
        assert twins.system.manager.page_pool.stats == expected_stats(twins.oracle.manager)
