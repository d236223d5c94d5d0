from pagepool.compat.vllm.blocks cimport FreeQueue


cdef struct Filled:            # full blocks of a request
    Py_ssize_t start
    Py_ssize_t stop
    Py_ssize_t block_size      # tokens
    Py_ssize_t stride          # hashes per block


cdef bytes suffix_of(object group_id)
cdef bytes block_key_of(object block_hash, object suffix)
cdef FreeQueue queue_of(object pool)
cdef list take_blocks(object pool, FreeQueue queue, Py_ssize_t n)
cdef int give_blocks_back(object pool, FreeQueue queue, object blocks) except -1
cdef bint enter_blocks(object pool, list blocks, list hashes, Filled filled, object mask, object suffix) except -1
cdef int cache_as_vllm(object pool, object request, object blocks, Filled filled, dict options) except -1
