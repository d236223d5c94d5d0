"""The thread that follows the events of many workers over ZeroMQ."""

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from pagepool.arguments import require_callable, require_int, require_number
from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, shown
from pagepool.events.connections import require_ports
from pagepool.events.publisher import as_key
from pagepool.router.index import PrefixIndex, require_worker
from pagepool.router.streams import StreamStats, WorkerStream

__all__ = ["EventSubscriber", "StreamStats"]

logger = logging.getLogger(__name__)

NUMBER_SIZE = 8  # bytes of a batch's number
END = (1 << 64) - 1  # number that marks the end of a replay
MAX_READ = 64  # messages of a worker per turn
MAX_REPLAY_SECONDS = 1_000_000  # eleven days
MAX_FRAMES = 8  # limit of frames in a message
CURVE_OPTIONS = ("curve_serverkey", "curve_publickey", "curve_secretkey")
ALLOWED_ENDPOINTS = "an address that ZeroMQ can connect to, such as 'tcp://127.0.0.1:5557'"
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0

T = TypeVar("T")


@dataclass
class Connection:
    """The sockets of a worker, and times. `replayed` is the socket of a replay in progress, else None. It was requested, or its
    last message came, at `asked_at`; before `ask_at` none is requested. At `due_at` the worker must be served even without a
    message. `was_connected` is True from the first connection on.
    """

    stream: WorkerStream
    published: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    replay_endpoint: str | None
    options: dict[str, Any]
    replayed: "zmq.Socket[bytes] | None" = None
    asked_at: float = 0.0
    ask_at: float = 0.0
    retry_seconds: float = MIN_RETRY_SECONDS
    due_at: float = 0.0
    was_connected: bool = False


class EventSubscriber(contextlib.AbstractContextManager["EventSubscriber"]):
    """Subscriber to the events of many workers: one thread applies them to an index.

    A worker publishes as `pagepool.events.publisher.EventPublisher` and vLLM do: messages of a topic, a number (8 bytes,
    big-endian) and a batch. At the start, and when numbers are missing, the thread asks the worker's replay endpoint for the
    batches; pagepool sends a snapshot if it no longer has them. During a replay, up to `hwm` new batches wait in their socket.
    If a replay pauses for `replay_seconds`, it is requested again, at intervals that double up to a minute. A worker counts
    as replaced if its numbers restart, or if its last batch differs after a connection was lost or made. Its entries are then
    dropped, as they are when the index refuses one of its batches; events that it only leaves out are
    counted.

    A message of more than `max_message_bytes` closes its connection; libzmq then reconnects. In a forked process all calls
    raise ArgumentError, except `close`, which does nothing.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        on_report: Callable[[int], object] | None = None,
        replay_seconds: float = 5.0,
        hwm: int = 10_000,
        max_message_bytes: int = 1 << 28,
    ) -> None:
        """The thread calls `on_report`, for example `PrefixRouter.note_report`, with a worker after its batches or heartbeats,
        if no batches are missing. `on_report` may call all methods of the subscriber, but must not wait for other threads that
        do. Its errors are logged, and the subscriber continues. Raise ArgumentError or ArgumentTypeError for other values.
        """
        if not isinstance(index, PrefixIndex):
            raise ArgumentTypeError(f"index: got {type(index).__name__}, allowed: PrefixIndex")
        if not require_number("replay_seconds", replay_seconds) > 0:
            raise ArgumentError(f"replay_seconds: got {shown(replay_seconds)}, allowed: more than 0")
        self._index = index
        self._on_report = None if on_report is None else require_callable("on_report", on_report)
        self._replay_seconds = min(replay_seconds, MAX_REPLAY_SECONDS)
        self._options = {
            "rcvhwm": require_int("hwm", hwm, 1, (1 << 31) - 1),
            "maxmsgsize": require_int("max_message_bytes", max_message_bytes, 1, 1 << 40),
            "linger": 0,
        }
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # default 1,023; each worker takes three
        self._connections: dict[int, Connection] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the waker, and whether the subscriber is open
        self._is_open = True
        self._pid = os.getpid()
        self._woken, self._waker = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="pagepool-subscriber")
        self._thread.start()

    def connect(
        self,
        worker: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        curve: tuple[str | bytes, str | bytes, str | bytes] | None = None,
    ) -> None:
        """Follow a worker. Without a `replay_endpoint` lost batches stay lost.

        `curve` has the worker's public key, and the router's own public and secret keys. Raise EndpointError for a malformed
        address, ArgumentError if the worker is followed already or the subscriber is closed, ArgumentTypeError for other types.
        """
        worker = require_worker(worker)
        for name, text in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint), ("topic", topic)):
            if not (isinstance(text, str) or (text is None and name == "replay_endpoint")):
                raise ArgumentTypeError(f"{name}: got {type(text).__name__}, allowed: a string")
            if text is not None and name != "topic":
                require_ports(name, text)
        options: dict[str, Any] = dict(self._options)
        if curve is not None:
            if not isinstance(curve, tuple | list) or len(curve) != len(CURVE_OPTIONS):
                raise ArgumentTypeError(f"curve: got {type(curve).__name__}, allowed: a tuple of {len(CURVE_OPTIONS)} keys")
            options |= {name: as_key(name, key) for name, key in zip(CURVE_OPTIONS, curve, strict=True)}
        self._call(lambda: self._add(worker, endpoint, replay_endpoint, topic, options))

    def disconnect(self, worker: int) -> None:
        """Stop following a worker, and drop its entries. No effect if it is not followed."""
        worker = require_worker(worker)
        self._call(lambda: self._remove(worker))

    def stats(self) -> dict[int, StreamStats]:
        """Return the counts of each worker's batches."""
        return self._call(lambda: {worker: each.stream.stats for worker, each in self._connections.items()})

    def close(self) -> None:
        """Stop the thread. The index stays as it is. No effect if closed already, or in a forked process."""
        if threading.current_thread() is self._thread:  # called by `on_report`, or by garbage collection there
            self._end()
            return
        with contextlib.suppress(ArgumentError):
            self._call(self._end)
        if self._pid == os.getpid():
            self._thread.join()

    def __exit__(self, *_: object) -> None:
        """Call `close`."""
        self.close()

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread; only the thread uses connections and sockets."""
        future: Future[T] = Future()
        if self._pid != os.getpid():
            raise ArgumentError("subscriber: got one that belongs to another process, allowed: one of this process")
        if self._is_open and threading.current_thread() is self._thread:
            return function()
        with self._lock:
            if not self._is_open:
                raise _closed()
            self._calls.put((function, future))
            self._waker.send(b"")
        return future.result()

    def _end(self) -> None:
        with self._lock:
            self._is_open = False

    def _add(self, worker: int, endpoint: str, replay_endpoint: str | None, topic: str, options: dict[str, Any]) -> None:
        if worker in self._connections:
            raise ArgumentError(f"worker: got {worker}, allowed: one that is not followed")
        if replay_endpoint is not None:
            self._open(zmq.DEALER, replay_endpoint, options).close()  # detects a malformed address now
        stream = WorkerStream(self._index, worker, replay_endpoint is not None)
        published = self._open(zmq.SUB, endpoint, options | {"subscribe": topic.encode(errors="surrogatepass")})
        try:
            monitor = published.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        except zmq.ZMQError as error:
            published.close()
            raise EndpointError(f"endpoint: got {shown(endpoint)}: {error}, allowed: {ALLOWED_ENDPOINTS}") from None
        for each in (published, monitor):
            self._poller.register(each, zmq.POLLIN)
        self._connections[worker] = Connection(stream, published, monitor, replay_endpoint, options)

    def _remove(self, worker: int) -> None:
        connection = self._connections.pop(worker, None)
        if connection is not None:
            self._end_replay(connection)
            connection.stream.forget()
            connection.published.disable_monitor()
            for each in (connection.published, connection.monitor):
                self._poller.unregister(each)
                each.close()

    def _open(self, kind: int, endpoint: str, options: dict[str, Any]) -> "zmq.Socket[bytes]":
        opened = None
        try:
            opened = self._context.socket(kind)
            for name, value in options.items():
                opened.set(getattr(zmq, name.upper()), value)
            opened.connect(endpoint)
        except (zmq.ZMQError, OSError, ValueError) as error:
            if opened is not None:
                opened.close()
            raise EndpointError(f"endpoint: got {shown(endpoint)}: {error}, allowed: {ALLOWED_ENDPOINTS}") from None
        return opened

    def _run(self) -> None:
        """Serve calls and workers until the subscriber is closed, or an unexpected error ends the thread."""
        try:
            while self._is_open:
                ready = self._wait()
                while not self._calls.empty():
                    run_call(*self._calls.get())
                now = time.monotonic()
                for worker, each in list(self._connections.items()):
                    if not self._is_open or self._connections.get(worker) is not each:  # closed by `on_report`
                        continue
                    is_due = now >= each.due_at or not ready.isdisjoint((each.monitor, each.replayed or each.published))
                    if is_due and self._serve(each) and each.stream.stats.is_complete:
                        self._report(worker)
        finally:
            self._end()
            while not self._calls.empty():
                self._calls.get()[1].set_exception(_closed())
            self._context.destroy()

    def _report(self, worker: int) -> None:
        if self._on_report is not None:
            try:
                self._on_report(worker)
            except Exception:  # a caller's error must not end the thread: the index would silently become stale
                logger.exception("on_report failed for worker %d", worker)

    def _wait(self) -> "set[zmq.Socket[bytes]]":
        """Wait for a call, a message, or the next due time. Return the sockets with messages."""
        due_at = min((each.due_at for each in self._connections.values()), default=math.inf)
        timeout = None if due_at == math.inf else math.ceil(1000 * max(0.0, due_at - time.monotonic()))
        ready = {socket for socket, _ in self._poller.poll(timeout)}
        has_read(self._woken)
        return ready

    def _serve(self, connection: Connection) -> bool:
        """Read some messages of a worker, ask for missing ones, and give up a replay that has stopped. Return whether there
        were any messages.
        """
        messages: list[list[bytes]] = []
        if connection.replayed is not None:
            self._read_replay(connection, connection.replayed)
        else:
            messages = list(read_some(connection.published))
        if has_changed(connection):  # read after the messages, since they may come from a new connection
            connection.stream.doubt()
        for *_, number, payload in messages:
            if connection.stream.wanted is None:
                connection.stream.receive(int.from_bytes(number, "big"), payload)
        now = time.monotonic()
        if connection.replayed is not None and now >= connection.asked_at + self._replay_seconds:
            self._end_replay(connection)
            ask_later(connection, now)
        wanted, endpoint = connection.stream.wanted, connection.replay_endpoint
        connection.due_at = math.inf
        if connection.replayed is None and wanted is not None and endpoint is not None:
            if now >= connection.ask_at:
                self._ask(connection, endpoint, wanted, now)
            connection.due_at = connection.ask_at
        if connection.replayed is not None:
            connection.due_at = connection.asked_at + self._replay_seconds
        return bool(messages)

    def _ask(self, connection: Connection, endpoint: str, first: int, now: float) -> None:
        """Request a replay of the batches from number `first` on."""
        try:
            connection.replayed = self._open(zmq.DEALER, endpoint, connection.options)
        except EndpointError:  # too many files are open at present
            ask_later(connection, now)
            return
        connection.replayed.send_multipart([b"", first.to_bytes(NUMBER_SIZE, "big")])
        connection.asked_at = now
        self._poller.unregister(connection.published)  # new batches wait in the socket meanwhile
        self._poller.register(connection.replayed, zmq.POLLIN)

    def _read_replay(self, connection: Connection, replayed: "zmq.Socket[bytes]") -> None:
        for *_, number, payload in read_some(replayed):
            connection.asked_at = time.monotonic()
            if int.from_bytes(number, "big") == END:
                connection.stream.end_replay()
                connection.retry_seconds = MIN_RETRY_SECONDS
                self._end_replay(connection)
                return
            connection.stream.replay(int.from_bytes(number, "big"), payload)

    def _end_replay(self, connection: Connection) -> None:
        if connection.replayed is not None:
            self._poller.unregister(connection.replayed)
            self._poller.register(connection.published, zmq.POLLIN)
            connection.replayed.close()
            connection.replayed = None


def ask_later(connection: Connection, now: float) -> None:
    connection.ask_at = now + connection.retry_seconds
    connection.retry_seconds = min(2 * connection.retry_seconds, MAX_RETRY_SECONDS)


def run_call(function: Callable[[], Any], future: "Future[Any]") -> None:
    """Call a function, and pass its result or error to the future."""
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


def has_read(socket: "zmq.Socket[bytes]") -> bool:
    """Read all waiting messages. Return whether there were any."""
    found = False
    with contextlib.suppress(zmq.Again):
        while True:
            socket.recv_multipart(zmq.DONTWAIT)
            found = True
    return found


def has_changed(connection: Connection) -> bool:
    """Read the monitor of a worker's connection. Return whether the connection was lost, or is not the first: a worker may be
    replaced twice before the next connection, and the first new worker may have answered the replay.
    """
    found = False
    with contextlib.suppress(zmq.Again):
        while True:
            event = recv_monitor_message(connection.monitor, zmq.DONTWAIT)["event"]
            found |= connection.was_connected or event == zmq.EVENT_DISCONNECTED
            connection.was_connected = True
    return found


def read_some(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """Yield waiting messages that end with a number and a payload; drop others."""
    with contextlib.suppress(zmq.Again):
        for _ in range(MAX_READ):
            frames = socket.recv_multipart(zmq.DONTWAIT)
            if 3 <= len(frames) <= MAX_FRAMES and len(frames[-2]) == NUMBER_SIZE:
                yield frames


def _closed() -> ArgumentError:
    return ArgumentError("subscriber: got one that is closed, allowed: an open one")
