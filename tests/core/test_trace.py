"""A trace has what the calls did, opens as the format demands, and breaks nothing: whatever ends, fills up or is hostile."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from contents import CONTENTS_SETTINGS, FEATURES, Simulation
from settings import Setting
from sources import run_python
from threads import run_threads

import pagepool
from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, PageTable, RunningBatch
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError

pytest.importorskip("msgspec")

from chrome_trace import AsyncBegin, AsyncEnd, Begin, End, Mark, Whole, read_events
from chrome_trace import Counter as Counted

from pagepool.trace import Recorder, recorder, writer

BATCH_CALLS = ["admit", "plan", "step", "settle", "release", "fork", "move_row", "swap_row", "commit_external", "fail_external"]
BATCH_CALLS += ["rewind", "take_moves"]
MANAGER_CALLS = ["allocate_slots", "free", "fork", "take_moves", "complete", "fail", "reset_prefix_cache", "fail_external"]
MANAGER_CALLS += ["find_wrong_token"]
GROUP = CacheGroupSpec(FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False))
SETTINGS = "full 4", "full and window", "full 4, state every 4", "full 4 / window 9", "full 4 / state every 4", "two windows"


class Log:
    """What calls did, noted beside the recorder: expected events by process and track."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, int], list[Any]] = defaultdict(list)  # by batch and row
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.steps: dict[int, Counter[int]] = defaultdict(Counter)  # by batch: rows by step
        self.ends: Counter[str] = Counter()
        self.moves: dict[int, list[Any]] = defaultdict(list)
        self.num_resets = self.num_refused_requests = 0
        self.batches: list[RunningBatch] = []
        self.stays: dict[tuple[int, int], tuple[int, int, int]] = {}
        for cls, names in (RunningBatch, BATCH_CALLS), (CacheManager, MANAGER_CALLS):
            for name in names:
                self._spy(monkeypatch, cls, name)

    def _spy(self, monkeypatch: pytest.MonkeyPatch, cls: Any, name: str) -> None:
        original = getattr(cls, name)

        def spy(owner: Any, *args: Any, **kwargs: Any) -> Any:
            before = owner.num_tokens.copy() if cls is RunningBatch else set(owner.registry.held)
            result = original(owner, *args, **kwargs)
            note = getattr(self, f"note_{name}", None)
            if note is not None:
                note(owner, before, result, *args, **kwargs)
            return result

        monkeypatch.setattr(cls, name, spy)

    def number(self, batch: Any) -> int:
        if not any(each is batch for each in self.batches):
            self.batches.append(batch)
        return next(i for i, each in enumerate(self.batches) if each is batch)

    def begin(self, batch: Any, row: int) -> None:
        counts = (batch.stays, batch.num_tokens, batch.num_cached_tokens)
        self.stays[self.number(batch), row] = stay = tuple(int(count[row]) for count in counts)  # type: ignore[assignment]
        self.rows[self.number(batch), row].append(("B", *stay))

    def end(self, batch: Any, row: int, *how: Any) -> None:
        self.rows[self.number(batch), row].append(("E", *how))
        del self.stays[self.number(batch), row]

    def note_admit(self, batch: Any, _: Any, hits: int | None, row: int, *__: Any, step: Any = None, **___: Any) -> None:
        if hits is None:
            if batch.refusal is not None:
                refusal = batch.refusal
                self.rows[self.number(batch), row].append(("i", refusal.num_needed, refusal.num_free, refusal.pool))
            return
        assert batch.num_cached_tokens[row] == hits
        self.begin(batch, row)
        if step is not None and not batch.num_external_tokens[row]:
            self.steps[self.number(batch)][step.number] += 1

    def note_plan(self, batch: Any, _: Any, step: Any, rows: Any, *__: Any) -> None:
        if step.num_grown:
            self.steps[self.number(batch)][step.number] += step.num_grown
        if step.num_grown < len(rows):
            refusal = step.refusal
            self.rows[self.number(batch), rows[step.num_grown]].append(
                ("i", refusal.num_needed, refusal.num_free, refusal.pool)
            )

    note_step = note_plan

    def note_settle(self, batch: Any, _: Any, rows: Any, step: Any, *__: Any, failed: bool = False, **___: Any) -> None:
        if step.number and not failed:
            self.ends["settled"] += 1
        if failed:
            for row in rows.tolist():
                self.end(batch, row, "lost")

    def note_release(self, batch: Any, before: Any, _: Any, rows: Any, *__: Any, **___: Any) -> None:
        for row in rows:
            self.end(batch, row, "released", int(before[row]))

    def note_fork(self, owner: Any, _: Any, result: Any, source: Any, target: Any) -> None:
        if isinstance(owner, RunningBatch):
            for row in target:
                self.begin(owner, row)
        elif result is not None:
            self.requests[target.request_id].append(("B", target.num_tokens, 0))

    def exchange(self, batch: Any, _: Any, __: Any, source: int, target: int) -> None:
        number = self.number(batch)
        stays = [self.stays.get((number, row)) for row in (target, source)]
        for row, stay in ((source, stays[1]), (target, stays[0])) if source != target else ():
            if stay is not None:
                self.end(batch, row, "moved")
        for row, stay in ((source, stays[0]), (target, stays[1])) if source != target else ():
            if stay is not None:
                self.stays[number, row] = stay
                self.rows[number, row].append(("B", *stay))

    note_move_row = note_swap_row = exchange

    def note_rewind(self, batch: Any, _: Any, result: Any, *__: Any) -> None:
        for row in result[1]:
            self.end(batch, row, "lost")

    def note_take_moves(self, _: Any, __: Any, moves: Any) -> None:
        if moves.number:
            self.moves[moves.number] = [(len(moves.loads), len(moves.saves))]

    def note_complete(self, _: Any, __: Any, ___: None, number: int) -> None:
        self.moves[number].append("completed")

    def note_fail(self, _: Any, __: Any, ___: Any, number: int, **____: Any) -> None:
        self.moves[number].append("failed")

    def note_reset_prefix_cache(self, _: Any, __: Any, is_reset: bool) -> None:
        self.num_resets += is_reset

    def note_allocate_slots(
        self, manager: Any, before: set[str], pages: Any, request: Any, _: int, *rest: Any, **__: Any
    ) -> None:
        if pages is None:
            self.num_refused_requests += 1
        elif request.request_id not in before and request.request_id in manager.registry.held:
            self.requests[request.request_id].append(("B", request.num_tokens, rest[0] if rest else 0))

    def note_free(self, _: Any, before: set[str], __: None, request: Any, **___: Any) -> None:
        if request.request_id in before:
            self.requests[request.request_id].append(("E", "freed", request.num_tokens))

    def note_fail_external(self, owner: Any, before: Any, _: Any, request: Any, *__: Any) -> None:
        if not isinstance(owner, RunningBatch) and request.request_id in before - set(owner.registry.held):
            self.requests[request.request_id].append(("E", "lost", request.num_tokens))

    note_find_wrong_token = note_fail_external


def compare(log: Log, events: list[Any]) -> None:
    """Compare a trace with what was noted."""
    lines = {(event.pid, event.tid): event.args["name"] for event in events if getattr(event, "name", "") == "thread_name"}
    rows: dict[tuple[int, int], list[Any]] = defaultdict(list)
    requests: dict[str, list[Any]] = defaultdict(list)
    names: dict[int, str] = {}
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    moves: dict[int, list[Any]] = defaultdict(list)
    marks: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for event in events:
        args, line = getattr(event, "args", {}), lines.get((event.pid, event.tid), "")
        if isinstance(event, Begin) and event.pid == 1:
            names[event.tid] = event.name
            requests[event.name].append(("B", args["tokens"], args["cached_tokens"]))
        elif isinstance(event, Begin):
            rows[event.pid - 2, event.tid - 300].append(("B", args["stay"], args["tokens"], args["cached_tokens"]))
            assert line == f"row {event.tid - 300}"
        elif isinstance(event, End) and args["end"] != "open":
            how = ("E", args["end"], *([args["tokens"]] if "tokens" in args else []))
            own = requests[names[event.tid]] if event.pid == 1 else rows[event.pid - 2, event.tid - 300]
            own.append(how)
        elif isinstance(event, Mark) and event.name == "refused" and event.pid > 1:
            rows[event.pid - 2, event.tid - 300].append(("i", args["needed_pages"], args["free_pages"], args["pool"]))
        elif isinstance(event, Mark):
            marks[event.name] += 1
        elif isinstance(event, Whole):
            steps[event.pid - 2][args["step"]] += args["rows"]
            ends[args["end"]] += 1
        elif isinstance(event, AsyncBegin):
            moves[event.id].append((args["loads"], args["saves"]))
        elif isinstance(event, AsyncEnd) and args["end"] != "open":
            moves[event.id].append(args["end"])
    assert {key: held for key, held in rows.items() if held} == {key: held for key, held in log.rows.items() if held}
    assert {key: held for key, held in requests.items() if held} == {key: held for key, held in log.requests.items() if held}
    assert steps == {number: counts for number, counts in log.steps.items() if counts}
    assert moves == log.moves
    assert (marks["refused"], marks["reset"]) == (log.num_refused_requests, log.num_resets)
    assert ends["settled"] + marks["settled"] == log.ends["settled"]


def find_setting(name: str) -> Setting:
    return next(setting for setting in CONTENTS_SETTINGS if setting.name == name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trace_has_what_the_calls_did(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and rows, pools, a tier, loads and steps that fail, forks, moves of rows: under a seed."""
    monkeypatch.setattr(recorder, "MIN_PAUSE", 0)
    for seed in range(2):
        with monkeypatch.context() as patch:
            log = Log(patch)
            simulation = Simulation(find_setting(name), seed, is_checked=False, features=[*FEATURES[:5], "lists"])
            for front in simulation.batches:
                log.number(front.batch)
            with Recorder(simulation.manager, tmp_path / "trace.json") as recording:
                simulation.run(40)
                batches = [(log.number(front.batch), front.batch) for front in simulation.batches]
                open_rows = {(number, row) for number, batch in batches for row in batch.is_admitted.nonzero()[0]}
                stats = simulation.manager.stats()
            assert recording.num_dropped == 0, seed
            events = read_events(tmp_path / "trace.json")
            compare(log, events)
            assert open_rows == set(log.stays)
            check_counters(events, simulation.manager, stats)
            for owner in (simulation.manager, *(front.batch for front in simulation.batches)):
                assert not {*BATCH_CALLS, *MANAGER_CALLS} & set(vars(owner))


def check_counters(events: list[Any], manager: Any, stats: Any) -> None:
    """The last counters are those of the statistics, and all of them add up."""
    last: dict[str, dict[str, int]] = {}
    for event in events:
        if isinstance(event, Counted):
            last[event.name] = event.args
            if event.name.startswith("pages of ") and event.name != "pages of the host":
                pool = stats.pools[event.name.removeprefix("pages of ")]
                assert event.args["free"] + event.args["held"] == pool.num_pages
                assert 0 <= event.args["cached"] <= pool.num_pages
    for name, pool in stats.pools.items():
        states = {"free": pool.num_free_pages, "held": pool.num_held_pages, "cached": pool.num_cached_pages}
        assert last[f"pages of {name}"] == states
        assert last[f"changes of {name}"] == {"taken": pool.num_allocated_pages, "evicted": pool.num_evicted_pages}
    if stats.host_tier is not None:
        tier = stats.host_tier
        assert last["pages of the host"] == {"free": tier.num_free_pages, "cached": tier.num_cached_pages}


def make(num_pages: int = 16, num_rows: int = 4, **options: Any) -> tuple[CacheManager, RunningBatch]:
    manager = CacheManager(num_pages, [GROUP], 64, **options)
    return manager, RunningBatch(manager, PageTable(num_rows, 16, 64))


def marks_of(events: list[Any], name: str) -> list[dict[str, Any]]:
    return [event.args for event in events if isinstance(event, Mark) and event.name == name]


def test_steps_ahead_have_tracks_side_by_side(tmp_path: Path) -> None:
    manager = CacheManager(100, [GROUP], 64)
    batch = RunningBatch(manager, PageTable(4, 16, 64), max_steps_ahead=2)
    with Recorder(manager, tmp_path / "trace.json"):
        steps = [batch.new_step()]
        batch.admit(0, [1, 2, 3], step=steps[0])
        steps += [batch.plan([0]), batch.plan([0])]
        for token in range(9):
            batch.settle(steps.pop(0), [token])
            steps.append(batch.plan([0]))
        batch.settle(steps[1], failed=True)
        batch.release([0])
    wholes = [event for event in read_events(tmp_path / "trace.json") if isinstance(event, Whole)]
    assert sorted(event.args["step"] for event in wholes) == list(range(1, 13))
    assert Counter(event.args["end"] for event in wholes) == {"settled": 9, "failed": 2, "open": 1}
    assert len({event.tid for event in wholes}) == 3
    assert all(event.args["rows"] == 1 and event.args["plan_ns"] > 0 for event in wholes)


def test_a_step_that_is_not_settled_ends_with_the_next(tmp_path: Path) -> None:
    manager, batch = make()
    with Recorder(manager, tmp_path / "trace.json"):
        batch.admit(0, [1, 2, 3])
        for token in range(4):
            batch.step([0], [token])
    wholes = [event for event in read_events(tmp_path / "trace.json") if isinstance(event, Whole)]
    assert [event.args["end"] for event in wholes] == ["followed"] * 3 + ["open"]


def test_refusals_say_what_is_short(tmp_path: Path) -> None:
    manager, batch = make(num_pages=8)
    with Recorder(manager, tmp_path / "trace.json"):
        batch.admit(0, list(range(12)))
        assert batch.admit(1, list(range(100, 120))) is None
        batch.admit(1, list(range(100, 116)))
        result = batch.step([0, 1], [1, 2])
        assert (result.num_grown, result.refusal is None) == (0, False)
        waiting = EngineRequest("waiting", list(range(9)))
        assert manager.allocate_slots(waiting, 9) is None
        with pytest.raises(RequestTooLargeError):
            batch.admit(2, [1] * 50)
        with pytest.raises(ArgumentError):
            batch.fork(0, [1])
    events = read_events(tmp_path / "trace.json")
    first, second, third = marks_of(events, "refused")
    assert (first["needed_pages"], first["free_pages"], first["pool"], first["can_wait"]) == (5, 4, "kv", True)
    assert (second["needed_pages"], second["free_pages"]) == (1, 0)
    assert third == {"request": "waiting", "free_pages": {"kv": 0}, "new_tokens": 9}
    errors = [(mark["call"], mark["error"]) for mark in marks_of(events, "error")]
    assert errors == [("admit", "RequestTooLargeError"), ("fork", "ArgumentError")]


def test_what_began_before_is_shown(tmp_path: Path) -> None:
    manager, batch = make()
    batch.admit(2, [1, 2, 3])
    request = EngineRequest("early", [1, 2, 3, 4, 5])
    manager.allocate_slots(request, 5)
    with Recorder(manager, tmp_path / "trace.json"):
        later = RunningBatch(manager, PageTable(1, 16, 64))
        later.admit(0, [1, 2])
        manager.free(request)
    events = read_events(tmp_path / "trace.json")
    begins = [(event.pid, event.name, event.args.get("began_before")) for event in events if isinstance(event, Begin)]
    assert sorted(begins, key=str) == [(1, "early", True), (2, "request", True), (3, "request", None)]
    ends = [event.args["end"] for event in events if isinstance(event, End)]
    assert sorted(ends) == ["freed", "open", "open"]


HOSTILE = ['"}],\n{"', "\x00\x1b[2J", "\ud800", "a" * 1_000_000, "</script>", "\u202e", "", "1", "%s{}"]


def test_hostile_request_ids(tmp_path: Path) -> None:
    manager, _ = make(num_pages=64)
    with Recorder(manager, tmp_path / "trace.json"):
        for request_id in HOSTILE:
            manager.allocate_slots(EngineRequest(request_id, [1, 2, 3]), 3)
    names = [event.name for event in read_events(tmp_path / "trace.json") if isinstance(event, Begin)]
    assert len(names) == len(HOSTILE)
    assert max(map(len, names)) < 200
    assert names[2] == "\\ud800"


def test_the_file_has_no_tokens_and_no_secrets(tmp_path: Path) -> None:
    manager, batch = make(num_pages=64)
    tokens = [123456701 + i for i in range(9)]
    traits = pagepool.RequestTraits(cache_salt="salty", session_id="secret session", tenant="hidden")
    with Recorder(manager, tmp_path / "trace.json"):
        batch.admit(0, tokens, traits=traits)
        request = EngineRequest("a", tokens, cache_salt="salty", session_id="secret session")
        manager.allocate_slots(request, 9)
        with pytest.raises(ArgumentError):
            manager.allocate_slots(EngineRequest("a", tokens, cache_salt="salty"), 9)
        batch.step([0], [123456799])
    text = (tmp_path / "trace.json").read_text()
    assert not any(secret in text for secret in ("1234567", "salty", "secret", "hidden"))


def test_records_that_find_no_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_RECORDS", 10)
    monkeypatch.setattr(writer, "INTERVAL", 3600)
    manager, batch = make()
    with Recorder(manager, tmp_path / "trace.json") as recording:
        for _ in range(20):
            batch.admit(0, [1, 2, 3])
            batch.release([0])
        num_dropped = recording.num_dropped
        assert num_dropped >= 30
    events = read_events(tmp_path / "trace.json")
    assert sum(mark["records"] for mark in marks_of(events, "dropped")) == recording.num_dropped >= num_dropped


@pytest.mark.parametrize("seed", range(3))
def test_a_full_file_is_complete(tmp_path: Path, seed: int) -> None:
    manager, batch = make(num_pages=200, num_rows=16)
    max_bytes, rng = 66_000 + seed * 50, Random(seed)
    with Recorder(manager, tmp_path / "trace.json", max_bytes=max_bytes) as recording:
        for _ in range(1000):
            row = rng.randrange(16)
            if batch.is_admitted[row]:
                batch.release([row])
            else:
                batch.admit(row, [1, 2, 3])
    assert 60_000 < os.path.getsize(tmp_path / "trace.json") <= max_bytes
    assert recording.num_dropped > 0
    assert len(marks_of(read_events(tmp_path / "trace.json"), "the file is full")) == 1


def test_arguments(tmp_path: Path) -> None:
    manager, batch = make()
    path = tmp_path / "trace.json"
    for wrong in (batch, None):
        with pytest.raises(ArgumentTypeError, match="manager: got"):
            Recorder(wrong, path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="path: got int, allowed"):
        Recorder(manager, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="max_bytes: got 10, allowed"):
        Recorder(manager, path, max_bytes=10)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        Recorder(manager, tmp_path / "no folder" / "trace.json")
    with Recorder(manager, path):
        batch.admit(0, [1, 2])
        size = path.stat().st_size
        with pytest.raises(ArgumentError, match="another recorder traces"):
            Recorder(manager, path)
        assert path.stat().st_size >= size
    with Recorder(manager, path) as recording:
        pass
    recording.close()
    assert json.loads(path.read_text())


def test_results_and_errors_are_those_of_the_calls(tmp_path: Path) -> None:
    manager, batch = make()
    with Recorder(manager, tmp_path / "trace.json"):
        assert batch.admit(row=np.int64(0), token_ids=np.array([1, 2, 3, 4, 5], np.int32)) == 0
        assert batch.step(rows=[0], token_ids=[6]).num_grown == 1
        for wrong in ([7], [0, 0], ["a"], 3, {1}):
            with pytest.raises((ArgumentError, ArgumentTypeError, IndexError)):
                batch.release(wrong)
        batch.release(iter([0]))
        with pytest.raises(TypeError):
            batch.plan()  # type: ignore[call-arg]
        assert batch.admit.__doc__ == RunningBatch.admit.__doc__
    events = read_events(tmp_path / "trace.json")
    [end] = [event.args for event in events if isinstance(event, End)]
    assert end == {"end": "released", "tokens": 6}


def test_threads(tmp_path: Path) -> None:
    manager, _ = make(num_pages=200)
    batches = [RunningBatch(manager, PageTable(4, 16, 64)) for _ in range(2)]

    def work(rng: Random, number: int) -> None:
        for i in range(100):
            if number < 2:
                batches[number].admit(0, [rng.randrange(9) for _ in range(9)])
                batches[number].release([0])
            else:
                request = EngineRequest(f"{number} {i}", [1, 2, 3, 4, 5])
                assert manager.allocate_slots(request, 5) is not None
                manager.free(request)

    with Recorder(manager, tmp_path / "trace.json") as recording:
        run_threads(4, 1, work)
    assert recording.num_dropped == 0
    events = read_events(tmp_path / "trace.json")
    assert sum(isinstance(event, Begin) for event in events) == 400


WORKING = """
import os, sys
from pagepool import CacheGroupSpec, CacheManager, FullAttentionSpec, PageTable, RunningBatch
from pagepool.trace import Recorder
spec = FullAttentionSpec(page_size=4, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
manager = CacheManager(num_pages=1000, kv_cache_groups=[CacheGroupSpec(spec)], max_model_len=64)
batch = RunningBatch(manager, PageTable(max_num_reqs=64, max_num_pages_per_req=16, max_num_batched_tokens=64))
def work():
    for row in range(64):
        batch.admit(row, [row, 2, 3, 4, 5])
    for _ in range(8):
        batch.step(list(range(64)), [7] * 64)
    batch.release(list(range(64)))
recorder = Recorder(manager, sys.argv[1])
work()
"""


def test_a_killed_process_leaves_a_trace(tmp_path: Path) -> None:
    for i in range(3):
        command = [sys.executable, "-c", WORKING + "print(flush=True)\nwhile True: work()", str(tmp_path / "trace.json")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while (tmp_path / "trace.json").stat().st_size < (1 + i) * 200_000:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        events = read_events(tmp_path / "trace.json", is_ended=False)
        assert any(isinstance(event, Whole) for event in events)


def test_exit_ends_the_file(tmp_path: Path) -> None:
    run_python("-c", WORKING, tmp_path / "trace.json")
    assert len([event for event in read_events(tmp_path / "trace.json") if isinstance(event, Whole)]) == 8


def test_a_forked_process_does_nothing(tmp_path: Path) -> None:
    fork = """
child = os.fork()
if child == 0:
    recorder.close()
    try:
        batch.admit(0, [1])
    except Exception as error:
        assert type(error).__name__ == "IntegrityError"
        sys.exit(0)  # with all that runs at exit
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
work()
"""
    run_python("-c", WORKING + fork, tmp_path / "trace.json")
    events = read_events(tmp_path / "trace.json")
    assert len([event for event in events if isinstance(event, Whole)]) == 16
    assert not marks_of(events, "error")


FULL_DISK = """
import logging, resource, time
time.sleep(0.5)  # what is written by now stays
logging.basicConfig(format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for _ in range(100):
    work()
try:
    recorder.close()
except OSError as error:
    print("raised", error.errno == 27)
recorder.close()
assert recorder.num_dropped > 0
manager.check()
"""


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path) -> None:
    lines = run_python("-c", WORKING + FULL_DISK, tmp_path / "trace.json").stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("trace: no more events are written")
    assert lines[1] == "raised True"
    assert len(read_events(tmp_path / "trace.json", is_ended=False)) > 100


def test_an_error_of_the_block_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    manager, batch = make()
    recording = Recorder(manager, tmp_path / "trace.json")
    batch.admit(0, [1])
    monkeypatch.setattr(writer.os, "pwrite", fail)

    def work() -> None:
        with recording:
            raise KeyError

    with pytest.raises(KeyError):
        work()


def test_nothing_keeps_a_batch_or_a_manager(tmp_path: Path) -> None:
    manager, batch = make()
    recording = Recorder(manager, tmp_path / "trace.json")
    table = batch.group_tables[0]
    gc.disable()
    try:
        del batch
        RunningBatch(manager, table)  # of the batch that is gone
        del manager
    finally:
        gc.enable()
    recording.close()
    read_events(tmp_path / "trace.json")
