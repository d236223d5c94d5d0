"""The model of the engine on torch, and its attention to a paged cache. The pages of a prefix that rows share are read once, as
shared_prefix.py does on jax: the tokens of a group attend to them in one product, and each token to its own pages; both results
are merged by their largest scores and sums of weights.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention as attend_to

VOCAB, WIDTH, LAYERS, HEADS, HEAD_SIZE, PAGE_SIZE, MAX_MODEL_LEN, STOP_TOKEN = 64, 32, 2, 4, 8, 4, 96, 20
NUM_COLUMNS = MAX_MODEL_LEN // PAGE_SIZE
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float64  # rounding must not decide between tokens, or answers could not be compared


class Model:
    """A small decoder-only transformer with random weights."""

    def __init__(self, seed: int) -> None:
        """Draw the weights."""
        draw = partial(torch.randn, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=DTYPE)
        self.embedding, self.places, self.unembedding = draw(VOCAB, WIDTH), draw(MAX_MODEL_LEN, WIDTH), draw(WIDTH, VOCAB)
        self.qkv, self.output = draw(LAYERS, WIDTH, 3 * HEADS * HEAD_SIZE), draw(LAYERS, HEADS * HEAD_SIZE, WIDTH)
        self.up, self.down = draw(LAYERS, WIDTH, 2 * WIDTH), draw(LAYERS, 2 * WIDTH, WIDTH)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the logits behind each token. `attend` gets a layer, queries, keys and values ``[heads, tokens, size]``."""
        hidden = self.embedding[token_ids] + self.places[positions]
        for layer in range(LAYERS):
            heads = (torch.rms_norm(hidden, (WIDTH,)) @ self.qkv[layer]).unflatten(1, (3, HEADS, HEAD_SIZE)).permute(1, 2, 0, 3)
            hidden = hidden + attend(layer, *heads).swapaxes(0, 1).flatten(1) @ self.output[layer]
            hidden = hidden + (torch.rms_norm(hidden, (WIDTH,)) @ self.up[layer]).relu() @ self.down[layer]
        return torch.rms_norm(hidden, (WIDTH,)) @ self.unembedding

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the answer to a prompt. Each token is computed from all tokens before it, without a cache."""
        token_ids, positions = list(prompt), torch.arange(MAX_MODEL_LEN, device=DEVICE)
        while len(token_ids) < len(prompt) + max_tokens and token_ids[len(prompt) :][-1:] != [STOP_TOKEN]:
            ids = torch.tensor(token_ids, device=DEVICE)
            logits = self.forward(ids, positions[: len(ids)], lambda _, *heads: attend_to(*heads, is_causal=True))
            token_ids.append(int(logits[-1].argmax()))
        return token_ids[len(prompt) :]


class Reads(NamedTuple):
    """What groups of tokens read: the tokens, with -1 behind them ``[groups, tokens]``, slots of the cache, and whether the
    tokens see what is there ``[groups, keys]``.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    is_seen: torch.Tensor


def list_own_reads(page_ids: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, num_pages: int) -> Reads:
    """Return what tokens at these positions read alone: pages of their rows ``[tokens, pages]``, `num_pages` of them from a
    first position on.
    """
    starts = torch.minimum(starts, positions)  # padding sees the null page, at position 0: without any key it would have NaN
    numbers = torch.arange(num_pages * PAGE_SIZE, device=DEVICE)
    columns = (starts[:, None] // PAGE_SIZE + numbers[:num_pages]).clamp(max=NUM_COLUMNS - 1)
    tokens, is_seen = torch.arange(len(positions), device=DEVICE)[:, None], starts[:, None] + numbers <= positions[:, None]
    return Reads(tokens, _list_slots(page_ids.gather(1, columns)), is_seen)


def list_shared_reads(page_ids: torch.Tensor, tokens: torch.Tensor) -> Reads:
    """Return what the tokens of each group read: pages, and page 0 behind them ``[groups, pages]``."""
    return Reads(tokens, _list_slots(page_ids), (page_ids > 0).repeat_interleave(PAGE_SIZE, dim=1))


def _list_slots(page_ids: torch.Tensor) -> torch.Tensor:
    """Return the slots of the pages in each line."""
    return (page_ids[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=DEVICE)).flatten(1)


def attend_to_cache(query: torch.Tensor, cache: torch.Tensor, own: Reads, shared: Reads | None = None) -> torch.Tensor:
    """Attend to a layer's keys and values ``[2, heads, slots, size]``, with a query ``[heads, tokens, size]``. All shapes are
    fixed by those of the arguments, as CUDA graphs need it.
    """
    if shared is None:
        keys, values = cache[:, :, own.slots]
        return attend_to(query[:, :, None], keys, values, attn_mask=own.is_seen[:, None]).squeeze(2)
    return _merge(_attend_part(query, cache, own), _attend_part(query, cache, shared))


class Part(NamedTuple):
    """Attention of each token to some of its keys: the weighted sum of values ``[heads, tokens, size]``, the largest score and
    the sum of weights ``[heads, tokens, 1]``.
    """

    values: torch.Tensor
    largest: torch.Tensor
    weights: torch.Tensor


def _attend_part(query: torch.Tensor, cache: torch.Tensor, reads: Reads) -> Part:
    """Attend in one product for each group. A token in no group has a sum of weights of 0. NaN of a group without pages goes to
    no token, since it has none.
    """
    keys, values = cache[:, :, reads.slots]
    scores = query[:, reads.tokens.clamp(min=0)] @ keys.mT * HEAD_SIZE**-0.5
    scores = scores.masked_fill(~reads.is_seen[:, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    places, parts = torch.where(reads.tokens < 0, query.shape[1], reads.tokens), []
    for part, empty in ((weights @ values, 0.0), (largest, -torch.inf), (weights.sum(-1, keepdim=True), 0.0)):
        by_token = part.new_full((HEADS, query.shape[1] + 1, part.shape[-1]), empty)  # the last place takes what is no token's
        by_token[:, places] = part
        parts.append(by_token[:, :-1])
    return Part(*parts)


def _merge(one: Part, other: Part) -> torch.Tensor:
    """Return the attention to the keys of both parts."""
    largest = torch.maximum(one.largest, other.largest)
    scales = [(part.largest - largest).exp() for part in (one, other)]
    values = one.values * scales[0] + other.values * scales[1]
    return values / (one.weights * scales[0] + other.weights * scales[1])
