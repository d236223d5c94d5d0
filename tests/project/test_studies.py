"""The studies of bench/: their figures at a small size, what agents hit where nothing is evicted, and the tables of figures."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_traces import BLOCK_SIZE, make_records
from sources import ROOT

from pagepool.replay import TraceRecord
from pagepool.replay.models.pools import ModelPools

sys.path.append(str(ROOT))  # last: the installed package stays the one that is imported
windows = pytest.importorskip("bench.studies.windows", reason="bench/ is not here")
from bench.studies import agents, chats, hits, keeping, loading, states, tenants, windows_cases  # noqa: E402  where it is here
from bench.studies.command import Chosen  # noqa: E402
from bench.studies.layouts import Layout  # noqa: E402
from bench.studies.timed import TimedBatch, Timeline  # noqa: E402
from bench.workload import PAGE_SIZE  # noqa: E402

SESSIONS = agents.make_sessions(seed=3, num_sessions=6)
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("full", 0, 1),
        Layout("windows", 2, 64),
        Layout("uneven windows", 1, 50),
        Layout("chunks", 2, 128, is_chunked=True),
    )
}
AGENTS = {
    "LRU": [2600672, 5018400],
    "adaptive": [2624000, 5018992],
    "close": [2600720, 5018896],
    "expected": [2564960, 5034224],
    "wrong by 4.5": [2567888, 5035392],
    "half vanish": [2555856, 4996944],
    "no truth": [2528176, 5075280],
    "half tell": [2574992, 5018688],
    "one-shots never": [2694704, 5284640],
}
TENANTS = {
    "alone": [89.17, 91.96, 82.52],
    "alone in its share": [86.1, 74.76, 82.52],
    "LRU": [59.14, 68.57, 75.26],
    "adaptive": [59.42, 61.84, 75.38],
    "shares": [65.38, 65.38, 75.54],
}
LINES = {
    "full": [64.57, 64.57, 64.57, 64.57],
    "windows": [46.83, 51.5, 62.06, 60.25],
    "uneven windows": [58.34, 59.81, 64.57, 63.54],
    "chunks": [53.06, 58.86, 63.54, 62.67],
}
CASES = {
    "64 at once": [42.63, 41.07],
    "256 at once": [42.63, 41.07],
    "4 shards": [13.66, 12.09],
    "host tier": [57.95, 19.65, 54.03, 16.88],
    "eagle": [41.5, 41.07],
    "4 samples": [43.24, 46.11],
    "generated shift, named ends": [7.44, 9.82],
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (windows, windows_cases):
        monkeypatch.setattr(module, "CHUNK_LEN", 96)
    monkeypatch.setattr(agents, "WARM_SECONDS", 10.0)
    monkeypatch.setattr(tenants, "NUM_SECONDS", 600.0)
    monkeypatch.setattr(tenants, "FLOOD_SECOND", 300.0)


def listen(timed: TimedBatch, option: str) -> set[Any]:
    """Return the values of an option of all requests to come."""
    heard, start = set(), timed.start
    timed.start = lambda *arguments, **options: (heard.add(options.get(option)), start(*arguments, **options))  # type: ignore[method-assign]
    return heard


def test_of_equal_times_the_first_comes_first() -> None:
    calls: list[int] = []
    timeline = Timeline(lambda _: None)
    for number in range(3):
        timeline.call_at(1.0, partial(calls.append, number))
    timeline.run()
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("column", keeping.ENGINES)
def test_agents(column: str) -> None:
    """In a pool that is too small, beside one-shots: the tokens that each half of the sessions hits."""
    one_shots = agents.make_one_shots(3, SESSIONS, rate=0.05)
    run = keeping.Agents(9_000, keeping.ENGINES[column], [*SESSIONS, *one_shots], seed=3)
    names = listen(run.timed, "session_id")
    run.run()
    assert (len(one_shots), run.num_hits) == (103, AGENTS[column])
    assert names - {None} == ({session.name for session in SESSIONS} if keeping.ENGINES[column].closes else set())


def test_agents_in_a_large_pool() -> None:
    """They hit all but what is new."""
    run = keeping.Agents(60_000, keeping.ENGINES["adaptive"], SESSIONS, seed=3)
    run.run()
    later = sum(turn.num_tokens // PAGE_SIZE * PAGE_SIZE for session in SESSIONS for turn in session.turns[:-1])
    assert sum(run.num_hits) == later + (len(SESSIONS) - len({session.prompt for session in SESSIONS})) * agents.PROMPT_LEN
    assert sum(run.num_tokens) == sum(turn.num_prompt_tokens for session in SESSIONS for turn in session.turns)
    assert run.timed.manager.page_pool.store.num_free_pages == 59_999
    assert round(agents.count_live_pages(SESSIONS)) == 4248


@pytest.mark.parametrize("column", tenants.COLUMNS)
def test_tenants(column: str) -> None:
    """Beside a flood that sends each prompt twice: the percent of its tokens that each tenant hits."""
    requests = [tenants.make_chats(tenant, num_users=2) for tenant in range(tenants.NUM_TENANTS)]
    flood = tenants.make_flood(2)[:300]
    assert tenants.COLUMNS[column](7_000, requests, flood) == pytest.approx(TENANTS[column], abs=0.01)
    run = tenants.Tenants(7_000, [requests[1][0], flood[0]], share=0.25)
    names = listen(run.timed, "tenant")
    run.run()
    assert names == {"tenant 2", None}


@pytest.mark.parametrize("name", LAYOUTS)
def test_windows(name: str) -> None:
    """In pools of 140 and of 300 pages that keep all windows, and those at ends: the percent of their tokens that chats hit."""
    requests = chats.make_chats(make_records(80, seed=140))
    pools = [windows.Batched(LAYOUTS[name], n, "lru", keeps) for n in (140, 300) for keeps in ("all", "ends")]
    assert [windows.measure(pool, requests) for pool in pools] == pytest.approx(LINES[name], abs=0.01)


@pytest.mark.parametrize("case", windows_cases.CASES, ids=lambda case: case.name)
def test_cases_of_windows(case: windows_cases.Case) -> None:
    """The same in pools that keep all windows, and those at ends."""
    is_chats = case.make_requests is windows_cases.make_chats
    requests = chats.make_chats(make_records(80, seed=2)) if is_chats else case.make_requests()[:80]
    pools = [case.measure(LAYOUTS["windows"], 240, "lru", keeps, requests) for keeps in ("all", "ends")]
    assert [figure for pool in pools for figure in pool.values()] == pytest.approx(CASES[case.name], abs=0.01)


@pytest.mark.parametrize(("more", "num_shared"), [(0, 70), (1, 99)])
def test_a_short_prompt_goes_on_without_the_answer(more: int, num_shared: int) -> None:
    """An answer of 30 tokens ends behind 99 of them, since the last one is not computed."""
    records = [
        TraceRecord(0, 70, 30, (1, 2, 3), block_size=BLOCK_SIZE),
        TraceRecord(1, 99 + chats.LEAST_QUESTION_LEN + more, 1, (1, 2, 4, 5), block_size=BLOCK_SIZE),
    ]
    known, tokens = (request.make_token_ids()[:99] for request in chats.make_chats(records))
    assert np.flatnonzero(known != tokens)[:1].tolist() == [num_shared][: num_shared < 99]


def test_chats_in_turn() -> None:
    requests = chats.make_chats_in_turn()
    pool = windows.Batched(LAYOUTS["full"], 20_000, "lru", "all")
    assert [pool.run(request) for request in requests] == [*[0] * 8, *[20_096] * 8, *[20_288] * 8]


def test_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats one after another, and eight at once, in pools that hold some of them."""
    monkeypatch.setattr(states, "LONG_PAGES", (128, 256))
    model = states.Model("small", ModelPools(token_bytes=100, state_bytes=6_400), 64)
    requests = chats.make_chats(make_records(200, seed=5))
    chosen = Chosen([])
    for num_at_once, columns in ((1, ["two pools", "an array for each layer"]), (8, ["two pools", "scheduler"])):
        line = states.Line(windows.CHATS, model, 600_000, 0.4, num_at_once)
        cells = states.measure_line(line, requests, chosen)
        assert list(cells) == columns
        assert 0 < min(cells.values()) < max(cells.values()) < 100
        assert states.measure_line(line, requests, Chosen(["two pools"])) == {"two pools": cells["two pools"]}


def test_states_of_chats() -> None:
    """The next turn continues from the answer of the last one, as far as there are states."""
    few, many = [line for line in states.list_chat_lines() if line.name.endswith((" 40 states", " 120 states"))][:2]
    requests = few.trace.make()
    hits = [states.measure_line(line, requests, Chosen([])) for line in (few, many)]
    assert [[*cells] for cells in hits] == [["two pools"], ["two pools"]]
    assert 40 < hits[0]["two pools"] < hits[1]["two pools"] < 85


def test_states_without_a_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(states, "TRACE", tmp_path / "none.jsonl")
    states.main(["conversation"])
    assert "nothing to measure; without" in capsys.readouterr().err
    names = [line.name for line in states.list_lines([tmp_path / "other.jsonl"])]
    assert names[0] == "60 chats, Qwen3-Next, 40 states"
    assert names[8] == "other, chat, Qwen3.5-27B, 80 GiB, 32% states"
    assert names[-1] == "other, raw, Qwen3-Next, 200 GiB, 28% states"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "rate", "use"),
    [(0.2e9, 5_000, 0.3), (2e9, 50_000, 0.9), (20e9, 50_000, 0.9)],
)
def test_loading(bandwidth: float, rate: int, use: float) -> None:
    """The rule is no worse than the better of never and always loading, except for a millisecond to measure the store."""
    pytest.importorskip("xxhash")
    trace = loading.generate(300)
    never, always, rule = (np.mean(loading.measure(trace, column, bandwidth, rate, use)) for column in loading.COLUMNS)
    assert rule < 1.05 * min(never, always) + 0.001


def test_figures(tmp_path: Path) -> None:
    """A run replaces its cells in the file; words choose columns and lines."""
    path = tmp_path / "hits.json"
    hits.merge(path, "windows", {"first": {"LRU, all": 1, "vLLM": 2}, "second": {"LRU, all": 3}})
    hits.merge(path, "other", {"third": {"vLLM": 4}})
    merged = hits.merge(path, "windows", {"first": {"vLLM": 5, "LRU, ends": 6}})
    assert hits.read(path) == {"windows": merged, "other": {"third": {"vLLM": 4}}}
    assert hits.show("hits", merged).splitlines() == [
        "| hits | LRU, all | LRU, ends | vLLM |",
        "| --- | ---: | ---: | ---: |",
        "| first | 1.0 | 6.0 | 5.0 |",
        "| second | 3.0 | - | - |",
    ]
    chosen, by_line = Chosen(["LRU, ends", "gpt-oss"]), Chosen(["vLLM"])
    assert [column for column in hits.COLUMNS if chosen.has_column(column)] == ["LRU, ends"]
    assert chosen.has_line("gpt-oss, chat") > chosen.has_line("Gemma, chat") < by_line.has_line("Gemma, chat")
    assert [(line.share.denominator, column) for line, column, _ in keeping.list_cells(Chosen(["LRU", "1/3"]))] == [(3, "LRU")]
    assert all(line.rate for line, column, _ in keeping.list_cells(Chosen([])) if column == "one-shots never")


@pytest.mark.slow
def test_the_study_of_the_host_link_at_a_small_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax")
    from bench.studies import host_link

    monkeypatch.setattr(host_link, "PAGES_KIB", (256,))
    monkeypatch.setattr(host_link, "NUMS_OF_PAGES", (8, 64))
    monkeypatch.setattr(host_link, "NUMS_OF_THREADS", (2,))
    monkeypatch.setattr(host_link, "PAGES_PER_CALL", (64,))
    monkeypatch.setattr(host_link, "NUM_ROUNDS", 0)
    host_link.main()
    printed = capsys.readouterr().out
    print(printed)
    for line in ("| loads of 64 pages of 256 KiB | ", "np.asarray of pinned_host is a view.", "a step behind 64 saves: "):
        assert line in printed
