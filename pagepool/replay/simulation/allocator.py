"""Allocation for the scheduler's rows: by a manager, one request at a time, or by a running batch, one step at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import ParamSpec, TypeVar

import numpy as np

from pagepool.manager import CacheManager
from pagepool.page_table import MultiGroupPageTable
from pagepool.replay.simulation.figures import HostFigures
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest
from pagepool.request import EngineRequestStatus, RequestTraits
from pagepool.running_batch import RunningBatch
from pagepool.specs import MambaSpec

HASH_SEED = "replay"  # adaptive eviction samples by hash: with a random seed its figures would differ between runs

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Allocator(ABC):
    """Pages for the requests in rows. `seconds` is the total time of calls into manager or batch, including the time to read
    the clock.
    """

    def __init__(self, manager: CacheManager) -> None:
        """Reset the timer."""
        self.seconds = 0.0
        self._manager = manager
        self._has_states = manager.checkpoint_interval is not None
        self._has_tier = manager.stats().host_tier is not None
        self._number = self._num_first_loads = 0
        self._taker: CacheManager | RunningBatch = manager

    def _time(self, call: Callable[Params, Result], *args: Params.args, **options: Params.kwargs) -> Result:
        start = perf_counter()
        result = call(*args, **options)
        self.seconds += perf_counter() - start
        return result

    @abstractmethod
    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """Take a request's hits, and allocate slots for up to `max_num_new_tokens` more tokens. Return the number of hit
        tokens, or None, with nothing taken, if the pool is short. The request's tokens must be loaded.
        """

    @abstractmethod
    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """Allocate slots for the next tokens of rows, in order. Return the number of rows served: all, or the rows before the
        first that does not fit.
        """

    @abstractmethod
    def preempt(self, row: int) -> None:
        """Release the row of a preempted request, which will return."""

    @abstractmethod
    def finish(self, rows: Int32Array, seconds: Sequence[float | None] | None = None) -> None:
        """Release rows whose requests have ended, in order. `seconds` has one value per row, as in `RunningBatch.release`."""

    def take_moves(self) -> int:
        """Take the moves that are due before the next step, which then runs. Return the number of pages copied plus states
        written.
        """
        if not self._has_states and not self._has_tier:
            return 0
        moves = self._time(self._taker.take_moves)
        self._number = moves.number
        self._num_first_loads += int((moves.loads.group == 0).sum())
        return len(moves.copies) + len(moves.writes)

    def complete_moves(self) -> None:
        """Complete the moves taken last."""
        if self._number:
            self._time(self._manager.complete, self._number)
            self._number = 0

    def count_transfers(self) -> HostFigures | None:
        """Return the figures of the host tier since it was made; None without one."""
        stats, spec = self._manager.stats().host_tier, self._manager.kv_cache_groups[0].kv_cache_spec
        if stats is None:
            return None
        loaded_tokens = None if isinstance(spec, MambaSpec) else self._num_first_loads * spec.page_size
        return HostFigures(
            stats.num_saved_pages, stats.num_loaded_pages, loaded_tokens, stats.num_evicted_pages, stats.num_refused_pages
        )


class ManagerAllocator(Allocator):
    """Allocation with one or two calls per request and step, like an engine without a running batch."""

    def __init__(self, manager: CacheManager) -> None:
        """Start without requests."""
        super().__init__(manager)
        self._requests: dict[int, SimulatedRequest] = {}

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """Look up and allocate."""
        request.num_computed_tokens = 0
        pages, num_hits = self._time(self._manager.get_computed_pages, request)
        num_new_tokens = min(request.num_tokens - num_hits, max_num_new_tokens)
        if self._time(self._manager.allocate_slots, request, num_new_tokens, num_hits, pages) is None:
            return None
        request.num_computed_tokens = num_hits + num_new_tokens
        self._requests[row] = request
        return num_hits

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """Allocate for each row."""
        for i, (row, num_new) in enumerate(zip(rows.tolist(), num_new_tokens.tolist(), strict=True)):
            request = self._requests[row]
            num_computed_tokens = request.num_computed_tokens + num_new
            request.num_tokens = max(request.num_tokens, num_computed_tokens)  # one more if a token was decoded meanwhile
            if self._time(self._manager.allocate_slots, request, num_new) is None:
                return i
            request.num_computed_tokens = num_computed_tokens
        return len(rows)

    def preempt(self, row: int) -> None:
        """Free the request's pages, and keep its hashes."""
        self._time(self._manager.free, self._requests.pop(row))

    def finish(self, rows: Int32Array, seconds: Sequence[float | None] | None = None) -> None:
        """Free the requests' pages and hashes."""
        for row, pause in zip(rows.tolist(), [None] * len(rows) if seconds is None else seconds, strict=True):
            request = self._requests.pop(row)
            self._time(self._manager.free, request, seconds=pause)
            self._time(self._manager.free_page_hashes, request)


class BatchAllocator(Allocator):
    """Allocation with one call per step for all running requests, and one per admission."""

    def __init__(self, manager: CacheManager, num_rows: int, max_num_tokens: int) -> None:
        """Make a batch of `num_rows` requests of up to `max_num_tokens` tokens. Errors as in `RunningBatch`."""
        super().__init__(manager)
        page_sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
        self._batch = RunningBatch(manager, MultiGroupPageTable(num_rows, max_num_tokens, 0, page_sizes))
        self._taker = self._batch

    def admit(self, row: int, request: SimulatedRequest, max_num_new_tokens: int) -> int | None:
        """Admit the request, and append its whole answer at once: no page of it is cached before the row grows."""
        token_ids, num_tokens = request.load_token_ids(), request.num_tokens
        num_hits = self._time(
            self._batch.admit,
            row,
            token_ids[:num_tokens],
            max_num_new_tokens=min(max_num_new_tokens, num_tokens),
            traits=RequestTraits(
                is_preempted=request.status is EngineRequestStatus.PREEMPTED,
                session_id=request.session_id,
            ),
        )
        if num_hits is not None:
            answer = token_ids[num_tokens:]
            self._time(self._batch.append, np.full(len(answer), row, dtype=np.int32), answer)
        return num_hits

    def grow(self, rows: Int32Array, num_new_tokens: Int32Array) -> int:
        """Grow the rows in one call."""
        return self._time(self._batch.plan, rows, num_new_tokens).num_grown

    def preempt(self, row: int) -> None:
        """Release the row; it keeps its hashes until its next request."""
        self._time(self._batch.release, [row])

    def finish(self, rows: Int32Array, seconds: Sequence[float | None] | None = None) -> None:
        """Release the rows in one call."""
        self._time(self._batch.release, rows, seconds=seconds)
