# Policies by name.

from pagepool.core.records cimport Pool


cdef tuple checked_policy(object name, object ghost_size)
cdef int set_policy(Pool *pool, object name, object ghost_size) except -1
cdef bint make_lru(Pool *pool) noexcept
cdef void free_policy(Pool *pool) noexcept
