"""Admission to a running batch, again in the row of an earlier try."""

import numpy as np
import pytest

from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch

PAGE_SIZE = 4
PROMPT = np.arange(22, dtype=np.int32)


def make_batch(num_pages: int = 64) -> RunningBatch:
    spec = FullAttentionSpec(PAGE_SIZE, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
    manager = CacheManager(num_pages, [CacheGroupSpec(spec)], max_model_len=64)
    return RunningBatch(manager, PageTable(4, 16, 64))


class TestTheSameRowAgain:
    """A free row keeps its hashes. A wrong one would hit too much or too little."""

    def test_with_other_tokens(self) -> None:
        rng = np.random.default_rng(5)
        batch, fresh = make_batch(), make_batch()
        for _ in range(200):
            tokens = rng.integers(2, size=rng.integers(1, 40), dtype=np.int32)
            assert batch.admit(2, tokens) == fresh.admit(int(rng.integers(4)), tokens)
            batch.release([2])
            fresh.release(np.flatnonzero(fresh.is_admitted))
            batch.check()

    def test_with_keys_and_without(self) -> None:
        batch = make_batch()
        for salt, num_hits in ((None, 0), ("a", 0), ("b", 0), (None, 20), ("a", 20), ("a", 20)):
            assert batch.admit(0, PROMPT, cache_salt=salt) == num_hits
            batch.release([0])

    @pytest.mark.parametrize("admitted", [[], [0], [1], [0, 1]])
    def test_after_rows_changed_places(self, admitted: list[int]) -> None:
        batch = make_batch()
        prompts = [PROMPT, PROMPT[:14] * 2 + 1]
        for row in (0, 1):
            batch.admit(row, prompts[row])
        batch.release([row for row in (0, 1) if row not in admitted])
        batch.swap_row(0, 1)
        batch.release(np.flatnonzero(batch.is_admitted))
        for row in (0, 1):
            assert batch.admit(row, prompts[row]) == len(prompts[row]) - 2
            assert batch.admit(2, prompts[1 - row]) == len(prompts[1 - row]) - 2
            batch.release([row, 2])
        batch.check()
