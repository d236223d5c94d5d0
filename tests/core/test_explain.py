"""Why prompts do not hit: each cause by example, and many random ones beside an oracle that knows why.

PAGEPOOL_TEST_OPERATIONS: half as many requests are explained in all.
"""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import hybrids
import numpy as np
import pytest
from batch_model import package_pool_state
from explaining import WORLDS, Explaining, World
from hybrids import FULL
from managing import grouped
from settings import NUM_OPERATIONS

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CrossAttentionSpec,
    EngineRequest,
    HitReport,
    HostTier,
    MambaSpec,
    MissCause,
    PageTable,
    RequestTraits,
    RunningBatch,
    SlidingWindowSpec,
)
from pagepool._core import find_misses, has_entry
from pagepool.errors import ArgumentError, ArgumentTypeError, RowIndexError, RowOverflowError

MIN_RATE = 0.99
PLAIN = {MissCause.COMPLETE, MissCause.NO_FULL_PAGE, MissCause.UNCACHED}
"""Causes of requests that miss nothing that was computed; they do not count as misses."""


def show(confusion: Counter[tuple[MissCause, MissCause]]) -> str:
    """Return a table of the right causes, and of those given in their place."""
    return "\n".join(f"{right.value:>16} -> {given.value:16} {count}" for (right, given), count in sorted(confusion.items()))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_causes_are_those_of_an_oracle(world: World) -> None:
    num_requests = max(40, NUM_OPERATIONS // 4 // len(WORLDS))
    confusion: Counter[tuple[MissCause, MissCause]] = Counter()
    faults: list[str] = []
    for seed in range(-(-num_requests // 400)):
        explaining = Explaining(world, seed)
        for _ in range(min(400, num_requests)):
            explaining.step()
        confusion += explaining.confusion
        faults += [f"seed {seed}: {fault}" for fault in explaining.faults]
    misses = {pair: count for pair, count in confusion.items() if pair[0] not in PLAIN}
    num_misses = sum(misses.values())
    num_right = sum(count for (right, given), count in misses.items() if right == given)
    shown = "\n".join([f"{num_right} of {num_misses} misses named right", show(confusion), *faults[:5]])
    print(shown)
    assert num_right >= MIN_RATE * num_misses, shown
    assert all(right == given for right, given in confusion if right in PLAIN), shown


# Each cause, by example.


def make(*specs: Any, num_pages: Any = 40, is_enabled: bool = True, **options: Any) -> CacheManager:
    groups = [spec if isinstance(spec, CacheGroupSpec) else CacheGroupSpec(spec) for spec in specs or (FULL,)]
    manager = CacheManager(num_pages, groups, 256, **grouped(hash_seed="explain", **options))
    if is_enabled:
        manager.enable_explanations()
    return manager


def run(manager: CacheManager, tokens: Any, num_computed: int | None = None, **keys: Any) -> None:
    """Compute a request alone, or fail after some tokens."""
    request = EngineRequest("run", list(tokens), **keys)
    hits, num_hits = manager.get_computed_pages(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, hits) is not None
    manager.take_moves()
    request.num_computed_tokens = request.num_tokens
    manager.free(request, num_computed_tokens=num_computed)
    manager.free_page_hashes(request)


def explain(manager: CacheManager, tokens: Any, **keys: Any) -> HitReport:
    return manager.explain(EngineRequest("explained", list(tokens), **keys))


def test_nothing_changes() -> None:
    manager = make(FULL, hybrids.WINDOW)
    run(manager, range(40))
    request = EngineRequest("a", list(range(20)))
    before = package_pool_state(manager.page_pool, True), manager.stats().queries, len(manager.registry.hashes)
    assert manager.explain(request).num_hit_tokens == manager.probe(request).num_hit_tokens
    assert before == (package_pool_state(manager.page_pool, True), manager.stats().queries, len(manager.registry.hashes))


def test_without_explanations_evicted_pages_are_unknown() -> None:
    manager = make(num_pages=5, is_enabled=False)
    run(manager, range(16))
    run(manager, range(100, 116))
    report = explain(manager, range(16))
    assert (report.cause, report.is_enabled) == (MissCause.NEVER_COMPUTED, False)
    assert "enable_explanations" in str(report)
    manager.enable_explanations()
    run(manager, range(16))
    assert explain(manager, range(100, 116)).cause is MissCause.EVICTED
    manager.enable_explanations()  # changes nothing
    assert explain(manager, range(100, 116)).cause is MissCause.EVICTED


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_evicted_pages_name_pool_policy_and_time(eviction: str) -> None:
    manager = make(num_pages=5, eviction=eviction)
    manager.registry.store.set_time(10)
    run(manager, range(17 - 1))
    manager.registry.store.set_time(20)
    run(manager, range(100, 116))
    manager.registry.store.set_time(32.5)
    end = explain(manager, range(16)).end
    assert (end.cause, end.token, end.seconds, end.detail) == (MissCause.EVICTED, 0, 12.5, f"the pool 'kv' ({eviction})")
    assert "evicted 12.5 seconds ago from the pool 'kv'" in end.tell()


def test_failed_steps_and_resets() -> None:
    manager = make()
    run(manager, range(16), num_computed=8)
    assert explain(manager, range(16)).end.cause is MissCause.DROPPED
    assert explain(manager, range(16)).end.token == 8
    assert manager.reset_prefix_cache()
    assert explain(manager, range(16)).cause is MissCause.RESET
    assert explain(manager, range(16)).end.token == 0


@pytest.mark.parametrize(
    ("mine", "others", "what"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}, "salt"),
        ({}, {"cache_salt": "b"}, "salt"),
        ({"lora_id": 1}, {}, "adapter"),
        ({"lora_id": 1, "cache_salt": "a"}, {"lora_id": 2, "cache_salt": "b"}, "adapter and salt"),
        ({"mm_features": [SimpleNamespace(mm_hash="x")]}, {"mm_features": [SimpleNamespace(mm_hash="y")]}, "medium"),
    ],
)
@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", hash])
def test_other_keys_are_named(mine: dict[str, Any], others: dict[str, Any], what: str, hash_algo: Any) -> None:
    manager = make(hash_algo=hash_algo)
    run(manager, range(16), **others)
    end = explain(manager, range(16), **mine).end
    assert (end.cause, end.token, end.detail) == (MissCause.OTHER_KEYS, 0, what)
    assert explain(manager, range(50, 70), **mine).cause is MissCause.NEVER_COMPUTED


def test_another_medium_begins_at_its_place() -> None:
    manager = make()

    def image(name: str) -> Any:
        return [SimpleNamespace(mm_hash=name, placeholder_range=SimpleNamespace(offset=9, length=3))]

    run(manager, range(20), mm_features=image("x"))
    end = explain(manager, range(20), mm_features=image("y")).end
    assert (end.cause, end.token, end.num_hit_tokens, end.detail) == (MissCause.OTHER_KEYS, 8, 8, "medium")
    assert explain(manager, range(20)).cause is MissCause.OTHER_KEYS


def test_uncached_on_purpose() -> None:
    logprobs = EngineRequest("a", list(range(9)), sampling_params=SimpleNamespace(prompt_logprobs=1))
    assert make().explain(logprobs).cause is MissCause.UNCACHED
    assert make(enable_caching=False).explain(EngineRequest("a", [1, 2])).cause is MissCause.UNCACHED
    unkept = explain(make(FULL, MambaSpec(4, ((1, 1),), "float16")), range(9))
    assert (unkept.cause, "checkpoint_interval" in str(unkept)) == (MissCause.UNCACHED, True)


def test_windows_and_states_that_were_not_kept() -> None:
    manager = make(FULL, SlidingWindowSpec(4, 1, 8, "float16", False, 9), num_pages=90)
    run(manager, range(64))
    report = explain(manager, [*range(33), *range(900, 930)])
    assert [group.cause for group in report.groups] == [MissCause.NEVER_COMPUTED, MissCause.FOLLOWS]  # a boundary is near
    manager = make(FULL, hybrids.keep_every("auto"), num_pages=90)
    run(manager, range(220))
    report = explain(manager, [*range(100), *range(900, 990)])
    assert (report.cause, report.num_hit_tokens, report.end.token) == (MissCause.NO_STATE, 0, 64)
    assert [group.num_hit_tokens for group in report.groups] == [64, 0]
    assert "no state was kept at token 64" in str(report)


def test_a_drafter_drops_a_page() -> None:
    manager = make(use_eagle=True)
    run(manager, range(40))
    report = explain(manager, range(40))
    assert (report.cause, report.num_hit_tokens) == (MissCause.COMPLETE, 32)
    report = explain(manager, [*range(22), *range(900, 930)])
    assert (report.cause, report.num_hit_tokens, report.end.token) == (MissCause.NEVER_COMPUTED, 16, 20)
    assert explain(manager, range(8)).cause is MissCause.NO_FULL_PAGE


def test_loads_need_room() -> None:
    manager = make(num_pages=7, host_tier=HostTier(20))
    run(manager, range(24))
    taken = manager.page_pool.get_new_page_ids(5)
    assert explain(manager, range(24)).cause is MissCause.BEING_SAVED
    manager.complete(manager.take_moves().number)
    report = explain(manager, range(24))
    assert (report.cause, report.num_hit_tokens, report.num_tier_tokens) == (MissCause.NO_ROOM_TO_LOAD, 20, 16)
    manager.page_pool.free_page_ids(taken)
    report = explain(manager, range(24))
    assert (report.cause, report.num_tier_tokens) == (MissCause.COMPLETE, 16)


def test_media_are_groups_too() -> None:
    cross = CacheGroupSpec(CrossAttentionSpec(4, 1, 8, "float16", use_mla=False, max_num_encoder_tokens=16))
    manager = make(CacheGroupSpec(FULL), cross)
    keys = {"num_encoder_tokens": 9, "cross_key": "audio"}
    run(manager, range(12), **keys)
    run(manager, range(500, 512), num_encoder_tokens=9, cross_key="other")
    report = explain(manager, range(12), **keys)
    assert [(group.group, group.cause) for group in report.groups] == [(0, MissCause.COMPLETE), (1, MissCause.COMPLETE)]
    assert report.groups[1].num_hit_tokens == 12  # whole pages
    report = explain(manager, range(12), num_encoder_tokens=9, cross_key="other")
    assert report.end.detail == "medium"
    assert [group.cause for group in report.groups] == [MissCause.OTHER_KEYS, MissCause.COMPLETE]
    unknown = explain(manager, range(12), num_encoder_tokens=9, cross_key="new").groups[1]
    assert (unknown.cause, unknown.num_hit_tokens) == (MissCause.NEVER_COMPUTED, 0)
    assert explain(manager, range(12), num_encoder_tokens=9).cause is MissCause.UNCACHED


# Rows.


def test_rows_are_explained_like_requests() -> None:
    manager = make()
    batch = RunningBatch(manager, PageTable(2, 64, 256))
    salted = RequestTraits(cache_salt="a")
    assert batch.explain(np.arange(9, dtype=np.int32)).cause is MissCause.NEVER_COMPUTED
    assert batch.admit(0, list(range(9)), traits=salted) == 0
    assert batch.explain(0, traits=salted).num_hit_tokens == 8
    assert batch.explain(list(range(9)), traits=salted).cause is MissCause.COMPLETE
    assert batch.explain(list(range(9))).end.detail == "salt"
    assert batch.explain(list(range(9)), traits=RequestTraits(cache_salt="a", look_up=False)).cause is MissCause.UNCACHED
    assert batch.probe(1, list(range(9)), traits=salted) == 8
    report = batch.explain(list(range(9)), traits=salted)
    assert str(report) == str(explain(manager, range(9), cache_salt="a"))
    batch.release([0])
    batch.check()


def test_shards() -> None:
    manager = make(num_pages=40)
    batch = RunningBatch(manager, PageTable(2, 64, 256), data_parallel_size=2)
    assert batch.admit(0, list(range(9)), traits=RequestTraits(dp_shard=1)) == 0
    assert batch.explain(list(range(9)), traits=RequestTraits(dp_shard=0)).cause is MissCause.OTHER_SHARD
    assert batch.explain(list(range(9)), traits=RequestTraits(dp_shard=1)).cause is MissCause.COMPLETE
    request = EngineRequest("a", list(range(9)))
    assert manager.explain(request, dp_shard_hint=0, data_parallel_size=2).cause is MissCause.OTHER_SHARD


# Arguments and threads.


def test_wrong_arguments_are_refused() -> None:
    manager = make()
    batch = RunningBatch(manager, PageTable(2, 64, 256))
    for request in (None, 1, "a", SimpleNamespace(request_id="a")):
        with pytest.raises(ArgumentTypeError):
            manager.explain(request)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        manager.explain(EngineRequest("a", [1]), dp_shard_hint=0, data_parallel_size=0)
    for tokens in ([], [-1], 2**40, -1, "text", [1.5], None, object(), 1):
        with pytest.raises((ArgumentError, ArgumentTypeError, RowIndexError)):
            batch.explain(tokens)  # type: ignore[arg-type]
    for traits in (1, RequestTraits(dp_shard=1), RequestTraits(num_encoder_tokens=3)):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            batch.explain([1, 2], traits=traits)  # type: ignore[arg-type]
    with pytest.raises(RowOverflowError):
        batch.explain(list(range(300)))


def test_core_functions_refuse_wrong_arguments() -> None:
    manager = make()
    registry = manager.registry
    store, groups = registry.store, registry.rules.groups
    chain = registry.hash_alone(EngineRequest("a", list(range(9))), 9).chain
    for arguments in ((None, groups, chain, 9), (store, None, chain, 9), (store, groups, None, 9), (store, groups, chain, "9")):
        with pytest.raises(TypeError):
            find_misses(*arguments)  # type: ignore[arg-type]
    for ids in ((-1, None), (0, -2), "ab"):
        with pytest.raises((ArgumentError, TypeError, ValueError)):
            find_misses(store, groups, chain, 9, ids)  # type: ignore[arg-type]
    for page, group in ((2, 0), (-1, 0), (0, -1), (0, 2**40)):
        with pytest.raises(ArgumentError):
            has_entry(store, chain, page, group)
    assert not has_entry(store, chain, 1, 7)


def test_threads_explain_while_others_allocate() -> None:
    manager = make(num_pages=20)
    faults: list[BaseException] = []
    is_over = threading.Event()

    def explain_all(number: int) -> None:
        try:
            while not is_over.is_set():
                explain_one = EngineRequest(f"thread {number}", list(range(16)), cache_salt=str(number))
                assert manager.explain(explain_one).num_hit_tokens in (0, 4, 8, 12)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=explain_all, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        run(manager, range(i % 5, i % 5 + 16), cache_salt=str(i % 4))
    is_over.set()
    for thread in threads:
        thread.join()
    assert not faults, faults
    manager.check()
