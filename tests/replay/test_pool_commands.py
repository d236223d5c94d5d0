"""Eviction policies and host tiers in the commands: simulations against the scheduler, tables, sentences, plots, JSON."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_configs import LLAMA
from replays import make_loop, make_random_records, plan_of
from settings import scale

from pagepool import PagePool
from pagepool.errors import ArgumentError
from pagepool.replay import PolicyFigures, PoolFigures, Scheduler, TraceRecord, make_requests

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, write_config, write_trace

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans import command
from pagepool.replay.plans.command import choose_simulations
from pagepool.replay.plans.host_report import list_host_columns
from pagepool.replay.plans.plan import HostRun, HostSpeed, Plan, PlannedStore
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.plans.report import describe, describe_picture, list_columns, list_notes, list_policy_columns
from pagepool.replay.shared.options import EVICTION_POLICIES
from pagepool.replay.simulation.figures import HostFigures
from pagepool.replay.simulation.host import HostMemory
from pagepool.replay.simulation.runs import make_manager

NUM_SEEDS = scale(15)
SPEEDS = ["--host-bandwidth", "25GB", "--prefill-rate", "10k"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "loop.jsonl", make_loop())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, LLAMA)


def test_the_policies_are_those_of_the_pool() -> None:
    for eviction in EVICTION_POLICIES:
        assert PagePool(10, enable_caching=True, eviction=eviction).eviction == eviction
    with pytest.raises(ArgumentError, match=", ".join(map(repr, EVICTION_POLICIES))):
        PagePool(10, enable_caching=True, eviction="none")


class TestSimulator:
    @pytest.mark.parametrize(
        ("eviction", "tier"),
        [*((policy, None) for policy in EVICTION_POLICIES), ("lru", "write_through"), ("lru", "write_back")],
    )
    def test_equal_to_the_scheduler(self, eviction: str, tier: Any) -> None:
        """For any page size and length of a step, with tiers of a few pages, and with requests that are skipped."""
        seen: Counter[str] = Counter()
        for seed in range(15 - NUM_SEEDS, 15):  # a tier refuses pages from seed 9 only
            print(f"seed {seed}")
            rng = np.random.default_rng(seed)
            page_size, max_batched_tokens = int(rng.integers(1, 9)), int(rng.integers(1, 40))
            requests = make_requests(make_random_records(rng, 150))
            num_pages = 2 + int(rng.integers(30, 120)) // page_size
            simulator = PolicySimulator(requests, ModelPages(page_size), max_batched_tokens)
            host = moved = None
            if tier is None:
                hit_tokens = simulator.count_hits(eviction, num_pages)
            else:
                host = HostMemory(int(rng.integers(2, 150)), tier)
                hit_tokens, moved = simulator.run_with_host(num_pages, host)
                seen.update(saved=moved.saved_pages, loaded=moved.loaded_pages)
                seen.update(dropped=moved.evicted_pages, refused=moved.refused_pages)
            for batched in (False, True):
                manager = make_manager(num_pages, ModelPages(page_size), requests, eviction=eviction, host=host)
                limits = {"max_num_batched_tokens": max_batched_tokens, "max_num_seqs": 1}
                figures = Scheduler(manager, [replace(each) for each in requests], batched=batched, **limits).run()
                assert (hit_tokens, moved) == (figures.hit_tokens, figures.host)
                manager.check()
            seen.update(evicted=figures.evicted_pages, hit=hit_tokens, skipped=figures.skipped)
        assert min(seen.values()) > 0

    @pytest.mark.parametrize(("page_size", "max_batched_tokens"), [(0, 100), (16, 0)])
    def test_sizes_are_positive(self, page_size: int, max_batched_tokens: int) -> None:
        with pytest.raises(ArgumentError, match=r"got 0, allowed: (at least 1|1 to .*)"):
            PolicySimulator([], ModelPages(page_size), max_batched_tokens)


HITS_LESS = "Adaptive at 100 pages hits less than LRU: 6.0% instead of 6.8% of prompt tokens, as LRU at 90 pages."


class TestWordsOfPolicies:
    @pytest.mark.parametrize(
        ("runs", "sentence"),
        [
            (
                [("adaptive", 100, 141, 68, 198)],
                "Adaptive at 100 pages hits as much as LRU at 198 pages: 14.1% instead of 6.8% of prompt tokens.",
            ),
            (
                [("adaptive", 100, 68, 68, 100), ("adaptive", 200, 100, 80, 250), ("adaptive", 300, 100, 104, 290)],
                (
                    "Adaptive at 200 pages hits as much as LRU at 250 pages: 10.0% instead of 8.0% of prompt tokens. "
                    "At 1 of 3 sizes it hits less than LRU, by up to 0.4 points."
                ),
            ),
            ([("adaptive", 100, 60, 68, 90), ("adaptive", 200, 100, 100, 200)], HITS_LESS),
            (
                [("adaptive", 100, 60, 68, 90), ("adaptive", 200, 99, 100, 199)],
                f"{HITS_LESS} At 2 of 2 sizes it hits less than LRU, by up to 0.8 points.",
            ),
            ([("adaptive", 100, 68, 68, 100)], "Adaptive hits as much as LRU at all simulated sizes."),
            ([("adaptive", 8, 70, 68, None)], "Adaptive at 8 pages hits more than LRU: 7.0% instead of 6.8% of prompt tokens."),
        ],
    )
    def test_what_a_change_of_policy_saves(self, runs: list[tuple[str, int, int, int, int | None]], sentence: str) -> None:
        assert describe(plan_of(*runs))[3:] == [sentence]

    def test_the_size_that_was_asked_for_and_its_bytes(self) -> None:
        runs = [("adaptive", 1024, 141, 68, 2048), ("adaptive", 512, 70, 68, 640)]
        [sentence] = describe(plan_of(*runs, page_bytes=1 << 20, asked_num_pages=512))[3:]
        assert sentence.startswith("Adaptive at 512 pages (512.0 MiB) hits as much as LRU at 640 pages (640.0 MiB): 7.0% ")
        equal = [("adaptive", 1024, 141, 68, 2048), ("adaptive", 512, 68, 68, 512)]
        [sentence] = describe(plan_of(*equal, asked_num_pages=512))[3:]
        assert sentence == "Adaptive at 512 pages hits as much as LRU: 6.8% of prompt tokens."

    def test_columns(self) -> None:
        plan = plan_of(("adaptive", 100, 141, 68, 198), ("adaptive", 8, 10, 5, None))
        columns = dict(list_columns(plan))
        rates = [f"hit rate, {name}" for name in ("LRU", "adaptive", "best")]
        assert [*columns] == ["pages", *rates, "tokens saved, LRU"]
        assert columns["hit rate, adaptive"] == ["14.1%", "1.0%"]
        assert list_policy_columns(plan) == [
            ("pages", ["100", "8"]),
            ("LRU pages for the hits of adaptive", ["198", ""]),
        ]
        assert "100 pages: LRU 6.8%, best 90.0%, adaptive 14.1%; 8 pages: LRU 0.5%" in describe_picture(plan)


def plan_with_host(*runs: tuple[int, int, int, int | None], **changes: Any) -> Plan:
    """Return a plan with runs of pages, hits with the tier and of LRU alone in 1,000 tokens, and LRU's pages for the former."""
    pools = [PoolFigures(num_pages, 5, 0, 1_000, lru, 900) for num_pages, _, lru, _ in runs]
    hits = [PolicyFigures("lru", pool, hit, as_lru) for pool, (_, hit, _, as_lru) in zip(pools, runs, strict=True)]
    host_runs = tuple(HostRun(each, HostFigures(30, 20, 320, 4, 0, changes.get("page_bytes"))) for each in hits)
    return replace(plan_of(), pools=(*pools,), host=HostMemory(1000), host_runs=host_runs, **changes)


class TestWordsOfTiers:
    def test_what_the_tier_adds(self) -> None:
        runs = [(100, 330, 68, 950), (200, 340, 340, 200)]
        [sentence] = describe(plan_with_host(*runs))[3:]
        assert sentence == (
            "LRU with 1,000 host pages at 100 pages hits as much as LRU at 950 pages: 33.0% instead of 6.8% of prompt tokens."
        )
        [sentence] = describe(plan_with_host(*runs, asked_num_pages=200))[3:]
        assert sentence == "LRU with 1,000 host pages at 200 pages hits as much as LRU: 34.0% of prompt tokens."

    def test_what_it_saves_a_request(self) -> None:
        plan = plan_with_host((100, 330, 80, 950), page_bytes=1 << 20, speed=HostSpeed(10 << 20, 10))
        _, speed = describe(plan)[3:]
        assert speed == (
            "At 10 tokens/s and 10.0 MiB/s the tier saves 4.00 s a request behind 100 pages: 5.00 s of prefill for 50 more "
            "tokens that hit, less 1.00 s to load 4.0 MiB and save 6.0 MiB."
        )
        [run] = plan.host_runs
        assert run.as_dict(plan.speed)["seconds_saved_a_request"] == 4
        assert run.as_dict(None)["seconds_saved_a_request"] is None
        slow = replace(plan, speed=HostSpeed(1 << 20, 10))
        assert "the tier costs 5.00 s a request behind 100 pages: 5.00 s of prefill" in describe(slow)[4]


class TestWordsOfStores:
    @pytest.mark.parametrize(
        ("bandwidth", "end"),
        [
            (None, ""),
            (1 << 30, " One of 1.0 GiB/s loads 16,384 tokens/s, 1.6 times as many: its loads pay."),
            (1 << 28, " One of 256.0 MiB/s loads 4,096 tokens/s, 0.41 times as many: its loads pay only where they end while "),
        ],
    )
    def test_whether_its_loads_pay(self, bandwidth: int | None, end: str) -> None:
        plan = replace(plan_of(), page_bytes=1 << 20, store=PlannedStore(None, bandwidth, 10_000))
        *_, sentence = describe(plan)
        end += "requests wait for their turn." * end.endswith("while ")
        assert sentence == f"A token takes 64.0 KiB: at 10,000 tokens/s a store pays from 625.0 MiB/s on.{end}"
        assert plan.as_dict()["store"]["pays"] == (None if bandwidth is None else bandwidth == 1 << 30)

    def test_what_it_adds(self) -> None:
        plan = plan_with_host((100, 330, 80, 950), page_bytes=1 << 20, store=PlannedStore(5000))
        [run] = plan.host_runs
        assert len(describe(plan)) == 4
        plan = replace(plan, host_runs=(replace(run, store_hit_tokens=430),))
        *_, sentence = describe(plan)
        assert sentence == (
            "Behind 100 pages and 1,000 host pages, a store of 5,000 pages (4.9 GiB) adds at most 10.0 points: 43.0% instead "
            "of 33.0% of prompt tokens, 20 more a request."
        )
        plan = replace(plan, store=PlannedStore(5000, 1 << 20, 10))
        assert describe(plan)[-2] == f"{sentence} To load them takes 1.25 s, to compute them 2.00 s."
        assert dict(list_host_columns(plan)[1])["tokens more with store"] == ["100"]
        assert list_notes(plan)[-1].startswith("Tokens more with store: ")


class TestPlan:
    def test_a_store_adds_the_hits_of_a_larger_pool(self, trace: Path) -> None:
        """None in a pool that skips a request."""
        write_trace(trace, [*make_loop(), TraceRecord(999, 2000, 4, (7, 8, 9, 10))])
        options = ["--replays", 0, "--eviction", "lru", "--host-pages", 101, "--store-pages", 500]
        small, *pools = figures_of("plan", trace, "--num-pages", "100,200,600", *options)["pools"]
        larger = figures_of("plan", trace, "--num-pages", "800,1200", "--replays", 0, "--eviction", "lru")["pools"]
        assert small["host"]["store_hit_tokens"] is None
        assert [pool["host"]["store_hit_tokens"] for pool in pools] == [pool["lru_hit_tokens"] for pool in larger]

    def test_policies_are_chosen(self, trace: Path) -> None:
        def policies_of(*options: object) -> list[list[str]]:
            pools = figures_of("plan", trace, "--replays", 0, "--num-pages", "200,600", *options)["pools"]
            return [[*pool["policies"]] for pool in pools]

        assert policies_of() == policies_of("--eviction", "adaptive") == [["adaptive"]] * 2
        assert policies_of("--eviction", "lru") == [[], []]
        assert "Adaptive: hits" not in invoke("plan", trace, "--eviction", "lru").output
        assert "Adaptive: hits" in invoke("plan", trace, "--num-pages", 600).output

    def test_sizes_are_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sizes_of(*args: Any) -> list[int]:
            return [pool.num_pages for pool in choose_simulations(pools, *args)]

        sizes = [10, *range(100, 1000, 100), 20_000_000]
        pools = [PoolFigures(size, 5, int(size == 10), 1_000, 0, 0) for size in sizes]
        assert sizes_of(None, None, 1000) == [100, 300, 500, 700, 900]
        assert sizes_of(400, None, 1000) == [100, 300, 400, 500, 700, 900]
        assert sizes_of(None, "adaptive", 10**9) == sizes
        assert sizes_of(None, "lru", 1000) == []
        monkeypatch.setattr(command, "MAX_POLICY_PAGES", 2000)
        assert sizes_of(None, None, 1000) == [100, 900]
        assert sizes_of(400, None, 10**9) == []

    @pytest.mark.parametrize(
        ("host", "num_pages", "policy"),
        [(["900"], 900, "write_back"), (["2k", "--host-policy", "write_through"], 2000, "write_through")],
    )
    def test_figures_with_a_tier_are_those_of_a_replay(
        self, host: list[object], num_pages: int, policy: str, trace: Path
    ) -> None:
        """Also in a pool that skips a request."""
        write_trace(trace, [*make_loop(), TraceRecord(999, 2000, 4, (7, 8, 9, 10))])
        options = ["--host-pages", *host, "--max-batched-tokens", 700]
        planned = figures_of("plan", trace, "--num-pages", "100,600,1200", "--replays", 0, "--eviction", "lru", *options)
        for pool in planned["pools"]:
            replayed = figures_of("replay", trace, "--num-pages", pool["num_pages"], "--max-num-seqs", 1, *options)
            found = {"hit_tokens": replayed["hit_tokens"], "hit_rate": replayed["trace_hit_rate"]}
            assert pool["host"].items() >= (found | replayed["host"]).items()
        assert planned["host"] == {"num_pages": num_pages, "policy": policy}
        assert planned["speed"] is None

    def test_speeds(self, trace: Path, config: Path) -> None:
        options = ["--num-pages", 600, "--host-pages", "2k", "--eviction", "lru", "--model-config", config, *SPEEDS]
        [pool] = [pool for pool in figures_of("plan", trace, *options)["pools"] if pool["num_pages"] == 600]
        assert 0.06 <= pool["host"]["seconds_saved_a_request"] < 0.07

    def test_pictures(self, trace: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        plot, page = tmp_path / "plan.svg", tmp_path / "plan.html"
        options = ["--num-pages", "600,1000", "--host-pages", "2k", "--eviction", "lru", "--plot", plot, "--html", page]
        assert invoke("plan", trace, *options).exit_code == 0
        assert "LRU with 2,000 host pages, one after another" in plot.read_text()
        assert "600 pages: LRU 0.0%, best 24.7%, with host 45.5%;" in plot.read_text()
        assert "With 2,000 host pages, by size of the pool" in page.read_text()


class TestReplay:
    def test_the_policy_reaches_the_pool(self, trace: Path) -> None:
        options = [trace, "--num-pages", 600, "--max-num-seqs", 1]
        lru, named, adaptive = (
            figures_of("replay", *options, *policy) for policy in ([], ["--eviction", "lru"], ["--eviction", "adaptive"])
        )
        assert lru["hit_tokens"] == named["hit_tokens"] == 0 < adaptive["hit_tokens"]
        by_path = figures_of("replay", *options, "--eviction", "adaptive", "--compare")
        assert {figures["hit_tokens"] for figures in by_path.values()} == {adaptive["hit_tokens"]}
        text = invoke("replay", *options, "--eviction", "adaptive").stdout
        assert f"{trace}, 600 pages of 16 tokens, adaptive eviction\n" in text

    def test_side_by_side(self, trace: Path) -> None:
        options = [trace, "--num-pages", 600, "--max-num-seqs", 1, "--compare-eviction"]
        by_policy = figures_of("replay", *options)
        assert [*by_policy] == [*EVICTION_POLICIES]
        assert by_policy["lru"]["hit_tokens"] < by_policy["adaptive"]["hit_tokens"]
        title, heading, first, *rows = invoke("replay", *options).stdout.splitlines()
        assert title == f"{trace}, 600 pages of 16 tokens"
        assert heading.split() == [*EVICTION_POLICIES]
        assert first.split() == ["hit", "rate", *(f"{figures['hit_rate']:.1%}" for figures in by_policy.values())]
        assert not any(row.lstrip().startswith("hit rate") for row in rows)
        assert rows[0].split() == ["requests", "240", "240"]

    def test_figures(self, trace: Path) -> None:
        options = [trace, "--num-pages", 600, "--max-num-seqs", 2]
        alone, tiered = (figures_of("replay", *options, *host) for host in ([], ["--host-pages", "2k"]))
        assert "host" not in alone
        assert alone["hit_tokens"] == 0 < tiered["hit_tokens"]
        host = tiered["host"]
        assert host["loaded_tokens"] == 16 * host["loaded_pages"] == tiered["hit_tokens"]
        assert host["saved_pages"] > 0
        assert host["page_bytes"] is host["saved_bytes"] is host["loaded_bytes"] is None

    def test_bytes_of_a_model(self, trace: Path, config: Path) -> None:
        options = [trace, "--num-pages", 600, "--host-pages", "2k", "--model-config", config]
        host, half = (figures_of("replay", *options, *dtype)["host"] for dtype in ([], ["--kv-dtype", "float8_e4m3fn"]))
        assert host["page_bytes"] == 2 * half["page_bytes"] == 2 << 20
        assert (host["saved_bytes"], host["loaded_bytes"]) == (host["saved_pages"] << 21, host["loaded_pages"] << 21)
        output = invoke("replay", *options).stdout
        assert f"{host['loaded_bytes'] / 2**30:,.1f} GiB" in output

    def test_a_tier_behind_each_policy(self, trace: Path) -> None:
        options = [trace, "--num-pages", 600, "--max-num-seqs", 1, "--host-pages", "2k", "--compare-eviction"]
        assert {figures["host"]["loaded_pages"] > 0 for figures in figures_of("replay", *options).values()} == {True}

    @pytest.mark.parametrize("has_attention", [True, False])
    def test_states_are_loaded_too(self, has_attention: bool) -> None:
        requests = make_requests(make_loop(80))
        model = ModelPages(16, num_attention_groups=int(has_attention), num_state_groups=1)
        num_pages = 400 if has_attention else 20
        hits, loaded_tokens = [], []
        for host in (None, HostMemory(10_000)):
            manager = make_manager(num_pages, model, requests, 256, host=host)
            figures = Scheduler(manager, [replace(each) for each in requests], max_num_seqs=1).run()
            hits.append(figures.hit_tokens)
            loaded_tokens.append(figures.host and figures.host.loaded_tokens)
        assert hits[0] < hits[1]
        assert (loaded_tokens[1] is None) is not has_attention


class TestFleet:
    def test_the_policy_reaches_each_replica(self, trace: Path) -> None:
        pytest.importorskip("msgspec")
        options = ["--replicas", 2, "--num-pages", 300, "--router", "round-robin", "--max-num-seqs", 1, "--time-unit", "ms"]
        lru, adaptive = (
            figures_of("fleet", trace, *options, "--eviction", name)["round-robin"] for name in ("lru", "adaptive")
        )
        assert lru["hit_tokens"] == 0 < adaptive["hit_tokens"]
        title = invoke("fleet", trace, *options, "--eviction", "adaptive").stdout.splitlines()[0]
        assert title == f"{trace}: 2 replicas of 300 pages of 16 tokens, adaptive eviction"
