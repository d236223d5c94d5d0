from libc.stdint cimport int32_t

from pagepool.compat.vllm.blocks cimport Block, FreeQueue
from pagepool.core.pool.records cimport Ranking
from pagepool.core.pool.store cimport PageStore
from pagepool.core.values.ids cimport PageIds


cdef class PolicyQueue(FreeQueue):
    cdef readonly PageStore store       # a page for each block, of the same id: free, or held once
    cdef list blocks                    # by id
    cdef Block null_block               # block 0 until it is taken
    cdef Ranking *rankings              # [num_blocks] of a request, as of the block that it cached last
    cdef PageIds ids                    # room for a call
    cdef bint is_entering               # blocks that are given a hash are entered together

    cdef int32_t id_of(self, Block block) noexcept
    cdef bint has(self, Block block) noexcept
    cdef void forget_ranking(self, int32_t page_id) noexcept
    cdef void hit(self, int32_t page_id) noexcept
    cdef int refuse(self, list blocks, Py_ssize_t bad) except -1
    cdef void put_ids(self, Py_ssize_t num_first, Py_ssize_t num) noexcept
    cdef bint set_entry(self, int32_t page_id, bytes key, Ranking *ranking, const int32_t *ids, int32_t place) except -1
    cdef int32_t id_behind(self, int32_t page_id) noexcept
