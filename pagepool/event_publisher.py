"""Sends events to routers over ZeroMQ as vLLM 0.33 does: published as they come, with replay for subscribers that missed some.

`EventPublisher` does it in a thread of its own. Needs the extra ``pagepool[events]``.

A batch is published as three frames: topic, sequence number (8 bytes, big-endian), and what `pagepool.events.encode_batch`
makes. A router that sees a gap in the numbers sends the first one that it lacks to the replay endpoint, as a DEALER or REQ
socket does, behind an empty frame; each batch from there on comes as an empty frame and the three above, and at the end one
with the number -1 and nothing in it. Beyond vLLM: a request for a batch that is kept no more, for one that there never was, or
for -1, is answered first with a batch that begins with `AllBlocksCleared` and has all that is cached, under the number from
which to go on.
"""

import contextlib
import logging
import math
import os
import queue
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, shown
from pagepool.event_replay import Batch, History, Replay
from pagepool.events import AllBlocksCleared, Event, EventBatch, EventSource, encode_batch
from pagepool.manager import CacheManager
from pagepool.specs import require_int

__all__ = ["EventPublisher"]

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
MAX_PORT = 65535
MAX_INT32 = 2**31 - 1  # of ZeroMQ's options
MAX_REQUEST_BYTES = 4096  # of what routers send: sequence numbers, and the topics that they want
MAX_REPLAYS = 16  # at once; other routers wait
REPLAY_HWM = 64  # batches that wait in the socket for one router
SHARE_OF_REPLAYS = 0.1  # of the thread's time
MIN_REST = 0.002  # seconds between two parts of replays
MAX_WAIT = 3600.0  # seconds
SECONDS_TO_CLOSE = 1.0
NUM_KEY_BYTES = 32
ZAP_DOMAIN = "pagepool"


class Curve(NamedTuple):
    """A publisher's secret key, and the public keys of the routers that may connect; each as Z85."""

    secret_key: bytes
    client_keys: frozenset[bytes]

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a router may connect: pyzmq's authenticator asks."""
        return key in self.client_keys

    def protect(self, socket: "zmq.Socket[bytes]", name: str, endpoint: str) -> None:
        """Have a socket encrypt, and admit those routers only; none where the authenticator is gone. EndpointError for an
        address over which ZeroMQ would send in the clear.
        """
        if not endpoint.startswith(("tcp:", "ipc:")):
            raise EndpointError(f"{name}: got {endpoint!r} with keys, allowed: tcp or ipc, such as {DEFAULT_ENDPOINT!r}")
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Sockets(NamedTuple):
    """Those of one publisher, which its thread alone uses but for `wake`."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    authenticator: ThreadAuthenticator | None
    published: "zmq.Socket[bytes]"
    replayed: "zmq.Socket[bytes] | None"
    wake: "zmq.Socket[bytes]"
    woken: "zmq.Socket[bytes]"


def _open_sockets(endpoint: str, replay_endpoint: str | None, hwm: int, is_connecting: bool, curve: Curve | None) -> Sockets:
    """All of them, or EndpointError and none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = None
    try:
        if curve is not None:
            authenticator = _start_authenticator(context, curve)
        published = context.socket(zmq.PUB)
        published.set_hwm(hwm)
        _attach(published, "endpoint", endpoint, is_connecting, curve)
        replayed = None
        if replay_endpoint is not None:
            replayed = context.socket(zmq.ROUTER)
            replayed.set_hwm(REPLAY_HWM)
            replayed.setsockopt(zmq.ROUTER_MANDATORY, 1)
            _attach(replayed, "replay_endpoint", replay_endpoint, False, curve)
        wake, woken = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        woken.bind("inproc://wake")
        wake.connect("inproc://wake")
    except BaseException:
        _close_sockets(context, authenticator, 0.0)
        raise
    return Sockets(context, authenticator, published, replayed, wake, woken)


def _close_sockets(context: "zmq.Context[Any]", authenticator: ThreadAuthenticator | None, linger_seconds: float) -> None:
    if authenticator is not None:
        authenticator.stop()
    context.destroy(linger=int(1000 * linger_seconds))


def _start_authenticator(context: "zmq.Context[Any]", curve: Curve) -> ThreadAuthenticator:
    """Let it answer which routers may connect; without it a socket with CURVE admits all that know the server's public key."""
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(ZAP_DOMAIN, curve)
    authenticator.start()
    return authenticator


def _attach(socket: "zmq.Socket[bytes]", name: str, endpoint: object, is_connecting: bool, curve: Curve | None) -> None:
    """Listen at an address, or connect to it."""
    if not isinstance(endpoint, str):
        raise ArgumentTypeError(f"{name}: got {type(endpoint).__name__}, allowed: a string such as {DEFAULT_ENDPOINT!r}")
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    if curve is not None:
        curve.protect(socket, name, endpoint)
    port = endpoint.rpartition(":")[2] if endpoint.startswith("tcp:") else ""
    try:
        if port.isdecimal() and int(port.lstrip("0")[:6] or 0) > MAX_PORT:  # which would be another one modulo 2**16
            raise zmq.ZMQError(zmq.EINVAL)
        socket.connect(endpoint) if is_connecting else socket.bind(endpoint)
    except (zmq.ZMQError, UnicodeError) as error:
        is_in_use = isinstance(error, zmq.ZMQError) and error.errno == zmq.EADDRINUSE
        reason = "the port is in use" if is_in_use else str(error)
        raise EndpointError(f"{name}: got {endpoint!r}: {reason}; allowed: a free one, such as {DEFAULT_ENDPOINT!r}") from None


class Options(NamedTuple):
    """The options of a publisher, besides addresses and keys."""

    topic: bytes
    interval: float
    buffer_steps: int
    hwm: int
    data_parallel_rank: int


class Worker:
    """The thread of a publisher, and what it works with."""

    def __init__(self, source: EventSource | None, sockets: Sockets, options: Options) -> None:
        """Starts the thread."""
        self.sockets = sockets
        self.queue: queue.Queue[tuple[bytes, bool]] = queue.Queue(options.hwm)
        self._source = source
        self._options = options
        self._history = History(options.buffer_steps)
        self._replays: deque[Replay] = deque()
        self._take_at = -math.inf if source else math.inf
        self._replay_at = -math.inf
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.run, name="pagepool-events", daemon=True)
        if source is not None:
            source.start_over()
        try:
            self._thread.start()
        except BaseException:
            _close_sockets(sockets.context, sockets.authenticator, 0.0)
            raise

    @property
    def is_open(self) -> bool:
        """False once it is closed, and in a process that was forked, where the thread is not."""
        return not self._is_closing and self._pid == os.getpid()

    def require_open(self) -> None:
        """ArgumentError where it is not."""
        if not self.is_open:
            raise ArgumentError("the publisher is closed, or another process's")

    def wake(self) -> None:
        """Have the thread look for work."""
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # it has been woken often enough, or is at its end
            self.sockets.wake.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        """Publish what there is, and end."""
        if self.is_open:
            self._is_closing = True
            self.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(2 * SECONDS_TO_CLOSE)

    # In the thread.

    def run(self) -> None:
        """Publish and replay until it is closed."""
        while not self._is_closing:
            self._do(self._wait)
            self._do(self._publish_all)
            self._do(self._replay_some)
        self._do(self._publish_all)
        with self._wake_lock:
            _close_sockets(self.sockets.context, self.sockets.authenticator, SECONDS_TO_CLOSE)

    def _do(self, work: Any) -> None:
        """The thread goes on after any error. Events that were taken by then are sent anew, as a snapshot."""
        try:
            work()
        except Exception:
            logger.exception("events were not sent; routers are told anew")
            if self._source is not None:
                self._source.start_over()
            time.sleep(0.1)

    def _wait(self) -> None:
        """Until the engine wakes the thread, a router asks, or something is due."""
        now = time.monotonic()
        poller = zmq.Poller()
        poller.register(self.sockets.woken, zmq.POLLIN)
        due_at = min(self._take_at, now + MAX_WAIT)
        if self.sockets.replayed is not None:
            if self._replays or now < self._replay_at:
                due_at = min(due_at, self._replay_at)
            else:
                poller.register(self.sockets.replayed, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, due_at - now)))
        with contextlib.suppress(zmq.Again):
            while True:
                self.sockets.woken.recv(zmq.DONTWAIT)
                self._take_at = min(self._take_at, now if self._source else math.inf)

    def _publish_all(self) -> None:
        """What the manager's journal has, and what was handed over."""
        if self._source is not None and (time.monotonic() >= self._take_at or self._is_closing):
            self._take_at = time.monotonic() + self._options.interval
            self._publish_events(self._source.take())
        while not self.queue.empty():
            self._publish(*self.queue.get())

    def _publish_events(self, events: Sequence[Event]) -> None:
        if events:
            self._publish(*encode(events, self._options.data_parallel_rank))

    def _publish(self, payload: bytes, is_start: bool) -> None:
        sequence = self._history.add(payload, is_start)
        self.sockets.published.send_multipart([self._options.topic, sequence.to_bytes(8, "big"), payload])

    def _replay_some(self) -> None:
        """A part of one replay, so that no router holds up publishing, nor takes more than a share of our time."""
        start = time.monotonic()
        if self.sockets.replayed is None or start < self._replay_at:
            return
        if len(self._replays) < MAX_REPLAYS:
            self._accept(self.sockets.replayed)
        if self._replays:
            replay = self._replays.popleft()
            if replay.send(self.sockets.replayed, REPLAY_HWM):
                self._replays.append(replay)
        now = time.monotonic()
        self._replay_at = now + max(MIN_REST, (now - start) / SHARE_OF_REPLAYS)

    def _accept(self, socket: "zmq.Socket[bytes]") -> None:
        """Begin a replay if a router asks for one in the right format."""
        try:
            frames = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.ZMQError:
            return
        if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
            batches = self._find_batches(int.from_bytes(frames[2], "big"))
            self._replays.append(Replay(frames[0], self._options.topic, batches))

    def _find_batches(self, sequence: int) -> list[Batch]:
        """From `sequence` on, or from one that needs none before it."""
        batches = self._history.list_from(sequence)
        if batches is None:
            batches = self._history.list_from_start()
        if batches is None and self._source is not None and self._history.next_sequence:
            events, snapshot = self._source.take_with_snapshot()
            self._publish_events(events)
            self._history.set_start(encode(snapshot, self._options.data_parallel_rank)[0])
            batches = self._history.list_from_start()
        return self._history.list_all() if batches is None else batches


def encode(events: Sequence[Event], data_parallel_rank: int) -> tuple[bytes, bool]:
    """The payload, and whether it needs none before it."""
    is_start = bool(events) and isinstance(events[0], AllBlocksCleared)
    return encode_batch(EventBatch(time.time(), events, data_parallel_rank)), is_start


WORKERS: "weakref.WeakKeyDictionary[EventSource, Worker]" = weakref.WeakKeyDictionary()
"""The worker that takes the events of a manager."""


class EventPublisher:
    """Publishes the events of a manager, or those that are handed to it, in a thread of its own.

    The thread takes the manager's events every `interval` seconds, and at `flush`; nothing else may take them. The engine's
    threads do nothing, and memory is bounded, whatever routers do: a slow one misses batches beyond `hwm`, and asks for them at
    `replay_endpoint`, where the last `buffer_steps` are kept, and all that is cached for a router that asks later still. The
    first batch has all that is cached already.

    Events have the tokens of all prompts, so the publisher listens on loopback unless `endpoint` says otherwise;
    ``tcp://*:5557`` is every interface. Where routers are on other machines, give it keys: with `curve_secretkey`, its own from
    ``zmq.curve_keypair()``, both endpoints encrypt, and only routers with one of the public keys `curve_client_keys` receive
    anything. A router sets pyzmq's ``curve_serverkey``, ``curve_publickey`` and ``curve_secretkey`` before it connects.

    >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> manager.enable_events()
    >>> with EventPublisher(manager, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
    ...     publisher.endpoint.startswith("tcp://127.0.0.1:")
    True
    """

    def __init__(
        self,
        manager: CacheManager | None = None,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        interval: float = 0.05,
        buffer_steps: int = 1000,
        hwm: int = 1000,
        data_parallel_rank: int = 0,
        is_connecting: bool = False,
        curve_secretkey: str | bytes | None = None,
        curve_client_keys: Iterable[str | bytes] | None = None,
    ) -> None:
        """Without a `manager` only what `publish` is given is sent. `endpoint` is where to listen, or, if `is_connecting`,
        where a router does; port ``*`` is one that is free. Routers that want one `topic` only subscribe to it.

        ``endpoint`` and ``replay_endpoint`` then are the addresses with their ports. EndpointError, an OSError, where a port is
        in use or an address none; ArgumentError for values out of range, one of secret key and client keys without the other,
        keys that are none or that this libzmq cannot use, and a manager without events or that has a publisher.
        """
        if manager is not None and not isinstance(manager, CacheManager):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager or None")
        source = None if manager is None else manager.require_event_source()
        other = None if source is None else WORKERS.get(source)
        if other is not None and other.is_open:
            raise ArgumentError("manager: got one whose events another publisher takes")
        options = Options(
            _as_topic(topic),
            _as_seconds("interval", interval),
            require_int("buffer_steps", buffer_steps, 1, MAX_INT32),
            require_int("hwm", hwm, 1, MAX_INT32),
            require_int("data_parallel_rank", data_parallel_rank, 0, MAX_INT32),
        )
        curve = _as_curve(curve_secretkey, curve_client_keys)
        sockets = _open_sockets(endpoint, replay_endpoint, options.hwm, is_connecting, curve)
        self.endpoint = sockets.published.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = sockets.replayed and sockets.replayed.getsockopt_string(zmq.LAST_ENDPOINT)
        self._data_parallel_rank = options.data_parallel_rank
        self._worker = Worker(source, sockets, options)
        self._close = weakref.finalize(self, self._worker.close)
        if source is not None:
            WORKERS[source] = self._worker

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch of events as they are, without a manager or beside it. Encodes them, and waits while `hwm` batches wait
        to be sent. ArgumentTypeError for something else, ArgumentError once it is closed.
        """
        try:
            listed = list(events)
        except TypeError:
            raise ArgumentTypeError(f"events: got {type(events).__name__}, allowed: a list") from None
        encoded = encode(listed, self._data_parallel_rank)
        while True:
            self._worker.require_open()
            with contextlib.suppress(queue.Full):
                self._worker.queue.put(encoded, timeout=0.1)
                return self._worker.wake()

    def flush(self) -> None:
        """Have the manager's events taken and sent now; does not wait for it. 2 us. ArgumentError once it is closed."""
        self._worker.require_open()
        self._worker.wake()

    def close(self) -> None:
        """Send what there is, and end. Takes up to two seconds where a router reads slowly; does nothing the second time."""
        self._close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """`close`."""
        self.close()


def _as_topic(topic: object) -> bytes:
    if not isinstance(topic, str):
        raise ArgumentTypeError(f"topic: got {type(topic).__name__}, allowed: a string")
    return topic.encode("utf-8", "backslashreplace")


def _as_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: a number of seconds")
    if not 0 < value < math.inf:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: more than 0 seconds")
    return float(min(value, MAX_WAIT))


def _as_curve(secret_key: object, client_keys: Any) -> Curve | None:
    """Both or neither: without client keys, all routers that know the public key could connect, and it is no secret."""
    if secret_key is None and client_keys is None:
        return None
    if secret_key is None or client_keys is None:
        raise ArgumentError("curve_secretkey, curve_client_keys: got one of them, allowed: both or neither")
    if not zmq.has("curve"):
        raise ArgumentError("curve_secretkey: got a key, allowed: None, since this libzmq was built without CURVE")
    if isinstance(client_keys, str | bytes) or not isinstance(client_keys, Iterable):
        raise ArgumentTypeError(f"curve_client_keys: got {type(client_keys).__name__}, allowed: a list of keys")
    keys = frozenset(_as_key("curve_client_keys", key) for key in client_keys)
    if not keys:
        raise ArgumentError("curve_client_keys: got none, allowed: at least one key")
    return Curve(_as_key("curve_secretkey", secret_key), keys)


def _as_key(name: str, key: object) -> bytes:
    """A key as Z85. No error has it in its message: it may be the secret one."""
    if not isinstance(key, str | bytes):
        raise ArgumentTypeError(f"{name}: got {type(key).__name__}, allowed: 40 characters of Z85")
    try:
        decoded = z85.decode(key)
    except (ValueError, KeyError, struct.error):
        decoded = b""
    if len(decoded) != NUM_KEY_BYTES:
        raise ArgumentError(f"{name}: got {len(key)} characters, allowed: 40 of Z85, as zmq.curve_keypair makes them")
    return z85.encode(decoded)
