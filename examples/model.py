"""A decoder-only transformer over a paged KV cache: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A step is one flat list of tokens of any requests. Each token has a row of the page table and a position in it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from pagepool import device_slot_mapping

AXES = {
    "embedding": "vocab width",
    "attention_norm": "layers width",
    "query": "layers width heads head_size",
    "key": "layers width kv_heads head_size",
    "value": "layers width kv_heads head_size",
    "output": "layers heads head_size width",
    "mlp_norm": "layers width",
    "gate": "layers width hidden",
    "up": "layers width hidden",
    "down": "layers hidden width",
    "final_norm": "width",
    "unembedding": "width vocab",
}
"""The axes of each weight."""

DEFAULT_SIZES = {"vocab": 96, "width": 64, "layers": 2, "heads": 16, "kv_heads": 8, "head_size": 16, "hidden": 128}

Weights = dict[str, Any]
KVCache = list[tuple[jax.Array, jax.Array]]
"""Keys and values of each layer, float32 ``[kv_heads, num_pages, page_size, head_size]``."""

Attention = Callable[[Any, Any, Any, Any, Any], Any]
"""A function with the signature of those in attention.py."""


class Tokens(NamedTuple):
    """The tokens of a step, int32: three values per token, and for each row of the table the index of its last token here."""

    token_ids: Any
    rows: Any
    positions: Any
    last: Any


def make_weights(seed: int, sizes: Mapping[str, int] = DEFAULT_SIZES) -> Weights:
    """Make random weights. Norms are ones; the others are normal, and large enough that the answers vary."""
    rng = np.random.default_rng(seed)
    shapes = {name: [sizes[axis] for axis in axes.split()] for name, axes in AXES.items()}
    scale = 2 * sizes["width"] ** -0.5
    weights = {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}
    return weights | {name: np.ones_like(weights[name]) for name in AXES if name.endswith("norm")}


def load_weights(path: Path) -> Weights:
    """Load weights saved by ``numpy.savez(path, **weights)``. ValueError if they do not fit this model."""
    try:
        with np.load(path) as file:
            weights = {name: np.asarray(file[name], dtype=np.float32) for name in file.files}
    except (ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"weights: {path} was not saved by numpy.savez") from error
    get_sizes(weights)
    return weights


def get_sizes(weights: Weights) -> dict[str, int]:
    """Return the length of each axis. ValueError if a weight is missing, unknown, or does not fit the others."""
    if set(weights) != set(AXES):
        raise ValueError(f"weights: got {sorted(weights)}, allowed: {sorted(AXES)}")
    sizes: dict[str, int] = {}
    for name, axes in AXES.items():
        shape, expected = np.shape(weights[name]), axes.split()
        if len(shape) == len(expected):
            sizes = dict(zip(expected, shape, strict=True)) | sizes
        if shape != tuple(sizes.get(axis) for axis in expected):
            raise ValueError(f"weights: got {name} with shape {shape}, allowed: {axes}, where {sizes}")
    if sizes["heads"] % sizes["kv_heads"] or sizes["head_size"] % 2:
        raise ValueError(f"weights: got {sizes}, allowed: heads a multiple of kv_heads, and an even head_size")
    return sizes


def forward(weights: Weights, kv_cache: KVCache, page_table: Any, tokens: Tokens, attend: Attention) -> tuple[Any, KVCache]:
    """Write keys and values into pages, attend, and return logits ``[rows, vocab]`` and the cache (traced)."""
    page_size = kv_cache[0][0].shape[2]
    slots = device_slot_mapping(page_table, tokens.rows, tokens.positions, page_size)
    page_ids, lengths = page_table[tokens.rows], tokens.positions + 1
    hidden = weights["embedding"][tokens.token_ids]
    written: KVCache = []
    for layer, (key_pages, value_pages) in enumerate(kv_cache):
        w = {name: weights[name][layer] for name in AXES if AXES[name].startswith("layers")}
        normed = normalize(hidden, w["attention_norm"])
        query, key, value = (jnp.einsum("tw,whd->thd", normed, w[name]) for name in ("query", "key", "value"))
        key_pages = write_pages(key_pages, slots, rotate(key, tokens.positions))
        value_pages = write_pages(value_pages, slots, value)
        # All tokens are written before any is read: a prompt may hit pages that another row fills in the same step.
        attended = attend(rotate(query, tokens.positions), key_pages, value_pages, page_ids, lengths)
        hidden += jnp.einsum("thd,hdw->tw", attended, w["output"])
        normed = normalize(hidden, w["mlp_norm"])
        hidden += (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
        written.append((key_pages, value_pages))
    return normalize(hidden[tokens.last], weights["final_norm"]) @ weights["unembedding"], written


def write_pages(pages: Any, slots: Any, values: Any) -> Any:
    """Write `values` ``[tokens, kv_heads, head_size]`` to their slots; a slot is page id times page size plus offset."""
    kv_heads, num_pages, page_size, head_size = pages.shape
    flat = pages.reshape(kv_heads, num_pages * page_size, head_size)
    return flat.at[:, slots].set(values.swapaxes(0, 1)).reshape(pages.shape)


def normalize(hidden: Any, weight: Any) -> Any:
    """Apply RMSNorm."""
    return hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6) * weight


def rotate(heads: Any, positions: Any) -> Any:
    """Apply rotary positions to ``[tokens, heads, head_size]``, pairing the two halves of each head."""
    half = heads.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
