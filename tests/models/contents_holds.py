"""What keeps pages in the simulation besides requests: leases of transfers that send them, and of spans; and expectations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from contents_device import MAX_GROUPS, Cells, Content, require
from contents_fronts import BatchFront, World
from contents_index import LEADING, NULL_PAGE
from contents_request import Job

from pagepool.errors import ArgumentError, LeaseBudgetError

LEASED_SHARE = 0.2  # of each pool

Span = tuple[int, int | None]


@dataclass(eq=False)
class Leased:
    """A lease of pages, given by record, and what it found in those slots that were computed."""

    lease: Any
    records: list[int]
    cells: Cells
    is_known: npt.NDArray[np.bool_]


class Holds:
    """The leases of one pool, and when its pages are wanted."""

    def __init__(self, world: World) -> None:
        self.world, self.books, self.device = world, world.books, world.device
        self.rng: Random = world.rng
        self.leases: list[Leased] = []
        self.time = 1000.0
        world.manager._store.set_time(self.time)

    # Leases.

    def lease(self) -> None:
        """Lease the pages of a job, but no working page of a state, whose content goes on."""
        jobs = [job for job in self.world.jobs if not job.loading and job.num_computed_tokens]
        if not jobs:
            return
        job = self.rng.choice(jobs)
        self.world.settle()
        groups = [(i, group) for i, group in enumerate(self.world.setting.groups) if not group.is_state]
        places = [(group, i, record) for g, group in groups for i, record in enumerate(job.pages[g]) if record != NULL_PAGE]
        parts = self.books.pools.part(record for _, _, record in places)
        if not parts:
            return
        name = self.rng.choice(list(parts)) if len(parts) > 1 else next(iter(parts))
        records = self.books.pools.join({name: parts[name]})
        seconds, before = self.rng.choice((None, None, 1, 30)), self.world.manager.stats().pools[name]
        try:
            lease = self.world.call("lease", self.world.manager.pools[name], parts[name], seconds=seconds)
        except LeaseBudgetError:
            num_in_all = before.num_leased_pages + len(records)
            is_over = seconds is not None and num_in_all > int(LEASED_SHARE * before.num_pages)
            require(is_over, "refused, and there is room for leases", job)
            return
        require(lease.page_ids == parts[name], "other pages are leased", lease, parts[name])
        self._hold(records)
        cells = self.device.read_pages(records)
        places = [place for place in places if place[2] in records]
        nums_known = [min(group.page_size, job.num_computed_tokens - i * group.page_size) for group, i, _ in places]
        is_known = np.arange(cells.shape[1]) < np.array(nums_known).reshape(-1, 1)
        self.leases.append(Leased(lease, records, cells, is_known & ~self._is_garbage(records)))

    def _hold(self, records: list[int]) -> None:
        self.books.holders.update(records)
        self.books.leased.update(records)

    def _is_garbage(self, records: list[int]) -> npt.NDArray[np.bool_]:
        garbage = list(self.device.histories.garbage)
        return np.isin(self.device.read_pages(records) // MAX_GROUPS, garbage)

    def end_lease(self) -> None:
        """Release a lease. What it found is there still, except where a step has failed."""
        if not self.leases:
            return
        leased = self.rng.choice(self.leases)
        self.world.call("release", leased.lease)
        self._end(leased)

    def _end(self, leased: Leased) -> None:
        """A lease has just ended."""
        self.leases.remove(leased)
        is_same = (self.device.read_pages(leased.records) == leased.cells) | self._is_garbage(leased.records)
        require(bool((is_same | ~leased.is_known).all()), "a leased page was written", leased.lease)
        self.books.leased.subtract(leased.records)
        for record in leased.records:
            self.books.let_go(record)
        self.world.counts["leases"] += 1

    # Leases of spans, and expectations. The clock stands until the simulation lets it go on.

    def with_any(self, action: Callable[[Job, Span, set[Content]], None]) -> None:
        """Do something with a span of a job that runs or waits."""
        jobs = [*self.world.jobs, *self.world.waiting]
        if jobs:
            job = self.rng.choice(jobs)
            action(job, *self._draw_span(job))

    def lease_span(self, job: Job, span: Span, cached: set[Content]) -> None:
        """Lease what is cached under tokens of a job, for a moment or for long."""
        own = self._find_own(job, cached)
        before = self.world.manager.stats().pools
        self.world.settle()
        try:
            lease = self._call("lease", job, span, seconds=self.rng.choice((1, 30, 1e6)))
        except LeaseBudgetError:
            wanted = [content[0] for content in cached if self.books.index.has(content, None)]
            nums_wanted = [sum(pool == self.books.pools.of_group[g] for g in wanted) for pool in range(len(before))]
            nums_leased = [each.num_leased_pages for each in before.values()]
            most = [int(LEASED_SHARE * each.num_pages) for each in before.values()]
            is_over = any(old + new > num for old, new, num in zip(nums_leased, nums_wanted, most, strict=True))
            require(is_over, "refused, and there is room for leases", job, own)
            return
        except ArgumentError:
            self._require_gone(job, span, cached)
            return
        records = self.books.pools.join(lease.page_ids_by_pool)
        leased = {self.books.index.content_of(record) for record in records}
        require(leased <= cached, "a page of others is leased", job, leased - cached)
        require(own <= leased, "a page is not leased", job, own - leased, lease)
        if span[1] is not None:
            require(not (gone := self._find_gone(job, span[1], cached)), "leased, and a page is gone", job, span, gone)
        self._hold(records)
        cells = self.device.read_pages(records)
        self.leases.append(Leased(lease, records, cells, ~self._is_garbage(records)))
        self.world.counts["pages leased"] += len(lease)

    def expect(self, job: Job, span: Span, cached: set[Content]) -> None:
        """Say when the cached pages of a job are wanted."""
        num_pages = self._call("expect", job, span, seconds=self.world.draw_seconds())
        num_own = len(self._find_own(job, cached))
        require(num_pages >= num_own, "a page is not expected", job, num_pages, num_own)
        self.world.counts["pages expected"] += num_pages

    def expect_session(self) -> None:
        """Say when the pages of a session are wanted, or that they are not."""
        name = self.rng.choice(("expect_session", "close_session"))
        name = "expect_session" if "tier" in self.world.features else name
        options = {"seconds": self.world.draw_seconds()} if name == "expect_session" else {}
        num_pages = self.world.call(name, self.world.manager, self.rng.choice(("a", "b", "unknown")), **options)
        self.world.counts["pages of sessions"] += num_pages

    def set_shares(self) -> None:
        """Give tenants shares, or take them."""
        self.world.call("set_shares", self.world.manager, {name: 0.3 for name in "xy" if self.rng.random() < 0.7})
        self.world.counts["shares"] += 1

    def wait(self) -> None:
        """Let the clock go on. Leases of spans that are over are checked, and end."""
        self.time += self.rng.choice((0.5, 20, 2.0 ** self.rng.uniform(0, 6 if "tier" in self.world.features else 16)))
        leases = [leased for leased in self.leases if leased.lease.is_held]
        self.world.manager._store.set_time(self.time)
        for leased in leases:
            if not leased.lease.is_held:
                self._end(leased)
                self.world.counts["leases that are over"] += 1

    def _draw_span(self, job: Job) -> tuple[Span, set[Content]]:
        """Return a span of the known tokens of a job, with the contents of the pages within it."""
        num_tokens = job.num_known_tokens if isinstance(job.front, BatchFront) else job.num_tokens
        start = self.rng.choice((0, 0, self.rng.randint(0, num_tokens)))
        span = start, self.rng.choice((None, self.rng.randint(start, num_tokens)))
        stop = num_tokens if span[1] is None else span[1]
        histories, contents = job.list_histories(num_tokens), set()
        for group_id, group in enumerate(self.world.setting.groups if self.books.setting.enable_caching else ()):
            if group.is_ring:
                continue
            size = group.interval and self.books.hit_step if group.kind == "mamba" else group.page_size
            ends = range(size, stop + 1, size) if size else ()
            contents |= {self.books.name(group_id, histories, end) for end in ends if end - size >= start}
        return span, contents

    def _require_gone(self, job: Job, span: Span, contents: set[Content]) -> None:
        """Raise unless a page of a span is not cached, or one with which a request resumes at its end, or none is."""
        cached = {content for content in contents if self.books.index.has(content, None)}
        gone = contents - cached if span[1] is None else self._find_gone(job, span[1], contents)
        require(bool(gone) or not cached, "no page is gone", job, span)

    def _find_gone(self, job: Job, stop: int, contents: set[Content]) -> set[Content]:
        """Find lost pages of full attention in a span, and lost ones of other kinds with which a request resumes at its end."""
        full = {group_id for group_id, group in enumerate(self.world.setting.groups) if group.kind in LEADING}
        needed = {content for content in contents if content[0] in full}
        needed |= {content for content in self.books.list_needed(job, stop) if content[0] not in full}
        return {content for content in needed if not self.books.index.has(content, None)}

    def _find_own(self, job: Job, contents: set[Content]) -> set[Content]:
        """Return those of the contents with which pages of a job are cached."""
        return contents & {self.books.index.content_of(page_id) for pages in job.pages for page_id in pages}

    def _call(self, name: str, job: Job, span: Span, **options: Any) -> Any:
        if isinstance(job.front, BatchFront):
            return self.world.call(name, job.front.batch, job.row, *span, **options)
        return self.world.call(name, self.world.manager, job, *span, **options)

    def clear(self) -> None:
        """End all leases."""
        while self.leases:
            self.end_lease()
