"""A pool for keys and values and one for states: what their pages take, and how memory is divided between them.

Each layer has an array of its own. Arrays of attention have a row for each page of the first pool, arrays of states one for
each page of the second, so no row is unused. All layers of a kind form one group: a page of the first pool has the keys and
values of its tokens in all layers, a page of the second the states of all layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from pagepool.errors import ArgumentError, count_of
from pagepool.group_rules import find_state_interval
from pagepool.replay.models.caches import FULL, list_attention
from pagepool.replay.models.config import read_config
from pagepool.replay.models.fixed import FixedCaches, list_fixed
from pagepool.replay.models.layers import list_state_layers, list_types
from pagepool.replay.models.pages import PAGE_SIZE, choose_page_size
from pagepool.replay.models.states import count_side_states, count_state_bytes
from pagepool.replay.models.values import Config
from pagepool.specs import CacheGroupSpec, FullAttentionSpec, MambaSpec, cdiv

KV, STATES = "kv", "states"


@dataclass(frozen=True, slots=True)
class ModelPools:
    """A model with full attention and states: bytes of a token's keys and values, and of a request's states, in all layers.
    Pages have `page_size` tokens. `asked_interval` is the number of tokens between checkpoints inside a prompt, None for the
    default.

    >>> qwen = ModelPools(token_bytes=24_576, state_bytes=39_518_208)
    >>> qwen.interval, qwen.divide(200 << 30, 0.28)
    (6144, {'kv': 393216, 'states': 1521})
    """

    token_bytes: int
    state_bytes: int
    page_size: int = PAGE_SIZE
    asked_interval: int | None = None
    fixed: FixedCaches = field(default_factory=FixedCaches)

    @property
    def page_bytes(self) -> dict[str, int]:
        """The bytes of a page of each pool."""
        return {KV: self.page_size * self.token_bytes, STATES: self.state_bytes}

    @property
    def interval(self) -> int:
        """Tokens between checkpoints inside a prompt, as `CacheManager` chooses them: the smallest multiple of 2,048 for which
        a state takes at most a third of the keys and values between two checkpoints.
        """
        return find_state_interval(self.make_groups())

    @property
    def hit_size(self) -> int:
        """Granularity of attention's hits, in tokens."""
        return self.page_size

    def divide(self, memory: int, share: float) -> dict[str, int]:
        """Return the pages of each pool, null pages included, if states have a share of the memory."""
        return {name: int(memory * part) // self.page_bytes[name] for name, part in ((KV, 1 - share), (STATES, share))}

    def describe(self, num_pages: Mapping[str, int]) -> str:
        """Describe pools of these sizes."""
        pages = f"{num_pages[KV]:,} pages of {count_of(self.page_size, 'token')}"
        return f"{pages} and {num_pages[STATES]:,} of states, checkpoints every {self.interval:,} tokens"

    def count_bytes(self, num_pages: Mapping[str, int]) -> int:
        """Count the bytes of pools of these sizes."""
        return sum(num_pages[name] * num_bytes for name, num_bytes in self.page_bytes.items())

    def count_prompt_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages and states behind a prompt of `num_tokens`, and those of the rings."""
        num_pages = cdiv(num_tokens, self.page_size)
        return num_pages * self.page_bytes[KV] + self.state_bytes + self.fixed.request_bytes

    def find_share(self, mean_tokens: float) -> float:
        """Return the share of states by rule, for requests of `mean_tokens` tokens on average: each has one checkpoint near the
        end of its prompt, and one for each interval.

        >>> f"{ModelPools(65_536, 154_730_496).find_share(12_377):.2f}"
        '0.32'
        """
        num_bytes = (1 + mean_tokens / self.interval) * self.state_bytes
        return num_bytes / (num_bytes + mean_tokens * self.token_bytes)

    def find_least_share(self, memory: int, num_requests: int) -> float:
        """Return the least share with which `num_requests` run at once: a state for each, a checkpoint, and the null page."""
        return (num_requests + 2) * self.state_bytes / memory

    def make_groups(self) -> list[CacheGroupSpec]:
        """Make the groups for a simulation, where shapes do not matter."""
        full = FullAttentionSpec(self.page_size, num_kv_heads=1, head_size=self.token_bytes, dtype="int8", use_mla=True)
        state = MambaSpec(
            self.page_size,
            ((self.state_bytes,),),
            "int8",
            checkpoint_interval="auto" if self.asked_interval is None else self.asked_interval,
        )
        return [CacheGroupSpec(full, pool=KV), CacheGroupSpec(state, pool=STATES)]


def read_pools(
    path: str,
    page_size: int | None = None,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    interval: int | None = None,
) -> ModelPools:
    """Return the pools of the model whose Hugging Face `config.json` is at `path`. Raise ArgumentError if it has windows, no
    states or no attention, or if a field is missing, invalid or not understood, OSError if the file cannot be read.
    """
    try:
        return _read_pools(read_config(path), page_size, kv_dtype, state_dtype, interval)
    except (ValueError, TypeError, RecursionError) as error:  # RecursionError for nested dicts
        raise ArgumentError(f"{path}: {error}") from error


def _read_pools(
    config: Config, asked_size: int | None, kv_dtype: str | None, state_dtype: str | None, interval: int | None
) -> ModelPools:
    types = list_types(config)
    page_size = choose_page_size(config, types, asked_size)
    attention, states = list_attention(config, types, page_size, kv_dtype), list_state_layers(types)
    if not attention or not states or any(kind.reach != FULL for kind in attention):
        raise ArgumentError("pools apart need layers of full attention and layers with states, and no others")
    token_bytes = sum(kind.num_bytes * len(kind.layers) for kind in attention) / page_size
    num_more, more_bytes = count_side_states(config)
    state_bytes = len(states) * count_state_bytes(config, state_dtype) + num_more * more_bytes
    fixed = list_fixed(config, types, page_size, kv_dtype)
    return ModelPools(ceil(token_bytes), state_bytes, page_size, interval, fixed)
