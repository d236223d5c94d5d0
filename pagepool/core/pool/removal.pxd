# A page loses its entry in the prefix index.

from libc.stdint cimport int32_t, uint32_t

from pagepool.core.pool.departures cimport *
from pagepool.core.pool.victim cimport *


# These functions are in a module, since in a header their size would change what compilers inline in the loops that take pages.
cdef void uncache_for(Pool *pool, int32_t page_id, uint32_t why) noexcept nogil
cdef void uncache(Pool *pool, int32_t page_id) noexcept nogil
