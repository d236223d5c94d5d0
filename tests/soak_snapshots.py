"""Pools restored from a file in the middle of a soak, and damaged files that must be refused."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
from soak_states import SoakError, require_same_pools

import pagepool
from pagepool.errors import SnapshotError
from pagepool.page_pool.snapshot import seal


def list_contradictions(arrays: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield invalid changes: an array of a snapshot, a place in it, and the wrong value."""
    free, cached, num_pages = arrays["free_page_ids"], arrays["cached_page_ids"], arrays["ref_counts"].size
    yield "ref_counts", num_pages - 1, -1
    if free.size:
        yield "ref_counts", free[0], 1
        yield "free_page_ids", 0, num_pages
    if free.size > 1:
        yield "free_page_ids", 0, free[-1]
    if cached.size:
        yield "cached_page_ids", 0, 0
    if cached.size > 1:
        yield "cached_page_ids", 0, cached[-1]


class Restorer:
    """Restores pools, tries to restore damaged ones, and counts both."""

    def __init__(self, rng: Random, counts: Counter[str]) -> None:
        self.rng = rng
        self.counts = counts

    def restore(self, pool: pagepool.PagePool) -> pagepool.PagePool:
        """Return the pool as restored from a file, after comparing it and a second one."""
        file = io.BytesIO()
        np.savez(file, **pool.snapshot())
        file.seek(0)
        with np.load(file) as saved:
            restored, again = pagepool.PagePool.restore(saved), pagepool.PagePool.restore(saved)
            self._refuse_damaged(dict(saved))
            self._refuse_contradiction(dict(saved))
        require_same_pools("restored pools", [pool, restored, again])
        restored.check()
        self.counts["snapshots restored"] += 1
        return restored

    def _refuse_damaged(self, saved: dict[str, Any]) -> None:
        """Damage one array of a snapshot: change a value, its length or type, or remove it."""
        name = self.rng.choice(sorted(saved))
        array = saved.pop(name)
        if array.size and self.rng.random() < 0.8:
            place = self.rng.randrange(array.size)
            flipped = array.copy()
            flipped.reshape(-1).view(np.uint8)[place] ^= 1 << self.rng.randrange(8) if array.dtype != bool else 1
            saved[name] = self.rng.choice((flipped, array[:-1], array.astype(np.float64)))
        self._refuse_restore("damaged snapshots refused", saved, name)

    def _refuse_contradiction(self, saved: dict[str, Any]) -> None:
        """Make the arrays of a snapshot contradict one another, under a correct checksum."""
        arrays = {name: array for name, array in saved.items() if name not in ("format", "version", "checksum")}
        name, place, value = self.rng.choice(list(list_contradictions(arrays)))
        arrays[name][place] = value
        self._refuse_restore("contradictory snapshots refused", seal(arrays), name)

    def _refuse_restore(self, fault: str, snapshot: dict[str, Any], name: str) -> None:
        try:
            pagepool.PagePool.restore(snapshot)
        except SnapshotError:
            self.counts[fault] += 1
        else:
            raise SoakError(f"{fault}: one whose {name!r} is wrong was restored")
