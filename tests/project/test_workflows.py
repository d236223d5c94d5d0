"""The workflows under .github: what they call exists, and rights and time are limited. `make actionlint` does the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sources import ROOT

yaml = pytest.importorskip("yaml")

FILES = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}  # no source distribution has them
MADE = set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))

DOCUMENTED = set(re.findall(r"^([a-z][a-z-]*):(?!=).*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
CALLED = {
    "easydel-environment",
    "test-core",
    "test-wheel",
    "torch-environment",
    "vllm-environment",
}  # by other targets: test-core by sanitize

each_workflow = pytest.mark.parametrize("name", FILES)


def load(name: str) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(FILES[name].read_text())
    return workflow


def targets_of(job: dict[str, Any]) -> set[str]:
    """Return the make targets that a job's steps name, and those of a matrix over `target`."""
    matrix = job.get("strategy", {}).get("matrix", {})
    named = matrix.get("target", []) + [row["target"] for row in matrix.get("include", [])]
    return {*named, *re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in job.get("steps", [])))}


@each_workflow
def test_make_has_every_target(name: str) -> None:
    assert set().union(*map(targets_of, load(name)["jobs"].values())) <= MADE


@pytest.mark.skipif(not FILES, reason="no workflows are here")
def test_nightly_runs_every_target_that_ends() -> None:
    named = set().union(*map(targets_of, load("nightly.yml")["jobs"].values()))
    assert named | CALLED | {"docs-serve"} == DOCUMENTED


@each_workflow
def test_every_script_exists(name: str) -> None:
    scripts = set(re.findall(r"\.ci/\w+(?:\.py)?", FILES[name].read_text()))
    assert {script for script in scripts if not Path(ROOT, script).exists()} == set()


@each_workflow
def test_every_job_ends_and_rights_are_least(name: str) -> None:
    """What a job may do besides is asked for there. A called workflow has limits of its own."""
    jobs = load(name)["jobs"].items()
    assert [job_name for job_name, job in jobs if "uses" not in job and "timeout-minutes" not in job] == []
    assert load(name)["permissions"] == {"contents": "read"}
    steps = [step for _, job in jobs for step in job.get("steps", [])]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.skipif(not FILES, reason="no workflows are here")
def test_required_waits_for_all_tests() -> None:
    jobs = load("test.yml")["jobs"]
    assert {*jobs["required"]["needs"], "required"} == set(jobs)
