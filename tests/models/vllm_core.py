"""An engine core of vLLM with an executor that computes nothing: ``python vllm_core.py MODE MODEL [damaged]``.

Modes: "inproc" (two engine cores in this process), "fork" and "spawn" (one in a child of vLLM's client), "llm" (one behind
`LLM`, in a child). MODEL is a folder with a ``config.json``. With "damaged", another package wraps a method of the block pool.
Prints what the engines did, and with which pools, as one line of JSON. Nothing here loads a plug-in: vLLM does, or nobody.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

from pagepool.compat import vllm
from pagepool.compat.patching import find_objects

MAX_MODEL_LEN = 256
NUM_BLOCKS = 24  # fewer than six requests need
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
SAMPLING = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
WAVES = [[[1 + i % 2] * (45 + i) for i in range(6)], [[i % 4] * 70 for i in range(3)]]
"""Prompts: those of a wave run together, and share prefixes with each other and with the wave before."""


class IdleExecutor(Executor):
    """Samples the number of the step for each request, and keeps what each step was told about blocks."""

    def _init_executor(self) -> None:
        self.steps: list[Any] = []

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> list[Any]:
        """Answer as one worker, with None for whatever a worker that computes nothing need not do."""
        answers = {
            "get_kv_cache_spec": lambda: {"layer": SPEC},
            "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
            "determine_available_memory": lambda: NUM_BLOCKS * SPEC.page_size_bytes,
            "get_supported_tasks": lambda: ("generate",),
            "describe": lambda: json.dumps(describe(self.steps)),
        }
        return [answers.get(method, lambda: None)()]

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        names = list(scheduled.num_scheduled_tokens)
        if names:
            self.steps.append(describe_step(scheduled))
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[len(self.steps)] for _ in names])
        future: Future[Any] = Future()
        future.set_result(output)
        return future if non_block else output


def describe_step(scheduled: SchedulerOutput) -> list[Any]:
    """Return the step's requests, their tokens and blocks. `LLM` appends something random to the names of requests."""
    cached = scheduled.scheduled_cached_reqs
    return [
        [(cut(new.req_id), new.num_computed_tokens, new.block_ids) for new in scheduled.scheduled_new_reqs],
        [*zip(map(cut, cached.req_ids), cached.num_computed_tokens, cached.new_block_ids, strict=True)],
        sorted(map(cut, cached.resumed_req_ids)),
        {cut(name): num_tokens for name, num_tokens in scheduled.num_scheduled_tokens.items()},
    ]


def cut(name: str) -> str:
    return name.partition("-")[0]


def describe(steps: list[Any]) -> dict[str, Any]:
    """Describe an engine, in its process. Checks the pools there."""
    pools = find_objects((BlockPool,))
    for pool in pools:
        vllm.check(pool)
    return {
        "process": type(multiprocessing.current_process()).__name__,
        "is_installed": vllm.is_installed(),
        "pools": [sorted({type(part).__module__ for part in (pool.free_block_queue, *pool.blocks)}) for pool in pools],
        "steps": steps,
    }


def damage() -> None:
    """Wrap a method, as another plug-in may do. The pool works as before."""
    touch = BlockPool.touch
    BlockPool.touch = lambda *arguments, **options: touch(*arguments, **options)


def make_config(model: str) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(block_size=SPEC.block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=1024, is_encoder_decoder=False, async_scheduling=False
        ),
        parallel_config=ParallelConfig(distributed_executor_backend=IdleExecutor),
    )


def run_wave(client: Any, number: int) -> dict[str, list[int]]:
    """Run a wave's requests, and return their tokens. In a child, none runs before all have arrived: so steps are the same."""
    call = getattr(client, "call_utility", lambda *arguments: None)
    tokens: dict[str, list[int]] = {f"{number}.{i}": [] for i in range(len(WAVES[number]))}
    call("pause_scheduler", "keep", False)
    for name, prompt in zip(tokens, WAVES[number], strict=True):
        client.add_request(EngineCoreRequest(name, prompt, None, SAMPLING, None, 0.0, None, None, None))
    call("resume_scheduler")
    num_running = len(tokens)
    while num_running:
        for output in client.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            num_running -= output.finish_reason is not None
    return tokens


def run_client(mode: str, config: VllmConfig) -> Iterator[dict[str, Any]]:
    """Run an engine core in a child, or two in this process: the second is built while the first is alive."""
    clients = []
    for _ in range(2 if mode == "inproc" else 1):
        clients.append(EngineCoreClient.make_client(mode != "inproc", False, config, IdleExecutor, False))
        tokens = [run_wave(clients[-1], number) for number in range(len(WAVES))]
        yield {"tokens": tokens} | json.loads(clients[-1].collective_rpc("describe")[0])
    for client in clients:
        client.shutdown(timeout=0)


def run_llm(model: str) -> Iterator[dict[str, Any]]:
    """Run an engine behind vLLM's front end, one prompt after the other."""
    from vllm import LLM

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=SPEC.block_size,
        distributed_executor_backend=IdleExecutor,
    )
    prompts = [{"prompt_token_ids": prompt} for wave in WAVES for prompt in wave]
    outputs = [llm.generate(prompt, SAMPLING, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    tokens = [[*output.token_ids] for output in outputs]
    yield {"tokens": tokens} | json.loads(llm.collective_rpc("describe")[0])


def main(mode: str, model: str) -> None:
    if mode == "llm":
        engines = run_llm(model)
    else:
        config = make_config(model)
        if mode != "inproc":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = mode  # on a CPU the configuration has set it to "spawn"
        engines = run_client(mode, config)
    answer = {"engines": [*engines], "is_installed": vllm.is_installed()}
    print(json.dumps(answer), flush=True)


if sys.argv[3:] == ["damaged"]:
    damage()  # in a child that is spawned too
if __name__ == "__main__":
    main(*sys.argv[1:3])
