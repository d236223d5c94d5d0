"""vLLM's managers, schedulers and requests, built without a model: for tests, and for ``python -m bench.races.vllm``.

Importing this module imports vLLM. A model is described by its groups: None is a group of full attention, a number a group with
a sliding window of that many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
ONE_GROUP = (None,)

Groups = Sequence[int | None]


def make_cache_config(num_blocks: int, groups: Groups = ONE_GROUP, retention: int | None = None) -> KVCacheConfig:
    """Describe the groups. vLLM caches the windows before multiples of `retention` tokens and a prompt's last; all for None."""
    register_all_kvcache_specs(None)
    specs = [KVCacheGroupSpec([f"layer {i}"], make_spec(window)) for i, window in enumerate(groups)]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=specs, prefix_cache_retention_interval=retention
    )


def make_spec(window: int | None) -> Any:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


def make_manager(
    num_blocks: int, max_model_len: int, groups: Groups = ONE_GROUP, retention: int | None = None, **options: Any
) -> KVCacheManager:
    """Make a `KVCacheManager` with prefix caching; `options` are further arguments of its constructor."""
    config = make_cache_config(num_blocks, groups, retention)
    options = {"scheduler_block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE} | options
    return KVCacheManager(kv_cache_config=config, max_model_len=max_model_len, **options)


def make_scheduler(
    num_blocks: int,
    max_model_len: int,
    groups: Groups = ONE_GROUP,
    *,
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
    is_async: bool = False,
) -> Scheduler:
    """Make a scheduler with prefix caching, logging statistics as an engine does, for the second model runner."""
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        watermark=0.0,
    )
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(scheduler_config=scheduler_config, cache_config=cache_config)
    scheduler_config.async_scheduling = is_async  # on a CPU the constructor turns it off
    config.model_config = make_model_config(max_model_len)
    scheduler = (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=make_cache_config(num_blocks, groups),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
    scheduler.use_v2_model_runner = True  # as on a GPU
    return scheduler


def make_model_config(max_model_len: int) -> Any:
    """Make what a scheduler reads of a decoder for text."""
    return SimpleNamespace(
        max_model_len=max_model_len,
        runner_type="generate",
        skip_tokenizer_init=True,
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        multimodal_config=None,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
    )


def make_hasher(hash_algo: str = "sha256", *lookahead: int) -> Any:
    """Make a block hasher as the engine core does. vLLM's default is SHA-256 over pickles, without lookahead."""
    hash_function = get_hash_fn_by_name(hash_algo)
    kv_cache_utils.init_none_hash(hash_function)
    return kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_function, *lookahead)


def make_sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def make_request(name: str, tokens: list[int], hasher: Any, sampling: SamplingParams) -> Request:
    """Make a request, and hash its blocks."""
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=sampling, pooling_params=None, block_hasher=hasher)


def sample(scheduler: Scheduler, scheduled: SchedulerOutput, token: int) -> ModelRunnerOutput:
    """Return the output of a step whose model samples `token` for each request with a whole prompt."""
    names = list(scheduled.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [token] for name in names]
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
