# Pages that a request or row holds, listed.

from libc.stdint cimport int32_t

from pagepool.core.holding.groups cimport *
from pagepool.core.holding.skipping cimport *


cdef bint copy_ids(const Holding *holding, tuple copies) noexcept
cdef bint list_last_first(
    const Pool *pool, const Holding *holding, int32_t num_computed, PageIds listed, bint are_worthless
) noexcept
