"""A proxy between a link and its peer that delays, loses, repeats, reorders, truncates and changes messages."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import zmq

FAULTS = "pass", "lose", "repeat", "delay", "cut frame", "drop frame", "add frame", "flip", "swap"


class BadProxy(threading.Thread):
    """Forwards messages from `address` to a peer. By `share` one of `faults` happens to a message. Old messages come again."""

    def __init__(self, address: str, rng: Random, share: float, faults: tuple[str, ...] = FAULTS) -> None:
        super().__init__(daemon=True)
        endpoint, _, name = address.partition("#")
        self.rng, self.share, self.faults = rng, share, faults
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.linger = 0
        port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self.address, self.endpoint = f"tcp://127.0.0.1:{port}#{name}", endpoint
        self.backs: dict[bytes, Any] = {}
        self.kept: list[tuple[Any, bytes | None, list[bytes]]] = []
        self.num_faults = 0
        self.is_over = False
        self.start()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.front, zmq.POLLIN)
        while not self.is_over:
            ready = dict(poller.poll(5))
            if self.front in ready:
                client, *frames = self.front.recv_multipart()
                if client not in self.backs:
                    self.backs[client] = back = self.context.socket(zmq.DEALER)
                    back.linger = 0
                    back.connect(self.endpoint)
                    poller.register(back, zmq.POLLIN)
                self.forward(self.backs[client], None, frames)
            for client, back in self.backs.items():
                if back in ready:
                    self.forward(self.front, client, back.recv_multipart())
            if self.kept and self.rng.random() < 0.3:
                self.send(*self.kept.pop(self.rng.randrange(len(self.kept))))
        self.context.destroy(linger=0)

    def forward(self, target: Any, client: bytes | None, frames: list[bytes]) -> None:
        if self.rng.random() >= self.share:
            return self.send(target, client, frames)
        self.num_faults += 1
        fault, at = self.rng.choice(self.faults), self.rng.randrange(len(frames))
        if fault == "repeat":
            self.send(target, client, frames)
            self.kept.append((target, client, frames))
        if fault in ("delay", "swap"):
            self.kept.append((target, client, frames))
            return None
        if fault == "lose":
            return None
        changed = [*frames]
        if fault == "cut frame":
            changed[at] = changed[at][: self.rng.randint(0, len(changed[at]))]
        elif fault == "drop frame":
            del changed[at]
        elif fault == "add frame":
            changed.insert(at, self.rng.randbytes(self.rng.randint(0, 40)))
        elif fault == "flip" and changed[at]:
            flipped = bytearray(changed[at])
            flipped[self.rng.randrange(len(flipped))] ^= 1 << self.rng.randrange(8)
            changed[at] = bytes(flipped)
        return self.send(target, client, changed) if changed else None

    def send(self, target: Any, client: bytes | None, frames: list[bytes]) -> None:
        target.send_multipart(frames if client is None else [client, *frames])

    def close(self) -> None:
        self.is_over = True
        self.join()
