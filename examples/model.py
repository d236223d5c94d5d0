"""A decoder-only transformer over a paged cache: RMSNorm, rotary positions, grouped-query attention, SwiGLU. In a hybrid each
layer has gated linear attention, or compressed attention, before its attention.

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
from layers import Mixer, Tokens, Weights, normalize, project, rotate, write_pages
from linear_attention import LINEAR
from ring_attention import RING

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

MIXERS = {"attention": None, "linear": LINEAR, "ring": RING}
"""What the layers of each kind of model have before their attention."""

DEFAULT_SIZES = {"vocab": 96, "width": 64, "layers": 2, "heads": 16, "kv_heads": 8, "head_size": 16, "hidden": 128, "period": 4}


class Cache(NamedTuple):
    """Contents of the pages, float32, by cache group: keys and values of each layer ``[kv_heads, num_pages, page_size,
    head_size]``, with the entries of its `Mixer` behind them, and in a hybrid the rows' pages of each layer, such as states
    ``[heads, num_row_pages, head_size, head_size]``.
    """

    keys_and_values: list[tuple[jax.Array, ...]]
    row_pages: list[tuple[jax.Array, ...]]


Attention = Callable[..., Any]
"""Paged attention: the functions in attention.py, and in shared_prefix.py."""


def make_weights(seed: int, sizes: Mapping[str, int] = DEFAULT_SIZES, kind: str = "attention") -> Weights:
    """Make random weights of a model of a kind in `MIXERS`. Norms are ones; the others are normally distributed, and large
    enough for answers to vary.
    """
    rng = np.random.default_rng(seed)
    shapes = {name: [sizes[axis] for axis in axes.split()] for name, axes in list_axes(MIXERS[kind]).items()}
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


def list_axes(mixer: Mixer | None) -> dict[str, str]:
    """Return the axes of each weight of a model."""
    return AXES if mixer is None else AXES | mixer.axes


def find_mixer(weights: Weights) -> Mixer | None:
    """Return what the layers have before their attention: the weights include a name that only such models have."""
    return next((mixer for mixer in MIXERS.values() if mixer is not None and not mixer.axes.keys().isdisjoint(weights)), None)


def get_axes(weights: Weights) -> dict[str, str]:
    """Return the axes of each weight."""
    return list_axes(find_mixer(weights))


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


def forward(
    weights: Weights, cache: Cache, page_tables: Sequence[Any], tokens: Tokens, places: Any, attend: Attention
) -> tuple[Any, Cache]:
    """Write keys, values and rows' pages, attend, and return the logits of the tokens at `places`, and the cache (traced)."""
    hidden, mixer = weights["embedding"][tokens.token_ids], find_mixer(weights)
    written = Cache([], [])
    for layer, (keys, values, *entries) in enumerate(cache.keys_and_values):
        w = {name: weights[name][layer] for name, axes in get_axes(weights).items() if axes.startswith("layers")}
        if mixer is not None:
            normed = normalize(hidden, w[f"{mixer.name}_norm"])
            added, entries, row_pages = mixer.mix(w, normed, entries, cache.row_pages[layer], page_tables, tokens)
            hidden += added
            written.row_pages.append(row_pages)
        added, pages = mix(w, normalize(hidden, w["attention_norm"]), (keys, values), page_tables[0], tokens, attend)
        hidden += added
        written.keys_and_values.append((*pages, *entries))
        normed = normalize(hidden, w["mlp_norm"])
        hidden += (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
    return normalize(hidden[places], weights["final_norm"]) @ weights["unembedding"], written


def mix(w: Weights, normed: Any, pages: tuple[Any, Any], page_table: Any, tokens: Tokens, attend: Attention) -> Any:
    """Return the output of a layer's attention ``[tokens, width]``, and the pages with the tokens' keys and values (traced)."""
    query, key, value = project(w, "", normed)
    slots = device_slot_mapping(page_table, tokens.rows, tokens.positions, page_size=pages[0].shape[2])
    # All tokens are written before any is read: a prompt may hit pages that another row fills in the same step.
    keys, values = write_pages(pages[0], slots, rotate(key, tokens.positions)), write_pages(pages[1], slots, value)
    attended = attend(rotate(query, tokens.positions), keys, values, page_table[tokens.rows], tokens.positions + 1)
    return jnp.einsum("thd,hdw->tw", attended, w["output"]), (keys, values)
