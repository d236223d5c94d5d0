"""The engine of examples/ with a host tier behind a device pool that evicts all the time: its answers are the dense model's."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

from engine_workload import (  # noqa: E402
    AHEAD,
    HYBRID_WEIGHTS,
    KINDS,
    MODELS,
    RING_WEIGHTS,
    SEED,
    WEIGHTS,
    BatchInBetween,
    Engine,
    SamplingParams,
    Weights,
    answer_densely,
    check_answers,
    check_drafts,
    check_outputs,
    check_rest,
    draft_well,
    exact_float32,  # noqa: F401
    fail_at_random,
    let_steps_fail,
    make_asks,
    make_engine,
    run_all,
    run_command,
)

SMALL = {"num_pages": 30, "num_host_pages": 300}


def check_host(engine: Engine, num_loaded_pages: int = 10) -> None:
    """Assert that all ways of the tier were gone, and that more than this number of pages came back."""
    assert engine.host_tier is not None
    stats = engine.host_tier.stats()
    print(stats, engine.scheduler.num_preemptions)
    assert stats.num_saved_pages > 50
    assert stats.num_loaded_pages > num_loaded_pages
    assert stats.num_in_flight == 0 or engine.runner.host_pages.wait()


class LosingBatch(BatchInBetween):
    """A batch none of whose rows can go back."""

    num_lost = 0

    def rewind(self, failed: Any) -> tuple[list[int], list[int]]:
        rewound, lost = self.batch.rewind(failed)
        self.num_lost += len(rewound + lost)
        self.batch.release(rewound)
        return [], rewound + lost


@AHEAD
@KINDS
def test_answers_with_a_pool_that_evicts_all_the_time(weights: Weights, num_ahead: int) -> None:
    engine = make_engine(weights, **SMALL, max_steps_ahead=num_ahead)
    check_answers(engine, make_asks(18), weights)
    check_host(engine)


@AHEAD
def test_transfers_and_steps_that_fail_at_random(monkeypatch: pytest.MonkeyPatch, num_ahead: int) -> None:
    """A page that failed to load has what was there before; a token that was computed from it is computed again."""
    weights = HYBRID_WEIGHTS
    engine = make_engine(weights, num_host_pages=300, max_steps_ahead=num_ahead)
    num_failed = fail_at_random(monkeypatch)
    let_steps_fail(engine, Random(SEED), 0.05)
    run_all(engine, make_asks(18), weights)
    print(num_failed)
    assert min(num_failed["save"], num_failed["load"]) > 2
    check_host(engine)


@pytest.mark.slow
@AHEAD
def test_rings_with_drafts_forks_and_failures(monkeypatch: pytest.MonkeyPatch, num_ahead: int) -> None:
    """Pages of attention come back from the host, rings never do."""
    asks = make_asks(12)
    engine = make_engine(RING_WEIGHTS, num_pages=34, num_host_pages=300, num_drafts=2, max_steps_ahead=num_ahead)
    batch = draft_well(engine, asks, RING_WEIGHTS, num_samples=3)
    fail_at_random(monkeypatch)
    let_steps_fail(engine, Random(SEED), 0.05)
    run_all(engine, asks, RING_WEIGHTS)
    check_drafts(batch)
    check_host(engine, 5)  # how many loads fail depends on when transfers end
    assert engine.num_copied_pages > 10


@pytest.mark.slow
@MODELS
def test_requests_that_cannot_go_back_wait_again(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(weights, **SMALL)
    fail_at_random(monkeypatch)
    engine.scheduler.batch = batch = LosingBatch(engine.scheduler.batch)
    check_outputs(engine, make_asks(90), weights)  # so many, for how many rows are lost depends on when transfers end
    assert batch.num_lost > 3


@MODELS
def test_a_preempted_request_computes_little_again(weights: Weights) -> None:
    """At most the tokens of its open page, or those behind its last checkpoint."""
    engine, params = make_engine(weights, num_pages=20, num_host_pages=100), SamplingParams(20)
    requests = [engine.add(list(range(first, first + 21)), params) for first in (0, 30, 60)]
    computed: Counter[Any] = Counter()
    update = engine.update

    def count_computed(flight: Any, next_tokens: Any) -> Any:
        for request, length in zip(engine.scheduler.find(flight.step.rows), flight.lengths.tolist(), strict=True):
            computed[request] += length
        return update(flight, next_tokens)

    engine.update = count_computed  # type: ignore[method-assign]
    list(engine.stream())
    num_again = sum(computed.values()) - 3 * (21 + 20 - 1)
    print(engine.scheduler.num_preemptions, num_again)
    assert engine.scheduler.num_preemptions > 0
    assert num_again < 16 * engine.scheduler.num_preemptions
    assert [request.output for request in requests] == [
        answer_densely(request.token_ids[:21], params, weights) for request in requests
    ]
    check_rest(engine)


def test_the_command_reports_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--num-host-pages=100"]):
        run_command(WEIGHTS, tmp_path, "--max-model-len=128", "--max-tokens=8", *options)
        texts.append(capsys.readouterr().out)
    assert ["Pages saved to the host: " in text for text in texts] == [False, True]
    plain, other = ([line.rpartition(" (")[0] for line in text.splitlines() if " -> '" in line] for text in texts)
    assert plain == other


@KINDS
def test_an_engine_that_sleeps_answers_as_others_do(weights: Weights) -> None:
    """It drops its arrays every few steps, and hits what the host tier has of them."""
    engine = make_engine(weights, **SMALL, max_steps_ahead=1)
    asks = make_asks(9)
    requests = [engine.add(prompt, params) for prompt, params in asks]
    for num_steps in count(1):
        engine.step()
        if engine.is_idle:
            break
        if num_steps % 5 == 0:
            engine.sleep()
            stats = engine.manager.stats()
            assert stats.num_pages == stats.num_cached_pages == 0
            assert all(isinstance(pages, jax.ShapeDtypeStruct) for pages in jax.tree.leaves(engine.runner.cache))
            engine.wake()
    assert [request.output for request in requests] == [answer_densely(*ask, weights) for ask in asks]
    check_rest(engine)
    assert engine.scheduler.num_preemptions > 10
    again = engine.manager.stats().preempted_queries
    assert again.num_hit_tokens > again.num_queried_tokens / 2


def test_the_command_sleeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for options in (), ("--sleep-every=3",):
        run_command(WEIGHTS, tmp_path, "--max-tokens=4", "--num-host-pages=300", *options, "What is jax?", "What is")
        text = capsys.readouterr().out
        answers.append([line.rpartition("(")[0] for line in text.splitlines() if line.startswith("'")])
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]
