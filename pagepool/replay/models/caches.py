"""Cache entries of a model's layers, from its configuration: keys and values, or other entries."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from pagepool.arguments import require_int
from pagepool.compat.easydel import create_kv_cache_specs_from_config
from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.config import Config, find_dtype, is_set, read_int, read_layer_list
from pagepool.replay.models.layers import CHUNKED, COMPRESSED, SLIDING, list_attention_layers
from pagepool.specs import CacheGroupSpec, cdiv, dtype_bits, num_bytes

SCALED = 128  # elements per 4-byte scale of an indexer key; compressed entries have 64 per 1-byte scale
PACKED_BITS = 8
ENTRY_PAGE, WINDOW_PAGE, STATE_PAGES = 256, 64, {4: 4, 128: 8}  # DeepSeek V4's pages, in tokens
OWN_HEAD_SIZES = ("gemma", "vaultgemma", "qwen3", "glm", "gpt_oss", "seed_oss", "ernie4_5", "helium")  # model types
ALIGNMENTS = {True: 576, False: 512}  # alignment of DeepSeek V4's pages in bytes, packed or not


@dataclass(frozen=True, slots=True)
class Reach:
    """Reach of attention: a window of `size` tokens, the token's chunk of `size` tokens, or with 0 all earlier tokens."""

    size: int = 0
    is_chunked: bool = False


FULL = Reach()


class LayerKind(NamedTuple):
    """Layers with equal entries: a page of `page_size` tokens takes `num_bytes` in each."""

    reach: Reach
    page_size: int
    num_bytes: int
    layers: tuple[int, ...]


def are_compressed(types: list[str]) -> bool:
    """Whether some layers keep one entry for several tokens, as in DeepSeek V4."""
    return bool({COMPRESSED[4], COMPRESSED[128]} & {*types})


def list_attention(config: Config, types: list[str], page_size: int, kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of layers with attention. If they differ in reach, the tokens per page are chosen so that pages have equal
    bytes; layers with the most bytes per token have `page_size`. Raise ArgumentError or ArgumentTypeError for fields that are
    not understood.
    """
    layers = list_attention_layers(config, types)
    if are_compressed(types):
        return _list_compressed(config, types, kv_dtype)
    if not layers:
        return []
    is_latent = config.get("kv_lora_rank") is not None and _may_be_latent(config)
    if config.get("use_mla") and not is_latent:
        raise ArgumentError("has use_mla, but lacks kv_lora_rank")
    masks = {layer: _read_mask(config, types[layer]) for layer in layers}
    has_local = any(mask.size or mask.chunks for mask in masks.values())
    if is_latent and has_local:
        raise ArgumentError("windows or chunks with kv_lora_rank are not understood")
    has_indexer = config.get("index_topk") is not None
    for name in ("index_head_dim", "index_n_heads"):
        if config.get(name) and not has_indexer:
            raise ArgumentError(f"has {name}, but lacks index_topk")
    if has_indexer and not is_latent:
        raise ArgumentError("index_topk without kv_lora_rank is not understood")
    if kv_dtype is None:
        _require_plain_cache(config)
    dtype = kv_dtype or find_dtype(config)
    num_kv_heads, head_size = _latent_geometry(config, dtype) if is_latent else _head_geometry(config, layers)
    by_layer = config | {"num_key_value_heads": num_kv_heads} if is_latent else config
    groups = create_kv_cache_specs_from_config(
        SimpleNamespace(**by_layer, get_mask_details=lambda: masks),
        page_size,
        num_kv_heads,
        head_size,
        dtype,
        use_mla=is_latent,
        equal_bytes=len({mask.mask_type for mask in masks.values()}) > 1,
    )
    kinds = [_kind_of(group) for group in groups]
    if has_indexer:
        key_bytes = _count_indexer_bytes(config)
        kinds += [kind._replace(num_bytes=page_size * key_bytes) for kind in kinds]
    return kinds


def _may_be_latent(config: Config) -> bool:
    return config.get("use_mla") is None or bool(config["use_mla"])


def _read_mask(config: Config, name: str) -> SimpleNamespace:
    if name == SLIDING:
        return SimpleNamespace(mask_type="SLIDING", size=read_int(config, "sliding_window"), chunks=None)
    if name == CHUNKED:
        return SimpleNamespace(mask_type="CHUNK", size=None, chunks=read_int(config, "attention_chunk_size"))
    return SimpleNamespace(mask_type="FULL", size=None, chunks=None)


def _kind_of(group: CacheGroupSpec) -> LayerKind:
    spec = group.kv_cache_spec
    chunk = getattr(spec, "attention_chunk_size", None)
    reach = Reach(chunk or getattr(spec, "sliding_window", None) or 0, chunk is not None)
    layers = tuple(int(name.removeprefix("layer.")) for name in group.layer_names or ())
    return LayerKind(reach, spec.page_size, spec.page_size_bytes, layers)


def _latent_geometry(config: Config, dtype: str) -> tuple[int, int]:
    """Return 1 and the size of a token's vector: compressed keys and values, and the rotated part of the key. With an indexer
    and 8 bits, the rotated part stays in 16 bits, and the compressed part has a scale for each 128 elements.
    """
    rank, rotated = read_int(config, "kv_lora_rank"), read_int(config, "qk_rope_head_dim")
    if config.get("index_topk") is not None and dtype_bits(dtype) == PACKED_BITS:
        return 1, _count_scaled(rank) + 2 * rotated
    return 1, rank + rotated


def _require_plain_cache(config: Config) -> None:
    """Raise ArgumentError if the weights specify another dtype for the cache, since only some engines use it."""
    quantization = config.get("quantization_config")
    field = _find_cache_field(quantization) if isinstance(quantization, dict) else None
    if field is not None:
        raise ArgumentError(f"has quantization_config.{field}: name the dtype of the cache by --kv-dtype")


def _find_cache_field(quantization: Config, path: str = "") -> str | None:
    """Return the path of a field about the cache's dtype, also inside other fields, or None."""
    for name, value in quantization.items():
        if name.startswith("kv_cache") and is_set(value):
            return f"{path}{name}"
        if isinstance(value, dict) and (field := _find_cache_field(value, f"{path}{name}.")) is not None:
            return field
    return None


def _head_geometry(config: Config, layers: list[int]) -> tuple[int, int]:
    """Return KV heads and head size. A list of KV heads by layer is read with the layers, and checked here."""
    head_size = _find_head_size(config)
    for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
        if config.get(name) and _may_be_latent(config):
            raise ArgumentError(f"has {name}, but lacks kv_lora_rank")
    if config.get("v_head_dim") and config["v_head_dim"] != head_size:
        raise ArgumentError(f"has v_head_dim, but heads of {head_size}: keys and values of two sizes are not understood")
    if isinstance(config.get("num_key_value_heads"), list):
        num_by_layer = read_layer_list(config, "num_key_value_heads")
        if not layers or layers[-1] >= len(num_by_layer):
            raise ArgumentError(f"num_key_value_heads has {len(num_by_layer)} items, fewer than there are layers")
        return max(require_int(f"num_key_value_heads of layer {layer}", num_by_layer[layer], 1) for layer in layers), head_size
    return read_int(
        config, "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
    ), head_size


def _find_head_size(config: Config) -> int:
    for name in ("head_dim", "attention_head_dim", "kv_channels"):
        if config.get(name) is not None:
            return read_int(config, name)
    if str(config.get("model_type")).startswith(OWN_HEAD_SIZES):
        raise ArgumentError("lacks head_dim, which is not hidden_size / num_attention_heads in its model")
    size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    if size % num_heads:
        raise ArgumentError(f"lacks head_dim, and hidden_size {size} is no multiple of num_attention_heads {num_heads}")
    return size // num_heads


def _count_scaled(size: int) -> int:
    """Count the bytes of 8-bit elements with their scales."""
    return size + size // SCALED * 4


def _count_indexer_bytes(config: Config) -> int:
    """Count the bytes of an indexer key of DeepSeek V3.2 and V4, always in 8 bits."""
    return _count_scaled(read_int(config, "index_head_dim"))


def _list_compressed(config: Config, types: list[str], kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of DeepSeek V4, with the pages of its kernels.

    Each layer has a window of single tokens. Most layers also have compressed entries: one for 128 tokens, or one for 4 tokens
    with a key for an indexer. A second window keeps the tokens of the next entry, in 32 bits: 128 tokens, or 8 for one of 4.
    In 8 bits, the default, entries are packed: the rotated part stays in 16 bits, and 64 elements of the rest share a scale.
    """
    rates = config.get("compress_rates")
    if rates is not None and rates != {name: rate for rate, name in COMPRESSED.items() if rate}:
        raise ArgumentError(f"compress_rates {shown(rates)} are not understood")
    size, rotated = read_int(config, "head_dim"), read_int(config, "qk_rope_head_dim")
    bits = PACKED_BITS if kv_dtype is None else dtype_bits(kv_dtype)
    is_packed = bits == PACKED_BITS
    entry_bytes = size + rotated + cdiv(size, 64) if is_packed else num_bytes(size, kv_dtype)
    alignment = ALIGNMENTS[is_packed]
    indexer_size = read_int(config, "index_head_dim")
    layers = {rate: tuple(i for i, name in enumerate(types) if name == COMPRESSED[rate]) for rate in COMPRESSED}
    window = Reach(read_int(config, "sliding_window"))
    kinds = [
        (window, WINDOW_PAGE, WINDOW_PAGE * entry_bytes, tuple(range(len(types)))),
        (FULL, ENTRY_PAGE, ENTRY_PAGE // 4 * entry_bytes, layers[4]),
        (FULL, ENTRY_PAGE, ENTRY_PAGE // 4 * _count_indexer_bytes(config), layers[4]),
        (FULL, ENTRY_PAGE, ENTRY_PAGE // 128 * entry_bytes, layers[128]),
        *((Reach(8), STATE_PAGES[4], STATE_PAGES[4] * 4 * 2 * 2 * each, layers[4]) for each in (size, indexer_size)),
        (Reach(128), STATE_PAGES[128], STATE_PAGES[128] * 4 * 2 * size, layers[128]),
    ]
    return [LayerKind(*kind[:2], cdiv(kind[2], alignment) * alignment, kind[3]) for kind in kinds if kind[3]]
