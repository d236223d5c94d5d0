"""The file of a trace, and the thread that writes it."""

import logging
import os
import threading
import time
from collections import deque
from typing import Any

from msgspec.json import Encoder

from pagepool.trace.timeline import Event, Timeline

__all__ = ["MAX_RECORDS", "TraceWriter"]

logger = logging.getLogger(__name__)

MAX_RECORDS = 1 << 16  # records that wait for the thread
RECORDS_PER_TURN = 1024  # records made into events before other threads run
INTERVAL = 0.05  # seconds between two looks of the thread
BYTES_OF_END = 200  # room kept for the end of each slice, and for the last marks
SECONDS_TO_CLOSE = 60.0
HEAD, BETWEEN, TAIL = b"[\n", b",\n", b"\n]\n"

Record = tuple[Any, ...]
"""A method of a track, and its arguments."""


class TraceWriter:
    """Writes records as events to a file, in a thread. A record is a method of a track of `timeline`, with its arguments.

    Always: the file is a complete JSON array, since each write replaces the closing bracket. `records` has about `MAX_RECORDS`
    records at most. The thread alone uses the timeline and the file.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int) -> None:
        """Create the file, or empty it, and start the thread. Raise the OSError of a file that cannot be written."""
        self.timeline = Timeline()
        self.records: deque[Record] = deque()
        self.num_dropped = 0
        self.error: Exception | None = None
        self._num_told, self._max_bytes, self._process = 0, max_bytes, os.getpid()
        self._encode, self._dropping = Encoder().encode, threading.Lock()
        self._must_end = threading.Event()
        self._is_full = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._size = 0  # without the tail
        try:
            self._write(HEAD)
        except OSError:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._run, name="pagepool-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what waits, end the file, and stop the thread. Do nothing in a forked process. Idempotent."""
        if os.getpid() == self._process:
            self._must_end.set()
            self._thread.join(SECONDS_TO_CLOSE)

    def drop(self, num: int) -> None:
        """Count what is not written."""
        with self._dropping:
            self.num_dropped += num

    def _run(self) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._must_end.wait(INTERVAL)
                self._write_waiting()
            if self.error is None and not self._is_full:
                self._tell_dropped()
                self.timeline.close(time.monotonic_ns())
                self._write_events(self.timeline.take())
        except Exception as error:
            self._stop(error)
        finally:
            os.close(self._file)

    def _write_waiting(self) -> None:
        """Write the records that wait now."""
        records, num = self.records, len(self.records)
        while num and self.error is None and not self._is_full:
            try:
                for _ in range(min(num, RECORDS_PER_TURN)):
                    function, *args = records.popleft()
                    function(*args)
                self._tell_dropped()
                self._write_events(self.timeline.take())
            except Exception as error:
                self._stop(error)
            num -= min(num, RECORDS_PER_TURN)
        for _ in range(num):
            records.popleft()
        self.drop(num)

    def _tell_dropped(self) -> None:
        """Mark that records were dropped since the last time."""
        num = self.num_dropped
        if num > self._num_told:
            self.timeline.manager.mark(time.monotonic_ns(), "dropped", {"records": num - self._num_told})
            self._num_told = num

    def _write_events(self, events: list[Event]) -> None:
        """Write events, or the first of them and the ends of all slices if the file would be too large."""
        text = self._encode(events)[1:-1]
        num_left = self._max_bytes - self._size - BYTES_OF_END * (self.timeline.count_tracks() + 2)
        if len(text) + len(BETWEEN) > num_left:
            events = self._list_last(events, num_left)
            text = self._encode(events)[1:-1]
        if events:
            self._write(BETWEEN if self._size > len(HEAD) else b"", text)

    def _list_last(self, events: list[Event], num_bytes: int) -> list[Event]:
        """Return the last events of a full file: those that fit into `num_bytes`, and the ends of all slices."""
        self._is_full, num_fitting = True, 0
        for event in events:
            num_bytes -= len(self._encode(event)) + 1
            if num_bytes < len(BETWEEN):
                break
            num_fitting += 1
        self.drop(len(events) - num_fitting)
        return events[:num_fitting] + self.timeline.list_ends(time.monotonic_ns(), events[num_fitting:])

    def _write(self, *parts: bytes) -> None:
        """Write text in place of the tail, and the tail behind it. After an error the file is as it was."""
        text = memoryview(b"".join((*parts, TAIL)))
        num_done = 0
        try:
            while num_done < len(text):
                num_done += os.pwrite(self._file, text[num_done:], self._size + num_done)
        except OSError:
            self._restore()
            raise
        self._size += len(text) - len(TAIL)

    def _restore(self) -> None:
        """Restore the tail, which needs no room on the disk, and cut what is behind it."""
        try:
            if self._size:
                os.pwrite(self._file, TAIL, self._size)
                os.ftruncate(self._file, self._size + len(TAIL))
        except OSError:
            logger.warning("trace: the end of the file is damaged", exc_info=True)

    def _stop(self, error: Exception) -> None:
        """Write no more after an error."""
        self.error = error
        logger.warning("trace: no more events are written: %s", error)
