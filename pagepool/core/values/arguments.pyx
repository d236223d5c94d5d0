"""Values from Python, checked at the boundary."""

from libc.math cimport isinf
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from pagepool.core.base cimport LAST_TERM, MAX_GROUP, MAX_PAGES, NEVER, UNKNOWN

from numbers import Real
from operator import index as as_index

import numpy as np

from pagepool.arguments import as_list as listed
from pagepool.arguments import require_unmasked
from pagepool.errors import ArgumentError, ArgumentTypeError, shown

cdef extern from "Python.h":
    unsigned long long PyLong_AsUnsignedLongLongMask(object value) except? -1


cdef object MAX_KEY = (1 << 128) - 1


cdef Digest digest_of_bytes(bytes data) except *:
    cdef Digest digest
    if len(data) != 16:
        raise ArgumentError(f"key: got {len(data)} bytes, allowed: 16")
    memcpy(&digest, <const char *>data, 16)
    return digest


cdef Digest digest_of_int(object value) except *:
    """Return `value` as a key."""
    cdef uint64_t high
    if type(value) is not int:
        value = int(index_of(value, "key"))
    try:
        high = value >> 64
    except OverflowError:
        raise ArgumentError(f"key: got {shown(value)}, allowed: 0 to 2**128 - 1") from None
    return Digest(lo=PyLong_AsUnsignedLongLongMask(value), hi=high)


cdef WideDigest wide_of_int(object value, bint is_wide) except *:
    """Return `value` as a digest of 32 bytes if it `is_wide`, otherwise as a key."""
    cdef Digest upper = Digest(lo=0, hi=0)
    if is_wide:
        value = index_of(value, "key")
        if value < 0 or value >> 256:
            raise ArgumentError(f"key: got {shown(value)}, allowed: 0 to 2**256 - 1")
        upper, value = digest_of_int(value >> 128), value & MAX_KEY
    return WideDigest(key=digest_of_int(value), upper=upper)


cdef object ndarray = np.ndarray
cdef object empty = np.empty


cdef object INT32 = np.dtype(np.int32)


cdef object index_of(object value, str name):
    """Return `value` as an int. A bool is refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return as_index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: an int") from None


cdef object float_of(object value, str name):
    """Return a number as a float. Raise ArgumentTypeError for other types, ArgumentError for numbers outside the range."""
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, Real):  # a time is an int for NumPy
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: a number")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: a number within the range of floats") from None


cdef int32_t term_of_seconds(object seconds) except -1:
    """Return the term of a page expected back after `seconds`; UNKNOWN for None."""
    cdef int32_t term = UNKNOWN + 1
    cdef double value
    if seconds is None:
        return UNKNOWN
    value = float_of(seconds, "seconds")
    if not value >= 0:
        raise ArgumentError(f"seconds: got {shown(seconds)}, allowed: at least 0, or None")
    while term < LAST_TERM and value >= <int64_t>1 << term:
        term += 1
    assert UNKNOWN < term <= LAST_TERM < NEVER
    return NEVER if isinf(value) else term


cdef Py_ssize_t size_of(object value, str name, Py_ssize_t lowest=0, Py_ssize_t highest=MAX_PAGES) except -1:
    """Return `value` as a size; the error names the value and the allowed range."""
    cdef int overflow = 0
    cdef long long size
    if type(value) is not int:
        value = index_of(value, name)
    size = as_long_long(value, &overflow)
    if overflow or not lowest <= size <= highest:
        raise ArgumentError(f"{name}: got {shown(value)}, allowed: {lowest} to {highest}")
    return size


cdef int32_t int32_of_index(object value) except? -1:
    """Convert a value that is no plain int32: the rare part of `int32_of`, kept apart so that the rest is inlined."""
    cdef long long number
    try:
        if isinstance(value, bool):
            raise TypeError
        value = as_index(value)
    except TypeError:
        raise TypeError(f"got {type(value).__name__}") from None
    number = value
    if not INT32_MIN <= number <= INT32_MAX:
        raise OverflowError(f"got {number}")
    return <int32_t>number


cdef object explained(str name, object error):
    """Return the typed error for an error that `int32_of` raised."""
    cls, got = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError, str(error)
    if not got.startswith("got"):  # the message of Python's C conversion
        got = "got an int beyond 64 bits"
    return cls(f"{name}: {got}, allowed: ints that fit int32")


cdef int32_t page_id_of(object value) except? -1:
    try:
        return int32_of(value)
    except (OverflowError, TypeError) as error:
        raise explained("page id", error) from None


cdef int32_t group_of(object group) except -1:
    return <int32_t>size_of(group, "group", 0, MAX_GROUP)


cdef enum:
    IS_CONTIGUOUS = 0x1       # flags of a NumPy array
    IS_ALIGNED = 0x100


cdef int require_array_layout() except -1:
    """Raise ImportError if NumPy's arrays have another head than `ArrayHead`."""
    array = np.arange(3, dtype=np.int32)[1:]
    cdef const ArrayHead *head = <ArrayHead *><void *>array
    known = head.num_dims, <size_t>head.data, head.flags, <object>head.dtype
    if known != (1, array.__array_interface__["data"][0], array.flags.num, array.dtype) or head.shape[0] != 2:
        raise ImportError(f"numpy: got {np.__version__}, whose arrays have another layout, allowed: 1.26 to 2.x")
    return 0


require_array_layout()


cdef const ArrayHead *int32_vector_in(object array) noexcept:
    """Return the head of a NumPy array that is a contiguous int32 vector, else NULL. The buffer protocol would cost more."""
    cdef const ArrayHead *head = <ArrayHead *><void *>array
    cdef int wanted = IS_CONTIGUOUS | IS_ALIGNED
    if head.num_dims != 1 or head.dtype != <PyObject *>INT32 or head.flags & wanted != wanted:
        return NULL
    return head


cdef object as_int32_array(object values, str name):
    """Return a NumPy array as a contiguous int32 vector, copied only if necessary."""
    if type(values) is not ndarray:
        values = np.asarray(require_unmasked(name, values))  # a subclass may lie about itself
    if values.ndim != 1 or (values.dtype is not INT32 and values.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"{name}: got an array of {values.dtype} with {values.ndim} dimensions, allowed: one of ints with 1 dimension"
        )
    if values.dtype is INT32:
        return np.require(values, np.int32, ["C", "A"])
    if values.dtype == INT32:  # a dtype with metadata
        return values.astype(INT32)
    if values.size and not (INT32_MIN <= values.min() and values.max() <= INT32_MAX):
        raise ArgumentError(f"{name}: got {values.min()} to {values.max()}, allowed: ints that fit int32")
    return np.ascontiguousarray(values, dtype=np.int32)


cdef object array_of(const int32_t *values, Py_ssize_t n):
    """Return a new int32 array."""
    assert n >= 0
    array = empty(n, INT32)
    if n:
        memcpy(int32_vector_in(array).data, values, n * sizeof(int32_t))
    return array


cdef list as_list(object values, str name, bint is_ordered=True):
    """Return `values` if it is a list, else a list of its items."""
    if type(values) is list:
        return values
    if type(values) is tuple:
        return list(values)
    return listed(name, values, "a list or an array", is_ordered=is_ordered)


cdef object require_instance(object value, type kind, str name):
    """Return `value`, which must be of this final class."""
    if type(value) is not kind:
        raise ArgumentTypeError(f"{name}: got {type(value).__name__}, allowed: {kind.__name__}")
    return value


cdef object require_matrix(object values, object dtype, str name):
    """Return `values`, which must be a matrix of this type. A subclass, which may lie about itself, becomes a plain array."""
    if isinstance(values, ndarray) and type(values) is not ndarray:
        values = np.asarray(require_unmasked(name, values))
    if not isinstance(values, ndarray) or values.ndim != 2 or values.dtype != dtype:
        allowed = f"allowed: an array of {np.dtype(dtype)} with 2 dimensions"
        raise ArgumentTypeError(f"{name}: got {type(values).__name__}, {allowed}")
    return values


cdef int32_t as_shard(object shard, int32_t num_shards) except? -1:
    """Return `shard` as an index; -1, the whole pool, for None."""
    return -1 if shard is None else <int32_t>size_of(shard, "shard", 0, num_shards - 1)
