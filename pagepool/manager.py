"""The entry point for engines: prefix look-ups, slots for tokens, and freeing, request by request.

Native methods of `CacheManager`, and the native work of others:

- ``core/holding/slots.pyx``: `allocate_slots`, `cache_pages`
- ``core/holding/request_pages.pyx``: `free`, `fork`, `commit_external`, `fail_external`
- ``core/holding/misses.pyx``: `probe`, `explain`
- ``core/tier/tier.pyx``: `get_computed_pages`, `complete`, `fail`, `find_wrong_token`
- ``core/tier/moves.pyx``: `take_moves`, `list_moves_in_flight`
- ``core/tier/sizes.pyx``: `resize`, `vacate`, `resume`
- ``core/rows/spans.pyx``: `lease`, `leases`, `expect`
- ``core/pool/sessions.pyx``: `expect_session`, `close_session`, `set_shares`
- ``core/checks/holders.pyx``: `check`
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from pagepool._core import (
    CachePages,
    FailedLoads,
    Lease,
    Moves,
    PageIds,
    PageStore,
    PageTier,
    RequestPages,
    SlotAllocator,
    TokenSpan,
    add_tier,
    check_holders,
    count_leasable_pages,
    count_leased,
    count_usable,
    end_transfers,
    estimate_hits,
    keep_departures,
    keep_token_ids,
    keep_whole_digests,
    limit_leases,
    link_storage,
    list_in_flight,
    list_leases,
    list_residency,
    list_sizes,
    load_prefix,
    rank_checkpoints,
    resize_banks,
    rewind_request,
    take_moves,
    term_of,
    unlink_storage,
)
from pagepool._version import __version__
from pagepool.arguments import (
    MAX_SIZE,
    has_status,
    read_count,
    require_choice,
    require_flag,
    require_int,
    require_name,
)
from pagepool.dump import FORMAT, Dump, GroupSettings, PoolSettings, Settings, TierSettings, to_plain
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError, count_of, shown
from pagepool.group_rules import kind_of, make_rules
from pagepool.hashing import KeyHolder, RecentKeys
from pagepool.hit_report import HitReport, explain_hit
from pagepool.holders import HeldPages, Preempted, refuse_held
from pagepool.media import Media, Medium, count_others
from pagepool.page_hashing import PageHashing
from pagepool.page_pool import PagePool
from pagepool.page_pool.pool import Configuration, EvictionPolicy, choose_pool
from pagepool.pools import (
    MIN_PAGES,
    link_checkpoints,
    list_unsaved,
    make_pools,
    read_host_sizes,
    read_new_sizes,
    read_sizes,
    set_sinks_aside,
)
from pagepool.request import EngineRequestStatus, Request
from pagepool.request_registry import RequestRegistry
from pagepool.retention import Retention
from pagepool.specs import CacheGroupSpec, check_groups, find_shard_bounds, usable_pages_count
from pagepool.stats import (
    CacheStats,
    ExpectationCounts,
    HostTierStats,
    PagePoolStats,
    PoolStats,
    QueryCounts,
    StoreStats,
    TimeHistogram,
)
from pagepool.stats.advice import Advisor

if TYPE_CHECKING:
    from pagepool.events import Event, EventSource

__all__ = ["CacheManager", "CachePages", "HostTier", "Lease", "PageHashing", "PrefixProbe", "Retention"]

NO_CONTEXT = nullcontext(0)  # for calls that cache nothing, and so need no context

logger = logging.getLogger(__name__)


class PrefixProbe(NamedTuple):
    """Result of `CacheManager.probe`: the numbers of tokens that would hit and were queried, and the reason why no more would
    hit.
    """

    num_hit_tokens: int
    num_queried_tokens: int
    reason: str


class HostTier:
    """Pages in host memory behind the pool of one manager: ``CacheManager(..., host_tier=HostTier(100_000))``.

    Pages evicted from the pool are saved here and can hit. See `CacheManager.take_moves`, `pagepool.host_pages` for jax and
    `pagepool.torch`.
    """

    def __init__(
        self,
        num_pages: int | Mapping[str, int],
        *,
        policy: Literal["write_back", "write_through"] = "write_back",
    ) -> None:
        """`num_pages` includes a null page. Behind several pools it maps the name of each pool to a size: pages of a pool are
        saved in its part of the tier, where ids count from 0.

        Pools of rings alone, which are never saved, may be left out.

        ``"write_back"`` saves a page when it is evicted from the pool, ``"write_through"`` in the step after the one that
        computed it, if the tier has at least twice as many pages as each pool: a smaller tier would evict the page before the
        pool does, so it writes back instead, with a warning. The tier evicts by LRU. Raise ArgumentError for other values.
        """
        require_choice("policy", policy, "write_back", "write_through")
        self.num_pages = (
            {name: require_int(f"num_pages[{name!r}]", size, MIN_PAGES, MAX_SIZE) for name, size in num_pages.items()}
            if isinstance(num_pages, Mapping) and num_pages
            else require_int("num_pages", num_pages, MIN_PAGES, MAX_SIZE)
        )
        self.policy = policy
        self._bound: tuple[PageTier, PageStore] | None = None
        self._sizes: dict[str, int] = {}  # by pool, once it is bound

    def bind(self, store: PageStore, unsaved_pools: Collection[str] = ()) -> None:
        """Put the tier behind the pools of a store; no page of `unsaved_pools` is ever saved. Raise ArgumentError if the tier
        is behind pools already, if the store has a tier already, or if the sizes are for other pools.
        """
        if self._bound is not None:
            raise ArgumentError("host_tier: got one that is behind another pool, allowed: a new one")
        names = store.bank_names
        first, *further = sizes = read_host_sizes(self.num_pages, names, unsaved_pools)
        nums = [(usable_pages_count(size), store.count_pages(bank)) for bank, size in enumerate(sizes)]
        saved = [bank for bank, name in enumerate(names) if name not in unsaved_pools]
        small = [bank for bank in saved if nums[bank][0] < 2 * nums[bank][1]]
        writes_through = self.policy == "write_through" and not small
        tier = PageTier(store, first, writes_through, [size - 1 for size in further])
        add_tier(store, tier)
        if self.policy == "write_through" and small:
            num_pages, num_device_pages = nums[small[0]]
            of_pool = f"{num_device_pages} of the pool {names[small[0]]!r}"
            logger.warning(
                "host_tier: %d pages are fewer than twice the %s, so it writes back, in place of write_through",
                num_pages,
                of_pool if len(sizes) > 1 else f"pool's {num_device_pages}",
            )
        self._bound, self._sizes = (tier, store), dict(zip(names, sizes, strict=True))

    def stats(self) -> HostTierStats:
        """Return the tier's counters. O(1)."""
        sizes = self.num_pages if isinstance(self.num_pages, Mapping) else {"": self.num_pages}
        num_pages = sum(map(usable_pages_count, (self._sizes or sizes).values()))
        if self._bound is None:
            return HostTierStats(num_pages, num_pages)
        tier, store = self._bound
        return HostTierStats(num_pages, **tier.counters(store))

    def count_pages(self, pool: str) -> int:
        """Return the number of pages, with the null page, behind the pool of this name."""
        if pool in self._sizes:
            return self._sizes[pool]
        return self.num_pages[pool] if isinstance(self.num_pages, Mapping) else self.num_pages

    def _count_pools(self) -> dict[str, PoolStats]:
        """Return the state and counters of the tier's pages behind each pool; none before `bind`. O(1)."""
        if self._bound is None:
            return {}
        tier, store = self._bound
        return {
            name: PoolStats(num_pages, num_free, num_pages - num_free, num_cached, 0, num_saved, num_evicted)
            for name, counts in zip(store.bank_names, tier.count_banks(store), strict=True)
            for num_pages, num_free, num_cached, num_saved, num_evicted in [counts]
        }


@runtime_checkable
class Storage(Protocol):
    """Storage behind the host tier, such as `pagepool.stores.StoreTier`."""

    def poll(self) -> None:
        """Copy the tier's pages that are due."""

    def stats(self) -> StoreStats:
        """Return state and counters."""


class CacheManager(KeyHolder, SlotAllocator):
    """The manager of a KV cache: allocates pages to requests and finds cached prefixes.

    From its first pages until it is freed, a request is one object: a call with another object of the same id raises
    ArgumentError.

    Calls from several threads are serialised. A call interrupted by an exception, including ``KeyboardInterrupt``, loses no
    page: `free` releases the request's pages. A manager cannot be pickled or copied. It belongs to the process that made it: in
    a forked process its calls raise IntegrityError, as do calls of its pools and batches, and of tables and chains.

    `num_pages` counts the null page. It is an int, the size of one pool for all groups, or a mapping with a size for each pool
    that groups name in `CacheGroupSpec.pool`: up to four pools, each with its own null page, ids from 0, free queue and
    evictions. A request gets pages from the pools of all groups, or none. ``pools`` maps names to `PagePool` objects, pools
    with attention first. `eviction` is the policy of the first pool, the others evict by ``"lru"``; reserved pages are pages of
    the first pool. ``page_pool`` is the only pool, and raises ArgumentError if there are several. Features that need one pool
    raise ArgumentError with their name: see docs/hybrids.md.

    Without groups prefix caching is off. `hashing` says how pages are hashed, and whether the model has a drafter; None means
    the defaults of `PageHashing`. `page_pool` is an existing pool, such as another manager's, whose cached pages can hit. It is
    refused if they were cached with another seed, algorithm or other groups, or if the names or sizes of its pools differ.

    Pages of sliding windows and chunks stay cached only where a request can resume: at the end of a prompt or of a long answer,
    where full attention hit but windows did not, at a request's `resume_at`, and at each multiple of `window_interval` tokens
    in a prompt. They also stay for up to `window_slack` tokens before these places. Each place is rounded down to whole pages
    of all groups. `retention` has both numbers, and the share of pages that leases may hold (None: the defaults of
    `Retention`); `pagepool plan` prints it for a model: see docs/windows.md. With ``Retention(windows="all")`` all window pages
    stay.

    With ``caches="computed"`` a page can hit once the request's ``num_computed_tokens`` cover it and then `allocate_slots` or
    `cache_pages` is called for the request, or once the request is freed. Tokens of a step that fails then never hit. By
    default, ``"scheduled"``, the call that gives tokens slots also caches their pages, and requests of the same step hit each
    other's pages: see docs/engines.md. Rows of a `RunningBatch` are cached by the same rule.

    `max_num_batched_tokens`, the largest number of tokens in a step, only matters to `require_capacity`; None lets a step
    compute a whole request.

    ``sink_page_ids`` has a tuple of page ids for each group: those that its learned sinks fill, in front of every row's pages.

    The attribute ``registry`` is shared with running batches and stores. It is no part of the API: its names may change.

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

    _on_too_large: Callable[[int, Sequence[PageIds], int], None] | None = None
    """Unless None, `allocate_slots` returns None in place of RequestTooLargeError, and calls this for each refused request with
    the number of pages in the pool, the pages that the request holds or hits, and the number of new pages.
    """

    _trusts_requests = False
    """Whether a request gets the pages held by another one of the same id, and hits may be counted among the new tokens too.
    Otherwise both raise ArgumentError.
    """

    def __init__(
        self,
        num_pages: int | Mapping[str, int],
        kv_cache_groups: Sequence[CacheGroupSpec],
        max_model_len: int,
        enable_caching: bool = True,
        *,
        hashing: PageHashing | None = None,
        page_pool: PagePool | None = None,
        eviction: EvictionPolicy | None = None,
        host_tier: HostTier | None = None,
        retention: Retention | None = None,
        caches: Literal["scheduled", "computed"] = "scheduled",
        max_num_batched_tokens: int | None = None,
    ) -> None:
        """`max_model_len` is in tokens. Raise ArgumentError for values out of range, for pools that the groups do not name, and
        for unsupported combinations.
        """
        if not isinstance(kv_cache_groups, Sequence):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(kv_cache_groups).__name__}, allowed: a list of CacheGroupSpec")
        check_groups(kv_cache_groups)
        every_group, num_others = kv_cache_groups, count_others(kv_cache_groups)
        if num_others < len(every_group):
            kv_cache_groups = kv_cache_groups[:num_others]
        self.kv_cache_groups = kv_cache_groups
        self.cross_groups = tuple(every_group[num_others:]) if num_others < len(every_group) else ()
        self.max_model_len = require_int("max_model_len", max_model_len, 1, MAX_SIZE)
        self.max_num_batched_tokens = max_num_batched_tokens
        if max_num_batched_tokens is not None:
            self.max_num_batched_tokens = require_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        self.enable_caching = require_flag("enable_caching", enable_caching) and len(kv_cache_groups) > 0
        require_choice("caches", caches, "scheduled", "computed")
        if hashing is not None and not isinstance(hashing, PageHashing):
            raise ArgumentTypeError(f"hashing: got {type(hashing).__name__}, allowed: PageHashing, or None")
        if retention is not None and not isinstance(retention, Retention):
            raise ArgumentTypeError(f"retention: got {type(retention).__name__}, allowed: Retention, or None")
        if host_tier is not None and not isinstance(host_tier, HostTier):
            raise ArgumentTypeError(f"host_tier: got {type(host_tier).__name__}, allowed: HostTier, or None")
        sizes = read_sizes(num_pages, every_group, page_pool)
        has_one = len(sizes.names) == 1
        self.pools: Mapping[str, PagePool] = MappingProxyType(
            {sizes.names[0]: choose_pool(page_pool, sizes.sizes[0], self.enable_caching, eviction)}
            if has_one
            else make_pools(sizes, self.enable_caching, page_pool, eviction)
        )
        self._page_pool = self.pools[sizes.names[0]]
        hashing, retention = hashing or PageHashing(), retention or Retention()
        self._rules = rules = make_rules(
            kv_cache_groups,
            hashing.use_eagle and not hashing.hash_lookahead,
            self.enable_caching,
            retention,
            sizes.pool_of_group[:num_others],
            hashing.hash_lookahead,
        )
        self._store = self._page_pool.store
        self._store.name_banks(sizes.names)
        self.sink_page_ids = set_sinks_aside(self._store, kv_cache_groups, sizes.pool_of_group)
        self._sinks = [
            self._store.records_in_bank(PageIds(sinks), bank)
            for bank, sinks in zip(sizes.pool_of_group, self.sink_page_ids, strict=False)
        ]
        self.num_pages = self._store.num_pages
        self._sizes_awake: list[int] | None = None  # while the manager is vacated
        hasher = hashing.make_hasher(rules.hash_page_size)
        configuration: Configuration = {}
        if self.enable_caching:
            num_kept, num_needed = self._store.num_kept_token_ids, rules.max_cached_page_size + hasher.hash_lookahead
            if 0 < num_kept < num_needed:
                allowed = f"none, or at least {num_needed}"
                got = f"one that keeps {num_kept} token ids of a page"
                raise ArgumentError(f"page_pool: got {got}, allowed for pages of {num_needed}: {allowed}")
            of_group = enumerate(sizes.pool_of_group[:num_others] if len(self.pools) > 1 else ())
            configuration = hasher.describe() | rules.configuration
            configuration |= {f"kv_cache_groups[{i}].pool": sizes.names[number] for i, number in of_group}
            crossed: Configuration = {
                f"kv_cache_groups[{i}].type_id": group.kv_cache_spec.type_id
                for i, group in enumerate(self.cross_groups, num_others)
            }
            for pool in self.pools.values():
                pool.bind(configuration | crossed)
            if self._store.eviction == "adaptive":
                link_checkpoints(self._store, kv_cache_groups, sizes.pool_of_group[:num_others])
            if rules.checkpoint_interval is not None:
                rank_checkpoints(self._store, sizes.list_pools_of_states(every_group))
                self._store.put_blank_first()
            if hasher.num_digest_bytes == 32:
                keep_whole_digests(self._store)
        limit_leases(self._store, retention.max_leased_share)
        self.registry = RequestRegistry(self._page_pool, rules, hasher, configuration, self._trusts_requests)
        if self.cross_groups:
            self.registry.media = Media(
                self._store,
                self.pools,
                self.cross_groups,
                rules.groups,
                hashing,
                self.enable_caching,
                caches == "computed",
            )
        self.caches = caches
        self._caches_computed = caches == "computed" and self.enable_caching
        super().__init__(self.registry, self.max_model_len, self._on_too_large, self._caches_computed)
        if host_tier is not None:
            host_tier.bind(self._store, list_unsaved(every_group))
        self.host_tier = host_tier
        self._storage: Storage | None = None
        self._advisor = Advisor(self.stats(), self._store.counters["num_queried_tokens"])

    def __repr__(self) -> str:
        """Return the sizes, and the use of the pool."""
        return (
            f"CacheManager(num_pages={self.num_pages}, num_free_pages={self._store.num_free_pages}, "
            f"num_cached_pages={self._store.num_cached_pages}, num_requests={len(self.registry.held)}, "
            f"num_kv_cache_groups={len(self.kv_cache_groups)}, max_model_len={self.max_model_len}, "
            f"enable_caching={self.enable_caching}, eviction={self._page_pool.eviction!r})"
        )

    @property
    def usage(self) -> float:
        """Share of pages in use, 0.0 to 1.0, of all pools together. The null page counts as used."""
        return 1.0 - self._store.num_free_pages / (sum(list_sizes(self._store)) - len(self.pools) + 1)

    @property
    def max_num_leased_pages(self) -> int:
        """Pages in use, of all pools together, that leases with an end may hold."""
        return count_leasable_pages(self._store)

    @property
    def page_pool(self) -> PagePool:
        """The pool of a manager that has one. Raise ArgumentError with several: see ``pools``."""
        if len(self.pools) > 1:
            name = next(iter(self.pools))
            raise ArgumentError(f"page_pool: got {len(self.pools)} pools, allowed: one; name it, as in pools[{name!r}]")
        return self._page_pool

    # Look-ups and slots.

    def get_computed_pages(
        self,
        request: Request,
        *,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
        num_reserved_pages: int = 0,
    ) -> tuple[CachePages, int]:
        """Return the longest cached prefix of a request, in full pages, and its length in tokens, at most ``num_tokens - 1``.

        Nothing hits when caching is off or the request asks for ``prompt_logprobs``. With eagle the last hit page is dropped;
        with `dp_shard_hint` only pages of that shard hit. The call takes no references: pass the pages to `allocate_slots`
        before any other allocation; if that admits the request, `stats` counts the look-up. Pages found only in a host tier get
        pages of the pool, into which the next `take_moves` loads. If too few are free besides `num_reserved_pages`, only the
        pool's hits are returned, and `allocate_slots` returns None until the next look-up. O(pages); for a refused request with
        one group of full attention O(1), until a hit page gets a new holder or another page of the request is cached.
        """
        query = self.registry.read_query(request)
        if query is None:
            self.registry.find_held(request)
            return self.create_empty_page_list(), 0
        num_reserved = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        bounds: tuple[int, int | None] = 0, None
        if dp_shard_hint is not None or data_parallel_size is not None:
            self._store.require_even(data_parallel_size)
            bounds = find_shard_bounds(self._page_pool.num_pages, dp_shard_hint, data_parallel_size)
        store, (num_queried_tokens, is_preempted) = self._store, query
        registry = self.registry
        with registry.lock:
            hashes = registry.extend_hashes(request, num_queried_tokens)
            refusal, found = hashes.refusal, None  # a refusal leaves unsure hashes as they are
            if refusal and bounds[1] is None and refusal.num_tokens == num_queried_tokens:
                found = refusal.find_again()
            if found is None:
                hashes.refusal, context, session = None, 0, 0
                if hashes.are_unsure or len(hashes.chain) > registry.hasher.count_pages(num_queried_tokens):
                    hashes.cut(registry.count_sure_hashes(request))
                    hashes = registry.extend_hashes(request, num_queried_tokens)
                try:
                    if store.has_tier:  # pages to load have names, and so have their parents
                        registry.name_pages(hashes, 0, num_queried_tokens)
                        context = registry.hold_context(hashes.extra_keys, getattr(request, "session_id", None))
                        session = registry.hold_session_of(request)
                    found = load_prefix(
                        store, self._rules.groups, hashes.chain, num_queried_tokens, bounds, context, num_reserved, session
                    )
                finally:
                    registry.release_context(context)
                    registry.release_session(session)
            found.is_preempted = is_preempted or hashes.is_counted
            hashes.query = found
        return CachePages(found.hits, store), found.num_hit_tokens

    def probe(self, request: Request) -> PrefixProbe:
        """Report the hits that `get_computed_pages` would find if all loads had room, and why the hit ends, in the words of
        `explain`. Nothing changes.
        """
        report = self.explain(request)
        return PrefixProbe(report.num_hit_tokens, report.num_queried_tokens, report.reason)

    def explain(
        self, request: Request, *, dp_shard_hint: int | None = None, data_parallel_size: int | None = None
    ) -> HitReport:
        """Return why a request does not hit more: how far each group hits, and the cause for which the hit ends there. The
        request is one that may be looked up; the pages that it holds already hit as well.

        Nothing changes, and `stats` counts no request. Call `enable_explanations` first to learn which pages were evicted; see
        docs/explain.md for what to do about each cause. With `dp_shard_hint` only pages of that shard hit. Raise the errors of
        `get_computed_pages`. O(tokens), to hash them, and O(pages x groups); O(different salts and media of the last requests)
        where a page was not computed.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=4, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> manager.enable_explanations()
        >>> for name, start in ("a", 0), ("b", 100):
        ...     request = EngineRequest(name, range(start, start + 9))
        ...     _ = manager.allocate_slots(request, 9)
        ...     manager.free(request)
        >>> report = manager.explain(EngineRequest("c", range(9)))
        >>> report.cause, report.end.token
        (<MissCause.EVICTED: 'evicted'>, 0)
        """
        self._store.require_even(data_parallel_size)
        ids = find_shard_bounds(self._page_pool.num_pages, dp_shard_hint, data_parallel_size)
        return explain_hit(self.registry, request, ids)

    def enable_explanations(self) -> None:
        """Remember which pages leave the prefix cache, and the extra keys of the last 256 requests that differ in them, so that
        `explain` names evicted pages and other salts, adapters and media. Pages that left before this call are not known.

        About twice as many keys as there are pages are remembered, the last ones, at 16 bytes per page of pool and host tier.
        Look-ups cost the same; evicting a page costs some 30 ns more. A second call changes nothing. O(num_pages).
        """
        with self.registry.lock:
            keep_departures(self._store, not self._rules.has_full_attention)
            if self.registry.recent_keys is None:
                self.registry.recent_keys = RecentKeys()

    def require_capacity(
        self,
        num_tokens: int,
        max_num_new_tokens: int | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_reserved_pages: int = 0,
        num_encoder_tokens: int = 0,
        dp_shard_hint: int | None = None,
        data_parallel_size: int | None = None,
    ) -> None:
        """Raise RequestTooLargeError if a request of `num_tokens` tokens, its answer included, is longer than `max_model_len`,
        or cannot run even alone, in an empty pool without leases: call this when it arrives.

        Each step computes up to `max_num_new_tokens` tokens (None: the manager's `max_num_batched_tokens`), with slots for
        `num_lookahead_tokens` more. `num_reserved_pages` of the pool stay free. With cross-attention the request also holds the
        pages of `num_encoder_tokens`; ArgumentError for more of these than the model has. With `data_parallel_size` the request
        has the pages of shard `dp_shard_hint`; if that is None, those of the smallest shard. A request that passes can run to
        its end with any steps up to these limits, after any hit; for others some such steps lack pages. `RunningBatch.admit`
        with `reserve` takes the pages of all known tokens at once: pass `num_tokens` as `max_num_new_tokens` for it. O(groups);
        if page sizes or chunks differ, O(groups x pages in their common multiple).

        >>> from pagepool import CacheGroupSpec, CacheManager, SlidingWindowSpec
        >>> window = SlidingWindowSpec(4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False, sliding_window=9)
        >>> manager = CacheManager(num_pages=13, kv_cache_groups=[CacheGroupSpec(window)], max_model_len=1000)
        >>> manager.require_capacity(1000, max_num_new_tokens=32)
        >>> manager.require_capacity(1000, max_num_new_tokens=64)
        Traceback (most recent call last):
        pagepool.errors.RequestTooLargeError: a request of 1,000 tokens in steps of up to 64 needs 19 pages, the pool has 12
        """
        num_tokens = require_int("num_tokens", num_tokens, 0)
        if num_tokens > self.max_model_len:
            raise RequestTooLargeError(f"num_tokens: got {shown(num_tokens)}, allowed: max_model_len, {self.max_model_len}")
        most = self.max_num_batched_tokens if max_num_new_tokens is None else max_num_new_tokens
        num_new_tokens = num_tokens if most is None else min(require_int("max_num_new_tokens", most, 1), num_tokens)
        num_ahead = min(require_int("num_lookahead_tokens", num_lookahead_tokens, 0), self.max_model_len)
        num_reserved = require_int("num_reserved_pages", num_reserved_pages, 0, MAX_SIZE)
        size = None if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size, 1)
        self._store.require_even(size)
        media = self.registry.media
        max_num_encoder_tokens = 0 if media is None else media.max_num_tokens
        num_encoder_tokens = require_int("num_encoder_tokens", num_encoder_tokens, 0, max_num_encoder_tokens)
        steps = f" in steps of up to {num_new_tokens:,}" if num_new_tokens < num_tokens else ""
        ahead = f", with slots for {num_ahead:,} more," if num_ahead else ""
        for bank, (name, pool) in enumerate(self.pools.items()):
            num_usable, num_kept = count_usable(self._store, bank), 0 if bank else num_reserved
            start, stop = find_shard_bounds(pool.num_pages, 0 if dp_shard_hint is None else dp_shard_hint, size)
            num_here = num_usable if stop is None else stop - start
            count_peak_pages = partial(self._rules.groups.count_peak_pages, num_tokens, bank=bank)
            num_media = 0 if media is None else media.count_pages(num_encoder_tokens, bank)
            num_pages = num_media + count_peak_pages(max(1, num_new_tokens), num_ahead, self.max_model_len)
            if num_pages <= num_here and num_pages + num_kept <= num_usable:
                continue
            encoded = f" and {count_of(num_encoder_tokens, 'encoder token')}" if num_media else ""
            needed = f"a request of {count_of(num_tokens, 'token')}{encoded}{steps}{ahead} needs {count_of(num_pages, 'page')}"
            which = "the pool" if len(self.pools) == 1 else f"the pool {name!r}"
            in_pool = "" if len(self.pools) == 1 else f" in the pool {name!r}"
            has = f"{which} has {num_usable:,}" if stop is None else f"the shard has {num_here:,}{in_pool}"
            kept = f", and {num_kept:,} of the pool's {num_usable:,} stay free" if num_kept else ""
            if most is None and num_media + count_peak_pages(1, num_ahead, self.max_model_len) < num_pages:
                kept += "; in steps of fewer tokens it needs less: name max_num_new_tokens, or max_num_batched_tokens"
            raise RequestTooLargeError(f"{needed}, {has}{kept}")

    def reset_prefix_cache(self) -> bool:
        """Drop all prefix entries, for example after loading weights. Return False, without a change, while a page is held."""
        with self.registry.lock:
            return self._page_pool.reset()

    # Sizes.

    def resize(self, num_pages: int | Mapping[str, int]) -> dict[str, dict[int, list[str]]]:
        """Use only the pages with ids below `num_pages`: an int, or a size for each pool, as for the constructor, from 1, the
        null page alone, to the size at construction. Return the held pages with other ids: by pool and id, the kinds and names
        of their holders, as in `held`. Call it again, once a step, until it returns nothing; then nothing uses these ids.

        From the first call on no other id is handed out. Free pages above are evicted, and held ones lose their prefix entries.
        With a host tier the next `take_moves` saves the evicted ones; with less room in the tier, the ones that would have been
        evicted last. Held ones are saved with ``caches="computed"``, otherwise they are computed again. Holders keep their
        pages until they give them back. Pages of learned sinks are not returned: fill them again after growing. A larger size
        adds ids at once.

        `stats`, `require_capacity` and the budget of leases count pages below `num_pages`, while the attribute ``num_pages``
        stays the size at construction. Requests wait for pages of a pool of the null page alone. Raise ArgumentError for sizes
        and pools that there are not, and for a pool divided into shards. O(num_pages + pages held).

        >>> from pagepool import CacheGroupSpec, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", list(range(12)))
        >>> _ = manager.allocate_slots(request, 12)
        >>> manager.resize(3)
        {'kv': {3: ['request a']}}
        >>> manager.free(request)
        >>> manager.resize(3), manager.stats().num_free_pages
        ({}, 2)
        """
        sizes = read_new_sizes(num_pages, self.pools)
        with self.registry.lock:
            num_left = resize_banks(self._store, sizes, self._caches_computed)
            self._sizes_awake = None
            return self.registry.name_holders(sizes, self._sinks) if num_left else {}

    def vacate(self, *, preempt: bool = False) -> Preempted:
        """Empty the pools and hand out nothing until `resume`, so that the memory of their pages can serve others. With a host
        tier, `take_moves` saves the pages that the tier lacks, as many as it has room for, and they can hit again after
        `resume`. Without a tier they are lost.

        Raise PagesHeldError, without a change, if pages are held, naming the holders. With `preempt`, return the rows and
        requests among these instead, also without a change: release or free them, and call this again. The result is empty
        once the pools are vacated. Requests that are admitted meanwhile wait. Raise ArgumentError for a pool divided into
        shards. O(num_pages).

        Afterwards take and make the moves, call `complete`, and drop the arrays of pages: see docs/sleep.md.

        >>> from pagepool import CacheGroupSpec, EngineRequest, FullAttentionSpec, HostTier
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(16, [CacheGroupSpec(spec)], max_model_len=64, host_tier=HostTier(32))
        >>> request = EngineRequest("a", list(range(9)))
        >>> _ = manager.allocate_slots(request, 9)
        >>> manager.vacate(preempt=True)
        Preempted(rows={}, request_ids=['a'])
        >>> manager.free(request)
        >>> _ = manager.vacate()
        >>> manager.complete(manager.take_moves().number)
        >>> manager.stats().num_pages, manager.stats().host_tier.num_cached_pages
        (0, 2)
        >>> manager.resume()
        >>> manager.get_computed_pages(request)[1]
        8
        """
        preempt = require_flag("preempt", preempt)
        with self.registry.lock:
            sizes = list_sizes(self._store)
            if resize_banks(self._store, [1] * len(self.pools), only_unheld=True):
                preempted = self.registry.list_preemptable() if preempt else Preempted({}, [])
                return (
                    preempted
                    if preempted.rows or preempted.request_ids
                    else refuse_held(self.registry.report_held(self._sinks))
                )
            self._sizes_awake = self._sizes_awake or sizes
            return Preempted({}, [])

    def resume(self) -> None:
        """Use the pages again that were in use before `vacate`. Change nothing unless the manager is vacated. O(num_pages)."""
        with self.registry.lock:
            if self._sizes_awake is not None:
                resize_banks(self._store, self._sizes_awake)
                self._sizes_awake = None

    # Moves, checkpoints and forks.

    def take_moves(self) -> Moves:
        """Return the moves due before the next step: copies, loads and saves of the manager's requests and of running batches,
        and writes of states by requests, but not by batches. If none is due, the result is empty, with number 0; this costs
        O(1) and allocates nothing. O(moves).

        Call it, or `RunningBatch.take_moves`, once a step: after the calls that plan the step, when the step before has been
        given to the device. `Moves` explains in which order to make them (see `pagepool.host_pages` and
        `pagepool.page_copies`). Copies become due when a checkpoint is hit, and after `fork`; loads and saves with a host tier.
        Until they are taken, their pages are held, and calls that plan tokens in these pages raise MovesDueError. Freeing a
        request drops the copies into its pages. Moves may also be taken, and made, after a fork, and before repeating a call
        that raised MovesDueError: taking them then begins no step.

        Until `complete` or `fail` ends the number, its saved pages cannot hit, nor can pages computed from its loaded pages. A
        tier that writes through saves the pages cached before the moves of the last step were taken.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> first, second = EngineRequest("first", [1, 2, 3, 4, 5, 6]), EngineRequest("second", [1, 2, 3, 4, 5, 6])
        >>> _ = manager.allocate_slots(first, 6)
        >>> first.num_computed_tokens = second.num_computed_tokens = 6
        >>> manager.fork(first, second).get_page_ids()
        ([1, 3],)
        >>> manager.take_moves()
        Moves(number=0, copies=PageCopies(src=[2], dst=[3], group=[0]))
        """
        moves = take_moves(self._store, self.registry)
        self.poll_storage()
        return moves

    def poll_storage(self) -> None:
        """Let the storage copy evicted pages of the tier before moves overwrite them."""
        if self._storage is not None:
            self._storage.poll()

    def complete(self, number: int) -> None:
        """End the loads and saves taken under a number: saved pages can hit now. Raise ArgumentError for an unknown number.
        O(loads and saves in flight).
        """
        end_transfers(self._store, number)

    def fail(self, number: int, *, saves: Sequence[int] = (), loads: Sequence[int] = ()) -> FailedLoads:
        """End the loads and saves taken under a number. Those at the indices in `saves` and `loads` failed: their pages lose
        their entries, in the tier too. Pass the result to `find_wrong_token` and `RunningBatch.rewind`. Raise ArgumentError for
        an unknown number or index. O(loads and saves in flight + num_pages).
        """
        return end_transfers(self._store, number, saves, loads)

    def list_moves_in_flight(self) -> list[Moves]:
        """Return the loads and saves that were taken and have not ended, in order, for example after an interrupted call.
        O(loads and saves x lists).
        """
        return list_in_flight(self._store)

    def find_wrong_token(self, request: Request, failed: FailedLoads) -> int | None:
        """Return the token from which a request must be computed again because some of its pages failed to load, or None. Lower
        ``num_computed_tokens`` to it before scheduling the request again.

        From that token on the request keeps its pages up to the first page that others hold, and gives back the rest;
        `allocate_slots` takes new pages for these. Before this call, end other loads into its pages; after it, read its page
        ids again by `get_page_ids`.

        Free the request instead, with ``num_computed_tokens=0``, if needed pages are already behind a window, if the model has
        states, or while copies of its pages are due. With states the token is 0 for each request with hits on pages of this
        load or a later one: its state may have seen wrong tokens. O(pages).
        """
        with self.registry.lock:
            held = self.registry.find_held(request)
            try:
                return rewind_request(held, failed)
            finally:
                if held is not None and not held:
                    self._forget(request)

    @property
    def checkpoint_interval(self) -> int | None:
        """Tokens between checkpoints inside a prompt; 0: there are none, None: states are not kept."""
        return self._rules.checkpoint_interval

    @property
    def hash_page_size(self) -> int:
        """Tokens of a hash: the greatest common divisor of the page sizes of groups with attention."""
        return self._rules.hash_page_size

    def fork(self, request: Request, new_request: Request) -> CachePages | None:
        """Let a new request continue from the computed tokens of another one, after the step that computed them: for parallel
        samples and beams. The new request shares full pages, and gets copies of open pages and of states. Session and tenant
        are the same, unless it has a `session_id` of its own.

        Return all pages of the new request; None, without a change, if too few pages are free. Raise ArgumentError if `request`
        holds no pages or `new_request` holds some, if the requests differ in ``num_computed_tokens``, in the computed tokens or
        in extra keys, or if needed pages are already behind a window. Raise MovesDueError if moves into the pages of `request`
        are due. O(tokens), to hash them.
        """
        with self.registry.lock:
            num_tokens, num_new = (read_count(each, "num_computed_tokens") for each in (request, new_request))
            held = self.registry.require_held(request)
            if self.registry.find_held(new_request) is not None:
                name = f"request {shown(new_request.request_id)}"
                raise ArgumentError(f"{name}: got one that holds pages already, allowed: one without")
            if not num_new == num_tokens <= held.num_room_tokens:
                allowed = f"equal, and at most {held.num_room_tokens}, for which there are slots"
                raise ArgumentError(f"num_computed_tokens: got {shown(num_tokens)} and {shown(num_new)}, allowed: {allowed}")
            held.require_moves_taken(may_be_read=True)
            if self.registry.media is not None:
                self.registry.media.require_same(request, new_request)
            if self.enable_caching and not self.registry.share_hashes(request, new_request, num_tokens):
                got = f"{num_tokens} first tokens, or extra keys, that are not those of request {shown(request.request_id)}"
                raise ArgumentError(f"request {shown(new_request.request_id)}: got {got}, allowed: the same")
            self.registry.require_same(request, held)
            self.registry.require_same(new_request, None)
            target = RequestPages(self._store, self._rules.groups, self.max_model_len, new_request)
            self.registry.held[new_request.request_id] = target  # registered before it holds pages: no interrupt can lose it
            is_forked = False
            try:
                session_id = require_name("session_id", getattr(new_request, "session_id", None))
                target.session_id = held.session_id if session_id is None else session_id
                session = 0 if session_id is None else self.registry.hold_session_of(new_request)
                try:
                    is_forked = held.fork(target, num_tokens, session, self.registry.hasher.hash_lookahead)
                finally:
                    self.registry.release_session(session)
            finally:
                if not target:
                    del self.registry.held[new_request.request_id]
                if not is_forked:
                    self.registry.hashes.pop(new_request.request_id, None)
                elif self.registry.media is not None:
                    self.registry.media.fork(request, new_request)
            return CachePages(target.get_page_ids(), self._store) if is_forked else None

    # The host tier.

    def attach_storage(self, storage: Storage, *, writes_through: bool = False) -> None:
        """Put a storage behind the host tier, as `pagepool.stores.StoreTier` does with itself: `take_moves` polls it, and
        `stats` reads its counters.

        Pages become due for the storage as the tier evicts them; with `writes_through`, as they reach the tier. Raise
        ArgumentError without a host tier, and if there is a storage already; ArgumentTypeError for other types. O(pages of the
        tier).
        """
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage: got {type(storage).__name__}, allowed: an object with poll and stats")
        link_storage(self._store, require_flag("writes_through", writes_through))
        self._storage, self.registry.find_fetch = storage, getattr(storage, "find_fetch", None)

    def detach_storage(self) -> None:
        """Take the storage away, if there is one: it is not polled any more, and no page is due for it. Raise ArgumentError
        without a host tier. O(1).
        """
        unlink_storage(self._store)
        self._storage = self.registry.find_fetch = None

    def _forget(self, request: Request) -> None:
        """Forget a request that has given its pages back, and its medium."""
        del self.registry.held[request.request_id]
        if self.registry.media is not None:
            self.registry.media.end(request, 0)

    # External tokens and leases.

    def commit_external(self, request: Request, num_tokens: int, *, is_last: bool = True) -> None:
        """Cache pages filled by a transfer: the pages of `num_tokens` tokens after ``num_computed_tokens``. The caller then
        counts these tokens as computed.

        Unless the call `is_last`, more tokens follow, and none count as computed yet: with full attention alone the full pages
        of these tokens are cached, so that others hit them; with windows, chunks or states nothing hits before the end, and
        nothing changes.

        `allocate_slots` must have given them slots, with `num_external_computed_tokens` and `delay_cache_pages`. Pages behind a
        window, outside the attention of later tokens, are given back unfilled. A state covers all external tokens, so in the
        last call `num_tokens` must be all of them. Raise ArgumentError, without a change, for more tokens than have slots or
        are known, and for a request without pages; MovesDueError while moves of its pages are due, since these come first.
        O(pages cached).
        """
        self._end_external(request, "num_tokens", num_tokens, is_failed=False, is_last=require_flag("is_last", is_last))

    def fail_external(self, request: Request, num_valid_tokens: int) -> int:
        """Do `commit_external` for the first `num_valid_tokens` external tokens, and give back pages wholly behind them.

        Return the number of computed tokens; the request continues from there. With a state it is 0, since the state covers
        missing tokens: all pages are given back, and the request may be looked up again. O(pages given back and cached).
        """
        return self._end_external(request, "num_valid_tokens", num_valid_tokens, is_failed=True)

    def _end_external(self, request: Request, name: str, num_tokens: int, *, is_failed: bool, is_last: bool = True) -> int:
        """Cache pages filled by a transfer with `num_tokens` tokens. Return the number of computed tokens."""
        num_tokens = require_int(name, num_tokens, 0)
        with self.registry.lock:
            held = self.registry.require_held(request)
            start, num_known_tokens = read_count(request, "num_computed_tokens"), read_count(request, "num_tokens")
            num_most_tokens = min(held.num_room_tokens, num_known_tokens) - start
            if num_tokens > num_most_tokens:
                raise ArgumentError(f"{name}: got {shown(num_tokens)}, allowed: at most {num_most_tokens}, which have slots")
            held.require_moves_taken()
            gives_all_back = is_failed and (self._rules.has_state or self._rules.has_ring)
            hashes = None
            if self.enable_caching and not gives_all_back:
                hashes = self.registry.extend_hashes(request, start + num_tokens)
            self.registry.require_same(request, held)
            if gives_all_back:
                held.give_back()
                self._forget(request)
                return 0
            with self.registry.naming(held, hashes, held.count_entered_hashes(start), start + num_tokens) as context:
                chain = None if hashes is None else hashes.chain
                held.end_external(chain, start + num_tokens, is_failed, context, is_last)
            return start + num_tokens

    @overload
    def lease(self, pages: Sequence[int] | npt.NDArray[np.integer[Any]], *, seconds: float | None = None) -> Lease: ...

    @overload
    def lease(self, pages: Request, start: int = 0, stop: int | None = None, *, seconds: float) -> Lease: ...

    def lease(self, pages: Any, start: int = 0, stop: int | None = None, *, seconds: float | None = None) -> Lease:
        """Keep pages from being handed out, even if their request is freed, until the lease is released or ends.

        `pages` is a request, or page ids: held pages, such as the sources of a transfer, or free cached ones, as in
        `PagePool.lease`. With several pools call that method of one of ``pools`` for page ids.

        With `seconds`, which a request needs, the lease ends at the first allocation after that time, unless `Lease.extend` is
        called; use does not extend it. Raise LeaseBudgetError if leases with an end would have more than
        `Retention.max_leased_share` of a pool's pages, ``max_num_leased_pages`` in all; a page counts once for each lease. A
        lease does not count as a use of a page: its expectation stays.

        For a request, lease the cached pages wholly within its tokens ``[start, stop)``, in each group, preferably the
        request's own. Without a `stop` the span ends with the last cached page. Raise ArgumentError if a page of full attention
        in the span is not cached, or if there is no page. With windows, name `stop` in the request's `resume_at`, so that the
        window before it stays cached and other requests can resume there, and call this once the span is computed. Raise
        ArgumentError if pages of windows, or checkpoints of states, needed to resume there are gone. O(tokens).

        `release` or ``with`` ends a lease; until then it is in `leases`, even without other references to the object. A lease
        is a reference: its pages are held, and `reset_prefix_cache` returns False. Other holders can still write to these
        pages, or drop their prefix entries. A lease cannot be pickled. An error leaves nothing leased. Raise ArgumentError
        unless ``0 <= start <= stop <= num_tokens`` and seconds are finite and above 0, and for a `start` or `stop` with page
        ids. The first call takes O(num_pages).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 5])
        >>> _ = manager.allocate_slots(request, 5)
        >>> with manager.lease([1, 2]) as lease:
        ...     manager.free(request)
        ...     manager.stats().num_held_pages, manager.leases
        (2, (Lease(page_ids=[1, 2], is_held=True),))
        >>> manager.stats().num_held_pages, lease.is_held, manager.leases
        (0, False, ())
        >>> manager.lease(request, stop=4, seconds=300)
        Lease(page_ids=[1], is_held=True)
        """
        span = TokenSpan(start, stop)
        if not hasattr(pages, "request_id") and (seconds is None or hasattr(pages, "__len__")):
            if start != 0 or stop is not None:
                got = f"{shown(start)} and {shown(stop)} for page ids"
                raise ArgumentError(f"start and stop: got {got}, allowed: with a request")
            return self.page_pool.lease(pages, seconds=seconds)
        with self.registry.lock:
            return self._span_of(pages, span).lease(seconds)  # type: ignore[arg-type] # it refuses None

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The held leases, oldest first, including leases by running batches and by interrupted calls. O(leases)."""
        return tuple(list_leases(self._store))

    def _span_of(self, request: Request, span: TokenSpan) -> TokenSpan:
        """Return the span of a request, with hashes up to its end; without caching there are no hashes, so no page."""
        num_tokens = read_count(request, "num_tokens")
        chain = self.registry.hash_apart(request, min(num_tokens, span.stop) if self.enable_caching else 0)
        held = self.registry.find_held(request)
        return span.of_request(self._store, self._rules.groups, chain, num_tokens, held)

    # Expectations.

    def expect(self, request: Request, start: int = 0, stop: int | None = None, *, seconds: float | None) -> int:
        """Expect the cached pages wholly within tokens ``[start, stop)`` of a request to be used again in `seconds`. Infinity
        means never, None means unknown. Return the number of these pages.

        Tokens behind the last known token are left out.

        An expectation orders eviction and promises nothing. Pages without a prefix entry are evicted first, then pages never
        expected back, then the page expected furthest in the future. Times are compared by powers of two, up to 2**18 seconds,
        and count from this call, or from the release of a held page. When the time passes without a use, the expectation
        doubles, again and again, up to the longest. A page without an expectation counts as expected in twice its idle time,
        but is evicted before others only if the eviction policy picks it. The next hit of a page, or the loss of its prefix
        entry, ends its expectation. Without expectations the order is that of the eviction policy.

        For a waiting request, call this once, with the expected waiting time. See also `free`. Raise ArgumentError, without a
        change, for seconds below 0, and unless ``0 <= start <= stop``; ArgumentTypeError for other types. O(tokens), to hash
        them; the first call takes O(num_pages).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=5, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> soon, late = EngineRequest("soon", [1, 2, 3, 4, 5]), EngineRequest("late", [6, 7, 8, 9, 10])
        >>> for request in (soon, late):
        ...     _ = manager.allocate_slots(request, 5)
        >>> manager.free(soon, seconds=5)
        >>> manager.free(late)
        >>> manager.expect(late, seconds=600)
        1
        >>> new = manager.allocate_slots(EngineRequest("new", [11] * 12), 12)
        >>> manager.probe(soon).num_hit_tokens, manager.probe(late).num_hit_tokens
        (4, 0)
        """
        span = TokenSpan(start, stop)
        with self.registry.lock:
            return self._span_of(request, span).expect(seconds)

    def expect_session(self, session_id: str, *, seconds: float | None) -> int:
        """Expect the pages of a session to be used again in `seconds`: see `expect`. Return the number of these pages, 0 for an
        unknown id.

        Requests and rows with the same `session_id` form a session, whatever their tenants. A cached page belongs to the
        session that cached it. A page used by two sessions, or by a session and a request without one, is shared until it loses
        its prefix entry: it belongs to no session, and `expect` and `free` can only shorten its expectation. An id without
        requests, rows and pages is forgotten. Raise ArgumentTypeError unless the id is a string. O(pages of the session).
        """
        if session_id is None:
            raise ArgumentTypeError("session_id: got None, allowed: a string")
        with self.registry.lock:
            return self.registry.sessions.expect(session_id, seconds)

    def close_session(self, session_id: str) -> int:
        """Expect the pages of a session never to be used again, and release them from the session. Return their number, 0 for
        an unknown id. They can hit until they are evicted, before other pages; to drop their content now, call
        `PagePool.evict_pages`. A later request with this id starts a new session. Errors and cost as in `expect_session`.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("turn 1", [1, 2, 3, 4, 5, 6, 7, 8, 9], session_id="chat")
        >>> _ = manager.allocate_slots(request, 9)
        >>> manager.free(request, seconds=30)
        >>> manager.close_session("chat"), manager.close_session("chat")
        (2, 0)
        """
        return self.expect_session(session_id, seconds=math.inf)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the tenants' shares of each pool. All other requests, including those of tenants no longer named, share the rest.

        Each held or cached page is charged to the `tenant` of the request or row that took it, if that tenant had a share then.
        Once another tenant uses the page, it is charged to the rest until it loses its prefix entry. Pages without an entry are
        evicted first. Then each tenant above its share offers the page that comes first in the order of `expect`. Of the
        offered pages, one never expected back is evicted first, otherwise the one released earliest. A tenant within its share
        loses a page only if nobody else has free ones. Unused room of a tenant serves all, and no request is refused for a
        share. With several pools a tenant has its share of each: pages that it takes in one do not count in another.

        Raise ArgumentTypeError unless the tenants are strings and the shares numbers; ArgumentError unless there are at most
        63, each above 0, and at most 0.95 in all. From the first call on this takes 6 bytes per page. O(num_pages + sessions).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=9, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> manager.set_shares({"chat": 0.5, "batch": 0.25})
        >>> chat = EngineRequest("chat", list(range(13)), tenant="chat")
        >>> flood = [EngineRequest(f"job {i}", [100 + i] * 9, tenant="batch") for i in range(9)]
        >>> for request in (chat, *flood):
        ...     _ = manager.allocate_slots(request, request.num_tokens)
        ...     manager.free(request)
        >>> manager.probe(chat).num_hit_tokens
        12
        """
        with self.registry.lock:
            self.registry.sessions.set_shares(shares)

    # Events.

    def enable_events(self, *, hashes_as_bytes: bool = False) -> None:
        """Record changes of the prefix cache for `take_events`. Call this before the first request.

        Hashes are unsigned ints, the lowest 64 bits of the digest, or with `hashes_as_bytes` the bytes of the whole digest.
        Other processes make the same hashes only with the same `hash_seed`. Without a seed they do with ``"sha256"`` as
        `hash_algo`; with other algorithms, if ``PYTHONHASHSEED`` is the same (or, with ``"sha256_cbor"``, absent). Events cost
        56 bytes per page of pool and host tier (88 with these two algorithms), 4 per token, and time for each cached page.
        Raise ImportError without the extra ``pagepool[events]``; ArgumentError without prefix caching, with pages held or
        cached already, or if enabled with the other `hashes_as_bytes`.
        """
        hashes_as_bytes = require_flag("hashes_as_bytes", hashes_as_bytes)
        try:
            from pagepool.events import EventSource
        except ImportError:
            raise ImportError("events need msgspec: pip install 'pagepool[events]'") from None
        if not self.enable_caching:
            raise ArgumentError("events: got a manager without prefix caching, which has none, allowed: one with it")
        registry = self.registry
        with registry.lock:
            if registry.event_source is None:
                keep_token_ids(self._store, self._rules.max_cached_page_size + registry.hasher.hash_lookahead)
                registry.event_source = EventSource(
                    self._store, self.kv_cache_groups, self._rules.hit_tokens, registry.hasher, hashes_as_bytes
                )
                registry.hasher.keep_token_ids = True
                registry.hashes.clear()  # existing hashes have no tokens
            elif registry.event_source.hashes_as_bytes != hashes_as_bytes:
                allowed = registry.event_source.hashes_as_bytes
                raise ArgumentError(f"hashes_as_bytes: got {hashes_as_bytes}, allowed: {allowed}")

    def take_events(self) -> "list[Event]":
        """Return the net changes of the prefix cache since the last call, including changes by running batches:
        `AllBlocksCleared`, `BlockRemoved` and `BlockStored` of `pagepool.events`, in this order, parents before children.
        Changes of the host tier have the medium ``"CPU"``. After an interrupted call the next one starts over, with
        `AllBlocksCleared` and the whole cache. Raise ArgumentError unless events are enabled. O(changes).
        """
        return self.event_source.take()

    def snapshot_events(self) -> "list[Event]":
        """Return all cached pages as `BlockStored`, parents first, then those of the host tier, for a router that starts late.
        Call `take_events` first: otherwise its next result would repeat changes in the snapshot. O(num_pages).
        """
        return self.event_source.list_all()

    @property
    def event_source(self) -> "EventSource":
        """The source of these events, for a publisher. Raise ArgumentError unless events are enabled."""
        if self.registry.event_source is None:
            raise ArgumentError("events: got a manager without them, allowed: one whose enable_events was called first")
        return self.registry.event_source

    # Freeing.

    def free(self, request: Request, *, num_computed_tokens: int | None = None, seconds: float | None = None) -> None:
        """Free the pages of a request, if it holds any, last page first, so that ends of prefixes are evicted before their
        beginnings. O(pages).

        `seconds` is the expected time until pages that nothing else holds are used again, for example at the next turn of a
        chat: see `expect`. None keeps earlier expectations.

        `num_computed_tokens` is for a request that was scheduled but did not run, because the step failed or the request was
        preempted: the number of its computed tokens, including hits. Pages cached for it with later tokens lose their entries,
        even if others hold them. Also free requests that have hit those pages.

        With ``caches="computed"``, or a `hash_lookahead`, the pages filled by the request's own ``num_computed_tokens`` are
        cached first, up to the argument `num_computed_tokens`: lower the attribute only after this call.
        """
        if num_computed_tokens is not None:
            num_computed_tokens = require_int("num_computed_tokens", num_computed_tokens, 0)
        term, registry = term_of(seconds), self.registry
        with registry.lock:
            held = registry.find_held(request)
            num_last_tokens = self._count_last_tokens(request, num_computed_tokens, held)
            hashes = registry.hashes.get(request.request_id)
            num_to_cache, num_named_tokens = 0, num_last_tokens
            start = 0  # checkpoints and their parents get names
            if (self._caches_computed or (self.enable_caching and registry.hasher.hash_lookahead)) and held is not None:
                num_to_cache = self._count_due_tokens(request, num_computed_tokens, held)
                num_named_tokens = max(num_last_tokens, num_to_cache)
                start = held.count_entered_hashes(num_named_tokens) if num_to_cache else start
            num_hashed_tokens = num_named_tokens
            if num_computed_tokens is not None and held is not None and hashes is not None:
                # Skipped pages lose their entries by their hashes, which calls since the request was set back may have cut.
                num_hashed_tokens = max(num_hashed_tokens, min(held.num_cached_tokens, read_count(request, "num_tokens")))
            if num_hashed_tokens:
                hashes = registry.extend_hashes(request, num_hashed_tokens)
            registry.require_same(request, held)
            chain = None if hashes is None else hashes.chain
            with registry.naming(held, hashes, start, num_named_tokens) if num_named_tokens else NO_CONTEXT as context:
                if held is not None:
                    held.give_back(num_computed_tokens, chain, num_last_tokens, context, term, num_to_cache)
                    del registry.held[request.request_id]
            if hashes is not None:
                hashes.are_unsure = True
            if num_computed_tokens is not None:
                registry.forget_evicted_names()
            if registry.media is not None:
                registry.media.end(request, num_computed_tokens)

    def _count_last_tokens(self, request: Request, num_computed_tokens: int | None, held: RequestPages | None) -> int:
        """Return the computed tokens of a request up to the last state that becomes a checkpoint as it ends; 0 without any."""
        if not self._rules.writes_states or not held:
            return 0
        num_known = read_count(request, "num_tokens") - self.registry.hasher.hash_lookahead
        num_tokens = min(read_count(request, "num_computed_tokens"), num_known)
        if num_computed_tokens is not None:
            num_tokens = min(num_tokens, num_computed_tokens)
        return held.find_last_write(max(0, num_tokens))

    def _count_due_tokens(self, request: Request, num_computed_tokens: int | None, held: RequestPages) -> int:
        """Return the computed tokens of a request if they fill pages to be cached as it ends, otherwise 0."""
        num_tokens = min(read_count(request, "num_computed_tokens"), read_count(request, "num_tokens"), held.num_room_tokens)
        if num_computed_tokens is not None:
            num_tokens = min(num_tokens, num_computed_tokens)
        return num_tokens if num_tokens >= held.num_full_tokens else 0

    def free_page_hashes(self, request: Request) -> None:
        """Drop the hashes of a finished request. A preempted request with images but no features needs them to hit again."""
        with self.registry.lock:
            self.registry.find_held(request)
            self.registry.hashes.pop(request.request_id, None)

    # Inspection.

    def stats(self) -> CacheStats:
        """Return the state and counters of the cache, consistent unless other threads call the manager. See `CacheStats`. O(1).

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=11, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> request = EngineRequest("a", [1, 2, 3, 4, 9])
        >>> _ = manager.get_computed_pages(request), manager.allocate_slots(request, 5)
        >>> stats = manager.stats()
        >>> stats.num_held_pages, stats.num_cached_pages, stats.usage, stats.queries.num_queried_tokens
        (2, 1, 0.2, 5)
        """
        store, totals = self._store, PagePoolStats(**self._store.counters)
        num_pages, num_free_pages = sum(list_sizes(store)) - len(self.pools), store.num_free_pages
        lifetime, idle_before_eviction, reuse_gap = (TimeHistogram.of(*counts) for counts in list_residency(store))
        num_hit_pages, num_lru_hit_pages = estimate_hits(store) or (None, None)
        charged = [self.registry.sessions.count_charged(bank) for bank in range(len(self.pools))]
        return CacheStats(
            num_pages=num_pages,
            num_free_pages=num_free_pages,
            num_held_pages=num_pages - num_free_pages,
            num_cached_pages=store.num_cached_pages,
            num_leased_pages=sum(count_leased(store)),
            max_num_leased_pages=self.max_num_leased_pages,
            num_sessions=store.num_sessions,
            num_pages_by_tenant={name: sum(counts.get(name, 0) for counts in charged) for name in charged[0]},
            usage=(num_pages - num_free_pages) / max(1, num_pages),
            queries=QueryCounts(**self.registry.query_counters[0].counts),
            preempted_queries=QueryCounts(**self.registry.query_counters[1].counts),
            num_allocated_pages=totals.num_allocated_pages,
            num_freed_pages=totals.num_freed_pages,
            num_evicted_pages=totals.num_evicted_pages,
            lifetime=lifetime,
            idle_before_eviction=idle_before_eviction,
            reuse_gap=reuse_gap,
            num_hit_pages=num_hit_pages,
            num_lru_hit_pages=num_lru_hit_pages,
            host_tier=None if self.host_tier is None else self.host_tier.stats(),
            expectations=ExpectationCounts.of(*store.expectations),
            pools={
                name: replace(pool.count(), num_pages_by_tenant=counts)
                for (name, pool), counts in zip(self.pools.items(), charged, strict=True)
            },
            host_pools={} if self.host_tier is None else self.host_tier._count_pools(),
            store=None if self._storage is None else self._storage.stats(),
        )

    def held(self) -> HeldPages:
        """Return who holds the pages: requests, rows, media, leases, loads and copies, and the caller itself. See `HeldPages`.
        Pages of several holders are listed for each; every held page has a holder. O(pages held + rows of batches), and
        O(num_pages) if the caller holds pages.

        >>> from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> manager = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
        >>> first, second = EngineRequest("first", [*range(13)]), EngineRequest("second", [*range(9)])
        >>> _ = manager.allocate_slots(first, 13)
        >>> hits, num_hit_tokens = manager.get_computed_pages(second)
        >>> _ = manager.allocate_slots(second, 1, num_hit_tokens, hits), manager.page_pool.get_new_pages(1)
        >>> manager.held()
        kind     name    pages  own  seconds  seconds left
        request  first       4    2        0
        request  second      3    1        0
        caller               1    1
        >>> manager.held().num_pages_by_kind, manager.held().caller_page_ids
        ({'kv': {'request': 5, 'caller': 1}}, {'kv': [6]})
        """
        with self.registry.lock:
            return self.registry.report_held(self._sinks)

    def dump(self) -> dict[str, Any]:
        """Return settings, `stats` and `held` as plain values: ``json.dump(manager.dump(), file)`` writes a picture of the
        cache for ``pagepool doctor --pool`` and ``pagepool top --pool``, from a debug endpoint or a signal handler of Python.
        It has ids of requests and names of tenants, but no token ids, salts, hashes or keys. ``"pagepool_dump"`` is the number
        of the format. O(pages held + rows of batches).

        >>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec
        >>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        >>> dump = CacheManager(num_pages=16, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64).dump()
        >>> [*dump]
        ['pagepool_dump', 'version', 'unix_seconds', 'settings', 'stats', 'held']
        >>> dump["settings"]["pools"], dump["stats"]["num_free_pages"], dump["held"]["holders"]
        ({'kv': {'num_pages': 16, 'eviction': 'lru'}}, 15, [])
        """
        tier = self.host_tier
        only = None if len(self.pools) > 1 else next(iter(self.pools))
        groups = tuple(
            GroupSettings(kind_of(group.kv_cache_spec), group.kv_cache_spec.page_size, only or group.pool)
            for group in (*self.kv_cache_groups, *self.cross_groups)
        )
        settings = Settings(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_caching=self.enable_caching,
            caches=self.caches,
            pools={name: PoolSettings(pool.num_pages, pool.eviction) for name, pool in self.pools.items()},
            groups=groups,
            host_tier=None
            if tier is None
            else TierSettings({name: tier.count_pages(name) for name in self.pools}, tier.policy),
        )
        dumped: dict[str, Any] = to_plain(Dump(FORMAT, __version__, time(), settings, self.stats(), self.held()))
        return dumped

    def advise(self) -> str | None:
        """Return a sentence on the pool that is too small: the one with the most lost hits since the last call, or since the
        manager was made. Return None if no pool lost a hundredth of the prompt tokens, and with one pool. Call this about once
        an hour: the loss of the pool of attention is an estimate. See ``num_lost_hit_tokens`` of `PoolStats`. O(1).

        Another split of the memory makes that pool larger: see ``pagepool plan --arrays apart``.
        """
        return self._advisor.advise(self.stats(), self._store.counters["num_queried_tokens"])

    def check(self) -> None:
        """Raise IntegrityError, naming the first wrong page, if pool or requests are damaged. `held` says who holds the pages
        of a sound pool. O(num_pages + pages held).
        """
        with self.registry.lock:
            check_holders(self._store, self.registry.list_held(), groups=self._rules.groups)
            self._page_pool.check()

    def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the page ids of a request, one list for each group, with 0, the null page, for skipped pages. O(pages)."""
        try:
            held = self.registry.held.get(request_id)
        except TypeError:
            raise ArgumentTypeError(f"request_id: got {type(request_id).__name__}, allowed: a string") from None
        return self._store.lists_in_banks(self._no_ids if held is None else held.get_page_ids())

    def get_medium(self, request_id: str) -> Medium | None:
        """Return the pages of the encoder's output that a request reads; None for a request without any."""
        require_name("request_id", request_id)
        return None if self.registry.media is None else self.registry.media.of_request.get(request_id)

    def get_num_common_prefix_pages(self, request: Request, num_scheduled_requests: int) -> list[int]:
        """Count, for each group, the leading pages of a running request held by at least `num_scheduled_requests` requests,
        scheduled or not. The count is 0 without caching, and for groups without full attention. Raise ArgumentError unless the
        request is RUNNING.
        """
        held = self.registry.find_held(request)
        if not has_status(request, EngineRequestStatus.RUNNING):
            status = request.status if isinstance(request.status, EngineRequestStatus) else shown(request.status)
            raise ArgumentError(f"request {shown(request.request_id)}: got status {status}, allowed: RUNNING")
        num_scheduled_requests = require_int("num_scheduled_requests", num_scheduled_requests)
        return [held.count_shared(i, num_scheduled_requests) if held else 0 for i in range(len(self.kv_cache_groups))]

    def create_empty_page_list(self) -> CachePages:
        """Return an empty list of pages for the groups of this manager."""
        return CachePages(self._no_ids, self._store)
