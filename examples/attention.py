"""Paged attention in two forms. Each token is its own query, with its row's pages and its own length, so the same code serves
chunks of prompts and decoded tokens. (A fast engine has a kernel that reads a prompt's pages once for a whole chunk.)

Shapes: query ``[tokens, heads, head_size]``, pages ``[kv_heads, num_pages, page_size, head_size]``, page_ids int32
``[tokens, pages_per_row]``, lengths int32 ``[tokens]``, including the token itself. The result has the shape of the query.
"""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["attend_by_gather", "attend_by_pallas", "attend_to", "gather_pages"]


def attend_by_gather(query: Any, key_pages: Any, value_pages: Any, page_ids: Any, lengths: Any) -> Any:
    """Gather the pages of each token's row, and attend to them as to one contiguous array."""
    keys, values = gather_pages(key_pages, page_ids), gather_pages(value_pages, page_ids)
    return attend_to(query, keys, values, jnp.arange(keys.shape[2]) < lengths[:, None])


def gather_pages(pages: Any, page_ids: Any) -> Any:
    """Return what the pages of each token's row have, one after another ``[kv_heads, tokens, keys, head_size]``."""
    return pages[:, page_ids].reshape(pages.shape[0], len(page_ids), -1, pages.shape[3])


def attend_to(query: Any, keys: Any, values: Any, is_seen: Any) -> Any:
    """Attend to those of each token's own keys that it sees ``[tokens, keys]``."""
    (num_tokens, num_heads, head_size), kv_heads = query.shape, keys.shape[0]
    grouped = query.reshape(num_tokens, kv_heads, num_heads // kv_heads, head_size)
    scores = jnp.einsum("tkgd,ktld->tkgl", grouped, keys) * head_size**-0.5
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("tkgl,ktld->tkgd", weights, values).reshape(query.shape)


def attend_by_pallas(query: Any, key_pages: Any, value_pages: Any, page_ids: Any, lengths: Any) -> Any:
    """Call jax's paged attention kernel for GPUs, which reads pages in place. On other devices it is interpreted."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages_per_block = next(n for n in (8, 4, 2, 1) if page_ids.shape[1] % n == 0)
    return paged_attention(
        query * query.shape[-1] ** -0.5,
        key_pages,
        value_pages,
        page_ids,
        lengths,
        pages_per_compute_block=pages_per_block,
        k_splits=1,
        interpret=jax.default_backend() != "gpu",
    )
