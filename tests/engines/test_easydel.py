"""EasyDeL's engine with and without pagepool, if it is installed: the same schedules and the same tokens.

The engine's own tests are run too where the folder ``EASYDEL_TESTS``, or the environment variable, says where they are.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sources import INSTALLED, MODELS, ROOT

from pagepool.compat import easydel

interface = pytest.importorskip("easydel.inference.esurge.core.interface")
pytestmark = pytest.mark.filterwarnings("default")

from easydel_scheduler import Plan, make_scheduler, serve  # noqa: E402

GEOMETRY: dict[str, Any] = {"page_size": 8, "num_kv_heads": 1, "head_size": 8, "dtype": "float32", "use_mla": False}
FULL = interface.FullAttentionSpec(**GEOMETRY)
WINDOW = interface.SlidingWindowSpec(sliding_window=24, **GEOMETRY)
CHUNK = interface.ChunkedLocalAttentionSpec(attention_chunk_size=32, **GEOMETRY)
CHUNKED_PREFILL = {"chunked_prefill_enabled": True, "long_prefill_token_threshold": 32}
PLANS = {
    "roomy": Plan([FULL], 1000),
    "short of pages": Plan([FULL], 40),
    "chunked prefill, short of pages": Plan([FULL], 40, options=CHUNKED_PREFILL),
    "window": Plan([WINDOW], 60),
    "full and window, short of pages": Plan([FULL, WINDOW], 80),
    "full and chunk, short of pages": Plan([FULL, CHUNK], 80),
    "two shards": Plan([FULL], 200, num_shards=2),
    "asynchronous": Plan([FULL], 1000, is_async=True),
    "asynchronous, short of pages": Plan([FULL], 40, is_async=True),
}


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Keep the scheduler from logging every request."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PLANS)
def test_the_scheduler_decides_the_same(name: str, seed: int) -> None:
    """The same in every step: tokens of each request, page ids, preemptions, common prefixes and free pages."""
    plan = PLANS[name]
    expected = list(serve(make_scheduler(plan), plan, seed))
    with easydel.installed():
        scheduler = make_scheduler(plan)
    manager = scheduler.kv_cache_manager
    assert type(manager).__module__ == "pagepool.compat.easydel"
    assert list(serve(scheduler, plan, seed)) == expected
    manager.check()
    if "short of pages" in name:
        assert manager.page_pool.stats.num_evicted_pages
        assert any(step.preempted for step in expected)


def run_engine(
    folder: Path, launcher: tuple[str, ...], *pools: str, program_name: str = "tiny_engine.py"
) -> list[dict[str, Any]]:
    """Return what a program with an engine prints, in a separate process: what `tiny_engine` generates in these pools."""
    program = MODELS / program_name
    path = [] if INSTALLED else [str(ROOT)]
    env = os.environ | {
        "ENABLE_DISTRIBUTED_INIT": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, *launcher, str(program), str(folder), *pools]
    process = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def test_the_engine_generates_the_same(tmp_path: Path) -> None:
    own = run_engine(tmp_path, (), "200", "28")
    ours = run_engine(tmp_path, ("-m", "pagepool.compat.easydel"), "200", "28", "200async")
    assert {module.split(".")[0] for run in own for module in run["modules"]} == {"easydel"}
    assert {module.split(".")[0] for run in ours for module in run["modules"]} == {"pagepool"}
    assert len(own[0]["tokens"]) > 20
    for run in [*own, *ours]:
        assert run["tokens"] == own[0]["tokens"]
    roomy, small, _ = ours
    assert roomy["num_hit_tokens"]
    assert (roomy["num_preemptions"], roomy["num_evictions"]) == (0, 0)
    assert small["num_preemptions"]
    assert small["num_evictions"]
    assert own[1]["num_preemptions"]


def test_a_hybrid_answers_the_same_twice(tmp_path: Path) -> None:
    """A hit would start from a zero state. That changes the second answer where it is asked for, and without pagepool."""
    launcher = ("-m", "pagepool.compat.easydel")
    guarded, asked = run_engine(tmp_path, launcher, "0", "1", program_name="hybrid_engine.py")
    [own] = run_engine(tmp_path, (), "0", program_name="hybrid_engine.py")
    warning = "prefix caching is off: 1 recurrent layer keeps no state that a hit could start from"
    assert (guarded["module"], own["module"]) == ("pagepool.compat.easydel", "easydel.inference.esurge.core.manager")
    assert (guarded["warnings"], asked["warnings"], own["warnings"]) == ([warning], [], [])
    assert guarded["tokens"][0] == guarded["tokens"][1] == asked["tokens"][0] == own["tokens"][0]
    assert asked["num_hit_tokens"] == [0, 96]
    assert asked["tokens"][1] == own["tokens"][1] != own["tokens"][0]


WHITE_BOX = "test_allocate_slots_rolls_back_saved_prefix_pages_on_shard_allocation_error"
"""Make a manager without its constructor, and count the calls that the engine's own makes inside."""


@pytest.mark.skipif("EASYDEL_TESTS" not in os.environ, reason="EASYDEL_TESTS names no folder with the engine's own tests")
def test_the_engines_own_tests_pass() -> None:
    folder = Path(os.environ["EASYDEL_TESTS"]) / "inference"
    patterns = ("scheduler_*", "cache_manager_*", "dp_page_sharding", "sequence_buffer_*")
    files = sorted(str(path) for pattern in patterns for path in folder.glob(f"test_{pattern}.py"))
    options = ["-q", "-p", "no:cacheprovider", "-p", "pagepool", "-k", f"not {WHITE_BOX}"]
    env = os.environ | {easydel.VARIABLE: "1", "JAX_PLATFORMS": "cpu", "ENABLE_DISTRIBUTED_INIT": "0"}
    assert files
    subprocess.run([sys.executable, "-m", "pytest", *options, *files], env=env, timeout=600, check=True)
