"""Threads that start at once, each with its own randomness."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest

Work = Callable[[Random, int], None]
num_threads = pytest.mark.parametrize("num_threads", [2, 4, 8])


def run_threads(num_threads: int, seed: int, work: Work) -> None:
    """Start that many threads at once, each with its own randomness and number. An exception in one of them is raised here."""
    barrier = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(Random(f"{seed}, {number}"), number)
        except BaseException as error:
            error.add_note(f"in thread {number} of {num_threads}, seed {seed}")
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
