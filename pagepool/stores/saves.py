"""Pages of the host tier on their way to a store."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagepool._core import take_unstored
from pagepool.stores.frames import HEADER_BYTES, write_header
from pagepool.stores.pages import Keys, Pages, Tier
from pagepool.stores.pending import Buffers, Flags, Job, Jobs, Object

__all__ = ["Saves"]

MAX_PAGES_PER_JOB = 64
NUM_TAGS = 1 << 20
"""Pages remembered as stored. Of two with the same place the later one stays, so the other is saved twice."""


class Saves:
    """Saves of pages, each page once. Pages beyond the room of the queue are dropped."""

    def __init__(self, tier: Tier, jobs: Jobs, namespace: str, max_bytes: int) -> None:
        """Begin without pages."""
        self._tier, self._jobs, self._namespace = tier, jobs, namespace
        self._buffers = Buffers(max_bytes)
        self._stored = np.zeros(NUM_TAGS, dtype=np.uint64)
        self._wrong: dict[bytes, float] = {}  # when the content was found to be wrong
        self._saving: set[bytes] = set()
        self.num_saved = self.num_failed = self.num_dropped = 0

    def collect(self) -> bool:
        """Copy the pages of the tier that are due, and start to save them. Return whether the prefix cache was reset since the
        beginning: then nothing is saved, since the store has pages of other weights.
        """
        keys, groups, page_ids, num_clears = take_unstored(self._tier.store)
        if not num_clears and len(groups):
            self._start(Pages(keys, groups), page_ids)
        return num_clears > 0

    @property
    def num_queued(self) -> int:
        """Pages whose save has not ended."""
        return len(self._saving)

    def note_stored(self, pages: Pages, are_stored: Flags) -> None:
        """Take a store's word about which pages it has."""
        self._mark(pages.choose(are_stored), True)
        self._mark(pages.choose(~are_stored), False)

    def are_right(self, pages: Pages) -> Flags:
        """Whether pages may be loaded: the content of the others in the store was found to be wrong."""
        return np.array([name not in self._wrong for name in pages.name()] if self._wrong else [True] * len(pages.groups), bool)

    def _start(self, pages: Pages, page_ids: npt.NDArray[np.int32]) -> None:
        """Save the pages that the store does not have, and report the others as used. Page 0 stands for a content that was
        found to be wrong: it is not loaded again until it was saved again.
        """
        is_stored = self._are_stored(pages)
        is_wrong = page_ids == 0
        self._wrong.update(dict.fromkeys(pages.choose(is_wrong & is_stored).name(), time.monotonic()))
        self._mark(pages.choose(is_wrong & is_stored), False)
        used = pages.choose(~is_wrong & is_stored).name()
        if used:
            self._jobs.touch(used)
        places = np.flatnonzero(~is_wrong & ~is_stored)
        _, first = np.unique(pages.choose(places).find_tags(), return_index=True)  # a page may be listed twice
        self._copy(pages, page_ids, places[np.sort(first)].tolist())

    def _copy(self, pages: Pages, page_ids: npt.NDArray[np.int32], places: Sequence[int]) -> None:
        copied: list[int] = []
        names: list[bytes] = []
        objects: list[Object] = []
        for place, name in zip(places, pages.choose(places).name(), strict=True):
            if name in self._saving:  # with a content that was found to be wrong: two saves could end in any order
                self.num_dropped += 1
                continue
            row = self._tier.rows[pages.groups[place]][page_ids[place]]
            item = self._buffers.take(HEADER_BYTES + len(row))
            if item is None:
                self.num_dropped += 1
                continue
            item[HEADER_BYTES:] = row
            copied.append(place)
            names.append(name)
            objects.append(item)
        for start in range(0, len(copied), MAX_PAGES_PER_JOB):
            stop = start + MAX_PAGES_PER_JOB
            self._save(Job(pages.choose(copied[start:stop]), names[start:stop], self._end, objects[start:stop]))

    def _save(self, job: Job) -> None:
        for name, item in zip(job.names, job.objects, strict=True):
            write_header(item, self._namespace, name, item[HEADER_BYTES:])
        self._mark(job.pages, True)  # so that it is not queued again meanwhile
        self._saving.update(job.names)
        self._jobs.save(job)

    def _end(self, job: Job, is_done: Flags) -> None:
        for item in job.objects:
            self._buffers.give_back(item)
        self._mark(job.pages.choose(~is_done), False)
        self._saving.difference_update(job.names)
        for name in job.pages.choose(is_done).name() if self._wrong else ():
            if self._wrong.get(name, job.started_at) < job.started_at:
                del self._wrong[name]
        self.num_saved += int(is_done.sum())
        self.num_failed += int((~is_done).sum())

    def _are_stored(self, pages: Pages) -> Flags:
        tags = pages.find_tags()
        return self._stored[_places_of(tags)] == tags  # type: ignore[no-any-return]

    def _mark(self, pages: Pages, are_stored: bool) -> None:
        tags = pages.find_tags() if are_stored else pages.choose(self._are_stored(pages)).find_tags()
        self._stored[_places_of(tags)] = tags if are_stored else 0


def _places_of(tags: Keys) -> Keys:
    return (tags >> np.uint64(1)) % np.uint64(NUM_TAGS)
