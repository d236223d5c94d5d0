"""Traces, synthetic chats, the simulated scheduler, and its command."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import read_terminal
from oracle import OracleManager, OraclePool
from settings import NUM_OPERATIONS

from pagepool.errors import ArgumentError, ArgumentTypeError, PagePoolError, RequestTooLargeError
from pagepool.replay import (
    WORKLOADS,
    Figures,
    Scheduler,
    SimulatedRequest,
    TraceError,
    TraceRecord,
    generate_chats,
    generate_workload,
    make_requests,
    read_trace,
)
from pagepool.replay.traces.reader import parse_record
from pagepool.running_batch import RunningBatch
from pagepool.specs import CacheGroupSpec, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec, cdiv

CliRunner = pytest.importorskip("click.testing").CliRunner
pytest.importorskip("rich")
from replays import (  # noqa: E402
    PAGE_SIZE,
    SHARED_TRACE,
    compare_paths,
    counts,
    groups_of,
    make_manager,
    make_random_requests,
    request_of,
    steps_of,
)

from pagepool.replay.command import pagepool  # noqa: E402  only with the extra

ISSUE_KEYS = {
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "hit_rate",
    "generated_tokens",
    "steps",
    "evicted_pages",
    "preemptions",
    "peak_usage",
    "allocator_seconds",
    "wall_seconds",
    "skipped",
}
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


class CountingPool(OraclePool):
    """Counts the figures that a replay reports."""

    stats = SimpleNamespace(num_allocated_pages=0, num_evicted_pages=0)

    def take(self, num_pages: int, shard: range | None) -> list[int]:
        num_entries = len(self.entry_of_page)
        pages = super().take(num_pages, shard)
        num_evicted = num_entries - len(self.entry_of_page)
        self.stats = SimpleNamespace(
            num_allocated_pages=self.stats.num_allocated_pages + len(pages),
            num_evicted_pages=self.stats.num_evicted_pages + num_evicted,
        )
        return pages


class ReplayOracle(OracleManager):
    """The oracle as the allocator of a replay, without a running batch, states and a host tier."""

    checkpoint_interval = host_tier = None

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE, enable_caching: bool = True) -> None:
        super().__init__(num_pages, groups_of(page_size), 1 << 20, enable_caching)
        self.page_pool = CountingPool(num_pages, self.enable_caching)

    def require_capacity(self, num_tokens: int) -> None:
        if cdiv(num_tokens, self.kinds[0].page_size) > self.page_pool.num_pages - 1:
            raise RequestTooLargeError("too large")


def make_scheduler(num_pages: int, requests: list[SimulatedRequest], batched: bool, **options: Any) -> Scheduler:
    """Make a scheduler on the oracle, request by request, or on a running batch."""
    limits = {name: options.pop(name) for name in ("max_num_batched_tokens", "max_num_seqs") if name in options}
    manager = (make_manager if batched else ReplayOracle)(num_pages, **options)
    return Scheduler(manager, requests, batched=batched, **limits)


@pytest.mark.parametrize("batched", [False, True])
class TestDecisions:
    def test_prompts_share_the_budget_and_decoding_goes_first(self, batched: bool) -> None:
        requests = [request_of("a", 10, 3), request_of("b", 25, 2)]
        scheduler = make_scheduler(64, requests, batched, max_num_batched_tokens=16)
        assert steps_of(scheduler) == [
            [("a", 10), ("b", 6)],
            [("a", 1), ("b", 15)],
            [("a", 1), ("b", 4)],
            [("b", 1)],
        ]
        assert counts(scheduler.figures).generated_tokens == 5

    def test_at_most_so_many_run_at_once_in_order_of_arrival(self, batched: bool) -> None:
        requests = [request_of(name, 4, 2) for name in "abc"]
        assert steps_of(make_scheduler(64, requests, batched, max_num_seqs=2)) == [
            [("a", 4), ("b", 4)],
            [("a", 1), ("b", 1)],
            [("c", 4)],
            [("c", 1)],
        ]

    def test_the_first_that_does_not_fit_blocks_those_behind_it(self, batched: bool) -> None:
        requests = [request_of("a", 3 * 16), request_of("b", 2 * 16), request_of("c", 16)]
        assert steps_of(make_scheduler(1 + 4, requests, batched)) == [
            [("a", 48), ("b", None)],
            [("b", 32), ("c", 16)],
        ]

    def test_the_newest_is_preempted_and_comes_back_first(self, batched: bool) -> None:
        requests = [request_of("a", 16, 4), request_of("b", 16, 4), request_of("c", 16, 1)]
        scheduler = make_scheduler(1 + 3, requests, batched, enable_caching=False)
        assert steps_of(scheduler) == [
            [("a", 16), ("b", 16), ("c", 16)],
            [("a", 1), ("b", None)],  # c has ended, a takes its page, b is the newest and is preempted
            [("a", 1), ("b", None)],
            [("a", 1), ("b", None)],
            [("b", 17)],  # its prompt and the generated token
            [("b", 1)],
            [("b", 1)],
        ]
        assert scheduler.figures.preemptions == 1
        assert scheduler.figures.prompt_tokens == 48
        assert scheduler.figures.generated_tokens == 9

    def test_what_is_hit_again_after_a_preemption_is_counted_apart(self, batched: bool) -> None:
        figures = make_scheduler(1 + 4, [request_of("a", 32, 3), request_of("b", 32, 20)], batched).run()
        assert figures.preemptions == 1
        assert (figures.hit_tokens, figures.prompt_tokens) == (0, 64)
        assert figures.rehit_tokens == 16

    def test_an_empty_answer_ends_after_the_prompt(self, batched: bool) -> None:
        figures = make_scheduler(64, [request_of("a", 20, 0)], batched, max_num_batched_tokens=12).run()
        assert (figures.requests, figures.steps, figures.generated_tokens) == (1, 2, 0)

    def test_requests_larger_than_the_pool_are_skipped(self, batched: bool) -> None:
        # The last generated token needs no slot.
        requests = [request_of("fits", 3 * 16, 17), request_of("large", 3 * 16, 18), request_of("a", 1)]
        scheduler = make_scheduler(1 + 4, requests, batched)
        assert [request.request_id for request, _ in scheduler.skipped] == ["large"]
        figures = scheduler.run()
        assert (figures.requests, figures.skipped, figures.prompt_tokens) == (2, 1, 49)

    def test_a_manager_that_loses_pages_is_no_endless_loop(self, batched: bool) -> None:
        manager = make_manager(8)
        manager.page_pool.get_new_pages(7)
        with pytest.raises(PagePoolError, match=r"no request got room at usage 1\.000"):
            Scheduler(manager, [request_of("a", 16)], batched=batched).run()

    def test_all_pages_are_free_in_the_end_and_hits_are_not_kept_from_run_to_run(self, batched: bool) -> None:
        manager = make_manager(200)
        figures = Scheduler(manager, generate_chats(50), max_num_seqs=8, batched=batched).run()
        assert manager.page_pool.get_num_free_pages() == 199
        assert manager.req_to_page_hashes == {}
        manager.page_pool.check()
        assert 0 < figures.mean_usage <= figures.peak_usage <= 1
        assert 0 < figures.allocator_seconds < figures.wall_seconds
        again = Scheduler(manager, generate_chats(50), max_num_seqs=8, batched=batched).run()
        assert again.hit_tokens >= figures.hit_tokens
        assert again.allocated_pages < 2 * figures.allocated_pages


class TestScheduler:
    def test_steps_are_reported_as_they_go(self) -> None:
        seen = []
        figures = Scheduler(make_manager(1000), generate_chats(9)).run(lambda so_far: seen.append(so_far.requests))
        assert len(seen) == figures.steps
        assert seen == sorted(seen)
        assert seen[-1] == 9

    @pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
    def test_limits_must_be_positive(self, name: str) -> None:
        with pytest.raises(ArgumentError, match=f"{name} must be at least 1, got 0"):
            Scheduler(make_manager(8), [], **{name: 0})

    def test_nothing_to_do(self) -> None:
        assert counts(Scheduler(make_manager(8), []).run()) == Figures()


class TestEqualToTheOracle:
    def compare(self, make: Any, num_pages: int, **limits: Any) -> Figures:
        options = {name: limits.pop(name) for name in ("page_size", "enable_caching") if name in limits}
        oracles = Scheduler(ReplayOracle(num_pages, **options), make(), batched=False, **limits).run()
        for batched in (False, True):
            ours = Scheduler(make_manager(num_pages, **options), make(), batched=batched, **limits).run()
            assert counts(ours) == counts(oracles)
        return ours

    def test_chats_in_a_pool_that_is_large_enough(self) -> None:
        figures = self.compare(lambda: generate_chats(40, seed=3), 4000)
        assert figures.preemptions == figures.evicted_pages == 0
        assert figures.hit_rate > 0.3

    def test_chats_in_a_small_pool(self) -> None:
        figures = self.compare(lambda: generate_chats(100, seed=3), 700, max_num_batched_tokens=500)
        assert figures.preemptions > 0
        assert figures.rehit_tokens > 0
        assert figures.evicted_pages > 0

    @pytest.mark.parametrize("page_size", [1, 5, 64])
    def test_chats_by_page_size(self, page_size: int) -> None:
        self.compare(lambda: generate_chats(12), 8000 // page_size, page_size=page_size, max_num_seqs=5)

    def test_chats_without_caching(self) -> None:
        figures = self.compare(lambda: generate_chats(60), 700, enable_caching=False)
        assert figures.hit_tokens == figures.evicted_pages == 0
        assert figures.preemptions > 0

    @pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the trace is not here")
    def test_a_cut_of_the_trace(self) -> None:
        records = read_trace(str(SHARED_TRACE), limit=20)
        figures = self.compare(lambda: make_requests(records), 2500)
        assert figures.hit_tokens > 0
        assert figures.evicted_pages > 0


class TestEqualPaths:
    """A running batch and a manager give the same figures, and leave the same pages free in the same order."""

    def compare(self, requests: list[SimulatedRequest], *args: Any, **limits: Any) -> Figures:
        return compare_paths(requests, partial(make_manager, *args), **limits)

    def test_random_requests_in_tiny_pools(self) -> None:
        seen = Counter()
        for seed in range(min(150, max(50, NUM_OPERATIONS // 1000))):
            rng = np.random.default_rng(seed)
            page_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
            num_pages = 2 + int(rng.integers(150, 500)) // page_size
            limits = {"max_num_batched_tokens": int(rng.integers(1, 100)), "max_num_seqs": int(rng.integers(1, 12))}
            requests = make_random_requests(rng, num_requests=30)
            print(f"seed {seed}")
            seen.update(self.compare(requests, num_pages, page_size, seed % 5 > 0, **limits).as_dict())
        for name in ("preemptions", "rehit_tokens", "hit_tokens", "evicted_pages", "skipped"):
            assert seen[name] > 0

    @pytest.mark.parametrize("kind", ["window", "chunks", "hybrid"])
    def test_other_kinds_of_attention(self, kind: str) -> None:
        kinds: dict[str, Any] = {
            "full": FullAttentionSpec(4, 1, 1, "bfloat16", use_mla=False),
            "window": SlidingWindowSpec(4, 1, 1, "bfloat16", use_mla=False, sliding_window=10),
            "chunks": ChunkedLocalAttentionSpec(4, 1, 1, "bfloat16", use_mla=False, attention_chunk_size=16),
        }
        names = ["full", "window"] if kind == "hybrid" else [kind]
        groups = [CacheGroupSpec(kinds[name]) for name in names]
        for seed in range(15):
            requests = make_random_requests(np.random.default_rng(seed), num_requests=25)
            assert self.compare(requests, 120, 4, True, groups, max_num_seqs=9, max_num_batched_tokens=70).requests > 0

    @pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the trace is not here")
    def test_the_trace(self) -> None:
        figures = self.compare(make_requests(read_trace(str(SHARED_TRACE))), 100_000)
        assert figures.requests == 12_031
        assert figures.preemptions > 0
        assert figures.evicted_pages > 0


class TestChats:
    def test_the_same_seed_gives_the_same_chats(self) -> None:
        one, same, other = (generate_chats(30, seed) for seed in (1, 1, 2))
        assert [r.request_id for r in one] == [r.request_id for r in same] != [r.request_id for r in other]
        for first, second in zip(one, same, strict=True):
            np.testing.assert_array_equal(first.load_token_ids(), second.load_token_ids())

    def test_a_turn_continues_what_was_decoded_before(self) -> None:
        turns: dict[str, list[SimulatedRequest]] = {}
        for request in generate_chats(200):
            turns.setdefault(request.request_id.split(" turn ")[0], []).append(request)
        longest = max(turns.values(), key=len)
        assert len(longest) > 2
        for earlier, later in pairwise(longest):
            assert later.num_prompt_tokens > earlier.num_final_tokens
            np.testing.assert_array_equal(earlier.load_token_ids(), later.load_token_ids()[: earlier.num_final_tokens])

    def test_an_answers_pages_are_hit_by_the_next_turn(self) -> None:
        requests = [r for r in generate_chats(200) if r.request_id.startswith("chat 1 ")]
        assert len(requests) > 1
        figures = Scheduler(make_manager(4000), requests, max_num_seqs=1).run()
        assert figures.hit_tokens == sum(r.num_slots // PAGE_SIZE * PAGE_SIZE for r in requests[:-1])

    def test_system_prompts_are_shared(self) -> None:
        first_tokens = {tuple(r.load_token_ids()[:90].tolist()) for r in generate_chats(100)}
        assert 1 < len(first_tokens) <= 5

    def test_tokens_are_views_until_they_are_dropped(self) -> None:
        [request] = generate_chats(1)
        assert request.all_token_ids.dtype == np.int32
        assert request.all_token_ids.base is request.load_token_ids()
        assert len(request.all_token_ids) == request.num_prompt_tokens
        before = request.load_token_ids()
        request.drop_token_ids()
        assert request.load_token_ids() is not before
        np.testing.assert_array_equal(request.load_token_ids(), before)

    def test_none(self) -> None:
        assert generate_chats(0) == []


class TestTrace:
    def test_hash_ids_make_tokens(self) -> None:
        records = [
            TraceRecord(0, 1024, 4, (7, 1 << 60)),
            TraceRecord(0, 1000, 4, (7, -5)),
            TraceRecord(5, 513, 4, (7, 1 << 60)),
        ]
        first, second, third = (request.load_token_ids() for request in make_requests(records))
        assert [len(ids) for ids in (first, second, third)] == [1028, 1004, 517]
        assert first.dtype == np.int32
        np.testing.assert_array_equal(first[:512], second[:512])
        np.testing.assert_array_equal(first[:513], third[:513])
        assert not set(first[512:1024].tolist()) & set(second[512:1000].tolist())
        assert len(set(first[:1024].tolist())) == 1024

    def test_answers_follow_from_seed_and_line(self) -> None:
        records = [TraceRecord(0, 1, 50, (0,))] * 2
        answers = [request.load_token_ids()[1:].tolist() for seed in (1, 2) for request in make_requests(records, "t", seed)]
        assert len({tuple(answer) for answer in answers}) == 4
        assert make_requests(records, "t", 1)[0].load_token_ids()[1:].tolist() == answers[0]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b'{"timestamp": NaN}', "NaN is not a JSON number"),
            (b'{"timestamp": "\xff"}', "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"[1]", "a JSON object is expected, not list"),
            (b"{}", "lacks timestamp, input_length, output_length, hash_ids"),
        ],
    )
    def test_lines_that_are_no_object(self, text: bytes, reason: str) -> None:
        with pytest.raises(ArgumentError, match=reason):
            parse_record(text)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"timestamp": "0"}, "timestamp must be a number, got '0'"),
            ({"timestamp": True}, "timestamp must be a number"),
            ({"input_length": 0}, "input_length must be at least 1, got 0"),
            ({"output_length": -1}, "output_length must be at least 0, got -1"),
            ({"output_length": 1 << 31}, r"output_length must be below 2\*\*31"),
            ({"hash_ids": 3}, "hash_ids must be a list of integers"),
            ({"hash_ids": [1, "2"]}, "hash_ids must be a list of integers"),
            ({"hash_ids": [1, True]}, "hash_ids must be a list of integers"),
            ({"hash_ids": [1]}, "input_length 600 needs 2 hash_ids, got 1"),
            ({"input_length": 512}, "input_length 512 needs 1 hash_ids, got 2"),
        ],
    )
    def test_fields_that_do_not_fit(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(ArgumentError, match=reason):
            parse_record(json.dumps(GOOD | changes).encode())

    @pytest.mark.parametrize("name", ["input_length", "output_length"])
    @pytest.mark.parametrize("value", [1.0, "1", None, True])
    def test_lengths_are_integers(self, name: str, value: object) -> None:
        with pytest.raises(ArgumentTypeError, match=f"{name} must be an integer"):
            parse_record(json.dumps(GOOD | {name: value}).encode())

    def test_every_field_is_needed_and_others_are_ignored(self) -> None:
        assert parse_record(json.dumps(GOOD | {"more": [1]}).encode()) == parse_record(json.dumps(GOOD).encode())
        for name in GOOD:
            rest = {key: value for key, value in GOOD.items() if key != name}
            with pytest.raises(ArgumentError, match=f"lacks {name}"):
                parse_record(json.dumps(rest).encode())

    def test_the_message_has_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n")
        with pytest.raises(TraceError, match=r"bad\.jsonl:2: not valid JSON"):
            read_trace(str(path))
        assert len(read_trace(str(path), limit=1)) == 1

    def test_more_hash_ids_than_there_are_tokens_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pagepool.replay.traces.reader.MAX_TOKEN_IDS", 3 * 512)
        record = TraceRecord(0, 1024, 1, (1, 2))
        with pytest.raises(TraceError, match="t:2: more than 3 distinct hash ids"):
            make_requests([record, TraceRecord(0, 1024, 1, (3, 4))], "t")

    def test_packed_traces(self, tmp_path: Path) -> None:
        packed = gzip.compress(f"{json.dumps(GOOD)}\n".encode() * 500)
        (tmp_path / "good.jsonl.gz").write_bytes(packed)
        (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-9])
        (tmp_path / "plain.jsonl.gz").write_bytes(json.dumps(GOOD).encode())
        assert len(read_trace(str(tmp_path / "good.jsonl.gz"))) == 500
        for name in ("cut", "plain"):
            with pytest.raises(TraceError, match=rf"{name}\.jsonl\.gz:\d+: "):
                read_trace(str(tmp_path / f"{name}.jsonl.gz"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that share their first 512 tokens, and one of 600 pages."""
    path = tmp_path / "trace.jsonl"
    long = {"timestamp": 1, "input_length": 9600, "output_length": 1, "hash_ids": list(range(19))}
    lines = [GOOD, GOOD | {"hash_ids": [0, 2]}, long]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def invoke(*args: object, **options: Any) -> Any:
    return CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None}).invoke(pagepool, ["replay", *map(str, args)], **options)


def figures_of(*args: object, **options: Any) -> dict[str, Any]:
    result = invoke(*args, "--json", "-", **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestCommand:
    def test_figures_of_a_trace(self, trace: Path) -> None:
        figures = figures_of(trace, "--num-pages", 1000, "--max-num-seqs", 1)
        assert figures.keys() >= ISSUE_KEYS
        assert figures["requests"] == 3
        assert figures["prompt_tokens"] == 600 + 600 + 9600
        assert figures["hit_tokens"] == 512 + 592
        assert figures["hit_rate"] == pytest.approx(figures["hit_tokens"] / figures["prompt_tokens"])
        assert figures["generated_tokens"] == 3 + 3 + 1
        assert figures["preemptions"] == figures["evicted_pages"] == figures["skipped"] == 0

    def test_options_reach_the_replay(self, trace: Path) -> None:
        assert figures_of(trace, "--no-caching", "--num-pages", 1000)["hit_tokens"] == 0
        assert figures_of(trace, "--limit", 2)["requests"] == 2
        assert figures_of(trace, "--limit", 2, "--max-num-seqs", 1)["steps"] == 6
        assert figures_of(trace, "--limit", 1, "--max-batched-tokens", 100)["steps"] == 6 + 2
        assert figures_of(trace, "--limit", 1, "--page-size", 1)["allocated_pages"] == 602

    def test_both_ways_of_allocating_give_the_same(self, trace: Path) -> None:
        options = (trace, "--max-batched-tokens", 1000, "--num-pages", 610)
        by_path = figures_of(*options, "--compare")
        assert list(by_path) == ["manager", "batched"]
        manager, batched = ({**by_path[path], "allocator_seconds": 0, "wall_seconds": 0} for path in by_path)
        assert manager == batched
        for option in ("--batched", "--no-batched"):
            figures = figures_of(*options, option)
            assert {**figures, "allocator_seconds": 0, "wall_seconds": 0} == batched

    @pytest.mark.parametrize("option", ["--batched", "--no-batched"])
    def test_the_way_that_was_chosen_allocates(self, trace: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def admit(*_: object, **__: object) -> None:
            raise ArgumentError("batched")

        monkeypatch.setattr("pagepool.running_batch.RunningBatch.admit", admit)
        result = invoke(trace, option)
        assert (result.exit_code != 0) == (option == "--batched")

    def test_the_comparison_has_a_column_for_each(self, trace: Path) -> None:
        lines = invoke(trace, "--num-pages", 200, "--compare").output.splitlines()
        assert len([line for line in lines if line.startswith("skipped ")]) == 1
        columns = [line.split()[-2:] for line in lines if line.startswith(("  ", "prompt", "steps", "wall"))]
        assert columns[0] == ["manager", "batched"]
        assert ["1,200", "1,200"] in columns

    def test_paths_that_differ_are_told(self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        admit = RunningBatch.admit
        monkeypatch.setattr(RunningBatch, "admit", lambda *args, **options: admit(*args, **options, look_up=False))
        result = invoke(trace, "--max-num-seqs", 1, "--compare", "--json", tmp_path / "figures.json")
        assert result.exit_code == 1
        assert "Error: manager and batched differ in " in result.output
        assert "hit_tokens" in result.output
        by_path = json.loads((tmp_path / "figures.json").read_text())
        assert by_path["manager"]["hit_tokens"] > by_path["batched"]["hit_tokens"] == 0

    def test_requests_larger_than_the_pool_are_reported(self, trace: Path) -> None:
        result = invoke(trace, "--num-pages", 200)
        assert result.exit_code == 0
        assert f"skipped {trace}:3: " in result.output
        result = invoke(trace, "--num-pages", 1)
        assert result.exit_code == 1

    def test_many_skipped_requests_are_summed_up(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(f"{json.dumps(GOOD)}\n" * 25)
        result = invoke(path, "--num-pages", 2)
        lines = [line for line in result.output.splitlines() if line.startswith("skipped ")]
        assert len(lines) == 10 + 1
        assert lines[-1] == "skipped 15 more"

    def test_the_table_names_all_figures(self, trace: Path, tmp_path: Path) -> None:
        result = invoke(trace, "--json", tmp_path / "figures.json")
        assert result.exit_code == 0
        for text in (
            "hit rate",
            "10.2%",
            "10,800",
            "preemptions",
            "peak usage",
            "per page",
            "per step",
            "wall time",
            "hashing included",
        ):
            assert text in result.output
        assert "\x1b" not in result.output
        assert json.loads((tmp_path / "figures.json").read_text()).keys() >= ISSUE_KEYS

    def test_without_a_trace_chats_are_made_up_by_seed(self) -> None:
        def chats(seed: int) -> dict[str, Any]:
            figures = figures_of("--limit", 30, "--seed", seed)
            return {name: value for name, value in figures.items() if not name.endswith("seconds")}

        assert chats(1) == chats(1) != chats(2)
        assert chats(1)["requests"] == 30
        assert chats(1)["hit_rate"] > 0.2

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_a_workload_by_name(self, name: str) -> None:
        figures = figures_of("--workload", name, "--limit", 40, "--max-num-seqs", 4)
        requests = generate_workload(name, 40)
        assert figures["requests"] == 40
        assert figures["prompt_tokens"] == sum(request.num_prompt_tokens for request in requests)
        assert f"\nsynthetic {name}, 32,768 pages of 16 tokens\n" in f"\n{invoke('--workload', name, '--limit', 1).output}"

    def test_chats_are_the_default_workload(self) -> None:
        one, other = (figures_of("--limit", 30, *options) for options in ([], ["--workload", "chats"]))
        assert one["hit_tokens"] == other["hit_tokens"]
        assert one["prompt_tokens"] == other["prompt_tokens"]

    @pytest.mark.parametrize("name", ["chats", "loop"])
    def test_a_trace_is_no_workload(self, name: str, trace: Path) -> None:
        result = invoke(trace, "--workload", name)
        assert result.exit_code == 2
        assert result.output.endswith("Error: TRACE and --workload exclude each other\n")

    def test_a_trace_on_standard_input(self, trace: Path) -> None:
        assert figures_of("-", input=trace.read_bytes())["requests"] == 3
        result = invoke("-", input=b"{}\n")
        assert result.exit_code == 2
        assert "<stdin>:1: lacks timestamp" in result.output

    @pytest.mark.parametrize("line", ["{", "{}", json.dumps(GOOD | {"hash_ids": []})])
    def test_bad_lines(self, trace: Path, line: str) -> None:
        with trace.open("a") as file:
            file.write(line)
        result = invoke(trace)
        assert result.exit_code == 2
        assert f"{trace}:4: " in result.output

    @pytest.mark.parametrize(
        "options",
        [
            ["--page-size", "0"],
            ["--num-pages", "0"],
            ["--num-pages", str(1 << 62)],
            ["--page-size", str(1 << 40)],
            ["--max-batched-tokens", "0"],
            ["--max-num-seqs", "-1"],
            ["--limit", "-1"],
            ["--limit", "0"],
            ["--seed", "-1"],
            ["--seed", "x"],
            ["--workload", "lru"],
            ["--unknown"],
            ["no-such-file.jsonl"],
        ],
    )
    def test_bad_options(self, options: list[str]) -> None:
        result = invoke(*options)
        assert result.exit_code == 2
        assert "Error: " in result.output
        assert "Traceback" not in result.output


def run(*args: object, code: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    start = ["-m", "pagepool"] if code is None else ["-c", code]
    command = [sys.executable, *start, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


class TestProcess:
    def test_standard_output_carries_the_json_only(self, trace: Path) -> None:
        result = run("replay", trace, "--num-pages", 200, "--json", "-")
        assert result.returncode == 0
        assert json.loads(result.stdout)["skipped"] == 1
        assert "skipped" in result.stderr

    @pytest.mark.parametrize("command", ["plan", "replay"])
    @pytest.mark.parametrize("json_options", [[], ["--json", "-"]])
    def test_a_progress_bar_on_a_terminal_only(self, trace: Path, command: str, json_options: list[str]) -> None:
        pty = pytest.importorskip("pty")
        ours, theirs = pty.openpty()
        process_args = [sys.executable, "-m", "pagepool", command, str(trace), *json_options]
        with subprocess.Popen(process_args, stdout=theirs, env={**os.environ, "TERM": "xterm"}) as process:
            os.close(theirs)
            output = read_terminal(ours)
        assert process.returncode == 0
        assert (b"\x1b[" in output) == (not json_options)

    def test_importing_the_package_imports_no_command_line(self) -> None:
        code = "import sys, pagepool; assert not {'click', 'rich', 'pagepool.replay'} & set(sys.modules)"
        assert run(code=code).returncode == 0

    def test_the_public_names_need_no_extra(self) -> None:
        code = "import sys, pagepool.replay; assert not {'click', 'rich', 'matplotlib', 'msgspec', 'ray'} & set(sys.modules)"
        assert run(code=code).returncode == 0

    @pytest.mark.parametrize("name", ["click", "rich"])
    def test_a_missing_extra_is_named(self, name: str) -> None:
        code = f"import sys; sys.modules['{name}'] = None\nfrom pagepool.replay.cli import main\nmain()"
        result = run(code=code)
        assert result.returncode == 1
        assert "pip install 'pagepool[replay]'" in result.stderr
        assert "Traceback" not in result.stderr

    def test_what_is_missing_else_is_not_taken_for_an_extra(self) -> None:
        code = (
            "import sys; sys.modules['pagepool.replay.simulation.report'] = None\nfrom pagepool.replay.cli import main\nmain()"
        )
        result = run(code=code)
        assert result.returncode == 1
        assert "ModuleNotFoundError" in result.stderr
        assert "pip install" not in result.stderr

    def test_help_and_version(self) -> None:
        assert "replay" in run("--help").stdout
        assert "--max-batched-tokens" in run("replay", "--help").stdout
        assert "0." in run("--version").stdout
