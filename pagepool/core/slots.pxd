# Slots for the next tokens of requests.

from libc.stdint cimport int32_t, int64_t

from pagepool.core.groups cimport CacheGroups
from pagepool.core.ids cimport PageIds
from pagepool.core.lookups cimport RequestHashes
from pagepool.core.request_pages cimport RequestPages, Step
from pagepool.core.store cimport PageStore

cdef struct Counts:           # tokens of a call of `allocate_slots`
    int64_t num_computed      # before the call
    int64_t num_new_computed  # in hits
    int64_t num_tokens        # with those, external ones and new ones
    int64_t num_slots         # with lookahead tokens, at most those of the model
    int64_t num_reserved      # pages to leave free


cdef class SlotAllocator:
    cdef PageStore store
    cdef CacheGroups groups
    cdef object coordinator
    cdef object lookups             # `PrefixLookups`
    cdef dict requests              # request id -> RequestPages
    cdef dict hashes                # request id -> RequestHashes
    cdef readonly tuple _no_ids
    cdef int64_t max_num_tokens
    cdef int64_t hash_page_size
    cdef int64_t interval           # of checkpoints, in tokens; 0: none are kept
    cdef bint enables_caching
    cdef bint hashes_natively

    cdef int refuse_length(self, object request_id, object num_tokens) except -1
    cdef object allocate_due(
        self, object request, object request_id, Counts *counts, object new_computed_pages, bint is_delayed, object hint,
        object data_parallel_size
    )
    cdef tuple read_hits(self, object request_id, object new_computed_pages)
    cdef int64_t count_most_tokens(self, tuple hits) except -1
    cdef int64_t count_tokens(self, tuple hits, Py_ssize_t group) except -1
    cdef int check_computed(self, object request_id, const Counts *counts, tuple hits, RequestPages held) except -1
    cdef PageIds read_tokens(self, object request, RequestHashes hashes, Py_ssize_t num_pages)
    cdef int32_t count_shards(self, RequestPages held, bint has_hits, object hint, object data_parallel_size) except -1
    cdef int name_pages(
        self, RequestHashes hashes, RequestPages held, tuple hits, int64_t num_computed, int64_t num_tokens
    ) except -1
    cdef int keep_refusal(self, RequestHashes hashes, RequestPages held, tuple hits, const Step *step) except -1
