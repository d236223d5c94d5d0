"""Checkpoints, copies, forks and equal pages on random work: the manager and the running batch against the oracle.

PAGEPOOL_TEST_OPERATIONS: a fifth of so many calls are made in all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batch_model import BatchRows, ManagerRows, OracleRows
from batch_workload import run_batch_workload
from oracle import OracleManager
from pairs import POLICIES, expected_stats, make_manager, make_managers, oracle_and_package, require_same_policies
from settings import NUM_OPERATIONS, SETTINGS, STATE_SETTINGS, Setting
from states_workload import StatesBatchWorkload, StatesWorkload
from twins import OracleTwin, PackageTwin, Twins
from workload import run_workload

import pagepool

MAX_CALLS_PER_SEED = 400
FORKED_SETTINGS = [setting for setting in SETTINGS if setting.page_size < 16]
ALL_SETTINGS = [*STATE_SETTINGS, *FORKED_SETTINGS]


def oracle_and_batch(setting: Setting, num_pages: int, num_rows: int, **options: Any) -> Twins:
    oracle = setting.manager(OracleManager, setting.cache_groups(pagepool), num_pages)
    batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=False, **options)
    return Twins(OracleRows(oracle, setting, num_rows, **options), batch)


def oracle_and_deduping_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    return oracle_and_batch(setting, num_pages, num_rows, dedupe=True)


def manager_and_batch(setting: Setting, num_pages: int, num_rows: int) -> Twins:
    batch = BatchRows(make_manager(setting, num_pages), setting, num_rows, with_hashes=True)
    return Twins(ManagerRows(make_manager(setting, num_pages), setting, num_rows), batch)


BATCHES: dict[str, tuple[Callable[..., Twins], bool, list[Setting]]] = {
    "oracle": (oracle_and_batch, True, ALL_SETTINGS),
    "oracle with equal pages": (oracle_and_deduping_batch, True, ALL_SETTINGS),
    "manager": (manager_and_batch, False, STATE_SETTINGS),
}
BATCH_CASES = [(name, setting) for name, (_, _, settings) in BATCHES.items() for setting in settings]
NUM_CALLS = max(NUM_OPERATIONS // (5 * (len(BATCH_CASES) + 3 * len(ALL_SETTINGS))), 50)


def seeds_of(name: str) -> Iterator[tuple[int, int]]:
    """Return the seeds of a case, each with a number of calls."""
    num_seeds = -(-NUM_CALLS // MAX_CALLS_PER_SEED)
    first_seed = zlib.crc32(f"states {name}".encode())
    return ((seed, -(-NUM_CALLS // num_seeds)) for seed in range(first_seed, first_seed + num_seeds))


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_a_manager_does_as_the_oracle(setting: Setting) -> None:
    for seed, num_calls in seeds_of(setting.name):
        twins = run_workload(setting, oracle_and_package(), seed, num_calls, StatesWorkload)
        assert twins.system.manager.page_pool.stats == expected_stats(twins.oracle.manager)


@pytest.mark.parametrize(("model", "setting"), BATCH_CASES, ids=[f"{name}-{setting.name}" for name, setting in BATCH_CASES])
def test_a_batch_does_as_its_model(model: str, setting: Setting) -> None:
    make_twins, trims, _ = BATCHES[model]
    for seed, num_calls in seeds_of(f"{model} {setting.name}"):
        run_batch_workload(setting, make_twins, seed, num_calls, trims, StatesBatchWorkload)


# --- policies -----------------------------------------------------------------------------------------------------


def seeds_of_policies(name: str) -> Iterator[tuple[int, int]]:
    """Return a seed for each policy, with a number of calls."""
    first_seed = zlib.crc32(f"policies {name}".encode()) & ~3
    return ((seed, -(-NUM_CALLS // len(POLICIES))) for seed in range(first_seed, first_seed + len(POLICIES)))


@pytest.mark.usefixtures("same_nonces")
@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_a_manager_with_a_policy_does_as_the_oracle(setting: Setting) -> None:
    for seed, num_calls in seeds_of_policies(f"manager {setting.name}"):

        def make_twins(setting: Setting, num_pages: int, seed: int = seed) -> Twins:
            oracle, manager = make_managers(setting, num_pages, seed, {})
            return Twins(OracleTwin(oracle), PackageTwin(manager))

        require_same_policies(run_workload(setting, make_twins, seed, num_calls, StatesWorkload))


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_a_batch_with_a_policy_does_as_the_oracle(setting: Setting) -> None:
    for seed, num_calls in seeds_of_policies(f"batch {setting.name}"):
        made: list[Twins] = []

        def make_twins(setting: Setting, num_pages: int, num_rows: int, seed: int = seed, made: list[Twins] = made) -> Twins:
            oracle, manager = make_managers(setting, num_pages, seed, {})
            dedupe = seed // len(POLICIES) % 2 == 1
            batch = BatchRows(manager, setting, num_rows, with_hashes=False, dedupe=dedupe)
            made.append(Twins(OracleRows(oracle, setting, num_rows, dedupe=dedupe), batch))
            return made[0]

        run_batch_workload(setting, make_twins, seed, num_calls, True, StatesBatchWorkload)
        require_same_policies(made[0])
