"""Sealed messages of peers. Needs the extra ``pagepool[peers]``.

A message has three or more frames: its seal, its head, its body, and parts of bulk data. The seal is the HMAC-SHA256 of the
lengths and bytes of all other frames. Its key depends on the secret, the namespace and the direction, so a question is never
taken for an answer, and a message of another model is refused.

The head of a question names the server process, the session of the client, and its number there; all but the number are random.
A server accepts a number of a session once, in ascending order. An answer repeats session and number, so an old answer is none
to a new question. A server that gets a question for another process answers with its own name.
"""

import hashlib
import hmac
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pagepool.arguments import require_text
from pagepool.errors import ArgumentError, ArgumentTypeError

logger = logging.getLogger(__name__)

VERSION = 1
MIN_SECRET_BYTES = 16
NUM_NAME_BYTES = 16
NUM_SEAL_BYTES = 32
MAX_HEAD_BYTES = 256
MAX_ERROR_CHARACTERS = 100
NUM_FIXED_FRAMES = 3
"""Frames before the parts: seal, head and body."""


class Question(msgspec.Struct, array_like=True, frozen=True, tag="question", forbid_unknown_fields=True):
    """The head of a question."""

    version: int
    server: bytes  # random name of the server's process; empty: not known yet
    session: bytes  # random name of the client
    number: int


class Answer(msgspec.Struct, array_like=True, frozen=True, tag="answer", forbid_unknown_fields=True):
    """The head of an answer. With an error the body is empty."""

    version: int
    session: bytes
    number: int
    error: str | None


class Stranger(msgspec.Struct, array_like=True, frozen=True, tag="stranger", forbid_unknown_fields=True):
    """The head of the answer to a question for another process: the name of this one."""

    version: int
    session: bytes
    number: int
    server: bytes


class RefusedMessageError(Exception):
    """A message has a wrong seal, is malformed, or was received before."""


Head = Question | Answer | Stranger
_encode = msgspec.msgpack.Encoder().encode
_decode: Any = msgspec.msgpack.Decoder(Question | Answer | Stranger).decode


class Seals:
    """Seals the messages of one direction, and checks those of the other."""

    def __init__(self, secret: bytes, namespace: str, *, is_server: bool) -> None:
        """Derive the keys. Raise ArgumentTypeError or ArgumentError for other secrets than at least 16 bytes, and for other
        namespaces than text.
        """
        if not isinstance(secret, bytes):
            raise ArgumentTypeError(f"secret: got {type(secret).__name__}, allowed: bytes")
        if len(secret) < MIN_SECRET_BYTES:
            raise ArgumentError(f"secret: got {len(secret)} bytes, allowed: at least {MIN_SECRET_BYTES}, random ones")
        name = require_text("namespace", namespace).encode()
        keys = [hmac.digest(secret, b"pagepool.peers/" + to + name, "sha256") for to in (b"server/", b"client/")]
        self._in_key, self._out_key = keys if is_server else keys[::-1]

    def seal(self, head: Head, body: bytes, parts: Sequence[Any] = ()) -> list[Any]:
        """Return the frames of a message. Costs 1.5 ms for each MiB of the parts, without the GIL."""
        frames = [_encode(head), body, *parts]
        return [_digest(self._out_key, frames), *frames]

    def open_head(self, frames: Sequence[Any]) -> Any:
        """Return the head of a message whose seal was not checked. Raise RefusedMessageError if it is malformed."""
        if len(frames) < NUM_FIXED_FRAMES or len(frames[0]) != NUM_SEAL_BYTES or len(frames[1]) > MAX_HEAD_BYTES:
            raise RefusedMessageError("its frames are not those of a message")
        try:
            head = _decode(frames[1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedMessageError(f"its head is malformed: {error}") from None
        if head.version != VERSION:
            raise RefusedMessageError(f"it has version {head.version}, this process has {VERSION}")
        return head

    def check(self, frames: Sequence[Any]) -> None:
        """Raise RefusedMessageError unless the seal of a message is right."""
        if not hmac.compare_digest(bytes(frames[0]), _digest(self._in_key, frames[1:])):
            raise RefusedMessageError("its seal is wrong: the peer has another secret or namespace, or bytes were changed")


def _digest(key: bytes, frames: Iterable[Any]) -> bytes:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for frame in frames:
        view = memoryview(frame)
        digest.update(view.nbytes.to_bytes(8, "little"))
        digest.update(view)
    return digest.digest()


class Refusals:
    """Counts refused messages, and logs the first, second, fourth and so on."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self.num = 0

    def note(self, error: Exception) -> None:
        """Count a refused message."""
        with self._lock:
            self.num = number = self.num + 1
        if number & (number - 1) == 0:
            logger.warning("messages of peers were refused, %d by now: %s", number, error)
