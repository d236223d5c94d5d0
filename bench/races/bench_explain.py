"""What explanations cost: prompts of managers that remember which keys left, beside managers that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pagepool
from bench.races.bench_drop_in import NUM_TURNS, PAGES_PER_PROMPT, PROMPT_LEN, CachedPrompt, EvictingPrompt, Prompt
from bench.races.race import EXPLAIN, Race, Work
from bench.races.rivals import MAX_MODEL_LEN, Rival


class Explained(Rival):
    """Pagepool with explanations."""

    def make_manager(self, num_pages: int, max_model_len: int = MAX_MODEL_LEN) -> Any:
        manager = super().make_manager(num_pages, max_model_len)
        manager.enable_explanations()
        return manager


@pytest.mark.parametrize(("make_contender", "name"), [(CachedPrompt, "cached prompt"), (EvictingPrompt, "evicting prompt")])
def test_prompt(race: Race, make_contender: Callable[[Rival], Prompt], name: str) -> None:
    rivals = [Rival("off", pagepool, pagepool, pagepool), Explained(EXPLAIN.ours, pagepool, pagepool, pagepool)]
    contenders = {rival.name: make_contender(rival) for rival in rivals}
    race(contenders, Work(f"{name} of {PROMPT_LEN} tokens", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=EXPLAIN))
