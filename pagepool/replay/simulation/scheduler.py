"""A simulated scheduler: continuous batching, chunked prefill, preemption, one decoded token per request and step.

A step has a budget of tokens. Running requests come first, in order of admission: one token if decoding, otherwise as many as
the budget allows. With checkpoints of states, a chunk ends at the last checkpoint within the budget. A request without room
preempts the newest requests, finally itself. Then waiting requests are admitted, in the order of arrival or as a `WaitingQueue`
orders them, until one does not fit; after a preemption none is admitted in the step. A preempted request releases its pages,
moves to the front of the queue, and recomputes its tokens, including generated ones, except for hits. At the end of a step its
moves are taken: loads and saves of a host tier, copies and writes of states; they complete when the next step begins.

There is no clock: all requests wait from the start, in order. The figures therefore do not depend on the machine, and the load
is the highest possible. Only the pauses of sessions, if reported to the pool, follow the time of the trace.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter

import numpy as np

from pagepool.arguments import require_flag, require_int
from pagepool.errors import PagePoolError, RequestTooLargeError
from pagepool.manager import CacheManager
from pagepool.replay.simulation.allocator import Allocator, BatchAllocator, ManagerAllocator
from pagepool.replay.simulation.backlog import Backlog, Order
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.sessions import SessionReports, Told
from pagepool.replay.traces.simulated_request import Int32Array, SimulatedRequest
from pagepool.request import EngineRequestStatus


class Scheduler:
    """Simulated scheduler: runs requests through a manager.

    `skipped` lists the requests larger than the pool, each with the manager's reason. `running` has the rows of running
    requests, in order of admission. Raises `ArgumentError` or `ArgumentTypeError` if a limit is not a positive integer.
    """

    def __init__(
        self,
        manager: CacheManager,
        requests: Iterable[SimulatedRequest],
        *,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        batched: bool = True,
        max_num_tokens: int | None = None,
        told: Told = "nothing",
        order: Order = "arrival",
    ) -> None:
        """`max_num_batched_tokens` limits a step, `max_num_seqs` the running requests. With `batched` a `RunningBatch`
        allocates, otherwise the manager does, one request at a time; only the times differ. `max_num_tokens` is the maximum
        length of requests added later; None if none are added. `told` selects the reports about sessions to the pool:
        ``"nothing"``, their ``"ends"``, or also their ``"pauses"``; with reports, the pool's clock follows the trace.
        `order` is the order of admission: see `Backlog`.
        """
        self.max_num_batched_tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, minimum=1)
        self.max_num_seqs = require_int("max_num_seqs", max_num_seqs, minimum=1)
        self.figures = Figures()
        self.waiting = Backlog(manager, order)
        self.skipped: list[tuple[SimulatedRequest, str]] = []
        self._manager = manager
        self._sessions = SessionReports(manager, told)
        self.started: list[SimulatedRequest] = []
        self.ended: list[SimulatedRequest] = []
        requests = list(requests)
        for request in requests:
            self.add(request)
        num_rows = self.max_num_seqs if max_num_tokens else min(self.max_num_seqs, len(self.waiting))
        self._allocator: Allocator = ManagerAllocator(manager)
        if require_flag("batched", batched) and num_rows:
            skipped = {request.request_id for request, _ in self.skipped}
            lengths = (request.num_final_tokens for request in requests if request.request_id not in skipped)
            self._allocator = BatchAllocator(manager, num_rows, max(max_num_tokens or 0, *lengths, 1))
        # The first waiting request gets the first free row. On a retry, or after a preemption, this row still has its hashes.
        self._free_rows = deque(range(num_rows))
        self._requests: dict[int, SimulatedRequest] = {}
        self.running: Int32Array = np.empty(0, dtype=np.int32)
        self._num_tokens, self._num_computed_tokens, self._num_slots, self._num_new_tokens = np.zeros(
            (4, num_rows), dtype=np.int32
        )

    def run(self, on_step: Callable[[Figures], object] | None = None) -> Figures:
        """Step until no request is left; `on_step` gets the figures after each step.

        Cost: one call to the batch per step, and a few per request; without the batch one or two calls to the manager per
        running request and step.
        """
        start = perf_counter()
        stats = self._manager.stats()
        while self.waiting or self.running.size:
            self.step()
            if on_step is not None:
                on_step(self.figures)
        self.figures.wall_seconds = perf_counter() - start
        self.figures.allocator_seconds = self._allocator.seconds
        new_stats = self._manager.stats()
        self.figures.allocated_pages = new_stats.num_allocated_pages - stats.num_allocated_pages
        self.figures.evicted_pages = new_stats.num_evicted_pages - stats.num_evicted_pages
        self._allocator.complete_moves()
        self.figures.host = self._allocator.count_transfers()
        return self.figures

    def step(self) -> int:
        """Run one step: grow running requests, admit waiting ones, decode. Return the number of tokens computed. Afterwards
        `started` has the requests first admitted in this step, `ended` the finished ones.

        Raise `PagePoolError` if nothing can be scheduled: pages were lost.
        """
        num_preemptions = self.figures.preemptions
        self.started, self.ended = [], []
        self._allocator.complete_moves()
        num_scheduled = self._grow_running()
        if self.figures.preemptions == num_preemptions:
            num_scheduled += self._admit(self.max_num_batched_tokens - num_scheduled)
        if num_scheduled == 0:
            usage = f"usage {self._manager.usage:.3f}"
            raise PagePoolError(f"no request got room at {usage}: pages were lost")
        self.figures.see_usage(self._manager.usage)
        self.figures.copied_pages += self._allocator.take_moves()
        self._decode()
        return num_scheduled

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request, or skip it if it is too large for the pool with this step size."""
        try:
            self._manager.require_capacity(request.num_slots, self.max_num_batched_tokens)
        except RequestTooLargeError as error:
            self.skipped.append((request, str(error)))
            self.figures.skipped += 1
            self.figures.skipped_prompt_tokens += request.num_prompt_tokens
        else:
            self.waiting.add(request)

    def _share_budget(self) -> tuple[Int32Array, Int32Array]:
        """Return the rows to compute in this step, and their numbers of tokens."""
        rows = self.running
        num_new_tokens = self._num_tokens[rows] - self._num_computed_tokens[rows]
        if num_new_tokens.sum() > self.max_num_batched_tokens:
            num_left = self.max_num_batched_tokens - (np.cumsum(num_new_tokens) - num_new_tokens)
            num_left = num_left[num_left > 0]
            rows, num_new_tokens = rows[: len(num_left)], np.minimum(num_new_tokens[: len(num_left)], num_left)
        return rows, num_new_tokens.astype(np.int32)

    def _grow_running(self) -> int:
        """Allocate for running requests, and preempt the newest while there is no room. Return the number of tokens."""
        rows, num_new_tokens = self._share_budget()
        num_done, num_rows = 0, len(rows)
        while num_done < num_rows:
            num_done += self._allocator.grow(rows[num_done:num_rows], num_new_tokens[num_done:num_rows])
            if num_done < num_rows:
                self._preempt_newest()
                num_rows = min(num_rows, len(self.running))
        self._num_computed_tokens[rows[:num_done]] += num_new_tokens[:num_done]
        return int(num_new_tokens[:num_done].sum())

    def _preempt_newest(self) -> None:
        row = int(self.running[-1])
        self.running = self.running[:-1]
        self._allocator.preempt(row)
        request = self._requests.pop(row)
        request.num_tokens = int(self._num_tokens[row])
        request.status = EngineRequestStatus.PREEMPTED
        self.waiting.put_back(request)
        self._free_rows.appendleft(row)
        self.figures.preemptions += 1

    def _admit(self, budget: int) -> int:
        """Start waiting requests while there is room. Return the number of tokens they compute."""
        num_scheduled = 0
        admitted: list[int] = []
        while self.waiting and num_scheduled < budget and self._free_rows:
            row = self._free_rows[0]
            if not self.waiting.admit(partial(self._start, row=row, budget=budget - num_scheduled)):
                break
            admitted.append(self._free_rows.popleft())
            num_scheduled += int(self._num_new_tokens[row])
        if admitted:
            self.running = np.append(self.running, np.array(admitted, dtype=np.int32))
        return num_scheduled

    def _start(self, request: SimulatedRequest, row: int, budget: int) -> int | None:
        """Admit a request, and set the number of tokens that it computes. Return the number of its tokens that hit, or None if
        the pool is short.
        """
        request.load_token_ids()  # loaded outside the allocator, which is timed
        self._sessions.see_arrival(request)
        num_hit_tokens = self._allocator.admit(row, request, budget)
        if num_hit_tokens is None:
            return None
        num_new_tokens = min(request.num_tokens - num_hit_tokens, budget)
        self._count_admission(request, num_hit_tokens)
        self._requests[row] = request
        self._num_tokens[row] = request.num_tokens
        self._num_computed_tokens[row] = num_hit_tokens + num_new_tokens
        self._num_slots[row], self._num_new_tokens[row] = request.num_slots, num_new_tokens
        request.status = EngineRequestStatus.RUNNING
        return num_hit_tokens

    def _count_admission(self, request: SimulatedRequest, num_hit_tokens: int) -> None:
        if request.status is EngineRequestStatus.PREEMPTED:
            self.figures.returned_tokens += request.num_tokens
            self.figures.rehit_tokens += num_hit_tokens
        else:
            self.started.append(request)
            self.figures.prompt_tokens += request.num_prompt_tokens
            self.figures.hit_tokens += num_hit_tokens

    def _decode(self) -> None:
        """Generate a token in each row whose tokens are all computed, and end finished rows."""
        rows = self.running
        num_computed_tokens = self._num_computed_tokens[rows]
        self._num_tokens[rows] = np.maximum(self._num_tokens[rows], num_computed_tokens + 1)
        is_ended = num_computed_tokens == self._num_slots[rows]
        if is_ended.any():
            self.running = rows[~is_ended]
            self._end(rows[is_ended])

    def _end(self, rows: Int32Array) -> None:
        requests = [self._requests.pop(row) for row in rows.tolist()]
        self._allocator.finish(rows, self._sessions.find_pauses(requests))
        self._sessions.close(requests)
        for row, request in zip(rows.tolist(), requests, strict=True):
            request.num_tokens = request.num_final_tokens
            request.drop_token_ids()
            request.status = EngineRequestStatus.FINISHED_LENGTH_CAPPED
            self._free_rows.insert(1, row)  # reused before rows with untouched memory
            self.figures.requests += 1
            self.figures.generated_tokens += request.num_output_tokens
            self.ended.append(request)
