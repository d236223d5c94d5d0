"""Random requests of one manager, each explained before it runs, beside the oracle of misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import hybrids
from managing import grouped
from miss_oracle import MissOracle, Prompt, make_request

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    HitReport,
    HostTier,
    MissCause,
    Retention,
    SlidingWindowSpec,
)

MAX_MODEL_LEN = 240
WINDOW = SlidingWindowSpec(hybrids.PAGE_SIZE, 1, 8, "float16", False, 14)
CALLS = ("run", "run", "run", "run", "run", "fail", "hold", "drop", "tick")


@dataclass
class World:
    """A model, its pools and what is done with it."""

    name: str
    specs: Sequence[Any]
    num_pages: Any = 40
    pools: Sequence[str] = ()
    host_pages: int = 0
    num_shards: int = 0
    length: int = 1  # prompts are so many times as long
    options: dict[str, Any] = field(default_factory=dict)


WORLDS = [
    World("full", (hybrids.FULL,)),
    World("full, computed", (hybrids.FULL,), options={"caches": "computed"}),
    World("full, adaptive", (hybrids.FULL,), options={"eviction": "adaptive"}),
    World("full, sha256", (hybrids.FULL,), options={"hash_algo": "sha256"}),
    World("full, lookahead", (hybrids.FULL,), options={"use_eagle": True, "hash_lookahead": 1}),
    World("full, shards", (hybrids.FULL,), num_pages=60, num_shards=2),
    World("full, tier", (hybrids.FULL,), num_pages=30, host_pages=40),
    World("window", (hybrids.WINDOW,)),
    World("window of 14", (WINDOW,)),
    World("chunk", (hybrids.CHUNK,)),
    World("state", (hybrids.STATE,), num_pages=20),
    World("full, wide window", (hybrids.FULL, WINDOW), num_pages=60, options={"retention": Retention(window_slack=0)}),
    World("full, window, tier", (hybrids.FULL, WINDOW), num_pages=50, host_pages=60, options={"windows": "all"}),
    World("full, rare states", (hybrids.FULL, hybrids.keep_every("auto")), num_pages=150, length=3),
    World("full, two windows", (hybrids.FULL, hybrids.WINDOW, WINDOW), num_pages=80),
    World("full, window", (hybrids.FULL, hybrids.WINDOW), num_pages=60),
    World("full, window, all kept", (hybrids.FULL, hybrids.WINDOW), num_pages=60, options={"windows": "all"}),
    World("full, chunk", (hybrids.FULL, hybrids.CHUNK), num_pages=60),
    World("full, state", (hybrids.FULL, hybrids.STATE), num_pages=60),
    World("full, state, two pools", (hybrids.FULL, hybrids.STATE), {"kv": 40, "states": 12}, ("kv", "states")),
    World(
        "full, state, two pools, adaptive",
        (hybrids.FULL, hybrids.STATE),
        {"kv": 40, "states": 12},
        ("kv", "states"),
        options={"eviction": "adaptive"},
    ),
    World("full, window, two pools", (hybrids.FULL, hybrids.WINDOW), {"kv": 40, "windows": 30}, ("kv", "windows")),
]


class Explaining:
    """Requests that are explained, and run, in a world. ``confusion`` counts right and given causes."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, Random(f"{world.name} {seed}")
        pools = world.pools or [None] * len(world.specs)
        groups = [
            CacheGroupSpec(spec) if pool is None else CacheGroupSpec(spec, pool=pool)
            for spec, pool in zip(world.specs, pools, strict=True)
        ]
        tier = {"host_tier": HostTier(world.host_pages)} if world.host_pages else {}
        options = {"hash_seed": "explaining"} | world.options
        self.manager = CacheManager(world.num_pages, groups, MAX_MODEL_LEN, **grouped(**options), **tier)
        self.manager.enable_explanations()
        self.oracle = MissOracle(self.manager, self.manager.hash_page_size, options.get("hash_lookahead", 0))
        self.manager.registry.store.set_time(self.oracle.now)
        self.documents = [[self.random.randrange(1000) for _ in range(MAX_MODEL_LEN)] for _ in range(5)]
        self.held: list[tuple[EngineRequest, Prompt]] = []
        self.numbers: list[int] = []  # moves that have not ended
        self.confusion: Counter[tuple[MissCause, MissCause]] = Counter()
        self.faults: list[str] = []
        self.num_requests = 0
        self.has_state = self.manager.registry.rules.has_state

    # Prompts.

    def draw_prompt(self) -> Prompt:
        """Return a prompt that is likely to share a prefix with another one, and its keys or not."""
        random = self.random
        document = random.choice(self.documents)
        num_shared, num_tokens = (
            random.choice([3, 10, 16, 24, 37, 60]),
            random.choice([random.randrange(1, 12), random.randrange(12, 70)]),
        )
        branch = random.randrange(2)
        length = self.world.length
        tokens = [*document[: length * num_shared], *([2000 + branch] * MAX_MODEL_LEN)][: length * num_tokens]
        is_keyed = random.random() < 0.3
        salt = random.choice([None, None, "a", "b"]) if is_keyed else None
        adapter = random.choice([None, None, 1, 2]) if is_keyed else None
        media: tuple[tuple[int, int, str], ...] = ()
        if is_keyed and random.random() < 0.4:
            start = random.choice([2, 9, 20])
            media = ((start, random.choice([1, 6]), random.choice("xyz")),)
        rare = random.random()
        is_nameless = rare < 0.02 and not media
        return Prompt(tuple(tokens), salt, adapter, media, is_nameless, asks_logprobs=rare > 0.99)

    # Calls.

    def step(self) -> None:
        """Explain a request, and do something."""
        call = self.random.choice(CALLS)
        prompt = self.draw_prompt()
        self.num_requests += 1
        request = make_request(f"request {self.num_requests}", prompt)
        shard = self.random.randrange(self.world.num_shards) if self.world.num_shards else None
        self.check(request, prompt, shard)
        if call == "tick":
            self.oracle.now += self.random.choice([0.25, 1, 30])
            self.manager.registry.store.set_time(self.oracle.now)
            if self.random.random() < 0.05:
                self.end_all()
                assert self.manager.reset_prefix_cache()
                self.oracle.observe("reset")
        elif call == "drop":
            pages = self.random.sample(range(1, self.manager.num_pages), 2)
            if len(self.manager.pools) == 1:
                self.manager.page_pool.evict_pages(pages)
                self.oracle.observe("drop")
        else:
            self.run(call, request, prompt, shard)

    def run(self, call: str, request: EngineRequest, prompt: Prompt, shard: int | None) -> None:
        """Run a request to its end, or to a failed step, or let it run on."""
        manager, oracle = self.manager, self.oracle
        sharded: dict[str, Any] = {} if shard is None else {"dp_shard_hint": shard, "data_parallel_size": self.world.num_shards}
        hits, num_hits = manager.get_computed_pages(request, **sharded)
        oracle.learn(request, prompt)
        oracle.observe("look up")
        num_tokens, num_computed = len(prompt.tokens), 0
        while num_computed < num_tokens:
            found = (num_hits, hits) if not num_computed else ()
            start = num_computed or num_hits
            end = min(num_tokens, start + self.random.choice([4, 8, 16, MAX_MODEL_LEN]))
            multiple = manager.registry.rules.hit_tokens  # states are kept where steps end
            end = end // multiple * multiple if self.has_state and start < end // multiple * multiple else end
            got = manager.allocate_slots(request, end - start, *found, **sharded)
            oracle.observe("allocate")
            self.move()
            if got is None:
                break
            num_computed = request.num_computed_tokens = end
        if call == "hold" and request.request_id in manager.registry.held and len(self.held) < 2:
            self.held.append((request, prompt))
            return
        if call == "fail" and num_computed:
            start = self.random.randrange(num_hits, num_computed + 1)
            self.end(request, start)
        else:
            self.end(request, None)
        if self.held and self.random.random() < 0.5:
            self.end(self.held.pop(0)[0], None)

    def end(self, request: EngineRequest, num_computed: int | None) -> None:
        """Free a request, some of whose tokens may not have been computed."""
        self.manager.free(request, num_computed_tokens=num_computed)
        self.oracle.observe("free", num_computed)
        self.manager.free_page_hashes(request)

    def end_all(self) -> None:
        """Free all requests, and end all moves."""
        for request, _ in self.held:
            self.end(request, None)
        self.held.clear()
        self.move()
        while self.numbers:
            self.complete(self.numbers.pop(0))

    def move(self) -> None:
        """Take the moves, and end older ones or not."""
        number = self.manager.take_moves().number
        self.oracle.observe("move")
        self.oracle.take_saves(number)
        self.numbers += [number] if number else []
        while self.numbers and (len(self.numbers) > 2 or self.random.random() < 0.6):
            self.complete(self.numbers.pop(0))

    def complete(self, number: int) -> None:
        self.manager.complete(number)
        self.oracle.end_saves(number)
        self.oracle.observe("move")

    # Checks.

    def check(self, request: EngineRequest, prompt: Prompt, shard: int | None) -> None:
        """Compare the report with the right answer."""
        sharded: dict[str, Any] = {} if shard is None else {"dp_shard_hint": shard, "data_parallel_size": self.world.num_shards}
        report = self.manager.explain(request, **sharded)
        ids = None
        if shard is not None:
            size = self.manager.num_pages // self.world.num_shards
            ids = range(max(1, shard * size), (shard + 1) * size)
        answer = self.oracle.explain(request, prompt, ids)
        self.check_tokens(request, report, sharded)
        if answer.is_strict:
            self.confusion[answer.cause, report.cause] += 1
            if answer.cause != report.cause:
                self.faults.append(f"request {self.num_requests}: right {answer}, given {report!r}, {prompt}")
            elif report.cause is MissCause.EVICTED and report.end.seconds is not None and answer.seconds is not None:
                assert abs(report.end.seconds - answer.seconds) <= 1 / 16 or self.world.host_pages, (report, answer)

    def check_tokens(self, request: EngineRequest, report: HitReport, sharded: dict[str, Any]) -> None:
        """Compare the hit with that of `probe`, and the groups with the whole."""
        if not sharded:
            probe = self.manager.probe(request)
            assert (report.num_hit_tokens, report.num_queried_tokens) == probe[:2]
            assert report.reason == probe.reason or self.world.host_pages  # a tier has the real time
        assert all(group.num_hit_tokens >= report.num_hit_tokens for group in report.groups)
        assert str(report).startswith(f"{report.num_hit_tokens:,} of {report.num_queried_tokens:,} token")
