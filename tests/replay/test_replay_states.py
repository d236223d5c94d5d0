"""Replays and plans of models with states: chunks that end at checkpoints, hits by interval, and the commands' answers."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from model_configs import LLAMA, QWEN
from replays import generators, make_loop, make_random_requests, request_of, steps_of
from settings import scale

from pagepool.manager import CacheManager, PageHashing
from pagepool.replay import Planner, Scheduler, TraceRecord, read_trace
from pagepool.replay.models.caches import Reach
from pagepool.replay.models.pages import ModelPages, Windows
from pagepool.replay.plans.checkpoints import CheckpointSimulator
from pagepool.replay.simulation.allocator import HASH_SEED

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, refuse, write_config, write_trace

from pagepool.replay.shared.options import EVICTION_POLICIES
from pagepool.replay.simulation.runs import make_manager

MAMBA = {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 64, "state_size": 16, "conv_kernel": 4, "expand": 2}
MODELS = {
    "more states": QWEN,
    "more attention": QWEN | {"layer_types": (["full_attention"] * 3 + ["linear_attention"]) * 12},
    "states only": MAMBA,
}


class TestChunks:
    @pytest.mark.parametrize("batched", [False, True])
    def test_steps(self, batched: bool) -> None:
        requests = [request_of("a", 100, 3), replace(request_of("a", 100, 1), request_id="b")]
        manager = CacheManager(64, ModelPages(16, num_state_groups=1).make_groups(32), 1 << 16)
        scheduler = Scheduler(manager, requests, max_num_batched_tokens=80, max_num_seqs=1, batched=batched)
        assert steps_of(scheduler) == [[("a", 80)], [("a", 20)], [("a", 1)], [("a", 1)], [("b", 4)]]
        assert scheduler.figures.hit_tokens == 96
        assert scheduler.figures.copied_pages == 4  # checkpoints at 32, 64 and 96, and one hit


class TestSimulator:
    def test_windows_beside_states(self) -> None:
        seen: Counter[str] = Counter()
        for rng in generators(scale(10)):
            windows = (Windows(Reach(int(rng.integers(1, 40)), bool(rng.integers(2))), int(rng.choice([2, 8])), 2),)
            model = ModelPages(4, None, 1, num_state_groups=1, windows=windows, step_tokens=int(rng.integers(20, 100)))
            requests = make_random_requests(rng, num_requests=40)
            num_pages = max(model.count_pages(request.num_slots) for request in requests) + int(rng.integers(1, 200))
            ours = CheckpointSimulator(requests, model, model.step_tokens).run(num_pages, 16)
            manager = make_manager(num_pages, model, requests, 16)
            limits = {"max_num_batched_tokens": model.step_tokens, "max_num_seqs": 1}
            theirs = Scheduler(manager, [replace(each) for each in requests], **limits).run()
            assert (ours.hit_tokens, ours.copied_pages) == (theirs.hit_tokens, theirs.copied_pages)
            assert ours.kept_pages == sum(key.group_id == 3 for key in manager.page_pool.cached_page_hash_to_page)
            seen.update(theirs.as_dict())
        assert min(seen[name] for name in ("hit_tokens", "evicted_pages", "copied_pages")) > 0

    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    @pytest.mark.parametrize("num_attention_groups", [0, 1, 3])
    def test_equal_to_the_scheduler_with_one_request_at_a_time(self, num_attention_groups: int, eviction: str) -> None:
        seen: Counter[str] = Counter()
        for rng in generators(scale(20)):
            page_size = int(rng.choice([1, 2, 4, 8])) if num_attention_groups else 1
            model = ModelPages(page_size, None, num_attention_groups, num_state_groups=int(rng.integers(1, 4)))
            interval, budget = page_size * int(rng.integers(1, 5)), int(rng.integers(5, 100))
            num_pages = int(rng.integers(4, 60)) + num_attention_groups * int(rng.integers(80, 600)) // page_size
            requests = make_random_requests(rng, num_requests=40)
            ours = CheckpointSimulator(requests, model, budget).run(num_pages, interval, eviction)
            groups = model.make_groups(interval)
            manager = CacheManager(num_pages, groups, 1 << 16, eviction=eviction, hashing=PageHashing(hash_seed=HASH_SEED))
            theirs = Scheduler(manager, requests, max_num_batched_tokens=budget, max_num_seqs=1).run()
            assert (ours.hit_tokens, ours.copied_pages) == (theirs.hit_tokens, theirs.copied_pages)
            keys = manager.page_pool.cached_page_hash_to_page
            assert ours.kept_pages == sum(key.group_id >= num_attention_groups for key in keys)
            seen.update(theirs.as_dict())
        assert min(seen[name] for name in ("hit_tokens", "evicted_pages", "copied_pages")) > 0
        assert (seen["skipped"] > 0) == (num_attention_groups > 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests of 1,200 tokens, of four prompts."""
    records = (TraceRecord(0, 1200, 3, (i % 4, 10 + i % 4, 20 + i % 4)) for i in range(12))
    return write_trace(tmp_path / "trace.jsonl", records)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, QWEN)


class TestReplay:
    def test_the_model_decides_on_pages_and_states(self, trace: Path, config: Path) -> None:
        options = ("replay", trace, "--model-config", config, "--limit", 1)
        assert figures_of(*options)["allocated_pages"] == 3 + 2 * 3  # a checkpoint at 1,088 tokens
        assert figures_of(*options, "--checkpoint-interval", 2176)["allocated_pages"] == 3 + 2 * 3  # near the end
        assert figures_of(*options, "--page-size", 16)["allocated_pages"] == 76 + 3 * 3  # at 1,024 and 1,088
        assert figures_of(*options, "--no-caching")["allocated_pages"] == 3 + 3
        config.write_text(json.dumps(MAMBA))
        assert figures_of("replay", trace, "--model-config", config, "--max-num-seqs", 1)["hit_tokens"] == 8 * 1088


class TestPlan:
    def test_states_only(self, trace: Path, config: Path) -> None:
        config.write_text(json.dumps(MAMBA))
        figures = figures_of("plan", trace, "--model-config", config)
        assert (figures["page_bytes"], figures["min_num_pages"]) == (4 * (3 + 16) * 128 * 2, 2)
        assert (figures["most_hit_tokens"], figures["knees"]) == (8 * 1199, [])
        assert figures["pools"][-1]["num_pages"] == 1 + 12 * (4 + 3)  # checkpoints every 256 tokens, and 3 states more
        assert [each["hit_tokens"] for each in figures["pools"][-1]["checkpoints"]] == [8 * 1088] * 5  # near the end
        for pool in figures["pools"]:
            assert pool["lru_hit_rate"] is pool["lru_hit_tokens"] is pool["best_hit_rate"] is pool["best_hit_tokens"] is None
        output = invoke("plan", trace, "--model-config", config, "--replays", 3, "--memory", "200kB").output
        for text in (
            "12 requests, 14,400 prompt tokens, pages of 1 state and 19.0 KiB",
            "A page holds all states of a request.\nA checkpoint takes 1 page (19.0 KiB); a running request holds 1 page for ",
            "At 10 pages (190.0 KiB) checkpoints every 1,024 tokens hit most of 5 intervals: 60.4% of prompt tokens; in the ",
            "With a state after each token a pool that never evicts would hit 9,592 of 14,400 prompt tokens (66.6%).",
            "Requests of any length run in a pool of 2 pages (38.0 KiB).",
        ):
            assert text in output
        for text in ("attention", "Padding", "LRU:", "pages of 1 token"):
            assert text.lower() not in output.lower()

    def test_more_attention_than_states(self, trace: Path, config: Path) -> None:
        config.write_text(json.dumps(MODELS["more attention"]))
        figures = figures_of("plan", trace, "--model-config", config, "--num-pages", "40,100")
        alone = Planner(read_trace(str(trace)), 544).make_plan([1 + 39 // 3, 1 + 99 // 3])
        assert [pool["lru_hit_tokens"] for pool in figures["pools"]] == [pool.lru_hit_tokens for pool in alone.pools]
        assert figures["min_num_pages"] == 1 + 3 * 3 + 1
        output = invoke("plan", trace, "--model-config", config, "--num-pages", 100).output
        for text in (
            "A page holds 544 tokens of attention, in one of 3 groups of layers, or all states of a request. Padding is 1.5% ",
            "A checkpoint takes 1 page (12.8 MiB), as much as 181 tokens of attention; a running request holds 1 page for its ",
            "The largest request needs a pool of 11 pages ",
        ):
            assert text in output

    @pytest.mark.parametrize("model", ["more attention", pytest.param("states only", marks=pytest.mark.slow)])
    def test_pictures_of_policies(self, model: str, config: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        config.write_text(json.dumps(MODELS[model]))
        trace, files = write_trace(tmp_path / "loop.jsonl", make_loop()), (tmp_path / "plan.svg", tmp_path / "plan.html")
        sizes = "10,20" if model == "states only" else "100,120"
        options = ["--num-pages", sizes, "--replays", 0, "--eviction", "adaptive", "--plot", files[0], "--html", files[1]]
        result = invoke("plan", trace, "--model-config", config, *options)
        assert result.exit_code == 0, result.output
        for path in files:
            text = path.read_text()
            assert re.search(r"checkpoints every [\d,]+ tokens with adaptive eviction hit up to [\d.]+% of prompt tokens", text)
            assert re.search(r"checkpoints every [\d,]+, adaptive", text)
            assert ("attention alone" in text.lower()) == (model == "more attention")
            assert ("a state after each token" in text.lower()) == (model == "states only")

    def test_the_text(self, trace: Path, config: Path) -> None:
        result = invoke("plan", trace, "--model-config", config, "--num-pages", 50)
        assert result.exit_code == 0, result.output
        for text in (
            "12 requests, 14,400 prompt tokens, pages of 544 tokens and 12.8 MiB",
            "A page holds 544 tokens of attention, or the states of one of 3 groups of layers. Padding is 1.5% of a page of",
            "A checkpoint takes 3 pages (38.2 MiB), as much as 1,632 tokens of attention; a running request holds 3 pages for",
            "At 50 pages (637.5 MiB) checkpoints every 544 tokens hit most of 4 intervals: 60.4% of prompt tokens; in the end ",
            "With attention alone: a pool that never evicts hits 8,704 of 14,400 prompt tokens (60.4%).",
            "By interval of checkpoints, with 50 pages",
            "Every N: ",
        ):
            assert text in result.output
        for text in ("Belady", "Adaptive: hits", "best eviction"):
            assert text not in result.output


class TestBadInput:
    """One sentence, and exit code 2."""

    @pytest.mark.parametrize("command", ["plan", "replay"])
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--checkpoint-interval", 1000], "--checkpoint-interval: 1,000 is not a multiple of the page size, 16 tokens"),
            (["--checkpoint-interval", 64, "--page-size", 48], "64 is not a multiple of the page size, 48 tokens"),
            (["--checkpoint-interval", 1024, "--model-config", "hybrid"], "1,024 is not a multiple of the page size, 544 tok"),
            (["--checkpoint-interval", 1024, "--model-config", "llama"], "no layer has a state, so --checkpoint-interval has"),
            (["--state-dtype", "float32", "--model-config", "llama"], "no layer has a state, so --state-dtype has no meaning"),
            (["--page-size", 64, "--model-config", "states"], "no layer has attention, so --page-size has no meaning"),
            (["--kv-dtype", "float16", "--model-config", "states"], "no layer has attention, so --kv-dtype has no meaning"),
            (["--model-config", "unknown"], "has layers with a state, but none of linear_num_key_heads, "),
            (
                ["--model-config", "hybrid", "--state-dtype", "float3"],
                "dtype: got 'float3', allowed: one that NumPy, JAX or PyTorch",
            ),
            (["--checkpoint-interval", "0"], "0 is not in the range x>=1"),
            (["--checkpoint-interval", "256:1024"], "--checkpoint-interval"),
            (["--checkpoint-interval", "1KiB"], "'1KiB' is in bytes"),
            (["--state-dtype", "float32"], "--state-dtype needs --model-config"),
            (["--kv-dtype", "float16"], "--kv-dtype needs --model-config"),
        ],
    )
    def test_one_line(self, command: str, options: list[object], message: str, trace: Path, tmp_path: Path) -> None:
        configs = {"hybrid": QWEN, "states": MAMBA, "llama": LLAMA, "unknown": {**LLAMA, "layer_types": ["mamba"] * 32}}
        for name, content in configs.items():
            (tmp_path / name).write_text(json.dumps(content))
        result = refuse(2, message, command, trace, *(tmp_path / option if option in configs else option for option in options))
        assert len(result.output.splitlines()) == (4 if "Usage: " in result.output else 1)

    def test_a_pool_that_holds_no_request_with_its_states(self, trace: Path, config: Path) -> None:
        for name, sizes in (("plan", "5,6"), ("replay", "6")):
            refuse(1, "needs 7 pages, including the null page", name, trace, "--model-config", config, "--num-pages", sizes)
