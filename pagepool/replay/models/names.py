"""Other names of fields: `use_usual_names` returns a configuration with those that the readers of layers and caches expect."""

from reprlib import repr as shorten

from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.replay.models.values import MAX_LAYERS, WHOLE, Config, is_set, read_int, read_layer_list, read_layers

GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
MOSAIC = {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"}
FALCON = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
GLM = {"num_hidden_layers": "num_layers"}
OPENELM = {"num_hidden_layers": "num_transformer_layers", "num_attention_heads": "num_query_heads", "hidden_size": "model_dim"}
INKLING = {"sconv_kernel_size": "conv_kernel_size"}
NAMES: dict[object, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen"), GPT),
    **dict.fromkeys(("mpt", "dbrx"), MOSAIC),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), FALCON),
    "bloom": GPT | {"hidden_size": "n_embed"},
    **dict.fromkeys(("chatglm", "exaone"), GLM),
    "openelm": OPENELM,
    "cohere2": {"sliding_window_pattern": "layer_switch"},
    "plamo3": {"sliding_window": "window_size"},
    **dict.fromkeys(("inkling_text", "inkling_model"), INKLING),
}
"""Names that some models have for the usual fields."""

SAME = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_heads", "n_head", "n_heads"),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}
"""Fields with two names in some models."""

DECODER_NAMES = {
    "num_hidden_layers": ("decoder_layers", "decoder_num_hidden_layers", "num_decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads", "decoder_num_attention_heads", "num_heads"),
    "num_key_value_heads": ("decoder_num_key_value_heads",),
    "hidden_size": ("d_model",),
    "head_dim": ("d_kv",),
}
"""Fields of a decoder beside an encoder, with the names that count if they are there."""

ENCODER_STARTS = ("encoder", "decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size")
"""Names of fields that say nothing more once the decoder's are read."""

ANSWER_WINDOW = 128  # tokens; Unlimited-OCR's default
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "num_key_value_heads_per_layer",
    "num_query_groups",
    "num_attention_groups",
)

SUMMARY_FIELDS = frozenset({"proxy_dim", "region_block_size", "compression_method"})
"""Fields of a `sparse_config` whose layers keep summaries of groups of tokens, as in Step 5."""

BLOCK_FIELDS = frozenset({"no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads"})
"""The fields that `_read_blocks` reads in the `attention` of a block."""


def use_usual_names(config: Config) -> Config:
    """Return the config with the fields expected by other readers. Raise ArgumentError for contradictory fields."""
    config = dict(config)
    if config[WHOLE].get("is_encoder_decoder"):
        _name_decoder(config)
    if str(config.get("model_type")).startswith("longcat"):
        _double_layers(config)
    for name, other in NAMES.get(config.get("model_type"), {}).items():
        _rename(config, name, other)
    for name, others in SAME.items():
        for other in others:
            if config.get(name) is not None:
                _rename(config, name, other)
    _rename(config, "sliding_window", "sliding_window_size")
    _rename(config, "sliding_window_pattern", "_sliding_window_pattern")
    num_kv_heads = _find_kv_heads(config)
    for name in KV_HEADS:
        config.pop(name, None)
    config["num_key_value_heads"] = num_kv_heads
    if config.get("cla_share_factor") is not None and config.get("use_cla") is False:
        del config["cla_share_factor"]
    if config.get("order_of_interleaved_layers") == "local_attn_first":  # the default of other models
        del config["order_of_interleaved_layers"]
    if config.get("compression_ratio") == 1:
        del config["compression_ratio"]
    if isinstance(config.get("sparse_config"), dict) and not SUMMARY_FIELDS.isdisjoint(config["sparse_config"]):
        config["summary_config"] = config.pop("sparse_config")
    if config.get("qk_nope_dim") is not None:
        _name_heads(config)
    if config.get("model_type") == "mimo_v2_flash" and config.get("swa_num_key_value_heads") is None:
        config["swa_num_key_value_heads"] = 2 * read_int(config, "num_key_value_heads")  # as Transformers has it
    if config.get("block_configs") is not None:
        _read_blocks(config)
    if config.get("interleaved_sliding_window") is not None:
        _read_interleaved(config)
    if config.get("H_cycles") is not None:
        _count_cycles(config)
    if config.get("window_sizes") is not None:
        _read_window_sizes(config)
    if config.get("per_layer_config"):
        _read_overrides(config)
    if config.get("cross_attention_layers"):
        _read_cross_layers(config)
    if config[WHOLE].get("rswa_window") is not None or str(config[WHOLE].get("model_type")).startswith("unlimited"):
        _read_answer_window(config)
    return config


def _rename(config: Config, name: str, other: str) -> None:
    """Put a field under its usual name. Raise ArgumentError if both names are there and differ."""
    value = config.pop(other, None)
    if value is not None and config.get(name) is None:
        config[name] = value
    elif value is not None and value != config[name]:
        raise ArgumentError(f"has {name} {shown(config[name])} and {other} {shown(value)}, which contradict")


def _find_kv_heads(config: Config) -> object:
    """Return the KV heads, a number or a list by layer; None if they are as many as the query heads."""
    attn_config = config.get("attn_config")
    if config.get("model_type") == "dbrx" and not isinstance(attn_config, dict):
        raise ArgumentError("lacks attn_config, which has the KV heads")
    if config.get("model_type") in ("mpt", "dbrx") and isinstance(attn_config, dict):
        kind, num = attn_config.get("attn_type"), attn_config.get("kv_n_heads")
        is_full = kind == "multihead_attention"
        if kind not in (None, "multihead_attention", "multiquery_attention", "grouped_query_attention") or (
            num is None and kind in (None, "grouped_query_attention")
        ):
            raise ArgumentError(f"attn_config: attn_type {shown(kind)} with kv_n_heads {shown(num)} is not understood")
        del config["attn_config"]
        for name in {*attn_config} - {"attn_type", "kv_n_heads"}:  # other fields are checked as usual
            config.setdefault(name, attn_config[name])
        return None if is_full else 1 if kind == "multiquery_attention" else num
    if config.get("model_type") in ("falcon", "RefinedWebModel", "gpt_bigcode"):
        is_single = config.pop("multi_query", None)
        if is_single and not config.pop("new_decoder_architecture", None):
            return 1
    elif config.get("model_type") == "RefinedWeb":
        config.pop("new_decoder_architecture", None)
    if config.get("multi_query_attention") is not None and "multi_query_group_num" in config:
        num, is_grouped = config.pop("multi_query_group_num"), config.pop("multi_query_attention")
        return num if is_grouped else None
    found = {name: config[name] for name in KV_HEADS if config.get(name) is not None}
    for name, value in found.items():
        first = next(iter(found))
        if value != found[first]:
            raise ArgumentError(f"has {first} {shown(found[first])} and {name} {shown(value)}, which contradict")
    return next(iter(found.values()), None)


def _name_decoder(config: Config) -> None:
    """Put the fields of the decoder under the usual names, and drop those of the encoder, which keeps nothing itself."""
    is_flat = config[WHOLE].keys().isdisjoint(("encoder", "encoder_config"))
    if is_flat and config.keys().isdisjoint((*DECODER_NAMES["num_hidden_layers"], "num_layers")):
        raise ArgumentError("has is_encoder_decoder, but lacks decoder_layers: its layers are not understood")
    for name, others in DECODER_NAMES.items():
        for other in others:
            value = config.pop(other, None)
            if value is not None:
                config[name] = value
    if config.get("num_attention_heads") is None:
        raise ArgumentError("has is_encoder_decoder, but lacks decoder_attention_heads")
    num_layers = config.pop("num_layers", None)  # of the encoder, and of a decoder without a number of its own
    config.setdefault("num_hidden_layers", num_layers)
    for name in [name for name in config if name.startswith(ENCODER_STARTS)]:
        del config[name]


def _double_layers(config: Config) -> None:
    """Count the layers of LongCat: each has attention twice."""
    config["num_hidden_layers"] = 2 * read_int(config, "num_layers", MAX_LAYERS // 2)
    del config["num_layers"]
    if config.get("attention_method") == "MLA":
        del config["attention_method"]


def _count_cycles(config: Config) -> None:
    """Count the layers of HRM: in each cycle of the upper stack the lower one runs several times, each time with new keys."""
    num_runs = read_int(config, "H_cycles") * (read_int(config, "L_cycles") + 1)
    config["num_hidden_layers"] = num_runs * read_int(config, "num_layers_per_stack", MAX_LAYERS)
    del config["num_layers_per_stack"]


def _name_heads(config: Config) -> None:
    """Name the sizes of keys and values of openPangu: keys have a rotated part and a plain one."""
    config["head_dim"] = read_int(config, "qk_nope_dim") + read_int(config, "qk_rope_dim")
    config["v_head_dim"] = read_int(config, "v_channels")
    for name in ("qk_nope_dim", "qk_rope_dim", "v_channels"):
        del config[name]


def _read_interleaved(config: Config) -> None:
    """Read a window for all layers, or a repeating list of windows in which null stands for full attention."""
    windows, num_layers = config.pop("interleaved_sliding_window"), read_int(config, "num_hidden_layers", MAX_LAYERS)
    windows = windows if isinstance(windows, list) else [windows]
    if not windows:
        return
    by_layer = [windows[layer % len(windows)] for layer in range(num_layers)]
    if not config.get("layer_types"):
        config["layer_types"] = ["sliding_attention" if is_set(window) else "full_attention" for window in by_layer]
    config["sliding_windows"] = by_layer


def _read_window_sizes(config: Config) -> None:
    """Read the windows of Domyn: for each layer the number of tokens before its own and of those after it, -1 for all."""
    pairs = read_layer_list(config, "window_sizes")
    for pair in pairs:
        if not isinstance(pair, list) or not pair or not isinstance(pair[0], int):
            raise ArgumentError(f"window_sizes: got {shown(pair)}, allowed: two numbers")
    config["layer_types"] = ["sliding_attention" if pair[0] > 0 else "full_attention" for pair in pairs]
    config["sliding_windows"] = [pair[0] + 1 for pair in pairs]
    del config["window_sizes"]


def _read_overrides(config: Config) -> None:
    """Read the fields that replace those of the model in single layers, as a list by layer."""
    overrides, num_layers = config["per_layer_config"], read_int(config, "num_hidden_layers", MAX_LAYERS)
    if not isinstance(overrides, dict) or not all(isinstance(fields, dict) for fields in overrides.values()):
        raise ArgumentTypeError(f"per_layer_config: got {shorten(overrides)}, allowed: an object with objects by layer")
    by_layer: list[Config] = [{} for _ in range(num_layers)]
    for layer, fields in overrides.items():
        if not layer.isdecimal() or int(layer) >= num_layers:
            raise ArgumentError(f"per_layer_config: got layer {shown(layer)}, allowed: 0 to {num_layers - 1}")
        by_layer[int(layer)] = fields
    config["per_layer_config"] = by_layer


def _read_blocks(config: Config) -> None:
    """Read Nemotron-H Puzzle, whose blocks have a type each and experts of their own number; or Nemotron-NAS: each block has no
    attention, a linear layer instead, or a number of heads per KV head.
    """
    blocks, types, num_kv_heads = read_layer_list(config, "block_configs"), [], []
    if all(isinstance(block, dict) and "block_type" in block for block in blocks):
        config["layers_block_type"] = [block["block_type"] for block in blocks]
        return
    for layer, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise ArgumentError(f"block_configs: layer {layer} lacks attention")
        has_cache = not (attention.get("no_op") or attention.get("replace_with_linear"))
        types.append("full_attention" if has_cache else "mlp")
        num = 1
        if has_cache and attention.get("num_key_value_heads") is not None:
            num = read_int(attention, "num_key_value_heads")
        elif has_cache:
            num_heads, size = read_int(config, "num_attention_heads"), read_int(attention, "n_heads_in_group")
            if num_heads % size:
                raise ArgumentError(
                    f"block_configs: n_heads_in_group {size} of layer {layer} does not divide {num_heads} heads"
                )
            num = num_heads // size
        num_kv_heads.append(num)
    if config.get("layer_types"):
        raise ArgumentError("has block_configs and layer_types: which of them counts is not understood")
    config.update(layer_types=types, num_key_value_heads=num_kv_heads)


def _read_answer_window(config: Config) -> None:
    """Read the window of answers of Unlimited-OCR, whose layers always see the prompt."""
    whole, window = config[WHOLE], config.get("sliding_window")
    windows = [whole.get("rswa_window"), window, whole.get("sliding_window"), whole.get("sliding_window_size")]
    config["sliding_window"] = next((each for each in windows if each is not None), ANSWER_WINDOW)
    config["layer_types"] = ["reference_sliding_attention"] * read_int(config, "num_hidden_layers", MAX_LAYERS)


def _read_cross_layers(config: Config) -> None:
    """Read Llama 3.2 Vision: layers that attend to images alone keep nothing for text tokens."""
    num_layers = read_int(config, "num_hidden_layers", MAX_LAYERS)
    layers = read_layers(config.pop("cross_attention_layers"), "cross_attention_layers", num_layers)
    types = read_layer_list(config, "layer_types") if config.get("layer_types") else ["full_attention"] * num_layers
    config["layer_types"] = ["cross_attention" if layer in layers else name for layer, name in enumerate(types)]
