"""The choice of a worker: what is cached, what is under way, limits; and the index in a forked process."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from msgspec.msgpack import encode

from pagepool import CacheGroupSpec, CacheManager, EngineRequest, FullAttentionSpec, PageHashing
from pagepool.errors import ArgumentError, ArgumentTypeError, IntegrityError
from pagepool.events import EventBatch, encode_batch
from pagepool.router import PrefixIndex, PrefixRouter, Route

PROMPT = list(range(1000, 1200))


def stored(*hashes: int) -> bytes:
    return encode([0.0, [["BlockStored", hashes, None, [], 16, None]]])


def hashes_of(index: PrefixIndex, token_ids: list[int]) -> list[int]:
    chain = index.hash_tokens(token_ids)
    return [chain[i] & (1 << 64) - 1 for i in range(len(chain))]


def make_router(**options: Any) -> tuple[PrefixIndex, PrefixRouter]:
    index = PrefixIndex(16)
    index.apply(1, stored(*hashes_of(index, PROMPT)[:10]))
    return index, PrefixRouter(index, range(3), **options)


def test_the_least_to_compute_is_chosen() -> None:
    _, router = make_router()
    assert router.choose("a", PROMPT) == Route(1, 160)
    assert router.choose("b", PROMPT) == Route(1, 160)  # 80 tokens there are fewer than 200 elsewhere
    assert router.loads == {0: 0, 1: 80, 2: 0}
    assert [router.choose(i, PROMPT).worker for i in range(5)] == [1, 1, 0, 2, 1]
    router.end("a")
    assert router.remove_worker(1) == ["b", 0, 1, 4]
    assert router.choose("c", PROMPT).worker == 0
    router.add_worker(1)
    assert router.choose("d", PROMPT) == Route(1, 0)


def test_limits() -> None:
    for limit, chosen in ((1.0, [1, 0, 1, 1]), (3.0, [1, 1, 1, 1])):
        _, router = make_router(max_imbalance=limit)
        assert [router.choose(i, PROMPT).worker for i in range(4)] == chosen
    index, router = make_router(max_age=1000.0)
    assert router.choose("a", PROMPT) == Route(0, 0)
    router.note_report(1)
    assert router.choose("b", PROMPT) == Route(1, 160)
    router.note_report(1, -1e9)
    assert router.choose("c", PROMPT) == Route(2, 0)
    assert index.find_tokens(PROMPT).tolist() == [0, 160]
    assert PrefixRouter(index, [5]).choose("empty", []) == Route(5, 0)


def test_the_limit_is_that_of_all_workers_if_some_may_be_chosen() -> None:
    _, router = make_router(max_imbalance=1.0)
    router.choose("a", [7] * 30, among=[1])
    router.choose("b", [7] * 20, among=[0])
    assert router.choose("c", PROMPT, among=[0, 1]) == Route(0, 0)  # both exceed the mean of all, 50 / 3
    router.end("c")
    router.choose("d", [7] * 60, among=[0])
    assert router.choose("e", PROMPT, among=[0, 1]) == Route(1, 160)  # 30 do not exceed 110 / 3
    assert router.choose("f", PROMPT, among=[1]).worker == 1  # there is no other one
    assert router.choose("g", PROMPT, among=[0, 1, 2]).worker == 2


def test_no_request_makes_a_load_negative() -> None:
    """More hashes than the prompt has pages are refused, also if no worker has them."""
    index, router = make_router()
    hashes = hashes_of(index, PROMPT)
    chain = index.hash_tokens(PROMPT)
    for num_tokens, given in (
        (3, hashes[:1]),
        (31, hashes[:2]),
        (159, np.array(hashes[:10], np.uint64)),
        (100, chain),
        (0, [7]),
    ):
        with pytest.raises(ArgumentError, match=f"hashes: got {len(given)}"):
            router.choose_by_hashes("a", num_tokens, given)
    with pytest.raises(ArgumentError, match="hashes: got 2"):
        router.choose_by_hashes("a", 31, iter(hashes[:2]))
    assert router.loads == {0: 0, 1: 0, 2: 0}
    assert router.choose_by_hashes("a", 160, hashes[:10]) == Route(1, 160)
    assert router.choose_by_hashes("b", 170, iter(hashes[:10])) == Route(1, 160)
    assert router.loads == {0: 0, 1: 10, 2: 0}


def test_misuse() -> None:
    index, router = make_router()
    router.choose("a", PROMPT)
    for call in (
        lambda: router.choose("a", PROMPT),
        lambda: router.end("b"),
        lambda: PrefixRouter(index, []).choose("a", PROMPT),
    ):
        with pytest.raises(ArgumentError):
            call()
    for options in ({"max_imbalance": 0.5}, {"max_age": -1}, {"max_imbalance": float("nan")}):
        with pytest.raises(ArgumentError):
            PrefixRouter(index, range(3), **options)
    with pytest.raises(ArgumentTypeError):
        PrefixRouter(None, range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("hash_algo", ["siphash128", "sha256", "sha256_cbor"])
def test_prompts_are_hashed_as_managers_do(hash_algo: str) -> None:
    """With a salt and an adapter."""
    if hash_algo == "sha256_cbor":
        pytest.importorskip("cbor2")
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype="bfloat16", use_mla=False)
    manager = CacheManager(64, [CacheGroupSpec(spec)], 4096, hashing=PageHashing(hash_seed="s", hash_algo=hash_algo))
    manager.enable_events(hashes_as_bytes=True)
    manager.allocate_slots(EngineRequest("a", PROMPT, cache_salt="tenant", lora_id=3), 200)
    index = PrefixIndex(16, hash_seed="s", hash_algo=hash_algo)
    assert not index.apply(0, encode_batch(EventBatch(0.0, manager.take_events())))
    assert index.find_tokens(PROMPT, salt="tenant", adapter=3).tolist() == [192]
    assert index.find_tokens(PROMPT).tolist() == [0]
    assert index.find_tokens(PROMPT, salt="other", adapter=3).tolist() == [0]


@pytest.mark.filterwarnings("ignore:.*fork")  # CPython and JAX warn about the parent's threads
def test_a_child_cannot_use_the_index() -> None:
    """It does not wait for other threads that were inside when it was forked, and makes its own index."""
    index = PrefixIndex(16)
    chain = list(range(1, 20_000))
    is_done = threading.Event()

    def change() -> None:
        while not is_done.is_set():
            index.apply(0, stored(*chain))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            child = multiprocessing.get_context("fork").Process(target=use, args=(index,))
            child.start()
            child.join(30)
            assert child.exitcode == 0
    finally:
        is_done.set()
        thread.join()


def use(index: PrefixIndex) -> None:
    for call in (lambda: index.apply(1, stored(1, 2)), lambda: index.find([1, 2]), index.check):
        with pytest.raises(IntegrityError, match=r"^PrefixIndex: got a call in a forked process"):
            call()
    own = PrefixIndex(16)
    own.apply(1, stored(1, 2))
    assert own.find([1, 2])[1] == 32
    own.check()


make_any: Any = PrefixRouter
WRONG_CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "workers": (lambda router: make_any(PrefixIndex(16), 5), ArgumentTypeError),
    "a worker": (lambda router: router.add_worker("a"), ArgumentTypeError),
    "max_imbalance": (lambda router: make_any(PrefixIndex(16), [0], max_imbalance="1"), ArgumentTypeError),
    "NaN": (lambda router: make_any(PrefixIndex(16), [0], max_age=float("nan")), ArgumentError),
    "a clock": (lambda router: make_any(PrefixIndex(16), [0], clock=5), ArgumentTypeError),
    "no tokens": (lambda router: router.choose("b", None), ArgumentTypeError),
    "tokens in a map": (lambda router: router.choose("b", dict.fromkeys(range(40))), ArgumentTypeError),
    "tokens in a set": (lambda router: router.choose("b", set(range(40))), ArgumentTypeError),
    "an array without a length": (lambda router: router.choose("b", np.array(5)), ArgumentTypeError),
    "a float as token": (lambda router: router.choose("b", [1.5] * 20), ArgumentTypeError),
    "a request without a hash": (lambda router: router.choose([], [1]), ArgumentTypeError),
    "the end of one": (lambda router: router.end([]), ArgumentTypeError),
    "among": (lambda router: router.choose("b", [1], among=5), ArgumentTypeError),
    "num_tokens": (lambda router: router.choose_by_hashes("b", -1, [1]), ArgumentError),
    "text as hashes": (lambda router: router.choose_by_hashes("b", 1, "12345678"), ArgumentTypeError),
    "a report": (lambda router: router.note_report("a"), ArgumentTypeError),
    "its time": (lambda router: router.note_report(0, "a"), ArgumentTypeError),
    "a report without an end": (lambda router: router.note_report(0, float("inf")), ArgumentError),
    "a report before all": (lambda router: router.note_report(0, -(10**400)), ArgumentError),
    "a report of no time": (lambda router: router.note_report(0, float("nan")), ArgumentError),
    "a worker that goes": (lambda router: router.remove_worker("a"), ArgumentTypeError),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_change_nothing(name: str) -> None:
    router = PrefixRouter(PrefixIndex(16), range(2))
    router.choose("a", list(range(40)))
    call, error = WRONG_CALLS[name]
    with pytest.raises(error):
        call(router)
    assert router.loads == {0: 40, 1: 0}


@pytest.mark.parametrize("among", ["01", b"01", ["0"], [0.5], [True], np.zeros((2, 2), np.int32)], ids=repr)
def test_what_names_no_workers_is_refused(among: Any) -> None:
    router = PrefixRouter(PrefixIndex(16), [0, 1])
    with pytest.raises(ArgumentTypeError, match=r"^among: got .*, allowed: (an int|ints)$"):
        router.choose("a", range(40), among=among)


def test_any_collection_of_workers_and_any_iterable_of_tokens() -> None:
    router = PrefixRouter(PrefixIndex(16), {0, 1})
    for name, among in enumerate(({1}, {1: 0.5}, np.array([1]), iter([1]))):
        assert router.choose(name, iter(range(40)), among=among) == Route(1, 0)


@pytest.mark.parametrize("among", [[], [2], {-1}])
def test_none_of_the_workers_among_those_named_is_refused(among: Any) -> None:
    router = PrefixRouter(PrefixIndex(16), [0, 1])
    with pytest.raises(ArgumentError, match=r"^among: got .*, allowed: at least one of the 2 workers$"):
        router.choose("a", range(40), among=among)
    assert router.choose("a", range(40), among=[1, 2]).worker == 1
    with pytest.raises(ArgumentError, match=r"^workers: got none, allowed: at least one$"):
        PrefixRouter(PrefixIndex(16), []).choose("a", range(40))
