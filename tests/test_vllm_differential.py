"""vLLM's `KVCacheManager` with pagepool against the one without, on random work: after each call, both show the same.

PAGEPOOL_TEST_OPERATIONS is the total number of calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from settings import NUM_OPERATIONS
from twins import Mismatch
from vllm_settings import SETTINGS, Setting
from vllm_sides import Comparison, Side

pytest.importorskip("vllm")

CALLS_PER_SEED = 600
PLANTED_SEEDS, PLANTED_CALLS = 20, 300
BUGS: dict[str, str] = {  # and a setting in which each must show
    "caches tokens that are computed again": "full, multi-token prediction",
    "lags by a token too little in several groups": "full and window, multi-token prediction",
    "frees blocks in reverse": "full",
    "frees blocks without a hash at the end": "full",
    "frees blocks without a hash in reverse": "full, uncached",
    "misses an event of a removal": "full",
    "misses events of the second group": "full and window",
    "leaves a hit in the queue": "full",
    "reports no touch": "full, no events, metrics",
    "frees what is behind the window too late": "full and window, async",
    "hits with too long a window": "window",
    "hits the last duplicate": "full",
    "evicts all duplicates": "full",
    "forgets further hashes of a block": "full and mamba, hits within blocks",
    "misses a reuse": "full",
    "evicts free blocks only": "full",
    "keeps numbers of hashed tokens at a reset": "full",
    "caches what is being loaded": "full, external tokens",
    "ignores reserved blocks": "full",
    "ignores the watermark": "full and window",
    "admits what does not fit": "full",
    "zeroes what is being loaded": "full and window, mixed precision",
    "forgets slots for drafts": "full, async, drafts",
    "returns early without a look at the window": "full and window, async",
    "returns early without caching": "full, async",
    "caches what is in flight": "full, async, drafts",
    "caches a token too late": "full",
    "takes hits for free blocks": "full",
    "returns empty lists for None": "full",
    "returns another object without blocks": "full",
    "hashes without the salt": "full",
    "hashes without the adapter": "full in blocks of 16, sha256 over cbor",
    "hashes one image a block": "full",
    "drops two blocks for a draft model": "full, eagle",
    "keeps nothing where a prompt ends": "full and window, keep the last",
    "counts the null block": "full",
}


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


@pytest.mark.parametrize(("bug", "setting"), BUGS.items(), ids=list(BUGS))
def test_planted_bugs_are_found(plain: Side, bug: str, setting: str) -> None:
    with pytest.raises(Mismatch, match=r"call \d+\n.*\n.*against"):
        Comparison(plain, plain, bug).compare(setting, range(PLANTED_SEEDS), PLANTED_CALLS)


@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
def test_every_bug_is_planted() -> None:
    from vllm_planted import BUGS as KNOWN

    assert set(BUGS) == set(KNOWN)
