"""The layers of a model: which have attention, the kind of attention, and which have a state."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, shown
from pagepool.replay.models.fields import REMEDY, check_fields
from pagepool.replay.models.values import MAX_LAYERS, Config, is_set, read_int, read_layer_list, read_layers

Reader: TypeAlias = Callable[[Config], list[str] | None]

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
HYBRID_SLIDING = "hybrid_sliding"
WINDOWED = frozenset({SLIDING, HYBRID_SLIDING})
CROSS = "cross_attention"
INDEXED, REFERENCE = "indexed_attention", "reference_sliding_attention"
COMPRESSED = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Layer types of DeepSeek V4, by the number of tokens of an entry."""
POOLED = {0: SLIDING, 1: "single_sparse_attention", 2: "paired_sparse_attention"}
"""Layer types of DeepSeek V4.1, by the number of tokens of an entry."""
SYNONYMS = dict.fromkeys(
    ("deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse", "sparse_attention", "sparse"), INDEXED
)
CONVOLVED = {"hybrid": "full_attention", HYBRID_SLIDING: SLIDING}
"""Layer types of a model whose short convolutions keep past inputs in windows, as in Inkling."""
# A layer of a parallel hybrid has both attention and a state.
ATTENTION_TYPES = frozenset({"full_attention", "attention", CHUNKED, "hybrid", HYBRID_SLIDING, INDEXED, REFERENCE})
ATTENTION_TYPES |= {*COMPRESSED.values(), *POOLED.values()}
STATE_TYPES = frozenset({"linear_attention", "mamba", "conv", "hybrid", HYBRID_SLIDING})
TYPES_WITHOUT = frozenset({"mlp", "moe", CROSS})
TYPE_LISTS = ("layer_types", "layers_block_type")
LISTS = (  # lists by layer, read or ignored
    *TYPE_LISTS,
    "attn_type_list",
    "no_rope_layers",
    "num_key_value_heads",
    "hybrid_layer_pattern",
    "sliding_windows",
)
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # letters of Nemotron-H
STATE_MODELS = frozenset({"mamba", "mamba2", "falcon_mamba"})  # all layers have a state
STATE_NAMES = ("mamba_", "ssm_", "linear_", "conv_L", "n_mamba", "hybrid_override")
"""Prefixes of names found only in models with states."""
PATTERNS = {"gemma2": 2, "cohere2": 4, "gemma3_text": 6}  # period of layers; the last one has full attention
ALL_SLIDING = frozenset({"mistral", "mixtral", "phi3", "starcoder2", "voxtral_realtime_text"})
NO_ROPE_INTERVAL = 4  # Llama 4's default


def list_types(config: Config) -> list[str]:
    """List the types of the layers, after checking all fields. Raise ArgumentError or ArgumentTypeError for fields that are not
    understood.
    """
    for name in LISTS:
        if isinstance(config.get(name), list) and config[name]:
            read_layer_list(config, name)
    types = _read_first(config, READERS)
    if types is None:
        marks = [name for name in config if name.startswith(STATE_NAMES) and is_set(config[name])]
        if marks:
            raise ArgumentError(f"has {marks[0]}, but no layer_types: which layers have states is not understood: {REMEDY}")
        types = ["full_attention"] * _count_layers(config)
    for name in types:
        if not isinstance(name, str) or name not in ATTENTION_TYPES | STATE_TYPES | TYPES_WITHOUT:
            raise ArgumentError(f"layers of type {shown(name)} are not understood: {REMEDY}")
    has_listed_layers = any(config.get(name) for name in TYPE_LISTS)
    check_fields(
        config,
        has_listed_layers=has_listed_layers,
        has_states=bool(list_state_layers(types)),
        has_windows=not WINDOWED.isdisjoint(types),
    )
    if not has_listed_layers:
        for name in ("global_head_dim", "num_global_key_value_heads"):
            if config.get(name) is not None:
                raise ArgumentError(f"has {name}, but no layer_types: which layers it is for is not understood")
    if not ({*COMPRESSED.values()} | {*POOLED.values()}) & {*types} - {SLIDING}:
        for name in ("compress_ratios", "compress_rates"):
            if config.get(name) is not None:
                raise ArgumentError(f"has {name}, but no layer with compressed entries")
    return types


def list_attention_layers(config: Config, types: list[str]) -> list[int]:
    """List the layers with keys and values of their own; the last layers may share those of earlier layers, as in Gemma 3n. A
    layer that runs several times, as in Dory, is listed so often.
    """
    num_shared = require_int("num_kv_shared_layers", config.get("num_kv_shared_layers") or 0, 0, len(types))
    layers = [layer for layer, name in enumerate(types[: len(types) - num_shared]) if name in ATTENTION_TYPES]
    if config.get("n_recurrent_loops") is None or config.get("recurrent_kv_cache_mode") != "per_loop":
        return layers
    first = require_int("n_input_layers", config.get("n_input_layers") or 0, 0)
    repeated = range(first, first + read_int(config, "n_recurrent_layers"))
    num_runs = read_int(config, "n_recurrent_loops", MAX_LAYERS // max(1, len(layers)))
    return [layer for layer in layers for _ in range(num_runs if layer in repeated else 1)]


def list_state_layers(types: list[str]) -> list[int]:
    """List the layers with a state."""
    return [layer for layer, name in enumerate(types) if name in STATE_TYPES]


def _read_first(config: Config, readers: Iterable[Reader]) -> list[str] | None:
    """Return the result of the first reader that recognizes the config."""
    return next((found for read in readers if (found := read(config)) is not None), None)


def _read_states(config: Config) -> list[str] | None:
    """Return the types of layers of models with states but no `layer_types`; the fields differ by model."""
    types = _read_first(config, STATE_READERS)
    if types is not None and _uses_windows(config):
        raise ArgumentError("has layers with states, but no layer_types: sliding_window beside them is not understood")
    return types


def _count_layers(config: Config) -> int:
    return read_int(config, "num_hidden_layers", MAX_LAYERS)


def _mark(config: Config, marked: object, name: str, marked_type: str, other_type: str, first: int = 0) -> list[str]:
    """Return `marked_type` for the layers in the list `marked`, which counts from `first`, and `other_type` for the rest."""
    num_layers = _count_layers(config)
    layers = read_layers(marked, name, num_layers, first)
    return [marked_type if layer in layers else other_type for layer in range(num_layers)]


def _read_compressed(config: Config) -> list[str] | None:
    """Read the layers of DeepSeek V4 and V4.1: the number of tokens per entry, 0 for a window only."""
    if config.get("compress_ratios") is None:
        return None
    names = COMPRESSED if config.get("kv_source_layer_ids") is None else POOLED
    num_drafters = (
        config.get("num_nextn_predict_layers") or config.get("n_mtp_layers") or 1
    )  # not all published configurations have it
    ratios = read_layer_list(config | {"num_nextn_predict_layers": num_drafters}, "compress_ratios")
    for ratio in ratios:
        if not isinstance(ratio, int) or ratio not in names:
            raise ArgumentError(f"compress_ratios: got {shown(ratio)}, allowed: {', '.join(map(str, names))}")
    return [names[ratio] for ratio in ratios]


def _read_types(config: Config) -> list[str] | None:
    lists = [read_layer_list(config, name) for name in TYPE_LISTS if config.get(name)]
    if len(lists) > 1 and lists[0] != lists[1]:
        raise ArgumentError(f"has {' and '.join(TYPE_LISTS)}, which contradict")
    if not lists:
        return None
    names = SYNONYMS | CONVOLVED if config.get("sconv_kernel_size") is not None else SYNONYMS
    return [names.get(name, name) if isinstance(name, str) else name for name in lists[0]]


def _read_local(config: Config) -> list[str] | None:
    """Read the layers with windows of MiMo V2, marked by 1, or of Inkling, listed by number."""
    if config.get("hybrid_layer_pattern") is not None:
        kinds = {"0": "full_attention", "1": SLIDING}
        return [kinds.get(str(kind), str(kind)) for kind in read_layer_list(config, "hybrid_layer_pattern")]
    if config.get("local_layer_ids") is not None:
        return _mark(config, config["local_layer_ids"], "local_layer_ids", SLIDING, "full_attention")
    return None


def _read_pattern(config: Config) -> list[str] | None:
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        return None
    letters = read_layer_list(
        config | {"hybrid_override_pattern": [*str(pattern)[: MAX_LAYERS + 1]]}, "hybrid_override_pattern"
    )
    return [PATTERN.get(letter, letter) for letter in letters]


def _read_lightning(config: Config) -> list[str] | None:
    """Read the numbers of MiniMax: 0 is lightning attention, 1 full attention."""
    if config.get("attn_type_list") is None:
        return None
    kinds = {"0": "linear_attention", "1": "full_attention"}
    return [kinds.get(str(kind), str(kind)) for kind in read_layer_list(config, "attn_type_list")]


def _read_kimi(config: Config) -> list[str] | None:
    """Read the layers of Kimi Linear, counted from 1."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        return None
    full = linear.get("full_attn_layers")
    types = _mark(config, linear.get("kda_layers"), "kda_layers", "linear_attention", "full_attention", first=1)
    if full is not None and types != _mark(config, full, "full_attn_layers", "full_attention", "linear_attention", first=1):
        raise ArgumentError("linear_attn_config: full_attn_layers and kda_layers together are not all layers")
    return types


def _read_period(config: Config) -> list[str] | None:
    """Read the period and offset of Jamba, or the period of Qwen3-Next, whose offset is the end of the period."""
    name = "full_attention_interval" if config.get("full_attention_interval") is not None else "attn_layer_period"
    if config.get(name) is None:
        return None
    period = read_int(config, name)
    offset = require_int("attn_layer_offset", config.get("attn_layer_offset", period - 1), 0)
    return ["full_attention" if layer % period == offset else "linear_attention" for layer in range(_count_layers(config))]


def _read_groups(config: Config) -> list[str] | None:
    """Read the layers of Ling 2.5 and 3: attention ends each group, and fills a last group that is short."""
    if config.get("layer_group_size") is None or config.get("kv_lora_rank") is None:
        return None
    size, num_layers = read_int(config, "layer_group_size"), _count_layers(config)
    num_grouped = num_layers - num_layers % size
    types = _repeat(config, "linear_attention", size)
    return types[:num_grouped] + ["full_attention"] * (num_layers - num_grouped)


def _read_indices(config: Config) -> list[str] | None:
    """Read the attention layers of Bamba or LFM2; for Zamba2, the layers with both."""
    for name, marked, others in (
        ("attn_layer_indices", "attention", "mamba"),
        ("full_attn_idxs", "full_attention", "conv"),
        ("hybrid_layer_ids", "hybrid", "mamba"),
    ):
        if config.get(name) is not None and config.get("mamba_d_ssm") is not None:
            raise ArgumentError(f"has {name} and mamba_d_ssm: which layers have attention is not understood")
        if config.get(name) is not None:
            return _mark(config, config[name], name, marked, others)
    return None


def _read_model(config: Config) -> list[str] | None:
    """Return the types of models with layers of one type: Falcon-H1, and models without attention."""
    if config.get("mamba_d_ssm") is not None:
        return ["hybrid"] * _count_layers(config)
    return ["mamba"] * _count_layers(config) if config.get("model_type") in STATE_MODELS else None


def _read_chunks(config: Config) -> list[str] | None:
    """Return the layer types of Llama 4: layers with rotary embedding, whose value in `no_rope_layers` is 1, have chunks."""
    if config.get("attention_chunk_size") is None:
        return None
    if config.get("no_rope_layers"):
        kinds = {"0": "full_attention", "1": CHUNKED}
        return [kinds.get(str(kind), str(kind)) for kind in read_layer_list(config, "no_rope_layers")]
    if not str(config.get("model_type")).startswith("llama4"):
        raise ArgumentError(
            f"has attention_chunk_size, but no layer_types: which layers have chunks is not understood: {REMEDY}"
        )
    interval = read_int({"no_rope_layer_interval": NO_ROPE_INTERVAL} | config, "no_rope_layer_interval")
    return _repeat(config, CHUNKED, interval)


def _repeat(config: Config, name: str, period: int) -> list[str]:
    """Return full attention for the last layer of each period, and `name` for the others."""
    return [name if (layer + 1) % period else "full_attention" for layer in range(_count_layers(config))]


def _uses_windows(config: Config) -> bool:
    """Whether layers have windows. With `max_window_layers`, as in Qwen2, they do only if the config says so."""
    is_used = config.get("use_sliding_window", config.get("max_window_layers") is None)
    return config.get("sliding_window") is not None and bool(is_used)


def _read_windows(config: Config) -> list[str] | None:
    """Return the types of layers of models with windows but no `layer_types`; the fields differ by model."""
    if not _uses_windows(config):
        return None
    kind, num_layers = config.get("model_type"), _count_layers(config)
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return _read_letters(pattern, num_layers)
    if pattern is not None:
        return _repeat(config, SLIDING, read_int(config, "sliding_window_pattern"))
    if kind in PATTERNS:
        return _repeat(config, SLIDING, PATTERNS[kind])
    if config.get("max_window_layers") is not None:
        num_full = min(require_int("max_window_layers", config["max_window_layers"], 0), num_layers)
        return ["full_attention"] * num_full + [SLIDING] * (num_layers - num_full)
    if kind in ALL_SLIDING:
        return [SLIDING] * num_layers
    raise ArgumentError(f"has sliding_window, but no layer_types: which layers have windows is not understood: {REMEDY}")


def _read_letters(pattern: str, num_layers: int) -> list[str]:
    """Read the repeating pattern of Exaone 4, such as LLLG; the last layer always has full attention."""
    kinds = {"L": SLIDING, "G": "full_attention"}
    if not pattern or not {*pattern} <= {*kinds}:
        raise ArgumentError(f"sliding_window_pattern: got {shown(pattern)}, allowed: a number, or letters L and G")
    return [kinds[pattern[layer % len(pattern)]] for layer in range(num_layers - 1)] + ["full_attention"]


STATE_READERS: tuple[Reader, ...] = (
    _read_pattern,
    _read_lightning,
    _read_kimi,
    _read_period,
    _read_groups,
    _read_indices,
    _read_model,
)
READERS: tuple[Reader, ...] = (_read_compressed, _read_types, _read_local, _read_states, _read_chunks, _read_windows)
