"""Replays that tell the pool about the sessions of a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from command_line import figures_of, invoke, line_of, refuse
from replays import make_manager
from settings import scale

from pagepool.manager import CacheManager
from pagepool.replay import Figures, Scheduler, TraceRecord, make_requests
from pagepool.replay.simulation.command import TOLD
from pagepool.replay.simulation.sessions import SessionReports, Told

BLOCK_SIZE = 16


def turn_of(seconds: float, session_id: str | None, *ids: int, pause: float | None = None) -> TraceRecord:
    """Return a request of whole blocks, whose pause is in seconds."""
    milliseconds = None if pause is None else 1000 * pause
    return TraceRecord(1000 * seconds, len(ids) * BLOCK_SIZE, 1, ids, (), BLOCK_SIZE, session_id, milliseconds)


def run(records: list[TraceRecord], num_pages: int, told: Told, manager: CacheManager | None = None, **options: Any) -> Figures:
    """Run records one after another."""
    manager = manager or make_manager(num_pages, BLOCK_SIZE)
    figures = Scheduler(manager, make_requests(records), max_num_seqs=1, told=told, **options).run()
    manager.page_pool.check()
    return figures


def make_records(seed: int) -> list[TraceRecord]:
    """Make sessions that go on after pauses of very different lengths, and requests without one."""
    rng, events, next_id = np.random.default_rng(seed), [], 0
    for session in range(40):
        seconds, ids, pause = float(rng.uniform(0, 2000)), [], None
        for _ in range(int(rng.integers(1, 12))):
            num_new = int(rng.integers(1, 6))
            ids = [*ids, *range(next_id, next_id + num_new)]
            next_id += num_new
            name = None if session % 10 == 0 else f"session {session}"
            events.append(turn_of(seconds, name, *ids, pause=None if name is None else pause))
            pause = float(rng.lognormal(3, 2))
            seconds += 1 + pause
    return sorted(events, key=lambda record: record.timestamp)


@pytest.mark.parametrize("batched", [False, True])
class TestWhatIsTold:
    def test_more_is_told_more_is_hit(self, batched: bool) -> None:
        sums = dict.fromkeys(TOLD, 0)
        for seed in range(scale(12)):
            records = make_records(seed)
            for told in TOLD:
                sums[told] += run(records, 150, told, batched=batched).hit_tokens
        assert 0 < sums["nothing"] < sums["ends"] < sums["pauses"]

    def test_any_times_are_possible(self, batched: bool) -> None:
        first, last = turn_of(0, "a", 1), turn_of(0, "a", 1, 2)
        records = [replace(first, timestamp=-(2**52)), replace(last, timestamp=2**52, pause=2**52)]
        assert run(records, 10, "pauses", batched=batched).hit_tokens == BLOCK_SIZE


@pytest.mark.parametrize("told", TOLD)
def test_the_clock_is_that_of_the_trace(told: Told) -> None:
    """It stands at the latest arrival or end, and begins with the first arrival."""
    calls: list[tuple[str, object]] = []
    store = SimpleNamespace(set_time=lambda seconds: calls.append(("clock", seconds)))
    manager = SimpleNamespace(
        page_pool=SimpleNamespace(store=store), close_session=lambda session_id: calls.append(("close", session_id))
    )
    records = [turn_of(50, "a", 1), turn_of(52, "b", 2), turn_of(60, "a", 1, 3, pause=5), turn_of(61, None, 4)]
    reports = SessionReports(cast(CacheManager, manager), told)
    pauses = []
    for request in make_requests(records):
        reports.see_arrival(request)
        pauses.append(reports.find_pauses([request]))
        reports.close([request])
    assert pauses == ([[5], [None], [None], [None]] if told == "pauses" else [None] * 4)
    before, after = [("clock", second) for second in (1, 6, 6, 6)], [("clock", 11), ("clock", 11)]
    assert calls == ([] if told == "nothing" else [*before, ("close", "b"), *after, ("close", "a")])


class TestCommand:
    def write(self, path: Path, records: list[TraceRecord]) -> Path:
        names = ("timestamp", "input_length", "output_length", "hash_ids", "block_size", "session_id", "pause")
        path.write_text("".join(f"{json.dumps({name: getattr(record, name) for name in names})}\n" for record in records))
        return path

    def test_side_by_side(self, tmp_path: Path) -> None:
        records = make_records(seed=2)
        trace = self.write(tmp_path / "trace.jsonl", records)
        arguments = ["replay", trace, "--num-pages", 150, "--max-num-seqs", 1, "--compare-sessions"]
        figures = figures_of(*arguments)
        assert [*figures] == [f"{told} told" for told in TOLD]
        for told in TOLD:
            assert figures[f"{told} told"]["hit_tokens"] == run(records, 150, told).hit_tokens
        lines = invoke(*arguments).stdout.splitlines()
        assert lines[1].split() == ["nothing", "told", "ends", "told", "pauses", "told"]
        assert lines[2].startswith("hit rate")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "--compare-sessions needs a TRACE with session_id"),
            (["--compare"], "--compare-sessions and --compare exclude each other"),
            (["--compare-eviction"], "--compare-sessions and --compare-eviction exclude each other"),
            (["--no-caching"], "--compare-sessions and --no-caching exclude each other"),
        ],
    )
    def test_refusals(self, options: list[str], message: str, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        trace.write_text(line_of())
        refuse(2, message, "replay", trace, "--compare-sessions", *options)
        refuse(2, "--compare-sessions needs a TRACE with session_id", "replay", "--limit", 3, "--compare-sessions")
