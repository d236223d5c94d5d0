"""The pool of pages, its free queue and its page objects, as engines know them."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pagepool._core import CachePage, PageIds, PageStore
from pagepool.arguments import require_int, require_slice
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, shown
from pagepool.hashing import PageHash, checked_hash
from pagepool.page_pool.free_queue import FreeCachePageQueue
from pagepool.page_pool.pages import Pages
from pagepool.page_pool.prefix_index import (
    CachedPages,
    count_hits,
    enter_pages,
    find_page_id,
    find_page_ids,
    forget_evicted_names,
    forget_names,
    is_own_key,
)
from pagepool.page_pool.snapshot import Configuration, Snapshot, load, save
from pagepool.specs import dp_shard_page_bounds, pages_per_dp_shard
from pagepool.stats import PagePoolStats

__all__ = ["PagePool", "PageProbe"]

logger = logging.getLogger(__package__)

T = TypeVar("T")

PageIdArray = npt.NDArray[np.int32]


class PageProbe(NamedTuple):
    """What `PagePool.probe` found: the leading pages that hit in every group, and the first group without the next one
    (None: every page hit).
    """

    num_hit_pages: int
    missed_group_id: int | None


class PagePool:
    """A fixed number of pages, handed out least recently used first, with their prefix entries.

    Page 0 is the null page, a placeholder that is never handed out, never freed and never counted. Ready in O(num_pages),
    40 ms for a million; 56 to 72 bytes a page with caching, 32 without; 24 or 8 more once it is divided into shards.

    >>> pool = PagePool(8, enable_caching=True)
    >>> pages = pool.get_new_pages(3)
    >>> [page.page_id for page in pages], pool.get_num_free_pages()
    ([1, 2, 3], 4)
    >>> pool.free_pages(reversed(pages))
    >>> pool.free_page_ids_in_order().tolist()
    [4, 5, 6, 7, 3, 2, 1]
    """

    def __init__(self, num_pages: int, enable_caching: bool) -> None:
        """`num_pages` counts the null page; ArgumentError, a ValueError, unless it is a positive int."""
        if isinstance(num_pages, bool) or not isinstance(num_pages, int | np.integer) or num_pages <= 0:
            raise ArgumentError(f"num_pages: got {shown(num_pages)}, allowed: a positive int")
        self._start(PageStore(num_pages, enable_caching))

    def _start(self, store: PageStore) -> None:
        """Be the pool of `store`."""
        self.store = store
        self.num_pages = store.num_pages
        self.enable_caching = store.enable_caching
        self.pages = Pages(self.store)
        self.free_page_queue = FreeCachePageQueue.of_store(self.store)
        self.configuration: Configuration | None = None

    # Made when they are asked for: a pool that nobody looked into has no cycle, and is gone as soon as it is dropped.

    @property
    def null_page(self) -> CachePage:
        """Page 0, which stands for no page."""
        return self.store.page(0)

    @property
    def cached_page_hash_to_page(self) -> CachedPages:
        """The prefix index, a live view."""
        return CachedPages(self.store)

    def __repr__(self) -> str:
        """Its size, and how much of it is in use."""
        return (
            f"PagePool(num_pages={self.num_pages}, num_free_pages={self.store.num_free_pages}, "
            f"num_cached_pages={self.store.num_cached_pages}, enable_caching={self.enable_caching})"
        )

    # Saving.

    def snapshot(self) -> Snapshot:
        """All of the pool as a dict of NumPy arrays without Python objects, for `restore`; `numpy.savez` saves it.

        Ref counts, the free queue in order, prefix entries with their hashes and kept tokens, shards and counters, and the
        configuration of the manager that caches in it, under a version and a checksum. A copy: 4 bytes a page, 4 more a free
        one, 24 more a cached one, plus 4 a kept token. IntegrityError where the pool is damaged, ArgumentError for page hashes
        of anything but ints, strings, bytes, None and tuples. O(num_pages), 0.3 s for a million cached ones.
        """
        return save(self.store, self.configuration)

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> "PagePool":
        """The pool that `snapshot` was taken of: a dict as that returned it, or what `numpy.load` returns.

        Held pages are held again, until their holders or `release_all_held` give them back. Prefix entries hit for a manager
        with the same key: give it a `hash_seed` where the process is another. `CacheManager` refuses the pool, naming what
        differs, if another algorithm, seed or page size, or other groups cached in it (see `bind`). What the pages hold on
        the device is the engine's to bring back.
        SnapshotError, a ValueError, where the snapshot is damaged, of another version, or something else. O(num_pages).

        >>> pool = PagePool(8, enable_caching=True)
        >>> pages = pool.get_new_pages(3)
        >>> PagePool.restore(pool.snapshot()).free_page_ids_in_order().tolist()
        [4, 5, 6, 7]
        """
        store, configuration = load(snapshot)
        pool = cls.__new__(cls)
        pool._start(store)
        pool.configuration = configuration
        return pool

    def bind(self, configuration: Configuration) -> None:
        """Note with what pages will be cached. `CacheManager` does; the pool is bound to it, and so are its snapshots, as long
        as pages are cached.

        ArgumentError, and nothing changed, if the pool's cached pages are bound to another one: it names the first difference.
        A pool that no manager used, or one from a snapshot of version 1, is bound to nothing yet. O(configuration).
        """
        num_pages = self.store.num_cached_pages
        bound = self.configuration if num_pages and self.configuration else configuration
        for name in dict.fromkeys((*configuration, *bound)):
            got, allowed = configuration.get(name), bound.get(name)
            if got != allowed:
                raise ArgumentError(
                    f"page_pool: {name}: got {got!r}, allowed: {allowed!r}, with which its {num_pages} cached pages were "
                    "cached, or a pool without cached pages"
                )
        self.configuration = dict(configuration)

    def release_all_held(self) -> int:
        """Give back every reference of a restored pool whose holders are gone; the pages go to the back of the free queue in
        order of their ids and keep their prefix entries. Returns how many pages. O(num_pages).

        Only right after `restore`: ArgumentError, and nothing changed, for a pool that was not restored, and as soon as a page
        was taken or hit since, for then a manager, a batch or a caller may hold it.

        >>> pool = PagePool(8, enable_caching=True)
        >>> pages = pool.get_new_pages(3)
        >>> restored = PagePool.restore(pool.snapshot())
        >>> restored.release_all_held(), restored.get_num_free_pages(), restored.reset_prefix_cache()
        (3, 7, True)
        """
        num_pages = self.store.give_back_restored()
        if num_pages is None:
            raise ArgumentError(
                "release_all_held: got a pool that was not restored, or was used since, allowed: one as restored"
            )
        return num_pages

    # Taking and giving back.

    def get_new_pages(
        self, num_pages: int, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> list[CachePage]:
        """Take `num_pages` pages from the front of the free queue; their prefix entries are dropped, their ref counts are 1.

        With a hint and a `data_parallel_size` that divides the pool: only from that shard's range of ids, in queue order.
        OutOfPagesError, a ValueError, if there are too few. O(num_pages).
        """
        return self.store.pages(self._take(num_pages, dp_shard_hint, data_parallel_size))

    def get_new_page_ids(
        self, num_pages: int, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> PageIdArray:
        """`get_new_pages` as an int32 array ``[num_pages]``."""
        return self._take(num_pages, dp_shard_hint, data_parallel_size).to_array()

    def _take(self, num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> PageIds:
        shard = self.find_shard(dp_shard_hint, data_parallel_size)
        return self.store.take(num_pages) if shard is None else self.store.take(num_pages, *shard)

    def free_pages(self, ordered_pages: Iterable[CachePage]) -> None:
        """Give back one reference to each page. Those left with none go to the back of the free queue, in the given order,
        and keep their prefix entry until they are handed out again.

        Null pages are passed over. DoubleFreeError if a page would be freed more often than it is held, PageIdError for pages
        of another pool; nothing is freed then. O(pages).
        """
        self.store.give_back(self.store.ids_of_pages(ordered_pages))

    def free_page_ids(self, ordered_page_ids: PageIdArray | Sequence[int]) -> None:
        """`free_pages` by id: an int32 array or a list."""
        self.store.give_back(_require_ids(ordered_page_ids))

    def touch(self, pages: Iterable[Iterable[CachePage]]) -> None:
        """Take one reference more to each page of each group; a free page leaves the free queue. Null pages are passed over.

        PageIdError, and nothing touched, for pages of another pool or out of the queue without a holder. O(pages).
        """
        try:
            touched = [page for group in pages for page in group]
        except TypeError:
            raise ArgumentTypeError("pages: got no list for each group, allowed: lists of CachePage") from None
        self.store.touch(self.store.ids_of_pages(touched))

    def touch_page_ids(self, page_ids: PageIdArray | Sequence[int]) -> None:
        """`touch` by id: an int32 array or a list."""
        self.store.touch(_require_ids(page_ids))

    # Prefix caching.

    def get_cached_page(
        self,
        page_hash: PageHash,
        kv_cache_group_ids: Sequence[int],
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> list[CachePage] | None:
        """One page for each group that has the content of `page_hash`, or None if any group lacks it.

        Of several pages with equal content the one cached first; with a hint, the first in that shard. Changes nothing.
        O(groups), with a hint O(groups x shards) once pages were taken for that `data_parallel_size`, and before O(groups x
        pages of equal content).
        """
        bounds = self.find_shard_bounds(dp_shard_hint, data_parallel_size)
        page_hash = checked_hash(page_hash)
        if is_own_key(self.store, page_hash):
            return self.store.find_pages(page_hash.hash_value, kv_cache_group_ids, *bounds)
        page_ids = find_page_ids(self.store, page_hash, kv_cache_group_ids, bounds)
        return None if page_ids is None else [self.store.page(page_id) for page_id in page_ids]

    def get_cached_page_ids(
        self,
        page_hash: PageHash,
        kv_cache_group_ids: Sequence[int],
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> PageIdArray | None:
        """`get_cached_page` as an int32 array ``[groups]``, or None."""
        bounds = self.find_shard_bounds(dp_shard_hint, data_parallel_size)
        page_ids = find_page_ids(self.store, page_hash, kv_cache_group_ids, bounds)
        return None if page_ids is None else np.array(page_ids, dtype=np.int32)

    def find_page_id(self, page_hash: PageHash, group_id: int, start: int = 0, stop: int | None = None) -> int | None:
        """The page cached first under `page_hash` in a group, with an id in ``[start, stop)``, or None.

        A hash that carries token ids hits only a page whose token ids are equal.
        """
        return find_page_id(self.store, page_hash, group_id, start, stop)

    def cache_full_pages(
        self,
        request: Any,
        pages: Sequence[CachePage],
        page_hashes: list[PageHash],
        num_cached_pages: int,
        num_full_pages: int,
        page_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Enter pages ``pages[num_cached_pages:num_full_pages]`` of a request in the prefix index.

        `page_hashes` are the request's from its first page on. Those that it lacks are computed with the builtin `hash` from
        ``request.all_token_ids`` and appended to it. Null pages are passed over. PageHashError, and nothing entered, if a page
        has a hash already. O(num_full_pages - num_cached_pages).
        """
        bounds = _bounds_of(num_cached_pages, num_full_pages)
        ids = self.store.ids_of_pages(require_slice("pages", pages, *bounds))
        enter_pages(self.store, ids, request, page_hashes, *bounds, page_size, kv_cache_group_id)

    def cache_full_page_ids(
        self,
        request: Any,
        page_ids: PageIdArray | Sequence[int],
        page_hashes: list[PageHash],
        num_cached_pages: int,
        num_full_pages: int,
        page_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """`cache_full_pages` by id: an int32 array or a list."""
        bounds = _bounds_of(num_cached_pages, num_full_pages)
        ids = PageIds(require_slice("page_ids", page_ids, *bounds))
        enter_pages(self.store, ids, request, page_hashes, *bounds, page_size, kv_cache_group_id)

    def forget_evicted_names(self) -> None:
        """Drop the hash objects of evicted pages, once there are more of them than the pool could need. Amortised O(1)."""
        forget_evicted_names(self.store)

    def probe(self, page_hashes: Iterable[PageHash], kv_cache_group_ids: Sequence[int] = (0,)) -> PageProbe:
        """How many of the pages, from the first on, hit in every group, and which group missed. Changes nothing."""
        return PageProbe(*count_hits(self.store, page_hashes, kv_cache_group_ids))

    def evict_pages(self, page_ids: PageIdArray | Sequence[int]) -> int:
        """Drop the prefix entries of pages, free or held; the pages themselves stay where they are. Returns how many had one.

        After a failed load: let ``num_computed_tokens`` of each request that holds the pages go back before the first of them
        (or `RunningBatch.trim` its row, and append the tokens again). They are entered again, and those behind them that lost
        their entry too, as the tokens are allocated again; not before.

        PageIdError, and nothing dropped, for an id outside the pool or the null page. O(pages).
        """
        ids = PageIds(_require_ids(page_ids))
        if 0 in ids:
            raise PageIdError("page 0, the null page, is never cached")
        return self.store.drop(ids)

    def _maybe_evict_cached_page(self, page: CachePage) -> bool:
        """Drop the prefix entry of a page, if it has one, and say whether it had."""
        return self.store.drop(self.store.ids_of_pages([page])) > 0

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, after new weights for instance. False, and nothing changed, while a page is held.

        The free queue keeps its order. O(num_pages).
        """
        num_held_pages = self.store.drop_all()
        if num_held_pages:
            logger.warning("prefix cache not reset: %d pages are held", num_held_pages)
            return False
        forget_names(self.store)
        logger.info("prefix cache reset")
        return True

    # Looking.

    def get_num_free_pages(self) -> int:
        """Number of pages in the free queue."""
        return self.store.num_free_pages

    def get_usage(self) -> float:
        """Share of the pages that are not free, the null page counted as used: 0.0 to 1.0."""
        return 1.0 - self.store.num_free_pages / self.num_pages

    def ref_counts(self) -> PageIdArray:
        """Ref counts of all pages: int32 array ``[num_pages]``, a copy."""
        counts: PageIdArray = self.store.ref_counts()
        return counts

    def free_page_ids_in_order(self) -> PageIdArray:
        """The free queue, the page that is evicted first in front: int32 array, a copy."""
        return self.store.free_ids().to_array()

    @property
    def stats(self) -> PagePoolStats:
        """Counters since the pool was made."""
        return PagePoolStats(*self.store.counters)

    def check(self) -> None:
        """Walk the free queue, the ref counts, the shards and the prefix index both ways. IntegrityError names the first page
        or slot that is wrong, with all its numbers. O(num_pages).
        """
        self.store.check()

    # Data-parallel shards.

    def find_shard(self, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int] | None:
        """The shard that a hint means, modulo the size, and that size; None where the pool is not divided. The first time that
        pages are taken for a size builds the shards' queues in O(num_pages + pages of equal content x shards); they are kept
        from then on.
        """
        pages_per_shard = pages_per_dp_shard(self.num_pages, data_parallel_size)
        hint = None if dp_shard_hint is None else require_int("dp_shard_hint", dp_shard_hint)
        if hint is None or pages_per_shard is None:
            return None
        num_shards = self.num_pages // pages_per_shard
        return hint % num_shards, num_shards

    def find_shard_bounds(self, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int | None]:
        """Half-open range of the page ids that may hit under a hint."""
        shard = self.find_shard(dp_shard_hint, data_parallel_size)
        if shard is None:
            return 0, None
        shard_index, num_shards = shard
        return dp_shard_page_bounds(shard_index, self.num_pages // num_shards)


def _require_ids(page_ids: T) -> T:
    """ArgumentTypeError for None, of which the core makes no ids."""
    if page_ids is None:
        raise ArgumentTypeError("page ids: got None, allowed: a list or an array")
    return page_ids


def _bounds_of(num_cached_pages: int, num_full_pages: int) -> tuple[int, int]:
    return require_int("num_cached_pages", num_cached_pages, 0), require_int("num_full_pages", num_full_pages, 0)
