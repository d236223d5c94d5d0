"""Two pools for a model with states: the replay runs them, and the plan divides memory between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import ATTENTION, GEMMA3, LLAMA, NEMOTRON, QWEN
from settings import scale

from pagepool import CacheManager
from pagepool._core import search_all_lost
from pagepool.errors import ArgumentError
from pagepool.replay import Scheduler, SimulatedRequest, TraceRecord, generate_workload, make_requests

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, refuse, write_config, write_trace

from pagepool.replay.models.pools import KV, STATES, ModelPools, read_pools
from pagepool.replay.plans.splits import MOST_SHARE, SplitFigures, SplitSimulator, find_split
from pagepool.replay.simulation.runs import make_manager_of_pools

SMALL = ModelPools(token_bytes=100, state_bytes=40_000, asked_interval=2048)
MEMORY = 12_000_000
GIB = 1 << 30


def make_chats(num_requests: int = 300, seed: int = 0) -> list[SimulatedRequest]:
    return generate_workload("chats", num_requests, seed=seed)


def replay(num_pages: dict[str, int], max_num_seqs: int, seed: int = 0) -> tuple[Scheduler, CacheManager]:
    requests = make_chats(seed=seed)
    manager = make_manager_of_pools(num_pages, SMALL, requests)
    search_all_lost(manager._store)
    return Scheduler(manager, requests, max_num_seqs=max_num_seqs, max_num_batched_tokens=100_000), manager


class TestPools:
    @pytest.mark.parametrize(
        ("config", "token_bytes", "state_bytes", "interval"),
        [
            (QWEN, 12 * 2048, 36 * (32 * 128 * 128 * 2 + 8192 * 3 * 2), 6144),
            ({**ATTENTION, **NEMOTRON}, 4 * 4096, 24 * (128 * 64 * 128 * 4 + 10_240 * 3 * 2), 20_480),
        ],
    )
    def test_bytes_are_those_of_all_layers(
        self, tmp_path: Path, config: dict[str, Any], token_bytes: int, state_bytes: int, interval: int
    ) -> None:
        pools = read_pools(str(write_config(tmp_path, config)))
        assert (pools.token_bytes, pools.state_bytes, pools.interval) == (token_bytes, state_bytes, interval)

    @pytest.mark.parametrize("config", [LLAMA, GEMMA3])
    def test_only_attention_and_states_are_apart(self, tmp_path: Path, config: dict[str, Any]) -> None:
        with pytest.raises(ArgumentError, match="pools apart need"):
            read_pools(str(write_config(tmp_path, config)))

    def test_pools_fit_the_memory(self) -> None:
        for percent in range(5, 95):
            num_pages = SMALL.divide(MEMORY, percent / 100)
            unused = MEMORY - SMALL.count_bytes(num_pages)
            assert 0 <= unused < sum(SMALL.page_bytes.values())

    def test_the_rule_counts_checkpoints_of_a_request(self) -> None:
        """Of 8,192 tokens, and of as many states as one at the end and four at multiples take."""
        assert SMALL.find_share(8192) == pytest.approx(5 * 40_000 / (5 * 40_000 + 8192 * 100))
        assert SMALL.find_least_share(MEMORY, 10) == pytest.approx(12 * 40_000 / MEMORY)


class TestReplay:
    @pytest.mark.parametrize("seed", range(scale(2)))
    def test_one_after_another_hits_as_with_the_scheduler(self, seed: int) -> None:
        figures = SplitSimulator(make_chats(seed=seed), SMALL).run(MEMORY, 0.3)
        scheduler, manager = replay(SMALL.divide(MEMORY, 0.3), 1, seed)
        run = scheduler.run()
        assert 0 < figures.hit_tokens == run.hit_tokens
        assert figures.prompt_tokens == run.prompt_tokens
        assert figures.lost_tokens == {name: pool.num_lost_hit_tokens for name, pool in manager.stats().pools.items()}
        assert max(figures.lost_tokens.values()) > 0
        manager.check()

    def test_many_at_once_never_wait_for_states(self) -> None:
        scheduler, manager = replay({KV: 20_000, STATES: 18}, 16)
        figures = scheduler.run()
        assert (figures.requests, figures.preemptions) == (300, 0)
        assert figures.copied_pages > 0
        assert manager.stats().pools[STATES].num_refusals == 0
        manager.check()

    def test_the_oldest_of_several_ends_early_where_room_is_short(self) -> None:
        requests = make_chats()
        alone, together = (SplitSimulator(requests, SMALL, num).run(2_000_000, 0.5) for num in (1, 8))
        assert alone.prompt_tokens == together.prompt_tokens
        assert 0 < together.hit_tokens != alone.hit_tokens
        assert together.skipped == alone.skipped

    def test_requests_larger_than_a_pool_are_skipped(self) -> None:
        requests = make_requests([TraceRecord(0, 9000, 1, tuple(range(18))), TraceRecord(0, 100, 1, (99,))])
        figures = SplitSimulator(requests, SMALL).run(1_000_000, 0.5)
        assert (figures.skipped, figures.prompt_tokens, figures.hit_tokens) == (1, 9100, 0)


def run_like(best: float, asked: list[float]) -> Any:
    """Return a run whose hits fall on both sides of the best share, where both pools lose as much."""

    def run(share: float) -> SplitFigures:
        asked.append(share)
        lost = {STATES: int(1000 * max(0.0, best - share)), KV: int(1000 * max(0.0, share - best))}
        return SplitFigures(share, {KV: 1, STATES: 1}, 1000, 500 - sum(lost.values()), lost, 0, 0)

    return run


class TestSearch:
    @pytest.mark.parametrize("best", [0.1, 0.3, 0.55, 0.8])
    def test_it_finds_the_split_where_both_lose_as_much(self, best: float) -> None:
        asked: list[float] = []
        found, runs = find_split(run_like(best, asked), 0.02)
        assert abs(found.share - best) < 0.02
        assert found.hit_tokens == max(figures.hit_tokens for figures in runs)
        assert [figures.share for figures in runs] == sorted(asked)
        assert len(asked) <= 10

    def test_it_leaves_a_state_for_each_running_request(self) -> None:
        asked: list[float] = []
        found, _ = find_split(run_like(0.1, asked), 0.4)
        assert min(asked) >= 0.4
        assert found.share < 0.42
        assert max(asked) <= MOST_SHARE

    def test_of_equal_hits_the_one_with_more_states_is_proposed(self) -> None:
        def run(share: float) -> SplitFigures:
            return SplitFigures(share, {KV: 1, STATES: 1}, 1000, 500, {KV: 1, STATES: 0}, 0, 0)

        found, runs = find_split(run, 0.02)
        assert found is runs[-1]


class TestCommand:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        return write_config(tmp_path, QWEN)

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        prefixes = [[100 * (i % 2) + j for j in range(8)] for i in range(40)]
        records = [TraceRecord(i, 4500, 20, (*prefix, 9000 + i)) for i, prefix in enumerate(prefixes)]
        return write_trace(tmp_path / "trace.jsonl", records)

    def plan(self, trace: Path, config: Path, *options: object) -> list[object]:
        return ["plan", trace, "--model-config", config, "--memory", "1GiB", "--max-num-seqs", 4, *options]

    def test_one_memory_is_divided(self, trace: Path, config: Path) -> None:
        figures = figures_of(*self.plan(trace, config))
        assert figures == figures_of(*self.plan(trace, config, "--arrays", "apart"))
        num_pages, page_bytes = figures["num_pages"], figures["page_bytes"]
        assert page_bytes == {KV: 16 * 24_576, STATES: 39_518_208}
        assert 0.9 * GIB < sum(num_pages[name] * page_bytes[name] for name in num_pages) <= GIB
        assert num_pages[STATES] >= 6
        chosen = next(split for split in figures["splits"] if split["share"] == figures["share"])
        assert chosen["hit_tokens"] == max(split["hit_tokens"] for split in figures["splits"]) > 0
        result = invoke(*self.plan(trace, config))
        assert result.exit_code == 0
        line = f'num_pages={{"kv": {num_pages[KV]:_}, "states": {num_pages[STATES]:_}}}'
        assert f"\n    {line}\n" in result.output
        assert (
            f"With {figures['share']:.1%} of 1.0 GiB for states {chosen['hit_rate']:.1%} of prompt tokens hit" in result.output
        )
        assert "every 6,144 tokens" in result.output

    def test_a_share_is_taken_as_it_is(self, trace: Path, config: Path) -> None:
        figures = figures_of(*self.plan(trace, config, "--state-share", 0.4, "--checkpoint-interval", 2048))
        assert (figures["share"], figures["checkpoint_interval"]) == (0.4, 2048)
        assert [split["share"] for split in figures["splits"]] == pytest.approx([0.3, 0.35, 0.4, 0.45, 0.5])

    def test_without_a_trace_the_rule_holds(self, config: Path) -> None:
        options = ["plan", "--model-config", config, "--memory", "200GiB", "--max-num-seqs", 64, "--mean-tokens", 12_000]
        figures = figures_of(*options)
        pools = ModelPools(24_576, 39_518_208)
        assert figures["share"] == pools.find_share(12_000)
        assert (figures["num_pages"], figures["splits"]) == (pools.divide(200 * GIB, figures["share"]), [])
        output = invoke(*options).output
        assert "For requests of 12,000 tokens on average: 28.4% of 200.0 GiB for states." in output
        num_kv, num_states = (figures["num_pages"][name] for name in ("kv", "states"))
        assert figures["requests"] == (num_kv - 1) // 750 < num_states - 2
        assert (
            f"{figures['requests']:,} of them fit at once in the pool of keys and values, {num_states - 2:,} in that of"
            in output
        )
        assert "first subtract weights, activations" in output

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--arrays", "apart", "--num-pages", "9"], "--num-pages has no meaning with --arrays apart"),
            (["--state-share", "0.5", "--eviction", "lru"], "--eviction has no meaning with --arrays apart"),
            (["--arrays", "shared", "--state-share", "0.5"], "--state-share needs --arrays apart"),
            (["--mean-tokens", "9"], "--mean-tokens and TRACE exclude each other"),
            (["--arrays", "apart", "--checkpoint-interval", "64,128"], "at most one --checkpoint-interval"),
            (["--arrays", "apart", "--memory", "1GiB,2GiB"], "--arrays apart needs --model-config, one --memory"),
            (["--state-share", "0"], "0"),
        ],
    )
    def test_options_that_contradict_it_are_refused(self, trace: Path, config: Path, options: list[str], message: str) -> None:
        refuse(2, message, *self.plan(trace, config, *options))

    def test_what_cannot_be_divided_is_refused(self, trace: Path, tmp_path: Path) -> None:
        options = ["plan", trace, "--memory", "1GiB", "--arrays", "apart", "--model-config"]
        refuse(2, "pools apart need layers of full attention and layers with states", *options, write_config(tmp_path, LLAMA))
        qwen = write_config(tmp_path, QWEN)
        refuse(2, "60 requests at once (--max-num-seqs) need 2.3 GiB of 1.0 GiB", *options, qwen, "--max-num-seqs", 60)
        refuse(
            2,
            "--state-share 10.0% is too little for states: 4 requests",
            *self.plan(trace, qwen, "--state-share", 0.1),
        )
        refuse(2, "Missing argument 'TRACE'", "plan", "--model-config", qwen)
        refuse(2, "--arrays needs --model-config with states", "plan", trace, "--arrays", "shared")

    def test_the_bytes_of_one_pool_are_explained(self, trace: Path, config: Path) -> None:
        """Where arrays lie over each other a page id takes a page, and otherwise a page in each of four groups."""
        shared = invoke(*self.plan(trace, config, "--arrays", "shared", "--replays", 0))
        assert "arrays of one layer each would take 4.0 times that (--arrays separate)" in shared.output
        separate = invoke(*self.plan(trace, config, "--arrays", "separate", "--replays", 0))
        assert "One group of layers uses it: 75% lies unused." in separate.output
        plans = [
            json.loads(invoke(*self.plan(trace, config, "--arrays", arrays, "--replays", 0, "--json", "-")).stdout)
            for arrays in ("shared", "separate")
        ]
        assert [plan["arrays"] for plan in plans] == ["shared", "separate"]
        assert plans[1]["page_bytes"] == 4 * plans[0]["page_bytes"]

    def test_several_sizes_are_those_of_one_pool(self, trace: Path, config: Path) -> None:
        figures = figures_of("plan", trace, "--model-config", config, "--memory", "1GiB,2GiB", "--replays", 0)
        assert figures["arrays"] == "shared"


class TestReplayCommand:
    def test_two_pools_run_many_at_once(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, QWEN)
        options = ["replay", "--limit", 60, "--model-config", config, "--num-pages", 3000, "--max-num-seqs", 8]
        figures = figures_of(*options, "--num-states", 20)
        assert (figures["requests"], figures["preemptions"]) == (60, 0)
        assert figures["hit_tokens"] > 0
        output = invoke(*options, "--num-states", 20).output
        assert "synthetic chats, 3,000 pages of 16 tokens and 20 of states, checkpoints every 6,144 tokens" in output
        refuse(2, "num_pages['states']: got 9, allowed for 8 rows: at least 10", *options, "--num-states", 9)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--no-batched"], "--no-batched has no meaning with --num-states"),
            (["--eviction", "adaptive"], "--eviction has no meaning with --num-states"),
            (["--compare-sessions"], "--compare-sessions has no meaning with --num-states"),
            ([], "--num-states needs --model-config"),
        ],
    )
    def test_what_it_cannot_compare_is_refused(self, options: list[str], message: str) -> None:
        refuse(2, message, "replay", "--limit", 10, "--num-states", 20, *options)

    def test_a_model_without_states_has_one_pool(self, tmp_path: Path) -> None:
        options = ["replay", "--num-states", 20, "--model-config", write_config(tmp_path, LLAMA)]
        refuse(2, "pools apart need layers of full attention and layers with states", *options)
