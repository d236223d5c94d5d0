"""Pool and manager against the oracle, driven by hypothesis, which shrinks its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from oracle import NULL_PAGE, ContentKeys, OracleManager, OraclePool
from settings import SETTINGS, STATE_SETTINGS, Setting
from twins import OracleTwin, PackageTwin, State, Twins, oracle_state, package_state
from workload import Engine, Request

import pagepool

PAGE_SIZE = 2
GROUP_IDS = (0, 1)
MODERATE = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

tokens = st.integers(0, 1)
hints = st.none() | st.integers(0, 3)


# --- the pool -----------------------------------------------------------------------------------------------


class PoolTwin:
    """The common interface of the pools."""

    pool: Any

    def evict(self, page_ids: list[int]) -> int:
        return self.pool.evict_pages(page_ids)

    def reset(self) -> bool:
        return self.pool.reset_prefix_cache()


class OraclePoolTwin(PoolTwin):
    """The oracle's pool, called by page id."""

    def __init__(self, num_pages: int, enable_caching: bool) -> None:
        self.pool = OraclePool(num_pages, enable_caching)
        self.keys = ContentKeys(PAGE_SIZE)

    def take(self, num_pages: int, placement: dict[str, Any]) -> list[int]:
        return self.pool.get_new_pages(num_pages, **placement)

    def free(self, page_ids: list[int]) -> None:
        self.pool.free_pages(page_ids)

    def touch(self, page_ids_by_group: list[list[int]]) -> None:
        self.pool.touch(page_ids_by_group)

    def cache(self, request: Request, page_ids: list[int], num_cached_pages: int, group_id: int) -> None:
        keys = self.keys.chain(request)
        self.pool.cache_full_pages(page_ids, keys, num_cached_pages, len(page_ids), group_id)

    def find(self, request: Request, group_ids: Sequence[int], placement: dict[str, Any]) -> list[int] | None:
        return self.pool.get_cached_page(self.keys.chain(request)[-1], group_ids, **placement)

    def state(self, request_ids: Iterable[str]) -> State:
        return oracle_state(self.pool, [])


class PackagePoolTwin(PoolTwin):
    """The package's pool, called by page object."""

    def __init__(self, num_pages: int, enable_caching: bool) -> None:
        self.pool = pagepool.PagePool(num_pages, enable_caching)

    def pages(self, page_ids: list[int]) -> list[Any]:
        return [self.pool.pages[page_id] for page_id in page_ids]

    def take(self, num_pages: int, placement: dict[str, Any]) -> list[int]:
        return [page.page_id for page in self.pool.get_new_pages(num_pages, **placement)]

    def free(self, page_ids: list[int]) -> None:
        self.pool.free_pages(self.pages(page_ids))

    def touch(self, page_ids_by_group: list[list[int]]) -> None:
        self.pool.touch(tuple(self.pages(page_ids) for page_ids in page_ids_by_group))

    def cache(self, request: Request, page_ids: list[int], num_cached_pages: int, group_id: int) -> None:
        hashes = pagepool.hash_request_tokens(hash, PAGE_SIZE, request)[:num_cached_pages]
        pages, num_full_pages = self.pages(page_ids), len(page_ids)
        self.pool.cache_full_pages(request, pages, hashes, num_cached_pages, num_full_pages, PAGE_SIZE, group_id)

    def find(self, request: Request, group_ids: Sequence[int], placement: dict[str, Any]) -> list[int] | None:
        page_hash = pagepool.hash_request_tokens(hash, PAGE_SIZE, request)[-1]
        pages = self.pool.get_cached_page(page_hash, list(group_ids), **placement)
        return None if pages is None else [page.page_id for page in pages]

    def state(self, request_ids: Iterable[str]) -> State:
        return package_state(self.pool, [])


class PoolMachine(RuleBasedStateMachine):
    """Pages taken, shared, entered, found, evicted and freed in any order, with wrong calls in between."""

    @initialize(num_pages=st.sampled_from((1, 2, 4, 8, 9, 12)))
    def start(self, num_pages: int) -> None:
        self.oracle = OraclePoolTwin(num_pages, True)
        self.twins = Twins(self.oracle, PackagePoolTwin(num_pages, True))
        self.page_ids = st.integers(0, num_pages - 1)

    def held(self) -> list[int]:
        return [page_id for page_id, count in enumerate(self.oracle.pool.ref_counts) if count]

    @rule(num_pages=st.integers(0, 6), hint=hints, size=st.sampled_from((None, 1, 2, 4)))
    def take(self, num_pages: int, hint: int | None, size: int | None) -> None:
        self.twins.call("take", num_pages, {"dp_shard_hint": hint, "data_parallel_size": size})

    @rule(data=st.data())
    def free_any(self, data: st.DataObject) -> None:
        self.twins.call("free", data.draw(st.lists(self.page_ids, max_size=4)))

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def free_held(self, data: st.DataObject) -> None:
        self.twins.call("free", data.draw(st.lists(st.sampled_from(self.held()), unique=True)))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        group = st.lists(self.page_ids, max_size=3)
        self.twins.call("touch", data.draw(st.lists(group, max_size=2)))

    @precondition(lambda self: self.held())
    @rule(
        data=st.data(),
        token_ids=st.lists(tokens, min_size=6 * PAGE_SIZE, max_size=6 * PAGE_SIZE),
        group_id=st.sampled_from(GROUP_IDS),
    )
    def cache(self, data: st.DataObject, token_ids: list[int], group_id: int) -> None:
        held_or_null = st.sampled_from([NULL_PAGE, *self.held()])
        page_ids = data.draw(st.lists(held_or_null, max_size=6).filter(has_no_page_twice))
        num_cached_pages = data.draw(st.integers(0, len(page_ids)))
        self.twins.call("cache", self.request(token_ids), page_ids, num_cached_pages, group_id)

    @rule(
        token_ids=st.lists(tokens, min_size=PAGE_SIZE, max_size=3 * PAGE_SIZE),
        group_ids=st.sampled_from(((0,), (1,), GROUP_IDS)),
        hint=hints,
    )
    def find(self, token_ids: list[int], group_ids: Sequence[int], hint: int | None) -> None:
        placement = {"dp_shard_hint": hint, "data_parallel_size": 2}
        self.twins.call("find", self.request(token_ids), group_ids, placement)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        page_ids = st.lists(self.page_ids.filter(bool), max_size=3)
        if self.oracle.pool.num_pages > 1:
            self.twins.call("evict", data.draw(page_ids))

    @rule()
    def reset(self) -> None:
        self.twins.call("reset")

    def request(self, token_ids: list[int]) -> Request:
        return Request(f"r{self.twins.num_calls}", token_ids)


def has_no_page_twice(page_ids: list[int]) -> bool:
    """Whether each page but the null page occurs once."""
    pages = [page_id for page_id in page_ids if page_id != NULL_PAGE]
    return len(pages) == len(set(pages))


# --- the manager --------------------------------------------------------------------------------------------


def rule_on_running(act: Callable[[Engine, Request], None]) -> Any:
    """Make a rule that applies an engine's action to any running request."""

    @precondition(lambda machine: machine.engine.running)
    @rule(data=st.data())
    def on_running(machine: ManagerMachine, data: st.DataObject) -> None:
        act(machine.engine, data.draw(st.sampled_from(machine.engine.running)))

    return on_running


class ManagerMachine(RuleBasedStateMachine):
    """Requests that arrive, grow, are preempted and end in any order."""

    @initialize(setting=st.sampled_from([*SETTINGS, *STATE_SETTINGS]), num_pages=st.sampled_from((8, 12, 24)))
    def start(self, setting: Setting, num_pages: int) -> None:
        groups = setting.cache_groups(pagepool)
        oracle = OracleTwin(setting.manager(OracleManager, groups, num_pages))
        package = PackageTwin(setting.manager(pagepool.CacheManager, groups, num_pages))
        self.twins = Twins(oracle, package)
        self.engine = Engine(self.twins)
        self.setting = setting

    def draw_options(self, data: st.DataObject) -> dict[str, Any]:
        """Draw keywords for an allocation; the simplest draw is none."""
        options = self.placement(data.draw(hints))
        if data.draw(st.booleans()):
            options["num_lookahead_tokens"] = data.draw(st.integers(0, 3))
            options["delay_cache_pages"] = data.draw(st.booleans())
            options["num_reserved_pages"] = data.draw(st.integers(0, 4))
        return options

    def placement(self, hint: int | None) -> dict[str, Any]:
        return {"dp_shard_hint": hint, "data_parallel_size": self.setting.data_parallel_size}

    @rule(
        family=tokens,
        num_shared_tokens=st.integers(0, 20),
        more=st.lists(tokens, min_size=1, max_size=3),
        salt=st.sampled_from((None, None, "salt")),
    )
    def submit(self, family: int, num_shared_tokens: int, more: list[int], salt: str | None) -> None:
        self.engine.submit([family] * num_shared_tokens + more, cache_salt=salt)

    @precondition(lambda self: self.engine.waiting)
    @rule(data=st.data(), hint=hints)
    def admit(self, data: st.DataObject, hint: int | None) -> None:
        request = data.draw(st.sampled_from(self.engine.waiting))
        num_hit_tokens = self.engine.look_up(request, self.placement(hint))
        num_left = request.num_tokens - num_hit_tokens
        num_external = data.draw(st.integers(0, num_left - 1))
        num_new = data.draw(st.integers(0 if num_external else 1, num_left - num_external))
        self.engine.admit(request, num_hit_tokens, num_new, num_external, **self.draw_options(data))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), token_ids=st.lists(tokens, min_size=1, max_size=4), num_drafts=st.integers(0, 2))
    def grow(self, data: st.DataObject, token_ids: list[int], num_drafts: int) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        room = self.setting.max_model_len - 1 - request.num_tokens
        request.all_token_ids.extend(token_ids[:room])
        num_left = request.num_tokens - request.num_computed_tokens
        if num_left:
            num_new = data.draw(st.integers(1, num_left))
            self.engine.grow(request, num_new, num_drafts, **self.draw_options(data))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def fail_load(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        held = {page_id for page_ids in self.twins.oracle.manager.get_page_ids(request.request_id) for page_id in page_ids}
        page_ids = data.draw(st.lists(st.sampled_from(sorted(held - {NULL_PAGE})), unique=True))
        self.engine.fail_load(request, page_ids, data.draw(st.integers(0, request.num_computed_tokens)))

    cache = rule_on_running(Engine.cache)
    preempt = rule_on_running(Engine.preempt)
    finish = rule_on_running(Engine.finish)
    fork = rule_on_running(Engine.fork)

    @rule()
    def take_copies(self) -> None:
        self.twins.call("take_copies")

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), num_scheduled_requests=st.integers(1, 3))
    def count_common_prefix(self, data: st.DataObject, num_scheduled_requests: int) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        self.twins.call("get_num_common_prefix_pages", request, num_scheduled_requests)

    @rule(page_ids=st.lists(st.integers(1, 7), max_size=3))
    def evict(self, page_ids: list[int]) -> None:
        self.twins.call("evict_pages", page_ids)

    @rule()
    def reset(self) -> None:
        self.twins.call("reset_prefix_cache")


TestPool = PoolMachine.TestCase
TestPool.settings = MODERATE
TestManager = ManagerMachine.TestCase
TestManager.settings = MODERATE
