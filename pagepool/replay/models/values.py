"""The fields of a model's configuration, and readers of their values."""

from reprlib import repr as shorten
from typing import Any, TypeAlias

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError, ArgumentTypeError

MAX_LAYERS = 100_000
MAX_NUMBER = 10**9

Config: TypeAlias = dict[str, Any]

WHOLE = "the whole model"
"""Key of the fields as they are in the file; no file has a field of this name that matters."""


def is_set(value: object) -> bool:
    """Whether a field is in use. Models write None, false, 0, -1 and empty lists for missing features."""
    return bool(value) and value != -1


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
    return str(get_dtype(config) or "bfloat16").removeprefix("torch.")


def get_dtype(config: Config) -> object:
    """Return the model's dtype as the file has it, or None."""
    return config.get("dtype") or config.get("torch_dtype")
