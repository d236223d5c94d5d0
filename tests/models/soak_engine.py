"""Engines that can be disturbed: a replay's schedulers whose requests are aborted, and survive a restart. Pools of
several stay equal.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pool_arrays import pool_arrays

import pagepool
from pagepool.replay import Scheduler, SimulatedRequest
from pagepool.replay.simulation.allocator import Allocator, BatchAllocator, ManagerAllocator
from pagepool.replay.traces.simulated_request import Int32Array

PagesByGroup = tuple[list[int], ...]


class SoakError(AssertionError):
    """Engines differ, a wrong call was not refused, or something is left at the end."""


def require_equal(what: str, values: list[Any]) -> None:
    """Raise if the engines differ."""
    if any(value != values[0] for value in values[1:]):
        raise SoakError(f"{what}: " + " against ".join(f"{value!r:.500}" for value in values))


def pool_state(pool: pagepool.PagePool) -> tuple[Any, ...]:
    """Return the free order, the ref counts, the number of prefix entries and the counters."""
    counts = pool.ref_counts()
    counts[0] = 0  # the null page's count is not maintained
    return pool.free_page_ids_in_order().tobytes(), counts.tobytes(), len(pool.cached_page_hash_to_page), pool.stats


def require_same_pools(what: str, pools: list[pagepool.PagePool]) -> None:
    """Raise if pools differ in what they keep, including prefix entries and their order among equals."""
    first, *others = map(sort_entries, pools)
    differences = {name for other in others for name in first if not np.array_equal(first[name], other[name])}
    if differences:
        raise SoakError(f"{what}: they differ in {', '.join(sorted(differences))}")


def sort_entries(pool: pagepool.PagePool) -> dict[str, Any]:
    """Return the arrays of a pool, with the prefix entries by key, since their order in the index is different in each pool,
    and without the number of refusals, since a batch is not asked again while it would refuse.
    """
    arrays = pool_arrays(pool)
    arrays["pool_counters"] = np.delete(arrays["pool_counters"], 3, axis=1)
    order = np.lexsort((*arrays["cached_keys"].T, arrays["cached_group_ids"]))
    cached = {name: array[order] for name, array in arrays.items() if name.startswith("cached") and array.size}
    return arrays | cached


def held_page_ids(pool: pagepool.PagePool) -> Any:
    """Return the ids of held pages, ``[held pages]``."""
    return np.flatnonzero(pool.ref_counts()[1:]).astype(np.int32) + 1


class CountingAllocator(Allocator):
    """Counts calls by request: one each for admission, growth and end. Keeps the state that disturbances need."""

    counts: Counter[str]

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        self.counts["operations"] += 1
        return super().admit(row, request, max_num_new_tokens)

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        num_grown = super().grow(rows, num_new_tokens)
        self.counts["operations"] += num_grown
        self.counts["tokens"] += int(num_new_tokens[:num_grown].sum())
        return num_grown

    def preempt(self, row: int) -> None:
        self.counts["operations"] += 1
        super().preempt(row)

    def finish(self, rows: Int32Array, seconds: Sequence[float | None] | None = None) -> None:
        self.counts["operations"] += len(rows)
        super().finish(rows, seconds)

    @abstractmethod
    def get_page_ids(self, row: int) -> PagesByGroup:
        """Return what a row holds."""

    @abstractmethod
    def check(self) -> None:
        """Check all invariants."""


class ManagerSide(CountingAllocator, ManagerAllocator):
    """An engine that works request by request."""

    def __init__(self, manager: pagepool.CacheManager, counts: Counter[str], num_rows: int) -> None:
        super().__init__(manager)
        self.manager = manager
        self.counts = counts

    def get_page_ids(self, row: int) -> PagesByGroup:
        return self.manager.get_page_ids(self._requests[row].request_id)

    def check(self) -> None:
        self.manager.page_pool.check()


class BatchSide(CountingAllocator, BatchAllocator):
    """An engine that works step by step, with a running batch."""

    def __init__(self, manager: pagepool.CacheManager, counts: Counter[str], num_rows: int) -> None:
        super().__init__(manager, num_rows, manager.max_model_len)
        self.manager = manager
        self.batch = self._batch
        self.counts = counts

    def get_page_ids(self, row: int) -> PagesByGroup:
        return self.batch.get_page_ids(row)

    def check(self) -> None:
        self.batch.check()


MakeSide = Callable[[pagepool.CacheManager, "Counter[str]", int], ManagerSide | BatchSide]


class Engine(Scheduler):
    """A scheduler with its own copies of the requests, over one side. Rows are the same on all sides."""

    def __init__(
        self,
        make_manager: Callable[..., pagepool.CacheManager],
        make_side: MakeSide,
        requests: Iterable[SimulatedRequest],
        **limits: int,
    ) -> None:
        self.make_manager = make_manager
        self.manager = make_manager()
        self.make_side = make_side
        self.counts: Counter[str] = Counter()
        super().__init__(self.manager, [replace(request) for request in requests], batched=False, **limits)
        self._set_up()

    def _set_up(self) -> None:
        self._manager = self.manager
        self.pool = self.manager.page_pool
        self.num_rows = len(self._num_tokens)
        self._allocator = self.side = self.make_side(self.manager, self.counts, self.num_rows)

    # state

    def request_of(self, row: int) -> SimulatedRequest:
        return self._requests[row]

    def find_prefilling_rows(self) -> Int32Array:
        """Return the rows whose prompts are not fully computed: a decoding row lacks one token."""
        rows = self.running
        return rows[self._num_tokens[rows] - self._num_computed_tokens[rows] > 1]

    # disturbances

    def abort(self, row: int) -> None:
        """End a running request in any state."""
        self.running = self.running[self.running != row]
        self._allocator.finish(np.array([row], dtype=np.int32))
        self._requests.pop(row).drop_token_ids()
        self._free_rows.append(row)

    def abort_waiting(self, position: int) -> None:
        """End a waiting request, possibly a preempted one."""
        self.manager.free_page_hashes(self.waiting[position])
        del self.waiting[position]

    def preempt_newest(self) -> None:
        self._preempt_newest()

    def preempt_all(self) -> None:
        while self.running.size:
            self._preempt_newest()

    def restart(self, pool: pagepool.PagePool) -> None:
        """Continue with another pool, when all requests wait, under a new manager without their state."""
        for request in self.waiting:
            self.manager.free_page_hashes(request)
        self.counts["pages handed out"] += self.pool.stats.num_allocated_pages
        self.manager = self.make_manager(page_pool=pool)
        self.counts["pages handed out"] -= pool.stats.num_allocated_pages
        self._set_up()

    def drain(self) -> None:
        """End all requests."""
        for row in self.running.tolist():
            self.abort(row)
        while self.waiting:
            self.abort_waiting(0)
        self.counts["pages handed out"] += self.pool.stats.num_allocated_pages
