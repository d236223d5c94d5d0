"""What keeps pages in the simulation besides requests: leases of transfers that send them, and pins; and priorities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from contents_device import MAX_GROUPS, Cells, Content, require
from contents_fronts import BatchFront, World
from contents_index import NULL_PAGE
from contents_request import Job

from pagepool._core import copy_records
from pagepool.errors import ArgumentError, PinBudgetError

Span = tuple[int, int | None]


@dataclass
class Leased:
    """A lease, and what it found in those slots that were computed."""

    lease: Any
    cells: Cells
    is_known: npt.NDArray[np.bool_]


class Holds:
    """The leases, pins and priorities of one pool."""

    def __init__(self, world: World) -> None:
        self.world, self.books, self.device = world, world.books, world.device
        self.rng: Random = world.rng
        self.leases: list[Leased] = []

    # Leases.

    def lease(self) -> None:
        """Lease the pages of a job, but no working page of a state, whose content goes on."""
        jobs = [job for job in self.world.jobs if not job.loading and job.num_computed_tokens]
        if not jobs:
            return
        job = self.rng.choice(jobs)
        self.world.settle()
        groups = [(i, group) for i, group in enumerate(self.world.setting.groups) if group.kind != "mamba"]
        places = [(group, i, page_id) for g, group in groups for i, page_id in enumerate(job.pages[g]) if page_id != NULL_PAGE]
        page_ids = [page_id for _, _, page_id in places]
        lease = self.world.call("lease", self.world.manager, page_ids)
        require(lease.page_ids == page_ids, "other pages are leased", lease, page_ids)
        self.books.holders.update(page_ids)
        width = self.device.cells.shape[1]
        nums_known = [min(group.page_size, job.num_computed_tokens - i * group.page_size) for group, i, _ in places]
        is_known = np.arange(width) < np.array(nums_known).reshape(-1, 1)
        self.leases.append(Leased(lease, self.device.cells[page_ids], is_known & ~self._is_garbage(page_ids)))

    def _is_garbage(self, page_ids: list[int]) -> npt.NDArray[np.bool_]:
        garbage = list(self.device.histories.garbage)
        return np.isin(self.device.cells[page_ids] // MAX_GROUPS, garbage)

    def end_lease(self) -> None:
        """Release a lease. What it found is there still, except where a step has failed."""
        if not self.leases:
            return
        leased = self.leases.pop(self.rng.randrange(len(self.leases)))
        page_ids = leased.lease.page_ids
        is_same = (self.device.cells[page_ids] == leased.cells) | self._is_garbage(page_ids)
        require(bool((is_same | ~leased.is_known).all()), "a leased page was written", leased.lease)
        self.world.call("release", leased.lease)
        for page_id in page_ids:
            self.books.let_go(page_id)
        self.world.counts["leases"] += 1

    # Pins.

    def read_pins(self) -> Counter[int]:
        """Return how often each page is pinned."""
        pins = copy_records(self.world.manager.page_pool.store, "pins")["pins"].tolist()
        return Counter({page_id: num for page_id, num in enumerate(pins) if num})

    def with_any(self, action: Callable[[Job, Span, set[Content]], None]) -> None:
        """Do something with a span of a job that runs or waits."""
        jobs = [*self.world.jobs, *self.world.waiting]
        if jobs:
            job = self.rng.choice(jobs)
            action(job, *self._draw_span(job))

    def pin(self, job: Job, span: Span, cached: set[Content]) -> None:
        """Pin what a job holds, or would hit."""
        own = self._list_own(job, cached)
        before = self.read_pins()
        require(before == self.books.pins, "pins", before, self.books.pins)
        try:
            num_pinned = self._call("pin", job, span)
        except PinBudgetError:
            require(self.read_pins() == before, "a call that was refused has pinned", job)
            most = self.world.manager.max_num_pinned_pages
            num_fresh = len(set(own) - before.keys())
            is_over = len(before) + num_fresh > most or self.books.has_state or not job.pages
            is_over |= self.books.setting.windows is not None and span[1] is not None  # pages that left the window are pinned
            require(is_over, "refused, and there is room for pins", job, num_fresh)
            return
        except ArgumentError:
            require(self.read_pins() == before, "a call that was refused has pinned", job)
            self._require_gone(job, span)
            return
        self.books.pins = self.read_pins()
        gained = self.books.pins - before
        require(gained.total() == num_pinned, "the number of pins", gained, num_pinned)
        for page_id in gained:
            content = self.books.index.content_of(page_id)
            require(content in cached, "a page of others is pinned", job, page_id, content)
            self.books.holders[page_id] += page_id not in before
        require(set(own) <= gained.keys(), "a page is not pinned", job, own, gained)
        self.world.counts["pages pinned"] += num_pinned

    def unpin(self, job: Job, span: Span, cached: set[Content]) -> None:
        """Take a pin back of each content of a job, which may not be the one that pinned."""
        before = self.books.pins.copy()
        num_unpinned = self._call("unpin", job, span)
        self._lose_pins(before - self.read_pins())
        pinned = {self.books.index.content_of(page_id) for page_id in before}
        require(num_unpinned == len(pinned & cached), "the number of pins taken back", job, num_unpinned)
        self.world.counts["pages unpinned"] += num_unpinned

    def unpin_all(self) -> None:
        self.world.call("unpin_all", self.world.manager.page_pool)
        self._lose_pins(self.books.pins.copy())

    def _lose_pins(self, lost: Counter[int]) -> None:
        self.books.pins -= lost
        for page_id in lost:
            if page_id not in self.books.pins:
                self.books.let_go(page_id)

    def _draw_span(self, job: Job) -> tuple[Span, set[Content]]:
        """Return a span of the known tokens of a job, with the contents of the pages within it."""
        num_tokens = job.num_known_tokens if isinstance(job.front, BatchFront) else job.num_tokens
        start = self.rng.choice((0, 0, self.rng.randint(0, num_tokens)))
        span = start, self.rng.choice((None, self.rng.randint(start, num_tokens)))
        stop = num_tokens if span[1] is None else span[1]
        histories, contents = job.list_histories(num_tokens), set()
        for group_id, group in enumerate(self.world.setting.groups if self.books.setting.enable_caching else ()):
            size = group.interval and self.books.hit_step if group.kind == "mamba" else group.page_size
            ends = range(size, stop + 1, size) if size else ()
            contents |= {(group_id, histories[end - 1]) for end in ends if end - size >= start}
        return span, contents

    def _require_gone(self, job: Job, span: Span) -> None:
        """Raise unless a page is not cached with which a request resumes at the end of a span."""
        start, stop = span
        require(self.books.setting.windows is not None and stop is not None, "refused", job, span)
        windows = self.books.list_windows(job, stop)
        require(any(not self.books.index.has(content, None) for content in windows), "no window is gone", job, start, stop)

    def _list_own(self, job: Job, contents: set[Content]) -> list[int]:
        """Return the pages of a job that are cached with these contents."""
        return [page_id for pages in job.pages for page_id in pages if self.books.index.content_of(page_id) in contents]

    def _call(self, name: str, job: Job, span: Span, **options: Any) -> int:
        if isinstance(job.front, BatchFront):
            return int(self.world.call(name, job.front.batch, job.row, *span, **options))
        return int(self.world.call(name, self.world.manager, job, *span, **options))

    # Priorities.

    def retain(self, job: Job, span: Span, cached: set[Content]) -> None:
        """Give the cached pages of a job a priority, for a moment, for long or for good."""
        options = {"priority": self.rng.randint(0, 100), "seconds": self.rng.choice((None, 1e-9, 1e6))}
        try:
            num_pages = self._call("retain", job, span, **options)
        except ArgumentError:
            num_pages = 0
        num_own = len(self._list_own(job, cached))
        if num_pages < num_own:
            require(num_pages == 0, "a page is not retained", job, num_pages, num_own)
            self._require_gone(job, span)
        self.world.counts["pages retained"] += num_pages

    def protect(self) -> None:
        """Protect what waiting jobs would hit, or nothing."""
        jobs = self.world.waiting if self.rng.random() < 0.8 else []
        self.world.counts["pages protected"] += self.world.call("protect", self.world.manager, jobs)

    def clear(self) -> None:
        """End all leases and pins."""
        while self.leases:
            self.end_lease()
        self.unpin_all()
