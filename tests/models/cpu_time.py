"""The CPU time of calls: a busy machine hardly changes it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(call: Callable[[], object], num_calls: int = 51) -> float:
    """Return the median of so many calls."""
    times = []
    for _ in range(num_calls):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)
