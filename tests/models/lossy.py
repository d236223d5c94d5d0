"""A relay between a publisher and its subscribers that loses batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import zmq


class LossyRelay:
    """Passes on what a publisher sends, over sockets, but the batches with some numbers."""

    def __init__(self, endpoint: str, lost: Iterable[int]) -> None:
        self.context = zmq.Context()
        self.lost = set(lost)
        self.received, self.sent = self.context.socket(zmq.SUB), self.context.socket(zmq.PUB)
        self.received.connect(endpoint)
        self.received.subscribe(b"")
        self.sent.bind("tcp://127.0.0.1:*")
        self.endpoint = self.sent.last_endpoint.decode()
        self.num_lost = 0
        self.is_done = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.is_done:
            if not self.received.poll(10):
                continue
            frames = self.received.recv_multipart()
            if int.from_bytes(frames[-2], "big") in self.lost:
                self.num_lost += 1
            else:
                self.sent.send_multipart(frames)

    def close(self) -> None:
        self.is_done = True
        self.thread.join()
        self.context.destroy(linger=0)


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
