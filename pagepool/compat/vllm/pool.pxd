from pagepool.compat.vllm.blocks cimport Block, BlockQueue


cdef struct Filled:            # blocks of a request that are full
    Py_ssize_t start
    Py_ssize_t stop
    Py_ssize_t block_size      # tokens
    Py_ssize_t stride          # hashes a block


cdef bytes suffix_of(object group_id)
cdef bytes key_of(object block_hash, object suffix)
cdef BlockQueue queue_of(object pool)
cdef list take_blocks(object pool, BlockQueue queue, Py_ssize_t n)
cdef int hand_out(object pool, list blocks) except -1
cdef Block own_block(object pool, object value)
cdef dict release(object pool, object blocks, list first, list last)
cdef int give_others_back(dict others) except -1
cdef int give_blocks_back(object pool, BlockQueue queue, object blocks) except -1
cdef bint enter_blocks(object pool, list blocks, list hashes, Filled filled, object mask, object suffix) except -1
