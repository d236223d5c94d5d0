"""Prometheus metrics of a cache. Needs the extra ``pagepool[metrics]``.

Each name begins with ``pagepool_``. If vLLM has a metric of the same meaning, the rest of the name is vLLM's:
``vllm:prefix_cache_hits_total`` is ``pagepool_prefix_cache_hits_total``. No name has a colon: from prometheus-client 0.23 on, a
colon arrives as an underscore at Prometheus 2.x and as a colon at 3.x, so the stored name would depend on the versions of both.
``docs/`` has an example (``operating.md``), a Grafana dashboard, alerts, and rules that record vLLM's own names for its
dashboards.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagepool.arguments import require_mapping
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.holders import KINDS, HeldPages
from pagepool.stats import CacheStats, TimeHistogram, WaitingStats

__all__ = ["CacheCollector"]


class HasStats(Protocol):
    """A `CacheManager`, whose numbers are read at each scrape."""

    def stats(self) -> CacheStats:
        """Return state and counters."""

    def held(self) -> HeldPages:
        """Return who holds the pages."""


class HasWaitingStats(Protocol):
    """A `WaitingQueue`, whose numbers are read at each scrape."""

    def stats(self) -> WaitingStats:
        """Return state and counters."""


class CacheCollector(Collector):
    """Collector that exports `CacheManager.stats` at each scrape: ``prometheus_client.REGISTRY.register(...)``.

    A scrape reads the managers in its own thread, in O(pages held). There is no other cost. ``pagepool_pool_*`` and
    ``pagepool_host_pool_*`` have the label ``pool``, the name of a pool; the other metrics count the pages of all pools.
    ``pagepool_waiting_*`` are the `WaitingQueue.stats` of the queue that belongs to a manager.
    """

    def __init__(
        self, manager: HasStats, labels: Mapping[str, str] | None = None, *, queue: HasWaitingStats | None = None
    ) -> None:
        """`labels` are added to each sample. As with vLLM, the dashboard distinguishes engines by ``model_name`` and
        ``engine``. Errors are those of `add`.
        """
        self._label_names = sorted(_require_labels(labels or {}))
        self._managers: dict[tuple[str, ...], HasStats] = {}
        self._queues: dict[tuple[str, ...], HasWaitingStats] = {}
        self.add(manager, labels, queue=queue)

    def add(self, manager: HasStats, labels: Mapping[str, str] | None = None, *, queue: HasWaitingStats | None = None) -> None:
        """Add another manager of the process, for example of another data-parallel rank, since a registry takes only one
        collector.

        Raise ArgumentError unless the labels have the same names and new values, and the names are letters, digits and
        underscores; ArgumentTypeError unless values are strings.
        """
        has_both = callable(getattr(manager, "stats", None)) and callable(getattr(manager, "held", None))
        if not has_both or not isinstance(manager.stats(), CacheStats):
            raise ArgumentTypeError(f"manager: got {type(manager).__name__}, allowed: CacheManager")
        if queue is not None and not isinstance(getattr(queue, "stats", str)(), WaitingStats):
            raise ArgumentTypeError(f"queue: got {type(queue).__name__}, allowed: WaitingQueue, or None")
        labels = _require_labels(labels or {})
        if sorted(labels) != self._label_names:
            raise ArgumentError(f"labels: got {sorted(labels)}, allowed: {self._label_names}")
        values = tuple(labels[name] for name in self._label_names)
        if values in self._managers:
            raise ArgumentError(f"labels: got {values}, which another manager has, allowed: others")
        self._managers[values] = manager
        if queue is not None:
            self._queues[values] = queue

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        stats = {values: manager.stats() for values, manager in self._managers.items()}
        held = {values: manager.held().num_pages_by_kind for values, manager in self._managers.items()}
        waiting = {values: queue.stats() for values, queue in self._queues.items()}
        return self._make_families(stats, waiting, held)

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without samples, from which a registry detects duplicates."""
        return self._make_families({}, {}, {})

    def _make_families(
        self,
        stats: Mapping[tuple[str, ...], CacheStats],
        waiting: Mapping[tuple[str, ...], WaitingStats],
        held: Mapping[tuple[str, ...], Mapping[str, Mapping[str, int]]],
    ) -> Iterator[Metric]:
        for kind, table, owners in (
            (GaugeMetricFamily, GAUGES, stats),
            (CounterMetricFamily, COUNTERS, stats),
            (TimesFamily, TIMES, stats),
            (GaugeMetricFamily, QUEUE_GAUGES, waiting),
            (CounterMetricFamily, QUEUE_COUNTERS, waiting),
        ):
            for name, (field, text) in table.items():
                family = kind(f"pagepool_{name}", text, labels=self._label_names)
                for values, each in owners.items():
                    sample = _sample_of(each, field)
                    if sample is not None:
                        family.add_metric(values, *sample)
                yield family
        for kind, table in ((GaugeMetricFamily, POOL_GAUGES), (CounterMetricFamily, POOL_COUNTERS)):
            for name, (field, text) in table.items():
                pools, _, counter = field.partition(".")
                family = kind(f"pagepool_{name}", text, labels=[*self._label_names, "pool"])
                for values, each in stats.items():
                    for pool, counts in getattr(each, pools).items():
                        family.add_metric((*values, pool), getattr(counts, counter))
                yield family
        text = "Pages charged to a tenant with a share."
        family = GaugeMetricFamily("pagepool_tenant_pages", text, labels=[*self._label_names, "tenant"])
        labels = [*self._label_names, "pool", "tenant"]
        of_pools = GaugeMetricFamily("pagepool_pool_tenant_pages", f"{text[:-1]}, in one pool.", labels=labels)
        for values, each in stats.items():
            for tenant, num_pages in each.num_pages_by_tenant.items():
                family.add_metric((*values, tenant), num_pages)
            for pool, counts in each.pools.items():
                for tenant, num_pages in counts.num_pages_by_tenant.items():
                    of_pools.add_metric((*values, pool, tenant), num_pages)
        yield family
        yield of_pools
        text = "Pages of one pool by kind of holder; a page of several kinds counts for the first."
        family = GaugeMetricFamily("pagepool_pool_holder_pages", text, labels=[*self._label_names, "pool", "holder"])
        for values, by_kind in held.items():
            for pool, counts in by_kind.items():
                for holder in KINDS:
                    family.add_metric((*values, pool, holder), counts.get(holder, 0))
        yield family


TimesFamily = partial(HistogramMetricFamily, unit="seconds")
GAUGES = {
    "kv_cache_usage_perc": ("usage", "Share of the pool's pages that requests or leases hold, 0 to 1."),
    "pages": ("num_pages", "Pages of the pool, without the null page."),
    "free_pages": ("num_free_pages", "Pages that nothing holds, cached ones included."),
    "held_pages": ("num_held_pages", "Pages that requests or leases hold."),
    "cached_pages": ("num_cached_pages", "Pages that can be hit, held or free."),
    "leased_pages": ("num_leased_pages", "Pages that are leased for a time, once for each lease."),
    "max_leased_pages": ("max_num_leased_pages", "Pages that may be leased for a time."),
    "sessions": ("num_sessions", "Sessions that have pages, requests or rows."),
    "never_expected_pages": ("expectations.num_never_pages", "Free pages that are not expected back."),
    "soon_expected_pages": ("expectations.num_pages_within_a_minute", "Free pages expected within a minute."),
    "later_expected_pages": ("expectations.num_later_pages", "Free pages expected later than in a minute."),
    "host_pages": ("host_tier.num_pages", "Pages of the host tier, without the null page. With a host tier only."),
    "host_free_pages": ("host_tier.num_free_pages", "Pages of the host tier that nothing holds, cached ones included."),
    "host_cached_pages": ("host_tier.num_cached_pages", "Pages of the host tier that can be loaded."),
    "host_pages_in_flight": ("host_tier.num_in_flight", "Saves and loads that are due or under way."),
    "store_queued_pages": ("store.num_queued_pages", "Pages being saved in the store. With a store behind the tier only."),
    "store_loading_pages": ("store.num_loading_pages", "Pages being loaded from the store."),
    "store_waiting_requests": ("store.num_waiting_requests", "Requests whose pages were looked up, and that wait."),
}
"""Names without ``pagepool_``, fields of `CacheStats`, and help texts. The tables below have the same form."""

COUNTERS = {
    "prefix_cache_queries": ("queries.num_queried_tokens", "Prompt tokens of admitted requests, counted once at admission."),
    "prefix_cache_hits": ("queries.num_hit_tokens", "Tokens of these prompts that were hit."),
    "prefix_cache_requests": ("queries.num_requests", "Requests admitted for the first time."),
    "preempted_prefix_cache_queries": ("preempted_queries.num_queried_tokens", "Tokens of preempted requests, admitted again."),
    "preempted_prefix_cache_hits": ("preempted_queries.num_hit_tokens", "Tokens of these requests that were hit."),
    "preempted_prefix_cache_requests": ("preempted_queries.num_requests", "Requests admitted again after a preemption."),
    "allocated_pages": ("num_allocated_pages", "Pages handed out."),
    "freed_pages": ("num_freed_pages", "Pages given back by their last holder."),
    "evicted_pages": ("num_evicted_pages", "Cached pages handed out again, which can no longer be hit."),
    "hit_pages": ("num_hit_pages", "Pages hit, once for each request. With adaptive eviction only."),
    "lru_hit_pages": ("num_lru_hit_pages", "Pages that LRU would have hit, an estimate. With adaptive eviction only."),
    "expected_pages_in_time": ("expectations.num_pages_in_time", "Expected pages that were used by then."),
    "expected_pages_late": ("expectations.num_late_pages", "Expected pages that were used later."),
    "expected_pages_unused": ("expectations.num_unused_pages", "Expected pages that were evicted or dropped unused."),
    "host_saved_pages": ("host_tier.num_saved_pages", "Pages saved in the host tier."),
    "host_loaded_pages": ("host_tier.num_loaded_pages", "Pages hit in the host tier and loaded."),
    "host_failed_pages": ("host_tier.num_failed_pages", "Pages whose save or load failed."),
    "host_evicted_pages": ("host_tier.num_evicted_pages", "Cached pages of the host tier taken for others."),
    "host_refused_pages": ("host_tier.num_refused_pages", "Pages not saved, because no page of the host tier was free."),
    "store_saved_pages": ("store.num_saved_pages", "Pages saved in the store."),
    "store_dropped_pages": ("store.num_dropped_pages", "Pages not saved, because the queue of the store was full."),
    "store_unsaved_pages": ("store.num_unsaved_pages", "Pages that the store failed to save."),
    "store_looked_up_pages": ("store.num_looked_up_pages", "Pages looked up in the store."),
    "store_found_pages": ("store.num_found_pages", "Pages that the store said it has."),
    "store_loaded_pages": ("store.num_loaded_pages", "Pages loaded from the store into the host tier."),
    "store_missing_pages": ("store.num_missing_pages", "Pages that were found, but could not be loaded."),
    "store_damaged_pages": ("store.num_damaged_pages", "Loaded pages with a wrong header or checksum."),
    "store_recomputed_pages": ("store.num_recomputed_pages", "Found pages not loaded, because computing them is faster."),
    "store_late_requests": ("store.num_late_requests", "Requests admitted before all of their pages came from the store."),
    "store_errors": ("store.num_errors", "Faults of the store: errors, and answers that no store may give."),
}
POOL_GAUGES = {
    "pool_pages": ("pools.num_pages", "Pages of one pool, without the null page."),
    "pool_free_pages": ("pools.num_free_pages", "Pages of one pool that nothing holds, cached ones included."),
    "pool_held_pages": ("pools.num_held_pages", "Pages of one pool that requests or leases hold."),
    "pool_cached_pages": ("pools.num_cached_pages", "Pages of one pool that can be hit, held or free."),
    "pool_leased_pages": ("pools.num_leased_pages", "Pages of one pool that are leased for a time, once for each lease."),
    "host_pool_pages": ("host_pools.num_pages", "Pages of the tier behind one pool, without the null page."),
    "host_pool_free_pages": ("host_pools.num_free_pages", "Pages of the tier behind one pool that nothing holds."),
    "host_pool_held_pages": (
        "host_pools.num_held_pages",
        "Pages of the tier behind one pool, held for transfers or rows.",
    ),
    "host_pool_cached_pages": ("host_pools.num_cached_pages", "Pages of the tier behind one pool that can be loaded."),
}
"""Mappings of `CacheStats` with fields of `PoolStats`, exported with the label ``pool``."""

POOL_COUNTERS = {
    "pool_allocated_pages": ("pools.num_allocated_pages", "Pages of one pool handed out."),
    "pool_evicted_pages": ("pools.num_evicted_pages", "Cached pages of one pool handed out again."),
    "pool_lost_hit_tokens": ("pools.num_lost_hit_tokens", "Prompt tokens that would have hit with more pages of one pool."),
    "pool_refusals": ("pools.num_refusals", "Calls that got no pages because one pool had too few."),
    "pool_passed_checkpoints": (
        "pools.num_passed_checkpoints",
        "States that did not become checkpoints because one pool had no page left.",
    ),
    "host_pool_allocated_pages": ("host_pools.num_allocated_pages", "Pages of the tier behind one pool taken for saves."),
    "host_pool_evicted_pages": (
        "host_pools.num_evicted_pages",
        "Cached pages of the tier behind one pool taken for others.",
    ),
}
QUEUE_GAUGES = {
    "waiting_requests": ("num_waiting", "Requests in the waiting queue. With a queue only."),
    "waiting_tokens": ("num_waiting_tokens", "Tokens of the waiting requests."),
    "waiting_hit_tokens": ("num_hit_tokens", "Tokens of the waiting requests that would hit now."),
    "waiting_work_tokens": ("num_work_tokens", "Tokens of the waiting requests to be computed, with a tenth of those to load."),
    "waiting_longest_seconds": ("longest_wait_seconds", "Longest wait of an admitted request since the queue was made."),
}
"""Fields of `WaitingStats`."""

QUEUE_COUNTERS = {
    "waiting_admitted_requests": ("num_admitted", "Requests that left the waiting queue to run."),
    "waiting_computed_tokens": ("num_computed_tokens", "Work of these requests."),
    "waiting_overtakes": ("num_overtakes", "Pairs of requests of which the later one was admitted first."),
    "waiting_overtaken_tokens": ("num_overtaken_tokens", "Work of requests admitted before earlier ones, once for each pair."),
}
TIMES = {
    "kv_block_lifetime": ("lifetime", "Sampled: time from a page's allocation to its eviction."),
    "kv_block_idle_before_evict": ("idle_before_eviction", "Sampled: time from a page's last use to its eviction."),
    "kv_block_reuse_gap": ("reuse_gap", "Sampled: time from a page's use to its next hit."),
}

LABEL_NAME = re.compile(r"(?!__|(le|pool|tenant|holder)$)[a-zA-Z_][a-zA-Z0-9_]*")
"""Label names that every server stores unchanged. ``le`` belongs to buckets, ``pool`` to pools, ``tenant`` to shares,
``holder`` to kinds of holders, and names with a leading ``__`` to the server.
"""


def _require_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in require_mapping("labels", labels).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentTypeError(f"labels: got {name!r}: {value!r}, allowed: strings")
        if not LABEL_NAME.fullmatch(name):
            reserved = "'le', 'pool', 'tenant', 'holder' and '__...'"
            raise ArgumentError(f"labels: got {name!r}, allowed: letters, digits and underscores, except {reserved}")
    return labels


def _sample_of(stats: CacheStats | WaitingStats, field: str) -> tuple[Any, ...] | None:
    """Return the value of a field for `add_metric`; None if the manager lacks the field."""
    outer, _, name = field.rpartition(".")
    owner = getattr(stats, outer) if outer else stats
    value = None if owner is None else getattr(owner, name)
    if not isinstance(value, TimeHistogram):
        return None if value is None else (value,)
    bounds = [*map(str, value.bounds_seconds), "+Inf"]
    return list(zip(bounds, accumulate(value.counts), strict=True)), value.sum_seconds
