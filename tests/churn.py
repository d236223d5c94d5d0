"""Uses pages repeatedly in a separate process and prints the growth of its memory: ``python churn.py operations``, ``...
pools``.

An operation is a page that is taken, given back, touched, hashed, found or entered.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, PagePool, PageTable, RunningBatch

NUM_OPERATIONS = 10_000_000
NUM_POOLS = 100
NUM_POOL_PAGES = 1_000_000
PAGE_SIZE = 16
NUM_PAGES = 512
"""Of a prompt."""
SPEC = FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False)


class Prompt(EngineRequest):
    """A request whose tokens stay an array."""

    def __init__(self, request_id: str, token_ids: np.ndarray) -> None:
        super().__init__(request_id, [])
        self.all_token_ids = token_ids  # type: ignore[assignment]


def max_resident_bytes() -> int:
    """Return the peak memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Churn:
    """Calls of all kinds in pairs: all pages taken are given back."""

    def __init__(self) -> None:
        self.manager = CacheManager(4 * NUM_PAGES, [CacheGroupSpec(SPEC)], 1 << 20)
        self.pool = self.manager.page_pool
        self.batch = RunningBatch(self.manager, PageTable(4, 2 * NUM_PAGES, 1 << 20))
        self.numbers = itertools.count()

    def round(self) -> int:
        """Do some of each; return the number of operations."""
        return self.take_and_touch() + self.serve_twice() + self.run_rows()

    def take_and_touch(self) -> int:
        """Take, touch, give back twice."""
        page_ids = self.pool.get_new_page_ids(NUM_PAGES)
        self.pool.touch_page_ids(page_ids)
        self.pool.free_page_ids(page_ids)
        self.pool.free_pages([self.pool.pages[page_id] for page_id in page_ids.tolist()])
        return 4 * NUM_PAGES

    def serve_twice(self) -> int:
        """Hash a new prompt, take and enter its pages, and free them; then hash it again, find, touch and free the pages."""
        number = next(self.numbers)
        tokens = np.full(NUM_PAGES * PAGE_SIZE + 1, number, dtype=np.int32)
        for request in (Prompt(f"first {number}", tokens), Prompt(f"second {number}", tokens)):
            hits, num_hit_tokens = self.manager.get_computed_pages(request)
            self.manager.allocate_slots(request, len(tokens) - num_hit_tokens, num_hit_tokens, hits)
            self.manager.free(request)
            self.manager.free_page_hashes(request)
        return 8 * NUM_PAGES

    def run_rows(self) -> int:
        """Hash, take and enter prompts in two rows, grow each by a page, and release both."""
        for row in range(2):
            self.batch.admit(row, np.full(NUM_PAGES * PAGE_SIZE, next(self.numbers), dtype=np.int32))
        for token in range(PAGE_SIZE):
            self.batch.step([0, 1], [token, token])
        self.batch.release([0, 1])
        return 2 * 4 * NUM_PAGES


def measure(step: Callable[[], int], num_operations: int) -> dict[str, Any]:
    """Repeat `step`, which returns its number of operations. Growth is the memory added after the first tenth."""
    num_done = 0
    while num_done < num_operations // 10:
        num_done += step()
    before = max_resident_bytes()
    while num_done < num_operations:
        num_done += step()
    return {"num_operations": num_done, "num_bytes": before, "num_grown_bytes": max_resident_bytes() - before}


def make_pool() -> int:
    """Make and drop a large pool, which needs no garbage collection if no page object was made."""
    PagePool(NUM_POOL_PAGES, enable_caching=True).get_new_page_ids(9)
    return 1


def main() -> None:
    """Run the measurement that the argument names."""
    if sys.argv[1] == "pools":
        gc.disable()
        print(json.dumps(measure(make_pool, NUM_POOLS)))
    else:
        churn = Churn()
        print(json.dumps(measure(churn.round, NUM_OPERATIONS)))
        churn.batch.check()
        assert churn.manager.usage == 1 / churn.pool.num_pages


if __name__ == "__main__":
    main()
