"""Statistics of pools and managers. `pagepool.stats.prometheus` exports them to Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "CacheStats",
    "ExpectationCounts",
    "HostTierStats",
    "PagePoolStats",
    "PoolStats",
    "QueryCounts",
    "StoreStats",
    "TimeHistogram",
    "WaitingStats",
]


class TimeHistogram(NamedTuple):
    """Histogram of times of sampled pages.

    ``counts[i]`` is the number of times below ``bounds_seconds[i]`` but not below the preceding bound; the last count is for
    longer times. Bounds are 1 ms, 2 ms, 4 ms and so on.

    >>> histogram = TimeHistogram.of([2, 0, 1] + [0] * 21, 5_000_000)
    >>> histogram.bounds_seconds[:3], histogram.num_times, histogram.sum_seconds
    ((0.001, 0.002, 0.004), 3, 0.005)
    """

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float

    @classmethod
    def of(cls, counts: list[int], sum_ns: int) -> "TimeHistogram":
        """Make a histogram from the counts of the core."""
        return cls(tuple(0.001 * 2**i for i in range(len(counts) - 1)), tuple(counts), sum_ns / 1e9)

    @property
    def num_times(self) -> int:
        """Number of times."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PagePoolStats:
    """Counters of a pool since its construction.

    Pages are counted when they are handed out, freed, evicted (they lose their prefix entry to a new holder) and cached. Tokens
    are counted when `CacheManager.get_computed_pages` looks them up, and when they hit.
    """

    num_allocated_pages: int
    num_freed_pages: int
    num_evicted_pages: int
    num_cached_pages: int
    num_queried_tokens: int
    num_hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """State and counters of one pool of a manager. ``num_pages`` are those in use (see `CacheManager.resize`), without the null
    page. They are free (``num_free_pages``) or held (``num_held_pages``); ``num_cached_pages``, free or held, can be hit;
    ``num_leased_pages`` are leased for a time, and count once for each lease; ``num_pages_by_tenant`` has the pages charged
    to each tenant with a share. Counters since the pool was made: pages handed out, and evicted, that is, handed out again
    while they could be hit.

    ``num_lost_hit_tokens`` are prompt tokens that admitted requests would have hit, had this pool not evicted what they needed.
    For a pool of states they end at the last evicted checkpoint up to which keys and values hit; the pool remembers twice as
    many evicted pages as it has. For the pool of attention they end at the last checkpoint still cached behind the hits; this
    is an estimate from one look-up in 16. Both are 0 without states in a pool of their own, and for preempted requests.
    ``num_refusals`` counts calls that got no pages because this pool had too few, and ``num_passed_checkpoints`` states that
    did not become checkpoints because no page was left for them.
    """

    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_cached_pages: int
    num_leased_pages: int
    num_allocated_pages: int
    num_evicted_pages: int
    num_pages_by_tenant: Mapping[str, int] = field(default_factory=dict)
    num_lost_hit_tokens: int = 0
    num_refusals: int = 0
    num_passed_checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class QueryCounts:
    """Prefix look-ups: requests, their tokens, and the tokens that hit."""

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens per queried token; 0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class ExpectationCounts(NamedTuple):
    """Expectations of pages, see `CacheManager.expect`, and their outcomes.

    State: free pages never expected back, and free pages whose latest expectation is within a minute, or later. Counters of
    pages with an expected time, since the pool was made: used in time, used later, and evicted or dropped unused.
    """

    num_never_pages: int
    num_pages_within_a_minute: int
    num_later_pages: int
    num_pages_in_time: int
    num_late_pages: int
    num_unused_pages: int

    @classmethod
    def of(cls, num_free: list[int], outcomes: Mapping[str, int]) -> "ExpectationCounts":
        """Make counts from the core's counts: free pages without a term, by term, and with an endless term; and outcomes."""
        return cls(num_free[-1], sum(num_free[1:7]), sum(num_free[7:-1]), **outcomes)


class HostTierStats(NamedTuple):
    """State of a host tier, and its counters since it was made. Pages are pages of the tier.

    State: ``num_pages`` excludes the null page. Pages are free (``num_free_pages``), or held for transfers;
    ``num_cached_pages``, free or held, can be loaded. ``num_in_flight`` counts saves and loads that have not ended.

    Counters: pages saved and loaded by completed transfers, and failed transfers. A loaded page was hit in the tier, not in the
    pool. Evicted pages lost their entries to other pages; refused pages were not saved because no page was free.
    """

    num_pages: int
    num_free_pages: int
    num_cached_pages: int = 0
    num_in_flight: int = 0
    num_saved_pages: int = 0
    num_loaded_pages: int = 0
    num_failed_pages: int = 0
    num_evicted_pages: int = 0
    num_refused_pages: int = 0


class StoreStats(NamedTuple):
    """State of a store behind the host tier, and its counters since it was put there.

    State: ``num_queued_pages`` are being saved, ``num_loading_pages`` loaded; ``num_waiting_requests`` had their pages looked
    up, and are not admitted yet.

    Counters: pages saved, dropped because the queue was full, and not saved by the store (``num_unsaved_pages``). Pages looked
    up, and found. Pages loaded into the tier, missing or of another length when they were to be loaded, and damaged. Found
    pages not loaded because computing them is faster (``num_recomputed_pages``), or because the tier is too small. Requests
    admitted before all their pages came (``num_late_requests``), and faults of the store.
    """

    num_queued_pages: int
    num_loading_pages: int
    num_waiting_requests: int
    num_saved_pages: int
    num_dropped_pages: int
    num_unsaved_pages: int
    num_looked_up_pages: int
    num_found_pages: int
    num_loaded_pages: int
    num_missing_pages: int
    num_damaged_pages: int
    num_recomputed_pages: int
    num_late_requests: int
    num_errors: int


class WaitingStats(NamedTuple):
    """State and counters of a `WaitingQueue`.

    ``num_waiting`` requests have ``num_waiting_tokens`` tokens. ``num_hit_tokens`` of these would hit now, and
    ``num_work_tokens`` are to be computed: hits are left out, and tokens to load from a host tier count a tenth.

    ``num_admitted`` requests left the queue, with ``num_computed_tokens`` of work. A request overtakes an earlier one if it is
    admitted first: ``num_overtakes`` counts such pairs, and ``num_overtaken_tokens`` their work. ``longest_wait_seconds`` is
    the longest wait of an admitted request.
    """

    num_waiting: int
    num_waiting_tokens: int
    num_hit_tokens: int
    num_work_tokens: int
    num_admitted: int
    num_computed_tokens: int
    num_overtakes: int
    num_overtaken_tokens: int
    longest_wait_seconds: float


NOTHING_EXPECTED = ExpectationCounts(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """State of a manager's cache, and its counters. Pages are those of all groups, in all pools.

    State: ``num_pages`` are those in use (see `CacheManager.resize`), without the null page. They are free
    (``num_free_pages``) or held by requests, rows and leases (``num_held_pages``); ``num_cached_pages``, free or held, can
    be hit. ``usage`` is the share of held pages, 0.0 to 1.0. ``num_leased_pages`` counts pages leased for a time, once for
    each lease, up to ``max_num_leased_pages``. ``num_sessions`` counts sessions with pages, requests or rows.
    ``num_pages_by_tenant`` has the pages charged to each tenant with a share. ``expectations`` counts expected pages, and
    their outcomes.

    Counters since the manager was made: ``queries`` of new requests, and ``preempted_queries`` of requests that returned.
    Counters since the pool was made: pages handed out, freed by their last holder, and evicted, that is, handed out again while
    they could be hit. With adaptive eviction also hit pages (``num_hit_pages``), once for each request that hit them, and an
    estimate of LRU's hits (``num_lru_hit_pages``); None with other policies.

    ``pools`` has the state and counters of each pool by name, also of one pool alone.

    ``host_tier`` has the statistics of the host tier, None without one. Hits count pages of pool and tier; the tier's hits are
    its loaded pages. ``host_pools`` has the state and counters of the tier's pages behind each pool, by its name; none are
    leased. ``store`` has the statistics of the store behind the tier, None without one.

    Times of sampled pages (every 128th, more in small pools) since the pool was made: ``lifetime`` of an evicted page from
    allocation to eviction, ``idle_before_eviction`` from last use to eviction, ``reuse_gap`` from a use to the next hit.
    """

    num_pages: int
    num_free_pages: int
    num_held_pages: int
    num_cached_pages: int
    num_leased_pages: int
    max_num_leased_pages: int
    num_sessions: int
    num_pages_by_tenant: Mapping[str, int]
    usage: float
    queries: QueryCounts
    preempted_queries: QueryCounts
    num_allocated_pages: int
    num_freed_pages: int
    num_evicted_pages: int
    lifetime: TimeHistogram
    idle_before_eviction: TimeHistogram
    reuse_gap: TimeHistogram
    num_hit_pages: int | None = None
    num_lru_hit_pages: int | None = None
    host_tier: HostTierStats | None = None
    expectations: ExpectationCounts = NOTHING_EXPECTED
    pools: Mapping[str, PoolStats] = field(default_factory=dict)
    host_pools: Mapping[str, PoolStats] = field(default_factory=dict)
    store: StoreStats | None = None
