from libc.stdint cimport int32_t, int64_t


cdef class Block:
    cdef public object pool
    cdef public object _block_hash
    cdef public Block prev_free_block
    cdef public Block next_free_block
    cdef int64_t num_hash_tokens    # NO_TOKENS stands for None
    cdef public int32_t block_id
    cdef public int32_t ref_cnt
    cdef public bint is_null


cdef class FreeQueue:
    cdef public Py_ssize_t num_free_blocks
    cdef readonly bint listens      # whether `slots.pyx` reports the request for which it takes, hits and caches blocks

    cdef int check_number(self, Py_ssize_t n, str name) except -1
    cdef list take_blocks(self, Py_ssize_t n)
    cdef int touch(self, list blocks) except -1
    cdef int requeue(self, list first, list last) except -1
    cdef int require_in(self, Block block) except -1
    cdef int require_out(self, Block block) except -1
    cdef int note_hash(self, Block block) except -1
    cdef int begin_span(self) except -1
    cdef int end_span(self, list blocks, Py_ssize_t start, Py_ssize_t stop) except -1
    cpdef int note_request(self) except -1
    cdef int begin_turn(self, object request) except -1
    cdef int go_on(self, object request_id) except -1
    cdef int end_call(self) except -1


cdef class BlockQueue(FreeQueue):
    cdef public Block fake_free_list_head
    cdef public Block fake_free_list_tail


cdef class BlockMap:
    cdef public dict _cache


cdef enum:
    NO_TOKENS = -1


cdef Block as_block(object value)
cdef int check_unheld(list blocks) except -1

cdef Block find_first_block(dict cache, bytes key)
cdef bint has_block(dict cache, bytes key, int32_t block_id) except -1
cdef int add_block(dict cache, bytes key, Block block) except -1
cdef object remove_block(dict cache, bytes key, int32_t block_id)
