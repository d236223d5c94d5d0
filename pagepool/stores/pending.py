"""Jobs of a store that is not trusted, and the memory of their objects."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool.stores.pages import Pages
from pagepool.stores.protocol import Store

__all__ = ["Buffers", "Flags", "Job", "Jobs", "Object"]

logger = logging.getLogger(__name__)

Object = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Job:
    """Pages that are looked up, loaded or saved. `end` takes the job, and a flag for each page that is done."""

    pages: Pages
    names: list[bytes]
    end: Callable[["Job", Flags], None]
    objects: list[Object] = field(default_factory=list)
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

    def save(self, job: Job) -> None:
        """Start to write objects."""
        self._start(job, self._store.save, job.names, [item.data for item in job.objects])

    def touch(self, names: list[bytes]) -> None:
        """Report that objects were used."""
        self._call(self._store.touch, names)

    def poll(self) -> None:
        """End the jobs that the store has answered."""
        for job, is_done in list(self._read_answers(self._call(self._store.poll))):
            job.end(job, is_done)

    def _start(self, job: Job, call: Callable[..., int], *arguments: Any) -> None:
        job.started_at = time.monotonic()
        number = self._call(call, *arguments)
        if isinstance(number, int) and number not in self._pending:
            self._pending[number] = job
            return
        if number is not None:
            self._report(f"{call.__name__} returned {number!r}, allowed: the number of a new job")
        job.end(job, np.zeros(len(job.names), dtype=bool))

    def _read_answers(self, answers: Any) -> Iterator[tuple[Job, Flags]]:
        for answer in answers if isinstance(answers, list) else ():
            try:
                number, is_done, error = answer
                job = self._pending.pop(number, None)
                flags = np.frombuffer(bytes(memoryview(is_done)), dtype=np.uint8) == 1
            except Exception as fault:
                self._report(f"poll returned {type(answer).__name__}: {fault}")
                continue
            if error is not None:
                self._report(error)
            if job is None:
                self._report(f"job {number} was answered twice, or never started")
            elif len(flags) != len(job.names):
                self._report(f"job {number} has {len(flags)} flags, allowed: {len(job.names)}")
                yield job, np.zeros(len(job.names), dtype=bool)
            else:
                yield job, flags

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the store. Return None if it raises."""
        try:
            return call(*arguments)
        except Exception as error:
            self._report(error)
            return None

    def _report(self, error: object) -> None:
        self.num_errors += 1
        if self.num_errors & (self.num_errors - 1) == 0:  # the 1st, 2nd, 4th and so on
            logger.warning("the store behind the host tier, fault %d: %s", self.num_errors, error)


class Buffers:
    """Memory of objects: at most `max_bytes` of them are out."""

    def __init__(self, max_bytes: int) -> None:
        """Begin without memory."""
        self._max_bytes = max_bytes
        self._spare: dict[int, list[Object]] = {}
        self._num_spare_bytes = 0
        self.num_bytes = 0

    def take(self, size: int) -> Object | None:
        """Return an object of `size` bytes of any content, or None if there is no room."""
        if self.num_bytes + size > self._max_bytes:
            return None
        self.num_bytes += size
        spare = self._spare.get(size)
        if not spare:
            return np.empty(size, dtype=np.uint8)
        self._num_spare_bytes -= size
        return spare.pop()

    def give_back(self, item: Object) -> None:
        """Take an object back. Its memory, touched already, serves the next one of its size."""
        self.num_bytes -= len(item)
        if self._num_spare_bytes + len(item) <= self._max_bytes:
            self._num_spare_bytes += len(item)
            self._spare.setdefault(len(item), []).append(item)
