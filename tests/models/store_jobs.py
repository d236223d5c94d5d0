"""Jobs of stores, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagepool.stores import Done, Store

SECONDS = 60.0
"""Time until a test that waits gives up."""


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for(store: Store, *jobs: int) -> list[Done]:
    """Return the answers of these jobs, which are the only ones in flight."""
    answers: dict[int, Done] = {}
    deadline = time.monotonic() + SECONDS
    while len(answers) < len(jobs):
        assert time.monotonic() < deadline, f"no answer of {set(jobs) - set(answers)}"
        for done in store.poll():
            assert done.job in jobs
            assert done.job not in answers
            answers[done.job] = done
        time.sleep(0.0005)
    return [answers[job] for job in jobs]


def save(store: Store, objects: dict[bytes, bytes]) -> None:
    (done,) = wait_for(store, store.save(list(objects), [memoryview(row) for row in objects.values()]))
    assert done == Done(done.job, b"\1" * len(objects), None)


def load(store: Store, keys: list[bytes], sizes: list[int]) -> tuple[Done, list[bytearray]]:
    rows = [bytearray(size) for size in sizes]
    (done,) = wait_for(store, store.load(keys, [memoryview(row) for row in rows]))
    return done, rows
