"""Traces, synthetic chats, the simulated scheduler, and its command."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pytest
from command_line import line_of, refuse
from replays import compare_paths, generators, make_manager, make_random_requests, request_of, steps_of
from settings import scale
from sources import run_python

from pagepool.errors import ArgumentError, ArgumentTypeError, PagePoolError
from pagepool.replay import (
    WORKLOADS,
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
from pagepool.request import RequestTraits
from pagepool.running_batch import RunningBatch


def make_scheduler(num_pages: int, requests: list[SimulatedRequest], batched: bool, **limits: Any) -> Scheduler:
    """Make a scheduler that allocates request by request, or with a running batch."""
    return Scheduler(make_manager(num_pages), requests, batched=batched, **limits)


@pytest.mark.parametrize("batched", [False, True])
class TestDecisions:
    def test_prompts_share_the_budget_and_decoding_goes_first(self, batched: bool) -> None:
        requests = [request_of("a", 10, 3), request_of("b", 25, 2)]
        scheduler = make_scheduler(64, requests, batched, max_num_batched_tokens=16)
        assert steps_of(scheduler) == [[("a", 10), ("b", 6)], [("a", 1), ("b", 15)], [("a", 1), ("b", 4)], [("b", 1)]]
        assert scheduler.figures.generated_tokens == 5

    def test_the_first_that_does_not_fit_blocks_those_behind_it(self, batched: bool) -> None:
        requests = [request_of("a", 3 * 16), request_of("b", 2 * 16), request_of("c", 16)]
        steps = steps_of(make_scheduler(1 + 4, requests, batched))
        assert steps == [[("a", 48), ("b", None)], [("b", 32), ("c", 16)]]

    def test_the_newest_is_preempted_and_comes_back_first(self, batched: bool) -> None:
        requests = [request_of("a", 16, 4), request_of("b", 16, 4), request_of("c", 16, 1)]
        scheduler = Scheduler(make_manager(1 + 3, enable_caching=False), requests, batched=batched)
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
        assert manager.registry.hashes == {}
        manager.page_pool.check()
        assert 0 < figures.mean_usage <= figures.peak_usage <= 1
        assert 0 < figures.allocator_seconds < figures.wall_seconds
        seen: list[int] = []
        scheduler = Scheduler(manager, generate_chats(50), max_num_seqs=8, batched=batched)
        again = scheduler.run(lambda so_far: seen.append(so_far.requests))
        assert len(seen) == again.steps
        assert seen == sorted(seen)
        assert seen[-1] == again.requests
        assert again.hit_tokens >= figures.hit_tokens
        assert again.allocated_pages < 2 * figures.allocated_pages


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: got 0, allowed: at least 1"):
        Scheduler(make_manager(8), [], **{name: 0})


class TestEqualPaths:
    """A running batch and a manager give the same figures, and leave the same pages free in the same order."""

    def test_random_requests_in_tiny_pools(self) -> None:
        seen = Counter()
        for seed, rng in enumerate(generators(scale(150, 4))):  # seed 34 skips requests
            page_size = int(rng.choice([1, 2, 3, 4, 8, 16]))
            num_pages = 2 + int(rng.integers(150, 500)) // page_size
            limits = {"max_num_batched_tokens": int(rng.integers(1, 100)), "max_num_seqs": int(rng.integers(1, 12))}
            requests = make_random_requests(rng, num_requests=30)
            make = partial(make_manager, num_pages, page_size, seed % 5 > 0)
            seen.update(compare_paths(requests, make, **limits).as_dict())
        for name in ("preemptions", "rehit_tokens", "hit_tokens", "evicted_pages", "skipped"):
            assert seen[name] > 0


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
            (b"[1]", "got a JSON list, allowed: an object"),
            (b"{}", "lacks input_length"),
            (b'{"input_length": 600}', "lacks timestamp"),
            ({"timestamp": "0"}, "timestamp: got '0', allowed: a number or a date"),
            ({"timestamp": True}, "timestamp: got True, allowed: a number"),
            (b'{"timestamp": 1e999, "input_length": 600}', r"timestamp: got inf, allowed: below 2\*\*53 ms$"),
            ({"timestamp": 2**53}, r"timestamp: got .*, allowed: below 2\*\*53 ms"),
            ({"timestamp": -(2**53)}, r"timestamp: got .*, allowed: below 2\*\*53 ms"),
            ({"timestamp": -(10**400)}, "got an int of 1329 bits"),
            ({"input_length": 0}, "input_length: got 0, allowed: 1 to 2147483647"),
            ({"output_length": -1}, "output_length: got -1, allowed: 0 to 2147483647"),
            ({"output_length": 1 << 31}, r"output_length: got 2147483648, allowed: 0 to 2147483647"),
            ({"hash_ids": 3}, "hash_ids: got .*, allowed: a list of integers"),
            ({"hash_ids": [1, 2.0]}, "hash_ids: got .*, allowed: a list of integers or texts"),
            ({"hash_ids": [1, True]}, "hash_ids: got .*, allowed: a list of integers"),
            ({"hash_ids": [1]}, "input_length 600 needs 2 hash_ids, got 1"),
            ({"input_length": 512}, "input_length 512 needs 1 hash_ids, got 2"),
            ({"input_length": 600.5}, "input_length: got .*, allowed: an int"),
            ({"input_length": "600"}, "input_length: got .*, allowed: an int"),
            ({"output_length": "3"}, "output_length: got .*, allowed: an int"),
            ({"prompt_tokens": 601}, "has input_length 600 and prompt_tokens 601"),
            ({"session_id": 7.5}, "session_id: got float, allowed: a string"),
            ({"session_id": "a", "pause": "1"}, "pause: got '1', allowed: a number"),
            ({"session_id": "a", "pause": False}, "pause: got False, allowed: a number"),
            ({"session_id": "a", "pause": -1}, "pause: got -1, allowed: a number from 0"),
            ({"session_id": "a", "pause": 1 << 53}, r"pause: got .*, allowed: below 2\*\*53 ms"),
            ({"pause": 1}, "pause: got 1, allowed: only with a session_id"),
        ],
    )
    def test_lines_that_are_no_request(self, text: bytes | dict[str, Any], reason: str) -> None:
        """Other fields than these are ignored."""
        with pytest.raises((ArgumentError, ArgumentTypeError), match=reason):
            parse_record(text if isinstance(text, bytes) else line_of(more=[1], **text).encode())

    def test_sessions_go_on_after_pauses(self) -> None:
        """A pause is that before a request. Where it is not known, the request before it ended as it arrived."""
        records = [
            TraceRecord(time, 1, 1, (0,), session_id=session_id, pause=pause)
            for time, session_id, pause in [
                (0, "a", 9.0),
                (1_000, "b", None),
                (1_500, None, None),
                (7_000, "a", 2_000),
                (8_000, "b", None),
                (9_000, "a", 5_000),
            ]
        ]
        assert [request.turn for request in make_requests(records)] == [
            ("a", 0.0, 5.0, 2.0),
            ("b", 1.0, 1.0, 7.0),
            None,
            ("a", 7.0, 7.0, 5.0),
            ("b", 8.0, 8.0, inf),
            ("a", 9.0, 9.0, inf),
        ]
        assert [request.session_id for request in make_requests(records)] == ["a", "b", None, "a", "b", "a"]

    def test_fields_of_sessions_are_optional(self) -> None:
        plain = parse_record(line_of().encode())
        assert (plain.session_id, plain.pause) == (None, None)
        assert parse_record(line_of(session_id=None, pause=None).encode()) == plain
        assert parse_record(line_of(session_id="a", pause=0).encode()) == replace(plain, session_id="a", pause=0)

    def test_the_message_has_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(f"{line_of(more=[1])}\n{{\n{line_of()}")
        with pytest.raises(TraceError, match=r"bad\.jsonl:3: not valid JSON"):
            read_trace(str(path))
        assert len(read_trace(str(path), limit=1)) == 1

    def test_more_hash_ids_than_there_are_tokens_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pagepool.replay.traces.reader.MAX_TOKEN_IDS", 3 * 512)
        record = TraceRecord(0, 1024, 1, (1, 2))
        with pytest.raises(TraceError, match="t:2: more than 3 distinct hash ids"):
            make_requests([record, TraceRecord(0, 1024, 1, (3, 4))], "t")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that share their first 512 tokens, and one of 600 pages."""
    path = tmp_path / "trace.jsonl"
    long = line_of(timestamp=1, input_length=9600, output_length=1, hash_ids=[*range(19)])
    path.write_text(line_of() + line_of(hash_ids=[0, 2]) + long)
    return path


invoke = partial(command_line.invoke, "replay")
figures_of = partial(command_line.figures_of, "replay")


class TestCommand:
    def test_figures_of_a_trace(self, trace: Path) -> None:
        figures = figures_of("-", "--num-pages", 1000, "--max-num-seqs", 1, input=trace.read_bytes())
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

    @pytest.mark.parametrize("option", ["--batched", "--no-batched"])
    def test_the_way_that_was_chosen_allocates(self, trace: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def admit(*_: object, **__: object) -> None:
            raise ArgumentError("batched")

        monkeypatch.setattr("pagepool.running_batch.RunningBatch.admit", admit)
        result = invoke(trace, option)
        assert (result.exit_code != 0) == (option == "--batched")

    def test_paths_that_differ_are_told(self, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        admit, misses = RunningBatch.admit, {"traits": RequestTraits(look_up=False)}
        monkeypatch.setattr(RunningBatch, "admit", lambda *args, **options: admit(*args, **options | misses))
        options = ("--max-num-seqs", 1, "--compare", "--json", tmp_path / "figures.json")
        result = refuse(1, "Error: manager and batched differ in ", "replay", trace, *options)
        assert "hit_tokens" in result.output
        by_path = json.loads((tmp_path / "figures.json").read_text())
        assert by_path["manager"]["hit_tokens"] > by_path["batched"]["hit_tokens"] == 0

    def test_many_skipped_requests_are_summed_up(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(line_of() * 25)
        result = invoke(path, "--num-pages", 2)
        lines = [line for line in result.output.splitlines() if line.startswith("skipped ")]
        assert (len(lines), lines[-1]) == (10 + 1, "skipped 15 more")

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_requests_are_made_up_by_name_and_seed(self, name: str) -> None:
        """Chats are the default."""
        options = ["--limit", 10, "--seed", 3, *(["--workload", name] if name != "chats" else [])]
        figures = figures_of(*options)
        assert figures["requests"] == 10
        assert figures["prompt_tokens"] == sum(request.num_prompt_tokens for request in generate_workload(name, 10, 3))
        assert f"synthetic {name}, 32,768 pages of 16 tokens\n" in invoke(*options).output


def test_the_public_names_need_no_extra() -> None:
    """The package alone does not import them, either."""
    code = (
        "import sys, pagepool; assert 'pagepool.replay' not in sys.modules; "
        "import pagepool.replay; assert not {'click', 'rich', 'matplotlib', 'msgspec', 'ray'} & set(sys.modules)"
    )
    assert run_python("-c", code).returncode == 0


@pytest.mark.parametrize("told", ["all", None, True, ["ends"]])
def test_what_is_told_is_checked(told: Any) -> None:
    with pytest.raises(ArgumentError, match=r"told: got .*, allowed: nothing, ends, pauses"):
        Scheduler(make_manager(5), [], told=told)
