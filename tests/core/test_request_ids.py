"""Two requests with one id: while one of them holds pages, calls for the other are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hybrids import FULL, make_manager, manager_state
from refusing import refused
from threads import run_threads

from pagepool import CacheManager, EngineRequest
from pagepool.compat import easydel
from pagepool.errors import ArgumentError

Call = Callable[[CacheManager, EngineRequest], Any]

CALLS: dict[str, Call] = {
    "get_computed_pages": lambda manager, request: manager.get_computed_pages(request),
    "probe": lambda manager, request: manager.probe(request),
    "allocate_slots": lambda manager, request: manager.allocate_slots(request, 1),
    "allocate_slots of an int of NumPy": lambda manager, request: manager.allocate_slots(request, np.int64(1)),  # type: ignore[arg-type]
    "allocate_slots with hits": lambda manager, request: manager.allocate_slots(
        request, 1, 0, manager.create_empty_page_list()
    ),
    "cache_pages": lambda manager, request: manager.cache_pages(request, 1),
    "commit_external": lambda manager, request: manager.commit_external(request, 0),
    "fail_external": lambda manager, request: manager.fail_external(request, 0),
    "free": lambda manager, request: manager.free(request),
    "free of what was not computed": lambda manager, request: manager.free(request, num_computed_tokens=0),
    "free_page_hashes": lambda manager, request: manager.free_page_hashes(request),
    "fork": lambda manager, request: manager.fork(request, EngineRequest("third", [1])),
    "fork to it": lambda manager, request: manager.fork(EngineRequest("third", [1]), request),
    "lease": lambda manager, request: manager.lease(request, seconds=1),
    "expect": lambda manager, request: manager.expect(request, seconds=1),
    "find_wrong_token": lambda manager, request: manager.find_wrong_token(request, None),  # type: ignore[arg-type]
    "explain": lambda manager, request: manager.explain(request),
    "get_num_common_prefix_pages": lambda manager, request: manager.get_num_common_prefix_pages(request, 1),
}
MESSAGE = "^request 'a': got another object than the one that holds pages under this id, allowed: that object, or another id$"


@pytest.mark.parametrize("options", [{}, {"caches": "computed"}, {"enable_caching": False}], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 10])
@pytest.mark.parametrize("call", [call for name, call in CALLS.items() if name != "fork to it"], ids=lambda call: "")
def test_a_second_request_is_refused_by_each_call(call: Call, num_tokens: int, options: dict[str, Any]) -> None:
    """Whether it has the same tokens or others, before and after the tokens of the first are computed."""
    manager = make_manager(FULL, **options)
    first = EngineRequest("a", list(range(num_tokens)))
    manager.allocate_slots(first, num_tokens)
    held = manager.get_page_ids("a")
    for num_computed_tokens in (0, num_tokens):
        first.num_computed_tokens = num_computed_tokens
        for tokens in (first.all_token_ids, list(range(50, 70))):
            second = EngineRequest("a", tokens, num_computed_tokens=num_computed_tokens)
            with refused(lambda: manager_state(manager), ArgumentError, MESSAGE):
                call(manager, second)
    manager.allocate_slots(first, 1)
    assert manager.get_page_ids("a")[0][: len(held[0])] == held[0]
    manager.check()


def test_each_call_that_takes_a_request_is_tried() -> None:
    calls = [(name, getattr(CacheManager, name)) for name in dir(CacheManager) if not name.startswith("_")]
    takers = {name for name, call in calls if inspect.isroutine(call) and "request" in inspect.signature(call).parameters}
    assert takers | {"lease"} == {name.split()[0] for name in CALLS}


def test_a_fork_to_the_id_of_another_request_is_refused() -> None:
    manager = make_manager(FULL)
    first, other = EngineRequest("a", [1, 2, 3]), EngineRequest("b", [1, 2, 3])
    for request in (first, other):
        manager.allocate_slots(request, 3)
        request.num_computed_tokens = 3
    with refused(lambda: manager_state(manager), ArgumentError, MESSAGE):
        manager.fork(other, EngineRequest("a", [1, 2, 3], num_computed_tokens=3))
    forked = EngineRequest("c", [1, 2, 3], num_computed_tokens=3)
    assert manager.fork(other, forked) is not None
    with refused(lambda: manager_state(manager), ArgumentError, "request 'c': got another object"):
        manager.free(EngineRequest("c", [1, 2, 3], num_computed_tokens=3))
    manager.free(forked)


@pytest.mark.parametrize("num_tokens", [3, 10])
def test_a_request_that_waits_beside_another_with_its_id_is_refused_once_that_holds_pages(num_tokens: int) -> None:
    """Look-ups before do not help it, and neither counts as the other's."""
    manager = make_manager(FULL)
    first, second = (EngineRequest("a", list(range(start, start + num_tokens))) for start in (0, 50))
    for request in (first, second):
        assert manager.get_computed_pages(request)[1] == 0
    manager.allocate_slots(first, num_tokens)
    assert manager.stats().queries.num_queried_tokens == 0, "the look-up was the second one's"
    for call in (CALLS["get_computed_pages"], CALLS["probe"], CALLS["allocate_slots"], CALLS["free"]):
        with refused(lambda: manager_state(manager), ArgumentError, MESSAGE):
            call(manager, second)
    first.num_computed_tokens = num_tokens
    manager.free(first)
    hits, num_hit_tokens = manager.get_computed_pages(second)
    assert num_hit_tokens == 0
    assert manager.allocate_slots(second, num_tokens, 0, hits) is not None
    with refused(lambda: manager_state(manager), ArgumentError, MESSAGE):
        manager.free(first)
    manager.free(second)
    assert manager.probe(EngineRequest("b", [*range(num_tokens), 7])).num_hit_tokens == num_tokens // 4 * 4


def test_a_preempted_request_may_return_as_another_object() -> None:
    manager = make_manager(FULL)
    first = EngineRequest("a", list(range(10)))
    manager.allocate_slots(first, 10)
    manager.free(first, num_computed_tokens=0)
    returned = EngineRequest("a", list(range(10)))
    manager.allocate_slots(returned, 10)
    returned.num_computed_tokens = 10
    manager.free(returned)
    manager.free(first)  # it holds nothing
    assert manager.stats().num_held_pages == 0


def test_of_threads_that_start_requests_with_one_id_only_one_gets_pages() -> None:
    for seed in range(20):
        manager = make_manager(FULL)
        served: list[EngineRequest] = []

        def serve(rng: Random, number: int, manager: CacheManager = manager, served: list[EngineRequest] = served) -> None:
            request = EngineRequest("a", [number] * 6)
            try:
                manager.allocate_slots(request, 6)
            except ArgumentError:
                return
            served.append(request)

        run_threads(4, seed, serve)
        assert len(served) == 1
        manager.free(served[0])
        assert manager.stats().num_held_pages == 0


def test_the_drop_in_tells_requests_apart_by_id_alone() -> None:
    """As EasyDeL's manager does."""
    manager = easydel.CacheManager(20, make_manager(FULL).kv_cache_groups, 64)
    first, second = EngineRequest("a", list(range(3))), EngineRequest("a", list(range(50, 53)))
    pages = manager.allocate_slots(first, 3)
    assert pages is not None
    assert pages.get_page_ids() == ([1],)
    assert manager.allocate_slots(second, 3) is not None
    assert manager.get_page_ids("a") == ([1],)
    manager.free(second)
    assert manager.get_page_ids("a") == ([],)


@pytest.mark.parametrize(("name", "value"), [("cache_salt", "bob"), ("lora_id", 2), ("cache_salt", None)])
def test_a_request_that_comes_back_with_another_salt_or_adapter_does_not_hit_its_old_pages(name: str, value: Any) -> None:
    manager = make_manager(FULL, num_pages=32)
    request = EngineRequest("chat", list(range(13)), cache_salt="alice", lora_id=1)
    manager.allocate_slots(request, 13)
    request.num_computed_tokens = 13
    manager.free(request)
    assert manager.probe(request).num_hit_tokens == 12
    setattr(request, name, value)
    request.num_computed_tokens = 0
    assert manager.probe(request).num_hit_tokens == 0
    assert manager.get_computed_pages(request)[1] == 0
    setattr(request, name, "alice" if name == "cache_salt" else 1)
    manager.free(request)
    assert manager.get_computed_pages(request)[1] == 12


@pytest.mark.parametrize("others", [{"lora_id": 2}, {"cache_salt": "bob"}, {"prompt_embeds": np.ones((13, 2))}])
def test_a_fork_of_images_without_features_has_the_other_keys_of_its_source(others: dict[str, Any]) -> None:
    manager = make_manager(FULL, num_pages=32)

    def make(request_id: str, **attributes: Any) -> Any:
        request: Any = type("Own", (), {})()
        vars(request).update(request_id=request_id, all_token_ids=[0] * 13, num_tokens=13, num_computed_tokens=0)
        vars(request).update(sampling_params=None, status=1, has_vision=True, lora_id=1)
        vars(request).update(attributes)
        return request

    source = make("source")
    manager.allocate_slots(source, 13)
    source.num_computed_tokens = 12
    with pytest.raises(ArgumentError, match="that are not those of request 'source', allowed: the same"):
        manager.fork(source, make("child", num_computed_tokens=12, **others))
    manager.fork(source, make("child", num_computed_tokens=12))
    manager.check()
