"""Eviction policies in the commands: simulations against the scheduler, tables, sentences, JSON and options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replays import make_random_records, scale

from pagepool import PagePool
from pagepool.errors import ArgumentError
from pagepool.replay import Planner, PoolFigures, Scheduler, make_requests

pytest.importorskip("click")
pytest.importorskip("rich")
from command_line import figures_of, invoke, write_trace
from replays import make_loop, plan_of

from pagepool.replay.models.pages import ModelPages
from pagepool.replay.plans import command
from pagepool.replay.plans.command import choose_simulations
from pagepool.replay.plans.policies import PolicySimulator
from pagepool.replay.plans.report import describe, describe_picture, list_columns, list_policy_columns
from pagepool.replay.shared.memory import count_pool_bytes
from pagepool.replay.shared.options import EVICTION_POLICIES
from pagepool.replay.simulation.runs import make_manager

LEARNING = EVICTION_POLICIES[1:]
NUM_SEEDS = scale(10)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "loop.jsonl", make_loop())


def test_the_policies_are_those_of_the_pool() -> None:
    for eviction in EVICTION_POLICIES:
        assert PagePool(10, enable_caching=True, eviction=eviction).eviction == eviction
    with pytest.raises(ArgumentError, match=", ".join(map(repr, EVICTION_POLICIES))):
        PagePool(10, enable_caching=True, eviction="none")


class TestSimulator:
    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    def test_equal_to_the_scheduler(self, eviction: str) -> None:
        """For any page size and length of a step, and with requests that are skipped."""
        seen = {"evicted_pages": 0, "hit_tokens": 0, "skipped": 0}
        for seed in range(NUM_SEEDS):
            print(f"seed {seed}")
            rng = np.random.default_rng(seed)
            page_size, max_batched_tokens = int(rng.integers(1, 9)), int(rng.integers(1, 40))
            requests = make_requests(make_random_records(rng, 150))
            num_pages = 2 + int(rng.integers(30, 120)) // page_size
            counted = PolicySimulator(requests, page_size, max_batched_tokens).count_hits(eviction, num_pages)
            for batched in (False, True):
                manager = make_manager(num_pages, ModelPages(page_size), requests, eviction=eviction)
                limits = {"max_num_batched_tokens": max_batched_tokens, "max_num_seqs": 1}
                figures = Scheduler(manager, [replace(each) for each in requests], batched=batched, **limits).run()
                assert counted == figures.hit_tokens
            seen = {name: number + getattr(figures, name) for name, number in seen.items()}
        assert min(seen.values()) > 0

    @pytest.mark.parametrize("options", [{"page_size": 0}, {"page_size": 16, "max_batched_tokens": 0}])
    def test_sizes_are_positive(self, options: dict[str, int]) -> None:
        with pytest.raises(ArgumentError, match="must be at least 1, got 0"):
            PolicySimulator([], **options)


class TestComparison:
    def test_the_smallest_lru_pool_with_as_many_hits(self) -> None:
        for seed in range(NUM_SEEDS):
            print(f"seed {seed}")
            rng = np.random.default_rng(seed)
            planner = Planner(make_random_records(rng), page_size=int(rng.integers(1, 5)))
            [pool] = planner.make_plan([planner.max_num_pages]).pools
            for hit_tokens in rng.integers(pool.lru_hit_tokens + 1, size=5).tolist():
                hit_tokens -= hit_tokens % planner.make_plan([]).page_size
                num_pages = planner.compare(pool, "arc", hit_tokens).lru_num_pages
                assert num_pages is not None
                before, at = planner.make_plan([num_pages - 1, num_pages]).pools
                assert at.lru_hit_tokens >= hit_tokens
                assert num_pages == planner.min_num_pages or before.lru_hit_tokens < hit_tokens


class TestSentences:
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
            (
                [("arc", 100, 60, 68, 90), ("arc", 200, 100, 100, 200)],
                "ARC at 100 pages hits less than LRU: 6.0% instead of 6.8% of prompt tokens, as LRU at 90 pages.",
            ),
            (
                [("arc", 100, 60, 68, 90), ("arc", 200, 99, 100, 199)],
                (
                    "ARC at 100 pages hits less than LRU: 6.0% instead of 6.8% of prompt tokens, as LRU at 90 pages. "
                    "At 2 of 2 sizes it hits less than LRU, by up to 0.8 points."
                ),
            ),
            ([("arc", 100, 68, 68, 100)], "ARC hits as much as LRU at all simulated sizes."),
            ([("arc", 8, 70, 68, None)], "ARC at 8 pages hits more than LRU: 7.0% instead of 6.8% of prompt tokens."),
        ],
    )  # fmt: skip
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
        plan = plan_of(("arc", 100, 60, 68, 90), ("adaptive", 100, 141, 68, 198), ("adaptive", 8, 10, 5, None))
        columns = dict(list_columns(plan))
        assert [*columns] == [
            "pages",
            "hit rate, LRU",
            "hit rate, ARC",
            "hit rate, adaptive",
            "hit rate, best",
            "tokens saved, LRU",
        ]
        assert columns["hit rate, ARC"] == ["6.0%", ""]
        assert columns["hit rate, adaptive"] == ["14.1%", "1.0%"]
        assert list_policy_columns(plan) == [
            ("pages", ["100", "8"]),
            ("LRU pages for the hits of ARC", ["90", ""]),
            ("LRU pages for the hits of adaptive", ["198", ""]),
        ]
        assert "100 pages: LRU 6.8%, best 90.0%, ARC 6.0%, adaptive 14.1%; 8 pages: LRU 0.5%" in describe_picture(plan)


class TestPlan:
    def test_figures_are_those_of_a_replay(self, trace: Path) -> None:
        options = ["--num-pages", "600,1000", "--replays", 0]
        pools = figures_of("plan", trace, *options, "--eviction", "adaptive", "--eviction", "arc")["pools"]
        for pool in pools:
            assert [*pool["policies"]] == [*LEARNING]
            for policy, figures in pool["policies"].items():
                assert figures.keys() == {"hit_tokens", "hit_rate", "lru_num_pages"}
                one_by_one = ["--num-pages", pool["num_pages"], "--max-num-seqs", 1, "--eviction", policy]
                replayed = figures_of("replay", trace, *one_by_one)
                assert (figures["hit_tokens"], figures["hit_rate"]) == (replayed["hit_tokens"], replayed["trace_hit_rate"])
        assert pools[0]["policies"]["adaptive"]["hit_tokens"] > pools[0]["lru_hit_tokens"] == 0

    def test_policies_are_chosen(self, trace: Path) -> None:
        def policies_of(*options: object) -> list[list[str]]:
            pools = figures_of("plan", trace, "--replays", 0, "--num-pages", "200,600", *options)["pools"]
            return [[*pool["policies"]] for pool in pools]

        assert policies_of() == [["arc", "adaptive"]] * 2
        assert policies_of("--eviction", "adaptive", "--eviction", "lru") == [["adaptive"]] * 2
        assert policies_of("--eviction", "lru") == [[], []]
        assert "Megiddo" not in invoke("plan", trace, "--eviction", "lru").output
        assert "Megiddo" in invoke("plan", trace, "--num-pages", 600).output

    def test_sizes_are_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sizes_of(*args: Any) -> list[int]:
            return [pool.num_pages for pool in choose_simulations(pools, *args)[1]]

        sizes = [10, *range(100, 1000, 100), 20_000_000]
        pools = [PoolFigures(size, 5, int(size == 10), 1_000, 0, 0) for size in sizes]
        assert sizes_of(None, (), 1000) == [100, 300, 500, 700, 900]
        assert sizes_of(400, (), 1000) == [100, 300, 400, 500, 700, 900]
        assert sizes_of(None, ("arc",), 10**9) == sizes
        monkeypatch.setattr(command, "MAX_POLICY_PAGES", 4000)
        assert sizes_of(None, (), 1000) == [100, 900]
        assert sizes_of(400, (), 10**9) == []


class TestReplay:
    def test_the_policy_reaches_the_pool(self, trace: Path) -> None:
        options = [trace, "--num-pages", 600, "--max-num-seqs", 1]
        lru, named, adaptive = (
            figures_of("replay", *options, *policy) for policy in ([], ["--eviction", "lru"], ["--eviction", "adaptive"])
        )
        assert lru["hit_tokens"] == named["hit_tokens"] == 0 < adaptive["hit_tokens"]
        by_path = figures_of("replay", *options, "--eviction", "adaptive", "--compare")
        assert {figures["hit_tokens"] for figures in by_path.values()} == {adaptive["hit_tokens"]}
        assert f"{trace}, 600 pages of 16 tokens, arc eviction\n" in invoke("replay", *options, "--eviction", "arc").stdout

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
        assert rows[0].split() == ["requests", "240", "240", "240"]

    def test_more_than_there_is_memory_for(self, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        num_bytes = sum(count_pool_bytes(100_000, policy) for policy in EVICTION_POLICIES)
        monkeypatch.setattr("pagepool.replay.shared.memory.count_available_bytes", lambda: num_bytes - 1)
        result = invoke("replay", trace, "--num-pages", "100k", "--compare-eviction")
        assert result.exit_code == 1
        assert "3 pools of 100,000 pages of 16 tokens would take 22.7 MiB" in result.output


class TestFleet:
    def test_the_policy_reaches_each_replica(self, trace: Path) -> None:
        pytest.importorskip("msgspec")
        options = ["--replicas", 2, "--num-pages", 300, "--router", "round-robin", "--max-num-seqs", 1]
        lru, adaptive = (
            figures_of("fleet", trace, *options, "--eviction", name)["round-robin"] for name in ("lru", "adaptive")
        )
        assert lru["hit_tokens"] == 0 < adaptive["hit_tokens"]
        title = invoke("fleet", trace, *options, "--eviction", "adaptive").stdout.splitlines()[0]
        assert title == f"{trace}: 2 replicas of 300 pages of 16 tokens, adaptive eviction"
