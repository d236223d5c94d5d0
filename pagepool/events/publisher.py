"""Publishes events to routers over ZeroMQ in the protocol of vLLM 0.33, with replay for subscribers that missed some.

`EventPublisher` works in its own thread. Needs the extra ``pagepool[events]``.

A batch is published as three frames: topic, sequence number (8 bytes, big-endian), and the result of
`pagepool.events.encode_batch`. A router that sees a gap in the numbers sends the first missing number to the replay endpoint
from a DEALER or REQ socket, after an empty frame. It then receives each batch from there on as an empty frame and the three
above, and at the end an empty batch with the number -1. As an extension to vLLM, a request for a batch no longer kept, an
unknown batch, or -1 is answered first with a snapshot: a batch with `AllBlocksCleared` and all cached pages, numbered so that
the router can continue from it.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pagepool.arguments import as_list, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError, shown
from pagepool.events.connections import DEFAULT_ENDPOINT, ZAP_DOMAIN, Guard, Peers, set_options
from pagepool.events.messages import AllBlocksCleared, Event, EventBatch, encode_batch, require_seconds
from pagepool.events.source import EventSource

__all__ = ["EventPublisher"]

logger = logging.getLogger(__name__)

MAX_INT32 = 2**31 - 1  # largest value of ZeroMQ's options
REQUEST = [0, 8]  # lengths of the frames of a request
END = (-1).to_bytes(8, "big", signed=True)
SUBSCRIPTIONS_HWM = 4  # messages queued in libzmq per subscriber; each send accepts all of them
MAX_REQUESTS_READ = 64  # limit of one call
MAX_REPLAYS = 4  # limit for one router at once
MAX_REPLAYS_TRIED = 32  # limit of one call, until a router accepts something
REPLAY_HWM = 16  # batches queued in the socket per router
PATIENCE = 10.0  # seconds; a router that does not read its replay for this time is disconnected
SECONDS_UNREAD = 30.0  # a subscriber that reads nothing for this time is disconnected
SHARE_OF_SERVICE = 0.1  # share of the thread's time for requests of routers
MIN_REST = 0.002  # seconds between two parts of replays
INTERVAL = 0.05  # seconds between two looks for the manager's events
MAX_WAIT = 3600.0  # seconds
MAX_SILENCE = 60.0  # seconds between two heartbeats
SECONDS_TO_CLOSE = 1.0
NUM_KEY_BYTES = 32
Batch = tuple[int, zmq.Frame]
"""Sequence number and payload."""
Curve = tuple[bytes, frozenset[bytes]]
"""A publisher's secret key, and the public keys of its permitted routers, each as Z85."""


@dataclass(eq=False, repr=False)
class Worker:
    """The thread of a publisher, with its sockets. No other thread uses the sockets, except in `wake`."""

    source: EventSource | None
    endpoint: object
    replay_endpoint: object
    curve: Curve | None
    topic: bytes
    buffer_steps: int
    hwm: int
    data_parallel_rank: int
    heartbeat: float
    max_connections: int

    def __post_init__(self) -> None:
        """Open the sockets and start the thread, or do neither. Raise EndpointError for an unusable address."""
        self.queue: queue.Queue[tuple[zmq.Frame, bool]] = queue.Queue(self.hwm)
        self.batches: deque[Batch] = deque(maxlen=self.buffer_steps)
        self.next_sequence = 0
        self._start: Batch | None = None  # last self-contained batch, or a later snapshot
        self.replays: deque[tuple[bytes, Iterator[bool]]] = deque()
        self._take_at = -math.inf if self.source else math.inf
        self._serve_at = -math.inf
        self._is_asked = False
        self._beat_at = math.inf
        self._silence = self.heartbeat
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.run, name="pagepool-events", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.guard = Guard(self.max_connections)
        self.authenticator: ThreadAuthenticator | None = None
        self.replayed: Peers | None = None
        try:
            self._open()
            if self.source is not None:
                self.source.start_over()
                WORKERS[id(self.source)] = self
            WORKERS[id(self)] = self
            self._thread.start()
        except BaseException:
            self._is_closing = True
            self._close_sockets(0.0)
            raise

    def _open(self) -> None:
        curve, self.curve = self.curve, None  # no object of this package keeps the secret key
        if curve is not None:  # without this check, CURVE admits every router with the server's public key
            authenticator = ThreadAuthenticator(self._context)
            allowed = SimpleNamespace(callback=lambda domain, key, keys=curve[1]: key in keys)
            authenticator.configure_curve_callback(ZAP_DOMAIN, allowed)
            authenticator.start()
            self.authenticator = authenticator
        publishing = self._context.socket(zmq.XPUB)
        publishing.sndhwm, publishing.rcvhwm = self.hwm, SUBSCRIPTIONS_HWM
        publishing.setsockopt(zmq.XPUB_VERBOSER, 1)
        publishing.setsockopt(zmq.TCP_MAXRT, int(1000 * SECONDS_UNREAD))
        self.published = self._attach(publishing, "endpoint", self.endpoint, curve)
        if self.replay_endpoint is not None:
            replaying = self._context.socket(zmq.ROUTER)
            replaying.sndhwm, replaying.rcvhwm = REPLAY_HWM, MAX_REQUESTS_READ
            replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)
            replaying.setsockopt(zmq.TCP_MAXRT, int(1000 * PATIENCE))
            self.replayed = self._attach(replaying, "replay_endpoint", self.replay_endpoint, curve)
        self._waking, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://wake")
        self._waking.connect("inproc://wake")
        self.guard.thread.start()

    def _attach(self, socket: "zmq.Socket[bytes]", name: str, endpoint: object, curve: Curve | None) -> Peers:
        """Listen at an address, and return the connections."""
        if not isinstance(endpoint, str):
            raise ArgumentTypeError(f"{name}: got {type(endpoint).__name__}, allowed: a string such as {DEFAULT_ENDPOINT!r}")
        set_options(socket, endpoint)
        if curve is not None:
            if not endpoint.startswith(("tcp:", "ipc:")):  # over other transports ZeroMQ would not encrypt
                raise EndpointError(f"{name}: got {endpoint!r} with keys, allowed: tcp or ipc, such as {DEFAULT_ENDPOINT!r}")
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve[0])
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if the authenticator is missing, refuse all connections
        return self.guard.watch(socket, name, endpoint)

    def _close_sockets(self, linger_seconds: float) -> None:
        """Close all sockets once pending messages are sent, or after `linger_seconds`."""
        if self.authenticator is not None:
            self.authenticator.stop()
        self.guard.stop()
        self._context.destroy(linger=int(1000 * linger_seconds))

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a forked process, since it lacks the thread."""
        return not self._is_closing and self._pid == os.getpid()

    def require_open(self) -> None:
        """Raise ArgumentError if the publisher is not open."""
        if not self.is_open:
            raise ArgumentError("publisher: got one that is closed, or belongs to another process, allowed: an open one")

    def wake(self) -> None:
        """Wake the thread to look for work."""
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):  # a wake-up is pending, or the thread has ended
            self._waking.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        """Publish pending events and end the thread."""
        if self.is_open:
            self._is_closing = True
            self.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join(2 * SECONDS_TO_CLOSE)

    def encode(self, events: Sequence[Event]) -> tuple["zmq.Frame", bool]:
        """Return the payload, in libzmq's memory shared by all routers, and whether it is self-contained."""
        payload = encode_batch(EventBatch(time.time(), events, self.data_parallel_rank))
        with memoryview(payload) as view:  # release the view, or the frame would keep the payload too
            return zmq.Frame(view, copy=True), bool(events) and isinstance(events[0], AllBlocksCleared)

    # Methods that run in the thread.

    def run(self) -> None:
        """Publish and replay until the publisher is closed."""
        while not self._is_closing:
            for work in (self._wait, self._publish_all, self._serve):
                self._do(work)
        self._do(self._publish_all)
        with self._wake_lock:
            self._close_sockets(SECONDS_TO_CLOSE)

    def _do(self, work: Any) -> None:
        """Call `work`. The thread survives any error, and lets a snapshot replace the events taken before the error."""
        try:
            work()
        except Exception:
            logger.exception("events were not sent; a snapshot follows")
            if self.source is not None:
                self.source.start_over()
            time.sleep(0.1)

    def _wait(self) -> None:
        """Wait until the engine wakes the thread, a router sends a request, or work is due."""
        now = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        due_at = min(self._take_at, self._beat_at, now + MAX_WAIT)
        if now < self._serve_at:
            due_at = min(due_at, self._serve_at)
        else:
            for peers in filter(None, (self.published, self.replayed)):
                poller.register(peers.watched, zmq.POLLIN)
            if self.replays:
                due_at = now
        ready = dict(poller.poll(math.ceil(1000 * max(0.0, due_at - now))))
        self._is_asked = bool(ready.keys() - {self._woken})
        with contextlib.suppress(zmq.Again):
            while True:
                self._woken.recv(zmq.DONTWAIT)
                self._take_at = min(self._take_at, now if self.source else math.inf)

    def _publish_all(self) -> None:
        if self.source is not None and (time.monotonic() >= self._take_at or self._is_closing):
            self._take_at = time.monotonic() + INTERVAL
            if events := self.source.take():
                self._publish(*self.encode(events))
        while not self.queue.empty():
            self._publish(*self.queue.get())
        if time.monotonic() >= self._beat_at:
            self._beat()

    def _beat(self) -> None:
        """Publish a batch without events, at growing intervals, so that routers see lost batches."""
        silence = min(2 * self._silence, max(self._silence, MAX_SILENCE))
        self._publish(*self.encode([]))
        self._silence, self._beat_at = silence, time.monotonic() + silence

    def _publish(self, payload: "zmq.Frame", is_start: bool) -> None:
        batch = (self.next_sequence, payload)
        self.batches.append(batch)
        self.next_sequence += 1
        if is_start:
            self._start = batch
        self.published.watched.send_multipart([self.topic, batch[0].to_bytes(8, "big"), payload])
        self.guard.read_subscriptions(self.published)  # each send lets libzmq accept some subscriptions
        self._silence = self.heartbeat
        self._beat_at = time.monotonic() + self._silence

    def _serve(self) -> None:
        """Serve subscriptions and a part of one replay, in a bounded share of the thread's time."""
        start = time.monotonic()
        if start < self._serve_at or not (self._is_asked or self.replays):
            return
        self.guard.read_subscriptions(self.published)
        if self.replayed is not None:
            self._accept(self.replayed)
            self._replay_some()
        now = time.monotonic()
        self._serve_at = now + max(MIN_REST if self.replays else 0.0, (now - start) / SHARE_OF_SERVICE)

    def _accept(self, peers: Peers) -> None:
        """Read all requests of routers. While requests are unread, libzmq does not notice that their router is gone."""
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_REQUESTS_READ):
                client, *request = peers.watched.recv_multipart(zmq.DONTWAIT, copy=False)
                descriptor, peer = peers.find(client)
                peer.note_read(request)
                peer.client = peer.client or client.bytes
                if [len(frame) for frame in request] != REQUEST or (peer.is_refused and peer.client == client.bytes):
                    continue
                others = [replay for replay in self.replays if replay[0] != client.bytes]
                if len(self.replays) - len(others) < MAX_REPLAYS:
                    sequence = int.from_bytes(request[1].bytes, "big")
                    self.replays.append((client.bytes, self._replay(peers, client.bytes, descriptor, sequence)))
                else:  # a router with too many replays loses them all
                    self.replays = deque(others)
                    self.guard.close(peers, descriptor)

    def _replay_some(self) -> None:
        """Send to the first router that accepts something."""
        for _ in range(min(len(self.replays), MAX_REPLAYS_TRIED)):
            client, replay = self.replays.popleft()
            has_sent = next(replay, None)
            if has_sent is not None:
                self.replays.append((client, replay))
            if has_sent is not False:
                return

    def _replay(self, peers: Peers, client: bytes, descriptor: int, sequence: int) -> Iterator[bool]:
        """Send a replay at the router's pace: send up to `REPLAY_HWM` messages, or until it accepts no more, then yield whether
        any was sent. Disconnect a router that does not read.
        """
        num_sent, give_up_at = 0, time.monotonic() + PATIENCE
        for message in self._list_messages(client, sequence):
            is_sent = False
            while not is_sent:
                try:
                    peers.watched.send_multipart(message, zmq.DONTWAIT)
                    is_sent, num_sent, give_up_at = True, num_sent + 1, time.monotonic() + PATIENCE
                except zmq.Again:
                    if time.monotonic() >= give_up_at:
                        return self.guard.close(peers, descriptor)
                except zmq.ZMQError:
                    return  # the router is gone
                if not is_sent or num_sent == REPLAY_HWM:
                    yield num_sent > 0
                    num_sent = 0

    def _list_messages(self, client: bytes, sequence: int) -> Iterator[list[Any]]:
        """Yield batches from `sequence` on, or from a self-contained one, up to the latest; then the end marker.

        Batches are looked up when sent, so a slow router keeps none in memory.
        """
        stop = self.next_sequence
        while sequence != stop:
            place = sequence - self.next_sequence + len(self.batches)
            batch = self.batches[place] if 0 <= place < len(self.batches) else self._find_start()
            if batch is None:
                break
            sequence, payload = batch
            yield [client, b"", self.topic, sequence.to_bytes(8, "big"), payload]
            sequence += 1
            stop = max(stop, sequence)
        yield [client, b"", b"", END, b""]

    def _find_start(self) -> Batch | None:
        """Return a self-contained batch whose successors are all kept; without a manager, the first batch kept."""
        num_behind = math.inf if self._start is None else self.next_sequence - 1 - self._start[0]
        if num_behind <= len(self.batches):
            return self._start
        if self.source is None or self.next_sequence == 0:
            return next(iter(self.batches), None)
        events, snapshot = self.source.take_with_snapshot()
        if events:
            self._publish(*self.encode(events))
        self._start = (self.next_sequence - 1, self.encode(snapshot)[0])
        return self._start


WORKERS: "weakref.WeakValueDictionary[int, Worker]" = weakref.WeakValueDictionary()
"""Workers by id, and the latest worker of each source of events by the source's id."""


def _forget_workers() -> None:
    """Close the connections in a forked process. Nothing else may be used there, not even by the garbage collector."""
    for worker in WORKERS.values():
        if worker.authenticator is not None:
            worker.authenticator.pipe = None  # type: ignore[assignment]  # else its finalizer sends over the pipe, and hangs
        worker.guard.forget()
    WORKERS.clear()


os.register_at_fork(after_in_child=_forget_workers)


class HasEvents(Protocol):
    """A `CacheManager` with events enabled."""

    @property
    def event_source(self) -> EventSource:
        """The source of the manager's events."""


class EventPublisher(contextlib.AbstractContextManager["EventPublisher"]):
    """Publisher of a manager's events, and of events passed to `publish`, in its own thread.

    The thread takes the manager's events every 50 milliseconds and at `flush`; nothing else may take them. A slow router
    misses batches beyond `hwm` and requests them at `replay_endpoint`. The last `buffer_steps` batches are kept; a router that
    asks for an older one gets a snapshot of the cache. The first batch is a snapshot too. After `heartbeat` seconds without a
    batch, and then at doubling intervals up to a minute, the thread sends a batch without events: its number shows the gap to a
    router that missed the last batches, and other routers ignore it.

    Routers cannot exhaust memory or descriptors. An endpoint has at most `max_connections`, and at most an eighth of the
    process's descriptors. The topics of a subscriber take at most 8 KiB, each counted as its length plus 64 bytes. A
    connection beyond these limits is closed, as is one that takes 5 seconds for its handshake, leaves messages unread for 30
    seconds (replays for 10), requests more than 4 replays at once, or sends 64 KiB without ending a message. Routers reconnect
    by themselves. They need ZMTP 3 (libzmq 4.0 or later).

    In a forked process `publish` and `flush` raise, `close` does nothing, and the copied connections are closed.

    Events contain the tokens of all prompts, so the default `endpoint` is on loopback; ``tcp://*:5557`` is every interface. For
    routers on other machines, use keys. With `curve_secretkey`, made by ``zmq.curve_keypair()``, both endpoints encrypt, and
    only routers with a public key in `curve_client_keys` receive anything. A router sets pyzmq's ``curve_serverkey``,
    ``curve_publickey`` and ``curve_secretkey`` before it connects. Examples are in ``docs/routers.md``.
    """

    def __init__(
        self,
        manager: HasEvents | None = None,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_steps: int = 1000,
        hwm: int = 1000,
        data_parallel_rank: int = 0,
        heartbeat: float | None = 1.0,
        max_connections: int = 32,
        curve_secretkey: str | bytes | None = None,
        curve_client_keys: Iterable[str | bytes] | None = None,
    ) -> None:
        """Start the thread. Without a `manager` only events passed to `publish` are sent.

        `endpoint` is the address to listen at; port ``*`` is any free port.
        Routers may subscribe to a `topic`. With `heartbeat` None there is no heartbeat. The attributes ``endpoint`` and
        ``replay_endpoint`` are the addresses with their ports. Raise EndpointError, an OSError, if an address is malformed or
        its port taken; ArgumentError for values out of range, a secret key without client keys or the reverse, invalid keys,
        keys without CURVE in libzmq, and a manager without events or with another publisher.
        """
        source = None if manager is None else getattr(manager, "event_source", None)
        if manager is not None and not isinstance(source, EventSource):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager or None")
        other = WORKERS.get(id(source))
        if other is not None and other.is_open:
            raise ArgumentError("manager: got one whose events another publisher takes, allowed: others")
        if not isinstance(topic, str):
            raise ArgumentTypeError(f"topic: got {type(topic).__name__}, allowed: a string")
        self._worker = Worker(
            source,
            endpoint,
            replay_endpoint,
            _as_curve(curve_secretkey, curve_client_keys),
            topic.encode("utf-8", "backslashreplace"),
            require_int("buffer_steps", buffer_steps, 1, MAX_INT32),
            require_int("hwm", hwm, 1, MAX_INT32),
            require_int("data_parallel_rank", data_parallel_rank, 0, MAX_INT32),
            math.inf if heartbeat is None else _as_seconds("heartbeat", heartbeat),
            require_int("max_connections", max_connections, 1, MAX_INT32),
        )
        self.endpoint = self._worker.published.endpoint
        self.replay_endpoint = self._worker.replayed and self._worker.replayed.endpoint
        self._close = weakref.finalize(self, self._worker.close)

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch of events, with or without a manager. Wait while `hwm` batches are queued.

        Raise ArgumentTypeError for other objects than events, ArgumentError if the publisher is closed.
        """
        encoded = self._worker.encode(as_list("events", events, "a list"))
        while True:
            self._worker.require_open()
            with contextlib.suppress(queue.Full):
                self._worker.queue.put(encoded, timeout=0.1)
                return self._worker.wake()

    def flush(self) -> None:
        """Let the thread take and send the manager's events now; do not wait for it. Raise ArgumentError if it is closed."""
        self._worker.require_open()
        self._worker.wake()

    def close(self) -> None:
        """Send pending events and stop; slow routers delay this by at most two seconds. No effect if closed already."""
        self._close()

    def __exit__(self, *_: object) -> None:
        """Call `close`."""
        self.close()


def _as_seconds(name: str, value: float) -> float:
    if not 0 < require_seconds(name, value) < math.inf:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: more than 0 seconds")
    return float(min(value, MAX_WAIT))


def _as_curve(secret_key: object, client_keys: Any) -> Curve | None:
    """Require both keys or neither: without client keys any router with the server's public key could connect."""
    if secret_key is None and client_keys is None:
        return None
    if secret_key is None or client_keys is None:
        raise ArgumentError("curve_secretkey, curve_client_keys: got one of them, allowed: both or neither")
    if not zmq.has("curve"):
        raise ArgumentError("curve_secretkey: got a key, allowed: None, since this libzmq was built without CURVE")
    if isinstance(client_keys, str | bytes) or not isinstance(client_keys, Iterable):
        raise ArgumentTypeError(f"curve_client_keys: got {type(client_keys).__name__}, allowed: a list of keys")
    keys = frozenset(as_key("curve_client_keys", key) for key in client_keys)
    if not keys:
        raise ArgumentError("curve_client_keys: got none, allowed: at least one key")
    return as_key("curve_secretkey", secret_key), keys


def as_key(name: str, key: object) -> bytes:
    """Return a key as Z85. Error messages omit it, since it may be the secret key."""
    if not isinstance(key, str | bytes):
        raise ArgumentTypeError(f"{name}: got {type(key).__name__}, allowed: 40 characters of Z85")
    try:
        decoded = z85.decode(key)
    except (ValueError, KeyError, struct.error):
        decoded = b""
    if len(decoded) != NUM_KEY_BYTES:
        raise ArgumentError(f"{name}: got {len(key)} characters, allowed: 40 of Z85, as zmq.curve_keypair makes them")
    return z85.encode(decoded)
