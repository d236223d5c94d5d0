"""Gated linear attention: a layer whose memory is a state of fixed size, one matrix for each head, in one page for each row.

A token changes its row's state, ``S = decay * S + key value^T``, and reads ``query S``. Tokens are computed one after another,
and each chunk of a prompt starts from the state at the end of the chunk before. The state behind some tokens is also written
to a page that becomes a checkpoint; for the others that page is page 0, the null page, which nobody reads. (A fast engine has a
kernel that computes a whole chunk with matrix products.)

Shapes: query, key and value ``[tokens, heads, head_size]``, decay ``[tokens, heads]``, pages ``[heads, num_pages, head_size,
head_size]``, page_ids, checkpoint_ids and positions int32 ``[tokens]``. The result has the shape of the query.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from layers import Mixer, Tokens, Weights, normalize, project

from pagepool import MambaSpec

__all__ = ["LINEAR", "attend_linearly"]


def attend_linearly(
    query: Any, key: Any, value: Any, decay: Any, pages: Any, page_ids: Any, checkpoint_ids: Any, positions: Any
) -> tuple[Any, Any]:
    """Return each token's result, and the pages with the state of each row after its last token, and checkpoints (traced)."""

    def attend(pages: Any, token: tuple[Any, ...]) -> tuple[Any, Any]:
        query, key, value, decay, page_id, checkpoint_id, position = token
        before = jnp.where(position == 0, 0, pages[:, page_id])  # a request begins with a zero state
        state = decay[:, None, None] * before + key[:, :, None] * value[:, None, :]
        pages = pages.at[:, page_id].set(state).at[:, checkpoint_id].set(state)
        return pages, jnp.einsum("hk,hkv->hv", query, state)

    pages, attended = jax.lax.scan(attend, pages, (query, key, value, decay, page_ids, checkpoint_ids, positions))
    return attended, pages


def mix_linearly(
    w: Weights, normed: Any, entries: tuple[()], states: tuple[Any], page_tables: Sequence[Any], tokens: Tokens
) -> tuple[Any, tuple[()], tuple[Any]]:
    """Mix the tokens of a layer, whose states are in pages of their own (traced)."""
    query, key, value = project(w, "linear_", normed)
    decay = jax.nn.sigmoid(normed @ w["linear_decay"]) ** (1 / 16)  # so that a head remembers tens of tokens
    page_ids = page_tables[1][tokens.rows, 0]
    attended, pages = attend_linearly(query, key, value, decay, *states, page_ids, tokens.checkpoint_ids, tokens.positions)
    return jnp.einsum("thd,hdw->tw", normalize(attended, 1), w["linear_output"]), entries, (pages,)


def make_spec(sizes: Mapping[str, int]) -> MambaSpec:
    """Describe the state of a layer."""
    shape = sizes["heads"], sizes["head_size"], sizes["head_size"]
    return MambaSpec(sizes["page_size"], (shape,), "float32", checkpoint_interval=sizes["checkpoint_interval"])


LINEAR = Mixer(
    name="linear",
    axes={
        "linear_norm": "layers width",
        "linear_query": "layers width heads head_size",
        "linear_key": "layers width heads head_size",
        "linear_value": "layers width heads head_size",
        "linear_decay": "layers width heads",
        "linear_output": "layers heads head_size width",
    },
    pool="states",
    is_cached=True,
    row_axes=("heads num_row_pages head_size head_size",),
    entry_axes=(),
    make_spec=make_spec,
    count_pages=lambda num_reqs: 4 * num_reqs,  # a state for each request, and checkpoints
    count_drafts=lambda sizes, num_steps_ahead: 0,  # a state cannot go back
    mix=mix_linearly,
)
"""The layers of a hybrid with states."""
