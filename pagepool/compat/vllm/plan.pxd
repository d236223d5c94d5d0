from libc.stdint cimport int64_t

from pagepool.compat.vllm.blocks cimport FreeQueue


cdef class GroupPlan:
    cdef object manager             # vLLM's own
    cdef object held                # request id to list of blocks
    cdef dict num_cached            # request id to number of cached blocks
    cdef dict partial_hits          # request id to hit inside a block
    cdef object suffix              # group id at the end of its keys
    cdef object null_block
    cdef int64_t block_size         # tokens
    cdef int64_t window             # tokens kept, or EVERYTHING
    cdef bint is_known              # full attention or a window; other kinds use their manager's methods
    cdef bint is_masked             # only some blocks are cached, by their place
    cdef bint has_partial_tail      # a prompt's end may be cached inside a block
    cdef bint is_caching
    cdef bint is_recording          # the engine zeroes new blocks
    cdef bint is_eagle


cdef class Plan:
    cdef list groups                # GroupPlan objects
    cdef object pool
    cdef FreeQueue queue
    cdef object coordinator
    cdef object nothing             # vLLM's KVCacheBlocks without blocks
    cdef int64_t max_model_len
    cdef int64_t hash_block_size    # tokens
    cdef int64_t num_lag            # last computed tokens that may be computed again
    cdef int64_t alignment          # hits of several groups end at multiples of it, in tokens; 0: anywhere
    cdef bint is_hybrid
    cdef bint has_others            # some group is of another kind
    cdef bint needs_processed       # some group gives blocks back as tokens are processed


cdef enum:
    EVERYTHING = -1

cdef Plan plan_of(object manager)
