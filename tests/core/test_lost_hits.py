"""Hits that are lost with evicted pages, by pool, beside a model that remembers what was evicted."""

from __future__ import annotations

from random import Random
from typing import Any

import hybrids
import pytest
from eviction_oracle import hash_key
from managing import grouped, keep_token_ids

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    EngineRequest,
    MultiGroupPageTable,
    PagePool,
    RunningBatch,
)
from pagepool._core import search_all_lost

PAGE, INTERVAL = hybrids.PAGE_SIZE, 8
FULL, STATE = CacheGroupSpec(hybrids.FULL), CacheGroupSpec(hybrids.STATE, pool="states")
SET_SIZE = 8


def make_manager(num_pages: dict[str, int], *further: CacheGroupSpec, **options: Any) -> CacheManager:
    groups = [FULL, STATE, *further]
    return keep_token_ids(CacheManager(num_pages, groups, 128, **grouped(hash_seed="lost", **options)))


def run(manager: CacheManager, tokens: list[int], name: str = "a", on_call: Any = None, **attributes: Any) -> int:
    """Run a request in steps that end at checkpoints, and return the tokens that it hit."""
    request = EngineRequest(name, tokens, **attributes)
    hits, num_hits = manager.get_computed_pages(request)
    ends = [*range(num_hits // INTERVAL * INTERVAL + INTERVAL, len(tokens), INTERVAL), len(tokens)]
    for end in ends:
        found = () if request.num_computed_tokens else (num_hits, hits)
        assert manager.allocate_slots(request, end - max(request.num_computed_tokens, num_hits), *found) is not None
        manager.take_moves()
        request.num_computed_tokens = end
        if on_call is not None:
            on_call()
    manager.free(request)
    manager.free_page_hashes(request)
    return num_hits


def run_row(manager: CacheManager, batch: RunningBatch, tokens: list[int]) -> int:
    """Run a request as a row, and return the tokens that it hit."""
    num_hits = batch.admit(0, tokens, max_num_new_tokens=INTERVAL)
    assert num_hits is not None
    batch.take_moves()
    while (num_left := len(tokens) - int(batch.num_computed_tokens[0])) > 0:
        assert batch.plan([0], min(INTERVAL, num_left)).num_grown == 1
        batch.take_moves()
    batch.release([0])
    return num_hits


def lost_in(manager: CacheManager) -> tuple[int, ...]:
    return tuple(pool.num_lost_hit_tokens for pool in manager.stats().pools.values())


def prompt(number: int, num_tokens: int = 21) -> list[int]:
    return [1000 * number + i for i in range(num_tokens)]


def make_batch(manager: CacheManager) -> RunningBatch:
    tables = MultiGroupPageTable(1, 128, 128, [PAGE] * len(manager.kv_cache_groups))
    return RunningBatch(manager, tables)


@pytest.mark.parametrize("in_rows", [False, True])
def test_an_evicted_state_loses_hits_of_its_pool(in_rows: bool) -> None:
    manager = make_manager({"kv": 60, "states": 6})
    batch = make_batch(manager)
    for number in range(4):
        assert (run_row(manager, batch, prompt(number)) if in_rows else run(manager, prompt(number))) == 0
    assert lost_in(manager) == (0, 0)
    assert (run_row(manager, batch, prompt(0)) if in_rows else run(manager, prompt(0))) == 0
    assert lost_in(manager) == (0, 16)  # the checkpoints after 8 and 16 tokens are gone, keys and values are there


def test_hits_that_are_lost_before_a_reset_are_not_found_after_it() -> None:
    manager = make_manager({"kv": 60, "states": 6})
    for number in range(4):
        run(manager, prompt(number))
    assert manager.reset_prefix_cache()
    request = EngineRequest("b", prompt(0))
    assert manager.allocate_slots(request, request.num_tokens) is not None  # its writes are not taken
    request.num_computed_tokens = request.num_tokens
    manager.free(request)
    assert run(manager, prompt(0)) == 0
    assert lost_in(manager) == (0, 0)


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_lost_hits_of_pages_are_estimated_from_a_sample(eviction: str) -> None:
    """Keys and values of prompts are evicted, and their states stay, or go with them."""
    manager, lost = make_manager({"kv": 20, "states": 60}, eviction=eviction), 0
    for turn in range(100):
        for number in range(8):
            num_hits = run(manager, prompt(number))
            lost += 16 - num_hits if turn else 0
    assert lost > 7000
    assert 0.8 * lost < lost_in(manager)[0] < 1.2 * lost
    assert lost_in(manager)[1] == 0


def test_a_simulation_counts_each_hit_that_pages_lost() -> None:
    manager = make_manager({"kv": 20, "states": 60})
    search_all_lost(manager._store)
    for _ in range(3):
        for number in range(8):
            assert run(manager, prompt(number)) == 0
    assert lost_in(manager) == (16 * 16, 0)


def test_refusals_and_passed_checkpoints_are_those_of_a_pool() -> None:
    manager = make_manager({"kv": 12, "states": 4})
    batch = make_batch(manager)
    held = manager.pools["states"].get_new_page_ids(2)
    assert batch.admit(0, prompt(0, 16), max_num_new_tokens=8) == 0  # no page is left for the checkpoint after 8 tokens
    assert batch.plan([0], 8).num_grown == 1  # nor for that after 16
    batch.append([0], [1])
    kept = manager.pools["kv"].get_new_page_ids(manager.pools["kv"].get_num_free_pages())
    assert batch.plan([0], 1).num_grown == 0
    manager.pools["kv"].free_page_ids(kept)
    assert batch.plan([0], 1).num_grown == 1
    assert manager.allocate_slots(EngineRequest("b", prompt(1)), 8) is None
    counts = {name: (pool.num_refusals, pool.num_passed_checkpoints) for name, pool in manager.stats().pools.items()}
    assert counts == {"kv": (1, 0), "states": (1, 2)}
    manager.pools["states"].free_page_ids(held)


def test_a_checkpoint_that_is_cached_already_was_not_passed() -> None:
    """Two requests compute the same tokens. The second one's states are equal to those cached, and no page is left for them."""
    manager = make_manager({"kv": 24, "states": 5})
    for name in "ab":
        request = EngineRequest(name, prompt(0, 17))
        assert manager.allocate_slots(request, 16) is not None
        manager.take_moves()
        request.num_computed_tokens = 16
        assert manager.allocate_slots(request, 1) is not None
    assert manager.stats().pools["states"].num_passed_checkpoints == 0


class Ghost:
    """The keys evicted last, twice as many as a pool has pages, in sets of eight that each lose the first that came."""

    def __init__(self, num_pages: int) -> None:
        self.sets: list[list[int]] = [[] for _ in range(1 + 2 * num_pages // SET_SIZE)]

    def _find(self, word: int) -> tuple[int, list[int]]:
        tag = word >> 32 or 1
        return tag, self.sets[tag * len(self.sets) >> 32]

    def add(self, word: int) -> None:
        tag, tags = self._find(word)
        if tag in tags:
            tags.remove(tag)
        tags.insert(0, tag)
        del tags[SET_SIZE:]

    def has(self, word: int) -> bool:
        tag, tags = self._find(word)
        return tag in tags


class Model:
    """The pools of a manager as lists of prefixes, which the first token of their last page names."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.group_of = {"kv": 0, "states": 1}
        self.ghost = Ghost(manager.pools["states"].num_pages - 1)
        self.keys: dict[int, int] = {}
        self.cached: dict[str, dict[int, int]] = {}  # prefixes by page
        self.free: list[int] = []
        self.lost = [0, 0]
        self.num_lookups = 0
        self.observe()

    def _read(self, pool: PagePool) -> dict[int, int]:
        hashes = {page.page_id: page.page_hash.page_hash for page in pool.pages if page.page_hash is not None}
        for page_hash in hashes.values():
            self.keys[page_hash.token_ids[0]] = page_hash.hash_value
        return {page_id: page_hash.token_ids[0] for page_id, page_hash in hashes.items()}

    def observe(self) -> None:
        """Note what a call evicted, in the order of the free queue before it, and what is cached now."""
        before, now = self.cached.get("states", {}), self._read(self.manager.pools["states"])
        gone = [page for page, prefix in before.items() if now.get(page) != prefix]
        for page in sorted(gone, key=self.free.index):
            if list(before.values()).count(before[page]) == 1:  # the last one of its content
                self.ghost.add(hash_key(self.keys[before[page]], 1))
            del before[page]
        self.cached = {"kv": self._read(self.manager.pools["kv"]), "states": now}
        self.free = self.manager.pools["states"].free_page_ids_in_order().tolist()

    def look_up(self, tokens: list[int]) -> int:
        """Return the tokens that hit, and count those that were lost."""
        self.num_lookups += 1
        prefixes = [tokens[i] for i in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE)]
        kv, states = ({*self.cached[name].values()} for name in ("kv", "states"))
        num_full = next((i for i, prefix in enumerate(prefixes) if prefix not in kv), len(prefixes))
        places = range(2, len(prefixes) + 1, 2)
        num_hits = max((place for place in places if place <= num_full and prefixes[place - 1] in states), default=0)
        was = [p for p in places if num_hits < p <= num_full and self._was_evicted(prefixes[p - 1])]
        behind = [p for p in places if p > num_full and prefixes[p - 1] in states]
        self.lost[1] += PAGE * (max(was, default=num_hits) - num_hits)
        if behind and self.num_lookups * 0x9E3779B1 % 2**32 <= (2**32 - 1) // 16:
            self.lost[0] += 16 * PAGE * (max(behind) - num_hits)
        return PAGE * num_hits

    def _was_evicted(self, prefix: int) -> bool:
        return self.ghost.has(hash_key(self.keys[prefix], 1))


@pytest.mark.parametrize("sizes", [{"kv": 100, "states": 8}, {"kv": 30, "states": 40}, {"kv": 50, "states": 20}])
def test_lost_hits_are_those_of_a_model(sizes: dict[str, int]) -> None:
    for seed in range(3):
        rng, manager = Random(seed), make_manager(sizes)
        model, tree = Model(manager), {(): 0}
        for _ in range(250):
            path: tuple[int, ...] = ()
            for _ in range(rng.randint(1, 9)):
                path += (min(int(rng.expovariate(1.2)), 5),)
                tree.setdefault(path, len(tree))
            nodes = [tree[path[:i]] for i in range(1, len(path) + 1)]
            tokens = [PAGE * node + i for node in nodes for i in range(PAGE)] + [10**6] * rng.randint(1, 2)
            expected = model.look_up(tokens)
            assert run(manager, tokens, on_call=model.observe) == expected, seed
            model.observe()
            assert lost_in(manager) == tuple(model.lost), (seed, sizes)
        assert any(lost_in(manager)), seed
        manager.check()


def test_advice_names_the_pool_that_lost_most_since_the_last_one() -> None:
    manager = make_manager({"kv": 60, "states": 6})
    assert manager.advise() is None
    for number in range(4):
        run(manager, prompt(number))
    assert manager.advise() is None
    run(manager, prompt(0))
    run(manager, prompt(5, 11))
    share = "50.0% of 32 prompt tokens since the last advice"
    assert manager.advise() == f"states binds: {share} would have hit with more of its pages; kv 0.0%"
    assert manager.advise() is None
    alone = CacheManager(12, [FULL], 64)
    assert alone.advise() is None


def test_advice_on_pools_of_another_manager_begins_anew() -> None:
    manager = make_manager({"kv": 60, "states": 6})
    for number in (0, 1, 2, 3, 0):
        run(manager, prompt(number))
    again = make_manager({"kv": 60, "states": 6}, page_pool=manager.pools["kv"])
    assert lost_in(again) == (0, 16)
    assert again.advise() is None
    assert manager.advise() is not None
