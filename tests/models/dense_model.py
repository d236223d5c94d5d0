"""The model of examples/ in NumPy and float64, one sequence at a time, without cache and pages: obviously correct, and slow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def compute_logits(weights: dict[str, Array], token_ids: list[int]) -> Array:
    """Return the logits of the next token, recomputing all tokens."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    hidden = weights["embedding"][token_ids]
    for layer in range(len(weights["query"])):
        w = {name: array[layer] for name, array in weights.items() if name not in ("embedding", "unembedding", "final_norm")}
        if "linear_norm" in w:
            hidden = hidden + attend_linearly(w, normalize(hidden) * w["linear_norm"])
        if "ring_norm" in w:
            hidden = hidden + attend_to_entries(w, normalize(hidden) * w["ring_norm"])
        hidden = hidden + attend(w, normalize(hidden) * w["attention_norm"])
        normed = normalize(hidden) * w["mlp_norm"]
        gate, up = (np.einsum("tw,wh->th", normed, w[name]) for name in ("gate", "up"))  # `@` would wait for BLAS's threads
        hidden = hidden + np.einsum("th,hw->tw", gate / (1 + np.exp(-gate)) * up, w["down"])
    return normalize(hidden[-1]) * weights["final_norm"] @ weights["unembedding"]


def normalize(hidden: Array) -> Array:
    return hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + 1e-6)


def attend(w: dict[str, Array], normed: Array) -> Array:
    """Causal attention, head by head; neighbouring query heads share a KV head."""
    num_heads, num_kv_heads = w["query"].shape[1], w["key"].shape[1]
    is_seen = np.tril(np.ones((len(normed), len(normed)), dtype=bool))
    added = np.zeros_like(normed)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        query, key = rotate(normed @ w["query"][:, head]), rotate(normed @ w["key"][:, kv_head])
        added += weigh(query, key, is_seen) @ (normed @ w["value"][:, kv_head]) @ w["output"][head]
    return added


def weigh(query: Array, key: Array, is_seen: Array) -> Array:
    """Return the weight of each key for each query."""
    scores = np.where(is_seen, query @ key.T / np.sqrt(query.shape[1]), -np.inf)
    weights: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def attend_linearly(w: dict[str, Array], normed: Array) -> Array:
    """Gated linear attention, as a sum over all tokens before: key and value fade by the product of the decays since."""
    decay = (1 + np.exp(-normed @ w["linear_decay"])) ** (-1 / 16)
    added = np.zeros_like(normed)
    for head in range(decay.shape[1]):
        query, key, value = (normed @ w[f"linear_{name}"][:, head] for name in ("query", "key", "value"))
        since = np.log(decay[:, head]).cumsum()
        faded = np.tril(np.exp(np.minimum(since[:, None] - since, 0)))
        added += normalize(faded * (query @ key.T) @ value) @ w["linear_output"][head]
    return added


def attend_to_entries(w: dict[str, Array], normed: Array) -> Array:
    """Compressed attention, head by head: to the means of all groups of tokens before, and to its own group up to itself."""
    period, num_kv_heads = w["ring_share"].shape
    num_heads, num_groups, places = w["ring_query"].shape[1], len(normed) // period, np.arange(len(normed))
    group = places[:, None] // period
    is_seen = np.hstack([np.arange(num_groups) < group, (places // period == group) & (places <= places[:, None])])
    added = np.zeros_like(normed)
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        share = np.exp(w["ring_share"][:, kv_head])
        means = np.zeros((num_groups, len(normed)))  # each line has the shares of a group's tokens
        means[places[: num_groups * period] // period, places[: num_groups * period]] = np.tile(share / share.sum(), num_groups)
        query, key = rotate(normed @ w["ring_query"][:, head]), rotate(normed @ w["ring_key"][:, kv_head])
        value = normed @ w["ring_value"][:, kv_head]
        weights = weigh(query, np.vstack([means @ key, key]), is_seen)
        added += weights @ np.vstack([means @ value, value]) @ w["ring_output"][head]
    return added


def rotate(vectors: Array) -> Array:
    """Rotate pairs, as complex numbers, by angles that grow with the position."""
    half = vectors.shape[1] // 2
    angles = np.arange(len(vectors))[:, None] / 10_000.0 ** (np.arange(half) / half)
    turned = (vectors[:, :half] + 1j * vectors[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
