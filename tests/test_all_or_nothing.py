"""Every error of an allocation leaves the state unchanged: none is raised after pages were taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batch_model import package_pool_state

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    FullAttentionSpec,
    MultiGroupPageTable,
    PageHash,
    PageHashWithGroupId,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool.errors import PagePoolError

PAGE_SIZE, LENGTH = 4, 32
SPECS = (
    FullAttentionSpec(PAGE_SIZE, 1, 8, "float16", False),
    SlidingWindowSpec(PAGE_SIZE, 1, 8, "float16", False, 9),
)
PROMPT = list(range(10, 24))  # three full pages and a half


class World:
    """A request in the middle of its prompt, a row the same, a waiting request with hits, all on one pool."""

    def __init__(self, hash_algo: Any = "siphash128") -> None:
        self.manager = CacheManager(24, [CacheGroupSpec(spec) for spec in SPECS], LENGTH, hash_algo=hash_algo, hash_seed="x")
        self.running = EngineRequest("running", PROMPT)
        self.manager.allocate_slots(self.running, 6)
        self.running.num_computed_tokens = 6
        self.waiting = EngineRequest("waiting", [*PROMPT[:4], *range(50, 60)])
        self.hits, self.num_hit_tokens = self.manager.get_computed_pages(self.waiting)
        assert self.num_hit_tokens == 4
        self.batch: Any = None
        if hash_algo == "siphash128":
            self.batch = RunningBatch(self.manager, MultiGroupPageTable(2, LENGTH, 64, [PAGE_SIZE] * 2))
            self.batch.admit(0, [token_id + 100 for token_id in PROMPT], num_tokens=6)

    def allocate(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.running, *args, **options)

    def start(self, *args: Any, **options: Any) -> Any:
        return self.manager.allocate_slots(self.waiting, 5, self.num_hit_tokens, self.hits, *args, **options)

    def page_of(self, request_id: str, place: int) -> Any:
        return self.manager.page_pool.pages[self.manager.get_page_ids(request_id)[0][place]]

    def state(self) -> list[Any]:
        held = [self.manager.get_page_ids(request_id) for request_id in ("running", "waiting")]
        thresholds = [
            (pages.num_room_tokens, pages.num_cached_hashes, [pages.needs_nothing(n, n, n) for n in range(64)])
            for pages in self.manager.coordinator.requests.values()
        ]
        state = [package_pool_state(self.manager.page_pool, with_hashes=False), held, thresholds, self.manager.stats().queries]
        if self.batch is not None:
            rows = [getattr(self.batch, name).tolist() for name in ("num_tokens", "num_computed_tokens", "is_admitted")]
            state += [rows, [self.batch.get_page_ids(row) for row in range(2)]]
        return state


def enter_by_hand(world: World, page: Any) -> None:
    """Another caller gives a half-full page its own hash."""
    page.page_hash = PageHashWithGroupId(PageHash(12345, ()), 0)


def take_hits(world: World) -> None:
    """The pages of a hit are handed out again before they are attached."""
    world.manager.free(world.running)
    store = world.manager.page_pool.store
    store.give_back(store.take(store.num_free_pages))


def leave_reference(world: World) -> None:
    """Another caller adds references to pages at the front of the free queue."""
    for page in world.manager.page_pool.free_page_queue.get_all_free_pages()[:3]:
        page.ref_cnt = 1


def do_nothing(world: World) -> None: ...


def shorten(world: World) -> None:
    """An engine's request reports more tokens than it has."""
    tokens = world.running.all_token_ids
    world.running = SimpleNamespace(  # type: ignore[assignment]
        request_id="running", all_token_ids=tokens[:7], num_tokens=14, num_computed_tokens=6, sampling_params=None, status=4
    )


MANAGER: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "longer than the model": (do_nothing, lambda world: world.allocate(LENGTH)),
    "no tokens": (do_nothing, lambda world: world.allocate(0)),
    "hits for a running request": (do_nothing, lambda world: world.allocate(1, 4, world.hits)),
    "computed without hits": (do_nothing, lambda world: world.manager.allocate_slots(world.waiting, 5, 4)),
    "a page has another hash": (
        lambda world: enter_by_hand(world, world.page_of("running", 1)),
        lambda world: world.allocate(8),
    ),
    "hits are gone": (take_hits, World.start),
    "a free page is held": (leave_reference, World.start),
    "a free page is held, more tokens": (leave_reference, lambda world: world.allocate(8)),
    "a shard that is none": (do_nothing, lambda world: world.start(dp_shard_hint="1", data_parallel_size=2)),
    "reserved pages of no number": (do_nothing, lambda world: world.start(num_reserved_pages=-1)),
    "fewer tokens than it says": (shorten, lambda world: world.allocate(8)),
    "caching more than it holds": (do_nothing, lambda world: world.manager.cache_pages(world.running, 20)),
    "caching a page with another hash": (
        lambda world: (world.allocate(8, delay_cache_pages=True), enter_by_hand(world, world.page_of("running", 2))),
        lambda world: world.manager.cache_pages(world.running, 14),
    ),
    "tokens from elsewhere that it has no slots for": (
        do_nothing,
        lambda world: world.manager.commit_external(world.running, 3),
    ),
    "tokens from elsewhere in a page with another hash": (
        lambda world: (world.allocate(8, delay_cache_pages=True), enter_by_hand(world, world.page_of("running", 2))),
        lambda world: world.manager.commit_external(world.running, 8),
    ),
    "fewer tokens from elsewhere, in a page with another hash": (
        lambda world: (world.allocate(8, delay_cache_pages=True), enter_by_hand(world, world.page_of("running", 2))),
        lambda world: world.manager.fail_external(world.running, 6),
    ),
    "fewer tokens known than came from elsewhere": (
        lambda world: (world.allocate(8, delay_cache_pages=True), shorten(world)),
        lambda world: world.manager.commit_external(world.running, 8),
    ),
    "a lease of a free page": (do_nothing, lambda world: world.manager.lease([1, 23])),
}

BATCH: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "longer than the model": (do_nothing, lambda world: world.batch.admit(1, list(range(LENGTH + 1)))),
    "a row that runs": (do_nothing, lambda world: world.batch.admit(0, PROMPT)),
    "negative tokens": (do_nothing, lambda world: world.batch.admit(1, [*PROMPT, -1])),
    "a free page is held": (leave_reference, lambda world: world.batch.admit(1, PROMPT)),
    "growth while a free page is held": (leave_reference, lambda world: world.batch.grow([0], 8)),
    "more than is known": (do_nothing, lambda world: world.batch.grow([0], 9)),
    "one row right, one wrong": (do_nothing, lambda world: world.batch.grow([0, 1], 8)),
    "tokens from elsewhere while a free page is held": (
        leave_reference,
        lambda world: world.batch.admit(1, PROMPT, num_external_tokens=12),
    ),
    "a salt that is none": (do_nothing, lambda world: world.batch.admit(1, PROMPT, cache_salt=[1])),
}


@contextmanager
def refused(world: World) -> Iterator[None]:
    before = world.state()
    with pytest.raises(PagePoolError) as caught:
        yield
    print(repr(caught.value))
    assert world.state() == before


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash], ids=str)
@pytest.mark.parametrize("what", MANAGER)
def test_an_allocation_that_fails_has_changed_nothing(what: str, hash_algo: Any) -> None:
    world, (prepare, call) = World(hash_algo), MANAGER[what]
    prepare(world)
    with refused(world):
        call(world)


@pytest.mark.parametrize("what", BATCH)
def test_an_admission_or_growth_that_fails_has_changed_nothing(what: str) -> None:
    world, (prepare, call) = World(), BATCH[what]
    prepare(world)
    with refused(world):
        call(world)


def test_errors_that_an_engine_raises_itself() -> None:
    """Errors of the request's own tokens and features, at any read."""

    class Tokens(list[int]):
        def __getitem__(self, key: Any) -> Any:
            raise LookupError("tokens are elsewhere")

    world = World()
    world.running.all_token_ids = Tokens(PROMPT)
    world.waiting.mm_features = [SimpleNamespace(mm_hash="cat", placeholder_range=SimpleNamespace(offset=5, length=np.nan))]
    before = world.state()
    with pytest.raises(LookupError):
        world.allocate(8)
    world.manager.free_page_hashes(world.waiting)
    with pytest.raises((PagePoolError, ValueError)):
        world.start()
    assert world.state() == before
