"""Jobs of a store that is not trusted, and the memory of their objects."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool.stores.jobs import Finish, JobStore
from pagepool.stores.pages import Pages
from pagepool.stores.protocol import Store

__all__ = ["Buffers", "Flags", "Job", "Jobs", "Object"]

logger = logging.getLogger(__name__)

Object = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

RAISED = object()
"""What a call of the store that raised returned."""


@dataclass(slots=True)
class Job:
    """Pages that are looked up, loaded or saved. `end` takes the job, and a flag for each page that is done."""

    pages: Pages
    names: list[bytes]
    end: Callable[["Job", Flags], None]
    objects: list[Object] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # `Buffers` keeps the objects there
    context: Any = None
    started_at: float = 0.0


class Jobs:
    """The jobs of a store that are not answered yet.

    The store may do anything: raise, answer late, never, twice, too little or jobs that it was never given. Whatever it does,
    each job ends once at most, with one flag for each page.
    """

    def __init__(self, store: Store) -> None:
        """Begin without jobs."""
        self._store = store
        self._pending: dict[int, Job] = {}
        self.num_errors = 0

    def lookup(self, job: Job) -> None:
        """Start to find out which pages the store has."""
        self._start(job, self._store.lookup, job.names)

    def load(self, job: Job) -> None:
        """Start to read objects."""
        self._start(job, self._store.load, job.names, [item.data for item in job.objects])

    def save(self, job: Job, finish: Finish) -> None:
        """Start to write objects, each after `finish` was called with its name and bytes: in the store's threads if it can."""
        store, rows = self._store, [item.data for item in job.objects]
        if isinstance(store, JobStore):
            self._start(job, store.save, job.names, rows, finish=finish)
        else:
            for name, row in zip(job.names, rows, strict=True):
                finish(name, row)
            self._start(job, store.save, job.names, rows)

    def touch(self, names: list[bytes]) -> None:
        """Report that objects were used."""
        self._call(self._store.touch, names)

    def poll(self) -> None:
        """End the jobs that the store has answered."""
        answers = self._call(self._store.poll)
        if isinstance(answers, list):
            for job, is_done in list(self._read_answers(answers)):
                job.end(job, is_done)
        elif answers is not RAISED:
            self._report(f"poll returned {type(answers).__name__}, allowed: a list")

    def _start(self, job: Job, call: Callable[..., int], *arguments: Any, **options: Any) -> None:
        job.started_at = time.monotonic()
        number = self._call(call, *arguments, **options)
        if isinstance(number, int) and number not in self._pending:
            self._pending[number] = job
            return
        if number is not RAISED:
            self._report(f"{call.__name__} returned {number!r}, allowed: the number of a new job")
        job.end(job, np.zeros(len(job.names), dtype=bool))

    def _read_answers(self, answers: Iterable[Any]) -> Iterator[tuple[Job, Flags]]:
        for answer in answers:
            try:
                number, is_done, error = answer
                job = self._pending.pop(number, None)
            except Exception as fault:
                self._report(f"poll returned {type(answer).__name__}: {fault}")
                continue
            if error is not None:
                self._report(error)
            if job is None:
                self._report(f"job {number} was answered twice, or never started")
            else:
                yield job, self._read_flags(number, is_done, len(job.names))

    def _read_flags(self, number: int, is_done: Any, num: int) -> Flags:
        """Return the flags of a job. If they are wrong, nothing of it is done."""
        try:
            flags: Flags = np.frombuffer(bytes(memoryview(is_done)), dtype=np.uint8) == 1
        except Exception as fault:
            self._report(f"job {number} has flags that cannot be read: {fault}")
        else:
            if len(flags) == num:
                return flags
            self._report(f"job {number} has {len(flags)} flags, allowed: {num}")
        return np.zeros(num, dtype=bool)

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the store. Return `RAISED` if it raises."""
        try:
            return call(*arguments, **options)
        except Exception as error:
            self._report(error)
            return RAISED

    def _report(self, error: object) -> None:
        self.num_errors += 1
        if self.num_errors & (self.num_errors - 1) == 0:  # the 1st, 2nd, 4th and so on
            logger.warning("the store behind the host tier, fault %d: %s", self.num_errors, error)


class Buffers:
    """Memory of objects, one array for each size: at most `max_bytes` of objects are out. What was out before comes first."""

    def __init__(self, max_bytes: int, sizes: Iterable[int]) -> None:
        """Reserve memory, which the system allocates when it is first written."""
        self._max_bytes = max_bytes
        self.arrays = {size: np.empty((max_bytes // size, size), dtype=np.uint8) for size in {*sizes}}
        self._spare: dict[int, list[int]] = {size: [] for size in self.arrays}
        self._unused = {size: count() for size in self.arrays}
        self.num_bytes = 0

    def take(self, num: int, size: int) -> list[int]:
        """Return the places of objects in the array for `size`, or of fewer if there is no room."""
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
