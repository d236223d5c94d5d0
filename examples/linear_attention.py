"""Gated linear attention: a layer whose memory is a state of fixed size, one matrix for each head, in one page for each row.

A token changes its row's state, ``S = decay * S + key value^T``, and reads ``query S``. Tokens are computed one after another,
and each chunk of a prompt starts from the state at the end of the chunk before. The state behind some tokens is also written
to a page that becomes a checkpoint; for the others that page is page 0, the null page, which nobody reads. (A fast engine has a
kernel that computes a whole chunk with matrix products.)

Shapes: query, key and value ``[tokens, heads, head_size]``, decay ``[tokens, heads]``, pages ``[num_pages, heads, head_size,
head_size]``, page_ids, checkpoint_ids and positions int32 ``[tokens]``. The result has the shape of the query.
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["attend_linearly"]


def attend_linearly(
    query: Any, key: Any, value: Any, decay: Any, pages: Any, page_ids: Any, checkpoint_ids: Any, positions: Any
) -> tuple[Any, Any]:
    """Return each token's result, and the pages with the state of each row after its last token, and checkpoints (traced)."""

    def attend(pages: Any, token: tuple[Any, ...]) -> tuple[Any, Any]:
        query, key, value, decay, page_id, checkpoint_id, position = token
        before = jnp.where(position == 0, 0, pages[page_id])  # a request begins with a zero state
        state = decay[:, None, None] * before + key[:, :, None] * value[:, None, :]
        pages = pages.at[page_id].set(state).at[checkpoint_id].set(state)
        return pages, jnp.einsum("hk,hkv->hv", query, state)

    pages, attended = jax.lax.scan(attend, pages, (query, key, value, decay, page_ids, checkpoint_ids, positions))
    return attended, pages
