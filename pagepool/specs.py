"""What a layer keeps for each token, which layers share page ids, and how many requests a pool can hold.

All descriptions are frozen: they are checked once, at construction, and may be shared and compared. Sizes are
in tokens unless the name ends in `_bytes` or counts pages (`num_pages`, `per_group_pages`).

A `dtype` is anything by which NumPy or JAX names one: `"bfloat16"`, `np.float16`, `jnp.bfloat16`,
`np.dtype("float32")`, a type of ml_dtypes. JAX is never imported, and ml_dtypes need not be installed. The
value is kept as it was given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Self, cast

import numpy as np

from pagepool.arguments import MAX_SIZE, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, count_of, shown

__all__ = [
    "MAX_SIZE",
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheGroupsConfig",
    "CacheSpec",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "MambaSpec",
    "RuntimePageBudgetEstimate",
    "SlidingWindowSpec",
    "cdiv",
    "check_groups",
    "count_of",
    "create_kv_cache_specs_from_config",
    "dp_shard_for_page_id",
    "dp_shard_page_bounds",
    "dtype_bits",
    "estimate_runtime_page_budget",
    "pages_per_dp_shard",
    "require_int",
    "usable_pages_count",
]

# Accelerator dtypes that plain NumPy does not know by name. NumPy also says one byte for those below 8 bits,
# as it does not pack them; caches do.
_EXTENDED_DTYPE_BITS = {
    "bfloat16": 16,
    "float8_e3m4": 8,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    "float4_e2m1fn": 4,
    "int4": 4,
    "uint4": 4,
    "int2": 2,
    "uint2": 2,
    "int1": 1,
    "uint1": 1,
}


def cdiv(a: int, b: int) -> int:
    """The quotient rounded up: how many pages of `b` tokens hold `a` tokens.

    ArgumentError unless `b` is positive, ArgumentTypeError for what is no integer.

    >>> cdiv(16, 16), cdiv(17, 16), cdiv(0, 16)
    (1, 2, 0)
    """
    return -(-require_int("a", a) // require_int("b", b, 1))


def dtype_bits(dtype: object) -> int:
    """The size of one element in bits; types below 8 bits count as packed.

    Raises `ArgumentTypeError` if neither NumPy nor the table of accelerator types knows it as a number.

    >>> dtype_bits("bfloat16"), dtype_bits(np.float32), dtype_bits("float4_e2m1fn")
    (16, 32, 4)
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # of an np.dtype, a class, a string
    if isinstance(name, str) and name in _EXTENDED_DTYPE_BITS:
        return _EXTENDED_DTYPE_BITS[name]
    try:
        resolved: np.dtype[Any] = np.dtype(cast(Any, dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"dtype {shown(dtype)} is not one that NumPy or JAX knows") from error
    if dtype is None or resolved.kind not in "biufc":
        raise ArgumentTypeError(f"dtype must be a number type, got {shown(dtype)}")
    return resolved.itemsize * 8


def _num_bytes(num_elements: int, dtype: object) -> int:
    return cdiv(num_elements * dtype_bits(dtype), 8)


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps in a page of `page_size` tokens. Base of the kinds below; alone it has no size.

    Raises `ArgumentError` or `ArgumentTypeError` if `page_size` is not a positive integer.
    """

    page_size: int

    def __post_init__(self) -> None:
        """Check the fields."""
        self._set_int("page_size")

    def _set_int(self, name: str, minimum: int = 1) -> None:
        """Check a field, and keep it as an int of Python's: products of NumPy's wrap around."""
        object.__setattr__(self, name, require_int(name, getattr(self, name), minimum, MAX_SIZE))

    @property
    def type_id(self) -> str:
        """Equal for layers that may share a group: one kind, one page geometry, one page size in bytes."""
        raise NotImplementedError(f"{type(self).__name__} does not define type_id")

    @property
    def page_size_bytes(self) -> int:
        """The bytes that one page takes in one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define page_size_bytes")

    def max_memory_usage_bytes(self, *args: Any, **kwargs: Any) -> int:
        """The most bytes that one request can hold in one layer. Subclasses say which limits they need."""
        raise NotImplementedError(f"{type(self).__name__} does not define max_memory_usage_bytes")

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """The one spec that stands for layers of the same `type_id`.

        Raises `ArgumentError` if there are none or if they differ in `type_id`.
        """
        if not specs:
            raise ArgumentError("merge needs at least one spec")
        type_ids = {spec.type_id for spec in specs}
        if len(type_ids) > 1:
            raise ArgumentError(f"only specs of one type_id can share a group, got {sorted(type_ids)}")
        return specs[0]


@dataclass(frozen=True)
class AttentionSpec(CacheSpec):
    """A layer that keeps a key and a value for each token and head; with `use_mla` one vector is both.

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

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page's keys and values, or of its latent vectors."""
        num_vectors = self.page_size * self.num_kv_heads * (1 if self.use_mla else 2)
        return _num_bytes(num_vectors * self.head_size, self.dtype)


def _only_size(name: str, sizes: Iterable[int | None]) -> int | None:
    """The one size that is set, None if none is."""
    distinct = {size for size in sizes if size is not None}
    if len(distinct) > 1:
        raise ArgumentError(f"layers of one group must agree on {name}, got {sorted(distinct)}")
    return distinct.pop() if distinct else None


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Each token attends to all before it, so every page stays until the request ends.

    `sliding_window` or `attention_chunk_size` (at most one, in tokens) record that the layer attends to less
    than it keeps; pages are handled as for full attention all the same.

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
        """Bytes of all pages of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.page_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """As for any spec; layers without a window or chunk size take that of the others.

        Raises `ArgumentError` also if two windows, two chunk sizes, or a window and a chunk size meet.
        """
        merged = super().merge(specs)
        return replace(
            merged,
            sliding_window=_only_size("sliding_window", (spec.sliding_window for spec in specs)),
            attention_chunk_size=_only_size("attention_chunk_size", (spec.attention_chunk_size for spec in specs)),
        )


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Each token attends to those before it in its own chunk of `attention_chunk_size` tokens.

    Pages of earlier chunks are let go.
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
        """Bytes of one chunk and the tokens of one step, as far as a request has so many."""
        num_tokens = self.attention_chunk_size + require_int("max_num_batched_tokens", max_num_batched_tokens)
        num_tokens = min(num_tokens, require_int("max_model_len", max_model_len))
        return cdiv(num_tokens, self.page_size) * self.page_size_bytes


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Each token attends to the last `sliding_window` tokens, itself included; earlier pages are let go.

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
        """Bytes of one step's tokens and the window before them, and a page as they may start within one."""
        num_tokens = self.sliding_window - 1 + require_int("max_num_batched_tokens", max_num_batched_tokens)
        num_tokens = min(num_tokens, require_int("max_model_len", max_model_len))
        return (cdiv(num_tokens, self.page_size) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class MambaSpec(CacheSpec):
    """A recurrent layer: one state of the given `shapes` for a request of any length, in one page.

    `page_size_padded` (bytes) makes the page larger than the state, to match another group's. Raises
    `ArgumentError` if it is smaller, if there is no shape, or if a dimension is not positive.

    >>> MambaSpec(page_size=1, shapes=((16, 64), (16, 32)), dtype="float16").page_size_bytes
    3072
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._set_shapes()
        state_bytes = _num_bytes(self.num_elements, self.dtype)
        if self.page_size_padded is not None:
            self._set_int("page_size_padded", minimum=state_bytes)

    def _set_shapes(self) -> None:
        """Check the dimensions, and keep them as ints of Python's."""
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
        """Kind, shapes and dtype as they were given."""
        return f"mamba_{self.shapes}_{self.dtype}"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of the state, or of the padded page."""
        if self.page_size_padded is not None:
            return self.page_size_padded
        return _num_bytes(self.num_elements, self.dtype)

    def max_memory_usage_bytes(self, **_: object) -> int:
        """Bytes of the one page."""
        return self.page_size_bytes


@dataclass(frozen=True)
class CacheGroupSpec:
    """Layers that share page ids: a page id of the group names one page in each of its layers."""

    kv_cache_spec: CacheSpec
    layer_names: list[str] | None = None


def check_groups(kv_cache_groups: Iterable[CacheGroupSpec]) -> list[CacheGroupSpec]:
    """The groups as a list; ArgumentTypeError for what is none, a spec in place of its group for instance."""
    try:
        groups = list(kv_cache_groups)
    except TypeError:
        raise ArgumentTypeError(
            f"kv_cache_groups: got {type(kv_cache_groups).__name__}, allowed: a list of CacheGroupSpec"
        ) from None
    for i, group in enumerate(groups):
        if not hasattr(group, "kv_cache_spec"):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(group).__name__} (at {i}), allowed: CacheGroupSpec")
    return groups


@dataclass(frozen=True)
class CacheGroupsConfig:
    """A pool's size in pages (the null page included) and the groups that draw from it."""

    num_pages: int
    kv_cache_groups: list[CacheGroupSpec]


def usable_pages_count(num_pages: int) -> int:
    """Pages that can be handed out: all but the null page.

    >>> usable_pages_count(1024)
    1023
    """
    return max(0, require_int("num_pages", num_pages) - 1)


def pages_per_dp_shard(num_pages: int, data_parallel_size: int | None) -> int | None:
    """Pages of one data-parallel shard; None if there is but one shard or `num_pages` does not divide evenly.

    >>> pages_per_dp_shard(1024, 4), pages_per_dp_shard(1023, 4), pages_per_dp_shard(1024, 1)
    (256, None, None)
    """
    num_pages = require_int("num_pages", num_pages)
    num_shards = 1 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size)
    if num_shards <= 1 or num_pages <= 0 or num_pages % num_shards:
        return None
    return num_pages // num_shards


def dp_shard_for_page_id(page_id: int, pages_per_shard: int, dp_size: int) -> int | None:
    """The shard that owns a page; None for the null page, and for sizes that are not positive.

    >>> dp_shard_for_page_id(256, 256, 4), dp_shard_for_page_id(0, 256, 4)
    (1, None)
    """
    page_id, dp_size = require_int("page_id", page_id), require_int("dp_size", dp_size)
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    if page_id <= 0 or pages_per_shard <= 0 or dp_size <= 0:
        return None
    return min(page_id // pages_per_shard, dp_size - 1)


def dp_shard_page_bounds(shard_index: int, pages_per_shard: int) -> tuple[int, int]:
    """The half-open range of page ids that a shard can hand out; the first starts after the null page.

    >>> dp_shard_page_bounds(0, 256), dp_shard_page_bounds(1, 256)
    ((1, 256), (256, 512))
    """
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    start = max(0, require_int("shard_index", shard_index)) * pages_per_shard
    return max(1, start), start + pages_per_shard


@dataclass(frozen=True)
class RuntimePageBudgetEstimate:
    """How many requests of the greatest length a pool holds at once, and the page counts behind that.

    `pages_per_request` is the sum of `per_group_pages` (one entry a group, in order), `usable_pages` leaves
    out the null page.
    """

    pages_per_request: int
    max_num_seqs: int
    usable_pages: int
    per_group_pages: tuple[int, ...]


def _max_pages_per_request(spec: CacheSpec, max_model_len: int, max_num_batched_tokens: int) -> int:
    page_size_bytes = spec.page_size_bytes
    if page_size_bytes <= 0:
        raise ArgumentError(f"{type(spec).__name__}.page_size_bytes must be positive, got {page_size_bytes}")
    num_bytes = spec.max_memory_usage_bytes(max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens)
    return max(1, cdiv(num_bytes, page_size_bytes))


def _max_concurrent_requests(num_pages: int, pages_per_request: int, data_parallel_size: int) -> int:
    """Requests that fit at once; each lives within one shard where the pool is sharded."""
    pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
    if pages_per_shard is None:
        return usable_pages_count(num_pages) // pages_per_request
    first, others = usable_pages_count(pages_per_shard) // pages_per_request, pages_per_shard // pages_per_request
    return first + (data_parallel_size - 1) * others


def estimate_runtime_page_budget(
    *,
    num_pages: int,
    kv_cache_groups: Iterable[CacheGroupSpec],
    max_model_len: int,
    max_num_batched_tokens: int,
    data_parallel_size: int = 1,
) -> RuntimePageBudgetEstimate:
    """How many requests of `max_model_len` tokens the pool holds at once, with windows and chunks.

    A step computes at most `max_num_batched_tokens` tokens. With `data_parallel_size > 1` and pages that
    divide evenly, a request lives within one shard. `max_num_seqs` is at least 1, also where even one request
    does not fit; without groups it is the number of usable pages. Lengths below 1 count as 1. Raises
    `ArgumentError` for a spec whose pages have no bytes. Cost: one pass over groups.

    >>> groups = [CacheGroupSpec(FullAttentionSpec(16, 8, 128, "bfloat16", use_mla=False))]
    >>> estimate = estimate_runtime_page_budget(
    ...     num_pages=1025, kv_cache_groups=groups, max_model_len=4096, max_num_batched_tokens=512
    ... )
    >>> estimate.pages_per_request, estimate.usable_pages, estimate.max_num_seqs
    (256, 1024, 4)
    """
    max_model_len = max(1, require_int("max_model_len", max_model_len))
    step_tokens = max(1, min(require_int("max_num_batched_tokens", max_num_batched_tokens), max_model_len))
    data_parallel_size = require_int("data_parallel_size", data_parallel_size)
    per_group_pages = tuple(
        _max_pages_per_request(group.kv_cache_spec, max_model_len, step_tokens) for group in check_groups(kv_cache_groups)
    )
    pages_per_request = sum(per_group_pages)
    usable_pages = usable_pages_count(num_pages)
    fitting = _max_concurrent_requests(num_pages, pages_per_request, data_parallel_size) if per_group_pages else usable_pages
    return RuntimePageBudgetEstimate(pages_per_request, max(1, fitting), usable_pages, per_group_pages)


class _LayerKey(NamedTuple):
    """Layers equal in all of this form one group."""

    mask_kind: str
    window: int | None
    chunk: int | None
    num_kv_heads: int
    head_size: int


def _positive_or_none(value: object) -> int | None:
    """A config's number if it is one and positive; configs hold None or 0 for what is not set."""
    try:
        number = int(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _layer_value(config: object, name: str, layer: int) -> int | None:
    """A config's number for one layer, where it has one number for all layers or a list by layer."""
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        value = value[layer] if 0 <= layer < len(value) else None
    return _positive_or_none(value)


def _layer_geometry(config: object, layer: int, num_kv_heads: int, head_size: int) -> tuple[int, int]:
    """KV heads and head size of a layer; full-attention layers of some hybrids have their own."""
    num_kv_heads = (
        _layer_value(config, "num_kv_heads", layer) or _layer_value(config, "num_key_value_heads", layer) or num_kv_heads
    )
    layer_types = getattr(config, "layer_types", None)
    if not isinstance(layer_types, list | tuple) or not 0 <= layer < len(layer_types):
        return num_kv_heads, head_size
    if str(layer_types[layer]).lower() == "full_attention":
        head_size = _positive_or_none(getattr(config, "global_head_dim", None)) or head_size
        if getattr(config, "attention_k_eq_v", False):
            num_global = _positive_or_none(getattr(config, "num_global_key_value_heads", None))
            num_kv_heads = num_global or num_kv_heads
    return num_kv_heads, head_size


def _layer_index(layer: object) -> int:
    """The number of a layer, which a config may have as text."""
    try:
        index = int(cast(Any, layer))
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"get_mask_details: got {shown(layer)} as a layer, allowed: an int") from None
    return require_int("get_mask_details: a layer", index, -MAX_SIZE, MAX_SIZE)


def _size_or_none(name: str, value: object) -> int | None:
    return None if value is None else require_int(f"get_mask_details: {name}", value, -MAX_SIZE, MAX_SIZE)


def _mask_kind(mask_type: object) -> str:
    """`FULL`, `SLIDING`, `CHUNK` or an unknown word, from an enum member, its value or its name."""
    word = getattr(mask_type, "value", mask_type)
    name = word if isinstance(word, str) else getattr(mask_type, "name", word)
    return (name if isinstance(name, str) else shown(name)).removeprefix("ATTN_MASK_")


def _spec_for(key: _LayerKey, page_size: int, dtype: object, use_mla: bool) -> CacheSpec:
    geometry = (page_size, key.num_kv_heads, key.head_size, dtype)
    match key.mask_kind:
        case "FULL":
            return FullAttentionSpec(*geometry, use_mla)
        case "SLIDING" if key.window is not None:
            # Window layers of a model with latent attention keep plain keys and values.
            return SlidingWindowSpec(*geometry, use_mla=False, sliding_window=key.window)
        case "CHUNK" if key.chunk is not None:
            return ChunkedLocalAttentionSpec(*geometry, use_mla, attention_chunk_size=key.chunk)
        case "SLIDING" | "CHUNK":
            raise ArgumentError(f"a layer with mask {key.mask_kind} needs the size of its window or chunk")
    raise ArgumentError(f"unknown attention mask {key.mask_kind!r}: expected FULL, SLIDING or CHUNK")


def create_kv_cache_specs_from_config(
    config: object,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: object,
    use_mla: bool = False,
) -> list[CacheGroupSpec]:
    """The groups of a model, from its config: one for each kind of attention and geometry, in layer order.

    `config` is read by attribute only. `get_mask_details()`, where it has one, maps a layer index to an
    object with `mask_type` (`"ATTN_MASK_FULL"`, `"ATTN_MASK_SLIDING"` or `"ATTN_MASK_CHUNK"`, as a string or
    an enum), `size` (window) and `chunks`. `num_kv_heads` or `num_key_value_heads` (a number, or a list by
    layer) and, for layers that `layer_types` calls `full_attention`, `global_head_dim` and
    `num_global_key_value_heads` win over the arguments. Without mask details: one full-attention group of the
    geometry given here, without layer names.

    Raises `ArgumentError` for an unknown mask, or a window or chunk without a size. Cost: one pass over the
    layers.

    >>> [group] = create_kv_cache_specs_from_config(object(), 16, 8, 128, "bfloat16")
    >>> group.kv_cache_spec.type_id
    'full_attention_16_65536'
    """
    read_details = getattr(config, "get_mask_details", None)
    details: Mapping[int, Any] | None = read_details() if read_details is not None else None
    if not details:
        return [CacheGroupSpec(FullAttentionSpec(page_size, num_kv_heads, head_size, dtype, use_mla))]
    layers_by_key: dict[_LayerKey, list[str]] = {}
    for name, detail in details.items():
        layer = _layer_index(name)
        geometry = _layer_geometry(config, layer, num_kv_heads, head_size)
        sizes = _size_or_none("size", detail.size), _size_or_none("chunks", getattr(detail, "chunks", None))
        key = _LayerKey(_mask_kind(detail.mask_type), *sizes, *geometry)
        layers_by_key.setdefault(key, []).append(f"layer.{layer}")
    return [CacheGroupSpec(_spec_for(key, page_size, dtype, use_mla), names) for key, names in layers_by_key.items()]
