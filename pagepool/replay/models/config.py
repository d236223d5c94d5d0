"""The `config.json` of a Hugging Face model.

`read_config` returns the fields of the text model by their usual names: KV heads under `num_key_value_heads`, layers without
attention under `layer_types`.
"""

import json

from pagepool.errors import ArgumentError
from pagepool.replay.models.names import KV_HEADS, use_usual_names
from pagepool.replay.models.values import WHOLE, Config, get_dtype
from pagepool.replay.shared.objects import make_object

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields with the text model, or with the part around it, in a model with several parts."""

DECODERS = ("decoder_config", "decoder", "transf_decoder", "config_dict")
"""Fields with the decoder, or with the part around it, in a model with an encoder."""

DEFAULTS: dict[object, Config] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3n_text": {"head_dim": 256},
    "gpt_bigcode": {"multi_query": True},
    "falcon": {"multi_query": True},
    "qwen4_exp_text": {"full_attention_interval": 4},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 64},
}
"""Values missing in published configurations, by model."""

REQUIRED: dict[object, tuple[str, ...]] = {
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "cohere2"), ("sliding_window",)),
    "gemma3n_text": ("sliding_window", "num_kv_shared_layers"),
    "llama4_text": ("attention_chunk_size",),
    "mllama_text_model": ("cross_attention_layers",),
}
"""Fields that must be present, even as null, since models have defaults of their own for them."""


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
    return use_usual_names(_find_text_model(config))


def _find_text_model(config: Config) -> Config:
    """Return the fields of the text model, with the dtype of the whole model unless it has its own."""
    if isinstance(config.get("transf_decoder"), dict):  # of Cohere Transcribe, which does not say what it is
        config = config | {"is_encoder_decoder": True}
    dtypes, whole = [get_dtype(config)], config
    quantization = config.get("quantization_config")
    places = NESTED + DECODERS if config.get("is_encoder_decoder") else NESTED
    while names := [name for name in places if isinstance(config.get(name), dict) and config[name]]:
        if len(names) > 1:
            raise ArgumentError(f"has {' and '.join(names)}: which of them is the text model is not understood")
        config = config[names[0]]
        dtypes.append(get_dtype(config))
    is_nested = config is not whole
    config = DEFAULTS.get(str(config.get("model_type")), {}) | config
    if is_nested and not whole.get("is_encoder_decoder"):  # these models omit defaults of their class
        _require_numbers(config)
    for name in REQUIRED.get(str(config.get("model_type")), ()):
        if name not in config:
            raise ArgumentError(f"lacks {name}")
    return config | {
        "dtype": next((dtype for dtype in reversed(dtypes) if dtype), None),
        "quantization_config": config.get("quantization_config") or quantization,
        WHOLE: whole,
    }


def _require_numbers(config: Config) -> None:
    """Raise ArgumentError if a nested config lacks the number of layers or of KV heads."""
    alternatives = {
        "num_hidden_layers": ("num_hidden_layers", "layers_block_type", "hybrid_override_pattern"),
        "num_key_value_heads": KV_HEADS,
    }
    missing = [name for name, others in alternatives.items() if config.keys().isdisjoint(others)]
    if missing and config.get("kv_lora_rank") is None and config.get("compress_ratios") is None:
        raise ArgumentError(f"lacks {missing[0]}, which {_list_nested()} leave out if it is the model's default")


def _list_nested() -> str:
    """Return the places of nested models, for messages."""
    return f"{', '.join(NESTED[:-1])} and {NESTED[-1]}"
