"""vLLM's own KV manager as a rival of `bench.studies.windows`. Importing this module imports vLLM, which has to be installed.

The manager is made as by vLLM's engine, with its default interval between the windows that it keeps. The hashes of blocks are
those of pagepool's chains, since only hits are measured. An answer grows block by block: vLLM keeps no windows of answers.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

from bench.studies.layouts import Layout
from bench.workload import PAGE_SIZE
from pagepool._core import HashChain
from pagepool.hashing import get_siphash_key
from pagepool.replay import SimulatedRequest

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
from vllm.config import CacheConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

KEY = get_siphash_key(0)


def make_config(layout: Layout, num_blocks: int) -> KVCacheConfig:
    shape = {"block_size": PAGE_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    local = (
        ChunkedLocalAttentionSpec(**shape, attention_chunk_size=layout.size)
        if layout.is_chunked
        else SlidingWindowSpec(**shape, sliding_window=layout.size)
    )
    specs = [FullAttentionSpec(**shape), *[local] * layout.num_local]
    register_all_kvcache_specs(None)
    return KVCacheConfig(
        num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)],
        prefix_cache_retention_interval=CacheConfig().prefix_cache_retention_interval,
    )


class HashedRequest:
    """A request as vLLM's manager reads it, whose blocks are hashed."""

    num_in_flight_tokens = num_preemptions = num_computed_tokens = shared_prefix_boundary = 0
    skip_reading_prefix_cache = False
    mm_features = ()
    status = RequestStatus.WAITING

    def __init__(self, request_id: str, request: SimulatedRequest) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = request.num_prompt_tokens
        chain = HashChain(PAGE_SIZE, KEY)
        chain.extend(request.make_token_ids()[: request.num_slots // PAGE_SIZE * PAGE_SIZE])
        self._digests = [chain[i].to_bytes(16, "little") for i in range(len(chain))]
        self.know(self.num_prompt_tokens)

    def know(self, num_tokens: int) -> None:
        """Know so many tokens."""
        self.num_tokens = num_tokens
        self.block_hashes = self._digests[: num_tokens // PAGE_SIZE]


class Vllm:
    """vLLM's manager, which computes prompts in chunks of `chunk_len` tokens."""

    def __init__(self, layout: Layout, num_blocks: int, max_model_len: int, chunk_len: int) -> None:
        self.manager = KVCacheManager(
            make_config(layout, num_blocks),
            max_model_len,
            scheduler_block_size=PAGE_SIZE,
            hash_block_size=PAGE_SIZE,
            max_in_flight_tokens=chunk_len,
        )
        self._chunk_len, self._numbers = chunk_len, count()

    def run(self, simulated: SimulatedRequest) -> int:
        """Run a request alone, and return how many tokens of its prompt hit."""
        request = HashedRequest(str(next(self._numbers)), simulated)
        num_prompt_tokens, num_slots = request.num_prompt_tokens, simulated.num_slots
        found, num_hits, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        placement: tuple[Any, ...] = (num_hits, found)
        num_done = num_hits
        first_block_end = num_prompt_tokens - num_prompt_tokens % PAGE_SIZE + PAGE_SIZE
        prompt_steps = range(num_hits + self._chunk_len, num_prompt_tokens, self._chunk_len)
        for end in (*prompt_steps, num_prompt_tokens, *range(first_block_end, num_slots, PAGE_SIZE), num_slots):
            if end > num_done:
                request.know(max(end, num_prompt_tokens))
                blocks = self.manager.allocate_slots(request, end - num_done, *placement)
                assert blocks is not None, "the pool is too small for a request"
                request.num_computed_tokens, request.status = end, RequestStatus.RUNNING
                placement, num_done = (), end
        self.manager.free(request)
        return num_hits
