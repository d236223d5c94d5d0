"""The sizes of the oracle's pools: which pages are out of use, and what is saved as they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oracle_checkpoints import LEFT
from oracle_expected import NEVER

if TYPE_CHECKING:
    from oracle_pool import OraclePool


class Sizes:
    """The retired pages, at and above the sizes of pools. The pool holds each that was held, until nobody else does."""

    def __init__(self, pool: OraclePool) -> None:
        self.pool = pool
        self.retired: set[int] = set()

    def usable_in(self, pages: Sequence[int]) -> set[int]:
        """Return the pages that requests can have; of a pool without any those that they wait for."""
        all_pages = {*pages} - {0}
        return all_pages - self.retired or all_pages

    def count_in_use(self, pages: Sequence[int]) -> int:
        """Count the pages below the size."""
        return len({*pages} - {0} - self.retired)

    def is_held(self, page: int) -> bool:
        """Whether others than the pool hold a page."""
        return self.pool.ref_counts[page] > (page in self.retired)

    def resize(self, sizes: Sequence[int], are_final: bool) -> list[int]:
        """Let the pools have other sizes, with the null page. Return the pages above that are held."""
        held = []
        if not all(1 <= size <= len(pages) + 1 for pages, size in zip(self.pool.ranges, sizes, strict=True)):
            raise ValueError(f"sizes {sizes}")
        for pages, size in zip(self.pool.ranges, sizes, strict=True):
            held += self._resize_pool(pages, pages[size - 1 :], are_final)
        return held

    def _resize_pool(self, pages: range, retired: range, are_final: bool) -> list[int]:
        pool = self.pool
        for page in sorted(self.retired.intersection(pages) - {*retired}):
            self.retired.remove(page)
            if pool.ref_counts[page]:
                pool.free_pages([page])
            else:
                pool._push(page)
        for page in retired:
            if page not in self.retired and page not in pool.free_queue:
                pool.ref_counts[page] += 1
        self.retired |= {*retired}
        leaving = [page for page in pool.free_page_ids(pages) if page in retired]
        leaving += [page for page in retired if page not in pool.free_queue and pool.ref_counts[page]]
        if pool.tier is not None:
            self._save([page for page in leaving if self._is_saved(page, are_final)], pages)
        return [page for page in leaving if not self._put_away(page)]

    def _is_saved(self, page: int, are_final: bool) -> bool:
        """Whether a page that is about to be evicted is to be in the tier."""
        pool, entry = self.pool, self.pool.entry_of_page.get(page)
        if entry is None or (self.is_held(page) and not are_final) or pool.first_entered(*entry, None) != page:
            return False
        ranks = pool.checkpoints.ranks_of(page)
        if pool.expected.terms.get(page) == NEVER or (ranks is not None and ranks.notes[page].number == LEFT):
            return False
        return page not in pool.tier.saved or pool.tier.find(entry) is not None

    def _save(self, pages: list[int], of_pool: range) -> None:
        """Save as many of the last ones as the tier has room for, the last one first."""
        tier, pool = self.pool.tier, self.pool
        free = tier.pool.free_in(tier.pool.ranges[pool.ranges.index(of_pool)])
        kept = pages[max(0, len(pages) - len(free)) :]
        tier.counts["refused"] += sum(tier.find(pool.entry_of_page[page]) is None for page in pages[: len(pages) - len(kept)])
        for page in kept:
            if tier.find(pool.entry_of_page[page]) is not None:
                tier._save(page)
        for page in reversed(kept):
            if tier.find(pool.entry_of_page[page]) is None:
                tier._save(page)

    def _put_away(self, page: int) -> bool:
        """Evict a page, and take it out of use unless it is held. Return whether it is not."""
        pool = self.pool
        if page in pool.entry_of_page:
            pool.evict(page)
        if self.is_held(page):
            return False
        if page in pool.free_queue:
            pool.remove(page)
        pool.counts["freed"] += pool.ref_counts[page]
        pool.ref_counts[page] = 0
        pool.tenants.of_page.pop(page, None)
        pool.counts["retired"] += 1
        return True
