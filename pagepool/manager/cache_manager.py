"""The entry point for engines: look-ups of prefixes, slots for tokens, and freeing, request by request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagepool._core import QueryCounter, check_holders, lists_of
from pagepool.arguments import MAX_SIZE, has_status, id_of, read_count, require_flag, require_int, require_share
from pagepool.coordinator import ANY_PAGE, CacheCoordinator, get_kv_cache_coordinator
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError, count_of, shown
from pagepool.forking import MANAGERS, make_lock
from pagepool.hashing.algorithms import HashAlgorithm, make_page_hasher
from pagepool.hashing.request_hashes import RequestPageHashes
from pagepool.manager.cache_pages import CachePages
from pagepool.manager.lookups import PrefixLookups, PrefixProbe
from pagepool.manager.reporting import ReportedPages
from pagepool.manager.slots import ANYWHERE, Placement, SlotAllocator
from pagepool.manager.tiers import HostTier
from pagepool.page_pool import PagePool
from pagepool.request import EngineRequestStatus, Request
from pagepool.specs import CacheGroupSpec, check_groups, usable_pages_count
from pagepool.stats import CacheStats, QueryCounts, TimeHistogram

if TYPE_CHECKING:
    from pagepool.events import EventSource

__all__ = ["CacheManager"]

ZERO = 0
"""The default of a count. `is` tells this int from zeros of other types."""


class CacheManager(ReportedPages):
    """Allocates pages to requests and finds prefixes that are already cached.

    A manager is made for one owner; calls from several threads are serialised. A call interrupted by an exception, including
    ``KeyboardInterrupt``, loses no page: `free` releases what the request holds.

    `num_pages` counts the null page. Without groups prefix caching is off. `hash_algo` is ``"siphash128"`` (keyed with a secret
    of the process), ``"sha256"`` (the same in every process), ``"sha256_cbor"`` (vLLM's: see docs/engines.md), or a callable
    such as the builtin `hash`. `hash_seed`, which must not be empty, or ``PYTHONHASHSEED`` makes a keyed algorithm
    deterministic. `keep_token_ids` keeps the tokens of cached pages in their hashes, at 4 bytes a token. `page_pool` is an
    existing pool, such as one from `PagePool.restore`. Its cached pages hit; a pool is refused if its pages were cached with
    another seed, algorithm or other groups. `max_pinned_share` of the pages, 0 to 1, may be pinned (see `pin`). A manager
    cannot be pickled or copied; `PagePool.snapshot` saves its pages.

    >>> from pagepool import CacheGroupSpec, EngineRequest, FullAttentionSpec
    >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
    >>> first = EngineRequest("first", [1, 2, 3, 4, 5, 6])
    >>> manager.allocate_slots(first, num_new_tokens=6).get_page_ids()
    ([1, 2],)
    >>> second = EngineRequest("second", [1, 2, 3, 4, 9])
    >>> hits, num_hit_tokens = manager.get_computed_pages(second)
    >>> hits.get_page_ids(), num_hit_tokens
    (([1],), 4)
    >>> manager.allocate_slots(second, 1, num_hit_tokens, hits).get_page_ids()
    ([3],)
    >>> manager.free(first); manager.free(second)
    """

    def __init__(
        self,
        num_pages: int,
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        *,
        hash_algo: HashAlgorithm = "siphash128",
        hash_seed: int | str | bytes | None = None,
        keep_token_ids: bool = False,
        page_pool: PagePool | None = None,
        eviction: str | None = None,
        ghost_size: float | None = None,
        max_pinned_share: float = 0.2,
        host_tier: HostTier | None = None,
    ) -> None:
        """`max_model_len` is in tokens. ArgumentError for values out of range and for combinations that are not supported."""
        if not isinstance(kv_cache_groups, Sequence):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(kv_cache_groups).__name__}, allowed: a list of CacheGroupSpec")
        check_groups(kv_cache_groups)
        self.kv_cache_groups = kv_cache_groups
        self.num_kv_cache_groups = len(kv_cache_groups)
        self.max_model_len = require_int("max_model_len", max_model_len, 1, MAX_SIZE)
        max_pinned_share = require_share("max_pinned_share", max_pinned_share)
        keep_token_ids = require_flag("keep_token_ids", keep_token_ids)
        self.enable_caching = require_flag("enable_caching", enable_caching) and len(kv_cache_groups) > 0
        self.use_eagle = require_flag("use_eagle", use_eagle)
        if host_tier is not None and not isinstance(host_tier, HostTier):
            raise ArgumentTypeError(f"host_tier: got {type(host_tier).__name__}, allowed: HostTier, or None")
        if page_pool is None:
            eviction = "lru" if eviction is None else eviction
            page_pool = PagePool(num_pages, self.enable_caching, eviction=eviction, ghost_size=ghost_size)
        elif isinstance(page_pool, PagePool):
            _require_eviction(page_pool, eviction, ghost_size)
        self.coordinator: CacheCoordinator = get_kv_cache_coordinator(
            num_pages, kv_cache_groups, self.max_model_len, self.use_eagle, self.enable_caching, page_pool
        )
        self.page_pool = self.coordinator.page_pool
        self.num_pages = self.page_pool.num_pages
        self.max_num_pinned_pages = int(max_pinned_share * (self.num_pages - 1))
        self.page_size = self.coordinator.single_type_managers[0].page_size if self.enable_caching else None
        self._store = self.page_pool.store
        self.hasher = make_page_hasher(hash_algo, self.coordinator.hash_page_size, hash_seed)
        self.hasher.keep_token_ids = keep_token_ids
        if self.enable_caching:
            if not keep_token_ids:
                _require_kept_tokens(self._store.num_kept_token_ids, self.coordinator.max_cached_page_size)
            self.page_pool.bind({**self.hasher.describe(), **self.coordinator.describe()})
        if keep_token_ids and self.enable_caching:
            self._store.keep_token_ids(self.coordinator.max_cached_page_size)
        self._lookups = PrefixLookups(self.coordinator, self.hasher, self.enable_caching, self.use_eagle)
        self._slots = SlotAllocator(self.coordinator, self._lookups, len(kv_cache_groups), self.enable_caching)
        self._lock = make_lock(self, "_lock", MANAGERS)  # reentrant: a request's attributes and finalizers may call back
        self._requests = self.coordinator.requests
        self.event_source: EventSource | None = None
        self.query_counters = self._lookups.counters
        self._no_ids, self._leases = self._slots.no_ids, {}
        if host_tier is not None:
            host_tier.bind(self._store)
        self.host_tier = host_tier

    def __repr__(self) -> str:
        """The sizes, and the use of the pool."""
        return (
            f"CacheManager(num_pages={self.num_pages}, num_free_pages={self._store.num_free_pages}, "
            f"num_cached_pages={self._store.num_cached_pages}, num_requests={len(self._requests)}, "
            f"num_kv_cache_groups={self.num_kv_cache_groups}, max_model_len={self.max_model_len}, "
            f"enable_caching={self.enable_caching}, eviction={self.page_pool.eviction!r})"
        )

    @property
    def usage(self) -> float:
        """The share of pages that are not free, 0.0 to 1.0. The null page counts as used."""
        return self.page_pool.get_usage()

    @property
    def req_to_page_hashes(self) -> RequestPageHashes:
        """A live, read-only view of the hashes of each request's pages, by request id."""
        return RequestPageHashes(self.hasher, self._lookups.hashes)

    # Prefix look-up.

    def get_computed_pages(
        self,
        request: Request,
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        num_reserved_pages: int = 0,
    ) -> tuple[CachePages, int]:
        """Return the longest cached prefix of a request, in full pages, and its length in tokens.

        The length is at most ``num_tokens - 1``: one token is left to compute. Nothing hits when caching is off or the request
        asks for ``prompt_logprobs``. With eagle the last page of the hit is dropped; with a hint only pages of that shard hit.
        The call takes no references: pass the pages to `allocate_slots` before any other allocation; when that admits the
        request, `stats` counts the look-up. Pages that only a host tier has get pages of the pool, to be loaded by the next
        `take_transfers`; if too few are free beside `num_reserved_pages`, what the pool has is returned, and `allocate_slots`
        returns None until the next look-up. O(pages); O(1) for a request with one group of full attention that
        `allocate_slots` has refused, until a hit page gets a new holder or another page of the request is cached.
        """
        query = self._lookups.read_query(request)
        if query is None:
            return self.create_empty_page_list(), 0
        num_queried_tokens, is_preempted = query
        num_reserved = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        ids = ANY_PAGE
        if dp_shard_hint is not None or data_parallel_size is not None:
            ids = self.page_pool.find_shard_bounds(dp_shard_hint, data_parallel_size)
        with self._lock:
            pages, num_tokens = self._lookups.find(request, num_queried_tokens, is_preempted, ids, num_reserved)
        return CachePages(pages, self._store), num_tokens

    def probe(self, request: Request) -> PrefixProbe:
        """Report what `get_computed_pages` would find, and why not more. Counters and stored hashes do not change."""
        return self._lookups.probe(request)

    # Slots.

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: CachePages | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_pages: bool = False,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        *,
        num_external_computed_tokens: int = 0,
        num_reserved_pages: int = 0,
    ) -> CachePages | None:
        """Allocate slots for the next tokens of a request and return the new pages; None if too few pages are free.

        The request has ``num_computed_tokens`` computed tokens. Behind these come: `num_new_computed_tokens` in
        `new_computed_pages`, the hits of `get_computed_pages`, if the request holds no page yet;
        `num_external_computed_tokens` that a transfer will fill; `num_new_tokens` to compute now; and slots for
        `num_lookahead_tokens` drafts, up to `max_model_len`. Pages that are filled by known tokens other than drafts enter the
        prefix index, unless `delay_cache_pages` (then call `commit_external` or `cache_pages` later). If the step does not run,
        `free` with `num_computed_tokens` drops those entries. Pages that have left an attention window are freed first, even if
        None is returned.

        With `data_parallel_size` > 1 new pages come from the shard of the request's pages, else from the hinted shard. If that
        shard has too few, the hits are marked as recently used and None is returned. `num_reserved_pages` free pages are left
        for others (a watermark for admission).

        ArgumentError, and no change, for 0 new tokens, for more tokens than `max_model_len`, and for computed tokens that
        cannot be: beyond the hits of a request that holds nothing (a preempted request starts at 0 again), or beyond the slots
        of one that does. The state of a state group cannot go back: free a request whose ``num_computed_tokens`` decreases, or
        restore its state. Amortised O(new pages).
        """
        try:
            num_computed_tokens = request.num_computed_tokens
            # A plain int and not negative if all three are.
            counts = num_new_tokens | num_lookahead_tokens | num_computed_tokens
            is_plain = type(counts) is int and counts >= 0 and num_new_tokens
            held = self._requests.get(request.request_id)
        except (AttributeError, OverflowError, TypeError):
            is_plain = False
        if is_plain and num_new_computed_tokens is num_external_computed_tokens is ZERO:
            num_tokens = num_computed_tokens + num_new_tokens
        else:
            num_new_tokens, num_external_computed_tokens, num_new_computed_tokens, num_lookahead_tokens = _read_num_tokens(
                num_new_tokens, num_external_computed_tokens, num_new_computed_tokens, num_lookahead_tokens
            )
            num_computed_tokens = read_count(request, "num_computed_tokens")
            held = self._requests.get(id_of(request))
            num_tokens = num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens + num_new_tokens
        if (
            held is not None
            and new_computed_pages is None
            and not num_new_computed_tokens
            and held.needs_nothing(num_computed_tokens, num_tokens, num_tokens + num_lookahead_tokens)
        ):
            return CachePages(self._no_ids, self._store)
        if num_tokens > self.max_model_len:
            raise ArgumentError(
                f"request {shown(request.request_id)}: got {shown(num_tokens)} tokens, allowed: {self.max_model_len}"
            )
        num_reserved_pages = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        is_delayed = delay_cache_pages is not False and require_flag("delay_cache_pages", delay_cache_pages)
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        placement = ANYWHERE
        if dp_shard_hint is not None or data_parallel_size is not None or num_reserved_pages:
            placement = Placement(dp_shard_hint, data_parallel_size, num_reserved_pages)
        with self._lock:
            hits = self._slots.get_hits(request, new_computed_pages)
            if held is None or num_new_computed_tokens or num_computed_tokens > held.num_room_tokens:
                self._slots.check_computed(request, num_computed_tokens, num_new_computed_tokens, hits)
            if data_parallel_size is None and self._lookups.is_refused_still(request, hits, num_slots, num_reserved_pages):
                return None
            new_ids = self._slots.allocate(
                request,
                num_computed_tokens,
                hits,
                num_slots,
                0 if is_delayed or not self.enable_caching else min(num_tokens, read_count(request, "num_tokens")),
                placement,
            )
        return None if new_ids is None else CachePages(new_ids, self._store)

    def require_capacity(self, num_tokens: int) -> None:
        """Raise RequestTooLargeError if a request of `num_tokens` tokens does not fit even in an empty pool, without pins.

        Call this at admission: `allocate_slots` always returns None for such a request. O(groups).
        """
        num_tokens = min(require_int("num_tokens", num_tokens, 0), self.max_model_len)
        num_pages = sum(manager.get_min_num_pages(num_tokens) for manager in self.coordinator.single_type_managers)
        if num_pages > usable_pages_count(self.num_pages):
            needed = f"a request of {count_of(num_tokens, 'token')} needs {count_of(num_pages, 'page')}"
            raise RequestTooLargeError(f"{needed}, the pool has {usable_pages_count(self.num_pages):,}")

    # The prefix cache.

    def cache_pages(self, request: Request, num_computed_tokens: int) -> None:
        """Enter the pages filled by the first `num_computed_tokens` tokens in the prefix index, after a delayed allocation.

        Does nothing without caching. ArgumentError if the request does not hold the pages. O(new full pages).
        """
        if not self.enable_caching:
            return
        num_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        with self._lock:
            held = self._requests.get(id_of(request))
            if held is None:
                raise ArgumentError(f"request {shown(request.request_id)} holds no pages")
            if num_tokens > held.num_room_tokens:
                raise ArgumentError(f"num_computed_tokens: got {shown(num_tokens)}, allowed: at most {held.num_room_tokens}")
            num_before = read_count(request, "num_computed_tokens")
            hashes = self._lookups.extend(request, num_tokens)
            held.rewind(num_before)
            if held.check_enterable(hashes.chain, num_tokens):
                self._slots.enter_pages(held, hashes, num_tokens)

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, for example after new weights. Returns False, without a change, while a page is held or
        pinned.
        """
        with self._lock:
            return self.page_pool.reset_prefix_cache()

    # Freeing.

    def free(self, request: Request, *, num_computed_tokens: int | None = None) -> None:
        """Free the pages of a request, the last first, so that ends of prefixes are evicted before their beginnings.

        Does nothing for a request that holds no pages. The hashes of the request stay for its return. O(pages).

        `num_computed_tokens` is for a request that was scheduled and did not run, because the step failed or the request was
        preempted: the number of its tokens that were computed, including hits. Pages that it entered in the prefix index with
        later tokens lose their entries, even if others hold them. Free the requests that have hit those pages as well.
        """
        if num_computed_tokens is not None:
            num_computed_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        with self._lock:
            self._slots.free(request, num_computed_tokens)
            if num_computed_tokens is not None:
                self.page_pool.forget_evicted_names()

    def free_page_hashes(self, request: Request) -> None:
        """Drop the hashes of a finished request.

        Not for a preempted request that will return: one with images and without features would no longer hit its own pages.
        """
        with self._lock:
            self._lookups.hashes.pop(id_of(request), None)

    # Inspection.

    def stats(self) -> CacheStats:
        """Return what the cache holds and did; see `CacheStats`. O(1).

        The numbers are consistent unless other threads call the manager meanwhile.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=11, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 9])
        >>> _ = manager.get_computed_pages(request), manager.allocate_slots(request, 5)
        >>> stats = manager.stats()
        >>> stats.num_held_pages, stats.num_cached_pages, stats.usage, stats.queries.num_queried_tokens
        (2, 1, 0.2, 5)
        """
        return _collect_stats(self.page_pool, self.max_num_pinned_pages, self.query_counters, self.host_tier)

    def check(self) -> None:
        """Raise IntegrityError, naming the first wrong page, unless the pool and the references of requests are consistent.

        O(num_pages + pages held).
        """
        with self._lock:
            check_holders(self._store, list(self._requests.values()))
            self.page_pool.check()

    def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the page ids of a request, one list for each group, with 0, the null page, for skipped pages. O(pages)."""
        try:
            pages = self.coordinator.get_pages(request_id)
        except TypeError:
            raise ArgumentTypeError(f"request_id: got {type(request_id).__name__}, allowed: a string") from None
        return lists_of(pages)

    def get_num_common_prefix_pages(self, request: Request, num_scheduled_requests: int) -> list[int]:
        """Count, for each group, the leading pages of a running request that at least `num_scheduled_requests` requests hold.

        A holder counts even if it is not scheduled. The count is 0 without caching, and for groups that are not full attention.
        ArgumentError unless the request is RUNNING.
        """
        request_id = id_of(request)
        if not has_status(request, EngineRequestStatus.RUNNING):
            status = request.status if isinstance(request.status, EngineRequestStatus) else shown(request.status)
            raise ArgumentError(f"request {shown(request_id)}: status is {status}, allowed: RUNNING")
        num_scheduled_requests = require_int("num_scheduled_requests", num_scheduled_requests)
        return self.coordinator.get_num_common_prefix_pages(request_id, num_scheduled_requests)

    def create_empty_page_list(self) -> CachePages:
        """Return no pages, for the groups of this manager."""
        return CachePages(self._no_ids, self._store)


def _require_eviction(pool: PagePool, eviction: str | None, ghost_size: float | None) -> None:
    """Raise ArgumentError for a pool with another policy, and for a ghost size, which a pool has already."""
    if eviction is not None and not isinstance(eviction, str):
        raise ArgumentTypeError(f"eviction: got {type(eviction).__name__}, allowed: a string, or None")
    if ghost_size is not None or eviction not in (None, pool.eviction):
        raise ArgumentError(
            f"eviction: got {shown(eviction)} and ghost_size {shown(ghost_size)}, allowed with page_pool: None, or its own, "
            f"{pool.eviction!r}"
        )


def _require_kept_tokens(num_kept: int, num_needed: int) -> None:
    """Raise ArgumentError for a pool that keeps too few tokens of a page."""
    if 0 < num_kept < num_needed:
        raise ArgumentError(
            f"page_pool: got one that keeps {num_kept} token ids of a page, allowed for pages of {num_needed}: none, "
            f"at least {num_needed}, or any with keep_token_ids=True"
        )


def _collect_stats(
    pool: PagePool, max_num_pinned_pages: int, query_counters: Sequence[QueryCounter], host_tier: HostTier | None
) -> CacheStats:
    store, totals = pool.store, pool.stats
    queries, preempted_queries = (QueryCounts(*counter.counts) for counter in query_counters)
    num_pages, num_free_pages = pool.num_pages - 1, store.num_free_pages
    num_held_pages = num_pages - num_free_pages
    lifetime, idle_before_eviction, reuse_gap = (TimeHistogram.of(*counts) for counts in store.residency)
    num_hit_pages, num_lru_hit_pages = store.estimated_hits or (None, None)
    return CacheStats(
        num_pages=num_pages,
        num_free_pages=num_free_pages,
        num_held_pages=num_held_pages,
        num_cached_pages=store.num_cached_pages,
        num_pinned_pages=store.num_pinned_pages,
        max_num_pinned_pages=max_num_pinned_pages,
        usage=num_held_pages / num_pages if num_pages else 0.0,
        queries=queries,
        preempted_queries=preempted_queries,
        num_allocated_pages=totals.num_allocated_pages,
        num_freed_pages=totals.num_freed_pages,
        num_evicted_pages=totals.num_evicted_pages,
        lifetime=lifetime,
        idle_before_eviction=idle_before_eviction,
        reuse_gap=reuse_gap,
        num_hit_pages=num_hit_pages,
        num_lru_hit_pages=num_lru_hit_pages,
        host_tier=None if host_tier is None else host_tier.stats(),
    )


def _read_num_tokens(
    num_new_tokens: int, num_external_tokens: int, num_new_computed_tokens: int, num_lookahead_tokens: int
) -> tuple[int, int, int, int]:
    """Return the four as Python ints, since sums of NumPy ints wrap around. ArgumentError for a negative count or no work."""
    num_new_computed_tokens = require_int("num_new_computed_tokens", num_new_computed_tokens, 0)
    num_lookahead_tokens = require_int("num_lookahead_tokens", num_lookahead_tokens, 0)
    num_external_tokens = require_int("num_external_computed_tokens", num_external_tokens, 0)
    num_new_tokens = require_int("num_new_tokens", num_new_tokens, 0 if num_external_tokens else 1)
    return num_new_tokens, num_external_tokens, num_new_computed_tokens, num_lookahead_tokens
