"""Requests that come and go at their times, through a `RunningBatch` of one group of full attention: see `keeping`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from bench.workload import PAGE_SIZE, Int32Array, make_group
from pagepool import CacheManager, PageHashing, PageTable, RequestTraits, RunningBatch, specs

HASH_SEED = 1
TOO_SMALL = "the pool is too small for a request"
RETRY_SECONDS = 1.0


class Timeline:
    """Calls actions at their times, in seconds, and of equal times those first that were added first. `set_time`
    sets the clock of others before each.
    """

    def __init__(self, set_time: Callable[[float], object]) -> None:
        self.now = 0.0
        self._set_time = set_time
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def call_at(self, time: float, action: Callable[[], object]) -> None:
        heappush(self._due, (time, next(self._numbers), action))

    def call_in(self, seconds: float, action: Callable[[], object]) -> None:
        self.call_at(self.now + seconds, action)

    def run(self) -> None:
        """Call until nothing is due any more."""
        while self._due:
            self.now, _, action = heappop(self._due)
            self._set_time(self.now)
            action()


class TimedBatch:
    """A running batch on a timeline. A request is admitted with all of its tokens, the answer's too."""

    def __init__(self, num_pages: int, num_rows: int, max_num_tokens: int, eviction: str) -> None:
        self.manager = CacheManager(
            num_pages, [make_group(specs)], max_num_tokens, eviction=eviction, hashing=PageHashing(hash_seed=HASH_SEED)
        )
        self.timeline = Timeline(self._set_time)
        self.batch = RunningBatch(self.manager, PageTable(num_rows, -(-max_num_tokens // PAGE_SIZE), 1))
        self._num_rows = num_rows
        self._rows = list(range(num_rows))
        self._set_time(0.0)

    def _set_time(self, time: float) -> None:
        """Let the manager's clock stand at a time, which it wants to be above 0."""
        self.manager.page_pool.store.set_time(1 + time)

    def start(self, token_ids: Int32Array, on_start: Callable[[int, int], object], **options: Any) -> None:
        """Admit a request, now or as soon as there are pages, and call `on_start` with its row and the tokens that hit."""
        num_hits = self.batch.admit(self._rows[-1], token_ids, traits=RequestTraits(**options))
        if num_hits is None:
            assert len(self._rows) < self._num_rows, TOO_SMALL
            self.timeline.call_in(RETRY_SECONDS, partial(self.start, token_ids, on_start, **options))
        else:
            on_start(self._rows.pop(), num_hits)

    def end(self, row: int, **options: Any) -> None:
        """Release the row of a request."""
        self.batch.release([row], **options)
        self._rows.append(row)
