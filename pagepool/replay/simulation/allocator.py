"""Who allocates for the scheduler's rows: a manager, request by request, or a running batch, a whole step at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

import numpy as np

from pagepool.manager import CacheManager
from pagepool.page_table import MultiGroupPageTable
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest
from pagepool.request import EngineRequestStatus
from pagepool.running_batch import RunningBatch
from pagepool.specs import CacheGroupSpec, FullAttentionSpec

__all__ = ["Allocator", "BatchAllocator", "ManagerAllocator", "make_groups"]

Params = ParamSpec("Params")
Result = TypeVar("Result")


def make_groups(page_size: int) -> list[CacheGroupSpec]:
    """One full-attention group. The number of bytes that a page stands for plays no part."""
    spec = FullAttentionSpec(page_size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
    return [CacheGroupSpec(spec)]


class Allocator(ABC):
    """Pages for the requests in rows. `seconds` adds up how long the calls of manager or batch take, each with 0.1 us for
    looking at the clock; what is done around them is not in it.
    """

    def __init__(self) -> None:
        """Start at 0 seconds."""
        self.seconds = 0.0

    def _time(self, call: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        start = perf_counter()
        result = call(*args, **options)
        self.seconds += perf_counter() - start
        return result

    @abstractmethod
    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """Take a request's hits, and room for its tokens after them, at most so many. Returns the tokens that were hit; None,
        and nothing taken, if the pool is too short. The request's tokens are loaded.
        """

    @abstractmethod
    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """Make room for the next tokens of rows, in order. Returns how many rows got it: all, or those before the first that
        does not fit.
        """

    @abstractmethod
    def preempt(self, row: int) -> None:
        """Give back the pages of a row whose request will come back."""

    @abstractmethod
    def finish(self, rows: Int32Array) -> None:
        """Give back the pages of rows whose requests have ended, in order."""


class ManagerAllocator(Allocator):
    """One or two calls for each request and step, as engines make them that know of no batch."""

    def __init__(self, manager: CacheManager) -> None:
        """No row has a request yet."""
        super().__init__()
        self._manager = manager
        self._requests: dict[int, SimulatedRequest] = {}

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """A look-up and an allocation."""
        request.num_computed_tokens = 0
        pages, num_hits = self._time(self._manager.get_computed_pages, request)
        num_new_tokens = min(request.num_tokens - num_hits, max_num_new_tokens)
        if self._time(self._manager.allocate_slots, request, num_new_tokens, num_hits, pages) is None:
            return None
        request.num_computed_tokens = num_hits + num_new_tokens
        self._requests[row] = request
        return num_hits

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """An allocation for each row."""
        for i, (row, num_new) in enumerate(zip(rows.tolist(), num_new_tokens.tolist(), strict=True)):
            request = self._requests[row]
            num_computed_tokens = request.num_computed_tokens + num_new
            request.num_tokens = max(request.num_tokens, num_computed_tokens)  # one more if it was decoded since
            if self._time(self._manager.allocate_slots, request, num_new) is None:
                return i
            request.num_computed_tokens = num_computed_tokens
        return len(rows)

    def preempt(self, row: int) -> None:
        """The hashes stay."""
        self._time(self._manager.free, self._requests.pop(row))

    def finish(self, rows: Int32Array) -> None:
        """The hashes are forgotten."""
        for row in rows.tolist():
            request = self._requests.pop(row)
            self._time(self._manager.free, request)
            self._time(self._manager.free_page_hashes, request)


class BatchAllocator(Allocator):
    """One call for all running requests and step; those that are admitted have one each."""

    def __init__(self, manager: CacheManager, num_rows: int, max_num_tokens: int) -> None:
        """Rows for `num_rows` requests of up to `max_num_tokens` tokens. ArgumentError if a `RunningBatch` refuses the
        manager.
        """
        super().__init__()
        page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
        self._batch = RunningBatch(manager, MultiGroupPageTable(num_rows, max_num_tokens, 0, page_sizes))

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """The answer's tokens, known ahead here, are appended at once after the look-up; no page is entered for them before
        they are grown into.
        """
        token_ids, num_tokens = request.load_token_ids(), request.num_tokens
        num_hits = self._time(
            self._batch.admit,
            row,
            token_ids[:num_tokens],
            max_num_new_tokens=min(max_num_new_tokens, num_tokens),
            is_preempted=request.status is EngineRequestStatus.PREEMPTED,
        )
        if num_hits is not None:
            answer = token_ids[num_tokens:]
            self._time(self._batch.append, np.full(len(answer), row, dtype=np.int32), answer)
        return num_hits

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """One call."""
        return self._time(self._batch.grow, rows, num_new_tokens).num_grown

    def preempt(self, row: int) -> None:
        """The row keeps the hashes until another request comes."""
        self._time(self._batch.release, [row])

    def finish(self, rows: Int32Array) -> None:
        """One call."""
        self._time(self._batch.release, rows)
