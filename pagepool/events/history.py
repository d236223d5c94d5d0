"""The last batches of events, and their replay to one router. Needs the extra ``pagepool[events]``."""

import math
import time
from collections import deque
from collections.abc import Iterator

import zmq

__all__ = ["PATIENCE", "Batch", "History", "Replay"]

END = (-1).to_bytes(8, "big", signed=True)
PATIENCE = 10.0
"""Seconds after which the connection of a router that does not read its replay is closed."""

Payload = bytes | zmq.Frame
Batch = tuple[int, Payload]
"""Sequence number and payload."""


class History:
    """The last batches, and the last self-contained one (a start).

    >>> history = History(2)
    >>> for payload in (b"all", b"more", b"and more"):
    ...     sequence = history.add(payload, payload == b"all")
    >>> history.find(1), history.find(0)
    ((1, b'more'), None)
    >>> history.find_start(), history.find_first()
    ((0, b'all'), (1, b'more'))
    """

    def __init__(self, num_batches: int) -> None:
        """`num_batches` are kept."""
        self._batches: deque[Batch] = deque(maxlen=num_batches)
        self._start: Batch | None = None
        self.next_sequence = 0

    def add(self, payload: Payload, is_start: bool) -> int:
        """Add a batch, which `is_start` if it is self-contained. Returns its sequence number."""
        sequence = self.next_sequence
        self._batches.append((sequence, payload))
        self.next_sequence += 1
        if is_start:
            self.set_start(payload)
        return sequence

    def set_start(self, payload: Payload) -> None:
        """Set a batch that is equivalent to all batches so far."""
        self._start = (self.next_sequence - 1, payload)

    def find(self, sequence: int) -> Batch | None:
        """Return a batch, or None if it is not kept."""
        place = sequence - (self.next_sequence - len(self._batches))
        return self._batches[place] if 0 <= place < len(self._batches) else None

    def find_start(self) -> Batch | None:
        """Return the last self-contained batch; None if a later batch is not kept any more."""
        num_behind = math.inf if self._start is None else self.next_sequence - 1 - self._start[0]
        return self._start if num_behind <= len(self._batches) else None

    def find_first(self) -> Batch | None:
        """Return the first batch that is kept, or None."""
        return self._batches[0] if self._batches else None


class Replay:
    """The batches for one router, sent as it reads them."""

    def __init__(self, client: bytes, descriptor: int, topic: bytes, batches: Iterator[Batch]) -> None:
        """`client` is the id of the router in the socket, `descriptor` its connection."""
        self.client = client
        self.descriptor = descriptor
        self.is_given_up = False
        self._messages = _list_messages(client, topic, batches)
        self._message = next(self._messages, None)
        self._give_up_at = time.monotonic() + PATIENCE

    @property
    def is_at_end(self) -> bool:
        """Whether all batches are sent, or the router is gone."""
        return self._message is None

    def send(self, socket: "zmq.Socket[bytes]", max_messages: int) -> int:
        """Send at most `max_messages` without waiting. Returns the number sent."""
        num_sent = 0
        try:
            while num_sent < max_messages and self._message is not None:
                socket.send_multipart(self._message, zmq.DONTWAIT)
                self._message = next(self._messages, None)
                self._give_up_at = time.monotonic() + PATIENCE
                num_sent += 1
        except zmq.Again:
            if time.monotonic() >= self._give_up_at:
                self.is_given_up, self._message = True, None
        except zmq.ZMQError:  # the router is gone
            self._message = None
        return num_sent


def _list_messages(client: bytes, topic: bytes, batches: Iterator[Batch]) -> Iterator[list[Payload]]:
    for sequence, payload in batches:
        yield [client, b"", topic, sequence.to_bytes(8, "big"), payload]
    yield [client, b"", b"", END, b""]
