"""Rows of a batch beside the model of a run."""

from __future__ import annotations

import pytest
from run_workload import CALLS, SETTINGS, Setting, compare_runs

CALM = [call for call in CALLS if call not in ("trim", "fork", "fail", "preempt")]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_do_what_runs_do(setting: Setting) -> None:
    for seed in range(2):
        compare_runs(setting, seed, 60)
    compare_runs(setting, 2, 80, CALM)  # rows get further


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_do_what_runs_do_for_long(setting: Setting) -> None:
    for seed in range(100, 140):
        compare_runs(setting, seed, 250)
        compare_runs(setting, seed, 250, CALM)
