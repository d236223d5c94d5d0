"""Which layers of a model have attention, and which have a state."""

from collections.abc import Callable
from typing import Any

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.replay.models.config import MAX_LAYERS, Config, read_int

__all__ = ["list_attention_layers", "list_state_layers", "list_types"]

# A layer of a parallel hybrid has both.
ATTENTION_TYPES = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention", "hybrid"})
STATE_TYPES = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
TYPES_WITHOUT = frozenset({"mlp", "moe"})
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron-H
STATE_MODELS = frozenset({"mamba", "mamba2", "falcon_mamba"})  # all layers have a state
# Names that only models with states have, or that say in another way which layers have one.
STATE_NAMES = (
    "mamba_",
    "ssm_",
    "linear_num_",
    "linear_attn",
    "lru_",
    "rwkv",
    "block_types",
    "_block_types",
    "layer_group_size",
)


def list_types(config: Config) -> list[str]:
    """List the types of the layers. Raises ArgumentError or ArgumentTypeError for what is not understood."""
    types = next((found for read in READERS if (found := read(config)) is not None), None)
    if types is None:
        marks = [name for name in config if name.startswith(STATE_NAMES)]
        if marks:
            raise ArgumentError(f"has {marks[0]}, but no layer_types: which layers have states is not understood")
        types = ["full_attention"] * _count_layers(config)
    for name in types:
        if not isinstance(name, str) or name not in ATTENTION_TYPES | STATE_TYPES | TYPES_WITHOUT:
            raise ArgumentError(f"layers of type {shown(name)} are not understood")
    return types


def list_attention_layers(types: list[str]) -> list[int]:
    """List the layers with attention."""
    return [layer for layer, name in enumerate(types) if name in ATTENTION_TYPES]


def list_state_layers(types: list[str]) -> list[int]:
    """List the layers with a state."""
    return [layer for layer, name in enumerate(types) if name in STATE_TYPES]


def _count_layers(config: Config) -> int:
    return read_int(config, "num_hidden_layers", MAX_LAYERS)


def _read_list(name: str, items: object) -> list[Any]:
    if not isinstance(items, list):
        raise ArgumentTypeError(f"{name} must be a list, got {shown(items)}")
    if len(items) > MAX_LAYERS:
        raise ArgumentError(f"{name} must have at most {MAX_LAYERS} items, got {len(items)}")
    return items


def _mark(config: Config, marked: object, name: str, marked_type: str, other_type: str, first: int = 0) -> list[str]:
    """Return a type for the layers in the list `marked`, counted from `first`, and another for the rest."""
    layers = {str(layer) for layer in _read_list(name, marked)}
    return [marked_type if str(layer + first) in layers else other_type for layer in range(_count_layers(config))]


def _read_types(config: Config) -> list[str] | None:
    for name in ("layer_types", "layers_block_type"):
        if config.get(name):
            return _read_list(name, config[name])
    return None


def _read_pattern(config: Config) -> list[str] | None:
    pattern = config.get("hybrid_override_pattern")
    return None if pattern is None else [PATTERN.get(letter, letter) for letter in str(pattern)[:MAX_LAYERS]]


def _read_lightning(config: Config) -> list[str] | None:
    """Read the numbers of MiniMax: 0 is lightning attention, 1 full attention."""
    if config.get("attn_type_list") is None:
        return None
    kinds = {"0": "linear_attention", "1": "full_attention"}
    return [kinds.get(str(kind), str(kind)) for kind in _read_list("attn_type_list", config["attn_type_list"])]


def _read_kimi(config: Config) -> list[str] | None:
    """Read the layers of Kimi Linear, which are counted from 1."""
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict):
        return None
    return _mark(config, linear.get("kda_layers"), "kda_layers", "linear_attention", "full_attention", first=1)


def _read_period(config: Config) -> list[str] | None:
    """Read the period of Jamba, or that of Qwen3-Next, whose offset is the end of each period."""
    name = "full_attention_interval" if config.get("full_attention_interval") is not None else "attn_layer_period"
    if config.get(name) is None:
        return None
    period = read_int(config, name)
    offset = require_int("attn_layer_offset", config.get("attn_layer_offset", period - 1), 0)
    return ["full_attention" if layer % period == offset else "linear_attention" for layer in range(_count_layers(config))]


def _read_indices(config: Config) -> list[str] | None:
    """Read the layers of Bamba, or of LFM2, that have attention; of Zamba2, that have both."""
    for name, marked, others in (
        ("attn_layer_indices", "attention", "mamba"),
        ("full_attn_idxs", "full_attention", "conv"),
        ("hybrid_layer_ids", "hybrid", "mamba"),
    ):
        if config.get(name) is not None:
            return _mark(config, config[name], name, marked, others)
    return None


def _read_model(config: Config) -> list[str] | None:
    """Return the types of models whose layers are all alike: Falcon-H1, and those without attention."""
    if config.get("mamba_d_ssm") is not None:
        return ["hybrid"] * _count_layers(config)
    return ["mamba"] * _count_layers(config) if config.get("model_type") in STATE_MODELS else None


READERS: tuple[Callable[[Config], list[str] | None], ...] = (
    _read_types,
    _read_pattern,
    _read_lightning,
    _read_kimi,
    _read_period,
    _read_indices,
    _read_model,
)
