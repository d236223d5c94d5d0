"""Sampling of the next token: greedy, or by temperature, top-k and a seed for each request."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["SamplingRows", "sample"]


class SamplingRows(NamedTuple):
    """Sampling parameters by row, ``[rows]``: float32, int32, int32."""

    temperature: Any
    top_k: Any
    seed: Any


def sample(logits: Any, positions: Any, params: SamplingRows) -> Any:
    """Sample a token for each row from logits ``[rows, vocab]`` and the positions of the preceding tokens (traced).

    This is the Gumbel trick: noise is added to each logit, and the largest one wins. The noise depends only on seed and
    position, so a request gets the same tokens whatever else runs, also after a preemption.
    """
    vocab = logits.shape[-1]
    num_allowed = jnp.where(params.top_k == 0, vocab, jnp.minimum(params.top_k, vocab))
    least = jnp.take_along_axis(jnp.sort(logits), vocab - num_allowed[:, None], axis=-1)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(params.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys)
    noisy = logits + params.temperature[:, None] * noise
    return jnp.argmax(jnp.where(logits >= least, noisy, -jnp.inf), axis=-1)
