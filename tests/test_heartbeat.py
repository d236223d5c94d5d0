"""The publisher's heartbeat: a router that lost the end of a burst notices it while the engine is idle."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("msgspec", reason="events are an extra: msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="events are an extra: pyzmq is not installed")

from event_managers import make_told  # noqa: E402
from subscribers import HOUR, LOOPBACK, NUM_LARGE, TIMEOUT, Subscriber, number_of  # noqa: E402
from wire import decode_batch  # noqa: E402

from pagepool.event_publisher import EventPublisher  # noqa: E402
from pagepool.events import BlockRemoved  # noqa: E402

SOON = 0.05


class VllmSubscriber:
    """The behaviour of vLLM's example subscriber: consecutive numbers, and REQ for a gap."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.context = zmq.Context()
        self.asking = self.context.socket(zmq.REQ)
        self.asking.rcvtimeo = TIMEOUT
        self.asking.connect(publisher.replay_endpoint)
        self.last_sequence = -1
        self.num_asked = 0
        self.events: list[object] = []

    def process(self, frames: list[bytes]) -> None:
        _, number, payload = frames
        sequence = int.from_bytes(number, "big")
        if self.last_sequence >= 0 and sequence > self.last_sequence + 1:
            self.replay(sequence)
        self.events += decode_batch(payload).events
        self.last_sequence = sequence

    def replay(self, sequence: int) -> None:
        """Read the whole answer, and apply the batches before `sequence`."""
        self.num_asked += 1
        self.asking.send((self.last_sequence + 1).to_bytes(8, "big"))
        _, number, payload = self.asking.recv_multipart()
        if payload and self.last_sequence < int.from_bytes(number, "big") < sequence:
            self.events += decode_batch(payload).events


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


def test_the_end_of_a_burst_that_was_lost_is_asked_for() -> None:
    """A router whose queue is full loses the last batches, and no batch follows."""
    publisher = EventPublisher(None, LOOPBACK, LOOPBACK, hwm=5, heartbeat=SOON, buffer_steps=2 * NUM_LARGE)
    with publisher, Subscriber(publisher, hwm=1) as slow:
        slow.wait_until_subscribed()
        hashes = [i.to_bytes(8, "big") + bytes(100_000) for i in range(NUM_LARGE)]
        for block_hash in hashes:
            publisher.publish([BlockRemoved([block_hash], "GPU")])
        while publisher._worker._history.next_sequence < NUM_LARGE:
            time.sleep(0.01)
        known: list[bytes] = []
        last = None
        while known[-1:] != hashes[-1:]:
            sequence, batch = slow.receive()
            missed = slow.replay(last + 1) if last is not None and sequence > last + 1 else [(sequence, batch)]
            known += [event.block_hashes[0] for _, replayed in missed for event in replayed.events]
            last = max(sequence, missed[-1][0])
        assert known == hashes[hashes.index(known[0]) :]


@pytest.mark.parametrize("is_lost", [False, True])
def test_vllms_subscribers_need_nothing_new(is_lost: bool) -> None:
    """They ignore a heartbeat unless they lost something before it; then they send a request as usual."""
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=SOON) as publisher, Subscriber(publisher) as subscriber:
        subscriber.wait_until_subscribed()
        theirs = VllmSubscriber(publisher)
        theirs.process(subscriber.live.recv_multipart())
        publisher.publish([BlockRemoved([b"lost?"], "GPU")])
        while b"lost?" not in (frames := subscriber.live.recv_multipart())[2]:
            theirs.process(frames)
        if not is_lost:
            theirs.process(frames)
        for _ in range(3):
            theirs.process(subscriber.live.recv_multipart())
        assert [event.block_hashes for event in theirs.events] == [[b"lost?"]]
        assert theirs.num_asked == is_lost
        theirs.context.destroy(linger=0)


def test_heartbeats_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats push batches out of the history, so their intervals double; a batch with events resets the interval."""
    intervals: list[float] = []
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=0.01) as publisher:
        worker = publisher._worker
        beat = worker._beat
        monkeypatch.setattr(worker, "_beat", lambda: (beat(), intervals.append(worker._silence)))
        time.sleep(0.05)
        assert worker._history.next_sequence == 0
        publisher.publish([])
        while len(intervals) < 5:
            time.sleep(0.01)
        assert intervals[:5] == [0.02, 0.04, 0.08, 0.16, 0.32]
        publisher.publish([])
        while 0.02 not in intervals[5:]:
            time.sleep(0.01)


def test_without_a_heartbeat_nothing_is_sent() -> None:
    with EventPublisher(None, LOOPBACK, LOOPBACK, heartbeat=None) as publisher, Subscriber(publisher) as subscriber:
        subscriber.wait_until_subscribed()
        assert not subscriber.live.poll(200)
