"""A waiting request, refused while too few pages are free and tried again at every step.

Its prefix is cached and free. Pages of 16 tokens, one full-attention group, prefix caching on. Nothing changes between tries,
as in a step in which no request ends. The oracle, which visits every page, runs only with the shortest request.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.races.batch_rivals import ENGINES, Engine, make_engines
from bench.races.race import BATCHED, Race, Work, run_untimed
from bench.workload import PAGE_SIZE, SEED, VOCABULARY

NUM_TRIES = 16
NUM_TURNS = 10
NUM_NEW_PAGES = 8  # of the waiting request
NUM_RUNNING_PAGES = 100  # of a running request


class Refused:
    """The same request is tried repeatedly."""

    def __init__(self, engine: Engine, num_cached_tokens: int) -> None:
        self.engine = engine
        prompt = np.random.default_rng(SEED).integers(
            0, VOCABULARY, num_cached_tokens + NUM_NEW_PAGES * PAGE_SIZE, dtype=np.int32
        )
        running = np.zeros(NUM_RUNNING_PAGES * PAGE_SIZE, dtype=np.int32)
        for row, tokens in enumerate((prompt[:num_cached_tokens], running)):
            engine.admit(row, self._get_tokens(tokens))
        engine.release([0])
        self.request = engine.make_request(self._get_tokens(prompt))

    def _get_tokens(self, tokens: np.ndarray) -> object:
        return tokens if self.engine.takes_arrays else tokens.tolist()

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.page_ids = [self.engine.is_refused(self.request) for _ in range(NUM_TRIES)]


@pytest.mark.parametrize("num_cached_tokens", [1024, 8192, 32_000])
def test_refused_again(race: Race, num_cached_tokens: int) -> None:
    num_pages = num_cached_tokens // PAGE_SIZE + NUM_RUNNING_PAGES + NUM_NEW_PAGES // 2 + 1
    engines = make_engines(num_pages, 2, ["oracle", *ENGINES] if num_cached_tokens == 1024 else ENGINES)
    contenders = {name: Refused(engine, num_cached_tokens) for name, engine in engines.items()}
    for contender in contenders.values():
        run_untimed(contender)
        assert all(contender.page_ids)
    name = f"refused again, {num_cached_tokens:,} tokens cached"
    race(contenders, Work(name, "try", NUM_TRIES, NUM_TURNS, suite=BATCHED))
