"""The numbers of a cache for Prometheus. Needs the extra ``pagepool[metrics]``.

Where vLLM has a metric of the same meaning it has that one's name, so that its dashboards and alerts work; the others begin
with ``pagepool:``. ``docs/grafana-dashboard.json`` shows them.

>>> from prometheus_client import CollectorRegistry, generate_latest
>>> from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec
>>> spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
>>> manager = CacheManager(num_pages=11, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
>>> registry = CollectorRegistry()
>>> registry.register(CacheCollector(manager, {"model_name": "tiny"}))
>>> print(*generate_latest(registry).decode().splitlines()[:3], sep="\\n")
# HELP vllm:kv_cache_usage_perc Pages that requests hold, per page of the pool, 0 to 1.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="tiny"} 0.0
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagepool.manager import CacheManager
from pagepool.stats import CacheStats, TimeHistogram

__all__ = ["CacheCollector"]


class CacheCollector(Collector):
    """Makes metrics of `CacheManager.stats` whenever they are scraped: ``prometheus_client.REGISTRY.register(...)``.

    Reads the manager from the thread that scrapes; 0.1 ms, and nothing in between.
    """

    def __init__(self, manager: CacheManager, labels: Mapping[str, str] | None = None) -> None:
        """`labels` stand at each sample; vLLM's are ``model_name`` and ``engine``."""
        self._manager = manager
        self._names = list(labels or {})
        self._values = list((labels or {}).values())

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        stats = self._manager.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._histogram("vllm:kv_block_lifetime", "Sampled: from when a page was handed out to its eviction.", stats.lifetime)
        yield self._histogram(
            "vllm:kv_block_idle_before_evict", "Sampled: from a page's last use to its eviction.", stats.idle_before_eviction
        )
        yield self._histogram("vllm:kv_block_reuse_gap", "Sampled: from a use of a page to its next hit.", stats.reuse_gap)

    def _gauges(self, stats: CacheStats) -> Iterator[Metric]:
        values = {
            "vllm:kv_cache_usage_perc": ("Pages that requests hold, per page of the pool, 0 to 1.", stats.usage),
            "pagepool:pages": ("Pages of the pool, the null page not counted.", stats.num_pages),
            "pagepool:free_pages": ("Pages that nobody holds.", stats.num_free_pages),
            "pagepool:held_pages": ("Pages that requests hold.", stats.num_held_pages),
            "pagepool:cached_pages": ("Pages that can be hit, held or free.", stats.num_cached_pages),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge

    def _counters(self, stats: CacheStats) -> Iterator[Metric]:
        first, again = stats.queries, stats.preempted_queries
        values = {
            "vllm:prefix_cache_queries": ("Tokens of prompts that were looked up.", first.num_queried_tokens),
            "vllm:prefix_cache_hits": ("Tokens of prompts that were hit.", first.num_hit_tokens),
            "pagepool:prefix_cache_requests": ("Prompts that were looked up.", first.num_requests),
            "pagepool:preempted_prefix_cache_queries": ("Tokens looked up after a preemption.", again.num_queried_tokens),
            "pagepool:preempted_prefix_cache_hits": ("Tokens hit after a preemption.", again.num_hit_tokens),
            "pagepool:preempted_prefix_cache_requests": ("Requests looked up after a preemption.", again.num_requests),
            "pagepool:allocated_pages": ("Pages handed out.", stats.num_allocated_pages),
            "pagepool:freed_pages": ("Pages given back by their last holder.", stats.num_freed_pages),
            "pagepool:evicted_pages": ("Pages handed out anew while they could be hit.", stats.num_evicted_pages),
        }
        for name, (text, value) in values.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter

    def _histogram(self, name: str, text: str, times: TimeHistogram) -> Metric:
        histogram = HistogramMetricFamily(name, text, labels=self._names, unit="seconds")
        bounds = [*map(str, times.bounds_seconds), "+Inf"]
        buckets = list(zip(bounds, accumulate(times.counts), strict=True))
        histogram.add_metric(self._values, buckets, times.sum_seconds)
        return histogram
