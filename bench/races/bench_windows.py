"""What ``windows="ends"`` costs beside ``"all"``: decode, a prompt computed in chunks, and an admission, in a running batch.

Pages of 16 tokens, one full group and five of window 1,024, as in Gemma 3; one case has only two groups with windows. The pools
evict. The rules leave other pages cached, so the contenders' results are compared by the number of pages only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import pagepool
from bench.races.bench_running_batch import NUM_STEPS, random_tokens
from bench.races.race import WINDOWS, Race, Work, run_untimed
from bench.workload import PAGE_SIZE, SEED

WINDOW = 1024
MAX_MODEL_LEN = 131_072
CHUNK_LEN = 2048
NUM_TURNS = 5
NUM_ROWS = 256
SHAPE: Mapping[str, Any] = {"page_size": PAGE_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}


class Layout:
    """A running batch of a model with layers of full attention, or without, and such with windows."""

    def __init__(self, windows: Any, num_pages: int, num_rows: int, num_full: int, num_windows: int) -> None:
        full = pagepool.FullAttentionSpec(**SHAPE)
        window = pagepool.SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)
        groups = [pagepool.CacheGroupSpec(spec) for spec in [full] * num_full + [window] * num_windows]
        self.manager = pagepool.CacheManager(num_pages, groups, MAX_MODEL_LEN, retention=pagepool.Retention(windows=windows))
        table = pagepool.MultiGroupPageTable(num_rows, MAX_MODEL_LEN, MAX_MODEL_LEN, [PAGE_SIZE] * len(groups))
        self.batch = pagepool.RunningBatch(self.manager, table)
        self.rng = np.random.default_rng(SEED)


class Decode(Layout):
    """Rows with prompts of 512 to 2,011 tokens get a token and its slot, for as many steps as a page has tokens. After
    `num_before` tokens their windows have left the prompts.
    """

    def __init__(self, windows: Any, num_before: int) -> None:
        super().__init__(windows, 200_000, NUM_ROWS, 1, 5)
        self.rows = np.arange(NUM_ROWS, dtype=np.int32)
        for _ in range(2):  # the first prompts leave their pages in the pool
            self.batch.release(self.rows[self.batch.num_tokens[self.rows] > 0])
            for row in self.rows.tolist():
                self.batch.admit(row, random_tokens(self.rng, 512 + row * 37 % 1500))
            for _ in range(num_before):
                self.batch.step(self.rows, np.zeros(NUM_ROWS, dtype=np.int32))

    def prepare(self) -> None:
        self.sampled = random_tokens(self.rng, (NUM_STEPS, NUM_ROWS))

    def run(self) -> None:
        step, rows = self.batch.step, self.rows
        results = [step(rows, token_ids) for token_ids in self.sampled]
        self.page_ids = [sum(len(result.new_page_ids) for result in results)]


class Prompt(Layout):
    """A prompt is looked up, computed in chunks up to `num_computed` tokens, and freed."""

    def __init__(self, windows: Any, num_tokens: int, num_computed: int, num_full: int, num_windows: int) -> None:
        super().__init__(windows, 60_000, 1, num_full, num_windows)
        self.num_tokens, self.num_computed = num_tokens, num_computed
        for _ in range(60_000 * PAGE_SIZE // (num_computed * (num_full + num_windows))):
            run_untimed(self)

    def prepare(self) -> None:
        self.tokens = random_tokens(self.rng, self.num_tokens)

    def run(self) -> None:
        batch = self.batch
        batch.admit(0, self.tokens, max_num_new_tokens=CHUNK_LEN)
        for _ in range(CHUNK_LEN, self.num_computed, CHUNK_LEN):
            batch.plan([0], CHUNK_LEN)
        self.page_ids = [int(batch.num_computed_tokens[0])]
        batch.release([0])


@pytest.mark.parametrize("num_before", [0, 1500])
def test_decode(race: Race, num_before: int) -> None:
    where = "behind the windows of their prompts" if num_before else "within them"
    work = Work(f"decode: {NUM_ROWS} rows {where}", "row", NUM_ROWS * NUM_STEPS, NUM_TURNS, suite=WINDOWS)
    race({name: Decode(name, num_before) for name in (*WINDOWS.rivals, WINDOWS.ours)}, work)


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "num_full", "num_windows"),
    [(32_768, 32_768, 1, 5), (100_000, 2048, 1, 5), (100_000, 2048, 0, 2)],
)
def test_prompt(race: Race, num_tokens: int, num_computed: int, num_full: int, num_windows: int) -> None:
    layout = f"{num_full} full and {num_windows} windows" if num_full else f"{num_windows} windows alone"
    name = f"prompt of {num_tokens:,} tokens, {num_computed:,} computed, {layout}"
    work = Work(name, "page of the prompt", num_tokens // PAGE_SIZE, NUM_TURNS, suite=WINDOWS)
    contenders = {
        windows: Prompt(windows, num_tokens, num_computed, num_full, num_windows) for windows in (*WINDOWS.rivals, WINDOWS.ours)
    }
    race(contenders, work)
