"""Which token comes next: greedy, or by temperature, top-k and a seed of the request's own."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["SamplingParams", "SamplingRows", "sample"]


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. Temperature 0 is greedy, top-k 0 is the whole vocabulary, `stop_token_id` ends the answer.

    ValueError for what is out of range.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers; NaN is not in range either."""
        for name, least in (("max_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: {least} to 2**31 - 1")


class SamplingRows(NamedTuple):
    """The parameters of all rows, ``[rows]``."""

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
