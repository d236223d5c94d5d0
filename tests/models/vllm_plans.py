"""What vLLM plans for the models of `model_configs`: its own grouping, from the specs that its layers have on a GPU. Importing
this module imports vLLM, which has to be installed.

vLLM's models cannot be made without a GPU, so the specs of layers are made here, from the same fields of the configurations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
from model_configs import FULL, MODELS, SLIDING
from vllm.v1.core.kv_cache_planning import _get_kv_cache_bytes_per_block, get_kv_cache_groups
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCK_SIZE = 16
BF16 = torch.bfloat16


def list_dense(config: dict[str, Any], types: list[str]) -> Iterator[KVCacheSpec]:
    """Yield the specs of layers with keys and values; the last layers may share those of others."""
    for name in types[: len(types) - config.get("num_kv_shared_layers", 0)]:
        is_global = name == "full_attention" and "global_head_dim" in config
        num_kv_heads = (is_global and config.get("num_global_key_value_heads")) or config["num_key_value_heads"]
        head_size = config["global_head_dim"] if is_global else config["head_dim"]
        shape = {"block_size": BLOCK_SIZE, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": BF16}
        match name:
            case "sliding_attention":
                yield SlidingWindowSpec(**shape, sliding_window=config["sliding_window"])
            case "chunked_attention":
                yield ChunkedLocalAttentionSpec(**shape, attention_chunk_size=config["attention_chunk_size"])
            case _:
                yield FullAttentionSpec(**shape)


def list_sparse(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of DeepSeek V3.2: latent vectors, and keys of an indexer with a scale of four bytes."""
    for _ in range(config["num_hidden_layers"]):
        size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        yield MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=size, dtype=BF16)
        yield MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=config["index_head_dim"] + 4, dtype=torch.uint8)


def list_compressed(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of DeepSeek V4 with its packed entries."""
    packed = {"num_kv_heads": 1, "alignment": 576}
    entry = {**packed, "head_size": config["head_dim"], "dtype": torch.uint8, "state_content_bytes": 584}
    for rate in config["compress_ratios"][: config["num_hidden_layers"]]:
        yield SlidingWindowMLASpec(block_size=64, sliding_window=config["sliding_window"], **entry)
        if rate:
            state = {**packed, "block_size": 4 if rate == 4 else 8, "dtype": torch.float32}
            width, window = (4, 8) if rate == 4 else (2, 128)
            yield MLAAttentionSpec(block_size=256, tokens_per_state=rate, **entry)
            yield SlidingWindowMLASpec(head_size=width * config["head_dim"], sliding_window=window, **state)
        if rate == 4:
            key = {**packed, "head_size": config["index_head_dim"] + 4, "dtype": torch.uint8}
            yield MLAAttentionSpec(block_size=256, tokens_per_state=rate, **key)
            yield SlidingWindowMLASpec(head_size=4 * config["index_head_dim"], sliding_window=8, **state)


def list_pooled(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of DeepSeek V4.1 with packed entries: a window in each layer; entries, keys and a ring in some."""
    packed = {"num_kv_heads": 1, "alignment": 576, "dtype": torch.uint8}
    entry = {**packed, "head_size": config["head_dim"], "state_content_bytes": 584}
    for layer, rate in enumerate(config["compress_ratios"]):
        yield SlidingWindowMLASpec(block_size=32, sliding_window=config["sliding_window"], **entry)
        if layer not in config["kv_source_layer_ids"]:
            continue
        yield MLAAttentionSpec(block_size=128, tokens_per_state=rate, **entry)
        yield MLAAttentionSpec(block_size=128, tokens_per_state=rate, head_size=config["index_head_dim"] + 4, **packed)
        if rate > 1:
            width = 2 * config["head_dim"]
            yield CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=width, head_size_v=0, dtype=torch.float32)


def list_uneven(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of MiMo V2, whose values are smaller than its keys."""
    for kind in config["hybrid_layer_pattern"]:
        heads = config["swa_num_key_value_heads" if kind else "num_key_value_heads"]
        shape = {"block_size": BLOCK_SIZE, "num_kv_heads": heads, "head_size": config["head_dim"], "dtype": BF16}
        shape["head_size_v"] = config["v_head_dim"]
        yield SlidingWindowSpec(**shape, sliding_window=config["sliding_window"]) if kind else FullAttentionSpec(**shape)


def list_indexed(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of MiniMax M3: keys and values, and in sparse layers the key of an index."""
    sparse = config["sparse_attention_config"]
    for is_sparse in sparse["sparse_attention_freq"]:
        yield FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=config["head_dim"], dtype=BF16)
        if is_sparse:
            yield MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=sparse["sparse_index_dim"], dtype=BF16)


def list_summarized(config: dict[str, Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of Step 5: windows, and full attention with a summary of eight tokens and a ring as large as a page."""
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 8, "head_size": config["head_dim"], "dtype": BF16}
    one = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size_v": 0}
    for name in config["layer_types"]:
        if name == SLIDING:
            yield SlidingWindowSpec(**shape, sliding_window=config["sliding_window"])
        else:
            main = FullAttentionSpec(**shape)
            yield main
            yield FullAttentionSpec(**one, head_size=256, dtype=torch.uint8, tokens_per_state=8)
            yield CircularBufferSpec(**one, head_size=main.page_size_bytes // (2 * BLOCK_SIZE), dtype=BF16)


def list_hybrid(types: str, num_kv_heads: int, head_size: int, *states: tuple[tuple[int, ...], Any]) -> Iterator[KVCacheSpec]:
    """Yield the specs of layers with attention (*) or states (M). Pages of attention are made as large as a state, which is
    padded.
    """
    shapes, dtypes = zip(*states, strict=True)
    token_bytes = 2 * num_kv_heads * head_size * 2
    state_bytes = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes).page_size_bytes
    block_size = BLOCK_SIZE * -(-state_bytes // (BLOCK_SIZE * token_bytes))
    for name in types:
        if name == "*":
            yield FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=BF16)
        elif name == "M":
            yield MambaSpec(block_size=block_size, shapes=shapes, dtypes=dtypes, page_size_padded=block_size * token_bytes)


def list_specs(name: str) -> list[KVCacheSpec]:
    """List the specs of all layers of a model."""
    config = MODELS[name]
    match name:
        case "DeepSeek V3.2":
            return [*list_sparse(config)]
        case "DeepSeek V4 Flash":
            return [*list_compressed(config)]
        case "DeepSeek V4.1":
            return [*list_pooled(config)]
        case "MiMo V2 Flash":
            return [*list_uneven(config)]
        case "MiniMax M3":
            return [*list_indexed(config)]
        case "Step 5":
            return [*list_summarized(config)]
        case "Qwen3-Next-80B-A3B":
            return [*list_hybrid("MMM*" * 12, 2, 256, ((3, 8192), BF16), ((32, 128, 128), BF16))]
        case "Nemotron-H-8B":
            return [
                *list_hybrid(config["hybrid_override_pattern"], 8, 128, ((3, 10240), BF16), ((128, 64, 128), torch.float32))
            ]
        case "Gemma 3 27B":
            return [*list_dense(config, ([SLIDING] * 5 + [FULL]) * 10 + [SLIDING] * 2)]
        case "Llama 4 Scout":
            return [*list_dense(config, (["chunked_attention"] * 3 + [FULL]) * 12)]
    return [*list_dense(config, config["layer_types"])]


def plan(name: str, num_tokens: int, step_tokens: int) -> int:
    """Return the bytes of a request in steps, without checkpoints of states."""
    register_all_kvcache_specs(None)
    by_layer = {f"layer {i}": spec for i, spec in enumerate(list_specs(name))}
    layout = KVCacheLayout.BLNHC if name.startswith("DeepSeek V4") else KVCacheLayout.LBNHC
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="none", get_resolved_kv_cache_layout=lambda: layout),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=num_tokens),
        max_in_flight_tokens=step_tokens,
    )
    groups = get_kv_cache_groups(config, by_layer)
    num_blocks = sum(
        spec.max_memory_usage_pages(config)
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        for spec in (group.kv_cache_spec for group in groups)
    )
    return num_blocks * _get_kv_cache_bytes_per_block(groups, layout)
