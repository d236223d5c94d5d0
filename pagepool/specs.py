"""Cache specs: the cache entries of a layer, and the layers that share page ids; numbers of pages, and sizes of dtypes.

Specs are frozen, and can be shared and compared. Making one raises ArgumentError or ArgumentTypeError for sizes that are not
positive integers and for unknown dtypes. Sizes are in tokens unless the name ends in `_bytes`.

A `dtype` is any name or object of a dtype in NumPy, JAX or PyTorch: `"bfloat16"`, `np.float16`, `jnp.bfloat16`,
`torch.bfloat16`, `np.dtype("float32")`, a type of ml_dtypes, or a usual short name: `"bf16"`, `"fp16"`, `"half"`, `"fp8"`. The
text `"float"` means PyTorch's 32 bits; Python's type `float` means NumPy's 64. Specs keep a dtype as given. JAX and PyTorch are
never imported, and ml_dtypes need not be installed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from pagepool.arguments import MAX_SIZE, as_list, require_flag, require_int
from pagepool.errors import ArgumentError, ArgumentTypeError, PageIdError, shown

__all__ = [
    "AttentionSpec",
    "CacheGroupSpec",
    "CacheSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "MambaSpec",
    "ReferenceWindowSpec",
    "RingSpec",
    "SlidingWindowSpec",
    "cdiv",
    "check_groups",
    "dp_shard_page_bounds",
    "dtype_bits",
    "find_shard",
    "find_shard_bounds",
    "local_page_ids",
    "pages_per_dp_shard",
    "usable_pages_count",
]


def cdiv(a: int, b: int) -> int:
    """Return the quotient rounded up: the number of pages of `b` tokens for `a` tokens.

    Raise ArgumentError unless `b` is positive, ArgumentTypeError unless both are integers.

    >>> cdiv(16, 16), cdiv(17, 16), cdiv(0, 16)
    (1, 2, 0)
    """
    return -(-require_int("a", a) // require_int("b", b, 1))


def usable_pages_count(num_pages: int) -> int:
    """Return the number of pages without the null page.

    >>> usable_pages_count(1024)
    1023
    """
    return max(0, require_int("num_pages", num_pages) - 1)


def pages_per_dp_shard(num_pages: int, data_parallel_size: int | None) -> int | None:
    """Return the pages of one data-parallel shard; None for one shard, or if `num_pages` does not divide evenly.

    >>> pages_per_dp_shard(1024, 4), pages_per_dp_shard(1023, 4), pages_per_dp_shard(1024, 1)
    (256, None, None)
    """
    num_pages = require_int("num_pages", num_pages)
    num_shards = 1 if data_parallel_size is None else require_int("data_parallel_size", data_parallel_size)
    if num_shards <= 1 or num_pages <= 0 or num_pages % num_shards:
        return None
    return num_pages // num_shards


def dp_shard_page_bounds(shard_index: int, pages_per_shard: int) -> tuple[int, int]:
    """Return the half-open range of page ids of a shard. The first shard starts after the null page.

    >>> dp_shard_page_bounds(0, 256), dp_shard_page_bounds(1, 256)
    ((1, 256), (256, 512))
    """
    pages_per_shard = require_int("pages_per_shard", pages_per_shard)
    start = max(0, require_int("shard_index", shard_index)) * pages_per_shard
    return max(1, start), start + pages_per_shard


_BITS_OF_DTYPES = {
    "bfloat16": 16,
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"), 8),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys(("float6_e2m3fn", "float6_e3m2fn"), 6),
    **dict.fromkeys(("float4_e2m1fn", "int4", "uint4"), 4),
    **dict.fromkeys(("int2", "uint2"), 2),
    **dict.fromkeys(("int1", "uint1"), 1),
}
"""Bits of accelerator dtypes that NumPy does not know by name, or reports as one byte each although caches pack them."""

_FULL_NAMES = {
    **dict.fromkeys(("fp64", "f64"), "float64"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16"), "float16"),
    "bf16": "bfloat16",
    **{f"fp8_{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    "fp4_e2m1fn": "float4_e2m1fn",
}
"""Short names of PyTorch, its engines and XLA. NumPy lacks them, or means another type: its `float` has 64 bits."""

_BITS_OF_NAMES = {"fp8": 8, "fp8_e4m3": 8, "float8": 8, "fp4": 4, "fp4_e2m1": 4}
"""Bits of short names that mean different types in different engines."""

_AMBIGUOUS_NAMES = frozenset(("f4", "f8", "i4", "i8", "u4", "u8"))
"""Texts whose number counts bytes in NumPy, and bits in XLA and the files of weights."""


def dtype_bits(dtype: object) -> int:
    """Return the size of one element in bits. Types below 8 bits are packed.

    Raise ArgumentTypeError unless it is a number type of NumPy, an accelerator type above, or one of their short names, and for
    texts such as "f8", which are 64 bits in NumPy, and 8 elsewhere.

    >>> dtype_bits("bfloat16"), dtype_bits(np.float32), dtype_bits("float4_e2m1fn"), dtype_bits("bf16")
    (16, 32, 4, 16)
    """
    if type(dtype).__module__ == "torch" or isinstance(dtype, str):
        dtype = str(dtype).removeprefix("torch.")
        dtype = _FULL_NAMES.get(dtype.lower(), dtype)
        bits = _BITS_OF_NAMES.get(dtype.lower())
        if bits is not None:
            return bits
        if dtype.lower() in _AMBIGUOUS_NAMES:
            raise ArgumentTypeError(
                f"dtype: got {shown(dtype)}, which counts bytes in NumPy and bits elsewhere, allowed: a full name, such as "
                "float32, int8 or fp8"
            )
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # a dtype object, class or string
    if isinstance(name, str) and name in _BITS_OF_DTYPES:
        return _BITS_OF_DTYPES[name]
    try:
        resolved: np.dtype[Any] = np.dtype(cast(Any, dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"dtype: got {shown(dtype)}, allowed: one that NumPy, JAX or PyTorch knows") from error
    if dtype is None or resolved.kind not in "biufc":
        raise ArgumentTypeError(f"dtype: got {shown(dtype)}, allowed: a number type")
    return resolved.itemsize * 8


def dtype_name(dtype: object) -> str | None:
    """Return one name for all objects and names, also short ones, of a dtype in NumPy, JAX or PyTorch. The name includes the
    byte order if that is not the machine's. Texts that name no known dtype are returned as they are; None for other objects.

    >>> dtype_name("bf16"), dtype_name(np.float16), dtype_name("<f2"), dtype_name(">f2"), dtype_name("fp8")
    ('bfloat16', 'float16', 'float16', '>f2', 'fp8')
    """
    if type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
        lower = dtype.lower()
        if lower in _FULL_NAMES or lower in _BITS_OF_NAMES:
            return _FULL_NAMES.get(lower, lower)
        if dtype in _BITS_OF_DTYPES or lower in _AMBIGUOUS_NAMES:
            return dtype
    if not isinstance(dtype, str | np.dtype | type):
        return None
    unknown = dtype if isinstance(dtype, str) else None
    try:
        resolved = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return unknown
    return unknown if resolved.kind == "O" else str(resolved)


def num_bytes(num_elements: int, dtype: object) -> int:
    """Return the size of `num_elements` in bytes, rounded up."""
    return cdiv(num_elements * dtype_bits(dtype), 8)


def find_shard(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int] | None:
    """Return the hinted shard of a pool, modulo the number of shards, and that number; None if the pool is not divided.

    >>> find_shard(1024, 5, 4), find_shard(1023, 5, 4)
    ((1, 4), None)
    """
    pages_per_shard = pages_per_dp_shard(num_pages, data_parallel_size)
    hint = None if dp_shard_hint is None else require_int("dp_shard_hint", dp_shard_hint)
    if hint is None or pages_per_shard is None:
        return None
    num_shards = num_pages // pages_per_shard
    return hint % num_shards, num_shards


def find_shard_bounds(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int | None]:
    """Return the half-open range of page ids that may hit with a hint; its end is None for the last page."""
    shard = find_shard(num_pages, dp_shard_hint, data_parallel_size)
    if shard is None:
        return 0, None
    shard_index, num_shards = shard
    return dp_shard_page_bounds(shard_index, num_pages // num_shards)


def local_page_ids(
    page_ids: npt.ArrayLike, num_pages: int, data_parallel_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the shard of each page of a pool, and its id in the shard's own array, which has a null page 0 and one page more
    than the shard: for `Moves` and `RunningBatch.get_page_ids` beside tables with ``local_ids``. int32, of the shape of
    `page_ids`. Raise ArgumentError unless the size divides `num_pages`, PageIdError for ids outside the pool. O(ids).

    >>> local_page_ids([0, 1, 7, 8, 15], num_pages=16, data_parallel_size=2)
    (array([0, 0, 0, 1, 1], dtype=int32), array([0, 1, 7, 1, 8], dtype=int32))
    """
    num_pages, size = require_int("num_pages", num_pages, 1), require_int("data_parallel_size", data_parallel_size, 1)
    if num_pages % size:
        raise ArgumentError(f"data_parallel_size: got {size}, allowed: a divisor of {num_pages} pages")
    try:
        ids = np.asarray(page_ids)
    except (TypeError, ValueError):  # lists of two lengths
        ids = np.asarray([None])
    if ids.dtype.kind not in "iu" and ids.size:
        raise ArgumentTypeError(f"page_ids: got an array of {ids.dtype}, allowed: ints")
    wrong = ids[(ids < 0) | (ids >= num_pages)]
    if wrong.size:
        raise PageIdError(f"page_ids: got {wrong.flat[0]}, allowed: 0 to {num_pages - 1}")
    shards = (ids // (num_pages // size)).astype(np.int32)
    return shards, (ids - np.maximum(0, shards * (num_pages // size) - 1)).astype(np.int32)


SIZES = ("page_size", "num_kv_heads", "head_size", "sliding_window", "attention_chunk_size", "max_num_encoder_tokens")
"""Fields of specs with positive integers; fields with the default None may be None."""


@dataclass(frozen=True)
class CacheSpec:
    """Base class of the cache specs: a layer with pages of `page_size` tokens."""

    page_size: int

    def __post_init__(self) -> None:
        """Check the sizes, and store them as Python ints, since products of NumPy ints wrap around."""
        for size in fields(self):
            value = getattr(self, size.name)
            if size.name in SIZES and (value is not None or size.default is not None):
                object.__setattr__(self, size.name, require_int(size.name, value, 1, MAX_SIZE))

    @property
    def type_id(self) -> str:
        """A key shared by layers that may form a group: same kind, page geometry and page size in bytes."""
        raise NotImplementedError(f"{type(self).__name__} does not define type_id")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page in one layer."""
        raise NotImplementedError(f"{type(self).__name__} does not define page_size_bytes")

    def max_memory_usage_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Return the most bytes of one request in one layer. Subclasses name the limits they need."""
        raise NotImplementedError(f"{type(self).__name__} does not define max_memory_usage_bytes")

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for layers of the same `type_id`. Raise ArgumentError without specs, or if `type_id` differs."""
        if not specs:
            raise ArgumentError("specs: got none, allowed: at least one")
        type_ids = {spec.type_id for spec in specs}
        if len(type_ids) > 1:
            raise ArgumentError(f"specs: got {sorted(type_ids)} in one group, allowed: specs of one type_id")
        return specs[0]


@dataclass(frozen=True)
class AttentionSpec(CacheSpec):
    """A layer with a key and a value of `head_size` elements for each token and head. With `use_mla` one vector is both."""

    num_kv_heads: int
    head_size: int
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently
    use_mla: bool

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        dtype_bits(self.dtype)
        object.__setattr__(self, "use_mla", require_flag("use_mla", self.use_mla))

    @property
    def page_size_bytes(self) -> int:
        """Size of a page's keys and values, or of its latent vectors, in bytes."""
        num_vectors = self.page_size * self.num_kv_heads * (1 if self.use_mla else 2)
        return num_bytes(num_vectors * self.head_size, self.dtype)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention: each token attends to all before it, so every page stays until the request ends.

    `sliding_window` or `attention_chunk_size` (at most one, in tokens) records that the layer attends to fewer tokens than it
    keeps. Pages are handled as for full attention.

    With `num_sink_tokens`, a multiple of the page size, learned keys of that many tokens stand in front of every sequence.
    Their pages are set aside once, `CacheManager.sink_page_ids`, and are the first in each row's table.

    >>> spec = FullAttentionSpec(page_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", use_mla=False)
    >>> spec.page_size_bytes, spec.type_id
    (65536, 'full_attention_16_65536')
    >>> spec.max_memory_usage_bytes(max_model_len=100) // spec.page_size_bytes
    7
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        object.__setattr__(self, "num_sink_tokens", require_int("num_sink_tokens", self.num_sink_tokens, 0, MAX_SIZE))
        if self.num_sink_tokens % self.page_size:
            allowed = f"a multiple of page_size, {self.page_size}"
            raise ArgumentError(f"num_sink_tokens: got {self.num_sink_tokens}, allowed: {allowed}")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ArgumentError("sliding_window and attention_chunk_size: got both, allowed: one of them")

    @property
    def type_id(self) -> str:
        """Kind, page size in tokens, page size in bytes, and the number of sink tokens, if there are any."""
        sinks = f"_{self.num_sink_tokens}_sinks" if self.num_sink_tokens else ""
        return f"full_attention_{self.page_size}_{self.page_size_bytes}{sinks}"

    def max_memory_usage_bytes(self, max_model_len: int, **_: object) -> int:
        """Return the bytes of all pages of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.page_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return one spec for layers of the same `type_id`; a window or chunk size of any layer applies to all.

        Raise ArgumentError also for two windows, two chunk sizes, or a window and a chunk size.
        """
        sizes: dict[str, Any] = {}
        merged = super().merge(specs)
        for name in ("sliding_window", "attention_chunk_size"):
            distinct = {getattr(spec, name) for spec in specs} - {None}
            if len(distinct) > 1:
                raise ArgumentError(f"{name}: got {sorted(distinct)}, allowed: one value for a group")
            sizes[name] = next(iter(distinct), None)
        return replace(merged, **sizes)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Chunked attention: each token attends to earlier tokens in its chunk of `attention_chunk_size` tokens. Pages of earlier
    chunks are freed.
    """

    attention_chunk_size: int

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
    """Sliding window: each token attends to the last `sliding_window` tokens, including itself. Earlier pages are freed.

    Raises `ArgumentError` with `use_mla`: latent vectors have no windows.

    >>> spec = SlidingWindowSpec(16, 8, 128, "bfloat16", use_mla=False, sliding_window=1024)
    >>> spec.max_memory_usage_bytes(max_model_len=100_000, max_num_batched_tokens=1) // spec.page_size_bytes
    65
    """

    sliding_window: int

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.use_mla:
            raise ArgumentError("use_mla: got True with a sliding window, allowed: False")

    @property
    def type_id(self) -> str:
        """Kind, window, page size in tokens, page size in bytes."""
        return f"sliding_window_{self.sliding_window}_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, max_model_len: int, max_num_batched_tokens: int, **_: object) -> int:
        """Return the bytes of one step's tokens and the window before them, plus one page, as these may start inside a page."""
        num_tokens = self.sliding_window - 1 + require_int("max_num_batched_tokens", max_num_batched_tokens)
        num_tokens = min(num_tokens, require_int("max_model_len", max_model_len))
        return (cdiv(num_tokens, self.page_size) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class ReferenceWindowSpec(AttentionSpec):
    """Reference window: each token attends to the whole prompt, and of the answer to the last `sliding_window` tokens,
    including itself. Pages of the answer between prompt and window are freed.

    Prefixes hit up to the end of the prompt: pages of an answer are never cached, since their keys were computed with fewer
    tokens visible than in a longer prompt. The prompt is what is known when a request gets its first pages, unless it says
    otherwise: see `Request` and `RequestTraits`.

    >>> spec = ReferenceWindowSpec(16, 8, 128, "bfloat16", use_mla=False, sliding_window=64)
    >>> spec.max_memory_usage_bytes(max_model_len=1000) // spec.page_size_bytes
    63
    """

    sliding_window: int

    @property
    def type_id(self) -> str:
        """Kind, window, page size in tokens, page size in bytes."""
        return f"reference_window_{self.sliding_window}_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, max_model_len: int, **_: object) -> int:
        """Return the bytes of all pages of a prompt of `max_model_len` tokens."""
        return cdiv(max_model_len, self.page_size) * self.page_size_bytes


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Cross-attention: each token attends to the keys of an encoder's output, such as an audio's or a picture's, of at most
    `max_num_encoder_tokens` tokens. A request gets their pages with its first ones, and keeps them to its end.

    Requests that name the medium by a `cross_key` share its pages, all or none. See docs/kinds.md.

    >>> spec = CrossAttentionSpec(16, 20, 64, "float16", use_mla=False, max_num_encoder_tokens=1500)
    >>> spec.max_memory_usage_bytes() // spec.page_size_bytes
    94
    """

    max_num_encoder_tokens: int

    @property
    def type_id(self) -> str:
        """Kind, most encoder tokens, page size in tokens, page size in bytes."""
        return f"cross_attention_{self.max_num_encoder_tokens}_{self.page_size}_{self.page_size_bytes}"

    def max_memory_usage_bytes(self, **_: object) -> int:
        """Return the bytes of the longest medium."""
        return cdiv(self.max_num_encoder_tokens, self.page_size) * self.page_size_bytes


@dataclass(frozen=True)
class MambaSpec(CacheSpec):
    """A recurrent layer: one state of the given `shapes` for a request of any length, in one page.

    `page_size_padded` (bytes) makes the page larger than the state, to match another group's. With a `checkpoint_interval`
    copies of the state, checkpoints, stay cached where requests resume, so that prefixes hit: near the end of a prompt, where
    prompts part, at `resume_at`, at the end of tokens from elsewhere, and in a prompt at multiples of the interval, in tokens,
    which should be large; ``"auto"`` chooses it by the layers' sizes. Steps write checkpoints to pages that
    `CacheManager.take_moves` and `RunningBatch.take_moves` name. With None no state is kept, and nothing hits. See
    docs/hybrids.md.

    Raises `ArgumentError` if the padded size is smaller than the state, if there is no shape, and if a dimension or the
    interval is not positive.

    >>> MambaSpec(page_size=1, shapes=((16, 64), (16, 32)), dtype="float16").page_size_bytes
    3072
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently
    page_size_padded: int | None = None
    checkpoint_interval: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        interval = self.checkpoint_interval
        if isinstance(interval, str) and interval != "auto":
            raise ArgumentTypeError(f"checkpoint_interval: got {shown(interval)}, allowed: an int, 'auto' or None")
        if interval is not None and not isinstance(interval, str):
            object.__setattr__(self, "checkpoint_interval", require_int("checkpoint_interval", interval, 1, MAX_SIZE))
        allowed = "a tuple of tuples of ints"
        shapes = [as_list("shapes", shape, allowed) for shape in as_list("shapes", self.shapes, allowed)]
        if not shapes:
            raise ArgumentError("shapes: got no state, allowed: at least one")
        checked = tuple(tuple(require_int("shapes: a dimension", each, 1, MAX_SIZE) for each in shape) for shape in shapes)
        if any(type(each) is not int for shape in shapes for each in shape):
            object.__setattr__(self, "shapes", checked)
        state_bytes = num_bytes(self.num_elements, self.dtype)
        if self.page_size_padded is not None:
            padded = require_int("page_size_padded", self.page_size_padded, state_bytes, MAX_SIZE)
            object.__setattr__(self, "page_size_padded", padded)

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
        return num_bytes(self.num_elements, self.dtype) if self.page_size_padded is None else self.page_size_padded

    def max_memory_usage_bytes(self, **_: object) -> int:
        """Return the bytes of the single page."""
        return self.page_size_bytes


@dataclass(frozen=True)
class RingSpec(CacheSpec):
    """A ring: a layer's raw keys of the last `page_size` tokens of a request, in one page; position ``p`` is at
    ``p % page_size``.

    A layer that compresses `period` tokens into one entry keeps their keys here until the last one is computed. At multiples of
    the period the ring is blank. Hits end there, so a request that hits a prefix gets a blank ring, and rings are never cached.
    `shape` is that of a token. See docs/rings.md.

    Raises `ArgumentError` for sizes that are not positive, for a ring smaller than its period, and without a shape.

    >>> RingSpec(page_size=16, period=8, shape=(2, 64), dtype="bfloat16").page_size_bytes
    4096
    """

    period: int
    shape: tuple[int, ...]
    dtype: object = field(hash=False)  # equal dtypes may be spelled in ways that hash differently

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        object.__setattr__(self, "period", require_int("period", self.period, 1, self.page_size))
        shape = tuple(require_int("shape: a dimension", each, 1, MAX_SIZE) for each in as_list("shape", self.shape, "ints"))
        if not shape:
            raise ArgumentError("shape: got no dimension, allowed: at least one")
        object.__setattr__(self, "shape", shape)
        dtype_bits(self.dtype)

    @property
    def type_id(self) -> str:
        """Kind, capacity and period in tokens, shape, and dtype as given."""
        return f"ring_{self.page_size}_{self.period}_{self.shape}_{self.dtype}"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all tokens of the ring."""
        return num_bytes(self.page_size * prod(self.shape), self.dtype)

    def max_memory_usage_bytes(self, **_: object) -> int:
        """Return the bytes of the single page."""
        return self.page_size_bytes


@dataclass(frozen=True)
class CacheGroupSpec:
    """Layers that share page ids. A page id of the group is one page in each of its layers.

    `pool` names the pool that the group takes pages from. Groups with equal names share a pool and its range of page ids, so
    their arrays have as many rows as the pool has pages. With several names managers need a size for each: see `CacheManager`.
    """

    kv_cache_spec: CacheSpec
    layer_names: list[str] | None = None
    pool: str = "kv"


def check_groups(kv_cache_groups: Iterable[CacheGroupSpec]) -> list[CacheGroupSpec]:
    """Return the groups as a list. Raise ArgumentTypeError for other objects, such as a spec without its group."""
    groups = as_list("kv_cache_groups", kv_cache_groups, "a list of CacheGroupSpec")
    for i, group in enumerate(groups):
        if not hasattr(group, "kv_cache_spec"):
            raise ArgumentTypeError(f"kv_cache_groups: got {type(group).__name__} (at {i}), allowed: CacheGroupSpec")
    return groups
