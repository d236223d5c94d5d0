"""A manager and a running batch with a host tier against the oracle on random work. Transfers end late, in any order, and fail.

PAGEPOOL_TEST_OPERATIONS: a tenth of so many calls are made in all.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator

import pytest
from batch_workload import run_batch_workload
from pairs import expected_stats, require_same_policies
from settings import NUM_OPERATIONS, Setting
from tier_workload import (
    TIERED_SETTINGS,
    RetainingTieredBatchWorkload,
    RetainingTieredWorkload,
    TieredBatchRows,
    TieredBatchWorkload,
    TieredOracleRows,
    TieredOracleTwin,
    TieredPackageTwin,
    TieredWorkload,
    make_tiered_managers,
)
from twins import Twins
from workload import run_workload

MAX_CALLS_PER_SEED = 400
NUM_CALLS = max(NUM_OPERATIONS // (10 * 2 * len(TIERED_SETTINGS)), 50)
NUM_SEEDS = -(-NUM_CALLS // MAX_CALLS_PER_SEED)

pytestmark = pytest.mark.usefixtures("same_nonces")
settings = pytest.mark.parametrize("setting", TIERED_SETTINGS, ids=lambda setting: setting.name)


def seeds_of(name: str) -> Iterator[int]:
    """Return the seeds of a case: they choose what is evicted first, and the options of the tier."""
    first_seed = zlib.crc32(f"tier {name}".encode())
    return iter(range(first_seed, first_seed + NUM_SEEDS))


def run_manager(setting: Setting, seed: int, num_calls: int) -> Twins:
    """Run a seed's workload on a manager and the oracle."""

    def make_twins(setting: Setting, num_pages: int) -> Twins:
        oracle, manager = make_tiered_managers(setting, num_pages, seed)
        return Twins(TieredOracleTwin(oracle), TieredPackageTwin(oracle, manager))

    return run_workload(setting, make_twins, seed, num_calls, RetainingTieredWorkload if seed % 2 else TieredWorkload)


@settings
def test_a_manager_does_as_the_oracle(setting: Setting) -> None:
    for seed in seeds_of(f"manager {setting.name}"):
        twins = run_manager(setting, seed, NUM_CALLS // NUM_SEEDS)
        assert twins.system.manager.page_pool.stats == expected_stats(twins.oracle.manager)
        require_same_policies(twins)


@settings
def test_a_batch_does_as_the_oracle(setting: Setting) -> None:
    for seed in seeds_of(f"batch {setting.name}"):
        made: list[Twins] = []

        def make_twins(setting: Setting, num_pages: int, num_rows: int, seed: int = seed, made: list[Twins] = made) -> Twins:
            oracle, manager = make_tiered_managers(setting, num_pages, seed)
            dedupe = seed // 4 % 2 == 1
            rows = TieredOracleRows(oracle, setting, num_rows, dedupe=dedupe)
            batch = TieredBatchRows(oracle, manager, setting, num_rows, with_hashes=False, dedupe=dedupe)
            made.append(Twins(rows, batch))
            return made[0]

        workload_class = RetainingTieredBatchWorkload if seed % 2 else TieredBatchWorkload
        run_batch_workload(setting, make_twins, seed, NUM_CALLS // NUM_SEEDS, True, workload_class)
        require_same_policies(made[0])


def test_everything_happens() -> None:
    """The random work reaches what a tier does, and what follows from a load that failed."""
    [setting] = [setting for setting in TIERED_SETTINGS if setting.name == "full and window"]
    reached: Counter[str] = Counter()
    for seed in range(8):
        tier = run_manager(setting, seed, MAX_CALLS_PER_SEED).oracle.manager.page_pool.tier
        reached += tier.counts + Counter({"evicted": tier.pool.counts["evicted"]})
    assert {name for name, count in reached.items() if count} >= {
        "saved", "loaded", "failed", "refused", "evicted", "wrong tokens found", "loads without room",
    }  # fmt: skip
