"""Indexers: layers that keep a small key of each token, or of each group of tokens, by which queries choose what they read.

A layer whose key is that of a group also has a ring: the raw keys of the group that is still open.
"""

from typing import NamedTuple

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.geometry import count_keys_and_values, count_scaled, is_latent
from pagepool.replay.models.layers import CHUNKED, INDEXED, WINDOWED, list_attention_layers
from pagepool.replay.models.values import WHOLE, Config, find_dtype, is_set, read_int, read_layer_list
from pagepool.specs import num_bytes

KEY_BYTES = 2  # an element of an unpacked key; engines keep these in 16 bits
POSITION_ELEMENTS = 12  # a position on three axes, as 64-bit integers in the place of 16-bit elements
SUMMARY_BYTES, SUMMARY_SIZE = 256, 8  # Step 5's key of a group, and its tokens
SUMMARY_VALUES = {
    "proxy_dim": (None, SUMMARY_BYTES),
    "region_block_size": (None, SUMMARY_SIZE),
    "sparse_indexer_num_k_heads": (None, 1),
    "apply_to_layer_types": (None, ["full_attention"]),
}
"""Values of the fields of Step 5's indexer that engines have kernels for."""

SUMMARY_PAGE = 16  # tokens


class Indexer(NamedTuple):
    """A key of `num_bytes` for each `group_size` tokens, in `layers`. A ring has the raw keys of up to `ring_size` tokens, in
    `ring_bytes`.
    """

    layers: frozenset[int]
    num_bytes: int
    group_size: int = 1
    ring_size: int = 0
    ring_bytes: int = 0


def find_indexer(config: Config, types: list[str]) -> Indexer | None:
    """Return the indexer of the model, None without one. Raise ArgumentError for fields that are not understood."""
    full_layers = [layer for layer in list_attention_layers(config, types) if types[layer] not in WINDOWED | {CHUNKED}]
    indexed = frozenset(layer for layer in full_layers if types[layer] == INDEXED)
    summaries = config.get("summary_config")
    if summaries is not None:
        return _read_summaries(config, summaries, frozenset(full_layers)) if summaries.get("enabled") is not False else None
    if config.get("indexer_head_dim") is not None:
        return _read_compressed_keys(config, indexed or frozenset(full_layers))
    layers = _list_block_layers(config, indexed)
    if layers is not None:
        return Indexer(layers, KEY_BYTES * _read_block_key(config))
    if config.get("index_topk") is not None:
        return _read_sparse_keys(config, indexed or frozenset(full_layers))
    for name in ("index_head_dim", "index_n_heads"):
        if config.get(name) and config.get("index_topk_blocks") is None:
            raise ArgumentError(f"has {name}, but lacks index_topk")
    if indexed:
        raise ArgumentError("has layers with an indexer, but lacks index_topk and indexer_head_dim")
    return None


def _read_sparse_keys(config: Config, layers: frozenset[int]) -> Indexer:
    """Read the indexer of DeepSeek V3.2, with packed keys. A layer that uses the choice of an earlier one keeps no key. In GLM
    5 Next `index_kpool` tokens share one.
    """
    if not is_latent(config):
        raise ArgumentError("index_topk without kv_lora_rank is not understood")
    size, group_size = read_int(config, "index_head_dim"), read_int({"index_kpool": 1} | config, "index_kpool")
    owners = layers - _list_followers(config, max(layers, default=0) + 1)
    if group_size == 1:
        return Indexer(owners, count_scaled(size))
    ring_bytes = group_size * 2 * size * KEY_BYTES  # a key and its score
    return Indexer(owners, count_scaled(size), group_size, group_size, ring_bytes)


def _list_followers(config: Config, num_layers: int) -> set[int]:
    """List the layers without an indexer of their own: by a list, by letters, or by a period."""
    if config.get("indexer_types") is not None:
        kinds = read_layer_list(config, "indexer_types")
        for kind in kinds:
            if kind not in ("full", "shared"):
                raise ArgumentError(f"indexer_types: got {shown(kind)}, allowed: full or shared")
        return {layer for layer, kind in enumerate(kinds) if kind == "shared"}
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return {layer for layer, letter in enumerate(pattern if isinstance(pattern, list) else str(pattern)) if letter == "S"}
    period = read_int({"index_topk_freq": 1} | config, "index_topk_freq")
    offset = require_int("index_skip_topk_offset", config.get("index_skip_topk_offset", 2), 0)
    return {layer for layer in range(num_layers) if max(layer - offset + 1, 0) % period}


def _read_compressed_keys(config: Config, layers: frozenset[int]) -> Indexer:
    """Read the indexer of Qwen4, with one key for a group of tokens. A model with pictures keeps positions with raw keys."""
    size, group_size = read_int(config, "indexer_head_dim"), read_int(config, "indexer_compress_ratio")
    if config.get("indexer_kv_heads") not in (None, 1):
        raise ArgumentError(f"indexer_kv_heads: got {shown(config['indexer_kv_heads'])}, allowed: 1")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    has_axes = is_set(config[WHOLE].get("vision_config")) and isinstance(rope, dict) and is_set(rope.get("mrope_section"))
    raw_size = -(-size // 4) * 4 + POSITION_ELEMENTS if has_axes else size
    return Indexer(layers, size * KEY_BYTES, group_size, group_size, group_size * raw_size * KEY_BYTES)


def _list_block_layers(config: Config, indexed: frozenset[int]) -> frozenset[int] | None:
    """List the layers of MiniMax M3 that choose blocks by a key of each token, None for other models."""
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, dict) or sparse.get("sparse_index_dim") is None:
        return indexed if config.get("index_topk_blocks") is not None else None
    if sparse.get("use_sparse_attention") is False:
        return frozenset()
    marks = read_layer_list(config | sparse, "sparse_attention_freq")
    if sparse.get("sparse_disable_index_value") not in (None, marks):
        raise ArgumentError("sparse_disable_index_value: an index with values is not understood")
    return frozenset(layer for layer, mark in enumerate(marks) if mark)


def _read_block_key(config: Config) -> int:
    sparse = config.get("sparse_attention_config")
    if isinstance(sparse, dict) and sparse.get("sparse_index_dim") is not None:
        return read_int(sparse, "sparse_index_dim")
    return read_int(config, "index_head_dim")


def _read_summaries(config: Config, summaries: Config, layers: frozenset[int]) -> Indexer:
    """Read the indexer of Step 5: a summary of 8-bit elements for each group, and a ring as large as a page of the layer."""
    for name, allowed in SUMMARY_VALUES.items():
        if summaries.get(name) not in allowed:
            raise ArgumentError(f"sparse_config.{name}: got {shown(summaries[name])}, allowed: {allowed[1]}")
    ring_bytes = num_bytes(SUMMARY_PAGE * count_keys_and_values(config), find_dtype(config))
    return Indexer(layers, SUMMARY_BYTES, SUMMARY_SIZE, ring_bytes // (2 * SUMMARY_BYTES * KEY_BYTES), ring_bytes)
