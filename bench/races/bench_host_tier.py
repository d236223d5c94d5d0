"""What a host tier costs the allocator: prompts in a running batch, with and without one.

Pages of 16 tokens, one full-attention group. In use, each prompt takes its transfers, and they complete before the next one. A
pool that evicts saves each page that it evicts; a prompt that hits the tier loads all of its pages but the last, and evicts as
many. Contenders are compared by the number of their pages, since pools with a tier take others.
"""

from __future__ import annotations

from typing import Any

import pytest

import pagepool
from bench.races.batch_rivals import Batched
from bench.races.bench_running_batch import (
    NUM_TURNS,
    PAGES_PER_PROMPT,
    PROMPT_CASES,
    PROMPT_IDS,
    Prompt,
    PromptCase,
    cached_prompt,
)
from bench.races.race import TIER, Counted, Race, Work, run_untimed
from bench.races.rivals import ArrayRival
from bench.workload import make_group

POOLS = [10_000, 100_000]
NUM_PROMPTS_IN_TURN = 8
"""Of the prompts that hit the tier. The pool has room for half of them."""


class Tiered(ArrayRival):
    """Pagepool with a host tier of twice the pool's size."""

    def make_manager(self, num_pages: int, max_model_len: int = 1 << 20) -> Any:
        tier = pagepool.HostTier(2 * num_pages)
        return pagepool.CacheManager(num_pages, [make_group(pagepool)], max_model_len, host_tier=tier)


class TieredBatch(Batched):
    """A running batch with a host tier. Its moves are made at once."""

    def admit(self, row: int, tokens: Any) -> Any:
        page_ids = super().admit(row, tokens)
        moves = self.batch.take_moves()
        if moves.number:
            self.manager.complete(moves.number)
        return page_ids


def make_engines(num_pages: int) -> dict[str, Batched]:
    """Make new engines by the name of their column."""
    return {
        "no tier": Batched(num_pages, 1),
        "tier": TieredBatch(num_pages, 1, Tiered("tier", pagepool, pagepool, pagepool)),
    }


@pytest.mark.parametrize("num_pages", POOLS)
@pytest.mark.parametrize("case", PROMPT_CASES, ids=PROMPT_IDS)
def test_prompt(race: Race, case: PromptCase, num_pages: int) -> None:
    contenders = {name: Counted(case.make(engine, False)) for name, engine in make_engines(num_pages).items()}
    race(contenders, Work(f"{case.name}, pool of {num_pages:,}", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=TIER))


class RepeatedPrompt(Prompt):
    """Prompts in turn, of which the pool keeps only the last few."""

    def prepare(self) -> None:
        self.num_prompts %= NUM_PROMPTS_IN_TURN
        super().prepare()


def test_hit(race: Race) -> None:
    """A prompt that hits the tier, beside one that hits the pool."""
    engines = make_engines(NUM_PROMPTS_IN_TURN // 2 * PAGES_PER_PROMPT + 1)
    tiered = RepeatedPrompt(engines["tier"], False)
    for _ in range(2 * NUM_PROMPTS_IN_TURN):
        run_untimed(tiered)
    contenders = {"no tier": Counted(cached_prompt(engines["no tier"], False)), "tier": Counted(tiered)}
    race(contenders, Work("prompt that hits", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=TIER))
    stats = engines["tier"].manager.stats().host_tier
    assert stats.num_loaded_pages >= PAGES_PER_PROMPT * NUM_TURNS // 2
