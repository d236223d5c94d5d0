"""The fields of a configuration, by their effect on the bytes of caches.

A field is accepted if one of the readers reads it, if it is known to be irrelevant, itself or by words of its name, or if
its name has nothing to do with caches. Any other field raises an error naming it: a page of the wrong size is worse than none.
"""

import re
from typing import Any, NamedTuple

from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.names import BLOCK_FIELDS
from pagepool.replay.models.values import WHOLE, Config, is_set

REMEDY = "pagepool plan takes the bytes by --bytes-per-token instead"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUSPICIOUS = re.compile(
    "head|kv|group|layer|block|index|idx|cross|window|sliding|swa|sparse|latent|shar|chunk|attn|attention|ssm|mamba|conv|recur"
    "|lru|rwkv|cache|compress|local|global|stride|hybrid|pattern|query|memory|loop|retention|retrieval|encoder_decoder|lookback"
    "|(?:^|_)(?:ut|mem|key|value|mla|mha|gqa|mqa|cla|yoco|state|states|linear|lightning|delta|segment|sink|sinks|nope|nsa|dsa"
    "|moba|gdn|kda|ring|span|mixer)(?:_|$)|expand_[kv]$|k_equals_v"
    r"|(?:^|_)(?:q|k|v|qk)_(?:\w+_)?(?:dim|rank|size)$"
)
"""Pattern of the names of fields that may affect a layer's entries."""

UNDERSTOOD = _names(
    """
    attention_chunk_size attention_head_dim attention_k_eq_v attn_type_list block_configs compress_rates compress_ratios
    compress_rope_theta full_attention_interval global_head_dim head_dim hidden_size hybrid_layer_pattern index_head_dim
    index_n_heads index_topk indexer_head_dim kv_channels kv_lora_rank kv_source_layer_ids layer_types layers_block_type
    local_layer_ids loop_num max_window_layers no_rope_layer_interval no_rope_layers num_attention_heads
    num_global_key_value_heads num_hidden_layers num_key_value_heads num_kv_shared_layers param_sink_number per_layer_config
    ple_layer_ids q_head_dim q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rswa_window sconv_kernel_size
    sliding_window sliding_window_pattern sparse_attention_config summary_config use_mla use_sliding_window v_head_dim
    """
)
"""Fields read by `layers`, `caches` and `fixed`, which raise errors for unknown values."""

_SWA_FIELDS = _names("swa_head_dim swa_num_key_value_heads swa_v_head_dim")
BESIDE: dict[str, frozenset[str]] = {
    "index_topk": _names(
        "index_kpool index_kpool_always_select_tail index_kpool_compress index_share_for_mtp_iteration index_skip_topk_offset"
        " index_topk_freq index_topk_pattern indexer_types"
    ),
    "index_topk_blocks": _names("index_block_size index_local_blocks index_topk_blocks"),
    "indexer_head_dim": _names("indexer_budget indexer_compress_ratio indexer_kv_heads indexer_n_heads"),
    "kv_source_layer_ids": _names(
        "candidate_block_size candidate_source_layer_id candidate_topk_blocks index_source_layer_ids"
    ),
    "engram_layer_ids": _names("engram_compressed_vocab_size engram_head_dim engram_n_heads engram_num_embeddings"),
    "hybrid_layer_pattern": _SWA_FIELDS,
    "layernorm_num_groups": _names("rope_head_dim"),
    "local_layer_ids": _SWA_FIELDS,
    "loop_num": _names("loop_window_size"),
    "num_key_value_heads": _names(
        "num_attention_heads_per_layer num_sliding_attention_heads swa_num_attention_heads swa_q_lora_rank swa_qk_nope_head_dim"
    ),
    "param_sink_number": _names("param_sink_of_head_dim param_sink_scalar param_sink_with_value"),
    "ple_layer_ids": _names("heads_per_ngram ple_conv_kernel_size"),
    "recurrent_kv_cache_mode": _names(
        "n_input_layers n_output_layers n_recurrent_layers n_recurrent_loops recurrent_kv_cache_mode"
    ),
    "sconv_kernel_size": _names("use_sconv"),
    "shared_expert_intermediate_size": _names("num_blocks"),
}
"""Fields understood beside another one, which they refine; the first one may be empty."""

SLIDING_FIELDS = _names(
    """
    sliding_windows swa_attention_gate_type swa_head_dim swa_kv_lora_rank swa_num_key_value_heads swa_qk_rope_head_dim
    swa_rope_parameters swa_v_head_dim
    """
)
"""Fields of layers with windows."""

STATE_FIELDS = _names(
    """
    attn_layer_indices attn_layer_offset attn_layer_period block_size chunk_size conv_L_cache conv_dim conv_kernel
    full_attn_alpha_factor full_attn_beta_factor full_attn_idxs hybrid_layer_ids hybrid_override_pattern kda_lower_bound
    kda_safe_gate layer_group_size linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_attn_alpha_factor
    linear_attn_beta_factor linear_attn_config linear_conv_kernel_dim linear_dt_init_floor linear_dt_max linear_dt_min
    linear_head_dim linear_key_head_dim linear_lower_bound linear_num_heads linear_num_key_heads linear_num_value_heads
    linear_rope linear_silu linear_value_head_dim mamba_act mamba_chunk_size mamba_d_conv mamba_d_head mamba_d_ssm
    mamba_d_state mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_dt_rank mamba_expand mamba_head_dim mamba_headdim
    mamba_hidden_act mamba_inner_layernorms mamba_n_groups mamba_n_heads mamba_ngroups mamba_norm_before_gate mamba_num_heads
    mamba_rms_norm mamba_ssm_cache_dtype mamba_ssm_dtype mamba_use_mlp n_groups n_mamba_heads no_kda_lora num_heads
    num_mem_blocks number_of_conv_states short_conv_kernel_size ssm_multipliers ssm_state_size state_size use_kda_lora
    use_linear_silu use_mamba_kernels use_mambapy use_mem_eff_path use_mem_rope use_shared_attention_adapter
    use_shared_attention_lora use_shared_mlp_adapter use_shared_mlp_lora
    """
)
"""Fields of models with states, or with listed layers, which `layers` and `states` read or may ignore."""

LISTED_FIELDS = _names(
    """
    attention_other_setting global_attn_every_n_layers head_dim_full_attention head_dim_sliding_attention
    layer_types_with_mtp num_attention_groups_full_attention num_attention_groups_sliding_attention
    order_of_interleaved_layers prefix_dense_sliding_window_pattern
    """
)
"""Fields with the same content as `layer_types`, or that refine it."""

INSIDE: dict[str, frozenset[str]] = {
    "attention": BLOCK_FIELDS,
    "attention_other_setting": _names("attention_type head_dim num_attention_groups num_attention_heads true_head_dim"),
    "block_configs": _names("attention block_type ffn"),
    "ffn": _names("replace_with_linear"),
    "compress_rates": _names("compressed_sparse_attention heavily_compressed_attention"),
    "dual_chunk_attention_config": _names(
        "chunk_size local_size sparse_attention_config sparse_attention_enabled sparse_attention_last_q"
    ),
    "linear_attn_config": _names("full_attn_layers head_dim kda_layers num_heads short_conv_kernel_size"),
    "per_layer_config": _names("head_dim num_attention_heads num_key_value_heads sliding_window v_head_dim"),
    "sparse_attention_config": _names(
        """
        sparse_attention_freq sparse_block_size sparse_disable_index_value sparse_index_dim sparse_init_block
        sparse_local_block sparse_num_index_heads sparse_score_type sparse_topk_blocks use_sparse_attention
        """
    ),
    "summary_config": _names(
        """
        apply_to_layer_types attention_impl compression_method index_tp_size num_provider_groups region_block_size
        sparse_indexer_csa_z_norm_type sparse_indexer_k_norm_type sparse_indexer_num_heads sparse_indexer_num_k_heads
        sparse_indexer_q_norm_type sparse_indexer_rope_dim sparse_indexer_softmax_variant sparse_indexer_ssmax_s_granularity
        sparse_indexer_use_rope
        """
    ),
}
"""Fields inside other fields that are read, or that choose which keys a token attends to while all keys are kept."""

WITHOUT_INFLUENCE = _names(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled
    activation_sparsity_pattern apply_query_key_layer_scaling architectures attention_gate_type attention_hidden_size
    attention_value_scale attn_impl attn_implementation attn_logit_cap attn_mask_type attn_output_gate attn_rotary_emb
    attn_temperature_tuning attn_uses_sequence_id block_auto_adjust_ff_dim block_dim block_ff_dim block_mlp_init_scale
    block_multiple_of block_out_init_scale block_use_swiglu block_use_xavier_init cache_implementation chunk_size_feed_forward
    clip_qkv conv_dim_out conv_use_xavier_init decoder_sparse_step do_layer_norm_before drop_vision_last_layer
    dual_chunk_attention_config embd_layer enable_confidence_head enable_lm_head_fp32 enable_moe_block engram_layer_ids
    ffn_multipliers first_k_dense_replace gated_linear_unit gated_mla group_limited_greedy head_dtype
    hidden_size_per_layer_input indexer_rope_interleave interleave_moe_layer_step intermediate_size is_moe_layer
    layer_norm_elementwise_affine layer_norm_type layer_scale_init_value layerdrop learnable_sink learnable_sink_init lm_head
    max_attn_value mla_scale_kv_lora mla_scale_q_lora mla_use_nope multi_gate n_group n_hash_layers n_mtp_layers norm_head
    normalize_qk_projections num_beam_groups num_dense_layers num_expert_group num_expert_groups num_hash_layers
    num_limited_groups num_ln_in_parallel_attn num_logits_to_keep num_mtp_layers num_nextn_predict_layers o_groups o_lora_rank
    output_attentions output_hidden_states pad_key_length parallel_attn parallel_attn_mlp_res parallel_block position_layers
    post_attention_layernorm pre_allocate_kv_cache qkv_multipliers query_num query_pre_attn_scalar
    relative_attention_max_distance relative_attention_num_buckets reorder_and_upcast_attn rm_head rope_interleave
    scale_attn_by_inverse_layer_idx scale_attn_weights share_encoder_decoder_embeddings share_input_output_layers share_q_dim
    shared_expert_intermediate_size shared_expert_sink shared_intermediate_size shared_moe_mode tie_encoder_decoder topk_group
    use_bidirectional_attention use_cache use_cache_kernel use_double_wide_mlp use_embedding_sharing use_flash_attention
    use_flash_attn use_grouped_mm use_grouped_topk use_logn_attn use_memory_efficient_attention use_mixed_mlp_moe
    use_parallel_block use_parallel_residual use_rope_layers use_weighted_layer_sum vocab_size_per_layer_input
    """
)
"""Fields of attention, experts, norms and drafters without an effect on cached bytes."""

WITHOUT_INFLUENCE_ENDS = re.compile(
    "^(?:activation|rope|rotary|vision|image|audio|video|speech|vit|visual|talker|talker_config|code2wav"
    "|token2wav|tts|projector|mm|img|embd|mtp|time_step|qk_norm|qk_layernorm|use_qk|layernorm|quantization|generation|mup"
    "|altup|laurel|perceiver|vq|dspark)(?:_|$)"
    "|_(?:norm|norms|layernorm|layernorms|bias|token_id|token_ids|token_index|act|experts|expert|init|multiplier|multipliers"
    "|in_fp32|scale|scaling|alpha|lr|prob)$"
)
"""Parts of names: prefixes of rotations and of towers for other inputs than text; suffixes of norms, biases and factors."""

CACHED = re.compile(
    r"kv|cache|head_dim|heads$|window|cross\w*(?:layers|every|freq|interval)"
    r"|(?:size|expand|chunk|conv|value|state)_(?:\w+_)?(?:multipliers?|scale|scaling|alpha)$"
)  # still suspicious in a name with a harmless prefix or suffix

NUMBERS = re.compile(
    "(?:^|_)(?:eps|epsilon|theta|dropout|pdrop|drop_?rate|std|loss_coef|softcap|softcapping|temperature"
    "|(?:dropout|drop)_(?:p|prob|rate))$"
)
"""Last words of the names of numbers that cannot be the size of a cache, whatever words come before."""

PHRASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("qkv"), ""),
    (re.compile("soft_cap(?:ping)?(?=_|$)|logits?_cap(?:ping)?(?=_|$)"), "softcap"),
    (
        re.compile(
            "(?:^|(?<=_))(?:kv|qk|q|k|v|query|key|value)_(?:(?:a|b|lora)_)?(?=(?:layer|rms)?norms?(?:_(?!dim|rank|size)|$))"
        ),
        "",
    ),
    (
        re.compile(
            "(norms?|bias|residuals?|loss)_(?:layers?|pattern|period|interval|freq|every|types?|idx|index|indices)(?=_|$)"
        ),
        r"\1",
    ),
    (re.compile("(?<=rope)_(?:base|freqs?)(?=_|$)"), ""),
    (re.compile("(?:^|(?<=_))(?:o|out|output)_gate_(?:layers?|dim|rank|size|types?)(?=_|$)"), "gate"),
)
"""Phrases whose words mean something else alone, with their replacements: joint projections of queries, keys and values,
caps of logits, norms of keys, places of norms and biases, frequencies of rotations, and gates of outputs."""


class Words(NamedTuple):
    """Words that mark a name as without effect on cached bytes, unless it matches `others`: words on what layers keep."""

    words: frozenset[str]
    others: re.Pattern[str]


ENTRIES = (
    "kv|cache|head_dim|head_size|heads|window|sliding|swa|cross|compress|ssm|mamba|conv|recur|rwkv|lru|loop|retention|retrieval"
    r"|memory|lookback|indexer|index_(?:topk|head|n|dim)|(?:^|_)(?:ring|span|(?:q|k|v|qk)_(?:\w+_)?(?:dim|rank|size))(?:_|$)"
)
STATES = "(?:^|_)(?:ut|mem|key|value|state|states|linear|lightning|delta|sink|sinks|gdn|kda|nsa|dsa|moba|yoco|cla)(?:_|$)"
LAYERS = "chunk|stride|index|idx|shar|latent|sparse|layers|types|pattern|interval|every|freq|period|hybrid|local|global"
SIZES = r"(?:^|_)(?:nope|segment|dim|rank|topk)(?:_|$)"
EXPERTS = Words(
    _names("moe expert experts router routers routed routing mlp mlps ffn swiglu"),
    re.compile(f"{ENTRIES}|{STATES}|attn|attention"),
)
TOWERS = Words(_names("vision visual image images video videos audio speech pixel patch"), re.compile("kv|cache|cross|window"))
FACTORS = Words(
    _names(
        """
        norm norms layernorm layernorms rmsnorm prenorm postnorm eps epsilon rope rotary mrope yarn ntk theta res residual
        residuals loss aux dropout drop droppath init initializer initialization std grad gradient act activation bias biases
        softcap softcapping softmax temperature clip clipping multiplier scaling
        """
    ),
    re.compile(f"{ENTRIES}|{STATES}|{LAYERS}|{SIZES}"),
)
GATES = Words(
    _names("gate gates gated gating"), re.compile(f"{ENTRIES}|{STATES}|{LAYERS}|{SIZES}|block|group|size|(?:^|_)(?:num|n)_")
)
WITHOUT_INFLUENCE_WORDS = (EXPERTS, TOWERS, FACTORS, GATES)
"""Names of experts and their routing, of other towers, of norms, rotations, residuals and training, and of gates of outputs."""


def check_fields(config: Config, *, has_listed_layers: bool, has_states: bool, has_windows: bool) -> None:
    """Raise ArgumentError for a field that no reader reads but that may affect a layer's entries."""
    known = UNDERSTOOD | WITHOUT_INFLUENCE
    known |= {name for first, names in BESIDE.items() if config.get(first) is not None for name in names}
    if has_windows:
        known |= SLIDING_FIELDS
    if has_states or has_listed_layers:
        known |= STATE_FIELDS
    if has_listed_layers:
        known |= LISTED_FIELDS
    _check(config, known, config.get("num_hidden_layers"))


def _check(config: Config, known: frozenset[str], num_layers: object, path: str = "") -> None:
    for name, value in config.items():
        if name == WHOLE or not is_set(value) or _is_without_influence(name) or _is_off(value):
            continue
        rest = _without_phrases(name)
        is_suspicious = SUSPICIOUS.search(rest) or _is_by_layer(value, num_layers)
        if name not in known and is_suspicious and not _has_harmless_words(rest):
            named = f"{path}{name}" if name.isidentifier() else shown(f"{path}{name}")
            raise ArgumentError(f"has {named}, which is not understood: {REMEDY}")
        inside = INSIDE.get(name, frozenset()) if name in known else frozenset()
        items = [(f"[{place}]", item) for place, item in enumerate(value)] if isinstance(value, list) else [("", value)]
        for place, item in items:
            if isinstance(item, dict):
                _check(item, WITHOUT_INFLUENCE | inside, num_layers, f"{path}{name}{place}.")


def _is_off(value: object) -> bool:
    """Whether a part of the model says that it is not there."""
    return isinstance(value, dict) and value.get("enable") is False


def _is_without_influence(name: str) -> bool:
    is_harmless = WITHOUT_INFLUENCE_ENDS.search(name) and not CACHED.search(_without_phrases(name))
    return bool(is_harmless or NUMBERS.search(name))


def _without_phrases(name: str) -> str:
    for phrase, words in PHRASES:
        name = phrase.sub(words, name)
    return name


def _has_harmless_words(name: str) -> bool:
    words = {*name.split("_")}
    return any(not kind.words.isdisjoint(words) and not kind.others.search(name) for kind in WITHOUT_INFLUENCE_WORDS)


def _is_by_layer(value: Any, num_layers: object) -> bool:
    """Whether a value is a list with an item for each layer. Short lists do not count: their length may agree by chance."""
    return isinstance(value, list) and len(value) == num_layers and len(value) > 4
