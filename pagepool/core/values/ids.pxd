# Page ids and token ids in native memory.

cimport cython
from libc.stdint cimport int32_t

cdef extern from *:
    """
    /* Read a non-negative int of one digit, up to 30 bits. The macro reads an item of a list, without a reference. */
    static inline int pagepool_is_small(PyObject *value, int32_t *number) {
        if (!PyLong_CheckExact(value)) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact((PyLongObject *)value)) return 0;
        *number = (int32_t)PyUnstable_Long_CompactValue((PyLongObject *)value);
        return *number >= 0;
    #else
        if (Py_SIZE(value) != 0 && Py_SIZE(value) != 1) return 0;
        *number = Py_SIZE(value) ? (int32_t)((PyLongObject *)value)->ob_digit[0] : 0;
        return 1;
    #endif
    }
    #define pagepool_is_small_item(list, i, number) pagepool_is_small(PyList_GET_ITEM(list, i), number)
    """
    bint is_small "pagepool_is_small" (object value, int32_t *number)
    bint is_small_item "pagepool_is_small_item" (list items, Py_ssize_t i, int32_t *number)


cdef class PageIds:
    cdef int32_t *ids
    cdef Py_ssize_t num
    cdef Py_ssize_t capacity
    cdef object array               # NumPy array whose ids are borrowed; None: the object owns its ids

    cdef int reserve(self, Py_ssize_t num_more) except -1
    cdef bint try_reserve(self, Py_ssize_t num_more) noexcept
    cdef void put(self, const int32_t *ids, Py_ssize_t n) noexcept
    cdef int add(self, const int32_t *ids, Py_ssize_t n) except -1
    cdef int add_items(self, list items, Py_ssize_t start, Py_ssize_t stop, str name=*) except -1
    cdef int fill(self, object values) except -1


cpdef tuple lists_of(tuple groups)
cdef tuple new_ids(Py_ssize_t num_groups)


cdef inline const int32_t *ids_in(PageIds ids) noexcept:
    """Return the ids; NULL for None and for empty ids."""
    return ids.ids if ids is not None and ids.num else NULL


cdef object changed_values(str name)
cdef PageIds as_page_ids(object values, str name=*)
cdef PageIds as_own_ids(object values, str name)
cdef int refuse_negative(const int32_t *token_ids, Py_ssize_t n, Py_ssize_t first) except -1
