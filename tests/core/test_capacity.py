"""What can never fit: `CacheManager.require_capacity` when a request arrives, and errors in place of refusals for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
from admissions import admission
from hybrids import manager_state
from managing import grouped
from oracle_kinds import Kind, Mamba, Sliding, kind_of
from pairs import seeds_of
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    ChunkedLocalAttentionSpec,
    EngineRequest,
    FullAttentionSpec,
    HostTier,
    MambaSpec,
    MultiGroupPageTable,
    Retention,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool._core import CacheGroups, PageRules
from pagepool.compat import easydel
from pagepool.errors import ArgumentError, RequestTooLargeError
from pagepool.group_rules import make_rules
from pagepool.replay import TraceRecord, make_requests
from pagepool.replay.models.caches import Reach
from pagepool.replay.models.pages import ModelPages, Windows
from pagepool.replay.plans.plan import Planner
from pagepool.replay.simulation.scheduler import Scheduler

PAGE_SIZES = 1, 2, 3, 4, 4, 4, 6, 8


def full(page_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(page_size, 1, 8, "float16", use_mla=False)


def window(size: int, page_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(page_size, 1, 8, "float16", use_mla=False, sliding_window=size)


def chunk(size: int, page_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(page_size, 1, 8, "float16", use_mla=False, attention_chunk_size=size)


def state(interval: int | None = None) -> MambaSpec:
    return MambaSpec(1, ((1,),), "float16", checkpoint_interval=interval)


def draw_specs(rng: Random, kinds: str = "fwwcs", least: int = 1) -> list[Any]:
    """Draw a mix of groups, with windows of at least `least` tokens."""
    makers: dict[str, Callable[[], Any]] = {
        "f": lambda: full(rng.choice(PAGE_SIZES)),
        "w": lambda: window(rng.randint(least, 20), rng.choice(PAGE_SIZES)),
        "c": lambda: chunk(rng.randint(1, 20), rng.choice(PAGE_SIZES)),
        "s": lambda: state(rng.choice((None, 24, 48))),
    }
    return [makers[rng.choice(kinds)]() for _ in range(rng.randint(1, 4))]


def keeps_states(specs: list[Any]) -> bool:
    """Whether checkpoints of states are kept. Then pages of windows stay at the ends alone."""
    intervals = [spec.checkpoint_interval for spec in specs if isinstance(spec, MambaSpec)]
    return bool(intervals) and None not in intervals


def make_manager(*specs: Any, num_pages: int, max_model_len: int = 1000, **options: Any) -> CacheManager:
    return CacheManager(num_pages, [CacheGroupSpec(spec) for spec in specs], max_model_len, **grouped(**options))


def make_batch(manager: CacheManager, num_rows: int = 3, **options: Any) -> RunningBatch:
    sizes = [group.kv_cache_spec.page_size for group in manager.kv_cache_groups]
    return RunningBatch(manager, MultiGroupPageTable(num_rows, manager.max_model_len, 0, sizes), **options)


# The rule.


def count_held(kinds: list[Kind], num_computed: int, num_slots: int, *, is_cached: bool) -> int:
    """Count the pages that a request holds with slots for so many tokens, after those that were computed."""
    num_pages = 0
    for kind in kinds:
        num_cached = num_computed // kind.page_size if is_cached else 0
        first = 0 if isinstance(kind, Mamba) else kind.first_useful_page(num_computed, num_cached)
        if isinstance(kind, Sliding) and num_cached:  # the last page of a hit is taken even if the window is one token
            first = min(first, (num_computed - 1) // kind.page_size)
        num_pages += kind.num_required_pages(num_slots) - first
    return num_pages


def count_peak(kinds: list[Kind], num_tokens: int, most: int, num_ahead: int, max_num_slots: int, *, is_cached: bool) -> int:
    """Count the most pages that a request holds, step by step."""
    peak = 0
    for num_computed in range(num_tokens):
        num_slots = min(min(num_computed + most, num_tokens) + num_ahead, max_num_slots)
        peak = max(peak, count_held(kinds, num_computed, num_slots, is_cached=is_cached))
    return peak


def test_the_peak_is_that_of_the_worst_step() -> None:
    rng = Random(5)
    for _ in range(3000):
        specs, is_cached = draw_specs(rng), rng.random() < 0.7
        retention = Retention(windows="ends" if keeps_states(specs) else "all")
        rules = make_rules([CacheGroupSpec(spec) for spec in specs], False, is_cached, retention)
        num_tokens, most, num_ahead = rng.randint(0, 80), rng.randint(1, 40), rng.choice((0, 0, 1, 5))
        max_num_slots = num_tokens + rng.choice((0, 1, 3, 50))
        expected = count_peak([*map(kind_of, specs)], num_tokens, most, num_ahead, max_num_slots, is_cached=is_cached)
        found = rules.groups.count_peak_pages(num_tokens, most, num_ahead, max_num_slots)
        assert found == expected, (specs, is_cached, num_tokens, most, num_ahead, max_num_slots)


def test_a_period_that_is_too_long_is_bounded() -> None:
    """Where the pages of groups meet again only after millions of tokens, the answer may be three pages a group too large."""
    sizes, windows = (1021, 1019, 1013), (0, 3000, 2000)
    groups = CacheGroups([(PageRules(size, each), 0, 1) for size, each in zip(sizes, windows, strict=True)])
    num_tokens, most = 2_000_000, 5000
    found = groups.count_peak_pages(num_tokens, most)
    worst = 0
    for num_computed in range(num_tokens - most - 40_000, num_tokens):  # full attention holds fewer pages before
        num_slots = min(num_computed + most, num_tokens)
        firsts = (max(0, num_computed - each + 1) // size if each else 0 for size, each in zip(sizes, windows, strict=True))
        worst = max(worst, sum(-(-num_slots // size) - first for size, first in zip(sizes, firsts, strict=True)))
    assert worst <= found <= worst + 3 * len(sizes)


def test_steps_count_when_a_request_arrives() -> None:
    """Of 16 pages 50 tokens take 13 of full attention; the window takes 3 in the smallest steps, and more in larger ones."""
    manager = make_manager(full(), window(9), num_pages=17, max_model_len=64)
    manager.require_capacity(50, 1)
    for most in (2, 40, 50, 51, None):
        with pytest.raises(RequestTooLargeError):
            manager.require_capacity(50, most)
    batch = make_batch(manager)
    with pytest.raises(RequestTooLargeError, match="row 0 needs 20 pages at once, the pool has 16: no waiting helps"):
        batch.admit(0, list(range(40)))
    assert make_manager(full(), window(9), num_pages=17, max_num_batched_tokens=1).require_capacity(50) is None
    gemma = [full(16), *[window(1024, 16)] * 6]
    for num_pages, passes in ((8583, False), (11_648, False), (11_655, True)):
        manager = make_manager(*gemma, num_pages=num_pages, max_model_len=131_072, max_num_batched_tokens=8192)
        assert refuses(lambda manager=manager: manager.require_capacity(131_072)) != passes
    manager.require_capacity(131_072, 1)


def refuses(call: Callable[[], object]) -> bool:
    """Whether a call raises RequestTooLargeError."""
    try:
        call()
    except RequestTooLargeError:
        return True
    return False


def test_lookahead_reserved_pages_and_shards_count() -> None:
    manager = make_manager(full(), num_pages=20, max_model_len=76)
    manager.require_capacity(76)
    manager.require_capacity(72, num_reserved_pages=1)
    manager.require_capacity(72, num_lookahead_tokens=100)  # slots end at max_model_len
    manager.require_capacity(76, num_lookahead_tokens=10**30)
    for num_tokens in (77, 10**30):
        with pytest.raises(RequestTooLargeError, match=f"^num_tokens: got {num_tokens}, allowed: max_model_len, 76$"):
            manager.require_capacity(num_tokens)
    message = "a request of 72 tokens, with slots for 4 more, needs 19 pages, the pool has 19, and 1 of the pool's 19 stay free"
    with pytest.raises(RequestTooLargeError) as caught:
        manager.require_capacity(72, num_lookahead_tokens=4, num_reserved_pages=1)
    assert str(caught.value) == message
    manager.require_capacity(40, data_parallel_size=2, dp_shard_hint=1)
    for hint in (0, None, 2):
        with pytest.raises(RequestTooLargeError, match="a request of 40 tokens needs 10 pages, the shard has 9"):
            manager.require_capacity(40, data_parallel_size=2, dp_shard_hint=hint)
    manager.require_capacity(76, data_parallel_size=3)  # 20 pages are not divided
    for wrong in (
        {"max_num_new_tokens": 0},
        {"num_lookahead_tokens": -1},
        {"num_reserved_pages": -1},
        {"data_parallel_size": 0},
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            manager.require_capacity(4, **wrong)
    with pytest.raises(ArgumentError, match="max_num_batched_tokens: got 0, allowed: at least 1"):
        make_manager(full(), num_pages=4, max_num_batched_tokens=0)


# What passes runs to its end, in any steps.


class Work(NamedTuple):
    """A request of `num_tokens` tokens, how it is computed, and what is in its way."""

    num_tokens: int
    most: int
    num_ahead: int
    num_reserved: int
    num_leased: int
    has_shards: bool

    def limits(self) -> dict[str, Any]:
        shards = {"data_parallel_size": 2, "dp_shard_hint": 0} if self.has_shards else {}
        return {"num_lookahead_tokens": self.num_ahead, "num_reserved_pages": self.num_reserved + self.num_leased} | shards


def draw_work(rng: Random) -> Work:
    num_reserved = rng.choice((0, 0, 3))
    has_shards = num_reserved == 0 and rng.random() < 0.3
    num_leased = 0 if has_shards else rng.choice((0, 0, 2))
    return Work(rng.randint(1, 90), rng.randint(1, 40), rng.choice((0, 0, 1, 5)), num_reserved, num_leased, has_shards)


@dataclass
class Pool:
    """A manager with a pool that is just large enough, or a page too small."""

    manager: CacheManager
    work: Work
    side: Any  # the manager, or the batch of its row, whose moves are taken
    num_steps_in_flight: int = 0
    looks_up: bool = True
    in_flight: list[int] = field(default_factory=list)

    def end_step(self) -> None:
        """Do what an engine does in a step. Transfers end some steps later."""
        number = self.side.take_moves().number
        self.in_flight += [number] if number else []
        while len(self.in_flight) > self.num_steps_in_flight:
            self.manager.complete(self.in_flight.pop(0))

    def end_transfers(self) -> bool:
        """End all transfers, for which a refused request waits. Return whether there were any."""
        number = self.side.take_moves().number
        numbers = self.in_flight + ([number] if number else [])
        for each in numbers:
            self.manager.complete(each)
        self.in_flight = []
        return bool(numbers)


def make_pool(rng: Random, specs: list[Any], work: Work, num_missing: int, *, is_cached: bool, use_eagle: bool) -> Pool:
    max_model_len = work.num_tokens + rng.choice((0, 2, 40))
    windows = "ends" if keeps_states(specs) else "all" if num_missing else rng.choice(("ends", "all"))
    groups = [CacheGroupSpec(spec) for spec in specs]
    rules = make_rules(groups, use_eagle, is_cached, Retention(windows=windows))
    num_pages = rules.groups.count_peak_pages(work.num_tokens, work.most, work.num_ahead, max_model_len)
    num_pages += 1 + work.num_reserved + work.num_leased - num_missing
    num_pages *= 1 + work.has_shards
    has_tier = is_cached and not num_missing and not work.num_leased and rng.random() < 0.4
    options = {"host_tier": HostTier(rng.choice((4, 40, 200)), policy=rng.choice(("write_back", "write_through")))}
    manager = make_manager(
        *specs, num_pages=max(2, num_pages), max_model_len=max_model_len, enable_caching=is_cached, use_eagle=use_eagle,
        windows=windows, **options if has_tier else {},
    )  # fmt: skip
    return Pool(manager, work, manager, rng.choice((0, 0, 1, 3)))


def run_request(pool: Pool, steps: Callable[[int], int], token_ids: list[int], num_known: int) -> bool:
    """Whether a request that arrives with its first tokens runs to its end, alone. `steps` gets the number of tokens that are
    computed, and returns that of the next step.
    """
    manager, work, request = pool.manager, pool.work, EngineRequest("a", token_ids[:num_known])
    limits = work.limits()
    placement = {key: limits[key] for key in ("data_parallel_size", "dp_shard_hint") if key in limits}
    options = {"num_lookahead_tokens": work.num_ahead, "num_reserved_pages": work.num_reserved, **placement}
    while request.num_computed_tokens < len(token_ids):
        hits, num_hits = None, 0
        if pool.looks_up and not any(manager.get_page_ids("a")):
            hits, num_hits = manager.get_computed_pages(request, num_reserved_pages=work.num_reserved, **placement)
        num_computed = request.num_computed_tokens + num_hits
        if num_computed == request.num_tokens:
            request.append_output_token_ids(token_ids[num_computed])
        num_new = min(steps(num_computed), request.num_tokens - num_computed)
        if manager.allocate_slots(request, num_new, num_hits, hits, **options) is not None:
            request.num_computed_tokens = num_computed + num_new
            pool.end_step()
        elif not pool.end_transfers():
            return False
    manager.free(request)
    manager.free_page_hashes(request)
    return True


def run_row(pool: Pool, steps: Callable[[int], int], token_ids: list[int], num_known: int) -> bool:
    """The same in a row of a batch."""
    manager, work = pool.manager, pool.work
    shards = 2 if work.has_shards else None
    batch = pool.side = make_batch(manager, data_parallel_size=shards)
    options = {"num_reserved_pages": work.num_reserved, "look_up": pool.looks_up}
    options |= {"dp_shard": 0} if work.has_shards else {}
    while batch.admit(0, token_ids[:num_known], max_num_new_tokens=steps(0), **admission(**options)) is None:
        if not pool.end_transfers():
            return False
    pool.end_step()
    while batch.num_computed_tokens[0] < len(token_ids):
        num_computed = int(batch.num_computed_tokens[0])
        if num_computed == batch.num_tokens[0]:
            batch.append([0], [token_ids[num_computed]])
        num_new = min(steps(num_computed), int(batch.num_tokens[0]) - num_computed)
        if batch.plan([0], num_new, work.num_ahead).num_grown:
            pool.end_step()
        elif not pool.end_transfers():
            return False
    batch.check()
    batch.release([0])
    return True


@pytest.mark.parametrize("run", [run_request, run_row])
def test_what_passes_runs_to_its_end_in_any_steps(run: Callable[..., bool]) -> None:
    for seed, num_calls in seeds_of("capacity", 40):
        rng = Random(seed)
        for _ in range(num_calls):
            use_eagle = rng.random() < 0.2
            specs, work = draw_specs(rng, "ffwws" if use_eagle else "fwwcs"), draw_work(rng)
            is_cached = rng.random() < 0.8
            pool = make_pool(rng, specs, work, 0, is_cached=is_cached, use_eagle=use_eagle)
            pool.manager.require_capacity(work.num_tokens, work.most, **work.limits())
            token_ids = [rng.randint(0, 9) for _ in range(work.num_tokens)]
            leased: list[int] = []
            for turn in range(4):

                def steps(_: int, rng: Random = rng, most: int = work.most) -> int:
                    return most if rng.random() < 0.5 else rng.randint(1, most)

                num_known = rng.randint(1, len(token_ids))
                assert run(pool, steps, token_ids, num_known), (seed, specs, work, is_cached, use_eagle, turn)
                if not leased and is_cached:
                    entries = pool.manager.page_pool.free_page_ids_in_order().tolist()
                    leased = [page for page in entries if pool.manager.page_pool.pages[page].page_hash is not None]
                    leased = leased[: work.num_leased]
                    pool.manager.lease(leased)


def find_worst_step(kinds: list[Kind], work: Work, max_model_len: int, *, is_cached: bool) -> int:
    """Return the tokens computed before the step in which a request holds the most pages."""
    peaks = {}
    for num_computed in range(work.num_tokens):
        num_slots = min(min(num_computed + work.most, work.num_tokens) + work.num_ahead, max_model_len)
        peaks[num_computed] = count_held(kinds, num_computed, num_slots, is_cached=is_cached)
    return max(peaks, key=lambda num_computed: peaks[num_computed])


@pytest.mark.parametrize("run", [run_request, run_row])
def test_what_is_refused_cannot_run_in_some_steps(run: Callable[..., bool]) -> None:
    """With a page less, a step of the size that was asked for is refused, even alone."""
    for seed, num_calls in seeds_of("capacity refused", 60):
        rng = Random(seed)
        for _ in range(num_calls):
            specs, is_cached = draw_specs(rng, least=2), rng.random() < 0.7  # without a look-up a window of one has no page
            work = draw_work(rng)._replace(num_reserved=0, num_leased=0)
            work = work._replace(num_ahead=0) if run is run_row else work  # an admission has no lookahead
            pool = make_pool(rng, specs, work, 1, is_cached=is_cached, use_eagle=False)
            pool.looks_up = False  # chunks hit where a chunk begins, without any page
            if pool.manager.num_pages == 2:
                continue
            with pytest.raises(RequestTooLargeError):
                pool.manager.require_capacity(work.num_tokens, work.most, **work.limits())
            stop = find_worst_step([*map(kind_of, specs)], work, pool.manager.max_model_len, is_cached=is_cached)

            def steps(num_computed: int, work: Work = work, stop: int = stop) -> int:
                return min(stop - num_computed, work.most) if num_computed < stop else work.most

            with pytest.raises(RequestTooLargeError):
                assert run(pool, steps, list(range(work.num_tokens)), work.num_tokens), (seed, specs, work, is_cached)


# What can never fit raises, and waits no longer.


def allocate(manager: CacheManager, request: EngineRequest, num_new_tokens: int, **options: Any) -> Any:
    """Look a request up if it is new, and allocate slots behind its hits, which are counted."""
    hits, num_hits = (None, 0) if any(manager.get_page_ids(request.request_id)) else manager.get_computed_pages(request)
    pages = manager.allocate_slots(request, num_new_tokens, num_hits, hits, **options)
    request.num_computed_tokens += 0 if pages is None else num_hits + num_new_tokens
    return pages


def test_a_request_that_can_never_fit_raises() -> None:
    """Of five pages request a holds two, b one: three more for a may become free, four never. Skipped pages do not count."""
    manager = make_manager(full(), num_pages=6)
    first, second = EngineRequest("a", list(range(40))), EngineRequest("b", list(range(50, 90)))
    allocate(manager, first, 8)
    allocate(manager, second, 4)
    message = "request 'a' needs 6 pages at once, the pool has 5: no waiting helps, fewer tokens a step may"
    with refused(partial(manager_state, manager), RequestTooLargeError, message):
        manager.allocate_slots(first, 13)
    with refused(partial(manager_state, manager), RequestTooLargeError, "request 'c' needs 10 pages"):
        allocate(manager, EngineRequest("c", list(range(100, 140))), 40)
    assert manager.get_page_ids("c") == ([],)
    assert manager.allocate_slots(first, 12) is None
    assert manager.allocate_slots(first, 4, num_lookahead_tokens=8, num_reserved_pages=4) is None, "it may reserve fewer next"
    with pytest.raises(RequestTooLargeError):
        manager.allocate_slots(first, 4, num_lookahead_tokens=9)
    manager.free(second)
    assert manager.allocate_slots(first, 12) is not None
    manager = make_manager(window(4), num_pages=6)
    first = EngineRequest("a", list(range(40)))
    allocate(manager, first, 12)
    allocate(manager, EngineRequest("b", list(range(50, 90))), 4)
    with refused(partial(manager_state, manager), RequestTooLargeError, "request 'a' needs 6 pages"):
        manager.allocate_slots(first, 20)
    assert manager.get_page_ids("a") == ([1, 2, 3],), "nothing was given back"
    assert manager.allocate_slots(first, 16) is None
    manager.check()


def state_of(batch: RunningBatch) -> tuple[Any, ...]:
    counts = batch.num_tokens.tolist(), batch.num_computed_tokens.tolist(), batch.is_admitted.tolist()
    return counts, [batch.get_page_ids(row) for row in range(3)], manager_state(batch._manager)


def test_a_row_that_can_never_fit_raises() -> None:
    manager = make_manager(full(), num_pages=6)
    batch = make_batch(manager)
    assert batch.admit(0, list(range(40)), max_num_new_tokens=8) == 0
    assert batch.admit(1, list(range(50, 90)), max_num_new_tokens=4) == 0
    before = state_of(batch)
    for call, message in (
        (lambda: batch.plan([1, 0], [4, 13]), r"row 0 \(at 1\) needs 6 pages at once, the pool has 5"),
        (lambda: batch.plan([0], 1, 12), r"row 0 \(at 0\) needs 6 pages"),
        (lambda: batch.admit(2, list(range(30))), "row 2 needs 8 pages at once, the pool has 5: no waiting helps"),
        (lambda: batch.admit(2, list(range(30)), num_external_tokens=25), "row 2 needs 8 pages at once"),
    ):
        with pytest.raises(RequestTooLargeError, match=message):
            call()
        assert state_of(batch) == before
    assert batch.plan([1, 0], [4, 12]).num_grown == 1
    batch.release([1])
    assert batch.plan([0], 12).num_grown == 1
    token_ids = list(range(100, 140))
    for most, is_too_large in ((20, False), (4, False), (20, False), (21, True), (20, False)):
        assert refuses(lambda most=most: batch.admit(1, token_ids, max_num_new_tokens=most)) == is_too_large
        assert not batch.is_admitted[1]
    batch.release([0])
    batch.check()
    manager = make_manager(full(), num_pages=6)
    batch = make_batch(manager)
    batch.admit(0, list(range(20)))
    with pytest.raises(RequestTooLargeError, match=r"row 0 \(at 0\) needs 6 pages"):
        batch.step([0], [7])
    assert (batch.num_tokens[0], batch.num_computed_tokens[0]) == (20, 20)


def test_the_drop_in_returns_none_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    """As EasyDeL's own manager does, for which the engine preempts: pages that a window left have gone back then."""
    manager = easydel.CacheManager(6, [CacheGroupSpec(full())], 256)
    message = "a request needs 10 pages at once, the pool has 5: no waiting helps, see CacheManager.require_capacity"
    request = EngineRequest("a", list(range(40)))
    with caplog.at_level(logging.WARNING, "pagepool"):
        assert manager.allocate_slots(request, 40) is None
        assert caplog.messages == [message]
        assert allocate(manager, request, 20) is not None
        manager.free(request)
        request.num_computed_tokens = 0
        for _ in range(2):
            hits, num_hits = manager.get_computed_pages(request)
            assert manager.allocate_slots(request, 20, num_hits, hits) is None
    assert caplog.messages == [message] * 3
    manager = easydel.CacheManager(6, [CacheGroupSpec(window(4))], 256)
    request = EngineRequest("a", list(range(40)))
    allocate(manager, request, 12)
    assert manager.allocate_slots(request, 20) is None
    assert manager.get_page_ids("a") == ([0, 0, 3],)


# Commands.


def make_records(num_tokens: int) -> list[TraceRecord]:
    return [TraceRecord(i, num_tokens - 40, 41, tuple(range(i, i + (num_tokens - 40 + 511) // 512))) for i in range(3)]


@pytest.mark.parametrize("step_tokens", [256, 1000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_smallest_pool_of_a_plan_runs_the_trace(is_chunked: bool, step_tokens: int) -> None:
    """A smaller one skips it, by the same rule."""
    windows = (Windows(Reach(300, is_chunked=is_chunked), 16, 3), Windows(Reach(70), 8, 1))
    model = ModelPages(16, windows=windows, num_state_groups=1, step_tokens=step_tokens)
    records = make_records(1500)
    smallest = Planner(records, model.hit_size).find_smallest(model)
    for num_pages, num_run in ((smallest, 3), (smallest - 1, 0)):
        requests = make_requests(records)
        max_model_len = max(request.num_final_tokens for request in requests)
        manager = CacheManager(num_pages, model.make_groups(model.hit_size), max_model_len)
        scheduler = Scheduler(manager, requests, max_num_batched_tokens=step_tokens)
        assert scheduler.run().requests == num_run
        assert len(scheduler.skipped) == 3 - num_run
    assert f"in steps of up to {step_tokens:,} needs {smallest - 1:,} pages" in scheduler.skipped[0][1]


def test_a_refusal_without_the_tokens_of_a_step_says_where_they_are_named() -> None:
    """Of a model whose windows keep all that a step computes."""
    window = SlidingWindowSpec(4, num_kv_heads=1, head_size=8, dtype="float16", use_mla=False, sliding_window=9)
    manager = CacheManager(17, [CacheGroupSpec(window)], 1000)
    with pytest.raises(RequestTooLargeError, match="; in steps of fewer tokens it needs less: name max_num_new_tokens"):
        manager.require_capacity(1000)
    with pytest.raises(RequestTooLargeError, match=r"the pool has 16$"):
        manager.require_capacity(1000, max_num_new_tokens=900)
    manager.require_capacity(1000, max_num_new_tokens=32)
