"""vLLM's manager with hints: whose blocks go first, what requests cannot do, and nothing if hints are off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from random_hints import make_fields
from settings import NUM_OPERATIONS
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request, RequestStatus
from vllm_engine import BLOCK_SIZE, make_hasher, make_manager

from pagepool.compat import vllm as compat
from pagepool.compat.vllm.blocks import Queue
from pagepool.compat.vllm.listener import MAX_NAMES, get_listener
from pagepool.compat.vllm.session_queue import AdaptiveListeningQueue, ListeningQueue

NUM_BLOCKS = 1 + 24
CALLS_PER_SEED = 200
KvTypes = tuple[str, dict[str, Any]]
OUTCOMES = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED, RequestStatus.RUNNING)


@pytest.fixture(autouse=True)
def hearing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install pagepool with all hints, or with those that the test is marked with."""
    monkeypatch.setenv(compat.HINTS_VARIABLE, getattr(request, "param", "all"))
    monkeypatch.delenv(compat.SHARES_VARIABLE, raising=False)
    monkeypatch.delenv(compat.PINS_VARIABLE, raising=False)
    with compat.installed():
        yield


def hints(value: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("hearing", [value], indirect=True)


class Engine:
    """A manager of one group, and requests of whole blocks that run one after another."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, **options: Any) -> None:
        self.manager = make_manager(num_blocks, 4096, **options)
        self.queue: Any = self.manager.block_pool.free_block_queue
        self.hasher = make_hasher()
        self._names = (f"r{i}" for i in count())
        self.time, self.num_hits = 1.0, 0
        self.wait(0)

    def wait(self, seconds: float) -> None:
        self.time += seconds
        if hasattr(self.queue, "store"):
            self.queue.store.set_time(self.time)

    def start(self, token: int, num_blocks: int = 4, *, prefix: int = 0, envelope: Any = None, **options: Any) -> Any:
        """Start a request of equal tokens, behind a prefix of blocks with token 0, whose blocks are computed at once."""
        tokens = [0] * (prefix * BLOCK_SIZE) + [token] * ((num_blocks - prefix) * BLOCK_SIZE)
        arguments = {name: options.pop(name) for name in ("pagepool_seconds", "pagepool_close") if name in options}
        sampling = SamplingParams(max_tokens=9, extra_args=arguments or None)
        request = Request(next(self._names), tokens, sampling, None, block_hasher=self.hasher, kv_hints=envelope, **options)
        found, num_hits, *_ = self.manager.get_computed_blocks(request)
        self.num_hits = num_hits // BLOCK_SIZE
        assert self.manager.allocate_slots(request, len(tokens) - num_hits, num_hits, found) is not None
        request.num_computed_tokens, request.status = len(tokens), RequestStatus.RUNNING
        return request

    def end(self, request: Any, status: Any = RequestStatus.FINISHED_STOPPED) -> None:
        request.status = status
        self.manager.free(request)
        compat.check(self.manager)

    def run(self, token: int, num_blocks: int = 4, **options: Any) -> None:
        self.end(self.start(token, num_blocks, **options))

    def count_hits(self, token: int, num_blocks: int = 4, **options: Any) -> int:
        """Count the blocks of a prompt that are cached."""
        tokens = [0] * (options.get("prefix", 0) * BLOCK_SIZE)
        tokens += [token] * (num_blocks * BLOCK_SIZE - len(tokens)) + [99]
        request = Request("look-up", tokens, SamplingParams(max_tokens=9), None, block_hasher=self.hasher)
        return self.manager.get_computed_blocks(request)[1] // BLOCK_SIZE

    def fill(self, num_blocks: int) -> None:
        """Take blocks for a request that says nothing, and has nothing in common with others."""
        self.run(1000 + int(self.time * 16), num_blocks)

    def count_expected(self) -> int:
        """Count the free blocks that are expected back."""
        return sum(self.queue.store.expectations[0][1:])


def envelope_of(*actions: KvTypes) -> KvHintsEnvelope:
    listed = [KvHintAction(f"a{i}", name, "1.0", payload) for i, (name, payload) in enumerate(actions)]
    return KvHintsEnvelope("1.0", "m", listed)


# Off.


@hints("off")
def test_off_nothing_of_it_is_there() -> None:
    assert KVCacheManager.free.__module__ == KVCacheManager.pop_blocks_for_free.__module__ == KVCacheManager.__module__
    engine = Engine()
    assert type(engine.queue) is Queue
    engine.run(1, session_id="s1", pagepool_close=1)
    assert compat.report().hints == "none"
    assert "hints" not in dict(compat.report().parts)


def test_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compat.report().hints, dict(compat.report().parts)["hints"]) == ("all", "used")
    assert str(compat.report()).startswith(
        f"vLLM {compat.report().version}, pagepool installed, eviction: vLLM's, hints: all\n"
    )
    assert type(Engine().queue) is ListeningQueue
    assert type(Engine(enable_caching=False).queue) is Queue
    compat.uninstall()
    assert KVCacheManager.free.__module__ == KVCacheManager.__module__
    monkeypatch.setenv(compat.EVICTION_VARIABLE, "adaptive")
    with compat.installed():
        assert type(Engine().queue) is AdaptiveListeningQueue
        assert (compat.report().eviction, compat.report().hints) == ("adaptive", "all")


# What is said.


def test_the_blocks_of_an_ended_session_go_first() -> None:
    engine = Engine()
    engine.run(1, 12, session_id="s1")
    engine.run(2, 12, session_id="s2", pagepool_close=1)
    engine.fill(10)
    assert (engine.count_hits(1, 12), engine.count_hits(2, 12)) == (12, 2)
    assert (engine.queue.num_turns, engine.queue.store.num_sessions) == (0, 1)


def test_what_returns_last_goes_first() -> None:
    engine = Engine()
    engine.run(1, 8, session_id="s1", pagepool_seconds=5)
    engine.run(2, 8, session_id="s2", pagepool_seconds=600)
    engine.run(3, 8, session_id="s3", pagepool_seconds=60)
    engine.fill(12)
    assert [engine.count_hits(token, 8) for token in (1, 2, 3)] == [8, 0, 4]


def test_a_one_shot_goes_first_and_takes_no_shared_prompt_along() -> None:
    engine = Engine()
    engine.run(1, 8, prefix=4)
    engine.run(2, 8, prefix=4, pagepool_seconds=-1)
    engine.run(3, 4)
    assert engine.count_expected() == 4
    engine.wait(1)
    engine.fill(12)
    assert [engine.count_hits(1, 8, prefix=4), engine.count_hits(2, 8, prefix=4), engine.count_hits(3)] == [8, 4, 4]


def test_a_session_ends_no_blocks_of_others() -> None:
    engine = Engine()
    engine.run(1, 8, prefix=4, session_id="s1")
    engine.run(2, 8, prefix=4, session_id="s2", pagepool_close=1)
    assert engine.count_expected() == 4
    engine.run(1, 8, prefix=4, session_id="s1", cache_salt="other", pagepool_close=1)
    assert engine.count_expected() == 12


def test_a_salt_separates_sessions() -> None:
    engine = Engine()
    engine.run(1, 8, session_id="s1", cache_salt="a")
    engine.run(2, 4, session_id="s1", cache_salt="b", pagepool_close=1)
    assert engine.count_expected() == 4
    engine.run(3, 4, envelope=envelope_of(("session.end", {"session_id": "s1"})), cache_salt="a")
    assert engine.count_expected() == 12


def test_a_hit_ends_an_expectation() -> None:
    engine = Engine()
    engine.run(1, session_id="s1", pagepool_seconds=300)
    assert engine.count_expected() == 4
    running = [engine.start(1, 5, session_id="s1") for _ in range(2)]
    assert engine.count_expected() == 0
    for request in running:
        engine.end(request)
    assert engine.count_expected() == 0


def test_an_aborted_request_says_nothing_and_a_preempted_one_comes_back() -> None:
    engine = Engine()
    engine.end(engine.start(1, session_id="s1", pagepool_close=1, pagepool_seconds=60), RequestStatus.FINISHED_ABORTED)
    assert engine.count_expected() == 0
    request = engine.start(2, session_id="s2", pagepool_seconds=600)
    engine.end(request, RequestStatus.RUNNING)
    assert engine.queue.store.expectations[0][1:3] == [4, 0]
    assert engine.queue.num_turns == 0


STREAM_ENDS = ["input", "input, freed later", "abort", "abort in an answer", "more input, abort"]


@pytest.mark.parametrize("end", STREAM_ENDS)
def test_a_streaming_request_ends_without_further_input(end: str) -> None:
    """vLLM ends it as it does an aborted one, which says nothing."""
    engine = Engine()
    scheduler: Any = object.__new__(Scheduler)
    request = engine.start(1, 8, session_id="s1", pagepool_close=1, resumable=True)
    request.streaming_queue = deque()
    scheduler.requests, scheduler.kv_cache_manager = {request.request_id: request}, engine.manager
    scheduler.num_waiting_for_streaming_input = 1
    later: list[Any] = []

    def finish(request_id: str, status: Any) -> None:
        assert (request_id, status) == (request.request_id, RequestStatus.FINISHED_ABORTED)
        if "later" in end:
            later.append(lambda: engine.end(request, status))
        else:
            engine.end(request, status)

    scheduler.finish_requests = finish
    has_more = end in ("abort in an answer", "more input, abort")
    request.status = RequestStatus.RUNNING if has_more else RequestStatus.WAITING_FOR_STREAMING_REQ
    if end != "abort":
        sampling = SamplingParams(max_tokens=9)
        more = Request(request.request_id, [0], sampling, None, resumable=end == "more input, abort")
        scheduler.add_request(more)
        assert len(request.streaming_queue) == has_more
    if end.startswith("input"):
        for call in later:
            call()
        assert engine.count_expected() == 8
    else:
        finish(request.request_id, RequestStatus.FINISHED_ABORTED)
        assert engine.count_expected() == 0
    assert engine.queue.num_turns == 0
    engine.run(2, 8, session_id="s2")
    expected = engine.count_expected()
    engine.end(engine.start(3, 4, session_id="s3", pagepool_close=1, resumable=True), RequestStatus.FINISHED_ABORTED)
    assert engine.count_expected() == expected


def test_streams_and_other_requests_are_added_as_without() -> None:
    """Also where nobody listens."""
    scheduler: Any = object.__new__(Scheduler)
    scheduler.requests, scheduler.num_waiting_for_streaming_input = {}, 0
    scheduler.kv_cache_manager = make_manager(NUM_BLOCKS, 4096, enable_caching=False)
    scheduler.spec_decode_metrics_level, scheduler.connector, scheduler.log_stats = "none", None, False
    added: list[Any] = []
    scheduler._enqueue_waiting_request = added.append
    ended: list[Any] = []
    scheduler.finish_requests = lambda *arguments: ended.append(arguments)
    for is_resumable in (True, False):
        request = Request(f"r{is_resumable}", [1], SamplingParams(max_tokens=9), None, resumable=is_resumable)
        scheduler.add_request(request)
        assert added[-1] is request is scheduler.requests[request.request_id]
    scheduler.requests["rTrue"].status = RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.add_request(Request("rTrue", [0], SamplingParams(max_tokens=9), None))
    assert ended == [("rTrue", RequestStatus.FINISHED_ABORTED)]


def test_a_request_whose_load_failed_is_counted_once() -> None:
    """vLLM frees it unfinished, and looks it up again, without a preemption."""
    engine = Engine()
    engine.run(1, 6, session_id="s1")
    said = envelope_of(("kv.retain", {"seconds": 30, "session_id": "s1"}), ("kv.fetch", {}))
    request = engine.start(2, session_id="s2", pagepool_seconds=600, envelope=said)
    for status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
        engine.end(request, status)
        assert engine.queue.num_turns == 0
        request.num_preemptions += status == RequestStatus.RUNNING
        found, num_hits, *_ = engine.manager.get_computed_blocks(request)
        assert engine.manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, found) is not None
        request.num_preemptions = 0
    assert dict(compat.report().heard) == {"sessions": 2, "seconds": 1, "retains": 1}
    assert compat.report().ignored == (("kv.fetch 1.0", 1),)
    engine.end(request)
    engine.end(engine.start(3, session_id="s2", envelope=said))
    assert dict(compat.report().heard) == {"sessions": 3, "seconds": 1, "retains": 2}


def test_blocks_that_are_freed_later() -> None:
    engine = Engine()
    request = engine.start(1, 8, session_id="s1", pagepool_seconds=60)
    request.status = RequestStatus.FINISHED_STOPPED
    blocks = engine.manager.pop_blocks_for_free(request)
    assert (engine.count_expected(), engine.queue.num_turns) == (0, 0)
    engine.manager.block_pool.free_blocks(reversed(blocks))
    assert engine.count_expected() == 8
    compat.check(engine.manager)


def test_actions_for_other_sessions() -> None:
    engine = Engine()
    for token, session in ((1, "s1"), (2, "s2")):
        engine.run(token, 6, session_id=session)
    said = envelope_of(
        ("kv.retain", {"seconds": 30, "session_id": "s1"}), ("kv.demote", {"session_id": "s2"}), ("kv.retain", {"seconds": 2})
    )
    engine.run(3, 6, session_id="s3", envelope=said)
    terms = engine.queue.store.expectations[0]
    assert (terms[2], terms[5], terms[-1]) == (6, 6, 6)


def test_decoded_blocks_belong_to_the_session() -> None:
    engine = Engine()
    request = engine.start(1, 4, session_id="s1", pagepool_close=1)
    for _ in range(3 * BLOCK_SIZE):
        request.append_output_token_ids(7)
        assert engine.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    engine.end(request)
    assert engine.count_expected() == 7


def test_a_salt_keeps_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another one says."""
    compat.uninstall()
    monkeypatch.setenv(compat.SHARES_VARIABLE, "good:0.45, *:0.45")
    with compat.installed():
        engine = Engine(1 + 40)
        engine.run(1, 12, cache_salt="good")
        for token in range(2, 20):
            engine.wait(10)
            engine.run(token, 8, cache_salt="bad", session_id=f"s{token}", pagepool_seconds=1)
        engine.run(1, 13, cache_salt="good")
        assert [*engine.queue.shares.values()] == [0.45, 0.45]
        assert engine.num_hits == 12


def test_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold blocks for their time, up to a share of the pool."""
    compat.uninstall()
    monkeypatch.setenv(compat.PINS_VARIABLE, "0.2")
    with compat.installed():
        engine = Engine(1 + 40)
        pin = envelope_of(("kv.pin", {"seconds": 100, "tokens": 5 * BLOCK_SIZE + 3}))
        for token in (1, 2):
            engine.run(token, 8, envelope=pin, session_id="s1", pagepool_close=1)
        assert dict(compat.report().heard)["pins"] == dict(compat.report().heard)["refused pins"] == 1
        assert (engine.queue.num_pinned_blocks, engine.queue.num_free_blocks) == (5, 35)
        assert not engine.manager.reset_prefix_cache()
        engine.fill(35)
        assert (engine.count_hits(1, 8), engine.count_hits(2, 8)) == (5, 0)
        engine.wait(99)
        engine.run(3, 1)
        assert engine.queue.num_pinned_blocks == 5
        engine.wait(2)
        engine.fill(40)
        assert (engine.queue.num_pinned_blocks, engine.queue.num_free_blocks, engine.count_hits(1, 8)) == (0, 40, 0)
        assert engine.manager.reset_prefix_cache()


@hints("sessions")
def test_ids_alone() -> None:
    engine = Engine()
    engine.run(1, session_id="s1", pagepool_close=1, envelope=envelope_of(("kv.retain", {"seconds": 3})))
    assert (engine.count_expected(), engine.queue.store.num_sessions) == (0, 1)
    assert compat.report().hints == "sessions"
    assert compat.report().heard == (("sessions", 1),)


def test_reports_count() -> None:
    engine = Engine()
    engine.run(1, session_id="s1", envelope=envelope_of(("kv.fetch", {}), ("kv.pin", {"seconds": 1, "tokens": 16})))
    engine.run(2, session_id="s2", pagepool_seconds=3)
    assert dict(compat.report().heard) == {"sessions": 2, "refused pins": 1, "seconds": 1}
    assert compat.report().ignored == (("kv.fetch 1.0", 1),)
    assert "\nheard: sessions" in str(compat.report())


def test_a_fault_in_reading_leaves_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Any) -> None:
        raise MemoryError("short")

    engine = Engine()
    monkeypatch.setattr(get_listener(), "hear", fail)
    engine.run(1, session_id="s1", pagepool_close=1)
    assert dict(compat.report().heard) == {"errors": 1}
    assert engine.count_hits(1) == 4


# Nonsense.


def run_nonsense(seed: int) -> None:
    """Run requests with random fields at once, with shortage, aborts and preemptions. Check the pool now and then."""
    rng = Random(seed)
    engine = Engine(1 + rng.choice((12, 40)))
    running: list[Any] = []
    for number in range(CALLS_PER_SEED):
        engine.wait(rng.choice((0, 0, 1, 100)))
        if rng.random() < 0.55 or not running:
            fields = make_fields(rng)
            request = Request(
                f"r{number}",
                [rng.randrange(3)] * (BLOCK_SIZE * rng.randint(1, 6)),
                SamplingParams(max_tokens=9),
                None,
                block_hasher=engine.hasher,
                cache_salt=fields["cache_salt"] if type(fields["cache_salt"]) is str else None,
            )
            request.session_id, request.kv_hints = fields["session_id"], fields["kv_hints"]
            request.sampling_params = SimpleNamespace(extra_args=getattr(fields["sampling_params"], "extra_args", None))
            request.num_preemptions = rng.choice((0, 0, 0, 1))
            found, num_hits, *_ = engine.manager.get_computed_blocks(request)
            if engine.manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, found) is None:
                request.status = RequestStatus.FINISHED_ABORTED
                engine.manager.free(request)
                continue
            request.num_computed_tokens, request.status = request.num_tokens, RequestStatus.RUNNING
            running.append(request)
        else:
            request = running.pop(rng.randrange(len(running)))
            request.status = rng.choice(OUTCOMES)
            if rng.random() < 0.3:
                engine.manager.block_pool.free_blocks(reversed(engine.manager.pop_blocks_for_free(request)))
            else:
                engine.manager.free(request)
        if number % 50 == 49:
            compat.check(engine.manager)
    for request in running:
        engine.end(request)
    assert engine.queue.num_pinned_blocks <= 0.3 * len(engine.manager.block_pool.blocks)
    engine.wait(3601)
    engine.run(9, 1)
    assert (engine.queue.num_turns, engine.queue.num_pinned_blocks) == (0, 0)
    assert engine.queue.store.num_sessions < len(engine.queue.get_all_free_blocks())
    assert engine.manager.reset_prefix_cache()
    assert engine.queue.store.num_sessions == 0
    compat.check(engine.manager)


@pytest.mark.parametrize(("shares", "pins"), [("", ""), ("a:0.3, *:0.2", "0.3")])
def test_nonsense(monkeypatch: pytest.MonkeyPatch, shares: str, pins: str) -> None:
    """Nothing leaves the plug-in, and what it keeps is bounded."""
    compat.uninstall()
    monkeypatch.setenv(compat.SHARES_VARIABLE, shares)
    monkeypatch.setenv(compat.PINS_VARIABLE, pins)
    compat.install()
    for seed in range(max(NUM_OPERATIONS // CALLS_PER_SEED // 4, 10)):
        try:
            run_nonsense(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
    counted = dict(compat.report().heard)
    assert counted.get("errors", 0) == 0
    assert len(compat.report().ignored) <= MAX_NAMES + 1


# The sessions of the study, fewer of them.


def test_agents_hit_more() -> None:
    study = pytest.importorskip("bench.studies.vllm_keeping", reason="bench/ is not here")
    compat.uninstall()
    percents = {column: study.measure(column, 0, num_sessions=60) for column in ("vLLM", "close", "seconds")}
    assert percents["close"] > percents["vLLM"] + 0.5, percents
    assert percents["seconds"] > percents["close"] + 0.5, percents
