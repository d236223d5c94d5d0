"""The package against the oracle on random work: requests of a manager, and rows of a running batch.

A case makes its share of PAGEPOOL_TEST_OPERATIONS calls; half of it, where these are few.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from features import PLAIN, Features, draw_features
from pairs import run_twins, seeds_of
from settings import (
    ENDS_SETTINGS,
    NUM_OPERATIONS,
    POOL_SETTINGS,
    REFERENCE_SETTINGS,
    RING_SETTINGS,
    SETTINGS,
    STATE_SETTINGS,
    WRITE_SETTINGS,
    Setting,
)

HAS_EVENTS = importlib.util.find_spec("msgspec") is not None
NUM_CALLS = NUM_OPERATIONS // (2 if NUM_OPERATIONS < 100_000 else 1)
MIN_CALLS = 60  # with fewer, hardly anything comes again
ALL = [*STATE_SETTINGS, *SETTINGS]
CACHING_POOLS = [setting for setting in POOL_SETTINGS if setting.enable_caching]
CACHING_WRITES = [setting for setting in WRITE_SETTINGS if setting.enable_caching]
CACHING_RINGS = [setting for setting in RING_SETTINGS if setting.enable_caching]
CACHING_REFERENCES = [setting for setting in REFERENCE_SETTINGS if setting.enable_caching]
CACHING = [setting for setting in ALL if setting.enable_caching and setting.page_size < 16]
STATES = Features(states=True, forks=True)
EXPECTED = Features(states=True, forks=True, expectations=True)
BY_POLICY = Features(states=True, forks=True, expectations=True, policies=True)
EXTERNAL = Features(states=True, forks=True, external=True)
TIER = Features(states=True, forks=True, tier=True, policies=True)
EVERYTHING = Features(
    states=True, forks=True, expectations=True, external=True, tier=True, policies=True, events=HAS_EVENTS, sizes=True
)  # fmt: skip
LATE = Features(states=True, forks=True, late=True)
LATE_BY_POLICY, LATE_TIER, LATE_EVERYTHING = (replace(features, late=True) for features in (BY_POLICY, TIER, EVERYTHING))

pytestmark = pytest.mark.usefixtures("same_nonces")


class Case(NamedTuple):
    """The features of a run, None for those that the seed draws, and the share of all calls that its settings get together."""

    work: str
    features: Features | None
    settings: list[Setting]
    share: float


CASES = [
    Case("requests", PLAIN, SETTINGS, 0.4),
    Case("requests", Features(images=True), SETTINGS, 0.05),
    Case("requests", Features(policies=True), SETTINGS, 0.05),
    Case("requests", Features(states=True, forks=True), ALL, 0.04),
    Case("requests", Features(states=True, forks=True, policies=True), ALL, 0.04),
    Case("requests", EXPECTED, ALL, 0.15),
    Case("requests", BY_POLICY, ALL, 0.2),
    Case("requests", EXTERNAL, ALL, 0.04),
    Case("requests", TIER, CACHING, 0.05),
    Case("requests", EVERYTHING, CACHING, 0.1),
    Case("requests", None, CACHING, 0.1),
    Case("requests", STATES, ENDS_SETTINGS, 0.1),
    Case("requests", BY_POLICY, ENDS_SETTINGS, 0.1),
    Case("requests", EVERYTHING, ENDS_SETTINGS, 0.1),
    Case("requests", STATES, POOL_SETTINGS, 0.1),
    Case("requests", BY_POLICY, CACHING_POOLS, 0.1),
    Case("requests", TIER, CACHING_POOLS, 0.1),
    Case("requests", EVERYTHING, CACHING_POOLS, 0.1),
    Case("requests", LATE, ALL, 0.1),
    Case("requests", LATE_BY_POLICY, ENDS_SETTINGS, 0.1),
    Case("requests", LATE_EVERYTHING, CACHING, 0.1),
    Case("requests", LATE_EVERYTHING, ENDS_SETTINGS, 0.1),
    Case("requests", LATE_TIER, CACHING_POOLS, 0.1),
    Case("requests", STATES, WRITE_SETTINGS, 0.1),
    Case("requests", EXPECTED, CACHING_WRITES, 0.05),
    Case("requests", EXTERNAL, CACHING_WRITES, 0.1),
    Case("requests", EVERYTHING, CACHING_WRITES, 0.1),
    Case("requests", LATE_EVERYTHING, CACHING_WRITES, 0.1),
    Case("rows", PLAIN, SETTINGS, 0.1),
    Case("rows", Features(policies=True), SETTINGS, 0.05),
    Case("rows", Features(external=True), SETTINGS, 0.02),
    Case("rows", STATES, ALL, 0.04),
    Case("rows", Features(states=True, forks=True, events=HAS_EVENTS), ALL, 0.04),
    Case("rows", Features(states=True, forks=True, policies=True), ALL, 0.04),
    Case("rows", EXPECTED, ALL, 0.15),
    Case("rows", BY_POLICY, ALL, 0.2),
    Case("rows", EXTERNAL, ALL, 0.04),
    Case("rows", TIER, CACHING, 0.05),
    Case("rows", EVERYTHING, CACHING, 0.1),
    Case("rows", None, CACHING, 0.1),
    Case("rows", STATES, ENDS_SETTINGS, 0.1),
    Case("rows", BY_POLICY, ENDS_SETTINGS, 0.1),
    Case("rows", EVERYTHING, ENDS_SETTINGS, 0.1),
    Case("rows", STATES, POOL_SETTINGS, 0.1),
    Case("rows", BY_POLICY, CACHING_POOLS, 0.1),
    Case("rows", TIER, CACHING_POOLS, 0.1),
    Case("rows", EVERYTHING, CACHING_POOLS, 0.1),
    Case("rows", STATES, WRITE_SETTINGS, 0.1),
    Case("rows", EXPECTED, CACHING_WRITES, 0.05),
    Case("rows", BY_POLICY, [setting for setting in CACHING_WRITES if not setting.has_pools], 0.05),
    Case("rows", EXTERNAL, CACHING_WRITES, 0.1),
    Case("rows", EVERYTHING, CACHING_WRITES, 0.1),
    Case("steps ahead", PLAIN, SETTINGS, 0.1),
    Case("steps ahead", STATES, [*ALL, *ENDS_SETTINGS], 0.1),
    Case("steps ahead", STATES, [*POOL_SETTINGS, *WRITE_SETTINGS], 0.1),
    Case("steps ahead", BY_POLICY, CACHING, 0.1),
    Case("steps ahead", TIER, CACHING, 0.05),
    Case("steps ahead", EVERYTHING, [*CACHING, *CACHING_WRITES, *CACHING_POOLS], 0.1),
    Case("steps ahead", None, [*CACHING, *ENDS_SETTINGS], 0.1),
    Case("requests", STATES, RING_SETTINGS, 0.1),
    Case("requests", EVERYTHING, CACHING_RINGS, 0.1),
    Case("rows", STATES, RING_SETTINGS, 0.1),
    Case("rows", EVERYTHING, CACHING_RINGS, 0.1),
    Case("steps ahead", STATES, RING_SETTINGS, 0.1),
    Case("requests", STATES, REFERENCE_SETTINGS, 0.1),
    Case("requests", EVERYTHING, CACHING_REFERENCES, 0.1),
    Case("rows", STATES, REFERENCE_SETTINGS, 0.1),
    Case("rows", EVERYTHING, CACHING_REFERENCES, 0.1),
    Case("steps ahead", EVERYTHING, CACHING_REFERENCES, 0.1),
]


def list_runs() -> list[tuple[str, Case, Setting, int]]:
    """List the runs: each case on all of its settings, or, where they would get too few calls, on some, others in each case."""
    runs = []
    for turn, (work, features, settings, share) in enumerate(CASES):
        num_calls = int(share * NUM_CALLS)
        every = -(-MIN_CALLS * len(settings) // num_calls) if num_calls else len(settings)
        chosen = settings[turn % every :: every]
        name = f"{work}-{'drawn' if features is None else '+'.join(features.names) or 'plain'}"
        num_calls = max(MIN_CALLS, num_calls // max(1, len(chosen)))
        runs += [(f"{name}-{setting.name}", CASES[turn], setting, num_calls) for setting in chosen]
    return runs


RUNS = list_runs()


@pytest.mark.parametrize(("name", "case", "setting", "num_calls"), RUNS, ids=[run[0] for run in RUNS])
def test_same_as_oracle(name: str, case: Case, setting: Setting, num_calls: int) -> None:
    for seed, num_calls_of_seed in seeds_of(name, num_calls):
        features = draw_features(Random(seed)) if case.features is None else case.features
        run_twins(case.work, setting, features, seed, num_calls_of_seed)


def test_all_that_a_tier_does_happens() -> None:
    """The random work reaches what a tier does, and what follows from a load that failed."""
    [setting] = [setting for setting in CACHING if setting.name == "full and window"]
    reached: Counter[str] = Counter()
    for seed in (2, 3, 7, 14):
        twins = run_twins("requests", setting, Features(states=True, tier=True, policies=True), seed, 300)
        tier = twins.oracle.manager.page_pool.tier
        reached += tier.counts + Counter({"evicted": tier.pool.counts["evicted"]})
    assert {name for name, count in reached.items() if count} >= {
        "saved", "loaded", "failed", "refused", "evicted", "wrong tokens found", "loads without room",
    }  # fmt: skip


def test_pages_that_no_hit_needs_are_freed() -> None:
    setting = next(setting for setting in SETTINGS if setting.name == "full 8 and windows of 4")
    twins = run_twins("requests", setting, Features(policies=True), 1, 200)
    assert twins.oracle.manager.page_pool.policy.counts["useless pages"] > 10
