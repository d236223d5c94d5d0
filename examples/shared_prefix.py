"""Attention that reads the pages of a shared prefix once: the tokens of a group attend to them in one product, and each token
to its own pages; both results are merged by their largest scores and sums of weights.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from attention import gather_pages

from pagepool import StepInputs

__all__ = ["Shared", "attend_once", "list_shared"]


class Shared(NamedTuple):
    """Groups of tokens that share pages, int32."""

    page_ids: Any
    """Pages of each group, and page 0 behind them ``[groups, pages]``."""

    tokens: Any
    """Tokens of each group, and a number beyond all tokens behind them ``[groups, rows]``."""

    own_starts: Any
    """Position of the first key that each token reads alone ``[tokens]``."""

    own_places: Any
    """0, 1, ... ``[pages]``: as many as the most pages that a token reads alone."""


def list_shared(inputs: StepInputs, padded_size: int, num_shared: int, num_own: int) -> Shared:
    """Return the groups of a step in which each row has one token. There is room for `num_shared` pages of a group, and for
    `num_own` of a row alone.
    """
    num_tokens, rows = int(np.count_nonzero(inputs.seq_lens)), inputs.prefix_rows
    places, own_starts = inputs.order[:num_tokens], np.zeros(padded_size, np.int32)
    own_starts[places] = inputs.own_starts[:num_tokens]
    tokens = np.where(rows >= 0, np.append(places, padded_size)[rows], padded_size).astype(np.int32)
    page_ids = np.zeros((len(rows), num_shared), np.int32)
    found = inputs.prefix_page_ids[0][:, :num_shared]
    page_ids[:, : found.shape[1]] = found
    return Shared(page_ids, tokens, own_starts, np.arange(num_own, dtype=np.int32))


def attend_once(query: Any, key_pages: Any, value_pages: Any, page_ids: Any, lengths: Any, shared: Shared) -> Any:
    """Attend as the functions in attention.py do, and read the pages of each group once (traced)."""
    (num_tokens, num_heads, head_size), (kv_heads, _, page_size, _) = query.shape, key_pages.shape
    grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, head_size) * head_size**-0.5
    is_shared = jnp.repeat(shared.page_ids > 0, page_size, axis=1)
    members = grouped.at[shared.tokens].get(mode="fill", fill_value=0)
    parts = _attend_part(members, *(gather_pages(each, shared.page_ids) for each in (key_pages, value_pages)), is_shared)
    empty = jnp.zeros(grouped.shape), jnp.full(grouped.shape[:3], -jnp.inf), jnp.zeros(grouped.shape[:3])
    others = [part.at[shared.tokens].set(each, mode="drop") for part, each in zip(empty, parts, strict=True)]
    places = shared.own_starts[:, None] // page_size + shared.own_places
    own_ids = jnp.take_along_axis(page_ids, places, axis=1, mode="fill", fill_value=0)
    positions = shared.own_starts[:, None] + jnp.arange(own_ids.shape[1] * page_size)
    keys, values = (gather_pages(each, own_ids) for each in (key_pages, value_pages))
    own = _attend_part(grouped[:, None], keys, values, positions < lengths[:, None])
    return _merge(others, [part[:, 0] for part in own]).reshape(query.shape)


def _attend_part(query: Any, keys: Any, values: Any, is_seen: Any) -> tuple[Any, Any, Any]:
    """Return the weighted sum of values, the largest score and the sum of weights. The query is ``[groups, rows, kv_heads,
    heads, head_size]``, keys and values ``[kv_heads, groups, keys, head_size]``.
    """
    scores = jnp.where(is_seen[:, None, None, None], jnp.einsum("brkgd,kbld->brkgl", query, keys), -jnp.inf)
    largest = scores.max(axis=-1)
    weights = jnp.exp(scores - largest[..., None])
    return jnp.einsum("brkgl,kbld->brkgd", weights, values), largest, weights.sum(axis=-1)


def _merge(parts: Any, others: Any) -> Any:
    """Return the attention to the keys of both parts."""
    largest = jnp.maximum(parts[1], others[1])
    summed, weights = 0.0, 0.0
    for values, own_largest, own_weights in (parts, others):
        scale = jnp.exp(own_largest - largest)
        summed, weights = summed + values * scale[..., None], weights + own_weights * scale
    return summed / weights[..., None]
