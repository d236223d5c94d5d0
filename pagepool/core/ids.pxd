# Page ids and token ids in native memory.

cimport cython
from libc.stdint cimport int32_t


cdef class PageIds:
    cdef int32_t *ids
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef Py_buffer view             # of the array that the ids are in, if they are not the object's own

    cdef int reserve(self, Py_ssize_t num_more) except -1
    cdef bint try_reserve(self, Py_ssize_t num_more) noexcept
    cdef void put(self, const int32_t *ids, Py_ssize_t n) noexcept
    cdef int add(self, const int32_t *ids, Py_ssize_t n) except -1
    cdef int add_items(self, list items, Py_ssize_t start, Py_ssize_t stop, str name=*) except -1
    cdef int fill(self, object values) except -1


cpdef tuple lists_of(tuple groups)
cdef tuple new_ids(Py_ssize_t num_groups)
cdef PageIds as_page_ids(object values, str name=*)
cdef PageIds as_own_ids(object values, str name)
cdef int refuse_negative(const int32_t *token_ids, Py_ssize_t n, Py_ssize_t first) except -1
