"""How long a first token takes with a store behind the host tier: ``python -m bench.studies.loading``.

Requests come at their times to a modelled engine, which computes one prompt after another, in steps of 2,048 tokens. Behind its
pool are a host tier and the real `StoreTier`, with a modelled store: an answer comes after 2 ms, and all loads share its
bandwidth. A token takes 128 KiB. Time is that of the model. The figures are the mean milliseconds from the arrival of a request
until its prompt is computed. A column is what is loaded from the store:

``never``
    Nothing: there is no store.
``always``
    All that it has; each request waits until its pages are there.
``rule``
    What `StoreTier` chooses by the rates that it measured.

A line is a trace, the bandwidth of the store, the tokens that the engine computes in a second, and the load: the part of the
time for which the engine would compute without a store. Arguments are words, as for the other studies. ``--results FILE`` puts
the figures into a file, and prints all that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import count, product
from math import inf
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.studies.command import Chosen, make_parser
from bench.studies.hits import TO_FIRST_TOKEN, Table, merge, show
from bench.studies.windows import TRACE
from bench.workload import SEED, make_group
from pagepool import CacheManager, EngineRequest, HostTier, PageHashing, specs
from pagepool.replay import SimulatedRequest, generate_workload, make_requests, read_trace
from pagepool.stores import Done, StoreTier, loads, pending, saves, tier
from pagepool.stores.frames import HEADER_BYTES

TOKEN_BYTES = 128 << 10
PAGE_TOKENS = 64
ROW_BYTES = 8
OBJECT_BYTES = HEADER_BYTES + ROW_BYTES
SCALE = OBJECT_BYTES / (PAGE_TOKENS * TOKEN_BYTES)
"""Bytes that are moved here for each byte of the model."""
MAX_QUEUED_BYTES = 256 << 20
ANSWER_SECONDS = 0.002
STEP_TOKENS = 2048
TICK_SECONDS = 0.001
"""Between two questions of an engine that has nothing to compute."""
NUM_ASKED = 16
"""Requests at the head of the queue that are asked whether they are ready."""

COLUMNS = ("never", "always", "rule")
BANDWIDTHS = (0.2e9, 2e9, 20e9)
RATES = (5_000, 50_000)
USES = (0.3, 0.9)


class Clock:
    """The time of the model."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def standing(clock: Clock) -> Iterator[None]:
    """Let the store's tier see the time of the model, and let a job have the bytes of the model."""
    modules: tuple[Any, ...] = (loads, pending, saves, tier)
    before = [module.time for module in modules]
    size = loads.MAX_BYTES_PER_JOB
    for module in modules:
        module.time = SimpleNamespace(monotonic=clock.monotonic)
    loads.MAX_BYTES_PER_JOB = max(1, int(size * SCALE))
    yield
    loads.MAX_BYTES_PER_JOB = size
    for module, real in zip(modules, before, strict=True):
        module.time = real


class ModelledStore:
    """Objects in memory. Loads come one after another, at the store's bandwidth; look-ups and saves take no bandwidth."""

    def __init__(self, clock: Clock, bandwidth: float) -> None:
        self._clock, self._bandwidth = clock, bandwidth * SCALE
        self._objects: dict[bytes, bytes] = {}
        self._numbers = count(1)
        self._answers: list[tuple[float, int, Done]] = []
        self._is_free_at = 0.0

    def lookup(self, keys: Sequence[bytes]) -> int:
        return self._answer(self._clock.now, [key in self._objects for key in keys])

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        self._is_free_at = max(self._is_free_at, self._clock.now) + sum(map(len, rows)) / self._bandwidth
        for key, row in zip(keys, rows, strict=True):
            row[:] = self._objects[key]
        return self._answer(self._is_free_at, [True] * len(keys))

    def save(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> int:
        self._objects.update(zip(keys, map(bytes, rows), strict=True))
        return self._answer(self._clock.now, [True] * len(keys))

    def poll(self) -> list[Done]:
        answers = []
        while self._answers and self._answers[0][0] <= self._clock.now:
            answers.append(heappop(self._answers)[2])
        return answers

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self, *, drain_seconds: float) -> None:
        self._answers.clear()

    def _answer(self, seconds: float, flags: list[bool]) -> int:
        job = next(self._numbers)
        heappush(self._answers, (seconds + ANSWER_SECONDS, job, Done(job, bytes(flags), None)))
        return job


@dataclass(frozen=True)
class Trace:
    """Requests, and the times of their arrivals, from 0 to 1. Pool and tier have room for some of the largest request."""

    requests: Sequence[SimulatedRequest]
    times: Sequence[float]
    num_computed: list[int] = field(default_factory=list)

    @property
    def max_num_pages(self) -> int:
        return max(request.num_prompt_tokens for request in self.requests) // PAGE_TOKENS + 2


@cache
def read_conversations(num_requests: int = 1500) -> Trace:
    """Read the first requests of the recorded conversations."""
    records = read_trace(str(TRACE))[:num_requests]
    times = np.array([record.timestamp for record in records], dtype=float)
    return Trace(make_requests(records), (times / times[-1]).tolist())


@cache
def generate(num_requests: int = 1500) -> Trace:
    """Generate conversations, which come as a Poisson process."""
    requests = list(generate_workload("conversations", num_requests, SEED))
    times = np.random.default_rng(SEED).exponential(size=num_requests).cumsum()
    return Trace(requests, (times / times[-1]).tolist())


@dataclass
class Waiting:
    """A request in the engine's queue."""

    request: EngineRequest
    arrived_at: float


class Engine:
    """Computes prompts one after another in their order, but a request whose pages are on their way lets others pass."""

    def __init__(self, trace: Trace, bandwidth: float | None, rate: float) -> None:
        self._rate, self.clock = rate, Clock()
        size = trace.max_num_pages
        groups = [make_group(specs, PAGE_TOKENS)]
        self.manager = CacheManager(
            2 * size, groups, size * PAGE_TOKENS, host_tier=HostTier(6 * size), hashing=PageHashing(hash_seed=1)
        )
        self.stored: StoreTier | None = None
        if bandwidth is not None:
            rows = [np.zeros((6 * size, ROW_BYTES), np.uint8)]
            store = ModelledStore(self.clock, bandwidth)
            self.stored = StoreTier(self.manager, store, rows, "bench", max_queued_bytes=int(MAX_QUEUED_BYTES * SCALE))
        self._queue: list[Waiting] = []
        self.num_computed = 0
        self.seconds: list[float] = []

    def always_load(self) -> None:
        """Load all that the store has, and wait for it."""

        assert self.stored is not None
        self.stored._loads._pays = lambda _: True  # type: ignore[method-assign]
        self.stored._loads.find_patience = lambda *_: inf  # type: ignore[method-assign]

    def run(self, arrivals: Sequence[tuple[float, SimulatedRequest]]) -> list[float]:
        """Run all requests. Return the seconds until each is computed, in the order in which they end."""
        self._arrivals = [(self.clock.now + time, request) for time, request in arrivals][::-1]
        while self._arrivals or self._queue:
            self._take_arrivals()
            ready = next((each for each in self._queue[:NUM_ASKED] if self._is_ready(each.request)), None)
            if ready is not None:
                self._queue.remove(ready)
                self._compute(ready)
            elif self._queue:
                self._sleep(TICK_SECONDS)
            else:
                self.clock.now = self._arrivals[-1][0]
        return self.seconds

    def _take_arrivals(self) -> None:
        """Queue what has arrived."""
        while self._arrivals and self._arrivals[-1][0] <= self.clock.now:
            arrived_at, request = self._arrivals.pop()
            queued = EngineRequest(request.request_id, request.make_token_ids()[: request.num_prompt_tokens].tolist())
            if self.stored:
                self.stored.fetch(queued)
            self._queue.append(Waiting(queued, arrived_at))

    def _is_ready(self, request: EngineRequest) -> bool:
        return self.stored is None or self.stored.is_ready(request)

    def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.stored:
            self.stored.poll()

    def _compute(self, waiting: Waiting) -> None:
        """Compute the prompt of a request, and cache it."""
        request, manager = waiting.request, self.manager
        pages, num_hit_tokens = manager.get_computed_pages(request)
        self.num_computed += request.num_tokens - num_hit_tokens
        for start in range(num_hit_tokens, request.num_tokens, STEP_TOKENS):
            num_tokens = min(STEP_TOKENS, request.num_tokens - start)
            hits = (num_hit_tokens, pages) if start == num_hit_tokens else ()
            assert manager.allocate_slots(request, num_tokens, *hits) is not None
            self._transfer()
            self._sleep(num_tokens / self._rate)
            if self.stored:
                self.stored.record_step(num_tokens, num_tokens / self._rate)
            self._take_arrivals()
            request.num_computed_tokens = start + num_tokens
        self.seconds.append(self.clock.now - waiting.arrived_at)
        manager.free(request)
        manager.free_page_hashes(request)
        self._transfer()

    def _transfer(self) -> None:
        number = self.manager.take_moves().number
        if number:
            self.manager.complete(number)


def measure(trace: Trace, column: str, bandwidth: float, rate: float, use: float) -> list[float]:
    """Return the seconds of each request, where an engine without a store would compute for a part `use` of the time."""
    if not trace.num_computed:  # without arrivals while it computes
        engine = Engine(trace, None, 1.0)
        engine.run([(0.0, request) for request in trace.requests])
        trace.num_computed.append(engine.num_computed)
    seconds = trace.num_computed[0] / rate / use
    engine = Engine(trace, None if column == "never" else bandwidth, rate)
    if column == "always":
        engine.always_load()
    with standing(engine.clock):
        return engine.run([(seconds * time, request) for time, request in zip(trace.times, trace.requests, strict=True)])


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    name: str
    make_trace: Callable[[], Trace]
    bandwidth: float
    rate: int
    use: float

    def __str__(self) -> str:
        return f"{self.name}, {self.bandwidth / 1e9:g} GB/s, {self.rate:,} tokens/s, load {self.use:.0%}"


def list_lines() -> Iterator[Line]:
    traces: list[tuple[str, Callable[[], Trace]]] = [("generated", generate)]
    if TRACE.exists():
        traces.append(("conversation", read_conversations))
    for (name, make_trace), use, rate, bandwidth in product(traces, USES, RATES, BANDWIDTHS):
        yield Line(name, make_trace, bandwidth, rate, use)


def main(arguments: Sequence[str]) -> None:
    options = make_parser("loading").parse_intermixed_args(arguments)
    chosen = Chosen(options.words)
    table: dict[str, dict[str, float]] = {}
    for line in filter(lambda line: chosen.has_line(str(line)), list_lines()):
        for column in filter(chosen.has_column, COLUMNS):
            start = perf_counter()
            seconds = measure(line.make_trace(), column, line.bandwidth, line.rate, line.use)
            mean = 1000 * float(np.mean(seconds))
            table.setdefault(str(line), {})[column] = round(mean, 1)
            print(f"{line}, {column}: {mean:.1f} ({perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    whole: Table = merge(options.results, "loading", table) if options.results else table
    print(show(TO_FIRST_TOKEN, whole))


if __name__ == "__main__":
    main(sys.argv[1:])
