"""The waiting requests of a simulated scheduler, in order of arrival or with the least to compute first."""

from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

from pagepool._core import WaitingRequest
from pagepool.manager import CacheManager
from pagepool.replay.traces.simulated_request import SimulatedRequest
from pagepool.request import RequestTraits
from pagepool.waiting_queue import WaitingQueue

MAX_QUEUED = 1024
"""The most requests in a `WaitingQueue`, which keeps their tokens. In a replay all requests wait from the start."""

Order: TypeAlias = Literal["arrival", "work"]

Start: TypeAlias = Callable[[SimulatedRequest], int | None]
"""Starts a request, and returns the number of its tokens that hit, or None if the pool is short."""


class Backlog:
    """Waiting requests. Those that were preempted are in front of all others."""

    def __init__(self, manager: CacheManager, order: Order) -> None:
        """With `order` ``"work"`` a `WaitingQueue` with its defaults orders the next `MAX_QUEUED` requests."""
        self._later: deque[SimulatedRequest] = deque()
        self._queued: dict[str, SimulatedRequest] = {}
        self._queue = None if order == "arrival" else WaitingQueue(manager)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._later) + len(self._queued)

    def add(self, request: SimulatedRequest) -> None:
        """Add a request that arrives."""
        self._later.append(request)

    def put_back(self, request: SimulatedRequest) -> None:
        """Add a preempted request in front."""
        if self._queue is None:
            self._later.appendleft(request)
        else:
            self._queue.put_back(request.request_id, request.load_token_ids()[: request.num_tokens], traits=_traits_of(request))
            self._queued[request.request_id] = request

    def admit(self, start: Start) -> bool:
        """Start the next request; False if the pool is short for it."""
        if self._queue is None:
            is_started = start(self._later[0]) is not None
            if is_started:
                self._later.popleft()
            return is_started

        def start_queued(waiting: WaitingRequest) -> int | None:
            return start(self._queued[waiting.name])

        self._fill(self._queue)
        admission = self._queue.admit_by(start_queued)
        if admission is not None:
            del self._queued[str(admission.name)]
        return admission is not None

    def _fill(self, queue: WaitingQueue) -> None:
        """Queue further requests while there is room."""
        while self._later and len(queue) < MAX_QUEUED:
            request = self._later.popleft()
            self._queued[request.request_id] = request
            queue.add(request.request_id, request.load_token_ids()[: request.num_tokens], traits=_traits_of(request))
            request.drop_token_ids()


def _traits_of(request: SimulatedRequest) -> RequestTraits:
    return RequestTraits(session_id=request.session_id)
