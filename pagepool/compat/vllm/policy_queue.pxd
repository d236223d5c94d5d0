from libc.stdint cimport int32_t

from pagepool.compat.vllm.blocks cimport Block, HashWatcher
from pagepool.core.ids cimport PageIds
from pagepool.core.records cimport Ranking
from pagepool.core.store cimport PageStore


cdef class PolicyQueue(HashWatcher):
    cdef readonly PageStore store       # a page for each block, of the same id: free, or held once
    cdef list blocks                    # by id
    cdef Block null_block               # block 0 until it is taken
    cdef Ranking *rankings              # [num_blocks] of a request, as of the block that it cached last
    cdef PageIds ids                    # room for a call
    cdef bint is_entering               # blocks that get a hash are entered together

    cpdef void note_request(self) noexcept
    cdef int32_t id_of(self, Block block) noexcept
    cdef void forget_ranking(self, int32_t page_id) noexcept
    cdef int32_t id_behind(self, int32_t page_id) noexcept
    cdef int touch(self, list blocks) except -1
    cdef int put_back(self, list first, list last) except -1
    cdef int refuse(self, list blocks, Py_ssize_t bad) except -1
    cdef void put_ids(self, Py_ssize_t num_first, Py_ssize_t num) noexcept
    cdef int set_entry(self, int32_t page_id, bytes key, Ranking *ranking, const int32_t *ids, int32_t place) except -1
    cdef int enter_span(self, list blocks, Py_ssize_t start, Py_ssize_t stop) except -1
