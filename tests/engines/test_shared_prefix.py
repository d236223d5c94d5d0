"""The engine of examples/ reads the pages of a shared prefix once, and gives the answers of the dense model."""

from __future__ import annotations

import re
from typing import Any

import pytest

jax = pytest.importorskip("jax", minversion="0.6.1")

from engine_workload import (  # noqa: E402
    HYBRID_WEIGHTS,
    RING_WEIGHTS,
    WEIGHTS,
    Weights,
    exact_float32,  # noqa: F401
    make_asks,
    make_engine,
    run_all,
    run_command,
)


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        (WEIGHTS, {"max_steps_ahead": 1, "num_host_pages": 60}),
        (HYBRID_WEIGHTS, {}),
        pytest.param(RING_WEIGHTS, {"max_steps_ahead": 1, "num_drafts": 1}, marks=pytest.mark.slow),
    ],
    ids=["attention, one step ahead, host", "linear", "ring, one step ahead, drafts"],
)
def test_samples_and_beams_share_their_prompts(weights: Weights, options: dict[str, Any]) -> None:
    engine = make_engine(weights, shares_prefixes=True, **options)
    run_all(engine, make_asks(12), weights)
    assert 0 < engine.sharing.num_saved_pages < engine.sharing.num_row_pages
    assert engine.manager.stats().num_evicted_pages > 0


def test_the_command_prints_the_pages_read(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    options = ["a prompt that is shared by many samples", "--samples=6", "--max-tokens=6", "--temperature=1"]
    texts = []
    for shares_prefixes in (True, False):
        run_command(WEIGHTS, tmp_path, *options, shares_prefixes=shares_prefixes)
        texts.append(capsys.readouterr().out)
    answers = [[line for line in text.splitlines() if "->" in line] for text in texts]
    assert answers[0] == answers[1]
    pages = [re.findall(r"^Pages read in decode steps: ([\d,]+)(?:, row by row ([\d,]+) .*)?\.$", text, re.M) for text in texts]
    [(num_read, num_row_pages)], [(num_unshared, none)] = pages
    assert (num_row_pages, none) == (num_unshared, "")
    assert int(num_read) < 0.7 * int(num_row_pages)
