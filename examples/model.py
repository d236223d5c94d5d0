"""A decoder-only transformer over a paged cache: RMSNorm, rotary positions, grouped-query attention, SwiGLU. In a hybrid each
layer has gated linear attention before its attention.

A step is one flat list of tokens of any requests. Each token has a row of the page table and a position in it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from linear_attention import attend_linearly

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
"""Axes of each weight."""

HYBRID_AXES = AXES | {
    "linear_norm": "layers width",
    "linear_query": "layers width heads head_size",
    "linear_key": "layers width heads head_size",
    "linear_value": "layers width heads head_size",
    "linear_decay": "layers width heads",
    "linear_output": "layers heads head_size width",
}
"""Axes of each weight of a hybrid."""

DEFAULT_SIZES = {"vocab": 96, "width": 64, "layers": 2, "heads": 16, "kv_heads": 8, "head_size": 16, "hidden": 128}

Weights = dict[str, Any]


class Cache(NamedTuple):
    """Contents of the pages, float32, by cache group: keys and values of each layer ``[kv_heads, num_pages, page_size,
    head_size]``, and in a hybrid the state of each layer ``[num_state_pages, heads, head_size, head_size]``.
    """

    keys_and_values: list[tuple[jax.Array, jax.Array]]
    states: list[jax.Array]


Attention = Callable[[Any, Any, Any, Any, Any], Any]
"""Paged attention: the signature of the functions in attention.py."""


class Tokens(NamedTuple):
    """The tokens of a step, int32: four values per token, and for each row of the table the index of its last token in the
    step. A token id of -1 is the token that the step before sampled for the row. The state behind a token is also written to
    the page of its checkpoint id, which is 0 for most.
    """

    token_ids: Any
    rows: Any
    positions: Any
    checkpoint_ids: Any
    last: Any


def make_weights(seed: int, sizes: Mapping[str, int] = DEFAULT_SIZES, is_hybrid: bool = False) -> Weights:
    """Make random weights. Norms are ones; the others are normally distributed, and large enough for answers to vary."""
    rng = np.random.default_rng(seed)
    all_axes = HYBRID_AXES if is_hybrid else AXES
    shapes = {name: [sizes[axis] for axis in axes.split()] for name, axes in all_axes.items()}
    scale = 2 * sizes["width"] ** -0.5
    weights = {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}
    return weights | {name: np.ones_like(weights[name]) for name in weights if name.endswith("norm")}


def load_weights(path: Path) -> Weights:
    """Load weights saved by ``numpy.savez(path, **weights)``. Raise ValueError if they do not fit this model."""
    try:
        with np.load(path) as file:
            weights = {name: np.asarray(file[name], dtype=np.float32) for name in file.files}
    except (ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"weights: {path} was not saved by numpy.savez") from error
    get_sizes(weights)
    return weights


def digest_weights(weights: Weights) -> bytes:
    """Return a digest of names, shapes and values. An engine with real checkpoints would keep theirs beside them."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        array = np.ascontiguousarray(weight)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.digest()


def get_axes(weights: Weights) -> dict[str, str]:
    """Return the axes of each weight. The weights are a hybrid's if they include a name that only hybrids have."""
    return AXES if weights.keys().isdisjoint(HYBRID_AXES.keys() - AXES.keys()) else HYBRID_AXES


def get_sizes(weights: Weights) -> dict[str, int]:
    """Return the length of each axis. ValueError if a weight is missing, unknown, or does not fit the others."""
    all_axes = get_axes(weights)
    if set(weights) != set(all_axes):
        raise ValueError(f"weights: got {sorted(weights)}, allowed: {sorted(all_axes)}")
    sizes: dict[str, int] = {}
    for name, axes in all_axes.items():
        shape, expected = np.shape(weights[name]), axes.split()
        if len(shape) == len(expected):
            sizes = dict(zip(expected, shape, strict=True)) | sizes
        if shape != tuple(sizes.get(axis) for axis in expected):
            raise ValueError(f"weights: got {name} with shape {shape}, allowed: {axes}, where {sizes}")
    if sizes["heads"] % sizes["kv_heads"] or sizes["head_size"] % 2:
        raise ValueError(f"weights: got {sizes}, allowed: heads a multiple of kv_heads, and an even head_size")
    return sizes


def forward(weights: Weights, cache: Cache, page_tables: Sequence[Any], tokens: Tokens, attend: Attention) -> tuple[Any, Cache]:
    """Write keys, values and states into pages, attend, and return logits ``[rows, vocab]`` and the cache (traced)."""
    hidden = weights["embedding"][tokens.token_ids]
    written = Cache([], [])
    for layer, pages in enumerate(cache.keys_and_values):
        w = {name: weights[name][layer] for name, axes in get_axes(weights).items() if axes.startswith("layers")}
        if cache.states:
            page_ids = page_tables[1][tokens.rows, 0]  # a row has one page for its state
            added, states = mix_linearly(w, normalize(hidden, w["linear_norm"]), cache.states[layer], page_ids, tokens)
            hidden += added
            written.states.append(states)
        added, pages = mix(w, normalize(hidden, w["attention_norm"]), pages, page_tables[0], tokens, attend)
        hidden += added
        written.keys_and_values.append(pages)
        normed = normalize(hidden, w["mlp_norm"])
        hidden += (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
    return normalize(hidden[tokens.last], weights["final_norm"]) @ weights["unembedding"], written


def mix(w: Weights, normed: Any, pages: tuple[Any, Any], page_table: Any, tokens: Tokens, attend: Attention) -> Any:
    """Return the output of a layer's attention ``[tokens, width]``, and the pages with the tokens' keys and values (traced)."""
    query, key, value = (jnp.einsum("tw,whd->thd", normed, w[name]) for name in ("query", "key", "value"))
    slots = device_slot_mapping(page_table, tokens.rows, tokens.positions, page_size=pages[0].shape[2])
    # All tokens are written before any is read: a prompt may hit pages that another row fills in the same step.
    keys, values = write_pages(pages[0], slots, rotate(key, tokens.positions)), write_pages(pages[1], slots, value)
    attended = attend(rotate(query, tokens.positions), keys, values, page_table[tokens.rows], tokens.positions + 1)
    return jnp.einsum("thd,hdw->tw", attended, w["output"]), (keys, values)


def mix_linearly(w: Weights, normed: Any, pages: Any, page_ids: Any, tokens: Tokens) -> tuple[Any, Any]:
    """Return the output of a layer's linear attention ``[tokens, width]``, and the pages with the new states (traced)."""
    query, key, value = (jnp.einsum("tw,whd->thd", normed, w[f"linear_{name}"]) for name in ("query", "key", "value"))
    decay = jax.nn.sigmoid(normed @ w["linear_decay"]) ** (1 / 16)  # so that a head remembers tens of tokens
    attended, pages = attend_linearly(query, key, value, decay, pages, page_ids, tokens.checkpoint_ids, tokens.positions)
    return jnp.einsum("thd,hdw->tw", normalize(attended, 1), w["linear_output"]), pages


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
