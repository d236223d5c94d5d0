"""Prometheus metrics of a cache. Needs the extra ``pagepool[metrics]``.

Each name begins with ``pagepool_``. Where vLLM has a metric of the same meaning, the rest is vLLM's:
``vllm:prefix_cache_hits_total`` is ``pagepool_prefix_cache_hits_total``. No name has a colon: from prometheus-client 0.23 on, a
colon arrives as an underscore at Prometheus 2.x and as a colon at 3.x, so the name that is stored would depend on the versions
of both. ``docs/`` has a Grafana dashboard, alerts, and rules that record vLLM's own names for its dashboards.

>>> from prometheus_client import CollectorRegistry, generate_latest
>>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec
>>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=11, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
>>> registry = CollectorRegistry()
>>> registry.register(CacheCollector(manager, {"model_name": "tiny", "engine": "0"}))
>>> print(*generate_latest(registry).decode().splitlines()[:3], sep="\\n")
# HELP pagepool_kv_cache_usage_perc Share of the pool's pages that requests or pins hold, 0 to 1.
# TYPE pagepool_kv_cache_usage_perc gauge
pagepool_kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
"""

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.stats import CacheStats, HostTierStats, TimeHistogram

__all__ = ["CacheCollector"]


class CacheCollector(Collector):
    """Exports `CacheManager.stats` at each scrape: ``prometheus_client.REGISTRY.register(...)``.

    A scrape reads the managers in its own thread. There is no other cost.
    """

    def __init__(self, manager: CacheManager, labels: Mapping[str, str] | None = None) -> None:
        """`labels` are added to each sample. The dashboard distinguishes engines by ``model_name`` and ``engine``, as with
        vLLM. Errors are those of `add`.
        """
        self._label_names = sorted(_require_labels(labels or {}))
        self._managers: dict[tuple[str, ...], CacheManager] = {}
        self.add(manager, labels)

    def add(self, manager: CacheManager, labels: Mapping[str, str] | None = None) -> None:
        """Add another manager of the process, for example of another data-parallel rank: a registry takes one collector.

        ArgumentError unless its labels have the same names and other values, and the names are letters, digits and underscores;
        ArgumentTypeError unless values are strings.
        """
        labels = _require_labels(labels or {})
        if sorted(labels) != self._label_names:
            raise ArgumentError(f"labels: got {sorted(labels)}, allowed: {self._label_names}")
        values = tuple(labels[name] for name in self._label_names)
        if values in self._managers:
            raise ArgumentError(f"labels: got {values}, which another manager has")
        self._managers[values] = manager

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics."""
        stats = {values: manager.stats() for values, manager in self._managers.items()}
        return iter(self._make_families(stats))

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without samples, by which a registry detects duplicates."""
        return iter(self._make_families({}))

    def _make_families(self, stats: Mapping[tuple[str, ...], CacheStats]) -> list[Metric]:
        families: list[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = [
            *(GaugeMetricFamily(name, text, labels=self._label_names) for name, text in GAUGES.items()),
            *(CounterMetricFamily(name, text, labels=self._label_names) for name, text in COUNTERS.items()),
            *(HistogramMetricFamily(name, text, labels=self._label_names, unit="seconds") for name, text in TIMES.items()),
        ]
        for values, each in stats.items():
            for family, sample in zip(families, _samples_of(each), strict=True):
                if sample[0] is not None:
                    family.add_metric(values, *sample)
        return list(families)


GAUGES = {
    "pagepool_kv_cache_usage_perc": "Share of the pool's pages that requests or pins hold, 0 to 1.",
    "pagepool_pages": "Pages of the pool, without the null page.",
    "pagepool_free_pages": "Pages that nothing holds, cached ones included.",
    "pagepool_held_pages": "Pages that requests or pins hold.",
    "pagepool_cached_pages": "Pages that can be hit, held or free.",
    "pagepool_pinned_pages": "Held pages that are pinned.",
    "pagepool_max_pinned_pages": "Pages that may be pinned.",
    "pagepool_host_pages": "Pages of the host tier, without the null page. These and the next ones with a host tier only.",
    "pagepool_host_free_pages": "Pages of the host tier that nothing holds, cached ones included.",
    "pagepool_host_cached_pages": "Pages of the host tier that can be loaded.",
    "pagepool_host_pages_in_flight": "Saves and loads that are due or under way.",
}
COUNTERS = {
    "pagepool_prefix_cache_queries": "Tokens of prompts of admitted requests, counted once at admission.",
    "pagepool_prefix_cache_hits": "Tokens of these prompts that were hit.",
    "pagepool_prefix_cache_requests": "Requests admitted for the first time.",
    "pagepool_preempted_prefix_cache_queries": "Tokens of requests admitted again after a preemption.",
    "pagepool_preempted_prefix_cache_hits": "Tokens of these requests that were hit.",
    "pagepool_preempted_prefix_cache_requests": "Requests admitted again after a preemption.",
    "pagepool_allocated_pages": "Pages handed out.",
    "pagepool_freed_pages": "Pages given back by their last holder.",
    "pagepool_evicted_pages": "Cached pages handed out again, which can no longer be hit.",
    "pagepool_hit_pages": "Pages hit, once for each request. With adaptive eviction only.",
    "pagepool_lru_hit_pages": "Pages that LRU would have hit, an estimate. With adaptive eviction only.",
    "pagepool_host_saved_pages": "Pages saved in the host tier.",
    "pagepool_host_loaded_pages": "Pages hit in the host tier and loaded.",
    "pagepool_host_failed_pages": "Pages whose save or load failed.",
    "pagepool_host_evicted_pages": "Cached pages of the host tier taken for others.",
    "pagepool_host_refused_pages": "Pages that were not saved, because no page of the host tier was free.",
}
TIMES = {
    "pagepool_kv_block_lifetime": "Sampled: time from a page's allocation to its eviction.",
    "pagepool_kv_block_idle_before_evict": "Sampled: time from a page's last use to its eviction.",
    "pagepool_kv_block_reuse_gap": "Sampled: time from a page's use to its next hit.",
}


NUM_TIER_GAUGES = 4
"""The first fields of `HostTierStats`; the others are counters."""

LABEL_NAME = re.compile(r"(?!__|le$)[a-zA-Z_][a-zA-Z0-9_]*")
"""Names that every server stores unchanged. ``le`` belongs to buckets, and names with a leading ``__`` to the server."""


def _require_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentTypeError(f"labels: got {name!r}: {value!r}, allowed: strings")
        if not LABEL_NAME.fullmatch(name):
            raise ArgumentError(f"labels: got {name!r}, allowed: letters, digits and underscores, except 'le' and '__...'")
    return labels


def _samples_of(stats: CacheStats) -> list[tuple[Any, ...]]:
    """Return the values in the order of the tables above; None for one that the manager does not have."""
    tier = stats.host_tier or (None,) * len(HostTierStats._fields)
    queries, preempted = stats.queries, stats.preempted_queries
    gauges = (
        *(stats.usage, stats.num_pages, stats.num_free_pages, stats.num_held_pages, stats.num_cached_pages),
        *(stats.num_pinned_pages, stats.max_num_pinned_pages),
        *tier[:NUM_TIER_GAUGES],
    )
    counters = (
        *(queries.num_queried_tokens, queries.num_hit_tokens, queries.num_requests),
        *(preempted.num_queried_tokens, preempted.num_hit_tokens, preempted.num_requests),
        *(stats.num_allocated_pages, stats.num_freed_pages, stats.num_evicted_pages),
        *(stats.num_hit_pages, stats.num_lru_hit_pages),
        *tier[NUM_TIER_GAUGES:],
    )
    times = (stats.lifetime, stats.idle_before_eviction, stats.reuse_gap)
    return [*((value,) for value in (*gauges, *counters)), *map(_buckets_of, times)]


def _buckets_of(times: TimeHistogram) -> tuple[list[tuple[str, int]], float]:
    bounds = [*map(str, times.bounds_seconds), "+Inf"]
    return list(zip(bounds, accumulate(times.counts), strict=True)), times.sum_seconds
