"""Mean rates over the last seconds."""

from collections import deque

__all__ = ["Rate"]

WINDOW_SECONDS = 10.0


class Rate:
    """Amounts a second, over the time that they took, of the last seconds."""

    def __init__(self) -> None:
        """Make a rate without any measurement."""
        self._measured: deque[tuple[float, float, float]] = deque()
        self._amount = self._seconds = 0.0

    def add(self, now: float, amount: float, seconds: float) -> None:
        """Add an amount that took some seconds and ended now."""
        self._measured.append((now, amount, seconds))
        self._amount, self._seconds = self._amount + amount, self._seconds + seconds
        self._forget(now)

    def per_second(self, now: float) -> float | None:
        """Return the rate, or None if nothing was measured in the last seconds."""
        self._forget(now)
        return self._amount / self._seconds if self._measured and self._seconds > 0 else None

    def _forget(self, now: float) -> None:
        while self._measured and self._measured[0][0] < now - WINDOW_SECONDS:
            _, amount, seconds = self._measured.popleft()
            self._amount, self._seconds = self._amount - amount, self._seconds - seconds
        if not self._measured:  # no error of rounding outlives the measurements
            self._amount = self._seconds = 0.0
