"""Numbers of pages and shards, and sizes of dtypes.

A `dtype` is anything that names one in NumPy or JAX: `"bfloat16"`, `np.float16`, `jnp.bfloat16`, `np.dtype("float32")`, a type
of ml_dtypes. JAX is never imported, and ml_dtypes need not be installed.
"""

from typing import Any, cast

import numpy as np

from pagepool.arguments import require_int
from pagepool.errors import ArgumentTypeError, shown

__all__ = [
    "cdiv",
    "dp_shard_page_bounds",
    "dtype_bits",
    "find_shard",
    "find_shard_bounds",
    "num_bytes",
    "pages_per_dp_shard",
    "usable_pages_count",
]


def cdiv(a: int, b: int) -> int:
    """Return the quotient rounded up: the number of pages of `b` tokens for `a` tokens.

    ArgumentError unless `b` is positive, ArgumentTypeError unless both are integers.

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


# Accelerator dtypes that NumPy alone does not know by name. For types below 8 bits NumPy reports one byte, because it does not
# pack them; caches do.
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


def dtype_bits(dtype: object) -> int:
    """Return the size of one element in bits. Types below 8 bits are packed.

    ArgumentTypeError unless it is a number type of NumPy or of the table of accelerator types.

    >>> dtype_bits("bfloat16"), dtype_bits(np.float32), dtype_bits("float4_e2m1fn")
    (16, 32, 4)
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # np.dtype, class or string
    if isinstance(name, str) and name in _EXTENDED_DTYPE_BITS:
        return _EXTENDED_DTYPE_BITS[name]
    try:
        resolved: np.dtype[Any] = np.dtype(cast(Any, dtype))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"dtype {shown(dtype)} is not one that NumPy or JAX knows") from error
    if dtype is None or resolved.kind not in "biufc":
        raise ArgumentTypeError(f"dtype must be a number type, got {shown(dtype)}")
    return resolved.itemsize * 8


def num_bytes(num_elements: int, dtype: object) -> int:
    """Return the size of `num_elements` in bytes, rounded up."""
    return cdiv(num_elements * dtype_bits(dtype), 8)


def find_shard(num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None) -> tuple[int, int] | None:
    """Return the hinted shard of a pool, modulo the size, and that size; None if the pool is not divided.

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
    """Return the half-open range of page ids that may hit with a hint; None: up to the last."""
    shard = find_shard(num_pages, dp_shard_hint, data_parallel_size)
    if shard is None:
        return 0, None
    shard_index, num_shards = shard
    return dp_shard_page_bounds(shard_index, num_pages // num_shards)
