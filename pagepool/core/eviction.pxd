# Policies by name.

from pagepool.core.records cimport Pool


cdef str checked_policy(object name)
cdef int set_policy(Pool *pool, str name) except -1
cdef bint make_blank_part(Pool *pool) noexcept
cdef void free_policy(Pool *pool) noexcept
