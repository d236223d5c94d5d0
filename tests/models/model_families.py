"""Fields of the published config.json of many families of models, with those that could be taken for others, and what their
layers keep: bytes a token of full attention, and of windows or chunks, with the layers that have a state; or the field that a
refusal names.
"""

from __future__ import annotations

from typing import Any

Kept = tuple[int, int, int]
FULL, SLIDING = "full_attention", "sliding_attention"


def base(layers: int, heads: int, kv_heads: int | None, hidden: int, **more: Any) -> dict[str, Any]:
    """Return the fields that most models have, and those of all configurations that change nothing."""
    kv = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "architectures": ["SomeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 4 * hidden,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
        **kv,
        **more,
    }


def keeps(layers: int, kv_heads: int, head: int) -> int:
    return layers * 2 * kv_heads * head * 2


# fmt: off
MOE = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "output_router_logits": False,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [3], "norm_topk_prob": True,
    "shared_expert_intermediate_size": 5632}
DEEPSEEK = {"first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128}
# What older versions of Transformers wrote into the configurations inside others.
DUMPED = {"add_cross_attention": False, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None,
    "is_decoder": False, "is_encoder_decoder": False, "num_beam_groups": 1, "output_attentions": False,
    "output_hidden_states": False, "pruned_heads": {}, "tie_encoder_decoder": False}
VISION = {"vision_config": {"num_hidden_layers": 32, "num_heads": 16, "window_size": 112, "fullatt_block_indexes": [7, 15]}}
GDN = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128}
MAMBA2 = {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False}
JAMBA = {"attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
    "mamba_inner_layernorms": True, "mamba_proj_bias": False, "num_logits_to_keep": 1, "sliding_window": None}
FALCON = {"alibi": False, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "parallel_attn": True, "apply_residual_connection_post_layernorm": False}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "attn_pdrop": 0.1, "n_ctx": 1024}
SANTACODER = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True}
SANTACODER |= {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    "pad_key_length": True}
CHATGLM = {"model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "fp32_residual_connection": False,
    "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 32, "num_layers": 40, "post_layer_norm": True, "seq_length": 131072}
MPT = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "no_bias": True}
MPT_ATTENTION = {"alibi": True, "attn_impl": "torch", "attn_pdrop": 0, "attn_uses_sequence_id": False, "qk_ln": False}
OPENELM = {"model_type": "openelm", "ffn_multipliers": [0.5, 1.0, 2.0, 4.0], "head_dim": 64, "model_dim": 1280,
    "normalize_qk_projections": True, "num_gqa_groups": None, "num_kv_heads": [3, 3, 4, 5],
    "num_query_heads": [12, 12, 16, 20], "num_transformer_layers": 4, "qkv_multipliers": [0.5, 1.0],
    "share_input_output_layers": True}
# fmt: on


def block(group: int | None = None, **attention: Any) -> dict[str, Any]:
    attention = {"n_heads_in_group": group, "no_op": False, "replace_with_linear": False, "window_length": None} | attention
    return {"attention": attention, "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": True}}


NAS = base(6, 32, None, 2048, model_type="nemotron-nas", num_key_value_heads=None)
NAS["block_configs"] = [block(8), block(16), block(replace_with_linear=True), block(no_op=True), block(8), block(4)]
KIMI_LAYERS = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 32, "head_dim": 128}
KIMI_LAYERS |= {"short_conv_kernel_size": 4}
# fmt: off
LFM2 = {"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False,
    "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "num_heads": 32}
ZAMBA2 = {"add_bias_linear": False, "attention_head_dim": 160, "attention_hidden_size": 5120, "hybrid_layer_ids": [2, 5],
    "kv_channels": 80, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "mamba_d_conv": 4, "mamba_d_state": 64,
    "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 1, "n_mamba_heads": 80, "num_mem_blocks": 1,
    "num_query_groups": 32, "use_mem_rope": True, "use_shared_attention_adapter": False, "use_shared_mlp_adapter": True}
ZAMBA2 |= {"gated_linear_unit": True}
NEMOTRON_H = {"attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "hybrid_override_pattern": "M-M*-M", "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_proj_bias": False, "mtp_hybrid_override_pattern": "*E", "n_groups": 8, "residual_in_fp32": False,
    "sliding_window": None, "ssm_state_size": 128, "use_conv_bias": True, "use_mamba_kernels": True}
PUZZLE = [{"block_type": kind} | ({"moe_intermediate_size": 1280, "n_routed_experts": 96, "num_experts_per_tok": 6}
    if kind == "moe" else {}) for kind in ("mamba", "moe", "mamba", "attention", "moe", "mamba")]
FALCON_H1 = MAMBA2 | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9, "attn_layer_indices": None,
    "key_multiplier": 0.4, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_norm_before_gate": False,
    "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_multipliers": [0.9, 0.2], "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35]}
MINIMAX_M2 = {"attn_type_list": [1] * 62, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_qk_norm": True}
COHERE2 = {"use_embedding_sharing": True, "use_parallel_block": True, "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first", "cache_implementation": "hybrid"}
EXAONE4 = {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "head_dim": 128, "model_type": "exaone4"}
GEMMA3N = {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_num_inputs": 4, "head_dim": 256,
    "hidden_size_per_layer_input": 256, "intermediate_size": [16384] * 35, "laurel_rank": 64,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "num_kv_shared_layers": 15, "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0, "sliding_window": 512}
STEP35 = {"attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 96, "num_attention_groups": 8},
    "head_dim": 128, "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 12, "num_nextn_predict_layers": 3,
    "sliding_window": 512}
MIMO_V2 = {"hybrid_layer_pattern": [0, 1, 1, 1] * 12, "v_head_dim": 128, "head_dim": 192, "sliding_window": 128,
    "sliding_window_size": 128, "attention_chunk_size": 128, "attention_value_scale": 0.707, "hybrid_block_size": None,
    "add_swa_attention_sink_bias": True, "swa_num_attention_heads": 64, "swa_rope_theta": 10000}
MIMO_V2_SWA = {"swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
KIMI_K3_LAYERS = {"full_attn_layers": [*range(4, 93, 4), 93], "gate_lower_bound": -5.0, "head_dim": 128, "num_heads": 96,
    "kda_layers": [layer for layer in range(1, 93) if layer % 4], "short_conv_kernel_size": 4, "use_full_rank_gate": True}
KIMI_K3 = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "latent_moe_use_norm": True, "linear_attn_config": KIMI_K3_LAYERS,
    "mla_use_nope": True, "mla_use_output_gate": True, "model_type": "kimi_linear", "moe_intermediate_size": 3072,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
    "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0, "topk_group": 1,
    "topk_method": "noaux_tc", "use_grouped_topk": True, "v_head_dim": 128, "quantization_config": {"config_groups":
    {"group_0": {"weights": {"group_size": 32, "num_bits": 4, "type": "float"}}}, "format": "mxfp4-pack-quantized"}}
# Models with an indexer, rings, sinks, an encoder, or other kinds of 2026.
DSA = {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}
INDEXED = "indexed_attention"
QWEN4: dict[str, Any] = base(40, 16, 2, 2048, model_type="qwen4_exp_text", head_dim=256, layer_types=(["linear_attention"] * 3 +
    [INDEXED]) * 10, heads_per_ngram=8, hc_count=4, hc_lowrank=320, indexer_budget=2048, indexer_compress_ratio=16,
    indexer_head_dim=128, indexer_kv_heads=1, indexer_n_heads=16, ngram_size=3, number_of_conv_states=1,
    output_gate_type="sigmoid", ple_conv_kernel_size=4, ple_embed_dim=2048, ple_layer_ids=[2, 20], split_ngram_parts=512, **GDN)
GLM5_NEXT: dict[str, Any] = base(8, 64, 64, 4096, model_type="glm5_next_text", head_dim=0, kv_lora_rank=512, q_lora_rank=1536,
    qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256, index_kpool=16, index_kpool_always_select_tail=True,
    index_kpool_compress=True, index_share_for_mtp_iteration=True,
    indexer_types=["full"] * 8, layer_types=(["linear_attention"] * 3 + [INDEXED]) * 2, linear_conv_kernel_dim=4,
    linear_head_dim=128, linear_lower_bound=-5.0, linear_num_heads=64, **DSA)
SUMMARIES = {"apply_to_layer_types": [FULL], "attention_impl": "sparse_gqa", "compression_method": "csa_block_compress",
    "enabled": True, "num_provider_groups": 4, "proxy_dim": 256, "region_block_size": 8, "sparse_indexer_num_heads": 16,
    "sparse_indexer_num_k_heads": 1, "sparse_indexer_rope_dim": 32, "topk": 512}
STEP5: dict[str, Any] = base(8, 40, None, 5120, model_type="step5", att_impl_type="GQA", head_dim=128,
    layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 2, layer_types_with_mtp=[FULL, SLIDING, SLIDING, SLIDING] * 2 + [SLIDING],
    num_attention_groups=8, num_nextn_predict_layers=1, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 2, sliding_window=512,
    sparse_config=SUMMARIES, swa_num_attention_heads=64, use_rope_layers=[True] * 8, yarn_only_types=[FULL],
    attention_other_setting={"attention_type": SLIDING, "num_attention_heads": 64, "num_attention_groups": 4, "head_dim": 128})
DEEPSEEK_V41: dict[str, Any] = {"model_type": "deepseek_v41", "text_config": base(8, 64, 1, 5120, head_dim=512,
    q_lora_rank=1536, qk_rope_head_dim=64, index_head_dim=128, index_n_heads=64, index_topk=1024, sliding_window=128,
    candidate_block_size=64, candidate_source_layer_id=2, candidate_topk_blocks=64, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 0],
    kv_source_layer_ids=[2, 3, 5], index_source_layer_ids=[2, 4, 5], engram_layer_ids=[1], dspark_target_layer_ids=[4],
    engram_compressed_vocab_size=99092, engram_head_dim=256, engram_n_heads=8, engram_num_embeddings=[384006168],
    o_groups=8, o_lora_rank=1024, num_hash_layers=3)}
M3_SPARSE = {"use_sparse_attention": True, "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_block_size": 128,
    "sparse_disable_index_value": [0] * 3 + [1] * 57, "sparse_index_dim": 128, "sparse_init_block": 0, "sparse_local_block": 1,
    "sparse_num_index_heads": 4, "sparse_score_type": "max", "sparse_topk_blocks": 16}
INKLING = {"d_rel": 16, "head_dim": 128, "log_scaling_alpha": 0.1, "rel_extent": 1024, "shared_expert_sink": True,
    "sliding_window_size": 512, "swa_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16}
PANGU: dict[str, Any] = base(50, 64, 4, 4608, model_type="PanguProMoE", param_sink_number=128, param_sink_with_value=True,
    qk_nope_dim=128, qk_rope_dim=64, v_channels=128, sandwich_norm=True)
WHISPER: dict[str, Any] = {"model_type": "whisper", "activation_dropout": 0.0, "d_model": 1280, "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120, "decoder_layerdrop": 0.0, "decoder_layers": 4, "encoder_attention_heads": 20, "encoder_layers": 32,
    "is_encoder_decoder": True, "max_source_positions": 1500, "max_target_positions": 448, "num_hidden_layers": 32,
    "torch_dtype": "float16", "use_weighted_layer_sum": False}
COHERE_ASR: dict[str, Any] = {"encoder": {"d_model": 1280, "n_heads": 8, "n_layers": 48, "subsampling_factor": 8},
    "max_audio_clip_s": 35.0, "preprocessor": {"window_stride": 0.01}, "torch_dtype": "bfloat16",
    "transf_decoder": {"config_dict": {"attn_layer_dropout": 0.0, "hidden_size": 1024, "num_attention_heads": 8,
        "num_layers": 8}}}
MLLAMA: dict[str, Any] = {"text_config": base(40, 32, 8, 4096, model_type="mllama_text_model", cross_attention_layers=[3, 8, 13,
    18, 23, 28, 33, 38]), "vision_config": {"image_size": 560, "max_num_tiles": 4, "patch_size": 14}}
UNLIMITED_OCR: dict[str, Any] = {"model_type": "unlimited_ocr", "text_config": base(12, 10, 10, 1280, head_dim=128,
    layer_types=["reference_sliding_attention"] * 12, sliding_window=128)}
LING3: dict[str, Any] = base(8, 16, 4, 2048, head_dim=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, kda_lower_bound=-5.0, kda_safe_gate=True, layer_group_size=3, max_window_layers=20,
    short_conv_kernel_size=4)
DOTS3: dict[str, Any] = base(6, 64, 64, 4096, model_type="dots3_note", kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128,
    qk_rope_head_dim=64, layer_types=[SLIDING, SLIDING, FULL] * 2, sliding_window_size=512, swa_attention_gate_type="headwise",
    swa_kv_lora_rank=1024, swa_num_attention_heads=64, swa_q_lora_rank=1536, swa_qk_nope_head_dim=128, swa_qk_rope_head_dim=64,
    swa_v_head_dim=128, **DSA)
VOXTRAL: dict[str, Any] = {"audio_config": {"head_dim": 64, "num_attention_heads": 32, "num_hidden_layers": 32,
    "sliding_window": 750}, "downsample_factor": 4, "text_config": base(26, 32, 8, 3072, head_dim=128,
    model_type="voxtral_realtime_text", sliding_window=8192)}
LONGCAT = {"attention_method": "MLA", "hidden_size": 6144, "kv_lora_rank": 512, "mla_scale_kv_lora": True, "model_type":
    "longcat_flash", "num_attention_heads": 64, "num_layers": 28, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "zero_expert_num": 256}
DORY: dict[str, Any] = base(8, 16, 4, 2560, head_dim=256, layer_types=[SLIDING, "mlp", FULL, "mlp"] * 2, sliding_window=1024,
    n_input_layers=2, n_recurrent_layers=4, n_recurrent_loops=3, recurrent_kv_cache_mode="per_loop")
QWEN_OMNI = base(28, 28, 4, 3584, model_type="qwen2_5_omni_text", sliding_window=32768, use_sliding_window=False, **DUMPED)

# Names with "layer", "attn", "head" or "window" in them that models have beside the fields of the table below.
HARMLESS = {"attention_multiplier": 0.0078125, "attention_out_bias": False, "attn_implementation": "eager",
    "attn_output_multiplier": 0.088, "do_layer_norm_before": True, "embd_pdrop": 0.0, "layerdrop": 0.0, "max_attn_value": 30.0,
    "max_window_layers": 28, "model_max_length": 4096, "moe_layer_end_index": [29, 28], "moe_layer_frequency": 2,
    "moe_layer_interval": 1, "multi_gate": False, "no_rope_layer_interval": 4, "norm_head": False,
    "parallel_attn_mlp_res": True, "partial_rotary_factor": 0.4, "qk_layernorm": False, "rotary_pct": 0.25,
    "use_cache_kernel": False, "use_flash_attn": "auto", "use_parallel_residual": True, "use_sliding_window": False}

KEPT: dict[str, tuple[dict[str, Any], Kept]] = {
    "fields that change nothing": (base(32, 32, 8, 4096, **HARMLESS), (keeps(32, 8, 128), 0, 0)),
    "Llama 3.1": (base(32, 32, 8, 4096, mlp_bias=False, pretraining_tp=1), (keeps(32, 8, 128), 0, 0)),
    "Mistral 0.1": (base(32, 32, 8, 4096, model_type="mistral", sliding_window=4096), (0, keeps(32, 8, 128), 0)),
    "Qwen2.5 1M": (base(48, 40, 8, 5120, dual_chunk_attention_config={"chunk_size": 262144, "local_size": 8192,
        "original_max_position_embeddings": 262144, "sparse_attention_config": {"0": {"0": ["vertical_and_slash", 30]}}}),
        (keeps(48, 8, 128), 0, 0)),
    "Qwen3-Next": (base(48, 16, 2, 2048, model_type="qwen3_next", head_dim=256, full_attention_interval=4, **GDN, **MOE),
        (keeps(12, 2, 256), 0, 36)),
    "Qwen3.5": ({"text_config": base(64, 24, 4, 5120, head_dim=256, attn_output_gate=True, mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1, layer_types=(["linear_attention"] * 3 + [FULL]) * 16, **GDN), **VISION},
        (keeps(16, 4, 256), 0, 48)),
    "Qwen2.5-VL": (base(28, 28, 4, 3584, sliding_window=32768, use_sliding_window=False, **VISION),
        (keeps(28, 4, 128), 0, 0)),
    "Qwen2.5-Omni": ({"thinker_config": {"text_config": QWEN_OMNI, "audio_config": {"encoder_layers": 32}},
        "talker_config": {"num_hidden_layers": 24}}, (keeps(28, 4, 128), 0, 0)),
    "Gemma 1": (base(28, 16, 16, 3072, model_type="gemma", head_dim=256), (keeps(28, 16, 256), 0, 0)),
    "PaliGemma": ({"text_config": base(18, 8, 1, 2048, model_type="gemma"), **VISION}, (keeps(18, 1, 256), 0, 0)),
    "Gemma 2": (base(42, 16, 8, 3584, model_type="gemma2", head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid", sliding_window_size=4096),
        (keeps(21, 8, 256), keeps(21, 8, 256), 0)),
    "Gemma 3 4B": ({"text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024}, "torch_dtype": "bfloat16", **VISION},
        (keeps(5, 4, 256), keeps(29, 4, 256), 0)),
    "Gemma 3, newer file": (base(6, 4, 1, 640, model_type="gemma3_text", head_dim=256, sliding_window=512,
        _sliding_window_pattern=6, use_bidirectional_attention=False, layer_types=[SLIDING] * 5 + [FULL]),
        (keeps(1, 1, 256), keeps(5, 1, 256), 0)),
    "Gemma 3n": ({"text_config": base(35, 8, 2, 2048, model_type="gemma3n_text") | GEMMA3N},
        (keeps(4, 2, 256), keeps(16, 2, 256), 0)),
    "Phi 3": (base(32, 32, 32, 3072, model_type="phi3", sliding_window=2047, resid_pdrop=0.0), (0, keeps(32, 32, 96), 0)),
    "Falcon 7B": (base(32, 71, None, 4544, **FALCON), (keeps(32, 1, 64), 0, 0)),
    "Falcon 7B, first file": ({"model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32,
        "multi_query": True}, (keeps(32, 1, 64), 0, 0)),
    "Falcon 40B": (base(60, 128, None, 8192, **FALCON | {"new_decoder_architecture": True}, num_kv_heads=8,
        num_ln_in_parallel_attn=None), (keeps(60, 8, 64), 0, 0)),
    "Falcon 40B, first file": ({"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60,
        "parallel_attn": True}, (keeps(60, 8, 64), 0, 0)),
    "Falcon H1": (base(36, 12, 2, 2560, model_type="falcon_h1", head_dim=128, **FALCON_H1), (keeps(36, 2, 128), 0, 36)),
    "Falcon Mamba": (base(64, 32, None, 4096, model_type="falcon_mamba", state_size=16, conv_kernel=4, expand=2,
        use_mambapy=False, time_step_rank=256, use_conv_bias=True), (0, 0, 64)),
    "ChatGLM 2": (CHATGLM | {"num_layers": 28}, (keeps(28, 2, 128), 0, 0)),
    "GLM 4 9B": (CHATGLM | {"num_hidden_layers": 40}, (keeps(40, 2, 128), 0, 0)),
    "ChatGLM without groups": (CHATGLM | {"multi_query_attention": False}, (keeps(40, 32, 128), 0, 0)),
    "GLM 5": (base(78, 64, 64, 6144, model_type="glm_moe_dsa", **DEEPSEEK | {"qk_nope_head_dim": 192, "v_head_dim": 256},
        head_dim=64, qk_head_dim=256, index_head_dim=128, index_n_heads=32, index_topk=2048, indexer_rope_interleave=True,
        rope_interleave=True, mlp_layer_types=["dense"] * 3 + ["sparse"] * 75), (78 * (576 * 2 + 132), 0, 0)),
    "InternVL": ({"llm_config": base(24, 16, 8, 2048, **DUMPED), **VISION}, (keeps(24, 8, 128), 0, 0)),
    "DeepSeek V3.2": (base(61, 128, 128, 7168, **DEEPSEEK, index_head_dim=128, index_n_heads=64, index_topk=2048),
        (61 * (576 * 2 + 132), 0, 0)),
    "DeepSeek VL2": ({"language_config": base(27, 16, 16, 2048, **DEEPSEEK), **VISION}, (27 * 576 * 2, 0, 0)),
    "DeepSeek OCR": ({"language_config": base(12, 10, 10, 1280, **DEEPSEEK | dict.fromkeys(("kv_lora_rank", "q_lora_rank")) |
        dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0), use_mla=False, lm_head=True)},
        (keeps(12, 10, 128), 0, 0)),
    "Hunyuan A13B": (base(32, 32, 8, 4096, **DEEPSEEK, attention_head_dim=128, use_mla=False, use_cla=False,
        cla_share_factor=2, group_limited_greedy=False, use_mixed_mlp_moe=True), (keeps(32, 8, 128), 0, 0)),
    "Kimi Linear": (base(8, 32, 32, 2304, head_dim=72, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, linear_attn_config=KIMI_LAYERS, mla_use_nope=True, num_expert_group=1, use_grouped_topk=True),
        (2 * 576 * 2, 0, 6)),
    "Kimi K3": ({"model_type": "kimi_k3", "text_config": base(93, 96, 96, 7168) | KIMI_K3, "vision_config":
        {"vt_num_hidden_layers": 27, "mm_projector_type": "patchmergerv2"}}, (24 * 576 * 2, 0, 69)),
    "MiniMax 01": (base(80, 64, 8, 6144, head_dim=128, attn_type_list=([0] * 7 + [1]) * 10,
        layernorm_full_attention_alpha=3.5, layernorm_linear_attention_alpha=3.5, postnorm=True, shared_intermediate_size=0,
        shared_moe_mode="sigmoid"), (keeps(10, 8, 128), 0, 70)),
    "MiniMax M2": (base(62, 48, 8, 3072, head_dim=128, **MINIMAX_M2), (keeps(62, 8, 128), 0, 0)),
    "Nemotron-H": (base(6, 32, 8, 4096, **NEMOTRON_H), (keeps(1, 8, 128), 0, 3)),
    "Nemotron-H Puzzle": (base(6, 32, 8, 4096, **NEMOTRON_H | {"hybrid_override_pattern": "MEM*EM", "block_configs": PUZZLE}),
        (keeps(1, 8, 128), 0, 3)),
    "Intern-S2 Mobius": ({"text_config": base(8, 16, 2, 2048, head_dim=256, layer_types=(["linear_attention"] * 3 + [FULL]) * 2,
        num_blocks=4, num_experts=256, shared_expert_intermediate_size=512, **GDN), **VISION}, (keeps(2, 2, 256), 0, 6)),
    "Nemotron-NAS": (NAS, (2 * (4 + 2 + 4 + 8) * 64 * 2, 0, 0)),
    "DeciLM": (base(4, 32, None, 4096, num_key_value_heads_per_layer=[4, 2, 4, 1]), (keeps(1, 11, 128), 0, 0)),
    "Jamba": (base(32, 32, 8, 4096, model_type="jamba", **JAMBA), (keeps(4, 8, 128), 0, 28)),
    "Bamba": (base(32, 32, 8, 4096, attn_layer_indices=[9, 18, 27], attn_rotary_emb=64, **MAMBA2), (keeps(3, 8, 128), 0, 29)),
    "Zamba 2": (base(6, 32, 32, 2560, model_type="zamba2", **ZAMBA2), (keeps(2, 32, 160), 0, 6)),
    "Mamba": ({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4,
        "expand": 2}, (0, 0, 24)),
    "Mamba 2": ({"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "state_size": 128, "conv_kernel": 4,
        "expand": 2, "num_heads": 128, "head_dim": 64, "n_groups": 8, "chunk_size": 256}, (0, 0, 64)),
    "GPT-2": (GPT2, (keeps(12, 12, 64), 0, 0)),
    "StarCoder": (SANTACODER, (keeps(40, 1, 128), 0, 0)),
    "StarCoder without groups": (SANTACODER | {"multi_query": False}, (keeps(40, 48, 128), 0, 0)),
    "GPT-J": ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64},
        (keeps(28, 16, 256), 0, 0)),
    "BLOOM": ({"model_type": "bloom", "n_embed": 4096, "num_attention_heads": 32, "n_layer": 30, "skip_bias_add_qkv": True},
        (keeps(30, 32, 128), 0, 0)),
    "MPT": (MPT | {"attn_config": MPT_ATTENTION | {"attn_type": "multihead_attention"}}, (keeps(32, 32, 128), 0, 0)),
    "MPT, one KV head": (MPT | {"attn_config": MPT_ATTENTION | {"attn_type": "multiquery_attention"}},
        (keeps(32, 1, 128), 0, 0)),
    "DBRX": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"clip_qkv": 8,
        "kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16}}, (keeps(40, 8, 128), 0, 0)),
    "StarCoder 2": (base(32, 36, 4, 4608, model_type="starcoder2", sliding_window=4096), (0, keeps(32, 4, 128), 0)),
    "Command R7B": (base(32, 32, 8, 4096, model_type="cohere2", sliding_window=4096, **COHERE2),
        (keeps(8, 8, 128), keeps(24, 8, 128), 0)),
    "OLMo hybrid": (base(32, 30, 30, 3840, layer_types=(["linear_attention"] * 3 + [FULL]) * 8, **GDN,
        linear_allow_neg_eigval=True), (keeps(8, 30, 128), 0, 24)),
    "OpenELM": (OPENELM, (keeps(1, 15, 64), 0, 0)),
    "gpt-oss": (base(24, 64, 8, 2880, model_type="gpt_oss", head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 12,
        initial_context_length=4096, experts_per_token=4), (keeps(12, 8, 64), keeps(12, 8, 64), 0)),
    "Llama 4": ({"text_config": base(48, 40, 8, 5120, model_type="llama4_text", head_dim=128, attention_chunk_size=8192,
        no_rope_layers=[1, 1, 1, 0] * 12, attn_scale=0.1, attn_temperature_tuning=True, interleave_moe_layer_step=1,
        moe_layers=[*range(48)], use_qk_norm=True), **VISION}, (keeps(12, 8, 128), keeps(36, 8, 128), 0)),
    "Llama 3.2 Vision": ({"text_config": base(40, 32, 8, 4096, model_type="mllama_text_model",
        cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]), **VISION}, (keeps(32, 8, 128), 0, 0)),
    "Exaone 3.5": ({key: value for key, value in base(32, 32, 8, 4096, model_type="exaone", num_layers=32).items() if key !=
        "num_hidden_layers"}, (keeps(32, 8, 128), 0, 0)),
    "Exaone 4": (base(64, 40, 8, 5120, **EXAONE4), (keeps(16, 8, 128), keeps(48, 8, 128), 0)),
    "Trinity": (base(32, 8, 2, 1024, head_dim=128, global_attn_every_n_layers=4, layer_types=([SLIDING] * 3 + [FULL]) * 8,
        sliding_window=2048, num_dense_layers=2, num_expert_groups=1, num_limited_groups=1),
        (keeps(8, 2, 128), keeps(24, 2, 128), 0)),
    "LFM 2": (base(6, 32, 8, 2048, layer_types=["conv", "conv", FULL] * 2, **LFM2), (keeps(2, 8, 64), 0, 4)),
    "LFM 2, older file": (base(6, 32, 8, 2048, full_attn_idxs=[2, 5], **LFM2), (keeps(2, 8, 64), 0, 4)),
    "Idefics 3": ({"text_config": base(24, 32, 32, 2048, head_dim=64, model_type="llama", _flash_attn_2_enabled=True,
        perceiver_config={"num_key_value_heads": 1, "resampler_depth": 6}, pixel_shuffle_factor=4), **VISION},
        (keeps(24, 32, 64), 0, 0)),
    "Pixtral": ({"text_config": {"head_dim": 128, "hidden_size": 5120, "model_type": "mistral", "num_hidden_layers": 40,
        "num_key_value_heads": 8, "sliding_window": None}, **VISION}, (keeps(40, 8, 128), 0, 0)),
    "a text model in 32 bits inside": ({"torch_dtype": "float32", "text_config": {key: value for key, value in
        base(18, 8, 1, 2048).items() if key != "torch_dtype"}}, (2 * keeps(18, 1, 256), 0, 0)),
    "GLM 5.1, whose layers share choices": (base(78, 64, 64, 6144, **DEEPSEEK, **DSA, index_topk_freq=4,
        index_skip_topk_offset=3), (78 * 1152 + 21 * 132, 0, 0)),
    "Hunyuan 4": (base(6, 32, 32, 2816, **DEEPSEEK, **DSA, gated_mla=True, head_dtype="float32", learnable_sink=True,
        indexer_types=["full", "full", "shared", "shared", "shared", "full"], layer_types=["deepseek_sparse_attention"] * 6),
        (6 * 1152 + 3 * 132, 0, 0)),
    "Qwen4": (QWEN4, (10 * (2 * 2 * 256 * 2 + 128 * 2 // 16), 0, 30)),
    "GLM 5 Next": (GLM5_NEXT, (2 * (512 * 2 + 132 // 16), 0, 6)),
    "Step 5": (STEP5, (2 * (2 * 8 * 128 * 2 + 256 // 8), 6 * 2 * 4 * 128 * 2, 0)),
    "DeepSeek V4.1": (DEEPSEEK_V41, (585 + 135 + 2 * 292 + 67, 8 * 594, 0)),
    "MiniMax M3": ({"text_config": base(60, 64, 4, 6144, head_dim=128, sparse_attention_config=M3_SPARSE)},
        (keeps(60, 4, 128) + 57 * 128 * 2, 0, 0)),
    "MiniMax M3, newer file": (base(4, 64, 4, 6144, head_dim=128, layer_types=[FULL, "minimax_m3_sparse"] * 2, index_n_heads=4,
        index_head_dim=128, index_block_size=128, index_local_blocks=1, index_topk_blocks=16), (keeps(4, 4, 128) + 512, 0, 0)),
    "MiMo V2": (base(48, 64, 4, 4096, **MIMO_V2, **MIMO_V2_SWA), (12 * 4 * 320 * 2, 36 * 8 * 320 * 2, 0)),
    "MiMo V2, newer file": (base(4, 64, 4, 4096, model_type="mimo_v2_flash", head_dim=192, v_head_dim=128, sliding_window=129,
        layer_types=[FULL, SLIDING] * 2), (2 * 4 * 320 * 2, 2 * 8 * 320 * 2, 0)),
    "Step 3": ({"text_config": base(61, 64, None, 7168, num_attention_groups=1, head_dim=256, share_q_dim=2048)},
        (keeps(61, 1, 256), 0, 0)),
    "Step 3.5": (base(45, 64, 8, 4096, **STEP35), (keeps(12, 8, 128), keeps(33, 8, 128), 0)),
    "Inkling": (base(12, 64, 8, 6144, **INKLING, model_type="inkling_text", conv_kernel_size=4,
        layer_types=(["hybrid_sliding"] * 5 + ["hybrid"]) * 2), (keeps(2, 8, 128), keeps(10, 16, 128) + 12 * 8 * 2048 * 2, 0)),
    "Inkling, first file": (base(12, 64, 8, 6144, **INKLING, use_sconv=True, sconv_kernel_size=4,
        local_layer_ids=[0, 1, 2, 3, 4, 6, 7, 8, 9, 10]), (keeps(2, 8, 128), keeps(10, 16, 128) + 12 * 8 * 2048 * 2, 0)),
    "openPangu, with sinks": (PANGU, (50 * 4 * (192 + 128) * 2, 0, 0)),
    "openPangu, with windows": (base(6, 32, 8, 4096, interleaved_sliding_window=[4096, None]),
        (keeps(3, 8, 128), keeps(3, 8, 128), 0)),
    "Whisper turbo": (WHISPER, (keeps(4, 20, 64), 0, 0)),
    "Cohere Transcribe": (COHERE_ASR, (keeps(8, 8, 128), 0, 0)),
    "BART, in full": ({"is_encoder_decoder": True, "decoder_attention_heads": 16, "decoder_layers": 12, "encoder_layers": 12,
        "d_model": 1024, "max_position_embeddings": 1024}, (keeps(12, 16, 64), 0, 0)),
    "T5, in full": ({"is_encoder_decoder": True, "num_layers": 6, "num_heads": 8, "d_kv": 64, "d_model": 512,
        "n_positions": 512, "relative_attention_num_buckets": 32}, (keeps(6, 8, 64), 0, 0)),
    "Llama 3.2 Vision, in full": (MLLAMA, (keeps(32, 8, 128), 0, 0)),
    "Voxtral Realtime": (VOXTRAL, (0, keeps(26, 8, 128) + 4 * keeps(32, 32, 64), 0)),
    "Unlimited OCR": (UNLIMITED_OCR, (keeps(12, 10, 128), 0, 0)),
    "Ling 2.5": (base(8, 32, 32, 4096, head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, layer_group_size=3,
        group_norm_size=4, linear_silu=False), (4 * 576 * 2, 0, 4)),
    "Ling 3": (LING3, (4 * 576 * 2, 0, 4)),
    "dots3": (DOTS3, (2 * (1088 * 2 + 132), 4 * 1088 * 2, 0)),
    "IQuest LoopCoder": (base(80, 40, 8, 5120, loop_num=2, loop_window_size=64), (keeps(80, 8, 128), keeps(80, 8, 128), 0)),
    "Dory": (DORY, (keeps(4, 4, 256), keeps(4, 4, 256), 0)),
    "HRM": (base(32, 12, None, 1536, H_cycles=2, L_cycles=3, num_layers_per_stack=16), (keeps(128, 12, 128), 0, 0)),
    "Domyn": (base(4, 16, 4, 2048, window_sizes=[[1023, 0], [-1, -1]] * 2, per_layer_config={"1": {"head_dim": 256},
        "3": {"head_dim": 256}}), (keeps(2, 4, 256), keeps(2, 4, 128), 0)),
    "K-EXAONE, with windows by layer": (base(4, 64, 8, 6144, head_dim=128, layer_types=[SLIDING, FULL] * 2, sliding_window=128,
        sliding_windows=[128, None, 256, None]), (keeps(2, 8, 128), keeps(2, 8, 128), 0)),
    "Zaya": (base(4, 8, 2, 2048, head_dim=128, layer_types=["hybrid"] * 4, cca_time0=2, cca_time1=2),
        (keeps(4, 2, 128), 0, 4)),
    "LongCat Flash": (LONGCAT, (56 * 576 * 2, 0, 0)),
    "Nemotron Omni": ({"text_config": {key: value for key, value in base(3, 32, 8, 4096).items() if key !=
        "num_hidden_layers"} | {"layers_block_type": ["linear_attention", "moe", FULL], "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}}, (keeps(1, 8, 128), 0, 1)),
    "values of another size": (base(32, 32, 8, 4096, v_head_dim=64), (32 * 8 * (128 + 64) * 2, 0, 0)),
    "a part that is off": (base(32, 32, 8, 4096, gated_delta_net={"enable": False, "conv_size": 4}), (keeps(32, 8, 128), 0, 0)),
    "a part in parts": ({"thinker_config": {"language_config": {"text_config": base(4, 8, 2, 1024)}}},
        (keeps(4, 2, 128), 0, 0)),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many loops": (base(80, 40, 8, 5120, loop_num=2000, loop_window_size=64), "loop_num: got 2000, allowed: at most 1250"),
    "too many runs": (DORY | {"n_recurrent_loops": 100_000}, "n_recurrent_loops: got 100000, allowed: at most 25000"),
    "frames of no length": (COHERE_ASR | {"preprocessor": {"window_stride": 1e-320}}, "window_stride: got 1e-320, allowed"),
    "pairs of windows that are none": (base(2, 16, 4, 2048, window_sizes=[[1023, 0], 5]), "window_sizes: got 5, allowed: two "),
    "LongCat of another attention": (LONGCAT | {"attention_method": "MHA"}, "attention_method"),
    "an indexer of no size": (QWEN4 | {"indexer_head_dim": None}, "indexer_"),
    "an indexer of two heads": (QWEN4 | {"indexer_kv_heads": 2}, "indexer_kv_heads"),
    "an indexer with values": (base(60, 64, 4, 6144, head_dim=128, sparse_attention_config=M3_SPARSE |
        {"sparse_disable_index_value": [0] * 60}), "sparse_disable_index_value"),
    "an indexer of an unknown kind": (GLM5_NEXT | {"indexer_types": ["half"] * 8}, "indexer_types"),
    "summaries of another size": (STEP5 | {"sparse_config": SUMMARIES | {"region_block_size": 16}}, "region_block_size"),
    "summaries with an unknown field": (STEP5 | {"sparse_config": SUMMARIES | {"kv_heads": 2}}, "kv_heads"),
    "a source of no entries": ({"text_config": DEEPSEEK_V41["text_config"] | {"kv_source_layer_ids": [1]}},
        "kv_source_layer_ids"),
    "entries of an unknown size": ({"text_config": DEEPSEEK_V41["text_config"] | {"compress_ratios": [0, 4] * 4}},
        "compress_ratios"),
    "sinks with latent vectors": (base(4, 8, 8, 1024, kv_lora_rank=512, qk_rope_head_dim=64, param_sink_number=128),
        "param_sink_number"),
    "a layer of its own that is none": (base(4, 16, 4, 2048, per_layer_config={"4": {"head_dim": 256}}), "per_layer_config"),
    "a layer of its own with an unknown field": (base(4, 16, 4, 2048, per_layer_config={"1": {"kv_groups": 2}}),
        r"per_layer_config\[1\].kv_groups"),
    "an encoder that reads pictures": ({"is_encoder_decoder": True, "decoder": base(4, 16, 16, 1024) | {"decoder_layers": 4},
        "encoder": {"image_size": 384}}, "is_encoder_decoder"),
    "BART": (base(12, 16, None, 1024, is_encoder_decoder=True), "is_encoder_decoder"),
    "Whisper": ({"is_encoder_decoder": True, "encoder_layers": 32, "decoder_layers": 32, "d_model": 1280},
        "is_encoder_decoder"),
    "T5": ({"is_encoder_decoder": True, "num_layers": 24, "num_heads": 16, "d_model": 1024}, "is_encoder_decoder"),
    "Florence": ({"text_config": base(12, 16, 16, 1024), "is_encoder_decoder": True}, "is_encoder_decoder"),
    "LongCat": ({"num_layers": 28, "num_attention_heads": 64, "hidden_size": 6144, "attention_method": "MLA",
        "kv_lora_rank": 512}, "num_hidden_layers"),
    "LongCat, with layers": (base(28, 64, 64, 6144, **DEEPSEEK, attention_method="MLA"), "attention_method"),
    "Ouro": (base(24, 16, 16, 2048, total_ut_steps=4), "total_ut_steps"),
    "Hunyuan Large": (base(64, 80, 8, 6400, use_cla=True, cla_share_factor=2), "cla"),
    "Hymba": (base(32, 25, 5, 1600, kv_reuse_group=[[1, 2]], global_attn_idx=[0, 15], mamba_d_state=16), "mamba_d_state"),
    "Phi 3 small": (base(32, 32, 8, 4096, blocksparse_block_size=64, dense_attention_every_n_layers=2),
        "blocksparse_block_size"),
    "Phi MoE": (base(32, 32, 8, 4096, model_type="phimoe", sliding_window=2047), "sliding_window"),
    "Phi 4 flash": (base(32, 40, 20, 2560, mb_per_layer=2, mamba_d_state=16, sliding_window=512), "sliding_window"),
    "RecurrentGemma": (base(26, 10, 1, 2560, block_types=["recurrent", "recurrent", "attention"], lru_width=2560),
        "block_types"),
    "RWKV": ({"model_type": "rwkv", "attention_hidden_size": 768, "hidden_size": 768, "num_hidden_layers": 12},
        "num_attention_heads"),
    "flash linear attention": (base(24, 8, None, 2048, attn_mode="chunk", expand_v=2), "attn_mode"),
    "Ring": (base(20, 16, 4, 2048, head_dim=128, layer_group_size=5, group_norm_size=4), "layer_group_size"),
    "MiniCPM 4": (base(32, 32, 2, 4096, sparse_config={"kernel_size": 32, "block_size": 64}), "sparse_config"),
    "Step 3.5 of no listed layers": (base(45, 64, 8, 4096, **STEP35 | {"layer_types": None, "sliding_window": None}),
        "attention_other_setting"),
    "PLaMo": (base(40, 40, None, 5120, n_shared_head=8), "n_shared_head"),
    "PLaMo 2": (base(16, 16, 1, 2048, mamba_d_state=64, attention_window_size=2048), "mamba_d_state"),
    "SOLAR Pro": (base(64, 40, 10, 5120, model_type="solar", sliding_window=2048, bskcn_1=[12, 20]), "sliding_window"),
    "GPT-Neo": ({"model_type": "gpt_neo", "num_layers": 24, "num_heads": 16, "attention_types": [[["global", "local"], 12]]},
        "num_hidden_layers"),
    "Zamba": (base(76, 16, 16, 3712, attn_layer_period=6, attn_layer_offset=4, n_mamba_heads=2, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2), "mamba_ngroups"),
    "EvaByte": (base(32, 32, None, 4096, window_size=2048, chunk_size=16), "window_size"),
    "Baichuan M1": (base(40, 32, 2, 5120, num_swa_attention_heads=20, sliding_window_layers=[1, 3]),
        "num_swa_attention_heads"),
    "YOCO": (base(32, 32, 8, 4096, use_yoco=True), "use_yoco"),
    "Nemotron-NAS with windows": (NAS | {"block_configs": [block(8, window_length=8192)] * 6}, "window_length"),
    "Nemotron-NAS with too few blocks": (NAS | {"block_configs": [block(8)] * 5}, "block_configs"),
    "Nemotron-NAS with groups that do not divide": (NAS | {"block_configs": [block(5)] * 6}, "n_heads_in_group"),
    "DBRX without a field": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40}, "attn_config"),
    "DBRX without KV heads": ({"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "attn_config": {"clip_qkv": 8}}, "attn_config"),
    "a field inside another": (base(4, 8, 2, 1024, some_config={"deep": {"num_kv_groups": 4}}),
        "some_config.deep.num_kv_groups"),
    "a field of another's place inside": (base(4, 8, 2, 1024, some_config={"num_key_value_heads": 4}),
        "some_config.num_key_value_heads"),
    "a field in a list": (base(4, 8, 2, 1024, stages=[{"dim": 8}, {"kv_heads": 4}]), r"stages\[1\].kv_heads"),
    "a field inside of delta attention": (base(8, 32, 32, 2304, kv_lora_rank=512, qk_rope_head_dim=64,
        linear_attn_config=KIMI_LAYERS | {"kv_groups": 4}), "linear_attn_config.kv_groups"),
    "a field inside of double chunks": (base(48, 40, 8, 5120, dual_chunk_attention_config={"chunk_size": 8, "window": 4}),
        "dual_chunk_attention_config.window"),
    "a field inside of the experts": (base(4, 8, 2, 1024, ffn_config={"moe_top_k": 4, "kv_heads": 2}), "ffn_config.kv_heads"),
    "a field inside of a block": (NAS | {"block_configs": [block(8)] * 5 + [block(8) | {"cache": 4}]},
        r"block_configs\[5\].cache"),
    "a field inside of the experts of a block": (NAS | {"block_configs": [block(8) | {"ffn": {"kv_heads": 4}}] * 6},
        r"block_configs\[0\].ffn.kv_heads"),
    "latents of no rank": (base(32, 32, 8, 4096, use_mla=True), "use_mla, but lacks kv_lora_rank"),
    "a list by layer": (base(32, 32, 8, 4096, widths=[1] * 32), "widths"),
    "too few types": (base(32, 32, 8, 4096, layer_types=[FULL] * 31), "layer_types"),
    "too many types": (base(32, 32, 8, 4096, layer_types=[FULL] * 33), "layer_types"),
    "too few layers without rotation": (base(36, 16, 4, 2048, no_rope_layers=[1, 1, 1, 0] * 8), "no_rope_layers"),
    "types that contradict": (base(4, 32, 8, 4096, layer_types=[FULL] * 4, layers_block_type=["mamba"] * 4),
        "layer_types and layers_block_type"),
    "chunks of an unknown model": (base(32, 32, 8, 4096, attention_chunk_size=8192), "attention_chunk_size"),
    "too few KV heads": (base(32, 32, None, 4096, num_key_value_heads=[8] * 31), "num_key_value_heads"),
    "KV heads of 0": (base(4, 32, None, 4096, num_key_value_heads=[8, 0, 8, 8]), "num_key_value_heads"),
    "blocks with KV heads of their own": (base(6, 32, 8, 4096, **NEMOTRON_H | {"block_configs": [
        {"block_type": "attention", "num_key_value_heads": 2}] * 6}), "num_key_value_heads"),
    "too few letters": (base(8, 32, 8, 4096, **NEMOTRON_H), "hybrid_override_pattern"),
    "too few kinds": (base(62, 48, 8, 3072, attn_type_list=[1] * 61), "attn_type_list"),
    "a layer that is none": (base(32, 32, 8, 4096, attn_layer_indices=[9, 32], **MAMBA2), "attn_layer_indices"),
    "a cross layer that is none": (base(32, 32, 8, 4096, cross_attention_layers=[40]), "cross_attention_layers"),
    "a layer of Kimi in no list": (base(9, 32, 32, 2304, kv_lora_rank=512, qk_rope_head_dim=64,
        linear_attn_config=KIMI_LAYERS), "full_attn_layers"),
    "two numbers of KV heads": (base(32, 32, 8, 4096, num_kv_heads=4), "num_kv_heads"),
    "two numbers of layers": (base(32, 32, 8, 4096, n_layer=16), "n_layer"),
    "groups of an unknown model": (base(32, 32, None, 4096, multi_query=True), "multi_query"),
    "an indexer without a choice": (base(61, 128, 128, 7168, index_n_heads=64, kv_lora_rank=512, qk_rope_head_dim=64),
        "index_n_heads"),
    "a part of a key without the rest": (base(61, 128, 128, 7168, qk_nope_head_dim=128), "qk_nope_head_dim"),
    "heads of no size": (base(92, 96, 8, 5120), "head_dim"),
    "heads of the model's own size": (base(36, 32, 8, 4096, model_type="qwen3"), "head_dim"),
    "KV heads left out inside": ({"text_config": base(32, 32, None, 4096, model_type="mistral", sliding_window=None)},
        "num_key_value_heads"),
    "a window left out": ({"text_config": base(32, 32, 8, 4096, model_type="mistral")}, "sliding_window"),
    "chunks left out": ({"text_config": base(48, 40, 8, 5120, model_type="llama4_text")}, "attention_chunk_size"),
    "two text models": ({"text_config": base(4, 8, 2, 1024), "llm_config": base(8, 8, 2, 1024)},
        "text_config and llm_config"),
    "a global head size for no layers": (base(32, 32, 8, 4096, global_head_dim=512), "global_head_dim"),
    "a cache of other numbers": (base(32, 32, 8, 4096, quantization_config={"kv_cache_scheme": {"num_bits": 8}}),
        "kv_cache_scheme"),
    "a cache of other numbers, named inside": (base(32, 32, 8, 4096, quantization_config={"quant_method": "quark", "export":
        {"kv_cache_group": ["*k_proj", "*v_proj"]}}), "quantization_config.export.kv_cache_group: name the dtype"),
    "two windows": (base(42, 16, 8, 3584, model_type="gemma2", head_dim=256, sliding_window=4096, sliding_window_size=2048),
        "sliding_window 4096 and sliding_window_size 2048"),
    "heads of a drafter's name": (base(32, 32, 8, 4096, moe_kv_heads=4), "moe_kv_heads"),
}
# fmt: on
