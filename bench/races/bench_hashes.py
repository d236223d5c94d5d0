"""Prompts by the function that hashes their pages: vllm's managers, where it is installed, and pagepool's with its default.

The same prompts as in `bench_drop_in`. vllm's default is sha256 over pickles, pagepool's siphash128; `bench_digests` has its
other functions. xxhash needs the package of that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

import pagepool
from bench.races.bench_drop_in import NUM_TURNS, PAGES_PER_PROMPT, PROMPT_LEN, CachedPrompt, EvictingPrompt, Prompt, cold_prompt
from bench.races.race import HASHES, Race, Work
from bench.races.rivals import VLLM, Rival, VllmRival

PACKAGES = {"sha256_cbor": "cbor2", "xxhash": "xxhash", "xxhash_cbor": "xxhash"}


def find_rivals() -> list[Rival]:
    """Return the rivals whose packages are installed, ours last."""

    def has_package(hash_algo: str) -> bool:
        return hash_algo not in PACKAGES or importlib.util.find_spec(PACKAGES[hash_algo]) is not None

    names = filter(has_package, ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"))
    vllm = [VllmRival(VLLM, f"vllm {name}", name) for name in names] if VLLM else []
    return [*vllm, Rival(HASHES.ours, pagepool, pagepool, pagepool)]


@pytest.mark.parametrize(
    ("make_contender", "name"),
    [(cold_prompt, "cold prompt"), (CachedPrompt, "cached prompt"), (EvictingPrompt, "evicting prompt")],
    ids=["cold", "cached", "evict"],
)
def test_prompt(race: Race, make_contender: Callable[[Rival], Prompt], name: str) -> None:
    contenders = {rival.name: make_contender(rival) for rival in find_rivals()}
    race(contenders, Work(f"{name} of {PROMPT_LEN} tokens", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=HASHES))
