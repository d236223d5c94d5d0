"""One engine of a fleet: a manager and its scheduler, on a clock."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagepool.events import EventBatch, encode_batch
from pagepool.manager import CacheManager
from pagepool.replay.simulation.allocator import make_groups
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.traces.reader import TraceRecord, make_requests

__all__ = ["Replica", "ReplicaReport", "ReplicaSettings"]

HASH_SEED = "fleet"  # a router that is told of pages by their hashes hashes prompts as the engines do


@dataclass(frozen=True)
class ReplicaSettings:
    """What each replica has: pages of so many tokens, limits of a step, and how long a step takes: the time for one token of
    each running request, or, where prompts make it longer, the tokens at the rate of prefill.
    """

    num_pages: int
    page_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    decode_step_seconds: float = 0.025
    prefill_tokens_per_second: float = 10_000.0
    seed: int = 0
    """Of the tokens that the trace does not tell."""

    def step_seconds(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes."""
        return max(self.decode_step_seconds, num_tokens / self.prefill_tokens_per_second)


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica did since it was last asked. Requests are called by their place in the trace."""

    ended: list[int]
    skipped: list[int]
    wait_seconds: list[float]
    """From a request's arrival to the step that first computed something of it."""
    figures: Figures
    """Since the replica started."""
    events: bytes
    """A batch of events, as it goes over the wire."""
    next_step_seconds: float
    """When its next step begins; infinite while it has no request."""


class Replica:
    """Runs the requests that a router gives it, one step after another, on a clock that starts at 0 s."""

    def __init__(self, settings: ReplicaSettings, records: Sequence[TraceRecord], now: float = 0.0) -> None:
        """`records` is the whole trace, of which parts will come; `now` the time at which the replica starts."""
        self._settings = settings
        self._requests = make_requests(records, seed=settings.seed)
        self._indices = {request.request_id: i for i, request in enumerate(self._requests)}
        max_num_tokens = max(request.num_final_tokens for request in self._requests)
        self._manager = CacheManager(settings.num_pages, make_groups(settings.page_size), max_num_tokens, hash_seed=HASH_SEED)
        self._manager.enable_events()
        self._scheduler = Scheduler(
            self._manager,
            (),
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_tokens=max_num_tokens,
        )
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque()
        self._arrival_seconds: dict[str, float] = {}

    def advance(self, until: float, arrivals: Sequence[tuple[float, int]]) -> ReplicaReport:
        """Go on to a time, with requests that arrive before it: ``(seconds, place in the trace)``, in order."""
        self._arrivals.extend(arrivals)
        ended: list[int] = []
        waits: list[float] = []
        while self._now < until:
            self._receive()
            if self._scheduler.waiting or self._scheduler.running.size:
                self._step(ended, waits)
            else:
                self._now = min(until, self._arrivals[0][0]) if self._arrivals else until
        skipped = [self._indices[request.request_id] for request, _ in self._scheduler.skipped]
        self._scheduler.skipped.clear()
        events = encode_batch(EventBatch(self._now, self._manager.take_events()))
        return ReplicaReport(ended, skipped, waits, replace(self._scheduler.figures), events, self._next_step_seconds)

    @property
    def _next_step_seconds(self) -> float:
        """Now, unless there is nothing to do: a step that is under way when it is asked goes on beyond the time asked for."""
        has_requests = self._arrivals or self._scheduler.waiting or self._scheduler.running.size
        return self._now if has_requests else math.inf

    def _receive(self) -> None:
        """Let those wait that have arrived."""
        while self._arrivals and self._arrivals[0][0] <= self._now:
            seconds, i = self._arrivals.popleft()
            self._arrival_seconds[self._requests[i].request_id] = seconds
            self._scheduler.add(self._requests[i])

    def _step(self, ended: list[int], waits: list[float]) -> None:
        start = self._now
        self._now += self._settings.step_seconds(self._scheduler.step())
        waits += [start - self._arrival_seconds.pop(request.request_id) for request in self._scheduler.started]
        ended += [self._indices[request.request_id] for request in self._scheduler.ended]
