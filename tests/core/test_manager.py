"""The manager, call by call, where random work against the oracle does not go: see `test_differential`."""

from functools import partial
from types import SimpleNamespace

import pytest
from batch_model import package_pool_state
from hybrids import make_manager as make_hybrid
from pool_arrays import pool_arrays
from refusing import refused

from pagepool import (
    CacheGroupSpec,
    CacheManager,
    CachePages,
    EngineRequest,
    FullAttentionSpec,
    MambaSpec,
    PagePool,
    SlidingWindowSpec,
)
from pagepool._core import HashChain
from pagepool.compat import easydel
from pagepool.compat.easydel import (
    CacheCoordinatorNoPrefixCache,
    HybridCacheCoordinator,
    SlidingWindowManager,
    UnitaryCacheCoordinator,
    get_kv_cache_coordinator,
    get_manager_for_kv_cache_spec,
)
from pagepool.errors import ArgumentError, DoubleFreeError

pytestmark = pytest.mark.usefixtures("drafter")


def full(page_size=4):
    return FullAttentionSpec(page_size, 1, 8, "float16", False)


def sliding(window, page_size=4):
    return SlidingWindowSpec(page_size, 1, 8, "float16", False, window)


STATE = MambaSpec(1, ((2, 2),), "float16")


make_manager = partial(make_hybrid, default=(full(),), num_pages=64, max_model_len=256, hash_seed=None)


def admit(manager, name, tokens, **options):
    """Compute all tokens of a new request; returns it and the number of hit tokens."""
    request = EngineRequest(name, list(tokens))
    hits, num_hit_tokens = manager.get_computed_pages(request)
    num_new_tokens = len(request.all_token_ids) - num_hit_tokens
    assert manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hits, **options) is not None
    request.num_computed_tokens = request.num_tokens
    return request, num_hit_tokens


def decode(manager, request, tokens):
    for token in tokens:
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


# Hits.


@pytest.mark.parts_at_a_page
def test_probe_changes_nothing_and_says_why():
    manager = make_manager()
    admit(manager, "a", range(9))
    request = EngineRequest("b", [*range(8), 50, 51, 52, 53, 54])
    before = (manager.page_pool.stats, manager.page_pool.free_page_ids_in_order().tolist(), len(manager.registry.hashes))
    probe = manager.probe(request)
    assert (probe.num_hit_tokens, probe.num_queried_tokens) == (8, 13)
    assert probe.reason.startswith("the page at token 8 was not computed here")
    for num_tokens, num_hits in ((9, 8), (8, 4)):  # one token is left to compute
        whole = manager.probe(EngineRequest("c", list(range(num_tokens))))
        assert whole[:2] == (num_hits, num_tokens)
        assert whole.reason.startswith("the rest is always computed")
    assert manager.probe(EngineRequest("c", list(range(4)))).reason.startswith("the prompt is too short")
    logprobs = EngineRequest("d", [1], sampling_params=SimpleNamespace(prompt_logprobs=1))
    assert manager.probe(logprobs) == (0, 1, "nothing hits on purpose, since prompt_logprobs are asked for")
    assert make_manager(enable_caching=False).probe(request) == (0, 13, "nothing hits on purpose, since prefix caching is off")
    assert before == (
        manager.page_pool.stats,
        manager.page_pool.free_page_ids_in_order().tolist(),
        len(manager.registry.hashes),
    )


# CachePages.


@pytest.mark.parametrize("specs", [(full(),), (full(), sliding(5)), (full(), MambaSpec(4, ((2, 2),), "float16", None, 8))])
@pytest.mark.parametrize("is_counted_before", [False, True])
def test_pages_are_cached_once_they_are_computed(specs, is_counted_before):
    """By a call in each step, which does nothing while no page gets full."""
    manager, request, calls = make_manager(*specs), EngineRequest("a", range(30)), []
    cache_due = manager.registry.cache_due
    manager.registry.cache_due = lambda *args: (calls.append(request.num_computed_tokens), cache_due(*args))
    for num_tokens in range(1, 25):
        manager.allocate_slots(request, 1, delay_cache_pages=True)
        manager.take_moves()
        request.num_computed_tokens += is_counted_before
        manager.cache_pages(request, num_tokens)
        request.num_computed_tokens = num_tokens
        num_hit_tokens = manager.probe(EngineRequest("b", range(40))).num_hit_tokens
        multiple = 4 if len(specs) == 1 or specs[1] == sliding(5) else 8
        assert num_hit_tokens == num_tokens // multiple * multiple
    assert len(calls) == 6 or specs != (full(),)
    assert {4, 8, 12, 16, 20, 24} <= {num + (not is_counted_before) for num in calls}


def test_cache_pages_are_lists_of_page_objects_when_read():
    manager = make_manager()
    request = EngineRequest("a", list(range(9)))
    pages = manager.allocate_slots(request, 9)
    pool = manager.page_pool
    assert pages.pages == ([pool.pages[1], pool.pages[2], pool.pages[3]],)
    assert pages.get_unhashed_page_ids() == [3]
    assert pages.get_page_ids() == ([1, 2, 3],)
    assert pages == CachePages(([pool.pages[1], pool.pages[2], pool.pages[3]],))
    assert pages != pages.new_empty()
    assert pages.new_empty().get_page_ids() == ([],)
    both = pages + CachePages(([pool.pages[7]],))
    assert both.get_page_ids() == ([1, 2, 3, 7],)
    assert repr(both) == "CachePages(page_ids=([1, 2, 3, 7],))"
    with pytest.raises(ValueError, match=r"^\+: got 2 groups, allowed: 1, as many as on the left$"):
        _ = pages + CachePages(([], []))
    assert manager.allocate_slots(request, 1).pages == ([],)
    assert manager.create_empty_page_list().get_page_ids() == manager.create_empty_page_list().pages == ([],)
    pages.pages[0].append(pool.pages[9])
    assert pages.get_page_ids() == ([1, 2, 3, 9],)


# The manager as a whole.


def test_a_request_with_a_page_that_somebody_else_gave_back_is_not_freed():
    """The window's pages, freed before that page was met, are held again; skipped ones do not count."""
    manager = make_manager(sliding(6), full(), windows="all")
    request, _ = admit(manager, "a", range(16))
    decode(manager, request, [1, 2])
    window, [first, *_] = manager.get_page_ids("a")
    assert window[:3] == [0, 0, 0]
    manager.page_pool.free_page_ids([first])
    with refused(lambda: package_pool_state(manager.page_pool, False), DoubleFreeError, f"page {first} "):
        manager.free(request)
    manager.page_pool.touch_page_ids([first])
    manager.free(request)
    assert manager.page_pool.get_num_free_pages() == manager.num_pages - 1
    manager.page_pool.check()


def test_hits_of_some_groups_are_shared_and_the_others_get_new_pages():
    """An engine that restored the state itself brings only the pages of full attention."""
    manager = make_manager(full(), STATE)
    first, _ = admit(manager, "first", range(9))
    second = EngineRequest("second", list(range(9)))
    hits = CachePages(([manager.page_pool.pages[page_id] for page_id in (1, 2)], []))
    assert manager.allocate_slots(second, 1, 8, hits).get_page_ids() == ([5], [6])
    assert manager.get_page_ids("first") == ([1, 2, 3], [4])
    assert manager.get_page_ids("second") == ([1, 2, 5], [6])
    assert manager.page_pool.ref_counts()[:7].tolist() == [0, 2, 2, 1, 1, 1, 1]
    manager.free(first)
    manager.free(second)
    manager.page_pool.check()


@pytest.mark.parametrize("enable_caching", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_coordinator_says_what_it_was_made_with(num_groups, enable_caching):
    pool = PagePool(8, enable_caching)
    groups = [CacheGroupSpec(full())] * num_groups
    coordinator = get_kv_cache_coordinator(8, groups, 64, True, enable_caching, pool)
    made_with = coordinator.num_pages, coordinator.kv_cache_groups, coordinator.max_model_len, coordinator.use_eagle
    assert made_with == (8, groups, 64, True)
    assert coordinator.enable_caching is enable_caching
    assert coordinator.page_pool is pool
    cached_kind = UnitaryCacheCoordinator if num_groups == 1 else HybridCacheCoordinator
    assert type(coordinator) is (cached_kind if enable_caching else CacheCoordinatorNoPrefixCache)
    assert [manager.kv_cache_spec for manager in coordinator.single_type_managers] == [full()] * num_groups
    assert [manager.num_hashes_per_page for manager in coordinator.single_type_managers] == [1] * num_groups


@pytest.mark.parametrize(("enable_caching", "page_size"), [(False, None), (True, 8)])
def test_a_manager_says_what_it_was_made_with(enable_caching, page_size):
    groups = [CacheGroupSpec(full(8)), CacheGroupSpec(full(4))]
    manager = easydel.CacheManager(16, groups, 1, enable_caching, True)
    assert (manager.num_pages, manager.kv_cache_groups, manager.num_kv_cache_groups) == (16, groups, 2)
    assert manager.max_model_len == 1
    assert (manager.enable_caching, manager.use_eagle, manager.page_size) == (enable_caching, True, page_size)


def test_tokens_and_shards_are_kept_only_if_asked_for():
    manager = make_manager()
    admit(manager, "a", range(9))
    assert manager.page_pool.pages[1].page_hash.page_hash.token_ids == ()
    arrays = pool_arrays(manager.page_pool)
    assert arrays["cached_token_ids"].shape == (2, 0)
    assert arrays["num_shards"].tolist() == [0]


def test_without_a_group_that_is_cached_a_hash_is_of_one_token():
    assert make_manager(STATE)._rules.hash_page_size == 1
    assert make_manager(full(6), sliding(5, 4), STATE)._rules.hash_page_size == 2


def test_without_prefix_caching_the_coordinator_finds_nothing():
    groups = [CacheGroupSpec(full()), CacheGroupSpec(sliding(8))]
    coordinator = get_kv_cache_coordinator(8, groups, 64, False, False)
    hits, num_hit_tokens = coordinator.find_longest_cache_hit(HashChain(4, bytes(16)), 100)
    assert [list(ids) for ids in hits] == [[], []]
    assert num_hit_tokens == 0


@pytest.mark.parametrize("num_groups", [0, 2])
def test_the_unitary_coordinator_is_for_one_group(num_groups):
    with pytest.raises(ArgumentError, match=f"kv_cache_groups: got {num_groups}, allowed: 1"):
        UnitaryCacheCoordinator(8, [CacheGroupSpec(full())] * num_groups, 64, False, True)


def test_without_groups_there_is_nothing_to_hold():
    manager = CacheManager(4, [], 100)
    assert not manager.enable_caching
    request = EngineRequest("a", [1, 2], num_computed_tokens=1)
    assert manager.get_computed_pages(request)[0].get_page_ids() == ()
    assert manager.allocate_slots(request, 1).get_page_ids() == ()
    manager.free(request)


def test_hashes_are_kept_until_they_are_freed():
    manager = easydel.CacheManager(16, [CacheGroupSpec(full())], 64)
    request, _ = admit(manager, "a", range(9))
    assert list(manager.req_to_page_hashes) == ["a"]
    manager.free(request)
    assert len(manager.req_to_page_hashes["a"]) == 2
    manager.free_page_hashes(request)
    assert "a" not in manager.req_to_page_hashes
    assert manager.req_to_page_hashes["a"] == []


@pytest.mark.parts_at_a_page
def test_engines_own_spec_classes_are_known_by_name():
    class SlidingWindowSpec:
        page_size = 4
        sliding_window = 6

    manager = make_manager(SlidingWindowSpec())
    assert manager._rules.configuration["kv_cache_groups[0].kind"] == "SlidingWindow"
    request, _ = admit(manager, "a", range(12))
    assert manager.allocate_slots(request, 1) is not None
    assert manager.get_page_ids("a")[0][0] == 0  # behind the window
    kind = get_manager_for_kv_cache_spec(SlidingWindowSpec(), page_pool=manager.page_pool, kv_cache_group_id=0)
    assert type(kind) is SlidingWindowManager
