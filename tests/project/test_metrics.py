"""The Prometheus collector: what each server version stores; dashboard, rules and documents use exactly these names."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import pytest
from lying_store import LyingStore
from sources import ROOT

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    HostTierStats,
    MambaSpec,
    PoolStats,
    StoreStats,
    WaitingQueue,
    WaitingStats,
    hints,
)
from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.holders import KINDS

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

from pagepool.stats.prometheus import CacheCollector  # noqa: E402
from pagepool.stores import StoreTier  # noqa: E402

DOCS = ROOT / "docs"
ALERTS, VLLM_NAMES = DOCS / "prometheus-alerts.yml", DOCS / "prometheus-vllm-names.yml"
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
OPEN_0, OPEN_1 = (f"application/openmetrics-text;version={version}" for version in ("0.0.1", "1.0.0"))
TEXT_0, TEXT_1 = (f"text/plain;version={version}" for version in ("0.0.4", "1.0.0"))
UTF8, UNDERSCORES = "escaping=allow-utf-8", "escaping=underscores"
ACCEPT = {
    "2.42": f"{OPEN_1},{OPEN_0};q=0.75,{TEXT_0};q=0.5,*/*;q=0.1",
    "2.55, text only": f"{TEXT_0};q=0.5,*/*;q=0.4",
    "3.5": f"{OPEN_1};{UTF8};q=0.6,{OPEN_0};q=0.5,{TEXT_1};{UTF8};q=0.4,{TEXT_0};q=0.3,*/*;q=0.2",
    "3.5, legacy names": f"{OPEN_1};{UNDERSCORES};q=0.6,{OPEN_0};q=0.5,{TEXT_1};{UNDERSCORES};q=0.4,{TEXT_0};q=0.3,*/*;q=0.2",
    "3.5, native histograms": (
        f"{PROTOBUF};q=0.6,{OPEN_1};{UTF8};q=0.5,{OPEN_0};q=0.4,{TEXT_1};{UTF8};q=0.3,{TEXT_0};q=0.2,*/*;q=0.1"
    ),
    "3.5, text only": f"{TEXT_1};{UTF8};q=0.6,*/*;q=0.5",
}
"""The Accept headers of these server versions, which ask for each format and escaping that a client knows."""

STATES_OF_A_STORE = {f"pagepool_store_{name}" for name in ("queued_pages", "loading_pages", "waiting_requests")}

SERVER_LABELS = {"instance", "job", "alertname"}
"""Labels that a server adds."""


@pytest.fixture(scope="module")
def manager() -> CacheManager:
    pytest.importorskip("xxhash")
    groups = [CacheGroupSpec(FullAttentionSpec(4, 1, 8, "float16", False))]
    manager = CacheManager(9, groups, 64, eviction="adaptive", host_tier=HostTier(17, policy="write_through"))
    manager.set_shares({"tenant": 0.1})
    rows = [np.zeros((17, 128), np.uint8)]
    stored = StoreTier(manager, LyingStore({}, Random(0)), rows, "test", write="through")
    for name, token_ids in {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6], "c": list(range(28))}.items():
        request = EngineRequest(name, token_ids)
        hits, num_hit_tokens = manager.get_computed_pages(request)
        assert manager.allocate_slots(request, len(token_ids) - num_hit_tokens, num_hit_tokens, hits) is not None
        if name != "c":
            manager.free(request)
    assert len(manager.take_moves()) == 0
    saves = manager.take_moves()
    manager.fail(saves.number, saves=[1])
    manager.take_moves()  # the store gets pages a step later
    stored.fetch(EngineRequest("d", list(range(100, 120))))
    for _ in range(2):
        stored.poll()
    return manager


@pytest.fixture(scope="module")
def queue(manager: CacheManager) -> WaitingQueue:
    queue = WaitingQueue(manager)
    for name, token_ids in {"x": [1, 2, 3, 4, 9], "y": [5, 6, 7, 8, 9, 10], "z": [7]}.items():
        queue.add(name, token_ids)
    assert queue.take() is not None
    return queue


@pytest.fixture(scope="module")
def address(manager: CacheManager, queue: WaitingQueue) -> Iterator[str]:
    """Return host and port of an endpoint."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(manager, {"model_name": "tiny", "engine": "0"}, queue=queue))
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(30)


def scrape(address: str, accept: str) -> list[Any]:
    """Return the samples as received."""
    with urlopen(Request(f"http://{address}/metrics", headers={"Accept": accept}), timeout=30) as response:
        families = list(parser.text_string_to_metric_families(response.read().decode()))
    return [sample for family in families for sample in family.samples]


class Shown(NamedTuple):
    """An expression and its labels."""

    expression: str
    labels: set[str]


def read_panels() -> list[Shown]:
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    return [Shown(target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"]))) for target in targets]


def read_rules(path: Path) -> list[Shown]:
    """Return the text after ``expr:`` in one line or several, and all labels of the file."""
    text = path.read_text()
    labels = set(re.findall(r"\$labels\.(\w+)", text))
    found = re.findall(r"^( *)expr: (?:\|\n((?:\1 .*\n)+)|(.+)\n)", text, re.MULTILINE)
    assert len(found) == text.count("expr:")
    return [Shown(several or one, labels) for _, several, one in found]


def recorded_names() -> set[str]:
    return set(re.findall(r"^ +- record: (.+)$", VLLM_NAMES.read_text(), re.MULTILINE))


def names_in(expression: str) -> set[str]:
    """Return the metrics: all names except labels, functions and operators."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\b(?:by|on|ignoring|without) *\(.*?\)", " ", expression)
    return set(re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - {"and", "or", "unless", "offset"}


def labels_in(expression: str) -> set[str]:
    groupings = re.findall(r"\b(?:by|on|ignoring|without) *\((.*?)\)", expression)
    return {*re.findall(r"(\w+) *(?:=~|!~|!=|=)", expression), *re.findall(r"\w+", " ".join(groupings))}


need_docs = pytest.mark.skipif(not DOCS.exists(), reason="the documents are not here")


# --- received samples -----------------------------------------------------------------------------------------


def test_a_scrape_has_the_stats(manager: CacheManager, address: str) -> None:
    samples = scrape(address, "*/*")
    stats, values = manager.stats(), {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0" for sample in samples)
    assert values["pagepool_kv_cache_usage_perc"] == stats.usage == 7 / 8
    assert (values["pagepool_held_pages"], values["pagepool_free_pages"]) == (7, 1)
    assert values["pagepool_cached_pages"] == stats.num_cached_pages
    assert values["pagepool_leased_pages"] == stats.num_leased_pages == 0
    assert values["pagepool_max_leased_pages"] == stats.max_num_leased_pages == 1
    assert values["pagepool_prefix_cache_queries_total"] == stats.queries.num_queried_tokens == 38
    assert values["pagepool_prefix_cache_hits_total"] == stats.queries.num_hit_tokens == 4
    requests = values["pagepool_prefix_cache_requests_total"], values["pagepool_preempted_prefix_cache_requests_total"]
    assert requests == (3, 0)
    assert values["pagepool_allocated_pages_total"] == stats.num_allocated_pages
    assert values["pagepool_evicted_pages_total"] == stats.num_evicted_pages
    assert values["pagepool_hit_pages_total"] == stats.num_hit_pages == 1
    assert values["pagepool_lru_hit_pages_total"] == stats.num_lru_hit_pages == 1
    assert stats.host_tier == HostTierStats(16, 16, num_cached_pages=7, num_saved_pages=7, num_failed_pages=1)
    assert values["pagepool_host_pages"] == values["pagepool_host_free_pages"] == 16
    assert values["pagepool_host_cached_pages"] == values["pagepool_host_saved_pages_total"] == 7
    assert values["pagepool_host_failed_pages_total"] == 1
    assert values["pagepool_host_pages_in_flight"] == values["pagepool_host_loaded_pages_total"] == 0
    assert values["pagepool_host_refused_pages_total"] == 0
    assert values["pagepool_host_evicted_pages_total"] == 0
    assert stats.store == StoreStats(
        **dict.fromkeys(StoreStats._fields, 0) | {"num_waiting_requests": 1, "num_saved_pages": 7, "num_looked_up_pages": 4}
    )
    for field, value in stats.store._asdict().items():
        name = "pagepool_store_" + field.removeprefix("num_")
        assert values[name if name in STATES_OF_A_STORE else f"{name}_total"] == value
    assert values["pagepool_kv_block_reuse_gap_seconds_count"] == stats.reuse_gap.num_times == 1
    assert values["pagepool_kv_block_reuse_gap_seconds_sum"] == pytest.approx(stats.reuse_gap.sum_seconds)
    assert values["pagepool_kv_block_lifetime_seconds_bucket+Inf"] == stats.num_evicted_pages


def test_a_scrape_has_the_stats_of_the_queue(queue: WaitingQueue, address: str) -> None:
    values = {sample.name: sample.value for sample in scrape(address, "*/*")}
    stats = queue.stats()
    assert (stats.num_waiting, stats.num_waiting_tokens, stats.num_hit_tokens, stats.num_overtakes) == (2, 7, 0, 0)
    prefix = "pagepool_waiting_"
    assert {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)} == {
        "requests": stats.num_waiting,
        "tokens": stats.num_waiting_tokens,
        "hit_tokens": stats.num_hit_tokens,
        "work_tokens": stats.num_work_tokens,
        "longest_seconds": stats.longest_wait_seconds,
        "admitted_requests_total": stats.num_admitted,
        "computed_tokens_total": stats.num_computed_tokens,
        "overtakes_total": stats.num_overtakes,
        "overtaken_tokens_total": stats.num_overtaken_tokens,
    }
    assert len(WaitingStats._fields) == 9


def test_what_only_some_managers_have_is_theirs_alone(manager: CacheManager) -> None:
    plain = CacheManager(9, manager.kv_cache_groups, 64, eviction="lru")
    assert plain.stats().host_tier is None
    assert plain.stats().store is None
    collector = CacheCollector(plain, {"engine": "0"})
    collector.add(manager, {"engine": "1"})
    samples = [sample for family in collector.collect() for sample in family.samples]
    engines: dict[str, set[str]] = {}
    for sample in samples:
        engines.setdefault(sample.name, set()).add(sample.labels["engine"])
    special = {name for name in engines if name.startswith("pagepool_host_")}
    num_of_pools = len(fields(PoolStats)) - 5  # no page of a tier is leased or charged, and it loses and refuses nothing
    assert len(special) == len(HostTierStats._fields) + num_of_pools
    of_store = {name for name in engines if name.startswith("pagepool_store_")}
    assert len(of_store) == len(StoreStats._fields)
    special |= of_store | {
        "pagepool_hit_pages_total",
        "pagepool_lru_hit_pages_total",
        "pagepool_tenant_pages",
        "pagepool_pool_tenant_pages",
    }
    assert {name for name, values in engines.items() if values == {"1"}} == special
    assert {name for name, values in engines.items() if values == {"0", "1"}} == engines.keys() - special


def test_each_pool_has_its_samples() -> None:
    specs = [FullAttentionSpec(4, 1, 8, "float16", False), MambaSpec(4, ((2, 2),), "float16", checkpoint_interval=8)]
    groups = [CacheGroupSpec(spec, pool=pool) for spec, pool in zip(specs, ("kv", "states"), strict=True)]
    manager = CacheManager({"kv": 32, "states": 12}, groups, 64, host_tier=HostTier({"kv": 64, "states": 20}))
    manager.set_shares({"x": 0.2, "y": 0.2})
    manager.allocate_slots(EngineRequest("a", list(range(20)), tenant="x"), 16)
    collector = CacheCollector(manager, {"engine": "0"})
    samples = [sample for family in collector.collect() for sample in family.samples if "pool" in sample.labels]
    values = {(sample.name, *list(sample.labels.values())[1:]): sample.value for sample in samples}
    stats = manager.stats()
    assert stats.num_pages_by_tenant == {"x": 7, "y": 0}
    assert stats.pools == {
        "kv": PoolStats(31, 27, 4, 4, 0, 4, 0, {"x": 4, "y": 0}),
        "states": PoolStats(11, 8, 3, 0, 0, 3, 0, {"x": 3, "y": 0}),
    }
    assert stats.host_pools == {"kv": PoolStats(63, 63, 0, 0, 0, 0, 0), "states": PoolStats(19, 19, 0, 0, 0, 0, 0)}
    for prefix, pools in (("pagepool_pool_", stats.pools), ("pagepool_host_pool_", stats.host_pools)):
        for (name, pool), field in itertools.product(pools.items(), fields(PoolStats)):
            is_state = field.name.startswith(("num_pages", "num_free", "num_held", "num_cached", "num_leased"))
            metric, value = prefix + field.name.removeprefix("num_") + ("" if is_state else "_total"), getattr(pool, field.name)
            if field.name == "num_pages_by_tenant":
                assert {tenant: values.pop((f"{prefix}tenant_pages", name, tenant)) for tenant in value} == value
            else:
                assert values.pop((metric, name), 0) == value
    by_kind = manager.held().num_pages_by_kind
    assert by_kind == {"kv": {"request": 4}, "states": {"request": 3}}
    for pool, counts in by_kind.items():
        pages = {kind: values.pop(("pagepool_pool_holder_pages", pool, kind)) for kind in KINDS}
        assert pages == dict.fromkeys(KINDS, 0) | counts
    assert not values


@pytest.mark.parametrize("accept", ACCEPT.values(), ids=ACCEPT)
def test_names_are_the_same_at_each_server(address: str, accept: str) -> None:
    """The stored names do not depend on the versions of server and client."""
    expected, samples = scrape(address, "*/*"), scrape(address, accept)
    assert [(sample.name, sample.labels) for sample in samples] == [(sample.name, sample.labels) for sample in expected]
    assert {sample.name.partition("_")[0] for sample in samples} == {"pagepool"}


@need_docs
def test_what_is_shown_arrives(address: str) -> None:
    """Dashboard, alerts and recording rules query names and labels that are stored."""
    samples = scrape(address, "*/*")
    names, labels = {sample.name for sample in samples}, {label for sample in samples for label in sample.labels}
    panels, alerts, rules = read_panels(), read_rules(ALERTS), read_rules(VLLM_NAMES)
    assert all((panels, alerts, rules))
    for shown in [*panels, *alerts, *rules]:
        used = names_in(shown.expression)
        assert used, shown
        assert used <= names, shown
        assert labels_in(shown.expression) | shown.labels <= labels | SERVER_LABELS, shown
    seen = {name for shown in panels for name in names_in(shown.expression)}
    unseen = {name for name in names if name.endswith(("_sum", "_count"))} | {
        "pagepool_free_pages",
        "pagepool_pool_free_pages",
        "pagepool_host_pool_free_pages",
    }
    assert names - seen <= unseen


@need_docs
def test_vllms_names_are_recorded_of_ours(address: str) -> None:
    names = {sample.name for sample in scrape(address, "*/*")}
    text = VLLM_NAMES.read_text()
    pairs = re.findall(r"- record: vllm:(\w+)\n +expr: pagepool_(\w+)\n", text)
    assert {recorded for recorded, _ in pairs} == {ours for _, ours in pairs}
    assert {f"vllm:{recorded}" for recorded, _ in pairs} == recorded_names()
    of_vllm = ("pagepool_kv_", "pagepool_prefix_cache_queries", "pagepool_prefix_cache_hits")
    assert {f"pagepool_{ours}" for _, ours in pairs} == {name for name in names if name.startswith(of_vllm)}


@need_docs
def test_documents_name_what_arrives(address: str) -> None:
    text = "".join(path.read_text() for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    named = set(re.findall(r"\bpagepool_\w+", text)) - {hints.CLOSE, hints.SECONDS}
    assert named
    assert named <= {sample.name for sample in scrape(address, "*/*")}
    assert set(re.findall(r"\bvllm[:_]\w+", text)) - {"vllm_xargs"} <= recorded_names()
    assert not re.findall(r"\bpagepool:\w+", text)


@need_docs
def test_legends_and_variables_tell_engines_apart() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", "model_name", "instance"}
    for name in ("model_name", "instance"):
        assert variables[name]["definition"] == variables[name]["query"]["query"]
        assert re.fullmatch(rf"label_values\(pagepool_pages(\{{.*\}})?, {name}\)", variables[name]["definition"])
    for expression, labels in read_panels():
        assert labels - {"pool", "tenant", "holder"} == {"instance", "model_name", "engine"}
        assert expression.count("pagepool_") == expression.count('{instance=~"$instance",model_name=~"$model_name"}')
        assert "by (" not in expression or "by (le, instance, model_name, engine)" in expression


# --- alerts -----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Series in promtool's notation, one value a minute, and whether an alert fires after `hours`."""

    alert: str
    is_firing: bool
    series: dict[str, str]
    hours: int = 2


def make_buckets(name: str, **counts_per_step: int) -> dict[str, str]:
    """A histogram's series: the keys are bounds in seconds behind an underscore."""
    bounds, totals = [bound[1:] for bound in counts_per_step], [*itertools.accumulate(counts_per_step.values())]
    pairs = zip([*bounds, "+Inf"], [*totals, totals[-1]], strict=True)
    return {f'pagepool_kv_block_{name}_seconds_bucket{{le="{bound}"}}': f"0+{total}x1620" for bound, total in pairs}


PREEMPTED, NEW = "pagepool_preempted_prefix_cache_requests_total", "pagepool_prefix_cache_requests_total"
QUERIES, HITS = "pagepool_prefix_cache_queries_total", "pagepool_prefix_cache_hits_total"
HELD, LEASED, ALLOCATED = "pagepool_held_pages", "pagepool_leased_pages", "pagepool_allocated_pages_total"
FAULTS, DAMAGED = "pagepool_store_errors_total", "pagepool_store_damaged_pages_total"
DROPPED, STORED = "pagepool_store_dropped_pages_total", "pagepool_store_saved_pages_total"
EVICTED_AT_8 = make_buckets("idle_before_evict", _4=0, _8=100)
CASES = [
    Case("PagepoolPoolTooSmall", True, {"pagepool_kv_cache_usage_perc": "0.97+0x1620"}),
    Case("PagepoolPoolTooSmall", False, {"pagepool_kv_cache_usage_perc": "0.9+0x1620"}),
    Case("PagepoolPreemptions", True, {PREEMPTED: "0+20x1620", NEW: "0+100x1620"}),
    Case("PagepoolPreemptions", True, {PREEMPTED: "0+20x1620", NEW: "0+0x1620"}),
    Case("PagepoolPreemptions", False, {PREEMPTED: "0+5x1620", NEW: "0+100x1620"}),
    Case("PagepoolPreemptions", False, {PREEMPTED: "0+0x1620", NEW: "0+0x1620"}),
    Case("PagepoolEvictsWhatComesBack", True, EVICTED_AT_8 | make_buckets("reuse_gap", _1=50, _4=30, _8=20)),
    Case("PagepoolEvictsWhatComesBack", False, EVICTED_AT_8 | make_buckets("reuse_gap", _1=95, _4=5, _8=0)),
    Case("PagepoolEvictsWhatComesBack", False, EVICTED_AT_8 | make_buckets("reuse_gap", _1=0, _4=0, _8=0)),
    Case("PagepoolHitsFell", True, {QUERIES: "0+100x1620", HITS: "0+80x1500 120000+20x120"}, hours=27),
    Case("PagepoolHitsFell", False, {QUERIES: "0+100x1620", HITS: "0+80x1620"}, hours=27),
    Case("PagepoolHitsFell", False, {QUERIES: "0+100x1500 150000+0x120", HITS: "0+80x1500 120000+0x120"}, hours=27),
    Case("PagepoolPagesLost", True, {HELD: "3+0x1620", LEASED: "2+0x1620", ALLOCATED: "100+0x1620"}),
    Case("PagepoolPagesLost", False, {HELD: "3+0x1620", LEASED: "2+0x1620", ALLOCATED: "100+1x1620"}),
    Case("PagepoolPagesLost", False, {HELD: "0+0x1620", LEASED: "0+0x1620", ALLOCATED: "100+0x1620"}),
    Case("PagepoolPagesLost", False, {HELD: "2+0x1620", LEASED: "2+0x1620", ALLOCATED: "100+0x1620"}),
    Case("PagepoolStoreFails", True, {FAULTS: "0+1x1620", DAMAGED: "0+0x1620"}),
    Case("PagepoolStoreFails", True, {FAULTS: "0+0x1620", DAMAGED: "0+1x1620"}),
    Case("PagepoolStoreFails", False, {FAULTS: "0+1x10 10+0x1620", DAMAGED: "0+0x1620"}),
    Case("PagepoolStoreTooSlow", True, {DROPPED: "0+20x1620", STORED: "0+100x1620"}),
    Case("PagepoolStoreTooSlow", False, {DROPPED: "0+5x1620", STORED: "0+100x1620"}),
    Case("PagepoolStoreTooSlow", False, {DROPPED: "0+0x1620", STORED: "0+0x1620"}),
]


@need_docs
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    tests = []
    for case in CASES:
        expression = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
        samples = [{"labels": "{}", "value": 1}] if case.is_firing else []
        expected = {"expr": expression, "eval_time": f"{case.hours}h", "exp_samples": samples}
        series = [{"series": name, "values": values} for name, values in case.series.items()]
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": [expected]})
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    process = subprocess.run([program, "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert {case.alert for case in CASES} == set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))


# --- what is refused ------------------------------------------------------------------------------------------


def test_the_registry_refuses_it_twice(manager: CacheManager) -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(manager))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(CacheCollector(manager))


def test_several_managers_stand_side_by_side(manager: CacheManager) -> None:
    """Labels may be given in any order."""
    collector = CacheCollector(manager, {"engine": "0", "model_name": "tiny"})
    collector.add(CacheManager(5, manager.kv_cache_groups, 64), {"model_name": "tiny", "engine": "1"})
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    values = [registry.get_sample_value("pagepool_pages", {"engine": engine, "model_name": "tiny"}) for engine in "01"]
    assert values == [8, 4]
    with pytest.raises(ArgumentError, match=r"labels: got \('1', 'tiny'\), which another manager has, allowed: others"):
        collector.add(manager, {"engine": "1", "model_name": "tiny"})
    with pytest.raises(ArgumentError, match=r"labels: got \[\], allowed: \['engine', 'model_name'\]"):
        collector.add(manager)


@pytest.mark.parametrize("labels", [{"engine": 0}, {0: "engine"}, {"engine": None}], ids=str)
def test_labels_that_are_no_strings(manager: CacheManager, labels: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^labels: got .*, allowed: strings$"):
        CacheCollector(manager, labels)


@pytest.mark.parametrize("name", ["", "model-name", "modèle", "a:b", "le", "pool", "holder", "__name__", "0a", "a\n"])
def test_label_names_that_would_not_arrive(manager: CacheManager, name: str) -> None:
    """They would be rewritten for some servers, or have another meaning."""
    with pytest.raises(ArgumentError, match=r"^labels: got .*, allowed: letters, digits and underscores"):
        CacheCollector(manager, {name: "x"})


@pytest.mark.parametrize(("manager", "labels", "name"), [(None, None, "manager"), (7, {}, "manager")])
def test_what_is_no_manager_is_refused(manager: Any, labels: Any, name: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, allowed: "):
        CacheCollector(manager, labels)
    with pytest.raises(ArgumentTypeError, match=r"^labels: got list, allowed: a mapping$"):
        CacheCollector(manager, ["model"])  # type: ignore[arg-type]
