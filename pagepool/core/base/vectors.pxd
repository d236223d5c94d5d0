# Arrays of ids, read several values at once.

from libc.stdint cimport int32_t


cdef inline int32_t signs_of(const int32_t *values, Py_ssize_t n) noexcept nogil:
    """A value below 0 if any of the values is."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    for i in range(n):  # several at once, for there is no way out
        signs |= values[i]
    return signs


cdef inline Py_ssize_t find_negative(const int32_t *values, Py_ssize_t n) noexcept nogil:
    """Index of a value below 0, or -1."""
    cdef Py_ssize_t i
    if signs_of(values, n) < 0:
        for i in range(n):
            if values[i] < 0:
                return i
    return -1
