"""Times of calls: the shares of allocator, commit and model in a step."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

__all__ = ["Stopwatch", "format_profile"]


class Stopwatch:
    """A proxy that adds up the time of an object's method calls until the next lap."""

    def __init__(self, watched: Any, wait: Callable[[Any], Any]) -> None:
        """Watch the calls of methods; other attributes are passed through. A call takes until `wait` returns for its result."""
        self._watched, self._wait = watched, wait
        self._seconds = 0.0
        self.laps: list[float] = []

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the watched object; methods are wrapped."""
        value = getattr(self._watched, name)
        return partial(self._time, value) if callable(value) else value

    def _time(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = perf_counter()
        try:
            return self._wait(call(*args, **options))
        finally:
            self._seconds += perf_counter() - start

    def end_lap(self) -> None:
        """Record the seconds since the last lap, and restart at 0."""
        self.laps.append(self._seconds)
        self._seconds = 0.0


def format_profile(parts: Mapping[str, list[float]], step_seconds: list[float]) -> str:
    """Return a line for each part, the rest, and the step: median in microseconds, and share of the total time."""
    rest = [step - sum(seconds) for step, *seconds in zip(step_seconds, *parts.values(), strict=True)]
    lines = [f"{'part':<22}{'p50 a step':>12}{'share':>9}"]
    for name, seconds in {**parts, "the engine's own Python": rest, "step": step_seconds}.items():
        share = sum(seconds) / sum(step_seconds)
        lines.append(f"{name:<22}{statistics.median(seconds) * 1e6:>9,.1f} us{share:>9.2%}")
    return "\n".join(lines)
