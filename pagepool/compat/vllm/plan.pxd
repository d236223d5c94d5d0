from libc.stdint cimport int64_t

from pagepool.compat.vllm.blocks cimport FreeQueue


cdef class GroupPlan:
    cdef object manager             # vLLM's
    cdef object held                # blocks by request
    cdef dict num_cached            # blocks by request
    cdef dict partial_hits          # by request
    cdef object suffix              # of its keys
    cdef object null_block
    cdef int64_t block_size         # tokens
    cdef int64_t window             # tokens that stay, or EVERYTHING
    cdef bint is_known              # full attention or a window; else its manager's own methods are called
    cdef bint is_masked             # which blocks are cached depends on their place
    cdef bint has_partial_tail      # a prompt's end may be cached inside a block
    cdef bint is_caching
    cdef bint is_recording          # new blocks are to be zeroed
    cdef bint is_eagle


cdef class Plan:
    cdef list groups                # of GroupPlan
    cdef object pool
    cdef FreeQueue queue
    cdef object coordinator
    cdef object nothing             # what stands for no blocks
    cdef int64_t max_model_len
    cdef int64_t hash_block_size    # tokens
    cdef int64_t num_lag            # computed tokens at the end that may be computed again
    cdef int64_t alignment          # tokens: hits of several groups end at multiples of it; 0: anywhere
    cdef bint is_hybrid
    cdef bint has_others            # groups that are not known
    cdef bint needs_processed       # a group gives blocks back behind the processed tokens


cdef enum:
    EVERYTHING = -1

cdef Plan plan_of(object manager)
