"""The `config.json` of a Hugging Face model, its numbers, and other names of its fields.

`read_config` returns the fields of the text model by their usual names: KV heads under `num_key_value_heads`, layers without
attention under `layer_types`.
"""

import json
from reprlib import repr as shorten
from typing import Any, TypeAlias

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.replay.shared.objects import make_object

MAX_LAYERS = 100_000
MAX_NUMBER = 10**9

Config: TypeAlias = dict[str, Any]

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields with the text model, or with the part around it, in a model with several parts."""

DEFAULTS: dict[object, Config] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3n_text": {"head_dim": 256},
    "gpt_bigcode": {"multi_query": True},
    "falcon": {"multi_query": True},
}
"""Values missing in published configurations, by model."""

REQUIRED: dict[object, tuple[str, ...]] = {
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "cohere2"), ("sliding_window",)),
    "gemma3n_text": ("sliding_window", "num_kv_shared_layers"),
    "llama4_text": ("attention_chunk_size",),
    "mllama_text_model": ("cross_attention_layers",),
}
"""Fields that must be present, even as null, since models have defaults of their own for them."""

GPT = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
MOSAIC = {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"}
FALCON = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
GLM = {"num_hidden_layers": "num_layers"}
OPENELM = {"num_hidden_layers": "num_transformer_layers", "num_attention_heads": "num_query_heads", "hidden_size": "model_dim"}
NAMES: dict[object, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen"), GPT),
    **dict.fromkeys(("mpt", "dbrx"), MOSAIC),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), FALCON),
    "bloom": GPT | {"hidden_size": "n_embed"},
    **dict.fromkeys(("chatglm", "exaone"), GLM),
    "openelm": OPENELM,
    "cohere2": {"sliding_window_pattern": "layer_switch"},
}
"""Names that some models have for the usual fields."""

SAME = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_heads", "n_head", "n_heads"),
    "sliding_window": ("sliding_window_size",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
}
"""Fields with two names in some models."""

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer", "num_query_groups")
BLOCK_FIELDS = frozenset({"no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads"})
"""The fields that `_read_blocks` reads in the `attention` of a block."""


def is_set(value: object) -> bool:
    """Whether a field is in use. Models write None, false, 0, -1 and empty lists for missing features."""
    return bool(value) and value != -1


def read_config(path: str) -> Config:
    """Read the file, and return the fields of its text model. Raise ArgumentError or ArgumentTypeError for fields that
    are not understood, OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            config = json.load(file, object_pairs_hook=make_object)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"got a JSON {type(config).__name__}, allowed: an object")
    return _use_usual_names(_find_text_model(config))


def _find_text_model(config: Config) -> Config:
    """Return the fields of the text model, with the dtype of the whole model unless it has its own."""
    dtypes, is_nested = [_get_dtype(config)], False
    quantization = config.get("quantization_config")
    while names := [name for name in NESTED if isinstance(config.get(name), dict) and config[name]]:
        if len(names) > 1:
            raise ArgumentError(f"has {' and '.join(names)}: which of them is the text model is not understood")
        if config.get("is_encoder_decoder"):
            break
        config, is_nested = config[names[0]], True
        dtypes.append(_get_dtype(config))
    config = DEFAULTS.get(str(config.get("model_type")), {}) | config
    if is_nested:  # these models omit defaults of their class
        missing = [name for name in ("num_hidden_layers", "num_key_value_heads") if name not in config]
        if missing and config.get("kv_lora_rank") is None:
            raise ArgumentError(f"lacks {missing[0]}, which {_list_nested()} leave out if it is the model's default")
    for name in REQUIRED.get(str(config.get("model_type")), ()):
        if name not in config:
            raise ArgumentError(f"lacks {name}")
    return config | {
        "dtype": next((dtype for dtype in reversed(dtypes) if dtype), None),
        "quantization_config": config.get("quantization_config") or quantization,
    }


def _list_nested() -> str:
    """Return the places of nested models, for messages."""
    return f"{', '.join(NESTED[:-1])} and {NESTED[-1]}"


def _get_dtype(config: Config) -> object:
    return config.get("dtype") or config.get("torch_dtype")


def _use_usual_names(config: Config) -> Config:
    """Return the config with the fields expected by other readers. Raise ArgumentError for contradictory fields."""
    config = dict(config)
    if config.get("is_encoder_decoder"):
        raise ArgumentError("has is_encoder_decoder: caches of encoders and of attention to them are not understood")
    for name, other in NAMES.get(config.get("model_type"), {}).items():
        _rename(config, name, other)
    for name, others in SAME.items():
        for other in others:
            if config.get(name) is not None:
                _rename(config, name, other)
    _rename(config, "sliding_window_pattern", "_sliding_window_pattern")
    num_kv_heads = _find_kv_heads(config)
    for name in KV_HEADS:
        config.pop(name, None)
    config["num_key_value_heads"] = num_kv_heads
    if config.get("cla_share_factor") is not None and config.get("use_cla") is False:
        del config["cla_share_factor"]
    if config.get("order_of_interleaved_layers") == "local_attn_first":  # the default of other models
        del config["order_of_interleaved_layers"]
    if config.get("block_configs") is not None:
        _read_blocks(config)
    if config.get("cross_attention_layers"):
        _read_cross_layers(config)
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


def _read_blocks(config: Config) -> None:
    """Read Nemotron-NAS: each block has no attention, a linear layer instead, or a number of heads per KV head."""
    blocks, types, num_kv_heads = read_layer_list(config, "block_configs"), [], []
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


def _read_cross_layers(config: Config) -> None:
    """Read Llama 3.2 Vision: layers that attend to images alone keep nothing for text tokens."""
    num_layers = read_int(config, "num_hidden_layers", MAX_LAYERS)
    layers = read_layers(config.pop("cross_attention_layers"), "cross_attention_layers", num_layers)
    types = read_layer_list(config, "layer_types") if config.get("layer_types") else ["full_attention"] * num_layers
    config["layer_types"] = ["cross_attention" if layer in layers else name for layer, name in enumerate(types)]


def read_layer_list(config: Config, name: str) -> list[Any]:
    """Return a list by layer, without the drafters' layers at its end. Raise ArgumentError unless it has an item for each
    layer, ArgumentTypeError unless it is a list.
    """
    items = config[name]
    if not isinstance(items, list):
        raise ArgumentTypeError(f"{name}: got {shorten(items)}, allowed: a list")
    if len(items) > MAX_LAYERS:
        raise ArgumentError(f"{name}: got {len(items)} items, allowed: at most {MAX_LAYERS}")
    if config.get("num_hidden_layers") is None:
        return items
    num_layers = read_int(config, "num_hidden_layers", MAX_LAYERS)
    num_drafters = require_int("num_nextn_predict_layers", config.get("num_nextn_predict_layers") or 0, 0)
    if len(items) not in (num_layers, num_layers + num_drafters):
        raise ArgumentError(f"{name}: got {len(items)} items, allowed: num_hidden_layers, {num_layers}")
    return items[:num_layers]


def read_layers(items: object, name: str, num_layers: int, first: int = 0) -> set[int]:
    """Return the layer numbers in a list, counted from 0; the list counts from `first`. Raise ArgumentError if one is wrong."""
    if not isinstance(items, list):
        raise ArgumentTypeError(f"{name}: got {shorten(items)}, allowed: a list")
    return {require_int(f"{name}: a layer", layer, first, num_layers - 1 + first) - first for layer in items}


def read_int(config: Config, name: str, maximum: int = MAX_NUMBER) -> int:
    """Return a positive int. Raise ArgumentError if the field is missing or out of range, ArgumentTypeError for other types."""
    if config.get(name) is None:
        raise ArgumentError(f"lacks {name}")
    number = require_int(name, config[name], minimum=1)
    if number > maximum:
        raise ArgumentError(f"{name}: got {shorten(number)}, allowed: at most {maximum}")
    return number


def find_dtype(config: Config) -> str:
    """Return the name of the model's dtype."""
    return str(_get_dtype(config) or "bfloat16").removeprefix("torch.")
