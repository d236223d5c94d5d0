"""The collector for Prometheus, scraped from a real endpoint; and the dashboard, which shows what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.request import urlopen

import pytest
from sources import ROOT

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec
from pagepool.errors import ArgumentError

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"


@pytest.fixture
def manager() -> CacheManager:
    manager = CacheManager(9, [CacheGroupSpec(FullAttentionSpec(4, 1, 8, "float16", False))], 64)
    for name, token_ids in {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6], "c": list(range(28))}.items():
        request = EngineRequest(name, token_ids)
        hits, num_hit_tokens = manager.get_computed_pages(request)
        assert manager.allocate_slots(request, len(token_ids) - num_hit_tokens, num_hit_tokens, hits) is not None
        if name != "c":
            manager.free(request)
    return manager


@pytest.fixture
def scraped(manager: CacheManager) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value by the name of a sample, buckets by name and bound."""
    from pagepool.metrics import CacheCollector

    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(manager, {"model_name": "tiny", "engine": "0"}))
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as response:
            families = list(parser.text_string_to_metric_families(response.read().decode()))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
    samples = [sample for family in families for sample in family.samples]
    return {sample.name + sample.labels.get("le", ""): (sample.labels, sample.value) for sample in samples}


def test_a_scrape_has_the_stats(manager: CacheManager, scraped: dict[str, tuple[dict[str, str], float]]) -> None:
    stats, values = manager.stats(), {name: value for name, (_, value) in scraped.items()}
    assert all(labels["model_name"] == "tiny" and labels["engine"] == "0" for labels, _ in scraped.values())
    assert values["vllm:kv_cache_usage_perc"] == stats.usage == 7 / 8
    assert values["pagepool:held_pages"] == 7
    assert values["pagepool:free_pages"] == 1
    assert values["pagepool:cached_pages"] == stats.num_cached_pages
    assert values["vllm:prefix_cache_queries_total"] == stats.queries.num_queried_tokens == 38
    assert values["vllm:prefix_cache_hits_total"] == stats.queries.num_hit_tokens == 4
    assert values["pagepool:prefix_cache_requests_total"] == 3
    assert values["pagepool:preempted_prefix_cache_requests_total"] == 0
    assert values["pagepool:allocated_pages_total"] == stats.num_allocated_pages
    assert values["pagepool:evicted_pages_total"] == stats.num_evicted_pages
    assert values["vllm:kv_block_reuse_gap_seconds_count"] == stats.reuse_gap.num_times == 1
    assert values["vllm:kv_block_reuse_gap_seconds_sum"] == pytest.approx(stats.reuse_gap.sum_seconds)
    assert values["vllm:kv_block_lifetime_seconds_bucket+Inf"] == stats.num_evicted_pages


def test_the_dashboard_shows_what_is_there(scraped: dict[str, tuple[dict[str, str], float]]) -> None:
    if not DASHBOARD.exists():
        pytest.skip("the documents are not here")
    panels = json.loads(Path(DASHBOARD).read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"(?:vllm|pagepool):\w+", expression)}
    scraped_names = {re.sub(r"(\+Inf|[\d.]+)$", "", name) for name in scraped}
    assert shown <= scraped_names
    assert scraped_names - shown <= {
        *(name for name in scraped_names if name.endswith(("_sum", "_count"))),
        "pagepool:free_pages",
    }


def test_the_registry_refuses_it_twice(manager: CacheManager) -> None:
    from pagepool.metrics import CacheCollector

    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(manager))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(CacheCollector(manager))


def test_several_managers_stand_side_by_side(manager: CacheManager) -> None:
    from pagepool.metrics import CacheCollector

    collector = CacheCollector(manager, {"engine": "0"})
    collector.add(CacheManager(5, manager.kv_cache_groups, 64), {"engine": "1"})
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    values = [registry.get_sample_value("pagepool:pages", {"engine": engine}) for engine in "01"]
    assert values == [8, 4]
    with pytest.raises(ArgumentError, match=r"labels: got \('1',\), which another manager has"):
        collector.add(manager, {"engine": "1"})
    with pytest.raises(ArgumentError, match=r"labels: got \[\], allowed: \['engine'\]"):
        collector.add(manager)
