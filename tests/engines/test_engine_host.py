"""The engine of examples/ with a host tier behind a device pool that evicts all the time: its answers are the dense model's."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

from engine_workload import (  # noqa: E402
    AHEAD,
    HYBRID_WEIGHTS,
    MODELS,
    SEED,
    WEIGHTS,
    BatchInBetween,
    Engine,
    SamplingParams,
    Weights,
    answer_densely,
    check_answers,
    check_outputs,
    check_rest,
    exact_float32,  # noqa: F401
    fail_at_random,
    let_steps_fail,
    make_asks,
    make_engine,
    run_all,
    run_command,
)

scheduler = pytest.importorskip("scheduler")

SMALL = {"num_pages": 30, "num_host_pages": 300}
NEVER, ALWAYS = {"prefill_rate": math.inf}, {"host_bandwidth": math.inf}
"""Swap preempted requests never, or whenever it works."""
CHOICES = pytest.mark.parametrize("choice", [NEVER, ALWAYS], ids=["never", "always"])


def check_host(engine: Engine, choice: dict[str, float]) -> None:
    """Assert that all ways of the tier were gone."""
    assert engine.host_tier is not None
    stats = engine.host_tier.stats()
    print(stats, engine.scheduler.num_preemptions, engine.scheduler.num_swaps)
    assert stats.num_saved_pages > 50
    assert stats.num_loaded_pages > 25
    assert stats.num_in_flight == 0 or engine.runner.host_pages.wait()
    assert (engine.scheduler.num_swaps > 0) == (choice is ALWAYS)


class LosingBatch(BatchInBetween):
    """A batch none of whose rows can go back."""

    num_lost = 0

    def rewind(self, failed: Any) -> tuple[list[int], list[int]]:
        rewound, lost = self.batch.rewind(failed)
        self.num_lost += len(rewound + lost)
        return [], rewound + lost


@AHEAD
@CHOICES
@MODELS
def test_answers_with_a_pool_that_evicts_all_the_time(weights: Weights, choice: dict[str, float], num_ahead: int) -> None:
    engine, asks = make_engine(weights, **SMALL, **choice, max_steps_ahead=num_ahead), make_asks(18)
    if choice is NEVER:
        check_answers(engine, asks, weights)
    else:
        check_outputs(engine, asks, weights)
    check_host(engine, choice)


@AHEAD
def test_transfers_and_steps_that_fail_at_random(monkeypatch: pytest.MonkeyPatch, num_ahead: int) -> None:
    """A page that failed to load has what was there before; a token that was computed from it is computed again."""
    weights = HYBRID_WEIGHTS
    engine = make_engine(weights, num_host_pages=300, **ALWAYS, max_steps_ahead=num_ahead)
    num_failed = fail_at_random(monkeypatch)
    let_steps_fail(engine, Random(SEED), 0.05)
    run_all(engine, make_asks(18), weights)
    print(num_failed)
    assert min(num_failed["save"], num_failed["load"]) > 2
    check_host(engine, ALWAYS)


@MODELS
def test_requests_that_cannot_go_back_wait_again(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(weights, **SMALL)
    fail_at_random(monkeypatch)
    engine.scheduler.batch = batch = LosingBatch(engine.scheduler.batch)
    check_outputs(engine, make_asks(90), weights)  # so many, for how many rows are lost depends on when transfers end
    assert batch.num_lost > 3


@MODELS
def test_a_swapped_request_is_not_computed_again(weights: Weights) -> None:
    engine, params = make_engine(weights, num_pages=20, num_host_pages=100, **ALWAYS), SamplingParams(20)
    requests = [engine.add(list(range(first, first + 21)), params) for first in (0, 30, 60)]
    computed: Counter[Any] = Counter()
    update = engine.update

    def count_computed(step: Any, chunks: Any, next_tokens: Any) -> Any:
        for request, start, stop, _ in chunks:
            computed[request] += stop - start
        return update(step, chunks, next_tokens)

    engine.update = count_computed  # type: ignore[method-assign]
    list(engine.stream())
    assert engine.scheduler.num_swaps > 0
    assert [computed[request] for request in requests] == [21 + 20 - 1] * 3
    assert [request.output for request in requests] == [
        answer_densely(request.token_ids[:21], params, weights) for request in requests
    ]
    check_rest(engine)


@pytest.mark.parametrize(
    ("num_computed", "host_bandwidth", "prefill_rate", "is_cheaper"),
    [
        (12, 1000.0, 10.0, True),
        (12, 500.0, 10.0, False),
        (12, 1000.0, 20.0, False),
        (11, 1000.0, 10.0, False),
        (40, 1000.0, 10.0, True),
    ],
)
def test_the_rule_for_swaps(num_computed: int, host_bandwidth: float, prefill_rate: float, is_cheaper: bool) -> None:
    """Three pages of 100 bytes and one of 250 move both ways: 1.1 s at 1000 bytes a second. 11 tokens take as long."""

    batch = SimpleNamespace(num_computed_tokens=[num_computed], get_page_ids=lambda row: ([1, 2, 3], [4]))
    costs = scheduler.SwapCosts([100, 250], host_bandwidth, prefill_rate)
    assert costs.is_swap_cheaper(batch, 0) == is_cheaper


def test_requests_that_take_longer_to_move_are_computed_again() -> None:
    engine = make_engine(num_pages=20, num_host_pages=100, host_bandwidth=1.0)
    for first in (0, 30, 60):
        engine.add(list(range(first, first + 21)), SamplingParams(20))
    list(engine.stream())
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_swaps == 0


def test_the_command_reports_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--num-host-pages=100"]):
        run_command(WEIGHTS, tmp_path, "--max-model-len=128", "--max-tokens=8", *options)
        texts.append(capsys.readouterr().out)
    assert ["Pages saved to the host: " in text for text in texts] == [False, True]
    plain, other = ([line.rpartition(" (")[0] for line in text.splitlines() if " -> '" in line] for text in texts)
    assert plain == other
