"""What adaptive eviction costs beside the order of release: prompts in a running batch, and the pool alone.

Pages of 16 tokens, one full-attention group. The policies evict other pages, so the contenders' results are compared by the
number of pages only. In a pool that evicts, each prompt takes the pages of others; its own keys enter the ghost later.
"""

from __future__ import annotations

from typing import Any

import pytest

import pagepool
from bench.races.batch_rivals import Batched
from bench.races.bench_core import TakeAndGiveBack
from bench.races.bench_running_batch import (
    NUM_TAKEN,
    PAGES_PER_PROMPT,
    PROMPT_CASES,
    PROMPT_IDS,
    PromptCase,
    evicting_prompt,
)
from bench.races.race import EVICTION, Counted, Race, Work, run_untimed
from bench.races.rivals import ArrayRival
from bench.workload import make_group

NUM_TURNS = 5
POOLS = [10_000, 100_000, 1_000_000]


class WithPolicy(ArrayRival):
    """Pagepool with an eviction policy."""

    def __init__(self, eviction: str) -> None:
        super().__init__(eviction, pagepool, pagepool, pagepool)

    def make_manager(self, num_pages: int, max_model_len: int = 1 << 20) -> Any:
        return pagepool.CacheManager(num_pages, [make_group(pagepool)], max_model_len, eviction=self.name)

    def make_pool(self, num_pages: int) -> Any:
        return pagepool.PagePool(num_pages, enable_caching=True, eviction=self.name)


POLICIES = {name: WithPolicy(name) for name in (*EVICTION.rivals, EVICTION.ours)}


def make_prompt(case: PromptCase, num_pages: int, rival: WithPolicy) -> Counted:
    """Return a contender; one that evicts has evicted as many pages as the pool has, so that the ghost's memory was touched."""
    prompt = case.make(Batched(num_pages, 1, rival), False)
    for _ in range(num_pages // PAGES_PER_PROMPT if case.make is evicting_prompt else 0):
        run_untimed(prompt)
    return Counted(prompt)


@pytest.mark.parametrize("num_pages", POOLS)
@pytest.mark.parametrize("case", PROMPT_CASES, ids=PROMPT_IDS)
def test_prompt(race: Race, case: PromptCase, num_pages: int) -> None:
    contenders = {name: make_prompt(case, num_pages, rival) for name, rival in POLICIES.items()}
    name = f"{case.name} in an array, pool of {num_pages:,}"
    race(contenders, Work(name, "page", PAGES_PER_PROMPT, NUM_TURNS, suite=EVICTION))


@pytest.mark.parametrize("num_pages", POOLS)
def test_take_and_give_back(race: Race, num_pages: int) -> None:
    takers = {name: TakeAndGiveBack(rival, num_pages, NUM_TAKEN) for name, rival in POLICIES.items()}
    contenders = {name: Counted(taker) for name, taker in takers.items()}
    work = Work(
        f"take and give back {NUM_TAKEN}, pool of {num_pages:,}", "page", takers["lru"].num_units, NUM_TURNS, suite=EVICTION
    )
    race(contenders, work)
