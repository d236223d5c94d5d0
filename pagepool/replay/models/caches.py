"""What the layers of a model keep of the tokens of a request, from its configuration: keys and values, or other entries."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from pagepool.compat.easydel import create_kv_cache_specs_from_config
from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.config import Config, find_dtype, read_int
from pagepool.replay.models.layers import CHUNKED, COMPRESSED, SLIDING, list_attention_layers
from pagepool.specs import CacheGroupSpec, cdiv, dtype_bits, num_bytes

__all__ = ["FULL", "LayerKind", "Reach", "are_compressed", "list_attention"]

SCALED = 128  # elements of an indexer key with a scale of four bytes; of a compressed entry, 64 with a scale of one
PACKED_BITS = 8
ENTRY_PAGE, WINDOW_PAGE, STATE_PAGES = 256, 64, {4: 4, 128: 8}  # tokens of the pages of DeepSeek V4
ALIGNMENTS = {True: 576, False: 512}  # bytes of its pages, packed or not


@dataclass(frozen=True, slots=True)
class Reach:
    """To which tokens one attends: a window of `size` tokens, the chunk of so many that it is in, or 0: all before it."""

    size: int = 0
    is_chunked: bool = False


FULL = Reach()


class LayerKind(NamedTuple):
    """Layers that keep the same: a page of `page_size` tokens takes `num_bytes` in each."""

    reach: Reach
    page_size: int
    num_bytes: int
    layers: tuple[int, ...]


def are_compressed(types: list[str]) -> bool:
    """Whether layers keep an entry for several tokens, as in DeepSeek V4."""
    return bool({COMPRESSED[4], COMPRESSED[128]} & {*types})


def list_attention(config: Config, types: list[str], page_size: int, kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of layers with attention. If they differ in reach, tokens a page are chosen so that pages have equal
    bytes; those with the most bytes a token have `page_size`. Raises ArgumentError or ArgumentTypeError for what is not
    understood.
    """
    layers = list_attention_layers(config, types)
    if are_compressed(types):
        return _list_compressed(config, types, kv_dtype)
    if not layers:
        return []
    is_latent = config.get("kv_lora_rank") is not None
    masks = {layer: _read_mask(config, types[layer]) for layer in layers}
    has_local = any(mask.size or mask.chunks for mask in masks.values())
    if is_latent and has_local:
        raise ArgumentError("windows or chunks with kv_lora_rank are not understood")
    has_indexer = config.get("index_topk") is not None
    if has_indexer and not is_latent:
        raise ArgumentError("index_topk without kv_lora_rank is not understood")
    dtype = kv_dtype or find_dtype(config)
    num_kv_heads, head_size = _latent_geometry(config, dtype) if is_latent else _head_geometry(config)
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


def _read_mask(config: Config, name: str) -> SimpleNamespace:
    """Return the mask of a layer of that type."""
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
    and 8 bits, the latter stays in 16 bits, and each 128 elements of the former have a scale.
    """
    rank, rotated = read_int(config, "kv_lora_rank"), read_int(config, "qk_rope_head_dim")
    if config.get("index_topk") is not None and dtype_bits(dtype) == PACKED_BITS:
        return 1, _count_scaled(rank) + 2 * rotated
    return 1, rank + rotated


def _head_geometry(config: Config) -> tuple[int, int]:
    """Return KV heads and head size. If KV heads are a list by layer, they are read with the layers."""
    num_heads = read_int(config, "num_attention_heads")
    names = [name for name in ("head_dim", "attention_head_dim") if config.get(name) is not None]
    head_size = read_int(config, names[0]) if names else read_int(config, "hidden_size") // num_heads
    is_same_in_all = isinstance(config.get("num_key_value_heads"), int)
    return read_int(config, "num_key_value_heads") if is_same_in_all else num_heads, head_size


def _count_scaled(size: int) -> int:
    """Count the bytes of so many elements of 8 bits with their scales."""
    return size + size // SCALED * 4


def _count_indexer_bytes(config: Config) -> int:
    """Count the bytes of the key of the indexer of DeepSeek V3.2 and V4, which is always in 8 bits."""
    return _count_scaled(read_int(config, "index_head_dim"))


def _list_compressed(config: Config, types: list[str], kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of DeepSeek V4, with the pages of its kernels.

    Each layer has a window of single tokens. Most also have entries: one for 128 tokens, or one for 4, from which an indexer
    chooses by a key for each. Windows hold, in 32 bits, the tokens of which the next entry is made: 128, or 8 for one of 4.
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
