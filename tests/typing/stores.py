"""Stores, one of the user's own among them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagepool.stores import Done, FileStore, ObjectStore, Store
from pagepool.stores.frames import HEADER_BYTES, is_intact, write_header

if TYPE_CHECKING:
    from obstore.store import MemoryStore


class Nothing:
    """A store without objects."""

    def __init__(self) -> None:
        self.answers: list[Done] = []

    def lookup(self, keys: Sequence[bytes]) -> int:
        self.answers.append(Done(len(self.answers), bytes(len(keys)), None))
        return len(self.answers) - 1

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        return self.lookup(keys)

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        return self.lookup(keys)

    def poll(self) -> list[Done]:
        return self.answers

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self, *, drain_seconds: float) -> None:
        pass


def make_stores(folder: Path) -> list[Store]:
    return [Nothing(), FileStore(folder, "model", max_bytes=1 << 30), FileStore(str(folder), "model", num_threads=2)]


def make_object_store(bucket: "MemoryStore") -> Store:
    return ObjectStore(bucket, "model", max_concurrency=8)


def save(store: Store, key: bytes, page: bytearray) -> bool:
    write_header(page, "model", key, memoryview(page)[HEADER_BYTES:])
    job: int = store.save([key], [memoryview(page)])
    for done in store.poll():
        error: Exception | None = done.error
        if done.job == job and error is None:
            return done.is_done == b"\1" and is_intact(page, "model", key)
    return False
