# Values from Python, checked at the boundary.

from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t

from pagepool.core.base cimport Digest, WideDigest


cdef extern from *:
    """
    /* The head of a NumPy array. Its layout is part of NumPy's binary interface, so no headers of NumPy are needed. */
    typedef struct {
        PyObject_HEAD
        char *data;
        int num_dims;
        Py_ssize_t *shape;
        Py_ssize_t *strides;
        PyObject *base;
        PyObject *dtype;
        int flags;
    } pagepool_array;
    """
    ctypedef struct ArrayHead "pagepool_array":
        void *data
        int num_dims
        Py_ssize_t *shape
        PyObject *dtype
        int flags

cdef extern from "Python.h":
    long long as_long_long "PyLong_AsLongLongAndOverflow" (object value, int *overflow) except? -1


cdef Digest digest_of_bytes(bytes data) except *
cdef Digest digest_of_int(object value) except *
cdef WideDigest wide_of_int(object value, bint is_wide) except *
cdef object index_of(object value, str name)
cdef object float_of(object value, str name)
cdef int32_t term_of_seconds(object seconds) except -1
cdef Py_ssize_t size_of(object value, str name, Py_ssize_t lowest=*, Py_ssize_t highest=*) except -1
cdef int32_t int32_of_index(object value) except? -1
cdef object explained(str name, object error)
cdef int32_t page_id_of(object value) except? -1
cdef int32_t group_of(object group) except -1
cdef const ArrayHead *int32_vector_in(object array) noexcept
cdef object as_int32_array(object values, str name)
cdef object array_of(const int32_t *values, Py_ssize_t n)
cdef list as_list(object values, str name, bint is_ordered=*)
cdef object require_instance(object value, type kind, str name)
cdef object require_matrix(object values, object dtype, str name)
cdef int32_t as_shard(object shard, int32_t num_shards) except? -1


cdef inline object int_of_digest(Digest digest):
    return <object>digest.hi << 64 | <object>digest.lo


cdef inline object int_of_wide(WideDigest digest):
    key = int_of_digest(digest.key)
    return int_of_digest(digest.upper) << 128 | key if digest.upper.lo | digest.upper.hi else key


cdef inline int32_t int32_of(object value) except? -1:
    """Return `value` as int32, or raise an error for `explained`. A plain int, the only kind on hot paths, is read first."""
    cdef long long number
    if PyLong_CheckExact(value):
        number = value
        if INT32_MIN <= number <= INT32_MAX:
            return <int32_t>number
    return int32_of_index(value)
