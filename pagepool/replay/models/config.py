"""The `config.json` of a Hugging Face model, and its numbers."""

import json
from reprlib import repr as shorten
from typing import Any, TypeAlias

from pagepool.arguments import require_int
from pagepool.errors import ArgumentError

__all__ = ["MAX_LAYERS", "Config", "find_dtype", "read_config", "read_int"]

MAX_LAYERS = 100_000
MAX_NUMBER = 10**9

Config: TypeAlias = dict[str, Any]
DEFAULTS: dict[object, Config] = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}}
"""Numbers of models whose published configurations leave them out."""


def read_config(path: str) -> Config:
    """Read the file; of several models in it, the text model counts. Raises ArgumentError, and OSError if it cannot be read."""
    with open(path, "rb") as file:
        try:
            config = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{path}: not valid JSON: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ArgumentError(f"{path}: a JSON object is expected, not {type(config).__name__}")
    return DEFAULTS.get(str(config.get("model_type")), {}) | config


def read_int(config: Config, name: str, maximum: int = MAX_NUMBER) -> int:
    """Return a positive number of the config. Raises ArgumentError if it is missing or out of range, ArgumentTypeError."""
    if config.get(name) is None:
        raise ArgumentError(f"lacks {name}")
    number = require_int(name, config[name], minimum=1)
    if number > maximum:
        raise ArgumentError(f"{name} must be at most {maximum}, got {shorten(number)}")
    return number


def find_dtype(config: Config) -> str:
    """Return the name of the model's dtype."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
