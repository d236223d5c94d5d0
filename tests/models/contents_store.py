"""The store behind the host tier of the simulation: what it has outlives the pool, and it lies."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from contents_device import MAX_GROUPS, Content, require
from contents_tier import TierBooks
from lying_store import LyingStore

from pagepool.stores import loads, pending, saves, tier
from pagepool.stores.frames import HEADER_BYTES
from pagepool.stores.tier import StoreTier

STORE_MODULES = loads, pending, saves, tier
"""They read the clock."""

LOWER_HALF = (1 << 128) - 1
"""Of a digest, in the keys of a store."""

SHARES = 0.0, 0.0, 0.01, 0.1


class CheckingStore(LyingStore):
    """A store that compares what is saved with what was computed."""

    books: TierBooks
    wrong: Exception | None = None  # errors of a store go no further

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> Any:
        try:
            contents = {(digest & LOWER_HALF, group): content for (digest, group), content in self.books.keys.items()}
            for key, row in zip(keys, rows, strict=True):
                if len(row) == HEADER_BYTES:  # a tombstone
                    continue
                number, group = int.from_bytes(key[:16], "little"), int.from_bytes(key[16:], "big")
                self.check(contents[number, group], row, group)
        except Exception as error:
            self.wrong = error
        return super().save(keys, rows)

    def check(self, content: Content, row: memoryview, group: int) -> None:
        cells = np.frombuffer(row[HEADER_BYTES:], dtype=np.int64)
        for i, slots in enumerate(self.books.host.list_slots(content)[: 1 + bool(self.books.host.hash_lookahead)]):
            start = i * self.books.host.width
            are_same = cells[start : start + len(slots)] == np.array(slots) * MAX_GROUPS + group
            require(are_same.all(), "a page that is saved", cells, slots)


class StoreBooks:
    """A store behind a tier, whose fills are entered in the books of the tier."""

    def __init__(self, manager: Any, books: TierBooks, objects: dict[bytes, bytes], rng: Random) -> None:
        self.manager, self.books, self.rng = manager, books, rng
        self.objects = objects
        self.now = 1000.0
        self.open()

    def open(self) -> None:
        """Put a store behind the tier, with the objects of the one before."""
        rng = self.rng
        self.lying = store = CheckingStore(self.objects, Random(rng.random()), rng.choice(SHARES), rng.choice((0, 0, 3)))
        store.books = self.books
        arrays = [self.books.host.arrays[pool].view(np.uint8) for pool in self.books.host.pools.of_group]
        self.stored = StoreTier(
            self.manager,
            store,
            arrays,
            "contents",
            write=rng.choice(("evicted", "through")),
            deadline_ms=rng.choice((0, 5, 50)),
            max_queued_bytes=rng.choice((1 << 20, 2000)),
        )

    def reopen(self) -> None:
        """Close the store and open another one with its objects, as after a restart."""
        self.stored.close(drain_seconds=self.rng.choice((0, 1)))
        self.open()

    def fetch(self, job: Any) -> None:
        self.stored.fetch(job)

    def is_ready(self, job: Any) -> bool:
        """Ask whether a job may be admitted; the clock goes on."""
        self.now += 0.001
        is_ready = self.stored.is_ready(job)
        self.absorb()
        return is_ready

    def absorb(self) -> None:
        """Enter what was loaded into the books, and check it."""
        books = self.books
        if self.lying.wrong is not None:
            raise self.lying.wrong
        found = books.read_entries(self.manager._store)
        for page_id, content in found.items():
            if books.entries.get(page_id) != content:
                books.host.compare_page(page_id, content)
                books.counts["pages from the store"] += 1
        books.entries = found
