"""Pages of the host tier on their way to a store, and tombstones for those whose content was found to be wrong."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import copy_rows, take_unstored
from pagepool.stores.frames import HEADER_BYTES, write_header
from pagepool.stores.pages import Keys, Pages, Tier
from pagepool.stores.pending import Buffers, Flags, Job, Jobs

MAX_PAGES_PER_JOB = 64
NUM_TAGS = 1 << 20
"""Places for pages remembered as stored. If two pages share one, it keeps the later page, so the other is saved twice."""

TOMBSTONE = np.zeros(HEADER_BYTES, dtype=np.uint8)
"""Object that replaces a wrong one. It is never intact, and shorter than any page."""

SECONDS_BETWEEN_TRIES = 1.0
"""Time until a tombstone that the store did not save is tried again."""

PART_OF_TIER = 4
"""The queue's memory is allocated at the start, up to the tier's memory divided by this."""

NO_PAGES = Pages(np.empty((0, 2), np.uint64), np.empty(0, np.int32))


class Due(NamedTuple):
    """Pages that are due for a save, their ids in the tier, and the steps in which they are settled: see `take_unstored`."""

    pages: Pages
    page_ids: npt.NDArray[np.int32]
    settled_at: npt.NDArray[np.int64]

    def choose(self, places: Any) -> "Due":
        """Return the pages at some places."""
        return Due(self.pages.choose(places), self.page_ids[places], self.settled_at[places])


class Waiting(NamedTuple):
    """A page that was copied, and waits for its save."""

    settled_at: int
    page: Pages
    size: int
    place: int  # place of the object in `Buffers`


class Saves:
    """Saves of pages, each page once. Pages beyond the room of the queue are dropped.

    A page is saved once the steps planned behind its own have begun: a failure is usually found before. If its content is found
    to be wrong later, a tombstone replaces it. A key has one save at a time, since two could end in either order: another one
    waits until the store has answered.
    """

    def __init__(self, tier: Tier, jobs: Jobs, namespace: str, max_bytes: int) -> None:
        """Begin without pages."""
        self._tier, self._jobs = tier, jobs
        self._finish = partial(finish, namespace)
        sizes = [HEADER_BYTES + rows.shape[1] for rows in tier.rows]
        self._buffers = Buffers(max_bytes, sizes, share_memory(tier, max_bytes))
        self._stored = np.full(NUM_TAGS, 0, dtype=np.uint64)  # written now: unlike `zeros`, it costs no page faults later
        self._was_stored = np.full(NUM_TAGS, False, dtype=bool)  # places of `_stored` that ever had a page
        self._saving: set[bytes] = set()  # pages that the store may still be writing
        self._waiting: dict[bytes, Waiting] = {}
        self._wrong: set[bytes] = set()  # pages whose content in the store may be wrong
        self._spoilt: set[bytes] = set()  # pages being saved that were found to be wrong since
        self._step = 0
        self._tries_at = 0.0
        self.heed_wrong: Callable[[list[bytes]], None] = lambda _names: None  # called with pages found to be wrong
        self.num_queued = 0  # pages, and tombstones, whose save has not ended
        self.num_saved = self.num_failed = self.num_dropped = 0

    @property
    def has_wrong(self) -> bool:
        """Whether the store may still have a wrong content."""
        return bool(self._wrong)

    def collect(self, is_end: bool = False) -> bool:
        """Copy the pages of the tier that are due, and start to save the settled ones, with `is_end` all. Return whether the
        prefix cache was reset since storage was attached: then nothing is saved, since the store has pages of other weights.
        """
        num_steps = 0 if is_end else self._tier.count_steps_ahead()
        keys, groups, page_ids, settled_at, self._step, num_clears = take_unstored(self._tier.store, num_steps)
        due, are_wrong = Due(Pages(keys, groups), page_ids, settled_at), page_ids == 0
        if are_wrong.any():
            self._note_wrong(due.pages.choose(are_wrong))
        if num_clears:
            for name in list(self._waiting):
                self._drop(name)
        elif len(groups):
            self._start(due.choose(~are_wrong))
        if self._wrong and time.monotonic() >= self._tries_at:
            self._bury()
        if self._waiting:
            self._start_waiting(is_end)
        return num_clears > 0

    def note_stored(self, pages: Pages, are_stored: Flags) -> None:
        """Note which pages the store says it has. Those being saved count as stored, those with wrong contents do not."""
        are_stored = are_stored & self.are_right(pages)
        self._mark(pages.choose(are_stored), True)
        if self._saving:
            are_stored = are_stored | np.array([name in self._saving for name in pages.name()], dtype=bool)
        self._mark(pages.choose(~are_stored), False)

    def are_right(self, pages: Pages) -> Flags:
        """Return a flag for each page: False if its content in the store was found to be wrong, so it may not be loaded."""
        return np.array([name not in self._wrong for name in pages.name()] if self._wrong else [True] * len(pages.groups), bool)

    def _note_wrong(self, pages: Pages) -> None:
        """Drop waiting saves of pages with wrong contents, and note the pages whose objects are to be replaced."""
        names = pages.name()
        for name, was_stored in zip(names, self._was_stored[_places_of(pages.find_tags())].tolist(), strict=True):
            self._drop(name)
            if was_stored:
                self._wrong.add(name)
        self._spoilt.update(self._saving.intersection(names))
        self._mark(pages, False)
        self.heed_wrong(names)

    def _drop(self, name: bytes) -> None:
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._buffers.give_back([self._buffers.arrays[waiting.size][waiting.place]], [waiting.place])

    def _start(self, due: Due) -> None:
        """Save the pages that the store does not have, and report the others as used."""
        are_stored = self._are_stored(due.pages)
        used = due.pages.choose(are_stored).name()
        if used:
            self._jobs.touch(used)
        places = np.flatnonzero(~are_stored)
        new: dict[bytes, int] = {}  # a page may be listed twice
        for place, name in zip(places.tolist(), due.pages.choose(places).name(), strict=True):
            if name not in self._waiting and (name not in self._saving or name in self._wrong):
                new.setdefault(name, place)
        due = due.choose(np.array([*new.values()], dtype=np.intp))
        for group in sorted({*due.pages.groups.tolist()}):
            self._copy(group, due.choose(due.pages.groups == group))

    def _copy(self, group: int, due: Due) -> None:
        """Copy rows of a group, and start to save them, or let them wait."""
        rows = self._tier.rows[group]
        size = HEADER_BYTES + rows.shape[1]
        taken = self._buffers.take(len(due.page_ids), size)
        self.num_dropped += len(due.page_ids) - len(taken)
        due = due.choose(slice(len(taken)))
        copy_rows(rows, due.page_ids, self._buffers.arrays[size][:, HEADER_BYTES:], taken)
        names = due.pages.name()
        must_wait = (due.settled_at > self._step) | np.array([name in self._saving for name in names], dtype=bool)
        for i in np.flatnonzero(must_wait).tolist():
            self._waiting[names[i]] = Waiting(int(due.settled_at[i]), due.pages.choose([i]), size, taken[i])
        self._save(due.pages.choose(~must_wait), size, [taken[i] for i in np.flatnonzero(~must_wait).tolist()])

    def _start_waiting(self, is_end: bool) -> None:
        ready = [
            name
            for name, waiting in self._waiting.items()
            if (is_end or waiting.settled_at <= self._step) and name not in self._saving
        ]
        started = sorted((self._waiting.pop(name) for name in ready), key=lambda waiting: waiting.size)
        for size, equal in groupby(started, key=lambda waiting: waiting.size):
            each = list(equal)
            pages = Pages(*(np.concatenate(parts) for parts in zip(*(waiting.page for waiting in each), strict=True)))
            self._save(pages, size, [waiting.place for waiting in each])

    def _save(self, pages: Pages, size: int, places: Sequence[int]) -> None:
        objects = self._buffers.arrays[size]
        for start in range(0, len(places), MAX_PAGES_PER_JOB):
            own = places[start : start + MAX_PAGES_PER_JOB]
            chosen = pages.choose(slice(start, start + len(own)))
            job = Job(chosen, chosen.name(), self._end, [objects[place] for place in own], [*own], release=self._release)
            self._mark(chosen, True)  # so that it is not queued again meanwhile
            self._begin(job, self._finish)

    def _bury(self) -> None:
        """Replace wrong objects, except those that are being saved, by tombstones."""
        names = [name for name in self._wrong if name not in self._saving]
        for start in range(0, len(names), MAX_PAGES_PER_JOB):
            own = names[start : start + MAX_PAGES_PER_JOB]
            self._begin(Job(NO_PAGES, own, self._end_tombstones, [TOMBSTONE] * len(own), release=self._release), None)

    def _begin(self, job: Job, finish: Callable[[bytes, memoryview], None] | None) -> None:
        self._saving.update(job.names)
        self.num_queued += len(job.names)
        self._jobs.save(job, finish)

    def _end(self, job: Job, is_done: Flags) -> None:
        self.num_queued -= len(job.names)
        are_right = np.array([name not in self._spoilt for name in job.names], dtype=bool)
        self._mark(job.pages.choose(~(is_done & are_right)), False)
        self._wrong.difference_update(job.pages.choose(is_done & are_right).name() if self._wrong else ())
        self.num_saved += int(is_done.sum())
        self.num_failed += int((~is_done).sum())

    def _end_tombstones(self, job: Job, is_done: Flags) -> None:
        self.num_queued -= len(job.names)
        self._wrong.difference_update(name for name, done in zip(job.names, is_done.tolist(), strict=True) if done)
        if not is_done.all():
            self._tries_at = time.monotonic() + SECONDS_BETWEEN_TRIES

    def _release(self, job: Job) -> None:
        """Let other saves of a job's pages begin, and give back its memory."""
        self._saving.difference_update(job.names)
        self._spoilt.difference_update(job.names)
        self._buffers.give_back(job.objects[: len(job.places)], job.places)

    def _are_stored(self, pages: Pages) -> Flags:
        tags = pages.find_tags()
        return self._stored[_places_of(tags)] == tags  # type: ignore[no-any-return]

    def _mark(self, pages: Pages, are_stored: bool) -> None:
        tags = pages.find_tags() if are_stored else pages.choose(self._are_stored(pages)).find_tags()
        places = _places_of(tags)
        self._stored[places] = tags if are_stored else 0
        if are_stored:
            self._was_stored[places] = True


def share_memory(tier: Tier, max_bytes: int) -> dict[int, int]:
    """Return how much memory of a queue of `max_bytes` to allocate at the start, for each size of its objects: in
    proportion to the tier's memory, and at most a quarter of that, since a small tier saves little.
    """
    arrays = {id(rows): rows for rows in tier.rows}.values()
    num_bytes = sum(rows.nbytes for rows in arrays)
    share = min(1 / PART_OF_TIER, max_bytes / max(1, num_bytes))
    shares: dict[int, int] = {}
    for rows in arrays:
        size = HEADER_BYTES + rows.shape[1]
        shares[size] = shares.get(size, 0) + int(share * rows.nbytes)
    return shares


def finish(namespace: str, name: bytes, item: memoryview) -> None:
    """Write the header of an object, which depends on its row."""
    write_header(item, namespace, name, item[HEADER_BYTES:])


def _places_of(tags: Keys) -> Keys:
    return (tags >> np.uint64(1)) % np.uint64(NUM_TAGS)
