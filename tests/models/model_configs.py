"""Configurations of models: the fields of their published config.json that decide what layers keep, or those of the text model.
`VLLM_BYTES` has what vLLM plans for them.
"""

from __future__ import annotations

from typing import Any

# fmt: off
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16"}


ATTENTION: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
QWEN = {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16"}
NEMOTRON = {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "torch_dtype": "bfloat16"}
GEMMA4: dict[str, Any] = {"model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "attention_k_eq_v": True, "num_kv_shared_layers": 0, "sliding_window": 1024, "dtype": "bfloat16",
    "layer_types": ([SLIDING] * 5 + [FULL]) * 10}
GEMMA4_E4B = GEMMA4 | {"num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 18, "sliding_window": 512,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 7}
GEMMA3N: dict[str, Any] = {"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512, "torch_dtype": "bfloat16",
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "layer_types": [SLIDING, FULL] * 12}
LLAMA4: dict[str, Any] = {"model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0] * 12,
    "torch_dtype": "bfloat16"}
DEEPSEEK_V32: dict[str, Any] = {"model_type": "deepseek_v32", "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048, "torch_dtype": "bfloat16"}
# The last ratio is that of a drafter.
DEEPSEEK_V4: dict[str, Any] = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "sliding_window": 128, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000,
    "torch_dtype": "bfloat16"}
MIMO_V2: dict[str, Any] = {"model_type": "mimo_v2_flash", "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
    "torch_dtype": "bfloat16"}
MINIMAX_M3: dict[str, Any] = {"model_type": "minimax_m3_text", "num_hidden_layers": 60, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "torch_dtype": "bfloat16",
    "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57}}
STEP5: dict[str, Any] = {"model_type": "step5", "num_hidden_layers": 48, "num_attention_heads": 40, "num_attention_groups": 8,
    "head_dim": 128, "sliding_window": 512, "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 12, "torch_dtype": "bfloat16",
    "sparse_config": {"proxy_dim": 256, "region_block_size": 8}}
# Layers 24 to 47 have an entry for each token.
DEEPSEEK_V41: dict[str, Any] = {"model_type": "deepseek_v41", "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 1024, "sliding_window": 128, "compress_ratios": [0, 0, *[2] * 22, *[1] * 24],
    "kv_source_layer_ids": [2, 8, 14, 24, 34], "index_source_layer_ids": [2, 5, 8, 14, 24, 30, 34], "torch_dtype": "bfloat16"}

MODELS: dict[str, dict[str, Any]] = {"Gemma 3 27B": GEMMA3, "Gemma 4 31B": GEMMA4, "Gemma 4 E4B": GEMMA4_E4B,
    "Gemma 3n E4B": GEMMA3N, "gpt-oss-20b": GPT_OSS, "Llama 4 Scout": LLAMA4, "DeepSeek V3.2": DEEPSEEK_V32,
    "DeepSeek V4 Flash": DEEPSEEK_V4, "DeepSeek V4.1": DEEPSEEK_V41, "MiMo V2 Flash": MIMO_V2, "MiniMax M3": MINIMAX_M3,
    "Step 5": STEP5, "Qwen3-Next-80B-A3B": QWEN, "Nemotron-H-8B": {**ATTENTION, **NEMOTRON}}
REQUEST_TOKENS, STEP_TOKENS = 100_000, 8192
VLLM_BYTES = {
    "Gemma 3 27B": (81920, 12729712640),
    "Gemma 4 31B": (81920, 15754854400),
    "Gemma 4 E4B": (16384, 1996226560),
    "Gemma 3n E4B": (8192, 1104936960),
    "gpt-oss-20b": (24576, 2662465536),
    "Llama 4 Scout": (49152, 7331119104),
    "DeepSeek V3.2": (78324, 7832400000),
    "DeepSeek V4 Flash": (3915, 3753388800),
    "DeepSeek V4.1": (2520, 505128960),
    "MiMo V2 Flash": (23040, 4224614400),
    "MiniMax M3": (137472, 13747200000),
    "Step 5": (49536, 6240337920),
    "Qwen3-Next-80B-A3B": (24576, 2500067328),
    "Nemotron-H-8B": (16384, 1755054080),
}
"""Of vLLM 0.33 (`vllm_plans`): bytes of a token of a long request, and of a request of so many tokens in such steps."""
# fmt: on
