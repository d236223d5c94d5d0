"""`Answerer`: the server of sealed questions. Needs the extra ``pagepool[peers]``."""

import contextlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from pagepool.errors import ArgumentTypeError
from pagepool.events.connections import MAX_UNREAD_BYTES, Guard, set_options
from pagepool.peers.messages import (
    MAX_ERROR_CHARACTERS,
    NUM_FIXED_FRAMES,
    NUM_NAME_BYTES,
    VERSION,
    Answer,
    Question,
    Refusals,
    RefusedMessageError,
    Seals,
    Stranger,
)
from pagepool.peers.socket_thread import Socket, SocketThread

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "tcp://127.0.0.1:*"
MAX_CONNECTIONS = 128
MAX_QUESTION_BYTES = 1 << 20
MAX_SESSIONS = 4096
MAX_READ = 64  # messages of one call
QUEUED_ANSWERS = 1024  # unread by a client; later ones are dropped, but an `Asker` asks less before it reads
SECONDS_BETWEEN_LOOKS = 3600.0


class Asked:
    """A question that has an answer once: call `answer` or `refuse`, from any thread."""

    __slots__ = ("_answerer", "_client", "_head", "body", "parts")

    def __init__(self, answerer: "Answerer", client: bytes, head: Question, frames: Sequence[Any]) -> None:
        """Keep the question's body and parts, each with the buffer protocol."""
        self._answerer, self._client, self._head = answerer, client, head
        self.body, self.parts = bytes(frames[2]), frames[NUM_FIXED_FRAMES:]

    def answer(self, body: bytes, parts: Sequence[Any] = ()) -> None:
        """Send an answer. The memory of the parts must stay unchanged until it is sent, so pass copies."""
        self._send(None, body, parts)

    def refuse(self, error: str) -> None:
        """Answer with an error."""
        self._send(error[:MAX_ERROR_CHARACTERS].encode("ascii", "replace").decode(), b"", ())

    def _send(self, error: str | None, body: bytes, parts: Sequence[Any]) -> None:
        head = Answer(VERSION, self._head.session, self._head.number, error)
        self._answerer.send(self._client, head, body, parts)


class Answerer(SocketThread):
    """Listens at an address, and calls a function in its thread with each question of a peer that has the secret.

    Connections, unfinished messages and unread answers are bounded. Messages with a wrong seal, malformed and repeated ones are
    counted in `refusals`, and not answered. ``address`` is where peers ask: the endpoint, and behind ``#`` a random name of
    this object.
    """

    def __init__(
        self,
        secret: bytes,
        namespace: str,
        address: str,
        handle: Callable[[Asked], None],
        *,
        name: str = "peers-answers",
        max_question_bytes: int = MAX_QUESTION_BYTES,
    ) -> None:
        """Listen and start the thread. An exception of `handle` is logged, and refuses the question. A frame of a question has
        at most `max_question_bytes`, and the whole question 64 KiB more.

        Raise ArgumentTypeError or ArgumentError for other secrets and namespaces, EndpointError for an unusable address.
        """
        self._seals = Seals(secret, namespace, is_server=True)
        if not isinstance(address, str):
            raise ArgumentTypeError(f"address: got {type(address).__name__}, allowed: a string such as {DEFAULT_ADDRESS!r}")
        super().__init__(name)
        self.refusals = Refusals()
        self._handle = handle
        self._server = os.urandom(NUM_NAME_BYTES)
        self._last_numbers: OrderedDict[bytes, int] = OrderedDict()  # of each session, the latest last
        self._due: deque[tuple[bytes, Answer | Stranger, bytes, Sequence[Any]]] = deque()
        self._guard = Guard(MAX_CONNECTIONS, max_question_bytes + MAX_UNREAD_BYTES)
        try:
            listening = self.make_socket(zmq.ROUTER)
            set_options(listening, address)
            listening.maxmsgsize = max_question_bytes
            listening.sndhwm, listening.rcvhwm = QUEUED_ANSWERS, MAX_READ
            self._peers = self._guard.watch(listening, "address", address)
            self.address = f"{self._peers.endpoint}#{self._server.hex()}"
            self._guard.thread.start()
            self.poller.register(listening, zmq.POLLIN)
            self.start()
        except BaseException:
            self.close()
            raise

    def send(self, client: bytes, head: Answer | Stranger, body: bytes, parts: Sequence[Any]) -> None:
        """Queue a message to a client; `Asked` calls it."""
        self._due.append((client, head, body, parts))
        self.wake()

    def close_sockets(self) -> None:
        """Close all sockets."""
        self._guard.stop()
        super().close_sockets()

    def forget(self) -> None:
        """Close a forked process's copies of the connections."""
        self._guard.forget()

    # Methods that run in the thread.

    def find_wait(self) -> float:
        """Return the seconds until work is due."""
        return SECONDS_BETWEEN_LOOKS

    def work(self, ready: list[Socket]) -> None:
        """Answer the questions that have arrived."""
        for listening in ready:
            with contextlib.suppress(zmq.Again):
                for _ in range(MAX_READ):
                    self._read(*listening.recv_multipart(zmq.DONTWAIT, copy=False))
                    self._flush()
        self._flush()

    def _flush(self) -> None:
        while self._due and not self._is_closing:
            client, head, body, parts = self._due.popleft()
            with contextlib.suppress(zmq.Again):  # the client reads nothing
                self._peers.watched.send_multipart([client, *self._seals.seal(head, body, parts)], zmq.DONTWAIT, copy=False)

    def _read(self, client: "zmq.Frame", *frames: "zmq.Frame") -> None:
        """Check a question, and let it be handled."""
        _, peer = self._peers.find(client)
        peer.note_read(frames)
        try:
            head = self._seals.open_head([frame.buffer for frame in frames])
            if not isinstance(head, Question):
                raise RefusedMessageError("it is no question")
            self._seals.check([frame.buffer for frame in frames])
            if head.server != self._server:
                return self.send(client.bytes, Stranger(VERSION, head.session, head.number, self._server), b"", ())
            self._count(head)
        except RefusedMessageError as error:
            return self.refusals.note(error)
        asked = Asked(self, client.bytes, head, [frame.buffer for frame in frames])
        try:
            self._handle(asked)
        except Exception as error:
            logger.exception("a question of a peer was refused")
            asked.refuse(type(error).__name__)

    def _count(self, head: Question) -> None:
        """Accept each number of a session once."""
        if head.number <= self._last_numbers.get(head.session, 0):
            raise RefusedMessageError("it was received before, or out of order")
        self._last_numbers[head.session] = head.number
        self._last_numbers.move_to_end(head.session)
        if len(self._last_numbers) > MAX_SESSIONS:
            self._last_numbers.popitem(last=False)
