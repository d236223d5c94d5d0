"""Jobs of a store that raises, and ends of jobs that raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("xxhash")

from pagepool.stores.pages import Pages
from pagepool.stores.pending import Job, Jobs
from pagepool.stores.protocol import Done


class Panic(BaseException):
    """An error of a store in Rust."""


class Store:
    """A store that answers each job at the next poll, or panics."""

    def __init__(self) -> None:
        self.answers: list[Done] = []
        self.num_jobs = 0
        self.panics = False

    def lookup(self, keys: list[bytes]) -> int:
        if self.panics:
            raise Panic
        self.num_jobs += 1
        self.answers.append(Done(self.num_jobs, b"\1" * len(keys), None))
        return self.num_jobs

    load = save = touch = lookup  # type: ignore[assignment]

    def poll(self) -> list[Done]:
        if self.panics:
            raise Panic
        answers, self.answers = self.answers, []
        return answers

    def close(self, *, drain_seconds: float) -> None:
        raise Panic


def make_job(end: Any) -> Job:
    return Job(Pages(np.zeros((1, 2), np.uint64), np.zeros(1, np.int32)), [b"key"], end)


def test_an_end_that_raises_loses_no_other_answer() -> None:
    jobs, ended = Jobs(Store()), []

    def fail(job: Job, is_done: Any) -> None:
        raise MemoryError

    for end in (lambda *_: ended.append(0), fail, lambda *_: ended.append(2)):
        jobs.lookup(make_job(end))
    with pytest.raises(MemoryError):
        jobs.poll()
    assert ended == [0, 2]
    jobs.poll()
    assert ended == [0, 2]


def test_a_panic_of_the_store_is_an_error_of_the_store() -> None:
    store, ended = Store(), []
    jobs, store.panics = Jobs(store), True
    jobs.lookup(make_job(lambda job, is_done: ended.append(is_done.tolist())))
    jobs.poll()
    jobs.close(0)
    assert ended == [[False]]
    assert jobs.num_errors == 3
