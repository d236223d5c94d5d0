"""The subscriber of routers beside vLLM's own publisher, over sockets: a gap, a replay, what it no longer has, a restart."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

pytest.importorskip("vllm")
events = pytest.importorskip("vllm.distributed.kv_events")

import zmq  # noqa: E402
from lossy import LossyRelay, wait_for  # noqa: E402
from ports import free_port  # noqa: E402

from pagepool.router import PrefixIndex  # noqa: E402
from pagepool.router.subscriber import EventSubscriber  # noqa: E402


def stored(*hashes: Any, **fields: Any) -> Any:
    tokens = list(range(16 * len(hashes)))
    return events.BlockStored(list(hashes), None, tokens, 16, None, "GPU", None, group_idx=0, **fields)


def publish(publisher: Any, *batch: Any) -> None:
    publisher.publish(events.EventBatch(ts=time.time(), events=list(batch)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its constructor leaves a socket if it fails
def test_vllms_publisher_is_followed() -> None:
    """Its hashes as ints and as bytes, with a session."""
    port, replay_port = free_port(), free_port()
    endpoints = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
    index = PrefixIndex(16)

    def make(buffer_steps: int) -> Any:
        for _ in range(100):
            with contextlib.suppress(zmq.ZMQError):  # a publisher's ports are free some time after its shutdown
                return events.ZmqEventPublisher(0, f"tcp://*:{port}", endpoints[1], buffer_steps=buffer_steps)
            time.sleep(0.1)
        raise AssertionError("the ports stay taken")

    def has(*hashes: int) -> None:
        wait_for(lambda: set(index.list_blocks(0).tolist()) == set(hashes))

    publisher = make(6)
    relay = LossyRelay(endpoints[0], {3, 4, 20, 21, 22, 23, 24, 25, 26, 27})
    with EventSubscriber(index, replay_seconds=2.0) as subscriber:
        try:
            publish(publisher, stored(1, 2, session_id="a"))  # before anybody listens
            subscriber.connect(0, relay.endpoint, endpoints[1])
            has(1, 2)
            time.sleep(0.3)  # until the subscriptions have arrived
            publish(publisher, stored(3))
            publish(publisher, events.BlockRemoved([1], "GPU", group_idx=0))
            publish(publisher, stored(bytes(24) + (4).to_bytes(8, "big")))  # 3 and 4 are lost
            publish(publisher, stored(5))
            publish(publisher, stored(6))
            has(2, 3, 4, 5, 6)
            wait_for(lambda: subscriber.stats()[0].is_complete)
            stats = subscriber.stats()[0]
            assert (relay.num_lost, stats.num_lost, stats.num_replays) == (2, 0, 2)
            for number in range(6, 30):
                publish(publisher, stored(number + 1))
                time.sleep(0.01)
            known = {2, 3, 4, 5, 6, *range(7, 21), *range(24, 31)}  # six batches are kept, so what was before them may be lost
            wait_for(lambda: set(index.list_blocks(0).tolist()) >= known - {24})
            stats = subscriber.stats()[0]
            assert (stats.num_lost > 0, stats.is_complete, stats.num_bad) == (True, False, 0)
            publish(publisher, events.AllBlocksCleared(), stored(40))
            has(40)
            assert subscriber.stats()[0].is_complete
            publisher.shutdown()
            publisher = make(100)
            publish(publisher, stored(50))
            wait_for(lambda: publish(publisher) or set(index.list_blocks(0).tolist()) == {50})
            assert subscriber.stats()[0].num_restarts == 1
        finally:
            publisher.shutdown()
            relay.close()
