"""Bytes per page, from the configuration of a model."""

import json
from reprlib import repr as shorten
from types import SimpleNamespace
from typing import Any

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError
from pagepool.specs import CacheGroupSpec, create_kv_cache_specs_from_config

__all__ = ["read_page_bytes"]

LAYERS_WITHOUT_PAGES = {"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"}
MAX_LAYERS = 100_000
MAX_NUMBER = 10**9


def read_page_bytes(path: str, page_size: int, kv_dtype: str | None = None) -> int:
    """Return the bytes of a page of `page_size` tokens over all layers: layers x KV heads x head size x 2 x bytes of the dtype,
    or the latent vectors of multi-head latent attention. `kv_dtype` is the cache's dtype, by default the model's.

    The file is the `config.json` of a Hugging Face model; of several models in it, the text model counts. Layers with a window
    count as full attention, as in plans; layers without attention, according to `layer_types`, do not count. Raises
    ArgumentError if a field is missing or invalid, OSError if the file cannot be read.
    """
    config = _read_config(path)
    try:
        groups = _make_groups(config, page_size, kv_dtype)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{path}: {error}") from error
    num_bytes = sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names or ()) for group in groups)
    if num_bytes == 0:
        raise ArgumentError(f"{path}: no layer has attention")
    return num_bytes


def _make_groups(config: dict[str, Any], page_size: int, kv_dtype: str | None) -> list[CacheGroupSpec]:
    is_latent = config.get("kv_lora_rank") is not None
    num_kv_heads, head_size = _latent_geometry(config) if is_latent else _head_geometry(config)
    dtype = kv_dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    by_layer = config | {"num_key_value_heads": num_kv_heads} if is_latent else config
    return create_kv_cache_specs_from_config(
        SimpleNamespace(**by_layer, get_mask_details=lambda: _list_layers(config)),
        page_size,
        num_kv_heads,
        head_size,
        str(dtype).removeprefix("torch."),
        use_mla=is_latent,
    )


def _read_config(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            config = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{path}: not valid JSON: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ArgumentError(f"{path}: a JSON object is expected, not {type(config).__name__}")
    return config


def _read_int(config: dict[str, Any], name: str, maximum: int = MAX_NUMBER) -> int:
    if config.get(name) is None:
        raise ArgumentError(f"lacks {name}: give --bytes-per-token instead")
    number = require_int(name, config[name], minimum=1)
    if number > maximum:
        raise ArgumentError(f"{name} must be at most {maximum}, got {shorten(number)}")
    return number


def _latent_geometry(config: dict[str, Any]) -> tuple[int, int]:
    """Return 1 and the size of a token's vector: compressed keys and values, and the rotated part of the key."""
    return 1, _read_int(config, "kv_lora_rank") + _read_int(config, "qk_rope_head_dim")


def _head_geometry(config: dict[str, Any]) -> tuple[int, int]:
    """Return KV heads and head size. If KV heads are a list by layer, they are read with the layers."""
    num_heads = _read_int(config, "num_attention_heads")
    has_head_size = config.get("head_dim") is not None
    head_size = _read_int(config, "head_dim") if has_head_size else _read_int(config, "hidden_size") // num_heads
    is_same_in_all = isinstance(config.get("num_key_value_heads"), int)
    return _read_int(config, "num_key_value_heads") if is_same_in_all else num_heads, head_size


def _list_layers(config: dict[str, Any]) -> dict[int, SimpleNamespace]:
    """List the layers with pages, all as full attention."""
    full = SimpleNamespace(mask_type="FULL", size=None, chunks=None)
    types = config.get("layer_types") or ["full_attention"] * _read_int(config, "num_hidden_layers", MAX_LAYERS)
    return {layer: full for layer, name in enumerate(types) if name not in LAYERS_WITHOUT_PAGES}
