"""Runs vLLM's own tests of its managers with and without pagepool: ``python tests/models/vllm_own_tests.py FOLDER [ARGS]``.

FOLDER is the folder ``tests`` of vLLM's source distribution, of the installed version. ARGS are for pytest, with paths relative
to FOLDER's parent; `TESTS` by default. Fails if a test fails with pagepool that passes without.

This is the plugin of both runs too, and installs pagepool in the second one. The tests look models up on a hub, by name:
folders of these names with tiny configurations take their place. What needs more of a model fails in both runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = ("tests/v1/core", "tests/v1/test_kv_cache_spec_registry.py", "tests/v1/test_request.py")
PASSED = ("passed", "xfailed", "xpassed", "skipped")
INSTALLS, RESULTS = "PAGEPOOL_OWN_TESTS_INSTALL", "PAGEPOOL_OWN_TESTS_RESULTS"
FIXED = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
VISION = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "num_hidden_layers": 24}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": LLAMA,
    "vision_config": VISION,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT,
    "hmellor/tiny-random-LlamaForCausalLM": LLAMA,
    "Qwen/Qwen3-0.6B": QWEN,
    "Qwen/Qwen1.5-7B": QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llava-hf/llava-1.5-7b-hf": LLAVA,
    "Qwen/Qwen2.5-VL-3B-Instruct": LLAVA,  # for tests that want any model with images
}
WORDS = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 2}, "unk_token": "<unk>"}
IMAGE_TOKENS = {"image": 576}
TOKENIZER = {
    "tokenizer.json": {"version": "1.0", "added_tokens": [], "model": WORDS},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"},
}

outcomes: dict[str, str] = {}


# --- the plugin ---------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Install pagepool before vLLM's tests bind its names, and describe a model whose own module needs more than there is."""
    describe_llava()
    if INSTALLS in os.environ:
        import pagepool.compat.vllm

        pagepool.compat.vllm.install(strict=True)


def describe_llava() -> None:
    """Let vLLM know of Llava what it asks about a model, without its module and processor: it is Llama's, with images."""
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry
    from vllm.multimodal.encoder_budget import compute_mm_encoder_budget
    from vllm.v1.core.sched import scheduler

    inspect = registry._LazyRegisteredModel.inspect_model_cls

    def inspect_model_cls(model: Any) -> Any:
        if model.class_name != "LlavaForConditionalGeneration":
            return inspect(model)
        text_model = registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
        return dataclasses.replace(text_model, architecture=model.class_name, supports_multimodal=True)

    def make_budget(vllm_config: Any, _: Any) -> Any:
        compute, size = compute_mm_encoder_budget(vllm_config.scheduler_config, IMAGE_TOKENS)
        return SimpleNamespace(encoder_compute_budget=compute, encoder_cache_size=size, mm_max_toks_per_item=IMAGE_TOKENS)

    registry._LazyRegisteredModel.inspect_model_cls = inspect_model_cls
    ModelConfig._supports_multimodal_inputs = lambda config: config.is_multimodal_model
    scheduler.MultiModalBudget = make_budget


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test: of its call, or of what failed before or after it."""
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    Path(os.environ[RESULTS]).write_text(json.dumps(outcomes))


# --- the command --------------------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    """Write the models' configurations, and a tokenizer of two words: a model's name is then a path."""
    for name, configuration in CONFIGURATIONS.items():
        (folder / name).mkdir(parents=True)
        files = {"config.json": {"torch_dtype": "float16", **configuration}, **TOKENIZER}
        for file, content in files.items():
            (folder / name / file).write_text(json.dumps(content))


def run_tests(folder: Path, args: list[str], installs: bool) -> dict[str, str]:
    """Run tests in a folder, and return the outcomes by test."""
    results = folder / f"results_{installs}.json"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | FIXED | {"PYTHONPATH": path, RESULTS: str(results)} | ({INSTALLS: "1"} if installs else {})
    environment.pop("PYTHONSAFEPATH", None)  # the folder's tests import each other by the folder's name
    plugins = ["--continue-on-collection-errors", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--rootdir", str(folder)]
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
