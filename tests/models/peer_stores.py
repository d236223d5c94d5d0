"""Stores that ask a peer, with objects in memory on its side; and stores of two ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pagepool.peers import PeerStore, RankStores
from pagepool.peers.answerer import Answerer, Asked
from pagepool.peers.store import Find, Load
from pagepool.stores import FileStore, Store
from pagepool.stores.jobs import require_keys, require_rows

SECRET = b"secret of 16 byt" * 2
LOOPBACK = "tcp://127.0.0.1:*"


class ObjectServer:
    """Serves a dictionary of objects. `change` may change the flags and parts of an answer, or refuse it."""

    def __init__(self, objects: dict[bytes, bytes], secret: bytes = SECRET, namespace: str = "model/v1") -> None:
        self.objects = objects
        self.change: Any = lambda flags, parts: (flags, parts)
        self.answerer = Answerer(secret, namespace, LOOPBACK, self.handle)

    def handle(self, asked: Asked) -> None:
        question = msgspec.msgpack.decode(asked.body, type=Find | Load)
        found = [self.objects.get(key) for key in question.keys]
        if isinstance(question, Find):
            flags, parts = bytes(item is not None for item in found), []
        else:
            fits = [item is not None and len(item) == size for item, size in zip(found, question.sizes, strict=True)]
            flags, parts = bytes(fits), [item for item, is_done in zip(found, fits, strict=True) if is_done]
        changed = self.change(flags, parts)
        if changed is not None:
            asked.answer(*changed)

    def close(self) -> None:
        self.answerer.close()


class SavingPeer(PeerStore):
    """A `PeerStore` whose saves reach the objects of its peer."""

    def __init__(self, objects: dict[bytes, bytes]) -> None:
        self.server = ObjectServer(objects)
        super().__init__(self.server.answerer.address, SECRET, "model/v1", answer_seconds=60)

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        listed = require_keys(keys)
        own = require_rows(rows, len(listed), False)
        job = self._begin(listed)
        self.server.objects.update((key, bytes(row)) for key, row in zip(listed, own, strict=True))
        job.is_done[:] = b"\1" * len(listed)
        if listed:
            self._end(job)
        return job.number

    def close(self, *, drain_seconds: float) -> None:
        super().close(drain_seconds=drain_seconds)
        self.server.close()


@functools.lru_cache(maxsize=4)
def find_objects(folder: Path) -> dict[bytes, bytes]:
    return {}


def make_peer(folder: Path) -> Store:
    return SavingPeer(find_objects(folder))


def make_ranks(folder: Path) -> Store:
    return RankStores([FileStore(folder / str(rank), "model/v1") for rank in range(2)])


MAKERS = {"peer": make_peer}
