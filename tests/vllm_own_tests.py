"""Runs vLLM's own tests of its managers with and without pagepool: ``python tests/vllm_own_tests.py FOLDER [ARGS]``.

FOLDER is the folder ``tests`` of vLLM's source distribution of the installed version, ARGS are for pytest (tests, relative to
FOLDER's parent; `TESTS` by default). Fails if a test fails with pagepool that passes without. This is the plugin of both runs too,
which installs pagepool in the second one. Tests look models up on a hub by name: folders of these names with tiny configurations
take their place, and what needs more of a model fails in both runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = ("tests/v1/core", "tests/v1/test_kv_cache_spec_registry.py", "tests/v1/test_request.py")
PASSED = ("passed", "xfailed", "xpassed", "skipped")
INSTALLS, RESULTS = "PAGEPOOL_OWN_TESTS_INSTALL", "PAGEPOOL_OWN_TESTS_RESULTS"
FIXED = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
VISION = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "num_hidden_layers": 24}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT,
    "hmellor/tiny-random-LlamaForCausalLM": LLAMA,
    "Qwen/Qwen3-0.6B": QWEN,
    "Qwen/Qwen1.5-7B": QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llava-hf/llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "text_config": LLAMA,
        "vision_config": VISION,
    },
}

outcomes: dict[str, str] = {}


# --- the plugin ---------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Install pagepool before vLLM's tests bind its names."""
    if INSTALLS in os.environ:
        import pagepool.compat.vllm

        pagepool.compat.vllm.install()


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test: of its call, or of what failed before or after it."""
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    Path(os.environ[RESULTS]).write_text(json.dumps(outcomes))


# --- the command --------------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """Write the models' configurations: a model's name is then a path."""
    for name, configuration in CONFIGURATIONS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"torch_dtype": "float16", **configuration}))


def run_tests(folder: Path, args: list[str], installs: bool) -> dict[str, str]:
    """Run tests in a folder, and return the outcomes by test."""
    results = folder / f"results_{installs}.json"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | FIXED | {"PYTHONPATH": path, RESULTS: str(results)} | ({INSTALLS: "1"} if installs else {})
    environment.pop("PYTHONSAFEPATH", None)  # the folder's tests import each other by the folder's name
    plugins = ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "--rootdir", str(folder)]
    quiet = ["--quiet", "--tb=no", "-W", "ignore", "--show-capture=no", "--no-header", "-r", "N"]
    command = [sys.executable, "-m", "pytest", *plugins, *quiet, *args]
    subprocess.run(command, cwd=folder, env=environment, check=False)
    if not results.exists():
        sys.exit("pytest broke off")
    return json.loads(results.read_text())


def main(tests: str, *args: str) -> None:
    """Run the tests twice, and tell what differs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tests").symlink_to(Path(tests).resolve())
        make_models(folder)
        without, with_pagepool = (run_tests(folder, list(args or TESTS), installs) for installs in (False, True))
    failed = [test for test, outcome in without.items() if outcome not in PASSED]
    broken = [test for test, outcome in without.items() if outcome in PASSED and with_pagepool.get(test) not in PASSED]
    failed_with = sum(outcome not in PASSED for outcome in with_pagepool.values())
    print(f"without pagepool {len(without)} tests, {len(failed)} fail; with it {len(with_pagepool)}, {failed_with} fail")
    print(*(f"fails either way: {test}" for test in failed), sep="\n")
    print(*(f"FAILS WITH PAGEPOOL ONLY: {test}" for test in broken), sep="\n")
    sys.exit(bool(broken) or len(without) == len(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
