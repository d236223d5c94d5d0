"""One engine of a fleet: a manager and a scheduler on a simulated clock."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from pagepool.events import EventBatch, encode_batch
from pagepool.manager import CacheManager
from pagepool.page_hashing import PageHashing
from pagepool.page_pool.pool import EvictionPolicy
from pagepool.replay.models.pages import ModelPages
from pagepool.replay.simulation.backlog import Order
from pagepool.replay.simulation.figures import Figures
from pagepool.replay.simulation.scheduler import Scheduler
from pagepool.replay.traces.reader import make_requests
from pagepool.replay.traces.records import TraceRecord

HASH_SEED = "fleet"  # router and engines must agree on page hashes


@dataclass(frozen=True)
class ReplicaSettings:
    """Pool, step limits and speed of each replica."""

    num_pages: int
    page_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    decode_step_seconds: float = 0.025
    prefill_tokens_per_second: float = 10_000.0
    seed: int = 0
    """Random seed for tokens without a hash id."""
    eviction: str = "lru"
    order: Order = "arrival"
    """The order in which waiting requests are admitted."""

    def step_seconds(self, num_tokens: int) -> float:
        """Return the duration of a step: the decode time, or the prefill time of its tokens if longer."""
        return max(self.decode_step_seconds, num_tokens / self.prefill_tokens_per_second)


@dataclass(frozen=True)
class ReplicaReport:
    """Report of a replica's work since the last report. Requests are indices into the trace."""

    ended: list[int]
    skipped: list[int]
    wait_seconds: list[float]
    """Waiting times of started requests, from arrival to first step."""
    figures: Figures
    """Figures since the start of the replica."""
    events: bytes
    """An encoded batch of events."""
    next_step_seconds: float
    """Start of the next step; infinite without requests."""


class Replica:
    """A replica: runs the requests assigned by a router."""

    def __init__(self, settings: ReplicaSettings, records: Sequence[TraceRecord], now: float = 0.0) -> None:
        """Start at `now`; `records` is the whole trace."""
        self._settings = settings
        self._requests = make_requests(records, seed=settings.seed)
        self._indices = {request.request_id: i for i, request in enumerate(self._requests)}
        max_num_tokens = max(request.num_final_tokens for request in self._requests)
        self._manager = CacheManager(
            settings.num_pages,
            ModelPages(settings.page_size).make_groups(),
            max_num_tokens,
            hashing=PageHashing(hash_seed=HASH_SEED),
            eviction=cast("EvictionPolicy", settings.eviction),
        )
        self._manager.enable_events()
        self._scheduler = Scheduler(
            self._manager,
            (),
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_tokens=max_num_tokens,
            order=settings.order,
        )
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque()
        self._arrival_seconds: dict[str, float] = {}

    def advance(self, until: float, arrivals: Sequence[tuple[float, int]]) -> ReplicaReport:
        """Run until a time, with the requests ``(arrival, index)`` up to then, in order."""
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
        """The current time; infinite without requests. It may be later than `until` in `advance`: no step is interrupted."""
        has_requests = self._arrivals or self._scheduler.waiting or self._scheduler.running.size
        return self._now if has_requests else math.inf

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            seconds, i = self._arrivals.popleft()
            self._arrival_seconds[self._requests[i].request_id] = seconds
            self._scheduler.add(self._requests[i])

    def _step(self, ended: list[int], waits: list[float]) -> None:
        start = self._now
        self._now += self._settings.step_seconds(self._scheduler.step())
        waits += [start - self._arrival_seconds.pop(request.request_id) for request in self._scheduler.started]
        ended += [self._indices[request.request_id] for request in self._scheduler.ended]
