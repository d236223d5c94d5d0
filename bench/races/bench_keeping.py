"""What expectations, sessions and shares cost: prompts in a running batch whose pages evict others, and sessions that end.

Pages of 16 tokens, one full-attention group. The rules leave other pages cached, so the contenders' results are compared by the
number of pages only. "plain" says nothing. "expected" has a session for each prompt, and says at its release when it comes
back. "shares" does so too, for four tenants, three of which have a share.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

import pagepool
from bench.races.bench_running_batch import random_tokens
from bench.races.race import KEEPING, Race, Work, run_untimed
from bench.workload import PAGE_SIZE, SEED, make_group

PAGES_PER_PROMPT = 1000
NUM_TURNS = 5
NUM_TENANTS, SHARE = 4, 0.2
POOLS = [100_000, 1_000_000]


class Keeping:
    """A batch of one row, in a pool that is full of the pages of other prompts."""

    def __init__(self, kind: str, num_pages: int, eviction: str) -> None:
        self.kind = kind
        self.manager = pagepool.CacheManager(num_pages, [make_group(pagepool)], 1 << 20, eviction=eviction)
        self.batch = pagepool.RunningBatch(self.manager, pagepool.PageTable(1, PAGES_PER_PROMPT, 0))
        self.rng, self.turns = np.random.default_rng(SEED), count()
        if kind == "shares":
            self.manager.set_shares({f"tenant {i}": SHARE for i in range(NUM_TENANTS - 1)})
        self.prepare()

    def prepare(self) -> None:
        """Draw a prompt, and when it comes back."""
        turn = next(self.turns)
        self.tokens = random_tokens(self.rng, PAGES_PER_PROMPT * PAGE_SIZE)
        tenant = f"tenant {turn % NUM_TENANTS}" if self.kind == "shares" else None
        self.traits = None if self.kind == "plain" else pagepool.RequestTraits(session_id=f"session {turn}", tenant=tenant)
        self.release: dict[str, Any] = {} if self.kind == "plain" else {"seconds": 2.0 ** (turn * 7 % 12)}


class Prompt(Keeping):
    """A prompt is computed and freed."""

    def __init__(self, kind: str, num_pages: int, eviction: str) -> None:
        super().__init__(kind, num_pages, eviction)
        for _ in range(num_pages // PAGES_PER_PROMPT + 10):
            run_untimed(self)

    def run(self) -> None:
        self.batch.admit(0, self.tokens, traits=self.traits)
        self.page_ids = [len(self.batch.get_page_ids(0)[0])]
        self.batch.release([0], **self.release)


class Close(Keeping):
    """A session ends, or its pages, which are free, are expected anew."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(kind, 4 * PAGES_PER_PROMPT, "lru")
        self.name = name

    def prepare(self) -> None:
        super().prepare()
        self.batch.admit(0, self.tokens, traits=self.traits)
        self.batch.release([0], **self.release)

    def run(self) -> None:
        options = {"seconds": 30} if self.name == "expect_session" else {}
        self.page_ids = [getattr(self.manager, self.name)(self.admission["session_id"], **options)]


@pytest.mark.parametrize("num_pages", POOLS)
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_prompt(race: Race, eviction: str, num_pages: int) -> None:
    name = f"prompt of {PAGES_PER_PROMPT} pages that evicts, {eviction}, pool of {num_pages:,}"
    work = Work(name, "page", PAGES_PER_PROMPT, NUM_TURNS, suite=KEEPING)
    race({kind: Prompt(kind, num_pages, eviction) for kind in (*KEEPING.rivals, KEEPING.ours)}, work)


@pytest.mark.parametrize("name", ["close_session", "expect_session"])
def test_session(race: Race, name: str) -> None:
    work = Work(f"{name} of {PAGES_PER_PROMPT} pages", "page", PAGES_PER_PROMPT, NUM_TURNS, suite=KEEPING)
    race({kind: Close(kind, name) for kind in ("expected", "shares")}, work)
