"""Pages of the host tier on their way to a store."""

import time
from functools import partial

import numpy as np
import numpy.typing as npt

from pagepool._core import copy_rows, take_unstored
from pagepool.stores.frames import HEADER_BYTES, write_header
from pagepool.stores.pages import Keys, Pages, Tier
from pagepool.stores.pending import Buffers, Flags, Job, Jobs

__all__ = ["Saves"]

MAX_PAGES_PER_JOB = 64
NUM_TAGS = 1 << 20
"""Pages remembered as stored. Of two with the same place the later one stays, so the other is saved twice."""


class Saves:
    """Saves of pages, each page once. Pages beyond the room of the queue are dropped."""

    def __init__(self, tier: Tier, jobs: Jobs, namespace: str, max_bytes: int) -> None:
        """Begin without pages."""
        self._tier, self._jobs = tier, jobs
        self._finish = partial(finish, namespace)
        self._buffers = Buffers(max_bytes, [HEADER_BYTES + rows.shape[1] for rows in tier.rows])
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
        self._copy(pages, page_ids, places[np.sort(first)])

    def _copy(self, pages: Pages, page_ids: npt.NDArray[np.int32], places: npt.NDArray[np.intp]) -> None:
        """Copy rows of a group at once, and start to save them."""
        names = pages.choose(places).name()
        are_new = np.array([name not in self._saving for name in names], dtype=bool)
        self.num_dropped += int((~are_new).sum())  # their content was found to be wrong: two saves could end in any order
        for group in np.unique(pages.groups[places]).tolist():
            due, rows = np.flatnonzero(are_new & (pages.groups[places] == group)), self._tier.rows[group]
            size = HEADER_BYTES + rows.shape[1]
            objects, taken = self._buffers.arrays[size], self._buffers.take(len(due), size)
            self.num_dropped += len(due) - len(taken)
            for start in range(0, len(taken), MAX_PAGES_PER_JOB):
                own = taken[start : start + MAX_PAGES_PER_JOB]
                chosen = due[start : start + len(own)]
                copy_rows(rows, page_ids[places[chosen]], objects[:, HEADER_BYTES:], own)
                named = pages.choose(places[chosen]), [names[i] for i in chosen.tolist()]
                self._save(Job(*named, self._end, [objects[place] for place in own], own))

    def _save(self, job: Job) -> None:
        self._mark(job.pages, True)  # so that it is not queued again meanwhile
        self._saving.update(job.names)
        self._jobs.save(job, self._finish)

    def _end(self, job: Job, is_done: Flags) -> None:
        self._buffers.give_back(job.objects, job.places)
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


def finish(namespace: str, name: bytes, item: memoryview) -> None:
    """Write the header of an object, which depends on its row."""
    write_header(item, namespace, name, item[HEADER_BYTES:])


def _places_of(tags: Keys) -> Keys:
    return (tags >> np.uint64(1)) % np.uint64(NUM_TAGS)
