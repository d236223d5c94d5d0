"""Cache entries of a model's layers, from its configuration: keys and values, or other entries."""

from dataclasses import dataclass
from typing import NamedTuple

from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.geometry import (
    PACKED_BITS,
    count_heads,
    count_keys_and_values,
    count_latent,
    count_scaled,
    find_head_size,
    is_latent,
    read_layer,
)
from pagepool.replay.models.indexers import Indexer, find_indexer
from pagepool.replay.models.layers import CHUNKED, COMPRESSED, POOLED, SLIDING, WINDOWED, list_attention_layers
from pagepool.replay.models.values import MAX_LAYERS, WHOLE, Config, find_dtype, is_set, read_int, read_layers
from pagepool.specs import cdiv, dtype_bits, num_bytes

ENTRY_PAGE, WINDOW_PAGE, STATE_PAGES = 256, 64, {4: 4, 128: 8}  # DeepSeek V4's pages, in tokens
POOLED_PAGE, POOLED_WINDOW_PAGE = 128, 32  # DeepSeek V4.1's pages, in tokens
POOLED_RING = 8  # tokens
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
    """Whether the kernels of the model fix the page sizes, as in DeepSeek V4."""
    return bool({*COMPRESSED.values(), *POOLED.values()} & {*types} - {SLIDING})


def list_attention(config: Config, types: list[str], page_size: int, kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of layers with attention. If they differ in reach, the tokens per page are chosen so that pages have equal
    bytes; layers with the most bytes per token have `page_size`. Raise ArgumentError or ArgumentTypeError for fields that are
    not understood.
    """
    layers = list_attention_layers(config, types)
    if are_compressed(types):
        is_pooled = config.get("kv_source_layer_ids") is not None
        return _list_pooled(config, types, kv_dtype) if is_pooled else _list_compressed(config, types, kv_dtype)
    if not layers:
        return []
    if config.get("use_mla") and not is_latent(config):
        raise ArgumentError("has use_mla, but lacks kv_lora_rank")
    if kv_dtype is None:
        _require_plain_cache(config)
    dtype = kv_dtype or find_dtype(config)
    kinds = _list_uniform(config, types, layers, page_size, dtype)
    others = [
        *_list_loops(config, layers, page_size, dtype),
        *_list_streams(config[WHOLE], page_size, dtype),
        *_list_convolutions(config, types, layers),
    ]
    if len({kind.reach for kind in [*kinds, *others]}) > 1:
        most = max(kind.num_bytes for kind in [*kinds, *others])
        kinds = _list_uniform(config, types, layers, page_size, dtype, most)
    return [*kinds, *others]


def _list_uniform(
    config: Config, types: list[str], layers: list[int], page_size: int, dtype: str, page_bytes: int | None = None
) -> list[LayerKind]:
    """List the kinds of layers with pages of `page_size` tokens, or of as many times more as fit in `page_bytes`."""
    by_layer = {layer: read_layer(config, types[layer], layer) for layer in layers}
    reaches = {layer: _read_reach(own, types[layer]) for layer, own in by_layer.items()}
    indexer = find_indexer(config, types)
    widths = _count_widths(by_layer, reaches, dtype)
    by_kind: dict[tuple[Reach, int, bool], list[int]] = {}
    for layer in layers:
        has_key = indexer is not None and layer in indexer.layers
        by_kind.setdefault((reaches[layer], widths[layer], has_key), []).append(layer)
    kinds = []
    for (reach, width, has_key), found in by_kind.items():
        size = page_size
        if page_bytes is not None:
            size *= page_bytes // _count_page(page_size, width, indexer if has_key else None, dtype)
        kinds.append(LayerKind(reach, size, _count_page(size, width, indexer if has_key else None, dtype), tuple(found)))
    return kinds


def _count_page(page_size: int, width: int, indexer: Indexer | None, dtype: str) -> int:
    """Count the bytes of a page of a layer: `width` elements for each token, and the keys of its indexer."""
    key_bytes = 0 if indexer is None else cdiv(page_size * indexer.num_bytes, indexer.group_size)
    return num_bytes(page_size * width, dtype) + key_bytes


def _count_widths(by_layer: dict[int, Config], reaches: dict[int, Reach], dtype: str) -> dict[int, int]:
    """Count the elements that each layer keeps for a token. Latent vectors of two sizes are padded to the larger one."""
    widths = {}
    for layer, own in by_layer.items():
        if not is_latent(own):
            widths[layer] = count_keys_and_values(own)
        elif reaches[layer] != FULL and own.get("swa_kv_lora_rank") is None:
            raise ArgumentError("windows or chunks with kv_lora_rank are not understood")
        else:
            widths[layer] = count_latent(own, dtype)
    if any(own.get("swa_kv_lora_rank") is not None for own in by_layer.values()):
        return dict.fromkeys(widths, max(widths.values()))
    return widths


def _read_reach(config: Config, name: str) -> Reach:
    if name in WINDOWED:
        return Reach(read_int(config, "sliding_window"))
    return Reach(read_int(config, "attention_chunk_size"), is_chunked=True) if name == CHUNKED else FULL


def _list_loops(config: Config, layers: list[int], page_size: int, dtype: str) -> list[LayerKind]:
    """List the windows of IQuest's LoopCoder: each time that the layers run again, they keep keys and values of their own."""
    if config.get("loop_num") is None:
        return []
    num_more = read_int(config, "loop_num", MAX_LAYERS // len(layers)) - 1
    reach = Reach(read_int(config, "loop_window_size"))
    page_bytes = num_bytes(page_size * count_keys_and_values(config), dtype)
    return [LayerKind(reach, page_size, page_bytes, (*layers,) * num_more)] if num_more else []


def _list_streams(whole: Config, page_size: int, dtype: str) -> list[LayerKind]:
    """List the layers of an encoder that listens while the text is written, as in Voxtral Realtime: several of its tokens, in
    windows, belong to one of the text.
    """
    encoder = whole.get("audio_config")
    if not isinstance(encoder, dict) or None in (encoder.get("sliding_window"), whole.get("downsample_factor")):
        return []
    num_times, num_layers = read_int(whole, "downsample_factor"), read_int(encoder, "num_hidden_layers", MAX_LAYERS)
    reach = Reach(cdiv(read_int(encoder, "sliding_window"), num_times) + 1)
    page_bytes = num_bytes(page_size * num_times * count_keys_and_values(encoder), dtype)
    return [LayerKind(reach, page_size, page_bytes, tuple(range(num_layers)))]


def _list_convolutions(config: Config, types: list[str], layers: list[int]) -> list[LayerKind]:
    """List the short convolutions of Inkling, whose past inputs are in pages as large as the kernel: for each KV head a key, a
    value, and its part of two outputs, together padded to a power of two.
    """
    if config.get("sconv_kernel_size") is None or config.get("use_sconv") is False:
        return []
    size, hidden_size = read_int(config, "sconv_kernel_size"), read_int(config, "hidden_size")
    by_bytes: dict[int, list[int]] = {}
    for layer in layers:
        own = read_layer(config, types[layer], layer)
        num_heads = count_heads(own)
        width = 2 * find_head_size(own) + 2 * (hidden_size // num_heads)
        page_bytes = num_bytes(size * num_heads * (1 << (width - 1).bit_length()), find_dtype(config))
        by_bytes.setdefault(page_bytes, []).append(layer)
    return [LayerKind(Reach(size), size, page_bytes, tuple(found)) for page_bytes, found in by_bytes.items()]


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


def _count_indexer_bytes(config: Config) -> int:
    """Count the bytes of an indexer key of DeepSeek V4, always in 8 bits."""
    return count_scaled(read_int(config, "index_head_dim"))


def _list_compressed(config: Config, types: list[str], kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of DeepSeek V4, with the pages of its kernels.

    Each layer has a window of single tokens. Most layers also have compressed entries: one for 128 tokens, or one for 4 tokens
    with a key for an indexer. A second window keeps the tokens of the next entry, in 32 bits: 128 tokens, or 8 for one of 4.
    In 8 bits, the default, entries are packed: the rotated part stays in 16 bits, and 64 elements of the rest share a scale.
    """
    rates = config.get("compress_rates")
    if rates is not None and rates != {name: rate for rate, name in COMPRESSED.items() if rate}:
        raise ArgumentError(f"compress_rates {shown(rates)} are not understood")
    size = read_int(config, "head_dim")
    entry_bytes, alignment = _count_entry(config, kv_dtype)
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


def _count_entry(config: Config, kv_dtype: str | None) -> tuple[int, int]:
    """Return the bytes of an entry of DeepSeek V4, and the alignment of its pages. In 8 bits, the default, entries are packed:
    the rotated part stays in 16 bits, and 64 elements of the rest share a scale.
    """
    size, rotated = read_int(config, "head_dim"), read_int(config, "qk_rope_head_dim")
    is_packed = kv_dtype is None or dtype_bits(kv_dtype) == PACKED_BITS
    return size + rotated + cdiv(size, 64) if is_packed else num_bytes(size, kv_dtype), ALIGNMENTS[is_packed]


def list_sources(config: Config, types: list[str]) -> dict[int, list[int]]:
    """List the layers of DeepSeek V4.1 that keep entries for themselves and later layers, by the tokens of an entry."""
    layers = read_layers(config["kv_source_layer_ids"], "kv_source_layer_ids", len(types))
    for layer in layers:
        if types[layer] == SLIDING:
            raise ArgumentError(f"kv_source_layer_ids: layer {layer} has windows alone in compress_ratios")
    return {rate: sorted(layer for layer in layers if types[layer] == name) for rate, name in POOLED.items() if rate}


def _list_pooled(config: Config, types: list[str], kv_dtype: str | None) -> list[LayerKind]:
    """List the kinds of DeepSeek V4.1, with the pages of its kernels: a window of single tokens in each layer, and in some
    layers entries of one or two tokens, which later layers read too, most of them with a key for an indexer.
    """
    entry_bytes, alignment = _count_entry(config, kv_dtype)
    key_bytes, indexed = (
        _count_indexer_bytes(config),
        read_layers(config.get("index_source_layer_ids"), "index_source_layer_ids", len(types)),
    )
    window = Reach(read_int(config, "sliding_window"))
    kinds = [(window, POOLED_WINDOW_PAGE, POOLED_WINDOW_PAGE * entry_bytes, tuple(range(len(types))))]
    for rate, layers in list_sources(config, types).items():
        keyed = tuple(layer for layer in layers if layer in indexed)
        kinds.append((FULL, POOLED_PAGE, POOLED_PAGE // rate * entry_bytes, tuple(layers)))
        kinds.append((FULL, POOLED_PAGE, POOLED_PAGE // rate * key_bytes, keyed))
    return [LayerKind(*kind[:2], cdiv(kind[2], alignment) * alignment, kind[3]) for kind in kinds if kind[3]]
