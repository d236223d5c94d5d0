"""Cache specs: what a layer keeps for each token, and which layers share page ids.

Specs are frozen. They are checked at construction, and can be shared and compared. Sizes are in tokens unless the name
ends in `_bytes`. A `dtype` (see `pagepool.specs.sizes`) is kept as it was given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

from pagepool.arguments import MAX_SIZE, as_list, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, shown
from pagepool.specs.sizes import cdiv, dtype_bits, num_bytes

__all__ = [
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheSpec",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "check_groups",
]


@dataclass(frozen=True)
class CacheSpec:
    """Base of the cache specs: a layer with pages of `page_size` tokens.

    Raises `ArgumentError` or `ArgumentTypeError` if `page_size` is not a positive integer.
    """

    page_size: int

    def __post_init__(self) -> None:
        """Check the fields."""
        self._set_int("page_size")

    def _set_int(self, name: str, minimum: int = 1) -> None:
        """Check a field, and store it as a Python int, since products of NumPy ints wrap around."""
        object.__setattr__(self, name, require_int(name, getattr(self, name), minimum, MAX_SIZE))

    @property
    def type_id(self) -> str:
        """A key that is equal for layers that may share a group: same kind, page geometry and page size in bytes."""
        raise NotImplementedError(f"{type(self).__name__} does not define type_id")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page in one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define page_size_bytes")

    def max_memory_usage_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Return the most bytes that one request can hold in one layer. Subclasses name the limits that they need."""
        raise NotImplementedError(f"{type(self).__name__} does not define max_memory_usage_bytes")

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for layers of the same `type_id`.

        ArgumentError if there are none, or if they differ in `type_id`.
        """
        if not specs:
            raise ArgumentError("merge needs at least one spec")
        type_ids = {spec.type_id for spec in specs}
        if len(type_ids) > 1:
            raise ArgumentError(f"only specs of one type_id can share a group, got {sorted(type_ids)}")
        return specs[0]


@dataclass(frozen=True)
class AttentionSpec(CacheSpec):
    """A layer that keeps a key and a value for each token and head. With `use_mla` one vector is both.

    `head_size` counts elements of `dtype`. Raises `ArgumentError` or `ArgumentTypeError` on sizes that are
    not positive integers and on an unknown dtype.
    """

    num_kv_heads: int
    head_size: int
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently
    use_mla: bool

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._set_int("num_kv_heads")
        self._set_int("head_size")
        dtype_bits(self.dtype)
        object.__setattr__(self, "use_mla", require_flag("use_mla", self.use_mla))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page's keys and values, or of its latent vectors."""
        num_vectors = self.page_size * self.num_kv_heads * (1 if self.use_mla else 2)
        return num_bytes(num_vectors * self.head_size, self.dtype)


def _only_size(name: str, sizes: Iterable[int | None]) -> int | None:
    """Return the one size that is set, or None."""
    distinct = {size for size in sizes if size is not None}
    if len(distinct) > 1:
        raise ArgumentError(f"layers of one group must agree on {name}, got {sorted(distinct)}")
    return distinct.pop() if distinct else None


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Each token attends to all before it, so every page stays until the request ends.

    `sliding_window` or `attention_chunk_size` (at most one, in tokens) records that the layer attends to less than it keeps.
    Pages are handled as for full attention.

    >>> spec = FullAttentionSpec(page_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> spec.page_size_bytes, spec.type_id
    (65536, 'full_attention_16_65536')
    >>> spec.max_memory_usage_bytes(max_model_len=100) // spec.page_size_bytes
    7
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.sliding_window is not None:
            self._set_int("sliding_window")
        if self.attention_chunk_size is not None:
            self._set_int("attention_chunk_size")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ArgumentError("a layer has a sliding window or attention chunks, not both")

    @property
    def type_id(self) -> str:
        """Kind, page size in tokens, page size in bytes."""
        return f"full_attention_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, max_model_len: int, **_: object) -> int:
        """Return the bytes of all pages of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.page_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for layers of the same `type_id`; a window or chunk size of any layer applies to all.

        ArgumentError also for two windows, two chunk sizes, or a window and a chunk size.
        """
        merged = super().merge(specs)
        return replace(
            merged,
            sliding_window=_only_size("sliding_window", (spec.sliding_window for spec in specs)),
            attention_chunk_size=_only_size("attention_chunk_size", (spec.attention_chunk_size for spec in specs)),
        )


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Each token attends to earlier tokens in its own chunk of `attention_chunk_size` tokens.

    Pages of earlier chunks are freed.
    """

    attention_chunk_size: int

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._set_int("attention_chunk_size")

    @property
    def type_id(self) -> str:
        """Kind, chunk size, page size in tokens, page size in bytes."""
        return f"local_attention_{self.attention_chunk_size}_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int, **_: object) -> int:
        """Return the bytes of one chunk and one step's tokens, at most those of a whole request."""
        num_tokens = self.attention_chunk_size + require_int("max_num_batched_tokens", max_num_batched_tokens)
        num_tokens = min(num_tokens, require_int("max_model_len", max_model_len))
        return cdiv(num_tokens, self.page_size) * self.page_size_bytes


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Each token attends to the last `sliding_window` tokens, itself included. Earlier pages are freed.

    Raises `ArgumentError` with `use_mla`: latent vectors are not kept by window.

    >>> spec = SlidingWindowSpec(16, 8, 128, "bfloat16", use_mla=False, sliding_window=1024)
    >>> spec.max_memory_usage_bytes(max_model_len=100_000, max_num_batched_tokens=1) // spec.page_size_bytes
    65
    """

    sliding_window: int

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._set_int("sliding_window")
        if self.use_mla:
            raise ArgumentError("a sliding window with use_mla is not supported")

    @property
    def type_id(self) -> str:
        """Kind, window, page size in tokens, page size in bytes."""
        return f"sliding_window_{self.sliding_window}_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int, **_: object) -> int:
        """Return the bytes of one step's tokens and the window before them, plus a page, since they may start inside one."""
        num_tokens = self.sliding_window - 1 + require_int("max_num_batched_tokens", max_num_batched_tokens)
        num_tokens = min(num_tokens, require_int("max_model_len", max_model_len))
        return (cdiv(num_tokens, self.page_size) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class MambaSpec(CacheSpec):
    """A recurrent layer: one state of the given `shapes` for a request of any length, in one page.

    `page_size_padded` (bytes) makes the page larger than the state, to match another group's. With a `checkpoint_interval`
    (tokens) copies of the state stay cached at multiples of it, so that prefixes hit: see docs/hybrids.md. Raises
    `ArgumentError` if the padded size is smaller than the state, if there is no shape, or if a dimension or the interval is not
    positive.

    >>> MambaSpec(page_size=1, shapes=((16, 64), (16, 32)), dtype="float16").page_size_bytes
    3072
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently
    page_size_padded: int | None = None
    checkpoint_interval: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._set_shapes()
        if self.checkpoint_interval is not None:
            self._set_int("checkpoint_interval")
        state_bytes = num_bytes(self.num_elements, self.dtype)
        if self.page_size_padded is not None:
            self._set_int("page_size_padded", minimum=state_bytes)

    def _set_shapes(self) -> None:
        """Check the dimensions, and store them as Python ints."""
        try:
            shapes = [list(shape) for shape in self.shapes]
        except TypeError:
            raise ArgumentTypeError(f"shapes must be a tuple of tuples of integers, got {shown(self.shapes)}") from None
        if not shapes:
            raise ArgumentError("shapes must name at least one state")
        checked = tuple(tuple(require_int("a dimension in shapes", each, 1, MAX_SIZE) for each in shape) for shape in shapes)
        if any(type(each) is not int for shape in shapes for each in shape):
            object.__setattr__(self, "shapes", checked)

    @property
    def num_elements(self) -> int:
        """Elements of all states together."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def type_id(self) -> str:
        """Kind, shapes and dtype as given, and the interval of checkpoints, if any are kept."""
        interval = "" if self.checkpoint_interval is None else f"_{self.checkpoint_interval}"
        return f"mamba_{self.shapes}_{self.dtype}{interval}"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the state, or of the padded page."""
        if self.page_size_padded is not None:
            return self.page_size_padded
        return num_bytes(self.num_elements, self.dtype)

    def max_memory_usage_bytes(self, **_: object) -> int:
        """Return the bytes of the one page."""
        return self.page_size_bytes


@dataclass(frozen=True)
class CacheGroupSpec:
    """Layers that share page ids. A page id of the group is one page in each of its layers."""

    kv_cache_spec: CacheSpec
    layer_names: list[str] | None = None


def check_groups(kv_cache_groups: Iterable[CacheGroupSpec]) -> list[CacheGroupSpec]:
    """Return the groups as a list. ArgumentTypeError for other objects, such as a spec without its group."""
    groups = as_list("kv_cache_groups", kv_cache_groups, "a list of CacheGroupSpec")
    for i, group in enumerate(groups):
        if not hasattr(group, "kv_cache_spec"):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(group).__name__} (at {i}), allowed: CacheGroupSpec")
    return groups
