# Copies, and arrays that grow. Always: an array without memory has no capacity, and a failed change leaves the array as it is.

from libc.string cimport memcpy

from pagepool.core.base.platform cimport *


cdef inline void copy_bytes(void *target, const void *source, size_t size) noexcept nogil:
    """Copy bytes. An empty array may be NULL, which memcpy must not get, so a size of 0 copies nothing."""
    if size:
        memcpy(target, source, size)


cdef inline bint resize(void **memory, size_t size) noexcept nogil:
    """Reallocate an array; return False, with nothing changed, if memory is short."""
    cdef void *resized = raw_realloc(memory[0], size)
    if resized != NULL:
        memory[0] = resized
    return resized != NULL


cdef inline bint reserve_items(void **items, Py_ssize_t *capacity, Py_ssize_t num, size_t size) noexcept nogil:
    """Make room for `num` items in an array whose capacity doubles; return False, with nothing changed, if memory is short."""
    cdef Py_ssize_t increased = max(num, 2 * capacity[0], 4)
    assert num >= 0 and capacity[0] >= 0 and (items[0] != NULL or capacity[0] == 0)
    if num <= capacity[0]:
        return True
    if not resize(items, increased * size):
        return False
    capacity[0] = increased
    return True
