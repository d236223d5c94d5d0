"""`Asker`: the client of sealed questions. Needs the extra ``pagepool[peers]``."""

import contextlib
import heapq
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from pagepool.arguments import require_int, require_number, require_text
from pagepool.errors import EndpointError, PeerError
from pagepool.peers.messages import (
    MAX_HEAD_BYTES,
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

MAX_SERVERS = 256
"""Servers to which connections are kept; the one that was asked longest ago is dropped for another one."""
MAX_SENT = 256
"""Questions that a server has to answer before it gets more; the others wait here. An `Answerer` queues more answers."""
MAX_SECONDS = 1e6
MAX_READ = 64
MAX_MESSAGE_BYTES = 1 << 30
SOCKET_OPTIONS = {
    zmq.RECONNECT_IVL: 50,  # milliseconds between two tries
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.HANDSHAKE_IVL: 5000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 6,
}


class Answered(NamedTuple):
    """The end of a question."""

    number: int
    """The number returned by `Asker.ask`."""

    body: bytes
    """The body of the answer; empty after an error."""

    parts: Sequence[memoryview]
    """The bulk data of the answer."""

    error: PeerError | None
    """Why there is no answer."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A question without an answer."""

    number: int
    address: str
    body: bytes
    parts: Sequence[Any]
    asked_at: float
    end_at: float
    then: Callable[[Answered], None] | None
    is_sent: bool = False


@dataclass(slots=True, eq=False)
class Server:
    """A connection to an `Answerer`, and the questions that it has not answered, in the order of their numbers."""

    socket: Socket
    endpoint: str
    name: bytes  # of the process; empty until it is known
    is_pinned: bool  # the address has the name: another process is not asked
    heard_at: float = 0.0  # when a message arrived last
    waiting: dict[int, Waiting] = field(default_factory=dict)
    unsent: deque[Waiting] = field(default_factory=deque)
    num_sent: int = 0


class Asker(SocketThread):
    """Asks peers by their addresses, in its thread. Each question ends once: by an answer, an error, or its deadline.

    An address is that of an `Answerer`. Without the name behind ``#`` any process at the endpoint is asked that has the secret,
    also after a restart.
    """

    def __init__(self, secret: bytes, namespace: str, *, max_message_bytes: int = 1 << 20, name: str = "peers-asks") -> None:
        """Start the thread. A frame of an answer has at most `max_message_bytes`. Raise ArgumentTypeError or ArgumentError for
        other secrets, namespaces and sizes.
        """
        self._seals = Seals(secret, namespace, is_server=False)
        self._max_bytes = require_int("max_message_bytes", max_message_bytes, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES)
        super().__init__(name)
        self.refusals = Refusals()
        self._session = os.urandom(NUM_NAME_BYTES)
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._new: deque[Waiting] = deque()
        self._ended: deque[Answered] = deque()
        self._servers: dict[str, Server] = {}  # by address, the one asked last at the end
        self._of_socket: dict[Socket, Server] = {}
        self._ends: list[tuple[float, int, str]] = []  # heap of deadlines, numbers and addresses
        self.start()

    def ask(
        self,
        address: str,
        body: bytes,
        parts: Sequence[Any] = (),
        *,
        seconds: float,
        then: Callable[[Answered], None] | None = None,
    ) -> int:
        """Ask a question and return its number. `parts` must stay unchanged until it ends. `poll` returns its end, or `then` is
        called with it in the thread. After `seconds` it ends with an error, and so it does at once for a malformed address.

        Raise ArgumentTypeError or ArgumentError for other values, and after `close`; IntegrityError in a forked process.
        """
        address = require_text("address", address)
        seconds = require_number("seconds", seconds, 0.0, MAX_SECONDS)
        self.require_open()
        now = time.monotonic()
        with self._lock:  # numbers are queued in their order
            waiting = Waiting(next(self._numbers), address, body, parts, now, now + seconds, then)
            self._new.append(waiting)
        self.wake()
        return waiting.number

    def poll(self) -> list[Answered]:
        """Return the questions that have ended since the last call. Raise as `ask`."""
        self.require_open()
        ended = []
        with contextlib.suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        return ended

    # Methods that run in the thread.

    def find_wait(self) -> float:
        """Return the seconds until work is due."""
        return self._ends[0][0] - time.monotonic() if self._ends else 3600.0

    def work(self, ready: list[Socket]) -> None:
        """Read answers, take new questions, end those that are over, and send those for which there is room."""
        for each in ready:
            with contextlib.suppress(zmq.Again):
                for _ in range(MAX_READ):
                    self._read(self._of_socket[each], each.recv_multipart(zmq.DONTWAIT, copy=False))
        self._take_new()
        while self._ends and self._ends[0][0] <= time.monotonic():
            _, number, address = heapq.heappop(self._ends)
            server = self._servers.get(address)
            if server is not None and (waiting := server.waiting.get(number)):
                self._end(server, waiting, "no answer in time")
                if server.heard_at < waiting.asked_at:
                    self._reconnect(server)
        for server in self._servers.values():
            self._send_due(server)

    def _take_new(self) -> None:
        """Take the questions asked since the last call. Numbers ascend for each server."""
        with contextlib.suppress(IndexError):
            while True:
                waiting = self._new.popleft()
                try:
                    server = self._find_server(waiting.address)
                except (zmq.ZMQError, UnicodeError, EndpointError) as error:
                    self._end(None, waiting, str(error))
                    continue
                server.waiting[waiting.number] = waiting
                server.unsent.append(waiting)
                heapq.heappush(self._ends, (waiting.end_at, waiting.number, waiting.address))

    def _send_due(self, server: Server) -> None:
        """Send questions while there is room: one until the name of the server is known."""
        while server.unsent and server.num_sent < (MAX_SENT if server.name else 1):
            waiting = server.unsent.popleft()
            if waiting.number in server.waiting:  # else it has ended
                waiting.is_sent = True
                server.num_sent += 1
                self._send(server, waiting)

    def _send_again(self, server: Server) -> None:
        """Send again what has no answer."""
        for waiting in [each for each in server.waiting.values() if each.is_sent]:
            self._send(server, waiting)

    def _send(self, server: Server, waiting: Waiting) -> None:
        head = Question(VERSION, server.name, self._session, waiting.number)
        try:
            server.socket.send_multipart(self._seals.seal(head, waiting.body, waiting.parts), zmq.DONTWAIT)
        except zmq.Again:
            self._end(server, waiting, "too many questions wait for a connection")

    def _find_server(self, address: str) -> Server:
        """Return the connection to an address, a new one if there is none."""
        server = self._servers.pop(address, None)
        if server is None:
            endpoint, is_pinned, digits = address.partition("#")
            is_name = re.fullmatch(r"[0-9a-f]{32}" if is_pinned else "", digits)
            if not endpoint.startswith(("tcp://", "ipc://")) or not is_name:
                raise EndpointError(f"address: got {address!r}, allowed: that of a peer, such as 'tcp://10.0.0.1:5600'")
            if len(self._servers) >= MAX_SERVERS:
                self._drop(next(iter(self._servers)))
            server = Server(self._connect(endpoint), endpoint, bytes.fromhex(digits), bool(is_pinned))
            self._of_socket[server.socket] = server
        self._servers[address] = server
        return server

    def _connect(self, endpoint: str) -> Socket:
        made = self.make_socket(zmq.DEALER)
        try:
            for option, value in SOCKET_OPTIONS.items():
                made.setsockopt(option, value)
            made.setsockopt(zmq.IPV6, "[" in endpoint)
            made.maxmsgsize = self._max_bytes
            made.connect(endpoint)
        except BaseException:
            made.close()
            raise
        self.poller.register(made, zmq.POLLIN)
        return made

    def _drop(self, address: str) -> None:
        server = self._servers.pop(address)
        for waiting in list(server.waiting.values()):
            self._end(server, waiting, f"more than {MAX_SERVERS} peers were asked")
        self._disconnect(server)

    def _disconnect(self, server: Server) -> None:
        self.poller.unregister(server.socket)
        del self._of_socket[server.socket]
        server.socket.close()

    def _reconnect(self, server: Server) -> None:
        """Connect anew: libzmq gives up a connection for ever if its bytes were no messages. Ask again what has no answer."""
        self._disconnect(server)
        server.socket = self._connect(server.endpoint)
        self._of_socket[server.socket] = server
        self._send_again(server)

    def _read(self, server: Server, frames: Sequence["zmq.Frame"]) -> None:
        """Check an answer, and end its question."""
        buffers = [frame.buffer for frame in frames]
        server.heard_at = time.monotonic()
        try:
            head = self._seals.open_head(buffers)
            waiting = None if isinstance(head, Question) else server.waiting.get(head.number)
            if waiting is None or head.session != self._session:
                return None  # a late answer, or one of another client
            self._seals.check(buffers)
        except RefusedMessageError as error:
            return self.refusals.note(error)
        if isinstance(head, Answer):
            self._end(server, waiting, head.error, bytes(buffers[2]), buffers[NUM_FIXED_FRAMES:])
        elif isinstance(head, Stranger) and server.is_pinned:
            self._end(server, waiting, "its process was restarted")
        elif isinstance(head, Stranger) and head.server != server.name and len(head.server) == NUM_NAME_BYTES:
            server.name = head.server
            self._send_again(server)
        return None

    def _end(
        self, server: Server | None, waiting: Waiting, error: str | None, body: bytes = b"", parts: Sequence[memoryview] = ()
    ) -> None:
        """End a question."""
        if server is not None:
            del server.waiting[waiting.number]
            server.num_sent -= waiting.is_sent
        failure = None if error is None else PeerError(f"peer {waiting.address}: {error}")
        ended = Answered(waiting.number, body, parts, failure)
        if waiting.then is None:
            self._ended.append(ended)
            return
        try:
            waiting.then(ended)
        except Exception:
            logger.exception("the answer of a peer was not used")
