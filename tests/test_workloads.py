"""Synthetic workloads: what each kind repeats, in which order, and what its seed decides."""

from collections import Counter
from collections.abc import Callable
from itertools import count, islice, pairwise, repeat
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from pagepool.errors import ArgumentError, ArgumentTypeError
from pagepool.manager import CacheManager
from pagepool.replay import WORKLOADS, Scheduler, SimulatedRequest, generate_chats, generate_workload
from pagepool.replay.traces import arrivals, generator
from pagepool.replay.traces.arrivals import Arrival, Part, Popularity, Source, blend, in_order
from pagepool.replay.traces.workloads import KINDS, Questions
from pagepool.specs import CacheGroupSpec, FullAttentionSpec

SEEDS = range(4)
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

    @all_workloads
    def test_a_scheduler_runs_them_and_finds_hits(self, name: str) -> None:
        spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
        manager = CacheManager(4000, [CacheGroupSpec(spec)], 1 << 14)
        figures = Scheduler(manager, generate_workload(name, 150), max_num_seqs=4).run()
        assert figures.requests == 150
        assert figures.hit_tokens > 0

    @all_kinds
    def test_more_requests_continue(self, name: str) -> None:
        few, many = generate_workload(name, 50, 5), generate_workload(name, 300, 5)
        assert describe(few) == describe(many[:50])
        np.testing.assert_array_equal(few[-1].load_token_ids(), many[49].load_token_ids())

    @all_kinds
    def test_each_seed_has_other_sizes(self, name: str) -> None:
        means = [np.mean([r.num_final_tokens for r in generate_workload(name, 500, seed)]) for seed in range(20)]
        assert max(means) > 1.3 * min(means)

    @all_kinds
    @all_seeds
    def test_arrivals_are_in_order(self, name: str, seed: int) -> None:
        times = [arrival.time for arrival in take(name, 1000, seed)]
        assert times == sorted(times)
        assert times[-1] > 500

    @all_workloads
    def test_none(self, name: str) -> None:
        assert generate_workload(name, 0) == []

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


@pytest.mark.parametrize("name", ["conversations", "agents"])
@all_seeds
def test_many_are_under_way_at_the_start(name: str, seed: int) -> None:
    first = take(name, 30, seed)
    assert first[0].time >= 0
    assert sum(not arrival.name.endswith(" 1") for arrival in first) > 10


class TestConversations:
    @all_seeds
    def test_a_turn_continues_what_was_decoded_before(self, seed: int) -> None:
        chats = group(generate_workload("conversations", 300, seed), " turn ")
        longest = max(chats, key=len)
        assert len(longest) > 2
        for earlier, later in pairwise(longest):
            assert later.num_prompt_tokens > earlier.num_final_tokens
            assert count_shared(earlier, later) == earlier.num_final_tokens

    @all_seeds
    def test_other_chats_come_between_the_turns(self, seed: int) -> None:
        places = {request.request_id: place for place, request in enumerate(generate_workload("conversations", 1000, seed))}
        gaps = [
            places[f"{name[:-1]}2"] - place for name, place in places.items() if f"{name[:-1]}2" in places and name[-2:] == " 1"
        ]
        assert np.median(gaps) > 15

    @all_seeds
    def test_system_prompts_are_shared(self, seed: int) -> None:
        streams = Counter(arrival.parts[0].stream for arrival in take("conversations", 500, seed))
        assert len(streams) <= 40
        assert streams.most_common(1)[0][1] > 30


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

    def test_there_are_summaries_and_subtasks(self) -> None:
        names = [arrival.name for seed in SEEDS for arrival in take("agents", 600, seed)]
        assert any("subtask" in name for name in names)
        lengths: dict[str, list[int]] = {}
        for arrival in take("agents", 2000, 0):
            lengths.setdefault(arrival.name.rpartition(" step ")[0], []).append(arrival.parts[1].length)
        assert any(later < earlier for each in lengths.values() for earlier, later in pairwise(each))

    def test_an_agent_waits_for_its_subtask(self) -> None:
        times = {arrival.name: arrival.time for arrival in take("agents", 3000, 0)}
        checked = 0
        for name, time in times.items():
            parent, is_subtask, _ = name.partition(" subtask ")
            if is_subtask:
                agent, _, step = parent.rpartition(" step ")
                following = times.get(f"{agent} step {int(step) + 1}", float("inf"))
                assert times.get(parent, -1) < time < following
                checked += 1
        assert checked > 5


class TestQuestions:
    @pytest.mark.parametrize("name", ["retrieval", "shift", "drift"])
    @all_seeds
    def test_some_documents_are_popular_and_others_are_read_once(self, name: str, seed: int) -> None:
        uses = Counter(arrival.parts[1].stream for arrival in take(name, 2000, seed))
        assert uses.most_common(1)[0][1] >= 20
        assert sum(number == 1 for number in uses.values()) > 300

    def test_an_equal_start_makes_equal_tokens(self) -> None:
        requests, starts = generate_workload("retrieval", 300, 1), [arrival.parts[:2] for arrival in take("retrieval", 300, 1)]
        popular, _ = Counter(starts).most_common(1)[0]
        first, second, *_ = (request for request, start in zip(requests, starts, strict=True) if start == popular)
        assert sum(part.length for part in popular) <= count_shared(first, second) < first.num_prompt_tokens

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

    def test_as_many_are_replaced_as_asked(self) -> None:
        questions = Questions(Source(4))
        renewals = [*repeat(0, 2000), questions.num_documents, *repeat(0, 2000)]
        parts = [{part.stream for part in arrival.parts[1:-1]} for arrival in questions.arrivals(iter(renewals))]
        before, after = set().union(*parts[:2000]), set().union(*parts[2000:])
        assert len(parts) == 4001
        assert not before & after


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

    @all_seeds
    def test_people_chat_meanwhile(self, seed: int) -> None:
        names = [arrival.name for arrival in take("loop", 1500, seed)]
        for part in (names[:750], names[750:]):
            assert 40 < sum(name.startswith("chat ") for name in part) < 400


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

    @all_seeds
    def test_a_turn_continues_the_chat(self, seed: int) -> None:
        for chat in group(generate_workload("recency", 200, seed), " turn "):
            assert [int(turn.request_id.split()[-1]) for turn in chat] == [*range(1, len(chat) + 1)]
            for earlier, later in pairwise(chat):
                assert later.num_final_tokens >= earlier.num_final_tokens == count_shared(earlier, later)


def test_a_mix_has_chats_agents_and_questions() -> None:
    for seed in range(20):
        kinds = Counter(arrival.name.split()[0] for arrival in take("mix", 1000, seed))
        assert kinds.keys() == {"chat", "agent", "question"}
        assert min(kinds.values()) > 50


class TestArrivals:
    make: Callable[[float], Arrival] = staticmethod(lambda time: Arrival(time, str(time), (Part((0, 0), 1),), 1))

    def test_groups_are_merged_by_time(self) -> None:
        groups = [[self.make(time) for time in times] for times in ([0, 5, 9], [2, 3], [4, 10])]
        assert [arrival.time for arrival in in_order(groups)] == [0, 2, 3, 4, 5, 9, 10]

    def test_only_groups_that_have_begun_are_held(self) -> None:
        groups = ([self.make(time), self.make(time + 0.5)] for time in range(10**9))
        assert [arrival.time for arrival in islice(in_order(groups), 4)] == [0, 0.5, 1, 1.5]

    def test_a_blend_keeps_the_shares(self) -> None:
        often, rarely = (map(Arrival, count(1), repeat(name), repeat(()), repeat(1)) for name in ("often", "rarely"))
        names = [arrival.name for arrival in islice(blend([(0.8, often), (0.2, rarely)]), 1000)]
        assert Counter(names) == {"often": 800, "rarely": 200}

    def test_popularity_falls_with_the_rank(self) -> None:
        rng, popularity = np.random.default_rng(0), Popularity(3, 1.0)
        drawn = Counter(popularity.draw(rng) for _ in range(11_000))
        assert {rank: round(number, -3) for rank, number in drawn.items()} == {0: 6000, 1: 3000, 2: 2000}
