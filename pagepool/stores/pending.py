"""Jobs of a store that is not trusted, and the memory of their objects."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool.stores.jobs import Finish, JobStore
from pagepool.stores.pages import Pages
from pagepool.stores.protocol import Store

logger = logging.getLogger(__name__)

Object = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

RAISED = object()
"""Result of a call of the store that raised."""

ANSWER_SECONDS = 60.0
"""Time after which a job without an answer counts as failed. The store may still use its objects."""

BYTES_PER_TOUCH = 4096
"""Least memory that the system allocates when memory is first written."""


def keep_nothing(_job: "Job") -> None:
    """Release nothing."""


@dataclass(slots=True)
class Job:
    """Pages that are looked up, loaded or saved. `end` takes the job, and a flag for each page that is done. `release` takes it
    once the store does not use its objects any more, which is later than `end` if the answer comes late.
    """

    pages: Pages
    names: list[bytes]
    end: Callable[["Job", Flags], None]
    objects: list[Object] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # places of the objects in `Buffers`
    context: Any = None
    release: Callable[["Job"], None] = keep_nothing
    started_at: float = 0.0
    has_failed: bool = False  # by an error of the store, or without an answer


class Jobs:
    """The jobs of a store that are not answered yet.

    The store may do anything: raise, answer late, never, twice, too little or jobs that it was never given. Whatever it does,
    each job ends once, with one flag for each page. A job that is not answered in `ANSWER_SECONDS` ends as failed.
    """

    def __init__(self, store: Store) -> None:
        """Begin without jobs."""
        self._store = store
        self._pending: dict[int, Job] = {}  # in the order of their starts
        self._given_up: dict[int, Job] = {}  # jobs without an answer, whose objects the store may still use
        self.is_silent = False  # a job was given up, and none answered since
        self.num_errors = 0

    def lookup(self, job: Job) -> None:
        """Start to find out which pages the store has."""
        self._start(job, self._store.lookup, job.names)

    def load(self, job: Job) -> None:
        """Start to read objects."""
        self._start(job, self._store.load, job.names, [item.data for item in job.objects])

    def save(self, job: Job, finish: Finish | None = None) -> None:
        """Start to write objects, each after `finish` was called with its name and bytes: in the store's threads if it can."""
        store, rows = self._store, [item.data for item in job.objects]
        if isinstance(store, JobStore):
            self._start(job, store.save, job.names, rows, finish=finish)
        else:
            if finish:
                for name, row in zip(job.names, rows, strict=True):
                    finish(name, row)
            self._start(job, store.save, job.names, rows)

    def touch(self, names: list[bytes]) -> None:
        """Report that objects were used."""
        self._call(self._store.touch, names)

    def poll(self) -> None:
        """End the jobs that the store has answered, or that it should have answered by now."""
        answers = self._call(self._store.poll)
        if isinstance(answers, list):
            with ExitStack() as ends:  # all jobs end, even if one raises
                for job, is_done in reversed(list(self._read_answers(answers))):
                    ends.callback(job.release, job)
                    ends.callback(job.end, job, is_done)
        elif answers is not RAISED:
            self._report(f"poll returned {type(answers).__name__}, allowed: a list")
        self._give_up(time.monotonic() - ANSWER_SECONDS)

    def close(self, drain_seconds: float) -> None:
        """Close the store."""
        self._call(self._store.close, drain_seconds=drain_seconds)

    def _give_up(self, last_start: float) -> None:
        while self._pending:
            number, job = next(iter(self._pending.items()))
            if job.started_at > last_start:
                return
            del self._pending[number]
            if job.objects:
                self._given_up[number] = job
            self._report(f"job {number} has no answer after {ANSWER_SECONDS:.0f} seconds")
            self.is_silent = True
            self._fail(job)

    def _fail(self, job: Job) -> None:
        job.has_failed = True
        job.end(job, np.zeros(len(job.names), dtype=bool))

    def _start(self, job: Job, call: Callable[..., int], *arguments: Any, **options: Any) -> None:
        job.started_at = time.monotonic()
        number = self._call(call, *arguments, **options)
        if isinstance(number, int) and number not in self._pending and number not in self._given_up:
            self._pending[number] = job
            return
        if number is not RAISED:
            self._report(f"{call.__name__} returned {number!r}, allowed: the number of a new job")
        self._fail(job)
        job.release(job)

    def _read_answers(self, answers: Iterable[Any]) -> Iterator[tuple[Job, Flags]]:
        for answer in answers:
            try:
                number, is_done, error = answer
                job, late = self._pending.pop(number, None), self._given_up.pop(number, None)
            except Exception as fault:
                self._report(f"poll returned {type(answer).__name__}: {fault}")
                continue
            if error is not None:
                self._report(error)
            self.is_silent = self.is_silent and late is None and job is None
            if late is not None:
                late.release(late)
            elif job is None:
                self._report(f"job {number} was answered twice, too late, or never started")
            else:
                job.has_failed = error is not None
                yield job, self._read_flags(number, is_done, job)

    def _read_flags(self, number: int, is_done: Any, job: Job) -> Flags:
        """Return the flags of a job. If they are malformed, the job has failed, and none of its pages is done."""
        num = len(job.names)
        try:
            flags: Flags = np.frombuffer(bytes(memoryview(is_done)), dtype=np.uint8) == 1
        except Exception as fault:
            self._report(f"job {number} has flags that cannot be read: {fault}")
        else:
            if len(flags) == num:
                return flags
            self._report(f"job {number} has {len(flags)} flags, allowed: {num}")
        job.has_failed = True
        return np.zeros(num, dtype=bool)

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the store. Return `RAISED` if it raises."""
        try:
            return call(*arguments, **options)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a store in Rust is no Exception
            self._report(error)
            return RAISED

    def _report(self, error: object) -> None:
        self.num_errors += 1
        if self.num_errors & (self.num_errors - 1) == 0:  # the 1st, 2nd, 4th and so on
            logger.warning("the store behind the host tier, fault %d: %s", self.num_errors, error)


class Buffers:
    """Memory of objects, one array for each size: at most `max_bytes` of objects are taken. Places used before come first."""

    def __init__(self, max_bytes: int, sizes: Iterable[int], warm_bytes: Mapping[int, int] | None = None) -> None:
        """Reserve memory, which the system allocates when it is first written. Write the first `warm_bytes` of the array for a
        size now, so that their first use costs no more than later ones.
        """
        self._max_bytes = max_bytes
        self.arrays = {size: np.zeros((max_bytes // size, size), dtype=np.uint8) for size in {*sizes}}
        self._spare: dict[int, list[int]] = {size: [] for size in self.arrays}
        self._unused = {size: count() for size in self.arrays}
        self.num_bytes = 0
        for size, num_bytes in (warm_bytes or {}).items():
            self.arrays[size].reshape(-1)[:num_bytes:BYTES_PER_TOUCH] = 0

    def take(self, num: int, size: int) -> list[int]:
        """Take `num` objects, or fewer if there is no room. Return their places in the array for `size`."""
        num = min(num, (self._max_bytes - self.num_bytes) // size)
        self.num_bytes += num * size
        spare = self._spare[size]
        spare.extend(islice(self._unused[size], max(num - len(spare), 0)))
        return [spare.pop() for _ in range(num)]

    def give_back(self, objects: Sequence[Object], places: Sequence[int]) -> None:
        """Take objects back from their places."""
        for item, place in zip(objects, places, strict=True):
            self.num_bytes -= len(item)
            self._spare[len(item)].append(place)
