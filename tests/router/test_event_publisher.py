"""The publisher over real sockets on loopback, with routers that are slow, late, dead, or malicious."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import pagepool
from pagepool.errors import ArgumentError, ArgumentTypeError, EndpointError

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")

from event_managers import FULL, make_told, run_request
from ports import free_port
from raw_router import connect
from sources import run_python
from subscribers import (
    ALLOWED,
    CURVE,
    HOUR,
    LOOPBACK,
    NUM_LARGE,
    PUBLIC,
    ROUTER_PUBLIC,
    ROUTER_SECRET,
    SECRET,
    START,
    TIMEOUT,
    Keys,
    Subscriber,
    assert_serves,
    cached,
    number_of,
    publish_some,
    subscribed,
    wait_until,
    work,
    zmq,
)
from wire import decode_batch

from pagepool.events import AllBlocksCleared, BlockRemoved
from pagepool.events.publisher import EventPublisher


@pytest.fixture
def manager() -> pagepool.CacheManager:
    return make_told(num_pages=32)


@pytest.fixture
def publisher(manager: pagepool.CacheManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventPublisher]:
    """A publisher that takes events only at a flush."""
    monkeypatch.setattr("pagepool.events.publisher.INTERVAL", HOUR)
    options = {"heartbeat": None, "buffer_steps": 8, "data_parallel_rank": 3}
    with EventPublisher(manager, LOOPBACK, LOOPBACK, **options) as publisher:
        yield publisher


# --- what is sent ---------------------------------------------------------------------------------------------


def test_a_batch_is_topic_number_and_payload(manager: pagepool.CacheManager) -> None:
    publisher = EventPublisher(manager, LOOPBACK, topic="kv@host", data_parallel_rank=3)
    with publisher, Subscriber(publisher, topic="kv@") as subscriber, Subscriber(publisher, topic="other") as other:
        subscriber.wait_until_subscribed()
        run_request(manager, list(range(9)))
        topic, number, payload = subscriber.live.recv_multipart()
        assert (topic, len(number)) == (b"kv@host", 8)
        batch = decode_batch(payload)
        assert (batch.data_parallel_rank, batch.events[0].token_ids) == (3, list(range(8)))
        assert abs(batch.ts - time.time()) < HOUR
        assert not other.live.poll(0)


def test_the_first_batch_has_all_that_is_cached_already(manager: pagepool.CacheManager) -> None:
    run_request(manager, list(range(9)))
    manager.take_events()
    with EventPublisher(manager, LOOPBACK, LOOPBACK) as publisher, Subscriber(publisher) as subscriber:
        while not (batches := subscriber.replay(0)):
            pass
        sequence, batch = batches[0]
        assert (sequence, type(batch.events[0]).__name__) == (0, "AllBlocksCleared")
        subscriber.router.apply(batch.events)
        assert subscriber.router.pages.keys() == cached(manager)


# --- what is sent again ---------------------------------------------------------------------------------------


def test_a_router_that_starts_late_is_told_everything(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    """Of 30 batches the last eight are kept."""
    rng = Random(1)
    for _ in range(10):
        work(manager, rng)
    publish_some(publisher, 30)
    publisher.publish([])
    with subscribed(publisher) as subscriber:
        first, *rest = subscriber.replay(0)
        subscriber.router.apply(first[1].events)
        assert subscriber.router.pages.keys() == cached(manager)
        subscriber.sequence = first[0]
        assert number_of(rest) == []
        work(manager, rng)
        publisher.flush()
        sequence, batch = subscriber.receive()
        assert sequence == first[0] + 1
        subscriber.router.apply(batch.events)
        assert subscriber.router.pages.keys() == cached(manager)
        for wrong in (0, START, sequence + 2):
            assert number_of(subscriber.replay(wrong)) == [first[0], sequence]
        assert number_of(subscriber.replay(sequence)) == [sequence]
        assert number_of(subscriber.replay(sequence + 1)) == []


def test_a_snapshot_serves_many(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is made again only once the batches after it are dropped: requests cost the engine nothing."""
    source = publisher._worker.source
    made = []
    take = source.take_with_snapshot
    monkeypatch.setattr(source, "take_with_snapshot", lambda: made.append(0) or take())
    with Subscriber(publisher) as subscriber:
        for num_batches in range(1, 21):
            publish_some(publisher, 1)
            while (batches := subscriber.replay(START))[-1][0] < num_batches:
                pass
            assert type(batches[0][1].events[0]).__name__ == "AllBlocksCleared"
            assert number_of(batches) == list(range(num_batches - num_batches % 9, num_batches + 1))
            assert len(made) == num_batches // 9


def test_without_a_manager_there_is_what_is_kept() -> None:
    publisher = EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None, buffer_steps=4)
    with publisher, Subscriber(publisher) as subscriber:
        assert subscriber.replay(0) == subscriber.replay(START) == subscriber.replay(77) == []
        publish_some(publisher, 10)
        publisher.publish([AllBlocksCleared()])
        publish_some(publisher, 2)
        while (numbers := number_of(subscriber.replay(START)))[-1:] != [12]:
            pass
        assert numbers == [10, 11, 12]
        publish_some(publisher, 3)
        while (numbers := number_of(subscriber.replay(2)))[-1] < 15:
            pass
        assert numbers == [12, 13, 14, 15]


# --- routers that are slow, dead, or malicious ------------------------------------------------------------------


def test_a_slow_subscriber_misses_batches_and_asks_for_them() -> None:
    """The slow one delays neither the publisher nor another subscriber."""
    # ZeroMQ learns only every millisecond how much was read, so with few messages allowed it drops some of the fast one's too.
    publisher = EventPublisher(None, LOOPBACK, LOOPBACK, hwm=100, heartbeat=None, buffer_steps=2 * NUM_LARGE)
    with publisher, subscribed(publisher, hwm=1) as slow, subscribed(publisher) as fast:
        while slow.live.poll(50):
            slow.receive()
        received = []
        for i in range(NUM_LARGE):
            publisher.publish([BlockRemoved([i.to_bytes(8, "big") + bytes(100_000)], "GPU")])
            received.append(fast.receive())
        first = received[0][0]
        assert number_of(received) == list(range(first, first + NUM_LARGE))
        seen = [slow.receive()]
        while seen[-1][0] < first + NUM_LARGE:
            publisher.publish([])
            while slow.live.poll(50):
                seen.append(slow.receive())
        missed = {*range(first, first + NUM_LARGE)} - {*number_of(seen)}
        assert missed
        known = {number: batch.events for number, batch in slow.replay(first) + seen if number < first + NUM_LARGE}
        assert known == {number: batch.events for number, batch in received}


def test_routers_that_die_are_forgotten(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    """Routers end while they receive or request batches: by closing, or as if their machine were gone."""
    publish_some(publisher, 8, size=1_000_000)
    for _ in range(5):
        with Subscriber(publisher) as subscriber:
            subscriber.ask(0)
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        for data in (b"", b"\xff" * 10, os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n"):
            with connect(endpoint) as raw:
                raw.sendall(data)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at the end
    assert_serves(publisher, manager)


BAD_REQUESTS = [
    [b""],
    [b"", b""],
    [b"", b"1234567"],
    [b"", b"123456789"],
    [b"x", bytes(8)],
    [b"", bytes(8), b""],
    [b""] * 300,
    [bytes(8)],
    [b"", b"x" * 5000],
    [os.urandom(4000)],
]


def test_garbage_is_not_answered(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    for frames in BAD_REQUESTS:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(publisher.replay_endpoint)
            dealer.send_multipart(frames)
            assert not dealer.poll(20), frames
    assert_serves(publisher, manager)


def test_a_flood_of_requests_does_not_stop_publishing(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    """Each request would be answered by eight megabytes, which nobody reads. Others are answered meanwhile."""
    publish_some(publisher, 8, size=1_000_000)
    with Subscriber(publisher) as flooding, Subscriber(publisher) as subscriber:
        dealers = [flooding.context.socket(zmq.DEALER) for _ in range(40)]
        for dealer in dealers:
            dealer.connect(publisher.replay_endpoint)
        for _ in range(200):
            for dealer in dealers:
                dealer.send_multipart([b"", bytes(8)], zmq.DONTWAIT) if dealer.poll(0, zmq.POLLOUT) else None
        subscriber.wait_until_subscribed()
        numbers = []
        for i in range(50):
            run_request(manager, [i % 2, 1, 2, 3, 4]) if i < 2 else publish_some(publisher, 1)
            publisher.flush()
            numbers.append(subscriber.receive()[0])
        assert numbers == list(range(numbers[0], numbers[0] + 50))
        assert threading.active_count() < 20
    assert_serves(publisher, manager)


# --- who may read -----------------------------------------------------------------------------------------------

STRANGER_PUBLIC, STRANGER_SECRET = zmq.curve_keypair()
STRANGERS = {
    "without keys": None,
    "with the public key of the publisher": Keys(PUBLIC, STRANGER_PUBLIC, STRANGER_SECRET),
    "with the public key of a router": Keys(PUBLIC, ROUTER_PUBLIC, STRANGER_SECRET),
    "with another key for the publisher": Keys(STRANGER_PUBLIC, ROUTER_PUBLIC, ROUTER_SECRET),
}


def test_it_listens_on_loopback_by_default() -> None:
    """Another address of the machine, here one that every Linux has, does not reach the publisher."""
    try:
        publisher = EventPublisher()
    except EndpointError:
        pytest.skip("the port is in use")
    with publisher:
        assert (publisher.endpoint, publisher.replay_endpoint) == ("tcp://127.0.0.1:5557", None)
        socket.create_connection(("127.0.0.1", 5557)).close()
        with pytest.raises(OSError, match=r"refused|unreachable|timed out|assign"):
            socket.create_connection(("127.0.0.2", 5557), timeout=5)


@pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS)
def test_only_routers_with_a_key_receive_anything(manager: pagepool.CacheManager, keys: Keys | None) -> None:
    """Neither published batches nor replays."""
    with (
        EventPublisher(manager, LOOPBACK, LOOPBACK, **CURVE) as publisher,
        Subscriber(publisher, keys=keys) as stranger,
        Subscriber(publisher, keys=ALLOWED) as subscriber,
    ):
        stranger.ask(START)
        subscriber.wait_until_subscribed()
        run_request(manager, list(range(9)))
        publisher.flush()
        subscriber.follow(manager)
        subscriber.replay(START)
        publish_some(publisher, 10)
        for _ in range(10):
            subscriber.receive()
        assert not stranger.live.poll(200)
        assert not stranger.asking.poll(0)


def test_keys_as_text_on_a_socket_file(manager: pagepool.CacheManager, tmp_path: Path) -> None:
    keys = {"curve_secretkey": SECRET.decode(), "curve_client_keys": iter([STRANGER_PUBLIC.decode(), ROUTER_PUBLIC.decode()])}
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    with (
        EventPublisher(manager, *endpoints, **keys) as publisher,
        Subscriber(publisher) as stranger,
        Subscriber(publisher, keys=ALLOWED) as subscriber,
    ):
        subscriber.wait_until_subscribed()
        subscriber.replay(START)
        assert not stranger.live.poll(200)


def test_no_router_is_admitted_once_the_authenticator_is_gone() -> None:
    with EventPublisher(None, LOOPBACK, LOOPBACK, **CURVE) as publisher:
        publisher._worker.authenticator.stop()
        with Subscriber(publisher, keys=ALLOWED) as subscriber:
            for _ in range(40):
                publisher.publish([])
                assert not subscriber.live.poll(5)


WRONG_KEYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *[({name: None}, ArgumentError, "curve_secretkey, curve_client_keys: got one of them, allowed: both") for name in CURVE],
    ({"curve_client_keys": []}, ArgumentError, "curve_client_keys: got none, allowed: at least one key"),
    ({"curve_client_keys": ROUTER_PUBLIC}, ArgumentTypeError, "curve_client_keys: got bytes, allowed: a list of keys"),
    ({"curve_client_keys": 3}, ArgumentTypeError, "curve_client_keys: got int, allowed: a list of keys"),
    ({"curve_client_keys": [3]}, ArgumentTypeError, "curve_client_keys: got int, allowed: 40 characters of Z85"),
    ({"curve_client_keys": [b"x"]}, ArgumentError, "curve_client_keys: got 1 characters, allowed: 40 of Z85, as"),
    ({"curve_secretkey": 3}, ArgumentTypeError, "curve_secretkey: got int, allowed: 40 characters of Z85"),
    ({"curve_secretkey": SECRET[:-5]}, ArgumentError, "curve_secretkey: got 35 characters, allowed: 40 of Z85, as"),
    ({"curve_secretkey": SECRET[:-1] + b'"'}, ArgumentError, "curve_secretkey: got 40 characters, allowed: 40 of Z85, as"),
    ({"curve_secretkey": 40 * "\xe4"}, ArgumentError, "curve_secretkey: got 40 characters, allowed: 40 of Z85, as"),
    *[
        ({name: "inproc://x"}, EndpointError, f"{name}: got 'inproc://x' with keys, allowed: tcp or ipc, such as")
        for name in ("endpoint", "replay_endpoint")
    ],
]


def test_a_libzmq_without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(
        ArgumentError, match=r"^curve_secretkey: got a key, allowed: None, since this libzmq was built without CURVE$"
    ):
        EventPublisher(None, LOOPBACK, **CURVE)


# --- heartbeats: a router that lost the end of a burst notices it while the engine is idle --------------------

SOON = 0.05


def test_a_heartbeat_is_a_batch_without_events() -> None:
    """It has the next number and the topic of all batches, and no events."""
    manager = make_told(num_pages=32)
    publisher = EventPublisher(manager, LOOPBACK, LOOPBACK, topic="kv", heartbeat=SOON, data_parallel_rank=3)
    with publisher, Subscriber(publisher, topic="kv") as subscriber:
        topic, number, payload = subscriber.live.recv_multipart()
        if decode_batch(payload).events:  # the publisher's first batch, which few subscribers are early enough for
            topic, number, payload = subscriber.live.recv_multipart()
        batch = decode_batch(payload)
        assert (topic, len(number), batch.events, batch.data_parallel_rank) == (b"kv", 8, [], 3)
        assert int.from_bytes(number, "big") > 0
        assert abs(batch.ts - time.time()) < HOUR
        assert int.from_bytes(number, "big") in number_of(subscriber.replay(0))


def test_heartbeats_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats push batches out of the history, so their intervals double; a batch with events resets the interval."""
    intervals: list[float] = []
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=0.01) as publisher:
        worker = publisher._worker
        beat = worker._beat
        monkeypatch.setattr(worker, "_beat", lambda: (beat(), intervals.append(worker._silence)))
        time.sleep(0.05)
        assert worker.next_sequence == 0
        publisher.publish([])
        wait_until(lambda: len(intervals) >= 5)
        assert intervals[:5] == [0.02, 0.04, 0.08, 0.16, 0.32]
        publisher.publish([])
        wait_until(lambda: 0.02 in intervals[5:])


def test_without_a_heartbeat_nothing_is_sent() -> None:
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None) as publisher, subscribed(publisher) as subscriber:
        assert not subscriber.live.poll(200)


# --- what goes wrong in the engine ------------------------------------------------------------------------------


def test_events_that_could_not_be_sent_are_told_anew(
    publisher: EventPublisher, manager: pagepool.CacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with subscribed(publisher) as subscriber:
        run_request(manager, list(range(9)))
        with monkeypatch.context() as patch:
            patch.setattr(publisher._worker.source, "_hash_of", lambda key: 1 / 0)
            run_request(manager, [7] * 9)
            manager.page_pool.evict_pages([1])
            publisher.flush()
            wait_until(lambda: caplog.records)
        assert caplog.records[0].message == "events were not sent; a snapshot follows"
        publisher.flush()
        subscriber.router.apply(subscriber.receive()[1].events)
        assert subscriber.router.pages.keys() == cached(manager)


def test_a_publisher_is_closed_once(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    with subscribed(publisher) as subscriber:
        run_request(manager, list(range(9)))
        publisher.close()
        assert subscriber.receive()[1].events[0].token_ids == list(range(8))
    publisher.close()
    for call in (publisher.flush, lambda: publisher.publish([])):
        with pytest.raises(
            ArgumentError, match=r"^publisher: got one that is closed, or belongs to another process, allowed: an open one$"
        ):
            call()
    with EventPublisher(manager, publisher.endpoint, publisher.replay_endpoint) as again:
        assert_serves(again, manager)


def test_a_closed_publisher_keeps_no_source() -> None:
    manager = make_told()
    source = weakref.ref(manager.event_source)
    EventPublisher(manager, LOOPBACK).close()
    del manager
    gc.collect()
    assert source() is None


def test_a_publisher_that_is_dropped_ends() -> None:
    before = set(threading.enumerate())
    publisher = EventPublisher(make_told(), LOOPBACK, LOOPBACK)
    threads = set(threading.enumerate()) - before
    del publisher
    for thread in threads:
        thread.join(TIMEOUT / 1000)
        assert not thread.is_alive()


UNREAD = """
import socket
router = socket.create_connection(("127.0.0.1", int(publisher.replay_endpoint.rpartition(":")[2])))
publisher.publish([AllBlocksCleared()] * 100_000)
"""


@pytest.mark.parametrize(("keys", "router"), [("", UNREAD), ("**CURVE", "")], ids=["a router does not read", "with keys"])
def test_an_interpreter_ends_without_closing(keys: str, router: str) -> None:
    """The process does not hang, prints nothing, and has its own exit code."""
    code = f"""
from pagepool.events.publisher import EventPublisher
from pagepool.events import AllBlocksCleared
from subscribers import CURVE, LOOPBACK
from event_managers import make_told
manager = make_told()
publisher = EventPublisher(manager, LOOPBACK, LOOPBACK, {keys})
{router}
raise SystemExit(3)
"""
    process = run_python("-c", code)
    assert (process.returncode, process.stderr) == (3, "")


# --- what is refused ------------------------------------------------------------------------------------------


def test_a_port_that_is_in_use(publisher: EventPublisher) -> None:
    for name in ("endpoint", "replay_endpoint"):
        endpoints = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, name: publisher.endpoint}
        expected = (
            f"^{name}: got '{publisher.endpoint}': the port is in use, allowed: a free one, such as 'tcp://127.0.0.1:5557'$"
        )
        with pytest.raises(EndpointError, match=expected) as caught:
            EventPublisher(None, **endpoints)
        assert isinstance(caught.value, OSError)


WRONG_ADDRESSES = {
    "nothing": "",
    "no transport": "x",
    "no host": "tcp://",
    "no port": "tcp://127.0.0.1",
    "a port that is too high": "tcp://127.0.0.1:99999",
    "a port of many digits": "tcp://127.0.0.1:" + 5000 * "0" + "99999",
    "a port below 0": "tcp://127.0.0.1:-5",
    "a port with a sign": "tcp://127.0.0.1:+99999999",
    "a port with letters": "tcp://127.0.0.1:80x",
    "a port with a blank": "tcp://127.0.0.1: 99999999",
    "a port of another script": "tcp://127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}",
    "a source's port": "tcp://127.0.0.1:99999999;127.0.0.1:5",
    "an unknown transport": "http://a:1",
    "an unknown host": "tcp://no.such.host.:1",
    "no Unicode": "\ud800",
}


@pytest.mark.parametrize("endpoint", WRONG_ADDRESSES.values(), ids=WRONG_ADDRESSES)
def test_an_address_that_is_none(endpoint: str) -> None:
    num_threads = threading.active_count()
    with pytest.raises(EndpointError, match=r"^endpoint: got '.*': .+, allowed: a free one, such as 'tcp://127.0.0.1:5557'$"):
        EventPublisher(None, endpoint)
    assert threading.active_count() == num_threads


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"manager": 3}, ArgumentTypeError, "manager: got int, allowed: CacheManager or None"),
    ({"endpoint": 3}, ArgumentTypeError, "endpoint: got int, allowed: a string such as"),
    ({"replay_endpoint": 3}, ArgumentTypeError, "replay_endpoint: got int, allowed: a string such as"),
    ({"heartbeat": True}, ArgumentTypeError, "heartbeat: got bool, allowed: a number of seconds"),
    ({"heartbeat": float("inf")}, ArgumentError, "heartbeat: got inf, allowed: more than 0 seconds"),
    ({"heartbeat": float("nan")}, ArgumentError, "heartbeat: got nan, allowed: more than 0 seconds"),
    ({"buffer_steps": 0}, ArgumentError, "buffer_steps: got 0, allowed: 1 to 2147483647"),
    ({"hwm": 0}, ArgumentError, "hwm: got 0, allowed: 1 to 2147483647"),
    ({"heartbeat": 0}, ArgumentError, "heartbeat: got 0, allowed: more than 0 seconds"),
    ({"max_connections": 0}, ArgumentError, "max_connections: got 0, allowed: 1 to 2147483647"),
    ({"data_parallel_rank": -1}, ArgumentError, "data_parallel_rank: got -1, allowed: 0 to 2147483647"),
]


WRONG += [(CURVE | options, error, message) for options, error, message in WRONG_KEYS]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_options_that_are_wrong(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket is made, unless the address is wrong, and no secret is in the message."""
    if not {"endpoint", "replay_endpoint"} & options.keys():
        monkeypatch.setattr(zmq.Context, "socket", lambda *_, **__: pytest.fail("a socket was made"))
    with pytest.raises(error, match=f"^{message}") as caught:
        EventPublisher(**{"endpoint": LOOPBACK} | options)
    assert SECRET[:10].decode() not in str(caught.value)


@pytest.mark.parametrize("name", ["pagepool-events", "pagepool-connections"])
def test_a_thread_that_cannot_be_started(manager: pagepool.CacheManager, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No socket is left listening, and the next publisher has the events."""

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("no more threads")
        started(thread)

    started = threading.Thread.start
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="no more threads"):
            EventPublisher(manager, endpoint, LOOPBACK)
    with EventPublisher(manager, endpoint, LOOPBACK) as publisher:
        assert_serves(publisher, manager)


def test_a_manager_has_one_publisher_and_events(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    with pytest.raises(ArgumentError, match=r"^manager: got one whose events another publisher takes, allowed: others$"):
        EventPublisher(manager, LOOPBACK)
    without = pagepool.CacheManager(8, [pagepool.CacheGroupSpec(FULL)], 64)
    with pytest.raises(
        ArgumentError, match=r"^events: got a manager without them, allowed: one whose enable_events was called first$"
    ):
        EventPublisher(without, LOOPBACK)
