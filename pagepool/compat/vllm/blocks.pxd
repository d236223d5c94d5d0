from libc.stdint cimport int32_t, int64_t


cdef class Block:
    cdef public object pool
    cdef public object _block_hash
    cdef public Block prev_free_block
    cdef public Block next_free_block
    cdef int64_t num_hash_tokens    # NO_TOKENS: None
    cdef public int32_t block_id
    cdef public int32_t ref_cnt
    cdef public bint is_null


cdef class HashWatcher:
    cdef int note_hash(self, Block block) except -1


cdef class BlockQueue:
    cdef public Block fake_free_list_head
    cdef public Block fake_free_list_tail
    cdef public Py_ssize_t num_free_blocks


cdef class BlockMap:
    cdef public dict _cache


cdef enum:
    NO_TOKENS = -1


cdef Block as_block(object value)
cdef list first_blocks(BlockQueue queue, Py_ssize_t n)
cdef int check_queued(Block block) except -1
cdef int check_unqueued(Block block) except -1
cdef int join(BlockQueue queue, Block before, list blocks) except -1
cdef int leave(BlockQueue queue, Block block) except -1
cdef int leave_front(BlockQueue queue, list blocks) except -1

cdef Block find_block(dict cache, bytes key)
cdef bint has_block(dict cache, bytes key, int32_t block_id) except -1
cdef int add_block(dict cache, bytes key, Block block) except -1
cdef object take_out(dict cache, bytes key, int32_t block_id)
