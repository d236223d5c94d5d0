"""Sizes of dtypes.

A `dtype` is anything that names one in NumPy or JAX: `"bfloat16"`, `np.float16`, `jnp.bfloat16`, `np.dtype("float32")`, a type
of ml_dtypes. JAX is never imported, and ml_dtypes need not be installed.
"""

from typing import Any, cast

import numpy as np

from pagepool.errors import ArgumentTypeError, shown
from pagepool.specs.page_counts import cdiv

__all__ = ["dtype_bits", "num_bytes"]

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
