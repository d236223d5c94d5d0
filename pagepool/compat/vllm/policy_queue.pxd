from libc.stdint cimport int32_t

from pagepool.compat.vllm.blocks cimport Block, FreeQueue
from pagepool.core.pool cimport PageStore, Ranking
from pagepool.core.values cimport PageIds


cdef class PolicyQueue(FreeQueue):
    cdef readonly PageStore store       # one page per block, with the same id: free, or held once
    cdef list blocks                    # indexed by block id
    cdef Block null_block               # block 0 until it is taken, then None
    cdef Ranking *rankings              # [num_blocks] ranking of a request, kept with its last cached block
    cdef PageIds ids                    # scratch array, kept between calls
    cdef bint caches_late               # new hashes are cached at the end of the span
    cdef int32_t session                # number of the session for which blocks are taken, hit and cached, or NOBODY

    cdef int32_t id_of(self, Block block) noexcept
    cdef bint has(self, Block block) noexcept
    cdef int32_t number_of_taker(self) noexcept
    cdef void forget_ranking(self, int32_t page_id) noexcept
    cdef void report_hit(self, int32_t page_id) noexcept
    cdef int refuse_block(self, list blocks, Py_ssize_t bad) except -1
    cdef void put_ids(self, Py_ssize_t num_first, Py_ssize_t num) noexcept
    cdef bint set_entry(self, int32_t page_id, bytes key, Ranking *ranking, const int32_t *ids, int32_t place) except -1
    cdef int32_t id_behind(self, int32_t page_id) noexcept
