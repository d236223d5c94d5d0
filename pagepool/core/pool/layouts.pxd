# Where the arrays and numbers of a pool lie, by name.

from libc.stdint cimport int32_t

from pagepool.core.pool.store cimport *

cdef enum:
    MAX_ITEMS = 80

cdef struct Item:
    const char *name
    int32_t type              # index in `TYPES`
    bint is_number            # not an array
    void *start               # NULL: the pool does not have it
    Py_ssize_t size           # bytes

cdef struct Items:
    Item items[MAX_ITEMS]
    Py_ssize_t num


cdef Pool *pool_of(PageStore store, bint of_tier) except NULL
cdef void list_items(const Pool *pool, Items *items) noexcept nogil
