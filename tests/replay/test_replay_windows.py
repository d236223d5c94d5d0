"""Replays and plans of models with windows: simulations against the scheduler, both rules, tables, sentences, plots."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_configs import DEEPSEEK_V4, FULL, GEMMA4_E4B, LLAMA, SLIDING
from replays import generators, make_loop, make_random_records
from settings import scale

from pagepool.replay import Planner, Scheduler, TraceRecord, make_requests
from pagepool.replay.models.caches import Reach
from pagepool.replay.models.pages import ModelPages, Windows

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, refuse, write_config, write_trace

from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.shared.options import EVICTION_POLICIES
from pagepool.replay.simulation.command import WINDOW_RULES
from pagepool.replay.simulation.runs import make_manager

WINDOWS = LLAMA | {"num_hidden_layers": 12, "sliding_window": 256, "layer_types": [SLIDING] * 10 + [FULL] * 2}
SLOW = ["windows only", "chunks", "pages of four sizes"]
MODELS = {
    "windows": WINDOWS,
    "windows only": LLAMA | {"model_type": "mistral", "sliding_window": 512},
    "chunks": LLAMA | {"num_hidden_layers": 12, "attention_chunk_size": 256, "model_type": "llama4_text"},
    "pages of two sizes": GEMMA4_E4B,
    "pages of four sizes": DEEPSEEK_V4,
}


def make_random_model(rng: np.random.Generator, step_tokens: int) -> ModelPages:
    """Return a model with up to two kinds of windows or chunks, and pages of 1 to 8 tokens."""
    kinds = [
        Windows(
            Reach(int(rng.integers(1, 30)), bool(rng.random() < 0.3)), int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 3))
        )
        for _ in range(rng.integers(1, 3))
    ]
    num_full = int(rng.integers(3))
    page_size = int(rng.choice([1, 2, 4])) if num_full else min(each.page_size for each in kinds)
    return ModelPages(page_size, None, num_full, windows=tuple(kinds), step_tokens=step_tokens)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "loop.jsonl", make_loop(120))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, WINDOWS)


class TestSimulator:
    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    @pytest.mark.parametrize("rule", WINDOW_RULES)
    def test_equal_to_the_scheduler(self, rule: Any, eviction: str) -> None:
        seen: Counter[str] = Counter()
        for rng in generators(scale(15)):
            model = make_random_model(rng, step_tokens=int(rng.integers(5, 40)))
            requests = make_requests(make_random_records(rng, 100))
            num_pages = max(model.count_pages(each.num_slots) for each in requests) + int(rng.integers(-8, 200))
            hit_tokens = PolicySimulator(requests, model, model.step_tokens).count_hits(eviction, num_pages, windows=rule)
            for batched in (False, True):
                manager = make_manager(num_pages, model, requests, eviction=eviction, windows=rule)
                limits = {"max_num_batched_tokens": model.step_tokens, "max_num_seqs": 1}
                figures = Scheduler(manager, [replace(each) for each in requests], batched=batched, **limits).run()
                assert hit_tokens == figures.hit_tokens
                manager.check()
            seen.update(evicted=figures.evicted_pages, hit=hit_tokens, skipped=figures.skipped)
        assert min(seen.values()) > 0

    def test_requests_that_fit_run_together_in_their_steps(self) -> None:
        for rng in generators(scale(15)):
            model = make_random_model(rng, step_tokens=int(rng.integers(5, 40)))
            requests = make_requests(make_random_records(rng, 60))
            num_pages = 1 + max(model.count_pages(each.num_slots) for each in requests)
            manager = make_manager(num_pages, model, requests)
            figures = Scheduler(manager, requests, max_num_batched_tokens=model.step_tokens, max_num_seqs=8).run()
            manager.check()
            assert (figures.requests, figures.skipped) == (60, 0)


class TestPlanner:
    def test_hits_are_multiples_of_the_pages_of_all_groups(self) -> None:
        """Full attention has pages of 2 tokens, windows of 6: 36 pages of 6 tokens take 108 pages of full attention."""
        model = ModelPages(2, 100, windows=(Windows(Reach(8), 6, 2),), step_tokens=4)
        assert (model.hit_size, model.num_hit_pages, model.hash_size, model.page_sizes) == (6, 3, 2, [2, 6, 6])
        records = [TraceRecord(0, 40, 1, ids, block_size=40) for ids in ((1,), (2,), (1,))]
        planner = Planner(records, model.hit_size)
        plan = planner.make_plan([60, 200], model=model)
        assert plan.most_hit_tokens == 36
        assert plan.min_num_pages == 1 + 20 + 2 * (2 + 2)  # 5 tokens behind a multiple the window before it is held
        assert [pool.lru_hit_tokens for pool in plan.pools] == [
            pool.lru_hit_tokens for pool in planner.make_plan([20, 67]).pools
        ]


class TestPlan:
    @pytest.mark.parametrize(
        "name", ["windows", "pages of two sizes", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
    )
    def test_hits_are_those_of_a_replay(self, name: str, trace: Path, config: Path) -> None:
        config.write_text(json.dumps(MODELS[name]))
        common = [trace, "--model-config", config, "--max-batched-tokens", 700]
        planned = figures_of("plan", *common, "--num-pages", "1500,8k", "--replays", 0, "--eviction", "adaptive")
        for pool in planned["pools"]:
            runs = {(run["eviction"], run["windows"]): run for run in pool["windows"]}
            assert [*runs] == [("lru", "ends"), ("adaptive", "ends"), ("lru", "all")]
            for eviction in EVICTION_POLICIES:
                options = ["--num-pages", pool["num_pages"], "--max-num-seqs", 1, "--eviction", eviction]
                replayed = figures_of("replay", *common, *options)
                for rule in WINDOW_RULES:
                    if (eviction, rule) in runs:
                        run, figures = runs[eviction, rule], replayed[f"windows={rule}"]
                        assert (run["hit_tokens"], run["hit_rate"]) == (figures["hit_tokens"], figures["trace_hit_rate"])
                        assert run["hit_tokens"] <= planned["most_hit_tokens"]

    def test_the_text(self, trace: Path, config: Path) -> None:
        options = ["--model-config", config, "--max-batched-tokens", 600, "--num-pages", 7000]
        output = invoke("plan", trace, *options).output
        for text in (
            "120 requests, 180,000 prompt tokens, pages of 16 tokens and 128.0 KiB",
            "Layers 0-9 (10) have a window of 256 tokens, in 5 groups with pages of 16 tokens.\n",
            "A running request holds up to 275 pages (34.4 MiB) for them in steps of 600 tokens.\n",
            "At 7,000 pages (875.0 MiB) LRU hits 41.3% of prompt tokens, adaptive 41.3%. If all pages of windows ",
            "stayed cached, LRU would hit 0.0%.\nIf windows took no memory, no policy would hit more than 41.3% there.\n",
            "To paste into CacheManager: retention=Retention(windows='ends', window_slack=64, window_interval=4096, ",
            "max_leased_share=0.2)\n",
            "A pool that never evicts, with all pages of windows, hits 74,400 of 180,000 prompt tokens (41.3%).",
            "The largest request needs a pool of 370 pages (46.2 MiB); smaller pools skip it.",
            'All: the same with LRU if each page of a window stays cached when it leaves it (windows="all").',
        ):
            assert text in output
        assert "adaptive" not in invoke("plan", trace, *options, "--eviction", "lru", "--replays", 0).output

    def test_padding(self, trace: Path, config: Path) -> None:
        config.write_text(
            json.dumps(WINDOWS | {"layer_types": [SLIDING] * 9 + [FULL] * 3, "num_key_value_heads": [4] * 9 + [3] * 3})
        )
        output = invoke("plan", trace, "--model-config", config, "--num-pages", 5000, "--replays", 0).output
        assert "Padding is 25.0% of a page of full attention.\n" in output

    def test_full_attention_knows_no_windows(self, trace: Path, config: Path) -> None:
        config.write_text(json.dumps(LLAMA))
        planned = figures_of("plan", trace, "--model-config", config, "--num-pages", 5000)
        assert {len(pool["windows"]) for pool in planned["pools"]} == {0}
        assert planned["model"]["windows"] == []
        config.write_text(json.dumps(WINDOWS))
        planned = figures_of("plan", trace, "--model-config", config, "--num-pages", 5000, "--eviction", "lru", "--replays", 0)
        [windows] = planned["model"]["windows"]
        assert (windows["reach"], windows["layers"]) == ({"size": 256, "is_chunked": False}, [*range(10)])

    @pytest.mark.parametrize("name", ["windows", "windows only"])
    def test_pictures(self, name: str, trace: Path, config: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        config.write_text(json.dumps(MODELS[name]))
        plot, page = tmp_path / "plan.svg", tmp_path / "plan.html"
        options = ["--model-config", config, "--num-pages", "1500,8k", "--replays", 0, "--plot", plot, "--html", page]
        assert invoke("plan", trace, *options).exit_code == 0
        for path in (plot, page):
            text = path.read_text()
            for part in (
                "LRU, one after another",
                "adaptive, one after another",
                "LRU, all, one after another",
                "LRU hits up to",
            ):
                assert part in text
            assert ("bound" in text) is (name == "windows")

    def test_a_tier(self, trace: Path, config: Path) -> None:
        refuse(
            2, "a model with windows is planned without a tier", "plan", trace, "--model-config", config, "--host-pages", 100
        )


class TestReplay:
    def test_both_rules_and_the_layers(self, trace: Path, config: Path) -> None:
        options = [trace, "--model-config", config, "--num-pages", 5000, "--max-num-seqs", 1, "--max-batched-tokens", 600]
        replayed = figures_of("replay", *options)
        assert [*replayed] == ["windows=ends", "windows=all"]
        assert replayed["windows=ends"]["hit_tokens"] > replayed["windows=all"]["hit_tokens"]
        output = invoke("replay", *options).output
        assert "windows=ends    windows=all" in output
        assert output.endswith("\nLayers 0-9 (10) have a window of 256 tokens, in 5 groups with pages of 16 tokens.\n")

    def test_what_else_is_compared(self, trace: Path, config: Path) -> None:
        options = [trace, "--model-config", config, "--num-pages", 5000, "--max-num-seqs", 4]
        by_path = figures_of("replay", *options, "--compare")
        assert [*by_path] == ["manager", "batched"]
        assert by_path["batched"]["hit_tokens"] > 0
        assert [*figures_of("replay", *options, "--compare-eviction")] == [*EVICTION_POLICIES]
        assert figures_of("replay", *options, "--no-caching")["hit_tokens"] == 0

    def test_a_tier(self, trace: Path, config: Path) -> None:
        options = [trace, "--model-config", config, "--num-pages", 1000, "--max-num-seqs", 2, "--host-pages", "20k"]
        for figures in figures_of("replay", *options).values():
            assert figures["host"]["loaded_pages"] > 0 < figures["hit_tokens"]
