"""The last batches of events, and the replay of them to one router. Needs the extra ``pagepool[events]``."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import zmq

__all__ = ["Batch", "History", "Replay"]

END = (-1).to_bytes(8, "big", signed=True)
PATIENCE = 10.0
"""Seconds for which a router may leave its replay unread."""

Batch = tuple[int, bytes]
"""Sequence number and payload."""


class History:
    """The last batches, and the last one that needs none before it.

    >>> history = History(2)
    >>> for payload in (b"all", b"more", b"and more"):
    ...     sequence = history.add(payload, payload == b"all")
    >>> history.list_from(1), history.list_from(0)
    ([(1, b'more'), (2, b'and more')], None)
    >>> history.list_from_start()
    [(0, b'all'), (1, b'more'), (2, b'and more')]
    """

    def __init__(self, num_batches: int) -> None:
        """`num_batches` are kept."""
        self._batches: deque[Batch] = deque(maxlen=num_batches)
        self._start: Batch | None = None
        self.next_sequence = 0

    def add(self, payload: bytes, is_start: bool) -> int:
        """Keep a batch; returns its sequence number. One that `is_start` needs none before it."""
        sequence = self.next_sequence
        self._batches.append((sequence, payload))
        self.next_sequence += 1
        if is_start:
            self.set_start(payload)
        return sequence

    def set_start(self, payload: bytes) -> None:
        """Keep one that alone leads to where all so far lead."""
        self._start = (self.next_sequence - 1, payload)

    def list_from(self, sequence: int) -> list[Batch] | None:
        """The batches from `sequence` on; None where the first of them is kept no more, or never was."""
        first = self.next_sequence - len(self._batches)
        if not first <= sequence <= self.next_sequence:
            return None
        return list(islice(self._batches, sequence - first, None))

    def list_from_start(self) -> list[Batch] | None:
        """A batch that needs none before it, and all after it; None where they are not kept any more."""
        if self._start is None:
            return None
        batches = self.list_from(self._start[0] + 1)
        return None if batches is None else [self._start, *batches]

    def list_all(self) -> list[Batch]:
        """The batches that are kept."""
        return list(self._batches)


class Replay:
    """Batches on their way to one router, sent as it reads them."""

    def __init__(self, client: bytes, topic: bytes, batches: Sequence[Batch]) -> None:
        """`client` is how the socket knows the router."""
        self._messages = _list_messages(client, topic, batches)
        self._message = next(self._messages, None)
        self._give_up_at = time.monotonic() + PATIENCE

    def send(self, socket: "zmq.Socket[bytes]", num_messages: int) -> bool:
        """Send `num_messages` at most, without waiting. Returns whether there are more, and a router that may yet read them."""
        try:
            while num_messages and self._message is not None:
                socket.send_multipart(self._message, zmq.DONTWAIT)
                self._message = next(self._messages, None)
                self._give_up_at = time.monotonic() + PATIENCE
                num_messages -= 1
        except zmq.Again:
            return time.monotonic() < self._give_up_at
        except zmq.ZMQError:  # the router is gone
            return False
        return self._message is not None


def _list_messages(client: bytes, topic: bytes, batches: Sequence[Batch]) -> Iterator[list[bytes]]:
    for sequence, payload in batches:
        yield [client, b"", topic, sequence.to_bytes(8, "big"), payload]
    yield [client, b"", b"", END, b""]
