"""Compressed attention: a layer that keeps one entry, a key and a value, of each `period` tokens. An entry is a weighted mean.

A token attends to the entries of all groups of `period` tokens before its own, and to the raw keys of its own group up to
itself. Raw keys and values of a row's last tokens are in a ring, one page of `ring_size` tokens, with position ``p`` at
``p % ring_size``. The last token of a group writes the group's entry. Entries have the page ids of the attention's keys and
values, and a page of `page_size` tokens has ``page_size / period`` entries, so the layers are of one group of full attention.

A step takes the raw keys of its own tokens from itself, and earlier ones from the ring. So it may have more tokens than the
ring; then it writes only the last ones. At a multiple of the period nothing of the ring is read.

Shapes: entries ``[kv_heads, num_pages, page_size / period, head_size]``, rings ``[kv_heads, num_row_pages, ring_size,
head_size]``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from attention import attend_to, gather_pages
from layers import Mixer, Tokens, Weights, project, rotate, write_pages

from pagepool import RingSpec, device_slot_mapping

__all__ = ["RING"]

Pair = tuple[Any, Any]
"""Arrays of keys and of values."""


def mix_by_ring(
    w: Weights, normed: Any, entries: Pair, rings: Pair, page_tables: Sequence[Any], tokens: Tokens
) -> tuple[Any, Pair, Pair]:
    """Mix the tokens of a layer, whose raw keys are in rings (traced)."""
    query, key, value = project(w, "ring_", normed)
    query, key = rotate(query, tokens.positions), rotate(key, tokens.positions)
    period, ring_ids, positions = len(w["ring_share"]), page_tables[1][tokens.rows, 0], tokens.positions[:, None]
    places = positions // period * period + jnp.arange(period)  # the positions of each token's group
    raw = [read_groups(new, ring, places, ring_ids, tokens) for new, ring in zip((key, value), rings, strict=True)]
    # All entries are written before any is read: a prompt may hit pages that another row fills in the same step.
    slots, share = find_entry_slots(entries[0], page_tables[0], tokens, period), jax.nn.softmax(w["ring_share"], axis=0)
    means = [jnp.einsum("ktpd,pk->tkd", group, share) for group in raw]
    entries = write_pages(entries[0], slots, means[0]), write_pages(entries[1], slots, means[1])
    gathered = [gather_pages(pages, page_tables[0][tokens.rows]) for pages in entries]
    keys, values = (jnp.concatenate(each, axis=2) for each in zip(gathered, raw, strict=True))
    is_before = jnp.arange(gathered[0].shape[2]) < positions // period
    attended = attend_to(query, keys, values, jnp.concatenate([is_before, places <= positions], axis=1))
    slots = find_ring_slots(rings[0], ring_ids, tokens)
    rings = write_pages(rings[0], slots, key), write_pages(rings[1], slots, value)
    return jnp.einsum("thd,hdw->tw", attended, w["ring_output"]), entries, rings


def read_groups(new: Any, ring: Any, places: Any, ring_ids: Any, tokens: Tokens) -> Any:
    """Return what is at the positions of each token's group ``[kv_heads, tokens, period, head_size]``: of tokens of this step,
    which stand one after another in each row, from `new` ``[tokens, kv_heads, head_size]``, and of earlier ones from the ring.
    Positions behind the token have anything.
    """
    indices = jnp.arange(len(places))[:, None] - tokens.positions[:, None] + places
    is_new = (indices >= 0) & (tokens.rows[indices] == tokens.rows[:, None])
    kept = ring[:, ring_ids[:, None], places % ring.shape[2]]
    return jnp.where(is_new[None, ..., None], new.swapaxes(0, 1)[:, indices], kept)


def find_entry_slots(entries: Any, page_table: Any, tokens: Tokens, period: int) -> Any:
    """Return the slot of each token's entry; for tokens that do not end a group slot 0, of the null page."""
    slots = device_slot_mapping(page_table, tokens.rows, tokens.positions // period, page_size=entries.shape[2])
    return jnp.where((tokens.positions + 1) % period == 0, slots, 0)


def find_ring_slots(ring: Any, ring_ids: Any, tokens: Tokens) -> Any:
    """Return the slot of each token in its row's ring; for tokens that later ones of the step overwrite, slot 0."""
    ring_size, last_positions = ring.shape[2], tokens.positions[tokens.last[tokens.rows]]
    slots = ring_ids * ring_size + tokens.positions % ring_size
    return jnp.where(tokens.positions > last_positions - ring_size, slots, 0)


def make_spec(sizes: Mapping[str, int]) -> RingSpec:
    """Describe the ring of a layer: for each token a key and a value."""
    return RingSpec(sizes["ring_size"], sizes["period"], (2, sizes["kv_heads"], sizes["head_size"]), "float32")


def count_drafts(sizes: Mapping[str, int], num_steps_ahead: int) -> int:
    """Return the most drafts that leave what the next step needs in the ring, if all of them are rejected."""
    return max(0, sizes["ring_size"] - sizes["period"] - num_steps_ahead) // (num_steps_ahead + 1)


RING = Mixer(
    name="ring",
    axes={
        "ring_norm": "layers width",
        "ring_query": "layers width heads head_size",
        "ring_key": "layers width kv_heads head_size",
        "ring_value": "layers width kv_heads head_size",
        "ring_share": "layers period kv_heads",
        "ring_output": "layers heads head_size width",
    },
    pool="rings",
    is_cached=False,
    row_axes=("kv_heads num_row_pages ring_size head_size",) * 2,
    entry_axes=("kv_heads num_pages page_size/period head_size",) * 2,
    make_spec=make_spec,
    count_pages=lambda num_reqs: num_reqs + 2,  # a ring for each row of the table, that of padding included, and the null page
    count_drafts=count_drafts,
    mix=mix_by_ring,
)
"""The layers of a hybrid with rings."""
