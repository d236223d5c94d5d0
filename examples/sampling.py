"""Which token comes next: greedy, or by temperature, top-k and a seed of the request's own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["SamplingRows", "sample"]


class SamplingRows(NamedTuple):
    """The parameters of the requests by row, ``[rows]``: float32, int32, int32."""

    temperature: Any
    top_k: Any
    seed: Any


def sample(logits: Any, positions: Any, params: SamplingRows) -> Any:
    """Traced: a token for each row, from logits ``[rows, vocab]`` and the positions of the tokens that they follow.

    By the Gumbel trick: the greatest logit, each with noise added. The noise depends on seed and position alone, so a request
    gets the same tokens whatever runs beside it, and goes on with the same after it was preempted.
    """
    vocab = logits.shape[-1]
    num_allowed = jnp.where(params.top_k == 0, vocab, jnp.minimum(params.top_k, vocab))
    least = jnp.take_along_axis(jnp.sort(logits), vocab - num_allowed[:, None], axis=-1)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(params.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys)
    noisy = logits + params.temperature[:, None] * noise
    return jnp.argmax(jnp.where(logits >= least, noisy, -jnp.inf), axis=-1)
