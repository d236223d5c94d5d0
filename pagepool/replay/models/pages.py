"""How the layers of a model share the pages of a pool.

Engines give all groups of layers pages of one size, so that any page can hold the tokens of an attention group or the states of
a state group. A page has the bytes of all layers of one kind, chosen so that the least memory is wasted; layers of other kinds
are divided among as many groups as they need to fit the page. Within a layer the largest page of tokens or state sets the size,
and smaller ones are padded; layers of DeepSeek V4 are packed without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, lcm

from pagepool._core import CacheGroups
from pagepool.errors import ArgumentError, count_of
from pagepool.group_rules import find_slack_and_interval, make_rules
from pagepool.replay.models.caches import FULL, LayerKind, Reach, are_compressed, list_attention
from pagepool.replay.models.config import read_config
from pagepool.replay.models.fixed import FixedCaches, list_fixed
from pagepool.replay.models.indexers import find_indexer
from pagepool.replay.models.layers import list_state_layers, list_types
from pagepool.replay.models.states import count_side_states, count_state_bytes
from pagepool.replay.models.values import Config
from pagepool.retention import Retention
from pagepool.specs import (
    CacheGroupSpec,
    CacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)

PAGE_SIZE = 16  # tokens; larger if a state is larger
INTERVALS = (256, 512, 1024, 2048, 4096)  # tokens
STEP_TOKENS = 8192
LONG = 1 << 29  # tokens


@dataclass(frozen=True, slots=True)
class Windows:
    """Groups of layers with the same windows or chunks, and pages of `page_size` tokens. They use up to `num_bytes` of a page,
    None if unknown.
    """

    reach: Reach
    page_size: int
    num_groups: int
    num_bytes: int | None = None
    layers: tuple[int, ...] = ()

    @property
    def tokens(self) -> str:
        """The reach, as text.

        >>> Windows(Reach(1024), 16, 5).tokens, Windows(Reach(8192, is_chunked=True), 16, 3).tokens
        ('a window of 1,024 tokens', 'chunks of 8,192 tokens')
        """
        return f"{'chunks' if self.reach.is_chunked else 'a window'} of {count_of(self.reach.size, 'token')}"

    def count_pages(self, step_tokens: int) -> int:
        """Return the most pages that a long request holds in these groups at once."""
        return self.num_groups * _make_rules((CacheGroupSpec(self.make_spec()),)).count_peak_pages(LONG, step_tokens)

    def count_prompt_pages(self, num_tokens: int) -> int:
        """Return the most pages of these groups that the token behind a prompt of `num_tokens` reads.

        >>> [Windows(Reach(1024), 16, 6).count_prompt_pages(num_tokens) for num_tokens in (16, 1024, 8000)]
        [6, 384, 390]
        """
        return self.num_groups * min(cdiv(num_tokens, self.page_size), 1 + cdiv(self.reach.size - 2, self.page_size))

    def describe(self) -> str:
        """Describe its layers.

        >>> Windows(Reach(128), 16, 2, layers=(0, 1, 2, 5, 7, 8)).describe()
        'Layers 0-2, 5, 7-8 (6) have a window of 128 tokens, in 2 groups with pages of 16 tokens.'
        """
        groups = f"in {count_of(self.num_groups, 'group')} with pages of {count_of(self.page_size, 'token')}"
        return f"Layers {_list_ranges(self.layers)} ({len(self.layers)}) have {self.tokens}, {groups}."

    def make_spec(self) -> CacheSpec:
        """Make the spec of its groups for a simulation, where bytes do not matter."""
        if self.reach.is_chunked:
            return ChunkedLocalAttentionSpec(self.page_size, 1, 1, "bfloat16", False, attention_chunk_size=self.reach.size)
        return SlidingWindowSpec(self.page_size, 1, 1, "bfloat16", use_mla=False, sliding_window=self.reach.size)


@dataclass(frozen=True, slots=True)
class ModelPages:
    """The groups of a model, and the bytes of their pages.

    A page id is one page of `page_size` tokens, or one state, in each layer of its group; groups of windows may have other
    numbers of tokens. `page_bytes` counts all layers of a group, None if unknown. `state_bytes` and `attention_bytes` are the
    largest used parts of a page, in groups of states and of full attention. There are `num_attention_groups` groups of full
    attention; without attention `page_size` is 1. A step has up to `step_tokens` tokens.
    """

    page_size: int = PAGE_SIZE
    page_bytes: int | None = None
    num_attention_groups: int = 1
    num_state_groups: int = 0
    attention_bytes: int | None = None
    state_bytes: int | None = None
    windows: tuple[Windows, ...] = ()
    fixed: FixedCaches = field(default_factory=FixedCaches)
    step_tokens: int = field(default=STEP_TOKENS, compare=False)

    @property
    def contents(self) -> str:
        """The contents of a page, as text.

        >>> ModelPages(1).contents, ModelPages(1, num_attention_groups=0, num_state_groups=1).contents
        ('1 token', '1 state')
        """
        return count_of(self.page_size, "token") if self.has_attention else "1 state"

    @property
    def page_sizes(self) -> list[int]:
        """Tokens per page of each group with attention; [1] without such groups."""
        sizes = [each.page_size for each in self.windows for _ in range(each.num_groups)]
        return [self.page_size] * (self.num_attention_groups or not sizes) + sizes

    @property
    def hit_size(self) -> int:
        """Granularity of attention's hits, in tokens."""
        return lcm(*self.page_sizes)

    @property
    def num_hit_pages(self) -> int:
        """Number of full-attention pages for `hit_size` tokens."""
        return self.num_attention_groups * (self.hit_size // self.page_size)

    @property
    def hash_size(self) -> int:
        """Tokens per hash."""
        return gcd(*self.page_sizes)

    @property
    def has_attention(self) -> bool:
        """Whether there are pages of tokens, of full attention, windows or chunks."""
        return bool(self.num_attention_groups or self.windows)

    def list_page_ends(self, start: int, stop: int) -> list[int]:
        """List the token counts after `start` at which a request decoding up to `stop` fills a page or a page leaves a window,
        and `stop`.

        >>> ModelPages(4, windows=(Windows(Reach(6), 4, 1),)).list_page_ends(5, 15)
        [8, 9, 12, 13, 15]
        """
        size = self.hash_size
        ends = {*range(start - start % size + size, stop, size), stop}
        for each in self.windows:
            first, period = (0, each.reach.size) if each.reach.is_chunked else (each.reach.size - 1, each.page_size)
            ends.update(range(start + 1 + (first - start - 1) % period, stop, period))
        return sorted(end for end in ends if end > start)

    def describe_windows(self) -> list[str]:
        """Describe the layers with windows or chunks."""
        return [each.describe() for each in self.windows]

    @property
    def retention(self) -> Retention:
        """The `Retention` of simulations: the defaults for the model, in numbers."""
        specs = [group.kv_cache_spec for group in self.make_groups()]
        slack, interval = find_slack_and_interval(Retention(), specs, self.hit_size)
        return Retention(window_slack=slack, window_interval=interval)

    def count_pages(self, num_tokens: int) -> int:
        """Count the most pages that a request of `num_tokens` needs at once, without checkpoints: see
        `CacheManager.require_capacity`.
        """
        return _rules_of(self).count_peak_pages(num_tokens, self.step_tokens)

    @property
    def token_bytes(self) -> float | None:
        """Bytes of a token in the layers with full attention, None if the bytes of a page are unknown."""
        return None if self.page_bytes is None else self.page_bytes * self.num_attention_groups / self.page_size

    def count_prompt_pages(self, num_tokens: int) -> int:
        """Return the most pages that the token behind a prompt of `num_tokens` reads."""
        num_full = self.num_attention_groups * cdiv(num_tokens, self.page_size)
        return num_full + sum(each.count_prompt_pages(num_tokens) for each in self.windows) + self.num_state_groups

    def count_prompt_bytes(self, num_tokens: int) -> int:
        """Return the bytes of these pages, 0 if those of a page are unknown, and of the rings."""
        return (self.page_bytes or 0) * self.count_prompt_pages(num_tokens) + self.fixed.request_bytes

    @property
    def num_groups(self) -> int:
        """Number of groups of layers."""
        return self.num_attention_groups + self.num_state_groups + sum(each.num_groups for each in self.windows)

    def with_separate_arrays(self) -> "ModelPages":
        """Return the same pages with an array for each layer: a page id has a row in each, and one group uses its rows."""
        sizes = {name: getattr(self, name) for name in ("page_bytes", "attention_bytes", "state_bytes")}
        return replace(self, **{name: size and self.num_groups * size for name, size in sizes.items()})

    def make_groups(self, checkpoint_interval: int | None = None) -> list[CacheGroupSpec]:
        """Make the groups for a simulation, where bytes do not matter."""
        full = FullAttentionSpec(self.page_size, num_kv_heads=1, head_size=1, dtype="bfloat16", use_mla=False)
        state = MambaSpec(checkpoint_interval or self.page_size, ((1,),), "bfloat16", checkpoint_interval=checkpoint_interval)
        specs: list[CacheSpec] = [full] * self.num_attention_groups
        specs += [each.make_spec() for each in self.windows for _ in range(each.num_groups)]
        return [CacheGroupSpec(spec) for spec in [*specs, *[state] * self.num_state_groups]]

    def require_interval(self, interval: int) -> None:
        """Raise ArgumentError for an interval of checkpoints that is not a multiple of the page size."""
        if interval % self.page_size:
            raise ArgumentError(f"{interval:,} is not a multiple of the page size, {count_of(self.page_size, 'token')}")


def _list_ranges(numbers: tuple[int, ...]) -> str:
    """List ascending numbers as text, runs by their first and last number."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True))


@lru_cache(maxsize=4)
def _rules_of(model: ModelPages) -> CacheGroups:
    return _make_rules(model.make_groups(model.hit_size if model.num_state_groups else None))


def _make_rules(groups: Sequence[CacheGroupSpec]) -> CacheGroups:
    return make_rules(groups, use_eagle=False, enable_caching=True, retention=Retention()).groups


def list_intervals(page_size: int) -> list[int]:
    """List possible intervals: multiples of the page size near powers of two.

    >>> list_intervals(16), list_intervals(544)
    ([256, 512, 1024, 2048, 4096], [544, 1088, 2176, 4352])
    """
    return sorted({max(1, round(interval / page_size)) * page_size for interval in INTERVALS})


def read_model(
    path: str, page_size: int | None = None, kv_dtype: str | None = None, state_dtype: str | None = None
) -> ModelPages:
    """Return the pages of the model whose Hugging Face `config.json` is at `path`.

    Layers with full attention, with windows and with chunks are in separate groups, with tokens per page such that all pages
    have nearly equal bytes; `page_size` applies to layers with the most bytes per token. With states, `page_size` None chooses
    the smallest multiple of 16 whose pages are as large as a state. `kv_dtype` is the dtype of attention, `state_dtype` the
    dtype of recurrent states; by default both are the model's.

    Raise ArgumentError if a field is missing, invalid or not understood, OSError if the file cannot be read.
    """
    try:
        return _read_pages(read_config(path), page_size, kv_dtype, state_dtype)
    except (ValueError, TypeError, RecursionError) as error:  # RecursionError for nested dicts
        raise ArgumentError(f"{path}: {error}") from error


def _read_pages(config: Config, page_size: int | None, kv_dtype: str | None, state_dtype: str | None) -> ModelPages:
    types = list_types(config)
    size = choose_page_size(config, types, page_size)
    attention, states = list_attention(config, types, size, kv_dtype), list_state_layers(types)
    if page_size is not None and are_compressed(types):
        raise ArgumentError("the kernels of layers with compressed entries fix the page sizes, so none can be asked for")
    if not states:
        if not attention:
            raise ArgumentError("no layer has attention")
        model = _make_pages(
            attention, None, are_padded=not are_compressed(types) and len({kind.reach for kind in attention}) > 1
        )
        return replace(model, fixed=list_fixed(config, types, model.page_size, kv_dtype))
    state_bytes = count_state_bytes(config, state_dtype)
    if state_bytes == 0:
        raise ArgumentError("the states of its layers are empty")
    num_more, more_bytes = count_side_states(config)
    state = LayerKind(FULL, 1, max(state_bytes, more_bytes), (*states, *range(num_more)))
    if page_size is None and attention:
        num_times = cdiv(state.num_bytes, max(kind.num_bytes for kind in attention))
        attention = list_attention(config, types, size * num_times, kv_dtype)
    num_full = len([kind for kind in attention if kind.reach == FULL])
    if num_full > 1:
        raise ArgumentError(f"attention layers of {num_full} sizes beside states are not understood")
    model = _make_pages(attention, state, are_padded=True)
    return replace(model, fixed=list_fixed(config, types, model.page_size, kv_dtype))


def choose_page_size(config: Config, types: list[str], asked: int | None) -> int:
    """Return the requested page size, or the default, which holds whole groups of tokens of an indexer. Raise ArgumentError if
    the requested one does not.
    """
    indexer = None if are_compressed(types) else find_indexer(config, types)
    group_size = indexer.group_size if indexer else 1
    if asked is None:
        return lcm(PAGE_SIZE, group_size)
    if asked % group_size:
        raise ArgumentError(f"page size: got {count_of(asked, 'token')}, allowed: multiples of {group_size}, an index group")
    return asked


def _make_pages(attention: list[LayerKind], state: LayerKind | None, *, are_padded: bool) -> ModelPages:
    """Make the pages of layers with attention and of layers with a state. Padded layers all take the same bytes."""
    rows: dict[tuple[Reach, int], list[LayerKind]] = {}
    for kind in attention:
        rows.setdefault((kind.reach, kind.page_size), []).append(kind)
    full_sizes = [size for reach, size in rows if reach == FULL]
    if len(full_sizes) > 1:
        raise ArgumentError(f"layers of full attention with pages of {sorted(full_sizes)} tokens are not understood")
    kinds = [*rows.values(), *([[state]] if state else [])]
    layer_bytes = max(kind.num_bytes for row in kinds for kind in row) if are_padded else 0
    page_bytes, nums = _choose_page_bytes(
        [[(len(kind.layers), max(kind.num_bytes, layer_bytes)) for kind in row] for row in kinds]
    )
    shares: list[tuple[int, int | None]] = [
        (num, _count_widest([(len(kind.layers), kind.num_bytes) for kind in row], num))
        for row, num in zip(kinds, nums, strict=True)
    ]
    num_states, state_bytes = shares.pop() if state else (0, None)
    groups = dict(zip(rows, shares, strict=True))
    windows = tuple(
        Windows(reach, size, *groups[reach, size], layers=tuple(sorted({layer for kind in row for layer in kind.layers})))
        for (reach, size), row in rows.items()
        if reach != FULL
    )
    page_size = full_sizes[0] if full_sizes else min((each.page_size for each in windows), default=1)
    num_full, full_bytes = groups.get((FULL, page_size), (0, None))
    return ModelPages(page_size, page_bytes, num_full, num_states, full_bytes, state_bytes, windows)


def _choose_page_bytes(rows: list[list[tuple[int, int]]]) -> tuple[int, list[int]]:
    """Return the bytes of a page, and the number of groups for each row. A row is a list of kinds of layers: pairs of their
    number and the bytes of one. A page has the bytes of all layers of one row, chosen so that the least memory is wasted.

    >>> _choose_page_bytes([[(12, 8)], [(36, 8)]]), _choose_page_bytes([[(10, 8)], [(12, 8)]])
    ((96, [1, 3]), (96, [1, 1]))
    """
    choices = []
    for page_bytes in sorted({_count_widest(row, 1) for row in rows}):
        nums = [_count_groups(row, page_bytes) for row in rows]
        if 0 not in nums:
            choices.append((page_bytes * sum(nums), page_bytes, nums))
    _, page_bytes, chosen = min(choices)
    return page_bytes, chosen


def _count_groups(row: list[tuple[int, int]], page_bytes: int) -> int:
    """Return the least number of groups whose layers fit a page; 0 if no number does. A row of several kinds is not divided."""
    counts = range(1, 1 + row[0][0] if len(row) == 1 else 2)
    return next((num for num in counts if _count_widest(row, num) <= page_bytes), 0)


def _count_widest(row: list[tuple[int, int]], num_groups: int) -> int:
    """Return the bytes of the largest group when layers are divided evenly."""
    return sum(cdiv(num_layers, num_groups) * num_bytes for num_layers, num_bytes in row)
