"""A hybrid in two pools, one for its states, beside the same in one: decode, admission, and the look-up of a long prompt."""

from __future__ import annotations

import numpy as np
import pytest

from bench.races.race import POOLS, Race, Work
from bench.workload import PAGE_SIZE, SEED, VOCABULARY, make_group
from pagepool import CacheGroupSpec, CacheManager, MambaSpec, MultiGroupPageTable, RequestTraits, RunningBatch, specs

INTERVAL = 512
NUM_STEPS = 5 * PAGE_SIZE
NUM_TURNS = 10
PROMPT_LEN = 8192
LONG_LEN = 100_000
NUM_PROMPTS = 8


class Hybrid:
    """Attention and states, in pools of the same sizes together."""

    def __init__(self, num_pools: int, num_rows: int, max_len: int, num_kept: int) -> None:
        state = MambaSpec(PAGE_SIZE, ((16, 16),), "float32", checkpoint_interval=INTERVAL)
        groups = [make_group(specs), CacheGroupSpec(state, pool="states" if num_pools > 1 else "kv")]
        num_prompts = num_rows + num_kept
        sizes = {"kv": num_prompts * (max_len // PAGE_SIZE + 2) + 2, "states": num_prompts * (max_len // INTERVAL + 4) + 2}
        self.manager = CacheManager(sizes if num_pools > 1 else sum(sizes.values()), groups, max_len)
        self.batch = RunningBatch(self.manager, MultiGroupPageTable(num_rows, max_len, max_len, [PAGE_SIZE, PAGE_SIZE]))
        self.rng = np.random.default_rng(SEED)
        self.page_ids: list[int] = []

    def draw(self, num_tokens: int) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, num_tokens).astype(np.int32)

    def prepare(self) -> None:
        pass


class Decode(Hybrid):
    """1,024 rows decode one token a step."""

    def __init__(self, num_pools: int) -> None:
        super().__init__(num_pools, 1024, 1024, 0)
        self.rows = np.arange(1024, dtype=np.int32)
        self.prompts = [self.draw(400 + row % PAGE_SIZE) for row in range(1024)]
        self.token_ids = self.draw(1024)

    def prepare(self) -> None:
        if self.batch.is_admitted[0]:
            self.batch.release(self.rows)
        for row, prompt in enumerate(self.prompts):
            self.batch.admit(row, prompt, traits=RequestTraits(look_up=False))
        self.batch.take_moves()

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            self.batch.step(self.rows, self.token_ids)
            self.batch.take_moves()
        self.page_ids = self.batch.num_tokens.tolist()


class Cold(Hybrid):
    """Prompts that hit nothing are admitted and released."""

    def __init__(self, num_pools: int) -> None:
        super().__init__(num_pools, 1, PROMPT_LEN, 10 * NUM_PROMPTS)

    def prepare(self) -> None:
        self.prompts = [self.draw(PROMPT_LEN) for _ in range(NUM_PROMPTS)]

    def run(self) -> None:
        self.page_ids = []
        for prompt in self.prompts:
            self.page_ids.append(self.batch.admit(0, prompt) or 0)
            self.batch.take_moves()
            self.batch.release([0])


class Cached(Cold):
    """The same prompts are admitted again."""

    def prepare(self) -> None:
        if not hasattr(self, "prompts"):
            super().prepare()


class LongLookUp(Hybrid):
    """A hashed prompt of 100,000 tokens is looked up, and not admitted."""

    def __init__(self, num_pools: int) -> None:
        super().__init__(num_pools, 1, LONG_LEN, 1)
        self.prompt = self.draw(LONG_LEN)
        self.batch.admit(0, self.prompt)
        self.batch.take_moves()
        self.batch.release([0])

    def run(self) -> None:
        self.page_ids = [self.batch.probe(0, self.prompt)]


WORKS = {
    "decode of 1,024 rows": (Decode, "step", NUM_STEPS),
    "prompts of 8,192 tokens": (Cold, "prompt", NUM_PROMPTS),
    "cached prompts of 8,192 tokens": (Cached, "prompt", NUM_PROMPTS),
    "look-up of 100,000 tokens": (LongLookUp, "call", 1),
}


@pytest.mark.parametrize("name", WORKS)
def test_pools(race: Race, name: str) -> None:
    kind, unit, num_units = WORKS[name]
    contenders = {"one pool": kind(1), POOLS.ours: kind(2)}
    race(contenders, Work(name, unit, num_units, NUM_TURNS, suite=POOLS))
