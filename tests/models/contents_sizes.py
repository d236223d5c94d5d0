"""Pools of the simulation that shrink, grow, are vacated and wake up. What lies above their sizes is lost once the manager says
that nobody holds it, as if the engine had dropped its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contents_device import MAX_GROUPS, Content, require
from contents_fronts import BatchFront, World

from pagepool.errors import PagesHeldError


class Sizes:
    """The sizes of the pools, null pages included."""

    def __init__(self, world: World, preempt_all: Callable[[], None], let_all_go: Callable[[], None]) -> None:
        self.world, self.books = world, world.books
        self.preempt_all, self.let_all_go = preempt_all, let_all_go
        self.full = [len(pages) + 1 for pages in self.books.pools.ranges]
        self.sizes = self.full
        self.sizes_awake: list[int] | None = None

    def resize(self) -> None:
        """Let the pools have other sizes, often all pages."""
        rng = self.world.rng
        sizes = [rng.choice((size, max(1, size // 2), rng.randint(1, size))) for size in self.full]
        self._resize(rng.choice((self.full, self.sizes, sizes)))

    def _resize(self, sizes: list[int]) -> None:
        names = self.books.pools.names
        num_pages = dict(zip(names, sizes, strict=True)) if len(names) > 1 else sizes[0]
        held = self.world.call("resize", self.world.manager, num_pages)
        self.sizes_awake = None
        self._note(sizes)
        expected = {page_id for page_id in self.books.retired if self.books.holders[page_id]}
        require({*self.books.pools.join(held)} == expected, "held pages above the sizes", held, expected)
        require(all(names for pages in held.values() for names in pages.values()), "a page without a holder", held)
        self.world.counts["sizes"] += 1
        if not held:
            self._lose()

    def vacate(self) -> None:
        """Empty the pools, mostly after all holders have gone, and mostly wake them up at once."""
        world = self.world
        if world.rng.random() < 0.8:
            self.preempt_all()
            self.let_all_go()
        try:
            held = world.call("vacate", world.manager, preempt=world.rng.random() < 0.7)
        except PagesHeldError:
            require(self.books.is_held, "nothing is held, and pages are to be given back")
            return
        if held.rows or held.request_ids:
            found = {(batch, row) for batch, rows in held.rows.items() for row in rows} | {*held.request_ids}
            jobs = [job for job in world.jobs if any(map(any, job.pages))]
            holders = {(job.front.batch, job.row) if isinstance(job.front, BatchFront) else job.request_id for job in jobs}
            require(found == holders, "other rows and requests are to be preempted", held, holders)
            return
        require(not self.books.is_held, "vacated, and pages are held")
        self.sizes_awake = self.sizes_awake or self.sizes
        self._note([1] * len(self.full))
        self._lose()
        world.counts["sleeps"] += 1
        if world.rng.random() < 0.7:
            self.resume()

    def resume(self) -> None:
        """Wake the pools up, if they sleep."""
        self.world.call("resume", self.world.manager)
        if self.sizes_awake is not None:
            self._note(self.sizes_awake)
            self.sizes_awake = None

    def grow(self) -> None:
        """Let the pools have all pages again."""
        if self.sizes != self.full:
            self._resize(self.full)

    def _note(self, sizes: list[int]) -> None:
        self.sizes, books = sizes, self.books
        for pages, size in zip(books.pools.ranges, sizes, strict=True):
            retired = {*pages[size - 1 :]}
            for page_id in sorted(books.retired.intersection(pages) - retired):
                books.retired.remove(page_id)
                if page_id in books.own:
                    books.own.remove(page_id)
                    books.holders[page_id] += 1
                    books.let_go(page_id)
            books.own |= {page_id for page_id in retired - books.retired if books.holders[page_id]}
            books.retired |= retired
            self._drop(sorted(retired))
            books.own -= {page_id for page_id in retired if not books.holders[page_id]}

    def _drop(self, retired: Sequence[int]) -> None:
        """Drop the entries of retired pages. Those that nobody else holds are saved, and others if their content is final."""
        books, tier = self.books, self.books.tier
        found: dict[Content, list[int]] = {}
        for page_id in retired:
            content = books.index.content_of(page_id)
            if content is not None:
                found.setdefault(content, []).append(page_id)
        for content, page_ids in found.items():
            saved = [page_id for page_id in page_ids if not books.holders[page_id] or self.world.manager._caches_computed]
            is_new = tier is not None and tier.saved.isdisjoint(page_ids)
            for page_id in page_ids:
                books.drop(page_id)
                if tier is not None and page_id in saved:
                    tier.note_save(page_id, content)
            if is_new and saved == page_ids and not books.index.has(content, None) and content not in tier.entries.values():
                tier.wanted.add(content)

    def _lose(self) -> None:
        """Let the moves read what is saved, and then lose all above the sizes."""
        self.world.settle()
        garbage = self.world.device.histories.make_garbage()
        for array, size in zip(self.world.device.arrays, self.sizes, strict=True):
            array[size:] = garbage * MAX_GROUPS
