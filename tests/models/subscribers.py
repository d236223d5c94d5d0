"""A router's end of a publisher's sockets, and keys for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import pytest

import pagepool

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="events are an extra: pyzmq is not installed")
from event_managers import run_request  # noqa: E402
from router import Router  # noqa: E402
from wire import WireBatch, decode_batch  # noqa: E402

from pagepool.events import BlockRemoved  # noqa: E402
from pagepool.events.publisher import EventPublisher  # noqa: E402

LOOPBACK = "tcp://127.0.0.1:*"
END = (-1).to_bytes(8, "big", signed=True)
START = 2**64 - 1
TIMEOUT = 20_000  # milliseconds, after which a test fails
HOUR = 3600.0
NUM_LARGE = 200
"""Batches of 100 kB, more than a publisher's queue and its socket to a subscriber hold."""


class Keys(NamedTuple):
    """A router's CURVE keys, by their names in pyzmq."""

    curve_serverkey: bytes
    curve_publickey: bytes
    curve_secretkey: bytes


def set_keys(target: Any, keys: Keys | None) -> None:
    """Set the keys on a socket, or on all later sockets of a context."""
    for name, key in ({} if keys is None else keys._asdict()).items():
        setattr(target, name, key)


class Subscriber:
    """A router's end of both sockets."""

    def __init__(self, publisher: EventPublisher, topic: str = "", hwm: int = 0, keys: Keys | None = None) -> None:
        self.publisher = publisher
        self.context = zmq.Context()
        set_keys(self.context, keys)
        self.live = self.context.socket(zmq.SUB)
        self.live.set_hwm(hwm)
        self.live.rcvbuf = 1 << 16
        self.live.rcvtimeo = TIMEOUT
        self.live.connect(publisher.endpoint)
        self.live.subscribe(topic)
        self.router = Router()
        self.sequence = -1

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def receive(self) -> tuple[int, WireBatch]:
        """Return the next published batch."""
        _, sequence, payload = self.live.recv_multipart()
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def wait_until_subscribed(self) -> None:
        """Return once published batches arrive."""
        poller = zmq.Poller()
        poller.register(self.live, zmq.POLLIN)
        while not poller.poll(10):
            self.publisher.publish([])
        while poller.poll(50):
            self.live.recv_multipart()

    def ask(self, sequence: int) -> None:
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.rcvtimeo = TIMEOUT
        self.asking.connect(self.publisher.replay_endpoint)
        self.asking.send_multipart([b"", sequence.to_bytes(8, "big")])

    def replay(self, sequence: int) -> list[tuple[int, WireBatch]]:
        """Return the replay from a sequence number on."""
        self.ask(sequence)
        batches = []
        while True:
            empty, topic, number, payload = self.asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                self.asking.close()
                return batches
            batches.append((int.from_bytes(number, "big"), decode_batch(payload)))

    def follow(self, manager: pagepool.CacheManager) -> None:
        """Apply received batches and request missed ones, as routers do, until the state is the expected one."""
        tier = manager.stats().host_tier
        num_saved = tier.num_cached_pages if tier else 0
        while self.router.pages.keys() != cached(manager) or len(self.router.saved) != num_saved:
            sequence, batch = self.receive()
            missed = self.replay(self.sequence + 1) if sequence > self.sequence + 1 else []
            for number, replayed in [*missed, (sequence, batch)]:
                if number > self.sequence:
                    self.router.apply(replayed.events)
                    self.sequence = number


@contextmanager
def subscribed(publisher: EventPublisher, **options: Any) -> Iterator[Subscriber]:
    """Yield a subscriber once published batches arrive."""
    with Subscriber(publisher, **options) as subscriber:
        subscriber.wait_until_subscribed()
        yield subscriber


def wait_until(is_done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT / 1000
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def number_of(batches: list[tuple[int, WireBatch]]) -> list[int]:
    return [sequence for sequence, _ in batches]


def cached(manager: pagepool.CacheManager) -> set[tuple[int, int]]:
    """Return what a router should know."""
    return {(key.group_id, key.page_hash.hash_value & ((1 << 64) - 1)) for key in manager.page_pool.cached_page_hash_to_page}


def work(manager: pagepool.CacheManager, rng: Random) -> None:
    """Run a request and end it."""
    request = run_request(manager, [rng.randrange(2) for _ in range(rng.randint(1, 40))])
    manager.free(request)
    manager.free_page_hashes(request)


def publish_some(publisher: EventPublisher, num_batches: int, size: int = 16) -> None:
    """Publish batches that differ in their one hash, of that many bytes, which is in no group."""
    for i in range(num_batches):
        publisher.publish([BlockRemoved([i.to_bytes(8, "big") + bytes(size)], "GPU")])


def assert_serves(publisher: EventPublisher, manager: pagepool.CacheManager) -> None:
    """Assert that the publisher still publishes and replays."""
    with subscribed(publisher) as subscriber:
        subscriber.replay(START)
        work(manager, Random(2))
        publisher.flush()
        subscriber.receive()
        for _, batch in subscriber.replay(START):
            subscriber.router.apply([event for event in batch.events if getattr(event, "group_idx", 0) is not None])
        assert subscriber.router.pages.keys() == cached(manager)


PUBLIC, SECRET = zmq.curve_keypair()
ROUTER_PUBLIC, ROUTER_SECRET = zmq.curve_keypair()
ALLOWED = Keys(PUBLIC, ROUTER_PUBLIC, ROUTER_SECRET)
CURVE = {"curve_secretkey": SECRET, "curve_client_keys": [ROUTER_PUBLIC]}
