"""The benchmarks of what stays cached: workloads, hits in pools that evict nothing, and what an engine tells the pool."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain, pairwise
from math import inf
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sources import ROOT

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
keeping = pytest.importorskip("bench.keeping", reason="bench/ is not here")
from bench import agents, tenants  # noqa: E402  where it is here
from bench.timed import RETRY_SECONDS, TimedBatch, Timeline  # noqa: E402
from bench.windows import Chosen  # noqa: E402
from bench.workload import PAGE_SIZE  # noqa: E402

SESSIONS = agents.make_sessions(seed=3, num_sessions=6)


def round_down(num_tokens: int) -> int:
    return num_tokens // PAGE_SIZE * PAGE_SIZE


class TestTheTimeline:
    def test_calls_come_by_time_and_then_in_order(self) -> None:
        times, calls = [], []
        timeline = Timeline(times.append)
        timeline.call_at(2.0, lambda: calls.append((timeline.now, "last")))
        timeline.call_at(1.0, lambda: calls.append((timeline.now, "first")))
        timeline.call_at(1.0, lambda: timeline.call_in(0.5, lambda: calls.append((timeline.now, "later"))))
        timeline.call_at(1.0, lambda: calls.append((timeline.now, "second")))
        timeline.run()
        assert calls == [(1.0, "first"), (1.0, "second"), (1.5, "later"), (2.0, "last")]
        assert times == [1.0, 1.0, 1.0, 1.5, 2.0]

    def test_a_request_without_room_is_tried_again(self) -> None:
        timed, starts = TimedBatch(6, 2, 80, "lru"), []

        def start(row: int, num_hits: int) -> None:
            starts.append((timed.timeline.now, num_hits))
            timed.timeline.call_in(1.5, lambda: timed.end(row))

        token_ids = np.arange(65, dtype=np.int32)
        for first in (0, 100):
            timed.timeline.call_at(0.0, lambda first=first: timed.start(token_ids + first, start))
        timed.timeline.run()
        assert starts == [(0.0, 0), (2 * RETRY_SECONDS, 0)]
        assert timed.manager.page_pool.store.num_free_pages == 5


class TestSessions:
    def test_a_turn_goes_on_where_the_one_before_ended(self) -> None:
        for session in SESSIONS:
            for turn, later in pairwise(session.turns):
                assert turn.num_prompt_tokens < turn.num_tokens < later.num_prompt_tokens
                assert later.time == turn.time + (turn.seconds + turn.pause)
                assert 0 < turn.pause <= agents.MAX_PAUSE

    def test_prompts_are_shared_and_nothing_else(self) -> None:
        beginnings = [session.load_token_ids(agents.PROMPT_LEN + 1) for session in SESSIONS]
        prompts = {session.prompt: tokens[:-1].tolist() for session, tokens in zip(SESSIONS, beginnings, strict=True)}
        assert all(tokens[:-1].tolist() == prompts[s.prompt] for s, tokens in zip(SESSIONS, beginnings, strict=True))
        assert len({tuple(prompt) for prompt in prompts.values()}) == len(prompts) < len(SESSIONS)
        assert len({int(tokens[-1]) for tokens in beginnings}) == len(SESSIONS)
        before = beginnings[0].copy()
        SESSIONS[0].drop_token_ids()
        assert (SESSIONS[0].load_token_ids(len(before)) == before).all()

    def test_a_longer_workload_begins_with_the_same_sessions(self) -> None:
        assert agents.make_sessions(seed=3, num_sessions=9)[:6] == SESSIONS
        assert agents.make_sessions(seed=4, num_sessions=6) != SESSIONS

    def test_live_pages_are_a_mean_over_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agents, "WARM_SECONDS", 10.0)
        stop = SESSIONS[-1].turns[0].time
        times = np.linspace(10, stop, 5_000)
        counts = [
            sum(
                (max(turn.num_tokens for turn in session.turns if turn.time <= time) - agents.PROMPT_LEN) // PAGE_SIZE
                for session in SESSIONS
                if session.turns[0].time <= time < session.turns[-1].time + session.turns[-1].seconds
            )
            for time in times
        ]
        assert agents.count_live_pages(SESSIONS) == pytest.approx(fmean(counts), rel=0.01)

    def test_one_shots_come_until_the_last_turn(self) -> None:
        one_shots = agents.make_one_shots(3, SESSIONS, rate=0.5)
        end = max(session.turns[-1].time for session in SESSIONS)
        times = [one_shot.turns[0].time for one_shot in one_shots]
        assert times == sorted(times)
        assert times[-2] < end <= times[-1]
        assert len(one_shots) == pytest.approx(end / 2, rel=0.2)
        assert len({int(one_shot.load_token_ids(1)[0]) for one_shot in one_shots}) == len(one_shots)
        assert agents.make_one_shots(3, SESSIONS, rate=0) == []


class TestWhatIsTold:
    @pytest.mark.parametrize(("column", "error"), [("expected", 1.0), ("wrong by 4.5", 1.5)])
    def test_times_are_wrong_by_a_factor(self, column: str, error: float) -> None:
        logs = []
        for session in SESSIONS:
            *told, last = keeping.ENGINES[column].draw_times(session, seed=3)
            assert last is None
            logs += np.log(np.array(told) / [turn.pause for turn in session.turns[:-1]]).tolist()
        assert np.mean(logs) == pytest.approx(0, abs=0.3)
        assert np.std(logs) == pytest.approx(error, rel=0.2)

    def test_times_without_truth_have_nothing_to_do_with_the_pauses(self) -> None:
        pairs = [
            (turn.pause, told)
            for session in agents.make_sessions(seed=5, num_sessions=30)
            for turn, told in zip(session.turns, keeping.ENGINES["no truth"].draw_times(session, seed=5), strict=True)
            if told is not None
        ]
        assert abs(np.corrcoef(np.log(pairs).T)[0, 1]) < 0.1

    def test_halves(self) -> None:
        first, second = SESSIONS[:2]
        vanishing, telling, silent = (keeping.ENGINES[name] for name in ("half vanish", "half tell", "close"))
        assert vanishing.draw_times(first, 3)[-1] is None
        assert vanishing.draw_times(second, 3)[-1] == keeping.BROKEN_PROMISE
        assert None not in telling.draw_times(first, 3)[:-1]
        assert set(telling.draw_times(second, 3)) == set(silent.draw_times(first, 3)) == {None}

    def test_one_shots(self) -> None:
        [one_shot, *_] = agents.make_one_shots(3, SESSIONS, rate=0.5)
        assert keeping.ENGINES["expected"].draw_times(one_shot, 3) == [None]
        assert keeping.ENGINES["one-shots never"].draw_times(one_shot, 3) == [inf]

    def test_cells(self) -> None:
        cells = list(keeping.list_cells(Chosen([])))
        assert len({(line.name, column) for line, column, _ in cells}) == len(cells)
        assert all(line.rate for line, column, _ in cells if column == "one-shots never")
        assert [(line.share, column) for line, column, _ in keeping.list_cells(Chosen(["LRU", "1/3"]))] == [
            (Fraction(1, 3), "LRU")
        ]


@dataclass
class Told:
    """Stands for manager and batch, admits everything, and writes down what it is told."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def page_pool(self) -> SimpleNamespace:
        return SimpleNamespace(store=SimpleNamespace(set_time=lambda _: None))

    def admit(self, _row: int, _token_ids: Any, session_id: str | None = None) -> int:
        self.calls.append(("admit", session_id))
        return 0

    def release(self, _rows: list[int], seconds: list[float] | None = None) -> None:
        self.calls.append(("release", seconds))

    def close_session(self, session_id: str) -> None:
        self.calls.append(("close", session_id))


class TestAgents:
    @pytest.mark.parametrize("column", ["LRU", "adaptive"])
    def test_a_large_pool_hits_all_but_what_is_new(self, column: str) -> None:
        one_shots = agents.make_one_shots(3, SESSIONS, rate=0.01)
        run = keeping.Agents(60_000, keeping.ENGINES[column], [*SESSIONS, *one_shots], seed=3)
        run.run()
        prompts = set()
        nums_hits = [0, 0]
        for number, session in enumerate(SESSIONS):
            later = sum(round_down(turn.num_tokens) for turn in session.turns[:-1])
            nums_hits[number % 2] += later + (agents.PROMPT_LEN if session.prompt in prompts else 0)
            prompts.add(session.prompt)
        assert run.num_hits == nums_hits
        assert sum(run.num_tokens) == sum(turn.num_prompt_tokens for session in SESSIONS for turn in session.turns)
        assert run.timed.manager.page_pool.store.num_free_pages == 59_999
        run.timed.batch.check()

    @pytest.mark.parametrize("column", ["close", "expected", "half vanish", "half tell", "one-shots never"])
    def test_the_pool_is_told(self, column: str) -> None:
        engine = keeping.ENGINES[column]
        sessions = [*SESSIONS[:2], *agents.make_one_shots(3, SESSIONS[:1], rate=0.01)]
        for session in sessions:
            run = keeping.Agents(100, engine, [session], seed=3)
            run.timed.batch = run.timed.manager = told = Told()
            run.timed.timeline.run()
            name = None if session.is_one_shot else session.name
            expected: list[tuple[Any, ...]] = []
            for seconds in engine.draw_times(session, seed=3):
                expected += [("admit", name), ("release", None if seconds is None else [seconds])]
            if name is not None and not engine.vanishes(session):
                expected.append(("close", name))
            assert told.calls == expected


class TestTenants:
    def test_chats_and_flood(self) -> None:
        chats = tenants.make_chats(1, num_users=2)
        by_chat: dict[tuple[int, ...], list[tenants.Request]] = {}
        for request in chats:
            by_chat.setdefault(request.context, []).append(request)
        for turns in by_chat.values():
            assert all(turn.num_tokens < later.num_prompt_tokens for turn, later in pairwise(turns))
            assert all(turn.time + turn.seconds < later.time for turn, later in pairwise(turns))
        once, twice = tenants.make_flood(1), tenants.make_flood(2)
        assert len({request.context for request in once}) == len(once)
        assert 2 * len({request.context for request in twice}) == len(twice) == pytest.approx(len(once), rel=0.1)
        assert min(request.time for request in once) > tenants.FLOOD_SECOND

    def test_a_large_pool_hits_all_but_what_is_new(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenants, "NUM_SECONDS", 900.0)
        monkeypatch.setattr(tenants, "FLOOD_SECOND", 0.0)
        chats = [tenants.make_chats(tenant, num_users=2) for tenant in range(tenants.NUM_TENANTS)]
        run = tenants.Tenants(300_000, [*chain(*chats), *tenants.make_flood(2)[:100]])
        run.run()
        for tenant, requests in enumerate(chats):
            num_hits = sum(round_down(turn.num_tokens) for turn, later in pairwise(requests) if turn.context == later.context)
            assert run.num_hits[tenant] == num_hits
            assert run.num_tokens[tenant] == sum(request.num_prompt_tokens for request in requests)
        alone = tenants.measure_alone(1.0, 300_000, chats, [])
        assert alone == tenants.measure_together(300_000, chats, [])
        assert 0 < min(tenants.measure_alone(0.0065, 300_000, chats, [])) < min(alone)

    def test_shares_are_set_for_all_but_the_flood(self) -> None:
        chats = [tenants.make_chats(tenant, num_users=1)[:1] for tenant in range(tenants.NUM_TENANTS)]
        names = []
        run = tenants.Tenants(10_000, [])
        run.has_shares = True
        run.timed.start = lambda *_, **options: names.append(options.get("tenant"))
        for request in [*chain(*chats), tenants.make_flood(1)[0]]:
            run.begin(request)
        assert names == ["tenant 1", "tenant 2", "tenant 3", None]
