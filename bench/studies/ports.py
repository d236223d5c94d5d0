"""CPU time of nano-vllm's scheduler, inputs and ends, and of those of its port in docs/ports/: a figure of that page.

Both run in this process, in turn, with a model that takes no time. The copies to the device are left out, since there is none:
a tensor is its own copy. `NANO_VLLM` names the folder of nano-vllm's sources, which need torch and xxhash.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from types import ModuleType, SimpleNamespace
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "ports" / "nano-vllm.md"
NUM_REQUESTS, LONGEST, MAX_MODEL_LEN = 400, 1024, 4096
UNUSED = ("transformers", "nanovllm.models.qwen3", "nanovllm.layers.sampler", "nanovllm.utils.loader")
"""Modules that scheduler and inputs import, and do not use."""


class Absent(ModuleType):
    """A module whose names are all the same class."""

    def __getattr__(self, name: str) -> Any:
        return object


class Stream:
    """A stream whose work is done at once."""

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


def stub_device(torch: Any) -> None:
    """Let tensors of the device be those of the host."""
    make = torch.tensor
    torch.set_num_threads(1)
    torch.tensor = lambda *args, pin_memory=False, **options: make(*args, **options)
    torch.Tensor.cuda, torch.Tensor.pin_memory = (lambda self, **_: self), torch.Tensor.clone
    torch.cuda.current_stream = Stream


def make_config(page_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        kvcache_block_size=page_size,
        num_kvcache_blocks=NUM_REQUESTS * 2 * LONGEST // page_size + NUM_REQUESTS + 1,
        max_num_seqs=512,
        max_num_batched_tokens=16384,
        max_model_len=MAX_MODEL_LEN,
        eos=-1,
    )


def draw_requests(make_request: Callable[[list[int], int], Any]) -> list[Any]:
    """Draw requests as nano-vllm's own benchmark does: prompts of 100 to 1024 tokens, and answers too."""
    rng = Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, LONGEST))] for _ in range(NUM_REQUESTS)]
    return [make_request(prompt, rng.randint(100, LONGEST)) for prompt in prompts]


def make_own(config: Any, requests: list[Any], sampled: Any) -> Callable[[], None]:
    """Return a run of nano-vllm's own."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    runner, scheduler = ModelRunner.__new__(ModelRunner), Scheduler(config)
    runner.block_size = config.kvcache_block_size
    for request in requests:
        scheduler.add(request)

    def run() -> None:
        while not scheduler.is_finished():
            seqs, is_prefill = scheduler.schedule()
            (runner.prepare_prefill if is_prefill else runner.prepare_decode)(seqs)
            runner.prepare_sample(seqs)
            scheduler.postprocess(seqs, sampled[: len(seqs)].tolist(), is_prefill)

    return run


class Runner:
    """A runner whose model takes no time."""

    def __init__(self, sampled: Any) -> None:
        self._sampled = sampled

    def run_model(self, token_ids: Any, positions: Any, is_prefill: bool) -> None:
        pass

    def sampler(self, logits: None, temperatures: Any) -> Any:
        return self._sampled[: len(temperatures)]


def make_port(port: dict[str, Any], config: Any, requests: list[Any], sampled: Any, steps_ahead: int) -> Callable[[], None]:
    """Return a run of the port."""
    scheduler = port["Scheduler"](config, port["Model"](Runner(sampled)), steps_ahead)
    scheduler.waiting.extend(requests)

    def run() -> None:
        while scheduler.waiting or scheduler.running or scheduler.in_flight:
            scheduler.step()

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the seconds of each, and how many times less the port takes."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.ports", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="default: 7")
    args = parser.parse_args(arguments)
    folder = os.environ.get("NANO_VLLM")
    if folder is None or not all(importlib.util.find_spec(name) for name in ("torch", "xxhash")):
        parser.exit(0, "Skipped: NANO_VLLM is not set, or torch or xxhash is not installed.\n")
    import torch

    stub_device(torch)
    sys.modules["nanovllm"] = package = ModuleType("nanovllm")  # its own imports the whole engine
    package.__path__ = [str(Path(folder) / "nanovllm")]
    sys.modules |= {name: Absent(name) for name in UNUSED}
    from nanovllm.engine.sequence import Sequence as Request
    from nanovllm.sampling_params import SamplingParams

    port: dict[str, Any] = {"__name__": "port"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), port)

    def make_request(prompt: list[int], max_tokens: int) -> Any:
        return Request(prompt, SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True))

    sampled = torch.arange(512)
    makers: dict[str, Callable[[Any, list[Any]], Callable[[], None]]] = {
        "own": lambda config, requests: make_own(config, requests, sampled),
        "port": lambda config, requests: make_port(port, config, requests, sampled, 0),
        "one step ahead": lambda config, requests: make_port(port, config, requests, sampled, 1),
    }
    print("page size, engine: seconds (from, to), how many times less")
    for page_size in (16, 256):
        Request.block_size, seconds = page_size, {name: [] for name in makers}
        for _ in range(args.repeats):
            for name, make in makers.items():
                run = make(make_config(page_size), draw_requests(make_request))
                start = process_time()
                run()
                seconds[name].append(process_time() - start)
        own = median(seconds["own"])
        for name, each in seconds.items():
            times = f"{median(each):.3f} ({min(each):.3f}, {max(each):.3f})"
            print(f"{page_size}, {name}: {times}, {own / median(each):.1f}")


if __name__ == "__main__":
    main()
