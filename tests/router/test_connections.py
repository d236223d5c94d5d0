"""Routers that connect to a publisher cost it little memory, few descriptors and little time, whatever they send or leave
unread.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from random import Random

import pytest

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="events are an extra: pyzmq is not installed")

from publisher_process import MEBIBYTE, PublisherProcess  # noqa: E402
from raw_router import connect, is_closed, message, send_until_closed, shake_hands  # noqa: E402
from sources import UNSANITIZED  # noqa: E402
from subscribers import ALLOWED, CURVE, END, LOOPBACK, Subscriber, number_of, publish_some, subscribed, wait_until  # noqa: E402
from zmq.utils.monitor import recv_monitor_message  # noqa: E402

from pagepool.errors import EndpointError  # noqa: E402
from pagepool.events.connections import MAX_UNREAD_BYTES, SOCKET_OPTIONS, Guard  # noqa: E402
from pagepool.events.publisher import MAX_REPLAYS, EventPublisher  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
LIMIT = 64 * MEBIBYTE
"""The most memory that each test may take; without limits each takes many times as much."""


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None) as publisher:
        yield publisher


def assert_serves(publisher: EventPublisher | PublisherProcess) -> None:
    """Assert that a router that connects now gets batches and replays."""
    with subscribed(publisher) as subscriber:
        assert len(subscriber.replay(0)) >= 1


# --- subscriptions ----------------------------------------------------------------------------------------------


def long_topics(rng: Random) -> Iterator[bytes]:
    """Six megabytes, each byte of which is a separate node in libzmq's tree."""
    for _ in range(60):
        yield b"".join(message(b"\1" + rng.randbytes(198)) for _ in range(500))


def branching_topics(_: Random) -> Iterator[bytes]:
    """Short topics, which make the tables of the tree's nodes as wide as possible."""
    for first in range(256):
        yield b"".join(message(bytes([1, first, second, third])) for second in range(256) for third in (0, 255))


@pytest.mark.parametrize("topics", [long_topics, branching_topics])
@UNSANITIZED
def test_subscriptions_take_little(topics: type[Iterator[bytes]]) -> None:
    with PublisherProcess() as process, subscribed(process):
        before = process.peak_bytes()
        for seed in range(2):
            with shake_hands(process.endpoint, "SUB") as raw:
                for chunk in topics(Random(seed)):
                    if not send_until_closed(raw, [chunk]):
                        break
                    process.publish([])
                else:
                    pytest.fail("it may subscribe to everything")
        assert process.peak_bytes() - before < LIMIT
        assert_serves(process)


@pytest.mark.parametrize("keys", [None, ALLOWED], ids=["open", "with keys"])
def test_a_subscriber_has_so_many_topics(keys: object) -> None:
    """Cancelled topics do not count, and others are unaffected. A subscriber beyond the limit is closed, and may return."""
    options = {} if keys is None else CURVE
    publisher = EventPublisher(None, LOOPBACK, heartbeat=None, **options)
    with publisher, Subscriber(publisher, keys=keys) as honest, Subscriber(publisher, keys=keys) as greedy:
        monitor = greedy.live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for i in range(200):
            greedy.live.subscribe(f"engine {i}")
            greedy.live.unsubscribe(f"engine {i}")
        for subscriber in (honest, greedy):
            subscriber.wait_until_subscribed()
        assert not monitor.poll(100)
        for i in range(200):
            greedy.live.subscribe(f"engine {i}")
        assert monitor.poll(20_000)
        number, _ = (publisher.publish([]), honest.receive())[1]
        publisher.publish([])
        assert honest.receive()[0] == number + 1
        for i in range(200):
            greedy.live.unsubscribe(f"engine {i}")
        greedy.wait_until_subscribed()
        greedy.live.disable_monitor()


# --- replays ----------------------------------------------------------------------------------------------------


@UNSANITIZED
def test_routers_that_never_read_a_replay_take_little() -> None:
    """Routers request 60 batches of 64 KiB 60 times, over plain sockets and DEALERs."""
    with PublisherProcess(buffer_steps=60) as process:
        process.call("[publisher.publish([BlockRemoved([bytes(1 << 16)], 'GPU')]) for _ in range(60)]")
        with subscribed(process):
            pass
        before = process.peak_bytes()
        with zmq.Context() as context, ExitStack() as stack:
            for _ in range(10):
                raw = stack.enter_context(shake_hands(process.replay_endpoint, "DEALER"))
                send_until_closed(raw, MAX_REPLAYS * [message(b"", bytes(8))])
            for _ in range(50):
                dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealer.linger, dealer.rcvhwm = 0, 1
                dealer.connect(process.replay_endpoint)
                dealer.send_multipart([b"", bytes(8)])
            peaks = [before]
            while process.peak_bytes() > peaks[-1]:
                peaks.append(process.peak_bytes())
                time.sleep(0.5)
            assert peaks[-1] - before < LIMIT
        assert_serves(process)


def test_a_router_that_never_reads_its_replay_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagepool.events.publisher.PATIENCE", 0.5)
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None) as publisher:
        publish_some(publisher, 50, size=1 << 20)
        with shake_hands(publisher.replay_endpoint, "DEALER") as raw, Subscriber(publisher) as subscriber:
            raw.sendall(message(b"", bytes(8)))
            peers = publisher._worker.replayed
            assert peers is not None
            wait_until(lambda: peers.by_descriptor)
            wait_until(lambda: not peers.by_descriptor)
            assert number_of(subscriber.replay(0)) == list(range(50))


def test_a_subscriber_that_never_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagepool.events.publisher.SECONDS_UNREAD", 0.3)
    with EventPublisher(None, LOOPBACK, hwm=10, heartbeat=None) as publisher, shake_hands(publisher.endpoint, "SUB") as raw:
        raw.sendall(message(b"\1"))
        peers = publisher._worker.published
        wait_until(lambda: peers.by_descriptor)
        wait_until(lambda: publish_some(publisher, 1, size=1 << 20) or not peers.by_descriptor)


def test_a_router_that_reads_slowly_keeps_no_batches() -> None:
    """A batch that is dropped before its turn is not sent; the batches that are kept are."""
    publisher = EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None, buffer_steps=50)
    with publisher, Subscriber(publisher) as subscriber:
        publish_some(publisher, 50, size=1 << 20)
        wait_until(lambda: len(publisher._worker.batches) == 50)
        subscriber.context.rcvhwm = 1
        subscriber.ask(0)
        wait_until(lambda: publisher._worker.replays)
        time.sleep(0.5)
        publish_some(publisher, 60)
        wait_until(lambda: publisher._worker.next_sequence == 110)
        numbers = []
        while (frames := subscriber.asking.recv_multipart())[2] != END:
            numbers.append(int.from_bytes(frames[2], "big"))
        assert numbers == sorted(set(numbers))
        assert (numbers[0], numbers[-1] < 110) == (0, True)
        assert not {*range(49)} <= {*numbers}


def test_a_router_asks_for_so_many_replays_at_once(publisher: EventPublisher) -> None:
    """All permitted requests are answered; with one more the connection is closed."""
    publish_some(publisher, 40, size=1 << 20)
    with shake_hands(publisher.replay_endpoint, "DEALER") as raw:
        raw.sendall((MAX_REPLAYS + 1) * message(b"", bytes(8)))
        assert is_closed(raw, 20)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 20_000
        dealer.connect(publisher.replay_endpoint)
        for _ in range(MAX_REPLAYS):
            dealer.send_multipart([b"", bytes(8)])
        ends = 0
        while ends < MAX_REPLAYS:
            ends += dealer.recv_multipart()[2] == END


def test_a_router_that_connects_right_behind_a_refused_one_is_answered(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection has the same descriptor, of which the thread that closes connections has not read yet."""
    peers, reads_on = publisher._worker.replayed, threading.Event()

    def read_late(*args: object) -> object:
        reads_on.wait()
        return recv_monitor_message(*args)

    with shake_hands(publisher.replay_endpoint, "DEALER") as raw:
        wait_until(lambda: peers.by_descriptor)
        [descriptor] = peers.by_descriptor
        monkeypatch.setattr("pagepool.events.connections.recv_monitor_message", read_late)
        raw.sendall((MAX_REPLAYS + 1) * message(b"", bytes(8)))
        assert is_closed(raw, 20)
    wait_until(lambda: not peers.has(descriptor))
    try:
        with shake_hands(publisher.replay_endpoint, "DEALER") as raw:
            assert peers.has(descriptor)
            raw.sendall(message(b"", bytes(8)))
            assert END in raw.recv(1 << 10)
    finally:
        reads_on.set()


# --- connections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("socket_type", ["SUB", "DEALER"])
def test_idle_connections_leave_the_engine_its_descriptors(socket_type: str) -> None:
    """An eighth of the 256 for each endpoint, and a few for ZeroMQ; a connected router stays connected."""
    with PublisherProcess(num_descriptors=256, max_connections=1000) as process, subscribed(process) as subscriber:
        endpoint = process.replay_endpoint if socket_type == "DEALER" else process.endpoint
        idle = []
        try:
            for _ in range(400):
                raw = socket.socket()
                raw.setblocking(False)
                raw.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2])))
                idle.append(raw)
                if len(idle) % 20 == 0:
                    assert process.call("open_files(100)") == 100
            with ExitStack() as stack:
                for _ in range(10):
                    with suppress(OSError):
                        stack.enter_context(shake_hands(endpoint, socket_type, seconds=0.05))
            assert process.num_descriptors() < 128
            process.publish([])
            subscriber.receive()
        finally:
            for raw in idle:
                raw.close()
        assert_serves(process)


def test_as_many_routers_as_may_connect() -> None:
    """One more router is served once another is gone."""
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None, max_connections=3) as publisher, ExitStack() as stack:
        subscribers = [stack.enter_context(Subscriber(publisher)) for _ in range(3)]
        for subscriber in subscribers:
            subscriber.wait_until_subscribed()
        with Subscriber(publisher) as late:
            for _ in range(20):
                publisher.publish([])
                assert not late.live.poll(10)
            subscribers[0].live.close()
            late.wait_until_subscribed()
        peers = publisher._worker.published
        assert len(peers.by_descriptor) <= 3


def test_a_connection_without_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOCKET_OPTIONS, zmq.HANDSHAKE_IVL, 200)
    with EventPublisher(None, LOOPBACK, LOOPBACK) as publisher:
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            assert endpoint is not None
            with connect(endpoint) as silent:
                assert is_closed(silent, 20)


@pytest.mark.parametrize("greeting", [b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x02\0\0", b"\x01\0\x02\x01a"], ids=["ZMTP 2", "ZMTP 1"])
def test_old_protocols_are_refused(publisher: EventPublisher, greeting: bytes) -> None:
    """Their messages do not identify their connection."""
    with connect(publisher.endpoint) as old:
        old.sendall(greeting)
        assert is_closed(old, 20)
    assert_serves(publisher)


@pytest.mark.parametrize("socket_type", ["SUB", "DEALER"])
@UNSANITIZED
def test_a_message_without_end_takes_little(socket_type: str) -> None:
    with PublisherProcess() as process:
        process.publish([])
        before = process.peak_bytes()
        endpoint = process.endpoint if socket_type == "SUB" else process.replay_endpoint
        frames = 20_000 * message(b"x", ends=False)
        for _ in range(2):
            with shake_hands(endpoint, socket_type) as raw:
                raw.settimeout(0.5)
                num_sent = send_until_closed(raw, (frames for _ in range(2000)))
            assert MAX_UNREAD_BYTES < num_sent < 2000 * len(frames)
        assert process.peak_bytes() - before < 2 * LIMIT
        assert_serves(process)


def test_only_its_own_connections_are_closed(publisher: EventPublisher) -> None:
    """A descriptor that was closed meanwhile, and opened for something else, stays open."""
    guard, peers = publisher._worker.guard, publisher._worker.published
    ours, theirs = socket.socketpair()
    with ours, theirs, connect(publisher.replay_endpoint or "") as other:
        for descriptor in (ours.fileno(), other.fileno(), -1, 10_000):
            guard.close(peers, descriptor)
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        other.sendall(b"\xff")
    assert_serves(publisher)


def test_a_publisher_leaves_no_descriptors_and_no_thread() -> None:
    before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(5):
        with EventPublisher(None, LOOPBACK, LOOPBACK, **CURVE) as publisher, subscribed(publisher, keys=ALLOWED):
            pass
        with pytest.raises(EndpointError):
            EventPublisher(None, "tcp://", **CURVE)
    assert len(os.listdir("/proc/self/fd")) < before + 5
    assert set(threading.enumerate()) == threads


def test_few_descriptors_allow_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (4, 4))
    guard = Guard(32)
    assert guard._max_connections == 1
    guard.stop()
