"""Jobs of a store, done by its threads one key at a time; and the checks of its arguments."""

import itertools
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from pagepool.arguments import as_list, require_number
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.stores.protocol import Done

logger = logging.getLogger(__name__)

MAX_KEY_BYTES = 64
NAMESPACE = re.compile(r"(?!\.{1,2}(?:/|\Z))[\w.-]+(?:/(?!\.{1,2}(?:/|\Z))[\w.-]+)*", re.ASCII)


Finish = Callable[[bytes, memoryview], None]
"""Function that completes a row, given its key, before it is written."""


class DamagedObjectError(OSError):
    """An object that cannot be loaded until a save replaces it. The store works; the key is not done, without an error."""


class Objects(Protocol):
    """What a store does for one key. Several threads call it at once, and every error becomes an answer."""

    def find(self, key: bytes) -> None:
        """Raise FileNotFoundError unless the object is there, DamagedObjectError if it cannot be loaded."""

    def load(self, key: bytes, row: memoryview) -> None:
        """Read the object into a row. Raise FileNotFoundError if it is not there, DamagedObjectError for another length."""

    def save(self, key: bytes, row: memoryview, finish: Finish | None) -> bool:
        """Write the object, in place of an older one, after `finish` was called. Return False if there is no room for it."""

    def touch(self, key: bytes) -> None:
        """Record a use of the object."""


class Kind(IntEnum):
    """Kinds of jobs, the most urgent first."""

    LOOKUP = 0
    LOAD = 1
    SAVE = 2
    TOUCH = 3


class Job:
    """A job, and its answer so far."""

    __slots__ = ("error", "finish", "is_done", "keys", "kind", "next_index", "num_left", "number", "rows")

    def __init__(self, number: int, kind: Kind, keys: list[bytes], rows: list[memoryview], finish: Finish | None) -> None:
        """Begin with no key done."""
        self.number, self.kind, self.keys, self.rows, self.finish = number, kind, keys, rows, finish
        self.is_done, self.error = bytearray(len(keys)), None
        self.next_index, self.num_left = 0, len(keys)

    error: Exception | None

    def run(self, objects: Objects, index: int) -> Exception | None:
        """Do the job for a key, and return the error."""
        key = self.keys[index]
        try:
            if self.kind == Kind.LOOKUP:
                objects.find(key)
            elif self.kind == Kind.LOAD:
                objects.load(key, self.rows[index])
            elif self.kind == Kind.TOUCH:
                objects.touch(key)
            elif not objects.save(key, self.rows[index], self.finish):
                return None
            self.is_done[index] = 1
        except BaseException as error:
            if isinstance(error, FileNotFoundError) and self.kind in (Kind.LOOKUP, Kind.LOAD):
                return None
            if not isinstance(error, Exception):  # such as a panic of obstore, which would end the thread
                return RuntimeError(f"{type(error).__name__}: {error}")
            error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold rows
            return error
        return None


class JobThreads:
    """Threads that do jobs: look-ups before loads, loads before saves, jobs of a kind in the order of their starts."""

    def __init__(self, name: str, objects: Objects, num_threads: int) -> None:
        """Start the threads."""
        self._process_id = os.getpid()
        self._lock = threading.RLock()  # a finalizer may call `stop` while it is held
        self._has_work, self._has_saved = threading.Condition(self._lock), threading.Condition(self._lock)
        self._has_ended = threading.Condition(self._lock)
        self._num_running = 0
        self._numbers = itertools.count(1)
        self._queues: list[deque[Job]] = [deque() for _ in Kind]
        self._answered: list[Done] = []
        self._num_saves = 0  # keys that are queued or being saved
        self._num_damaged = 0
        self._is_closed = self._is_stopped = False
        names = (f"{name}-{i}" for i in range(num_threads))
        # A daemon does not delay the end of the interpreter.
        self._threads = [threading.Thread(target=self._run, args=(objects,), name=each, daemon=True) for each in names]
        try:
            for thread in self._threads:
                with self._lock:
                    thread.start()
                    self._num_running += 1
        except BaseException:
            self.stop()
            raise

    def are_gone(self) -> bool:
        """Whether this is a forked process, or the interpreter is ending. Then there are no threads, and their lock may be held
        for ever.
        """
        return os.getpid() != self._process_id or sys.is_finalizing()

    def is_open(self) -> bool:
        """Whether jobs can be started."""
        return not self._is_closed and not self.are_gone()

    def start(self, kind: Kind, keys: list[bytes], rows: list[memoryview], finish: Finish | None = None) -> int:
        """Queue a job and return its number. Raise ArgumentError if the store is closed."""
        self.require_open()
        with self._lock:
            self.require_open()
            job = Job(next(self._numbers), kind, keys, rows, finish)
            if keys:
                self._queues[kind].append(job)
                self._num_saves += len(keys) if kind == Kind.SAVE else 0
                self._has_work.notify(len(keys))
            else:
                self._answer(job)
            return job.number

    def take_answers(self) -> list[Done]:
        """Return the answers that were not returned before. Raise ArgumentError if the store is closed."""
        self.require_open()
        with self._lock:
            self.require_open()
            answered, self._answered = self._answered, []
            return answered

    def drain(self, seconds: float) -> None:
        """Cancel all jobs but saves, wait for the saves up to `seconds`, then stop."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._is_closed = True
            for kind in (Kind.LOOKUP, Kind.LOAD, Kind.TOUCH):
                self._queues[kind].clear()
            while self._num_saves and not self._is_stopped and (left := deadline - time.monotonic()) > 0:
                self._has_saved.wait(left)
        self.stop()

    def stop(self) -> None:
        """Cancel all queued jobs and let the threads end. Keys they have begun are still done."""
        if self.are_gone():
            return
        with self._lock:
            self._is_closed = self._is_stopped = True
            for queue in self._queues:
                queue.clear()
            self._answered.clear()
            self._has_work.notify_all()

    def join(self) -> None:
        """Wait for the end of the threads, and release the lock meanwhile: the caller may be a handler of a signal that has
        interrupted another call of this object.
        """
        with self._lock:
            while self._num_running > (threading.current_thread() in self._threads):
                self._has_ended.wait()

    def require_open(self) -> None:
        """Raise ArgumentError if the store is closed, or made before the process forked."""
        if not self.is_open():
            raise ArgumentError(
                "store: got a closed store, or one of another process, allowed: an open one made in this process"
            )

    def _run(self, objects: Objects) -> None:
        while self._do_next(objects):
            pass
        with self._lock:
            self._num_running -= 1
            self._has_ended.notify_all()

    def _do_next(self, objects: Objects) -> bool:
        """Wait for a key of a job, and do it. Return False once stopped. No variable outlives the call: it would hold rows."""
        with self._lock:
            while not self._is_stopped and not (queue := next(filter(None, self._queues), None)):
                self._has_work.wait()
            if self._is_stopped or queue is None:
                return False
            job = queue.popleft()
            index = job.next_index
            job.next_index += 1
            if job.next_index < len(job.keys):
                queue.appendleft(job)
        error = job.run(objects, index)
        if isinstance(error, DamagedObjectError):
            self._report_damaged(error)
            error = None
        with self._lock:
            job.error = job.error or error
            job.num_left -= 1
            if job.num_left == 0:
                self._answer(job)
            if job.kind == Kind.SAVE:
                self._num_saves -= 1
                self._has_saved.notify_all()
        return True

    def _report_damaged(self, error: DamagedObjectError) -> None:
        with self._lock:
            self._num_damaged = number = self._num_damaged + 1
        if number & (number - 1) == 0:  # the 1st, 2nd, 4th and so on
            logger.warning("the store has damaged objects, %d by now: %s", number, error)

    def _answer(self, job: Job) -> None:
        if job.kind != Kind.TOUCH:
            self._answered.append(Done(job.number, bytes(job.is_done), job.error))


class JobStore:
    """The calls of a store whose threads do its jobs."""

    def __init__(self, name: str, objects: Objects, num_threads: int) -> None:
        """Start threads with this name, which use `objects`."""
        self._jobs = JobThreads(name, objects, num_threads)
        weakref.finalize(self, self._jobs.stop).atexit = False

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Start to find out which objects are there. Return the number of the job.

        Raise ArgumentTypeError for keys that are not bytes, ArgumentError for keys of other lengths than 1 to 64, and if the
        store is closed or was made before the process forked.
        """
        return self._jobs.start(Kind.LOOKUP, require_keys(keys), [])

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to read objects into rows, one for each key. Return the number of the job.

        A row is a writable, contiguous memoryview of bytes with the length of its object; a key whose object has another length
        is not done. Until `poll` names the job or `close` returns, the store may write to the rows. What a row holds afterwards
        is undefined if its key was not done. Loads come before queued saves.

        Raise ArgumentTypeError for rows of other types, ArgumentError for another number of rows than of keys, and errors as
        `lookup`.
        """
        keys = require_keys(keys)
        return self._jobs.start(Kind.LOAD, keys, require_rows(rows, len(keys), True))

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview], *, finish: Finish | None = None) -> int:
        """Start to write rows as objects, in place of older ones. Return the number of the job.

        Until `poll` names the job or `close` returns, the rows must stay unchanged. `finish` is called in a thread with a key
        and its row before the row is written, and may change it: so a checksum costs the calling thread nothing. Its errors
        become those of the answer. Rows and errors are as for `load`; without `finish` rows may be read-only.
        """
        keys = require_keys(keys)
        return self._jobs.start(Kind.SAVE, keys, require_rows(rows, len(keys), finish is not None), finish)

    def poll(self) -> list[Done]:
        """Return the jobs answered since the last call, in the order of their answers. Raise ArgumentError if the store is
        closed or was made before the process forked.
        """
        return self._jobs.take_answers()


def require_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return keys as a list. Raise ArgumentTypeError unless they are bytes, ArgumentError unless each has 1 to 64."""
    listed = as_list("keys", keys, "a sequence of bytes")
    for key in listed:
        if not isinstance(key, bytes):
            raise ArgumentTypeError(f"keys: got {type(key).__name__}, allowed: bytes")
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ArgumentError(f"keys: got a key of {len(key)} bytes, allowed: 1 to {MAX_KEY_BYTES}")
    return listed


def require_rows(rows: Sequence[memoryview], num_keys: int, is_writable: bool) -> list[memoryview]:
    """Return rows as a list. Raise ArgumentTypeError unless they are contiguous memoryviews of bytes, ArgumentError unless
    there is one for each key.
    """
    listed = as_list("rows", rows, "a sequence of memoryviews")
    for row in listed:
        if not isinstance(row, memoryview):
            raise ArgumentTypeError(f"rows: got {type(row).__name__}, allowed: memoryview")
        if row.format != "B" or row.ndim != 1 or not row.contiguous:
            raise ArgumentTypeError(
                f"rows: got {row.ndim} dimensions of format {row.format!r}, allowed: contiguous bytes in one dimension"
            )
        if is_writable and row.readonly:
            raise ArgumentTypeError("rows: got read-only memory, allowed: writable memory")
        if not len(row):
            raise ArgumentError("rows: got an empty row, allowed: at least 1 byte")
    if len(listed) != num_keys:
        raise ArgumentError(f"rows: got {len(listed)} for {num_keys} keys, allowed: as many")
    return listed


def require_namespace(namespace: object) -> str:
    """Return a namespace. Raise ArgumentTypeError unless it is a string, ArgumentError unless its parts, divided by "/", are of
    letters, digits, "-", "_" and ".", and none is "." or "..".

    >>> require_namespace("llama-8b/bf16")
    'llama-8b/bf16'
    """
    if not isinstance(namespace, str):
        raise ArgumentTypeError(f"namespace: got {type(namespace).__name__}, allowed: a string")
    if not NAMESPACE.fullmatch(namespace):
        allowed = 'parts divided by "/", each of letters, digits, "-", "_" and ".", none of them "." or ".."'
        raise ArgumentError(f"namespace: got {shown(namespace)}, allowed: {allowed}")
    return str(namespace)


def require_drain_seconds(drain_seconds: float) -> float:
    """Return the time to wait for saves. Raise ArgumentTypeError unless it is a number, ArgumentError if it is negative."""
    return float(min(require_number("drain_seconds", drain_seconds), threading.TIMEOUT_MAX / 2))


def split_key(key: bytes) -> str:
    """Return the name of an object below its namespace.

    >>> split_key(bytes([171, 5]))
    'ab/ab05'
    """
    digits = key.hex()
    return f"{digits[:2]}/{digits}"


def refuse_size(name: str, size: int | str, row: memoryview) -> DamagedObjectError:
    """Return the error for an object whose length differs from that of its row."""
    return DamagedObjectError(f"{name}: got {size} bytes, allowed: {len(row)}, the length of the row")
