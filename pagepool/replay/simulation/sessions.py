"""Reports of a simulated engine to the pool about the sessions of a trace."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from pagepool.errors import ArgumentError, shown
from pagepool.manager import CacheManager
from pagepool.replay.traces.simulated_request import SimulatedRequest

Told: TypeAlias = Literal["nothing", "ends", "pauses"]
"""Contents of the reports: nothing, the ends of sessions, or also the exact pause before each next request."""

TOLD: tuple[Told, ...] = get_args(Told)
MAX_CLOCK_SECONDS = 2**26  # two years; a pool's clock is limited


class SessionReports:
    """Reports to a manager on sessions whose requests end. The manager's clock shows the trace's time of the latest arrival or
    end so far of a session's request.
    """

    def __init__(self, manager: CacheManager, told: Told) -> None:
        """Start before the first arrival. Raise ArgumentError for another value of `told`."""
        if not isinstance(told, str) or told not in TOLD:
            raise ArgumentError(f"told: got {shown(told)}, allowed: {', '.join(TOLD)}")
        self._manager = manager
        self._told = told
        self._start: float | None = None
        self._now = 0.0

    def see_arrival(self, request: SimulatedRequest) -> None:
        """Move the clock to the arrival of a request."""
        if request.turn is not None:
            self._advance(request.turn.arrival)

    def find_pauses(self, requests: Sequence[SimulatedRequest]) -> list[float | None] | None:
        """Move the clock to the end of the requests. Return for each one the seconds until its session's next request, None if
        it is the last; return None unless pauses are reported.
        """
        turns = [request.turn for request in requests]
        for turn in turns:
            if turn is not None:
                self._advance(turn.end)
        if self._told != "pauses":
            return None
        return [None if turn is None or turn.is_last else turn.pause for turn in turns]

    def close(self, requests: Iterable[SimulatedRequest]) -> None:
        """Close the sessions whose last request is among these, after the release of its pages."""
        for request in requests:
            if self._told != "nothing" and request.turn is not None and request.turn.is_last:
                self._manager.close_session(request.turn.session_id)

    def _advance(self, seconds: float) -> None:
        if self._told != "nothing":
            self._start = seconds if self._start is None else self._start
            self._now = min(max(self._now, seconds - self._start), MAX_CLOCK_SECONDS)
            self._manager.page_pool.store.set_time(1 + self._now)
