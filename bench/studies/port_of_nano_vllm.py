"""nano-vllm as a rival of `bench.studies.ports`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.studies.port_stubs import (
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    Runs,
    count_pages,
    draw_requests,
    stub_absent,
    stub_package,
)


def stub_modules(folder: Path) -> None:
    """Let its scheduler and inputs be imported."""
    stub_package("nanovllm", folder / "nanovllm")
    stub_absent(["transformers", "nanovllm.models.qwen3", "nanovllm.layers.sampler", "nanovllm.utils.loader"])


def make_config(page_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        kvcache_block_size=page_size,
        num_kvcache_blocks=count_pages(page_size),
        max_num_seqs=MAX_NUM_REQS,
        max_num_batched_tokens=16384,
        max_model_len=MAX_MODEL_LEN,
        eos=-1,
    )


def make_sequences(page_size: int) -> list[Any]:
    from nanovllm.engine.sequence import Sequence
    from nanovllm.sampling_params import SamplingParams

    Sequence.block_size = page_size
    return [
        Sequence(prompt, SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True))
        for prompt, max_tokens in draw_requests()
    ]


class Runner:
    """A runner whose model takes no time."""

    def __init__(self, sampled: Any) -> None:
        self._sampled = sampled

    def run_model(self, token_ids: Any, positions: Any, is_prefill: bool) -> None:
        pass

    def sampler(self, logits: None, temperatures: Any) -> Any:
        return self._sampled[: len(temperatures)]


def make_runs(port: dict[str, Any]) -> Runs:
    """Return the runs of nano-vllm and of its port."""
    import torch
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    sampled = torch.arange(MAX_NUM_REQS)

    def make_own(page_size: int) -> Callable[[], None]:
        runner, scheduler = ModelRunner.__new__(ModelRunner), Scheduler(make_config(page_size))
        runner.block_size = page_size
        for sequence in make_sequences(page_size):
            scheduler.add(sequence)

        def run() -> None:
            while not scheduler.is_finished():
                seqs, is_prefill = scheduler.schedule()
                (runner.prepare_prefill if is_prefill else runner.prepare_decode)(seqs)
                runner.prepare_sample(seqs)
                scheduler.postprocess(seqs, sampled[: len(seqs)].tolist(), is_prefill)

        return run

    def make_port(page_size: int, steps_ahead: int) -> Callable[[], None]:
        scheduler = port["Scheduler"](make_config(page_size), port["Model"](Runner(sampled)), steps_ahead)
        scheduler.waiting.extend(make_sequences(page_size))

        def run() -> None:
            while scheduler.waiting or scheduler.running or scheduler.in_flight:
                scheduler.step()

        return run

    return {
        "own": make_own,
        "port": lambda page_size: make_port(page_size, 0),
        "one step ahead": lambda page_size: make_port(page_size, 1),
    }
