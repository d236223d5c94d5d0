"""Waiting queues: order, hits and bounds against an oracle that looks all requests up in each pass, and what is refused."""

from __future__ import annotations

from random import Random
from threading import Thread
from typing import Any

import pytest
from queue_oracle import QueueOracle
from settings import NUM_OPERATIONS

from pagepool import (
    Admission,
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MultiGroupPageTable,
    PageHashing,
    RequestTraits,
    Retention,
    RunningBatch,
    SlidingWindowSpec,
    WaitingQueue,
)
from pagepool._core import HashedTokens, WaitingLine
from pagepool.errors import ArgumentError, ArgumentTypeError, RequestTooLargeError

KV: dict[str, Any] = {"page_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16", "use_mla": False}
FULL = [CacheGroupSpec(FullAttentionSpec(**KV))]
NUM_ROWS = 8
PROBE_ROW = NUM_ROWS  # never admitted


def make_batch(num_pages: int = 48, groups: Any = FULL, max_model_len: int = 96, **options: Any) -> RunningBatch:
    manager = CacheManager(num_pages=num_pages, kv_cache_groups=groups, max_model_len=max_model_len, **options)
    table = MultiGroupPageTable(NUM_ROWS + 1, max_model_len, 512, [4] * len(groups))
    return RunningBatch(manager, table)


class Work:
    """Random requests that come, are admitted, generate, are preempted, cancelled and end, in both queues."""

    def __init__(self, seed: int, batch: RunningBatch, **options: Any) -> None:
        self.rng, self.batch = Random(seed), batch
        self.bound, self.stretch = self.rng.choice([0, 20, 60, 10_000]), self.rng.choice([0.0, 0.25, 1.0])
        self.promote = self.rng.choice([30, 200, 100_000])
        order = self.rng.choice(["work", "work", "arrival"])
        self.queue = WaitingQueue(
            batch._manager,
            order=order,
            max_overtaken_tokens=self.bound,
            max_stretch=self.stretch,
            promote_after_tokens=self.promote,
            **options,
        )
        self.oracle = QueueOracle(self.hits, order == "work", self.bound, self.stretch, self.promote)
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.num_names = 0
        self.priorities = self.rng.choice([[0], [0, 1], [-5, 0, 7]])
        self.prefixes = [[self.rng.randrange(5) for _ in range(self.rng.randrange(4, 60))] for _ in range(4)]

    def hits(self, tokens: list[int]) -> int:
        return self.batch.probe(PROBE_ROW, tokens)

    def make_tokens(self) -> list[int]:
        prefix = self.rng.choice(self.prefixes)
        cut = self.rng.randrange(len(prefix) + 1)
        return prefix[:cut] + [self.rng.randrange(5) for _ in range(self.rng.randrange(1, 30))]

    def add(self) -> None:
        tokens, priority, self.num_names = self.make_tokens(), self.rng.choice(self.priorities), self.num_names + 1
        self.queue.add(self.num_names, tokens, priority=priority)
        self.oracle.add(self.num_names, tokens, priority)

    def admit(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.rows]
        if not free:
            return
        row, wanted = self.rng.choice(free), self.oracle.find_next()
        hits = self.hits(wanted.tokens) if wanted else 0
        got = self.batch.admit_next(row, self.queue, max_num_new_tokens=self.rng.choice([None, 16]))
        if got is None:
            assert wanted is None or self.batch.refusal is not None
            return
        assert wanted is not None
        assert got == Admission(wanted.name, hits)
        assert self.batch.num_cached_tokens[row] == hits
        self.oracle.hits = lambda tokens: hits if tokens is wanted.tokens else self.hits(tokens)  # before its pages were cached
        self.oracle.take(wanted)
        self.oracle.hits = self.hits
        self.rows[row] = (wanted.name, list(wanted.tokens))

    def step(self) -> None:
        for row in list(self.rows):
            name, tokens = self.rows[row]
            left = int(self.batch.num_tokens[row] - self.batch.num_computed_tokens[row])
            if left > 0:
                done = self.batch.plan([row], num_tokens=min(left, 16)).num_grown
            elif len(tokens) < 90:
                tokens.append(self.rng.randrange(5))
                done = self.batch.step([row], [tokens[-1]]).num_grown
            else:
                done = 0
            if not done:
                self.batch.release([row])
                del self.rows[row]
                if len(tokens) < 90:
                    tokens = self.batch_tokens(tokens)
                    self.queue.put_back(name, tokens)
                    self.oracle.add(name, tokens, 0, is_back=True)

    def batch_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self.rng.randrange(1, len(tokens) + 1)] if self.rng.random() < 0.2 else tokens

    def end(self) -> None:
        if self.rows:
            row = self.rng.choice(list(self.rows))
            self.batch.release([row])
            del self.rows[row]

    def cancel(self) -> None:
        name = self.rng.randrange(self.num_names + 2)
        waiters = [waiter for waiter in self.oracle.waiters if waiter.name == name]
        assert self.queue.remove(name) == (len(waiters) > 0) == (name not in self.queue and len(waiters) > 0)
        if waiters:
            self.oracle.waiters.remove(waiters[0])

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.rng.choice([self.add, self.add, self.admit, self.admit, self.step, self.step, self.end, self.cancel])()
            self.compare()

    def compare(self) -> None:
        order = [(item.name, item.num_cached_tokens) for item in self.queue.peek(10**6)]
        assert order == self.oracle.list_order()
        stats = self.queue.stats()
        assert stats.num_waiting == len(self.queue) == len(self.oracle.waiters)
        assert stats.num_work_tokens == sum(map(self.oracle.work, self.oracle.waiters))
        assert stats[5:8] == (self.oracle.num_computed, self.oracle.num_overtakes, self.oracle.num_charged)
        self.queue.check()


@pytest.mark.parametrize("seed", range(max(4, NUM_OPERATIONS // 2000)))
def test_queue_agrees_with_an_oracle(seed: int) -> None:
    Work(seed, make_batch()).run(150)


WINDOW = SlidingWindowSpec(**KV, sliding_window=12)
CHUNKED = ChunkedLocalAttentionSpec(**KV, attention_chunk_size=16)
HYBRID = [*FULL, CacheGroupSpec(WINDOW)]
SETTINGS: dict[str, dict[str, Any]] = {
    "adaptive": {"eviction": "adaptive"},
    "computed": {"caches": "computed"},
    "sha256": {"hashing": PageHashing(hash_algo="sha256")},
    "lookahead": {"hashing": PageHashing(use_eagle=True, hash_lookahead=1)},
    "eagle": {"hashing": PageHashing(use_eagle=True)},
    "windows": {"groups": HYBRID, "num_pages": 80},
    "windows alone": {"groups": [CacheGroupSpec(WINDOW)]},
    "chunks": {"groups": [*FULL, CacheGroupSpec(CHUNKED)], "num_pages": 80},
    "without caching": {"enable_caching": False},
}


class Flow(Work):
    """The same requests, whose hits are found out when they are admitted."""

    def admit(self) -> None:
        free = [row for row in range(NUM_ROWS) if row not in self.rows]
        if not free:
            return
        got = self.batch.admit_next(free[0], self.queue, max_num_new_tokens=16, skips_misfits=self.rng.random() < 0.3)
        if got is None:
            return
        waiter = next(waiter for waiter in self.oracle.waiters if waiter.name == got.name)
        assert got.num_cached_tokens == self.batch.num_cached_tokens[free[0]]
        assert self.batch.get_token_ids(free[0]).tolist() == waiter.tokens
        self.oracle.waiters.remove(waiter)
        self.rows[free[0]] = (waiter.name, list(waiter.tokens))

    def compare(self) -> None:
        self.queue.check()
        self.batch.check()
        assert len(self.queue) == len(self.oracle.waiters)

    def drain(self) -> None:
        """Admit all requests that are left: none is lost, and none waits for ever."""
        self.batch.release(list(self.rows))
        self.rows.clear()
        for _ in range(4 * len(self.queue) + 8):
            self.admit()
            self.batch.release(list(self.rows))
            self.rows.clear()
            self.compare()
        assert len(self.queue) == 0


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(max(2, NUM_OPERATIONS // 10_000)))
def test_no_request_is_lost_in_any_setting(name: str, seed: int) -> None:
    work = Flow(seed, make_batch(**SETTINGS[name]))
    work.run(120)
    work.drain()


def test_least_to_compute_goes_first_within_the_bound() -> None:
    """A request of 40 tokens is overtaken by 20 tokens and a quarter of its own 40, and by no token more."""
    batch = make_batch(num_pages=400)
    queue = WaitingQueue(batch._manager, max_overtaken_tokens=20, max_stretch=0.25)
    queue.add("long", list(range(40)))
    for i in range(6):
        queue.add(i, [100 + i] * 10)
    assert [batch.admit_next(row, queue).name for row in range(5)] == [0, 1, 2, "long", 3]
    stats = queue.stats()
    assert (stats.num_overtakes, stats.num_overtaken_tokens, stats.num_admitted) == (3, 30, 5)


def test_arrival_is_first_come_first_served() -> None:
    queue = WaitingQueue(make_batch()._manager, order="arrival")
    for name, size in (("a", 30), ("b", 2), ("c", 20)):
        queue.add(name, [1] * size)
    assert [queue.take().name for _ in range(3)] == ["a", "b", "c"]
    assert queue.take() is None


def test_priorities_and_promotion() -> None:
    """A request of a lower class goes first once 25 tokens were computed since it came."""
    queue = WaitingQueue(make_batch()._manager, order="arrival", promote_after_tokens=25)
    queue.add("low", [1])
    for i in range(5):
        queue.add(i, [2 + i] * 10, priority=1)
    queue.put_back("again", [9])
    assert [queue.take().name for _ in range(7)] == ["again", 0, 1, 2, "low", 3, 4]


def test_hits_follow_the_cache() -> None:
    """A cached page and an evicted one move the hits of a waiting request without a look-up."""
    batch = make_batch(num_pages=12)
    queue = WaitingQueue(batch._manager)
    queue.add("waits", list(range(20)))
    assert batch.admit(0, list(range(12))) == 0
    assert queue.peek() == [Admission("waits", 12)]
    assert batch.admit(1, list(range(16))) == 12
    assert queue.peek() == [Admission("waits", 16)]
    batch.release([1, 0])
    assert batch.admit(2, list(range(100, 132))) == 0  # takes the free pages, and evicts the last of the prefix
    assert queue.peek() == [Admission("waits", 12)]
    assert batch._manager.reset_prefix_cache() is False
    batch.release([2])
    assert batch._manager.reset_prefix_cache()
    assert queue.peek() == [Admission("waits", 0)]


def test_hits_that_windows_end_are_found_out_before_a_request_is_admitted() -> None:
    """Full attention hits 28 of the 30 tokens of the first, whose window lost its pages there."""
    batch = make_batch(num_pages=100, groups=HYBRID, retention=Retention(window_slack=0))
    queue = WaitingQueue(batch._manager)
    queue.add("ended", [*range(30)])
    queue.add("short", [7] * 20)
    batch.admit(0, [*range(60)], max_num_new_tokens=12)
    for _ in range(4):
        batch.plan([0], num_tokens=12)
    batch.release([0])
    assert batch.probe(1, [*range(30)]) == 0
    assert batch.admit_next(1, queue) == Admission("short", 0)
    assert batch.admit_next(2, queue) == Admission("ended", 0)


def test_a_refusal_keeps_the_place_and_says_why() -> None:
    batch = make_batch(num_pages=8)
    queue = WaitingQueue(batch._manager, order="arrival")
    batch.admit(0, [1] * 16)
    queue.add("large", [2] * 24)
    queue.add("small", [3] * 4)
    assert batch.admit_next(1, queue) is None
    assert batch.refusal is not None
    assert batch.refusal.num_needed == 6
    assert batch.admit_next(1, queue, skips_misfits=True) == Admission("small", 0)
    batch.release([0, 1])
    assert batch.admit_next(1, queue) == Admission("large", 0)
    assert batch.admit_next(2, queue) is None
    assert batch.refusal is None


def test_requests_that_are_not_ready_are_passed_over_uncharged() -> None:
    batch = make_batch(num_pages=100)
    queue = WaitingQueue(batch._manager, max_overtaken_tokens=0, max_stretch=0)
    ready: set[object] = {"b", "c"}
    for name in "abc":
        queue.add(name, [ord(name)] * 8)
    assert batch.admit_next(0, queue, is_ready=ready.__contains__) == Admission("b", 0)
    assert batch.admit_next(1, queue, is_ready=ready.__contains__) == Admission("c", 0)
    assert batch.admit_next(2, queue, is_ready=ready.__contains__) is None
    assert [*queue] == ["a"]
    assert queue.stats().num_overtakes == 0
    assert batch.admit_next(2, queue) == Admission("a", 0)


def test_equal_prompts_wait_for_each_other_with_computed_caching() -> None:
    batch = make_batch(num_pages=100, caches="computed")
    queue = WaitingQueue(batch._manager)
    for name in "ab":
        queue.add(name, list(range(30)))
    step = batch.new_step()
    assert batch.admit_next(0, queue, step=step) == Admission("a", 0)
    assert batch.admit_next(1, queue, step=step) is None
    batch.settle(step, [1])
    assert batch.admit_next(1, queue) == Admission("b", 28)


def test_a_request_goes_on_after_two_steps_whatever_happens_to_its_twin() -> None:
    batch = make_batch(num_pages=100, caches="computed")
    queue = WaitingQueue(batch._manager)
    for name in "ab":
        queue.add(name, list(range(30)))
    batch.admit_next(0, queue)
    batch.release([0])  # it was cancelled before its pages were computed
    batch.admit(2, [1, 2, 3])
    num_steps = 0
    while batch.admit_next(1, queue) is None:
        batch.step([2], [5])
        num_steps += 1
    assert num_steps <= 3


def test_salts_shards_and_options_apply() -> None:
    batch = make_batch(num_pages=64)
    queue = WaitingQueue(batch._manager)
    batch.admit(0, list(range(12)), traits=RequestTraits(cache_salt="a"))
    for name, salt in (("a", "a"), ("b", "b")):
        queue.add(name, list(range(20)), traits=RequestTraits(cache_salt=salt))
    queue.add("c", list(range(20)), traits=RequestTraits(cache_salt="a", look_up=False))
    assert queue.peek(3) == [Admission("a", 12), Admission("b", 0), Admission("c", 0)]
    assert batch.admit_next(1, queue) == Admission("a", 12)


def test_prefetch_loads_from_the_tier_in_order() -> None:
    batch = make_batch(num_pages=200, max_model_len=1024, host_tier=HostTier(400))
    manager = batch._manager
    queue = WaitingQueue(manager)
    batch.admit(0, list(range(33)))
    batch.release([0])
    batch.admit(0, [7] * 796)  # evicts the first prompt, which is saved
    manager.complete(batch.take_moves().number)
    batch.release([0])
    queue.add("saved", list(range(33)))
    assert queue.peek() == [Admission("saved", 32)]
    assert queue.stats().num_work_tokens == 33 - 32 + 32 // 10
    assert queue.prefetch() == 1
    assert queue.prefetch() == 0
    moves = batch.take_moves()
    assert len(moves.loads.src) == 8
    manager.complete(moves.number)
    assert queue.stats().num_work_tokens == 1
    assert batch.admit_next(0, queue) == Admission("saved", 32)


def test_prefetching_leaves_a_twentieth_of_the_pool_free() -> None:
    batch = make_batch(num_pages=200, max_model_len=1024, host_tier=HostTier(400))
    manager = batch._manager
    batch.admit(0, list(range(33)))
    batch.release([0])
    batch.admit(0, [7] * 796)
    manager.complete(batch.take_moves().number)
    batch.release([0])
    batch.admit(0, [8] * (4 * (199 - 10)))
    queue = WaitingQueue(manager)
    queue.add("saved", list(range(33)))
    assert queue.prefetch() == 0
    batch.release([0])
    assert queue.prefetch() == 1


class SlowStore:
    """A store whose pages come when the test says so, and that checks how it is asked."""

    def __init__(self) -> None:
        self.fetched: dict[str, Any] = {}
        self.ready: set[int] = set()
        self.num_forgotten = 0

    def fetch(self, request: Any) -> None:
        assert request.request_id not in self.fetched
        assert request.num_tokens == len(request.all_token_ids)
        assert request.cache_salt is None
        self.fetched[request.request_id] = request

    def is_ready(self, request: Any) -> bool:
        assert request.request_id in self.fetched
        if int(request.all_token_ids[0]) in self.ready:
            del self.fetched[request.request_id]
            return True
        return False

    def forget(self, request: Any) -> None:
        del self.fetched[request.request_id]
        self.num_forgotten += 1


def test_requests_wait_for_pages_from_a_store_and_others_go_first() -> None:
    batch = make_batch(num_pages=20, host_tier=HostTier(50))
    store = SlowStore()
    queue = WaitingQueue(batch._manager, store=store)
    for number in range(3):
        queue.add(number, [number] * 40)
    assert queue.prefetch() == 0
    assert len(store.fetched) == 3
    assert batch.admit_next(0, queue) is None
    store.ready |= {1}
    assert batch.admit_next(0, queue) == Admission(1, 0)
    store.ready |= {0}
    assert batch.admit_next(1, queue) is None  # pages are short: it is not asked again
    assert queue.remove(2)
    assert store.num_forgotten == 1
    batch.release([0])
    assert batch.admit_next(1, queue) == Admission(0, 0)
    assert not store.fetched


def test_threads_add_and_remove_while_another_admits(switch_often: None) -> None:
    batch = make_batch(num_pages=400)
    queue = WaitingQueue(batch._manager)
    gone: list[object] = []

    def add(start: int) -> None:
        for i in range(start, start + 200):
            queue.add(i, [i] * 9)
            if i % 5 == 0 and queue.remove(i - 1):
                gone.append(i - 1)

    threads = [Thread(target=add, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or len(queue):
        admission = batch.admit_next(0, queue)
        if admission is not None:
            gone.append(admission.name)
            batch.release([0])
    assert sorted(gone) == sorted(1000 * i + k for i in range(3) for k in range(200))  # type: ignore[type-var]
    queue.check()


def test_a_queue_that_is_gone_hears_nothing() -> None:
    batch = make_batch()
    for _ in range(5):
        queue = WaitingQueue(batch._manager)
        queue.add("a", list(range(30)))
        del queue
        batch.admit(0, list(range(30)))
        batch.release([0])
        batch._manager.reset_prefix_cache()
    batch.check()


def test_wrong_calls_change_nothing() -> None:
    batch, other = make_batch(), make_batch()
    queue = WaitingQueue(batch._manager)
    queue.add("a", [1, 2, 3])
    cases: list[tuple[type[Exception], Any]] = [
        (ArgumentError, lambda: queue.add("a", [1])),
        (ArgumentError, lambda: queue.add("b", [])),
        (ArgumentError, lambda: queue.add("b", [-1])),
        (ArgumentError, lambda: queue.add("b", [1] * 97)),
        (ArgumentTypeError, lambda: queue.add("b", "text")),
        (ArgumentTypeError, lambda: queue.add([], [1])),
        (ArgumentError, lambda: queue.add("b", [1], priority=2**31)),
        (ArgumentTypeError, lambda: queue.add("b", [1], priority=0.5)),
        (ArgumentTypeError, lambda: queue.add("b", [1], traits="salt")),
        (ArgumentError, lambda: queue.add("b", [1], traits=RequestTraits(dp_shard=0))),
        (ArgumentError, lambda: queue.peek(-1)),
        (ArgumentTypeError, lambda: batch.admit_next(0, None)),
        (ArgumentError, lambda: other.admit_next(0, queue)),
        (ArgumentError, lambda: WaitingQueue(batch._manager, order="fifo")),
        (ArgumentError, lambda: WaitingQueue(batch._manager, max_stretch=-1)),
        (ArgumentTypeError, lambda: WaitingQueue(batch._manager, max_stretch="1")),
        (ArgumentError, lambda: WaitingQueue(batch._manager, max_overtaken_tokens=-1)),
        (ArgumentError, lambda: WaitingQueue(batch._manager, promote_after_tokens=0)),
        (ArgumentTypeError, lambda: WaitingQueue(None)),
    ]
    for kind, call in cases:
        with pytest.raises(kind):
            call()
    assert queue.peek(5) == [Admission("a", 0)]
    assert queue.remove("b") is False
    queue.check()


def test_an_error_names_the_request_and_leaves_it_in_the_queue() -> None:
    batch = make_batch(num_pages=4)
    queue = WaitingQueue(batch._manager)
    queue.add("large", list(range(40)))
    with pytest.raises(RequestTooLargeError) as error:
        batch.admit_next(0, queue)
    assert "'large'" in error.value.__notes__[0]
    assert "large" in queue
    assert queue.remove("large")


def test_core_refuses_requests_that_do_not_wait() -> None:
    batch = make_batch()
    queue = WaitingQueue(batch._manager)
    queue.add("a", [1, 2, 3])
    line, request = queue._line, queue._requests["a"]
    with pytest.raises(ArgumentError):
        line.enter(request)
    empty = WaitingQueue(batch._manager)._line
    with pytest.raises(ArgumentError):
        empty.leave(request)
    line.leave(request)
    for call in (line.leave, line.correct, line.count_hits, line.set_misfit):
        with pytest.raises(ArgumentError):
            call(request)
    with pytest.raises(ArgumentError):
        HashedTokens([], 4, bytes(16))
    assert isinstance(line, WaitingLine)


def test_an_engine_of_the_manager_takes_requests() -> None:
    batch = make_batch()
    manager = batch._manager
    queue = WaitingQueue(manager)
    first = EngineRequest("first", list(range(20)))
    manager.allocate_slots(first, 20)
    queue.add("long", [5] * 40)
    queue.add("hits", list(range(30)))
    admission = queue.take()
    assert admission == Admission("hits", 20)
    request = EngineRequest("hits", list(range(30)))
    assert manager.get_computed_pages(request)[1] == admission.num_cached_tokens


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(seed, flush=True)
        Work(seed, make_batch()).run(150)
