"""The cache groups of a model, read from its config."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pagepool.arguments import MAX_SIZE, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.specs import CacheGroupSpec, CacheSpec, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec


class _LayerKey(NamedTuple):
    """Key of a group, shared by its layers."""

    mask_kind: str
    window: int | None
    chunk: int | None
    num_kv_heads: int
    head_size: int


def _positive_or_none(value: object) -> int | None:
    """Return a number of a config if it is positive, otherwise None. Unset values are None or 0."""
    try:
        number = int(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _layer_value(config: object, name: str, layer: int) -> int | None:
    """Return the number of a config for one layer, given as one number for all layers or as a list by layer."""
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        value = value[layer] if 0 <= layer < len(value) else None
    return _positive_or_none(value)


def _layer_geometry(config: object, layer: int, num_kv_heads: int, head_size: int) -> tuple[int, int]:
    """Return KV heads and head size of a layer. In some hybrids they differ in full-attention layers."""
    num_kv_heads = (
        _layer_value(config, "num_kv_heads", layer) or _layer_value(config, "num_key_value_heads", layer) or num_kv_heads
    )
    layer_types = getattr(config, "layer_types", None)
    if not isinstance(layer_types, list | tuple) or not 0 <= layer < len(layer_types):
        return num_kv_heads, head_size
    if str(layer_types[layer]).lower() == "full_attention":
        head_size = _positive_or_none(getattr(config, "global_head_dim", None)) or head_size
        if getattr(config, "attention_k_eq_v", False):
            num_global = _positive_or_none(getattr(config, "num_global_key_value_heads", None))
            num_kv_heads = num_global or num_kv_heads
    return num_kv_heads, head_size


def _layer_index(layer: object) -> int:
    """Return the number of a layer; configs may have it as text."""
    try:
        index = int(cast(Any, layer))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"get_mask_details: got {shown(layer)} as a layer, allowed: an int") from None
    return require_int("get_mask_details: a layer", index, -MAX_SIZE, MAX_SIZE)


def _size_or_none(name: str, value: object) -> int | None:
    return None if value is None else require_int(f"get_mask_details: {name}", value, -MAX_SIZE, MAX_SIZE)


def _mask_kind(mask_type: object) -> str:
    """Return `FULL`, `SLIDING`, `CHUNK` or an unknown word, from an enum member, its value or its name."""
    word = getattr(mask_type, "value", mask_type)
    name = word if isinstance(word, str) else getattr(mask_type, "name", word)
    return (name if isinstance(name, str) else shown(name)).removeprefix("ATTN_MASK_")


def _spec_for(key: _LayerKey, page_size: int, dtype: object, use_mla: bool) -> CacheSpec:
    geometry = (page_size, key.num_kv_heads, key.head_size, dtype)
    match key.mask_kind:
        case "FULL":
            return FullAttentionSpec(*geometry, use_mla)
        case "SLIDING" if key.window is not None:
            # With latent attention, window layers still keep plain keys and values.
            return SlidingWindowSpec(*geometry, use_mla=False, sliding_window=key.window)
        case "CHUNK" if key.chunk is not None:
            return ChunkedLocalAttentionSpec(*geometry, use_mla, attention_chunk_size=key.chunk)
        case "SLIDING" | "CHUNK":
            raise ArgumentError(f"layer: got mask {key.mask_kind} without a size, allowed: one with its window or chunk")
    raise ArgumentError(f"attention mask: got {key.mask_kind!r}, allowed: FULL, SLIDING or CHUNK")


def create_kv_cache_specs_from_config(
    config: object,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: object,
    use_mla: bool = False,
    *,
    equal_bytes: bool = False,
) -> list[CacheGroupSpec]:
    """Return the groups of a model from its config: one for each kind of attention and geometry, in layer order.

    `config` is read by attribute only. `get_mask_details()`, if present, maps a layer index to an object with `mask_type`
    (`"ATTN_MASK_FULL"`, `"ATTN_MASK_SLIDING"` or `"ATTN_MASK_CHUNK"`, as a string or an enum), `size` (window) and `chunks`.
    `num_kv_heads` or `num_key_value_heads` (a number, or a list by layer) override the arguments. Layers with `full_attention`
    in `layer_types` use `global_head_dim` and `num_global_key_value_heads`, if present. Without mask details the result is one
    full-attention group of the given geometry, without layer names.

    With `equal_bytes`, an option EasyDeL lacks, groups with fewer bytes per token get more tokens per page: the largest
    multiple of `page_size` that fits into the bytes of the largest page. A pool whose pages have one size then wastes little.

    Raise ArgumentError for an unknown mask, or a window or chunk without a size. O(layers).

    >>> [group] = create_kv_cache_specs_from_config(object(), 16, 8, 128, "bfloat16")
    >>> group.kv_cache_spec.type_id
    'full_attention_16_65536'
    """
    is_equal = require_flag("equal_bytes", equal_bytes)
    read_details = getattr(config, "get_mask_details", None)
    details: Mapping[int, Any] | None = read_details() if read_details is not None else None
    if not details:
        return [CacheGroupSpec(FullAttentionSpec(page_size, num_kv_heads, head_size, dtype, use_mla))]
    layers_by_key: dict[_LayerKey, list[str]] = {}
    for name, detail in details.items():
        layer = _layer_index(name)
        geometry = _layer_geometry(config, layer, num_kv_heads, head_size)
        sizes = _size_or_none("size", detail.size), _size_or_none("chunks", getattr(detail, "chunks", None))
        key = _LayerKey(_mask_kind(detail.mask_type), *sizes, *geometry)
        layers_by_key.setdefault(key, []).append(f"layer.{layer}")
    specs = [_spec_for(key, page_size, dtype, use_mla) for key in layers_by_key]
    if is_equal:
        most = max(spec.page_size_bytes for spec in specs)
        specs = [replace(spec, page_size=page_size * (most // spec.page_size_bytes)) for spec in specs]
    return [CacheGroupSpec(spec, names) for spec, names in zip(specs, layers_by_key.values(), strict=True)]
