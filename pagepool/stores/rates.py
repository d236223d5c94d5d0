"""Mean rates over the last seconds."""

from collections import deque
from math import inf

WINDOW_SECONDS = 10.0


class Rate:
    """Amounts measured in the last seconds, divided by the time that they took."""

    def __init__(self) -> None:
        """Make a rate without any measurement."""
        self._measured: deque[tuple[float, float, float]] = deque()
        self._amount = self._seconds = 0.0

    def add(self, now: float, amount: float, seconds: float) -> None:
        """Add an amount that took some seconds and ended now."""
        self._measured.append((now, amount, seconds))
        self._amount, self._seconds = self._amount + amount, self._seconds + seconds
        self._forget(now)

    def is_old(self, now: float) -> bool:
        """Whether nothing was measured in the last seconds."""
        return not self._measured or self._measured[-1][0] < now - WINDOW_SECONDS

    def per_second(self, now: float, idle_seconds: float = 0.0) -> float | None:
        """Return the rate, or None if nothing was ever measured; without recent measurements, that of the last one.
        `idle_seconds`, which brought nothing, count too.
        """
        self._forget(now)
        seconds = self._seconds + idle_seconds
        return self._amount / seconds if self._measured and seconds > 0 else None

    def _forget(self, now: float) -> None:
        """Forget old measurements, except the last one."""
        while len(self._measured) > 1 and self._measured[0][0] < now - WINDOW_SECONDS:
            _, amount, seconds = self._measured.popleft()
            self._amount, self._seconds = self._amount - amount, self._seconds - seconds
        if len(self._measured) == 1:  # so errors of rounding end with the other measurements
            _, self._amount, self._seconds = self._measured[0]


class AnswerRate:
    """Bytes a second of jobs that overlap, whose answers are seen only when a caller asks for them.

    A job that is answered at the first question after its start is not measured, since it may have taken any part of that time.
    Other jobs ended between two questions, so they count as ended half-way between these. A job whose objects are missing is
    not measured either; a job that failed always is, with no bytes.
    """

    def __init__(self) -> None:
        """Begin without an answer."""
        self._rate = Rate()
        self._asked_at = self._ended_at = 0.0
        self._waits_since: float | None = None  # first start after the last answer
        self._num_bytes, self._started_at = 0, inf  # sum and minimum over the answers to this question

    def start(self, now: float) -> None:
        """Start a job."""
        if self._waits_since is None:
            self._waits_since = now

    def end(self, num_bytes: int, started_at: float, has_failed: bool) -> None:
        """End a job that is answered now."""
        self._waits_since = None
        if not num_bytes and not has_failed:
            return
        self._num_bytes += num_bytes
        self._started_at = min(self._started_at, started_at)

    def end_question(self, now: float) -> None:
        """End a question, with or without answers."""
        if self._started_at < inf:
            ended_at = (max(self._started_at, self._asked_at) + now) / 2
            if self._started_at < self._asked_at or not self._num_bytes:
                self._rate.add(now, self._num_bytes, ended_at - max(self._started_at, self._ended_at))
            self._ended_at = ended_at
            self._num_bytes, self._started_at = 0, inf
        self._asked_at = now

    def is_old(self, now: float) -> bool:
        """Whether nothing was measured in the last seconds."""
        return self._rate.is_old(now)

    def per_second(self, now: float) -> float | None:
        """Return the rate, or None if nothing was ever measured. It falls while no answer comes."""
        return self._rate.per_second(now, 0.0 if self._waits_since is None else now - self._waits_since)
