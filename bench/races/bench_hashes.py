"""Prompts by the function that hashes their pages: pagepool's managers and, where it is installed, vllm's.

The same prompts as in `bench_drop_in`. Of the rivals, vllm's default is sha256 over pickles, pagepool's siphash128. Both
have sha256_cbor, with the same digests; xxhash needs the package of that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

import pagepool
from bench.races.bench_drop_in import NUM_TURNS, PAGES_PER_PROMPT, PROMPT_LEN, CachedPrompt, EvictingPrompt, Prompt, cold_prompt
from bench.races.race import HASHES, Race, Work
from bench.races.rivals import MAX_MODEL_LEN, VLLM, Rival, VllmRival
from bench.workload import make_group

PACKAGES = {"sha256_cbor": "cbor2", "xxhash": "xxhash", "xxhash_cbor": "xxhash"}


class Hashing(Rival):
    """Pagepool with the hash of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, pagepool, pagepool, pagepool)

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
        return pagepool.CacheManager(num_pages, [make_group(pagepool)], max_model_len, hash_algo=self.name)


def find_rivals() -> list[Rival]:
    """Return the rivals whose packages are installed, ours last."""

    def has_package(hash_algo: str) -> bool:
        return hash_algo not in PACKAGES or importlib.util.find_spec(PACKAGES[hash_algo]) is not None

    names = filter(has_package, ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"))
    vllm = [VllmRival(VLLM, f"vllm {name}", name) for name in names] if VLLM else []
    return [*vllm, *map(Hashing, filter(has_package, ("sha256", "sha256_cbor", HASHES.ours)))]


@pytest.mark.parametrize(
    ("make_contender", "name"),
    [(cold_prompt, "cold prompt"), (CachedPrompt, "cached prompt"), (EvictingPrompt, "evicting prompt")],
    ids=["cold", "cached", "evict"],
)
def test_prompt(race: Race, make_contender: Callable[[Rival], Prompt], name: str) -> None:
    contenders = {rival.name: make_contender(rival) for rival in find_rivals()}
    race(contenders, Work(f"{name} of {PROMPT_LEN} tokens", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=HASHES))
