"""Synthetic workloads: what each kind repeats, in which order, and what its seed decides."""

from collections import Counter
from itertools import islice, pairwise
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from settings import scale

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.replay import WORKLOADS, SimulatedRequest, generate_chats, generate_workload
from pagepool.replay.traces import arrivals, generator
from pagepool.replay.traces.arrivals import Arrival, in_order
from pagepool.replay.traces.workloads import KINDS

SEEDS = range(scale(4))
all_workloads = pytest.mark.parametrize("name", WORKLOADS)
all_kinds = pytest.mark.parametrize("name", KINDS)
all_seeds = pytest.mark.parametrize("seed", SEEDS)


def take(name: str, num_requests: int, seed: int) -> list[Arrival]:
    return list(islice(KINDS[name](seed), num_requests))


def describe(requests: list[SimulatedRequest]) -> list[tuple[str, int, int]]:
    return [(r.request_id, r.num_prompt_tokens, r.num_output_tokens) for r in requests]


def group(requests: list[SimulatedRequest], separator: str) -> list[list[SimulatedRequest]]:
    """Return the requests whose names are equal up to the separator, for each such name in order."""
    groups: dict[str, list[SimulatedRequest]] = {}
    for request in requests:
        name, found, _ = request.request_id.rpartition(separator)
        if found:
            groups.setdefault(name, []).append(request)
    return list(groups.values())


def count_shared(first: SimulatedRequest, second: SimulatedRequest) -> int:
    """Return the length of the prefix that the tokens of both have in common."""
    length = min(first.num_final_tokens, second.num_final_tokens)
    differs = first.load_token_ids()[:length] != second.load_token_ids()[:length]
    return int(differs.argmax()) if differs.any() else length


class TestAll:
    @all_workloads
    def test_the_same_seed_gives_the_same_requests(self, name: str) -> None:
        one, same, other = (generate_workload(name, 60, seed) for seed in (1, 1, 2))
        assert describe(one) == describe(same) != describe(other)
        for first, second in zip(one, same, strict=True):
            np.testing.assert_array_equal(first.load_token_ids(), second.load_token_ids())
        assert count_shared(one[0], other[0]) < 5

    @all_workloads
    def test_names_are_distinct_and_lengths_are_those_of_the_tokens(self, name: str) -> None:
        requests = generate_workload(name, 200, 3)
        assert len({request.request_id for request in requests}) == 200
        for request in requests:
            assert request.load_token_ids().dtype == np.int32
            assert len(request.load_token_ids()) == request.num_prompt_tokens + request.num_output_tokens
            assert request.num_output_tokens > 0
            assert len(request.all_token_ids) == request.num_prompt_tokens

    @all_workloads
    def test_tokens_are_created_later_and_dropped(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            for module in (arrivals, generator):
                patched.delattr(module, "random_tokens")
            request = generate_workload(name, 50, 0)[-1]
            with pytest.raises((NameError, AttributeError)):
                request.load_token_ids()
        before = request.load_token_ids()
        request.drop_token_ids()
        assert request.load_token_ids() is not before
        np.testing.assert_array_equal(request.load_token_ids(), before)

    @all_kinds
    def test_more_requests_continue(self, name: str) -> None:
        few, many = generate_workload(name, 50, 5), generate_workload(name, 300, 5)
        assert describe(few) == describe(many[:50])
        np.testing.assert_array_equal(few[-1].load_token_ids(), many[49].load_token_ids())
        times = [arrival.time for arrival in take(name, 1000, 5)]
        assert times == sorted(times)
        assert times[-1] > 500

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (("lru", 1), ArgumentError, f"name: got 'lru', allowed: {', '.join(WORKLOADS)}"),
            (([], 1), ArgumentError, rf"name: got \[\], allowed: {', '.join(WORKLOADS)}"),
            (("loop", -1), ArgumentError, "num_requests must be at least 0, got -1"),
            (("loop", 1.5), ArgumentTypeError, "num_requests must be an integer, got 1.5"),
            (("chats", 1, -1), ArgumentError, "seed must be at least 0, got -1"),
        ],
    )
    def test_bad_arguments(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^{message}$"):
            generate_workload(*arguments)


def test_chats_are_those_they_always_were() -> None:
    """Figures of tests and documents depend on them."""
    requests = generate_workload("chats", 50, 7)
    assert describe(requests) == describe(generate_chats(50, 7))
    assert crc32(repr(describe(requests)).encode()) == 593338037
    assert crc32(np.concatenate([request.load_token_ids() for request in requests]).astype("<i4").tobytes()) == 1868210052


class TestConversations:
    @all_seeds
    @pytest.mark.parametrize("name", ["chats", "conversations", "recency"])
    def test_a_turn_continues_what_was_decoded_before(self, name: str, seed: int) -> None:
        chats = group(generate_workload(name, 300, seed), " turn ")
        longest = max(chats, key=len)
        assert len(longest) > 2
        for earlier, later in pairwise(longest):
            assert name == "recency" or later.num_prompt_tokens > earlier.num_final_tokens
            assert later.num_final_tokens >= earlier.num_final_tokens == count_shared(earlier, later)


class TestAgents:
    @all_seeds
    def test_a_context_grows_until_it_is_summarised(self, seed: int) -> None:
        arrivals = {arrival.name: arrival for arrival in take("agents", 600, seed)}
        grown = summarised = 0
        for agent in group(generate_workload("agents", 600, seed), " step "):
            for earlier, later in pairwise(agent):
                tools, _context = arrivals[earlier.request_id].parts
                assert arrivals[later.request_id].parts[0] == tools
                shared = count_shared(earlier, later)
                is_grown = shared == earlier.num_final_tokens < later.num_prompt_tokens
                assert is_grown or tools.length <= shared < tools.length + 3
                grown, summarised = grown + is_grown, summarised + (not is_grown)
        assert grown > 2 * summarised


class TestQuestions:
    @pytest.mark.parametrize("name", ["retrieval", "shift", "drift"])
    @all_seeds
    def test_some_documents_are_popular_and_others_are_read_once(self, name: str, seed: int) -> None:
        uses = Counter(arrival.parts[1].stream for arrival in take(name, 2000, seed))
        assert uses.most_common(1)[0][1] >= 20
        assert sum(number == 1 for number in uses.values()) > 300

    @staticmethod
    def count_common(name: str, seed: int) -> int:
        """Return how many of the 20 most popular documents are so at the start and at the end."""
        first, *_, last = np.array_split(np.arange(3000), 5)
        everything = take(name, 3000, seed)
        hot = [Counter(everything[place].parts[1].stream for place in places).most_common(20) for places in (first, last)]
        return len({stream for stream, _ in hot[0]} & {stream for stream, _ in hot[1]})

    @all_seeds
    def test_the_popular_ones_change(self, seed: int) -> None:
        stay, shift, drift = (self.count_common(name, seed) for name in ("retrieval", "shift", "drift"))
        assert stay > 8
        assert shift < stay / 2
        assert drift < stay / 2


class TestLoop:
    @all_seeds
    def test_documents_are_read_in_order_again_and_again(self, seed: int) -> None:
        read = [arrival for arrival in take("loop", 1500, seed) if arrival.name.startswith("document ")]
        num_documents = max(int(arrival.name.split()[1]) for arrival in read)
        expected = [f"document {i % num_documents + 1} round {i // num_documents + 1}" for i in range(len(read))]
        assert [arrival.name for arrival in read] == expected
        assert len(read) > 1.5 * num_documents
        assert all(read[i].parts[:2] == read[i % num_documents].parts[:2] for i in range(len(read)))
        assert len({arrival.parts[1].stream for arrival in read}) == num_documents
        assert sum(arrival.parts[1].length for arrival in read[:num_documents]) > 350_000


class TestRecency:
    @all_seeds
    def test_the_probability_falls_with_the_number_of_chats_since(self, seed: int) -> None:
        stack: list[str] = []
        depths: Counter[int] = Counter()
        for arrival in take("recency", 6000, seed):
            chat = arrival.name.partition(" turn ")[0]
            if chat in stack:
                depths[stack.index(chat)] += 1
                stack.remove(chat)
            stack.insert(0, chat)
        per_depth = [sum(depths[d] for d in range(low, 2 * low + 1)) / (low + 1) for low in (0, 1, 3, 7, 15, 31)]
        assert per_depth == sorted(per_depth, reverse=True)
        assert 1.9 < depths[0] / depths[1] < 3.1


def test_a_mix_has_chats_agents_and_questions() -> None:
    for seed in range(scale(20)):
        kinds = Counter(arrival.name.split()[0] for arrival in take("mix", 1000, seed))
        assert kinds.keys() == {"chat", "agent", "question"}
        assert min(kinds.values()) > 50


def test_groups_are_merged_by_time() -> None:
    groups = [[Arrival(time, str(time), (), 1) for time in times] for times in ([0, 5, 9], [2, 3], [4, 10])]
    assert [arrival.time for arrival in in_order(groups)] == [0, 2, 3, 4, 5, 9, 10]
