"""The work of the limit in a running batch: ``python -m bench.races.limit_work`` prints one JSON line, like the C program.

Pools, rows, steps and prompts are the same. Times are nanoseconds a row or a page, medians of seven rounds in a separate
process. The two can therefore be compared; in a race the rivals would empty the caches.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import numpy as np

import pagepool
from bench.workload import PAGE_SIZE, make_group

NUM_ROUNDS = 7
CONTEXT_LEN = 2048
NUM_STEPS = 128
NUM_PROMPTS = 32
PAGES_PER_PROMPT = 512
PROMPT_LEN = PAGES_PER_PROMPT * PAGE_SIZE
NUM_TAKEN = 5000
NUM_TAKES = 100


def make_batch(num_pages: int, num_rows: int, max_model_len: int) -> pagepool.RunningBatch:
    manager = pagepool.CacheManager(num_pages, [make_group(pagepool)], max_model_len)
    return pagepool.RunningBatch(manager, pagepool.PageTable(num_rows, max_model_len // PAGE_SIZE, max_model_len))


def decode(num_rows: int) -> float:
    """Time steps in which each row gets a token; rows have different phases."""
    pages_per_row = (CONTEXT_LEN + NUM_STEPS) // PAGE_SIZE + 2
    batch = make_batch(num_rows * pages_per_row + num_rows + 2, num_rows, pages_per_row * PAGE_SIZE)
    rows = np.arange(num_rows, dtype=np.int32)
    for row in range(num_rows):
        batch.admit(row, np.arange(CONTEXT_LEN - row % PAGE_SIZE, dtype=np.int32) + row * CONTEXT_LEN)
    sampled = [rows + 31 * step for step in range(NUM_STEPS)]
    start = perf_counter_ns()
    for token_ids in sampled:
        batch.step(rows, token_ids).new_page_ids  # noqa: B018  an engine reads them
    return (perf_counter_ns() - start) / NUM_STEPS / num_rows


def prompts(num_pages: int, num_different: int) -> float:
    """Time the admission and release of prompts. Repeated prompts are cached if the pool is large enough."""
    batch = make_batch(num_pages, 1, PROMPT_LEN)
    tokens = 7 * np.arange(NUM_PROMPTS * PROMPT_LEN, dtype=np.int32).reshape(NUM_PROMPTS, PROMPT_LEN)
    if num_different < NUM_PROMPTS:
        for prompt in tokens[:num_different]:
            batch.admit(0, prompt)
            batch.release([0])
    start = perf_counter_ns()
    for i in range(NUM_PROMPTS):
        batch.admit(0, tokens[i % num_different])
        batch.release([0])
    return (perf_counter_ns() - start) / NUM_PROMPTS / PAGES_PER_PROMPT


def churn(num_pages: int) -> float:
    pool = pagepool.PagePool(num_pages, enable_caching=True)
    start = perf_counter_ns()
    for _ in range(NUM_TAKES):
        pool.free_page_ids(pool.get_new_page_ids(NUM_TAKEN))
    return (perf_counter_ns() - start) / NUM_TAKES / NUM_TAKEN


LARGE_POOL = (NUM_PROMPTS + 1) * PAGES_PER_PROMPT + 2
WORKS: dict[str, Callable[[], float]] = {
    "decode_256": lambda: decode(256),
    "decode_1024": lambda: decode(1024),
    "decode_4096": lambda: decode(4096),
    "cold": lambda: prompts(LARGE_POOL, NUM_PROMPTS),
    "hot": lambda: prompts(LARGE_POOL, 2),  # two in turn, since a row keeps the hashes of its last prompt
    "evict": lambda: prompts(4 * PAGES_PER_PROMPT + 2, NUM_PROMPTS),
    "churn_1M": lambda: churn(1_000_002),
}

if __name__ == "__main__":
    gc.disable()
    print(json.dumps({name: round(median(work() for _ in range(NUM_ROUNDS)), 1) for name, work in WORKS.items()}))
