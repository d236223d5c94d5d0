"""Forks in the engine of examples/: samples of a prompt, and beam search, give the answers of the dense model."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

from engine_workload import (  # noqa: E402
    LIMITS,
    MODELS,
    SEED,
    VOCAB,
    WEIGHTS,
    BatchInBetween,
    SamplingParams,
    Weights,
    answer_densely,
    check_beams,
    check_rest,
    check_samples,
    exact_float32,  # noqa: F401
    let_steps_fail,
    make_asks,
    make_engine,
    run_all,
    run_to_end,
    search_densely,
)

from pagepool.errors import OutOfPagesError  # noqa: E402


@MODELS
def test_samples_and_beams_among_other_requests(weights: Weights) -> None:
    engine = make_engine(weights)
    run_all(engine, make_asks(18), weights)
    stats = engine.manager.stats()
    assert stats.queries.num_hit_tokens > 0
    assert stats.num_evicted_pages > 0
    assert engine.scheduler.num_preemptions > 0
    assert engine.num_copied_pages > 30


class ShortBatch(BatchInBetween):
    """A batch that is out of pages at random when it shall fork."""

    def __init__(self, batch: Any, rng: Random) -> None:
        super().__init__(batch)
        self.rng, self.num_refusals = rng, 0

    def fork(self, row: int, targets: list[int]) -> None:
        if self.rng.random() < 0.5:
            self.num_refusals += 1
            raise OutOfPagesError("at random")
        self.batch.fork(row, targets)


@MODELS
def test_forks_and_steps_that_fail_at_random(weights: Weights) -> None:
    """Children for which there are no pages wait, as if they were preempted."""
    engine, rng = make_engine(weights), Random(SEED)
    failures = let_steps_fail(engine, rng, 0.25)
    engine.scheduler.batch = batch = ShortBatch(engine.scheduler.batch, rng)
    run_all(engine, make_asks(9), weights)
    assert len(failures) > 20
    assert batch.num_refusals > 5


@MODELS
def test_samples_compute_their_prompt_once_and_share_its_pages(weights: Weights) -> None:
    engine, prompt = make_engine(weights), list(range(18))
    requests = engine.add_samples(prompt, params := SamplingParams(6, temperature=1.0), 4)
    streamed = [engine.step()]
    while not streamed[-1]:
        streamed.append(engine.step())
    assert [request for request, _ in streamed[-1]] == requests
    pages, *states = zip(*(engine.scheduler.batch.get_page_ids(request.row) for request in requests), strict=True)
    assert [len({ids[i] for ids in pages}) for i in range(5)] == [1, 1, 1, 1, 4]
    assert [len({ids[0] for ids in group}) for group in states] == [4] * len(states)
    assert engine.manager.stats().queries.num_requests == 1
    list(engine.stream())
    check_samples(requests, (prompt, params), weights)
    check_rest(engine)


@MODELS
@pytest.mark.parametrize("prompt", [[5], [5, 6], list(range(17))], ids=len)
def test_more_samples_than_rows(prompt: list[int], weights: Weights) -> None:
    engine = make_engine(weights)
    requests = engine.add_samples(prompt, params := SamplingParams(5, temperature=0.8), 2 * LIMITS["max_num_reqs"])
    list(engine.stream())
    check_samples(requests, (prompt, params), weights)
    check_rest(engine)


def test_searches_that_wait_for_one_another_do_not_wait_for_ever() -> None:
    """Each alone just fits. Without forks their beams wait, and hold pages that the beams of others wait for."""
    engine, rng = make_engine(num_pages=19), Random(SEED)
    engine.scheduler.batch = ShortBatch(engine.scheduler.batch, rng)
    for _ in range(10):
        asks = [(rng.choices(range(VOCAB), k=8), SamplingParams(29)) for _ in range(5)]
        searches = [engine.add_beams(*ask, 2) for ask in asks]
        run_to_end(engine)
    for search, ask in zip(searches, asks, strict=True):
        check_beams(search, ask, WEIGHTS)
    check_rest(engine)


def test_beams_that_stop() -> None:
    """A finished beam stays among the best, or gives way to better ones that go on."""
    engine, prompt, params = make_engine(), list(range(9)), SamplingParams(10)
    for stop_token_id in {token_id for _, answer in search_densely(prompt, params, 3) for token_id in answer[:6]}:
        stopping = replace(params, stop_token_id=stop_token_id)
        search = engine.add_beams(prompt, stopping, 3)
        list(engine.stream())
        check_beams(search, (prompt, stopping), WEIGHTS)
    check_rest(engine)


def test_a_single_beam_is_greedy() -> None:
    engine, prompt = make_engine(), list(range(9))
    search = engine.add_beams(prompt, None, 1)
    list(engine.stream())
    assert search.beams[0].output == answer_densely(prompt, SamplingParams())


@pytest.mark.parametrize(
    ("num_beams", "max_tokens", "message"),
    [
        (0, 5, "num_beams: got 0, allowed: at least 1"),
        (10, 5, "num_beams: got 10, which take 10 rows and 30 pages, of 9 and 39"),
        (4, 40, "num_beams: got 4, which take 4 rows and 44 pages, of 9 and 39"),
    ],
)
def test_searches_that_cannot_run_are_refused(num_beams: int, max_tokens: int, message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"^{message}$"):
        engine.add_beams([1, 2, 3, 4, 5], SamplingParams(max_tokens), num_beams)
    with pytest.raises(ValueError, match=r"^num_samples: got 0, allowed: 1 to 1024$"):
        engine.add_samples([1], SamplingParams(), 0)
    assert engine.is_idle
