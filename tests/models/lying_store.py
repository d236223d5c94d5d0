"""A store that does anything a store may do, and much that it may not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from pagepool.stores import Done

HONEST = 0.0


class LyingStore:
    """Objects in memory. By `share` it is late, fails, raises, answers twice or never, says that it did what it did not, reads
    other bytes, and writes to rows after its answer. Its objects outlive it in `objects`.
    """

    def __init__(self, objects: dict[bytes, bytes], rng: Random, share: float = HONEST, delay: int = 0) -> None:
        self.objects, self.rng, self.share, self.delay = objects, rng, share, delay
        self.num_jobs = 0
        self.answers: deque[tuple[int, Any]] = deque()  # polls until then, and the answer
        self.late_writes: list[memoryview] = []
        self.is_closed = False

    def lookup(self, keys: Sequence[bytes]) -> Any:
        return self._start(lambda: [key in self.objects or self._lies() for key in keys])

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> Any:
        return self._start(lambda: [self._load(key, row) for key, row in zip(keys, rows, strict=True)])

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> Any:
        return self._start(lambda: [self._save(key, row) for key, row in zip(keys, rows, strict=True)])

    def poll(self) -> Any:
        if self._lies():
            raise OSError("poll")
        for row in self.late_writes:
            row[self.rng.randrange(len(row))] ^= 1
        self.late_writes.clear()
        ready: list[Any] = []
        for _ in range(len(self.answers)):
            num_polls, answer = self.answers.popleft()
            if num_polls > 0:
                self.answers.append((num_polls - 1, answer))
                continue
            ready.append(answer() if callable(answer) else answer)
        if self._lies():
            ready.append(self.rng.choice((None, (1, 2), Done(10**6, b"\1", None), Done(0, 7, None), "done")))  # type: ignore[arg-type]
        return ready

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._lies():
            raise RuntimeError("touch")

    def close(self, *, drain_seconds: float) -> None:
        for _, answer in self.answers if drain_seconds else ():
            if callable(answer):
                answer()
        self.answers.clear()
        self.is_closed = True

    def _lies(self) -> bool:
        return self.rng.random() < self.share

    def _start(self, work: Callable[[], list[bool]]) -> Any:
        assert not self.is_closed
        if self._lies():
            raise OSError("no such store")
        self.num_jobs += 1
        job = self.num_jobs

        def answer() -> Done:
            flags = bytes(work())
            if self._lies():
                flags = flags[1:] if self.rng.random() < 0.5 else flags + b"\1"
            return Done(job, flags, OSError("slow") if self._lies() else None)

        if not self._lies():  # else it is never answered
            self.answers.append((self.rng.randint(0, self.delay), answer))
            if self._lies():
                self.answers.append((self.rng.randint(0, self.delay), answer))
        return self.rng.choice((None, "one", -1, 1)) if self._lies() else job

    def _load(self, key: bytes, row: memoryview) -> bool:
        stored = self.objects.get(key)
        if self._lies():
            self.late_writes.append(row)
        if self._lies() and self.objects:
            stored = self.rng.choice(list(self.objects.values()))
        if stored is None or len(stored) != len(row):
            return self._lies()
        row[:] = stored
        if self._lies():
            row[self.rng.randrange(len(row))] ^= 1 << self.rng.randrange(8)
        return True

    def _save(self, key: bytes, row: memoryview) -> bool:
        if self._lies():
            return self._lies()
        self.objects[key] = bytes(row)
        return True
