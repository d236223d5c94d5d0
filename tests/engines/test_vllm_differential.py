"""vLLM's `KVCacheManager` with pagepool against the one without, on random work: after each call, both show the same.

PAGEPOOL_TEST_OPERATIONS is the total number of calls.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator

import pytest
from settings import NUM_OPERATIONS
from twins import Mismatch
from vllm_settings import SETTINGS, Setting
from vllm_sides import Comparison, Side

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm_planted import BUGS
    from vllm_workload import VERSION, accepted

CALLS_PER_SEED = 600
PLANTED_SEEDS, PLANTED_CALLS = 20, 300


@pytest.fixture(scope="module")
def plain() -> Iterator[Side]:
    """Return the side without pagepool."""
    side = Side()
    yield side
    side.stop()


@pytest.fixture(scope="module")
def replaced() -> Iterator[Side]:
    """Return the side with pagepool."""
    side = Side("pagepool")
    yield side
    side.stop()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_same_with_pagepool(plain: Side, replaced: Side, setting: Setting) -> None:
    if setting.hash_lookahead and not accepted({"num_hash_lookahead_tokens": setting.hash_lookahead}):
        pytest.skip("this vLLM does not hash tokens ahead")
    num_seeds = -(-NUM_OPERATIONS // len(SETTINGS) // CALLS_PER_SEED)
    first_seed = zlib.crc32(setting.name.encode())
    seeds = range(first_seed, first_seed + num_seeds)
    Comparison(plain, replaced).compare(setting.name, seeds, -(-NUM_OPERATIONS // len(SETTINGS) // num_seeds))


def test_one_side_has_replacements(plain: Side, replaced: Side) -> None:
    job = {"setting": SETTINGS[0].name, "seed": 0, "num_calls": 1}
    homes = []
    for side in (plain, replaced):
        side.ask(job)
        homes.append(side.answer(1)["blocks"])
    assert homes == ["vllm.v1.core.kv_cache_utils", "pagepool.compat.vllm.blocks"]


@pytest.mark.parametrize("bug", [name for name, bug in BUGS.items() if bug.since <= VERSION])
def test_planted_bugs_are_found(plain: Side, bug: str) -> None:
    with pytest.raises(Mismatch, match=r"call \d+\n.*\n.*against"):
        Comparison(plain, plain, bug).compare(BUGS[bug].setting, range(PLANTED_SEEDS), PLANTED_CALLS)
