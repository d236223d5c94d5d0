# Arrays of ids, read several values at a time.

from libc.stdint cimport int32_t


cdef inline int32_t signs_of(const int32_t *values, Py_ssize_t n) noexcept nogil:
    """Return a negative number if any value is negative."""
    cdef Py_ssize_t i
    cdef int32_t signs = 0
    for i in range(n):  # no early exit, so that it vectorises
        signs |= values[i]
    return signs


cdef inline Py_ssize_t find_negative(const int32_t *values, Py_ssize_t n) noexcept nogil:
    """Return the index of the first negative value, or -1."""
    cdef Py_ssize_t i
    if signs_of(values, n) < 0:
        for i in range(n):
            if values[i] < 0:
                return i
    return -1
