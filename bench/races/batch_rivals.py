"""A common interface to a running batch and its rivals: an engine's rows with their page ids.

One full-attention group with pages of 16 tokens, prefix caching on. The rivals' managers work request by request, and their
engine has a separate page table: easydel's own, pagepool's, and plain NumPy for the oracle and for vllm, as its block table
is. All make their requests, count computed tokens and append the sampled ones, since a running batch does so itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

import pagepool
from bench.races.rivals import OTHERS, PAGEPOOL, Rival
from bench.races.table_rivals import ObviousPageTable, find_page_tables
from bench.workload import PAGE_SIZE

MAX_MODEL_LEN = 32_768
PAGE_TABLES = find_page_tables()

ENGINES = ("easydel", "vllm")
"""The rivals that are engines, each with its own allocator."""

Tokens = Any
"""Token ids: a list, or an int32 array."""


class RequestByRequest:
    """A manager, its requests by row, and a separate page table."""

    takes_arrays = False

    def __init__(self, rival: Rival, num_pages: int, num_rows: int) -> None:
        self.num_pages, self.rival = num_pages, rival
        self.manager = rival.make_manager(num_pages, MAX_MODEL_LEN)
        make_table = PAGE_TABLES.get(rival.name, ObviousPageTable)
        self.table = make_table(num_rows, MAX_MODEL_LEN // PAGE_SIZE, MAX_MODEL_LEN)
        self.requests: dict[int, Any] = {}
        self._num_requests = 0

    def make_request(self, tokens: Tokens) -> Any:
        """Make a request. A list of tokens becomes the request's own, which appends to it."""
        self._num_requests += 1
        return self.rival.make_request(f"request-{self._num_requests}", tokens)

    def admit(self, row: int, tokens: Tokens) -> Sequence[int]:
        """Take the longest cached prefix and pages for the rest, fill the row, and return its page ids."""
        rival, manager, request = self.rival, self.manager, self.make_request(tokens)
        hits, num_hit_tokens = rival.find_prefix(manager, request)
        manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits)
        request.num_computed_tokens = request.num_tokens
        page_ids = rival.get_row(manager, request)
        self.table.add_row(page_ids, row)
        self.requests[row] = request
        return page_ids

    def is_refused(self, request: Any) -> bool:
        """Try to start a request that does not fit."""
        hits, num_hit_tokens = self.rival.find_prefix(self.manager, request)
        return self.manager.allocate_slots(request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits) is None

    def step(self, rows: Iterable[int], token_ids: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Append one token to each row and give it its slot. Returns the new page ids by row."""
        allocate, read_ids, append_row, requests = (
            self.manager.allocate_slots,
            self.rival.read_ids,
            self.table.append_row,
            self.requests,
        )
        new = []
        for row, token_id in zip(rows, token_ids, strict=True):
            request = requests[row]
            request.append_output_token_ids(token_id)
            (page_ids,) = read_ids(allocate(request, 1))
            request.num_computed_tokens += 1
            if page_ids:
                append_row(page_ids, row)
                new.append((row, page_ids))
        return new

    def release(self, rows: Iterable[int]) -> None:
        """Free the rows' pages, last page first."""
        for row in rows:
            self.rival.release(self.manager, self.requests.pop(row))
            self.table.clear_row(row)

    def list_new_pages(self, results: Iterable[list[tuple[int, list[int]]]]) -> list[tuple[int, int]]:
        """Return the new pages of some steps as pairs of row and page id, for comparison."""
        return [(row, page_id) for row, page_ids in chain.from_iterable(results) for page_id in page_ids]


class ManagerWithArrays(RequestByRequest):
    """Pagepool's manager, which accepts tokens in arrays too."""

    takes_arrays = True


class Batched:
    """A running batch."""

    takes_arrays = True

    def __init__(self, num_pages: int, num_rows: int, rival: Rival = PAGEPOOL) -> None:
        self.num_pages = num_pages
        self.manager = rival.make_manager(num_pages, MAX_MODEL_LEN)
        self.table = pagepool.PageTable(num_rows, MAX_MODEL_LEN // PAGE_SIZE, MAX_MODEL_LEN)
        self.batch = pagepool.RunningBatch(self.manager, self.table)
        self.release = self.batch.release

    def make_request(self, tokens: Tokens) -> Tokens:
        """Return what `is_refused` takes."""
        return tokens

    def admit(self, row: int, tokens: Tokens) -> Any:
        self.batch.admit(row, tokens)
        return self.table.page_table_cpu[row, : self.table.num_pages_per_row[row]].copy()

    def is_refused(self, tokens: Tokens) -> bool:
        return self.batch.admit(0, tokens) is None

    def step(self, rows: Any, token_ids: Any) -> tuple[Any, Any]:
        result = self.batch.step(rows, token_ids)
        return result.new_page_rows, result.new_page_ids

    def list_new_pages(self, results: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
        return [pair for rows, page_ids in results for pair in zip(rows.tolist(), page_ids.tolist(), strict=True)]


Engine = RequestByRequest | Batched


def make_engines(num_pages: int, num_rows: int, rivals: Sequence[str]) -> dict[str, Engine]:
    """Make new engines by the name of their column: ours and those of the named rivals that are installed."""
    others = {rival.name: rival for rival in OTHERS if rival.name in rivals}
    return {
        "batched": Batched(num_pages, num_rows),
        "manager": ManagerWithArrays(PAGEPOOL, num_pages, num_rows),
        **{name: RequestByRequest(rival, num_pages, num_rows) for name, rival in others.items()},
    }


def shuffle_free_pages(engine: Engine) -> None:
    """Shuffle the free queue of a pagepool pool, as in a pool that has served for a while."""
    pool = engine.manager.page_pool
    order = np.random.default_rng(0).permutation(pool.get_num_free_pages())
    page_ids = pool.get_new_page_ids(len(order))
    pool.free_page_ids(page_ids[order])
