"""The pool of pages, its free queue and its page objects, as engines know them."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagepool._core import (
    CachePage,
    EntryJournal,
    HashChain,
    Lease,
    PageIds,
    PageStore,
    count_entries,
    count_leased,
    lease_pages,
    list_sizes,
)
from pagepool.arguments import as_list, require_flag, require_group_ids, require_int, require_list, require_slice
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, shown
from pagepool.hashing import PageHash, checked_hash, hash_next_pages
from pagepool.page_pool.integrity import check_store
from pagepool.page_pool.pages import FreeCachePageQueue, Pages, PrefixIndex, find_page_id, forget_names, is_own_key
from pagepool.specs import find_shard, find_shard_bounds
from pagepool.stats import PagePoolStats, PoolStats

logger = logging.getLogger(__package__)

PageIdArray = npt.NDArray[np.int32]
AnyPageIds = Sequence[int] | npt.NDArray[np.integer[Any]]
EvictionPolicy = Literal["lru", "adaptive"]
Configuration = dict[str, int | str | None]
"""Settings by name. Managers that share cached pages must agree in all of them."""
Span = tuple[int, int, int]
"""The pages of a request to cache: the numbers of cached and of full pages, and their size in tokens."""


class PageProbe(NamedTuple):
    """The number of leading pages hit in every group, and the first group that misses (None: every page hits)."""

    num_hit_pages: int
    missed_group_id: int | None


class PagePool:
    """A fixed number of pages with their prefix entries, handed out least recently used first, or by another eviction policy.

    Page 0 is the null page, a placeholder that is never handed out, freed or counted. Construction is O(num_pages). A page
    takes 56 to 72 bytes (32 without caching), 24 (8) more with shards, 6 more after the first expectation, 10 more with
    adaptive eviction.

    A manager with several pools has a `PagePool` for each in `CacheManager.pools`. Its ids count from 0, its own null page, and
    its methods see only its own pages, but all pools share the prefix index. `stats`, `reset_prefix_cache`, `find_page_id` and
    `free_page_queue` raise ArgumentError there, and so does a `data_parallel_size` that does not divide the size of each pool.

    >>> pool = PagePool(8, enable_caching=True)
    >>> pages = pool.get_new_pages(3)
    >>> [page.page_id for page in pages], pool.get_num_free_pages()
    ([1, 2, 3], 4)
    >>> pool.free_pages(reversed(pages))
    >>> pool.free_page_ids_in_order().tolist()
    [4, 5, 6, 7, 3, 2, 1]
    """

    def __init__(self, num_pages: int, enable_caching: bool, *, eviction: EvictionPolicy = "lru") -> None:
        """`num_pages` counts the null page. Raise ArgumentError, a ValueError, unless it is a positive int. `eviction` is the
        policy that chooses the free pages to hand out, which lose their prefix entries: ``"lru"``, in the order of freeing, as
        always without caching, or ``"adaptive"``, which learns when pages are used again.
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, int | np.integer) or num_pages <= 0:
            raise ArgumentError(f"num_pages: got {shown(num_pages)}, allowed: a positive int")
        enable_caching = require_flag("enable_caching", enable_caching)
        self._start(PageStore(num_pages, enable_caching, eviction=eviction))

    def _start(self, store: PageStore, configuration: Configuration | None = None, bank: int = 0) -> None:
        """Set the attributes of the pool of a bank of `store`."""
        self.store = store
        self._bank = bank
        self.num_pages = store.count_pages(bank) + 1
        self.enable_caching = store.enable_caching
        self.eviction: str = "lru" if bank else store.eviction  # a policy serves the first pool alone
        self.pages = Pages(self.store, bank)
        self._queue = FreeCachePageQueue.of_store(self.store)
        self.configuration = configuration

    @classmethod
    def of_bank(cls, store: PageStore, bank: int, configuration: Configuration | None = None) -> "PagePool":
        """Return the pool of a bank of a store that has several. Its page ids count from 0, the null page."""
        pool = cls.__new__(cls)
        pool._start(store, configuration, bank)
        return pool

    def list_sizes(self) -> dict[str, int]:
        """Return the names of all pools of the store, with their numbers of pages, null pages included."""
        return {name: self.store.count_pages(bank) + 1 for bank, name in enumerate(self.store.bank_names)}

    def _records(self, page_ids: AnyPageIds | PageIds) -> PageIds:
        """Return the store's page ids for ids of this pool. Raise PageIdError for an id outside the pool."""
        return self.store.records_in_bank(_require_ids(page_ids), self._bank)

    def _ids(self, pages: PageIds) -> PageIdArray:
        """Return this pool's ids for page ids of the store."""
        return self.store.ids_in_banks(pages).to_array()

    def _find_bounds(self, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int | None]:
        """Return the range of the store's page ids that a look-up may find, half-open; None: no end."""
        first, last = self.store.bounds_of(self._bank)
        if dp_shard_hint is None and data_parallel_size is None:
            return first, last
        self.store.require_even(data_parallel_size)
        start, stop = find_shard_bounds(self.num_pages, dp_shard_hint, data_parallel_size)
        num_before = max(0, first - 1)
        return (first, last) if stop is None else (num_before + start, num_before + stop)

    # Views are made on demand, so that a pool without them has no reference cycle and is freed at once.

    @property
    def null_page(self) -> CachePage:
        """Page 0, the placeholder."""
        return self.store.page(0)

    @property
    def free_page_queue(self) -> FreeCachePageQueue:
        """The free pages in the order of eviction. Raise ArgumentError for one of several pools."""
        self.store.require_one_bank("free_page_queue")
        return self._queue

    @property
    def cached_page_hash_to_page(self) -> PrefixIndex:
        """A live view of the prefix index, which several pools share."""
        return PrefixIndex(self.store)

    def __repr__(self) -> str:
        """Return the size and use of the pool."""
        return (
            f"PagePool(num_pages={self.num_pages}, num_free_pages={self.get_num_free_pages()}, "
            f"num_cached_pages={self.count().num_cached_pages}, enable_caching={self.enable_caching}, "
            f"eviction={self.eviction!r})"
        )

    def bind(self, configuration: Configuration) -> None:
        """Bind cached pages to the configuration of a manager, until no page is cached. Raise ArgumentError, naming the first
        difference, if they are bound to another one. O(configuration).
        """
        num_pages = self.store.num_cached_pages
        bound = self.configuration if num_pages and self.configuration else configuration
        for name in dict.fromkeys((*configuration, *bound)):
            got, allowed = configuration.get(name), bound.get(name)
            if got != allowed:
                others = f"with which its {num_pages} cached pages were cached, or a pool without cached pages"
                raise ArgumentError(f"page_pool: {name}: got {got!r}, allowed: {allowed!r}, {others}")
        self.configuration = dict(configuration)

    # Taking and freeing.

    def get_new_pages(
        self, num_pages: int, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> list[CachePage]:
        """Take `num_pages` pages from the front of the free queue. They lose their prefix entries and have a ref count of 1.

        With a hint and a `data_parallel_size` dividing the pool, pages come only from this shard's range of ids, in queue
        order. Raise OutOfPagesError, a ValueError, if too few are free. O(num_pages); the first call for a size builds the
        queues of its shards, in O(pages of the pool + pages of equal content x shards).
        """
        return self.store.pages(self._take(num_pages, dp_shard_hint, data_parallel_size))

    def get_new_page_ids(
        self, num_pages: int, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> PageIdArray:
        """Like `get_new_pages`, but return an int32 array ``[num_pages]``."""
        return self._ids(self._take(num_pages, dp_shard_hint, data_parallel_size))

    def _take(self, num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> PageIds:
        self.store.require_even(data_parallel_size)
        shard, num_shards = find_shard(self.num_pages, dp_shard_hint, data_parallel_size) or (None, 0)
        return self.store.take(num_pages, shard, num_shards, self._bank)

    def free_pages(self, ordered_pages: Iterable[CachePage]) -> None:
        """Release one reference to each page, except null pages. O(pages).

        Pages without references go to the back of the free queue, in the given order, and keep their prefix entries until they
        are handed out again. Raise DoubleFreeError, without a change, if a page would be freed more often than held,
        PageIdError for pages of another pool.
        """
        self.store.give_back(self.store.ids_of_pages(ordered_pages))

    def free_page_ids(self, ordered_page_ids: AnyPageIds) -> None:
        """Like `free_pages`, but take ids: an int32 array or a list."""
        self.store.give_back(self._records(ordered_page_ids))

    def touch(self, pages: Iterable[Iterable[CachePage]]) -> None:
        """Take one more reference to each page of each group, except null pages. A free page leaves the free queue. O(pages).

        Raise PageIdError, without a change, for pages of another pool and for pages that are neither free nor held.
        """
        allowed = "a list of CachePage for each group"
        touched = [page for group in as_list("pages", pages, allowed) for page in as_list("pages", group, allowed)]
        self.store.touch(self.store.ids_of_pages(touched))

    def touch_page_ids(self, page_ids: AnyPageIds) -> None:
        """Like `touch`, but take ids: an int32 array or a list."""
        self.store.touch(self._records(page_ids))

    def lease(self, page_ids: AnyPageIds, *, seconds: float | None = None) -> Lease:
        """Keep pages from being handed out until the lease is released: held pages, such as the sources of a transfer, or free
        cached ones. A page listed twice is leased twice. With `seconds` the lease also ends by itself, and counts in the budget
        of these leases: see `CacheManager.lease`.

        Raise PageIdError, without a change, for the null page, ids outside the pool, and free pages that are not cached;
        LeaseBudgetError for too many pages, ArgumentError unless `seconds` are finite and above 0; ArgumentTypeError unless the
        ids are a list or array of ints. O(pages), and O(leases with an end) after one of these has ended; the first call
        O(num_pages).

        >>> pool = PagePool(8, enable_caching=True)
        >>> page_ids = pool.get_new_page_ids(2)
        >>> with pool.lease(page_ids) as lease:
        ...     pool.free_page_ids(page_ids)
        ...     pool.get_num_free_pages(), lease.page_ids
        (5, [1, 2])
        >>> pool.get_num_free_pages()
        7
        """
        return lease_pages(self.store, page_ids, self._bank, seconds)

    # Prefix caching.

    def get_cached_page(
        self,
        page_hash: PageHash,
        kv_cache_group_ids: Sequence[int],
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> list[CachePage] | None:
        """Return one page for each group with the content of `page_hash`, or None if any group lacks it.

        Among pages of equal content the first cached wins; with a hint, the first in that shard. O(groups). With a hint
        O(groups x shards) once pages were taken for that `data_parallel_size`, and O(groups x pages of equal content) before.
        """
        bounds = self._find_bounds(dp_shard_hint, data_parallel_size)
        page_hash = checked_hash(page_hash)
        if is_own_key(self.store, page_hash):
            return self.store.find_pages(page_hash.hash_value, kv_cache_group_ids, *bounds)
        page_ids = self._find_ids(page_hash, kv_cache_group_ids, bounds)
        return None if page_ids is None else self.store.pages(page_ids)

    def get_cached_page_ids(
        self,
        page_hash: PageHash,
        kv_cache_group_ids: Sequence[int],
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> PageIdArray | None:
        """Like `get_cached_page`, but return an int32 array ``[groups]`` or None."""
        bounds = self._find_bounds(dp_shard_hint, data_parallel_size)
        page_ids = self._find_ids(checked_hash(page_hash), kv_cache_group_ids, bounds)
        return None if page_ids is None else self._ids(page_ids)

    def _find_ids(self, page_hash: PageHash, group_ids: Sequence[int], bounds: tuple[int, int | None]) -> PageIds | None:
        """Return a page of each group with an id within these bounds; None if any group has none."""
        page_ids = []
        for group_id in require_group_ids(group_ids):
            page_id = find_page_id(self.store, page_hash, group_id, *bounds)
            if page_id is None:
                return None
            page_ids.append(page_id)
        return PageIds(page_ids)

    def find_page_id(self, page_hash: PageHash, group_id: int, start: int = 0, stop: int | None = None) -> int | None:
        """Return the page cached first under `page_hash` in a group, with an id in ``[start, stop)``, or None. A hash with
        token ids hits only a page with equal token ids. Raise ArgumentError for one of several pools; use `get_cached_page_ids`
        there.
        """
        self.store.require_one_bank("find_page_id")
        return find_page_id(self.store, checked_hash(page_hash), group_id, start, stop)

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
        """Cache ``pages[num_cached_pages:num_full_pages]`` of a request, except null pages.

        `page_hashes` are the request's hashes from its first page on. Missing ones are computed with the builtin `hash` from
        ``request.all_token_ids`` and appended. Raise PageHashError, without a change, if a page already has a hash. O(new
        pages).
        """
        span = _check_span(num_cached_pages, num_full_pages, page_size)
        ids = self.store.ids_of_pages(require_slice("pages", pages, *span[:2]))
        self._cache(ids, request, page_hashes, span, kv_cache_group_id)

    def cache_full_page_ids(
        self,
        request: Any,
        page_ids: AnyPageIds,
        page_hashes: list[PageHash],
        num_cached_pages: int,
        num_full_pages: int,
        page_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Like `cache_full_pages`, but take ids: an int32 array or a list."""
        span = _check_span(num_cached_pages, num_full_pages, page_size)
        ids = self._records(PageIds(require_slice("page_ids", page_ids, *span[:2])))
        self._cache(ids, request, page_hashes, span, kv_cache_group_id)

    def _cache(self, ids: PageIds, request: Any, page_hashes: list[PageHash], span: Span, group_id: int) -> None:
        """Cache the full pages of a request that are not cached yet."""
        num_cached_pages, num_full_pages, page_size = span
        if not isinstance(page_hashes, list):
            raise ArgumentTypeError(f"page_hashes: got {type(page_hashes).__name__}, allowed: a list of PageHash")
        if len(page_hashes) < num_cached_pages:
            allowed = f"at least the {shown(num_cached_pages)} of the cached pages"
            raise ArgumentError(f"page_hashes: got {len(page_hashes)}, allowed: {allowed}")
        if len(ids) != max(0, num_full_pages - num_cached_pages):
            raise ArgumentError(f"num_full_pages: got {shown(num_full_pages)}, allowed: at most the number of pages")
        is_complete = len(page_hashes) >= num_full_pages
        missing = [] if is_complete else hash_next_pages(hash, page_size, request, page_hashes, num_full_pages)
        first_place = max(0, num_cached_pages - 1)  # hash of the parent, which is cached already
        hashes = page_hashes[first_place : max(num_cached_pages, num_full_pages)] + missing
        is_wide = self.store.names.max_key >> 128 > 0
        chain = HashChain(page_size, bytes(32), False, "sha256") if is_wide else HashChain(page_size, bytes(16))
        for page_hash in list(map(checked_hash, hashes)):
            chain.append_key(self.store.names.key_of(page_hash))
        num_parents = num_cached_pages - first_place
        ids = PageIds.joined((PageIds([0] * num_parents), ids))
        self.store.enter_pages(ids, chain, num_parents, group_id, first_place=first_place)
        page_hashes.extend(missing)
        self.forget_evicted_names()

    def forget_evicted_names(self) -> None:
        """Drop the names of evicted pages once there are more names than the pool can need. Amortised O(1)."""
        if len(self.store.names) > 2 * EntryJournal(self.store).max_num_kept_keys + 1024:
            forget_names(self.store)

    def probe(self, page_hashes: Iterable[PageHash], kv_cache_group_ids: Sequence[int] = (0,)) -> PageProbe:
        """Count the leading pages hit in every group, and report the first group that misses."""
        group_ids = require_group_ids(kv_cache_group_ids)
        num_hit_pages = 0
        for page_hash in map(checked_hash, require_list("page_hashes", page_hashes, tuple)):
            for group_id in group_ids:
                if find_page_id(self.store, page_hash, group_id) is None:
                    return PageProbe(num_hit_pages, group_id)
            num_hit_pages += 1
        return PageProbe(num_hit_pages, None)

    def evict_pages(self, page_ids: AnyPageIds) -> int:
        """Drop the prefix entries of pages, and return their number. Holders keep their pages. O(pages).

        After a failed load, set ``num_computed_tokens`` of each request with such pages back to before the first of them (or
        `RunningBatch.trim` its row, and append the tokens again). These pages, and later ones without entries, are then cached
        again with their tokens. Raise PageIdError, without a change, for the null page or an id outside the pool.
        """
        ids = self._records(PageIds(list(page_ids) if isinstance(page_ids, set | frozenset) else _require_ids(page_ids)))
        if 0 in ids:
            raise PageIdError("page_ids: got page 0, the null page, allowed: pages that can be cached")
        return self.store.drop(ids)

    def _maybe_evict_cached_page(self, page: CachePage) -> bool:
        """Drop the prefix entry of a page. Return whether it had one."""
        return self.store.drop(self.store.ids_of_pages([page])) > 0

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, for example after loading new weights; the free queue keeps its order. Return False, without
        a change, while a page is held. O(num_pages).
        """
        self.store.require_one_bank("reset_prefix_cache of one pool, where CacheManager has one of all")
        return self.reset()

    def reset(self) -> bool:
        """Do `reset_prefix_cache`, in all pools of the store."""
        num_held_pages = self.store.drop_all()
        if num_held_pages:
            logger.warning("prefix cache not reset: %d pages are held", num_held_pages)
            return False
        forget_names(self.store)
        logger.info("prefix cache reset")
        return True

    # Inspection.

    def get_num_free_pages(self) -> int:
        """Return the number of pages in the free queue."""
        return self.store.count_free(self._bank)

    def get_usage(self) -> float:
        """Return the share of pages in use, 0.0 to 1.0. The null page counts as used."""
        return 1.0 - self.get_num_free_pages() / list_sizes(self.store)[self._bank]

    def ref_counts(self) -> PageIdArray:
        """Return a copy of the ref counts of all pages: an int32 array ``[num_pages]``."""
        return self.store.ref_counts(self._bank)

    def free_page_ids_in_order(self) -> PageIdArray:
        """Return a copy of the free queue as an int32 array, starting with the next page to evict."""
        return self._ids(self.store.free_ids(self._bank))

    @property
    def stats(self) -> PagePoolStats:
        """Counters since the pool was made. Raise ArgumentError for one of several: see `CacheManager.stats`."""
        self.store.require_one_bank("stats of one pool, where CacheManager.stats has them by pool")
        return PagePoolStats(**self.store.counters)

    def count(self) -> PoolStats:
        """Return the state and counters of the pool."""
        num_pages, num_leased = list_sizes(self.store)[self._bank] - 1, count_leased(self.store)[self._bank]
        num_free = self.get_num_free_pages()
        num_cached, num_allocated, num_evicted, num_lost, num_refusals, num_passed = count_entries(self.store, self._bank)
        return PoolStats(
            num_pages,
            num_free,
            num_pages - num_free,
            num_cached,
            num_leased,
            num_allocated,
            num_evicted,
            num_lost_hit_tokens=num_lost,
            num_refusals=num_refusals,
            num_passed_checkpoints=num_passed,
        )

    def check(self) -> None:
        """Raise IntegrityError, with all numbers of the first wrong page or slot, if the pool is inconsistent. O(num_pages)."""
        check_store(self.store)


def _check_span(num_cached_pages: int, num_full_pages: int, page_size: int) -> Span:
    return (
        require_int("num_cached_pages", num_cached_pages, 0),
        require_int("num_full_pages", num_full_pages, 0),
        require_int("page_size", page_size, 1),
    )


def _require_ids(page_ids: AnyPageIds | PageIds) -> AnyPageIds | PageIds:
    if page_ids is None:
        raise ArgumentTypeError("page_ids: got None, allowed: a list or an array")
    return page_ids


def require_pool(page_pool: Any) -> None:
    """Raise ArgumentTypeError unless a value is a pool."""
    if not isinstance(page_pool, PagePool):
        raise ArgumentTypeError(f"page_pool: got {type(page_pool).__name__}, allowed: PagePool, or None")


def choose_pool(
    page_pool: PagePool | None, num_pages: int, enable_caching: bool, eviction: EvictionPolicy | None = None
) -> PagePool:
    """Return `page_pool`, or for None a new pool. Raise ArgumentError for a pool of another size or with other options."""
    if page_pool is None:
        return PagePool(num_pages, enable_caching, eviction="lru" if eviction is None else eviction)
    require_pool(page_pool)
    if len(page_pool.list_sizes()) > 1:
        raise ArgumentError(f"page_pool: got pools {page_pool.list_sizes()}, allowed: one pool of {shown(num_pages)} pages")
    require_eviction(page_pool, eviction)
    if (page_pool.num_pages, page_pool.enable_caching) != (num_pages, enable_caching):
        got = f"{page_pool.num_pages} pages, caching {page_pool.enable_caching}"
        raise ArgumentError(f"page_pool: got {got}, allowed: {shown(num_pages)} pages, caching {enable_caching}")
    return page_pool


def require_eviction(page_pool: PagePool, eviction: str | None) -> None:
    """Raise ArgumentError unless `eviction` is None or the policy of an existing pool, ArgumentTypeError for other types."""
    if eviction is not None and not isinstance(eviction, str):
        raise ArgumentTypeError(f"eviction: got {type(eviction).__name__}, allowed: a string, or None")
    if eviction is not None and eviction != page_pool.store.eviction:
        raise ArgumentError(
            f"eviction: got {shown(eviction)}, allowed with page_pool: None, or its own, {page_pool.store.eviction!r}"
        )
