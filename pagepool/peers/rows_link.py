"""`RowsLink`: a link for rows of host memory over TCP. Needs the extra ``pagepool[peers]``."""

import hashlib
import itertools
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagepool.arguments import as_list, require_int, require_number, require_text
from pagepool.errors import ArgumentError, ArgumentTypeError, PeerError
from pagepool.peers.answerer import DEFAULT_ADDRESS, Answerer, Asked
from pagepool.peers.asker import MAX_SECONDS, Answered, Asker
from pagepool.peers.link import Pulled

MAX_NUMBER = (1 << 63) - 1
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 12, 1 << 26
CHUNKS_AT_ONCE = 4
"""Questions of one pull that are under way."""

QUESTION = struct.Struct("<qQQ32s")
"""Number of an offer, first byte and number of bytes in its joined parts, and the SHA-256 of the parts' lengths."""

Part = npt.NDArray[np.uint8]


class Parts:
    """Buffers, addressed as if they were joined."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Find where each part starts."""
        self.parts = parts
        sizes = np.array([0, *(len(part) for part in parts)], np.uint64)
        self.digest = hashlib.sha256(sizes.astype("<u8").tobytes()).digest()
        self._starts = np.cumsum(sizes).astype(np.int64)
        self.num_bytes = int(self._starts[-1])

    def copy(self, start: int, other: Part, *, is_read: bool) -> None:
        """Read bytes from `start` on into a buffer, or write them from it."""
        at, stop = int(np.searchsorted(self._starts, start, "right")) - 1, start + len(other)
        while start < stop:
            first = int(self._starts[at])
            own = self.parts[at][start - first : stop - first]
            target = other[len(other) - (stop - start) :][: len(own)]
            np.copyto(*((target, own) if is_read else (own, target)))
            start, at = start + len(own), at + 1


@dataclass(slots=True, eq=False)
class Offer:
    """Parts that peers may pull. The lock is held while a part of them is copied."""

    parts: Parts | None
    end_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class Pull:
    """A job. The lock is held while bytes are written to its parts."""

    job: int
    address: str
    number: int
    given: Sequence[Any]
    parts: Parts
    end_at: float
    next_byte: int = 0
    num_waiting: int = 0
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class RowsLink:
    """A `Link` whose parts are contiguous host memory: arrays of NumPy, memoryviews, or tensors of torch on the CPU.

    A thread copies parts in chunks and seals them, so neither side needs memory for more than a few chunks.
    Many peers may pull an offer at once. Pulled parts have the lengths of the offered ones, else the job fails. `poll` returns
    the parts as they were given. A job that is not over after `pull_seconds` fails.

    Every message is authenticated by the secret and none is encrypted: see "Who may pull" in docs/security.md.
    """

    def __init__(
        self,
        secret: bytes,
        namespace: str,
        *,
        address: str = DEFAULT_ADDRESS,
        pull_seconds: float = 10.0,
        max_message_bytes: int = 1 << 20,
    ) -> None:
        """Listen at an address; port ``*`` is any free one. `secret` has at least 16 random bytes, the same for all peers, and
        `namespace` is the result of `make_namespace`. A chunk has at most `max_message_bytes`, 4 KiB to 64 MiB.

        Raise ArgumentTypeError or ArgumentError for other values, EndpointError for an unusable address.
        """
        self._seconds = require_number("pull_seconds", pull_seconds, 0.0, MAX_SECONDS)
        self._chunk = require_int("max_message_bytes", max_message_bytes, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
        self._offers: dict[int, Offer] = {}
        self._pulls: dict[int, Pull] = {}
        self._jobs = itertools.count(1)
        self._ended: deque[Pulled] = deque()
        self._answerer = Answerer(secret, namespace, address, _Answers(self._offers).handle, name="rows-answers")
        try:
            self._asker = Asker(secret, namespace, max_message_bytes=self._chunk, name="rows-asks")
        except BaseException:
            self._answerer.close()
            raise
        self._close = weakref.finalize(self, _close, self._answerer, self._asker, self._offers, self._pulls)

    @property
    def address(self) -> str:
        """The address from which others pull, with a random name of this link."""
        return self._answerer.address

    @property
    def num_refused_messages(self) -> int:
        """The number of refused messages: with a wrong seal, malformed, or repeated."""
        return self._answerer.refusals.num + self._asker.refusals.num

    def offer(self, number: int, parts: Sequence[Any], *, seconds: float) -> None:
        """Let peers pull `parts` until `seconds` have passed, or `withdraw`. Nothing is copied. O(parts + offers).

        Raise ArgumentTypeError for other parts than contiguous host memory, ArgumentError for a number that is offered already
        and other values.
        """
        now = time.monotonic()
        number, seconds = _require_number(number), require_number("seconds", seconds, 0.0, MAX_SECONDS)
        views = Parts([view_part(part) for part in as_list("parts", parts, "a sequence of buffers")])
        self._answerer.require_open()
        for each, offer in [*self._offers.items()]:
            if offer.end_at <= now:
                del self._offers[each]
        if number in self._offers:
            raise ArgumentError(f"number: got {number}, which is offered, allowed: a number that was never used")
        self._offers[number] = Offer(views, now + seconds)

    def withdraw(self, number: int) -> None:
        """End an offer. When this returns, no byte of its parts is read any more. Waits for the copy of a chunk at most."""
        number = _require_number(number)
        self._answerer.require_open()
        _end_offer(self._offers.pop(number, None))

    def pull(self, address: str, number: int, parts: Sequence[Any]) -> int:
        """Start to pull an offer of the link at an address into writable parts. Return the number of the job. O(parts).

        Raise ArgumentTypeError for other parts than contiguous writable host memory, ArgumentError for other values.
        """
        address, number = require_text("address", address), _require_number(number)
        given = as_list("parts", parts, "a sequence of buffers")
        views = Parts([view_part(part, is_writable=True) for part in given])
        self._asker.require_open()
        pull = Pull(next(self._jobs), address, number, parts, views, time.monotonic() + self._seconds)
        self._pulls[pull.job] = pull
        with pull.lock:
            for _ in range(CHUNKS_AT_ONCE):
                self._ask_next(pull)
            if not views.num_bytes:  # whether it is offered is asked all the same
                self._ask(pull, 0, 0)
        return pull.job

    def poll(self) -> list[Pulled]:
        """Return the jobs that have ended since the last call. Raise ArgumentError after `close`."""
        self._asker.require_open()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """End all offers and jobs. No job is answered afterwards, and no part is read or written. No effect in a forked process
        and for a closed link.
        """
        self._close()

    def _ask_next(self, pull: Pull) -> None:
        """Ask for the next chunk, if there is one. The job's lock is held."""
        start, size = pull.next_byte, min(self._chunk, pull.parts.num_bytes - pull.next_byte)
        if size:
            pull.next_byte += size
            self._ask(pull, start, size)

    def _ask(self, pull: Pull, start: int, size: int) -> None:
        pull.num_waiting += 1
        question = QUESTION.pack(pull.number, start, size, pull.parts.digest)
        seconds = max(0.0, pull.end_at - time.monotonic())
        self._asker.ask(pull.address, question, seconds=seconds, then=lambda ended: self._take(pull, start, size, ended))

    def _take(self, pull: Pull, start: int, size: int, ended: Answered) -> None:
        """Write a chunk, and ask for the next one. This runs in the asker's thread."""
        with pull.lock:
            if pull.is_over:
                return
            error: Exception | None = ended.error
            if error is None and [len(part) for part in ended.parts] != [size]:
                error = PeerError(f"peer {pull.address}: got an answer of another length, allowed: {size} bytes")
            pull.num_waiting -= 1
            if error is None:
                pull.parts.copy(start, np.frombuffer(ended.parts[0], np.uint8), is_read=False)
                self._ask_next(pull)
            if error is not None or not pull.num_waiting:
                pull.is_over = True
                self._pulls.pop(pull.job, None)
                self._ended.append(Pulled(pull.job, pull.given if error is None else None, error))


class _Answers:
    """Answers the questions of peers. It knows the offers, not the link, so that a forgotten link is closed."""

    def __init__(self, offers: dict[int, Offer]) -> None:
        self._offers = offers

    def handle(self, asked: Asked) -> None:
        """Copy a chunk of an offer, and send it if the offer has not ended meanwhile."""
        if len(asked.body) != QUESTION.size:
            return asked.refuse("its question is malformed")
        number, start, size, digest = QUESTION.unpack(asked.body)
        offer = self._offers.get(number)
        if offer is None:
            return asked.refuse("nothing is offered under this number")
        with offer.lock:
            if offer.parts is None or time.monotonic() >= offer.end_at:
                return asked.refuse("the offer has ended")
            if digest != offer.parts.digest:
                return asked.refuse("the offered parts have other lengths")
            if size > MAX_CHUNK_BYTES or start + size > offer.parts.num_bytes:
                return asked.refuse("the chunk is outside the parts")
            chunk = np.empty(size, np.uint8)
            offer.parts.copy(start, chunk, is_read=True)
            has_ended = time.monotonic() >= offer.end_at
        if has_ended:
            return asked.refuse("the offer has ended")
        asked.answer(b"", [chunk])
        return None


def _end_offer(offer: Offer | None) -> None:
    if offer is not None:
        with offer.lock:
            offer.parts = None


def _close(answerer: Answerer, asker: Asker, offers: dict[int, Offer], pulls: dict[int, Pull]) -> None:
    if not answerer.is_open:  # in a forked process locks may be held for ever
        return
    for offer in [*offers.values()]:
        _end_offer(offer)
    for pull in [*pulls.values()]:
        with pull.lock:
            pull.is_over = True
    offers.clear()
    pulls.clear()
    answerer.close()
    asker.close()


def _require_number(number: int) -> int:
    return require_int("number", number, 0, MAX_NUMBER)


def view_part(part: Any, *, is_writable: bool = False) -> Part:
    """Return the bytes of a part without a copy. Raise ArgumentTypeError unless it is contiguous host memory, and writable if
    asked for.
    """
    try:
        if hasattr(part, "detach") and hasattr(part, "untyped_storage"):  # a tensor; NumPy lacks some of its dtypes
            import torch

            if not part.is_contiguous():
                raise ValueError("it is not contiguous")
            view: Part = part.detach().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(part, np.ndarray):
            if not part.flags.c_contiguous or part.dtype.hasobject:
                raise ValueError("it is not contiguous")
            view = part.reshape(-1).view(np.uint8)
        else:
            view = np.frombuffer(memoryview(part).cast("B"), np.uint8) if len(part) else np.empty(0, np.uint8)
    except (TypeError, ValueError, RuntimeError, BufferError):
        raise ArgumentTypeError(f"parts: got {type(part).__name__}, allowed: contiguous buffers of host memory") from None
    if is_writable and not view.flags.writeable:
        raise ArgumentTypeError("parts: got read-only memory, allowed: writable memory")
    return view
