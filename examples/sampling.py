"""The next token: greedy, or sampled by temperature, top-k and a seed for each request; and candidates for beams."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["NextTokens", "SamplingRows", "find_next"]


class SamplingRows(NamedTuple):
    """Sampling parameters by row, ``[rows]``: float32, int32, int32."""

    temperature: Any
    top_k: Any
    seed: Any


class NextTokens(NamedTuple):
    """Results by row: the sampled tokens ``[rows, drafts + 1]``, how many of the drafts they accept ``[rows]``, the most
    probable tokens and the logarithms of their probabilities ``[rows, candidates]``; int32, and the last one float32. The last
    sampled token that counts is the one behind the accepted drafts.
    """

    sampled: Any
    num_accepted: Any
    candidates: Any
    log_probabilities: Any

    def list_tokens(self, rows: Any, is_sampled: Any) -> tuple[Any, Any]:
        """Return the accepted drafts of each of these rows, and the token behind them, one row after another, and the number
        for each row: 0 if it is not sampled.
        """
        counts = np.where(is_sampled, self.num_accepted[rows] + 1, 0)
        return self.sampled[rows][np.arange(self.sampled.shape[1]) < counts[:, None]], counts

    def list_candidates(self, row: int) -> list[tuple[int, float]]:
        """Return a row's candidates, each with the logarithm of its probability."""
        return list(zip(self.candidates[row].tolist(), self.log_probabilities[row].tolist(), strict=True))


def find_next(logits: Any, positions: Any, drafts: Any, params: SamplingRows) -> NextTokens:
    """Return the next tokens of each row, and as many candidates as there are rows (traced): from logits ``[rows, drafts + 1,
    vocab]``, the positions of the preceding tokens, and drafts ``[rows, drafts]``, or -1. A row with drafts has no candidates.
    """
    sampled = jax.vmap(sample, (1, 1, None), 1)(logits, positions, params)
    num_accepted = jnp.cumprod(sampled[:, :-1] == drafts, axis=1, dtype=jnp.int32).sum(axis=1)
    log_probabilities, candidates = jax.lax.top_k(jax.nn.log_softmax(logits[:, 0]), min(len(logits), logits.shape[2]))
    return NextTokens(sampled, num_accepted, candidates, log_probabilities)


def sample(logits: Any, positions: Any, params: SamplingRows) -> Any:
    """Sample a token for each row from logits ``[rows, vocab]`` and the positions of the preceding tokens (traced).

    This is the Gumbel trick: noise is added to each logit, and the largest one wins. The noise depends only on seed and
    position, so a request gets the same tokens beside any other requests, and after a preemption.
    """
    vocab = logits.shape[-1]
    num_allowed = jnp.where(params.top_k == 0, vocab, jnp.minimum(params.top_k, vocab))
    least = jnp.take_along_axis(jnp.sort(logits), vocab - num_allowed[:, None], axis=-1)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(params.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys)
    noisy = logits + params.temperature[:, None] * noise
    return jnp.argmax(jnp.where(logits >= least, noisy, -jnp.inf), axis=-1)
