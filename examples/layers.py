"""What layers share: their tokens and weights, norms, rotary positions, writes to pages, and what a hybrid's layers have."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagepool import CacheSpec

__all__ = ["Mixer", "Tokens", "Weights", "normalize", "project", "rotate", "write_pages"]

Weights = dict[str, Any]


class Tokens(NamedTuple):
    """The tokens of a step, int32: four values per token, and for each row of the table the index of its last token in the
    step, the number of its drafts, which are its last tokens, and the number of its rejected drafts that the host knows of. A
    token id of -1 is the token that the step before sampled for the row. The state behind a token is also written to the page
    of its checkpoint id, which is 0 for most.
    """

    token_ids: Any
    rows: Any
    positions: Any
    checkpoint_ids: Any
    last: Any
    num_drafts: Any
    num_rejected: Any


class Mixer(NamedTuple):
    """Another way to mix tokens, which each layer of a hybrid has before its attention. Each row has a page for it.

    ``mix(weights, normed, entries, row_pages, page_tables, tokens)`` returns the output of a layer ``[tokens, width]``, and its
    written arrays (traced). ``make_spec`` gets the lengths of all axes and the sizes of the cache. ``count_pages`` returns the
    default size of the pool for a number of requests that run at once, and ``count_drafts`` the most drafts of a row in a step,
    from the sizes and a number of steps ahead.
    """

    name: str  # the names of its weights begin with it
    axes: dict[str, str]  # axes of each weight
    pool: str  # the pool of the rows' pages
    is_cached: bool  # whether requests hit the rows' pages of others, also in host memory
    row_axes: tuple[str, ...]  # axes of a layer's arrays of rows' pages
    entry_axes: tuple[str, ...]  # axes of a layer's further arrays with the page ids of keys and values
    make_spec: Callable[[Mapping[str, int]], CacheSpec]
    count_pages: Callable[[int], int]
    count_drafts: Callable[[Mapping[str, int], int], int]
    mix: Callable[..., tuple[Any, tuple[Any, ...], tuple[Any, ...]]]


def project(w: Weights, prefix: str, normed: Any) -> list[Any]:
    """Return query, key and value of each token ``[tokens, heads, head_size]``."""
    return [jnp.einsum("tw,whd->thd", normed, w[f"{prefix}{name}"]) for name in ("query", "key", "value")]


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
