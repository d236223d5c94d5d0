"""Requests for the engine of examples/, and the answers of the dense model. As a program: compares both on all devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dense_model
import jax
import numpy as np
import pytest
from devices import count_compilations

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("engine", reason="examples/ is not here")

from engine import Engine  # noqa: E402
from model import make_weights  # noqa: E402
from request import Request, SamplingParams  # noqa: E402

SEED = 5
VOCAB = 96
MIN_MARGIN = 1e-4
"""A hundred times the error of float32."""

LIMITS: dict[str, Any] = {
    "num_pages": 40,
    "page_size": 4,
    "max_num_reqs": 6,
    "max_num_batched_tokens": 16,
    "max_model_len": 100,
}
WEIGHTS = make_weights(SEED)
Ask = tuple[list[int], SamplingParams]


def make_engine(**options: Any) -> Engine:
    """Return an engine that has compiled all its programs."""
    engine = Engine(WEIGHTS, **{**LIMITS, **options})
    engine.warmup()
    return engine


def make_asks(num_asks: int) -> list[Ask]:
    """Return prompts with common beginnings, some longer than a step's budget, a third of them greedy."""
    rng = np.random.default_rng(SEED)
    beginnings = [rng.integers(0, VOCAB, length).tolist() for length in (13, 26, 40)]
    asks = []
    for i in range(num_asks):
        prompt = beginnings[i % 3] + rng.integers(0, VOCAB, int(rng.integers(1, 24))).tolist()
        temperature, top_k = [(0.0, 0), (1.0, 0), (0.7, 8), (2.0, 3)][i % 4]
        asks.append((prompt, SamplingParams(int(rng.integers(8, 28)), temperature, top_k, seed=i)))
    return asks


@jax.jit
def make_noise(seed: Any, position: Any) -> Any:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (VOCAB,))


def answer_densely(prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the answer of the dense model. Refuses choices so close that another summation order could change them."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + params.max_tokens and token_ids[len(prompt) :][-1:] != [params.stop_token_id]:
        logits = dense_model.compute_logits(WEIGHTS, token_ids)
        noisy = logits + params.temperature * np.asarray(make_noise(params.seed, len(token_ids) - 1))
        by_logit = np.argsort(-logits)
        allowed = by_logit[: params.top_k or VOCAB]
        first, second = (*np.sort(noisy[allowed])[::-1], -np.inf)[:2]
        least, next_one = (*logits[by_logit], -np.inf)[len(allowed) - 1 : len(allowed) + 1]
        assert min(first - second, least - next_one) > MIN_MARGIN, f"seed {SEED}: a choice is too close, take another seed"
        token_ids.append(int(allowed[noisy[allowed].argmax()]))
    return token_ids[len(prompt) :]


def answer_by_engine(engine: Engine, asks: list[Ask]) -> tuple[list[Request], set[Request]]:
    """Return the finished requests, half of which arrive while others run, and those that were preempted."""
    requests = [engine.add(*ask) for ask in asks[: len(asks) // 2]]
    streamed: dict[Request, list[int]] = {}
    preempted: set[Request] = set()
    num_steps = 0
    while engine.waiting or engine.running:
        for request, token_id in engine.step():
            streamed.setdefault(request, []).append(token_id)
        preempted |= {request for request in engine.waiting if request.output}
        num_steps += 1
        if num_steps % 2 == 0 and len(requests) < len(asks):
            requests.append(engine.add(*asks[len(requests)]))
        if num_steps % 8 == 0:
            engine.batch.check()
    assert [streamed[request] for request in requests] == [request.output for request in requests]
    return requests, preempted


def check_answers(engine: Engine, asks: list[Ask]) -> None:
    """The engine's answers are the dense model's, with hits, evictions, preemptions and chunks on the way."""
    print(f"seed {SEED}")
    with count_compilations() as compilations:
        requests, preempted = answer_by_engine(engine, asks)
    assert not compilations
    expected = [answer_densely(*ask) for ask in asks]
    assert [request.output for request in requests] == expected
    check_that_all_happened(engine, preempted)
    check_variety(expected)


def check_that_all_happened(engine: Engine, preempted: set[Request]) -> None:
    """Assert that there were hits, preemptions and evictions, and that nothing is left behind."""
    stats = engine.manager.stats()
    assert stats.queries.num_hit_tokens > 0
    assert stats.preempted_queries.num_requests >= len(preempted)
    assert stats.num_evicted_pages > 0
    assert {request.params.temperature > 0 for request in preempted} == {False, True}
    check_rest(engine)


def check_rest(engine: Engine) -> None:
    """Assert that no row and no page is taken."""
    engine.batch.check()
    assert not engine.batch.is_admitted.any()
    assert engine.manager.page_pool.get_num_free_pages() == LIMITS["num_pages"] - 1
    assert sorted(engine.free_rows) == list(range(LIMITS["max_num_reqs"]))


def check_variety(answers: list[list[int]]) -> None:
    """Assert that the answers vary: a model that repeats itself would hide what it reads."""
    assert len({tuple(answer[:8]) for answer in answers}) == len(answers)
    assert min(len(set(answer)) / len(answer) for answer in answers) > 0.3
    assert len({token_id for answer in answers for token_id in answer}) > VOCAB // 2


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        check_answers(make_engine(num_devices=len(jax.devices())), make_asks(12))
