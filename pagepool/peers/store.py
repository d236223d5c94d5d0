"""`PeerStore`: a store that asks a peer's host tier. Needs the extra ``pagepool[peers]``."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pagepool.arguments import require_int, require_number, require_text
from pagepool.errors import PeerError
from pagepool.peers.asker import MAX_SECONDS, Answered, Asker
from pagepool.peers.messages import MAX_HEAD_BYTES
from pagepool.stores.jobs import require_drain_seconds, require_keys, require_rows
from pagepool.stores.protocol import Done

MAX_KEYS_PER_QUESTION = 1024
BYTES_PER_QUESTION = 1 << 20
"""Objects of this size together are asked for at once; a larger one alone."""
MAX_OBJECT_BYTES = 1 << 28


class Find(msgspec.Struct, array_like=True, frozen=True, tag="find", forbid_unknown_fields=True):
    """A question which objects a peer has. The body of the answer has a byte for each key."""

    keys: list[bytes]


class Load(msgspec.Struct, array_like=True, frozen=True, tag="load", forbid_unknown_fields=True):
    """A question for objects of these sizes. The body of the answer has a byte for each key, 1 for objects that follow as
    parts.
    """

    keys: list[bytes]
    sizes: list[int]


@dataclass(slots=True, eq=False)
class Job:
    """A look-up or load. The lock is held while its rows are written."""

    number: int
    is_done: bytearray
    num_waiting: int = 0
    is_over: bool = False
    error: PeerError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class PeerStore:
    """A `Store` that has what a peer's host tier has: the pages that its `TierServer` serves.

    Saves are not done, without an error, and `touch` does nothing. A peer that is dead or slow is an error of the answer. Put
    it behind a `StoreTier` with the namespace of both engines: `StoreTier` checks each page, so a peer that sends other bytes
    costs hits. In a forked process every call but `close` raises.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        namespace: str,
        *,
        answer_seconds: float = 10.0,
        max_object_bytes: int = 64 << 20,
    ) -> None:
        """Ask the `TierServer` at an address. Without the name behind ``#`` another process at the endpoint is asked after a
        restart. A question without an answer after `answer_seconds` fails. Larger objects than `max_object_bytes`, up to 256
        MiB, are not done.

        Raise ArgumentTypeError or ArgumentError for other values. Nothing is asked.
        """
        self._address = require_text("address", address)
        self._seconds = require_number("answer_seconds", answer_seconds, 0.0, MAX_SECONDS)
        self._max_bytes = require_int("max_object_bytes", max_object_bytes, MAX_HEAD_BYTES, MAX_OBJECT_BYTES)
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._ended: deque[Done] = deque()
        self._asker = Asker(secret, namespace, max_message_bytes=self._max_bytes, name="store-asks")
        self._close = weakref.finalize(self, _close, self._asker, self._jobs)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Start to find out which objects the peer has. Return the number of the job.

        Raise ArgumentTypeError for keys that are not bytes, ArgumentError for keys of other lengths than 1 to 64, and after
        `close`.
        """
        listed = require_keys(keys)
        job = self._begin(listed)
        with job.lock:
            for start in range(0, len(listed), MAX_KEYS_PER_QUESTION):
                asked = listed[start : start + MAX_KEYS_PER_QUESTION]
                self._ask(job, Find(asked), start, len(asked), None)
        return job.number

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to read objects into rows, one for each key. Return the number of the job.

        A row is a writable, contiguous memoryview of bytes with the length of its object; a key whose object has another length
        is not done. Until `poll` names the job or `close` returns, the rows may be written. Raise ArgumentTypeError for other
        rows, ArgumentError for another number of rows than of keys, and errors as `lookup`.
        """
        listed = require_keys(keys)
        own = require_rows(rows, len(listed), True)
        job = self._begin(listed)
        start, num_bytes = 0, 0
        with job.lock:
            for at in range(len(own) + 1):
                is_end = at == len(own) or at - start == MAX_KEYS_PER_QUESTION
                if start < at and (is_end or num_bytes + len(own[at]) > BYTES_PER_QUESTION):
                    sizes = [len(row) for row in own[start:at]]
                    self._ask(job, Load(listed[start:at], sizes), start, at - start, own[start:at])
                    start, num_bytes = at, 0
                num_bytes += len(own[at]) if at < len(own) else 0
        return job.number

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Answer that no object was saved. Return the number of the job. Raise as `load`; rows may be read-only."""
        listed = require_keys(keys)
        require_rows(rows, len(listed), False)
        job = self._begin(listed)
        if listed:
            self._end(job)
        return job.number

    def poll(self) -> list[Done]:
        """Return the jobs answered since the last call. Raise as `lookup`."""
        self._asker.require_open()
        ended: list[Done] = []
        while self._ended:
            try:
                ended.append(self._ended.popleft())
            except IndexError:  # another thread took it
                break
        return ended

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: what a peer loads counts as used there. Raise as `lookup`."""
        require_keys(keys)
        self._asker.require_open()

    def close(self, *, drain_seconds: float) -> None:
        """Cancel all jobs. No row is written afterwards. There are no saves to wait for in `drain_seconds`.

        A second call has no effect, and neither has one in a forked process. Raise ArgumentTypeError unless `drain_seconds` is
        a number, ArgumentError if it is negative.
        """
        require_drain_seconds(drain_seconds)
        self._close()

    def _begin(self, keys: Sequence[bytes]) -> Job:
        """Begin a job. Without keys it has ended."""
        self._asker.require_open()
        job = Job(next(self._numbers), bytearray(len(keys)))
        self._jobs[job.number] = job
        if not keys:
            self._end(job)
        return job

    def _ask(self, job: Job, question: Find | Load, start: int, num: int, rows: Sequence[memoryview] | None) -> None:
        """Ask for some keys of a job, whose lock is held."""
        job.num_waiting += 1
        self._asker.ask(
            self._address,
            msgspec.msgpack.encode(question),
            seconds=self._seconds,
            then=lambda ended: self._take(job, start, num, rows, ended),
        )

    def _take(self, job: Job, start: int, num: int, rows: Sequence[memoryview] | None, ended: Answered) -> None:
        """Take the answer for some keys of a job. This runs in the asker's thread."""
        with job.lock:
            if job.is_over:
                return
            sizes = [len(row) for row, flag in zip(rows, ended.body, strict=False) if flag] if rows is not None else []
            error = ended.error
            if error is None and not (
                len(ended.body) == num and not ended.body.strip(b"\0\1") and [len(part) for part in ended.parts] == sizes
            ):
                error = PeerError(f"peer {self._address}: got a malformed answer")
            if error is None:
                parts = iter(ended.parts)
                for row, flag in zip(rows or (), ended.body, strict=False):
                    if flag:
                        np.copyto(np.frombuffer(row, np.uint8), np.frombuffer(next(parts), np.uint8))
                job.is_done[start : start + num] = ended.body
            job.error = job.error or error
            job.num_waiting -= 1
            if not job.num_waiting:
                self._end(job)

    def _end(self, job: Job) -> None:
        job.is_over = True
        self._jobs.pop(job.number, None)
        self._ended.append(Done(job.number, bytes(job.is_done), job.error))


def _close(asker: Asker, jobs: dict[int, Job]) -> None:
    if not asker.is_open:  # in a forked process locks may be held for ever
        return
    for job in [*jobs.values()]:
        with job.lock:
            job.is_over = True
    jobs.clear()
    asker.close()
