"""Engine cores of vLLM itself, with an executor that computes nothing: served by the plug-in, which vLLM loads by itself.

In each process that is tested here vLLM builds its configuration, engine core and scheduler as in an application.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import fake_easydel
import pytest
from fake_vllm import write_distribution
from sources import INSTALLED, MODELS

from pagepool.compat.vllm import STRICT, VARIABLE, VERSIONS
from pagepool.compat.vllm.checks import version_of
from pagepool.compat.vllm.engine import OURS

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.skipif(
    not any(fnmatchcase(version_of(), one) for one in VERSIONS), reason="the executor is one for the known versions of vLLM"
)

PROGRAM = MODELS / "vllm_core.py"
PROCESSES = {"inproc": "_MainProcess", "fork": "ForkProcess", "spawn": "SpawnProcess"}
THEIRS = [["vllm.v1.core.kv_cache_utils"]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "vocab_size": 128,
}
REFUSAL = ": pool: vllm.v1.core.block_pool.BlockPool.touch: got __main__.damage.<locals>.<lambda>, "
WARNING = "allocates with"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs the program with a mode and a value of `VARIABLE`, once each."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    if not INSTALLED:
        write_distribution(folder)
    return cache(partial(run_program, folder))


def run_program(folder: Path, mode: str, value: str, *options: str) -> subprocess.CompletedProcess[str]:
    variables = {
        VARIABLE: value,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    return fake_easydel.run_python(folder, str(PROGRAM), mode, str(folder / "model"), *options, **variables)


def engines_of(process: subprocess.CompletedProcess[str]) -> Any:
    """Return the engines that ended well."""
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)["engines"]


def work_of(engines: Any) -> list[Any]:
    """Return the blocks of all steps, and the tokens, of each engine."""
    return [(engine["steps"], engine["tokens"]) for engine in engines]


@pytest.mark.parametrize("value", ["1", STRICT])
@pytest.mark.parametrize("mode", PROCESSES)
def test_an_engine_core_allocates_with_pagepool(run: Run, mode: str, value: str) -> None:
    """The second one of a process too. The parent of an engine core's process stays as it is."""
    process = run(mode, value)
    engines = engines_of(process)
    assert json.loads(process.stdout)["is_installed"] == (mode == "inproc")
    assert WARNING not in process.stderr
    for number, engine in enumerate(engines, 1):
        assert (engine["process"], engine["is_installed"]) == (PROCESSES[mode], True)
        assert engine["pools"] == [[f"{OURS}.blocks"]] * number
    assert work_of(engines) == work_of(engines_of(run(mode, "")))


@pytest.mark.parametrize("mode", PROCESSES)
def test_an_engine_core_is_vllms_own_if_the_variable_is_off(run: Run, mode: str) -> None:
    process = run(mode, "")
    for number, engine in enumerate(engines_of(process), 1):
        assert (engine["process"], engine["is_installed"]) == (PROCESSES[mode], False)
        assert engine["pools"] == THEIRS * number
    assert not json.loads(process.stdout)["is_installed"]


def test_the_engine_cores_have_hits_and_too_few_blocks(run: Run) -> None:
    """What the other tests compare is worth it, and the same in each kind of process."""
    engines = engines_of(run("inproc", ""))
    assert work_of(engines) == work_of(engines_of(run("fork", "")) * 2) == work_of(engines_of(run("spawn", "")) * 2)
    steps, tokens = work_of(engines)[0]
    assert any(num_computed_tokens for new, *_ in steps for _, num_computed_tokens, _ in new)
    assert any(resumed for _, _, resumed, _ in steps)
    assert {len(sampled) for wave in tokens for sampled in wave.values()} == {60}


@pytest.mark.parametrize("mode", PROCESSES)
def test_an_engine_core_with_a_patched_pool_has_the_other_parts_and_one_warning(run: Run, mode: str) -> None:
    process = run(mode, "1", "damaged")
    engines = engines_of(process)
    [warning] = [line for line in process.stderr.splitlines() if WARNING in line]
    assert "allocates with pagepool, but for pool, hits, slots: `python -m pagepool.compat.vllm` says why" in warning
    assert [engine["is_installed"] for engine in engines] == [True] * len(engines)
    assert engines[-1]["pools"] == [[f"{OURS}.blocks"]] * len(engines)
    assert work_of(engines) == work_of(engines_of(run(mode, "")))


@pytest.mark.parametrize("mode", PROCESSES)
def test_an_engine_core_that_is_refused_does_not_start_if_it_must_not(run: Run, mode: str) -> None:
    process = run(mode, STRICT, "damaged")
    refusals = {line.partition("CompatError: ")[2] for line in process.stderr.splitlines() if "CompatError: " in line}
    assert (process.returncode, process.stdout, len(refusals)) == (1, "", 1), process.stderr
    assert REFUSAL in refusals.pop().replace("__mp_main__", "__main__")
    assert mode == "inproc" or "RuntimeError: Engine core initialization failed" in process.stderr


def test_an_engine_behind_the_front_end(run: Run) -> None:
    """In an application: the front end loads the plug-in as well."""
    engines, theirs = (engines_of(run("llm", value)) for value in ("1", ""))
    assert json.loads(run("llm", "1").stdout)["is_installed"]
    assert [(engine["process"], engine["pools"]) for engine in engines] == [("SpawnProcess", [[f"{OURS}.blocks"]])]
    assert [(engine["process"], engine["pools"]) for engine in theirs] == [("SpawnProcess", THEIRS)]
    assert work_of(engines) == work_of(theirs)
