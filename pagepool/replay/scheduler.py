"""A simulated scheduler: continuous batching, chunked prefill, preemption, one token a request and step.

A step has a budget of tokens. Running requests come first, in the order in which they were admitted: one
token for those that decode, as much as the budget allows for those whose tokens are not all computed. A
request that gets no room preempts the newest one, again and again, itself last. Then waiting requests are
admitted in order, the first that does not fit ends it; a step that preempted admits nobody. A preempted
request gives back its pages, waits before all others and computes its tokens, the generated ones included,
anew, as far as they are not hit.

There is no clock: all requests wait from the start, in order, and times of arrival are not looked at. So the
figures do not depend on how fast the machine is, and the load is the heaviest there can be.
"""

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from pagepool.errors import PagePoolError, RequestTooLargeError
from pagepool.replay.figures import Figures
from pagepool.replay.simulated_request import SimulatedRequest
from pagepool.replay.timed_manager import Manager, TimedManager
from pagepool.request import EngineRequestStatus
from pagepool.specs import require_int

__all__ = ["Scheduler"]


class Scheduler:
    """Runs requests through a manager to their end.

    `skipped` lists the requests that are larger than the whole pool, each with the manager's reason; they are
    not run. Raises `ArgumentError` or `ArgumentTypeError` if a limit is not a positive integer.
    """

    def __init__(
        self,
        manager: Manager,
        requests: Iterable[SimulatedRequest],
        *,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
    ) -> None:
        """`max_num_batched_tokens` limits a step, `max_num_seqs` the requests that run at once."""
        self.max_num_batched_tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, minimum=1)
        self.max_num_seqs = require_int("max_num_seqs", max_num_seqs, minimum=1)
        self.figures = Figures()
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.skipped: list[tuple[SimulatedRequest, str]] = []
        self._manager = manager
        self._timed = TimedManager(manager)
        for request in requests:
            self._enqueue(request)

    def run(self, on_step: Callable[[Figures], object] | None = None) -> Figures:
        """Step until no request is left; `on_step` sees the figures so far after each step.

        Cost: one or two calls to the manager for each running request and step.
        """
        start = perf_counter()
        stats = self._manager.page_pool.stats
        while self.waiting or self.running:
            self.step()
            if on_step is not None:
                on_step(self.figures)
        self.figures.wall_seconds = perf_counter() - start
        self.figures.allocator_seconds = self._timed.seconds
        new_stats = self._manager.page_pool.stats
        self.figures.allocated_pages = new_stats.num_allocated_pages - stats.num_allocated_pages
        self.figures.evicted_pages = new_stats.num_evicted_pages - stats.num_evicted_pages
        return self.figures

    def step(self) -> None:
        """One step: running requests, then waiting ones, then each decodes a token whose tokens are all
        computed.

        Raises `PagePoolError` if nothing can be scheduled, which a manager that loses no pages never causes.
        """
        scheduled, budget = self._schedule_running()
        scheduled += self._admit(budget)
        if not scheduled:
            raise PagePoolError(f"no request got room at usage {self._manager.usage:.3f}: pages were lost")
        self.figures.see_usage(self._manager.usage)
        self._compute(scheduled)

    def _enqueue(self, request: SimulatedRequest) -> None:
        try:
            self._manager.require_capacity(request.num_slots)
        except RequestTooLargeError as error:
            self.skipped.append((request, str(error)))
            self.figures.skipped += 1
        else:
            self.waiting.append(request)

    def _schedule_running(self) -> tuple[list[tuple[SimulatedRequest, int]], int]:
        """What running requests compute, and the budget left for waiting ones: none if any was preempted."""
        scheduled: list[tuple[SimulatedRequest, int]] = []
        budget = self.max_num_batched_tokens
        num_preemptions = self.figures.preemptions
        while len(scheduled) < len(self.running) and budget:
            request = self.running[len(scheduled)]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, num_new_tokens):
                break
            scheduled.append((request, num_new_tokens))
            budget -= num_new_tokens
        return scheduled, budget if self.figures.preemptions == num_preemptions else 0

    def _make_room(self, request: SimulatedRequest, num_new_tokens: int) -> bool:
        """Preempt the newest until the request has its room; False if it had to go itself."""
        while self._timed.allocate_slots(request, num_new_tokens) is None:
            newest = self.running.pop()
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _preempt(self, request: SimulatedRequest) -> None:
        self._timed.free(request)
        request.status = EngineRequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        self.figures.preemptions += 1

    def _admit(self, budget: int) -> list[tuple[SimulatedRequest, int]]:
        admitted: list[tuple[SimulatedRequest, int]] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_new_tokens = self._start(request, budget)
            if num_new_tokens == 0:
                break
            self.running.append(self.waiting.popleft())
            admitted.append((request, num_new_tokens))
            budget -= num_new_tokens
        return admitted

    def _start(self, request: SimulatedRequest, budget: int) -> int:
        """Take the hits and room for the first tokens after them; return how many, 0 if the pool is too
        short."""
        request.load_token_ids()  # ahead of the manager, whose time is taken
        pages, num_hit_tokens = self._timed.get_computed_pages(request)
        num_new_tokens = min(request.num_tokens - num_hit_tokens, budget)
        if self._timed.allocate_slots(request, num_new_tokens, num_hit_tokens, pages) is None:
            return 0
        self._count_admission(request, num_hit_tokens)
        request.num_computed_tokens = num_hit_tokens
        request.status = EngineRequestStatus.RUNNING
        return num_new_tokens

    def _count_admission(self, request: SimulatedRequest, num_hit_tokens: int) -> None:
        if request.status is EngineRequestStatus.PREEMPTED:
            self.figures.rehit_tokens += num_hit_tokens
        else:
            self.figures.prompt_tokens += request.num_prompt_tokens
            self.figures.hit_tokens += num_hit_tokens

    def _compute(self, scheduled: list[tuple[SimulatedRequest, int]]) -> None:
        num_ended = self.figures.requests
        for request, num_new_tokens in scheduled:
            request.num_computed_tokens += num_new_tokens
            if request.num_computed_tokens == request.num_tokens:
                self._decode(request)
        if self.figures.requests > num_ended:
            self.running = [one for one in self.running if one.status is EngineRequestStatus.RUNNING]

    def _decode(self, request: SimulatedRequest) -> None:
        """Generate the next token, if the answer has one, and end the request after the last."""
        if request.num_tokens < request.num_final_tokens:
            request.num_tokens += 1
            self.figures.generated_tokens += 1
        if request.num_tokens == request.num_final_tokens:
            self._timed.free(request)
            self._timed.free_page_hashes(request)
            request.drop_token_ids()
            request.status = EngineRequestStatus.FINISHED_LENGTH_CAPPED
            self.figures.requests += 1
