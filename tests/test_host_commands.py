"""Host tiers in the commands: simulations against the scheduler, tables, sentences, plots, JSON and options."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_configs import LLAMA
from replays import make_loop, make_random_records, make_random_requests, plan_of, scale
from sources import UNSANITIZED

from pagepool.replay import PolicyFigures, PoolFigures, Scheduler, TraceRecord, make_requests

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, write_trace

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans.plan import HostRun, HostSpeed, Plan
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.plans.report import describe
from pagepool.replay.shared.memory import count_tier_bytes
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
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


class TestSimulator:
    @pytest.mark.parametrize(
        ("policy", "min_uses"), [("write_through", 1), pytest.param("write_back", 1, marks=pytest.mark.slow), ("write_back", 2)]
    )
    def test_equal_to_the_scheduler(self, policy: Any, min_uses: int) -> None:
        """For any page size and length of a step, with tiers of a few pages, and with requests that are skipped."""
        seen = np.zeros(6, dtype=int)
        for seed in range(15 - NUM_SEEDS, 15):  # a tier refuses pages from seed 9 only
            print(f"seed {seed}")
            rng = np.random.default_rng(seed)
            page_size, max_batched_tokens = int(rng.integers(1, 9)), int(rng.integers(1, 40))
            requests = make_requests(make_random_records(rng, 150))
            num_pages = 2 + int(rng.integers(30, 120)) // page_size
            host = HostMemory(int(rng.integers(2, 150)), policy, min_uses)
            counted = PolicySimulator(requests, page_size, max_batched_tokens).run_with_host(num_pages, host)
            for batched in (False, True):
                manager = make_manager(num_pages, ModelPages(page_size), requests, host=host)
                limits = {"max_num_batched_tokens": max_batched_tokens, "max_num_seqs": 1}
                figures = Scheduler(manager, [replace(each) for each in requests], batched=batched, **limits).run()
                assert counted == (figures.hit_tokens, figures.host)
                manager.check()
            hit_tokens, moved = counted
            pages = moved.saved_pages, moved.loaded_pages, moved.evicted_pages, moved.refused_pages
            seen += (*pages, hit_tokens, figures.skipped)
        assert min(seen) > 0


class TestReplay:
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

    def test_requests_together_in_tiny_pools(self) -> None:
        """Preempted requests come back from the tier; pool and tier stay sound."""
        num_preemptions = num_loaded_pages = 0
        for seed in range(NUM_SEEDS):
            print(f"seed {seed}")
            requests = make_random_requests(np.random.default_rng(seed), 60)
            smallest = 2 + max(-(-request.num_slots // 4) for request in requests)
            manager = make_manager(smallest + 8, ModelPages(4), requests, host=HostMemory(300))
            figures = Scheduler(manager, requests, max_num_batched_tokens=64, max_num_seqs=8).run()
            manager.check()
            assert manager.page_pool.get_num_free_pages() == manager.num_pages - 1
            assert figures.host is not None
            num_preemptions += figures.preemptions
            num_loaded_pages += figures.host.loaded_pages
        assert min(num_preemptions, num_loaded_pages) > 0

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

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what is resident")
    @UNSANITIZED
    def test_a_tier_takes_about_what_is_counted(self) -> None:
        """The tier has nearly all of its pages cached."""
        code = (
            "import os; from pagepool.replay import *\n"
            "from pagepool.replay.plans.policies import PolicySimulator\n"
            "from pagepool.replay.simulation.host import HostMemory\n"
            "records = [TraceRecord(0, 512 * 100, 1, tuple(range(100 * i, 100 * i + 100))) for i in range(300)]\n"
            "simulator = PolicySimulator(make_requests(records), 16)\n"
            "rss = lambda: int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
            "tiers = []; make = HostMemory.make_tier\n"
            "HostMemory.make_tier = lambda host: tiers.append(make(host)) or tiers[-1]\n"
            "simulator.run_with_host(4000, HostMemory(4000)); before = rss()\n"
            "simulator.run_with_host(4000, HostMemory(900_000)); print(rss() - before)"
        )
        taken = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        assert 0.4 * count_tier_bytes(900_000, 4000) < taken < 1.2 * count_tier_bytes(900_000, 4000)


def plan_with_host(*runs: tuple[int, int, int, int | None], **changes: Any) -> Plan:
    """Return a plan with runs of pages, hits with the tier and of LRU alone in 1,000 tokens, and LRU's pages for the former."""
    pools = [PoolFigures(num_pages, 5, 0, 1_000, lru, 900) for num_pages, _, lru, _ in runs]
    hits = [PolicyFigures("lru", pool, hit, as_lru) for pool, (_, hit, _, as_lru) in zip(pools, runs, strict=True)]
    host_runs = tuple(HostRun(each, HostFigures(30, 20, 320, 4, 0, changes.get("page_bytes"))) for each in hits)
    return replace(plan_of(), pools=(*pools,), host=HostMemory(1000), host_runs=host_runs, **changes)


class TestWords:
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


class TestPlan:
    @pytest.mark.parametrize("host", [["900"], ["2k", "--host-policy", "write_through"], ["1k", "--host-min-uses", 2]])
    def test_figures_are_those_of_a_replay(self, host: list[object], trace: Path) -> None:
        """Also in a pool that skips a request."""
        write_trace(trace, [*make_loop(), TraceRecord(999, 2000, 4, (7, 8, 9, 10))])
        options = ["--host-pages", *host, "--max-batched-tokens", 700]
        planned = figures_of("plan", trace, "--num-pages", "100,600,1200", "--replays", 0, "--eviction", "lru", *options)
        for pool in planned["pools"]:
            replayed = figures_of("replay", trace, "--num-pages", pool["num_pages"], "--max-num-seqs", 1, *options)
            assert (pool["host"]["hit_tokens"], pool["host"]["hit_rate"]) == (
                replayed["hit_tokens"],
                replayed["trace_hit_rate"],
            )
            assert pool["host"].items() >= replayed["host"].items()
        assert planned["host"] == dict(zip(("num_pages", "policy", "min_uses"), HostMemory(*read_host(host)), strict=True))
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


def read_host(options: list[object]) -> tuple[Any, ...]:
    """Return the arguments of `HostMemory` that options set."""
    given = dict(zip(options[1::2], options[2::2], strict=True))
    return int(str(options[0]).replace("k", "000")), given.get("--host-policy", "write_back"), given.get("--host-min-uses", 1)
