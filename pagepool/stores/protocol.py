"""The protocol of stores: objects of bytes under keys of bytes, moved by jobs that are answered later.

A store knows neither pages nor headers. It is not trusted either: whoever loads an object checks it with
`pagepool.stores.frames`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Done(NamedTuple):
    """An answered job."""

    job: int
    """The number returned by `lookup`, `load` or `save`."""

    is_done: bytes
    """A byte for each key: 1 if the object is there, was read whole, or was written; otherwise 0."""

    error: Exception | None
    """The first error, for the log. Keys that it did not affect may be done."""


@runtime_checkable
class Store(Protocol):
    """Objects outside the process. One thread calls it, and no call but `close` blocks that thread.

    `lookup`, `load` and `save` start a job and return its number, which no other job of the store has. `poll` answers each job
    at most once, in any order: a slow store answers late, and a broken one never. Faults of the store, such as a full disk or a
    missing bucket, are answers with an `error`; they are never raised. A job without an answer counts as failed after a minute.
    A save may be answered as not done without an error, if the store has no room for it.

    A key has 1 to 64 bytes. An object is replaced as a whole, also by a shorter one, so a load never mixes two of them. Objects
    may vanish at any time, and several processes may use the same objects. A store may find out after a successful look-up that
    it cannot load the object; it keeps such an object until a save replaces it.
    """

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Start to find out which objects are there. Return the number of the job."""

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to read objects into rows, one for each key. Return the number of the job.

        A row is a writable, contiguous memoryview of bytes with the length of its object. A key whose object has another length
        is not done, like a missing object, without an error. Until `poll` names the job or `close` returns, the store may write
        to the rows. What a row holds afterwards is undefined if its key was not done.
        """

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        """Start to write rows as objects, in place of older ones. Return the number of the job.

        Until `poll` names the job or `close` returns, the rows must stay unchanged.
        """

    def poll(self) -> list[Done]:
        """Return the jobs answered since the last call."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Report that objects were used, so that a store of limited size keeps them longer. A store may ignore it."""

    def close(self, *, drain_seconds: float) -> None:
        """Wait up to `drain_seconds` for saves, cancel all other jobs, and end. No job is answered afterwards, and no row is
        read or written. A second call has no effect.
        """
