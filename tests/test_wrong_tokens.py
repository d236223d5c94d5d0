"""Invalid token ids and cache groups: a typed error naming the argument, the value and the allowed range, and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, PageTable, RunningBatch
from pagepool.errors import ArgumentError, ArgumentTypeError

SPEC = FullAttentionSpec(4, 1, 8, "float16", False)
PROMPT = [1, 2, 3, 4, 5, -6, 7, 8, 9]


def make_manager(**options: Any) -> CacheManager:
    return CacheManager(16, [CacheGroupSpec(SPEC)], 64, **options)


# --- groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([SPEC], r"got FullAttentionSpec \(at 0\), allowed: CacheGroupSpec"),
        ([CacheGroupSpec(SPEC), None], r"got NoneType \(at 1\), allowed: CacheGroupSpec"),
        ("full", r"got str \(at 0\), allowed: CacheGroupSpec"),
        (SPEC, "got FullAttentionSpec, allowed: a list of CacheGroupSpec"),
        (None, "got NoneType, allowed: a list of CacheGroupSpec"),
        (CacheGroupSpec(SPEC), "got CacheGroupSpec, allowed: a list of CacheGroupSpec"),
    ],
)
def test_a_manager_takes_groups_only(groups: Any, message: str, enable_caching: bool) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^kv_cache_groups: {message}$"):
        CacheManager(16, groups, 64, enable_caching)


# --- requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ("hello", ArgumentTypeError, "prompt_token_ids: got str, allowed: a sequence of ints"),
        ("", ArgumentTypeError, "prompt_token_ids: got str, allowed: a sequence of ints"),
        (None, ArgumentTypeError, "prompt_token_ids: got NoneType, allowed: a sequence of ints"),
        (7, ArgumentTypeError, "prompt_token_ids: got int, allowed: a sequence of ints"),
        (["hello"], ArgumentTypeError, r"prompt_token_ids\[0\] must be an integer, got 'hello'"),
        ([1, 2.0], ArgumentTypeError, r"prompt_token_ids\[1\] must be an integer, got 2.0"),
        ([1, True], ArgumentTypeError, r"prompt_token_ids\[1\] must be an integer, got True"),
        (PROMPT, ArgumentError, r"prompt_token_ids\[5\] must be at least 0, got -6"),
        (np.array(PROMPT), ArgumentError, r"prompt_token_ids\[5\] must be at least 0, got -6"),
    ],
)
def test_a_request_is_made_of_token_ids(token_ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        EngineRequest("a", token_ids)


def test_a_request_takes_any_sequence_of_ints() -> None:
    for token_ids in ([1, 2], (1, 2), np.array([1, 2], dtype=np.int32), range(1, 3)):
        assert EngineRequest("a", token_ids).all_token_ids == [1, 2]
    assert EngineRequest("a", []).all_token_ids == []


@pytest.mark.parametrize(
    ("token_ids", "error"), [(-1, ArgumentError), ([3, -1], ArgumentError), ("3", ArgumentTypeError), (None, ArgumentTypeError)]
)
def test_a_request_generates_token_ids(token_ids: Any, error: type[Exception]) -> None:
    request = EngineRequest("a", [1])
    with pytest.raises(error, match=r"^token_ids"):
        request.append_output_token_ids(token_ids)
    assert request.all_token_ids == [1]


class Slices:
    """Token ids in an engine's own sequence type."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def __getitem__(self, where: slice) -> tuple[int, ...]:
        return tuple(self.token_ids[where])

    def __len__(self) -> int:
        return len(self.token_ids)


def request_of(token_ids: Any) -> EngineRequest:
    """A request whose tokens have not been read."""
    request = EngineRequest("wrong", [])
    request.all_token_ids = token_ids
    return request


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "int32": lambda token_ids: np.array(token_ids, dtype=np.int32),
    "int64": lambda token_ids: np.array(token_ids, dtype=np.int64),
    "own": Slices,
}
CALLS: dict[str, Callable[[CacheManager, EngineRequest], Any]] = {
    "get_computed_pages": lambda manager, request: manager.get_computed_pages(request),
    "probe": lambda manager, request: manager.probe(request),
    "allocate_slots": lambda manager, request: manager.allocate_slots(request, 9),
}


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor", hash], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_a_manager_refuses_negative_tokens(call: str, form: str, hash_algo: Any) -> None:
    if hash_algo == "sha256_cbor":
        pytest.importorskip("cbor2")
    manager = make_manager(hash_algo=hash_algo)
    with pytest.raises(ArgumentError, match=r"^token_ids: got -6 \(at 5\), allowed: at least 0$"):
        CALLS[call](manager, request_of(FORMS[form](PROMPT)))
    assert manager.page_pool.get_num_free_pages() == 15
    assert manager.stats().queries.num_queried_tokens == manager.stats().num_cached_pages == 0
    assert manager.get_page_ids("wrong") == ([],)
    manager.check()


def test_a_manager_refuses_negative_tokens_that_were_generated() -> None:
    """Tokens of the open page are read once it is full."""
    manager = make_manager()
    request = request_of([1, 2, 3, 4, 5])
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 5
    request.all_token_ids += [-1, 7, 8]
    with pytest.raises(ArgumentError, match=r"^token_ids: got -1 \(at 5\), allowed: at least 0$"):
        manager.allocate_slots(request, 3)
    request.all_token_ids[5] = 6
    assert manager.allocate_slots(request, 3) is not None
    assert manager.stats().num_cached_pages == 2
    manager.check()


# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("form", ["list", "int32", "int64"])
def test_a_batch_refuses_negative_tokens(form: str, enable_caching: bool) -> None:
    manager = make_manager(enable_caching=enable_caching)
    batch = RunningBatch(manager, PageTable(3, 16, 64))
    batch.admit(0, [1, 2, 3])
    batch.admit(1, [1, 2, 3])
    stats = manager.stats()
    tokens = FORMS[form]
    for call in (
        lambda: batch.admit(2, tokens(PROMPT)),
        lambda: batch.step([0, 1], tokens([4, -6])),
        lambda: batch.append([0, 1], tokens([4, -6])),
    ):
        with pytest.raises(ArgumentError, match=r"^token_ids: got -6 \(at [15]\), allowed: at least 0$"):
            call()
        assert manager.stats() == stats
        assert batch.num_tokens.tolist() == batch.num_computed_tokens.tolist() == [3, 3, 0]
        assert batch.is_admitted.tolist() == [True, True, False]
        batch.check()
    assert batch.step([0, 1], tokens([4, 5])).num_grown == 2
    assert batch.admit(2, tokens([1, 2, 3, 4, 5])) == (4 if enable_caching else 0)
    batch.check()
