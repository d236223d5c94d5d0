"""What the layers of published models keep: the right bytes, or an error that names the field, and never other bytes."""

from pathlib import Path
from typing import Any

import pytest
from command_line import write_config
from model_families import KEPT, REFUSED, Kept

from pagepool.errors import ArgumentError
from pagepool.replay.models.caches import FULL, list_attention
from pagepool.replay.models.config import read_config
from pagepool.replay.models.layers import list_state_layers, list_types
from pagepool.replay.models.pages import read_model


def count_kept(folder: Path, fields: dict[str, Any]) -> Kept:
    """Return bytes a token of full attention and of others, and the number of layers with a state."""
    config = read_config(str(write_config(folder, fields)))
    types = list_types(config)
    kinds = list_attention(config, types, 16, None)
    full, local = (
        sum(kind.num_bytes // kind.page_size * len(kind.layers) for kind in kinds if (kind.reach == FULL) == is_full)
        for is_full in (True, False)
    )
    return full, local, len(list_state_layers(types))


@pytest.mark.parametrize("name", KEPT)
def test_bytes_a_token(name: str, tmp_path: Path) -> None:
    fields, kept = KEPT[name]
    assert count_kept(tmp_path, fields) == kept
    read_model(str(tmp_path / "config.json"))  # groups and states are found too


@pytest.mark.parametrize("name", REFUSED)
def test_the_field_is_named(name: str, tmp_path: Path) -> None:
    fields, field = REFUSED[name]
    with pytest.raises(ArgumentError, match=field):
        read_model(str(write_config(tmp_path, fields)))


@pytest.mark.parametrize(
    "field",
    ["kv_groups", "num_heads_kv", "n_kv_head", "head_groups", "share_layers", "block_pattern", "indexer_dim", "cross_every",
     "window_len", "sparse_topk", "latent_dim", "num_memory_slots", "kv_bits", "attn_types", "cache_every", "local_span",
     "global_every", "mla_rank", "loop_count", "recurrent_depth", "hybrid_ratio"],
)  # fmt: skip
@pytest.mark.parametrize("value", [2, "some", [1, 2], {"a": 1}, True])
def test_names_that_nobody_reads(field: str, value: object, tmp_path: Path) -> None:
    fields, kept = KEPT["Llama 3.1"]
    with pytest.raises(
        ArgumentError, match=f"has {field}, which is not understood: pagepool plan takes the bytes by --bytes-p"
    ):
        read_model(str(write_config(tmp_path, fields | {field: value})))
    assert count_kept(tmp_path, fields | {field: None}) == kept


def names(text: str) -> list[str]:
    return text.split()


# Names of routing, experts, rotations, norms, residuals, gates of outputs, training, other towers and weights.
HARMLESS = names(
    """
    attention_aux_loss attention_bias_init attention_gate_bias attention_init_method attention_layernorm_eps attention_norm
    attention_norm_type attention_probs_dropout_prob attention_residual attention_rope_scaling attention_temperature_scaling
    attn_aux_loss_coef attn_dropout_prob attn_gate attn_init_std attn_logit_clip attn_logits_softcap attn_norm_eps
    attn_output_gate_init attn_res_block_size attn_res_norm attn_residual_scale attn_rope_theta attn_softmax_scale
    block_residual_scale block_sparse_moe_gate elementwise_attn_output_gate enable_attention_gate expert_group_balance
    expert_layer_balance expert_parallel_group gated_attention group_norm_eps head_dropout head_norm
    headwise_attn_output_gate hidden_act_block image_token_index latent_moe_scale layer_dropout layer_norm_placement
    layer_scale_init_value lm_head_init_std mla_rope_scaling_factor mla_use_output_gate mlp_block_type mlp_shared_bias
    moe_block_aux moe_group_limit moe_latent_size moe_layer_idx_offset moe_shared_expert_gate mtp_block_count
    norm_after_attention num_experts_per_group num_experts_per_layer num_image_layers num_vision_layers per_layer_norm
    post_attention_norm pre_attention_layernorm prenorm_attention qk_rope_scaling query_norm_eps residual_attention_scale
    residual_block_scale rope_attention_factor rope_global_base routed_expert_block_size router_aux_group router_group_score
    shared_expert_gate shared_expert_gate_bias shared_experts_fused swiglu_block_limit training_attention_dropout
    use_attention_gate use_head_wise_attn_gate use_head_wise_gate use_qk_head_norm use_rope_in_attention
    attention_logit_cap attn_logit_soft_cap attn_output_gate_rank attn_rope_freq_base cross_dropout_rate kv_a_layernorm_type
    kv_dropout kv_norm kv_norm_eps moe_norm_layers output_gate_layers post_attention_norm_pattern sandwich_norm_layers
    sliding_window_rope_theta use_kv_norm use_memory_efficient_attention value_norm_init_std
    vision_attention_pool vision_global_attn_indexes visual_layer_count weight_init_block z_loss_group
    """
)

# Names that decide what a layer keeps, also with words of the names above.
KEEPING = names(
    """
    act_kv_bits attention_cache_norm attention_chunk_gate attention_groups attention_layers attention_memory_gate
    attn_block_topk attn_gate_block_size attn_gate_window attn_sink_tokens attn_window_bias_span block_index
    cache_router_groups chunked_gate compress_gate conv_attn_norm_state cross_attention_gate d_kv delta_gate_state
    expert_attention_heads expert_cache_dim expert_kv_heads gate_compress_stride gate_kv_dim gate_sliding_span
    gate_top_blocks_num_block gated_delta_layers gated_linear_attention_layers global_attn_gate_every
    global_rope_attention_layers image_cross_attention_layers index_gate_dim indexer_norm_heads key_norm_dim kv_gate kv_rope_dim
    layer_attention_gate_types linear_gate_attention lru_gate_width mamba_gate_block mem_gate_slots mla_latent_gate_rank
    moba_block_size moe_kv_groups moe_mamba_layers moe_sliding_span n_kv_groups_norm nope_attention_gate
    norm_attention_pattern nsa_block nsa_gate num_attention_gate_blocks num_retention_gate qk_rope_dim recurrent_gate_block
    residual_window rope_attention_heads rope_head_dim rope_kv_heads rope_layer_window routed_attention_heads
    router_attention_heads rwkv_gate segment_attn_gate share_attention_gate shared_kv_norm_layers sliding_gate
    sparse_attention_gate ssm_gate_group state_gate_block swa_attention_gate swa_gate value_gate_dim
    window_norm gate_attention_span
    attention_loop_norm_layers kv_norm_heads kv_norm_rank mlp_loop_count moe_loop_layers num_expert_loops
    window_rope_base_span shared_norm_layers_kv soft_cap_kv_heads
    moe_indexer norm_v_head_size num_sinks gate_qk_dim ring_size router_index_topk norm_ring_span use_num_sinks
    """
)


@pytest.mark.parametrize("value", [True, 2])
def test_names_that_say_nothing_about_a_cache_change_nothing(value: object, tmp_path: Path) -> None:
    for name in ("Llama 3.1", "Kimi K3", "Qwen3-Next", "DeepSeek V3.2", "gpt-oss", "Gemma 2"):
        fields, kept = KEPT[name]
        more = dict.fromkeys(HARMLESS, value)
        with_more = fields | more if "text_config" not in fields else fields | {"text_config": fields["text_config"] | more}
        assert count_kept(tmp_path, with_more) == kept


@pytest.mark.parametrize("name", KEEPING)
def test_names_that_decide_what_is_kept_are_refused(name: str, tmp_path: Path) -> None:
    for model in ("Llama 3.1", "gpt-oss", "DeepSeek V3.2"):
        for value in (2, [1, 2]):
            with pytest.raises(ArgumentError, match=f"has {name}, "):
                read_model(str(write_config(tmp_path, KEPT[model][0] | {name: value})))
