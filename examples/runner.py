"""The model on the devices: weights, the pages of the cache, and the program that runs a step."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layers import Tokens, Weights
from model import Attention, Cache, find_mixer, forward, get_axes, get_sizes
from rows import Rows
from sampling import NextTokens, SamplingRows, find_next
from shared_prefix import Shared, attend_once

from pagepool import Moves, StateWrites, StepInputs, page_copies
from pagepool.host_pages import FinishedTransfers, HostPages

__all__ = ["ModelRunner", "pack"]

SPLIT_AXES = {"heads", "kv_heads", "hidden"}
"""Axes divided over the devices (tensor parallelism). The others are replicated."""


class ModelRunner:
    """A model on a mesh of devices, with a cache of `num_pages` pages of `page_size` tokens and, in a hybrid, `num_row_pages`
    states or rings of `ring_size` tokens, divided by heads. `num_host_pages` has numbers of both in host memory, or none. Rows
    have up to `num_drafts` drafts in a step.
    """

    def __init__(
        self,
        weights: Weights,
        num_pages: int,
        num_row_pages: int,
        page_size: int,
        ring_size: int,
        attend: Attention,
        num_devices: int,
        num_host_pages: Sequence[int] = (),
        num_drafts: int = 0,
    ) -> None:
        """Raise ValueError for weights of another shape, missing devices, and heads that the devices cannot divide evenly."""
        axes, self.sizes = get_axes(weights), get_sizes(weights)
        self.mesh = make_mesh(num_devices, self.sizes)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.weights = {name: jax.device_put(weights[name], self._split(axes[name])) for name in weights}
        self._page_sizes = self.sizes | {
            "num_pages": num_pages,
            "num_row_pages": num_row_pages,
            "page_size": page_size,
            "ring_size": ring_size,
        }
        mixer = find_mixer(weights)
        paged_axes = ("kv_heads num_pages page_size head_size",) * 2 + (() if mixer is None else mixer.entry_axes)
        self.cache = Cache([], [])
        for _ in range(self.sizes["layers"]):
            self.cache.keys_and_values.append(tuple(map(self._make_pages, paged_axes)))
            if mixer is not None:
                self.cache.row_pages.append(tuple(map(self._make_pages, mixer.row_axes)))
        self.host_pages = None
        if num_host_pages:
            self.host_pages = HostPages(self.cache, num_host_pages, groups=(0, 1), page_axis=1)
        self.last_tokens: LastTokens | None = None
        shardings = (self.replicated, self.replicated, jax.tree.map(lambda pages: pages.sharding, self.cache))
        make = partial(jax.jit, donate_argnums=1, out_shardings=shardings)
        run_step = partial(step, num_drafts=num_drafts)
        self._program: Callable[..., Any] = make(partial(run_step, attend=divide_attention(attend, self.mesh)))
        self._sharing_program: Callable[..., Any] = make(
            partial(run_step, attend=divide_attention(attend_once, self.mesh, shares=True))
        )

    def _make_pages(self, axes: str) -> Any:
        lengths = [[self._page_sizes[name] for name in axis.split("/")] for axis in axes.split()]
        shape = [first // prod(divisors) for first, *divisors in lengths]
        return make_zeros(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._split(axes)))

    def _split(self, axes: str) -> NamedSharding:
        spec = PartitionSpec(*("tensor" if axis in SPLIT_AXES else None for axis in axes.split()))
        return NamedSharding(self.mesh, spec)

    def run(
        self, page_tables: Sequence[jax.Array], tokens: Tokens, params: SamplingRows, shared: Shared | None = None
    ) -> NextTokens:
        """Start to compute a step's tokens, and return the next tokens of each row, on the device. Pages of groups in `shared`
        are read once.
        """
        if self.last_tokens is None:
            self.last_tokens = jax.device_put(LastTokens(*np.zeros((2, len(tokens.last)), np.int32)), self.replicated)
        program, others = (self._program, ()) if shared is None else (self._sharing_program, (shared,))
        next_tokens, self.last_tokens, self.cache = program(
            self.weights, self.cache, page_tables, tokens, params, self.last_tokens, *others
        )
        return next_tokens

    def wait(self) -> None:
        """Wait until all steps that were started have ended."""
        jax.block_until_ready(self.cache)

    def drop_cache(self) -> None:
        """Give back the devices' memory of the cache, until `make_cache`."""
        self.wait()
        shapes = jax.tree.map(lambda pages: jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=pages.sharding), self.cache)
        jax.tree.map(lambda pages: pages.delete(), self.cache)
        self.cache = shapes

    def make_cache(self) -> None:
        """Make the arrays anew that `drop_cache` has dropped, without what they held."""
        self.cache = jax.tree.map(make_zeros, self.cache)

    def move_pages(self, moves: Moves) -> None:
        """Start saves and loads between the cache and host memory, and copy pages of each cache group within its arrays."""
        if self.host_pages is not None:
            self.cache = self.host_pages.run(self.cache, moves)
        groups = enumerate(self.cache)
        self.cache = Cache(*(page_copies.copy_pages(arrays, moves.copies, group=g, page_axis=1) for g, arrays in groups))

    def end_transfers(self, must_wait: bool) -> list[FinishedTransfers]:
        """Return the finished transfers: all of them if the call must wait."""
        if self.host_pages is None:
            return []
        return self.host_pages.wait() if must_wait else self.host_pages.poll()

    def count_page_bytes(self) -> list[int]:
        """Return the bytes of a page of each cache group, over all layers."""
        return [sum(array.nbytes // array.shape[1] for array in jax.tree.leaves(arrays)) for arrays in self.cache]

    def warmup(self, max_num_copies: int) -> None:
        """Compile the programs for transfers, and for up to `max_num_copies` copies in each group."""
        if self.host_pages is not None:
            self.cache = self.host_pages.warmup(self.cache)
        self.cache = Cache(*(arrays and page_copies.warmup(arrays, max_num_copies, page_axis=1) for arrays in self.cache))


def make_zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Make an array of zeros on its devices."""
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def make_mesh(num_devices: int, sizes: dict[str, int]) -> Mesh:
    """Make a mesh of the first `num_devices` devices. Raise ValueError if there are fewer, or if the axes cannot be divided."""
    devices = jax.devices()
    if not 1 <= num_devices <= len(devices):
        raise ValueError(
            f"devices: got {num_devices}, allowed: 1 to {len(devices)} (XLA_FLAGS=--xla_force_host_platform_device_count=8 "
            "simulates 8 on a CPU)"
        )
    lengths = {axis: sizes[axis] for axis in sorted(SPLIT_AXES)}
    if any(length % num_devices for length in lengths.values()):
        raise ValueError(f"devices: got {num_devices}, allowed: a divisor of {lengths}")
    return Mesh(np.array(devices[:num_devices]), ("tensor",))


def divide_attention(attend: Attention, mesh: Mesh, *, shares: bool = False) -> Attention:
    """Let each device attend with its own heads to its own part of the pages. XLA cannot divide a kernel. A function that
    `shares` pages takes groups too.
    """
    by_head, by_kv_head, whole = PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec()
    in_specs = (by_head, by_kv_head, by_kv_head, whole, whole, *((Shared(*[whole] * 4),) if shares else ()))
    divided: Attention = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=by_head, check_vma=False)
    return divided


class LastTokens(NamedTuple):
    """What the device keeps by row, int32 ``[rows]``: the last sampled token, and how many drafts were rejected since the last
    step that began with a token which the host knew.
    """

    sampled: Any
    num_rejected: Any


def step(
    weights: Weights,
    cache: Cache,
    page_tables: Sequence[Any],
    tokens: Tokens,
    params: SamplingRows,
    last: LastTokens,
    *shared: Shared,
    num_drafts: int,
    attend: Attention,
) -> tuple[NextTokens, LastTokens, Cache]:
    """Return the next tokens of each row, what is kept for later steps, and the cache (traced). Rows have up to `num_drafts`
    drafts. Those that are not in this step keep what they have.
    """
    is_ahead = jnp.zeros(len(last.sampled), bool).at[tokens.rows].max(tokens.token_ids < 0)
    # Positions are planned as if all drafts were accepted: the host does not know yet of those that were rejected since.
    num_unknown = jnp.where(is_ahead, last.num_rejected - tokens.num_rejected, 0)
    token_ids = jnp.where(tokens.token_ids < 0, last.sampled[tokens.rows], tokens.token_ids)
    tokens = tokens._replace(token_ids=token_ids, positions=tokens.positions - num_unknown[tokens.rows])
    offsets = jnp.arange(num_drafts + 1)
    places = jnp.minimum(tokens.last[:, None] - tokens.num_drafts[:, None] + offsets, tokens.last[:, None])
    drafts = jnp.where(offsets[:-1] < tokens.num_drafts[:, None], token_ids[places[:, 1:]], -1)
    attend = partial(_attend_with, attend, shared)
    logits, cache = forward(weights, cache, page_tables, tokens, places, attend)
    next_tokens = find_next(logits, tokens.positions[places], drafts, params)
    num_rejected = jnp.where(is_ahead, last.num_rejected, 0) + tokens.num_drafts - next_tokens.num_accepted
    sampled = jnp.take_along_axis(next_tokens.sampled, next_tokens.num_accepted[:, None], axis=1)[:, 0]
    is_in_step = jnp.zeros(len(sampled), bool).at[tokens.rows].set(True)
    kept = jax.tree.map(partial(jnp.where, is_in_step), LastTokens(sampled, num_rejected), last)
    return next_tokens, kept, cache


def _attend_with(attend: Attention, shared: tuple[Shared, ...], *arguments: Any) -> Any:
    """Call an attention function, with the groups of a step that has any."""
    return attend(*arguments, *shared)


def pack(
    inputs: StepInputs, num_tokens: int, padded_size: int, in_step: Any, num_drafts: Any, rows: Rows, writes: StateWrites
) -> tuple[Tokens, SamplingRows]:
    """Return the tokens of a step, padded with tokens in the last row, and list sampling parameters by row. The step has the
    rows `in_step`, with numbers of drafts.
    """
    num_rows, num_reqs = len(rows.requests), len(in_step)
    last, ends, drafts = np.zeros((3, num_rows), np.int32)
    last[in_step], ends[in_step], drafts[in_step] = inputs.last_tokens[:num_reqs], inputs.seq_lens[:num_reqs], num_drafts
    inputs.rows[num_tokens:padded_size] = num_rows - 1
    checkpoint_ids = np.zeros(padded_size, np.int32)
    checkpoint_ids[last[writes.rows] + writes.num_tokens - ends[writes.rows]] = writes.page_ids
    tokens = (array[:padded_size] for array in (inputs.token_ids, inputs.rows, inputs.positions))
    # Copies: rows change while the step runs, which may read the arrays where they are.
    params = SamplingRows(*(array.copy() for array in (rows.temperature, rows.top_k, rows.seed)))
    return Tokens(*tokens, checkpoint_ids, last, drafts, rows.num_rejected.copy()), params
