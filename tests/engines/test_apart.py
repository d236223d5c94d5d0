"""Engines of examples/ for prefill and decode apart: tokens equal to one engine's, what crosses, and what faults cost."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")
for module in ("zmq", "msgspec", "xxhash"):
    pytest.importorskip(module)

from engine_workload import (  # noqa: E402
    KINDS,
    LIMITS,
    WEIGHTS,
    Weights,
    answer_densely,
    check_rest,
    exact_float32,  # noqa: F401
    make_asks,
)

SECRET = b"sixteen bytes or more"


def make_pair(weights: Weights, seconds: float = 60.0, **options: Any) -> tuple[Any, Any]:
    from apart_engines import DecodeEngine, PrefillEngine

    sizes = LIMITS | {"hash_seed": "apart", "num_pages": 96} | options
    return PrefillEngine(weights, SECRET, lease_seconds=seconds, **sizes), DecodeEngine(
        weights, SECRET, seconds=seconds, **sizes
    )


def run_both(prefill: Any, decode: Any) -> None:
    while not decode.is_idle:
        prefill.step()
        decode.step()


def answer(prefill: Any, decode: Any, asks: Any, weights: Weights) -> None:
    requests = [decode.add_remote(*ask, prefill.server.address) for ask in asks]
    run_both(prefill, decode)
    assert [request.output for request in requests] == [answer_densely(*ask, weights) for ask in asks]


@pytest.mark.parametrize("num_ahead", [1], ids=["one step ahead"])
@KINDS
def test_answers_are_those_of_the_dense_model(weights: Weights, num_ahead: int) -> None:
    """In the second turn only pages cross that the decoding engine lacks."""
    prefill, decode = make_pair(weights, max_steps_ahead=num_ahead)
    asks = make_asks(6)
    answer(prefill, decode, asks, weights)
    num_bytes = decode.num_pulled_bytes
    assert decode.num_failed == 0
    assert num_bytes > 0
    answer(prefill, decode, asks, weights)
    assert decode.num_failed == 0
    if weights is WEIGHTS:  # the open page of each prompt, with tokens behind the hit
        assert decode.num_pulled_bytes - num_bytes <= len(asks) * decode.runner.count_page_bytes()[0]
    for engine in (prefill, decode):
        for _ in range(3):
            engine.move_pages()
        check_rest(engine)
        engine.close()


def test_a_prefill_engine_that_ends_costs_time_alone() -> None:
    prefill, decode = make_pair(WEIGHTS, seconds=2.0)
    requests = [decode.add_remote(*ask, prefill.server.address) for ask in make_asks(6)]
    for _ in range(6):
        prefill.step()
        decode.step()
    prefill.close()
    while not decode.is_idle:
        decode.step()
    assert [request.output for request in requests] == [answer_densely(*ask, WEIGHTS) for ask in make_asks(6)]
    assert decode.num_failed > 0
    check_rest(decode)
    decode.close()


def test_a_decode_engine_that_ends_leaves_nothing_behind() -> None:
    prefill, decode = make_pair(WEIGHTS, seconds=2.0)
    for ask in make_asks(6):
        decode.add_remote(*ask, prefill.server.address)
    while not prefill.prompts:
        prefill.step()
        decode.step()
    decode.close()
    while prefill.prompts or not prefill.is_idle:
        prefill.step()
    check_rest(prefill)
    prefill.close()
