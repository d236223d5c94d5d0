"""Readers of the host tier in the simulation: they hold pages by their keys, and read their rows until they let go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from contents_device import Content, require
from contents_store import LOWER_HALF
from contents_tier import TierBooks

from pagepool._core import hold_stored

MAX_KEYS = 8


@dataclass(eq=False)
class Reading:
    """Pages that a reader holds, by record, and what their rows have to have."""

    hold: Any
    records: list[int]
    contents: list[Content]


class Readers:
    """Readers of one tier. Its choices are its own, so that they move none of the simulation."""

    def __init__(self, store: Any, books: TierBooks, seed: int, counts: Counter[str]) -> None:
        self.store, self.books, self.counts = store, books, counts
        self.rng = Random(f"readers {seed}")
        self.readings: list[Reading] = []

    def act(self) -> None:
        """Hold some pages, or let go of some."""
        if self.readings and self.rng.random() < 0.3:
            self.release(self.rng.randrange(len(self.readings)))
        if len(self.readings) < 3 and self.books.keys and self.rng.random() < 0.3:
            self.hold()

    def hold(self) -> None:
        """Hold the pages of some keys. Without steps to wait for, these are all that the tier has."""
        chosen = self.rng.choices(list(self.books.keys.items()), k=self.rng.randint(1, MAX_KEYS))
        lower = [digest & LOWER_HALF for (digest, _), _ in chosen]
        keys = np.array([[each & (2**64 - 1), each >> 64] for each in lower], np.uint64)
        groups, contents = [group for (_, group), _ in chosen], [content for _, content in chosen]
        entries, num_steps = self.books.read_entries(self.store), self.rng.choice((0, 0, 1, 3))
        hold = hold_stored(self.store, keys, groups, num_steps)
        page_ids = hold.page_ids.tolist()
        records = [self.books.pools.record_of(each, group) if each else 0 for each, group in zip(page_ids, groups, strict=True)]
        for record, content in zip(records, contents, strict=True):
            require(not record or entries.get(record) == content, "a page with another key is held", record, content)
            require(record or num_steps or content not in entries.values(), "a page of the tier is not found", content)
        self.counts["pages held in the tier"] += sum(map(bool, page_ids))
        self.readings.append(Reading(hold, records, contents))
        self.compare(self.readings[-1], [True] * len(records))

    def compare(self, reading: Reading, are_right: list[bool]) -> None:
        for record, content, is_right in zip(reading.records, reading.contents, are_right, strict=True):
            if record and is_right:
                self.books.host.compare_page(record, content)

    def release(self, place: int) -> None:
        """Let go of pages. Those that have their keys still have had their contents all the time."""
        reading, entries = self.readings.pop(place), self.books.read_entries(self.store)
        are_right = reading.hold.release().tolist()
        expected = [
            record != 0 and entries.get(record) == content
            for record, content in zip(reading.records, reading.contents, strict=True)
        ]
        require(are_right == expected, "held pages with their keys", are_right, expected)
        self.compare(reading, are_right)
        require(not reading.hold.release().any(), "pages are released twice")

    def clear(self) -> None:
        while self.readings:
            self.release(0)
