"""mini-sglang as a rival of `bench.studies.ports`.

The lists of pages that its backend of FlashInfer joins on the device are not joined here, since that takes no time of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.studies.port_stubs import (
    MAX_MODEL_LEN,
    MAX_NUM_REQS,
    Absent,
    Runs,
    Stream,
    count_pages,
    draw_requests,
    stub_absent,
    stub_package,
)

MAX_NUM_TOKENS = 8192


class Logger:
    """A logger that logs nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class Torch:
    """torch, whose `cat` returns its first tensor."""

    def __getattr__(self, name: str) -> Any:
        return (lambda tensors: tensors[0]) if name == "cat" else getattr(sys.modules["torch"], name)


def stub_modules(folder: Path) -> None:
    """Let its scheduler, prefix cache and backend of FlashInfer be imported."""
    root = folder / "python" / "minisgl"
    for name in ("", ".scheduler", ".engine", ".attention"):
        stub_package(f"minisgl{name}", root / name[1:])
    stub_absent(f"minisgl.{name}" for name in ("distributed", "moe", "models", "layers", "kernel"))
    utils: Any = Absent("minisgl.utils")
    utils.__path__, sys.modules["minisgl.utils"] = [str(root / "utils")], utils
    misc, registry = import_module("minisgl.utils.misc"), import_module("minisgl.utils.registry")
    vars(utils).update({name: getattr(misc, name) for name in ("div_ceil", "div_even", "align_down", "align_ceil")})
    utils.Registry, utils.init_logger, utils.nvtx_annotate = registry.Registry, lambda _: Logger(), lambda _: lambda run: run
    names: Any = sys.modules
    names["minisgl.engine"].EngineConfig = names["minisgl.attention"].BaseAttnBackend = object
    names["minisgl.kernel"].fast_compare_key = count_equal
    flashinfer: Any = import_module("minisgl.attention.fi")
    flashinfer.torch, flashinfer.FIMetadata.__post_init__ = Torch(), lambda self: None


def count_equal(first: Any, second: Any) -> int:
    """Return the length of the common prefix of two tensors, which its kernel finds natively."""
    num = min(len(first), len(second))
    places = (first[:num].numpy() != second[:num].numpy()).nonzero()[0]
    return int(places[0]) if len(places) else num


class Output(NamedTuple):
    """The tokens of a step."""

    next_tokens_gpu: Any
    next_tokens_cpu: Any
    copy_done_event: Stream


def make_engine(page_size: int, backend_type: Any) -> SimpleNamespace:
    """Return an engine whose model takes no time."""
    import torch
    from minisgl import core
    from minisgl.engine.sample import Sampler

    core._GLOBAL_CTX = None
    core.set_global_ctx(context := core.Context(page_size))
    context.page_table = torch.zeros(MAX_NUM_REQS + 1, MAX_MODEL_LEN, dtype=torch.int32)
    device, sampled = torch.device("cpu"), torch.arange(MAX_NUM_REQS, dtype=torch.int32)
    backend = backend_type.__new__(backend_type)
    backend.device, backend.config, backend.kvcache = device, SimpleNamespace(head_dim=1), SimpleNamespace(dtype=None)
    backend.qo_head_local = backend.kv_head_local = 1
    backend.decode_wrappers = backend.prefill_wrapper = None
    backend.cached_ones_cpu = torch.zeros(0, dtype=torch.int32)

    def forward_batch(batch: Any, args: Any) -> Output:
        for req in batch.reqs:
            req.complete_one()
        tokens = sampled[: batch.size]
        return Output(tokens, tokens, Stream())

    return SimpleNamespace(
        page_table=context.page_table,
        num_pages=count_pages(page_size),
        attn_backend=backend,
        sampler=Sampler(device, 50000),
        max_seq_len=MAX_MODEL_LEN,
        device=device,
        dummy_req=SimpleNamespace(complete_one=lambda: None),
        graph_runner=SimpleNamespace(pad_batch=lambda batch: setattr(batch, "padded_reqs", batch.reqs)),
        forward_batch=forward_batch,
    )


def make_messages() -> list[Any]:
    import torch
    from minisgl.core import SamplingParams
    from minisgl.message import UserMsg

    return [
        UserMsg(uid, torch.tensor(prompt, dtype=torch.int32), SamplingParams(0.6, ignore_eos=True, max_tokens=max_tokens))
        for uid, (prompt, max_tokens) in enumerate(draw_requests())
    ]


def make_own_scheduler(page_size: int) -> Any:
    """Return its scheduler, made as its own `__init__` does."""
    from minisgl.attention.fi import FlashInferBackend
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.decode import DecodeManager
    from minisgl.scheduler.prefill import PrefillManager
    from minisgl.scheduler.scheduler import Scheduler
    from minisgl.scheduler.table import TableManager

    scheduler = Scheduler.__new__(Scheduler)
    engine = scheduler.engine = make_engine(page_size, FlashInferBackend)
    scheduler.device, scheduler.eos_token_id, scheduler.prefill_budget = engine.device, -1, MAX_NUM_TOKENS
    scheduler.table_manager = TableManager(MAX_NUM_REQS, engine.page_table)
    scheduler.cache_manager = CacheManager(engine.num_pages, page_size, engine.page_table, "radix")
    scheduler.decode_manager = DecodeManager(page_size)
    managers = scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
    scheduler.prefill_manager = PrefillManager(*managers)
    scheduler.token_pool, scheduler.finished_reqs = scheduler.table_manager.token_pool, set()
    return scheduler


def make_runs(port: dict[str, Any]) -> Runs:
    """Return the runs of mini-sglang and of its port, both one step ahead, as its default is."""

    def make_own(page_size: int) -> Callable[[], None]:
        scheduler = make_own_scheduler(page_size)
        scheduler.send_result = lambda replies: None
        for message in make_messages():
            scheduler._process_one_msg(message)

        def run() -> None:
            last = None
            while scheduler.prefill_manager.runnable or scheduler.decode_manager.runnable or last is not None:
                planned = scheduler._schedule_next_batch()
                started = planned and (planned, scheduler._forward(planned))
                scheduler._process_last_data(last)
                last = started

        return run

    def make_port(page_size: int) -> Callable[[], None]:
        config = SimpleNamespace(page_size=page_size, max_running_req=MAX_NUM_REQS)
        config.max_extend_tokens, config.max_seq_len = MAX_NUM_TOKENS, MAX_MODEL_LEN
        engine = make_engine(page_size, port["PagedBackend"])
        scheduler = port["Scheduler"](config, engine.num_pages, -1, port["Model"](engine, page_size))
        for message in make_messages():
            scheduler.waiting.append((message.uid, np.asarray(message.input_ids), message.sampling_params))

        def run() -> None:
            while scheduler.waiting or scheduler.rows.size or scheduler.in_flight:
                scheduler.step()

        return run

    return {"own": make_own, "port": make_port}
